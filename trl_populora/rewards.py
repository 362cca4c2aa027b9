"""Phase 5, first half: what a proposal and an attempt are worth.

Both are ordinary TRL reward functions. Each scores the rows of its own role and returns `None` for the others, so TRL
logs `rewards/teacher_reward/mean` and `rewards/student_reward/mean` side by side. Values: PopuLoRA (arXiv 2605.16727)
for teachers, Absolute Zero Reasoner (arXiv 2505.03335) for students.
"""

from __future__ import annotations

from collections.abc import Callable


RewardFunc = Callable[..., list[float | None]]


def make_teacher_reward(invalid: float = -1.0, unsolved: float = 0.0) -> RewardFunc:
    """
    Builds the teachers' reward: hard but solvable is best.

    Args:
        invalid (`float`, *optional*, defaults to `-1.0`): Reward of a rejected proposal.
        unsolved (`float`, *optional*, defaults to `0.0`): Reward when no attempt is right. Otherwise 1 - solve rate.

    Returns:
        `Callable`: TRL reward function named `teacher_reward`; reads the columns `role`, `valid`, `solve_rate`.
    """

    def worth(valid: bool, solve_rate: float) -> float:
        if not valid:
            return invalid
        return unsolved if solve_rate == 0.0 else 1.0 - solve_rate

    def teacher_reward(role: list[str], valid: list[bool], solve_rate: list[float], **kwargs) -> list[float | None]:
        rows = zip(role, valid, solve_rate, strict=True)
        return [worth(is_valid, rho) if name == "teacher" else None for name, is_valid, rho in rows]

    return teacher_reward


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
