"""Update: which rows of a step are computed together, how they enter the model, and the figures of TRL's loss.

    rows of a step [R, P + C] --plan_micro_batches--> packs --cut--> micro-batches [B, P' + C'], of unequal sizes

A step's rows are dealt once, by [`plan_micro_batches`], as soon as their advantages are known. At most one micro-batch
holds rows of both roles; a single agent's rows count as one role. In a micro-batch the rows of a member stand side by
side. Rows are dealt from each member in turn, so that members often have equally many rows there. Then the routed LoRA
layer computes all of them at once. If the model can share prompts, two ways of dealing are compared, and the cheaper
one is taken: the attempts at one task together, or rows of similar length together. [`cut`] then makes the tensors,
and leaves out padding that no row of the micro-batch needs.

The size of a micro-batch is bounded in tokens: `per_device_train_batch_size` times the sum of the longest prompt and
the longest completion. So a micro-batch holds few long rows or many short ones.

There are two sorts of blank rows. All other rows are *live*.

- *Skipped rows* belong to the step, and no micro-batch holds them. A row has no gradient if all its tokens are
  masked, and without a KL term also if its advantage is 0 (often because all attempts did equally well). Wherever
  the loss is divided by a number of rows or tokens, skipped rows are counted. So leaving them out changes the update
  by rounding at most.
- *Filler rows* belong to no step. They have masks of 0. TRL wants the same number of micro-batches in every step. So
  an empty micro-batch gets one filler row. TRL also gathers one value per row from all ranks. So filler rows are added
  until a micro-batch has equally many rows on all ranks. If a micro-batch has filler rows alone, the trainer's
  `_compute_loss` skips it where it can: on a GPU it would take nearly as long as a full one.

The update of eight adapters was compared with stock TRL's update of one adapter, with half of the rows skipped and
with shared prompts. It took 19 % of TRL's time at the shape of a 7B base, with completions of 256 tokens (H200, bf16).
It took 12 % on a CPU with a base of width 256 and completions of up to 2048 tokens. `benchmarks/RESULTS.md` has both.

Shapes: R rows of this rank, B rows of a micro-batch, P prompt tokens (left-padded), C completion tokens
(right-padded), N rows of the forward, L tokens of its longest row.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from accelerate.utils import gather, reduce
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig
from trl.trainer import utils as trl_utils


Batch = dict[str, torch.Tensor]
Packs = list[list[int]]  # `packs[i]` lists the training rows that row i of the forward computes together

# Prompt columns are padded on the left to P tokens, completion columns on the right to C tokens. One exception:
# `importance_sampling_ratio` is [R, 1] if `vllm_importance_sampling_mode` begins with `sequence`.
_PROMPT_COLUMNS = ("prompt_ids", "prompt_mask")
_COMPLETION_COLUMNS = (
    "completion_ids",
    "completion_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
)
# Columns that are 0 in filler rows. Then the ratio to the old policy is finite, and no token counts. For the column
# `ref_per_token_logps` 0 would not do: the KL of a filler row could be infinite, and infinity times the mask's 0 is
# NaN. The trainer's `_compute_loss` sets it for filler rows after the forward, so that their KL is 0.
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
        members: Member index of each row, shape `[R]`.
        prompts: A number per row. Rows with the same number have one member and one prompt.
        asked, answered: Tokens of each row's prompt and completion. Both are 0 for rows to skip.
        num_teachers: Members below this index are teachers; so is a single agent.
        size: How many of the longest rows a micro-batch may hold (`per_device_train_batch_size`).
        sharing: How the model computes rows with a shared prompt; `None` if it cannot share prompts.

    Returns:
        The packs of each micro-batch. There are `R / size` micro-batches, rounded up, where R counts skipped rows as
        well. The last ones may be empty.
    """
    # A micro-batch may have as many tokens, padding included, as `size` rows with the step's longest prompt and its
    # longest completion. Many short rows may take the place of a long one.
    budget = size * (max(asked) + max(answered))

    def columns_of(rows: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        return [prompts[row] for row in rows], [asked[row] for row in rows], [answered[row] for row in rows]

    def lay(rows: Sequence[int]) -> Layout:
        return lay_out(*columns_of(rows), sharing, budget)

    def exceeds(rows: Sequence[int]) -> bool:
        return all(layout.grid > budget for layout in list_layouts(*columns_of(rows), sharing, budget))

    ways = []
    # Way 1 puts rows of similar length together, so that little is padded. Way 2 puts the attempts at one task
    # together, so that their prompt is computed once.
    for keys in (None,) if sharing is None else (None, prompts):
        batches: list[list[int]] = []
        # Proposals are longer than attempts, as a rule: mixed micro-batches would be mostly padding.
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
    # The number of micro-batches is fixed, because TRL and DDP count on it. Where rows are skipped or short, some are
    # empty.
    return packs + [[] for _ in range(-(-len(members) // size) - len(packs))]


def take_turns(members: Sequence[int], lengths: Sequence[int], prompts: Sequence[int] | None) -> list[list[int]]:
    """
    Orders each member's rows from long to short, and lets the members take turns as long as they have rows.

    Args:
        members: Member index per row, shape `[R]`.
        lengths: Tokens per row, shape `[R]`. Rows of length 0 are left out: rows to skip, and rows of the other role.
        prompts: Rows with the same number stay together; `None` if prompts do not matter.

    Returns:
        Groups of rows that should share a micro-batch. With `prompts` a group holds all rows of one prompt. Without
        `prompts` a group holds one row from each member that has rows left.
    """
    # Per member, its rows from long to short, grouped by prompt where prompts matter.
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
    """
    Deals one role's groups of rows into micro-batches, one group after the other.

    The last micro-batch takes a group whole if the group fits. If it does not fit and the micro-batch has fewer than
    `size` rows, rows are added one by one, and the first that does not fit begins a new micro-batch. Once the last
    micro-batch has `size` rows, a group that does not fit begins a new one; so does a role's first group, even if it
    fits.
    """
    first = True
    for group in groups:
        splits = ([group[start::count] for start in range(count)] for count in range(1, len(group) + 1))
        # A group that does not fit into one micro-batch is split into as few pieces as possible, of about
        # equal size.
        for piece in next(split for split in splits if not any(map(exceeds, split))):
            full = not batches or len(batches[-1]) >= size
            if batches and not (full and first) and not exceeds(batches[-1] + piece):
                batches[-1] += piece
            elif full:
                batches.append(piece)
            else:
                for row in piece:
                    if exceeds([*batches[-1], row]):
                        batches.append([])
                    batches[-1].append(row)
            first = False


def cut(whole: Batch, plan: Sequence[Packs], multiple: int = 1) -> list[Batch]:
    """
    Cuts the rows of a step into the micro-batches of a plan. Padding that no row of a micro-batch needs is left out.

    Args:
        whole: The rows of a step as TRL has made them, a dict of columns.
        plan: As [`plan_micro_batches`] returns it.
        multiple: P and C of a micro-batch stay multiples of it (`pad_to_multiple_of`).

    Returns:
        The micro-batches. Their column `pack` says which row of the forward a row belongs to; -1 marks a filler row.
    """
    return [trim(_micro_batch(whole, packs), multiple) for packs in plan]


def compute_by_micro_batch(
    forward: Callable[[Batch], torch.Tensor], batches: Sequence[Batch], rows: int, columns: int, together: bool
) -> torch.Tensor:
    """
    Computes log-probabilities micro-batch by micro-batch, and puts them back into the order of the rows.

    Args:
        forward: Computes the log-probabilities of one micro-batch, `[B, C']`. C' is the micro-batch's longest
            completion.
        batches: Micro-batches with a column `row`, the place of each row in the result.
        rows, columns: R and C, the size of the result.
        together: Whether every forward needs all ranks. Then micro-batches of filler rows alone are computed, too.

    Returns:
        Log-probabilities of shape `[R, C]`. Rows in no micro-batch are NaN.
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
    """Splits `ids` and `mask`, `[R, P + C]`, into the columns that [`cut`] takes. Column `row` numbers the rows."""
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
    """Joins the columns of a micro-batch again: ids and mask `[B, P + C]`, and C."""
    ids, mask = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], dim=1) for name in ("ids", "mask"))
    return ids, mask, batch["completion_ids"].shape[1]


def read_layout(batch: Batch) -> Layout:
    """Reads from the column `pack` how the rows of a micro-batch enter the model."""
    packs: dict[int, list[int]] = {}
    for row, number in enumerate(batch["pack"].tolist()):
        if number >= 0:
            packs.setdefault(number, []).append(row)
    asked, answered = _lengths(batch)
    # Without live rows one filler row is computed, because other processes may wait for this forward.
    return Layout([*packs.values()] or [[0]], asked, answered)


def _micro_batch(whole: Batch, packs: Sequence[Sequence[int]]) -> Batch:
    """Takes the rows of the packs; one filler row if there are none."""
    rows = [row for pack in packs for row in pack]
    numbers = [number for number, pack in enumerate(packs) for _ in pack]
    device = whole["member"].device
    batch = _rows_of(whole, torch.tensor(rows or [0])) | {"pack": torch.tensor(numbers or [-1], device=device)}
    return batch if rows else _empty(batch, batch["pack"] < 0)


def match_ranks(batches: Sequence[Batch], rows: int) -> tuple[list[Batch], dict[str, float]]:
    """
    Adds filler rows to the micro-batches, so that each has the same number of rows on every rank, because TRL gathers
    one value per row. Collective.

    Args:
        batches: This rank's, from [`cut`].
        rows: How many rows this rank has in the step.

    Returns:
        The micro-batches and metrics. Each micro-batch gets two counts over all ranks: `live`, the number of live
        rows, and `tokens`, their completion tokens. The metrics are means over the ranks.
    """
    device = batches[0]["member"].device
    # One gather is enough, because every rank has the same number of micro-batches. For each micro-batch it gives the
    # largest number of rows on any rank, and the live rows and tokens of all ranks together.
    layouts, lives = [read_layout(b) for b in batches], [int((b["pack"] >= 0).sum()) for b in batches]
    sizes = [(len(b["member"]), n, sum(lay.completions)) for b, n, lay in zip(batches, lives, layouts, strict=True)]
    everywhere = gather(torch.tensor(sizes, device=device)[None])
    most, (live, tokens) = everywhere[..., 0].amax(0), everywhere[..., 1:].sum(0).unbind(1)
    computed = sum(layout.used for layout in layouts)
    tokens_of_rows = sum(sum(layout.prompts) + sum(layout.completions) for layout in layouts)
    shares = {
        "batch/padding": 1 - computed / sum(layout.grid for layout in layouts),
        "batch/live_rows": sum(lives) / rows,
        "batch/shared_tokens": 1 - computed / max(1, tokens_of_rows),  # rows that share a prompt compute it once
    }
    means = reduce(torch.tensor([*shares.values()], device=device), "mean").tolist()
    even = [add_blank_rows(b, int(most[i])) | {"live": live[i], "tokens": tokens[i]} for i, b in enumerate(batches)]
    return even, dict(zip(shares, means, strict=True))


def add_blank_rows(batch: Batch, rows: int) -> Batch:
    """Adds filler rows to a micro-batch until it has `rows` rows."""
    own = len(batch["member"])
    more = _rows_of(batch, torch.arange(rows).where(torch.arange(rows) < own, torch.tensor(0)))
    added = torch.arange(rows, device=batch["member"].device) >= own
    return _empty(more, added) | {"pack": more["pack"].masked_fill(added, -1)}


def _empty(batch: Batch, rows: torch.Tensor) -> Batch:
    columns = [name for name in _BLANKED_COLUMNS if name in batch]
    return batch | {name: batch[name].masked_fill(rows[:, None], 0) for name in columns}


def _rows_of(batch: Batch, rows: torch.Tensor) -> Batch:
    return {
        key: value[rows.to(value.device)] if isinstance(value, torch.Tensor) and value.dim() else value
        for key, value in batch.items()
    }


def _lengths(batch: Batch) -> tuple[list[int], list[int]]:
    """Counts the prompt and completion tokens of each row."""
    return batch["prompt_mask"].sum(1).tolist(), batch["completion_mask"].sum(1).tolist()


def trim(batch: Batch, multiple: int = 1) -> Batch:
    """
    Cuts columns that are padding in every row, `multiple` at a time.

    At least one prompt column and two completion columns stay. If there were one completion column, TRL's metrics
    would read it as one value per sequence, and would not mask it.
    """
    # Prompts are padded on the left, completions on the right: cut from both ends.
    needed = batch["prompt_mask"].any(0)
    left = int(needed.int().argmax()) if needed.any() else len(needed) - 1
    left = left // multiple * multiple
    used = batch["completion_mask"].any(0).nonzero()
    right = max(2, int(used.max()) + 1 if len(used) else 0)
    right = -(-right // multiple) * multiple
    kept = {key: batch[key][:, left:] for key in _PROMPT_COLUMNS}
    kept |= {key: batch[key][:, :right] for key in _COMPLETION_COLUMNS if key in batch and batch[key].shape[1] > 1}
    return batch | kept


# How the rows of a micro-batch enter the model.
#
#     micro-batch [B, P + C] --Layout--> forward [N, L] --TRL's method--> log-probabilities [B, C]
#
# Attempts of one member at one task may become branches of one row of the forward. The prompt stands there once, and a
# completion sees the prompt and no other completion. For the prompt `p0 p1 p2` with the completions `a0 a1` and
# `b0 b1 b2`:
#
#     input      p0 p1 | p2 a0 | p2 b0 b1
#     position    0  1 |  2  3 |  2  3  4
#     predicted   -  - | a0 a1 | b0 b1 b2
#
# A branch begins with the prompt's last token, because that token predicts the completion's first one. It ends before
# the completion's last token, which predicts nothing. Log-probabilities and gradients equal those of separate rows,
# but for rounding.

# What TRL's method returns: log-probabilities, entropies if asked for, and a loss that balances the load of experts.
# The last is `None`, because the config refuses `router_aux_loss_coef`.
LogProbs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
# TRL's method `_get_per_token_logps_and_entropies`, `(model, input_ids, attention_mask, logits_to_keep) -> LogProbs`.
Compute = Callable[..., LogProbs]

# Under a dense mask, attention to a pair of tokens takes about 2 times as long as its multiplications alone, because
# the pair's score is also written, masked and exponentiated. Between .5 and 2.2 times was measured
# (benchmarks/RESULTS.md).
PAIR_SLOWDOWN = 2.0


@dataclass(frozen=True)
class Sharing:
    """
    How a model computes rows with a shared prompt.

    Args:
        additive: True if the model's attention adds the mask to scores (eager), False if it takes a boolean mask
            (SDPA).
        pair_cost: The cost of attention per pair of tokens, divided by the cost of the linear layers per token.
        multiple: L is a multiple of it (`pad_to_multiple_of`).
    """

    additive: bool
    pair_cost: float
    multiple: int = 1

    @classmethod
    def of(cls, base: nn.Module, multiple: int = 1) -> Sharing:
        """Reads from a base model how it shares prompts. [`why_not_shared`] must have found no reason against it."""
        cost = estimate_pair_cost(base.config.get_text_config())
        return cls(base.config._attn_implementation == "eager", cost, multiple)


def estimate_pair_cost(config: PretrainedConfig) -> float:
    """Estimates the cost of attention per pair of tokens, divided by the cost of the linear layers per token."""
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    multiplications = 4 * config.hidden_size * width + 3 * config.hidden_size * inner
    return PAIR_SLOWDOWN * 2 * width / multiplications


def why_not_shared(base: nn.Module) -> str:
    """
    Says why rows of a base model cannot share a prompt; empty if they can.

    Sharing needs attention that obeys any mask, in all decoder layers. It also needs a base that takes positions as an
    argument, and in which only the distance between two positions matters (rotary positions).
    """
    config = base.config.get_text_config()
    attention = base.config._attn_implementation
    if attention not in ("eager", "sdpa"):
        return f"`attn_implementation={attention!r}` knows no mask of branches; 'sdpa' and 'eager' do"
    window = ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    if others := {*(getattr(config, "layer_types", None) or window)} - {"full_attention"}:
        return f"the base has layers of {', '.join(sorted(others))}"
    if "position_ids" not in inspect.signature(base.forward).parameters:
        return "the base takes no `position_ids`"
    if not getattr(config, "rope_parameters", None):
        return "the base has no rotary positions"
    return ""


class Layout:
    """
    How the rows of a micro-batch are laid out in one forward.

    Args:
        packs: Per row of the forward, the rows of the micro-batch that it holds. These have one member and one prompt.
            A pack of several rows becomes branches.
        prompt_lengths, completion_lengths: Tokens of each row of the micro-batch, 0 for filler rows.

    Attributes:
        heads: The first row of each pack. Its member's adapter computes the row of the forward.
        branches: Whether any prompt is shared.
        width: Tokens of each row of the forward, padding included. `pad_to_multiple_of` may add more.
        used: Tokens that are not padding.
    """

    def __init__(
        self, packs: Sequence[Sequence[int]], prompt_lengths: Sequence[int], completion_lengths: Sequence[int]
    ):
        self.packs, self.prompts, self.completions = packs, prompt_lengths, completion_lengths
        self.heads = [pack[0] for pack in packs]
        self.branches = any(len(pack) > 1 for pack in packs)
        answers = [sum(completion_lengths[row] for row in pack) for pack in packs]
        # With branches a prompt's last token stands at the beginning of each branch, and not in the shared part.
        asked = [prompt_lengths[row] - self.branches for row in self.heads]
        self.used = sum(asked) + sum(answers)
        if self.branches:
            self.width = max(ask + answer for ask, answer in zip(asked, answers, strict=True))
        else:
            self.width = max(1, max(asked)) + max(1, max(answers))

    @property
    def grid(self) -> int:
        """All tokens, padding included."""
        return len(self.packs) * self.width

    def cost(self, sharing: Sharing | None) -> float:
        """
        Estimates the forward's cost. The unit is the cost of one token in the linear layers. Without `sharing` the
        cost of attention is left out.
        """
        return self.grid * (1 + (0 if sharing is None else sharing.pair_cost) * self.width)

    def log_probs(
        self,
        compute: Compute,
        model: Callable,
        ids: torch.Tensor,
        mask: torch.Tensor,
        length: int,
        sharing: Sharing | None = None,
    ) -> LogProbs:
        """
        Computes the log-probabilities of a micro-batch. Tokens that are not computed get 0.

        Args:
            compute: TRL's method.
            model: The model, which `compute` calls.
            ids, mask: The micro-batch, `[B, P + C]`.
            length: C.
            sharing: How the model computes rows with a shared prompt; needed if the layout has branches.
        """
        with score_labels_alone():
            if self.branches and sharing is not None:
                return self._log_probs_of_branches(compute, model, ids, length, sharing)
            return self._log_probs_of_rows(compute, model, ids, mask, length)

    def _log_probs_of_rows(
        self, compute: Compute, model: Callable, ids: torch.Tensor, mask: torch.Tensor, length: int
    ) -> LogProbs:
        rows = torch.tensor(self.heads, device=ids.device)
        seen = mask[rows]
        if not self.used:
            seen = torch.ones_like(seen)  # a row whose tokens are all masked would give NaN
        found = compute(model, ids[rows], seen, length)
        return _each(found, lambda values: values.new_zeros(len(ids), length).index_copy(0, rows, values))

    def _log_probs_of_branches(
        self, compute: Compute, model: Callable, ids: torch.Tensor, length: int, sharing: Sharing
    ) -> LogProbs:
        columns = ids.shape[1]
        padding = 0, -self.width % sharing.multiple
        places, branches, positions = (
            nn.functional.pad(pad_sequence(list(part), batch_first=True, padding_value=-1), padding, value=-1).to(
                ids.device
            )
            for part in zip(*self._cells(columns, columns - length), strict=True)
        )
        scored = branches > 0  # the shared part (0) and padding (-1) predict nothing that counts
        predicted = ids.flatten()[places + 1].masked_fill(~scored, -100)
        replaced = {
            "attention_mask": _mask_branches(branches, sharing.additive),
            "position_ids": positions.clamp(min=0),
            "shift_labels": predicted,
        }

        # Drops TRL's labels, which assume that every token predicts the one after it.
        def call_with_branches(labels, **inputs):
            return model(**inputs | replaced)

        packed = ids.flatten()[places.clamp(min=0)]
        found = compute(call_with_branches, packed, torch.ones_like(packed), packed.shape[1])
        target = (places + 1)[scored]
        target = target // columns * length + target % columns - (columns - length)
        return _each(
            found,
            lambda values: values.new_zeros(len(ids) * length).index_copy(0, target, values[scored]).view(-1, length),
        )

    def _cells(self, columns: int, first: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """
        Yields three tensors for each row of the forward. They say of each token where it stands in the flattened
        micro-batch, to which branch it belongs (0 is the shared part of the prompt), and which position it has.
        Completions begin at column `first`.
        """
        for pack in self.packs:
            shared = self.prompts[pack[0]] - 1
            lengths = [shared, *(self.completions[row] for row in pack)]
            starts = [pack[0] * columns + first - 1 - shared, *(row * columns + first - 1 for row in pack)]
            steps = [torch.arange(length) for length in lengths]
            yield (
                torch.cat([start + step for start, step in zip(starts, steps, strict=True)]),
                torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
                torch.cat([steps[0], *(shared + step for step in steps[1:])]),
            )


@contextmanager
def score_labels_alone() -> Iterator[None]:
    """
    Lets TRL's fused head skip positions without a label on a CPU, too.

    TRL skips them only on a GPU with Triton. Elsewhere its head scores prompts and padding as well, which takes a
    quarter of an update with a real vocabulary.
    """
    has_triton = trl_utils._use_triton
    trl_utils._use_triton = lambda device: device.type == "cpu" or has_triton(device)
    try:
        yield
    finally:
        trl_utils._use_triton = has_triton


def _each(found: LogProbs, spread: Callable[[torch.Tensor], torch.Tensor]) -> LogProbs:
    logps, entropies, aux_loss = found
    return spread(logps), None if entropies is None else spread(entropies), aux_loss


def _mask_branches(branches: torch.Tensor, additive: bool) -> torch.Tensor:
    """
    Makes the mask that says which tokens each token sees, `[N, 1, L, L]`: itself, and earlier tokens of the shared
    part and of its own branch.
    """
    keys, queries = branches[:, None, None, :], branches[:, None, :, None]
    steps = torch.arange(branches.shape[1], device=branches.device)
    seen = ((keys == 0) | (keys == queries)) & (steps[None, :] <= steps[:, None])
    if not additive:
        return seen
    return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, torch.finfo(torch.float32).min)


def lay_out(
    prompts: Sequence[int],
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[int],
    sharing: Sharing | None,
    budget: float = float("inf"),
) -> Layout:
    """
    Finds the cheapest layout of a micro-batch within the budget; the one with the fewest tokens if none is within it.

    Args:
        prompts: A number per row. Rows with the same number have one member and one prompt.
        prompt_lengths, completion_lengths: Tokens of each row. A row without prompt tokens is left out.
        sharing: How the model computes rows with a shared prompt. With `None` every row stands alone, whatever the
            budget.
        budget: Most tokens, padding included.
    """
    layouts = [*list_layouts(prompts, prompt_lengths, completion_lengths, sharing)]
    fitting = [layout for layout in layouts if layout.grid <= budget]
    return (
        min(fitting, key=lambda layout: layout.cost(sharing))
        if fitting
        else min(layouts, key=lambda layout: layout.grid)
    )


def list_layouts(
    prompts: Sequence[int],
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[int],
    sharing: Sharing | None,
    budget: float = float("inf"),
) -> Iterator[Layout]:
    """
    Lists the layouts of a micro-batch that [`lay_out`] chooses from; its arguments are the same. In the first layout
    every row stands alone. In the others rows may share prompts; they are left out if even the fewest tokens that
    sharing could leave exceed the budget.
    """
    # Rows by prompt, without those that are left out.
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        if prompt_lengths[row]:
            groups.setdefault(prompt, []).append(row)
    if not groups:
        yield Layout([[0]], prompt_lengths, completion_lengths)
        return
    yield Layout([[row] for group in groups.values() for row in group], prompt_lengths, completion_lengths)
    if sharing is None:
        return

    def width_of(pack: Sequence[int]) -> int:
        return prompt_lengths[pack[0]] + sum(completion_lengths[row] for row in pack)

    # Every layout has at least these tokens: each prompt once, without its last token, and every completion.
    if sum(width_of(group) - 1 for group in groups.values()) > budget:
        return
    ordered = [sorted(group, key=lambda row: -completion_lengths[row]) for group in groups.values()]
    # Try wider and wider rows of the forward. Narrow ones repeat prompts, wide ones spend more on attention and
    # padding.
    longest, width = max(map(width_of, ordered)), max(width_of(group[:1]) for group in ordered)
    while width < 1.5 * longest:
        # Each prompt's rows go into as few packs as the width allows, so that all packs are about equally long.
        packs = []
        for group in ordered:
            splits = ([group[part::count] for part in range(count)] for count in range(1, len(group) + 1))
            packs += next(split for split in splits if max(map(width_of, split)) <= width)
        yield Layout(packs, prompt_lengths, completion_lengths)
        width = round(1.5 * width)


# TRL's figures about vLLM's samples, taken over the computed rows alone.


def measure_sampling(output: Batch) -> dict[str, float]:
    """
    Measures how far vLLM's probabilities of the samples are from the trainer's, over the computed rows of all ranks.
    Collective.

    TRL's own figures also take in rows that are not computed, and would be wrong here. TRL takes a ratio of 1 for each
    of these rows, and a difference of 0 for a rank that computes no row.

    Args:
        output: What TRL made of this rank's rows. `old_per_token_logps`, `[R, C]`, is NaN where a row is not computed.

    Returns:
        TRL's figures by their names, NaN if no row is computed. Empty without TRL's correction for vLLM.
    """
    if "importance_sampling_ratio" not in output:
        return {}
    old, ratios = output["old_per_token_logps"], output["importance_sampling_ratio"]
    computed = output["completion_mask"].bool() & ~old.isnan()
    differences = (old - output["sampling_per_token_logps"]).abs()[computed]
    # In sequence modes there is one ratio per row instead of one per token.
    ratios = ratios[computed] if ratios.shape == computed.shape else ratios[computed.any(dim=1)].flatten()
    found: dict[str, float] = {}
    for name, values in {
        "sampling_logp_difference": differences[~differences.isnan()],  # NaN marks tokens that vLLM could not score
        "importance_sampling_ratio": ratios,
    }.items():
        least, most = values.aminmax() if len(values) else (values.new_tensor(math.inf), values.new_tensor(-math.inf))
        parts = gather(torch.stack([values.sum(), values.new_tensor(len(values)), least, most])[None])
        count = float(parts[:, 1].sum())
        known = {"mean": parts[:, 0].sum() / count, "min": parts[:, 2].min(), "max": parts[:, 3].max()}
        found |= {f"sampling/{name}/{what}": float(value) if count else math.nan for what, value in known.items()}
    del found["sampling/sampling_logp_difference/min"]  # TRL has no such figure
    return found


# TRL's loss logs its figures once per micro-batch. Each figure becomes one per step: a mean weighted by tokens or live
# rows, or the least or most where `EXTREMES` names it.


# Figures that are the least or the most over rows.
EXTREMES = {"clip_ratio/low_min": min, "clip_ratio/high_max": max}


class LossMetrics:
    """
    Collects the figures of TRL's loss over all micro-batches of a step.

    TRL takes the plain mean over micro-batches. Here micro-batches differ in tokens and rows, and some hold only
    filler rows, for which TRL logs 0. Therefore each micro-batch's mean is weighted by its number of tokens (or live
    rows). Of `EXTREMES` the least or most is taken. A step without a token in the loss gives NaN.

    Args:
        by_row: Whether there is one ratio per row (`importance_sampling_level="sequence"`) instead of one per token.
    """

    def __init__(self, by_row: bool):
        self.by_row = by_row
        self._parts: dict[str, list[tuple[float, int, int]]] = {}

    def add(self, figures: Mapping[str, Sequence[float]], rows: int, live: int, tokens: int) -> None:
        """
        Adds a micro-batch.

        Args:
            figures: What TRL logged for it.
            rows: The micro-batch's rows on all ranks, filler rows included.
            live: How many of them are live.
            tokens: Completion tokens of the live rows.
        """
        for name, values in figures.items():
            parts = self._parts.setdefault(name, [])
            # TRL has divided a sum by all tokens, or by all rows, filler rows included. `over` is this divisor:
            # `value * over` is the sum again. `weight` is the divisor without filler rows.
            over, weight = (rows, live) if self.by_row and "clip_ratio" in name else (tokens, tokens)
            parts += [(value, over, weight) for value in values if tokens]

    def take(self) -> dict[str, float]:
        """Returns the step's figures, and forgets them."""
        found, self._parts = self._parts, {}
        return {name: _of_step(name, parts) if parts else math.nan for name, parts in found.items()}


def _of_step(name: str, parts: Sequence[tuple[float, int, int]]) -> float:
    if name in EXTREMES:
        return EXTREMES[name](value for value, *_ in parts)
    return sum(value * over for value, over, _ in parts) / sum(weight for *_, weight in parts)


class MemberMetrics:
    """
    Collects for each member the figures that TRL's loss logs for all rows together. Each figure is a mean over the
    member's tokens that count in the loss.

    TRL logs one figure per micro-batch, which holds rows of several members. So this class itself sums the values of
    each member's tokens. The sums stay on the device until the end of the optimizer step.

    Args:
        by_row: As of [`LossMetrics`].
        one_sided: Whether only high ratios are cut (`loss_type="cispo"`).
    """

    def __init__(self, by_row: bool, one_sided: bool):
        self.by_row, self.one_sided = by_row, one_sided
        self._sums: dict[str, torch.Tensor] = {}  # name of the figure, or "tokens", to one sum per member

    def add(self, batch: Batch, log_probs: LogProbs, bounds: tuple[Any, Any], members: int) -> None:
        """
        Adds a micro-batch.

        Args:
            batch: The micro-batch. With a KL term it has `ref_per_token_logps`.
            log_probs: What the forward gave, each `[B, C]`.
            bounds: TRL's `epsilon_low` and `epsilon_high`.
            members: Number of seats.
        """
        logps, entropies, _ = log_probs
        logps, mask = logps.detach(), batch["completion_mask"]
        clipped = self._find_clipped(
            logps - batch.get("old_per_token_logps", logps), mask, batch["advantages"], bounds
        )
        values = {"clip_ratio": clipped, "tokens": mask}
        if entropies is not None:
            values["entropy"] = entropies.detach()
        if "ref_per_token_logps" in batch:
            difference = batch["ref_per_token_logps"] - logps
            values["kl"] = difference.exp() - difference - 1
        for name, value in values.items():
            sums = self._sums.setdefault(name, torch.zeros(members, device=mask.device))
            # Filler rows may hold infinities, which a product with the mask's 0 would make NaN.
            sums.index_add_(0, batch["member"], value.float().masked_fill(mask == 0, 0).sum(-1))

    def _find_clipped(
        self, log_ratio: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor, bounds: tuple[Any, Any]
    ) -> torch.Tensor:
        """Says of each token, `[B, C]`, whether its ratio to the old policy is beyond the bound that holds for it."""
        if self.by_row:
            of_row = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
            log_ratio = of_row.expand(mask.shape)
        (low, high), ratio, advantages = bounds, log_ratio.exp(), advantages.view(-1, 1)
        if self.one_sided:
            return (ratio > high) & (advantages > 0)
        return (ratio > 1 + high) & (advantages > 0) | (ratio < 1 - low) & (advantages < 0)

    def take(self, names: Sequence[str]) -> dict[str, float]:
        """
        Returns the figures of the step by `member/<name>/<figure>`, and forgets them. Collective.

        A member without a token in the loss has NaN.

        Args:
            names: Names of the seats, by index.
        """
        # No rank is without sums here: the last micro-batch of a step is always computed.
        sums, self._sums = self._sums, {}
        sums = dict(zip(sums, reduce(torch.stack([*sums.values()])), strict=True))
        tokens = sums.pop("tokens")
        return {
            f"member/{name}/{figure}": mean
            for figure, total in sums.items()
            for name, mean in zip(names, (total / tokens).tolist(), strict=True)
        }

    def forget(self) -> None:
        """Forgets a step that ended before its figures were taken."""
        self._sums = {}
