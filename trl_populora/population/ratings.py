"""Ratings: who meets whom, and what the score of a match says about both members.

    ratings --pair--> matches of a step --(the step is played)--> shares --update--> ratings

By default pairs are drawn by prioritised fictitious self-play (PFSP, Vinyals et al., 2019): the weight of a pair
depends on the TrueSkill win probability (Herbrich et al., 2006), as in PopuLoRA (arXiv 2605.16727). Ratings then
follow the scores of the matches. With `ratings: trueskill` they follow wins and losses, by TrueSkill's own update.
`benchmarks/ratings.py` compares ratings by scores with the rule that this package had before.
In a dataset run nobody meets: members are ranked by their rewards on the same prompts ([`rate_by_rewards`]). Nothing
here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment
from trueskill import Rating, TrueSkill, calc_draw_margin
from trueskill.mathematics import Gaussian

from trl_populora.options import find_function
from trl_populora.population.members import PRIOR_MU, PRIOR_SIGMA, Member, Population


# BETA is TrueSkill's default for this prior: the standard deviation of a member's performance in a match around its
# skill. TAU widens the sigma of the members that play in a step, because they learn, and old matches say less and
# less. It is five times TrueSkill's default.
BETA = PRIOR_SIGMA / 2
TAU = PRIOR_SIGMA / 20

# In a run without teachers, students are rated against the given tasks. The tasks do not change, so their rating
# stays the same: mu is the prior's, sigma is 0. `Matchmaker.update` takes TAU for this sigma, and does not store it.
GIVEN_TASKS = Member("", "teacher", -1, sigma=0.0)

# How often members of equal skill have equal mean rewards, or draw a match: TrueSkill's default.
DRAW_PROBABILITY = 0.1

# Which result of a match moves the ratings: its score, or who won.
RATINGS = ("scores", "trueskill")
# `ratings: trueskill` uses the default numbers of the TrueSkill library. The library's tau widens a sigma at every
# match; TAU widens it once in a step.
WINS = TrueSkill(PRIOR_MU, PRIOR_SIGMA, BETA, PRIOR_SIGMA / 100, DRAW_PROBABILITY)

# Standard deviation of the student's share of one proposal, if both skills are known.
SHARE_SD = 0.25


def no_student_idles(teachers: int, students: int) -> bool:
    """
    Says whether every student has a match in every step, whatever [`Matchmaker`] draws.

    After n matches each of S students has played n / S of them, rounded down or up. No student can be left out of a
    step if after the step the lowest number of matches is above the highest one before it. One case: the number of
    students divides the number of teachers.
    """
    # The matches played before a step, until all students have equally many again and the pattern repeats.
    behind = range(0, teachers * students, teachers)
    return all((n + teachers) // students > -(-n // students) for n in behind)


@dataclass(frozen=True)
class Match:
    """
    One teacher and one student who meet in one step. `index` counts the matches of the step. `teacher` is empty if the
    student meets given tasks.
    """

    index: int
    teacher: str
    student: str


def win_probability(student: Member, teacher: Member) -> float:
    """Computes how likely the student wins: Phi((mu_s - mu_t) / sqrt(2 beta^2 + sigma_s^2 + sigma_t^2))."""
    spread = math.sqrt(2 * BETA**2 + student.sigma**2 + teacher.sigma**2)
    return 0.5 * math.erfc((teacher.mu - student.mu) / (spread * math.sqrt(2)))


def points_per_share(proposals: int) -> float:
    """Computes how many rating points a difference of 1 in the mean share is worth: 81.6 for 12 proposals."""
    # In TrueSkill the difference of two performances has the noise sqrt(2) * BETA. The mean share of a match has the
    # noise SHARE_SD / sqrt(proposals). Multiplied by this factor, a share has the noise of a difference.
    return math.sqrt(2 * proposals) * BETA / SHARE_SD


def expected_share(student: Member, teacher: Member, proposals: int) -> float:
    """Predicts from the ratings the student's mean share of a match, in [0, 1]."""
    return min(max(0.5 + (student.mu - teacher.mu) / points_per_share(proposals), 0.0), 1.0)


def pfsp_weight(p: float, kappa: float) -> float:
    """Computes the PFSP weight (p (1 - p))^kappa. Both sides learn most from a balanced match."""
    return (p * (1 - p)) ** kappa


def uniform_weight(p: float, kappa: float) -> float:
    """Gives every pair the same weight, for comparison."""
    return 1.0


STRATEGIES = {"pfsp": pfsp_weight, "uniform": uniform_weight}
Weight = Callable[[Member, Member], float]  # of a pair: the student comes first, then the teacher


def choose_weight(name: str, kappa: float) -> Weight:
    """
    Finds what the option `matchmaking` names: one of `STRATEGIES`, or a user's own function of two members, student
    and teacher.

    Raises:
        `ValueError`: If there is no such function. Also later, from the returned function, if the user's own one gives
            a weight that is negative or not finite.
    """
    if name in STRATEGIES:
        return lambda student, teacher: STRATEGIES[name](win_probability(student, teacher), kappa)
    ask = find_function(name, "matchmaking", STRATEGIES)

    def weigh(student: Member, teacher: Member) -> float:
        value = ask(student, teacher)
        if isinstance(value, bool) or not isinstance(value, (float, int)) or not 0 <= value < math.inf:
            raise ValueError(
                f"`matchmaking={name}` must give a finite number that is not negative, got {value!r:.80} for "
                f"{student.identity} and {teacher.identity}."
            )
        return float(value)

    return weigh


class Matchmaker:
    """
    Draws the matches of each step, and turns their scores into ratings.

    Each teacher gets one student. At any time two students differ in their number of matches by at most one. Within
    this rule the draw is random by weight: Gumbel noise is added to the logarithms of the weights, and the best
    assignment is taken. With one teacher that is the same as sampling in proportion to the weights.

    Args:
        strategy: `"pfsp"`, `"uniform"`, or a function of two members, student and teacher, as `"module:function"`.
        kappa: Exponent on p (1 - p). 1 is PFSP's weighting `var`. A larger value prefers balanced pairs more. With 2 a
            pair 10 points apart has .48 of a balanced pair's weight at sigma 8.33 (the beginning of a run), and .04 at
            sigma 1.57 (members known for long).
        seed: Seed of the matchmaker's generator. The same seed and ratings give the same matches on every rank.
        ratings: `"scores"`, or `"trueskill"` for the update by wins and losses.

    Attributes:
        weight: Takes a student and a teacher, returns the weight of the pair. Only ratios of weights matter.

    Raises:
        `ValueError`: If `strategy` or `ratings` names nothing, or if `kappa` is negative.
    """

    def __init__(self, strategy: str = "pfsp", kappa: float = 2.0, seed: int = 0, ratings: str = "scores"):
        if not kappa >= 0:
            raise ValueError(f"`kappa` must be non-negative, got {kappa}.")
        if ratings not in RATINGS:
            raise ValueError(f"`ratings` must be one of {', '.join(RATINGS)}, got {ratings!r}.")
        self.ratings = ratings
        self.weight = choose_weight(strategy, kappa)
        self._rng = np.random.default_rng(seed)
        self._loads: dict[str, int] = {}
        self._metrics = dict.fromkeys(
            ("match/win_prob_mean", "match/win_prob_std", "match/student_share_mean", "match/rating_error"), math.nan
        )

    def pair(self, population: Population, agree: Callable[[Any], Any] = lambda weights: weights) -> list[Match]:
        """
        Draws one match per teacher, in the teachers' order. Without teachers each student has one match.

        Args:
            population: The members.
            agree: Returns rank 0's value on every rank, because a user's own function may give other weights on
                another rank. Collective.
        """
        teachers, students = population.teachers, population.students
        if not teachers:
            return [Match(index, "", student.name) for index, student in enumerate(students)]
        weights = np.array(agree([[self.weight(student, teacher) for student in students] for teacher in teachers]))
        # Hopeless odds may let a weight underflow to 0. The least positive number keeps its log finite, so that noise
        # can still bring such a pair together.
        scores = np.log(np.maximum(weights, np.finfo(float).tiny)) + self._rng.gumbel(size=weights.shape)
        picks = self._assign(scores, [self._loads.get(student.name, 0) for student in students])
        matches = []
        for index, (teacher, pick) in enumerate(zip(teachers, picks, strict=True)):
            name = students[pick].name
            self._loads[name] = self._loads.get(name, 0) + 1
            matches.append(Match(index, teacher.name, name))
        odds = [win_probability(population[match.student], population[match.teacher]) for match in matches]
        self._metrics["match/win_prob_mean"] = float(np.mean(odds))
        self._metrics["match/win_prob_std"] = float(np.std(odds))
        return matches

    @staticmethod
    def _assign(scores: np.ndarray, loads: list[int]) -> list[int]:
        """
        Finds the assignment with the highest sum of scores among those that keep the loads most even.

        Args:
            scores: Shape `[T, S]`, teachers by students.
            loads: Matches that each student has played so far.

        Returns:
            Index of a student per teacher.
        """
        # The assignment has one column per student and per match that the student may have in this step. A column is
        # charged with the number of matches that it would lead to. The charge outweighs any sum of scores, so students
        # with few matches come first, as water fills the lowest places.
        num_teachers, num_students = scores.shape
        base = np.array(loads) - min(loads)
        copies = -(-(num_teachers + int(base.sum())) // num_students) + 1
        levels = np.concatenate([base + copy for copy in range(copies)])
        charge = 1.0 + num_teachers * 2 * np.abs(scores).max()
        rows, columns = linear_sum_assignment(np.tile(scores, copies) - charge * levels, maximize=True)
        return [int(column) % num_students for _, column in sorted(zip(rows, columns, strict=True))]

    def update(self, population: Population, outcomes: Mapping[Match, Sequence[float]]) -> None:
        """
        Updates the ratings by all matches of a step, and adds 1 per match to the age of both members.

        A match tells by how many points the student led: (mean share - 1/2) times [`points_per_share`], with the noise
        of two performances. The model is from Guo et al. (2012), "Score-Based Bayesian Skill Learning".

        With `ratings="trueskill"` a match is one game of TrueSkill's, and the games of a step follow each other. The
        student wins it with a mean share above 1/2. It is drawn if the lead is within TrueSkill's draw margin,
        .74 points at [`DRAW_PROBABILITY`]: in a match of 12 proposals, a mean share from .491 to .509.

        Args:
            population: The members. Their ratings and ages are changed in place.
            outcomes: For each match, the student's share of each proposal, in [0, 1] (`student_share` in
                `step/pay.py`).

        Raises:
            `ValueError`: If a match has no proposal, or if a share is outside [0, 1] or NaN. Nothing is changed then.
        """
        for match, shares in outcomes.items():
            if not shares or not all(0.0 <= share <= 1.0 for share in shares):
                raise ValueError(
                    f"The student's shares of {match} must not be empty, and each must be in [0, 1], got {shares}."
                )
        # A match counts once, by its score. A win or a loss would say less. Rating each task as one match
        # would say too much: sigma would collapse.
        matches = sorted(outcomes, key=lambda match: match.index)
        players = [population[name] for match in matches for name in (match.student, match.teacher) if name]
        prior = {player.name: Gaussian(player.mu, math.hypot(player.sigma, TAU)) for player in players}
        prior[""] = Gaussian(GIVEN_TASKS.mu, TAU)
        posterior, means, surprises, leads = dict(prior), [], [], []
        for match in matches:
            share, proposals = fmean(outcomes[match]), len(outcomes[match])
            teacher = population[match.teacher] if match.teacher else GIVEN_TASKS
            foreseen = expected_share(population[match.student], teacher, proposals)
            means.append(share)
            surprises.append(abs(share - foreseen))
            leads.append(lead := points_per_share(proposals) * (share - 0.5))
            # `prior` is from before the step, so the order of the matches and the number of ranks make no difference.
            for me, other, gap in ((match.student, match.teacher, lead), (match.teacher, match.student, -lead)):
                noise = math.sqrt(prior[other].sigma ** 2 + 2 * BETA**2)
                posterior[me] *= Gaussian(prior[other].mu + gap, noise)
        if self.ratings == "trueskill":
            posterior = _rate_games({player.name: player for player in players}, matches, leads)
        for player in players:
            player.mu, player.sigma = posterior[player.name].mu, posterior[player.name].sigma
            player.age += 1
        if matches:
            self._metrics["match/student_share_mean"] = fmean(means)
            self._metrics["match/rating_error"] = fmean(surprises)

    def state_dict(self) -> dict[str, Any]:
        """Returns generator and loads as plain data, ready for JSON."""
        return {"rng": self._rng.bit_generator.state, "loads": dict(self._loads)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state of `state_dict`. The next `pair` draws what the saved matchmaker would have drawn."""
        self._rng.bit_generator.state = state["rng"]
        self._loads = dict(state["loads"])

    def metrics(self) -> dict[str, float]:
        """
        Returns mean and spread of the students' win probability over the matches drawn last. Over the matches rated
        last it returns the students' mean share, and `rating_error`: the mean distance between share and prediction.
        """
        return dict(self._metrics)


def _rate_games(
    players: Mapping[str, Member], matches: Sequence[Match], leads: Sequence[float]
) -> dict[str, Gaussian]:
    """Rates the matches one after the other, each as one TrueSkill game. A lead is how many points the student led."""
    rated = {name: Rating(player.mu, player.sigma) for name, player in players.items()}
    margin = calc_draw_margin(WINS.draw_probability, 2, WINS)
    for match, lead in zip(matches, leads, strict=True):
        rated[""] = Rating(GIVEN_TASKS.mu, WINS.tau)  # given tasks stay as they are
        first, second = (match.student, match.teacher) if lead > 0 else (match.teacher, match.student)
        rated[first], rated[second] = _rate(WINS, [rated[first], rated[second]], [0, int(abs(lead) > margin)])
    return rated


def _rate(rules: TrueSkill, ratings: Sequence[Rating], ranks: Sequence[int]) -> list[Rating]:
    """Rates the players of one game, who came in at these ranks."""
    groups = [(rating,) for rating in ratings]
    try:
        return [rating for (rating,) in rules.rate(groups, ranks)]
    except FloatingPointError:
        # Of ratings some 200 points apart, the probability of an upset is 0 in fp64. mpmath, which comes with torch,
        # knows smaller numbers, and is slow.
        exact = TrueSkill(rules.mu, rules.sigma, rules.beta, rules.tau, rules.draw_probability, backend="mpmath")
        return [rating for (rating,) in exact.rate(groups, ranks)]


def rate_by_rewards(population: Population, means: Mapping[str, float]) -> None:
    """
    Updates the ratings of a dataset run's members by one free-for-all of TrueSkill's: the member with the highest mean
    reward comes first, and equal means tie. The age of each rated member grows by 1. If only one member has a mean,
    nothing is compared, and only that member's age grows.

    Args:
        population: The members. Their ratings and ages are changed in place.
        means: Mean reward of each member over the same prompts, by name. A member without a finite mean is left out:
            its rating and age stay as they are.
    """
    known = [member for member in population if math.isfinite(means.get(member.name, math.nan))]
    if len(known) > 1:
        rules = TrueSkill(beta=BETA, tau=TAU, draw_probability=DRAW_PROBABILITY)
        highest_first = sorted({means[member.name] for member in known}, reverse=True)
        ratings = [Rating(member.mu, member.sigma) for member in known]
        rated = _rate(rules, ratings, [highest_first.index(means[member.name]) for member in known])
        for member, rating in zip(known, rated, strict=True):
            member.mu, member.sigma = rating.mu, rating.sigma
    for member in known:
        member.age += 1
