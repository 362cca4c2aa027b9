"""Completions with their texts, as kinds of task read them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from trl_populora.step.player import Completion
from trl_populora.tasks.fences import THINK_OPEN, opens_thinking


_TAIL = 8  # tokens; an opening tag and the blanks behind it


def as_completions(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[list[int]],
    completion_ids: Sequence[list[int]],
    logprobs: Sequence[list[float]] | None = None,
) -> list[Completion]:
    """
    What was generated, row by row, with its text, which has no special tokens. Where the chat template has opened a
    thought at the end of the prompt, the text begins with the tag: without it a thought that is never closed would
    read as an answer.
    """
    said = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    tails = tokenizer.batch_decode([ids[-_TAIL:] for ids in prompt_ids])
    texts = [f"{THINK_OPEN}\n{text}" if opens_thinking(tail) else text for tail, text in zip(tails, said, strict=True)]
    found = [None] * len(texts) if logprobs is None else logprobs
    return [Completion(*row) for row in zip(prompt_ids, completion_ids, texts, found, strict=True)]
