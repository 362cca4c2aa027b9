"""code_i, abduction: the student is given a program and an output and must find an input."""

from __future__ import annotations

import random

from trl_populora.sandbox import values
from trl_populora.sandbox.jobs import Job, Status, Verdict

from . import shots, templates
from .base import Attempt, Task
from .code import ProgramWithInput
from .guesses import guess_blindly


GUESSES = 8  # as many as attempts: a share that is told as finely


class CodeI(ProgramWithInput):
    """Right when `f(answer)` equals the output; any such input counts, not only the proposer's."""

    name = "code_i"
    reference_kinds = ("code_i",)
    answer_fence = "input"
    instruction = templates.SOLVE_INPUT
    shots = shots.CODE_I

    def show_given(self, task: Task) -> tuple[str, str]:
        return templates.output_block(task.outputs[0])

    def read_answer(self, written: str) -> str:
        return self.read_arguments(written, self.max_answer_chars)

    def trial(self, task: Task, attempt: Attempt) -> Job | None:
        return Job(task.program, (attempt.answer,)) if attempt.well_formed else None

    def guesses(self, task: Task) -> list[Attempt]:
        """Inputs of the form of the proposer's: of a lottery, which pays one input in four, they tell the odds."""
        rng = random.Random(task.task_id)
        given = values.decode(task.inputs[0])
        return [Attempt(True, values.encode(guess_blindly(given, rng), ordered=True)) for _ in range(GUESSES)]

    def identify_mistake(self, task: Task, attempt: Attempt, verdict: Verdict | None) -> str:
        """The output that it leads to: whoever guesses among inputs guesses among their outputs."""
        if verdict is None or verdict.status is not Status.OK:
            return attempt.answer
        return self.normalize(verdict.outputs[0])

    def correct(self, task: Task, attempt: Attempt, verdict: Verdict | None) -> bool:
        if not attempt.well_formed or verdict is None or verdict.status is not Status.OK:
            return False
        return self.is_same(verdict.outputs[0], task.outputs[0])
