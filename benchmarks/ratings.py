"""Whether ratings rank: what culling and matchmaking make of skills that only a simulator knows.

    python benchmarks/ratings.py [--runs 200] [--steps 200]

4 teachers and 4 students play, are rated, and are replaced every 10 steps by the package's own matchmaker, selection
and newborn ratings; only the model is simulated. Beside it, from the same starts, the rule that the package had
before: a match is a mixture of a win and a loss, fitness is mu - 3 sigma, a child starts at the prior, and PFSP has
kappa 1 and floor 0.01. Ratings and matchmaking are judged without evolution, too, where ranks do not depend on what
was culled.

The simulator, in probit units: a student solves a task with probability Phi(its skill - the teacher's + task noise).
Skills begin apart, drift as random walks, and a child has its parents' mean, give or take. "12x8" is the package's
default of 12 proposals and 8 attempts; "tiny" the embedded base's 6 and 3, with tasks so uneven that nobody solves 30
to 40 % of them. START, DRIFT and BIRTH were set by the former rule's figures alone, as an earlier study has them for
12x8: rank correlations of .66, .72, .78 and .83 at steps 10, 50, 100 and 200, the worst of four culled in .61 of the
events.

Left out: invalid proposals, kinds of task, skills that depend on the opponent, learning from even matches, and what
keeps the two roles level, so that with evolution they part and no matchmaker can do much.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.special import ndtr
from scipy.stats import rankdata

from trl_populora.config import PopuLoRAConfig
from trl_populora.population.evolution import Breeding, plan_births, rate_newborn
from trl_populora.population.members import PRIOR_MU, PRIOR_SIGMA, ROLES, Member, Population
from trl_populora.population.ratings import BETA, Match, Matchmaker
from trl_populora.step.pay import Outcome, student_share


MEMBERS = 4  # of each role
EVENT = 10  # steps between two evolution events
MARKS = (10, 50, 100, 200)  # steps at which the rank correlation is taken

# Standard deviations: of skills at the start, of their change per step, of a child around its parents' mean.
START, DRIFT, BIRTH = 0.25, 0.025, 0.25


@dataclass(frozen=True)
class Cell:
    """Size of a match, and the standard deviation of a task's difficulty."""

    proposals: int
    attempts: int
    noise: float


CELLS = {"12x8": Cell(12, 8, 1.0), "tiny": Cell(6, 3, 2.0)}


class FormerMatchmaker(Matchmaker):
    """Rates one match after the other by the mixture of the posteriors of a win and of a loss, moment-matched."""

    TAU, DRAW_PROBABILITY, FLOOR = PRIOR_SIGMA / 100, 0.1, 0.01

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        weight = self.weight
        self.weight = lambda student, teacher: weight(student, teacher) + self.FLOOR

    def update(self, population: Population, outcomes: Mapping[Match, Sequence[float]]) -> None:
        for match, shares in outcomes.items():  # `pair` gives them in order
            student, teacher, share = population[match.student], population[match.teacher], fmean(shares)
            of_student = self._mixture(student, teacher, share)
            of_teacher = self._mixture(teacher, student, 1 - share)
            (student.mu, student.sigma), (teacher.mu, teacher.sigma) = of_student, of_teacher
            student.age += 1
            teacher.age += 1

    def _mixture(self, me, other, share: float) -> tuple[float, float]:
        (won, won_variance), (lost, lost_variance) = (self._posterior(me, other, sign) for sign in (1, -1))
        mu = share * won + (1 - share) * lost
        variance = share * won_variance + (1 - share) * lost_variance + share * (1 - share) * (won - lost) ** 2
        return mu, min(math.sqrt(variance), PRIOR_SIGMA)

    def _posterior(self, me, other, sign: int) -> tuple[float, float]:
        """Mean and variance after a win (1) or a loss (-1), Herbrich et al. (2006), for two players."""
        normal, own = NormalDist(), me.sigma**2 + self.TAU**2
        spread = math.sqrt(2 * BETA**2 + own + other.sigma**2 + self.TAU**2)
        margin = normal.inv_cdf((self.DRAW_PROBABILITY + 1) / 2) * math.sqrt(2) * BETA / spread
        gap = sign * (me.mu - other.mu) / spread - margin
        v = normal.pdf(gap) / normal.cdf(gap)
        return me.mu + sign * own / spread * v, own * (1 - own / spread**2 * v * (v + gap))


@dataclass(frozen=True)
class Rule:
    """How a population is matched, rated and culled."""

    matchmaker: type[Matchmaker]
    kappa: float
    newborn: Callable[[Sequence[Member]], tuple[float, float]]  # rating of a child
    doubts: int  # sigmas that fitness takes off mu


DEFAULTS = {name: field.default for name, field in PopuLoRAConfig.__dataclass_fields__.items()}
RULES = {
    "before": Rule(FormerMatchmaker, 1.0, lambda parents: (PRIOR_MU, PRIOR_SIGMA), 3),
    "package": Rule(Matchmaker, DEFAULTS["pfsp_kappa"], rate_newborn, 0),
}


class World:
    """One population and the true skills of its members."""

    def __init__(self, cell: Cell, rule: Rule, seed: int):
        self.cell, self.rule, self.seed, self.rng = cell, rule, seed, np.random.default_rng(seed)
        self.population = Population(MEMBERS, MEMBERS)
        self.matchmaker = rule.matchmaker("pfsp", rule.kappa, seed)
        self.skill = dict(zip(self.population.names, self.rng.normal(0, START, 2 * MEMBERS), strict=True))
        self.figures: dict[str, list[float]] = defaultdict(list)

    def skills(self, role: str) -> np.ndarray:
        return np.array([self.skill[member.name] for member in self.population.role(role)])

    def shares(self, match: Match) -> list[float]:
        """Student's share of each proposal of a match."""
        noise = self.rng.normal(0, self.cell.noise, self.cell.proposals)
        odds = ndtr(self.skill[match.student] - self.skill[match.teacher] + noise)
        rates = self.rng.binomial(self.cell.attempts, odds) / self.cell.attempts
        self.figures["unsolved"].append(float(np.mean(rates == 0)))
        return [student_share(Outcome("task", True, solve_rate=rate)) for rate in rates]

    def step(self) -> None:
        """Matches, ratings, drift; and how even the pairs are that met, beside all pairs and the best assignment."""
        matches = self.matchmaker.pair(self.population)
        gaps = self.skills("student")[None] - self.skills("teacher")[:, None]
        uneven = np.abs(ndtr(gaps / math.hypot(1, self.cell.noise)) - 0.5)  # [T, S]
        names = [member.name for member in self.population.students]
        self.figures["met"].append(fmean(uneven[match.index, names.index(match.student)] for match in matches))
        self.figures["uniform"].append(float(uneven.mean()))
        self.figures["oracle"].append(float(uneven[linear_sum_assignment(uneven)].mean()))
        self.matchmaker.update(self.population, {match: self.shares(match) for match in matches})
        for name in self.skill:
            self.skill[name] += self.rng.normal(0, DRIFT)

    def evolve(self, step: int) -> None:
        """One event; the package selects by mu, so the former rule gets a population whose mu is mu - 3 sigma."""
        judged = copy.deepcopy(self.population)
        for member in judged:
            member.mu -= self.rule.doubts * member.sigma
        breeding = Breeding()
        for birth in plan_births(judged, breeding, random.Random(f"{self.seed} {step}")):
            rank = int((self.skills(birth.role) < self.skill[birth.name]).sum())
            self.figures["worst_culled"].append(float(rank == 0))
            self.figures["worse_half_culled"].append(float(rank < MEMBERS / 2))
            parents = [self.population[name] for name in birth.parents]
            mu, sigma = self.rule.newborn(parents)
            self.skill[birth.name] = fmean(self.skill[name] for name in birth.parents) + self.rng.normal(0, BIRTH)
            self.population.replace(birth.name, step=step, operator=birth.operator, mu=mu, sigma=sigma)

    def rank_correlation(self) -> float:
        """Spearman's, of mu with true skill, mean over the roles."""
        ranks = [
            (rankdata([member.mu for member in self.population.role(role)]), rankdata(self.skills(role)))
            for role in ROLES
        ]
        return fmean(float(np.nan_to_num(np.corrcoef(mus, skills)[0, 1])) for mus, skills in ranks)


def live(cell: Cell, rule: Rule, seed: int, steps: int, evolution: bool) -> dict[str, list[float]]:
    """Figures of one simulated run."""
    world = World(cell, rule, seed)
    start = fmean(world.skill.values())
    for step in range(1, steps + 1):
        world.step()
        if step in MARKS:
            world.figures[f"rank_{step}"].append(world.rank_correlation())
            world.figures[f"sigma_{step}"].append(fmean(member.sigma for member in world.population))
        if evolution and step % EVENT == 0 and step < steps:
            world.evolve(step)
    world.figures["gain"].append((fmean(world.skill.values()) - start) / START)
    return world.figures


def measure(cell: Cell, rule: Rule, runs: int, steps: int, evolution: bool) -> dict[str, float]:
    """Means over the runs, and by how much matchmaking makes the pairs more even than uniform pairs are."""
    figures: dict[str, list[float]] = defaultdict(list)
    for seed in range(runs):
        for name, values in live(cell, rule, seed, steps, evolution).items():
            figures[name] += values
    means = {name: fmean(values) for name, values in figures.items()}
    return means | {f"{name}_cut": 1 - means[name] / means["uniform"] for name in ("met", "oracle")}


def compare(cell: Cell, runs: int, steps: int) -> dict[str, float]:
    """Prints one cell's table; the figures of the package, and with `_before` those of the former rule."""
    still, living = ({n: measure(cell, rule, runs, steps, e) for n, rule in RULES.items()} for e in (False, True))
    rows = {
        **{f"rank correlation at step {step}": (still, f"rank_{step}") for step in MARKS if step <= steps},
        **{f"sigma at step {step}": (still, f"sigma_{step}") for step in MARKS if step <= steps},
        "pairs more even than uniform": (still, "met_cut"),
        "  of the best assignment": (still, "oracle_cut"),
        "pairs more even, with evolution": (living, "met_cut"),
        "  of the best, with evolution": (living, "oracle_cut"),
        "culled is truly the worst (chance .25)": (living, "worst_culled"),
        "culled is in the worse half": (living, "worse_half_culled"),
        "skill gained by evolution, starting sds": (living, "gain"),
        "tasks that nobody solves": (still, "unsolved"),
    }
    for label, (figures, name) in rows.items():
        print(f"{label:<40} {figures['before'][name]:>8.3f} {figures['package'][name]:>8.3f}")
    wanted = {
        "worst_culled": (living, "worst_culled"),
        "pfsp_cut": (still, "met_cut"),
        "pfsp_cut_evolving": (living, "met_cut"),
        "rank_correlation": (still, f"rank_{max(step for step in MARKS if step <= steps)}"),
        "skill_gain": (living, "gain"),
    }
    return {
        key + suffix: round(figures[rule][name], 4)
        for key, (figures, name) in wanted.items()
        for rule, suffix in (("package", ""), ("before", "_before"))
    }


def main(runs: int, steps: int) -> dict[str, float | dict[str, float]]:
    """Both cells; the figures of 12x8 at the top level, those of tiny under its name."""
    results = {}
    for name, cell in CELLS.items():
        print(f"{name + f', {runs} runs of {steps} steps':<40} {'before':>8} {'package':>8}")
        results[name] = compare(cell, runs, steps)
    return {**results["12x8"], "tiny": results["tiny"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=int, default=200, help="simulated runs per rule and cell, with and without evolution"
    )
    parser.add_argument("--steps", type=int, default=200, help="steps of a run, at least 11")
    print(json.dumps(main(**vars(parser.parse_args()))))
