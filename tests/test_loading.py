"""What has to be there before a run: seed tasks that the run's kinds can use."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from datasets import Dataset

from trl_populora.hub.download import fetch
from trl_populora.start import make_kinds, make_parts
from trl_populora.tasks.dataset import build_archive, read_held_out, read_tasks
from trl_populora.trainer import PopuLoRATrainer


def test_a_kind_that_is_about_known_programs_needs_some(make_args, seed_tasks):
    args = make_args(task_kinds=["code_f"])
    seeds = {
        kind: Dataset.from_list([task.to_record() for task in seed_tasks if kind in ("", task.kind)])
        for kind in ("", "code_f")
    }
    assert len(
        build_archive(seeds[""], make_kinds(args), args.prompt_style, args.archive_size, args.references_per_proposal)
    ) == len(seed_tasks)
    with pytest.raises(
        ValueError, match="no task of the kinds code_o, code_i to start from, .*, and code_f proposes about their"
    ):
        build_archive(
            seeds["code_f"], make_kinds(args), args.prompt_style, args.archive_size, args.references_per_proposal
        )


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("tasks.jsonl", "", "the file is empty"),
        ("tasks.jsonl", "\n \n", "the file is empty"),
        ("tasks.jsonl", '{"kind": "code_o"}\n{"kind": }\n', "line 2 is no JSON .Expecting value"),
        ("tasks.json", '[\n{"kind": "code_o"},\n{"kind": }]\n', "it is no JSON .Expecting value: line 3"),
        (
            "./no/such",
            None,
            "there is no such file .the current directory is '.*'.. Give a .json, .jsonl or .parquet file",
        ),
        ("/nowhere", None, "there is no such file"),
        ("nowhere.parquet", None, "there is no such file"),
    ],
)
@pytest.mark.parametrize("read", [read_tasks, lambda source: read_held_out(source, ["code_o"])])
def test_a_table_that_cannot_be_read_is_told_with_its_fault(tmp_path, monkeypatch, name, text, told, read):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text)
    with pytest.raises(ValueError, match=f"^The tasks '{name}' cannot be read: {told}"):
        read(name)


def test_paths_may_begin_with_the_home_directory(random_base, seed_tasks, make_args, tmp_path, monkeypatch):
    """A shell expands no `~` in a YAML file, and behind an equals sign."""
    monkeypatch.setenv("HOME", str(tmp_path))
    Dataset.from_list([task.to_record() for task in seed_tasks]).to_json(tmp_path / "tasks.jsonl")
    assert len(tasks := read_tasks("~/tasks.jsonl")) == len(seed_tasks)
    (tmp_path / "run").mkdir()
    assert fetch("~/run") == tmp_path / "run"
    shutil.copytree(random_base, tmp_path / "base")
    trainer = PopuLoRATrainer("~/base", args=make_args(), train_dataset=tasks)
    trainer.close()
    assert trainer.shape.base_model == str(tmp_path / "base")


def test_kinds_get_the_settings_of_the_run(make_args):
    kinds = make_kinds(make_args(determinism_runs=3, inputs_per_function=6))
    assert {kind.determinism_runs for kind in kinds.values()} == {3}
    assert kinds["code_f"].inputs_per_task == 6


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"proposals_per_teacher": 11}, True),
        ({"proposals_per_teacher": 12}, False),
        ({"proposals_per_teacher": 4, "task_kinds": ["code_o"]}, False),
        ({"proposals_per_teacher": 4, "teacher_baseline": "group"}, False),
    ],
)
def test_fewer_than_four_proposals_of_a_kind_are_warned_of(make_args, caplog, settings, told):
    make_kinds(make_args(**({"teachers": 2, "per_device_train_batch_size": 1} | settings)))
    assert ("is below 4 for each of the" in caplog.text) == told


def test_a_kind_that_proposes_nothing_is_played_without_teachers(make_args):
    kinds = ["tests.countdown:GivenCountdown"]
    assert list(make_kinds(make_args(task_kinds=kinds, teachers=0))) == ["countdown"]
    with pytest.raises(ValueError, match="'countdown' has no `proposal_prompt`, .*`accept`.*set `teachers=0`"):
        make_kinds(make_args(task_kinds=kinds, teachers=1, per_device_train_batch_size=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"outputs": ["99"]},
            "1 flaw.* in 12 given task.*`train_dataset`, row 1: column `outputs` holds '99', the program returns",
        ),
        ({"program": "def f(a):\n    return a +"}, "`train_dataset`, row 1: the program ends with `error`"),
        ({"program": "g = 1"}, "`train_dataset`, row 1: the program ends with `error`"),
        (
            {"program": "def f(a):\n    return [*{'k%d' % n for n in range(9)}][0]", "outputs": ['"k0"']},
            "`train_dataset`, row 1: the program ends with `nondeterministic`",
        ),
        (
            {"program": "def f(a):\n    return a + 1  # <|im_end|>"},
            "`train_dataset`, row 1: what it shows holds '<|im_end|>', a control token.",
        ),
        ({"message": "</think>"}, "row 1: what it shows holds '</think>'"),
    ],
)
def test_seed_tasks_are_run_before_students_are_graded_by_them(
    make_args, random_base, lora, seed_tasks, change, message
):
    rows = [task.to_record() for task in seed_tasks]
    rows[1] |= change
    with pytest.raises(ValueError, match=message):
        PopuLoRATrainer(random_base, args=make_args(), train_dataset=Dataset.from_list(rows), peft_config=lora)


def test_given_tasks_that_are_left_out_are_counted(make_args, seed_tasks, caplog):
    tasks = [task for task in seed_tasks if task.kind == "code_o"]
    for given, size, lost in ((tasks, 100, 0), ([*tasks, tasks[0]], 100, 1), (tasks, len(tasks) - 2, 2)):
        caplog.clear()
        args = make_args(task_kinds=["code_o"], archive_size=size)
        make_parts(args, Dataset.from_list([task.to_record() for task in given]), None)
        told = [line for line in caplog.messages if "left out" in line]
        assert [line.split(" given")[0] for line in told] == [f"{lost} of the {len(given)}"] * bool(lost)


def test_a_given_task_needs_half_of_the_limit_at_most(make_args, random_base, lora, seed_tasks):
    """As a proposed one: its attempts run beside other work, and some would not end in time."""
    rows = [task.to_record() for task in seed_tasks]
    rows[1]["program"] = "def f(a):\n    while True: pass"
    told = r"row 1: the program ends with `timeout` \(used more than 0.25 s of CPU time; .*half of `sandbox_seconds`\)"
    with pytest.raises(ValueError, match=told):
        PopuLoRATrainer(
            random_base, args=make_args(sandbox_seconds=0.5), train_dataset=Dataset.from_list(rows), peft_config=lora
        )
