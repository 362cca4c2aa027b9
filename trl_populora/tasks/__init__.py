"""Tasks: what teachers propose and students solve. Importing this package does not import torch.

kind.py      `Task`, `TaskKind`: what a task is, and what each kind of task must answer
archive.py   verified tasks in memory, and as a table in a file
features.py  words for what a task uses; they decide what is rare and what is replayed
dataset.py   tasks that a user gives, read and checked before a run
prompts.py   prompts that a user gives, and the rows of each member of a dataset run
script.py    the options of TRL's GRPO script: datasets of prompts and reward functions by name
python/      the three built-in kinds: find the output, find an input, write the program
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from trl_populora.options import find_own
from trl_populora.tasks.python.kinds import CodeF, CodeI, CodeO, make_task

from .archive import TaskArchive, load_seed_tasks
from .kind import NAME, STYLES, Attempt, Proposal, Refusal, Reject, Shot, Task, TaskKind, check_measures


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
    "choose_kinds",
    "load_seed_tasks",
    "make_task",
    "resolve_kind",
]

TASK_KINDS = {"code_o": CodeO, "code_i": CodeI, "code_f": CodeF}
# An evaluation's figures are called `base/solve_rate`, `student_0/solve_rate`, and `code_o/solve_rate` for each kind.
_TAKEN = re.compile(r"base|(teacher|student)_\d+")


def check_names(names: Any) -> None:
    """
    Checks the value of the option `task_kinds`.

    Raises:
        `TypeError`: If the value is one text, or holds anything but texts. An instance of a kind is refused, too,
            because it could not be saved with the settings.
        `ValueError`: If the list is empty.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"`task_kinds` must be a list of names, got {names!r}: for example `['code_o']`, or "
            "`['package.module:Class']` for a kind of your own. An instance could not be saved with the settings."
        )
    if not names:
        raise ValueError("`task_kinds` is empty; name at least one, for example `['code_o']`.")


def choose_kinds(run: str, saved: Sequence[str], named: Sequence[str] | None) -> list[str]:
    """
    Chooses the kinds of task to play with a saved run: the kinds that the user names, or else the saved ones.

    Somebody else may have made the run, and importing a kind runs its code. So if the user names no kind, a saved kind
    that is not the package's is refused.

    Args:
        run: Name of the run, for the error.
        saved: `task_kinds` of the run's settings.
        named: The kinds that the user's command or call names; `None` or empty if it names none.

    Raises:
        `ValueError`: If the user names no kind, and a saved kind is not the package's.
    """
    if named:
        return list(named)
    for kind in saved:
        if kind not in TASK_KINDS:
            raise ValueError(
                f"{run} was trained on the task kind {kind!r}, whose code is not the package's and would run here. If "
                f"you trust it, name the kinds yourself: --task_kinds {shlex.join(map(str, saved))}"
            )
    return list(saved)


def resolve_kind(name: str | TaskKind) -> TaskKind:
    """
    Finds a kind of task.

    Args:
        name: A key of `TASK_KINDS`, a class as `package.module:Class`, or an instance.

    Raises:
        `ValueError`: If there is no such kind, if no instance of its class can be made, or if the object found is no
            [`TaskKind`] with a valid `name`. Also if the kind's `reference_kinds` or `measures` is one text, or if
            [`check_measures`] refuses the name of a measure.
    """
    choices = f"one of {', '.join(TASK_KINDS)}, `package.module:Class` for a class of your own"
    if isinstance(name, TaskKind):
        kind: Any = name
    elif isinstance(name, str) and name in TASK_KINDS:
        kind = TASK_KINDS[name]()
    elif isinstance(name, str) and ":" in name:
        try:
            kind = find_own(name, "task kind", choices)()
        except TypeError as error:
            raise ValueError(f"Task kind {name!r} cannot be made: {error}.") from error
    else:
        raise ValueError(f"Unknown task kind {name!r}; it must be {choices}.")
    if not isinstance(kind, TaskKind):
        raise ValueError(f"Task kind {name!r} is no TaskKind but {type(kind).__name__}; it must be {choices}.")
    _check_name(name, kind)
    # A text is a sequence, too: `("code_o")` without its comma would be taken for the kinds `c`, `o`, `d` and so on.
    for field in ("reference_kinds", "measures"):
        if isinstance(getattr(kind, field), str):
            raise ValueError(
                f"Task kind {name!r} has the text {getattr(kind, field)!r} as `{field}`; it must be a tuple of names."
            )
    check_measures(kind.name, "measures", kind.measures)
    return kind


def _check_name(name: str | TaskKind, kind: TaskKind) -> None:
    """Checks the `name` of the kind that was found by `name`."""
    if not isinstance(getattr(kind, "name", None), str):
        raise ValueError(
            f'Task kind {name!r} has no `name` that is a text; give its class one, for example `name = "arithmetic"`.'
        )
    if not NAME.fullmatch(kind.name):
        raise ValueError(
            f"Task kind {name!r} has the `name` {kind.name!r}; a name has letters, digits, `_`, `-` and `.` only."
        )
    if _TAKEN.fullmatch(kind.name):
        raise ValueError(
            f"Task kind {name!r} has the `name` {kind.name!r}, as the base or a member has; give it another, so that "
            "their scores are not mixed."
        )
