"""An adapter whose modules have ranks and alphas of their own, against the equal one that vLLM reads."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer

from tests.adapter_models import make_base, make_population, make_rows, token_logps
from trl_populora.lora.convert import fold, fold_patterns
from trl_populora.lora.layers import routed_layers
from trl_populora.lora.members import read_member, save_member


PATTERNS = [
    {"rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 7}},
    {"alpha_pattern": {"q_proj": 32, "^model.layers.0.mlp.up_proj": 3}},
    {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 32}, "use_rslora": True},
]
IDS = ["rank", "alpha", "both, rslora"]


@pytest.mark.parametrize("options", PATTERNS, ids=IDS)
def test_a_folded_adapter_is_equal_and_has_one_rank_and_one_scaling(tmp_path, options):
    model, _, (name,) = make_population(1, **options)
    ids = make_rows(4)
    logps = []
    for folds in (False, True):
        save_member(model, name, tmp_path / "adapter")
        if folds:
            fold_patterns(tmp_path / "adapter")
        adapter = PeftModel.from_pretrained(make_base(), tmp_path / "adapter")
        with torch.no_grad():
            logps.append(token_logps(adapter, ids))
        if folds:
            scalings = {module.scaling["default"] for module in adapter.modules() if isinstance(module, LoraLayer)}
            ranks = {p.shape[0] for path, p in adapter.named_parameters() if "lora_A" in path}
            assert (len(scalings), len(ranks)) == (1, 1)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["rank_pattern"], config["alpha_pattern"], config["use_rslora"]) == ({}, {}, False)
    torch.testing.assert_close(*logps, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, *PATTERNS], ids=["none", "rslora", *IDS])
def test_folded_factors_with_one_scaling_are_what_the_layers_add(options):
    model, _, (name,) = make_population(1, **options)
    factors, config = fold(read_member(model, name), model.peft_config[name])
    scaling = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
    for path, layer in routed_layers(model).items():
        a, b = factors[f"{path}.lora_A.weight"], factors[f"{path}.lora_B.weight"]
        assert len(a) == config.r
        added = layer.scaling[name] * layer.lora_B[name].weight @ layer.lora_A[name].weight
        torch.testing.assert_close(scaling * b @ a, added)


def test_an_adapter_without_patterns_stays_as_it_is(tmp_path):
    model, _, (name,) = make_population(1, use_rslora=True)
    save_member(model, name, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    fold_patterns(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
