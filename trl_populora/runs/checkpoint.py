"""Saving a run and picking it up again: whole checkpoints or none, and everything that decides the next step.

A checkpoint holds what the HF `Trainer` writes (optimizer, scheduler, generators, `trainer_state.json`) and

    members/<name>/       one ordinary PEFT adapter directory per member
    population.json       base model, adapter shape, members with ratings and parents; for readers
    lineage.jsonl         every replacement so far
    archive.parquet       the task archive
    game.json             state of population, matchmaker, the archive's coverage, and held-out scores if there are any
    rank_state_<n>.pt     what one rank has buffered when a save falls between two generations
    whole.json            names and sizes of all these files; written last

It is written into `<output_dir>/_unfinished/` and moved into place once every rank is done, so that a run killed at
any moment leaves whole checkpoints and, at most, an unfinished one that nothing picks up. Nodes with an `output_dir` of
their own (`save_on_each_node`) have a checkpoint each, and go on from the newest that is whole on all of them.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.trainer_utils import rotate_checkpoints
from trl import GRPOTrainer

from trl_populora.runs import records
from trl_populora.adapters import weights
from trl_populora.runs.interrupts import StopAtSignals
from trl_populora.runs.nodes import check_nodes
from trl_populora.step.played import Played
from trl_populora.runs.saved_population import FORMAT, check_same_shape, check_settings, describe, read_json, write_json
from trl_populora.tasks.archive_table import load_archive, save_archive


if TYPE_CHECKING:
    from trl_populora.populora_trainer import PopuLoRATrainer

logger = logging.getLogger(__name__)

PREFIX = "checkpoint-"
UNFINISHED = "_unfinished"  # a leading underscore keeps it out of uploads to the Hub
WHOLE = "whole.json"


class ResumableTrainer(GRPOTrainer):
    """
    What a population adds to the checkpoints of [`~trl.GRPOTrainer`].

    - `_get_output_dir`, `_save_checkpoint`: a checkpoint is written aside and moved into place when it is whole.
    - `save_model`, `_save`: one ordinary PEFT directory per member, and `population.json`; no base weights are gathered.
    - `_load_best_model`: the whole population of the checkpoint with the best `metric_for_best_model`.
    - `_load_from_checkpoint`, `_load_optimizer_and_scheduler`, `_load_rng_state`: members, then the state of the game
      (on every backend; DeepSpeed brings its members itself), then the loss that is not logged yet.
    - `train`: `resume_from_checkpoint=True` takes the newest checkpoint that is whole; Ctrl-C and SIGTERM leave one.
    """

    _aside: str | None = None
    _pending_loss: tuple[float, int] | None = None

    def train(self, resume_from_checkpoint=None, **kwargs):
        check_nodes(self)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_of_all(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"`resume_from_checkpoint=True`, but {self.args.output_dir} holds no whole checkpoint. Leave it "
                    "unset to start afresh."
                )
        elif resume_from_checkpoint and (flaw := find_flaw(resume_from_checkpoint)):
            raise ValueError(f"Cannot resume from {resume_from_checkpoint}: {flaw}.")
        with StopAtSignals(self.callback_handler, self.args, newest):
            return super().train(resume_from_checkpoint=resume_from_checkpoint or None, **kwargs)

    def _get_output_dir(self, trial=None):
        return self._aside or super()._get_output_dir(trial)

    def _save_checkpoint(self, model, trial):
        root = Path(self._get_output_dir(trial))
        target = root / f"{PREFIX}{self.state.global_step}"
        unfinished = root / UNFINISHED / target.name
        if self.args.should_save:
            shutil.rmtree(unfinished.parent, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._aside = str(unfinished.parent)
        try:
            super()._save_checkpoint(model, trial)
            self._name_best_checkpoint(root, target, unfinished)
            save_game(self, unfinished)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                _move_into_place(unfinished, target, self.accelerator.num_processes)
        # A full disk shows as any of these, by what was being written. Other ranks are not told: they may sit in any
        # collective of the engine's own save, which only the end of this process, and the launcher, can break.
        except (OSError, RuntimeError, SafetensorError) as error:
            reason = f"disk full: {error!s:.300}" if is_disk_full(error, root) else f"{error!s:.300}"
            if self.args.should_save:
                shutil.rmtree(unfinished.parent, ignore_errors=True)
            before = newest(str(root))
            raise RuntimeError(
                f"{target} could not be saved ({reason}). "
                + (f"The checkpoint before it, {before}, is whole: " if before else "There is no earlier checkpoint: ")
                + f"make room or set another `output_dir`, then {'resume from it' if before else 'start again'}."
            ) from error
        finally:
            self._aside = None
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(root), self.args.save_total_limit, best_model_checkpoint=best, use_mtime=True)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(target))  # the call from within, before it was whole, did nothing

    def _name_best_checkpoint(self, root: Path, target: Path, unfinished: Path) -> None:
        """Trainer looked for the best checkpoint where this one is being written, not where whole ones lie."""
        best = root / f"{PREFIX}{self.state.best_global_step}"
        self.state.best_model_checkpoint = str(best) if best == target or best.is_dir() else None
        if self.args.should_save:
            self.state.save_to_json(str(unfinished / "trainer_state.json"))

    def _load_best_model(self):
        best = self.state.best_model_checkpoint
        logger.info("Taking the population of %s (%s).", best, self.state.best_metric)
        load_members(self, best)
        load_nouns(self, Path(best))

    def save_model(self, output_dir=None, _internal_call=False):
        # Not TRL's: under transformers 5.17 it calls `_save` on the main rank alone, but ZeRO and FSDP read together.
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir=None, state_dict=None):
        save(self, output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        load_members(self, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint):
        if self.args.device.type == "cpu":
            # With several CPU processes it is "cpu:0", to which transformers 5.17 (vLLM's) would load, and torch cannot.
            self.args.__dict__["_setup_devices"] = torch.device("cpu")
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            load_game(self, checkpoint)

    def _load_rng_state(self, checkpoint):
        super()._load_rng_state(checkpoint)
        if self._pending_loss is not None:
            self._tr_loss += self._pending_loss[0]
            self._globalstep_last_logged = self._pending_loss[1]
            self._pending_loss = None


def newest(output_dir: str) -> str | None:
    """
    The newest whole checkpoint of a run, or `None`; everything unfinished or damaged is passed over with a warning.

    Args:
        output_dir (`str`): The run's directory.
    """
    return next(_whole(Path(output_dir)), None)


def newest_of_all(output_dir: str) -> str | None:
    """
    The newest checkpoint that is whole on every node, or `None`. Collective: a run that was killed while the nodes moved
    theirs into place leaves one that only some of them have.
    """
    mine = {Path(path).name: path for path in _whole(Path(output_dir))}
    everywhere = set.intersection(*map(set, gather_object([list(mine)])))
    return next((path for name, path in mine.items() if name in everywhere), None)


def _whole(root: Path) -> Iterator[str]:
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
        sizes = json.loads((root / WHOLE).read_text())["files"]
    except FileNotFoundError:
        return f"it lacks {WHOLE}, so it was never finished"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{WHOLE} is broken ({error!r})"
    for name, size in sizes.items():
        path = root / name
        if not path.is_file():
            return f"the file {name} is missing"
        if path.stat().st_size != size:
            return f"the file {name} has {path.stat().st_size} bytes instead of {size}"
    return None


def is_disk_full(error: BaseException, directory: Path) -> bool:
    """Whether an error means so: torch and safetensors report a failed write without its reason."""
    told = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)
    return told or shutil.disk_usage(directory).free < 2**16


def _move_into_place(unfinished: Path, target: Path, world: int) -> None:
    """Lists and flushes the files of a complete checkpoint, then renames it; an older one of the same step goes."""
    files = sorted(path for path in unfinished.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(unfinished)): path.stat().st_size for path in files}
    write_json(unfinished / WHOLE, {"format": FORMAT, "processes": world, "files": sizes})
    for path in (*files, unfinished / WHOLE, unfinished):
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


def save(trainer: PopuLoRATrainer, directory: str) -> None:
    """Writes the members and their table to a directory; called on every rank, the main one writes."""
    root, main = Path(directory), trainer.args.should_save
    for name in trainer.population.adapters:
        weights.save_member(trainer.model_wrapped, name, root / "members" / name, write=main)
    if not main:
        return
    trainer.processing_class.save_pretrained(directory)
    write_json(root / "population.json", describe(trainer))
    save_archive(trainer.archive, root / "archive.parquet")


def save_game(trainer: PopuLoRATrainer, directory: Path) -> None:
    """Writes what decides the next step beside members and optimizer: the nouns, and every rank's buffered rows."""
    torch.save(_rank_state(trainer), directory / f"rank_state_{trainer.args.process_index}.pt")
    if not trainer.args.should_save:
        return
    write_json(directory / "game.json", game_state(trainer), indent=None)
    lineage = Path(trainer.args.output_dir, "lineage.jsonl")
    if lineage.exists():
        shutil.copyfile(lineage, directory / lineage.name)


def game_state(trainer: PopuLoRATrainer) -> dict[str, Any]:
    """The nouns that are the same on every rank; the tasks of the archive stand in its own file."""
    return {
        "format": FORMAT,
        "population": trainer.population.state_dict(),
        "matchmaker": trainer.matchmaker.state_dict(),
        "coverage": trainer.archive.coverage.state_dict(),
    } | ({} if trainer.held_out is None else {"held_out": trainer.held_out.state_dict()})


def _rank_state(trainer: PopuLoRATrainer) -> dict[str, Any]:
    """Position between two generations, rows that are still to be trained on, and metrics that are not logged yet."""
    between = trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) != 0
    return {
        "step": trainer._step,
        "buffered": trainer._buffered_inputs if between else None,
        "played": trainer.played.state_dict() if between else None,
        "metrics": {name: list(map(float, values)) for name, values in trainer._metrics["train"].items()},
        "loss": float(trainer._tr_loss),
        "logged": trainer._globalstep_last_logged,
    }


def load_members(trainer: PopuLoRATrainer, directory: str) -> None:
    """
    Reads the members of a checkpoint back into a trainer of the same shape.

    Raises:
        `ValueError`: If a file is missing, broken or of another population; the message names file and field.
    """
    root = Path(directory)
    check_same_shape(trainer, root / "population.json", same_members=True)
    for name in trainer.population.adapters:
        write_member_file(trainer, name, root / "members" / name / "adapter_model.safetensors")


def write_member_file(trainer: PopuLoRATrainer, name: str, path: Path) -> None:
    """
    Puts a saved adapter into a live member.

    Raises:
        `ValueError`: If the file is missing, cut off, or holds other matrices than the member; the message names it.
    """
    try:
        weights.write_member(trainer.model_wrapped, name, load_file(path))
        trainer._last_loaded_step = -1  # vLLM may have generated earlier in this step
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"{path} cannot be read into member {name!r} ({error}).") from error


def load_game(trainer: PopuLoRATrainer, directory: str) -> None:
    """
    Reads the state of the game back, and takes the run's records back to the checkpoint. Called on every rank.

    Raises:
        `ValueError`: If a file is missing, broken or of another population; the message names file and field.
    """
    root = Path(directory)
    saved = check_same_shape(trainer, root / "population.json", same_members=True)
    same_processes = read_json(root / WHOLE)["processes"] == trainer.accelerator.num_processes
    check_settings(trainer, root / "population.json", saved, same_processes)
    state = load_nouns(trainer, root)
    if not isinstance(state.get("coverage"), dict):
        raise ValueError(f"{root / 'game.json'}: field `coverage` is missing or broken.")
    load_archive(trainer.archive, root / "archive.parquet", state["coverage"])
    if (saved.get("settings", {}).get("max_completion_length") or 0) < (trainer.args.max_completion_length or 0):
        trainer.game.referee.leave_out_long(trainer.archive)
    _load_rank_state(trainer, root / f"rank_state_{trainer.args.process_index}.pt")
    if trainer.args.should_save:
        output_dir = Path(trainer.args.output_dir)
        if root.resolve().parent != output_dir.resolve():  # the records there are of a run that does not go on
            records.set_aside(output_dir)
        records.take_back(output_dir, trainer.state.global_step, root / "lineage.jsonl")


def load_nouns(trainer: PopuLoRATrainer, root: Path) -> dict[str, Any]:
    """Ratings, matchmaker and held-out scores of a checkpoint; returns what its `game.json` holds."""
    state = read_json(root / "game.json")
    nouns: dict[str, Any] = {"population": trainer.population, "matchmaker": trainer.matchmaker}
    if trainer.held_out is not None and "held_out" in state:  # a run may start to evaluate when it is resumed
        nouns["held_out"] = trainer.held_out
    for field, noun in nouns.items():
        try:
            noun.load_state_dict(state[field])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{root / 'game.json'}: field `{field}` is missing or broken ({error!r}).") from error
    return state


def _load_rank_state(trainer: PopuLoRATrainer, path: Path) -> None:
    processes = read_json(path.parent / WHOLE)["processes"]
    if processes != trainer.accelerator.num_processes:
        logger.warning(
            "%s was saved by %d processes and is resumed by %d: every rank samples anew, so this run will not repeat "
            "an unbroken one. Rows that were still to be trained on are dropped.",
            path.parent,
            processes,
            trainer.accelerator.num_processes,
        )
        return
    state = torch.load(path, map_location=trainer.accelerator.device, weights_only=True)
    trainer._step, trainer._buffered_inputs = state["step"], state["buffered"]
    if state["played"] is not None:
        trainer.played = Played.from_state(state["played"])
    trainer._metrics["train"].update(state["metrics"])
    trainer._pending_loss = state["loss"], state["logged"]
