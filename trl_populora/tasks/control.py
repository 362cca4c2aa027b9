"""Texts that are more than text to a model: a task that contains one would end a turn or a thought (verify).

A program, hint, argument or output is put into prompts as it is, and a tokenizer reads `<|im_end|>` there as the token
that ends a turn, whoever wrote it. Such proposals are rejected, of whatever kind, before anybody is shown them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trl_populora.sandbox import values

from .base import Proposal, Refusal, Reject, Task


THINK_TAGS = ("<think>", "</think>")
_SHORTEST = 3  # characters; some tokenizers declare a `!` or a blank special, which any program may contain


def control_texts(tokenizer: Any) -> tuple[str, ...]:
    """
    The texts of a tokenizer's special tokens, and the tags of thinking.

    Args:
        tokenizer: Added tokens that are not special, as some have for common words, do not count.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    return (*THINK_TAGS, *sorted(text for text in special - set(THINK_TAGS) if len(text.strip()) >= _SHORTEST))


def screen(found: Proposal | Task | Refusal, forbidden: Sequence[str]) -> Any:
    """`found` itself, or the refusal of a proposal or task that holds one of the texts `forbidden`."""
    if isinstance(found, Refusal) or not (text := control_text(found, forbidden)):
        return found
    return Refusal(Reject.CONTROL_TOKEN, f"it holds {text!r}, which ends a turn or a thought")


def control_text(found: Proposal | Task, forbidden: Sequence[str]) -> str:
    """The first of the texts `forbidden` that a proposal or task holds; empty if there is none."""
    return next((text for shown in _show(found) for text in forbidden if text in shown), "")


def _show(found: Proposal | Task) -> Iterator[str]:
    """What may come into a prompt, as it would stand there."""
    yield found.program
    yield found.message
    for text in (*found.inputs, *(found.outputs if isinstance(found, Task) else ())):
        yield text
        try:
            yield values.to_literal(values.decode(text))
        except ValueError:  # a user's own kind may keep any text
            continue
