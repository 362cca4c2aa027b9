"""One pool for the ranks of a node: the rank that owns it serves the others over a local socket (phases 3 and 4).

The owner's `Sandbox.share()` listens on an abstract Unix socket, which no file outlives and no path limits, and
answers the programs of its own user only. The others hold a [`SandboxClient`], which does all that a `Sandbox` does.
Jobs and verdicts travel as JSON lists under a length, so neither side can be handed an object.

A client that goes away takes its waiting jobs with it. An owner that goes away ends every future of its clients with
an error that names it; nothing is run a second time elsewhere, because the ranks of a run live and die together.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from .jobs import Gold, Job, Limits, Status, Verdict
from .protocol import LENGTH
from .runner import Runner


GREETING_SECONDS = 60.0  # an owner that is busy starting up still answers
MAX_FRAME = 1 << 30  # bytes: a job's program and inputs, or a verdict's outputs
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_clients: weakref.WeakSet[SandboxClient] = weakref.WeakSet()


def _pack(message: list[Any]) -> bytes:
    # Escapes would join two lone surrogates into one character; their bytes stay apart.
    body = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return LENGTH.pack(len(body)) + body


def _read(stream: Any) -> list[Any] | None:
    """The next message; None at the end of the stream, and for anything that is no message."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size or LENGTH.unpack(head)[0] > MAX_FRAME:
        return None
    body = stream.read(LENGTH.unpack(head)[0])
    try:
        message = json.loads(body.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, list) else None


def _pack_job(number: int, job: Job, limits: Limits) -> bytes:
    gold = None if job.gold is None else list(job.gold.outputs)
    limit_values = list(vars(limits).values())
    return _pack([number, job.program, list(job.inputs), job.runs, limit_values, job.function, gold, job.headroom])


def _unpack_job(message: list[Any]) -> tuple[int, Job, Limits]:
    number, program, inputs, runs, limits, function, gold, headroom = message
    gold = None if gold is None else Gold(tuple(gold))
    return number, Job(program, tuple(inputs), runs, None, function, gold, headroom), Limits(*limits)


def _pack_verdict(number: int, future: Future[Verdict]) -> bytes:
    error = future.exception()
    if error is not None:
        return _pack([number, f"{type(error).__name__}: {error}"])
    verdict = future.result()
    return _pack([number, verdict.status.value, *list(vars(verdict).values())[1:]])


def _unpack_verdict(rest: list[Any]) -> Verdict:
    status, reason, outputs, *usage = rest
    return Verdict(Status(status), reason, tuple(outputs), *usage)


class _Line:
    """One connection: a thread that reads messages and one that writes frames, so that no caller waits for a peer."""

    def __init__(self, connection: socket.socket):
        self.connection, self.stream = connection, connection.makefile("rb")
        self.outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        _sockets.add(connection)

    def start(self, on_message: Callable[[list[Any]], None], on_end: Callable[[], None]) -> None:
        for work, arguments in ((self._read_all, (on_message, on_end)), (self._write_all, ())):
            self.threads.append(threading.Thread(target=work, args=arguments, name="sandbox line", daemon=True))
            self.threads[-1].start()

    def send(self, frame: bytes) -> None:
        self.outgoing.put(frame)

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.outgoing.put(None)

    def close(self) -> None:
        """Hang up and wait until both threads have noticed."""
        self.hang_up()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(10)

    def _read_all(self, on_message: Callable[[list[Any]], None], on_end: Callable[[], None]) -> None:
        try:
            while (message := _read(self.stream)) is not None:
                on_message(message)
        except (OSError, LookupError, TypeError, ValueError):
            pass  # the peer is gone, or says what no peer of ours says: either way there is nobody to talk to
        finally:
            self.hang_up()
            on_end()
            self.stream.close()

    def _write_all(self) -> None:
        with contextlib.suppress(OSError):
            while (frame := self.outgoing.get()) is not None:
                self.connection.sendall(frame)
        self.hang_up()
        self.connection.close()


class SandboxServer:
    """
    Lets other processes of this user, on this host, use a pool.

    Args:
        submit (`Callable`): Takes a job and its limits, returns a future.
        greeting (`dict`): What every client is told first: the pool's report and its number of workers.

    Attributes:
        address (`str`): What a [`SandboxClient`] is made with.
    """

    def __init__(self, submit: Callable[[Job, Limits], Future[Verdict]], greeting: dict[str, Any]):
        self.submit, self.greeting = submit, greeting
        self.lines: weakref.WeakSet[_Line] = weakref.WeakSet()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _sockets.add(self.listener)
        self.address = f"trl-populora-{os.getpid()}-{secrets.token_hex(8)}"
        self.listener.bind(f"\0{self.address}")
        self.listener.listen(128)
        self.thread = threading.Thread(target=self._accept, name="sandbox server", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Hang up. What a client has not been told yet ends with an error there."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join(10)
        self.listener.close()
        for line in list(self.lines):
            line.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self.listener.accept()
                if _user_of(connection) == os.geteuid():
                    self._serve(connection)
                else:
                    connection.close()

    def _serve(self, connection: socket.socket) -> None:
        line, waiting = _Line(connection), set[Future[Verdict]]()

        def on_message(message: list[Any]) -> None:
            number, job, limits = _unpack_job(message)
            try:
                future = self.submit(job, limits)
            except RuntimeError as error:  # closed, or no longer able to run anything
                future = Future()
                future.set_exception(error)
            waiting.add(future)
            future.add_done_callback(lambda future: answer(number, future))

        def answer(number: int, future: Future[Verdict]) -> None:
            waiting.discard(future)
            if not future.cancelled():
                line.send(_pack_verdict(number, future))

        def on_end() -> None:
            for future in list(waiting):
                future.cancel()

        self.lines.add(line)
        line.send(_pack([self.greeting]))
        line.start(on_message, on_end)


def _user_of(connection: socket.socket) -> int:
    """The user id of the process at the other end, from the kernel."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(data)[1]


class SandboxClient(Runner):
    """
    The pool of another process on this host; does what a [`Sandbox`] does.

    Args:
        address (`str`): What the owner's `share()` returned.
        limits (`Limits`, *optional*): For jobs that bring none of their own.

    Raises:
        RuntimeError: Nobody serves this address, or only to another user.
    """

    def __init__(self, address: str, limits: Limits | None = None):
        self.address, self.limits = address, limits or Limits()
        self._numbers, self._lock, self._closed = itertools.count(1), threading.Lock(), False
        self._futures: dict[int, Future[Verdict]] = {}
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._line = _Line(connection)
        try:
            connection.settimeout(GREETING_SECONDS)
            connection.connect(f"\0{address}")
            greeting = _read(self._line.stream)
            connection.settimeout(None)
        except OSError as error:
            raise RuntimeError(f"no sandbox is shared as {address!r} on this host: {error}") from error
        if greeting is None:
            raise RuntimeError(f"the sandbox shared as {address!r} does not serve this user, or was closed just now")
        (self._greeting,) = greeting
        self.workers: int = self._greeting["workers"]
        self._line.start(self._on_verdict, self._on_end)
        _clients.add(self)

    def submit(self, job: Job) -> Future[Verdict]:
        future: Future[Verdict] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the sandbox is closed: {self._farewell()}")
            number = next(self._numbers)
            self._futures[number] = future
        self._line.send(_pack_job(number, job, job.limits or self.limits))
        return future

    def report(self) -> dict:
        """As of the moment of connecting."""
        return dict(self._greeting)

    def close(self) -> None:
        """Hang up; jobs that are not finished raise `RuntimeError`. The pool itself goes on."""
        self._line.close()

    def _on_verdict(self, message: list[Any]) -> None:
        number, *rest = message
        with self._lock:
            future = self._futures.pop(number)
        if not future.set_running_or_notify_cancel():
            return
        if len(rest) == 1:
            future.set_exception(RuntimeError(rest[0]))
        else:
            future.set_result(_unpack_verdict(rest))

    def _on_end(self) -> None:
        with self._lock:
            self._closed = True
            unfinished = list(self._futures.values())
            self._futures.clear()
        error = RuntimeError(f"the sandbox was closed before this job was finished: {self._farewell()}")
        for future in unfinished:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _farewell(self) -> str:
        return (
            f"this process has closed its connection to {self.address!r}, or the process that owns the pool (its "
            "number is in the name) has ended, and its own output says why"
        )


def _after_fork() -> None:
    """In a fork: let go of the connections, whose ends the peers must see; using a client there raises."""
    for client in list(_clients):
        client._closed, client._lock = True, threading.Lock()
    for each in list(_sockets):
        if each.fileno() >= 0:
            os.close(each.detach())


os.register_at_fork(after_in_child=_after_fork)
