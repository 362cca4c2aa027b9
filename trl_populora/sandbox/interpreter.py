"""Guards around what another interpreter would answer otherwise: versions, limits, the insides of objects (verify).

No repetition on one host sees these. A limit that a program runs into is another in every run, so that what it makes
of it differs; what the language leaves open is stopped where the program's text asks for it.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from typing import Any


LOWEST, HIGHEST = (3, 10), (3, sys.maxsize)  # versions of Python that a run may meet
_DEEPER = 1037  # frames by which each run's limit is above the one before
_DIGITS = 4300  # Python's own limit for the decimal text of an integer
# Left to the interpreter by the language; what a code object has from the program's text alone is not among them.
INSIDES = frozenset(
    [
        *(f"co_{name}" for name in ("code", "consts", "exceptiontable", "flags", "lines", "linetable", "lnotab")),
        *(f"co_{name}" for name in ("names", "nlocals", "positions", "qualname", "stacksize", "varnames")),
        *(f"__{name}__" for name in ("basicsize", "dictoffset", "flags", "itemsize", "sizeof", "weakrefoffset")),
        *("f_lasti", "tb_lasti", "_co_code_adaptive"),
    ]
)
_IN_TEXT = re.compile(rf"(?<!\w)(?:{'|'.join(sorted(INSIDES))})(?!\w)")
_LIMITS = ("getrecursionlimit", "setrecursionlimit", "get_int_max_str_digits", "set_int_max_str_digits")
_FACTS = ("copyright", "hash_info", "hexversion", "implementation", "int_info", "version")


def asks_inside(code: types.CodeType) -> str:
    """The first attribute out of `INSIDES` that compiled code names, also in a text; empty if there is none."""
    found = INSIDES.intersection(code.co_names)
    if found:
        return min(found)
    for each in code.co_consts:
        if isinstance(each, str) and (match := _IN_TEXT.search(each)):
            return match[0]
        if isinstance(each, types.CodeType) and (inside := asks_inside(each)):
            return inside
    return ""


def guarded_getattr(stop: Callable[[str], None]) -> Callable:
    """`getattr`, whose name may be put together while the program runs."""
    real = getattr

    def guarded(value: object, name: str, /, *default: object) -> object:
        if name in INSIDES:
            stop(f"{name} hangs on the interpreter")
        return real(value, name, *default)

    guarded.__name__ = "getattr"
    return guarded


class Version:
    """`sys.version_info`, of which a program may ask what all versions of Python that a run may meet answer alike."""

    __slots__ = ("_stop",)
    major = 3

    def __init__(self, stop: Callable[[], Any]):
        self._stop = stop

    def _agreed(self, ask: Callable[[tuple, tuple], bool], other: tuple) -> bool:
        lowest, highest = ask(LOWEST, other), ask(HIGHEST, other)
        return lowest if lowest == highest else self._stop()

    def __lt__(self, other: tuple) -> bool:
        return self._agreed(tuple.__lt__, other)

    def __le__(self, other: tuple) -> bool:
        return self._agreed(tuple.__le__, other)

    def __gt__(self, other: tuple) -> bool:
        return self._agreed(tuple.__gt__, other)

    def __ge__(self, other: tuple) -> bool:
        return self._agreed(tuple.__ge__, other)

    def __getitem__(self, place: int | slice) -> Any:
        if place == 0:
            return self.major
        return self if isinstance(place, slice) and not place.start and (place.stop or 2) > 1 else self._stop()

    def __getattr__(self, name: str) -> Any:
        return self._stop()

    def _stopped(self, *_: object) -> Any:
        return self._stop()

    __eq__ = __ne__ = __hash__ = __iter__ = __len__ = __repr__ = __str__ = __format__ = _stopped  # type: ignore


class Limits:
    """The limits of recursion and of integers' texts: what the program has set, and what holds in this run."""

    def __init__(self) -> None:
        self.run = 0
        self.recursion, self.digits = sys.getrecursionlimit(), _DIGITS

    def start(self, run: int) -> None:
        """Sets the limits of run number `run`: from the second on others, so that reaching one shows."""
        self.run = run
        sys.setrecursionlimit(self.recursion + _DEEPER * run)
        if hasattr(sys, "set_int_max_str_digits"):
            sys.set_int_max_str_digits(0 if run else _DIGITS)

    def getrecursionlimit(self) -> int:
        return self.recursion

    def setrecursionlimit(self, limit: int, /) -> None:
        sys.setrecursionlimit(min(limit + _DEEPER * self.run, 2**31 - 1) if limit > 0 else limit)
        self.recursion = limit

    def get_int_max_str_digits(self) -> int:
        return self.digits

    def set_int_max_str_digits(self, maxdigits: int) -> None:
        sys.set_int_max_str_digits(maxdigits)
        self.digits = maxdigits


def guard_sys(facade: type, limits: Limits, stop: Callable[[str], Any]) -> None:
    """Gives a class of `sys` modules the guarded attributes."""
    given: dict[str, object] = {name: getattr(limits, name) for name in _LIMITS}
    given["version_info"] = Version(lambda: stop("sys.version_info hangs on the interpreter"))
    for name in given:
        setattr(facade, name, property(lambda self, name=name: given[name]))  # type: ignore[misc]
    for name in _FACTS:
        setattr(facade, name, property(lambda self, name=name: stop(f"sys.{name} hangs on the interpreter")))  # type: ignore[misc]
