"""What a setting may be: the checks that the settings of all rooms share. Errors name setting and value."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def check_least(settings: object, bounds: Mapping[str, float]) -> None:
    """
    Raises:
        `ValueError`: If a setting that is given lies below its bound, or is NaN.
    """
    for name, least in bounds.items():
        value = getattr(settings, name)
        if value is not None and not value >= least:
            raise ValueError(f"`{name}` must be at least {least}, got {value}.")


def check_shares(settings: object, *names: str) -> None:
    """
    Raises:
        `ValueError`: If a setting is no number from 0 to below 1.
    """
    for name in names:
        if not 0 <= getattr(settings, name) < 1:
            raise ValueError(f"`{name}` must be in [0, 1), got {getattr(settings, name)}.")


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
