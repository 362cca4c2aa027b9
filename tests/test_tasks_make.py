"""Seeds are made of values, and the program says what is true about them."""

from __future__ import annotations

import pytest

from trl_populora.sandbox import Sandbox
from trl_populora.sandbox.values import encode
from trl_populora.tasks import Task, TaskArchive, make_task


KEYS = "def f(d, n):\n    return [*d][:n]"


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=1, allow_weak=True) as box:
        yield box


def test_a_task_is_made_of_values(sandbox):
    task = make_task("code_o", KEYS, inputs=[({"b": 1, "a": 2}, 1)], sandbox=sandbox)
    assert task == Task("code_o", KEYS, ('["t",["d","b",1,"a",2],1]',), (encode(["b"]),))
    assert list(TaskArchive.from_dataset([task.to_record()])) == [task]
    task = make_task("code_f", KEYS, [({}, 1), ({1: 1}, 1)], message="the first keys", visible=1, sandbox=sandbox)
    assert (task.outputs, task.visible) == (('["l"]', '["l",1]'), 1)
    assert make_task("code_f", KEYS, [({}, n) for n in range(5)], sandbox=sandbox).visible == 2, "half of them"


@pytest.mark.parametrize("given", ["ab", 3, {"a": 1}])
def test_arguments_that_are_no_tuple_are_refused(sandbox, given):
    """Text would be taken for one argument per letter."""
    with pytest.raises(TypeError, match=r"a tuple of arguments for each call, got .*\(.*,\)` for"):
        make_task("code_o", "def f(*a):\n    return len(a)", [given], sandbox=sandbox)


@pytest.mark.parametrize(("kind", "calls"), [("code_o", 0), ("code_o", 2), ("code_i", 0), ("code_f", 1)])
def test_another_number_of_calls_than_the_kind_has_is_refused(sandbox, kind, calls):
    wanted = "at least two calls" if kind == "code_f" else "one call"
    with pytest.raises(ValueError, match=f"kind '{kind}' has {wanted}, and `inputs` holds {calls}"):
        make_task(kind, KEYS, [({}, 1)] * calls, sandbox=sandbox)


@pytest.mark.parametrize(
    ("program", "reason"),
    [("def f(x) return x", "SyntaxError"), ("def g(x): return x", "no function 'f'"), (KEYS, "missing 1 required")],
)
def test_what_does_not_run_makes_no_task(sandbox, program, reason):
    with pytest.raises(ValueError, match=f"no task can be made of .*error .*{reason}"):
        make_task("code_o", program, [(1,)], sandbox=sandbox)
