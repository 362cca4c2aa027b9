"""The text of a completion as kinds of task read it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from trl_populora.tasks.fences import THINK_OPEN, opens_thinking


_TAIL = 8  # tokens; an opening tag and the blanks behind it


def decode_texts(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[list[int]], completion_ids: Sequence[list[int]]
) -> list[str]:
    """
    Texts of completions without special tokens. Where the chat template has opened a thought at the end of the prompt,
    the text begins with the tag: without it a thought that is never closed would read as an answer.
    """
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    tails = tokenizer.batch_decode([ids[-_TAIL:] for ids in prompt_ids])
    return [f"{THINK_OPEN}\n{text}" if opens_thinking(tail) else text for tail, text in zip(tails, texts, strict=True)]
