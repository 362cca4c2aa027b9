"""Does a child keep its parents' ability? Breeds one child per operator from two trained students and trains all on.

    python recipes/retention.py                                   # all operators, seeds 0 1 2
    python recipes/retention.py --seeds 3                         # one more seed; finished ones are read, not run
    again python recipes/retention.py --operators clone dare --seeds 0 --parent_steps 4 --steps 3 --output runs/short

Two students learn 12 fixed tasks of code_o on the embedded base (the teachers are frozen and every proposal is turned
down, so that nothing but the students' ability moves). Then each operator breeds one child from them, all children
train on side by side with fresh optimizers, as after an evolution event, and the recipe counts the updates until a
child's reward, averaged over three steps, is back within 0.05 of the better parent's last five steps. An operator of
the default mixture should need at most 20; the paper reports 10 to 20. `clone` is the control: what it loses is noise
and the optimizer's; `from scratch` is what the better parent itself needed. Every step attempts every task, so two
steps differ by sampling alone. A seed ends when all children are back, after 10 updates at the earliest. The last line
is one JSON object; `curves.png` shows the rewards.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch
from check_learning import hard_tasks, make_trainer
from transformers import TrainerCallback

from trl_populora.adapters.weights import read_member
from trl_populora.population.evolution import DEFAULT_CROSSOVERS, DEFAULT_MUTATIONS
from trl_populora.population.factors import Factors, compare
from trl_populora.population.operators import CROSSOVERS, MUTATIONS
from trl_populora.populora_trainer import PopuLoRATrainer
from trl_populora.step.played import Row
from trl_populora.step.rewards import student_reward
from trl_populora.tasks import TaskArchive
from trl_populora.tasks.base import Task


TASKS = 12
ATTEMPTS = 4
WINDOW = 3
TOLERANCE = 0.05
LEAST_UPDATES, UPDATES = 10, 20
FROM_SCRATCH = "from scratch"


class InTurn(TaskArchive):
    """Hands its tasks out one after the other instead of at random."""

    def __init__(self, tasks: list[Task]):
        super().__init__()
        for task in tasks:
            self.add(task)
        self.handed_out = 0

    def sample(self, kinds, k, rng):
        tasks = list(self)
        drawn = [tasks[(self.handed_out + i) % len(tasks)] for i in range(k)]
        self.handed_out += k
        return drawn


class Rewards(TrainerCallback):
    """Mean reward of every student at every step: entry u is what it earned after u updates. May end the training."""

    def __init__(self, trainer: PopuLoRATrainer, target: float):
        self.trainer, self.target = trainer, target
        self.of: dict[str, list[float]] = {member.name: [] for member in trainer.population.students}

    def on_step_end(self, args, state, control, **kwargs):
        for name, rewards in self.of.items():
            rows = [row for row in self.trainer.played.rows if row.member == name]
            columns = {column: [getattr(row, column) for row in rows] for column in Row.COLUMNS}
            rewards.append(statistics.fmean(student_reward(**columns)))
        regained = [updates_to_regain(rewards, self.target) is not None for rewards in self.of.values()]
        control.should_training_stop |= all(regained) and state.global_step > LEAST_UPDATES


def train_students(
    count: int, steps: int, seed: int, output: Path, factors: list[Factors] | None = None, target: float = math.inf
):
    """
    Trains `count` students on the fixed tasks, from given factors or from scratch, until all have reached `target`.

    Returns:
        `tuple[list[Factors], list[list[float]]]`: Their final factors and their reward after each number of updates.
    """
    tasks = hard_tasks(TASKS, seed)
    trainer = make_trainer(
        output,
        tasks=tasks,
        seed=seed,
        teachers=count,
        students=count,
        task_kinds=["check_learning:FixedO"],
        proposals_per_teacher=TASKS,
        attempts_per_task=ATTEMPTS,
        references_per_proposal=0,
        per_device_train_batch_size=15 * count,
        max_completion_length=200,  # a worked answer to these tasks is shorter; proposals are turned down anyway
        max_steps=steps,
        learning_rate=1e-3,
        teacher_learning_rate=0.0,
        matchmaking="uniform",
    )
    trainer.game.archive = InTurn(tasks)
    names = [member.name for member in trainer.population.students]
    for name, given in zip(names, factors or [], strict=False):
        trainer.replace_member(name, given, step=0)
    rewards = Rewards(trainer, target)
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
    started = time.process_time()
    parents, rewards = train_students(2, parent_steps, seed, output / f"parents_{seed}")
    levels = [statistics.fmean(curve[-5:]) for curve in rewards]
    first, second = sorted((0, 1), key=lambda index: -levels[index])
    better, worse, level = parents[first], parents[second], levels[first]
    target = level - TOLERANCE
    children = [breed(name, better, worse, seed) for name in operators]
    _, curves = train_students(len(children), steps, seed, output / f"children_{seed}", children, target)
    print(f"seed {seed}: {time.process_time() - started:.0f} s of processor time", flush=True)
    results = {FROM_SCRATCH: {"cosine": math.nan, "rewards": rewards[first]}}
    for name, child, curve in zip(operators, children, curves, strict=True):
        results[name] = {"cosine": compare(child, better)["cosine"], "rewards": curve}
    for result in results.values():
        result |= {"parent_reward": level, "updates": updates_to_regain(result["rewards"], target)}
    return results


def finished(options: argparse.Namespace) -> list[dict[str, dict]]:
    """
    The results of all seeds, each run once and kept in a file of its own under the output directory.

    Raises:
        ValueError: If a kept file is of another run, with other operators or numbers of steps.
    """
    results = []
    asked = {name: getattr(options, name) for name in ("operators", "parent_steps", "steps")}
    for seed in options.seeds:
        path = options.output / f"seed_{seed}.json"
        if not path.exists():  # so that a run may be split over several calls
            result = run(options.operators, seed, options.parent_steps, options.steps, options.output)
            path.write_text(json.dumps({"asked": asked, "result": result}))
        kept = json.loads(path.read_text())
        if kept["asked"] != asked:
            raise ValueError(f"{path} holds a run with {kept['asked']}, not {asked}. Give another `--output`.")
        results.append(kept["result"])
    return results


def plot(results: list[dict[str, dict]], seeds: list[int], path: Path) -> None:
    """Reward over updates, one panel per operator, one line per seed, the level to regain dotted."""
    from matplotlib.figure import Figure

    names = list(results[0])
    columns = min(5, len(names))
    figure = Figure(figsize=(2 * columns, 2.2 * -(-len(names) // columns)), layout="constrained")
    axes = figure.subplots(-(-len(names) // columns), columns, sharex=True, sharey=True, squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        for color, (seed, result) in enumerate(zip(seeds, results, strict=True)):
            axis.plot(result[name]["rewards"], color=f"C{color}", label=f"seed {seed}")
            axis.axhline(result[name]["parent_reward"] - TOLERANCE, color=f"C{color}", linestyle=":")
        axis.set_title(name, fontsize=9)
        axis.locator_params(axis="x", integer=True)
    for axis in list(axes.flat)[len(names) :]:
        axis.set_axis_off()
    axes.flat[0].legend(fontsize=7)
    figure.supxlabel("updates after birth", fontsize=10)
    figure.supylabel("student reward (dotted: to regain)", fontsize=10)
    figure.savefig(path, dpi=100)


def report(results: list[dict[str, dict]]) -> dict[str, list[int | None]]:
    """Prints the table; returns the updates that each operator needed, per seed."""
    print(f"{'operator':16}{'cosine':>8}{'at birth':>10}{'parent':>8}  updates until regained, per seed")
    needed = {}
    for name in results[0]:
        of_seeds = [result[name] for result in results]
        birth, cosine, level = (
            statistics.fmean(values)
            for values in (
                [entry["rewards"][0] for entry in of_seeds],
                [entry["cosine"] for entry in of_seeds],
                [entry["parent_reward"] for entry in of_seeds],
            )
        )
        needed[name] = [entry["updates"] for entry in of_seeds]
        updates = "  ".join("-" if count is None else str(count) for count in needed[name])
        print(f"{name:16}{cosine:8.3f}{birth:10.3f}{level:8.3f}  {updates}")
    return needed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operators", nargs="+", default=["clone", *DEFAULT_MUTATIONS, *DEFAULT_CROSSOVERS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parent_steps", type=int, default=30)
    parser.add_argument("--steps", type=int, default=UPDATES + 2)
    parser.add_argument("--output", type=Path, default=Path("runs/retention"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    results = finished(options)
    plot(results, options.seeds, options.output / "curves.png")
    needed = report(results)
    children = {name: counts for name, counts in needed.items() if name != FROM_SCRATCH}
    late = [name for name, counts in children.items() if any(count is None or count > UPDATES for count in counts)]
    print(json.dumps({"seeds": options.seeds, "updates": needed, "later_than_20": late}))


if __name__ == "__main__":
    main()
