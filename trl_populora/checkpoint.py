"""What a run leaves on disk and how it is picked up again: members, ratings, archive, and whatever decides the next
step.

    members/<name>/    one ordinary PEFT adapter directory per member
    population.json    base model, adapter shape, members with ratings and parents; for readers
    game.json          state of population, matchmaker, archive and evolution; for resuming
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from trl_populora.adapters import weights


if TYPE_CHECKING:
    from trl_populora.populora_trainer import PopuLoRATrainer

FORMAT = 1


def save(trainer: PopuLoRATrainer, directory: str) -> None:
    """Writes members and game to a directory; called on every rank, the main one writes."""
    root, main = Path(directory), trainer.args.should_save
    for name in trainer.population.names:
        weights.save_member(trainer.model_wrapped, name, root / "members" / name, write=main)
    if not main:
        return
    trainer.processing_class.save_pretrained(directory)
    _write_json(root / "population.json", describe(trainer))
    _write_json(root / "game.json", game_state(trainer), indent=None)


def describe(trainer: PopuLoRATrainer) -> dict[str, Any]:
    """The population for people and other programs."""
    config = trainer.model.peft_config[trainer.population.names[0]]
    members = [
        {
            "name": member.name,
            "role": member.role,
            "mu": member.mu,
            "sigma": member.sigma,
            "fitness": trainer.population.fitness(member),
            "age": member.age,
            "born": member.born,
            "version": member.version,
            "operator": member.operator,
            "parents": list(member.parents),
            "adapter": f"members/{member.name}",
        }
        for member in trainer.population
    ]
    return {
        "format": FORMAT,
        "base_model": trainer.base_name,
        "step": trainer.state.global_step,
        "lora": {"r": config.r, "lora_alpha": config.lora_alpha},
        "task_kinds": list(trainer.game.kinds),
        "prompt_style": trainer.game.style,
        "members": members,
    }


def game_state(trainer: PopuLoRATrainer) -> dict[str, Any]:
    """Everything beside weights and optimizer that decides the next step."""
    nouns = {"population": trainer.population, "matchmaker": trainer.matchmaker, "archive": trainer.archive}
    if trainer.evolution is not None:
        nouns["evolution"] = trainer.evolution
    return {"format": FORMAT} | {name: noun.state_dict() for name, noun in nouns.items()}


def load(trainer: PopuLoRATrainer, directory: str) -> None:
    """
    Reads members and game back into a trainer of the same shape.

    Raises:
        `ValueError`: If a file is missing, broken or of another population; the message names it.
    """
    root = Path(directory)
    state = _read_json(root / "game.json")
    for name in trainer.population.names:
        path = root / "members" / name / "adapter_model.safetensors"
        if not path.is_file():
            raise ValueError(f"{path} is missing: {directory} is no checkpoint of this population.")
        weights.write_member(trainer.model, name, load_file(path))
    trainer.population.load_state_dict(state["population"])
    trainer.matchmaker.load_state_dict(state["matchmaker"])
    trainer.archive.load_state_dict(state["archive"])
    if trainer.evolution is not None and "evolution" in state:
        trainer.evolution.load_state_dict(state["evolution"])


def _write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(value, indent=indent) + "\n")
    unfinished.replace(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}). Resume from another checkpoint.") from error
    if state.get("format") != FORMAT:
        raise ValueError(f"{path}: field `format` is {state.get('format')!r}, this version reads {FORMAT}.")
    return state
