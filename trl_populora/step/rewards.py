"""Phase 5, first half: what a proposal and an attempt are worth.

Both are ordinary TRL reward functions. Each scores the rows of its own role and returns `None` for the others, so TRL
logs `rewards/teacher_reward/mean` and `rewards/student_reward/mean` side by side. Values: PopuLoRA (arXiv 2605.16727)
for teachers, Absolute Zero Reasoner (arXiv 2505.03335) for students.

A task that students meet no more often than by guessing counts as unsolved, for the teacher's reward and for the match
alike. The line is drawn three times:

* A kind says what guessing gives where the answer's form alone tells (`TaskKind.chance`). For code_o and code_i that
  is 1/2 for an output `True` or `False` and 1/2 for each of a list or tuple of them.
* Where inputs are what is guessed (code_i), some are drawn without a look at the task and tried (`TaskKind.guesses`):
  a program that takes one input in four is a lottery, whatever the others lead to.
* One output does not tell the range it comes from, but many answers do. Where two mistakes were each made more often
  than the task was solved, the right answer is one of several that were guessed among ([`guessed`]). One mistake that
  most attempts make is no guess: a task that misleads stays worth what the few that see through it leave. A coin with
  two sides that are not `True` and `False` therefore earns what an honest task earns that half of the attempts solve,
  0.5.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable

from trl_populora.step.played import Row


RewardFunc = Callable[..., list[float | None]]

# By these names TRL hands a reward function what it knows beside the columns.
ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def make_teacher_reward(invalid: float = -1.0, unsolved: float = 0.0) -> RewardFunc:
    """
    Builds the teachers' reward: hard but solvable is best.

    Args:
        invalid (`float`, *optional*, defaults to `-1.0`): Reward of a rejected proposal.
        unsolved (`float`, *optional*, defaults to `0.0`): Reward when no more attempts are right than by guessing.
            Otherwise 1 - solve rate.

    Returns:
        `Callable`: TRL reward function named `teacher_reward`; reads the columns `role`, `valid`, `solve_rate` and
            `chance` (0 for all rows where it is missing).
    """

    def worth(valid: bool, solve_rate: float, chance: float) -> float:
        if not valid:
            return invalid
        return unsolved if solve_rate <= chance else 1.0 - solve_rate

    def teacher_reward(
        role: list[str], valid: list[bool], solve_rate: list[float], chance: list[float] | None = None, **kwargs
    ) -> list[float | None]:
        rows = zip(role, valid, solve_rate, chance or [0.0] * len(role), strict=True)
        return [worth(is_valid, rho, luck) if name == "teacher" else None for name, is_valid, rho, luck in rows]

    return teacher_reward


def guessed(mistakes: Iterable[str]) -> int:
    """How many attempts are right by guessing alone: fewer than made the second most frequent of these mistakes."""
    _, second = ([count for _, count in Counter(mistakes).most_common(2)] + [0, 0])[:2]
    return max(0, second - 1)


def make_student_reward(right: float = 1.0, wrong: float = -0.5, malformed: float = -1.0) -> RewardFunc:
    """
    Builds the students' reward.

    Args:
        right (`float`, *optional*, defaults to `1.0`): Reward of a right answer.
        wrong (`float`, *optional*, defaults to `-0.5`): Reward of a well-formed answer that is not right.
        malformed (`float`, *optional*, defaults to `-1.0`): Reward of an answer that the parser refuses.

    Returns:
        `Callable`: TRL reward function named `student_reward`; reads the columns `role`, `correct`, `well_formed`.
    """

    def worth(correct: bool, well_formed: bool) -> float:
        if correct:
            return right
        return wrong if well_formed else malformed

    def student_reward(role: list[str], correct: list[bool], well_formed: list[bool], **kwargs) -> list[float | None]:
        rows = zip(role, correct, well_formed, strict=True)
        return [worth(is_right, formed) if name == "student" else None for name, is_right, formed in rows]

    return student_reward


teacher_reward = make_teacher_reward()
student_reward = make_student_reward()


def check_arguments(function: RewardFunc) -> None:
    """
    Checks that a reward function can be called as every one is: with all columns, by name.

    Raises:
        `TypeError`: If it asks for another column, as of a dataset of prompts, or does not take all that there are.
    """
    parameters = inspect.signature(function).parameters.values()
    named = {each.name: each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    given = (*ARGUMENTS, *Row.COLUMNS)
    absent = [f"`{name}`" for name in named if name not in given and named[name].default is inspect.Parameter.empty]
    if absent:
        raise TypeError(
            f"The reward function `{function.__name__}` asks for {', '.join(absent)}. Columns of a dataset do not "
            f"arrive here, as teachers write the tasks; these do: {', '.join(given)}."
        )
    if not all(name in named for name in given) and all(each.kind is not each.VAR_KEYWORD for each in parameters):
        raise TypeError(
            f"The reward function `{function.__name__}` is called with more columns by name than it takes. End its "
            "arguments with `**columns`."
        )
