"""`Sandbox`: many programs in, verdicts out; one supervisor thread owns every socket and zygote (phases 3 and 4)."""

from __future__ import annotations

import functools
import os
import queue
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future

from .jobs import Job, Limits, Verdict
from .supervisor import Supervisor


class Sandbox:
    """
    Runs untrusted programs, each in a process of its own, and judges them from outside.

    Args:
        workers (`int`, *optional*): Programs at a time. Defaults to the cores of this process divided by the ranks on
            this node (`LOCAL_WORLD_SIZE`).
        limits (`Limits`, *optional*): For jobs that bring none of their own.
        allow_weak (`bool`, *optional*, defaults to `False`): Run even where the kernel offers no confinement (level
            C).
        seed (`int`, *optional*, defaults to `0`): Chooses the hash seeds, so that a run can be repeated.
        soft (`bool`, *optional*, defaults to `True`): The import allow-list and the entropy guards. Off, every module
            can be imported; for tests of the walls.
        without (`tuple[str, ...]`, *optional*): Layers of confinement to leave out; for tests of the others.

    Raises:
        RuntimeError: This host cannot confine programs and `allow_weak` is not set, or no zygote starts.
    """

    def __init__(
        self,
        workers: int | None = None,
        limits: Limits | None = None,
        allow_weak: bool = False,
        *,
        seed: int = 0,
        soft: bool = True,
        without: tuple[str, ...] = (),
    ):
        if sys.platform != "linux":
            raise RuntimeError(
                f"the sandbox needs Linux (namespaces, Landlock, seccomp), and this is {sys.platform!r}; `allow_weak`"
                " is for Linux hosts that lack some of these and does not help here. Use a Linux container or machine."
            )
        if workers is None:
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
            workers = max(1, len(os.sched_getaffinity(0)) // max(1, ranks))
        if workers < 1:
            raise ValueError(f"`workers` must be at least 1, got {workers}")
        self.workers, self.limits = workers, limits or Limits()
        self._supervisor = Supervisor(workers, seed=seed, soft=soft, allow_weak=allow_weak, without=tuple(without))
        self._closing = threading.Lock()
        self._finalizer = weakref.finalize(self, Supervisor.close, self._supervisor)

    def submit(self, job: Job) -> Future[Verdict]:
        """Queue one job; its verdict arrives in the future."""
        return self._supervisor.submit(job, job.limits or self.limits)

    def run(self, jobs: Iterable[Job]) -> list[Verdict]:
        """The verdicts of `jobs`, in order."""
        return [future.result() for future in [self.submit(job) for job in jobs]]

    def stream(self, jobs: Iterable[Job]) -> Iterator[tuple[int, Verdict]]:
        """Pairs of a job's index and its verdict, as they finish."""
        done: queue.SimpleQueue = queue.SimpleQueue()
        futures = [self.submit(job) for job in jobs]
        for index, future in enumerate(futures):
            future.add_done_callback(functools.partial(_note, done, index))
        for _ in futures:
            index, future = done.get()
            yield index, future.result()

    @property
    def level(self) -> str:
        """`"A"`, `"B"` or `"C"`: see `report`."""
        return self._supervisor.level

    def report(self) -> dict:
        """The level, and each layer with whether it holds and why not."""
        return self._supervisor.report()

    def close(self) -> None:
        """End every process; jobs that are not finished raise `RuntimeError`. May be called twice."""
        with self._closing:
            self._finalizer()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _note(done: queue.SimpleQueue, index: int, future: Future[Verdict]) -> None:
    done.put((index, future))
