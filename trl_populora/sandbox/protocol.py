"""The three message forms between the trainer, a warm process ("zygote") and a program's process ("child").

    trainer -> zygote   ORDER   control socket; START comes with the child's end of a private socket pair, no payload
    zygote  -> trainer  EVENT   control socket: what the kernel said about the child
    trainer -> child    frame   private pair: the program and its inputs
    child   -> trainer  frame   private pair: one frame, then end of file

A frame is a length of 4 bytes and as many bytes. The child's answer is ASCII lines: a status word, then one line per
output or one line of reason: no object can come back, only text.
"""

from __future__ import annotations

import marshal
import struct


ORDER = struct.Struct("<QQdQ")  # kind, job, CPU seconds, address space in bytes
EVENT = struct.Struct("<BxxxiQddQ")  # kind, wait status, job, CPU seconds, wall seconds, peak resident bytes
LENGTH = struct.Struct("<I")
_pack_length = LENGTH.pack

# ORDER kinds
START = 0  # fork a child for the attached socket
PROBE = 1  # the same, but the child tries the confinement instead of running a program

# EVENT kinds
READY = 0  # the zygote is warm; a JSON report follows the header
DONE = 1  # the child is dead and reaped
EXPIRED = 2  # the same, killed by the zygote at the deadline
FAILED = 3  # the zygote could not start; a JSON report follows the header

# Status words of a child's answer. It may say these things about itself and no others.
OK, OK_IN_ORDER = "ok", "ok, with sets"  # the second asks for more runs
ERROR, MEMORY, BAD_OUTPUT, POLICY, ENTROPY = "error", "memory", "bad_output", "policy", "entropy"
MAX_REASON = 300  # characters

# A program that the busy host does not let run is killed after its limit times this, by the clock.
LONGEST_EXTENSION = 120.0


Payload = tuple[int, bool, int, str, str, tuple[str, ...]]
"""
What a child is told: number of the run, whether to look out for sets, most output bytes, function, program, inputs.
"""


def pack_payload(payload: Payload) -> bytes:
    """The trainer's one frame to a child, which believes it: Python's own format costs the child one call to read."""
    body = marshal.dumps(payload)
    return LENGTH.pack(len(body)) + body


def answer(word: str, lines: list[str]) -> bytes:
    """The child's one frame."""
    body = "\n".join([word, *lines]).encode("ascii", "backslashreplace")
    return _pack_length(len(body)) + body


def one_line(text: str) -> str:
    """`text` as a printable ASCII line of bounded length."""
    text = text[:MAX_REASON].encode("ascii", "backslashreplace").decode("ascii")
    return "".join(char if " " <= char <= "~" else " " for char in text)[:MAX_REASON]
