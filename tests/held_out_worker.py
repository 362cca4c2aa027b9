"""Evaluations on given tasks whose figures are compared with others: of two processes with one's, of vLLM's."""

from __future__ import annotations

import torch


def ranks(base: str, directory: str) -> dict:
    """The first evaluation of a trainer whose members are no longer the base."""
    from tests.populora_run import EVALUATED, make_trainer
    from trl_populora.lora.members import read_member

    trainer = make_trainer(base, directory, EVALUATED | {"max_steps": 1})
    for seed, name in enumerate(trainer.population.names):
        random = torch.Generator().manual_seed(seed)
        shapes = {key: value.shape for key, value in read_member(trainer.model, name).items()}
        factors = {key: 0.05 * torch.randn(shape, generator=random) for key, shape in shapes.items()}
        trainer.replace_member(name, factors, step=0)
    figures = trainer.evaluate()
    trainer.close()
    return figures | {"world": trainer.accelerator.num_processes}


def vllm(directory: str) -> list[dict]:
    """An evaluation with transformers, then two with vLLM by a trainer whose students differ from the base."""
    from datasets import Dataset
    from peft import LoraConfig

    from trl_populora.assets import tiny_eval_tasks
    from trl_populora.config import PopuLoRAConfig
    from trl_populora.lora.members import read_member, write_member
    from trl_populora.tasks import load_seed_tasks
    from trl_populora.trainer import PopuLoRATrainer

    tasks = [task.to_record() for task in load_seed_tasks(tiny_eval_tasks()) if task.kind == "code_o"][:50]
    told = []
    for use_vllm in (False, True):
        args = PopuLoRAConfig(
            directory,
            teachers=1,
            students=2,
            proposals_per_teacher=2,
            attempts_per_task=2,
            inputs_per_function=6,
            per_device_train_batch_size=6,
            per_device_eval_batch_size=64,
            max_completion_length=160,
            eval_attempts=4,
            evolve_every=0,
            use_cpu=True,
            bf16=False,
            report_to=[],
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
            use_vllm=use_vllm,
            vllm_max_model_length=1024,
            vllm_engine_kwargs={"enforce_eager": True, "max_num_seqs": 64},  # by itself as many as a step has rows, 6
        )
        lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
        trainer = PopuLoRATrainer("tiny", args=args, eval_dataset=Dataset.from_list(tasks), peft_config=lora)
        worse = read_member(trainer.model, "student_1")
        generator = torch.Generator().manual_seed(0)
        worse = {key: value + 0.2 * torch.randn(value.shape, generator=generator) for key, value in worse.items()}
        write_member(trainer.model, "student_1", worse)
        for _ in range(1 + use_vllm):
            before = torch.get_rng_state()
            told.append(trainer.evaluate() | {"unmoved": bool(torch.equal(before, torch.get_rng_state()))})
        trainer.close()
    return told
