"""The three code kinds: first what they share, then `code_o`, `code_i` and `code_f`.

           teacher writes       student is shown       student writes     right if
    code_o program, input       program, input         the output         it equals the output
    code_i program, input       program, output        an input           the program gives the output for it
    code_f inputs, message      message, half of the   the program        it agrees on all pairs
           of a known program   input-output pairs

At the end stand [`guess_blindly`], which draws random answers without looking at the task, and [`make_task`], which
makes a task from a user's own program.
"""

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

    The limits are class attributes, which a subclass may change. A text over a limit is refused, never cut. With
    `teacher_reward: paper` these limits are off, and code_f also takes equal inputs, outputs that are all equal, and a
    message that gives the program away.
    Answers are compared by Python's `==`, as in Absolute Zero Reasoner (AZR), but nan equals nan.
    """

    # AZR's prompt budget of 6144 tokens holds 6 references of about this size.
    max_program_chars = 3000
    # Limit of one input or output, written as a literal. AZR cuts outputs at this length, and takes the cut text as
    # the right answer.
    max_value_chars = 400
    # Limit of an answer: ten times that of an output. Longer answers are malformed, not merely wrong.
    max_answer_chars = 4000
    determinism_runs = KindSettings.determinism_runs
    measures = complexity.PROGRAM_MEASURES
    # The program of a proposal must end within half of the CPU limit. When it runs again for an attempt, other
    # programs run beside it, and it may need more time.
    cpu_headroom = 2.0
    reading = "strict"  # or "tolerant"
    refuses_copies = False
    guarded = True  # False with `teacher_reward: paper`: the checks for `kind.GUARDS` are left out
    instructions: Mapping[str, str] = prompts.TURNS

    def configure(self, settings: KindSettings) -> None:
        """Takes a run's settings. A subclass that sets `determinism_runs` in its body keeps that number."""
        if next(each for each in type(self).__mro__ if "determinism_runs" in vars(each)) is CodeKind:
            self.determinism_runs = settings.determinism_runs
        self.reading = settings.reading or ("strict" if settings.prompt_style == "compact" else "tolerant")
        self.guarded = settings.teacher_reward != "paper"
        # The style `compact` allows tasks whose answer is a copy of what is shown, because the published figures of
        # the embedded base were measured with them.
        self.refuses_copies = self.guarded and settings.prompt_style not in (None, "compact")
        self.instructions = prompts.TURNS | dict(settings.prompt_texts or {})

    def read_blocks(self, text: str, names: Sequence[str]) -> list[str]:
        """Returns the contents of the fenced blocks called `names`, read strictly or tolerantly."""
        return (read_blocks if self.reading == "strict" else find_blocks)(text, names)

    def instruct(self, what: str, **numbers: int) -> str:
        """Writes the short instruction, the user's own if there is one. `what` is `"propose"` or `"solve"`."""
        text = self.instructions[f"{self._texts}/{what}"]
        return text.format(program_chars=self.max_program_chars, value_chars=self.max_value_chars, **numbers)

    def gives_rules(self, what: str, style: str) -> bool:
        """Says whether a prompt has all rules: only in the style `"chat"`, if no text of the user replaces them."""
        name = f"{self._texts}/{what}"
        return style == "chat" and self.instructions[name] == prompts.TURNS[name]

    @property
    def _texts(self) -> str:
        """The kind whose texts prompts have. A subclass with a name of its own has those of the built-in kind."""
        names = (getattr(each, "name", "") for each in type(self).__mro__)
        return next(name for name in names if f"{name}/solve" in prompts.TURNS)

    def normalize(self, text: str) -> str:
        """Returns one text for all canonical texts of the same answer, as for `1`, `1.0` and `True`."""
        return values.key(values.decode(text)) if values.is_canonical(text) else text

    def read_program(self, text: str) -> str:
        """
        Checks a program's size and syntax, and that it defines `f`. Returns the program without blanks at its end.

        Raises:
            `ProgramError`: If it fails a check.
        """
        program = text.rstrip()
        if self.guarded and len(program) > self.max_program_chars:
            raise ProgramError(
                Reject.OVERSIZED, f"program of {len(program)} characters, at most {self.max_program_chars}"
            )
        check_program(program)
        return program

    def read_arguments(self, text: str, max_chars: int) -> str:
        """
        Encodes literals separated by commas, or one call of `f` with them, as the canonical text of an argument
        tuple. Dicts keep their order.
        """
        return self._read(literals.read_arguments, text, max_chars, ordered=True)

    def read_value(self, text: str, max_chars: int) -> str:
        """Encodes one literal as a canonical text."""
        return self._read(literals.read_literal, text, max_chars)

    def _read(self, reader: Callable[[str], Any], text: str, max_chars: int, ordered: bool = False) -> str:
        text = text.strip()
        if self.guarded and len(text) > max_chars:
            raise ProgramError(Reject.OVERSIZED, f"value of {len(text)} characters, at most {max_chars}")
        try:
            return values.encode(reader(text), ordered=ordered)
        except ValueError as error:  # LiteralError, and values over the encoder's budgets
            raise ProgramError(Reject.ARGUMENTS, str(error)) from error

    def check(self, proposal: Proposal) -> Job:
        return Job(proposal.program, proposal.inputs, runs=self.determinism_runs, headroom=self.cpu_headroom)

    def read_outputs(self, verdict: Verdict | None) -> tuple[str, ...] | Refusal:
        """Returns the outputs that the sandbox has seen, or why they make no task."""
        if verdict is None:
            raise ValueError("`accept` needs a verdict, got None: run the job of `check(proposal)` first.")
        if verdict.status is not Status.OK:
            return Refusal(Reject(verdict.status.value), verdict.reason)
        longest = max(len(prompts.write_literal(output)) for output in verdict.outputs)
        if self.guarded and longest > self.max_value_chars:
            return Refusal(Reject.OVERSIZED, f"output of {longest} characters, at most {self.max_value_chars}")
        return tuple(verdict.outputs)

    def complexity(self, task: Task) -> dict[str, float]:
        return complexity.measure(task.program)

    def features(self, task: Task) -> tuple[str, ...]:
        return read_features(task.program)

    def reject_malformed(self, error: FormatError | ProgramError) -> Attempt:
        """Makes a malformed attempt from an answer that cannot be read."""
        return Attempt(False, "", error.reason.value, str(error))

    def trial(self, task: Task, attempt: Attempt) -> Job | None:
        return None


class ProgramWithInput(CodeKind):
    """
    The common part of code_o and code_i: a proposal is a program and one input. The two kinds differ in what the
    student must find.

    Attributes:
        answer_fence: Name of the block in which the student answers.
        instruction: The student's instruction with all rules.
    """

    answer_fence: str
    instruction: str

    def proposal_prompt(self, references: Sequence[Task], style: str) -> list[dict[str, str]]:
        prompts.check_style(style)
        shown = []
        for task in references:
            program, given = prompts.show_program(task.program), prompts.show_input(task.inputs[0])
            shown.append(prompts.fence(program, given, prompts.show_output(task.outputs[0])))
        if style == "compact":
            return prompts.ask_compactly(f"propose {self.name}", shown)
        text = self.instruct("propose")
        if self.gives_rules("propose", style):
            text = prompts.PROPOSE_PROGRAM.format(
                goal=prompts.PROPOSE_GOAL[self._texts],
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
        Returns 1/2 if the output is `True` or `False`, and 1/2 to the power of n if it is a list or tuple of n truth
        values (n >= 1). Returns 0 for all other outputs: nobody knows how many outputs there could be.
        """
        output = values.decode(task.outputs[0])
        bits = output if isinstance(output, (list, tuple)) else [output]
        return 0.5 ** len(bits) if bits and all(isinstance(bit, bool) for bit in bits) else 0.0

    def copies(self, task: Task) -> list[Attempt]:
        """
        Returns what the student is shown beside the program, as an answer. Returns nothing if it cannot be read as an
        answer, or if copies are allowed: in the style `"compact"`, and with `teacher_reward: paper`.
        """
        _, shown = self.show_given(task)
        try:
            return [Attempt(True, self.read_answer(shown))] if self.refuses_copies else []
        except ProgramError:
            return []

    @abstractmethod
    def show_given(self, task: Task) -> tuple[str, str]:
        """Returns the block that the student is shown beside the program: its name and its content."""

    @abstractmethod
    def read_answer(self, written: str) -> str:
        """Encodes the content of the student's block as a canonical text."""

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


def refuse(error: FormatError | ProgramError) -> Refusal:
    """Makes the refusal of a proposal that cannot be read."""
    return Refusal(error.reason, str(error))


class CodeO(ProgramWithInput):
    """
    Deduction. The student is shown a program and an input, and must work out the output. An answer is right if its
    value equals the output. Nothing has to run for that.
    """

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
        return attempt.well_formed and self.normalize(attempt.answer) == self.normalize(task.outputs[0])


# As many as a task has attempts by default. So the share of right guesses and the solve rate both have steps of 1/8.
GUESSES = 8


class CodeI(ProgramWithInput):
    """
    Abduction. The student is shown a program and an output, and must find an input. An answer is right if the program
    gives this output for it, even if it is not the teacher's input.
    """

    name = "code_i"
    reference_kinds = ("code_i",)
    answer_fence = "input"
    instruction = prompts.SOLVE_INPUT
    shots = prompts.CODE_I

    def show_given(self, task: Task) -> tuple[str, str]:
        return prompts.show_output(task.outputs[0])

    def read_answer(self, written: str) -> str:
        return self.read_arguments(written, self.max_answer_chars)

    def copies(self, task: Task) -> list[Attempt]:
        """
        Returns the output, as [`ProgramWithInput.copies`] does. A tuple is returned twice: as the only argument, and
        with its members as arguments, which is how an answer without the outer brackets reads.
        """
        copied = super().copies(task)
        output = values.decode(task.outputs[0])
        if not copied or not isinstance(output, tuple):
            return copied
        return [*copied, Attempt(True, values.encode(output, ordered=True))]

    def trial(self, task: Task, attempt: Attempt) -> Job | None:
        return Job(task.program, (attempt.answer,)) if attempt.well_formed else None

    def guesses(self, task: Task) -> list[Attempt]:
        """
        Returns random inputs of the same form as the teacher's. They find programs that give the shown output for many
        inputs, say one in four.
        """
        # Seeded by the task, so that every rank and every run tries the same inputs.
        rng = random.Random(task.task_id)
        given = values.decode(task.inputs[0])
        return [Attempt(True, values.encode(guess_blindly(given, rng), ordered=True)) for _ in range(GUESSES)]

    def identify_mistake(self, task: Task, attempt: Attempt, verdict: Verdict | None) -> str:
        """
        Returns the output that the answer leads to. Two inputs with the same wrong output are the same mistake. If the
        run failed, returns the answer itself.
        """
        if verdict is None or verdict.status is not Status.OK:
            return attempt.answer
        return self.normalize(verdict.outputs[0])

    def correct(self, task: Task, attempt: Attempt, verdict: Verdict | None) -> bool:
        if not attempt.well_formed or verdict is None or verdict.status is not Status.OK:
            return False
        return self.normalize(verdict.outputs[0]) == self.normalize(task.outputs[0])


class CodeF(CodeKind):
    """
    Induction. The student is shown a message and some pairs of input and output, and must write the program. An answer
    is right if it gives the right output for every input, shown or hidden.

    The teacher is shown a program from the archive, and writes inputs and a message for it. The inputs are shuffled.
    Then one half is shown, rounded down, and the rest is hidden. So the teacher cannot choose what is hidden.

    Args:
        inputs_per_task: Inputs of one task. The default is Absolute Zero Reasoner's.

    Raises:
        `ValueError`: If there are too few inputs for one visible and one hidden pair.
    """

    name = "code_f"
    reference_kinds = ("code_o", "code_i")
    writes_program = False
    shots = prompts.CODE_F
    max_message_chars = 400  # as many as an output may have
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
        """Returns 1: a teacher is shown the program that its inputs are for."""
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
        """
        Writes as many of the task's inputs as a proposal must give, and its message. Returns `""` if such a proposal
        would be refused: if the task has no message or fewer inputs, or if these all give the same output.
        """
        count = self.inputs_per_task
        if not task.message.strip() or len(task.inputs) < count:
            return ""
        if self.guarded and _is_constant(task.outputs[:count]):
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
        if self.guarded and contains_program(message, program):
            return Refusal(Reject.LEAKED_PROGRAM, "the message holds a `def`, the program or its body")
        # Inputs count as equal if `==` finds them equal, as `1` and `True`: a program may not be able to tell them
        # apart.
        decoded = [values.decode(text) for text in inputs]
        if self.guarded and any(values.equal(a, b) for i, a in enumerate(decoded) for b in decoded[:i]):
            return Refusal(Reject.DUPLICATE_INPUTS, "two of the inputs are equal")
        return Proposal(self.name, program, inputs, message)

    def _split_inputs(self, written: str) -> list[str]:
        """
        Splits the block of inputs into lines, one input each.

        Raises:
            `FormatError`: If there are too few lines. If reading is strict, also if there are too many or blank ones.
        """
        lines = written.strip("\n").split("\n")
        if self.reading == "tolerant":
            lines = [line for line in lines if line.strip()][: self.inputs_per_task]
        if len(lines) != self.inputs_per_task or not all(map(str.strip, lines)):
            raise FormatError(
                f"the block of inputs has {len(lines)} lines, not {self.inputs_per_task} with an input in each"
            )
        return lines

    def _read_message(self, message: str) -> str:
        message = message.strip()
        if not message:
            raise FormatError("the message is empty")
        too_long = message.count("\n") >= self.max_message_lines or len(message) > self.max_message_chars
        if self.guarded and too_long:
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
        if self.guarded and _is_constant(outputs):
            return Refusal(Reject.CONSTANT_OUTPUT, "all inputs give the same output")
        pairs = list(zip(proposal.inputs, outputs, strict=True))
        rng.shuffle(pairs)
        visible = len(pairs) // 2
        # If all hidden outputs were equal, a program that always returns this value would pass all hidden pairs.
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
        """
        Returns the outputs of the student's program, up to and including the first wrong one. So programs that differ
        only as text, or only after that output, make the same mistake. If the run failed, the program's text is
        returned instead.
        """
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
        """Returns the program that a proposal is about: that of the first reference."""
        if not references:
            raise ValueError("code_f proposes for a known program, got no reference.")
        return references[0].program


def _is_constant(outputs: Sequence[str]) -> bool:
    """Says whether all outputs are equal."""
    first, *others = map(values.decode, outputs)
    return all(values.equal(first, other) for other in others)


def _vary_hidden(pairs: list[tuple[str, str]], visible: int) -> None:
    """Exchanges a hidden pair for a visible one with another output, if all of several hidden outputs are equal."""
    hidden = [output for _, output in pairs[visible:]]
    if len(hidden) == 1 or not _is_constant(hidden):
        return
    last = values.decode(hidden[-1])
    for index in range(visible):
        if not values.equal(last, values.decode(pairs[index][1])):
            pairs[index], pairs[-1] = pairs[-1], pairs[index]
            return


# Blind guesses: random values of the same types and about the same size as a given value. They show what an attempt
# scores that does not look at the task.


# Limit of one guess, counted in values and in characters of its texts. Without it a guess may double in size with
# every level of nested lists.
MAX_SIZE = 2000


def guess_blindly(value: Any, rng: random.Random) -> Any:
    """
    Draws a value of the same form as `value`. Types stay the same, numbers have about the same size, and texts and
    lists are at most about twice as long. Lists stop growing when the whole value has reached `MAX_SIZE`.

    Args:
        value: Plain data.
        rng: Decides every choice.
    """
    left = MAX_SIZE

    def draw(value: Any) -> Any:
        nonlocal left
        left -= 1 + (len(value) if isinstance(value, (str, bytes)) else 0)
        # A tuple is a record, as arguments are: its length is part of its form.
        if isinstance(value, tuple):
            return tuple(map(draw, value))
        if isinstance(value, dict):
            return {draw(name): draw(each) for name, each in value.items()}
        if isinstance(value, (list, set, frozenset)):
            # A set is sorted, because another process would go through it in another order.
            items = sorted(value, key=repr) if not isinstance(value, list) else value
            count = rng.randint(0, 2 * len(items) + 2) if items else 0
            return type(value)(draw(rng.choice(items)) for _ in range(count) if left > 0)
        return _vary(value, rng)

    return draw(value)


def _vary(value: Any, rng: random.Random) -> Any:
    """Draws a value of the same type as `value`, which is no collection."""
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
    return value  # None has no other value; complex numbers are too rare to draw


# Tasks that users write.


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
    Makes a task from a program and its arguments as Python values. Runs the program to find the outputs.

        make_task("code_o", "def f(x):\\n    return x + 1", inputs=[(1,)])

    Args:
        kind: Name of the kind.
        program: Source with a top-level `f`.
        inputs: One sequence of arguments per call, as plain data. code_f takes several calls, code_o and code_i take
            one.
        message: Hint for the student (code_f).
        visible: The student is shown the first `visible` pairs of input and output. With `None` these are half of the
            pairs for code_f, and no pair for other kinds.
        sandbox: Runs the program. With `None` a sandbox is started for this call.

    Raises:
        `TypeError`: If the arguments of a call are no tuple or list.
        `ValueError`: If the kind wants another number of calls, if an argument is no plain data or too large, if the
            program fails, or if two runs of it give different outputs.
        `RuntimeError`: If no sandbox is given, and none can be started here.
    """
    for arguments in inputs:
        if not isinstance(arguments, (tuple, list)):
            raise TypeError(
                f"`inputs` holds a tuple of arguments for each call, got {arguments!r:.80}; write "
                f"`({arguments!r:.80},)` for a call with one."
            )
    if kind in (CodeO.name, CodeI.name) and len(inputs) != 1:
        raise ValueError(f"a task of kind {kind!r} has one call, and `inputs` holds {len(inputs)}.")
    if kind == CodeF.name and len(inputs) < 2:
        raise ValueError(f"a task of kind {kind!r} has at least two calls, and `inputs` holds {len(inputs)}.")
    texts = tuple(values.encode(tuple(arguments), ordered=True) for arguments in inputs)
    job = Job(program, texts, runs=2)
    if sandbox is None:
        with Sandbox(workers=1) as started:
            (verdict,) = started.run([job])
    else:
        (verdict,) = sandbox.run([job])
    if not verdict.ok:
        raise ValueError(f"no task can be made of {program!r:.200}: {verdict.status} ({verdict.reason})")
    if visible is None:
        visible = len(texts) // 2 if kind == CodeF.name else 0
    return Task(kind, program, texts, verdict.outputs, message, visible)
