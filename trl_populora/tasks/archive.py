"""The archive: verified tasks, in memory and as a table in a file.

    accepted Task --add--> TaskArchive --sample--> references for teachers, archived tasks for students
                               |  ^
                  save_archive v  | load_archive
                          archive.parquet: in checkpoints and at the end of a run; users may seed a run with it

The archive keeps the newest tasks. When a kind has `cap` tasks, the next one of this kind replaces the oldest.
(Absolute Zero Reasoner keeps the oldest and adds no more.) Adding, looking up and replacing a task take the same time
in an archive of any size.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_populora.files import write_whole
from trl_populora.sandbox import literals, values
from trl_populora.tasks.python.complexity import PROGRAM_MEASURES, Coverage, hash_shape
from trl_populora.tasks.python.normal_form import normal_forms
from trl_populora.tasks.python.programs import parse_function

from .kind import Task


if TYPE_CHECKING:
    import pyarrow as pa


# What is noted about a task once students have attempted it: the number of the match, the solve rate, and the measures
# of a program. The file of an archive always has a column for each. Measures of a user's own kind add columns.
NOTED = ("match", "solve_rate", *PROGRAM_MEASURES)
Note = Mapping[str, float]
Entry = tuple[Task, bytes, "Note | None"]  # the task, its key (duplicates share it), its note


class TaskArchive:
    """
    Verified tasks by kind, without duplicates.

    Two tasks are duplicates if they have the same kind, inputs and message, and programs of the same exact form
    ([`~normal_form.normal_forms`]). [`hash_task`] says which differences do not count. Texts that define no `f` are
    compared letter by letter, without the blanks at their ends. A task that a newer one has pushed out may be added
    again.

    The same program with another input makes another task, because the input decides what has to be worked out. Two
    programs that differ only in constants make two tasks as well. `programs` counts programs without regard to the
    values of constants.

    Args:
        cap: Tasks kept per kind. The default is Absolute Zero Reasoner's buffer size.

    Raises:
        `ValueError`: If `cap` is not positive.
    """

    def __init__(self, cap: int = 16384):
        if cap < 1:
            raise ValueError(f"`cap` must be at least 1 task per kind, got {cap}.")
        self.cap = cap
        self.coverage = Coverage()
        self._rings: dict[str, deque[tuple[Task, bytes]]] = {}  # by kind: each task with its key, oldest first
        self._notes: dict[bytes, Note | None] = {}  # what is noted about each task, by its key
        self._measures: set[str] = set()

    def add(self, task: Task) -> bool:
        """Adds a task. Returns `False`, and changes nothing, if the task is a duplicate."""
        key = hash_task(task)
        if key in self._notes:
            return False
        self._push((task, key, None))
        self.coverage.forms.add(hash_form(task.program))
        shape = _analyse(task.program)[2]
        if shape is not None:
            self.coverage.add(shape)
        return True

    @property
    def programs(self) -> int:
        """Number of different programs among all tasks ever added. Values of constants make no difference."""
        return len(self.coverage.forms)

    @property
    def measures(self) -> list[str]:
        """Names of the noted measures that are not in `NOTED`, in alphabetical order."""
        return sorted(self._measures)

    def note(self, task: Task, /, **facts: float) -> None:
        """Notes `facts` (see `NOTED`) about a task, in place of earlier facts. Ignores a task that is not here."""
        key = hash_task(task)
        if key in self._notes:
            self._notes[key] = facts
            self._measures.update(facts.keys() - set(NOTED))

    def entries(self) -> Iterator[Entry]:
        """Yields all entries, kind by kind, oldest first."""
        for ring in self._rings.values():
            yield from ((task, key, self._notes[key]) for task, key in ring)

    def restore(self, entries: Iterable[Entry], coverage: Mapping[str, Any]) -> None:
        """Replaces the tasks by those of `entries`, without duplicates, and the coverage by a saved state."""
        self._rings, self._notes, self._measures = {}, {}, set()
        for entry in entries:
            if entry[1] not in self._notes:
                self._push(entry)
        self.coverage.load_state_dict(coverage)

    def __contains__(self, task: object) -> bool:
        return isinstance(task, Task) and hash_task(task) in self._notes

    def __len__(self) -> int:
        return len(self._notes)

    def __iter__(self) -> Iterator[Task]:
        """Yields all tasks, kind by kind, oldest first."""
        for task, _, _ in self.entries():
            yield task

    def sample(self, kinds: Sequence[str], k: int, rng: random.Random) -> list[Task]:
        """
        Draws tasks uniformly, without replacement.

        Args:
            kinds: Names of kinds. Every task of these kinds is equally likely.
            k: How many tasks to draw. If there are fewer, all are returned.
            rng: The caller's generator.
        """
        total = self.count(kinds)
        return self.pick(kinds, rng.sample(range(total), min(k, total)))

    def count(self, kinds: Sequence[str]) -> int:
        """Counts the tasks of these kinds."""
        return sum(len(self._rings[kind]) for kind in dict.fromkeys(kinds) if kind in self._rings)

    def pick(self, kinds: Sequence[str], positions: Iterable[int]) -> list[Task]:
        """Returns the tasks at `positions` of one long list: the tasks of these kinds, kind by kind, oldest first."""
        # All ranks must pick the same tasks. `dict.fromkeys` drops repeated names and keeps the order, unlike a set.
        rings = [self._rings[kind] for kind in dict.fromkeys(kinds) if kind in self._rings]
        picked = []
        for position in positions:
            for ring in rings:
                if position < len(ring):
                    picked.append(ring[position][0])
                    break
                position -= len(ring)
        return picked

    def metrics(self) -> dict[str, float]:
        """Returns `archive/size`, and the metrics of [`Coverage`] over all programs ever added."""
        return {"archive/size": float(len(self)), **self.coverage.metrics()}

    @classmethod
    def from_dataset(cls, dataset: Iterable[Mapping[str, Any]], cap: int = 16384) -> TaskArchive:
        """
        Builds an archive from a table of tasks, in the table's order. Duplicates are dropped.

        Args:
            dataset: Rows. The columns `kind`, `program`, `inputs` and `outputs` are needed, the last two with lists of
                canonical texts. `message`, `visible`, `author` and `step` are optional.
            cap: Tasks kept per kind.

        Raises:
            `ValueError`: If a column is missing or a cell is broken. The message names column and row.
        """
        archive = cls(cap)
        for row, record in enumerate(dataset):
            archive.add(read_task(record, f"row {row}"))
        return archive

    def _push(self, entry: Entry) -> None:
        task, key, note = entry
        ring = self._rings.setdefault(task.kind, deque(maxlen=self.cap))
        if len(ring) == self.cap:
            del self._notes[ring[0][1]]
        ring.append((task, key))
        self._notes[key] = note
        self._measures.update((note or {}).keys() - set(NOTED))


def read_task(record: Mapping[str, Any], where: str) -> Task:
    """
    Reads a task from a row that a user may have written. Checks types and canonical texts.

    Args:
        record: The row, a value per column.
        where: Where the row stands, for errors.

    Raises:
        `ValueError`: If a column is missing or a cell is broken. The message names the column and `where`.
    """
    task = Task.from_record(record, where)
    for column, texts in (("inputs", task.inputs), ("outputs", task.outputs)):
        for text in texts:
            if not values.is_canonical(text):
                raise ValueError(
                    f"{where}: column `{column}` holds {text!r:.80}, which is no canonical "
                    f"text{_suggest_text(text, column)}. `trl_populora.tasks.make_task` makes whole tasks."
                )
            if column == "inputs" and not isinstance(values.decode(text), tuple):
                raise ValueError(
                    f"{where}: column `inputs` holds {text!r:.80}; an input is the tuple of arguments, "
                    "`trl_populora.sandbox.values.encode((3,))` for `f(3)`."
                )
    return task


def _suggest_text(text: str, column: str) -> str:
    """
    Writes for an error which canonical text the user may have meant. Reads `text` as a Python literal, or in the
    column `inputs` as arguments. Returns `""` if it cannot be read so.
    """
    try:
        value = literals.read_arguments(text) if column == "inputs" else literals.read_literal(text)
        # Users write the same input in three ways: `3`, `(3,)` and `f(3)`.
        if column == "inputs" and len(value) == 1 and isinstance(value[0], tuple):
            (value,) = value
        return f"; its canonical text is {values.encode(value, ordered=column == 'inputs')!r}"
    except ValueError:  # `text` is no literal, or its value is too large to be written
        return ""


def load_seed_tasks(path: str | Path | None = None) -> list[Task]:
    """
    Reads seed tasks, one JSON object per line.

    Args:
        path: The file. By default the 256 tasks that the embedded base starts from.

    Raises:
        `ValueError`: If a line is neither blank nor a JSON object, or if a field is missing or has a wrong value. The
            message names the file and the line, and the field if one is wrong.
    """
    package = __name__.partition(".")[0]
    source = files(package) / "assets" / "seed_tasks.jsonl" if path is None else Path(path)
    tasks = []
    for number, line in enumerate(source.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: no JSON object ({error}).") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: a task is a JSON object, got {type(record).__name__}.")
        tasks.append(read_task(record, where))
    return tasks


def hash_task(task: Task) -> bytes:
    """
    Computes the key of a task. Duplicates have the same key.

    The order within the dicts of an input does not count. In the message, letter case does not count, nor does how
    many blanks stand between two words. The order of the inputs does not count if the student is shown pairs.
    """
    inputs = [sort_dictionaries(text) for text in task.inputs]
    # code_f, the built-in kind with visible pairs, shuffles its inputs. So tasks that differ in this order alone are
    # duplicates.
    content = [task.kind, _analyse(task.program)[0], sorted(inputs) if task.visible else inputs]
    return _hash(json.dumps([*content, " ".join(task.message.lower().split())]), 16)


def hash_form(program: str) -> int:
    """Hashes a program without regard to the values of its constants."""
    return _analyse(program)[1]


@lru_cache(maxsize=1024)  # a step asks several times for each of its tasks
def _analyse(text: str) -> tuple[str, int, str | None]:
    """
    Returns a program's exact form, the hash of its form without constants, and the hash of its shape. The last one is
    `None` if the text defines no `f`.
    """
    # `24` or `a + b` parses, too. A user's own kind may keep texts like these. They are no programs with an `f`.
    tree = parse_function(text)
    exact, form = (text.strip(),) * 2 if tree is None else normal_forms(tree)
    shape = None if tree is None else hash_shape(tree)
    return exact, int.from_bytes(_hash(json.dumps(form), 8), "big"), shape


def _hash(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode("ascii"), digest_size=size).digest()


def sort_dictionaries(text: str) -> str:
    """Sorts the dicts of an input. So inputs that differ only in the order of a dict make one task."""
    if '["d"' not in text:
        return text
    try:
        return values.encode(values.decode(text))
    except ValueError:  # a user's own kind may keep any text
        return text


# The archive as a parquet table. Users open it by `load_dataset("parquet", data_files="archive.parquet")`.
# It has one row per task, kind by kind, oldest first.


SCHEMA_VERSION = 5
_VERSION_KEY, _STEP_KEY = b"populora_archive", b"populora_step"

# Rows that are written or read at a time. So no table is ever in memory as a whole beside the tasks themselves.
_CHUNK = 20_000


def make_schema(measures: Sequence[str] = ()) -> pa.Schema:
    """
    Lists the columns of the table. Column `key` has the hash of [`hash_task`] in hex.

    Args:
        measures: Further columns: what users' own kinds measure.
    """
    # pyarrow is large, and many commands and processes that import this module never touch a table.
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
    Writes an archive to a parquet file. The file appears whole or not at all.

    Args:
        archive: The archive.
        path: The file.
        step: Optimizer steps so far, to be written into the file; `None` for an archive of no particular step.
    """
    import pyarrow.parquet as pq

    entries, columns = iter(archive.entries()), make_schema(archive.measures)
    if step is not None:
        columns = columns.with_metadata({**columns.metadata, _STEP_KEY: str(step)})
    with write_whole(path) as unfinished, pq.ParquetWriter(unfinished, columns, compression="zstd") as writer:
        while chunk := list(islice(entries, _CHUNK)):
            writer.write_batch(_make_batch(chunk, archive.measures))


def read_archive_step(path: str | Path) -> int | None:
    """
    Reads at which optimizer step an archive was saved; `None` if the file does not say so.

    Raises:
        `ValueError`: If the file is missing or broken.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        mark = (pq.read_schema(path).metadata or {}).get(_STEP_KEY)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} cannot be read ({error}). Is it missing or cut off?") from error
    return None if mark is None else int(mark)


def load_archive(archive: TaskArchive, path: str | Path, coverage: dict[str, Any]) -> None:
    """
    Replaces an archive's contents by those of a file. The archive keeps its `cap`.

    Args:
        archive: The archive to fill.
        path: A file that [`save_archive`] has written.
        coverage: Saved state of `archive.coverage`. It also counts tasks that are no longer in the archive.

    Raises:
        `ValueError`: If the file is missing, damaged, or of another schema. The message names the file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path} cannot be read ({error}). Is it missing or cut off?") from error
    with file:
        found = (file.schema_arrow.metadata or {}).get(_VERSION_KEY, b"none").decode()
        if found != str(SCHEMA_VERSION):
            raise ValueError(
                f"{path}: field `{_VERSION_KEY.decode()}` of the schema is {found}, this version reads "
                f"{SCHEMA_VERSION}. The tasks themselves can seed a new run: pass the file as `seed_tasks`, or the "
                "table as `train_dataset`."
            )
        for field in make_schema():
            if field.name not in file.schema_arrow.names:
                raise ValueError(f"{path}: column `{field.name}` is missing; the file has {file.schema_arrow.names}.")
            if (held := file.schema_arrow.field(field.name).type) != field.type:
                raise ValueError(f"{path}: column `{field.name}` holds {held}, expected {field.type}.")
        try:
            archive.restore(_read_entries(file, path), coverage)
        except OSError as error:  # a page of the file is damaged
            raise ValueError(f"{path} is damaged ({error}).") from error


def _make_batch(entries: list[Entry], measures: Sequence[str]) -> pa.RecordBatch:
    import pyarrow as pa

    columns: dict[str, list] = {name: [] for name in make_schema(measures).names}
    for task, key, note in entries:
        for name, value in task.to_record().items():
            columns[name].append(value)
        for name in (*NOTED, *measures):
            columns[name].append((note or {}).get(name))
        columns["key"].append(key.hex())
    return pa.RecordBatch.from_pydict(columns, schema=make_schema(measures))


def _read_entries(file: Any, path: str | Path) -> Iterator[Entry]:
    # Columns that this version does not know are the measures of a user's own kinds.
    row, names = 0, [*NOTED, *(name for name in file.schema_arrow.names if name not in make_schema().names)]
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
