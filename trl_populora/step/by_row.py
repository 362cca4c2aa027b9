"""Update: one `beta`, `epsilon` and `temperature` per row, where TRL's loss has one for all rows of a forward.

    beta of each row's member, [B]       ---PerRow--------> TRL's loss
    epsilon of each row's member, [B, 1] -----------------> TRL's loss, which takes a column as it takes a number
    temperatures of the forward's rows, [N] -divide_scores-> TRL's fused head, called once per temperature

So members with different settings share micro-batches, as members with equal settings do.

Shapes: B rows of a micro-batch, N rows of the forward, L tokens of its longest row, K tokens that the head scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from trl.trainer import utils as trl_utils


class PerRow:
    """
    Takes the place of the number `beta` in TRL's loss, and has one value per row. TRL's loss asks whether `beta` is 0,
    and multiplies by `beta`.

    Args:
        values: `beta` of each row, `[B]`.
    """

    def __init__(self, values: torch.Tensor):
        self.values = values[:, None]

    def __ne__(self, other: object) -> bool:
        return True  # TRL wants one answer for all rows, and a tensor would give one per row

    def __mul__(self, per_token: torch.Tensor) -> torch.Tensor:
        return self.values * per_token


def divide_scores(model: Callable[..., Any], temperatures: Sequence[float]) -> Callable[..., Any]:
    """
    Wraps a model with TRL's fused head, so that the head divides the scores of each row by the row's temperature.

    TRL's head knows one temperature for all tokens. Here the head is called once per temperature, with the tokens of
    that temperature alone. The layers below the head still compute all rows together.

    Args:
        model: The model. It gets the arguments that TRL's `_get_per_token_logps_and_entropies` gives a model.
        temperatures: One per row of the forward, `[N]`.
    """

    def call(**inputs: Any) -> Any:
        shifted = inputs.get("shift_labels")
        scored = (inputs["labels"][:, 1:] if shifted is None else shifted) != -100
        by_row = torch.tensor(temperatures, device=scored.device)[:, None].expand(scored.shape)
        head = trl_utils._ChunkedLogProbFunction
        trl_utils._ChunkedLogProbFunction = _HeadByTemperature(head, by_row, scored, {*temperatures})
        try:
            return model(**inputs)
        finally:
            trl_utils._ChunkedLogProbFunction = head

    return call


class _HeadByTemperature:
    """
    Stands in the place of TRL's autograd function that scores tokens.

    Args:
        head: TRL's function.
        temperatures: Temperature of each token, `[N, L]`.
        scored: Which tokens have a label, `[N, L]`.
        values: Each temperature that occurs, once.
    """

    def __init__(self, head: Any, temperatures: torch.Tensor, scored: torch.Tensor, values: set[float]):
        self.head, self.temperatures, self.scored, self.values = head, temperatures, scored, values

    def apply(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: Any, labels: torch.Tensor, _: float, *others: Any
    ) -> tuple[torch.Tensor | None, ...]:
        """
        Returns the tensors that TRL's function would return, each `[K]`. K counts the tokens that have a label; or all
        tokens, if TRL scores tokens without a label, too.
        """
        whole = len(hidden) == self.scored.numel()
        temperatures = (self.temperatures.flatten() if whole else self.temperatures[self.scored]).to(hidden.device)
        places, parts = [], []
        for value in sorted(self.values):
            own = (temperatures == torch.tensor(value, device=hidden.device)).nonzero().squeeze(1)
            places.append(own)
            parts.append(self.head.apply(hidden[own], weight, bias, labels[own], value, *others))
        back = torch.cat(places).argsort()
        return tuple(None if each[0] is None else torch.cat(each)[back] for each in zip(*parts, strict=True))
