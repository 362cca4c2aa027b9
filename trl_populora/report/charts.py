"""Pictures of what a run did as a whole: rejects, matches, lineage, and where the time went."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from trl_populora.report.canvas import (
    COLORS,
    SERIES_COLORS,
    draw_payoff,
    mean,
    name_steps,
    on_one_axis,
    whole_numbers,
)
from trl_populora.report.load import Run


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
PHASE_COLORS |= {"evolve": "#CC79A7"}


def seconds(value: float) -> str:
    if value < 0.01:
        return "< 0.01"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


@on_one_axis
def draw_times(axis: Axes, run: Run) -> None:
    steps = [entry["step"] for entry in run.history]
    values = [[entry.get(f"time/{phase}") or 0.0 for entry in run.history] for phase in PHASE_COLORS]
    means = [sum(series) / len(series) for series in values]
    labels = [f"{phase} ({seconds(mean)} s)" for phase, mean in zip(PHASE_COLORS, means, strict=True)]
    bottom = [0.0] * len(steps)
    for series, label, color in zip(values, labels, PHASE_COLORS.values(), strict=True):
        axis.bar(steps, series, width=1, bottom=bottom, color=color, label=label, linewidth=0)
        bottom = [b + s for b, s in zip(bottom, series, strict=True)]
    axis.set(ylabel="time per step (seconds)")
