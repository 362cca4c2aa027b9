"""How demanding programs are, and how much of program space a run has seen (verify; the paper's curriculum figures).

Standard library `ast` only, one walk per program, linear in its size. Of the packages, radon is dormant, mccabe gives
one of the four measures and complexipy none of them.
"""

from __future__ import annotations

import ast
import hashlib
import math
from collections.abc import Mapping
from typing import Any

from .programs import BOUND_BY_DEFINITION, drop_docstrings, list_bound_names, parse_bounded


PROGRAM_MEASURES = ("ast_depth", "cyclomatic", "lines", "variables")  # what [`measure`] tells, in this order

_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert)
_BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)
_LEAVES = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)


def measure(program: str) -> dict[str, float]:
    """
    The four measures of the paper's curriculum figures, over the whole program.

    Returns:
        `dict[str, float]`: `ast_depth` (nodes on the longest path below the module; operators and contexts do not
        count), `cyclomatic` (1 + decisions: branches, loops, handlers, assertions, `and`/`or`, comprehension clauses,
        `case`s that can fail), `lines` (lines on which code stands; comments and docstrings do not count) and
        `variables` (distinct names bound, parameters included; functions, classes and modules are not variables).

    Raises:
        `ProgramError`: If the program does not parse.
    """
    deepest, decisions = 0, 0
    lines: set[int] = set()
    variables: set[str] = set()
    stack: list[tuple[ast.AST, int]] = [(parse_bounded(program), 0)]
    while stack:
        node, depth = stack.pop()
        deepest = max(deepest, depth)
        decisions += _count_decisions(node)
        if "lineno" in node._attributes:
            lines.add(node.lineno)  # type: ignore[attr-defined]
        if not isinstance(node, BOUND_BY_DEFINITION):
            variables.update(list_bound_names(node))
        stack.extend((child, depth + 1) for child in _list_children(node))
    return dict(zip(PROGRAM_MEASURES, map(float, (deepest, 1 + decisions, len(lines), len(variables))), strict=True))


def _count_decisions(node: ast.AST) -> int:
    """How many ways out one node adds."""
    if isinstance(node, _BRANCHES):
        return 1
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    if isinstance(node, ast.match_case):
        catches_all = isinstance(node.pattern, ast.MatchAs) and node.pattern.pattern is None and node.guard is None
        return 0 if catches_all else 1
    return 0


def _list_children(node: ast.AST) -> list[ast.AST]:
    """Child nodes that carry structure, without docstrings."""
    children: list[ast.AST] = []
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            items = drop_docstrings(value) if name == "body" else value
            children.extend(item for item in items if isinstance(item, ast.AST))
        elif isinstance(value, ast.AST) and not isinstance(value, _LEAVES):
            children.append(value)
    return children


def hash_shape(tree: ast.Module) -> str:
    """
    Structural signature of a program: 16 hex digits, equal for programs of the same shape.

    The shape is the nesting of the statements and, for each, the *set* of expression types, operators, functions and
    methods it uses. Names, constants, operand order and repetition within a statement do not count, so that coverage
    measures kinds of programs; exact trees would nearly all be distinct and say nothing.
    """
    bound = {name for node in ast.walk(tree) for name in list_bound_names(node)}
    parts: list[str] = []
    stack: list[ast.AST | str] = [tree]
    while stack:
        block = stack.pop()
        if isinstance(block, str):
            parts.append(block)
            continue
        features, inner = _describe(block, bound)
        parts.append(f"{type(block).__name__}{sorted(features)}(")
        stack.append(")")
        stack.extend(reversed(inner))
    return hashlib.blake2b("".join(parts).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _describe(block: ast.AST, bound: set[str]) -> tuple[set[str], list[ast.AST]]:
    """What one statement uses, and the statements inside it in order."""
    features: set[str] = set()
    inner: list[ast.AST] = []
    stack = _list_children(block)[::-1]
    while stack:
        node = stack.pop()
        if isinstance(node, _BLOCKS):
            inner.append(node)
            continue
        features.add(type(node).__name__)
        if isinstance(node, ast.Name) and node.id not in bound:
            features.add(node.id)
        elif isinstance(node, ast.Attribute):
            features.add("." + node.attr)
        elif isinstance(node, (ast.BinOp, ast.UnaryOp, ast.BoolOp)):
            features.add(type(node.op).__name__)
        elif isinstance(node, ast.Compare):
            features.update(type(op).__name__ for op in node.ops)
        stack.extend(reversed(_list_children(node)))
    if isinstance(block, ast.AugAssign):
        features.add(type(block.op).__name__)
    return features, inner


class Coverage:
    """
    The structural signatures seen so far, with their counts, and the normal forms; adding and reading are O(1).

    It remembers what an archive with a cap forgets: coverage never shrinks.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.forms: set[int] = set()  # hashes of programs' normal forms, constants apart
        self.seen = 0
        self._sum = 0.0  # of count * log2(count): the entropy without a pass over all signatures

    def add(self, shape: str) -> None:
        """Counts one program by its `signature`."""
        count = self.counts.get(shape, 0)
        self.counts[shape] = count + 1
        self.seen += 1
        self._sum += _weigh(count + 1) - _weigh(count)

    def metrics(self) -> dict[str, float]:
        """`curriculum/coverage`: distinct signatures; `curriculum/entropy`: entropy of their distribution, in bits."""
        entropy = max(0.0, math.log2(self.seen) - self._sum / self.seen) if self.seen else 0.0
        return {"curriculum/coverage": float(len(self.counts)), "curriculum/entropy": entropy}

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "sum": self._sum, "forms": sorted(self.forms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts, self.forms = dict(state["counts"]), set(state["forms"])
        self.seen = sum(self.counts.values())
        # Restored rather than recomputed: the order of additions decides its last bits.
        self._sum = state["sum"]


def _weigh(count: int) -> float:
    return count * math.log2(count) if count else 0.0
