"""Benchmarks that need neither a quiet machine nor long: what they print, and what they compare with."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import trueskill


sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import ratings  # noqa: E402

from trl_populora.population.matchmaking import Match  # noqa: E402
from trl_populora.population.members import Population  # noqa: E402


def test_every_benchmark_finds_what_it_measures():
    """Modules and names move; a script that nobody has run since would be found out by the next reader."""
    benchmarks = Path(ratings.__file__).parent
    names = sorted(path.stem for path in benchmarks.glob("*.py"))
    assert len(names) >= 7
    for name in names:
        importlib.import_module(name)


class TestRatings:
    def test_a_small_run_has_every_figure_and_shows_the_largest_differences(self, capsys):
        figures = json.loads(json.dumps(ratings.main(runs=10, steps=100)))
        for cell in (figures, figures["tiny"]):
            for name in ("worst_culled", "pfsp_cut", "rank_correlation"):
                assert -1 < cell[f"{name}_before"] < 1
                assert -1 < cell[name] < 1
        assert figures["pfsp_cut_before"] < 0.05 < 0.1 < figures["pfsp_cut"]
        assert figures["worst_culled"] > 0.5, "chance is 0.25"
        table = capsys.readouterr().out
        for label in (
            "12x8, 10 runs of 100 steps",
            "tiny, 10 runs",
            "rank correlation at step 100",
            "truly the worst",
        ):
            assert label in table

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
    def test_the_former_rule_mixes_trueskills_own_win_and_loss(self, share):
        population = Population(1, 1)
        for member, (mu, sigma) in zip(population, [(21, 2.0), (32, 3.0)], strict=True):
            member.mu, member.sigma = mu, sigma
        teacher, student = (trueskill.Rating(member.mu, member.sigma) for member in population)
        won, _ = trueskill.rate_1vs1(student, teacher)
        _, lost = trueskill.rate_1vs1(teacher, student)
        mu = share * won.mu + (1 - share) * lost.mu
        second = share * (won.sigma**2 + won.mu**2) + (1 - share) * (lost.sigma**2 + lost.mu**2)
        ratings.FormerMatchmaker().update(population, {Match(0, "teacher_0", "student_0"): [share]})
        member = population["student_0"]
        # The package's normal distribution is a polynomial.
        assert (member.mu, member.sigma) == pytest.approx((mu, (second - mu**2) ** 0.5), abs=1e-5)

    def test_former_fitness_culls_the_doubtful(self):
        """The package selects by mu; under the former rule the same population loses another member."""
        slots = []
        for rule in ratings.RULES.values():
            world = ratings.World(ratings.CELLS["tiny"], rule, seed=0)
            for index, member in enumerate(world.population.students):
                member.mu, member.sigma, member.age = 20.0 + index, 1.0 + 3 * (index == 3), 20
            world.evolve(10)
            slots += [member.name for member in world.population.students if member.version]
        assert slots == ["student_3", "student_0"]
