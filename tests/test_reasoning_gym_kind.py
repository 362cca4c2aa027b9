"""The recipe with a library's puzzles: what teachers may set up, who scores, and what guessing gives."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from trl_populora.evaluate.check_kind import check_kind
from trl_populora.tasks.archive import TaskArchive
from trl_populora.tasks.dataset import read_tasks
from trl_populora.tasks.kind import Proposal, Reject, Task


RECIPES = Path(__file__).parent.parent / "recipes"
sys.path.insert(0, str(RECIPES))

from reasoning_gym_kind import GENERATORS, ReasoningGym, puzzle  # noqa: E402


KIND = ReasoningGym()
LINE = "lcm max_numbers=2 max_value=20 seed=3"


def task(line: str) -> Task | Reject:
    proposal = KIND.parse_proposal(line, [])
    return KIND.accept(proposal, None, random.Random(0)) if isinstance(proposal, Proposal) else proposal


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("lcm max_numbers=2 seed=3", Reject.ARGUMENTS),
        ("lcm max_value=20 max_numbers=2 seed=3", Reject.ARGUMENTS),
        ("lcm max_numbers=2 max_value=999999 seed=3", Reject.ARGUMENTS),
        ("lcm max_numbers=2 max_value=20", Reject.FORMAT),
        ("countdown max_numbers=4 seed=3", Reject.FORMAT),
        (f"{LINE}\n{LINE}", Reject.FORMAT),
        ("lcm max_numbers=2 max_value=٢٠ seed=3", Reject.FORMAT),
    ],
)
def test_bad_settings_are_turned_down(line, reason):
    assert task(line) is reason


def test_two_ways_to_write_the_settings_are_one_task():
    assert task("lcm max_numbers=2 max_value=020 seed=003").task_id == task(LINE).task_id


@pytest.mark.parametrize("name", GENERATORS)
def test_scorers_only_compare_and_settings_exist(name):
    """A scorer that read an answer could run it."""
    dataset, config = DATASETS[name]
    assert dataset.score_answer is ProceduralDataset.score_answer
    assert GENERATORS[name].keys() <= config.__dataclass_fields__.keys()


@pytest.mark.parametrize("end", [0, 1], ids=["easiest", "hardest"])
@pytest.mark.parametrize("name", GENERATORS)
def test_at_both_ends_the_right_answer_is_right_and_more_is_wrong(name, end):
    settings = " ".join(f"{setting}={ends[end]}" for setting, ends in GENERATORS[name].items())
    posed = task(f"{name} {settings} seed=5")
    answer = puzzle(posed.program)[1]["answer"]
    assert KIND.correct(posed, KIND.parse_attempt(f"<think>hm</think>\n{answer}\n", posed), None)
    assert not KIND.correct(posed, KIND.parse_attempt(f"{answer}, I think", posed), None)
    assert not KIND.parse_attempt(f"{answer}\n{answer}", posed).well_formed
    assert KIND.complexity(posed) == {"difficulty": end}


def test_guesses_know_that_many_numbers_have_no_common_divisor():
    rates = []
    for line in ("gcd max_numbers=6 max_value=10000 seed=1", "lcm max_numbers=4 max_value=100 seed=1"):
        posed = task(line)
        guesses = KIND.guesses(posed)
        rates.append(sum(KIND.correct(posed, guess, None) for guess in guesses) / len(guesses))
    assert rates[0] > 0.8
    assert rates[1] == 0


def test_the_seeds_pass_what_check_kind_tries():
    seeds = list(TaskArchive.from_dataset(read_tasks(str(RECIPES / "reasoning_gym_seeds.jsonl"))))
    assert {seed.program.split()[0] for seed in seeds} == GENERATORS.keys()
    assert check_kind(KIND, seeds) == []
