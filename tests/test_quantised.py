"""Members on a base in 4 or 8 bits (QLoRA): bitsandbytes' own layers, on its CPU build."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.adapter_models import gradients, make_base, make_population, make_rows, token_logps
from tests.populora_run import assert_equal, cut_run, make_trainer, state_of
from tests.small_run import small_trainer
from trl_populora.evaluate.cross_play import assemble
from trl_populora.hub.push import push_run
from trl_populora.lora.layers import Router, add_members
from trl_populora.lora.members import save_member
from trl_populora.start import check_quantised


pytest.importorskip("bitsandbytes", reason="needs the `quantization` extra")

KINDS = {
    "4 bit, nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "4 bit, fp4, nested": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "8 bit": {"load_in_8bit": True},
}
NF4 = KINDS["4 bit, nf4"]
# As a recipe has it.
SETTINGS = {"model_init_kwargs": {"quantization_config": NF4 | {"quant_method": "bitsandbytes"}}}


@pytest.fixture(scope="module")
def saved_base(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("unquantised")
    make_base().save_pretrained(path)
    return str(path)


def quantised(path: str, **options):
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=BitsAndBytesConfig(**options))


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_gradients_are_those_of_stock_peft_on_the_same_base_also_after_generating(saved_base, tmp_path, options):
    model, router, names = make_population(3, base=quantised(saved_base, **options))
    rows = [2, 0, 2, 1, 2, 1]
    ids = make_rows(len(rows))
    model.eval()
    with router.route_to(rows):
        model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)  # 4-bit layers may pack their weights here
    model.train()
    router.set(rows)
    token_logps(model, ids).sum().backward()
    router.clear()
    for index, name in enumerate(names):
        save_member(model, name, tmp_path / name)
        stock = PeftModel.from_pretrained(quantised(saved_base, **options), tmp_path / name, is_trainable=True)
        stock.train()
        token_logps(stock, ids[[i for i, member in enumerate(rows) if member == index]]).sum().backward()
        expected = gradients(stock, "default")
        for path, gradient in gradients(model, name).items():
            reference = expected[path.replace(f".{name}.", ".default.")]
            assert (gradient - reference).norm() <= 1e-5 * reference.norm(), path
            assert reference.norm() > 0


def test_a_quantised_output_head_is_refused(saved_base):
    base = quantised(saved_base, **NF4, llm_int8_skip_modules=["none"])
    with pytest.raises(ValueError, match="output head is quantised.*`llm_int8_skip_modules` unset"):
        add_members(base, ["a_0"], make_population(1)[0].peft_config["member_0"], Router(), seed=0)


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """A run of two steps on the base in 4 bits, saved."""
    output = str(tmp_path_factory.mktemp("run"))
    trainer = make_trainer(base, output, SETTINGS | {"max_steps": 2, "save_strategy": "no"})
    trainer.train()
    trainer.save_model()
    return trainer


def test_members_of_a_quantised_base_are_kept_in_fp32(trained):
    adapters = [p for p in trained.model.parameters() if p.requires_grad]
    assert {p.dtype for p in adapters} == {torch.float32}
    assert {p.dtype for name, p in trained.model.named_parameters() if "q_proj.base_layer" in name} == {torch.uint8}


def test_a_pushed_member_says_the_same_in_stock_peft_on_the_quantised_base(hub, trained, base):
    push_run(trained.args.output_dir, "me/quantised")
    assert "BitsAndBytesConfig(load_in_4bit=True, ...)" in hub.repos["me/quantised"]["README.md"].decode()
    ids = make_rows(3)
    trained.model.eval()
    for name in trained.population.names:
        stock = PeftModel.from_pretrained(quantised(base, **NF4), "me/quantised", subfolder=f"members/{name}")
        # In eval mode bitsandbytes would pack these weights anew and compute in bf16, on CPUs that can.
        stock.train()
        with trained.member(name), torch.no_grad():
            torch.testing.assert_close(token_logps(trained.model, ids), token_logps(stock, ids), rtol=1e-5, atol=1e-5)


def test_cross_play_is_on_the_base_as_it_was_quantised(trained):
    with assemble([trained.args.output_dir], task_kinds=["code_o"], sandbox_allow_weak=True) as contest:
        assert contest.model.get_base_model().is_loaded_in_4bit


def test_a_cut_run_on_a_quantised_base_equals_a_straight_one(base, tmp_path):
    settings = SETTINGS | {"max_steps": 4, "evolve_every": 1}
    straight = make_trainer(base, str(tmp_path / "straight"), settings | {"save_strategy": "no"})
    straight.train()
    assert_equal(state_of(straight), state_of(cut_run(base, str(tmp_path / "cut"), settings, cut=2)))


def test_a_run_does_not_resume_on_another_rounding_of_its_base(base, tmp_path):
    settings = {"output_dir": str(tmp_path), "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    small_trainer(base, quantization_config=BitsAndBytesConfig(**NF4), **settings).train()
    with pytest.raises(ValueError, match="field `base_quantization` is {.*'nf4'.*}, this trainer has None"):
        small_trainer(base, **settings | {"max_steps": 2}).train(resume_from_checkpoint=True)


def test_a_quantisation_that_comes_twice_or_too_late_is_refused(base, saved_base, tmp_path):
    config = BitsAndBytesConfig(**NF4)
    with pytest.raises(ValueError, match="`quantization_config` is given twice"):
        small_trainer(base, quantization_config=config, output_dir=str(tmp_path), **SETTINGS)
    with pytest.raises(ValueError, match="too late for a loaded model"):
        small_trainer(make_base(), quantization_config=config, output_dir=str(tmp_path))


def test_vllm_beside_a_quantised_base_needs_weights_for_its_samples(make_args):
    check_quantised(make_args(use_vllm=True))
    with pytest.raises(ValueError, match="`vllm_importance_sampling_correction=False`.*Leave the option at True"):
        check_quantised(make_args(use_vllm=True, vllm_importance_sampling_correction=False))


def test_fsdp_beside_a_quantised_base_is_refused(make_args, monkeypatch):
    check_quantised(make_args())
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(ValueError, match="not supported with FSDP.*Use DDP"):
        check_quantised(make_args())
