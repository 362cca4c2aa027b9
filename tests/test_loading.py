"""What has to be there before a run: seed tasks that the run's kinds can use."""

from __future__ import annotations

import pytest
from datasets import Dataset

from trl_populora.given_tasks import load_archive
from trl_populora.populora_trainer import PopuLoRATrainer
from trl_populora.preparation import make_kinds


def test_a_kind_that_is_about_known_programs_needs_some(make_args, seed_tasks):
    args = make_args(task_kinds=["code_f"])
    seeds = {
        kind: Dataset.from_list([task.to_record() for task in seed_tasks if kind in ("", task.kind)])
        for kind in ("", "code_f")
    }
    assert len(load_archive(seeds[""], make_kinds(args), args)) == len(seed_tasks)
    with pytest.raises(
        ValueError, match="no task of the kinds code_o, code_i, and code_f proposes about their programs"
    ):
        load_archive(seeds["code_f"], make_kinds(args), args)


def test_kinds_get_the_settings_of_the_run(make_args):
    kinds = make_kinds(make_args(determinism_runs=3, inputs_per_function=6))
    assert {kind.determinism_runs for kind in kinds.values()} == {3}
    assert kinds["code_f"].inputs_per_task == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"outputs": ["99"]},
            "1 of 12 given task.*`train_dataset`, row 1: column `outputs` holds '99', the program returns",
        ),
        ({"program": "def f(a):\n    return a +"}, "`train_dataset`, row 1: the program ends with `error`"),
        ({"program": "g = 1"}, "`train_dataset`, row 1: the program ends with `error`"),
    ],
)
def test_seed_tasks_are_run_before_students_are_graded_by_them(
    make_args, random_base, lora, seed_tasks, change, message
):
    rows = [task.to_record() for task in seed_tasks]
    rows[1] |= change
    with pytest.raises(ValueError, match=message):
        PopuLoRATrainer(random_base, args=make_args(), train_dataset=Dataset.from_list(rows), peft_config=lora)
