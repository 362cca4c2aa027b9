"""The sandbox of a process that shares its node with others: its part of the cores, and one failure told to all."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .jobs import Limits
from .pool import Sandbox


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SandboxSettings:
    """
    What programs may use. Each field is the option of the same name.

    Raises:
        `ValueError`: If a number is too small.
    """

    sandbox_workers: int | None = None
    sandbox_seconds: float = Limits.cpu_seconds
    sandbox_memory_mb: int = Limits.memory_bytes >> 20
    sandbox_allow_weak: bool = False

    def __post_init__(self):
        for name in ("sandbox_workers", "sandbox_memory_mb"):
            if (value := getattr(self, name)) is not None and not value >= 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if not self.sandbox_seconds > 0:
            raise ValueError(f"`sandbox_seconds` must be positive, got {self.sandbox_seconds}.")

    @property
    def limits(self) -> Limits:
        """Of one run of one program."""
        return Limits(cpu_seconds=self.sandbox_seconds, memory_bytes=self.sandbox_memory_mb << 20)


def start_sandbox(settings: SandboxSettings, rank: int, local_rank: int, gather: Callable[[list], list]) -> Sandbox:
    """
    This process's sandbox with its share of the node's cores. Collective.

    Args:
        settings ([`SandboxSettings`]): The same on all ranks.
        rank, local_rank (`int`): This process, in the run and on its node.
        gather (`Callable`): Joins the lists of all ranks.

    Raises:
        `RuntimeError`: On every rank, if one of them cannot confine programs.
    """
    node = rank - local_rank
    # Launchers that bind each rank to cores of its own would leave programs with those of one rank.
    bound = gather([(node, os.sched_getaffinity(0) if sys.platform == "linux" else set())])
    cores = [theirs for where, theirs in bound if where == node]
    further: dict[str, Any] = {"cores": set().union(*cores), "processes": len(cores)}
    sandbox, failure = None, ""
    try:
        sandbox = Sandbox(settings.sandbox_workers, settings.limits, settings.sandbox_allow_weak, **further)
    except RuntimeError as error:
        failure = str(error)
    # Told to all, so that no rank waits for one that has failed.
    if failures := [each for each in gather([failure]) if each]:
        if sandbox is not None:
            sandbox.close()
        raise RuntimeError(failures[0])
    assert sandbox is not None
    if local_rank == 0:
        _log_level(sandbox)
    return sandbox


def _log_level(sandbox: Sandbox) -> None:
    """What the walls are in this run; a warning where there are none."""
    missing = [f"{name} ({reason})" for name, reason in sandbox.report()["layers"].items() if reason]
    logger.log(
        logging.WARNING if sandbox.level == "C" else logging.INFO,
        "The sandbox runs %d programs at a time, at level %s. Layers that do not hold: %s.",
        sandbox.workers,
        sandbox.level,
        ", ".join(missing) or "none",
    )
