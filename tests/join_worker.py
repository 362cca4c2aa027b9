"""Runs in which members join and leave, of one process or of two: `python -m tests.join_worker BASE RUN`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback


RUNS: dict[str, dict[str, Any]] = {
    "change": {"names": ["a", "b", "c"], "max_steps": 5},
    "halve": {"names": ["a", "b", "c", "d"], "max_steps": 5, "halve_every": 2},
}


def train(base: str, which: str, directory: str, **options: Any) -> dict[str, Any]:
    """Trains such a run; returns who is there at the end, and their factors."""
    from tests.prompt_runs import population_trainer
    from trl_populora.lora.members import read_member

    given = RUNS[which] | options
    trainer, _ = population_trainer(base, directory, given.pop("names"), loss_type="grpo", **given)

    class Change(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if which == "change" and state.global_step == 2:
                trainer.remove_member("student_0")
            if which == "change" and state.global_step == 3:
                trainer.add_member("late", like="student_2")

    trainer.add_callback(Change())
    trainer.train()
    names = trainer.population.names
    factors = {name: read_member(trainer.model, trainer.population.adapter(name)) for name in names}
    return {"names": names, "left": trainer.population.left, "factors": factors}


if __name__ == "__main__":
    from accelerate.utils import gather_object

    from tests.launching import leave

    base, which = sys.argv[1:]
    # Two ranks with two rows each have the rows of one process with four.
    found = train(base, which, "run", per_device_train_batch_size=2)
    sums = {name: sum(float(value.sum()) for value in each.values()) for name, each in found["factors"].items()}
    sums = gather_object([sums])
    if os.environ["RANK"] == "0":
        torch.save(found | {"sums": sums}, Path("found.pt"))
    leave()
