"""
Adapters whose modules have ranks and alphas of their own, for readers that see `r` and `lora_alpha` only.
"""

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
        factors (`Mapping[str, torch.Tensor]`): Per layer `A`, shape `[r, in]`, and `B`, shape `[out, r]`, by PEFT
            state-dict key.
        config ([`~peft.LoraConfig`]): The adapter's.
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
        directory (`str` or `Path`): A PEFT adapter directory; one without patterns stays as it is.
    """
    config, path = LoraConfig.from_pretrained(directory), Path(directory, "adapter_model.safetensors")
    factors = load_file(path)
    folded, one = fold(factors, config)
    if folded is not factors:
        save_file(dict(folded), path, metadata={"format": "pt"})
        one.save_pretrained(directory)


def _scaling(config: LoraConfig, module: str, rank: int) -> float:
    name = module.removeprefix("base_model.model.")
    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), name), config.lora_alpha)
    return alpha / (rank**0.5 if config.use_rslora else rank)
