"""Hostile, degenerate and benign programs: no unexpected verdict, nothing reached, nothing left behind.

The same programs run a second time with the soft layer off, when every module can be imported and only the walls
stand.
"""

import contextlib
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from trl_populora.sandbox import Job, Limits, Sandbox
from trl_populora.sandbox.values import decode, encode, equal
from trl_populora.step.referee import GUESS_HEADROOM
from trl_populora.tasks import Attempt, CodeI, Proposal, Task

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
        self.bound = True
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            each = socket.socket(socket.AF_INET, kind)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                each.bind(("127.0.0.1", self.port))
                if kind == socket.SOCK_STREAM:
                    each.listen()
            except OSError:  # taken by another run of these tests, which then does the counting
                self.bound = False
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


def test_what_arrives_is_counted():
    listener = Listener()
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", Listener.port), timeout=5):
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"x", ("127.0.0.1", Listener.port))
    arrived = listener.count()
    if not listener.bound:
        pytest.skip(f"port {Listener.port} belongs to another run of these tests, which does the counting")
    assert arrived == 2


def run_all(soft, cases, seconds=None):
    """Verdicts by case name and what was found on the host afterwards."""
    os.environ["SANDBOX_SECRET"] = "SECRET"
    CANARY.mkdir(exist_ok=True)
    FORBIDDEN.unlink(missing_ok=True)
    listener = Listener()
    many_open = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]  # as in a trainer, so sockets have high numbers
    with Sandbox(workers=4, soft=soft) as box:
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
    # One that hardly uses its CPU time is ended at 120 times its limit: with .25 s after half a minute.
    return run_all(False, [case for case in CASES if case.group != "benign"], seconds=0.25)


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


# Returns all that a program finds about itself, from what lies below it to what the kernel tells.
SPY = """
import gc, os, posix, resource, sys
from collections import Counter

def f(x):
    try: raise ValueError
    except ValueError as error: frame = error.__traceback__.tb_frame.f_back
    below = []
    while frame:
        below.append([frame.f_code.co_name, sorted(frame.f_globals), sorted(frame.f_locals)])
        frame = frame.f_back
    held = []
    for fd in range(64):
        try: held.append([fd, os.read(fd, 0)])
        except OSError: pass
    limits = [resource.getrlimit(number) for number in range(16)]
    counts = Counter(type(each).__name__ for each in gc.get_objects())
    counts += Counter(type(each).__name__ for each in gc.get_referents(sys.modules["__main__"]))
    del counts["list"]  # every run but the first holds a list of blocks
    about = [sys.argv, sys.orig_argv, dict(os.environ), dict(posix.environ), sorted(sys.modules)]
    return [below, held, limits, sorted(counts.items()), about]
"""


def test_a_program_cannot_tell_what_its_run_is_for():
    kind, one = CodeI(), encode((1,))
    task = Task("code_i", SPY, (one,), ("1",))
    attempt = kind.trial(task, Attempt(True, one))
    runs = [kind.check(Proposal("code_i", SPY, (one,))), replace(attempt, headroom=GUESS_HEADROOM), attempt]
    with Sandbox(workers=2, soft=False) as sandbox:
        # Many at a time, so that other runs of all three sorts are under way in the same zygote.
        verdicts = sandbox.run(runs * 8)
    assert {verdict.status.value for verdict in verdicts} == {"ok"}, verdicts[0]
    assert len({verdict.outputs for verdict in verdicts}) == 1
    below, held, limits, _, (arguments, real_arguments, *environments, _) = decode(verdicts[0].outputs[0])
    names = ["answer", "arguments", "function"]
    assert below == [["<module>", names, names]]
    assert len(held) == 4, "its own socket and the three streams"
    assert arguments == real_arguments == ["program"]
    assert set().union(*environments) == {"TZ", b"TZ"}
    assert limits[0][0] > 3600, "seconds of CPU time, above all limits of jobs"


SEARCH = """
import collections

def f(x):
    sys = collections._sys
    ours = [name for name in sys.modules if "sandbox" in name or name in ("resource", "gc", "ctypes")]
    return ours + [name for name, module in sys.modules.items() if hasattr(module, "getrlimit")]
"""
# In each of these a method of the program's own runs while the sandbox looks at what the program gave.
LOOKS = [
    "class E(Exception):\n    def __str__(self): return look()\ndef f(x): raise E",
    "class M(type(Exception)):\n    __name__ = property(lambda self: look())\n"
    "class E(Exception, metaclass=M): pass\ndef f(x): raise E('e')",
    "class M(type):\n    __name__ = property(lambda self: look())\nclass V(metaclass=M): pass\ndef f(x): return V()",
    "class K:\n    def __hash__(self): return hash('f')\n"
    "    def __eq__(self, other): return look() and False\nglobals()[K()] = 1\ndef f(x): raise ValueError(said)",
]
LOOK = """
said = ""
def look():
    global said
    try: raise ValueError
    except ValueError as error: frame = error.__traceback__.tb_frame
    names = set()
    while frame:
        names |= set(frame.f_globals) if frame.f_globals is not globals() else set()
        frame = frame.f_back
    said = " ".join(sorted(names)) or "nothing"
    return said
"""


def test_a_program_finds_neither_our_modules_nor_its_limits():
    with Sandbox(workers=1) as sandbox:
        (verdict,) = sandbox.run([Job(SEARCH, (encode((1,)),))])
        assert verdict.outputs == ('["l"]',), verdict
        looks = sandbox.run([Job(LOOK + program, (encode((1,)),)) for program in LOOKS])
    assert [verdict.reason for verdict in looks] == [
        "E: answer arguments function",
        "E: e",
        "output 0: a value of type 'V' is not plain data",
        "ValueError: answer arguments function",
    ]
