"""Writes checkpoints, whole or not at all, and resumes from them. A checkpoint holds all that decides the next step.

The HF `Trainer` writes optimizer, scheduler, generators and `trainer_state.json`. This file adds:

    members/<name>/       an ordinary PEFT adapter directory per member
    population.json       base model, adapter shape, settings, members, step; a resume compares shape and settings
    lineage.jsonl         every replacement so far; in a dataset run also who joined and who left
    archive.parquet       the task archive, which only the game has
    tokenizer.json, ...   the tokenizer
    game.json             in every run the state of the population;
                          in the game the states of the matchmaker and of the features, the coverage of the archive,
                          and held-out scores if there are any;
                          in a dataset run the members' mean rewards, and the state of halving if there is any
    rank_state_<n>.pt     state of rank n: count of micro-batches, rows still to train on and the step they belong to,
                          metrics and loss that are not logged yet
    whole.json            names and sizes of all other files, the number of processes, the backend, and whether there
                          is optimizer state; written last

A resume first checks that the checkpoint fits ([`check_fit`]). Then it reads in this order: members,
`trainer_state.json`, optimizer, scheduler, then the files of [`load_game`]. Under FSDP and DeepSpeed it reads
`trainer_state.json` before the members. The generators and the loss that is not logged yet are restored just before
the first micro-batch.

A checkpoint is written into `<output_dir>/_unfinished/` and moved into place once every rank is done. So a run that is
killed at any moment leaves whole checkpoints, and at most one that is unfinished or half deleted. No resume takes such
a one. With `save_on_each_node` every node writes a checkpoint into its own `output_dir`. A resume with `True` or
`"newest"` then takes the newest checkpoint that is whole on all nodes.
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
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase, TrainerState, TrainingArguments
from transformers.trainer_utils import rotate_checkpoints
from trl import GRPOConfig

from trl_populora.files import FORMAT, read_json, write_json
from trl_populora.lora import members as lora_members
from trl_populora.population.members import Population
from trl_populora.run.read import POPULATION_FILE, read_population
from trl_populora.run.saved_population import Shape, check_same_prompts, check_same_shape, check_settings
from trl_populora.step.play import Game
from trl_populora.tasks.archive import TaskArchive, load_archive, save_archive
from trl_populora.tasks.dataset import check_archive


logger = logging.getLogger(__name__)

PREFIX = "checkpoint-"
UNFINISHED = "_unfinished"  # uploads to the Hub leave out names with a leading underscore
MANIFEST = "whole.json"
NEWEST = "newest"
# Settings that decide what the loss reads of a row, and how much the row weighs in it.
_DECIDE_LOSS = ("beta", "teacher_beta", "loss_type", "use_vllm", "vllm_importance_sampling_correction")
# Settings that decide how many tokens a task's prompt has, and how many the context leaves for it.
_DECIDE_ROOM = (
    "max_completion_length",
    "vllm_max_model_length",
    "use_vllm",
    "prompt_style",
    "prompt_texts",
    "shots",
    "chat_template_kwargs",
)
# Settings that decide which rows a step has, and how they are cut into micro-batches.
_DECIDE_ROWS = (
    "proposals_per_teacher",
    "attempts_per_task",
    "num_iterations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",  # follows from `replay`, too
)


def choose_checkpoint(wanted: str | bool | None, output_dir: str) -> str | None:
    """
    Finds the checkpoint that `resume_from_checkpoint` asks for. Call it on every rank.

    Args:
        wanted: Path of a checkpoint, `True`, `"newest"` or nothing. `True` and `"newest"` take the newest checkpoint
            in `output_dir` that is whole on all nodes. Where there is none, `"newest"` starts from the first step and
            `True` is an error.
        output_dir: The run's directory.

    Returns:
        `str` or `None`: Path of the checkpoint; `None` to start from the first step.

    Raises:
        `ValueError`: If the checkpoint is damaged or missing, or if `True` finds none.
    """
    if wanted is True or wanted == NEWEST:
        found = find_newest_of_all(output_dir)
        if found is None and wanted is True:
            raise ValueError(
                f"`resume_from_checkpoint=True`, but {output_dir} holds no checkpoint that is whole on all nodes. "
                '`"newest"` instead of `True` starts afresh then.'
            )
        return found
    if wanted and (flaw := find_flaw(wanted)):
        raise ValueError(f"Cannot resume from {wanted}: {flaw}. `True` instead of a path takes the newest whole one.")
    return wanted or None


def name_backend(accelerator: Accelerator) -> str:
    """
    Names the backend, which decides in which form optimizer state is saved: `"DDP"` (also for one process), `"FSDP"`
    or `"ZeRO-<stage>"`.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    return "FSDP" if accelerator.distributed_type == DistributedType.FSDP else "DDP"


def check_optimizer_state(checkpoint: str, accelerator: Accelerator) -> None:
    """
    Checks that a checkpoint has optimizer state that this backend can load. Otherwise a resume would begin with new
    moments and a new schedule.

    Raises:
        `ValueError`: If it has none, or that of another backend.
    """
    manifest, ours = read_json(Path(checkpoint, MANIFEST)), name_backend(accelerator)
    saved = manifest.get("backend")
    if manifest.get("optimizer") and saved == ours:
        return
    flaw = f"was saved under {saved}, and this run uses {ours} (one process counts as DDP). This run cannot read"
    if not manifest.get("optimizer"):
        flaw = "was saved with `save_only_model`: it lacks"
    raise ValueError(
        f"{checkpoint} {flaw} the state of optimizer and schedule. A new run with `warm_start={checkpoint!r}` begins "
        "with its members."
    )


def check_steps_left(checkpoint: str, reached: int, max_steps: int) -> None:
    """
    Checks that a resumed run has steps to train. Warns if it has reached its end already.

    Raises:
        `ValueError`: If the checkpoint is from a later step than the run's last one.
    """
    if max_steps <= 0:  # then `num_train_epochs` decides when the run ends
        return
    if reached > max_steps:
        raise ValueError(
            f"`max_steps={max_steps}`, but {checkpoint} has reached step {reached}. Raise `max_steps` to train on, or "
            "resume an earlier checkpoint in another `output_dir`."
        )
    if reached == max_steps:
        logger.warning("%s has reached the last step, %d: nothing is trained. Raise `max_steps`.", checkpoint, reached)


class Staging:
    """
    The folder in which a checkpoint is written until it is whole.

    Args:
        args: Says which ranks save, and how many checkpoints stay (`save_total_limit`).
        accelerator: Lets ranks wait for each other.

    Attributes:
        directory (`str` or `None`): While a checkpoint is written, the folder that replaces `output_dir`.
    """

    def __init__(self, args: TrainingArguments, accelerator: Accelerator):
        self.args, self.accelerator = args, accelerator
        self.directory: str | None = None

    @contextmanager
    def checkpoint(self, root: Path, state: TrainerState) -> Iterator[Path]:
        """
        Yields the directory to write into, and moves it into place at the end of the block. Call it on every rank.

        Args:
            root: The run's directory.
            state: The trainer's state. Its step names the checkpoint. Its `best_model_checkpoint` is corrected.

        Raises:
            `RuntimeError`: If the checkpoint could not be written whole. The message says why, and what to resume
                from.
        """
        target = root / f"{PREFIX}{state.global_step}"
        unfinished = root / UNFINISHED / target.name
        # Removes what a killed run left. No rank may write before that is done.
        if self.args.should_save:
            shutil.rmtree(unfinished.parent, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.directory = str(unfinished.parent)
        try:
            yield unfinished
            # `Trainer` has looked for the best checkpoint in `_unfinished/`, where it wrote. Whole ones are in `root`.
            best = root / f"{PREFIX}{state.best_global_step}"
            state.best_model_checkpoint = str(best) if best == target or best.is_dir() else None
            if self.args.should_save:
                state.save_to_json(str(unfinished / "trainer_state.json"))
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                facts = {
                    "processes": self.accelerator.num_processes,
                    "backend": name_backend(self.accelerator),
                    "optimizer": not self.args.save_only_model,
                }
                _move_into_place(unfinished, target, facts)
        # A full disk raises any of these, depending on the library that was writing. This rank does not tell the
        # others: they may be waiting inside a collective of FSDP or DeepSpeed. The launcher ends them once it sees
        # this process end.
        except (OSError, RuntimeError, SafetensorError) as error:
            reason = f"disk full: {error!s:.300}" if is_disk_full(error, root) else f"{error!s:.300}"
            if self.args.should_save:
                shutil.rmtree(unfinished.parent, ignore_errors=True)
            before = find_newest(str(root))
            raise RuntimeError(
                f"{target} could not be saved ({reason}). "
                + (f"The checkpoint {before} is whole: " if before else "There is no earlier checkpoint: ")
                + "mend the cause (a full disk needs room or another `output_dir`), then "
                f"{'resume from there' if before else 'start again'}."
            ) from error
        finally:
            self.directory = None
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            best_checkpoint, limit = state.best_model_checkpoint, self.args.save_total_limit
            rotate_checkpoints(str(root), limit, best_model_checkpoint=best_checkpoint, use_mtime=True)


def find_newest(output_dir: str) -> str | None:
    """
    Finds the newest whole checkpoint of a run; `None` without one. Warns of unfinished ones, and of damaged ones that
    are newer.

    Args:
        output_dir: The run's directory.
    """
    return next(_find_whole(Path(output_dir)), None)


def find_newest_of_all(output_dir: str) -> str | None:
    """
    Finds the newest checkpoint that is whole on every node; `None` without one. Call it on every rank.

    If a run is killed while each node moves its own checkpoint into place, only some nodes have the last checkpoint.
    """
    mine = {Path(path).name: path for path in _find_whole(Path(output_dir))}
    everywhere = set.intersection(*map(set, gather_object([list(mine)])))
    return next((path for name, path in mine.items() if name in everywhere), None)


def _find_whole(root: Path) -> Iterator[str]:
    """Yields whole checkpoints, the newest first, and warns of each that it skips."""
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
    """Says what makes a checkpoint unusable, as the end of a sentence; `None` if every file has its full size."""
    root = Path(checkpoint)
    if not root.is_dir():
        return "there is no such directory"
    try:
        sizes = json.loads((root / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return f"it lacks {MANIFEST}, which is written last"
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
    """Says whether an error means a full disk."""
    # torch and safetensors report a failed write without its reason, so the space that is left decides: below 64 KiB
    # the disk counts as full.
    told = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)
    return told or shutil.disk_usage(directory).free < 2**16


def _move_into_place(unfinished: Path, target: Path, facts: Mapping[str, Any]) -> None:
    """
    Moves a complete checkpoint to its final path, where it replaces an older checkpoint of the same step. Before that
    it writes `whole.json`, with the sizes of all files and with `facts`, and flushes all files.
    """
    files = sorted(path for path in unfinished.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(unfinished)): path.stat().st_size for path in files}
    write_json(unfinished / MANIFEST, {"format": FORMAT, **facts, "files": sizes})
    # All files are flushed before the rename. So a checkpoint under its final name has all its bytes, even after a
    # power cut.
    for path in (*unfinished.rglob("*"), unfinished):
        _flush(path)
    replaced = unfinished.with_name("replaced")
    if target.exists():
        target.rename(replaced)
    unfinished.rename(target)
    _flush(target.parent)
    shutil.rmtree(unfinished.parent, ignore_errors=True)


def _flush(path: Path) -> None:
    """Waits until a file or directory is on the disk, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save(
    directory: str,
    model: torch.nn.Module,
    population: Population,
    archive: TaskArchive | None,
    tokenizer: PreTrainedTokenizerBase,
    about: dict[str, Any],
    write: bool,
) -> None:
    """
    Saves the population: adapters, tokenizer, `population.json` and the archive. Call it on every rank.

    Args:
        directory: Where the files go.
        model: The members' model, wrapped or not.
        population: The members.
        archive: The task archive; `None` in a dataset run, which has none.
        tokenizer: Is saved beside the adapters.
        about: The contents of `population.json`.
        write: Whether this rank writes.
    """
    root = Path(directory)
    # Every rank takes part, because sharded weights are gathered from all of them.
    for name in population.held_adapters:
        lora_members.save_member(model, name, root / "members" / name, write, about["step"])
    if not write:
        return
    tokenizer.save_pretrained(directory)
    write_json(root / POPULATION_FILE, about)
    if archive is not None:
        save_archive(archive, root / "archive.parquet", about["step"])


@dataclass
class RankState:
    """
    The state that one rank holds between two optimizer steps.

    Args:
        step: TRL's count of micro-batches.
        buffered: All micro-batches of the last generation, if a later optimizer step still trains on rows of it; else
            `None`.
        played: The step to which the buffered micro-batches belong, as `Played.state_dict` returns it.
        metrics: Metrics that are not logged yet.
        loss: Sum of the loss since the last log.
        logged: Optimizer step of the last log.
    """

    step: int
    buffered: list | None
    played: dict[str, Any] | None
    metrics: dict[str, list[float]]
    loss: float
    logged: int


def save_game(
    directory: Path,
    stateful: Mapping[str, Any],
    archive: TaskArchive | None,
    rank_state: RankState,
    args: TrainingArguments,
) -> None:
    """
    Writes `game.json`, this rank's `rank_state_<n>.pt` and a copy of `lineage.jsonl`.

    Args:
        directory: The checkpoint that is being written.
        stateful: Objects by their names in `game.json`. Their `state_dict` is the same on every rank.
        archive: Its coverage goes into `game.json`. Its tasks have a file of their own. `None` in a dataset run.
        rank_state: State of this rank.
        args: Says which ranks save, and where `lineage.jsonl` is.
    """
    torch.save(vars(rank_state), directory / f"rank_state_{args.process_index}.pt")
    if not args.should_save:
        return
    write_json(directory / "game.json", collect_game_state(stateful, archive), indent=None)
    lineage = Path(args.output_dir, "lineage.jsonl")
    if lineage.exists():
        shutil.copyfile(lineage, directory / lineage.name)


def collect_game_state(stateful: Mapping[str, Any], archive: TaskArchive | None) -> dict[str, Any]:
    """Collects the contents of `game.json`."""
    states = {name: each.state_dict() for name, each in stateful.items()}
    coverage = {} if archive is None else {"coverage": archive.coverage.state_dict()}
    return {"format": FORMAT, **coverage} | states


def check_fit(
    directory: str,
    population: Population,
    shape: Shape,
    args: GRPOConfig,
    prompts: Mapping[str, Any] | None = None,
) -> None:
    """
    Checks that a trainer can resume a checkpoint, and warns of settings that change. Call it before anything is
    loaded: a trainer whose resume is refused may train on its own members afterwards.

    Args:
        directory: The checkpoint.
        population: The trainer's members.
        shape: The trainer's base and LoRA settings.
        args: Settings of the run that resumes.
        prompts: In a dataset run, number and digest of the prompts in `train_dataset`.

    Raises:
        `ValueError`: If the checkpoint has another population, another base, other prompts or settings that a resume
            cannot change, or if a file is missing or broken. The message names the file.
    """
    root = Path(directory)
    membership = _read_membership(root, population)
    names = [member["name"] for member in membership["members"]] if membership else population.names
    saved = check_same_shape(root, shape, names)
    check_same_prompts(root, saved, prompts)
    check_settings(args, root, saved, read_json(root / MANIFEST)["processes"])


def load_members(directory: str, model: torch.nn.Module, population: Population) -> None:
    """
    Reads the members of a checkpoint into a population of the same shape. Call it on every rank.

    Raises:
        `ValueError`: If a file is missing, broken or from another population. The message names the file.
    """
    root = Path(directory)
    if membership := _read_membership(root, population):
        population.load_state_dict(membership)
    for member in read_population(root)["members"]:
        lora_members.set_rank(model, population.adapter(member["name"]), member.get("settings", {}))
    for name in population.held_adapters:
        write_member_file(model, name, root / "members" / name / "adapter_model.safetensors")


def _read_membership(root: Path, population: Population) -> dict[str, Any] | None:
    """
    Reads which members a checkpoint has, because in a population without teachers members may have joined or left
    since the run began. `None` for a population with teachers.
    """
    if population.teachers:
        return None
    state = read_json(root / "game.json").get("population", {})
    if (seats := state.get("seats")) is None:
        raise ValueError(f"{root / 'game.json'}: field `population.seats` is missing.")
    if seats != len(population.adapters):
        raise ValueError(
            f"{root / 'game.json'}: the run has {seats} seats, this trainer has {len(population.adapters)}. "
            "Resume with the saved `students` and `max_members`, or start a new run with `warm_start` to change them."
        )
    return state


def write_member_file(model: torch.nn.Module, name: str, path: Path) -> None:
    """
    Puts a saved adapter into a live member. With vLLM, set the trainer's `_last_loaded_step` to -1 afterwards.

    Raises:
        `ValueError`: If the file is missing, cut off, or has other matrices than the member. The message names
            the file.
    """
    try:
        lora_members.write_member(model, name, load_file(path))
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"{path} cannot be read into member {name!r} ({error}).") from error


def load_game(
    directory: str,
    game: Game | None,
    stateful: Mapping[str, Any],
    args: GRPOConfig,
    device: torch.device,
) -> RankState:
    """
    Reads the state of the game, and the archive. Call it on every rank. A dataset run has no `game`.

    Returns:
        [`RankState`]: State of this rank. If another number of processes saved the checkpoint, the state has no
            buffered rows and nothing to log. If a step has other rows or micro-batches now, or another loss, the state
            has no buffered rows.

    Raises:
        `ValueError`: If `population.json`, `game.json`, this rank's state or the archive is missing or broken, or if
            the checkpoint has a file of another version. The message names the file.
    """
    root = Path(directory)
    saved = read_population(root)
    processes = read_json(root / MANIFEST)["processes"]
    load_stateful(root, stateful, None if game is None else game.archive)
    given, ours = saved.get("settings", {}), vars(args) | args.member_values
    if game is not None:
        _check_archive(root, game, any(name in given and given[name] != ours[name] for name in _DECIDE_ROOM))
    if processes == args.world_size:
        path = root / f"rank_state_{args.process_index}.pt"
        # With several ranks on one CPU the device is `cpu:0`, a name that `torch.load` does not know.
        place = "cpu" if device.type == "cpu" else device
        try:
            state = RankState(**torch.load(path, map_location=place, weights_only=True))
        except torch.OutOfMemoryError:  # the device is full; the file may be whole
            raise
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise ValueError(
                f"{path} is missing or cannot be read ({error!s:.200}). Resume an earlier checkpoint, or start a new "
                f"run with `warm_start={directory!r}`."
            ) from error
        except TypeError as error:
            raise ValueError(
                f"{path} is of another version of this package ({error}). Resume with that version, or start a new "
                "run with `warm_start`."
            ) from error
        changed = [name for name in (*_DECIDE_LOSS, *_DECIDE_ROWS) if name in given and given[name] != ours[name]]
        if changed and state.buffered is not None:
            told = ", ".join(f"`{name}`" for name in changed)
            logger.warning("%s has rows that were to be trained on with another %s. They are dropped.", root, told)
            state.buffered = state.played = None
        # A game is played whenever this count reaches a multiple of `num_iterations` steps. Evolution happens only at
        # such a multiple, because a game must follow it. A count from 0 could put games elsewhere.
        state.step = (
            state.step
            * args.gradient_accumulation_steps
            // given.get("gradient_accumulation_steps", args.gradient_accumulation_steps)
        )
        return state
    logger.warning(
        "%s was saved by %d processes and is resumed by %d. Every rank samples anew, so this run differs from one "
        "that was never interrupted. Rows that were to be trained on again are dropped.",
        root,
        processes,
        args.world_size,
    )
    done = saved["step"]
    counted = done * args.gradient_accumulation_steps
    return RankState(counted, buffered=None, played=None, metrics={}, loss=0.0, logged=done)


def _check_archive(root: Path, game: Game, other_room: bool) -> None:
    """
    Checks that no task of a checkpoint's archive is held out. If `other_room`, a prompt has more or fewer tokens than
    in the saved run, or more or less room for them; then archived tasks that no longer fit are left out.
    """
    # The trainer has checked the given tasks, but the checkpoint's tasks have taken their place.
    if shared := [task for task in game.archive if task in game.referee.held_out]:
        raise ValueError(
            f"{root} has {len(shared)} of its {len(game.archive)} archived tasks in common with `eval_dataset`, so a "
            "high score would prove nothing. Resume with the saved run's `eval_dataset`, or take these tasks out of "
            f"it. The first is {shared[0].program!r:.200}."
        )
    if other_room:
        game.referee.leave_out_long(game.archive)
        try:
            check_archive(game.archive, game.referee.kinds, bool(game.population.teachers))
        except ValueError as error:
            raise ValueError(
                f"{root}: too few of its archived tasks fit into the context. Resume with the saved run's "
                f"{', '.join(f'`{name}`' for name in _DECIDE_ROOM)}, or start a new run with `warm_start`."
            ) from error


def load_stateful(root: Path, stateful: Mapping[str, Any], archive: TaskArchive | None) -> None:
    """
    Restores each object from its state in `game.json`; only the state of `held_out` may be missing. Restores the
    archive's tasks from `archive.parquet`, and its coverage from `game.json`.
    """
    state = read_json(root / "game.json")
    for field, each in stateful.items():
        # A resumed run may evaluate although the saved one did not.
        if field == "held_out" and field not in state:
            continue
        try:
            each.load_state_dict(state[field])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{root / 'game.json'}: field `{field}` is missing or broken ({error!r}).") from error
    if archive is None:
        return
    if not isinstance(state.get("coverage"), dict):
        raise ValueError(f"{root / 'game.json'}: field `coverage` is missing or broken.")
    load_archive(archive, root / "archive.parquet", state["coverage"])
