"""`Sandbox`: many programs in, verdicts out; one supervisor thread owns every socket and zygote (phases 3 and 4)."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

from .bubblewrap import prepare
from .jobs import Job, Limits, Verdict
from .runner import Runner
from .sharing import SandboxServer
from .supervisor import Supervisor


class Sandbox(Runner):
    """
    Runs untrusted programs, each in a process of its own, and judges them from outside.

    Args:
        workers (`int`, *optional*): Programs that run at a time, on a core each; up to three times as many are under
            way, being handed over or ending. Defaults to the number of `cores`.
        limits (`Limits`, *optional*): For jobs that bring none of their own.
        allow_weak (`bool`, *optional*, defaults to `False`): Run even where the kernel offers no confinement (level
            C).
        seed (`int`, *optional*, defaults to `0`): Chooses the hash seeds, so that a run can be repeated.
        soft (`bool`, *optional*, defaults to `True`): The import allow-list and the entropy guards. Off, every module
            can be imported; for tests of the walls.
        cores (`Iterable[int]`, *optional*): Processors that programs run on, as far as the kernel allows. Those that
            this process may use, when not given.
        bubblewrap (`bool`, *optional*, defaults to `False`): The hard mode: `bwrap` around every zygote, as one wall
            more.
        without (`tuple[str, ...]`, *optional*): Layers of confinement to leave out; for tests of the others.
        packages (`tuple[str, ...]`, *optional*): Installed modules that are loaded before the walls are built, such as
            `"numpy"`, which the tests of published benchmarks import. Programs may import them with `soft=False`.

    Raises:
        RuntimeError: This host cannot confine programs and `allow_weak` is not set, `bwrap` is wanted and missing or
            not permitted, or no zygote starts.
    """

    def __init__(
        self,
        workers: int | None = None,
        limits: Limits | None = None,
        allow_weak: bool = False,
        *,
        seed: int = 0,
        soft: bool = True,
        cores: Iterable[int] | None = None,
        bubblewrap: bool = False,
        without: tuple[str, ...] = (),
        packages: tuple[str, ...] = (),
    ):
        if sys.platform != "linux":
            raise RuntimeError(
                f"the sandbox needs Linux (namespaces, Landlock, seccomp), and this is {sys.platform!r}; `allow_weak`"
                " is for Linux hosts that lack some of these and does not help here. Use a Linux container or machine."
            )
        usable = sorted(os.sched_getaffinity(0) if cores is None else cores)
        workers = len(usable) if workers is None else workers
        if workers < 1:
            raise ValueError(f"`workers` must be at least 1, got {workers}")
        self.workers, self.limits = workers, limits or Limits()
        wrapped_from = prepare(Path(__file__).parent) if bubblewrap else None
        options = {"soft": soft, "cores": usable, "without": list(without), "bubblewrap": wrapped_from}
        options["packages"] = {each: _folder_of(each) for each in packages}
        self._supervisor = Supervisor(workers, seed=seed, allow_weak=allow_weak, options=options)
        self._closing = threading.Lock()
        self._server: SandboxServer | None = None
        self._finalizer = weakref.finalize(self, Supervisor.close, self._supervisor)

    def submit(self, job: Job) -> Future[Verdict]:
        return self._supervisor.submit(job, job.limits or self.limits)

    def report(self) -> dict:
        return self._supervisor.report()

    def share(self) -> str:
        """
        Let other processes of this user on this host use the pool; returns the address for their [`SandboxClient`].

        Close it after them: what they still wait for then ends with an error.
        """
        with self._closing:
            if self._supervisor.closed:
                raise RuntimeError("the sandbox is closed")
            if self._server is None:
                self._server = SandboxServer(self._supervisor.submit, self.report() | {"workers": self.workers})
        return self._server.address

    def close(self) -> None:
        with self._closing:
            if self._server is not None:
                self._server.close()
            self._finalizer()


def _folder_of(package: str) -> str:
    """Where a zygote, which starts without site-packages, has to look for an installed package."""
    spec = importlib.util.find_spec(package.partition(".")[0])
    if spec is None or spec.origin is None:
        raise ValueError(f"`packages` names {package!r}, which is not installed")
    return os.path.dirname(os.path.dirname(spec.origin))
