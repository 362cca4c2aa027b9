"""Keeps a run's page and pictures up to date while it goes on, and sends tables and alerts to W&B and trackio."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from trl_populora.run.read import EVALUATION, LINEAGE, classify_log, read_lines


TRACKERS = ("wandb", "trackio")  # those with tables; they have the same `Table` and `log`

MEMBER = ("step", "name", "role", "mu", "sigma", "held_out", "age", "born", "version", "operator", "parents")
BIRTH = ("step", "role", "child", "replaced", "parents", "operator", "strength", "mu", "cosine")

INDIVIDUAL = ("member", "role", "born", "replaced", "generation", "parents", "operator", "mu")


def alert(report_to: Sequence[str], title: str, text: str) -> None:
    """Warns in the trackers, which pass it on by mail, Slack or a webhook where their user has set that up."""
    for name in _choose_trackers(report_to):
        tracker = importlib.import_module(name)
        if name == "wandb":
            tracker.run.alert(title, text, level=tracker.AlertLevel.WARN)
        else:
            tracker.alert(title, text, level=tracker.AlertLevel.WARN)


def _choose_trackers(report_to: Sequence[str]) -> list[str]:
    return [name for name in TRACKERS if name in report_to]


class TrackerTables(TrainerCallback):
    """
    Sends the tables `population`, `births` and `lineage` to W&B and trackio: when somebody was replaced, with
    evaluations, and at the end. Curves are the trainer's own metrics, `completions` is TRL's table.

    Args:
        describe: Returns what `population.json` holds.
    """

    def __init__(self, describe: Callable[[], dict[str, Any]]):
        self.describe = describe
        self._sent = -1  # step of the last tables

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs, wanted = logs or {}, _choose_trackers(args.report_to)
        if not wanted or not state.is_world_process_zero:
            return
        ended = "train_runtime" in logs and self._sent < state.global_step
        if not (logs.get("evolve/replaced") or ended or classify_log(logs) == EVALUATION):
            return
        self._sent = step = state.global_step
        members = self.describe()["members"]
        now = [_make_row({"step": step, **member}, MEMBER) for member in members]
        tables: dict[str, tuple] = {"population": (MEMBER, now)}
        # Before training the file, if there is one, is another run's.
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
    Everybody who ever lived, in the order of birth: when who was replaced, with which rating, and who lives.

    Args:
        members: The living, as `population.json` has them.
        births: Lines of `lineage.jsonl`, oldest first.
    """
    alive = {f"{member['name']}@{member['version']}": member for member in members}
    born = {birth["child"] for birth in births}
    first = [*(birth["replaced"]["member"] for birth in births), *alive]
    roles = {birth["replaced"]["member"]: birth["role"] for birth in births}
    roles |= {name: member["role"] for name, member in alive.items()}
    found: dict[str, dict[str, Any]] = {
        name: {"parents": [], "operator": "init"} | dict(alive.get(name, {})) | {"member": name, "role": roles[name]}
        for name in sorted({*first} - born)
    }
    for founder in found.values():
        founder |= {"born": 0, "generation": 0}
    for birth in births:
        dead, parents = birth["replaced"], [parent["member"] for parent in birth["parents"]]
        found[dead["member"]] |= {"replaced": birth["step"], "mu": dead["mu"]}
        found[birth["child"]] = {
            "member": birth["child"],
            "role": birth["role"],
            "born": birth["step"],
            "generation": 1 + max(found[parent]["generation"] for parent in parents),
            "parents": parents,
            "operator": birth["operator"],
        }
    for name, member in alive.items():
        found[name]["mu"] = member["mu"]
    return list(found.values())


def _make_row(entry: dict[str, Any], columns: tuple[str, ...]) -> list[Any]:
    """Plain cells: members by name, several of anything as text."""
    return [_format_cell(entry.get(name)) for name in columns]


def _format_cell(value: Any) -> Any:
    if isinstance(value, dict):
        return value["member"]
    if isinstance(value, list):
        return ", ".join(f"{each:.3f}" if isinstance(each, float) else str(_format_cell(each)) for each in value)
    return value
