"""Cold start: shows a base that is too small or too raw how its run is played, before self-play.

    python recipes/cold_start.py --config recipes/SmolLM2-135M-Instruct/config_2t2s.yaml
    python recipes/train_populora.py --config recipes/SmolLM2-135M-Instruct/config_2t2s.yaml

Takes the settings of the run itself, so that prompts, kinds, tasks, limits and the adapter's shape are the run's, and
leaves an ordinary LoRA adapter where the run's `warm_start` looks for it: all members start from it. It is trained on
documents: tasks with answers (`cold_documents.py`), and ordinary instructions with the base's own answers
(`ordinary_documents.py`). TRL's `SFTTrainer` learns the assistant's last turn of each. On two CPU cores a 135M first
answers for some minutes, and is then trained for 20. On a GPU several documents of a step go through the model at
once. `--resume` goes on after an interruption. `--help` lists the options.

What it leaves out: measuring what came of it. A run's first steps do, or its held-out tasks with `eval_on_start`.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cold_documents import Document, DocumentWriter
from datasets import Dataset
from ordinary_documents import answer_instructions
from peft import LoraConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer, TrlParser, get_quantization_config

from trl_populora.assets import TINY, resolve_model_path
from trl_populora.cli import TrainArguments
from trl_populora.config import MemberConfig, PopuLoRAConfig, base_options, member_lora
from trl_populora.evaluate.held_out import load_held_out
from trl_populora.generate.player import make_free_token_counter
from trl_populora.lora.checks import check_is_base
from trl_populora.start import (
    check_output_dir,
    choose_style,
    fit_into_context,
    load_base,
    load_tokenizer,
    make_kinds,
    make_referee,
)
from trl_populora.step.microbatch import score_labels_alone
from trl_populora.tasks.dataset import build_archive, read_given_tasks
from trl_populora.tasks.python.reading import has_thinking


@dataclass
class ColdStartArguments(TrainArguments):
    """
    What a cold start needs beside the settings of its run.

    Args:
        documents (`int`, *optional*, defaults to `1000`): Documents that are shown, each once: proposals, answers
            to tasks, and answers to ordinary instructions.
        worked (`float`, *optional*, defaults to `1.0`): Share of the answers to code_o and code_i that are worked out
            line by line before. The others are direct, which a small base at first gets right as often: with half of
            each, self-play left only direct ones after 12 steps, and nothing to learn.
        instructions (`float`, *optional*, defaults to `0.1`): Share of the documents that are ordinary instructions
            with the base's own answers, meant to keep what it could do. There are 170 instructions. The embedded base
            is shown none.
        further_tasks (`int`, *optional*, defaults to `600`): Simple tasks that `tiny_programs.py` makes, to be
            proposed and answered beside those of the run.
        documents_per_step (`int`, *optional*, defaults to `8`): Of one optimizer step.
        cold_start_rate (`float`, *optional*, defaults to `1e-3`): Learning rate, falling to 0.
    """

    documents: int = field(default=1000, metadata={"help": "Documents that are shown, each once."})
    worked: float = field(default=1.0, metadata={"help": "Share of the code_o and code_i answers worked out."})
    instructions: float = field(default=0.1, metadata={"help": "Share of ordinary instructions among documents."})
    further_tasks: int = field(default=600, metadata={"help": "Simple tasks beside the run's."})
    documents_per_step: int = field(default=8, metadata={"help": "Documents of one optimizer step."})
    cold_start_rate: float = field(default=1e-3, metadata={"help": "Learning rate, falling to 0."})


def check_adapter_directory(directory: Any, resume: bool) -> None:
    """
    Checks where the adapter goes: the run's `warm_start`.

    Raises:
        `ValueError`: If that is no directory for one adapter, cannot be written to, or has one.
    """
    if not isinstance(directory, str) or directory.lstrip().startswith(("{", "[")):
        raise ValueError(
            f"`warm_start` names the directory that gets the adapter of all members, got {directory!r}. Give "
            "`--warm_start runs/cold_start`, here and to the run."
        )
    directory = os.path.expanduser(directory)
    if Path(directory, "adapter_config.json").exists() and not resume:
        raise ValueError(f"{directory} holds an adapter already. Remove it, or name another `--warm_start`.")
    check_output_dir(directory)


def write_documents(
    recipe: ColdStartArguments, args: PopuLoRAConfig, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[Document]:
    """
    The documents of a run, the same for the same seed; the base's own answers only on the same hardware.

    Raises:
        `ValueError`: If none of some role and kind can be written, or `instructions` is no share.
    """
    if not 0 <= recipe.instructions < 1:
        raise ValueError(f"`instructions` is a share, from 0 to below 1, got {recipe.instructions}.")
    kinds = make_kinds(args)
    begun, tables = read_given_tasks(recipe.seed_tasks, recipe.eval_tasks, args.task_kinds, args.prompt_style)
    archive = build_archive(begun, kinds, args.prompt_style, args.archive_size, args.references_per_proposal)
    held_out = None if tables is None else load_held_out(tables, kinds, archive, args)
    referee = make_referee(args, kinds, base, tokenizer, held_out)

    def fits(answer: str) -> bool:
        tokens = len(tokenizer.encode(answer, add_special_tokens=False))
        return args.max_completion_length is None or tokens < args.max_completion_length

    # The embedded base, whose prompts are compact, knows its own formats alone.
    asked = 0 if args.prompt_style == "compact" else round(recipe.documents * recipe.instructions)
    ordinary = answer_instructions(base, tokenizer, args, asked) if asked else []
    with referee.sandbox:
        fit_into_context(referee, archive, held_out, make_free_token_counter(base, tokenizer, args))
        rng = random.Random(args.seed)
        writer = DocumentWriter(referee, archive, args.references_per_proposal, fits, rng)
        documents = writer.write(recipe.documents - len(ordinary), recipe.worked, recipe.further_tasks)
    found = Counter(document.name for document in documents)
    if missing := [name for kind in kinds for name in (f"propose {kind}", f"solve {kind}") if not found[name]]:
        raise ValueError(
            f"No document can be written for {', '.join(missing)}: there is no task of the kind, or none fits into "
            f"`max_completion_length={args.max_completion_length}`. Add seed tasks or leave the kind out."
        )
    worked = sum(has_thinking(document.answer) for document in documents)
    if ordinary:
        documents += ordinary
        rng.shuffle(documents)
        found["ordinary"] = len(ordinary)
    told = ", ".join(f"{count} {name}" for name, count in sorted(found.items()))
    print(f"{len(documents)} documents: {told}; {worked} answers are worked out.")
    return documents


def choose_together(documents: int, args: PopuLoRAConfig) -> int:
    """
    How many of the documents of a step go through the model together: on a GPU as many as the run's update takes rows,
    whose tokens fit there, and as divide the documents. On a CPU one, because padding costs more than it saves.
    """
    most = 1 if args.device.type == "cpu" else args.per_device_train_batch_size
    return max(number for number in range(1, documents + 1) if documents % number == 0 and number <= most)


def make_trainer(
    documents: list[Document],
    recipe: ColdStartArguments,
    args: PopuLoRAConfig,
    lora: LoraConfig,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> SFTTrainer:
    """What trains an adapter of the members' shape on the documents."""
    own = max(1, recipe.documents_per_step // args.world_size)
    together = choose_together(own, args)
    given = {"chat_template_kwargs": args.chat_template_kwargs} if args.chat_template_kwargs else {}
    rows = [
        {"prompt": each.prompt, "completion": [{"role": "assistant", "content": each.answer}], **given}
        for each in documents
    ]
    settings = SFTConfig(
        args.warm_start,
        per_device_train_batch_size=together,
        gradient_accumulation_steps=own // together,
        num_train_epochs=1,
        learning_rate=recipe.cold_start_rate,
        lr_scheduler_type="linear",
        warmup_steps=5,
        max_length=None,  # documents fit into the run's context
        completion_only_loss=True,
        gradient_checkpointing=args.gradient_checkpointing,
        bf16=args.bf16,
        fp16=args.fp16,
        use_cpu=args.use_cpu,
        seed=args.seed,
        logging_steps=5,
        save_steps=20,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=args.disable_tqdm,
    )
    set_seed(args.seed)
    return SFTTrainer(
        base, settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, peft_config=lora
    )


def prepare(recipe: ColdStartArguments, args: PopuLoRAConfig, model: MemberConfig) -> SFTTrainer:
    """
    Reads the base, writes the documents and makes the trainer.

    Raises:
        `ValueError`: If something cannot be used, with the way out.
    """
    args = args.for_game()
    check_adapter_directory(args.warm_start, recipe.resume)
    if recipe.resume not in (None, "newest") and not Path(recipe.resume).is_dir():
        raise ValueError(f"`resume={recipe.resume}`: there is no such checkpoint. `--resume` alone takes the newest.")
    for option, values in model.member_values.items():
        raise ValueError(f"`{option}={values}`: a cold start trains one adapter. Give one number.")
    name, args.model_init_kwargs = model.model_name_or_path or TINY, base_options(model, args.model_init_kwargs)
    args.prompt_style = choose_style(args.prompt_style, name, args.model_init_kwargs)
    check_is_base(resolve_model_path(name), model.model_revision)
    base = load_base(name, args, get_quantization_config(model))
    tokenizer = load_tokenizer(base, None, args)
    documents = write_documents(recipe, args, base, tokenizer)
    return make_trainer(documents, recipe, args, member_lora(model), base, tokenizer)


def parse(arguments: list[str]) -> tuple[ColdStartArguments, PopuLoRAConfig, MemberConfig]:
    usage = "%(prog)s --config FILE.yaml [--option value ...]"
    parser = TrlParser((ColdStartArguments, PopuLoRAConfig, MemberConfig), usage=usage)
    return parser.parse_args_and_config(arguments)


def main(arguments: list[str]) -> None:
    try:
        recipe, args, model = parse(arguments)
        trainer = prepare(recipe, args, model)
    except ValueError as error:
        raise SystemExit(f"cold_start.py: {error}") from error
    directory, checkpoint = trainer.args.output_dir, recipe.resume
    with score_labels_alone():
        trainer.train(resume_from_checkpoint=get_last_checkpoint(directory) if checkpoint == "newest" else checkpoint)
    trainer.save_model()
    print(f"The adapter is in {directory}; the run starts from it with `warm_start: {directory}`.")


if __name__ == "__main__":
    main(sys.argv[1:])
