"""The walls, which a zygote builds around itself once before it serves, and the probes that test them.

The layers are namespaces, chroot, uid, resource limits, `no_new_privs`, Landlock and seccomp. The zygote tries to
build every layer. If the host refuses a layer, the zygote notes the reason and goes on. A program that only computes
misses nothing: the zygote has loaded all modules before the walls refuse files, and the program needs no other file.

The zygote's first child then tries the walls from inside. The trainer sums up layers and probes as a level: A, B or C.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import socket
import struct
from collections.abc import Callable
from functools import partial

from . import seccomp


CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_SPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446  # system calls, with the same numbers on all architectures
_NOBODY = 65534
# CPU seconds after which the kernel ends a child, above the limit of every job. The number is the same in every child:
# a program can read it, and must not learn from it what the run is for.
_CPU_SECONDS = 3602
_OWN_UIDS = 1_900_000_000  # first of 10^8 user ids that nothing else is likely to use

# These names are looked up once, because each lookup in a child would copy a memory page: see `zygote.py`.
_setrlimit, _CPU, _NPROC, _AS = (
    resource.setrlimit,
    resource.RLIMIT_CPU,
    resource.RLIMIT_NPROC,
    resource.RLIMIT_AS,
)
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> int:
    """Calls a function of the C library; raises `OSError` where it reports an error."""
    result = getattr(_libc, name)(*arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def prctl(option: int, value: int) -> None:
    _call("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def die_with_parent() -> None:
    """Asks for SIGKILL when the thread that forked this process ends. A change of uid makes the kernel forget this."""
    prctl(_PR_SET_PDEATHSIG, 9)


class Layers(dict):
    """Maps the name of each layer to `""` if the layer holds, else to the reason why it does not."""

    def attempt(self, name: str, build, *arguments: object) -> bool:
        """Builds a layer and notes whether it holds."""
        try:
            build(*arguments)
        except (OSError, ValueError) as error:
            self[name] = str(error)[:200] or type(error).__name__
        else:
            self[name] = ""
        return self[name] == ""


def enter_namespaces(layers: Layers) -> None:
    """
    Enters new namespaces for network, mounts, processes, IPC and host name.

    If the host allows namespaces, the function returns in a new process, which has number 1 in its namespace. The
    calling process stays outside of that namespace, waits for the new process, and ends with it. A process without
    privileges may create these namespaces only inside a new user namespace, so it enters one as well.
    """
    # Some distributions let `unshare` succeed, and then refuse the mount or the `chroot`. So a throw-away child first
    # tries `unshare`, mount and `chroot`.
    for flags in (_SPACES, _SPACES | CLONE_NEWUSER):
        if _survives(flags):
            layers.attempt("namespaces", _unshare, flags)
            break
    else:
        layers["namespaces"] = "this host lets us create neither namespaces nor user namespaces"
        return
    # This process stays outside its new namespace of processes; only its children are inside. So the zygote goes on in
    # a child.
    inner = os.fork()
    if inner:
        # The outer process must not hold the control socket: the trainer has to see it close when the inner one ends.
        os.closerange(0, 1024)
        _, status = os.waitpid(inner, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    die_with_parent()


def _survives(flags: int) -> bool:
    """Says whether a throw-away child can enter namespaces and then call `chroot`."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _unshare(flags)
            root = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
            os.fchdir(root)
            os.chroot(".")
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def _unshare(flags: int) -> None:
    """Moves this process into new namespaces, and keeps mounts inside from spreading to the host."""
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", flags)
    if flags & CLONE_NEWUSER:
        # Inside the new user namespace this user has the number of nobody. The kernel lets an ordinary user map groups
        # only after `setgroups` has been denied.
        maps = {"setgroups": "deny", "uid_map": f"{_NOBODY} {uid} 1", "gid_map": f"{_NOBODY} {gid} 1"}
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _call("mount", b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)


def build_walls(layers: Layers, without: tuple[str, ...] = ()) -> None:
    """
    Builds all walls but the namespaces.

    Args:
        layers: Takes the result of each layer.
        without: Layers to leave out, to test what the others do alone.
    """
    # The order matters. `chroot` needs privileges that `uid` gives up, Landlock and seccomp need `no_new_privs`, and
    # seccomp refuses system calls that the other layers make.
    for name, build in (
        ("chroot", _chroot_into_nothing),
        ("uid", _drop_user),
        ("limits", _limit_resources),
        ("no_new_privs", _lock_privileges),
        ("landlock", _landlock),
        ("seccomp", lambda: seccomp.zygote_filter().install()),
    ):
        if name in without:
            layers[name] = "left out on request"
        else:
            layers.attempt(name, build)
        if name == "uid" and layers["namespaces"] == "":
            die_with_parent()  # the second request: the change of user made the kernel forget the first


def _chroot_into_nothing() -> None:
    """Makes a deleted folder the root directory. It holds nothing, and nothing can be created in it."""
    fd = -1
    for base in ("/dev/shm", "/tmp", "/var/tmp", os.getcwd()):  # noqa: S108 - the folder exists for a moment only
        path = f"{base}/.sandbox-{os.getpid()}-{os.urandom(8).hex()}"
        try:
            os.mkdir(path, 0o700)
        except OSError:
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        finally:
            os.rmdir(path)
        break
    if fd < 0:
        raise OSError(errno.EROFS, "could create no empty folder in /dev/shm, /tmp, /var/tmp or the working directory")
    try:
        os.fchdir(fd)
        os.chroot(".")
    finally:
        os.close(fd)


def _drop_user() -> None:
    """Gives up every capability. Root also becomes an unprivileged user, if possible with an unused uid."""
    if os.geteuid() == 0:
        uid = _OWN_UIDS + os.getpid() % 100_000_000
        os.setgroups([])
        for wanted in (uid, _NOBODY):
            try:
                os.setresgid(wanted, wanted, wanted)
                os.setresuid(wanted, wanted, wanted)
                break
            except OSError as error:
                failure = error
        else:
            raise failure
    # The header names version 3 of the interface and this process (0). The 24 zero bytes empty all sets of
    # capabilities.
    header = struct.pack("<Ii", 0x20080522, 0)
    _call("capset", ctypes.c_char_p(header), ctypes.c_char_p(bytes(24)))
    if os.geteuid() == 0:
        raise OSError(errno.EPERM, "the process is still root")


def _limit_resources() -> None:
    # Every child inherits these limits.
    for name, limit in (("CORE", 0), ("FSIZE", 0), ("NOFILE", 16), ("MEMLOCK", 0), ("MSGQUEUE", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))


def _lock_privileges() -> None:
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_DUMPABLE, 0)


def _landlock() -> None:
    """
    Forbids files, TCP ports, abstract sockets of outside processes, and signals to them. An older kernel's Landlock
    forbids only some of these.
    """
    # A ruleset lists rights as bits. Landlock refuses each listed right that no rule allows, and here is no rule.
    # Newer versions (`abi`) know more rights. A version refuses a ruleset with bits that it does not know.
    abi = _call("syscall", _LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    files = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}.get(abi, (1 << 16) - 1)
    network = 3 if abi >= 4 else 0
    scope = 3 if abi >= 6 else 0
    attributes = struct.pack("<QQQ", files, network, scope)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    fd = _call("syscall", _LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    try:
        _call("syscall", _LANDLOCK_RESTRICT, fd, ctypes.c_uint(0))
    finally:
        os.close(fd)


def prepare_child_walls(layers: Layers) -> Callable[[int], None]:
    """
    Makes the function `close_in(memory)`, which every child calls before it runs its program.

    Where the zygote has no namespaces of its own, the child first asks to be killed when the zygote ends. Then it
    limits its CPU time and processes, limits its address space to `memory` bytes, and installs the second seccomp
    filter if the zygote's own filter holds. The zygote kills a child that is over its time. If it does not, the
    kernel's CPU limit ends the child later. Everything is prepared in the zygote, because each memory page that a
    child writes to has to be copied.
    """
    install = seccomp.child_filter().try_to_install if layers.get("seccomp") == "" else None
    # In namespaces of its own the zygote is process number 1. When it ends, the kernel ends all others there.
    alone = layers.get("namespaces") == ""
    die_with_zygote = None if alone else partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, 9, 0, 0, 0)
    zygote = os.getpid()

    def close_in(memory: int) -> None:
        if die_with_zygote is not None:
            die_with_zygote()
            if os.getppid() != zygote:
                os._exit(1)  # the zygote died before this process asked to die with it
        _setrlimit(_CPU, (_CPU_SECONDS, _CPU_SECONDS))
        _setrlimit(_NPROC, (0, 0))
        _setrlimit(_AS, (memory, memory))
        if install is not None and install():
            raise OSError(errno.EPERM, "the kernel takes no second seccomp filter")

    return close_in


# The probes. Each tries one thing that the walls must refuse, and raises if it is refused. The zygote's first child
# runs them.

_MOST_DESCRIPTORS = 4096


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _use_another_descriptor() -> None:
    # A read of 0 bytes fails with EBADF if the descriptor is closed. From 3 up only the child's own socket is open.
    open_ones = 0
    for fd in range(3, _MOST_DESCRIPTORS):
        try:
            os.read(fd, 0)
        except OSError as error:
            open_ones += error.errno != errno.EBADF
        else:
            open_ones += 1
    if open_ones == 1:
        raise OSError("no other descriptor is open")


def _be_root() -> None:
    if os.getuid() != 0 and os.geteuid() != 0:
        raise OSError("this process is not root")


# `exec` comes last: an `exec` that is not refused replaces this process, and no probe could follow.
PROBES: dict[str, Callable[[], object]] = {
    "open /": lambda: os.close(os.open("/", os.O_RDONLY)),
    "create a file": lambda: os.close(os.open("probe", os.O_CREAT | os.O_WRONLY, 0o600)),
    "read /etc/passwd": lambda: os.close(os.open("/etc/passwd", os.O_RDONLY)),
    "open /proc": lambda: os.close(os.open("/proc/self/environ", os.O_RDONLY)),
    "open a network socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).close(),
    "open a local socket": lambda: list(map(socket.socket.close, socket.socketpair())),
    "fork": _fork,
    "signal the zygote": lambda: os.kill(os.getppid() or 1, 0),  # signal 0 only asks for permission
    "set its own limits": lambda: resource.setrlimit(resource.RLIMIT_CPU, resource.getrlimit(resource.RLIMIT_CPU)),
    # as `_limit_resources` has set it
    "set the zygote's limits": lambda: resource.prlimit(os.getppid() or 1, resource.RLIMIT_CORE, (0, 0)),
    "use another descriptor": _use_another_descriptor,
    "be root": _be_root,
    "exec": lambda: os.execv("/proc/self/exe", ["python", "-c", ""]),  # noqa: S606 - the walls must refuse it
}


def try_walls() -> list[bool]:
    """Tries all probes; returns for each, in the order of `PROBES`, whether it was refused."""
    results = []
    for attempt in PROBES.values():
        try:
            attempt()
        except (OSError, ValueError):  # for EPERM `setrlimit` raises ValueError
            results.append(True)
        else:
            results.append(False)
    return results


def find_level(layers: dict[str, str], refused: dict[str, bool]) -> str:
    """
    Sums up layers and probes as `"A"`, `"B"` or `"C"`.

    A needs namespaces, chroot, an unprivileged uid, Landlock and seccomp. B needs seccomp, and an unprivileged uid or
    Landlock. Everything else is C. A host is C in two more cases, whatever the layers claim: if the walls did not
    refuse every probe, or if no probe was tried.

    Args:
        layers: For each layer the reason why it does not hold; `""` if it holds.
        refused: For each probe whether it was refused.
    """
    holds = {name for name, reason in layers.items() if not reason}
    if "seccomp" not in holds or not refused or not all(refused.values()):
        return "C"
    if {"namespaces", "chroot", "uid", "landlock"} <= holds:
        return "A"
    return "B" if holds & {"uid", "landlock"} else "C"
