"""Successive halving (arXiv 1502.07943): the worse half of the members leaves, again and again, until one is left.

    mean rewards of each generation --note--> sums --halve_every steps--> the half with the lower means leaves

This file decides who leaves. [`~trl_populora.tasks.prompts.HalvingSampler`] decides how many prompts the members that
stay get. Both compute from the number of optimizer steps how many members are left, so they agree after a resume, too.
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
        tell: Shows a line to the user.
        evaluated: Returns the members' mean rewards in the last evaluation, by `name@version`; empty before the first.
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
        self.every, self.members, self.population, self.leave = every, members, population, leave
        self.tell, self.evaluated = tell, evaluated
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def note(self, means: Mapping[str, float]) -> None:
        """Adds the members' mean rewards in a generation, by name. NaN, where no row was judged, does not count."""
        for name, mean in means.items():
            if not math.isnan(mean):
                self._sums[name] = self._sums.get(name, 0.0) + mean
                self._counts[name] = self._counts.get(name, 0) + 1

    def measure(self, member: Member) -> float:
        """Returns a member's mean reward since the last halving; minus infinity if it has none."""
        count = self._counts.get(member.name, 0)
        return self._sums[member.name] / count if count else -math.inf

    def on_step_begin(self, args, state, control, **kwargs):
        left = max(1, self.members // 2 ** (state.global_step // self.every))
        if len(self.population) <= left:
            return
        # Of members with equal means, those with the highest indices leave first.
        ranked = sorted(self.population, key=lambda member: (self.measure(member), -member.index))
        leaving, staying = ranked[: len(ranked) - left], ranked[len(ranked) - left :]
        if state.is_world_process_zero:
            out, on = (", ".join(map(self._name, each[::-1])) for each in (leaving, staying))
            since = "since the last halving" if state.global_step > self.every else "so far"
            self.tell(f"halving by mean training reward {since}: {out} leave; {on} stay")
            self._warn(state.global_step, leaving, staying)
        for member in leaving:
            self.leave(member.name)
        self._sums, self._counts = {}, {}

    def _name(self, member: Member) -> str:
        reward = self.measure(member)
        return f"{member.name} {'-' if math.isinf(reward) else format(reward, '+.3f')}"

    def _warn(self, step: int, leaving: Sequence[Member], staying: Sequence[Member]) -> None:
        """Warns if the cut went between members of equal reward, and if the best of the last evaluation leaves."""
        reward = self.measure(staying[0])
        if self.measure(leaving[-1]) == reward:
            equal = [each.name for each in self.population if self.measure(each) == reward]
            logger.warning(
                "%s have equal mean training rewards, so the halving after step %d cut between equals, by "
                "number: the highest left. Halve later (`halve_every`), or give rewards that tell members apart.",
                ", ".join(equal),
                step,
            )
        figures = self.evaluated()
        known = {each.name: figures[each.identity] for each in (*leaving, *staying) if each.identity in figures}
        if known and not any(known.get(each.name) == max(known.values()) for each in staying):
            best = max(known, key=lambda name: known[name])
            logger.warning(
                "The halving after step %d, by training rewards, lets %s leave, which had the highest reward in the "
                "last evaluation (%+.3f). Its adapter is kept in `left/` of the run's directory.",
                step,
                best,
                known[best],
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns plain data, ready for JSON."""
        return {"sums": self._sums, "counts": self._counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state of `state_dict`."""
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])
