"""Normal forms: when two programs are the same for duplicates, and when one is new to a run (phase 3).

What costs nothing to write must not count as another program: names, layout, comments, and code that does nothing.
Only what is plain from the text is taken for dead, so equal forms mean equal programs; different forms may still
compute the same. Used to compare, never to change a program. Linear in the size of the tree.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from .programs import FUNCTION, bound_names, without_docstrings


_NAME_FIELDS = ("id", "arg", "name", "asname", "rest")
_PASSES = 8  # what one dead assignment alone had read is dead in the next pass
_JUMPS = (ast.Return, ast.Raise, ast.Break, ast.Continue)
_IMPURE = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
_SILENT = frozenset(
    [
        "abs",
        "all",
        "any",
        "bool",
        "bytes",
        "chr",
        "complex",
        "dict",
        "divmod",
        "enumerate",
        "float",
        "frozenset",
        "int",
        "isinstance",
        "len",
        "list",
        "max",
        "min",
        "ord",
        "print",
        "range",
        "repr",
        "reversed",
        "round",
        "set",
        "sorted",
        "str",
        "sum",
        "tuple",
        "zip",
    ]
)
_REFLECTION = frozenset(["eval", "exec", "globals", "locals", "vars", "dir"])  # names may be read as text


def normal_forms(tree: ast.Module) -> tuple[str, str]:
    """
    Two texts: one that is equal for programs that differ only in layout, comments, docstrings, the names they bind and
    dead code, and one that is equal also where constants differ, each in its type.

    Names that the program does not bind (builtins, modules), attributes and keyword arguments count. Dead are `pass`,
    unused assignments, imports and functions, expressions and branches without effect, and what follows a `return`.
    """
    return _Normaliser(tree).texts()


def walk_living(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes of a program but those of dead code, as [`normal_forms`] takes it."""
    nodes = list(ast.walk(tree))
    bound = {name for node in nodes for name in bound_names(node)}
    return _alive(tree, _dead_statements(nodes, _SILENT - bound))


class _Normaliser:
    """One walk that writes node types, constants and numbered names."""

    def __init__(self, tree: ast.Module):
        nodes = list(ast.walk(tree))
        self.tree = tree
        self.bound = {name for node in nodes for name in bound_names(node)} - {FUNCTION}
        self.dead = _dead_statements(nodes, _SILENT - self.bound)
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
                stack.append(f"{type(node).__name__} (")
        return " ".join(exact), " ".join(shape)

    def _field(self, node: ast.AST, name: str, value: object) -> list[object]:
        if name in ("ctx", "type_comment", "type_ignores", "kind"):
            return []
        if isinstance(value, list):
            if name == "body":
                value = without_docstrings(value)
            kept = (item for item in value if id(item) not in self.dead)
            return ["[", *(self._name(item) if isinstance(item, str) else item for item in kept), "]"]
        if isinstance(value, ast.AST):
            return [value]
        if isinstance(value, str) and name in _NAME_FIELDS and not isinstance(node, ast.keyword):
            return [self._name(value)]
        return [repr(value)]

    def _name(self, name: str) -> str:
        if name not in self.bound:
            return name
        return f"${self.numbers.setdefault(name, len(self.numbers))}"


def _dead_statements(nodes: list[ast.AST], silent: frozenset[str]) -> set[int]:
    """Identities of the statements that change nothing; `nodes` are all of a tree, outer ones first."""
    blocks = [block for node in reversed(nodes) for block in _blocks(node)]
    read, dead = _names_read(nodes), set[int]()
    if not _REFLECTION.isdisjoint(read):
        return dead
    for _ in range(_PASSES):
        known = len(dead)
        for block in blocks:
            ended = False
            for statement in block:
                if ended or _is_dead(statement, read, silent, dead):
                    dead.add(id(statement))
                ended = ended or isinstance(statement, _JUMPS)
        if len(dead) == known:
            break
        read = _names_read(_alive(nodes[0], dead))
    return dead


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Lists of statements in a node; what stands in a class is reached by other ways than its name."""
    if not isinstance(node, ast.ClassDef):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _alive(tree: ast.AST, dead: set[int]) -> Iterator[ast.AST]:
    stack = [tree]
    while stack:
        node = stack.pop()
        if id(node) not in dead:
            yield node
            stack.extend(ast.iter_child_nodes(node))


def _names_read(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that these nodes ask for; `x += 1` does, because it may change a list that others hold."""
    read: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            read.add(node.id)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            read.add(node.target.id)
    return read


def _is_dead(statement: ast.stmt, read: set[str], silent: frozenset[str], dead: set[int]) -> bool:
    if isinstance(statement, ast.Pass):
        return True
    if isinstance(statement, ast.Expr):
        return _is_silent(statement.value, silent)
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return all(_is_unread(target, read) for target in targets) and _is_silent(statement.value, silent)
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return read.isdisjoint((each.asname or each.name.partition(".")[0]) for each in statement.names)
    if isinstance(statement, ast.FunctionDef):
        return statement.name != FUNCTION and statement.name not in read and not statement.decorator_list
    if isinstance(statement, ast.If):
        inner, asked = [*statement.body, *statement.orelse], statement.test
    elif isinstance(statement, ast.For) and _is_unread(statement.target, read):
        inner, asked = [*statement.body, *statement.orelse], statement.iter
    else:
        return False
    return all(id(each) in dead for each in inner) and _is_silent(asked, silent)


def _is_unread(target: ast.expr, read: set[str]) -> bool:
    return isinstance(target, ast.Name) and target.id not in read


def _is_silent(value: ast.expr | None, silent: frozenset[str]) -> bool:
    """Whether nothing else can change when an expression is evaluated, as far as its text tells."""
    if value is None or isinstance(value, (ast.Constant, ast.Name)):
        return True
    for node in ast.walk(value):
        if isinstance(node, _IMPURE):
            return False
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in silent):
            return False
    return True
