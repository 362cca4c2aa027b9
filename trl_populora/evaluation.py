"""How well members solve given tasks: held-out scores, outside the step and without touching ratings or archive."""

from __future__ import annotations

from collections.abc import Sequence

from trl_populora.rollout import Game, grade
from trl_populora.tasks.base import Task


def solve_rates(game: Game, member: str, tasks: Sequence[Task], attempts: int = 1, batch: int = 64) -> list[float]:
    """
    Lets one member attempt every task, sampled as in training.

    Args:
        game (`Game`): The trainer's `game`; only its `generate`, `kinds`, `sandbox` and `style` are used.
        member (`str`): Name of the member.
        tasks (`Sequence[Task]`): What to solve.
        attempts (`int`, *optional*, defaults to `1`): Attempts per task.
        batch (`int`, *optional*, defaults to `64`): Rows generated at once.

    Returns:
        `list[float]`: Fraction of right attempts per task, in the order of the tasks.
    """
    owners = [task for task in tasks for _ in range(attempts)]
    answers = []
    for start in range(0, len(owners), batch):
        part = owners[start : start + batch]
        prompts = [game.kinds[task.kind].solving_prompt(task, game.style) for task in part]
        completions = game.generate(prompts, [member] * len(part))
        answers += [
            game.kinds[task.kind].parse_attempt(completion.text, task)
            for task, completion in zip(part, completions, strict=True)
        ]
    right = grade(game, owners, answers)
    return [sum(right[i : i + attempts]) / attempts for i in range(0, len(right), attempts)]
