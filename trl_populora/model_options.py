"""What a command line says about base and members: TRL's `ModelConfig`, honoured or refused; and its help."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from peft import LoraConfig
from trl import GRPOConfig, ModelConfig, get_peft_config


@dataclass
class MemberConfig(ModelConfig):
    """
    TRL's [`~trl.ModelConfig`], whose `lora_*` options describe the adapter of every member.

    Two defaults differ: members are always LoRA adapters, and they have no dropout. What members cannot be is refused
    when the trainer is built; `docs/options.md` lists all options.
    """

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


# Heading in `populora train --help`: the field of `PopuLoRAConfig` that its group starts with.
GROUPS = {
    "Population": "teachers",
    "Tasks": "task_kinds",
    "Matchmaking": "matchmaking",
    "Rewards and baselines": "teacher_reward",
    "Sandbox": "sandbox_workers",
    "Evolution": "evolve_every",
    "Evaluation": "eval_attempts",
    "Generation": "generation_tokens",
    "Records": "save_rollouts",
}


def group_options(parser: ArgumentParser, command: type, settings: type[GRPOConfig]) -> None:
    """Lists a command's own options, then a population's in the groups of its config, before the many inherited."""
    inherited = {option.name for option in fields(GRPOConfig)}
    headings = {start: heading for heading, start in GROUPS.items()}
    heading, heading_of = "", {}
    for option in fields(settings):
        if option.name not in inherited:
            heading = headings.get(option.name, heading)
            heading_of[option.name] = heading
    for option in fields(command):
        heading_of[option.name] = "This command"
    # argparse has no public way to move an option into a group once it is there.
    rest = parser._optionals._group_actions
    groups = {name: parser.add_argument_group(name) for name in ("This command", *GROUPS)}
    for action in [action for action in rest if action.dest in heading_of]:
        rest.remove(action)
        groups[heading_of[action.dest]]._group_actions.append(action)
    parser._optionals.title = "Training and model (TRL and transformers)"
    parser._action_groups.append(parser._action_groups.pop(parser._action_groups.index(parser._optionals)))
