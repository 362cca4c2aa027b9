"""What reward functions of a user's own may ask for."""

from __future__ import annotations

import pytest

from trl_populora.step.rows import Row, check_arguments, student_reward, teacher_reward


def right(completions, answer, solution, level=1, **columns):
    """As for a dataset of prompts with answers."""


def brief(completions, role):
    """Without `**columns`."""


def fitting(prompts, completions, *, completion_ids=None, solve_rate, **columns):
    """With what there is."""


def test_a_reward_function_for_other_columns_is_refused_by_name():
    with pytest.raises(
        TypeError, match=r"`right` asks for `answer`, `solution`, which nothing gives\. .*prompts, .* pay, program\.$"
    ):
        check_arguments(right, Row.COLUMNS)
    with pytest.raises(TypeError, match=r"`right` asks for `answer`, .*\. Did you mean `answers`\? It may ask for "):
        check_arguments(right, ("answers", "solution"))
    with pytest.raises(TypeError, match=r"`brief` is called with more .*`\*\*columns`"):
        check_arguments(brief, Row.COLUMNS)
    for function in (fitting, teacher_reward, student_reward):
        check_arguments(function, Row.COLUMNS)
