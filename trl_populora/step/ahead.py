"""One step ahead: the next step's game is played in a thread while this step's update runs.

Its rows come from the members as they were before that update: one-step off-policy, as in asynchronous RLHF
(arXiv 2410.18252). Their own sampling log-probabilities let TRL's importance sampling correction account for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import replace
from typing import Any

from trl_populora.population.evolution import event_follows
from trl_populora.step.played import Played
from trl_populora.step.rollout import Game, play_step


logger = logging.getLogger(__name__)

MAX_STALENESS = 1  # versions; a game that was overtaken by more is dropped


def check_play_ahead(
    use_vllm: bool, vllm_mode: str, correction: bool, num_iterations: int, evolve_every: int, processes: int
) -> None:
    """
    Refuses settings under which a game cannot be played during an update; `correction` is that of importance sampling.

    Raises:
        `ValueError`: Names the setting, the reason and the way out.
    """
    mode = vllm_mode if use_vllm else None
    reasons = {
        f"use_vllm={use_vllm}, vllm_mode={vllm_mode!r}": (
            mode != "server" and "only a server generates while the trainer updates. Use `vllm_mode='server'`"
        ),
        f"{processes} processes": processes > 1 and "the collectives of game and update would meet. Use one",
        f"num_iterations={num_iterations}": (
            num_iterations > 1 and "rows would be more than one version behind. Leave it at 1"
        ),
        f"vllm_importance_sampling_correction={correction}": (
            not correction and "rows are one version behind, which it corrects. Leave it on"
        ),
        f"evolve_every={evolve_every}": (
            evolve_every == 1 and "every game would wait for newborn members. Use 2 or more, or 0 for none"
        ),
    }
    for given, reason in reasons.items():
        if reason:
            raise ValueError(f"`play_ahead=True` does not go with `{given}`: {reason}.")


class PlayAhead:
    """
    Plays the steps' games: each when its rows are asked for or, where `start` was called, during the update before.

    The trainer waits until the game has ended before it runs the optimizer step. So nothing publishes, replaces, saves
    or scores members while a game is played, and nothing else reads ratings and archive, which the game changes.

    Args:
        game ([`Game`]): What is played, on one process.
        versions (`Callable`): Returns how many versions of each adapter were published so far, by adapter.
        on (`bool`, *optional*, defaults to `False`): Whether to play ahead at all.
        evolve_every (`int`, *optional*, defaults to `0`): Optimizer steps after which members are replaced; 0: never.
    """

    def __init__(self, game: Game, versions: Callable[[], Mapping[str, int]], on: bool = False, evolve_every: int = 0):
        self.game, self.versions, self.on, self.evolve_every = game, versions, on, evolve_every
        self._playing: futures.Future[Played] | None = None
        self._pending: Played | None = None
        self._done, self._sampled_from = 0, dict[str, int]()
        self._stop = threading.Event()

    def start(self, done: int, max_steps: int) -> None:
        """
        Begins the game that follows `done` optimizer steps, unless the run ends there or members are replaced before.
        """
        if not self.on or done >= max_steps or event_follows(done, self.evolve_every):
            return
        self._done, self._sampled_from, self._stop = done, dict(self.versions()), threading.Event()
        player = replace(self.game.player, generate=_until(self._stop, self.game.player.generate))
        pool = futures.ThreadPoolExecutor(1, "play ahead")
        self._playing = pool.submit(play_step, replace(self.game, player=player), done)
        pool.shutdown(wait=False)

    def wait(self) -> dict[str, float]:
        """Waits for a game that is being played and raises what went wrong in it; returns the seconds waited."""
        start = time.perf_counter()
        if self._playing is not None:
            self._pending = self._playing.result()
            self._playing = None
        return {"wait": time.perf_counter() - start} if self.on else {}

    def play(self, done: int) -> Played:
        """
        The game that follows `done` optimizer steps: the one that was played ahead, or else one played now.

        Its metric `ahead/staleness` tells how many versions its members have gone through since its rows were sampled,
        of the member with most. `seconds["hidden"]` is minus the seconds of its phases: they ran during the update
        before, and would else count twice.
        """
        self.wait()
        played, self._pending, staleness = self._pending, None, 0
        if played is not None:
            staleness = self._staleness(played)
            if staleness > MAX_STALENESS or done != self._done:
                _tell_dropped(self._done, f"its members are {staleness} versions behind at step {done + 1}")
                played, staleness = None, 0
            else:
                played.seconds["hidden"] = -sum(played.seconds.values())
        played = played or play_step(self.game, done)
        if self.on:
            played.metrics["ahead/staleness"] = float(staleness)
        return played

    def _staleness(self, played: Played) -> int:
        adapters, now = {self.game.population.adapter(name) for name in played.members}, self.versions()
        return max(now.get(name, 0) - self._sampled_from.get(name, 0) for name in adapters)

    def drop(self, reason: str) -> None:
        """Leaves the rows of a game that was played ahead out of the training; its ratings and tasks stay."""
        self.wait()
        if self._pending is not None:
            _tell_dropped(self._done, reason)
        self._pending = None

    def close(self) -> None:
        """Stops a game that is being played, after the completions that it waits for, and forgets it."""
        self._stop.set()
        if self._playing is not None:
            futures.wait([self._playing])
        self._playing = self._pending = None

    def state_dict(self) -> dict[str, Any] | None:
        """The game that was played ahead, as plain data; `None` if there is none."""
        self.wait()
        return None if self._pending is None else {"done": self._done, "played": self._pending.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores what `state_dict` returned. vLLM will get all members anew, so staleness counts from now."""
        self._pending = None if state is None else Played.from_state(state["played"])
        if state is not None:
            self._done, self._sampled_from = state["done"], dict(self.versions())
            if not self.on:
                self.drop("`play_ahead` is off now")


def _tell_dropped(done: int, reason: str) -> None:
    logger.warning(
        "The rows of step %d, which were played ahead, are dropped: %s. Ratings and tasks of that game stay.",
        done + 1,
        reason,
    )


def _until(stop: threading.Event, generate: Callable) -> Callable:
    """`generate`, which raises once `stop` is set."""

    def generate_or_stop(*arguments: Any, **options: Any) -> Any:
        if stop.is_set():
            raise RuntimeError("The trainer was closed while a game was played ahead.")
        return generate(*arguments, **options)

    return generate_or_stop
