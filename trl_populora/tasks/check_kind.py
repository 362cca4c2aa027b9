"""`populora check-kind`: tries a task kind of one's own before a run does, without a model (phases 2 to 4).

What a model may write is anything, so the parsers are given hostile texts and texts that nearly have the kind's form:
paragraphs of its own prompts and the fields of given tasks, changed here and there.
"""

from __future__ import annotations

import inspect
import random
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trl_populora.sandbox import Job, Sandbox

from .archive import TaskArchive, read_task
from .base import STYLES, Attempt, Proposal, Refusal, Reject, Task, TaskKind, checked, measure_complexity


TEXTS, RUNS = 1000, 100  # changed texts; of those that parse, how many run
TRIED = 3  # tasks that each text is an answer to
REFERENCES = 6  # as `references_per_proposal` has it
SECONDS = 5.0  # a parser runs in the trainer's own process, where nothing stops it

HOSTILE = (
    *("", " ", "\n", "\x00", "\ud800", "\u202e", "٣", "²", "１", "İ", "🙂"),
    *("-0", "1e999", "nan", "None", "0x10", "1_0"),
    *("<think>", "</think>", "<|im_end|>", "```", "```python\n", "```output\n", "'", '"""', "\\", "{}", "%s", "\r\n"),
    *("def f(x):\n    return x", "__import__('os')._exit(0)", "9**9**9", "f(1)", "()", "[[", '{"a": 1}', "lambda: 0"),
    *("(" * 5000, "[" * 100_000, "9" * 10_000, "a" * 300_000, " " * 100_000, "-" * 5000, "```\n" * 5000),
    "1 " * 50_000,
)


@dataclass
class KindCheck:
    """
    What was found wrong with a kind, and how far the texts came.

    Args:
        kind ([`TaskKind`]): The kind.
        sandbox ([`Sandbox`]): Runs what it wants run.
        problems (`list[str]`): A sentence each, with kind, method and what it was given; the same trouble once.
        counts (`dict[str, int]`): How many texts became a proposal, a task, a well-formed and a right attempt.
    """

    kind: TaskKind
    sandbox: Sandbox
    problems: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("proposals", "tasks", "well-formed attempts", "right attempts"), 0)
    )
    _told: set[tuple] = field(default_factory=set)

    def call(self, method: str, wanted: tuple[type, ...], *arguments: Any) -> Any:
        """
        What a method answers; `None`, and a problem, if it raises, takes too long or answers with something else.
        """
        try:
            with _at_most(SECONDS):
                value = getattr(self.kind, method)(*arguments)
            return checked(self.kind.name, method, value, wanted)
        except (Exception, SystemExit) as error:
            frames = traceback.extract_tb(error.__traceback__)
            place = next((f for f in reversed(frames) if f.filename == inspect.getfile(type(self.kind))), frames[-1])
            if place.name == checked.__name__:
                self.tell(method, str(error).partition("` ")[2], arguments, type(error))
            else:
                self.tell(
                    method,
                    f"raised {error!r:.200} ({place.filename}, line {place.lineno})",
                    arguments,
                    (type(error), place.lineno),
                )
            return None

    def tell(self, method: str, what: str, arguments: Sequence[Any] = (), sort: Any = None) -> None:
        """Notes a problem, once for each method and sort."""
        if (method, sort or what) not in self._told:
            self._told.add((method, sort or what))
            given = f" for {', '.join(f'{argument!r:.120}' for argument in arguments)}" if arguments else ""
            self.problems.append(f"task kind {self.kind.name!r}: `{method}` {what}{given}")

    def prompt(self, method: str, *arguments: Any) -> str:
        """The text of a prompt; `""` and a problem if it is no list of messages."""
        messages = self.call(method, (list,), *arguments)
        try:
            return "\n".join(f"{message['role']}: {message['content']}" for message in messages or ())
        except (TypeError, KeyError):
            self.tell(method, f"must return messages with `role` and `content`, got {messages!r:.80}")
            return ""

    def accept_twice(self, proposals: Sequence[Proposal]) -> list[Task | Refusal | Reject | None]:
        """What becomes of proposals, each accepted twice: the same arguments must give the same task."""
        jobs = [self.call("check", (Job, type(None)), proposal) for proposal in proposals]
        verdicts = self._run(jobs)
        outcomes: list[Task | Refusal | Reject | None] = []
        for proposal, verdict in zip(proposals, verdicts, strict=True):
            wanted = Task, Reject, Refusal
            twice = [self.call("accept", wanted, proposal, verdict, random.Random(0)) for _ in range(2)]
            if twice[0] != twice[1]:
                self.tell("accept", f"gave {twice[0]!r:.80}, then {twice[1]!r:.80}", [proposal])
            outcomes.append(twice[0])
            if isinstance(twice[0], Task):
                self._look_at(twice[0])
        return outcomes

    def grade_attempts(self, pairs: Sequence[tuple[Task, Attempt]]) -> None:
        """Grades attempts; malformed ones are asked what to run for, too, as a run does."""
        verdicts = self._run([self.call("trial", (Job, type(None)), *pair) for pair in pairs])
        for (task, attempt), verdict in zip(pairs, verdicts, strict=True):
            if attempt.well_formed:
                right = self.call("correct", (bool,), task, attempt, verdict)
                self.counts["right attempts"] += bool(right)

    def _run(self, jobs: Sequence[Job | None]) -> list[Any]:
        verdicts = iter(self.sandbox.run([job for job in jobs if job is not None]))
        return [None if job is None else next(verdicts) for job in jobs]

    def _look_at(self, task: Task) -> None:
        """What a run and later ones want to know of a task."""
        if task.kind != self.kind.name:
            self.tell("accept", f"must return tasks of its own kind, got {task.kind!r}")
        try:
            read_task(task.to_record(), "the task")
        except ValueError as error:
            self.tell("accept", f"returned a task that can seed no other run: {error}", sort="record")
        chance = self.call("chance", (float, int), task)
        if chance is not None and not 0 <= chance <= 1:
            self.tell("chance", f"must lie between 0 and 1, got {chance!r}", [task])
        for guess in self.call("guesses", (list,), task) or ():
            if not isinstance(guess, Attempt):
                self.tell("guesses", f"must give attempts, got {guess!r:.80}", [task], sort="guess")
        if self.call("complexity", (dict,), task) is None:
            return
        try:
            undeclared = measure_complexity(self.kind, task).keys() - set(self.kind.measures)
        except (TypeError, ValueError) as error:
            self.tell("complexity", f"cannot be written down ({error})", sort="measures")
            return
        if undeclared:
            names = ", ".join(sorted(undeclared))
            self.tell(
                "complexity", f"measures {names}, which `measures` lacks: steps without a valid task do not log it"
            )


def check_kind(kind: TaskKind, tasks: Sequence[Task], sandbox: Sandbox, write: Callable[[str], Any]) -> KindCheck:
    """
    Shows a kind's prompts, runs given tasks as if they were proposed, and gives its parsers texts that models might
    write.

    Args:
        kind ([`TaskKind`]): The kind, configured.
        tasks (`Sequence[Task]`): Tasks to show as references and to attempt, of this kind and of those it refers to.
        sandbox ([`Sandbox`]): Runs what the kind wants run.
        write (`Callable`): Takes the lines that are shown.

    Returns:
        [`KindCheck`]: Its `problems` are empty if none was found.
    """
    check, rng = KindCheck(kind, sandbox), random.Random(0)
    if "/" in kind.name:
        check.tell("name", "may hold no `/`, which parts the names of metrics")
    archive, own = TaskArchive(), [task for task in tasks if task.kind == kind.name]
    for task in tasks:
        archive.add(task)
    references = archive.sample(kind.reference_kinds, kind.reference_count(REFERENCES), rng)
    prompts = {style: check.prompt("proposal_prompt", references, style) for style in STYLES}
    if kind.writes_program:
        check.prompt("proposal_prompt", [], STYLES[0])  # an archive may hold none of its kind yet
    for style, prompt in prompts.items():
        write(f"--- a teacher is shown, in the style {style}\n{prompt}\n")

    given = len(own)
    _run_given(check, own)
    material = [*prompts.values(), *(text for task in own for text in _fields(task))]
    texts = [*HOSTILE, *_change(material, rng)]
    own += _try_proposals(check, texts, references)
    shown = own[:TRIED]
    for task in shown:
        asked = {style: check.prompt("solving_prompt", task, style) for style in STYLES}
        for style in STYLES if task is shown[0] else ():
            write(f"--- a student is asked, in the style {style}\n{asked[style]}\n")
    _try_attempts(check, texts, shown)
    count = check.counts
    write(
        f"--- {given} tasks given; {len(texts)} texts as proposals: {count['proposals']} well-formed, of the first "
        f"{min(RUNS, count['proposals'])} {count['tasks']} became tasks\n"
        f"--- {len(texts) * len(shown)} texts as answers to {len(shown)} of the {len(own)} tasks: "
        f"{count['well-formed attempts']} well-formed, of the first {min(RUNS, count['well-formed attempts'])} "
        f"{count['right attempts']} right\n"
    )
    if not shown:
        write("no task could be attempted: give some with `--tasks`\n")
    return check


def _run_given(check: KindCheck, tasks: Sequence[Task]) -> None:
    """Runs given tasks as if they were proposed."""
    proposals = [Proposal(task.kind, task.program, task.inputs, task.message) for task in tasks]
    for number, (task, outcome) in enumerate(zip(tasks, check.accept_twice(proposals), strict=True), start=1):
        if isinstance(outcome, (Refusal, Reject)):
            reason = Refusal.of(outcome).reason
            check.tell("accept", f"rejects given task {number} as `{reason}`: {task.program!r:.80}")
        elif outcome is not None and _pairs(outcome) != _pairs(task):
            check.tell("accept", f"finds other outputs than given task {number} has: {outcome.outputs!r:.80}")


def _try_proposals(check: KindCheck, texts: Sequence[str], references: Sequence[Task]) -> list[Task]:
    """Gives texts to `parse_proposal`; returns the tasks that came of them."""
    proposals = []
    for text in texts:
        twice = [check.call("parse_proposal", (Proposal, Reject, Refusal), text, references) for _ in range(2)]
        if twice[0] != twice[1]:
            check.tell("parse_proposal", f"gave {twice[0]!r:.80}, then {twice[1]!r:.80}", [text])
        if isinstance(twice[0], Proposal):
            proposals.append(twice[0])
    tasks = [outcome for outcome in check.accept_twice(proposals[:RUNS]) if isinstance(outcome, Task)]
    check.counts["proposals"], check.counts["tasks"] = len(proposals), len(tasks)
    return tasks


def _try_attempts(check: KindCheck, texts: Sequence[str], tasks: Sequence[Task]) -> None:
    """Gives texts to `parse_attempt`, as answers to each task."""
    pairs = []
    for task in tasks:
        for text in texts:
            attempt = check.call("parse_attempt", (Attempt,), text, task)
            if attempt is not None and not isinstance(attempt.answer, str):
                check.tell("parse_attempt", f"must give an answer that is a text, got {attempt.answer!r:.80}", [text])
            elif attempt is not None:
                pairs.append((task, attempt))
    formed = [pair for pair in pairs if pair[1].well_formed]
    malformed = [pair for pair in pairs if not pair[1].well_formed]
    check.counts["well-formed attempts"] = len(formed)
    check.grade_attempts([*formed[:RUNS], *malformed[:RUNS]])


def _pairs(task: Task) -> list[tuple[str, str]]:
    """Inputs with their outputs, in an order of their own: a kind may shuffle them."""
    return sorted(zip(task.inputs, task.outputs, strict=True))


def _fields(task: Task) -> Iterator[str]:
    """What stands in a task, as code kinds would be told it and bare."""
    yield from (task.program, task.message, *task.inputs, *task.outputs)
    yield f"```python\n{task.program}\n```\n```input\n1\n```"
    yield from (f"```{fence}\n{text}\n```" for fence in ("output", "input") for text in task.outputs)


def _change(material: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Paragraphs of the material, then such with some places cut, doubled or replaced."""
    parts = list(dict.fromkeys(part for text in material for part in (text, *text.split("\n\n")) if part.strip()))
    yield from parts
    for _ in range(TEXTS):
        text = rng.choice(parts) if parts else ""
        for _ in range(rng.randint(1, 3)):
            start = rng.randint(0, len(text))
            end = min(len(text), start + rng.randint(0, 12))
            piece = rng.choice(("", text[start:end] * 2, rng.choice(HOSTILE)[:40], chr(rng.randrange(0x3000)), "7"))
            text = text[:start] + piece + text[end:]
        yield text


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Ends what takes longer with a `TimeoutError`; a regular expression that backtracks looks at signals, too."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {seconds:.0f} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
