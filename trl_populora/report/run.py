"""Pictures and tables of a run, from the files it leaves: works on a run in progress and on a finished one.

Needs the `report` extra (matplotlib, rich).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_populora.files import write_json, written_whole
from trl_populora.population.members import POPULATION_FILE, read_population
from trl_populora.report.page import page
from trl_populora.report.plots import (
    COLORS,
    DPI,
    PLOTS,
    STYLE,
    WIDTH,
    Plot,
    Run,
    draw,
    draw_payoff,
    draw_thinking,
    plot_held_out,
)
from trl_populora.runs.records import EVALUATION, STEP, read_lines, sort_of


if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trl_populora.report.payoff import Payoff

KIND_COLORS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")


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


def write_report(run: str | Path, directory: str | Path | None = None, name: str | None = None) -> Path:
    """
    Writes `report.html`, one self-contained page, and its pictures as `plots/*.png`.

    Args:
        run (`str` or `Path`): The run's `output_dir`, also while it is going on, or a downloaded population.
        directory (`str` or `Path`, *optional*): Where they go, the run itself by default.
        name (`str`, *optional*): The page's title, the name of the run's directory by default.

    Returns:
        `Path`: The page.

    Raises:
        `ValueError`: If the run has not logged a step yet, or a file is broken.
    """
    records = load_run(run, name)
    target = Path(run if directory is None else directory)
    drawn = draw_plots(records, target / "plots")
    with written_whole(target / "report.html") as unfinished:
        unfinished.write_text(page(records, drawn, load_samples(run)), encoding="utf-8")
    return target / "report.html"


def draw_plots(records: Run, directory: Path, names: Sequence[str] | None = None) -> list[tuple[Plot, Path]]:
    """Draws a run's pictures, or those named, into `directory/<name>.png`; without rollouts some cannot be."""
    directory.mkdir(parents=True, exist_ok=True)
    wanted = [plot for plot in PLOTS if names is None or plot.name in names]
    return [(plot, draw(plot, records, directory)) for plot in wanted if plot.can_be_drawn(records)]


HEADER = ("member", "rating", "mu - 3 sigma", "held out", "matches", "born", "made by", "parents")


def print_population(run: str | Path) -> None:
    """
    Prints the members of a run with their ratings and their solve rates on held-out tasks, best first in each role; as
    plain text without rich.

    Raises:
        `ValueError`: If `population.json` is missing or broken.
    """
    if not Path(run, POPULATION_FILE).exists():
        raise ValueError(f"{run} holds no population.json: no run has logged a step or an evaluation there.")
    population = read_population(run)
    title = f"Population after {population['step']} steps on {population['base_model']}"
    if (base := population.get("held_out_base")) is not None:
        title += f", which solves {_percent(base)} of the held-out tasks"
    members = sorted(population["members"], key=lambda m: (m["role"] != "teacher", -m["mu"]))
    roles = [[_cells(member) for member in members if member["role"] == role] for role in COLORS]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        lines = [HEADER, *roles[0], *roles[1]]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            title += "\n" + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        sys.stdout.write(title + "\n")
        return
    table = Table(title=title)
    for column in HEADER:
        table.add_column(
            column, justify="left" if column in ("member", "made by", "parents") else "right", no_wrap=True
        )
    for rows in roles:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    console = Console()
    # Into a file or a log, where rich assumes 80 columns, two parents' names would be cut.
    (console if console.is_terminal else Console(width=120)).print(table)


def _cells(member: dict[str, Any]) -> tuple[str, ...]:
    return (
        member["name"],
        f"{member['mu']:.1f} ± {member['sigma']:.1f}",
        f"{member['mu'] - 3 * member['sigma']:.1f}",
        "-" if member.get("held_out") is None else _percent(member["held_out"]),
        str(member["age"]),
        f"step {member['born']}",
        member["operator"],
        " + ".join(member["parents"]) or "-",
    )


def plot_run(run: str | Path, path: str | Path | None = None) -> Path:
    """
    Draws held-out and fresh tasks, thinking, rewards, ratings and kinds over the steps into one PNG.

    Args:
        run (`str` or `Path`): The run's `output_dir`.
        path (`str` or `Path`, *optional*): Where the picture goes, `run.png` in the run by default.

    Raises:
        `ValueError`: If the run has not logged a step yet.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = Run(Path(run).name, load_history(run), evaluations=load_evaluations(run))
    if not records.history:
        raise ValueError(f"{run} has not logged a population step yet; try again after its first one.")
    figure, axes = plt.subplots(3, 2, figsize=(11, 10.2), sharex=True, layout="constrained")
    plot_held_out(axes[0, 0], records)
    draw_thinking(axes[0, 1], records)
    _draw_solving(axes[1, 0], records)
    _draw_rewards(axes[1, 1], records)
    _draw_ratings(axes[2, 0], records)
    _draw_kinds(axes[2, 1], records)
    for axis in axes.flat:
        for entry in records.history:
            if entry.get("evolve/replaced"):
                axis.axvline(entry["step"], color="0.6", linestyle=":", linewidth=1, zorder=0)
        axis.grid(alpha=0.2)
        axis.margins(x=0.01)
        # Below the axes, where it covers nothing.
        axis.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.02), frameon=False)
    for axis in axes[-1]:
        axis.set_xlabel("population step")
        axis.get_legend().set_bbox_to_anchor((0.5, -0.14))
    figure.suptitle(f"{records.name}: dotted lines mark evolution events", fontsize=10)
    target = Path(path) if path else Path(run, "run.png")
    figure.savefig(target, dpi=110, metadata={"Software": None})  # no version stamp: same run, same bytes
    plt.close(figure)
    return target


def _draw_ratings(axis: Axes, run: Run) -> None:
    for role, color in COLORS.items():
        for name in run.members(role):
            axis.plot(*run.series(f"member/{name}/mu"), color=color, alpha=0.35, linewidth=1)
        steps, means = run.series(f"population/{role}/mu_mean")
        _, spreads = run.series(f"population/{role}/mu_std")
        axis.plot(steps, means, color=color, linewidth=2, label=f"{role}s: mean, ± 1 std, members")
        low, high = ([m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
        axis.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
    axis.set(title="TrueSkill rating", ylabel="mu (rating points)")


def _draw_solving(axis: Axes, run: Run) -> None:
    axis.plot(*run.series("solve/rate"), color=COLORS["student"], linewidth=2, label="solve rate")
    axis.plot(*run.series("solve/frac_none"), color="0.3", linestyle="--", label="solved by nobody")
    axis.plot(*run.series("solve/frac_all"), color="0.6", linestyle="-.", label="solved by all")
    axis.set(title="Solving fresh tasks", ylabel="fraction", ylim=(-0.02, 1.02))


def _draw_rewards(axis: Axes, run: Run) -> None:
    for role, color in COLORS.items():
        axis.plot(*run.series(f"rewards/{role}_reward/mean"), color=color, linewidth=2, label=f"{role} reward")
    axis.axhline(0, color="0.8", linewidth=1, zorder=0)
    axis.set(title="Rewards", ylabel="mean reward (points)")


def _draw_kinds(axis: Axes, run: Run) -> None:
    for kind, color in zip(run.kinds, KIND_COLORS, strict=False):
        axis.plot(*run.series(f"solve/{kind}/rate"), color=color, label=f"{kind} solved")
        axis.plot(*run.series(f"propose/{kind}/valid_rate"), color=color, linestyle=":", label=f"{kind} valid")
    axis.set(title="By kind of task", ylabel="fraction", ylim=(-0.02, 1.02))


def payoff_size(teachers: Sequence[str], students: Sequence[str]) -> tuple[float, float]:
    """Inches of a cross-play's picture: room for every cell, and for names, which stand upright when they are long."""
    letters = 0.08 * max(map(len, (*teachers, *students)))
    return max(WIDTH, 1.8 + letters + 0.55 * len(students)), max(3.7, 0.9 + letters + 0.5 * len(teachers))


def write_payoff(payoff: Payoff, directory: str | Path) -> Path:
    """
    Prints a cross-play and writes it as `crossplay.json` (the fields of [`~trl_populora.report.payoff.Payoff`] and the
    means per row and column) and `crossplay.png`.

    Returns:
        `Path`: The JSON file.
    """
    path = Path(directory, "crossplay.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    values = json.dumps(asdict(payoff) | {"by_teacher": payoff.by_teacher, "by_student": payoff.by_student})
    write_json(path, json.loads(values, parse_constant=lambda _: None))  # NaN is no JSON

    import matplotlib
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

    matplotlib.use("Agg")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=payoff_size(payoff.teachers, payoff.students), layout="constrained")
        draw_payoff(figure, payoff.solved, payoff.teachers, payoff.students)
        figure.savefig(path.with_suffix(".png"), dpi=DPI, metadata={"Software": None})
    table = Table(title="Attempts solved at fresh tasks", caption="rows: teachers, columns: students")
    for column in ("teacher", "valid", *payoff.students, "mean"):
        table.add_column(column, justify="left" if column == "teacher" else "right")
    for name, valid, row, mean in zip(payoff.teachers, payoff.valid, payoff.solved, payoff.by_teacher, strict=True):
        table.add_row(name, *(_percent(value) for value in (valid, *row, mean)))
    table.add_section()
    table.add_row("mean", "", *map(_percent, payoff.by_student), "")
    if payoff.given:
        table.add_row("given tasks", "", *(_percent(payoff.given[name]) for name in payoff.students), "")
    Console(width=max(120, 24 + 14 * len(payoff.students))).print(table)
    return path


def _percent(rate: float) -> str:
    return f"{100 * rate:.0f} %" if rate == rate else "-"
