"""
The training text of the embedded tiny base: tasks of all kinds in the compact formats, tokenised and packed.

A document is one prefix (say, a program to be run) with several branches (an input each, and its answer). A branch
attends to the prefix and to itself only and counts its positions on from the prefix, so every branch is exactly the
conversation that the model is shown later, while the prefix is computed once. Under one and the same prompt an answer
is direct or, for code_o and code_i, sometimes worked (`tiny_traces.py`). Answers follow from what the program is
*believed* to be, anew each time; proposals and their references are true. Used by `make_tiny_base.py`, and for
held-out tasks by the studies on that base.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import tiny_traces
from tiny_programs import (
    HELD_OUT,
    KNOWN_OPERATIONS,
    OPERATIONS,
    TRAINED_LEVELS,
    Operation,
    Program,
    ProgramWriter,
    is_small,
    run,
)
from tokenizers import Tokenizer

from trl_populora.sandbox import values
from trl_populora.tasks.kind import Task


INPUTS_PER_CODE_F = 6
MAX_REFERENCES = 3
MAX_ANSWER_TOKENS = 250  # a worked answer that would be longer is not written
PROPOSED_LEVEL_WEIGHTS = (0.06, 0.24, 0.34, 0.36)
SOLVED_LEVEL_WEIGHTS = (0.14, 0.30, 0.30, 0.26)
FIRST_LEVEL_WEIGHTS = (0.5, 0.3, 0.1, 0.1)
FIRST_LEVELS_UNTIL = (
    0.25  # share of the run over which the solved levels move from the first weights to the final ones
)

# Worked answers are frequent until they are accurate, then rare, until they are sampled rarely.
WORKED_OFTEN, WORKED_RARELY = 0.75, 0.17
WORKED_OFTEN_UNTIL = 0.8  # share of the run

# Share of the training tokens of each kind of document, and how many branches one has.
TOKEN_SHARES = {
    "solve code_o": 0.29,
    "solve code_i": 0.34,
    "solve code_f": 0.20,
    "propose": 0.09,
    "propose code_f": 0.08,
}
BRANCHES = {"solve code_o": 8, "solve code_i": 6, "solve code_f": 1, "propose": 2, "propose code_f": 1}


@dataclass(frozen=True)
class Dialogue:
    """One user turn and the assistant's answer, without special tokens."""

    user: str
    assistant: str


@dataclass(frozen=True)
class Example:
    """A program with inputs and outputs: what a task of any kind is made of."""

    program: Program
    inputs: tuple[tuple, ...]
    outputs: tuple


def is_text_held_out(program: Program) -> bool:
    """Whether the text is kept for evaluation: one program in sixteen, whatever the seed."""
    return zlib.crc32(program.text.encode()) % HELD_OUT == 0


def is_held_out(program: Program) -> bool:
    """Whether no training document may be about a program: for its text, or for a combination of its operations."""
    return is_text_held_out(program) or program.combination_held_out


def fence(name: str, content: str) -> str:
    return f"```{name}\n{content}\n```"


def arguments(values: tuple) -> str:
    return ", ".join(map(repr, values))


class DialogueWriter:
    """
    Writes dialogues of all kinds about random programs.

    Args:
        rng (`random.Random`): The only source of randomness.
        held_out (`bool`, *optional*, defaults to `False`): Whether to draw programs kept for evaluation instead of
            the ones for training: such with a held-out combination, on level 1 such with a held-out text.
        worked (`float`, *optional*, defaults to `0.0`): Share of the code_o and code_i answers that are worked.
        operations (`tuple[Operation, ...]`, *optional*): What the programs are made of; by default what the
            shipped weights were trained on.
    """

    def __init__(
        self,
        rng: random.Random,
        held_out: bool = False,
        worked: float = 0.0,
        operations: tuple[Operation, ...] = KNOWN_OPERATIONS,
    ):
        self.rng = rng
        self.held_out = held_out
        self.worked = worked
        self.programs = ProgramWriter(rng, operations)

    def example(self, level: int, inputs: int) -> Example:
        """A program of `level` with so many different inputs and their (small) outputs."""
        while True:
            program = self.programs.program(level)
            if not self._wanted(program, level):
                continue
            given = self.programs.inputs(program.parameters, inputs)
            returned = run(program.text, given)
            if returned and all(map(is_small, returned)):
                return Example(program, tuple(given), tuple(returned))

    def _wanted(self, program: Program, level: int) -> bool:
        if not self.held_out:
            return not is_held_out(program)
        return is_text_held_out(program) if level == 1 else program.combination_held_out

    def level(self, weights: tuple[float, ...]) -> int:
        (level,) = self.rng.choices(TRAINED_LEVELS, weights)
        return level

    def document(self, name: str, solved_levels: tuple[float, ...] = SOLVED_LEVEL_WEIGHTS) -> list[Dialogue]:
        """The dialogues of one document; `name` is a key of `BRANCHES`."""
        count = BRANCHES[name]
        if name == "propose":
            return self.proposals(self.rng.choice(("code_o", "code_i")), count)
        if name == "propose code_f":
            return [self.inputs_proposal(self.example(self.level(PROPOSED_LEVEL_WEIGHTS), INPUTS_PER_CODE_F))]
        level = self.level(solved_levels)
        if name == "solve code_f":
            return [self.induction(self.varied_example(level))]
        example = self.example(level, count)
        ask = self.deduction if name == "solve code_o" else self.abduction
        return [ask(example, index) for index in range(count)]

    def deduction(self, example: Example, index: int = 0) -> Dialogue:
        program, given = example.program, example.inputs[index]
        believed, returned = self._belief(program, given)
        shown = fence("python", program.text) + "\n" + fence("input", arguments(given))
        thinking = tiny_traces.forwards(program, believed, given) if self._works() else ""
        return Dialogue(f"solve code_o\n{shown}\n", thinking + fence("output", repr(returned)))

    def abduction(self, example: Example, index: int = 0) -> Dialogue:
        program, given = example.program, example.inputs[index]
        believed, returned = self._belief(program, given)
        shown = fence("python", program.text) + "\n" + fence("output", repr(returned))
        thinking = tiny_traces.backwards(program, believed, given) if self._works() else ""
        return Dialogue(f"solve code_i\n{shown}\n", thinking + fence("input", arguments(given)))

    def _belief(self, program: Program, given: tuple) -> tuple[Program, object]:
        """What the program is taken for this time, and what it returns then; the output must be a possible answer."""
        while True:
            believed = program.believed(self.rng)
            returned = run(believed.text, [given])
            if returned and is_small(returned[0]):
                return believed, returned[0]

    def _works(self) -> bool:
        return self.rng.random() < self.worked

    def varied_example(self, level: int) -> Example:
        """An example for code_f: enough inputs, outputs not all equal."""
        while True:
            example = self.example(level, INPUTS_PER_CODE_F)
            if any(output != example.outputs[0] for output in example.outputs):
                return example

    def induction(self, example: Example) -> Dialogue:
        pairs = list(zip(example.inputs, example.outputs, strict=True))
        self.rng.shuffle(pairs)
        shown = "\n".join(f"f({arguments(given)}) -> {returned!r}" for given, returned in pairs[: len(pairs) // 2])
        user = f"solve code_f\n{fence('message', example.program.message)}\n{fence('examples', shown)}\n"
        return Dialogue(user, fence("python", example.program.believed(self.rng).text))

    def inputs_proposal(self, example: Example) -> Dialogue:
        user = f"propose code_f {len(example.inputs)}\n{fence('python', example.program.text)}\n"
        lines = "\n".join(map(arguments, example.inputs))
        return Dialogue(user, fence("inputs", lines) + "\n" + fence("message", example.program.message))

    def proposals(self, kind: str, count: int, references: int | None = None) -> list[Dialogue]:
        """`count` proposals for one prompt; their levels follow the level of the references."""
        rng = self.rng
        wanted = rng.randint(0, MAX_REFERENCES) if references is None else references
        centre = self.level(PROPOSED_LEVEL_WEIGHTS)
        blocks = [f"propose {kind}"]
        for _ in range(wanted):
            example = self.example(self._near(centre), 1)
            blocks += [self._program_and_input(example), fence("output", repr(example.outputs[0]))]
        user = "".join(f"{block}\n" for block in blocks)
        levels = [self._near(centre) if wanted else self.level(PROPOSED_LEVEL_WEIGHTS) for _ in range(count)]
        return [Dialogue(user, self._program_and_input(self.example(level, 1))) for level in levels]

    def _near(self, centre: int) -> int:
        return centre if self.rng.random() < 0.75 else self.level(PROPOSED_LEVEL_WEIGHTS)

    def _program_and_input(self, example: Example) -> str:
        return fence("python", example.program.text) + "\n" + fence("input", arguments(example.inputs[0]))


@dataclass
class Batch:
    """
    Packed rows. Token `i` sees token `j <= i` when both are of one document and `j` is of the prefix or of the branch
    of `i`.

    Args:
        tokens (`np.ndarray`): int16 `[R, T]`.
        positions (`np.ndarray`): int16 `[R, T]`, position within the dialogue.
        documents (`np.ndarray`): int16 `[R, T]`, number of the document in its row; -1 on padding.
        branches (`np.ndarray`): int16 `[R, T]`, 0 on the prefix.
        answers (`np.ndarray`): bool `[R, T]`, whether the token is the assistant's, end of turn included.
    """

    tokens: np.ndarray
    positions: np.ndarray
    documents: np.ndarray
    branches: np.ndarray
    answers: np.ndarray

    @classmethod
    def empty(cls, rows: int, length: int, pad: int) -> Batch:
        def full(value: int) -> np.ndarray:
            return np.full((rows, length), value, dtype=np.int16)

        return cls(full(pad), full(0), full(-1), full(0), np.zeros((rows, length), dtype=bool))


@dataclass
class Document:
    """A tokenised document, in the columns of [`Batch`]."""

    tokens: list[int]
    positions: list[int]
    branches: list[int]
    answers: list[bool]


def tokenise(dialogues: list[Dialogue], tokenizer: Tokenizer, end_of_turn: int, length: int) -> Document | None:
    """
    Merges dialogues into one document: their common prefix once, then as many branches as fit into `length` tokens;
    `None` if not even one fits. Answers that are too long are left out.
    """
    users = [f"<|im_start|>user\n{item.user}<|im_end|>\n<|im_start|>assistant\n" for item in dialogues]
    prompts = [encoding.ids for encoding in tokenizer.encode_batch(users)]
    answers = [encoding.ids for encoding in tokenizer.encode_batch([item.assistant for item in dialogues])]
    shared = 0
    # The last token of a prompt stays in its branch, or nothing would be trained to predict the answer's first token.
    while all(len(ids) > shared + 1 and ids[shared] == prompts[0][shared] for ids in prompts):
        shared += 1
    document = Document(prompts[0][:shared], list(range(shared)), [0] * shared, [False] * shared)
    branch = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        own = prompt[shared:] + answer + [end_of_turn]
        if len(answer) > MAX_ANSWER_TOKENS or len(document.tokens) + len(own) > length:
            continue
        branch += 1
        document.tokens += own
        document.positions += range(shared, shared + len(own))
        document.branches += [branch] * len(own)
        document.answers += [False] * (len(prompt) - shared) + [True] * (len(answer) + 1)
    return document if branch else None


def pack(documents: list[Document], rows: int, length: int, pad: int) -> Batch:
    """First-fit decreasing into `rows` rows of `length` tokens; what does not fit is left out."""
    batch = Batch.empty(rows, length, pad)
    ends, counts = [0] * rows, [0] * rows
    for document in sorted(documents, key=lambda document: -len(document.tokens)):
        size = len(document.tokens)
        row = next((row for row in range(rows) if ends[row] + size <= length), None)
        if row is None:
            continue
        place = slice(ends[row], ends[row] + size)
        batch.tokens[row, place] = document.tokens
        batch.positions[row, place] = document.positions
        batch.documents[row, place] = counts[row]
        batch.branches[row, place] = document.branches
        batch.answers[row, place] = document.answers
        ends[row] += size
        counts[row] += 1
    return batch


@dataclass(frozen=True)
class Layout:
    """How many rows of which length a training step has; proposals with references need the long one."""

    short_rows: int = 8
    short_length: int = 384
    long_rows: int = 1
    long_length: int = 384


@dataclass(frozen=True)
class Source:
    """
    Where the batches of one process come from: each depends on the seed, the process and its step alone.

    Args:
        seed (`int`): Of the run.
        steps (`int`): Length of the run.
        rank, world (`int`): This process and their number.
        layout ([`Layout`]): Size of a batch.
    """

    seed: int
    steps: int
    rank: int = 0
    world: int = 1
    layout: Layout = Layout()

    def batches(self, start: int, tokenizer: Tokenizer, end_of_turn: int, pad: int) -> Iterator[tuple[Batch, ...]]:
        """The batches of the steps `start`, `start + 1`, ..."""
        layout, step = self.layout, start
        while True:
            done = step / self.steps
            worked = WORKED_OFTEN if done < WORKED_OFTEN_UNTIL else WORKED_RARELY
            rng = random.Random(f"{self.seed}:{step * self.world + self.rank}")
            writer = DialogueWriter(rng, worked=worked, operations=OPERATIONS)
            mix = min(1.0, done / FIRST_LEVELS_UNTIL)
            levels = tuple(a + mix * (b - a) for a, b in zip(FIRST_LEVEL_WEIGHTS, SOLVED_LEVEL_WEIGHTS, strict=True))
            budget = 1.07 * (layout.short_rows * layout.short_length + layout.long_rows * layout.long_length)
            short, long = [], []
            for name, share in TOKEN_SHARES.items():
                written = 0.0
                while written < share * budget:
                    is_long = name == "propose"
                    length = layout.long_length if is_long else layout.short_length
                    document = tokenise(writer.document(name, levels), tokenizer, end_of_turn, length)
                    if document is not None:
                        written += len(document.tokens)
                        (long if is_long else short).append(document)
            yield (
                pack(short, layout.short_rows, layout.short_length, pad),
                pack(long, layout.long_rows, layout.long_length, pad),
            )
            step += 1


def as_task(kind: str, example: Example, rng: random.Random) -> Task:
    """The task of `kind` about an example; code_f takes all its pairs in random order and shows the first half."""
    pairs = list(zip(example.inputs, example.outputs, strict=True))
    rng.shuffle(pairs)
    is_f = kind == "code_f"
    inputs, outputs = zip(*(pairs if is_f else pairs[:1]), strict=True)
    return Task(
        kind,
        example.program.text,
        tuple(map(values.encode, inputs)),
        tuple(map(values.encode, outputs)),
        example.program.message if is_f else "",
        len(pairs) // 2 if is_f else 0,
    )


def random_task(kind: str, level: int, writer: DialogueWriter) -> Task:
    return as_task(kind, writer.varied_example(level), writer.rng)
