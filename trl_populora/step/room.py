"""How much of the context prompts have to themselves."""

from __future__ import annotations

from collections.abc import Callable

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl_populora.step.player import Messages
from trl_populora.step.referee import WAY_OUT


def trained_context(model: PreTrainedModel) -> int | None:
    """Tokens that a base was trained to hold, if there is a limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def prompt_room(
    context: int | None,
    longest: int | None,
    tokenize: Callable[[Messages], list[int]],
    tokenizer: PreTrainedTokenizerBase,
) -> Callable[[Messages], int]:
    """
    What tells how many tokens of the context a prompt leaves free beside the longest completion.

    Args:
        context (`int` or `None`): Tokens that the vLLM engine or server holds, else what the base was trained on:
            transformers goes on beyond it without notice, and its completions turn to noise. `None` for a base without
            a limit, as a state-space model is.
        longest (`int` or `None`): Tokens of the longest completion, `max_completion_length`.
        tokenize (`Callable`): Token ids of a prompt.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Whose chat template it is.

    Raises:
        `ValueError`: If the longest completion alone fills the context; by what is returned, if the chat template
            takes no such conversation.
    """
    if context is not None and context - (longest or 1) <= 0:
        raise ValueError(
            f"`max_completion_length={longest}` leaves no room for a prompt in a context of "
            f"{context} tokens. {WAY_OUT}"
        )

    def room(prompt: Messages) -> int:
        if context is None:
            return 0
        try:
            return context - (longest or 1) - len(tokenize(prompt))
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in prompt)
            raise ValueError(
                f"The chat template of {tokenizer.name_or_path!r} refuses a conversation of {roles} ({error}). "
                "`prompt_style='chat'` with `shots=0` asks in a single user turn, or pass a tokenizer with another "
                "`chat_template`."
            ) from error

    return room
