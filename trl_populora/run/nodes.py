"""Checks before training on several nodes: all processes are there, and a checkpoint can be whole.

Nodes that share one `output_dir` write one checkpoint together. Nodes without a shared `output_dir` need DDP and
`save_on_each_node`; then each node writes its own checkpoint. With DeepSpeed or FSDP all nodes must share one.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from transformers import TrainingArguments


def check_nodes(args: TrainingArguments, accelerator: Accelerator) -> None:
    """
    Checks that several nodes either share one `output_dir` or write a checkpoint each. Call it on every rank.

    Raises:
        `ValueError`: If every node would get only a part of a checkpoint, or if all nodes would write a checkpoint
            into the same place.
    """
    # A node is known by the global rank of its first process.
    nodes = set(gather_object([args.process_index - args.local_process_index]))
    if len(nodes) == 1 or args.save_strategy == "no":
        return
    # Rank 0 makes a file with a random name, and every rank looks for it. Equal paths prove nothing: each node may
    # have a disk of its own there.
    mark = Path(args.output_dir, gather_object([f".{uuid.uuid4().hex}"])[0])
    if args.process_index == 0:
        mark.touch()
    accelerator.wait_for_everyone()
    shared = all(gather_object([mark.exists()]))
    if args.process_index == 0:
        mark.unlink()
    if shared and args.save_on_each_node:
        raise ValueError(
            f"`save_on_each_node=True`, but all {len(nodes)} nodes see one {args.output_dir} and would write over "
            "each other's files. Leave it off."
        )
    if not shared and accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        raise ValueError(
            f"The {len(nodes)} nodes do not see one {args.output_dir}, over which DeepSpeed and FSDP spread a "
            "checkpoint. Choose an `output_dir` on a file system that all nodes see."
        )
    if not shared and not args.save_on_each_node:
        raise ValueError(
            f"The {len(nodes)} nodes do not see one {args.output_dir}, so no checkpoint would be whole on any. Choose "
            "an `output_dir` on a file system that all nodes see, or set `save_on_each_node=True`."
        )


def wait_for_all(args: TrainingArguments, accelerator: Accelerator) -> None:
    """
    Waits until every process starts to train. Call it on every rank.

    It uses the key-value store of `torch.distributed`, so that a time-out can name the missing ranks.

    Raises:
        `RuntimeError`: If a process does not start within `ddp_timeout` seconds. The message names rank and node of
            each missing process.
    """
    if accelerator.num_processes == 1:
        return
    store = torch.distributed.distributed_c10d._get_default_store()
    # A process may train several times, and keys stay in the store. So each training has keys with its own number.
    turn = store.add(f"populora trainings of rank {args.process_index}", 1)
    store.set(f"populora training {turn} of rank {args.process_index}", "")
    end, absent = time.monotonic() + args.ddp_timeout, []
    for rank in range(accelerator.num_processes):
        # All ranks share one deadline. After it, .1 s is enough to find the key of a rank that has started.
        try:
            store.wait(
                [f"populora training {turn} of rank {rank}"], timedelta(seconds=max(0.1, end - time.monotonic()))
            )
        except torch.distributed.DistStoreError:
            absent.append(rank)
    if absent:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        names = ", ".join(f"{rank} (node {rank // per_node})" for rank in absent)
        raise RuntimeError(
            f"Of {accelerator.num_processes} processes, rank {names} did not start to train within "
            f"`ddp_timeout={args.ddp_timeout}` seconds. What holds them up stands in the log of their node."
        )
