"""What somebody answers who has not looked at a task: arguments of the right form (solve)."""

from __future__ import annotations

import random
from typing import Any


MAX_SIZE = 2000  # values and characters of one guess: each level of nested lists would double it


def guess_blindly(value: Any, rng: random.Random) -> Any:
    """
    A value of the same form as `value`: types stay, numbers are of its size, texts and lists up to twice as long, and
    lists are filled as long as the whole is no larger than `MAX_SIZE`.

    Args:
        value: Plain data.
        rng: Decides the rest.
    """
    left = MAX_SIZE

    def draw(value: Any) -> Any:
        nonlocal left
        left -= 1 + (len(value) if isinstance(value, (str, bytes)) else 0)
        if isinstance(value, tuple):  # a record, as arguments are: its length is part of its form
            return tuple(map(draw, value))
        if isinstance(value, dict):
            return {draw(name): draw(each) for name, each in value.items()}
        if isinstance(value, (list, set, frozenset)):
            members = sorted(value, key=repr) if not isinstance(value, list) else value
            count = rng.randint(0, 2 * len(members) + 2) if members else 0
            return type(value)(draw(rng.choice(members)) for _ in range(count) if left > 0)
        return _vary(value, rng)

    return draw(value)


def _vary(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return rng.random() < 0.5
    if isinstance(value, int):
        return rng.randint(min(0, 2 * value - 10), max(0, 2 * value + 10))
    if isinstance(value, float):
        return round(rng.uniform(min(0.0, 2 * value - 10), max(0.0, 2 * value + 10)), 2)
    if isinstance(value, str):
        return "".join(rng.choices(value + "abcxyz", k=rng.randint(0, 2 * len(value) + 2)))
    if isinstance(value, bytes):
        return bytes(rng.choices(value + b"abcxyz", k=rng.randint(0, 2 * len(value) + 2)))
    return value  # None, and complex numbers, which no task of this kind is about
