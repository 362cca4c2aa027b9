"""`population.json`: what a saved population says about itself, and whether it fits a trainer."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel
from trl import GRPOConfig

from trl_populora import __version__
from trl_populora.evaluate.held_out import HeldOut
from trl_populora.files import FORMAT, drop_secrets
from trl_populora.lora.members import saved_step
from trl_populora.run.read import POPULATION_FILE, read_population
from trl_populora.step.play import Game
from trl_populora.tasks.archive import archive_step


logger = logging.getLogger(__name__)

_PATTERNS = ("rank_pattern", "alpha_pattern")  # a file without them is from before they were written

# Numbers of the base's configuration that decide whether an adapter fits.
_BASE_FIELDS = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
# TRL's settings that decide what members say; cross-play samples with them, too.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "generation_kwargs",
    "chat_template_kwargs",
)
# Those that decide an update. A checkpoint's optimizer brings its own along.
OPTIMIZER = ("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
UPDATE = (
    *OPTIMIZER,
    "warmup_steps",
    "lr_scheduler_kwargs",
    "max_grad_norm",
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "scale_rewards",
    "reward_weights",
    "mask_truncated_completions",
    "bf16",
    "fp16",
    "use_vllm",
    "vllm_importance_sampling_correction",
)
_LORA_FIELDS = ("r", "lora_alpha", "use_rslora", "target_modules", *_PATTERNS)

# Optimizer, schedule, generators and archive come from the checkpoint, and count of what is buffered, too.
_DECIDED_BY_CHECKPOINT = (
    "learning_rate",
    "teacher_learning_rate",
    "lr_scheduler_type",
    "seed",
    "task_kinds",
    "single_agent",
    "base_revision",
    *OPTIMIZER,
)
_DECIDED_BY_BUFFER = ("proposals_per_teacher", "attempts_per_task", "num_iterations", "per_device_train_batch_size")


@dataclass(frozen=True)
class Shape:
    """
    What adapters have to fit.

    Args:
        base_model: Name or path of the base.
        base_config: The numbers of its configuration that decide whether an adapter fits.
        lora: The members' LoRA settings.
        quantization: How the base's weights are held in few bits, if they are.
    """

    base_model: str
    base_config: dict[str, Any]
    lora: dict[str, Any]
    quantization: dict[str, Any] | None = None

    @classmethod
    def of(cls, model: PeftModel, base_model: str) -> Shape:
        """The shape of a live population."""
        base, lora = model.get_base_model().config, next(iter(model.peft_config.values()))
        values = {name: getattr(lora, name) for name in _LORA_FIELDS}
        if not isinstance(values["target_modules"], str):
            values["target_modules"] = sorted(values["target_modules"])
        quantization = getattr(base, "quantization_config", None)
        if quantization is not None:  # as JSON has it, which is how it is compared with a saved one
            quantization = json.loads(json.dumps(quantization.to_dict()))
        return cls(base_model, {name: getattr(base, name, None) for name in _BASE_FIELDS}, values, quantization)


def describe(game: Game, shape: Shape, args: GRPOConfig, step: int, held_out: HeldOut | None) -> dict[str, Any]:
    """
    The population for people and other programs: the contents of `population.json`.

    Args:
        game: Its population, kinds and prompt style.
        shape: Base and adapters.
        args: Settings.
        step: Optimizer steps so far.
        held_out: Last solve rates on held-out tasks.
    """
    population, rates = game.population, held_out.rates if held_out else {}
    # What was measured before the last update tells nothing of the weights that are there now.
    best, why = population.best_student(rates if held_out and held_out.step == step else {})
    members = [
        {
            "name": member.name,
            "role": member.role,
            "mu": member.mu,
            "sigma": member.sigma,
            "fitness": population.fitness(member),
            "held_out": rates.get(member.identity),
            "age": member.age,
            "born": member.born,
            "version": member.version,
            "operator": member.operator,
            "parents": list(member.parents),
            "adapter": f"members/{population.adapter(member.name)}",
        }
        for member in population
    ]
    return {
        "format": FORMAT,
        "base_model": shape.base_model,
        "base_config": shape.base_config,
        "base_quantization": shape.quantization,
        "step": step,
        "lora": shape.lora,
        "task_kinds": list(game.referee.kinds),
        "prompt_style": game.referee.style,
        "best_student": best,
        "best_student_by": why,
        "held_out_base": held_out.base_rate if held_out else None,
        "held_out_step": held_out.step if held_out else None,
        "held_out_tasks": held_out.describe_tasks() if held_out else None,
        "members": members,
        "settings": _settings(args),
        "versions": versions(),
    }


@cache
def versions() -> dict[str, str]:
    """Of Python and the packages on which the figures of a run depend."""
    own = {"python": platform.python_version(), "trl-populora": __version__}  # known of a checkout, too
    return own | {name: version(name) for name in ("trl", "transformers", "peft", "torch")}


def _settings(args: GRPOConfig) -> dict[str, Any]:
    """What this package's own fields are set to, and the few of TRL's that a reader asks for first."""
    inherited = {field.name for field in fields(GRPOConfig)}
    own = [field.name for field in fields(args) if field.name not in inherited]
    shared = ["max_steps", "learning_rate", "lr_scheduler_type", "beta", "loss_type", "seed", "max_completion_length"]
    shared += ["num_iterations", "per_device_train_batch_size", *SAMPLING, *UPDATE]
    # "main" is what a Hub id means by itself, and without meaning for a directory.
    revision = (args.model_init_kwargs or {}).get("revision") or "main"
    return drop_secrets({name: getattr(args, name) for name in (*own, *shared)} | {"base_revision": revision})


def saved_lora(saved: Mapping[str, Any]) -> LoraConfig:
    """The LoRA settings of a saved population: those that a run saves, because others may name modules to import."""
    return LoraConfig(**{name: value for name, value in saved["lora"].items() if name in _LORA_FIELDS})


def check_same_shape(root: Path, shape: Shape, members: Sequence[str] | None = None) -> dict[str, Any]:
    """
    Reads a saved population and refuses it if its adapters do not fit.

    Args:
        root: Its directory.
        shape: What they have to fit.
        members: Whom the file must list, as a resumed run needs it.

    Raises:
        `ValueError`: If the file is broken, or its base, adapter shape or members differ; names file and field.
    """
    path, saved = root / POPULATION_FILE, read_population(root)
    for field in ("base_model", "base_config", "lora", "members"):
        if field not in saved:
            raise ValueError(f"{path}: field `{field}` is missing.")
    ways_out = {
        "base_config": f"Use the population's own base, {saved['base_model']!r}",
        "lora": "Use the population's own LoRA settings",
    }
    for group, live in (("base_config", shape.base_config), ("lora", shape.lora)):
        for name, value in live.items():
            if (found := saved[group].get(name, {} if name in _PATTERNS else None)) != value:
                raise ValueError(
                    f"{path}: field `{group}.{name}` is {found!r}, this trainer has {value!r}. {ways_out[group]}."
                )
    ours = shape.base_model
    if saved["base_model"] != ours:
        # A directory may have moved; a Hub id is a name for certain weights.
        if not (os.path.isdir(ours) or os.path.isabs(saved["base_model"])):
            raise ValueError(
                f"{path}: field `base_model` is {saved['base_model']!r}, this trainer trains on {ours!r}. Adapters "
                "only make sense on the base they were trained on."
            )
        logger.warning("%s names the base %r, this trainer's is at %r.", path, saved["base_model"], ours)
    _check_quantization(path, saved.get("base_quantization"), shape.quantization, resumes=members is not None)
    names = [member["name"] for member in saved["members"]]
    if members is not None and names != list(members):
        raise ValueError(
            f"{path}: field `members` lists {', '.join(names)}; this trainer has "
            f"{', '.join(members)}. Resume with the saved `teachers` and `students`, or start a new "
            "run with `warm_start` to change them."
        )
    return saved


def _check_quantization(path: Path, saved: dict | None, ours: dict | None, resumes: bool) -> None:
    """Adapters are of use beside other roundings of their base, too, but no run goes on with them as it was."""
    if saved == ours:
        return
    differs = f"{path}: field `base_quantization` is {saved!r}, this trainer has {ours!r}."
    if resumes:
        raise ValueError(f"{differs} A resumed run cannot change it; `warm_start` can.")
    logger.warning("%s", differs)


def check_settings(args: GRPOConfig, root: Path, saved: Mapping[str, Any], same_processes: bool) -> None:
    """
    Says which settings a resumed run changes, and refuses those that a checkpoint decides.

    Args:
        args: Settings of the run that resumes.
        root: The checkpoint, for messages.
        saved: Its `population.json`; settings that an older file lacks are not compared.
        same_processes: Whether as many processes resume as have saved.

    Raises:
        `ValueError`: If a setting differs that would be taken by halves; names all of them, with both values.
    """
    ours, theirs = json.loads(json.dumps(_settings(args))), saved.get("settings", {})
    changed = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    fixed = (*_DECIDED_BY_CHECKPOINT, *(_DECIDED_BY_BUFFER if same_processes else ()))
    refused = [f"`{name}` was {theirs[name]!r}, is {ours[name]!r}" for name in changed if name in fixed]
    if refused:
        raise ValueError(
            f"{root / POPULATION_FILE}: a resumed run cannot change {'; '.join(refused)}. Resume with "
            "the saved values, or start a new run with `warm_start` to change them."
        )
    if gone := sorted(theirs.keys() - ours.keys()):
        logger.warning(
            "%s has settings that this version does not know, and goes on without: %s.", root, ", ".join(gone)
        )
    if changed:
        told = "; ".join(f"`{name}` was {theirs[name]!r}, is {ours[name]!r}" for name in changed)
        logger.warning("Resuming %s with other settings, which hold from here on: %s.", root, told)


def check_one_moment(root: Path, saved: Mapping[str, Any], adapters: Sequence[str] | None = None) -> None:
    """
    Refuses adapters, or an archive, that were saved at another step than `population.json` tells of, which is kept up
    to date while a run goes on. Files of early runs do not say when they were saved, and are taken.

    Args:
        root: Directory of a saved population.
        saved: Its `population.json`.
        adapters: Directories of those that are wanted; all members' by default.

    Raises:
        `ValueError`: If one is missing or of another step; names both steps and the way out.
    """
    wanted = [member["adapter"] for member in saved["members"]] if adapters is None else adapters
    if not all((root / each / "adapter_model.safetensors").exists() for each in wanted):
        raise ValueError(f"{root} was not saved to its end; use a checkpoint of it, or resume it.")
    steps = {each: saved_step(root / each) for each in wanted}
    if (archive := root / "archive.parquet").exists():
        steps[archive.name] = archive_step(archive)
    for name, step in steps.items():
        if step not in (None, saved.get("step")):
            raise ValueError(
                f"{root} is of two moments: {POPULATION_FILE} tells of step {saved.get('step')}, {name} was saved "
                f"after step {step}. The run went on and did not save its end; use a checkpoint of it, or resume it."
            )


def best_adapter(root: Path) -> Path:
    """
    Directory of the best student's adapter in a saved population.

    Raises:
        `ValueError`: If `population.json` is missing or broken, or the adapter of another step.
    """
    saved = read_population(root)
    best = next(member["adapter"] for member in saved["members"] if member["name"] == saved["best_student"])
    check_one_moment(root, saved, [best])
    return root / best
