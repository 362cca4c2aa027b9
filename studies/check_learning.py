"""Is learning real? Trains one role alone and prints its reward at the start and at the end.

    python studies/check_learning.py student     # a student on 32 fixed tasks, without a teacher
    python studies/check_learning.py teacher     # a teacher against a frozen student

The fixed tasks are programs of four and six operations (levels 4 and 5 of `tiny_programs.py`; the base has never seen
level 5), and 512 others of the same levels, which nobody trains on, are solved before and after. Several seeds run one
after the other: `--seeds 0 1 2`. The last line is one JSON object. What it leaves out: evolution, ratings, plots.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path

import beside_recipes  # noqa: F401
from datasets import Dataset
from peft import LoraConfig
from tiny_documents import DialogueWriter, random_task
from tqdm import tqdm

from trl_populora.config import PopuLoRAConfig
from trl_populora.evaluate.cross_play import solve_rates
from trl_populora.start import make_sandbox
from trl_populora.tasks import TaskArchive
from trl_populora.tasks.kind import Task
from trl_populora.trainer import PopuLoRATrainer


FIXED_TASKS = 32
HELD_OUT_TASKS = 512
LEVELS = (4, 5)


def hard_tasks(count: int, seed: int, held_out: bool = False) -> list[Task]:
    """
    Different code_o tasks of the two hardest levels; `held_out` draws from programs kept out of the base's training.
    """
    writer = DialogueWriter(random.Random(f"{seed}/{held_out}"), held_out)
    archive = TaskArchive()
    while len(archive) < count:
        archive.add(random_task("code_o", LEVELS[len(archive) % len(LEVELS)], writer))
    return list(archive)


def make_trainer(output: Path | str, tasks: list[Task] | None, **settings) -> PopuLoRATrainer:
    """A trainer on the embedded base, nobody replaced, nothing saved; `tasks` seed its archive."""
    args = PopuLoRAConfig(
        str(output),
        evolve_every=0,
        save_rollouts=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        **settings,
    )
    return PopuLoRATrainer(
        "tiny",
        args=args,
        train_dataset=None if tasks is None else Dataset.from_list([task.to_record() for task in tasks]),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )


def run(check: str, seed: int, steps: int, learning_rate: float, output: str) -> dict[str, float]:
    """One seed of one check; returns its figures."""
    student = check == "student"
    train, held_out = hard_tasks(FIXED_TASKS, seed), hard_tasks(HELD_OUT_TASKS, seed, held_out=True)
    trainer = make_trainer(
        f"{output}/{check}_{seed}",
        tasks=train if student else None,
        seed=seed,
        teachers=0 if student else 1,
        students=1,
        task_kinds=["code_o"],
        proposals_per_teacher=16 if student else 32,
        attempts_per_task=8 if student else 4,
        references_per_proposal=2,
        per_device_train_batch_size=16,
        max_completion_length=256 if student else 160,  # an answer, worked perhaps, or a program with its input
        max_steps=steps,
        learning_rate=learning_rate if student else 0.0,
        teacher_learning_rate=None if student else learning_rate,
    )
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
        with make_sandbox(trainer.args) as trainer.game.referee.sandbox:  # the run's own is closed by now
            figures["held_out_after"] = mean_solve_rate(trainer, held_out)
    return figures


def mean_solve_rate(trainer: PopuLoRATrainer, tasks: list[Task]) -> float:
    """Mean over students and tasks, four attempts each."""
    names = [member.name for member in trainer.population.students]
    bar, game = tqdm(names, desc="held out", leave=False), trainer.game
    rates = [solve_rates(game.referee, game.player, name, tasks, attempts=4) for name in bar]
    return statistics.fmean(rate for part in rates for rate in part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("check", choices=("student", "teacher"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--output", default="runs/check_learning")
    options = parser.parse_args()
    results = []
    for seed in options.seeds:
        results.append(run(options.check, seed, options.steps, options.learning_rate, options.output))
        figures = results[-1].items()
        print(
            "  ".join(
                f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in figures
            )
        )
    gain = statistics.fmean(f["reward_last"] - f["reward_first"] for f in results)
    print(json.dumps({"check": options.check, "mean_reward_gain": gain, "runs": results}))


if __name__ == "__main__":
    main()
