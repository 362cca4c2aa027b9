"""The recipe that measures a base's headroom, at its smallest, and its control."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path

import pyarrow.parquet as pq
import pytest


sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_headroom  # noqa: E402


SMALL = {
    "max_steps": 1,
    "eval_steps": 1,
    "eval_attempts": 1,
    "proposals_per_teacher": 3,
    "attempts_per_task": 2,
    "per_device_train_batch_size": 6,
    "max_completion_length": 64,
    "disable_tqdm": True,
}


@pytest.fixture
def measure(monkeypatch, capsys):
    """Runs the recipe; what it printed."""
    tasks = (files("trl_populora") / "assets" / "eval_tasks.jsonl").read_text(encoding="utf-8").splitlines()[:6]

    def run(output: Path, *options: str) -> str:
        output.mkdir()
        (output / "tasks.jsonl").write_text("\n".join(tasks) + "\n", encoding="utf-8")
        settings = [text for name, value in SMALL.items() for text in (f"--{name}", str(value))]
        command = ["tiny_headroom.py", "--seeds", "0", "--output", str(output), *options, *settings]
        monkeypatch.setattr(sys, "argv", [*command, "--eval_tasks", str(output / "tasks.jsonl")])
        tiny_headroom.main()
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_a_run_and_its_control_are_scored_against_the_base(measure, tmp_path):
    printed = measure(tmp_path / "run")
    found = json.loads((tmp_path / "run" / "headroom.json").read_text())["0"]
    assert [entry["step"] for entry in found["students"]] == [0, 1]
    gain = found["students"][-1]["solve_rate"] - found["base"]["solve_rate"]
    assert json.loads(printed.splitlines()[-1])["0"]["solve_rate"] == gain
    assert (tmp_path / "run" / "seed_0" / "run.png").is_file()

    measure(tmp_path / "coin", "--random_rewards")
    (rollouts,) = (tmp_path / "coin" / "seed_0" / "rollouts").glob("*.parquet")
    attempts = [row for row in pq.read_table(rollouts).to_pylist() if row["role"] == "student"]
    assert {row["reward"] for row in attempts} == {1.0, -0.5}
    assert any((row["reward"] == 1.0) != row["correct"] for row in attempts), "the sandbox's verdict does not count"
