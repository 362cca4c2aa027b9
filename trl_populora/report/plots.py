"""Lists the pictures of a report in their order, and writes them to files. Draws the maps of features.

`PLOTS` has a title, a caption and a function for each picture. Most functions are in `charts.py`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from trl_populora.report.charts import (
    COLORS,
    WIDTH,
    Draw,
    draw_by_member,
    draw_coverage,
    draw_curriculum,
    draw_evaluations,
    draw_functions,
    draw_held_out,
    draw_held_out_kinds,
    draw_kinds,
    draw_lineage,
    draw_matches,
    draw_ratings,
    draw_rejects,
    draw_rewards,
    draw_solve_rates,
    draw_thinking,
    draw_times,
    locate_whole_numbers,
    mean,
    save_picture,
)
from trl_populora.report.difference import draw_difference
from trl_populora.report.load import Run, load_run
from trl_populora.report.verdict import judge


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# A map of features has a row for each of the most frequent features, and a column for each block of steps.
FEATURES = 20
BLOCKS = 12
FEW = 4  # a cell with fewer than 4 attempts stays grey: the share of so few says little

Map = list[list[float]]  # `[features, blocks]`; NaN where too little was seen


def draw_mastery(figure: Figure, run: Run) -> None:
    """
    Draws two maps of features. One has the share of valid proposals that use each feature. The other has the share of
    right attempts at tasks that use it.
    """
    axes: Any = figure.subplots(1, 2, sharey=True)
    proposals = [row for row in run.rows if row["role"] == "teacher" and row["valid"]]
    attempts = [row for row in run.rows if row["role"] == "student" and row["features"]]
    features = order_features(proposals)
    width = -(-run.step // BLOCKS)  # steps per block, rounded up
    _draw_map(axes[0], map_use(proposals, features, width), features, width, "teacher", "used by proposals")
    _draw_map(axes[1], map_mastery(attempts, features, width), features, width, "student", "attempts right")
    for axis in axes:
        axis.set_xlim(0.5, run.step + 0.5)
        axis.xaxis.set_major_locator(locate_whole_numbers(5))
    figure.supxlabel("population step (grey: too few)", fontsize=9)


def order_features(proposals: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lists the most frequent features, in the order of the mean step of the proposals that use them."""
    # Features that teachers used early stand at the top, so that a curriculum shows as a diagonal.
    steps: dict[str, list[int]] = defaultdict(list)
    for row in proposals:
        for word in row["features"]:
            steps[word].append(row["step"])
    most = sorted(steps, key=lambda word: (-len(steps[word]), word))[:FEATURES]
    return sorted(most, key=lambda word: (mean(steps[word]), word))


def map_use(proposals: Sequence[Mapping[str, Any]], features: Sequence[str], width: int) -> Map:
    """Computes for each feature and each block of `width` steps the share of the block's proposals that use it."""
    made = Counter((row["step"] - 1) // width for row in proposals)
    used = Counter(((row["step"] - 1) // width, word) for row in proposals for word in row["features"])
    blocks = range(max(made) + 1)
    return [[used[b, word] / made[b] if made[b] else float("nan") for b in blocks] for word in features]


def map_mastery(attempts: Sequence[Mapping[str, Any]], features: Sequence[str], width: int) -> Map:
    """Computes for each feature and each block of `width` steps the share of right attempts at tasks that use it."""
    right: dict[tuple[int, str], list[bool]] = defaultdict(list)
    for row in attempts:
        for word in row["features"]:
            right[(row["step"] - 1) // width, word].append(row["correct"])
    cells = {place: mean(marks) for place, marks in right.items() if len(marks) >= FEW}
    blocks = range(max((block for block, _ in right), default=0) + 1)
    return [[cells.get((block, word), float("nan")) for block in blocks] for word in features]


def _draw_map(axis: Axes, values: Map, features: Sequence[str], width: int, role: str, title: str) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    scale = LinearSegmentedColormap.from_list(role, ["#FFFFFF", COLORS[role]]).with_extremes(bad="0.88")
    end = 0.5 + width * len(values[0])
    image = axis.imshow(values, cmap=scale, vmin=0, aspect="auto", extent=(0.5, end, len(features), 0))
    # The scale of right attempts goes from 0 to 1. The scale of proposals ends at the largest share, because few
    # proposals use any one feature.
    if role == "student":
        image.set_clim(0, 1)
    axis.set_yticks([place + 0.5 for place in range(len(features))], features, fontsize=7)
    axis.set_title(title, fontsize=9)
    axis.grid(False)
    axis.figure.colorbar(image, ax=axis, location="bottom", shrink=0.9)


# The pictures of a report in their order.


@dataclass(frozen=True)
class Plot:
    """
    One picture of a report.

    Args:
        name: Name of its file, without `.png`.
        title: Title on the page.
        caption: Says how to read the picture.
        draw: Draws it.
        height: Inches.
        needs: Attribute of [`~trl_populora.report.load.Run`] that the picture shows. If it is empty or false, the
            picture is not drawn. With `""` the picture is always drawn.
        sorts: The sorts of run that it belongs to: `"game"`, `"prompts"`.
    """

    name: str
    title: str
    caption: str
    draw: Draw
    height: float = 3.7
    needs: str = ""
    sorts: tuple[str, ...] = ("game",)

    def can_be_drawn(self, run: Run) -> bool:
        """Says whether the run has left the records that this picture shows."""
        fits = ("game" if run.game else "prompts") in self.sorts
        return fits and (not self.needs or bool(getattr(run, self.needs)))


BOTH = ("game", "prompts")
PROMPTS = ("prompts",)
PLOTS = (
    Plot(
        "held_out",
        "Held-out tasks",
        "Share of right attempts of the students at tasks that nobody trains on. Shaded: the 95 % interval of the "
        "mean, over tasks. Dashed: the base without an adapter.",
        draw_held_out,
        4.1,
        needs="evaluations",
    ),
    Plot(
        "held_out_kinds",
        "Held-out tasks by kind",
        "Solid: mean of the students. Dashed: the base without an adapter.",
        draw_held_out_kinds,
        needs="held_out_kinds",
    ),
    Plot(
        "thinking",
        "Worked answers",
        "Share of the students' attempts that work the task out in <think> before they answer.",
        draw_thinking,
        needs="thinks",
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
        "Ratings move only in matches between teachers and students. A student above its teachers solves most tasks.",
        draw_ratings("student"),
        3.9,
    ),
    Plot(
        "solve_rate",
        "Solve rate per match",
        "Share of right attempts at the fresh tasks of each teacher. Near 1 its tasks have become too easy, near 0 "
        "too hard.",
        draw_solve_rates,
    ),
    Plot(
        "rewards",
        "Rewards",
        "By default a teacher earns 1 - solve rate for a solved task; teacher_reward_* and student_reward_* say the "
        "rest.",
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
        "Measures of valid tasks. Programs have four measures, which are known to fall in single-agent self-play.",
        draw_curriculum,
        4.6,
        needs="measures",
    ),
    Plot(
        "coverage",
        "How wide the tasks range",
        "Distinct structures of programs over the whole run, with the seed tasks, and how evenly they are used. "
        "Below: the number of different features (operators, methods, builtins) in the newest tasks. The newest tasks "
        "are the last N accepted ones; N is the number of proposals in twelve steps.",
        draw_coverage,
        5.6,
        needs="breadth",
    ),
    Plot(
        "mastery",
        "What is proposed, and what is mastered",
        "Features of tasks, by steps. Left: share of valid proposals that use the feature. Right: share of right "
        "attempts at tasks that use it. A row that fades on the left is no longer taught; one that stays pale on the "
        "right is not learned.",
        draw_mastery,
        4.6,
        needs="names_features",
    ),
    Plot(
        "rejects",
        "Why proposals were rejected",
        "Rejected proposals per step, in brackets the mean over the run.",
        draw_rejects,
        4.2,
    ),
    Plot(
        "matches",
        "Who met whom",
        "Share of right attempts of each student at each teacher's fresh tasks, and the number of their matches.",
        draw_matches,
        4.2,
        needs="pairs",
    ),
    Plot(
        "difference",
        "How members differ",
        "In the last fifth of the steps: the share of right attempts of each student, and how many different forms "
        "its right answers to code_f have (names and constants apart). Below: how alike the updates of two members "
        "are, 1 for the same update and 0 for nothing in common.",
        draw_difference,
        5.6,
        needs="several_students",
    ),
    Plot(
        "member_rewards",
        "Rewards by member",
        "Mean reward of each member's completions in a step.",
        draw_by_member("reward", "reward (points)"),
        4.1,
        sorts=PROMPTS,
    ),
    Plot(
        "evaluations",
        "Rewards on eval_dataset",
        "Mean reward of each member on prompts that nobody trains on.",
        draw_evaluations,
        4.1,
        needs="evaluations",
        sorts=PROMPTS,
    ),
    Plot(
        "functions",
        "Rewards by function",
        "Mean of each reward function over all members, without weights.",
        draw_functions,
        needs="several_functions",
        sorts=PROMPTS,
    ),
    Plot(
        "lengths",
        "Lengths",
        "Mean tokens of each member's completions in a step.",
        draw_by_member("length", "tokens of a completion"),
        4.1,
        sorts=PROMPTS,
    ),
    Plot(
        "entropies",
        "Entropy",
        "Mean entropy of each member over the tokens that it trains on. Near 0 nobody explores any more.",
        draw_by_member("entropy", "entropy (nats per token)"),
        4.1,
        sorts=PROMPTS,
    ),
    Plot(
        "ratings_members",
        "TrueSkill ratings",
        "In each step all members answer the same prompts, and are ranked by their mean reward.",
        draw_ratings("student"),
        3.9,
        needs="rated",
        sorts=PROMPTS,
    ),
    Plot(
        "lineage",
        "Lineage",
        "One bar per place in the population. The shade changes when the next member takes the place; an arrow comes "
        "from each parent.",
        draw_lineage,
        4.2,
        needs="lineage",
        sorts=BOTH,
    ),
    Plot(
        "times",
        "Time per phase",
        "Seconds per step, in brackets the mean over the run.",
        draw_times,
        3.9,
        sorts=BOTH,
    ),
)

# `run.png` leaves these pictures out. It shows the others, two in each row.
_DETAILS = ("held_out_kinds", "curriculum", "coverage", "rejects", "matches", "difference", "lineage", "times")
OVERVIEW = [plot for plot in PLOTS if plot.name not in _DETAILS]


def draw_plots(run: Run, directory: Path, names: Sequence[str] | None = None) -> list[tuple[Plot, Path]]:
    """
    Draws the pictures of a run into `directory/<name>.png`, except those that need records which the run has not left.

    Args:
        run: Records of the run.
        directory: Where the files go.
        names: Names of the pictures to draw; `None` for all.

    Returns:
        The pictures that were drawn, with their files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Legends list members in two columns, so more than eight of them need more height.
    extra = 0.22 * max(0, len(run.members("teacher") + run.members("student")) - 8)
    drawn = []
    for plot in PLOTS:
        if (names is None or plot.name in names) and plot.can_be_drawn(run):
            path, size = directory / f"{plot.name}.png", (WIDTH, plot.height + extra)
            drawn.append((plot, save_picture(path, size, plot.draw, run)))
    return drawn


def plot_run(run: str | Path, path: str | Path | None = None, name: str | None = None) -> Path:
    """
    Draws the most important pictures of a run into one PNG file.

    Args:
        run: The run's `output_dir`.
        path: The file; by default `run.png` in the run's directory.
        name: The run's name in the title; by default that of its directory.

    Returns:
        The file.

    Raises:
        `ValueError`: If the run has not logged a step yet, or a file is broken.
    """
    records = load_run(run, name)
    shown = [plot for plot in OVERVIEW if plot.can_be_drawn(records)]
    rows = math.ceil(len(shown) / 2)

    def paint(figure: Figure) -> None:
        title = records.name + (f": dotted lines mark {records.marked}" if records.births else "")
        figure.suptitle(f"{title}\n{fill(str(judge(records)), 100)}")  # of 100 characters a line fits
        parts: Any = figure.subfigures(rows, 2)
        for part, plot in zip(parts.flat, shown, strict=False):
            part.suptitle(plot.title)
            plot.draw(part, records)

    return save_picture(Path(path or Path(run, "run.png")), (2.2 * WIDTH, 4.4 * rows), paint, dpi=110)
