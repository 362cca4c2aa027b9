"""Starts members from what was trained before: members of a saved population, or ordinary PEFT adapters."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, load_peft_weights

from trl_populora.hub.download import POPULATION, fetch
from trl_populora.lora.checks import check_ordinary_adapter
from trl_populora.lora.convert import fold_into
from trl_populora.lora.members import read_member, unwrap_peft_model, write_member
from trl_populora.options import read_sources
from trl_populora.population.members import PRIOR_SIGMA, ROLES, Population
from trl_populora.run.checkpoint import write_member_file
from trl_populora.run.read import POPULATION_FILE
from trl_populora.run.saved_population import (
    Shape,
    check_one_moment,
    check_pooled,
    check_same_shape,
    warn_of_revision,
)


logger = logging.getLogger(__name__)

ADAPTER = ("adapter_config.json", "adapter_model.*")


def warm_start(
    source: str | Sequence[str] | Mapping[str, str],
    model: torch.nn.Module,
    population: Population,
    shape: Shape,
    pooled_roles: Sequence[str] = (),
) -> None:
    """
    Starts the members from a saved population, or from ordinary PEFT adapters. Call it on every rank.

    Args:
        source: One of four, each by directory or Hub name. Lists and dictionaries may be JSON text.

            - a saved population
            - one adapter for all members
            - a list with an adapter for each member, teachers first; a single agent has one adapter for both roles
            - a dictionary with an adapter for a role, such as `{"student": "runs/sft"}`; the other role starts afresh
        model: The members' model.
        population: The members. Their parents are set, and with a saved population also mu and sigma.
        shape: Base and LoRA settings of the members, which a saved population has to fit.
        pooled_roles: Roles whose members are pooled. They must begin with one adapter, or as members that began so.

    Raises:
        `ValueError`: If a source cannot be read, names unknown roles or has a wrong number of adapters; if a saved
            population has another base or shape, or lacks a role; if an adapter cannot be written as a member; or if
            members that are pooled begin with different adapters.
    """
    source = _parse_source(source)
    if isinstance(source, str):
        root = fetch(source, wanted=(*POPULATION, *ADAPTER))
        # A saved population has its best student at its root, so it looks like an adapter as well. A directory that is
        # neither is read as a population, because the error then names `population.json`.
        if (root / POPULATION_FILE).exists() or not (root / ADAPTER[0]).exists():
            _start_from_population(root, model, population, shape, pooled_roles)
            return
        source = dict.fromkeys(ROLES, source)
    adapters = population.held_adapters
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
        for role in pooled_roles:
            _check_pooled(role, {plan[population.adapter(member.name)] for member in population.role(role)})
    # All sources are found before the first member changes. Each is downloaded once.
    roots = {each: fetch(each, wanted=ADAPTER) for each in dict.fromkeys(plan.values())}
    for name, each in plan.items():
        write_adapter(model, name, roots[each], shape)
    for member in population:
        if (adapter := population.adapter(member.name)) in plan:
            member.parents, member.operator = (plan[adapter],), "warm_start"


def _check_pooled(role: str, adapters: set[str]) -> None:
    """Refuses different adapters for members that are pooled: if their matrices A differ, their mean means nothing."""
    if len(adapters) > 1:
        raise ValueError(
            f"`warm_start` gives the {role}s different adapters ({', '.join(sorted(adapters))}), and `pool_every` "
            "would make their mean, which is of use if they began with one. Name one adapter for all of them, or "
            "set `pool_every` to 0."
        )


def _parse_source(source: str | Sequence[str] | Mapping[str, str]) -> str | Sequence[str] | Mapping[str, str]:
    """Parses `warm_start`, which may be JSON text if it comes from a command line or a YAML file."""
    if isinstance(source, str) and source.lstrip().startswith(("{", "[")):
        try:
            source = json.loads(source)
        except ValueError as error:
            raise ValueError(f"`warm_start` is no JSON: {error}, got {source!r}.") from error
    return read_sources(source)


def write_adapter(model: torch.nn.Module, name: str, root: Path, shape: Shape) -> None:
    """
    Writes an ordinary PEFT adapter into a member. The member's rank may be higher than the adapter's.

    Args:
        model: The members' model.
        name: The member.
        root: Directory of the adapter.
        shape: Base and LoRA settings of the members.

    Raises:
        `ValueError`: If the adapter cannot be written as a member; the message names both.
    """
    try:
        config = PeftConfig.from_pretrained(root)
        check_ordinary_adapter(config)
        factors = fold_into(
            read_member(model, name), unwrap_peft_model(model).peft_config[name], _load_weights(root), config
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"The adapter {str(root)!r} cannot start member {name!r}: {error}") from error
    if config.base_model_name_or_path != shape.base_model:
        logger.warning(
            "%s names the base %r, this trainer's is %r.", root, config.base_model_name_or_path, shape.base_model
        )
    warn_of_revision(root, config.revision, shape)
    write_member(model, name, factors)


def _load_weights(root: Path) -> dict[str, torch.Tensor]:
    """Loads the weights of an adapter in a local directory."""
    # If the file is missing, PEFT would take the directory's path for a Hub name and ask the Hub.
    if not list(root.glob(ADAPTER[1])):
        raise ValueError(f"it has no `{ADAPTER[1]}`.")
    return load_peft_weights(str(root), device="cpu")


def _start_from_population(
    root: Path, model: torch.nn.Module, population: Population, shape: Shape, pooled_roles: Sequence[str]
) -> None:
    """
    Starts the members from those of a saved population, the best of each role first: in a game by mu, in a dataset
    run by what made its best student.

    If a role needs more members than were saved, the saved ones are cloned in turn, again the best first. The first
    member from a source takes over its mu and sigma. Each further member, a clone, takes over mu alone and gets the
    prior's sigma, because its own matches have yet to show how good it is. Where members differ in rank, none starts
    from a source of higher rank.
    """
    saved = check_same_shape(root, shape)
    check_one_moment(root, saved)
    check_pooled(root, saved, pooled_roles)
    # Students come last: a single agent has one adapter for both roles, and it keeps the best student's weights.
    for role in ROLES:
        ranked = sorted((m for m in saved["members"] if m["role"] == role), key=_find_ranking(saved), reverse=True)
        if not ranked and population.role(role):
            raise ValueError(
                f"{root / POPULATION_FILE}: field `members` holds no {role}. Name a population that has both "
                "roles, or an adapter for each role (`{'student': ...}`)."
            )
        taken: Counter[str] = Counter()
        # Members of low rank choose first, because only sources of low rank fit them. Members of higher rank can start
        # from the same sources and from others.
        for member in sorted(population.role(role), key=lambda m: m.settings.get("lora_r", shape.lora["r"])):
            rank = member.settings.get("lora_r", shape.lora["r"])
            fitting = [m for m in ranked if m.get("settings", {}).get("lora_r", saved["lora"]["r"]) <= rank]
            # The source is the best of those that were taken least often. If none fits, `write_adapter` raises.
            source: dict[str, Any] = min(fitting or ranked, key=lambda m: taken[m["name"]])
            adapter, found = population.adapter(member.name), root / source["adapter"]
            if "lora_r" in {*source.get("settings", {}), *member.settings}:  # the two may differ in rank or alpha
                write_adapter(model, adapter, found, shape)
            else:
                write_member_file(model, adapter, found / "adapter_model.safetensors")
            member.mu = source["mu"]
            member.sigma = PRIOR_SIGMA if taken[source["name"]] else source["sigma"]
            taken[source["name"]] += 1
            member.parents = (f"{source['name']}@{source['version']}",)
            member.operator = "warm_start"


def _find_ranking(saved: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """
    Finds by what the members of a saved population are compared; returns a key for `sorted`, the best highest.

    In a game it is mu. In a dataset run the best student is first. The others follow by their mean reward in an
    evaluation of these weights. Without one they follow by mu, or, if they had prompts of their own and so no
    ratings, by their mean reward in training. Members without such a reward are last, and mu decides between equals.
    """
    if not saved.get("train_prompts"):
        return itemgetter("mu")
    figure = None
    if any(member.get("eval_step") == saved["step"] for member in saved["members"]):
        figure = "eval_reward"
    elif saved.get("settings", {}).get("member_prompts") == "own":
        figure = "reward"

    def rank(member: Mapping[str, Any]) -> tuple[bool, float, float]:
        value = None if figure is None else member.get(figure)
        return member["name"] == saved.get("best_student"), -math.inf if value is None else value, member["mu"]

    return rank
