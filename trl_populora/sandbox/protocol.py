"""The three message forms between the trainer, a warm process ("zygote") and a program's process ("child").

    trainer -> zygote   ORDER   control socket; START comes with the child's end of a private socket pair, no payload
    zygote  -> trainer  EVENT   control socket: what the kernel said about the child
    trainer -> child    frame   private pair: the program and its inputs
    child   -> trainer  frame   private pair: one frame, then end of file

A frame is a length of 4 bytes and as many bytes. The child's answer is ASCII lines: a status word, then one line per
output or one line of reason. Nothing here can carry an object, only text.
"""

from __future__ import annotations

import struct
from typing import NamedTuple


ORDER = struct.Struct("<QQddQ")  # kind, job, wall seconds, owed CPU seconds, address space in bytes
EVENT = struct.Struct("<BxxxiQddQ")  # kind, wait status, job, CPU seconds, wall seconds, peak resident bytes
LENGTH = struct.Struct("<I")

# ORDER kinds
START = 0  # fork a child for the attached socket
PROBE = 1  # the same, but the child tries the confinement instead of running a program
YIELD = 2  # a job that was reported SLOW goes to the background
BUSY = 3  # other jobs wait: the background gets turns
IDLE = 4  # no job waits: the background runs on
MAKE_ROOM = 5  # a slow job finds no place in the background: one there that is past its limit has to end

# EVENT kinds
READY = 0  # the zygote is warm; a JSON report follows the header
DONE = 1  # the child is dead and reaped
EXPIRED = 2  # the same, killed by the zygote at the deadline
SLOW = 3  # the child has had its owed CPU time and goes on in the background
FAILED = 4  # the zygote could not start; a JSON report follows the header

# Status words of a child's answer. It may say these things about itself and no others.
OK, OK_IN_ORDER = "ok", "ok, with sets"  # the second asks for more runs
ERROR, MEMORY, BAD_OUTPUT, POLICY, ENTROPY = "error", "memory", "bad_output", "policy", "entropy"
TIER = "tier"  # a module of the full tier is wanted
MAX_REASON = 300  # characters


class Payload(NamedTuple):
    """What a child is told."""

    run: int  # 0 for the first run of a job
    output_bytes: int
    function: str
    program: str
    inputs: list[str]


def pack_payload(payload: Payload) -> bytes:
    """A frame: one line with the numbers, the function and the lengths of the texts, then the texts."""
    texts = [text.encode("utf-8", "surrogatepass") for text in (payload.function, payload.program, *payload.inputs)]
    head = " ".join(map(str, (payload.run, payload.output_bytes, *map(len, texts))))
    body = b"".join((head.encode(), b"\n", *texts))
    return LENGTH.pack(len(body)) + body


def unpack_payload(body: bytes) -> Payload:
    """The inverse of `pack_payload`, without the frame's length; plain slicing, because every child pays for it."""
    head, _, rest = body.partition(b"\n")
    run, output_bytes, *sizes = map(int, head.split())
    texts, start = [], 0
    for size in sizes:
        texts.append(rest[start : start + size].decode("utf-8", "surrogatepass"))
        start += size
    return Payload(run, output_bytes, texts[0], texts[1], texts[2:])


def answer(word: str, lines: list[str]) -> bytes:
    """The child's one frame."""
    body = "\n".join([word, *lines]).encode("ascii", "backslashreplace")
    return LENGTH.pack(len(body)) + body


def one_line(text: str) -> str:
    """`text` as a printable ASCII line of bounded length."""
    text = text[:MAX_REASON].encode("ascii", "backslashreplace").decode("ascii")
    return "".join(char if " " <= char <= "~" else " " for char in text)[:MAX_REASON]
