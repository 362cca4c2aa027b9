"""What a kind of task answers, which may be a user's own: its types are checked, and an estimate may fail."""

from __future__ import annotations

import logging
from functools import lru_cache
from numbers import Real
from typing import Any

from .base import COLUMNS, Task, TaskKind


logger = logging.getLogger(__name__)


def estimate(kind: TaskKind, method: str, unknown: Any, *arguments: Any) -> Any:
    """
    What a kind's `method` says, or `unknown` if it raises: an estimate that fails is no reason to end a run. The log
    tells of it once, with the traceback.
    """
    try:
        return getattr(kind, method)(*arguments)
    except Exception as error:
        _tell_once(kind.name, method, type(error).__name__)
        return unknown


@lru_cache
def _tell_once(kind: str, method: str, error: str) -> None:
    logger.warning(
        "task kind %r: `%s` raised %s. For such tasks it counts as if it knew nothing; `populora check-kind` tries "
        "a kind before a run.",
        *(kind, method, error),
        exc_info=True,
    )


# What a measure cannot be called: columns of the archive, and what `curriculum/` means already.
_RESERVED = {*COLUMNS, "key", "match", "solve_rate", "coverage", "entropy", "features"}


def measure_complexity(kind: TaskKind, task: Task) -> dict[str, float]:
    """
    A kind's `complexity` of a task, by names that can stand in the metrics and be columns of the archive.

    Raises:
        `TypeError`: If it is no dict of numbers; names kind and method.
        `ValueError`: If a measure's name is taken.
    """
    measures = checked(kind.name, "complexity", estimate(kind, "complexity", {}, task), (dict,))
    for name, value in measures.items():
        if not isinstance(name, str) or not isinstance(value, Real):
            raise TypeError(
                f"task kind {kind.name!r}: `complexity` must give numbers by name, got {name!r}: {value!r:.80}"
            )
        if name in _RESERVED:
            raise ValueError(
                f"task kind {kind.name!r}: `complexity` calls a measure {name!r}, which has a meaning already."
            )
    return {name: float(value) for name, value in measures.items()}


def checked(kind: str, method: str, value: Any, wanted: tuple[type, ...]) -> Any:
    """What a kind has answered, which may be a user's own."""
    if not isinstance(value, wanted):
        names = " or ".join(each.__name__ for each in wanted)
        raise TypeError(f"task kind {kind!r}: `{method}` must return {names}, got {value!r:.80}")
    return value
