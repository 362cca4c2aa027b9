"""Operators: mutations and crossovers, pure functions of LoRA factors (PopuLoRA, arXiv 2605.16727).

    mutation   fn(factors, generator, strength=1.0, ...)        one parent --> child
    crossover  fn(better, worse, generator, strength=1.0, ...)  two parents --> child

Parents and child are dicts with PEFT's keys: `<module>.lora_A.weight` of shape `[r, in]`, and `<module>.lora_B.weight`
of shape `[out, r]`. The child has the keys, shapes and dtypes of the (better) parent. Strength 1 is the operator as
published, strength 0 gives the (better) parent back, and half the strength gives a child that is nearer to it.

A module adds the product B A, times a fixed number, to its base. Many pairs A, B have the same product, so row 3 of A
means something else in each parent, and mixing factors would mix unrelated things. Therefore most operators work on
the product, through its core (see [`trl_populora.population.factors`]).
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
    """Refuses a negative strength, and parents whose keys or shapes differ."""
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
    """Decorates an operator: checks the arguments, and at strength 0 returns a copy of the (better) parent."""

    # Without the shortcut for strength 0 an operator would change the parent's last bits.
    @wraps(make)
    def checked(*parents_and_generator: Any, strength: float = 1.0, **options: Any) -> Factors:
        *parents, generator = parents_and_generator
        _check_arguments(strength, parents)
        return make(*parents, generator, strength, **options) if strength else _copy(parents[0])

    return checked


def _core_operator(combine: Callable[..., Tensor]) -> Callable[..., Factors]:
    """
    Makes an operator on factors from a function on cores, `combine(cores, generator, strength, ...)`.

    The operator has one more option, `keep_norm`. By default it rescales each module to the weighted mean of the
    parents' norms, see [`_weigh_norms`].
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
    """Weighs two parents' norms: equally at strength 1. Towards strength 0 the better parent's weight becomes 1."""
    part = min(strength / 2, 1.0)
    return 1 - part, part


# Numbers are drawn on the generator's device, and then moved. So a child is the same on whatever device its parents
# are.


def _draw_normal(shape: Sequence[int], generator: Generator, like: Tensor) -> Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device).to(like)


def _draw_uniform(shape: Sequence[int], generator: Generator, like: Tensor) -> Tensor:
    return torch.rand(*shape, generator=generator, device=generator.device).to(like)


def _weigh(cores: list[Tensor], weights: Sequence[float]) -> Tensor:
    return task_arithmetic(cores, torch.tensor(weights, dtype=cores[0].dtype, device=cores[0].device))


# Mutations.


def _add_noise(factors: Factors, pairs: list[tuple[str, str]], generator: Generator, scale: float, keep_norm: bool):
    """Adds Gaussian noise to the modules `pairs`, at `scale` times the root mean square of each tensor."""
    child = _copy(factors)
    for pair in pairs:
        parent = {key: factors[key].float() for key in pair}
        noisy = {}
        for key, value in parent.items():
            noise = _draw_normal(value.shape, generator, value)
            noisy[key] = torch.add(value, noise, alpha=scale * float(value.square().mean().sqrt()))
        if keep_norm:
            # Only B is rescaled, which is enough for the product.
            before, after = compute_product_norms(parent), compute_product_norms(noisy)
            noisy[pair[1]] *= float(before / after) if after > 0 else 1.0
        child.update({key: noisy[key].to(factors[key].dtype) for key in pair})
    return child


@_operator
def full_gaussian(
    factors: Factors, generator: Generator, strength: float, *, scale: float = 0.15, keep_norm: bool = True
) -> Factors:
    """
    Adds Gaussian noise to every tensor, relative to the size of its numbers, so that A and B are disturbed alike. A
    tensor of zeros stays as it is.

    Args:
        scale: Standard deviation of the noise over the root mean square of the tensor. The cosine to the parent is
            then about 1 / (1 + scale^2). The paper gives no value.
        keep_norm: Whether each module is rescaled to the norm of the parent's product. Independent noise nearly always
            raises a norm, so without rescaling norms would grow from generation to generation.
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
    Does the same as [`full_gaussian`] to some modules, and keeps the others.

    Args:
        scale, keep_norm: As for [`full_gaussian`].
        fraction: Fraction of the modules that are changed, chosen at random, at least one. Summaries of the paper say
            1/3 (second hand).
    """
    pairs = pair_factors(factors)
    order = torch.randperm(len(pairs), generator=generator, device=generator.device).tolist()
    chosen = order[: max(1, round(fraction * len(pairs)))]
    return _add_noise(factors, [pairs[index] for index in sorted(chosen)], generator, strength * scale, keep_norm)


def rotation(noise: Tensor, scale: float) -> Tensor:
    """
    Makes random rotations, `[..., r, r]` in fp64, from Gaussian noise of the same shape. Each turns a direction by an
    angle of about `scale`, whatever the rank.
    """
    # exp(K) is a rotation if K is skew. With r rows an entry of K has the standard deviation scale / sqrt(r). The
    # approximation I + K is cheaper, but it is no rotation, and its error grows with the rank.
    skew = (noise.double() - noise.double().mT) / math.sqrt(2)
    return torch.linalg.matrix_exp(skew * (scale / math.sqrt(noise.shape[-1])))


@_core_operator
def svd_perturb(cores: list[Tensor], generator: Generator, strength: float, *, scale: float = 0.1) -> Tensor:
    """
    Multiplies the singular values by log-normal factors, and rotates both singular bases within their spaces.

    Args:
        scale: Standard deviation of the logarithms of the factors, and angle of the rotations (see [`rotation`]).
    """
    (core,) = cores
    left, values, right = torch.linalg.svd(core)
    turns = [rotation(_draw_normal(core.shape, generator, core), strength * scale) for _ in range(2)]
    values = values * torch.exp(strength * scale * _draw_normal(values.shape, generator, values))
    return (left @ turns[0] * values.unsqueeze(-2)) @ (turns[1].mT @ right)


@_operator
def component_mask(factors: Factors, generator: Generator, strength: float, *, fraction: float = 0.3) -> Factors:
    """
    Drops some singular components of each module, and keeps the others unchanged. A dropped direction starts again
    like a fresh LoRA: A still reads it, and B gives nothing for it.

    Args:
        fraction: Fraction of the components that are dropped, chosen at random. Summaries of the paper say about 30 %
            (second hand).
    """

    def mask(cores: list[Tensor]) -> Tensor:
        (core,) = cores
        left, values, right = torch.linalg.svd(core)
        drop = min(round(strength * fraction * values.shape[-1]), values.shape[-1])
        # Sorting noise twice gives a random order 0, 1, 2 ... of the components. The first `drop` of them go.
        rank_of = _draw_uniform(values.shape, generator, values).argsort(-1).argsort(-1)
        return (left * (values * (rank_of >= drop)).unsqueeze(-2)) @ right

    return on_cores([factors], mask, norm_of=None)


# Crossovers.


@_operator
def clone(better: Factors, worse: Factors, generator: Generator, strength: float) -> Factors:
    """Copies the better parent, as in population-based training (Jaderberg et al., 2017)."""
    return _copy(better)


@_core_operator
def average(cores: list[Tensor], generator: Generator, strength: float) -> Tensor:
    """Takes a weighted mean of the two products, truncated to rank r. The worse parent's weight is `strength / 2`."""
    return _weigh(cores, (1 - strength / 2, strength / 2))


@_core_operator
def slerp(cores: list[Tensor], generator: Generator, strength: float) -> Tensor:
    """Takes a point on the great circle between the two products of each module, half-way at strength 1."""
    norms = [compute_norms(core) for core in cores]
    units = [torch.where(norm > 0, core / norm, 0.0) for core, norm in zip(cores, norms, strict=True)]
    angle = torch.acos((units[0] * units[1]).sum((-2, -1), keepdim=True).clamp(-1, 1))
    part = strength / 2
    # Parallel products lie on no single great circle. There the straight line between them is taken.
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
    Goes from the worse parent through the better one and beyond: worse + factor * (better - worse).

    Args:
        reach: At strength 1 the factor is drawn once per child, uniformly from [1, 1 + reach]. Summaries of the paper
            say [1, 1.5] (second hand).
        keep_norm: Whether each module is rescaled to the weighted mean of the parents' norms, see [`_weigh_norms`].
    """
    factor = 1 + strength * reach * float(torch.rand((), generator=generator, device=generator.device))

    def beyond(cores: list[Tensor]) -> Tensor:
        step = (factor - 1) * (cores[0] - cores[1])
        # The step is never longer than the better parent itself. Otherwise a worse parent with a greater norm would
        # breed the opposite of itself.
        length = compute_norms(step)
        return cores[0] + step * torch.where(length > 0, compute_norms(cores[0]) / length, 0.0).clamp(max=1)

    return on_cores([better, worse], beyond, _weigh_norms(strength) if keep_norm else None)


@_core_operator
def dare(cores: list[Tensor], generator: Generator, strength: float, *, drop: float = 0.5) -> Tensor:
    """
    Moves the better parent towards the worse one, in random entries alone (DARE, Yu et al., 2023).

    Entries of the difference between the parents are dropped at random. The other entries are enlarged to make up for
    them, and half of the result is added to the better parent. So the expected child, before it is truncated and gets
    its norm, is the child that [`average`] makes. What both parents share is never dropped, because it is not in the
    difference.

    Args:
        drop: Probability that an entry is dropped, at strength 1. The paper gives none.
    """
    # PEFT's `dare_linear` does not fit. It draws from torch's global generator. And it drops entries of A and B: with
    # 70 % of them dropped, the product B A has a cosine of only .34 to the product before.
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
    Merges the parents by TIES (Yadav et al., 2023), as PEFT does it: keep the largest entries of each, elect a sign
    for every entry, and merge the entries that have it. Strength .5 goes half of the way.

    Args:
        density: Fraction of the entries that are kept.
    """
    # Entries are those of the cores in the better parent's singular bases, where the better one's core is diagonal. So
    # a conflict of signs is a component of the better parent that the worse one would undo.
    left, right = find_singular_bases(cores)
    aligned = [left.mT @ core @ right.mT for core in cores]
    # An entry that is only rounding is set to 0. Otherwise it would have a vote, and halve the other parent's entry.
    aligned = [core * (core.abs() > RELATIVE_ZERO * core.abs().amax((-2, -1), keepdim=True)) for core in aligned]
    weights = torch.ones(2, dtype=cores[0].dtype, device=cores[0].device)
    merged = torch.stack([peft_ties(list(pair), weights, density) for pair in zip(*aligned, strict=True)])
    return _weigh([cores[0], left @ merged @ right], (1 - strength, strength))


@_core_operator
def svd_subspace(cores: list[Tensor], generator: Generator, strength: float, *, fraction: float = 0.5) -> Tensor:
    """
    Joins the better parent's singular components 1 to k with the worse parent's components k + 1 to r.

    Args:
        fraction: Fraction of the r components that come from the worse parent, at strength 1. The paper gives no k.
    """
    rank = cores[0].shape[-1] // 2
    top = rank - min(round(strength * fraction * rank), rank)
    child = torch.zeros_like(cores[0])
    for core, block in zip(cores, (slice(0, top), slice(top, rank)), strict=True):
        # The eigenvectors of C^T C are the right singular vectors of C, and cost a third of a decomposition of C.
        right = torch.linalg.eigh(core.mT @ core).eigenvectors.flip(-1)[..., block]
        child += core @ right @ right.mT
    return child


@_operator
def module_swap(better: Factors, worse: Factors, generator: Generator, strength: float) -> Factors:
    """Takes each module whole from one parent, from the worse one with probability `strength / 2`."""
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
    Finds the operator that the option `mutations` or `crossovers` names: one of the package, or a user's own function.

    Args:
        name: Name of the operator, or `module:function`.
        field: The option, `"mutations"` or `"crossovers"`.

    Raises:
        `ValueError`: If there is no such operator. Also later, from the returned function, if a user's own operator
            makes a child whose keys or shapes differ from the (better) parent's, or whose numbers are not finite.
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
