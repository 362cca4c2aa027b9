"""The soft layer: keeps honest programs to what a training task may use. It improves data and protects nothing.

Each program gets a table of builtins and a few module facades of its own; the standard library keeps the real modules.
An import outside the allow-list, `open`, `input` and `breakpoint` give `policy`. Clocks, hashes and addresses used as
numbers, and whatever depends on the interpreter, give `nondeterministic`: no number of repetitions would find the
year, a rare coin flip or another Python.

The allow-list holds modules that compute. It leaves out modules whose results nobody can work out by thinking, as
Absolute Zero Reasoner does: digests, checksums, seeded generators. A scrambler that a program writes itself stands in
plain sight and is allowed. Every zygote has all allowed modules loaded, because no file can be opened later.
"""

from __future__ import annotations

import builtins
import codecs
import io
import os
import sys
import types
from typing import Any

from . import entropy, protocol


MODULES = [
    *("__future__", "abc", "array", "ast", "base64", "bisect", "calendar", "cmath", "collections", "collections.abc"),
    *("colorsys", "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions"),
    *("functools", "graphlib", "heapq", "html", "io", "ipaddress", "itertools", "json", "keyword", "math", "numbers"),
    *("operator", "pprint", "re", "statistics", "string", "struct", "sys", "textwrap", "time", "traceback", "types"),
    *("typing", "unicodedata", "urllib.parse", "warnings", "weakref"),
]
# The modules above need these later, when no file can be opened: `strptime` imports the first by the program's own
# `__import__`, and Python 3.12 reads and writes large integers by the second.
HELPERS = frozenset(["_strptime", "_pylong"])
CODECS = [
    *("ascii", "latin-1", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"),
    *("cp1252", "cp437", "idna", "punycode", "rot13", "hex", "base64", "unicode_escape", "raw_unicode_escape"),
]
# These modules exist to scramble. A task that asks for a few bits of a digest is a coin: it pays its teacher like a
# hard task and teaches nothing. Published benchmarks use some of them; they run without the soft layer.
SCRAMBLING = ["binascii", "hashlib", "hmac", "random", "secrets", "uuid", "zlib"]
# Without the soft layer, for benchmarks and tests of the walls, a program may import all it could wish for.
HOSTILE = [
    *SCRAMBLING,
    *("os", "posix", "socket", "ctypes", "subprocess", "signal", "threading", "mmap", "resource", "fcntl", "pickle"),
    *("gc", "inspect", "importlib", "multiprocessing", "pty", "select", "selectors", "tempfile", "shutil", "pathlib"),
    *("builtins", "platform", "marshal", "codeop", "code", "atexit", "asyncio", "logging", "glob"),
]

ALLOWED = frozenset(MODULES) | {name.partition(".")[0] for name in MODULES}


def is_allowed(name: str) -> bool:
    """Whether a program may import `name`: a listed module, or a loaded part of a listed package."""
    return name in ALLOWED or (name.partition(".")[0] in ALLOWED and name in sys.modules)


def preload(hostile: bool) -> None:
    """Imports all modules that this installation has."""
    for name in [*MODULES, *HELPERS, *(HOSTILE if hostile else ())]:
        try:
            __import__(name)
        except ImportError:
            continue
    for name in CODECS:
        codecs.lookup(name)


def preload_packages(folders: dict[str, str]) -> None:
    """Imports installed packages from the folders they lie in."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # threads would not survive the fork
    sys.path.extend(dict.fromkeys(folders.values()))
    for name in folders:
        __import__(name)


MODULE = "program"


class Refused(BaseException):
    """Ends a program that did what it must not. It is no `Exception`, so that ordinary handlers let it pass."""


class Guard:
    """
    The program's view of Python.

    Args:
        enabled: Whether the program gets guarded builtins and modules, or the real ones.
    """

    def __init__(self, enabled: bool):
        self.finding: tuple[str, list[str]] | None = None
        self.facades: dict[str, Any] = {}
        self.enabled, self.limits = enabled, entropy.Limits()
        self.builtins = dict(vars(builtins))
        if enabled:
            self._enable()
        module = sys.modules[MODULE] = types.ModuleType(MODULE)
        self.namespace = vars(module)
        self.namespace["__builtins__"] = self.builtins

    def stop(self, word: str, reason: str) -> None:
        """Notes the first finding, which stays even if the program catches the exception, and raises."""
        if self.finding is None:
            self.finding = (word, [protocol.make_line(reason)])
        raise Refused(reason)

    def screen(self, code: types.CodeType) -> None:
        """Stops a program whose text names what the language leaves to the interpreter."""
        if self.enabled and (inside := entropy.asks_inside(code)):
            self._entropy(f"{inside} hangs on the interpreter")

    def _entropy(self, reason: str) -> None:
        self.stop(protocol.ENTROPY, reason)

    def _enable(self) -> None:
        self.facades = entropy.make_facades(self._entropy)
        self.facades["sys"] = self._make_sys_facade()
        io_facade = self.facades["io"] = _make_io_facade()
        io_facade.open = self._forbid("io.open()")
        self.builtins["__import__"] = self._import
        self.builtins.update(entropy.make_builtins(self._entropy))
        self.builtins["getattr"] = entropy.make_getattr(self._entropy)
        for name in ("open", "input", "breakpoint"):
            self.builtins[name] = self._forbid(f"{name}()")
        for name in ("exit", "quit", "help", "copyright", "credits", "license"):
            self.builtins.pop(name, None)

    def _make_sys_facade(self) -> types.ModuleType:
        class Sys(_Sys):
            """The facade with this program's guards."""

        entropy.guard_sys(Sys, self.limits, self._entropy)
        facade: Any = Sys("sys")
        facade.argv = ["program"]
        for name in _SYS_NAMES:
            setattr(facade, name, getattr(sys, name))
        return facade

    def _forbid(self, name: str):
        def forbidden(*_: object, **__: object) -> None:
            self.stop(protocol.POLICY, f"{name} is not allowed")

        return forbidden

    def _import(self, name, globals=None, locals=None, fromlist=(), level=0):
        if name in HELPERS and name in sys.modules:
            return sys.modules[name]
        if level or not isinstance(name, str) or not is_allowed(name):
            self.stop(protocol.POLICY, f"import of {str(name)[:80]!r} is not allowed")
        root = name.partition(".")[0]
        if root in self.facades:
            return self.facades[root]
        if name not in sys.modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return sys.modules[name if fromlist else root]


class _Nowhere(io.TextIOBase):
    """Takes what is printed and forgets it."""

    def write(self, text: str) -> int:
        return len(text)

    def writable(self) -> bool:
        return True


class _Sys(types.ModuleType):
    """The harmless part of `sys`. Its streams are the real ones, so that a program can redirect them."""

    stdin = property(lambda self: sys.stdin, lambda self, value: setattr(sys, "stdin", value))
    stdout = property(lambda self: sys.stdout, lambda self, value: setattr(sys, "stdout", value))
    stderr = property(lambda self: sys.stderr, lambda self, value: setattr(sys, "stderr", value))


_SYS_NAMES = [
    *("byteorder", "exc_info", "exit", "float_info", "float_repr_style", "getdefaultencoding", "intern", "maxsize"),
    *("maxunicode", "platform"),
]


def _make_io_facade() -> Any:
    facade: Any = types.ModuleType("io")
    for name in ("StringIO", "BytesIO", "TextIOBase", "RawIOBase", "IOBase", "BufferedIOBase", "TextIOWrapper"):
        setattr(facade, name, getattr(io, name))
    facade.SEEK_SET, facade.SEEK_CUR, facade.SEEK_END = 0, 1, 2
    return facade


def silence() -> None:
    """Gives every child streams that lead nowhere, with or without the soft layer."""
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(), _Nowhere(), _Nowhere()
    for name in ("__stdin__", "__stdout__", "__stderr__"):
        setattr(sys, name, None)
