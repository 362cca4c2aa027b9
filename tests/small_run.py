"""The one builder of small runs: what all of them share, and a trainer of it."""

from __future__ import annotations

from typing import Any


# Two layers on a CPU: a large rate, so that adapters move visibly, and nothing that writes, logs or draws bars.
QUIET = {
    "learning_rate": 1e-2,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}
SMALL = QUIET | {
    "teachers": 2,
    "students": 2,
    "proposals_per_teacher": 4,
    "attempts_per_task": 2,
    "references_per_proposal": 1,
    "inputs_per_function": 4,
    "prompt_style": "compact",
    "per_device_train_batch_size": 8,
    "max_completion_length": 24,
    "max_steps": 2,
    "sandbox_workers": 1,
    "evolve_every": 0,
    "gradient_checkpointing": False,
}


def small_lora():
    """Rank 4 on attention and MLP."""
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")


def small_args(**settings: Any):
    """2T+2S, 4 proposals, 2 attempts: 24 rows in 3 micro-batches."""
    from trl_populora.config import PopuLoRAConfig

    return PopuLoRAConfig(**(SMALL | settings))


def small_trainer(
    base: Any,
    tasks: Any = None,
    reward_funcs: Any = None,
    eval_dataset: Any = None,
    quantization_config: Any = None,
    **settings: Any,
):
    """A trainer of such a run; `tasks` and `eval_dataset` are records, `eval_dataset` also a dict of such tables."""
    from datasets import Dataset

    from trl_populora.trainer import PopuLoRATrainer

    def make_table(rows: Any) -> Any:
        if isinstance(rows, dict):
            return {name: make_table(each) for name, each in rows.items()}
        return None if rows is None else Dataset.from_list(list(rows))

    return PopuLoRATrainer(
        base,
        reward_funcs,
        small_args(**settings),
        make_table(tasks),
        make_table(eval_dataset),
        quantization_config=quantization_config,
        peft_config=small_lora(),
    )


def scale_gradients(trainer, monkeypatch) -> None:
    """As with `fp16`, which accelerate refuses on a CPU; a scale that is a power of two is exact."""
    import torch
    from accelerate.utils import AutocastKwargs
    from transformers import TrainerCallback

    class Scaled(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            monkeypatch.setattr(trainer.accelerator, "native_amp", True)
            monkeypatch.setattr(trainer.accelerator.state, "_mixed_precision", "fp16")

    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    trainer.accelerator.autocast_handler = AutocastKwargs(enabled=False)
    trainer.add_callback(Scaled())
