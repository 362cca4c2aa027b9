"""The soft layer: keeps honest programs to what a training task may use. It improves data and protects nothing.

Each program gets builtins and a few module facades of its own. The standard library itself keeps the real modules. An
import outside the allow-list, `open`, `input` and `breakpoint` end a program with status `policy`. A program ends
with `nondeterministic` if it reads a clock, uses a hash or an address as a number, or depends on the interpreter.
Repeated runs would miss much of this: all of them have the same year and the same Python, and a rare coin flip may
occur in none of them.

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
    *("functools", "graphlib", "heapq", "html", "html.parser", "io", "ipaddress", "itertools", "json", "keyword"),
    *("math", "numbers", "operator", "pprint", "re", "statistics", "string", "struct", "sys", "textwrap", "time"),
    *("traceback", "types", "typing", "unicodedata", "urllib.parse", "warnings", "weakref"),
]
# Python itself imports these two modules, but only when a program needs them, and then no file can be opened.
# `strptime` imports `_strptime` through the program's own `__import__`. Since version 3.12 Python converts large
# integers with `_pylong`.
HELPERS = frozenset(["_strptime", "_pylong"])
CODECS = [
    *("ascii", "latin-1", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"),
    *("cp1252", "cp437", "idna", "punycode", "rot13", "hex", "base64", "unicode_escape", "raw_unicode_escape"),
]
# These modules exist to scramble. A task that asks for a few bits of a digest is a coin toss: it pays its teacher like
# a hard task and teaches nothing. Some published benchmarks use these modules; they run without the soft layer.
SCRAMBLING = ["binascii", "hashlib", "hmac", "random", "secrets", "uuid", "zlib"]
# Benchmarks and tests of the walls run without the soft layer. There a program may import these modules as well: the
# tests need every module that an attacker would want.
HOSTILE = [
    *SCRAMBLING,
    *("os", "posix", "socket", "ctypes", "subprocess", "signal", "threading", "mmap", "resource", "fcntl", "pickle"),
    *("gc", "inspect", "importlib", "multiprocessing", "pty", "select", "selectors", "tempfile", "shutil", "pathlib"),
    *("builtins", "platform", "marshal", "codeop", "code", "atexit", "asyncio", "logging", "glob"),
]

ALLOWED = frozenset(MODULES) | {name.partition(".")[0] for name in MODULES}


def is_allowed(name: str) -> bool:
    """Says whether a program may import a module: a listed one, or a loaded part of a listed package."""
    return name in ALLOWED or (name.partition(".")[0] in ALLOWED and name in sys.modules)


def preload(hostile: bool) -> None:
    """Imports all modules that a program may import, as far as this installation has them, and loads `CODECS`."""
    for name in [*MODULES, *HELPERS, *(HOSTILE if hostile else ())]:
        try:
            __import__(name)
        except ImportError:
            continue
    for name in CODECS:
        codecs.lookup(name)


def preload_packages(folders: dict[str, str]) -> None:
    """
    Imports installed packages into the zygote, which starts without site-packages.

    Args:
        folders: The folder of each package, by the package's name. Folders are put last on `sys.path`.
    """
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # threads would not survive the fork
    sys.path.extend(dict.fromkeys(folders.values()))
    for name in folders:
        __import__(name)


MODULE = "program"  # the name of the module that a program runs as


class Refused(BaseException):
    """Ends a program that did what it must not. It is no `Exception`, so that an `except Exception` lets it pass."""


class Guard:
    """
    What a program sees of Python: its builtins, its modules, its own namespace.

    Args:
        enabled: Whether the program gets guarded builtins and modules; if not, the real ones.
    """

    def __init__(self, enabled: bool):
        self.finding: tuple[str, list[str]] | None = None
        self.facades: dict[str, Any] = {}
        self.enabled, self.limits = enabled, entropy.Limits()
        self.builtins = dict(vars(builtins))
        if enabled:
            self._enable()
        # `dataclasses` and others look up the module of a class in `sys.modules`.
        module = sys.modules[MODULE] = types.ModuleType(MODULE)
        self.namespace = vars(module)
        self.namespace["__builtins__"] = self.builtins

    def stop(self, word: str, reason: str) -> None:
        """Raises [`Refused`]. The first finding is noted, and stays even if the program catches the exception."""
        if self.finding is None:
            self.finding = (word, [protocol.make_line(reason)])
        raise Refused(reason)

    def screen(self, code: types.CodeType) -> None:
        """Stops a program whose text names something that the language leaves to the interpreter."""
        if self.enabled and (inside := entropy.find_inside(code)):
            self._stop_entropy(f"{inside} depends on the interpreter")

    def _stop_entropy(self, reason: str) -> None:
        """Stops a program as nondeterministic."""
        self.stop(protocol.ENTROPY, reason)

    def _enable(self) -> None:
        """Puts the guards in place of builtins and modules."""
        self.facades = entropy.make_facades(self._stop_entropy)
        self.facades["sys"] = self._make_sys_facade()
        io_facade = self.facades["io"] = _make_io_facade()
        io_facade.open = self._forbid("io.open()")
        self.builtins["__import__"] = self._import
        self.builtins.update(entropy.make_builtins(self._stop_entropy, self.limits))
        self.builtins["getattr"] = entropy.make_getattr(self._stop_entropy)
        for name in ("open", "input", "breakpoint"):
            self.builtins[name] = self._forbid(f"{name}()")
        # `site` adds these for people at a prompt. No program has a use for them.
        for name in ("exit", "quit", "help", "copyright", "credits", "license"):
            self.builtins.pop(name, None)

    def _make_sys_facade(self) -> types.ModuleType:
        class Sys(_Sys):
            """The facade with the guards of this program. Guards are properties, which only a class can have."""

        entropy.guard_sys(Sys, self.limits, self._stop_entropy)
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
        """
        Takes the place of `__import__`: gives a facade or a loaded module. A module that is not allowed stops the
        program. A module that is allowed but not installed raises `ModuleNotFoundError`, as in Python.
        """
        if name in HELPERS and name in sys.modules:
            return sys.modules[name]
        if level or not isinstance(name, str) or not is_allowed(name):
            self.stop(protocol.POLICY, f"import of {str(name)[:80]!r} is not allowed")
        root = name.partition(".")[0]
        if root in self.facades:
            return self.facades[root]
        if name not in sys.modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return sys.modules[name if fromlist else root]  # as Python does: `import a.b` binds `a`


class _Nowhere(io.TextIOBase):
    """A stream that forgets what is printed."""

    def write(self, text: str) -> int:
        return len(text)

    def writable(self) -> bool:
        return True


class _Sys(types.ModuleType):
    """
    The harmless part of `sys`. If a program assigns one of the three streams, the real `sys` gets that stream, so that
    `print` uses it.
    """

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
    """Gives every child streams that lead nowhere, with the soft layer and without."""
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(), _Nowhere(), _Nowhere()
    for name in ("__stdin__", "__stdout__", "__stderr__"):
        setattr(sys, name, None)
