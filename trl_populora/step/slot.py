"""A slot: one task of a step, and all that becomes of it.

A step is a list of slots. Every phase fills its part of the slots, and reads what the phases before it have filled:

    match      match                 who writes the task and who solves it
    propose    kind, references, dropped, proposal
    verify     task: what is attempted; refusal, if the proposal is no task; features
    solve      attempts
    grade      each attempt's grade, and the proposal's outcome
    price      share, and the pay of the proposal and of each attempt

At the end [`~trl_populora.step.rows.make_rows`] turns the slots into the rows that TRL trains on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from trl_populora.population.ratings import Match
from trl_populora.step.pay import Outcome
from trl_populora.step.player import Completion, Messages
from trl_populora.step.referee import Grade
from trl_populora.tasks.kind import Refusal, Task


@dataclass
class Sample:
    """
    What one member was asked, and what it wrote: a proposal, or an attempt at a task.

    Args:
        member: Name of the member.
        prompt: What the member was asked, as messages.
        completion: What the member wrote; empty until it is generated.
        grade: The referee's judgement of an attempt; `None` for a proposal, and until the attempt is graded.
        pay: What the rules pay for the completion; NaN until it is priced.
    """

    member: str
    prompt: Messages
    completion: Completion = Completion([], [], "")
    grade: Grade | None = None
    pay: float = math.nan

    @property
    def right(self) -> bool:
        """Whether this is an attempt that the referee found right. It is False for every proposal."""
        return self.grade is not None and self.grade.right


@dataclass
class Slot:
    """
    One task of a step.

    A slot comes about in one of three ways:

    - A teacher proposes its task. Where the proposal is refused, an archived task takes its place.
    - An archived task is replayed.
    - Without teachers, its task is one of the given tasks.

    Args:
        match: The teacher and the student of this slot. Without teachers `match.teacher` is empty.
        kind: Name of a kind of task: the kind that the teacher was asked for, or else the kind of the drawn task.
        references: Archived tasks that the teacher was shown.
        dropped: How many references did not fit into the proposal prompt.
        proposal: What the teacher wrote; `None` where nobody proposes.
        refusal: Why the proposal is no task; `None` if it is one, or where nobody proposes.
        task: What the match's student attempts: the proposed task, else an archived or given one.
        attempts: The student's attempts at the task.
        features: Words for what a proposed task uses.
        outcome: What the pay of the proposal depends on; `None` where nobody proposes, and until it is graded.
        share: The student's part of this proposal, in [0, 1]; NaN where nobody proposes.
    """

    match: Match
    kind: str
    references: Sequence[Task] = ()
    dropped: int = 0
    proposal: Sample | None = None
    refusal: Refusal | None = None
    task: Task = field(default=None)  # type: ignore[assignment]  # verify sees to it that each slot has one
    attempts: list[Sample] = field(default_factory=list)
    features: tuple[str, ...] = ()
    outcome: Outcome | None = None
    share: float = math.nan

    @property
    def fresh(self) -> bool:
        """Whether the task that is attempted was proposed in this slot."""
        return self.proposal is not None and self.refusal is None

    @property
    def archived(self) -> bool:
        """Whether the task is archived: it replaces a refused proposal, or is replayed. False without teachers."""
        return bool(self.match.teacher) and not self.fresh

    @property
    def solve_rate(self) -> float:
        """Share of the attempts that are right, rho; NaN without attempts."""
        return fmean(attempt.right for attempt in self.attempts) if self.attempts else math.nan
