"""`populora sandbox-check`: how far this host confines programs, layer by layer, and how fast."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from .jobs import Job
from .pool import Sandbox
from .values import encode


_MEANING = {
    "A": "namespaces, chroot, a user of its own, Landlock and seccomp all hold",
    "B": "seccomp holds, with an unprivileged user or Landlock: no files, no network, no processes",
    "C": "not confined; training refuses unless `allow_weak` is set",
}
_PURPOSE = {
    "namespaces": "own network, mounts, processes, IPC and host name",
    "chroot": "an empty, deleted folder as root",
    "uid": "an unprivileged user and no capability",
    "limits": "no files, no core dumps, few descriptors",
    "no_new_privs": "no gain by exec, not traceable",
    "landlock": "no file, TCP port, abstract socket or outside signal, as far as the kernel's version goes",
    "seccomp": "an allow-list of system calls for computing",
}


def measure(sandbox: Sandbox, seconds: float = 2.0) -> float:
    """Small programs with one input and one run, per second."""
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        jobs = [Job(f"def f(x):\n    return x + {done + i}\n", (encode((i,)),)) for i in range(100)]
        done += sum(verdict.ok for verdict in sandbox.run(jobs))
    return done / (time.perf_counter() - start)


def check(write: Callable[[str], object] = sys.stdout.write, seconds: float = 2.0) -> str:
    """
    Write the report and return the level, `"A"`, `"B"` or `"C"`.

    Args:
        write (`Callable`, *optional*): Takes the lines.
        seconds (`float`, *optional*, defaults to `2.0`): How long to measure the speed.
    """
    with Sandbox(allow_weak=True) as sandbox:
        report = sandbox.report()
        speed = measure(sandbox, seconds)
        write(f"sandbox level {report['level']}: {_MEANING[report['level']]}\n\nlayers\n")
        for name, reason in report["layers"].items():
            held = "yes" if not reason else f"no   ({reason})"
            write(f"  {name:<14}{held:<5}{_PURPOSE.get(name, '') if not reason else ''}\n")
        write("\ntried from inside a program's process\n")
        for name, refused in report["refused"].items():
            write(f"  {name:<26}{'refused' if refused else 'POSSIBLE'}\n")
        write(f"\n{speed:.0f} programs per second on {sandbox.workers} workers\n")
    return report["level"]


def main(arguments: Sequence[str] = ()) -> int:
    """Exit status 0 for level A or B, 1 for C, 2 when no program can be run at all."""
    parser = argparse.ArgumentParser(
        prog="populora sandbox-check", description="How well this host confines programs."
    )
    parser.parse_args(list(arguments))
    try:
        return 1 if check() == "C" else 0
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 2
