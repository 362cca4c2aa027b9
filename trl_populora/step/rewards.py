"""Phase 5, first half: the two rewards as TRL wants them. What they pay is decided in `step/rules.py`.

Each scores the rows of its own role and returns `None` for the others, so TRL logs `rewards/teacher_reward/mean` and
`rewards/student_reward/mean` side by side.
"""

from __future__ import annotations


def teacher_reward(role: list[str], pay: list[float], **columns: list) -> list[float | None]:
    """What the rules paid for each proposal."""
    return [paid if name == "teacher" else None for name, paid in zip(role, pay, strict=True)]


def student_reward(role: list[str], pay: list[float], **columns: list) -> list[float | None]:
    """What the rules paid for each attempt."""
    return [paid if name == "student" else None for name, paid in zip(role, pay, strict=True)]
