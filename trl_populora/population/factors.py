"""
LoRA factors as updates: norms, cosines, and the cores that operators work on. Serves the evolution phase.

An adapter is `dict[str, Tensor]` with PEFT's keys: `<module>.lora_A.weight` (`[r, in]`) and `<module>.lora_B.weight`
(`[out, r]`). The product B A is never formed: with U, V orthonormal bases of the (joint) column and row space,
B A = U C V^T, and everything happens on the core C, `[R, R]` with R = r for one parent and 2r for two. The cores of
all modules of one rank go through as one batch. Factors are fp32 inside, Gram matrices and cores fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


Factors = dict[str, Tensor]

# Singular values below this fraction of the largest are rounding of the fp32 factors, not directions.
RELATIVE_ZERO = 1e-7
# Rounded factors put their product off by about one epsilon of their dtype. So many of them, of both parents' norms
# together, are rounding and no remainder.
ROUNDINGS = 2
# Columns of A or rows of B that are widened to fp64 at a time. 64 by 4096 numbers of 8 bytes stay in a core's cache;
# whole copies of a 7 B model's adapters cost more than all arithmetic on them.
BLOCK = 4096
_DOWN, _UP = "lora_A", "lora_B"


def pair_factors(factors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """
    Pairs of keys (A, B), one per adapted module, in the order of the dict.

    Raises:
        `ValueError`: If a key is not a LoRA factor, a factor lacks its partner, or the two ranks differ.
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


def _multiply_products(first: Factors, second: Factors) -> Tensor:
    """Inner product of the two products B A, per module (`[modules]`, fp64), without forming either."""
    values = []
    for down, up in pair_factors(first):
        ups = first[up].float().T @ second[up].float()
        downs = first[down].float() @ second[down].float().T
        values.append((ups.double() * downs.double()).sum())
    return torch.stack(values) if values else torch.zeros(0, dtype=torch.float64)


def compute_product_norms(factors: Factors) -> Tensor:
    """Frobenius norm of B A per module (`[modules]`, fp64)."""
    return _multiply_products(factors, factors).clamp(min=0).sqrt()


def compare(child: Factors, parent: Factors) -> dict[str, float]:
    """
    Cosine and norm ratio of a child's update to a parent's, over all modules together.

    Args:
        child, parent: Factors with the same keys.

    Returns:
        `dict[str, float]`: `cosine` and `norm_ratio`; both NaN if the parent is zero, `cosine` also if the child is.
    """
    ours, theirs = (float(_multiply_products(f, f).sum().clamp(min=0).sqrt()) for f in (child, parent))
    both = float(_multiply_products(child, parent).sum())
    return {
        "cosine": both / (ours * theirs) if ours * theirs else math.nan,
        "norm_ratio": ours / theirs if theirs else math.nan,
    }


def _factor_gram(gram: Tensor) -> tuple[Tensor, Tensor]:
    """
    Factor a batch of Gram matrices X^T X (`[n, R, R]`, fp64) into R with X = Q R, and the map from X back to Q = X M.

    It is a thin QR with a symmetric R, at a third of Householder's time because Q is never stored. In fp64 the squared
    condition number costs nothing that fp32 factors still hold. Directions that X lacks are zero in R, M and Q.
    """
    values, vectors = torch.linalg.eigh(gram)
    alive = values > values[..., -1:] * RELATIVE_ZERO**2
    roots = values.clamp(min=0).sqrt() * alive
    inverse = torch.where(alive, 1 / roots, 0.0)
    return roots.unsqueeze(-1) * vectors.mT, vectors * inverse.unsqueeze(-2)


def _compute_gram(parts: list[Tensor]) -> Tensor:
    """Inner products of the rows of all parts, `[r, width]` each (`[R, R]`, fp64)."""
    rank, width = parts[0].shape
    size = rank * len(parts), min(BLOCK, width)
    options = {"dtype": torch.float64, "device": parts[0].device}
    # Laid out like the parts, for which transposed ones would otherwise be read across.
    wide = torch.empty(size, **options) if parts[0].is_contiguous() else torch.empty(size[::-1], **options).T
    gram = torch.zeros(size[0], size[0], **options)
    for start in range(0, width, BLOCK):
        block = wide[:, : width - start]
        for rows, part in zip(block.split(rank), parts, strict=True):
            rows.copy_(part[:, start : start + BLOCK])
        gram.addmm_(block, block.T)
    return gram


def on_cores(
    parents: Sequence[Factors],
    combine: Callable[[list[Tensor]], Tensor],
    norm_of: Sequence[float] | None,
) -> Factors:
    """
    Child whose product is the rank-r truncation of what `combine` makes of the parents' cores.

    Args:
        parents: Factors with the same keys and shapes; the first one gives keys, dtypes and gauge.
        combine: Maps the parents' cores, a list of fp64 `[n, R, R]` over the n modules of one rank, to one such
            tensor.
        norm_of: Weight of each parent in the norm that every module of the child is rescaled to, a weighted mean of
            the parents' products' norms. `None` leaves the norm as it comes.
    """
    batches: dict[int, list[tuple[str, str]]] = {}
    for down, up in pair_factors(parents[0]):
        batches.setdefault(parents[0][down].shape[0], []).append((down, up))
    child = dict.fromkeys(parents[0])
    for rank, pairs in batches.items():
        down_gram = torch.stack([_compute_gram([p[down] for p in parents]) for down, _ in pairs])
        up_gram = torch.stack([_compute_gram([p[up].T for p in parents]) for _, up in pairs])
        rounding = ROUNDINGS * torch.finfo(parents[0][pairs[0][0]].dtype).eps
        down_maps, up_maps = _map_factors(down_gram, up_gram, rank, combine, norm_of, rounding)
        for (down, up), down_map, up_map in zip(pairs, down_maps, up_maps, strict=True):
            of_down, of_up = down_map.split(rank, dim=1), up_map.split(rank, dim=0)
            child_down, child_up = of_down[0] @ parents[0][down].float(), parents[0][up].float() @ of_up[0]
            for parent, from_down, from_up in zip(parents[1:], of_down[1:], of_up[1:], strict=True):
                child_down.addmm_(from_down, parent[down].float())
                child_up.addmm_(parent[up].float(), from_up)
            child[down], child[up] = child_down.to(parents[0][down].dtype), child_up.to(parents[0][up].dtype)
    return child


def _map_factors(down_gram: Tensor, up_gram: Tensor, rank: int, combine, norm_of, rounding: float):
    """
    Child factors as fp32 linear maps of the parents' own: `[n, r, R]` for A and `[n, R, r]` for B, given the Gram
    matrices (`[n, R, R]`, fp64) of the parents' rows of A and columns of B side by side.
    """
    to_row_space, from_row_space = _factor_gram(down_gram)
    to_column_space, from_column_space = _factor_gram(up_gram)
    blocks = [slice(start, start + rank) for start in range(0, down_gram.shape[-1], rank)]
    cores = [to_column_space[..., block] @ to_row_space[..., block].mT for block in blocks]
    if len(cores) == 2:  # of parents that cancel each other but for their rounding nothing is left to be rescaled
        norms, sum_norm = [compute_norms(each) for each in cores], compute_norms(cores[0] + cores[1])
        cores[1] = torch.where(sum_norm <= rounding * (norms[0] + norms[1]), -cores[0], cores[1])
    core = combine(cores)

    # The top eigenvectors of C^T C are the right singular vectors. The tiny ridge on the directions that the row space
    # really has makes the null space of C follow in useful order: a row of A that is zero beside a zero column of B
    # has no gradient and would never learn again, so even a zero product gets r live rows.
    row_alive = (to_row_space.abs().sum(-1) > 0).to(core)
    energy = core.square().sum((-2, -1), keepdim=True)
    ridge = torch.where(energy > 0, energy * 1e-14, 1.0)
    right = torch.linalg.eigh(core.mT @ core + ridge * torch.diag_embed(row_alive)).eigenvectors[..., -rank:]
    left = core @ right

    if norm_of is not None:
        target = sum(weight * compute_norms(each) for weight, each in zip(norm_of, cores, strict=True))
        norm = compute_norms(left)
        left = left * torch.where(norm > 0, target / norm, 0.0)

    # The gauge (B O^T, O A): A gets orthonormal rows at the first parent's typical row norm, so that the learning rate
    # means what it meant, and the orthogonal O that brings it nearest to that parent's own A.
    polar_left, _, polar_right = torch.linalg.svd(to_row_space[..., blocks[0]].mT @ right)
    gauge = polar_left @ polar_right
    scale = torch.diagonal(down_gram, dim1=-2, dim2=-1)[:, :rank].mean(-1).sqrt()[:, None, None]
    scale = torch.where(scale > 0, scale, 1.0)
    down_maps = scale * gauge @ right.mT @ from_row_space.mT
    up_maps = from_column_space @ left @ gauge.mT / scale
    return down_maps.float(), up_maps.float()


def compute_norms(cores: Tensor) -> Tensor:
    """Frobenius norm of each matrix (`[n, 1, 1]` of `[n, R, R]`)."""
    return cores.square().sum((-2, -1), keepdim=True).sqrt()


def find_singular_bases(cores: list[Tensor]) -> tuple[Tensor, Tensor]:
    """
    Orthogonal `left` and `right` (`[n, R, R]`) in which the better parent's core, and the worse one's part outside of
    its spaces, are diagonal. Entries then mean the same however the parents happen to be factored.
    """
    rank = cores[0].shape[-1] // 2
    left, _, right = torch.linalg.svd(cores[0])
    outside = left[..., rank:].mT @ cores[1] @ right[..., rank:, :].mT
    outside_left, _, outside_right = torch.linalg.svd(outside)
    left = torch.cat([left[..., :rank], left[..., rank:] @ outside_left], dim=-1)
    right = torch.cat([right[..., :rank, :], outside_right @ right[..., rank:, :]], dim=-2)
    return left, right
