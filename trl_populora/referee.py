"""What is a task and what is right (phases 3 and 4): task kinds and sandbox, without any model.

Programs are run when a whole batch of completions is there. To start each the moment its completion ends was built and
taken out again: it hid 0.3 s of a step of 16 s, and ran through six files and vLLM's engine loop.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trl_populora.sandbox import Job, Runner, Verdict
from trl_populora.tasks.base import Attempt, Proposal, Reject, Task, TaskKind, checked
from trl_populora.tasks.control import THINK_TAGS, screen


@dataclass(frozen=True)
class Grade:
    """An attempt as it was read, whether it is right, and what it comes to (see `TaskKind.said`)."""

    attempt: Attempt
    right: bool
    said: str = ""


@dataclass
class Referee:
    """
    Judges proposals and grades attempts. A kind of a user's own that answers with a wrong type is named in the error.

    Args:
        kinds (`Mapping[str, TaskKind]`): The run's task kinds, in rotation order.
        sandbox (`Runner`): Runs every program that a model wrote.
        forbidden (`tuple[str, ...]`): Texts that no task may contain, see `tasks/control.py`.
        held_out (`Container[Task]`): Tasks that nobody may train on.
    """

    kinds: Mapping[str, TaskKind]
    sandbox: Runner
    forbidden: tuple[str, ...] = THINK_TAGS
    held_out: Container[Task] = ()

    def judge(
        self,
        kinds: Sequence[str],
        texts: Sequence[str],
        references: Sequence[Sequence[Task]],
        rng: random.Random,
    ) -> list[Task | Reject]:
        """What each proposal is: a task, or the reason why not. Duplicates are not looked for."""
        proposals = [self._parse(*each) for each in zip(kinds, texts, references, strict=True)]
        verdicts = self._run(
            self.kinds[kind].check(proposal) if isinstance(proposal, Proposal) else None
            for kind, proposal in zip(kinds, proposals, strict=True)
        )
        return [self._accept(*each, rng) for each in zip(kinds, proposals, verdicts, strict=True)]

    def _parse(self, kind: str, text: str, shown: Sequence[Task]) -> Proposal | Reject:
        parsed = self.kinds[kind].parse_proposal(text, shown)
        return screen(checked(kind, "parse_proposal", parsed, (Proposal, Reject)), self.forbidden)

    def _accept(
        self, kind: str, proposal: Proposal | Reject, verdict: Verdict | None, rng: random.Random
    ) -> Task | Reject:
        """What became of a proposal; its outputs are known only now."""
        if isinstance(proposal, Reject):
            return proposal
        accepted = self.kinds[kind].accept(proposal, verdict, rng)
        outcome: Task | Reject = checked(kind, "accept", accepted, (Task, Reject))
        if isinstance(outcome, Task) and outcome.kind != kind:
            raise ValueError(f"task kind {kind!r}: `accept` must return tasks of its own kind, got {outcome.kind!r}")
        outcome = screen(outcome, self.forbidden)
        return Reject.HELD_OUT if outcome in self.held_out else outcome

    def grade(self, tasks: Sequence[Task], texts: Sequence[str]) -> list[Grade]:
        """What the answers are worth; equal answers to one task run once."""
        attempts = [self.kinds[t.kind].parse_attempt(text, t) for t, text in zip(tasks, texts, strict=True)]
        keys = [(task.task_id, task.kind, attempt) for task, attempt in zip(tasks, attempts, strict=True)]
        distinct = dict(zip(keys, tasks, strict=True))
        verdicts = self._run(self.kinds[task.kind].trial(task, key[2]) for key, task in distinct.items())
        grades = {
            key: self._grade(task, key[2], verdict)
            for (key, task), verdict in zip(distinct.items(), verdicts, strict=True)
        }
        return [grades[key] for key in keys]

    def _grade(self, task: Task, attempt: Attempt, verdict: Verdict | None) -> Grade:
        if not attempt.well_formed:
            return Grade(attempt, False)
        kind = self.kinds[task.kind]
        right = checked(task.kind, "correct", kind.correct(task, attempt, verdict), (bool,))
        return Grade(attempt, right, checked(task.kind, "said", kind.said(task, attempt, verdict), (str,)))

    def _run(self, jobs: Iterable[Job | None]) -> list[Verdict | None]:
        """Verdicts of the jobs, `None` where there is nothing to run; equal jobs run once."""
        jobs = list(jobs)
        distinct = list(dict.fromkeys(job for job in jobs if job is not None))
        verdicts = dict(zip(distinct, self.sandbox.run(distinct), strict=True))
        return [None if job is None else verdicts[job] for job in jobs]
