"""The thread behind a `Sandbox`: which run goes to which zygote, what comes back, and what to do when one dies."""

from __future__ import annotations

import itertools
import json
import re
import select
import socket
import threading
import time
import zlib
from collections import deque
from concurrent.futures import Future

from . import protocol
from .jobs import Job, Limits, Status, Verdict
from .judge import Observation, combine, judge_run, largest_frame
from .worker import START_SECONDS, Worker


GRACE_SECONDS = 5.0  # how late an event may be before its zygote counts as sick
SENSITIVE_RUNS = 6  # runs of a program whose result may hang on the order of a set
_SENSITIVE = re.compile(r"\b(?:set|frozenset|hash|id)\b")


class Pending:
    """A job on its way: its runs so far, and the socket of the run in progress."""

    def __init__(self, job: Job, limits: Limits):
        self.job, self.limits = job, limits
        self.future: Future[Verdict] = Future()
        self.runs: list = []
        self.seen: list[Observation] = []
        self.retried = False
        self.socket: socket.socket | None = None
        self.outgoing = memoryview(b"")
        self.data = bytearray()
        self.end_of_file = False
        self.event: Observation | None = None
        self.late = 0.0
        self.foreground = False
        self.wanted = job.runs
        if job.runs > 1 and _SENSITIVE.search(job.program):
            self.wanted = max(job.runs, SENSITIVE_RUNS)

    @property
    def seed_index(self) -> int:
        """Which hash seed the next run gets; depends on the program alone, so that a run can be repeated."""
        first = zlib.crc32(self.job.program.encode("utf-8", "surrogatepass")) & 1
        return first ^ len(self.runs) if len(self.runs) < 2 else len(self.runs)

    def payload(self, soft: bool) -> bytes:
        body = json.dumps(
            {
                "program": self.job.program,
                "function": self.job.function,
                "inputs": self.job.inputs,
                "output_bytes": self.limits.output_bytes,
                "backwards": bool(len(self.runs) & 1),
                "soft": soft,
            }
        ).encode()
        return protocol.LENGTH.pack(len(body)) + body


class Supervisor:
    """
    Everything but `submit` and `close` runs in its one thread, so nothing here needs a lock.

    Args:
        workers (`int`): Programs at a time.
        seed (`int`): Chooses the hash seeds.
        soft (`bool`): Whether the soft layer is on.
        allow_weak (`bool`): Whether level C is accepted.
    """

    def __init__(self, workers: int, *, seed: int, soft: bool, allow_weak: bool):
        self.workers, self.seed, self.soft, self.allow_weak = workers, seed, soft, allow_weak
        self.slots: dict[int, Worker] = {}
        self.inbox: deque[Pending] = deque()
        self.queue: deque[Pending] = deque()
        self.waiting: dict[int, deque[Pending]] = {}
        self.running: dict[int, Pending] = {}
        self.numbers = itertools.count(1)
        self.foreground = self.background = 0
        self.closed = False
        self.failure: Exception | None = None
        self.epoll = select.epoll()
        self.handlers: dict[int, tuple] = {}
        self.wake_read, self.wake_write = socket.socketpair()
        self.wake_read.setblocking(False)
        self.wake_write.setblocking(False)
        self._watch(self.wake_read.fileno(), select.EPOLLIN, self._drain_wake)
        for index in (0, 1):
            self._spawn(index)
        self.thread = threading.Thread(target=self._loop, name="sandbox", daemon=True)
        self.thread.start()

    level = "C"

    def report(self) -> dict:
        return {"level": self.level}

    # Called from any thread.

    def submit(self, job: Job, limits: Limits) -> Future[Verdict]:
        pending = Pending(job, limits)
        if self.closed:
            raise RuntimeError("the sandbox is closed")
        self.inbox.append(pending)
        self._wake()
        return pending.future

    def close(self) -> None:
        self.closed = True
        self._wake()
        self.thread.join(10)

    def _wake(self) -> None:
        try:
            self.wake_write.send(b"x")
        except BlockingIOError:
            pass

    # The thread.

    def _watch(self, fd: int, mask: int, handler, *arguments) -> None:
        self.handlers[fd] = (handler, arguments)
        self.epoll.register(fd, mask)

    def _forget(self, fd: int) -> None:
        del self.handlers[fd]
        self.epoll.unregister(fd)

    def _loop(self) -> None:
        try:
            while not self.closed:
                for fd, mask in self.epoll.poll(0.5):
                    if fd in self.handlers:
                        handler, arguments = self.handlers[fd]
                        handler(*arguments, mask)
                self._pump()
                self._check_late()
        finally:
            self._shut_down()

    def _drain_wake(self, _: int) -> None:
        try:
            while self.wake_read.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _spawn(self, index: int) -> Worker:
        worker = Worker({"soft": self.soft, "debug": True}, hash_seed=1 + (self.seed * 16 + index) % 4294967295)
        self.slots[index] = worker
        self._watch(worker.control.fileno(), select.EPOLLIN, self._on_control, index, worker)
        return worker

    def _pump(self) -> None:
        while self.inbox:
            self.queue.append(self.inbox.popleft())
        while self.queue and self.foreground < 2 * self.workers:
            pending = self.queue.popleft()
            index = pending.seed_index
            worker = self.slots.get(index) or self._spawn(index)
            if worker.ready:
                self._start(pending, worker)
            else:
                self.waiting.setdefault(index, deque()).append(pending)

    def _start(self, pending: Pending, worker: Worker) -> None:
        number = next(self.numbers)
        ours, theirs = socket.socketpair()
        limits = pending.limits
        pending.socket, pending.data, pending.end_of_file, pending.event = ours, bytearray(), False, None
        pending.outgoing = memoryview(pending.payload(self.soft))
        pending.late = time.monotonic() + limits.wall_seconds + GRACE_SECONDS
        pending.foreground = True
        self.foreground += 1
        self.running[number] = pending
        ours.setblocking(False)
        with theirs:
            try:
                worker.start(
                    number,
                    theirs.fileno(),
                    limits.wall_seconds,
                    limits.owed_cpu_seconds,
                    limits.memory_bytes,
                    protocol.MAY_YIELD,
                )
            except OSError:
                worker.jobs.add(number)
                self._watch(ours.fileno(), 0, self._on_socket, pending, number)
                self._lose(worker)
                return
        self._send(pending)
        mask = select.EPOLLIN | (select.EPOLLOUT if pending.outgoing else 0)
        self._watch(ours.fileno(), mask, self._on_socket, pending, number)

    def _send(self, pending: Pending) -> None:
        try:
            while pending.outgoing:
                pending.outgoing = pending.outgoing[pending.socket.send(pending.outgoing) :]
        except BlockingIOError:
            pass
        except OSError:
            pending.outgoing = memoryview(b"")

    def _on_socket(self, pending: Pending, number: int, mask: int) -> None:
        if mask & select.EPOLLOUT:
            self._send(pending)
            if not pending.outgoing:
                self.epoll.modify(pending.socket.fileno(), select.EPOLLIN)
        if mask & ~select.EPOLLOUT:
            self._receive(pending, number)

    def _receive(self, pending: Pending, number: int) -> None:
        room = largest_frame(pending.limits, len(pending.job.inputs)) + 1
        try:
            while not pending.end_of_file:
                part = pending.socket.recv(min(1 << 18, room))
                if len(pending.data) < room:
                    pending.data += part[: room - len(pending.data)]
                pending.end_of_file = not part
        except BlockingIOError:
            return
        except OSError:
            pending.end_of_file = True
        self.epoll.modify(pending.socket.fileno(), 0)
        if pending.event is not None:
            self._finish(number, pending)

    def _on_control(self, index: int, worker: Worker, _: int) -> None:
        events = worker.events()
        if events is None:
            self._lose(worker)
            return
        for kind, status, number, cpu, wall, peak in events:
            if kind == protocol.READY:
                self.queue.extendleft(reversed(self.waiting.pop(index, ())))
                continue
            pending = self.running.get(number)
            if pending is None:
                continue
            if kind == protocol.SLOW:
                self._release(pending)
                continue
            worker.jobs.discard(number)
            pending.event = Observation(kind == protocol.EXPIRED, status, cpu, wall, peak)
            self._receive(pending, number) if not pending.end_of_file else self._finish(number, pending)

    def _release(self, pending: Pending) -> None:
        if pending.foreground:
            pending.foreground = False
            self.foreground -= 1

    def _drop(self, number: int, pending: Pending) -> None:
        del self.running[number]
        self._release(pending)
        self._forget(pending.socket.fileno())
        pending.socket.close()

    def _finish(self, number: int, pending: Pending) -> None:
        self._drop(number, pending)
        result = judge_run(bytes(pending.data), len(pending.job.inputs), pending.limits, pending.event)
        pending.runs.append(result)
        pending.seen.append(pending.event)
        if result[0] is Status.OK and len(pending.runs) < pending.wanted and result[2] == pending.runs[0][2]:
            self.queue.appendleft(pending)
        else:
            pending.future.set_result(combine(pending.runs, pending.seen))

    def _lose(self, worker: Worker) -> None:
        """A zygote is gone: start another, and give its jobs one more chance."""
        index = next(index for index, each in self.slots.items() if each is worker)
        self._forget(worker.control.fileno())
        worker.kill()
        for number in worker.jobs:
            pending = self.running[number]
            self._drop(number, pending)
            if pending.retried:
                pending.future.set_result(Verdict(Status.TAMPERED, "its worker process died twice while it was running"))
            else:
                pending.retried = True
                self.queue.appendleft(pending)
        self._spawn(index)

    def _check_late(self) -> None:
        now = time.monotonic()
        for worker in list(self.slots.values()):
            starting = not worker.ready and now > worker.born + START_SECONDS
            if starting or any(now > self.running[number].late for number in worker.jobs):
                self._lose(worker)

    def _shut_down(self) -> None:
        for worker in self.slots.values():
            worker.close()
        for pending in [*self.running.values(), *self.queue, *self.inbox, *itertools.chain(*self.waiting.values())]:
            if pending.socket is not None:
                pending.socket.close()
            if not pending.future.done():
                pending.future.set_exception(RuntimeError("the sandbox was closed before this job was finished"))
        self.epoll.close()
        self.wake_read.close()
        self.wake_write.close()
