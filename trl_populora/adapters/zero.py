"""What DeepSpeed's ZeRO-3 has to be told before it partitions a model with routed layers."""

from __future__ import annotations

from accelerate.utils import DeepSpeedPlugin
from torch import nn

from .layers import routed_layers


_THRESHOLD = "stage3_param_persistence_threshold"


def keep_adapters_whole(plugin: DeepSpeedPlugin, model: nn.Module) -> None:
    """
    Makes ZeRO-3 leave the members' matrices on every rank while it partitions the base.

    Routed layers read `lora_A[name].weight` without calling the submodule, so nothing would gather it. DeepSpeed keeps
    parameters of up to `stage3_param_persistence_threshold` elements whole; the value is raised to the largest LoRA
    matrix, never lowered. Does nothing for other stages.

    Args:
        plugin: `accelerator.state.deepspeed_plugin`, before the model is prepared.
        model: The model with its members.
    """
    if plugin.zero_stage != 3:
        return
    factors = [
        p for layer in routed_layers(model).values() for p in (*layer.lora_A.parameters(), *layer.lora_B.parameters())
    ]
    largest = max(p.numel() for p in factors)
    settings = plugin.deepspeed_config["zero_optimization"]
    chosen = settings.get(_THRESHOLD, "auto")
    settings[_THRESHOLD] = largest if chosen == "auto" else max(largest, int(chosen))
