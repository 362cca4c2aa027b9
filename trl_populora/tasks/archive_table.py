"""The task archive as a parquet table: in checkpoints, at the end of a run, and as the seed of another run.

It opens with `load_dataset("parquet", data_files="archive.parquet")`. One row per task, kind by kind, oldest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_populora.files import write_whole

from .archive import NOTED, Entry, TaskArchive, form_of, key_of
from .base import Task


if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 4
_OTHER_KEYS = "3"  # the version before: the same columns, keys of another normal form
_VERSION_KEY, _STEP_KEY = b"populora_archive", b"populora_step"

# Rows written and read at a time: bounds the memory of an archive of a million tasks.
_CHUNK = 20_000


def schema(measures: Sequence[str] = ()) -> pa.Schema:
    """
    Columns of the table; `key` is the hash by which duplicates are recognised, in hex. A user's own kinds add
    `measures`.
    """
    import pyarrow as pa

    texts = pa.list_(pa.string())
    return pa.schema(
        [
            ("kind", pa.string()),
            ("program", pa.string()),
            ("inputs", texts),
            ("outputs", texts),
            ("message", pa.string()),
            ("visible", pa.int64()),
            ("author", pa.string()),
            ("step", pa.int64()),
            *((name, pa.int64() if name == "match" else pa.float64()) for name in (*NOTED, *measures)),
            ("key", pa.string()),
        ],
        metadata={_VERSION_KEY: str(SCHEMA_VERSION)},
    )


def save_archive(archive: TaskArchive, path: str | Path, step: int | None = None) -> None:
    """
    Writes the archive to a parquet file, which appears whole or not at all and says after how many optimizer steps.
    """
    import pyarrow.parquet as pq

    entries, columns = iter(archive.entries()), schema(archive.measures)
    if step is not None:
        columns = columns.with_metadata({**columns.metadata, _STEP_KEY: str(step)})
    with write_whole(path) as unfinished, pq.ParquetWriter(unfinished, columns, compression="zstd") as writer:
        while chunk := list(islice(entries, _CHUNK)):
            writer.write_batch(_batch(chunk, archive.measures))


def archive_step(path: str | Path) -> int | None:
    """
    The optimizer step at which an archive was saved; `None` if it does not say, as those of early runs.

    Raises:
        `ValueError`: If the file is missing or broken.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        mark = (pq.read_schema(path).metadata or {}).get(_STEP_KEY)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} cannot be read ({error}); it is missing or was cut off.") from error
    return None if mark is None else int(mark)


def load_archive(archive: TaskArchive, path: str | Path, coverage: dict[str, Any]) -> None:
    """
    Puts a saved archive in the place of this one's contents; this one's `cap` applies.

    Args:
        archive: The archive to fill.
        path: A file written by [`save_archive`].
        coverage: Saved state of `archive.coverage`, which remembers more than the tasks that are left.

    Raises:
        `ValueError`: If the file is missing, cut off, or of another schema; the message names file and column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} cannot be read ({error}); it is missing or was cut off.") from error
    with file:
        found = (file.schema_arrow.metadata or {}).get(_VERSION_KEY, b"none").decode()
        if found not in (str(SCHEMA_VERSION), _OTHER_KEYS):
            raise ValueError(
                f"{path}: field `{_VERSION_KEY.decode()}` of the schema is {found}, this version reads "
                f"{SCHEMA_VERSION}. The tasks themselves can seed a new run: pass the table as `train_dataset`."
            )
        for field in schema():
            if field.name not in file.schema_arrow.names:
                raise ValueError(f"{path}: column `{field.name}` is missing; it holds {file.schema_arrow.names}.")
            if (held := file.schema_arrow.field(field.name).type) != field.type:
                raise ValueError(f"{path}: column `{field.name}` holds {held}, expected {field.type}.")
        try:
            forms: set[int] = set()
            entries = _entries(file, path)
            archive.restore(_renew(entries, forms) if found == _OTHER_KEYS else entries, coverage)
            if found == _OTHER_KEYS:
                # A program that has left the archive cannot be read again: it is forgotten.
                archive.coverage.forms = forms
        except OSError as error:  # a damaged page
            raise ValueError(f"{path} is damaged ({error}).") from error


def _renew(entries: Iterator[Entry], forms: set[int]) -> Iterator[Entry]:
    """Entries with keys by today's normal form, read from their programs; fills `forms` on the way."""
    for task, _, note in entries:
        forms.add(form_of(task.program))
        yield task, key_of(task), note


def _batch(entries: list[Entry], measures: Sequence[str]) -> pa.RecordBatch:
    import pyarrow as pa

    columns: dict[str, list] = {name: [] for name in schema(measures).names}
    for task, key, note in entries:
        for name, value in task.to_record().items():
            columns[name].append(value)
        for name in (*NOTED, *measures):
            columns[name].append((note or {}).get(name))
        columns["key"].append(key.hex())
    return pa.RecordBatch.from_pydict(columns, schema=schema(measures))


def _entries(file: Any, path: str | Path) -> Iterator[Entry]:
    row, names = 0, [*NOTED, *(name for name in file.schema_arrow.names if name not in schema().names)]
    for batch in file.iter_batches(_CHUNK):
        for record in batch.to_pylist():
            where = f"{path}, row {row}"
            note = {name: record[name] for name in names if record[name] is not None}
            try:
                key = bytes.fromhex(record["key"])
            except (TypeError, ValueError) as error:
                raise ValueError(f"{where}: column `key` holds {record['key']!r:.80}, which is no hash.") from error
            yield Task.from_record(record, where), key, note or None
            row += 1
