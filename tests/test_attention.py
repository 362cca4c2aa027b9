"""Attention of single tokens: the query heads that share keys and values are queries of one head."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, LlamaForCausalLM
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_populora.generate.transformers import complete, group_queries

from .models import random_model


PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 11], [12, 13]]


def grouped_model() -> LlamaForCausalLM:
    sizes = {"vocab_size": 24, "hidden_size": 48, "intermediate_size": 64, "initializer_range": 0.5}
    return random_model(LlamaForCausalLM, **sizes, num_attention_heads=6, num_key_value_heads=2).eval()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("padded", [True, False])
def test_logits_are_those_of_repeated_heads(tokens, padded):
    model = grouped_model()
    ids = torch.randint(24, (4, 9 + tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5] = 1 - padded
    found = []
    for grouping in (False, True):
        with torch.no_grad():
            cache = model(ids[:, :9], attention_mask=mask[:, :9]).past_key_values
            if grouping:
                with group_queries():
                    output = model(ids[:, 9:], attention_mask=mask, past_key_values=cache)
            else:
                output = model(ids[:, 9:], attention_mask=mask, past_key_values=cache)
        found.append(output.logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_generation_never_copies_the_cache_for_query_heads(monkeypatch):
    repeated = []
    copy = sdpa_attention.repeat_kv
    monkeypatch.setattr(
        sdpa_attention, "repeat_kv", lambda states, n: repeated.append(states.shape[2]) or copy(states, n)
    )
    sampling = GenerationConfig(max_new_tokens=19, pad_token_id=0, eos_token_id=[0])
    complete(grouped_model(), PROMPTS, [0, 0, 0], lambda members: nullcontext(), sampling)
    assert max(repeated) < max(map(len, PROMPTS)), "keys and values are repeated where prompts are read, and no more"


def test_attention_is_as_before_afterwards():
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with group_queries():
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not before
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
    with pytest.raises(ZeroDivisionError), group_queries():
        1 / 0  # noqa: B018
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before


def test_what_it_does_not_know_goes_on_to_transformers():
    asked = []

    def given(module, query, key, value, attention_mask, **kwargs):
        asked.append(kwargs)
        return query.transpose(1, 2), None

    query, key = torch.ones(2, 4, 1, 8), torch.ones(2, 2, 5, 8)
    ALL_ATTENTION_FUNCTIONS["sdpa"], before = given, ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        with group_queries():
            attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
            attend(nn.Identity(), query, key, key, None, scaling=0.1)
            attend(nn.Identity(), query, key, key, None, dropout=0.1)
            attend(nn.Identity(), query, key, key, None, position_bias=torch.zeros(1))
            attend(nn.Identity(), query, query, query, None)
            attend(nn.Identity(), query, key, key, torch.ones(2, 4, 1, 5, dtype=torch.bool))
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = before
    assert [kwargs["dropout"] for kwargs in asked] == [0.1, 0.0, 0.0, 0.0]
