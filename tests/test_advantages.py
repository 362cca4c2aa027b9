"""Baselines, scales and factors on hand-written rows; test_solo_parity.py holds them against stock TRL."""

from __future__ import annotations

import math

import pytest
import torch

from trl_populora.step.advantages import (
    LOSS_NORMALISERS,
    STD_EPSILON,
    compute_advantages,
    compute_member_factors,
    compute_step_advantages,
)


NAN = math.nan
# Two members with two kinds each, groups of two attempts.
MEMBERS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
KINDS = torch.tensor([0, 0, 1, 1, 0, 0, 0, 0])
GROUPS = torch.tensor([3, 3, 5, 5, 9, 9, 1, 1])
REWARDS = torch.tensor([1.0, 0.0, 2.0, 4.0, 1.0, 2.0, 3.0, 6.0])


def test_group_baseline_is_the_mean_over_attempts_at_one_prompt():
    advantages = compute_advantages(REWARDS, MEMBERS, KINDS, GROUPS, "group", False)
    assert advantages.tolist() == [0.5, -0.5, -1, 1, -0.5, 0.5, -1.5, 1.5]


def test_member_baseline_is_the_mean_over_a_members_rows_of_one_kind():
    advantages = compute_advantages(REWARDS, MEMBERS, KINDS, GROUPS, "member", False)
    assert advantages.tolist() == [0.5, -0.5, -1, 1, -2, -1, 0, 3]


def test_the_scale_of_groups_is_trls():
    advantages = compute_advantages(REWARDS, MEMBERS, KINDS, GROUPS, "group", True)
    centred = compute_advantages(REWARDS, MEMBERS, KINDS, GROUPS, "group", False)
    std = REWARDS.view(-1, 2).std(1).repeat_interleave(2)  # torch divides by n - 1, as TRL does
    torch.testing.assert_close(advantages, centred / (std + STD_EPSILON))


def test_the_scale_of_members_is_the_deviation_over_a_members_rows_of_one_kind():
    advantages = compute_advantages(REWARDS, MEMBERS, KINDS, GROUPS, "member", True)
    centred = compute_advantages(REWARDS, MEMBERS, KINDS, GROUPS, "member", False)
    std = torch.cat([REWARDS[:2].std().expand(2), REWARDS[2:4].std().expand(2), REWARDS[4:].std().expand(4)])
    torch.testing.assert_close(advantages, centred / (std + STD_EPSILON))


@pytest.mark.parametrize("baselines", [("group", "member"), ("member", "group")])
def test_the_rows_of_a_role_are_not_compared_with_those_of_the_other(baselines):
    """Also where one member plays both roles; a role may have no rows."""
    roles, (teachers, students) = ["teacher", "student"] * 4, baselines
    records = [
        {"role": role, "kind": str(kind), "group": f"{role} {group}"}
        for role, kind, group in zip(roles, KINDS.tolist(), GROUPS.tolist(), strict=True)
    ]
    given = {"teacher": teachers, "student": students}
    members = torch.zeros_like(MEMBERS)
    found = compute_step_advantages(records, REWARDS, members, given, True)
    for role, baseline in given.items():
        own = torch.tensor([each == role for each in roles])
        alone = compute_advantages(REWARDS[own], members[own], KINDS[own], GROUPS[own], baseline, True)
        assert torch.equal(found[own], alone)
        gap = torch.where(own.cumsum(0) == 1, torch.where(own, NAN, REWARDS), REWARDS)
        without = compute_step_advantages(records, gap, members, given, True)
        rest = own & ~gap.isnan()
        columns = REWARDS[rest], members[rest], KINDS[rest], GROUPS[rest]
        assert torch.equal(without[rest], compute_advantages(*columns, baseline, True))
        assert (without[gap.isnan()] == 0).all(), "a row without a reward"
        kept = [record for record in records if record["role"] == role]
        assert torch.equal(compute_step_advantages(kept, REWARDS[own], members[own], given, True), alone)


@pytest.mark.parametrize("baseline", ["group", "member"])
@pytest.mark.parametrize("scaled", [True, False])
def test_no_member_depends_on_another_by_a_bit(baseline, scaled):
    other = REWARDS.clone()
    other[:4] = torch.tensor([0.1, 1e6, NAN, -3.0])
    rows = compute_advantages(REWARDS, MEMBERS, KINDS, GROUPS, baseline, scaled)[4:]
    assert torch.equal(rows, compute_advantages(other, MEMBERS, KINDS, GROUPS, baseline, scaled)[4:])


def test_the_order_of_rows_does_not_matter():
    """Groups may lie on several ranks, so their rows are not next to each other."""
    order = torch.tensor([4, 0, 7, 2, 1, 6, 3, 5])
    columns = (REWARDS, MEMBERS, KINDS, GROUPS)
    shuffled = compute_advantages(*(column[order] for column in columns))
    assert torch.equal(shuffled, compute_advantages(*columns)[order])


@pytest.mark.parametrize("scaled", [True, False])
def test_equal_rewards_and_single_rows_give_zero(scaled):
    ones = torch.ones(8)
    assert not compute_advantages(ones, MEMBERS, KINDS, GROUPS, "group", scaled).any()
    assert not compute_advantages(REWARDS, MEMBERS, KINDS, torch.arange(8), "group", scaled).any()
    empty = torch.zeros(0, dtype=torch.long)
    assert compute_advantages(torch.zeros(0), empty, empty, empty, "group", scaled).shape == (0,)


@pytest.mark.parametrize("scaled", [True, False])
def test_a_members_only_row_of_a_kind_is_compared_with_its_match(scaled):
    """Member 0 proposes each of three kinds once, member 1 two kinds once and one twice."""
    members, groups = torch.tensor([0, 0, 0, 1, 1, 1, 1]), torch.tensor([5, 5, 5, 6, 6, 6, 6])
    kinds, rewards = torch.tensor([0, 1, 2, 0, 1, 2, 2]), torch.tensor([0.0, 0.5, 1.0, 1.0, 1.0, 3.0, 1.0])
    advantages = compute_advantages(rewards, members, kinds, groups, "member", scaled)
    centred = torch.tensor([-0.5, 0.0, 0.5, -0.5, -0.5, 1.0, -1.0])
    stds = [rewards[:3].std(), rewards[3:].std(), rewards[5:].std()]
    divisor = torch.stack([stds[i] for i in (0, 0, 0, 1, 1, 2, 2)]) + STD_EPSILON
    torch.testing.assert_close(advantages, centred / (divisor if scaled else 1))


def test_an_unknown_baseline_is_named():
    columns = (REWARDS, MEMBERS, KINDS, GROUPS)
    with pytest.raises(ValueError, match="`baseline` must be one of group, member, got 'batch'"):
        compute_advantages(*columns, baseline="batch")


@pytest.mark.parametrize("loss_type", LOSS_NORMALISERS)
def test_factors_turn_the_joint_mean_into_each_members_own(loss_type):
    members = torch.tensor([0, 1, 1, 1, 2, 2])
    tokens = torch.tensor([5, 2, 3, 0, 10, 4])
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    weights = tokens.float() if LOSS_NORMALISERS[loss_type] == "tokens" else torch.ones(6)
    factors = compute_member_factors(members, tokens, loss_type)
    for member in range(3):
        own = members == member
        joint = (factors * losses * weights / weights.sum())[own].sum()
        torch.testing.assert_close(joint, (losses * weights)[own].sum() / weights[own].sum())
        assert len(factors[own].unique()) == 1


def test_a_member_without_tokens_gets_factor_one():
    factors = compute_member_factors(torch.tensor([0, 1]), torch.tensor([0, 4]), "dapo")
    assert factors.tolist() == [1.0, 1.0]


def test_a_loss_type_that_couples_members_is_refused():
    with pytest.raises(
        ValueError, match=r"`loss_type='bnpo'` cannot be made equal.*'cispo', 'dapo', 'dr_grpo', 'grpo'"
    ):
        compute_member_factors(torch.tensor([0]), torch.tensor([1]), "bnpo")
