"""What a run writes beside its adapters: every row of every step as parquet, every step's metrics as JSON lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import TrainerCallback

from trl_populora.files import write_json, write_whole
from trl_populora.run.directory import holds_a_run
from trl_populora.run.read import METRICS, POPULATION_FILE, TIMES, sort_of
from trl_populora.step.play import Game
from trl_populora.step.player import Messages
from trl_populora.step.rows import Row


logger = logging.getLogger(__name__)


def write_rollouts(
    output_dir: str, step: int, game: Game, rows: Sequence[Row], rewards: Sequence[float], advantages: Sequence[float]
) -> Path:
    """
    Writes the rows of one step: every proposal with its verdict and every attempt, with reward and advantage.

    `version` counts the replacements of the row's member, `opponent` is the other side of its match, empty where that
    is given tasks.

    Each rank writes its own file, `rollouts/step_00012.parquet` or `rollouts/step_00012-rank1.parquet`; together they
    open with `load_dataset("parquet", data_files="rollouts/*.parquet")`.

    Args:
        output_dir: The run's directory.
        step: Population step, from 1: the `step` of its line in `metrics.jsonl`.
        game: Tells this rank from the others.
        rows: Rows of this rank, shape `[R]`.
        rewards, advantages: Of the same rows.

    Returns:
        `Path`: The file written. It appears whole or not at all.
    """
    columns = {name: [getattr(row, name) for row in rows] for name in (*Row.COLUMNS, "archived", "reject_detail")}
    players = {(row.match, row.role): row.member for row in rows}
    other = {"teacher": "student", "student": "teacher"}
    table = pa.table(
        {
            "step": [step] * len(rows),
            **columns,
            "features": pa.array([list(row.features) for row in rows], pa.list_(pa.string())),
            "version": [game.population[row.member].version for row in rows],
            "opponent": [players.get((row.match, other[row.role]), "") for row in rows],
            "reward": list(rewards),
            "advantage": list(advantages),
            "prompt": [_text_of(row.prompt) for row in rows],
            "completion": [row.completion.text for row in rows],
            "completion_tokens": [len(row.completion.completion_ids) for row in rows],
        }
    )
    suffix = f"-rank{game.player.rank}" if game.player.world > 1 else ""
    path = Path(output_dir, "rollouts", f"step_{step:05d}{suffix}.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(path) as unfinished:
        pq.write_table(table, unfinished, compression="zstd")
    return path


def _text_of(prompt: Messages) -> str:
    """A prompt of one turn as it is, a longer conversation with the role before each turn."""
    if len(prompt) == 1:
        return prompt[0]["content"]
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in prompt)


def append_metrics(output_dir: str | Path, entry: Mapping[str, Any]) -> None:
    """
    Adds one line to `metrics.jsonl`, from which a run in progress can be looked at, and one to `times.jsonl`.

    Seconds stand apart because they alone differ between two runs with the same seed. Evaluations are lines of their
    own, with the keys that trackers show.
    """
    entry = {f"eval/{key[5:]}" if key.startswith("eval_") else key: value for key, value in entry.items()}
    seconds = {k: v for k, v in entry.items() if k == "step_time" or k.startswith("time/") or k.endswith("runtime")}
    metrics = {key: value for key, value in entry.items() if key not in seconds}
    for name, values in ((METRICS, metrics), (TIMES, {"step": entry["step"]} | seconds)):
        with Path(output_dir, name).open("a") as file:
            file.write(json.dumps(values) + "\n")


class Records(TrainerCallback):
    """
    Keeps the run's files up to date while it goes on, for `populora info` and `populora report`.

    `metrics.jsonl` and `times.jsonl` get one line per log, with every key even where nothing is known;
    `population.json` tells the ratings.

    Args:
        describe: Returns what `population.json` is to hold now.
    """

    def __init__(self, describe: Callable[[], dict[str, Any]]):
        self.describe = describe
        self.begun = False

    def on_train_begin(self, args, state, control, **kwargs):
        self.begun = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not self.begun and holds_a_run(args.output_dir):
            return  # an evaluation, and the directory is another run's
        if state.is_world_process_zero and sort_of(logs):
            append_metrics(args.output_dir, state.log_history[-1])
            write_json(Path(args.output_dir, POPULATION_FILE), self.describe())


class OnlyKnown(TrainerCallback):
    """
    Takes keys without a value (None, NaN) out of a log before anybody else sees it: trackers would warn of each.

    `log_history`, and with it `metrics.jsonl`, keeps them.
    """

    def on_log(self, args, state, control, logs=None, **kwargs):
        for key in [key for key, value in (logs or {}).items() if value is None or value != value]:
            del logs[key]
