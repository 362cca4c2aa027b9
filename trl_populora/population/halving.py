"""Successive halving (arXiv 1502.07943): the worse half of the members leaves, again and again, until one is left.

    mean rewards of each generation --note--> sums --halve_every steps--> the half with the lower means leaves

This file decides who leaves. [`~trl_populora.tasks.prompts.HalvingSampler`] decides how many prompts the others get.
Both compute from the number of optimizer steps how many members are left, so they agree after a resume, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import TrainerCallback

from trl_populora.population.members import Member, Population


logger = logging.getLogger(__name__)


class Halving(TrainerCallback):
    """
    Lets the half of the members leave that has the lower mean rewards since the last halving.

    Like evolution it waits until the next step begins, so that members are evaluated and saved before they leave. All
    ranks know the same rewards, and choose the same members.

    Args:
        every: Optimizer steps between two halvings.
        members: Members at the start, a power of two.
        population: The members.
        leave: Takes a member's name, and empties its seat. Collective.
        tell: Prints a sentence beside the lines of the steps, on rank 0 only.
        evaluated: Returns the members' mean rewards in the last evaluation, by `name@version`; empty before it.
    """

    def __init__(
        self,
        every: int,
        members: int,
        population: Population,
        leave: Callable[[str], None],
        tell: Callable[[str], None],
        evaluated: Callable[[], Mapping[str, float]],
    ):
        self.every, self.members, self.population = every, members, population
        self.leave, self.tell, self.evaluated = leave, tell, evaluated
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def note(self, means: Mapping[str, float]) -> None:
        """Adds the members' mean rewards in a generation, by name. NaN, where no row was judged, does not count."""
        for name, mean in means.items():
            if not math.isnan(mean):
                self._sums[name] = self._sums.get(name, 0.0) + mean
                self._counts[name] = self._counts.get(name, 0) + 1

    def measure(self, member: Member) -> float:
        """Returns a member's mean reward since the last halving; the lowest number if it has none."""
        count = self._counts.get(member.name, 0)
        return self._sums[member.name] / count if count else -math.inf

    def on_step_begin(self, args, state, control, **kwargs):
        left = max(1, self.members // 2 ** (state.global_step // self.every))
        if len(self.population) <= left:
            return
        # Of members with equal means the one with the highest index goes.
        ranked = sorted(self.population, key=lambda member: (-self.measure(member), member.index))
        staying, leaving = ranked[:left], ranked[left:]
        if state.is_world_process_zero:
            self._tell_outcome(staying, leaving)
        for member in reversed(leaving):  # the worst first
            self.leave(member.name)
        self._sums, self._counts = {}, {}

    def _tell_outcome(self, staying: Sequence[Member], leaving: Sequence[Member]) -> None:
        """Prints who stays and who leaves. Warns if the seat decided, or if the last evaluation says otherwise."""
        stay, go = (
            ", ".join(f"{each.name} {self.measure(each):+.3f}" for each in side) for side in (staying, leaving)
        )
        self.tell(f"halving by mean reward: staying {stay}; leaving {go}")
        last, next_one = staying[-1], leaving[0]
        if self.measure(last) == self.measure(next_one):
            logger.warning(
                "Halving: %s and %s have equal mean rewards. The first of them stayed, which is chance. With more "
                "steps from one halving to the next (`halve_every`) fewer members are equal.",
                last.name,
                next_one.name,
            )
        held = self.evaluated()
        known = [each for each in (*staying, *leaving) if each.identity in held]
        best = max(known, key=lambda member: held[member.identity], default=None)  # of equals one that stays
        if best in leaving:
            logger.warning(
                "Halving: %s left, and was the best on `eval_dataset` in the last evaluation (%+.3f). Rewards in "
                "training decide who leaves. A larger `halve_every` decides by more of them.",
                best.name,
                held[best.identity],
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns plain data, ready for JSON."""
        return {"sums": self._sums, "counts": self._counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state of `state_dict`."""
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])
