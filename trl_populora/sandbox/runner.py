"""What every way to a pool offers: jobs in, verdicts out (phases 3 and 4)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future, wait

from .jobs import Job, Limits, Verdict


class Runner(ABC):
    """Runs untrusted programs; a [`Sandbox`] does it itself, a [`SandboxClient`] asks the process that has one."""

    limits: Limits
    workers: int

    @abstractmethod
    def submit(self, job: Job) -> Future[Verdict]:
        """Queue one job; its verdict arrives in the future."""

    @abstractmethod
    def report(self) -> dict:
        """The level, and each layer with whether it holds and why not."""

    @abstractmethod
    def close(self) -> None:
        """End it; jobs that are not finished raise `RuntimeError`. May be called twice."""

    @property
    def level(self) -> str:
        """`"A"`, `"B"` or `"C"`: see `report`."""
        return self.report()["level"]

    def run(self, jobs: Iterable[Job]) -> list[Verdict]:
        """The verdicts of `jobs`, in order."""
        futures = [self.submit(job) for job in jobs]
        wait(futures)
        return [future.result() for future in futures]

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
