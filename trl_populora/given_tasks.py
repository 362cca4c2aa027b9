"""The tasks that a user gives: those to start from and those held out, read and checked before a run."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from trl import GRPOConfig

from trl_populora.assets import TINY, real_seed_tasks, tiny_eval_tasks
from trl_populora.sandbox import Job, Status
from trl_populora.step.held_out import HeldOut
from trl_populora.step.player import Player
from trl_populora.step.referee import Referee
from trl_populora.tasks import CodeF, load_seed_tasks
from trl_populora.tasks.archive import TaskArchive, read_task
from trl_populora.tasks.base import Task, TaskKind
from trl_populora.tasks.code import CodeKind
from trl_populora.tasks.control import control_text


logger = logging.getLogger(__name__)


def read_tasks(source: str | None):
    """
    A table of tasks from a file or the Hub; `None` where none is named, or `none` on a command line.

    Raises:
        `ValueError`: If there is no such file or dataset.
    """
    if source in (None, "none"):
        return None
    formats = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
    suffix = Path(source).suffix
    try:
        if suffix in formats:
            return load_dataset(formats[suffix], data_files=source, split="train")
        return load_dataset(source, split="train")
    except (FileNotFoundError, ConnectionError) as error:
        raise ValueError(f"The tasks {source!r} cannot be read ({error}).") from error


def read_held_out(source: str | None, kinds: Sequence[str]):
    """A table of held-out tasks, likewise; `tiny` is the embedded base's, cut to the kinds that a run plays."""
    if source != TINY:
        return read_tasks(source)
    table = read_tasks(tiny_eval_tasks())
    # Where none is played the trainer says so, once it has looked the kinds up.
    return table.select([n for n, kind in enumerate(table["kind"]) if kind in kinds] or range(len(table)))


def built_in_tasks(style: str | None) -> list[Task]:
    """What a run starts from if nothing else is given: the embedded base's grammar in its prompts, else Python."""
    return load_seed_tasks(None if style == "compact" else real_seed_tasks())


def load_archive(
    train_dataset: Dataset | None,
    kinds: Mapping[str, TaskKind],
    style: str | None,
    size: int,
    references: int | None,
) -> TaskArchive:
    """
    Builds the archive from a table of tasks, or from those that ship with the package for the style of prompts.

    Args:
        train_dataset: Tasks, a row each.
        kinds: What the run plays, by name.
        style: Of the prompts.
        size: Tasks kept per kind.
        references: Archived tasks that a proposing teacher is shown; `None` where nobody proposes.

    Raises:
        `TypeError`: If it is not a `datasets.Dataset`.
        `ValueError`: If it holds prompts, a column is missing or broken, or no task is of a kind that the run plays.
    """
    if train_dataset is None:
        tasks = built_in_tasks(style)
    elif isinstance(train_dataset, Dataset):
        if "prompt" in train_dataset.column_names and "kind" not in train_dataset.column_names:
            raise ValueError(
                "`train_dataset` holds prompts; a population writes its own. It takes tasks to start from, a row each "
                "with `kind`, `program`, `inputs` and `outputs`, or nothing: leave it unset for the built-in tasks."
            )
        tasks = [read_task(row, f"row {number}") for number, row in enumerate(train_dataset)]
    else:
        raise TypeError(
            f"`train_dataset` must be a `datasets.Dataset` of tasks or None, got `{type(train_dataset).__name__}`. A "
            "table can be read with `load_dataset('json', data_files=...)['train']`."
        )
    archive = TaskArchive(size)
    for task in tasks:  # an archive of another run names authors and steps of that run
        archive.add(replace(task, author=Task.author, step=Task.step))
    check_archive(archive, kinds, references is not None)
    bare = [name for name, kind in kinds.items() if kind.reference_kinds and not _has_example(archive, kind, style)]
    if bare and references:
        logger.warning(
            "No task of %s to start from that teachers could be shown: they see no example at first, and may write "
            "nothing valid. Add seed tasks of these kinds (code_f: of `inputs_per_function` inputs or more), or leave "
            "them out of `task_kinds`.",
            ", ".join(bare),
        )
    return archive


def _has_example(archive: TaskArchive, kind: TaskKind, style: str | None) -> bool:
    if kind.shows_turns(style or "") and not kind.writes_program:
        return any(kind.write_proposal(task) for task in archive if task.kind == kind.name)
    return bool(archive.sample(kind.reference_kinds, 1, random.Random(0)))


def check_archive(archive: TaskArchive, kinds: Mapping[str, TaskKind], proposing: bool) -> None:
    """
    Raises:
        `ValueError`: If students have no task to start with, or a kind that teachers propose no program to be about.
    """
    if not any(archive.sample([name], 1, random.Random(0)) for name in kinds):
        raise ValueError(
            f"`train_dataset` holds no task of the kinds {', '.join(kinds)}; students need at least one to start "
            "with. Add seed tasks of these kinds, or change `task_kinds`."
        )
    for kind in kinds.values() if proposing else ():
        if not kind.writes_program and not archive.sample(kind.reference_kinds, 1, random.Random(0)):
            raise ValueError(
                f"`train_dataset` holds no task of the kinds {', '.join(kind.reference_kinds)}, and {kind.name} "
                f"proposes about their programs. Add such a task, or leave {kind.name} out of `task_kinds`."
            )


def load_held_out(
    eval_dataset: Any, kinds: Mapping[str, TaskKind], archive: TaskArchive | None, args: GRPOConfig
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
                    f"`{name}={getattr(args, name)!s}` needs held-out tasks: pass `eval_dataset=` (on the command "
                    "line `--eval_tasks`), a table with the columns of seed tasks, or leave it unset."
                )
        return None
    named = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
    tables = {name: _held_out_table(_field(name), table, kinds) for name, table in named.items()}
    if not tables:
        raise ValueError("`eval_dataset` is an empty dict; name at least one table.")
    batch = None if args.use_vllm else args.per_device_eval_batch_size  # vLLM schedules rows by itself
    held_out = HeldOut(tables, args.num_generations_eval, batch, args.seed)
    if shared := [task for task in archive or () if task in held_out]:
        raise ValueError(
            f"{len(shared)} of the {len(archive or ())} tasks to start from ask what `eval_dataset` holds out, so "
            "nothing would be learned from a high score. Take them out of `train_dataset`. The first is "
            f"{shared[0].program!r:.200}."
        )
    return held_out


def to_measure(eval_dataset: Any, own: HeldOut | None, referee: Referee, player: Player, args: GRPOConfig) -> HeldOut:
    """
    What an evaluation goes by: tasks given to it, which are checked, or the trainer's own. Collective.

    Raises:
        `ValueError`: If there are none, or those given cannot be used.
    """
    found = own if eval_dataset is None else load_held_out(eval_dataset, referee.kinds, None, args)
    if found is None:
        raise ValueError("`evaluate` needs tasks: give `eval_dataset` to it or to the trainer.")
    if found is not own:
        check_outputs(given_tables(None, found), referee, player)
    return found


def _held_out_table(field: str, table: Any, kinds: Mapping[str, TaskKind]) -> list[Task]:
    if not isinstance(table, Dataset):
        raise TypeError(f"`{field}` must be a `datasets.Dataset` of tasks, got `{type(table).__name__}`.")
    if "prompt" in table.column_names and "kind" not in table.column_names:
        raise ValueError(
            f"`{field}` holds prompts; held-out tasks are rows with `kind`, `program`, `inputs` and `outputs`, as "
            "seed tasks are."
        )
    tasks = [read_task(row, f"`{field}`, row {number}") for number, row in enumerate(table)]
    if not tasks:
        raise ValueError(f"`{field}` is empty; give at least one task, or leave it unset.")
    for number, task in enumerate(tasks):
        if task.kind not in kinds:
            raise ValueError(
                f"`{field}`, row {number}: column `kind` is {task.kind!r}, this run plays {', '.join(kinds)}. Leave "
                "such rows out, or add the kind to `task_kinds`."
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


def check_outputs(tables: Mapping[str, Sequence[Task]], referee: Referee, player: Player) -> None:
    """
    Reads given tasks and runs those of the code kinds once, about a thousand a second. Collective: the ranks share
    the work.

    Args:
        tables: By the name of the dataset; the order is that of its rows.
        referee: Its kinds and sandbox.
        player: Knows the ranks.

    Raises:
        `ValueError`: If a program does not give the outputs that a row claims or needs more than half of
            `sandbox_seconds`, or a row holds a control token or the wrong number of visible pairs; names dataset, row
            and values.
    """
    code = {name: kind for name, kind in referee.kinds.items() if isinstance(kind, CodeKind)}
    rows = [(field, number, task) for field, tasks in tables.items() for number, task in enumerate(tasks)]
    for field, tasks in tables.items():
        _check_visible(field, tasks, referee.kinds)
    flaws = [
        f"`{field}`, row {number}: what it shows holds {text!r}, which ends a turn or a thought."
        for field, number, task in rows[player.rank :: player.world]
        if (text := control_text(task, referee.forbidden))
    ]
    mine = [row for row in rows if row[2].kind in code][player.rank :: player.world]
    # As a proposal: its attempts, which run beside other work, must not fail for the time that they take.
    verdicts = referee.sandbox.run(
        [Job(task.program, task.inputs, headroom=code[task.kind].cpu_headroom) for _, _, task in mine]
    )
    for (field, number, task), verdict in zip(mine, verdicts, strict=True):
        where = f"`{field}`, row {number}"
        if verdict.status is not Status.OK:
            told = " (a task may use half of `sandbox_seconds`)" if verdict.status is Status.TIMEOUT else ""
            flaws.append(f"{where}: the program ends with `{verdict.status.value}`{told}: {task.program!r:.200}.")
            continue
        for given, returned, claimed in zip(task.inputs, verdict.outputs, task.outputs, strict=True):
            if not code[task.kind].is_same(returned, claimed):
                flaws.append(
                    f"{where}: column `outputs` holds {claimed!r:.80}, the program returns {returned!r:.80} for "
                    f"{given!r:.80}."
                )
                break
    if found := [flaw for part in player.gather(flaws) for flaw in part]:
        raise ValueError(
            f"{len(found)} of {len(rows)} given task(s) are wrong. {' '.join(found[:5])} `make_task(kind, program, "
            "inputs)` writes true ones."
        )


def _check_visible(field: str, tasks: Iterable[Task], kinds: Mapping[str, TaskKind]) -> None:
    """
    Raises:
        `ValueError`: If a task of a code kind shows all of its pairs, of which any answer would be right, or a code_f
            shows none.
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
