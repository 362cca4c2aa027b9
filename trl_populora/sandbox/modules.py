"""Which modules programs may import, and in which tier of zygote they are warm (phase 3).

Loading more modules makes every fork dearer, so most programs run in zygotes that hold the light tier. A program that
imports more is sent to the full tier: by a scan of its text in the trainer, or, when the scan is fooled, by the child.
"""

from __future__ import annotations

import re


LIGHT = (
    "__future__ abc bisect cmath collections collections.abc contextlib copy datetime enum functools heapq io itertools"
    " json keyword math numbers operator random re string sys time types typing"
).split()
FULL = (
    "array ast base64 binascii calendar colorsys csv dataclasses decimal difflib fractions graphlib hashlib hmac html"
    " ipaddress pprint secrets statistics struct textwrap traceback unicodedata urllib.parse uuid warnings weakref zlib"
).split()
# Loaded for the sake of the above, which import them when they are used: no file can be opened by then.
HELPERS = "_strptime encodings.idna encodings.latin_1 encodings.ascii encodings.utf_16 encodings.utf_32".split()
# With the soft layer off, for tests of the walls: everything a hostile program could wish for.
HOSTILE = (
    "os posix socket ctypes subprocess signal threading mmap resource fcntl pickle gc inspect importlib multiprocessing"
    " pty select selectors tempfile shutil pathlib builtins platform marshal codeop code atexit asyncio logging glob"
).split()

_LIGHT_ROOTS = frozenset(name.partition(".")[0] for name in LIGHT)
_FULL_ROOTS = frozenset(name.partition(".")[0] for name in FULL)
ALLOWED_ROOTS = _LIGHT_ROOTS | _FULL_ROOTS
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import|import[ \t]+([^#\n;]+))", re.MULTILINE)


def needs_full_tier(program: str) -> bool:
    """Whether the text imports something beyond the light tier; a guess that the child corrects."""
    if "import" not in program:
        return False
    for origin, names in _IMPORT.findall(program):
        for name in (origin or names).split(","):
            root = name.split()[0].partition(".")[0] if name.split() else ""
            if root in _FULL_ROOTS:
                return True
    return False


def preload(full: bool, hostile: bool) -> None:
    """Import the tier's modules; what an installation lacks is left out."""
    for name in [*LIGHT, *HELPERS[:1], *(FULL + HELPERS if full else ()), *(HOSTILE if hostile else ())]:
        try:
            __import__(name)
        except ImportError:
            continue
