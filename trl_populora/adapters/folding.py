"""
Adapters whose modules have ranks or alphas of their own, written so that readers of `r` and `lora_alpha` see them.
"""

from __future__ import annotations

from pathlib import Path

from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file


def largest_rank(lora_config: LoraConfig) -> int:
    """Of any module."""
    return max([lora_config.r, *lora_config.rank_pattern.values()])


def fold_patterns(directory: str | Path) -> None:
    """
    Rewrites an adapter with `rank_pattern` or `alpha_pattern` as an equal one without: every module's scaling goes
    into its B, and zeros fill up smaller ranks. vLLM knows one rank and one scaling for all modules.

    Args:
        directory (`str` or `Path`): A PEFT adapter directory; one without patterns stays as it is.
    """
    config = LoraConfig.from_pretrained(directory)
    if not (config.rank_pattern or config.alpha_pattern):
        return
    path = Path(directory, "adapter_model.safetensors")
    factors = load_file(path)
    rank = max(value.shape[0] for key, value in factors.items() if key.endswith(".lora_A.weight"))
    for key in [key for key in factors if key.endswith(".lora_A.weight")]:
        module = key.removesuffix(".lora_A.weight")
        a, b = factors[key], factors[f"{module}.lora_B.weight"]
        padded_a, padded_b = a.new_zeros(rank, a.shape[1]), b.new_zeros(b.shape[0], rank)
        padded_a[: len(a)], padded_b[:, : len(a)] = a, b * _scaling(config, module, len(a))
        factors[key], factors[f"{module}.lora_B.weight"] = padded_a, padded_b
    save_file(factors, path, metadata={"format": "pt"})
    config.r = config.lora_alpha = rank
    config.use_rslora, config.rank_pattern, config.alpha_pattern = False, {}, {}
    config.save_pretrained(directory)


def _scaling(config: LoraConfig, module: str, rank: int) -> float:
    name = module.removeprefix("base_model.model.")
    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), name), config.lora_alpha)
    return alpha / (rank**0.5 if config.use_rslora else rank)
