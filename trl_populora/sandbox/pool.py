"""`Sandbox`: many programs in, verdicts out; one supervisor thread owns every socket and zygote."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, wait

from .jobs import Job, Limits, Verdict
from .supervisor import Supervisor


class Sandbox:
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
        processes (`int`, *optional*, defaults to `1`): Processes that have a sandbox each on this host, this one
            among them: it gets its share of the workers, at least one.
        without (`tuple[str, ...]`, *optional*): Layers of confinement to leave out; for tests of the others.
        packages (`tuple[str, ...]`, *optional*): Installed modules that are loaded before the walls are built, such as
            `"numpy"`, which the tests of published benchmarks import. Programs may import them with `soft=False`.

    Raises:
        `RuntimeError`: This host cannot confine programs and `allow_weak` is not set, or no zygote starts.
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
        processes: int = 1,
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
        self.workers, self.limits = max(1, workers // processes), limits or Limits()
        options = {"soft": soft, "cores": usable, "without": list(without)}
        options["packages"] = {each: _folder_of(each) for each in packages}
        self._supervisor = Supervisor(self.workers, seed=seed, allow_weak=allow_weak, options=options)
        self._closing = threading.Lock()
        self._finalizer = weakref.finalize(self, Supervisor.close, self._supervisor)

    def submit(self, job: Job) -> Future[Verdict]:
        """Queue one job; its verdict arrives in the future."""
        return self._supervisor.submit(job, job.limits or self.limits)

    def run(self, jobs: Iterable[Job]) -> list[Verdict]:
        """The verdicts of `jobs`, in order."""
        futures = [self.submit(job) for job in jobs]
        wait(futures)
        return [future.result() for future in futures]

    @property
    def level(self) -> str:
        """`"A"`, `"B"` or `"C"`: see `report`."""
        return self.report()["level"]

    def report(self) -> dict:
        """The level, and each layer with whether it holds and why not."""
        return self._supervisor.report()

    def close(self) -> None:
        """End it; jobs that are not finished raise `RuntimeError`. May be called twice."""
        with self._closing:
            self._finalizer()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _folder_of(package: str) -> str:
    """Where a zygote, which starts without site-packages, has to look for an installed package."""
    spec = importlib.util.find_spec(package.partition(".")[0])
    if spec is None or spec.origin is None:
        raise ValueError(f"`packages` names {package!r}, which is not installed")
    return os.path.dirname(os.path.dirname(spec.origin))
