"""
The comparison page of `arms_race.py`: claims, held-out curves, differences paired by seed, tables, cross-play.

Writes `comparison.html` (self-contained), `table.md` for a README, `held_out.png`, `curves.png` and `crossplay.png`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import beside_recipes  # noqa: F401
from arms_race_runs import BLOCK, KINDS, MEASURES, Run, mean
from score_held_out import markdown

from trl_populora.evaluate.cross_play import Payoff
from trl_populora.evaluate.intervals import measure_mean
from trl_populora.lora.layers import BASE_NAME


Runs = Mapping[str, Mapping[int, Run]]  # by variant and seed

POPULATION, AGENT = "4t4s", "single_agent"
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")  # Okabe and Ito
MARKERS = "osD^vPX"  # told apart without colours
ENOUGH_SEEDS = 5  # of fewer, all lie on one side too easily
WINDOW = 3  # blocks of the running mean in the picture


def spread(numbers: Iterable[float]) -> str:
    """Mean and sample standard deviation over seeds, as text; the second from two seeds on."""
    known = [number for number in numbers if not math.isnan(number)]
    if len(set(known)) < 2:
        return "-" if not known else str(known[0]) if isinstance(known[0], int) else f"{known[0]:.2f}"
    return f"{fmean(known):.2f} ± {stdev(known):.2f}"


def table(runs: Runs) -> list[list[str]]:
    """A row per measure; per variant the mean of the first and of the last fifth of the steps, over seeds."""
    rows = [["first fifth to last fifth", *runs]]
    for measure in MEASURES:
        fifths = [[run.fifths(measure.name) for run in seeds.values()] for seeds in runs.values()]
        cells = [" to ".join(spread(part) for part in zip(*both, strict=True)) for both in fifths]
        rows.append([f"{measure.name} ({measure.unit})", *cells])
    rows.append(["steps x seeds", *(f"{min(run.steps for run in of.values())} x {len(of)}" for of in runs.values())])
    return rows


FIGURES: dict[str, Callable[[Run], float]] = {
    "students' mean": lambda run: run.last("solve_rate_mean"),
    "gain over the base": Run.gain,
    "gain, mean over the run": Run.mean_gain,
    "best student": lambda run: run.last("solve_rate_best"),
    "worst student": lambda run: run.last("solve_rate_worst"),
    **{kind: lambda run, kind=kind: run.last(f"{kind}/solve_rate") for kind in KINDS},
    "worked share": lambda run: run.last("thinking_rate"),
    "levels never trained": Run.transfer,
    "the base on them": lambda run: run.untrained.get(BASE_NAME, math.nan),
    "rows a step": lambda run: run.rows,
    "adapters": lambda run: run.adapters,
    "minutes of one thread": lambda run: run.minutes,
}
COMPARED: dict[str, Callable[[Run], float]] = {
    "gain over the base, mean": Run.gain,
    "gain over the base, mean over the run": Run.mean_gain,
    "gain over the base, worst student": lambda run: run.gain("worst"),
    "gain over the base, best student": lambda run: run.gain("best"),
    "levels never trained": Run.transfer,
    **{f"{m.name}, last fifth": lambda run, name=m.name: run.fifths(name)[1] for m in MEASURES},
}


def held_out_table(runs: Runs) -> list[list[str]]:
    """A row per figure of the last evaluation, a column per variant."""
    rows = [["at the last evaluation", *runs]]
    for name, figure in FIGURES.items():
        rows.append([name, *(spread([figure(run) for run in seeds.values()]) for seeds in runs.values())])
    return rows


@dataclass(frozen=True)
class Claim:
    """
    A claim of the paper that runs of the arms race can show or refute.

    Args:
        text (`str`): The claim.
        figure (`Callable[[Run], float]`): Above zero in every run, or larger than in the other's, where it is true.
        of (`str`): The variant whose runs are looked at.
        against (`str`, *optional*): The variant that it is compared with, seed by seed.
    """

    text: str
    figure: Callable[[Run], float]
    of: str = POPULATION
    against: str | None = None


def _rise(name: str, sign: int = 1) -> Callable[[Run], float]:
    return lambda run: sign * run.rise(name)


CLAIMS = (
    Claim("the single agent's solve rate of fresh tasks climbs", _rise("solve rate of fresh tasks"), AGENT),
    Claim("the population's climbs less", _rise("solve rate of fresh tasks", -1), POPULATION, AGENT),
    Claim("the population's programs get longer", _rise("lines of code")),
    Claim("and more branched", _rise("cyclomatic complexity")),
    Claim("and deeper", _rise("AST depth")),
    Claim("the single agent's programs get shorter", _rise("lines of code", -1), AGENT),
    Claim("and less branched", _rise("cyclomatic complexity", -1), AGENT),
    Claim("and flatter", _rise("AST depth", -1), AGENT),
    Claim(
        "the population's proposals cover more new structures",
        lambda run: run.fifths("new structures per valid proposal")[1],
        POPULATION,
        AGENT,
    ),
    Claim("its ratings spread beyond their sigma", lambda run: run.fifths("rating spread in a role")[1] - 1),
    Claim("most newborn students are back within 20 updates", lambda run: run.share_back() - 0.5),
    Claim("the mean student solves more held-out tasks than the base", Run.gain),
    Claim("and than the single agent", Run.gain, POPULATION, AGENT),
    Claim("and earlier (mean over the run)", Run.mean_gain, POPULATION, AGENT),
    Claim("the weakest student does, too", lambda run: run.gain("worst"), POPULATION, AGENT),
    Claim("the mean student solves more at levels never trained than the base", lambda r: r.transfer() - _base(r)),
    Claim("and than the single agent", Run.transfer, POPULATION, AGENT),
)


def _base(run: Run) -> float:
    return run.untrained.get(BASE_NAME, math.nan)


def claims_table(runs: Runs) -> list[list[str]]:
    """Claim by claim: mean, interval, seeds, and what they say."""
    rows = [["claim", "mean [95 %]", "seeds", "verdict"]]
    for claim in CLAIMS:
        if claim.of in runs and (claim.against is None or claim.against in runs):
            numbers = differences(runs, claim.figure, claim.of, claim.against)
            rows.append([claim.text, interval(numbers), str(len(numbers)), verdict(numbers)])
    return rows


def verdict(numbers: Sequence[float]) -> str:
    """`reproduces`, `does not`, or `cannot be told`, where the interval holds zero or seeds are few."""
    if len(numbers) < ENOUGH_SEEDS:
        return "cannot be told: too few seeds"
    mean, half = measure_mean(numbers)
    return "cannot be told" if abs(mean) <= half else "reproduces" if mean > 0 else "does not: the opposite"


def differences(
    runs: Mapping[str, Mapping[Any, Any]], figure: Callable[[Any], float], of: str, against: str | None
) -> list[float]:
    """A figure of a variant by seed, less that of the other variant with the same seed; unknown ones are left out."""
    if against is None:
        numbers = [figure(runs[of][seed]) for seed in sorted(runs[of])]
    else:
        both = sorted(runs[of].keys() & runs[against].keys())
        numbers = [figure(runs[of][seed]) - figure(runs[against][seed]) for seed in both]
    return [number for number in numbers if not math.isnan(number)]


def interval(numbers: Sequence[float]) -> str:
    """`+0.05 [+0.01, +0.08]`, a t interval over seeds."""
    if len(numbers) < 2:
        return f"{numbers[0]:+.3f}" if numbers else "-"
    mean, half = measure_mean(numbers)
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def paired_table(
    runs: Mapping[str, Mapping[Any, Any]], reference: str, figures: Mapping[str, Callable[[Any], float]] = COMPARED
) -> list[list[str]]:
    """What each variant has more than the reference, seed by seed; a claim needs an interval without zero."""
    others = [name for name in runs if name != reference]
    rows = [["difference: mean [95 %], signs", *others]]
    for name, figure in figures.items():
        rows.append([name, *(told(differences(runs, figure, other, reference)) for other in others)])
    return rows


def told(numbers: Sequence[float]) -> str:
    """`+0.05 [+0.01, +0.08], 4 of 5 above`; bold where there are enough seeds and the interval holds no zero."""
    if len(numbers) < 2:
        return f"{numbers[0]:+.3f}, one seed" if numbers else "-"
    text = f"{interval(numbers)}, {sum(number > 0 for number in numbers)} of {len(numbers)} above"
    return f"**{text}**" if verdict(numbers) in ("reproduces", "does not: the opposite") else text


def draw_held_out(runs: Runs, path: Path) -> None:
    """Held-out solve rate over the steps: students' mean and the weakest, every seed thin, the base dashed."""
    figure = _figure((6.2, 7.6))
    axes = figure.subplots(2, 1, sharex=True, sharey=True)
    bases = [run.last(f"{BASE_NAME}/solve_rate") for seeds in runs.values() for run in seeds.values()]
    for axis, which in zip(axes, ("mean", "worst"), strict=True):
        for (name, seeds), color, marker in zip(runs.items(), COLORS, MARKERS, strict=False):
            curves = [{e["step"]: e[f"solve_rate_{which}"] for e in run.evaluations} for run in seeds.values()]
            for curve in curves:
                axis.plot(curve.keys(), curve.values(), color=color, linewidth=0.8, alpha=0.6)
            steps = sorted(set.intersection(*map(set, curves)))
            means = [fmean(curve[step] for curve in curves) for step in steps]
            axis.plot(steps, means, color=color, marker=marker, linewidth=2.4, label=f"{name}, {len(curves)} seed(s)")
        axis.axhline(mean(bases), color="0.35", linestyle="--", linewidth=1.2, label="base")
        axis.set_title({"mean": "students' mean", "worst": "weakest student"}[which])
        axis.set_ylabel("held-out tasks solved")
        _tidy(axis)
    axes[-1].set_xlabel("population step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def draw_curves(runs: Runs, path: Path) -> None:
    """One panel per measure: a thin line per seed, a thick one for their mean."""
    figure = _figure((6.6, 15.5))
    axes = figure.subplots(-(-(len(MEASURES) + 1) // 2), 2, sharex=True)
    for axis, measure in zip(axes.flat, MEASURES, strict=False):
        for color, seeds in zip(COLORS, runs.values(), strict=False):
            smooth = [_running(run.curves[measure.name]) for run in seeds.values()]
            for line in smooth:
                axis.plot(_steps(line), line, color=color, linewidth=0.8, alpha=0.5)
            together = [mean(step) for step in zip(*smooth, strict=False)]
            axis.plot(_steps(together), together, color=color, linewidth=2.4)
        axis.set_title(measure.name.replace(" per ", "\nper "), fontsize=12)
        axis.set_ylabel(measure.unit)
        _tidy(axis)
    for axis in list(axes.flat)[len(MEASURES) :]:
        axis.axis("off")
    axes[-1, 0].set_xlabel("population step")
    handles = [axes[0, 0].plot([], [], color=color, linewidth=2.4)[0] for color, _ in zip(COLORS, runs, strict=False)]
    handles.append(axes[0, 0].plot([], [], color="0.4", linewidth=0.8)[0])
    labels = [f"{name}: mean of {len(seeds)} seed(s)" for name, seeds in runs.items()]
    note = f"one seed\n(all: mean of {WINDOW * BLOCK} steps)"
    axes[-1, -1].legend(handles, [*labels, note], loc="center", frameon=False, fontsize=11)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _figure(inches: tuple[float, float]):
    """Two thirds of a screen wide, with letters that a phone shows."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["font.size"] = 12
    from matplotlib.figure import Figure

    return Figure(figsize=inches, layout="constrained")


def _tidy(axis) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _steps(line: Sequence[float]) -> list[int]:
    return [BLOCK * (index + 1) for index in range(len(line))]


def _running(numbers: Sequence[float]) -> list[float]:
    return [mean(numbers[max(0, end - WINDOW) : end]) for end in range(1, len(numbers) + 1)]


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
        [[mean(cells[teacher, student]) for student in students] for teacher in teachers],
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
            row.append(spread([mean([payoff.solved[i][j] for j in columns]) for i in mine]))
        rows.append([*row, spread([payoff.valid[i] for i in mine])])
    return rows


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
