"""Tasks that a user gives: reads them and checks them before a run.

file or Hub --read_given_tasks-+-> table --build_archive--> TaskArchive to start from
                               `-> table of tasks that nobody trains on
"""

from __future__ import annotations

import glob
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError

from trl_populora.assets import REAL, TINY, real_seed_tasks, tiny_eval_tasks
from trl_populora.tasks.archive import TaskArchive, load_seed_tasks, read_task
from trl_populora.tasks.kind import Task, TaskKind


logger = logging.getLogger(__name__)


def read_tasks(source: str | None):
    """
    Reads a table of tasks from a file or from the Hub.

    Args:
        source: A `.json`, `.jsonl` or `.parquet` file, or a dataset of the Hub. With `None`, or `"none"` from a
            command line, nothing is read and `None` is returned.

    Raises:
        `ValueError`: As [`read_splits`] does, and if there is no split `train`.
    """
    if source in (None, "none"):
        return None
    what = f"The tasks {source!r}"
    splits = read_splits(source, what)
    if "train" not in splits:
        raise ValueError(f"{what} cannot be read: there is no split 'train', only {', '.join(splits)}.")
    return splits["train"]


def read_splits(source: str, what: str, name: str | None = None) -> DatasetDict:
    """
    Reads a dataset by its splits from a file, a directory or the Hub. A file makes the split `train`.

    Args:
        source: A `.json`, `.jsonl` or `.parquet` file, a directory, or a dataset of the Hub.
        what: What errors call the dataset.
        name: The dataset's configuration, as of `load_dataset`.

    Raises:
        `ValueError`: If there is no such file or dataset, if the Hub is out of reach, if the table is empty, or if a
            file is no JSON; the message then names the line.
    """
    formats = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
    source = source if "://" in source else os.path.expanduser(source)
    suffix = Path(source).suffix
    is_path = suffix in formats or source.startswith((".", "/"))
    if "://" not in source and is_path and not Path(source).exists():
        raise ValueError(
            f"{what} cannot be read: there is no such file (the current directory is {str(Path.cwd())!r}). Give a "
            ".json, .jsonl or .parquet file, or a dataset of the Hub as `user/name`."
        )
    try:
        if suffix in formats:
            # `load_dataset` takes patterns, too. The file that was found above is none.
            files = source if "://" in source else glob.escape(source)
            return load_dataset(formats[suffix], name=name, data_files=files)
        return load_dataset(source, name=name)
    except (FileNotFoundError, ConnectionError) as error:
        raise ValueError(f"{what} cannot be read ({error}).") from error
    except (DatasetGenerationError, StopIteration, ValueError) as error:
        raise ValueError(f"{what} cannot be read: {_find_fault(source, error)}.") from error


def _find_fault(source: str, error: Exception) -> str:
    """Finds why a file cannot be read: it is empty, or a line is no JSON; else returns the library's error."""
    if not Path(source).is_file() or Path(source).suffix not in (".json", ".jsonl"):
        return str(error.__cause__ or error)
    text = Path(source).read_text(encoding="utf-8", errors="replace")
    if not text.strip():
        return "the file is empty"
    array = text.lstrip().startswith("[")  # one JSON text of many lines; otherwise every line is one
    for number, part in enumerate([text] if array else text.split("\n"), start=1):
        try:
            if part.strip():
                json.loads(part)
        except ValueError as fault:
            return f"{'it' if array else f'line {number}'} is no JSON ({fault})"
    return str(error.__cause__ or error)


def read_given_tasks(
    seed_tasks: str | None, eval_tasks: str | None, kinds: Sequence[str], style: str
) -> tuple[Dataset | None, Dataset | None]:
    """
    Reads the tasks that a run begins with, and its held-out tasks.

    Args:
        seed_tasks: As `source` of [`read_tasks`].
        eval_tasks: As `source` of [`read_held_out`].
        kinds: Kinds that the run plays.
        style: Style of the prompts.

    Returns:
        Two tables, each `None` if there is none: `train_dataset` and `eval_dataset` of the trainer. With `eval_tasks`
        `real` and no `seed_tasks`, the first has the package's tasks of all programs that are not held out.

    Raises:
        `ValueError`: If a table cannot be read, or if `real` is asked of a base that reads compact prompts.
    """
    if eval_tasks == REAL and style == "compact":
        raise ValueError(
            "The tasks of `eval_tasks=real` are in ordinary Python. This base is asked in compact prompts, as the "
            "embedded base is, and cannot read them. Take `eval_tasks=tiny`."
        )
    held_out = read_held_out(eval_tasks, kinds)
    begun = read_tasks(seed_tasks)
    if begun is None and eval_tasks == REAL:
        begun = _read_real_tasks(held_out=False)
    return begun, held_out


def read_held_out(source: str | None, kinds: Sequence[str]):
    """
    Reads a table of held-out tasks.

    Args:
        source: As in [`read_tasks`], or one of two tables of the package: `tiny` for the embedded base, `real` for
            other bases.
        kinds: Kinds that the run plays. From the package's tables only tasks of these kinds are taken, or all tasks if
            none is of these kinds.
    """
    if source == TINY:
        table = read_tasks(tiny_eval_tasks())
    elif source == REAL:
        table = _read_real_tasks(held_out=True)
    else:
        return read_tasks(source)
    # If no task is of a kind that is played, the whole table is returned. The trainer then says what is wrong with it.
    return table.select([n for n, kind in enumerate(table["kind"]) if kind in kinds] or range(len(table)))


def _read_real_tasks(held_out: bool):
    table = read_tasks(real_seed_tasks())
    return table.select([n for n, held in enumerate(table["held_out"]) if held == held_out])


def load_built_in_tasks(style: str | None) -> list[Task]:
    """Loads a run's tasks if the user gives none: for `"compact"` the embedded base's, else those in plain Python."""
    return load_seed_tasks(None if style == "compact" else real_seed_tasks())


def build_archive(
    train_dataset: Dataset | None,
    kinds: Mapping[str, TaskKind],
    style: str | None,
    size: int,
    references: int | None,
) -> TaskArchive:
    """
    Builds the archive that a run starts from.

    Args:
        train_dataset: A table of tasks, one per row; `None` for the tasks that ship with the package.
        kinds: The kinds that the run plays, by name.
        style: Style of the prompts. If `train_dataset` is `None`, it decides which of the package's tasks are taken.
        size: Tasks kept per kind.
        references: How many archived tasks a proposing teacher is shown; `None` if nobody proposes.

    Raises:
        `TypeError`: If `train_dataset` is no `datasets.Dataset`.
        `ValueError`: If a column is missing or broken, or if a task that the first step needs is missing (see
            [`check_archive`]).
    """
    if train_dataset is None:
        tasks = load_built_in_tasks(style)
    elif isinstance(train_dataset, Dataset):
        tasks = [read_task(row, f"row {number}") for number, row in enumerate(train_dataset)]
    else:
        raise TypeError(
            f"`train_dataset` must be a `datasets.Dataset` of tasks or None, got `{type(train_dataset).__name__}`. A "
            "table can be read with `load_dataset('json', data_files=...)['train']`."
        )
    archive = TaskArchive(size)
    for task in tasks:
        # Tasks from another run's archive name authors and steps of that run, which mean nothing in this one.
        archive.add(replace(task, author=Task.author, step=Task.step))
    check_archive(archive, kinds, references is not None)
    bare = [name for name, kind in kinds.items() if kind.reference_kinds and not _has_example(archive, kind, style)]
    if bare and references:
        logger.warning(
            "No task to start from could be shown to teachers who propose for %s. At first they see no example, and "
            "may write nothing valid. Add seed tasks of these kinds or of their `reference_kinds` (code_f: with "
            "`inputs_per_function` inputs or more, and different outputs), or leave them out of `task_kinds`.",
            ", ".join(bare),
        )
    return archive


def _has_example(archive: TaskArchive, kind: TaskKind, style: str | None) -> bool:
    """Says whether a teacher that proposes for `kind` could be shown an example from the archive."""
    if kind.shows_turns(style or "") and not kind.writes_program:
        return any(kind.write_proposal(task) for task in archive if task.kind == kind.name)
    return archive.count(kind.reference_kinds) > 0


def check_archive(archive: TaskArchive, kinds: Mapping[str, TaskKind], proposing: bool) -> None:
    """
    Checks that the archive holds what students and teachers need for the first step.

    Args:
        archive: The archive that the run starts from.
        kinds: The kinds that the run plays, by name.
        proposing: Whether teachers propose.

    Raises:
        `ValueError`: If the archive holds no task of any kind that is played. If teachers propose, also if one of
            these kinds proposes about archived programs (as code_f does), and the archive holds no task of this
            kind's `reference_kinds`.
    """
    if not archive.count(list(kinds)):
        raise ValueError(
            f"There is no task of the kinds {', '.join(kinds)} to start from, at least none that fits into the "
            "context; students need one. Add seed tasks of these kinds to `train_dataset`, or change `task_kinds`."
        )
    for kind in kinds.values() if proposing else ():
        if kind.missing_for_proposals() or kind.writes_program:
            continue
        if not archive.count(kind.reference_kinds):
            raise ValueError(
                f"There is no task of the kinds {', '.join(kind.reference_kinds)} to start from, at least none that "
                f"fits into the context, and {kind.name} proposes about their programs. Add such a task to "
                f"`train_dataset`, or leave {kind.name} out of `task_kinds`."
            )
