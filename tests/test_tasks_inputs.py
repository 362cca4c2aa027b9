"""What a model wrote is what runs: inputs keep the order of their dictionaries from text to call. Real sandbox."""

from __future__ import annotations

from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from tests.code_tasks import DOUBLE, block, grade, inputs_text, propose
from trl_populora.sandbox import Sandbox
from trl_populora.sandbox.values import decode, encode
from trl_populora.tasks import CodeF, CodeI, CodeO, Task, TaskArchive
from trl_populora.tasks.archive import load_archive, save_archive


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, allow_weak=True) as box:
        yield box


KEYS = "def f(d):\n    return [*d, *d['b']]"
WRITTEN = "{'b': {2: 0, 1: 0}, 'a': 3}"


@pytest.mark.parametrize("kind", [CodeO(), CodeI()], ids=["code_o", "code_i"])
def test_a_program_sees_the_dictionary_that_was_written(kind, sandbox, tmp_path):
    """Its order is the same in text, run, prompt, reference, archive and table; parquet keeps it."""
    task = propose(kind, sandbox, block("python", KEYS) + "\n" + block("input", WRITTEN))
    assert decode(task.outputs[0]) == eval(f"(lambda d: [*d, *d['b']])({WRITTEN})") == ["b", "a", 2, 1]
    archive = TaskArchive()
    archive.add(task)
    save_archive(archive, tmp_path / "archive.parquet")
    again = TaskArchive()
    load_archive(again, tmp_path / "archive.parquet", archive.coverage.state_dict())
    table = pq.read_table(tmp_path / "archive.parquet").to_pylist()
    for kept in (task, *archive, *again, *TaskArchive.from_dataset(table)):
        assert kept == task
        assert f"```input\n{WRITTEN}\n```" in CodeO().solving_prompt(kept, "compact")[-1]["content"]
        assert f"```input\n{WRITTEN}\n```" in kind.proposal_prompt([kept], "compact")[-1]["content"]


def test_a_set_of_inputs_keeps_the_dictionaries_that_were_written(sandbox):
    known = Task("code_o", "def f(d):\n    return list(d)", (encode(({1: 1},)),), (encode([1]),))
    lines = [f"{{{n}: 0, {n - 1}: 0}}" for n in range(10, 0, -1)]
    task = propose(CodeF(), sandbox, inputs_text(lines), [known])
    assert sorted(decode(text) for text in task.outputs) == [[n, n - 1] for n in range(1, 11)]
    assert "f({10: 0, 9: 0}) -> [10, 9]" in CodeF().solving_prompt(replace(task, visible=10), "compact")[0]["content"]


def test_an_answer_counts_in_the_order_in_which_it_is_written(sandbox):
    task = Task("code_i", KEYS, (encode(({"b": {2: 0, 1: 0}, "a": 3},), ordered=True),), (encode(["b", "a", 2, 1]),))
    assert grade(CodeI(), sandbox, task, block("input", WRITTEN)) == "right"
    assert grade(CodeI(), sandbox, task, block("input", "{'a': 3, 'b': {2: 0, 1: 0}}")) == "wrong"


def test_the_order_of_an_output_does_not_count(sandbox):
    task = propose(
        CodeO(), sandbox, block("python", "def f(x):\n    return {'b': x, 'a': x}") + "\n" + block("input", "1")
    )
    assert task.outputs == ('["d","a",1,"b",1]',)
    for answer in ("{'b': 1, 'a': 1}", "{'a': 1, 'b': 1}"):
        assert grade(CodeO(), sandbox, task, block("output", answer)) == "right"


def test_an_input_written_as_a_call_is_its_arguments(sandbox):
    """
    `f(1)` is what models write where the arguments are asked for; everybody is shown `1`, and `f(1)` is what runs.
    """
    task = propose(CodeO(), sandbox, block("python", DOUBLE) + "\n" + block("input", "f(1)"))
    assert (task.inputs, task.outputs) == ((encode((1,)),), (encode(2),))
    assert "```input\n1\n```" in CodeO().solving_prompt(task, "compact")[-1]["content"]
