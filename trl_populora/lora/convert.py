"""Adapters written for readers of another rank and alpha: for vLLM, which knows one of each, and for members."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad


def largest_rank(lora_config: LoraConfig) -> int:
    """Of any module."""
    return max([lora_config.r, *lora_config.rank_pattern.values()])


def fold(factors: Mapping[str, torch.Tensor], config: LoraConfig) -> tuple[Mapping[str, torch.Tensor], LoraConfig]:
    """
    An adapter with `rank_pattern` or `alpha_pattern` as an equal one without: every module's scaling goes into its B,
    and zeros fill up smaller ranks. One without patterns comes back as it is. vLLM knows one rank and one scaling for
    all modules.

    Args:
        factors: Per layer `A`, shape `[r, in]`, and `B`, shape `[out, r]`, by PEFT state-dict key.
        config: The adapter's.
    """
    if not (config.rank_pattern or config.alpha_pattern):
        return factors, config
    rank = max(value.shape[0] for key, value in factors.items() if key.endswith(".lora_A.weight"))
    folded = {}
    for key in [key for key in factors if key.endswith(".lora_A.weight")]:
        module = key.removesuffix(".lora_A.weight")
        a, b = factors[key], factors[f"{module}.lora_B.weight"]
        short = rank - len(a)
        folded[key] = pad(a, (0, 0, 0, short))
        folded[f"{module}.lora_B.weight"] = pad(b * _scaling(config, module, len(a)), (0, short))
    config = copy.copy(config)
    config.r = config.lora_alpha = rank
    config.use_rslora, config.rank_pattern, config.alpha_pattern = False, {}, {}
    return folded, config


def fold_patterns(directory: str | Path) -> None:
    """
    Rewrites an adapter as [`fold`] does.

    Args:
        directory: A PEFT adapter directory; one without patterns stays as it is.
    """
    config, path = LoraConfig.from_pretrained(directory), Path(directory, "adapter_model.safetensors")
    factors = load_file(path)
    folded, one = fold(factors, config)
    if folded is not factors:
        save_file(dict(folded), path, metadata={"format": "pt"})
        one.save_pretrained(directory)


def fold_into(
    own: Mapping[str, torch.Tensor],
    own_config: LoraConfig,
    given: Mapping[str, torch.Tensor],
    given_config: LoraConfig,
) -> dict[str, torch.Tensor]:
    """
    An adapter that was trained elsewhere, as factors of a member: equal in effect, its scaling folded into B.

    Where the member has more rank, its own A fills up and B is zero, so that these directions can be learned. Modules
    that only the member adapts stay as the base is: its own A, and B zero.

    Args:
        own: Factors of the member, as [`~trl_populora.lora.members.read_member`] returns them: A of shape `[r,
            in]`, B of shape `[out, r]`.
        own_config: Its ranks and alphas.
        given: Factors of the adapter, in the same form.
        given_config: Its ranks and alphas.

    Raises:
        `ValueError`: If the adapter has weights that the member has no place for, a larger rank, or the sizes of
            another base.
    """
    if unknown := sorted(given.keys() - own.keys()):
        raise ValueError(f"it has weights for which members have no place: {', '.join(unknown[:3])} ({len(unknown)}).")
    factors = {key: torch.zeros_like(value) if ".lora_B." in key else value for key, value in own.items()}
    for key in [key for key in own if ".lora_A." in key and key in given]:
        module = key.removesuffix(".lora_A.weight")
        other = f"{module}.lora_B.weight"
        a, b = given[key].to(own[key].dtype), given[other].to(own[other].dtype)
        rank, largest = len(a), len(own[key])
        if rank > largest:
            raise ValueError(f"it has rank {rank} at {module!r}, above the members' {largest}. Choose `r` {rank}.")
        if (a.shape[1], b.shape[0]) != (own[key].shape[1], own[other].shape[0]):
            raise ValueError(
                f"it is for another base: at {module!r} it maps {a.shape[1]} to {b.shape[0]} features, the members "
                f"{own[key].shape[1]} to {own[other].shape[0]}."
            )
        ratio = _scaling(given_config, module, rank) / _scaling(own_config, module, largest)
        factors[key], factors[other] = own[key].clone(), torch.zeros_like(own[other])
        factors[key][:rank], factors[other][:, :rank] = a, ratio * b
    return factors


def _scaling(config: LoraConfig, module: str, rank: int) -> float:
    name = module.removeprefix("base_model.model.")
    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), name), config.lora_alpha)
    return alpha / (rank**0.5 if config.use_rslora else rank)
