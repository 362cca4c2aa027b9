"""
Headroom of the tiny base: does self-play on it raise the score on tasks that nobody trains on?

    python studies/tiny_headroom.py --seeds 0 1 2                      # 2T+2S, 60 steps a seed; hours on one core
    python studies/tiny_headroom.py --seeds 0 1 2 --random_rewards     # control: students are paid by a coin
    python studies/tiny_headroom.py --forced                           # control: the base made to think first

Runs lie in `<output>/seed_<n>`, are saved every 20 steps and go on where they stopped; several commands with different
seeds can run side by side. `<output>/headroom.json` holds what every finished run scored on `eval_tasks.jsonl`: the
base's rates, and the students' mean at every evaluation, over all tasks and by kind. What it leaves out: plots, which
each run's `run.png` has.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import beside_recipes  # noqa: F401
import torch
from tiny_card import gains_of
from tiny_scores import FORCED_SAMPLES, Scorer
from tiny_traces import OPEN
from trl import TrlParser

from trl_populora.assets import tiny_base_path, tiny_eval_tasks
from trl_populora.cli import TrainArguments, build_trainer
from trl_populora.config import MemberConfig, PopuLoRAConfig
from trl_populora.report.load import load_evaluations
from trl_populora.report.plots import plot_run
from trl_populora.sandbox import Sandbox
from trl_populora.step.pay import Answer
from trl_populora.tasks import load_seed_tasks
from trl_populora.tasks.script import PromptArguments
from trl_populora.trainer import PopuLoRATrainer


CONFIG = Path(__file__).resolve().parents[1] / "recipes" / "tiny" / "config_2t2s.yaml"
# The paper's pay with our guards, teachers as fast as students, nothing replayed: what is kept of these runs was
# measured so, before the recipes took what `screen.py` found better.
PAPERS = ("--teacher_reward", "guarded", "--teacher_learning_rate", "none", "--replay", "0")
PAPERS += ("--per_device_train_batch_size", "24")  # of 144 rows for two pairs, 288 for four, 72 for one
Change = Callable[[PopuLoRATrainer], None]
MEASURES = ("solve_rate", "code_o/solve_rate", "code_i/solve_rate", "code_f/solve_rate", "thinking_rate")


def pay_by_coin(trainer: PopuLoRATrainer) -> None:
    """Makes the students' reward say nothing: right or wrong with equal chances."""
    rng = random.Random(f"coin {trainer.args.seed}")

    def coin(answer: Answer) -> float:
        return rng.choice((1.0, -0.5))

    trainer.game.rules = replace(trainer.game.rules, student_reward=coin)


def build(run: Path, seed: int, options: list[str], config: Path = CONFIG) -> PopuLoRATrainer:
    """The trainer of a recipe's run with `PAPERS` settings, unless options name others; it is saved every 20 steps."""
    return build_trainer(*parse(run, seed, options, config))


def parse(
    run: Path, seed: int, options: list[str], config: Path = CONFIG
) -> tuple[TrainArguments, PopuLoRAConfig, MemberConfig, PromptArguments]:
    given = ["--config", str(config), "--seed", str(seed), "--output_dir", str(run), "--save_strategy", "steps"]
    given += ["--save_steps", "20", "--save_total_limit", "1", *PAPERS, *options]
    classes = (TrainArguments, PopuLoRAConfig, MemberConfig, PromptArguments)
    return TrlParser(classes).parse_args_and_config(given)


def train(run: Path, seed: int, options: list[str], config: Path = CONFIG, change: Change | None = None) -> None:
    """Trains one run to its end, from its newest checkpoint if there is one; `change` gets the trainer before that."""
    trainer = build(run, seed, options, config)
    if change is not None:
        change(trainer)
    trainer.train(resume_from_checkpoint="newest")
    trainer.save_state()
    trainer.save_model()
    plot_run(run)


def results(output: Path) -> dict[str, dict]:
    """What the finished runs scored, by seed."""
    found = {}
    for state in sorted(output.glob("seed_*/trainer_state.json")):
        evaluations = load_evaluations(state.parent)
        last = evaluations[-1]
        found[state.parent.name.removeprefix("seed_")] = {
            "base": {measure: last[f"eval/base/{measure}"] for measure in MEASURES},
            "students": [
                {"step": entry["step"]}
                | {
                    measure: entry["eval/solve_rate_mean" if measure == "solve_rate" else f"eval/{measure}"]
                    for measure in MEASURES
                }
                for entry in evaluations
            ],
        }
    return found


def forced_rates() -> dict[str, float]:
    """Solve rate of the base on the held-out tasks when its code_o and code_i answers must begin with `<think>`."""
    tasks = load_seed_tasks(tiny_eval_tasks())
    rates = {}
    with Sandbox() as sandbox:
        scorer = Scorer(Path(tiny_base_path()), sandbox)
        torch.manual_seed(0)
        for name, kind in scorer.kinds.items():
            own = [task for task in tasks if task.kind == name]
            opening = "" if name == "code_f" else f"{OPEN}\n"
            right = scorer.grade(kind, own, scorer.attempts(kind, own, FORCED_SAMPLES, opening), FORCED_SAMPLES)
            rates[f"{name}/solve_rate"] = float(right.mean())
    return {"solve_rate": fmean(rates.values()), **rates}  # the kinds have equally many tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--random_rewards", action="store_true", help="pay students by a coin instead")
    parser.add_argument("--forced", action="store_true", help="only score the base, made to think first")
    parser.add_argument("--output", type=Path, default=Path("runs/headroom"))
    arguments, options = parser.parse_known_args()
    torch.set_num_threads(1)  # two threads beside any other process are slower than one
    if arguments.forced:
        print(json.dumps(forced_rates()))
        return
    for seed in arguments.seeds:
        run = arguments.output / f"seed_{seed}"
        if not (run / "trainer_state.json").exists():
            train(run, seed, options, change=pay_by_coin if arguments.random_rewards else None)
    found = results(arguments.output)
    (arguments.output / "headroom.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for seed, result in found.items():
        told = ", ".join(
            f"{measure} {result['base'][measure]:.3f} {gain:+.3f}" for measure, gain in gains_of(result).items()
        )
        print(f"seed {seed}, {result['students'][-1]['step']} steps, base and gain: {told}")
    print(json.dumps({seed: gains_of(result) for seed, result in found.items()}))


if __name__ == "__main__":
    main()
