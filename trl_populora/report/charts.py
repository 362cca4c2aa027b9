"""Draws the pictures of a run. Needs the `report` extra (matplotlib).

First comes what all pictures share: size, colours, legend, running means. Then come the pictures of what changes from
step to step, in the game and in a dataset run, and last those of what a run did as a whole. `plots.py` lists these
functions with the titles of their pictures. Each draws a run into a figure, or into a part of one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_populora.report.load import Run, name_table


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator


# matplotlib is imported inside functions: `import trl_populora.report.charts` works without it, and is quick.
Draw = Callable[["Figure", Run], None]  # draws a run into a figure, or into a part of one

# Mostly the palette of Okabe and Ito, which colour-blind people can tell apart. A role has one colour in all pictures.
COLORS = {"teacher": "#D55E00", "student": "#0072B2"}
SERIES_COLORS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#0072B2", "#D55E00", "#8C6D00", "#444444")
LINE_STYLES = ("-", "--", "-.", ":")
HATCHES = (None, "///", "...", "xxx")
GREY = "0.45"

# On a phone 4.4 inches shrink to 340 pixels. Letters of 9.5 points then have 10 pixels.
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
    "text.parse_math": False,  # names of members and kinds are text, also `$x$`
}


def save_picture(
    path: Path, size: tuple[float, float], paint: Callable[..., None], *arguments: Any, dpi: int = DPI
) -> Path:
    """
    Draws a picture and saves it as a PNG file. Equal values give equal bytes.

    Args:
        path: The file.
        size: Width and height, inches.
        paint: Called as `paint(figure, *arguments)`.
        dpi: Pixels per inch.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure, *arguments)
        # matplotlib would stamp its version into the file, and so change the bytes.
        figure.savefig(path, dpi=dpi, metadata={"Software": None})
    return path


def on_one_axis(paint: Callable[[Axes, Run], None]) -> Draw:
    """Makes a function that draws a figure: `paint` draws on its axes, then births, step axis and legend are added."""

    @wraps(paint)
    def draw(figure: Figure, run: Run) -> None:
        axis: Any = figure.subplots()
        paint(axis, run)
        mark_births(axis, run)
        finish(figure, axis, run)

    return draw


def choose_line_style(index: int) -> dict[str, Any]:
    """Chooses colour and dashes of the n-th line. The first 32 lines all differ."""
    return {
        "color": SERIES_COLORS[index % len(SERIES_COLORS)],
        "linestyle": LINE_STYLES[index // len(SERIES_COLORS) % len(LINE_STYLES)],
    }


def mark_births(axis: Axes, run: Run, label: bool = True) -> None:
    """Draws a dotted vertical line at each step of `Run.births`."""
    for index, step in enumerate(run.births):
        # Only the first line has a label, because the legend has an entry for each line with a label.
        text = run.marked.removesuffix(" events") if label and not index else None
        axis.axvline(step, color=GREY, linestyle=":", linewidth=0.9, zorder=0, label=text)


def name_steps(axis: Axes, run: Run, ticks: int = 7) -> None:
    """Labels the step axis."""
    axis.set_xlabel("population step" if run.game else "optimizer step")
    axis.xaxis.set_major_locator(locate_whole_numbers(ticks))


def locate_whole_numbers(ticks: int) -> MaxNLocator:
    """Makes a locator with at most `ticks + 1` ticks, all at whole numbers: there is no step 2.5."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True, nbins=ticks, min_n_ticks=1)


def finish(figure: Figure, lowest: Axes, run: Run) -> None:
    """Labels the step axis of the lowest axes, and puts one legend below the figure, where it covers nothing."""
    name_steps(lowest, run)
    lines: list[Any] = [line for axis in figure.axes for line in axis.lines]
    for line in lines:
        # A line through one point is invisible, and a run has one point after its first step.
        if len(line.get_xdata()) == 1:
            line.set(marker="o", markersize=4)
        # The run has not measured this metric, so the legend leaves it out.
        if len(line.get_xdata()) == 0:
            line.set_label(None)
    if any(axis.get_legend_handles_labels()[0] for axis in figure.axes):
        figure.legend(loc="outside lower center", ncols=2)


def describe_window(run: Run) -> str:
    """Says over how many steps a thick line is a mean; empty for a run that is too short to smooth."""
    width = _count_window(run)
    return f"thick: running mean of {width} logged steps" if width > 1 else ""


def _count_window(run: Run) -> int:
    """Counts the logged steps that a running mean covers."""
    # A step has few tasks, so rates jump from step to step. A mean over a twelfth of the run smooths the jumps, and is
    # short enough to show what an evolution event did.
    return 1 + len(run.history) // 12


def name_line(name: str) -> str:
    """Makes a line's label of a name. matplotlib leaves labels with a leading underscore out of the legend."""
    return f" {name}" if name.startswith("_") else name


def plot_smoothed(axis: Axes, run: Run, key: str, **style: Any) -> None:
    """Draws the running mean of a metric. If it covers several steps, a faint line behind it has the values."""
    steps, values = run.series(key)
    if _count_window(run) > 1:
        axis.plot(steps, values, color=style["color"], linewidth=0.7, alpha=0.35, zorder=1)
    axis.plot(steps, smooth(values, run), **style)


def smooth(values: Sequence[float], run: Run) -> list[float]:
    """Computes the running mean of a series: each value becomes the mean of the window that ends with it."""
    width = _count_window(run)
    return [mean(values[max(0, index + 1 - width) : index + 1]) for index in range(len(values))]


def mean(values: Sequence[float]) -> float:
    """Computes the mean; NaN without values."""
    return sum(values) / len(values) if values else float("nan")


def draw_payoff(
    figure: Figure,
    rates: Sequence[Sequence[float]],
    teachers: Sequence[str],
    students: Sequence[str],
    notes: Sequence[Sequence[str]] | None = None,
) -> None:
    """
    Draws solve rates as a heat map.

    Args:
        figure: Where to draw.
        rates: A row per teacher and a column per student, `[teachers, students]`. NaN where they have not met.
        teachers, students: Names of rows and columns.
        notes: Texts that follow the rate in each cell, shaped as `rates`.
    """
    from matplotlib.colors import LinearSegmentedColormap

    axis = figure.subplots()
    scale = LinearSegmentedColormap.from_list("match", [COLORS["teacher"], "#FFFFFF", COLORS["student"]])
    image = axis.imshow(rates, cmap=scale, vmin=0, vmax=1, aspect="auto")
    size = 9 if max(len(teachers), len(students)) <= 4 else 7
    for y, row in enumerate(rates):
        for x, rate in enumerate(row):
            # NaN is the one number that differs from itself.
            text = (f"{100 * rate:.0f} %" if rate == rate else "-") + (notes[y][x] if notes else "")
            axis.text(x, y, text, ha="center", va="center", fontsize=size)
    axis.set_xticks(range(len(students)), students, rotation=0 if max(map(len, students)) < 10 else 90)
    axis.set_yticks(range(len(teachers)), teachers)
    axis.grid(False)
    axis.set(xlabel="student", ylabel="teacher")
    figure.colorbar(image, ax=axis, label="solved (fraction)", shrink=0.9)


# Charts over the steps of a run. Where a thick line is a running mean, the faint line behind it has measured values.


@on_one_axis
def draw_held_out(axis: Axes, run: Run) -> None:
    """Draws held-out solve rates: the students' mean and, dashed, the base's. With one table also each student's."""
    tables = run.tables
    # With several tables there would be too many lines, so students have no lines of their own.
    if len(tables) == 1:
        for index, name in enumerate(run.members("student")):
            style = choose_line_style(index) | {"linewidth": 1.2, "marker": ".", "label": name}
            axis.plot(*run.series(f"{tables[0]}{name}/solve_rate"), **style)
    for index, table in enumerate(tables):
        one = len(tables) == 1
        color = COLORS["student"] if one else SERIES_COLORS[index % len(SERIES_COLORS)]
        label = "mean of the students" if one else name_line(f"{name_table(table)}, mean")
        steps, means = run.series(f"{table}solve_rate_mean")
        axis.plot(steps, means, color=color, linewidth=2.6, marker="o", label=label)
        _, margins = run.series(f"{table}solve_rate_margin")
        low, high = ([m + sign * half for m, half in zip(means, margins, strict=True)] for sign in (-1, 1))
        axis.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
        _, base = run.series(f"{table}base/solve_rate")
        if base:
            # matplotlib leaves labels with a leading underscore out of the legend.
            label = "the base, untrained" if one else "_"
            axis.axhline(base[0], color=GREY if one else color, label=label, linestyle="--", linewidth=1.4)
    axis.set(ylabel="attempts solved (fraction)", ylim=(-0.02, 1.02))


@on_one_axis
def draw_held_out_kinds(axis: Axes, run: Run) -> None:
    """Draws the students' mean solve rate on each kind of task in the first held-out table and, dashed, the base's."""
    table = run.tables[0]
    for kind, color in zip(run.held_out_kinds, cycle(SERIES_COLORS), strict=False):
        axis.plot(
            *run.series(f"{table}{kind}/solve_rate"), color=color, linewidth=2, marker="o", label=name_line(kind)
        )
        _, base = run.series(f"{table}base/{kind}/solve_rate")
        if base:
            axis.axhline(base[0], color=color, linestyle="--", linewidth=1.2)
    axis.set(title=name_table(table), ylabel="attempts solved (fraction)", ylim=(-0.02, 1.02))


@on_one_axis
def draw_thinking(axis: Axes, run: Run) -> None:
    """Draws the share of attempts that think before they answer."""
    plot_smoothed(axis, run, "solve/thinking_rate", color=COLORS["student"], linewidth=2, label="training tasks")
    axis.plot(*run.series("eval/thinking_rate"), color="0.3", linestyle="--", marker="o", label="held-out tasks")
    axis.set(title=describe_window(run), ylabel="attempts that think first (fraction)", ylim=(-0.02, 1.02))


def draw_ratings(role: str) -> Draw:
    """Makes the function that draws the ratings of a role's members."""

    @on_one_axis
    def draw(axis: Axes, run: Run) -> None:
        color, members = COLORS[role], run.members(role)
        axis.set(ylabel="TrueSkill mu (rating points)")
        if len(members) == 1:
            axis.plot(*run.series(f"member/{members[0]}/mu"), color=color, linewidth=2.4, label=members[0])
            return
        steps, means = run.series(f"population/{role}/mu_mean")
        # With up to three members their own lines show how far they are apart.
        if len(members) > 3:
            _, spreads = run.series(f"population/{role}/mu_std")
            low, high = ([m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
            axis.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0, label="± 1 std over members")
        axis.plot(
            steps, means, color=color, linewidth=2.4, label=f"mean of the {role if run.game else 'member'}s", zorder=3
        )
        for index, name in enumerate(members):
            axis.plot(*run.series(f"member/{name}/mu"), **choose_line_style(index), linewidth=1, label=name_line(name))

    return draw


@on_one_axis
def draw_solve_rates(axis: Axes, run: Run) -> None:
    """
    Draws the share of right attempts at the fresh tasks of each teacher, if there are several, and at all fresh tasks.
    In grey: the share of tasks that no attempt solved, and the share of tasks that every attempt solved.
    """
    by_teacher: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    # An attempt's row does not name the teacher. The rows of proposals in the same match do.
    teacher_of = {(r["step"], r["match"]): r["member"] for r in run.rows if r["role"] == "teacher"}
    for row in run.rows:
        if row["role"] == "student" and not row["archived"] and teacher_of:
            by_teacher[teacher_of[row["step"], row["match"]]][row["step"]].append(row["correct"])
    for index, teacher in enumerate(sorted(by_teacher) if len(by_teacher) > 1 else ()):
        steps = sorted(by_teacher[teacher])
        rates = [mean(by_teacher[teacher][step]) for step in steps]
        axis.plot(steps, smooth(rates, run), **choose_line_style(index), linewidth=1, label=f"against {teacher}")
    plot_smoothed(axis, run, "solve/rate", color="black", linewidth=2.2, label="all fresh tasks")
    for key, style, label in (("frac_none", "--", "solved by nobody"), ("frac_all", "-.", "solved by all")):
        steps, rates = run.series(f"solve/{key}")
        axis.plot(steps, smooth(rates, run), color=GREY, linestyle=style, linewidth=1, label=label)
    axis.set(title=describe_window(run), ylabel="attempts solved (fraction)", ylim=(-0.03, 1.03))


@on_one_axis
def draw_rewards(axis: Axes, run: Run) -> None:
    """Draws the mean of the built-in reward of teachers, and of that of students."""
    for role, color in COLORS.items():
        label = f"{role}s, mean of the step"
        plot_smoothed(axis, run, f"rewards/{role}_reward/mean", color=color, linewidth=2, label=label)
    axis.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    axis.set(title=describe_window(run), ylabel="reward (points)")


# Charts over the steps of a dataset run.


def draw_by_member(figure: str, unit: str) -> Draw:
    """Makes the function that draws a line per member: its metric `member/<name>/<figure>`, such as `reward`."""

    @on_one_axis
    def draw(axis: Axes, run: Run) -> None:
        members = run.members("student")
        for index, name in enumerate(members):
            plot_smoothed(
                axis, run, f"member/{name}/{figure}", **choose_line_style(index), linewidth=1.6, label=name_line(name)
            )
        axis.set(title=describe_window(run), ylabel=unit)

    return draw


@on_one_axis
def draw_functions(axis: Axes, run: Run) -> None:
    """Draws a line per reward function: the mean of its rewards over all members."""
    for index, name in enumerate(run.functions):
        plot_smoothed(
            axis, run, f"rewards/{name}/mean", **choose_line_style(index), linewidth=1.6, label=name_line(name)
        )
    axis.set(title=describe_window(run), ylabel="reward (points)")


@on_one_axis
def draw_evaluations(axis: Axes, run: Run) -> None:
    """Draws mean rewards on `eval_dataset`: of each member; with several tables of the best and worst on each."""
    members, tables = run.members("student"), run.tables
    for index, name in enumerate(members if len(tables) == 1 else ()):
        points = run.series(f"{tables[0]}member/{name}/reward")
        axis.plot(*points, **choose_line_style(index), linewidth=1.6, marker=".", label=name_line(name))
    for index, table in enumerate(tables if len(tables) > 1 else ()):
        style = choose_line_style(index) | {"marker": "."}
        axis.plot(*run.series(f"{table}reward_best"), **style, label=name_line(f"{name_table(table)}, best member"))
        axis.plot(
            *run.series(f"{table}reward_worst"),
            **style | {"linestyle": ":"},
            label=name_line(f"{name_table(table)}, worst"),
        )
    axis.set(ylabel="reward on eval_dataset (points)")


@on_one_axis
def draw_kinds(axis: Axes, run: Run) -> None:
    """Draws for each kind of task the share of right attempts, and the share of valid proposals."""
    for kind, color in zip(run.kinds, cycle(SERIES_COLORS), strict=False):
        plot_smoothed(axis, run, f"solve/{kind}/rate", color=color, label=name_line(f"{kind}: solved"))
        steps, rates = run.series(f"propose/{kind}/valid_rate")
        axis.plot(steps, smooth(rates, run), color=color, linestyle=":", label=name_line(f"{kind}: valid"))
    axis.set(title=describe_window(run), ylabel="attempts solved, proposals valid\n(fraction)", ylim=(-0.03, 1.03))


# Title and unit of each measure of programs. Measures of a user's kinds have their names as titles.
CURRICULUM = {
    "ast_depth": ("AST depth", "nodes per program"),
    "cyclomatic": ("Cyclomatic complexity", "paths per program"),
    "lines": ("Lines of code", "lines per program"),
    "variables": ("Variables", "names per program"),
}


def draw_curriculum(figure: Figure, run: Run) -> None:
    """Draws the measures of a step's valid tasks, such as their lines of code: one small picture per measure."""
    names = run.measures
    columns = min(2, len(names))
    rows = -(-len(names) // columns)
    # The number of measures decides the height. The caller made the figure without knowing this number.
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
        name_steps(axis, run, ticks=4)
    label = ",\n".join(filter(None, ["mean over the step's valid tasks", describe_window(run)]))
    # All small pictures have the same lines, so the legend names those of the first picture. There the births are
    # the last lines, and the running mean is the line before them.
    drawn = axes.flat[0].lines
    named = {label: drawn[-1 - len(run.births)]} | ({"evolution": drawn[-1]} if run.births else {})
    figure.legend(named.values(), named, loc="outside lower center", ncols=2)


# Legend and unit of each metric of `Run.breadth`.
BREADTH = {
    "curriculum/coverage": ("program structures so far", "distinct structures\n(number)"),
    "curriculum/entropy": ("how evenly they are used", "entropy\n(bits)"),
    "curriculum/features": ("features in recent tasks", "different features\n(number)"),
}


def draw_coverage(figure: Figure, run: Run) -> None:
    """Draws how wide the tasks range, one small picture per metric of `Run.breadth`."""
    names = run.breadth
    figure.set_figheight(1.4 + 1.4 * len(names))
    axes = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for axis, name, color in zip(axes, names, SERIES_COLORS, strict=False):
        label, unit = BREADTH[name]
        axis.plot(*run.series(name), color=color, label=label)
        axis.set(ylabel=unit)
    finish(figure, axes[-1], run)


# Pictures of rejects, matches, lineage and times.


@on_one_axis
def draw_rejects(axis: Axes, run: Run) -> None:
    """Draws rejected proposals per step as bars: a colour or hatch per reason, the most frequent reason lowest."""
    prefix = "verify/reject/"
    totals: Counter[str] = Counter()
    # With `num_iterations` above 1 some steps play no game, and their entries have no key with this prefix.
    history = [entry for entry in run.history if any(key.startswith(prefix) for key in entry)]
    for entry in history:
        totals.update({key[len(prefix) :]: entry[key] or 0 for key in entry if key.startswith(prefix)})
    reasons = [reason for reason, count in totals.most_common() if count]
    steps = [entry["step"] for entry in history]
    width = _find_bar_width(steps)
    bottom = [0.0] * len(steps)
    for index, reason in enumerate(reasons):
        counts = [entry.get(prefix + reason) or 0.0 for entry in history]
        color = SERIES_COLORS[index % len(SERIES_COLORS)]
        hatch = HATCHES[index // len(SERIES_COLORS)]
        mean = totals[reason] / len(steps)
        label = f"{reason.replace('_', ' ')} ({f'{mean:.1f}' if mean >= 0.1 else '< 0.1'})"
        axis.bar(steps, counts, width=width, bottom=bottom, color=color, hatch=hatch, label=label, linewidth=0)
        bottom = [b + c for b, c in zip(bottom, counts, strict=True)]
    axis.set(ylabel="rejected proposals (number)")
    axis.yaxis.set_major_locator(locate_whole_numbers(6))
    if not reasons:
        axis.set_title("no proposal was rejected")


def draw_matches(figure: Figure, run: Run) -> None:
    """Draws for each pair of teacher and student the share of right attempts, and how often they met."""
    teachers, students = run.members("teacher"), run.members("student")
    teacher_of = {(r["step"], r["match"]): r["member"] for r in run.rows if r["role"] == "teacher"}
    solved: dict[tuple[str, str], list[bool]] = defaultdict(list)
    met: dict[tuple[str, str], set] = defaultdict(set)
    for row in run.rows:
        if row["role"] == "student":
            pair = teacher_of[row["step"], row["match"]], row["member"]
            met[pair].add((row["step"], row["match"]))
            # Another teacher may have written an archived task, so an attempt at it says nothing of this pair.
            if not row["archived"]:
                solved[pair].append(row["correct"])
    rates = [[mean(solved[t, s]) for s in students] for t in teachers]
    notes = [[f"\n{len(met[t, s])}×" for s in students] for t in teachers]
    draw_payoff(
        figure, rates, [t.replace("_", "\n") for t in teachers], [s.replace("_", "\n") for s in students], notes
    )


def draw_lineage(figure: Figure, run: Run) -> None:
    """Draws a bar per seat, with a change of shade for each member in it, and arrows from parents to children."""
    axis = figure.subplots()
    names = run.members("teacher") + run.members("student")
    roles = [role for role in COLORS if run.members(role)]
    height = {name: -index for index, name in enumerate(names)}
    end = max(entry["step"] for entry in run.history)
    places, lives = _place_lives(run, names, end)
    for name in names:
        color = COLORS["teacher" if name in run.members("teacher") else "student"]
        for number, life in enumerate(lives[name]):
            # Two members that follow each other in a seat differ in shade.
            axis.plot(life, [height[name]] * 2, color=color, linewidth=5, alpha=0.9 if number % 2 else 0.45)
    for event, (child, *parents) in zip(run.lineage, places, strict=True):
        for parent in parents:
            y = height[parent]
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
    axis.set_ylim(-len(names) + 0.4, 0.6)
    axis.grid(False)
    name_steps(axis, run)
    axis.set_xlim(0, max(end, 1) * 1.02)
    # The legend has an entry for each of these lines, which have no points. The bars and arrows themselves would give
    # it far too many entries.
    handles = [axis.plot([], [], color=COLORS[role], linewidth=5, alpha=0.45)[0] for role in roles]
    labels = [f"{role}'s life" for role in roles] if run.game else ["a member's life"]
    if run.lineage:
        handles += [axis.plot([], [], color="black", linewidth=0.9, linestyle=style)[0] for style in ("-", "--")]
        labels += ["child of one parent", "child of two"]
    figure.legend(handles, labels, loc="outside lower center", ncols=2)


def _place_lives(run: Run, names: Sequence[str], end: int) -> tuple[list[list[str]], dict[str, list[tuple[int, int]]]]:
    """
    Returns two things. The first has a list for each line of the lineage: the seat of the child, or of the member
    that left, then the seats of the parents. The second has for each seat the first and the last step of each member
    that held it.
    """
    seats: dict[str, str] = {}  # from a member's name to its seat, if the seat has another name
    places: list[list[str]] = []
    changes: dict[str, list[dict]] = {name: [] for name in names}
    for event in run.lineage:
        # The lineage writes each member as `name@version`.
        told = [event["child"] or event["replaced"]["member"], *(parent["member"] for parent in event["parents"])]
        who = [each.partition("@")[0] for each in told]
        if "seat" in event:
            seats[who[0]] = event["seat"]
        places.append([seats.get(name, name) for name in who])
        changes[places[-1][0]].append(event)
    lives: dict[str, list[tuple[int, int]]] = {}
    for name, events in changes.items():
        known, _ = run.series(f"member/{name}/mu")
        # A seat may be empty at first, or for the whole run.
        begun = 0 if (events[0]["replaced"] if events else known or not run.lineage) else None
        lives[name] = []
        for event in events:
            if begun is not None:
                lives[name].append((begun, event["step"]))
            begun = event["step"] if event["child"] else None
        if begun is not None:
            lives[name].append((begun, end))
    return places, lives


PHASE_COLORS = {"match": "#444444", "propose": "#D55E00", "verify": "#009E73", "solve": "#0072B2", "update": "#E69F00"}
PHASE_COLORS |= {"evolve": "#CC79A7"}
PROMPT_PHASE_COLORS = {"generate": "#0072B2", "reward": "#009E73", "update": "#E69F00", "evolve": "#CC79A7"}


def format_seconds(value: float) -> str:
    """Formats seconds for a legend: whole from 10 on, else with at most two significant digits, or as "< 0.01"."""
    if value < 0.01:
        return "< 0.01"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _find_bar_width(steps: Sequence[int]) -> int:
    """Returns the shortest distance between two logs, so that no bar covers another (`logging_steps`)."""
    return min((later - step for step, later in pairwise(steps)), default=1)


@on_one_axis
def draw_times(axis: Axes, run: Run) -> None:
    """Draws the seconds of each step as bars, a colour per phase and one for evolution."""
    steps = [entry["step"] for entry in run.history]
    colors = PHASE_COLORS if run.game else PROMPT_PHASE_COLORS
    values = [[entry.get(f"time/{phase}") or 0.0 for entry in run.history] for phase in colors]
    means = [sum(series) / len(series) for series in values]
    labels = [f"{phase} ({format_seconds(mean)} s)" for phase, mean in zip(colors, means, strict=True)]
    width = _find_bar_width(steps)
    bottom = [0.0] * len(steps)
    for series, label, color in zip(values, labels, colors.values(), strict=True):
        axis.bar(steps, series, width=width, bottom=bottom, color=color, label=label, linewidth=0)
        bottom = [b + s for b, s in zip(bottom, series, strict=True)]
    axis.set(ylabel="time per step (seconds)")
