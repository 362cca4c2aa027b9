"""Programs that differ in what costs nothing to write have one normal form; whatever may change a result counts."""

from __future__ import annotations

import random
import time

import pytest

from trl_populora.tasks import load_seed_tasks
from trl_populora.tasks.forms import normal_forms
from trl_populora.tasks.programs import parse_bounded

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
        (
            body(CAUGHT.format("g(s)"), head="def g(a):\n    int(a)\n"),
            body(CAUGHT.format("g(s)"), head="def g(a):\n    float(a)\n"),
        ),
        (body(CAUGHT.format("for _ in x: pass")), body(CAUGHT.format("pass"))),
        (body(CAUGHT.format("import json.nothing")), body(CAUGHT.format("pass"))),
        (
            body(CAUGHT.format("g()"), head="def g():\n    x\n"),
            body(CAUGHT.format("g()"), head="def g():\n    pass\n"),
        ),
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
            body("return g(**d)", head=TWO),
            body("return g(**d)", head=TWO.replace("a, b", "b, a").replace("a - b", "b - a")),
        ),
        (
            body("floor = floor\nreturn x", head="from math import floor\n"),
            body("ceil = ceil\nreturn x", head="from math import ceil\n"),
        ),
        (
            body("return len(xs)", head="def g(len):\n    return len\n"),
            body("return m(xs)", head="def g(m):\n    return m\n"),
        ),
        (body("y = 1", "match d:\n    case g(y=a): return a"), body("z = 1", "match d:\n    case g(z=a): return a")),
        (
            body("return str(g).split()[1]", head="def g(): pass\n"),
            body("return str(h).split()[1]", head="def h(): pass\n"),
        ),
        (body("return str(type(A()))", head="class A: pass\n"), body("return str(type(B()))", head="class B: pass\n")),
        (
            body("return g.__doc__", head="def g():\n    'one'\n"),
            body("return g.__doc__", head="def g():\n    'two'\n"),
        ),
        (body("return f.__code__.co_firstlineno"), body("return f.__code__.co_firstlineno", head="\n")),
        (
            body("try:\n    g()\nexcept TypeError as e:\n    return str(e)", head="def g(a): pass\n"),
            body("try:\n    g()\nexcept TypeError as e:\n    return str(e)", head="def g(b): pass\n"),
        ),
        # What uses something up, or writes elsewhere.
        (body("it = iter(xs)", "list(it)", "return list(it)"), body("it = iter(xs)", "return list(it)")),
        (body("it = iter(xs)", "unused = 3 in it", "return list(it)"), body("it = iter(xs)", "return list(it)")),
        (body("it = iter(xs)", "for _ in it: pass", "return list(it)"), body("it = iter(xs)", "return list(it)")),
        (body("unused = sorted(xs, key=d.pop)", "return d"), body("return d")),
        (
            body("m = defaultdict(list)", "m[x]", "return len(m)", head="from collections import defaultdict\n"),
            body("m = defaultdict(list)", "return len(m)", head="from collections import defaultdict\n"),
        ),
        (
            body("b = io.StringIO()", "print(x, file=b)", "return b.getvalue()", head="import io\n"),
            body("b = io.StringIO()", "return b.getvalue()", head="import io\n"),
        ),
        (body("def g(a=xs.pop()): return a", "return xs"), body("return xs")),
        # What is never run and counts all the same.
        (body("return x", "yield x"), body("return x")),
        (body("if False:\n    yield x", "return x"), body("return x")),
        (body("return n", "n = 1", head="n = 2\n"), body("return n", head="n = 2\n")),
        (body("if False:\n    n = 1", "return n", head="n = 2\n"), body("return n", head="n = 2\n")),
        # What the sandbox calls, and what imports bring.
        (body("return x") + "\nf = max", body("return x")),
        (body("return sqrt(x)", head="from math import *\n"), body("return sqrt(x)", head="from cmath import *\n")),
        (
            body("return x", head="from __future__ import annotations\ndef g(a: b): pass\n"),
            body("return x", head="def g(a: b): pass\n"),
        ),
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
        ("    return total - y if 1 else g(x)", "    return total - y"),
        ("    return True and total - y", "    return total - y"),
        ("    return False or 0 or total - y", "    return total - y"),
        ("    return x and False and g(x)", "    return x and False"),
    ],
)
def test_what_a_constant_chooses_is_what_counts(written, plain):
    last = "    return total - y"
    assert forms(BASE.replace(last, written))[0] == forms(BASE.replace(last, plain))[0]


def test_programs_of_one_form_give_the_same_outputs():
    both, found = differing(list(pairs(300, seed=0)))
    assert found == []
    assert both >= 100


@pytest.mark.slow
def test_more_pairs_of_one_form_give_the_same_outputs():
    """As many as take half a minute; `python -m tests.form_pairs 10000` tries ten thousand."""
    both, found = differing(list(pairs(2000, seed=1)))
    assert found == []
    assert both >= 800


def test_renamings_and_dead_code_are_found_in_all_seed_tasks():
    rng = random.Random(0)
    for task in load_seed_tasks():
        form = forms(task.program)
        assert all(forms(other) == form for other in duplicates(task.program, rng))
