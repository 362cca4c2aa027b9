"""code_i, abduction: the student is given a program and an output and must find an input (phases 2 to 4)."""

from __future__ import annotations

from trl_populora.sandbox import values
from trl_populora.sandbox.jobs import Job, Status, Verdict

from . import templates
from .base import Attempt, Task
from .code import ProgramWithInput
from .fences import FormatError, read_blocks
from .programs import ProgramError


class CodeI(ProgramWithInput):
    """
    Right when `f(answer)` equals the output; any such input counts, not only the proposer's.

    Args:
        strict (`bool`, *optional*, defaults to `False`): Whether `1`, `1.0` and `True` are different outputs.
        tolerance (`float`, *optional*, defaults to `0.0`): Allowed difference between floats.
    """

    name = "code_i"
    reference_kinds = ("code_i",)

    def __init__(self, strict: bool = False, tolerance: float = 0.0):
        self.strict = strict
        self.tolerance = tolerance

    def solving_prompt(self, task: Task, style: str) -> list[dict[str, str]]:
        templates.check_style(style)
        shown = templates.fenced(templates.program_block(task.program), templates.output_block(task.outputs[0]))
        if style == "compact":
            return templates.compact_turn(f"solve {self.name}", [shown])
        return templates.user_turn(templates.SOLVE_INPUT.format(task=shown))

    def render_answer(self, answer: str) -> str:
        """The completion text that [`parse_attempt`] reads back as the canonical argument tuple `answer`."""
        return templates.fenced(templates.input_block(answer))

    def parse_attempt(self, text: str, task: Task) -> Attempt:
        try:
            (written,) = read_blocks(text, ("input",))
            return Attempt(True, self.read_arguments(written, self.max_answer_chars))
        except (FormatError, ProgramError) as error:
            return self.malformed(error)

    def trial(self, task: Task, attempt: Attempt) -> Job | None:
        return Job(task.program, (attempt.answer,)) if attempt.well_formed else None

    def correct(self, task: Task, attempt: Attempt, verdict: Verdict | None) -> bool:
        if not attempt.well_formed or verdict is None or verdict.status is not Status.OK:
            return False
        returned, gold = values.decode(verdict.outputs[0]), values.decode(task.outputs[0])
        return values.equal(returned, gold, strict=self.strict, tolerance=self.tolerance)
