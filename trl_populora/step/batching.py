"""Update: which rows of a step are computed together, and the micro-batches that are cut accordingly.

A step's rows are dealt once, by [`plan_micro_batches`], as soon as their advantages are known. A micro-batch holds one
role where possible. The rows of a member stand side by side, and where possible every member has as many as the
others (the fast path of the routed LoRA layer). Either attempts at one task or rows of like length meet, whichever
costs less (see `forwards.py`). [`cut`] makes the tensors, without padding that no row of a micro-batch needs.

A micro-batch is bounded by tokens, not by rows: `per_device_train_batch_size` times the longest prompt and completion.
So it holds few long rows or many short ones, and needs no more memory than that many of the longest rows.

Many rows of a step have advantage 0: every attempt of their group did equally well. Without a KL term such a row has
no gradient. It is *blank*: no micro-batch holds it, but it goes on counting in every normaliser, so the update is the
same but for rounding. All other rows are *live*. A micro-batch that would be empty holds one row with empty masks
instead, because TRL and processes that meet in forwards and backwards count on it. Where nobody does, it is not
computed: on a GPU it takes nearly as long as a full one.

Shapes: R rows of this rank, B rows of a micro-batch, P prompt tokens, C completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import torch
from accelerate.utils import gather, reduce
from torch import nn

from trl_populora.step.forwards import Layout, Sharing, lay_out


Batch = dict[str, torch.Tensor]
Packs = list[list[int]]  # `packs[i]`: the training rows that row i of the forward computes

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
# With these at 0 a row's ratio to the old policy is finite, and its tokens count nowhere. Its reference is set where
# the forward is known: without its context a row's KL may be infinite, and infinity times the mask's 0 is NaN.
_BLANKED_COLUMNS = (
    "prompt_mask",
    "completion_mask",
    "old_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
)


def plan_micro_batches(
    members: Sequence[int],
    prompts: Sequence[int],
    asked: Sequence[int],
    answered: Sequence[int],
    num_teachers: int,
    size: int,
    sharing: Sharing | None = None,
) -> list[Packs]:
    """
    Deals the rows of a step into micro-batches.

    Args:
        members (`Sequence[int]`): Member index of each row, shape `[R]`.
        prompts (`Sequence[int]`): A number per row; rows with the same number have one member and one prompt.
        asked, answered (`Sequence[int]`): Tokens of each row's prompt and completion; both 0 for blank rows.
        num_teachers (`int`): Members below this index are teachers.
        size (`int`): How many of the longest rows a micro-batch holds.
        sharing ([`~trl_populora.step.forwards.Sharing`], *optional*): How the model takes shared prompts.

    Returns:
        `list[list[list[int]]]`: The packs of each micro-batch. There are `R / size` micro-batches, rounded up, where R
            counts blank rows as well; the last ones may be empty.
    """
    budget = size * (max(asked) + max(answered))

    def lay(rows: Sequence[int]) -> Layout:
        columns = [[column[row] for row in rows] for column in (prompts, asked, answered)]
        return lay_out(columns[0], columns[1], columns[2], sharing, budget)

    def exceeds(rows: Sequence[int]) -> bool:
        return lay(rows).grid > budget

    ways = []
    for keys in (None,) if sharing is None else (None, prompts):
        batches: list[list[int]] = []
        for is_student in (False, True):
            own = [(member >= num_teachers) == is_student for member in members]
            lengths = [(asked[row] + answered[row]) * own[row] for row in range(len(members))]
            _fill(batches, take_turns(members, lengths, keys), size, exceeds)
        # A member's rows stand together, so that the routed layers need not gather them.
        ways.append([sorted(rows, key=lambda row: members[row]) for rows in batches])
    layouts = [[lay(rows) for rows in way] for way in ways]
    costs = [sum(layout.cost(sharing) for layout in way) for way in layouts]
    best = costs.index(min(costs))
    packs = [
        [[rows[place] for place in pack] for pack in layout.packs]
        for rows, layout in zip(ways[best], layouts[best], strict=True)
    ]
    return packs + [[] for _ in range(-(-len(members) // size) - len(packs))]


def take_turns(members: Sequence[int], lengths: Sequence[int], prompts: Sequence[int] | None) -> list[list[int]]:
    """
    Orders the rows that have a length, longest first; the members take turns while they have rows.

    Args:
        members (`Sequence[int]`): Member index per row, shape `[R]`.
        lengths (`Sequence[int]`): Tokens per row, shape `[R]`; rows of length 0 are left out: blank rows, and those
            of the other role.
        prompts (`Sequence[int]`, *optional*): Rows with the same number stay together.

    Returns:
        `list[list[int]]`: Rows that should share a micro-batch: those of one prompt, or one of each member.
    """
    queues: dict[int, dict[int, list[int]]] = {member: {} for member in sorted(set(members))}
    for row in sorted(range(len(members)), key=lambda row: -lengths[row]):
        if lengths[row]:
            queues[members[row]].setdefault(row if prompts is None else prompts[row], []).append(row)
    turns = zip_longest(*(queue.values() for queue in queues.values()), fillvalue=[])
    if prompts is None:
        return [[row for group in turn for row in group] for turn in turns]
    return [group for turn in turns for group in turn if group]


def _fill(
    batches: list[list[int]], groups: Sequence[list[int]], size: int, exceeds: Callable[[Sequence[int]], bool]
) -> None:
    """Adds the groups of one role's rows to the last micro-batch while it has room, then to new ones."""
    first = True  # a role begins a new micro-batch, unless the role before has left the last one unfilled
    for group in groups:
        splits = ([group[start::count] for start in range(count)] for count in range(1, len(group) + 1))
        # The group, split into the fewest equal pieces that fit into a micro-batch each.
        for piece in next(split for split in splits if not any(map(exceeds, split))):
            enough = bool(batches) and len(batches[-1]) >= size
            if not batches or (enough and (first or exceeds(batches[-1] + piece))):
                batches.append([])
            for row in piece:
                if batches[-1] and exceeds([*batches[-1], row]):
                    batches.append([])
                batches[-1].append(row)
            first = False


def cut(whole: Batch, plan: Sequence[Packs], multiple: int = 1) -> list[Batch]:
    """
    The micro-batches of a plan, without padding that none of their rows needs.

    Args:
        whole (`dict`): A step's rows.
        plan (`Sequence`): As [`plan_micro_batches`] returns it.
        multiple (`int`, *optional*, defaults to `1`): Widths of P and C stay multiples of it (`pad_to_multiple_of`).

    Returns:
        `list[dict]`: They have the column `pack`: the row of the forward that a row belongs to, -1 for a blank row.
    """
    return [trim(_micro_batch(whole, packs), multiple) for packs in plan]


def by_micro_batch(
    forward: Callable[[Batch], torch.Tensor], batches: Sequence[Batch], rows: int, columns: int, together: bool
) -> torch.Tensor:
    """
    Log-probabilities that are computed in micro-batches, in the order of the rows.

    Args:
        forward (`Callable`): Gives those of a micro-batch, `[B, C]` of its own C.
        batches (`Sequence[dict]`): Micro-batches with the column `row`: where each row belongs.
        rows, columns (`int`): Of the result.
        together (`bool`): Whether ranks meet in every forward, so that each runs those of blank rows, too.

    Returns:
        `torch.Tensor`: `[R, C]`, NaN for rows in no micro-batch.
    """
    found = torch.full((rows, columns), float("nan"), device=batches[0]["row"].device)
    for batch in batches:
        live = batch["pack"] >= 0
        if not (together or live.any()):
            continue
        values = forward(batch)
        found[batch["row"][live]] = nn.functional.pad(values, (0, columns - values.shape[1])).to(found.dtype)[live]
    return found


def part(ids: torch.Tensor, mask: torch.Tensor, completion_length: int, members: torch.Tensor) -> Batch:
    """Rows `[R, P + C]` of these members as [`cut`] takes them; the column `row` numbers them."""
    first = ids.shape[1] - completion_length
    return {
        "prompt_ids": ids[:, :first],
        "prompt_mask": mask[:, :first],
        "completion_ids": ids[:, first:],
        "completion_mask": mask[:, first:],
        "member": members,
        "row": torch.arange(len(ids), device=ids.device),
    }


def join(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The inverse: ids and mask `[B, P + C]`, and C."""
    ids, mask = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], dim=1) for name in ("ids", "mask"))
    return ids, mask, batch["completion_ids"].shape[1]


def layout_of(batch: Batch) -> Layout:
    """How the rows of a micro-batch of [`cut`] enter the model."""
    packs: dict[int, list[int]] = {}
    for row, number in enumerate(batch["pack"].tolist()):
        if number >= 0:
            packs.setdefault(number, []).append(row)
    return Layout([*packs.values()] or [[0]], *_lengths(batch))  # processes may have to run as many forwards


def _micro_batch(whole: Batch, packs: Sequence[Sequence[int]]) -> Batch:
    """The rows of the packs; one blank row if there are none."""
    rows = [row for pack in packs for row in pack]
    numbers = [number for number, pack in enumerate(packs) for _ in pack]
    device = whole["member"].device
    batch = _rows_of(whole, torch.tensor(rows or [0])) | {"pack": torch.tensor(numbers or [-1], device=device)}
    return batch if rows else _empty(batch, batch["pack"] < 0)


def match_ranks(batches: Sequence[Batch], rows: int) -> tuple[list[Batch], dict[str, float]]:
    """
    Pads each micro-batch of [`cut`] with blank rows until all ranks have as many, because TRL gathers a value per row.
    Collective.

    Args:
        batches (`Sequence[dict]`): This rank's.
        rows (`int`): How many rows it has in this step.

    Returns:
        The micro-batches, each with two counts over all ranks: `live`, the rows that are computed, and `tokens`, their
        completion tokens; and metrics, averaged over the ranks.
    """
    device = batches[0]["member"].device
    sizes = [(len(b["member"]), live_rows([b]), int(b["completion_mask"].sum())) for b in batches]
    everywhere = gather(torch.tensor(sizes, device=device)[None])
    most, (live, tokens) = everywhere[..., 0].amax(0), everywhere[..., 1:].sum(0).unbind(1)
    shares = {
        "batch/padding": padding_fraction(batches),
        "batch/live_rows": live_rows(batches) / rows,
        "batch/shared_tokens": shared_fraction(batches),
    }
    means = reduce(torch.tensor([*shares.values()], device=device), "mean").tolist()
    even = [add_blank_rows(b, int(most[i])) | {"live": live[i], "tokens": tokens[i]} for i, b in enumerate(batches)]
    return even, dict(zip(shares, means, strict=True))


def add_blank_rows(batch: Batch, rows: int) -> Batch:
    """A micro-batch with blank rows added, so that it has as many as on the other ranks."""
    own = len(batch["member"])
    more = _rows_of(batch, torch.arange(rows).where(torch.arange(rows) < own, torch.tensor(0)))
    added = torch.arange(rows, device=batch["member"].device) >= own
    return _empty(more, added) | {"pack": more["pack"].masked_fill(added, -1)}


def _empty(batch: Batch, rows: torch.Tensor) -> Batch:
    columns = [name for name in _BLANKED_COLUMNS if name in batch]
    return batch | {name: batch[name].masked_fill(rows[:, None], 0) for name in columns}


def _rows_of(batch: Batch, rows: torch.Tensor) -> Batch:
    return {key: value[rows.to(value.device)] if _is_column(value) else value for key, value in batch.items()}


def _lengths(batch: Batch) -> tuple[list[int], list[int]]:
    """Prompt and completion tokens of each row."""
    return batch["prompt_mask"].sum(1).tolist(), batch["completion_mask"].sum(1).tolist()


def trim(batch: Batch, multiple: int = 1) -> Batch:
    """
    Cuts what is padding in every row, `multiple` columns at a time. At least one prompt column and two completion
    columns stay: TRL's metrics would take a single column for one value per sequence, without a mask.
    """
    needed = batch["prompt_mask"].any(0)
    left = int(needed.int().argmax()) if needed.any() else len(needed) - 1
    left = left // multiple * multiple
    used = batch["completion_mask"].any(0).nonzero()
    right = max(2, int(used.max()) + 1 if len(used) else 0)
    right = -(-right // multiple) * multiple
    kept = {key: batch[key][:, left:] for key in _PROMPT_COLUMNS}
    kept |= {key: batch[key][:, :right] for key in _COMPLETION_COLUMNS if key in batch and batch[key].shape[1] > 1}
    return batch | kept


def padding_fraction(batches: Sequence[Batch]) -> float:
    """Share of the token grid of all forwards that is padding."""
    layouts = [layout_of(batch) for batch in batches]
    return 1 - sum(layout.used for layout in layouts) / sum(layout.grid for layout in layouts)


def shared_fraction(batches: Sequence[Batch]) -> float:
    """Share of the tokens of all live rows that is not computed, because a prompt stands once for several rows."""
    tokens = sum(sum(map(sum, _lengths(batch))) for batch in batches)
    return 1 - sum(layout_of(batch).used for batch in batches) / max(1, tokens)


def live_rows(batches: Sequence[Batch]) -> int:
    """How many rows of all micro-batches are computed."""
    return sum(int((batch["pack"] >= 0).sum()) for batch in batches)


def _is_column(value: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
