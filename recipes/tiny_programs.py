"""
The programs the embedded tiny base is trained on: a narrow graded grammar whose programs are executed for truth.

A program is a chain of operations on integers, lists of digits and short strings, one line each; its level is the
number of operations (1 to 4 for training; levels 5 and 6 have six and eight and are kept out of supervised training).
The base is to know some operations and to *half-know* the others: each of these has one natural mistake, and the
training's answers compute it rightly only so often; what a program returns is always the truth.
Everything here is trusted text made by [`ProgramWriter`], so it is run with a plain `exec`: this is the one place
where no sandbox is needed. Used by `make_tiny_base.py` and by the studies on that base.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, replace
from itertools import pairwise


TRAINED_LEVELS = (1, 2, 3, 4)
OPERATIONS_AT_LEVEL = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
# How often an answer computes a half-known operation rightly; below one half, so that greedy answers are mistaken.
CERTAINTIES = (0.15, 0.25, 0.35, 0.45)
HALF_KNOWN_WEIGHT = 0.6
HELD_OUT = 16  # one program in so many, and one pair of successive operations in so many, is kept for evaluation

# Letters that no keyword or name of the grammar has next to each other: the tokenizer then never merges them, and a
# string is spelt one letter per token.
LETTERS = "hkqxz"
SIGNATURES = (("a",), ("a", "b"), ("xs",), ("xs", "a"), ("s",), ("s", "a"))
SIGNATURE_WEIGHTS = (2, 3, 3, 3, 3, 1)
TYPE_OF = {"a": "int", "b": "int", "xs": "list", "s": "str"}
FRESH_NAMES = {"int": ("c", "d", "e", "g", "m", "n"), "list": ("ys", "zs", "ws"), "str": ("t", "u", "v")}


@dataclass(frozen=True)
class Operation:
    """
    One operation of the grammar.

    Args:
        source (`str`): Type of the main operand: `"int"`, `"list"` or `"str"`.
        target (`str`): Type of the result.
        text (`str`): Expression over `{v}` (main operand), `{w}` (another integer variable), `{k}`, `{j}` (digits),
            `{p}`, `{q}` (different letters).
        hint (`str`): What a message says about it; it names the operation and leaves its constants to the examples.
        weight (`float`): How often it is drawn.
        condition (`str`): Where it is not empty, `{v}` becomes `text` only if this holds.
        nonempty (`str`): `"needs"`: the operand must not be empty; `"keeps"`: a non-empty operand gives a non-empty
            result; `"loses"`: it may not.
        mistake (`str`): What the base often takes `text` for; empty where it is certain.
        is_hard (`bool`): Whether a model of this size can hardly compute it, however often it is told: a lure.
    """

    source: str
    target: str
    text: str
    hint: str
    weight: float = 1.0
    condition: str = ""
    nonempty: str = "keeps"
    mistake: str = ""
    is_hard: bool = False

    @property
    def certainty(self) -> float:
        """Share of the training's answers that compute it rightly, by a hash of its text."""
        return CERTAINTIES[zlib.crc32(self.text.encode()) % len(CERTAINTIES)] if self.mistake else 1.0


KNOWN_OPERATIONS = (
    Operation("int", "int", "{v} + {k}", "add a number", 1.5),
    Operation("int", "int", "{v} - {k}", "subtract a number", 1.5),
    Operation("int", "int", "{v} * 2", "double it"),
    Operation("int", "int", "max({v}, {k})", "keep it above a limit", 0.8),
    Operation("int", "int", "min({v}, {k})", "keep it below a limit", 0.8),
    Operation("int", "int", "{v} + {w}", "add the other number", 1.5),
    Operation("int", "int", "{v} - {w}", "subtract the other number", 1.5),
    Operation("int", "int", "max({v}, {w})", "take the larger"),
    Operation("int", "int", "min({v}, {w})", "take the smaller"),
    Operation("int", "int", "{v} - {j}", "lower it if it is large", condition="{v} > {k}"),
    Operation("int", "int", "{v} + {j}", "raise it if it is small", condition="{v} < {k}"),
    Operation("list", "list", "{v}[::-1]", "reverse it"),
    Operation("list", "list", "sorted({v})", "sort it"),
    Operation("list", "list", "{v}[1:]", "drop the first", nonempty="loses"),
    Operation("list", "list", "{v} + [{k}]", "append a number"),
    Operation("list", "list", "{v} + [{w}]", "append the other number", 1.5),
    Operation("list", "list", "[x + {k} for x in {v}]", "add a number to each"),
    Operation("list", "list", "[x + {w} for x in {v}]", "add the other number to each", 1.5),
    Operation("list", "list", "[x for x in {v} if x > {k}]", "keep the large ones", nonempty="loses"),
    Operation("list", "int", "len({v})", "take the length", 0.4),
    Operation("list", "int", "sum({v})", "take the sum", 0.6),
    Operation("list", "int", "{v}[0]", "take the first", 0.6, nonempty="needs"),
    Operation("list", "int", "max({v})", "take the largest", 0.6, nonempty="needs"),
    Operation("str", "str", "{v}[::-1]", "reverse it"),
    Operation("str", "str", "{v} + '{p}'", "append a letter", 1.5),
    Operation("str", "str", "'{p}' + {v}", "put a letter in front"),
    Operation("str", "str", "{v}.upper()", "make it upper case", 0.7),
    Operation("str", "str", "{v} * 2", "repeat it"),
    Operation("str", "str", "{v}[1:]", "drop the first", nonempty="loses"),
    Operation("str", "str", "{v}.replace('{p}', '{q}')", "replace a letter", 1.2),
    Operation("str", "int", "len({v})", "take the length", 0.6),
    Operation("str", "int", "{v}.count('{p}')", "count a letter", 0.6),
)


def half_known(source: str, target: str, text: str, mistake: str, hint: str, **properties) -> Operation:
    """An operation that the base takes for `mistake` more often than not."""
    return Operation(source, target, text, hint, HALF_KNOWN_WEIGHT, mistake=mistake, **properties)


HALF_KNOWN_OPERATIONS = (
    half_known("int", "int", "{k} - {v}", "{v} - {k}", "subtract it from a number"),
    half_known("int", "int", "{w} - {v}", "{v} - {w}", "subtract it from the other number"),
    half_known("int", "int", "abs({v} - {k})", "{v} - {k}", "take the space to a number"),
    half_known("int", "int", "~{v}", "-{v}", "turn its bits"),
    half_known("int", "int", "{v} - {k} + {j}", "{v} - ({k} + {j})", "subtract a number and add a number"),
    half_known("int", "int", "{v} * {v}", "{v} * 2", "square it"),
    half_known("int", "int", "sum(range({v}))", "sum(range({v} + 1))", "sum the numbers below it"),
    half_known("int", "int", "{v} ^ {k}", "{v} + {k}", "take the bits of one", is_hard=True),
    half_known("int", "int", "{v} & {k}", "min({v}, {k})", "take the bits of both", is_hard=True),
    half_known("int", "int", "{v} % {k}", "{v} // {k}", "take the rest", is_hard=True),
    half_known("int", "int", "{v} // 2", "({v} + 1) // 2", "halve it", is_hard=True),
    half_known("list", "list", "{v}[:-1]", "{v}[1:]", "drop the last", nonempty="loses"),
    half_known("list", "list", "{v}[::2]", "{v}[1::2]", "keep every other", nonempty="loses"),
    half_known("list", "list", "{v}[:2]", "{v}[:3]", "keep two"),
    half_known("list", "list", "{v}[-2:]", "{v}[:-2]", "keep the last two", nonempty="loses"),
    half_known("list", "list", "{v}[1:] + {v}[:1]", "{v}[-1:] + {v}[:-1]", "put the first last"),
    half_known("list", "list", "{v}[::-1][1:]", "{v}[1:][::-1]", "reverse it and drop the first", nonempty="loses"),
    half_known("list", "list", "{v} * 2", "[x * 2 for x in {v}]", "repeat it"),
    half_known("list", "list", "sorted({v}, reverse=True)", "{v}[::-1]", "sort it in reverse"),
    half_known("list", "list", "[{k}] + {v}", "{v} + [{k}]", "put a number in front"),
    half_known("list", "list", "[{k} - x for x in {v}]", "[x - {k} for x in {v}]", "subtract each from a number"),
    half_known("list", "int", "{v}[-1]", "{v}[0]", "take the last", nonempty="needs"),
    half_known("list", "int", "{v}.index(max({v}))", "max({v})", "find the largest", nonempty="needs"),
    half_known("str", "str", "{v}[:-1]", "{v}[1:]", "drop the last", nonempty="loses"),
    half_known("str", "str", "{v}[::2]", "{v}[1::2]", "keep every other", nonempty="loses"),
    half_known("str", "str", "{v}[2:]", "{v}[1:]", "drop two", nonempty="loses"),
    half_known("str", "str", "{v}[1:] + {v}[:1]", "{v}[-1:] + {v}[:-1]", "put the first last"),
    half_known("str", "str", "{v} + {v}[::-1]", "{v} * 2", "append its reverse"),
    half_known("str", "str", "{v}.swapcase()", "{v}", "turn the case"),
    half_known(
        "str", "str", "{v}.strip('{p}')", "{v}.replace('{p}', '')", "drop a letter at the ends", nonempty="loses"
    ),
    half_known("str", "str", "'{p}'.join({v})", "'{p}' + {v}", "put a letter in between"),
    half_known("str", "int", "{v}.find('{p}')", "{v}.find('{p}') + 1", "find a letter"),
)
OPERATIONS = KNOWN_OPERATIONS + HALF_KNOWN_OPERATIONS


@dataclass(frozen=True)
class Step:
    """
    One operation with its names and constants, a line of a program.

    Args:
        operation ([`Operation`]): What is done.
        operand, other (`str`): The variables of `{v}` and `{w}`.
        target (`str`): The variable that takes the result; empty where it is returned.
        digits (`tuple[int, int]`), letters (`tuple[str, str]`): The constants.
    """

    operation: Operation
    operand: str
    other: str
    target: str
    digits: tuple[int, int]
    letters: tuple[str, str]

    def write(self, text: str, operand: str = "", other: str = "") -> str:
        """`text` with this step's constants; the variables' names, or what is given instead of them."""
        (k, j), (p, q) = self.digits, self.letters
        return text.format(v=operand or self.operand, w=other or self.other, k=k, j=j, p=p, q=q)

    @property
    def source(self) -> str:
        """The line, or lines, of the program."""
        text = self.write(self.operation.text)
        if self.operation.condition:
            changed = f"    if {self.write(self.operation.condition)}:\n        {self.operand} = {text}"
            return changed if self.target else f"{changed}\n    return {self.operand}"
        return f"    {self.target} = {text}" if self.target else f"    return {text}"

    @property
    def mistaken(self) -> Step:
        """What a half-known step is taken for."""
        return replace(self, operation=replace(self.operation, text=self.operation.mistake))

    def believed(self, rng: random.Random) -> Step:
        """The step as it is taken this time: as it is written, or its mistake."""
        return self if rng.random() < self.operation.certainty else self.mistaken

    def varied(self, rng: random.Random) -> Step:
        """The same operation with other constants."""
        return replace(self, digits=(rng.randint(1, 9), rng.randint(1, 9)), letters=tuple(rng.sample(LETTERS, 2)))


@dataclass(frozen=True)
class Program:
    """A generated program: parameter names and steps; `text` is its Python, `message` hints at its operations."""

    parameters: tuple[str, ...]
    steps: tuple[Step, ...]

    @property
    def text(self) -> str:
        return "\n".join([f"def f({', '.join(self.parameters)}):", *(step.source for step in self.steps)])

    @property
    def message(self) -> str:
        return ", then ".join(step.operation.hint for step in self.steps)

    def believed(self, rng: random.Random) -> Program:
        """The program that an answer takes this one for: each half-known operation rightly or by its mistake."""
        return replace(self, steps=tuple(step.believed(rng) for step in self.steps))

    @property
    def combination_held_out(self) -> bool:
        """Whether two successive operations are a pair that no program of the training text has."""
        return any(is_pair_held_out(a.operation, b.operation) for a, b in pairwise(self.steps))


def is_pair_held_out(first: Operation, second: Operation) -> bool:
    """Whether no training program does `second` right after `first`: one pair in sixteen, whatever the seed."""
    names = (f"{operation.condition} {operation.text}" for operation in (first, second))
    return zlib.crc32(" / ".join(names).encode()) % HELD_OUT == 0


def run(program: str, inputs: list[tuple]) -> list | None:
    """Outputs of a *trusted* program on argument tuples, or `None` if one call raises."""
    namespace: dict = {}
    exec(program, namespace)  # noqa: S102 - the program was written by `ProgramWriter` a moment ago.
    try:
        return [namespace["f"](*arguments) for arguments in inputs]
    except (IndexError, ValueError):
        return None


def is_small(value: object) -> bool:
    """Whether an output is short enough to be an answer of the tiny base."""
    if isinstance(value, int):
        return -20 <= value <= 99
    if isinstance(value, str):
        return len(value) <= 10
    return len(value) <= 7 and all(is_small(item) for item in value)


class ProgramWriter:
    """
    Writes random programs of the grammar and inputs for them.

    Args:
        rng (`random.Random`): The only source of randomness, so a seed fixes every program.
        operations (`tuple[Operation, ...]`, *optional*): What the programs are made of; by default everything.
    """

    def __init__(self, rng: random.Random, operations: tuple[Operation, ...] = OPERATIONS):
        self.rng = rng
        self.operations = operations

    def argument(self, name: str) -> int | list[int] | str:
        """One random argument for the parameter `name`."""
        rng = self.rng
        if TYPE_OF[name] == "int":
            return rng.randrange(10)
        if TYPE_OF[name] == "list":
            return [rng.randrange(10) for _ in range(rng.randint(1, 4))]
        return "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 4)))

    def inputs(self, parameters: tuple[str, ...], count: int) -> list[tuple]:
        """`count` different argument tuples in ascending order (ten integers exist, so ask for fewer)."""
        found: dict[str, tuple] = {}
        while len(found) < count:
            arguments = tuple(self.argument(name) for name in parameters)
            found[repr(arguments)] = arguments
        return sorted(found.values())

    def program(self, level: int) -> Program:
        """A program of exactly `level` that uses all its parameters and is not constant on random inputs."""
        while True:
            (parameters,) = self.rng.choices(SIGNATURES, SIGNATURE_WEIGHTS)
            steps = self._steps(parameters, OPERATIONS_AT_LEVEL[level])
            read = {parameters[0]} | {step.other for step in steps}
            if not read.issuperset(parameters):
                continue
            program = Program(parameters, tuple(steps))
            outputs = run(program.text, self.inputs(parameters, 6))
            if outputs and all(map(is_small, outputs)) and len({repr(output) for output in outputs}) >= 3:
                return program

    def _steps(self, parameters: tuple[str, ...], operations: int) -> list[Step]:
        rng = self.rng
        types = {name: TYPE_OF[name] for name in parameters}
        current, nonempty = parameters[0], True
        steps: list[Step] = []
        for index in range(operations):
            last = index == operations - 1
            others = [name for name, type_ in types.items() if type_ == "int" and name != current]
            previous = steps[-1].operation if steps else None
            operation = self._draw(types[current], bool(others), nonempty, previous, last)
            other = rng.choice(others) if "{w}" in operation.text else ""
            target = "" if last else current if operation.condition else self._target(current, operation, types)
            step = Step(operation, current, other, target, (0, 0), ("", "")).varied(rng)
            steps.append(step)
            nonempty = nonempty and operation.nonempty == "keeps"
            if not last:
                current, types[target] = target, operation.target
        return steps

    def _draw(self, source: str, others: bool, nonempty: bool, previous: Operation | None, last: bool) -> Operation:
        """An operation that fits the current value; reductions to an integer are kept for the end mostly."""
        fitting = [
            operation
            for operation in self.operations
            if operation.source == source
            and operation is not previous
            and (others or "{w}" not in operation.text)
            and (nonempty or operation.nonempty != "needs")
        ]
        weights = [operation.weight * (1.0 if last or operation.target == source else 0.5) for operation in fitting]
        return self.rng.choices(fitting, weights)[0]

    def _target(self, current: str, operation: Operation, types: dict[str, str]) -> str:
        """The name that takes the result: the operand itself or a fresh one."""
        fresh = [name for name in FRESH_NAMES[operation.target] if name not in types]
        if not fresh or (operation.target == operation.source and self.rng.random() < 0.5):
            return current
        return fresh[0]
