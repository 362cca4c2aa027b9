"""
Pairing and rating against closed forms that are computed here, not with the `trueskill` package's Gaussians. What is
said to be that package's own update is compared with it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
import trueskill
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, norm, spearmanr

from trl_populora.population.members import Member, Population
from trl_populora.population.ratings import (
    Match,
    Matchmaker,
    no_student_idles,
    pfsp_weight,
    rate_by_rewards,
    win_probability,
)


BETA, TAU, SHARE_SD = 25 / 6, 25 / 60, 0.25


def member(mu: float = 25.0, sigma: float = 25 / 3, role: str = "student") -> Member:
    return Member(f"{role}_0", role, 0, mu, sigma)


def posterior_of_a_match(own, other, lead: float) -> tuple[float, float]:
    """Mean and standard deviation of a player who led by `lead` points; own and other are `(mu, sigma)`."""
    variance, opponents = own[1] ** 2 + TAU**2, other[1] ** 2 + TAU**2
    total = variance + opponents + 2 * BETA**2
    return own[0] + variance / total * (lead - own[0] + other[0]), math.sqrt(variance - variance**2 / total)


def ratings(population: Population) -> list[tuple[float, float]]:
    return [(member.mu, member.sigma) for member in population]


def random_step(seed: int, teachers: int = 4, students: int = 3) -> tuple[Population, dict[Match, list[float]]]:
    """A population with ratings of all kinds, and the outcomes of a step."""
    rng = np.random.default_rng(seed)
    population = Population(teachers, students)
    for each in population:
        each.mu, each.sigma = rng.normal(25, 10), rng.uniform(0.5, 8.3)
    matches = Matchmaker(seed=seed).pair(population)
    return population, {match: list(rng.uniform(0, 1, rng.integers(1, 20))) for match in matches}


class TestRating:
    def test_an_even_match_with_a_clear_lead_from_the_prior(self):
        population = Population(1, 1)
        Matchmaker().update(population, {Match(0, "teacher_0", "student_0"): [0.6] * 12})
        # A tenth of a share is 8.16 points; of them the student earns u / (2 u + 2 beta^2) = 0.40.
        assert [round(mu, 2) for mu, _ in ratings(population)] == [21.73, 28.27]
        assert [round(sigma, 2) for _, sigma in ratings(population)] == [6.46, 6.46]

    @settings(deadline=None, max_examples=200)
    @given(
        st.lists(st.floats(0, 1), min_size=1, max_size=24),
        st.tuples(st.floats(-50, 100), st.floats(0.5, 8.4)),
        st.tuples(st.floats(-50, 100), st.floats(0.5, 8.4)),
    )
    def test_one_match_is_the_closed_form(self, shares, student, teacher):
        population = Population(1, 1)
        for each, (mu, sigma) in zip(population, (teacher, student), strict=True):
            each.mu, each.sigma = mu, sigma
        Matchmaker().update(population, {Match(0, "teacher_0", "student_0"): shares})
        lead = math.sqrt(2 * len(shares)) * BETA / SHARE_SD * (math.fsum(shares) / len(shares) - 0.5)
        expected = [posterior_of_a_match(teacher, student, -lead), posterior_of_a_match(student, teacher, lead)]
        assert np.array(ratings(population)) == pytest.approx(np.array(expected), abs=1e-9)

    def test_two_matches_of_one_student_weigh_by_precision(self):
        population = Population(2, 1)
        outcomes = {Match(0, "teacher_0", "student_0"): [0.9, 0.5], Match(1, "teacher_1", "student_0"): [0.2]}
        for each, (mu, sigma) in zip(population, [(20, 3.0), (31, 5.0), (26, 4.0)], strict=True):
            each.mu, each.sigma = mu, sigma
        Matchmaker().update(population, outcomes)
        precision, pull = 1 / (16 + TAU**2), 26 / (16 + TAU**2)
        for mu, sigma, lead in [
            (20, 3.0, 0.2 * 2 * BETA / SHARE_SD),
            (31, 5.0, -0.3 * math.sqrt(2) * BETA / SHARE_SD),
        ]:
            weight = 1 / (sigma**2 + TAU**2 + 2 * BETA**2)
            precision, pull = precision + weight, pull + weight * (mu + lead)
        student = population["student_0"]
        assert (student.mu, student.sigma) == pytest.approx((pull / precision, precision**-0.5), abs=1e-9)
        assert [each.age for each in population] == [1, 1, 2]

    @pytest.mark.parametrize("seed", range(5))
    def test_neither_the_order_of_matches_nor_of_proposals_matters(self, seed):
        """Ranks gather in another order when there are more of them: not a bit may differ then."""
        given, outcomes = random_step(seed)
        shuffled = {match: outcomes[match][::-1] for match in reversed(outcomes)}
        results = []
        for each in (outcomes, shuffled):
            population = Population(4, 3)
            population.load_state_dict(given.state_dict())
            Matchmaker().update(population, each)
            results.append(ratings(population))
        assert results[0] == results[1]

    @pytest.mark.parametrize("seed", range(5))
    def test_no_match_sees_what_another_of_its_step_taught(self, seed):
        """Numbering the matches otherwise changes nothing, which it would if they were rated one after the other."""
        given, outcomes = random_step(seed)
        renumbered = {Match(9 - match.index, match.teacher, match.student): outcomes[match] for match in outcomes}
        results = []
        for each in (outcomes, renumbered):
            population = Population(4, 3)
            population.load_state_dict(given.state_dict())
            Matchmaker().update(population, each)
            results.append(ratings(population))
        assert np.array(results[0]) == pytest.approx(np.array(results[1]), abs=1e-9)

    @pytest.mark.parametrize("share", [0.5, 0.9])
    def test_sigma_falls_to_its_stationary_value_whatever_the_outcome(self, share):
        population, matchmaker = Population(1, 1), Matchmaker()
        sigmas = []
        for _ in range(200):
            matchmaker.update(population, {Match(0, "teacher_0", "student_0"): [share] * 12})
            sigmas.append(population["student_0"].sigma)
        stationary = math.sqrt(TAU * math.sqrt(TAU**2 + 2 * BETA**2))
        assert sigmas == sorted(sigmas, reverse=True)
        assert sigmas[49] == pytest.approx(stationary, abs=0.01)
        assert sigmas[-1] == pytest.approx(stationary, abs=1e-9)
        assert round(stationary, 2) == 1.57

    def test_the_share_that_the_ratings_foresee_leaves_them_where_they_are(self):
        population = Population(1, 1)
        population["student_0"].mu = 29.0
        share = 0.5 + 4.0 / (math.sqrt(2 * 12) * BETA / SHARE_SD)
        matchmaker = Matchmaker()
        matchmaker.update(population, {Match(0, "teacher_0", "student_0"): [share] * 12})
        assert [each.mu for each in population] == pytest.approx([25.0, 29.0], abs=1e-9)
        assert matchmaker.metrics()["match/rating_error"] == pytest.approx(0.0, abs=1e-12)

    def test_no_more_than_all_is_foreseen(self):
        population, matchmaker = Population(1, 1), Matchmaker()
        population["student_0"].mu = 200.0
        matchmaker.update(population, {Match(0, "teacher_0", "student_0"): [1.0, 0.5]})
        assert matchmaker.metrics()["match/rating_error"] == pytest.approx(0.25)

    def test_ratings_of_the_former_rule_go_on(self):
        """A state of before scores were rated: the same fields, sigmas that never fell, means that hardly parted."""
        fields = {"age": 150, "born": 0, "parents": [], "operator": "init", "version": 0}
        members = [
            {"name": name, "role": name[:7], "index": index, "mu": mu, "sigma": sigma} | fields
            for index, (name, mu, sigma) in enumerate(
                [
                    ("teacher_0", 22.41, 8.12),
                    ("teacher_1", 25.9, 25 / 3),
                    ("student_0", 27.2, 7.43),
                    ("student_1", 24.6, 8.3),
                ]
            )
        ]
        loads = {"student_0": 150, "student_1": 150}
        state = {"rng": Matchmaker(seed=4).state_dict()["rng"], "loads": loads}
        population, matchmaker = Population(2, 2), Matchmaker()
        population.load_state_dict(json.loads(json.dumps({"members": members})))
        matchmaker.load_state_dict(json.loads(json.dumps(state)))
        assert ratings(population) == [(each["mu"], each["sigma"]) for each in members]
        for _ in range(50):
            matches = matchmaker.pair(population)
            strong = {match: match.student == "student_1" for match in matches}
            matchmaker.update(population, {match: [0.7 if strong[match] else 0.4] * 6 for match in matches})
        assert all(each.sigma < 2 for each in population)
        assert population["student_1"].mu > population["student_0"].mu + 5

    @pytest.mark.parametrize(("gap", "sigma"), [(0.0, 8.333), (10.0, 8.333), (-7.0, 2.0)])
    def test_win_probability_is_the_closed_form(self, gap, sigma):
        spread = math.sqrt(2 * BETA**2 + 2 * sigma**2)
        got = win_probability(member(25 + gap, sigma), member(25, sigma, "teacher"))
        assert got == pytest.approx(norm.cdf(gap / spread), abs=1e-12)

    @pytest.mark.parametrize("shares", [[0.5, -0.1], [1.1], [math.nan, 0.5], []])
    def test_an_impossible_outcome_changes_nothing(self, shares):
        population = Population(1, 1)
        match = Match(0, "teacher_0", "student_0")
        with pytest.raises(ValueError, match="shares of .*teacher_0.* must not be empty, and each must be in"):
            Matchmaker().update(population, {match: shares})
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
                outcomes[match] = list(solved / 8)
            matchmaker.update(population, outcomes)
        mus = [member.mu for member in population]
        assert spearmanr(mus, list(strength.values())).statistic >= 0.95


class TestWins:
    """`ratings: trueskill` is the library's own update, one game a match."""

    LIBRARY = trueskill.TrueSkill(tau=25 / 3 / 100)  # all else is its default

    @pytest.mark.parametrize(
        ("shares", "result"),
        [
            ([0.6, 0.5], "student"),
            ([0.4], "teacher"),
            ([0.5] * 12, "drawn"),
            ([0.0, 1.0], "drawn"),
            # The margin of a match of 12 proposals is .7405 points of 81.6 a share: .00907.
            ([0.5 + 0.009] * 12, "drawn"),
            ([0.5 - 0.009] * 12, "drawn"),
            ([0.5 + 0.0092] * 12, "student"),
            ([0.5 - 0.0092] * 12, "teacher"),
        ],
    )
    @pytest.mark.parametrize("known", [((25, 25 / 3), (25, 25 / 3)), ((31, 2.0), (24, 5.0))])
    def test_a_match_is_one_game_of_the_library(self, shares, result, known):
        population = Population(1, 1)
        for each, rating in zip(population, known, strict=True):
            each.mu, each.sigma = rating
        Matchmaker(ratings="trueskill").update(population, {Match(0, "teacher_0", "student_0"): shares})
        teacher, student = (trueskill.Rating(*rating) for rating in known)
        if result == "student":
            student, teacher = trueskill.rate_1vs1(student, teacher, env=self.LIBRARY)
        else:
            teacher, student = trueskill.rate_1vs1(teacher, student, result == "drawn", env=self.LIBRARY)
        assert ratings(population) == [(teacher.mu, teacher.sigma), (student.mu, student.sigma)]
        assert [each.age for each in population] == [1, 1]

    def test_the_games_of_a_step_follow_each_other(self):
        population = Population(2, 1)
        outcomes = {Match(1, "teacher_1", "student_0"): [0.2], Match(0, "teacher_0", "student_0"): [0.9, 0.5]}
        Matchmaker(ratings="trueskill").update(population, outcomes)
        first, second, student = (trueskill.Rating() for _ in range(3))
        student, first = trueskill.rate_1vs1(student, first)
        second, student = trueskill.rate_1vs1(second, student)
        assert ratings(population) == [(each.mu, each.sigma) for each in (first, second, student)]

    def test_students_that_meet_given_tasks_play_against_one_rating_that_stays(self):
        population = Population(0, 2)
        outcomes = {Match(0, "", "student_0"): [1.0, 0.5], Match(1, "", "student_1"): [0.0, 0.25]}
        Matchmaker(ratings="trueskill").update(population, outcomes)
        given = trueskill.Rating(25, 25 / 3 / 100)
        better, _ = trueskill.rate_1vs1(trueskill.Rating(), given)
        _, worse = trueskill.rate_1vs1(given, trueskill.Rating())
        assert ratings(population) == [(each.mu, each.sigma) for each in (better, worse)]

    @pytest.mark.parametrize("apart", [250.0, 2000.0])
    @pytest.mark.parametrize(("of_rewards", "tau"), [(False, 25 / 300), (True, 25 / 60)])
    def test_an_upset_between_ratings_that_lie_far_apart_is_rated(self, apart, of_rewards, tau):
        """The tail of a normal distribution beyond t has its mean at about t + 1 / t."""
        population = Population(0, 2) if of_rewards else Population(1, 1)
        better, worse = population
        better.mu, better.sigma, worse.sigma = worse.mu + apart, 1.5, 1.5
        if of_rewards:
            rate_by_rewards(population, {better.name: 0.0, worse.name: 1.0})
        else:
            Matchmaker(ratings="trueskill").update(population, {Match(0, better.name, worse.name): [1.0]})
        spread = math.sqrt(2 * BETA**2 + 2 * (1.5**2 + tau**2))
        tail = (apart + 0.74) / spread
        moved = (1.5**2 + tau**2) / spread * (tail + 1 / tail)
        assert (worse.mu, better.mu) == pytest.approx((25 + moved, 25 + apart - moved), rel=1e-4)
        assert worse.sigma == pytest.approx(better.sigma) < math.hypot(1.5, tau)

    def test_metrics_tell_the_score_as_before(self):
        told = []
        for rule in ("scores", "trueskill"):
            population, matchmaker = Population(1, 1), Matchmaker(ratings=rule)
            matchmaker.update(population, {Match(0, "teacher_0", "student_0"): [0.25, 0.5]})
            told.append({key: value for key, value in matchmaker.metrics().items() if value == value})
        assert told[0] == told[1]
        assert told[0]["match/student_share_mean"] == 0.375


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
        assert no_student_idles(teachers, students) == (min(busy) == students)

    @pytest.mark.parametrize(("strategy", "kappa"), [("pfsp", 1.0), ("pfsp", 3.0), ("uniform", 1.0)])
    def test_a_single_choice_follows_the_weights(self, strategy, kappa):
        population, draws = Population(1, 4), 3000
        for member, mu in zip(population.students, (10, 22, 27, 40), strict=True):
            member.mu, member.sigma = mu, 2.0
        population["teacher_0"].sigma = 2.0
        matchmaker = Matchmaker(strategy, kappa, seed=7)
        fresh = matchmaker.state_dict()["loads"]
        counts: Counter[str] = Counter()
        for _ in range(draws):
            counts[matchmaker.pair(population)[0].student] += 1
            # Even loads would turn the second draw into a rotation; only the first one is free.
            matchmaker.load_state_dict(matchmaker.state_dict() | {"loads": fresh})
        p = norm.cdf((np.array([10, 22, 27, 40]) - 25) / math.sqrt(2 * BETA**2 + 8))
        weights = (p * (1 - p)) ** kappa if strategy == "pfsp" else np.ones(4)
        expected = weights / weights.sum() * draws
        observed = [counts[member.name] for member in population.students]
        assert chisquare(observed, expected).pvalue > 0.01

    def test_one_to_one_follows_the_closed_form_for_two_by_two(self):
        # The two assignments differ by the log-odds of the weights plus a sum of two standard logistic variables,
        # whose distribution function is e^x (e^x - x - 1) / (e^x - 1)^2.
        population, draws = Population(2, 2), 3000
        for member, mu in zip(population, (30.0, 20.0, 30.0, 21.0), strict=True):
            member.mu, member.sigma = mu, 3.0
        matchmaker = Matchmaker(kappa=1.0, seed=11)
        straight = sum(matchmaker.pair(population)[0].student == "student_0" for _ in range(draws))
        spread = math.sqrt(2 * BETA**2 + 18)
        weight = {(t, s): norm.cdf((s - t) / spread) * norm.cdf((t - s) / spread) for t in (30, 20) for s in (30, 21)}
        x = math.log(weight[30, 30] * weight[20, 21] / (weight[30, 21] * weight[20, 30]))
        probability = math.exp(x) * (math.exp(x) - x - 1) / (math.exp(x) - 1) ** 2
        expected = [probability * draws, (1 - probability) * draws]
        assert chisquare([straight, draws - straight], expected).pvalue > 0.01
        assert probability > 0.75  # balanced pairs are really preferred

    @pytest.mark.parametrize(("sigma", "weight"), [(25 / 3, 0.483), (1.57, 0.045)])
    def test_weight_at_a_gap_of_ten_is_flat_at_the_prior_and_steep_when_members_are_known(self, sigma, weight):
        p = win_probability(member(35.0, sigma), member(25.0, sigma, role="teacher"))
        assert pfsp_weight(p, 2.0) / 0.25**2 == pytest.approx(weight, abs=5e-4)

    def test_hopeless_odds_do_not_break_a_draw(self):
        population = Population(2, 2)
        for member, mu in zip(population, (1e4, -1e4, 0.0, 0.0), strict=True):
            member.mu, member.sigma = mu, 0.1
        assert {match.student for match in Matchmaker().pair(population)} == {"student_0", "student_1"}

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
        matchmaker.update(population, dict.fromkeys(matches, [1.0, 0.5]))
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
            ({"kappa": math.nan}, "kappa"),
            ({"ratings": "elo"}, "`ratings` must be one of scores, trueskill, got 'elo'"),
        ],
    )
    def test_impossible_settings_are_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            Matchmaker(**options)
