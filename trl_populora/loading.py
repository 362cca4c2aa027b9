"""What has to be there before a run: the base model, its tokenizer, the seed tasks, a place to write.

Everything is checked here, before training starts, and each refusal names the value and the way out.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from accelerate.utils import DistributedType
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.utils import create_model_from_path

from trl_populora.populora_config import PopuLoRAConfig
from trl_populora.tasks import load_seed_tasks
from trl_populora.tasks.archive import TaskArchive
from trl_populora.tasks.base import TaskKind


TINY = "tiny"


def tiny_base_path() -> str:
    """Directory of the embedded tiny base model, made by `recipes/make_tiny_base.py`."""
    return str(files("trl_populora").joinpath("assets", "tiny"))


def resolve_model_path(model: str) -> str:
    """The embedded base for `"tiny"`; any other name or path is left to transformers."""
    return tiny_base_path() if model == TINY else model


def load_base(model: str | PreTrainedModel, args: PopuLoRAConfig) -> PreTrainedModel:
    """
    Loads a base model as TRL does; a model that is loaded already is passed through.

    Raises:
        `ValueError`: If the model is no text-only causal language model.
    """
    if isinstance(model, str):
        kwargs = dict(args.model_init_kwargs or {})
        if args.distributed_state.distributed_type in (DistributedType.MULTI_GPU, DistributedType.DEEPSPEED):
            kwargs["device_map"] = None  # one whole model per process; "auto" would spread it over the GPUs
        kwargs.setdefault("trust_remote_code", args.trust_remote_code)
        model = create_model_from_path(resolve_model_path(model), **kwargs)
    if getattr(model.config, "vision_config", None) is not None:
        raise ValueError(
            f"{model.config.name_or_path or type(model).__name__} is a vision-language model. Tasks are text: pass a "
            "text-only causal language model."
        )
    return model


def load_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """
    Loads the base's tokenizer unless one is given.

    Raises:
        `ValueError`: If it has no chat template, because prompts are conversations.
    """
    name = model.config.name_or_path
    if tokenizer is None:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", truncation_side="left")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"The tokenizer of {name!r} has no chat template, and tasks are posed as conversations. Pass "
            "`processing_class=` with `chat_template` set (any ChatML template works), or start from an "
            "instruction-tuned base."
        )
    return tokenizer


def prompt_style(args: PopuLoRAConfig, model: PreTrainedModel) -> str:
    """The configured style, else `"compact"` for a base made by `recipes/make_tiny_base.py` and `"chat"` otherwise."""
    return args.prompt_style or str(getattr(model.config, "populora_prompt_style", "chat"))


def is_zero3(args: PopuLoRAConfig) -> bool:
    """Whether DeepSpeed shards parameters; adapters then keep the base's dtype."""
    return args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3


def load_archive(train_dataset: Dataset | None, kinds: Mapping[str, TaskKind], args: PopuLoRAConfig) -> TaskArchive:
    """
    Builds the archive from a table of tasks, or from the 256 tasks that ship with the package.

    Raises:
        `TypeError`: If it is not a `datasets.Dataset`.
        `ValueError`: If a column is missing or broken, or no task is of a kind that the run plays.
    """
    if train_dataset is None:
        archive = TaskArchive(args.archive_size)
        for task in load_seed_tasks():
            archive.add(task)
    elif isinstance(train_dataset, Dataset):
        archive = TaskArchive.from_dataset(train_dataset, cap=args.archive_size)
    else:
        raise TypeError(
            f"`train_dataset` must be a `datasets.Dataset` of tasks or None, got `{type(train_dataset).__name__}`. A "
            "table can be read with `load_dataset('json', data_files=...)['train']`."
        )
    if not any(archive.sample([name], 1, random.Random(0)) for name in kinds):
        raise ValueError(
            f"`train_dataset` holds no task of the kinds {', '.join(kinds)}; students need at least one to start "
            "with. Add seed tasks of these kinds, or change `task_kinds`."
        )
    return archive


def check_output_dir(path: str) -> None:
    """
    Raises:
        `ValueError`: If the directory cannot be made or written to.
    """
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"`output_dir={path!r}` is not writable ({error.strerror or error}). Choose a directory that you may "
            f"write to, for example {str(Path.home() / 'runs')!r}."
        ) from error
