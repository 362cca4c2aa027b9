"""
Screens what teachers are paid for and what keeps them sane, each candidate for some seeds, and prints one table.

    python studies/screen.py --candidates paper rarity --seeds 0 1 2
    python studies/screen.py --candidates regret --seeds 0 --steps 40      # a first look, minutes
    python studies/screen.py --table_only                                  # of all runs so far
    python studies/screen.py --table_only --against single_agent_replay    # and what each has more than that one

A candidate is `recipes/tiny/config_2t2s.yaml` on the base that half-knows and on code_o alone, with the settings that
`CANDIDATES` lists; further options go to every run. Runs lie in `<output>/<candidate>/seed_<n>`, use one thread, are
saved every 20 steps and go on where they stopped when the command is given again; several commands can share the work.
Students are scored every 25 steps on held-out programs, at the end on *probes* too: one-line programs for each
half-known operation, with inputs on which the base's mistake shows, and so is the mean of a run's students, as the
model that `populora export --merge_students` writes. All figures are kept in `<output>/screen.json`;
with that file in a new `<output>`, its runs stand in the table beside those made there.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import beside_recipes  # noqa: F401
import torch
from arms_race_page import paired_table, spread
from differing import CHANGES
from score_held_out import markdown
from tiny_documents import DialogueWriter, random_task
from tiny_gate import PROGRAMS_TRIED, one_line_programs, probes
from tiny_headroom import train
from tiny_programs import OPERATIONS
from tiny_scores import EVAL_LEVELS, Scorer

from trl_populora.evaluate.cross_play import assemble
from trl_populora.hub.export import export_member
from trl_populora.lora.layers import BASE_NAME
from trl_populora.report.load import load_evaluations, load_run
from trl_populora.sandbox import Sandbox
from trl_populora.tasks import Task


RESULTS = "screen.json"
HALF_KNOWN = Path(__file__).resolve().parent / "tiny" / "half_known"
KIND = "code_o"
HELD_OUT, PROBES, ATTEMPTS = 120, 4, 4  # tasks; probes for each operation; attempts at a probe
BLOCK = 10  # steps
MASTERED, FORGOTTEN, ENOUGH = 0.8, 0.5, 12  # solve rates of a feature in a block of so many attempts
SLOW = "5.0e-4"
REPLAYED = {"replay": "0.34", "per_device_train_batch_size": "26"}  # 208 rows for two pairs instead of 144
# Twice the members, with the pay, rates and replay that won among two pairs.
FOUR_PAIRS = {
    "teachers": "4",
    "students": "4",
    "teacher_reward": "rarity",
    "teacher_learning_rate": SLOW,
    **REPLAYED,
}
CANDIDATES: dict[str, dict[str, str]] = {
    "paper": {},  # what is called `guarded` now: the paper's formula with our guards
    "learnability": {"teacher_reward": "learnability"},
    "rarity": {"teacher_reward": "rarity"},
    "paper_slow": {"teacher_learning_rate": SLOW},
    "paper_replay": REPLAYED,
    "paper_pulled": {"teacher_beta": "0.05"},
    "rarity_slow": {"teacher_reward": "rarity", "teacher_learning_rate": SLOW},
    "rarity_replay": {"teacher_reward": "rarity", **REPLAYED},
    "rarity_slow_replay": {"teacher_reward": "rarity", "teacher_learning_rate": SLOW, **REPLAYED},
    "rarity_unevolved": {"teacher_reward": "rarity", "evolve_every": "0"},
    "learnability_slow": {"teacher_reward": "learnability", "teacher_learning_rate": SLOW},
    "single_agent": {"single_agent": "true", "evolve_every": "0"},
    # The race: four pairs, against one adapter with the rows of a pair, and with those of four.
    "race_4t4s": FOUR_PAIRS,
    "single_agent_replay": {"single_agent": "true", "evolve_every": "0", **REPLAYED},
    "single_agent_all_rows": {"single_agent": "true", "evolve_every": "0", "proposals_per_teacher": "32", **REPLAYED},
    # Four pairs whose students are pooled every so many steps, at the rate of the others and at twice that.
    "separate": {**FOUR_PAIRS, "evolve_every": "0"},
    **{f"pooled_{k}": {**FOUR_PAIRS, "evolve_every": "0", "pool_every": k} for k in ("5", "1", "20")},
    **{
        f"pooled_{k}_fast": {**FOUR_PAIRS, "evolve_every": "0", "pool_every": k, "learning_rate": "4.0e-3"}
        for k in ("5", "1", "20")
    },
}
# Beside pooling: students that differ in rate or temperature, teachers that are paid for features of their own, and
# an outer step with momentum. `CHANGES` says what no option does. A list is written as on a command line: its
# values, with spaces between them.
FAST = CANDIDATES["pooled_5_fast"]
CANDIDATES |= {
    "pooled_5_rates": FAST,
    "pooled_5_temperatures": {**FAST, "temperature": "1 1 1 1 0.7 1 1 1.3"},  # teachers first
    "pooled_5_shares": {**FAST, "reward_funcs": "differing:keep_to_own"},
    "pooled_5_outer": CANDIDATES["pooled_5"],
}
COLUMNS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "held out, base": lambda run: run["held_out"][-1]["base"],
    "students": lambda run: run["held_out"][-1]["mean"],
    "worst": lambda run: run["held_out"][-1]["worst"],
    "below its best": lambda run: max(entry["mean"] for entry in run["held_out"]) - run["held_out"][-1]["mean"],
    "probes, base": lambda run: run["probes"].get(BASE_NAME, math.nan),
    "students' probes": lambda run: _mean([rate for name, rate in run["probes"].items() if name != BASE_NAME]),
    "as one model, held out": lambda run: [math.nan, *(own["held_out"] for own in run.get("merged", {}).values())][-1],
    "least valid": lambda run: min(run["valid"]),
    "features, first 20": lambda run: run["features"][0],
    "last 20": lambda run: run["features"][-1],
    "new shapes, last 20": lambda run: run["new_shapes"][-1],
    "solved by nobody, last 20": lambda run: run["nobody"][-1],
    "live rows": lambda run: _mean(run["live"]),
    "forgotten": lambda run: run["forgotten"],
}
COMPARED = {name: COLUMNS[name] for name in ("students", "worst", "students' probes", "as one model, held out")}


def _mean(numbers: Sequence[float]) -> float:
    return fmean(numbers) if numbers else math.nan


def held_out_tasks() -> list[Task]:
    return draw_held_out("screen", HELD_OUT)


def draw_held_out(seed: str, count: int) -> list[Task]:
    """Programs of levels 2 to 5 that combine what no training document of the base combines."""
    writer = DialogueWriter(random.Random(seed), held_out=True, operations=OPERATIONS)
    found: dict[str, Task] = {}
    while len(found) < count:
        task = random_task(KIND, EVAL_LEVELS[len(found) % len(EVAL_LEVELS)], writer)
        found.setdefault(task.task_id, task)
    return [*found.values()]


def options_of(settings: Mapping[str, str], output: Path, steps: int, model: Path) -> list[str]:
    """The command-line options of runs with some settings; writes the held-out tasks that they are scored on."""
    path = output / "held_out.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(task.to_record()) + "\n" for task in held_out_tasks()))
    given = {"task_kinds": KIND, "eval_tasks": str(path), "eval_steps": "25", "max_steps": str(steps)}
    given |= {"model_name_or_path": str(model)}
    words = {name: [value] for name, value in given.items()}
    words |= {name: value.split() for name, value in settings.items()}
    return [word for name, values in words.items() for word in (f"--{name}", *values)]


def probe_tasks() -> list[Task]:
    programs = one_line_programs(random.Random("probes"), PROGRAMS_TRIED)
    return [task for own in probes(KIND, programs, PROBES, random.Random("probes")).values() for task in own]


def score_probes(run: Path) -> dict[str, float]:
    """Share of right answers of the base and of each student of a finished run, over all probes; measured once."""
    path = run / "probes.json"
    if not path.exists():
        with assemble([str(run)], seed=0) as contest:
            rates = contest.score([BASE_NAME, *contest.students], probe_tasks(), ATTEMPTS)
        path.write_text(json.dumps(rates, indent=1) + "\n")
    return json.loads(path.read_text())


def score_merged(run: Path) -> dict[str, dict[str, float]]:
    """
    Shares of right answers to held-out tasks and probes of each student of a finished run and of the mean of several,
    each exported as a model of its own and asked in the same way, the mean last; measured once.
    """
    path = run / "merged.json"
    if not path.exists():
        members = json.loads((run / "population.json").read_text())["members"]
        names = [member["name"] for member in members if member["role"] == "student"]
        rates: dict[str, dict[str, float]] = {}
        with tempfile.TemporaryDirectory() as directory, Sandbox() as sandbox:
            for name in [*names, None] if len(names) > 1 else names:
                model = Path(directory, name or "mean")
                told = export_member(str(run), model, name, merge=True, merge_students=name is None)
                scorer = Scorer(model, sandbox)
                torch.manual_seed(0)
                rates[told] = {"held_out": rate_of(scorer, held_out_tasks()), "probes": rate_of(scorer, probe_tasks())}
        path.write_text(json.dumps(rates, indent=1) + "\n")
    return json.loads(path.read_text())


def rate_of(scorer: Scorer, tasks: Sequence[Task], attempts: int | None = None) -> float:
    kind, each = scorer.kinds[KIND], attempts or ATTEMPTS
    return float(scorer.grade(kind, tasks, scorer.attempts(kind, tasks, each), each).mean())


def measure(run: Path) -> dict[str, Any]:
    """What the steps of a run left, and of a finished one the probes and what its members score as models."""
    finished = (run / "trainer_state.json").exists()
    probed = {"probes": score_probes(run) if finished else {}, "merged": score_merged(run) if finished else {}}
    return {**measure_steps(run), **probed}


def measure_steps(run: Path) -> dict[str, Any]:
    """
    By blocks of 10 steps the valid share and live rows, by blocks of 20 the number of different features, new shapes
    per valid proposal and the share that nobody solves; evaluations; features forgotten.
    """
    records = load_run(run)
    proposals = [row for row in records.rows if row["role"] == "teacher"]
    valid = [row for row in proposals if row["valid"]]
    attempts = [row for row in records.rows if row["role"] == "student" and row["features"]]
    steps, wide = records.step, 2 * BLOCK
    covered = dict(zip(*records.series("curriculum/coverage"), strict=True))
    edges = [(start, min(start + wide, steps)) for start in range(0, steps, wide)]
    return {
        "steps": steps,
        "valid": _by_block(BLOCK, ((row["step"], row["valid"]) for row in proposals)),
        "live": _by_block(BLOCK, zip(*records.series("batch/live_rows"), strict=True)),
        "features": [
            len({word for row in valid if start < row["step"] <= end for word in row["features"]})
            for start, end in edges
        ],
        "new_shapes": [
            (covered[end] - covered[max(start, 1)]) / max(1, sum(start < row["step"] <= end for row in valid))
            for start, end in edges
        ],
        "nobody": _by_block(wide, ((row["step"], row["solve_rate"] == 0) for row in valid)),
        "held_out": [
            {
                "step": entry["step"],
                "base": entry[f"eval/{BASE_NAME}/solve_rate"],
                **{which: entry[f"eval/solve_rate_{which}"] for which in ("mean", "best", "worst")},
            }
            for entry in load_evaluations(run)
        ],
        "forgotten": count_forgotten(attempts),
    }


def _by_block(width: int, values) -> list[float]:
    cells: dict[int, list[float]] = defaultdict(list)
    for step, value in values:
        cells[(step - 1) // width].append(float(value))
    return [round(fmean(cells[block]), 3) for block in sorted(cells)]


def count_forgotten(attempts: Sequence[Mapping[str, Any]]) -> int:
    """Features whose tasks were once solved at .8 and more in a block of steps, and below .5 in the last one."""
    cells: dict[str, dict[int, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for row in attempts:
        for word in row["features"]:
            cells[word][(row["step"] - 1) // BLOCK].append(row["correct"])
    rates = [[fmean(own[b]) for b in sorted(own) if len(own[b]) >= ENOUGH] for own in cells.values()]
    return sum(bool(each) and max(each) >= MASTERED and each[-1] < FORGOTTEN for each in rates)


def gather(output: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Figures by candidate and seed: those kept, and those of the runs that lie in `output`."""
    path = output / RESULTS
    kept = json.loads(path.read_text()) if path.exists() else {}
    for metrics in sorted(output.glob("*/seed_*/metrics.jsonl")):
        candidate, seed = metrics.parts[-3], metrics.parts[-2].removeprefix("seed_")
        if candidate in CANDIDATES:
            kept.setdefault(candidate, {})[seed] = measure(metrics.parent)
    kept = {name: dict(sorted(kept[name].items())) for name in dict.fromkeys((*CANDIDATES, *kept)) if name in kept}
    path.write_text(json.dumps(kept, indent=1) + "\n")
    return kept


def table(kept: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[list[str]]:
    """A row per candidate: mean and standard deviation over its seeds."""
    rows = [["candidate", "steps x seeds", *COLUMNS]]
    for name, runs in kept.items():
        cells = [spread(map(column, runs.values())) for column in COLUMNS.values()]
        rows.append([name, f"{min(run['steps'] for run in runs.values())} x {len(runs)}", *cells])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", nargs="+", default=["paper", "rarity"], choices=[*CANDIDATES], metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--model", type=Path, default=HALF_KNOWN, help="model directory")
    parser.add_argument("--output", type=Path, default=Path("runs/screen"))
    parser.add_argument("--table_only", action="store_true", help="train nothing")
    parser.add_argument("--against", choices=[*CANDIDATES], metavar="NAME", help="compare the others with it")
    options, settings = parser.parse_known_args()
    torch.set_num_threads(1)  # two threads beside any other process are slower than one
    for seed in [] if options.table_only else options.seeds:
        for name in options.candidates:
            run = options.output / name / f"seed_{seed}"
            if not (run / "trainer_state.json").exists():
                given = options_of(CANDIDATES[name], options.output, options.steps, options.model)
                train(run, seed, [*given, *settings], change=CHANGES.get(name))
            print(f"{run}: {json.dumps(measure(run))}", flush=True)
    kept = gather(options.output)
    print(markdown(table(kept)))
    if options.against in kept:
        print(markdown(paired_table(kept, options.against, COMPARED)))


if __name__ == "__main__":
    main()
