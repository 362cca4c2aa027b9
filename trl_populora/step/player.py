"""Who answers prompts: the one thing that a game, held-out evaluation and cross-play need of models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Completion:
    """One sampled completion: token ids as the trainer needs them, and the text without special tokens."""

    prompt_ids: list[int]
    completion_ids: list[int]
    text: str
    logprobs: list[float] | None = None


@dataclass
class Player:
    """
    Generates for members, on one process or on several that work together.

    Args:
        generate: `(prompts, members, seeds=None) -> completions`, one completion per prompt, in order. With `seeds`,
            one per prompt, the samples depend on seeds, prompts and members alone, and no other random generator
            changes its state. Collective: all ranks must ask with the same number of prompts, unless the player
            overlaps.
        gather: Collects one picklable object per rank into a list in rank order.
        rank, world: The number of this process, from 0, and how many processes there are.
        overlaps: Whether `generate` takes up further prompts while it generates. It then also takes `follow`, a
            function that is called, in any thread but never twice at once, when some of the first prompts are
            answered: `follow({place: completion}) -> (prompts, members)` returns what is asked for next, if anything.
            Completions of further prompts come after the first ones, in the order in which they were asked for.
    """

    generate: Callable[..., list[Completion]]
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    rank: int = 0
    world: int = 1
    overlaps: bool = False
