"""Inside the process that belongs to one program: take the payload, run it, say one thing, exit.

Everything here shares its process with untrusted code, so nothing here protects anything: the walls are built by
`confine.py` and `seccomp.py` before the program starts, and the verdict is formed by `judge.py` in the trainer. This file
only has to be right for honest programs.
"""

from __future__ import annotations

import json
import os
import sys
import types

from . import protocol, soft
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


def serve(fd: int, payload: dict) -> None:
    """Run the payload's program, send one frame over `fd`, and end the process."""
    frame = _outcome(payload)
    view = memoryview(frame)
    while view:
        view = view[_write(fd, view) :]
    _exit(0)


def _outcome(payload: dict) -> bytes:
    guard = soft.Guard(payload["soft"])
    try:
        outputs = _run(payload, guard)
    except BaseException as error:  # noqa: B036 - a program may raise anything, and any of it is its result
        return _failure(error, guard)
    if guard.finding:
        return protocol.answer(*guard.finding)
    return protocol.answer(protocol.OK, outputs)


def _failure(error: BaseException, guard: soft.Guard) -> bytes:
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


def _run(payload: dict, guard: soft.Guard) -> list[str]:
    module = types.ModuleType(MODULE)
    module.__dict__["__builtins__"] = guard.builtins
    sys.modules[MODULE] = module
    exec(compile(payload["program"], "<program>", "exec", dont_inherit=True), module.__dict__)
    function = module.__dict__.get(payload["function"])
    if not callable(function):
        raise NameError(f"the program defines no function {payload['function']!r}")
    inputs = payload["inputs"]
    order = range(len(inputs))
    outputs: list[str] = [""] * len(inputs)
    budget = payload["output_bytes"]
    # The second run goes backwards: state that one call leaves for the next then shows as a difference.
    for index in reversed(order) if payload["backwards"] else order:
        arguments = decode(inputs[index], max_bytes=1 << 30)
        try:
            outputs[index] = encode(function(*arguments), max_bytes=max(budget, 1))
        except (NotPlainData, ValueTooLarge) as error:
            raise _BadOutput(f"output {index}: {error}") from None
        budget -= len(outputs[index])
    return outputs
