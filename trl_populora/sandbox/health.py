"""Does the confinement hold? Tried from inside a child, and summed up as a level (A, B or C) in the trainer."""

from __future__ import annotations

import errno
import os
import resource
import socket


_MOST_DESCRIPTORS = 4096


def _open_root() -> None:
    os.close(os.open("/", os.O_RDONLY))


def _create_file() -> None:
    os.close(os.open("probe", os.O_CREAT | os.O_WRONLY, 0o600))


def _read_passwd() -> None:
    os.close(os.open("/etc/passwd", os.O_RDONLY))


def _open_proc() -> None:
    os.close(os.open("/proc/self/environ", os.O_RDONLY))


def _socket() -> None:
    socket.socket(socket.AF_INET, socket.SOCK_STREAM).close()


def _pair() -> None:
    for each in socket.socketpair():
        each.close()


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _kill() -> None:
    os.kill(os.getppid() or 1, 0)


def _raise_limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, resource.getrlimit(resource.RLIMIT_CPU))


def _limit_parent() -> None:
    resource.prlimit(os.getppid() or 1, resource.RLIMIT_CORE, (0, 0))  # what it has anyway


def _use_another_descriptor() -> None:
    open_ones = 0
    for fd in range(3, _MOST_DESCRIPTORS):
        try:
            os.read(fd, 0)
        except OSError as error:
            open_ones += error.errno != errno.EBADF
        else:
            open_ones += 1
    if open_ones == 1:  # its own socket
        raise OSError("there is no other")


def _be_root() -> None:
    if os.getuid() != 0 and os.geteuid() != 0:
        raise OSError("not root")


def _exec() -> None:
    os.execv("/proc/self/exe", ["python", "-c", ""])  # noqa: S606 - it must not work


# What must fail in a child, and the layer that is credited. Exec comes last: a success ends the process.
PROBES = {
    "open /": _open_root,
    "create a file": _create_file,
    "read /etc/passwd": _read_passwd,
    "open /proc": _open_proc,
    "open a network socket": _socket,
    "open a local socket": _pair,
    "fork": _fork,
    "signal the zygote": _kill,
    "set its own limits": _raise_limit,
    "set the zygote's limits": _limit_parent,
    "use another descriptor": _use_another_descriptor,
    "be root": _be_root,
    "exec": _exec,
}


def probe() -> list[bool]:
    """For each probe, whether it was refused."""
    results = []
    for attempt in PROBES.values():
        try:
            attempt()
        except (OSError, ValueError):  # `resource` says EPERM as a ValueError
            results.append(True)
        else:
            results.append(False)
    return results


def level(layers: dict[str, str], refused: dict[str, bool]) -> str:
    """
    `"A"`: namespaces, chroot, own uid, Landlock and seccomp. `"B"`: seccomp with an unprivileged uid or Landlock.
    `"C"`: less. A probe that was not refused means C, whatever the layers claim.

    Args:
        layers (`dict[str, str]`): Layer name to `""` when it holds.
        refused (`dict[str, bool]`): Probe name to whether the attempt failed, as it must.
    """
    holds = {name for name, reason in layers.items() if not reason}
    if "seccomp" not in holds or not refused or not all(refused.values()):
        return "C"
    if {"namespaces", "chroot", "uid", "landlock"} <= holds:
        return "A"
    return "B" if holds & {"uid", "landlock"} else "C"
