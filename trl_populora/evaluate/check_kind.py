"""Tests a kind of task without a model: in a test of your own, or as `populora check-kind`.

A run would meet a fault of the kind hours after its start, in a text that some model happens to write. So this file
plays the part of the model: it hands the kind more than a thousand texts, most of them mangled.
"""

from __future__ import annotations

import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trl_populora.sandbox import Sandbox
from trl_populora.step.referee import Referee, Written
from trl_populora.tasks import STYLES, Proposal, Refusal, Reject, Task, TaskArchive, TaskKind
from trl_populora.tasks.features import name_features
from trl_populora.tasks.kind import measure_complexity


TEXTS = 1000  # number of mangled texts that the kind must read
RUNS = 100  # most proposals that the sandbox runs, and most answers to one task that are graded
SECONDS = 5  # within which the kind must read one text twice
# Texts that break parsers: control characters, numbers that Python reads and others do not, tags, unfinished fences,
# and in the last line inputs of a size or depth at which a careless parser is slow or overflows the stack.
HOSTILE = ["", " ", "\x00", "\ud800", "²", "İ", "-0", "1e999", "nan", "1_0", "<think>", "<|im_end|>", "```python\n"]
HOSTILE += ["'", "\\", "{}", "%s", "\r\n", "()", "[[", '{"a": 1}', "9**9**9", "__import__('os')._exit(0)", "f(1)"]
HOSTILE += ["(" * 5000, "[" * 100_000, "9" * 10_000, "a" * 300_000, " " * 100_000, "```\n" * 5000, "1 " * 50_000]


def check_kind(kind: TaskKind, tasks: Sequence[Task] = (), say: Callable[[str], object] = str) -> list[str]:
    """
    Plays a configured kind and returns the problems, one sentence each.

    The kind writes its prompts and judges the given tasks. It reads more than a thousand texts that a model might
    write: as proposals, and as answers to at most three tasks. A kind without the methods of a proposal reads them
    only as answers.

    Args:
        kind: The kind.
        tasks: Tasks of this kind, which the kind must accept, and tasks of other kinds. Prompts for teachers show
            tasks of the kind's `reference_kinds`.
        say: Receives the prompts, and how many texts could be read as proposals.
    """
    missing = kind.missing_for_proposals()
    if gaps := _find_gaps(kind, tasks, missing):
        return gaps
    problems, rng, archive, shown = dict[str, str](), random.Random(0), TaskArchive(), list[Task]()
    own, texts = [task for task in tasks if task.kind == kind.name], HOSTILE.copy()
    for task in tasks:
        archive.add(task)
    with Sandbox() as sandbox:
        # 1. Prompts in every style. Their paragraphs are also texts to mangle.
        referee = Referee({kind.name: kind}, sandbox, STYLES[0])
        for style in STYLES:
            with _note_problems(kind, problems):
                referee.style = style  # `draw_references` reads it
                shown = referee.draw_references(kind, archive, 6, rng)
                proposing = [] if missing else [referee.proposal_prompt(kind, shown)[0]]
                prompts = [*proposing, *map(referee.solving_prompt, own[:1])]
                told = ["\n".join("{role}: {content}".format(**each) for each in prompt) for prompt in prompts]
                say("\n\n".join([f"--- prompts in the style {style}", *told]))
                texts += "\n\n".join(told).split("\n\n")
        # 2. Given tasks: the kind must accept them with the same outputs, and read the proposals that it writes.
        for task in own:
            with _note_problems(kind, problems, task):
                texts += [task.program, *task.inputs, *task.outputs, kind.write_proposal(task)]
                if not missing:
                    _judge_given(kind, task, referee, texts[-1])
        # 3. All these texts, and mangled ones, as proposals. The first `RUNS` that can be read go to the sandbox.
        texts += [_mangle(rng.choice(texts), rng) for _ in range(TEXTS)]
        formed = [] if missing else _read_twice(kind, problems, "parse_proposal", texts, shown)
        made = list[Task]()
        for text in formed[:RUNS]:
            with _note_problems(kind, problems, text):
                made += [t for t in referee.judge([Written(kind.name, text, shown)], rng) if isinstance(t, Task)]
        # 4. The methods that a run calls for each task. Then all texts as answers to the first three tasks.
        for task in (*own, *made):
            with _note_problems(kind, problems, task):
                _check_estimates(kind, task, referee)
        for task in (*own, *made)[:3]:
            for text in _read_twice(kind, problems, "parse_attempt", texts, task)[:RUNS]:
                with _note_problems(kind, problems, text):
                    referee.grade([task], [text])
    became = f"{len(formed)} were read as proposals; {len(made)} of the first {RUNS} became tasks"
    say(f"--- {len(texts)} texts: {'read as attempts alone' if missing else became}")
    return list(problems.values())


def _find_gaps(kind: TaskKind, tasks: Sequence[Task], missing: Sequence[str]) -> list[str]:
    """
    Finds what keeps a kind from being played: it has some methods of a proposal but not all four, or it has none of
    them and no task of the kind is given.
    """
    if 0 < len(missing) < 4:
        return [f"{', '.join(f'`{name}`' for name in missing)} missing: teachers need all four methods of a proposal"]
    if missing and not any(task.kind == kind.name for task in tasks):
        return [f"no task of the kind {kind.name!r} was given, and without the methods of a proposal it makes none"]
    return []


class TooSlow(BaseException):
    """Rings in a parser, which may catch every `Exception`."""


@contextmanager
def _note_problems(kind: TaskKind, problems: dict[str, str], *given: Any) -> Iterator[None]:
    """
    Notes an error of the block as a problem and goes on.

    Args:
        kind: The kind. The problem names the method of the kind that raised.
        problems: The problems noted so far. The key of each is its text before the value received, so that the same
            problem with another value is not noted again.
        given: What the block worked on; the problem quotes it.
    """
    try:
        yield
    except (Exception, SystemExit, TooSlow) as error:
        what = str(error).removeprefix(f"task kind {kind.name!r}: ")
        file = getattr(sys.modules.get(type(kind).__module__), "__file__", None)  # a notebook's classes have none
        if not what.startswith("`"):  # messages of the package's own checks start with a name in backticks
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if frame.filename == file] or frames[-1:]
            what = f"`{own[0].name}` raised {type(error).__name__} ({own[-1].filename}:{own[-1].lineno}), got {error}"
        problems.setdefault(what.partition(", got ")[0], what + "".join(f", for {each!r:.120}" for each in given))


def _read_twice(kind: TaskKind, problems: dict, method: str, texts: Sequence[str], about: Any) -> list[str]:
    """
    Lets the kind read each text twice; returns the texts that it could read.

    Notes a problem if the two readings differ, because a run reads a text more than once. Also notes one if a reading
    raises, or if both together take more than `SECONDS`.

    Args:
        kind: The kind.
        problems: Takes the problems.
        method: `"parse_proposal"` or `"parse_attempt"`.
        texts: The texts.
        about: The second argument of the method: a teacher's references or a student's task.
    """

    def end(number: int, frame: Any) -> None:
        raise TooSlow(f"more than {SECONDS} seconds")

    formed, before = list[str](), signal.signal(signal.SIGALRM, end)
    try:
        for text in texts:
            with _note_problems(kind, problems, text):
                signal.alarm(SECONDS)  # a run parses in the trainer's own process, where nothing ends a slow parser
                found, again = (getattr(kind, method)(text, about) for _ in range(2))
                signal.alarm(0)
                if found != again:
                    raise ValueError(
                        f"`{method}` must read a text the same each time, got {found!r:.80} and {again!r:.80}"
                    )
                formed += [text] * getattr(found, "well_formed", not isinstance(found, Reject | Refusal))
    finally:
        # The caller's handler comes back even after Ctrl-C, which is no problem of the kind and ends the loop.
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return formed


def _judge_given(kind: TaskKind, task: Task, referee: Referee, written: str) -> None:
    """Checks that `accept` finds a task's outputs again, and `parse_proposal` reads what `write_proposal` wrote."""
    proposal = Proposal(task.kind, task.program, task.inputs, task.message)
    (found,) = referee.verify([(task.kind, proposal)], random.Random(0))
    if not isinstance(found, Task) or sorted(found.outputs) != sorted(task.outputs):
        raise ValueError(f"`accept` must return a task with the outputs of the given task, got {found!r:.200}")
    if written and not isinstance(kind.parse_proposal(written, [task]), Proposal):
        raise ValueError(f"`parse_proposal` must read what `write_proposal` wrote, got {written!r:.80}")


def _check_estimates(kind: TaskKind, task: Task, referee: Referee) -> None:
    """Checks the methods that a run calls for a task: `chance`, `guesses`, `copies`, `complexity` and `features`."""
    # If one of these four raises in a run, the run logs the error and goes on without the value. Here it raises.
    # An error of `features` ends a run, too.
    for method in ("chance", "guesses", "copies", "complexity"):
        getattr(kind, method)(task)
    if not 0 <= (chance := referee.chances([task])[0]) <= 1:
        raise ValueError(f"`chance` must lie between 0 and 1, got {chance}")
    if extra := measure_complexity(kind, task).keys() - set(kind.measures):
        raise ValueError(f"`measures` must name what `complexity` measures, got {sorted(extra)} as well")
    name_features(kind, task)


def _mangle(text: str, rng: random.Random) -> str:
    """Replaces up to 12 characters of a text by a hostile piece, a copy of a neighbouring piece, or any character."""
    start, length = rng.randint(0, len(text)), rng.randint(0, 12)
    piece = rng.choice([*HOSTILE[:25], "7", text[start : start + 12], chr(rng.randrange(0x3000))])
    return text[:start] + piece + text[start + length :]
