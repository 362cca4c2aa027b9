"""Benchmarks that need no quiet machine: what they print, and what they compare with."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trueskill


sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import gpu  # noqa: E402
import gpu_population  # noqa: E402
import overlap  # noqa: E402
import ratings  # noqa: E402
import scaling  # noqa: E402
import start_up  # noqa: E402
import step_at_7b  # noqa: E402
import sweep  # noqa: E402
import sweep_learns  # noqa: E402

from trl_populora.population.members import Population  # noqa: E402
from trl_populora.population.ratings import Match  # noqa: E402
from trl_populora.tasks import load_seed_tasks  # noqa: E402

from .vllm_models import ENGINE_ENVIRONMENT  # noqa: E402
from .without_extras import without_extras  # noqa: E402


def test_every_benchmark_finds_what_it_measures():
    """Modules and names move; a script that nobody has run since would be found out by the next reader."""
    benchmarks = Path(ratings.__file__).parent
    names = sorted(path.stem for path in benchmarks.glob("*.py"))
    assert len(names) >= 7
    for name in names:
        importlib.import_module(name)


class TestStepAt7b:
    @pytest.mark.slow
    def test_a_dry_run_compares_both_sides_and_says_that_vllm_is_missing(self):
        done = subprocess.run(
            [sys.executable, step_at_7b.__file__, "--dry-run", "--mix", "all", "--steps", "1"],
            env=without_extras() | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "vLLM is not installed: both sides generate with transformers" in done.stdout
        figures = gpu.figures_in(done.stdout)
        assert figures["live_rows"] == 1
        assert {"step_ratio_vs_trl", "update_ratio_vs_trl", "generate_ratio_vs_trl"} <= figures.keys()
        assert (figures["side"], figures["ours"]["side"]) == ("trl", "ours")
        assert figures["rows"] == figures["ours"]["rows"] == 12

    def test_a_prompt_gets_its_length(self):
        assert step_at_7b.fit([1, 2, 3], 7) == [3, 1, 2, 3, 1, 2, 3]
        assert step_at_7b.fit([1, 2, 3], 2) == [2, 3]

    def test_half_of_the_groups_have_unequal_rewards(self):
        worth = step_at_7b.half([[row] for row in range(32)])
        live = [len(set(worth[start : start + 8])) > 1 for start in range(0, 32, 8)]
        assert live == [False, True, False, True]

    def test_the_least_seconds_are_those_of_the_rows_that_run(self):
        """Two rows of one prompt, of 1 and 3 tokens: it is read once, and the last two tokens are one row's."""
        shape, card = step_at_7b.SEVEN, gpu_population.GPUS["H200"]
        rows = [step_at_7b.make_row([5] * 100, [7] * length, None) for length in (1, 3)]
        reading = 2 * shape.parameters * 100 / card.flops
        weights = 2 * shape.parameters / card.bandwidth
        found = step_at_7b.least_seconds(shape, card, rows)
        assert found == pytest.approx(reading + 3 * weights, rel=0.01)
        assert found > reading + 3 * weights, "the cache is read, too"


def make_group(pair: int, proposal: int, *attempts: int) -> overlap.Group:
    return overlap.Group(pair, 10, proposal, 10, attempts)


class TestOverlap:
    @pytest.mark.parametrize(
        ("at_once", "waves", "together"),
        [
            (4, 5 + 4, max(3 + 4, 5 + 2)),
            # Two at a time: the attempt of 4 begins after 3, that of 2 after 5, and both end after 7.
            (2, 5 + 4, 3 + 4 + 1),
            (1, 3 + 5 + 4 + 2 + 1, 3 + 5 + 4 + 2 + 1),
        ],
    )
    def test_an_attempt_begins_when_its_own_proposal_has_ended(self, at_once, waves, together):
        step = [make_group(0, 3, 4), make_group(1, 5, 2, 1)]
        assert overlap.work_out(step, at_once, overlapping=False).iterations == waves
        assert overlap.work_out(step, at_once, overlapping=True).iterations == together

    def test_the_least_seconds_are_those_of_reading_the_weights(self):
        """Three iterations with one row, and four with two."""
        work = overlap.work_out([make_group(0, 3, 4, 4)], 2, overlapping=True)
        weights = 2 * overlap.SEVEN.parameters / overlap.CARD.bandwidth / step_at_7b.DECODING_UTILIZATION
        assert work.iterations == 7
        assert 7 * weights < work.seconds < 7.001 * weights, "the cache is read, too"

    def test_completions_of_one_length_gain_nothing(self):
        assert overlap.compare(overlap.draw_steps(16, lambda: 20, 1), 144)["iterations_ratio"] == 1.0

    def test_the_recorded_steps_are_taken_apart_and_joined(self):
        steps = overlap.read_steps(overlap.LENGTHS)
        assert {len(step) for step in steps} == {48}
        assert {len(group.attempts) for step in steps for group in step} == {8}
        for size, count in ((16, 36), (48, 12), (96, 6)):
            found = overlap.of_size(steps, size)
            assert len(found) == count
            for step in found:
                assert [sum(group.pair == pair for group in step) for pair in range(4)] == [size // 4] * 4
        with pytest.raises(ValueError, match="20 proposals are neither a part nor a multiple of the 48"):
            overlap.of_size(steps, 20)

    @pytest.mark.walk
    def test_the_engine_makes_the_iterations_that_are_worked_out(self):
        pytest.importorskip("vllm", reason="vLLM is not installed")
        done = subprocess.run(
            [sys.executable, overlap.__file__, "--dry-run"],
            env=without_extras(but=["vllm"]) | ENGINE_ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        (counted,) = gpu.figures_in(done.stdout)["iterations"].values()
        step = overlap.of_size(overlap.read_steps(overlap.LENGTHS), 4)[0]
        for way, iterations in counted.items():
            assert iterations == overlap.work_out(step, 36, way == "overlapping").iterations


class TestScaling:
    def test_a_slope_is_the_exponent(self):
        sizes = [72, 144, 288, 576]
        assert scaling.slope(sizes, [3.0] * 4) == pytest.approx(0.0, abs=1e-12)
        assert scaling.slope(sizes, [0.1 * size**0.25 for size in sizes]) == pytest.approx(0.25)

    def test_steps_are_whole_and_the_defaults_are(self):
        for rows, pairs in [(72, 2), (576, 2), (288, 1), (288, 8), (288, 2)]:
            assert scaling.count_proposals(rows, pairs) * pairs * (1 + scaling.ATTEMPTS) == rows
        with pytest.raises(ValueError, match="74 rows are no whole number of proposals for 2 teachers; each has 4"):
            scaling.count_proposals(74, 2)

    @pytest.mark.walk
    @pytest.mark.multiprocess
    def test_a_walk_has_every_figure(self):
        (walk,) = re.findall(r"python benchmarks/scaling.py (--rows .*)", scaling.__doc__)
        environment = without_extras() | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, scaling.__file__, *walk.split()],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        figures = gpu.figures_in(done.stdout)
        assert {"rows_slope", "members_slope", "ranks_ratio_2"} <= figures.keys()
        assert {"propose", "solve", "update", "total"} <= figures["slopes"]["rows"].keys()
        assert done.stdout.count("slope") == 3 + done.stdout.splitlines()[-1].count("slope"), "three tables"


def walk(script: str, *options: str) -> str:
    """What a benchmark's small run prints."""
    done = subprocess.run(
        [sys.executable, script, "--small", *options],
        env=without_extras() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


class TestSweep:
    def test_the_reward_is_the_kinds_own_judgement(self):
        said = [
            "```output\n[1, 2]\n```",
            "```output\n[2, 1]\n```",
            "[1, 2]",
            "<think>\n[2]\n</think>\n```output\n7\n```",
        ]
        answers = ['["l",1,2]'] * 3 + ["7"]
        completions = [[{"role": "assistant", "content": text}] for text in said]
        assert sweep.right(completions, answers, member=["student_0"] * 4) == [1.0, 0.0, 0.0, 1.0]

    def test_no_prompt_holds_its_answer_in_a_column_of_the_game(self):
        table = sweep.pose(load_seed_tasks(), "compact")
        assert table.column_names == ["prompt", "answer"]
        assert len(table) == 86
        assert table[0]["prompt"][0]["content"].startswith("solve code_o")

    @pytest.mark.walk
    def test_a_walk_has_every_figure_and_equal_work(self):
        said = walk(sweep.__file__)
        figures = gpu.figures_in(said)
        assert {"sweep_speedup", "experiments_per_hour_trl", "peak_memory_ratio", "live_rows"} <= figures.keys()
        assert "publish_share" not in figures
        assert 0.3 < figures["tokens_ratio"] < 3, "few short samples"
        assert "2 prompts x 2 attempts" in said


class TestSweepLearns:
    def test_training_rewards_choose_the_best_member_and_seeds_are_paired(self):
        def line(arm, seed, *members):
            told = [{"rate": rate, "trained": [0.0, 0.0, reward], "held_out": out} for rate, reward, out in members]
            return {"arm": arm, "seed": seed, "members": {f"student_{place}": each for place, each in enumerate(told)}}

        lines = [
            line("base", 0, (1e-3, 0.0, 0.25)),
            line("sweep", 0, (1e-3, 0.9, 0.5), (1e-2, 0.1, 0.75)),
            line("sweep", 1, (1e-3, 0.2, 0.5), (1e-2, 0.3, 0.25)),
            line("evolution", 1, (1e-3, 0.9, 0.5), (1e-3, 0.8, 1.0)),
        ]
        values = sweep_learns.summarise(lines)
        assert values["base"] == {0: 0.25}
        assert values["sweep, rate 0.01"] == {0: 0.75, 1: 0.25}
        assert values["sweep, best"] == {0: 0.5, 1: 0.25}
        assert values["evolution, mean of members"] == {1: 0.75}
        assert values["evolution - sweep, best"] == {1: 0.25}
        assert "halving - sweep, best" not in values

    @pytest.mark.walk
    def test_a_walk_makes_each_run_once(self, tmp_path):
        given = ("--seeds", "0", "--output", str(tmp_path), "--arms")
        first = walk(sweep_learns.__file__, *given, "sweep")
        both = walk(sweep_learns.__file__, *given, "sweep", "evolution", "halving")
        assert [re.findall("seed 0, ([a-z]+):", said) for said in (first, both)] == [
            ["base", "sweep"],
            ["evolution", "halving"],
        ]
        lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
        assert [line["arm"] for line in lines] == ["base", "sweep", "evolution", "halving"]
        base, plain, evolved, halved = (line["members"] for line in lines)
        assert [member["rate"] for member in plain.values()] == list(sweep_learns.RATES)
        assert [len(member["trained"]) for member in plain.values()] == [3] * 4
        assert [member["trained"] for member in base.values()] == [[]]
        assert any(member["version"] for member in evolved.values())
        (last,) = halved.values()
        assert len(last["trained"]) == 3
        figures = gpu.figures_in(both)
        assert figures["evolution - sweep, best"]["half"] is None, "one seed says nothing about others"


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
        seats = []
        for rule in ratings.RULES.values():
            world = ratings.World(ratings.CELLS["tiny"], rule, seed=0)
            for index, member in enumerate(world.population.students):
                member.mu, member.sigma, member.age = 20.0 + index, 1.0 + 3 * (index == 3), 20
            world.evolve(10)
            seats += [member.name for member in world.population.students if member.version]
        assert seats == ["student_3", "student_0"]


@pytest.mark.parametrize("cpu", [False, True])
def test_a_start_lasts_until_the_first_step_is_told(cpu):
    busy = "print('GRPOTrainer')\nwhile time.process_time() < 0.4: pass\n"  # also where the machine is busy
    told = f"import time; {busy}print('step  1/24 | valid'); time.sleep(60)"
    assert 0.2 < start_up.time_start([sys.executable, "-c", told], start_up.ROOT, cpu) < 30
    with pytest.raises(RuntimeError, match="ended before its first step:\nGRPOTrainer"):
        start_up.time_start([sys.executable, "-c", "print('GRPOTrainer')"], start_up.ROOT, cpu)
