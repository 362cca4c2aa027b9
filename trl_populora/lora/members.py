"""One member of a live model: read and write its weights, reset its optimizer state, clip its gradients.

    live model --read_member--> factors on the CPU {"...lora_A.weight": [r, in], "...lora_B.weight": [out, r], ...}
               <-write_member-- |
                                `--save_factors--> a PEFT adapter directory

    backward --> gradients --clip_member_grad_norms--> norm per member [M] --> optimizer step, one group per member

The functions work on a single device and under DDP, FSDP and ZeRO, but `withhold_gradients` raises under ZeRO. Every
rank must call the functions that read or change weights, gradients or optimizer state, in the same order. Under ZeRO
and FSDP some of these functions gather from all ranks. Under DDP a rank that does not call ends with other weights.

Shapes: M members, r LoRA rank.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DeepSpeedPlugin, extract_model_from_parallel
from peft import LoraConfig, PeftModel
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trl_populora.files import FORMAT, read_json, write_json

from .convert import find_scaling, let_others_read
from .layers import RoutedLinear, routed_layers


logger = logging.getLogger(__name__)

# This file lies beside the weights of an adapter and says at which optimizer step they were saved. The file of the
# weights does not say it, so that equal adapters are equal files.
MEMBER_FILE = "member.json"

# A member counts as broken when its gradients were not finite in this many consecutive steps. Steps in which the
# member's gradients are zero are passed over.
BROKEN_STEPS = 10

# What `torch.compile` and activation checkpointing add to the names of modules. Keys of saved adapters are without it.
_WRAPPER_PARTS = ("_orig_mod.", "_checkpoint_wrapped_module.")

# Entries of an optimizer's state that are zero before the first step. A reset sets them to zero. If a parameter has
# another entry, or a quantised one, the reset deletes all entries of this parameter, and the next step makes new ones.
_ZERO_STATE = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}


def member_parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """
    Finds the live parameters of one member.

    PEFT's own selection by name is not used, because it matches sub-strings: `teacher_1` would also find
    `teacher_10`.

    Args:
        model: The `PeftModel`, or a DDP, DeepSpeed, FSDP or compiled wrapper around it.
        name: The member.

    Returns:
        Parameters in the order of the model. A key is PEFT's state-dict key without the adapter name.

    Raises:
        `KeyError`: If the model has no member of that name.
    """
    parameters = {}
    for path, layer in _find_layers(model, name).items():
        parameters[f"{path}.lora_A.weight"] = layer.lora_A[name].weight
        parameters[f"{path}.lora_B.weight"] = layer.lora_B[name].weight
    return parameters


def _find_layers(model: nn.Module, name: str) -> dict[str, RoutedLinear]:
    """Finds the routed layers, by the path that PEFT's state-dict keys have, and checks that they know the member."""
    layers = {}
    for path, layer in routed_layers(unwrap_peft_model(model)).items():
        for part in _WRAPPER_PARTS:
            path = path.replace(part, "")
        if name not in layer.members:
            raise KeyError(f"There is no member {name!r}; the members are {list(layer.members)}.")
        layers[path] = layer
    return layers


def member_ranks(model: nn.Module, name: str) -> dict[str, int]:
    """Finds the rank of each of a member's matrices, by the keys of [`member_parameters`]."""
    return {
        f"{path}.{factor}.weight": layer.r[name]
        for path, layer in _find_layers(model, name).items()
        for factor in ("lora_A", "lora_B")
    }


def unwrap_peft_model(model: nn.Module) -> PeftModel:
    """Takes the `PeftModel` out of whatever wraps it."""
    return model if isinstance(model, PeftModel) else extract_model_from_parallel(model)


def is_zero_parameter(parameter: nn.Parameter) -> bool:
    """Says whether DeepSpeed's ZeRO keeps an fp32 master copy of a parameter."""
    # DeepSpeed sets `ds_id` in stage 3, and `_hp_mapping` in stages 1 and 2.
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def keep_fp32(model: nn.Module) -> None:
    """Makes members fp32 again. TRL casts the adapters of a quantised base to bf16, which loses small updates."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def set_rank(model: nn.Module, name: str, settings: Mapping[str, Any]) -> None:
    """
    Gives a member a rank and alpha of its own. Write the member anew afterwards ([`write_member`]).

    The matrices of all members have the largest rank. A member of a smaller rank has zeros in the further rows of A
    and columns of B. These entries get gradients of zero, so training leaves them zero. Modules that `rank_pattern` or
    `alpha_pattern` names keep the rank or alpha that stands there.

    Args:
        model: The model, wrapped or not.
        name: The member.
        settings: The member's settings. `lora_r` is at most the rank of the matrices, and comes with `lora_alpha`.
            Without `lora_r` nothing changes.
    """
    if "lora_r" not in settings:
        return
    config = unwrap_peft_model(model).peft_config[name]
    config.r, config.lora_alpha = settings["lora_r"], settings["lora_alpha"]
    for path, layer in _find_layers(model, name).items():
        layer.r[name], layer.lora_alpha[name], layer.scaling[name] = find_scaling(config, path)


def read_member(
    model: nn.Module, name: str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """
    Copies one member's factors. If several processes hold parts of them, the parts are gathered. Zeros that fill the
    matrices up to the largest LoRA rank are left out.

    Under ZeRO the copy is made from the fp32 master, because training continues from the master.

    Args:
        model: The model, wrapped or not.
        name: The member.
        dtype: Type of the copy.
        device: Where the copy lies.

    Returns:
        For each routed layer `A`, shape `[r, in]`, and `B`, shape `[out, r]`. Keys are as in [`member_parameters`].
    """
    ranks = member_ranks(model, name)
    factors = {}
    for key, parameter in member_parameters(model, name).items():
        whole, rank = _copy_full(parameter, dtype, device), ranks[key]
        factors[key] = (whole[:rank] if ".lora_A." in key else whole[:, :rank]).contiguous()
    return factors


def adds_nothing(model: nn.Module, name: str) -> bool:
    """Says whether a member still computes what the base computes: all its `B` are zero, as before any update."""
    return not any(value.any() for key, value in read_member(model, name).items() if "lora_B" in key)


def _copy_full(parameter: nn.Parameter, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Copies a parameter, gathered from all ranks, to a device."""
    if isinstance(parameter, DTensor):
        value = parameter.full_tensor()
    elif is_zero_parameter(parameter):
        from deepspeed.utils import safe_get_full_fp32_param

        value = safe_get_full_fp32_param(parameter)
    else:
        value = parameter
    return value.detach().to(device=device, dtype=dtype, copy=True)


@torch.no_grad()
def write_member(model: nn.Module, name: str, factors: Mapping[str, torch.Tensor]) -> None:
    """
    Overwrites the weights of one member in place. The next forward computes with the new weights.

    ZeRO has two copies: the live tensor, which a forward reads, and an fp32 master, from which each optimizer step
    rewrites the live tensor. Both are written here. With only the live tensor, the next step would undo the change.
    With only the master, forwards before that step would miss it.

    Args:
        model: The model, wrapped or not.
        name: The member to overwrite.
        factors: As [`read_member`] returns them. Every rank must pass the same.

    Raises:
        `ValueError`: If keys are missing or unexpected, if a shape differs, or if the member's rank is larger than its
            matrices have room for.
    """
    parameters = member_parameters(model, name)
    if parameters.keys() != factors.keys():
        missing, unexpected = sorted(parameters.keys() - factors.keys()), sorted(factors.keys() - parameters.keys())
        raise ValueError(f"`factors` for {name!r} must have the member's keys: missing {missing}, extra {unexpected}.")
    # A parameter that ZeRO-3 has partitioned looks empty. `ds_shape` keeps its shape.
    shapes = {key: torch.Size(getattr(each, "ds_shape", each.shape)) for key, each in parameters.items()}
    # All shapes are checked before anything is written, so that a member is never half old and half new.
    for key, rank in member_ranks(model, name).items():
        largest = shapes[key][0] if ".lora_A." in key else shapes[key][1]
        if rank > largest:
            raise ValueError(f"{name!r} cannot have rank {rank} at {key!r}: there is room for {largest}.")
        shape = (rank, shapes[key][1]) if ".lora_A." in key else (shapes[key][0], rank)
        if shape != factors[key].shape:
            raise ValueError(f"{key!r} must have shape {tuple(shape)}, got {tuple(factors[key].shape)}.")
    for key, parameter in parameters.items():
        # Zeros fill up a matrix whose rank is lower than the parameter's.
        missing = [whole - given for whole, given in zip(shapes[key], factors[key].shape, strict=True)]
        _write_parameter(parameter, nn.functional.pad(factors[key], (0, missing[1], 0, missing[0])))


def _write_parameter(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Writes a whole tensor into a parameter: into this rank's part, and into ZeRO's master if there is one."""
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
        # Leaving the block partitions even a parameter that ZeRO-3 keeps whole. The next optimizer step would gather
        # it, but routed layers read it before that.
        if parameter.ds_persist:
            parameter.all_gather()
    else:
        parameter.data.copy_(value)
    safe_set_full_fp32_param(parameter, value.to(device=parameter.device, dtype=torch.float32))


@torch.no_grad()
def reset_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, name: str) -> None:
    """
    Sets a member's moments and `step` in the optimizer to zero, as they are before a first step.

    With zero moments and an old `step`, Adam would not correct the bias of the moments. The member's first update
    would then be more than three times the learning rate.

    Args:
        optimizer: The trainer's optimizer. It may be wrapped by accelerate or DeepSpeed.
        model: The model, wrapped or not.
        name: The member.

    Raises:
        `RuntimeError`: Under ZeRO, if the member shares a parameter group with other parameters.
    """
    for states, key, group in _find_optimizer_entries(optimizer, model, name):
        state = states.get(key, {})
        if not _ZERO_STATE.issuperset(state) or any(map(_is_quantised, state.values())):
            del states[key]
            continue
        for entry, value in state.items():
            if isinstance(value, torch.Tensor):
                value.zero_()
            else:
                state[entry] = 0
        # Some optimizers, such as apex's FusedAdam, count steps per group instead of per parameter.
        if "step" in group:
            group["step"] = 0


def _is_quantised(entry: Any) -> bool:
    """Says whether an entry of an optimizer's state is of a tensor class of its own, as torchao's moments are."""
    local = entry.to_local() if isinstance(entry, DTensor) else entry
    return isinstance(local, torch.Tensor) and type(local) is not torch.Tensor


def _find_optimizer_entries(optimizer, model: nn.Module, name: str) -> list[tuple[dict, torch.Tensor, dict]]:
    """
    Finds where the optimizer keeps a member's state.

    Returns:
        Triples: the mapping of all states, a key of this mapping, and the parameter group of the key. The key is a
        parameter of the member. Under ZeRO it is the flat fp32 partition that holds a group's parameters.
    """
    parameters = list(member_parameters(model, name).values())
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    if not is_zero_parameter(parameters[0]):
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        return [(optimizer.state, p, groups[id(p)]) for p in parameters]
    # ZeRO steps flat fp32 partitions. DeepSpeed's accessor (`safe_get_full_optimizer_state`) is not used: in 0.19 it
    # is set up after the first step of the first group, and knows no state of the other groups.
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
    Saves one member as an ordinary PEFT adapter directory, which stock PEFT loads. vLLM loads it, too, if the
    adapter has no `rank_pattern` and no `alpha_pattern` (see [`~trl_populora.lora.convert.fold_patterns`]).

    Args:
        model: The model, wrapped or not.
        name: The member.
        directory: Gets `adapter_config.json` and `adapter_model.safetensors`, and `member.json` if `step` is given. It
            is made if it does not exist.
        write: Whether this rank writes. All ranks have to call, because reading is collective, and one of them writes.
        step: Optimizer steps so far. [`read_saved_step`] reads this number back.
    """
    factors = read_member(model, name)
    if write:
        save_factors(factors, unwrap_peft_model(model).peft_config[name], directory, step)


def save_factors(
    factors: Mapping[str, torch.Tensor], config: LoraConfig, directory: str | Path, step: int | None = None
) -> None:
    """
    Writes the factors that [`read_member`] returns into an ordinary PEFT adapter directory. The other arguments are
    those of [`save_member`].
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = copy.copy(config)
    config.inference_mode = True
    # PEFT holds the targets in a set. The order of a set changes with the hash seed, so equal runs would write
    # different files.
    if not isinstance(config.target_modules, str):
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(directory)
    # Saving arrays gives the same bytes as saving tensors, in less time.
    arrays = {key: value.numpy() for key, value in factors.items()}
    save_file(arrays, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    let_others_read(directory)
    # The step is written last. If the process is killed before that, the new adapter has the step of the adapter that
    # it replaced, or none.
    if step is not None:
        write_json(directory / MEMBER_FILE, {"format": FORMAT, "step": step})


def read_saved_step(directory: str | Path) -> int | None:
    """
    Reads the optimizer step at which an adapter was saved.

    Returns:
        The step; `None` if no file says it, as with adapters that other programs made.

    Raises:
        `ValueError`: If the file with the weights is missing, or if one of the files is broken.
    """
    path, about = Path(directory, "adapter_model.safetensors"), Path(directory, MEMBER_FILE)
    try:
        with safe_open(path, "np"):  # opening it shows whether it was cut off
            pass
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}). Is it missing or cut off?") from error
    return int(read_json(about)["step"]) if about.exists() else None


# Each member is optimised as if it trained alone: it has its own parameter group and gradient norm, and it stands
# still in a step in which it has no rows.


def member_param_groups(model: nn.Module, rates: Mapping[str, float], weight_decay: float = 0.0) -> list[dict]:
    """
    Makes one parameter group per member, in the order of `rates`.

    Args:
        model: The model.
        rates: Learning rate of each member, by name.
        weight_decay: Weight decay of every member.
    """
    return [
        {
            "params": list(member_parameters(model, name).values()),
            "lr": rate,
            "initial_lr": rate,  # most schedules would write it; `ReduceLROnPlateau` does not
            "weight_decay": weight_decay,
            "member": name,
        }
        for name, rate in rates.items()
    ]


def set_learning_rate(optimizer: Any, scheduler: Any, name: str, rate: float) -> None:
    """
    Gives a member another learning rate. The schedule goes on from where it is, with the new rate.

    Args:
        optimizer: The trainer's optimizer, which may be wrapped. If it has no groups of [`member_param_groups`],
            nothing is changed.
        scheduler: The schedule of that optimizer, or `None`. It may be wrapped.
        name: Name of the member's adapter.
        rate: The learning rate before the schedule multiplies it.
    """
    groups = optimizer.param_groups
    place = next((place for place, group in enumerate(groups) if group.get("member") == name), None)
    if place is None:
        return
    # A schedule multiplies the rates of all groups by the same share. A group whose rate is 0 does not show the share.
    shares = [float(each["lr"]) / float(each["initial_lr"]) for each in groups if each.get("initial_lr")]
    current = rate * (shares[0] if shares else 1.0)
    group = groups[place]
    group["initial_lr"] = rate
    if isinstance(group["lr"], torch.Tensor):  # torchao's optimizers refuse a number in its place
        group["lr"].fill_(current)
    else:
        group["lr"] = current
    schedule = getattr(scheduler, "scheduler", scheduler)  # taken out of accelerate's wrapper
    if hasattr(schedule, "base_lrs"):  # `ReduceLROnPlateau` has no base rates
        schedule.base_lrs[place] = rate


def check_groups(optimizer: torch.optim.Optimizer, model: nn.Module, rates: Mapping[str, float]) -> None:
    """
    Checks that an optimizer of the user's own has all members' parameters. Each of its groups must have parameters of
    one member alone, and none of the base.

    Args:
        optimizer: Not yet wrapped by accelerate or DeepSpeed.
        model: The model.
        rates: Learning rate of each member, by name, for the message.

    Raises:
        `ValueError`: If a group mixes members, if a group has parameters of the base, or if a member's parameter is
            missing. The message has the call that makes the right groups.
    """
    owners = {id(p): name for name in rates for p in member_parameters(model, name).values()}
    held = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    mixed = [sorted({owners.get(each, "the base") for each in group}) for group in held]
    mixed = [names for names in mixed if len(names) > 1 or names == ["the base"]]
    missing = owners.keys() - {each for group in held for each in group}
    if mixed or missing:
        flaw = (
            f"has a parameter group of {' and '.join(mixed[0])}"
            if mixed
            else f"lacks parameters of {', '.join(sorted({owners[each] for each in missing}))}"
        )
        raise ValueError(
            f"The optimizer {flaw}. Each member needs a group of its own, which has its learning rate. Set "
            f"`trainer.optimizer = {type(optimizer).__name__}(member_param_groups(trainer.model, {dict(rates)!r}))`, "
            "with `member_param_groups` of `trl_populora.lora.members`, and make a scheduler for that optimizer anew."
        )


@torch.no_grad()
def clip_member_grad_norms(
    model: nn.Module, names: Sequence[str], max_norm: float, loss_scale: float = 1.0
) -> dict[str, float]:
    """
    Clips the gradients of each member by that member's own norm, with the rule of `torch.nn.utils.clip_grad_norm_`.

    With one norm over all adapters, a member with large gradients would shrink the updates of all others. If a
    member's norm is NaN or infinite, its gradients are set to zero. Otherwise all weights of the member would become
    NaN, and DeepSpeed would skip the step of all members. Under ZeRO call this function between backward and step (see
    [`MemberClipper`]).

    Args:
        model: The model after the backward, wrapped or not.
        names: The members.
        max_norm: Largest norm per member. With 0 or less the norms are measured and nothing is clipped.
        loss_scale: The factor that multiplies the gradients in fp16. The gradients stay multiplied; the norms are
            divided by it.

    Returns:
        Norm of each member before clipping; 0.0 for a member without gradients, NaN or infinite for one whose
        gradients were zeroed.
    """
    gradients = {name: _find_gradients(model, name) for name in names}
    first = next(iter(member_parameters(model, names[0]).values()))
    squares = torch.stack([_sum_squares(gradients[name], first.device) for name in names])
    # Under ZeRO each rank has summed the squares of its own shards only.
    if is_zero_parameter(first):
        torch.distributed.all_reduce(squares)
    norms = squares.sqrt() / loss_scale
    # 1e-6 keeps the division finite, as in `torch.nn.utils.clip_grad_norm_`
    factors = (max_norm / (norms + 1e-6)).clamp(max=1.0) if max_norm > 0 else torch.ones_like(norms)
    for name, norm, factor in zip(names, norms.tolist(), factors.tolist(), strict=True):
        for gradient in gradients[name]:
            if not math.isfinite(norm):
                gradient.zero_()  # multiplying by 0 would leave NaN
            elif max_norm > 0:
                gradient.mul_(factor)
    return dict(zip(names, norms.tolist(), strict=True))


def _find_gradients(model: nn.Module, name: str) -> list[torch.Tensor]:
    """Finds the gradients of a member as tensors to change in place. Under ZeRO they are this rank's shards."""
    parameters = member_parameters(model, name).values()
    if not is_zero_parameter(next(iter(parameters))):
        return [parameter.grad for parameter in parameters if parameter.grad is not None]
    if hasattr(next(iter(parameters)), "ds_id"):
        return [p._z3_optimizer._get_fp32_grad_state_partition(p, release_swap_buffers=False)[0] for p in parameters]
    # A parameter without a mapping has no element in this rank's partition.
    owned = [parameter for parameter in parameters if parameter._hp_mapping is not None]
    return [parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group) for parameter in owned]


def _sum_squares(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sums the squares of all elements of some gradients; the sum is in fp32."""
    if not gradients:
        return torch.zeros((), device=device)
    # One call computes the norms of all tensors. A loop would start kernels for each tensor. The norms are then moved
    # to one device, because `device_map="auto"` may have spread the layers over several devices. Norms are computed in
    # fp32: those of fp16 gradients, which ZeRO multiplies by its loss scale, may be larger than fp16 can hold.
    norms = torch.stack([norm.to(device) for norm in torch._foreach_norm(gradients, dtype=torch.float32)])
    total = torch.linalg.vector_norm(norms.full_tensor() if isinstance(norms, DTensor) else norms)
    return total.square().to(device)


def withhold_gradients(model: nn.Module, names: Sequence[str]) -> None:
    """
    Removes the gradients of members that have no rows in this step, so that the optimizer leaves these members alone.

    With gradients of zero Adam would still move such a member by its momentum, and advance its `step`. Call this
    function on every rank with the same names, after the last backward of the step.

    Raises:
        `RuntimeError`: Under ZeRO, which always steps every parameter group.
    """
    for name in names:
        for parameter in member_parameters(model, name).values():
            if is_zero_parameter(parameter):
                raise RuntimeError(
                    f"Members {list(names)} have no rows in this optimizer step, and ZeRO cannot leave them out of "
                    "it: their momentum would move them. Use DDP, or let every student play in every step: "
                    "choose a number of students that equals or divides the number of teachers."
                )
            parameter.grad = None


def step_in_spite_of_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, lower: bool) -> None:
    """
    Lets a `GradScaler` step although it has met gradients that are not finite. Call this function after these
    gradients have been set to zero.

    Without this call, one member's broken gradients would make the scaler skip the step of all members.

    Args:
        scaler: Has unscaled the gradients of this step.
        optimizer: The one that the scaler steps, without accelerate's wrapper.
        lower: Whether to lower the loss scale, because it may be too large for the member.
    """
    for found in scaler._found_inf_per_device(optimizer).values():
        found.zero_()
    if not lower:
        return
    scale, growth_tracker = scaler._check_scale_growth_tracker("step_in_spite_of_overflow")
    scale.mul_(scaler.get_backoff_factor())
    growth_tracker.zero_()


_CAUSES = (
    "The learning rate may be too high, or the loss infinite: `beta` at a low `temperature`, or a reward function."
)


class MemberClipper:
    """
    Clips every member by its own norm before each optimizer step, with DeepSpeed and without.

    Args:
        names: The members.
        max_norm: Largest norm per member. With 0 or less the norms are measured and nothing is clipped.
        warns: Whether this rank warns of members whose gradients are not finite.
    """

    def __init__(self, names: Sequence[str], max_norm: float, warns: bool = True):
        self.names, self.max_norm, self.warns = names, max_norm, warns
        self._broken_steps = dict.fromkeys(names, 0)  # consecutive steps in which a member's norm was not finite
        self._lost_steps = 0  # consecutive steps in which some norm was not finite, and nobody learned
        # Norms that a DeepSpeed engine's last step has measured; `None` without DeepSpeed.
        self._found_inside: dict[str, float] | None = None

    def clip_inside(self, engine) -> None:
        """
        Makes a `DeepSpeedEngine` clip per member in every later step.

        accelerate calls the engine's backward and step together, so a trainer gets no chance between the two. This
        method therefore puts the clipping in front of `engine.step`, and switches off DeepSpeed's clipping by one
        norm over all members.
        """
        if self._found_inside is not None:
            return
        from deepspeed.accelerator import get_accelerator

        self._found_inside, step = {}, engine.step
        engine.optimizer.clip_grad = 0.0

        def clip_and_step(*args, **kwargs):
            # In fp16 the gradients still carry the loss scale: DeepSpeed removes it inside its step.
            scale, offloads = engine.optimizer.loss_scale, _offloads_gradients(engine.optimizer)
            if offloads:
                # ZeRO-2 copies gradients to the CPU without waiting, and waits within its step.
                get_accelerator().synchronize()
            self._found_inside = clip_member_grad_norms(engine, self.names, self.max_norm, scale)
            broken = [name for name, norm in self._found_inside.items() if not math.isfinite(norm)]
            if broken and offloads:
                _forget_overflow(engine, broken)
            step(*args, **kwargs)
            if engine.fp16_enabled() and self.is_scale_in_doubt(self._found_inside):
                # It is lowered after the step, which divides by it.
                engine.optimizer.loss_scaler.update_scale(True)

        engine.step = clip_and_step

    def clip(self, model: nn.Module, busy: Container[str], still: Container[str] = ()) -> dict[str, float]:
        """
        Clips every member, and removes the gradients of idle members (see [`withhold_gradients`]).

        A DeepSpeed engine has clipped the members already. Then the norms of its last step are returned.

        Args:
            model: The model after the backward, wrapped or not.
            busy: Members that have rows in this step. All others are idle.
            still: Members whose learning rate is 0. They have gradients, and do not learn.

        Returns:
            Norm of each member before clipping.

        Raises:
            `RuntimeError`: If no member could learn in `BROKEN_STEPS` consecutive steps, because every norm was NaN,
                infinite or 0, or that of a member in `still`. Steps in which no norm is NaN or infinite, and nobody
                learns, are passed over.
        """
        norms = self._found_inside
        if norms is None:
            norms = clip_member_grad_norms(model, self.names, self.max_norm)
        self._watch(norms, still)
        withhold_gradients(model, [name for name in self.names if name not in busy])
        return norms

    def is_scale_in_doubt(self, norms: Mapping[str, float]) -> bool:
        """
        Says whether the loss scale of fp16 may be too large, because a member's norm is not finite. A member that
        stays broken while the scale falls is broken by something else, and the others need their scale.
        """
        return any(not math.isfinite(norm) and self._broken_steps[name] < BROKEN_STEPS for name, norm in norms.items())

    def _watch(self, norms: Mapping[str, float], still: Container[str] = ()) -> None:
        """Warns of members whose gradients are not finite. Raises if for `BROKEN_STEPS` steps no member trains."""
        for name, norm in norms.items():
            if math.isfinite(norm):
                # A norm of 0 says nothing, so the count stays: the member has no rows, or its rows have no advantage.
                self._broken_steps[name] *= norm == 0
                continue
            self._broken_steps[name] += 1
            if self.warns and self._broken_steps[name] <= BROKEN_STEPS:
                logger.warning(
                    "The gradient norm of %s is %s. Its gradients are zero in this step; the other members are not "
                    "affected.%s",
                    name,
                    norm,
                    f" So it was in {BROKEN_STEPS} steps in a row: {name} no longer learns, and further such steps "
                    f"are not told. {_CAUSES}"
                    if self._broken_steps[name] == BROKEN_STEPS
                    else "",
                )
        broken = [name for name, norm in norms.items() if not math.isfinite(norm)]
        if any(norm != 0 and math.isfinite(norm) and name not in still for name, norm in norms.items()):
            self._lost_steps = 0
        elif broken:
            self._lost_steps += 1
        if self._lost_steps == BROKEN_STEPS:
            raise RuntimeError(
                f"In {BROKEN_STEPS} steps in a row no member could learn: the gradient norm of {', '.join(broken)} "
                f"was not finite, and no other member learned. Look into the rows of {broken[0]} in "
                f"`rollouts/`, and start a new run with `warm_start` from a checkpoint before these steps. {_CAUSES}"
            )


def _offloads_gradients(optimizer) -> bool:
    """Says whether ZeRO keeps optimizer state and gradients on the CPU."""
    # Optimizers of stages 1 and 2 have the first attribute, those of stage 3 the second.
    return bool(getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False))


def _forget_overflow(engine, names: Sequence[str]) -> None:
    """
    Lets ZeRO step after members' gradients that were not finite have been set to zero.

    With offload ZeRO looks for overflow when it moves gradients to the CPU, which is before they are set to zero. What
    it has found is erased here. Without offload ZeRO looks within its step, and finds zeros.
    """
    optimizer = engine.optimizer
    optimizer.local_overflow = False
    if hasattr(optimizer, "grad_partitions_flat_buffer"):  # stage 3 looks for overflow in this buffer
        optimizer.grad_partitions_flat_buffer.nan_to_num_(0.0, 0.0, 0.0)
    for name in names:
        for parameter in member_parameters(engine, name).values():
            key = optimizer.get_param_id(parameter)
            if key in optimizer.norm_for_param_grads:
                optimizer.norm_for_param_grads[key].zero_()


# What DeepSpeed's ZeRO-3 must know before it partitions a model with routed layers.


_THRESHOLD = "stage3_param_persistence_threshold"


def keep_adapters_whole(plugin: DeepSpeedPlugin, model: nn.Module) -> None:
    """
    Makes ZeRO-3 keep the members' matrices whole on every rank, while it partitions the base.

    DeepSpeed gathers a partitioned parameter when its module is called. Routed layers read `lora_A[name].weight`
    without calling the module, so a partitioned matrix would stay empty. DeepSpeed does not partition parameters of up
    to `stage3_param_persistence_threshold` elements. This function raises the threshold to the size of the largest
    LoRA matrix; a higher threshold stays. In other stages it does nothing.

    Args:
        plugin: `accelerator.state.deepspeed_plugin`. The model must not be prepared yet.
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
