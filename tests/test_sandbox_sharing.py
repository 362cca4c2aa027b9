"""One pool, several real processes: same verdicts, no second pool, and an end for everybody when one of them dies."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_populora.sandbox import Gold, Job, Limits, Sandbox, SandboxClient
from trl_populora.sandbox.sharing import _pack
from trl_populora.sandbox.values import encode

from .sandbox_support import descriptors, sessions_alive, wait_until


ROOT = Path(__file__).parent.parent
ONE = (encode((1,)),)
LOOP = "def f(x):\n    while True: pass"
JOBS = [
    Job("def f(x, y): return [x, {y: 1.5}]", (encode((1, "a")), encode((float("nan"), b"b"))), runs=2),
    Job("def f(x): return {'a', 'b', 'c'}", ONE, runs=2),
    Job("def f(x): return 1 / 0", ONE),
    Job("import socket"),
    Job("def f(x): return 'é' * x", ONE),
    Job("f = '\ud800\udc00'"),
    Job("def g(x): return x * 2", ONE, function="g"),
    Job(LOOP, ONE, limits=Limits(wall_seconds=0.2)),
    Job("def f(x): return 'x' * 1000", ONE, limits=Limits(output_bytes=100)),
    Job("def f(x): return x", ONE * 3, gold=Gold(("1", "3", "1"))),
    Job("def f(x): return x", ONE * 3, gold=Gold(("1", "true", "1.0"))),
]
OTHER = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.test_sandbox_sharing import JOBS, LOOP, ONE, SandboxClient, plain
from trl_populora.sandbox import Job, Limits
box = SandboxClient(sys.argv[1])
"""


def plain(verdicts):
    return [[each.status.value, each.reason, list(each.outputs)] for each in verdicts]


def other_process(box, program, **options):
    command = [sys.executable, "-c", OTHER + program, box.share()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


@pytest.fixture(scope="module")
def box():
    with Sandbox(workers=2, limits=Limits(wall_seconds=20.0)) as box:
        yield box


def test_two_processes_get_the_same_verdicts_from_one_pool(box):
    with other_process(box, "print(json.dumps([plain(box.run(JOBS)), box.level, box.workers]))") as other:
        mine = plain(box.run(JOBS))
        theirs, level, workers = json.loads(other.stdout.read())
    assert theirs == mine
    assert [each[0] for each in mine] == (
        ["ok", "ok", "error", "policy", "ok", "error", "ok", "timeout", "bad_output", "ok", "ok"]
    )
    assert [len(each[2]) for each in mine[-2:]] == [2, 3]
    assert (level, workers) == (box.level, box.workers)
    # All of what both have run ran in the sessions of this process's zygotes.
    assert other.wait(30) == 0


def test_a_client_starts_no_process_and_leaves_nothing(box):
    wait_until(lambda: all(each.healthy for each in box._supervisor._workers()))
    # The lines of the test before may still be ending.
    wait_until(lambda: all(each.name != "sandbox line" for each in threading.enumerate()))
    before, threads, zygotes = descriptors(), threading.active_count(), box.report()["zygotes"]
    with SandboxClient(box.share()) as client:
        usage = client.run(JOBS[2:5])[2]
        assert min(usage.cpu_seconds, usage.wall_seconds, usage.peak_bytes) > 0
    assert box.report()["zygotes"] == zygotes
    wait_until(lambda: threading.active_count() == threads)
    assert descriptors() == before
    with pytest.raises(RuntimeError, match="closed"):
        client.submit(JOBS[0])
    client.close()


def test_the_death_of_a_client_frees_the_pool():
    with Sandbox(workers=1, limits=Limits(wall_seconds=1.0)) as box:
        program = "futures = [box.submit(Job(f'{LOOP}  # {i}', ONE)) for i in range(300)]; print(1, flush=True)\n"
        other = other_process(box, program + "import time; time.sleep(600)")
        assert other.stdout.readline()
        wait_until(lambda: box._supervisor.running)
        other.kill()
        start = time.monotonic()
        assert box.run([Job("def f(x): return 2", ONE)])[0].outputs == ("2",)
        wait_until(lambda: not box._supervisor.running and not box._supervisor.unresolved, seconds=60)
        assert time.monotonic() - start < 60, "300 loops of a second each would take longer"
        other.wait()
        other.stdout.close()


@pytest.mark.parametrize("ending", ["kill", "close", "fork"])
def test_the_end_of_the_owner_is_an_error_that_names_it(ending):
    program = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from trl_populora.sandbox import Sandbox
box = Sandbox(workers=1)
print(box.share(), *[each.process.pid for each in box._supervisor._workers()], flush=True)
if sys.stdin.read(1) == "f":  # a fork that outlives its parent must not keep the line open
    os.fork() or os.read(0, 1)
    os._exit(0)
box.close()
sys.stdin.read(1)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        address, *sessions = owner.stdout.readline().split()
        with SandboxClient(address) as client:
            futures = [client.submit(Job(f"{LOOP}  # {i}", ONE, limits=Limits(wall_seconds=600))) for i in range(5)]
            assert not wait(futures, timeout=0.5).done
            if ending == "kill":
                owner.send_signal(signal.SIGKILL)
            else:
                owner.stdin.write("f" if ending == "fork" else "x")
                owner.stdin.flush()
            for future in futures:
                with pytest.raises(RuntimeError, match=rf"closed.*-{owner.pid}-"):
                    future.result(60)
            with pytest.raises(RuntimeError, match="closed"):
                client.submit(Job(LOOP, ONE))
        owner.kill()
    wait_until(lambda: not sessions_alive(set(map(int, sessions))))
    with pytest.raises(RuntimeError, match="no sandbox is shared"):
        SandboxClient(address)


def test_a_closed_pool_cannot_be_shared():
    box = Sandbox(workers=1)
    box.close()
    with pytest.raises(RuntimeError, match="closed"):
        box.share()


def test_a_fork_cannot_use_the_client_and_does_not_hold_the_line(box):
    program = """
import os
tried, tell = os.pipe()
if os.fork() == 0:
    try:
        box.submit(JOBS[0])
        print("accepted", flush=True)
    except RuntimeError:
        print("refused", flush=True)
    os.write(tell, b"!")
    os.read(0, 1)  # ends with the test
    os._exit(0)
os.read(tried, 1)
os._exit(0)
"""
    lines = len(box._server.lines) if box._server else 0
    with other_process(box, program, stdin=subprocess.PIPE) as other:
        assert other.stdout.readline() == "refused\n"
        other.wait(60)
        wait_until(lambda: len(box._server.lines) <= lines)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_turned_away(box):
    program = """
import os, socket, sys
os.setresuid(1000, 1000, 1000)
line = socket.socket(socket.AF_UNIX)
line.connect("\\0" + sys.argv[1])
line.settimeout(10)
print(repr(line.recv(100)))
"""
    done = subprocess.run([sys.executable, "-c", program, box.share()], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "b''", done
    assert SandboxClient(box.share()).run(JOBS[:1])[0].ok


def connection_to(box):
    line = socket.socket(socket.AF_UNIX)
    line.connect(f"\0{box.share()}")
    line.settimeout(20)
    size = int.from_bytes(line.recv(4, socket.MSG_WAITALL), "little")
    assert json.loads(line.recv(size, socket.MSG_WAITALL))[0]["level"] == box.level
    return line


WRONG = [
    b"\xff\xff\xff\xff",
    b"\x05\x00\x00\x00hello",
    _pack([]),
    _pack([1, "f = abs", [], 1]),
    _pack([1, "f = abs", [1], 1, [2.0, 0.02, 1 << 29, 65536, 262144], "f"]),
    _pack([1, "f = abs", [], 99, [2.0, 0.02, 1 << 29, 65536, 262144], "f"]),
    _pack([1, "f = abs", [], 1, [-2.0, 0.02, 1 << 29, 65536, 262144], "f"]),
    _pack([1, 3, [], 1, [2.0, 0.02, 1 << 29, 65536, 262144], "f"]),
]


@pytest.mark.parametrize("data", WRONG, ids=range(len(WRONG)))
def test_what_is_no_job_ends_the_connection_and_nothing_else(box, data):
    with connection_to(box) as line:
        line.sendall(data)
        assert line.recv(100) == b""
    assert box.run(JOBS[:1])[0].ok


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=80), st.booleans())
def test_garbage_never_disturbs_the_pool(box, data, framed):
    with connection_to(box) as line:
        line.sendall(len(data).to_bytes(4, "little") + data if framed else data)
        line.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert line.recv(100) == b""
    assert box._server.thread.is_alive()
