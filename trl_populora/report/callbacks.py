"""Sends tables and alerts of a run to W&B and trackio while it trains."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from trl_populora.run.read import EVALUATION, LINEAGE, classify_log, read_lines


logger = logging.getLogger(__name__)

# The trackers that show tables. Both name the functions alike: `Table(columns=..., data=...)` and `log({...})`.
TRACKERS = ("wandb", "trackio")

# Columns of the table `population`.
MEMBER = ("step", "name", "role", "mu", "sigma", "held_out", "age", "born", "version", "operator", "parents")
# The same in a dataset run, whose members have rewards and no solve rate.
PROMPT_MEMBER = tuple(
    each for name in MEMBER for each in (("reward", "eval_reward") if name == "held_out" else (name,))
)
# Columns of the tables `births` and `lineage`.
BIRTH = ("step", "role", "child", "replaced", "parents", "operator", "strength", "mu", "cosine")
INDIVIDUAL = ("member", "role", "born", "replaced", "generation", "parents", "operator", "mu")


def alert(report_to: Sequence[str], title: str, text: str) -> None:
    """
    Sends a warning to the trackers, which may pass it on by mail, Slack or a webhook. If a tracker fails, the log says
    so and the run goes on.
    """
    for name in _choose_trackers(report_to):
        tracker = importlib.import_module(name)
        try:
            (tracker.run if name == "wandb" else tracker).alert(title, text, level=tracker.AlertLevel.WARN)
        except Exception as error:
            logger.warning("The alert %r did not reach %s (%s).", title, name, error)


def _choose_trackers(report_to: Sequence[str]) -> list[str]:
    """Picks from the names in `report_to` those of trackers that show tables."""
    return [name for name in TRACKERS if name in report_to]


class TrackerTables(TrainerCallback):
    """
    A callback that sends the tables `population`, `births` and `lineage` to W&B and trackio.

    It sends them when a member was replaced, with every evaluation, and at the end. Until somebody is born, joins or
    leaves, it sends `population` alone. The trainer logs the curves, and TRL the table `completions`.

    Args:
        describe: Returns the contents of `population.json`.
    """

    def __init__(self, describe: Callable[[], dict[str, Any]]):
        self.describe = describe
        self._sent = -1  # step of the last tables

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs, wanted = logs or {}, _choose_trackers(args.report_to)
        if not wanted or not state.is_world_process_zero:
            return
        # The summary at the end often comes right after an evaluation, which has just sent the same tables.
        ended = "train_loss" in logs and self._sent < state.global_step
        if not (logs.get("evolve/replaced") or ended or classify_log(logs) == EVALUATION):
            return
        self._sent = step = state.global_step
        members = self.describe()["members"]
        columns = PROMPT_MEMBER if "reward" in members[0] else MEMBER
        now = [_make_row({"step": step, **member}, columns) for member in members]
        tables: dict[str, tuple] = {"population": (columns, now)}
        # At step 0 nobody has been born yet. A `lineage.jsonl` that is there belongs to an earlier run.
        births = read_lines(Path(args.output_dir, LINEAGE)) if step else []
        if births:
            tables["births"] = (BIRTH, [_make_row(event, BIRTH) for event in births])
            family = list_family(members, births)
            tables["lineage"] = (INDIVIDUAL, [_make_row(each, INDIVIDUAL) for each in family])
        for tracker in map(importlib.import_module, wanted):
            shown = {name: tracker.Table(columns=[*columns], data=rows) for name, (columns, rows) in tables.items()}
            tracker.log(shown | {"train/global_step": step})


def list_family(members: Sequence[Mapping[str, Any]], births: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """
    Lists every individual that ever lived, in the order of birth.

    Args:
        members: The current members, as in `population.json`.
        births: Lines of `lineage.jsonl`, oldest first.

    Returns:
        A dictionary per individual with the keys in `INDIVIDUAL`; founders may have more. `replaced` is the step at
        which the individual was replaced or left. Individuals that still play do not have this key.
    """
    # An individual is `name@version`: a child takes over the name of the member that it replaces. A member that joins
    # a dataset run replaces nobody, and a member that leaves is replaced by nobody.
    alive = {f"{member['name']}@{member['version']}": member for member in members}
    born = {birth["child"] for birth in births}
    first = [*(birth["replaced"]["member"] for birth in births if birth["replaced"]), *alive]
    roles = {birth["replaced"]["member"]: birth["role"] for birth in births if birth["replaced"]}
    roles |= {name: member["role"] for name, member in alive.items()}
    # Founders appear in no birth as a child. They are known because they still play, were replaced or left.
    found: dict[str, dict[str, Any]] = {
        name: {"parents": [], "operator": "init"} | dict(alive.get(name, {})) | {"member": name, "role": roles[name]}
        for name in sorted({*first} - born)
    }
    for founder in found.values():
        founder |= {"born": 0, "generation": 0}
    for birth in births:
        dead, parents = birth["replaced"], [parent["member"] for parent in birth["parents"]]
        if dead:
            found[dead["member"]] |= {"replaced": birth["step"], "mu": dead["mu"]}
        if not birth["child"]:
            continue
        found[birth["child"]] = {
            "member": birth["child"],
            "role": birth["role"],
            "born": birth["step"],
            "generation": 1 + max((found[parent]["generation"] for parent in parents), default=-1),
            "parents": parents,
            "operator": birth["operator"],
        }
    for name, member in alive.items():
        found[name]["mu"] = member["mu"]
    return list(found.values())


def _make_row(entry: dict[str, Any], columns: tuple[str, ...]) -> list[Any]:
    """Makes the cells of one row. Trackers take only plain values, so members become names and lists become text."""
    return [_format_cell(entry.get(name)) for name in columns]


def _format_cell(value: Any) -> Any:
    if isinstance(value, dict):
        return value["member"]
    if isinstance(value, list):
        return ", ".join(f"{each:.3f}" if isinstance(each, float) else str(_format_cell(each)) for each in value)
    return value
