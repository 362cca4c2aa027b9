"""Programs worked out line by line: what is followed, how it is written, and that it ends in the program's output."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from trl_populora.sandbox import Job, Sandbox, values
from trl_populora.sandbox.literals import LiteralError, read_arguments, read_literal
from trl_populora.tasks import load_seed_tasks


ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

from execution_traces import MAX_LINES, trace  # noqa: E402


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=1) as one:
        yield one


def lines_of(sandbox, program: str, *arguments) -> tuple[str, ...] | None:
    (found,) = trace([(program, values.encode(arguments, ordered=True))], sandbox)
    return found and found.lines


def ends_in(line: str, output: str) -> bool:
    """Whether the value that a last line ends in is the output."""
    told = line.removeprefix("return ")
    for text in (told, *(told[place + 3 :] for place in range(len(told)) if told.startswith(" = ", place))):
        try:
            if values.equal(read_literal(text), values.decode(output)):
                return True
        except LiteralError:
            continue
    return False


def published(name: str) -> list[tuple[str, str]]:
    path = ROOT.parent / "shared" / "data" / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name}, seed tasks published with Absolute Zero Reasoner, is not beside the clone")
    calls = []
    for row in map(json.loads, path.read_text().splitlines()):
        for given in row.get("inputs", [row.get("input")])[:2]:
            try:
                calls.append((row["snippet"], values.encode(read_arguments(given), ordered=True)))
            except ValueError:
                continue
    return calls


def seeds() -> list[tuple[str, str]]:
    return [(task.program, given) for task in load_seed_tasks() for given in task.inputs[:2]]


def check(calls, sandbox) -> float:
    """Every trace ends in the real output; returns the share of programs with an output that are followed."""
    traces = trace(calls, sandbox)
    verdicts = sandbox.run([Job(program, (given,)) for program, given in calls])
    for (program, _), found, verdict in zip(calls, traces, verdicts, strict=True):
        if found is not None:
            assert verdict.ok, program
            assert values.equal(values.decode(found.output), values.decode(verdict.outputs[0])), program
            assert ends_in(found.lines[-1], verdict.outputs[0]), (program, found.lines[-1])
            assert len(found.lines) <= MAX_LINES
    valid = [found for found, verdict in zip(traces, verdicts, strict=True) if verdict.ok]
    return sum(found is not None for found in valid) / len(valid)


def test_every_seed_task_has_a_trace_that_ends_in_its_output(sandbox):
    assert check(seeds(), sandbox) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("name", ["azr_seed_3b_coder", "azr_seed_3b_coder_code_f"])
def test_traces_of_published_programs_end_in_what_the_programs_give(name, sandbox):
    assert check(published(name), sandbox) > 0.6


FOLLOWED = {
    "values are put in": (
        "def f(s):\n    t = s.replace('z', 'h')\n    t = t[1:]\n    return len(t)",
        ("hqz",),
        ["t = 'hqz'.replace('z', 'h') = 'hqh'", "t = 'hqh'[1:] = 'qh'", "return len('qh') = 2"],
    ),
    "a loop with a branch": (
        "def f(xs, k):\n    n = 0\n    for x in xs:\n        if x > k:\n            n += x\n    return n",
        ([3, 1], 2),
        [
            "n = 0",
            "for x in [3, 1]",
            "x = 3",
            "if 3 > 2: True",
            "n = 0 + 3 = 3",
            "x = 1",
            "if 1 > 2: False",
            "return 3",
        ],
    ),
    "what changes in place": (
        "def f(xs, d):\n    xs.append(4)\n    d['k'] += xs.pop(0)\n    xs[0] = -xs[0]\n    return xs, d",
        ([1, 2], {"k": 5, "a": 0}),
        [
            "xs.append(4); xs = [1, 2, 4]",
            "d['k'] += [1, 2, 4].pop(0); xs = [2, 4]; d = {'k': 6, 'a': 0}",
            "[2, 4][0] = 2",
            "xs[0] = -2; xs = [-2, 4]",
            "return ([-2, 4], {'k': 6, 'a': 0})",
        ],
    ),
    "recursion and helpers are one step": (
        "def g(n):\n    return n * 2\n\ndef f(n):\n    if n < 2:\n        return n\n    return f(n - 1) + g(n)",
        (3,),
        ["if 3 < 2: False", "3 - 1 = 2", "f(2) = 5", "g(3) = 6", "return 5 + 6 = 11"],
    ),
    "a comprehension has a line for each item": (
        "def f(xs, k):\n    return [x * k for x in xs if x]",
        ([1, 0, 2], 3),
        [
            "if 1: True",
            "1 * 3 = 3",
            "if 0: False",
            "if 2: True",
            "2 * 3 = 6",
            "return [x * 3 for x in [1, 0, 2] if x] = [3, 6]",
        ],
    ),
    "a part stands for what it gives, one that is not computed for itself": (
        "def f(s, n):\n    t = s.strip()[0].upper()\n    return t if n > len(s) * 2 else f(t + s, n - 1)[1:]",
        (" ab", 7),
        [
            "' ab'.strip() = 'ab'",
            "'ab'[0] = 'a'",
            "t = 'a'.upper() = 'A'",
            "len(' ab') = 3",
            "3 * 2 = 6",
            "return 'A' if 7 > 6 else f(t + s, n - 1)[1:] = 'A'",
        ],
    ),
    "a sum has its additions": (
        "def f(xs, ys):\n    return sum(xs) - sum(x * 2 for x in ys)",
        ([3, -4, 5], [1, 2]),
        [
            "3 + (-4) = -1, -1 + 5 = 4",
            "sum([3, -4, 5]) = 4",
            "1 * 2 = 2",
            "2 * 2 = 4",
            "2 + 4 = 6",
            "sum((x * 2 for x in [1, 2])) = 6",
            "return 4 - 6 = -2",
        ],
    ),
    "brackets around negative numbers": (
        "def f(a):\n    return a ** 2 - a + -a",
        (-3,),
        ["(-3) ** 2 = 9", "9 - -3 = 12", "return 12 + -(-3) = 15"],
    ),
    "while, break and tuples": (
        "def f(a, b):\n    while True:\n        a, b = b, a % b\n        if not b:\n            break\n    return a",
        (4, 6),
        [
            "while True",
            "4 % 6 = 4",
            "a, b = (6, 4)",
            "if not 4: False",
            "while True",
            "6 % 4 = 2",
            "a, b = (4, 2)",
            "if not 2: False",
            "while True",
            "4 % 2 = 0",
            "a, b = (2, 0)",
            "if not 0: True",
            "break",
            "return 2",
        ],
    ),
    "a variable called _": (
        "def f(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
        (1,),
        ["a, b = (0, 1)", "for _ in range(1)", "_ = 0", "0 + 1 = 1", "a, b = (1, 1)", "return 1"],
    ),
    "the end of the body": ("def f(xs):\n    xs.sort()", ([2, 1],), ["xs.sort(); xs = [1, 2]", "return None"]),
    "sets and counters": (
        "from collections import Counter\n\ndef f(s):\n    c = Counter(s)\n    t = set(s)\n    return len(c) + len(t)",
        ("bab",),
        ["c = Counter('bab') = {'b': 2, 'a': 1}", "t = set('bab') = {'a', 'b'}"]
        + ["len({'b': 2, 'a': 1}) = 2", "len({'a', 'b'}) = 2", "return 2 + 2 = 4"],
    ),
}


@pytest.mark.parametrize("case", FOLLOWED.values(), ids=FOLLOWED.keys())
def test_a_trace_reads_line_by_line(case, sandbox):
    program, given, expected = case
    assert list(lines_of(sandbox, program, *given)) == expected


@pytest.mark.parametrize(
    ("program", "given"),
    [
        ("def f(n):\n    for i in range(n):\n        n += 1\n    return n", (50,)),
        ("def f(s):\n    t = s * 100\n    return len(t)", ("ab",)),
        ("def f(s):\n    try:\n        return int(s)\n    except ValueError:\n        return 0", ("a",)),
        ("def f(n):\n    yield n", (1,)),
        ("def f(n):\n    it = iter([n])\n    return next(it)", (1,)),
        ("def f(n):\n    return 1 // n", (0,)),
        ("def f(n):\n    while True:\n        pass", (0,)),
        ("def g(n):\n    return n", (0,)),
        ("not Python", (0,)),
    ],
    ids=["lines", "value", "try", "yield", "no plain data", "error", "endless", "no f", "no program"],
)
def test_what_does_not_fit_is_left_out(program, given, sandbox):
    assert lines_of(sandbox, program, *given) is None
