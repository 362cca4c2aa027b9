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


def test_an_assert_that_fails_by_constants_counts_and_ends_its_block():
    caught = "def f(a):\n    try:\n        {}return 1\n    except AssertionError:\n        return 2"
    fails, nothing, more = map(caught.format, ("assert False\n        ", "", "assert False\n        a += 1\n        "))
    assert forms(fails)[0] != forms(nothing)[0]
    assert forms(fails)[0] == forms(more)[0]
    assert forms(caught.format("assert True\n        "))[0] == forms(nothing)[0]


@pytest.mark.parametrize("chain", ["False or a", "False or False or a", "0 or '' or False or a", "True and 1 and a"])
def test_constants_before_the_operand_that_counts_do_not_count(chain):
    assert forms(f"def f(a):\n    return {chain}") == forms("def f(a):\n    return a")


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


# Programs with classes. Names that end with `_` are their own.
CLASSES = [
    "class A_:\n    def g_(self_, q_):\n        return q_ + 1\ndef f(x):\n    return A_().g_(x)",
    "class A:\n    def g(self, a_, /, b_=1, *c_, d_=2, **e_):\n        return a_, b_, c_, d_, e_\n"
    "def f(x):\n    return A().g(x, d_=3)",
    # Lambdas and comprehensions in each other.
    "class A:\n    g_ = lambda self_, q_: q_ + 1\ndef f(x):\n    return A().g_(x)",
    "class A:\n    g = lambda self, q_: (lambda k_: k_ + q_)(2)\ndef f(x):\n    return A().g(x)",
    "class A:\n    g = lambda self, q_: [k_ + q_ for k_ in range(q_)]\ndef f(x):\n    return A().g(x)",
    "class A:\n    gs = [lambda q_: q_ + n_ for n_ in range(3)]\ndef f(x):\n    return A.gs[0](x)",
    # What a class body computes: first iterables, defaults, decorators.
    "class A:\n    ws_ = [1, 2]\n    ys_ = [w_ for w_ in ws_]\ndef f(x):\n    return A.ys_",
    "class A:\n    n_ = 3\n    def g(self, k_=n_):\n        return k_\ndef f(x):\n    return A().g()",
    "class A:\n    def twice_(h_):\n        return h_\n    @twice_\n    def g(self):\n        return 1\n"
    "def f(x):\n    return A().g()",
    # Classes in classes and in methods.
    "class A:\n    class B_:\n        def g_(self_, q_):\n            return q_\n    def h(self, r_):\n"
    "        return self.B_().g_(r_)\ndef f(x):\n    return A().h(x)",
    "class A:\n    def g(self_, r_):\n        class B_:\n            def h_(me_, q_):\n                return q_, r_\n"
    "        return B_().h_(2)\ndef f(x):\n    return A().g(x)",
    # Names from further out.
    "n_ = 0\nclass A:\n    def g(self, q_):\n        global n_\n        n_ += q_\n        return n_\n"
    "def f(x):\n    return A().g(x)",
    "n_ = 0\nclass A:\n    global n_\n    n_ = 5\ndef f(x):\n    return n_, A",
    "def f(x):\n    n_ = 0\n    class A:\n        def g(self):\n            nonlocal n_\n            n_ += 1\n"
    "            return n_\n    return A().g()",
    # Other ways to bind a name.
    "class A:\n    def g(self, q_):\n        t_ = 0\n        [t_ := t_ + v_ for v_ in q_]\n        return t_\n"
    "def f(x):\n    return A().g(x)",
    "class A:\n    def g(self, q):\n        try:\n            return 1 // q\n        except Exception as e_:\n"
    "            return str(e_)\ndef f(x):\n    return A().g(x)",
    "class A:\n    def g(self, q):\n        match q:\n            case [a_, *b_]:\n                return a_, b_\n"
    "            case {1: c_, **d_}:\n                return c_, d_\ndef f(x):\n    return A().g(x)",
    "class A:\n    import math as m_\n    for i_ in range(3):\n        t_ = i_\n    def g(self):\n"
    "        import sys as s_\n        return s_, self.m_, self.t_\ndef f(x):\n    return A().g()",
    # Keywords, fields and patterns.
    "class A:\n    def __init__(self, v_):\n        self.w_ = v_\nclass B(A):\n    def g(self, u_):\n"
    "        return u_\ndef f(x):\n    return B(v_=x).w_, A(v_=1).w_, B(1).g(u_=2)",
    "class A:\n    def __init__(self, v_):\n        self.w_ = v_\n    @classmethod\n    def g(cls_, q_):\n"
    "        return cls_(v_=q_)\nclass B:\n    def __init__(self, v):\n        self.u_ = v\n"
    "def f(x):\n    return A.g(x).w_, B(v=1).u_",
    "from dataclasses import dataclass\n@dataclass\nclass A:\n    a_: int\n    b_: int\n"
    "def f(x):\n    return A(a_=x, b_=2).b_",
    "class A:\n    def __init__(self, v_):\n        self.w_ = v_\ndef f(x):\n    match A(x):\n        case A(w_=m_):\n"
    "            return m_",
    "def f(x):\n    g_ = lambda a_, b_: a_ - b_\n    return g_(b_=x, a_=1)",
    # Underscores that mean nothing to Python.
    "class A:\n    def __init__(self, q):\n        self.__w_ = q\n    def __g_(self):\n        return self.__w_\n"
    "    def __h__(self):\n        return self.__g_()\ndef f(x):\n    return A(x).__h__()",
]


@pytest.mark.parametrize("program", CLASSES)
def test_names_that_are_bound_inside_classes_do_not_count(program):
    own = set(re.findall(r"\b\w+_\b", program)) - {"__init__"}
    for renamed in [*({name} for name in own), own]:
        other = re.sub(r"\w+", lambda word, renamed=renamed: "__x" * (word[0] in renamed) + word[0], program)
        assert other != program
        assert forms(other)[0] == forms(program)[0]


LENDING = (
    "def A(x):\n    def g():\n        def h():\n            nonlocal n\n            n += x\n        n = 1\n"
    "        return h() or n\n    def k():\n        def h():\n            nonlocal {0}\n            {0} += x\n"
    "        {0} = 1\n        return h() or {0}\n    return g() + k()"
)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # What Python computes around a function, lambda or comprehension does not see the names inside.
        (
            "class A:\n    n = 3\n    def __call__(s, n=n): return n",
            "class A:\n    m = 3\n    def __call__(s, n=m): return n",
        ),
        ("def A(x):\n    return [lambda x=x: x]", "def A(x):\n    return [lambda y=x: y]"),
        ("def A(x):\n    def g(x=x): return x\n    return g()", "def A(x):\n    def g(y=x): return y\n    return g()"),
        ("def A(x):\n    return [x for x in x]", "def A(x):\n    return [y for y in x]"),
        # One name for a parameter and an attribute.
        ("class A:\n    def __init__(self, v): self.v = v", "class A:\n    def __init__(self, w): self.v = w"),
        # Two functions that lend a name to a function inside.
        (LENDING.format("n"), LENDING.format("m")),
    ],
)
def test_one_name_in_two_scopes_is_two_names(one, other):
    one, other = (f"{each}\ndef f(x):\n    return A(x), A.v" for each in (one, other))
    assert forms(one)[0] == forms(other)[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("class A:\n    'A note.'\n    v = 1", "class A:\n    'Another.'\n    v = 1"),
        ("class A:\n    v = 1\n    def __g(self): return 2", "class A:\n    v = 1"),
        ("class A:\n    v = 1\n    def __g__(self): return 2", "class A:\n    v = 1"),
    ],
)
def test_what_a_class_holds_and_nobody_can_ask_for_does_not_count(one, other):
    one, other = (f"{each}\ndef f(x):\n    return A().v" for each in (one, other))
    assert forms(one) == forms(other)


PICK = "class A:\n    n = 5\n    def g(self, a, b=3):\n        return {}\n"
MATCH = (
    "class A:\n    def __init__(self):\n        self.v = 1\n        self.w = 2\n    def g(self, x):\n"
    "        match self:\n            case A({}=m):\n                return m, self.w\n"
)
INNER = (
    "class A:\n    def g(self, x):\n        class B:\n            def h(me):\n                return {}\n"
    "        return B().h()\n"
)
STACK = (
    "class A:\n    def __init__(self):\n        self.rows = []\n    def add(self, v):\n        self.rows.append(v)\n"
)
ADDS = "    def g(self, x):\n        {}\n        return self.rows\n"
SUPER = STACK + "class B(A):\n    def put(self, v):\n        super().add(v)\n" + ADDS + "A = B\n"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PICK.format("a"), PICK.format("b")),
        (PICK.format("n"), PICK.format("self.n")),
        (INNER.format("me"), INNER.format("self")),
        # A class body sees its own names. A comprehension in it does not, but for the first iterable.
        ("class A:\n    n = 5\n    ys = [n, n]\n", "class A:\n    n = 5\n    ys = [n for _ in range(2)]\n"),
        ("class A:\n    n = 5\n    ys = [v for v in n]\n", "class A:\n    m = 5\n    ys = [v for v in n]\n"),
        (PICK.replace("b=3", "b=n").format("b"), PICK.replace("b=3", "b=n").format("b").replace("n = 5", "m = 5")),
        # A method that changes its object for another one.
        ((STACK + ADDS).format("self.add(x)"), (STACK + ADDS).format("pass")),
        (SUPER.format("self.put(x)"), SUPER.format("pass")),
        *[
            tuple(
                STACK + ADDS.format(each) + "class B:\n    def add(self, v): pass\n"
                for each in ("self.add(x)", "pass")
            )
        ],
        # A pattern reads an attribute.
        (MATCH.format("v"), MATCH.format("w")),
        (MATCH.format("v"), MATCH.format("v").replace("= 1", "= 3")),
        # `:=` in a comprehension binds a name outside of it.
        *[
            tuple(
                f"class A:\n    def g(self, x):\n        t = 0\n        {each}\n        return t\n"
                for each in ("[t := t + v for v in x]", "pass")
            )
        ],
    ],
)
def test_classes_that_differ_have_different_forms(one, other):
    one, other = (f"n = 1\n{each}def f(x):\n    return A().g(x), A.ys" for each in (one, other))
    assert forms(one)[0] != forms(other)[0]


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


def test_many_functions_of_one_name_that_are_called_often_cost_little():
    methods = "".join(f"    def g(self, a, b, c, d):\n        a.append({i})\n" for i in range(90))
    program = f"class A:\n{methods}def f(x):\n    a = A()\n" + "    a.g(x, x, x, x)\n" * 150 + "    return x"
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
