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
    A claim of the paper, and the figure by which runs of the arms race are judged.

    Args:
        id (`str`): The statement in `docs/paper.md`; empty where the paper does not say it.
        text (`str`): The claim.
        measure (`str`): What `figure` is, in words.
        figure (`Callable[[Run], float]`): Above zero in every run, or larger than in the other's, where it is true.
        of (`str`): The variant whose runs are looked at.
        against (`str`, *optional*): The variant that it is compared with, seed by seed.
        ours (`bool`): Whether the claim is told by a threshold or a yardstick of ours, which the paper does not have.
    """

    id: str
    text: str
    measure: str
    figure: Callable[[Run], float]
    of: str = POPULATION
    against: str | None = None
    ours: bool = False


NEARLY_ALL = 0.95  # of the attempts: what "nearly 100 %" means here at the least
RISES, SOLVED = "last fifth of the steps less the first", "solve rate of fresh tasks"


def _rise(name: str, sign: int = 1) -> Callable[[Run], float]:
    return lambda run: sign * run.rise(name)


def _last(name: str, less: float = 0.0) -> Callable[[Run], float]:
    return lambda run: run.fifths(name)[1] - less


def _new_in_last_fifth(run: Run) -> float:
    shapes = run.new_shapes()
    return mean(shapes[-max(1, len(shapes) // 5) :])


CLAIMS = (
    Claim("R1", "a single agent's solve rate climbs", RISES, _rise(SOLVED), AGENT),
    Claim("R1", "to nearly 100 %", f"last fifth, less {NEARLY_ALL}", _last(SOLVED, NEARLY_ALL), AGENT),
    Claim("R1", "its AST depth falls", "first fifth less the last", _rise("AST depth", -1), AGENT),
    Claim("R1", "its cyclomatic complexity falls", "likewise", _rise("cyclomatic complexity", -1), AGENT),
    Claim("R1", "its lines fall", "likewise", _rise("lines of code", -1), AGENT),
    Claim("R1", "its variables fall", "likewise", _rise("variables", -1), AGENT),
    Claim("R2", "a population's AST depth rises", RISES, _rise("AST depth")),
    Claim("R2", "its cyclomatic complexity rises", "likewise", _rise("cyclomatic complexity")),
    Claim("R2", "its lines rise", "likewise", _rise("lines of code")),
    Claim("R2", "its variables rise", "likewise", _rise("variables")),
    Claim(
        "R2",
        "its solve rate oscillates",
        "deviation of five-step means from a parabola, less what sampling can make",
        Run.swing,
        ours=True,
    ),
    Claim("R2", "its coverage keeps growing", "new shapes a step, last fifth", _new_in_last_fifth),
    Claim(
        "",
        "coverage grows more than the single agent's",
        "new shapes in the run, population less agent",
        lambda run: BLOCK * sum(run.new_shapes()),
        POPULATION,
        AGENT,
        ours=True,
    ),
    Claim(
        "",
        "also at the end",
        "new shapes a step, last fifth, population less agent",
        _new_in_last_fifth,
        POPULATION,
        AGENT,
        ours=True,
    ),
    Claim(
        "",
        "also per proposal",
        "new shapes per valid proposal, last fifth, population less agent",
        _last("new structures per valid proposal"),
        POPULATION,
        AGENT,
        ours=True,
    ),
    Claim(
        "R3",
        "ratings differentiate",
        "deviation within a role over sigma, last fifth, less 1",
        _last("rating spread in a role", 1),
        ours=True,
    ),
    Claim(
        "R4",
        "newborns recover within 20 updates",
        "share of students that do, less .5",
        lambda run: run.share_back() - 0.5,
        ours=True,
    ),
    Claim(
        "R6",
        "the population earns less in training",
        "students' reward, last fifth, agent less population",
        lambda run: -run.fifths("student reward")[1],
        POPULATION,
        AGENT,
    ),
    Claim(
        "R6", "its mean beats the single agent", "held-out tasks, population less agent", Run.gain, POPULATION, AGENT
    ),
    Claim(
        "R6", "its weakest member does, too", "likewise, weakest student", lambda r: r.gain("worst"), POPULATION, AGENT
    ),
    Claim(
        "", "its mean does, earlier", "held-out tasks, mean over the run", Run.mean_gain, POPULATION, AGENT, ours=True
    ),
    Claim("", "its mean beats the base", "held-out tasks, population less base", Run.gain, ours=True),
    Claim(
        "",
        "also at levels never trained",
        "tasks of these levels, population less base",
        lambda run: run.transfer() - _base(run),
        ours=True,
    ),
    Claim("", "and there beats the single agent", "population less agent", Run.transfer, POPULATION, AGENT, ours=True),
)


def _base(run: Run) -> float:
    return run.untrained.get(BASE_NAME, math.nan)


def claims_table(runs: Runs) -> list[list[str]]:
    """Claim by claim: its id, what is measured, mean, interval, seeds, and what they say."""
    rows = [["id", "claim", "our measure", "mean [95 %]", "seeds", "verdict"]]
    for claim in CLAIMS:
        if claim.of in runs and (claim.against is None or claim.against in runs):
            numbers = differences(runs, claim.figure, claim.of, claim.against)
            told = [interval(numbers), str(len(numbers)), verdict(numbers, claim.ours)]
            rows.append([claim.id or "ours", claim.text, claim.measure, *told])
    return rows


def is_told(numbers: Sequence[float]) -> bool:
    """Whether there are enough seeds, and the interval holds no zero."""
    if len(numbers) < ENOUGH_SEEDS:
        return False
    mean, half = measure_mean(numbers)
    return abs(mean) > half


def verdict(numbers: Sequence[float], ours: bool = False) -> str:
    """`agrees`, `disagrees`, or `cannot be told`; of a yardstick that is `ours`, `our threshold was not met`."""
    if len(numbers) < ENOUGH_SEEDS:
        return "cannot be told: too few seeds"
    if not is_told(numbers):
        return "cannot be told"
    return "agrees" if fmean(numbers) > 0 else "our threshold was not met" if ours else "disagrees"


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
    return f"**{text}**" if is_told(numbers) else text


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
