"""What the three code kinds share: limits, reading programs and literals, and the step from a verdict to a task."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_populora.sandbox import literals, values
from trl_populora.sandbox.jobs import Job, Status, Verdict

from . import complexity, templates
from .base import Attempt, KindSettings, Proposal, Refusal, Reject, Task, TaskKind
from .features import read_features
from .fences import FormatError, read_blocks
from .programs import ProgramError, check_program
from .reading import find_answer


class CodeKind(TaskKind):
    """
    A kind whose tasks are programs with a top-level `f`.

    The limits are class attributes, to be changed in a subclass. Nothing over a limit is ever cut: it is rejected.
    Answers compare like Python's `==`, as in Absolute Zero Reasoner.
    """

    max_program_chars = 3000  # AZR's prompt budget of 6144 tokens holds K = 6 references of about this size
    max_value_chars = 400  # one input or output, as literals; AZR cuts outputs here and makes the cut text the gold
    max_answer_chars = 4000  # ten times the longest gold: longer answers are malformed, not merely wrong
    determinism_runs = KindSettings.determinism_runs
    measures = complexity.PROGRAM_MEASURES
    cpu_headroom = 2.0  # a task needs half of the limit in CPU time: beside others the same run may need more
    reading = "strict"  # or "tolerant"
    refuses_copies = False
    instructions: Mapping[str, str] = templates.TURNS

    def configure(self, settings: KindSettings) -> None:
        """Takes a run's settings. A subclass that sets `determinism_runs` in its body keeps its own number."""
        if next(each for each in type(self).__mro__ if "determinism_runs" in vars(each)) is CodeKind:
            self.determinism_runs = settings.determinism_runs
        self.reading = settings.reading or ("strict" if settings.prompt_style == "compact" else "tolerant")
        # The embedded base's figures were measured with such tasks.
        self.refuses_copies = settings.prompt_style not in (None, "compact")
        self.instructions = templates.TURNS | dict(settings.prompt_texts or {})

    def read_blocks(self, text: str, names: Sequence[str]) -> list[str]:
        """Contents of the fenced blocks called `names`, read as configured."""
        return (read_blocks if self.reading == "strict" else find_answer)(text, names)

    def instruct(self, what: str, **numbers: int) -> str:
        """The short instruction to `"propose"` or `"solve"`, or the user's own."""
        text = self.instructions[f"{self.name}/{what}"]
        return text.format(program_chars=self.max_program_chars, value_chars=self.max_value_chars, **numbers)

    def in_full(self, what: str, style: str) -> bool:
        """Whether an instruction is given with all rules: in the style `"chat"`, unless a user's own replaces it."""
        name = f"{self.name}/{what}"
        return style == "chat" and self.instructions[name] == templates.TURNS[name]

    def is_same(self, one: str, other: str) -> bool:
        """Whether two canonical texts are the same answer."""
        return values.equal(values.decode(one), values.decode(other))

    def normalize(self, text: str) -> str:
        """A text that canonical texts of the same answer share, whatever their notation: `1`, `1.0` and `True`."""
        return values.key(values.decode(text)) if values.is_canonical(text) else text

    def read_program(self, text: str) -> str:
        """Checks a program's size, syntax and `f`; returns it without trailing blank lines."""
        program = text.rstrip()
        if len(program) > self.max_program_chars:
            raise ProgramError(
                Reject.OVERSIZED, f"program of {len(program)} characters, at most {self.max_program_chars}"
            )
        check_program(program)
        return program

    def read_arguments(self, text: str, max_chars: int) -> str:
        """Canonical text of an argument list, dicts in the order written; literals only."""
        return self._read(literals.read_arguments, text, max_chars, ordered=True)

    def read_value(self, text: str, max_chars: int) -> str:
        """Canonical text of one literal."""
        return self._read(literals.read_literal, text, max_chars)

    def _read(self, reader: Callable[[str], Any], text: str, max_chars: int, ordered: bool = False) -> str:
        text = text.strip()
        if len(text) > max_chars:
            raise ProgramError(Reject.OVERSIZED, f"value of {len(text)} characters, at most {max_chars}")
        try:
            return values.encode(reader(text), ordered=ordered)
        except ValueError as error:  # LiteralError, and values over the encoder's budgets
            raise ProgramError(Reject.ARGUMENTS, str(error)) from error

    def check(self, proposal: Proposal) -> Job:
        return Job(proposal.program, proposal.inputs, runs=self.determinism_runs, headroom=self.cpu_headroom)

    def outputs_of(self, verdict: Verdict | None) -> tuple[str, ...] | Refusal:
        """The verified outputs, or why there are none."""
        if verdict is None:
            raise ValueError("A code proposal is accepted on a verdict, got None: run `check(proposal)` first.")
        if verdict.status is not Status.OK:
            return Refusal(Reject(verdict.status.value), verdict.reason)
        longest = max(len(templates.literal(output)) for output in verdict.outputs)
        if longest > self.max_value_chars:
            return Refusal(Reject.OVERSIZED, f"output of {longest} characters, at most {self.max_value_chars}")
        return tuple(verdict.outputs)

    def complexity(self, task: Task) -> dict[str, float]:
        return complexity.measure(task.program)

    def features(self, task: Task) -> tuple[str, ...]:
        return read_features(task.program)

    def reject_malformed(self, error: FormatError | ProgramError) -> Attempt:
        return Attempt(False, "", reason_of(error).value, str(error))

    def trial(self, task: Task, attempt: Attempt) -> Job | None:
        return None


class ProgramWithInput(CodeKind):
    """
    code_o and code_i: the proposal is a program and one input; the two differ in what the solver must find.

    A subclass names the fence of the solver's answer (`answer_fence`) and its instruction in full (`instruction`).
    """

    answer_fence: str
    instruction: str

    def proposal_prompt(self, references: Sequence[Task], style: str) -> list[dict[str, str]]:
        templates.check_style(style)
        shown = [templates.reference_blocks(task) for task in references]
        if style == "compact":
            return templates.compact_turn(f"propose {self.name}", shown)
        text = self.instruct("propose")
        if self.in_full("propose", style):
            text = templates.PROPOSE_PROGRAM.format(
                goal=templates.PROPOSE_GOAL[self.name],
                program_chars=self.max_program_chars,
                value_chars=self.max_value_chars,
            )
        if shown:
            text = "\n\n".join([templates.REFERENCES, *shown, text])
        return templates.user_turn(text)

    def write_proposal(self, task: Task) -> str:
        return templates.fence(templates.program_block(task.program), templates.input_block(task.inputs[0]))

    def parse_proposal(self, text: str, references: Sequence[Task]) -> Proposal | Refusal:
        try:
            program, given = self.read_blocks(text, ("python", "input"))
            return Proposal(self.name, self.read_program(program), (self.read_arguments(given, self.max_value_chars),))
        except (FormatError, ProgramError) as error:
            return refuse(error)

    def accept(self, proposal: Proposal, verdict: Verdict | None, rng: random.Random) -> Task | Refusal:
        outputs = self.outputs_of(verdict)
        if isinstance(outputs, Refusal):
            return outputs
        return Task(self.name, proposal.program, proposal.inputs, outputs)

    def chance(self, task: Task) -> float:
        """
        1/2 for an output that is `True` or `False`, and for each of several; nothing else tells its alternatives.
        """
        output = values.decode(task.outputs[0])
        bits = output if isinstance(output, (list, tuple)) else [output]
        return 0.5 ** len(bits) if bits and all(isinstance(bit, bool) for bit in bits) else 0.0

    def copies(self, task: Task) -> list[Attempt]:
        """What the student is shown beside the program, as the answer; nothing in the compact style."""
        _, shown = self.show_given(task)
        try:
            return [Attempt(True, self.read_answer(shown))] if self.refuses_copies else []
        except ProgramError:
            return []

    @abstractmethod
    def show_given(self, task: Task) -> tuple[str, str]:
        """The block that the solver is shown beside the program."""

    @abstractmethod
    def read_answer(self, written: str) -> str:
        """Canonical text of what the solver wrote into its block."""

    def solving_prompt(self, task: Task, style: str) -> list[dict[str, str]]:
        templates.check_style(style)
        shown = templates.fence(templates.program_block(task.program), self.show_given(task))
        if style == "compact":
            return templates.compact_turn(f"solve {self.name}", [shown])
        if self.in_full("solve", style):
            return templates.user_turn(self.instruction.format(task=shown))
        return templates.user_turn(f"{self.instruct('solve')}\n\n{shown}")

    def parse_attempt(self, text: str, task: Task) -> Attempt:
        try:
            (written,) = self.read_blocks(text, (self.answer_fence,))
            return Attempt(True, self.read_answer(written))
        except (FormatError, ProgramError) as error:
            return self.reject_malformed(error)


def reason_of(error: FormatError | ProgramError) -> Reject:
    return error.reason if isinstance(error, ProgramError) else Reject.FORMAT


def refuse(error: FormatError | ProgramError) -> Refusal:
    return Refusal(reason_of(error), str(error))
