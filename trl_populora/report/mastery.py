"""The map of what is proposed and what is mastered: features of tasks by population steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trl_populora.report.canvas import COLORS, mean, whole_numbers
from trl_populora.report.load import Run


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEATURES = 20  # rows of the map; rarer ones are left out
BLOCKS = 12  # columns
FEW = 4  # attempts; a share of fewer is not shown

Map = list[list[float]]  # by feature and block of steps; NaN where nothing was seen


def draw_mastery(figure: Figure, run: Run) -> None:
    """Left the share of valid proposals that use a feature, right the share of right attempts at these."""
    axes: Any = figure.subplots(1, 2, sharey=True)
    if not run.names_features:
        axes[0].set_title("the kinds of task name no features")
        return
    proposals = [row for row in run.rows if row["role"] == "teacher" and row["valid"]]
    attempts = [row for row in run.rows if row["role"] == "student" and row["features"]]
    features = order_features(proposals)
    width = -(-run.step // BLOCKS)
    _draw_map(axes[0], map_use(proposals, features, width), features, width, "teacher", "used by proposals")
    _draw_map(axes[1], map_mastery(attempts, features, width), features, width, "student", "attempts right")
    for axis in axes:
        axis.set_xlim(0.5, run.step + 0.5)
        axis.xaxis.set_major_locator(whole_numbers(5))
    figure.supxlabel("population step (grey: too few)", fontsize=9)


def order_features(proposals: Sequence[Mapping[str, Any]]) -> list[str]:
    """The features that most proposals have; those come first whose proposals come first, on the average."""
    steps: dict[str, list[int]] = defaultdict(list)
    for row in proposals:
        for word in row["features"]:
            steps[word].append(row["step"])
    most = sorted(steps, key=lambda word: (-len(steps[word]), word))[:FEATURES]
    return sorted(most, key=lambda word: (mean(steps[word]), word))


def map_use(proposals: Sequence[Mapping[str, Any]], features: Sequence[str], width: int) -> Map:
    """Share of the proposals of each `width` steps that use each feature."""
    made = Counter((row["step"] - 1) // width for row in proposals)
    used = Counter(((row["step"] - 1) // width, word) for row in proposals for word in row["features"])
    blocks = range(max(made) + 1)
    return [[used[b, word] / made[b] if made[b] else float("nan") for b in blocks] for word in features]


def map_mastery(attempts: Sequence[Mapping[str, Any]], features: Sequence[str], width: int) -> Map:
    """Share of right ones among the attempts of each `width` steps at tasks that use each feature."""
    right: dict[tuple[int, str], list[bool]] = defaultdict(list)
    for row in attempts:
        for word in row["features"]:
            right[(row["step"] - 1) // width, word].append(row["correct"])
    cells = {place: mean(own) for place, own in right.items() if len(own) >= FEW}
    blocks = range(max((block for block, _ in right), default=0) + 1)
    return [[cells.get((block, word), float("nan")) for block in blocks] for word in features]


def _draw_map(axis: Axes, values: Map, features: Sequence[str], width: int, role: str, title: str) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    scale = LinearSegmentedColormap.from_list(role, ["#FFFFFF", COLORS[role]]).with_extremes(bad="0.88")
    end = 0.5 + width * len(values[0])
    image = axis.imshow(values, cmap=scale, vmin=0, aspect="auto", extent=(0.5, end, len(features), 0))
    if role == "student":
        image.set_clim(0, 1)
    axis.set_yticks([place + 0.5 for place in range(len(features))], features, fontsize=7)
    axis.set_title(title, fontsize=9)
    axis.grid(False)
    axis.figure.colorbar(image, ax=axis, location="bottom", shrink=0.9)
