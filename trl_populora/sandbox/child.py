"""Inside the process that belongs to one program: reads the payload, runs the program, sends one answer, exits.

Untrusted code shares this process, so nothing here protects anything. `confine.py` and `seccomp.py` have built the
walls before the program starts, and `judge.py` forms the verdict in the trainer. This file only has to be right for
honest programs.
"""

from __future__ import annotations

import marshal
import opcode
import os
import types

from . import protocol
from .entropy import Address
from .protocol import OK, OK_IN_ORDER, Payload, pack_answer
from .soft import Guard
from .values import NotPlainData, ValueTooLarge, decode, encode


# Looked up once, in the zygote: `zygote.py` says why.
_exit, _read, _write, _Code = os._exit, os.read, os.write, types.CodeType
_unpack, _length_of, _LENGTH_BYTES = marshal.loads, protocol.LENGTH.unpack, protocol.LENGTH.size
# This answer is made in advance, because a program without memory leaves none to make it.
_OUT_OF_MEMORY = pack_answer(protocol.MEMORY, ["the program ran out of memory"])

# Names and instructions by which a result may come to depend on the order of a set, a hash or an address.
_ORDER_NAMES = frozenset(
    [
        *("set", "frozenset", "hash", "id", "union", "intersection", "difference", "symmetric_difference"),
        *("__hash__", "__repr__", "repr"),
    ]
)
_ORDER_CODES = frozenset(opcode.opmap[name] for name in ("BUILD_SET", "SET_ADD", "SET_UPDATE") if name in opcode.opmap)


def read_payload(fd: int) -> Payload:
    """Reads what the trainer sends: the program, its inputs and how to run it."""
    (size,) = _length_of(_read_exactly(fd, _LENGTH_BYTES))
    return _unpack(_read_exactly(fd, size))


def _read_exactly(fd: int, size: int) -> bytes:
    data = _read(fd, size)
    while len(data) < size:
        part = _read(fd, size - len(data))
        if not part:  # the trainer is gone
            _exit(1)
        data += part
    return data


def send(fd: int, frame: bytes) -> None:
    """Sends the answer and ends the process without running anything else."""
    sent = _write(fd, frame)
    while sent < len(frame):
        sent += _write(fd, memoryview(frame)[sent:])
    _exit(0)


def run_payload(payload: Payload, guard: Guard) -> bytes:
    """Runs the payload's program; returns the frame that says what came of it."""
    try:
        word, outputs = _run(payload, guard)
    except BaseException as error:  # noqa: B036 - a program may raise anything, and any of it is its result
        return _answer_failure(error, guard)
    # A finding stands even if the program has caught the exception by which the guard wanted to stop it.
    if guard.finding:
        return pack_answer(*guard.finding)
    return pack_answer(word, outputs)


def _answer_failure(error: BaseException, guard: Guard) -> bytes:
    """Makes the answer for a program that raised, gave a bad output, or was stopped by a guard."""
    if guard.finding:
        return pack_answer(*guard.finding)
    if isinstance(error, MemoryError):
        return _OUT_OF_MEMORY
    if isinstance(error, _BadOutput):
        return pack_answer(protocol.BAD_OUTPUT, [protocol.make_line(str(error))])
    return pack_answer(protocol.ERROR, [_describe(error)])


def _describe(error: BaseException) -> str:
    try:
        return protocol.make_line(f"{type(error).__name__}: {error}")
    except BaseException:  # noqa: B036 - the `__str__` of an exception is the program's own code, too
        return "an exception that cannot be described"


class _BadOutput(Exception):
    """Raised for an output that is not plain data, or too large."""


def _run(payload: Payload, guard: Guard) -> tuple[str, list[str]]:
    """Runs the program and calls its function with each input; returns a status word and the texts of the outputs."""
    run, ask_about_sets, budget, name, program, inputs = payload
    jitter = _disturb_heap(run) if run else None
    guard.limits.start(run)
    code = compile(program, "<program>", "exec", dont_inherit=True)
    guard.screen(code)
    word = OK_IN_ORDER if ask_about_sets and _order_matters(code) else OK
    namespace = guard.namespace
    exec(code, namespace)
    function = namespace.get(name)
    if not callable(function):
        raise NameError(f"the program defines no function {name!r}")
    outputs: list[str] = [""] * len(inputs)
    # Every second run calls with the inputs in reverse order. A program that keeps state between calls may then
    # give other outputs, and is found to be nondeterministic.
    for index in range(len(inputs))[:: -1 if run % 2 else 1]:
        result = function(*decode(inputs[index], max_bytes=1 << 30))  # the trainer has bounded the inputs
        text = outputs[index] = _encode_output(index, result, budget, guard)
        budget -= len(text)
    del jitter  # the blocks had to stay allocated while the program ran
    return word, outputs


def _encode_output(index: int, result: object, budget: int, guard: Guard) -> str:
    try:
        return encode(result, max_bytes=max(budget, 0))
    except NotPlainData as error:
        if issubclass(error.kind, Address):
            guard.stop(protocol.ENTROPY, f"output {index} holds a hash, or the address of an object")
        raise _BadOutput(f"output {index}: {error}") from None
    except ValueTooLarge as error:
        raise _BadOutput(f"output {index}: {error}") from None


def _disturb_heap(run: int) -> list:
    """
    Allocates blocks of many sizes and returns them.

    Each run after the first allocates other blocks. Objects of the program then get other addresses, and a result that
    depends on the order of addresses may differ between runs.
    """
    # CPython keeps a pool for every 16 bytes of size up to 512. Larger blocks come from the C library.
    small = [_block(size) for size in range(16, 513, 16) for _ in range(run * 13 % (64 if size <= 128 else 8))]
    return small + [bytes(size + run * 112) for size in range(600, 10000, 1000)]


def _block(size: int) -> object:
    """Makes a fresh object that takes up `size` bytes."""
    # An empty `bytes` has 33 bytes, so smaller sizes need other types.
    if size == 16:
        return object()
    return complex(size) if size == 32 else bytes(size - 33)


def _order_matters(code: types.CodeType) -> bool:
    """Says whether the program makes sets, hashes or addresses, on which two runs may agree by luck."""
    # `co_code` alternates instructions and arguments.
    if not _ORDER_NAMES.isdisjoint(code.co_names) or not _ORDER_CODES.isdisjoint(code.co_code[::2]):
        return True
    return any(type(each) is frozenset or (type(each) is _Code and _order_matters(each)) for each in code.co_consts)
