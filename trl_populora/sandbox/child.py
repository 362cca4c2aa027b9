"""Inside the process that belongs to one program: reads the payload, runs the program, sends one answer, exits.

This file never calls the program's code itself. It yields each call to the loop in `launch.py`. So no frame with names
or values of this file lies below the program's frames.

Untrusted code shares this process, so nothing here protects anything. `confine.py` and `seccomp.py` have built the
walls before the program starts, and `judge.py` forms the verdict in the trainer. This file only has to be right for
honest programs.
"""

from __future__ import annotations

import marshal
import opcode
import os
import types
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from . import protocol
from .entropy import Address
from .protocol import OK, OK_IN_ORDER, Payload, pack_answer
from .soft import Guard
from .values import NotPlainData, ValueTooLarge, decode, encode, name_type


_T = TypeVar("_T")
Calls = Generator[tuple[Callable, tuple], None, _T]  # yields a function and its arguments, which `launch.py` calls


# These names are looked up once, in the zygote. `zygote.py` says why.
_exit, _read, _write, _Code = os._exit, os.read, os.write, types.CodeType
_unpack, _length_of, _LENGTH_BYTES = marshal.loads, protocol.LENGTH.unpack, protocol.LENGTH.size
# This answer is made in advance, because a program that has run out of memory leaves no memory to make it.
_OUT_OF_MEMORY = pack_answer(protocol.MEMORY, ["the program ran out of memory"])

# Names and bytecode instructions by which a result may come to depend on the order of a set, a hash or an address.
_ORDER_NAMES = frozenset(
    [
        *("set", "frozenset", "hash", "id", "union", "intersection", "difference", "symmetric_difference"),
        *("__hash__", "__repr__", "repr"),
    ]
)
_ORDER_CODES = frozenset(opcode.opmap[name] for name in ("BUILD_SET", "SET_ADD", "SET_UPDATE"))
# `&`, `|`, `-` and `^`, by which two views of dicts make a set, are one instruction with the operator as its argument.
_VIEWS = frozenset(("keys", "items"))
_OPERATOR_METHODS = frozenset(f"__{kind}{name}__" for kind in ("", "r", "i") for name in ("and", "or", "sub", "xor"))
_OPERATOR_FUNCTIONS = frozenset(("and_", "or_", "sub", "xor", "iand", "ior", "isub", "ixor"))
_BINARY_OP = opcode.opmap["BINARY_OP"]
_SET_OPERATORS = frozenset(
    number
    for number, (name, _) in enumerate(opcode._nb_ops)  # type: ignore[attr-defined]
    if name.removeprefix("NB_").removeprefix("INPLACE_") in ("AND", "OR", "SUBTRACT", "XOR")
)
_SET_TEXTS = '["s",', '["z",'  # how a set and a frozenset begin in the text of an input


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
    """Sends the answer to the trainer, and ends the child without running anything else."""
    sent = _write(fd, frame)
    while sent < len(frame):
        sent += _write(fd, memoryview(frame)[sent:])
    _exit(0)


def run_payload(payload: Payload, guard: Guard, answer: list) -> Calls[bytes]:
    """
    Runs the payload's program; returns the frame that says what came of it.

    Args:
        payload: What to run.
        guard: The soft layer.
        answer: The list that `launch.py` fills after each call: whether the call returned, and what it returned or
            raised.
    """
    try:
        word, outputs = yield from _run(payload, guard, answer)
    except BaseException as error:  # noqa: B036 - a program may raise anything, and any of it is its result
        raised = error
    else:
        # The guard stops a program by raising an exception. If the program catches the exception and goes on, the
        # guard's finding is still its answer.
        return pack_answer(*guard.finding) if guard.finding else pack_answer(word, outputs)
    if guard.finding:
        return pack_answer(*guard.finding)
    if isinstance(raised, _Failed):
        raised = answer[1]
    kind = type(raised)
    if issubclass(kind, MemoryError):
        return _OUT_OF_MEMORY
    if kind is _BadOutput:
        return pack_answer(protocol.BAD_OUTPUT, [protocol.make_line(str(raised))])
    try:
        # `str` may call the exception's `__str__`, and the program may have written that method.
        text = str.__str__((yield from _call(answer, str, raised)))
    except _Failed:
        return pack_answer(protocol.ERROR, ["an exception that cannot be described"])
    return pack_answer(protocol.ERROR, [protocol.make_line(f"{name_type(kind)}: {text}")])


class _Failed(Exception):
    """
    Raised when a call of the program's code has raised. The program's own exception stays in `answer`, so that it
    passes through no frame of this file.
    """


def _call(answer: list, function: Callable, *arguments: object) -> Calls[Any]:
    """Has the loop in `launch.py` make a call; returns the call's result, or raises [`_Failed`] if the call raised."""
    yield function, arguments
    if not answer[0]:
        raise _Failed
    return answer[1]


class _BadOutput(Exception):
    """Raised for an output that is not plain data, or too large."""


def _run(payload: Payload, guard: Guard, answer: list) -> Calls[tuple[str, list[str]]]:
    """Runs the program and calls its function with each input; returns a status word and the texts of the outputs."""
    run, budget, name, program, inputs = payload
    jitter = _disturb_heap(run) if run else None
    guard.limits.start(run)
    code = compile(program, "<program>", "exec", dont_inherit=True)
    guard.screen(code)
    given = any(each in text for text in inputs for each in _SET_TEXTS)
    word = OK_IN_ORDER if given or _order_matters(code) else OK
    yield from _call(answer, exec, code, guard.namespace)
    # A key that the program has put into its namespace may run the program's code when it is compared with `name`.
    function = yield from _call(answer, guard.namespace.get, name)
    if not callable(function):
        raise NameError(f"the program defines no function {name!r}")
    outputs: list[str] = [""] * len(inputs)
    # Every second run takes the inputs in reverse order. A program that keeps state between calls may then
    # give other outputs, and is found to be nondeterministic.
    for index in range(len(inputs))[:: -1 if run % 2 else 1]:
        # The trainer has limited the size of the inputs, so the limit here is only a high number.
        result = yield from _call(answer, function, *decode(inputs[index], max_bytes=1 << 30))
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

    Every run after the first calls this, and allocates other blocks than the runs before. Objects of the program then
    get other addresses, and a result that depends on the order of addresses may differ between runs.
    """
    # CPython keeps a pool for every 16 bytes of size up to 512. Larger blocks come from the C library.
    small = [_block(size) for size in range(16, 513, 16) for _ in range(run * 13 % (64 if size <= 128 else 8))]
    return small + [bytes(size + run * 112) for size in range(600, 10000, 1000)]


def _block(size: int) -> object:
    """Makes a fresh object that takes up `size` bytes."""
    # An empty `bytes` takes up 33 bytes, so smaller sizes need other types.
    if size == 16:
        return object()
    return complex(size) if size == 32 else bytes(size - 33)


def _order_matters(code: types.CodeType) -> bool:
    """Says whether the code uses sets, hashes, addresses or `repr`. If so, two runs may agree by luck."""
    codes, names = [code], set(code.co_names)
    for each in codes:  # the list grows by the functions and classes in each
        # In `co_code` every second byte is an instruction. The byte after it is the instruction's argument.
        if not _ORDER_CODES.isdisjoint(each.co_code[::2]):
            return True
        for constant in each.co_consts:
            if type(constant) is frozenset:
                return True
            if type(constant) is _Code:
                codes.append(constant)
                names.update(constant.co_names)
    if not _ORDER_NAMES.isdisjoint(names):
        return True
    # One function may return the views of which another makes a set.
    return not _VIEWS.isdisjoint(names) and (
        not _OPERATOR_METHODS.isdisjoint(names)
        or ("operator" in names and not _OPERATOR_FUNCTIONS.isdisjoint(names))
        or any(map(_has_set_operator, codes))
    )


def _has_set_operator(code: types.CodeType) -> bool:
    pairs = zip(code.co_code[::2], code.co_code[1::2], strict=True)
    return any(instruction == _BINARY_OP and argument in _SET_OPERATORS for instruction, argument in pairs)
