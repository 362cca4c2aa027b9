"""code_o, deduction: the student is given a program and an input and must work out the output."""

from __future__ import annotations

from trl_populora.sandbox.jobs import Verdict

from . import shots, templates
from .base import Attempt, Task
from .code import ProgramWithInput


class CodeO(ProgramWithInput):
    """Right when the answered literal equals the output; nothing runs, the comparison is on data."""

    name = "code_o"
    reference_kinds = ("code_o",)
    answer_fence = "output"
    instruction = templates.SOLVE_OUTPUT
    shots = shots.CODE_O

    def show_given(self, task: Task) -> tuple[str, str]:
        return templates.input_block(task.inputs[0])

    def read_answer(self, written: str) -> str:
        return self.read_value(written, self.max_answer_chars)

    def identify_mistake(self, task: Task, attempt: Attempt, verdict: Verdict | None) -> str:
        return self.normalize(attempt.answer)

    def correct(self, task: Task, attempt: Attempt, verdict: Verdict | None) -> bool:
        return attempt.well_formed and self.is_same(attempt.answer, task.outputs[0])
