"""The three code kinds: what they share, then `code_o`, `code_i` and `code_f`."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trl_populora.sandbox import Job, Sandbox, literals, values
from trl_populora.sandbox.jobs import Status, Verdict
from trl_populora.tasks.features import read_features
from trl_populora.tasks.kind import Attempt, KindSettings, Proposal, Refusal, Reject, Task, TaskKind

from . import complexity, prompts
from .programs import ProgramError, check_program, contains_program
from .reading import FormatError, find_blocks, read_blocks


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
    instructions: Mapping[str, str] = prompts.TURNS

    def configure(self, settings: KindSettings) -> None:
        """Takes a run's settings. A subclass that sets `determinism_runs` in its body keeps its own number."""
        if next(each for each in type(self).__mro__ if "determinism_runs" in vars(each)) is CodeKind:
            self.determinism_runs = settings.determinism_runs
        self.reading = settings.reading or ("strict" if settings.prompt_style == "compact" else "tolerant")
        # The embedded base's figures were measured with such tasks.
        self.refuses_copies = settings.prompt_style not in (None, "compact")
        self.instructions = prompts.TURNS | dict(settings.prompt_texts or {})

    def read_blocks(self, text: str, names: Sequence[str]) -> list[str]:
        """Contents of the fenced blocks called `names`, read as configured."""
        return (read_blocks if self.reading == "strict" else find_blocks)(text, names)

    def instruct(self, what: str, **numbers: int) -> str:
        """The short instruction to `"propose"` or `"solve"`, or the user's own."""
        text = self.instructions[f"{self.name}/{what}"]
        return text.format(program_chars=self.max_program_chars, value_chars=self.max_value_chars, **numbers)

    def gives_rules(self, what: str, style: str) -> bool:
        """Whether an instruction is given with all rules: in the style `"chat"`, unless a user's own replaces it."""
        name = f"{self.name}/{what}"
        return style == "chat" and self.instructions[name] == prompts.TURNS[name]

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

    def read_outputs(self, verdict: Verdict | None) -> tuple[str, ...] | Refusal:
        """The verified outputs, or why there are none."""
        if verdict is None:
            raise ValueError("A code proposal is accepted on a verdict, got None: run `check(proposal)` first.")
        if verdict.status is not Status.OK:
            return Refusal(Reject(verdict.status.value), verdict.reason)
        longest = max(len(prompts.write_literal(output)) for output in verdict.outputs)
        if longest > self.max_value_chars:
            return Refusal(Reject.OVERSIZED, f"output of {longest} characters, at most {self.max_value_chars}")
        return tuple(verdict.outputs)

    def complexity(self, task: Task) -> dict[str, float]:
        return complexity.measure(task.program)

    def features(self, task: Task) -> tuple[str, ...]:
        return read_features(task.program)

    def reject_malformed(self, error: FormatError | ProgramError) -> Attempt:
        return Attempt(False, "", find_reason(error).value, str(error))

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
        prompts.check_style(style)
        shown = [prompts.show_reference(task) for task in references]
        if style == "compact":
            return prompts.ask_compactly(f"propose {self.name}", shown)
        text = self.instruct("propose")
        if self.gives_rules("propose", style):
            text = prompts.PROPOSE_PROGRAM.format(
                goal=prompts.PROPOSE_GOAL[self.name],
                program_chars=self.max_program_chars,
                value_chars=self.max_value_chars,
            )
        if shown:
            text = "\n\n".join([prompts.REFERENCES, *shown, text])
        return prompts.ask(text)

    def write_proposal(self, task: Task) -> str:
        return prompts.fence(prompts.show_program(task.program), prompts.show_input(task.inputs[0]))

    def parse_proposal(self, text: str, references: Sequence[Task]) -> Proposal | Refusal:
        try:
            program, given = self.read_blocks(text, ("python", "input"))
            return Proposal(self.name, self.read_program(program), (self.read_arguments(given, self.max_value_chars),))
        except (FormatError, ProgramError) as error:
            return refuse(error)

    def accept(self, proposal: Proposal, verdict: Verdict | None, rng: random.Random) -> Task | Refusal:
        outputs = self.read_outputs(verdict)
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
        prompts.check_style(style)
        shown = prompts.fence(prompts.show_program(task.program), self.show_given(task))
        if style == "compact":
            return prompts.ask_compactly(f"solve {self.name}", [shown])
        if self.gives_rules("solve", style):
            return prompts.ask(self.instruction.format(task=shown))
        return prompts.ask(f"{self.instruct('solve')}\n\n{shown}")

    def parse_attempt(self, text: str, task: Task) -> Attempt:
        try:
            (written,) = self.read_blocks(text, (self.answer_fence,))
            return Attempt(True, self.read_answer(written))
        except (FormatError, ProgramError) as error:
            return self.reject_malformed(error)


def find_reason(error: FormatError | ProgramError) -> Reject:
    return error.reason if isinstance(error, ProgramError) else Reject.FORMAT


def refuse(error: FormatError | ProgramError) -> Refusal:
    return Refusal(find_reason(error), str(error))


# code_o, deduction: the student is given a program and an input and must work out the output.


class CodeO(ProgramWithInput):
    """Right when the answered literal equals the output; nothing runs, the comparison is on data."""

    name = "code_o"
    reference_kinds = ("code_o",)
    answer_fence = "output"
    instruction = prompts.SOLVE_OUTPUT
    shots = prompts.CODE_O

    def show_given(self, task: Task) -> tuple[str, str]:
        return prompts.show_input(task.inputs[0])

    def read_answer(self, written: str) -> str:
        return self.read_value(written, self.max_answer_chars)

    def identify_mistake(self, task: Task, attempt: Attempt, verdict: Verdict | None) -> str:
        return self.normalize(attempt.answer)

    def correct(self, task: Task, attempt: Attempt, verdict: Verdict | None) -> bool:
        return attempt.well_formed and self.is_same(attempt.answer, task.outputs[0])


# code_i, abduction: the student is given a program and an output and must find an input.


GUESSES = 8  # as many as attempts: a share that is told as finely


class CodeI(ProgramWithInput):
    """Right when `f(answer)` equals the output; any such input counts, not only the proposer's."""

    name = "code_i"
    reference_kinds = ("code_i",)
    answer_fence = "input"
    instruction = prompts.SOLVE_INPUT
    shots = prompts.CODE_I

    def show_given(self, task: Task) -> tuple[str, str]:
        return prompts.show_output(task.outputs[0])

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


# code_f, induction: the student is given a hint and example pairs and must write the program.


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
    shots = prompts.CODE_F
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
        prompts.check_style(style)
        program = prompts.fence(prompts.show_program(self._take_program(references)))
        if style == "compact":
            return prompts.ask_compactly(f"propose {self.name} {self.inputs_per_task}", [program])
        count, message_chars = self.inputs_per_task, self.max_message_chars
        if self.gives_rules("propose", style):
            text = prompts.PROPOSE_INPUTS.format(
                count=count, value_chars=self.max_value_chars, message_chars=message_chars, task=program
            )
        else:
            text = f"{self.instruct('propose', count=count, message_chars=message_chars)}\n\n{program}"
        return prompts.ask(text)

    def write_proposal(self, task: Task) -> str:
        """As many of its inputs as are asked for; nothing where it has fewer, or where those give one output."""
        count = self.inputs_per_task
        if len(task.inputs) < count or _is_constant(task.outputs[:count]):
            return ""
        inputs = "\n".join(map(prompts.write_arguments, task.inputs[:count]))
        return prompts.fence(("inputs", inputs), ("message", task.message))

    def parse_proposal(self, text: str, references: Sequence[Task]) -> Proposal | Refusal:
        program = self._take_program(references)
        try:
            written, message = self.read_blocks(text, ("inputs", "message"))
            inputs = tuple(self.read_arguments(line, self.max_value_chars) for line in self._split_inputs(written))
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

    def _split_inputs(self, written: str) -> list[str]:
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
        outputs = self.read_outputs(verdict)
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
        prompts.check_style(style)
        pairs = zip(task.inputs[: task.visible], task.outputs[: task.visible], strict=True)
        shown = prompts.fence(("message", task.message), prompts.show_examples(pairs))
        if style == "compact":
            return prompts.ask_compactly(f"solve {self.name}", [shown])
        if self.gives_rules("solve", style):
            text = prompts.SOLVE_PROGRAM.format(task=shown, program_chars=self.max_program_chars)
        else:
            text = f"{self.instruct('solve')}\n\n{shown}"
        return prompts.ask(text)

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

    def _take_program(self, references: Sequence[Task]) -> str:
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


# What somebody answers who has not looked at a task: arguments of the right form (solve).


MAX_SIZE = 2000  # values and characters of one guess: each level of nested lists would double it


def guess_blindly(value: Any, rng: random.Random) -> Any:
    """
    A value of the same form as `value`: types stay, numbers are of its size, texts and lists up to twice as long, and
    lists are filled as long as the whole is no larger than `MAX_SIZE`.

    Args:
        value: Plain data.
        rng: Decides the rest.
    """
    left = MAX_SIZE

    def draw(value: Any) -> Any:
        nonlocal left
        left -= 1 + (len(value) if isinstance(value, (str, bytes)) else 0)
        if isinstance(value, tuple):  # a record, as arguments are: its length is part of its form
            return tuple(map(draw, value))
        if isinstance(value, dict):
            return {draw(name): draw(each) for name, each in value.items()}
        if isinstance(value, (list, set, frozenset)):
            members = sorted(value, key=repr) if not isinstance(value, list) else value
            count = rng.randint(0, 2 * len(members) + 2) if members else 0
            return type(value)(draw(rng.choice(members)) for _ in range(count) if left > 0)
        return _vary(value, rng)

    return draw(value)


def _vary(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return rng.random() < 0.5
    if isinstance(value, int):
        return rng.randint(min(0, 2 * value - 10), max(0, 2 * value + 10))
    if isinstance(value, float):
        return round(rng.uniform(min(0.0, 2 * value - 10), max(0.0, 2 * value + 10)), 2)
    if isinstance(value, str):
        return "".join(rng.choices(value + "abcxyz", k=rng.randint(0, 2 * len(value) + 2)))
    if isinstance(value, bytes):
        return bytes(rng.choices(value + b"abcxyz", k=rng.randint(0, 2 * len(value) + 2)))
    return value  # None, and complex numbers, which no task of this kind is about


# Makes a task from a program and its arguments as Python values: for seeds that a user writes.


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
