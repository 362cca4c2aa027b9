"""The routed layer against stock PEFT, one adapter at a time, on the same rows."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel, get_peft_model, set_peft_model_state_dict
from trl.trainer.utils import use_adapter

from tests.adapter_models import (
    gradients,
    make_base,
    make_config,
    make_mixture,
    make_population,
    make_rows,
    token_logps,
)
from trl_populora.lora.layers import RoutedLinear, Router, add_members, routed_layers
from trl_populora.lora.members import member_parameters, read_member, save_member


ROUTES = {
    "equal segments": [0, 0, 1, 1, 2, 2],
    "interleaved": [2, 0, 1, 0, 2, 1],
    "unequal segments": [0, 1, 1, 2, 2, 2],
    "unequal and mixed": [2, 0, 2, 1, 2, 1],
    "some absent": [1, 1, 1, 1, 1, 1],
    "with base rows": [-1, 0, 1, -1, 0, 1],
    "unequal with base rows": [0, -1, 0, 2, -1, -1],
    "base only": [-1] * 6,
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> dict[int, PeftModel]:
    """Stock PEFT models of the members of `make_population(3)`; -1 is the plain base."""
    model, _, names = make_population(3)
    models = {-1: make_base()}
    for index, name in enumerate(names):
        directory = tmp_path_factory.mktemp(name)
        save_member(model, name, directory)
        models[index] = PeftModel.from_pretrained(make_base(), directory, is_trainable=True)
    return models


@pytest.mark.parametrize("rows", ROUTES.values(), ids=ROUTES.keys())
def test_each_row_is_computed_by_its_member(stock, rows):
    model, router, _ = make_population(3)
    ids = make_rows(len(rows))
    with router.route_to(rows), torch.no_grad():
        together = token_logps(model, ids)
    alone = torch.cat([token_logps(stock[member], ids[i : i + 1]) for i, member in enumerate(rows)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    base = torch.cat([token_logps(stock[-1], ids[i : i + 1]) for i in range(len(rows))])
    moved = (together - base).abs().amax(1) > 1e-2
    assert moved.tolist() == [member >= 0 for member in rows], "the members must differ visibly from the base"


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["off", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("rows", [rows for rows in ROUTES.values() if max(rows) >= 0])
def test_gradients_are_those_of_stock_peft_and_zero_for_absent_members(stock, rows, checkpointing):
    model, router, names = make_population(3)
    if checkpointing is not None:
        model.enable_input_require_grads()
        model.base_model.model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    model.train()
    ids = make_rows(len(rows))
    router.set(rows)
    token_logps(model, ids).sum().backward()
    router.clear()
    for index, name in enumerate(names):
        own = [i for i, member in enumerate(rows) if member == index]
        stock[index].zero_grad()
        if own:
            token_logps(stock[index], ids[own]).sum().backward()
        expected = gradients(stock[index], "default")
        for path, gradient in gradients(model, name).items():
            assert gradient is not None, f"{path} took no part in the backward"
            if own:
                reference = expected[path.replace(f".{name}.", ".default.")]
                torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-4 * reference.abs().max().item())
            else:
                assert gradient.count_nonzero() == 0
    assert all(p.grad is None for path, p in model.named_parameters() if "lora_" not in path)


@pytest.mark.parametrize("rows", [[0, 0, 1, 1, 2, 2], [2, 0, 1, 0, 2, 1], [0, 1, 1, 2, 2, 2]])
def test_rows_of_one_member_change_no_other_member_by_a_bit(rows):
    model, router, names = make_population(3)
    ids = make_rows(len(rows))
    other = ids.clone()
    other[[i for i, member in enumerate(rows) if member == 1]] = make_rows(rows.count(1), seed=99)
    seen = []
    for batch in (ids, other):
        model.zero_grad()
        router.set(rows)
        token_logps(model, batch).sum().backward()
        seen.append({name: gradients(model, name) for name in names})
    for name in ("member_0", "member_2"):
        assert all(torch.equal(seen[0][name][path], seen[1][name][path]) for path in seen[0][name])
    assert not all(torch.equal(seen[0]["member_1"][path], seen[1]["member_1"][path]) for path in seen[0]["member_1"])


@pytest.mark.parametrize("rows", [[0, 0, 1, 1], [1, 0, 0, 0], [-1, 1, 0, 1]])
def test_factors_scale_each_members_gradient_and_nothing_else(rows):
    model, router, names = make_population(2)
    ids = make_rows(len(rows))
    factors = {-1: 7.0, 0: 2.0, 1: 0.5}
    seen = []
    for scale in (None, [factors[member] for member in rows]):
        model.zero_grad()
        router.set(rows, scale)
        loss = token_logps(model, ids).sum()
        loss.backward()
        seen.append((loss.detach(), {name: gradients(model, name) for name in names}))
    assert torch.equal(seen[0][0], seen[1][0])
    for index, name in enumerate(names):
        for path, gradient in seen[0][1][name].items():
            torch.testing.assert_close(seen[1][1][name][path], gradient * factors[index], rtol=1e-6, atol=0)


def test_generation_follows_the_route(stock):
    model, router, _ = make_population(3)
    rows, prompts = [2, 0, -1, 1], make_rows(4)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with router.route_to(rows):
        together = model.generate(input_ids=prompts, **options)
    for i, member in enumerate(rows):
        assert torch.equal(together[i], stock[member].generate(input_ids=prompts[i : i + 1], **options)[0])


def test_decoding_stacks_factors_once_a_route_and_reads_what_changed_under_the_next(monkeypatch):
    stacked, stack = [], RoutedLinear._stack
    monkeypatch.setattr(RoutedLinear, "_stack", lambda layer, *which: stacked.append(which) or stack(layer, *which))
    rows, prompts = [2, 0, -1, 1], make_rows(4)

    def generate(model, router):
        with router.route_to(rows):
            return model.generate(input_ids=prompts, max_new_tokens=6, min_new_tokens=6, do_sample=False)

    def turn(model, name):
        with torch.no_grad():
            for parameter in member_parameters(model, name).values():
                parameter.mul_(-2)

    model, router, names = make_population(3)
    before = generate(model, router)
    factors = 2 * len(list(routed_layers(model)))
    assert len(stacked) == 2 * factors, "once for the prompts, once for five tokens"
    turn(model, names[0])
    after = generate(model, router)
    assert not torch.equal(after[1], before[1])
    fresh, router, names = make_population(3)
    turn(fresh, names[0])
    assert torch.equal(after, generate(fresh, router))


def test_a_forward_without_route_is_an_error():
    model, router, _ = make_population(2)
    with pytest.raises(RuntimeError, match="No route is set"):
        model(input_ids=make_rows(2))
    with router.route_to([0, 1]):
        model(input_ids=make_rows(2))
    with pytest.raises(RuntimeError, match="No route is set"):
        model(input_ids=make_rows(2))


def test_a_route_that_does_not_fit_is_an_error():
    model, router, _ = make_population(2)
    with router.route_to([0, 1]), pytest.raises(ValueError, match="The route has 2 rows, the batch has 3"):
        model(input_ids=make_rows(3))
    with router.route_to([0, 2]), pytest.raises(ValueError, match="names member 2, there are 2 members"):
        model(input_ids=make_rows(2))
    with pytest.raises(ValueError, match=r"-1 for the base model, got -2"):
        router.set([0, -2])
    with pytest.raises(ValueError, match="one factor"):
        router.set([0, 0], [1.0, 2.0])
    with pytest.raises(ValueError, match="one value per row"):
        router.set([0, 0], [1.0])
    router.set([0, 1])
    with pytest.raises(ValueError, match="`adapter_names` is not used"):
        model.eval()(input_ids=make_rows(2), adapter_names=["member_0", "member_1"])


def test_rows_of_puts_the_previous_route_back_even_after_an_error():
    router = Router()
    router.set([1, 0])
    with pytest.raises(KeyError), router.route_to([0]):
        raise KeyError
    assert router.members == (1, 0)
    router.clear()
    assert router.members is None


def test_members_start_from_one_initialisation_and_leave_the_global_generator_alone():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    base, names = make_base(), ["a_0", "a_1", "a_2"]
    torch.set_rng_state(before)
    model = add_members(base, names, make_config(), Router(), seed=5)
    assert torch.equal(before, torch.get_rng_state())
    other = add_members(make_base(), names, make_config(), Router(), seed=6)
    for path, layer in routed_layers(model).items():
        first = layer.lora_A["a_0"].weight
        assert all(torch.equal(first, layer.lora_A[name].weight) for name in names)
        assert all(layer.lora_B[name].weight.count_nonzero() == 0 for name in names)
        assert not torch.equal(first, routed_layers(other)[path].lora_A["a_0"].weight)
    weights = [layer.lora_A["a_0"].weight for layer in routed_layers(model).values()]
    assert not torch.equal(weights[0], weights[1]), "layers of one shape must not share their initialisation"


def test_all_members_stay_trainable_whatever_peft_switches():
    model, _, names = make_population(2)
    model.set_adapter("member_1")
    with use_adapter(model, None):
        pass
    trainable = {path for path, p in model.named_parameters() if p.requires_grad}
    assert trainable == {path for path, _ in model.named_parameters() if "lora_" in path}
    assert all(any(f".{name}." in path for path in trainable) for name in names)


def test_disabled_adapters_give_the_base_without_a_route(stock):
    model, _, _ = make_population(3)
    ids = make_rows(4)
    with torch.no_grad(), use_adapter(model, None):
        torch.testing.assert_close(token_logps(model, ids), token_logps(stock[-1], ids))


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 32}},
        {"layers_to_transform": [1]},
    ],
    ids=["rslora", "patterns", "one layer"],
)
def test_supported_options_match_stock_peft(tmp_path, options):
    targets = ["q_proj", "down_proj"]
    model, router, names = make_population(2, target_modules=targets, **options)
    ids = make_rows(4)
    with router.route_to([0, 0, 1, 1]), torch.no_grad():
        together = token_logps(model, ids)
    for index, name in enumerate(names):
        save_member(model, name, tmp_path / name)
        alone = PeftModel.from_pretrained(make_base(), tmp_path / name)
        rows = slice(2 * index, 2 * index + 2)
        torch.testing.assert_close(together[rows], token_logps(alone, ids[rows]).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [rows for rows in ROUTES.values() if max(rows) >= 0])
def test_a_shared_expert_which_gets_the_tokens_of_all_rows_at_once_is_routed(rows):
    """Log-probabilities and gradients of a real qwen2_moe are those of stock PEFT on each row alone."""
    model, router, names = make_population(3, base=make_mixture())
    assert any("shared_expert." in path for path in routed_layers(model))
    assert any("shared_expert_gate" in path for path in routed_layers(model))
    ids = make_rows(len(rows))
    router.set(rows)
    together = token_logps(model, ids)
    together.sum().backward()
    for index in sorted(set(rows)):
        own = [i for i, member in enumerate(rows) if member == index]
        alone = get_peft_model(make_mixture(), make_config())
        if index >= 0:
            set_peft_model_state_dict(alone, read_member(model, names[index]))
        wanted = torch.cat([token_logps(alone, ids[i : i + 1]) for i in own])
        torch.testing.assert_close(together[own], wanted, rtol=1e-5, atol=1e-5)
        wanted.sum().backward()
        expected = gradients(alone, "default")
        for path, found in gradients(model, names[index]).items() if index >= 0 else ():
            other = expected[path.replace(names[index], "default")]
            torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_base_keeps_members_in_fp32_and_matches_stock_peft(tmp_path, autocast):
    model, router, names = make_population(2, dtype=torch.bfloat16)
    ids = make_rows(4)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        router.set([0, 0, 1, 1])
        together = token_logps(model, ids)
        together.sum().backward()
        for index, name in enumerate(names):
            save_member(model, name, tmp_path / name)
            alone = PeftModel.from_pretrained(make_base(torch.bfloat16), tmp_path / name)
            rows = slice(2 * index, 2 * index + 2)
            # bf16 keeps 8 bits; the two ways of adding up differ in the last of them.
            torch.testing.assert_close(together[rows], token_logps(alone, ids[rows]), rtol=0.05, atol=0.3)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients(model, names[0]).values())


@pytest.mark.parametrize("rows", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 1]], ids=["equal", "mixed", "unequal"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_inputs_are_not_copied_and_gradients_are_the_same_bits(monkeypatch, dtype, checkpointing, rows):
    model, router, names = make_population(2, dtype=dtype)
    if checkpointing:
        model.enable_input_require_grads()
        model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()

    def train(copied: bool) -> tuple[torch.Tensor, dict, int]:
        """Log-probs, gradients, and the bytes that layers keep; `copied`: members are given their inputs in fp32."""
        saved: dict[tuple, int] = {}

        def keep(tensor):
            saved[tensor.data_ptr(), tensor.dtype] = tensor.nbytes
            return tensor

        if copied:
            low_rank = RoutedLinear._compute_low_rank
            monkeypatch.setattr(
                RoutedLinear, "_compute_low_rank", lambda layer, x, route: low_rank(layer, x.float(), route)
            )
        model.zero_grad()
        router.set(rows)
        with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
            found = token_logps(model, make_rows(len(rows)))
        found.sum().backward()
        router.clear()
        return found.detach(), {name: gradients(model, name) for name in names}, sum(saved.values())

    (plain, own, kept), (other, expected, more) = train(False), train(True)
    assert torch.equal(plain, other)
    for name in names:
        for path, gradient in own[name].items():
            assert torch.equal(gradient, expected[name][path])
    if dtype == torch.bfloat16 and rows == sorted(rows) and not checkpointing:  # else rows are copied into order
        assert kept < 0.95 * more


def test_checkpointing_recomputes_under_the_route_so_clearing_it_early_is_an_error():
    model, router, _ = make_population(2)
    model.enable_input_require_grads()
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    router.set([0, 1])
    loss = token_logps(model, make_rows(2)).sum()
    router.clear()
    with pytest.raises(RuntimeError, match="No route is set"):
        loss.backward()
