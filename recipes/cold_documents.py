"""
What a base is shown before self-play: the run's own prompts, each with an answer that the run's referee accepts.

Proposals are tasks of the run and simple ones, as they would be written, with others of the run as references. With
tasks of the run alone, which are about as hard as a small base can read, most of what it then proposes does not run.
Answers to code_o and code_i are direct or worked out line by line (`execution_traces.py`), forwards: for code_i an
input is tried, often after one that misses. Used by `cold_start.py`.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from execution_traces import Trace, trace
from tiny_documents import DialogueWriter, random_task

from trl_populora.sandbox import values
from trl_populora.step.player import Messages
from trl_populora.step.referee import Referee, Written
from trl_populora.tasks import CodeF, CodeI, CodeO
from trl_populora.tasks.archive import TaskArchive
from trl_populora.tasks.kind import Task, TaskKind
from trl_populora.tasks.python.prompts import (
    fence,
    show_input,
    show_output,
    show_program,
    write_arguments,
    write_literal,
)


PROPOSALS = 0.4  # of all documents
LEVELS = (1, 2, 3)  # of the simple tasks
DRAWN = 3  # times as many are drawn as are wanted: some do not fit
WORKED = CodeO.name, CodeI.name
MISSES = 0.6  # of the worked answers to code_i: before the input that is right one is tried that is not
ANSWERS = {
    CodeO.name: lambda task: fence(show_output(task.outputs[0])),
    CodeI.name: lambda task: fence(show_input(task.inputs[0])),
    CodeF.name: lambda task: fence(show_program(task.program)),
}


@dataclass(frozen=True)
class Document:
    """A prompt and the assistant's turn that follows; `name` is role and kind."""

    name: str
    prompt: Messages
    answer: str


@dataclass
class DocumentWriter:
    """
    Writes documents of a run's kinds.

    Args:
        referee ([`Referee`]): The run's: it writes the prompts, refuses what is held out, and accepts the answers.
        archive ([`TaskArchive`]): What is proposed, shown as references and answered: none of it is held out.
        references (`int`): References of a proposal.
        fits (`Callable[[str], bool]`): Whether a completion of the run has room for an answer.
        rng (`random.Random`): The only source of randomness.

    Raises:
        `ValueError`: If the run plays a kind of a user's own.
    """

    referee: Referee
    archive: TaskArchive
    references: int
    fits: Callable[[str], bool]
    rng: random.Random

    def __post_init__(self):
        if unknown := [name for name in self.referee.kinds if name not in ANSWERS]:
            raise ValueError(
                f"`task_kinds` names {', '.join(unknown)}, and documents are written for {', '.join(ANSWERS)}. Leave "
                "the others out of the cold start; its adapter starts a run with all of them."
            )

    def write(self, count: int, worked: float, further: int) -> list[Document]:
        """
        About `count` documents of all roles and kinds, in random order; fewer where few fit.

        Args:
            count (`int`): Documents.
            worked (`float`): Share of the answers to code_o and code_i that are worked out.
            further (`int`): Simple tasks of `tiny_programs.py` that are proposed and answered beside the run's.
        """
        if not 0 <= worked <= 1:
            raise ValueError(f"`worked` is a share, between 0 and 1, got {worked}.")
        kinds = list(self.referee.kinds.values())
        known = [*self.archive, *self.simple_tasks(further)]
        proposals = round(count * PROPOSALS / len(kinds))
        answers = round(count / len(kinds)) - proposals
        documents = []
        for kind in kinds:
            thought = round(answers * worked) if kind.name in WORKED else 0
            documents += self.proposals(kind, known, proposals)
            documents += self.answers(kind, known, thought, self._work_out)
            documents += self.answers(kind, known, answers - thought, _answer)
        self.rng.shuffle(documents)
        return documents

    def simple_tasks(self, count: int) -> list[Task]:
        """So many tasks of `tiny_programs.py`, less those that are held out."""
        kinds, writer = list(self.referee.kinds), DialogueWriter(self.rng)
        tasks = [random_task(kinds[n % len(kinds)], self.rng.choice(LEVELS), writer) for n in range(count)]
        return [task for task in tasks if task not in self.referee.held_out]

    def proposals(self, kind: TaskKind, tasks: Sequence[Task], count: int) -> list[Document]:
        """Tasks of a kind as a teacher would propose them."""
        drawn = [task for task in self._draw(kind, tasks, count) if kind.write_proposal(task)]
        asked = [self.referee.proposal_prompt(kind, self._shown(kind, task)) for task in drawn]
        written = [
            Written(kind.name, kind.write_proposal(task), shown) for task, (_, shown) in zip(drawn, asked, strict=True)
        ]
        judged = self.referee.judge(written, self.rng)
        found = [
            Document(f"propose {kind.name}", prompt, each.text)
            for (prompt, _), each, outcome in zip(asked, written, judged, strict=True)
            if isinstance(outcome, Task) and self.fits(each.text)
        ]
        return found[:count]

    def answers(
        self, kind: TaskKind, tasks: Sequence[Task], count: int, write: Callable[[list[Task]], list[str]]
    ) -> list[Document]:
        """`count` answers to tasks of a kind that the referee calls right, if so many fit."""
        drawn = self._draw(kind, tasks, count)
        texts = write(drawn)
        grades = self.referee.grade(drawn, texts)
        found = [
            Document(f"solve {kind.name}", self.referee.solving_prompt(task), text)
            for task, text, grade in zip(drawn, texts, grades, strict=True)
            if grade.right and self.fits(text)
        ]
        return found[:count]

    def _work_out(self, tasks: list[Task]) -> list[str]:
        """Worked answers; an empty text, which is no answer, where a program cannot be followed."""
        tried = [[task.inputs[0]] for task in tasks]
        for task, inputs in zip(tasks, tried, strict=True):
            if task.kind == CodeI.name and self.rng.random() < MISSES:
                inputs.insert(0, values.encode(vary(values.decode(task.inputs[0]), self.rng), ordered=True))
        calls = [(task.program, given) for task, inputs in zip(tasks, tried, strict=True) for given in inputs]
        traces = iter(trace(calls, self.referee.sandbox))
        return [
            _worked(task, [(given, next(traces)) for given in inputs])
            for task, inputs in zip(tasks, tried, strict=True)
        ]

    def _draw(self, kind: TaskKind, tasks: Iterable[Task], count: int) -> list[Task]:
        """Tasks of a kind, `DRAWN` times as many as are wanted; each comes once before any comes again."""
        pool = [task for task in tasks if task.kind == kind.name and not self.referee.is_too_long(task)]
        drawn: list[Task] = []
        while pool and len(drawn) < DRAWN * count:
            drawn += self.rng.sample(pool, len(pool))
        return drawn[: DRAWN * count]

    def _shown(self, kind: TaskKind, task: Task) -> list[Task]:
        """References of a proposal as a run draws them: other tasks, behind the one that it is about if it is."""
        drawn = self.referee.draw_references(kind, self.archive, self.references + 1, self.rng)
        about = [] if kind.writes_program else [task]
        others = [each for each in drawn[len(about) :] if each.program != task.program]
        return about + others[: self.references]


def vary(value: Any, rng: random.Random) -> Any:
    """The same value but for one number, letter or truth in it, if it has any."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice((-3, -2, -1, 1, 2, 3))
    if isinstance(value, str) and value:
        place = rng.randrange(len(value))
        return value[:place] + rng.choice(string.ascii_lowercase) + value[place + 1 :]
    if isinstance(value, (list, tuple)) and value:
        place = rng.randrange(len(value))
        return type(value)([*value[:place], vary(value[place], rng), *value[place + 1 :]])
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        return value | {key: vary(value[key], rng)}
    return value


def _worked(task: Task, tries: list[tuple[str, Trace | None]]) -> str:
    """An answer with its work: inputs that miss, then the task's own."""
    *missed, (own, last) = tries
    if last is None or last.output != task.outputs[0]:
        return ""
    lines = []
    for given, found in missed:
        if found is not None and found.output != task.outputs[0]:
            *before, end = found.lines
            lines += [f"try {write_arguments(given)}", *before, f"{end}, not {write_literal(task.outputs[0])}"]
    if task.kind == CodeI.name:  # parameters of code_o stand in the prompt
        lines.append(f"try {write_arguments(own)}")
    return "\n".join(["<think>", *lines, *last.lines, "</think>", _answer([task])[0]])


def _answer(tasks: list[Task]) -> list[str]:
    return [ANSWERS[task.kind](task) for task in tasks]
