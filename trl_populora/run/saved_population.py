"""Makes the contents of `population.json`, and checks whether a saved population fits a trainer.

members, Shape, settings      --describe---------> contents of population.json
population.json, Shape        --check_same_shape-> contents of the file, or an error that names the field
population.json, settings     --check_settings---> one error for all changes that a resume may not make,
                                                   else one warning for all changes
population.json, pooled roles --check_pooled-----> an error if their members did not begin alike
population.json, files beside --check_one_moment-> an error if they were saved after different steps
"""

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
from trl_populora.lora.convert import find_widest
from trl_populora.lora.members import read_saved_step
from trl_populora.population.members import Population
from trl_populora.population.pooling import find_pooled_roles
from trl_populora.run.read import POPULATION_FILE, read_population
from trl_populora.step.prompts import MemberScores
from trl_populora.step.referee import Referee
from trl_populora.tasks.archive import read_archive_step


logger = logging.getLogger(__name__)

# Fields of the base's configuration that decide whether an adapter fits.
_BASE_FIELDS = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
# TRL's settings that decide how members sample. Cross-play samples as `read_sampling` reads them.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "generation_kwargs",
    "chat_template_kwargs",
)
# TRL's settings that decide an update. A resume takes those in `OPTIMIZER` from the checkpoint's optimizer state.
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
_LORA_FIELDS = ("r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern")
_LAYER_FIELDS = ("layers_to_transform", "layers_pattern", "exclude_modules")  # saved where they are set

_BEGINNINGS = {"init", "warm_start"}  # operators after which equal parents mean equal adapters
# A resume restores optimizer, schedule, generators and archive from the checkpoint. If a resume changed one of these
# settings, the change would have no effect, or only half of one.
_DECIDED_BY_CHECKPOINT = (
    "learning_rate",
    "teacher_learning_rate",
    "lr_scheduler_type",
    "seed",
    "task_kinds",
    "single_agent",
    "max_members",
    "halve_every",
    "base_revision",
    *OPTIMIZER,
)
# Settings that a run may list with a value for each member. The checkpoint has the values, so a resume refuses others.
BY_MEMBER = ("beta", "epsilon", "temperature", "lora_r", "lora_alpha")
# A resumed dataset run must go on with the prompt after the last trained one. These settings decide which prompt that
# is.
_DECIDED_BY_PLACE = (
    "attempts_per_task",
    "num_iterations",
    "generation_batch_size",
    "shuffle_dataset",
    "member_prompts",
)


@dataclass(frozen=True)
class Shape:
    """
    The base and the LoRA settings that an adapter has to fit.

    Args:
        base_model: Name or path of the base.
        base_config: The fields of the base's configuration that an adapter depends on: model type and sizes.
        lora: LoRA settings of the members.
        quantization: Quantization config of the base; `None` without quantization.
        revision: Revision of the base, if `base_model` is a Hub id.
    """

    base_model: str
    base_config: dict[str, Any]
    lora: dict[str, Any]
    quantization: dict[str, Any] | None = None
    revision: str = "main"

    @classmethod
    def of(cls, model: PeftModel, base_model: str, revision: str | None = None) -> Shape:
        """
        Reads the shape from a live model. A base without a revision was loaded from `main`. If members have
        unequal ranks, the LoRA settings are those of the first member with the largest rank.
        """
        base, lora = model.get_base_model().config, find_widest([*model.peft_config.values()])
        values = {name: getattr(lora, name) for name in _LORA_FIELDS}
        values |= {name: value for name in _LAYER_FIELDS if (value := getattr(lora, name)) is not None}
        values = {name: sorted(value) if isinstance(value, (set, list)) else value for name, value in values.items()}
        quantization = getattr(base, "quantization_config", None)
        # A quantization config is compared with one from a JSON file. So it goes through JSON: tuples become lists.
        if quantization is not None:
            quantization = json.loads(json.dumps(quantization.to_dict()))
        sizes = {name: getattr(base, name, None) for name in _BASE_FIELDS}
        return cls(base_model, sizes, values, quantization, revision or "main")


def describe(
    population: Population,
    referee: Referee | None,
    shape: Shape,
    args: GRPOConfig,
    step: int,
    held_out: HeldOut | None,
    scores: MemberScores | None = None,
    prompts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """
    Describes the population for people and other programs.

    Args:
        population: The members.
        referee: Has the kinds and the prompt style; `None` in a dataset run.
        shape: Base and LoRA settings.
        args: Settings of the run.
        step: Optimizer steps so far.
        held_out: Last solve rates on held-out tasks; `None` if the run has none.
        scores: In a dataset run, the members' mean rewards.
        prompts: In a dataset run, number and digest of the prompts in `train_dataset`.

    Returns:
        The contents of `population.json`.
    """
    rates = held_out.rates if held_out else {}
    # Solve rates of an earlier step belong to other weights. Without rates of this step the rating decides.
    if scores is None:
        best, why = population.best_student(rates if held_out and held_out.step == step else {})
    else:
        best, why = population.best_student(*scores.choose(step, args.member_prompts == "shared"))
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
            "seat": seat,
            **({"settings": member.settings} if member.settings else {}),
            **({} if scores is None else scores.describe(member)),
        }
        for seat, member in population.seats.items()
        if member is not None
    ]
    return {
        "format": FORMAT,
        "base_model": shape.base_model,
        "base_config": shape.base_config,
        "base_quantization": shape.quantization,
        "step": step,
        "lora": shape.lora,
        "task_kinds": list(referee.kinds) if referee else [],
        "prompt_style": referee.style if referee else None,
        "best_student": best,
        "best_student_by": why,
        "held_out_base": held_out.base_rate if held_out else None,
        "held_out_step": held_out.step if held_out else None,
        "held_out_tasks": held_out.describe_tasks() if held_out else None,
        "train_prompts": prompts,
        "members": members,
        "left": population.left,
        "settings": _collect_settings(args),
        "settings_version": 2,  # in version 1, which was never published, the pay `guarded` was called `paper`
        "versions": collect_versions(),
    }


@cache
def collect_versions() -> dict[str, str]:
    """Collects the versions of Python and of the packages on which the figures of a run depend."""
    # A checkout that is not installed has no metadata, so this package's version comes from the code.
    ours = {"python": platform.python_version(), "trl-populora": __version__}
    return ours | {name: version(name) for name in ("trl", "transformers", "peft", "torch")}


def _collect_settings(args: GRPOConfig) -> dict[str, Any]:
    """Collects the settings that this package adds to TRL's, and those of TRL that decide a run."""
    inherited = {field.name for field in fields(GRPOConfig)}
    added = [field.name for field in fields(args) if field.name not in inherited]
    shared = ["max_steps", "learning_rate", "lr_scheduler_type", "beta", "loss_type", "seed", "max_completion_length"]
    shared += ["num_iterations", "per_device_train_batch_size", *SAMPLING, *UPDATE]
    shared += ["vllm_max_model_length", "generation_batch_size", "gradient_accumulation_steps", "shuffle_dataset"]
    # A Hub id without a revision means "main". For a directory the revision means nothing.
    revision = (args.model_init_kwargs or {}).get("revision") or "main"
    one = {name: getattr(args, name) for name in (*added, *shared)}
    return drop_secrets(one | args.member_values | {"base_revision": revision})


def read_sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """
    Reads from the settings of a saved population how all members sample in cross-play. Of a list of temperatures it
    takes the first.
    """
    sampling = {name: settings[name] for name in SAMPLING if name in settings}
    if isinstance(sampling.get("temperature"), list):
        sampling["temperature"] = sampling["temperature"][0]
    return sampling


def read_lora(saved: Mapping[str, Any]) -> LoraConfig:
    """Reads the LoRA settings of a saved population."""
    # Only names that a run saves: a stranger's file could have others, and some of PEFT's settings import modules.
    return LoraConfig(
        **{name: value for name, value in saved["lora"].items() if name in (*_LORA_FIELDS, *_LAYER_FIELDS)}
    )


def check_same_shape(root: Path, shape: Shape, members: Sequence[str] | None = None) -> dict[str, Any]:
    """
    Reads `population.json` of a saved population, and refuses the population if its adapters do not fit.

    Args:
        root: Directory of the saved population.
        shape: The shape that the saved adapters have to fit.
        members: Names that the file must list in this order, for a resume; `None` if any members will do.

    Returns:
        The contents of the file.

    Raises:
        `ValueError`: If the file is missing or broken, or if base, adapter shape or members differ. The message names
            the file and, where fields differ, the field.
    """
    path, saved = root / POPULATION_FILE, read_population(root)
    for field in ("base_model", "base_config", "lora", "members"):
        if field not in saved:
            raise ValueError(f"{path}: field `{field}` is missing.")
    ways_out = {
        "base_config": f"Use the population's own base, {saved['base_model']!r}",
        "lora": "Use the population's own LoRA settings",
    }
    lora = dict.fromkeys(name for name in _LAYER_FIELDS if name in saved["lora"]) | shape.lora
    for group, live in (("base_config", shape.base_config), ("lora", lora)):
        for name, value in live.items():
            if (found := saved[group].get(name)) != value:
                raise ValueError(
                    f"{path}: field `{group}.{name}` is {found!r}, this trainer has {value!r}. {ways_out[group]}."
                )
    ours = shape.base_model
    if saved["base_model"] != ours:
        # A directory may have moved, so another path is only a warning. Two Hub ids are two sets of weights.
        if not (os.path.isdir(ours) or os.path.isabs(saved["base_model"])):
            raise ValueError(
                f"{path}: field `base_model` is {saved['base_model']!r}, this trainer trains on {ours!r}. Adapters "
                "only make sense on the base they were trained on. Train on that base."
            )
        logger.warning("%s names the base %r, this trainer's is %r.", path, saved["base_model"], ours)
    _check_quantization(path, saved.get("base_quantization"), shape.quantization, resumes=members is not None)
    if members is None:  # a resume refuses another revision, see `check_settings`
        warn_of_revision(path, saved.get("settings", {}).get("base_revision"), shape)
    names = [member["name"] for member in saved["members"]]
    if members is not None and names != list(members):
        raise ValueError(
            f"{path}: field `members` lists {', '.join(names)}; this trainer has "
            f"{', '.join(members)}. Resume with the saved `teachers` and `students`, or start a new "
            "run with `warm_start` to change them."
        )
    return saved


def _check_quantization(path: Path, saved: dict | None, ours: dict | None, resumes: bool) -> None:
    """Refuses to resume on a base that is quantised in another way. Other uses of the adapters get a warning."""
    if saved == ours:
        return
    differs = f"{path}: field `base_quantization` is {saved!r}, this trainer has {ours!r}."
    if resumes:
        raise ValueError(f"{differs} A resumed run cannot change it; `warm_start` can.")
    logger.warning("%s", differs)


def warn_of_revision(source: Path, theirs: str | None, shape: Shape) -> None:
    """Warns if adapters were trained on another revision of a base on the Hub. It passes over unknown revisions."""
    if theirs is not None and theirs != shape.revision and not os.path.isdir(shape.base_model):
        logger.warning(
            "%s was trained on revision %r of %r, and here the base has revision %r. Adapters only make sense on the "
            "weights that they were trained on. Load the base with `revision=%r`.",
            source,
            theirs,
            shape.base_model,
            shape.revision,
            theirs,
        )


def check_same_prompts(root: Path, saved: Mapping[str, Any], ours: Mapping[str, Any] | None) -> None:
    """
    Refuses to resume on other prompts than the checkpoint's, because the checkpoint's place in its dataset means
    nothing in another one.

    Args:
        root: The checkpoint.
        saved: Contents of its `population.json`.
        ours: Number and digest of this run's prompts; `None` in the game.

    Raises:
        `ValueError`: If the prompts differ, or if one run is a game and the other is not.
    """
    theirs = saved.get("train_prompts")
    if theirs == ours:
        return
    told = [
        f"{each['rows']} prompts (digest {each['digest']})" if each else "the game's tasks" for each in (theirs, ours)
    ]
    raise ValueError(
        f"{root / POPULATION_FILE}: the run trained on {told[0]}, and `train_dataset` has {told[1]}. Resume with the "
        "saved run's dataset, or start a new run with `warm_start`."
    )


def check_settings(args: GRPOConfig, root: Path, saved: Mapping[str, Any], processes: int) -> None:
    """
    Warns of settings that a resumed run changes, and refuses changes of settings that the checkpoint decides.

    Args:
        args: Settings of the run that resumes.
        root: The checkpoint, for messages.
        saved: Contents of its `population.json`. Settings that this file lacks are not compared.
        processes: How many processes saved the checkpoint.

    Raises:
        `ValueError`: If a setting differs that the checkpoint decides. The message names all of them with both values.
            Also as [`check_pooled`].
    """
    # Our values go through JSON, too, so that tuples and lists compare as equal.
    ours, theirs = json.loads(json.dumps(_collect_settings(args))), saved.get("settings", {})
    # Settings have `lora_r` and `lora_alpha` only if the members differ in rank or alpha. If only one of the two runs
    # has them, that is a change, too.
    own_ranks = {name for name in ("lora_r", "lora_alpha") if name in ours or name in theirs}
    changed = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    changed += sorted(name for name in own_ranks if (name in ours) != (name in theirs))
    # A resume cannot change a setting with one value per member: children have inherited values since the start.
    listed = {name for name in changed if isinstance(ours.get(name), list) or isinstance(theirs.get(name), list)}
    fixed = {*_DECIDED_BY_CHECKPOINT} | (listed & set(BY_MEMBER))
    if saved.get("train_prompts"):
        fixed |= {*_DECIDED_BY_PLACE}
    elif theirs.get("teachers") == 0:
        fixed |= {"proposals_per_teacher", "num_iterations"}  # they decide which given task is next
    refused = [f"`{name}` was {theirs.get(name)!r}, is {ours.get(name)!r}" for name in changed if name in fixed]
    if saved.get("train_prompts") and "gradient_accumulation_steps" in theirs:
        # A config has multiplied the accumulation by its members.
        (batch, steps), (our_batch, our_steps) = (
            (each["per_device_train_batch_size"], each["gradient_accumulation_steps"] // args.seats)
            for each in (theirs, ours)
        )
        rows, size = batch * steps * processes, our_batch * args.world_size
        if rows != our_steps * size:
            refused.append(
                "`per_device_train_batch_size` times `gradient_accumulation_steps` times the processes was "
                f"{batch} * {steps} * {processes} = {rows}, is {our_batch} * "
                f"{our_steps} * {args.world_size} = {our_steps * size}"
                + (f" (`gradient_accumulation_steps={rows // size}` keeps it)" if rows % size == 0 else "")
            )
    if refused:
        raise ValueError(
            f"{root / POPULATION_FILE}: a resumed run cannot change these settings: {'; '.join(refused)}. Resume "
            "with the saved values, or start a new run with `warm_start` to change them."
        )
    check_pooled(root, saved, _find_pooled(ours))
    if gone := sorted(theirs.keys() - ours.keys()):
        logger.warning(
            "%s has settings that this version does not know. The run goes on without them: %s.",
            root,
            ", ".join(gone),
        )
    if changed:
        told = "; ".join(f"`{name}` was {theirs[name]!r}, is {ours[name]!r}" for name in changed)
        logger.warning("Resuming %s with other settings, which hold from here on: %s.", root, told)


def check_pooled(root: Path, saved: Mapping[str, Any], roles: Sequence[str]) -> None:
    """
    Refuses to pool saved members of which `population.json` does not tell that they began with one adapter: if their
    matrices A differ, the mean of their factors means nothing. Members of a role that was pooled before are alike, and
    a member that joined began as the one that it copied.

    Args:
        root: Directory of a saved population.
        saved: Contents of its `population.json`.
        roles: Roles that are to be pooled.

    Raises:
        `ValueError`: If evolution has made a member of such a role, or if its members began with different adapters,
            or if that is not known.
    """
    for role in set(roles).difference(_find_pooled(saved.get("settings", {}))):
        members = [member for member in saved["members"] if member["role"] == role]
        present = {f"{member['name']}@{member['version']}": member for member in saved["members"]}
        begun = {member["name"]: _find_beginning(member, present) for member in members}
        if len(members) > 1 and (len({*begun.values()}) > 1 or {each[0] for each in begun.values()} - _BEGINNINGS):
            told = "; ".join(" ".join((name, operator, *parents)) for name, (operator, *parents) in begun.items())
            raise ValueError(
                f"`pool_every` would make the mean of the {role}s of {root}. A mean is of use if members began with "
                f"one adapter, and {POPULATION_FILE} does not say that these did ({told}). Start a run from one of "
                f"them (`warm_start={{{role!r}: {str(root / members[0]['adapter'])!r}}}`), or set `pool_every` to 0."
            )


def _find_beginning(member: Mapping[str, Any], present: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Finds the operator and the parents with which a member began. `present` holds members by `name@version`."""
    while member["operator"] == "join":
        if not member["parents"]:  # without `like` a member joins as members begin without `warm_start`
            return ("init",)
        if (copied := present.get(member["parents"][0])) is None:
            break
        member = copied
    return (member["operator"], *member["parents"])


def _find_pooled(settings: Mapping[str, Any]) -> tuple[str, ...]:
    return find_pooled_roles(settings["pool"]) if settings.get("pool_every") else ()


def check_one_moment(root: Path, saved: Mapping[str, Any], adapters: Sequence[str] | None = None) -> None:
    """
    Refuses adapters and an archive that were saved after another step than `population.json`.

    A run rewrites `population.json` at every log, and saves adapters beside it only at the end. So a run that was
    killed may leave a `population.json` of one step beside adapters of another.

    Args:
        root: Directory of a saved population.
        saved: Contents of its `population.json`.
        adapters: Directories of the adapters to check, below `root`; by default those of all members.

    Raises:
        `ValueError`: If an adapter is missing, or if a file is from another step. In the second case the message names
            both steps.
    """
    wanted = [member["adapter"] for member in saved["members"]] if adapters is None else adapters
    if not all((root / each / "adapter_model.safetensors").exists() for each in wanted):
        raise ValueError(
            f"{root} lacks an adapter, so it was not saved to its end; use a checkpoint of it, or resume it."
        )
    steps = {each: read_saved_step(root / each) for each in wanted}
    if (archive := root / "archive.parquet").exists():
        steps[archive.name] = read_archive_step(archive)
    for name, step in steps.items():
        # Files of early versions do not say their step. They are accepted.
        if step not in (None, saved.get("step")):
            raise ValueError(
                f"{root} mixes two steps: {POPULATION_FILE} is from step {saved.get('step')}, {name} was saved after "
                f"step {step}. The run went on and did not save its end; use a checkpoint of it, or resume it."
            )


def check_plays(run: str | Path, saved: Mapping[str, Any]) -> None:
    """
    Refuses a dataset run where the tasks of a game are needed.

    Args:
        run: Name of the run, for the error.
        saved: Contents of its `population.json`.

    Raises:
        `ValueError`: If the run is a dataset run.
    """
    if saved.get("train_prompts"):
        raise ValueError(
            f"{run} was trained on a dataset of prompts: it has no archive of tasks, and its members neither propose "
            "nor solve any. `populora info` compares its members, and `recipes/evaluate.py` runs benchmarks on them."
        )


def find_best_adapter(root: Path) -> Path:
    """
    Finds the directory of the best student's adapter in a saved population.

    Raises:
        `ValueError`: If `population.json` is missing or broken, or if the adapter is missing or from another step.
    """
    saved = read_population(root)
    best = next(member["adapter"] for member in saved["members"] if member["name"] == saved["best_student"])
    check_one_moment(root, saved, [best])
    return root / best
