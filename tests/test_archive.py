"""The archive keeps the newest distinct tasks, samples them fairly, and survives JSON, tables and a resume."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trl_populora.sandbox.values import encode
from trl_populora.tasks import make_task
from trl_populora.tasks.archive import TaskArchive, load_archive, load_seed_tasks, save_archive
from trl_populora.tasks.dataset import read_tasks
from trl_populora.tasks.kind import Task


def make(number, kind="code_o", program="def f(x):\n    return x + {}"):
    return Task(
        kind, program.format(number), (encode((number,)),), (encode(2 * number),), author="teacher_0", step=number
    )


def contents(archive):
    """Everything that decides what is sampled and accepted next."""
    return list(archive.entries()), archive.coverage.state_dict()


def saved_and_loaded(archive, path, cap=16384):
    save_archive(archive, path)
    read = TaskArchive(cap)
    load_archive(read, path, json.loads(json.dumps(archive.coverage.state_dict())))
    return read


def test_adding_a_task_twice_changes_nothing():
    archive = TaskArchive()
    assert archive.add(make(1))
    before = contents(archive)
    assert not archive.add(make(1))
    assert not archive.add(replace(make(1), author="teacher_1", step=9))
    assert contents(archive) == before
    assert len(archive) == 1
    assert make(1) in archive
    assert make(2) not in archive
    assert "code_o" not in archive


@pytest.mark.parametrize(
    ("change", "duplicate"),
    [
        ({"program": "def f(y):  # the same\n        return y + 1\n"}, True),
        ({"program": "import re\n\ndef f(x):\n    pass\n    unused = [x]\n    return x + 1\n    x = 3"}, True),
        ({"outputs": (encode(7),)}, True),  # the program decides the output
        ({"program": "def f(x):\n    return x + 2"}, False),
        ({"inputs": (encode((2,)),)}, False),
        ({"kind": "code_i"}, False),
        ({"message": "hint"}, False),
    ],
)
def test_what_makes_a_duplicate(change, duplicate):
    archive = TaskArchive()
    archive.add(make(1))
    assert archive.add(replace(make(1), **change)) is not duplicate


def test_the_order_of_code_f_inputs_and_the_layout_of_its_hint_do_not_count():
    inputs = tuple(encode((n,)) for n in range(4))
    task = Task("code_f", "def f(x):\n    return x", inputs, tuple(encode(n) for n in range(4)), "A hint", 2)
    archive = TaskArchive()
    assert archive.add(task)
    assert not archive.add(replace(task, inputs=inputs[::-1], outputs=task.outputs[::-1], message=" a\n hint"))
    assert archive.add(replace(task, message="another"))


def test_another_order_of_the_same_dictionary_makes_no_other_task():
    archive = TaskArchive()
    orders = [encode(({"b": 1, "a": 2},), ordered=True), encode(({"a": 2, "b": 1},), ordered=True)]
    assert orders[0] != orders[1]
    assert [archive.add(replace(make(1), inputs=(text,))) for text in orders] == [True, False]
    assert all(archive.add(Task("mine", "24", (text,), ())) for text in ('["d"', '["d",'))


def test_programs_are_counted_with_their_constants_apart_and_for_good(tmp_path):
    archive = TaskArchive(cap=1)
    programs = [
        "def f(x):\n    return x + {}",
        "def f(y):\n    pass\n    return y + {}",
        "def f(x):\n    return x * {}",
    ]
    for number in (1, 2):
        for program in programs:
            archive.add(make(number, program=program))
    archive.add(replace(make(1), kind="code_i"))
    assert archive.programs == 2
    again = saved_and_loaded(archive, tmp_path / "archive.parquet")
    assert again.programs == 2


def test_texts_that_are_no_programs_are_compared_as_they_are():
    """A user's own kind: `24` and `25` both parse as Python, and must not be taken for empty programs."""
    archive = TaskArchive()
    texts = ["24", "25", "'a'", "'b'", "x = 1", "y = 1", "3 4 5 -> 12", "((((("]
    assert all(archive.add(Task("arithmetic", text, (), ())) for text in texts)
    assert not any(archive.add(Task("arithmetic", text + "\n", (), ())) for text in texts)
    assert archive.metrics()["curriculum/coverage"] == 0


def test_the_cap_holds_per_kind_and_the_newest_stay():
    archive = TaskArchive(cap=3)
    for number in range(5):
        archive.add(make(number))
    archive.add(make(0, kind="code_i"))
    assert [task.step for task in archive] == [2, 3, 4, 0]
    assert make(0) not in archive
    assert archive.add(make(0))  # forgotten, so new again
    assert [task.step for task in archive][:3] == [3, 4, 0]
    with pytest.raises(ValueError, match="at least 1 task per kind, got 0"):
        TaskArchive(cap=0)


def test_coverage_remembers_what_was_evicted():
    archive = TaskArchive(cap=1)
    for operator in "+-*/":
        archive.add(make(1, program=f"def f(x):\n    return x {operator} {{}}"))
    assert archive.metrics() == {"archive/size": 1.0, "curriculum/coverage": 4.0, "curriculum/entropy": 2.0}


def test_an_empty_archive_has_every_metric():
    assert TaskArchive().metrics() == {"archive/size": 0.0, "curriculum/coverage": 0.0, "curriculum/entropy": 0.0}


def test_sampling_is_without_replacement_and_uniform_over_kinds():
    archive = TaskArchive(cap=4)
    for number in range(6):
        archive.add(make(number))
    for number in (6, 7):
        archive.add(make(number, kind="code_i"))
    rng = random.Random(0)
    counts = Counter()
    for _ in range(3000):
        drawn = archive.sample(["code_o", "code_i", "code_f", "code_o"], 3, rng)
        assert len({task.task_id for task in drawn}) == 3
        counts.update(task.step for task in drawn)
    assert set(counts) == set(range(2, 8))
    assert all(abs(count - 1500) < 150 for count in counts.values())  # 5 standard deviations


def test_sampling_returns_fewer_when_there_are_fewer():
    archive = TaskArchive()
    assert archive.sample(["code_o"], 3, random.Random(0)) == []
    archive.add(make(1))
    assert archive.sample(["code_o"], 3, random.Random(0)) == [make(1)]
    assert archive.sample(["code_i"], 3, random.Random(0)) == []


def test_a_resumed_archive_goes_on_as_if_nothing_had_happened(tmp_path):
    straight = TaskArchive(cap=5)
    for number in range(8):
        straight.add(make(number, kind=("code_o", "code_i")[number % 3 == 0]))
    resumed = saved_and_loaded(straight, tmp_path / "archive.parquet", cap=5)
    assert list(resumed) == list(straight)
    one, two = random.Random(1), random.Random(1)
    for number in range(8, 20):
        assert straight.add(make(number % 15)) == resumed.add(make(number % 15))
        assert straight.sample(["code_i", "code_o"], 3, one) == resumed.sample(["code_i", "code_o"], 3, two)
    assert contents(resumed) == contents(straight)
    assert resumed.metrics() == straight.metrics()


def test_an_archive_with_keys_of_another_normal_form_seeds_a_run_and_resumes_none(tmp_path):
    archive, path = TaskArchive(), tmp_path / "archive.parquet"
    tasks = [make(1), make(2), make(1, program="def f(y):\n    return y * {}"), Task("mine", "24", (), ())]
    for task in tasks:
        archive.add(task)
    save_archive(archive, path)
    table = pq.read_table(path)
    older = table.set_column(table.column_names.index("key"), "key", [[f"{n:032x}" for n in range(len(tasks))]])
    pq.write_table(older.replace_schema_metadata({"populora_archive": "4"}), path)
    with pytest.raises(ValueError, match="`populora_archive` of the schema is 4, this version reads 5.*`seed_tasks`"):
        load_archive(TaskArchive(), path, archive.coverage.state_dict())
    read = TaskArchive.from_dataset(read_tasks(str(path)))
    assert contents(read) == contents(archive)
    assert not any(read.add(task) for task in tasks)
    assert read.programs == archive.programs == 3


def test_what_an_own_kind_measures_is_a_column_and_survives(tmp_path):
    archive, path = TaskArchive(), tmp_path / "archive.parquet"
    tasks = [make(1), make(2, kind="mine"), make(3, kind="mine"), make(4, kind="other")]
    for task in tasks:
        archive.add(task)
    archive.note(tasks[0], match=0, solve_rate=0.5, ast_depth=4.0)
    archive.note(tasks[1], match=1, solve_rate=1.0, numbers=3.0)
    archive.note(tasks[3], match=1, solve_rate=0.0, atoms=9.0, numbers=1.0)
    save_archive(archive, path)
    table = pq.read_table(path).to_pydict()
    assert table["numbers"] == [None, 3.0, None, 1.0]
    assert table["atoms"] == [None, None, None, 9.0]
    assert table["ast_depth"] == [4.0, None, None, None]
    for _ in range(2):
        read = saved_and_loaded(archive, path)
        assert list(read.entries()) == list(archive.entries())
        assert read.measures == archive.measures == ["atoms", "numbers"]
        archive = read


def test_a_measure_may_be_called_task_or_self(tmp_path):
    archive = TaskArchive()
    archive.add(make(1))
    archive.note(make(1), **{"task": 3.0, "self": 4.0})
    (entry,) = saved_and_loaded(archive, tmp_path / "archive.parquet").entries()
    assert entry[2] == {"task": 3.0, "self": 4.0}


def test_loading_replaces_what_was_there_and_obeys_the_cap(tmp_path):
    full, small = TaskArchive(), TaskArchive(cap=2)
    for number in range(4):
        full.add(make(number))
    small.add(make(99))
    save_archive(full, tmp_path / "archive.parquet")
    load_archive(small, tmp_path / "archive.parquet", full.coverage.state_dict())
    assert [task.step for task in small] == [2, 3]
    assert make(99) not in small
    assert small.add(make(0))


def test_a_saved_archive_opens_as_a_dataset_with_every_field(tmp_path):
    from datasets import load_dataset

    archive = TaskArchive()
    for number in range(3):
        archive.add(make(number))
    inputs = (encode((1,)), encode((2,)))
    archive.add(Task("code_f", "def f(x):\n    return x", inputs, inputs, "hint", 1, "teacher_1", 4))
    path = tmp_path / "archive.parquet"
    save_archive(archive, path)
    read = load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    fields = ["kind", "program", "inputs", "outputs", "message", "visible", "author", "step"]
    noted = ["match", "solve_rate", "ast_depth", "cyclomatic", "lines", "variables"]
    assert read.column_names == [*fields, *noted, "key"]
    assert list(TaskArchive.from_dataset(read)) == list(archive)
    assert len(saved_and_loaded(TaskArchive(), path)) == 0


ROW = make(1).to_record()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"program": None}, "row 1: column `program` is missing or empty"),
        ({"program": 3}, "row 1: column `program` must be a string, got int 3"),
        ({"kind": ["code_o"]}, "row 1: column `kind` must be a string, got list"),
        ({"inputs": "3"}, "row 1: column `inputs` must be a list of strings, got str '3'"),
        ({"inputs": [3]}, "row 1: column `inputs` must be a list of strings"),
        (
            {"inputs": ["(3,)"]},
            r"row 1: column `inputs` holds '\(3,\)', which is no canonical text; its canonical text is '\[\"t\",3\]'",
        ),
        (
            {"inputs": ["f(3)"]},
            r"which is no canonical text; its canonical text is '\[\"t\",3\]'. `trl_populora.tasks.make_task`",
        ),
        ({"outputs": [str([1.5] * 4000)]}, "row 1: column `outputs` holds .*, which is no canonical text"),
        ({"outputs": ["os"]}, "row 1: column `outputs` holds 'os', which is no canonical text. `trl_populora.tasks"),
        ({"inputs": ["3"]}, "row 1: column `inputs` holds '3'; an input is the tuple of arguments"),
        ({"outputs": ["nan"]}, "row 1: column `outputs` holds 'nan', which is no canonical text"),
        ({"outputs": ["3", "4"]}, "row 1: column `outputs` must hold one value per input, got 2 for 1"),
        ({"visible": 2}, "row 1: column `visible` must lie between 0 and the number of inputs"),
        ({"visible": -1}, "row 1: column `visible` must be a non-negative integer"),
        ({"step": True}, "row 1: column `step` must be a non-negative integer, got bool"),
    ],
)
def test_a_broken_row_is_named_with_its_column(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        TaskArchive.from_dataset([ROW, ROW | change])


def test_a_missing_column_is_named_and_an_optional_one_is_not_missed():
    from datasets import Dataset

    needed = {name: [ROW[name]] for name in ("kind", "program", "inputs", "outputs")}
    (task,) = TaskArchive.from_dataset(Dataset.from_dict(needed | {"level": [3]}))
    assert (task.author, task.step, task.visible, task.message) == ("seed", 0, 0, "")
    for column in needed:
        table = Dataset.from_dict({name: cells for name, cells in needed.items() if name != column})
        with pytest.raises(ValueError, match=f"row 0: column `{column}` is missing"):
            TaskArchive.from_dataset(table)


def test_a_task_id_is_a_hash_of_the_content():
    assert make(1).task_id == replace(make(1), author="x", step=7, outputs=()).task_id
    assert (
        len({make(1).task_id, make(2).task_id, make(1, kind="code_i").task_id, replace(make(1), message="m").task_id})
        == 4
    )
    assert len(make(1).task_id) == 16
    assert replace(make(1), message="\ud800").task_id


def test_seed_tasks_are_read_from_a_file(tmp_path):
    path = tmp_path / "seeds.jsonl"
    path.write_text(json.dumps(ROW | {"level": 2}) + "\n\n" + json.dumps(ROW) + "\n")
    assert load_seed_tasks(path) == [make(1), make(1)]
    path.write_text(json.dumps(ROW) + "\n{")
    with pytest.raises(ValueError, match=r"seeds.jsonl, line 2: no JSON object"):
        load_seed_tasks(path)
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1: a task is a JSON object, got list"):
        load_seed_tasks(path)
    path.write_text(json.dumps(ROW | {"outputs": ["[1]"]}))
    with pytest.raises(ValueError, match="line 1: column `outputs`"):
        load_seed_tasks(path)


def test_a_line_of_a_seed_file_may_hold_any_other_line_separator(tmp_path):
    path = tmp_path / "seeds.jsonl"
    row = ROW | {"message": "one\u2028two\x85three"}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n" + json.dumps(ROW), encoding="utf-8")
    assert [task.message for task in load_seed_tasks(path)] == [row["message"], ROW.get("message", "")]
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n{", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2 is no JSON"):
        read_tasks(str(path))


def test_a_seed_file_may_lie_under_a_name_that_looks_like_a_pattern(tmp_path):
    path = tmp_path / "lr[1e-4]*" / "seeds.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps(ROW))
    assert len(read_tasks(str(path))) == 1


def test_cost_per_task_does_not_grow_with_the_archive():
    def seconds_per_task(archive, numbers, rng):
        tasks = [make(number) for number in numbers]
        start = time.thread_time()  # CPU time: other processes do not count
        for task in tasks:
            archive.add(task)
            archive.sample(["code_o"], 6, rng)
        return (time.thread_time() - start) / len(tasks)

    archive, rng = TaskArchive(cap=10000), random.Random(0)
    small = min(seconds_per_task(archive, range(i * 200, i * 200 + 200), rng) for i in range(4))
    seconds_per_task(archive, range(1000, 11000), rng)
    large = min(seconds_per_task(archive, range(11000 + i * 200, 11200 + i * 200), rng) for i in range(4))
    assert len(archive) == 10000
    assert large < 3 * small


class ArchiveMachine(RuleBasedStateMachine):
    """Against the plainest model: one bounded deque per kind."""

    def __init__(self):
        super().__init__()
        self.archive = TaskArchive(cap=4)
        self.model = {"code_o": deque(maxlen=4), "code_i": deque(maxlen=4)}

    @rule(kind=st.sampled_from(["code_o", "code_i"]), number=st.integers(0, 9))
    def add(self, kind, number):
        task, kept = make(number, kind), self.model[kind]
        assert (task in self.archive) == (task in kept)
        assert self.archive.add(task) == (task not in kept)
        if task not in kept:
            kept.append(task)

    @rule(
        kinds=st.lists(st.sampled_from(["code_o", "code_i", "code_f"])), k=st.integers(0, 6), seed=st.integers(0, 99)
    )
    def sample(self, kinds, k, seed):
        drawn = self.archive.sample(kinds, k, random.Random(seed))
        pool = [task for kind in set(kinds) for task in self.model.get(kind, ())]
        assert len(drawn) == len(set(drawn)) == min(k, len(pool))
        assert set(drawn) <= set(pool)

    @rule()
    def save_and_resume(self):
        with tempfile.TemporaryDirectory() as directory:
            self.archive = saved_and_loaded(self.archive, Path(directory, "archive.parquet"), cap=4)

    @invariant()
    def same_tasks_in_the_same_order(self):
        for kind, kept in self.model.items():
            assert [task for task in self.archive if task.kind == kind] == list(kept)
        assert len(self.archive) == sum(map(len, self.model.values()))


TestArchiveMachine = ArchiveMachine.TestCase
TestArchiveMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("condition", ["300 in b'abc'", "-1 in b''", "1 < 'a'"])
def test_a_condition_that_cannot_be_computed_is_left_undecided(condition):
    program = f"def f(x):\n    if x > 9:\n        if {condition}:\n            return 0\n    return x + 1"
    archive = TaskArchive()
    assert archive.add(make_task("code_o", program, [(1,)]))
    assert not archive.add(make_task("code_o", program.replace("x", "y"), [(1,)]))
