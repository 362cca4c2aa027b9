"""Runs of two processes, as `accelerate launch` starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

from accelerate import PartialState

from tests.without_extras import without_extras


ROOT = Path(__file__).parent.parent
BACKENDS = {
    "ddp": ("cpu_ddp.yaml", "DistributedDataParallel", None),
    "zero2": ("cpu_zero2.yaml", "DeepSpeedEngine", 2),
    "zero3": ("cpu_zero3.yaml", "DeepSpeedEngine", 3),
}


def run_script(command: list[str], output: Path, extras: Collection[str] = (), fails: bool = False) -> str:
    """
    Runs a command in the new directory `output`, with these of the extras, returns its log, and raises with that if it
    fails unless asked.
    """
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    # ACCELERATE_USE_CPU=true from outside would silently turn the DeepSpeed configurations into DDP.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    environment = without_extras(inherited | variables, but=extras)
    output.mkdir()
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=570, cwd=output, check=False
    )
    told = f"{done.stdout[-2000:]}\n{done.stderr[-20000:]}"
    assert bool(done.returncode) == fails, f"{' '.join(command)} ended with {done.returncode}:\n{told}"
    return done.stdout + done.stderr


def launch(config: str) -> list[str]:
    """The launcher with one of the configs, after which options may stand that win over it."""
    config, *options = config.split()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = str(ROOT / "accelerate_configs" / config)
    module = "accelerate.commands.launch"
    return [sys.executable, "-m", module, "--config_file", path, "--main_process_port", str(port), *options]


def leave() -> NoReturn:
    """
    Ends one process of several, successfully.

    Destroying the group does not end gloo's threads: default arguments of `torch.distributed.nn` and
    `deepspeed.comm`, both imported when the group exists, hold it for good. Now and then one of them aborts the
    process while its interpreter ends (pytorch#190489), so the interpreter is not ended here.
    """
    PartialState().destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
