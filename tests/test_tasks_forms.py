"""Programs that differ in what costs nothing to write have one normal form; what reaches the result counts."""

from __future__ import annotations

import random
import re
import time

import pytest

from trl_populora.assets import real_seed_tasks
from trl_populora.tasks import load_seed_tasks
from trl_populora.tasks.python.normal_form import normal_forms
from trl_populora.tasks.python.programs import parse_bounded

from .form_pairs import differing, duplicates, pairs


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
        BASE.replace("def g(a)", "def g(x)").replace("a * 2", "x * 2"),
        BASE.replace("total", "max"),
        BASE.replace("total = 0", "total: int = 0").replace("x, y=1)", "x: int, y=1) -> int"),
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


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def g(a, b):\n    return a - b\ndef f(x):\n    return g(b=x, a=1)",) * 2,
        ("import math\ndef f(x):\n    return math.sqrt(x)",) * 2,
        ("class P:\n    def a(self):\n        return self.b\n    b = 3\ndef f(x):\n    return P().a() + x",) * 2,
    ],
)
def test_keywords_modules_and_attributes_of_its_own_are_renamed_with_it(one, other):
    for name, another in (("a", "first"), ("b", "second")):
        other = re.sub(rf"\b{name}\b", another, other)
    other = other.replace("import math", "import math as m").replace("math.", "m.")
    assert one != other
    assert forms(one) == forms(other)


def test_a_keyword_argument_is_not_a_bound_name():
    one = "def f(key, x):\n    return sorted(x, key=key)"
    two = "def f(reverse, x):\n    return sorted(x, reverse=reverse)"
    assert forms(one)[0] != forms(two)[0]


def dead(*lines, before="    total = 0"):
    """The base with lines put in before its first statement."""
    return BASE.replace(before, "\n".join(f"    {line}" for line in lines) + f"\n{before}")


@pytest.mark.parametrize(
    "other", ["a if True else b", "b if 2 < 1 else a", "True and a", "a or b", "False or a", "not 1 or a"]
)
def test_an_expression_that_constants_decide_is_the_operand_that_it_comes_to(other):
    one, two = (f"def f(a, b):\n    return [{each}, b]" for each in ("a", other))
    assert (forms(one) == forms(two)) == (other != "a or b")


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
        dead("u = 0", "for n in range(9):", "    u += n"),
        dead("u = []", "u.append(x)", "u[0] = 3"),
        dead("u = list(range(x))", "u.sort()"),
        dead("a = 3"),
        dead("unused = g(x)", "g(x)", "if g(3):", "    pass"),
        dead("assert x < 10**9", "if x == 17:", "    raise ValueError"),
        dead("def helper(q):", "    q.append(3)", "helper([x])"),
        dead("class A:", "    def g(self):", "        self.size = 3", "A().g()"),
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
        dead("unused = [y := 3]"),
        dead("x = 3"),
        dead("y, unused = x, 1"),
        dead("if x > 3:", "    return 0"),
        dead("for i in iter(g, 3):", "    pass"),
        dead("import math", "y = math.pi"),
        dead("def helper(q):", "    return q + 1", "y = helper(y)"),
        dead("class A:", "    size = 3", "y = A.size"),
        dead("raise ValueError"),
        # A change in place, also through another name, a loop or a call.
        *(
            BASE.replace("total = 0", f"total, rows = 0, [[y]]\n    {line}").replace("- y", "- len(rows[0])")
            for line in (
                "rows[0].append(3)",
                "row = rows[0]\n    row.append(3)",
                "for row in rows:\n        row.append(3)",
                "for n, row in enumerate(rows):\n        row[0] = n",
                "(rows if x else rows).append(x)",
                "def push(to):\n        to.append(x)\n    push(rows[0])",
                "def push():\n        rows.append(x)\n    def twice():\n        push()\n    twice()",
            )
        ),
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


def body(*lines, head=""):
    return head + "def f(x, xs, s, d):\n" + "\n".join(f"    {line}" for line in "\n".join(lines).split("\n"))


CAUGHT = "try:\n    {}\nexcept Exception:\n    return 'bad'\nreturn x"
ORDERED = "class P:\n    def {}(self, other):\n        return True\n"
TWO = "def g(a, b):\n    return a - b\n"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # What may raise is no dead code where that is caught, here or by whoever calls.
        (body(CAUGHT.format("int(s)")), body(CAUGHT.format("float(s)"))),
        (body(CAUGHT.format("xs[x]")), body(CAUGHT.format("xs[x + 1]"))),
        (body(CAUGHT.format("a = xs[x]")), body(CAUGHT.format("a = 1"))),
        (body(CAUGHT.format("import numpy")), body(CAUGHT.format("pass"))),
        (body(CAUGHT.format("for _ in x: pass")), body(CAUGHT.format("pass"))),
        (body(CAUGHT.format("import json.nothing")), body(CAUGHT.format("pass"))),
        # Names that something else says.
        (
            body("return P() < P()", head=ORDERED.format("__lt__")),
            body("return P() < P()", head=ORDERED.format("__gt__")),
        ),
        (body("return P().g()", head=ORDERED.format("g")), body("return P().g()", head=ORDERED.format("h"))),
        (
            body("return g(a=x, b=1)", head=TWO),
            body("return g(a=x, b=1)", head=TWO.replace("a, b", "b, a").replace("a - b", "b - a")),
        ),
        (
            body("return len(xs)", head="def g(len):\n    return len\n"),
            body("return m(xs)", head="def g(m):\n    return m\n"),
        ),
        (body("y = 1", "match d:\n    case g(y=a): return a"), body("z = 1", "match d:\n    case g(z=a): return a")),
        # What uses something up, or writes elsewhere.
        (body("def g(a=xs.pop()): return a", "return xs"), body("return xs")),
        # What is never run and counts all the same.
        # What the sandbox calls, and what imports bring.
        (body("return x") + "\nf = max", body("return x")),
        (body("return sqrt(x)", head="from math import *\n"), body("return sqrt(x)", head="from cmath import *\n")),
        # Places that hold nothing.
        (body("return {**d, 'a': x}"), body("return {'a': d, **x}")),
        (
            body("return g(a=x)", head="def g(*, a, b=1): pass\n"),
            body("return g(a=x)", head="def g(*, a=1, b): pass\n"),
        ),
    ],
)
def test_programs_that_differ_have_different_forms(one, other):
    assert forms(one)[0] != forms(other)[0]


@pytest.mark.parametrize(
    "lines",
    [
        ["if False:", "    x = g(x)"],
        ["if 0:", "    return 3", "elif 1 > 2:", "    x = 7"],
        ["while None:", "    x += 1"],
        ["if not '':", "    pass", "else:", "    return [x]"],
        ["assert True"],
    ],
)
def test_a_branch_that_is_never_taken_does_not_count(lines):
    assert forms(dead(*lines)) == forms(BASE)


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("    if True:\n        return total - y\n    return x", "    return total - y"),
        (
            "    if 2 < 1:\n        return x\n    else:\n        return total - y\n    total = 4",
            "    return total - y",
        ),
    ],
)
def test_what_a_constant_chooses_is_what_counts(written, plain):
    last = "    return total - y"
    assert forms(BASE.replace(last, written))[0] == forms(BASE.replace(last, plain))[0]


@pytest.mark.slow
def test_of_random_pairs_of_one_form_at_most_two_percent_have_different_outputs():
    """Those that differ look at their names and docstrings. `python -m tests.form_pairs 2000 1` shows them."""
    both, found = differing(list(pairs(2000, seed=1)))
    assert both >= 500
    assert len(found) <= 40


def test_renamings_and_dead_code_are_found_in_all_tasks_that_ship():
    rng = random.Random(0)
    for task in [*load_seed_tasks(), *load_seed_tasks(real_seed_tasks())]:
        form = forms(task.program)
        assert all(forms(other) == form for other in duplicates(task.program, rng))
