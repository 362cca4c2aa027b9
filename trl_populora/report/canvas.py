"""How all pictures are drawn: colours, letters, the line of steps, and the one way into a file.

Needs the `report` extra (matplotlib).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_populora.report.load import Run


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

Draw = Callable[["Figure", Run], None]  # paints into a figure or a part of one

# Colour-blind safe (Okabe and Ito); a role keeps its colour in every picture.
COLORS = {"teacher": "#D55E00", "student": "#0072B2"}
SERIES_COLORS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#0072B2", "#D55E00", "#8C6D00", "#444444")
LINE_STYLES = ("-", "--", "-.", ":")
GREY = "0.45"

# 4.4 inches shrink to a phone's 340 pixels with letters of 10 pixels and more.
WIDTH, DPI = 4.4, 220
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.labelsize": 9.5,
    "legend.fontsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


def picture(
    path: Path, size: tuple[float, float], paint: Callable[..., None], *arguments: Any, dpi: int = DPI
) -> Path:
    """Lets `paint(figure, *arguments)` draw a figure of so many inches into a PNG file; same values, same bytes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure, *arguments)
        figure.savefig(path, dpi=dpi, metadata={"Software": None})  # no version stamp
    return path


def on_one_axis(paint: Callable[[Axes, Run], None]) -> Draw:
    """A picture with one pair of axes, with its births marked, its steps named and its legend below."""

    @wraps(paint)
    def draw(figure: Figure, run: Run) -> None:
        axis: Any = figure.subplots()
        paint(axis, run)
        mark_births(axis, run)
        finish(figure, axis)

    return draw


def line_style(index: int) -> dict[str, Any]:
    """Colour and dashes of the n-th line: distinct for 32 of them, on paper too."""
    return {
        "color": SERIES_COLORS[index % len(SERIES_COLORS)],
        "linestyle": LINE_STYLES[index // len(SERIES_COLORS) % len(LINE_STYLES)],
    }


def mark_births(axis: Axes, run: Run, label: bool = True) -> None:
    for index, step in enumerate(run.births):
        text = "evolution" if label and not index else None
        axis.axvline(step, color=GREY, linestyle=":", linewidth=0.9, zorder=0, label=text)


def name_steps(axis: Axes, ticks: int = 7) -> None:
    axis.set_xlabel("population step")
    axis.xaxis.set_major_locator(whole_numbers(ticks))


def whole_numbers(ticks: int) -> MaxNLocator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True, nbins=ticks, min_n_ticks=1)


def finish(figure: Figure, lowest: Axes) -> None:
    """Names the steps, and puts one legend for the whole figure below it, where it covers nothing."""
    name_steps(lowest)
    lines: list[Any] = [line for axis in figure.axes for line in axis.lines]
    for line in lines:
        if len(line.get_xdata()) == 1:  # a run's first step: through one point there is no line
            line.set(marker="o", markersize=4)
        if len(line.get_xdata()) == 0:  # not measured in this run: nothing that a legend could name
            line.set_label(None)
    if any(axis.get_legend_handles_labels()[0] for axis in figure.axes):
        figure.legend(loc="outside lower center", ncols=2)


def window(run: Run) -> str:
    width = _width(run)
    return f"thick: running mean of {width} logged steps" if width > 1 else ""


def _width(run: Run) -> int:
    """
    Points that a running mean covers: steps of a few tasks each jump more than they change. A twelfth of a run is
    short enough to show what an evolution event did.
    """
    return 1 + len(run.history) // 12


def plot_smoothed(axis: Axes, run: Run, key: str, **style: Any) -> None:
    """A metric's running mean, with what was measured as a faint line behind it."""
    steps, values = run.series(key)
    if _width(run) > 1:
        axis.plot(steps, values, color=style["color"], linewidth=0.7, alpha=0.35, zorder=1)
    axis.plot(steps, smooth(values, run), **style)


def smooth(values: Sequence[float], run: Run) -> list[float]:
    """Running mean over the last points."""
    width = _width(run)
    return [mean(values[max(0, index + 1 - width) : index + 1]) for index in range(len(values))]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def draw_payoff(
    figure: Figure,
    rates: Sequence[Sequence[float]],
    teachers: Sequence[str],
    students: Sequence[str],
    notes: Sequence[Sequence[str]] | None = None,
) -> None:
    """Solve rates as a heat map, a row per teacher and a column per student; `notes` follow the number in a cell."""
    from matplotlib.colors import LinearSegmentedColormap

    axis = figure.subplots()
    scale = LinearSegmentedColormap.from_list("match", [COLORS["teacher"], "#FFFFFF", COLORS["student"]])
    image = axis.imshow(rates, cmap=scale, vmin=0, vmax=1, aspect="auto")
    size = 9 if max(len(teachers), len(students)) <= 4 else 7
    for y, row in enumerate(rates):
        for x, rate in enumerate(row):
            text = (f"{100 * rate:.0f} %" if rate == rate else "-") + (notes[y][x] if notes else "")
            axis.text(x, y, text, ha="center", va="center", fontsize=size)
    axis.set_xticks(range(len(students)), students, rotation=0 if max(map(len, students)) < 10 else 90)
    axis.set_yticks(range(len(teachers)), teachers)
    axis.grid(False)
    axis.set(xlabel="student", ylabel="teacher")
    figure.colorbar(image, ax=axis, label="solved (fraction)", shrink=0.9)
