"""The pictures of a report, one function each: from a run's records to a narrow figure that a phone can show.

Every function draws into the figure, or part of one, that it is given; `PLOTS` lists them in order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_populora.report.canvas import (
    COLORS,
    GREY,
    SERIES_COLORS,
    WIDTH,
    Draw,
    draw_payoff,
    finish,
    line_style,
    mark_births,
    mean,
    name_steps,
    on_one_axis,
    picture,
    smooth,
    whole_numbers,
    window,
)
from trl_populora.report.load import Run, load_run
from trl_populora.tasks.complexity import PROGRAM_MEASURES


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@on_one_axis
def draw_held_out(axis: Axes, run: Run) -> None:
    """Held-out solve rate of each student, their mean, and the base's as a line; says so where none was measured."""
    for index, name in enumerate(run.members("student")):
        axis.plot(*run.series(f"eval/{name}/solve_rate"), **line_style(index), linewidth=1.2, marker=".", label=name)
    steps, means = run.series("eval/solve_rate_mean")
    _, base = run.series("eval/base/solve_rate")
    if base:
        axis.plot(steps, means, color=COLORS["student"], linewidth=2.6, marker="o", label="mean of the students")
        axis.axhline(base[0], color=GREY, linestyle="--", linewidth=1.4, label="the base, untrained")
    else:
        axis.text(0.5, 0.5, "not evaluated (`eval_dataset`)", ha="center", va="center", transform=axis.transAxes)
    axis.set(ylabel="attempts solved (fraction)", ylim=(-0.02, 1.02))


@on_one_axis
def draw_thinking(axis: Axes, run: Run) -> None:
    axis.plot(*run.series("solve/thinking_rate"), color=COLORS["student"], linewidth=2, label="fresh tasks")
    axis.plot(*run.series("eval/thinking_rate"), color="0.3", linestyle="--", marker="o", label="held-out tasks")
    axis.set(ylabel="attempts that think first (fraction)", ylim=(-0.02, 1.02))


def draw_ratings(role: str) -> Draw:
    @on_one_axis
    def draw(axis: Axes, run: Run) -> None:
        color, members = COLORS[role], run.members(role)
        axis.set(ylabel="TrueSkill mu (rating points)")
        if len(members) == 1:
            axis.plot(*run.series(f"member/{members[0]}/mu"), color=color, linewidth=2.4, label=members[0])
            return
        steps, means = run.series(f"population/{role}/mu_mean")
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
        if row["role"] == "student" and not row["archived"]:
            by_match[teacher_of[row["step"], row["match"]]][row["step"]].append(row["correct"])
    for index, teacher in enumerate(sorted(by_match) if len(by_match) > 1 else ()):
        steps = sorted(by_match[teacher])
        rates = [mean(by_match[teacher][step]) for step in steps]
        axis.plot(steps, smooth(rates, run), **line_style(index), linewidth=1, label=f"against {teacher}")
    steps, rates = run.series("solve/rate")
    axis.plot(steps, smooth(rates, run), color="black", linewidth=2.2, label="all fresh tasks")
    for key, style, label in (("frac_none", "--", "solved by nobody"), ("frac_all", "-.", "solved by all")):
        steps, rates = run.series(f"solve/{key}")
        axis.plot(steps, smooth(rates, run), color=GREY, linestyle=style, linewidth=1, label=label)
    axis.set(title=window(run), ylabel="attempts solved (fraction)", ylim=(-0.03, 1.03))


@on_one_axis
def draw_rewards(axis: Axes, run: Run) -> None:
    for role, color in COLORS.items():
        steps, means = run.series(f"rewards/{role}_reward/mean")
        axis.plot(steps, smooth(means, run), color=color, linewidth=2, label=f"{role}s, mean of the step")
    axis.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    axis.set(title=window(run), ylabel="reward (points)")


@on_one_axis
def draw_kinds(axis: Axes, run: Run) -> None:
    for kind, color in zip(run.kinds, SERIES_COLORS, strict=False):
        steps, rates = run.series(f"solve/{kind}/rate")
        axis.plot(steps, smooth(rates, run), color=color, label=f"{kind}: solved")
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
    names = run.measures or list(CURRICULUM)  # empty panels where no task was valid yet
    rows = -(-len(names) // 2)
    figure.set_figheight(1.0 + 1.8 * rows)
    axes = figure.subplots(rows, 2, sharex=True, squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        steps, values = run.series(f"curriculum/{name}")
        (line,) = axis.plot(steps, smooth(values, run), color=COLORS["teacher"], marker=".", markersize=3)
        title, unit = CURRICULUM.get(name, (name.replace("_", " "), f"{name} per task"))
        axis.set(title=title, ylabel=unit)
        mark_births(axis, run, label=False)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis in axes[-1]:
        name_steps(axis, ticks=4)
    label = ", ".join(filter(None, ["mean over the step's valid tasks", window(run)]))
    figure.legend([line], [label.replace(", ", ",\n")], loc="outside lower center")


def draw_coverage(figure: Figure, run: Run) -> None:
    axes = figure.subplots(2, 1, sharex=True)
    axes[0].plot(*run.series("curriculum/coverage"), color=COLORS["teacher"], label="kinds of program seen so far")
    axes[0].set(ylabel="distinct structures\n(number)")
    axes[1].plot(*run.series("curriculum/entropy"), color=COLORS["student"], label="entropy of their distribution")
    axes[1].set(ylabel="entropy\n(bits)")
    finish(figure, axes[1])


@on_one_axis
def draw_rejects(axis: Axes, run: Run) -> None:
    prefix = "verify/reject/"
    totals: Counter[str] = Counter()
    history = [entry for entry in run.history if any(key.startswith(prefix) for key in entry)]
    for entry in history:
        totals.update({key[len(prefix) :]: entry[key] or 0 for key in entry if key.startswith(prefix)})
    reasons = [reason for reason, count in totals.most_common() if count]
    steps = [entry["step"] for entry in history]
    bottom = [0.0] * len(steps)
    for index, reason in enumerate(reasons):
        counts = [entry.get(prefix + reason) or 0.0 for entry in history]
        color = SERIES_COLORS[index % len(SERIES_COLORS)]
        hatch = "///" if index >= len(SERIES_COLORS) else None
        mean = totals[reason] / len(steps)
        label = f"{reason.replace('_', ' ')} ({f'{mean:.1f}' if mean >= 0.1 else '< 0.1'})"
        axis.bar(steps, counts, width=1, bottom=bottom, color=color, hatch=hatch, label=label, linewidth=0)
        bottom = [b + c for b, c in zip(bottom, counts, strict=True)]
    axis.set(ylabel="rejected proposals (number)")
    axis.yaxis.set_major_locator(whole_numbers(6))
    if not reasons:
        axis.set_title("no proposal was rejected")


def draw_matches(figure: Figure, run: Run) -> None:
    teachers, students = run.members("teacher"), run.members("student")
    teacher_of = {(r["step"], r["match"]): r["member"] for r in run.rows if r["role"] == "teacher"}
    solved: dict[tuple[str, str], list[bool]] = defaultdict(list)
    met: dict[tuple[str, str], set] = defaultdict(set)
    for row in run.rows:
        if row["role"] == "student":
            pair = teacher_of[row["step"], row["match"]], row["member"]
            met[pair].add((row["step"], row["match"]))
            if not row["archived"]:
                solved[pair].append(row["correct"])
    rates = [[mean(solved[t, s]) for s in students] for t in teachers]
    notes = [[f"\n{len(met[t, s])}×" for s in students] for t in teachers]
    draw_payoff(
        figure, rates, [t.replace("_", "\n") for t in teachers], [s.replace("_", "\n") for s in students], notes
    )


def draw_lineage(figure: Figure, run: Run) -> None:
    axis = figure.subplots()
    slots = run.members("teacher") + run.members("student")
    height = {name: -index for index, name in enumerate(slots)}
    end = max(entry["step"] for entry in run.history)
    starts = {name: [0] for name in slots}
    for event in run.lineage:
        starts[event["child"].partition("@")[0]].append(event["step"])
    for name in slots:
        color = COLORS[name.rpartition("_")[0]]
        for version, (start, stop) in enumerate(zip(starts[name], [*starts[name][1:], end], strict=True)):
            axis.plot([start, stop], [height[name]] * 2, color=color, linewidth=5, alpha=0.9 if version % 2 else 0.45)
    for event in run.lineage:
        child = event["child"].partition("@")[0]
        for parent in event["parents"]:
            y = height[parent["member"].partition("@")[0]]
            axis.plot(event["step"], y, color="black", marker="o", markersize=4)
            style = "-" if len(event["parents"]) == 1 else "--"
            arrow = {
                "arrowstyle": "-|>",
                "color": "black",
                "linewidth": 0.9,
                "linestyle": style,
                "shrinkA": 0,
                "shrinkB": 2,
            }
            axis.annotate("", (event["step"], height[child]), (event["step"], y), arrowprops=arrow)
    axis.set_yticks(list(height.values()), list(height))
    axis.set_ylim(-len(slots) + 0.4, 0.6)
    axis.grid(False)
    name_steps(axis)
    axis.set_xlim(0, max(end, 1) * 1.02)
    handles = [axis.plot([], [], color=color, linewidth=5, alpha=0.45)[0] for color in COLORS.values()]
    labels = ["teacher's life", "student's life"]
    if run.lineage:
        handles += [axis.plot([], [], color="black", linewidth=0.9, linestyle=style)[0] for style in ("-", "--")]
        labels += ["child of one parent", "child of two"]
    figure.legend(handles, labels, loc="outside lower center", ncols=2)


PHASE_COLORS = {"match": "#444444", "propose": "#D55E00", "verify": "#009E73", "solve": "#0072B2", "update": "#E69F00"}
PHASE_COLORS |= {"evolve": "#CC79A7", "wait": "#BBBBBB"}


@on_one_axis
def draw_times(axis: Axes, run: Run) -> None:
    steps = [entry["step"] for entry in run.history]
    ahead = any("time/wait" in entry for entry in run.history)
    phases = [phase for phase in PHASE_COLORS if ahead or phase != "wait"]
    values = [[entry.get(f"time/{phase}") or 0.0 for entry in run.history] for phase in phases]
    means = [sum(series) / len(series) for series in values]
    labels = [
        f"{phase} ({f'{mean:.2g}' if mean >= 0.01 else '< 0.01'} s)" for phase, mean in zip(phases, means, strict=True)
    ]
    bottom = [entry.get("time/hidden") or 0.0 for entry in run.history]
    for series, label, phase in zip(values, labels, phases, strict=True):
        axis.bar(steps, series, width=1, bottom=bottom, color=PHASE_COLORS[phase], label=label, linewidth=0)
        bottom = [b + s for b, s in zip(bottom, series, strict=True)]
    axis.set(ylabel="time per step (seconds)")


@dataclass(frozen=True)
class Plot:
    """One picture: file name, title, how to read it, and who draws it. `height` is in inches."""

    name: str
    title: str
    caption: str
    draw: Draw
    height: float = 3.7
    needs: str = ""  # which of a run's records it cannot do without

    def can_be_drawn(self, run: Run) -> bool:
        """Whether the run has left what this picture shows."""
        return not self.needs or bool(getattr(run, self.needs))


PLOTS = (
    Plot(
        "held_out",
        "Held-out tasks",
        "Share of attempts that each student solves at tasks nobody trains on; dashed the base without any adapter.",
        draw_held_out,
        4.1,
        needs="evaluations",
    ),
    Plot(
        "thinking",
        "Worked answers",
        "Share of the students' attempts that work the task out in `<think>` before they answer.",
        draw_thinking,
    ),
    Plot(
        "ratings_teachers",
        "TrueSkill ratings of the teachers",
        "A jump at a dotted line is a replacement: the newborn's rating takes over.",
        draw_ratings("teacher"),
        3.9,
    ),
    Plot(
        "ratings_students",
        "TrueSkill ratings of the students",
        "Ratings move only in matches between teachers and students: a student above its teachers solves most tasks.",
        draw_ratings("student"),
        3.9,
    ),
    Plot(
        "solve_rate",
        "Solve rate per match",
        "Share of the attempts at each teacher's fresh tasks that its student of the step solved. Near 1 the tasks "
        "have become too easy, near 0 too hard.",
        draw_solve_rates,
    ),
    Plot(
        "rewards",
        "Rewards",
        "A teacher earns 1 - solve rate for a solved task; teacher_reward_* and student_reward_* say the rest.",
        draw_rewards,
    ),
    Plot(
        "kinds",
        "By kind of task",
        "Solid: share of attempts solved. Dotted: share of proposals that the sandbox accepted.",
        draw_kinds,
        4.1,
    ),
    Plot(
        "curriculum",
        "How demanding the tasks are",
        "What the kinds measure of valid tasks; programs have four. Single-agent self-play is known to let them fall.",
        draw_curriculum,
        4.6,
    ),
    Plot(
        "coverage",
        "Coverage of program space",
        "Distinct program structures over the whole run, and how evenly they are used.",
        draw_coverage,
        4.2,
    ),
    Plot("rejects", "Why proposals were rejected", "Per step; in brackets the mean over the run.", draw_rejects, 4.2),
    Plot(
        "matches",
        "Who met whom",
        "Share of the attempts that each student solved against each teacher, and the number of matches.",
        draw_matches,
        4.2,
        needs="rows",
    ),
    Plot(
        "lineage",
        "Lineage",
        "One bar per slot; the shade changes when a child takes it over, the arrow comes from its parent's slot.",
        draw_lineage,
        4.2,
    ),
    Plot("times", "Time per phase", "Below 0: beside the update before. In brackets the mean.", draw_times, 3.9),
)

# What `run.png` shows, two beside each other.
OVERVIEW = [plot for plot in PLOTS if plot.name not in ("curriculum", "coverage", "matches", "lineage", "times")]


def draw_plots(run: Run, directory: Path, names: Sequence[str] | None = None) -> list[tuple[Plot, Path]]:
    """Draws a run's pictures, or those named, into `directory/<name>.png`; without rollouts some cannot be."""
    directory.mkdir(parents=True, exist_ok=True)
    extra = 0.22 * max(0, len(run.members("teacher") + run.members("student")) - 8)
    drawn = []
    for plot in PLOTS:
        if (names is None or plot.name in names) and plot.can_be_drawn(run):
            path, size = directory / f"{plot.name}.png", (WIDTH, plot.height + extra)
            drawn.append((plot, picture(path, size, plot.draw, run)))
    return drawn


def plot_run(run: str | Path, path: str | Path | None = None) -> Path:
    """
    Draws the pictures that tell most into one PNG.

    Args:
        run (`str` or `Path`): The run's `output_dir`.
        path (`str` or `Path`, *optional*): Where the picture goes, `run.png` in the run by default.

    Raises:
        `ValueError`: If the run has not logged a step yet.
    """
    records = load_run(run)

    def paint(figure: Figure) -> None:
        figure.suptitle(f"{records.name}: dotted lines mark evolution events")
        parts: Any = figure.subfigures(len(OVERVIEW) // 2, 2)
        for part, plot in zip(parts.flat, OVERVIEW, strict=True):
            part.suptitle(plot.title)
            plot.draw(part, records)

    return picture(Path(path or Path(run, "run.png")), (2.2 * WIDTH, 2.2 * len(OVERVIEW)), paint, dpi=110)
