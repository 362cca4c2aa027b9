"""
Mutations and crossovers: pure functions on LoRA factors, for the evolution phase (PopuLoRA, arXiv 2605.16727, weight
space operators).

An adapter comes and goes as `dict[str, Tensor]` with PEFT's keys: `<module>.lora_A.weight` (`[r, in]`) and
`<module>.lora_B.weight` (`[out, r]`). What a module does is the product B A, so operators act on the product, through
its core (see [`trl_populora.population.factors`]), wherever a factor-wise one would mix coordinates that mean
different things in two parents.

A mutation is called as `fn(factors, generator, strength=1.0, ...)`, a crossover as `fn(better, worse, generator,
strength=1.0, ...)`. Strength 1 is the operator as published, 0 gives the (better) parent back, and halving it moves
the child closer. The results have the keys, shapes and dtypes of the (better) parent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from peft.utils.merge_utils import task_arithmetic
from peft.utils.merge_utils import ties as peft_ties
from torch import Generator, Tensor

from trl_populora.options import find_function, is_own, list_choices
from trl_populora.population.factors import (
    RELATIVE_ZERO,
    Factors,
    compute_norms,
    compute_product_norms,
    find_singular_bases,
    on_cores,
    pair_factors,
)


def _check_arguments(strength: float, parents: Sequence[Factors]) -> None:
    if not strength >= 0:
        raise ValueError(f"`strength` must be non-negative, got {strength}.")
    first, *others = parents
    for other in others:
        shapes, other_shapes = ({key: tuple(value.shape) for key, value in p.items()} for p in (first, other))
        if shapes != other_shapes:
            key = next(k for k in {**shapes, **other_shapes} if shapes.get(k) != other_shapes.get(k))
            raise ValueError(
                f"Parents must have the same modules and ranks, but {key!r} is {shapes.get(key, 'absent')} in one and "
                f"{other_shapes.get(key, 'absent')} in the other. Cross members of one population only."
            )


def _copy(factors: Factors) -> Factors:
    return {key: value.clone() for key, value in factors.items()}


def _operator(make: Callable[..., Factors]) -> Callable[..., Factors]:
    """Checks the arguments, and gives the (better) parent back, bit for bit, at strength 0."""

    @wraps(make)
    def checked(*parents_and_generator: Any, strength: float = 1.0, **options: Any) -> Factors:
        *parents, generator = parents_and_generator
        _check_arguments(strength, parents)
        return make(*parents, generator, strength, **options) if strength else _copy(parents[0])

    return checked


def _core_operator(combine: Callable[..., Tensor]) -> Callable[..., Factors]:
    """
    An operator on the products, from what it makes of the parents' cores: `combine(cores, generator, strength, ...)`.

    With `keep_norm`, the default, each module is rescaled to the parents' norm (see [`_weigh_norms`]).
    """

    @wraps(combine)
    def operator(*given: Any, keep_norm: bool = True, **options: Any) -> Factors:
        *parents, generator, strength = given
        weights = _weigh_norms(strength) if len(parents) > 1 else (1.0,)
        return on_cores(
            parents, lambda cores: combine(cores, generator, strength, **options), weights if keep_norm else None
        )

    return _operator(operator)


def _weigh_norms(strength: float) -> tuple[float, float]:
    """Two parents' weights in the child's norm: the mean of the two at strength 1, the better one's towards 0."""
    part = min(strength / 2, 1.0)
    return 1 - part, part


def _draw_normal(shape: Sequence[int], generator: Generator, like: Tensor) -> Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device).to(like)


def _draw_uniform(shape: Sequence[int], generator: Generator, like: Tensor) -> Tensor:
    return torch.rand(*shape, generator=generator, device=generator.device).to(like)


def _weigh(cores: list[Tensor], weights: Sequence[float]) -> Tensor:
    return task_arithmetic(cores, torch.tensor(weights, dtype=cores[0].dtype, device=cores[0].device))


# Mutations


def _add_noise(factors: Factors, pairs: list[tuple[str, str]], generator: Generator, scale: float, keep_norm: bool):
    """Gaussian noise at `scale` times each tensor's own root mean square, on the modules in `pairs`."""
    child = _copy(factors)
    for pair in pairs:
        parent = {key: factors[key].float() for key in pair}
        noisy = {}
        for key, value in parent.items():
            noise = _draw_normal(value.shape, generator, value)
            noisy[key] = torch.add(value, noise, alpha=scale * float(value.square().mean().sqrt()))
        if keep_norm:
            before, after = compute_product_norms(parent), compute_product_norms(noisy)
            noisy[pair[1]] *= float(before / after) if after > 0 else 1.0
        child.update({key: noisy[key].to(factors[key].dtype) for key in pair})
    return child


@_operator
def full_gaussian(
    factors: Factors, generator: Generator, strength: float, *, scale: float = 0.15, keep_norm: bool = True
) -> Factors:
    """
    Gaussian noise on every tensor, relative to the tensor's own size, so that A and B are disturbed alike.

    Args:
        scale: Noise over root mean square of the tensor; the cosine to the parent is about 1 / (1 + scale^2). The
            paper gives no value; the peer package's default. A zero tensor stays zero.
        keep_norm: Rescale each module to the parent's norm, which independent noise would otherwise only ever raise.
    """
    return _add_noise(factors, pair_factors(factors), generator, strength * scale, keep_norm)


@_operator
def layer_gaussian(
    factors: Factors,
    generator: Generator,
    strength: float,
    *,
    scale: float = 0.15,
    fraction: float = 1 / 3,
    keep_norm: bool = True,
) -> Factors:
    """
    [`full_gaussian`] on a random `fraction` of the modules (a third in the paper, at least one); the others are kept.
    """
    pairs = pair_factors(factors)
    order = torch.randperm(len(pairs), generator=generator, device=generator.device).tolist()
    chosen = order[: max(1, round(fraction * len(pairs)))]
    return _add_noise(factors, [pairs[index] for index in sorted(chosen)], generator, strength * scale, keep_norm)


def rotation(noise: Tensor, scale: float) -> Tensor:
    """
    Exact rotations (`[..., r, r]`, fp64) from square Gaussian noise: exp(K) with K skew.

    The entries of K have standard deviation scale / sqrt(r), which makes the turn independent of the rank: a direction
    moves by an angle of about `scale`. The first-order I + K is no rotation and loses more with every rank.
    """
    skew = (noise.double() - noise.double().mT) / math.sqrt(2)
    return torch.linalg.matrix_exp(skew * (scale / math.sqrt(noise.shape[-1])))


@_core_operator
def svd_perturb(cores: list[Tensor], generator: Generator, strength: float, *, scale: float = 0.1) -> Tensor:
    """
    Scale the singular values log-normally and rotate both singular bases within their spaces.

    Args:
        scale: Standard deviation of the log of the factors, and angle of the rotations (see [`rotation`]).
    """
    (core,) = cores
    left, values, right = torch.linalg.svd(core)
    turns = [rotation(_draw_normal(core.shape, generator, core), strength * scale) for _ in range(2)]
    values = values * torch.exp(strength * scale * _draw_normal(values.shape, generator, values))
    return (left @ turns[0] * values.unsqueeze(-2)) @ (turns[1].mT @ right)


@_operator
def component_mask(factors: Factors, generator: Generator, strength: float, *, fraction: float = 0.3) -> Factors:
    """
    Drop a random `fraction` of each module's singular components (about 30 % in the paper) and keep the rest as it is.

    The freed directions restart like a fresh LoRA: their row of A stays alive and their part of B is zero.
    """

    def mask(cores: list[Tensor]) -> Tensor:
        (core,) = cores
        left, values, right = torch.linalg.svd(core)
        drop = min(round(strength * fraction * values.shape[-1]), values.shape[-1])
        rank_of = _draw_uniform(values.shape, generator, values).argsort(-1).argsort(-1)
        return (left * (values * (rank_of >= drop)).unsqueeze(-2)) @ right

    return on_cores([factors], mask, norm_of=None)


# Crossovers


@_operator
def clone(better: Factors, worse: Factors, generator: Generator, strength: float) -> Factors:
    """The better parent again: exploitation alone, as in population-based training (Jaderberg et al., 2017)."""
    return _copy(better)


@_core_operator
def average(cores: list[Tensor], generator: Generator, strength: float) -> Tensor:
    """Mean of the two products (weight `strength / 2` on the worse), truncated to rank r."""
    return _weigh(cores, (1 - strength / 2, strength / 2))


@_core_operator
def slerp(cores: list[Tensor], generator: Generator, strength: float) -> Tensor:
    """Point on the great circle between the two products of each module, half-way at strength 1."""
    norms = [compute_norms(core) for core in cores]
    units = [torch.where(norm > 0, core / norm, 0.0) for core, norm in zip(cores, norms, strict=True)]
    angle = torch.acos((units[0] * units[1]).sum((-2, -1), keepdim=True).clamp(-1, 1))
    part = strength / 2
    # Parallel products have no great circle of their own; the chord is the same path there.
    flat = angle.sin() < 1e-6
    weights = [
        torch.where(flat, w, torch.sin(w * angle) / torch.where(flat, 1.0, angle.sin())) for w in (1 - part, part)
    ]
    length = (1 - part) * norms[0] + part * norms[1]
    return length * (weights[0] * units[0] + weights[1] * units[1])


@_operator
def extrapolate(
    better: Factors,
    worse: Factors,
    generator: Generator,
    strength: float,
    *,
    reach: float = 0.5,
    keep_norm: bool = True,
) -> Factors:
    """
    From the worse parent through the better and beyond: worse + factor (better - worse).

    The step beyond the better one is never longer than the better one itself: otherwise a worse parent of a greater
    norm would breed its own opposite, and nothing but that where the better one is zero.

    Args:
        reach: The factor is uniform in [1, 1 + reach], 1 to 1.5 as in the paper, drawn once per child.
    """
    factor = 1 + strength * reach * float(torch.rand((), generator=generator, device=generator.device))

    def beyond(cores: list[Tensor]) -> Tensor:
        step = (factor - 1) * (cores[0] - cores[1])
        length = compute_norms(step)
        return cores[0] + step * torch.where(length > 0, compute_norms(cores[0]) / length, 0.0).clamp(max=1)

    return on_cores([better, worse], beyond, _weigh_norms(strength) if keep_norm else None)


@_core_operator
def dare(cores: list[Tensor], generator: Generator, strength: float, *, drop: float = 0.5) -> Tensor:
    """
    Drop-and-rescale mix (DARE, Yu et al., 2023): the better parent plus half of a random part of the difference.

    Entries of the cores' difference are dropped with probability `strength * drop` and the others rescaled, so that
    the expectation, before truncation, is [`average`]'s. Dropping from the difference, with the better parent in the
    role of DARE's base, leaves alone what the parents share; equal parents breed true. PEFT's `dare_linear` does not
    fit: it draws from torch's global generator and drops from the factors, where cosines fall to 0.34 (p = 0.7).

    Args:
        drop: Drop probability. The paper gives none.
    """
    probability = min(strength * drop, 1.0)
    if probability >= 1:
        raise ValueError(f"`strength * drop` must be below 1 for the rest to be rescaled, got {strength * drop}.")
    left, right = find_singular_bases(cores)
    difference = left.mT @ (cores[1] - cores[0]) @ right.mT
    kept = _draw_uniform(difference.shape, generator, difference) >= probability
    return cores[0] + strength / 2 * left @ (difference * kept / (1 - probability)) @ right


@_core_operator
def ties(cores: list[Tensor], generator: Generator, strength: float, *, density: float = 0.5) -> Tensor:
    """
    TIES (Yadav et al., 2023) by PEFT's `ties`: trim to the largest `density` of the entries, elect signs, merge.

    Entries are those of the cores in the better parent's singular bases: there its own core is diagonal, so a
    conflict of signs is a component of it that the worse parent would undo. Half of the step at strength 0.5.
    """
    left, right = find_singular_bases(cores)
    aligned = [left.mT @ core @ right.mT for core in cores]
    # Rounding where one parent has nothing would vote, and halve what the other one has there.
    aligned = [core * (core.abs() > RELATIVE_ZERO * core.abs().amax((-2, -1), keepdim=True)) for core in aligned]
    weights = torch.ones(2, dtype=cores[0].dtype, device=cores[0].device)
    merged = torch.stack([peft_ties(list(pair), weights, density) for pair in zip(*aligned, strict=True)])
    return _weigh([cores[0], left @ merged @ right], (1 - strength, strength))


@_core_operator
def svd_subspace(cores: list[Tensor], generator: Generator, strength: float, *, fraction: float = 0.5) -> Tensor:
    """
    The better parent's top k singular components with the worse parent's components k+1 to r: rank r, no truncation.

    Args:
        fraction: Share of the components that come from the worse parent at strength 1. The paper gives no k.
    """
    rank = cores[0].shape[-1] // 2
    top = rank - min(round(strength * fraction * rank), rank)
    child = torch.zeros_like(cores[0])
    for core, block in zip(cores, (slice(0, top), slice(top, rank)), strict=True):
        # Eigenvectors of C^T C are right singular vectors, at a third of the cost.
        right = torch.linalg.eigh(core.mT @ core).eigenvectors.flip(-1)[..., block]
        child += core @ right @ right.mT
    return child


@_operator
def module_swap(better: Factors, worse: Factors, generator: Generator, strength: float) -> Factors:
    """
    Each module whole from one parent: from the worse with probability `strength / 2`. Every part keeps its own norm.
    """
    child, pairs = _copy(better), pair_factors(better)
    from_worse = torch.rand(len(pairs), generator=generator, device=generator.device) < strength / 2
    for pair, swap in zip(pairs, from_worse.tolist(), strict=True):
        if swap:
            child |= {key: worse[key].to(better[key].dtype, copy=True) for key in pair}
    return child


MUTATIONS: dict[str, Callable[..., Factors]] = {
    "svd_perturb": svd_perturb,
    "layer_gaussian": layer_gaussian,
    "component_mask": component_mask,
    "full_gaussian": full_gaussian,
}

CROSSOVERS: dict[str, Callable[..., Factors]] = {
    "dare": dare,
    "module_swap": module_swap,
    "svd_subspace": svd_subspace,
    "extrapolate": extrapolate,
    "average": average,
    "ties": ties,
    "slerp": slerp,
    "clone": clone,
}


def find_operator(name: str, field: str) -> Callable[..., Factors]:
    """
    What `mutations` or `crossovers` names: one of its table, or a user's own function.

    Args:
        name: Of the operator.
        field: `"mutations"` or `"crossovers"`.

    Raises:
        `ValueError`: If there is none; by what is returned, if a child is no adapter like its (better) parent.
    """
    table = MUTATIONS if field == "mutations" else CROSSOVERS
    if name in table:
        return table[name]
    if not is_own(name):
        raise ValueError(f"`{field}` names no operator {name!r}; it must be {list_choices(table)}.")
    ask = find_function(name, field, table)

    def operate(*given: Any, strength: float = 1.0) -> Factors:
        parent, child = given[0], ask(*given, strength=strength)
        if not isinstance(child, Mapping) or not all(isinstance(value, Tensor) for value in child.values()):
            raise ValueError(f"`{field}={name}` must give factors, tensors by key, got {child!r:.80}.")
        shapes = [{key: tuple(value.shape) for key, value in each.items()} for each in (parent, child)]
        if shapes[0] != shapes[1]:
            key = next(key for key in {**shapes[0], **shapes[1]} if shapes[0].get(key) != shapes[1].get(key))
            raise ValueError(
                f"`{field}={name}` must give factors like the parent's, but {key!r} is "
                f"{shapes[1].get(key, 'absent')} instead of {shapes[0].get(key, 'absent')}."
            )
        if broken := [key for key, value in child.items() if not value.isfinite().all()]:
            raise ValueError(f"`{field}={name}` gives numbers that are not finite, in {broken[0]!r}.")
        return {key: child[key].to(value.dtype) for key, value in parent.items()}

    return operate
