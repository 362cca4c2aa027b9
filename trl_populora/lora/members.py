"""One member of a live model: its weights are read, written and reset, its gradients clipped, on any backend.

Every function is collective: under ZeRO and FSDP all ranks have to call it, in the same order.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DeepSpeedPlugin, extract_model_from_parallel
from peft import LoraConfig, PeftModel
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trl_populora.files import FORMAT, read_json, write_json

from .layers import routed_layers


# Says beside an adapter at which optimizer step it was saved, so that equal adapters are equal files.
MEMBER_FILE = "member.json"

# Wrappers that put themselves between a module and its name; saved adapters must not know them.
_WRAPPER_PARTS = ("_orig_mod.", "_checkpoint_wrapped_module.")

# Optimizer state that is empty when all zero. Other state (quantised moments, say) is dropped and made anew.
_ZERO_STATE = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}


def member_parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """
    The live parameters of one member, by PEFT state-dict key without the adapter name, in the order of the model.

    PEFT's own selection by name is not used: it matches sub-strings, so that `teacher_1` would also find `teacher_10`.

    Args:
        model: The `PeftModel`, or a DDP, DeepSpeed, FSDP or compiled wrapper of it.
        name: The member.

    Raises:
        `KeyError`: If the model has no member of that name.
    """
    parameters = {}
    for path, layer in routed_layers(peft_model(model)).items():
        for part in _WRAPPER_PARTS:
            path = path.replace(part, "")
        if name not in layer.members:
            raise KeyError(f"There is no member {name!r}; the members are {list(layer.members)}.")
        parameters[f"{path}.lora_A.weight"] = layer.lora_A[name].weight
        parameters[f"{path}.lora_B.weight"] = layer.lora_B[name].weight
    return parameters


def peft_model(model: nn.Module) -> PeftModel:
    """The `PeftModel` inside whatever wraps it."""
    return model if isinstance(model, PeftModel) else extract_model_from_parallel(model)


def is_zero_parameter(parameter: nn.Parameter) -> bool:
    """Whether DeepSpeed's ZeRO keeps a master copy of the parameter (`ds_id` marks stage 3, `_hp_mapping` 1 and 2)."""
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def keep_fp32(model: nn.Module) -> None:
    """Makes members fp32 again: TRL rounds those of a quantised base to bf16, in which small updates are lost."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def read_member(model: nn.Module, name: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """
    A copy of one member's full factors on the CPU; under ZeRO of the master, which is what training continues from.

    Args:
        model: The model, wrapped or not.
        name: The member.
        dtype: Of the copy.

    Returns:
        `dict[str, torch.Tensor]`: Per layer `A`, shape `[r, in]`, and `B`, shape `[out, r]`, by PEFT state-dict key.
    """
    return {key: _full_tensor(parameter, dtype) for key, parameter in member_parameters(model, name).items()}


def adds_nothing(model: nn.Module, name: str) -> bool:
    """Whether a member still is the base: its `B` are zero, as they are before its first update. Collective."""
    return not any(value.any() for key, value in read_member(model, name).items() if "lora_B" in key)


def _full_tensor(parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        value = parameter.full_tensor()
    elif is_zero_parameter(parameter):
        from deepspeed.utils import safe_get_full_fp32_param

        value = safe_get_full_fp32_param(parameter)
    else:
        value = parameter
    return value.detach().to(device="cpu", dtype=dtype, copy=True)


@torch.no_grad()
def write_member(model: nn.Module, name: str, factors: Mapping[str, torch.Tensor]) -> None:
    """
    Overwrites one member in place, so that the next forward already sees it and no optimizer step undoes it.

    ZeRO keeps an fp32 master copy from which each step rewrites the live tensor, and setting the master leaves the
    live tensor as it is until then. Both are written.

    Args:
        model: The model, wrapped or not.
        name: The member to overwrite.
        factors: As returned by [`read_member`]; the same on every rank.

    Raises:
        `ValueError`: If keys are missing or unexpected, or a shape differs.
    """
    parameters = member_parameters(model, name)
    if parameters.keys() != factors.keys():
        missing, unexpected = sorted(parameters.keys() - factors.keys()), sorted(factors.keys() - parameters.keys())
        raise ValueError(f"`factors` for {name!r} must have the member's keys: missing {missing}, extra {unexpected}.")
    for key, parameter in parameters.items():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # a partitioned ZeRO-3 parameter looks empty
        if shape != factors[key].shape:
            raise ValueError(f"{key!r} must have shape {tuple(shape)}, got {tuple(factors[key].shape)}.")
    for key, parameter in parameters.items():
        _write(parameter, factors[key])


def _write(parameter: nn.Parameter, value: torch.Tensor) -> None:
    if isinstance(parameter, DTensor):
        value = value.to(device=parameter.to_local().device, dtype=parameter.dtype)
        parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements))
        return
    if not is_zero_parameter(parameter):
        parameter.copy_(value)
        return
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param

    if hasattr(parameter, "ds_id"):
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(value)
        if parameter.ds_persist:  # leaving the block has partitioned it, which a kept parameter is only until a step
            parameter.all_gather()
    else:
        parameter.data.copy_(value)
    safe_set_full_fp32_param(parameter, value.to(device=parameter.device, dtype=torch.float32))


@torch.no_grad()
def reset_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, name: str) -> None:
    """
    Makes the optimizer treat a member as one it has never stepped: moments and `step` are zero.

    A kept `step` with zero moments would give the member a first update of more than three times the learning rate.

    Args:
        optimizer: The trainer's optimizer; accelerate's and DeepSpeed's wrappers are opened.
        model: The model, wrapped or not.
        name: The member.

    Raises:
        `RuntimeError`: Under ZeRO, if the member shares a parameter group with anything else.
    """
    for states, key, group in _optimizer_entries(optimizer, model, name):
        state = states.get(key, {})
        if not _ZERO_STATE.issuperset(state):
            del states[key]
            continue
        for entry, value in state.items():
            if isinstance(value, torch.Tensor):
                value.zero_()
            else:
                state[entry] = 0
        if "step" in group:  # DeepSpeed's FusedAdam counts per group
            group["step"] = 0


def _optimizer_entries(optimizer, model: nn.Module, name: str) -> list[tuple[dict, torch.Tensor, dict]]:
    """
    Where the optimizer keeps a member's state: the mapping of states, the key in it, and the parameter group.

    ZeRO steps flat fp32 partitions, not parameters. Its own accessors (`safe_get_full_optimizer_state`) are not used:
    in 0.19 they are linked after the first group's first step and know no state of the other groups.
    """
    parameters = list(member_parameters(model, name).values())
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    if not is_zero_parameter(parameters[0]):
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        return [(optimizer.state, p, groups[id(p)]) for p in parameters]
    stage3 = hasattr(parameters[0], "ds_id")
    groups = optimizer.fp16_groups if stage3 else optimizer.bit16_groups
    flats = optimizer.fp32_partitioned_groups_flat if stage3 else optimizer.single_partition_of_fp32_groups
    own = {id(parameter) for parameter in parameters}
    entries = []
    for index, (group, flat) in enumerate(zip(groups, flats, strict=True)):
        ids = {id(parameter) for parameter in group}
        if not ids & own:
            continue
        if not ids <= own:
            raise RuntimeError(
                f"Member {name!r} shares a parameter group with other parameters, so ZeRO keeps one `step` for both. "
                "Build the optimizer from `trl_populora.lora.members.member_param_groups`."
            )
        group_index = optimizer.sub_group_to_group_id[index] if stage3 else index
        entries.append((optimizer.optimizer.state, flat, optimizer.optimizer.param_groups[group_index]))
    return entries


def save_member(
    model: nn.Module, name: str, directory: str | Path, write: bool = True, step: int | None = None
) -> None:
    """
    Saves one member as an ordinary PEFT adapter directory, which stock PEFT and vLLM load.

    Args:
        model: The model, wrapped or not.
        name: The member.
        directory: Where `adapter_config.json` and `adapter_model.safetensors` go; made if absent.
        write: Whether this rank writes. All ranks call, because reading is collective, and the main one writes.
        step: Optimizer steps so far, which [`saved_step`] returns.
    """
    factors = read_member(model, name)
    if write:
        save_factors(factors, peft_model(model).peft_config[name], directory, step)


def save_factors(
    factors: Mapping[str, torch.Tensor], config: LoraConfig, directory: str | Path, step: int | None = None
) -> None:
    """Saves factors, as returned by [`read_member`], as an ordinary PEFT adapter directory; made if absent."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = copy.copy(config)
    config.inference_mode = True
    # PEFT holds the targets as a set, whose order changes with the hash seed: same run, same bytes.
    if not isinstance(config.target_modules, str):
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(directory)
    # The same bytes as from tensors, in half the time.
    arrays = {key: value.numpy() for key, value in factors.items()}
    save_file(arrays, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    # The step comes last: of a process that is killed in between, the adapter counts as of its earlier step.
    if step is not None:
        write_json(directory / MEMBER_FILE, {"format": FORMAT, "step": step})


def saved_step(directory: str | Path) -> int | None:
    """
    The optimizer step at which an adapter was saved; `None` if it does not say, as those of others and of early runs.

    Raises:
        `ValueError`: If one of its files is missing or broken.
    """
    path, about = Path(directory, "adapter_model.safetensors"), Path(directory, MEMBER_FILE)
    try:
        with safe_open(path, "np") as file:
            mark = (file.metadata() or {}).get("populora_step")  # where early runs said it
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}); it is missing or was cut off.") from error
    if about.exists():
        mark = read_json(about)["step"]
    return None if mark is None else int(mark)


# One optimizer life per member: its parameter group, its gradient norm, its right to stand still.


def member_param_groups(model: nn.Module, rates: Mapping[str, float], weight_decay: float = 0.0) -> list[dict]:
    """
    One parameter group per member, in the order of `rates`.

    Args:
        model: The model.
        rates: The members' learning rates.
        weight_decay: Weight decay of all members.
    """
    return [
        {
            "params": list(member_parameters(model, name).values()),
            "lr": rate,
            "weight_decay": weight_decay,
            "member": name,
        }
        for name, rate in rates.items()
    ]


@torch.no_grad()
def clip_member_grad_norms(
    model: nn.Module, names: Sequence[str], max_norm: float, loss_scale: float = 1.0
) -> dict[str, float]:
    """
    Clips the gradients of each member by that member's own norm, with the rule of `torch.nn.utils.clip_grad_norm_`.

    A norm over all adapters would let the loudest member decide how far the others may move. Under ZeRO it has to run
    between backward and step (see [`MemberClipper`]); it is collective there and under FSDP.

    Args:
        model: The model after the backward, wrapped or not.
        names: The members.
        max_norm: Largest norm per member; 0 or below only measures.
        loss_scale: What the gradients were, and stay, multiplied by.

    Returns:
        `dict[str, float]`: Norm of each member before clipping, without the scale; `0.0` without gradients.
    """
    gradients = {name: _local_gradients(model, name) for name in names}
    first = next(iter(member_parameters(model, names[0]).values()))
    squares = torch.stack([_square_sum(gradients[name], first.device) for name in names])
    if is_zero_parameter(first):
        torch.distributed.all_reduce(squares)
    norms = squares.sqrt() / loss_scale
    if max_norm > 0:
        factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)
        for name, factor in zip(names, factors.tolist(), strict=True):
            for gradient in gradients[name]:
                gradient.mul_(factor)
    return dict(zip(names, norms.tolist(), strict=True))


def _local_gradients(model: nn.Module, name: str) -> list[torch.Tensor]:
    """Gradient tensors of a member that can be changed in place: whole ones, or this rank's shards under ZeRO."""
    parameters = member_parameters(model, name).values()
    if not is_zero_parameter(next(iter(parameters))):
        return [parameter.grad for parameter in parameters if parameter.grad is not None]
    if hasattr(next(iter(parameters)), "ds_id"):
        return [_stage3_gradient(parameter) for parameter in parameters]
    # A parameter without a mapping lies wholly in another rank's partition.
    owned = [parameter for parameter in parameters if parameter._hp_mapping is not None]
    return [parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group) for parameter in owned]


def _stage3_gradient(parameter: nn.Parameter) -> torch.Tensor:
    return parameter._z3_optimizer._get_fp32_grad_state_partition(parameter, release_swap_buffers=False)[0]


def _square_sum(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not gradients:
        return torch.zeros((), device=device)
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(gradients)])
    total = torch.linalg.vector_norm(norms.full_tensor() if isinstance(norms, DTensor) else norms)
    return total.square().to(device)


def withhold_gradients(model: nn.Module, names: Sequence[str]) -> None:
    """
    Takes the gradients of members that have no rows in this step away, so that the optimizer leaves them alone.

    With zero gradients instead, Adam would still move them by their momentum and advance their `step`. Call it on
    every rank with the same names, after the last backward of the step.

    Raises:
        `RuntimeError`: Under ZeRO, which always steps a whole parameter group.
    """
    for name in names:
        for parameter in member_parameters(model, name).values():
            if is_zero_parameter(parameter):
                raise RuntimeError(
                    f"Members {list(names)} have no rows in this optimizer step, and ZeRO cannot leave them out of "
                    "it: their momentum would move them. Use DDP, or numbers of teachers and students with which "
                    "everyone plays in every step: as many students as teachers, or a divisor of their number."
                )
            parameter.grad = None


class MemberClipper:
    """
    Clips every member by its own norm before each optimizer step, under DeepSpeed as elsewhere.

    Args:
        names: The members.
        max_norm: Largest norm per member; 0 or below only measures.
    """

    def __init__(self, names: Sequence[str], max_norm: float):
        self.names, self.max_norm = names, max_norm
        self._found_inside: dict[str, float] | None = None  # in the last step of a DeepSpeed engine

    def clip_inside(self, engine) -> None:
        """
        Lets a `DeepSpeedEngine` clip per member from now on. It runs backward, clipping and step in one call, so the
        place between them is reached by going in front of `engine.step`; its own, joint clipping is switched off.
        """
        if self._found_inside is not None:
            return
        self._found_inside, step = {}, engine.step
        engine.optimizer.clip_grad = 0.0

        def clip_and_step(*args, **kwargs):
            # In fp16 gradients are scaled here still: DeepSpeed unscales them in its step.
            scale = engine.optimizer.loss_scale
            self._found_inside = clip_member_grad_norms(engine, self.names, self.max_norm, scale)
            return step(*args, **kwargs)

        engine.step = clip_and_step

    def clip(self, model: nn.Module, busy: Container[str]) -> dict[str, float]:
        """
        Each member's norm before clipping. Those that are not `busy` in this step lose their gradients (see
        [`withhold_gradients`]).
        """
        norms = self._found_inside
        if norms is None:
            norms = clip_member_grad_norms(model, self.names, self.max_norm)
        withhold_gradients(model, [name for name in self.names if name not in busy])
        return norms


# What DeepSpeed's ZeRO-3 has to be told before it partitions a model with routed layers.


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
