"""Guards around everything that makes two runs of a program differ: clocks, hashes, addresses (verify).

`facades` are copies of modules for the program's own imports: `time` and `datetime`, where arithmetic on given dates
works as ever, and those through which one that is not allowed (`modules.py`) could be reached.
"""

from __future__ import annotations

import datetime
import sys
import time
import types
from collections.abc import Callable
from typing import Any


Stop = Callable[[str], None]

_OPEN = ("statistics",)  # has the random module lying in it
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")


def _stopper(stop: Stop, name: str) -> Callable:
    def stopped(*_: object, **__: object) -> None:
        stop(f"{name} differs from run to run")

    stopped.__name__ = name.rpartition(".")[2].rstrip("()")
    return stopped


def _copy(module: types.ModuleType) -> Any:
    facade = types.ModuleType(module.__name__, module.__doc__)
    for name, value in vars(module).items():
        # The modules that a module has imported for itself are no part of what it offers.
        if not isinstance(value, types.ModuleType) and not name.startswith("__"):
            setattr(facade, name, value)
    return facade


def facades(stop: Stop) -> dict[str, types.ModuleType]:
    """The guarded modules by name, as far as they are loaded."""
    return {"time": _time(stop), "datetime": _datetime(stop)} | {
        name: _copy(sys.modules[name]) for name in _OPEN if name in sys.modules
    }


def _time(stop: Stop) -> types.ModuleType:
    facade = _copy(time)
    for name in _CLOCKS:
        setattr(facade, name, _stopper(stop, f"time.{name}()"))
        setattr(facade, f"{name}_ns", _stopper(stop, f"time.{name}_ns()"))

    def given(name: str, position: int) -> Callable:
        function = getattr(time, name)

        def guarded(*arguments: object) -> object:
            if len(arguments) <= position or arguments[position] is None:
                stop(f"time.{name}() without a time differs from run to run")
            return function(*arguments)

        return guarded

    facade.sleep = lambda seconds, /: None  # no clock tells, and the limit is one of CPU time
    for name, position in (("localtime", 0), ("gmtime", 0), ("ctime", 0), ("asctime", 0), ("strftime", 1)):
        setattr(facade, name, given(name, position))
    return facade


def _datetime(stop: Stop) -> types.ModuleType:
    class Meta(type):
        # A plain date made by the standard library counts as an instance of the program's `date`.
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, cls.__mro__[1])

        def __subclasscheck__(cls, other: type) -> bool:
            return cls.__mro__[1] in other.__mro__

    def guarded(base: type, clocks: tuple[str, ...]) -> type:
        plain_repr: Callable = base.__repr__
        body: dict[str, Any] = {name: classmethod(_stopper(stop, f"{base.__name__}.{name}()")) for name in clocks}
        body["__repr__"] = lambda self: "datetime." + plain_repr(self)
        body["__module__"] = "datetime"
        return Meta(base.__name__, (base,), body)

    facade = _copy(datetime)
    facade.datetime = guarded(datetime.datetime, ("now", "utcnow", "today"))
    facade.date = guarded(datetime.date, ("today",))
    return facade


# Types whose hash hangs on the process: on its hash seed, or on an address.
_SEEDED = {
    kind.__hash__ for kind in (str, bytes, object, memoryview, type(None), type, type(len), type(lambda: 0), type(...))
}


def _stable_hash(value: Any) -> bool:
    """Whether the hash of `value` is the same in every process, as far as types tell."""
    kind = type(value)
    if kind in (tuple, frozenset):
        return all(map(_stable_hash, value))
    if kind in (float, complex):
        return value == value
    return kind.__hash__ not in _SEEDED


class Address(int):
    """What `id` gives, and `hash` of all but integers: equal to itself, a fine key, and of no other use."""

    __slots__ = ()


_ADDRESS_USES = [
    *("lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "truediv"),
    *("rtruediv", "mod", "rmod", "divmod", "rdivmod", "pow", "rpow", "lshift", "rlshift", "rshift", "rrshift", "and"),
    *("rand", "or", "ror", "xor", "rxor", "neg", "pos", "abs", "invert", "int", "index", "float", "trunc", "round"),
    *("floor", "ceil", "bool", "str", "repr", "format"),
]


def guarded_builtins(stop: Stop) -> dict[str, Callable]:
    """`hash` and `id`, which are fine as long as only equality is asked of their results."""
    real_hash, real_id = hash, id

    def guarded_hash(value: object, /) -> int:
        # A class's own __hash__ may combine hashes as it likes; what counts is where the result goes.
        if sys._getframe(1).f_code.co_name != "__hash__":
            if not _stable_hash(value):
                stop(f"hash() of {type(value).__name__} differs from run to run")
            return GuardedAddress(real_hash(value)) if type(value) not in (int, bool) else real_hash(value)
        return real_hash(value)

    class GuardedAddress(Address):
        __slots__ = ()
        __hash__ = int.__hash__

    def used(*_: object, **__: object) -> None:
        stop("hash() and id() give nothing to compute with: it hangs on this Python or on this run")

    for name in _ADDRESS_USES:
        setattr(GuardedAddress, f"__{name}__", used)

    def guarded_id(value: object, /) -> int:
        return GuardedAddress(real_id(value))

    guarded_hash.__name__, guarded_id.__name__ = "hash", "id"
    return {"hash": guarded_hash, "id": guarded_id}
