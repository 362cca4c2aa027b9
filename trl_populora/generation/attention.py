"""Attention of a row's next token over its cache, without a copy of the cache for every query head.

Most models have several query heads for one head of keys and values. For `attn_implementation="sdpa"` transformers
repeats keys and values for each of them, the whole cache for every token, and PyTorch then computes each head with one
query, which on a CPU in bf16 takes most of the time of a token. The query heads of one head are here the queries of
one head instead: the same products, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@contextmanager
def group_queries() -> Iterator[None]:
    """Inside the block, models with SDPA attention compute single tokens as above and everything else as before."""
    given = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = partial(_attend, given)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = given


def _attend(
    given: Callable,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of queries `[R, heads, T, D]`, keys and values `[R, fewer heads, L, D]` and a mask `[R, 1, T, L]`."""
    rows, heads, tokens, width = query.shape
    shared = key.shape[1] < heads and (attention_mask is None or attention_mask.shape[1] == 1)
    if tokens > 1 or not shared or dropout or kwargs.get("position_bias") is not None:
        return given(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], width)
    found = nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return found.reshape(rows, 1, heads, value.shape[-1]), None
