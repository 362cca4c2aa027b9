"""
The race at equal rows: populations against one agent, each arm with as many sampled rows, paired by seed.

    python studies/race.py --arms pooled agent_104_slow --seeds 5 6              # an hour a run of one core
    python studies/race.py --arms agent_104 --seeds 0 --rows 31200               # a first look, half as far
    python studies/race.py --table_only                                          # of all runs so far
    python studies/race.py --table_only --keep                                   # put them into the project

`tiny/race_plan.json` has arms, settings and seeds, each arm's since before its first run. A *row* is a completion that
is sampled for training: a proposal, valid or not, or an attempt at a proposal, at a filler or at an archived task.
Runs lie in `<output>/<arm>/seed_<n>`, use one thread, are saved every 20 steps and go on where they stopped when the
command is given again; several commands can share the work. At its end a run's students, each and merged into one
model, are judged on tasks that no screen has used. Three tables are printed: all runs; the arms; and what each arm has
more than the single agent of the same seed. The last two have only whole runs, of seeds that chose no settings. A run
with fewer `--rows` is a first look, and goes on when more rows are asked for. The figures of all runs are kept in
`<output>/race.json`; with that file in a new `<output>`, its runs stand in the tables beside those made there.
`--keep` adds figures and metrics to `tiny/race.json` and `tiny/race_runs.tar.xz`, and writes the tables of all kept
runs into `README.md` here and into `docs/results.md`.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import beside_recipes  # noqa: F401
import torch
from arms_race_page import differences, is_told
from likelihood import TARGETS, write_targets
from merging import read_students, write_merged
from score_held_out import markdown
from screen import HALF_KNOWN, draw_held_out, held_out_tasks, measure_steps, options_of, probe_tasks, rate_of
from tiny_headroom import train
from tiny_scores import Scorer
from tqdm import tqdm
from transformers.trainer_utils import get_last_checkpoint

from trl_populora.evaluate.intervals import measure_mean
from trl_populora.report.load import load_run
from trl_populora.run.read import read_lines
from trl_populora.sandbox import Sandbox
from trl_populora.tasks import Task


STUDIES = Path(__file__).resolve().parent
PLAN = json.loads((STUDIES / "tiny" / "race_plan.json").read_text())
RESULTS, METRICS, ONE_MODEL = "race.json", "race_runs.tar.xz", "one model"
# Arms are compared with these two, on seeds from `FIRST` on: 0 and 1 chose settings.
AGENT, CANDIDATE, FIRST = "agent_104_slow", "pooled", 5


def judged_tasks(count: int) -> list[Task]:
    """Held-out tasks that neither an evaluation nor another study of this base asks."""
    used = {task.task_id for task in [*held_out_tasks(), *draw_held_out("likelihood", TARGETS)]}
    used |= {target.task.task_id for target in write_targets(TARGETS)}
    fresh = [task for task in draw_held_out("race", 2 * count) if task.task_id not in used]
    return fresh[:count]


def trained_steps(run: Path) -> int:
    """Steps of a finished run, 0 of one that is not."""
    state = run / "trainer_state.json"
    return json.loads(state.read_text())["global_step"] if state.exists() else 0


def judge(run: Path, way: str) -> dict[str, dict[str, float]]:
    """
    Shares of right answers to the judged tasks and to the probes: of each student, and of all merged; measured once.
    A student gets a part of the attempts, so that all students together get as many as the merged model.
    """
    path = run / f"judged_{trained_steps(run)}.json"
    if not path.exists():
        checkpoint, rates = Path(get_last_checkpoint(str(run))), {}
        students = read_students(checkpoint)
        asked = {ONE_MODEL: [*students.values()]}
        if len(students) > 1:
            asked |= {name: [student] for name, student in students.items()}
        judged, probes = judged_tasks(PLAN["tasks"]), probe_tasks()
        with Sandbox() as sandbox:
            for name, members in tqdm(asked.items(), desc=f"{run}: judge"):
                with tempfile.TemporaryDirectory() as directory:
                    write_merged(checkpoint, way, members, Path(directory))
                    scorer = Scorer(Path(directory), sandbox)
                attempts = PLAN["attempts"] // (1 if name == ONE_MODEL else len(students))
                torch.manual_seed(0)
                rates[name] = {
                    "judged": rate_of(scorer, judged, attempts),
                    "probes": rate_of(scorer, probes, max(1, attempts // 4)),
                }
        path.write_text(json.dumps(rates, indent=1) + "\n")
    return json.loads(path.read_text())


def read_looks(run: Path) -> dict[str, float]:
    """What the merged model solved of the judged tasks when the run stopped earlier and was judged, by step."""
    steps = sorted(int(path.stem.removeprefix("judged_")) for path in run.glob("judged_*.json"))
    return {
        str(step): json.loads((run / f"judged_{step}.json").read_text())[ONE_MODEL]["judged"]
        for step in steps
        if step < trained_steps(run)
    }


def measure(run: Path, way: str) -> dict[str, Any]:
    """The figures of a finished run."""
    records = load_run(run)
    refused = [not row["valid"] for row in records.rows if row["role"] == "teacher"]
    return {
        **measure_steps(run),
        "commits": [*dict.fromkeys((run / "commit.txt").read_text().split())],
        "rows": len(records.rows),
        "tokens": records.history[-1]["num_tokens"],
        "invalid": fmean(refused),
        "core_seconds": round(sum(entry.get("step_time", 0.0) for entry in read_lines(run / "times.jsonl"))),
        "judged": judge(run, way),
        "looks": read_looks(run),
    }


def _students(figure: str) -> Callable[[Mapping[str, Any]], list[float]]:
    def of(run: Mapping[str, Any]) -> list[float]:
        each = [rates[figure] for name, rates in run["judged"].items() if name != ONE_MODEL]
        return each or [run["judged"][ONE_MODEL][figure]]

    return of


def _share(figure: Callable[[Mapping[str, Any]], float]) -> Callable[[Mapping[str, Any]], float]:
    return lambda run: 100 * figure(run)


FIGURES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "as one model, %": _share(lambda run: run["judged"][ONE_MODEL]["judged"]),
    "students in the mean, %": _share(lambda run: fmean(_students("judged")(run))),
    "worst student, %": _share(lambda run: min(_students("judged")(run))),
    "probes, as one model, %": _share(lambda run: run["judged"][ONE_MODEL]["probes"]),
    "features forgotten": lambda run: run["forgotten"],
    "features, last 20 steps": lambda run: run["features"][-1],
    "new shapes, last 20 steps, %": _share(lambda run: run["new_shapes"][-1]),
    "live rows, %": _share(lambda run: fmean(run["live"])),
    "invalid proposals, %": _share(lambda run: run["invalid"]),
    "million tokens": lambda run: run["tokens"] / 1e6,
    "minutes of one core": lambda run: run["core_seconds"] / 60,
}
COMPARED = [*FIGURES][:4]


def gather(output: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Figures by arm and seed: those kept, and those of the finished runs that lie in `output`."""
    path = output / RESULTS
    kept = json.loads(path.read_text()) if path.exists() else {}
    for state in sorted(output.glob("*/seed_*/trainer_state.json")):
        arm, seed = state.parts[-3], state.parts[-2].removeprefix("seed_")
        if arm in PLAN["arms"]:
            kept.setdefault(arm, {})[seed] = measure(state.parent, PLAN["arms"][arm]["merged"])
    return _write(path, kept)


def _write(path: Path, kept: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Writes figures in the order of the plan and of the seeds."""
    kept = {arm: dict(sorted(kept[arm].items(), key=lambda each: int(each[0]))) for arm in PLAN["arms"] if arm in kept}
    path.write_text(json.dumps(kept, indent=1) + "\n")
    return kept


def keep(output: Path, found: Mapping[str, Mapping[str, Any]], studies: Path = STUDIES) -> None:
    """Adds the runs of `output` to the project: their figures (`found`), their metrics, and the pages' tables."""
    path = studies / "tiny" / RESULTS
    kept = json.loads(path.read_text())
    for arm, runs in found.items():
        kept.setdefault(arm, {}).update(runs)
    kept = _write(path, kept)
    with tarfile.open(studies / "tiny" / METRICS) as archive:
        metrics = {name: archive.extractfile(name).read() for name in archive.getnames()}
    for state in output.glob("*/seed_*/trainer_state.json"):
        own = state.with_name("metrics.jsonl")
        metrics[own.relative_to(output).as_posix()] = own.read_bytes()
    with tarfile.open(studies / "tiny" / METRICS, "w:xz") as archive:
        for name, text in sorted(metrics.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    raced = find_raced(kept)
    for page, table in (
        (studies / "README.md", list_runs(kept)),
        (studies.parent / "docs" / "results.md", describe(raced)),
        (studies.parent / "docs" / "results.md", compare(raced, AGENT)),
        (studies.parent / "docs" / "results.md", compare(raced, CANDIDATE)),
    ):
        head = re.escape(markdown(table[:1]).splitlines()[0].partition("`")[0])  # up to the names of arms
        written, count = re.subn(
            rf"^{head}.*\n(\|.*\n)+", lambda _, t=table: markdown(t) + "\n", page.read_text(), flags=re.M
        )
        assert count == 1, (page, head)
        page.write_text(written)


def find_raced(kept: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """The runs that count when arms are compared: all rows, and a seed that chose nothing."""
    whole = {
        arm: {seed: run for seed, run in runs.items() if int(seed) >= FIRST and run["rows"] == PLAN["rows"]}
        for arm, runs in kept.items()
    }
    return {arm: runs for arm, runs in whole.items() if runs}


def list_runs(kept: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[list[str]]:
    """A row per run: its arm, and what its merged model solves of the judged tasks."""
    rows = [["arm", "rows a step", "students' rate", "seed", "with half of the rows", "with all"]]
    for arm, runs in kept.items():
        plan = PLAN["arms"][arm]
        about = [f"`{arm}`", str(plan["rows_a_step"]), plan["settings"].get("learning_rate", "2.0e-3")]
        for seed, run in runs.items():
            end = run["judged"][ONE_MODEL]["judged"]
            rates = [run["looks"].get(str(run["steps"] // 2)), end] if run["rows"] == PLAN["rows"] else [end, None]
            rows.append([*about, seed, *("" if rate is None else f"{100 * rate:.1f} %" for rate in rates)])
    return rows


def describe(raced: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[list[str]]:
    """A column per arm: the mean of each figure over the arm's seeds, with a standard deviation from two seeds on."""
    rows = [["", *(f"`{arm}`" for arm in raced)], ["seed", *(", ".join(runs) for runs in raced.values())]]
    for name, figure in FIGURES.items():
        cells = []
        for runs in raced.values():
            values = [figure(run) for run in runs.values()]
            cells.append(f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else ""))
        rows.append([name, *cells])
    return rows


def compare(raced: Mapping[str, Mapping[str, Mapping[str, Any]]], reference: str) -> list[list[str]]:
    """A row per further arm: what it has more than `reference` in the same seed, in points, with a t interval."""
    whom = {AGENT: "the agent", CANDIDATE: "the candidate"}[reference]
    rows = [[f"minus {whom}", "seeds compared", *(name.removesuffix(", %") for name in COMPARED)]]
    for arm in raced if reference in raced else []:
        found = [differences(raced, FIGURES[name], arm, reference) for name in COMPARED]
        if arm not in (AGENT, reference) and found[0]:
            rows.append([f"`{arm}`", str(len(found[0])), *map(_tell, found)])
    return rows


def _tell(points: Sequence[float]) -> str:
    mean, half = measure_mean(points)
    if len(points) == 1:
        return f"{mean:+.1f}"
    text = f"{mean:+.1f} [{mean - half:+.1f} to {mean + half:+.1f}]"
    return f"**{text}**" if is_told(points) else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=[*PLAN["arms"]], choices=[*PLAN["arms"]], metavar="ARM")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the plan")
    parser.add_argument("--rows", type=int, default=PLAN["rows"], help="of each run, default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("runs/race"))
    parser.add_argument("--table_only", action="store_true", help="train nothing")
    parser.add_argument("--keep", action="store_true", help="put figures, metrics and tables into the project")
    options, settings = parser.parse_known_args()
    if options.rows < (most := max(PLAN["arms"][arm]["rows_a_step"] for arm in options.arms)):
        parser.error(f"--rows {options.rows} is less than a step of {most} rows")
    torch.set_num_threads(1)  # two threads beside any other process are slower than one
    for arm in [] if options.table_only else options.arms:
        plan = PLAN["arms"][arm]
        for seed in options.seeds or plan["seeds"]:
            run = options.output / arm / f"seed_{seed}"
            steps = options.rows // plan["rows_a_step"]
            if trained_steps(run) < steps:
                run.mkdir(parents=True, exist_ok=True)
                (run / "trainer_state.json").unlink(missing_ok=True)  # from here on the run is unfinished again
                asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
                with (run / "commit.txt").open("a") as commits:
                    commits.write(asked.stdout)
                train(run, seed, [*options_of(plan["settings"], options.output, steps, HALF_KNOWN), *settings])
            print(f"{run}: {json.dumps(judge(run, plan['merged']))}", flush=True)
    kept = gather(options.output)
    print(markdown(list_runs(kept)))
    raced = find_raced(kept)
    print(markdown(describe(raced)))
    print(markdown(compare(raced, AGENT)))
    print(markdown(compare(raced, CANDIDATE)))
    if options.keep:
        keep(options.output, kept)


if __name__ == "__main__":
    main()
