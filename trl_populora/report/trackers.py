"""Tables of the population and its births for W&B and trackio; curves and completions go there through TRL."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from trl_populora.runs.lines import EVALUATION, LINEAGE, read_lines, sort_of


TRACKERS = ("wandb", "trackio")  # those with tables; they have the same `Table` and `log`

MEMBER = ("step", "name", "role", "mu", "sigma", "held_out", "age", "born", "version", "operator", "parents")
BIRTH = ("step", "role", "child", "replaced", "parents", "operator", "strength", "mu", "cosine", "retention_loss")


class TrackerTables(TrainerCallback):
    """
    Sends the tables `population` and `births` to W&B and trackio: when somebody was replaced, with evaluations, and at
    the end. Curves are the trainer's own metrics, `completions` is TRL's table (`log_completions`).

    Args:
        describe (`Callable`): Returns what `population.json` holds.
    """

    def __init__(self, describe: Callable[[], dict[str, Any]]):
        self.describe = describe
        self._sent = -1  # step of the last tables

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs, wanted = logs or {}, [name for name in TRACKERS if name in args.report_to]
        if not wanted or not state.is_world_process_zero:
            return
        ended = "train_runtime" in logs and self._sent < state.global_step
        if not (logs.get("evolve/replaced") or ended or sort_of(logs) == EVALUATION):
            return
        self._sent = step = state.global_step
        members = [_row({"step": step, **member}, MEMBER) for member in self.describe()["members"]]
        tables: dict[str, tuple] = {"population": (MEMBER, members)}
        # Before training the file, if there is one, is another run's.
        births = read_lines(Path(args.output_dir, LINEAGE)) if step else []
        if births:
            tables["births"] = (BIRTH, [_row(event, BIRTH) for event in births])
        for tracker in map(importlib.import_module, wanted):
            shown = {name: tracker.Table(columns=[*columns], data=rows) for name, (columns, rows) in tables.items()}
            tracker.log(shown | {"train/global_step": step})


def _row(entry: dict[str, Any], columns: tuple[str, ...]) -> list[Any]:
    """Plain cells: members by name, several of anything as text."""
    return [_cell(entry.get(name)) for name in columns]


def _cell(value: Any) -> Any:
    if isinstance(value, dict):
        return value["member"]
    if isinstance(value, list):
        return ", ".join(f"{each:.3f}" if isinstance(each, float) else str(_cell(each)) for each in value)
    return value
