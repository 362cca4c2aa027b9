"""What a sweep in one run finds on the embedded base, and what evolution and successive halving add at equal rows.

    OMP_NUM_THREADS=1 python benchmarks/sweep_learns.py --output runs/sweep_learns    # nine runs of 4 CPU minutes
    OMP_NUM_THREADS=1 python benchmarks/sweep_learns.py --output runs/more --seeds 0 1 2 3 4 5
    python benchmarks/sweep_learns.py --output runs/small --small      # walks through; figures mean nothing

Four members train on output tasks of the package (86 seed tasks), with one learning rate each and one reward, 1 for
the right answer. At the end every member answers held-out output tasks (104, of combinations of operations that the
base never saw), sampled as in training. Each seed makes one run of every arm:

- `sweep`: four rates side by side, and nobody is replaced;
- `evolution`: the same, and every few steps a child of better members replaces the worst one;
- `halving`: the same, and the worse half leaves twice, so that the last member has the rows of all.

Per seed all runs see the same rows in number and the same prompts first. `best` is the held-out reward of the member
that has the highest reward in training over the last third of its steps, so no held-out answer chooses it. Intervals
are Student's t over seeds, 95 %; differences of arms are taken seed by seed.

Each finished run is a line of `<output>/runs.jsonl`, and a run whose line is there is not made again. The last line on
the terminal is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from sweep import pose, right
from vs_trl import COMMON, lora

from trl_populora.assets import tiny_eval_tasks
from trl_populora.config import PopuLoRAConfig
from trl_populora.evaluate.intervals import measure_mean
from trl_populora.tasks import load_seed_tasks
from trl_populora.trainer import PopuLoRATrainer


BASE = "base"
RATES = (2e-4, 1e-3, 3e-3, 1e-2)
STEPS = 16
ARMS: dict[str, dict[str, Any]] = {
    "sweep": {},
    "evolution": {"evolve_every": STEPS // 4, "evolve_burn_in": STEPS // 4},
    "halving": {"halve_every": STEPS // 3},
}
SETTINGS = COMMON | {
    "max_steps": STEPS,
    "lr_scheduler_type": "constant",
    "num_generations": 8,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 256,
    "num_generations_eval": 1,
    "per_device_eval_batch_size": 104,
    "save_rollouts": False,
}
SMALL = {
    "max_steps": 3,
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 16,
}


def make_run(arm: str, seed: int, small: bool) -> dict[str, Any]:
    """Trains a run and evaluates its members; returns its line. The arm `base` is one member without training."""
    train, held_out = (pose(load_seed_tasks(path), "compact") for path in (None, tiny_eval_tasks()))
    rates = RATES[:1] if arm == BASE else RATES
    options = SETTINGS | ARMS.get(arm, {}) | {"seed": seed, "learning_rate": list(rates)}
    if small:
        options |= SMALL | dict.fromkeys(ARMS.get(arm, {}), 1)
        held_out = held_out.select(range(4))
    with tempfile.TemporaryDirectory() as directory:
        args = PopuLoRAConfig(directory, students=len(rates), **options)
        trainer = PopuLoRATrainer("tiny", right, args, train, held_out, peft_config=lora())
        start = time.perf_counter()
        if arm != BASE:
            trainer.train()
        trained = time.perf_counter()
        evaluated = trainer.evaluate()
        seconds = {"train": round(trained - start, 1), "evaluate": round(time.perf_counter() - trained, 1)}
        members = describe(trainer, evaluated)
    return {"arm": arm, "seed": seed, "small": small, "seconds": seconds, "members": members}


def describe(trainer: PopuLoRATrainer, evaluated: dict[str, float]) -> dict[str, dict[str, Any]]:
    """The members at the end: rate, version, reward by step, and held-out reward."""
    found = {}
    for member in trainer.population:
        key = f"member/{member.name}/reward"
        found[member.name] = {
            "rate": member.settings.get("learning_rate", trainer.args.learning_rate),
            "version": member.version,
            "trained": [entry[key] for entry in trainer.state.log_history if key in entry],
            "held_out": evaluated[f"eval_{key}"],
        }
    return found


def find_best(members: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The member with the highest reward in the last third of the training."""
    return max(members.values(), key=lambda member: fmean(member["trained"][-max(1, len(member["trained"]) // 3) :]))


def summarise(lines: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """The held-out rewards by seed: of the base, of each rate of the sweep, and of each arm's best member and mean."""
    by_arm: dict[str, dict[int, dict[str, dict[str, Any]]]] = {}
    for line in lines:
        by_arm.setdefault(line["arm"], {})[line["seed"]] = line["members"]
    values: dict[str, dict[int, float]] = {}
    for arm, runs in by_arm.items():
        for seed, members in runs.items():
            told = [member["held_out"] for member in members.values()]
            if arm == BASE:
                values.setdefault(BASE, {})[seed] = told[0]
                continue
            if arm == "sweep":
                for member in members.values():
                    values.setdefault(f"sweep, rate {member['rate']:g}", {})[seed] = member["held_out"]
            values.setdefault(f"{arm}, best", {})[seed] = find_best(members)["held_out"]
            values.setdefault(f"{arm}, mean of members", {})[seed] = fmean(told)
    for arm in ARMS:
        own, plain = values.get(f"{arm}, best", {}), values.get("sweep, best", {})
        if arm != "sweep" and (both := sorted(own.keys() & plain.keys())):
            values[f"{arm} - sweep, best"] = {seed: own[seed] - plain[seed] for seed in both}
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/sweep_learns"), help="directory of the results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--small", action="store_true", help="few steps with short rows")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "runs.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for seed in options.seeds:
        for arm in (BASE, *options.arms):
            if any((line["arm"], line["seed"], line["small"]) == (arm, seed, options.small) for line in lines):
                continue
            lines.append(make_run(arm, seed, options.small))
            with path.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            print(f"seed {seed}, {arm}: {lines[-1]['seconds']}", flush=True)
    values = summarise([line for line in lines if line["small"] == options.small])
    figures = {}
    print(f"\n{'held-out reward':32}{'mean':>8}{'+-':>8}   by seed")
    for name, by_seed in values.items():
        mean, half = measure_mean(list(by_seed.values()))
        figures[name] = {"mean": round(mean, 4), "half": round(half, 4) if math.isfinite(half) else None}
        print(f"{name:32}{mean:8.3f}{half:8.3f}   " + " ".join(f"{value:.3f}" for value in by_seed.values()))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
