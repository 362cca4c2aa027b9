"""The interpreter's code, moved to huge pages.

The kernel does not copy the page tables of mapped files at a fork: every child faults the code in anew, sixteen pages at
a time, and gives all of it back at its end. A huge page is there from the start, for the price of one entry. Servers
have long done so (HHVM, `node --use-largepages`); here nothing depends on it but speed.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import NamedTuple


_HUGE = 1 << 21
# Linux's numbers; the `mmap` module would be one more library to fork.
_READ, _WRITE, _EXECUTE = 1, 2, 4
_PRIVATE_ANONYMOUS = 0x22
_MADV_HUGEPAGE = 14
_MAYMOVE_FIXED = 3
_libc = ctypes.CDLL(None, use_errno=True)
_address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc.mmap.argtypes = [_address, _size, _int, _int, _int, ctypes.c_long]
_libc.mremap.argtypes = [_address, _size, _size, _int, _address]
_libc.munmap.argtypes = [_address, _size]
_libc.madvise.argtypes = _libc.mprotect.argtypes = [_address, _size, _int]
_libc.mmap.restype = _libc.mremap.restype = _address
_FAILED = _address(-1).value


class _Mapping(NamedTuple):
    start: int
    end: int
    rights: str
    path: str
    huge: int  # bytes


def enlarge_pages() -> None:
    """
    Put a copy of the interpreter's code in its place, with what else of its file shares the huge pages: constants and
    tables, all of them read-only. The copy can be executed and is not writable again.

    Raises:
        OSError: It stays where it is, and why.
    """
    if os.uname().machine != "x86_64":
        raise OSError(errno.ENOTSUP, "tried on x86-64 only")
    start, end = _range_of_code(_mappings())
    size = end - start
    if size <= 0:
        raise OSError(errno.ENOTSUP, "the interpreter's code fills no huge page")
    copy = _reserve(size)
    try:
        ctypes.memmove(copy, start, size)
        if not any(each.start == copy and each.huge == size for each in _mappings()):
            raise OSError(errno.ENOMEM, "the kernel gives no huge pages")
        _check(_libc.mprotect(copy, size, _READ | _EXECUTE))
        # One call, during which nothing of the old code has to run.
        _check(_libc.mremap(copy, size, size, _MAYMOVE_FIXED, start))
    except OSError:
        _libc.munmap(copy, size)
        raise


def _range_of_code(mappings: list[_Mapping]) -> tuple[int, int]:
    """The code of the interpreter, rounded to huge pages within the read-only mappings of its file around it."""
    inside = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, _address).value or 0
    places = [i for i, each in enumerate(mappings) if each.start <= inside < each.end]
    if not places:
        raise OSError(errno.ENOTSUP, "the kernel does not say where the interpreter's code is")
    here = first = last = places[0]
    while first > 0 and _belong_together(mappings[first - 1], mappings[first]):
        first -= 1
    while last + 1 < len(mappings) and _belong_together(mappings[last], mappings[last + 1]):
        last += 1
    start = max(mappings[here].start // _HUGE, -(-mappings[first].start // _HUGE))
    end = min(-(-mappings[here].end // _HUGE), mappings[last].end // _HUGE)
    return start * _HUGE, end * _HUGE


def _belong_together(one: _Mapping, other: _Mapping) -> bool:
    # Some linkers leave gaps between segments that not even we may read.
    return (
        one.end == other.start
        and one.path == other.path != ""
        and all(each.rights[:2] == "r-" for each in (one, other))
    )


def _reserve(size: int) -> int:
    """Private memory at a multiple of a huge page, for which the kernel is asked to use such."""
    place = _check(_libc.mmap(None, size + _HUGE, _READ | _WRITE, _PRIVATE_ANONYMOUS, -1, 0))
    aligned = -(-place // _HUGE) * _HUGE
    for start, end in ((place, aligned), (aligned + size, place + size + _HUGE)):
        if end > start:
            _libc.munmap(start, end - start)
    _libc.madvise(aligned, size, _MADV_HUGEPAGE)
    return aligned


def _check(result: int) -> int:
    if result in (-1, _FAILED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _mappings() -> list[_Mapping]:
    """The memory of this process, in order."""
    found: list[_Mapping] = []
    with open("/proc/self/smaps") as file:
        for line in file:
            first, *words = line.split(maxsplit=5)
            if not first.endswith(":"):
                start, _, end = first.partition("-")
                path = words[4].strip() if len(words) > 4 else ""
                found.append(_Mapping(int(start, 16), int(end, 16), words[0], path, 0))
            elif first == "AnonHugePages:":
                found[-1] = found[-1]._replace(huge=int(words[0]) << 10)
    return found
