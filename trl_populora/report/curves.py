"""Pictures of what changes from step to step: held-out tasks, ratings, rewards, shares, how demanding tasks are.

Every function draws into the figure, or part of one, that it is given; thin lines are what was measured.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from trl_populora.report.canvas import (
    COLORS,
    GREY,
    SERIES_COLORS,
    Draw,
    finish,
    line_style,
    mark_births,
    mean,
    name_steps,
    on_one_axis,
    plot_smoothed,
    smooth,
    window,
)
from trl_populora.report.load import Run, table_name
from trl_populora.tasks.complexity import PROGRAM_MEASURES


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@on_one_axis
def draw_held_out(axis: Axes, run: Run) -> None:
    """Held-out solve rate of each student, their mean, and the base's as a line; of several tables the means alone."""
    tables = run.tables
    if len(tables) == 1:
        for index, name in enumerate(run.members("student")):
            style = line_style(index) | {"linewidth": 1.2, "marker": ".", "label": name}
            axis.plot(*run.series(f"{tables[0]}{name}/solve_rate"), **style)
    for index, table in enumerate(tables):
        one = len(tables) == 1
        color = COLORS["student"] if one else SERIES_COLORS[index % len(SERIES_COLORS)]
        label = "mean of the students" if one else f"{table_name(table)}, mean"
        axis.plot(*run.series(f"{table}solve_rate_mean"), color=color, linewidth=2.6, marker="o", label=label)
        _, base = run.series(f"{table}base/solve_rate")
        if base:
            label = "the base, untrained" if one else "_"
            axis.axhline(base[0], color=GREY if one else color, label=label, linestyle="--", linewidth=1.4)
    axis.set(ylabel="attempts solved (fraction)", ylim=(-0.02, 1.02))


@on_one_axis
def draw_held_out_kinds(axis: Axes, run: Run) -> None:
    """The students' held-out solve rate by kind of task, dashed the base's; of several tables the first."""
    table = run.tables[0]
    for kind, color in zip(run.held_out_kinds, SERIES_COLORS, strict=False):
        axis.plot(*run.series(f"{table}{kind}/solve_rate"), color=color, linewidth=2, marker="o", label=kind)
        _, base = run.series(f"{table}base/{kind}/solve_rate")
        if base:
            axis.axhline(base[0], color=color, linestyle="--", linewidth=1.2)
    axis.set(title=table_name(table), ylabel="attempts solved (fraction)", ylim=(-0.02, 1.02))


@on_one_axis
def draw_thinking(axis: Axes, run: Run) -> None:
    plot_smoothed(axis, run, "solve/thinking_rate", color=COLORS["student"], linewidth=2, label="fresh tasks")
    axis.plot(*run.series("eval/thinking_rate"), color="0.3", linestyle="--", marker="o", label="held-out tasks")
    axis.set(title=window(run), ylabel="attempts that think first (fraction)", ylim=(-0.02, 1.02))


def draw_ratings(role: str) -> Draw:
    @on_one_axis
    def draw(axis: Axes, run: Run) -> None:
        color, members = COLORS[role], run.members(role)
        axis.set(ylabel="TrueSkill mu (rating points)")
        if len(members) == 1:
            axis.plot(*run.series(f"member/{members[0]}/mu"), color=color, linewidth=2.4, label=members[0])
            return
        steps, means = run.series(f"population/{role}/mu_mean")
        if len(members) > 3:  # a spread of fewer is the lines themselves
            _, spreads = run.series(f"population/{role}/mu_std")
            low, high = ([m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
            axis.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0, label="± 1 std over members")
        axis.plot(steps, means, color=color, linewidth=2.4, label=f"mean of the {role}s", zorder=3)
        for index, name in enumerate(members):
            axis.plot(*run.series(f"member/{name}/mu"), **line_style(index), linewidth=1, label=name)

    return draw


@on_one_axis
def draw_solve_rates(axis: Axes, run: Run) -> None:
    by_match: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    teacher_of = {(r["step"], r["match"]): r["member"] for r in run.rows if r["role"] == "teacher"}
    for row in run.rows:
        if row["role"] == "student" and not row["archived"] and teacher_of:
            by_match[teacher_of[row["step"], row["match"]]][row["step"]].append(row["correct"])
    for index, teacher in enumerate(sorted(by_match) if len(by_match) > 1 else ()):
        steps = sorted(by_match[teacher])
        rates = [mean(by_match[teacher][step]) for step in steps]
        axis.plot(steps, smooth(rates, run), **line_style(index), linewidth=1, label=f"against {teacher}")
    plot_smoothed(axis, run, "solve/rate", color="black", linewidth=2.2, label="all fresh tasks")
    for key, style, label in (("frac_none", "--", "solved by nobody"), ("frac_all", "-.", "solved by all")):
        steps, rates = run.series(f"solve/{key}")
        axis.plot(steps, smooth(rates, run), color=GREY, linestyle=style, linewidth=1, label=label)
    axis.set(title=window(run), ylabel="attempts solved (fraction)", ylim=(-0.03, 1.03))


@on_one_axis
def draw_rewards(axis: Axes, run: Run) -> None:
    for role, color in COLORS.items():
        label = f"{role}s, mean of the step"
        plot_smoothed(axis, run, f"rewards/{role}_reward/mean", color=color, linewidth=2, label=label)
    axis.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    axis.set(title=window(run), ylabel="reward (points)")


@on_one_axis
def draw_kinds(axis: Axes, run: Run) -> None:
    for kind, color in zip(run.kinds, SERIES_COLORS, strict=False):
        plot_smoothed(axis, run, f"solve/{kind}/rate", color=color, label=f"{kind}: solved")
        steps, rates = run.series(f"propose/{kind}/valid_rate")
        axis.plot(steps, smooth(rates, run), color=color, linestyle=":", label=f"{kind}: valid")
    axis.set(title=window(run), ylabel="attempts solved, proposals valid\n(fraction)", ylim=(-0.03, 1.03))


CURRICULUM = dict(
    zip(
        PROGRAM_MEASURES,
        (
            ("AST depth", "nodes per program"),
            ("Cyclomatic complexity", "paths per program"),
            ("Lines of code", "lines per program"),
            ("Variables", "names per program"),
        ),
        strict=True,
    )
)


def draw_curriculum(figure: Figure, run: Run) -> None:
    names = run.measures
    columns = min(2, len(names))
    rows = -(-len(names) // columns)
    figure.set_figheight(1.0 + 1.8 * rows)
    axes = figure.subplots(rows, columns, sharex=True, squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        plot_smoothed(axis, run, f"curriculum/{name}", color=COLORS["teacher"], marker=".", markersize=3)
        title, unit = CURRICULUM.get(name, (name.replace("_", " "), f"{name} per task"))
        axis.set(title=title, ylabel=unit)
        mark_births(axis, run, label=False)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis in axes[-1]:
        name_steps(axis, ticks=4)
    label = ",\n".join(filter(None, ["mean over the step's valid tasks", window(run)]))
    drawn = axes.flat[0].lines  # births last
    named = {label: drawn[-1 - len(run.births)]} | ({"evolution": drawn[-1]} if run.births else {})
    figure.legend(named.values(), named, loc="outside lower center", ncols=2)


BREADTH = {
    "curriculum/coverage": ("program structures so far", "distinct structures\n(number)"),
    "curriculum/entropy": ("how evenly they are used", "entropy\n(bits)"),
    "curriculum/features": ("features in recent tasks", "different features\n(number)"),
}


def draw_coverage(figure: Figure, run: Run) -> None:
    names = run.breadth
    figure.set_figheight(1.4 + 1.4 * len(names))
    axes = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for axis, name, color in zip(axes, names, SERIES_COLORS, strict=False):
        label, unit = BREADTH[name]
        axis.plot(*run.series(name), color=color, label=label)
        axis.set(ylabel=unit)
    finish(figure, axes[-1])
