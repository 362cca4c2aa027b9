"""A member leaves its population as an ordinary PEFT adapter or merged into the base."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_populora.assets import resolve_model_path
from trl_populora.hub.downloads import fetch
from trl_populora.population.members import POPULATION_FILE, read_population
from trl_populora.runs.saved_population import check_one_moment


logger = logging.getLogger(__name__)

# The second are files of tokenizers, whatever their kind.
_WANTED = (POPULATION_FILE, "members/*", "*token*", "chat_template*", "vocab*", "merges*")


@dataclass
class ExportArguments:
    """What `populora export` needs."""

    run: str = field(metadata={"help": "Directory of a run or of its checkpoint, or the Hub name of a population."})
    out: str = field(metadata={"help": "Directory to write; it must not be there yet."})
    member: str | None = field(default=None, metadata={"help": "Which one; the best student by default."})
    merge: bool = field(default=False, metadata={"help": "Write a whole model instead of an adapter."})


def export_member(run: str, out: str | Path, member: str | None = None, merge: bool = False) -> str:
    """
    Writes one member with its tokenizer to a directory that transformers, PEFT and vLLM load.

    Args:
        run (`str`): Directory of a saved run or of a checkpoint, or the Hub name of a population.
        out (`str` or `Path`): A directory that is not there yet.
        member (`str`, *optional*): Its name; the best student by default.
        merge (`bool`, *optional*, defaults to `False`): Whether to write a whole model, in the type that the base is
            saved in, instead of an adapter. Also the members of a quantised base are merged into the base as it is
            saved.

    Returns:
        `str`: The member's name.

    Raises:
        `ValueError`: If there is no such population or member, the member is of another step than `population.json`
            tells of, or `out` is there already.
    """
    if Path(out).exists():
        raise ValueError(f"{str(out)!r} is there already. Name a directory that is not.")
    root = fetch(run, wanted=_WANTED)
    saved = read_population(root)
    adapters = {each["name"]: each["adapter"] for each in saved["members"]}
    name = member or saved["best_student"]
    if name not in adapters:
        raise ValueError(f"{run} has no member {name!r}; there are {', '.join(adapters)}.")
    check_one_moment(root, saved, [adapters[name]])
    unfinished = Path(f"{out}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    if merge:
        _write_merged(saved, root / adapters[name], unfinished)
    else:
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copyfile(root / adapters[name] / file, unfinished / file)
    AutoTokenizer.from_pretrained(root).save_pretrained(unfinished)
    unfinished.rename(out)
    return name


def _write_merged(saved: dict, adapter: Path, directory: Path) -> None:
    if saved.get("base_quantization"):
        logger.warning("The member was trained beside a quantised base; it is merged into the base as it is saved.")
    revision = saved.get("settings", {}).get("base_revision", "main")
    base = AutoModelForCausalLM.from_pretrained(
        resolve_model_path(saved["base_model"]), revision=revision, dtype="auto"
    )
    PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(directory)
