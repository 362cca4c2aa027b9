"""Generation with transformers: a prompt is read once for all its rows. Tokens come in rounds, or from a CUDA graph.

    prompts_R, members_R --merge equal ones--> N prompts [N, P] --_read_prompts--> cache of N prompts
                                                                                      |
    completions_R <-- rounds of 8 tokens by `generate`, without the rows that ended --+   cache [R, heads, L, D]
                 `<-- one CUDA graph, replayed for the tokens of all rows ------------'   see `can_record`

transformers' `generate` reads a prompt once for every row, and computes every row until the longest has ended. In a
step all attempts of a member at a task share their prompt, and most answers are short while a few are long. Here each
prompt is read once. In rounds, rows that have ended also leave the batch. With a CUDA graph they stay until all rows
have ended, because nothing in a recorded graph may change its shape. Samples have the same distribution as those of
`generate`, and greedy completions are equal to `generate`'s. If [`why_no_rounds`] gives a reason, none of this is
used: one call of `generate` makes all tokens.

Shapes: R rows, N distinct pairs of member and prompt, P prompt tokens, T new tokens, L tokens in the cache, D head
size, V vocabulary.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from peft import PeftModel
from torch import nn
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PretrainedConfig,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StaticCache,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_populora.lora.checks import is_quantised


logger = logging.getLogger(__name__)

# Tokens of a round. A longer round computes ended rows for longer, and a shorter one calls `generate` more often.
ROUND = 8
# With `cache_tokens`, prompts are read in parts. A part has at most an eighth of the tokens that the cache may hold,
# or it is a single prompt. In a 7B model a token takes 4 to 5 times as much memory while it is read as in the cache.
READ_SHARE = 8
# Types of decoder layers from whose cache single rows can be taken.
_SELECTABLE = {"full_attention", "sliding_attention"}
# With these options `generate` needs to know where the prompt ends, or when generation began. Each round calls
# `generate` anew, so it would take the beginning of the round for this place or time.
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


def is_spread(base: PreTrainedModel) -> bool:
    """Says whether a base lies on several devices. TRL spreads it so in one process that sees several GPUs."""
    return len({*(getattr(base, "hf_device_map", None) or {}).values()}) > 1


def why_no_rounds(model: PretrainedConfig, sampling: GenerationConfig, sharded: bool, spread: bool = False) -> str:
    """Says why `generate` has to make all tokens in one call; empty if rounds can make them."""
    layers = set(getattr(model.get_text_config(), "layer_types", None) or ())
    looking = [name for name in _FROM_THE_PROMPT if getattr(sampling, name, None)]
    if sharded:
        return "each rank holds a part of the base, so all ranks must make equally many forwards"
    if spread:
        return "the base lies on several devices, and so does its cache"
    if not layers <= _SELECTABLE:
        return f"single rows cannot be dropped from the cache of {', '.join(sorted(layers - _SELECTABLE))} layers"
    if sampling.cache_implementation:
        return f"`cache_implementation={sampling.cache_implementation}` names a cache of transformers' own"
    if sampling.use_cache is False:
        return "with `use_cache=False` each round would read all earlier tokens again"
    if tokens := sampling.prefill_chunk_size:
        return f"with `prefill_chunk_size={tokens}` each round would read all earlier tokens again"
    if (sampling.num_beams or 1) > 1:
        return f"`num_beams={sampling.num_beams}` makes several rows of one"
    return f"{', '.join(looking)} depend on where the prompt ends" if looking else ""


def add_defaults(sampling: GenerationConfig, base: GenerationConfig) -> GenerationConfig:
    """
    Fills what is `None` in a sampling config from the base's own generation config, as `generate` does.

    `use_cache` stays `None`: a base that was saved without a cache generates in rounds, too, and rounds need a cache.
    """
    filled = copy.copy(sampling)
    for name, value in vars(base).items():
        if getattr(filled, name, None) is None and name != "use_cache":
            setattr(filled, name, value)
    if filled.cache_implementation == "hybrid":  # transformers takes it for `None`
        filled.cache_implementation = None
    return filled


def check_parts(tokens: int | None, sharded: bool) -> None:
    """
    Refuses `generation_tokens` with a sharded base: ranks may make different numbers of parts.

    Raises:
        `ValueError`: If `tokens` is set and the base is sharded.
    """
    if tokens is not None and sharded:
        raise ValueError(
            f"`generation_tokens={tokens}` is not supported with ZeRO-3 and FSDP: ranks that hold parts of the base "
            "meet in every forward, and each would make as many forwards as its own rows need. Leave it unset, or use "
            "ZeRO-2 or DDP."
        )


def complete_in_parts(
    complete: Callable[[list, list], tuple[list, list | None]],
    prompts: list[list[int]],
    members: list[int],
    cache_tokens: int | None,
    longest: int | None,
) -> tuple[list, list | None]:
    """
    Completes rows in parts, each with as many rows as fit into the cache.

    Args:
        complete: `(prompts, members) -> (completions, log-probabilities or None)`.
        prompts: Token ids of each row's prompt, length R.
        members: Member index of each row, length R.
        cache_tokens: Tokens that the cache may hold. With `None` all rows are completed at once.
        longest: The most tokens that a completion may have.

    Returns:
        Token ids of each completion, and log-probabilities as `complete` returns them. With `cache_tokens`
        there are no log-probabilities: `None`.
    """
    if cache_tokens is None:
        return complete(prompts, members)
    # Every row counts as if it had the longest prompt and completion, so that no part of several rows is too large.
    rows = max(1, cache_tokens // (max(map(len, prompts), default=0) + (longest or 1)))
    parts = [slice(start, start + rows) for start in range(0, len(members), rows)]
    return [ids for part in parts for ids in complete(prompts[part], members[part])[0]], None


def complete(
    model: PreTrainedModel | PeftModel,
    prompts: Sequence[Sequence[int]],
    members: Sequence[int],
    route: Callable[[list[int]], AbstractContextManager],
    sampling: GenerationConfig,
    cache_tokens: int | None = None,
    temperatures: Sequence[float] | None = None,
) -> list[list[int]]:
    """
    Completes every prompt, by a CUDA graph if the base and the GPU allow it, else in rounds.

    Args:
        model: A model for which [`why_no_rounds`] has no objection.
        prompts: Token ids of each row's prompt, length R.
        members: Member index of each row, length R.
        route: Makes a context from the members of a batch's rows. Inside the context the model computes each row
            as its member does (see [`~trl_populora.lora.layers.Router.route_to`]).
        sampling: How to sample. `max_new_tokens`, `eos_token_id` and `pad_token_id` have to be set.
        cache_tokens: Tokens that the cache may hold. If it is given, prompts are read in parts.
        temperatures: Temperature of each row, length R; that of `sampling` for all when `None`.

    Returns:
        Token ids of each row's completion, length R. An end token is part of the completion.
    """
    if temperatures is not None:
        sampling = copy.copy(sampling)
        sampling.temperature = 1.0  # `_divide_by_row` divides the scores instead
    # In this order a member's rows stand together, so the routed layers need not gather them.
    order = sorted(range(len(prompts)), key=lambda row: members[row])
    number: dict[tuple, int] = {}
    # group[i] says which of the N distinct prompts the i-th row in this order has.
    group = [number.setdefault((members[row], tuple(prompts[row])), len(number)) for row in order]
    # `_read_prompts` leaves out the last column, and the base cannot read none.
    ids, mask = _pad_left([prompt for _, prompt in number], sampling, model.device, least=2)
    width = ids.shape[1]
    size = len(ids) if cache_tokens is None else max(1, cache_tokens // READ_SHARE // width)
    read = []
    for some in (slice(start, start + size) for start in range(0, len(ids), size)):
        with torch.no_grad(), route([member for member, _ in [*number][some]]):
            read.append(_read_prompts(model, ids[some], mask[some]))
    cache = join_caches(read, ROUND)
    # Indices into ids, mask and cache, one for each row that goes on. At first the index is that of the row's prompt,
    # after a round it is that of the row itself.
    going = torch.tensor(group, device=model.device)
    completions: list[list[int]] = [[] for _ in order]
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if can_record(base, sampling, cache, len(order), width + sampling.max_new_tokens):
        with torch.no_grad(), route([members[row] for row in order]), group_queries():
            divide = _divide_by_row(temperatures and [temperatures[row] for row in order], model.device)
            new = generate_with_graph(base, cache, ids, mask, going, sampling, divide)
        for row, tokens in zip(order, _cut_at_end(new, sampling)[0], strict=True):
            completions[row] = tokens
        return completions

    rows = order
    while rows:
        # In the first round this gives each row a copy of its prompt's cache. Later it drops rows that have ended.
        ids, mask = ids[going], mask[going]
        cache.batch_select_indices(going)
        part = copy.copy(sampling)
        part.max_new_tokens = min(ROUND, width + sampling.max_new_tokens - ids.shape[1])
        part.return_dict_in_generate = part.use_cache = True
        with torch.no_grad(), route([members[row] for row in rows]), group_queries():
            # transformers runs the processors in `divide` before its own that look at probabilities, such as `top_p`.
            divide = _divide_by_row(temperatures and [temperatures[row] for row in rows], model.device)
            output = model.generate(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=cache,
                generation_config=part,
                logits_processor=divide,
            )
        new, ids, cache = output.sequences[:, ids.shape[1] :], output.sequences, output.past_key_values
        mask = torch.cat([mask, torch.ones_like(new)], dim=1)
        found, ended = _cut_at_end(new, sampling)
        for row, tokens in zip(rows, found, strict=True):
            completions[row] += tokens
        # Rows without an end token are cut off here, at `max_new_tokens`.
        if ids.shape[1] == width + sampling.max_new_tokens:
            break
        going = (~ended).nonzero().squeeze(1)
        rows = [rows[position] for position in going.tolist()]
    return completions


def _divide_by_row(temperatures: Sequence[float] | None, device: torch.device) -> LogitsProcessorList:
    """Lists the processor that divides each row's scores by its temperature; empty without temperatures."""
    if temperatures is None:
        return LogitsProcessorList()
    divisors = torch.tensor(temperatures, device=device)[:, None]
    return LogitsProcessorList([lambda ids, scores: scores / divisors])


def complete_whole(
    model: PreTrainedModel | PeftModel,
    prompts: Sequence[Sequence[int]],
    members: Sequence[int],
    route: Callable[[list[int]], AbstractContextManager],
    sampling: GenerationConfig,
) -> list[list[int]]:
    """Does in one call of `generate` what [`complete`] does, for models that cannot do it in rounds."""
    ids, mask = _pad_left(prompts, sampling, model.device)
    plain = copy.copy(sampling)
    plain.return_dict_in_generate = False  # tokens alone, whatever the user's options ask for
    with torch.no_grad(), route(list(members)), group_queries():
        output = model.generate(input_ids=ids, attention_mask=mask, generation_config=plain)
    return _cut_at_end(output[:, ids.shape[1] :], sampling)[0]


def _pad_left(
    prompts: Sequence[Sequence[int]], sampling: GenerationConfig, device: torch.device, least: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes token ids and mask, each `[R, P]` with P >= `least`, from prompts; pads them on the left."""
    width = max(least, *map(len, prompts))
    ids = [[sampling.pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _cut_at_end(tokens: torch.Tensor, sampling: GenerationConfig) -> tuple[list[list[int]], torch.Tensor]:
    """Cuts rows `[R, T]` after their first end token. Also returns which rows have an end token, bool `[R]`."""
    ends = torch.isin(tokens, torch.tensor(sampling.eos_token_id, device=tokens.device).view(-1))
    ended = ends.any(1)
    lengths = torch.where(ended, ends.int().argmax(1) + 1, tokens.shape[1]).tolist()
    return [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)], ended


def _read_prompts(model: PreTrainedModel | PeftModel, ids: torch.Tensor, mask: torch.Tensor) -> Cache:
    """
    Computes the cache of prompts `[N, P]`, which are padded on the left.

    The last token of each prompt is left out. Generation begins with reading it, because the scores after it are
    needed.
    """
    # Accelerate wraps the forward of the `PeftModel` in autocast. The base's own forward is not wrapped: it computes
    # in the type of the base's weights, as `generate` does.
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output = base(
        input_ids=ids[:, :-1],
        attention_mask=mask[:, :-1],
        position_ids=positions[:, :-1],
        use_cache=True,
        logits_to_keep=1,
    )
    return output.past_key_values


# Layers of a cache with empty places, into which new tokens are written. transformers' `DynamicCache` has none: for
# every new token it copies the whole cache.


class SpareLayer(DynamicLayer):
    """
    A layer of a cache that makes empty places for new tokens whenever rows are selected.

    Between two rounds [`complete`] selects the rows that go on, which copies the cache anyway. The copy is made with
    the empty places.

    Args:
        layer: The layer from which keys and values are taken over, each `[R, heads, L, D]`.
        spare: Empty places after each selection. If more tokens come, the layer grows as transformers' layers do.
    """

    def __init__(self, layer: DynamicLayer, spare: int):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values, self.spare = layer.keys, layer.values, spare
        # The memory of keys and values with their empty places, `[R, heads, L + spare, D]`. `keys` and `values` are
        # views of the part that is written.
        self._held = self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows at some indices, and makes new empty places behind their tokens."""
        length = self.keys.shape[2]
        self._held = tuple(_copy_rows(given, indices, length + self.spare) for given in (self.keys, self.values))
        self._show(length)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the keys and values of new tokens, and returns those of all tokens."""
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        if end > self._held[0].shape[2]:
            return super().update(key_states, value_states, *args, **kwargs)
        for held, new in zip(self._held, (key_states, value_states), strict=True):
            held[:, :, start:end] = new
        self._show(end)
        return self.keys, self.values

    def _show(self, length: int) -> None:
        """Lets `keys` and `values` be the first `length` tokens of the memory."""
        self.keys, self.values = (held[:, :, :length] for held in self._held)


class FixedLayer(DynamicLayer):
    """
    A layer of a cache that stays at one address in memory, as a CUDA graph needs it.

    The layer has its full length from the start. The place of the next token is a tensor, not a number, so that a
    replayed graph reads a new place each time.

    Args:
        layer: Keys and values of the prompts, each `[N, heads, L, D]`.
        prompts: Which of the N prompts each row has, `[R]`.
        place: Where the next token is written, `[1]`. The owner of the tensor moves it on.
        length: Full length of the layer in tokens, those of the prompt included.
    """

    def __init__(self, layer: DynamicLayer, prompts: torch.Tensor, place: torch.Tensor, length: int):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values = (_copy_rows(given, prompts, length) for given in (layer.keys, layer.values))
        self.place = place

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the keys and values of one new token, and returns those of all places, empty ones included."""
        self.keys.index_copy_(2, self.place, key_states)
        self.values.index_copy_(2, self.place, value_states)
        return self.keys, self.values


def _copy_rows(given: torch.Tensor, rows: torch.Tensor, length: int) -> torch.Tensor:
    """Copies rows of keys or values, `[N, heads, L, D]`, into new memory with `length` places for tokens."""
    _, heads, read, width = given.shape
    copy = given.new_empty(len(rows), heads, length, width)
    torch.index_select(given, 0, rows, out=copy[:, :, :read])
    copy[:, :, read:] = 0  # attention masks the empty places, but adds their values times 0: a NaN would spread
    return copy


def join_caches(parts: list[Cache], spare: int) -> Cache:
    """
    Joins the caches of several parts of the prompts into one cache of all N prompts.

    Layers that hold every token become [`SpareLayer`]s, with `spare` empty places after each selection of rows. The
    parts are emptied layer by layer, so at most one layer at a time is in memory twice.
    """
    first, *others = parts
    for number, layers in enumerate(zip(*(part.layers for part in parts), strict=True)):
        for name in ("keys", "values") if others else ():
            setattr(layers[0], name, torch.cat([getattr(layer, name) for layer in layers]))
            for layer in layers[1:]:
                setattr(layer, name, None)
        # A layer with a sliding window, a subclass of `DynamicLayer`, stays as it is: it drops old tokens as it reads
        # new ones, so empty places would be of no use.
        if type(layers[0]) is DynamicLayer:
            first.layers[number] = SpareLayer(layers[0], spare)
    return first


# Attention of one new token per row. In most models several query heads share one head of keys and values, and with
# `attn_implementation="sdpa"` transformers copies the whole cache for each of them. On a CPU in bf16 that takes most
# of the time of a token.


@contextmanager
def group_queries() -> Iterator[None]:
    """
    Lets models with SDPA attention compute single tokens without copies of the cache, inside the block.

    The query heads that share a head of keys and values are passed to PyTorch as queries of one head. The products are
    the same. Forwards of several tokens per row are computed as always.
    """
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
    """
    Computes attention by groups of query heads where it can, else with `given`. It can if each row has one token, if
    several query heads share a head of keys and values, and if there is no dropout, position bias or mask per head.

    Args:
        given: transformers' own function.
        query: Shape `[R, heads, T, D]`.
        key, value: Shape `[R, fewer heads, L, D]`.
        attention_mask: Shape `[R, 1, T, L]`; `None` without a mask.

    Returns:
        The outputs, `[R, T, heads, D]`, and `None` for the weights, as transformers has it.
    """
    rows, heads, tokens, width = query.shape
    shared = key.shape[1] < heads and (attention_mask is None or attention_mask.shape[1] == 1)
    if tokens > 1 or not shared or dropout or kwargs.get("position_bias") is not None:
        return given(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    # [R, heads, 1, D] becomes [R, fewer heads, heads / fewer heads, D]: query heads take the place of tokens.
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], width)
    found = nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return found.reshape(rows, 1, heads, value.shape[-1]), None


# Tokens of all rows from one CUDA graph. A GPU computes the next token of a few hundred rows in less time than Python
# takes to start the kernels. A graph starts all kernels of a token at once.


LOOK = 8  # tokens between two checks whether all rows have ended; each check waits for the GPU
FREE_SHARE = 0.8  # the part of the free memory that the cache may take; scores and prompts need the rest
_ALIGNED = 8  # a FixedLayer's length is a multiple of this: SDPA's kernels copy masks of other lengths
_ATTENTIONS = {"sdpa", "eager"}  # the implementations of attention that take our mask unchanged
_LOOKING_ROPES = {"dynamic", "longrope"}  # types of RoPE whose frequencies depend on the longest row
# Options of sampling that `_make_processors` applies, and options that do not change scores. With any other option
# tokens come from `generate`.
_KNOWN = {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
_HARMLESS = {"max_new_tokens", "max_length", "pad_token_id", "bos_token_id", "eos_token_id", "use_cache"}
_HARMLESS |= {"disable_compile", "transformers_version", "_from_model_config"}


def why_no_graph(base: PreTrainedModel, sampling: GenerationConfig) -> str:
    """Says why a CUDA graph cannot compute this base's tokens; empty if it can."""
    ropes = getattr(base.config, "rope_parameters", None) or {}
    kinds = {str(each.get("rope_type")) for each in (ropes, *ropes.values()) if isinstance(each, dict)}
    given = (sampling.to_diff_dict(), base.generation_config.to_diff_dict())
    if base.device.type != "cuda":
        return f"graphs are for CUDA, the model is on {base.device.type}"
    if not getattr(base, "_can_compile_fullgraph", False):
        return f"transformers does not compile {type(base).__name__} as a whole"
    if base.config._attn_implementation not in _ATTENTIONS:
        return f"`attn_implementation={base.config._attn_implementation}` makes its own mask"
    if any(type(layer) is not StaticLayer for layer in StaticCache(base.config, max_cache_len=1).layers):
        return "some layers drop old tokens from their cache, or have another kind of cache"
    if looking := kinds & _LOOKING_ROPES:
        return f"positions are {min(looking)}"
    if is_quantised(base):
        return "the base is quantised"
    # Names that only vLLM knows, such as `stop_token_ids`, are kept in the config, and transformers ignores them.
    left = vars(GenerationConfig()).keys() - _KNOWN - _HARMLESS
    if further := left & {name for each in given for name, value in each.items() if value}:
        return f"{', '.join(sorted(further))} is left to transformers"
    return ""


def why_no_memory(cache: Cache, rows: int, length: int) -> str:
    """Says why `rows` rows of `length` tokens do not fit into the GPU's memory. Empty if they fit, or without GPU."""
    device = cache.layers[0].keys.device
    if device.type != "cuda":
        return ""
    held = [given for layer in cache.layers for given in (layer.keys, layer.values)]
    needed = rows * length * sum(given.shape[1] * given.shape[3] * given.element_size() for given in held)
    # Memory that PyTorch has reserved and does not use is free for the cache, too.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if needed <= FREE_SHARE * (torch.cuda.mem_get_info(device)[0] + unused):
        return ""
    return (
        f"{rows} rows of {length} tokens need over {FREE_SHARE:.0%} of the free memory; set a lower "
        "`generation_tokens`"
    )


def can_record(base: PreTrainedModel, sampling: GenerationConfig, cache: Cache, rows: int, length: int) -> bool:
    """
    Says whether [`generate_with_graph`] can generate `rows` rows of `length` tokens. On a GPU where it cannot, the
    reason is logged once.
    """
    reason = why_no_graph(base, sampling) or why_no_memory(cache, rows, length)
    if reason and base.device.type == "cuda":
        _warn_once(reason)
    return not reason


@functools.cache
def _warn_once(reason: str) -> None:
    # `can_record` finds the same reason in every step. The decorator's cache lets each reason be logged once.
    logger.warning("Tokens are generated without CUDA graphs, which takes several times as long: %s.", reason)


def generate_with_graph(
    base: PreTrainedModel,
    cache: Cache,
    ids: torch.Tensor,
    mask: torch.Tensor,
    prompts: torch.Tensor,
    sampling: GenerationConfig,
    before: LogitsProcessorList | None = None,
) -> torch.Tensor:
    """
    Generates all rows with one CUDA graph, which is replayed for every token but the first.

    The first token is computed as usual. Then a forward is recorded, and every later token is a replay. A replay reads
    and writes the same addresses as the recording, so nothing may move: the cache has its full length from the start,
    and rows that have ended stay until all have ended. The graph is thrown away after the rows, so it never computes
    with the adapters of an earlier step.

    Args:
        base: A base for which [`why_no_graph`] has no objection. The route of the R rows has to be set.
        cache: The cache of the prompts without their last token. It is emptied.
        ids: Prompts, `[N, P]`, padded on the left.
        mask: 0 where a prompt is padded, else 1, `[N, P]`.
        prompts: Which of the N prompts each row has, `[R]`.
        sampling: How to sample. `max_new_tokens`, `eos_token_id` and `pad_token_id` have to be set.
        before: Processors of the scores that run before those of `sampling`.

    Returns:
        Token ids of the completions, `[R, T]`. Tokens behind a row's end token mean nothing.

    Raises:
        `RuntimeError`: If the base does something that cannot be recorded.
    """
    width, longest = ids.shape[1], sampling.max_new_tokens
    length = -(-(width + longest) // _ALIGNED) * _ALIGNED
    token_pass = _TokenPass(base, cache, ids, mask, prompts, length)
    options = add_defaults(sampling, base.generation_config)  # as `generate` does
    processors = LogitsProcessorList([*(before or ()), *_make_processors(options)])
    texts = torch.full((len(prompts), width + longest), sampling.pad_token_id, device=ids.device)
    texts[:, :width] = ids[prompts]
    ends = torch.tensor(sampling.eos_token_id, device=ids.device).view(-1)
    # CUDA cannot record a graph on its default stream, so all tokens are computed on another one. A CPU has no
    # graphs, and computes every token directly.
    stream, graph = None, None
    if ids.device.type == "cuda":
        stream = torch.cuda.Stream(ids.device)
        stream.wait_stream(torch.cuda.current_stream(ids.device))
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        for end in range(width, width + longest):
            # The first token runs without a graph. It sets up kernels and their memory, which must not be recorded.
            if stream is None or end == width:
                token_pass.compute()
            else:
                graph = graph or _record_pass(token_pass, stream)
                graph.replay()
            # Sampling stays outside the graph, because a repetition penalty reads all tokens of a row: more each time.
            scores = processors(texts[:, :end], token_pass.scores.float())
            token = scores.softmax(-1).multinomial(1) if sampling.do_sample else scores.argmax(-1, keepdim=True)
            texts[:, end : end + 1] = token
            token_pass.token.copy_(token)  # copied, because the graph reads this memory
            new = texts[:, width : end + 1]
            if new.shape[1] % LOOK == 0 and bool(torch.isin(new, ends).any(1).all()):
                break
    if stream is not None:
        stream.synchronize()
    return new


class _TokenPass:
    """
    One forward of one token per row. All that it reads and writes stays at one address in memory.

    Attributes:
        token (`torch.Tensor`): The token of each row that is read next, `[R, 1]`.
        scores (`torch.Tensor`): Scores of the token after it, `[R, V]`.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        cache: Cache,
        ids: torch.Tensor,
        mask: torch.Tensor,
        prompts: torch.Tensor,
        length: int,
    ):
        self.base, self.scores = base, torch.empty(0)
        self.token, self.position = ids[prompts, -1:], mask[prompts].sum(1, keepdim=True) - 1
        self.place = torch.tensor([ids.shape[1] - 1], device=ids.device)
        # The given cache is emptied layer by layer, so only one layer at a time is in memory twice.
        layers = [FixedLayer(cache.layers.pop(0), prompts, self.place, length) for _ in range(len(cache.layers))]
        self.cache = Cache(layers=layers)
        # The mask is added to the scores of attention: 0 for a token that is there, the least number for padding and
        # empty places. Like the cache it has its full length from the start. `compute` opens one place per token.
        hidden = torch.finfo(base.dtype).min
        self.bias = torch.full((len(prompts), 1, 1, length), hidden, dtype=base.dtype, device=ids.device)
        self.bias[:, 0, 0, : ids.shape[1]].masked_fill_(mask[prompts].bool(), 0.0)

    def compute(self) -> None:
        """Reads one token per row, sets `scores`, and moves the place and the positions on by one."""
        self.bias.index_fill_(3, self.place, 0.0)
        output = self.base(
            input_ids=self.token,
            attention_mask=self.bias,
            position_ids=self.position,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.scores = output.logits[:, -1]
        # In place, so that the graph changes the tensors that its next replay reads.
        self.place += 1
        self.position += 1


def _record_pass(token_pass: _TokenPass, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Records one forward of a token as a CUDA graph. Recording computes nothing: a replay does."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            token_pass.compute()
    except RuntimeError as error:
        raise RuntimeError(
            f"The forward of {type(token_pass.base).__name__} cannot be recorded as a CUDA graph ({error}). Set "
            "`cache_implementation: dynamic`, and transformers' `generate` makes all tokens."
        ) from error
    return graph


def _make_processors(sampling: GenerationConfig) -> LogitsProcessorList:
    """Makes the processors of scores that the options in `_KNOWN` ask for, in the order of transformers."""
    found = LogitsProcessorList()
    if sampling.repetition_penalty not in (None, 1.0):
        found.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if not sampling.do_sample:
        return found
    if sampling.temperature not in (None, 1.0):
        found.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1.0:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        found.append(MinPLogitsWarper(sampling.min_p))
    return found
