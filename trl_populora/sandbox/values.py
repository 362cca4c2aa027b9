"""Plain data as canonical text: what programs take in, what they give back, and when two answers are equal.

Plain data is `None`, `bool`, `int`, `float`, `complex`, `str`, `bytes`, `list`, `tuple`, `set`, `frozenset` and
`dict`, of exactly these types. The text is tagged JSON. An output has exactly one text, so a golden answer can be
stored, hashed and compared as a string. (0.0 and -0.0 have different texts; [`equal`] takes them for the same.)
Reading a text back never evaluates anything.

| value | text |
|---|---|
| None, True, 3, 1.5, "a" | `null`, `true`, `3`, `1.5`, `"a"` |
| int of 64 bits or more | `["x","-1f..."]` (hexadecimal: linear time in both directions) |
| nan, inf, -inf | `["f","nan"]` |
| str with lone surrogates | `["u","<utf-8 with surrogates, hexadecimal>"]` |
| bytes, complex | `["b","<hexadecimal>"]`, `["c",re,im]` |
| list, tuple, set, frozenset | `["l",...]`, `["t",...]`, `["s",...]`, `["z",...]` |
| dict | `["d",key,value,...]` |

The elements of a set are sorted by their texts, and so are the pairs of a dict in an *output*. In an *input* the
pairs keep their order, because the program can see it (`encode(arguments, ordered=True)`). Both forms can be read
back. The trainer and the zygotes both load this file, so it imports only the standard library.
"""

from __future__ import annotations

import json
import re
from json.encoder import encode_basestring_ascii as _quote
from typing import Any


MAX_BYTES = 65536  # most bytes of one value's text
MAX_NODES = 20000  # most scalars and containers in one value
MAX_DEPTH = 64  # most containers inside each other

_SMALL = 1 << 63  # smaller integers are written in decimal
_SEQUENCES: dict[type, str] = {list: "l", tuple: "t"}
_SETS = {set: "s", frozenset: "z"}
_INFINITE = ("nan", "inf", "-inf")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # a string of JSON, also without its end


# Returns the name of a type, and runs no code of the type's metaclass, which may define a `__name__` of its own.
name_type = type.__dict__["__name__"].__get__


class NotPlainData(ValueError):
    """The value, or something inside it, is not plain data; `kind` is the offending type."""

    def __init__(self, kind: type):
        self.kind = kind
        super().__init__(f"a value of type {name_type(kind)[:80]!r} is not plain data")


class ValueTooLarge(ValueError):
    """The value exceeds a budget: bytes, nodes or depth."""


class _Encoder:
    """One encoding in progress, with what is left of its budgets."""

    __slots__ = ("bytes", "max_bytes", "max_depth", "max_nodes", "nodes", "ordered")

    def __init__(self, max_bytes: int, max_nodes: int, max_depth: int, ordered: bool):
        self.max_bytes, self.bytes = max_bytes, max_bytes
        self.max_nodes, self.nodes = max_nodes, max_nodes
        self.max_depth, self.ordered = max_depth, ordered

    def spend(self, size: int) -> None:
        """Subtracts `size` bytes and one node from the budgets, before the text of a part is made."""
        self.bytes -= size
        self.nodes -= 1
        if self.bytes < 0:
            raise ValueTooLarge(f"the value may need more than {self.max_bytes} bytes")
        if self.nodes < 0:
            raise ValueTooLarge(f"the value has more than {self.max_nodes} parts")

    def write(self, value: Any, depth: int) -> str:
        """Writes a value that lies inside `depth` containers."""
        # `type` and not `isinstance`: a subclass may carry more than its value.
        kind = type(value)
        if kind is str:
            return self.string(value)
        if kind is int:
            return self.integer(value)
        if value is None or kind is bool:
            self.spend(5)
            return "null" if value is None else "true" if value else "false"
        if kind is float:
            self.spend(20)
            return _float_text(value)
        if kind is bytes:
            self.spend(2 * len(value) + 8)
            return f'["b","{value.hex()}"]'
        if kind is complex:
            self.spend(48)
            return f'["c",{_float_text(value.real)},{_float_text(value.imag)}]'
        return self.container(value, kind, depth)

    def string(self, value: str) -> str:
        self.spend(len(value) + 2)
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                # JSON's \ud800\udc00 would read back as one character, so lone surrogates need a form of their own.
                return f'["u","{value.encode("utf-8", "surrogatepass").hex()}"]'
        return _quote(value)

    def integer(self, value: int) -> str:
        if -_SMALL < value < _SMALL:
            self.spend(8)
            return str(value)
        self.spend(value.bit_length() // 4 + 8)
        return f'["x","{value:x}"]'

    def container(self, value: Any, kind: type, depth: int) -> str:
        if depth >= self.max_depth:
            raise ValueTooLarge(f"the value is nested deeper than {self.max_depth}")
        self.spend(6)
        depth += 1
        if kind in _SEQUENCES:
            parts = [self.write(item, depth) for item in value]
            tag = _SEQUENCES[kind]
        elif kind in _SETS:
            parts = sorted(self.write(item, depth) for item in value)
            tag = _SETS[kind]
        elif kind is dict:
            pairs = [(self.write(key, depth), self.write(item, depth)) for key, item in value.items()]
            parts = [text for pair in (pairs if self.ordered else sorted(pairs)) for text in pair]
            tag = "d"
        else:
            raise NotPlainData(kind)
        return f'["{tag}",{",".join(parts)}]' if parts else f'["{tag}"]'


def _float_text(value: float) -> str:
    """Writes a float as `repr` does, which reads back as the same float; nan and infinities get a tag."""
    text = repr(value)
    return text if text[-1] not in "nf" else f'["f","{text}"]'


def encode(value: Any, *, ordered=False, max_bytes=MAX_BYTES, max_nodes=MAX_NODES, max_depth=MAX_DEPTH) -> str:
    """
    Writes plain data as canonical text, in pure ASCII without line breaks.

    Args:
        value: Plain data. Anything else is refused, also a subclass of a plain type.
        ordered: Whether the pairs of dicts keep their order. If not, they are sorted.
        max_bytes: Longest text, in bytes. While the text is written, each part counts with a rough size: a float with
            20 bytes. So a value may be refused whose text would fit. The finished text is measured as well.
        max_nodes: Most scalars and containers.
        max_depth: Most containers inside each other; also ends cyclic data.

    Raises:
        `NotPlainData`: If the value holds anything but plain data.
        `ValueTooLarge`: If a budget is exceeded. A value is never shortened to fit.
    """
    text = _Encoder(max_bytes, max_nodes, max_depth, ordered).write(value, 0)
    if len(text) > max_bytes:
        raise ValueTooLarge(f"the value needs more than {max_bytes} bytes")
    return text


def decode(text: str, *, max_bytes: int = MAX_BYTES) -> Any:
    """
    Reads the value of a canonical text, with dicts in the order of the text.

    It refuses every text that [`encode`] could not have written.

    Raises:
        `ValueError`: If `text` is too large or not canonical: unknown tags, unsorted sets, repeated elements, spaces,
            other forms of numbers.
    """
    value = _read(text, max_bytes)
    # The surest test of the form: write the value again and compare.
    if encode(value, ordered=True, max_bytes=max_bytes, max_nodes=max_bytes) != text:
        raise ValueError("the text is not in canonical form")
    return value


def is_canonical(text: str, *, max_bytes: int = MAX_BYTES) -> bool:
    """Says whether [`decode`] would read a text."""
    # Short integers, the most frequent answers, are recognised without parsing.
    digits = text[1:] if text.startswith("-") else text
    if 0 < len(digits) < 16 and digits.isascii() and digits.isdigit():
        return (digits[0] != "0" or digits == "0") and text != "-0"
    try:
        decode(text, max_bytes=max_bytes)
    except ValueError:
        return False
    return True


def _read(text: str, max_bytes: int) -> Any:
    """Parses tagged JSON under limits."""
    if not isinstance(text, str) or len(text) > max_bytes:
        raise ValueError(f"the text is not a string of at most {max_bytes} characters")
    # The JSON parser recurses, so the depth is checked first. For most texts a cheap test, the length or the number of
    # brackets, shows that the slow `_bracket_depth` is not needed.
    if len(text) > MAX_DEPTH and text.count("[") > MAX_DEPTH and _bracket_depth(text) > MAX_DEPTH + 2:
        raise ValueError(f"the text is nested deeper than {MAX_DEPTH}")
    try:
        node, end = _read_json(text)
        if end != len(text):
            _refuse(text[end:])
        return _build(node)
    except (RecursionError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"the text is not canonical: {type(error).__name__}") from None


def _bracket_depth(text: str) -> int:
    """Measures how deep square brackets are nested. Those inside strings do not count."""
    depth = deepest = 0
    for char in _STRING.sub("", text):
        depth += (char == "[") - (char == "]")
        deepest = max(deepest, depth)
    return deepest


def _refuse(token: Any) -> Any:
    """Raises for what canonical text does not have, such as JSON's objects, `NaN` and long decimals."""
    raise ValueError(f"{str(token)[:40]!r} has no place in canonical text")


def _small_int(digits: str) -> int:
    return int(digits) if len(digits) < 21 else _refuse(digits)


_read_json = json.JSONDecoder(parse_int=_small_int, parse_constant=_refuse, object_pairs_hook=_refuse).raw_decode


def _build(node: Any) -> Any:
    """Makes the value of a parsed node: a scalar, or a list that starts with its tag."""
    if type(node) is not list:
        return node
    tag, *rest = node
    return _BUILDERS[tag](rest)


def _build_float(rest: list) -> float:
    (name,) = rest
    # Each call makes a new object, because a set holds nan twice only if the two are different objects.
    return float(name) if name in _INFINITE else _refuse(name)


def _build_complex(rest: list) -> complex:
    real, imag = map(_build, rest)
    if type(real) is not float or type(imag) is not float:
        raise ValueError("a complex number needs two floats")
    return complex(real, imag)


def _build_bytes(rest: list) -> bytes:
    (digits,) = rest
    return bytes.fromhex(digits)


def _build_set(rest: list, kind: type) -> Any:
    value = kind(map(_build, rest))
    if len(value) != len(rest):
        raise ValueError("a set repeats an element")
    return value


def _build_dict(rest: list) -> dict:
    value = dict(zip(map(_build, rest[::2]), map(_build, rest[1::2]), strict=True))
    if 2 * len(value) != len(rest):
        raise ValueError("a dict repeats a key")
    return value


_BUILDERS = {
    "l": lambda rest: list(map(_build, rest)),
    "t": lambda rest: tuple(map(_build, rest)),
    "s": lambda rest: _build_set(rest, set),
    "z": lambda rest: _build_set(rest, frozenset),
    "d": _build_dict,
    "f": _build_float,
    "c": _build_complex,
    "b": _build_bytes,
    "u": lambda rest: _build_bytes(rest).decode("utf-8", "surrogatepass"),
    "x": lambda rest: int(str(*rest), 16),
}


def equal(a: Any, b: Any) -> bool:
    """
    Says whether two pieces of plain data are the same answer: Python's `==`, but nan equals nan.

    So `1 == 1.0 == True`, and `-0.0 == 0.0`.
    """
    return key(a) == key(b)


_ANY_SIZE: dict[str, Any] = {"max_bytes": 1 << 40, "max_nodes": 1 << 40, "max_depth": 400}


def key(value: Any) -> str:
    """Makes a text for comparison: two values have the same text if they are [`equal`], and different texts if not."""
    kind = type(value)
    if kind in (bool, int, float, complex):
        return _number_key(value)
    if kind in _SEQUENCES:
        return f"{_SEQUENCES[kind]}({','.join(map(key, value))})"
    if kind in _SETS:
        return f"s({','.join(sorted(map(key, value)))})"
    if kind is dict:
        return f"d({','.join(sorted(f'{key(name)}:{key(item)}' for name, item in value.items()))})"
    return encode(value, **_ANY_SIZE)


def _number_key(value: complex) -> str:
    if type(value) is complex and value.imag != 0:
        # Adding 0.0 turns -0.0 into 0.0.
        return f"c{value.real + 0.0!r},{value.imag + 0.0!r}"
    number = value.real
    whole = type(number) is not float or number.is_integer()
    return f"n{int(number):x}" if whole else f"n{number!r}"


def to_literal(value: Any) -> str:
    """
    Writes plain data as a Python literal for prompts; [`read_literal`][trl_populora.sandbox.literals] reads it back.

    Python has no literal for some values. They are written as `nan`, `inf`, `set()`, `frozenset({1})` and
    `complex(nan, 1.0)`. Sets are written in canonical order, dicts in the order that they have.

    Raises:
        `NotPlainData`: If the value holds anything but plain data.
    """
    kind = type(value)
    if kind is int:
        # Python refuses to write more than 4,300 decimal digits. Hexadecimal has no limit.
        return str(value) if value.bit_length() < 14000 else hex(value)
    if kind is complex:
        return _complex_literal(value)
    if value is None or kind in (bool, float, str, bytes):
        return repr(value)
    if kind is list:
        return "[" + ", ".join(map(to_literal, value)) + "]"
    if kind is tuple:
        return "(" + ", ".join(map(to_literal, value)) + (",)" if len(value) == 1 else ")")
    if kind in _SETS:
        members = sorted(value, key=lambda item: encode(item, **_ANY_SIZE))
        text = "{" + ", ".join(map(to_literal, members)) + "}" if members else ""
        return text if kind is set and members else f"{kind.__name__}({text})"
    if kind is dict:
        return "{" + ", ".join(f"{to_literal(key)}: {to_literal(item)}" for key, item in value.items()) + "}"
    raise NotPlainData(kind)


def _complex_literal(value: complex) -> str:
    parts = (value.real, value.imag)
    plain = all(part == part and abs(part) != float("inf") and repr(part) != "-0.0" for part in parts)
    # Python reads `-1j` as the negative of `1j`, so its real part is -0.0. A real part of 0.0 needs `complex(...)`.
    return repr(value) if plain and (parts[0] or parts[1] >= 0) else f"complex({parts[0]!r}, {parts[1]!r})"
