"""Measures and draws how the members of a role differ: in their weights, in what they solve, and in how they solve it.

members/*/adapter_model.safetensors --compare_members--> cosines of the updates, [members, members] for each role
rollouts of the last fifth ----------count_right-------> share of right attempts, [students, kinds]
                           ----------read_forms, count_forms--> different forms of each student's right code_f answers
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from trl_populora.report.charts import COLORS, mean
from trl_populora.report.load import Run, read_completions
from trl_populora.tasks.archive import hash_form
from trl_populora.tasks.kind import KindSettings
from trl_populora.tasks.python.kinds import CodeF


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Matrix = list[list[float]]
FEWEST = (
    8  # right answers, of which each student's different forms are counted: 3 of 8 and 3 of 80 say different things
)


@dataclass(frozen=True)
class Difference:
    """
    How the members of a role differ at the end of a run.

    Args:
        cosines: By role, the cosine between the updates of every two of its members, `[members, members]`: 1 for
            members that add the same to the base, 0 for members that have nothing in common. NaN for a member that
            adds nothing. A role is absent if it has a single member, or its members are not saved.
        right: Share of right attempts in the last fifth of the steps, `[students, kinds]`; NaN without an attempt.
        forms: By student, different forms among its `answers` newest right answers to code_f. Programs that differ in
            names and constants alone have one form.
        answers: As many right answers of each student are compared: those of the student that has fewest. 0 if one has
            fewer than `FEWEST`.
    """

    cosines: dict[str, Matrix]
    right: Matrix
    forms: dict[str, int]
    answers: int


def measure_difference(run: Run) -> Difference:
    """Measures how the members of a run's roles differ, by its saved members and the rollouts of its last fifth."""
    students, since = run.members("student"), run.step - max(1, run.step // 5)
    attempts = [row for row in run.rows if row["role"] == "student" and row["step"] > since]
    forms, answers = count_forms(read_forms(run, since))
    cosines = {role: compare_members(run, role) for role in ("teacher", "student")}
    return Difference(
        {role: matrix for role, matrix in cosines.items() if matrix},
        count_right(attempts, students, run.kinds),
        forms,
        answers,
    )


def compare_members(run: Run, role: str) -> Matrix:
    """Computes the cosine between the updates of every two members of a role; empty if not all of them are saved."""
    adapters = {member["name"]: member["adapter"] for member in run.population.get("members", [])}
    names, found = run.members(role), []
    if run.root is None or len(names) < 2 or not set(names) <= adapters.keys():
        return []
    try:
        from safetensors.torch import load_file

        from trl_populora.population.factors import compute_inner_products

        found = [load_file(run.root / adapters[name] / "adapter_model.safetensors") for name in names]
    except (ImportError, OSError, SafetensorError):  # torch is not installed, or a run in progress writes the files
        return []
    products = compute_inner_products(found)
    norms = [math.sqrt(max(row[place], 0.0)) for place, row in enumerate(products)]
    return [
        [product / (one * other) if one * other else math.nan for product, other in zip(row, norms, strict=True)]
        for row, one in zip(products, norms, strict=True)
    ]


def count_right(attempts: Sequence[Mapping[str, Any]], students: Sequence[str], kinds: Sequence[str]) -> Matrix:
    """Computes the share of right attempts, `[students, kinds]`; NaN where a student attempted no task of a kind."""
    marks: dict[tuple[str, str], list[bool]] = {}
    for row in attempts:
        marks.setdefault((row["member"], row["kind"]), []).append(row["correct"])
    return [[mean(marks.get((student, kind), [])) for kind in kinds] for student in students]


def count_forms(forms: Mapping[str, Sequence[int]]) -> tuple[dict[str, int], int]:
    """
    Counts the different forms of the students' right answers to code_f.

    Args:
        forms: As [`read_forms`] reads them.

    Returns:
        Different forms by student, and the number of answers of each that were compared. `({}, 0)` if a student has
        fewer than `FEWEST`.
    """
    fewest = min(map(len, forms.values()), default=0)
    if fewest < FEWEST:
        return {}, 0
    return {student: len(set(each[-fewest:])) for student, each in forms.items()}, fewest


def read_forms(run: Run, since: int) -> dict[str, list[int]]:
    """Reads the form of every right answer to code_f after step `since`, by student, the oldest first."""
    kind = CodeF()
    given, style = run.population.get("settings", {}).get("reading"), run.population.get("prompt_style")
    kind.configure(KindSettings(reading=given, prompt_style=style))
    found: dict[str, list[int]] = {student: [] for student in run.members("student")}
    for row in read_completions(run, since) if CodeF.name in run.kinds else ():
        if row["role"] == "student" and row["kind"] == CodeF.name and row["correct"]:
            with suppress(ValueError):  # a run may have read answers in another way
                (program,) = kind.read_blocks(row["completion"], ("python",))
                found[row["member"]].append(hash_form(program))
    return found


def draw_difference(figure: Figure, run: Run) -> None:
    """Draws which share of each kind students get right, how many forms code_f answers have, and the cosines."""
    found = measure_difference(run)
    names = {role: run.members(role) for role in ("teacher", "student")}
    shown = [role for role in names if role in found.cosines]
    axes: Any = figure.subplots(2 if shown else 1, 2, squeeze=False)
    students, kinds = names["student"], run.kinds
    right = [[100 * share for share in shares] for shares in found.right]
    _draw_matrix(axes[0][0], right, students, kinds, "student", "{:.0f} %")
    axes[0][0].set_title("attempts right, by kind", fontsize=9)
    _draw_forms(axes[0][1], found, students)
    for axis, role in zip(axes[1] if shown else (), names, strict=False):
        if role not in found.cosines:
            axis.set_axis_off()
            continue
        _draw_matrix(axis, found.cosines[role], names[role], names[role], role, "{:.2f}")
        axis.set_title(f"{role}s: cosines", fontsize=9)


def _draw_forms(axis: Axes, found: Difference, students: Sequence[str]) -> None:
    if not found.answers:
        axis.set_axis_off()
        return
    axis.barh(students, [found.forms[student] for student in students], color=COLORS["student"])
    axis.set_xlim(0, found.answers)
    axis.invert_yaxis()
    axis.set_title("right code_f answers", fontsize=9)
    axis.set_xlabel(f"different forms of {found.answers}", fontsize=8)
    axis.tick_params(labelsize=8)


def _draw_matrix(
    axis: Axes, values: Matrix, rows: Sequence[str], columns: Sequence[str], role: str, form: str
) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    scale = LinearSegmentedColormap.from_list(role, ["#FFFFFF", COLORS[role]]).with_extremes(bad="0.88")
    axis.imshow(
        values, cmap=scale, vmin=0, vmax=160 if "%" in form else 1.6, aspect="auto"
    )  # text stays readable on the darkest cell
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            axis.text(x, y, "-" if math.isnan(value) else form.format(value), ha="center", va="center", fontsize=8)
    axis.set_xticks(range(len(columns)), columns, rotation=30 if len(columns) > 3 else 0, fontsize=8)
    axis.set_yticks(range(len(rows)), rows, fontsize=8)
    axis.grid(False)
