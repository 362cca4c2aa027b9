"""Refuses bases, LoRA options and adapters that the population cannot use, before anything is trained.

base model ---check_is_base------.
LoraConfig ---check_lora_config--+--> `add_members`, or an error with the reason and the way out
adapter trained elsewhere ---check_ordinary_adapter--> `warm_start`
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path

from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import nn
from transformers.utils import cached_file, find_adapter_config_file
from transformers.utils.quantization_config import QuantizationMethod


# Options of `LoraConfig` that must keep PEFT's default, and why.
_FIXED_OPTIONS = {
    "bias": ("none", "biases live in the base model, which all members share"),
    "modules_to_save": (None, "a full copy of a module per member is not routed by row"),
    "lora_dropout": (0.0, "dropout makes old and current log-probabilities differ and draws one mask for all members"),
    "lora_bias": (False, "evolution and vLLM know only the A and B factors"),
    "target_parameters": (None, "parameters that are not in an `nn.Linear` cannot be routed by row"),
    "layer_replication": (None, "it changes the base model that the members share"),
    "trainable_token_indices": (None, "token embeddings are not routed by row"),
    "fan_in_fan_out": (False, "only `nn.Linear` layers are routed"),
    "use_qalora": (False, "it needs GPTQ layers, and GPTQ layers are not routed"),
    "megatron_config": (None, "tensor-parallel layers are not routed"),
}


def check_is_base(model: str | nn.Module, revision: str | None = None) -> None:
    """
    Checks that a base has no adapters.

    If it had some, members would be added to LoRA layers, and what the adapters have learned would be lost.

    Args:
        model: A path or Hub id, or a loaded model.
        revision: Revision of the Hub id.

    Raises:
        `ValueError`: If the model has adapters, or if the path or id is a saved population's or an adapter's.
    """
    # With these options nothing is found where the repository is gated or there is no connection.
    quietly = ("gated_repo", "missing_entries", "connection_errors")
    options = {f"_raise_exceptions_for_{what}": False for what in quietly}
    if not isinstance(model, str):
        if isinstance(model, PeftModel) or any(isinstance(module, BaseTunerLayer) for module in model.modules()):
            raise ValueError(
                f"The model already has the adapters {sorted(getattr(model, 'peft_config', None) or {})}, and the "
                "population brings its own. Pass the base model alone. To go on from a saved adapter, set "
                "`warm_start` to its directory."
            )
    elif cached_file(model, "population.json", revision=revision, **options):
        raise ValueError(
            f"`model={model!r}` is a saved population, which is adapters without a base. Pass the base that it names "
            f"(`populora info {model}`) and go on from its members with `warm_start={model!r}`."
        )
    elif found := find_adapter_config_file(model, revision=revision):
        base = json.loads(Path(found).read_text())["base_model_name_or_path"]
        raise ValueError(
            f"`model={model!r}` is an adapter, and the population brings its own. Pass the base that it names, "
            f"{base!r}, and set `warm_start={model!r}` to go on from the adapter."
        )


def check_lora_config(lora_config: LoraConfig, model: nn.Module) -> None:
    """
    Checks that many members can be trained with a LoRA configuration in one forward.

    Rank-stabilised scaling (`use_rslora`), `rank_pattern`, `alpha_pattern` and `layers_to_transform` are supported.

    Raises:
        `TypeError`: If the configuration is not a `LoraConfig`, or is of a subclass.
        `ValueError`: If an option or a target is not supported, for example because rows cannot be routed through it.
            Also if the base is quantised by anything but bitsandbytes, or if its output head is quantised.
    """
    # Not `isinstance`: subclasses of `LoraConfig` are other methods, with layers that are not routed.
    if type(lora_config) is not LoraConfig:
        raise TypeError(
            f"The population needs a `peft.LoraConfig`, got `{type(lora_config).__name__}`. A forward "
            "stacks the members' LoRA factors; other PEFT methods compute in other ways."
        )
    if lora_config.task_type not in (None, "CAUSAL_LM"):
        raise ValueError(f"`task_type` must be 'CAUSAL_LM' or unset, got {str(lora_config.task_type)!r}.")
    for option, (default, reason) in _FIXED_OPTIONS.items():
        value = getattr(lora_config, option)
        # An empty list or dict asks for nothing, as the default does.
        if value != default and value:
            raise ValueError(f"`{option}={value!r}` is not supported: {reason}. Leave it at {default!r}.")
    _refuse_variants(lora_config)
    init = lora_config.init_lora_weights
    if init is not True and init != "gaussian":
        raise ValueError(
            f"`init_lora_weights={init!r}` is not supported: members share their initial A, start from B = 0 and "
            "leave the base weights alone. Use True or 'gaussian', or write factors with `write_member`."
        )
    _check_targets(lora_config, model)


def check_ordinary_adapter(config: PeftConfig) -> None:
    """
    Checks that an adapter trained elsewhere is a plain LoRA: it adds `scaling * B A x` to an unchanged base.

    Raises:
        `ValueError`: If it is another method or a variant of LoRA, or if it may change the base. The message does not
            name the adapter: the caller does.
    """
    if type(config) is not LoraConfig:
        raise ValueError(f"it is a `{type(config).__name__}`, and members are LoRA adapters.")
    if config.init_lora_weights not in (True, False, "gaussian"):
        raise ValueError(
            f"it was made with `init_lora_weights={config.init_lora_weights!r}`, which may change the base. Convert "
            "it to a plain LoRA (PEFT's `path_initial_model_for_weight_conversion`)."
        )
    if config.layer_replication:
        raise ValueError(
            "it repeats decoder layers (`layer_replication`), and members share one unchanged base. Choose another "
            "adapter."
        )
    _refuse_variants(config)


def _refuse_variants(lora_config: LoraConfig) -> None:
    """Refuses variants such as DoRA."""
    # PEFT marks the options that switch on a variant. So a variant that a later PEFT brings is refused, too.
    for field in dataclasses.fields(lora_config):
        if field.metadata.get("is_lora_variant") and getattr(lora_config, field.name):
            raise ValueError(
                f"`{field.name}={getattr(lora_config, field.name)!r}` is not supported: variants of LoRA have their "
                "own forward, which does not split a batch by member. Use LoRA without it."
            )


def _check_targets(lora_config: LoraConfig, model: nn.Module) -> None:
    """Refuses unsupported quantisation, target modules that are not `nn.Linear`, and the output head as a target."""
    head = model.get_output_embeddings()
    if is_quantised(model):
        _check_quantised(model, head)
    if lora_config.target_modules is None or lora_config.target_modules == "all-linear":
        return  # PEFT chooses modules, never the output head; `add_members` refuses those that are not `nn.Linear`
    _check_names(lora_config.target_modules, model)
    # A pattern can match more than its author meant, so every module that PEFT would wrap is looked at.
    for name, module in model.named_modules():
        if not name or not check_target_module_exists(lora_config, name):
            continue
        if module is head:
            raise ValueError(
                f"`target_modules` names the output head {name!r}. TRL computes log-probabilities from its weight "
                "without calling it, so an adapter there would be ignored. Remove it from `target_modules`."
            )
        if not isinstance(module, nn.Linear):
            raise ValueError(
                f"`target_modules` names {name!r} of type `{type(module).__name__}`; only `nn.Linear` layers are "
                "routed by row. Remove it from `target_modules`."
            )


def _check_names(targets: Collection[str] | str, model: nn.Module) -> None:
    """Refuses names of target modules that match nothing in the base. PEFT ignores such a name if others match."""
    linear = sorted({name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)})
    for target in [targets] if isinstance(targets, str) else sorted(targets):
        wanted = LoraConfig(target_modules=targets if isinstance(targets, str) else [target])
        if not any(name and check_target_module_exists(wanted, name) for name, _ in model.named_modules()):
            raise ValueError(
                f"`target_modules` names {target!r}, which the base has not. Its linear layers are "
                f"{', '.join(linear)}; `'all-linear'` takes all but the output head."
            )


def is_quantised(model: nn.Module) -> bool:
    """Says whether transformers has loaded a base with quantised weights."""
    return getattr(model, "hf_quantizer", None) is not None


def _check_quantised(model: nn.Module, head: nn.Module | None) -> None:
    """
    Refuses quantisation by anything but bitsandbytes, and a quantised output head.

    The layers of bitsandbytes are subclasses of `nn.Linear`, so they can be routed.
    """
    method = model.hf_quantizer.quantization_config.quant_method
    if method != QuantizationMethod.BITS_AND_BYTES:
        raise ValueError(
            f"The base is quantised by {getattr(method, 'value', method)!r}, whose layers are not routed by row. Load "
            "it in bf16, or in 4 or 8 bits by bitsandbytes "
            "(`quantization_config=BitsAndBytesConfig(load_in_4bit=True)`)."
        )
    if head is not None and not head.weight.is_floating_point():
        raise ValueError(
            "The output head is quantised, and TRL computes log-probabilities from its weight. Load the head "
            "unquantised: leave `llm_int8_skip_modules` unset, or name the head in it."
        )
