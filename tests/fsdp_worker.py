"""PyTorch's own FSDP2 on the gloo processes that there are, without accelerate, which on a CPU turns FSDP into DDP."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.adapter_models import make_population, make_rows, token_logps
from trl_populora.lora.members import (
    clip_member_grad_norms,
    member_param_groups,
    member_parameters,
    read_member,
    reset_optimizer_state,
    save_member,
    withhold_gradients,
    write_member,
)
from trl_populora.run.checkpoint import write_member_file


ROWS = [
    [0, 0, 1, 1, 2, 2, 3, 3],
    [0, 0, 1, 1, 3, 3, 3, 3],
    [3, 2, 1, 0, 0, 1, 2, 3],
]  # of each step; the second is uneven


def run(directory: str = "") -> dict:
    """
    Three steps of a sharded population, or, in a process alone, of a whole one. With a directory it is saved there and
    loaded again.
    """
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model, router, names = make_population(4)
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    sharded = all(isinstance(p, DTensor) for p in member_parameters(model, names[0]).values())
    optimizer = torch.optim.AdamW(member_param_groups(model, dict.fromkeys(names, 1e-2)), eps=1e-4)
    norms, seen = [], {}
    for step, rows in enumerate(ROWS):
        optimizer.zero_grad()
        mine = slice(rank * len(rows) // world, (rank + 1) * len(rows) // world)
        router.set(rows[mine])
        # FSDP averages gradients over processes: the sum over all rows is the mean of `world` times each part.
        (world * token_logps(model, make_rows(len(rows), seed=step)[mine]).sum()).backward()
        router.clear()
        norms.append(list(clip_member_grad_norms(model, names, 5.0).values()))
        withhold_gradients(model, [name for i, name in enumerate(names) if i not in rows])
        before = read_member(model, names[2])
        optimizer.step()
        seen[f"idle member moved in step {step}"] = any(
            not torch.equal(value, before[key]) for key, value in read_member(model, names[2]).items()
        )
        if step == 1:
            write_member(model, names[0], read_member(model, names[1]))
            reset_optimizer_state(optimizer, model, names[0])
            seen["source"], seen["written"] = read_member(model, names[1]), read_member(model, names[0])
            seen["reset"] = not any(value.any() for value in states_of(optimizer, model, names[0]))
    members = {name: read_member(model, name) for name in names}
    if directory:
        for form in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            seen[form] = save_and_load(model, optimizer, names, Path(directory, form), form)
    return {"world": world, "sharded": sharded, "norms": norms, "members": members, "seen": seen}


def states_of(optimizer, model, name: str) -> list[torch.Tensor]:
    """The moments and steps of a member, whole."""
    states = [optimizer.state[p] for p in member_parameters(model, name).values()]
    values = [value for state in states for value in state.values()]
    return [(value.full_tensor() if isinstance(value, DTensor) else value).clone() for value in values]


def save_and_load(model, optimizer, names: list[str], directory: Path, form: str) -> dict:
    """
    Saves a checkpoint's members and optimizer as `Trainer` and this package do under FSDP2, zeroes them, and loads
    them again. Says what is the same as before, and what accelerate's file of the model, which no resume reads, holds.
    """
    accelerator, plugin = Accelerator(), FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=form)
    save_fsdp_model(plugin, accelerator, model, str(directory), adapter_only=True)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(directory))
    before = {name: (read_member(model, name), states_of(optimizer, model, name)) for name in names}
    for name in names:
        save_member(model, name, directory / name, accelerator.is_main_process)
        write_member(model, name, {key: torch.zeros_like(value) for key, value in before[name][0].items()})
        reset_optimizer_state(optimizer, model, name)
    accelerator.wait_for_everyone()
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, str(directory), adapter_only=True)
    for name in names:
        write_member_file(model, name, directory / name / "adapter_model.safetensors")
    if form == "FULL_STATE_DICT":
        saved = torch.load(directory / "pytorch_model_fsdp.bin")
    else:
        saved = FileSystemReader(directory / "pytorch_model_fsdp_0").read_metadata().state_dict_metadata
    after = {name: (read_member(model, name), states_of(optimizer, model, name)) for name in names}
    return {
        "members": [n for n in names if all(torch.equal(v, before[n][0][k]) for k, v in after[n][0].items())],
        "states": [n for n in names if all(map(torch.equal, after[n][1], before[n][1]))],
        "saved": list(saved),
    }
