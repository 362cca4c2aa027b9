"""
Mutations and crossovers: pure functions on LoRA factors, for the evolution phase (PopuLoRA, arXiv 2605.16727, weight
space operators).

An adapter comes and goes as `dict[str, Tensor]` with PEFT's keys: `<module>.lora_A.weight` (`[r, in]`) and
`<module>.lora_B.weight` (`[out, r]`). What a module does is the product B A, so operators act on the product wherever
a factor-wise one would mix coordinates that mean different things in two parents. The product is never formed: with
U, V orthonormal bases of the (joint) column and row space, B A = U C V^T, and everything happens on the core C,
`[R, R]` with R = r for one parent and 2r for two. The cores of all modules of one rank go through as one batch.

Every operator takes a `strength`: 1 is the operator as published, 0 gives the (better) parent back, and halving it
moves the child closer; the retention gate relies on that. Factors are fp32 inside, Gram matrices and cores fp64; the
results have the keys, shapes and dtypes of the (better) parent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps

import torch
from peft.utils.merge_utils import task_arithmetic
from peft.utils.merge_utils import ties as peft_ties
from torch import Generator, Tensor


Factors = dict[str, Tensor]

# Singular values below this fraction of the largest are rounding of the fp32 factors, not directions.
_RELATIVE_ZERO = 1e-7
_DOWN, _UP = "lora_A", "lora_B"


def modules_of(factors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """
    Pairs of keys (A, B), one per adapted module, in the order of the dict.

    Raises:
        ValueError: If a key is not a LoRA factor, a factor lacks its partner, or the two ranks differ.
    """
    pairs = []
    for key, value in factors.items():
        partner = key.replace(_DOWN, _UP) if _DOWN in key else key.replace(_UP, _DOWN)
        if partner == key or partner not in factors or value.dim() != 2:
            raise ValueError(
                f"Operators work on pairs of 2-D factors `*.lora_A.weight` and `*.lora_B.weight`, got {key!r} of "
                f"shape {tuple(value.shape)}{'' if partner in factors else ' without its partner'}. Adapt linear "
                f"modules only, without DoRA, bias or `modules_to_save`."
            )
        if _DOWN in key:
            if value.shape[0] != factors[partner].shape[1]:
                raise ValueError(
                    f"The factors of one module must share their rank, got {key!r} with {value.shape[0]} rows and "
                    f"{partner!r} with {factors[partner].shape[1]} columns."
                )
            pairs.append((key, partner))
    return pairs


def _check(strength: float, parents: Sequence[Factors]) -> None:
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


def _mutation(operator: Callable[..., Factors]) -> Callable[..., Factors]:
    """Check the arguments and give the parent back, bit for bit, at strength 0."""

    @wraps(operator)
    def checked(factors: Factors, generator: Generator, *, strength: float = 1.0, **options) -> Factors:
        _check(strength, [factors])
        return operator(factors, generator, strength=strength, **options) if strength else _copy(factors)

    return checked


def _crossover(operator: Callable[..., Factors]) -> Callable[..., Factors]:
    """Check the arguments and give the better parent back, bit for bit, at strength 0."""

    @wraps(operator)
    def checked(better: Factors, worse: Factors, generator: Generator, *, strength: float = 1.0, **options) -> Factors:
        _check(strength, [better, worse])
        return operator(better, worse, generator, strength=strength, **options) if strength else _copy(better)

    return checked


# Products: norms, cosines, cores.


def _inner(first: Factors, second: Factors) -> Tensor:
    """Inner product of the two products B A, per module (`[modules]`, fp64), without forming either."""
    values = []
    for down, up in modules_of(first):
        ups = first[up].float().T @ second[up].float()
        downs = first[down].float() @ second[down].float().T
        values.append((ups.double() * downs.double()).sum())
    return torch.stack(values) if values else torch.zeros(0, dtype=torch.float64)


def product_norms(factors: Factors) -> Tensor:
    """Frobenius norm of B A per module (`[modules]`, fp64)."""
    return _inner(factors, factors).clamp(min=0).sqrt()


def compare(child: Factors, parent: Factors, scaling_ratio: float = 1.0) -> dict[str, float]:
    """
    Cosine and norm ratio of a child's update to a parent's, over all modules together.

    Args:
        child, parent (`dict[str, Tensor]`):
            Factors with the same keys.
        scaling_ratio (`float`, *optional*, defaults to `1.0`):
            The parent's LoRA scaling over the child's.

    Returns:
        `dict[str, float]`: `cosine` and `norm_ratio`; both NaN if the parent is zero, `cosine` also if the child is.
    """
    ours, theirs = (float(_inner(f, f).sum().clamp(min=0).sqrt()) for f in (child, parent))
    theirs *= scaling_ratio
    both = float(_inner(child, parent).sum()) * scaling_ratio
    return {
        "cosine": both / (ours * theirs) if ours * theirs else math.nan,
        "norm_ratio": ours / theirs if theirs else math.nan,
    }


def _basis(gram: Tensor) -> tuple[Tensor, Tensor]:
    """
    Factor a batch of Gram matrices X^T X (`[n, R, R]`, fp64) into R with X = Q R, and the map from X back to Q = X M.

    It is a thin QR with a symmetric R, at a third of Householder's time because Q is never stored. In fp64 the squared
    condition number costs nothing that fp32 factors still hold. Directions that X lacks are zero in R, M and Q.
    """
    values, vectors = torch.linalg.eigh(gram)
    alive = values > values[..., -1:] * _RELATIVE_ZERO**2
    roots = values.clamp(min=0).sqrt() * alive
    inverse = torch.where(alive, 1 / roots, 0.0)
    return roots.unsqueeze(-1) * vectors.mT, vectors * inverse.unsqueeze(-2)


def _gram(parts: list[Tensor]) -> Tensor:
    wide = torch.cat([part.double() for part in parts])
    return wide @ wide.T


def _on_cores(
    parents: Sequence[Factors],
    combine: Callable[[list[Tensor]], Tensor],
    scalings: Sequence[float] = (1.0,),
    keep_norm: bool = True,
) -> Factors:
    """
    Child whose product is the rank-r truncation of what `combine` makes of the parents' cores.

    Args:
        parents (`Sequence[dict[str, Tensor]]`):
            Factors with the same keys and shapes; the first one gives keys, dtypes, scaling and gauge.
        combine (`Callable`):
            Maps the parents' cores, a list of fp64 `[n, R, R]` over the n modules of one rank, to one such tensor.
        scalings (`Sequence[float]`, *optional*, defaults to `(1.0,)`):
            LoRA scaling of each parent; products are compared after scaling and the child carries the first one's.
        keep_norm (`bool`, *optional*, defaults to `True`):
            Rescale each module to the mean norm of the parents' (scaled) products.
    """
    batches: dict[int, list[tuple[str, str]]] = {}
    for down, up in modules_of(parents[0]):
        batches.setdefault(parents[0][down].shape[0], []).append((down, up))
    ratios = [scaling / scalings[0] for scaling in scalings]
    child = dict.fromkeys(parents[0])
    for rank, pairs in batches.items():
        down_gram = torch.stack([_gram([p[down] for p in parents]) for down, _ in pairs])
        up_gram = torch.stack([_gram([p[up].T for p in parents]) for _, up in pairs])
        down_maps, up_maps = _recombine(down_gram, up_gram, ratios, combine, keep_norm)
        for (down, up), down_map, up_map in zip(pairs, down_maps, up_maps, strict=True):
            downs = [m @ p[down].float() for m, p in zip(down_map.split(rank, dim=1), parents, strict=True)]
            ups = [p[up].float() @ m for m, p in zip(up_map.split(rank, dim=0), parents, strict=True)]
            child[down] = sum(downs[1:], downs[0]).to(parents[0][down].dtype)
            child[up] = sum(ups[1:], ups[0]).to(parents[0][up].dtype)
    return child


def _recombine(down_gram: Tensor, up_gram: Tensor, ratios: list[float], combine, keep_norm: bool):
    """
    Child factors as fp32 linear maps of the parents' own: `[n, r, R]` for A and `[n, R, r]` for B, given the Gram
    matrices (`[n, R, R]`, fp64) of the parents' rows of A and columns of B side by side.
    """
    rank = down_gram.shape[-1] // len(ratios)
    to_row_space, from_row_space = _basis(down_gram)
    to_column_space, from_column_space = _basis(up_gram)
    blocks = [slice(rank * p, rank * (p + 1)) for p in range(len(ratios))]
    cores = [
        ratio * to_column_space[..., block] @ to_row_space[..., block].mT
        for ratio, block in zip(ratios, blocks, strict=True)
    ]
    core = combine(cores)

    # The top eigenvectors of C^T C are the right singular vectors. The tiny ridge on the directions that the row space
    # really has makes the null space of C follow in useful order: a row of A that is zero beside a zero column of B
    # has no gradient and would never learn again, so even a zero product gets r live rows.
    row_alive = (to_row_space.abs().sum(-1) > 0).to(core)
    energy = core.square().sum((-2, -1), keepdim=True)
    ridge = torch.where(energy > 0, energy * 1e-14, 1.0)
    right = torch.linalg.eigh(core.mT @ core + ridge * torch.diag_embed(row_alive)).eigenvectors[..., -rank:]
    left = core @ right

    if keep_norm:
        target = torch.stack([c.square().sum((-2, -1)).sqrt() for c in cores]).mean(0)
        norm = left.square().sum((-2, -1)).sqrt()
        left = left * torch.where(norm > 0, target / norm, 0.0)[:, None, None]

    # The gauge (B O^T, O A): A gets orthonormal rows at the first parent's typical row norm, so that the learning rate
    # means what it meant, and the orthogonal O that brings it nearest to that parent's own A.
    polar_left, _, polar_right = torch.linalg.svd(to_row_space[..., blocks[0]].mT @ right)
    gauge = polar_left @ polar_right
    scale = torch.diagonal(down_gram, dim1=-2, dim2=-1)[:, :rank].mean(-1).sqrt()[:, None, None]
    scale = torch.where(scale > 0, scale, 1.0)
    down_maps = scale * gauge @ right.mT @ from_row_space.mT
    up_maps = from_column_space @ left @ gauge.mT / scale
    return down_maps.float(), up_maps.float()


def _normal(shape: Sequence[int], generator: Generator, like: Tensor) -> Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device).to(like)


def _uniform(shape: Sequence[int], generator: Generator, like: Tensor) -> Tensor:
    return torch.rand(*shape, generator=generator, device=generator.device).to(like)


# Mutations: fn(factors, generator, *, strength, ...) -> factors.


def _add_noise(factors: Factors, pairs: list[tuple[str, str]], generator: Generator, scale: float, keep_norm: bool):
    """Gaussian noise at `scale` times each tensor's own root mean square, on the modules in `pairs`."""
    child = _copy(factors)
    for pair in pairs:
        parent = {key: factors[key].float() for key in pair}
        noisy = {}
        for key, value in parent.items():
            noise = torch.randn(value.shape, generator=generator, device=generator.device).to(value)
            noisy[key] = torch.add(value, noise, alpha=scale * float(value.square().mean().sqrt()))
        if keep_norm:
            before, after = product_norms(parent), product_norms(noisy)
            noisy[pair[1]] *= float(before / after) if after > 0 else 1.0
        child.update({key: noisy[key].to(factors[key].dtype) for key in pair})
    return child


@_mutation
def full_gaussian(
    factors: Factors, generator: Generator, *, strength: float = 1.0, scale: float = 0.15, keep_norm: bool = True
) -> Factors:
    """
    Gaussian noise on every tensor, relative to the tensor's own size, so that A and B are disturbed alike.

    Args:
        scale (`float`, *optional*, defaults to `0.15`):
            Noise over root mean square of the tensor; the cosine to the parent is about 1 / (1 + scale^2). The paper
            gives no value; the peer package's default. A zero tensor stays zero.
        keep_norm (`bool`, *optional*, defaults to `True`):
            Rescale each module to the parent's norm, which independent noise would otherwise only ever raise.
    """
    return _add_noise(factors, modules_of(factors), generator, strength * scale, keep_norm)


@_mutation
def layer_gaussian(
    factors: Factors,
    generator: Generator,
    *,
    strength: float = 1.0,
    scale: float = 0.15,
    fraction: float = 1 / 3,
    keep_norm: bool = True,
) -> Factors:
    """
    [`full_gaussian`] on a random `fraction` of the modules (a third in the paper, at least one); the others are kept.
    """
    pairs = modules_of(factors)
    order = torch.randperm(len(pairs), generator=generator, device=generator.device).tolist()
    chosen = order[: max(1, round(fraction * len(pairs)))]
    return _add_noise(factors, [pairs[index] for index in sorted(chosen)], generator, strength * scale, keep_norm)


def rotation(noise: Tensor, scale: float) -> Tensor:
    """
    Exact rotations (`[..., r, r]`, fp64) from square Gaussian noise: exp(K) with K skew.

    The entries of K have standard deviation scale / sqrt(r), which makes the turn independent of the rank: a direction
    moves by an angle of about `scale`. The first-order I + K is no rotation and loses more with every rank.
    """
    skew = (noise - noise.mT).double() / math.sqrt(2)
    return torch.linalg.matrix_exp(skew * (scale / math.sqrt(noise.shape[-1])))


@_mutation
def svd_perturb(
    factors: Factors, generator: Generator, *, strength: float = 1.0, scale: float = 0.1, keep_norm: bool = True
) -> Factors:
    """
    Scale the singular values log-normally and rotate both singular bases within their spaces.

    Args:
        scale (`float`, *optional*, defaults to `0.1`):
            Standard deviation of the log of the factors, and angle of the rotations (see [`rotation`]).
        keep_norm (`bool`, *optional*, defaults to `True`):
            Rescale each module to the parent's norm.
    """

    def perturb(cores: list[Tensor]) -> Tensor:
        (core,) = cores
        left, values, right = torch.linalg.svd(core)
        turns = [rotation(_normal(core.shape, generator, core), strength * scale) for _ in range(2)]
        values = values * torch.exp(strength * scale * _normal(values.shape, generator, values))
        return (left @ turns[0] * values.unsqueeze(-2)) @ (turns[1].mT @ right)

    return _on_cores([factors], perturb, keep_norm=keep_norm)


@_mutation
def component_mask(
    factors: Factors, generator: Generator, *, strength: float = 1.0, fraction: float = 0.3, keep_norm: bool = False
) -> Factors:
    """
    Drop a random `fraction` of each module's singular components (about 30 % in the paper) and keep the rest as it is.

    The freed directions restart like a fresh LoRA: their row of A stays alive and their part of B is zero.
    """

    def mask(cores: list[Tensor]) -> Tensor:
        (core,) = cores
        left, values, right = torch.linalg.svd(core)
        drop = min(round(strength * fraction * values.shape[-1]), values.shape[-1])
        rank_of = _uniform(values.shape, generator, values).argsort(-1).argsort(-1)
        return (left * (values * (rank_of >= drop)).unsqueeze(-2)) @ right

    return _on_cores([factors], mask, keep_norm=keep_norm)


# Crossovers: fn(better, worse, generator, *, strength, scalings, keep_norm, ...) -> factors. `scalings` are the LoRA
# scalings (alpha / r) of the better and the worse parent; the child is made for the better one's.


def _weighted(cores: list[Tensor], weights: Sequence[float]) -> Tensor:
    return task_arithmetic(cores, torch.tensor(weights, dtype=cores[0].dtype, device=cores[0].device))


@_crossover
def clone(better: Factors, worse: Factors, generator: Generator, *, strength: float = 1.0, **_) -> Factors:
    """The better parent again: exploitation alone, as in population-based training (Jaderberg et al., 2017)."""
    return _copy(better)


@_crossover
def average(
    better: Factors,
    worse: Factors,
    generator: Generator,
    *,
    strength: float = 1.0,
    scalings: Sequence[float] = (1.0, 1.0),
    keep_norm: bool = True,
) -> Factors:
    """Mean of the two products (weight `strength / 2` on the worse), truncated to rank r."""
    weights = (1 - strength / 2, strength / 2)
    return _on_cores([better, worse], lambda cores: _weighted(cores, weights), scalings, keep_norm)


@_crossover
def slerp(
    better: Factors,
    worse: Factors,
    generator: Generator,
    *,
    strength: float = 1.0,
    scalings: Sequence[float] = (1.0, 1.0),
    keep_norm: bool = True,
) -> Factors:
    """Point on the great circle between the two products of each module, half-way at strength 1."""

    def turn(cores: list[Tensor]) -> Tensor:
        norms = [core.square().sum((-2, -1), keepdim=True).sqrt() for core in cores]
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

    return _on_cores([better, worse], turn, scalings, keep_norm)


@_crossover
def extrapolate(
    better: Factors,
    worse: Factors,
    generator: Generator,
    *,
    strength: float = 1.0,
    scalings: Sequence[float] = (1.0, 1.0),
    keep_norm: bool = True,
    reach: float = 0.5,
) -> Factors:
    """
    From the worse parent through the better and beyond: worse + factor (better - worse).

    Args:
        reach (`float`, *optional*, defaults to `0.5`):
            The factor is uniform in [1, 1 + reach], 1 to 1.5 as in the paper, drawn once per child.
    """
    factor = 1 + strength * reach * float(torch.rand((), generator=generator, device=generator.device))
    return _on_cores([better, worse], lambda cores: _weighted(cores, (factor, 1 - factor)), scalings, keep_norm)


@_crossover
def dare(
    better: Factors,
    worse: Factors,
    generator: Generator,
    *,
    strength: float = 1.0,
    scalings: Sequence[float] = (1.0, 1.0),
    keep_norm: bool = True,
    drop: float = 0.5,
) -> Factors:
    """
    Drop-and-rescale mix (DARE, Yu et al., 2023): the better parent plus half of a random part of the difference.

    Entries of the cores' difference are dropped with probability `strength * drop` and the others rescaled, so that
    the expectation is [`average`]'s. Dropping from the difference, with the better parent in the role of DARE's base,
    leaves alone what the parents share; equal parents breed true. PEFT's `dare_linear` does not fit: it draws from
    torch's global generator and drops from the factors, where cosines fall to 0.34 (p = 0.7).

    Args:
        drop (`float`, *optional*, defaults to `0.5`):
            Drop probability. The paper gives none.
    """
    probability = min(strength * drop, 1.0)
    if probability >= 1:
        raise ValueError(f"`strength * drop` must be below 1 for the rest to be rescaled, got {strength * drop}.")

    def mix(cores: list[Tensor]) -> Tensor:
        difference = cores[1] - cores[0]
        kept = _uniform(difference.shape, generator, difference) >= probability
        return cores[0] + strength / 2 * difference * kept / (1 - probability)

    return _on_cores([better, worse], mix, scalings, keep_norm)


@_crossover
def ties(
    better: Factors,
    worse: Factors,
    generator: Generator,
    *,
    strength: float = 1.0,
    scalings: Sequence[float] = (1.0, 1.0),
    keep_norm: bool = True,
    density: float = 0.5,
) -> Factors:
    """
    TIES (Yadav et al., 2023) by PEFT's `ties`: trim to the largest `density` of the entries, elect signs, merge.

    Entries are those of the cores in the better parent's singular bases: there its own core is diagonal, so a
    conflict of signs is a component of it that the worse parent would undo. Half of the step at strength 0.5.
    """

    def merge(cores: list[Tensor]) -> Tensor:
        left, _, right = torch.linalg.svd(cores[0])
        aligned = [left.mT @ core @ right.mT for core in cores]
        weights = torch.ones(2, dtype=cores[0].dtype, device=cores[0].device)
        merged = torch.stack([peft_ties(list(pair), weights, density) for pair in zip(*aligned, strict=True)])
        return _weighted([cores[0], left @ merged @ right], (1 - strength, strength))

    return _on_cores([better, worse], merge, scalings, keep_norm)


@_crossover
def svd_subspace(
    better: Factors,
    worse: Factors,
    generator: Generator,
    *,
    strength: float = 1.0,
    scalings: Sequence[float] = (1.0, 1.0),
    keep_norm: bool = True,
    fraction: float = 0.5,
) -> Factors:
    """
    The better parent's top k singular components with the worse parent's components k+1 to r: rank r, no truncation.

    Args:
        fraction (`float`, *optional*, defaults to `0.5`):
            Share of the components that come from the worse parent at strength 1. The paper gives no k.
    """
    rank = better[modules_of(better)[0][0]].shape[0]

    def join(cores: list[Tensor]) -> Tensor:
        top = rank - min(round(strength * fraction * rank), rank)
        parts = []
        for core, block in zip(cores, (slice(0, top), slice(top, rank)), strict=True):
            left, values, right = torch.linalg.svd(core)
            parts.append((left[..., block] * values[..., None, block]) @ right[..., block, :])
        return parts[0] + parts[1]

    return _on_cores([better, worse], join, scalings, keep_norm)


@_crossover
def module_swap(
    better: Factors,
    worse: Factors,
    generator: Generator,
    *,
    strength: float = 1.0,
    scalings: Sequence[float] = (1.0, 1.0),
    keep_norm: bool = True,
) -> Factors:
    """
    Each module whole from one parent: from the worse with probability `strength / 2`.

    Every part has its own parent's norm and is kept exactly, so `keep_norm` has nothing to do here. Where the scalings
    differ, B absorbs the ratio.
    """
    child, pairs = _copy(better), modules_of(better)
    ratio = scalings[1] / scalings[0]
    from_worse = torch.rand(len(pairs), generator=generator, device=generator.device) < strength / 2
    for (down, up), swap in zip(pairs, from_worse.tolist(), strict=True):
        if swap:
            child[down] = worse[down].to(better[down].dtype, copy=True)
            child[up] = (worse[up] * ratio if ratio != 1 else worse[up].clone()).to(better[up].dtype)
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
