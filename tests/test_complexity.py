"""The four curriculum measures on programs counted by hand, and what coverage tells apart."""

from __future__ import annotations

import gc
import json
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_populora.tasks.python.complexity import Coverage, hash_shape, measure
from trl_populora.tasks.python.programs import ProgramError, parse_bounded


FLAT = "def f(x):\n    return x + 1"
NESTED = '''
import math

def helper(a, *rest, key=None):
    """Docstring
    of two lines."""
    return [b for b in rest if b and a or key]   # a comment

def f(x):

    total = 0
    # a comment
    for i in range(
        x
    ):
        if i % 2:
            total += i if i > 3 else -i
        elif i == 4:
            while total:
                total -= 1
        else:
            pass
    try:
        assert total
    except ValueError as error:
        (lambda q: q)(error)
    match total:
        case 1:
            return 0
        case other:
            return other
'''


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        # Module > FunctionDef > Return > BinOp > Name
        (FLAT, {"ast_depth": 4, "cyclomatic": 1, "lines": 2, "variables": 1}),
        ("def f():\n    pass", {"ast_depth": 2, "cyclomatic": 1, "lines": 2, "variables": 0}),
        ("def f(x): return x", {"ast_depth": 3, "cyclomatic": 1, "lines": 1, "variables": 1}),
        ("def f(x):\n    return x and x and x or 1", {"ast_depth": 5, "cyclomatic": 4, "lines": 2, "variables": 1}),
        (
            "def f(x):\n    y = z = [x]\n    y[0] = 1\n    return z",
            {"ast_depth": 4, "cyclomatic": 1, "lines": 4, "variables": 3},
        ),
        # Comprehension 2 (for, if), and, or, for, if, elif, conditional, while, except, assert, one case: 1 each;
        # a rest key b x total i error q other. `else:`, `try:`, `)` and comments hold no node, `try` itself does.
        (NESTED, {"ast_depth": 8, "cyclomatic": 13, "lines": 22, "variables": 10}),
    ],
)
def test_measures_match_a_count_by_hand(program, expected):
    assert measure(program) == expected


def test_comments_docstrings_and_layout_do_not_count():
    padded = 'def f(x):\n    """A docstring."""\n\n    # a comment\n    return (\n        x + 1)\n'
    assert measure(padded) == measure(FLAT) | {"lines": 3}


def test_text_that_is_no_program_has_no_measures():
    with pytest.raises(ProgramError):
        measure("def f(:")


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        (FLAT, "def f(anything):\n    return anything + 25  # renamed", True),
        (FLAT, "def f(x):\n    return 1 + x", True),
        (FLAT, "def f(x):\n    return x - 1", False),
        (FLAT, "def f(x):\n    return -x + 1", False),
        ("def f(x):\n    return sum(x)", "def f(x):\n    return max(x)", False),
        ("def f(x):\n    return x.pop()", "def f(x):\n    return x.copy()", False),
        (
            "def f(x):\n    if x:\n        x += 1\n    x *= 2\n    return x",
            "def f(x):\n    if x:\n        x += 1\n        x *= 2\n    return x",
            False,
        ),
        ("def f(x):\n    a = 1\n    b = [x]\n    return a", "def f(x):\n    a = [x]\n    b = 1\n    return a", False),
        ("def f(x):\n    return x < 1", "def f(x):\n    return x > 1", False),
    ],
)
def test_a_signature_is_a_shape(one, two, same):
    assert (hash_shape(parse_bounded(one)) == hash_shape(parse_bounded(two))) is same


SHAPES = [
    f"def f(x):\n    return {expression}" for expression in ("x + 1", "x * 2", "[x]", "x[0]", "-x", "x, x", "not x")
]


@settings(deadline=None)
@given(st.lists(st.integers(0, len(SHAPES) - 1), max_size=30))
def test_coverage_counts_shapes_and_their_entropy(drawn):
    coverage = Coverage()
    for index in drawn:
        coverage.add(hash_shape(parse_bounded(SHAPES[index])))
    counts = [drawn.count(index) for index in set(drawn)]
    entropy = -sum(count / len(drawn) * math.log2(count / len(drawn)) for count in counts)
    metrics = coverage.metrics()
    assert set(metrics) == {"curriculum/coverage", "curriculum/entropy"}
    assert metrics["curriculum/coverage"] == len(counts)
    assert metrics["curriculum/entropy"] == pytest.approx(entropy, abs=1e-9)


def test_coverage_resumes_bit_for_bit():
    straight, first = Coverage(), Coverage()
    for index in (0, 1, 0, 2, 0, 1, 1, 3):
        straight.add(hash_shape(parse_bounded(SHAPES[index])))
        first.add(hash_shape(parse_bounded(SHAPES[index])))
    resumed = Coverage()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for index in (4, 4, 0):
        straight.add(hash_shape(parse_bounded(SHAPES[index])))
        resumed.add(hash_shape(parse_bounded(SHAPES[index])))
    assert resumed.metrics() == straight.metrics()
    assert resumed.state_dict() == straight.state_dict()


@pytest.fixture
def no_collector():
    """The collector's passes depend on what other tests have left, not on what is timed."""
    gc.disable()
    yield
    gc.enable()


def test_cost_is_linear_in_program_size(no_collector):
    def seconds(repeats):
        program = "def f(x):\n" + "    if x > 1: x = [y for y in x]\n" * repeats
        best = math.inf
        for _ in range(7):
            start = time.thread_time()  # CPU time: other processes do not count
            measure(program)
            hash_shape(parse_bounded(program))
            best = min(best, time.thread_time() - start)
        return best

    assert seconds(200) < 4 * 10 * seconds(20)  # ten times the size; quadratic cost would be a factor of 100
