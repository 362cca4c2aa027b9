"""The thread behind a `Sandbox`: gives runs to zygotes (warm processes that fork a child per program), and judges."""

from __future__ import annotations

import itertools
import os
import select
import threading
import time
import weakref
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import replace

from . import health, protocol
from .jobs import Job, Limits, Status, Verdict
from .judge import Observation, combine, judge_run
from .listener import Listener
from .pending import Pending
from .protocol import LONGEST_EXTENSION
from .worker import Worker


# Programs under way per worker, so that one is run while others are handed over or end: 2 give 3 % less, 5 give 2 %
# more.
UNDER_WAY = 3
START_SECONDS = 30.0  # a zygote needs 0.1-0.3 s on an idle core
GRACE_SECONDS = 5.0  # how late an event may be before its zygote counts as sick
FAILED_STARTS = 3  # zygotes in a row that may fail to start


class Supervisor:
    """
    All but `submit`, `report` and `close` runs in one thread of its own, so nothing here needs a lock.

    Args:
        workers (`int`): Programs that run at a time; up to `UNDER_WAY` times as many are under way.
        seed (`int`): Chooses the hash seeds.
        allow_weak (`bool`): Whether level C is accepted.
        options (`dict`): What every zygote is told.

    Raises:
        `RuntimeError`: No zygote starts, or the host is too weak.
    """

    def __init__(self, workers: int, *, seed: int, allow_weak: bool, options: dict):
        self.workers, self.seed, self.allow_weak = workers, seed, allow_weak
        self.options = options
        self.pools: dict[int, list[Worker]] = {}  # by the index of their hash seed
        self.inbox: deque[Pending] = deque()
        self.queue: deque[Pending] = deque()
        self.unresolved: set[Pending] = set()
        self.waiting: dict[int, deque[Pending]] = {}  # for a zygote with this seed
        self.running: dict[int, Pending] = {}
        self.numbers = itertools.count(1)
        self.failed_starts = 0
        self.respawns: Counter[str] = Counter()
        self.failure: Exception | None = None
        self.closed, self.ready = False, threading.Event()
        self.listener, self.next_check = Listener(), 0.0
        for index in (0, 1):
            self._populate(index)
        self.thread = threading.Thread(target=self._loop, name="sandbox", daemon=True)
        self.thread.start()
        _alive.add(self)
        if not self.ready.wait(START_SECONDS * FAILED_STARTS) or self.failure:
            self.close()
            raise self.failure or RuntimeError(f"no zygote was ready within {START_SECONDS * FAILED_STARTS:g} s")

    # Called from any thread.

    def report(self) -> dict:
        """The weakest zygote's level, with its layers and probes; how often zygotes were replaced, by reason."""
        healthy = [each for each in self._workers() if each.healthy]
        worst = max(healthy, key=lambda each: each.level, default=None)  # "C" is the weakest
        return {
            "level": worst.level if worst else "C",
            "layers": dict(worst.layers) if worst else {},
            "refused": dict(worst.refused) if worst else {},
            "zygotes": len(healthy),
            "respawns": dict(self.respawns),
        }

    def submit(self, job: Job, limits: Limits) -> Future[Verdict]:
        if self.closed:
            raise RuntimeError("the sandbox is closed") from self.failure
        limits = replace(limits, cpu_seconds=limits.cpu_seconds / job.headroom)
        pending = Pending(job, limits)
        if (size := len(job.program.encode("utf-8", "surrogatepass"))) > limits.program_bytes:
            reason = f"a program of {size} bytes, more than {limits.program_bytes}"
            self._resolve(pending, Verdict(Status.POLICY, reason))
            return pending.future
        self.inbox.append(pending)
        self.listener.wake()
        if self.closed and not self.thread.is_alive():
            self._refuse_all()
        return pending.future

    def close(self) -> None:
        self.closed = True
        self.listener.wake()
        if self.thread is not threading.current_thread():
            self.thread.join(30)

    def _workers(self) -> list[Worker]:
        return [each for pool in list(self.pools.values()) for each in list(pool)]

    # The thread.

    def _loop(self) -> None:
        try:
            while not self.closed:
                self.listener.listen(0.5)
                self._pump()
                if time.monotonic() > self.next_check:
                    self._check_late()
        except Exception as error:
            self.failure = error
            raise
        finally:
            self.closed = True
            self._shut_down()
            self.ready.set()

    def _populate(self, index: int) -> None:
        """Starts a seed's zygotes: one per two workers for seeds 0 and 1, of first runs; one for any other seed."""
        copies = (self.workers + 1) // 2 if index < 2 else 1
        pool = self.pools.setdefault(index, [])
        while len(pool) < copies:
            hash_seed = 1 + (self.seed * 16 + index) % 4294967294
            worker = Worker(index, hash_seed, self.options)
            pool.append(worker)
            self.listener.watch(worker.control, select.EPOLLIN, self._on_control, worker)

    def _pump(self) -> None:
        while self.inbox:
            pending = self.inbox.popleft()
            self.unresolved.add(pending)
            self.queue.append(pending)
        while self.queue and len(self.running) < UNDER_WAY * self.workers:
            if not self._dispatch(self.queue.popleft()):
                break

    def _dispatch(self, pending: Pending) -> bool:
        """Gives a job to the least busy zygote of its seed; False when no file descriptor is left."""
        if pending.future.cancelled():
            self.unresolved.discard(pending)
            return True
        index = pending.seed_index
        if index not in self.pools:
            self._populate(index)
        healthy = [each for each in self.pools[index] if each.healthy]
        if healthy:
            return self._start(pending, min(healthy, key=lambda each: len(each.jobs)))
        self.waiting.setdefault(index, deque()).append(pending)
        return True

    def _start(self, pending: Pending, worker: Worker) -> bool:
        """Start the next run; False when no file descriptor is left."""
        number, limits = next(self.numbers), pending.limits
        try:
            theirs = pending.open()
        except OSError as error:
            if self.running:
                self.queue.appendleft(pending)
            else:
                self._resolve(pending, error)
            return False
        with theirs:
            pending.late_at = time.monotonic() + limits.cpu_seconds * LONGEST_EXTENSION + GRACE_SECONDS
            self.running[number] = pending
            kind = protocol.PROBE if pending.probe_of else protocol.START
            try:
                worker.start(kind, number, theirs.fileno(), limits.cpu_seconds, limits.memory_bytes)
            except OSError as error:
                self._lose(worker, f"it takes no orders: {error.strerror}")
                return True
        # What a program says is read when it has ended, or after a while, lest it waits for a full socket.
        if pending.send() & select.EPOLLOUT:
            self._listen(number, pending, select.EPOLLIN | select.EPOLLOUT)
        return True

    def _listen(self, number: int, pending: Pending, mask: int = select.EPOLLIN) -> None:
        if not self.listener.watches(pending.socket):
            self.listener.watch(pending.socket, mask, self._on_socket, number, pending)

    def _on_socket(self, number: int, pending: Pending, mask: int) -> None:
        if mask & select.EPOLLOUT:
            self.listener.change(pending.socket, pending.send())
        if mask & ~select.EPOLLOUT:
            pending.receive()
            self._settle(number, pending)

    def _on_control(self, worker: Worker, _: int) -> None:
        events = worker.events()
        for kind, status, number, cpu, wall, peak, report in events or ():
            pending = self.running.get(number)
            if kind == protocol.READY:
                worker.layers = report["layers"]
                self._probe(worker)
            elif kind == protocol.FAILED:
                worker.failure = report["error"]
            elif pending is not None:
                worker.jobs.discard(number)
                pending.event = Observation(kind == protocol.EXPIRED, status, cpu, wall, peak)
                pending.receive()
                if not pending.end_of_file:
                    self._listen(number, pending)
                self._settle(number, pending)
        if events is None:
            self._lose(worker, worker.failure or "it ended")

    def _settle(self, number: int, pending: Pending) -> None:
        """Finishes a run once its answer has ended and the zygote has told of its exit, whichever comes first."""
        if not pending.end_of_file:
            return
        self.listener.forget(pending.socket)
        if pending.event is not None:
            self._drop(number, pending)
            self._finish_run(pending)

    def _drop(self, number: int, pending: Pending) -> None:
        del self.running[number]
        self.listener.forget(pending.socket)
        pending.close()

    def _finish_run(self, pending: Pending) -> None:
        data, inputs = bytes(pending.data), len(pending.job.inputs)
        status, reason, outputs = judge_run(data, inputs, pending.limits, pending.event)
        if pending.probe_of is not None:
            self._admit(pending.probe_of, [text == "true" for text in outputs], reason)
            return
        if pending.take((status, reason, outputs), pending.event):
            self.queue.appendleft(pending)
        else:
            self._resolve(pending, combine(pending.runs, pending.seen))

    # Births and deaths of zygotes.

    def _probe(self, worker: Worker) -> None:
        pending = Pending(Job("", ("",) * len(health.PROBES)), Limits(cpu_seconds=10.0))
        pending.probe_of = worker
        self._start(pending, worker)

    def _admit(self, worker: Worker, refused: list[bool], reason: str) -> None:
        """A zygote has tried its own walls: let it serve, or give up when the host is too weak."""
        worker.refused = dict(zip(health.PROBES, refused, strict=False))
        if worker.level == "C" and not self.allow_weak:
            self.failure = RuntimeError(worker.weakness(reason))
            self.closed = True
            return
        worker.healthy, self.failed_starts = True, 0
        for pending in reversed(self.waiting.pop(worker.seed_index, ())):
            self.queue.appendleft(pending)
        if all(any(each.healthy for each in pool) for pool in self.pools.values()):
            self.ready.set()

    def _lose(self, worker: Worker, reason: str) -> None:
        """A zygote is gone: start another, and give its jobs one more chance."""
        self.listener.forget(worker.control)
        words = worker.failure or ("" if worker.healthy else worker.last_words())
        worker.kill()
        self.pools[worker.seed_index].remove(worker)
        for number in worker.jobs:
            pending = self.running[number]
            self._drop(number, pending)
            if pending.probe_of is not None:
                continue
            if pending.retried:
                twice = "its worker process died twice while the program was running"
                self._resolve(pending, Verdict(Status.TAMPERED, twice))
            else:
                pending.retried = True
                self.queue.appendleft(pending)
        self.respawns[reason] += 1
        self.failed_starts += not worker.healthy
        if self.failed_starts >= FAILED_STARTS:
            self.failure = RuntimeError(f"{FAILED_STARTS} zygotes in a row did not start: {words}")
            self.closed = True
        else:
            self._populate(worker.seed_index)

    def _check_late(self) -> None:
        """Replace zygotes that do not start or do not report, and listen to programs that take so long."""
        now = time.monotonic()
        self.next_check = now + 0.5
        for worker in self._workers():
            unborn = not worker.healthy and now > worker.born + START_SECONDS
            if unborn or any(now > self.running[number].late_at for number in worker.jobs):
                self._lose(worker, "it did not start in time" if unborn else "it did not report in time")
                continue
            for number in worker.jobs:
                self._listen(number, self.running[number])

    def _shut_down(self) -> None:
        workers = self._workers()
        for worker in workers:
            worker.control.close()
        for worker in workers:
            worker.close()
        for pending in self.running.values():
            pending.close()
        self._refuse_all()
        self.listener.close()

    def _resolve(self, pending: Pending, result: Verdict | Exception) -> None:
        self.unresolved.discard(pending)
        if not pending.future.set_running_or_notify_cancel():
            return
        if isinstance(result, Exception):
            pending.future.set_exception(result)
        else:
            pending.future.set_result(result)

    def _refuse_all(self) -> None:
        while self.inbox:
            self.unresolved.add(self.inbox.popleft())
        error = RuntimeError("the sandbox was closed before this job was finished")
        error.__cause__ = self.failure
        for pending in list(self.unresolved):
            self._resolve(pending, error)


_alive: weakref.WeakSet[Supervisor] = weakref.WeakSet()


def _after_fork() -> None:
    """
    In a process forked from the trainer: let go of every socket, so that the trainer's death is still seen by its
    zygotes. The fork has no supervisor thread; using the sandbox there raises.
    """
    for each in _alive:
        each.closed = True
        for worker in each._workers():
            worker.control.close()
            worker.process.returncode = 0  # not ours to wait for
        for pending in each.running.values():
            pending.close()
        each.listener.epoll.close()


os.register_at_fork(after_in_child=_after_fork)
