"""Generation by transformers without the work that changes nothing: a prompt is read once, and ended rows leave.

`generate` reads a prompt once per row and computes every row until the longest ends. In a step the G attempts at a
task share their prompt, and most answers are short while a few are long. So each prompt is read once for all of its
rows, and the rest comes in rounds: between two of them the rows that ended leave the batch. On a GPU, where starting
kernels takes the time, it comes from a [recording](graphs.py) instead, if it can. Samples have the distribution of
`generate`'s; greedy ones are the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from peft import PeftModel
from transformers import Cache, GenerationConfig, PretrainedConfig, PreTrainedModel

from . import graphs
from .attention import group_queries
from .cache import join


ROUND = 8  # tokens: more keep ended rows longer, fewer call `generate` more often
# Of the tokens that the cache may hold, prompts are read an eighth at a time: in a 7B model a token that is read takes
# 4 to 5 times the memory that it takes in the cache.
READ_SHARE = 8
_SELECTABLE = {"full_attention", "sliding_attention"}  # layers whose cache holds every row apart
# These look at where the prompt ends, which for them would be where the round begins.
_FROM_THE_PROMPT = (
    "min_new_tokens",
    "exponential_decay_length_penalty",
    "max_time",
    "forced_eos_token_id",
    "begin_suppress_tokens",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "guidance_scale",
)


def why_whole(model: PretrainedConfig, sampling: GenerationConfig, sharded: bool) -> str:
    """Why `generate` has to be called once for all tokens; empty if rounds will do."""
    layers = set(getattr(model.get_text_config(), "layer_types", None) or ())
    looking = [name for name in _FROM_THE_PROMPT if getattr(sampling, name, None)]
    if sharded:
        return "ranks that hold parts of the base meet in every forward"
    if not layers <= _SELECTABLE:
        return f"the cache of {', '.join(sorted(layers - _SELECTABLE))} layers does not give rows away"
    if sampling.cache_implementation:
        return f"`cache_implementation={sampling.cache_implementation}` names a cache of transformers' own"
    if sampling.use_cache is False:
        return "`use_cache=False` keeps nothing of a round for the next"
    return f"{', '.join(looking)} look at where the prompt ends" if looking else ""


def check_parts(tokens: int | None, sharded: bool) -> None:
    """
    Raises:
        `ValueError`: If rows shall be generated in parts where ranks with other rows would make other parts.
    """
    if tokens is not None and sharded:
        raise ValueError(
            f"`generation_tokens={tokens}` is not supported with ZeRO-3 and FSDP: ranks that hold parts of the base "
            "meet in every forward, and each would make as many as its own rows need. Leave it unset, or use ZeRO-2 "
            "or DDP."
        )


def complete_in_parts(
    complete: Callable[[list, list], tuple[list, list | None]],
    prompts: list[list[int]],
    members: list[int],
    room: int | None,
    longest: int | None,
) -> tuple[list, list | None]:
    """
    Completions of as many rows at a time as the cache has room for, and their log-probabilities where these are told.

    Args:
        complete: `(prompts, members) -> (completions, log-probabilities or None)`.
        prompts: Token ids of each row.
        members: Whose each row is.
        room: Tokens that the cache may hold; without it all rows are completed at once.
        longest: Tokens of the longest completion.
    """
    if room is None:
        return complete(prompts, members)
    rows = max(1, room // (max(map(len, prompts), default=0) + (longest or 1)))
    parts = [slice(start, start + rows) for start in range(0, len(members), rows)]
    return [ids for part in parts for ids in complete(prompts[part], members[part])[0]], None


def complete(
    model: PreTrainedModel | PeftModel,
    prompts: Sequence[Sequence[int]],
    members: Sequence[int],
    route: Callable[[list[int]], AbstractContextManager],
    sampling: GenerationConfig,
    room: int | None = None,
) -> list[list[int]]:
    """
    One completion per prompt, up to and including its end token if it came to one.

    Args:
        model: With the cache that [`why_whole`] asks for.
        prompts: Token ids of each row.
        members: Whose each row is. Rows of one member with one prompt are read as one.
        route: Members of a batch's rows -> context in which the model computes each row as its member does,
            [`Router.rows_of`].
        sampling: `max_new_tokens`, `eos_token_id` and `pad_token_id` are needed.
        room: Tokens that the cache may hold, if that matters: prompts are then read in parts.
    """
    order = sorted(range(len(prompts)), key=lambda row: members[row])  # the layers need not gather a member's rows
    number: dict[tuple, int] = {}
    group = [number.setdefault((members[row], tuple(prompts[row])), len(number)) for row in order]
    ids, mask = _padded([prompt for _, prompt in number], sampling, model.device)
    width = ids.shape[1]
    size = len(ids) if room is None else max(1, room // READ_SHARE // width)
    read = []
    for some in (slice(start, start + size) for start in range(0, len(ids), size)):
        with torch.no_grad(), route([member for member, _ in [*number][some]]):
            read.append(_read(model, ids[some], mask[some]))
    cache = join(read, ROUND)
    going = torch.tensor(group, device=model.device)
    completions: list[list[int]] = [[] for _ in order]
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if graphs.can_record(base, sampling, cache, len(order), width + sampling.max_new_tokens):
        with torch.no_grad(), route([members[row] for row in order]), group_queries():
            new = graphs.finish(base, cache, ids, mask, going, sampling)
        for row, tokens in zip(order, _until_end(new, sampling)[0], strict=True):
            completions[row] = tokens
        return completions

    rows = order
    while rows:
        ids, mask = ids[going], mask[going]
        cache.batch_select_indices(going)
        part = copy.copy(sampling)
        part.max_new_tokens = min(ROUND, width + sampling.max_new_tokens - ids.shape[1])
        part.return_dict_in_generate = True
        with torch.no_grad(), route([members[row] for row in rows]), group_queries():
            output = model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, generation_config=part)
        new, ids, cache = output.sequences[:, ids.shape[1] :], output.sequences, output.past_key_values
        mask = torch.cat([mask, torch.ones_like(new)], dim=1)
        found, ended = _until_end(new, sampling)
        for row, tokens in zip(rows, found, strict=True):
            completions[row] += tokens
        if ids.shape[1] == width + sampling.max_new_tokens:
            break
        going = (~ended).nonzero().squeeze(1)
        rows = [rows[position] for position in going.tolist()]
    return completions


def complete_whole(
    model: PreTrainedModel | PeftModel,
    prompts: Sequence[Sequence[int]],
    members: Sequence[int],
    route: Callable[[list[int]], AbstractContextManager],
    sampling: GenerationConfig,
) -> list[list[int]]:
    """[`complete`] with one call of `generate`, for models that [`why_whole`] names."""
    ids, mask = _padded(prompts, sampling, model.device)
    with torch.no_grad(), route(list(members)), group_queries():
        output = model.generate(input_ids=ids, attention_mask=mask, generation_config=sampling)
    return _until_end(output[:, ids.shape[1] :], sampling)[0]


def _padded(
    prompts: Sequence[Sequence[int]], sampling: GenerationConfig, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, `[R, P]`, padded on the left."""
    width = max(map(len, prompts))
    ids = [[sampling.pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _until_end(tokens: torch.Tensor, sampling: GenerationConfig) -> tuple[list[list[int]], torch.Tensor]:
    """Rows `[R, T]` up to their end token, and which have one, bool `[R]`."""
    ends = torch.isin(tokens, torch.tensor(sampling.eos_token_id, device=tokens.device).view(-1))
    ended = ends.any(1)
    lengths = torch.where(ended, ends.int().argmax(1) + 1, tokens.shape[1]).tolist()
    return [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)], ended


def _read(model: PreTrainedModel | PeftModel, ids: torch.Tensor, mask: torch.Tensor) -> Cache:
    """The cache of prompts `[N, P]`, padded on the left, but for their last token, with which `generate` begins."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model  # autocast is around PEFT's forward alone
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output = base(
        input_ids=ids[:, :-1],
        attention_mask=mask[:, :-1],
        position_ids=positions[:, :-1],
        use_cache=True,
        logits_to_keep=1,
    )
    return output.past_key_values
