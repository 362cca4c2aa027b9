"""Exports one member, or the mean of all students, as an ordinary PEFT adapter or as a whole model."""

from __future__ import annotations

import logging
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from trl_populora.assets import resolve_model_path
from trl_populora.generate.player import find_end_tokens, list_known_ends
from trl_populora.hub.download import fetch
from trl_populora.lora.checks import is_quantised
from trl_populora.lora.convert import average, let_others_read
from trl_populora.run.read import POPULATION_FILE, read_population
from trl_populora.run.saved_population import check_one_moment


logger = logging.getLogger(__name__)

# What an export downloads: `population.json`, the adapters, and all files that a tokenizer may consist of.
_WANTED = (POPULATION_FILE, "members/*", "*token*", "chat_template*", "vocab*", "merges*")


@dataclass
class ExportArguments:
    """Arguments of `populora export`."""

    run: str = field(metadata={"help": "Directory of a run or of a checkpoint, or the Hub name of a population."})
    out: str = field(metadata={"help": "Directory to write; it must not be there yet."})
    member: str | None = field(default=None, metadata={"help": "Name of the member; the best student by default."})
    merge: bool = field(default=False, metadata={"help": "Write a whole model instead of an adapter."})
    merge_students: bool = field(
        default=False, metadata={"help": "Write the mean of what all students add to the base, instead of one member."}
    )


STUDENTS = "mean of the students"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def export_member(
    run: str, out: str | Path, member: str | None = None, merge: bool = False, merge_students: bool = False
) -> str:
    """
    Writes one member, or the mean of all students, to a directory that transformers, PEFT and vLLM load.

    The tokenizer goes with it.

    Args:
        run: Directory of a saved run or of a checkpoint, or the Hub name of a population.
        out: Directory to make. It must not exist yet.
        member: Name of the member; the best student by default.
        merge: Whether to write a whole model instead of an adapter. The model has the dtype in which the base is
            saved. A member that was trained on a quantised base is merged into the base without quantization; a base
            that is saved quantised is dequantised.
        merge_students: Whether to write the mean of what all students add to the base. The rank of that adapter is the
            sum of the students' ranks.

    Returns:
        `str`: The member's name, or "mean of the students".

    Raises:
        `ValueError`: If there is no such population or member, an adapter is missing or from another step than
            `population.json`, `out` exists already, `member` is given together with `merge_students`, or a base that
            was a directory is not there.
    """
    if merge_students and member:
        raise ValueError(f"`merge_students` takes all students; leave `member={member!r}` out.")
    out = Path(out)
    if out.exists():
        raise ValueError(f"{str(out)!r} is there already. Name a directory that does not exist yet.")
    root = fetch(run, wanted=_WANTED)
    saved = read_population(root)
    path = resolve_model_path(saved["base_model"])
    if merge and path in saved.get("local", ()) and not Path(path).is_dir():
        raise ValueError(
            f"The base was the directory {path!r}, which is not here. Run the command where that path leads to the "
            f"base, or write where the base lies as `base_model` into {root / POPULATION_FILE}."
        )
    adapters = {each["name"]: each["adapter"] for each in saved["members"]}
    students = [each["name"] for each in saved["members"] if each["role"] == "student"]
    names = students if merge_students else [member or saved["best_student"]]
    if names[0] not in adapters:
        raise ValueError(f"{run} has no member {names[0]!r}; there are {', '.join(adapters)}.")
    chosen = [adapters[name] for name in names]
    check_one_moment(root, saved, chosen)
    tokenizer = AutoTokenizer.from_pretrained(root)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Everything is written beside `out` first, so that `out` is complete or absent.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.", suffix=".tmp") as folder:
        unfinished = Path(folder, out.name)
        unfinished.mkdir()
        if len(chosen) > 1:
            students_at = [root / each for each in chosen]
            mean, config = average(
                [(load_file(each / WEIGHTS), LoraConfig.from_pretrained(each)) for each in students_at]
            )
            save_file(mean, unfinished / WEIGHTS, metadata={"format": "pt"})
            config.save_pretrained(unfinished)
            let_others_read(unfinished)
        else:
            for file in (CONFIG, WEIGHTS):
                shutil.copyfile(root / chosen[0] / file, unfinished / file)
        if merge:
            _merge_into_base(saved, path, unfinished, tokenizer)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(out)
    return STUDENTS if merge_students else names[0]


def _merge_into_base(saved: dict, path: str, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """
    Merges the adapter in a directory into the base, and puts the merged model in place of the adapter's files. Its
    answers end where those of the members ended.
    """
    settings = saved.get("settings", {})
    base = AutoModelForCausalLM.from_pretrained(path, revision=settings.get("base_revision", "main"), dtype="auto")
    if is_quantised(base):
        logger.warning(
            "The base is saved quantised. The merge dequantises it, so the model is as large as one in %s.", base.dtype
        )
        base = base.dequantize()
        base._weight_conversions = None  # they would quantise again what is saved
    elif saved.get("base_quantization"):
        logger.warning("Training ran on a quantised base. The merge takes the base without quantization.")
    merged = PeftModel.from_pretrained(base, directory).merge_and_unload()
    for file in (CONFIG, WEIGHTS):
        (directory / file).unlink()
    known = list_known_ends(merged.generation_config, tokenizer)
    stops = settings.get("generation_kwargs"), settings.get("chat_template_kwargs")
    merged.generation_config.eos_token_id = find_end_tokens(tokenizer, known, *stops)
    merged.save_pretrained(directory)
    # safetensors closes its files to other users, such as a server's.
    for weights in directory.glob("*.safetensors"):
        shutil.copymode(directory / "config.json", weights)
