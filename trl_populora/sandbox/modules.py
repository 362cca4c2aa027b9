"""Which modules programs may import, and in which tier of zygote they are warm.

The line is drawn at what computes: modules whose results nobody can work out by thinking (digests, checksums, seeded
generators) are left out, as Absolute Zero Reasoner leaves them out; a scrambler that a program writes itself is in
plain sight and stays. Loading more modules makes every fork dearer, so most programs run in zygotes that hold the
light tier. A program that imports more is sent to the full tier: by a scan of its text in the trainer, or, when the
scan is fooled, by the child.
"""

from __future__ import annotations

import codecs
import os
import re
import sys


LIGHT = [
    *("__future__", "abc", "bisect", "cmath", "collections", "collections.abc", "contextlib", "copy", "datetime"),
    *("enum", "functools", "heapq", "io", "itertools", "json", "keyword", "math", "numbers", "operator", "re"),
    *("string", "sys", "time", "types", "typing", "unicodedata"),
]
FULL = [
    *("array", "ast", "base64", "calendar", "colorsys", "csv", "dataclasses", "decimal", "difflib", "fractions"),
    *("graphlib", "html", "ipaddress", "pprint", "statistics", "struct", "textwrap", "traceback", "urllib.parse"),
    *("warnings", "weakref"),
]
# Needed later by what is loaded above, when no file can be opened any more: a module that `strptime` imports by the
# importing program's own `__import__`, and codecs.
HELPERS = frozenset(["_strptime"])
FULL_HELPERS = frozenset(["_pylong"])  # by which Python 3.12 reads and writes large integers; it loads `decimal`
CODECS = [
    *("ascii", "latin-1", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"),
    *("unicode_escape", "raw_unicode_escape"),
]
FULL_CODECS = ["utf-32-le", "utf-32-be", "cp437", "idna", "punycode", "rot13", "hex", "base64"]
# What exists to scramble: a task that asks for a few bits of a digest is a coin, which pays its teacher as a hard task
# would and teaches nothing. Programs of published benchmarks, which run without the soft layer, do use them.
SCRAMBLING = ["binascii", "hashlib", "hmac", "random", "secrets", "uuid", "zlib"]
# With the soft layer off, for benchmarks and tests of the walls: everything a hostile program could wish for.
HOSTILE = [
    *SCRAMBLING,
    *("os", "posix", "socket", "ctypes", "subprocess", "signal", "threading", "mmap", "resource", "fcntl", "pickle"),
    *("gc", "inspect", "importlib", "multiprocessing", "pty", "select", "selectors", "tempfile", "shutil", "pathlib"),
    *("builtins", "platform", "marshal", "codeop", "code", "atexit", "asyncio", "logging", "glob"),
]

_LIGHT_ROOTS = frozenset(name.partition(".")[0] for name in LIGHT)
_FULL_ROOTS = frozenset(name.partition(".")[0] for name in FULL)
ALLOWED = frozenset(LIGHT) | frozenset(FULL) | _LIGHT_ROOTS | _FULL_ROOTS
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


def is_allowed(name: str) -> bool:
    """Whether a program may import `name`: on the list, or a loaded part of a package whose root is."""
    return name in ALLOWED or (name.partition(".")[0] in ALLOWED and name in sys.modules)


def preload(full: bool, hostile: bool) -> None:
    """Import the tier's modules; what an installation lacks is left out."""
    for name in [*LIGHT, *HELPERS, *([*FULL, *FULL_HELPERS] if full else ()), *(HOSTILE if hostile else ())]:
        try:
            __import__(name)
        except ImportError:
            continue
    for name in [*CODECS, *(FULL_CODECS if full else ())]:
        codecs.lookup(name)


def preload_packages(folders: dict[str, str]) -> None:
    """Import installed packages from the folders they lie in; a missing one is an error."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # threads would not survive the fork
    sys.path.extend(dict.fromkeys(folders.values()))
    for name in folders:
        __import__(name)
