"""
The comparison page of `arms_race.py`: held-out curves, differences paired by seed, tables over seeds, cross-play.

Writes `comparison.html` (self-contained), `table.md` for a README, `held_out.png`, `curves.png` and `crossplay.png`.
What a run was is read from its `metrics.jsonl`; unfinished runs are shown as far as they went.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

from trl_populora.adapters.routing import BASE_NAME
from trl_populora.report.load import load_evaluations, load_history
from trl_populora.report.payoff import Payoff
from trl_populora.runs.lines import PLAYED, read_lines


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
MARKERS = "osD^vP"  # told apart without colours
ENOUGH_SEEDS = 5  # of fewer, all lie on one side too easily
WINDOW = 15  # steps of the running mean in the picture


@dataclass
class Run:
    """
    What the first `steps` of a run have left.

    Args:
        path (`Path`): Its directory.
        steps (`int`): Those that count.
        untrained (`dict[str, float]`): Solve rates on levels never trained, of its students and of the base.
    """

    path: Path
    steps: int
    untrained: dict[str, float] = field(default_factory=dict)

    def __post_init__(self):
        self.history = with_new_structures(self.path)[: self.steps]
        self.evaluations = [entry for entry in load_evaluations(self.path) if entry["step"] <= self.steps]

    def last(self, key: str) -> float:
        """A figure of the last evaluation; NaN without one."""
        return _number(self.evaluations[-1].get(f"eval/{key}")) if self.evaluations else math.nan

    def gain(self, key: str = "solve_rate", of: str = "solve_rate_mean") -> float:
        """What the last evaluation's figure is above the base's."""
        return self.last(of) - self.last(f"{BASE_NAME}/{key}")

    def transfer(self) -> float:
        """Mean solve rate of the students on the untrained levels."""
        return _mean([rate for name, rate in self.untrained.items() if name != BASE_NAME])

    def last_fifth(self, measure: Measure) -> float:
        """Mean of a measure over the last fifth of the steps."""
        numbers = values(self.history, measure)
        return _mean(numbers[-max(1, len(numbers) // 5) :])

    def minutes(self) -> float:
        """Minutes of one thread that its steps took, evaluations apart."""
        return sum(entry.get("step_time", 0.0) for entry in read_lines(self.path / "times.jsonl")) / 60


def with_new_structures(run: Path) -> list[dict[str, float]]:
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


def table(runs: Mapping[str, Mapping[int, Run]]) -> list[list[str]]:
    """A row per measure; per config the mean of the first and of the last fifth of the steps, over seeds."""
    rows = [["", *(f"{name}, {part}" for name in runs for part in ("first fifth", "last fifth"))]]
    for measure in MEASURES:
        row = [f"{measure.name} ({measure.unit})"]
        for seeds in runs.values():
            series = [values(run.history, measure) for run in seeds.values()]
            fifths = [max(1, len(numbers) // 5) for numbers in series]
            row.append(spread([_mean(n[:fifth]) for n, fifth in zip(series, fifths, strict=True)]))
            row.append(spread([_mean(n[-fifth:]) for n, fifth in zip(series, fifths, strict=True)]))
        rows.append(row)
    steps = [f"{min(len(run.history) for run in seeds.values())} x {len(seeds)}" for seeds in runs.values()]
    rows.append(["steps x seeds", *(text for count in steps for text in (count, ""))])
    return rows


FIGURES: dict[str, Callable[[Run], float]] = {
    "students' mean": lambda run: run.last("solve_rate_mean"),
    "gain over the base": lambda run: run.gain(),
    "best student": lambda run: run.last("solve_rate_best"),
    "worst student": lambda run: run.last("solve_rate_worst"),
    **{kind: lambda run, kind=kind: run.last(f"{kind}/solve_rate") for kind in ("code_o", "code_i", "code_f")},
    "worked share": lambda run: run.last("thinking_rate"),
    "levels never trained": Run.transfer,
    "the base on them": lambda run: run.untrained.get(BASE_NAME, math.nan),
    "minutes of one thread": Run.minutes,
}
COMPARED: dict[str, Callable[[Run], float]] = {
    "gain over the base, mean": FIGURES["gain over the base"],
    "gain over the base, worst student": lambda run: run.gain(of="solve_rate_worst"),
    "gain over the base, best student": lambda run: run.gain(of="solve_rate_best"),
    "levels never trained": Run.transfer,
    **{f"{measure.name}, last fifth": lambda run, measure=measure: run.last_fifth(measure) for measure in MEASURES},
}


def held_out_table(runs: Mapping[str, Mapping[int, Run]]) -> list[list[str]]:
    """A row per figure of the last evaluation, a column per variant."""
    rows = [["at the last evaluation", *runs]]
    for name, figure in FIGURES.items():
        rows.append([name, *(spread([figure(run) for run in seeds.values()]) for seeds in runs.values())])
    return rows


def paired(differences: Sequence[float]) -> tuple[float, float, float]:
    """
    Mean, lower and upper end of the exact 95 % bootstrap interval of few differences: all resamples are counted.

    Args:
        differences (`Sequence[float]`): One per seed, at most 7.
    """
    means = sorted(fmean(drawn) for drawn in product(differences, repeat=len(differences)))
    beyond = int(0.025 * len(means))
    return fmean(differences), means[beyond], means[-1 - beyond]


def paired_table(runs: Mapping[str, Mapping[int, Run]], reference: str) -> list[list[str]]:
    """What each variant has more than the reference, seed by seed; a claim needs an interval without zero."""
    others = [name for name in runs if name != reference]
    rows = [["difference: mean [95 %], signs", *others]]
    for name, figure in COMPARED.items():
        row = [name]
        for other in others:
            seeds = sorted(runs[other].keys() & runs[reference].keys())
            both = [figure(runs[other][seed]) - figure(runs[reference][seed]) for seed in seeds]
            row.append(told([difference for difference in both if not math.isnan(difference)]))
        rows.append(row)
    return rows


def told(differences: Sequence[float]) -> str:
    """`+0.05 [+0.01, +0.08], 4 of 5 above`; bold where there are enough seeds and the interval holds no zero."""
    if not differences:
        return "-"
    above = f"{sum(difference > 0 for difference in differences)} of {len(differences)} above"
    if len(differences) < 2:
        return f"{differences[0]:+.3f}, one seed"
    mean, low, high = paired(differences)
    text = f"{mean:+.3f} [{low:+.3f}, {high:+.3f}], {above}"
    return f"**{text}**" if len(differences) >= ENOUGH_SEEDS and (low > 0 or high < 0) else text


def draw_held_out(runs: Mapping[str, Mapping[int, Run]], path: Path) -> None:
    """Held-out solve rate over the steps: students' mean, best and worst, every seed thin, the base dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 4.6), layout="constrained")
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    for axis, which in zip(axes, ("mean", "best", "worst"), strict=True):
        for (name, seeds), color, marker in zip(runs.items(), COLORS, MARKERS, strict=False):
            curves = [{e["step"]: e[f"eval/solve_rate_{which}"] for e in run.evaluations} for run in seeds.values()]
            for curve in curves:
                axis.plot(curve.keys(), curve.values(), color=color, linewidth=0.7, alpha=0.5)
            steps = sorted(set.intersection(*map(set, curves)))
            means = [fmean(curve[step] for curve in curves) for step in steps]
            label = f"{name}: {len(curves)} seed(s)"
            axis.plot(steps, means, color=color, marker=marker, linewidth=2.2, label=label)
        bases = [run.last(f"{BASE_NAME}/solve_rate") for seeds in runs.values() for run in seeds.values()]
        axis.axhline(_mean(bases), color="0.35", linestyle="--", linewidth=1, label="base")
        axis.set_title({"mean": "students' mean"}.get(which, f"{which} student"))
        axis.set_xlabel("population step")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out tasks solved (fraction)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=80, metadata={"Software": None})


def draw_curves(runs: Mapping[str, Mapping[int, Run]], path: Path) -> None:
    """One panel per measure: a thin line per seed, a thick one for their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 11.5), layout="constrained")
    axes = figure.subplots(4, 3, sharex=True)
    for axis, measure in zip(axes.flat, MEASURES, strict=False):
        for color, seeds in zip(COLORS, runs.values(), strict=False):
            smooth = [_running(values(run.history, measure)) for run in seeds.values()]
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
    return Payoff(
        teachers,
        students,
        [fmean(valid[name]) for name in teachers],
        [[_mean(cells[teacher, student]) for student in students] for teacher in teachers],
    )


def crossplay_table(payoff: Payoff) -> list[list[str]]:
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
