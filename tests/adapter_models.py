"""Tiny bases and populations for the tests of the adapters room: real Qwen2 layers, two of them, random weights."""

from __future__ import annotations

import torch
from peft import LoraConfig, PeftModel
from transformers import PreTrainedModel, Qwen2ForCausalLM, Qwen2MoeForCausalLM

from tests.models import random_model
from trl_populora.lora.layers import Router, add_members
from trl_populora.lora.members import read_member, write_member


VOCABULARY = 64


def make_base(dtype: torch.dtype = torch.float32) -> Qwen2ForCausalLM:
    model = random_model(
        Qwen2ForCausalLM,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        pad_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,  # with the default, 0.02, the logits hardly depend on the adapters
    )
    return model.to(dtype).eval()


def make_mixture() -> Qwen2MoeForCausalLM:
    """A mixture of experts with a shared one, which all tokens pass."""
    return random_model(
        Qwen2MoeForCausalLM,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=48,
        num_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
    ).eval()


def make_config(**options) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options})


def make_population(
    members: int, dtype: torch.dtype = torch.float32, base: PreTrainedModel | None = None, **options
) -> tuple[PeftModel, Router, list[str]]:
    """A population of distinct members: `B` is random instead of zero."""
    router = Router()
    names = [f"member_{i}" for i in range(members)]
    model = add_members(base or make_base(dtype), names, make_config(**options), router, seed=3)
    for i, name in enumerate(names):
        generator = torch.Generator().manual_seed(i)
        factors = read_member(model, name)
        for key, value in factors.items():
            value += 0.3 * torch.randn(value.shape, generator=generator)
            factors[key] = value
        write_member(model, name, factors)
    return model, router, names


def make_rows(rows: int, length: int = 7, seed: int = 5) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def token_logps(model, ids: torch.Tensor) -> torch.Tensor:
    """Log-probability of each token after the first, `[R, T - 1]`."""
    logps = model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
    return logps.gather(-1, ids[:, 1:, None])[..., 0]


def gradients(model: PeftModel, name: str) -> dict[str, torch.Tensor | None]:
    return {path: p.grad for path, p in model.named_parameters() if f".{name}." in path}
