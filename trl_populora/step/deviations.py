"""By how much a teacher's rewards usually differ: what its advantages may be divided by (update).

The deviation of one step's few rewards is small where these are nearly equal, and dividing by it makes as much of a
hundredth as of one half. A member's own memory of it is steadier, and depends on its rows alone, so that joint
training stays equal to training each member alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trl_populora.population.members import Population
from trl_populora.step.advantages import STD_EPSILON


MEMORY = 0.9  # of a deviation from one step to the next: ten steps or so count


class RunningDeviations:
    """
    The mean square of each teacher's advantages before scaling, over the last steps. The same on every rank.

    Args:
        population ([`Population`]): A replaced member is forgotten.
        memory (`float`, *optional*, defaults to `0.9`): Weight of what was before, once that is ten steps or so.
    """

    def __init__(self, population: Population, memory: float = MEMORY):
        self.population, self.memory = population, memory
        self._seen: dict[str, tuple[int, float]] = {}  # by identity: steps, mean square

    def scale(self, advantages_R: torch.Tensor, members_R: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """
        Learns from one step's rows and divides each by its teacher's deviation.

        Args:
            advantages_R (`torch.Tensor`): Rewards less their baseline, of shape `[R]`.
            members_R (`torch.Tensor`): Member indices.
            rows_R (`torch.Tensor`): Which rows are proposals; the others stay as they are.

        Returns:
            `torch.Tensor`: Of shape `[R]`.
        """
        scaled = advantages_R.double().cpu()  # as in `compute_advantages`
        members, rows = members_R.cpu(), rows_R.cpu()
        known, self._seen = self._seen, {}
        for member in self.population.teachers:
            own = rows & (members == member.index)
            steps, square = known.get(member.identity, (0, 0.0))
            if own.any():
                rate = max(1 / (steps + 1), 1 - self.memory)
                steps, square = steps + 1, square + rate * (float(scaled[own].square().mean()) - square)
                scaled[own] /= square**0.5 + STD_EPSILON
            if steps:
                self._seen[member.identity] = steps, square
        return scaled.to(advantages_R)

    def state_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {identity: list(seen) for identity, seen in self._seen.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._seen = {identity: (steps, square) for identity, (steps, square) in state.items()}
