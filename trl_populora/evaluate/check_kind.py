"""Tries a kind of task before a run does, without a model: in a test of your own, or as `populora check-kind`."""

from __future__ import annotations

import inspect
import random
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trl_populora.sandbox import Sandbox
from trl_populora.step.referee import Referee, Written
from trl_populora.tasks import STYLES, Proposal, Refusal, Reject, Task, TaskArchive, TaskKind
from trl_populora.tasks.kind import measure_complexity


TEXTS, RUNS, SECONDS = 1000, 100, 5  # changed texts; how many of those that parse run; for a parser to read one
HOSTILE = ["", " ", "\x00", "\ud800", "²", "İ", "-0", "1e999", "nan", "1_0", "<think>", "<|im_end|>", "```python\n"]
HOSTILE += ["'", "\\", "{}", "%s", "\r\n", "()", "[[", '{"a": 1}', "9**9**9", "__import__('os')._exit(0)", "f(1)"]
HOSTILE += ["(" * 5000, "[" * 100_000, "9" * 10_000, "a" * 300_000, " " * 100_000, "```\n" * 5000, "1 " * 50_000]


def check_kind(kind: TaskKind, tasks: Sequence[Task] = (), say: Callable[[str], object] = str) -> list[str]:
    """
    Plays a configured kind and returns what is wrong, a sentence each: it writes its prompts, judges the given tasks,
    and reads a thousand texts that a model might write, as proposals and as answers.

    Args:
        kind: The kind.
        tasks: Tasks of this kind, which it has to accept, and tasks of other kinds that its teachers are shown.
        say: Receives the prompts, and how many of the texts were read.
    """
    problems, rng, archive, shown = dict[str, str](), random.Random(0), TaskArchive(), list[Task]()
    own, texts = [task for task in tasks if task.kind == kind.name], HOSTILE.copy()
    for task in tasks:
        archive.add(task)
    with Sandbox() as sandbox:
        referee = Referee({kind.name: kind}, sandbox, STYLES[0])
        for style in STYLES:
            with _noting(kind, problems):
                referee.style, shown = style, referee.draw_references(kind, archive, 6, rng)
                prompts = [referee.proposal_prompt(kind, shown)[0], *map(referee.solving_prompt, own[:1])]
                told = ["\n".join("{role}: {content}".format(**each) for each in prompt) for prompt in prompts]
                say("\n\n".join([f"--- prompts in the style {style}", *told]))
                texts += "\n\n".join(told).split("\n\n")
        for task in own:
            with _noting(kind, problems, task):
                texts += [task.program, *task.inputs, *task.outputs, kind.write_proposal(task)]
                _judge_given(kind, task, referee, texts[-1])
        texts += [_change(rng.choice(texts), rng) for _ in range(TEXTS)]
        formed, made = _read(kind, problems, "parse_proposal", texts, shown), list[Task]()
        for text in formed[:RUNS]:
            with _noting(kind, problems, text):
                made += [t for t in referee.judge([Written(kind.name, text, shown)], rng) if isinstance(t, Task)]
        for task in (*own, *made):
            with _noting(kind, problems, task):
                _estimate(kind, task, referee)
        for task in (*own, *made)[:3]:
            for text in _read(kind, problems, "parse_attempt", texts, task)[:RUNS]:
                with _noting(kind, problems, text):
                    referee.grade([task], [text])
    say(f"--- {len(texts)} texts: {len(formed)} were read as proposals; {len(made)} of the first {RUNS} became tasks")
    return list(problems.values())


@contextmanager
def _noting(kind: TaskKind, problems: dict[str, str], *given: Any) -> Iterator[None]:
    """Makes an error of the block a problem, with the method of the kind that raised it; each line of it once."""
    try:
        yield
    except (Exception, SystemExit) as error:
        what, file = str(error).removeprefix(f"task kind {kind.name!r}: "), inspect.getfile(type(kind))
        if not what.startswith("`"):
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if frame.filename == file] or frames[-1:]
            what = f"`{own[0].name}` raised {type(error).__name__} ({own[-1].filename}:{own[-1].lineno}), got {error}"
        problems.setdefault(what.partition(", got ")[0], what + "".join(f", for {each!r:.120}" for each in given))


def _read(kind: TaskKind, problems: dict, method: str, texts: Sequence[str], about: Any) -> list[str]:
    """Reads each text twice, which must give the same; returns those that are not refused."""

    def end(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} seconds")

    formed, before = list[str](), signal.signal(signal.SIGALRM, end)
    for text in texts:
        with _noting(kind, problems, text):
            signal.alarm(SECONDS)  # the parser runs in the trainer's own process, where nothing would stop it
            found, again = (getattr(kind, method)(text, about) for _ in range(2))
            if found != again:
                raise ValueError(f"`{method}` must read a text always alike, got {found!r:.80} and {again!r:.80}")
            formed += [text] * getattr(found, "well_formed", not isinstance(found, Reject | Refusal))
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    return formed


def _judge_given(kind: TaskKind, task: Task, referee: Referee, written: str) -> None:
    proposal = Proposal(task.kind, task.program, task.inputs, task.message)
    (found,) = referee.verify([(task.kind, proposal)], random.Random(0))
    if not isinstance(found, Task) or sorted(found.outputs) != sorted(task.outputs):
        raise ValueError(f"`accept` must make the same of a given task, got {found!r:.200}")
    if written and not isinstance(kind.parse_proposal(written, [task]), Proposal):
        raise ValueError(f"`parse_proposal` must read what `write_proposal` wrote, got {written!r:.80}")


def _estimate(kind: TaskKind, task: Task, referee: Referee) -> None:
    """Asks what a run does without where it raises: directly, and as a run does."""
    for method in ("chance", "guesses", "copies", "complexity"):
        getattr(kind, method)(task)
    if not 0 <= (chance := referee.chances([task])[0]) <= 1:
        raise ValueError(f"`chance` must lie between 0 and 1, got {chance}")
    if extra := measure_complexity(kind, task).keys() - set(kind.measures):
        raise ValueError(f"`measures` must name what `complexity` measures, got {sorted(extra)} beside")
    if not all(isinstance(word, str) for word in kind.features(task)):
        raise ValueError("`features` must be words")


def _change(text: str, rng: random.Random) -> str:
    start, length = rng.randint(0, len(text)), rng.randint(0, 12)
    piece = rng.choice([*HOSTILE[:25], "7", text[start : start + 12], chr(rng.randrange(0x3000))])
    return text[:start] + piece + text[start + length :]
