"""Reads a run's directory without torch: JSON lines, and what a saved population says of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_populora.files import drop_secrets, read_json
from trl_populora.population.members import _check_places


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


POPULATION_FILE = "population.json"


def read_population(directory: str | Path) -> dict[str, Any]:
    """
    What a saved population says of itself; [`~trl_populora.run.saved_population.describe`] names the fields.

    Somebody else may have made it. Its members have names that are no paths, and adapters inside `members/`, so
    readers may join both to a directory. Secrets, which early versions saved among the settings, are left out.

    Raises:
        `ValueError`: If its `population.json` is missing, broken or of another version, or a member's name or adapter
            leads elsewhere.
    """
    path = Path(directory, POPULATION_FILE)
    saved = read_json(path)
    names = [_check_places(path, member) for member in saved.get("members", ())]
    if names and saved.get("best_student", names[0]) not in names:
        raise ValueError(
            f"{path}: field `best_student` is {saved['best_student']!r}, and `members` lists {', '.join(names)}."
        )
    return drop_secrets(saved)
