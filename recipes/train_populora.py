"""Trains a population: `accelerate launch recipes/train_populora.py --config recipes/tiny/quickstart.yaml`.

Every key of the YAML can be overridden on the command line (`--max_steps 60`); `--help` lists them in the order
population, tasks, matchmaking, rewards, sandbox, evolution. The run directory holds, at the end:

    members/<name>/          one ordinary PEFT adapter directory per member
    population.json          ratings, ages and parents of the members
    lineage.jsonl            every replacement
    rollouts/step_*.parquet  every proposal, verdict, attempt and reward
    run.png                  ratings, solve rates and rewards over the steps

What it leaves out: evaluation on benchmarks, pushing to the Hub.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, load_dataset
from peft import LoraConfig
from trl import ModelConfig, TrlParser

from trl_populora.checkpoint import newest
from trl_populora.populora_config import PopuLoRAConfig
from trl_populora.populora_trainer import PopuLoRATrainer
from trl_populora.report import plot_run, print_population


@dataclass
class RecipeArguments:
    """
    What the recipe needs beside the trainer's and the model's settings.

    Args:
        seed_tasks (`str`, *optional*):
            Table of seed tasks: a JSON lines or parquet file, or the name of a dataset on the Hub. The 256 tasks of
            the package when unset.
        resume (`bool`, *optional*, defaults to `False`):
            Continue from the newest whole checkpoint in `output_dir`, or start afresh if there is none.
    """

    seed_tasks: str | None = field(default=None, metadata={"help": "JSON lines, parquet, or a Hub dataset of tasks."})
    resume: bool = field(default=False, metadata={"help": "Continue from the newest checkpoint in output_dir."})


def read_seed_tasks(source: str | None) -> Dataset | None:
    """The table of seed tasks, or `None` for the package's own."""
    if source is None:
        return None
    formats = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
    suffix = Path(source).suffix
    if suffix in formats:
        return load_dataset(formats[suffix], data_files=source, split="train")
    return load_dataset(source, split="train")


def main(recipe: RecipeArguments, args: PopuLoRAConfig, model: ModelConfig) -> None:
    """Trains, saves, and shows the population."""
    args.model_init_kwargs = {
        "dtype": model.dtype,
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
    } | (args.model_init_kwargs or {})
    trainer = PopuLoRATrainer(
        model=model.model_name_or_path or "tiny",
        args=args,
        train_dataset=read_seed_tasks(recipe.seed_tasks),
        peft_config=LoraConfig(
            r=model.lora_r,
            lora_alpha=model.lora_alpha,
            target_modules=model.lora_target_modules or "all-linear",
            use_rslora=model.use_rslora,
        ),
    )
    trainer.train(resume_from_checkpoint=newest(args.output_dir) if recipe.resume else None)
    trainer.save_state()
    trainer.save_model()
    if trainer.is_world_process_zero():
        picture = plot_run(args.output_dir)
        print_population(args.output_dir)
        print(f"Population saved to {args.output_dir}; its story is in {picture}.")


if __name__ == "__main__":
    # TRL 1.16 still says `gradient_checkpointing`, which transformers announces to rename in every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    parser = TrlParser((RecipeArguments, PopuLoRAConfig, ModelConfig))
    main(*parser.parse_args_and_config())
