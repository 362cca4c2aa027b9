"""Complexity: how demanding a program is, and how many shapes of programs a run has seen.

These are the figures of the paper's curriculum (arXiv 2605.16727). Programs are read with the standard library's
`ast`. Other packages were not taken: radon is dormant, mccabe computes one of the four measures, and complexipy none.
"""

from __future__ import annotations

import ast
import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from .programs import BOUND_BY_DEFINITION, drop_docstrings, list_bound_names, parse_bounded


PROGRAM_MEASURES = ("ast_depth", "cyclomatic", "lines", "variables")  # what [`measure`] returns, in this order

_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert)
_BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)
_LEAVES = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)


def measure(program: str) -> dict[str, float]:
    """
    Measures a whole program in four ways.

    Returns:
        Numbers by name:

        - `ast_depth`: nodes on the longest path of the tree below the module, without operators, contexts and
          docstrings.
        - `cyclomatic`: 1 + decisions. Decisions are branches, loops, handlers, assertions, `and` and `or`, clauses of
          comprehensions, and `case`s that can fail.
        - `lines`: lines on which a node of the tree begins. Comments, a bare `else:`, docstrings and other constants
          that stand alone in a body do not count.
        - `variables`: different names that are bound, parameters included. Names of functions, classes and imports do
          not count.

    Raises:
        `ProgramError`: If the program does not parse, or is too long or too deep to be parsed.
    """
    deepest, decisions = 0, 0
    lines: set[int] = set()
    variables: set[str] = set()
    # An explicit stack: the tree may be deeper than Python's recursion limit allows.
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
    """Counts the decisions that one node adds."""
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
    """Lists a node's children, without docstrings, contexts, and operators other than comparisons."""
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
    Hashes the shape of a program: 16 hex digits, equal for programs of one shape.

    The shape is how statements are nested, and for each statement the *set* of expression types, operators, attributes
    and unbound names (such as builtins) in it. Names that the program binds, constants, the order of operands and
    repetition within a statement do not change the shape. A hash of the whole tree would say nothing: nearly every
    program has a tree of its own.
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
    """Returns what one statement itself uses, and the statements inside it in order."""
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
    # The operator of `a += b` belongs to the statement itself, and `_list_children` leaves it out.
    if isinstance(block, ast.AugAssign):
        features.add(type(block.op).__name__)
    return features, inner


class Coverage:
    """
    Counts the shapes of programs, and keeps their normal forms, over all tasks that an archive ever took in.

    Unlike the archive, which has a cap, it forgets nothing. Adding a program takes the same time however many there
    are; `metrics` looks at every shape, and takes some 10 ms for 100,000 of them.

    Attributes:
        counts: Programs per shape, by [`hash_shape`].
        forms: Hashes of the programs' normal forms without constants.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.forms: set[int] = set()

    def add(self, shape: str) -> None:
        """Counts one program by its shape, see [`hash_shape`]."""
        self.counts[shape] += 1

    def metrics(self) -> dict[str, float]:
        """Returns `curriculum/coverage`, the number of shapes, and `curriculum/entropy` of the shapes, in bits."""
        total = self.counts.total()
        # `fsum` does not depend on the order of the shapes, so a resumed run has the same last bits.
        entropy = -math.fsum(count / total * math.log2(count / total) for count in self.counts.values())
        return {"curriculum/coverage": float(len(self.counts)), "curriculum/entropy": max(0.0, entropy)}

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "forms": sorted(self.forms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts, self.forms = Counter(state["counts"]), set(state["forms"])
