"""Hostile, degenerate and benign programs: no unexpected verdict, nothing reached, nothing left behind.

The same programs run a second time with the soft layer off, when every module can be imported and only the walls
stand.
"""

import contextlib
import os
import socket
from pathlib import Path

import pytest

from trl_populora.sandbox import Job, Limits, Sandbox
from trl_populora.sandbox.values import decode, encode, equal

from .sandbox_cases import PWNED, benign, determinism_and_state, forge_and_output, process_and_escape, time_and_memory
from .sandbox_support import sessions_alive


pytestmark = pytest.mark.early
CASES = [
    *time_and_memory.time,
    *time_and_memory.memory,
    *process_and_escape.process,
    *process_and_escape.escape,
    *forge_and_output.forge,
    *forge_and_output.output,
    *determinism_and_state.determinism,
    *determinism_and_state.state,
    *benign.benign,
]
BY_NAME = {str(case): case for case in CASES}
CANARY = Path("/tmp/sandbox_canary")
FORBIDDEN = Path("/tmp/sandbox_pwned")


def job(case, seconds=None):
    return Job(
        case.program,
        tuple(encode(call) for call in case.calls),
        runs=case.runs,
        limits=Limits(cpu_seconds=seconds or case.seconds, memory_bytes=case.memory),
    )


class Listener:
    """Counts what arrives on the loopback port that the hostile programs know."""

    port = 40999

    def __init__(self):
        self.arrived = 0
        self.sockets = []
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            each = socket.socket(socket.AF_INET, kind)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):  # taken by another run of these tests, which then does the counting
                each.bind(("127.0.0.1", self.port))
                if kind == socket.SOCK_STREAM:
                    each.listen()
            each.setblocking(False)
            self.sockets.append(each)

    def count(self):
        with contextlib.suppress(OSError):
            while self.sockets[0].accept():
                self.arrived += 1
        with contextlib.suppress(OSError):
            while self.sockets[1].recv(10):
                self.arrived += 1
        for each in self.sockets:
            each.close()
        return self.arrived


def run_all(soft, cases, seconds=None):
    """Verdicts by case name and what was found on the host afterwards."""
    os.environ["SANDBOX_SECRET"] = "SECRET"
    CANARY.mkdir(exist_ok=True)
    FORBIDDEN.unlink(missing_ok=True)
    listener = Listener()
    many_open = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]  # as in a trainer, so sockets have high numbers
    with Sandbox(workers=2, soft=soft) as box:
        first = [each.process.pid for each in box._supervisor._workers()]
        verdicts = box.run([job(case, seconds) for case in cases])
        (control,) = box.run([Job("def f(x): return x + 1", (encode((1,)),), runs=2)])
        sessions = {each.process.pid for each in box._supervisor._workers()} | set(first)
        report = box.report()
    for fd in many_open:
        os.close(fd)
    del os.environ["SANDBOX_SECRET"]
    effects = {
        "files": FORBIDDEN.exists(),
        "connections": listener.count(),
        "leftovers": sessions_alive(sessions),
        "respawns": report["respawns"],
        "killed their zygote": [
            str(case) for case, verdict in zip(cases, verdicts, strict=True) if "died twice" in verdict.reason
        ],
        "control": control.outputs != ("2",),
    }
    with contextlib.suppress(OSError):  # another run of these tests may use it as well
        CANARY.rmdir()
    return {str(case): verdict for case, verdict in zip(cases, verdicts, strict=True)}, effects


@pytest.fixture(scope="module")
def guarded():
    return run_all(True, CASES)


@pytest.fixture(scope="module")
def unguarded():
    return run_all(False, [case for case in CASES if case.group != "benign"], seconds=0.5)


def test_there_are_enough_programs():
    hostile = [case for case in CASES if case.group != "benign"]
    assert len(hostile) >= 150
    assert len(CASES) - len(hostile) >= 40
    assert len(BY_NAME) == len(CASES)


@pytest.mark.parametrize("name", BY_NAME)
def test_verdict_is_the_expected_one(guarded, name):
    case, verdict = BY_NAME[name], guarded[0][name]
    assert verdict.status in case.expected, verdict
    assert bool(verdict.outputs) == (verdict.status == "ok")
    assert bool(verdict.reason) == (verdict.status != "ok")
    assert verdict.reason.isprintable()
    assert encode(PWNED) not in verdict.outputs
    if case.outputs is not None and verdict.status == "ok":
        expected = tuple(encode(value) for value in case.outputs)
        assert verdict.outputs == expected
        assert all(equal(decode(a), b) for a, b in zip(verdict.outputs, case.outputs, strict=True))


NOTHING = {
    "files": False,
    "connections": 0,
    "leftovers": [],
    "respawns": {},
    "killed their zygote": [],
    "control": False,
}


def test_nothing_happened_outside(guarded):
    assert guarded[1] == NOTHING


@pytest.mark.parametrize("name", [name for name, case in BY_NAME.items() if case.group != "benign"])
def test_the_walls_hold_without_the_soft_layer(unguarded, name):
    verdict = unguarded[0][name]
    assert encode(PWNED) not in verdict.outputs, verdict
    assert "SECRET" not in str(verdict)


def test_nothing_happened_outside_without_the_soft_layer(unguarded):
    assert unguarded[1] == NOTHING
