"""Reading, writing, resetting and saving one member in a single process; test_backends.py has DDP and ZeRO."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict, load_peft_weights

from tests.adapter_models import make_base, make_population, make_rows, token_logps
from tests.without_extras import without_extras
from trl_populora.lora.members import (
    member_param_groups,
    member_parameters,
    read_member,
    read_saved_step,
    reset_optimizer_state,
    save_member,
    write_member,
)


def test_a_member_read_and_written_elsewhere_computes_the_same():
    model, router, _ = make_population(3)
    factors = read_member(model, "member_2")
    assert {value.dtype for value in factors.values()} == {torch.float32}
    write_member(model, "member_0", factors)
    ids = make_rows(1).repeat(3, 1)
    with router.route_to([0, 1, 2]), torch.no_grad():
        logps = token_logps(model, ids)
    assert torch.equal(logps[0], logps[2])
    assert not torch.allclose(logps[0], logps[1])


def test_what_was_read_is_a_copy():
    model, _, _ = make_population(2)
    factors = read_member(model, "member_0")
    for value in factors.values():
        value.zero_()
    assert all(p.abs().sum() > 0 for p in member_parameters(model, "member_0").values())


def test_keys_are_those_of_stock_peft():
    model, _, names = make_population(2)
    expected = get_peft_model_state_dict(model, adapter_name=names[1])
    factors = read_member(model, names[1])
    assert factors.keys() == expected.keys()
    assert all(torch.equal(factors[key], expected[key]) for key in factors)


def test_a_name_that_begins_like_another_is_not_mixed_up():
    model, _, names = make_population(11)
    before = {name: read_member(model, name) for name in names}
    assert before["member_1"].keys() == before["member_10"].keys()
    write_member(model, "member_1", before["member_5"])
    for name in names:
        source = "member_5" if name == "member_1" else name
        assert all(torch.equal(value, before[source][key]) for key, value in read_member(model, name).items())


def test_a_saved_member_loads_with_stock_peft_and_gives_the_same_log_probabilities(tmp_path):
    model, router, names = make_population(3)
    ids = make_rows(4)
    for index, name in enumerate(names):
        save_member(model, name, tmp_path / name)
        alone = PeftModel.from_pretrained(make_base(), tmp_path / name)
        with router.route_to([index] * len(ids)), torch.no_grad():
            torch.testing.assert_close(token_logps(model, ids), token_logps(alone, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_saved_bytes_do_not_depend_on_the_hash_seed(tmp_path):
    """This process has a random one."""
    program = (
        "import sys; from tests.adapter_models import make_population; "
        "from trl_populora.lora.members import save_member; "
        "save_member(make_population(1)[0], 'member_0', sys.argv[1])"
    )
    variables = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "1")], check=True, env=without_extras(variables))
    save_member(make_population(1)[0], "member_0", tmp_path / "own")
    files = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    assert all((tmp_path / "1" / name).read_bytes() == (tmp_path / "own" / name).read_bytes() for name in files)


def test_equal_members_are_equal_files_and_the_step_stands_beside_them(tmp_path):
    model = make_population(1)[0]
    for step in (6, 7):
        save_member(model, "member_0", tmp_path / str(step), step=step)
        assert read_saved_step(tmp_path / str(step)) == step
    same = [(tmp_path / step / "adapter_model.safetensors").read_bytes() for step in ("6", "7")]
    assert same[0] == same[1]
    loaded = load_peft_weights(str(tmp_path / "6"), device="cpu")
    assert all(torch.equal(value, loaded[key]) for key, value in read_member(model, "member_0").items())


def test_writing_refuses_wrong_keys_and_shapes_and_changes_nothing():
    model, _, _ = make_population(2)
    before = read_member(model, "member_0")
    factors = read_member(model, "member_1")
    key = next(iter(factors))
    with pytest.raises(ValueError, match="missing"):
        write_member(model, "member_0", {k: v for k, v in factors.items() if k != key})
    with pytest.raises(ValueError, match="extra"):
        write_member(model, "member_0", {**factors, "another": torch.zeros(1)})
    with pytest.raises(ValueError, match="must have shape"):
        write_member(model, "member_0", {**factors, key: factors[key][:-1]})
    assert all(torch.equal(value, before[k]) for k, value in read_member(model, "member_0").items())


def test_an_unknown_member_is_named_with_those_that_exist():
    model, _, _ = make_population(2)
    with pytest.raises(KeyError, match=r"no member 'member_9'; the members are \['member_0', 'member_1'\]"):
        read_member(model, "member_9")


class Quantised(torch.Tensor):
    """Moments that cannot be set to zero in place, as torchao's of 8 bits."""

    def zero_(self):
        raise NotImplementedError("zero_")


@pytest.mark.parametrize("kind", [torch.Tensor, Quantised])
def test_a_reset_member_steps_like_a_fresh_one_and_the_others_keep_their_state(kind):
    model, router, names = make_population(2)
    optimizer = torch.optim.AdamW(member_param_groups(model, dict.fromkeys(names, 1e-2)))

    def step(seed: int) -> dict[str, dict[str, torch.Tensor]]:
        before = {name: read_member(model, name) for name in names}
        optimizer.zero_grad()
        router.set([0, 0, 1, 1])
        token_logps(model, make_rows(4, seed=seed)).sum().backward()
        optimizer.step()
        return {
            name: {key: value - before[name][key] for key, value in read_member(model, name).items()} for name in names
        }

    for seed in range(3):
        step(seed)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].as_subclass(kind)
    other = next(iter(member_parameters(model, "member_1").values()))
    kept = {key: value.clone() for key, value in optimizer.state[other].items()}
    reset_optimizer_state(optimizer, model, "member_0")
    assert all(torch.equal(kept[key], value) for key, value in optimizer.state[other].items())
    own = list(member_parameters(model, "member_0").values())
    assert all(value.count_nonzero() == 0 for p in own for value in optimizer.state[p].values())
    # Adam's first update is the learning rate wherever the gradient is not tiny.
    for value in step(7)["member_0"].values():
        assert value.abs().max() == pytest.approx(1e-2, rel=1e-3)


def test_a_reset_before_the_first_step_is_harmless():
    model, _, names = make_population(1)
    reset_optimizer_state(torch.optim.AdamW(member_param_groups(model, dict.fromkeys(names, 1e-2))), model, names[0])
