"""Which tokens end a completion: what TRL knows, the chat template's own end of turn, and the user's stops."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

TEXT_STOPS = ("stop", "stop_strings")  # vLLM's name and transformers'
STOPS = ("stop_token_ids", "eos_token_id", *TEXT_STOPS)


def end_tokens(
    tokenizer: PreTrainedTokenizerBase,
    known: Sequence[int],
    generation_kwargs: Mapping[str, Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """
    The ids that end a completion. One that ends otherwise was cut off.

    Args:
        tokenizer: Its chat template says how an assistant's turn ends.
        known: Those of tokenizer and model.
        generation_kwargs: May hold stops, under the names of vLLM or transformers.
        template_kwargs: Arguments of the chat template.

    Raises:
        `ValueError`: If a stop is text of several tokens: a row that it ends could not be told from one cut off.
    """
    ids = [*known, *_end_of_turn(tokenizer, template_kwargs or {})]
    for name in STOPS:
        value = (generation_kwargs or {}).get(name)
        stops = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
        for stop in stops:
            tokens = tokenizer.encode(stop, add_special_tokens=False) if name in TEXT_STOPS else [int(stop)]
            if len(tokens) != 1:
                raise ValueError(
                    f"`generation_kwargs` gives {name}={stop!r}, which is {len(tokens)} tokens. A completion that "
                    "ends there would count as cut off. Give single tokens as `stop_token_ids`."
                )
            ids += tokens
    return list(dict.fromkeys(ids))


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> list[int]:
    """The special token that the chat template puts after what an assistant says; some templates put none."""
    said = "said"
    turn = [{"role": "user", "content": "asked"}, {"role": "assistant", "content": said}]
    try:
        text = tokenizer.apply_chat_template(turn, tokenize=False, **template_kwargs)
    except TemplateError:  # it takes no assistant's turn
        return []
    after = tokenizer.encode(text.rpartition(said)[2].lstrip(), add_special_tokens=False)
    special = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}
    return [token for token in after[:1] if token in special]


def warn_of_unknown(generation_kwargs: Mapping[str, Any] | None) -> None:
    """Names what transformers would leave aside without a word."""
    unknown = sorted((generation_kwargs or {}).keys() - vars(GenerationConfig()).keys() - set(STOPS))
    if unknown:
        logger.warning("`generation_kwargs` gives %s, which transformers does not know.", ", ".join(unknown))


def vllm_kwargs(generation_kwargs: Mapping[str, Any] | None, ends: Sequence[int]) -> dict[str, Any]:
    """What vLLM samples with. Its engine reads the base's own end tokens only, so it is given all of them."""
    given = {name: value for name, value in (generation_kwargs or {}).items() if name not in STOPS}
    return given | {"stop_token_ids": list(ends)}
