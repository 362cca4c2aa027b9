"""Factors: the linear algebra under the operators. Norms and cosines of LoRA updates, and their cores.

    parents' A [r, in], B [out, r] --> cores C [n, R, R] --combine--> core [n, R, R] --truncate--> child's A, B

An adapter is a dict with PEFT's keys: `<module>.lora_A.weight` of shape `[r, in]`, and `<module>.lora_B.weight` of
shape `[out, r]`. What a module adds to its base is the product B A, `[out, in]`, times a fixed number. The product is
too large to be formed. With orthonormal bases U of the column space and V of the row space, B A = U C V^T. All work is
done on the core C, which is `[R, R]`: R is r for one parent, and 2r for two parents, whose spaces are joined.

The cores of all n modules of one LoRA rank are one batch. Factors are computed in fp32, Gram matrices and cores in
fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


Factors = dict[str, Tensor]

# A singular value below this fraction of the largest one is no direction, but rounding of the fp32 factors.
RELATIVE_ZERO = 1e-7
# Rounding of A and B changes the product B A by about one epsilon of their dtype, relative to the norm of B A. The sum
# of two parents' products counts as zero if its norm is at most ROUNDINGS epsilons times the sum of the two norms.
ROUNDINGS = 2
# Columns of A, or rows of B, that are converted to fp64 at a time. With 64 rows such a block has 2 MiB, and stays in
# the cache of a CPU core. Copying the whole adapters of a 7B model to fp64 takes longer than all arithmetic on them.
BLOCK = 4096
_DOWN, _UP = "lora_A", "lora_B"


def pair_factors(factors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """
    Finds the keys of each adapted module, pairs (A, B), in the order of the dict.

    Raises:
        `ValueError`: If an entry is no 2-D LoRA factor, if a factor has no partner, or if the ranks of the two differ.
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
    """Computes for each module the inner product of two updates B A, `[modules]` in fp64, without forming either."""
    values = []
    for down, up in pair_factors(first):
        # <B A, B' A'> = sum of (B^T B') * (A A'^T), which takes two [r, r] matrices.
        ups = first[up].float().T @ second[up].float()
        downs = first[down].float() @ second[down].float().T
        values.append((ups.double() * downs.double()).sum())
    return torch.stack(values) if values else torch.zeros(0, dtype=torch.float64)


def compute_product_norms(factors: Factors) -> Tensor:
    """Computes the Frobenius norm of each module's B A, `[modules]` in fp64."""
    return _multiply_products(factors, factors).clamp(min=0).sqrt()


def compute_inner_products(members: Sequence[Factors]) -> list[list[float]]:
    """Computes the inner product of every two members' updates, over all modules together, `[members, members]`."""
    found = [[0.0] * len(members) for _ in members]
    for column, other in enumerate(members):
        for row, one in enumerate(members[: column + 1]):
            found[row][column] = found[column][row] = float(_multiply_products(one, other).sum())
    return found


def compare(child: Factors, parent: Factors) -> dict[str, float]:
    """
    Compares a child's update with a parent's, over all modules together.

    Args:
        child, parent: Factors with the same keys.

    Returns:
        `cosine` of the two updates, and `norm_ratio`, child over parent. Both are NaN if the parent's update is zero,
        and `cosine` also if the child's is.
    """
    (ours, both), (_, theirs) = compute_inner_products([child, parent])
    ours, theirs = math.sqrt(max(ours, 0.0)), math.sqrt(max(theirs, 0.0))
    return {
        "cosine": both / (ours * theirs) if ours * theirs else math.nan,
        "norm_ratio": ours / theirs if theirs else math.nan,
    }


def _factor_gram(gram: Tensor) -> tuple[Tensor, Tensor]:
    """
    Factors a batch of Gram matrices X^T X, `[n, R, R]` in fp64. Returns F with X = Q F, and M with Q = X M, where the
    columns of Q are orthonormal. Directions that X does not have are zero in F, M and Q.
    """
    # This does the work of a thin QR decomposition, never stores Q, and takes a third of Householder's time. A Gram
    # matrix squares the condition number. That loses nothing here, because fp64 has more than twice the digits of fp32
    # factors.
    values, vectors = torch.linalg.eigh(gram)
    alive = values > values[..., -1:] * RELATIVE_ZERO**2
    roots = values.clamp(min=0).sqrt() * alive
    inverse = torch.where(alive, 1 / roots, 0.0)
    return roots.unsqueeze(-1) * vectors.mT, vectors * inverse.unsqueeze(-2)


def _compute_gram(parts: list[Tensor]) -> Tensor:
    """Computes the inner products of the rows of all parts, `[R, R]` in fp64, from parts of shape `[r, width]`."""
    rank, width = parts[0].shape
    size = rank * len(parts), min(BLOCK, width)
    options = {"dtype": torch.float64, "device": parts[0].device}
    # The buffer has the memory layout of the parts. Otherwise copying a transposed part would jump through memory.
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
    Makes a child: `combine` turns the parents' cores into the child's core, which is then truncated to rank r.

    Args:
        parents: Factors with the same keys and shapes. The child has the first parent's keys and dtypes. Its A is
            turned to be as near as possible to that parent's.
        combine: Takes the parents' cores, one tensor `[n, R, R]` in fp64 per parent for the n modules of one rank.
            Returns the child's core, a tensor of the same shape.
        norm_of: A weight per parent. Each module of the child is rescaled to the weighted mean of the norms of the
            parents' products. `None` keeps the norm that comes out.
    """
    batches: dict[int, list[tuple[str, str]]] = {}
    for down, up in pair_factors(parents[0]):
        batches.setdefault(parents[0][down].shape[0], []).append((down, up))
    child = dict.fromkeys(parents[0])  # keeps the order of the keys
    for rank, pairs in batches.items():
        down_gram = torch.stack([_compute_gram([p[down] for p in parents]) for down, _ in pairs])
        up_gram = torch.stack([_compute_gram([p[up].T for p in parents]) for _, up in pairs])
        rounding = ROUNDINGS * torch.finfo(parents[0][pairs[0][0]].dtype).eps
        down_maps, up_maps = _map_factors(down_gram, up_gram, rank, combine, norm_of, rounding)
        for (down, up), down_map, up_map in zip(pairs, down_maps, up_maps, strict=True):
            # The maps have a block per parent: the child's A is a sum of maps of the parents' A, and the same is true
            # of B.
            of_down, of_up = down_map.split(rank, dim=1), up_map.split(rank, dim=0)
            child_down, child_up = of_down[0] @ parents[0][down].float(), parents[0][up].float() @ of_up[0]
            for parent, from_down, from_up in zip(parents[1:], of_down[1:], of_up[1:], strict=True):
                child_down.addmm_(from_down, parent[down].float())
                child_up.addmm_(parent[up].float(), from_up)
            child[down], child[up] = child_down.to(parents[0][down].dtype), child_up.to(parents[0][up].dtype)
    return child


def _map_factors(down_gram: Tensor, up_gram: Tensor, rank: int, combine, norm_of, rounding: float):
    """
    Computes the maps that make the child's factors from the parents': `[n, r, R]` for A and `[n, R, r]` for B, in
    fp32.

    `down_gram` and `up_gram`, `[n, R, R]` in fp64, are the Gram matrices of the rows of all parents' A, and of the
    columns of all parents' B.
    """
    to_row_space, from_row_space = _factor_gram(down_gram)
    to_column_space, from_column_space = _factor_gram(up_gram)
    blocks = [slice(start, start + rank) for start in range(0, down_gram.shape[-1], rank)]
    cores = [to_column_space[..., block] @ to_row_space[..., block].mT for block in blocks]
    # If one parent is the opposite of the other, their sum is nothing but rounding errors, and rescaling would enlarge
    # the errors to the size of a parent. So the second core is then made the exact opposite of the first.
    if len(cores) == 2:
        norms, sum_norm = [compute_norms(each) for each in cores], compute_norms(cores[0] + cores[1])
        cores[1] = torch.where(sum_norm <= rounding * (norms[0] + norms[1]), -cores[0], cores[1])
    core = combine(cores)

    # The eigenvectors of C^T C are the right singular vectors of C. A zero row of A beside a zero column of B has no
    # gradient and would never learn again. So A needs r rows that are not zero, even if the child's product is zero.
    # The tiny ridge provides them: within the null space of C it puts directions of the parents' row space first.
    row_alive = (to_row_space.abs().sum(-1) > 0).to(core)
    energy = core.square().sum((-2, -1), keepdim=True)
    ridge = torch.where(energy > 0, energy * 1e-14, 1.0)
    right = torch.linalg.eigh(core.mT @ core + ridge * torch.diag_embed(row_alive)).eigenvectors[..., -rank:]
    left = core @ right

    if norm_of is not None:
        target = sum(weight * compute_norms(each) for weight, each in zip(norm_of, cores, strict=True))
        norm = compute_norms(left)
        left = left * torch.where(norm > 0, target / norm, 0.0)

    # For any orthogonal O the factors (B O^T, O A) have the same product. The child's A gets orthogonal rows with the
    # first parent's typical row norm, so that the learning rate has the same effect as before. O is chosen so
    # that the child's A is as near as possible to the first parent's A.
    polar_left, _, polar_right = torch.linalg.svd(to_row_space[..., blocks[0]].mT @ right)
    gauge = polar_left @ polar_right
    scale = torch.diagonal(down_gram, dim1=-2, dim2=-1)[:, :rank].mean(-1).sqrt()[:, None, None]
    scale = torch.where(scale > 0, scale, 1.0)
    down_maps = scale * gauge @ right.mT @ from_row_space.mT
    up_maps = from_column_space @ left @ gauge.mT / scale
    return down_maps.float(), up_maps.float()


def compute_norms(cores: Tensor) -> Tensor:
    """Computes the Frobenius norm of each matrix of a batch `[n, R, R]`. Returns `[n, 1, 1]`."""
    return cores.square().sum((-2, -1), keepdim=True).sqrt()


def find_singular_bases(cores: list[Tensor]) -> tuple[Tensor, Tensor]:
    """
    Finds orthogonal bases `left` and `right`, `[n, R, R]`, for two parents' cores. In these bases the better parent's
    core is diagonal, and so is the part of the worse parent's core outside of the better one's spaces.

    Operators that treat single entries need these bases. In other bases the meaning of an entry would depend on how a
    parent's product happens to be factored.
    """
    rank = cores[0].shape[-1] // 2
    left, _, right = torch.linalg.svd(cores[0])
    outside = left[..., rank:].mT @ cores[1] @ right[..., rank:, :].mT
    outside_left, _, outside_right = torch.linalg.svd(outside)
    left = torch.cat([left[..., :rank], left[..., rank:] @ outside_left], dim=-1)
    right = torch.cat([right[..., :rank, :], outside_right @ right[..., rank:, :]], dim=-2)
    return left, right
