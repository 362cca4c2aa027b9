"""Programs that differ in what costs nothing to write have one normal form; whatever may change a result counts."""

from __future__ import annotations

import time

import pytest

from trl_populora.tasks.forms import normal_forms
from trl_populora.tasks.programs import parse_bounded


def forms(program):
    return normal_forms(parse_bounded(program))


BASE = (
    "def g(a):\n    return a * 2\n\n"
    "def f(x, y=1):\n    total = 0\n    for i in range(x):\n        total += g(i)\n    return total - y"
)


@pytest.mark.parametrize(
    "other",
    [
        BASE.replace("    ", "  ") + "\n\n# a remark\n",
        BASE.replace("total = 0", '"""Sums."""\n    total = 0'),
        BASE.replace("total", "t").replace("g(", "helper(").replace("range(x)", "range(  x )"),
        BASE.replace("x", "y_").replace("y=1", "x=1").replace("- y", "- x"),
    ],
)
def test_layout_docstrings_and_bound_names_do_not_count(other):
    assert forms(other)[0] == forms(BASE)[0]


@pytest.mark.parametrize(
    "other",
    [
        BASE.replace("* 2", "* 3"),
        BASE.replace("* 2", "* 2.0"),
        BASE.replace("* 2", "* True"),
        BASE.replace("range", "sorted"),
        BASE.replace("- y", "- x"),
        BASE.replace("- y", "+ y"),
        BASE.replace("def f", "def h"),
        BASE.replace("y=1", "*y"),
    ],
)
def test_what_changes_the_program_counts(other):
    assert forms(other)[0] != forms(BASE)[0]


def test_a_keyword_argument_is_not_a_bound_name():
    one = "def f(key, x):\n    return sorted(x, key=key)"
    two = "def f(reverse, x):\n    return sorted(x, reverse=reverse)"
    assert forms(one)[0] != forms(two)[0]


def dead(*lines, before="    total = 0"):
    """The base with lines put in before its first statement."""
    return BASE.replace(before, "\n".join(f"    {line}" for line in lines) + f"\n{before}")


@pytest.mark.parametrize(
    "other",
    [
        dead("pass"),
        dead("unused = 3"),
        dead("unused: int = len(str(x)) + 7"),
        dead("u = x", "v = u + 1", "w = t = v, u"),
        dead("print('hello', x)"),
        dead("x + 1", "x", "..."),
        dead("if x > 3:", "    unused = x", "else:", "    pass"),
        dead("for _ in range(3):", "    pass"),
        dead("import math"),
        dead("from itertools import chain as ch, count"),
        dead("def helper(q):", "    return q + 1"),
        BASE.replace("return total - y", "return total - y\n    total = 3\n    return total"),
        "import math\n\nUNUSED = [1, 2]\n\ndef helper():\n    return math.pi + sum(UNUSED)\n\n" + BASE,
    ],
)
def test_dead_code_does_not_count(other):
    assert forms(other) == forms(BASE)


@pytest.mark.parametrize(
    "other",
    [
        dead("x += 1"),
        dead("unused = g(x)"),
        dead("g(x)"),
        dead("unused = [y := 3]"),
        dead("x = 3"),
        dead("y, unused = x, 1"),
        dead("if x > 3:", "    return 0"),
        dead("if g(x):", "    pass"),
        dead("for i in iter(g, 3):", "    pass"),
        dead("while x:", "    pass"),
        dead("unused = 3", "exec('y = unused')"),
        dead("import math", "y = math.pi"),
        dead("def helper(q):", "    return q + 1", "y = helper(y)"),
        dead("class A:", "    size = 3", "y = A.size"),
        dead("len = g", "unused = len(x)"),
        dead("raise ValueError"),
    ],
)
def test_what_may_do_something_counts(other):
    assert forms(other)[0] != forms(BASE)[0]


def test_what_stands_in_a_class_counts():
    program = "class A:\n    def g(self):\n        return {}\n\ndef f(x):\n    return A().g() + x"
    assert forms(program.format(1))[0] != forms(program.format(2))[0]
    other = "class A:\n    size = 3\n    def g(self):\n        return 1\n\ndef f(x):\n    return A().g() + x"
    assert forms(other)[0] != forms(program.format(1))[0]


def test_constants_are_apart_in_the_second_form_alone():
    one, two = forms("def f(x):\n    return [x + 1, 'a', 2.5]"), forms("def f(z):\n    return [z + 99, 'bc', 0.0]")
    assert one[0] != two[0]
    assert one[1] == two[1]
    assert forms("def f(x):\n    return x + 1")[1] != forms("def f(x):\n    return x + 1.0")[1]
    assert forms("def f(x):\n    return x + 1")[1] != forms("def f(x):\n    return x * 1")[1]


def test_a_long_chain_of_dead_code_costs_no_more_than_a_few_walks():
    lines = [f"    v{i} = v{i - 1}" for i in range(1, 200)]
    program = "def f(x):\n    v0 = x\n" + "\n".join(lines) + "\n    return x"
    start = time.thread_time()
    forms(program)
    assert time.thread_time() - start < 0.5
