"""How much of the context prompts have to themselves."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from trl_populora.step.player import Messages
from trl_populora.step.referee import WAY_OUT


def trained_context(model: PreTrainedModel) -> int | None:
    """Tokens that a base was trained to hold, if there is a limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def prompt_room(
    context: int | None, longest: int, tokenize: Callable[[Messages], list[int]]
) -> Callable[[Messages], int]:
    """
    What tells how many tokens of the context a prompt leaves free beside the longest completion.

    Args:
        context (`int` or `None`): Tokens that the vLLM engine or server holds, else what the base was trained on:
            transformers goes on beyond it without notice, and its completions turn to noise. `None` for a base without
            a limit, as a state-space model is.
        longest (`int`): Tokens of the longest completion, `max_completion_length`.
        tokenize (`Callable`): Token ids of a prompt.

    Raises:
        `ValueError`: If the longest completion alone fills the context.
    """
    if context is None:
        return lambda prompt: 0
    free = context - longest
    if free <= 0:
        raise ValueError(
            f"`max_completion_length={longest}` leaves no room for a prompt in a context of "
            f"{context} tokens. {WAY_OUT}"
        )
    return lambda prompt: free - len(tokenize(prompt))
