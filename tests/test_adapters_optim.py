"""Each member's own parameter group, gradient norm and right to stand still."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.adapter_models import gradients, make_population, make_rows, token_logps
from trl_populora.lora.members import (
    BROKEN_STEPS,
    MemberClipper,
    clip_member_grad_norms,
    member_param_groups,
    member_parameters,
    read_member,
    set_learning_rate,
    step_in_spite_of_overflow,
    withhold_gradients,
)


def backward(model, router, rows, seed=5) -> None:
    model.zero_grad()
    router.set(rows)
    token_logps(model, make_rows(len(rows), seed=seed)).sum().backward()


def test_one_group_per_member_holds_all_of_it_once():
    model, _, names = make_population(3)
    groups = member_param_groups(model, dict.fromkeys(names, 2.0), weight_decay=0.5)
    described = [(group["member"], group["lr"], group["weight_decay"]) for group in groups]
    assert described == [("member_0", 2.0, 0.5), ("member_1", 2.0, 0.5), ("member_2", 2.0, 0.5)]
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)


def test_a_new_rate_has_the_share_to_which_a_plateau_has_lowered_the_others():
    model, _, names = make_population(2)
    optimizer = torch.optim.AdamW(member_param_groups(model, dict.fromkeys(names, 1e-2)))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for metric in (1.0, 2.0, 3.0):
        schedule.step(metric)
    for _ in range(2):  # also the second time
        set_learning_rate(optimizer, schedule, "member_1", 5e-3)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-4, 5e-5])


@pytest.mark.parametrize("max_norm", [-1.0, 0.0, 0.1, 1e6])
def test_each_member_is_clipped_by_its_own_norm_as_torch_would(max_norm):
    model, router, names = make_population(3)
    backward(model, router, [0, 1, 1, 2, 2, 2])
    expected, norms = {}, {}
    for name in names:
        parameters = [torch.nn.Parameter(p.detach().clone()) for p in member_parameters(model, name).values()]
        for copy, p in zip(parameters, member_parameters(model, name).values(), strict=True):
            copy.grad = p.grad.clone()
        norms[name] = torch.nn.utils.clip_grad_norm_(parameters, max_norm if max_norm > 0 else float("inf")).item()
        expected[name] = [copy.grad for copy in parameters]
    assert clip_member_grad_norms(model, names, max_norm) == pytest.approx(norms, rel=1e-6)
    for name in names:
        for reference, p in zip(expected[name], member_parameters(model, name).values(), strict=True):
            torch.testing.assert_close(p.grad, reference, rtol=1e-6, atol=0)


def test_the_norm_of_half_precision_gradients_may_be_larger_than_their_type_can_hold():
    """ZeRO's loss scale makes them large; no element of them is too large."""
    model, _, names = make_population(2)
    for name in names:
        for parameter in member_parameters(model, name).values():
            parameter.data = parameter.data.half()
            parameter.grad = torch.full_like(parameter, 3e4)
    count = sum(parameter.numel() for parameter in member_parameters(model, names[0]).values())
    assert clip_member_grad_norms(model, names, 1.0)[names[0]] == pytest.approx(3e4 * count**0.5, rel=1e-3)


def test_a_withheld_member_keeps_weights_moments_and_step_while_others_move():
    model, router, names = make_population(3)
    optimizer = torch.optim.AdamW(member_param_groups(model, dict.fromkeys(names, 1e-2)))
    backward(model, router, [0, 0, 1, 1, 2, 2])
    optimizer.step()
    before = {name: read_member(model, name) for name in names}
    idle = list(member_parameters(model, "member_1").values())
    state = [{key: value.clone() for key, value in optimizer.state[p].items()} for p in idle]

    backward(model, router, [0, 0, 2, 2])
    assert all(g.count_nonzero() == 0 for g in gradients(model, "member_1").values())
    assert clip_member_grad_norms(model, names, 1.0)["member_1"] == 0.0
    withhold_gradients(model, ["member_1"])
    assert clip_member_grad_norms(model, names, 1.0)["member_1"] == 0.0
    optimizer.step()

    for name in names:
        same = [torch.equal(value, before[name][key]) for key, value in read_member(model, name).items()]
        assert all(same) if name == "member_1" else not any(same)
    for p, kept in zip(idle, state, strict=True):
        assert all(torch.equal(kept[key], value) for key, value in optimizer.state[p].items())


def test_without_withholding_momentum_would_move_an_idle_member():
    """The reason `withhold_gradients` exists: zero gradients are not no gradients to Adam."""
    model, router, names = make_population(2)
    optimizer = torch.optim.AdamW(member_param_groups(model, dict.fromkeys(names, 1e-2), weight_decay=0.0))
    backward(model, router, [0, 1])
    optimizer.step()
    before = read_member(model, "member_1")
    backward(model, router, [0, 0])
    optimizer.step()
    assert not any(torch.equal(value, before[key]) for key, value in read_member(model, "member_1").items())


def break_gradients(model, name: str, value: float) -> None:
    """One element of one gradient is enough."""
    next(iter(member_parameters(model, name).values())).grad[0, 0] = value


@pytest.mark.parametrize("max_norm", [0.0, 0.1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_gradients_of_a_member_whose_norm_is_not_finite_become_zero_and_the_others_are_as_without(value, max_norm):
    model, router, names = make_population(3)
    backward(model, router, [0, 1, 1, 2, 2, 2])
    norms = clip_member_grad_norms(model, names, max_norm)
    expected = {name: gradients(model, name) for name in names}
    expected = {name: {path: g.clone() for path, g in found.items()} for name, found in expected.items()}
    backward(model, router, [0, 1, 1, 2, 2, 2])
    break_gradients(model, "member_1", value)
    found = clip_member_grad_norms(model, names, max_norm)
    assert str(found.pop("member_1")) == str(value)
    assert found == {name: norms[name] for name in found}
    for name in names:
        for path, gradient in gradients(model, name).items():
            assert torch.equal(gradient, torch.zeros_like(gradient) if name == "member_1" else expected[name][path])


def test_a_member_whose_gradients_stay_broken_is_named_and_the_run_ends_when_nobody_can_learn(caplog):
    model, router, names = make_population(3)
    clipper = MemberClipper(names, 1.0)

    def step(broken: Sequence[str] = (), rows=(0, 1, 2), still: Sequence[str] = ()) -> None:
        backward(model, router, list(rows))
        for name in broken:
            break_gradients(model, name, float("nan"))
        clipper.clip(model, busy=names, still=still)

    one = ["member_1"]
    for broken in [one] * (BROKEN_STEPS - 1) + [[]] + [one] * (BROKEN_STEPS - 1):
        step(broken)
    assert len(caplog.messages) == 2 * (BROKEN_STEPS - 1)
    assert all(line.startswith("The gradient norm of member_1 is nan. Its gradients are") for line in caplog.messages)
    assert not any("no longer learns" in line for line in caplog.messages)
    step(rows=(0, 2))  # it has no rows, which is no proof that it is well
    caplog.clear()
    for _ in range(3 * BROKEN_STEPS):  # the others go on, and are told once more
        step(one)
    (told,) = caplog.messages
    assert f"in {BROKEN_STEPS} steps in a row: member_1 no longer learns" in told
    for _ in range(BROKEN_STEPS - 1):
        step(names)
    model.zero_grad()
    clipper.clip(model, busy=[])  # nobody has rows
    with pytest.raises(RuntimeError, match="In 10 steps in a row no member could learn: .* of member_0, member_1, "):
        step(names)
    step()
    others = ["member_0", "member_2"]
    for _ in range(BROKEN_STEPS - 1):
        step(one, still=others)
    with pytest.raises(RuntimeError, match="no member could learn: the gradient norm of member_1 was not finite"):
        step(one, still=others)


def test_a_loss_scale_is_lowered_for_a_member_that_is_new_to_overflow_alone():
    clipper = MemberClipper(["member_0", "member_1"], 1.0)
    norms = {"member_0": 1.0, "member_1": float("inf")}
    assert not clipper.is_scale_in_doubt({"member_0": 1.0, "member_1": 0.0})
    for _ in range(BROKEN_STEPS):
        assert clipper.is_scale_in_doubt(norms)
        clipper._watch(norms)
    assert not clipper.is_scale_in_doubt(norms)
    assert clipper.is_scale_in_doubt(dict.fromkeys(norms, float("inf")))


def test_a_rank_that_is_not_to_warn_does_not(caplog):
    model, router, names = make_population(2)
    backward(model, router, [0, 1])
    break_gradients(model, "member_1", float("nan"))
    MemberClipper(names, 1.0, warns=False).clip(model, busy=names)
    assert not caplog.messages


@pytest.mark.parametrize(("lower", "scale"), [(True, 512), (False, 1024)])
def test_a_grad_scaler_steps_the_others_and_lowers_its_scale(lower, scale):
    """As with `fp16=True` on a GPU; accelerate makes no scaler on a CPU, torch does."""
    model, router, names = make_population(3)
    optimizer = torch.optim.AdamW(member_param_groups(model, dict.fromkeys(names, 1e-2)))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    router.set([0, 1, 2])
    scaler.scale(token_logps(model, make_rows(3)).sum()).backward()
    break_gradients(model, "member_1", float("inf"))
    before = {name: read_member(model, name) for name in names}
    scaler.unscale_(optimizer)
    clip_member_grad_norms(model, names, 1.0)
    step_in_spite_of_overflow(scaler, optimizer, lower)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == scale
    for name in names:
        # Weight decay moves a member without gradients by less than a thousandth.
        moved = [(value - before[name][key]).norm() / value.norm() for key, value in read_member(model, name).items()]
        assert max(moved) < 1e-3 if name == "member_1" else min(moved) > 1e-3
