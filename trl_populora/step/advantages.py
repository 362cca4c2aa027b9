"""The first part of the update: rewards become advantages. Also computes the factors that make a joint step equal
solo steps.

    rewards [R, functions] --weights--> rewards_R --baseline--> advantages_R --> this rank's plan (microbatch.py)
                                        num_tokens_R ---------> factors_R

In this file R counts the rows of all ranks, because a group may span ranks. Afterwards each rank takes the entries of
its own rows, and plans its micro-batches. `_R` in a name says that the shape is `[R]`, one entry per row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from accelerate.utils import broadcast, gather

from trl_populora.options import find_function, is_own
from trl_populora.population.members import ROLES, Population
from trl_populora.step.microbatch import Sharing, plan_micro_batches
from trl_populora.step.rows import Played, Worth


# Added to a standard deviation before dividing by it, as in TRL's GRPO.
STD_EPSILON = 1e-4
FLAT = 1e-6  # rewards that differ by less count as equal

BASELINES = ("group", "member")  # what may be subtracted from a reward, see [`compute_advantages`]

# For each `loss_type`, the number by which TRL's `_compute_loss` divides the loss summed over all rows: the number of
# rows, or the number of their completion tokens. `dr_grpo` divides by a constant, too.
LOSS_NORMALISERS = {"grpo": "rows", "dr_grpo": "rows", "dapo": "tokens", "cispo": "tokens"}

REORDERS = "it reorders rows, so that other members' adapters would compute them"

# Options of TRL that a population cannot use, because most of them would let members influence each other. Each entry:
# the option, the one value that it may have, and the reason.
COUPLE_MEMBERS = (
    ("top_entropy_quantile", 1.0, "its threshold is taken over all members' tokens"),
    ("entropy_coef", 0.0, "the entropy bonus is averaged over all members' tokens"),
    ("use_adaptive_entropy", False, "the entropy bonus is averaged over all members' tokens"),
    ("multi_objective_aggregation", "sum_then_normalize", "it whitens over all members"),
    ("use_transformers_continuous_batching", False, REORDERS),
    ("use_transformers_paged", False, REORDERS),
    ("optim_target_modules", None, "its optimizers group parameters by module instead of by member"),
    ("sync_ref_model", False, "it would move the reference, which is the frozen base that all members share"),
    ("router_aux_loss_coef", 0.0, "the load of the experts is balanced over all members' tokens"),
    ("ds3_gather_for_generation", True, "routed layers need the whole base while members generate"),
    ("ddp_static_graph", None, "which micro-batches a step computes depends on its rows"),
    ("off_policy_mask_threshold", None, "whether it drops a row depends on the sign of the row's advantage"),
)


@dataclass(frozen=True)
class Scoring:
    """
    The options that decide advantages, the factors on members' gradients (see [`compute_member_factors`]) and the size
    of micro-batches. Each field is the option of the same name.
    """

    teachers: int
    loss_type: str
    scale_rewards: str
    mask_truncated_completions: bool
    per_device_train_batch_size: int
    teacher_baseline: str = "member"
    student_baseline: str = "group"


class Scorer:
    """
    Takes a step from the rewards of its rows to advantages and micro-batches.

    Args:
        settings: The run's settings.
        population: The members.
        reward_weights: One weight per reward function.
        ends: Ids of the tokens that end a completion. A completion with another last token was cut off.
        rank: Number of this process.
        sharing: How the model computes rows with a shared prompt; `None` if it cannot share prompts.
        skips_blank_rows: Whether the forward leaves out rows without advantage. It always leaves out rows whose tokens
            are all masked.
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
        # A dataset run sets both, because its seats may be empty: how many rows a generation would have, and how many
        # micro-batches an optimizer step would have, if every seat had a member.
        self.rows_of_all: int | None = None
        self.micro_batches_of_all = 0

    def score(self, played: Played) -> None:
        """Fills in a step's `worth`, `local_worth` and `plan` from its `rewards`. Collective."""
        settings, rows, device = self.settings, len(played.rows), played.rewards.device
        asked, answered = [len(row.completion.prompt_ids) for row in played.rows], played.count_tokens(self.ends)
        members_R = torch.tensor([self.population[each["member"]].index for each in played.records], device=device)
        num_tokens_R = gather(torch.tensor(answered, device=device))
        rewards_R, advantages_R, flat = self._weigh_rewards(played, members_R)
        advantages_R = broadcast(advantages_R)  # a user's own function may give other values on another rank
        factors_R = compute_member_factors(members_R, num_tokens_R, settings.loss_type, self.rows_of_all)
        played.worth = Worth(rewards_R, advantages_R, members_R, factors_R, flat)
        mine = played.local_worth = played.worth.part(slice(self.rank * rows, (self.rank + 1) * rows))
        # The plan leaves out rows of length 0. The factors have been computed before, with all rows. A row of which no
        # token counts has no KL term, either.
        live = [tokens > 0 for tokens in answered]
        if self.skips_blank_rows:
            live = [counts and bool(a) for counts, a in zip(live, mine.advantages.tolist(), strict=True)]
        asked, answered = ([n * alive for n, alive in zip(ns, live, strict=True)] for ns in (asked, answered))
        columns = mine.members.tolist(), played.prompts, asked, answered
        played.plan, size = [], settings.per_device_train_batch_size
        for step_rows in self._deal_steps(rows):
            members, prompts, before, after = ([column[row] for row in step_rows] for column in columns)
            packs = plan_micro_batches(members, prompts, before, after, settings.teachers, size, self.sharing)
            # TRL expects as many micro-batches as if every seat had a member. Empty ones make up the number.
            packs += [[] for _ in range(self.micro_batches_of_all - len(packs))]
            played.plan += [[[step_rows[row] for row in pack] for pack in batch] for batch in packs]

    def _weigh_rewards(self, played: Played, members_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Computes rewards and advantages of the rows of all ranks, and the share of groups of equal rewards."""
        settings = self.settings
        rewards_R = (played.rewards * self.reward_weights.to(members_R.device)).nansum(dim=1)
        baselines = {"teacher": settings.teacher_baseline, "student": settings.student_baseline}
        scaled = settings.scale_rewards == "group"
        advantages_R = compute_step_advantages(played.records, rewards_R, members_R, baselines, scaled)
        return rewards_R, advantages_R, measure_flat_fraction(played.records, rewards_R)

    def _deal_steps(self, rows: int) -> list[list[int]]:
        """Deals this rank's rows to the optimizer steps that train on them. In the game there is one such step."""
        return [[*range(rows)]]


def compute_step_advantages(
    records: Sequence[Mapping[str, Any]],
    rewards_R: torch.Tensor,
    members_R: torch.Tensor,
    baselines: Mapping[str, str],
    scaled: bool,
) -> torch.Tensor:
    """
    Computes the advantages of all rows of a step, `[R]`, each role with the baseline set for it.

    Args:
        records: One per row, with its `role`, `kind` and `group`.
        rewards_R: Reward of each row.
        members_R: Member index of each row.
        baselines: Per role the `baseline` of [`compute_advantages`], or `module:function` for
            [`estimate_advantages`].
        scaled: As in [`compute_advantages`]; a user's own function does not see it.
    """
    rewards, members = rewards_R.detach().cpu(), members_R.cpu()
    kinds, groups = (_number([record[name] for record in records]) for name in ("kind", "group"))
    advantages = torch.zeros_like(rewards)
    for role, baseline in baselines.items():
        # Infinite rewards of two functions may add up to NaN. Such a row keeps the advantage 0 and counts nowhere.
        own = torch.tensor([record["role"] == role for record in records]) & ~rewards.isnan()
        columns = rewards[own], members[own], kinds[own], groups[own]
        if is_own(baseline):
            advantages[own] = estimate_advantages(baseline, f"{role}_baseline", *columns)
        else:
            advantages[own] = compute_advantages(*columns, baseline, scaled)
    return advantages.to(rewards_R.device)


def measure_flat_fraction(records: Sequence[Mapping[str, Any]], rewards_R: torch.Tensor) -> float:
    """
    Measures the share of groups in which all attempts have the same reward. There the baseline `"group"` leaves no
    advantage.
    """
    groups: dict[str, list[float]] = {}
    for record, reward in zip(records, rewards_R.tolist(), strict=True):
        if record["role"] == "student":
            groups.setdefault(record["group"], []).append(reward)
    return fmean(max(group) - min(group) < FLAT for group in groups.values())


def average_by_role(records: Sequence[Mapping[str, Any]], rewards_R: torch.Tensor) -> dict[str, float]:
    """
    Computes the mean of `rewards_R`, the weighted sums over all reward functions, of each role's rows; NaN for a role
    without rows.
    """
    rewards = rewards_R.tolist()
    means = {}
    for role in ROLES:
        own = [reward for record, reward in zip(records, rewards, strict=True) if record["role"] == role]
        means[f"reward/{role}"] = fmean(own) if own else float("nan")
    return means


def _number(names: Sequence[str]) -> torch.Tensor:
    """Gives each different name a number, from 0, in the order of first appearance; returns each entry's number."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])


def compute_advantages(
    rewards_R: torch.Tensor,
    members_R: torch.Tensor,
    kinds_R: torch.Tensor,
    groups_R: torch.Tensor,
    baseline: str = "group",
    scaled: bool = True,
) -> torch.Tensor:
    """
    Computes the advantages of the rows of one role.

    Args:
        rewards_R: Reward of each row.
        members_R: Member index of each row.
        kinds_R: Kind of task of each row, as an integer.
        groups_R: Group of each row, as an integer: the attempts of one slot, or the proposals of one match.
        baseline: What is subtracted from a reward. `"group"` is the mean over the row's group (GRPO, arXiv
            2402.03300), the default for students. `"member"` is the mean over the member's rows of one kind, the
            default for teachers, whose prompts all differ. It follows task-relative REINFORCE++ of Absolute Zero
            (arXiv 2505.03335). If a member has only one row of a kind, the mean would be that row's own reward. So the
            mean over the row's group is subtracted instead.
        scaled: Whether advantages are divided by the standard deviation of the rows that the baseline averages. Dr.
            GRPO (arXiv 2503.20783) does not divide.

    Returns:
        Advantages of shape `[R]`, on the device and in the type of the rewards.

    Raises:
        `ValueError`: If `baseline` has another value.
    """
    if baseline not in BASELINES:
        raise ValueError(f"`baseline` must be one of {', '.join(BASELINES)}, got {baseline!r}.")
    # On the CPU and in double precision: a sum on a GPU depends on the order in which rows arrive, and no member's
    # advantage may depend on another's rows, not even in its last bit.
    rewards = rewards_R.detach().to(device="cpu", dtype=torch.float64)
    means, deviations, _ = of_group = _moments(rewards, groups_R.cpu())
    if baseline == "member":
        of_member = _moments(rewards, torch.stack([members_R.cpu(), kinds_R.cpu()], dim=1))
        alone = of_member[2] < 2
        means, deviations, _ = (torch.where(alone, *pair) for pair in zip(of_group, of_member, strict=True))
    advantages = rewards - means
    if scaled:
        advantages = advantages / (deviations + STD_EPSILON)
    return advantages.nan_to_num(nan=0.0).to(device=rewards_R.device, dtype=rewards_R.dtype)


def estimate_advantages(
    path: str,
    option: str,
    rewards_R: torch.Tensor,
    members_R: torch.Tensor,
    kinds_R: torch.Tensor,
    groups_R: torch.Tensor,
) -> torch.Tensor:
    """
    Lets a user's own function compute the advantages of one role's rows, over all ranks.

    The function gets the rewards (double precision), members, kinds and groups of these rows, on the CPU, so that no
    sum depends on the device. If it compares each row only with rows of the same member, joint training stays equal to
    solo training.

    Args:
        path: The function, as `module:function`.
        option: The option that names the function, for errors.
        rewards_R: Reward of each row, on the CPU.
        members_R, kinds_R, groups_R: Member, kind of task and group of each row, as integers, on the CPU.

    Raises:
        `RuntimeError`: If the function raises.
        `ValueError`: If there is no such function, or it does not give one finite number per row.
    """
    given = find_function(path, option)(rewards_R.to(torch.float64), members_R, kinds_R, groups_R)
    if not isinstance(given, torch.Tensor) or given.shape != rewards_R.shape:
        what = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise ValueError(f"`{option}={path}` must give a tensor of shape {tuple(rewards_R.shape)}, got {what}.")
    if not given.isfinite().all():
        raise ValueError(f"`{option}={path}` must give finite advantages, got {given[~given.isfinite()][0].item()}.")
    return given.to(rewards_R)


def _moments(values_R: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """
    Computes for each row the mean, standard deviation and number n of the rows with the same id, each `[R]`. The
    deviation divides by n - 1, and is 0 if n is 1.
    """
    _, numbers_R = torch.unique(ids, dim=0, return_inverse=True)
    counts = _sums(torch.ones_like(values_R), numbers_R)
    means = _sums(values_R, numbers_R) / counts
    squares = _sums((values_R - means[numbers_R]).square(), numbers_R)
    return means[numbers_R], (squares / (counts - 1).clamp(min=1)).sqrt()[numbers_R], counts[numbers_R]


def _sums(values_R: torch.Tensor, numbers_R: torch.Tensor) -> torch.Tensor:
    """Sums the values that have the same number. Returns one sum per number, from 0 on."""
    return values_R.new_zeros(int(numbers_R.max()) + 1 if numbers_R.numel() else 0).index_add(0, numbers_R, values_R)


def compute_member_factors(
    members_R: torch.Tensor, num_tokens_R: torch.Tensor, loss_type: str, rows: int | None = None
) -> torch.Tensor:
    """
    Computes for each row how many times smaller its member's update is in the joint loss than in solo training.

    TRL divides the loss, summed over all rows of an optimizer step, by the number of rows (`grpo`; `dr_grpo` also by a
    constant) or of completion tokens (`dapo`, `cispo`). In solo training TRL would divide by the member's own rows or
    tokens. The factor is the joint divisor over the solo divisor. With `grpo` a member with a third of the rows gets
    3.

    [`~trl_populora.lora.layers.Router.set`] takes the factors with the rows, and the routed layer multiplies the
    member's *gradients* by them. So every term of the loss gets the factor, the KL term (`beta`) too. A factor on the
    advantages would miss the KL term.

    Args:
        members_R: Member index of each row of the generation batch, over all ranks.
        num_tokens_R: Completion tokens of each row that count in the loss.
        loss_type: TRL's `loss_type`.
        rows: The number of rows by which TRL divides; R when `None`. It is above R in a dataset run with empty seats,
            because TRL counts rows for these seats, too. A loss that divides by tokens ignores it.

    Returns:
        Factors of shape `[R]`, fp32, the same for all rows of a member. If the loss divides by tokens, a member
        without tokens gets 1.

    Raises:
        `ValueError`: If this loss type divides by something else than rows or tokens of the whole step.
    """
    if loss_type not in LOSS_NORMALISERS:
        raise ValueError(
            f"`loss_type={loss_type!r}` cannot be made equal to training each member alone. Use one of "
            f"{sorted(LOSS_NORMALISERS)}."
        )
    # What a row adds to the normaliser: 1, or its number of tokens.
    by_rows = LOSS_NORMALISERS[loss_type] == "rows"
    weights_R = (torch.ones_like(num_tokens_R) if by_rows else num_tokens_R).to(torch.float64)
    _, numbers_R = torch.unique(members_R, return_inverse=True)
    own_R = _sums(weights_R, numbers_R)[numbers_R]
    factors_R = (rows if rows and by_rows else weights_R.sum()) / own_R
    return torch.where(own_R > 0, factors_R, torch.ones_like(factors_R)).to(torch.float32)
