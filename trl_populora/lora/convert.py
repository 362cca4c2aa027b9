"""Adapters rewritten with another rank and alpha, with the same effect.

    A [r_module, in], B [out, r_module], a scaling per module --fold-------> A [r, in], B [out, r], one scaling: vLLM
    A [r_given, in], B [out, r_given] of another adapter ------fold_into---> A [r, in], B [out, r] of a member
    A [r_i, in], B [out, r_i] of several adapters -------------average-----> A [sum of r_i, in], B [out, sum of r_i]

A module adds `scaling * B A x` to what the base computes. So a scaling may move into B, and rows of zeros in A or
columns of zeros in B add nothing.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad


def find_largest_rank(lora_config: LoraConfig) -> int:
    """Finds the largest rank that a configuration sets, for any module."""
    return max([lora_config.r, *lora_config.rank_pattern.values()])


def find_widest(configs: Sequence[LoraConfig]) -> LoraConfig:
    """Finds the configuration with the largest rank."""
    return max(configs, key=lambda config: config.r)  # `r` decides: members share one `rank_pattern`


def find_scaling(config: LoraConfig, module: str) -> tuple[int, float, float]:
    """Finds the rank, the alpha and the scaling that a configuration gives to a module, as PEFT finds them."""
    # Keys of the patterns name modules of the base, without PEFT's prefix.
    name = module.removeprefix("base_model.model.")
    rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), name), config.r)
    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), name), config.lora_alpha)
    return rank, alpha, alpha / (rank**0.5 if config.use_rslora else rank)


def fold(factors: Mapping[str, torch.Tensor], config: LoraConfig) -> tuple[Mapping[str, torch.Tensor], LoraConfig]:
    """
    Gives all modules of an adapter one rank and one scaling, because vLLM allows one of each per adapter.

    The scaling of each module is multiplied into its B. Modules of a smaller rank are filled up with zeros. The
    adapter still adds the same to the base.

    Args:
        factors: For each adapted module `A`, shape `[r, in]`, and `B`, shape `[out, r]`, by PEFT state-dict key.
        config: The adapter's configuration.

    Returns:
        Factors and configuration. An adapter without `rank_pattern` and `alpha_pattern` is returned unchanged.
    """
    if not (config.rank_pattern or config.alpha_pattern):
        return factors, config
    return _fold_scalings(factors, config)


def average(
    adapters: Sequence[tuple[Mapping[str, torch.Tensor], LoraConfig]],
) -> tuple[dict[str, torch.Tensor], LoraConfig]:
    """
    Makes one adapter that adds the mean of what several adapters add.

    The A of all adapters are stacked row-wise. Their B are divided by the number of adapters and stacked column-wise.
    That is the exact mean; the mean of the A with the mean of the B would not be.

    Args:
        adapters: Factors and configuration of each, as [`fold`] takes them.

    Returns:
        Factors in float32, and their configuration. The rank is the sum of the ranks, the scaling is 1.

    Raises:
        `ValueError`: If the adapters adapt different modules.
    """
    folded = [_fold_scalings({key: value.float() for key, value in factors.items()}, c) for factors, c in adapters]
    if any(factors.keys() != folded[0][0].keys() for factors, _ in folded):
        raise ValueError("The adapters have no mean, because they adapt different modules.")
    together = {}
    for key in folded[0][0]:
        sides = [factors[key] for factors, _ in folded]
        in_a = key.endswith(".lora_A.weight")
        together[key] = torch.cat(sides, 0) if in_a else torch.cat([b / len(sides) for b in sides], 1)
    config = folded[0][1]
    config.r = config.lora_alpha = sum(theirs.r for _, theirs in folded)
    return together, config


def _fold_scalings(
    factors: Mapping[str, torch.Tensor], config: LoraConfig
) -> tuple[dict[str, torch.Tensor], LoraConfig]:
    """Gives all modules the largest rank and the scaling 1. A module's former scaling is multiplied into its B."""
    rank = max(value.shape[0] for key, value in factors.items() if key.endswith(".lora_A.weight"))
    folded: dict[str, torch.Tensor] = {}
    for key in [key for key in factors if key.endswith(".lora_A.weight")]:
        module = key.removesuffix(".lora_A.weight")
        a, b = factors[key], factors[f"{module}.lora_B.weight"]
        short = rank - len(a)
        folded[key] = pad(a, (0, 0, 0, short))
        folded[f"{module}.lora_B.weight"] = pad(b * find_scaling(config, module)[2], (0, short))
    # With alpha = r the scaling is 1: every B already holds the scaling of its module.
    config = copy.copy(config)
    config.r = config.lora_alpha = rank
    config.use_rslora, config.rank_pattern, config.alpha_pattern = False, {}, {}
    return folded, config


def fold_patterns(directory: str | Path) -> None:
    """
    Gives all modules of a saved adapter one rank and one scaling, as [`fold`] does.

    Args:
        directory: A PEFT adapter directory. If the adapter has no patterns, the files stay unchanged.
    """
    config, path = LoraConfig.from_pretrained(directory), Path(directory, "adapter_model.safetensors")
    factors = load_file(path)
    folded, one = fold(factors, config)
    if folded is not factors:
        save_file(dict(folded), path, metadata={"format": "pt"})
        one.save_pretrained(directory)
        let_others_read(directory)


def let_others_read(directory: str | Path) -> None:
    """
    Gives the weights of a saved adapter the mode of the settings beside them, because safetensors closes its files to
    other users, such as a server's.
    """
    shutil.copymode(Path(directory, "adapter_config.json"), Path(directory, "adapter_model.safetensors"))


def fold_into(
    own: Mapping[str, torch.Tensor],
    own_config: LoraConfig,
    given: Mapping[str, torch.Tensor],
    given_config: LoraConfig,
) -> dict[str, torch.Tensor]:
    """
    Makes factors with which a member has the effect of an adapter that was trained elsewhere.

    Where the member has a higher rank than the adapter, the remaining rows of A stay the member's and the remaining
    columns of B are zero. So these directions add nothing, and can be learned. A module that only the member adapts
    keeps the member's A, and its B is zero.

    Args:
        own: Factors of the member as [`~trl_populora.lora.members.read_member`] returns them: for each adapted module
            A, shape `[r, in]`, and B, shape `[out, r]`.
        own_config: The member's configuration.
        given: Factors of the adapter, in the same form.
        given_config: The adapter's configuration.

    Returns:
        Factors in the form of `own`.

    Raises:
        `ValueError`: If the adapter has weights for modules that members do not adapt, a higher rank than the member,
            or modules with other numbers of features.
    """
    if unknown := sorted(given.keys() - own.keys()):
        raise ValueError(
            f"it has {len(unknown)} weights for which members have no place: the first are {', '.join(unknown[:3])}. "
            "Let `target_modules` take in their modules, or choose another adapter."
        )
    # At first the member adds nothing anywhere. Then the adapter's modules are filled in.
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
        # The member multiplies by its own scaling in every forward. So B is multiplied by the ratio of the scalings.
        ratio = find_scaling(given_config, module)[2] / find_scaling(own_config, module)[2]
        factors[key], factors[other] = own[key].clone(), torch.zeros_like(own[other])
        factors[key][:rank], factors[other][:, :rank] = a, ratio * b
    return factors
