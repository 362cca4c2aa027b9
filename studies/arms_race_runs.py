"""
What is kept of an arms race's runs, small enough for a repository: `arms_race.json`.

A run of 150 steps leaves 60 MB; its figures are four kilobytes, so that runs of several days and machines are compared
on one page. Curves are means of `BLOCK` steps, evaluations what the held-out tasks said.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from trl_populora.lora.layers import BASE_NAME
from trl_populora.report.load import load_evaluations, load_history
from trl_populora.run.read import PLAYED, read_lines


RESULTS = "arms_race.json"
BLOCK = 5  # steps; the shortest runs of the comparison have 15 of them
KINDS = ("code_o", "code_i", "code_f")
EVALUATED = (
    *(f"solve_rate_{which}" for which in ("mean", "best", "worst")),
    *(f"{name}/solve_rate" for name in (*KINDS, BASE_NAME)),
    "thinking_rate",
)
ATTEMPTS = 8  # at a task; a proposal and its attempts are as many rows and one
NEWBORN, TOLERANCE = 3, 0.05  # steps that a child's solve rate is averaged over; how near to its peers it is back


@dataclass(frozen=True)
class Measure:
    """One row of the table and one panel of the picture: the metrics whose mean it is, its name and its unit."""

    keys: tuple[str, ...]
    name: str
    unit: str


MEASURES = (
    Measure(("solve/rate",), "solve rate of fresh tasks", "fraction"),
    Measure(("rewards/teacher_reward/mean",), "teacher reward", "points"),
    Measure(("rewards/student_reward/mean",), "student reward", "points"),
    Measure(("curriculum/ast_depth",), "AST depth", "nodes"),
    Measure(("curriculum/cyclomatic",), "cyclomatic complexity", "paths"),
    Measure(("curriculum/lines",), "lines of code", "lines"),
    Measure(("curriculum/variables",), "variables", "names"),
    Measure(("new_structures",), "new structures per valid proposal", "number"),
    Measure(("rating_spread",), "rating spread in a role", "std of mu / sigma"),
    Measure(("solve/frac_none",), "valid proposals nobody solves", "fraction"),
    Measure(("propose/valid_rate",), "valid proposals", "fraction"),
)


@dataclass
class Run:
    """
    What the steps of a run have left.

    Args:
        steps (`int`): How many.
        curves (`dict[str, list[float]]`): By name of a measure, its mean over each `BLOCK` steps; NaN where unknown.
        evaluations (`list[dict]`): What students and base scored on the held-out tasks, oldest first.
        untrained (`dict[str, float]`): Solve rates on levels never trained, of its students and of the base.
        back (`list[int | None]`): Of every newborn student, the updates after which it was as good as the other
            students; None if it was not until it was replaced or the run ended.
        rows, adapters (`int`): Rows of a step, proposals and attempts; what they train.
        minutes (`float`): Minutes of one thread that its steps took, evaluations apart; a busy machine takes longer.
    """

    steps: int
    curves: dict[str, list[float]] = field(default_factory=dict)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    untrained: dict[str, float] = field(default_factory=dict)
    back: list[int | None] = field(default_factory=list)
    rows: int = 0
    adapters: int = 0
    minutes: float = math.nan

    def first(self, steps: int) -> Run:
        """The run as it was after its first `steps`; what only its end has shown is left out."""
        if steps >= self.steps:
            return self
        curves = {name: curve[: steps // BLOCK] for name, curve in self.curves.items()}
        evaluations = [entry for entry in self.evaluations if entry["step"] <= steps]
        return replace(
            self, steps=steps, curves=curves, evaluations=evaluations, untrained={}, back=[], minutes=math.nan
        )

    def last(self, key: str) -> float:
        """A figure of the last evaluation; NaN without one."""
        return self.evaluations[-1][key] if self.evaluations else math.nan

    def gain(self, which: str = "mean") -> float:
        """What the mean, best or worst student solves at the last evaluation above what the base does."""
        return self.last(f"solve_rate_{which}") - self.last(f"{BASE_NAME}/solve_rate")

    def mean_gain(self) -> float:
        """The mean student's gain, averaged over the evaluations after the first update: who learns early has more."""
        base = self.last(f"{BASE_NAME}/solve_rate")
        return mean([entry["solve_rate_mean"] - base for entry in self.evaluations if entry["step"]])

    def transfer(self) -> float:
        """Mean solve rate of the students on the untrained levels."""
        return mean([rate for name, rate in self.untrained.items() if name != BASE_NAME])

    def fifths(self, name: str) -> tuple[float, float]:
        """Mean of a measure over the first and over the last fifth of the steps."""
        curve = self.curves.get(name, [])
        fifth = max(1, len(curve) // 5)
        return mean(curve[:fifth]), mean(curve[-fifth:])

    def rise(self, name: str) -> float:
        first, last = self.fifths(name)
        return last - first

    def proposed(self) -> list[float]:
        """Valid proposals of a step, the mean of each block."""
        return [share * self.rows / (1 + ATTEMPTS) for share in self.curves["valid proposals"]]

    def new_shapes(self) -> list[float]:
        """Structures of a step's programs that nobody has written before, the mean of each block."""
        each = self.curves["new structures per valid proposal"]
        return [new * valid for new, valid in zip(each, self.proposed(), strict=True)]

    def swing(self) -> float:
        """
        How far the solve rate of fresh tasks swings: the standard deviation of its blocks about a parabola, because
        one rise and fall is no oscillation, less what the sampling of tasks alone can make, .5 over the root of a
        block's valid proposals. NaN where fewer than four blocks are known.
        """
        rates = np.array(self.curves["solve rate of fresh tasks"])
        places = np.flatnonzero(np.isfinite(rates))
        if len(places) < 4:
            return math.nan
        left = rates[places] - np.polyval(np.polyfit(places, rates[places], 2), places)
        return math.sqrt(float(left @ left) / (len(places) - 3)) - 0.5 / math.sqrt(BLOCK * mean(self.proposed()))

    def share_back(self, updates: int = 20) -> float:
        """Share of the newborn students that were as good as the others after at most so many updates."""
        return mean([float(count is not None and count <= updates) for count in self.back])


def measure(directory: Path) -> Run:
    """Reads what a run, also an unfinished one, has left in its directory."""
    history = read_history(directory)
    rows = read_rows(directory)
    adapters = sum(key.startswith("member/") and key.endswith("/grad_norm") for key in history[0])
    untrained = directory / "untrained.json"
    return Run(
        steps=len(history),
        curves={each.name: blocks(values(history, each)) for each in MEASURES},
        evaluations=[
            {"step": entry["step"]} | {key: number(entry.get(f"eval/{key}")) for key in EVALUATED}
            for entry in load_evaluations(directory)
        ],
        untrained=json.loads(untrained.read_text()) if untrained.exists() else {},
        back=recoveries(read_lines(directory / "lineage.jsonl"), rows),
        rows=sum(row["step"] == history[0]["step"] for row in rows),
        adapters=adapters,
        minutes=sum(entry.get("step_time", 0.0) for entry in read_lines(directory / "times.jsonl")) / 60,
    )


def read_rows(directory: Path) -> list[dict[str, Any]]:
    """Who wrote each proposal and attempt of a run, and whether it was right."""
    import pyarrow.parquet as pq

    columns = ["step", "role", "member", "version", "correct", "archived"]
    tables = [pq.read_table(path, columns=columns) for path in sorted(directory.glob("rollouts/*.parquet"))]
    return [row for table in tables for row in table.to_pylist()]


def read_history(directory: Path) -> list[dict[str, float]]:
    """
    Metrics per step, with two that compare runs of different sizes: coverage gained per valid proposal, because a
    population writes more of them, and the spread of ratings in units of their own uncertainty.
    """
    history = [entry for entry in load_history(directory) if PLAYED in entry]
    proposed = [row["role"] for row in read_rows(directory) if row["step"] == history[0]["step"]].count("teacher")
    for before, entry in zip([None, *history], history, strict=False):
        valid = (entry["propose/valid_rate"] or 0.0) * proposed
        gained = entry["curriculum/coverage"] - before["curriculum/coverage"] if before else math.nan
        entry["new_structures"] = gained / valid if valid else math.nan
        sigma = mean(value for key, value in entry.items() if key.startswith("member/") and key.endswith("/sigma"))
        spread = fmean(number(entry.get(f"population/{role}/mu_std")) for role in ("teacher", "student"))
        entry["rating_spread"] = spread / sigma
    return history


def recoveries(lineage: Iterable[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """
    After how many updates each newborn student solved, over `NEWBORN` steps, what the others did, less `TOLERANCE`.

    Args:
        lineage (`Iterable[dict]`): Births, as in `lineage.jsonl`.
        rows (`Sequence[dict]`): `step role member version correct archived` of every row.
    """
    solved: dict[tuple[str, int], dict[int, list[bool]]] = {}
    for row in rows:
        if row["role"] == "student" and not row["archived"]:
            of_step = solved.setdefault((row["member"], row["version"]), {})
            of_step.setdefault(row["step"], []).append(row["correct"])
    counts = []
    births = [event for event in lineage if event["role"] == "student"]
    for event in births:
        name, version = event["child"].split("@")
        newborn = {other["child"] for other in births if other["step"] == event["step"]}
        peers = [of for (member, v), of in solved.items() if f"{member}@{v}" not in newborn]
        counts.append(_updates(event["step"], solved.get((name, int(version)), {}), peers))
    return counts


def _updates(born: int, own: Mapping[int, list[bool]], peers: Sequence[Mapping[int, list[bool]]]) -> int | None:
    for update in range(NEWBORN - 1, len(own)):
        steps = range(born + 1 + update - NEWBORN + 1, born + 2 + update)
        mine = [right for step in steps for right in own.get(step, [])]
        theirs = [right for step in steps for of in peers for right in of.get(step, [])]
        if mine and theirs and fmean(mine) >= fmean(theirs) - TOLERANCE:
            return update
    return None


def values(history: Sequence[Mapping[str, float]], of: Measure) -> list[float]:
    return [fmean(number(entry.get(key)) for key in of.keys) for entry in history]


def blocks(numbers: Sequence[float]) -> list[float]:
    """Means of each `BLOCK`; of a rest the mean of the rest."""
    return [round(mean(numbers[start : start + BLOCK]), 4) for start in range(0, len(numbers), BLOCK)]


def number(value: float | None) -> float:
    return math.nan if value is None else value


def mean(numbers: Iterable[float]) -> float:
    """Of what is known; NaN of nothing."""
    known = [number for number in numbers if not math.isnan(number)]
    return fmean(known) if known else math.nan


def save(runs: Mapping[str, Mapping[int, Run]], path: Path) -> None:
    """Writes `arms_race.json`; unknown numbers are null."""
    kept = {variant: {str(seed): _plain(asdict(run)) for seed, run in of.items()} for variant, of in runs.items()}
    lines = [
        f"{json.dumps(variant)}: {{\n" + ",\n".join(f"{json.dumps(s)}: {json.dumps(r)}" for s, r in of.items()) + "\n}"
        for variant, of in kept.items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")  # a line per run


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def load(path: Path) -> dict[str, dict[int, Run]]:
    """Runs by variant and seed from `arms_race.json`; none where there is no such file."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    return {variant: {int(seed): _run(run) for seed, run in of.items()} for variant, of in kept.items()}


def _run(kept: dict[str, Any]) -> Run:
    curves = {name: [*map(number, curve)] for name, curve in kept["curves"].items()}
    evaluations = [{key: number(value) for key, value in entry.items()} for entry in kept["evaluations"]]
    return Run(**kept | {"curves": curves, "evaluations": evaluations, "minutes": number(kept["minutes"])})
