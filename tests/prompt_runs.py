"""Runs on a dataset of prompts with recorded completions: stock TRL's, and a population's of one member or more.

What a member writes is drawn from its name, the number of the generation and the place of the row, so that any run can
be given the same completions. Nothing else is replaced: the datasets, samplers, rewards and updates are real.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.fixed_rows import VOCABULARY, GradientLog
from tests.small_run import QUIET, small_lora
from trl_populora import PopuLoRAConfig, PopuLoRATrainer
from trl_populora.lora.members import member_parameters, read_member
from trl_populora.step.player import Completion


# A large rate, so that few steps leave the initial weights far behind; Adam's own epsilon would turn the rounding of
# gradients near 0 into whole steps (`test_solo_parity.py`).
SETTINGS = QUIET | {
    "lr_scheduler_type": "linear",
    "max_completion_length": 12,
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "gradient_accumulation_steps": 2,
    "adam_epsilon": 1e-4,
    "max_grad_norm": 0.05,
}
# 7 prompts, 2 to a generation: 3 generations an epoch, and one prompt is left over.
QUESTIONS = Dataset.from_dict(
    {
        "prompt": [f"What is {n} times {n + 1}?" for n in range(7)],
        "answer": [str(n * (n + 1)) for n in range(7)],
        "level": [n % 3 for n in range(7)],
    }
)


class Judge:
    """A reward function that keeps all it is given. `None` for some rows, and rewards that differ within groups."""

    __name__ = "judge"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, prompts, completions, completion_ids, **columns) -> list[float | None]:
        kept = {name: value for name, value in columns.items() if isinstance(value, list)}
        self.calls.append({"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **kept})
        return [None if sum(ids) % 11 == 0 else (sum(ids) % 7) / 3 for ids in completion_ids]


def brief(completion_ids, level, **columns) -> list[float]:
    """Pays for short completions, by the dataset's column `level`."""
    return [(12 - len(ids)) / 12 * (1 + each) for ids, each in zip(completion_ids, level, strict=True)]


def write(member: str, generation: int, place: int) -> list[int]:
    """What a member writes to its row number `place` of a generation."""
    rng = random.Random(f"{member} {generation} {place}")
    return [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 12))]


def stock_run(
    base: str,
    start,
    output_dir,
    member: str,
    table: Dataset = QUESTIONS,
    sampled: Sequence[tuple[list, list]] | None = None,
    **options: Any,
):
    """
    Trains one adapter by TRL's own trainer on what `member` writes; returns trainer, judge, gradients, factors. With
    `sampled` it wrote that instead: vLLM's completions and their log-probabilities, by generation.
    """
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), start, is_trainable=True)
    judge = Judge()
    args = GRPOConfig(str(output_dir), **(SETTINGS | options))
    trainer = GRPOTrainer(model, [judge, brief], args, table, processing_class=AutoTokenizer.from_pretrained(base))
    generations = iter(range(10**6))

    def record(prompt_ids: list, *_: Any, **__: Any):
        number = next(generations)
        if sampled is not None:
            return sampled[number]
        return [write(member, number, place) for place in range(len(prompt_ids))], None

    trainer._generate_single_turn = record
    trainer.use_vllm = sampled is not None  # TRL weighs vLLM's samples then; no engine is asked
    log = GradientLog({path.replace(".default", ""): p for path, p in model.named_parameters() if ".default." in path})
    trainer.add_callback(log)
    trainer.train()
    factors = {name: parameter.detach().clone() for name, parameter in log.parameters.items()}
    return trainer, judge, log.steps, factors


def population_trainer(
    base: str,
    output_dir,
    names: Sequence[str],
    table: Dataset = QUESTIONS,
    lora: Any = None,
    first: int = 0,
    rewards: Sequence[Callable] = (brief,),
    **options: Any,
) -> tuple[PopuLoRATrainer, Judge]:
    """
    A population that writes as these names do, its members in this order. A member that joins later writes as its own
    name does. The generations are numbered from `first`, and a resumed run goes on with their numbers.
    """
    judge = Judge()
    own = {"students": len(names), "save_rollouts": False}
    args = PopuLoRAConfig(str(output_dir), **(SETTINGS | own | options))
    trainer = PopuLoRATrainer(base, [judge, *rewards], args, table, peft_config=lora or small_lora())
    writers = dict(zip(trainer.population.names, names, strict=True))

    def record(prompts: list, members: Sequence[str], seeds: Any = None) -> list[Completion]:
        number = first + trainer._step // (trainer.args.steps_per_generation * trainer.num_iterations)
        # A rank has the part of each member's rows that follows the parts of the ranks before it.
        rank = trainer.accelerator.process_index
        found, places = [], {member: rank * count for member, count in Counter(members).items()}
        for prompt_ids, member in zip(trainer._tokenize_prompts(prompts)[0], members, strict=True):
            found.append(Completion(prompt_ids, write(writers.get(member, member), number, places[member]), ""))
            places[member] += 1
        return found

    trainer._generate_rows = record
    return trainer, judge


def population_run(base: str, output_dir, names: Sequence[str], **options: Any):
    """Trains such a population; returns trainer, judge, and gradients and factors by member."""
    trainer, judge = population_trainer(base, output_dir, names, **options)
    return trainer, judge, *train_and_watch(trainer)


def train_and_watch(trainer: PopuLoRATrainer) -> tuple[list, dict]:
    """Trains a population; returns gradients and factors by member."""
    members = trainer.population.names
    parameters = {(m, key): p for m in members for key, p in member_parameters(trainer.model, m).items()}
    log = GradientLog(parameters)
    trainer.add_callback(log)
    trainer.train()
    gradients = [{m: {key: seen[m, key] for n, key in seen if n == m} for m in members} for seen in log.steps]
    return gradients, {name: read_member(trainer.model, name) for name in members}
