"""Plain data: canonical text, equality, literals."""

import contextlib
import math
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plain_data import HOSTILE_ANSWERS, plain
from trl_populora.sandbox.literals import LiteralError, read_arguments, read_literal
from trl_populora.sandbox.values import (
    NotPlainData,
    ValueTooLarge,
    decode,
    encode,
    equal,
    is_canonical,
    key,
    to_literal,
)


NAN = float("nan")


@settings(max_examples=150, deadline=None)
@given(plain)
def test_text_reads_back_to_the_same_text_and_an_equal_value(value):
    text = encode(value)
    again = decode(text)
    assert encode(again) == text
    assert is_canonical(text)
    assert equal(value, again)
    assert text.isascii()
    assert "\n" not in text


def in_order(value):
    """A text that tells two values apart also when only the order of a dict differs."""
    return encode(value, ordered=True)


@settings(max_examples=150, deadline=None)
@given(plain)
def test_the_order_of_dicts_survives_text_and_literal(value):
    assert in_order(decode(in_order(value))) == in_order(value)
    assert in_order(read_literal(to_literal(value))) == in_order(value)
    assert decode(encode(value)) is not None or value is None
    assert encode(decode(in_order(value))) == encode(value), "outputs compare without it"


def test_only_ordered_text_tells_the_order_of_a_dict():
    one, other = {"b": 1, "a": {2: 0, 1: 0}}, {"a": {1: 0, 2: 0}, "b": 1}
    assert encode(one) == encode(other) == '["d","a",["d",1,0,2,0],"b",1]'
    assert encode((one,), ordered=True) == '["t",["d","b",1,"a",["d",2,0,1,0]]]'
    assert to_literal(one) == "{'b': 1, 'a': {2: 0, 1: 0}}"
    assert equal(one, other)


@settings(max_examples=150, deadline=None)
@given(plain)
def test_literals_read_back(value):
    assert encode(read_literal(to_literal(value))) == encode(value)
    literal = to_literal(value)
    assert encode(read_arguments(f"{literal}, 3")) == encode((value, 3))
    assert encode(read_arguments(f"f({literal})")) == encode((value,))


@settings(max_examples=150, deadline=None)
@given(plain, plain)
def test_equality_is_what_python_says_where_no_nan_is(a, b):
    for one, other in ((a, b), (a, decode(encode(a)))):
        assert equal(one, other) == equal(other, one)
        if "nan" not in encode(one) + encode(other):
            assert equal(one, other) == (one == other)
    if encode(a) == encode(b):
        assert equal(a, b)
        assert key(a) == key(b)
    if key(a) == key(b):
        assert equal(a, b)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | st.text("[]{}(),:\"'\\ 0123456789.eExf-+ntuls", max_size=60))
def test_readers_only_ever_refuse(text):
    for reader, error in ((decode, ValueError), (read_literal, LiteralError), (read_arguments, LiteralError)):
        with contextlib.suppress(error):
            encode(reader(text))


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1, True, True),
        (1, 1.0, True),
        (0.0, -0.0, True),
        (NAN, NAN, True),
        ([NAN, (1,)], [NAN, (True,)], True),
        ({NAN: 1}, {NAN: 1}, True),
        ({1: "a"}, {1.0: "a"}, True),
        ({1: 2, "x": 3}, {"x": 3, 1: 2}, True),
        ({1, 2}, frozenset({1, 2}), True),
        ([1], (1,), False),
        ("1", 1, False),
        (None, False, False),
        (b"a", "a", False),
        (10**17 + 1, 1e17, False),
        (complex(1, 0), 1, True),
        ({(1, NAN)}, {(1.0, NAN)}, True),
        ([], {}, False),
        ({1: [2]}, {1: [3]}, False),
        ([1, 2], [1, 2, 3], False),
        (["u", "eda080"], "\ud800", False),
        ({NAN: 1, float("nan"): 2}, {NAN: 2, float("nan"): 1}, True),
        ({1: {2: {3, 4}}}, {True: {2.0: frozenset({4, 3})}}, True),
    ],
)
def test_equality_is_pythons_with_nan_equal_to_itself(a, b, same):
    assert equal(a, b) is same
    assert (key(a) == key(b)) is same


class Sly(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize("value", [Sly(1), object(), iter([]), range(3), bytearray(b"a"), len, int, [{"a": Sly(2)}]])
def test_other_types_are_refused(value):
    with pytest.raises(NotPlainData):
        encode(value)


def test_budgets():
    cyclic = []
    cyclic.append(cyclic)
    for value in (cyclic, "a" * 70000, [0] * 30000, 1 << 400000, ["a" * 100] * 1000, b"a" * 40000):
        with pytest.raises(ValueTooLarge):
            encode(value)
    assert len(encode("é" * 10, max_bytes=62)) == 62
    with pytest.raises(ValueTooLarge):
        encode("é" * 10, max_bytes=61)


@pytest.mark.parametrize(
    "text",
    ["", " 1", "1 ", "01", "-0", "+1", "1e5", "1.50", "NaN", "Infinity", "{}", "[]", '["q"]', '["l" ,1]', '["s",2,1]']
    + ['["s",1,1]', '["d",1]', '["d",1,2,1,3]', '["f","1.0"]', '["x","1"]', '["x",1]', '["b","AA"]', '["u","61"]']
    + [
        '["c",1,2]',
        "9" * 5000,
        "[" * 100000,
        '["l",' * 70 + '["l"]' + "]" * 70,
        '"é"',
        '"\\u0041"',
        "__import__('os')",
    ]
    + ['["s",["l"]]', '["t",nul]', '["x","_1"]', '{"a":1}', '["f",["f","nan"]]', "9223372036854775808", '["b","0 0"]'],
)
def test_only_canonical_text_is_read(text):
    with pytest.raises(ValueError):  # noqa: PT011 - any message will do
        decode(text)
    assert not is_canonical(text)


@pytest.mark.parametrize("text", ["0", "-7", "123456789012345", "1234567890123456789"])
def test_short_integers_are_canonical(text):
    assert is_canonical(text)
    assert encode(decode(text)) == text


@pytest.mark.parametrize("text", HOSTILE_ANSWERS, ids=range(len(HOSTILE_ANSWERS)))
def test_hostile_answers_are_refused(text):
    with pytest.raises(LiteralError):
        read_literal(text)


@pytest.mark.parametrize(
    "text", [*HOSTILE_ANSWERS, "f(1), 2", "f", "g(1)", "f(1)(2)", "f(1,)[0]", "f (1) f", "(f)(1)"]
)
def test_hostile_arguments_are_refused(text):
    if text == "1," * 40000:
        text += "0," * 9000
    with pytest.raises(LiteralError):
        read_arguments(text)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [("", ()), ("3, [4]", (3, [4])), ("f(3, [4])", (3, [4])), (" f ( 3 ,\n 4 ) ", (3, 4)), ("(1, 2)", ((1, 2),))]
    + [("3,", (3,)), ("'f(1)'", ("f(1)",)), ("f()", ()), ("1,\n2", (1, 2)), ("{'a': (1,)}, -2.5", ({"a": (1,)}, -2.5))]
    + [("'a' 'b'", ("ab",)), (r"'\d\\'", (r"\d" + "\\",)), ('"""x\ny"""', ("x\ny",)), (r"rb'\d'", (rb"\d",))],
)
def test_arguments(text, arguments):
    assert read_arguments(text) == arguments


@pytest.mark.filterwarnings("error")
def test_reading_never_warns():
    assert read_literal(r"'\d \q'") == r"\d \q"
    assert read_literal(r"b'\N \u'") == rb"\N \u"


def test_reading_costs_linear_time():
    for text in ("'" * 65000, '"""' + '"a' * 30000, "\\" * 65000, "'" + "\\'" * 32000, "1e" * 30000, "_" * 65000):
        start = time.thread_time()  # CPU time: other processes do not count
        with contextlib.suppress(LiteralError):
            read_literal(text)
        assert time.thread_time() - start < 1.0


def test_huge_integers_survive_the_digit_limit():
    value = 7**6000
    assert value.bit_length() > 14000
    assert sys.get_int_max_str_digits() == 4300
    assert read_literal(to_literal(value)) == decode(encode(value)) == value


PARTS = [0.0, -0.0, 1.0, -1.0, 2.5, -1e-7, -1e22, 5e-324, math.inf, -math.inf, NAN]


@pytest.mark.parametrize("real", PARTS)
@pytest.mark.parametrize("imaginary", PARTS)
def test_complex_numbers_read_back(real, imaginary):
    value = complex(real, imaginary)
    assert encode(read_literal(to_literal(value))) == encode(value)
    assert encode(read_arguments(f"{to_literal(value)}, 3")) == encode((value, 3))


@pytest.mark.parametrize(
    "text", ["1+" * 300 + "1", "1" + "()" * 200, "1j+1j+1j", "[1][0]", "'a'('b')", "(1)(2)", "1-1"]
)
def test_chains_are_refused_before_parsing(text):
    with pytest.raises(LiteralError):
        read_literal(text)


def test_a_set_that_holds_nan_twice_is_read_with_both():
    value = {float("nan"), float("nan")}
    assert len(read_literal(to_literal(value))) == 2
