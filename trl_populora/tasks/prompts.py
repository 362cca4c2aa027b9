"""Prompts of a dataset, for a run without a game: checks a user's tables, and deals their rows to the members.

    table [N] --expand_by_member--> table [M * N] with a column `member` --MemberSampler--> rows of a generation

Row `m * N + i` of the expanded table is row i as member m gets it. TRL's loop, reward functions and completion tables
see the column `member` like any other column.

Shapes: N rows of the table, M members.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from datasets import Dataset, IterableDataset, concatenate_datasets
from torch.utils.data import Sampler
from trl.trainer.utils import RepeatSampler


MEMBER = "member"


def has_prompts(table: Any) -> bool:
    """
    Says whether a `train_dataset` makes a dataset run: it has a column `prompt`.

    Raises:
        `ValueError`: If the table has a column `program`, too, or neither; the message names both formats and the
            columns found.
    """
    columns = getattr(table, "column_names", None)
    if isinstance(columns, dict):
        raise ValueError(
            f"`train_dataset` has the splits {', '.join(columns)}. Give one of them: "
            f"`dataset[{next(iter(columns))!r}]`."
        )
    if columns is None:  # no table, or one that does not know its columns
        if isinstance(table, IterableDataset):
            check_table(table, "train_dataset")
        return False
    formats = (
        "Prompts for reward functions stand in a column `prompt` (text or messages). Tasks for the game have the "
        "columns `kind`, `program`, `inputs` and `outputs`."
    )
    if "prompt" in columns and "program" in columns:
        raise ValueError(f"`train_dataset` has the columns `prompt` and `program`: give one of them. {formats}")
    if "prompt" not in columns and "program" not in columns:
        raise ValueError(f"`train_dataset` has the columns {', '.join(columns)}. {formats}")
    return "prompt" in columns


def check_table(table: Any, field: str) -> None:
    """
    Checks a table of prompts.

    Raises:
        `TypeError`: If it is no `datasets.Dataset`.
        `ValueError`: If it is empty, has no column `prompt`, or has a column that the trainer fills, or images.
    """
    if isinstance(table, IterableDataset):
        raise TypeError(
            f"`{field}` is an `IterableDataset`. All members get the same rows, so rows must have numbers: load it "
            "without `streaming=True`."
        )
    if not isinstance(table, Dataset):
        raise TypeError(f"`{field}` must be a `datasets.Dataset`, got `{type(table).__name__}`.")
    if "prompt" not in table.column_names:
        raise ValueError(f"`{field}` has no column `prompt`, only {', '.join(table.column_names)}.")
    if not len(table):
        raise ValueError(f"`{field}` is empty.")
    if MEMBER in table.column_names:
        raise ValueError(
            f"`{field}` has a column `{MEMBER}`, by which reward functions learn who wrote a completion. Rename it."
        )
    for name in {"image", "images", "environment"} & {*table.column_names}:
        raise ValueError(f"`{field}` has a column `{name}`: members train on text alone. Remove it.")


def identify_prompts(table: Dataset) -> dict[str, Any]:
    """Returns the number of a table's rows, and a digest of its prompts in their order."""
    digest = hashlib.sha256()
    for part in table.select_columns("prompt").iter(batch_size=1000):
        for prompt in part["prompt"]:
            digest.update(json.dumps(prompt, sort_keys=True).encode() + b"\n")
    return {"digest": digest.hexdigest()[:16], "rows": len(table)}


def expand_by_member(table: Dataset, members: Sequence[str]) -> Dataset:
    """Repeats a table once for each member, with the member's name in a column `member`. Rows are not copied."""
    return concatenate_datasets([table.add_column(MEMBER, [name] * len(table)) for name in members])


class MemberSampler(Sampler):
    """
    Deals the rows of an expanded table: a generation holds each member's rows one after the other.

    Each member's rows come in the order in which TRL's sampler gives them to a run of that member alone. On several
    processes a rank's part of a generation holds the same part of every member's.

    Args:
        streams: TRL's sampler of each member. Members with equal samplers get the same prompts.
        rows: Rows that a member has on one rank in one generation.
    """

    def __init__(self, streams: Sequence[RepeatSampler], rows: int):
        self.streams, self.rows = list(streams), rows

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass the one of an epoch, so that a resumed run sees the order that it would have seen."""
        for stream in self.streams:
            if not stream.shuffle:
                continue
            # TRL's sampler draws one permutation per pass from a generator that nothing rewinds.
            stream.generator.manual_seed(stream.seed)
            for _ in islice(_draw_orders(stream), epoch):
                pass

    def __iter__(self) -> Iterator[int]:
        passes = [iter(stream) for stream in self.streams]
        while True:
            parts = [list(islice(each, self.rows)) for each in passes]
            if not parts[0]:
                return
            for member, part in enumerate(parts):
                offset = member * self.streams[member].num_samples
                yield from (offset + index for index in part)

    def __len__(self) -> int:
        return sum(map(len, self.streams))


def _draw_orders(stream: RepeatSampler) -> Iterator[None]:
    """Draws one pass's permutation of a sampler each time."""
    while True:
        torch.randperm(stream.num_samples, generator=stream.generator)
        yield
