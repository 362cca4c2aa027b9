"""The zygote, a warm process: it is started by exec, confines itself once, and forks one child per program.

    ORDER + descriptor of a job's socket --_accept--> fork --_become_child--> child: reads, runs, answers, exits
    EVENT <--_reap-- the kernel's report of the child's end          _watch: kills a child past its limit or asleep

The trainer starts `launch.py`, with the descriptor of the control socket and the options. The zygote never reads a
job's payload. It takes the job's private socket out of the trainer's message, forks a child that inherits the socket,
and closes its own copy. So neither a zygote nor a child ever holds the sockets of two jobs at a time.
"""

from __future__ import annotations

import contextlib
import gc
import json
import operator
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable

from . import confine, soft
from .child import Calls, read_payload, run_payload, send
from .protocol import (
    DONE,
    EVENT,
    EXPIRED,
    FAILED,
    LONGEST_EXTENSION,
    OK,
    ORDER,
    PROBE,
    READY,
    pack_answer,
    pack_payload,
)


# Names are looked up once: a lookup changes a reference count, and after a fork each such write copies a memory page.
_close, _close_range, _exit, _fork, _wait4 = os.close, os.closerange, os._exit, os.fork, os.wait4
_ORDER_BYTES, _descriptor = ORDER.size, struct.Struct("=i").unpack
_now, _FOREVER = time.monotonic, float("inf")
_forget_module = sys.modules.pop
_WNOHANG, _FD_BYTES = os.WNOHANG, socket.CMSG_SPACE(4)
# A child closes all descriptors from 3 up to this number but its own socket. None is higher: `main` gives the
# control socket a low number, and after that `confine.py` allows only numbers below 16.
_DESCRIPTORS = 64
# A program that has used no CPU time for this many seconds counts as asleep and is killed. If its CPU limit is more
# seconds, it may sleep for as many as its limit.
_PATIENCE_SECONDS = 5.0
# With these modules a program could reach objects of the zygote for which the program has no name.
_OWN_MODULES = {"gc", "ctypes", "_ctypes"}
# CPython specialises a function after 8 calls. Only after that does it specialise the functions that this one
# calls. So the warm-up has more than 8 rounds.
_WARM_UPS = 40


class Running:
    """
    A child that is not reaped yet.

    Args:
        job: Number of the run.
        pid: The child's process.
        limit: CPU seconds that it may use.
    """

    def __init__(self, job: int, pid: int, limit: float):
        self.job, self.pid, self.limit = job, pid, limit
        self.started = _now()
        self.deadline = self.started + limit  # when to look at its CPU time again
        self.last_deadline = self.started + limit * LONGEST_EXTENSION  # when it ends in any case
        self.used_at_deadline = -1.0  # CPU seconds used, as of the last look at which they had grown
        self.asleep_at = _FOREVER  # when it counts as asleep, if it does no work until then
        self.expired = False  # whether it was killed

    def cpu_seconds(self) -> float:
        """Reads the CPU seconds used so far. Returns infinity if the child's clock cannot be read."""
        try:
            return time.clock_gettime((~self.pid) << 3 | 2)  # the kernel's number for the CPU clock of a process
        except OSError:
            return _FOREVER

    def may_go_on(self, now: float) -> bool:
        """
        Decides at the deadline whether the child may go on, and sets its next deadline.

        The child may go on while it has CPU time left and has lately used some. So an honest program does not fail
        because the host is busy. A child that uses no CPU time counts as asleep and must end. From `last_deadline` on
        no child may go on.
        """
        used = self.cpu_seconds()
        if self.limit <= used < _FOREVER or now >= self.last_deadline:
            return False
        if used > self.used_at_deadline:
            self.used_at_deadline = used
            self.asleep_at = now + max(self.limit, _PATIENCE_SECONDS)
        # The child cannot use up the rest of its time sooner than this, so no look is needed before.
        self.deadline = min(now + max(self.limit - used, 0.001), self.asleep_at)
        return now < self.asleep_at


class Zygote:
    """
    Serves the trainer: takes orders, forks children, reports how they ended.

    Args:
        control: The socket on which orders come in and events go out.
        guard: The soft layer, ready to use in any child.
    """

    close_in: Callable[[int], None]  # called by each child before its program: see `confine.prepare_child_walls`

    def __init__(self, control: socket.socket, guard: soft.Guard):
        self.control, self.guard = control, guard
        self.children: dict[int, Running] = {}
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.poll = select.poll()
        self.poll.register(control, select.POLLIN)
        self.poll.register(self.wake_read, select.POLLIN)
        # The death of a child writes a byte to this pipe, which wakes `poll`. The handler is set before the walls:
        # `set_wakeup_fd` checks its descriptor by `fcntl`, which the filter of system calls refuses.
        signal.signal(signal.SIGCHLD, operator.is_)  # any callable of two arguments that runs no Python code
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)

    def loop(self) -> tuple[int, int, int] | None:
        """
        Serves until the trainer closes its end of the socket or dies. Then it returns `None` in the zygote.

        In each forked child it returns at once, with three values: the descriptor of the job's socket, the kind of the
        order, and the bytes of address space. The child may know nothing else of the order.
        """
        while True:
            for fd, _ in self.poll.poll(self._timeout()):
                if fd == self.wake_read:
                    os.read(fd, 4096)
                    continue
                open_, order = self._accept()
                if order or not open_:
                    return order
            self._reap()
            if self.children:
                self._watch()

    def end(self) -> None:
        """Kills all children that are not reaped yet."""
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)

    def _timeout(self) -> int | None:
        """
        Computes how many milliseconds to wait: until the next deadline. If there is no child, the wait has no end
        (`None`). If the zygote has killed all children and must still reap them, it waits one second.
        """
        if not self.children:
            return None
        moment = min((each.deadline for each in self.children.values() if not each.expired), default=_FOREVER)
        return max(0, int((moment - _now()) * 1000) + 1) if moment < _FOREVER else 1000

    def _accept(self) -> tuple[bool, tuple[int, int, int] | None]:
        """
        Reads one order and forks a child for it.

        Returns whether the trainer's end is open and, in the child, the three values that [`loop`] returns.
        """
        data, ancillary, _, _ = self.control.recvmsg(_ORDER_BYTES, _FD_BYTES)
        if not data:
            return False, None
        kind, job, limit, memory = ORDER.unpack(data)
        # With each order comes one descriptor: the child's end of the job's private socket pair.
        (fd,) = _descriptor(ancillary[0][2][:4])
        pid = _fork()
        if pid == 0:
            self.children.clear()  # a program must not learn what else is under way
            return True, (fd, kind, memory)
        _close(fd)
        self.children[pid] = Running(job, pid, limit)
        return True, None

    def _reap(self) -> None:
        """Reaps the children that have ended, and reports how each ended and what it used."""
        while self.children:
            pid, status, usage = _wait4(-1, _WNOHANG)
            if pid == 0:
                return
            running = self.children.pop(pid, None)
            if running is None:
                continue
            kind = EXPIRED if running.expired else DONE
            wall = _now() - running.started
            cpu, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
            self.control.send(EVENT.pack(kind, status, running.job, cpu, wall, peak))

    def _watch(self) -> None:
        """Kills the children that are past their limit or asleep. `_reap` reports them once they are dead."""
        now = _now()
        for running in self.children.values():
            if not running.expired and now >= running.deadline and not running.may_go_on(now):
                running.expired = True
                os.kill(running.pid, signal.SIGKILL)


def _become_child(order: tuple[int, int, int], zygote: Zygote, answer: list) -> Calls[None]:
    """Runs one program in this process, which the zygote has just forked, and ends the process."""
    fd, kind, memory = order
    try:
        # Every other way to the trainer is closed before the program is read: the control socket above all.
        _close_range(3, fd)
        _close_range(fd + 1, _DESCRIPTORS)
        if zygote.guard.enabled:
            # The module `resource` reads limits, so programs must not find it. The zygote keeps it, because `wait4`
            # imports it.
            _forget_module("resource", None)
        payload = read_payload(fd)
        zygote.close_in(memory)
        if kind == PROBE:
            send(fd, pack_answer(OK, ["true" if each else "false" for each in confine.try_walls()]))
        send(fd, (yield from run_payload(payload, zygote.guard, answer)))
    finally:
        _exit(70)  # only an error leads here, and the judge counts any exit status but 0 as tampered


def _forget_surroundings(soft_layer: bool) -> None:
    """
    Drops the environment and every way to look for modules, and points the standard error to nowhere.

    With the soft layer, modules that only the zygote needs are no longer to be found in `sys.modules`, either.
    """
    os.environ.clear()
    os.environ["TZ"] = "UTC0"  # as at the start: `time.localtime(0)` returns the same on every host
    for name in list(sys.modules) if soft_layer else ():
        if name in _OWN_MODULES or name.partition(".")[0] == __package__:
            del sys.modules[name]
    sys.path.clear()
    sys.path_hooks.clear()
    sys.path_importer_cache.clear()
    sys.argv[:] = sys.orig_argv[:] = ["program"]
    os.dup2(1, 2)  # errors go to /dev/null from here on; until here the trainer could read them


def _warm_up(guard: soft.Guard) -> None:
    """Runs what every child runs, so that CPython specialises that code once, here, and not in each child."""
    frame = pack_payload((0, 100, "f", "def f(x, y):\n    return [x, 1.5, y]\n", ('["t",1,["l","a"]]',)))
    reader, writer = os.pipe()
    os.write(writer, frame)
    answer = [True, None]
    for function, arguments in run_payload(read_payload(reader), guard, answer):
        answer[1] = function(*arguments)
    os.close(reader)
    os.close(writer)


def main(answer: list, surroundings: dict) -> Calls[None]:
    """
    Loads modules, builds the walls, reports, serves. In each child it goes on with the calls of that child's program.

    Args:
        answer: The list that `launch.py` fills after each call.
        surroundings: The globals of `launch.py`. All but `answer` are deleted, because programs see them.
    """
    surroundings.clear()
    surroundings["answer"] = answer
    number = int(sys.argv[1])
    control = socket.socket(fileno=os.dup(number))  # a low number, because children close only low ones
    os.close(number)
    options = json.loads(sys.argv[2])
    order = None
    try:
        zygote, layers = _prepare(control, options)
        report = json.dumps({"layers": layers}).encode()
        control.send(EVENT.pack(READY, 0, 0, 0.0, 0.0, 0) + report)
        # A garbage collection writes to every object that it looks at. In a child each such write would copy a memory
        # page.
        gc.collect()
        gc.freeze()
        order = zygote.loop()
        if order is None:
            zygote.end()
    except Exception as error:  # noqa: BLE001 - the trainer hears of any failure by this event
        report = json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
        control.send(EVENT.pack(FAILED, 0, 0, 0.0, 0.0, 0) + report)
    if order is None:
        os._exit(0)
    yield from _become_child(order, zygote, answer)


def _prepare(control: socket.socket, options: dict) -> tuple[Zygote, confine.Layers]:
    """Loads modules and builds the walls; returns the zygote, ready to serve, and how each layer of walls went."""
    layers = confine.Layers()
    with contextlib.suppress(OSError):  # this only helps speed, and a container may forbid all of these cores
        os.sched_setaffinity(0, options["cores"])
    # Namespaces come first, because the zygote goes on in a new process. Modules come before the walls, because no
    # file can be opened afterwards.
    if "namespaces" in options["without"]:
        layers["namespaces"] = "left out on request"
    else:
        confine.enter_namespaces(layers)
    soft.preload(hostile=not options["soft"])
    soft.preload_packages(options["packages"])
    soft.silence()
    guard = soft.Guard(options["soft"])
    for _ in range(_WARM_UPS):
        _warm_up(guard)
    guard = soft.Guard(options["soft"])  # a fresh one, so that programs find no traces of the warm-up
    zygote = Zygote(control, guard)
    _forget_surroundings(options["soft"])
    confine.build_walls(layers, tuple(options["without"]))
    zygote.close_in = confine.prepare_child_walls(layers)
    return zygote, layers
