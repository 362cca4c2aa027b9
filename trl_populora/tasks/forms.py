"""Normal forms: when two programs are the same for duplicates, and when one is new to a run (verify).

What costs nothing to write must not count as another program: names, layout, comments, and code that does nothing.
Equal forms mean equal programs: wherever both have a result, it is the same. Where the text does not prove that a
name or a statement cannot matter (`visible.py`, `dead_code.py`, `decided.py`), it counts; different forms may still
compute the same. Used to compare, never to change a program.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .dead_code import DeadCode
from .decided import simplify
from .programs import without_docstrings
from .visible import names_that_do_not_count, sees_its_text


_NAME_FIELDS = ("id", "arg", "name", "asname", "rest")
_ABSENT = "-"  # `None` in a list of nodes, as in `{**a}`; a constant None is written by its name


def normal_forms(tree: ast.Module) -> tuple[str, str]:
    """
    Two texts: one that is equal for programs that differ only in layout, comments, docstrings, the names they bind and
    dead code, and one that is equal also where constants differ, each in its type.

    Names that the program does not bind (builtins, modules), attributes, what stands in a class and keyword arguments
    count. Dead are `pass`, unused assignments, imports and functions, expressions and branches without effect, what
    follows a `return`, and what a constant keeps from being run. Of a program that looks at itself everything counts.
    """
    return _Normaliser(tree).texts()


def walk_living(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes of a program but those of dead code, as [`normal_forms`] takes it."""
    nodes = list(ast.walk(tree))
    if sees_its_text(nodes):
        yield from nodes
        return
    dead = DeadCode(tree, nodes)
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        yield node
        for _, field in ast.iter_fields(node):
            items = dead.alive(field) if isinstance(field, list) else [field]
            stack.extend(simplify(item) for item in items if isinstance(item, ast.AST))


class _Normaliser:
    """One walk that writes node types, constants and numbered names."""

    def __init__(self, tree: ast.Module):
        nodes = list(ast.walk(tree))
        self.tree = tree
        self.dead = None if sees_its_text(nodes) else DeadCode(tree, nodes)
        self.free = names_that_do_not_count(nodes) if self.dead else set()
        self.numbers: dict[str, int] = {}

    def texts(self) -> tuple[str, str]:
        exact: list[str] = []
        shape: list[str] = []
        # An explicit stack: the tree may be deeper than Python's recursion limit leaves room for.
        stack: list[object] = [self.tree]
        while stack:
            node = stack.pop()
            if isinstance(node, str):
                exact.append(node)
                shape.append(node)
            elif isinstance(node, ast.Constant):
                value = node.value
                # Decimal text of a huge integer is refused by Python itself; hexadecimal never is.
                exact.append(hex(value) if type(value) is int else repr(value))
                shape.append(type(value).__name__)
            elif isinstance(node, ast.AST):
                stack.append(")")
                for name, field in reversed(list(ast.iter_fields(node))):
                    stack.extend(reversed(self._field(node, name, field)))
                stack.append(f"{type(node).__name__}{self._place(node)} (")
        return " ".join(exact), " ".join(shape)

    def _field(self, node: ast.AST, name: str, value: object) -> list[object]:
        if name in ("ctx", "type_comment", "type_ignores", "kind"):
            return []
        if isinstance(value, list):
            return ["[", *self._items(node, name, value), "]"]
        if isinstance(value, ast.AST):
            return [simplify(value) if self.dead else value]
        # A keyword's and an imported name belong to somebody else.
        own = name in _NAME_FIELDS and not (isinstance(node, (ast.keyword, ast.alias)) and name != "asname")
        if own and isinstance(value, str):
            return [self._name(value)]
        return [repr(value)]

    def _items(self, node: ast.AST, name: str, items: list) -> Iterator[object]:
        kept = without_docstrings(items) if name == "body" and self.dead else items
        for item in self.dead.alive(kept) if self.dead else kept:
            if isinstance(item, ast.AST):
                yield simplify(item) if self.dead else item
            elif item is None:
                yield _ABSENT
            else:
                yield self._name(item) if isinstance(node, (ast.Global, ast.Nonlocal)) else repr(item)

    def _place(self, node: ast.AST) -> str:
        """Where a node stands, for a program that can find out."""
        return "" if self.dead else f"@{getattr(node, 'lineno', 0)}:{getattr(node, 'col_offset', 0)}"

    def _name(self, name: str) -> str:
        return f"${self.numbers.setdefault(name, len(self.numbers))}" if name in self.free else name
