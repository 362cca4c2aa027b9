"""
Phase 1 (match) and the rating half of phase 5: who meets whom, and what the meeting says about both.

Pairs are drawn by prioritised fictitious self-play (PFSP, Vinyals et al., 2019) over TrueSkill (Herbrich et al., 2006)
win probabilities, as in PopuLoRA (arXiv 2605.16727). No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import trueskill
from scipy.optimize import linear_sum_assignment

from trl_populora.population import PRIOR_MU, PRIOR_SIGMA, Member, Population


# beta and tau are TrueSkill's defaults for this prior: half of and a hundredth of its sigma. The draw margin only
# shapes the two posteriors that are mixed: a draw itself is never an outcome here.
BETA = PRIOR_SIGMA / 2


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


# The package's own erfc is a polynomial, off by up to 2e-6 rating points after a surprising win; these are exact.
ENVIRONMENT = trueskill.TrueSkill(
    mu=PRIOR_MU,
    sigma=PRIOR_SIGMA,
    beta=BETA,
    tau=PRIOR_SIGMA / 100,
    draw_probability=0.1,
    backend=(_normal_cdf, NormalDist().pdf, NormalDist().inv_cdf),
)


def everyone_plays(teachers: int, students: int) -> bool:
    """
    Whether every student surely has a match in every step of [`Matchmaker`], which only keeps their loads even.

    After n matches each has played n / S times, rounded down or up. Who is ahead plays again if after the step even the
    least busy have played more than that. Equal numbers, or a number of students that divides the teachers', do.
    """
    behind = range(0, teachers * students, teachers)  # after so many matches all loads are equal again
    return all((n + teachers) // students > -(-n // students) for n in behind)


@dataclass(frozen=True)
class Match:
    """One teacher and one student, bound for one population step; `index` counts the step's matches."""

    index: int
    teacher: str
    student: str


def student_share(valid: bool, solve_rate: float, chance: float = 0.0) -> float:
    """
    Student's share of one proposal; the teacher's is the rest. A match's outcome is the mean over its proposals.

    The same floor as the teacher's reward: nothing for an invalid proposal, and a task that nobody solved, or no more
    often than by guessing, earns the teacher no reward, hence no victory either (both sides failed: a draw). PopuLoRA is
    not explicit about this rule.

    Args:
        valid (`bool`):
            Whether the proposal passed verification.
        solve_rate (`float`):
            Fraction rho of the attempts that solved it, in [0, 1]. Ignored when the proposal is invalid.
        chance (`float`, *optional*, defaults to `0.0`):
            What guessing gives.

    Raises:
        ValueError: If a valid proposal's `solve_rate` is outside [0, 1] or NaN.
    """
    if not valid:
        return 1.0
    if not 0.0 <= solve_rate <= 1.0:
        raise ValueError(f"`solve_rate` of a valid proposal must be in [0, 1], got {solve_rate}.")
    return 0.5 if solve_rate <= chance else float(solve_rate)


def win_probability(student: Member, teacher: Member) -> float:
    """Probability that the student beats the teacher: Phi((mu_s - mu_t) / sqrt(2 beta^2 + sigma_s^2 + sigma_t^2))."""
    spread = math.sqrt(2 * BETA**2 + student.sigma**2 + teacher.sigma**2)
    return _normal_cdf((student.mu - teacher.mu) / spread)


def rate(student: Member, teacher: Member, share: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """
    New `(mu, sigma)` of the student and of the teacher after one game with a fractional outcome.

    The posterior is the mixture of "student wins" (weight `share`) and "teacher wins" (the rest), moment-matched to
    one Gaussian. TrueSkill's own `weights` do not encode a fraction (a weight of 0.1 moves mu *more* than a win), and
    a game per task would collapse sigma within one step. An outcome near the prediction can leave the mixture wider
    than it was, because of the draw margin and tau; a match cannot make a member stranger than a newborn, so sigma
    stops at the prior's. Without that stop two equal members at 0.5 reach sigma 27 in 200 games.
    """
    of_student = ENVIRONMENT.create_rating(student.mu, student.sigma)
    of_teacher = ENVIRONMENT.create_rating(teacher.mu, teacher.sigma)
    student_if_won, teacher_if_lost = trueskill.rate_1vs1(of_student, of_teacher, env=ENVIRONMENT)
    teacher_if_won, student_if_lost = trueskill.rate_1vs1(of_teacher, of_student, env=ENVIRONMENT)
    return _mixture(student_if_won, student_if_lost, share), _mixture(teacher_if_lost, teacher_if_won, share)


def _mixture(if_won: trueskill.Rating, if_lost: trueskill.Rating, share: float) -> tuple[float, float]:
    mu = share * if_won.mu + (1 - share) * if_lost.mu
    # Law of total variance: for two components the spread of the means is share (1 - share) gap^2.
    within = share * if_won.sigma**2 + (1 - share) * if_lost.sigma**2
    between = share * (1 - share) * (if_won.mu - if_lost.mu) ** 2
    return mu, min(math.sqrt(within + between), PRIOR_SIGMA)


def pfsp_weight(p: float, kappa: float, floor: float) -> float:
    """PFSP weight (p (1 - p))^kappa + floor: balanced matches teach both sides most."""
    return (p * (1 - p)) ** kappa + floor


def uniform_weight(p: float, kappa: float, floor: float) -> float:
    """Every pair alike: the ablation without matchmaking."""
    return 1.0


STRATEGIES = {"pfsp": pfsp_weight, "uniform": uniform_weight}


class Matchmaker:
    """
    Draws the matches of each population step and turns their outcomes into ratings.

    A draw adds Gumbel noise to the log-weights and solves the assignment exactly, under loads that differ by at most
    one match between any two students over the whole run: with as many students as teachers that is one-to-one, with
    a single free choice it is sampling in proportion to the weights.

    Args:
        strategy (`str`, *optional*, defaults to `"pfsp"`):
            `"pfsp"` or `"uniform"`.
        kappa (`float`, *optional*, defaults to `1.0`):
            Exponent on p (1 - p). 1 is PFSP's `var` weighting; it is nearly flat while sigma is large (0.695 of its
            maximum at a gap of 10 and sigma 8.33), a larger value sharpens it.
        floor (`float`, *optional*, defaults to `0.01`):
            Added to every weight, so that no pair is ever excluded: 4 % of the weight of an even pair.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the matchmaker's own generator. The same seed and ratings give the same matches on every rank.

    Raises:
        ValueError: If `strategy` is unknown, or `kappa` or `floor` is negative.
    """

    def __init__(self, strategy: str = "pfsp", kappa: float = 1.0, floor: float = 0.01, seed: int = 0):
        if strategy not in STRATEGIES:
            raise ValueError(f"`strategy` must be one of {', '.join(map(repr, STRATEGIES))}, got {strategy!r}.")
        for name, value in (("kappa", kappa), ("floor", floor)):
            if not value >= 0:
                raise ValueError(f"`{name}` must be non-negative, got {value}.")
        self.strategy, self.kappa, self.floor = strategy, kappa, floor
        self._rng = np.random.default_rng(seed)
        self._loads: dict[str, int] = {}
        self._metrics = dict.fromkeys(
            ("match/win_prob_mean", "match/win_prob_std", "match/student_share_mean", "match/rating_error"), math.nan
        )

    def weight(self, student: Member, teacher: Member) -> float:
        """Unnormalised preference for this pair."""
        return STRATEGIES[self.strategy](win_probability(student, teacher), self.kappa, self.floor)

    def pair(self, population: Population) -> list[Match]:
        """One match per teacher, in route order of the teachers."""
        teachers, students = population.teachers, population.students
        weights = np.array([[self.weight(student, teacher) for student in students] for teacher in teachers])
        # With floor 0 and hopeless odds a weight underflows to 0: the least of positive numbers keeps the log finite.
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

    def update(self, population: Population, outcomes: Mapping[Match, float]) -> None:
        """
        Rate every match of a step once, in order of `Match.index`, and age both sides by one.

        Args:
            population ([`Population`]):
                Its ratings and ages are changed in place.
            outcomes (`dict[Match, float]`):
                Student's share of each match, in [0, 1]: the mean of [`student_share`] over the match's proposals.

        Raises:
            ValueError: If a share is outside [0, 1] or NaN. Nothing is changed then.
        """
        for match, share in outcomes.items():
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"The student's share of {match} must be in [0, 1], got {share}.")
        surprises = []
        for match in sorted(outcomes, key=lambda match: match.index):
            share, student, teacher = outcomes[match], population[match.student], population[match.teacher]
            surprises.append(abs(share - win_probability(student, teacher)))
            (student.mu, student.sigma), (teacher.mu, teacher.sigma) = rate(student, teacher, share)
            student.age += 1
            teacher.age += 1
        if outcomes:
            self._metrics["match/student_share_mean"] = float(np.mean(list(outcomes.values())))
            self._metrics["match/rating_error"] = float(np.mean(surprises))

    def state_dict(self) -> dict[str, Any]:
        """Generator and loads: plain data, ready for JSON."""
        return {"rng": self._rng.bit_generator.state, "loads": dict(self._loads)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the next `pair` draws what the saved matchmaker would have drawn."""
        self._rng.bit_generator.state = state["rng"]
        self._loads = dict(state["loads"])

    def metrics(self) -> dict[str, float]:
        """Win probability (student's) over the last matches drawn, and outcome and surprise over the last rated."""
        return dict(self._metrics)
