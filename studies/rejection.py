"""
Rejection fine-tuning: what supervised training on the base's own right answers gains, a control of `arms_race.py`.

    python studies/arms_race.py --variants single_agent rejection --seeds 0 1 2

The base plays both roles with a learning rate of zero, for as many steps and rows as the single agent: the same number
of samples. TRL's `SFTTrainer` then trains one adapter of the same shape on the attempts that were right, and that
adapter attempts the held-out tasks in the run's place.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
from datasets import Dataset
from peft import LoraConfig
from tiny_headroom import build
from trl import SFTConfig, SFTTrainer

from trl_populora.assets import tiny_base_path
from trl_populora.run.records import append_metrics


ADAPTER = "sft"


def right_answers(run: Path) -> Dataset:
    """Attempts of a run that were right, as conversations; the same answer to the same prompt counts once."""
    columns, right = ["prompt", "completion"], [("role", "=", "student"), ("correct", "=", True)]
    tables = [pq.read_table(path, columns=columns, filters=right) for path in sorted(run.glob("rollouts/*.parquet"))]
    found = dict.fromkeys(tuple(row.values()) for table in tables for row in table.to_pylist())
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": asked}], "completion": [{"role": "assistant", "content": said}]}
            for asked, said in found
        ]
    )


def fine_tune(run: Path, seed: int, options: list[str], config: Path) -> None:
    """
    Trains an adapter on the right answers of a finished run, and puts it in the place of the run's members: it
    attempts the held-out tasks, and is what the directory holds afterwards.

    Args:
        run (`Path`): The run; `run/sft` is the adapter.
        seed (`int`): Of both trainings.
        options (`list[str]`): The command-line options of the run.
        config (`Path`): Its recipe.
    """
    args = SFTConfig(
        str(run / ADAPTER),
        seed=seed,
        num_train_epochs=2,  # what TRL's users begin with: further ones repeat what the base says already
        per_device_train_batch_size=32,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        completion_only_loss=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")  # the recipe's
    trainer = SFTTrainer(tiny_base_path(), args, train_dataset=right_answers(run), peft_config=lora)
    trainer.train()
    trainer.save_model()
    player = build(run, seed, [*options, "--warm_start", str(run / ADAPTER)], config)
    player.state.global_step = player.args.max_steps
    player.evaluate()
    player.save_model()
    # A trainer leaves the files of a run that is not its own alone. Last, because this says that all is done.
    append_metrics(run, player.state.log_history[-1])
    player.close()
