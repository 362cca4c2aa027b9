"""Reads answers: Python literals in the text of a model, without evaluating anything.

    text --_scan--> text of allowed tokens --_parse--> syntax tree --_convert--> plain data

The scan lets through strings, numbers, brackets, commas, colons, signs and a handful of names, under limits on length,
nesting, digits and signs. `ast.parse` gets only text that has passed. A closed list of node types turns the tree into
plain data. Attributes, comprehensions and f-strings are refused. The only calls are those of `set`, `frozenset`,
`complex` and `float`, and in [`read_arguments`] the call around the arguments. The only operators are signs, and the
`+` or `-` of a complex number.
"""

from __future__ import annotations

import ast
import re
from typing import Any


MAX_LENGTH = 65536  # characters of an answer
MAX_DEPTH = 64  # brackets inside each other
MAX_DIGITS = 4300  # characters of a decimal number, Python's own limit for integers
MAX_SIGNS = 4  # signs in a row

# A literal may hold only the names in `_NAMES`, and may call only the functions in `_CALLS`. It may call `float` only
# with a text from `_FLOAT_WORDS`, in upper or lower case.
_NAMES = {"None": None, "True": True, "False": False, "nan": float("nan"), "inf": float("inf")}
_CALLS = ("set", "frozenset", "complex", "float")
_FLOAT_WORDS = ("nan", "inf", "-inf", "+inf", "infinity", "-infinity")
# A string is matched whole, so that a bracket or a name inside it is no token. `f` is no prefix here, so an f-string
# scans as the name `f` and a string. The scan refuses the name, unless the function is called `f`. In that case
# `_convert` refuses the node that Python parses from the f-string.
_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\n\f]+)
  | (?P<string>(?P<prefix>[rR]?[bB]|[bB][rR]|[rRuU])?
        (?: \"\"\"(?:[^\\"]|\\.|\"{1,2}(?!\"))*\"\"\" | '''(?:[^\\']|\\.|'{1,2}(?!'))*'''
          | "(?!"")(?:[^\\\n"]|\\.)*" | '(?!'')(?:[^\\\n']|\\.)*' | "" | '' ))
  | (?P<number>0[xX][0-9a-fA-F_]+ | 0[oO][0-7_]+ | 0[bB][01_]+
        | (?:[0-9][0-9_]*(?:\.[0-9_]*)? | \.[0-9][0-9_]*)(?:[eE][+-]?[0-9_]+)?[jJ]?)
  | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
  | (?P<open>[\[({]) | (?P<close>[\])}]) | (?P<sign>[+-]) | (?P<mark>[,:])
    """,
    re.VERBOSE | re.DOTALL,
)
_PAIRS = {")": "(", "]": "[", "}": "{"}
_ESCAPE = re.compile(r"\\.", re.DOTALL)


class LiteralError(ValueError):
    """The text is no literal that may be read. The message says why."""


def read_literal(text: str) -> Any:
    """
    Reads plain data from a Python literal.

    Args:
        text: What a model wrote, for example `[1, 'a', {2.5: None}]`. Within the limits, every text that
            [`to_literal`][trl_populora.sandbox.values] writes is accepted, and so is `float('nan')`.

    Raises:
        `LiteralError`: If the text is anything else, or exceeds a limit.
    """
    return _convert(_parse(_scan(text, ())))


def read_arguments(text: str) -> tuple:
    """
    Reads the positional arguments of a call, from `3, [4]` or from exactly one call `f(3, [4])`.

    Models write the whole call where they are asked for the arguments. So `f(3)` means the argument `3`, never what
    `f` returns for it: nothing is evaluated here.

    Args:
        text: What a model wrote. Of other functions than `f`, only those in `_CALLS` may be called.

    Raises:
        `LiteralError`: If the text is anything else, or exceeds a limit.
    """
    source = _scan(text, ("f",))
    # Text without the call is put inside one. An unmatched closing bracket would end that call early, but the scan has
    # refused such text.
    if not re.match(r"f\s*\(", source):
        source = f"f({source}\n)"
    node = _parse(source)
    # The scan lets no `=` and no `**` through, so that a call has no keywords.
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "f":
        raise LiteralError("expected one argument list, or one call of f")
    return tuple(_convert(argument) for argument in node.args)


def _scan(text: str, functions: tuple[str, ...]) -> str:
    """Checks every token; returns the text, with the backslash of each unknown escape doubled (Python would warn)."""
    if not isinstance(text, str):
        raise LiteralError(f"expected a string, got {type(text).__name__}")
    if len(text) > MAX_LENGTH:
        raise LiteralError(f"longer than {MAX_LENGTH} characters")
    text = text.strip()
    brackets: list[str] = []
    parts, kinds, tokens, position = [], [], [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise LiteralError(f"{text[position]!r} has no place in a literal")
        kind, token, position = str(match.lastgroup), match.group(), match.end()
        parts.append(_check_token(kind, token, match, functions))
        if kind != "space":
            tokens.append((kind, token))
        kinds.append(kind)
        if kind == "open" or kind == "close":
            _nest(brackets, token)
    if brackets:
        raise LiteralError(f"{brackets[-1]!r} is never closed")
    _check_order(kinds)
    _check_neighbours(tokens)
    return "".join(parts)


def _nest(brackets: list[str], token: str) -> None:
    """Keeps the stack of open brackets, up to `MAX_DEPTH`."""
    if token not in _PAIRS:
        brackets.append(token)
        if len(brackets) > MAX_DEPTH:
            raise LiteralError(f"nested deeper than {MAX_DEPTH}")
    elif not brackets or brackets.pop() != _PAIRS[token]:
        raise LiteralError(f"{token!r} closes nothing")


def _check_order(kinds: list[str]) -> None:
    """Refuses more than `MAX_SIGNS` signs in a row, and a number that runs into a word (Python warns of `1if`)."""
    signs, previous = 0, "mark"
    for kind in kinds:
        signs = signs + 1 if kind == "sign" else signs if kind == "space" else 0
        if signs > MAX_SIGNS:
            raise LiteralError(f"more than {MAX_SIGNS} signs (+ or -) in a row")
        if previous == "number" and kind in ("name", "number", "string"):
            raise LiteralError("a number runs into the next word")
        previous = kind


def _check_neighbours(tokens: list[tuple[str, str]]) -> None:
    """
    Refuses a sign between two values, except in a complex number, and an opening bracket after a value, except in a
    call. Chains such as `1+1+1` or `()()()` have deep trees, which crash the parser of some versions of Python.
    """
    values = ("number", "name", "string", "close")
    for (before, _), (kind, token) in zip(tokens, tokens[1:], strict=False):
        if kind == "open" and before in values and (before, token) != ("name", "("):
            raise LiteralError(f"{token!r} after a value is not part of a literal")
    # A sign between two values is allowed only in a complex number: a real part, then an imaginary one with `j`.
    for (before, left), (kind, _), (after, right) in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if kind == "sign" and before in values:
            real = before in ("number", "name") and left[-1] not in "jJ"
            if not real or after != "number" or right[-1] not in "jJ":
                raise LiteralError("arithmetic is not part of a literal")


def _check_token(kind: str, token: str, match: re.Match, functions: tuple[str, ...]) -> str:
    """Checks one token; returns it. In a string, the backslash of each unknown escape is doubled."""
    if kind == "number":
        # Python needs quadratic time for decimal numbers, so their length is limited. The others need linear time.
        if token[:2].lower() not in ("0x", "0o", "0b") and len(token) > MAX_DIGITS:
            raise LiteralError(f"a number of more than {MAX_DIGITS} digits")
    elif kind == "name":
        if token not in _NAMES and token not in _CALLS and token not in functions:
            raise LiteralError(f"the name {token[:40]!r} is not a literal")
    elif kind == "string":
        if "\0" in token:
            raise LiteralError("a null character in a string")
        if "\\" in token and "r" not in (match.group("prefix") or "").lower():
            return _explicit_escapes(token, "b" in (match.group("prefix") or "").lower())
    return token


def _explicit_escapes(token: str, is_bytes: bool) -> str:
    """Doubles the backslash of each unknown escape. Python reads such an escape the same way, but with a warning."""
    allowed = "\\'\"abfnrtvx01234567\n\r" + ("" if is_bytes else "NuU")
    return _ESCAPE.sub(lambda pair: pair.group() if pair.group()[1] in allowed else "\\" + pair.group(), token)


def _parse(source: str) -> ast.expr:
    try:
        return ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise LiteralError(f"not a literal: {str(error)[:80]}") from None


def _convert(node: Any) -> Any:
    """Turns a syntax tree into plain data."""
    kind = type(node)
    if kind is ast.Constant and type(node.value) in (int, float, complex, str, bytes, bool, type(None)):
        return node.value
    if kind is ast.List:
        return [_convert(item) for item in node.elts]
    if kind is ast.Tuple:
        return tuple(_convert(item) for item in node.elts)
    if kind is ast.Set:
        return _hashed(set, [_convert(item) for item in node.elts])
    if kind is ast.Dict and None not in node.keys:  # the key `None` stands for `**`
        return _hashed(dict, list(zip(map(_convert, node.keys), map(_convert, node.values), strict=True)))
    if kind is ast.Name and node.id in _NAMES:
        value = _NAMES[node.id]
        # A new object each time, because a set holds nan twice only if the two are different objects.
        return float("nan") if value != value else value
    if kind is ast.UnaryOp and type(node.op) in (ast.UAdd, ast.USub):
        return _signed(node)
    if kind is ast.BinOp and type(node.op) in (ast.Add, ast.Sub):
        return _complex_sum(node)
    if kind is ast.Call and isinstance(node.func, ast.Name) and not node.keywords:
        return _named_form(node.func.id, node.args)
    raise LiteralError(f"{kind.__name__} is not part of a literal")


def _hashed(kind: type, items: Any) -> Any:
    """Makes a set or dict; refuses elements and keys that cannot be hashed."""
    try:
        return kind(items)
    except TypeError as error:
        raise LiteralError(str(error)) from None


def _signed(node: ast.UnaryOp) -> Any:
    value = _convert(node.operand)
    if type(value) not in (int, float, complex):
        raise LiteralError("a sign needs a number")
    return -value if isinstance(node.op, ast.USub) else +value


def _complex_sum(node: ast.BinOp) -> complex:
    left, right = _convert(node.left), _convert(node.right)
    if type(left) not in (int, float) or type(right) is not complex or not isinstance(node.right, ast.Constant):
        raise LiteralError("arithmetic is not part of a literal")
    try:
        return left + right if isinstance(node.op, ast.Add) else left - right
    except OverflowError:
        raise LiteralError("a number too large for a complex part") from None


def _named_form(name: str, nodes: list[ast.expr]) -> Any:
    """Converts `set()`, `frozenset()`, `frozenset({1})`, `complex(nan, 1.0)` and `float('nan')`."""
    values = [_convert(node) for node in nodes]
    if name == "set" and not values:
        return set()
    if name == "frozenset" and (not values or (len(values) == 1 and type(values[0]) in (set, list, tuple))):
        return _hashed(frozenset, values[0] if values else [])
    if name == "complex" and len(values) == 2 and all(type(value) is float for value in values):
        return complex(*values)
    if name == "float" and len(values) == 1 and type(values[0]) is str and values[0].lower() in _FLOAT_WORDS:
        return float(values[0])
    raise LiteralError(f"{name!r} is not called this way in a literal")
