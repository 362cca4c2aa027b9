"""What a program can see of its own text: all of it, some of its names, or none (verify).

Only what it cannot see may be taken for a matter of writing. Everything here errs to the side of seeing.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Sequence

from .programs import FUNCTION, bound_names


# What reads names or lines as data, or reaches attributes by texts that are made while the program runs.
_READERS = frozenset(
    [
        *("attrgetter", "compile", "dir", "eval", "exec", "getattr", "globals", "locals", "methodcaller"),
        *("traceback", "vars", "warnings", "weakref"),
    ]
)
_FORMATTERS = ("format", "format_map", "vformat")  # `"{0.__code__}"` is a text like any other until it is used
_INSIDES = ("ag_", "co_", "cr_", "f_", "gi_", "tb_")  # attributes of code, frames, tracebacks and generators
_NAMES = ("__name__", "__qualname__")
_HARMLESS = frozenset(["__class__", "__init__", "__main__", *_NAMES])
# Errors whose text names nothing of the program.
_NAMELESS = frozenset(
    [
        *("ArithmeticError", "AssertionError", "EOFError", "IndexError", "KeyError", "LookupError", "OverflowError"),
        *("RecursionError", "StopIteration", "UnicodeError", "ValueError", "ZeroDivisionError"),
    ]
)
# What stands in the text of an object that a function makes: `<function g.<locals>.<lambda> at ...>`.
_QUALIFIED = (ast.AsyncFunctionDef, ast.Await, ast.FunctionDef, ast.GeneratorExp, ast.Lambda, ast.Yield, ast.YieldFrom)
_BUILTINS = frozenset(dir(builtins)) - {"_"}  # which interactive Python makes one
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def names_bound(node: ast.AST) -> tuple[str, ...]:
    """Names that one node gives a value to, those of imported modules included."""
    if isinstance(node, ast.alias) and not node.asname:
        return (node.name.partition(".")[0],)
    return bound_names(node)


def sees_its_text(nodes: Iterable[ast.AST]) -> bool:
    """Whether a program may look at itself down to its lines, documentation and code objects."""
    return any(map(_looks, nodes))


def _looks(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _READERS or (_is_special(node.id) and not (node.id == "__name__" and _is_read(node)))
    if isinstance(node, ast.Attribute):
        if node.attr in _FORMATTERS:
            return not isinstance(node.value, ast.Constant)
        return _reaches(node.attr)
    if isinstance(node, (ast.alias, ast.ImportFrom)):
        origin = node.name if isinstance(node, ast.alias) else node.module or ""
        return not _READERS.isdisjoint(origin.split("."))
    if isinstance(node, ast.MatchClass):
        return any(map(_reaches, node.kwd_attrs))
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and "__" in node.value != "__main__"


def _reaches(attribute: str) -> bool:
    special = _is_special(attribute) and attribute not in _HARMLESS
    return special or attribute in _READERS or attribute.startswith(_INSIDES)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_read(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def names_that_do_not_count(nodes: Sequence[ast.AST]) -> set[str]:
    """
    Names that a program binds and might have called otherwise: nothing in it can tell the difference.

    Names count where something else says them: keywords, attributes (all that a class binds), imports, builtins, and
    the texts of classes, functions and errors.
    """
    read = {node.id for node in nodes if isinstance(node, ast.Name) and _is_read(node)}
    if any(_names_are_seen(node, read) for node in nodes):
        return set()
    bound = {name for node in nodes for name in names_bound(node)}
    return (
        bound - {FUNCTION} - {name for name in bound if name.startswith("__")} - _BUILTINS - _collect_mentioned(nodes)
    )


def _names_are_seen(node: ast.AST, read: set[str]) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in _NAMES or node.attr == "exc_info"
    if isinstance(node, ast.alias):
        return node.name in ("*", "contextlib", "exc_info")
    if isinstance(node, ast.ImportFrom):
        return node.module == "contextlib"
    if isinstance(node, _DEFINITIONS):
        return node.name in ("__exit__", "__aexit__") or bool(getattr(node, "type_params", None))
    if isinstance(node, ast.ExceptHandler):
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        nameless = all(isinstance(kind, ast.Name) and kind.id in _NAMELESS for kind in kinds)
        return node.name in read and not nameless
    return type(node).__name__ == "TypeAlias"


def _collect_mentioned(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that are said elsewhere than where names are looked up."""
    said, spread = set(), False
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    passed = {n.id for n in nodes if isinstance(n, ast.Name) and _is_read(n) and id(n) not in called}
    for node in nodes:
        if isinstance(node, ast.keyword):
            spread = spread or node.arg is None
            said.update([node.arg] if node.arg else [])
        elif isinstance(node, ast.ClassDef):
            said.update(name for inner in ast.walk(node) for name in names_bound(inner))
        elif isinstance(node, ast.alias):
            said.update(() if node.asname else names_bound(node))
        elif isinstance(node, _DEFINITIONS) and (node.name in passed or node.decorator_list or _makes_objects(node)):
            said.add(node.name)
    if spread:  # `g(**a)`: the parameters are texts in `a`
        said.update(node.arg for node in nodes if isinstance(node, ast.arg))
    return said


def _makes_objects(function: ast.AST) -> bool:
    """Whether the text of something that a function makes says the function's name."""
    return any(isinstance(inner, _QUALIFIED) for inner in _walk_below(function))


def _walk_below(node: ast.AST) -> Iterator[ast.AST]:
    inner = ast.walk(node)
    next(inner)
    return inner
