"""Where a zygote's objects lie. A fork is paid for by the page: once to note it, and again when a side first writes to
it.

Imports leave holes all over the heap, and what a child then makes, an object here and an object there, each time
writes to another page. With the holes filled, its objects lie side by side on pages of their own: a program then costs
1.39 ms of CPU instead of 1.57 (`benchmarks/RESULTS.md`).

Moving the interpreter's own code to huge pages was tried as well and taken out again: it brought a twentieth, and a
reader had to trust a `mremap` under the code that runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc


# CPython serves objects of up to 512 bytes, in steps of 16, from pools of one size each; larger ones come from malloc.
_POOL, _POOL_HEADER, _LARGEST_SMALL = 1 << 14, 48, 512
_ROW = 4  # blocks
_LARGEST_HOLE, _FITS_NO_HOLE = 1 << 16, 100_000  # the second is still below what malloc maps on its own
_MOST_BYTES = 8 << 20  # to give up at, with an allocator that works otherwise; CPython 3.11 with glibc needs 0.6 MB


def settle() -> list[object]:
    """
    Give unused pages back to the kernel and fill the holes in the others.

    Returns:
        `list[object]`: What fills them, to be kept. Freed, it would leave holes again.
    """
    gc.collect()
    with contextlib.suppress(AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)
    filling: list[object] = []
    left = _MOST_BYTES
    end = id(bytes(_FITS_NO_HOLE))
    for size in [*range(_LARGEST_HOLE, 1024, -1024), *range(1024, _LARGEST_SMALL, -16)]:
        while left > 0 and id(new := block(size)) < end:
            filling.append(new)
            left -= size
    for size in range(16, _LARGEST_SMALL + 1, 16):
        # A pool that nobody has used is filled from its beginning, and is had only when no other has room.
        row = 0
        while left > 0 and row < _ROW:
            new = block(size)
            place = id(new) % _POOL - _POOL_HEADER
            row = row + 1 if place == row * size else int(place == 0)
            filling.append(new)
            left -= size
        del filling[len(filling) - row :]
    return filling


def block(size: int) -> object:
    """An object of so many bytes that nothing else holds."""
    if size == 16:
        return object()
    return complex(size) if size == 32 else bytes(size - 33)
