"""What constants decide in a program: conditions, and operands that are never evaluated (verify)."""

from __future__ import annotations

import ast
import operator


# What decides about its whole function, or binds names further out, also where it is never reached.
FAR = (ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr, ast.Global, ast.Nonlocal)
_COMPARISONS = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def truth(test: ast.expr) -> bool | None:
    """Whether a condition made of constants holds; `None` if it is not decided by them."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        holds = truth(test.operand)
        return None if holds is None else not holds
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _COMPARISONS:
        left, right = _number(test.left), _number(test.comparators[0])
        if left is not None and right is not None:
            return _COMPARISONS[type(test.ops[0])](left, right)
    return None


def _number(value: ast.expr) -> float | None:
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, (int, float)) else None


def simplify(value: ast.AST) -> ast.AST:
    """What is left of an expression without the operands that are never evaluated, and those that decide nothing."""
    while isinstance(value, (ast.IfExp, ast.BoolOp)):
        short = _decide(value)
        if short is value:
            return value
        value = short
    return value


def _decide(value: ast.IfExp | ast.BoolOp) -> ast.expr:
    if isinstance(value, ast.IfExp):
        holds = truth(value.test)
        kept, never = ([value.body], [value.orelse]) if holds else ([value.orelse], [value.body])
        changed = holds is not None
    else:
        ends = isinstance(value.op, ast.Or)  # the worth of an operand after which no other is evaluated
        worth = [truth(each) for each in value.values]
        last = worth.index(ends) if ends in worth else len(worth) - 1
        kept = [each for each, holds in zip(value.values[:last], worth, strict=False) if holds is None]
        kept, never = [*kept, value.values[last]], value.values[last + 1 :]
        changed = len(kept) < len(value.values)
    if not changed or any(isinstance(node, FAR) for each in never for node in ast.walk(each)):
        return value
    return ast.BoolOp(value.op, kept) if isinstance(value, ast.BoolOp) and len(kept) > 1 else kept[0]
