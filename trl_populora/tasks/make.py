"""Makes a task from a program and its arguments as Python values: for seeds that a user writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trl_populora.sandbox import Job, Sandbox, values

from .base import Task
from .code_f import CodeF


def make_task(
    kind: str,
    program: str,
    inputs: Sequence[Sequence[Any]],
    *,
    message: str = "",
    visible: int | None = None,
    sandbox: Sandbox | None = None,
) -> Task:
    """
    Runs a program and writes its inputs and outputs as canonical texts.

        make_task("code_o", "def f(x):\\n    return x + 1", inputs=[(1,)])

    Args:
        kind: Name of the kind.
        program: Source with a top-level `f`.
        inputs: One sequence of arguments per call, of plain data; one call, or several for code_f.
        message: Hint for the solver (code_f).
        visible: How many of the leading pairs the solver is shown; half of them for code_f, and none for others, when
            `None`.
        sandbox: Runs the program; one is started and closed again when not given.

    Raises:
        `TypeError`: If the arguments of a call are no tuple or list.
        `ValueError`: If the program does not run, or gives two different answers.
    """
    for arguments in inputs:
        if not isinstance(arguments, (tuple, list)):
            raise TypeError(
                f"`inputs` holds a tuple of arguments for each call, got {arguments!r:.80}; write "
                f"`({arguments!r:.80},)` for a call with one."
            )
    texts = tuple(values.encode(tuple(arguments), ordered=True) for arguments in inputs)
    job = Job(program, texts, runs=2)
    if sandbox is None:
        with Sandbox(workers=1) as own:
            (verdict,) = own.run([job])
    else:
        (verdict,) = sandbox.run([job])
    if not verdict.ok:
        raise ValueError(f"no task can be made of {program!r:.200}: {verdict.status} ({verdict.reason})")
    if visible is None:
        visible = len(texts) // 2 if kind == CodeF.name else 0
    return Task(kind, program, texts, verdict.outputs, message, visible)
