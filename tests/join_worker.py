"""
Runs on a dataset, of one process or of two: `python -m tests.join_worker BASE RUN`. In some, members join and leave.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import TrainerCallback


RUNS: dict[str, dict[str, Any]] = {
    "change": {"names": ["a", "b", "c"], "max_steps": 5, "loss_type": "grpo"},
    "halve": {"names": ["a", "b", "c", "d"], "max_steps": 5, "halve_every": 2, "loss_type": "grpo"},
    # A generation has 3 prompts, and each of two ranks a group and a half of each member's. An epoch has two
    # generations, so that the checkpoint is amid the second epoch. The members differ, and each birth mutates a rate.
    "groups across ranks": {
        "names": ["a", "b"],
        "ranks": [4, 2],
        "learning_rate": [1e-2, 3e-3],
        "evolve_every": 2,
        "evolve_burn_in": 0,
        "crossover_rate": 0.0,
        "hyperparameter_noise": 0.5,
        "num_generations": 8,
        "gradient_accumulation_steps": 6,
        "max_steps": 5,
        "save_strategy": "steps",
        "save_steps": 3,
        "loss_type": "dapo",
    },
}
# Two ranks with these have the rows of one process with `WHOLE`. The last batch of an evaluation is not full.
HALF = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 12}
WHOLE = {name: 2 * size for name, size in HALF.items()}


def train(base: str, which: str, directory: str, resume: str | None = None, **options: Any) -> dict[str, Any]:
    """Trains such a run; returns who is there at the end, their factors, and what the judge saw."""
    from tests.prompt_runs import QUESTIONS, population_trainer, write
    from trl_populora.lora.members import read_member
    from trl_populora.run.read import read_lines
    from trl_populora.step.player import Completion

    given = RUNS[which] | options
    lora = [LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear") for rank in given.pop("ranks", [])]
    trainer, judge = population_trainer(base, directory, given.pop("names"), lora=lora, **given)

    class Change(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if which == "change" and state.global_step == 2:
                trainer.remove_member("student_0")
            if which == "change" and state.global_step == 3:
                trainer.add_member("late", like="student_2")

    trainer.add_callback(Change())
    trainer.train(resume_from_checkpoint=resume)
    names = trainer.population.names
    factors = {name: read_member(trainer.model_wrapped, trainer.population.adapter(name)) for name in names}
    found = {"names": names, "left": trainer.population.left, "factors": factors}
    found["rates"] = {group["member"]: group["lr"] for group in trainer.optimizer.param_groups}
    found["settings"] = [member.settings for member in trainer.population]
    found["lineage"] = [line["child"] for line in read_lines(Path(directory, "lineage.jsonl"))]
    found["prompts"] = [call["prompts"] for call in judge.calls]
    if "per_device_eval_batch_size" in options:

        def record(prompts: list, members: Sequence[str], seeds: Any = None) -> list[Completion]:
            """What a member writes depends on the prompt alone: rows have other places on two ranks."""
            rows = zip(prompts, members, strict=True)
            return [Completion([1], write(member, 0, len(prompt) + ord(prompt[8])), "") for prompt, member in rows]

        trainer._generate_rows = record
        figures = trainer.evaluate(QUESTIONS.select(range(5)))
        # TRL's own figures count the rows with which accelerate fills the last batch up.
        own = ("eval_member/", "eval_reward_")
        found["evaluated"] = {name: figures[name] for name in figures if name.startswith(own) and "std" not in name}
    return found


if __name__ == "__main__":
    from accelerate.utils import gather_object

    from tests.backend_worker import launched_by_deepspeed, without_compiler
    from tests.launching import leave

    if launched_by_deepspeed():
        without_compiler()
    base, which = sys.argv[1:]
    found = train(base, which, "run", **HALF)
    if step := RUNS[which].get("save_steps"):
        found["again"] = train(base, which, "again", f"run/checkpoint-{step}", **HALF)
    sums = {name: sum(float(value.sum()) for value in each.values()) for name, each in found["factors"].items()}
    sums = gather_object([sums])
    if os.environ["RANK"] == "0":
        torch.save(found | {"sums": sums}, Path("found.pt"))
    leave()
