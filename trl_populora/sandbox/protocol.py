"""The messages between the trainer, a warm process ("zygote") and a program's process ("child").

    trainer -> zygote   ORDER   control socket: fork a child. The child's end of a private socket pair comes with it
    zygote  -> trainer  EVENT   control socket: the zygote is ready, the zygote has failed, or a child has ended
    trainer -> child    frame   private pair: the program and its inputs
    child   -> trainer  frame   private pair: one frame, then end of file

A frame is a number in 4 bytes, then that many bytes. The child's answer consists of ASCII lines: a status word, then
one line per output, or one line that gives the reason. No object can come back, only text.
"""

from __future__ import annotations

import marshal
import struct


# Fixed sizes: the control socket keeps messages apart, so an order and the head of an event need no length.
ORDER = struct.Struct("<QQdQ")  # START or PROBE, number of the run, limits: CPU seconds, bytes of address space
EVENT = struct.Struct("<BxxxiQddQ")  # kind, wait status, number of the run, used: CPU seconds, wall seconds, bytes
LENGTH = struct.Struct("<I")
_pack_length = LENGTH.pack

# ORDER kinds
START = 0  # fork a child for the attached socket
PROBE = 1  # the same, but this child tries the walls and runs no program

# EVENT kinds
READY = 0  # the zygote is warm; a JSON report follows the header
DONE = 1  # the child is dead and reaped
EXPIRED = 2  # the same, but the zygote killed the child at a deadline
FAILED = 3  # the zygote ends because of an error; a JSON report follows the header

# Status words of a child's answer. A child may claim these things about itself. Everything else, such as a time-out,
# is observed from outside.
OK, OK_IN_ORDER = "ok", "ok, with sets"  # after the second, a job of two or more runs gets further runs
ERROR, MEMORY, BAD_OUTPUT, POLICY, ENTROPY = "error", "memory", "bad_output", "policy", "entropy"
MAX_REASON = 300  # characters

# By the wall clock, a program ends at the latest after this many times its CPU limit, even if a busy host let it run
# little.
LONGEST_EXTENSION = 120.0


Payload = tuple[int, int, str, str, tuple[str, ...]]
"""
What a child is told, in this order: number of the run; most bytes of output; name of the function; the program; its
inputs. The payload must not tell what the run is for. A program that knew this could give one answer when its proposal
is checked, and another answer when students solve the task.
"""


def pack_payload(payload: Payload) -> bytes:
    """Makes the trainer's one frame to a child. A child trusts the trainer, so the frame may hold `marshal` data."""
    body = marshal.dumps(payload)
    return LENGTH.pack(len(body)) + body


def pack_answer(word: str, lines: list[str]) -> bytes:
    """Makes the child's one frame."""
    body = "\n".join([word, *lines]).encode("ascii", "backslashreplace")
    return _pack_length(len(body)) + body


def make_line(text: str) -> str:
    """Turns `text` into one printable ASCII line of bounded length."""
    # Cut twice: an escape such as `\xe9` is longer than its character.
    text = text[:MAX_REASON].encode("ascii", "backslashreplace").decode("ascii")
    return "".join(char if " " <= char <= "~" else " " for char in text)[:MAX_REASON]
