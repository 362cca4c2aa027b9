"""Which member every row of the forward in progress belongs to, as data owned by the trainer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch


BASE = -1  # the index of rows that only the frozen base model computes
BASE_NAME = "base"  # what it is called where members are named


class Route:
    """
    The rows of one forward, sorted out by member.

    Args:
        rows: Member index per row, shape `[R]`; `-1` sends the row to the base model alone.
        factors: One factor per row, shape `[R]`, equal for all rows of a member: the member's gradients are multiplied
            by it (see `trl_populora.step.advantages.member_factors`). Rows of the base are ignored.

    Attributes:
        present (`tuple[int, ...]`): Members with at least one row, ascending.
        counts (`tuple[int, ...]`): Rows of each present member.
        factors (`tuple[float, ...]` or `None`): Gradient factor of each present member.
        ordered (`bool`): Whether the rows already are the present members' segments one after the other.

    Raises:
        `ValueError`: If an index is below -1, the lengths differ, or one member is given two factors.
    """

    def __init__(self, rows: Sequence[int], factors: Sequence[float] | None = None):
        self.rows = tuple(rows)
        if self.rows and min(self.rows) < BASE:
            raise ValueError(f"`rows` must hold member indices >= 0, or -1 for the base model, got {min(self.rows)}.")
        grouped: dict[int, list[int]] = {}
        for position, member in enumerate(self.rows):
            if member != BASE:
                grouped.setdefault(member, []).append(position)
        self.present = tuple(sorted(grouped))
        self.counts = tuple(len(grouped[member]) for member in self.present)
        self._order = [position for member in self.present for position in grouped[member]]
        self.ordered = self._order == list(range(len(self.rows)))
        self.factors = None if factors is None else self._member_factors(factors, grouped)
        self._tensors: dict[Hashable, torch.Tensor] = {}

    def _member_factors(self, factors: Sequence[float], grouped: dict[int, list[int]]) -> tuple[float, ...]:
        if len(factors) != len(self.rows):
            raise ValueError(f"`factors` must have one value per row, got {len(factors)} for {len(self.rows)} rows.")
        for member, positions in grouped.items():
            values = {factors[position] for position in positions}
            if len(values) > 1:
                raise ValueError(
                    f"All rows of a member must carry one factor, got {sorted(values)} for member {member}. Compute "
                    "them with `trl_populora.step.advantages.member_factors`."
                )
        return tuple(float(factors[grouped[member][0]]) for member in self.present)

    @property
    def equal(self) -> bool:
        """Whether all present members have the same number of rows."""
        return len(set(self.counts)) == 1

    def order(self, device: torch.device) -> torch.Tensor:
        """Positions of the members' rows, grouped by member, shape `[R - base rows]`."""
        return self.keep(("order", device), lambda: torch.tensor(self._order, dtype=torch.long).to(device))

    def factor_tensor(self, device: torch.device) -> torch.Tensor:
        """Gradient factors shaped to scale stacked weights, `[present, 1, 1]`, fp32."""
        return self.keep(("factors", device), lambda: torch.tensor(self.factors).view(-1, 1, 1).to(device))

    def keep(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `make` gave when this key was asked for first: every layer asks, in every forward of the route."""
        if key not in self._tensors:
            self._tensors[key] = make()
        return self._tensors[key]


class Router:
    """
    Holds the route of the forward in progress. The trainer owns it, every routed layer reads it.

    The route has to stay set until the backward is done, because gradient checkpointing runs the forward again during
    the backward. `rows_of` is for forwards without a backward (generation, old and reference log-probabilities).
    """

    def __init__(self) -> None:
        self.route: Route | None = None
        self._only: int | None = None

    def set(self, rows: Sequence[int] | torch.Tensor, factors: Sequence[float] | torch.Tensor | None = None) -> None:
        """Routes the coming forwards: `rows` and `factors` as in [`Route`], each of shape `[R]`."""
        self.route = Route(_as_list(rows), None if factors is None else _as_list(factors))

    def clear(self) -> None:
        """Forgets the route: a forward without one is an error."""
        self.route = None

    @property
    def rows(self) -> tuple[int, ...] | None:
        """Member index per row of the forward in progress, or `None` when no route is set."""
        return None if self.route is None else self.route.rows

    def route_for(self, rows: int) -> Route | None:
        """The route of a batch of so many rows: the one that is set, or the one member of `only`."""
        if self.route is None and self._only is not None:
            return Route([self._only] * rows)
        return self.route

    @contextmanager
    def only(self, member: int) -> Iterator[Router]:
        """Routes every row of the forwards inside the block to one member, however many rows there are."""
        previous, self._only = self._only, member
        try:
            yield self
        finally:
            self._only = previous

    @contextmanager
    def rows_of(self, rows: Sequence[int] | torch.Tensor) -> Iterator[Router]:
        """Routes the forwards inside the block and puts the previous route back afterwards."""
        previous, self.route = self.route, Route(_as_list(rows))
        try:
            yield self
        finally:
            self.route = previous


def _as_list(values: Sequence | torch.Tensor) -> list:
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)
