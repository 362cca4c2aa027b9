"""Hostile, degenerate and benign programs for the sandbox, by group.

A hostile program whose `f` returns the text `PWNED` has reached what it wanted. `expected` holds the statuses that are
right with the soft layer on; with it off, any status is right as long as nothing is reached.
"""

from __future__ import annotations

from dataclasses import dataclass


PWNED = "PWNED"


@dataclass(frozen=True)
class Case:
    """One program, its calls, and what may come of it."""

    group: str
    name: str
    program: str
    expected: tuple[str, ...]
    calls: tuple[tuple, ...] = ((1,),)
    outputs: tuple | None = None
    runs: int = 1
    seconds: float = 5.0
    memory: int = 512 << 20
    inputs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.group}-{self.name}"


class Group(list):
    """The cases of one group; calling it adds one."""

    def __init__(self, group: str, *expected: str, **defaults: object):
        super().__init__()
        self.group, self.expected, self.defaults = group, expected, defaults

    def __call__(self, name: str, program: str, *expected: str, **settings: object) -> None:
        settings = {**self.defaults, **settings}
        self.append(Case(self.group, name, program.strip("\n") + "\n", expected or self.expected, **settings))
