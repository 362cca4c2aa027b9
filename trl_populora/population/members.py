"""Members and the population: names, roles, ratings, ages and parents.

There is plain data only, no tensors, and every rank keeps an identical copy. The weights of a member are an adapter of
the model, which `trl_populora.lora` reads and writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, pstdev
from typing import Any

from trl_populora.files import is_file_name


ROLES = ("teacher", "student")

# TrueSkill's prior (Herbrich et al., 2006), which PopuLoRA keeps: the rating of a member without matches or parents.
PRIOR_MU = 25.0
PRIOR_SIGMA = 25.0 / 3


@dataclass
class Member:
    """
    One member of the population: what the matchmaker and evolution know about it.

    Args:
        name: Name, e.g. `"teacher_0"`. [`Population.adapter`] has the name of the member's PEFT adapter. A child takes
            over the name of the member that it replaces.
        role: `"teacher"` or `"student"`.
        index: Place of the member's adapter in [`Population.adapters`]. The routed LoRA layers know the member by this
            number.
        mu, sigma: Mean and standard deviation of the TrueSkill rating.
        age: Rated matches since birth.
        born: Optimizer step of birth.
        parents: The parents as `name@version`, because another member may have the parent's name later.
        operator: Name of the operator that has made this member; `"init"` if none has.
        version: How many members had the name before this one.
        settings: Values of the options in which members differ, by option. A child inherits all
            of them except the seed.
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
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """`name@version`. It names one individual; several individuals have the same `name`, one after the other."""
        return f"{self.name}@{self.version}"

    @property
    def record(self) -> dict[str, Any]:
        """What a line of `lineage.jsonl` says of a member."""
        return {"member": self.identity, "mu": self.mu, "sigma": self.sigma, "age": self.age}


class Population:
    """
    Teachers and students in a fixed order, teachers first.

    A *seat* is one adapter of the model. The number of seats never changes. Members may leave their seats, and others
    join in empty ones.

    Args:
        teachers: Number of teachers. With 0 of them, students train on given tasks alone.
        students: Number of students, at least 1.
        single_agent: Whether one adapter plays the only teacher and the only student, as in Absolute Zero.
        seats: Number of seats, at least one for each member. When `None`, one for each member.

    Attributes:
        members: The members by the order of their seats.
        adapters: Names of the PEFT adapters by index: one per seat, or the one that plays both roles.
        left: A record of each member that has left, in the order of leaving.

    Raises:
        `ValueError`: If there is no student, if `teachers` is negative, or if a single agent is asked for and there
            are not 1 teacher and 1 student.
    """

    def __init__(self, teachers: int, students: int, single_agent: bool = False, seats: int | None = None):
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
        reserved = range(students, (seats or 0) - teachers)
        self.adapters = ["agent"] if single_agent else [*self.names, *(f"student_{i}" for i in reserved)]
        self.left: list[dict[str, Any]] = []

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
    def seats(self) -> dict[str, Member | None]:
        """
        The member in each seat by the name of the seat, `None` if the seat is empty. A seat has the name of its
        adapter. The two members of a single agent share one adapter, so their own names are the keys. Metrics are
        logged under the keys.
        """
        if self.single_agent:
            return {member.name: member for member in self.members}
        held = {member.index: member for member in self.members}
        return {adapter: held.get(index) for index, adapter in enumerate(self.adapters)}

    @property
    def held_adapters(self) -> list[str]:
        """Names of the adapters that a member holds, in order."""
        return [*dict.fromkeys(self.adapters[member.index] for member in self.members)]

    def adapter(self, name: str) -> str:
        """Returns the name of the adapter of the member `name`."""
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

    def list_values(self, option: str, default: Any) -> list[Any]:
        """Lists an option's value for each seat. `default` stands for empty seats and for members without a value."""
        held = {member.index: member.settings.get(option, default) for member in self.members}
        return [held.get(index, default) for index in range(len(self.adapters))]

    @staticmethod
    def fitness(member: Member) -> float:
        """Returns the number by which evolution selects: mu."""
        # The usual mu - 3 sigma is no choice: sigma depends mostly on age, so the youngest would seem the weakest.
        return member.mu

    def best_student(self, rates: Mapping[str, float], what: str = "held-out solve rate") -> tuple[str, str]:
        """
        Finds the best student. Returns its name, and a phrase that says what decided: `what`, or the rating.

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
        settings: Mapping[str, Any] | None = None,
    ) -> Member:
        """
        Replaces the member `name` by a newborn of the same name: the next version, with age 0.

        Args:
            name: Name of the member that goes.
            step: Optimizer steps so far.
            parents: The newborn's parents as `name@version`.
            operator: Name of the operator that has made it.
            mu, sigma: The newborn's rating.
            settings: The newborn's settings. With `None` it gets the settings of the member that goes.

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
        if settings is not None:
            member.settings = dict(settings)
        return member

    def join(
        self,
        name: str,
        *,
        step: int,
        parents: tuple[str, ...] = (),
        mu: float = PRIOR_MU,
        sigma: float = PRIOR_SIGMA,
    ) -> Member:
        """
        Gives an empty seat to a student: the seat that has the student's name, else the first empty one.

        Args:
            name: Name of the member that joins.
            step: Optimizer steps so far.
            parents: The members whose weights it begins with, as `name@version`.
            mu, sigma: The rating that it begins with.

        Returns:
            The member. If a member of this name has left, the new version is the next one, else 0.

        Raises:
            `ValueError`: If `name` is no file name or is taken, or if no seat is empty.
        """
        if not is_file_name(name):
            raise ValueError(f"A member's name must have only letters, digits, `_` and `-`, got {name!r}.")
        seats = self.seats
        empty = [seat for seat, member in seats.items() if member is None]
        # A newcomer may not have the name of a seat that somebody else holds: metrics have the names of seats, records
        # the names of members, and one name would stand for two members.
        if name in self.names or (name in seats and name not in empty):
            raise ValueError(f"The name {name!r} is taken: the members are {', '.join(self.names)}. Choose another.")
        if not empty:
            raise ValueError(
                f"No seat is empty for {name!r}: {', '.join(self.names)} hold all {len(seats)}. Start the run with a "
                "larger `max_members`, or call `remove_member` first."
            )
        index = self.adapters.index(name if name in empty else empty[0])
        version = max((each["version"] + 1 for each in self.left if each["name"] == name), default=0)
        member = Member(name, "student", index, mu, sigma, 0, step, tuple(parents), "join", version)
        self.members = sorted([*self.members, member], key=lambda each: each.index)
        return member

    def leave(self, name: str, step: int, adapter: str, figures: Mapping[str, Any] | None = None) -> Member:
        """
        Empties the seat of a member, and keeps a record of it in `left`.

        Args:
            name: The member.
            step: Optimizer steps so far.
            adapter: Where its adapter is saved, below the run's directory.
            figures: What else the record says of it, such as its rewards.

        Raises:
            `KeyError`: If no member is called `name`.
            `ValueError`: If it is the last one.
        """
        member = self[name]
        if len(self.members) == 1:
            raise ValueError(f"{name!r} is the last member, and a run needs one.")
        self.members = [each for each in self.members if each is not member]
        record = {each: getattr(member, each) for each in ("name", "version", "mu", "sigma", "age", "born")}
        record |= {"settings": dict(member.settings), **(figures or {})}
        self.left.append({**record, "step": step, "adapter": adapter})
        return member

    def state_dict(self) -> dict[str, Any]:
        """Returns plain data, ready for JSON."""
        members = [{**asdict(member), "parents": list(member.parents)} for member in self.members]
        return {"members": members, "seats": len(self.adapters), "left": [dict(each) for each in self.left]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Restores a state that `state_dict` returned. Where there are no teachers, the saved students replace those that
        are here, because some may have joined or left.

        Raises:
            `ValueError`: If the saved members have other names than the present ones. Only populations without
                teachers, with equally many seats, may differ in names.
        """
        members = [Member(**{**fields, "parents": tuple(fields["parents"])}) for fields in state["members"]]
        names = [member.name for member in members]
        may_differ = not self.teachers and state.get("seats") == len(self.adapters)
        if names != self.names and not may_differ:
            raise ValueError(
                f"The saved population holds {', '.join(names)} but this one holds {', '.join(self.names)}. Resume "
                "with the `teachers` and `students` of the saved run, and its `max_members`."
            )
        self.left = [dict(each) for each in state.get("left", ())]
        # With the same names the `Member` objects are changed in place, because other objects may hold them.
        if names == self.names:
            for member, saved in zip(self.members, members, strict=True):
                member.__dict__.update(saved.__dict__)
        else:
            self.members = members

    def metrics(self, roles: Sequence[str] = ROLES) -> dict[str, float]:
        """Returns ratings by role and by seat. A role without members gives NaN, and so does an empty seat."""
        values = {}
        for role in roles:
            mus = [member.mu for member in self.role(role)]
            values[f"population/{role}/mu_mean"] = fmean(mus) if mus else math.nan
            values[f"population/{role}/mu_std"] = pstdev(mus) if mus else math.nan
        for seat, holder in self.seats.items():
            values[f"member/{seat}/mu"] = holder.mu if holder else math.nan
            values[f"member/{seat}/sigma"] = holder.sigma if holder else math.nan
        return values
