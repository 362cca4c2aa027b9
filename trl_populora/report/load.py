"""What a run has left so far, from its files: works on a run in progress and on a finished one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_populora.population.members import POPULATION_FILE, read_population
from trl_populora.runs.lines import EVALUATION, STEP, read_lines, sort_of
from trl_populora.tasks.complexity import PROGRAM_MEASURES


@dataclass
class Run:
    """
    What a run has left so far.

    Args:
        name (`str`): Its directory's or repository's name.
        history (`list[dict]`): Metrics per step, oldest first; with `num_iterations` not every step was played.
        rows (`list[dict]`): Proposals and attempts (`step role member match kind valid correct archived solve_rate`).
        lineage (`list[dict]`): Births, oldest first.
        population (`dict`): `population.json`; empty while there is none.
        evaluations (`list[dict]`): Figures on held-out tasks, oldest first.
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
        What its kinds measure of their tasks, those of programs first; `coverage` and `entropy` are the archive's.
        """
        found = {key.removeprefix("curriculum/") for key in self.latest if key.startswith("curriculum/")}
        rest = found - {"coverage", "entropy", *PROGRAM_MEASURES}
        return [name for name in PROGRAM_MEASURES if name in found] + sorted(rest)

    def members(self, role: str) -> list[str]:
        """Names of a role's slots, in order."""
        names = {key.split("/")[1] for key in self.latest if key.startswith(f"member/{role}_")}
        return sorted(names, key=lambda name: int(name.rpartition("_")[2]))

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, where it was known."""
        entries = self.evaluations if key.startswith("eval/") else self.history
        points = [(entry["step"], entry[key]) for entry in entries if entry.get(key) is not None]
        return [step for step, _ in points], [value for _, value in points]

    @property
    def births(self) -> list[int]:
        """Steps at which somebody was replaced."""
        return sorted({event["step"] for event in self.lineage})


def load_history(run: str | Path) -> list[dict[str, Any]]:
    """
    Metrics per logged step of a run, oldest first.

    Args:
        run (`str` or `Path`): The run's `output_dir`, also while it is going on.

    Raises:
        `ValueError`: If it holds no metrics, or the file is broken.
    """
    root = Path(run)
    entries = _read_lines(root / "metrics.jsonl")
    if not entries:
        raise ValueError(f"{root} holds no metrics.jsonl: it is not a run's directory.")
    history = _by_step(entry for entry in entries if sort_of(entry) == STEP)
    times = {e["step"]: e for e in _read_lines(root / "times.jsonl") if sort_of(e) != EVALUATION}
    return [entry | times.get(entry["step"], {}) for entry in history]


def load_evaluations(run: str | Path) -> list[dict[str, Any]]:
    """Figures of each evaluation on held-out tasks, oldest first; none if the run has not evaluated."""
    return _by_step(e for e in _read_lines(Path(run, "metrics.jsonl")) if sort_of(e) == EVALUATION)


def _by_step(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per step, oldest first, with all keys of a step that was logged twice."""
    by_step: dict[int, dict[str, Any]] = {}
    for entry in entries:
        by_step[entry["step"]] = by_step.get(entry["step"], {}) | entry
    return [by_step[step] for step in sorted(by_step)]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return read_lines(path)
    except ValueError as error:
        raise ValueError(f"{path} is broken ({error}).") from error


ROW_COLUMNS = ["step", "role", "member", "match", "kind", "valid", "correct", "archived", "solve_rate"]
SAMPLE_COLUMNS = [*ROW_COLUMNS, "task_id", "reject_reason", "well_formed", "reward", "prompt", "completion"]


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
    last = history[-1]["step"]
    rows = [row for row in _read_rollouts(root, ROW_COLUMNS) if row["step"] <= last]
    lineage = [event for event in _read_lines(root / "lineage.jsonl") if event["step"] <= last]
    population = read_population(root) if (root / POPULATION_FILE).exists() else {}
    evaluations = [entry for entry in load_evaluations(root) if entry["step"] <= last]
    return Run(name or root.resolve().name, history, rows, lineage, population, evaluations)


def _read_rollouts(root: Path, columns: Sequence[str], last: int = 0) -> list[dict[str, Any]]:
    """The rows of all files, or of the `last` ones, by step."""
    import pyarrow.parquet as pq

    paths = sorted(root.glob("rollouts/step_*.parquet"))[-last:]
    return [row for path in paths for row in pq.read_table(path, columns=columns).to_pylist()]


def load_samples(run: str | Path, number: int = 8) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Proposals of the last steps with the attempts at them: valid ones from hard to easy, then rejected ones."""
    rows = _read_rollouts(Path(run), SAMPLE_COLUMNS, last=4)
    attempts: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        if row["role"] == "student" and not row["archived"]:
            attempts.setdefault((row["step"], row["match"], row["task_id"]), []).append(row)
    proposals = [row for row in reversed(rows) if row["role"] == "teacher"]
    valid = sorted((row for row in proposals if row["valid"]), key=lambda row: row["solve_rate"])
    step = max(1, len(valid) // max(1, number * 3 // 4))
    chosen = valid[::step][: number * 3 // 4]
    chosen += [row for row in proposals if not row["valid"]][: number - len(chosen)]
    return [
        (row, attempts.get((row["step"], row["match"], row["task_id"]), []) if row["valid"] else []) for row in chosen
    ]
