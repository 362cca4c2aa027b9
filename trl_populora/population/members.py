"""Members and the population: names, roles, ratings, ages and lineage. Every phase uses them.

Holds plain numbers only (no tensors, no torch), so that every rank can keep its own identical copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from typing import Any


ROLES = ("teacher", "student")

# TrueSkill's own prior (Herbrich et al., 2006), which PopuLoRA keeps: nothing is known of a member of the first step.
PRIOR_MU = 25.0
PRIOR_SIGMA = 25.0 / 3


@dataclass
class Member:
    """
    One LoRA adapter of the population, as the matchmaker and evolution see it.

    Args:
        name: PEFT adapter name, e.g. `"teacher_0"`. A replacement keeps the name of the member whose slot it takes.
        role: `"teacher"` or `"student"`.
        index: Route index in the router: the member's place in [`Population.adapters`].
        mu, sigma: TrueSkill mean and standard deviation.
        age: Rated matches since birth.
        born: Optimizer step of birth.
        parents: Parents as `name@version`, so that a parent replaced later is still identified.
        operator: Name of the operator that made this member.
        version: How many times the slot has been replaced.
    """

    name: str
    role: str
    index: int
    mu: float = PRIOR_MU
    sigma: float = PRIOR_SIGMA
    age: int = 0
    born: int = 0
    parents: tuple[str, ...] = ()
    operator: str = "init"
    version: int = 0

    @property
    def identity(self) -> str:
        """`name@version`: one individual, where `name` is a slot that several individuals hold in turn."""
        return f"{self.name}@{self.version}"


class Population:
    """
    Teachers and students in a fixed order, teachers first.

    Args:
        teachers: Number of teachers; with 0 students train on given tasks alone.
        students: Number of students, at least 1.
        single_agent: One adapter plays the only teacher and the only student, as in Absolute Zero.

    Raises:
        `ValueError`: If there would be no student, or a single agent would have to be several members of a role.
    """

    def __init__(self, teachers: int, students: int, single_agent: bool = False):
        for role, count, least in zip(ROLES, (teachers, students), (0, 1), strict=True):
            if count < least:
                raise ValueError(
                    f"A population needs at least {least} {role}s, got {count}. Set `{role}s` to {least} or more."
                )
        names = [(f"{role}_{i}", role) for role, n in zip(ROLES, (teachers, students), strict=True) for i in range(n)]
        if single_agent and (teachers, students) != (1, 1):
            raise ValueError(f"A single agent is 1 teacher and 1 student, got {teachers} and {students}.")
        self.single_agent = single_agent
        self.members = [Member(name, role, 0 if single_agent else i) for i, (name, role) in enumerate(names)]

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def __getitem__(self, name: str) -> Member:
        for member in self.members:
            if member.name == name:
                return member
        raise KeyError(f"No member is called {name!r}; the population holds {', '.join(self.names)}.")

    @property
    def names(self) -> list[str]:
        """Member names, teachers first."""
        return [member.name for member in self.members]

    @property
    def adapters(self) -> list[str]:
        """PEFT adapter names in route order: the members' own, or the one that plays both roles."""
        return ["agent"] if self.single_agent else self.names

    def adapter(self, name: str) -> str:
        """Adapter that plays the member `name`."""
        return self.adapters[self[name].index]

    @property
    def teachers(self) -> list[Member]:
        return self.role("teacher")

    @property
    def students(self) -> list[Member]:
        return self.role("student")

    def role(self, role: str) -> list[Member]:
        """Members of one role, in order."""
        return [member for member in self.members if member.role == role]

    @staticmethod
    def fitness(member: Member) -> float:
        """
        What selection goes by: mu. Sigma is no part of it, because it is mostly age: mu - 3 sigma makes the youngest
        the weakest.
        """
        return member.mu

    def best_student(self, rates: Mapping[str, float]) -> tuple[str, str]:
        """
        The best student's name, and by what it is the best.

        Args:
            rates: Held-out solve rates by `name@version`. Between equal ones, and without any, the rating decides.
        """
        measured = [student for student in self.students if student.identity in rates]
        if not measured:
            return max(self.students, key=self.fitness).name, "rating"
        highest = max(rates[student.identity] for student in measured)
        best = [student for student in measured if rates[student.identity] == highest]
        why = "held-out solve rate" if len(best) == 1 else "rating among the best on held-out tasks"
        return max(best, key=self.fitness).name, why

    def replace(
        self,
        name: str,
        *,
        step: int,
        parents: tuple[str, ...] = (),
        operator: str,
        mu: float = PRIOR_MU,
        sigma: float = PRIOR_SIGMA,
    ) -> Member:
        """
        Give the slot `name` to a newborn: age 0, next version, the rating given.

        Raises:
            `KeyError`: If no member is called `name`.
            `ValueError`: If `sigma` is not positive.
        """
        if not sigma > 0:
            raise ValueError(f"`sigma` of a newborn must be positive, got {sigma}.")
        member = self[name]
        member.mu, member.sigma = mu, sigma
        member.age, member.born = 0, step
        member.parents, member.operator = tuple(parents), operator
        member.version += 1
        return member

    def state_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"members": [{**asdict(member), "parents": list(member.parents)} for member in self.members]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Restore what `state_dict` returned.

        Raises:
            `ValueError`: If the saved population has other members than this one.
        """
        members = [Member(**{**fields, "parents": tuple(fields["parents"])}) for fields in state["members"]]
        if [m.name for m in members] != self.names:
            raise ValueError(
                f"The saved population holds {', '.join(m.name for m in members)} but this one holds "
                f"{', '.join(self.names)}. Resume with the `teachers` and `students` of the saved run."
            )
        # Updated in place: other parts may hold a reference to a member.
        for member, saved in zip(self.members, members, strict=True):
            member.__dict__.update(saved.__dict__)

    def metrics(self) -> dict[str, float]:
        """Ratings per role and per member."""
        values = {}
        for role in ROLES:
            mus = [member.mu for member in self.role(role)]
            values[f"population/{role}/mu_mean"] = fmean(mus) if mus else math.nan
            values[f"population/{role}/mu_std"] = pstdev(mus) if mus else math.nan
        for member in self.members:
            values[f"member/{member.name}/mu"] = member.mu
            values[f"member/{member.name}/sigma"] = member.sigma
        return values
