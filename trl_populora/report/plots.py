"""The pictures of a report, one function each: from a run's records to a narrow figure that a phone can show.

Needs the `report` extra (matplotlib). Every function draws into the figure it is given; `PLOTS` lists them in order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

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


def draw_held_out(figure: Figure, run: Run) -> None:
    axis = figure.subplots()
    plot_held_out(axis, run)
    axis.set_title("")
    _mark_births(axis, run)
    _finish(figure, axis)


def plot_held_out(axis: Axes, run: Run) -> None:
    """Held-out solve rate of each student, their mean, and the base's as a line; says so where none was measured."""
    for index, name in enumerate(run.members("student")):
        axis.plot(*run.series(f"eval/{name}/solve_rate"), **_line(index), linewidth=1.2, marker=".", label=name)
    steps, means = run.series("eval/solve_rate_mean")
    _, base = run.series("eval/base/solve_rate")
    if base:
        axis.plot(steps, means, color=COLORS["student"], linewidth=2.6, marker="o", label="mean of the students")
        axis.axhline(base[0], color=GREY, linestyle="--", linewidth=1.4, label="the base, untrained")
    else:
        axis.text(0.5, 0.5, "not evaluated (`eval_dataset`)", ha="center", va="center", transform=axis.transAxes)
    axis.set(title="Held-out tasks", ylabel="attempts solved (fraction)", ylim=(-0.02, 1.02))


def draw_thinking(axis: Axes, run: Run) -> None:
    """Share of the students' attempts that work the task out in `<think>` before they answer."""
    axis.plot(*run.series("solve/thinking_rate"), color=COLORS["student"], linewidth=2, label="fresh tasks")
    axis.plot(*run.series("eval/thinking_rate"), color="0.3", linestyle="--", marker="o", label="held-out tasks")
    axis.set(title="Worked answers", ylabel="attempts that think first (fraction)", ylim=(-0.02, 1.02))


def draw_worked(figure: Figure, run: Run) -> None:
    axis = figure.subplots()
    draw_thinking(axis, run)
    axis.set_title("")
    _mark_births(axis, run)
    _finish(figure, axis)


def draw_teacher_ratings(figure: Figure, run: Run) -> None:
    _draw_ratings(figure, run, "teacher")


def draw_student_ratings(figure: Figure, run: Run) -> None:
    _draw_ratings(figure, run, "student")


def _draw_ratings(figure: Figure, run: Run, role: str) -> None:
    axis, color, members = figure.subplots(), COLORS[role], run.members(role)
    if len(members) == 1:
        axis.plot(*run.series(f"member/{members[0]}/mu"), color=color, linewidth=2.4, label=members[0])
    else:
        steps, means = run.series(f"population/{role}/mu_mean")
        _, spreads = run.series(f"population/{role}/mu_std")
        low, high = ([m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
        axis.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0, label="± 1 std over members")
        axis.plot(steps, means, color=color, linewidth=2.4, label=f"mean of the {role}s", zorder=3)
        for index, name in enumerate(members):
            axis.plot(*run.series(f"member/{name}/mu"), **_line(index), linewidth=1, label=name)
    axis.set(ylabel="TrueSkill mu (rating points)")
    _mark_births(axis, run)
    _finish(figure, axis)


def draw_solve_rates(figure: Figure, run: Run) -> None:
    axis = figure.subplots()
    by_match: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    teacher_of = {(r["step"], r["match"]): r["member"] for r in run.rows if r["role"] == "teacher"}
    for row in run.rows:
        if row["role"] == "student" and not row["archived"]:
            by_match[teacher_of[row["step"], row["match"]]][row["step"]].append(row["correct"])
    for index, teacher in enumerate(sorted(by_match) if len(by_match) > 1 else ()):
        steps = sorted(by_match[teacher])
        rates = [_mean(by_match[teacher][step]) for step in steps]
        axis.plot(steps, _smooth(rates, run), **_line(index), linewidth=1, label=f"against {teacher}")
    steps, rates = run.series("solve/rate")
    axis.plot(steps, _smooth(rates, run), color="black", linewidth=2.2, label="all fresh tasks")
    axis.set(title=_window(run), ylabel="attempts solved (fraction)", ylim=(-0.03, 1.03))
    _mark_births(axis, run)
    _finish(figure, axis)


def draw_rewards(figure: Figure, run: Run) -> None:
    axis = figure.subplots()
    for role, color in COLORS.items():
        steps, means = run.series(f"rewards/{role}_reward/mean")
        axis.plot(steps, _smooth(means, run), color=color, linewidth=2, label=f"{role}s, mean of the step")
    axis.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    axis.set(title=_window(run), ylabel="reward (points)")
    _mark_births(axis, run)
    _finish(figure, axis)


def draw_kinds(figure: Figure, run: Run) -> None:
    axis = figure.subplots()
    for kind, color in zip(run.kinds, SERIES_COLORS, strict=False):
        steps, rates = run.series(f"solve/{kind}/rate")
        axis.plot(steps, _smooth(rates, run), color=color, label=f"{kind}: solved")
        steps, rates = run.series(f"propose/{kind}/valid_rate")
        axis.plot(steps, _smooth(rates, run), color=color, linestyle=":", label=f"{kind}: valid")
    axis.set(title=_window(run), ylabel="attempts solved, proposals valid\n(fraction)", ylim=(-0.03, 1.03))
    _finish(figure, axis)


CURRICULUM = {
    "ast_depth": ("AST depth", "nodes per program"),
    "cyclomatic": ("Cyclomatic complexity", "paths per program"),
    "lines": ("Lines of code", "lines per program"),
    "variables": ("Variables", "names per program"),
}
PANELS = "curriculum/"


def measures_of(run: Run) -> list[str]:
    """What the run's kinds measure of their tasks, those of programs first; `coverage` and `entropy` are the archive's."""
    found = {key.removeprefix(PANELS) for key in run.latest if key.startswith(PANELS)} - {"coverage", "entropy"}
    return [name for name in CURRICULUM if name in found] + sorted(found - CURRICULUM.keys())


def draw_curriculum(figure: Figure, run: Run) -> None:
    names = measures_of(run) or list(CURRICULUM)  # empty panels where no task was valid yet
    rows = -(-len(names) // 2)
    figure.set_figheight(1.0 + 1.8 * rows)
    axes = figure.subplots(rows, 2, sharex=True, squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        steps, values = run.series(PANELS + name)
        (line,) = axis.plot(steps, _smooth(values, run), color=COLORS["teacher"], marker=".", markersize=3)
        title, unit = CURRICULUM.get(name, (name.replace("_", " "), f"{name} per task"))
        axis.set(title=title, ylabel=unit)
        _mark_births(axis, run, label=False)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis in axes[-1]:
        _steps(axis, ticks=4)
    label = ", ".join(filter(None, ["mean over the step's valid tasks", _window(run)]))
    figure.legend([line], [label.replace(", ", ",\n")], loc="outside lower center")


def draw_coverage(figure: Figure, run: Run) -> None:
    axes = figure.subplots(2, 1, sharex=True)
    axes[0].plot(*run.series("curriculum/coverage"), color=COLORS["teacher"], label="kinds of program seen so far")
    axes[0].set(ylabel="distinct structures\n(number)")
    axes[1].plot(*run.series("curriculum/entropy"), color=COLORS["student"], label="entropy of their distribution")
    axes[1].set(ylabel="entropy\n(bits)")
    _finish(figure, axes[1])


def draw_rejects(figure: Figure, run: Run) -> None:
    axis = figure.subplots()
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
    axis.yaxis.set_major_locator(_whole_numbers(6))
    if not reasons:
        axis.set_title("no proposal was rejected")
    _finish(figure, axis)


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
    rates = [[_mean(solved[t, s]) for s in students] for t in teachers]
    notes = [[f"\n{len(met[t, s])}×" for s in students] for t in teachers]
    draw_payoff(
        figure, rates, [t.replace("_", "\n") for t in teachers], [s.replace("_", "\n") for s in students], notes
    )


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
    _steps(axis)
    axis.set_xlim(0, max(end, 1) * 1.02)
    handles = [axis.plot([], [], color=color, linewidth=5, alpha=0.45)[0] for color in COLORS.values()]
    labels = ["teacher's life", "student's life"]
    if run.lineage:
        handles += [axis.plot([], [], color="black", linewidth=0.9, linestyle=style)[0] for style in ("-", "--")]
        labels += ["child of one parent", "child of two"]
    figure.legend(handles, labels, loc="outside lower center", ncols=2)


PHASE_COLORS = {"match": "#444444", "propose": "#D55E00", "verify": "#009E73", "solve": "#0072B2", "update": "#E69F00"}


def draw_times(figure: Figure, run: Run) -> None:
    axis = figure.subplots()
    steps = [entry["step"] for entry in run.history]
    phases = [*PHASE_COLORS, "evolve"]
    values = [[entry.get(f"time/{phase}") or 0.0 for entry in run.history] for phase in phases]
    means = [sum(series) / len(series) for series in values]
    labels = [
        f"{phase} ({f'{mean:.2g}' if mean >= 0.01 else '< 0.01'} s)" for phase, mean in zip(phases, means, strict=True)
    ]
    bottom = [0.0] * len(steps)
    for series, label, color in zip(values, labels, [*PHASE_COLORS.values(), "#CC79A7"], strict=True):
        axis.bar(steps, series, width=1, bottom=bottom, color=color, label=label, linewidth=0)
        bottom = [b + s for b, s in zip(bottom, series, strict=True)]
    axis.set(ylabel="time per step (seconds)")
    _finish(figure, axis)


@dataclass(frozen=True)
class Plot:
    """One picture: file name, title, how to read it, and who draws it. `height` is in inches."""

    name: str
    title: str
    caption: str
    draw: Callable[[Figure, Run], None]
    height: float = 3.7
    needs_rows: bool = False
    needs_evaluations: bool = False

    def can_be_drawn(self, run: Run) -> bool:
        """Whether the run has left what this picture shows."""
        return bool((run.rows or not self.needs_rows) and (run.evaluations or not self.needs_evaluations))


PLOTS = (
    Plot(
        "held_out",
        "Held-out tasks",
        "Share of attempts that each student solves at tasks nobody trains on; dashed the base without any adapter.",
        draw_held_out,
        4.1,
        needs_evaluations=True,
    ),
    Plot(
        "thinking",
        "Worked answers",
        "Share of the students' attempts that work the task out in `<think>` before they answer.",
        draw_worked,
    ),
    Plot(
        "ratings_teachers",
        "TrueSkill ratings of the teachers",
        "A jump at a dotted line is a replacement: the newborn's rating takes over.",
        draw_teacher_ratings,
        3.9,
    ),
    Plot(
        "ratings_students",
        "TrueSkill ratings of the students",
        "Ratings move only in matches between teachers and students: a student above its teachers solves most tasks.",
        draw_student_ratings,
        3.9,
    ),
    Plot(
        "solve_rate",
        "Solve rate per match",
        "Share of the attempts at each teacher's fresh tasks that its student of the step solved. Near 1 the tasks "
        "have become too easy, near 0 too hard.",
        draw_solve_rates,
        needs_rows=True,
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
        needs_rows=True,
    ),
    Plot(
        "lineage",
        "Lineage",
        "One bar per slot; the shade changes when a child takes it over, the arrow comes from the dot on its parent's slot.",
        draw_lineage,
        4.2,
    ),
    Plot("times", "Time per phase", "In brackets the mean over the run.", draw_times, 3.9),
)


def draw(plot: Plot, run: Run, directory: Path) -> Path:
    """Draws one picture into `directory/<name>.png`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    members = len(run.members("teacher") + run.members("student"))
    extra = 0.22 * max(0, members - 8)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, plot.height + extra), layout="constrained")
        plot.draw(figure, run)
        path = directory / f"{plot.name}.png"
        figure.savefig(path, dpi=DPI, metadata={"Software": None})  # no version stamp: same run, same bytes
    return path


def _line(index: int) -> dict[str, Any]:
    """Colour and dashes of the n-th line: distinct for 32 of them, on paper too."""
    return {
        "color": SERIES_COLORS[index % len(SERIES_COLORS)],
        "linestyle": LINE_STYLES[index // len(SERIES_COLORS) % len(LINE_STYLES)],
    }


def _mark_births(axis: Axes, run: Run, label: bool = True) -> None:
    for index, step in enumerate(run.births):
        text = "evolution" if label and not index else None
        axis.axvline(step, color=GREY, linestyle=":", linewidth=0.9, zorder=0, label=text)


def _steps(axis: Axes, ticks: int = 7) -> None:
    axis.set_xlabel("population step")
    axis.xaxis.set_major_locator(_whole_numbers(ticks))


def _whole_numbers(ticks: int) -> MaxNLocator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True, nbins=ticks, min_n_ticks=1)


def _finish(figure: Figure, lowest: Axes) -> None:
    """Names the steps, and puts one legend for the whole figure below it, where it covers nothing."""
    _steps(lowest)
    if any(axis.get_legend_handles_labels()[0] for axis in figure.axes):
        figure.legend(loc="outside lower center", ncols=2)


def _window(run: Run) -> str:
    width = _width(run)
    return f"running mean of {width} logged steps" if width > 1 else ""


def _width(run: Run) -> int:
    """Points that a running mean covers: long runs would be a tangle without."""
    return 1 + len(run.history) // 50


def _smooth(values: Sequence[float], run: Run) -> list[float]:
    """Running mean over the last points."""
    width = _width(run)
    return [_mean(values[max(0, index + 1 - width) : index + 1]) for index in range(len(values))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
