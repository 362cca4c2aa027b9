"""Starting from what was trained before: the members of a saved population, or ordinary PEFT adapters."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, load_peft_weights

from trl_populora.hub.download import POPULATION, fetch
from trl_populora.lora.checks import check_ordinary_adapter
from trl_populora.lora.convert import fold_into
from trl_populora.lora.members import peft_model, read_member, write_member
from trl_populora.population.members import PRIOR_SIGMA, ROLES, Population
from trl_populora.run.checkpoint import write_member_file
from trl_populora.run.read import POPULATION_FILE
from trl_populora.run.saved_population import Shape, check_one_moment, check_same_shape


logger = logging.getLogger(__name__)

ADAPTER = ("adapter_config.json", "adapter_model.*")


def warm_start(
    source: str | Sequence[str] | Mapping[str, str], model: torch.nn.Module, population: Population, shape: Shape
) -> None:
    """
    Starts from the members of a saved population, or from ordinary PEFT adapters. Collective.

    Args:
        source: Directory or Hub name of a saved population, or of one adapter for all members; or of an adapter for
            each member, teachers first; or of one for a role, `{"student": "runs/sft"}`; the other role starts afresh.
            List and dictionary may be JSON text.
        model: The members' model.
        population: The members.
        shape: What saved populations have to fit.

    Raises:
        `ValueError`: If a source cannot be read, was trained on another base, or cannot be written as a member.
    """
    source = _parse_source(source)
    if isinstance(source, str):
        root = fetch(source, wanted=(*POPULATION, *ADAPTER))
        if (root / POPULATION_FILE).exists() or not (root / ADAPTER[0]).exists():
            _start_from_population(root, model, population, shape)
            return
        source = dict.fromkeys(ROLES, source)
    adapters = population.adapters
    if isinstance(source, Mapping):
        if unknown := sorted(source.keys() - set(ROLES)):
            raise ValueError(f"`warm_start` names the roles {', '.join(unknown)}; there are {', '.join(ROLES)}.")
        plan = {population.adapter(m.name): source[m.role] for m in population if m.role in source}
    elif len(source) != len(adapters):
        raise ValueError(
            f"`warm_start` lists {len(source)} adapters for {len(adapters)} members ({', '.join(adapters)}). Name one "
            "for each, one for a role (`{'student': ...}`), or one for all."
        )
    else:
        plan = dict(zip(adapters, source, strict=True))
    roots = {each: fetch(each, wanted=ADAPTER) for each in dict.fromkeys(plan.values())}
    for name, each in plan.items():
        _write_adapter(model, name, roots[each], shape)
    for member in population:
        if (adapter := population.adapter(member.name)) in plan:
            member.parents, member.operator = (plan[adapter],), "warm_start"


def _parse_source(source: str | Sequence[str] | Mapping[str, str]) -> str | Sequence[str] | Mapping[str, str]:
    """What a config, a YAML file or a command line may hold."""
    if not (isinstance(source, str) and source.lstrip().startswith(("{", "["))):
        return source
    try:
        return json.loads(source)
    except ValueError as error:
        raise ValueError(f"`warm_start` is no JSON: {error}, got {source!r}.") from error


def _write_adapter(model: torch.nn.Module, name: str, root: Path, shape: Shape) -> None:
    try:
        config = PeftConfig.from_pretrained(root)
        check_ordinary_adapter(config)
        factors = fold_into(read_member(model, name), peft_model(model).peft_config[name], _load_weights(root), config)
    except (OSError, ValueError) as error:
        raise ValueError(f"The adapter {str(root)!r} cannot start member {name!r}: {error}") from error
    if config.base_model_name_or_path != shape.base_model:
        logger.warning(
            "%s names the base %r, this trainer's is %r.", root, config.base_model_name_or_path, shape.base_model
        )
    write_member(model, name, factors)


def _load_weights(root: Path) -> dict[str, torch.Tensor]:
    if not list(root.glob(ADAPTER[1])):  # PEFT would ask the Hub for it
        raise ValueError(f"it has no `{ADAPTER[1]}`.")
    return load_peft_weights(str(root), device="cpu")


def _start_from_population(root: Path, model: torch.nn.Module, population: Population, shape: Shape) -> None:
    """
    The best members of each role take the first slots and keep their ratings. Where there are more slots than saved
    members, the best are cloned in turn; a clone keeps mu and starts with the prior's sigma, to be found out. A single
    agent starts from the best student.
    """
    saved = check_same_shape(root, shape)
    check_one_moment(root, saved)
    for role in ROLES:
        ranked = sorted((m for m in saved["members"] if m["role"] == role), key=lambda m: -m["mu"])
        if not ranked and population.role(role):
            raise ValueError(f"{root / POPULATION_FILE}: field `members` holds no {role}.")
        for slot, member in enumerate(population.role(role)):
            source: dict[str, Any] = ranked[slot % len(ranked)]
            adapter = population.adapter(member.name)
            write_member_file(model, adapter, root / source["adapter"] / "adapter_model.safetensors")
            member.mu = source["mu"]
            member.sigma = source["sigma"] if slot < len(ranked) else PRIOR_SIGMA
            member.parents = (f"{source['name']}@{source['version']}",)
            member.operator = "warm_start"
