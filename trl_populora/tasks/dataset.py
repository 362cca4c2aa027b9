"""Tasks that a user gives, read and checked before a run."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from datasets import Dataset, load_dataset

from trl_populora.assets import TINY, real_seed_tasks, tiny_eval_tasks
from trl_populora.tasks.archive import TaskArchive, load_seed_tasks, read_task
from trl_populora.tasks.kind import Task, TaskKind


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


def load_built_in_tasks(style: str | None) -> list[Task]:
    """What a run starts from if nothing else is given: the embedded base's grammar in its prompts, else Python."""
    return load_seed_tasks(None if style == "compact" else real_seed_tasks())


def build_archive(
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
        tasks = load_built_in_tasks(style)
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
