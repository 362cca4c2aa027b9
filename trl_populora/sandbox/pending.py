"""One job on its way through the supervisor: its runs so far and the run in progress."""

from __future__ import annotations

import select
import socket
import zlib
from concurrent.futures import Future

from . import protocol
from .jobs import Job, Limits, Status, Verdict
from .judge import Observation, largest_frame
from .worker import Worker


SENSITIVE_RUNS = 6  # leaves a two-way choice by the order of a set a chance of 1 in 32; two runs leave 1 in 2


class Pending:
    """
    A job, its future, and the private socket of its current run.

    Args:
        job (`Job`): What to run.
        limits (`Limits`): The job's limits, or the sandbox's.
    """

    probe_of: Worker | None = None  # the worker that this pending probes

    def __init__(self, job: Job, limits: Limits):
        self.job, self.limits = job, limits
        self.future: Future[Verdict] = Future()
        self.runs: list = []
        self.seen: list[Observation] = []
        self.wanted = job.runs
        self.retried = False
        self.socket: socket.socket = None  # type: ignore[assignment]  # between `open` and `close` only
        self.forget_run()

    def take(self, run: tuple, seen: Observation) -> bool:
        """Note a finished run; whether another one is needed."""
        status, reason, outputs = run
        self.runs.append(run)
        self.seen.append(seen)
        if reason and self.job.runs > 1:
            self.wanted = max(self.wanted, SENSITIVE_RUNS)
        return status is Status.OK and len(self.runs) < self.wanted and outputs == self.runs[0][2]

    def forget_run(self) -> None:
        """Back to before the current run."""
        self.outgoing = memoryview(b"")
        self.data = bytearray()
        self.end_of_file = False
        self.event: Observation = None  # type: ignore[assignment]  # until the zygote has spoken
        self.late_at = float("inf")

    @property
    def seed_index(self) -> int:
        """
        Which of the hash seeds the next run gets. It depends on the program and the number of the run alone, so a
        sequence of jobs can be repeated exactly whatever the load.
        """
        first = zlib.crc32(self.job.program.encode("utf-8", "surrogatepass")) & 1
        number = len(self.runs)
        return first ^ number if number < 2 else number

    def open(self) -> socket.socket:
        """A fresh private pair for the next run; keeps our end and gives the child's."""
        job = self.job
        run, several = len(self.runs), job.runs > 1
        # A subclass of `str`, as numpy has one, is text like any other.
        function, program, *inputs = map(str.__str__, (job.function, job.program, *job.inputs))
        payload = (run, several and not run, self.limits.output_bytes, function, program, tuple(inputs))
        self.forget_run()
        self.outgoing = memoryview(protocol.pack_payload(payload))
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        return theirs

    def send(self) -> int:
        """Write what fits; the events to wait for next."""
        try:
            while self.outgoing:
                self.outgoing = self.outgoing[self.socket.send(self.outgoing) :]
        except BlockingIOError:
            return select.EPOLLIN | select.EPOLLOUT
        except OSError:
            self.outgoing = memoryview(b"")  # the child is gone; its end is told by the zygote
        return select.EPOLLIN

    def receive(self) -> None:
        """Read what is there, up to one byte more than any honest answer; the rest is thrown away."""
        room = largest_frame(self.limits, len(self.job.inputs)) + 1
        try:
            while not self.end_of_file:
                part = self.socket.recv(1 << 17)
                self.data += part
                del self.data[room:]
                self.end_of_file = not part
        except BlockingIOError:
            return
        except OSError:
            self.end_of_file = True

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
