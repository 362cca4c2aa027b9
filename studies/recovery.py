"""
How many updates does a child need until it is paid what its parent is? (R4 of docs/paper.md)

    python studies/as_printed.py --variants default      # the parents: five runs of 60 steps on the embedded base
    python studies/recovery.py                           # then 23 steps a seed, some 15 minutes of one core
    python studies/recovery.py --seeds 0 --output runs/one

From the population that a run has left come, for each role, the best and the second best member by rating. A new run
puts them to the same game: the best, a fresh adapter, and a child of each operator play side by side, matched at
random, without further births. All of them, the parent too, begin with an empty optimizer state. A child is back after
the first update from which its mean reward over three plays is the parent's over the same plays, less .05 at most. The
operator `clone` is an unchanged copy of the parent: what it needs is noise.

Finished runs are read and not run again. `<output>/recovery.json` holds the rewards, `recovery.md` the table. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import beside_recipes  # noqa: F401
import pyarrow.parquet as pq
import torch
from arms_race_page import interval
from arms_race_runs import NEWBORN, TOLERANCE
from as_printed import DEFAULT, parse
from score_held_out import markdown

from trl_populora.cli import build_trainer
from trl_populora.files import write_json
from trl_populora.lora.members import read_member
from trl_populora.population.operators import CROSSOVERS, MUTATIONS
from trl_populora.run.checkpoint import write_member_file
from trl_populora.run.read import read_population
from trl_populora.trainer import PopuLoRATrainer


ROLES = ("teacher", "student")
PARENT, FRESH = "parent", "fresh adapter"
ENTRANTS = (PARENT, FRESH, *MUTATIONS, *CROSSOVERS)  # by place: `teacher_0` and `student_0` are the parents
UPDATES = 20  # the paper's upper figure
GAME = {
    "teachers": len(ENTRANTS),
    "students": len(ENTRANTS),
    "attempts_per_task": 4,
    "per_device_train_batch_size": 24,
    "matchmaking": "uniform",
    "evolve_every": 0,
    "eval_strategy": "no",
    "eval_on_start": "false",
    "max_steps": UPDATES + NEWBORN,
}
# By role and entrant, the mean reward of each play; None if a student had no fresh task in it.
Rewards = dict[str, dict[str, list[float | None]]]


def fill(trainer: PopuLoRATrainer, parents: Path, seed: int) -> None:
    """Replaces all members but the fresh ones: by a parent, and by the children of two."""
    members = read_population(parents)["members"]
    for role in ROLES:
        best = sorted((each for each in members if each["role"] == role), key=lambda each: each["mu"])[-2:]
        places = [member.name for member in trainer.population.role(role)]
        untouched, factors = read_member(trainer.model, places[0]), []
        for each in reversed(best):
            write_member_file(trainer.model, places[0], parents / each["adapter"] / "adapter_model.safetensors")
            factors.append(read_member(trainer.model, places[0]))
        for place, entrant in zip(places, ENTRANTS, strict=True):
            generator = torch.Generator().manual_seed(seed)
            if entrant in MUTATIONS:
                child = MUTATIONS[entrant](factors[0], generator)
            elif entrant in CROSSOVERS:
                child = CROSSOVERS[entrant](*factors, generator)
            else:
                child = factors[0] if entrant == PARENT else untouched
            trainer.replace_member(place, child, step=0, operator=entrant)


def play(run: Path, parents: Path, seed: int, options: Sequence[str]) -> Rewards:
    """Plays a run to its end unless it is there, and reads what every member was paid in every play."""
    if not (run / "trainer_state.json").exists():  # written at the very end
        given = [word for name, value in GAME.items() for word in (f"--{name}", str(value))]
        trainer = build_trainer(*parse(run, DEFAULT, seed, [*given, *options]))
        fill(trainer, parents, seed)
        trainer.train(resume_from_checkpoint="newest")
        trainer.save_state()
    paid: dict[str, dict[int, list[float]]] = {}
    for path in run.glob("rollouts/step_*.parquet"):
        for row in pq.read_table(path, columns=["step", "member", "archived", "reward"]).to_pylist():
            if not row["archived"]:
                paid.setdefault(row["member"], {}).setdefault(row["step"], []).append(row["reward"])
    steps = sorted({step for of_member in paid.values() for step in of_member})
    return {
        role: {
            entrant: [fmean(known) if (known := paid[f"{role}_{place}"].get(step)) else None for step in steps]
            for place, entrant in enumerate(ENTRANTS)
        }
        for role in ROLES
    }


def behind(rewards: dict[str, list[float | None]], entrant: str) -> list[float]:
    """
    After each number of updates, from 0 on: mean reward over `NEWBORN` plays, less the parent's over the same. Plays
    count in which both had a reward; NaN if there are none.
    """
    pairs = list(zip(rewards[entrant], rewards[PARENT], strict=True))
    gaps = []
    for start in range(len(pairs) - NEWBORN + 1):
        window = pairs[start : start + NEWBORN]
        known = [own - parent for own, parent in window if own is not None and parent is not None]
        gaps.append(fmean(known) if known else math.nan)
    return gaps


def count_updates(rewards: dict[str, list[float | None]], entrant: str) -> int | None:
    """The updates after which an entrant is back; None if it is not within `UPDATES`."""
    return next((n for n, gap in enumerate(behind(rewards, entrant)[: UPDATES + 1]) if gap >= -TOLERANCE), None)


def tell(seeds: Sequence[Rewards]) -> list[list[str]]:
    """A row for each entrant but the parent: how far from the parent it begins, and by seed when it is back."""
    titles = ("reward at first, less the parent's", "updates, by seed")
    rows = [["operator", *(f"{role}s: {title}" for role in reversed(ROLES) for title in titles)]]
    for entrant in ENTRANTS[1:]:
        row = [entrant]
        for role in reversed(ROLES):
            first = [behind(rewards[role], entrant)[0] for rewards in seeds]
            counts = [count_updates(rewards[role], entrant) for rewards in seeds]
            row += [interval(first), ", ".join("never" if count is None else str(count) for count in counts)]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parents", type=Path, default=Path("runs/as_printed/default"), help="holds seed_<n>")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=Path("runs/recovery"))
    options, settings = parser.parse_known_args()
    torch.set_num_threads(1)  # two threads beside any other process are slower than one
    for seed in options.seeds:
        if not (options.parents / f"seed_{seed}" / "population.json").exists():
            parser.error(f"{options.parents}/seed_{seed} holds no population. `studies/as_printed.py` makes the runs.")
    found = {
        seed: play(options.output / f"seed_{seed}", options.parents / f"seed_{seed}", seed, settings)
        for seed in options.seeds
    }
    write_json(options.output / "recovery.json", found)
    table = markdown(tell(list(found.values())))
    (options.output / "recovery.md").write_text(table + "\n")
    print(table)
    updates = {
        role: {name: [count_updates(rewards[role], name) for rewards in found.values()] for name in ENTRANTS[1:]}
        for role in ROLES
    }
    print(json.dumps({"seeds": options.seeds, "updates": updates}))


if __name__ == "__main__":
    main()
