"""The JSON lines of a run and what a line is about; without torch, so that a run is looked at in no time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


PLAYED = "propose/valid_rate"  # in the log of a step that was played; `num_iterations` trains on its rows again
STEP, EVALUATION = "step", "evaluation"
METRICS, TIMES, LINEAGE = "metrics.jsonl", "times.jsonl", "lineage.jsonl"


def sort_of(logs: Mapping[str, Any] | None) -> str | None:
    """
    What a log, or a line of `metrics.jsonl`, is about: `"step"`, `"evaluation"` (which alone has keys that begin with
    `eval`), or `None`: the summary that ends a run and repeats what was not logged yet, or something of the user's
    own.
    """
    keys = set(logs or ())
    if any(key.startswith(("eval/", "eval_")) for key in keys):
        return EVALUATION
    return STEP if keys & {"loss", PLAYED} and "train_runtime" not in keys else None


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line that was cut off by a kill is left out. Empty without a file."""
    path = Path(path)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
