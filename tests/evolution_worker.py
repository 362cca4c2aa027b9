"""One process of a run that tests/test_evolution_backends.py launches: `evolution_worker.py BASE OUTPUT SCENARIO`.

It trains three steps on the fixed rows, so that no rating or sample depends on a child, and writes what this rank saw
to `OUTPUT/rank_N.pt`. Scenarios: `evolve` has an event after the second step whose children learn at rates of their
own, `plain` has none.
"""

from __future__ import annotations

import os
import sys

import torch
from peft import LoraConfig
from transformers import TrainerCallback

from tests.backend_worker import live_member, without_compiler
from tests.fixed_rows import ATTEMPTS, PROPOSALS, SETTINGS, STUDENTS, TEACHERS, play_fixed_rows
from trl_populora.adapters.weights import read_member
from trl_populora.populora_config import PopuLoRAConfig
from trl_populora.populora_trainer import PopuLoRATrainer


EVENT = 2


class Notes(TrainerCallback):
    """All members after every step, as read and as live; added after the evolution callback, so it sees children."""

    def __init__(self, trainer: PopuLoRATrainer):
        self.trainer, self.steps, self.rates = trainer, [], []

    def on_step_end(self, args, state, control, **kwargs):
        model, names = self.trainer.model_wrapped, self.trainer.population.names
        self.steps.append({name: (read_member(model, name), live_member(model, name)) for name in names})
        self.rates.append({group["member"]: group["lr"] for group in self.trainer.optimizer.param_groups})


def main(base: str, output: str, scenario: str) -> None:
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        without_compiler()
    args = PopuLoRAConfig(
        output,
        teachers=TEACHERS,
        students=STUDENTS,
        proposals_per_teacher=PROPOSALS,
        attempts_per_task=ATTEMPTS,
        task_kinds=["code_o"],
        per_device_train_batch_size=12,
        evolve_every=EVENT if scenario == "evolve" else 0,
        evolve_burn_in=0,
        crossovers=["average"],  # a crossover and no luck: what every rank must compute alike is the algebra
        crossover_rate=1.0,
        cull_fraction=0.5,
        learning_rate_perturbation=0.5,
        save_rollouts=False,
        sandbox_workers=1,
        gradient_checkpointing=False,
        **SETTINGS,
    )
    trainer = PopuLoRATrainer(base, args=args, peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    play_fixed_rows(trainer)
    notes = Notes(trainer)
    trainer.add_callback(notes)
    trainer.train()
    plugin = trainer.accelerator.state.deepspeed_plugin
    seen = {
        "world": trainer.accelerator.num_processes,
        "stage": plugin.zero_stage if plugin else None,
        "steps": notes.steps,
        "rates": notes.rates,
        "ratings": trainer.population.state_dict(),
        "replaced": [entry.get("evolve/replaced") for entry in trainer.state.log_history if "loss" in entry],
    }
    torch.save(seen, f"{output}/rank_{trainer.accelerator.process_index}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
