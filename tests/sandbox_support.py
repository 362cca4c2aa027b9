"""Looks at the host that the sandbox tests share."""

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path


ROOT = Path(__file__).parent.parent


def sessions_alive(sessions):
    """Processes of these sessions; every zygote leads one, and nothing under it can leave it."""
    alive = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) in sessions and fields[0] != "Z":
                alive.append(path.parent.name)
    return alive


def descriptors():
    """How many descriptors this process holds."""
    return len(os.listdir("/proc/self/fd"))


def wait_until(condition, seconds=30.0):
    """Wait for something that must come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def run_elsewhere(python, *arguments):
    command = [python, "-B", str(ROOT / "tests" / "sandbox_elsewhere.py"), str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check(found):
    assert found["unexpected"] == []
    assert found["reached"] == []
    assert found["leftovers"] == []
    assert found["respawns"] == {}
    assert found["count"] > 300
