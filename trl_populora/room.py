"""What fits into the base's context, where a prompt stands beside the longest completion (phases 2 and 4).

Nothing is ever cut: a proposal prompt goes without references that it has no room for, and a task that could not be put
to a student is none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trl_populora.tasks.base import Task, TaskKind


if TYPE_CHECKING:
    from trl_populora.populora_trainer import PopuLoRATrainer
    from trl_populora.rollout import Game, Messages

logger = logging.getLogger(__name__)

WAY_OUT = "Lower `max_completion_length`, raise `vllm_max_model_length` if it is set, or choose a base with a longer context."


def make_room(trainer: PopuLoRATrainer) -> Callable[[Messages], int]:
    """
    What tells how many tokens of the context a prompt leaves free beside the longest completion. Collective.

    The context is what the vLLM engine or server holds, else what the base was trained on: transformers goes on beyond it
    without notice, and its completions turn to noise.

    Raises:
        `ValueError`: If the longest completion alone fills the context.
    """
    if trainer.use_vllm:
        context = trainer.vllm_generation.context_length()
    else:
        config = trainer.model.get_base_model().config
        context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is None:  # as of a state-space model
        return lambda prompt: 0
    free = context - (trainer.args.max_completion_length or 1)
    if free <= 0:
        raise ValueError(
            f"`max_completion_length={trainer.args.max_completion_length}` leaves no room for a prompt in a context of "
            f"{context} tokens. {WAY_OUT}"
        )

    def room(prompt: Messages) -> int:
        (ids,), _, _ = trainer._tokenize_prompts([prompt])
        return free - len(ids)

    return room


def proposal_prompt(game: Game, kind: TaskKind, shown: Sequence[Task]) -> tuple[Messages, list[Task]]:
    """
    A proposal prompt that fits, and the references that are left in it.

    Raises:
        `ValueError`: If it does not even fit without references.
    """
    kept = list(shown)
    prompt = kind.proposal_prompt(kept, game.style)
    if game.room(prompt) >= 0:
        return prompt, kept
    # The longest go first, so that as many as possible stay. A kind that writes no program needs one to be about.
    by_room = sorted(shown, key=lambda task: game.room(kind.proposal_prompt([task], game.style)))
    for longest in by_room if kind.writes_program else by_room[:-1]:
        kept.remove(longest)
        prompt = kind.proposal_prompt(kept, game.style)
        if game.room(prompt) >= 0:
            return prompt, kept
    raise ValueError(
        f"The shortest proposal prompt of {kind.name} is {-game.room(prompt)} tokens longer than the context has room for "
        f"beside a completion. {WAY_OUT}"
    )


def solving_prompt(game: Game, task: Task) -> Messages:
    """
    The prompt that puts a task to a student.

    Raises:
        `ValueError`: If it does not fit; a task that [`is_too_long`] has passed does.
    """
    prompt = game.kinds[task.kind].solving_prompt(task, game.style)
    if (missing := -game.room(prompt)) > 0:
        raise ValueError(
            f"The prompt of a {task.kind} task is {missing} tokens longer than the context has room for beside a "
            f"completion. {WAY_OUT} Its program is {task.program!r:.200}."
        )
    return prompt


def is_too_long(game: Game, task: Task) -> bool:
    """Whether a task could not be put to a student, or to a teacher who needs a known program."""
    prompts = [game.kinds[task.kind].solving_prompt(task, game.style)] if task.kind in game.kinds else []
    prompts += [
        kind.proposal_prompt([task], game.style)
        for kind in game.kinds.values()
        if not kind.writes_program and task.kind in kind.reference_kinds
    ]
    return any(game.room(prompt) < 0 for prompt in prompts)


def leave_out_long(game: Game) -> None:
    """Takes tasks that do not fit out of the archive: given ones, or those of a run with shorter completions."""
    entries = list(game.archive.entries())
    kept = [entry for entry in entries if not is_too_long(game, entry[0])]
    if left_out := len(entries) - len(kept):
        game.archive.restore(kept, game.archive.coverage.state_dict())
        logger.warning(
            "%d of %d tasks of the archive are left out: they do not fit into the context beside a completion. %s",
            left_out,
            len(entries),
            WAY_OUT,
        )
