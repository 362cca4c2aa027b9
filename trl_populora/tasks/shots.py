"""Solved tasks that ship with the code kinds: what small models are shown before their own (phase 4).

They show the format, and that an answer is worked out before it is written. Seeds hold none of them, and no teacher is
paid for proposing one.
"""

from __future__ import annotations

from typing import Any

from trl_populora.sandbox import values

from .base import Shot, Task
from .templates import fenced


_REVERSE = """\
def f(s, k):
    out = ''
    for ch in s:
        out = ch + out
    return out[:k]"""
_TALLY = """\
def f(numbers):
    total = 0
    for n in numbers:
        if n % 2 == 0:
            total += n
        else:
            total -= 1
    return total"""
_LENGTHS = """\
def f(words):
    counts = {}
    for word in words:
        counts[len(word)] = counts.get(len(word), 0) + 1
    return counts"""
_INSERT = """\
def f(items, n):
    items.append(n * 2)
    return sorted(items)"""
_JOIN = """\
def f(first, last):
    return last.upper() + ', ' + first[0] + '.'"""
_SQUARE = """\
def f(x):
    return x * x - 1"""

_FIRSTS = """\
def f(words):
    return [word[0] for word in words]"""


def _task(kind: str, program: str, *calls: tuple[tuple, Any], message: str = "", visible: int = 0) -> Task:
    """Of calls as pairs of arguments and what is returned."""
    inputs = tuple(values.encode(given, ordered=True) for given, _ in calls)
    return Task(kind, program, inputs, tuple(values.encode(returned) for _, returned in calls), message, visible)


def _shot(task: Task, reasoning: str, fence: str, answer: str) -> Shot:
    return Shot(task, f"{reasoning}\n\n{fenced((fence, answer))}")


CODE_O = (
    _shot(
        _task("code_o", _REVERSE, (("planet", 3), "ten")),
        "Each letter is put before the others, so out is 'planet' backwards: 'tenalp'. Its first 3 letters are 'ten'.",
        "output",
        "'ten'",
    ),
    _shot(
        _task("code_o", _TALLY, (([4, 7, 10, 3],), 12)),
        "total is 0. 4 is even: 0 + 4 = 4. 7 is odd: 4 - 1 = 3. 10 is even: 3 + 10 = 13. 3 is odd: 13 - 1 = 12.",
        "output",
        "12",
    ),
    _shot(
        _task("code_o", _LENGTHS, ((["a", "to", "be", "sea"],), {1: 1, 2: 2, 3: 1})),
        "'a' has 1 letter: {1: 1}. 'to' has 2: {1: 1, 2: 1}. 'be' has 2: {1: 1, 2: 2}. 'sea' has 3: "
        "{1: 1, 2: 2, 3: 1}.",
        "output",
        "{1: 1, 2: 2, 3: 1}",
    ),
)

CODE_I = (
    _shot(
        _task("code_i", _SQUARE, ((5,), 24)),
        "x * x - 1 must be 24, so x * x is 25. 5 * 5 = 25, so x can be 5.",
        "input",
        "5",
    ),
    _shot(
        _task("code_i", _JOIN, (("ada", "hill"), "HILL, a.")),
        "'HILL' is last in capitals, so last can be 'hill'. The letter before the dot is the first of first, so first "
        "can be 'a'.",
        "input",
        "'a', 'hill'",
    ),
    _shot(
        _task("code_i", _INSERT, (([9, 1], 3), [1, 6, 9])),
        "The result holds n * 2 and the items. n can be 3, which adds 6. Then the items are 1 and 9.",
        "input",
        "[1, 9], 3",
    ),
)

CODE_F = (
    _shot(
        _task(
            "code_f",
            _SQUARE,
            *(((2,), 3), ((5,), 24), ((0,), -1), ((3,), 8)),
            message="one less than the square",
            visible=2,
        ),
        "2 gives 3 = 2 * 2 - 1, and 5 gives 24 = 5 * 5 - 1.",
        "python",
        _SQUARE,
    ),
    _shot(
        _task(
            "code_f",
            _FIRSTS,
            *(((["cat", "dog"],), ["c", "d"]), ((["up"],), ["u"]), ((["a", "be"],), ["a", "b"]), (([],), [])),
            message="the beginnings of the words",
            visible=2,
        ),
        "Every word gives its first letter, in order.",
        "python",
        _FIRSTS,
    ),
)
