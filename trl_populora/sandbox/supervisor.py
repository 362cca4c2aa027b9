"""The thread behind a `Sandbox`: hands jobs to zygotes, hears how each zygote's child ended, and resolves verdicts.

    submit --inbox--> queue --> running (a zygote's child has it) --judge--> the next run, or the job's verdict

A zygote is a warm process that forks one child per program. A `Pending` is a job on its way. Its runs come one after
the other, each in a zygote of another hash seed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from . import confine, protocol
from .jobs import Job, Limits, Status, Verdict
from .judge import Observation, Run, combine, judge_run, largest_frame
from .protocol import LONGEST_EXTENSION
from .worker import Worker


# Programs under way per worker: one runs while others are handed over or end. With 2 the sandbox is 3 % slower, with 5
# it is 2 % faster.
UNDER_WAY = 3
START_SECONDS = 30.0  # a zygote needs 0.1-0.3 s on an idle core
GRACE_SECONDS = 5.0  # how late an event may be before its zygote counts as sick
FAILED_STARTS = 3  # after so many failed starts in a row the sandbox gives up
SENSITIVE_RUNS = 6  # a choice between two results by a set's order passes six runs 1 time in 32, two runs 1 time in 2


class Pending:
    """
    A job, its future, and the private socket of its current run.

    Args:
        job: What to run.
        limits: The job's limits, or the sandbox's.
    """

    probe_of: Worker | None = None  # for a probe: the zygote whose walls it tries

    def __init__(self, job: Job, limits: Limits):
        self.job, self.limits = job, limits
        self.future: Future[Verdict] = Future()
        self.runs: list[Run] = []  # the finished runs
        self.seen: list[Observation] = []  # what was observed of each finished run
        self.wanted = job.runs
        self.retried = False  # whether a zygote has died under this job
        self.socket: socket.socket = None  # type: ignore[assignment]  # `None` until the first `open`
        self.forget_run()

    def take(self, run: Run, seen: Observation) -> bool:
        """Notes a finished run; returns whether another one is needed."""
        self.runs.append(run)
        self.seen.append(seen)
        # An `ok` run has a reason only if the child says that the order of a set may matter.
        if run.reason and self.job.runs > 1:
            self.wanted = max(self.wanted, SENSITIVE_RUNS)
        # A run that fails or disagrees decides the verdict, so no further run is needed.
        return run.status is Status.OK and len(self.runs) < self.wanted and run.outputs == self.runs[0].outputs

    def forget_run(self) -> None:
        """Drops what is known of the current run."""
        self.outgoing = memoryview(b"")  # the rest of the payload that the socket has not taken yet
        self.data = bytearray()  # the answer so far
        self.end_of_file = False
        self.event: Observation = None  # type: ignore[assignment]  # `None` until the zygote reports the child's end
        self.late_at = float("inf")  # when the zygote counts as sick if it has not reported

    @property
    def seed_index(self) -> int:
        """
        The index of the next run's hash seed among the sandbox's hash seeds.

        The index depends only on the program and the number of the run, so that the same jobs repeat exactly under any
        load.
        """
        first = zlib.crc32(self.job.program.encode("utf-8", "surrogatepass")) & 1
        number = len(self.runs)
        # Half of all programs begin with the seed of index 1, so that the zygotes of both first seeds are equally
        # busy.
        return first ^ number if number < 2 else number

    def open(self) -> socket.socket:
        """Opens a private socket pair for the next run; keeps our end and returns the child's."""
        job = self.job
        # `marshal` refuses subclasses of `str`, such as numpy's. `str.__str__` makes a plain copy.
        function, program, *inputs = map(str.__str__, (job.function, job.program, *job.inputs))
        payload = (len(self.runs), self.limits.output_bytes, function, program, tuple(inputs))
        self.forget_run()
        self.outgoing = memoryview(protocol.pack_payload(payload))
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        return theirs

    def send(self) -> int:
        """Writes as much of the payload as the socket takes; returns the events to wait for next."""
        try:
            while self.outgoing:
                self.outgoing = self.outgoing[self.socket.send(self.outgoing) :]
        except BlockingIOError:
            return select.EPOLLIN | select.EPOLLOUT
        except OSError:
            self.outgoing = memoryview(b"")  # the child is gone, and the zygote will tell how it ended
        return select.EPOLLIN

    def receive(self) -> None:
        """Reads what has arrived, and notes whether the answer has ended."""
        # One byte more than the longest honest answer is kept. It shows the judge that the answer is too long.
        most = largest_frame(self.limits, len(self.job.inputs)) + 1
        try:
            while not self.end_of_file:
                part = self.socket.recv(1 << 17)
                self.data += part
                del self.data[most:]
                self.end_of_file = not part
        except BlockingIOError:
            return
        except OSError:
            self.end_of_file = True

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()


class Listener:
    """Calls the handler of each socket that is ready. Any thread may call `wake`, which ends the waiting."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.handlers: dict[int, tuple] = {}
        self.wake_read, self.wake_write = socket.socketpair()
        for each in (self.wake_read, self.wake_write):
            each.setblocking(False)
        self.watch(self.wake_read, select.EPOLLIN, self._on_wake)

    def watch(self, source: socket.socket, mask: int, handler: Callable, *arguments: object) -> None:
        """Calls `handler(*arguments, mask)` from now on when the source is ready."""
        self.handlers[source.fileno()] = (handler, arguments)
        self.epoll.register(source.fileno(), mask)

    def watches(self, source: socket.socket) -> bool:
        return source.fileno() in self.handlers

    def change(self, source: socket.socket, mask: int) -> None:
        self.epoll.modify(source.fileno(), mask)

    def forget(self, source: socket.socket) -> None:
        if self.handlers.pop(source.fileno(), None):
            self.epoll.unregister(source.fileno())

    def listen(self, seconds: float) -> None:
        """Waits at most `seconds` for a socket to be ready, then calls the handlers of the ready sockets."""
        for fd, mask in self.epoll.poll(seconds):
            if fd in self.handlers:
                handler, arguments = self.handlers[fd]
                handler(*arguments, mask)

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            self.wake_write.send(b"x")

    def _on_wake(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.wake_read.recv(4096):
                pass

    def close(self) -> None:
        for each in (self.epoll, self.wake_read, self.wake_write):
            each.close()


class Supervisor:
    """
    Owns every socket and every zygote of a `Sandbox`.

    After the start only `submit`, `report` and `close` are called from other threads. All the rest runs in one thread,
    so that nothing here needs a lock.

    Args:
        workers: How many cores the programs are meant to fill. Up to `UNDER_WAY` programs per worker are under way.
        seed: Chooses the hash seeds.
        allow_weak: Whether level C is accepted.
        options: Options of every zygote, passed on its command line.

    Raises:
        `RuntimeError`: If zygotes do not start, or the host cannot confine programs and `allow_weak` is not set.
        `OSError`: If they cannot be started, because file descriptors or processes have run out.
    """

    def __init__(self, workers: int, *, seed: int, allow_weak: bool, options: dict):
        self.workers, self.seed, self.allow_weak = workers, seed, allow_weak
        self.options = options
        self.pools: dict[int, list[Worker]] = {}  # zygotes by the index of their hash seed
        self.inbox: deque[Pending] = deque()  # other threads append jobs, the supervisor's thread takes them
        self.queue: deque[Pending] = deque()  # jobs that wait until fewer are under way
        self.waiting: dict[int, deque[Pending]] = {}  # jobs by seed index, until a zygote of that seed may serve
        self.running: dict[int, Pending] = {}  # jobs under way, by number of the run
        self.unresolved: set[Pending] = set()  # jobs that were taken from the inbox and have no verdict yet
        self.numbers = itertools.count(1)
        self.failed_starts = 0
        self.respawns: Counter[str] = Counter()
        self.failure: Exception | None = None
        self.closed, self.ready = False, threading.Event()
        self.listener, self.next_check = Listener(), 0.0
        self.thread = threading.Thread(target=self._loop, name="sandbox", daemon=True)
        try:
            for index in (0, 1):
                self._populate(index)
            self.thread.start()
            _alive.add(self)
            if not self.ready.wait(START_SECONDS * FAILED_STARTS) or self.failure:
                late = f"zygotes were not ready within {START_SECONDS * FAILED_STARTS:g} s"
                raise self.failure or RuntimeError(late)
        except BaseException:  # Ctrl-C as well must leave neither the thread nor a zygote
            self.close()
            raise

    # Called from any thread.

    def report(self) -> dict:
        """Returns the weakest zygote's level, layers and probes, and how often zygotes were replaced, by reason."""
        healthy = [each for each in self._workers() if each.healthy]
        worst = max(healthy, key=lambda each: each.level, default=None)  # "C", the weakest, is the largest letter
        return {
            "level": worst.level if worst else "C",
            "layers": dict(worst.layers) if worst else {},
            "refused": dict(worst.refused) if worst else {},
            "zygotes": len(healthy),
            "respawns": dict(self.respawns),
        }

    def submit(self, job: Job, limits: Limits) -> Future[Verdict]:
        """Queues a job; its verdict arrives in the future."""
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
        # The thread may have ended between the check above and the append. Then nobody else would refuse the job.
        if self.closed and not self.thread.is_alive():
            self._refuse_all()
        return pending.future

    def close(self) -> None:
        """Ends the thread, which ends the zygotes and refuses the unfinished jobs."""
        self.closed = True
        self.listener.wake()
        if self.thread.ident is None:  # an error has come before the thread's start
            self._shut_down()
        # The finalizer of a dropped `Sandbox` may run in any thread. The supervisor's thread cannot wait for itself.
        elif self.thread is not threading.current_thread():
            self.thread.join(30)

    def _workers(self) -> list[Worker]:
        return [each for pool in list(self.pools.values()) for each in list(pool)]

    # What the supervisor's thread does.

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
        """Starts the missing zygotes of one hash seed; raises `OSError` if no file descriptor is left for one."""
        # The seeds of index 0 and 1 run most programs. Each of them gets one zygote per two workers, each further seed
        # gets one zygote.
        copies = (self.workers + 1) // 2 if index < 2 else 1
        pool = self.pools.setdefault(index, [])
        while len(pool) < copies:
            hash_seed = 1 + (self.seed * 16 + index) % 4294967294
            worker = Worker(index, hash_seed, self.options)
            pool.append(worker)
            self.listener.watch(worker.control, select.EPOLLIN, self._on_control, worker)

    def _pump(self) -> None:
        """Moves new jobs from the inbox to the queue, then starts jobs up to `UNDER_WAY` per worker."""
        while self.inbox:
            pending = self.inbox.popleft()
            self.unresolved.add(pending)
            self.queue.append(pending)
        while self.queue and len(self.running) < UNDER_WAY * self.workers:
            if not self._dispatch(self.queue.popleft()):
                break

    def _dispatch(self, pending: Pending) -> bool:
        """
        Gives a job to the least busy zygote of its seed. If none of that seed may serve yet, the job waits.

        Returns `False` if no file descriptor is left.
        """
        if pending.future.cancelled():
            self.unresolved.discard(pending)
            pending.future.set_running_or_notify_cancel()  # ends the waiting of `concurrent.futures.wait`
            return True
        index = pending.seed_index
        if not self.pools.get(index):
            try:
                self._populate(index)
            except OSError as error:
                return self._put_off(pending, error)
        healthy = [each for each in self.pools[index] if each.healthy]
        if healthy:
            return self._start(pending, min(healthy, key=lambda each: len(each.jobs)))
        self.waiting.setdefault(index, deque()).append(pending)
        return True

    def _start(self, pending: Pending, worker: Worker) -> bool:
        """Starts a job's next run; returns `False` when no file descriptor is left."""
        number, limits = next(self.numbers), pending.limits
        try:
            theirs = pending.open()
        except OSError as error:
            return self._put_off(pending, error)
        with theirs:
            pending.late_at = time.monotonic() + limits.cpu_seconds * LONGEST_EXTENSION + GRACE_SECONDS
            self.running[number] = pending
            kind = protocol.PROBE if pending.probe_of else protocol.START
            try:
                worker.start(kind, number, theirs.fileno(), limits.cpu_seconds, limits.memory_bytes)
            except OSError as error:
                self._lose(worker, f"it takes no orders: {error.strerror}")
                return True
        # The answer is read when the program has ended: watching every socket would make the sandbox 4 % slower. A
        # program that takes long may have filled its socket and wait. `_check_late` starts to read from such programs.
        if pending.send() & select.EPOLLOUT:
            self._listen(number, pending, select.EPOLLIN | select.EPOLLOUT)
        return True

    def _put_off(self, pending: Pending, error: OSError) -> bool:
        """Puts a job back into the queue, because no file descriptor is left; returns `False`."""
        if pending.probe_of is not None:
            return False  # `_check_late` probes again
        # A job that ends gives its descriptor back. If no job runs, none comes back.
        if self.running:
            self.queue.appendleft(pending)
        else:
            self._resolve(pending, error)
        return False

    def _listen(self, number: int, pending: Pending, mask: int = select.EPOLLIN) -> None:
        """Reads a job's answer as it arrives."""
        if not self.listener.watches(pending.socket):
            self.listener.watch(pending.socket, mask, self._on_socket, number, pending)

    def _on_socket(self, number: int, pending: Pending, mask: int) -> None:
        """Sends more of a payload, or reads more of an answer."""
        if mask & select.EPOLLOUT:
            self.listener.change(pending.socket, pending.send())
        if mask & ~select.EPOLLOUT:
            pending.receive()
            self._settle(number, pending)

    def _on_control(self, worker: Worker, _: int) -> None:
        """Hears what a zygote reports: that it is ready or could not start, and how children ended."""
        events = worker.read_events()
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
                # The child is dead, so all that it wrote has arrived. The end of the file may still be missing: a
                # process forked from the trainer may hold a copy of the child's socket.
                pending.end_of_file = True
                self._settle(number, pending)
        if events is None:
            self._lose(worker, worker.failure or "it ended")

    def _settle(self, number: int, pending: Pending) -> None:
        """Finishes a run once the zygote has reported the child's end. By then its answer may have ended."""
        if not pending.end_of_file:
            return
        self.listener.forget(pending.socket)
        if pending.event is not None:
            self._drop(number, pending)
            self._finish_run(pending)

    def _drop(self, number: int, pending: Pending) -> None:
        """Takes a job from those under way and closes its socket."""
        del self.running[number]
        self.listener.forget(pending.socket)
        pending.close()

    def _finish_run(self, pending: Pending) -> None:
        """Judges a run. A probe decides about its zygote; any other job gets its next run or its verdict."""
        data, inputs = bytes(pending.data), len(pending.job.inputs)
        run = judge_run(data, inputs, pending.limits, pending.event)
        if pending.probe_of is not None:
            self._admit(pending.probe_of, [text == "true" for text in run.outputs], run.reason)
            return
        if pending.take(run, pending.event):
            self.queue.appendleft(pending)  # first in the queue, so that jobs that have begun end soon
        else:
            self._resolve(pending, combine(pending.runs, pending.seen))

    # Births and deaths of zygotes.

    def _probe(self, worker: Worker) -> None:
        """Lets a zygote's first child try the walls: a job without a program, with one output per probe."""
        pending = Pending(Job("", ("",) * len(confine.PROBES)), Limits(cpu_seconds=10.0))
        pending.probe_of = worker
        self._start(pending, worker)

    def _admit(self, worker: Worker, refused: list[bool], reason: str) -> None:
        """Decides about a zygote whose walls have been tried: it may serve, or the sandbox gives up on a weak host."""
        worker.refused = dict(zip(confine.PROBES, refused, strict=False))
        if worker.level == "C" and not self.allow_weak:
            self.failure = RuntimeError(worker.explain_weakness(reason))
            self.closed = True
            return
        worker.healthy, self.failed_starts = True, 0
        for pending in reversed(self.waiting.pop(worker.seed_index, ())):
            self.queue.appendleft(pending)
        if all(any(each.healthy for each in pool) for pool in self.pools.values()):
            self.ready.set()

    def _lose(self, worker: Worker, reason: str) -> None:
        """Kills and replaces a zygote that is gone or sick, and gives each of its jobs one more chance."""
        self.listener.forget(worker.control)
        words = worker.failure or ("" if worker.healthy else worker.read_last_words())
        worker.kill()
        self.pools[worker.seed_index].remove(worker)
        for number in worker.jobs:
            pending = self.running[number]
            self._drop(number, pending)
            if pending.probe_of is not None:
                continue
            # A program that ends its zygote would do so again and again, so a second death counts against it.
            if pending.retried:
                twice = "its zygote died twice while the program was running"
                self._resolve(pending, Verdict(Status.TAMPERED, twice))
            else:
                pending.retried = True
                self.queue.appendleft(pending)
        self.respawns[reason] += 1
        self.failed_starts += not worker.healthy  # the end of an admitted zygote is no failed start
        if self.failed_starts >= FAILED_STARTS:
            self.failure = RuntimeError(f"{FAILED_STARTS} zygotes in a row did not start: {words}")
            self.closed = True
            return
        try:
            self._populate(worker.seed_index)
        except OSError:  # `_dispatch` and `_check_late` try again
            self.queue.extend(self.waiting.pop(worker.seed_index, ()))

    def _check_late(self) -> None:
        """
        Replaces zygotes that do not start or do not report; begins to read answers of programs that take long.

        It also makes up for what a lack of file descriptors has prevented: the start of a zygote, and its probe.
        """
        now = time.monotonic()
        self.next_check = now + 0.5
        for worker in self._workers():
            unborn = not worker.healthy and now > worker.born + START_SECONDS
            if unborn or any(now > self.running[number].late_at for number in worker.jobs):
                self._lose(worker, "it did not start in time" if unborn else "it did not report in time")
                continue
            for number in worker.jobs:
                self._listen(number, self.running[number])
            if worker.layers and not worker.healthy and not worker.jobs:
                self._probe(worker)
        with contextlib.suppress(OSError):
            for index in () if self.closed else self.pools:
                self._populate(index)

    def _shut_down(self) -> None:
        """Ends all zygotes, and sets an error in the future of each unfinished job."""
        workers = self._workers()
        # All sockets are closed first, so that the zygotes end at the same time and not one after the other.
        for worker in workers:
            worker.control.close()
        for worker in workers:
            worker.close()
        for pending in self.running.values():
            pending.close()
        self._refuse_all()
        self.listener.close()

    def _resolve(self, pending: Pending, result: Verdict | Exception) -> None:
        """Gives a job's future its verdict, or an exception."""
        self.unresolved.discard(pending)
        if not pending.future.set_running_or_notify_cancel():
            return
        if isinstance(result, Exception):
            pending.future.set_exception(result)
        else:
            pending.future.set_result(result)

    def _refuse_all(self) -> None:
        """Sets an error in the future of every job that has no verdict."""
        while self.inbox:
            self.unresolved.add(self.inbox.popleft())
        error = RuntimeError("the sandbox was closed before this job was finished")
        error.__cause__ = self.failure
        for pending in list(self.unresolved):
            self._resolve(pending, error)


_alive: weakref.WeakSet[Supervisor] = weakref.WeakSet()


def _after_fork() -> None:
    """
    Closes the copies of the sockets to zygotes and programs in a process that was forked from the trainer.

    A zygote ends when nobody holds the other end of its socket. A copy in the fork would keep the zygote alive after
    the trainer has ended. The fork has no supervisor thread, so a job that is submitted there raises.
    """
    for each in _alive:
        each.closed = True
        for worker in each._workers():
            worker.control.close()
            worker.process.returncode = 0  # so nobody in the fork waits for the zygote, which is not its child
        for pending in each.running.values():
            pending.close()
        each.listener.epoll.close()


os.register_at_fork(after_in_child=_after_fork)
