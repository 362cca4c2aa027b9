"""`populora check-kind`: tries a task kind of one's own before a run does, without a model.

What a model may write is anything, so the parsers are given hostile texts and texts that nearly have the kind's form:
paragraphs of its own prompts and the fields of given tasks, changed here and there.
"""

from __future__ import annotations

import copy
import inspect
import random
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any

from trl_populora.sandbox import Job, Sandbox
from trl_populora.step.player import Messages
from trl_populora.step.referee import Referee, Written
from trl_populora.tasks import STYLES, Attempt, Proposal, Refusal, Reject, Task, TaskArchive, TaskKind
from trl_populora.tasks.answers import checked, measure_complexity
from trl_populora.tasks.archive import read_task


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


# What each method that a run asks must answer with, and what stands in for an answer that is none.
ANSWERS: dict[str, tuple[tuple[type, ...], Any]] = {
    "reference_count": ((int,), 0),
    "proposal_prompt": ((list,), []),
    "write_proposal": ((str,), ""),
    "parse_proposal": ((Proposal, Reject, Refusal), Reject.FORMAT),
    "check": ((Job, type(None)), None),
    "accept": ((Task, Reject, Refusal), Reject.ERROR),
    "solving_prompt": ((list,), []),
    "parse_attempt": ((Attempt,), Attempt(False, "")),
    "trial": ((Job, type(None)), None),
    "correct": ((bool,), False),
    "identify_mistake": ((str,), ""),
    "chance": ((float, int), 0.0),
    "guesses": ((list,), []),
    "copies": ((list,), []),
    "complexity": ((dict,), {}),
    "features": ((tuple,), ()),
}
TWICE = ("parse_proposal", "accept")  # the same arguments must give the same answer


@dataclass
class KindCheck:
    """
    What was found wrong with a kind, and how far the texts came.

    Args:
        kind ([`TaskKind`]): The kind.
        problems (`list[str]`): A sentence each, with kind, method and what it was given; the same trouble once.
        counts (`dict[str, int]`): How many texts became a proposal, a task, a well-formed and a right attempt.
        refused (`Counter`): Why proposals became no task, how often.
    """

    kind: TaskKind
    problems: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    _told: set[tuple] = field(default_factory=set)

    def watch(self) -> TaskKind:
        """The kind as the referee is given it: every answer is looked at, and one that is none becomes a problem."""
        methods = {name: partialmethod(_ask, self, name) for name in ANSWERS if self.has(name)}
        watched = copy.copy(self.kind)
        watched.__class__ = type(type(self.kind).__name__, (type(self.kind),), methods)
        return watched

    def has(self, method: str) -> bool:
        """Whether the kind's class answers this itself."""
        return getattr(type(self.kind), method) is not getattr(TaskKind, method)

    def ask(self, method: str, *arguments: Any) -> Any:
        """What a method answers, or what stands in for that if it raises, takes too long or answers otherwise."""
        wanted, substitute = ANSWERS[method]
        times = 2 if method in TWICE else 1
        try:
            with _limit_time(SECONDS):
                answers = [getattr(self.kind, method)(*copy.deepcopy(arguments)) for _ in range(times)]
            value = checked(self.kind.name, method, answers[0], wanted)
        except (Exception, SystemExit) as error:
            self._tell_error(method, error, arguments)
            return substitute
        if answers[-1] != value:
            self.tell(method, f"gave {value!r:.80}, then {answers[-1]!r:.80}", arguments[:1], sort="twice")
        if flaw := self._find_flaw(method, value, arguments[0]):
            self.tell(method, flaw, arguments[:1], sort="flaw")
            return substitute
        return value

    def _tell_error(self, method: str, error: BaseException, arguments: Sequence[Any]) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        place = next((f for f in reversed(frames) if f.filename == inspect.getfile(type(self.kind))), frames[-1])
        if place.name == checked.__name__:
            self.tell(method, str(error).partition("` ")[2], arguments, type(error))
            return
        what = f"raised {error!r:.200} ({place.filename}, line {place.lineno})"
        self.tell(method, what, arguments, (type(error), place.lineno))

    def tell(self, method: str, what: str, arguments: Sequence[Any] = (), sort: Any = None) -> None:
        """Notes a problem, once for each method and sort."""
        if (method, sort or what) not in self._told:
            self._told.add((method, sort or what))
            given = f" for {', '.join(f'{argument!r:.120}' for argument in arguments)}" if arguments else ""
            self.problems.append(f"task kind {self.kind.name!r}: `{method}` {what}{given}")

    def _find_flaw(self, method: str, value: Any, given: Any) -> str:
        """What is wrong with an answer of the right type; empty if nothing is."""
        if method == "parse_attempt" and not isinstance(value.answer, str):
            return f"must give an answer that is a text, got {value.answer!r:.80}"
        if method == "chance" and not 0 <= value <= 1:
            return f"must lie between 0 and 1, got {value!r}"
        if method in ("guesses", "copies") and (strange := [each for each in value if not isinstance(each, Attempt)]):
            return f"must give attempts, got {strange[0]!r:.80}"
        if method == "accept" and isinstance(value, Task):
            if value.kind != self.kind.name:
                return f"must return tasks of its own kind, got {value.kind!r}"
            try:
                read_task(value.to_record(), "the task")
            except ValueError as error:
                return f"returned a task that can seed no other run: {error}"
        if method == "features" and (strange := [word for word in value if not isinstance(word, str)]):
            return f"must give words, got {strange[0]!r:.80}"
        if method == "complexity":
            try:
                undeclared = measure_complexity(self.kind, given).keys() - set(self.kind.measures)
            except (TypeError, ValueError) as error:
                return f"cannot be written down ({error})"
            names = ", ".join(sorted(undeclared))
            return names and f"measures {names}, which `measures` lacks: steps without a valid task do not log it"
        return ""

    def show(self, method: str, messages: Messages) -> str:
        """The text of a prompt; `""` and a problem if it holds anything but messages."""
        try:
            return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
        except (TypeError, KeyError):
            self.tell(method, f"must return messages with `role` and `content`, got {messages!r:.80}")
            return ""


def _ask(kind: TaskKind, check: KindCheck, method: str, *arguments: Any) -> Any:
    return check.ask(method, *arguments)


def check_kind(kind: TaskKind, tasks: Sequence[Task], sandbox: Sandbox, write: Callable[[str], Any]) -> KindCheck:
    """
    Shows a kind's prompts, runs given tasks as if they were proposed, and gives its parsers texts that models might
    write; posed, judged and graded by a run's own referee.

    Args:
        kind ([`TaskKind`]): The kind, configured.
        tasks (`Sequence[Task]`): Tasks to show as references and to attempt, of this kind and of those it refers to.
        sandbox ([`Sandbox`]): Runs what the kind wants run.
        write (`Callable`): Takes the lines that are shown.

    Returns:
        [`KindCheck`]: Its `problems` are empty if none was found.
    """
    check, rng = KindCheck(kind), random.Random(0)
    if "/" in kind.name:
        check.tell("name", "may hold no `/`, which parts the names of metrics")
    watched = check.watch()
    referee = Referee({kind.name: watched}, sandbox, STYLES[0])
    archive, own = TaskArchive(), [task for task in tasks if task.kind == kind.name]
    for task in tasks:
        archive.add(task)
    prompts = []
    for style in STYLES:
        referee.style = style
        references = referee.draw_references(watched, archive, REFERENCES, random.Random(0))
        prompt, _ = referee.proposal_prompt(watched, references)
        prompts.append(check.show("proposal_prompt", prompt))
        write(f"--- a teacher is shown, in the style {style}\n{prompts[-1]}\n")
    if kind.writes_program:
        referee.proposal_prompt(watched, [])  # an archive may hold none of its kind yet

    given = len(own)
    _run_given(check, referee, own)
    for task in own:
        check.ask("features", task)
        _read_back(check, task)
    texts = [*HOSTILE, *_change([*prompts, *(text for task in own for text in _list_fields(task))], rng)]
    own += _try_proposals(check, referee, texts, references)
    shown = own[:TRIED]
    for style in STYLES if shown else ():
        referee.style = style
        asked = check.show("solving_prompt", referee.solving_prompt(shown[0]))
        write(f"--- a student is asked, in the style {style}\n{asked}\n")
    _try_attempts(check, referee, texts, shown)
    count, refused = check.counts, ", ".join(f"{reason} {n}" for reason, n in check.refused.most_common())
    write(
        f"--- {given} tasks given; {len(texts)} texts as proposals: {count['proposals']} well-formed, of the first "
        f"{min(RUNS, count['proposals'])} {count['tasks']} became tasks"
        f"{f' ({refused})' if refused else ''}\n"
        f"--- {len(texts) * len(shown)} texts as answers to {len(shown)} of the {len(own)} tasks, given and made: "
        f"{count['well-formed attempts']} well-formed, of the first {min(RUNS, count['well-formed attempts'])} "
        f"{count['right attempts']} right\n"
    )
    if not shown:
        write("no task could be attempted: give some with `--tasks`\n")
    return check


def _run_given(check: KindCheck, referee: Referee, tasks: Sequence[Task]) -> None:
    """Runs given tasks as if they were proposed."""
    proposals = [Proposal(task.kind, task.program, task.inputs, task.message) for task in tasks]
    outcomes = referee.verify(
        [(task.kind, each) for task, each in zip(tasks, proposals, strict=True)], random.Random(0)
    )
    for number, (task, outcome) in enumerate(zip(tasks, outcomes, strict=True), start=1):
        if isinstance(outcome, Refusal):
            check.tell("accept", f"rejects given task {number} as `{outcome.reason}`: {task.program!r:.80}")
        elif _pair_up(outcome) != _pair_up(task):
            check.tell("accept", f"finds other outputs than given task {number} has: {outcome.outputs!r:.80}")


def _read_back(check: KindCheck, task: Task) -> None:
    """A given task as teachers are shown it: the kind must be able to read it."""
    text = check.ask("write_proposal", task) if check.has("write_proposal") else ""
    if text and not isinstance(check.ask("parse_proposal", text, [task]), Proposal):
        check.tell("parse_proposal", "refuses what `write_proposal` wrote", [text])


def _try_proposals(check: KindCheck, referee: Referee, texts: Sequence[str], references: Sequence[Task]) -> list[Task]:
    """Gives texts to `parse_proposal`; returns the tasks that came of them."""
    formed = [text for text in texts if isinstance(check.ask("parse_proposal", text, references), Proposal)]
    judged = formed[:RUNS]
    kinds, shown = [check.kind.name] * len(judged), [references] * len(judged)
    outcomes = referee.judge([Written(*each) for each in zip(kinds, judged, shown, strict=True)], random.Random(0))
    tasks = [outcome for outcome in outcomes if isinstance(outcome, Task)]
    check.refused.update(outcome.reason.value for outcome in outcomes if isinstance(outcome, Refusal))
    referee.chances(tasks)
    for task in tasks:
        check.ask("complexity", task)
        check.ask("features", task)
    check.counts |= {"proposals": len(formed), "tasks": len(tasks)}
    return tasks


def _try_attempts(check: KindCheck, referee: Referee, texts: Sequence[str], tasks: Sequence[Task]) -> None:
    """Gives texts to `parse_attempt`, as answers to each task. What is malformed is graded too, as a run does."""
    sides: dict[bool, list[tuple[Task, str]]] = {True: [], False: []}
    for task in tasks:
        for text in texts:
            sides[check.ask("parse_attempt", text, task).well_formed].append((task, text))
    graded = [*sides[True][:RUNS], *sides[False][:RUNS]]
    grades = referee.grade([task for task, _ in graded], [text for _, text in graded])
    right = sum(grade.right for grade in grades)
    check.counts |= {"well-formed attempts": len(sides[True]), "right attempts": right}


def _pair_up(task: Task) -> list[tuple[str, str]]:
    """Inputs with their outputs, sorted: a kind may shuffle them."""
    return sorted(zip(task.inputs, task.outputs, strict=True))


def _list_fields(task: Task) -> Iterator[str]:
    """What a task holds, bare and in the fences of the code kinds."""
    yield from (task.program, task.message, *task.inputs, *task.outputs)
    yield f"```python\n{task.program}\n```\n```input\n1\n```"
    yield from (f"```{fence}\n{text}\n```" for fence in ("output", "input") for text in task.outputs)


def _change(material: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Yields the paragraphs of the material, then paragraphs with some places cut, doubled or replaced."""
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
def _limit_time(seconds: float) -> Iterator[None]:
    """Ends the block with a `TimeoutError` after so many seconds, also amid a regular expression that backtracks."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {seconds:.0f} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
