"""Intervals cover what they say: of seeds, of tasks, and of shares."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest
from scipy.stats import t

from trl_populora.evaluate.intervals import find_share, measure_mean


DRAWS = 2000


@pytest.mark.parametrize("seeds", [3, 5, 9])
def test_an_interval_over_few_seeds_holds_the_truth_in_95_of_100(seeds):
    rng, held = random.Random(seeds), 0
    for _ in range(DRAWS):
        mean, half = measure_mean([rng.gauss(0.05, 0.03) for _ in range(seeds)])
        held += abs(mean - 0.05) <= half
    assert held / DRAWS == pytest.approx(0.95, abs=0.015), "the bootstrap's hold it in .75 and .84 (3 and 5 seeds)"


def test_a_mean_and_half_of_its_interval_are_students():
    values = [0.1, 0.4, 0.2, 0.3, 0.1]
    mean, half = measure_mean(values)
    low, high = t.interval(0.95, 4, fmean(values), math.sqrt(0.017 / 5))
    assert (mean, mean - half, mean + half) == pytest.approx((0.22, low, high))


def test_one_value_says_nothing_about_others():
    assert measure_mean([0.3]) == (0.3, math.inf)
    with pytest.raises(ValueError, match="`values` is empty"):
        measure_mean([])


@pytest.mark.parametrize("tasks", [2, 4, 16])
@pytest.mark.parametrize("hard", [(0.15, 0.15), (1, 1), (0.5, 4.5)])
def test_the_interval_of_a_share_of_attempts_holds_for_new_tasks(tasks, hard):
    """Each task has a difficulty of its own, and four attempts at it."""
    rng, held, truth = random.Random(tasks), 0, hard[0] / sum(hard)
    for _ in range(DRAWS):
        rates = [rng.betavariate(*hard) for _ in range(tasks)]
        low, high = find_share(fmean(rng.random() < rate for rate in rates for _ in range(4)), tasks)
        held += low <= truth <= high
    assert held / DRAWS >= 0.935, "counted as independent attempts they are held in .57 to .93"


def test_a_share_of_all_or_none_is_not_certain():
    assert find_share(0.0, 8) == pytest.approx((0, 0.3244), abs=1e-4)
    assert find_share(1.0, 8) == pytest.approx((0.6756, 1), abs=1e-4)
