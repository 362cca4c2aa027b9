"""What a command line says about base and members: TRL's `ModelConfig`, honoured or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from peft import LoraConfig
from trl import ModelConfig, get_peft_config


@dataclass
class MemberConfig(ModelConfig):
    """
    TRL's [`~trl.ModelConfig`], whose `lora_*` options describe the adapter of every member.

    Two defaults differ: members are always LoRA adapters, and they have no dropout. What members cannot be is refused
    when the trainer is built; `docs/options.md` lists all options.
    """

    _argument_group_name = "Base and adapters"
    use_peft: bool = field(default=True, metadata={"help": "Always true: members are LoRA adapters."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Always 0: dropout is not supported."})


def member_lora(model: ModelConfig) -> LoraConfig:
    """
    The adapter of every member, as TRL builds it; all linear layers where no target is named.

    Raises:
        `ValueError`: If an option asks for training without adapters. What else members cannot be is refused by
            [`~trl_populora.adapters.checks.check_lora_config`].
    """
    lora = get_peft_config(model)
    if lora is None:
        raise ValueError("`use_peft=False` is not supported: every member is a LoRA adapter. Leave it at True.")
    if lora.target_modules is None and lora.target_parameters is None:
        lora.target_modules = "all-linear"
    return lora


def base_options(model: ModelConfig, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """What `from_pretrained` is told about the base; options `given` as `model_init_kwargs` go first."""
    told = {
        "dtype": model.dtype,
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
    }
    return told | dict(given or {})
