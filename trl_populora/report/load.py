"""What a run has left so far, from its files: works on a run in progress and on a finished one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_populora.run.read import (
    EVALUATION,
    LINEAGE,
    METRICS,
    POPULATION_FILE,
    STEP,
    TIMES,
    classify_log,
    read_lines,
    read_population,
)
from trl_populora.tasks.python.complexity import PROGRAM_MEASURES


@dataclass
class Run:
    """
    What a run has left so far.

    Args:
        name: Its directory's or repository's name.
        history: Metrics per step, oldest first; with `num_iterations` not every step was played.
        rows: Proposals and attempts, each with the keys in `ROW_COLUMNS`.
        lineage: Births, oldest first.
        population: `population.json`; empty while there is none.
        evaluations: Figures on held-out tasks with their seconds, oldest first.
    """

    name: str
    history: list[dict[str, Any]]
    rows: list[dict[str, Any]] = field(default_factory=list)
    lineage: list[dict[str, Any]] = field(default_factory=list)
    population: dict[str, Any] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def latest(self) -> dict[str, Any]:
        """The last known value of every metric."""
        return {key: value for entry in self.history for key, value in entry.items() if value is not None}

    @property
    def kinds(self) -> list[str]:
        """Names of the kinds of task."""
        keys = {key for entry in self.history for key in entry}
        return sorted({key.split("/")[1] for key in keys if key.startswith("propose/") and key.count("/") == 2})

    @property
    def measures(self) -> list[str]:
        """
        What its kinds measure of their tasks, those of programs first; `coverage` and `entropy` are the archive's, and
        `features` counts over the tasks of several steps.
        """
        found = {key.removeprefix("curriculum/") for key in self.latest if key.startswith("curriculum/")}
        rest = found - {"coverage", "entropy", "features", *PROGRAM_MEASURES}
        return [name for name in PROGRAM_MEASURES if name in found] + sorted(rest)

    def members(self, role: str) -> list[str]:
        """Names of a role's slots, in order."""
        names = {key.split("/")[1] for key in self.latest if key.startswith(f"member/{role}_")}
        return sorted(names, key=lambda name: int(name.rpartition("_")[2]))

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, where it was known; `eval/` ones are those of evaluations."""
        entries = self.evaluations if key.startswith("eval/") else self.history
        points = [(entry["step"], entry[key]) for entry in entries if entry.get(key) is not None]
        return [step for step, _ in points], [value for _, value in points]

    @property
    def step(self) -> int:
        """The last logged step; 0 before the first."""
        return self.history[-1]["step"] if self.history else 0

    @property
    def planned(self) -> int | None:
        """Steps that the run is to have, if it says so."""
        return self.population.get("settings", {}).get("max_steps")

    @property
    def finished(self) -> bool:
        return self.planned is not None and self.step >= self.planned

    @property
    def seconds(self) -> tuple[float, float]:
        """What steps and evaluations took so far, resumed parts included; a logged time is the mean since the last."""
        before = [0, *(entry["step"] for entry in self.history)]
        steps = sum(
            (entry.get("step_time") or 0.0) * (entry["step"] - earlier)
            for entry, earlier in zip(self.history, before, strict=False)
        )
        return steps, sum(entry.get("eval/runtime") or 0.0 for entry in self.evaluations)

    @property
    def tables(self) -> list[str]:
        """Starts of the keys of each held-out table: `["eval/"]`, or `["eval/easy_", "eval/hard_"]` for named ones."""
        keys = {key for entry in self.evaluations for key in entry}
        return sorted(key.removesuffix("solve_rate_mean") for key in keys if key.endswith("solve_rate_mean"))

    @property
    def held_out_kinds(self) -> list[str]:
        """Kinds of the (first) held-out table, where there are several."""
        known = {key for entry in self.evaluations for key in entry}
        kinds = [kind for kind in self.kinds if self.tables and f"{self.tables[0]}{kind}/solve_rate" in known]
        return kinds if len(kinds) > 1 else []

    @property
    def thinks(self) -> bool:
        """Whether any attempt worked its task out before the answer."""
        return any(any(self.series(key)[1]) for key in ("solve/thinking_rate", "eval/thinking_rate"))

    @property
    def holds_programs(self) -> bool:
        """Whether its archive has seen a program: kinds of one's own may do without."""
        return bool(self.latest.get("curriculum/coverage"))

    @property
    def breadth(self) -> list[str]:
        """Metrics of how wide its tasks are: those of an archive of programs, and features where a kind names any."""
        of_programs = ["curriculum/coverage", "curriculum/entropy"] if self.holds_programs else []
        return of_programs + ["curriculum/features"] * bool(self.latest.get("curriculum/features"))

    @property
    def pairs(self) -> bool:
        """Whether it kept rollouts of more than one pair of teacher and student."""
        return bool(self.rows) and len(self.members("teacher")) * len(self.members("student")) > 1

    @property
    def names_features(self) -> bool:
        """Whether its rollouts tell what tasks use: not every kind does, nor do runs of earlier versions."""
        return any(row.get("features") for row in self.rows)

    @property
    def births(self) -> list[int]:
        """Steps at which somebody was replaced."""
        return sorted({event["step"] for event in self.lineage})


def name_table(table: str) -> str:
    """What a held-out table is called, from the start of its keys; empty for the only one."""
    return table.removeprefix("eval/").rstrip("_")


def load_history(run: str | Path) -> list[dict[str, Any]]:
    """
    Metrics per logged step of a run, oldest first.

    Args:
        run: The run's `output_dir`, also while it is going on.

    Raises:
        `ValueError`: If it holds no metrics, or the file is broken.
    """
    root = Path(run)
    entries = _read_checked(root / METRICS)
    if not entries:
        raise ValueError(f"{root} holds no {METRICS}: it is not a run's directory.")
    history = _merge_by_step(entry for entry in entries if classify_log(entry) == STEP)
    times = {e["step"]: e for e in _read_checked(root / TIMES) if classify_log(e) != EVALUATION}
    return [entry | times.get(entry["step"], {}) for entry in history]


def load_evaluations(run: str | Path) -> list[dict[str, Any]]:
    """Figures and seconds of each evaluation on held-out tasks, oldest first; none if the run has not evaluated."""
    figures, seconds = (
        _merge_by_step(entry for entry in _read_checked(Path(run, name)) if classify_log(entry) == EVALUATION)
        for name in (METRICS, TIMES)
    )
    took = {entry["step"]: entry for entry in seconds}
    return [took.get(entry["step"], {}) | entry for entry in figures]


def _merge_by_step(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per step, oldest first, with all keys of a step that was logged twice."""
    by_step: dict[int, dict[str, Any]] = {}
    for entry in entries:
        by_step[entry["step"]] = by_step.get(entry["step"], {}) | entry
    return [by_step[step] for step in sorted(by_step)]


def _read_checked(path: Path) -> list[dict[str, Any]]:
    try:
        return read_lines(path)
    except ValueError as error:
        raise ValueError(f"{path} is broken ({error}).") from error


ROW_COLUMNS = ["step", "role", "member", "match", "kind", "valid", "correct", "archived", "solve_rate", "features"]
SAMPLE_COLUMNS = [
    *ROW_COLUMNS,
    "task_id",
    "reject_reason",
    "reject_detail",
    "well_formed",
    "reward",
    "prompt",
    "completion",
]


def load_run(run: str | Path, name: str | None = None) -> Run:
    """
    Everything a report needs of a run, finished or not; called `name`, or as its directory.

    Raises:
        `ValueError`: If the run has not logged a step yet, or a file is broken.
    """
    root = Path(run)
    history = load_history(root)
    if not history:
        raise ValueError(f"{root} has not logged a population step yet; try again after its first one.")
    # A run in progress writes the rollouts and births of a step before its metrics: the page ends with the metrics.
    last = history[-1]["step"]
    rows, lineage, evaluations = (
        [entry for entry in entries if entry["step"] <= last]
        for entries in (_read_rollouts(root, ROW_COLUMNS), _read_checked(root / LINEAGE), load_evaluations(root))
    )
    population = read_population(root) if (root / POPULATION_FILE).exists() else {}
    return Run(name or root.resolve().name, history, rows, lineage, population, evaluations)


def _read_rollouts(root: Path, columns: Sequence[str], last: int = 0) -> list[dict[str, Any]]:
    """The rows of all files, or of the `last` ones, by step; `file` and `row` tell where each one stands."""
    import pyarrow.parquet as pq

    paths = sorted(root.glob("rollouts/step_*.parquet"))[-last:]
    # Runs of version 0.1 lack some of the columns.
    present = {path: [name for name in columns if name in pq.read_schema(path).names] for path in paths}
    return [
        row | {"file": f"rollouts/{path.name}", "row": number}
        for path in paths
        for number, row in enumerate(pq.read_table(path, columns=present[path]).to_pylist())
    ]


Sample = tuple[dict[str, Any], list[dict[str, Any]]]  # a proposal and the attempts at it


def name_reject(proposal: Mapping[str, Any]) -> str:
    """Why a proposal is no task, in a line."""
    detail = proposal.get("reject_detail", "")
    return f"rejected: {proposal['reject_reason'].replace('_', ' ')}" + (f", {detail:.120}" if detail else "")


def load_samples(run: str | Path, number: int = 8) -> list[Sample]:
    """Proposals of the last steps with the attempts at them: valid ones from hard to easy, then rejected ones."""
    proposals, attempts = _collect_proposals(Path(run), last=4)
    valid = sorted((row for row in proposals if row["valid"]), key=lambda row: row["solve_rate"])
    step = max(1, len(valid) // max(1, number * 3 // 4))
    chosen = valid[::step][: number * 3 // 4]
    chosen += [row for row in proposals if not row["valid"]][: number - len(chosen)]
    return [(row, attempts.get(_identify_task(row), []) if row["valid"] else []) for row in chosen]


def _collect_proposals(root: Path, last: int) -> tuple[list[dict[str, Any]], dict[tuple, list[dict[str, Any]]]]:
    """Proposals of the last files, newest first, and the attempts at each task that is not an archived one."""
    rows = _read_rollouts(root, SAMPLE_COLUMNS, last)
    attempts: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        if row["role"] == "student" and not row["archived"]:
            attempts.setdefault(_identify_task(row), []).append(row)
    proposals = [row for row in reversed(rows) if row["role"] == "teacher"]
    return proposals or [_make_given(tries[0]) for tries in reversed(attempts.values())], attempts


def _make_given(attempt: dict[str, Any]) -> dict[str, Any]:
    """In the place of a proposal a given task, as a student was asked it."""
    return attempt | {"member": "given", "completion": attempt["prompt"]}


def _identify_task(row: dict[str, Any]) -> tuple:
    return row["step"], row["match"], row["task_id"]
