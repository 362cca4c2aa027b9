"""Ratings: who meets whom (match), and what a game says about both.

Pairs are drawn by prioritised fictitious self-play (PFSP, Vinyals et al., 2019) over TrueSkill (Herbrich et al., 2006)
win probabilities, as in PopuLoRA (arXiv 2605.16727). Ratings follow the matches' scores; `benchmarks/ratings.py`
compares that with wins and losses. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment
from trueskill.mathematics import Gaussian

from trl_populora.options import find_function
from trl_populora.population.members import PRIOR_SIGMA, Member, Population


# beta, by how much a performance varies, is TrueSkill's default for this prior. Members learn and change, so that what
# an old match says fades: tau, the doubt added per step, is five times TrueSkill's default.
BETA = PRIOR_SIGMA / 2
TAU = PRIOR_SIGMA / 20

# What students are rated against where there are no teachers: given tasks, which stay as hard as they are.
GIVEN_TASKS = Member("", "teacher", -1, sigma=0.0)

# Standard deviation of the student's share of one proposal, given both skills.
SHARE_SD = 0.25


def no_student_idles(teachers: int, students: int) -> bool:
    """
    Whether every student has a match in every step of [`Matchmaker`], whatever it draws.

    The matchmaker only keeps the loads even: after n matches a student has played n / S of them, rounded down or up.
    If a step brings everybody's load above the highest one before it, nobody can be left out. That is so with as many
    students as teachers, and with a number of students that divides theirs.
    """
    behind = range(0, teachers * students, teachers)  # after so many matches all loads are equal again
    return all((n + teachers) // students > -(-n // students) for n in behind)


@dataclass(frozen=True)
class Match:
    """
    One teacher and one student, bound for one population step; `index` counts the step's matches. `teacher` is empty
    where the student meets given tasks.
    """

    index: int
    teacher: str
    student: str


def win_probability(student: Member, teacher: Member) -> float:
    """Probability that the student wins the match: Phi((mu_s - mu_t) / sqrt(2 beta^2 + sigma_s^2 + sigma_t^2))."""
    spread = math.sqrt(2 * BETA**2 + student.sigma**2 + teacher.sigma**2)
    return 0.5 * math.erfc((teacher.mu - student.mu) / (spread * math.sqrt(2)))


def points_per_share(proposals: int) -> float:
    """
    Rating points that one unit of share is worth in a match of so many proposals: 81.6 for 12, 57.7 for 6.

    It makes the noise of the mean share, `SHARE_SD / sqrt(proposals)`, that of a difference of two performances.
    """
    return math.sqrt(2 * proposals) * BETA / SHARE_SD


def expected_share(student: Member, teacher: Member, proposals: int) -> float:
    """Student's share of a match that the ratings foresee, in [0, 1]."""
    return min(max(0.5 + (student.mu - teacher.mu) / points_per_share(proposals), 0.0), 1.0)


def pfsp_weight(p: float, kappa: float) -> float:
    """PFSP weight (p (1 - p))^kappa: balanced matches teach both sides most."""
    return (p * (1 - p)) ** kappa


def uniform_weight(p: float, kappa: float) -> float:
    """Every pair alike: the ablation without matchmaking."""
    return 1.0


STRATEGIES = {"pfsp": pfsp_weight, "uniform": uniform_weight}
Weight = Callable[[Member, Member], float]  # of a pair, student and teacher


def choose_weight(name: str, kappa: float) -> Weight:
    """
    What `matchmaking` names: one of `STRATEGIES`, or a user's own function of two members, student and teacher.

    Raises:
        `ValueError`: If there is no such function; by what is returned, if a weight is none.
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
    Draws the matches of each population step and turns their outcomes into ratings.

    A draw adds Gumbel noise to the log-weights and solves the assignment exactly, under loads that differ by at most
    one match between any two students over the whole run: with as many students as teachers that is one-to-one, with
    a single free choice it is sampling in proportion to the weights.

    Args:
        strategy: `"pfsp"`, `"uniform"`, or a function of two members, student and teacher, as `"module:function"`.
        kappa: Exponent on p (1 - p). 1 is PFSP's `var` weighting, a larger value sharpens it. With 2 a gap of 10 has
            0.48 of an even pair's weight between newborns (sigma 8.33), 0.05 between members long known (sigma 1.57).
        seed: Seed of the matchmaker's own generator. The same seed and ratings give the same matches on every rank.

    Attributes:
        weight (`Callable`): The preference for a pair, student and teacher; only ratios matter.

    Raises:
        `ValueError`: If `strategy` names nothing that is there, or `kappa` is negative.
    """

    def __init__(self, strategy: str = "pfsp", kappa: float = 2.0, seed: int = 0):
        if not kappa >= 0:
            raise ValueError(f"`kappa` must be non-negative, got {kappa}.")
        self.weight = choose_weight(strategy, kappa)
        self._rng = np.random.default_rng(seed)
        self._loads: dict[str, int] = {}
        self._metrics = dict.fromkeys(
            ("match/win_prob_mean", "match/win_prob_std", "match/student_share_mean", "match/rating_error"), math.nan
        )

    def pair(self, population: Population) -> list[Match]:
        """One match per teacher, in route order of the teachers; without teachers one per student."""
        teachers, students = population.teachers, population.students
        if not teachers:
            return [Match(index, "", student.name) for index, student in enumerate(students)]
        weights = np.array([[self.weight(student, teacher) for student in students] for teacher in teachers])
        # All pairs can meet, because of the noise, also where hopeless odds let a weight underflow to 0: the least of
        # positive numbers keeps the log finite.
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
        Student index per teacher, maximising the scores (`[T, S]`) among the assignments with the most even loads.

        A student's k-th match of the step is a column of its own, charged with the load it would lead to. The charge
        outweighs any sum of scores, so the lowest levels fill up first, like water.
        """
        num_teachers, num_students = scores.shape
        base = np.array(loads) - min(loads)
        copies = -(-(num_teachers + int(base.sum())) // num_students) + 1
        levels = np.concatenate([base + copy for copy in range(copies)])
        charge = 1.0 + num_teachers * 2 * np.abs(scores).max()
        rows, columns = linear_sum_assignment(np.tile(scores, copies) - charge * levels, maximize=True)
        return [int(column) % num_students for _, column in sorted(zip(rows, columns, strict=True))]

    def update(self, population: Population, outcomes: Mapping[Match, Sequence[float]]) -> None:
        """
        Rate the matches of a step together, and age both sides by one per match.

        A match says by how many points the student led: (mean share - 1/2) times [`points_per_share`], with the noise
        of two performances. What it says about a member uses the opponent's rating from before the step, so neither
        the order of the matches nor the number of ranks matters. The model is Guo et al. (2012), "Score-Based Bayesian
        Skill Learning". A win or a loss would say less than the score, and a game per task would collapse sigma, as if
        all of a match's tasks were matches of their own.

        Args:
            population: Its ratings and ages are changed in place.
            outcomes: The student's share of each proposal of each match, in [0, 1] (`step/rules.py`).

        Raises:
            `ValueError`: If a match has no proposal, or a share is outside [0, 1] or NaN. Nothing is changed then.
        """
        for match, shares in outcomes.items():
            if not shares or not all(0.0 <= share <= 1.0 for share in shares):
                raise ValueError(f"The student's shares of {match} must be at least one, in [0, 1], got {shares}.")
        matches = sorted(outcomes, key=lambda match: match.index)
        players = [population[name] for match in matches for name in (match.student, match.teacher) if name]
        prior = {player.name: Gaussian(player.mu, math.hypot(player.sigma, TAU)) for player in players}
        prior[""] = Gaussian(GIVEN_TASKS.mu, TAU)
        posterior, means, surprises = dict(prior), [], []
        for match in matches:
            share, proposals = fmean(outcomes[match]), len(outcomes[match])
            teacher = population[match.teacher] if match.teacher else GIVEN_TASKS
            foreseen = expected_share(population[match.student], teacher, proposals)
            means.append(share)
            surprises.append(abs(share - foreseen))
            lead = points_per_share(proposals) * (share - 0.5)
            for me, other, gap in ((match.student, match.teacher, lead), (match.teacher, match.student, -lead)):
                noise = math.sqrt(prior[other].sigma ** 2 + 2 * BETA**2)
                posterior[me] *= Gaussian(prior[other].mu + gap, noise)
        for player in players:
            player.mu, player.sigma = posterior[player.name].mu, posterior[player.name].sigma
            player.age += 1
        if matches:
            self._metrics["match/student_share_mean"] = fmean(means)
            self._metrics["match/rating_error"] = fmean(surprises)

    def state_dict(self) -> dict[str, Any]:
        """Generator and loads: plain data, ready for JSON."""
        return {"rng": self._rng.bit_generator.state, "loads": dict(self._loads)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the next `pair` draws what the saved matchmaker would have drawn."""
        self._rng.bit_generator.state = state["rng"]
        self._loads = dict(state["loads"])

    def metrics(self) -> dict[str, float]:
        """
        Win probability (student's) over the last matches drawn, and over the last rated the mean share and
        `rating_error`, the mean distance between the shares and those that the ratings foresaw.
        """
        return dict(self._metrics)
