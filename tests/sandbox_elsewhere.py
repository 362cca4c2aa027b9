"""Runs the hostile programs in a place of its own: another Python, or a process shut in like a default container.

    python sandbox_elsewhere.py FOLDER [container | user]

FOLDER is the repository. Needs the standard library only; prints one JSON object. As `container`, the process first
gives up what a default container gives up: it becomes uid 1000 without capabilities, and a seccomp filter refuses
namespaces, mounts, chroot, tracing, keys and, for good measure, Landlock. As `user` it only becomes uid 1000.
"""

import ctypes
import errno
import json
import os
import struct
import sys


def shut_in(folder, filtered, wish):
    """Never returns: re-executes this script as uid 1000, and behind the filter; `wish` is handed on."""
    libc = ctypes.CDLL(None, use_errno=True)
    python, libraries = sys.executable, os.environ.get("PYTHONPATH", "")
    container_filter = _filter(folder)
    if os.geteuid() == 0:
        # uid 1000 may not be able to look into root's home, so it gets Python and the repository at another place.
        python, folder = _lend(libc, folder)
        os.setgroups([])
        os.setresgid(1000, 1000, 1000)
        os.setresuid(1000, 1000, 1000)
        assert libc.capset(struct.pack("<Ii", 0x20080522, 0), bytes(24)) == 0
    if filtered:
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        container_filter.install()
    script = f"{folder}/tests/sandbox_elsewhere.py"
    os.execve(python, [python, "-B", script, folder, wish], {"PATH": "/usr/bin:/bin", "PYTHONPATH": libraries})


def _lend(libc, folder):
    place = "/mnt"  # covered in a mount namespace of this process alone, so nothing stays behind
    assert libc.unshare(0x00020000) == 0
    assert libc.mount(b"none", b"/", None, ctypes.c_ulong(0x44000), None) == 0
    assert libc.mount(b"tmpfs", place.encode(), b"tmpfs", ctypes.c_ulong(0), b"mode=755") == 0
    for name, source in (("python", sys.base_prefix), ("repository", folder)):
        os.mkdir(f"{place}/{name}")
        os.chmod(f"{place}/{name}", 0o755)
        assert libc.mount(source.encode(), f"{place}/{name}".encode(), None, ctypes.c_ulong(0x5000), None) == 0
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return f"{place}/python/bin/{version}", f"{place}/repository"


def _filter(folder):
    sys.path.insert(0, folder)
    from trl_populora.sandbox import seccomp

    refused = {
        "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "chroot": 161, "pivot_root": 155, "ptrace": 101,
        "bpf": 321, "keyctl": 250, "add_key": 248, "perf_event_open": 298, "userfaultfd": 323, "init_module": 175,
    }  # fmt: skip
    absent = {"clone3": 435, "landlock_create": 444, "landlock_add": 445, "landlock_restrict": 446}
    program = seccomp._head(0xC000003E)
    for number in refused.values():
        program += seccomp._if_number(number, [seccomp._return(0x50000 | errno.EPERM)])
    for number in absent.values():
        program += seccomp._if_number(number, [seccomp._return(0x50000 | errno.ENOSYS)])
    clone = [(0x20, 0, 0, 16), (0x45, 0, 1, 0x7E020000), seccomp._return(0x50000 | errno.EPERM)]
    program += seccomp._if_number(56, clone)
    program.append(seccomp._return(0x7FFF0000))
    return seccomp.Filter(program)


def run(folder):
    """The suite, with the soft layer on and off."""
    sys.path[:0] = [folder, f"{folder}/tests"]
    from sandbox_cases import PWNED, benign, determinism_and_state, forge_and_output, process_and_escape
    from sandbox_support import sessions_alive

    from trl_populora.sandbox import Job, Limits, Sandbox
    from trl_populora.sandbox.values import encode

    walls = [*process_and_escape.process, *process_and_escape.escape, *forge_and_output.forge]
    every = [*walls, *benign.benign, *determinism_and_state.determinism, *determinism_and_state.state]
    found = {"python": sys.version_info[:2], "uid": os.geteuid(), "unexpected": [], "reached": [], "count": 0}
    os.environ["SANDBOX_SECRET"] = "SECRET"
    for soft, cases in ((True, every), (False, walls)):
        jobs = [
            Job(
                case.program,
                tuple(encode(call) for call in case.calls),
                runs=case.runs,
                limits=Limits(cpu_seconds=case.seconds if soft else 0.5, memory_bytes=case.memory),
            )
            for case in cases
        ]
        with Sandbox(workers=2, soft=soft) as box:
            report = box.report()
            verdicts = box.run(jobs)
            sessions = {each.process.pid for each in box._supervisor._workers()}
            found["respawns"] = found.get("respawns", {}) | box.report()["respawns"]
        found["level"] = report["level"]
        found["layers"] = report["layers"]
        found["leftovers"] = sessions_alive(sessions)
        for case, verdict in zip(cases, verdicts, strict=True):
            found["count"] += 1
            if encode(PWNED) in verdict.outputs or "SECRET" in str(verdict):
                found["reached"].append(str(case))
            if soft and not _right(case, verdict, encode):
                found["unexpected"].append(f"{case}: {verdict}")
    print(json.dumps(found))


def _right(case, verdict, encode):
    if verdict.status not in case.expected:
        return False
    known = case.outputs is not None and verdict.status == "ok"
    return not known or verdict.outputs == tuple(encode(value) for value in case.outputs)


if __name__ == "__main__":
    wish = sys.argv[2] if len(sys.argv) > 2 else ""
    if wish in ("container", "user"):
        shut_in(sys.argv[1], wish == "container", f"inside-{wish}")
    run(sys.argv[1])
