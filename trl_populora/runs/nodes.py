"""Several nodes: whether they see one `output_dir`, which decides how a checkpoint can be whole."""

from __future__ import annotations

import uuid
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object

from trl_populora.populora_config import PopuLoRAConfig


def check_nodes(args: PopuLoRAConfig, accelerator: Accelerator) -> None:
    """
    Checks that several nodes have either one `output_dir` or each its own checkpoints. Collective.

    Raises:
        `ValueError`: If a checkpoint would be split over directories of which none can be resumed, or written by all
            nodes into one place.
    """
    nodes = set(gather_object([args.process_index - args.local_process_index]))
    if len(nodes) == 1 or args.save_strategy == "no":
        return
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
