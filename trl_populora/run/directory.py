"""Whose an `output_dir` is: one run's, which locks it while it trains.

A training that begins where a run lies is refused. One that resumes in its own directory cuts the records back to its
checkpoint. One that resumes in another directory takes a copy of the records, and of the checkpoint, along. A trainer
that trains again moves its earlier records to `_previous-<n>/`.
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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import TrainingArguments

from trl_populora.files import write_whole
from trl_populora.run import nodes
from trl_populora.run.checkpoint import PREFIX, UNFINISHED, find_newest, to_resume
from trl_populora.run.read import LINEAGE, METRICS, POPULATION_FILE, TIMES, read_lines


logger = logging.getLogger(__name__)

LOCK = "_lock"  # leading underscores keep files out of uploads to the Hub
ASIDE = "_previous-{}"

# What a training leaves; checkpoints come first, so that a move that is cut short leaves none to resume from.
LEFT_BY_TRAINING = [f"{PREFIX}*", UNFINISHED, "rollouts", LINEAGE, "members", "archive.parquet"]
LEFT_BY_TRAINING += ["adapter_model.safetensors", "adapter_config.json", "trainer_state.json"]
# One file per step. TRL makes the folder of its own before a run has begun, so the folder itself is no sign of a run.
COMPLETIONS = "completions/completions_*.parquet"
TABLES = ["rollouts/step_*.parquet", COMPLETIONS]
# The tokenizer is the base's; without it members could not be loaded where they are moved to.
LEFT_BY_A_RUN = [*LEFT_BY_TRAINING, METRICS, TIMES, POPULATION_FILE, COMPLETIONS, "tokenizer*", "chat_template*"]
LEFT_BY_A_RUN += ["special_tokens_map.json", "added_tokens.json", "vocab*", "merges*"]
LEFT_BY_A_RUN += ["README.md", "run.png", "report.html", "plots", "evaluation.*", "_evaluation"]


class RunDirectory:
    """
    The `output_dir` of one trainer, and the context in which it is locked. The context may be entered again inside.

    Rank 0 holds the lock, with `save_on_each_node` the first rank of each node; the other ranks are told. Reading,
    evaluating and saving elsewhere need no lock.

    Args:
        args: Names the directory and says which ranks save.
        accelerator: Brings the ranks together.

    Raises:
        `ValueError`: On every rank, if another process trains here.
    """

    def __init__(self, args: TrainingArguments, accelerator: Accelerator):
        self.args, self.accelerator = args, accelerator
        self._lock: TextIO | None = None
        self._entered = 0
        self._trained_in: str | None = None

    def __enter__(self) -> RunDirectory:
        if not self._entered:
            nodes.wait_for_all(self.args, self.accelerator)
            nodes.check_nodes(self.args, self.accelerator)
            try:
                _refuse(self._take() if self.args.should_save else None)
            except ValueError:  # another node's directory is in use
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
        """Locks the directory; returns the reason if another process has."""
        root = Path(self.args.output_dir)
        root.mkdir(parents=True, exist_ok=True)
        # The kernel holds the lock, on NFS and Lustre for all hosts, and frees it when the process ends, however it
        # ends. A file with host, process number and heartbeat would have to guess: numbers mean nothing in another
        # container, and a heart that is late may belong to a busy host. `flock` rather than `lockf`, whose lock is
        # gone as soon as anything in this process has read the file, such as a copy of the directory. The file stays:
        # were it deleted, two processes could lock two files of this name.
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
        Makes the directory this training's, and returns the checkpoint to go on from. Collective.

        Args:
            wanted: As [`~trl_populora.run.checkpoint.to_resume`] takes it.

        Raises:
            `ValueError`: On every rank, if a run lies here that would not go on, or had gone on after the checkpoint.
        """
        where = self.args.output_dir
        found = to_resume(wanted, where)
        _refuse(self._find_obstacle(wanted, found) if self.args.should_save else None)
        if found is None:
            if self.args.should_save:
                set_aside(where)
            self._trained_in = where
        self.accelerator.wait_for_everyone()
        return found

    def go_on_from(self, checkpoint: Path, step: int) -> None:
        """
        Makes the records those of the checkpoint's run up to its `step`. Called on every rank, once the checkpoint is
        loaded: one that is refused leaves the records as they are.
        """
        if self.args.should_save:
            _bring_records_to(checkpoint, step, Path(self.args.output_dir))
        self._trained_in = self.args.output_dir

    def _find_obstacle(self, wanted: str | bool | None, found: str | None) -> str | None:
        where = self.args.output_dir
        if found is None or not _lies_in(found, where):
            # A wish for the newest that finds none moves the records aside.
            may_begin = self._trained_in == where or (found is None and wanted)
            return None if may_begin else why_taken(where)
        newest = find_newest(where)
        # The newest that is whole on all nodes may be older than the newest here.
        if found != wanted or newest is None or _step_of(Path(newest)) <= _step_of(Path(found)):
            return None
        return (
            f"{where} went on after {found}, to {newest}. `--resume` goes on from there; to branch off at the earlier "
            "one choose another `output_dir`, which gets a copy of the records up to it."
        )


def why_taken(output_dir: str) -> str | None:
    """Why a training cannot begin in a directory; `None` if no run lies there."""
    if not holds_a_run(output_dir):
        return None
    return (
        f"{output_dir} holds a run. `--resume`, or `train(resume_from_checkpoint=True)`, goes on with it; a new one "
        "needs another `output_dir`."
    )


def _refuse(reason: str | None) -> None:
    """Raises on every rank what one of them has found. Collective."""
    if told := next(filter(None, gather_object([reason])), None):
        raise ValueError(told)


def _lies_in(checkpoint: str | Path, output_dir: str | Path) -> bool:
    return Path(checkpoint).resolve().parent == Path(output_dir).resolve()


def holds_a_run(output_dir: str | Path) -> bool:
    """Whether a run was trained here; the evaluation of members that have not trained yet is none."""
    root = Path(output_dir)
    trained = any(entry["step"] for entry in read_lines(root / METRICS))
    return trained or any(True for name in LEFT_BY_TRAINING for _ in root.glob(name))


def set_aside(output_dir: str | Path) -> Path | None:
    """
    Moves what an earlier run has left to `_previous-<n>/`, checkpoints included; files of other origin stay.

    Returns:
        `Path` or `None`: Where it is now; `None` if no run was trained here.
    """
    root = Path(output_dir)
    if not holds_a_run(root):
        return None
    target = _move([path for name in LEFT_BY_A_RUN for path in sorted(root.glob(name))], root)
    logger.warning("%s held an earlier run, which is in %s now.", root, target)
    return target


def _bring_records_to(checkpoint: Path, step: int, output_dir: Path) -> None:
    """Cuts the records beside the checkpoint back to it, or copies them with it; the checkpoint's copy comes last."""
    root = checkpoint.parent
    tables = [path for name in TABLES for path in sorted(root.glob(name))]
    if own := _lies_in(checkpoint, output_dir):
        for path in tables:
            if _step_of(path) > step:
                path.unlink()
        # None of these can be resumed: a file is missing, or some node lacks the whole checkpoint.
        if later := [path for path in root.glob(f"{PREFIX}*") if _step_of(path) > step]:
            _move(later, root)
    else:
        set_aside(output_dir)
        for path in tables:
            if _step_of(path) <= step:
                copy = output_dir / path.relative_to(root)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
    for name in (METRICS, TIMES):
        _write_lines(output_dir / name, [entry for entry in read_lines(root / name) if entry["step"] <= step])
    restore_lineage(output_dir, checkpoint / LINEAGE)
    if not own:
        with write_whole(output_dir / f"{PREFIX}{step}") as unfinished:
            shutil.copytree(checkpoint, unfinished, dirs_exist_ok=True)


def restore_lineage(output_dir: Path, lineage: Path) -> None:
    """Puts a checkpoint's copy of `lineage.jsonl` in the place of the run's; absent if nobody had been replaced."""
    _write_lines(output_dir / LINEAGE, read_lines(lineage))


def _step_of(path: Path) -> int:
    found = re.match(rf"({PREFIX}|step_|completions_)(\d+)", path.name)
    return int(found[2]) if found else 0


def _move(paths: Iterable[Path], root: Path) -> Path:
    """Moves what lies below `root` to a new `_previous-<n>/` in it."""
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
