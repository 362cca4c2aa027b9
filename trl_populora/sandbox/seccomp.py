"""System-call filters: which requests to the kernel the zygote and the programs may make.

Two filters in classic BPF are assembled here and installed through `prctl`:

* `zygote_filter`, once, before any untrusted code: an allow-list of calls for pure computation, and of what the zygote
  needs to fork, kill and reap. There is no `open`, no `socket`, no `execve`, no `ptrace`, no `mount`, no `bpf`, no
  `io_uring`, no `keyctl`, no shared memory. It is a search tree, so a call costs nine comparisons at most.
* `child_filter`, once per program, on top of the first: refuses forking, killing, reaping, passing descriptors,
  changing limits, and installing filters. It is short, because the kernel checks and translates it for each program.

A refused call fails with EPERM, which Python shows as an `OSError` (`clone3` fails with ENOSYS). The numbers for
aarch64 are those of the kernel's generic table; nobody has tried them on such a machine.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from functools import partial


# Numbers of the allowed system calls, by name: (x86_64, aarch64). None where the architecture has no such call.
COMPUTE = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "sched_yield": (24, 124),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getrusage": (98, 165),
    "getrandom": (318, 278),
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
# What the zygote needs as well. Of these, a program may call only `getrlimit`.
ZYGOTE_ONLY = {
    "clone": (56, 220),
    "wait4": (61, 260),
    "kill": (62, 129),
    "sendto": (44, 206),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "recvfrom": (45, 207),
    "getrlimit": (97, 163),
    "setrlimit": (160, 164),
    "prctl": (157, 167),
    "close_range": (436, 436),
}
PRLIMIT = (302, 261)
CLONE3 = (435, 435)
_MACHINE = os.uname().machine  # asked at import: the first filter refuses `uname` later
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7), "arm64": (1, 0xC00000B7)}

_LOAD, _JUMP_EQ, _JUMP_GE, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in the kernel's `struct seccomp_data`
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2


# One instruction: operation, instructions to skip if the test holds, instructions to skip if not, constant.
Instruction = tuple[int, int, int, int]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


class Filter:
    """An assembled filter that can be installed many times; holds the memory that the kernel reads."""

    def __init__(self, instructions: list[Instruction]):
        code = b"".join(struct.pack("<HBBI", *each) for each in instructions)
        self.length = len(instructions)
        program = ctypes.byref(_Program(self.length, code))
        self._arguments = (_PR_SET_SECCOMP, _MODE_FILTER, program, 0, 0)
        # Every child makes this call, so it must be fast and fetches no error number. It returns -1 if the kernel
        # refuses.
        self.try_to_install = partial(ctypes.CDLL(None).prctl, *self._arguments)

    def install(self) -> None:
        """
        Puts the filter on the calling thread for good, which needs `PR_SET_NO_NEW_PRIVS`.

        Raises:
            `OSError`: If the kernel refuses the filter. The thread then has no new filter.
        """
        if ctypes.CDLL(None, use_errno=True).prctl(*self._arguments):
            code = ctypes.get_errno()
            raise OSError(code, f"seccomp: {errno.errorcode.get(code, code)}")


def _find_machine() -> tuple[int, int]:
    """Finds this machine's column in the tables above and its number in the kernel's audit interface."""
    if _MACHINE not in _MACHINES or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise OSError(errno.ENOSYS, f"no system-call table for {_MACHINE}")
    return _MACHINES[_MACHINE]


def _return(action: int) -> Instruction:
    return (_RETURN, 0, 0, action)


def _tree(numbers: list[int], default: int) -> list[Instruction]:
    """Makes a binary search among the allowed numbers. It expects that `_head` has loaded the call's number."""
    # Allowed numbers that follow each other are one run.
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1][1] = number + 1
        else:
            runs.append([number, number + 1])
    # The edges alternate: at one edge a run of allowed numbers begins, at the next edge a run of refused numbers.
    edges = [edge for run in runs for edge in run]

    def branch(low: int, high: int) -> list[Instruction]:
        if low == high:
            return [_return(_ALLOW if low % 2 else default)]
        middle = (low + high) // 2
        below, above = branch(low, middle), branch(middle + 1, high)
        # A conditional jump reaches 255 instructions at most. The trees here are far smaller.
        return [(_JUMP_GE, len(below), 0, edges[middle]), *below, *above]

    return branch(0, len(edges))


def _head(arch: int) -> list[Instruction]:
    """
    Kills the process if a call is made for another architecture, where numbers mean other calls. Otherwise loads the
    call's number.
    """
    return [(_LOAD, 0, 0, _ARCH), (_JUMP_EQ, 1, 0, arch), _return(_KILL), (_LOAD, 0, 0, _NUMBER)]


def _if_number(number: int, body: list[Instruction]) -> list[Instruction]:
    """Runs the body only for the call with this number."""
    return [(_JUMP_EQ, 0, len(body), number), *body]


def _argument_is_zero(index: int) -> list[Instruction]:
    """Goes on if a 64-bit argument of the call is zero; refuses the call if not."""
    # The filter loads 32 bits at a time, so the two halves are compared one after the other.
    offset = _ARGUMENTS + 8 * index
    refuse = _return(_ERRNO | errno.EPERM)
    return [
        (_LOAD, 0, 0, offset),
        (_JUMP_EQ, 1, 0, 0),
        refuse,
        (_LOAD, 0, 0, offset + 4),
        (_JUMP_EQ, 1, 0, 0),
        refuse,
    ]


def zygote_filter() -> Filter:
    """Makes the allow-list of the zygote and of everything under it."""
    column, arch = _find_machine()
    names = {**COMPUTE, **ZYGOTE_ONLY}
    numbers = [number for number in (each[column] for each in names.values()) if number is not None]
    refuse = _ERRNO | errno.EPERM
    return Filter(
        [
            *_head(arch),
            # glibc tries `clone3` first, and tries `clone` only after ENOSYS.
            *_if_number(CLONE3[column], [_return(_ERRNO | errno.ENOSYS)]),
            # `prlimit` is allowed only for the caller itself (process 0). A child that could limit its zygote could
            # make all later jobs fail.
            *_if_number(PRLIMIT[column], [*_argument_is_zero(0), _return(_ALLOW)]),
            *_tree(numbers, refuse),
        ]
    )


def child_filter() -> Filter:
    """Makes the second filter, which refuses a program everything that only the zygote needs."""
    column, arch = _find_machine()
    numbers = [each[column] for name, each in ZYGOTE_ONLY.items() if name != "getrlimit"]
    # If a number matches, the filter jumps to the refusal, over the rest of `checks`, the test for `prlimit`, and the
    # "allow" after that test.
    checks = [(_JUMP_EQ, len(numbers) + 1 - i, 0, number) for i, number in enumerate(numbers)]
    return Filter(
        [
            *_head(arch),
            *checks,
            (_JUMP_EQ, 2, 0, PRLIMIT[column]),
            _return(_ALLOW),
            _return(_ERRNO | errno.EPERM),
            *_argument_is_zero(2),  # `prlimit` may read limits but set none: the new limits must be NULL
            _return(_ALLOW),
        ]
    )
