"""The trainer's handle on one zygote: start it by exec, hand it jobs, hear its events, end it."""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from . import protocol


_SCRIPT = Path(__file__).with_name("zygote.py")
START_SECONDS = 30.0  # a zygote needs 0.1-0.3 s on an idle core


class Worker:
    """
    One zygote.

    Args:
        options (`dict`): What the zygote is told on its command line (plain JSON).
        hash_seed (`int`): Its `PYTHONHASHSEED`.
    """

    def __init__(self, options: dict, hash_seed: int):
        self.options, self.hash_seed = options, hash_seed
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # A clean environment and -s -S: no site, no .pth file, no variable of the trainer reaches the zygote.
            self.process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-B", str(_SCRIPT), str(theirs.fileno()), json.dumps(options)],
                env={"PYTHONHASHSEED": str(hash_seed), "LC_ALL": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if options.get("debug") else subprocess.DEVNULL,
                cwd="/",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.control.setblocking(False)
        self.born = time.monotonic()
        self.report: dict | None = None
        self.jobs: set[int] = set()

    @property
    def ready(self) -> bool:
        return self.report is not None

    def start(self, job: int, fd: int, wall: float, owed: float, memory: int, flags: int) -> None:
        """
        Hand over a job's private socket.

        Raises:
            OSError: The zygote is gone, or does not read its socket.
        """
        message = protocol.START.pack(job, wall, owed, memory, flags)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        self.control.sendmsg([message], rights)
        self.jobs.add(job)

    def events(self) -> list[tuple] | None:
        """What the zygote reports since the last call; None when it is gone."""
        found = []
        while True:
            try:
                data = self.control.recv(1 << 16)
            except BlockingIOError:
                return found
            except OSError:
                return None
            if len(data) < protocol.EVENT.size:
                return None
            event = protocol.EVENT.unpack_from(data)
            if event[0] == protocol.READY:
                self.report = json.loads(data[protocol.EVENT.size :])
            found.append(event)

    def kill(self) -> None:
        """End the zygote and, through the kernel, everything under it."""
        self.control.close()
        if self.process.poll() is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.process.wait()

    def close(self, seconds: float = 2.0) -> None:
        """Ask the zygote to end by closing its socket; kill it if it does not."""
        self.control.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        self.kill()
