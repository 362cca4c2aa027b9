"""What a user's own functions say of a step: an advantage estimator for a role, and further metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from trl_populora.tasks.own import find_function


Metrics = Callable[[Sequence[Mapping[str, Any]]], dict[str, float]]


def estimate_advantages(
    path: str,
    option: str,
    rewards_R: torch.Tensor,
    members_R: torch.Tensor,
    kinds_R: torch.Tensor,
    groups_R: torch.Tensor,
) -> torch.Tensor:
    """
    Advantages of the rows of one role, over all ranks, by a user's own function of these four tensors.

    A function that compares rows of one member alone keeps joint training equal to training each member alone.

    Args:
        path (`str`): Its name, `module:function`.
        option (`str`): The setting, for errors.
        rewards_R (`torch.Tensor`): NaN on rows of the other role, which the function is not shown; their advantage is
            0. It is given double precision on the CPU, so that no sum depends on a device.
        members_R, kinds_R, groups_R (`torch.Tensor`): Member, kind of task and prompt of each row, as integers.

    Raises:
        `RuntimeError`: If the function raises.
        `ValueError`: If there is none, or it gives something else than one finite number per row.
    """
    columns = [column.detach().cpu() for column in (rewards_R, members_R, kinds_R, groups_R)]
    own_R = ~columns[0].isnan()
    rewards, *others = (column[own_R] for column in columns)
    given = find_function(path, option)(rewards.to(torch.float64), *others)
    if not isinstance(given, torch.Tensor) or given.shape != rewards.shape:
        what = tuple(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
        raise ValueError(f"`{option}={path}` must give a tensor of shape {tuple(rewards.shape)}, got {what}.")
    if not given.isfinite().all():
        raise ValueError(f"`{option}={path}` must give finite advantages, got {given[~given.isfinite()][0].item()}.")
    advantages = torch.zeros(own_R.shape, dtype=torch.float64)
    advantages[own_R] = given.to(torch.float64)
    return advantages.to(device=rewards_R.device, dtype=rewards_R.dtype)


def find_metrics(paths: Sequence[str]) -> list[Metrics]:
    """
    A user's own metrics, each a function of the records of a step's rows, over all ranks.

    Raises:
        `ValueError`: If there is no such function; by what is returned, if it gives anything but numbers by name.
    """
    return [_find_metric(path) for path in paths]


def _find_metric(path: str) -> Metrics:
    ask = find_function(path, "own_metrics")

    def tell(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        told = ask(records)
        if not isinstance(told, dict) or not all(
            isinstance(key, str) and isinstance(value, Real) for key, value in told.items()
        ):
            raise ValueError(
                f"`own_metrics={path}` must give numbers by name, NaN where there is none, got {told!r:.80}."
            )
        return {key: float(value) for key, value in told.items()}

    return tell


def add_metrics(metrics: dict[str, float], told: Mapping[str, float]) -> None:
    """
    Adds a user's own metrics to those of the step.

    Raises:
        `ValueError`: If one has the name of another.
    """
    if taken := sorted(told.keys() & metrics.keys()):
        raise ValueError(f"`own_metrics` gives {taken[0]!r}, which is another metric's name. Choose another one.")
    metrics.update(told)
