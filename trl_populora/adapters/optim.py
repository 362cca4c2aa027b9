"""One optimizer life per member: its parameter group, its gradient norm, its right to stand still."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .weights import is_zero_parameter, member_parameters


def member_param_groups(model: nn.Module, rates: Mapping[str, float], weight_decay: float = 0.0) -> list[dict]:
    """
    One parameter group per member, in the order of `rates`.

    Args:
        model: The model.
        rates: The members' learning rates.
        weight_decay: Weight decay of all members.
    """
    return [
        {
            "params": list(member_parameters(model, name).values()),
            "lr": rate,
            "weight_decay": weight_decay,
            "member": name,
        }
        for name, rate in rates.items()
    ]


@torch.no_grad()
def clip_member_grad_norms(
    model: nn.Module, names: Sequence[str], max_norm: float, loss_scale: float = 1.0
) -> dict[str, float]:
    """
    Clips the gradients of each member by that member's own norm, with the rule of `torch.nn.utils.clip_grad_norm_`.

    A norm over all adapters would let the loudest member decide how far the others may move. Under ZeRO it has to run
    between backward and step (see [`MemberClipper`]); it is collective there and under FSDP.

    Args:
        model: The model after the backward, wrapped or not.
        names: The members.
        max_norm: Largest norm per member; 0 or below only measures.
        loss_scale: What the gradients were, and stay, multiplied by.

    Returns:
        `dict[str, float]`: Norm of each member before clipping, without the scale; `0.0` without gradients.
    """
    gradients = {name: _local_gradients(model, name) for name in names}
    first = next(iter(member_parameters(model, names[0]).values()))
    squares = torch.stack([_square_sum(gradients[name], first.device) for name in names])
    if is_zero_parameter(first):
        torch.distributed.all_reduce(squares)
    norms = squares.sqrt() / loss_scale
    if max_norm > 0:
        factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)
        for name, factor in zip(names, factors.tolist(), strict=True):
            for gradient in gradients[name]:
                gradient.mul_(factor)
    return dict(zip(names, norms.tolist(), strict=True))


def _local_gradients(model: nn.Module, name: str) -> list[torch.Tensor]:
    """Gradient tensors of a member that can be changed in place: whole ones, or this rank's shards under ZeRO."""
    parameters = member_parameters(model, name).values()
    if not is_zero_parameter(next(iter(parameters))):
        return [parameter.grad for parameter in parameters if parameter.grad is not None]
    if hasattr(next(iter(parameters)), "ds_id"):
        return [_stage3_gradient(parameter) for parameter in parameters]
    # A parameter without a mapping lies wholly in another rank's partition.
    owned = [parameter for parameter in parameters if parameter._hp_mapping is not None]
    return [parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group) for parameter in owned]


def _stage3_gradient(parameter: nn.Parameter) -> torch.Tensor:
    return parameter._z3_optimizer._get_fp32_grad_state_partition(parameter, release_swap_buffers=False)[0]


def _square_sum(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not gradients:
        return torch.zeros((), device=device)
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(gradients)])
    total = torch.linalg.vector_norm(norms.full_tensor() if isinstance(norms, DTensor) else norms)
    return total.square().to(device)


def withhold_gradients(model: nn.Module, names: Sequence[str]) -> None:
    """
    Takes the gradients of members that have no rows in this step away, so that the optimizer leaves them alone.

    With zero gradients instead, Adam would still move them by their momentum and advance their `step`. Call it on
    every rank with the same names, after the last backward of the step.

    Raises:
        `RuntimeError`: Under ZeRO, which always steps a whole parameter group.
    """
    for name in names:
        for parameter in member_parameters(model, name).values():
            if is_zero_parameter(parameter):
                raise RuntimeError(
                    f"Members {list(names)} have no rows in this optimizer step, and ZeRO cannot leave them out of "
                    "it: their momentum would move them. Use DDP, or numbers of teachers and students with which "
                    "everyone plays in every step: as many students as teachers, or a divisor of their number."
                )
            parameter.grad = None


class MemberClipper:
    """
    Clips every member by its own norm before each optimizer step, under DeepSpeed as elsewhere.

    Args:
        names: The members.
        max_norm: Largest norm per member; 0 or below only measures.
    """

    def __init__(self, names: Sequence[str], max_norm: float):
        self.names, self.max_norm = names, max_norm
        self._found_inside: dict[str, float] | None = None  # in the last step of a DeepSpeed engine

    def clip_inside(self, engine) -> None:
        """
        Lets a `DeepSpeedEngine` clip per member from now on. It runs backward, clipping and step in one call, so the
        place between them is reached by going in front of `engine.step`; its own, joint clipping is switched off.
        """
        if self._found_inside is not None:
            return
        self._found_inside, step = {}, engine.step
        engine.optimizer.clip_grad = 0.0

        def clip_and_step(*args, **kwargs):
            # In fp16 gradients are scaled here still: DeepSpeed unscales them in its step.
            scale = engine.optimizer.loss_scale
            self._found_inside = clip_member_grad_norms(engine, self.names, self.max_norm, scale)
            return step(*args, **kwargs)

        engine.step = clip_and_step

    def clip(self, model: nn.Module, busy: Container[str]) -> dict[str, float]:
        """
        Each member's norm before clipping. Those that are not `busy` in this step lose their gradients (see
        [`withhold_gradients`]).
        """
        norms = self._found_inside
        if norms is None:
            norms = clip_member_grad_norms(model, self.names, self.max_norm)
        withhold_gradients(model, [name for name in self.names if name not in busy])
        return norms
