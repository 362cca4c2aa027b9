"""A task kind of your own in one file: arithmetic targets, as in the Countdown game.

A teacher writes a few numbers and a target; a student must reach the target with +, - and *, using each number at most
once. Nothing runs in the sandbox: `check` and `trial` return `None`, and this file decides by itself. Play it with

    accelerate launch recipes/train_populora.py --config recipes/arithmetic.yaml

which names it as `task_kinds: ["arithmetic_kind:Arithmetic"]`. The package is not changed. The script finds the module
because both lie in `recipes/`; from anywhere else, `populora train` included, set `PYTHONPATH=recipes`. Before that,

    PYTHONPATH=recipes populora check-kind arithmetic_kind:Arithmetic --tasks recipes/arithmetic_seeds.jsonl

shows its prompts and gives its parsers what models might write.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from trl_populora.sandbox.values import decode, encode
from trl_populora.tasks.kind import Attempt, Proposal, Reject, Task, TaskKind


MAX_NUMBER = 99

# Five numbers at most: reachable targets are found by trying everything, and for five that takes some milliseconds.
PROPOSAL = re.compile(r"numbers: (\d{1,2}(?: \d{1,2}){1,4})\ntarget: (\d{1,4})\s*")
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Arithmetic(TaskKind):
    """
    Numbers and a target that they can reach.

    A task keeps the numbers as the one argument of its one input and the target as its one output.
    """

    name = "arithmetic"
    reference_kinds = ("arithmetic",)
    measures = ("numbers",)

    def proposal_prompt(self, references: Sequence[Task], style: str) -> list[dict[str, str]]:
        shown = "\n\n".join(_statement(task) for task in references)
        text = (
            "Write a new arithmetic puzzle: two to five numbers from 1 to 99, and a target that can be reached from "
            "them with +, - and *, each number used at most once. Make it hard but solvable. Answer with exactly two "
            f"lines, like these examples:\n\n{shown}"
        )
        return [{"role": "user", "content": text}]

    def parse_proposal(self, text: str, references: Sequence[Task]) -> Proposal | Reject:
        match = PROPOSAL.fullmatch(text.strip() + "\n")
        if match is None:
            return Reject.FORMAT
        numbers = [int(number) for number in match[1].split()]
        if not all(1 <= number <= MAX_NUMBER for number in numbers):
            return Reject.ARGUMENTS
        return Proposal(self.name, match[2], (encode((numbers,)),))

    def check(self, proposal: Proposal) -> None:
        return None

    def accept(self, proposal: Proposal, verdict: None, rng: random.Random) -> Task | Reject:
        (numbers,) = decode(proposal.inputs[0])
        target = int(proposal.program)
        if target in numbers:
            return Reject.ARGUMENTS  # nothing to do
        if target not in reachable(tuple(sorted(numbers))):
            return Reject.ERROR  # no solution
        return Task(self.name, proposal.program, proposal.inputs, (encode(target),))

    def solving_prompt(self, task: Task, style: str) -> list[dict[str, str]]:
        text = (
            f"{_statement(task)}\n\nReach the target with +, - and *, using each number at most once. Answer with the "
            "expression alone, for example (3 + 4) * 2."
        )
        return [{"role": "user", "content": text}]

    def parse_attempt(self, text: str, task: Task) -> Attempt:
        try:
            evaluate(text)
        except ValueError as error:
            return Attempt(False, "", Reject.FORMAT.value, str(error))
        return Attempt(True, text.strip())

    def trial(self, task: Task, attempt: Attempt) -> None:
        return None

    def correct(self, task: Task, attempt: Attempt, verdict: None) -> bool:
        value, used = evaluate(attempt.answer)
        (numbers,) = decode(task.inputs[0])
        left = list(numbers)
        for number in used:
            if number not in left:
                return False
            left.remove(number)
        return value == decode(task.outputs[0])

    def complexity(self, task: Task) -> dict[str, float]:
        (numbers,) = decode(task.inputs[0])
        return {"numbers": float(len(numbers))}


def _statement(task: Task) -> str:
    (numbers,) = decode(task.inputs[0])
    return f"numbers: {' '.join(map(str, numbers))}\ntarget: {decode(task.outputs[0])}"


@lru_cache(maxsize=4096)
def reachable(numbers: tuple[int, ...]) -> frozenset[int]:
    """Every value that some of the numbers make, each used at most once."""
    values = set(numbers)
    for left, right in _splits(numbers):
        for a in reachable(left):
            for b in reachable(right):
                values |= {a + b, a - b, b - a, a * b}
    return frozenset(values)


def _splits(numbers: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Ways to deal the numbers to two sides; none has to be used, because a side may leave its numbers out."""
    for mask in range(1, 1 << (len(numbers) - 1)):  # the last number always goes right: half the ways are mirrors
        left = tuple(n for i, n in enumerate(numbers) if mask >> i & 1)
        right = tuple(n for i, n in enumerate(numbers) if not mask >> i & 1)
        yield left, right


def evaluate(text: str) -> tuple[int, list[int]]:
    """
    Value of an expression of numbers, +, -, * and parentheses, and the numbers used. No `eval`.

    Raises:
        ValueError: If the text is anything else.
    """
    if len(text) > 100 or not re.fullmatch(r"[-+*()0-9\s]+", text):
        raise ValueError("too long, or more than numbers, +, -, * and parentheses")
    used: list[int] = []

    def value(node: ast.expr) -> int:
        match node:
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult()):
                return OPERATIONS[type(node.op)](value(node.left), value(node.right))
            case ast.Constant():
                used.append(node.value)
                return node.value
        raise ValueError("no expression of numbers with +, - and *")

    try:
        return value(ast.parse(" ".join(text.split()), mode="eval").body), used
    except SyntaxError as error:
        raise ValueError(error.msg) from error
