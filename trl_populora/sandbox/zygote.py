"""The warm process: started by exec, confined once, forks one child per program and reports what the kernel says.

Run as a script with the number of its control socket; it never reads a payload. The private socket of a job passes
through it as a descriptor, from the trainer's message to the child, so that no process ever holds two jobs.
"""

from __future__ import annotations

import sys


if __name__ == "__main__":
    # The script's folder comes first on the path; the room is loaded as a package of its own without its `__init__`.
    import types

    _folder = sys.path.pop(0)
    _package = types.ModuleType("sandbox_room")
    _package.__path__ = [_folder]
    sys.modules["sandbox_room"] = _package
    __package__ = "sandbox_room"

import array
import gc
import json
import os
import resource
import select
import signal
import socket
import time

from . import child, protocol


_FD_BYTES = socket.CMSG_SPACE(4)


class Running:
    """A child that is not reaped."""

    def __init__(self, job: int, pid: int, wall: float, owed: float, flags: int):
        self.job, self.pid, self.wall, self.owed, self.flags = job, pid, wall, owed, flags
        self.started = time.monotonic()
        self.deadline = self.started + wall
        self.yields_at = self.started + owed if flags & protocol.MAY_YIELD else None
        self.expired = False

    def cpu_seconds(self) -> float:
        return time.clock_gettime((~self.pid) << 3 | 2)


class Zygote:
    def __init__(self, control: socket.socket, soft: bool):
        self.control, self.soft = control, soft
        self.children: dict[int, Running] = {}
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.poll = select.poll()
        self.poll.register(control, select.POLLIN)
        self.poll.register(self.wake_read, select.POLLIN)

    def send(self, kind: int, job: int = 0, status: int = 0, cpu: float = 0.0, wall: float = 0.0, peak: int = 0):
        self.control.send(protocol.EVENT.pack(kind, status, job, cpu, wall, peak))

    def loop(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        while True:
            for fd, _ in self.poll.poll(self._timeout()):
                if fd == self.wake_read:
                    os.read(fd, 4096)
                elif not self._accept():
                    return
            self._reap()
            if self.children:
                self._watch()

    def _timeout(self) -> int | None:
        moments = [child.deadline for child in self.children.values()]
        moments += [child.yields_at for child in self.children.values() if child.yields_at is not None]
        return max(0, int((min(moments) - time.monotonic()) * 1000) + 1) if moments else None

    def _accept(self) -> bool:
        """Start the child of one START message; False at the end of the trainer."""
        data, ancillary, _, _ = self.control.recvmsg(protocol.START.size, _FD_BYTES)
        if not data:
            return False
        fds = array.array("i")
        for _, _, part in ancillary:
            fds.frombytes(part[:4])
        job, wall, owed, memory, flags = protocol.START.unpack(data)
        pid = os.fork()
        if pid == 0:
            self._become_child(fds[0], wall, memory)
        os.close(fds[0])
        self.children[pid] = Running(job, pid, wall, owed, flags)
        return True

    def _become_child(self, fd: int, wall: float, memory: int) -> None:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.control.close()
            os.close(self.wake_read)
            os.close(self.wake_write)
            payload = child.read_payload(fd)
            seconds = int(wall) + 2
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            child.serve(fd, payload)
        finally:
            os._exit(70)

    def _reap(self) -> None:
        while self.children:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            running = self.children.pop(pid)
            kind = protocol.EXPIRED if running.expired else protocol.DONE
            wall = time.monotonic() - running.started
            self.send(kind, running.job, status, usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss * 1024)

    def _watch(self) -> None:
        """Kill what is past its deadline, and send what had its owed CPU time to the background."""
        now = time.monotonic()
        for running in self.children.values():
            if now >= running.deadline and not running.expired:
                running.expired = True
                os.kill(running.pid, signal.SIGKILL)
            elif running.yields_at is not None and now >= running.yields_at:
                used = running.cpu_seconds()
                if used < running.owed:
                    running.yields_at = now + running.owed - used
                else:
                    running.yields_at = None
                    os.setpriority(os.PRIO_PROCESS, running.pid, 19)
                    self.send(protocol.SLOW, running.job)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    options = json.loads(sys.argv[2])
    zygote = Zygote(control, options["soft"])
    gc.collect()
    gc.freeze()
    control.send(protocol.EVENT.pack(protocol.READY, 0, 0, 0.0, 0.0, 0) + json.dumps({"layers": {}}).encode())
    zygote.loop()
    for pid in zygote.children:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
