"""The comparison page of `arms_race.py`: curves, one table with mean and spread over seeds, cross-play.

Writes `comparison.html` (self-contained), `table.md` for a README, `curves.png` and `crossplay.png`. What a run was is
read from its `metrics.jsonl`; unfinished runs are shown as far as they went.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean, stdev

from trl_populora.report.load import load_history
from trl_populora.report.payoff import Payoff
from trl_populora.runs.records import PLAYED


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
    Measure(("population/teacher/mu_std", "population/student/mu_std"), "TrueSkill spread in a role", "mu, std"),
    Measure(("solve/frac_none",), "valid proposals nobody solves", "fraction"),
    Measure(("propose/valid_rate",), "valid proposals", "fraction"),
)
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#444444")  # Okabe and Ito
WINDOW = 15  # steps of the running mean in the picture


def load(run: Path) -> list[dict[str, float]]:
    """Metrics per step. Coverage counts a population's larger number of proposals, so it is given per proposal."""
    history, proposed = [entry for entry in load_history(run) if PLAYED in entry], proposals(run)
    for before, entry in zip([None, *history], history, strict=False):
        valid = entry["propose/valid_rate"] * proposed
        gained = entry["curriculum/coverage"] - before["curriculum/coverage"] if before else math.nan
        entry["new_structures"] = gained / valid if valid else math.nan
    return history


def proposals(run: Path) -> int:
    """Proposals per step, from the rows of the first."""
    import pyarrow.parquet as pq

    roles = pq.read_table(sorted(run.glob("rollouts/*.parquet"))[0], columns=["role"])["role"].to_pylist()
    return roles.count("teacher")


def values(history: Sequence[Mapping[str, float]], measure: Measure) -> list[float]:
    return [fmean(_number(entry.get(key)) for key in measure.keys) for entry in history]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _mean(numbers: Sequence[float]) -> float:
    known = [number for number in numbers if not math.isnan(number)]
    return fmean(known) if known else math.nan


def spread(numbers: Sequence[float]) -> str:
    """Mean and sample standard deviation over seeds, as text; the second from two seeds on."""
    known = [number for number in numbers if not math.isnan(number)]
    if len(known) < 2:
        return f"{known[0]:.2f}" if known else "-"
    return f"{fmean(known):.2f} ± {stdev(known):.2f}"


def table(runs: Mapping[str, Mapping[int, list[dict]]]) -> list[list[str]]:
    """A row per measure; per config the mean of the first and of the last fifth of the steps, over seeds."""
    rows = [["", *(f"{name}, {part}" for name in runs for part in ("first fifth", "last fifth"))]]
    for measure in MEASURES:
        row = [f"{measure.name} ({measure.unit})"]
        for seeds in runs.values():
            series = [values(history, measure) for history in seeds.values()]
            fifths = [max(1, len(numbers) // 5) for numbers in series]
            row.append(spread([_mean(n[:fifth]) for n, fifth in zip(series, fifths, strict=True)]))
            row.append(spread([_mean(n[-fifth:]) for n, fifth in zip(series, fifths, strict=True)]))
        rows.append(row)
    steps = [f"{min(map(len, seeds.values()))} x {len(seeds)}" for seeds in runs.values()]
    rows.append(["steps x seeds", *(text for count in steps for text in (count, ""))])
    return rows


def draw_curves(runs: Mapping[str, Mapping[int, list[dict]]], path: Path) -> None:
    """One panel per measure: a thin line per seed, a thick one for their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 11.5), layout="constrained")
    axes = figure.subplots(4, 3, sharex=True)
    for axis, measure in zip(axes.flat, MEASURES, strict=False):
        for color, seeds in zip(COLORS, runs.values(), strict=False):
            smooth = [_running(values(history, measure)) for history in seeds.values()]
            for line in smooth:
                axis.plot(range(1, len(line) + 1), line, color=color, linewidth=0.7, alpha=0.45)
            together = [_mean(step) for step in zip(*smooth, strict=False)]
            axis.plot(range(1, len(together) + 1), together, color=color, linewidth=2.2)
        axis.set_title(measure.name, fontsize=10)
        axis.set_ylabel(measure.unit)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(MEASURES) :]:
        axis.axis("off")
    for axis in axes[-1, :2]:
        axis.set_xlabel("population step")
    axes[-2, 2].set_xlabel("population step")
    axes[-2, 2].xaxis.set_tick_params(labelbottom=True)
    handles = [axes[0, 0].plot([], [], color=color, linewidth=2.2)[0] for color, _ in zip(COLORS, runs, strict=False)]
    handles.append(axes[0, 0].plot([], [], color="0.4", linewidth=0.7)[0])
    labels = [f"{name}: mean of {len(seeds)} seed(s)" for name, seeds in runs.items()]
    axes[-1, 2].legend(handles, [*labels, f"one seed (all: mean of {WINDOW} steps)"], loc="center", frameon=False)
    figure.savefig(path, dpi=80, metadata={"Software": None})


def _running(numbers: Sequence[float]) -> list[float]:
    return [_mean(numbers[max(0, end - WINDOW) : end]) for end in range(1, len(numbers) + 1)]


def of_run(name: str) -> str:
    """`config/seed_n` of a contestant's name."""
    return name.rpartition(" ")[0]


def by_run(payoff: Payoff) -> Payoff:
    """A cross-play of members as one of runs: means over the members of each."""
    teachers, students = (list(dict.fromkeys(map(of_run, names))) for names in (payoff.teachers, payoff.students))
    cells: dict[tuple[str, str], list[float]] = {}
    valid: dict[str, list[float]] = {}
    for teacher, share, row in zip(payoff.teachers, payoff.valid, payoff.solved, strict=True):
        valid.setdefault(of_run(teacher), []).append(share)
        for student, rate in zip(payoff.students, row, strict=True):
            cells.setdefault((of_run(teacher), of_run(student)), []).append(rate)
    given: dict[str, list[float]] = {}
    for name, rate in payoff.given.items():
        if name in payoff.students:
            given.setdefault(of_run(name), []).append(rate)
    return Payoff(
        teachers,
        students,
        [fmean(valid[name]) for name in teachers],
        [[_mean(cells[teacher, student]) for student in students] for teacher in teachers],
        {name: fmean(rates) for name, rates in given.items()},
    )


def crossplay_table(payoff: Payoff, base: float) -> list[list[str]]:
    """Teachers' runs against students' runs, grouped by config: mean and spread over the runs of a config."""
    configs = list(dict.fromkeys(name.split("/")[0] for name in payoff.students))
    rows = [["tasks of \\ solved by", *(f"students of {name}" for name in configs), "valid proposals"]]
    for config in configs:
        mine = [index for index, name in enumerate(payoff.teachers) if name.split("/")[0] == config]
        row = [f"teachers of {config}"]
        for other in configs:
            columns = [index for index, name in enumerate(payoff.students) if name.split("/")[0] == other]
            row.append(spread([_mean([payoff.solved[i][j] for j in columns]) for i in mine]))
        rows.append([*row, spread([payoff.valid[i] for i in mine])])
    held_out = [[payoff.given[n] for n in payoff.given if n.split("/")[0] == config] for config in configs]
    rows.append([f"held-out tasks (base {base:.2f})", *map(spread, held_out), ""])
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def html(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1160px; padding: 1rem; }
img { max-width: 100%; height: auto; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #d8d8d8; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
"""


def write_page(output: Path, tables: Sequence[tuple[str, list[list[str]]]], pictures: Sequence[Path]) -> Path:
    """Writes `table.md` and `comparison.html`; returns the page."""
    (output / "table.md").write_text("\n\n".join(f"**{title}**\n\n{markdown(rows)}" for title, rows in tables) + "\n")
    parts = [f"<h2>{escape(title)}</h2>{html(rows)}" for title, rows in tables]
    for path in pictures:
        data = base64.b64encode(path.read_bytes()).decode()
        parts.append(f'<h2>{escape(path.stem)}</h2><img alt="{escape(path.stem)}" src="data:image/png;base64,{data}">')
    page = output / "comparison.html"
    page.write_text(
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, '
        f'initial-scale=1"><title>The arms race</title><style>{STYLE}</style></head><body><h1>The arms race</h1>'
        + "".join(parts)
        + "</body></html>\n"
    )
    return page
