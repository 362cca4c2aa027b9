"""Solved tasks that ship with the code kinds: what small models are shown before their own (solve).

They show the format alone: shown a line of reasoning as well, a 135M rambled and forgot the answer (1 of 16 readable).
Models that reason by themselves are large enough to be shown none.
"""

from __future__ import annotations

from typing import Any

from trl_populora.sandbox import values

from .base import Shot, Task
from .templates import fence


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


def _shot(task: Task, language: str, answer: str) -> Shot:
    return Shot(task, fence((language, answer)))


CODE_O = (
    _shot(_task("code_o", _REVERSE, (("planet", 3), "ten")), "output", "'ten'"),
    _shot(_task("code_o", _TALLY, (([4, 7, 10, 3],), 12)), "output", "12"),
    _shot(
        _task("code_o", _LENGTHS, ((["a", "to", "be", "sea"],), {1: 1, 2: 2, 3: 1})), "output", "{1: 1, 2: 2, 3: 1}"
    ),
)

CODE_I = (
    _shot(_task("code_i", _SQUARE, ((5,), 24)), "input", "5"),
    _shot(_task("code_i", _JOIN, (("ada", "hill"), "HILL, a.")), "input", "'a', 'hill'"),
    _shot(_task("code_i", _INSERT, (([9, 1], 3), [1, 6, 9])), "input", "[1, 9], 3"),
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
        "python",
        _FIRSTS,
    ),
)
