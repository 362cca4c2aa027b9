"""What a user wrote and a setting names: `"package.module:attribute"`, a kind of task or a function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any


def find_own(path: str, what: str, choices: str) -> Any:
    """
    Imports what `package.module:attribute` names.

    Args:
        path: The name.
        what: What is looked for, for the error: `"task kind"`.
        choices: What may be named, likewise.

    Raises:
        `ValueError`: If there is no such module or attribute.
    """
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        missing = isinstance(error, ImportError)
        way_out = " A module that lies elsewhere needs its folder in `PYTHONPATH`." if missing else ""
        raise ValueError(f"Unknown {what} {path!r} ({error}); it must be {choices}.{way_out}") from error


def list_choices(named: Iterable[str]) -> str:
    """What a setting that names a function may be."""
    own = "`module:function` for a function of your own"
    return f"one of {', '.join(named)}, or {own}" if named else own


def is_own(name: object) -> bool:
    """Whether a setting names a user's own function and none of the package's."""
    return isinstance(name, str) and ":" in name


def find_function(path: str, option: str, named: Iterable[str] = ()) -> Callable[..., Any]:
    """
    A user's own function, which says in one line what it was given where it raises.

    Args:
        path: Its name, `module:function`.
        option: The setting, for errors.
        named: What the setting may be beside, likewise.

    Raises:
        `ValueError`: If there is no such function.
    """
    what = list_choices(named)
    function = find_own(path, f"`{option}`", what)
    if not callable(function):
        raise ValueError(f"`{option}={path}` is no function but {function!r:.80}; it must be {what}.")

    def ask(*arguments: Any, **settings: Any) -> Any:
        try:
            return function(*arguments, **settings)
        except Exception as error:
            given = " ".join(", ".join(map(repr, arguments)).split())
            raise RuntimeError(f"`{option}={path}` raises {error!r:.200} for {given:.300}.") from error

    return ask
