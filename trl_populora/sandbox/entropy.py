"""Guards what differs between two runs of a program, or between two interpreters.

*Between runs*: clocks, hashes and addresses. `make_facades` gives programs guarded copies of `time` and `datetime`, in
which arithmetic on given dates still works. Some allowed modules hold a forbidden module as an attribute; programs get
copies of them that lack the attribute. `make_builtins` guards `hash` and `id`.

*Between interpreters*: versions, limits and the insides of objects. Repeated runs on one host would not show these, so
a program is stopped if its text names something that the language leaves open (`INSIDES`). Every run after the
first also has other limits of recursion and of the digits of integers. A program that reaches a limit then gives
another result.
"""

from __future__ import annotations

import abc
import datetime
import re
import sys
import time
import types
from collections.abc import Callable
from typing import Any


Stop = Callable[[str], None]

_OPEN = ("calendar", "statistics")  # they hold the real modules `datetime` and `random`
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")


def _make_stopper(stop: Stop, name: str) -> Callable:
    """Makes a function that stops the program when it is called."""

    def stopped(*_: object, **__: object) -> None:
        stop(f"{name} differs from run to run")

    stopped.__name__ = name.rpartition(".")[2].rstrip("()")
    return stopped


def _copy(module: types.ModuleType) -> Any:
    """Copies a module, without the modules that it has imported for itself."""
    facade = types.ModuleType(module.__name__, module.__doc__)
    for name, value in vars(module).items():
        if not isinstance(value, types.ModuleType) and not name.startswith("__"):
            setattr(facade, name, value)
    return facade


def make_facades(stop: Stop) -> dict[str, types.ModuleType]:
    """Makes the guarded copies of modules, by module name."""
    copies = {name: _copy(sys.modules[name]) for name in _OPEN if name in sys.modules}
    guarded = {"time": _guard_time(stop), "datetime": _guard_datetime(stop)}
    if "calendar" in copies:
        copies["calendar"].datetime = guarded["datetime"]
    return guarded | copies


def _guard_time(stop: Stop) -> types.ModuleType:
    """Copies `time` and guards its clocks. Functions that are given a time still work."""
    facade = _copy(time)
    for name in _CLOCKS:
        setattr(facade, name, _make_stopper(stop, f"time.{name}()"))
        setattr(facade, f"{name}_ns", _make_stopper(stop, f"time.{name}_ns()"))

    def demand_time(name: str, position: int) -> Callable:
        """Makes a function that stops the program unless it is given a time as the argument at `position`."""
        function = getattr(time, name)

        def guarded(*arguments: object) -> object:
            if len(arguments) <= position or arguments[position] is None:
                stop(f"time.{name}() without a time differs from run to run")
            return function(*arguments)

        return guarded

    facade.sleep = lambda seconds, /: None  # returns at once: a program without a clock cannot notice
    for name, position in (("localtime", 0), ("gmtime", 0), ("ctime", 0), ("asctime", 0), ("strftime", 1)):
        setattr(facade, name, demand_time(name, position))
    return facade


def _guard_datetime(stop: Stop) -> types.ModuleType:
    """Copies `datetime` and guards `now`, `utcnow` and `today`."""

    guarded: list[Any] = []

    class Meta(abc.ABCMeta):  # so that a program's class may have a date and `ABC` as bases
        # The standard library makes plain dates. They must count as instances of the program's guarded `date`.
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, cls.__mro__[1]) if cls in guarded else super().__instancecheck__(value)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, cls.__mro__[1]) if cls in guarded else super().__subclasscheck__(other)

    def guard(base: type, clocks: tuple[str, ...], **methods: Callable) -> Any:
        """
        Makes a subclass that looks like its base. Its methods named in `clocks`, such as `now`, stop the program when
        they are called.
        """
        plain_repr: Callable = base.__repr__
        body: dict[str, Any] = {name: classmethod(_make_stopper(stop, f"{base.__name__}.{name}()")) for name in clocks}
        # Python writes the module in front of its own classes only.
        body["__repr__"] = lambda self: "datetime." * (type(self) in guarded) + plain_repr(self)
        body["__module__"] = "datetime"
        guarded.append(Meta(base.__name__, (base,), body | methods))
        return guarded[-1]

    def to_date(self: datetime.datetime) -> datetime.date:
        return date(self.year, self.month, self.day)

    facade = _copy(datetime)
    date = facade.date = guard(datetime.date, ("today",))
    facade.datetime = guard(datetime.datetime, ("now", "utcnow", "today"), date=to_date)
    for kind in guarded:
        kind.min, kind.max = (kind.fromisoformat(each.isoformat()) for each in (kind.min, kind.max))
    return facade


# Hash functions whose result depends on the process: on its hash seed, or on an address.
_SEEDED = {
    kind.__hash__ for kind in (str, bytes, object, memoryview, type(None), type, type(len), type(lambda: 0), type(...))
}


def _has_stable_hash(value: Any) -> bool:
    """Says whether a value has the same hash in every process, as far as its type and its elements' types tell."""
    kind = type(value)
    if kind in (tuple, frozenset):
        return all(map(_has_stable_hash, value))
    if kind in (float, complex):
        return value == value  # false for nan, whose hash is its address
    return kind.__hash__ not in _SEEDED


class Address(int):
    """
    The base class of the objects that the guarded `hash` and `id` return.

    In two cases the two functions return plain numbers instead: when a `__hash__` of the program calls them, and when
    `hash` gets an `int` or `bool`.
    """

    __slots__ = ()


# Attributes that would turn an address into a number, an order or a text: all that `int` has and `object` has not, and
# the methods named below.
_ADDRESS_USES = {*dir(int)} - {*dir(object)} | {
    f"__{name}__" for name in ("lt", "le", "gt", "ge", "str", "repr", "format", "reduce", "reduce_ex")
}
_INNER = frozenset(("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>", "<lambda>"))  # code inside a function
_FIRST_ADDRESS = 1 << 40  # far from numbers that programs compare an address with, such as -1 and 0
_ADDRESS_STEP = 1_000_003  # a prime: steps of a power of two would give an address the same last bits in every run


def make_builtins(stop: Stop, limits: Limits) -> dict[str, Callable]:
    """
    Makes guarded versions of `hash` and `id`.

    A program may use their results as keys of dicts and compare them for equality. It is stopped when it uses a result
    through an attribute in `_ADDRESS_USES`, and when it asks for a hash that differs between processes.
    """
    real_hash, real_id = hash, id
    # Functions in C, such as `operator.index`, read the number inside an [`Address`] and call none of its guards. If
    # that number were the real address, it could be the same in two forked children, and the runs would agree. So
    # `id` makes its numbers up, and each run has other numbers.
    numbers: dict[int, int] = {}

    def is_within_hash() -> bool:
        # A `__hash__` that the program defines gets plain numbers from `hash` and `id`, so that it may combine them.
        # When the program then calls `hash(x)` from outside that method, this call is guarded. A direct call of
        # `x.__hash__()` is not guarded. But it makes the trainer ask for more runs (`_ORDER_NAMES` in child.py).
        frame: Any = sys._getframe(2)
        # If the method hands a generator out, the frame below the generator's is that of the function that reads it.
        while frame.f_code.co_name in _INNER:
            frame = frame.f_back
        return frame.f_code.co_name == "__hash__"

    def guarded_hash(value: object, /) -> int:
        if not is_within_hash():
            if not _has_stable_hash(value):
                stop(f"hash() of {type(value).__name__} differs from run to run")
            return GuardedAddress(real_hash(value)) if type(value) not in (int, bool) else real_hash(value)
        return real_hash(value)

    class GuardedAddress(Address):
        __slots__ = ()

    def stop_use(*_: object, **__: object) -> None:
        stop("hash() and id() give nothing to compute with: they depend on this Python or on this run")

    for name in _ADDRESS_USES:
        # Special methods must be functions. If they were properties that raise, Python would ignore the exceptions.
        setattr(GuardedAddress, name, stop_use if name.startswith("__") else property(stop_use))

    def guarded_id(value: object, /) -> int:
        step = _ADDRESS_STEP * (1 + limits.run)
        number = numbers.setdefault(real_id(value), _FIRST_ADDRESS + step * (1 + len(numbers)))
        return number if is_within_hash() else GuardedAddress(number)

    guarded_hash.__name__, guarded_id.__name__ = "hash", "id"
    return {"hash": guarded_hash, "id": guarded_id}


LOWEST, HIGHEST = (3, 10), (3, sys.maxsize)  # versions of Python that a program may run on
_DEEPER = 1037  # how many more frames of recursion each run of a job allows than the run before
_DIGITS = 4300  # Python's own limit for the decimal digits of an integer
# Attributes that differ between interpreters. An attribute that follows from the program's text, such as `co_name`, is
# not among them.
INSIDES = frozenset(
    [
        *(f"co_{name}" for name in ("code", "consts", "exceptiontable", "flags", "lines", "linetable", "lnotab")),
        *(f"co_{name}" for name in ("names", "nlocals", "positions", "qualname", "stacksize", "varnames")),
        *(f"__{name}__" for name in ("basicsize", "dictoffset", "flags", "itemsize", "sizeof", "weakrefoffset")),
        *("f_lasti", "tb_lasti", "_co_code_adaptive"),
    ]
)
# Finds a name of `INSIDES` in a string of the program, which may hand the string to `eval` or `getattr`.
_IN_TEXT = re.compile(rf"(?<!\w)(?:{'|'.join(sorted(INSIDES))})(?!\w)")
_LIMITS = ("getrecursionlimit", "setrecursionlimit", "get_int_max_str_digits", "set_int_max_str_digits")
_FACTS = ("copyright", "hash_info", "hexversion", "implementation", "int_info", "version")


def find_inside(code: types.CodeType) -> str:
    """Returns a name in `INSIDES` that compiled code uses, as a name or inside a string; empty if there is none."""
    found = INSIDES.intersection(code.co_names)
    if found:
        return min(found)
    for each in code.co_consts:
        if isinstance(each, str) and (match := _IN_TEXT.search(each)):
            return match[0]
        if isinstance(each, types.CodeType) and (inside := find_inside(each)):
            return inside
    return ""


def make_getattr(stop: Callable[[str], None]) -> Callable:
    """Makes a guarded `getattr`, because a program may put together an attribute's name while it runs."""
    real = getattr

    def guarded(value: object, name: str, /, *default: object) -> object:
        if name in INSIDES:
            stop(f"{name} depends on the interpreter")
        return real(value, name, *default)

    guarded.__name__ = "getattr"
    return guarded


class Version:
    """A `sys.version_info` that answers a question only if `LOWEST` and `HIGHEST` give the same answer."""

    __slots__ = ("_stop",)
    major = 3

    def __init__(self, stop: Callable[[], Any]):
        self._stop = stop

    def _agree(self, ask: Callable[[tuple, tuple], bool], other: tuple) -> bool:
        """Asks `LOWEST` and `HIGHEST`; returns their answer if they agree, else stops the program."""
        lowest, highest = ask(LOWEST, other), ask(HIGHEST, other)
        return lowest if lowest == highest else self._stop()

    def __lt__(self, other: tuple) -> bool:
        return self._agree(tuple.__lt__, other)

    def __le__(self, other: tuple) -> bool:
        return self._agree(tuple.__le__, other)

    def __gt__(self, other: tuple) -> bool:
        return self._agree(tuple.__gt__, other)

    def __ge__(self, other: tuple) -> bool:
        return self._agree(tuple.__ge__, other)

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
    """
    The limits of recursion and of the digits of integers.

    A program that asks for a limit is told Python's own limit, or the limit that the program has set. In the first run
    this limit holds. In later runs a higher limit holds, with one exception: a limit of digits that the program has
    set holds unchanged in every run.
    """

    def __init__(self) -> None:
        self.run = 0  # number of the run
        self.recursion, self.digits = sys.getrecursionlimit(), _DIGITS

    def start(self, run: int) -> None:
        """Sets the limits for a run. Run 0, the first, has Python's own limits; every later run allows more."""
        self.run = run
        sys.setrecursionlimit(self.recursion + _DEEPER * run)
        sys.set_int_max_str_digits(0 if run else _DIGITS)

    def getrecursionlimit(self) -> int:
        return self.recursion

    def setrecursionlimit(self, limit: int, /) -> None:
        # An invalid limit is passed on, so that Python raises what the program expects.
        sys.setrecursionlimit(min(limit + _DEEPER * self.run, 2**31 - 1) if limit > 0 else limit)
        self.recursion = limit

    def get_int_max_str_digits(self) -> int:
        return self.digits

    def set_int_max_str_digits(self, maxdigits: int) -> None:
        sys.set_int_max_str_digits(maxdigits)
        self.digits = maxdigits


def guard_sys(facade: type, limits: Limits, stop: Callable[[str], Any]) -> None:
    """
    Adds guarded attributes to a class of `sys` facades. A program may read the limits, and use the version as
    far as [`Version`] allows. A program that reads an attribute in `_FACTS` is stopped.
    """
    given: dict[str, object] = {name: getattr(limits, name) for name in _LIMITS}
    given["version_info"] = Version(lambda: stop("sys.version_info depends on the interpreter"))
    for name in given:
        setattr(facade, name, property(lambda self, name=name: given[name]))  # type: ignore[misc]
    for name in _FACTS:
        setattr(facade, name, property(lambda self, name=name: stop(f"sys.{name} depends on the interpreter")))  # type: ignore[misc]
