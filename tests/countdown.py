"""A kind of task outside code."""

from __future__ import annotations

import ast
import re

from trl_populora.tasks import Attempt, Proposal, Reject, Task, TaskKind


class GivenCountdown(TaskKind):
    """Reach a target with the four operations on given numbers, each used once: `3 4 5 -> 17`. Nothing runs."""

    name = "countdown"
    measures = ("numbers",)

    def solving_prompt(self, task, style):
        return [{"role": "user", "content": f"solve countdown\n{task.program}\n"}]

    def parse_attempt(self, text, task):
        if len(text) > 80 or not re.fullmatch(r"[\d+\-*/() ]+", text):
            return Attempt(False, "", Reject.FORMAT.value)
        return Attempt(True, text)

    def trial(self, task, attempt):
        return None

    def correct(self, task, attempt, verdict):
        numbers, _, target = task.program.partition(" -> ")
        if sorted(re.findall(r"\d+", attempt.answer)) != sorted(numbers.split()):
            return False
        try:
            return _value(ast.parse(attempt.answer, mode="eval").body) == int(target)
        except (SyntaxError, ZeroDivisionError):
            return False

    def complexity(self, task):
        return {"numbers": float(len(task.program.split()) - 2)}


class Countdown(GivenCountdown):
    """The same, and teachers propose such tasks."""

    reference_kinds = ("countdown",)

    def proposal_prompt(self, references, style):
        return [{"role": "user", "content": "\n".join(["propose countdown", *(task.program for task in references)])}]

    def parse_proposal(self, text, references):
        if not re.fullmatch(r"\d{1,3}( \d{1,3}){1,5} -> \d{1,4}", text.strip()):
            return Reject.FORMAT
        return Proposal(self.name, text.strip(), ())

    def check(self, proposal):
        return None

    def accept(self, proposal, verdict, rng):
        assert verdict is None
        return Task(self.name, proposal.program, (), ())


OPERATIONS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def _value(node):
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise SyntaxError("not one of the four operations")
