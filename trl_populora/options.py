"""
What an option may be: something that a user wrote (`module:function`), a number in bounds, one of several choices.
"""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from numbers import Integral, Real
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints


if TYPE_CHECKING:
    from _typeshed import DataclassInstance


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


# What a setting may be: the checks that the settings of all rooms share. Errors name setting and value.


_RELATIONS = {
    ">=": (operator.ge, "at least"),
    ">": (operator.gt, "above"),
    "<=": (operator.le, "at most"),
    "<": (operator.lt, "below"),
}


def check_numbers(settings: DataclassInstance) -> None:
    """
    Holds every field of a dataclass whose type is a number to that type.

    Raises:
        `ValueError`: If an `int` field holds no whole number, a `float` field no finite number, or a field with a list
            of floats anything else than finite numbers. A truth value is no number.
    """
    hints = get_type_hints(type(settings))
    for each in fields(settings):
        value, hint = getattr(settings, each.name), hints[each.name]
        kinds = {hint, *get_args(hint)}
        if str in kinds or (value is None and NoneType in kinds):
            continue
        if list[float] in kinds:
            wanted, right = "a list of finite numbers", isinstance(value, list) and all(map(_is_finite, value))
        elif float in kinds:
            wanted, right = "a finite number", _is_finite(value)
        elif int in kinds:
            wanted, right = "a whole number", isinstance(value, Integral) and not isinstance(value, bool)
        else:
            continue
        if not right:
            raise ValueError(f"`{each.name}` must be {wanted}, got {value!r}.")


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def check_bounds(settings: object, bounds: Mapping[str, str]) -> None:
    """
    Args:
        settings: What has the settings as attributes.
        bounds: The names of settings by what they must be: `{">= 1": "students archive_size"}`.

    Raises:
        `ValueError`: If a setting that is given is out of bounds, or is NaN.
    """
    for bound, names in bounds.items():
        relation, limit = bound.split()
        holds, words = _RELATIONS[relation]
        for name in names.split():
            value = getattr(settings, name)
            if value is not None and not holds(value, float(limit)):
                raise ValueError(f"`{name}` must be {words} {limit}, got {value}.")


def check_choices(settings: object, choices: Mapping[str, Collection[object]]) -> None:
    """
    Raises:
        `ValueError`: If a setting is none of those that it may be.
    """
    for name, allowed in choices.items():
        if getattr(settings, name) not in allowed:
            raise ValueError(
                f"`{name}` must be one of {', '.join(map(str, allowed))}, got {getattr(settings, name)!r}."
            )
