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


ORDER = struct.Struct("<QQddQ")  # kind, job, wall seconds, owed CPU seconds, address space in bytes
EVENT = struct.Struct("<BxxxiQddQ")  # kind, wait status, job, CPU seconds, wall seconds, peak resident bytes
LENGTH = struct.Struct("<I")

# ORDER kinds
START = 0  # fork a child for the attached socket
PROBE = 1  # the same, but the child tries the confinement instead of running a program
YIELD = 2  # a job that was reported SLOW goes to the background
BUSY = 3  # other jobs wait: the background gets turns
IDLE = 4  # no job waits: the background runs on

# EVENT kinds
READY = 0  # the zygote is warm; a JSON report follows the header
DONE = 1  # the child is dead and reaped
EXPIRED = 2  # the same, killed by the zygote at the deadline
SLOW = 3  # the child has had its owed CPU time and goes on in the background
FAILED = 4  # the zygote could not start; a JSON report follows the header

# Status words of a child's answer. It may say these things about itself and no others.
OK, ERROR, MEMORY, BAD_OUTPUT, POLICY, ENTROPY, TIER = (
    "ok",
    "error",
    "memory",
    "bad_output",
    "policy",
    "entropy",
    "tier",
)
MAX_REASON = 300  # characters


def answer(word: str, lines: list[str]) -> bytes:
    """The child's one frame."""
    body = "\n".join([word, *lines]).encode("ascii", "backslashreplace")
    return LENGTH.pack(len(body)) + body


def one_line(text: str) -> str:
    """`text` as a printable ASCII line of bounded length."""
    text = text[:MAX_REASON].encode("ascii", "backslashreplace").decode("ascii")
    return "".join(char if " " <= char <= "~" else " " for char in text)[:MAX_REASON]
