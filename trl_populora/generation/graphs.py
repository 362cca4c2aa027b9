"""Tokens of all rows from one CUDA graph, where starting kernels takes longer than what they compute.

A GPU computes the next token of a few hundred rows in less time than Python takes to start the kernels, so that
`generate` takes as long for every base of as many layers. Here the first token is computed as usual, the second is
recorded, and every further one is a replay of the recording. For that nothing may move: the cache has its full length
from the start, and rows that ended stay until all have. A recording is thrown away with its rows: it never holds
adapters that have changed since.
"""

from __future__ import annotations

import functools
import logging
from contextlib import nullcontext

import torch
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StaticCache,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import StaticLayer

from trl_populora.adapters.checks import is_quantised

from .cache import fix


logger = logging.getLogger(__name__)

LOOK = 8  # tokens between two looks at whether all rows ended: a look waits for the GPU
FREE_SHARE = 0.8  # of the free memory may the cache have; scores and one layer's prompts need some
_ALIGNED = 8  # SDPA's kernels copy a mask whose rows are of another length
_ATTENTIONS = {"sdpa", "eager"}  # these take the mask as it is
_LOOKING_ROPES = {"dynamic", "longrope"}  # whose frequencies depend on how long the longest row is
_KNOWN = {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
_HARMLESS = {"max_new_tokens", "max_length", "pad_token_id", "bos_token_id", "eos_token_id", "use_cache"}
_HARMLESS |= {"disable_compile", "transformers_version", "_from_model_config"}


def why_not(base: PreTrainedModel, sampling: GenerationConfig) -> str:
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


def why_no_room(cache: Cache, rows: int, length: int) -> str:
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
    """Whether [`finish`] can generate so many rows of so many tokens. Where it cannot on a GPU, says once why."""
    reason = why_not(base, sampling) or why_no_room(cache, rows, length)
    if reason and base.device.type == "cuda":
        _tell(reason)
    return not reason


@functools.cache
def _tell(reason: str) -> None:
    logger.warning("Tokens are generated without CUDA graphs, which takes several times as long: %s.", reason)


def finish(
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
        base: One that [`why_not`] has nothing against; its route is set.
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
    step = _Step(base, cache, ids, mask, prompts, room)
    processors = _processors(sampling)
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
                graph = graph or _record(step, stream)
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


class _Step:
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
        self.cache = fix(cache, prompts, self.place, room)
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


def _record(step: _Step, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
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


def _processors(sampling: GenerationConfig) -> LogitsProcessorList:
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
