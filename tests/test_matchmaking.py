"""Pairing and rating against closed forms that are computed here, not by the `trueskill` package."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, norm, spearmanr

from trl_populora.matchmaking import (
    Match,
    Matchmaker,
    everyone_plays,
    pfsp_weight,
    rate,
    student_share,
    win_probability,
)
from trl_populora.population import PRIOR_SIGMA, Member, Population


BETA, TAU, DRAW_PROBABILITY = 25 / 6, 25 / 300, 0.1


def member(mu: float = 25.0, sigma: float = 25 / 3, role: str = "student") -> Member:
    return Member(f"{role}_0", role, 0, mu, sigma)


def posterior_of_win(mu: float, sigma: float, other_mu: float, other_sigma: float, won: bool) -> tuple[float, float]:
    """Herbrich et al. (2006), equations for two players without a draw."""
    variance, other_variance = sigma**2 + TAU**2, other_sigma**2 + TAU**2
    c = math.sqrt(2 * BETA**2 + variance + other_variance)
    margin = norm.ppf((DRAW_PROBABILITY + 1) / 2) * math.sqrt(2) * BETA / c
    gap = (mu - other_mu if won else other_mu - mu) / c - margin
    v = norm.pdf(gap) / norm.cdf(gap)
    w = v * (v + gap)
    return mu + (1 if won else -1) * variance / c * v, math.sqrt(variance * (1 - variance / c**2 * w))


class TestRating:
    def test_an_even_win_from_the_prior(self):
        student, teacher = rate(member(), member(role="teacher"), 1.0)
        assert student == pytest.approx(posterior_of_win(25, 25 / 3, 25, 25 / 3, True), abs=1e-6)
        assert teacher == pytest.approx(posterior_of_win(25, 25 / 3, 25, 25 / 3, False), abs=1e-6)
        assert (round(student[0], 3), round(teacher[0], 3)) == (29.396, 20.604)
        assert round(student[1], 3) == 7.171

    @pytest.mark.parametrize("share", [0.0, 0.125, 0.3, 0.5, 0.9, 1.0])
    @pytest.mark.parametrize("ratings", [((25, 8.0), (25, 5.0)), ((32, 3.0), (21, 2.0)), ((12, 7.0), (30, 1.5))])
    def test_a_fraction_is_the_moment_matched_mixture(self, share, ratings):
        (mu, sigma), (other_mu, other_sigma) = ratings
        for_student, for_teacher = rate(member(mu, sigma), member(other_mu, other_sigma, "teacher"), share)
        for got, own, other, weight in [
            (for_student, ratings[0], ratings[1], share),
            (for_teacher, ratings[1], ratings[0], 1 - share),
        ]:
            win, loss = (posterior_of_win(*own, *other, won) for won in (True, False))
            mean = weight * win[0] + (1 - weight) * loss[0]
            second = weight * (win[1] ** 2 + win[0] ** 2) + (1 - weight) * (loss[1] ** 2 + loss[0] ** 2)
            assert got == pytest.approx((mean, min(math.sqrt(second - mean**2), PRIOR_SIGMA)), abs=1e-6)

    def test_an_even_outcome_between_equals_moves_nobody(self):
        for mu, sigma in rate(member(), member(role="teacher"), 0.5):
            assert mu == pytest.approx(25.0)
            assert sigma == PRIOR_SIGMA

    @settings(deadline=None, max_examples=50)
    @given(st.floats(0, 1), st.floats(0, 50), st.floats(0, 50), st.floats(0.5, 8.3), st.floats(0.5, 8.3))
    def test_ratings_stay_finite_and_no_less_certain_than_a_newborn(self, share, mu, other, sigma, other_sigma):
        for new_mu, new_sigma in rate(member(mu, sigma), member(other, other_sigma, "teacher"), share):
            assert math.isfinite(new_mu)
            assert 0 < new_sigma <= PRIOR_SIGMA

    @pytest.mark.parametrize(("gap", "sigma"), [(0.0, 8.333), (10.0, 8.333), (-7.0, 2.0)])
    def test_win_probability_is_the_closed_form(self, gap, sigma):
        spread = math.sqrt(2 * BETA**2 + 2 * sigma**2)
        got = win_probability(member(25 + gap, sigma), member(25, sigma, "teacher"))
        assert got == pytest.approx(norm.cdf(gap / spread), abs=1e-12)

    def test_update_rates_in_order_of_the_matches_and_ages_both_sides(self):
        outcomes = {Match(1, "teacher_1", "student_0"): 0.2, Match(0, "teacher_0", "student_0"): 0.9}
        population, by_hand = Population(2, 1), Population(2, 1)
        Matchmaker().update(population, outcomes)
        for teacher, share in (("teacher_0", 0.9), ("teacher_1", 0.2)):
            student, opponent = by_hand["student_0"], by_hand[teacher]
            (student.mu, student.sigma), (opponent.mu, opponent.sigma) = rate(student, opponent, share)
        assert [(m.mu, m.sigma) for m in population] == [(m.mu, m.sigma) for m in by_hand]
        assert [m.age for m in population] == [1, 1, 2]

    @pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
    def test_an_impossible_outcome_changes_nothing(self, share):
        population = Population(1, 1)
        match = Match(0, "teacher_0", "student_0")
        with pytest.raises(ValueError, match="share of .*teacher_0.* must be in"):
            Matchmaker().update(population, {match: share})
        assert population.members == Population(1, 1).members

    @pytest.mark.parametrize("strategy", ["pfsp", "uniform"])
    @pytest.mark.parametrize("size", [4, 8])
    def test_a_thousand_matches_recover_the_order_of_known_strengths(self, strategy, size):
        rng = np.random.default_rng(3)
        population, matchmaker = Population(size, size), Matchmaker(strategy, seed=5)
        strength = dict(zip(population.names, rng.normal(25, 8, 2 * size), strict=True))
        for _ in range(1000 // size):
            outcomes = {}
            for match in matchmaker.pair(population):
                gap = strength[match.student] - strength[match.teacher]
                solved = rng.binomial(8, norm.cdf(gap / (math.sqrt(2) * BETA)), size=12)
                outcomes[match] = float(solved.mean() / 8)
            matchmaker.update(population, outcomes)
        ratings = [member.mu for member in population]
        assert spearmanr(ratings, list(strength.values())).statistic >= 0.95


class TestShare:
    @pytest.mark.parametrize(
        ("valid", "solve_rate", "share"),
        [
            (False, math.nan, 1.0),
            (False, 0.0, 1.0),
            (True, 0.0, 0.5),
            (True, 0.5, 0.5),
            (True, 0.125, 0.125),
            (True, 1.0, 1.0),
        ],
    )
    def test_truth_table(self, valid, solve_rate, share):
        assert student_share(valid, solve_rate) == share

    @pytest.mark.parametrize("solve_rate", [-0.5, 1.5, math.nan])
    def test_a_valid_proposal_needs_a_solve_rate(self, solve_rate):
        with pytest.raises(ValueError, match="solve_rate"):
            student_share(True, solve_rate)


class TestPairing:
    @pytest.mark.parametrize("strategy", ["pfsp", "uniform"])
    @pytest.mark.parametrize(("teachers", "students"), [(1, 1), (2, 3), (3, 2), (4, 4), (8, 3), (1, 5), (8, 8)])
    def test_one_match_per_teacher_and_loads_within_one_at_every_step(self, strategy, teachers, students):
        population, matchmaker = Population(teachers, students), Matchmaker(strategy, seed=1)
        for index, member in enumerate(population):
            member.mu += 9 * index % 17  # lopsided ratings, so that the weights pull away from even loads
        loads = Counter({member.name: 0 for member in population.students})
        for _ in range(30):
            matches = matchmaker.pair(population)
            assert [match.index for match in matches] == list(range(teachers))
            assert [match.teacher for match in matches] == [member.name for member in population.teachers]
            step = Counter(match.student for match in matches)
            loads.update(step)
            assert max(loads.values()) - min(loads.values()) <= 1
            if teachers == students:
                assert set(step.values()) == {1}

    @pytest.mark.parametrize(("teachers", "students"), list(itertools.product(range(1, 6), repeat=2)))
    def test_who_may_be_left_idle_is_known_beforehand(self, teachers, students):
        population, matchmaker = Population(teachers, students), Matchmaker("uniform", seed=3)
        busy = [len({match.student for match in matchmaker.pair(population)}) for _ in range(60)]
        assert everyone_plays(teachers, students) == (min(busy) == students)

    @pytest.mark.parametrize(
        ("strategy", "kappa", "floor"), [("pfsp", 1.0, 0.0), ("pfsp", 3.0, 0.01), ("uniform", 1.0, 0.0)]
    )
    def test_a_single_choice_follows_the_weights(self, strategy, kappa, floor):
        population, draws = Population(1, 4), 3000
        for member, mu in zip(population.students, (10, 22, 27, 40), strict=True):
            member.mu, member.sigma = mu, 2.0
        population["teacher_0"].sigma = 2.0
        matchmaker = Matchmaker(strategy, kappa, floor, seed=7)
        fresh = matchmaker.state_dict()["loads"]
        counts: Counter[str] = Counter()
        for _ in range(draws):
            counts[matchmaker.pair(population)[0].student] += 1
            # Even loads would turn the second draw into a rotation; only the first one is free.
            matchmaker.load_state_dict(matchmaker.state_dict() | {"loads": fresh})
        p = norm.cdf((np.array([10, 22, 27, 40]) - 25) / math.sqrt(2 * BETA**2 + 8))
        weights = (p * (1 - p)) ** kappa + floor if strategy == "pfsp" else np.ones(4)
        expected = weights / weights.sum() * draws
        observed = [counts[member.name] for member in population.students]
        assert chisquare(observed, expected).pvalue > 0.01

    def test_one_to_one_follows_the_closed_form_for_two_by_two(self):
        # The two assignments differ by the log-odds of the weights plus a sum of two standard logistic variables,
        # whose distribution function is e^x (e^x - x - 1) / (e^x - 1)^2.
        population, draws = Population(2, 2), 3000
        for member, mu in zip(population, (30.0, 20.0, 30.0, 21.0), strict=True):
            member.mu, member.sigma = mu, 3.0
        matchmaker = Matchmaker(floor=0.0, seed=11)
        straight = sum(matchmaker.pair(population)[0].student == "student_0" for _ in range(draws))
        spread = math.sqrt(2 * BETA**2 + 18)
        weight = {(t, s): norm.cdf((s - t) / spread) * norm.cdf((t - s) / spread) for t in (30, 20) for s in (30, 21)}
        x = math.log(weight[30, 30] * weight[20, 21] / (weight[30, 21] * weight[20, 30]))
        probability = math.exp(x) * (math.exp(x) - x - 1) / (math.exp(x) - 1) ** 2
        expected = [probability * draws, (1 - probability) * draws]
        assert chisquare([straight, draws - straight], expected).pvalue > 0.01
        assert probability > 0.75  # balanced pairs are really preferred

    def test_weight_at_a_gap_of_ten_is_flat_at_the_prior(self):
        p = win_probability(member(35.0), member(25.0, role="teacher"))
        assert pfsp_weight(p, 1.0, 0.0) / 0.25 == pytest.approx(0.695, abs=5e-4)

    def test_hopeless_odds_do_not_break_a_draw_without_floor(self):
        population = Population(2, 2)
        for member, mu in zip(population, (1e4, -1e4, 0.0, 0.0), strict=True):
            member.mu, member.sigma = mu, 0.1
        assert {match.student for match in Matchmaker(floor=0.0).pair(population)} == {"student_0", "student_1"}

    def test_same_seed_same_matches_also_across_a_save(self):
        population = Population(3, 4)
        one, two = Matchmaker(seed=3), Matchmaker(seed=3)
        assert [one.pair(population) for _ in range(5)] == [two.pair(population) for _ in range(5)]
        resumed = Matchmaker(seed=99)
        resumed.load_state_dict(json.loads(json.dumps(one.state_dict())))
        assert [resumed.pair(population) for _ in range(5)] == [one.pair(population) for _ in range(5)]

    def test_metrics_exist_before_and_after_a_step(self):
        population, matchmaker = Population(2, 2), Matchmaker()
        keys = set(matchmaker.metrics())
        matches = matchmaker.pair(population)
        matchmaker.update(population, dict.fromkeys(matches, 0.75))
        metrics = matchmaker.metrics()
        assert set(metrics) == keys
        assert metrics["match/win_prob_mean"] == pytest.approx(0.5)
        assert metrics["match/student_share_mean"] == 0.75
        assert metrics["match/rating_error"] == pytest.approx(0.25)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"strategy": "elo"}, "'elo'"),
            ({"kappa": -1.0}, "kappa"),
            ({"floor": -0.1}, "floor"),
            ({"kappa": math.nan}, "kappa"),
        ],
    )
    def test_impossible_settings_are_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            Matchmaker(**options)
