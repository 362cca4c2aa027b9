"""The screen of what teachers are paid for: its candidates, its figures, and a small run that goes on."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from trl_populora.hub.export import STUDENTS
from trl_populora.step.pay import PAY


sys.path.insert(0, str(Path(__file__).parents[1]))

import screen  # noqa: E402


def attempts(step: int, right: int, of: int = screen.ENOUGH, word: str = "Add") -> list[dict]:
    return [{"step": step, "features": [word], "correct": n < right} for n in range(of)]


def test_every_pay_is_a_candidate():
    paid = {settings.get("teacher_reward", "guarded") for settings in screen.CANDIDATES.values()}
    assert paid == set(PAY) - {"paper"}, "the formula without guards is `recipes/paper.yaml`'s"


def test_a_feature_is_forgotten_that_was_mastered_once_and_is_missed_at_the_end():
    assert screen.count_forgotten(attempts(1, 12) + attempts(25, 3)) == 1
    assert screen.count_forgotten(attempts(1, 12) + attempts(25, 8)) == 0, "still known"
    assert screen.count_forgotten(attempts(1, 6) + attempts(25, 3)) == 0, "never mastered"
    assert screen.count_forgotten(attempts(1, 12) + attempts(25, 0, of=3)) == 0, "too few to tell"


def test_held_out_tasks_are_the_same_every_time_and_all_of_one_kind():
    first, second = screen.held_out_tasks(), screen.held_out_tasks()
    assert [task.task_id for task in first] == [task.task_id for task in second]
    assert {task.kind for task in first} == {screen.KIND}
    assert len({task.task_id for task in first}) == screen.HELD_OUT


def test_runs_are_compared_seed_by_seed_and_the_mean_of_the_students_stands_for_a_population():
    def run(held_out: float, merged: dict[str, float]) -> dict:
        held = [{"mean": held_out, "worst": held_out - 0.01}]
        probes = {"base": 0.2, "student_0": held_out}
        alone = {name: {"held_out": rate} for name, rate in merged.items()}
        return {"held_out": held, "probes": probes, "merged": alone}

    kept = {
        "race_4t4s": {n: run(0.5, {"student_0": 0.4, STUDENTS: 0.6}) for n in "01"},
        "single_agent_replay": {"1": run(0.45, {"student_0": 0.5})},
    }
    _, *rows = screen.paired_table(kept, "single_agent_replay", screen.COMPARED)
    assert dict(rows) == {
        "students": "+0.050, one seed",
        "worst": "+0.050, one seed",
        "students' probes": "+0.050, one seed",
        "as one model, held out": "+0.100, one seed",
    }


@pytest.mark.slow
def test_a_run_is_measured_kept_and_not_made_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(screen, "HELD_OUT", 4)
    monkeypatch.setattr(screen, "PROBES", 1)
    monkeypatch.setattr(screen, "ATTEMPTS", 1)
    given = ["screen.py", "--candidates", "rarity", "--seeds", "3", "--steps", "2", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", given)
    screen.main()
    (run,) = json.loads((tmp_path / screen.RESULTS).read_text())["rarity"].values()
    assert run["steps"] == 2
    assert [entry["step"] for entry in run["held_out"]] == [0, 2]
    assert set(run["probes"]) == {"base", "student_0", "student_1"}
    assert [*run["merged"]] == ["student_0", "student_1", STUDENTS]
    assert all(set(rates) == {"held_out", "probes"} for rates in run["merged"].values())
    assert len(run["valid"]) == len(run["live"]) == len(run["features"]) == 1
    made = (tmp_path / "rarity" / "seed_3" / "metrics.jsonl").stat().st_mtime_ns
    screen.main()
    assert (tmp_path / "rarity" / "seed_3" / "metrics.jsonl").stat().st_mtime_ns == made
    row = capsys.readouterr().out.strip().splitlines()[-1]
    assert row.startswith("| rarity | 2 x 1 |")
    assert not math.isnan(float(row.split("|")[3]))
