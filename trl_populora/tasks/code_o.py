"""code_o, deduction: the student is given a program and an input and must work out the output (phases 2 to 4)."""

from __future__ import annotations

from trl_populora.sandbox import literals, values
from trl_populora.sandbox.jobs import Verdict

from . import templates
from .base import Attempt, Reject, Task
from .code import ProgramWithInput
from .fences import FormatError, read_blocks
from .programs import ProgramError


class CodeO(ProgramWithInput):
    """
    Right when the answered literal equals the output; nothing runs, the comparison is on data.

    Args:
        strict (`bool`, *optional*, defaults to `False`): Whether `1`, `1.0` and `True` are different answers. The
            default compares like Python's `==`, as Absolute Zero Reasoner does.
        tolerance (`float`, *optional*, defaults to `0.0`): Allowed difference between floats.
    """

    name = "code_o"
    reference_kinds = ("code_o",)

    def __init__(self, strict: bool = False, tolerance: float = 0.0):
        self.strict = strict
        self.tolerance = tolerance

    def solving_prompt(self, task: Task, style: str) -> list[dict[str, str]]:
        templates.check_style(style)
        shown = templates.fenced(templates.program_block(task.program), templates.input_block(task.inputs[0]))
        if style == "compact":
            return templates.compact_turn(f"solve {self.name}", [shown])
        return templates.user_turn(templates.SOLVE_OUTPUT.format(task=shown))

    def render_answer(self, answer: str) -> str:
        """The completion text that [`parse_attempt`] reads back as the canonical text `answer`."""
        return templates.fenced(templates.output_block(answer))

    def parse_attempt(self, text: str, task: Task) -> Attempt:
        try:
            (written,) = read_blocks(text, ("output",))
            if len(written) > self.max_answer_chars:
                raise ProgramError(Reject.OVERSIZED, f"answer of {len(written)} characters")
            return Attempt(True, values.encode(literals.read_literal(written.strip())))
        except (FormatError, ProgramError) as error:
            return self.malformed(error)
        except ValueError:  # LiteralError, and values over the encoder's budgets
            return Attempt(False, "", Reject.ARGUMENTS.value)

    def correct(self, task: Task, attempt: Attempt, verdict: Verdict | None) -> bool:
        if not attempt.well_formed:
            return False
        answer, gold = values.decode(attempt.answer), values.decode(task.outputs[0])
        return values.equal(answer, gold, strict=self.strict, tolerance=self.tolerance)
