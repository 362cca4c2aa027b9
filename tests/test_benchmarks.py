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
import ratings  # noqa: E402
import scaling  # noqa: E402
import step_at_7b  # noqa: E402
import sweep  # noqa: E402
import sweep_learns  # noqa: E402

from trl_populora.assets import tiny_base_path  # noqa: E402
from trl_populora.population.members import Population  # noqa: E402
from trl_populora.population.ratings import Match  # noqa: E402
from trl_populora.tasks import load_seed_tasks  # noqa: E402

from .without_extras import without_extras  # noqa: E402


NEEDED = {"7B in 4 bits": ["bitsandbytes"], "tests": ["bitsandbytes"]}
NEEDED |= {name: ["vllm"] for name in ("tests on vLLM", "publishing", "7B long", "mixed rows", "sweep on vLLM")}
NEEDED["your model, mixed rows"] = ["vllm"]
ONLY_WITH_VLLM = {"logp_difference", "publish_ratio_vs_trl"}
ONLY_ON_A_GPU = {"gpu", "memory_gib", "used_gib", "share_of_peak"}
ONLY_ON_A_GPU |= {f"share_of_peak.{phase}" for phase in ("generate", "solve", "update")}
GPU_PARTS = (*gpu.PARTS, *gpu.parts_on(str(tiny_base_path())))


def group_parts() -> dict[str, list[gpu.Part]]:
    """The parts by what can be run alone: of a step at 7B shape TRL's side needs the rows that ours leaves."""
    groups: dict[str, list[gpu.Part]] = {}
    for part in GPU_PARTS:
        groups.setdefault(part.name.removesuffix(", ours").removesuffix(", TRL"), []).append(part)
    return groups


# Each script is walked once in each way that it has; these are other sizes or models of the same walk.
ALIKE = {"7B short", "7B all", "memory at 7B", "sweep", "your model"}
ALIKE |= {f"your model, {name}" for name in ("vs_trl", "vs_trl on vLLM", "sweep", "sweep on vLLM")}


def test_every_benchmark_finds_what_it_measures():
    """Modules and names move; a script that nobody has run since would be found out by the next reader."""
    benchmarks = Path(ratings.__file__).parent
    names = sorted(path.stem for path in benchmarks.glob("*.py"))
    assert len(names) >= 7
    for name in names:
        importlib.import_module(name)


def kept(part: str, status: str = "done", dry: bool = False, card: str = "H200", figures: dict | None = None) -> dict:
    """A line of `parts.jsonl`."""
    found = {"a": 1} if figures is None else figures
    return {"part": part, "date": "", "card": card, "dry": dry, "status": status, "seconds": 1.0, "figures": found}


def read_parts(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "parts.jsonl").read_text().splitlines()]


class TestGpu:
    """The one command for a GPU."""

    def test_every_part_takes_five_minutes_at_most_and_its_files_are_there(self):
        for part in GPU_PARTS:
            assert 0 < part.minutes <= gpu.LIMIT == 5
            for command in (part.command, part.small):
                script, *options = command.split()
                files = [f"benchmarks/{script}", *(word for word in options if word.endswith((".yaml", ".py")))]
                assert [file for file in files if not (gpu.ROOT / file).exists()] == []

    def test_what_has_no_value_is_not_measured(self):
        rows = gpu.table([]).splitlines()[2:]
        assert len(rows) == sum(1 + len(part.figures) for part in gpu.PARTS)
        assert all("not measured" in row for row in rows)
        figures = {"used_gib": 60.25, "predicted_gib": 57.5, "seconds": {"total": 90.0}}
        table = gpu.table([kept("0.5B", figures=figures)])
        assert "| | GiB in use at the peak | 60.2 | 57.5 |" in table
        assert "| | update | not measured | not measured |" in table

    def test_the_table_has_the_newest_that_was_measured(self):
        lines = [kept("environment", figures={"gpu": each}) for each in ("A", "B")]
        lines += [kept("environment", status="failed: broken", figures={}), kept("environment", dry=True)]
        assert "| | GPU | B |" in gpu.table(lines)
        assert "failed: broken" in gpu.table(lines[2:3])

    def test_parts_without_figures_of_this_card_come_next(self):
        lines = [kept("tests"), kept("0.5B", card="another"), kept("publishing", status="failed: broken")]
        lines += [kept("environment", dry=True)]
        names = [part.name for part in gpu.PARTS]
        left = [part.name for part in gpu.choose(None, gpu.PARTS, lines, "H200", dry=False)]
        assert left == [name for name in names if name != "tests"]
        left = [part.name for part in gpu.choose(None, gpu.PARTS, lines, "CPU", dry=True)]
        assert left == [name for name in names if name != "environment"]
        named = gpu.choose(["0.5B", "tests"], gpu.PARTS, lines, "H200", dry=False)
        assert [part.name for part in named] == ["0.5B", "tests"]
        with pytest.raises(ValueError, match="There is no part 'test'; there are 'environment', 'tests', "):
            gpu.choose(["test"], gpu.PARTS, lines, "H200", dry=False)

    def test_a_share_of_the_peak_is_the_assumed_one_where_the_seconds_are(self):
        predicted = {"propose and solve": 30.0, "log-probs and update": 20.0}
        phases = {"propose": 10.0, "solve": 20.0, "update": 40.0}
        assert gpu_population.share_of_peak(predicted, phases, vllm=True) == pytest.approx(
            {"solve": 0.4, "update": 0.175}
        )
        assert gpu_population.share_of_peak(predicted, phases, vllm=False) == pytest.approx({"update": 0.175})

    @pytest.mark.parametrize("log", ['{"a": 1}\n', 'refleaks.html{"a": 1}\n', '{"b": 2}\n{"a": 1}\nleaked {}\n'])
    def test_figures_are_found_among_last_words(self, log):
        assert gpu.figures_in(log) == {"a": 1}
        assert gpu.figures_in("nothing {here}\n") == {}

    @pytest.mark.slow
    @pytest.mark.parametrize("group", sorted(group_parts().keys() - ALIKE))
    def test_a_dry_run_comes_to_every_figure_that_needs_no_gpu(self, group, tmp_path, monkeypatch):
        parts, needed = group_parts()[group], NEEDED.get(group, ())
        for name, value in without_extras(but=needed).items():
            monkeypatch.setenv(name, value)
        names = [part.name for part in parts]
        own = ["--model", str(tiny_base_path())] if parts[0] not in gpu.PARTS else []
        monkeypatch.setattr(sys, "argv", ["", "--dry-run", "--parts", *names, "--output", str(tmp_path), *own])
        with pytest.raises(SystemExit) as ended:
            gpu.main()
        lines = read_parts(tmp_path)
        assert [(line["part"], line["status"]) for line in lines] == [(name, "done") for name in names]
        assert not ended.value.code
        cannot = ONLY_ON_A_GPU if "vllm" in needed else ONLY_ON_A_GPU | ONLY_WITH_VLLM
        for part, line in zip(parts, lines, strict=True):
            missing = {place for place in part.figures.values() if gpu.value_at(line["figures"], place) is None}
            assert missing == cannot.intersection(part.figures.values())

    def test_a_part_that_fails_is_named_and_stops_no_other(self, tmp_path, monkeypatch, capsys):
        fails = "gpu.py --no-such-option"
        monkeypatch.setattr(gpu, "PARTS", [gpu.Part("fails", 1, fails, fails, {"a": "a"}, {}), gpu.PARTS[0]])
        monkeypatch.setattr(sys, "argv", ["", "--dry-run", "--output", str(tmp_path)])
        with pytest.raises(SystemExit) as ended:
            gpu.main()
        assert ended.value.code == 1
        failed, environment = read_parts(tmp_path)
        assert "unrecognized arguments: --no-such-option" in failed["status"]
        assert (environment["status"], environment["card"]) == ("done", "CPU")
        assert environment["figures"]["sandbox"] in "ABC"
        table = (tmp_path / "table.md").read_text()
        assert "| **environment** | done, a dry run |" in table
        assert "| | sandbox level | not measured |  |" in table, "a dry run measures nothing"
        said = capsys.readouterr().out
        assert "[1/2] fails, about 1 minutes ... failed" in said, "the estimate comes first"

        with pytest.raises(SystemExit):
            gpu.main()
        again = read_parts(tmp_path)
        assert again[:2] == [failed, environment], "lines are kept"
        assert [line["part"] for line in again[2:]] == ["fails"], "what is done is not done again"

    def test_as_many_parts_run_as_fit_into_the_minutes(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(gpu, "PARTS", [gpu.Part("too long", 5, "", "no.py", {}, {}), gpu.PARTS[0]])
        monkeypatch.setattr(sys, "argv", ["", "--dry-run", "--minutes", "3", "--output", str(tmp_path)])
        with pytest.raises(SystemExit) as ended:
            gpu.main()
        assert not ended.value.code
        assert [line["part"] for line in read_parts(tmp_path)] == ["environment"]
        assert "too long, about 5 minutes ... does not fit into the 3.0 that are left" in capsys.readouterr().out

    def test_a_part_is_stopped_at_its_limit(self, tmp_path):
        # A fifth of a second: Python has hardly begun to import torch.
        line = gpu.run(gpu.Part("long", 1, "", "gpu.py --environment", {}, {}), tmp_path, True, 0.003)
        assert (line["status"], line["figures"]) == ("stopped after 0.003 minutes", {})


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

    @pytest.mark.slow
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

    @pytest.mark.slow
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

    @pytest.mark.slow
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
