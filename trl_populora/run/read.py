"""Reads a run's directory without torch: JSON lines, and `population.json` of a saved population."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_populora.files import drop_secrets, is_file_name, read_json


# The log of a step has this key only if the step played a game. With `num_iterations` above 1, other steps train again
# on rows of the last game.
PLAYED = "propose/valid_rate"
# Every log of a step of a dataset run has this key, and no other log has it.
ANSWERED = "time/generate"
STEP, EVALUATION = "step", "evaluation"
METRICS, TIMES, LINEAGE = "metrics.jsonl", "times.jsonl", "lineage.jsonl"
LEFT = "left"  # folder of the adapters of members that have left a dataset run


def classify_log(logs: Mapping[str, Any] | None) -> str | None:
    """
    Says what a log, or a line of `metrics.jsonl`, is about.

    Returns:
        `"step"`, `"evaluation"`, or `None` for anything else: the summary at the end of a run, or a log that the
        user's code wrote.
    """
    # An evaluation is known by the end of a key, because logs of the user's own code may begin with `eval`, too. In
    # `metrics.jsonl` this key is the mean solve rate (game) or the best reward (dataset run), in `times.jsonl` the
    # runtime. The summary of a run looks like a step, because it repeats metrics that are not logged yet. Only the
    # summary has `train_loss`; with `include_num_input_tokens_seen` every log of a step has `train_runtime`.
    keys = set(logs or ())
    marks = "solve_rate_mean", "reward_best", "runtime"
    if any(key.startswith(("eval/", "eval_")) and key.endswith(marks) for key in keys):
        return EVALUATION
    return STEP if keys & {"loss", PLAYED} and "train_loss" not in keys else None


def is_of_function(key: str) -> bool:
    """Tells whether a key ends with the name of a reward function, which may be any name, also `reward`."""
    return "/rewards/" in key


def list_rewards(logs: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """
    Lists the mean rewards of a dataset run's members, the best first. A member without one is left out.

    Args:
        logs: The log of a step, or of an evaluation.
        prefix: What stands before `member/` in the keys, such as `"eval_"`.
    """
    found = {}
    for key, value in logs.items():
        known = value is not None and value == value
        if known and key.startswith(f"{prefix}member/") and key.endswith("/reward") and not is_of_function(key):
            found[key.removeprefix(f"{prefix}member/").removesuffix("/reward")] = value
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def list_idle(population: Mapping[str, Any]) -> list[str]:
    """
    Lists the members of a dataset run whose answers never had an advantage. Members that have left are among them.
    Who came later is listed only after ten optimizer steps: one generation may be bad luck.

    Args:
        population: Contents of `population.json`.
    """
    members = (*population.get("left", ()), *population.get("members", ()))
    found = [member for member in members if member.get("learned") is False]
    return sorted(
        name_holder(each)
        for each in found
        if not each["born"] or each.get("step", population["step"]) - each["born"] >= 10
    )


def name_holder(member: Mapping[str, Any]) -> str:
    """Names a member of `population.json`; as `name@version` if others had the name before."""
    return f"{member['name']}@{member['version']}" if member.get("version") else str(member["name"])


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Reads the objects of a JSON-lines file, except a last line that a kill cut off. Empty if there is no file."""
    path = Path(path)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


POPULATION_FILE = "population.json"
CHAT_TEMPLATE = "chat_template.jinja"


def read_population(directory: str | Path) -> dict[str, Any]:
    """
    Reads `population.json`, which [`~trl_populora.run.saved_population.describe`] has made.

    The file may come from a stranger on the Hub, and callers join a member's name and adapter to a directory. So names
    that could lead out of it are refused, and adapters outside of `members/`. Secrets are left out, whoever wrote them
    there.

    Raises:
        `ValueError`: If the file is missing, broken or of another format, if a member's name or adapter is not of the
            form that [`~trl_populora.files.is_file_name`] asks for, or if the best student is no member.
    """
    path = Path(directory, POPULATION_FILE)
    saved = read_json(path)
    names = [_check_places(path, member) for member in saved.get("members", ())]
    if names and saved.get("best_student", names[0]) not in names:
        raise ValueError(
            f"{path}: field `best_student` is {saved['best_student']!r}, and `members` lists {', '.join(names)}."
        )
    return drop_secrets(saved)


def digest_weights(adapter: str | Path) -> str:
    """Computes a short text that changes with the weights of a saved adapter."""
    return hashlib.sha256(Path(adapter, "adapter_model.safetensors").read_bytes()).hexdigest()[:16]


def read_chat_template(directory: str | Path) -> str | None:
    """Reads the chat template that a run has saved; `None` if there is none."""
    path = Path(directory, CHAT_TEMPLATE)
    return path.read_text(encoding="utf-8") if path.exists() else None


def _check_places(path: Path, member: Mapping[str, Any]) -> str:
    """
    Checks where a member is saved: its name must be a file name, and its adapter `members/` with a file name after it.
    Returns the member's name.
    """
    name = member.get("name")
    if not is_file_name(name):
        raise ValueError(
            f"{path}: field `members.name` is {name!r}; it must have only letters, digits, `_` and `-`, and not start "
            "with `-`."
        )
    directory, _, adapter = str(member.get("adapter")).partition("/")
    if directory != "members" or not is_file_name(adapter):
        raise ValueError(
            f"{path}: field `members.adapter` is {member.get('adapter')!r}; it must be `members/<name>`. Such "
            "a name has only letters, digits, `_` and `-`, and does not start with `-`."
        )
    return str(name)
