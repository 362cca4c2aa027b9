"""The trainer's handle on one zygote: starts it by exec, hands it jobs, reads its events, ends it."""

from __future__ import annotations

import array
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import confine, protocol


_SCRIPT = Path(__file__).with_name("launch.py")
_FIND_PYTHON = ("LD_LIBRARY_PATH", "PYTHONHOME")  # by which Python finds its own library, as in modules of a cluster


class Worker:
    """
    One zygote.

    Args:
        seed_index: Number of the hash seed among those of the sandbox.
        hash_seed: The hash seed: `PYTHONHASHSEED` of the zygote.
        options: Options of the zygote, passed on its command line as JSON.

    Raises:
        `OSError`: If no file descriptor or process is left for it.
    """

    def __init__(self, seed_index: int, hash_seed: int, options: dict):
        self.seed_index = seed_index
        # SOCK_SEQPACKET keeps messages apart, so that each `recv` returns exactly one event.
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # With a clean environment and `-s -S` no site-packages, no .pth file and no further variable of the
            # trainer reaches the zygote. It drops the environment before it serves.
            found = {name: os.environ[name] for name in _FIND_PYTHON if name in os.environ}
            command = [sys.executable, "-s", "-S", "-B", str(_SCRIPT), str(theirs.fileno()), json.dumps(options)]
            try:
                self.process = subprocess.Popen(
                    command,
                    # LD_BIND_NOW looks symbols up before the first fork. Without it each child would do so anew, and
                    # copy the memory pages that hold the addresses.
                    env={
                        "PYTHONHASHSEED": str(hash_seed),
                        "LC_ALL": "C.UTF-8",
                        "LD_BIND_NOW": "1",
                        "TZ": "UTC0",
                        **found,
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    cwd="/",
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # the zygote and its children are one group, which `kill` can end
                )
            except OSError:
                self.control.close()
                raise
        self.control.setblocking(False)
        assert self.process.stderr is not None
        self.errors = self.process.stderr
        os.set_blocking(self.errors.fileno(), False)
        self.born = time.monotonic()
        self.jobs: set[int] = set()  # numbers of the runs that it has under way
        self.layers: dict[str, str] = {}  # for each layer of walls why it does not hold, or ""
        self.refused: dict[str, bool] = {}  # each probe, and whether the walls refused it
        self.healthy = False  # whether it has tried its walls and may serve
        self.failure = ""  # the error with which it failed to start

    @property
    def level(self) -> str:
        """How far this zygote confines programs: `"A"`, `"B"` or `"C"`."""
        return confine.find_level(self.layers, self.refused)

    def explain_weakness(self, reason: str) -> str:
        """Explains why this zygote may not serve. `reason` is used if no probe was tried, and says why none was."""
        missing = [f"{name}: {why}" for name, why in self.layers.items() if why]
        open_doors = [name for name, refused in self.refused.items() if not refused]
        if not self.refused:
            found = f"The walls could not be probed ({reason})"
        elif open_doors:
            found = f"A program could: {', '.join(open_doors)}"
        else:
            found = "All probes were refused, but without these layers a program may do what no probe tries"
        return (
            "this host cannot confine untrusted programs (level C). Missing layers: "
            + ("; ".join(missing) or "none")
            + f". {found}. "
            "`allow_weak=True` (in training `sandbox_allow_weak`) runs programs all the same, with limits and a"
            " deadline but perhaps nothing that keeps them from your files and your network: set it only where a"
            " virtual machine or a container is the wall."
        )

    def start(self, kind: int, job: int, fd: int, limit: float, memory: int) -> None:
        """
        Hands over the child's end of a job's private socket.

        Raises:
            `OSError`: If the zygote is gone, or its socket is full because it reads no orders.
        """
        self.jobs.add(job)
        message = protocol.ORDER.pack(kind, job, limit, memory)
        self.control.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])

    def read_events(self) -> list[tuple] | None:
        """Reads all events since the last call, each with its report if it has one; `None` when the zygote is gone."""
        found: list[tuple] = []
        while True:
            try:
                data = self.control.recv(1 << 16)
            except BlockingIOError:
                return found
            except OSError:
                return None
            if len(data) < protocol.EVENT.size:
                return found or None
            report: Any = data[protocol.EVENT.size :]
            if report:
                try:
                    report = json.loads(report)
                except ValueError:
                    return None  # a zygote that sends what no zygote sends counts as gone
            found.append((*protocol.EVENT.unpack_from(data), report))

    def read_last_words(self) -> str:
        """Reads what a zygote that could not start has written to its standard error."""
        try:
            return (self.errors.read() or b"").decode("utf-8", "replace").strip()[-300:]
        except OSError:
            return ""

    def kill(self) -> None:
        """Ends the zygote and everything under it."""
        self.control.close()
        # Until `wait` the kernel gives the number of a dead process to no other one, so this cannot kill a stranger.
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.errors.close()

    def close(self) -> None:
        """Asks the zygote to end, by closing its socket; kills it if it has not ended after two seconds."""
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)
        self.kill()
