"""Phase 5: the order of rows in the buffered micro-batches.

TRL shuffles the generation batch and cuts it into micro-batches. Here the same rows are dealt again, so that a
micro-batch holds one role where possible, every member's rows stand together in equal numbers (the fast path of the
routed LoRA layer), rows of like length meet, and padding that no row of a micro-batch needs is cut away.

Shapes: R rows of this rank, B rows per micro-batch, P prompt tokens, C completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


Batch = dict[str, torch.Tensor]

# Columns padded on the left to P and on the right to C. `importance_sampling_ratio` is [R, 1] in sequence modes.
_PROMPT_COLUMNS = ("prompt_ids", "prompt_mask")
_COMPLETION_COLUMNS = (
    "completion_ids",
    "completion_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
)


def deal(members: Sequence[int], lengths: Sequence[int], num_teachers: int, batch_size: int) -> list[int]:
    """
    Orders rows for micro-batches of `batch_size`.

    Args:
        members (`Sequence[int]`): Member index per row, shape `[R]`; teachers come first in the population.
        lengths (`Sequence[int]`): Tokens per row, shape `[R]`.
        num_teachers (`int`): Members below this index are teachers.
        batch_size (`int`): Rows per micro-batch, B.

    Returns:
        `list[int]`: A permutation of the rows; consecutive slices of B are the micro-batches.
    """
    order: list[int] = []
    for is_student in (False, True):
        rows = [row for row, member in enumerate(members) if (member >= num_teachers) == is_student]
        order += _deal_role(rows, members, lengths, batch_size)
    return order


def _deal_role(rows: Sequence[int], members: Sequence[int], lengths: Sequence[int], batch_size: int) -> list[int]:
    """Rows of one role: in equal member segments per micro-batch if the numbers allow, else member by member."""
    by_member: dict[int, list[int]] = {}
    for row in sorted(rows, key=lambda row: -lengths[row]):
        by_member.setdefault(members[row], []).append(row)
    queues = [by_member[member] for member in sorted(by_member)]
    even = len({len(queue) for queue in queues}) == 1
    if not even or batch_size % len(queues) or len(rows) % batch_size:
        return [row for queue in queues for row in queue]
    segment = batch_size // len(queues)
    starts = range(0, len(queues[0]), segment)
    return [row for start in starts for queue in queues for row in queue[start : start + segment]]


def reorder(batches: Sequence[Batch], num_teachers: int, multiple: int = 1) -> list[Batch]:
    """
    Deals the rows of buffered micro-batches again (see [`deal`]) and trims their padding.

    Args:
        batches (`Sequence[dict]`): Micro-batches with the column `member`; each has the same number of rows.
        num_teachers (`int`): Members below this index are teachers.
        multiple (`int`, *optional*, defaults to `1`): Widths of P and C stay multiples of it (`pad_to_multiple_of`).

    Returns:
        `list[dict]`: As many micro-batches with the same rows in another order.
    """
    whole = {
        key: torch.cat([batch[key] for batch in batches]) if _is_column(value) else value
        for key, value in batches[0].items()
    }
    lengths = (whole["prompt_mask"].sum(1) + whole["completion_mask"].sum(1)).tolist()
    size = len(batches[0]["member"])
    order = torch.tensor(deal(whole["member"].tolist(), lengths, num_teachers, size), device=whole["member"].device)
    return [
        trim({key: value[part] if _is_column(value) else value for key, value in whole.items()}, multiple)
        for part in order.split(size)
    ]


def trim(batch: Batch, multiple: int = 1) -> Batch:
    """Cuts what is padding in every row, `multiple` columns at a time; one prompt and one completion token stay."""
    left = int(batch["prompt_mask"].any(0).int().argmax()) // multiple * multiple
    used = batch["completion_mask"].any(0).nonzero()
    right = int(used.max()) + 1 if len(used) else 1
    right = -(-right // multiple) * multiple
    cut = {key: batch[key][:, left:] for key in _PROMPT_COLUMNS}
    cut |= {key: batch[key][:, :right] for key in _COMPLETION_COLUMNS if key in batch and batch[key].shape[1] > 1}
    return batch | cut


def padding_fraction(batches: Sequence[Batch]) -> float:
    """Share of the token grid of all micro-batches that is padding."""
    tokens = sum(int(b["prompt_mask"].sum() + b["completion_mask"].sum()) for b in batches)
    return 1 - tokens / sum(b["prompt_mask"].numel() + b["completion_mask"].numel() for b in batches)


def _is_column(value: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
