"""Forms the verdict in the trainer, once the child is dead, from what the kernel said and from one frame of text.

A child can claim `ok` with any outputs. That means no more than "f returned this", because the golden answers never
left the trainer. A child cannot claim a time, a signal, an exit or another job's answer. Nothing that it sends is
evaluated.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import NamedTuple

from . import protocol
from .jobs import Limits, Status, Verdict
from .values import is_canonical


# The failures that a child may report about itself, and the status that its run gets for each.
_CLAIMS = {
    protocol.ERROR: Status.ERROR,
    protocol.MEMORY: Status.MEMORY,
    protocol.BAD_OUTPUT: Status.BAD_OUTPUT,
    protocol.POLICY: Status.POLICY,
    protocol.ENTROPY: Status.NONDETERMINISTIC,
}


@dataclass(frozen=True)
class Observation:
    """What the kernel and the zygote's clock say about one dead child."""

    expired: bool
    wait_status: int
    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int


class Run(NamedTuple):
    """
    What one run came to.

    Args:
        status: How the run ended.
        reason: Why it ended so. Status `ok` with a reason means: the child says that the order of a set may matter, so
            that two runs are not enough.
        outputs: Canonical texts, one per input; empty unless `ok`.
    """

    status: Status
    reason: str
    outputs: tuple[str, ...] = ()


def largest_frame(limits: Limits, inputs: int) -> int:
    """Computes the most bytes that a child may send: outputs, line breaks, and 64 + `MAX_REASON` for all the rest."""
    return limits.output_bytes + inputs + protocol.MAX_REASON + 64


def judge_run(data: bytes, inputs: int, limits: Limits, seen: Observation) -> Run:
    """
    Judges one run.

    Args:
        data: The bytes that the child sent until end of file. If it sent too many, the receiver has kept one byte more
            than the largest frame.
        inputs: How many outputs are expected.
        limits: The limits of the run.
        seen: What was observed from outside.
    """
    # How the process ended counts before anything that the child says about itself.
    ended = _judge_ending(seen, limits)
    if ended is not None:
        return ended
    code = os.waitstatus_to_exitcode(seen.wait_status)
    if code != 0:
        return Run(Status.TAMPERED, f"the process ended with exit status {code}")
    lines = _read_lines(data, largest_frame(limits, inputs))
    if lines is None:
        return Run(Status.TAMPERED, "the process did not leave exactly one well-formed answer")
    word, *rest = lines
    if word in _CLAIMS and len(rest) == 1:
        return Run(_CLAIMS[word], protocol.make_line(rest[0]))
    if (
        word not in (protocol.OK, protocol.OK_IN_ORDER)
        or len(rest) != inputs
        or sum(map(len, rest)) > limits.output_bytes
    ):
        return Run(Status.TAMPERED, "the answer has the wrong form")
    if not all(is_canonical(text, max_bytes=limits.output_bytes) for text in rest):
        return Run(Status.TAMPERED, "an output is not canonical data")
    # The zygote looks at the CPU clock now and then. A program may pass its limit and end between two looks.
    if seen.cpu_seconds > limits.cpu_seconds:
        return Run(Status.TIMEOUT, _describe_excess(limits))
    return Run(Status.OK, "" if word == protocol.OK else protocol.OK_IN_ORDER, tuple(rest))


def _judge_ending(seen: Observation, limits: Limits) -> Run | None:
    """Judges how the process died; `None` if it exited by itself and its answer has to be read."""
    # The zygote kills a program that sleeps, that takes too long by the clock, or that has used up its CPU time.
    if seen.expired and seen.cpu_seconds < limits.cpu_seconds:
        return Run(Status.TIMEOUT, f"still running after {limits.cpu_seconds:g} s")
    if seen.expired:
        return Run(Status.TIMEOUT, _describe_excess(limits))
    if not os.WIFSIGNALED(seen.wait_status):
        return None
    number = os.WTERMSIG(seen.wait_status)
    if number == signal.SIGXCPU or (number == signal.SIGKILL and seen.cpu_seconds > limits.cpu_seconds):
        return Run(Status.TIMEOUT, _describe_excess(limits))
    # A SIGKILL before the CPU limit may come from the kernel's out-of-memory killer. That one chooses processes that
    # hold much memory, so a small process was killed by somebody else.
    if number == signal.SIGKILL and seen.peak_bytes > limits.memory_bytes // 8:
        return Run(Status.MEMORY, "killed from outside, as the kernel does when memory runs out")
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    # The interpreter can crash without malice, for example by deep recursion in C. Any other signal was sent on
    # purpose.
    crashed = number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
    return Run(Status.ERROR if crashed else Status.TAMPERED, f"the process died of {name}")


def _describe_excess(limits: Limits) -> str:
    return f"used more than {limits.cpu_seconds:g} s of CPU time"


def _read_lines(data: bytes, limit: int) -> list[str] | None:
    """Reads the lines of exactly one frame of ASCII; `None` if the data is anything else."""
    header = protocol.LENGTH.size
    if len(data) < header or len(data) > limit or protocol.LENGTH.unpack(data[:header])[0] != len(data) - header:
        return None
    body = data[header:]
    if not body.isascii():
        return None
    return body.decode("ascii").split("\n")


def combine(runs: list[Run], seen: list[Observation]) -> Verdict:
    """Makes one verdict of a job's runs: all must be `ok` and have the same outputs."""
    # The first run says what the program does. A later one can only take its `ok` away.
    status, reason, outputs = runs[0]
    reason = "" if status is Status.OK else reason
    for later_status, later_reason, later_outputs in runs[1:]:
        if status is not Status.OK:
            break
        if later_status in (Status.TIMEOUT, Status.MEMORY, Status.TAMPERED, Status.POLICY, Status.NONDETERMINISTIC):
            status, reason = later_status, later_reason
        elif later_status is not Status.OK:  # an error or bad output that the first run did not have
            status, reason = Status.NONDETERMINISTIC, f"a later run ended differently: {later_reason}"
        elif later_outputs != outputs:
            index = next(i for i, pair in enumerate(zip(outputs, later_outputs, strict=True)) if pair[0] != pair[1])
            pair = f"{outputs[index][:60]} and {later_outputs[index][:60]}"
            status, reason = Status.NONDETERMINISTIC, f"two runs disagree on output {index}: {pair}"
    return Verdict(
        status=status,
        reason=reason,
        outputs=outputs if status is Status.OK else (),
        cpu_seconds=sum(each.cpu_seconds for each in seen),
        wall_seconds=sum(each.wall_seconds for each in seen),
        peak_bytes=max((each.peak_bytes for each in seen), default=0),
    )
