"""Phase 5: the order of rows in the buffered micro-batches, and which of them have a gradient.

TRL shuffles the generation batch and cuts it into micro-batches. Here the same rows are dealt again, so that a
micro-batch holds one role where possible, every member's rows stand together in equal numbers (the fast path of the
routed LoRA layer), rows of like length meet, and padding that no row of a micro-batch needs is cut away.

Most rows of a step have advantage 0: every attempt of their group did equally well. Without a KL term such a row has
no gradient. It becomes *blank*: it stands last, its masks are empty, and no forward computes it. It goes on counting
in every normaliser, so the update is the same but for rounding.

Shapes: R rows of this rank, B rows per micro-batch, P prompt tokens, C completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trl_populora.adapters.routing import Router


Batch = dict[str, torch.Tensor]
# Log-probabilities, entropies if they were asked for, and the load-balancing loss, which is refused, as TRL has them.
LogProbs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]

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
# With these at 0 a row's ratio to the old policy is 1, and its tokens count nowhere.
_BLANKED_COLUMNS = (
    "prompt_mask",
    "completion_mask",
    "old_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
)


def blank(batch: Batch) -> Batch:
    """Empties the masks of rows without advantage or without a token in the loss."""
    dead = (batch["advantages"] == 0) | ~batch["completion_mask"].any(1)
    columns = [name for name in _BLANKED_COLUMNS if name in batch]
    return batch | {name: batch[name].masked_fill(dead[:, None], 0) for name in columns}


class LiveRows:
    """
    A micro-batch without its blank rows.

    Args:
        rows (`torch.Tensor`): Positions of its live rows, as [`live_rows`] gives them.
        ids, mask (`torch.Tensor`): All rows, `[B, P + C]`.

    Attributes:
        ids, mask (`torch.Tensor`): The live ones.
    """

    def __init__(self, rows: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor):
        self.rows, self.size = rows, len(mask)
        self.ids, self.mask = ids[rows], mask[rows]
        if not self.mask.any():
            self.mask = torch.ones_like(self.mask)  # attention to nothing is not a number

    def spread(self, found: LogProbs) -> LogProbs:
        """What was found for the live rows, among all; the others get 0."""
        logps, entropies, aux_loss = found
        return self._spread(logps), None if entropies is None else self._spread(entropies), aux_loss

    def _spread(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(self.size, values.shape[1]).index_copy(0, self.rows, values)


def by_micro_batch(
    computed: Callable[[torch.Tensor, torch.Tensor], LogProbs],
    router: Router,
    members: Sequence[int],
    ids: torch.Tensor,
    mask: torch.Tensor,
    size: int,
) -> LogProbs:
    """
    Log-probabilities of many rows, each under its own member.

    Args:
        computed (`Callable`): `(ids, mask)` of some rows -> their log-probabilities.
        router ([`Router`]): Is told whose they are.
        members (`Sequence[int]`): Member index per row, shape `[R]`.
        ids, mask (`torch.Tensor`): `[R, P + C]`.
        size (`int`): Rows of a forward.
    """
    parts = []
    for start in range(0, len(ids), size):
        part = slice(start, start + size)
        with router.rows_of(members[part]):
            parts.append(computed(ids[part], mask[part]))
    logps, entropies, _ = zip(*parts, strict=True)
    return torch.cat(logps), None if entropies[0] is None else torch.cat(entropies), None


def live_rows(mask: torch.Tensor) -> torch.Tensor:
    """
    The rows that a forward has to compute.

    Args:
        mask (`torch.Tensor`): Attention mask of a micro-batch, `[B, P + C]`.

    Returns:
        `torch.Tensor`: Positions of the rows that are not blank. The first row if all are: processes meet in every
            forward and backward, so none is left out.
    """
    rows = mask.any(1).nonzero().squeeze(1)
    return rows if len(rows) else rows.new_zeros(1)


def deal(members: Sequence[int], lengths: Sequence[int], num_teachers: int, batch_size: int) -> list[int]:
    """
    Orders rows for micro-batches of `batch_size`; blank rows, whose length is 0, come last.

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
        rows = [row for row, member in enumerate(members) if (member >= num_teachers) == is_student and lengths[row]]
        order += _deal_role(rows, members, lengths, batch_size)
    order += [row for row, length in enumerate(lengths) if not length]
    # A member's rows stand together, so that the routed layers need not gather them.
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [row for batch in batches for row in sorted(batch, key=lambda row: members[row])]


def _deal_role(rows: Sequence[int], members: Sequence[int], lengths: Sequence[int], batch_size: int) -> list[int]:
    """Rows of one role, longest first; the members take turns with equal segments while they have rows."""
    by_member: dict[int, list[int]] = {}
    for row in sorted(rows, key=lambda row: -lengths[row]):
        by_member.setdefault(members[row], []).append(row)
    queues = [by_member[member] for member in sorted(by_member)]
    segment = max(1, batch_size // max(1, len(queues)))
    starts = range(0, max(map(len, queues), default=0), segment)
    return [row for start in starts for queue in queues for row in queue[start : start + segment]]


def reorder(batches: Sequence[Batch], num_teachers: int, multiple: int = 1, blanks: bool = False) -> list[Batch]:
    """
    Deals the rows of buffered micro-batches again (see [`deal`]) and trims their padding.

    Args:
        batches (`Sequence[dict]`): Micro-batches with the column `member`; each has the same number of rows.
        num_teachers (`int`): Members below this index are teachers.
        multiple (`int`, *optional*, defaults to `1`): Widths of P and C stay multiples of it (`pad_to_multiple_of`).
        blanks (`bool`, *optional*, defaults to `False`): Whether rows without advantage become blank (see [`blank`]).

    Returns:
        `list[dict]`: As many micro-batches with the same rows in another order.
    """
    whole = {
        key: torch.cat([batch[key] for batch in batches]) if _is_column(value) else value
        for key, value in batches[0].items()
    }
    whole = blank(whole) if blanks else whole
    lengths = (whole["prompt_mask"].sum(1) + whole["completion_mask"].sum(1)).tolist()
    size = len(batches[0]["member"])
    order = torch.tensor(deal(whole["member"].tolist(), lengths, num_teachers, size), device=whole["member"].device)
    return [
        trim({key: value[part] if _is_column(value) else value for key, value in whole.items()}, multiple)
        for part in order.split(size)
    ]


def trim(batch: Batch, multiple: int = 1) -> Batch:
    """Cuts what is padding in every row, `multiple` columns at a time; one prompt and one completion token stay."""
    needed = batch["prompt_mask"].any(0)
    left = int(needed.int().argmax()) if needed.any() else len(needed) - 1
    left = left // multiple * multiple
    used = batch["completion_mask"].any(0).nonzero()
    right = int(used.max()) + 1 if len(used) else 1
    right = -(-right // multiple) * multiple
    cut = {key: batch[key][:, left:] for key in _PROMPT_COLUMNS}
    cut |= {key: batch[key][:, :right] for key in _COMPLETION_COLUMNS if key in batch and batch[key].shape[1] > 1}
    return batch | cut


def padding_fraction(batches: Sequence[Batch]) -> float:
    """Share of the token grid of all forwards that is padding."""
    masks = [torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1) for batch in batches]
    masks = [mask[live_rows(mask)] for mask in masks]
    return 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)


def live_fraction(batches: Sequence[Batch]) -> float:
    """Share of the rows of all micro-batches that are not blank."""
    live = [batch["prompt_mask"].any(1).float() for batch in batches]
    return float(torch.cat(live).mean())


def _is_column(value: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
