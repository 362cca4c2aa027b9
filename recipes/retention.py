"""Does a child keep its parents' ability? Breeds one child per operator from two trained students and trains all on.

    python recipes/retention.py                                   # all operators, seeds 0 1 2
    python recipes/retention.py --operators full_gaussian dare --seeds 0 --parent_steps 10 --steps 6

Two students learn 32 fixed tasks of code_o and code_i on the embedded base (the teachers are frozen and every proposal
is turned down, so that nothing but the students' ability moves). Then each operator breeds one child from them, all
children train on side by side with fresh optimizers, as after an evolution event, and the recipe counts the updates
until a child's reward, averaged over three steps, is back within 0.05 of the better parent's last ten steps. An
operator of the default mixture should need at most 20; the paper reports 10 to 20. `clone` is the control: what it
loses is noise and the optimizer's. The last line is one JSON object; `curves.png` shows the rewards.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from check_learning import OneRoleTrainer, split_seeds
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from trl_populora.adapters.weights import read_member
from trl_populora.evolution import DEFAULT_CROSSOVERS, DEFAULT_MUTATIONS
from trl_populora.factors import Factors, compare
from trl_populora.operators import CROSSOVERS, MUTATIONS
from trl_populora.populora_config import PopuLoRAConfig
from trl_populora.rewards import student_reward
from trl_populora.rollout import Row


WINDOW = 3
TOLERANCE = 0.05


class Rewards(TrainerCallback):
    """Mean reward of every student at every step: entry u is what it earned after u updates."""

    def __init__(self, trainer: OneRoleTrainer):
        self.trainer = trainer
        self.of: dict[str, list[float]] = {member.name: [] for member in trainer.population.students}

    def on_step_end(self, args, state, control, **kwargs):
        for name, rewards in self.of.items():
            rows = [row for row in self.trainer._rows if row.member == name]
            columns = {column: [getattr(row, column) for row in rows] for column in Row.COLUMNS}
            rewards.append(statistics.fmean(student_reward(**columns)))


def train_students(count: int, steps: int, seed: int, output: Path, factors: list[Factors] | None = None):
    """
    Trains `count` students on the fixed tasks, from given factors or from scratch.

    Returns:
        `tuple[list[Factors], list[list[float]]]`: Their final factors and their reward after each number of updates.
    """
    tasks, _ = split_seeds(("code_o", "code_i"), 32, seed)
    args = PopuLoRAConfig(
        str(output),
        seed=seed,
        teachers=count,
        students=count,
        task_kinds=["check_learning:FixedO", "check_learning:FixedI"],
        proposals_per_teacher=8,
        attempts_per_task=8,
        references_per_proposal=1,
        per_device_train_batch_size=8 * count,
        max_completion_length=48,  # an answer to these tasks is shorter; proposals are turned down anyway
        max_steps=steps,
        learning_rate=1e-3,
        matchmaking="uniform",
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
        train_dataset=Dataset.from_list([task.to_record() for task in tasks]),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.frozen_role = "teacher"
    names = [member.name for member in trainer.population.students]
    for name, given in zip(names, factors or [], strict=False):
        trainer.replace_member(name, given, step=0)
    rewards = Rewards(trainer)
    trainer.add_callback(rewards)
    trainer.train()
    return [read_member(trainer.model, name) for name in names], [rewards.of[name] for name in names]


def breed(name: str, better: Factors, worse: Factors, seed: int) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    return MUTATIONS[name](better, generator) if name in MUTATIONS else CROSSOVERS[name](better, worse, generator)


def updates_to_regain(rewards: list[float], target: float) -> int | None:
    """First number of updates at which the mean of the last `WINDOW` rewards reaches the target."""
    for update in range(WINDOW - 1, len(rewards)):
        if statistics.fmean(rewards[update - WINDOW + 1 : update + 1]) >= target:
            return update
    return None


def run(operators: list[str], seed: int, parent_steps: int, steps: int, output: Path) -> dict[str, dict]:
    """One seed: parents, one child per operator, and what became of them."""
    parents, rewards = train_students(2, parent_steps, seed, output / f"parents_{seed}")
    levels = [statistics.fmean(curve[-10:]) for curve in rewards]
    first, second = sorted((0, 1), key=lambda index: -levels[index])
    better, worse, level = parents[first], parents[second], levels[first]
    children = [breed(name, better, worse, seed) for name in operators]
    _, curves = train_students(len(children), steps, seed, output / f"children_{seed}", children)
    return {
        name: {
            "parent_reward": level,
            "untrained_reward": statistics.fmean(rewards[first][:WINDOW]),
            "cosine": compare(child, better)["cosine"],
            "rewards": curve,
            "updates": updates_to_regain(curve, level - TOLERANCE),
        }
        for name, child, curve in zip(operators, children, curves, strict=True)
    }


def plot(results: list[dict[str, dict]], path: Path) -> None:
    """Reward over updates, one panel per operator, one line per seed, the parents' level dotted."""
    from matplotlib.figure import Figure

    names = list(results[0])
    columns = min(4, len(names))
    figure = Figure(figsize=(3 * columns, 2.4 * -(-len(names) // columns)), layout="constrained")
    for place, name in enumerate(names, start=1):
        axis = figure.add_subplot(-(-len(names) // columns), columns, place)
        for seed, result in enumerate(results):
            axis.plot(result[name]["rewards"], color=f"C{seed}")
            axis.axhline(result[name]["parent_reward"], color=f"C{seed}", linestyle=":")
        axis.set_title(name, fontsize=9)
    figure.supxlabel("updates after birth")
    figure.supylabel("student reward")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operators", nargs="+", default=["clone", *DEFAULT_MUTATIONS, *DEFAULT_CROSSOVERS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parent_steps", type=int, default=40)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--output", type=Path, default=Path("runs/retention"))
    options = parser.parse_args()
    results = [
        run(options.operators, seed, options.parent_steps, options.steps, options.output) for seed in options.seeds
    ]
    plot(results, options.output / "curves.png")
    print(f"{'operator':16}{'cosine':>8}{'at birth':>10}{'parent':>8}  updates until regained, per seed")
    for name in options.operators:
        of_seeds = [result[name] for result in results]
        birth = statistics.fmean(statistics.fmean(entry["rewards"][:WINDOW]) for entry in of_seeds)
        cosine, level = (statistics.fmean(entry[key] for entry in of_seeds) for key in ("cosine", "parent_reward"))
        updates = [str(entry["updates"]) if entry["updates"] is not None else "-" for entry in of_seeds]
        print(f"{name:16}{cosine:8.3f}{birth:10.3f}{level:8.3f}  {' '.join(updates)}")
    print(json.dumps({"seeds": options.seeds, "results": results}))


if __name__ == "__main__":
    main()
