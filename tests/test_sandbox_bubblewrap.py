"""The hard mode, with the real `bwrap`: one wall more, checked from inside, and refused clearly where it cannot be."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trl_populora.sandbox import Job, Limits, Sandbox
from trl_populora.sandbox import bubblewrap as bubblewrap_module
from trl_populora.sandbox.values import encode

from .sandbox_cases import PWNED, process_and_escape
from .sandbox_support import check, run_elsewhere, sessions_alive


ROOT = Path(__file__).parent.parent
ONE = (encode((1,)),)


def works():
    try:
        bubblewrap_module.prepare(ROOT)
    except RuntimeError:
        return False
    return True


needs_bwrap = pytest.mark.skipif(not works(), reason="bwrap is not installed, or not permitted on this host")


@needs_bwrap
def test_programs_run_inside_and_nothing_is_left():
    with Sandbox(workers=2, bubblewrap=True) as box:
        report = box.report()
        assert report["layers"]["bubblewrap"] == ""
        assert all(report["refused"].values())
        sessions = {each.process.pid for each in box._supervisor._workers()}
        loop = Job("def f(x):\n    while True: pass", ONE, limits=Limits(wall_seconds=0.2))
        verdicts = box.run([Job("import json\ndef f(x): return json.dumps([x])", ONE, runs=2), loop])
        assert [verdict.status for verdict in verdicts] == ["ok", "timeout"]
        assert verdicts[0].outputs == (encode("[1]"),)
    assert sessions_alive(sessions) == []


@needs_bwrap
def test_the_walls_hold_inside_without_the_soft_layer():
    cases = [*process_and_escape.process, *process_and_escape.escape]
    jobs = [
        Job(case.program, tuple(map(encode, case.calls)), limits=Limits(wall_seconds=0.4, memory_bytes=case.memory))
        for case in cases
    ]
    with Sandbox(workers=2, bubblewrap=True, soft=False) as box:
        verdicts = box.run(jobs)
        sessions = {each.process.pid for each in box._supervisor._workers()}
        assert box.report()["respawns"] == {}
    assert [str(case) for case, verdict in zip(cases, verdicts, strict=True) if encode(PWNED) in verdict.outputs] == []
    assert sessions_alive(sessions) == []


@needs_bwrap
def test_an_ordinary_user_gets_it_too():
    found = run_elsewhere(sys.executable, "user-bubblewrap")
    assert found["uid"] != 0
    assert found["layers"]["bubblewrap"] == ""
    check(found)


@needs_bwrap
def test_its_folder_holds_python_and_nothing_of_the_user(tmp_path):
    (tmp_path / "secret").write_text("secret")
    look = f"import os; print(os.path.exists({str(tmp_path)!r}), os.path.exists({str(Path.home() / '.bashrc')!r}))"
    command = [*bubblewrap_module.wrapping(ROOT / "trl_populora" / "sandbox"), sys.executable, "-S", "-c", look]
    done = subprocess.run(command, capture_output=True, text=True, env={}, check=True)
    assert done.stdout.split() == ["False", "False"]


@needs_bwrap
def test_a_zygote_that_is_not_really_wrapped_counts_for_nothing(monkeypatch):
    monkeypatch.setattr(bubblewrap_module, "wrapping", lambda room: [])
    with pytest.raises(RuntimeError, match="level C.*bubblewrap: still in the trainer's namespaces: ipc, mnt"):
        Sandbox(workers=1, bubblewrap=True, without=("namespaces",))


def test_a_missing_program_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"`bwrap`.*apt install bubblewrap.*or leave"):
        Sandbox(workers=1, bubblewrap=True)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
def test_a_host_that_forbids_namespaces_is_named():
    program = f"""
import ctypes, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from sandbox_elsewhere import _filter
from trl_populora.sandbox import Sandbox
filter = _filter({str(ROOT)!r})
assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0
filter.install()
try:
    Sandbox(workers=1, bubblewrap=True)
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "`bwrap` does not work on this host: bwrap: " in done.stdout, done
    assert "user namespaces" in done.stdout
