"""What a setting may be: the checks that the settings of all rooms share. Errors name setting and value."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import fields
from numbers import Integral, Real
from types import NoneType
from typing import TYPE_CHECKING, get_args, get_type_hints


if TYPE_CHECKING:
    from _typeshed import DataclassInstance


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
