"""Computes the 95 % intervals that stand beside reported figures: means over seeds, tasks or questions, and shares.

Values have to be independent of each other. Attempts at one task are not, and neither are students of one run: take
the mean of each task, or of each run, first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from scipy.special import ndtri, stdtrit


LEVEL = 0.95
_BELOW = (1 + LEVEL) / 2  # share of a distribution below the upper end of the interval


def measure_mean(values: Sequence[float]) -> tuple[float, float]:
    """
    Computes a mean and half of its 95 % interval, by Student's t.

    Args:
        values: Independent values: one per seed, task or question.

    Returns:
        Mean and half of the interval. The half is `inf` for a single value.

    Raises:
        `ValueError`: If there are no values.
    """
    if not values:
        raise ValueError("`values` is empty; an interval needs at least one value.")
    if len(values) == 1:
        return fmean(values), math.inf
    quantile = float(stdtrit(len(values) - 1, _BELOW))
    return fmean(values), quantile * stdev(values) / math.sqrt(len(values))


def find_share(share: float, count: int) -> tuple[float, float]:
    """
    Computes the 95 % interval of a share by Wilson's rule, which holds near 0 and 1 and for few values, too.

    Args:
        share: The share, between 0 and 1.
        count: Number of independent values, for example of tasks. If each value is itself a share, of the attempts at
            one task, the interval is as wide as if all attempts at a task ended alike.
    """
    z = float(ndtri(_BELOW))
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - half), min(1.0, middle + half)
