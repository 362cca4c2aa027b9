"""What a task is, and what a kind of task must answer (propose, verify, solve).

A [`TaskKind`] is one class in one file. It writes both prompts, reads both answers, says what the sandbox has to run
and decides from the verdict; it holds no state and never runs anything itself. The rollout knows only this interface,
so a user's own kind needs no change in the package: write the class and name it in `PopuLoRAConfig(task_kinds=[...])`.

Values travel as canonical texts: an entry of `Task.inputs` is the text of one argument *tuple*, dicts in the order
written (`trl_populora.sandbox.values.encode(arguments, ordered=True)`), an entry of `Task.outputs` the text of one
return
value (`encode(value)`), because what a program takes in has an order that it may use, and what it gives back is
compared.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from numbers import Real
from typing import TYPE_CHECKING, Any

from trl_populora.options import check_bounds, check_choices, check_numbers
from trl_populora.sandbox import values


if TYPE_CHECKING:
    from trl_populora.sandbox.jobs import Job, Verdict


STYLES = ("turns", "chat", "compact")
READINGS = ("tolerant", "strict")


class Reject(str, Enum):
    """Why a proposal never reached a student. The values name the metrics `verify/reject/{reason}`."""

    FORMAT = "format"
    SYNTAX = "syntax"
    NO_FUNCTION = "no_function"
    ARGUMENTS = "arguments"
    OVERSIZED = "oversized"
    ERROR = "error"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    BAD_OUTPUT = "bad_output"
    NONDETERMINISTIC = "nondeterministic"
    POLICY = "policy"
    TAMPERED = "tampered"
    DUPLICATE = "duplicate"
    HELD_OUT = "held_out"
    DUPLICATE_INPUTS = "duplicate_inputs"
    CONSTANT_OUTPUT = "constant_output"
    LEAKED_PROGRAM = "leaked_program"
    CONTROL_TOKEN = "control_token"
    TOO_LONG = "too_long"
    COPIED = "copied"

    # Plain `str(reject)` differs between Python versions for mixed-in enums; metric keys need the value everywhere.
    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Task:
    """
    A verified task: what a student is asked and what is true about it.

    Args:
        kind: Name of the kind in the run's table of kinds.
        program: Source with a top-level `f`; a user's own kind may keep any text here.
        inputs: Canonical texts of argument tuples.
        outputs: Canonical texts of the values returned, one per input.
        message: Hint for the solver (code_f).
        visible: How many of the leading pairs the solver is shown (code_f).
        author: Name of the member that proposed it.
        step: Population step it was proposed at, from 1; 0 is before training.
    """

    kind: str
    program: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    message: str = ""
    visible: int = 0
    author: str = "seed"
    step: int = 0

    @cached_property
    def task_id(self) -> str:
        """Short hex hash of the content; who wrote it and when do not count."""
        content = json.dumps([self.kind, self.program, list(self.inputs), self.message])
        # Lone surrogates in a message must hash too, not raise: JSON's ASCII escapes take care of that.
        return hashlib.sha256(content.encode("ascii")).hexdigest()[:16]

    def to_record(self) -> dict[str, Any]:
        """A JSON-ready row, the schema of `seed_tasks.jsonl` and of the archive's dataset."""
        return {
            "kind": self.kind,
            "program": self.program,
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "message": self.message,
            "visible": self.visible,
            "author": self.author,
            "step": self.step,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], where: str = "record") -> Task:
        """
        Reads a row written by [`Task.to_record`]; further columns are ignored, optional ones may be absent.

        Raises:
            `ValueError`: If a column is missing or holds the wrong type; the message names the column and `where`.
        """
        fields: dict[str, Any] = {}
        for column, (wanted, required) in COLUMNS.items():
            value = record.get(column)
            if value is None:
                if required:
                    raise ValueError(
                        f"{where}: column `{column}` is missing or empty; a task needs {wanted}. "
                        f"Columns present: {sorted(record)}."
                    )
                continue
            if not _COLUMN_TESTS[wanted](value):
                raise ValueError(
                    f"{where}: column `{column}` must be {wanted}, got {type(value).__name__} {value!r:.80}."
                )
            fields[column] = tuple(value) if wanted == _TEXTS else value
        task = cls(**fields)
        if len(task.inputs) != len(task.outputs):
            raise ValueError(
                f"{where}: column `outputs` must hold one value per input, got {len(task.outputs)} for "
                f"{len(task.inputs)} `inputs`."
            )
        if not 0 <= task.visible <= len(task.inputs):
            raise ValueError(
                f"{where}: column `visible` must lie between 0 and the number of inputs ({len(task.inputs)}), got "
                f"{task.visible}."
            )
        return task


_TEXT, _TEXTS, _COUNT = "a string", "a list of strings", "a non-negative integer"
COLUMNS = {  # column: (what it must be, whether a row without it is refused)
    "kind": (_TEXT, True),
    "program": (_TEXT, True),
    "inputs": (_TEXTS, True),
    "outputs": (_TEXTS, True),
    "message": (_TEXT, False),
    "visible": (_COUNT, False),
    "author": (_TEXT, False),
    "step": (_COUNT, False),
}
_COLUMN_TESTS = {
    _TEXT: lambda value: isinstance(value, str),
    _TEXTS: lambda value: isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value),
    _COUNT: lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
}


@dataclass(frozen=True)
class Proposal:
    """A proposal that parsed and has not run yet. `inputs` are canonical texts of argument tuples."""

    kind: str
    program: str
    inputs: tuple[str, ...]
    message: str = ""


@dataclass(frozen=True)
class Attempt:
    """
    A student's answer after parsing.

    Args:
        well_formed: Whether the answer has the stated format. Malformed answers earn the lowest reward.
        answer: Canonical text (code_o: the value, code_i: the argument tuple) or program (code_f); `""` if malformed.
        reason: Value of a [`Reject`] when malformed.
        detail: The same in a sentence, for people.
    """

    well_formed: bool
    answer: str
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Refusal:
    """Why a proposal is no task, in a word for the metrics and in a sentence for people."""

    reason: Reject
    detail: str = ""

    @classmethod
    def of(cls, found: Reject | Refusal) -> Refusal:
        """What a kind has answered, which may be the bare word."""
        return found if isinstance(found, Refusal) else cls(found)


@dataclass(frozen=True)
class Shot:
    """A task that students are shown solved before their own, and the whole completion that solves it."""

    task: Task
    answer: str


@dataclass(frozen=True)
class KindSettings:
    """
    Settings of a run that kinds of task may want to know.

    Args:
        inputs_per_function: Inputs a code_f proposal must give (AZR: 10).
        determinism_runs: Runs of a proposal that must agree (AZR: 2).
        prompt_style: One of `STYLES`, chosen when kinds are configured.
        reading: One of `READINGS`; by the style when `None`.
        prompt_texts: Instructions of the user's, by `"code_o/propose"` and so on.

    Raises:
        `ValueError`: If a value is out of range or names nothing known.
    """

    inputs_per_function: int = 10
    determinism_runs: int = 2
    prompt_style: str | None = None
    reading: str | None = None
    prompt_texts: Mapping[str, str] | None = None

    def __post_init__(self):
        check_numbers(self)
        check_bounds(self, {">= 2": "inputs_per_function", ">= 1": "determinism_runs"})
        check_choices(self, {"prompt_style": (*STYLES, None), "reading": (*READINGS, None)})


class TaskKind(ABC):
    """
    One kind of task. All methods are pure: the same arguments give the same result, in any process.

    The life of a proposal: `proposal_prompt` -> (teacher) -> `parse_proposal` -> `check` -> (sandbox) -> `accept`.
    The life of an attempt: `solving_prompt` -> (student) -> `parse_attempt` -> `trial` -> (sandbox) -> `correct`.
    `check` and `trial` may return `None`, which means that nothing has to run: the verdict passed on is then `None`.
    """

    name: str
    reference_kinds: tuple[str, ...] = ()
    writes_program = True  # whether a proposal brings its program; if not, the first reference is what it is about
    shots: tuple[Shot, ...] = ()  # what students may be shown solved, the most telling first
    measures: tuple[str, ...] = ()  # the keys of `complexity`, so that they are logged in every step

    def configure(self, settings: KindSettings) -> None:  # noqa: B027 - most kinds of one's own need nothing
        """Takes from the run's settings what this kind wants to know; nothing by default."""

    def reference_count(self, k: int) -> int:
        """How many archived tasks of `reference_kinds` the proposer is shown when `k` are configured."""
        return k

    @abstractmethod
    def proposal_prompt(self, references: Sequence[Task], style: str) -> list[dict[str, str]]:
        """
        Chat messages that ask a teacher for one proposal.

        `style` is `"turns"`, `"chat"` or `"compact"`. For `"turns"` a kind that has [`write_proposal`] gets no
        references, or the one that the proposal is about: the others become turns of the conversation before.
        """

    def write_proposal(self, task: Task) -> str:
        """
        The completion that would have proposed a task; `""` for one that is not to be shown. A kind without this
        method shows references within its prompt in every style.
        """
        return ""

    def shows_turns(self, style: str) -> bool:
        """Whether references are turns in which a proposal was asked for and written."""
        return style == "turns" and type(self).write_proposal is not TaskKind.write_proposal

    @abstractmethod
    def parse_proposal(self, text: str, references: Sequence[Task]) -> Proposal | Refusal | Reject:
        """Reads a teacher's completion (without its end-of-turn token). Must never raise on any text."""

    @abstractmethod
    def check(self, proposal: Proposal) -> Job | None:
        """What the sandbox must run to know whether the proposal is valid."""

    @abstractmethod
    def accept(self, proposal: Proposal, verdict: Verdict | None, rng: random.Random) -> Task | Refusal | Reject:
        """Turns a checked proposal into a task, or says why not."""

    @abstractmethod
    def solving_prompt(self, task: Task, style: str) -> list[dict[str, str]]:
        """Chat messages that put the task to a student; never contains what the student must find."""

    @abstractmethod
    def parse_attempt(self, text: str, task: Task) -> Attempt:
        """Reads a student's completion (without its end-of-turn token). Must never raise on any text."""

    @abstractmethod
    def trial(self, task: Task, attempt: Attempt) -> Job | None:
        """What the sandbox must run to grade the attempt; `None` if it is malformed or needs no run."""

    @abstractmethod
    def correct(self, task: Task, attempt: Attempt, verdict: Verdict | None) -> bool:
        """Whether the attempt is right, given the verdict of its trial."""

    def identify_mistake(self, task: Task, attempt: Attempt, verdict: Verdict | None) -> str:
        """What an attempt comes to: attempts for which it is equal make the same mistake."""
        return attempt.answer

    def chance(self, task: Task) -> float:
        """
        The share of attempts that guessing would get right, from 0 to 1. A task that is solved no more often counts as
        unsolved: it earns its teacher nothing. Where this raises, it is 0; see `answers.py`.
        """
        return 0.0

    def guesses(self, task: Task) -> list[Attempt]:
        """
        Answers of somebody who has not looked at the task, the same each time. They are tried, and the share of them
        that is right is what guessing gives, if it is more than `chance`.
        """
        return []

    def copies(self, task: Task) -> list[Attempt]:
        """
        Answers that only give back what the student is shown. They are tried, and a task for which one is right is
        refused: students would learn to copy, which is easier than to work a task out.
        """
        return []

    def complexity(self, task: Task) -> dict[str, float]:
        """
        What the curriculum metrics average over valid tasks, by names like those of Python; none by default. Each name
        is a metric `curriculum/<name>`, a column of the archive and a picture in the report.
        """
        return {}

    def features(self, task: Task) -> tuple[str, ...]:
        """
        Words for what a task uses, from a vocabulary that proposals cannot extend; none by default. They tell what is
        rare and what is replayed ([`~trl_populora.tasks.features.Features`]).
        """
        return ()


# What a kind of task answers, which may be a user's own: its types are checked, and an estimate may fail.


logger = logging.getLogger(__name__)


def estimate(kind: TaskKind, method: str, unknown: Any, *arguments: Any) -> Any:
    """
    What a kind's `method` says, or `unknown` if it raises: an estimate that fails is no reason to end a run. The log
    tells of it once, with the traceback.
    """
    try:
        return getattr(kind, method)(*arguments)
    except Exception as error:
        _warn_once(kind.name, method, type(error).__name__)
        return unknown


@lru_cache
def _warn_once(kind: str, method: str, error: str) -> None:
    logger.warning(
        "task kind %r: `%s` raised %s. For such tasks it counts as if it knew nothing; `populora check-kind` tries "
        "a kind before a run.",
        *(kind, method, error),
        exc_info=True,
    )


# What a measure cannot be called: columns of the archive, and what `curriculum/` means already.
_RESERVED = {*COLUMNS, "key", "match", "solve_rate", "coverage", "entropy", "features"}


def measure_complexity(kind: TaskKind, task: Task) -> dict[str, float]:
    """
    A kind's `complexity` of a task, by names that can stand in the metrics and be columns of the archive.

    Raises:
        `TypeError`: If it is no dict of numbers; names kind and method.
        `ValueError`: If a measure's name is taken.
    """
    measures = check_type(kind.name, "complexity", estimate(kind, "complexity", {}, task), (dict,))
    for name, value in measures.items():
        if not isinstance(name, str) or not isinstance(value, Real):
            raise TypeError(
                f"task kind {kind.name!r}: `complexity` must give numbers by name, got {name!r}: {value!r:.80}"
            )
        if name in _RESERVED:
            raise ValueError(
                f"task kind {kind.name!r}: `complexity` calls a measure {name!r}, which has a meaning already."
            )
    return {name: float(value) for name, value in measures.items()}


def check_type(kind: str, method: str, value: Any, wanted: tuple[type, ...]) -> Any:
    """What a kind has answered, which may be a user's own."""
    if not isinstance(value, wanted):
        names = " or ".join(each.__name__ for each in wanted)
        raise TypeError(f"task kind {kind!r}: `{method}` must return {names}, got {value!r:.80}")
    return value


# Texts that are more than text to a model: a task that contains one would end a turn or a thought (verify).
#
# A program, hint, argument or output is put into prompts as it is, and a tokenizer reads `<|im_end|>` there as the
# token that ends a turn, whoever wrote it. Such proposals are rejected, of whatever kind, before anybody is shown
# them.


THINK_TAGS = ("<think>", "</think>")
_SHORTEST = 3  # characters; some tokenizers declare a `!` or a blank special, which any program may contain


def find_control_texts(tokenizer: Any) -> tuple[str, ...]:
    """
    The texts of a tokenizer's special tokens, and the tags of thinking.

    Args:
        tokenizer: Added tokens that are not special, as some have for common words, do not count.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    return (*THINK_TAGS, *sorted(text for text in special - set(THINK_TAGS) if len(text.strip()) >= _SHORTEST))


def screen(found: Proposal | Task | Refusal, forbidden: Sequence[str]) -> Any:
    """`found` itself, or the refusal of a proposal or task that holds one of the texts `forbidden`."""
    if isinstance(found, Refusal) or not (text := find_control_text(found, forbidden)):
        return found
    return Refusal(Reject.CONTROL_TOKEN, f"it holds {text!r}, which ends a turn or a thought")


def find_control_text(found: Proposal | Task, forbidden: Sequence[str]) -> str:
    """The first of the texts `forbidden` that a proposal or task holds; empty if there is none."""
    return next((text for shown in _show(found) for text in forbidden if text in shown), "")


def _show(found: Proposal | Task) -> Iterator[str]:
    """What may come into a prompt, as it would stand there."""
    yield found.program
    yield found.message
    for text in (*found.inputs, *(found.outputs if isinstance(found, Task) else ())):
        yield text
        try:
            yield values.to_literal(values.decode(text))
        except ValueError:  # a user's own kind may keep any text
            continue
