"""Answers without a look at the task: of the right form, repeatable, and right as often as any input is."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from trl_populora.sandbox import Sandbox
from trl_populora.sandbox.values import decode, encode
from trl_populora.step.referee import Referee
from trl_populora.tasks import CodeF, CodeI, CodeO, Task
from trl_populora.tasks.python.kinds import GUESSES, MAX_SIZE, guess_blindly


VALUES = [
    3,
    -7,
    0,
    2.5,
    True,
    "abc",
    "",
    b"xy",
    [1, 2, 3],
    [],
    (1, "a"),
    {"k": [1]},
    {1, 2},
    frozenset({"a"}),
    None,
    1j,
]


def form(value):
    if isinstance(value, tuple):
        return tuple(map(form, value))
    return type(value)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_guess_has_the_form_of_the_value(value):
    rng = random.Random(0)
    drawn = [guess_blindly(value, rng) for _ in range(50)]
    assert {form(each) for each in drawn} == {form(value)}
    assert all(encode(each) for each in drawn), "plain data"
    fixed = value in (None, 1j) or value == []
    assert len({encode(each) for each in drawn}) == 1 if fixed else len({encode(each) for each in drawn}) > 1


@pytest.mark.parametrize("depth", [10, 14, 20, 60])
@pytest.mark.parametrize("members", [1, 3])
def test_a_guess_of_nested_lists_is_made_in_no_time(depth, members):
    given = 5
    for _ in range(depth):
        given = [given, *[0] * (members - 1)]
    start = time.thread_time()
    for seed in range(100):
        assert len(encode((guess_blindly(given, random.Random(seed)),))) < 20 * MAX_SIZE
    assert time.thread_time() - start < 5.0
    text = encode((given,))
    task = Task("code_i", "def f(a):\n    return a", (text,), (encode(given),))
    assert len(CodeI().guesses(task)) == GUESSES


@pytest.mark.parametrize(
    "value", [float("inf"), float("nan"), 1e308, 10**399, -(10**399), {(1, 2): [3]}, {frozenset([1])}]
)
def test_there_are_guesses_for_every_literal(value):
    task = Task("code_i", "def f(a):\n    return a", (encode((value,)),), (encode(value),))
    assert len(CodeI().guesses(task)) == GUESSES


def test_guesses_of_a_task_are_the_same_each_time_and_fit_its_program():
    task = Task("code_i", "def f(a, b):\n    return a", (encode((3, ["x"])),), ("3",))
    assert CodeI().guesses(task) == CodeI().guesses(task)
    for attempt in CodeI().guesses(task):
        a, b = decode(attempt.answer)
        assert attempt.well_formed
        assert (type(a), type(b)) == (int, list)
    assert CodeO().guesses(task) == CodeF().guesses(task) == []


@pytest.mark.parametrize(
    ("program", "given", "least", "most"),
    [
        ("def f(a):\n    return 7", 5, 1.0, 1.0),
        ("def f(a):\n    return a % 2", 5, 0.1, 0.9),
        ("def f(a):\n    return a * a + a", 50, 0.0, 0.125),
        ("def f(a):\n    if a != 50: raise ValueError\n    return a", 50, 0.0, 0.125),
        ("def f(a):\n    while a != 50: a = a\n    return a", 50, 0.0, 0.125),
    ],
)
def test_chance_is_the_share_of_inputs_that_hit(program, given, least, most):
    with Sandbox(workers=1) as sandbox:
        referee = Referee({"code_i": CodeI(), "code_o": CodeO()}, sandbox, "compact")
        scope: dict = {}
        exec(program, scope)
        task = Task("code_i", program, (encode((given,)),), (encode(scope["f"](given)),))
        other = Task("code_o", program, task.inputs, task.outputs)
        chance, of_code_o = referee.chances([task, other])
    assert least <= chance <= most
    assert of_code_o == 0


def test_a_tuple_that_is_copied_without_its_brackets_is_a_copy():
    program = "def f(a, b):\n    return (min(a, b), max(a, b))"
    task = Task("code_i", program, (encode((3, 2)),), (encode((2, 3)),))
    kind = CodeI()
    kind.refuses_copies = True
    assert {each.answer for each in kind.copies(task)} >= {kind.read_answer("2, 3"), kind.read_answer("(2, 3)")}
    with Sandbox(workers=1) as sandbox:
        assert any(Referee({"code_i": kind}, sandbox, "turns").try_answers("copies", [task])[0])


def test_a_chance_of_numpys_type_becomes_pythons_which_checkpoints_hold():
    class Even(CodeO):
        def chance(self, task):
            return np.mean([0.25, 0.75])

    with Sandbox(workers=1) as sandbox:
        referee = Referee({"code_o": Even()}, sandbox, "compact")
        (chance,) = referee.chances([Task("code_o", "def f(a):\n    return a", (encode((1,)),), ("1",))])
    assert (type(chance), chance) == (float, 0.5)
