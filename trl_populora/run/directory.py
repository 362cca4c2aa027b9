"""Keeps an `output_dir` for one run: locks it while the run trains, and decides what happens to files of earlier runs.

    a new run, and the directory holds a run    the start is refused
    a resume in the run's own directory         records are cut back to the checkpoint
    a resume in another directory               the checkpoint, and the records up to its step, are copied into that
                                                directory, and so is the best checkpoint so far; if the directory
                                                holds a run, the start is refused
    a second `train()` of the same trainer      files of the first training move to `_previous-<n>/`
    a new run, and another trainer has only     lines of its evaluations move to `_previous-<n>/`
    evaluated here
    `save_model()` before any training          if the directory holds a run, the save is refused
    `"newest"`, and there is no checkpoint      files of the earlier run move to `_previous-<n>/`

Records are rollouts, TRL's tables of completions, `metrics.jsonl`, `times.jsonl` and `lineage.jsonl`.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import TrainingArguments
from trl import GRPOConfig

from trl_populora.files import write_whole
from trl_populora.run import nodes
from trl_populora.run.checkpoint import PREFIX, UNFINISHED, check_optimizer_state, choose_checkpoint, find_newest
from trl_populora.run.read import LEFT, LINEAGE, METRICS, POPULATION_FILE, TIMES, read_lines, read_population


logger = logging.getLogger(__name__)

LOCK = "_lock"  # uploads to the Hub leave out names with a leading underscore
ASIDE = "_previous-{}"

# What a training leaves. A move goes through these in order. Checkpoints come first, so that a move that is cut short
# leaves no checkpoint whose records are gone.
LEFT_BY_TRAINING = [f"{PREFIX}*", UNFINISHED, "rollouts", LINEAGE, "members", LEFT, "archive.parquet"]
LEFT_BY_TRAINING += ["adapter_model.safetensors", "adapter_config.json", "trainer_state.json"]
# TRL's tables of completions, one file per step. TRL makes their folder before a run has begun, so the folder itself
# is no sign of a run.
COMPLETIONS = "completions/completions_*.parquet"
TABLES = ["rollouts/step_*.parquet", COMPLETIONS]
# The tokenizer moves with the members, because whoever loads members also loads the tokenizer that lies beside them.
LEFT_BY_A_RUN = [*LEFT_BY_TRAINING, METRICS, TIMES, POPULATION_FILE, COMPLETIONS, "tokenizer*", "chat_template*"]
LEFT_BY_A_RUN += ["special_tokens_map.json", "added_tokens.json", "vocab*", "merges*"]
LEFT_BY_A_RUN += ["README.md", "run.png", "report.html", "plots", "evaluation.*", "_evaluation"]


def _name_folder(args: GRPOConfig) -> Path:
    """TRL's folder for tables of completions if the run logs them, otherwise `output_dir`."""
    return Path(args.output_dir, "completions" if args.log_completions else "").absolute()


@contextmanager
def remove_folders_left_empty(args: GRPOConfig) -> Iterator[None]:
    """
    When the block ends, removes `output_dir`, its parents and TRL's folder for completions, as far as the block has
    made them and left them empty. A process that does not save removes nothing: it makes no folders, and could remove
    a parent that rank 0 has just made, before rank 0 makes the folder in it.
    """
    whole = _name_folder(args)
    absent = [part for part in (whole, *whole.parents) if args.should_save and not part.exists()]
    try:
        yield
    finally:
        # `rmdir` refuses a directory that holds something. The deepest directory comes first.
        for part in absent:
            with suppress(OSError):
                part.rmdir()


def make_folders(args: GRPOConfig) -> None:
    """Makes `output_dir`, and TRL's folder for completions if the run logs them, in a process that saves."""
    if args.should_save:
        _name_folder(args).mkdir(parents=True, exist_ok=True)


class RunDirectory:
    """
    The `output_dir` of one trainer. As a context it locks the directory; the context may be entered again inside
    itself.

    Rank 0 holds the lock; with `save_on_each_node`, the first rank of each node does. Only training needs the lock:
    reading, evaluating and saving to another directory work without it.

    Args:
        args: Names the directory and says which ranks save.
        accelerator: Lets ranks wait for each other.

    Raises:
        `ValueError`: On every rank, if another process trains in this directory, or if
            [`~trl_populora.run.nodes.check_nodes`] refuses it.
        `RuntimeError`: If a process of the run does not start.
    """

    def __init__(self, args: TrainingArguments, accelerator: Accelerator):
        self.args, self.accelerator = args, accelerator
        self._lock: TextIO | None = None
        self._entered = 0
        self._owned: str | None = None  # the directory in which this trainer has trained or saved

    def __enter__(self) -> RunDirectory:
        if not self._entered:
            nodes.wait_for_all(self.args, self.accelerator)
            nodes.check_nodes(self.args, self.accelerator)
            try:
                _refuse(self._take() if self.args.should_save else None)
            except ValueError:
                # This node may have its lock although the directory of another node is in use.
                self._release()
                raise
        self._entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if not self._entered:
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.truncate(0)
            self._lock.close()
            self._lock = None

    def _take(self) -> str | None:
        """
        Locks the directory, or warns if its file system has no locks. Returns a reason if another process has locked
        it.
        """
        root = Path(self.args.output_dir)
        root.mkdir(parents=True, exist_ok=True)
        # The kernel holds the lock, on NFS and Lustre for all hosts. It frees the lock when the process ends, even
        # after kill -9. A file with process number and heartbeat would have to guess: the number means nothing in
        # another container, and a late heartbeat may come from a busy host.
        # `flock` and not `lockf`: a `lockf` lock is lost as soon as this process reads the file and closes it, for
        # example to copy the directory. The file is never deleted. Otherwise one process could lock the deleted file
        # and another a new file of the same name.
        lock = (root / LOCK).open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            with lock:
                return f"{root} is in use by {lock.read()}. Wait for its end, or choose another `output_dir`."
        except OSError as error:
            logger.warning("%s cannot be locked (%s): take care that no other run uses it.", root, error.strerror)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        lock.flush()
        self._lock = lock
        return None

    def claim(self, wanted: str | bool | None) -> str | None:
        """
        Takes the directory for this training. Call it on every rank.

        Args:
            wanted: The value of `resume_from_checkpoint`, as [`~trl_populora.run.checkpoint.choose_checkpoint`] takes
                it.

        Returns:
            The checkpoint to resume from; `None` to start from the first step.

        Raises:
            `ValueError`: If the wanted checkpoint is missing or damaged, or has no optimizer state that this backend
                can load; if the directory holds another run; or if the run in the directory has a later checkpoint
                than the one that `wanted` names. The last two errors are raised on every rank.
        """
        where = self.args.output_dir
        found = choose_checkpoint(wanted, where)
        if found is not None:
            check_optimizer_state(found, self.accelerator)
        _refuse(self._find_obstacle(wanted, found) if self.args.should_save else None)
        # A resume changes the records only in `go_on_from`, after its checkpoint has been loaded.
        if found is None:
            if self.args.should_save:
                set_aside(where)
            self._owned = where
        self.accelerator.wait_for_everyone()
        return found

    def check_own(self) -> None:
        """
        Checks that a save into the directory overwrites no run of another trainer. Afterwards the directory's files
        count as this trainer's own. Call it on every rank.

        Raises:
            `ValueError`: On every rank, if the directory holds a run and this trainer has neither trained nor saved
                there.
        """
        where = self.args.output_dir
        # While it trains a trainer owns its directory, so a callback may save on one rank alone.
        if self._owned != where:
            _refuse(find_earlier_run(where) if self.args.should_save else None)
            self._owned = where

    def go_on_from(self, checkpoint: Path, step: int) -> None:
        """
        Cuts or copies the records so that they end with the checkpoint's `step`. Call it on every rank.

        Call it after the checkpoint is loaded: if the checkpoint cannot be loaded, the records must not change.
        """
        if self.args.should_save:
            _bring_records_to(checkpoint, step, Path(self.args.output_dir))
        self._owned = self.args.output_dir

    def bring_best(self, checkpoint: Path, best: str) -> str | None:
        """
        Brings the best checkpoint so far into the directory, if it lies beside the resumed one. Call it on every rank,
        after [`go_on_from`].

        Args:
            checkpoint: The checkpoint that is resumed.
            best: Name of the best checkpoint.

        Returns:
            Path of the best checkpoint in this directory; `None` if it is in neither place.
        """
        ours, theirs = Path(self.args.output_dir, best), checkpoint.parent / best
        found = any(gather_object([ours.is_dir() or theirs.is_dir()]))
        if self.args.should_save and not ours.is_dir() and theirs.is_dir():
            with write_whole(ours) as unfinished:
                shutil.copytree(theirs, unfinished, dirs_exist_ok=True)
        self.accelerator.wait_for_everyone()
        return str(ours) if found else None

    def _find_obstacle(self, wanted: str | bool | None, found: str | None) -> str | None:
        """Says why this training must not begin in the directory; `None` if it may."""
        where = self.args.output_dir
        if found is None or not _lies_in(found, where):
            # An earlier run in the directory is an obstacle. Two starts move it aside instead: a second `train()`, and
            # `"newest"` if there is no checkpoint.
            may_begin = self._owned == where or (found is None and wanted)
            return None if may_begin else find_earlier_run(where)
        newest = find_newest(where)
        # `found` equals `wanted` only if the user named a checkpoint by its path. Then a later one is an obstacle. For
        # `True` it is none: `found` is the newest checkpoint that is whole on all nodes, and this node may have newer
        # ones.
        if found != wanted or newest is None or _parse_step(Path(newest)) <= _parse_step(Path(found)):
            return None
        return (
            f"{where} went on after {found}, to {newest}. `--resume` goes on from the newest. To branch off at the "
            "earlier one, choose another `output_dir`; it gets a copy of the records up to that checkpoint."
        )


def find_earlier_run(output_dir: str) -> str | None:
    """Looks for an earlier run in a directory. Returns the message that refuses a new run; `None` without a run."""
    if not holds_a_run(output_dir):
        return None
    return (
        f"{output_dir} holds a run. `--resume`, or `train(resume_from_checkpoint=True)`, goes on from its newest "
        "whole checkpoint, if it has one; a new run needs another `output_dir`."
    )


def _refuse(reason: str | None) -> None:
    """Raises an error on every rank if one rank has a reason to refuse. Call it on every rank."""
    if told := next(filter(None, gather_object([reason])), None):
        raise ValueError(told)


def _lies_in(checkpoint: str | Path, output_dir: str | Path) -> bool:
    return Path(checkpoint).resolve().parent == Path(output_dir).resolve()


def holds_a_run(output_dir: str | Path) -> bool:
    """Says whether a run was trained here. Files of an evaluation before any training do not count."""
    root = Path(output_dir)
    trained = any(entry["step"] for entry in read_lines(root / METRICS))
    return trained or any(True for name in LEFT_BY_TRAINING for _ in root.glob(name))


def set_aside(output_dir: str | Path) -> Path | None:
    """
    Moves the files of an earlier run, with its checkpoints, to `_previous-<n>/`. All other files stay.

    Returns:
        `Path` or `None`: The new directory; `None` if no run was trained here.
    """
    root = Path(output_dir)
    if not holds_a_run(root):
        return None
    target = _move([path for name in LEFT_BY_A_RUN for path in sorted(root.glob(name))], root)
    logger.warning("%s held an earlier run, which is in %s now.", root, target)
    return target


def set_evaluations_aside(output_dir: str | Path) -> None:
    """Moves the metrics of an earlier trainer's evaluations, which trained nothing here, to `_previous-<n>/`."""
    root = Path(output_dir)
    target = _move([path for name in (METRICS, TIMES) if (path := root / name).exists()], root)
    logger.warning("%s held evaluations of an earlier trainer, which are in %s now.", root, target)


def _bring_records_to(checkpoint: Path, step: int, output_dir: Path) -> None:
    """
    Cuts the records back to the checkpoint's step. If the checkpoint lies in another directory, copies the checkpoint
    and its directory's records up to this step to `output_dir` instead.
    """
    root = checkpoint.parent
    tables = [path for name in TABLES for path in sorted(root.glob(name))]
    if in_place := _lies_in(checkpoint, output_dir):
        for path in tables:
            if _parse_step(path) > step:
                path.unlink()
        # A later checkpoint can be here only if it is not whole on this or another node: otherwise `claim` refuses.
        if later := [path for path in root.glob(f"{PREFIX}*") if _parse_step(path) > step]:
            _move(later, root)
    else:
        set_aside(output_dir)
        for path in tables:
            if _parse_step(path) <= step:
                copy = output_dir / path.relative_to(root)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
    _bring_left_to(checkpoint, output_dir, in_place)
    for name in (METRICS, TIMES):
        _write_lines(output_dir / name, [entry for entry in read_lines(root / name) if entry["step"] <= step])
    restore_lineage(output_dir, checkpoint / LINEAGE)
    # The checkpoint is copied last. If the copying is cut short, `--resume` finds no checkpoint with half of its
    # records.
    if not in_place:
        with write_whole(output_dir / f"{PREFIX}{step}") as unfinished:
            shutil.copytree(checkpoint, unfinished, dirs_exist_ok=True)


def _bring_left_to(checkpoint: Path, output_dir: Path, in_place: bool) -> None:
    """
    Makes `left/` fit the checkpoint. If the run goes on in the checkpoint's directory, removes the adapters of members
    that left after the checkpoint. Otherwise copies to `output_dir` the adapters of members that left before it.
    """
    root = checkpoint.parent
    gone = {member["adapter"] for member in read_population(checkpoint).get("left", ())}
    for path in root.glob(f"{LEFT}/*"):
        name = path.relative_to(root)
        if in_place and str(name) not in gone:
            shutil.rmtree(path)
        elif not in_place and str(name) in gone:
            shutil.copytree(path, output_dir / name, dirs_exist_ok=True)


def restore_lineage(output_dir: Path, lineage: Path) -> None:
    """Replaces the run's `lineage.jsonl` by the checkpoint's copy, or empties it if the checkpoint has none."""
    _write_lines(output_dir / LINEAGE, read_lines(lineage))


def _parse_step(path: Path) -> int:
    """Reads the step from the name of a checkpoint or a table; 0 for other names."""
    found = re.match(rf"({PREFIX}|step_|completions_)(\d+)", path.name)
    return int(found[2]) if found else 0


def _move(paths: Iterable[Path], root: Path) -> Path:
    """Moves paths below `root` to a new `_previous-<n>/` in `root`, where they keep their relative paths."""
    number = 1
    while (root / ASIDE.format(number)).exists():
        number += 1
    target = root / ASIDE.format(number)
    for path in paths:
        aside = target / path.relative_to(root)
        aside.parent.mkdir(parents=True, exist_ok=True)
        path.rename(aside)
    return target


def _write_lines(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    with write_whole(path) as unfinished:
        unfinished.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
