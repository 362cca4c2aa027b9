"""What has to be there before a run: base model, tokenizer, seed tasks, reward functions, a place to write.

Everything is checked here, before training starts, and each refusal names the value and the way out.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedType, gather_object
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.utils import create_model_from_path

from trl_populora.assets import resolve_model_path
from trl_populora.population.matchmaking import everyone_plays
from trl_populora.populora_config import PopuLoRAConfig
from trl_populora.sandbox import Job, Limits, Runner, Sandbox, SandboxClient, Status
from trl_populora.step.held_out import HeldOut
from trl_populora.step.player import Messages
from trl_populora.step.referee import WAY_OUT
from trl_populora.step.rewards import make_student_reward, make_teacher_reward
from trl_populora.step.rollout import Game
from trl_populora.tasks import load_seed_tasks, resolve_kind
from trl_populora.tasks.archive import TaskArchive, read_task
from trl_populora.tasks.base import Task, TaskKind
from trl_populora.tasks.code import CodeKind


logger = logging.getLogger(__name__)


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


def load_tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, args: PopuLoRAConfig
) -> PreTrainedTokenizerBase:
    """
    Loads the base's tokenizer unless one is given.

    Raises:
        `ValueError`: If it has no chat template, because prompts are conversations.
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
        `ValueError`: If it holds prompts, a column is missing or broken, or no task is of a kind that the run plays.
    """
    if train_dataset is None:
        archive = TaskArchive(args.archive_size)
        for task in load_seed_tasks():
            archive.add(task)
    elif isinstance(train_dataset, Dataset):
        if "prompt" in train_dataset.column_names and "kind" not in train_dataset.column_names:
            raise ValueError(
                "`train_dataset` holds prompts; a population writes its own. It takes tasks to start from, a row each "
                "with `kind`, `program`, `inputs` and `outputs`, or nothing: leave it unset for the 256 built-in tasks."
            )
        archive = TaskArchive.from_dataset(train_dataset, cap=args.archive_size)
        for task in archive:
            if isinstance(kinds.get(task.kind), CodeKind) and task.visible >= len(task.inputs):
                raise ValueError(
                    f"`train_dataset` holds a task of kind {task.kind} with {len(task.inputs)} `inputs`, {task.visible} "
                    f"of them `visible`: nothing is left to grade. Its program is {task.program!r:.200}."
                )
    else:
        raise TypeError(
            f"`train_dataset` must be a `datasets.Dataset` of tasks or None, got `{type(train_dataset).__name__}`. A "
            "table can be read with `load_dataset('json', data_files=...)['train']`."
        )
    check_archive(archive, kinds)
    return archive


def check_archive(archive: TaskArchive, kinds: Mapping[str, TaskKind]) -> None:
    """
    Raises:
        `ValueError`: If students have no task to start with, or a kind no program to propose about.
    """
    if not any(archive.sample([name], 1, random.Random(0)) for name in kinds):
        raise ValueError(
            f"`train_dataset` holds no task of the kinds {', '.join(kinds)}; students need at least one to start "
            "with. Add seed tasks of these kinds, or change `task_kinds`."
        )
    for kind in kinds.values():
        if not kind.writes_program and not archive.sample(kind.reference_kinds, 1, random.Random(0)):
            raise ValueError(
                f"`train_dataset` holds no task of the kinds {', '.join(kind.reference_kinds)}, and {kind.name} proposes "
                f"about their programs. Add such a task, or leave {kind.name} out of `task_kinds`."
            )


def prompt_room(
    context: int | None, args: PopuLoRAConfig, tokenize: Callable[[Messages], list[int]]
) -> Callable[[Messages], int]:
    """
    What tells how many tokens of the context a prompt leaves free beside the longest completion.

    Args:
        context (`int` or `None`): Tokens that the vLLM engine or server holds, else what the base was trained on:
            transformers goes on beyond it without notice, and its completions turn to noise. `None` for a base without a
            limit, as a state-space model is.
        args ([`PopuLoRAConfig`]): Its `max_completion_length`.
        tokenize (`Callable`): Token ids of a prompt.

    Raises:
        `ValueError`: If the longest completion alone fills the context.
    """
    if context is None:
        return lambda prompt: 0
    free = context - (args.max_completion_length or 1)
    if free <= 0:
        raise ValueError(
            f"`max_completion_length={args.max_completion_length}` leaves no room for a prompt in a context of {context} "
            f"tokens. {WAY_OUT}"
        )
    return lambda prompt: free - len(tokenize(prompt))


def load_held_out(
    eval_dataset: Any, kinds: Mapping[str, TaskKind], archive: TaskArchive | None, args: PopuLoRAConfig
) -> HeldOut | None:
    """
    Builds the held-out tasks from one table or several; the training's archive may hold none of them.

    Raises:
        `TypeError`: If a table is not a `datasets.Dataset`.
        `ValueError`: If evaluation is wanted without tasks, or a table is empty, holds prompts, a broken cell, a kind
            that is not played, or a task of the archive.
    """
    if eval_dataset is None:
        for name, wanted in {
            "eval_strategy": str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no",
            "eval_steps": args.eval_steps is not None,
            "eval_on_start": args.eval_on_start,
        }.items():
            if wanted:
                raise ValueError(
                    f"`{name}={getattr(args, name)!s}` needs held-out tasks: pass `eval_dataset=` (on the command line "
                    "`--eval_tasks`), a table with the columns of seed tasks, or leave it unset."
                )
        return None
    named = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
    tables = {name: _held_out_table(_field(name), table, kinds) for name, table in named.items()}
    if not tables:
        raise ValueError("`eval_dataset` is an empty dict; name at least one table.")
    batch = None if args.use_vllm else args.per_device_eval_batch_size  # vLLM schedules rows by itself
    held_out = HeldOut(tables, args.eval_attempts, batch, args.seed)
    if shared := [task for task in archive or () if task in held_out]:
        raise ValueError(
            f"{len(shared)} of the {len(archive or ())} tasks to start from ask what `eval_dataset` holds out, so nothing "
            f"would be learned from a high score. Take them out of `train_dataset`. The first is {shared[0].program!r:.200}."
        )
    return held_out


def _held_out_table(field: str, table: Any, kinds: Mapping[str, TaskKind]) -> list[Task]:
    if not isinstance(table, Dataset):
        raise TypeError(f"`{field}` must be a `datasets.Dataset` of tasks, got `{type(table).__name__}`.")
    if "prompt" in table.column_names and "kind" not in table.column_names:
        raise ValueError(
            f"`{field}` holds prompts; held-out tasks are rows with `kind`, `program`, `inputs` and `outputs`, as seed "
            "tasks are."
        )
    tasks = [read_task(row, f"`{field}`, row {number}") for number, row in enumerate(table)]
    if not tasks:
        raise ValueError(f"`{field}` is empty; give at least one task, or leave it unset.")
    for number, task in enumerate(tasks):
        if task.kind not in kinds:
            raise ValueError(
                f"`{field}`, row {number}: column `kind` is {task.kind!r}, this run plays {', '.join(kinds)}. Leave such "
                "rows out, or add the kind to `task_kinds`."
            )
    return tasks


def given_tables(train_dataset: Dataset | None, held_out: HeldOut | None) -> dict[str, list[Task]]:
    """What the user has claimed to be true: the tasks of both datasets under the names that messages give them."""
    tables = {} if held_out is None else {_field(name): tasks for name, tasks in held_out.tables.items()}
    if train_dataset is not None:
        tables["train_dataset"] = [read_task(row, f"row {number}") for number, row in enumerate(train_dataset)]
    return tables


def _field(name: str) -> str:
    return f"eval_dataset[{name!r}]" if name else "eval_dataset"


def check_outputs(tables: Mapping[str, Sequence[Task]], game: Game) -> None:
    """
    Runs given tasks of the code kinds once, about a thousand a second. Collective: the ranks share the work.

    Args:
        tables (`Mapping[str, Sequence[Task]]`): By the name of the dataset; the order is that of its rows.
        game (`Game`): Its kinds and sandbox.

    Raises:
        `ValueError`: If a program does not give the outputs that a row claims; names dataset, row and both values.
    """
    code = {name: kind for name, kind in game.referee.kinds.items() if isinstance(kind, CodeKind)}
    rows = [(field, number, task) for field, tasks in tables.items() for number, task in enumerate(tasks)]
    mine = [row for row in rows if row[2].kind in code][game.player.rank :: game.player.world]
    verdicts = game.referee.sandbox.run([Job(task.program, task.inputs) for _, _, task in mine])
    flaws = []
    for (field, number, task), verdict in zip(mine, verdicts, strict=True):
        where = f"`{field}`, row {number}"
        if verdict.status is not Status.OK:
            flaws.append(f"{where}: the program ends with `{verdict.status.value}`: {task.program!r:.200}.")
            continue
        for given, returned, claimed in zip(task.inputs, verdict.outputs, task.outputs, strict=True):
            if not code[task.kind].same(returned, claimed):
                flaws.append(
                    f"{where}: column `outputs` holds {claimed!r:.80}, the program returns {returned!r:.80} for "
                    f"{given!r:.80}."
                )
                break
    if found := [flaw for part in game.player.gather(flaws) for flaw in part]:
        raise ValueError(
            f"{len(found)} of {len(rows)} given task(s) are wrong. {' '.join(found[:5])} `make_task(kind, program, inputs)` "
            "writes true ones."
        )


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


def make_kinds(args: PopuLoRAConfig) -> dict[str, TaskKind]:
    """
    The run's task kinds by name, in rotation order.

    Raises:
        `ValueError`: If a kind does not exist or two share a name.
    """
    kinds = [resolve_kind(name) for name in args.task_kinds]
    for kind in kinds:
        kind.configure(args)
    if len({kind.name for kind in kinds}) < len(kinds):
        raise ValueError(f"`task_kinds={args.task_kinds}` names a kind twice; its share is the rotation's.")
    if args.teacher_baseline == "member" and args.proposals_per_teacher < 4 * len(kinds):
        logger.warning(
            "`proposals_per_teacher=%d` is below 4 for each of the %d `task_kinds`. A teacher's proposal is compared with "
            "its others of the same kind, and with all of its match where it is the only one of its kind: so few say "
            "little.",
            args.proposals_per_teacher,
            len(kinds),
        )
    return {kind.name: kind for kind in kinds}


def make_sandbox(args: PopuLoRAConfig) -> Runner:
    """
    The node's sandbox with the configured limits: the first rank of a node owns it, the others use it. Collective.

    Raises:
        `RuntimeError`: On every rank, if one of the owners cannot confine programs.
    """
    limits = Limits(wall_seconds=args.sandbox_seconds, memory_bytes=args.sandbox_memory_mb << 20)
    owner = args.process_index - args.local_process_index
    # Launchers that bind each rank to cores of its own would leave the pool with those of one rank.
    bound = gather_object([(owner, os.sched_getaffinity(0) if sys.platform == "linux" else set())])
    cores = set().union(*(theirs for node, theirs in bound if node == owner))
    own, address, failure = None, "", ""
    if args.process_index == owner:
        try:
            own = Sandbox(
                args.sandbox_workers,
                limits,
                args.sandbox_allow_weak,
                cores=cores,
                bubblewrap=args.sandbox_bubblewrap,
            )
            _log_level(own)
            address = own.share() if len(bound) > 1 else ""
        except RuntimeError as error:
            failure = str(error)
    # Told to all, so that no rank waits for one that has failed.
    told = gather_object([(address, failure)])
    if failures := [text for _, text in told if text]:
        if own is not None:
            own.close()
        raise RuntimeError(failures[0])
    return own or SandboxClient(told[owner][0], limits)


def _log_level(sandbox: Sandbox) -> None:
    """What the walls are in this run; a warning where there are none."""
    missing = [f"{name} ({reason})" for name, reason in sandbox.report()["layers"].items() if reason]
    logger.log(
        logging.WARNING if sandbox.level == "C" else logging.INFO,
        "The sandbox runs %d programs at a time, at level %s. Layers that do not hold: %s.",
        sandbox.workers,
        sandbox.level,
        ", ".join(missing) or "none",
    )


def refuse_unsupported(args: Any, unsupported: Mapping[str, Any]) -> None:
    """Refuses what `GRPOTrainer` takes and a population cannot use, with the way out."""
    if not isinstance(args, PopuLoRAConfig):
        raise TypeError(f"`args` must be a `PopuLoRAConfig` (it extends `GRPOConfig`), got `{type(args).__name__}`.")
    ways_out = {
        "rollout_func": "the trainer plays its own rollouts; write a `TaskKind` to change what is played",
        "tools": "tasks are answered in one turn; write a `TaskKind` to change what is played",
        "environment_factory": "tasks are answered in one turn; write a `TaskKind` to change what is played",
        "quantization_config": "quantised layers are not routed by row; load the base in bf16",
    }
    for name, value in unsupported.items():
        if name not in ways_out:
            raise TypeError(f"`PopuLoRATrainer` has no argument `{name}`.")
        if value is not None:
            raise ValueError(f"`{name}` is not supported: {ways_out[name]}.")
    if _fsdp_version(args) == 1:
        raise ValueError(
            "`fsdp_version=1` is not supported: FSDP1 flattens members and base into common pieces, of which no member's "
            "weights or gradient norm can be told. Use FSDP2 (`accelerate_configs/fsdp2.yaml`, or "
            "`fsdp_config={'version': 2}`)."
        )
    if args.deepspeed_plugin is not None and not everyone_plays(args.teachers, args.students):
        fits = max(s for s in range(1, args.students) if everyone_plays(args.teachers, s))
        raise ValueError(
            f"`teachers={args.teachers}` and `students={args.students}`: a step has one match per teacher, so some "
            "steps would leave a student idle, and DeepSpeed cannot leave it out of the optimizer step: its momentum "
            f"would move it. `students={fits}` or `teachers={args.students}` works; so does DDP with these numbers."
        )


def _fsdp_version(args: PopuLoRAConfig) -> int | None:
    """1 or 2, as the arguments or else the launcher say; `None` without FSDP."""
    if args.fsdp_plugin_args:
        return int(args.fsdp_plugin_args["fsdp_version"])
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1", "yes"):
        return int(os.environ.get("FSDP_VERSION", "1"))  # accelerate's default
    return None


def placeholder_dataset(args: PopuLoRAConfig) -> Dataset:
    """Rows that only drive TRL's loop: one generation batch long, so an epoch is a population step."""
    prompt = [{"role": "user", "content": "The rollout writes the prompts."}]
    return Dataset.from_dict({"prompt": [prompt] * (args.rows_per_step // args.attempts_per_task)})


def reward_functions(args: PopuLoRAConfig, extra: Any) -> list:
    """The two built in, then the user's, whose weights count beside 1 for each of ours."""
    extra = [] if extra is None else extra if isinstance(extra, list) else [extra]
    if args.reward_weights is not None and len(args.reward_weights) == len(extra):
        args.reward_weights = [1.0, 1.0, *args.reward_weights]
    return [
        make_teacher_reward(args.teacher_reward_invalid, args.teacher_reward_unsolved),
        make_student_reward(args.student_reward_correct, args.student_reward_wrong, args.student_reward_malformed),
        *extra,
    ]
