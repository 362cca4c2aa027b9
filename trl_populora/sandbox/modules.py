"""Which modules programs may import; every zygote has all of them loaded.

The line is drawn at what computes: modules whose results nobody can work out by thinking (digests, checksums, seeded
generators) are left out, as Absolute Zero Reasoner leaves them out; a scrambler that a program writes itself is in
plain sight and stays.
"""

from __future__ import annotations

import codecs
import os
import sys


MODULES = [
    *("__future__", "abc", "array", "ast", "base64", "bisect", "calendar", "cmath", "collections", "collections.abc"),
    *("colorsys", "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions"),
    *("functools", "graphlib", "heapq", "html", "io", "ipaddress", "itertools", "json", "keyword", "math", "numbers"),
    *("operator", "pprint", "re", "statistics", "string", "struct", "sys", "textwrap", "time", "traceback", "types"),
    *("typing", "unicodedata", "urllib.parse", "warnings", "weakref"),
]
# Needed later by what is loaded above, when no file can be opened any more: a module that `strptime` imports by the
# importing program's own `__import__`, the one by which Python 3.12 reads and writes large integers, and codecs.
HELPERS = frozenset(["_strptime", "_pylong"])
CODECS = [
    *("ascii", "latin-1", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"),
    *("cp1252", "cp437", "idna", "punycode", "rot13", "hex", "base64", "unicode_escape", "raw_unicode_escape"),
]
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

ALLOWED = frozenset(MODULES) | {name.partition(".")[0] for name in MODULES}


def is_allowed(name: str) -> bool:
    """Whether a program may import `name`: on the list, or a loaded part of a package whose root is."""
    return name in ALLOWED or (name.partition(".")[0] in ALLOWED and name in sys.modules)


def preload(hostile: bool) -> None:
    """Import all modules; what an installation lacks is left out."""
    for name in [*MODULES, *HELPERS, *(HOSTILE if hostile else ())]:
        try:
            __import__(name)
        except ImportError:
            continue
    for name in CODECS:
        codecs.lookup(name)


def preload_packages(folders: dict[str, str]) -> None:
    """Import installed packages from the folders they lie in; a missing one is an error."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # threads would not survive the fork
    sys.path.extend(dict.fromkeys(folders.values()))
    for name in folders:
        __import__(name)
