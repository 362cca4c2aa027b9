"""The sandbox as its users see it: `Sandbox`, its settings, its start on every rank, and `populora sandbox-check`.

Many programs go in, verdicts come out. One supervisor thread per `Sandbox` owns every socket and every zygote.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from .jobs import Job, Limits, Verdict
from .supervisor import Supervisor
from .values import encode


logger = logging.getLogger(__name__)


class Sandbox:
    """
    Runs untrusted programs, each in a process of its own, and judges them from outside.

    Args:
        workers:
            How many cores the programs are meant to fill; the number of `cores` when not given. Up to three programs
            per worker are alive at a time: while one program is handed over or ends, another keeps the core busy.
        limits: Limits of jobs that bring none of their own.
        allow_weak: Runs programs even where the Linux kernel cannot confine them (level C).
        seed: Chooses the hash seeds, so that a run can be repeated.
        soft: Whether the import allow-list and the guards are on. Turn them off only to test the walls, or to run
            published benchmarks.
        cores: Processors that programs run on, as far as the kernel allows; those of this process when not given.
        processes:
            How many processes of this host have a `Sandbox`, this one included. This one gets its share of the
            workers, at least one.
        without: Layers of confinement to leave out, so that tests can try the other layers alone.
        packages:
            Installed packages to load before the walls are built, such as `"numpy"`, which the tests of published
            benchmarks import. Programs may import them with `soft=False`.

    Raises:
        `RuntimeError`: If this host is not Linux, if it cannot confine programs and `allow_weak` is not set, or if its
            zygotes do not start.
        `OSError`: If no file descriptor or process is left for a zygote.
        `ValueError`: If `workers` is below 1 or a package is not installed.
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
        # Ends the zygotes also if the `Sandbox` is dropped without `close`, or is open when Python exits.
        self._finalizer = weakref.finalize(self, Supervisor.close, self._supervisor)

    def submit(self, job: Job) -> Future[Verdict]:
        """Queues one job; its verdict arrives in the future."""
        return self._supervisor.submit(job, job.limits or self.limits)

    def run(self, jobs: Iterable[Job]) -> list[Verdict]:
        """Runs all jobs and returns their verdicts, in order."""
        futures = []
        try:
            for job in jobs:
                futures.append(self.submit(job))
            wait(futures)
        except BaseException:  # such as Ctrl-C
            for future in futures:
                future.cancel()
            raise
        return [future.result() for future in futures]

    @property
    def level(self) -> str:
        """How far programs are confined: `"A"`, `"B"` or `"C"`, as `README.md` beside this file explains."""
        return self.report()["level"]

    def report(self) -> dict:
        """Returns the level, layers and probes, the number of zygotes, and how often and why zygotes were replaced."""
        return self._supervisor.report()

    def close(self) -> None:
        """Ends every program and zygote; futures of unfinished jobs raise `RuntimeError`. It may be called twice."""
        with self._closing:
            self._finalizer()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _folder_of(package: str) -> str:
    """Finds the folder that holds an installed package. A zygote needs it: it starts without site-packages."""
    spec = importlib.util.find_spec(package.partition(".")[0])
    if spec is None or spec.origin is None:
        raise ValueError(f"`packages` names {package!r}, which is not installed")
    return os.path.dirname(os.path.dirname(spec.origin))


@dataclass(frozen=True)
class SandboxSettings:
    """
    What programs may use. Each field is the option of [`~trl_populora.PopuLoRAConfig`] of the same name.

    Raises:
        `ValueError`: If `sandbox_workers` is below 1, `sandbox_memory_mb` below 64, or `sandbox_seconds` not above 0
            or above 3600.
    """

    sandbox_workers: int | None = None
    sandbox_seconds: float = Limits.cpu_seconds
    sandbox_memory_mb: int = Limits.memory_bytes >> 20
    sandbox_allow_weak: bool = False

    def __post_init__(self):
        # `Limits` has the same bounds, 64 MiB and an hour. They are checked here as well, because an error of `Limits`
        # would name its own fields and not the options.
        for name, least in (("sandbox_workers", 1), ("sandbox_memory_mb", 64)):
            if (value := getattr(self, name)) is not None and not value >= least:
                raise ValueError(f"`{name}` must be at least {least}, got {value}.")
        if not 0 < self.sandbox_seconds <= 3600:
            raise ValueError(f"`sandbox_seconds` must be positive and at most 3600, got {self.sandbox_seconds}.")

    @property
    def limits(self) -> Limits:
        """The limits of one run of one program."""
        return Limits(cpu_seconds=self.sandbox_seconds, memory_bytes=self.sandbox_memory_mb << 20)


def start_sandbox(settings: SandboxSettings, rank: int, local_rank: int, gather: Callable[[list], list]) -> Sandbox:
    """
    Starts this process's sandbox, with its share of the node's workers. Call it on every rank.

    Args:
        settings: The same on all ranks.
        rank: Number of this process in the run.
        local_rank: Number of this process on its node.
        gather: Takes a list and returns the lists of all ranks, joined.

    Raises:
        `RuntimeError`: On every rank, if the sandbox of any rank does not start.
    """
    node = rank - local_rank
    # A launcher may bind each rank to cores of its own. The programs of every rank may use the cores of all ranks of
    # the node: while one rank waits, the others' programs use its cores.
    bound = gather([(node, os.sched_getaffinity(0) if sys.platform == "linux" else set())])
    cores = [theirs for where, theirs in bound if where == node]
    further: dict[str, Any] = {"cores": set().union(*cores), "processes": len(cores)}
    sandbox, failure = None, ""
    try:
        sandbox = Sandbox(settings.sandbox_workers, settings.limits, settings.sandbox_allow_weak, **further)
    except (RuntimeError, OSError) as error:
        failure = str(error)
    # All ranks hear of a failure, so that no rank waits for one that has raised.
    told = gather([failure])
    if failures := [each for each in told if each]:
        if sandbox is not None:
            sandbox.close()
        where = f"On {len(failures)} of {len(told)} ranks the sandbox did not start. " if len(told) > 1 else ""
        raise RuntimeError(f"{where}{failures[0]}")
    assert sandbox is not None
    if local_rank == 0:
        _log_level(sandbox)
    return sandbox


def _log_level(sandbox: Sandbox) -> None:
    """Logs the level and the layers that do not hold; as a warning at level C."""
    missing = [f"{name} ({reason})" for name, reason in sandbox.report()["layers"].items() if reason]
    logger.log(
        logging.WARNING if sandbox.level == "C" else logging.INFO,
        "The sandbox has %d workers and level %s. Layers that do not hold: %s.",
        sandbox.workers,
        sandbox.level,
        ", ".join(missing) or "none",
    )


_MEANING = {
    "A": "namespaces, chroot, a user of its own, Landlock and seccomp all hold",
    "B": "seccomp holds, with an unprivileged user or Landlock: no files, no network, no processes",
    "C": "not confined; training refuses unless `sandbox_allow_weak` is set",
}
_PURPOSE = {
    "namespaces": "own network, mounts, processes, IPC and host name",
    "chroot": "an empty, deleted folder as root",
    "uid": "an unprivileged user and no capability",
    "limits": "no writing to files, no core dumps, few descriptors",
    "no_new_privs": "no gain by exec, not traceable",
    "landlock": "no file, TCP port, abstract socket or outside signal, as far as the kernel's version goes",
    "seccomp": "an allow-list of system calls for computing",
}
_MEASURED_SECONDS = 2.0


def check() -> str:
    """Writes how far this host confines programs and how many it runs per second; returns the level."""
    write = sys.stdout.write
    with Sandbox(allow_weak=True) as sandbox:
        report = sandbox.report()
        done, start = 0, time.perf_counter()  # small programs with one input and one run each
        while time.perf_counter() - start < _MEASURED_SECONDS:
            jobs = [Job(f"def f(x):\n    return x + {done + i}\n", (encode((i,)),)) for i in range(100)]
            done += sum(verdict.ok for verdict in sandbox.run(jobs))
        speed = done / (time.perf_counter() - start)
        write(f"sandbox level {report['level']}: {_MEANING[report['level']]}\n\nlayers\n")
        for name, reason in report["layers"].items():
            held = "yes" if not reason else f"no   ({reason})"
            write(f"  {name:<14}{held:<5}{_PURPOSE.get(name, '') if not reason else ''}\n")
        write("\ntried from inside a program's process\n")
        for name, refused in report["refused"].items():
            write(f"  {name:<26}{'refused' if refused else 'POSSIBLE'}\n")
        write(f"\n{speed:.0f} programs per second on {sandbox.workers} workers\n")
    return report["level"]


def main(arguments: Sequence[str] = ()) -> int:
    """Runs `populora sandbox-check`: exit status 0 for level A or B, 1 for C, 2 if no program can be run at all."""
    parser = argparse.ArgumentParser(
        prog="populora sandbox-check", description="How well this host confines programs."
    )
    parser.parse_args(list(arguments))
    try:
        return 1 if check() == "C" else 0
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 2
