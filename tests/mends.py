"""One way of a trainer through faults that were mended, for each backend: see `go_through`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import torch

from tests.populora_run import HELD_OUT
from trl_populora.lora.members import member_param_groups, read_member
from trl_populora.trainer import PopuLoRATrainer


def why_refused(kind: type[Exception], function: Callable, *arguments) -> str:
    """The message with which a call is refused; empty where it is not."""
    try:
        function(*arguments)
    except kind as error:
        return str(error)
    return ""


def watch(trainer: PopuLoRATrainer) -> list[str]:
    """Fills the list that it returns with plays and micro-batches, as they end."""
    play, train, did = trainer.rollout_func, trainer.training_step, []

    def watched_play(*given):
        did.append("play")
        return play(*given)

    def watched_train(*given):
        loss = train(*given)  # which asks for the play
        did.append("train")
        return loss

    trainer.rollout_func, trainer.training_step = watched_play, watched_train
    return did


def go_through(make: Callable[[dict, list[dict]], PopuLoRATrainer]) -> dict:
    """
    What becomes of a trainer that gets an optimizer with one group, then what the refusal names, trains to the
    middle of a play's updates, is measured, and trains again; and of another that resumes this run with held-out tasks
    which the run has trained on. `make` makes a trainer from settings and held-out tasks.
    """
    settings = {"num_iterations": 2, "max_steps": 1, "save_steps": 1, "evolve_every": 0, "teacher_learning_rate": 0.0}
    trainer = make(settings, HELD_OUT)
    trainer.optimizer = torch.optim.AdamW(p for p in trainer.model.parameters() if p.requires_grad)
    refusal = why_refused(ValueError, trainer.train)
    calls = re.findall(r"`trainer.optimizer = (.*?)`,", refusal)  # DeepSpeed allows no own optimizer at all
    named = {"AdamW": torch.optim.AdamW, "member_param_groups": member_param_groups, "trainer": trainer}
    trainer.optimizer, did = eval(calls[0], named) if calls else None, watch(trainer)

    before = {name: read_member(trainer.model, name) for name in trainer.population.names}
    trainer.train()
    after = {name: read_member(trainer.model_wrapped, name) for name in before}
    moved = [name for name in before if any((after[name][k] != v).any() for k, v in before[name].items())]

    trainer.evaluate()
    told = [trainer.describe()]
    did.append("again")
    again = why_refused(RuntimeError, trainer.train)
    told.append(trainer.describe())

    written = [task.to_record() for task in trainer.archive if task.author.startswith("teacher")][:2]
    resumed = make(settings | {"max_steps": 2}, written)
    return {
        "optimizer": refusal,
        "moved": moved,
        "did": did,
        "told": json.loads(json.dumps(told)),
        "again": again,
        "written": len(written),
        "resume": why_refused(ValueError, resumed.train, True),
        "steps": resumed.state.global_step,
        "log": trainer.state.log_history,
    }


def check_all(seen: dict, trains_once: bool = False) -> None:
    """Checks what `go_through` saw. DeepSpeed (`trains_once`) refuses own optimizers and a second training."""
    if trains_once:
        assert "`trainer.optimizer` is set (AdamW). Under DeepSpeed transformers drops it" in seen["optimizer"]
    else:
        mixed = "student_0 and student_1 and teacher_0 and teacher_1"
        assert seen["optimizer"].startswith(f"The optimizer has a parameter group of {mixed}. Each member needs")
    assert seen["moved"] == ["student_0", "student_1"], "the teachers' rate is 0"

    first, second = seen["told"]
    assert (first["step"], first["held_out_step"]) == (1, 1)
    if trains_once:
        assert "a trainer trains once" in seen["again"]
        assert second == first, "nothing has trained since"
    else:
        assert seen["again"] == ""
        assert (second["step"], second["held_out_step"], second["best_student_by"]) == (1, None, "rating")
        assert {member["held_out"] for member in second["members"]} == {None}
        assert second["held_out_base"] == first["held_out_base"], "the base is as it was"
        begun = seen["did"].index("again") + 1
        assert seen["did"][begun:] == seen["did"][: begun - 1], "a play, which the rows that were left do not replace"
    assert seen["did"][0] == "play"

    assert seen["written"] > 0
    found = rf"checkpoint-1 has {seen['written']} of its \d+ archived tasks in common with `eval_dataset`"
    assert re.search(found, seen["resume"])
    assert seen["steps"] == 1, "no step was trained"
