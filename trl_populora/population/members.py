"""Members and the population: names, roles, ratings, ages and parents.

There is plain data only, no tensors, and every rank keeps an identical copy. The weights of a member are an adapter of
the model, which `trl_populora.lora` reads and writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from typing import Any


ROLES = ("teacher", "student")

# TrueSkill's prior (Herbrich et al., 2006), which PopuLoRA keeps: the rating of a member without matches or parents.
PRIOR_MU = 25.0
PRIOR_SIGMA = 25.0 / 3


@dataclass
class Member:
    """
    One member of the population: what the matchmaker and evolution know about it.

    Args:
        name: Name, e.g. `"teacher_0"`. Unless there is a single agent, the PEFT adapter has it, too. A child takes
            over the name of the member that it replaces.
        role: `"teacher"` or `"student"`.
        index: Place of the adapter in [`Population.adapters`]. The routed LoRA layers know the member by it.
        mu, sigma: Mean and standard deviation of the TrueSkill rating.
        age: Rated matches since birth.
        born: Optimizer step of birth.
        parents: The parents as `name@version`, because another member may have the parent's name later.
        operator: Name of the operator that has made this member; `"init"` if none has.
        version: How many holders the name had before.
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
        """`name@version`. It names one individual; several individuals have the same `name`, one after the other."""
        return f"{self.name}@{self.version}"


class Population:
    """
    Teachers and students in a fixed order, teachers first.

    Args:
        teachers: Number of teachers. With 0 of them, students train on given tasks alone.
        students: Number of students, at least 1.
        single_agent: Whether one adapter plays the only teacher and the only student, as in Absolute Zero.

    Raises:
        `ValueError`: If there is no student, if `teachers` is negative, or if a single agent is asked for and there
            are not 1 teacher and 1 student.
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
        # A single agent is two members with two ratings, and one adapter: both have index 0.
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
        """Names of the members, teachers first."""
        return [member.name for member in self.members]

    @property
    def adapters(self) -> list[str]:
        """Names of the PEFT adapters by index: one per member, or the one that plays both roles."""
        return ["agent"] if self.single_agent else self.names

    def adapter(self, name: str) -> str:
        """Returns the name of the adapter that plays the member `name`."""
        return self.adapters[self[name].index]

    @property
    def teachers(self) -> list[Member]:
        return self.role("teacher")

    @property
    def students(self) -> list[Member]:
        return self.role("student")

    def role(self, role: str) -> list[Member]:
        """Returns the members of one role, in order."""
        return [member for member in self.members if member.role == role]

    @staticmethod
    def fitness(member: Member) -> float:
        """Returns the number by which evolution selects: mu."""
        # The usual mu - 3 sigma is no choice: sigma depends mostly on age, so the youngest would seem the weakest.
        return member.mu

    def best_student(self, rates: Mapping[str, float], what: str = "held-out solve rate") -> tuple[str, str]:
        """
        Finds the best student. Returns its name, and in words what decided.

        Args:
            rates: A figure of each student by `name@version`. The highest decides. The rating decides between equal
                figures, or if no student has one.
            what: What the figures are.
        """
        measured = [student for student in self.students if student.identity in rates]
        if not measured:
            return max(self.students, key=self.fitness).name, "rating"
        highest = max(rates[student.identity] for student in measured)
        best = [student for student in measured if rates[student.identity] == highest]
        why = what if len(best) == 1 else f"rating among those with the highest {what}"
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
        Replaces the member `name` by a newborn of the same name: the next version, with age 0.

        Args:
            name: Name of the member that goes.
            step: Optimizer steps so far.
            parents: The newborn's parents as `name@version`.
            operator: Name of the operator that has made it.
            mu, sigma: The newborn's rating.

        Returns:
            The newborn.

        Raises:
            `KeyError`: If no member is called `name`.
            `ValueError`: If `sigma` is not positive.
        """
        if not sigma > 0:
            raise ValueError(f"`sigma` of a newborn must be positive, got {sigma}.")
        # The same object: whoever holds the member sees the newborn from here on.
        member = self[name]
        member.mu, member.sigma = mu, sigma
        member.age, member.born = 0, step
        member.parents, member.operator = tuple(parents), operator
        member.version += 1
        return member

    def state_dict(self) -> dict[str, Any]:
        """Returns plain data, ready for JSON."""
        return {"members": [{**asdict(member), "parents": list(member.parents)} for member in self.members]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Restores a state that `state_dict` returned.

        Raises:
            `ValueError`: If the members of the saved population have other names than those of this one.
        """
        members = [Member(**{**fields, "parents": tuple(fields["parents"])}) for fields in state["members"]]
        if [m.name for m in members] != self.names:
            raise ValueError(
                f"The saved population holds {', '.join(m.name for m in members)} but this one holds "
                f"{', '.join(self.names)}. Resume with the `teachers` and `students` of the saved run."
            )
        # The members are changed in place, because others may hold them.
        for member, saved in zip(self.members, members, strict=True):
            member.__dict__.update(saved.__dict__)

    def metrics(self, roles: Sequence[str] = ROLES) -> dict[str, float]:
        """Returns ratings by role and by member. A role without members gives NaN."""
        values = {}
        for role in roles:
            mus = [member.mu for member in self.role(role)]
            values[f"population/{role}/mu_mean"] = fmean(mus) if mus else math.nan
            values[f"population/{role}/mu_std"] = pstdev(mus) if mus else math.nan
        for member in self.members:
            values[f"member/{member.name}/mu"] = member.mu
            values[f"member/{member.name}/sigma"] = member.sigma
        return values
