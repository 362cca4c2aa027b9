"""code_f, induction: the student is given a hint and example pairs and must write the program."""

from __future__ import annotations

import random
from collections.abc import Sequence

from trl_populora.sandbox import values
from trl_populora.sandbox.jobs import Job, Status, Verdict

from . import shots, templates
from .base import Attempt, KindSettings, Proposal, Refusal, Reject, Task
from .code import CodeKind, refuse
from .fences import FormatError
from .programs import ProgramError, contains_program


class CodeF(CodeKind):
    """
    Right when the student's program agrees on every pair, on those that it was shown as on those that were hidden.

    The teacher is given a known program and writes inputs and a message. The inputs are shuffled before they are split
    into a visible and a hidden half, so the teacher cannot choose what is hidden.

    Args:
        inputs_per_task: Inputs of one task (Absolute Zero Reasoner).

    Raises:
        `ValueError`: If there are too few inputs for one visible and one hidden pair.
    """

    name = "code_f"
    reference_kinds = ("code_o", "code_i")
    writes_program = False
    shots = shots.CODE_F
    max_message_chars = 400  # one or two lines; as long as an output
    max_message_lines = 2

    def __init__(self, inputs_per_task: int = 10):
        if inputs_per_task < 2:
            raise ValueError(
                f"`inputs_per_task` must be at least 2, one visible and one hidden pair, got {inputs_per_task}."
            )
        self.inputs_per_task = inputs_per_task

    def configure(self, settings: KindSettings) -> None:
        super().configure(settings)
        self.inputs_per_task = settings.inputs_per_function

    def reference_count(self, k: int) -> int:
        """One: the program that the inputs are written for."""
        return 1

    def proposal_prompt(self, references: Sequence[Task], style: str) -> list[dict[str, str]]:
        templates.check_style(style)
        program = templates.fence(templates.program_block(self._is_known_program(references)))
        if style == "compact":
            return templates.compact_turn(f"propose {self.name} {self.inputs_per_task}", [program])
        count, message_chars = self.inputs_per_task, self.max_message_chars
        if self.in_full("propose", style):
            text = templates.PROPOSE_INPUTS.format(
                count=count, value_chars=self.max_value_chars, message_chars=message_chars, task=program
            )
        else:
            text = f"{self.instruct('propose', count=count, message_chars=message_chars)}\n\n{program}"
        return templates.user_turn(text)

    def write_proposal(self, task: Task) -> str:
        """As many of its inputs as are asked for; nothing where it has fewer, or where those give one output."""
        count = self.inputs_per_task
        if len(task.inputs) < count or _is_constant(task.outputs[:count]):
            return ""
        inputs = "\n".join(map(templates.arguments, task.inputs[:count]))
        return templates.fence(("inputs", inputs), ("message", task.message))

    def parse_proposal(self, text: str, references: Sequence[Task]) -> Proposal | Refusal:
        program = self._is_known_program(references)
        try:
            written, message = self.read_blocks(text, ("inputs", "message"))
            inputs = tuple(self.read_arguments(line, self.max_value_chars) for line in self._lines(written))
            message = self._read_message(message)
        except (FormatError, ProgramError) as error:
            return refuse(error)
        if contains_program(message, program):
            return Refusal(Reject.LEAKED_PROGRAM, "the message holds the program or its body")
        # Equal is what the solver's program would see: `1` and `True` are one input.
        decoded = [values.decode(text) for text in inputs]
        if any(values.equal(a, b) for i, a in enumerate(decoded) for b in decoded[:i]):
            return Refusal(Reject.DUPLICATE_INPUTS, "two of the inputs are equal")
        return Proposal(self.name, program, inputs, message)

    def _lines(self, written: str) -> list[str]:
        """
        The lines that hold an input each.

        Raises:
            `FormatError`: If there are fewer than wanted, or more or blank ones where reading is strict.
        """
        lines = written.strip("\n").split("\n")
        if self.reading == "tolerant":
            lines = [line for line in lines if line.strip()][: self.inputs_per_task]
        if len(lines) != self.inputs_per_task or not all(map(str.strip, lines)):
            raise FormatError(f"the block of inputs has {len(lines)} lines, not {self.inputs_per_task}")
        return lines

    def _read_message(self, message: str) -> str:
        message = message.strip()
        if not message:
            raise FormatError("the message is empty")
        if message.count("\n") >= self.max_message_lines or len(message) > self.max_message_chars:
            raise ProgramError(
                Reject.OVERSIZED,
                f"message of {message.count(chr(10)) + 1} lines and {len(message)} characters, at most "
                f"{self.max_message_lines} and {self.max_message_chars}",
            )
        return message

    def accept(self, proposal: Proposal, verdict: Verdict | None, rng: random.Random) -> Task | Refusal:
        outputs = self.outputs_of(verdict)
        if isinstance(outputs, Refusal):
            return outputs
        if _is_constant(outputs):
            return Refusal(Reject.CONSTANT_OUTPUT, "all inputs give the same output")
        pairs = list(zip(proposal.inputs, outputs, strict=True))
        rng.shuffle(pairs)
        visible = len(pairs) // 2
        _vary_hidden(pairs, visible)
        inputs, outputs = zip(*pairs, strict=True)
        return Task(self.name, proposal.program, inputs, outputs, proposal.message, visible)

    def solving_prompt(self, task: Task, style: str) -> list[dict[str, str]]:
        templates.check_style(style)
        pairs = zip(task.inputs[: task.visible], task.outputs[: task.visible], strict=True)
        shown = templates.fence(("message", task.message), templates.examples_block(pairs))
        if style == "compact":
            return templates.compact_turn(f"solve {self.name}", [shown])
        if self.in_full("solve", style):
            text = templates.SOLVE_PROGRAM.format(task=shown, program_chars=self.max_program_chars)
        else:
            text = f"{self.instruct('solve')}\n\n{shown}"
        return templates.user_turn(text)

    def parse_attempt(self, text: str, task: Task) -> Attempt:
        try:
            (program,) = self.read_blocks(text, ("python",))
            return Attempt(True, self.read_program(program))
        except (FormatError, ProgramError) as error:
            return self.reject_malformed(error)

    def trial(self, task: Task, attempt: Attempt) -> Job | None:
        if not attempt.well_formed:
            return None
        return Job(attempt.answer, task.inputs)

    def identify_mistake(self, task: Task, attempt: Attempt, verdict: Verdict | None) -> str:
        """What it gives for the inputs, up to the first that is wrong: two texts may be one guess."""
        if verdict is None or verdict.status is not Status.OK:
            return attempt.answer
        said = []
        for output, gold in zip(verdict.outputs, task.outputs, strict=False):
            said.append(self.normalize(output))
            if said[-1] != self.normalize(gold):
                break
        return " ".join(said)

    def correct(self, task: Task, attempt: Attempt, verdict: Verdict | None) -> bool:
        if not attempt.well_formed or verdict is None or verdict.status is not Status.OK:
            return False
        return list(map(self.normalize, verdict.outputs)) == list(map(self.normalize, task.outputs))

    def _is_known_program(self, references: Sequence[Task]) -> str:
        if not references:
            raise ValueError("code_f proposes for a known program, got no reference.")
        return references[0].program


def _is_constant(outputs: Sequence[str]) -> bool:
    first, *others = map(values.decode, outputs)
    return all(values.equal(first, other) for other in others)


def _vary_hidden(pairs: list[tuple[str, str]], visible: int) -> None:
    """Swaps a pair into the hidden ones if these would all be met by one constant."""
    hidden = [output for _, output in pairs[visible:]]
    if len(hidden) == 1 or not _is_constant(hidden):
        return
    last = values.decode(hidden[-1])
    for index in range(visible):
        if not values.equal(last, values.decode(pairs[index][1])):
            pairs[index], pairs[-1] = pairs[-1], pairs[index]
            return
