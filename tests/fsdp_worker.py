"""PyTorch's own FSDP2 on the gloo processes that there are, without accelerate, which on a CPU turns FSDP into DDP."""

from __future__ import annotations

import torch
import torch.distributed as dist
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
    withhold_gradients,
    write_member,
)


ROWS = [
    [0, 0, 1, 1, 2, 2, 3, 3],
    [0, 0, 1, 1, 3, 3, 3, 3],
    [3, 2, 1, 0, 0, 1, 2, 3],
]  # of each step; the second is uneven


def run() -> dict:
    """Three steps of a sharded population, or, in a process alone, of a whole one."""
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
            states = [optimizer.state[p] for p in member_parameters(model, names[0]).values()]
            seen["reset"] = not any(
                (value.full_tensor() if isinstance(value, DTensor) else value).any()
                for state in states
                for value in state.values()
            )
    members = {name: read_member(model, name) for name in names}
    return {"world": world, "sharded": sharded, "norms": norms, "members": members, "seen": seen}
