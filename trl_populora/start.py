"""Starts a run: checks what the user gave, builds the parts, and checks the given tasks.

All these checks come before training starts. In the order of reading:

1. Checks before anything is loaded, and what follows from the settings alone: prompt style, kinds, rules.
2. The base: model, tokenizer, default adapter, and what depends on the size or the class of the model.
3. What TRL's trainer is given: its dataset, reward functions, learning rates.
4. The game: sandbox, referee, game, callbacks.
5. Checks that need these parts: the outputs of given tasks, and whether prompts fit into the context.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedType, gather_object
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from trl import GRPOConfig
from trl.trainer.utils import create_model_from_path

from trl_populora.assets import resolve_model_path
from trl_populora.config import BOUNDS, PopuLoRAConfig, settle_for_prompts
from trl_populora.evaluate.held_out import HeldOut, list_given_tables, load_held_out
from trl_populora.generate.checks import check_engine_arguments, check_vllm
from trl_populora.lora.checks import check_is_base, is_quantised
from trl_populora.options import check_bounds, check_numbers
from trl_populora.population.members import Member, Population
from trl_populora.population.ratings import Matchmaker, no_student_idles
from trl_populora.report.callbacks import TrackerTables, alert
from trl_populora.run.callbacks import Alarms, PromptAlarms
from trl_populora.run.directory import find_earlier_run
from trl_populora.run.read import list_idle
from trl_populora.run.records import Records
from trl_populora.sandbox import Job, Sandbox, Status
from trl_populora.sandbox.pool import SandboxSettings, start_sandbox
from trl_populora.step.microbatch import Sharing, why_not_shared
from trl_populora.step.pay import NEED_FEATURES, Rules, choose_student_reward, choose_teacher_reward
from trl_populora.step.play import Game
from trl_populora.step.player import Messages, Player
from trl_populora.step.referee import Referee
from trl_populora.step.rows import Played, Row, check_arguments, find_metric, student_reward, teacher_reward
from trl_populora.tasks import resolve_kind
from trl_populora.tasks.archive import TaskArchive
from trl_populora.tasks.dataset import build_archive, check_archive
from trl_populora.tasks.features import STEPS, Features, check_features
from trl_populora.tasks.kind import KindSettings, Task, TaskKind, find_control_text, find_control_texts
from trl_populora.tasks.prompts import MEMBER, check_table, expand_by_member, has_prompts
from trl_populora.tasks.python.kinds import CodeF, CodeKind


logger = logging.getLogger(__name__)

FEW_PARAMETERS = 10**9  # weights; a smaller base learns a format better from solved examples than from a description
SHOTS = 3  # solved examples for such a base
JOINING = ("learning_rate", "beta", "epsilon", "temperature")  # what a member that joins may have of its own
TRL_RATE = GRPOConfig.learning_rate


def settle(args: Any, train_dataset: Any, peft_config: Any = None) -> PopuLoRAConfig:
    """
    Returns the settings of a dataset run if `train_dataset` has prompts, else those of a game.

    Args:
        args: What the trainer was given. A dataset run also takes TRL's own config.
        train_dataset: What the trainer was given.
        peft_config: What the trainer was given. A list may say how many members a dataset run has.

    Raises:
        `TypeError`: If `args` has another type.
        `ValueError`: If the settings do not make such a run, or if the dataset has neither prompts nor programs.
    """
    prompts = has_prompts(train_dataset)
    if not isinstance(args, GRPOConfig if prompts else PopuLoRAConfig):
        raise TypeError(f"`args` must be a `PopuLoRAConfig` (it extends `GRPOConfig`), got `{type(args).__name__}`.")
    adapters = len(peft_config) if isinstance(peft_config, (list, tuple)) else None
    return settle_for_prompts(args, adapters) if prompts else args.for_game()


def check_setup(
    args: PopuLoRAConfig, unsupported: Mapping[str, Any], model: str | PreTrainedModel, lora_config: LoraConfig
) -> None:
    """
    Refuses what cannot be used, before anything is loaded.

    Args:
        args: Settings of the run.
        unsupported: Arguments that the trainer does not know, by name.
        model: The base, or the name or directory of one.
        lora_config: Adapter of every member.

    Raises:
        `TypeError`: If an argument is unknown.
        `ValueError`: If a value cannot be used. The message names the value and the way out.
        `ImportError`: If vLLM is wanted and is not installed, or not in a version that fits.
    """
    refuse_unsupported(args, unsupported)
    check_output_dir(args.output_dir)
    source = resolve_model_path(model) if isinstance(model, str) else model
    if isinstance(source, str):
        refuse_gguf(source)
    check_wandb(args)
    check_is_base(source, (args.model_init_kwargs or {}).get("revision"))
    if args.use_vllm:
        arguments: Any = (args.vllm_mode == "colocate" and args.vllm_engine_kwargs) or {}
        check_engine_arguments(arguments, args.seats, lora_config)
        check_vllm(source, args, lora_config, arguments)


def warn_of_earlier_run(args: PopuLoRAConfig) -> None:
    """
    Warns, before a model is loaded, that the output directory holds a run. Only `train` can refuse it: a trainer may
    be made to resume that run, or to evaluate.
    """
    if args.process_index == 0 and not args.resume_from_checkpoint and find_earlier_run(args.output_dir):
        logger.warning(
            "`output_dir=%r` holds a run. `train()` will refuse to begin another there; to continue the run, call "
            "`train(resume_from_checkpoint=True)`. A new run needs another `output_dir`.",
            args.output_dir,
        )


def copy_settings(args: PopuLoRAConfig) -> PopuLoRAConfig:
    """Copies the settings of a run, so that what the run chooses and derives is not written into the caller's."""
    own = copy.copy(args)  # not `dataclasses.replace`: it would derive the derived settings a second time
    for name, value in vars(args).items():
        if isinstance(value, (dict, list)):
            setattr(own, name, copy.copy(value))
    return own


def refuse_unsupported(args: PopuLoRAConfig, unsupported: Mapping[str, Any]) -> None:
    """
    Refuses arguments that the trainer does not know, and backends that cannot train these members.

    Raises:
        `TypeError`: If an argument is unknown.
        `ValueError`: If an argument or a backend is not supported.
    """
    ways_out = {
        "optimizers": "members exist once the trainer is made. Then set `trainer.optimizer` to "
        "`torch.optim.AdamW(member_param_groups(trainer.model, rates))`, with a learning rate by member and "
        "`member_param_groups` of `trl_populora.lora.members`; a scheduler of that optimizer goes to "
        "`trainer.lr_scheduler`",
        "rollout_func": "the trainer has rollouts of its own; a `TaskKind` changes what is played in the game",
        "tools": "members answer in one turn in every run; a `TaskKind` changes what the game plays",
        "environment_factory": "members answer in one turn in every run; a `TaskKind` changes what the game plays",
    }
    for name, value in unsupported.items():
        if name not in ways_out:
            raise TypeError(f"`PopuLoRATrainer` has no argument `{name}`.")
        if value not in (None, (None, None)):
            raise ValueError(f"`{name}` is not supported: {ways_out[name]}.")
    if _fsdp_version(args) == 1:
        raise ValueError(
            "`fsdp_version=1` is not supported: FSDP1 flattens members and base into common pieces, in which no "
            "member's weights or gradients can be told apart. Use FSDP2 (`accelerate_configs/fsdp2.yaml`, or "
            "`fsdp_config={'version': 2}`)."
        )
    check_deepspeed(args)
    sharded = "DeepSpeed" if args.deepspeed_plugin is not None else "FSDP" if _fsdp_version(args) else ""
    for name, changes in (("max_members", args.max_members not in (None, args.students)), ("halve_every", True)):
        if sharded and changes and (value := getattr(args, name)):
            raise ValueError(
                f"`{name}={value}` is not supported with {sharded}, which updates and shards all adapters together, "
                "so that an empty seat cannot be left out. Use DDP, or leave the option out."
            )
    # DeepSpeed updates all parameters together. Its momentum would move even a member that has no gradient.
    plays_all = not args.teachers or no_student_idles(args.teachers, args.students)
    if args.deepspeed_plugin is not None and not plays_all:
        fits = max(s for s in range(1, args.students) if no_student_idles(args.teachers, s))
        raise ValueError(
            f"`teachers={args.teachers}` and `students={args.students}`: a step has one match per teacher, so some "
            "steps would leave a student idle. DeepSpeed cannot leave that student out of the optimizer step: "
            f"momentum would move it. `students={fits}` or `teachers={args.students}` works; so does DDP."
        )


def check_deepspeed(args: PopuLoRAConfig) -> None:
    """
    Checks the sections of a DeepSpeed JSON file.

    Raises:
        `ValueError`: If the file has an `optimizer` or a `scheduler`.
    """
    config = {} if args.deepspeed_plugin is None else args.deepspeed_plugin.deepspeed_config
    reasons = {
        "optimizer": "DeepSpeed would put all members into one parameter group, with one learning rate. Remove the "
        "section; `optim`, `optim_args`, `learning_rate` and `weight_decay` choose the optimizer",
        "scheduler": "DeepSpeed would give all members one learning rate. Remove the section; `lr_scheduler_type` and "
        "`warmup_steps` choose the schedule",
    }
    for section, reason in reasons.items():
        if section in config:
            raise ValueError(f"The DeepSpeed config has `{section}`: {config[section]!r:.200}. {reason}.")


def _fsdp_version(args: PopuLoRAConfig) -> int | None:
    """Reads the version of FSDP, 1 or 2, from the arguments or else from the launcher; `None` without FSDP."""
    if args.fsdp_plugin_args:
        return int(args.fsdp_plugin_args["fsdp_version"])
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1", "yes"):
        return int(os.environ.get("FSDP_VERSION", "1"))  # accelerate's default
    return None


def check_output_dir(path: str) -> None:
    """
    Checks that the output directory can be written to, without making it.

    Raises:
        `ValueError`: If it cannot be made or written to.
    """
    whole = Path(path).absolute()
    # A temporary file is made in the nearest directory that exists, because permission bits do not tell everything: a
    # file system may be read-only or full.
    try:
        with tempfile.NamedTemporaryFile(dir=next(part for part in (whole, *whole.parents) if part.exists())):
            pass
    except OSError as error:
        raise ValueError(
            f"`output_dir={path!r}` is not writable ({error.strerror or error}). Choose a directory that you may "
            f"write to, for example {str(Path.home() / 'runs')!r}."
        ) from error


def check_wandb(args: PopuLoRAConfig) -> None:
    """
    Checks that W&B has a key, if the run reports to W&B and its caller started no W&B run. Without this check W&B
    would complain only when training starts.

    Raises:
        `ValueError`: If W&B has no key, and nobody can be asked for one.
    """
    if "wandb" not in args.report_to or args.process_index or os.environ.get("WANDB_API_KEY") or sys.stdin.isatty():
        return
    import wandb

    if wandb.run is not None:  # transformers goes on with the caller's run
        return
    online = wandb.setup().settings.mode not in ("offline", "disabled", "dryrun")
    with suppress(wandb.Error):  # a wrong key or no network: W&B itself reports them when training starts
        if online and not wandb.login(prompt=False):
            wandb.teardown()  # otherwise wandb would not read a setting that a notebook changes after this error
            raise ValueError(
                "`report_to` names wandb, which has no key here. Log in once (`wandb login`), set `WANDB_API_KEY`, "
                "keep the figures on this machine (`WANDB_MODE=offline`), or leave wandb out of `report_to`."
            )


def refuse_gguf(model: str) -> None:
    """
    Refuses a GGUF file, or a directory of GGUF files, as base.

    Raises:
        `ValueError`: If the base is a GGUF file, or a directory with GGUF files and no `config.json`; the message says
            how to convert one.
    """
    files = [Path(model)] if model.endswith(".gguf") else sorted(Path(model).glob("*.gguf"))
    if files and not Path(model, "config.json").is_file():
        what = "is a GGUF file" if model.endswith(".gguf") else "has GGUF files and no `config.json`"
        raise ValueError(
            f"`model={model!r}` {what}. GGUF files are for serving and cannot be trained. Make an ordinary directory "
            f"of it: `AutoModelForCausalLM.from_pretrained({str(files[0].parent)!r}, gguf_file={files[0].name!r})` "
            "reads the weights. `recipes/get_smollm2.py` shows the other steps for one model."
        )


def choose_style(
    wanted: str | None, model: str | PreTrainedModel, init_kwargs: Mapping[str, Any] | None = None
) -> str:
    """
    Chooses the prompt style: the wanted one, else the one that the base's config names, else `"turns"`.

    The embedded base, which `studies/make_tiny_base.py` has made, names `"compact"` in its config.

    Args:
        wanted: The option `prompt_style`.
        model: The base, or the name or directory of one.
        init_kwargs: Arguments with which the base will be loaded; only `revision` is read.

    Raises:
        `ValueError`: If there is no such model; the message says what was found.
    """
    config = _read_config(model, (init_kwargs or {}).get("revision") or "main")
    return wanted or str(config.get("populora_prompt_style", "turns"))


def _read_config(model: str | PreTrainedModel, revision: str) -> dict[str, Any]:
    """Reads the config of a model; loads no weights."""
    if not isinstance(model, str):
        return model.config.to_dict()
    path = resolve_model_path(model)
    here = Path(path).is_dir()
    try:
        if here and not Path(path, "config.json").is_file():
            raise OSError("it has no config.json")
        return PreTrainedConfig.get_config_dict(path, revision=revision)[0]
    except OSError as error:
        found = "a directory, but no model" if here else "no directory here, and no such model was found on the Hub"
        raise ValueError(
            f"`model={model!r}` is {found} ({str(error).splitlines()[0]:.200}). Give a directory that "
            "`save_pretrained` wrote, or a Hub id."
        ) from error


def make_kinds(args: PopuLoRAConfig) -> dict[str, TaskKind]:
    """
    Makes the run's kinds of task, by name, in the order in which they rotate.

    Raises:
        `ValueError`: If a kind does not exist, if two kinds share a name, or if there are teachers and a kind lacks
            methods that they need.
    """
    kinds = [resolve_kind(name) for name in args.task_kinds]
    for kind in kinds:
        kind.configure(args.build(KindSettings))
    if len({kind.name for kind in kinds}) < len(kinds):
        raise ValueError(f"`task_kinds={args.task_kinds}` has two kinds of one name. List each kind once.")
    for kind in kinds if args.teachers else ():
        if missing := kind.missing_for_proposals():
            raise ValueError(
                f"Task kind {kind.name!r} has no {', '.join(f'`{name}`' for name in missing)}, which teachers need to "
                "propose its tasks. Write them, or set `teachers=0`: students then solve given tasks."
            )
    if args.teachers and args.teacher_baseline == "member" and args.proposals_per_teacher < 4 * len(kinds):
        logger.warning(
            "`proposals_per_teacher=%d` is below 4 for each of the %d `task_kinds`. A teacher's proposal is compared "
            "with the mean of the teacher's proposals of the same kind, and the mean of so few is noisy. "
            "`teacher_baseline='group'` compares it with all proposals of a match.",
            args.proposals_per_teacher,
            len(kinds),
        )
    return {kind.name: kind for kind in kinds}


def make_rules(args: PopuLoRAConfig, kinds: Mapping[str, TaskKind]) -> Rules:
    """
    Makes the rules that say what proposals and attempts are worth.

    Raises:
        `ValueError`: If a user's own function cannot be found, or if `replay` or the pay needs features and a kind
            names none.
    """
    if args.teacher_reward in NEED_FEATURES or args.replay:
        needs = "replay" if args.replay else "teacher_reward"
        check_features(kinds, f"{needs}={getattr(args, needs)}")
    return Rules(
        choose_teacher_reward(args.teacher_reward, args.teacher_reward_invalid, args.teacher_reward_unsolved),
        choose_student_reward(
            args.student_reward,
            right=args.student_reward_correct,
            wrong=args.student_reward_wrong,
            malformed=args.student_reward_malformed,
        ),
    )


# The base: model, tokenizer and adapter.


def make_default_lora() -> LoraConfig:
    """
    Makes the adapter config of the members, for a run whose user gives none.

    Rank r = 32 is what summaries of the paper say. Alpha = 2r and all linear layers are what PEFT and TRL advise for
    LoRA with RL.
    """
    return LoraConfig(r=32, lora_alpha=64, target_modules="all-linear")


def list_lora_configs(
    given: LoraConfig | Sequence[LoraConfig] | None, args: PopuLoRAConfig, prompts: bool
) -> list[LoraConfig]:
    """
    Lists the adapter config of each adapter.

    Args:
        given: One config for all, a list with one for each member, or `None` for the default one.
        args: Settings of the run.
        prompts: Whether it is a dataset run.

    Raises:
        `TypeError`: If the list holds something else.
        `ValueError`: If the list has another length than there are members, if it is not for a dataset run, or if its
            configs differ in more than `r` and `lora_alpha`; also if members differ and evolution would cross them, or
            pooling average them.
    """
    adapters = 1 if args.single_agent else args.teachers + args.students
    if not isinstance(given, (list, tuple)):
        return [make_default_lora() if given is None else given] * adapters
    told = f"`peft_config` is a list of {len(given)} configs"
    if not prompts:
        raise ValueError(
            f"{told}, and members differ in rank and alpha only on a `train_dataset` with a column `prompt`. Give one "
            "`LoraConfig` for all (on a command line, one `lora_r` and one `lora_alpha`)."
        )
    if len(given) != adapters:
        raise ValueError(f"{told} for {adapters} member(s). Give one for each, or one `LoraConfig` for all.")
    if others := [each for each in given if type(each) is not LoraConfig]:
        raise TypeError(f"`peft_config` must hold `LoraConfig`s, got `{type(others[0]).__name__}`.")
    first, *rest = ({**each.to_dict(), "r": 0, "lora_alpha": 0} for each in given)
    for name in first:
        if any(each[name] != first[name] for each in rest):
            raise ValueError(f"{told} that differ in `{name}`: members may differ in `r` and `lora_alpha` alone.")
    unequal = len({(each.r, each.lora_alpha) for each in given}) > 1
    if args.pool_every and unequal:
        raise ValueError(
            f"`pool_every={args.pool_every}`: members of unequal rank or alpha have no mean. Set `pool_every` to 0, "
            "or give all of them one rank and one alpha."
        )
    if args.evolve_every and args.crossover_rate and unequal:
        raise ValueError(
            f"`crossover_rate={args.crossover_rate}`: members of unequal rank or alpha cannot be crossed. Set "
            "`crossover_rate` to 0: then a child has one parent, and takes rank and alpha from this parent."
        )
    return list(given)


def give_settings(population: Population, args: PopuLoRAConfig, configs: Sequence[LoraConfig], prompts: bool) -> None:
    """
    Fills in the `settings` of each member: its value of every option in which members differ and, in a dataset run
    (`prompts`), its learning rate, which evolution may vary. Rank and alpha are included if the `configs` differ in
    them.
    """
    if len({(each.r, each.lora_alpha) for each in configs}) > 1:
        args.member_values["lora_r"] = [each.r for each in configs]
        args.member_values["lora_alpha"] = [each.lora_alpha for each in configs]
    rates = {"learning_rate": [args.learning_rate] * len(population)} if prompts else {}
    values = rates | args.member_values
    for member in population:
        member.settings = {name: each[member.index] for name, each in values.items()}


def load_base(
    model: str | PreTrainedModel, args: PopuLoRAConfig, quantization_config: BitsAndBytesConfig | None = None
) -> PreTrainedModel:
    """
    Loads a base model as TRL does. A model that is loaded already is checked and returned.

    Args:
        model: Name or directory of a model, or the model.
        args: Settings of the run; `model_init_kwargs` are the arguments of `from_pretrained`.
        quantization_config: How to load the model in 4 or 8 bits.

    Raises:
        `ValueError`: If the model is a vision-language model; if `quantization_config` is given twice, or beside a
            loaded model; or if [`check_quantised`] refuses.
    """
    if quantization_config is not None and not isinstance(model, str):
        raise ValueError("`quantization_config` comes too late for a loaded model. Give it to `from_pretrained`.")
    if isinstance(model, str):
        kwargs = dict(args.model_init_kwargs or {})
        if quantization_config is not None:
            if kwargs.get("quantization_config") is not None:
                raise ValueError("`quantization_config` is given twice: to the trainer and in `model_init_kwargs`.")
            kwargs["quantization_config"] = quantization_config
        if kwargs.get("quantization_config") is not None:
            check_quantised(args)  # refused here, before a large model is loaded
        if args.distributed_state.distributed_type in (DistributedType.MULTI_GPU, DistributedType.DEEPSPEED):
            kwargs["device_map"] = None  # each process holds a whole model; "auto" would spread one over the GPUs
        kwargs.setdefault("trust_remote_code", args.trust_remote_code)
        model = create_model_from_path(resolve_model_path(model), **kwargs)
    if is_quantised(model):
        check_quantised(args)
    if getattr(model.config, "vision_config", None) is not None:
        raise ValueError(
            f"{model.config.name_or_path or type(model).__name__} is a vision-language model. Tasks are text: pass a "
            "text-only causal language model."
        )
    return model


def check_quantised(args: PopuLoRAConfig) -> None:
    """
    Checks that a quantised base can be used with these settings.

    Raises:
        `ValueError`: If DeepSpeed or FSDP is on; or if vLLM generates and `vllm_importance_sampling_correction` is
            off, because vLLM may round the base differently.
    """
    plugin = args.deepspeed_plugin
    how = f"ZeRO-{plugin.zero_stage}" if plugin is not None else "FSDP" if _fsdp_version(args) else ""
    if how:
        raise ValueError(f"A quantised base is not supported with {how}, which needs weights of one type. Use DDP.")
    if args.use_vllm and not args.vllm_importance_sampling_correction:
        raise ValueError(
            "`vllm_importance_sampling_correction=False` with a quantised base: vLLM rounds the base differently "
            "from the trainer, or not at all, so its samples must be weighted. Leave the option at True."
        )


def load_tokenizer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    args: PopuLoRAConfig,
    template: str | None = None,
    converses: bool = True,
) -> PreTrainedTokenizerBase:
    """
    Loads the base's tokenizer, unless one is given.

    Args:
        model: The base.
        tokenizer: The tokenizer to check in place of the base's.
        args: Settings of the run.
        template: A chat template in place of the base's.
        converses: Whether prompts are conversations.

    Raises:
        `ValueError`: If prompts are conversations and the tokenizer has no chat template.
    """
    name = model.config.name_or_path
    if tokenizer is None:
        tokenizer = AutoTokenizer.from_pretrained(
            name,
            revision=(args.model_init_kwargs or {}).get("revision") or "main",
            trust_remote_code=args.trust_remote_code,
            padding_side="left",
            truncation_side="left",
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # as TRL's trainer does
    if template is not None:
        tokenizer.chat_template = template
    if converses and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"The tokenizer for {name!r} has no chat template, and prompts are conversations here (in the game they "
            "always are, in every `prompt_style`). Pass `processing_class=` with `chat_template` set (any ChatML "
            "template works), save such a tokenizer beside the model, or start from an instruction-tuned base."
        )
    return tokenizer


def choose_shots(wanted: int | None, style: str, base: PreTrainedModel) -> int:
    """
    Chooses how many solved tasks a student is shown at most: none in the style `"compact"`, else the wanted number,
    else a number by the size of the base.
    """
    if style == "compact":
        if wanted:
            logger.warning("`shots=%d` has no effect: prompts of the style 'compact' show no solved tasks.", wanted)
        return 0  # the embedded base was not trained on them
    if wanted is not None:
        return wanted
    return SHOTS if count_parameters(base) < FEW_PARAMETERS else 0


def count_parameters(base: PreTrainedModel) -> int:
    """Counts the weights of a base, without those of adapters that were added to it."""
    # ZeRO-3 leaves an empty tensor on each rank; `ds_numel` is the number of elements of the whole one. With 4 bits
    # two weights share a byte; `quant_state` knows the shape of the matrix.
    return sum(
        math.prod(state.shape)
        if (state := getattr(parameter, "quant_state", None)) is not None
        else getattr(parameter, "ds_numel", parameter.numel())
        for name, parameter in base.named_parameters()
        if "lora_" not in name
    )


def make_sharing(base: PreTrainedModel, args: PopuLoRAConfig) -> Sharing | None:
    """
    Finds out how the model can share a prompt among rows; `None` if it cannot.

    Warns if prompts cannot be shared, and if rows without advantage must be computed, because both make updates slow.
    """
    reasons = {"Attempts at a task do not share its prompt's computation": why_not_shared(base)}
    if args.beta or args.teacher_beta:
        reasons["Rows without advantage are computed, too"] = "the KL term (`beta` or `teacher_beta`) reaches them"
    for what, reason in reasons.items():
        if reason and args.process_index == 0:
            logger.warning("%s: %s.", what, reason)
    return None if why_not_shared(base) else Sharing.of(base, args.pad_to_multiple_of or 1)


def is_zero3(args: PopuLoRAConfig) -> bool:
    """Says whether DeepSpeed shards the parameters. Adapters then keep the dtype of the base."""
    return args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3


# What TRL's trainer is given.


def check_reward_arguments(functions: Sequence[Any], tables: Mapping[str, Dataset]) -> None:
    """
    Checks tables of prompts, and that every reward function can be called with the columns of each table.

    Args:
        functions: The reward functions.
        tables: The tables by name, as an error names them: `train_dataset`, for example.

    Raises:
        `TypeError`: If a table is no `datasets.Dataset`, or a function cannot be called.
        `ValueError`: If a table cannot be used.
    """
    for field, table in tables.items():
        check_table(table, field)
        for function in functions:
            if isinstance(function, (str, PreTrainedModel)):
                continue
            if not callable(function):
                raise TypeError(
                    f"`reward_funcs` holds {function!r:.80}. Give functions, sequence-classification models, or names "
                    "of such models."
                )
            try:
                check_arguments(function, (*table.column_names, MEMBER))
            except TypeError as error:
                raise TypeError(f"`{field}`: {error}") from None


def check_eval_batch(args: PopuLoRAConfig, attempts: int) -> None:
    """
    Refuses an evaluation on prompts if some batch would hold only a part of the attempts at a prompt.

    Raises:
        `ValueError`: If a batch would.
    """
    if args.per_device_eval_batch_size * args.world_size % attempts:
        raise ValueError(
            f"`num_generations_eval={attempts}` does not divide a batch of the evaluation, "
            f"`per_device_eval_batch_size={args.per_device_eval_batch_size}` on each of {args.world_size} processes. "
            "Change one of them."
        )


@contextmanager
def replace_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Gives attributes of an object other values inside the block."""
    # A value may hide a method of the class. Deleting the value afterwards makes the method visible again.
    given = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(owner)[name]
        vars(owner).update(given)


def make_game_inputs(args: PopuLoRAConfig, extra: Any, processors: Any, evaluates: bool) -> dict[str, Any]:
    """
    Makes arguments of TRL's constructor for the game, by name.

    If `args.reward_weights` has one weight for each of the user's functions, two weights of 1 are put in front of
    them, for the two built-in functions. TRL reads `args.reward_weights`.

    Args:
        args: Settings of the run.
        extra: The user's reward functions: one, a list, or `None`.
        processors: Tokenizers of the user's reward models: one, a list, or `None`.
        evaluates: Whether there are held-out tasks.

    Raises:
        `TypeError`: If a function cannot be called with the columns of rows.
    """
    extra = [] if extra is None else extra if isinstance(extra, list) else [extra]
    for function in extra:
        if not isinstance(function, (str, PreTrainedModel)):
            check_arguments(function, Row.COLUMNS)
    # Any other number of weights is left to TRL. It refuses all but one weight per function, built-in ones included.
    if args.reward_weights is not None and len(args.reward_weights) == len(extra):
        args.reward_weights = [1.0, 1.0, *args.reward_weights]
    if processors is not None:  # the two built-in rewards are functions and need none
        processors = [None, None, *(processors if isinstance(processors, list) else [processors])]
    # This dataset only drives TRL's loop; its rows are never read. It has as many rows as one generation batch has
    # prompts, so TRL's epoch is a population step.
    prompt = [{"role": "user", "content": "The rollout writes the prompts."}]
    rows = Dataset.from_dict({"prompt": [prompt] * (args.rows_per_step // args.attempts_per_task)})
    return {
        "reward_funcs": [teacher_reward, student_reward, *extra],
        "train_dataset": rows,
        "eval_dataset": rows if evaluates else None,
        "reward_processing_classes": processors,
    }


def make_prompt_inputs(
    args: PopuLoRAConfig, train_dataset: Dataset, eval_dataset: Any, reward_funcs: Any, processors: Any
) -> dict[str, Any]:
    """
    Checks the user's tables and reward functions, and makes arguments of TRL's constructor for a dataset run, by name.

    Raises:
        `TypeError`: If a table or a reward function cannot be used.
        `ValueError`: If a table cannot be used, or if there is no reward function.
    """
    functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    if reward_funcs is None or not functions:
        raise ValueError("A dataset of prompts needs `reward_funcs`: at least one function, in TRL's signature.")
    tables = {"train_dataset": train_dataset}
    if isinstance(eval_dataset, dict):
        tables |= {f"eval_dataset[{name!r}]": table for name, table in eval_dataset.items()}
    elif eval_dataset is not None:
        tables["eval_dataset"] = eval_dataset
    check_reward_arguments(functions, tables)
    assert args.generation_batch_size is not None, "the config is settled"
    assert args.num_generations is not None, "the config is settled"
    prompts = args.generation_batch_size // args.seats // args.num_generations
    if len(train_dataset) < prompts:
        raise ValueError(
            f"`train_dataset` has {len(train_dataset)} prompts, and one generation takes {prompts} for each member: "
            "nothing would be trained. Give more prompts, or lower `per_device_train_batch_size`, "
            "`gradient_accumulation_steps` or `steps_per_generation`."
        )
    if args.learning_rate == TRL_RATE and "learning_rate" not in args.member_values and args.process_index == 0:
        logger.warning(
            "`learning_rate` is TRL's default, %g, which is meant for training all weights of a model. LoRA adapters "
            "want about ten times as much.",
            TRL_RATE,
        )
    seats = Population(args.teachers, args.students, seats=args.seats).adapters
    return {
        "reward_funcs": list(functions),
        "train_dataset": expand_by_member(train_dataset, seats),
        "eval_dataset": expand_tables(eval_dataset, seats),
        "reward_processing_classes": processors,
    }


def expand_tables(tables: Any, seats: Sequence[str]) -> Any:
    """Expands one table, or several by name, for the seats (see [`expand_by_member`]). `None` stays `None`."""
    if isinstance(tables, dict):
        return {name: expand_by_member(table, seats) for name, table in tables.items()}
    return None if tables is None else expand_by_member(tables, seats)


def check_reward_names(names: Sequence[str]) -> None:
    """
    Refuses two reward functions with the same name, because TRL would log one mean of both under that name.

    Raises:
        `ValueError`: If two have the same name, the two built-in ones included.
    """
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"Two reward functions are called {twice[0]!r}, so that their metrics would be mixed. Give one another "
            "name (`__name__`)."
        )


def choose_learning_rates(args: PopuLoRAConfig, population: Population) -> dict[str, float]:
    """Chooses the learning rate of each adapter, by the adapter's name."""
    rates = dict(zip(population.adapters, population.list_values("learning_rate", args.learning_rate), strict=True))
    if args.teacher_learning_rate is not None:
        rates |= dict.fromkeys((each.name for each in population.teachers), args.teacher_learning_rate)
    return rates


def choose_betas(args: PopuLoRAConfig, population: Population) -> list[float]:
    """Chooses the weight of each adapter's KL term, by index. With `teacher_beta` the students have none."""
    if args.teacher_beta:
        return [args.teacher_beta if member.role == "teacher" else 0.0 for member in population]
    return population.list_values("beta", args.beta)


def read_member_settings(
    args: PopuLoRAConfig, given: Mapping[str, Any], like: Member | None, has_kl_term: bool
) -> dict[str, Any]:
    """
    Reads the settings of a member that joins. A setting that is not given is copied from the member `like`; without
    `like` it is the one with which the first member of the run began.

    Args:
        args: Settings of the run.
        given: The settings that the joining member is given.
        like: The member to copy from, if any.
        has_kl_term: Whether the run computes a KL term.

    Raises:
        `TypeError`: If a setting is unknown or no number.
        `ValueError`: If a setting is out of range.
    """
    known = {"learning_rate": args.learning_rate} | {name: each[0] for name, each in args.member_values.items()}
    if unknown := sorted(given.keys() - set(JOINING)):
        raise TypeError(f"A member has no settings {', '.join(unknown)} of its own, only {', '.join(JOINING)}.")
    if given.get("beta") and not has_kl_term:
        raise ValueError(
            f"`beta={given['beta']}`: no member had a KL term when the run began, so the reference is not computed. "
            "Start the run with a `beta` above 0."
        )
    trial = copy.copy(args)
    trial.__dict__.update(given)
    check_numbers(trial)
    check_bounds(trial, BOUNDS)
    copied = known if like is None else like.settings
    return {name: value for name, value in copied.items() if name != "seed"} | dict(given)  # a seat keeps its seed


# The game.


@dataclass(frozen=True)
class GameParts:
    """
    What a game is made of before a model is loaded.

    Args:
        kinds: The kinds of task by name.
        rules: What is paid.
        archive: The tasks to start from.
        references: Number of archived tasks that a teacher is shown for a proposal; `None` without teachers.
        held_out: Tasks of `eval_dataset`; `None` without any.
    """

    kinds: Mapping[str, TaskKind]
    rules: Rules
    archive: TaskArchive
    references: int | None
    held_out: HeldOut | None


def make_parts(args: PopuLoRAConfig, train_dataset: Any, eval_dataset: Any) -> GameParts:
    """Makes the parts of a game, and checks the given tasks as far as that needs no model and no sandbox."""
    kinds = make_kinds(args)
    rules = make_rules(args, kinds)
    references = args.references_per_proposal if args.teachers else None
    archive = build_archive(train_dataset, kinds, args.prompt_style, args.archive_size, references)
    if train_dataset is not None and (lost := len(train_dataset) - len(archive)):
        logger.warning(
            "%d of the %d given tasks are left out: they are the same as others, or one kind has more than "
            "`archive_size=%d`.",
            lost,
            len(train_dataset),
            args.archive_size,
        )
    return GameParts(kinds, rules, archive, references, load_held_out(eval_dataset, kinds, archive, args))


def make_sandbox(args: PopuLoRAConfig) -> Sandbox:
    """
    Starts this process's sandbox. Collective.

    Raises:
        `RuntimeError`: On every rank, if the sandbox of one of them does not start.
    """
    return start_sandbox(args.build(SandboxSettings), args.process_index, args.local_process_index, gather_object)


def make_referee(
    args: PopuLoRAConfig,
    kinds: Mapping[str, TaskKind],
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    held_out: HeldOut | None = None,
    sandbox: Sandbox | None = None,
) -> Referee:
    """
    Makes the referee of a run, and starts a sandbox if none is given. Collective.

    Args:
        args: Settings of the run.
        kinds: The kinds of task by name.
        base: The base. If `shots` is unset, its size decides how many solved tasks students are shown.
        tokenizer: The tokenizer, whose control tokens no task may contain.
        held_out: Tasks that teachers may not propose.
        sandbox: Runs the programs.
    """
    assert args.prompt_style is not None, "`choose_style` comes before `make_kinds`"
    shots = choose_shots(args.shots, args.prompt_style, base)
    if args.prompt_style == "compact" and args.prompt_texts:
        logger.warning("`prompt_texts` has no effect: prompts of the style 'compact' have no instructions.")
    forbidden = find_control_texts(tokenizer)
    pool = sandbox or make_sandbox(args)
    guarded = args.teacher_reward != "paper"
    return Referee(kinds, pool, args.prompt_style, forbidden, held_out or (), shots=shots, guarded=guarded)


def make_game(
    args: PopuLoRAConfig,
    population: Population,
    archive: TaskArchive,
    referee: Referee,
    player: Player,
    rules: Rules,
) -> Game:
    """Puts together what the steps of a run are played with."""
    return Game(
        population=population,
        matchmaker=Matchmaker(args.matchmaking, args.pfsp_kappa, args.seed, args.ratings),
        archive=archive,
        referee=referee,
        player=player,
        proposals=args.proposals_per_teacher,
        attempts=args.attempts_per_task,
        references=args.references_per_proposal,
        seed=args.seed,
        iterations=args.num_iterations,
        replays=args.replays_per_match,
        shuffle=args.shuffle_dataset,
        rules=rules,
        features=Features(STEPS * max(args.teachers, 1) * args.proposals_per_teacher),
        metrics=[find_metric(path) for path in args.own_metrics or ()],
    )


def make_callbacks(
    describe: Callable[[], dict[str, Any]], played: Callable[[], Played], functions: Sequence[str] | None
) -> list[TrainerCallback]:
    """
    Makes the callbacks that record a run and report on it.

    Args:
        describe: Returns the contents of `population.json`.
        played: Returns the last step.
        functions: Names of the reward functions of a dataset run; `None` in the game.
    """
    alarms = (
        Alarms(played, alert) if functions is None else PromptAlarms(functions, alert, lambda: list_idle(describe()))
    )
    return [Records(describe), alarms, TrackerTables(describe)]


# Checks that need the parts: given tasks are true, and prompts fit into the context.


def check_outputs(tables: Mapping[str, Sequence[Task]], referee: Referee, player: Player) -> None:
    """
    Checks that given tasks are true: runs the programs of code kinds and compares the outputs.

    `populora sandbox-check` says how many programs run per second, and so how long this check takes. Collective: the
    ranks share the rows.

    Args:
        tables: The tasks of each dataset, in the order of the rows, by the name of the dataset.
        referee: Has the kinds and the sandbox.
        player: Knows the ranks.

    Raises:
        `ValueError`: On every rank, if a program does not return the outputs that its row claims, or needs more than
            half of `sandbox_seconds`; or if a row holds a control token or a wrong number of visible pairs. The
            message names the dataset, the values, and the row or its program.
    """
    code = {name: kind for name, kind in referee.kinds.items() if isinstance(kind, CodeKind)}
    rows = [(field, number, task) for field, tasks in tables.items() for number, task in enumerate(tasks)]
    for field, tasks in tables.items():
        _check_visible(field, tasks, referee.kinds)
    flaws = [
        f"`{field}`, row {number}: what it shows holds {text!r}, a control token."
        for field, number, task in rows[player.rank :: player.world]
        if (text := find_control_text(task, referee.forbidden))
    ]
    mine = [row for row in rows if row[2].kind in code][player.rank :: player.world]
    # A given task gets the CPU time of a proposal, half of an attempt's. Attempts run beside other work later, and
    # must not fail because the program then takes longer.
    verdicts = referee.sandbox.run(
        [
            Job(task.program, task.inputs, code[task.kind].determinism_runs, headroom=code[task.kind].cpu_headroom)
            for _, _, task in mine
        ]
    )
    for (field, number, task), verdict in zip(mine, verdicts, strict=True):
        where = f"`{field}`, row {number}"
        if verdict.status is not Status.OK:
            told = ""
            if verdict.status is Status.TIMEOUT:
                told = f" ({verdict.reason}; a task may use half of `sandbox_seconds`)"
            flaws.append(f"{where}: the program ends with `{verdict.status.value}`{told}: {task.program!r:.200}.")
            continue
        for given, returned, claimed in zip(task.inputs, verdict.outputs, task.outputs, strict=True):
            kind = code[task.kind]
            if kind.normalize(returned) != kind.normalize(claimed):
                flaws.append(
                    f"{where}: column `outputs` holds {claimed!r:.80}, the program returns {returned!r:.80} for "
                    f"{given!r:.80}."
                )
                break
    # All ranks learn of all flaws, so that they raise together and none waits for another.
    if found := [flaw for part in player.gather(flaws) for flaw in part]:
        raise ValueError(
            f"{len(found)} flaw(s) in {len(rows)} given task(s). {' '.join(found[:5])} `make_task(kind, program, "
            "inputs)` writes true tasks."
        )


def _check_visible(field: str, tasks: Iterable[Task], kinds: Mapping[str, TaskKind]) -> None:
    """
    Checks for each given task of a code kind how many input-output pairs are visible to students.

    Raises:
        `ValueError`: If a task of a code kind shows all its pairs, so that none is left to grade an answer by; or if a
            task of code_f shows none.
    """
    for task in tasks:
        kind = kinds.get(task.kind)
        if isinstance(kind, CodeKind) and task.visible >= len(task.inputs):
            flaw = "nothing is left to grade"
        elif isinstance(kind, CodeF) and not task.visible:
            flaw = "students would be shown no pair"
        else:
            continue
        raise ValueError(
            f"`{field}` holds a task of kind {task.kind} with {len(task.inputs)} `inputs`, {task.visible} of them "
            f"`visible`: {flaw}. Its program is {task.program!r:.200}."
        )


def choose_held_out(
    eval_dataset: Any, own: HeldOut | None, referee: Referee, player: Player, args: GRPOConfig
) -> HeldOut:
    """
    Chooses the tasks of an evaluation: the tasks given to `evaluate`, else the trainer's. Collective.

    Args:
        eval_dataset: What `evaluate` was given; these tasks are checked here.
        own: The trainer's held-out tasks, which were checked at its start.
        referee, player: Check the tasks.
        args: Settings of the run.

    Raises:
        `TypeError`: If a given table is no `datasets.Dataset`.
        `ValueError`: If there are no tasks, or the given ones cannot be used.
    """
    found = own if eval_dataset is None else load_held_out(eval_dataset, referee.kinds, None, args)
    if found is None:
        raise ValueError("`evaluate` needs tasks: give `eval_dataset` to it or to the trainer.")
    if found is not own:
        check_outputs(list_given_tables(None, found), referee, player)
    return found


def fit_into_context(
    referee: Referee,
    archive: TaskArchive,
    held_out: HeldOut | None,
    free_tokens: Callable[[Messages], int],
    proposing: bool = True,
) -> None:
    """
    Tells the referee how long prompts may be, and drops given tasks that do not fit into the context.

    Args:
        referee: Writes the prompts.
        archive: The tasks to start from; those that do not fit are dropped.
        held_out: Tasks that must all fit.
        free_tokens: Counts the tokens of the context that a prompt leaves free beside the longest completion; negative
            if the prompt is too long.
        proposing: Whether there are teachers, which need tasks to be shown.

    Raises:
        `ValueError`: If a held-out task does not fit, or if the archive is left without tasks that the first step
            needs.
    """
    referee.free_tokens = free_tokens
    referee.leave_out_long(archive)
    check_archive(archive, referee.kinds, proposing)
    for tasks in held_out.tables.values() if held_out else ():
        for task in tasks:
            referee.solving_prompt(task)  # raises if it does not fit


def check_prompts(
    referee: Referee,
    archive: TaskArchive,
    references: int | None,
    held_out: HeldOut | None,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
) -> None:
    """
    Writes a proposal prompt of each kind once, and checks the solved tasks that students will be shown.

    Args:
        referee: Has the kinds, and knows how long prompts may be.
        archive: References are drawn from it.
        references: Number of archived tasks that a teacher is shown for a proposal; `None` without teachers.
        held_out: Tasks that students may not be shown solved.
        tokenizer: Counts the tokens of an answer.
        limit: Most tokens of a completion.

    Raises:
        `ValueError`: If a prompt does not fit or the chat template refuses it; or if a solved task is held out, or has
            an answer with more tokens than a completion may have.
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
            longest = len(tokenizer.encode(shot.answer, add_special_tokens=False)) + 1  # for the end of the turn
            if limit is not None and longest > limit:
                raise ValueError(
                    f"`max_completion_length={limit}` is too short for answers of {kind.name}: one that students are "
                    f"shown has {longest} tokens. Raise it, or set `shots=0`."
                )
