"""Program text is read in bounded time without running it, and its normal forms do what duplicates and hints need."""

from __future__ import annotations

import sys
import time
import warnings

import pytest

from trl_populora.tasks.kind import Reject
from trl_populora.tasks.python.normal_form import normal_forms
from trl_populora.tasks.python.programs import (
    MAX_PROGRAM_CHARS,
    ProgramError,
    check_program,
    contains_program,
    parse_bounded,
)


GOOD = [
    "def f(x):\n    return x",
    "import math\n\nclass A:\n    def f(self):\n        return 1\n\n"
    "def helper(x):\n    return A().f() + x\n\ndef f(x):\n    return helper(x)",
    "def f(x):\n    return 1\n\ndef f(x):\n    return 2",
    'def f(s):\n    """A docstring (with [brackets {."""\n    return f"{s!r:>{len(s)}}"',
    "def f(n):\n    match n:\n        case [a, *rest]:\n            return rest\n"
    "        case {'k': v, **more}:\n            return more\n"
    "        case _:\n            return [lambda q=i: q for i in range(3)]",
    "def f():\n    return [" + ", ".join(map(str, range(300))) + "]",
    "def f(x):\n    s = '((((((((((((((((((((((((((((('\n    # [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\n    return s",
]


@pytest.mark.parametrize("program", GOOD)
def test_programs_with_a_top_level_f_pass(program):
    check_program(program)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("", Reject.NO_FUNCTION),
        ("def g(x):\n    return x", Reject.NO_FUNCTION),
        ("f = lambda x: x", Reject.NO_FUNCTION),
        ("async def f(x):\n    return x", Reject.NO_FUNCTION),
        ("class A:\n    def f(x):\n        return x", Reject.NO_FUNCTION),
        ("if True:\n    def f(x):\n        return x", Reject.NO_FUNCTION),
        ("'def f(x): return x'", Reject.NO_FUNCTION),
        ("def f(x)\n    return x", Reject.SYNTAX),
        ("def f(x):\nreturn x", Reject.SYNTAX),
        ("def f(...):\n    ...", Reject.SYNTAX),
        ("def f(x):\n    return '\0'", Reject.SYNTAX),
        ("def f(x):\n    return '\ud800'", Reject.SYNTAX),
        ("def f(x):\n    return " + "9" * 5000, Reject.SYNTAX),
        ("x = 1\n" * 2000, Reject.OVERSIZED),
        ("(" * 500 + ")" * 500, Reject.OVERSIZED),
        ("[{(" * 300, Reject.OVERSIZED),
        ("-" * 7000 + "1", Reject.OVERSIZED),
        ("not " * 1500 + "1", Reject.OVERSIZED),
        ("x" + "()" * 3000, Reject.OVERSIZED),
        ("x" + ".y" * 3000, Reject.OVERSIZED),
        ("+".join("1" * 3000), Reject.OVERSIZED),
        ("lambda a, b: " * 500 + "1", Reject.OVERSIZED),
        ("if 1: 0\n" + "elif 1: 0\n" * 500, Reject.OVERSIZED),
        ("f'" + "{ " * 400 + "1" + "} " * 400 + "'", Reject.OVERSIZED),
        ("f'''{" + "(" * 300 + "1" + ")" * 300 + "}'''", Reject.OVERSIZED),
        ("\n".join(" " * depth + "if 1:" for depth in range(110)), Reject.SYNTAX),
    ],
    ids=lambda value: value.value if isinstance(value, Reject) else repr(value[:24]),
)
def test_other_texts_are_refused_with_their_reason(program, reason):
    with pytest.raises(ProgramError) as caught:
        check_program(program)
    assert caught.value.reason is reason


@pytest.mark.skipif(sys.version_info < (3, 12), reason="before, an f-string could not hold its own quotes")
def test_quotes_inside_an_f_string_hide_nothing_and_open_nothing():
    lines = "".join(f"    x += {i}\n" for i in range(60))
    check_program(f'def f(s):\n    x = f"{{s.count("(")}} open"\n{lines}    return x')
    for deep in ("-" * 2500 + "1", "(" * 90 + "1" + ")" * 90):
        with pytest.raises(ProgramError) as caught:
            check_program(f'def f(d):\n    if f"{{d["#"]}}" and {deep}:\n        return 1')
        assert caught.value.reason is Reject.OVERSIZED


def test_some_digit_limits_do_not_apply_to_every_notation():
    tree = parse_bounded("def f(x):\n    return 0x" + "f" * 7000)
    assert len(normal_forms(tree)[0]) > 7000


@pytest.mark.parametrize(
    "unit", ["(", "[", "{", "{a:", "f(", "a[", "lambda:(", "(yield ", "f'{", "(a:=", "match (", "print "]
)
@pytest.mark.parametrize("tail", ["", ":", "1 2", "=", "!", ")", "x=1=2", "else"])
def test_the_parser_never_takes_long(unit, tail):
    start = time.thread_time()
    for depth in (5, 10, 15, 19, 20):
        for text in (unit * depth + tail, f"def f(x):\n    return {unit * depth}{tail}"):
            with pytest.raises(ProgramError):
                check_program(text)
    assert time.thread_time() - start < 2.0  # exponential backtracking would take hours; this takes milliseconds


def test_the_scan_is_linear_in_unclosed_strings():
    start = time.thread_time()
    for text in ("'''\\", '"""\\', "'\\", "\\'''", "f'''{", "''''"):
        with pytest.raises(ProgramError):
            check_program((text * MAX_PROGRAM_CHARS)[:MAX_PROGRAM_CHARS])
    assert time.thread_time() - start < 2.0


def test_parsing_warns_about_nothing(recwarn):
    parse_bounded("def f(x):\n    return x is 1 or '\\d'")
    assert not recwarn.list


def test_parsing_brings_back_no_warning_that_was_told():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            parse_bounded("def f(x):\n    return x is 1")
            warnings.warn("to be told once", FutureWarning, stacklevel=1)
    assert len(told) == 1


PROGRAM = 'def f(x):\n    """Doc."""\n    # a remark\n    y = x + 1\n    return y * "2"\n'


@pytest.mark.parametrize(
    "message",
    [
        PROGRAM,
        "It is `DEF F(X):  y=x+1; ` hm: def f(x): y = x",
        "compute y = x + 1\nreturn y * '2'",
        "Y=X+1 return Y*2, quickly",
        "def anything (q)",
        "hint: # y = x + 1 # return y * 2",
        "y = x + 1  # one more\nreturn y * 2",
    ],
)
def test_a_hint_with_the_program_or_its_body_is_a_leak(message):
    assert contains_program(message, PROGRAM)


@pytest.mark.parametrize("message", ["adds one, then doubles", "y is x + 1", "f defines a line", "return"])
def test_a_hint_in_words_is_no_leak(message):
    assert not contains_program(message, PROGRAM)


@pytest.mark.parametrize("end", ["\r", "\r\n"])
def test_a_body_is_found_whatever_ends_its_lines(end):
    program = PROGRAM.replace("\n", end)
    assert contains_program("y = x + 1 return y * 2", program)
    assert not contains_program("adds one, then doubles", program)


def test_a_one_line_body_counts_as_the_program():
    assert contains_program("simply return x+1", "def f(x): return x + 1")
    assert not contains_program("adds one to x", "def f(x): return x + 1")
    assert not contains_program("anything", "def f(x): ...")
