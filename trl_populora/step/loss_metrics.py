"""Update: what the loss tells of each micro-batch, as one figure per step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


EXTREMES = {"clip_ratio/low_min": min, "clip_ratio/high_max": max}  # over rows


class LossMetrics:
    """
    Figures of TRL's loss over all micro-batches of a step.

    TRL takes the plain mean of its micro-batches. Here these hold unlike numbers of tokens and rows (see
    `batching.py`), and some only blank rows, of which TRL says 0. So means are weighed by what they are over, and of a
    step without a token in the loss nothing is known: NaN.

    Args:
        by_row (`bool`): Whether ratios are one per row (`importance_sampling_level="sequence"`), not one per token.
    """

    def __init__(self, by_row: bool):
        self.by_row = by_row
        self._parts: dict[str, list[tuple[float, int, int]]] = {}

    def add(self, figures: Mapping[str, Sequence[float]], rows: int, live: int, tokens: int) -> None:
        """
        Adds a micro-batch.

        Args:
            figures (`Mapping[str, Sequence[float]]`): What TRL logged of it.
            rows (`int`): Its rows on all ranks, blank ones included.
            live (`int`): Those that are not blank.
            tokens (`int`): Completion tokens of these.
        """
        for name, values in figures.items():
            parts = self._parts.setdefault(name, [])
            # TRL's mean over rows is over blank ones, too.
            over, weight = (rows, live) if self.by_row and "clip_ratio" in name else (tokens, tokens)
            parts += [(value, over, weight) for value in values if tokens]

    def take(self) -> dict[str, float]:
        """The step's figures; the next step begins without any."""
        found, self._parts = self._parts, {}
        return {name: _of_step(name, parts) if parts else math.nan for name, parts in found.items()}


def _of_step(name: str, parts: Sequence[tuple[float, int, int]]) -> float:
    if name in EXTREMES:
        return EXTREMES[name](value for value, *_ in parts)
    return sum(value * over for value, over, _ in parts) / sum(weight for *_, weight in parts)
