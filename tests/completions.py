"""Small bases of several architectures, what transformers' `generate` makes of them, and how often."""

from __future__ import annotations

import contextlib

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

from trl_populora.generate.transformers import complete

from .adapter_models import make_population


SMALL = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "initializer_range": 0.5,  # so that greedy answers differ and some end early
}
BASES = {
    "Llama": LlamaConfig(**SMALL),
    "Qwen2": Qwen2Config(**SMALL),
    "Mistral, a window shorter than the prompts": MistralConfig(**SMALL, sliding_window=4),
    "Gemma 3, both kinds of layers": Gemma3TextConfig(
        **SMALL, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "GPT-2, learned positions": GPT2Config(
        vocab_size=24, n_embd=32, n_layer=2, n_head=4, n_positions=128, pad_token_id=0, initializer_range=0.5
    ),
}
ENDS = [1, 2, 3]
PROMPTS = [[5, 6, 7], [5, 6, 7], [9, 8, 7, 6, 5, 4, 11], [12, 13], [5, 6, 7], [4, 20, 21, 22, 23, 10], [12, 13]]


def base(config) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def settings(**given) -> GenerationConfig:
    return GenerationConfig(
        **({"max_new_tokens": 19, "do_sample": False, "pad_token_id": 0, "eos_token_id": ENDS} | given)
    )


def generated(model, prompts, config) -> list[list[int]]:
    """What `generate` makes of each prompt alone."""
    rows = [model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :] for prompt in prompts]
    return [row.tolist() for row in rows]


def no_route(members):
    return contextlib.nullcontext()


def check_distribution(device: str = "cpu") -> None:
    """Whether 6,000 pairs of tokens are as frequent as the model's probabilities say."""
    vocabulary, count = 6, 6000
    model = base(LlamaConfig(**(SMALL | {"vocab_size": vocabulary, "initializer_range": 0.2}))).to(device)
    prompt = [4, 5, 3]
    config = settings(do_sample=True, max_new_tokens=2, eos_token_id=[1], temperature=0.7, top_k=0)
    torch.manual_seed(0)
    found = complete(model, [prompt] * count, [0] * count, no_route, config)

    def next_token(text):
        return (model(torch.tensor([text], device=device)).logits[0, -1] / 0.7).softmax(-1).tolist()

    with torch.no_grad():
        first = next_token(prompt)
        expected = {(1,): first[1]}
        for token in set(range(vocabulary)) - {1}:
            expected |= {(token, after): first[token] * p for after, p in enumerate(next_token([*prompt, token]))}
    for outcome, probability in expected.items():
        spread = (probability * (1 - probability) / count) ** 0.5
        assert abs(sum(tuple(row) == outcome for row in found) / count - probability) < 5 * spread + 1e-9
    assert len(set(map(tuple, found))) > 10


def check_members() -> None:
    """Whether each row is completed as its member alone does, and comes back in its place."""
    model, router, _ = make_population(3)
    prompts = [[5, 6, 7, 8], [5, 6, 7, 8], [9, 10], [5, 6, 7, 8], [9, 10], [5, 6, 7, 8]]
    members = [2, 0, 1, -1, 2, 2]
    config = settings(eos_token_id=[1])
    found = complete(model, prompts, members, router.route_to, config)
    for prompt, member, completion in zip(prompts, members, found, strict=True):
        with router.route_to([member]):
            assert [completion] == generated(model, [prompt], config)
    assert found[0] != found[1], "members differ"
