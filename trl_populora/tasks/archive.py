"""The archive: verified tasks, shown as references, attempted in the place of invalid proposals, kept as a table.

In memory, newest kept: at the cap the oldest task of the same kind makes room (Absolute Zero Reasoner keeps the oldest
and freezes). Adding, looking up and evicting cost O(1), sampling O(number sampled), however large it is.
"""

from __future__ import annotations

import hashlib
import json
import random
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


# How a task fared, noted once students have tried it: match, solve rate, and what its kind's `complexity` measures.
# These are the code kinds', and columns of every archive; a user's own kind adds its own.
NOTED = ("match", "solve_rate", *PROGRAM_MEASURES)
Note = Mapping[str, float]
Entry = tuple[Task, bytes, "Note | None"]  # task, duplicate key, note


class _Ring:
    """The newest `cap` tasks of one kind; position 0 is the oldest."""

    def __init__(self, cap: int):
        self.cap = cap
        self.entries: list[Entry] = []
        self.start = 0

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, position: int) -> Entry:
        return self.entries[(self.start + position) % len(self.entries)]

    def push(self, entry: Entry) -> tuple[int, bytes | None]:
        """Appends an entry; returns its slot and the key of the one that had to go, if any."""
        if len(self.entries) < self.cap:
            self.entries.append(entry)
            return len(self.entries) - 1, None
        slot = self.start
        evicted, self.entries[slot] = self.entries[slot][1], entry
        self.start = (slot + 1) % self.cap
        return slot, evicted


class TaskArchive:
    """
    Verified tasks by kind, without duplicates.

    Two tasks are duplicates when kind, inputs and message agree and their programs have one normal form
    ([`~normal_form.normal_forms`]; text that defines no `f` is compared as it is). An evicted task may come back. The
    same program with another input is another task, because the input decides what has to be worked out, and so is one
    with other constants: `programs` tells how many are new in more than that.

    Args:
        cap: Tasks kept per kind (Absolute Zero Reasoner's buffer size).

    Raises:
        `ValueError`: If `cap` is not positive.
    """

    def __init__(self, cap: int = 16384):
        if cap < 1:
            raise ValueError(f"`cap` must be at least 1 task per kind, got {cap}.")
        self.cap = cap
        self.coverage = Coverage()
        self._rings: dict[str, _Ring] = {}
        self._measures: set[str] = set()
        self._keys: dict[bytes, int] = {}  # to the slot in the ring of the task's kind

    def add(self, task: Task) -> bool:
        """Adds a task; returns `False` and changes nothing if it is a duplicate."""
        key = hash_task(task)
        if key in self._keys:
            return False
        self._push((task, key, None))
        self.coverage.forms.add(hash_form(task.program))
        shape = _analyse(task.program)[2]
        if shape is not None:
            self.coverage.add(shape)
        return True

    @property
    def programs(self) -> int:
        """Different programs among all tasks ever added, their constants apart."""
        return len(self.coverage.forms)

    @property
    def measures(self) -> list[str]:
        """Names of all that was ever noted beside `NOTED`, in alphabetical order."""
        return sorted(self._measures)

    def note(self, task: Task, **facts: float) -> None:
        """Writes down how an archived task fared; a task that is not here any more is passed over."""
        key = hash_task(task)
        if key in self._keys:
            self._rings[task.kind].entries[self._keys[key]] = (task, key, facts)
            self._measures.update(facts.keys() - set(NOTED))

    def entries(self) -> Iterator[Entry]:
        """All entries in the order of iteration."""
        for ring in self._rings.values():
            yield from (ring[position] for position in range(len(ring)))

    def restore(self, entries: Iterable[Entry], coverage: Mapping[str, Any]) -> None:
        """Replaces the contents by saved entries (in order, without duplicates) and a saved state of `coverage`."""
        self._rings, self._keys, self._measures = {}, {}, set()
        for entry in entries:
            if entry[1] not in self._keys:
                self._push(entry)
        self.coverage.load_state_dict(coverage)

    def __contains__(self, task: object) -> bool:
        return isinstance(task, Task) and hash_task(task) in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Task]:
        """All tasks, kind by kind, oldest first."""
        for task, _, _ in self.entries():
            yield task

    def sample(self, kinds: Sequence[str], k: int, rng: random.Random) -> list[Task]:
        """
        Draws tasks uniformly, without replacement.

        Args:
            kinds: Names of the kinds to draw from, all their tasks together.
            k: How many; fewer are returned if there are fewer.
            rng: The caller's generator.
        """
        total = self.count(kinds)
        return self.pick(kinds, rng.sample(range(total), min(k, total)))

    def count(self, kinds: Sequence[str]) -> int:
        """How many tasks of these kinds there are."""
        return sum(len(self._rings[kind]) for kind in dict.fromkeys(kinds) if kind in self._rings)

    def pick(self, kinds: Sequence[str], positions: Iterable[int]) -> list[Task]:
        """The tasks of these kinds at some positions: kind by kind, oldest first."""
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
        """`archive/size` and the coverage of program space over everything ever added."""
        return {"archive/size": float(len(self)), **self.coverage.metrics()}

    @classmethod
    def from_dataset(cls, dataset: Iterable[Mapping[str, Any]], cap: int = 16384) -> TaskArchive:
        """
        Builds an archive from a table of tasks, in its order; duplicates are dropped.

        Args:
            dataset: Needs the columns `kind`, `program`, `inputs` and `outputs`, the last two with canonical texts;
                `message`, `visible`, `author` and `step` are optional.
            cap: Tasks kept per kind.

        Raises:
            `ValueError`: If a column is missing or a cell is broken; the message names column and row.
        """
        archive = cls(cap)
        for row, record in enumerate(dataset):
            archive.add(read_task(record, f"row {row}"))
        return archive

    def _push(self, entry: Entry) -> None:
        task, key, note = entry
        ring = self._rings.setdefault(task.kind, _Ring(self.cap))
        slot, evicted = ring.push(entry)
        self._measures.update((note or {}).keys() - set(NOTED))
        if evicted is not None:
            del self._keys[evicted]
        self._keys[key] = slot


def read_task(record: Mapping[str, Any], where: str) -> Task:
    """
    A task from a row that a user may have written: types and canonical texts are checked.

    Raises:
        `ValueError`: If a cell is broken; the message names its column and `where`.
    """
    task = Task.from_record(record, where)
    for column, texts in (("inputs", task.inputs), ("outputs", task.outputs)):
        for text in texts:
            if not values.is_canonical(text):
                raise ValueError(
                    f"{where}: column `{column}` holds {text!r:.80}, which is no canonical "
                    f"text{_suggest_text(text, column)}. `trl_populora.tasks.make_task` writes whole tasks."
                )
            if column == "inputs" and not isinstance(values.decode(text), tuple):
                raise ValueError(
                    f"{where}: column `inputs` holds {text!r:.80}; an input is the tuple of arguments, "
                    "`values.encode((3,))` for `f(3)`."
                )
    return task


def _suggest_text(text: str, column: str) -> str:
    """
    The canonical text of a Python literal in its place, if it is one; `(3,)`, `3` and `f(3)` mean the same input.
    """
    try:
        value = literals.read_arguments(text) if column == "inputs" else literals.read_literal(text)
    except ValueError:
        return ""
    if column == "inputs" and len(value) == 1 and isinstance(value[0], tuple):
        (value,) = value
    return f"; as one, it is {values.encode(value, ordered=column == 'inputs')!r}"


def load_seed_tasks(path: str | Path | None = None) -> list[Task]:
    """
    Reads seed tasks, one JSON object per line.

    Args:
        path: A file of the user's own; the 256 tasks of the embedded base by default.

    Raises:
        `ValueError`: If a line is no JSON object or a cell is broken; the message names file, line and column.
    """
    package = __name__.partition(".")[0]
    source = files(package) / "assets" / "seed_tasks.jsonl" if path is None else Path(path)
    tasks = []
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), start=1):
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
    """The hash by which duplicates are recognised."""
    inputs = [_sort_dictionaries(text) for text in task.inputs]
    # The order of code_f's inputs is an accident of the shuffle.
    content = [task.kind, _analyse(task.program)[0], sorted(inputs) if task.visible else inputs]
    return _hash(json.dumps([*content, " ".join(task.message.lower().split())]), 16)


def hash_form(program: str) -> int:
    """The hash of a program with its constants apart."""
    return _analyse(program)[1]


@lru_cache(maxsize=1024)  # a step asks several times for each of its tasks
def _analyse(text: str) -> tuple[str, int, str | None]:
    """
    Of a program: its normal form, the hash of that with constants apart, and its hash_shape (`None` if it defines no
    `f`).
    """
    tree = parse_function(text)  # `24` or `a + b` is no program of ours though it parses
    exact, form = (text.strip(),) * 2 if tree is None else normal_forms(tree)
    shape = None if tree is None else hash_shape(tree)
    return exact, int.from_bytes(_hash(json.dumps(form), 8), "big"), shape


def _hash(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode("ascii"), digest_size=size).digest()


def _sort_dictionaries(text: str) -> str:
    """An input as it is compared: another order of the same dictionary makes no other task."""
    if '["d"' not in text:
        return text
    try:
        return values.encode(values.decode(text))
    except ValueError:  # a user's own kind may keep any text
        return text


# The task archive as a parquet table: in checkpoints, at the end of a run, and as the seed of another run.
#
# It opens with `load_dataset("parquet", data_files="archive.parquet")`. One row per task, kind by kind, oldest first.


SCHEMA_VERSION = 4
_OLDER_VERSION = "3"  # the version before: the same columns, keys of another normal form
_VERSION_KEY, _STEP_KEY = b"populora_archive", b"populora_step"

# Rows written and read at a time: bounds the memory of an archive of a million tasks.
_CHUNK = 20_000


def make_schema(measures: Sequence[str] = ()) -> pa.Schema:
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

    entries, columns = iter(archive.entries()), make_schema(archive.measures)
    if step is not None:
        columns = columns.with_metadata({**columns.metadata, _STEP_KEY: str(step)})
    with write_whole(path) as unfinished, pq.ParquetWriter(unfinished, columns, compression="zstd") as writer:
        while chunk := list(islice(entries, _CHUNK)):
            writer.write_batch(_make_batch(chunk, archive.measures))


def read_archive_step(path: str | Path) -> int | None:
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
        if found not in (str(SCHEMA_VERSION), _OLDER_VERSION):
            raise ValueError(
                f"{path}: field `{_VERSION_KEY.decode()}` of the schema is {found}, this version reads "
                f"{SCHEMA_VERSION}. The tasks themselves can seed a new run: pass the table as `train_dataset`."
            )
        for field in make_schema():
            if field.name not in file.schema_arrow.names:
                raise ValueError(f"{path}: column `{field.name}` is missing; it holds {file.schema_arrow.names}.")
            if (held := file.schema_arrow.field(field.name).type) != field.type:
                raise ValueError(f"{path}: column `{field.name}` holds {held}, expected {field.type}.")
        try:
            forms: set[int] = set()
            entries = _read_entries(file, path)
            archive.restore(_renew_keys(entries, forms) if found == _OLDER_VERSION else entries, coverage)
            if found == _OLDER_VERSION:
                # A program that has left the archive cannot be read again: it is forgotten.
                archive.coverage.forms = forms
        except OSError as error:  # a damaged page
            raise ValueError(f"{path} is damaged ({error}).") from error


def _renew_keys(entries: Iterator[Entry], forms: set[int]) -> Iterator[Entry]:
    """Entries with keys by today's normal form, read from their programs; fills `forms` on the way."""
    for task, _, note in entries:
        forms.add(hash_form(task.program))
        yield task, hash_task(task), note


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
