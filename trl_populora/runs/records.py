"""What a run writes beside its adapters: every row of every step as parquet, every step's metrics as JSON lines."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from accelerate import PartialState
from transformers import TrainerCallback

from trl_populora.adapters.weights import saved_step
from trl_populora.files import write_json, write_whole
from trl_populora.population.members import POPULATION_FILE
from trl_populora.runs.lines import LINEAGE, METRICS, TIMES, read_lines, sort_of
from trl_populora.step.play import Game
from trl_populora.step.player import Messages
from trl_populora.step.rows import Row


logger = logging.getLogger(__name__)

# What a run leaves in its directory; checkpoints come first, so that a move that is cut short leaves none to resume
# from.
LEFT_BY_TRAINING = (
    "checkpoint-*",
    "_unfinished",
    "rollouts",
    LINEAGE,
    "members",
    "archive.parquet",
    "adapter_model.safetensors",
    "adapter_config.json",
    "trainer_state.json",
)
# TRL makes the folder before a run has begun, and writes into it later.
COMPLETIONS = "completions/completions_*.parquet"
OF_ONE_STEP = ("checkpoint-*", "rollouts/step_*.parquet", COMPLETIONS)
# The base's; without it members could not be loaded where they were moved to.
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab*", "merges*")
LEFT_BY_READERS = (
    "README.md",
    "run.png",
    "report.html",
    "plots",
    "evaluation.md",
    "evaluation.json",
    "evaluation.png",
    "_evaluation",
)
LEFT_BY_A_RUN = (*LEFT_BY_TRAINING, METRICS, TIMES, POPULATION_FILE, COMPLETIONS, *TOKENIZER, *LEFT_BY_READERS)
ASIDE = "_previous-{}"  # a leading underscore keeps it out of uploads to the Hub


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
        output_dir (`str`): The run's directory.
        step (`int`): Population step, from 1: the `step` of its line in `metrics.jsonl`.
        game (`Game`): Tells this rank from the others.
        rows (`Sequence[Row]`): Rows of this rank, shape `[R]`.
        rewards, advantages (`Sequence[float]`): Of the same rows.

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


def take_back(output_dir: Path, step: int, lineage: Path) -> None:
    """
    Takes a run's records back to a checkpoint. Where later checkpoints or members show that the run had gone on, all
    that came after moves aside whole; otherwise it was never saved, and will happen again.

    Args:
        output_dir (`Path`): The run's directory.
        step (`int`): Steps done at the checkpoint.
        lineage (`Path`): The checkpoint's copy of `lineage.jsonl`; absent if nobody had been replaced.
    """
    later = [path for name in OF_ONE_STEP for path in sorted(output_dir.glob(name)) if _step_of(path) > step]
    saved = _members_step(output_dir)
    if (saved or 0) > step or any(path.is_dir() for path in later):
        _set_branch_aside(output_dir, step, later, with_members=saved is None or saved > step)
    else:
        for path in later:
            path.unlink()
    for name in (METRICS, TIMES):
        _write_lines(output_dir / name, [e for e in read_lines(output_dir / name) if e["step"] <= step])
    restore_lineage(output_dir, lineage)


def restore_lineage(output_dir: Path, lineage: Path) -> None:
    """Puts a checkpoint's copy of `lineage.jsonl` in the place of the run's; absent if nobody had been replaced."""
    _write_lines(output_dir / LINEAGE, read_lines(lineage))


def _set_branch_aside(root: Path, step: int, later: Sequence[Path], with_members: bool) -> None:
    """Moves what is of later steps to `_previous-<n>/`, and copies the records that both branches share."""
    target = _next_aside(root)
    for name in (METRICS, TIMES, LINEAGE, POPULATION_FILE):
        if (root / name).exists():
            shutil.copyfile(root / name, target / name)
    shared = {*OF_ONE_STEP, "rollouts", METRICS, TIMES, LINEAGE, POPULATION_FILE}
    saved = [path for name in LEFT_BY_A_RUN if name not in shared for path in sorted(root.glob(name))]
    _move([*later, *(saved if with_members else ())], root, target)
    logger.warning(
        "%s had gone on after step %d; what came later is in %s now, checkpoints included, and can be resumed there.",
        root,
        step,
        target,
    )


def _members_step(root: Path) -> int | None:
    """When the members of a run's directory were saved; `None` if they do not say, 0 if there are none."""
    members = sorted(path.parent for path in root.glob("members/*/adapter_model.safetensors"))
    with suppress(ValueError):  # a run that was killed as it saved has cut one off
        return saved_step(members[0]) if members else 0
    return None


def _step_of(path: Path) -> int:
    found = re.match(r"(checkpoint-|step_|completions_)(\d+)", path.name)
    return int(found[2]) if found else 0


def holds_a_run(output_dir: str | Path) -> bool:
    """Whether a run was trained here; the evaluation of members that have not trained yet is none."""
    root = Path(output_dir)
    trained = any(entry["step"] for entry in read_lines(root / METRICS))
    return trained or any(True for name in LEFT_BY_TRAINING for _ in root.glob(name))


def set_aside(output_dir: str | Path) -> Path | None:
    """
    Moves what an earlier run has left to `_previous-<n>/`, checkpoints included; files of other origin stay.

    Returns:
        `Path` or `None`: Where it is now; `None` if no run was trained here.
    """
    root = Path(output_dir)
    if not holds_a_run(root):
        return None
    target = _next_aside(root)
    _move([path for name in LEFT_BY_A_RUN for path in sorted(root.glob(name))], root, target)
    way_on = "; `--resume` would have continued it" if any(target.glob("checkpoint-*")) else ""
    logger.warning("%s held an earlier run, which is in %s now%s.", root, target, way_on)
    return target


def _next_aside(root: Path) -> Path:
    """A new `_previous-<n>/`."""
    number = 1
    while (root / ASIDE.format(number)).exists():
        number += 1
    target = root / ASIDE.format(number)
    target.mkdir()
    return target


def _move(paths: Iterable[Path], root: Path, target: Path) -> None:
    for path in paths:
        aside = target / path.relative_to(root)
        aside.parent.mkdir(exist_ok=True)
        path.rename(aside)


def _write_lines(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    with write_whole(path) as unfinished:
        unfinished.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


class Records(TrainerCallback):
    """
    Keeps the run's files up to date while it goes on, for `populora info` and `populora report`.

    `metrics.jsonl` and `times.jsonl` get one line per log, with every key even where nothing is known;
    `population.json` tells the ratings. A run from the start moves an earlier one aside.

    Args:
        describe (`Callable`): Returns what `population.json` is to hold now.
    """

    def __init__(self, describe: Callable[[], dict[str, Any]]):
        self.describe = describe
        self.begun = False

    def on_train_begin(self, args, state, control, **kwargs):
        self.begun = True
        if args.should_save and not state.global_step:
            set_aside(args.output_dir)
        PartialState().wait_for_everyone()

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
