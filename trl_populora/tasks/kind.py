"""What a task is, and what a kind of task must answer.

    proposal_prompt -> (teacher writes) -> parse_proposal -> check -> (sandbox runs) -> accept -> Task
    solving_prompt  -> (student writes) -> parse_attempt  -> trial -> (sandbox runs) -> correct -> right or wrong

A [`TaskKind`] is one class. It writes both prompts, reads both answers, says what the sandbox has to run, and decides
from the verdict. It holds no state but its settings, and runs nothing itself. The referee knows nothing about tasks
beyond this interface. So a user's own kind needs no change in the package: write the class, and name it in
`PopuLoRAConfig(task_kinds=[...])`.

Values travel as canonical texts (`trl_populora.sandbox.values`):

- An entry of `Task.inputs` is the text of one argument *tuple*: `encode(arguments, ordered=True)`. Dicts keep the
  order in which they were written, because a program may use that order.
- An entry of `Task.outputs` is the text of one returned value: `encode(value)`. Dicts are sorted, because outputs are
  compared.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from numbers import Real
from typing import TYPE_CHECKING, Any

from trl_populora.options import check_bounds, check_choices, check_numbers
from trl_populora.sandbox import values


if TYPE_CHECKING:
    from trl_populora.sandbox.jobs import Job, Verdict


STYLES = ("turns", "chat", "compact")
READINGS = ("tolerant", "strict")


class Reject(StrEnum):
    """The reasons for which a proposal is no task. Each value names a metric, `verify/reject/{reason}`."""

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


# Reasons that the paper's formula does not know. With `teacher_reward: paper` most of these checks are left out. Four
# stay: held-out tasks, control texts, prompts that do not fit, and texts too long to be parsed are refused even then.
# The teacher is then paid as for a task that nobody solves.
GUARDS = frozenset(
    reason.value
    for reason in (
        *(Reject.OVERSIZED, Reject.DUPLICATE, Reject.HELD_OUT, Reject.DUPLICATE_INPUTS, Reject.CONSTANT_OUTPUT),
        *(Reject.LEAKED_PROGRAM, Reject.CONTROL_TOKEN, Reject.TOO_LONG, Reject.COPIED),
    )
)


@dataclass(frozen=True)
class Task:
    """
    A verified task: what a student is asked, and the right answer.

    Args:
        kind: Name of the kind in the run's table of kinds.
        program: Source with a top-level `f`. A user's own kind may keep any text here.
        inputs: Canonical texts of argument tuples.
        outputs: Canonical texts of the returned values, one per input.
        message: Hint for the student (code_f).
        visible: The student is shown the first `visible` pairs of input and output (code_f).
        author: Name of the member that proposed the task; `"seed"` if none did.
        step: Step at which it was proposed, counted in optimizer steps from 1; 0 is before training.
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
        """Hash of kind, program, inputs and message, 16 hex digits."""
        content = json.dumps([self.kind, self.program, list(self.inputs), self.message])
        # A message may hold a lone surrogate, which cannot be encoded. `json.dumps` writes it as an ASCII escape.
        return hashlib.sha256(content.encode("ascii")).hexdigest()[:16]

    def to_record(self) -> dict[str, Any]:
        """Writes the task as a row, ready for JSON. The archive's table has these columns, among others."""
        given = {name: getattr(self, name) for name in COLUMNS}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], where: str = "record") -> Task:
        """
        Reads a row like those of [`Task.to_record`]. Other columns are ignored, and optional ones may be absent.

        Args:
            record: The row, a value per column.
            where: Where the row stands, for errors.

        Raises:
            `ValueError`: If a column is missing that must be there, or a column holds a wrong value. The message names
                the column and `where`.
        """
        fields: dict[str, Any] = {}
        for column, (wanted, required) in COLUMNS.items():
            # A parquet table has every column in every row; there an absent value is `None`.
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
    """A proposal that could be read, and that has not run yet. `inputs` are canonical texts of argument tuples."""

    kind: str
    program: str
    inputs: tuple[str, ...]
    message: str = ""


@dataclass(frozen=True)
class Attempt:
    """
    A student's answer as its kind has read it.

    Args:
        well_formed: Whether the answer could be read. If not, it is malformed.
        answer: For code_o the canonical text of the value, for code_i that of the argument tuple, for code_f the
            program; `""` if malformed.
        reason: If malformed, why: the value of a [`Reject`].
        detail: The reason in a sentence, for people.
    """

    well_formed: bool
    answer: str
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Refusal:
    """The reason for which a proposal is no task: in a word for metrics, and in a sentence for people."""

    reason: Reject
    detail: str = ""

    @classmethod
    def of(cls, found: Reject | Refusal) -> Refusal:
        """Makes a refusal from what a kind has answered, which may be the word alone."""
        return found if isinstance(found, Refusal) else cls(found)


@dataclass(frozen=True)
class Shot:
    """A solved task that students are shown before the one to solve. `answer` is the completion that solves it."""

    task: Task
    answer: str


@dataclass(frozen=True)
class KindSettings:
    """
    Settings of a run that kinds of task may want to know.

    Args:
        inputs_per_function: Inputs that a code_f proposal must give (Absolute Zero Reasoner: 10).
        determinism_runs: How often a proposal runs, at least; all runs must agree (Absolute Zero Reasoner: 2).
        prompt_style: One of `STYLES`. A run chooses it before it configures kinds; `check-kind` leaves it `None`.
        reading: One of `READINGS`. With `None` the style decides: strict for `"compact"`, tolerant for the others.
        prompt_texts: The user's own instructions. Keys are `"code_o/propose"` and so on.
        teacher_reward: What teachers are paid. With `"paper"` the built-in kinds leave out the checks for [`GUARDS`].

    Raises:
        `ValueError`: If a number is out of range, or `prompt_style` or `reading` is no known name.
    """

    inputs_per_function: int = 10
    determinism_runs: int = 2
    prompt_style: str | None = None
    reading: str | None = None
    prompt_texts: Mapping[str, str] | None = None
    teacher_reward: str = "guarded"

    def __post_init__(self):
        check_numbers(self)
        check_bounds(self, {">= 2": "inputs_per_function", ">= 1": "determinism_runs"})
        check_choices(self, {"prompt_style": (*STYLES, None), "reading": (*READINGS, None)})


class TaskKind(ABC):
    """
    One kind of task. All methods but `configure` are pure: the same arguments give the same result, in any process.

    A proposal goes through `proposal_prompt`, `parse_proposal`, `check` and `accept`. An attempt goes through
    `solving_prompt`, `parse_attempt`, `trial` and `correct`. The sandbox runs the jobs that `check` and `trial`
    return, and its verdicts go to `accept` and `correct`. If `check` or `trial` returns `None`, nothing runs, and the
    verdict is `None`.

    A kind without the four methods of a proposal is played with `teachers=0`: students solve given tasks.
    """

    name: str
    # Names of the kinds whose archived tasks are shown to teachers as references.
    reference_kinds: tuple[str, ...] = ()
    # Whether a proposal brings its own program. If not, it is about the program of the first reference.
    writes_program = True
    # Solved tasks that students may be shown, the most instructive first.
    shots: tuple[Shot, ...] = ()
    # All keys of `complexity`. Trackers want the same metrics in every step, also in a step without a valid task.
    measures: tuple[str, ...] = ()

    def configure(self, settings: KindSettings) -> None:  # noqa: B027 - most users' kinds need nothing
        """Takes from the run's settings what this kind wants to know; nothing by default."""

    def reference_count(self, k: int) -> int:
        """Says how many archived tasks of `reference_kinds` a teacher is shown; `k` is what the run asks for."""
        return k

    def proposal_prompt(self, references: Sequence[Task], style: str) -> list[dict[str, str]]:
        """
        Writes the chat messages that ask a teacher for one proposal.

        Args:
            references: Archived tasks to show in the prompt. For a kind with [`write_proposal`] there are none in the
                style `"turns"`, where they become earlier chat turns. There is one if the proposal is about a task.
            style: `"turns"`, `"chat"` or `"compact"`.
        """
        raise NotImplementedError

    def write_proposal(self, task: Task) -> str:
        """
        Writes the completion that would have proposed `task`, for a reference that is shown as an earlier turn (style
        `"turns"`). `""` leaves this turn out. Other styles do not call this method. A kind without it shows references
        within its prompt in every style.
        """
        return ""

    def shows_turns(self, style: str) -> bool:
        """Says whether references are shown as earlier chat turns: a request for a proposal, then the proposal."""
        return style == "turns" and type(self).write_proposal is not TaskKind.write_proposal

    def parse_proposal(self, text: str, references: Sequence[Task]) -> Proposal | Refusal | Reject:
        """Reads a teacher's completion, without its end-of-turn token. Must not raise, whatever the text."""
        raise NotImplementedError

    def check(self, proposal: Proposal) -> Job | None:
        """Says what the sandbox must run to know whether the proposal is valid; `None` for nothing."""
        raise NotImplementedError

    def accept(self, proposal: Proposal, verdict: Verdict | None, rng: random.Random) -> Task | Refusal | Reject:
        """Makes a task from a proposal and its verdict, or says why it is none. `rng` decides all that is random."""
        raise NotImplementedError

    def missing_for_proposals(self) -> list[str]:
        """Lists the methods that teachers need and this kind has not. Empty if teachers can propose its tasks."""
        needed = ("proposal_prompt", "parse_proposal", "check", "accept")
        return [name for name in needed if getattr(type(self), name) is getattr(TaskKind, name)]

    @abstractmethod
    def solving_prompt(self, task: Task, style: str) -> list[dict[str, str]]:
        """Writes the chat messages that put a task to a student. They must not contain the answer."""

    @abstractmethod
    def parse_attempt(self, text: str, task: Task) -> Attempt:
        """Reads a student's completion, without its end-of-turn token. Must not raise, whatever the text."""

    @abstractmethod
    def trial(self, task: Task, attempt: Attempt) -> Job | None:
        """Says what the sandbox must run to grade an attempt; `None` if it is malformed or needs no run."""

    @abstractmethod
    def correct(self, task: Task, attempt: Attempt, verdict: Verdict | None) -> bool:
        """Says whether an attempt is right, given the verdict of its trial."""

    def identify_mistake(self, task: Task, attempt: Attempt, verdict: Verdict | None) -> str:
        """Returns the result of an attempt as a text. Wrong attempts with equal texts make the same mistake."""
        return attempt.answer

    def chance(self, task: Task) -> float:
        """
        Estimates the share of attempts that guessing would get right, from 0 to 1. A task that students solve no more
        often than by guessing counts as unsolved (see `step/pay.py`). If this method raises, 0 is taken.
        """
        return 0.0

    def guesses(self, task: Task) -> list[Attempt]:
        """
        Returns answers of somebody who has not looked at the task, the same ones each time. The referee tries them. If
        the share of right ones is higher than `chance`, this share counts instead of `chance`.
        """
        return []

    def copies(self, task: Task) -> list[Attempt]:
        """
        Returns answers that only repeat what the student is shown. The referee tries them, and refuses the task if one
        is right: students would learn to copy, which is easier than working a task out. With `teacher_reward: paper`
        nobody tries them.
        """
        return []

    def complexity(self, task: Task) -> dict[str, float]:
        """
        Measures how demanding a task is: numbers by name; none by default. Each name becomes a metric
        `curriculum/<name>` (the mean over valid tasks), a column of the archive, and a picture in the report.
        """
        return {}

    def features(self, task: Task) -> tuple[str, ...]:
        """
        Returns words for what a task uses; none by default. The words decide which tasks are rare and which are
        replayed ([`~trl_populora.tasks.features.Features`]). They must come from a fixed vocabulary: a teacher that
        can make words up is paid for making words up.
        """
        return ()


# Calls of a kind's methods. The kind may be a user's own: the types of its answers are checked, and a method that only
# estimates something may raise.


logger = logging.getLogger(__name__)


def estimate(kind: TaskKind, method: str, unknown: Any, *arguments: Any) -> Any:
    """
    Calls a kind's `method`, and returns `unknown` if it raises: a failed estimate is no reason to end a run. For each
    kind and method, the first error of each type is logged with its traceback.
    """
    try:
        return getattr(kind, method)(*arguments)
    except Exception as error:
        _warn_once(kind.name, method, type(error).__name__)
        return unknown


# The cache lets the same warning through once only.
@lru_cache
def _warn_once(kind: str, method: str, error: str) -> None:
    logger.warning(
        "task kind %r: `%s` raised %s. The run goes on without this estimate. Try the kind with "
        "`populora check-kind`.",
        *(kind, method, error),
        exc_info=True,
    )


# Names that no measure may have: they are columns of the archive, or metrics under `curriculum/`, already.
_RESERVED = {*COLUMNS, "key", "match", "solve_rate", "coverage", "entropy", "features"}
# Names of kinds and measures become parts of the names of metrics, in which a slash separates the parts.
NAME = re.compile(r"[\w.-]+")


def measure_complexity(kind: TaskKind, task: Task) -> dict[str, float]:
    """
    Asks a kind for the `complexity` of a task, and checks that the names can be metrics and columns of the archive.

    Raises:
        `TypeError`: If the kind answers with anything but a dict of numbers. The message names kind and method.
        `ValueError`: If the name of a measure is taken, or is no single word.
    """
    measures = check_type(kind.name, "complexity", estimate(kind, "complexity", {}, task), (dict,))
    for name, value in measures.items():
        if not isinstance(name, str) or not isinstance(value, Real):
            raise TypeError(
                f"task kind {kind.name!r}: `complexity` must give numbers by name, got {name!r}: {value!r:.80}"
            )
    check_measures(kind.name, "complexity", measures)
    return {name: float(value) for name, value in measures.items()}


def check_measures(kind: str, where: str, names: Iterable[str]) -> None:
    """
    Checks the names of a kind's measures.

    Args:
        kind: Name of the kind.
        where: What gives the names, `"complexity"` or `"measures"`.
        names: The names.

    Raises:
        `ValueError`: If a name is taken, or is no single word.
    """
    for name in names:
        if isinstance(name, str) and name in _RESERVED:
            raise ValueError(
                f"task kind {kind!r}: `{where}` calls a measure {name!r}, which has a meaning already. "
                "Give it another name."
            )
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(
                f"task kind {kind!r}: `{where}` calls a measure {name!r}; a name has letters, digits, `_`, `-` and "
                "`.` only."
            )


def check_type(kind: str, method: str, value: Any, wanted: tuple[type, ...]) -> Any:
    """
    Returns `value`, the answer of a kind's method, if it has one of the types `wanted`.

    Raises:
        `TypeError`: If it has not. The message names kind and method.
    """
    if not isinstance(value, wanted):
        names = " or ".join(each.__name__ for each in wanted)
        raise TypeError(f"task kind {kind!r}: `{method}` must return {names}, got {value!r:.80}")
    return value


# Control texts. Programs, hints, inputs and outputs are put into prompts unchanged, and a tokenizer reads `<|im_end|>`
# there as the token that ends a turn, whoever wrote it. So proposals with these texts are refused before anybody is
# shown them.


THINK_TAGS = ("<think>", "</think>")
# Shorter special tokens are allowed. Some tokenizers declare `!` or a blank special, and any program may hold these.
_SHORTEST = 3


def find_control_texts(tokenizer: Any) -> tuple[str, ...]:
    """
    Lists the texts that no task may contain: a tokenizer's special tokens of three characters or more, and the tags of
    a thought.

    Args:
        tokenizer: The base model's tokenizer. Added tokens that are not special are allowed: some are common words.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    return (*THINK_TAGS, *sorted(text for text in special - set(THINK_TAGS) if len(text.strip()) >= _SHORTEST))


def screen(found: Proposal | Task | Refusal, forbidden: Sequence[str]) -> Any:
    """Returns `found`, or a refusal if it is a proposal or task that holds one of the texts `forbidden`."""
    if isinstance(found, Refusal) or not (text := find_control_text(found, forbidden)):
        return found
    return Refusal(Reject.CONTROL_TOKEN, f"it holds {text!r}, which models read as a mark, not as text")


def find_control_text(found: Proposal | Task, forbidden: Sequence[str]) -> str:
    """Finds one of the texts `forbidden` in a proposal or task; empty if it holds none of them."""
    return next((text for shown in _show(found) for text in forbidden if text in shown), "")


def _show(found: Proposal | Task) -> Iterator[str]:
    """Yields every text of a proposal or task that may stand in a prompt: values as canonical text and as literal."""
    yield found.program
    yield found.message
    for text in (*found.inputs, *(found.outputs if isinstance(found, Task) else ())):
        yield text
        try:
            yield values.to_literal(values.decode(text))
        except ValueError:  # a user's own kind may keep any text
            continue
