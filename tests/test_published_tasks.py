"""`recipes/published_tasks.py`: programs that others published become held-out tasks."""

from __future__ import annotations

import functools
import http.server
import json
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from trl_populora.evaluate.held_out import load_held_out
from trl_populora.sandbox import Sandbox
from trl_populora.sandbox.values import decode
from trl_populora.start import make_kinds
from trl_populora.tasks.dataset import read_tasks


ROOT = Path(__file__).parents[1]
PUBLISHED = sorted((ROOT.parent / "shared" / "data").glob("azr_*.jsonl"))
sys.path.insert(0, str(ROOT / "recipes"))
import published_tasks  # noqa: E402


ROWS = [
    {"snippet": "def f(n):\n    return n * '-'", "input": "450", "output": "cut at 400"},
    {"snippet": "def f(word):\n    return word[::-1]", "input": "'abc'", "output": "'wrong'"},
    {"snippet": "def f(a):\n    return a[::-1]  # the same", "input": "'abc'", "output": ""},
    {"snippet": "def f(a, b):\n    return a + b", "inputs": ["f(3, 4)", "5, 6"], "outputs": ["7", "11"]},
    {"snippet": "def f(xs):\n    return (x for x in xs)", "input": "[1]", "output": ""},
    {"snippet": "import os\ndef f(x):\n    return os.getcwd()", "input": "1", "output": "'/'"},
    {"snippet": "def f(x):\n    return id(object())", "input": "1", "output": "1"},
    {"snippet": "def g(x):\n    return x", "input": "1", "output": "1"},
    {"snippet": "def f(x):\n    return x", "input": "range(3)", "output": "range(0, 3)"},
]


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=1) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def made(sandbox):
    return published_tasks.make_tasks(ROWS, sandbox)


def test_outputs_are_what_the_sandbox_finds_and_the_recorded_ones_are_not_believed(made):
    tasks, _ = made
    found = {(task.kind, decode(task.inputs[0]), decode(task.outputs[0])) for task in tasks}
    assert found == {
        (kind, given, output) for kind in ("code_o", "code_i") for given, output in ((("abc",), "cba"), ((3, 4), 7))
    }


def test_what_is_left_out_is_counted_by_its_reason(made):
    _, left_out = made
    refused = ("oversized", "duplicate", "bad_output", "no_function", "arguments")
    assert {reason: left_out[reason] for reason in refused} == dict.fromkeys(refused, 2)
    assert sum(left_out.values()) == 2 * len(ROWS) - 4


def test_the_order_does_not_depend_on_that_of_the_rows_and_the_kinds_take_turns(made, sandbox):
    tasks, _ = made
    again, _ = published_tasks.make_tasks(ROWS[::-1], sandbox)
    assert again == tasks
    assert [task.kind for task in tasks] == ["code_o", "code_i"] * 2


def test_the_command_writes_a_table_that_a_run_takes_as_held_out(tmp_path, monkeypatch, capsys, make_args):
    rows, out = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setattr(sys, "argv", ["published_tasks.py", str(rows), "--size", "3", "--out", str(out)])
    published_tasks.main()
    assert "3 of 4 tasks" in (printed := capsys.readouterr().out)
    assert "sha256" in printed
    args = make_args()
    held_out = load_held_out(read_tasks(str(out)), make_kinds(args), None, args)
    assert Counter(task.kind for task in held_out.tables[""]) == {"code_o": 2, "code_i": 1}


def test_more_tasks_than_there_are_is_one_line(tmp_path, monkeypatch, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROWS[1]))
    monkeypatch.setattr(sys, "argv", ["published_tasks.py", str(rows), "--size", "3"])
    with pytest.raises(SystemExit):
        published_tasks.main()
    assert "`--size 3` is more than the 2 tasks" in capsys.readouterr().err


def test_files_may_be_given_by_their_url(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            assert published_tasks.read_rows(f"http://127.0.0.1:{server.server_port}/rows.jsonl") == ROWS
        finally:
            server.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED, reason="the published files are not beside the clone")
def test_the_published_files_give_888_tasks(sandbox):
    rows = [row for path in PUBLISHED for row in published_tasks.read_rows(str(path))]
    tasks, left_out = published_tasks.make_tasks(rows, sandbox)
    assert Counter(task.kind for task in tasks) == {"code_o": 444, "code_i": 444}
    assert left_out == {"arguments": 56, "bad_output": 30, "duplicate": 30, "policy": 18, "oversized": 2}
