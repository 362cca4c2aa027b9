"""Is learning real? Trains one role alone and prints its reward at the start and at the end.

    python recipes/check_learning.py student     # two students on 32 fixed tasks, teachers frozen
    python recipes/check_learning.py teacher     # two teachers against frozen students

The student check also solves fresh tasks that nobody trained on, before and after. The last line is one JSON object.
Several seeds run one after the other: `--seeds 0 1 2`. What it leaves out: evolution, ratings, plots.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from tqdm import tqdm

from trl_populora.evaluation import solve_rates
from trl_populora.loading import make_sandbox
from trl_populora.populora_config import PopuLoRAConfig
from trl_populora.populora_trainer import PopuLoRATrainer
from trl_populora.tasks import CodeI, CodeO, load_seed_tasks
from trl_populora.tasks.base import Reject, Task


class ArchiveOnly:
    """Turns every proposal down, so that each of the students' slots is filled from the archive."""

    def accept(self, proposal, verdict, rng):
        return Reject.DUPLICATE


class FixedO(ArchiveOnly, CodeO):
    """code_o from the archive alone."""


class FixedI(ArchiveOnly, CodeI):
    """code_i from the archive alone."""


class OneRoleTrainer(PopuLoRATrainer):
    """Leaves the members of one role where they are: their learning rate is zero."""

    frozen_role = ""

    def create_optimizer(self, model=None):
        optimizer = super().create_optimizer(model)
        for group in optimizer.param_groups:
            if self.population[group["member"]].role == self.frozen_role:
                group["lr"] = 0.0
        return optimizer


def split_seeds(kinds: tuple[str, ...], train: int, seed: int) -> tuple[list[Task], list[Task]]:
    """The package's seed tasks of some kinds: `train` of them to learn from, the others held out."""
    tasks = [task for task in load_seed_tasks() if task.kind in kinds]
    random.Random(seed).shuffle(tasks)
    return tasks[:train], tasks[train:]


def run(check: str, seed: int, steps: int, learning_rate: float, output: str) -> dict[str, float]:
    """One seed of one check; returns its figures."""
    student = check == "student"
    train, held_out = split_seeds(("code_o", "code_i"), 32, seed)
    args = PopuLoRAConfig(
        f"{output}/{check}_{seed}",
        seed=seed,
        teachers=2,
        students=2,
        task_kinds=[f"{__name__}:FixedO", f"{__name__}:FixedI"] if student else ["code_o", "code_i"],
        proposals_per_teacher=8,
        attempts_per_task=8 if student else 4,
        references_per_proposal=2,
        per_device_train_batch_size=16,
        max_completion_length=120,
        max_steps=steps,
        learning_rate=learning_rate,
        evolve_every=0,
        save_rollouts=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
    )
    trainer = OneRoleTrainer(
        "tiny",
        args=args,
        train_dataset=Dataset.from_list([task.to_record() for task in train]) if student else None,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.frozen_role = "teacher" if student else "student"
    figures = {"seed": seed, "steps": steps}
    if student:
        figures["held_out_tasks"] = len(held_out)
        figures["held_out_before"] = mean_solve_rate(trainer, held_out)
    trainer.train()
    rewards = [e[f"rewards/{check}_reward/mean"] for e in trainer.state.log_history if "propose/valid_rate" in e]
    fifth = max(1, steps // 5)
    figures["reward_first"] = statistics.fmean(rewards[:fifth])
    figures["reward_last"] = statistics.fmean(rewards[-fifth:])
    if student:
        with make_sandbox(args) as trainer.game.sandbox:  # the run's own is closed by now
            figures["held_out_after"] = mean_solve_rate(trainer, held_out)
    return figures


def mean_solve_rate(trainer: PopuLoRATrainer, tasks: list[Task]) -> float:
    """Mean over students and tasks, four attempts each."""
    names = [member.name for member in trainer.population.students]
    rates = [solve_rates(trainer.game, name, tasks, attempts=4) for name in tqdm(names, desc="held out", leave=False)]
    return statistics.fmean(rate for part in rates for rate in part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("check", choices=("student", "teacher"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--output", default="runs/check_learning")
    options = parser.parse_args()
    results = [
        run(options.check, seed, options.steps, options.learning_rate, options.output) for seed in options.seeds
    ]
    for figures in results:
        print(
            "  ".join(
                f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
                for name, value in figures.items()
            )
        )
    Path(options.output).mkdir(parents=True, exist_ok=True)
    gain = statistics.fmean(f["reward_last"] - f["reward_first"] for f in results)
    print(json.dumps({"check": options.check, "mean_reward_gain": gain, "runs": results}))


if __name__ == "__main__":
    main()
