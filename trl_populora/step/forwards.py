"""Update: how the rows of a micro-batch enter the model.

    micro-batch [B, P + C] --Layout--> forward [N, L] --TRL's method--> log-probabilities [B, C]

Two things are not computed, because no gradient depends on them. One is blank rows. The other is repeated prompts: all
attempts at one task become branches of one row. The prompt stands there once, and every completion sees the prompt and
itself. For two completions `a0 a1` and `b0 b1 b2` of the prompt `p0 p1 p2`:

    input      p0 p1 | p2 a0 | p2 b0 b1
    position    0  1 |  2  3 |  2  3  4
    predicted   -  - | a0 a1 | b0 b1 b2

A branch begins with the prompt's last token, because that token predicts the completion's first one. It ends before
the completion's last token, which predicts nothing. Log-probabilities and gradients equal those of separate rows, but
for rounding.

Shapes: B rows of a micro-batch, P prompt tokens (left-padded), C completion tokens (right-padded), N rows of the
forward, L tokens of its longest row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig
from trl.trainer import utils as trl_utils


# What TRL's method returns: log-probabilities, entropies if asked for, and the load-balancing loss (refused here).
LogProbs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
# TRL's method, `(model, input_ids, attention_mask, logits_to_keep) -> LogProbs`.
Compute = Callable[..., LogProbs]

# A dense mask makes a pair of tokens cost twice its multiplications: its score is also written, masked and
# exponentiated. Measured in benchmarks/RESULTS.md.
PAIR_SLOWDOWN = 2.0


@dataclass(frozen=True)
class Sharing:
    """
    How a model takes rows with a shared prompt.

    Args:
        additive: Whether its attention adds the mask (eager) instead of taking a boolean one (SDPA).
        pair_cost: What attention costs per pair of tokens, as a share of what the linear layers cost per token.
        multiple: L is a multiple of it (`pad_to_multiple_of`).
    """

    additive: bool
    pair_cost: float
    multiple: int = 1

    @classmethod
    def of(cls, base: nn.Module, multiple: int = 1) -> Sharing:
        """Reads it from a base model, for which [`why_not_shared`] must have no reason."""
        return cls(base.config._attn_implementation == "eager", pair_cost(base.config.get_text_config()), multiple)


def pair_cost(config: PretrainedConfig) -> float:
    """Estimates what attention costs per pair of tokens, as a share of what the linear layers cost per token."""
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    multiplications = 4 * config.hidden_size * width + 3 * config.hidden_size * inner
    return PAIR_SLOWDOWN * 2 * width / multiplications


def why_not_shared(base: nn.Module) -> str:
    """
    Says why rows of a base model cannot share a prompt; empty if they can.

    Sharing needs attention that obeys any mask, in all layers. And it needs positions that can be passed in and that
    count only as distances.
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
    The rows of one forward.

    Args:
        packs: Per row of the forward, the rows of the micro-batch that it holds. These have one member and one prompt.
            A pack of several rows becomes branches.
        prompt_lengths, completion_lengths: Tokens of each row of the micro-batch, 0 for blank rows.

    Attributes:
        heads: The first row of each pack. Its member is the one that computes the row of the forward.
        branches: Whether any prompt is shared.
        width: L.
        used: Tokens that are not padding.
    """

    def __init__(
        self, packs: Sequence[Sequence[int]], prompt_lengths: Sequence[int], completion_lengths: Sequence[int]
    ):
        self.packs, self.prompts, self.completions = packs, prompt_lengths, completion_lengths
        self.heads = [pack[0] for pack in packs]
        self.branches = any(len(pack) > 1 for pack in packs)
        answers = [sum(completion_lengths[row] for row in pack) for pack in packs]
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
        """Estimates the cost, in tokens through the linear layers. Without `sharing` attention is left out."""
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
            model: The model.
            ids, mask: The micro-batch, `[B, P + C]`.
            length: C.
            sharing: How the model takes branches; needed where a prompt is shared.
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
            seen = torch.ones_like(seen)  # attention to nothing would give NaN
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
        scored = branches > 0
        predicted = ids.flatten()[places + 1].masked_fill(~scored, -100)
        replaced = {
            "attention_mask": _mask_branches(branches, sharing.additive),
            "position_ids": positions.clamp(min=0),
            "shift_labels": predicted,
        }

        def call_with_branches(labels, **inputs):  # TRL's labels assume that every token predicts the one after it
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
        Tells, for each token of a row of the forward, where it stands in the flattened micro-batch, which branch it
        belongs to (0 is the prompt), and its position. Completions begin at column `first`.
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

    TRL skips them where Triton is installed. Elsewhere the head scores prompts and padding as well, which takes a
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
    """Says which token sees which, `[N, 1, L, L]`: earlier tokens of the prompt and of its own branch, and itself."""
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
    Finds the cheapest layout of a micro-batch without its blank rows, or the smallest one if none keeps to the budget.

    Args:
        prompts: A number per row. Rows with the same number have one member and one prompt.
        prompt_lengths, completion_lengths: Tokens of each row, 0 for blank rows.
        sharing: How the model takes shared prompts; `None` if it cannot.
        budget: Most tokens, padding included.
    """
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        if prompt_lengths[row]:
            groups.setdefault(prompt, []).append(row)
    if not groups:
        return Layout([[0]], prompt_lengths, completion_lengths)
    layouts = [Layout([[row] for group in groups.values() for row in group], prompt_lengths, completion_lengths)]
    if sharing is None:
        return layouts[0]
    ordered = [sorted(group, key=lambda row: -completion_lengths[row]) for group in groups.values()]

    def width_of(pack: Sequence[int]) -> int:
        return prompt_lengths[pack[0]] + sum(completion_lengths[row] for row in pack)

    longest, width = max(map(width_of, ordered)), max(width_of(group[:1]) for group in ordered)
    while width < 1.5 * longest:
        # Each prompt's rows go into as few packs as the width allows, so that all packs have about one length.
        packs = []
        for group in ordered:
            splits = ([group[part::count] for part in range(count)] for count in range(1, len(group) + 1))
            packs += next(split for split in splits if max(map(width_of, split)) <= width)
        layouts.append(Layout(packs, prompt_lengths, completion_lengths))
        width = round(1.5 * width)
    fitting = [layout for layout in layouts if layout.grid <= budget]
    return (
        min(fitting, key=lambda layout: layout.cost(sharing))
        if fitting
        else min(layouts, key=lambda layout: layout.grid)
    )
