"""A recipe as one process of a launcher: `recipe_worker.py RESULT ARGUMENTS`, the arguments of `train_populora.py`.

Writes to `RESULT` what the launcher made of the process, because one that starts fewer processes, or no DeepSpeed,
does so silently, and whether the processes are still connected at the end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

from tests.backend_worker import without_compiler
from trl_populora.cli import train


def main(result: str, arguments: list[str]) -> None:
    without_compiler()
    train(arguments)
    state = AcceleratorState()
    stage = state.deepspeed_plugin.zero_stage if state.deepspeed_plugin else None
    if state.is_main_process:
        connected = torch.distributed.is_initialized()
        Path(result).write_text(json.dumps({"world": state.num_processes, "stage": stage, "connected": connected}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
