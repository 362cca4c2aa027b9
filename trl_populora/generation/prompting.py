"""How tasks are put to a base: the style that fits it, solved tasks before a student's own, and what its chat template
takes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from trl_populora.assets import resolve_model_path
from trl_populora.step.held_out import HeldOut
from trl_populora.step.referee import Referee
from trl_populora.tasks.archive import TaskArchive


FEW_PARAMETERS = 10**9  # below, solved examples teach a format better than a description of it does
SHOTS = 3


def choose_style(
    wanted: str | None, model: str | PreTrainedModel, init_kwargs: Mapping[str, Any] | None = None
) -> str:
    """
    The wanted prompt style, else `"compact"` for a base made by `recipes/make_tiny_base.py`, or `"turns"`.

    Args:
        wanted: As in `prompt_style`.
        model: The base.
        init_kwargs: What it is loaded with, the revision among it.

    Raises:
        `ValueError`: If there is no such model; says what is there instead.
    """
    config = _config_of(model, (init_kwargs or {}).get("revision") or "main")
    return wanted or str(config.get("populora_prompt_style", "turns"))


def _config_of(model: str | PreTrainedModel, revision: str) -> dict[str, Any]:
    if not isinstance(model, str):
        return model.config.to_dict()
    path = resolve_model_path(model)
    here = Path(path).is_dir()
    try:
        if here and not Path(path, "config.json").is_file():
            raise OSError("it has no config.json")
        return PreTrainedConfig.get_config_dict(path, revision=revision)[0]
    except OSError as error:
        found = "a directory, but no model" if here else "no directory here, and the Hub has no such model in reach"
        raise ValueError(
            f"`model={model!r}` is {found} ({str(error).splitlines()[0]:.200}). Give a directory that "
            "`save_pretrained` wrote, or a Hub id."
        ) from error


def refuse_gguf(model: str) -> None:
    """
    Raises:
        `ValueError`: If a GGUF file, or a directory of nothing else, is given as base; says what to make of it.
    """
    files = [Path(model)] if model.endswith(".gguf") else sorted(Path(model).glob("*.gguf"))
    if files and not Path(model, "config.json").is_file():
        raise ValueError(
            f"`model={model!r}` is a GGUF file, which serves and does not train. Make an ordinary directory of it: "
            f"`AutoModelForCausalLM.from_pretrained({str(files[0].parent)!r}, gguf_file={files[0].name!r})` reads it, "
            "`recipes/get_smollm2.py` does the rest for one."
        )


def choose_shots(wanted: int | None, style: str, base: PreTrainedModel) -> int:
    """The wanted number of solved tasks, else by the base's size; none in the style `"compact"`."""
    if style == "compact":
        return 0
    if wanted is not None:
        return wanted
    # DeepSpeed leaves empty tensors of parameters that it has shared out.
    size = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in base.parameters())
    return SHOTS if size < FEW_PARAMETERS else 0


def check_prompts(
    referee: Referee,
    archive: TaskArchive,
    references: int | None,
    held_out: HeldOut | None,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
) -> None:
    """
    Asks each kind for a proposal prompt once, and looks at the solved tasks that students will be shown.

    Args:
        referee: Its kinds and how much room there is.
        archive: References are drawn from it.
        references: Archived tasks that a proposing teacher is shown; `None` where nobody proposes.
        held_out: Tasks that nobody may be shown solved.
        tokenizer: Counts the tokens of an answer.
        limit: Tokens of the longest completion.

    Raises:
        `ValueError`: If a prompt has no room or the chat template refuses it, a solved task is held out, or its answer
            is longer than a completion may be.
    """
    for kind in referee.kinds.values():
        if references is not None:
            referee.proposal_prompt(kind, referee.draw_references(kind, archive, references, random.Random(0)))
        for shot in kind.shots[: referee.shots]:
            if held_out is not None and shot.task in held_out:
                raise ValueError(
                    f"`eval_dataset` holds a task that students of {kind.name} are shown solved: "
                    f"{shot.task.program!r:.200}. Take it out, or set `shots=0`."
                )
            longest = len(tokenizer.encode(shot.answer, add_special_tokens=False)) + 1
            if limit is not None and longest > limit:
                raise ValueError(
                    f"`max_completion_length={limit}` is too short for answers of {kind.name}: one that students are "
                    f"shown has {longest} tokens. Raise it, or set `shots=0`."
                )
