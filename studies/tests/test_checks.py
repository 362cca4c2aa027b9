"""The studies that ask whether learning is real, and whether children keep what their parents can."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import check_learning
import pytest
import retention

from trl_populora.run.read import read_lines


ROOT = Path(__file__).parents[2]


@pytest.mark.slow
class TestChecks:
    """One update of the recipes that ask whether learning is real and whether children keep it."""

    def test_a_teacher_alone(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(check_learning, "HELD_OUT_TASKS", 8)
        monkeypatch.setattr(sys, "argv", ["", "teacher", "--steps", "1", "--output", str(tmp_path)])
        check_learning.main()
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        (figures,) = result.pop("runs")
        assert result == {"check": "teacher", "mean_reward_gain": 0}, "the first update is the last"
        assert -1 < figures["reward_first"] == figures["reward_last"] <= 1, "the base writes valid tasks"

    def test_a_student_alone_on_fixed_tasks(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(check_learning, "HELD_OUT_TASKS", 8)  # 512 take half a minute, before and after
        options = "--steps 1 --seeds 3 --learning_rate 10 --output"  # a rate that wrecks whom it trains
        monkeypatch.setattr(sys, "argv", ["", "student", *options.split(), str(tmp_path)])
        check_learning.main()
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        (figures,) = result["runs"]
        assert (figures["seed"], figures["steps"], figures["held_out_tasks"]) == (3, 1, 8)
        assert 0.2 < figures["held_out_before"] < 1, "the base solves some"
        assert figures["held_out_after"] == 0, "of the trained student"
        step = next(entry for entry in read_lines(tmp_path / "student_3" / "metrics.jsonl") if "loss" in entry)
        assert step["propose/valid_rate"] is None, "nobody proposes"
        rate, reward = step["solve/rate"], figures["reward_first"]
        assert 0 < rate < 1
        assert 2 * rate - 1 <= reward == figures["reward_last"] <= 1.5 * rate - 0.5, "wrong: -0.5, malformed: -1"

    def test_children_and_their_parents(self, tmp_path, monkeypatch, capsys):
        options = "--seeds 0 --steps 1 --attempts 1 --tasks 4 --proposals_per_teacher 2 --attempts_per_task 2"
        options += " --per_device_train_batch_size 6 --max_completion_length 64 --output"
        figures = tmp_path / "seed_0.json"

        def breed(*operators: str) -> dict:
            monkeypatch.setattr(sys, "argv", ["x", *options.split(), str(tmp_path), "--operators", *operators])
            retention.main()
            return json.loads(figures.read_text())

        kept = breed("clone", "average")
        kept["result"]["average"]["bred"] = "before"
        figures.write_text(json.dumps(kept))
        result = breed("average@0.5", "average", "clone")["result"]
        first, second = capsys.readouterr().out.split('"above_better_parent"', 1)
        assert "step 1/1" in first
        assert "step 1/1" not in second, "finished runs are read"
        assert result["average"]["bred"] == "before", "and so are children"
        lines = (tmp_path / "retention.md").read_text().splitlines()
        table = {row.split(" | ")[0].removeprefix("| "): row.split(" | ")[1:] for row in lines}
        assert table["clone"][0] == "1.000" > table["average@0.5"][0] > table["average"][0], "likeness to the parent"
        better = max(("code_o parent", "code_i parent"), key=lambda name: result[name]["mixture"])
        assert {**result["clone"]} == pytest.approx(result[better]), "the same weights, the same random numbers"
        assert result["base"].keys() == {"code_o", "code_i", "mixture"}
        assert (tmp_path / "retention.png").read_bytes().startswith(b"\x89PNG")

    def test_the_published_figures_make_a_table_with_every_child_of_the_page(self, tmp_path, monkeypatch):
        for path in (ROOT / "studies" / "tiny" / "retention").glob("seed_*.json"):
            shutil.copy(path, tmp_path)
        monkeypatch.setattr(sys, "argv", ["retention.py", "--output", str(tmp_path)])
        retention.main()
        page = (ROOT / "recipes" / "tiny" / "README.md").read_text()
        table = (tmp_path / "retention.md").read_text()
        names = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]]
        assert [name for name in names if "@" not in name and f"| {name} |" not in page.replace("`", "")] == ["clone"]
