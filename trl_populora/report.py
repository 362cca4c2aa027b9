"""Pictures and tables of a run, from the files it leaves: works on a run in progress and on a finished one.

Needs the `report` extra (matplotlib, rich).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_populora.report_page import page
from trl_populora.report_plots import DPI, PLOTS, STYLE, WIDTH, Plot, Run, draw, draw_payoff


if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trl_populora.evaluation import Payoff

# Colour-blind safe (Okabe and Ito); a role keeps its colour in every picture.
COLORS = {"teacher": "#D55E00", "student": "#0072B2"}
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
    history = _read_lines(root / "metrics.jsonl")
    if not history:
        history = _read_state(root)
    times = {entry["step"]: entry for entry in _read_lines(root / "times.jsonl")}
    by_step = {e["step"]: e | times.get(e["step"], {}) for e in history if "propose/valid_rate" in e}
    return [by_step[step] for step in sorted(by_step)]


def _read_state(root: Path) -> list[dict[str, Any]]:
    """The log of `trainer_state.json`, or of the newest checkpoint's."""
    checkpoints = sorted(root.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name[11:]))
    paths = [path for path in (root / "trainer_state.json", *reversed(checkpoints)) if path.is_file()]
    if not paths:
        raise ValueError(
            f"{root} holds no metrics.jsonl, trainer_state.json or checkpoint: it is not a run's directory."
        )
    try:
        return json.loads(paths[0].read_text())["log_history"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{paths[0]} is broken ({error!r}).") from error


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; the last line may be half written."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    try:
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError as error:
        raise ValueError(f"{path} is broken ({error}).") from error


ROW_COLUMNS = ["step", "role", "member", "match", "kind", "valid", "correct", "archived", "solve_rate"]
SAMPLE_COLUMNS = [*ROW_COLUMNS, "task_id", "reject_reason", "well_formed", "reward", "prompt", "completion"]


def load_run(run: str | Path) -> Run:
    """
    Everything a report needs of a run, finished or not.

    Raises:
        `ValueError`: If the run has not logged a step yet, or a file is broken.
    """
    root = Path(run)
    history = load_history(root)
    if not history:
        raise ValueError(f"{root} has not logged a population step yet; try again after its first one.")
    last = history[-1]["step"]
    rows = [row for row in _read_rollouts(_rollouts(root), ROW_COLUMNS) if row["step"] < last]
    lineage = [event for event in _read_lines(root / "lineage.jsonl") if event["step"] <= last]
    population = load_population(root) if (root / "population.json").exists() else {}
    return Run(root.resolve().name, history, rows, lineage, population)


def _rollouts(root: Path) -> list[Path]:
    return sorted(root.glob("rollouts/step_*.parquet"))


def _read_rollouts(paths: Sequence[Path], columns: Sequence[str]) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    return [row for path in paths for row in pq.read_table(path, columns=columns).to_pylist()]


def load_samples(run: str | Path, number: int = 8) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Proposals of the last steps with the attempts at them: of every kind, first valid ones from hard to easy."""
    paths = _rollouts(Path(run))
    rows = _read_rollouts(paths[-4:], SAMPLE_COLUMNS)
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


def write_report(run: str | Path, directory: str | Path | None = None) -> Path:
    """
    Writes `report.html`, one self-contained page, and its pictures as `plots/*.png`.

    Args:
        run (`str` or `Path`): The run's `output_dir`, also while it is going on, or a downloaded population.
        directory (`str` or `Path`, *optional*): Where they go, the run itself by default.

    Returns:
        `Path`: The page.

    Raises:
        `ValueError`: If the run has not logged a step yet, or a file is broken.
    """
    records = load_run(run)
    target = Path(run if directory is None else directory)
    drawn = draw_plots(records, target / "plots")
    unfinished = target / "report.html.tmp"
    unfinished.write_text(page(records, drawn, load_samples(run)), encoding="utf-8")
    return unfinished.replace(target / "report.html")


def draw_plots(records: Run, directory: Path, names: Sequence[str] | None = None) -> list[tuple[Plot, Path]]:
    """Draws a run's pictures, or those named, into `directory/<name>.png`; without rollouts some cannot be."""
    directory.mkdir(parents=True, exist_ok=True)
    wanted = [plot for plot in PLOTS if names is None or plot.name in names]
    return [(plot, draw(plot, records, directory)) for plot in wanted if records.rows or not plot.needs_rows]


def load_population(run: str | Path) -> dict[str, Any]:
    """
    `population.json` of a run or of a pushed population.

    Raises:
        `ValueError`: If the file is missing or broken.
    """
    path = Path(run, "population.json")
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}). Is {run} the directory of a run?") from error


def print_population(run: str | Path) -> None:
    """Prints the members of a run with their ratings, best first in each role."""
    from rich.console import Console
    from rich.table import Table

    population = load_population(run)
    table = Table(title=f"Population after {population['step']} steps on {population['base_model']}")
    for column in ("member", "rating", "fitness", "matches", "born", "made by", "parents"):
        table.add_column(
            column, justify="left" if column in ("member", "made by", "parents") else "right", no_wrap=True
        )
    for member in sorted(population["members"], key=lambda m: (m["role"] != "teacher", -m["fitness"])):
        table.add_row(
            member["name"],
            f"{member['mu']:.1f} ± {member['sigma']:.1f}",
            f"{member['fitness']:.1f}",
            str(member["age"]),
            f"step {member['born']}",
            member["operator"],
            " + ".join(member["parents"]) or "-",
            end_section=member is _last_teacher(population),
        )
    console = Console()
    # Into a file or a log, where rich assumes 80 columns, two parents' names would be cut.
    (console if console.is_terminal else Console(width=120)).print(table)


def _last_teacher(population: dict[str, Any]) -> dict[str, Any]:
    return min((m for m in population["members"] if m["role"] == "teacher"), key=lambda m: m["fitness"])


def plot_run(run: str | Path, path: str | Path | None = None) -> Path:
    """
    Draws ratings, solve rates, rewards and validity over the steps into one PNG.

    Args:
        run (`str` or `Path`): The run's `output_dir`.
        path (`str` or `Path`, *optional*): Where the picture goes, `run.png` in the run by default.

    Raises:
        `ValueError`: If the run has not logged a step yet.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    history = load_history(run)
    if not history:
        raise ValueError(f"{run} has not logged a population step yet; try again after its first one.")
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
    _draw_ratings(axes[0, 0], history)
    _draw_solving(axes[0, 1], history)
    _draw_rewards(axes[1, 0], history)
    _draw_kinds(axes[1, 1], history)
    for axis in axes.flat:
        for entry in history:
            if entry.get("evolve/replaced"):
                axis.axvline(entry["step"], color="0.6", linestyle=":", linewidth=1, zorder=0)
        axis.grid(alpha=0.2)
        axis.margins(x=0.01)
        # Below the axes, where it covers nothing.
        axis.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.02), frameon=False)
    for axis in axes[1]:
        axis.set_xlabel("population step")
        axis.get_legend().set_bbox_to_anchor((0.5, -0.14))
    figure.suptitle(f"{Path(run).name}: dotted lines mark evolution events", fontsize=10)
    target = Path(path) if path else Path(run, "run.png")
    figure.savefig(target, dpi=110, metadata={"Software": None})  # no version stamp: same run, same bytes
    plt.close(figure)
    return target


def series(history: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was known."""
    points = [(entry["step"], entry[key]) for entry in history if entry.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _draw_ratings(axis: Axes, history: Sequence[dict[str, Any]]) -> None:
    for role, color in COLORS.items():
        names = sorted(key[7:-3] for key in history[-1] if key.startswith(f"member/{role}_") and key.endswith("/mu"))
        for name in names:
            axis.plot(*series(history, f"member/{name}/mu"), color=color, alpha=0.35, linewidth=1)
        steps, means = series(history, f"population/{role}/mu_mean")
        _, spreads = series(history, f"population/{role}/mu_std")
        axis.plot(steps, means, color=color, linewidth=2, label=f"{role}s: mean, ± 1 std, members")
        low, high = ([m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
        axis.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
    axis.set(title="TrueSkill rating", ylabel="mu (rating points)")


def _draw_solving(axis: Axes, history: Sequence[dict[str, Any]]) -> None:
    axis.plot(*series(history, "solve/rate"), color=COLORS["student"], linewidth=2, label="solve rate")
    axis.plot(*series(history, "solve/frac_none"), color="0.3", linestyle="--", label="solved by nobody")
    axis.plot(*series(history, "solve/frac_all"), color="0.6", linestyle="-.", label="solved by all")
    axis.set(title="Solving fresh tasks", ylabel="fraction", ylim=(-0.02, 1.02))


def _draw_rewards(axis: Axes, history: Sequence[dict[str, Any]]) -> None:
    for role, color in COLORS.items():
        axis.plot(*series(history, f"rewards/{role}_reward/mean"), color=color, linewidth=2, label=f"{role} reward")
    axis.axhline(0, color="0.8", linewidth=1, zorder=0)
    axis.set(title="Rewards", ylabel="mean reward (points)", ylim=(-1.05, 1.05))


def _draw_kinds(axis: Axes, history: Sequence[dict[str, Any]]) -> None:
    kinds = sorted(key.split("/")[1] for key in history[-1] if key.startswith("propose/") and key.count("/") == 2)
    for kind, color in zip(kinds, KIND_COLORS, strict=False):
        axis.plot(*series(history, f"solve/{kind}/rate"), color=color, label=f"{kind} solved")
        axis.plot(*series(history, f"propose/{kind}/valid_rate"), color=color, linestyle=":", label=f"{kind} valid")
    axis.set(title="By kind of task", ylabel="fraction", ylim=(-0.02, 1.02))


def write_payoff(payoff: Payoff, directory: str | Path) -> Path:
    """
    Prints a cross-play and writes it as `crossplay.json` (the fields of [`~trl_populora.evaluation.Payoff`] and the
    means per row and column) and `crossplay.png`.

    Returns:
        `Path`: The JSON file.
    """
    from dataclasses import asdict

    import matplotlib
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    matplotlib.use("Agg")
    with matplotlib.rc_context(STYLE):
        size = 2.6 + 0.55 * len(payoff.students), 1.6 + 0.5 * len(payoff.teachers)
        figure = Figure(figsize=(max(WIDTH, size[0]), max(3.7, size[1])), layout="constrained")
        draw_payoff(figure, payoff.solved, payoff.teachers, payoff.students)
        figure.savefig(root / "crossplay.png", dpi=DPI, metadata={"Software": None})
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
    path = root / "crossplay.json"
    unfinished = path.with_suffix(".tmp")
    values = json.dumps(asdict(payoff) | {"by_teacher": payoff.by_teacher, "by_student": payoff.by_student})
    unknown_as_null = json.loads(values, parse_constant=lambda _: None)  # NaN is no JSON
    unfinished.write_text(json.dumps(unknown_as_null, indent=2) + "\n")
    return unfinished.replace(path)


def _percent(rate: float) -> str:
    return f"{100 * rate:.0f} %" if rate == rate else "-"
