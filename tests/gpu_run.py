"""A bf16 run with a colocated engine, started by `test_gpu_vllm.py`: prints what the card held while it went on.

python -m tests.gpu_run '{"vllm_enable_sleep_mode": true}'        settings of `PopuLoRAConfig`
"""

from __future__ import annotations

import json
import sys
import tempfile

import torch
from transformers import TrainerCallback

from tests.models import save_byte_base
from tests.populora_run import letters
from tests.small_run import small_trainer


class Watch(TrainerCallback):
    """Bytes of the card in use in each update, and bytes that this process allocated after each step."""

    def __init__(self) -> None:
        self.updating, self.after = [], []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self.updating.append(total - free)

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            self.after.append(torch.cuda.memory_allocated())


def main(settings: dict) -> None:
    gpu = torch.cuda.is_available()
    engine = {} if gpu else {"vllm_engine_kwargs": {"enforce_eager": True}}
    with tempfile.TemporaryDirectory() as directory:
        base = save_byte_base(f"{directory}/base", width=128)  # heads of 64, which every attention kernel knows
        run = {"output_dir": f"{directory}/run", "max_steps": 4, "max_completion_length": 16, "use_vllm": True}
        run |= {"use_cpu": not gpu, "bf16": gpu, "vllm_max_model_length": 1024, "evolve_every": 2, "evolve_burn_in": 0}
        trainer = small_trainer(base, None, letters, **run | engine | settings)
        watch = Watch()
        trainer.add_callback(watch)
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "logp_differences": [entry["sampling/sampling_logp_difference/mean"] for entry in history],
        "updating": watch.updating,
        "after": watch.after,
        "total": torch.cuda.mem_get_info()[1] if gpu else 0,
    }
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
