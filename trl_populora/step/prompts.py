"""A step of a dataset run: members answer prompts of the dataset, and reward functions judge each answer.

    rows of this rank [R] --the members write--> completions --TRL's reward functions--> rewards [W * R, functions]
        --PromptScorer--> advantages as TRL computes them for each member alone, rows by optimizer step

A rank's rows stand member by member, and each member has equally many rows. TRL has settings for the rows of a
generation, the attempts at a prompt and the optimizer steps of a generation. Here they hold for each member, not for
all members together.

Shapes: R rows of this rank, W ranks, M members, N rows of a member on all ranks, G attempts at a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from trl.trainer.utils import nanstd

from trl_populora.evaluate.intervals import measure_mean
from trl_populora.population.members import Member
from trl_populora.step.advantages import STD_EPSILON, Scorer
from trl_populora.step.player import Completion, Messages
from trl_populora.step.rows import Played


@dataclass(frozen=True)
class PromptRow:
    """
    What a member wrote to a prompt of the dataset.

    Args:
        member: Name of the member.
        prompt: The prompt as the dataset has it: text or messages.
        completion: What the member wrote.
    """

    member: str
    prompt: str | Messages
    completion: Completion


class PromptScorer(Scorer):
    """
    Takes the rows of a generation from rewards to advantages and micro-batches. Each member's rows are treated as TRL
    would treat them alone.

    Args:
        attempts: G, `num_generations`.
        optimizer_steps: Into how many optimizer steps the rows of a generation are dealt. Repeats by `num_iterations`
            do not count.
        rows_of_all: Rows of a generation on all ranks when no seat is empty.
        micro_batches_of_all: Micro-batches of an optimizer step on one rank when no seat is empty.
        others: Arguments of [`~trl_populora.step.advantages.Scorer`].
    """

    def __init__(
        self, *, attempts: int, optimizer_steps: int, rows_of_all: int | None, micro_batches_of_all: int, **others: Any
    ):
        super().__init__(**others)
        self.attempts, self.optimizer_steps = attempts, optimizer_steps
        self.rows_of_all, self.micro_batches_of_all = rows_of_all, micro_batches_of_all
        self.judges = False  # whether any reward function has given a number since training began

    def _weigh_rewards(self, played: Played, members_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        rewards_R = sum_rewards(played.rewards, self.reward_weights)
        # Until a reward function has given a number, a generation without numbers is an error. Later all rows of such
        # a generation get advantage 0, as in TRL.
        self.judges = self.judges or not bool(rewards_R.isnan().all())
        if not self.judges:
            raise ValueError(
                f"The reward functions judged none of the {len(rewards_R)} completions of this step: every one gave "
                "None or NaN for each. At least one function must give a number."
            )
        ranks = len(rewards_R) // len(played.rows)
        # Every rank holds its part of each member's rows; a member's rows on all ranks are what TRL would see.
        by_member = rewards_R.view(ranks, len(self.population.members), -1).transpose(0, 1).flatten(1)
        advantages = torch.stack([self._compare(own) for own in by_member])
        deviations = nanstd(by_member.reshape(-1, self.attempts), dim=1)
        back = advantages.view(len(advantages), ranks, -1).transpose(0, 1).reshape(-1)
        return rewards_R, back, float(torch.isclose(deviations, torch.zeros_like(deviations)).float().mean())

    def _compare(self, rewards_N: torch.Tensor) -> torch.Tensor:
        """
        Computes the advantages of one member's rows, `[N]`, group by group. These are TRL's operations in TRL's order
        and precision, so the values are equal to the last bit.
        """
        groups = rewards_N.view(-1, self.attempts)
        means_N = torch.nanmean(groups, dim=1).repeat_interleave(self.attempts, dim=0)
        advantages_N = rewards_N - means_N
        if self.settings.scale_rewards == "group":
            deviations_N = nanstd(groups, dim=1).repeat_interleave(self.attempts, dim=0)
            advantages_N = advantages_N / (deviations_N + STD_EPSILON)
        elif self.settings.scale_rewards == "batch":
            advantages_N = advantages_N / (nanstd(rewards_N).expand_as(rewards_N) + STD_EPSILON)
        return torch.nan_to_num(advantages_N, nan=0.0)

    def _deal_steps(self, rows: int) -> list[list[int]]:
        # TRL shuffles the rows of a generation, and takes them into its optimizer steps in that order. One permutation
        # serves all members, so that members with the same prompts have them in the same optimizer steps.
        members = len(self.population.members)
        own = rows // members
        order = torch.randperm(own).tolist()
        part = own // self.optimizer_steps
        return [
            [member * own + place for member in range(members) for place in order[start : start + part]]
            for start in range(0, own, part)
        ]


def _leave_out_nan(means: Mapping[str, float]) -> dict[str, float]:
    """Leaves out the members whose mean is NaN, because no reward function judged them."""
    return {name: mean for name, mean in means.items() if not math.isnan(mean)}


def sum_rewards(per_function: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """
    Sums the weighted rewards of each row, `[R, functions]` to `[R]`. A row that no function judges has no reward
    (NaN), and not the reward 0.
    """
    total = (per_function * weights.to(per_function.device)).nansum(dim=1)
    return total.masked_fill(per_function.isnan().all(dim=1), math.nan)


class MemberScores:
    """
    The last mean reward of each member, in training and on `eval_dataset`, by `name@version`.

    Attributes:
        trained: Mean rewards of the last generation.
        evaluated: Mean rewards of the last evaluation.
        step: Optimizer step of that evaluation; -1 before the first.
        learned: Whether a member has ever had a row with an advantage.
    """

    def __init__(self) -> None:
        self.trained: dict[str, float] = {}
        self.evaluated: dict[str, float] = {}
        self.learned: dict[str, bool] = {}
        self.step = -1
        # Mean rewards by `name@version`, one dict per table of `eval_dataset` that was evaluated at `step`.
        self._tables: list[dict[str, float]] = []

    def choose(self, step: int, rated: bool) -> tuple[dict[str, float], str]:
        """
        Chooses the figures that decide which member is best.

        1. If the last evaluation was at `step`, its mean rewards decide.
        2. Else, if members have ratings, the ratings decide. No figures are returned.
        3. Else (members that get different prompts have no ratings) the mean rewards of the last generation decide.

        Args:
            step: Optimizer steps so far.
            rated: Whether members have ratings.

        Returns:
            Mean rewards by `name@version`, and what decides, in words.
        """
        if self.evaluated and self.step == step:
            return self.evaluated, "reward on eval_dataset"
        return ({}, "rating") if rated else (_leave_out_nan(self.trained), "reward")

    def note_generation(self, means: Mapping[str, float], learning: Collection[str]) -> None:
        """
        Notes the members' mean rewards in the last generation, and who had a row with an advantage in it.

        Args:
            means: Mean rewards by `name@version`; NaN of a member that no function judges.
            learning: Names (`name@version`) of the members that have a row with an advantage.
        """
        self.trained = dict(means)
        for name in means:
            self.learned[name] = self.learned.get(name, False) or name in learning

    def note_evaluation(self, step: int, means: Mapping[str, float]) -> None:
        """
        Notes the members' mean rewards on a table of `eval_dataset`. If several tables are noted at one step, a
        member's mean over these tables counts.

        Args:
            step: Optimizer steps so far.
            means: Mean rewards by `name@version`; NaN for a member that no reward function judged.
        """
        if step != self.step:
            self.step, self._tables = step, []
        self._tables.append(_leave_out_nan(means))
        names = dict.fromkeys(name for table in self._tables for name in table)
        self.evaluated = {name: fmean(table[name] for table in self._tables if name in table) for name in names}

    def forget_evaluation(self) -> None:
        """Forgets the last evaluation and its step, because a second training counts its steps from 0 again."""
        self.evaluated, self.step, self._tables = {}, -1, []

    def describe(self, member: Member) -> dict[str, Any]:
        """Returns a member's mean rewards and the step of the evaluation, for `population.json`; `None` if unknown."""
        return {
            "reward": _leave_out_nan(self.trained).get(member.identity),
            "eval_reward": self.evaluated.get(member.identity),
            "eval_step": self.step if member.identity in self.evaluated else None,
            "learned": self.learned.get(member.identity),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns plain data, ready for JSON."""
        return {
            "trained": self.trained,
            "evaluated": self.evaluated,
            "learned": self.learned,
            "step": self.step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state of `state_dict`."""
        self.trained, self.evaluated = dict(state["trained"]), dict(state["evaluated"])
        self.learned = dict(state["learned"])
        self.step = int(state["step"])
        self._tables = []  # what was evaluated here until now was of other weights


def measure_members(
    seats: Mapping[str, Member | None],
    records: Sequence[Mapping[str, Any]],
    rewards_R: torch.Tensor,
    per_function: torch.Tensor,
    functions: Sequence[str],
    lengths: Sequence[int],
) -> dict[str, float]:
    """
    Measures each member by its rows on all ranks.

    Args:
        seats: The member in each seat, by the seat's name; `None` for an empty seat.
        records: One per row, with its `member`.
        rewards_R: Reward of each row; NaN where no function judges the row.
        per_function: Reward of each row by each function, `[W * R, functions]`.
        functions: Names of the reward functions.
        lengths: Tokens of each completion.

    Returns:
        Means by `member/<seat>/reward`, `member/<seat>/rewards/<function>` and `member/<seat>/length`; NaN of an
        empty seat.
    """
    found = {}
    for seat, member in seats.items():
        mine = [member is not None and record["member"] == member.name for record in records]
        own = torch.tensor(mine, device=rewards_R.device)
        found[f"member/{seat}/reward"] = float(rewards_R[own].nanmean())
        for place, function in enumerate(functions):
            found[f"member/{seat}/rewards/{function}"] = float(per_function[own, place].nanmean())
        mine = [length for length, its in zip(lengths, mine, strict=True) if its]
        found[f"member/{seat}/length"] = sum(mine) / len(mine) if mine else math.nan
    return found


@dataclass(frozen=True)
class Judged:
    """
    An answer of an evaluation with its rewards.

    Args:
        prompt: A number that answers to the same prompt share.
        rewards: The reward, then that of each reward function without its weight. NaN where none was given.
    """

    prompt: int
    rewards: Sequence[float]


def measure_evaluation(
    seats: Mapping[str, Member | None], answers: Mapping[str, Sequence[Judged]], functions: Sequence[str]
) -> dict[str, float]:
    """
    Measures each member by its answers in an evaluation, and how far the best is ahead.

    Args:
        seats: The member in each seat, by the seat's name; `None` for an empty seat.
        answers: A member's answers, by its name.
        functions: Names of the reward functions.

    Returns:
        Means by `member/<seat>/reward` and `member/<seat>/rewards/<function>`, NaN of an empty seat; the highest and
        the lowest reward; `reward_lead`, by which the best member is ahead of the next over the prompts that both
        answered, with half of its 95 % interval.
    """
    found: dict[str, float] = {}
    for seat, member in seats.items():
        rows = torch.tensor([each.rewards for each in answers.get(member.name if member else "", ())])
        means = rows.reshape(-1, 1 + len(functions)).nanmean(0).tolist()
        names = ("reward", *(f"rewards/{function}" for function in functions))
        found |= {f"member/{seat}/{name}": mean for name, mean in zip(names, means, strict=True)}
    known = {seat: mean for seat in seats if not math.isnan(mean := found[f"member/{seat}/reward"])}
    ranked = sorted(known, key=known.__getitem__, reverse=True)
    found |= {"reward_best": math.nan, "reward_worst": math.nan}
    found |= {"reward_lead": math.nan, "reward_lead_margin": math.nan}
    if ranked:
        found |= {"reward_best": known[ranked[0]], "reward_worst": known[ranked[-1]]}
    if len(ranked) > 1:
        leaders = [member.name for seat in ranked[:2] if (member := seats[seat])]
        first, second = (_average_by_prompt(answers[name]) for name in leaders)
        leads = [first[prompt] - second[prompt] for prompt in sorted(first.keys() & second.keys())]
        if leads := [lead for lead in leads if math.isfinite(lead)]:
            lead, margin = measure_mean(leads)
            found |= {"reward_lead": lead, "reward_lead_margin": margin if math.isfinite(margin) else math.nan}
    return found


def _average_by_prompt(answers: Sequence[Judged]) -> dict[int, float]:
    """The mean reward of each prompt that has one."""
    rewards: dict[int, list[float]] = {}
    for answer in answers:
        if not math.isnan(answer.rewards[0]):
            rewards.setdefault(answer.prompt, []).append(answer.rewards[0])
    return {prompt: sum(own) / len(own) for prompt, own in rewards.items()}  # `fmean` refuses infinite ones
