"""
What a newborn still knows: the log-likelihood it gives to what its role has just got right. For the evolution phase.

Known solutions are the completions of the last population step that the sandbox found true: correct attempts for
students, valid proposals for teachers. They cost no sampling, and on completions that the parent sampled itself the
loss is an estimate of the KL divergence per token from parent to child.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from accelerate.utils import gather_object, reduce
from trl.trainer.utils import pad

from trl_populora.population.members import Member
from trl_populora.step.played import Row
from trl_populora.step.player import Completion


Logps = Callable[[int, torch.Tensor, torch.Tensor, int], torch.Tensor]


def pick_known_solutions(rows: Sequence[Row], role: str, parent: str, limit: int = 16) -> list[Completion]:
    """
    Up to `limit` true completions of a role, the parent's own first.

    Args:
        rows (`Sequence[Row]`): Rows of the last step on this rank.
        role (`str`): `"teacher"` (valid proposals) or `"student"` (correct attempts).
        parent (`str`): The member whose rows come first.
        limit (`int`, *optional*, defaults to `16`): How many.
    """
    true = [row for row in rows if row.role == role and (row.valid if role == "teacher" else row.correct)]
    return [row.completion for row in sorted(true, key=lambda row: row.member != parent)[:limit]]


@torch.no_grad()
def mean_logp(
    logps: Logps, member: int, completions: Sequence[Completion], pad_token: int, size: int, device: torch.device
) -> float:
    """
    Mean log-probability per token that one live member gives to completions, over all ranks, in nats.

    Collective: every rank passes the same number of completions.

    Args:
        logps (`Callable`): `(member, input_ids, attention_mask, completion_length)` -> log-probabilities of the
            completion's tokens, `[rows, completion_length]`, without dropout.
        member (`int`): Index of the member.
        completions (`Sequence[Completion]`): What it is asked about.
        pad_token (`int`): Fills short rows.
        size (`int`): Rows of a forward.
        device (`torch.device`): Where to compute.
    """
    total = torch.zeros(2, device=device, dtype=torch.float64)
    for start in range(0, len(completions), size):
        chunk = completions[start : start + size]
        prompts = [torch.tensor(completion.prompt_ids) for completion in chunk]
        answers = [torch.tensor(completion.completion_ids) for completion in chunk]
        ids = torch.cat([_padded(prompts, pad_token, "left"), _padded(answers, pad_token)], dim=1)
        answer_mask = _padded([torch.ones_like(answer) for answer in answers], 0)
        mask = torch.cat([_padded([torch.ones_like(prompt) for prompt in prompts], 0, "left"), answer_mask], dim=1)
        found = logps(member, ids.to(device), mask.to(device), answer_mask.shape[1])
        answer_mask = answer_mask.to(device)
        total += torch.stack([(found * answer_mask).sum(), answer_mask.sum()]).double()
    log_likelihood, tokens = reduce(total, "sum").tolist()
    return log_likelihood / tokens


def _padded(rows: list[torch.Tensor], value: int, side: str = "right") -> torch.Tensor:
    return pad(rows, padding_value=value, padding_side=side)


def measure_forgetting(
    logps: Logps, child: Member, parent: Member, rows: Sequence[Row], pad_token: int, size: int, device: torch.device
) -> float:
    """
    Nats per token that one live member lost against another; NaN if nothing is known. Collective.

    Args:
        child, parent ([`~trl_populora.population.members.Member`]): The two.
        rows (`Sequence[Row]`): Rows of the last step on this rank; it takes as many solutions as every rank has.
        logps, pad_token, size, device: As in [`mean_logp`].
    """
    known = pick_known_solutions(rows, child.role, parent.name)
    known = known[: min(gather_object([len(known)]))]
    if not known:
        return math.nan
    before, after = (mean_logp(logps, each.index, known, pad_token, size, device) for each in (parent, child))
    return before - after
