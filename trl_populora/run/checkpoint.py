"""Saving a run and picking it up again: whole checkpoints or none, and everything that decides the next step.

A checkpoint holds what the HF `Trainer` writes (optimizer, scheduler, generators, `trainer_state.json`) and

    members/<name>/       one ordinary PEFT adapter directory per member
    population.json       base model, adapter shape, settings, members, step; a resume checks shape and settings by it
    lineage.jsonl         every replacement so far
    archive.parquet       the task archive
    game.json             state of population, matchmaker and features, the archive's coverage; if the run has them,
                          held-out scores
    rank_state_<n>.pt     of one rank: the count of micro-batches, buffered rows and their step, what is not logged yet
                          (metrics, loss)
    whole.json            names and sizes of all these files, number of processes; written last

They are read back in this order: members, `trainer_state.json` (FSDP and DeepSpeed: the members after it), optimizer,
scheduler, then [`load_game`], and at the first update the generators and the loss that is not logged yet.

It is written into `<output_dir>/_unfinished/` and moved into place once every rank is done, so that a run killed at
any moment leaves whole checkpoints and, at most, an unfinished one that nothing picks up. Nodes with an `output_dir`
of their own (`save_on_each_node`) have a checkpoint each, and go on from the newest that is whole on all of them.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase, TrainerState, TrainingArguments
from transformers.trainer_utils import rotate_checkpoints
from trl import GRPOConfig

from trl_populora.files import FORMAT, read_json, write_json
from trl_populora.lora import members as lora_members
from trl_populora.population.members import Population
from trl_populora.run.read import POPULATION_FILE
from trl_populora.run.saved_population import Shape, check_same_shape, check_settings
from trl_populora.step.play import Game
from trl_populora.tasks.archive import TaskArchive, load_archive, save_archive


logger = logging.getLogger(__name__)

PREFIX = "checkpoint-"
UNFINISHED = "_unfinished"  # a leading underscore keeps it out of uploads to the Hub
MANIFEST = "whole.json"
NEWEST = "newest"


def to_resume(wanted: str | bool | None, output_dir: str) -> str | None:
    """
    The checkpoint that `resume_from_checkpoint` means. Collective.

    Args:
        wanted: A checkpoint, `True` for the newest whole one in `output_dir`, or `"newest"` for that one or, where
            there is none, a start from the first step.
        output_dir: The run's directory.

    Returns:
        `str` or `None`: Its path; `None` to start from the first step.

    Raises:
        `ValueError`: If it cannot be resumed, or `True` finds none.
    """
    if wanted is True or wanted == NEWEST:
        found = find_newest_of_all(output_dir)
        if found is None and wanted is True:
            raise ValueError(
                f"`resume_from_checkpoint=True`, but {output_dir} holds no whole checkpoint. Leave it unset to start "
                "afresh."
            )
        return found
    if wanted and (flaw := find_flaw(wanted)):
        raise ValueError(f"Cannot resume from {wanted}: {flaw}.")
    return wanted or None


class Staging:
    """
    Where a checkpoint is written until it is whole.

    Args:
        args: Who saves, and how many checkpoints stay.
        accelerator: Brings the processes together.

    Attributes:
        directory (`str` or `None`): While a checkpoint is written, the folder to use in place of `output_dir`.
    """

    def __init__(self, args: TrainingArguments, accelerator: Accelerator):
        self.args, self.accelerator = args, accelerator
        self.directory: str | None = None

    @contextmanager
    def checkpoint(self, root: Path, state: TrainerState) -> Iterator[Path]:
        """
        Gives the directory to write into, and moves it into place at the end. Collective.

        Args:
            root: The run's directory.
            state: Gives the step. Its `best_model_checkpoint`, which `Trainer` looks for in the folder of the
                unfinished checkpoint, is corrected.

        Raises:
            `RuntimeError`: If it could not be written whole; says why and what to resume from.
        """
        target = root / f"{PREFIX}{state.global_step}"
        unfinished = root / UNFINISHED / target.name
        if self.args.should_save:
            shutil.rmtree(unfinished.parent, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.directory = str(unfinished.parent)
        try:
            yield unfinished
            best = root / f"{PREFIX}{state.best_global_step}"  # Trainer looked for it where this one is written
            state.best_model_checkpoint = str(best) if best == target or best.is_dir() else None
            if self.args.should_save:
                state.save_to_json(str(unfinished / "trainer_state.json"))
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                _move_into_place(unfinished, target, self.accelerator.num_processes)
        # A full disk shows as any of these, by what was being written. Other ranks are not told: they may wait in a
        # collective of the engine's own save, until the launcher sees this process end and ends them, too.
        except (OSError, RuntimeError, SafetensorError) as error:
            reason = f"disk full: {error!s:.300}" if is_disk_full(error, root) else f"{error!s:.300}"
            if self.args.should_save:
                shutil.rmtree(unfinished.parent, ignore_errors=True)
            before = find_newest(str(root))
            raise RuntimeError(
                f"{target} could not be saved ({reason}). "
                + (f"The checkpoint before it, {before}, is whole: " if before else "There is no earlier checkpoint: ")
                + f"make room or set another `output_dir`, then {'resume from it' if before else 'start again'}."
            ) from error
        finally:
            self.directory = None
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            best_checkpoint, limit = state.best_model_checkpoint, self.args.save_total_limit
            rotate_checkpoints(str(root), limit, best_model_checkpoint=best_checkpoint, use_mtime=True)


def find_newest(output_dir: str) -> str | None:
    """
    The newest whole checkpoint of a run, or `None`; everything unfinished or damaged is passed over with a warning.

    Args:
        output_dir: The run's directory.
    """
    return next(_find_whole(Path(output_dir)), None)


def find_newest_of_all(output_dir: str) -> str | None:
    """
    The newest checkpoint that is whole on every node, or `None`. Collective: a run that was killed while the nodes
    moved theirs into place leaves one that only some of them have.
    """
    mine = {Path(path).name: path for path in _find_whole(Path(output_dir))}
    everywhere = set.intersection(*map(set, gather_object([list(mine)])))
    return next((path for name, path in mine.items() if name in everywhere), None)


def _find_whole(root: Path) -> Iterator[str]:
    """Whole checkpoints, newest first."""
    for leftover in sorted(root.glob(f"{UNFINISHED}/{PREFIX}*")):
        logger.warning("Ignoring %s: the run ended while it was being written.", leftover)
    found = [path for path in root.glob(f"{PREFIX}*") if path.name[len(PREFIX) :].isdecimal()]
    for path in sorted(found, key=lambda path: -int(path.name[len(PREFIX) :])):
        flaw = find_flaw(path)
        if flaw is None:
            yield str(path)
        else:
            logger.warning("Ignoring %s: %s.", path, flaw)


def find_flaw(checkpoint: str | Path) -> str | None:
    """What makes a checkpoint unusable, as the end of a sentence; `None` if every file is there in its full size."""
    root = Path(checkpoint)
    if not root.is_dir():
        return "there is no such directory"
    try:
        sizes = json.loads((root / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return f"it lacks {MANIFEST}, so it was never finished"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} is broken ({error!r})"
    for name, size in sizes.items():
        path = root / name
        if not path.is_file():
            return f"the file {name} is missing"
        if path.stat().st_size != size:
            return f"the file {name} has {path.stat().st_size} bytes instead of {size}"
    return None


def is_disk_full(error: BaseException, directory: Path) -> bool:
    """Whether an error means a full disk: torch and safetensors report a failed write without its reason."""
    told = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)
    return told or shutil.disk_usage(directory).free < 2**16


def _move_into_place(unfinished: Path, target: Path, world: int) -> None:
    """Lists and flushes the files of a complete checkpoint, then renames it; an older one of the same step goes."""
    files = sorted(path for path in unfinished.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(unfinished)): path.stat().st_size for path in files}
    write_json(unfinished / MANIFEST, {"format": FORMAT, "processes": world, "files": sizes})
    for path in (*files, unfinished / MANIFEST, unfinished):
        _flush(path)
    replaced = unfinished.with_name("replaced")
    if target.exists():
        target.rename(replaced)
    unfinished.rename(target)
    _flush(target.parent)
    shutil.rmtree(unfinished.parent, ignore_errors=True)


def _flush(path: Path) -> None:
    """Makes a file or directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save(
    directory: str,
    model: torch.nn.Module,
    game: Game,
    tokenizer: PreTrainedTokenizerBase,
    about: dict[str, Any],
    write: bool,
) -> None:
    """
    Writes the members, their table and the archive. Collective.

    Args:
        directory: Where to.
        model: The members' model, wrapped or not.
        game: Its population and archive.
        tokenizer: Saved beside them.
        about: The contents of `population.json`.
        write: Whether this rank writes.
    """
    root = Path(directory)
    for name in game.population.adapters:
        lora_members.save_member(model, name, root / "members" / name, write, about["step"])
    if not write:
        return
    tokenizer.save_pretrained(directory)
    write_json(root / POPULATION_FILE, about)
    save_archive(game.archive, root / "archive.parquet", about["step"])


@dataclass
class RankState:
    """
    What one rank holds between two optimizer steps.

    Args:
        step: TRL's count of micro-batches.
        buffered: Micro-batches that are still to be trained on.
        played: The step that they are of.
        metrics: Metrics that are not logged yet.
        loss, logged: The loss since the last log, and the step of that log.
    """

    step: int
    buffered: list | None
    played: dict[str, Any] | None
    metrics: dict[str, list[float]]
    loss: float
    logged: int


def save_game(
    directory: Path, stateful: Mapping[str, Any], archive: TaskArchive, rank_state: RankState, args: TrainingArguments
) -> None:
    """
    Writes `game.json`, this rank's `rank_state_<n>.pt` and a copy of `lineage.jsonl`.

    Args:
        directory: Where to.
        stateful: Objects with a `state_dict` that is the same on every rank, by their names in `game.json`.
        archive: Its coverage is written here; its tasks have a file of their own.
        rank_state: This rank's.
        args: Who saves, and where the run is.
    """
    torch.save(vars(rank_state), directory / f"rank_state_{args.process_index}.pt")
    if not args.should_save:
        return
    write_json(directory / "game.json", game_state(stateful, archive), indent=None)
    lineage = Path(args.output_dir, "lineage.jsonl")
    if lineage.exists():
        shutil.copyfile(lineage, directory / lineage.name)


def game_state(stateful: Mapping[str, Any], archive: TaskArchive) -> dict[str, Any]:
    """The contents of `game.json`."""
    states = {name: each.state_dict() for name, each in stateful.items()}
    return {"format": FORMAT, "coverage": archive.coverage.state_dict()} | states


def load_members(directory: str, model: torch.nn.Module, population: Population, shape: Shape) -> None:
    """
    Reads the members of a checkpoint back into a population of the same shape. Collective.

    Raises:
        `ValueError`: If a file is missing, broken or of another population; the message names file and field.
    """
    root = Path(directory)
    check_same_shape(root, shape, population.names)
    for name in population.adapters:
        write_member_file(model, name, root / "members" / name / "adapter_model.safetensors")


def write_member_file(model: torch.nn.Module, name: str, path: Path) -> None:
    """
    Puts a saved adapter into a live member. A trainer with vLLM then has to set `_last_loaded_step` to -1.

    Raises:
        `ValueError`: If the file is missing, cut off, or holds other matrices than the member; the message names it.
    """
    try:
        lora_members.write_member(model, name, load_file(path))
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"{path} cannot be read into member {name!r} ({error}).") from error


def load_game(
    directory: str, game: Game, stateful: Mapping[str, Any], shape: Shape, args: GRPOConfig, device: torch.device
) -> RankState:
    """
    Reads the state of the game back. Called on every rank.

    Returns:
        [`RankState`]: This rank's; if another number of processes saved it, with no rows and nothing to log.

    Raises:
        `ValueError`: If a file is missing, broken or of another population; the message names file and field.
    """
    root = Path(directory)
    saved = check_same_shape(root, shape, game.population.names)
    processes = read_json(root / MANIFEST)["processes"]
    same_processes = processes == args.world_size
    check_settings(args, root, saved, same_processes)
    load_stateful(root, stateful, game.archive)
    if (saved.get("settings", {}).get("max_completion_length") or 0) < (args.max_completion_length or 0):
        game.referee.leave_out_long(game.archive)
    if same_processes:
        path = root / f"rank_state_{args.process_index}.pt"
        place = "cpu" if device.type == "cpu" else device  # torch.load knows no `cpu:0`, which several ranks are on
        try:
            return RankState(**torch.load(path, map_location=place, weights_only=True))
        except TypeError as error:
            raise ValueError(
                f"{path} is of an earlier version of this package ({error}). Resume with that version, or start a new "
                "run with `warm_start`."
            ) from error
    logger.warning(
        "%s was saved by %d processes and is resumed by %d: every rank samples anew, so this run will not repeat an "
        "unbroken one. Rows that were still to be trained on are dropped.",
        root,
        processes,
        args.world_size,
    )
    # The count of micro-batches goes on from this step and not from 0: games then begin where `step` is a multiple of
    # `num_iterations`, as evolution events do, and a game has to follow every event.
    done = saved["step"]
    return RankState(done * args.steps_per_generation, buffered=None, played=None, metrics={}, loss=0.0, logged=done)


def load_stateful(root: Path, stateful: Mapping[str, Any], archive: TaskArchive) -> None:
    """Reads `game.json` into the objects that it has states of, and the archive."""
    state = read_json(root / "game.json")
    for field, each in stateful.items():
        if field == "held_out" and field not in state:  # a resume may switch it on
            continue
        try:
            each.load_state_dict(state[field])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{root / 'game.json'}: field `{field}` is missing or broken ({error!r}).") from error
    if not isinstance(state.get("coverage"), dict):
        raise ValueError(f"{root / 'game.json'}: field `coverage` is missing or broken.")
    load_archive(archive, root / "archive.parquet", state["coverage"])
