"""Writes what a run leaves beside its adapters.

rows of a step [R]   --write_rollouts--> rollouts/step_00012.parquet, one file per step and rank
metrics of a step    --append_metrics--> a line of metrics.jsonl, and its seconds as a line of times.jsonl
state of the members --Records---------> population.json
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import TrainerCallback

from trl_populora.files import write_json, write_whole
from trl_populora.population.members import Population
from trl_populora.run.directory import holds_a_run, set_evaluations_aside
from trl_populora.run.read import METRICS, POPULATION_FILE, TIMES, classify_log, is_of_function, read_lines
from trl_populora.step.player import Messages
from trl_populora.step.prompts import PromptRow
from trl_populora.step.rows import Row


logger = logging.getLogger(__name__)


def write_rollouts(
    output_dir: str,
    step: int,
    rank: tuple[int, int],
    population: Population,
    rows: Sequence[Row] | Sequence[PromptRow],
    rewards: Sequence[float],
    advantages: Sequence[float],
    by_function: Mapping[str, Sequence[float]] | None = None,
    append: bool = False,
) -> Path:
    """
    Writes the rows of one step, with reward and advantage: proposals and attempts, or the answers of a dataset run.

    Each rank writes its own file: `rollouts/step_00012.parquet` with one process, `rollouts/step_00012-rank1.parquet`
    with several. `load_dataset("parquet", data_files="rollouts/*.parquet")` opens all of them together.

    Two columns need a word. `version` counts how often the row's member has been replaced. `opponent` is the other
    member of the row's match; it is empty where tasks are given and no teacher plays. A dataset run has no columns
    about tasks, matches and opponents. It has one column more for each reward function, with that function's rewards.

    Args:
        output_dir: The run's directory.
        step: The first optimizer step that trains on the rows, counted from 1 as in `metrics.jsonl`.
        rank: Number of this process, and how many there are.
        population: Knows the members' versions.
        rows: Rows of this rank, shape `[R]`.
        rewards, advantages: Reward and advantage of each row, shape `[R]`.
        by_function: In a dataset run, the rewards of each reward function by its name, each `[R]`.
        append: Whether the rows come behind those that the step's file has already.

    Returns:
        `Path`: The file. It appears whole or not at all.
    """
    versions = [population[row.member].version for row in rows]
    of_members = {"member": [row.member for row in rows], "version": versions}
    of_members |= {f"rewards/{name}": list(values) for name, values in (by_function or {}).items()}
    table = pa.table(
        {
            "step": [step] * len(rows),
            **(_tell_game(rows, versions) if by_function is None else of_members),
            "reward": list(rewards),
            "advantage": list(advantages),
            "prompt": [_join_turns(row.prompt) for row in rows],
            "completion": [row.completion.text for row in rows],
            "completion_tokens": [len(row.completion.completion_ids) for row in rows],
        }
    )
    suffix = f"-rank{rank[0]}" if rank[1] > 1 else ""
    path = Path(output_dir, "rollouts", f"step_{step:05d}{suffix}.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    if append:
        table = pa.concat_tables([pq.read_table(path), table])
    with write_whole(path) as unfinished:
        pq.write_table(table, unfinished, compression="zstd")
    return path


def _tell_game(rows: Sequence[Any], versions: Sequence[int]) -> dict[str, Any]:
    """Returns the columns that say who proposed and attempted what."""
    columns = {name: [getattr(row, name) for row in rows] for name in (*Row.COLUMNS, "archived", "reject_detail")}
    # With the type given, a step whose tasks all lack features has the same schema as other steps.
    features = pa.array([list(row.features) for row in rows], pa.list_(pa.string()))
    players = {(row.match, row.role): row.member for row in rows}
    other = {"teacher": "student", "student": "teacher"}
    opponents = [players.get((row.match, other[row.role]), "") for row in rows]
    return columns | {"features": features, "version": list(versions), "opponent": opponents}


def _join_turns(prompt: str | Messages) -> str:
    """Makes one text of a prompt. A conversation of several turns gets the role before each turn."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0]["content"]
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in prompt)


def append_metrics(output_dir: str | Path, entry: Mapping[str, Any]) -> None:
    """
    Adds one line to `metrics.jsonl` and one to `times.jsonl`. Each evaluation has lines of its own.

    Seconds have a file of their own, because only they differ between two runs with the same seed. A number that is
    NaN or infinite becomes `null`.
    """
    # Trackers show `eval_loss` as `eval/loss`, and so do the files.
    entry = {f"eval/{key[5:]}" if key.startswith("eval_") else key: value for key, value in entry.items()}
    ends = "runtime", "per_second"
    seconds = {
        key: value
        for key, value in entry.items()
        if key == "step_time" or key.startswith("time/") or (key.endswith(ends) and not is_of_function(key))
    }
    metrics = {key: value for key, value in entry.items() if key not in seconds}
    # Seconds come first: a report that is made between the two lines, or after a kill there, leaves them out.
    for name, values in ((TIMES, {"step": entry["step"]} | seconds), (METRICS, metrics)):
        unknown = [key for key, value in values.items() if isinstance(value, float) and not isfinite(value)]
        with Path(output_dir, name).open("a") as file:
            file.write(json.dumps(values | dict.fromkeys(unknown)) + "\n")  # JSON has neither NaN nor infinity


class Records(TrainerCallback):
    """
    A callback that updates the run's files for `populora info` and `populora report`.

    Each log of a step or an evaluation adds a line to `metrics.jsonl` and to `times.jsonl`. Keys without a value are
    kept. Then `population.json` is written again with the latest ratings. The last step is always logged, unless
    `logging_strategy` is `"no"`, or a signal or a late callback stops the run at a step that is saved.

    Args:
        describe: Returns the contents of `population.json`.
    """

    def __init__(self, describe: Callable[[], dict[str, Any]]):
        self.describe = describe
        self.begun = False
        self._saved: int | None = None  # step of the last checkpoint
        self._before: list[dict[str, Any]] = []  # this trainer's evaluations before any training

    def on_train_begin(self, args, state, control, **kwargs):
        self.begun, self._saved = True, None
        # Lines of an earlier trainer's evaluations would pass for this run's starting point.
        if state.is_world_process_zero and not state.global_step:
            if len(read_lines(Path(args.output_dir, METRICS))) > len(self._before):
                set_evaluations_aside(args.output_dir)
                for entry in self._before:
                    append_metrics(args.output_dir, entry)
            self._before = []

    def on_step_end(self, args, state, control, **kwargs):
        # `Trainer` logs only multiples of `logging_steps`, but reports need the last step, too. A callback may stop
        # the training before `max_steps`.
        if control.should_training_stop and args.logging_strategy != "no":
            control.should_log = True

    def on_save(self, args, state, control, **kwargs):
        self._saved = state.global_step

    def on_epoch_end(self, args, state, control, **kwargs):
        # After its last step `Trainer` ends the epoch. By then all callbacks have been asked, also those that stop the
        # training after an evaluation. A checkpoint of this step keeps what is not logged, and a resumed run logs it.
        if self._saved != state.global_step:
            self.on_step_end(args, state, control)

    def on_log(self, args, state, control, logs=None, **kwargs):
        # This trainer evaluates before any training. Files of a run in this directory are those of an earlier run.
        if not self.begun and holds_a_run(args.output_dir):
            return
        if state.is_world_process_zero and classify_log(logs):
            append_metrics(args.output_dir, state.log_history[-1])
            if not self.begun:
                self._before.append(state.log_history[-1])
            write_json(Path(args.output_dir, POPULATION_FILE), self.describe())


class OnlyKnown(TrainerCallback):
    """
    A callback that removes keys without a value (None, NaN) from a log, because trackers warn of each.

    It has to be the first callback. `log_history` and `metrics.jsonl` keep these keys.
    """

    def on_log(self, args, state, control, logs=None, **kwargs):
        for key in [key for key, value in (logs or {}).items() if value is None or value != value]:
            # `log_history` holds a copy, so only the callbacks that follow miss the key.
            del logs[key]
