"""Checks what an option may be. Errors name the option and the value received.

In the order of reading:

1. An option that names a user's own function, `"module:function"`: the function is imported. If it raises when it is
   called, the error names the option and what the function was given.
2. An option that is a number, a number in bounds, or one of several choices.
3. An option that has one value, or a list with one value for each member.
4. `warm_start`, which names directories.
"""

from __future__ import annotations

import argparse
import importlib
import math
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints


if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def find_own(path: str, what: str, choices: str) -> Any:
    """
    Imports a user's own function or class, which an option names as `"package.module:attribute"`.

    Args:
        path: Name of the function or class, as the option gives it.
        what: The sort of thing that is wanted, such as `"task kind"`; for the error.
        choices: All that may be named; for the error.

    Raises:
        `ValueError`: If there is no such module, or no such attribute in it.
    """
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        missing = isinstance(error, ImportError)
        way_out = " A module outside of the current folder needs its folder in `PYTHONPATH`." if missing else ""
        raise ValueError(f"Unknown {what} {path!r} ({error}); it must be {choices}.{way_out}") from error


def list_choices(named: Iterable[str]) -> str:
    """Lists what a setting may name, for an error: the functions in `named`, or a user's own function."""
    own = "`module:function` for a function of your own"
    return f"one of {', '.join(named)}, or {own}" if named else own


def is_own(name: object) -> bool:
    """Says whether a setting names a user's own function, and none of the package's."""
    return isinstance(name, str) and ":" in name


def find_function(path: str, option: str, named: Iterable[str] = ()) -> Callable[..., Any]:
    """
    Imports a user's own function. Returns it with one addition: if a call raises, a `RuntimeError` names the option
    and the positional arguments.

    Args:
        path: Name of the function, `module:function`.
        option: The setting that names it; for errors.
        named: The package's functions that the setting may name instead; for errors.

    Raises:
        `ValueError`: If there is nothing of this name, or if it is no function.
    """
    what = list_choices(named)
    function = find_own(path, f"`{option}`", what)
    if not callable(function):
        raise ValueError(f"`{option}={path}` is no function but {function!r:.80}; it must be {what}.")

    def ask(*arguments: Any, **settings: Any) -> Any:
        try:
            return function(*arguments, **settings)
        except Exception as error:
            # A tensor's `repr` has many lines.
            given = " ".join(", ".join(map(repr, arguments)).split())
            raise RuntimeError(
                f"`{option}={path}` raised {error!r:.200} when it was called with {given:.300}."
            ) from error

    return ask


# Checks of numbers and choices, for settings of the whole package.


_RELATIONS = {
    ">=": (operator.ge, "at least"),
    ">": (operator.gt, "above"),
    "<=": (operator.le, "at most"),
    "<": (operator.lt, "below"),
}


def check_numbers(settings: DataclassInstance) -> None:
    """
    Checks that each field annotated as `int`, `float` or `list[float]` holds what its annotation says.

    `None` passes where the annotation has it. Fields that may also hold a text are not checked. Nothing converts what
    a script passes, so a text such as `"1e-5"` would reach the training. A truth value is no number, although Python
    counts `True` as an `int`.

    Raises:
        `ValueError`: If an `int` field holds no whole number, a `float` field no finite number, or a `list[float]`
            field anything but a list of finite numbers.
    """
    hints = get_type_hints(type(settings))
    for each in fields(settings):
        value, hint = getattr(settings, each.name), hints[each.name]
        kinds = {hint, *get_args(hint)}  # for `int | None` these are the union itself, `int` and `NoneType`
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
    Checks numbers against their bounds. A setting that is `None` is not checked.

    Args:
        settings: An object with the settings as attributes.
        bounds: For each bound the names of the settings that must keep it: `{">= 1": "students archive_size"}`.

    Raises:
        `ValueError`: If a setting is out of bounds, or NaN.
    """
    for bound, names in bounds.items():
        relation, limit = bound.split()
        holds, words = _RELATIONS[relation]
        for name in names.split():
            value = getattr(settings, name)
            # NaN compares false with everything: it neither keeps a bound nor breaks one. `not holds` refuses it.
            if value is not None and not holds(value, float(limit)):
                raise ValueError(f"`{name}` must be {words} {limit}, got {value}.")


def check_choices(settings: object, choices: Mapping[str, Collection[object]]) -> None:
    """
    Checks that each setting has one of its allowed values.

    Args:
        settings: An object with the settings as attributes.
        choices: The allowed values of each setting, by the name of the setting.

    Raises:
        `ValueError`: If a setting has another value.
    """
    for name, allowed in choices.items():
        if getattr(settings, name) not in allowed:
            raise ValueError(
                f"`{name}` must be one of {', '.join(map(str, allowed))}, got {getattr(settings, name)!r}."
            )


# Options with one value, or a list with one value for each member.


class OneOrMore(argparse.Action):
    """Takes `--option 1e-6` as a value, and `--option 1e-6 3e-6` as a list. Needs `nargs="+"`."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def read_list(name: str, values: Sequence[Any], teachers: Any, students: Any) -> list[Any]:
    """
    Reads the list of an option's values, one for each member, teachers first. A text that looks like a number becomes
    a number, because YAML reads `1e-6`, which has no point, as a text.

    Args:
        name: The option.
        values: As the user has given them.
        teachers, students: Numbers of members. If one is no number, the length is not checked, because
            [`check_numbers`] will refuse it.

    Raises:
        `ValueError`: If the list has another length.
    """
    counted = isinstance(teachers, int) and isinstance(students, int)
    if not values or (counted and len(values) != teachers + students):
        members, each = f"{students} member(s)", f"one for each (`students={len(values)}` makes as many members)"
        if teachers:
            members, each = f"{teachers} teacher(s) and {students} student(s)", "one for each, teachers first"
        raise ValueError(
            f"`{name}={list(values)!r:.120}` lists {len(values)} value(s) for {members}. List {each}, or give one "
            "value for all."
        )
    return [_read_number(value) if isinstance(value, str) else value for value in values]


def _read_number(text: str) -> Any:
    """Turns a text that reads as a number into this number. Returns any other text as it is."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def read_sources(source: object) -> str | list[str] | dict[str, str]:
    """
    Reads `warm_start`: a directory or Hub name, a list of such, or a dictionary with one for a role. Makes paths text.

    Raises:
        `ValueError`: If it is something else.
    """
    if isinstance(source, Mapping):
        named = list(source.values())
    else:
        named = list(source) if isinstance(source, (list, tuple)) else [source]
    if not all(isinstance(each, (str, os.PathLike)) for each in named):
        raise ValueError(f"`warm_start` must name directories or Hub names, got {source!r:.300}.")
    texts = [os.fspath(each) for each in named]
    if isinstance(source, Mapping):
        return dict(zip(source, texts, strict=True))
    return texts if isinstance(source, (list, tuple)) else texts[0]
