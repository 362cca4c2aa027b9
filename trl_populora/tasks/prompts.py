"""Prompts of a dataset, for a run without a game: checks a user's tables, and deals their rows to the members.

    table [N] --expand_by_member--> table [M * N] with a column `member` --MemberSampler--> rows of a generation

Row `m * N + i` of the expanded table is row i as seat m gets it. TRL's loop, reward functions and completion tables
see the column `member` like any other column. A generation has rows for all seats, so that TRL's counts stay the same,
whoever joins or leaves; the trainer drops the rows of empty seats.

Shapes: N rows of the table, M seats.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat
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
        `TypeError`: If the table is an `IterableDataset` that does not know its columns.
        `ValueError`: If the table has splits, has both a column `prompt` and a column `program`, or has neither. The
            message names what was found.
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
        way_out = "`dataset.rename_column(..., 'prompt')` renames one."
        raise ValueError(f"`train_dataset` has the columns {', '.join(columns)}. {formats} {way_out}")
    return "prompt" in columns


def check_table(table: Any, field: str) -> None:
    """
    Checks a table of prompts.

    Raises:
        `TypeError`: If it is no `datasets.Dataset`.
        `ValueError`: If it is empty, has no column `prompt`, or has a column `member`, `image`, `images` or
            `environment`.
    """
    if isinstance(table, IterableDataset):
        raise TypeError(
            f"`{field}` is an `IterableDataset`. Rows are dealt to members by number, and a stream has none: load it "
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


def expand_by_member(table: Dataset, seats: Sequence[str]) -> Dataset:
    """Repeats a table once for each seat, with the seat's name in a column `member`. Rows are not copied."""
    return concatenate_datasets([table.add_column(MEMBER, [name] * len(table)) for name in seats])


class MemberSampler(Sampler):
    """
    Deals the rows of an expanded table. A generation holds all rows of the first seat, then all of the second, and so
    on.

    A member gets its rows in the order in which TRL's sampler would give them to a run of this member alone. On
    several processes each process gets an equal part of every seat's rows.

    Args:
        streams: TRL's sampler of each seat. Seats with equal samplers get the same prompts.
        rows: Rows that a seat has on one rank in one generation.
        seats: Numbers of the seats that get rows; all when `None`.
    """

    def __init__(self, streams: Sequence[RepeatSampler], rows: int, seats: Sequence[int] | None = None):
        self.streams, self.rows = list(streams), rows
        self.seats = range(len(self.streams)) if seats is None else seats

    def set_epoch(self, epoch: int) -> None:
        """Makes epoch `epoch` the next pass, so that a resumed run sees its rows in that epoch's order."""
        for stream in self.streams:
            if not stream.shuffle:
                continue
            # TRL's sampler draws one permutation per pass from a generator that nothing rewinds.
            stream.generator.manual_seed(stream.seed)
            for _ in range(epoch):
                torch.randperm(stream.num_samples, generator=stream.generator)

    def __iter__(self) -> Iterator[int]:
        passes = [iter(stream) for stream in self.streams]
        while True:
            parts = [list(islice(each, self.rows)) for each in passes]
            if not parts[0]:
                return
            for seat, stream, part in zip(self.seats, self.streams, parts, strict=True):
                yield from (seat * stream.num_samples + index for index in part)

    def __len__(self) -> int:
        return sum(map(len, self.streams))


class HalvingSampler(Sampler):
    """
    Deals the rows of an expanded table in a run with successive halving: each time the number of members has halved,
    those that stay get twice as many prompts in a generation, and a generation keeps its number of rows.

    Before the first halving all rows are those of [`MemberSampler`] with equal streams. After it a member gets several
    of TRL's batches of prompts at once, and goes on with another pass over the table when a pass ends. The sampler
    does not know who has stayed. So the trainer tells a row's member by the row's place in its generation, and not by
    the seat that the row's index names.

    Args:
        stream: TRL's sampler, of all members.
        members: Members at the start, a power of two.
        rows: Rows that a member has on one rank in one generation at the start.
        generations: Generations from one halving to the next.
    """

    def __init__(self, stream: RepeatSampler, members: int, rows: int, generations: int):
        self.stream, self.members, self.rows, self.generations = stream, members, rows, generations
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Makes epoch `epoch` the next pass. An epoch has as many generations as in a run without halving."""
        self.epoch = epoch

    def count_shares(self, generation: int) -> int:
        """Returns by what factor the rows of each remaining member in a generation have grown: 1, then 2, 4..."""
        return min(self.members, 2 ** (generation // self.generations))

    def __iter__(self) -> Iterator[int]:
        stream = self.stream
        a_pass = stream.num_samples // stream.batch_size
        # It goes on through TRL's order, pass after pass, and gives each prompt once.
        once = RepeatSampler(stream.data_source, 1, stream.batch_size, shuffle=stream.shuffle, seed=stream.seed)
        first, passes = self.epoch * a_pass, chain.from_iterable(repeat(once))
        for generation in range(first + a_pass):
            shares = self.count_shares(generation)
            prompts = list(islice(passes, shares * stream.batch_size))
            if generation < first:
                continue
            own = [prompt for prompt in prompts for _ in range(stream.mini_repeat_count)]
            part = shares * self.rows
            rows = [
                member * stream.num_samples + index
                for start in range(0, len(own), part)
                for member in range(self.members // shares)
                for index in own[start : start + part]
            ]
            for _ in range(stream.repeat_count):
                yield from rows

    def __len__(self) -> int:
        return self.members * len(self.stream)
