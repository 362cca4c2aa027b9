"""What is refused at construction, and whether the message says what was wrong."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2LMHeadModel,
    GptOssForCausalLM,
    GPTQConfig,
    GraniteMoeForCausalLM,
    MixtralForCausalLM,
    OlmoeForCausalLM,
    PhimoeForCausalLM,
    Qwen2ForCausalLM,
    Qwen3MoeForCausalLM,
)

from tests.adapter_models import make_base, make_config
from tests.models import random_model
from trl_populora.lora.checks import check_is_base
from trl_populora.lora.layers import Router, add_members, routed_layers


NAMES = ["teacher_0", "student_0"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "`use_dora=True` is not supported"),
        ({"bias": "lora_only"}, "`bias='lora_only'` is not supported"),
        ({"lora_bias": True}, "`lora_bias=True` is not supported"),
        ({"lora_dropout": 0.1}, r"`lora_dropout=0.1` is not supported.*Leave it at 0.0"),
        ({"modules_to_save": ["lm_head"]}, "`modules_to_save=.'lm_head'.` is not supported"),
        ({"init_lora_weights": False}, "`init_lora_weights=False` is not supported"),
        ({"init_lora_weights": "pissa"}, "`init_lora_weights='pissa'` is not supported"),
        ({"trainable_token_indices": [3]}, "`trainable_token_indices=.3.` is not supported"),
        ({"task_type": "SEQ_CLS"}, "`task_type` must be 'CAUSAL_LM' or unset"),
        ({"target_modules": ["q_proj", "k_porj"]}, "names 'k_porj', .* are down_proj, .*q_proj, up_proj, v_proj"),
        ({"target_modules": "q_proj"}, "names 'q_proj', which the base has not"),
        ({"target_modules": ["q_proj", "lm_head"]}, "names the output head 'lm_head'"),
        ({"target_modules": ".*(q_proj|lm_head)"}, "names the output head 'lm_head'"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "'model.embed_tokens' of type `Embedding`"),
    ],
)
def test_options_that_cannot_be_routed_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        add_members(make_base(), NAMES, make_config(**options), Router(), seed=0)


def test_another_peft_method_is_refused():
    with pytest.raises(TypeError, match=r"needs a `peft.LoraConfig`, got `IA3Config`"):
        add_members(make_base(), NAMES, IA3Config(), Router(), seed=0)


def own_members():
    return add_members(make_base(), NAMES, make_config(), Router(), seed=0)


def with_stock_adapter():
    return get_peft_model(make_base(), make_config())


def after_add_adapter():
    base = make_base()
    base.add_adapter(make_config(target_modules=["q_proj"]), adapter_name="mine")
    return base


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (own_members, r"\['student_0', 'teacher_0'\]"),
        (with_stock_adapter, r"\['default'\]"),
        (after_add_adapter, r"\['mine'\]"),
    ],
)
def test_a_base_that_carries_adapters_is_refused(make, names):
    with pytest.raises(ValueError, match=rf"already has the adapters {names}.*alone.*`warm_start`"):
        add_members(make(), ["a_0"], make_config(), Router(), seed=0)


def test_a_base_loaded_from_the_directory_of_an_adapter_is_refused(tmp_path):
    make_base().save_pretrained(tmp_path / "base")
    adapted = get_peft_model(Qwen2ForCausalLM.from_pretrained(tmp_path / "base"), make_config())
    adapted.save_pretrained(tmp_path / "adapter")
    base, adapter = str(tmp_path / "base"), str(tmp_path / "adapter")
    with pytest.raises(ValueError, match=f"`model='{adapter}'` is an adapter.* '{base}', .*`warm_start='{adapter}'`"):
        check_is_base(adapter)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="already has the adapters"):
        check_is_base(loaded)
    check_is_base(str(tmp_path / "base"))
    check_is_base(adapted.merge_and_unload())


def test_a_base_that_is_quantised_otherwise_than_by_bitsandbytes_is_refused():
    base = make_base()
    base.hf_quantizer = SimpleNamespace(quantization_config=GPTQConfig(bits=4))  # where transformers leaves it
    with pytest.raises(ValueError, match=r"quantised by 'gptq', whose layers are not routed.*load_in_4bit"):
        add_members(base, NAMES, make_config(), Router(), seed=0)


def test_the_callers_configuration_is_not_changed():
    config = LoraConfig(r=4, target_modules="all-linear")
    add_members(make_base(), NAMES, config, Router(), seed=0)
    assert config.target_modules == "all-linear"
    assert config._custom_modules is None
    assert config.task_type is None


def test_all_linear_leaves_the_output_head_alone():
    model = add_members(make_base(), NAMES, make_config(), Router(), seed=0)
    assert type(model.get_output_embeddings()) is nn.Linear


EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 16, "intermediate_size": 32}


@pytest.mark.parametrize(
    ("architecture", "sizes", "types"),
    [
        (GPT2LMHeadModel, {"n_embd": 16, "n_positions": 16}, "Conv1D"),
        (MixtralForCausalLM, EXPERTS, "MixtralExperts, MixtralTopKRouter"),
        (OlmoeForCausalLM, EXPERTS, "OlmoeExperts, OlmoeTopKRouter"),
        (Qwen3MoeForCausalLM, EXPERTS, "Qwen3MoeExperts, Qwen3MoeTopKRouter"),
    ],
)
def test_a_base_whose_layers_peft_would_adapt_without_routes_is_refused(architecture, sizes, types):
    base = random_model(architecture, vocab_size=32, **sizes)
    with pytest.raises(ValueError, match=f"target layers of type `{types}`; only `nn.Linear` layers are routed"):
        add_members(base, NAMES, make_config(), Router(), seed=0)


def test_layers_of_a_mixture_that_get_tokens_of_any_rows_are_refused():
    base = random_model(PhimoeForCausalLM, vocab_size=32, **EXPERTS)
    with pytest.raises(ValueError, match=r"`target_modules` takes in 'router' of the mixture of experts '.*mlp'\."):
        add_members(base, NAMES, make_config(), Router(), seed=0)


def test_experts_may_stay_frozen_when_the_attention_is_named():
    base = random_model(MixtralForCausalLM, vocab_size=32, **EXPERTS)
    model = add_members(base, NAMES, make_config(target_modules=["q_proj", "o_proj"]), Router(), seed=0)
    assert len(routed_layers(model)) == 4


@pytest.mark.parametrize("architecture", [GraniteMoeForCausalLM, GptOssForCausalLM])
def test_a_base_of_which_members_adapt_a_small_part_is_told(caplog, architecture):
    base = random_model(architecture, vocab_size=32, pad_token_id=0, **EXPERTS)
    add_members(base, NAMES, make_config(), Router(), seed=0)
    assert re.search(r"Members adapt \d+ % of the base's weights, embeddings apart", caplog.text)


def test_a_base_of_linear_layers_is_told_nothing(caplog):
    add_members(make_base(), NAMES, make_config(), Router(), seed=0)
    assert not caplog.text
