"""What cross-play found: numbers, a table and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean

from trl_populora.files import write_json
from trl_populora.report.canvas import WIDTH, draw_payoff, picture
from trl_populora.report.members import percent


@dataclass
class Payoff:
    """
    What cross-play found. Shapes: T teachers, S students.

    Args:
        teachers, students: Names, in the order of rows and columns.
        valid: Share of each teacher's proposals that were fresh tasks: accepted by the sandbox, and neither in the
            archive nor proposed before by the same teacher, `[T]`.
        solved: Share of the attempts at the teacher's tasks that the student solved, `[T][S]`; NaN in the row of a
            teacher without a fresh task.
        given: Each member's solve rate on the given tasks; empty without any.
    """

    teachers: list[str]
    students: list[str]
    valid: list[float] = field(default_factory=list)
    solved: list[list[float]] = field(default_factory=list)
    given: dict[str, float] = field(default_factory=dict)

    @property
    def by_teacher(self) -> list[float]:
        """Mean over the students per teacher: low is a teacher whose tasks are hard for everybody."""
        return [fmean(row) for row in self.solved]

    @property
    def by_student(self) -> list[float]:
        """Mean over the teachers per student, teachers without a valid task left out."""
        rows = [row for row in self.solved if not math.isnan(row[0])]
        return [fmean(column) if column else math.nan for column in (zip(*rows, strict=True) if rows else [])]

    def rename(self, names: Mapping[str, str]) -> Payoff:
        """The same under other names."""
        return replace(
            self,
            teachers=[names[name] for name in self.teachers],
            students=[names[name] for name in self.students],
            given={names[name]: rate for name, rate in self.given.items()},
        )


def payoff_size(teachers: Sequence[str], students: Sequence[str]) -> tuple[float, float]:
    """Inches of a cross-play's picture: room for every cell, and for names, which stand upright when they are long."""
    letters = 0.08 * max(map(len, (*teachers, *students)))
    return max(WIDTH, 1.8 + letters + 0.55 * len(students)), max(3.7, 0.9 + letters + 0.5 * len(teachers))


def write_payoff(payoff: Payoff, directory: str | Path) -> Path:
    """
    Prints a cross-play and writes it as `crossplay.json` (the fields of [`~trl_populora.report.payoff.Payoff`] and the
    means per row and column) and `crossplay.png`.

    Returns:
        `Path`: The JSON file.
    """
    path = Path(directory, "crossplay.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    values = json.dumps(asdict(payoff) | {"by_teacher": payoff.by_teacher, "by_student": payoff.by_student})
    write_json(path, json.loads(values, parse_constant=lambda _: None))  # NaN is no JSON

    from rich.console import Console
    from rich.table import Table

    size = payoff_size(payoff.teachers, payoff.students)
    picture(path.with_suffix(".png"), size, draw_payoff, payoff.solved, payoff.teachers, payoff.students)
    table = Table(title="Attempts solved at fresh tasks", caption="rows: teachers, columns: students")
    for column in ("teacher", "valid", *payoff.students, "mean"):
        table.add_column(column, justify="left" if column == "teacher" else "right")
    for name, valid, row, mean in zip(payoff.teachers, payoff.valid, payoff.solved, payoff.by_teacher, strict=True):
        table.add_row(name, *(percent(value) for value in (valid, *row, mean)))
    table.add_section()
    table.add_row("mean", "", *map(percent, payoff.by_student), "")
    if payoff.given:
        table.add_row("given tasks", "", *(percent(payoff.given[name]) for name in payoff.students), "")
    Console(width=max(120, 24 + 14 * len(payoff.students))).print(table)
    return path
