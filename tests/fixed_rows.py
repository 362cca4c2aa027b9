"""The same rows for a joint run, for each member alone, and for any number of processes.

The game is left out: a trainer that "plays" these rows trains on exactly them. What TRL needs from a row (ids,
columns, rewards) is drawn from the step number, so nothing has to be stored or sent.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from datasets import Dataset
from peft import PeftModel, get_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.small_run import QUIET
from trl_populora.step.pay import Answer, Outcome, Rules
from trl_populora.step.player import Completion
from trl_populora.step.rows import Played, Row


TEACHERS, STUDENTS, PROPOSALS, ATTEMPTS = 4, 4, 4, 2
VOCABULARY = 250

# Both trainers get these. A large rate, so that three steps leave the initial weights far behind.
SETTINGS = QUIET | {
    "lr_scheduler_type": "linear",
    "max_steps": 3,
    "max_completion_length": 12,
    "logging_steps": 1,
    "ddp_timeout": 180,  # seconds that ranks wait for one that went another way
}
# A population's trainer gets these beside.
POPULATION = SETTINGS | {
    "teachers": TEACHERS,
    "students": STUDENTS,
    "proposals_per_teacher": PROPOSALS,
    "attempts_per_task": ATTEMPTS,
    "task_kinds": ["code_o"],
    "prompt_style": "compact",
    "per_device_train_batch_size": 12,
    "save_rollouts": False,
    "sandbox_workers": 1,
    "gradient_checkpointing": False,
}


def rows_of_step(step: int) -> list[Row]:
    """All rows of one population step, member by member; students' rows group by group."""
    rng = random.Random(step)
    rows = []
    for match in range(TEACHERS):
        teacher, student = f"teacher_{match}", f"student_{match}"
        for slot in range(PROPOSALS):
            prompt, group = _tokens(rng), f"{match}/{slot}"
            rates = rng.choice([0.0, 0.25, 0.5, 0.75])
            written = Completion(_tokens(rng), _tokens(rng), "")
            facts: dict[str, Any] = {"valid": True, "solve_rate": rates, "group": f"proposal {group}"}
            rows.append(Row("teacher", teacher, "code_o", match, completion=written, **facts))
            for attempt in range(ATTEMPTS):
                right = rng.random() < 0.5 if attempt else True
                facts = {"correct": right, "well_formed": rng.random() < 0.5, "group": f"attempts {group}"}
                written = Completion(prompt, _tokens(rng), "")
                rows.append(Row("student", student, "code_o", match, completion=written, **facts))
    return rows


def _tokens(rng: random.Random) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(rng.randint(3, 12))]


def reward_of(row: Row) -> float:
    """What the default rules pay for a row."""
    if row.role == "teacher":
        return Rules().teacher_reward(Outcome(row.kind, row.valid, row.reject_reason, row.solve_rate))
    return Rules().student_reward(Answer(row.kind, row.correct, row.well_formed))


def play_rows(trainer, rows: list[Row], records: list[dict]) -> None:
    """Makes these rows the step that a `PopuLoRATrainer` has just played."""
    trainer.played = Played(rows, records)
    trainer.played.rewards = trainer._reward(trainer.played)
    trainer.scorer.score(trainer.played)


def play_fixed_rows(trainer, rows_of=rows_of_step, broken: tuple[int, str] | None = None) -> None:
    """
    Lets a `PopuLoRATrainer` train on its rank's share of the fixed rows: whole groups, half of every member. `broken`
    names a step and a member whose loss is NaN there.
    """
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes

    def play(prompts: list, trainer: GRPOTrainer) -> dict[str, Any]:
        rows = rows_of(trainer.state.global_step)
        shares = [[row for row in rows if int(row.group[-1]) % world == other] for other in range(world)]
        paid = [[replace(row, pay=reward_of(row)) for row in share] for share in shares]
        play_rows(trainer, paid[rank], [row.record() for share in paid for row in share])
        if broken is not None and trainer.state.global_step == broken[0]:
            mine = trainer.played.local_worth
            mine.advantages[mine.members == trainer.population[broken[1]].index] = float("nan")
        return trainer.played.tokens

    trainer.rollout_func = play


def solo_trainer(model: PeftModel, tokenizer, name: str, output_dir: str, **options: Any) -> GRPOTrainer:
    """Stock TRL on one member's rows, with stock PEFT. One kind, so a teacher's rows are one group of TRL's."""
    rows = [row for row in rows_of_step(0) if row.member == name]
    group = ATTEMPTS if rows[0].role == "student" else PROPOSALS

    def play(prompts: list, trainer: GRPOTrainer) -> dict[str, list]:
        own = [row for row in rows_of_step(trainer.state.global_step) if row.member == name]
        return {
            "prompt_ids": [row.completion.prompt_ids for row in own],
            "completion_ids": [row.completion.completion_ids for row in own],
            "logprobs": None,
            "fixed_reward": [reward_of(row) for row in own],
        }

    def fixed(fixed_reward: list[float], **kwargs) -> list[float]:
        return fixed_reward

    batch = {"per_device_train_batch_size": len(rows), "generation_batch_size": len(rows), "num_generations": group}
    args = GRPOConfig(output_dir, **(batch | SETTINGS | {"gradient_checkpointing": False} | options))
    prompt = [{"role": "user", "content": ""}]
    dataset = Dataset.from_dict({"prompt": [prompt] * (len(rows) // group)})
    trainer = GRPOTrainer(model, fixed, args, dataset, processing_class=tokenizer)
    trainer.rollout_func = play
    return trainer


class GradientLog(TrainerCallback):
    """Keeps the gradients that each optimizer step saw, after clipping, by the keys of `parameters`."""

    def __init__(self, parameters: dict):
        self.parameters, self.steps = parameters, []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.steps.append({key: p.grad.clone() for key, p in self.parameters.items()})


def solo_run(base: str, member_dir, name: str, output_dir, **options):
    """Final factors and the gradients of each step of one member trained alone by stock TRL."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), member_dir, is_trainable=True)
    trainer = solo_trainer(model, AutoTokenizer.from_pretrained(base), name, str(output_dir), **options)
    parameters = {path.replace(".default", ""): p for path, p in model.named_parameters() if ".default." in path}
    log = GradientLog(parameters)
    trainer.add_callback(log)
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return get_peft_model_state_dict(model, adapter_name="default"), log.steps, norms
