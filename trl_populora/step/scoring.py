"""Update, before any forward: what a step's rows are worth, and which of them are computed together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate.utils import gather

from trl_populora.population.members import Population
from trl_populora.step.advantages import score_step
from trl_populora.step.batching import plan_micro_batches
from trl_populora.step.deviations import RunningDeviations
from trl_populora.step.forwards import Sharing
from trl_populora.step.played import Played
from trl_populora.tasks.bounds import check_choices


@dataclass(frozen=True)
class Scoring:
    """
    How rows are compared, and how many are computed at once. Each field is the option of the same name.

    Raises:
        `ValueError`: If `teacher_scale` is neither, or scales where `scale_rewards` forbids it.
    """

    teachers: int
    loss_type: str
    scale_rewards: str
    mask_truncated_completions: bool
    per_device_train_batch_size: int
    teacher_baseline: str = "member"
    student_baseline: str = "group"
    teacher_scale: str = "step"

    def __post_init__(self):
        check_choices(self, {"teacher_scale": ("step", "running")})
        if self.teacher_scale == "running" and self.scale_rewards not in ("group", True):
            raise ValueError(f"`teacher_scale=running` scales, `scale_rewards={self.scale_rewards}` does not.")


class Scorer:
    """
    Takes a step from the rewards of its rows to advantages and micro-batches. Collective.

    Args:
        settings ([`Scoring`]): The run's.
        population ([`Population`]): Whose members play.
        reward_weights (`torch.Tensor`): One per reward function.
        ends (`Sequence[int]`): With one of these tokens a completion is not cut off.
        rank (`int`): This process.
        sharing ([`Sharing`], *optional*): How the model takes rows with a shared prompt.
        skips_blank_rows (`bool`): Whether rows without advantage are left out of the forward.

    Attributes:
        deviations ([`RunningDeviations`], *optional*): What scales the teachers' advantages, with
            `teacher_scale="running"`.
    """

    def __init__(
        self,
        settings: Scoring,
        population: Population,
        reward_weights: torch.Tensor,
        ends: Sequence[int],
        rank: int,
        sharing: Sharing | None,
        skips_blank_rows: bool,
    ):
        self.settings, self.population, self.reward_weights = settings, population, reward_weights
        self.ends = ends if settings.mask_truncated_completions else None
        self.rank, self.sharing, self.skips_blank_rows = rank, sharing, skips_blank_rows
        self.deviations = RunningDeviations(population) if settings.teacher_scale == "running" else None

    def score(self, played: Played) -> None:
        """Fills in a step's `worth`, `own_worth` and `plan`; its `rewards` are known."""
        settings, rows = self.settings, len(played.rows)
        answered = played.count_tokens(self.ends)
        played.worth = score_step(
            played,
            self.population,
            self.reward_weights,
            gather(torch.tensor(answered, device=played.rewards.device)),
            {"teacher": settings.teacher_baseline, "student": settings.student_baseline},
            settings.scale_rewards,
            settings.loss_type,
            None if self.deviations is None else self.deviations.scale,
        )
        mine = played.own_worth = played.worth.part(slice(self.rank * rows, (self.rank + 1) * rows))
        asked = [len(row.completion.prompt_ids) for row in played.rows]
        if self.skips_blank_rows:
            live = [bool(a) and tokens > 0 for a, tokens in zip(mine.advantages.tolist(), answered, strict=True)]
            asked, answered = ([n * alive for n, alive in zip(ns, live, strict=True)] for ns in (asked, answered))
        members, size = mine.members.tolist(), settings.per_device_train_batch_size
        played.plan = plan_micro_batches(
            members, played.prompts, asked, answered, settings.teachers, size, self.sharing
        )
