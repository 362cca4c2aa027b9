"""The reward truth table: rewards, rating outcome and metrics must tell one story."""

from __future__ import annotations

import pytest

from trl_populora.population.matchmaking import student_share
from trl_populora.step.rewards import (
    check_arguments,
    guessed,
    make_student_reward,
    make_teacher_reward,
    student_reward,
    teacher_reward,
)


NAN = float("nan")

# valid, solve rate -> teacher's reward, student's share of the match (paper; the floor gives nothing for rho = 0)
PROPOSALS = [
    (False, NAN, -1.0, 1.0),
    (True, 0.0, 0.0, 0.5),
    (True, 0.25, 0.75, 0.25),
    (True, 0.5, 0.5, 0.5),
    (True, 1.0, 0.0, 1.0),
]
# correct, well formed -> student's reward (AZR)
ATTEMPTS = [(True, True, 1.0), (False, True, -0.5), (False, False, -1.0)]


@pytest.mark.parametrize(("valid", "rho", "reward", "share"), PROPOSALS)
def test_proposal(valid, rho, reward, share):
    assert teacher_reward(role=["teacher"], valid=[valid], solve_rate=[rho]) == [reward]
    assert student_share(valid, rho) == share


@pytest.mark.parametrize(("correct", "well_formed", "reward"), ATTEMPTS)
def test_attempt(correct, well_formed, reward):
    assert student_reward(role=["student"], correct=[correct], well_formed=[well_formed]) == [reward]


# What guessing gives, solve rate -> teacher's reward, student's share
GUESSED = [(0.5, 0.0, 0.0, 0.5), (0.5, 0.25, 0.0, 0.5), (0.5, 0.5, 0.0, 0.5), (0.5, 0.625, 0.375, 0.625)]


@pytest.mark.parametrize(
    ("mistakes", "right"),
    [("", 0), ("aaaaaa", 0), ("abcdefg", 0), ("aab", 0), ("aabb", 1), ("aaabb", 1), ("aaabbb", 2), ("aabbcc", 1)],
)
def test_fewer_right_answers_than_two_mistakes_each_are_guesses(mistakes, right):
    """One mistake that all make is no guess, however frequent."""
    assert guessed(mistakes) == right


@pytest.mark.parametrize(("chance", "rho", "reward", "share"), [*GUESSED, (0.125, 0.25, 0.75, 0.25)])
def test_what_is_met_by_guessing_counts_as_unsolved(chance, rho, reward, share):
    assert teacher_reward(role=["teacher"], valid=[True], solve_rate=[rho], chance=[chance]) == [reward]
    assert student_share(True, rho, chance) == share
    assert student_share(False, NAN, chance) == 1.0


def test_each_function_is_silent_about_the_other_role():
    columns = {
        "role": ["teacher", "student"],
        "valid": [True, True],
        "solve_rate": [0.5, 0.5],
        "correct": [False, True],
        "well_formed": [True, True],
    }
    assert teacher_reward(**columns) == [0.5, None]
    assert student_reward(**columns) == [None, 1.0]


def test_settings_replace_the_defaults():
    teacher = make_teacher_reward(invalid=-2.0, unsolved=-0.25)
    assert teacher(role=["teacher"] * 2, valid=[False, True], solve_rate=[NAN, 0.0]) == [-2.0, -0.25]
    student = make_student_reward(right=2.0, wrong=0.0, malformed=-0.5)
    rewards = student(role=["student"] * 3, correct=[True, False, False], well_formed=[True, True, False])
    assert rewards == [2.0, 0.0, -0.5]


def test_names_that_trl_logs():
    assert (teacher_reward.__name__, student_reward.__name__) == ("teacher_reward", "student_reward")


def right(completions, answer, solution, level=1, **columns):
    """As for a dataset of prompts with answers."""


def brief(completions, role):
    """Without `**columns`."""


def fitting(prompts, completions, *, completion_ids=None, solve_rate, **columns):
    """With what there is."""


def test_a_reward_function_for_other_columns_is_refused_by_name():
    with pytest.raises(TypeError, match=r"`right` asks for `answer`, `solution`\. .* these do: prompts, .* chance\.$"):
        check_arguments(right)
    with pytest.raises(TypeError, match=r"`brief` is called with more .*`\*\*columns`"):
        check_arguments(brief)
    for function in (fitting, teacher_reward, student_reward):
        check_arguments(function)
