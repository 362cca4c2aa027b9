"""What a run writes down beside its adapters: every row of every step, as parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from trl_populora.rollout import Game, Row


def write_rollouts(
    output_dir: str, step: int, game: Game, rows: Sequence[Row], rewards: Sequence[float], advantages: Sequence[float]
) -> Path:
    """
    Writes the rows of one step: every proposal with its verdict and every attempt, with reward and advantage.

    Each rank writes its own file, `rollouts/step_00012.parquet` or `rollouts/step_00012-rank1.parquet`; together they
    open with `load_dataset("parquet", data_files="rollouts/*.parquet")`.

    Args:
        output_dir (`str`): The run's directory.
        step (`int`): Population step, from 0.
        game (`Game`): Tells this rank from the others.
        rows (`Sequence[Row]`): Rows of this rank, shape `[R]`.
        rewards, advantages (`Sequence[float]`): Of the same rows.

    Returns:
        `Path`: The file written. It appears whole or not at all.
    """
    columns = {name: [getattr(row, name) for row in rows] for name in (*Row.COLUMNS, "archived")}
    table = pa.table(
        {
            "step": [step] * len(rows),
            **columns,
            "reward": list(rewards),
            "advantage": list(advantages),
            "prompt": [row.prompt[-1]["content"] for row in rows],
            "completion": [row.completion.text for row in rows],
            "completion_tokens": [len(row.completion.completion_ids) for row in rows],
        }
    )
    suffix = f"-rank{game.rank}" if game.world > 1 else ""
    path = Path(output_dir, "rollouts", f"step_{step:05d}{suffix}.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    pq.write_table(table, unfinished, compression="zstd")
    return unfinished.replace(path)
