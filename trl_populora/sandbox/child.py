"""Inside the process that belongs to one program: take the payload, run it, say one thing, exit.

Everything here shares its process with untrusted code, so nothing here protects anything: the walls are built by
`confine.py` and `seccomp.py` before the program starts, and the verdict is formed by `judge.py` in the trainer. This
file only has to be right for honest programs.
"""

from __future__ import annotations

import json
import os
import sys
import types

from . import protocol
from .entropy import Address
from .soft import Guard
from .values import NotPlainData, ValueTooLarge, decode, encode


MODULE = "program"
_exit, _read, _write = os._exit, os.read, os.write


def read_payload(fd: int) -> dict:
    """The program, its inputs and its limits, from the trainer."""
    header = _read_exactly(fd, protocol.LENGTH.size)
    return json.loads(_read_exactly(fd, protocol.LENGTH.unpack(header)[0]))


def _read_exactly(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = _read(fd, min(size, 1 << 20))
        if not part:
            _exit(1)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def serve(fd: int, payload: dict, guard: Guard) -> None:
    """Run the payload's program, send one frame over `fd`, and end the process."""
    send(fd, _outcome(payload, guard))


def send(fd: int, frame: bytes) -> None:
    """Send the one frame and end the process without running anything else."""
    view = memoryview(frame)
    while view:
        view = view[_write(fd, view) :]
    _exit(0)


def _outcome(payload: dict, guard: Guard) -> bytes:
    # Freed before anything is said about running out of memory.
    reserve = [bytes(1 << 18)]
    try:
        outputs = _run(payload, guard)
    except BaseException as error:  # noqa: B036 - a program may raise anything, and any of it is its result
        reserve.clear()
        return _failure(error, guard)
    if guard.finding:
        return protocol.answer(*guard.finding)
    return protocol.answer(protocol.OK, outputs)


def _failure(error: BaseException, guard: Guard) -> bytes:
    if guard.finding:
        return protocol.answer(*guard.finding)
    if isinstance(error, MemoryError):
        return protocol.answer(protocol.MEMORY, ["the program ran out of memory"])
    if isinstance(error, _BadOutput):
        return protocol.answer(protocol.BAD_OUTPUT, [protocol.one_line(str(error))])
    return protocol.answer(protocol.ERROR, [_describe(error)])


def _describe(error: BaseException) -> str:
    try:
        return protocol.one_line(f"{type(error).__name__}: {error}")
    except BaseException:  # noqa: B036 - the text of an exception is untrusted code as well
        return "an exception that cannot be described"


class _BadOutput(Exception):
    """An output that is not plain data, or too large."""


def _run(payload: dict, guard: Guard) -> list[str]:
    jitter = _disturb_heap(payload["run"])
    module = types.ModuleType(MODULE)
    module.__dict__["__builtins__"] = guard.builtins
    sys.modules[MODULE] = module
    exec(compile(payload["program"], "<program>", "exec", dont_inherit=True), module.__dict__)
    function = module.__dict__.get(payload["function"])
    if not callable(function):
        raise NameError(f"the program defines no function {payload['function']!r}")
    inputs = payload["inputs"]
    outputs: list[str] = [""] * len(inputs)
    budget = payload["output_bytes"]
    # Every second run goes backwards: state that one call leaves for the next then shows as a difference.
    for index in range(len(inputs))[:: -1 if payload["run"] % 2 else 1]:
        result = function(*decode(inputs[index], max_bytes=1 << 30))
        outputs[index] = _encode_output(index, result, budget, guard)
        budget -= len(outputs[index])
    del jitter
    return outputs


def _encode_output(index: int, result: object, budget: int, guard: Guard) -> str:
    try:
        return encode(result, max_bytes=max(budget, 0))
    except NotPlainData as error:
        if issubclass(error.kind, Address):
            guard.stop(protocol.ENTROPY, f"output {index} holds the address of an object")
        raise _BadOutput(f"output {index}: {error}") from None
    except ValueTooLarge as error:
        raise _BadOutput(f"output {index}: {error}") from None


def _disturb_heap(run: int) -> list:
    """Blocks of many sizes, different in each run, so that what hangs on the order of addresses shows."""
    return [bytes(size) for size in range(16, 512, 16) for _ in range((size * 7 + run * 13) % 11)] if run else []
