"""Generation by transformers without the work that changes nothing: a prompt is read once, and ended rows leave.

`generate` reads a prompt once per row and computes every row until the longest ends. In a step the G attempts at a
task share their prompt, and most answers are short while a few are long. So each prompt is read once for all of its
rows, and the rest comes in rounds: between two of them the rows that ended leave the batch. On a GPU, where starting
kernels takes the time, it comes from a [recording](graphs.py) instead, if it can. Samples have the distribution of
`generate`'s; greedy ones are the same.
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


def why_no_rounds(model: PretrainedConfig, sampling: GenerationConfig, sharded: bool) -> str:
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
        model: With the cache that [`why_no_rounds`] asks for.
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
    ids, mask = _pad_left([prompt for _, prompt in number], sampling, model.device)
    width = ids.shape[1]
    size = len(ids) if room is None else max(1, room // READ_SHARE // width)
    read = []
    for some in (slice(start, start + size) for start in range(0, len(ids), size)):
        with torch.no_grad(), route([member for member, _ in [*number][some]]):
            read.append(_read_prompts(model, ids[some], mask[some]))
    cache = join_caches(read, ROUND)
    going = torch.tensor(group, device=model.device)
    completions: list[list[int]] = [[] for _ in order]
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if can_record(base, sampling, cache, len(order), width + sampling.max_new_tokens):
        with torch.no_grad(), route([members[row] for row in order]), group_queries():
            new = generate_with_graph(base, cache, ids, mask, going, sampling)
        for row, tokens in zip(order, _cut_at_end(new, sampling)[0], strict=True):
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
        found, ended = _cut_at_end(new, sampling)
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
    """[`complete`] with one call of `generate`, for models that [`why_no_rounds`] names."""
    ids, mask = _pad_left(prompts, sampling, model.device)
    with torch.no_grad(), route(list(members)), group_queries():
        output = model.generate(input_ids=ids, attention_mask=mask, generation_config=sampling)
    return _cut_at_end(output[:, ids.shape[1] :], sampling)[0]


def _pad_left(
    prompts: Sequence[Sequence[int]], sampling: GenerationConfig, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, `[R, P]`, padded on the left."""
    width = max(map(len, prompts))
    ids = [[sampling.pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _cut_at_end(tokens: torch.Tensor, sampling: GenerationConfig) -> tuple[list[list[int]], torch.Tensor]:
    """Rows `[R, T]` up to their end token, and which have one, bool `[R]`."""
    ends = torch.isin(tokens, torch.tensor(sampling.eos_token_id, device=tokens.device).view(-1))
    ended = ends.any(1)
    lengths = torch.where(ended, ends.int().argmax(1) + 1, tokens.shape[1]).tolist()
    return [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)], ended


def _read_prompts(model: PreTrainedModel | PeftModel, ids: torch.Tensor, mask: torch.Tensor) -> Cache:
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


# Caches with room for the tokens to come: a token is written into them.
#
# `DynamicCache` joins the keys and values of a new token to those before it, so that for every token the whole cache
# is read and written once more. Between two rounds `decoding` copies it anyway, when rows leave; that copy leaves the
# room.


class SpareLayer(DynamicLayer):
    """
    A layer of a cache whose `batch_select_indices` leaves room.

    Args:
        layer: The layer whose keys and values it takes over.
        room: Tokens that can be written after each selection. Further ones are joined, as transformers does.
    """

    def __init__(self, layer: DynamicLayer, room: int):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values, self.room = layer.keys, layer.values, room
        self._held = self.keys, self.values  # as far as they have room, `[R, heads, L + room, D]`

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._held = self._copy(self.keys, indices), self._copy(self.values, indices)
        self._show(self.keys.shape[2])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        if end > self._held[0].shape[2]:
            return super().update(key_states, value_states, *args, **kwargs)
        for held, new in zip(self._held, (key_states, value_states), strict=True):
            held[:, :, start:end] = new
        self._show(end)
        return self.keys, self.values

    def _copy(self, given: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        _, heads, length, width = given.shape
        copy = given.new_empty(len(rows), heads, length + self.room, width)
        torch.index_select(given, 0, rows, out=copy[:, :, :length])
        return copy

    def _show(self, length: int) -> None:
        self.keys, self.values = (held[:, :, :length] for held in self._held)


class FixedLayer(DynamicLayer):
    """
    A layer of a cache that never moves, where a token's place is a tensor: what writes it can be recorded.

    Args:
        layer: Keys and values of the prompts, `[N, heads, L, D]`.
        prompts: Which prompt each row has, `[R]`.
        place: Where the next token is written, `[1]`, changed by whoever owns it.
        length: Tokens that there is room for.
    """

    def __init__(self, layer: DynamicLayer, prompts: torch.Tensor, place: torch.Tensor, length: int):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values = (self._copy(given, prompts, length) for given in (layer.keys, layer.values))
        self.place = place

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys.index_copy_(2, self.place, key_states)
        self.values.index_copy_(2, self.place, value_states)
        return self.keys, self.values

    @staticmethod
    def _copy(given: torch.Tensor, prompts: torch.Tensor, length: int) -> torch.Tensor:
        _, heads, read, width = given.shape
        copy = given.new_zeros(len(prompts), heads, length, width)  # what is masked must be finite, too
        torch.index_select(given, 0, prompts, out=copy[:, :, :read])
        return copy


def fix_cache(cache: Cache, prompts: torch.Tensor, place: torch.Tensor, length: int) -> Cache:
    """A cache of [`FixedLayer`]s; takes the given one apart, so that no more than one layer is held twice."""
    layers = []
    while cache.layers:
        layers.append(FixedLayer(cache.layers.pop(0), prompts, place, length))
    return Cache(layers=layers)


def join_caches(parts: list[Cache], room: int) -> Cache:
    """
    One cache of all rows, with room for so many tokens in layers that hold every token. Takes the parts apart, layer
    by layer, so that no more than one layer is held twice.
    """
    first, *others = parts
    for number, layers in enumerate(zip(*(part.layers for part in parts), strict=True)):
        for name in ("keys", "values") if others else ():
            setattr(layers[0], name, torch.cat([getattr(layer, name) for layer in layers]))
            for layer in layers[1:]:
                setattr(layer, name, None)
        if type(layers[0]) is DynamicLayer:  # one with a sliding window drops tokens
            first.layers[number] = SpareLayer(layers[0], room)
    return first


# Attention of a row's next token over its cache, without a copy of the cache for every query head.
#
# Most models have several query heads for one head of keys and values. For `attn_implementation="sdpa"` transformers
# repeats keys and values for each of them, the whole cache for every token, and PyTorch then computes each head with
# one query, which on a CPU in bf16 takes most of the time of a token. The query heads of one head are here the queries
# of one head instead: the same products, and nothing is copied.


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


# Tokens of all rows from one CUDA graph, where starting kernels takes longer than what they compute.
#
# A GPU computes the next token of a few hundred rows in less time than Python takes to start the kernels, so that
# `generate` takes as long for every base of as many layers. Here the first token is computed as usual, the second is
# recorded, and every further one is a replay of the recording. For that nothing may move: the cache has its full
# length from the start, and rows that ended stay until all have. A recording is thrown away with its rows: it never
# holds adapters that have changed since.


logger = logging.getLogger(__name__)

LOOK = 8  # tokens between two looks at whether all rows ended: a look waits for the GPU
FREE_SHARE = 0.8  # of the free memory may the cache have; scores and one layer's prompts need some
_ALIGNED = 8  # SDPA's kernels copy a mask whose rows are of another length
_ATTENTIONS = {"sdpa", "eager"}  # these take the mask as it is
_LOOKING_ROPES = {"dynamic", "longrope"}  # whose frequencies depend on how long the longest row is
_KNOWN = {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
_HARMLESS = {"max_new_tokens", "max_length", "pad_token_id", "bos_token_id", "eos_token_id", "use_cache"}
_HARMLESS |= {"disable_compile", "transformers_version", "_from_model_config"}


def why_no_graph(base: PreTrainedModel, sampling: GenerationConfig) -> str:
    """Why tokens of this base cannot be recorded; empty if they can."""
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
        return "not every layer's cache holds every token"
    if looking := kinds & _LOOKING_ROPES:
        return f"positions are {min(looking)}"
    if is_quantised(base):
        return "the base is quantised"
    if further := {name for each in given for name, value in each.items() if value} - _KNOWN - _HARMLESS:
        return f"{', '.join(sorted(further))} is left to transformers"
    return ""


def why_no_memory(cache: Cache, rows: int, length: int) -> str:
    """Why so many rows cannot stay in a GPU's cache, each with room for `length` tokens; empty if they can."""
    device = cache.layers[0].keys.device
    if device.type != "cuda":
        return ""
    held = [given for layer in cache.layers for given in (layer.keys, layer.values)]
    needed = rows * length * sum(given.shape[1] * given.shape[3] * given.element_size() for given in held)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if needed <= FREE_SHARE * (torch.cuda.mem_get_info(device)[0] + unused):
        return ""
    return (
        f"all rows until the last has ended need over {FREE_SHARE:.0%} of the free memory; lower `generation_tokens`"
    )


def can_record(base: PreTrainedModel, sampling: GenerationConfig, cache: Cache, rows: int, length: int) -> bool:
    """Whether [`generate_with_graph`] can generate so many rows of so many tokens. Where it cannot on a GPU, says once why."""
    reason = why_no_graph(base, sampling) or why_no_memory(cache, rows, length)
    if reason and base.device.type == "cuda":
        _warn_once(reason)
    return not reason


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("Tokens are generated without CUDA graphs, which takes several times as long: %s.", reason)


def generate_with_graph(
    base: PreTrainedModel,
    cache: Cache,
    ids: torch.Tensor,
    mask: torch.Tensor,
    prompts: torch.Tensor,
    sampling: GenerationConfig,
) -> torch.Tensor:
    """
    What follows each row's prompt, `[R, T]` token ids; what stands behind a row's end token means nothing.

    Args:
        base: One that [`why_no_graph`] has nothing against; its route is set.
        cache: Of the prompts but for their last token. It is taken apart.
        ids: Prompts, `[N, P]`, padded on the left.
        mask: 0 where they are padded.
        prompts: Which prompt each row has, `[R]`.
        sampling: `max_new_tokens`, `eos_token_id` and `pad_token_id` are needed.

    Raises:
        `RuntimeError`: If the base does what cannot be recorded after all.
    """
    width, longest = ids.shape[1], sampling.max_new_tokens
    room = -(-(width + longest) // _ALIGNED) * _ALIGNED
    step = _TokenPass(base, cache, ids, mask, prompts, room)
    processors = _make_processors(sampling)
    texts = torch.full((len(prompts), width + longest), sampling.pad_token_id, device=ids.device)
    texts[:, :width] = ids[prompts]
    ends = torch.tensor(sampling.eos_token_id, device=ids.device).view(-1)
    stream, graph = None, None
    if ids.device.type == "cuda":
        stream = torch.cuda.Stream(ids.device)
        stream.wait_stream(torch.cuda.current_stream(ids.device))
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        for end in range(width, width + longest):
            if stream is None or end == width:
                step.compute()
            else:
                graph = graph or _record_pass(step, stream)
                graph.replay()
            scores = processors(texts[:, :end], step.scores.float())
            token = scores.softmax(-1).multinomial(1) if sampling.do_sample else scores.argmax(-1, keepdim=True)
            texts[:, end : end + 1] = token
            step.token.copy_(token)
            new = texts[:, width : end + 1]
            if new.shape[1] % LOOK == 0 and bool(torch.isin(new, ends).any(1).all()):
                break
    if stream is not None:
        stream.synchronize()
    return new


class _TokenPass:
    """
    The scores of all rows' next token, from and into memory that stays where it is.

    Attributes:
        token (`torch.Tensor`): The token that is read next, `[R, 1]`.
        scores (`torch.Tensor`): What follows it, `[R, V]`.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        cache: Cache,
        ids: torch.Tensor,
        mask: torch.Tensor,
        prompts: torch.Tensor,
        room: int,
    ):
        self.base, self.scores = base, torch.empty(0)
        self.token, self.position = ids[prompts, -1:], mask[prompts].sum(1, keepdim=True) - 1
        self.place = torch.tensor([ids.shape[1] - 1], device=ids.device)
        self.cache = fix_cache(cache, prompts, self.place, room)
        hidden = torch.finfo(base.dtype).min
        self.bias = torch.full((len(prompts), 1, 1, room), hidden, dtype=base.dtype, device=ids.device)
        self.bias[:, 0, 0, : ids.shape[1]].masked_fill_(mask[prompts].bool(), 0.0)

    def compute(self) -> None:
        self.bias.index_fill_(3, self.place, 0.0)
        output = self.base(
            input_ids=self.token,
            attention_mask=self.bias,
            position_ids=self.position,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.scores = output.logits[:, -1]
        self.place += 1
        self.position += 1


def _record_pass(step: _TokenPass, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step.compute()
    except RuntimeError as error:
        raise RuntimeError(
            f"{type(step.base).__name__} does what cannot be recorded as a CUDA graph. With "
            "`cache_implementation: dynamic` transformers' `generate` does all of it."
        ) from error
    return graph


def _make_processors(sampling: GenerationConfig) -> LogitsProcessorList:
    """What transformers does with scores before it samples, in its order, of the options in `_KNOWN`."""
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
