"""Processes that end with this one: the server and one worker per contender."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


# The kernel ends the new process with this one, however this one ends; then the command takes its place.
_TIED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def start(arguments: Sequence[str], log: Path, **environment: str) -> subprocess.Popen:
    """Starts Python with these arguments as the leader of a process group that ends with this process."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-c", _TIED, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )


def end(process: subprocess.Popen, seconds: float = 20.0) -> None:
    """Ends a process that [`start`] started, and its group with it."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# As a traceback ends, after what vLLM's log puts before it; an error that a warning mentions is none. pydantic counts
# its errors in the first line and says what they are in the next ones.
_ENDS_IN = re.compile(
    r"^(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?\s*([\w.]*(?:Error|Exception): (?!\d+ validation)\S.*|Value error, \S.*)",
    re.MULTILINE,
)


def tell_end(log: Path, number: int = 15) -> str:
    """
    Why a process ended, from what it printed: the first error that it names, because later ones only follow from it,
    or else its last lines.
    """
    text = log.read_text(errors="replace")
    error = _ENDS_IN.search(text)
    return error.group(1) if error else "\n".join(text.splitlines()[-number:])
