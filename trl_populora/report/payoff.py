"""What cross-play found, as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean


@dataclass
class Payoff:
    """
    What cross-play found. Shapes: T teachers, S students.

    Args:
        teachers, students (`list[str]`): Names, in the order of rows and columns.
        valid (`list[float]`): Share of each teacher's proposals that the sandbox accepted, `[T]`.
        solved (`list[list[float]]`): Share of the attempts at the teacher's tasks that the student solved, `[T][S]`;
            NaN in the row of a teacher without a valid task.
        given (`dict[str, float]`): Each member's solve rate on the given tasks; empty without any.
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

    def renamed(self, names: Mapping[str, str]) -> Payoff:
        """The same under other names."""
        return replace(
            self,
            teachers=[names[name] for name in self.teachers],
            students=[names[name] for name in self.students],
            given={names[name]: rate for name, rate in self.given.items()},
        )
