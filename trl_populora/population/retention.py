"""
What a newborn still knows: the log-likelihood it gives to what its role has just got right. For the evolution phase.

Known solutions are the completions of the last population step that the sandbox found true: correct attempts for
students, valid proposals for teachers. They cost no sampling, and on completions that the parent sampled itself the
loss is an estimate of the KL divergence per token from parent to child.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from trl import GRPOTrainer
from trl.trainer.utils import pad


if TYPE_CHECKING:
    from trl_populora.populora_trainer import PopuLoRATrainer
    from trl_populora.step.played import Row
    from trl_populora.step.player import Completion


def known_solutions(rows: Sequence[Row], role: str, parent: str, limit: int) -> list[Completion]:
    """
    Up to `limit` true completions of a role, the parent's own first.

    Args:
        rows (`Sequence[Row]`): Rows of the last step on this rank.
        role (`str`): `"teacher"` (valid proposals) or `"student"` (correct attempts).
        parent (`str`): The member whose rows come first.
        limit (`int`): How many.
    """
    true = [row for row in rows if row.role == role and (row.valid if role == "teacher" else row.correct)]
    return [row.completion for row in sorted(true, key=lambda row: row.member != parent)[:limit]]


@torch.no_grad()
def mean_logp(trainer: PopuLoRATrainer, name: str, completions: Sequence[Completion]) -> float:
    """
    Mean log-probability per token that one live member gives to completions, over all ranks, in nats.

    Collective: every rank passes the same number of completions.
    """
    device, size = trainer.accelerator.device, trainer.args.per_device_train_batch_size
    total = torch.zeros(2, device=device, dtype=torch.float64)
    training = trainer.model.training
    trainer.model.eval()  # dropout would be taken for forgetting
    for start in range(0, len(completions), size):
        chunk = completions[start : start + size]
        prompts = [torch.tensor(completion.prompt_ids) for completion in chunk]
        answers = [torch.tensor(completion.completion_ids) for completion in chunk]
        fill = trainer.processing_class.pad_token_id
        ids = torch.cat([_padded(prompts, fill, "left"), _padded(answers, fill)], dim=1)
        answer_mask = _padded([torch.ones_like(answer) for answer in answers], 0)
        mask = torch.cat([_padded([torch.ones_like(prompt) for prompt in prompts], 0, "left"), answer_mask], dim=1)
        with trainer.router.rows_of([trainer.population[name].index] * len(chunk)):
            logps, *_ = GRPOTrainer._get_per_token_logps_and_entropies(
                trainer, trainer.model, ids.to(device), mask.to(device), answer_mask.shape[1]
            )
        answer_mask = answer_mask.to(device)
        total += torch.stack([(logps * answer_mask).sum(), answer_mask.sum()]).double()
    trainer.model.train(training)
    log_likelihood, tokens = trainer.accelerator.reduce(total, "sum").tolist()
    return log_likelihood / tokens


def _padded(rows: list[torch.Tensor], value: int, side: str = "right") -> torch.Tensor:
    return pad(rows, padding_value=value, padding_side=side)


def common_count(trainer: PopuLoRATrainer, completions: Sequence[Completion]) -> int:
    """The number of completions that every rank has, so that all of them run the same forwards."""
    return int(trainer.accelerator.gather(torch.tensor([len(completions)], device=trainer.accelerator.device)).min())


def retention_loss(trainer: PopuLoRATrainer, child: str, parent: str, limit: int) -> float:
    """
    Nats per token that the live member `child` lost against `parent` on known solutions; NaN if there are none.

    Args:
        trainer ([`PopuLoRATrainer`]): Its last rows are the material. Every rank calls.
        child (`str`): Slot whose live weights are under test.
        parent (`str`): The (better) parent.
        limit (`int`): Largest number of completions per rank.
    """
    completions = known_solutions(
        trainer.played.rows if trainer.played else [], trainer.population[child].role, parent, limit
    )
    completions = completions[: common_count(trainer, completions)]
    if not completions:
        return math.nan
    return mean_logp(trainer, parent, completions) - mean_logp(trainer, child, completions)
