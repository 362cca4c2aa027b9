"""Update, first half: the two rewards as TRL wants them. What they pay is decided in `step/rules.py`.

Each scores the rows of its own role and returns `None` for the others, so TRL logs `rewards/teacher_reward/mean` and
`rewards/student_reward/mean` side by side.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from trl_populora.step.played import Row


# By these names TRL hands a reward function what it knows beside the columns.
ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def teacher_reward(role: list[str], pay: list[float], **columns: list) -> list[float | None]:
    """What the rules paid for each proposal."""
    return [paid if name == "teacher" else None for name, paid in zip(role, pay, strict=True)]


def student_reward(role: list[str], pay: list[float], **columns: list) -> list[float | None]:
    """What the rules paid for each attempt."""
    return [paid if name == "student" else None for name, paid in zip(role, pay, strict=True)]


def check_arguments(function: Callable[..., list[float | None]]) -> None:
    """
    Checks that a reward function can be called as every one is: with all columns, by name.

    Raises:
        `TypeError`: If it asks for another column, as of a dataset of prompts, or does not take all that there are.
    """
    parameters = inspect.signature(function).parameters.values()
    named = {each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    given = (*ARGUMENTS, *Row.COLUMNS)
    absent = [f"`{name}`" for name in named if name not in given and named[name].default is inspect.Parameter.empty]
    if absent:
        raise TypeError(
            f"The reward function `{function.__name__}` asks for {', '.join(absent)}. Columns of a dataset do not "
            f"arrive here, as teachers write the tasks; these do: {', '.join(given)}."
        )
    if not all(name in named for name in given) and all(each.kind is not each.VAR_KEYWORD for each in parameters):
        raise TypeError(
            f"The reward function `{function.__name__}` is called with more columns by name than it takes. End its "
            "arguments with `**columns`."
        )
