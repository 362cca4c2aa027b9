"""Update: figures that TRL's loss logs for each micro-batch, put together to one figure per step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


EXTREMES = {"clip_ratio/low_min": min, "clip_ratio/high_max": max}  # over rows


class LossMetrics:
    """
    Collects the figures of TRL's loss over all micro-batches of a step.

    TRL takes the plain mean over micro-batches. Here micro-batches differ in tokens and rows, and some hold blank rows
    only, for which TRL logs 0. Therefore each micro-batch's mean is weighted by its number of tokens (or rows). A step
    without a token in the loss gives NaN.

    Args:
        by_row: Whether there is one ratio per row (`importance_sampling_level="sequence"`) instead of one per token.
    """

    def __init__(self, by_row: bool):
        self.by_row = by_row
        self._parts: dict[str, list[tuple[float, int, int]]] = {}

    def add(self, figures: Mapping[str, Sequence[float]], rows: int, live: int, tokens: int) -> None:
        """
        Adds a micro-batch.

        Args:
            figures: What TRL logged for it.
            rows: Its rows on all ranks, blank ones included.
            live: How many of these are not blank.
            tokens: Completion tokens of the live rows.
        """
        for name, values in figures.items():
            parts = self._parts.setdefault(name, [])
            # TRL averages over blank rows, too: `over` undoes that.
            over, weight = (rows, live) if self.by_row and "clip_ratio" in name else (tokens, tokens)
            parts += [(value, over, weight) for value in values if tokens]

    def take(self) -> dict[str, float]:
        """Returns the step's figures, and forgets them."""
        found, self._parts = self._parts, {}
        return {name: _of_step(name, parts) if parts else math.nan for name, parts in found.items()}


def _of_step(name: str, parts: Sequence[tuple[float, int, int]]) -> float:
    if name in EXTREMES:
        return EXTREMES[name](value for value, *_ in parts)
    return sum(value * over for value, over, _ in parts) / sum(weight for *_, weight in parts)
