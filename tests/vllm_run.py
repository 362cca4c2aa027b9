"""A short run with vLLM on a random base; under `torchrun` it prints what every rank ended with.

The one argument is a JSON object: settings of `PopuLoRAConfig`, and `base`, `resume` (bool) or `evaluate`, a list of
further settings: with each of them members that differ attempt held-out tasks, and nothing is trained.
"""

from __future__ import annotations

import json
import sys

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers.trainer_utils import get_last_checkpoint

from tests.launching import leave
from tests.populora_run import HELD_OUT, letters
from tests.small_run import small_trainer
from tests.vllm_models import largest_difference, logprobs_of, randomise
from trl_populora.lora.members import read_member, write_member
from trl_populora.trainer import PopuLoRATrainer


def watch_newborns(trainer: PopuLoRATrainer) -> list[tuple[float, float]]:
    """
    Fills the list that it returns: how far the log-probabilities with which vLLM sampled a replaced member's first
    rows are from those of the child, and from those of the member that was replaced.
    """
    play, replace, old, seen = trainer.rollout_func, trainer.evolution.replace, {}, []

    def replace_and_remember(name, *arguments, **options):
        old[name] = read_member(trainer.model, name)
        replace(name, *arguments, **options)

    def play_and_compare(*arguments):
        played = play(*arguments)
        for name in list(old):
            child = read_member(trainer.model, name)
            child_difference = difference(name)
            write_member(trainer.model, name, old.pop(name))
            seen.append((child_difference, difference(name)))
            write_member(trainer.model, name, child)
        return played

    def difference(name: str) -> float:
        completions = [row.completion for row in trainer.played.rows if row.member == name]
        prompts, texts = ([getattr(c, f"{part}_ids") for c in completions] for part in ("prompt", "completion"))
        rows = [trainer.population[name].index] * len(completions)
        sampled = [completion.logprobs for completion in completions]
        return largest_difference(sampled, logprobs_of(trainer.model, trainer.router, rows, prompts, texts))

    trainer.rollout_func, trainer.evolution.replace = play_and_compare, replace_and_remember
    return seen


def make_trainer(settings: dict, *tables) -> PopuLoRATrainer:
    """A trainer with an engine of its own, unless the settings say otherwise; `tables` are tasks and held-out ones."""
    defaults = {
        "per_device_train_batch_size": 4,
        "max_completion_length": 16,
        "save_strategy": "steps",
        "use_vllm": True,
        "vllm_engine_kwargs": {"enforce_eager": True},
        "vllm_max_model_length": 1024,
    }
    settings = defaults | settings
    tasks, held_out = tables or (None, None)
    return small_trainer(settings.pop("base"), tasks, letters, held_out, **settings)


def run(settings: dict) -> dict:
    """Trains in this process, as a rank of its group if it has one; what the run ended with on all ranks."""
    resume = settings.pop("resume", False)
    trainer = make_trainer(settings)
    args = trainer.args
    newborns = watch_newborns(trainer) if trainer.evolution else []
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir) if resume else None)
    sums = {name: _sum(read_member(trainer.model, name)) for name in trainer.population.names}
    published = gather_object([len(trainer.vllm_generation.published)])
    all_sums, all_newborns = gather_object([sums]), gather_object(newborns)
    key = "sampling/sampling_logp_difference/mean"
    dropped = "propose/dropped_references"
    return {
        "steps": trainer.state.global_step,
        "world": trainer.accelerator.num_processes,
        "sums": all_sums,
        "left_published": published,
        "newborns": all_newborns,
        "dropped": [entry[dropped] for entry in trainer.state.log_history if dropped in entry],
        "logp_differences": [entry[key] for entry in trainer.state.log_history if key in entry],
    }


def evaluate(settings: dict) -> dict:
    """What an evaluation tells, of 39 rows a member, and what ranks hear that ask for unlike numbers of rows."""
    held_out = [HELD_OUT[-1] | {"message": message} for message in ("ab", "cd", "efg", "hij", *"klmnopqrs")]
    kinds = {"task_kinds": ["tests.populora_run:Letters"], "sandbox_allow_weak": True, "eval_attempts": 3}
    trainer = make_trainer(settings | kinds, [HELD_OUT[-1] | {"message": "xyz"}], held_out)
    for seed, name in enumerate(trainer.population.names):
        randomise(trainer.model, name, seed)
    figures = trainer.evaluate()
    world, rank, refused = trainer.accelerator.num_processes, trainer.accelerator.process_index, ""
    trainer.vllm_generation.seeds = None
    try:
        with trainer.router.route_to([0] * (1 + rank)):
            trainer.vllm_generation.generate([[1, 2]] * (1 + rank), None, 1)
    except ValueError as error:
        refused = str(error)
    trainer.close()
    together = gather_object([_of_one_engine(trainer.vllm_generation, rank, world)]) if world > 1 else []
    figures.pop("eval_runtime")
    told = {"figures": gather_object([figures]), "refused": gather_object([refused])}
    return told | {"world": world, "together": together}


def _of_one_engine(generation, rank: int, world: int) -> tuple:
    """Rows and seeds with which all ranks ask one engine that is spread over them, which TRL has on GPUs only."""
    generation.mode, generation.tensor_parallel_size = "colocate", world
    generation.tp_group, generation.seeds = torch.distributed.group.WORLD, [10 * rank, 10 * rank + 1]
    return generation._gather_rows([rank, rank])


def main(settings: dict) -> None:
    modes = settings.pop("evaluate", None)
    result = {"evaluated": [evaluate(settings | mode) for mode in modes]} if modes else run(settings)
    if PartialState().is_main_process:
        print("RESULT " + json.dumps(result), flush=True)
    leave()


def _sum(factors) -> float:
    return sum(float(value.double().abs().sum()) for value in factors.values())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
