"""The tasks room: what teachers propose and students solve (phases 2 to 4). Imports without torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .archive import TaskArchive, load_seed_tasks
from .base import STYLES, Attempt, Proposal, Refusal, Reject, Shot, Task, TaskKind
from .code_f import CodeF
from .code_i import CodeI
from .code_o import CodeO
from .make import make_task


__all__ = [
    "STYLES",
    "TASK_KINDS",
    "Attempt",
    "CodeF",
    "CodeI",
    "CodeO",
    "Proposal",
    "Refusal",
    "Reject",
    "Shot",
    "Task",
    "TaskArchive",
    "TaskKind",
    "load_seed_tasks",
    "make_task",
    "resolve_kind",
]

TASK_KINDS = {"code_o": CodeO, "code_i": CodeI, "code_f": CodeF}


def resolve_kind(name: str | TaskKind) -> TaskKind:
    """
    Finds a kind of task.

    Args:
        name (`str` or [`TaskKind`]): A key of `TASK_KINDS`, a class as `package.module:Class`, or an instance.

    Raises:
        `ValueError`: If nothing is found under `name`, or what is found is no [`TaskKind`].
    """
    choices = f"one of {', '.join(TASK_KINDS)}, `package.module:Class` for a class of your own"
    if isinstance(name, TaskKind):
        kind: Any = name
    elif isinstance(name, str) and name in TASK_KINDS:
        kind = TASK_KINDS[name]()
    elif isinstance(name, str) and ":" in name:
        try:
            kind = _class_at(name, choices)()
        except TypeError as error:
            raise ValueError(f"Task kind {name!r} cannot be made: {error}.") from error
    else:
        raise ValueError(f"Unknown task kind {name!r}; it must be {choices}.")
    if not isinstance(kind, TaskKind):
        raise ValueError(f"Task kind {name!r} is no TaskKind but {type(kind).__name__}; it must be {choices}.")
    if not isinstance(getattr(kind, "name", None), str):
        raise ValueError(f'Task kind {name!r} has no `name`; give its class one, for example `name = "arithmetic"`.')
    for field in ("reference_kinds", "measures"):
        if isinstance(getattr(kind, field), str):
            raise ValueError(
                f"Task kind {name!r} has the text {getattr(kind, field)!r} as `{field}`; it is a tuple of names."
            )
    return kind


def _class_at(path: str, choices: str) -> Callable[[], Any]:
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        missing = isinstance(error, ImportError)
        way_out = " A module that is not installed needs its folder in `PYTHONPATH`." if missing else ""
        raise ValueError(f"Unknown task kind {path!r} ({error}); it must be {choices}.{way_out}") from error
