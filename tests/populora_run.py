"""One small run as a program of its own, so that tests can launch it on two ranks or kill it: see `test_checkpoint.py`.

    python -m tests.populora_run <base> <run directory> '{"max_steps": 12}' [--resume] [--tasks <jsonl>]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def letters(completions, **kwargs) -> list[float]:
    """A reward that a random base earns by chance; built in rewards alone would be the same for every row."""
    return [sum(c.isalpha() for c in completion[0]["content"]) / 10 for completion in completions]


SETTINGS = {
    "teachers": 2,
    "students": 2,
    "proposals_per_teacher": 4,
    "attempts_per_task": 2,
    "references_per_proposal": 1,
    "inputs_per_function": 4,
    "prompt_style": "compact",
    "per_device_train_batch_size": 12,
    "max_completion_length": 16,
    "learning_rate": 1e-2,
    "sandbox_workers": 1,
    "determinism_runs": 1,
    "evolve_every": 3,
    "evolve_burn_in": 1,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "save_strategy": "steps",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


def make_trainer(base: str, output_dir: str, settings: dict):
    """A trainer of the shared shape: 2T+2S, 24 rows a step, an evolution event every 3 steps."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig

    from trl_populora.populora_config import PopuLoRAConfig
    from trl_populora.populora_trainer import PopuLoRATrainer

    torch.set_num_threads(1)
    tasks = Dataset.from_list(json.loads(Path(base, "tasks.json").read_text()))
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    args = PopuLoRAConfig(output_dir, **(SETTINGS | settings))
    return PopuLoRATrainer(base, letters, args, train_dataset=tasks, peft_config=lora)


def main() -> None:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    base, output_dir, settings = sys.argv[1:4]
    trainer = make_trainer(base, output_dir, json.loads(settings))
    from trl_populora.checkpoint import newest

    resume = newest(output_dir) if "--resume" in sys.argv else None
    print(f"world {trainer.accelerator.num_processes} from {resume}", flush=True)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_state()
    trainer.save_model()


if __name__ == "__main__":
    main()
