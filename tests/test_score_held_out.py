"""`recipes/score_held_out.py`: students of a run, its base and what it started from on held-out tasks."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from tests.populora_run import SETTINGS
from tests.recipe_runs import RECIPES
from trl_populora.tasks import load_seed_tasks


sys.path.insert(0, str(RECIPES))

import score_held_out  # noqa: E402


RIGHT, WRONG, OTHER, UNREADABLE = (True, "1", True), (False, "2", True), (False, "3", False), (False, "", False)


@pytest.mark.parametrize(
    ("tries", "share"),
    [
        ([RIGHT, RIGHT, WRONG], 1.0),
        ([RIGHT, WRONG, WRONG], 0.0),
        ([RIGHT, WRONG], 0.5),
        ([RIGHT, WRONG, OTHER, UNREADABLE, UNREADABLE], 1 / 3),
        ([RIGHT, UNREADABLE, UNREADABLE], 1.0),
        ([UNREADABLE], 0.0),
    ],
)
def test_the_majority_is_of_readable_answers_and_shares_ties(tries, share):
    assert score_held_out.majority(tries) == pytest.approx(share)


def test_a_contender_is_compared_task_by_task(seed_tasks):
    tasks = seed_tasks[:2]
    start = [[RIGHT, WRONG], [WRONG, OTHER]]
    found = score_held_out.figures([[RIGHT, RIGHT], [RIGHT, WRONG]], start, tasks)
    assert found["right"][0] == 0.75
    assert found["over it"] == pytest.approx([0.5, 0.0]), "both tasks gain as much: the pairs do not spread"
    assert (found["any"], found["all"], found["majority"], found["worked"]) == (1.0, 0.5, 0.75, 1.0)
    assert found["readable"] == 1.0
    assert "uncopied" not in found, "nobody tried to copy"
    rows = score_held_out.table({"start": score_held_out.figures(start, None, tasks), "student": found})
    assert rows[0][:2] == ["", "right"]
    assert rows[1][rows[0].index("over it")] == ""
    assert rows[2][rows[0].index("over it")] == "+0.500 [+0.500, +0.500]"


def test_a_gain_by_copying_is_told_from_others(seed_tasks):
    start, student = [[WRONG], [WRONG], [UNREADABLE]], [[RIGHT], [WRONG], [WRONG]]
    found = score_held_out.figures(student, start, seed_tasks[:3], copied=[True, False, False])
    assert found["over it"][0] == pytest.approx(1 / 3)
    assert found["uncopied"] == [0.0, 0.0]
    assert score_held_out.figures(start, start, seed_tasks[:3])["readable"] == pytest.approx(2 / 3)


def test_a_mean_is_over_the_attempts_of_all_and_paired_by_task(seed_tasks):
    start = [[RIGHT, WRONG], [WRONG, OTHER]]
    better, worse = [[RIGHT, RIGHT], [RIGHT, WRONG]], [[WRONG, WRONG], [WRONG, WRONG]]
    found = score_held_out.mean_figures([better, worse], start, seed_tasks[:2])
    assert found["right"][0] == 0.375
    assert found["over it"][0] == pytest.approx(0.125)
    assert not {"any", "all", "majority"} & found.keys(), "of twice as many attempts they are something else"


def test_a_finished_run_is_scored_once(finished, seed_tasks, tmp_path, monkeypatch, capsys):
    tasks, output = tmp_path / "tasks.jsonl", tmp_path / "scores"
    given = [
        json.dumps(task.to_record()) + "\n"
        for kind in ("code_o", "code_i")
        for task in seed_tasks
        if task.kind == kind
    ]
    tasks.write_text("".join(given[:2]))
    words = [str(finished), "--tasks", str(tasks), "--attempts", "2", "--output", str(output)]
    words += ["--task_kinds", *SETTINGS["task_kinds"], "--start", str(finished / "members" / "student_0")]

    def run() -> dict:
        monkeypatch.setattr(sys, "argv", ["score_held_out.py", *words])
        score_held_out.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    found = run()
    assert list(found) == ["start", "base", "run student_0", "run student_1", "run mean"]
    assert found["run student_0"]["over it"][0] == 0, "it is the adapter itself, with the same random numbers"
    assert "over it" not in found["start"]
    both = [found[f"run student_{n}"]["right"][0] for n in (0, 1)]
    assert found["run mean"]["right"][0] == pytest.approx(sum(both) / 2)
    assert len(load_seed_tasks(tasks)) == len(json.loads((output / "start.json").read_text())["tries"]) == 2
    kept = output / "base.json"
    kept.write_text(kept.read_text().replace("false", "true"))
    assert run()["base"]["right"][0] == 1.0, "what is known is read, not asked again"


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ("attempts", r"base.json answers another question \(attempts 2, here 1\)"),
        ("start", r"start.json answers another question \(of .*student_1, here .*student_0\)"),
        ("no start", "holds no adapter_model.safetensors; `--start`"),
        ("kind", "has tasks of code_i; .* plays letters, code_o"),
        ("name", "Two runs have a run student_0"),
        ("cut off", "was not saved to its end"),
    ],
)
def test_what_does_not_fit_is_told_before_anybody_is_asked(
    spoilt, message, finished, seed_tasks, tmp_path, monkeypatch
):
    def ask(*words: str) -> None:
        kinds = ["--task_kinds", *SETTINGS["task_kinds"]]
        monkeypatch.setattr(sys, "argv", ["score_held_out.py", *words, "--output", str(output), *kinds])
        score_held_out.main()

    tasks, output, other = tmp_path / "tasks.jsonl", tmp_path / "scores", tmp_path / "other" / "run"
    kind = "code_i" if spoilt == "kind" else "code_o"
    tasks.write_text(json.dumps(next(task.to_record() for task in seed_tasks if task.kind == kind)) + "\n")
    start = finished / "members" / "student_0"
    words = [str(finished), "--tasks", str(tasks), "--attempts", "1"]
    if spoilt in ("attempts", "start"):
        output.mkdir()
        asked = {"of": "base", "attempts": 2} if spoilt == "attempts" else {"of": str(start.with_name("student_1"))}
        kept = {"attempts": 1, "tasks": score_held_out.digest(load_seed_tasks(str(tasks)))} | asked
        path = output / ("base.json" if spoilt == "attempts" else "start.json")
        path.write_text(json.dumps({"asked": kept, "tries": []}))
    if spoilt in ("name", "cut off"):
        shutil.copytree(finished, other)
        words.insert(1, str(other))
    if spoilt == "cut off":
        (other / "members" / "student_0" / "adapter_model.safetensors").unlink()
    before = sorted(output.glob("*"))
    with pytest.raises(ValueError, match=message):
        ask(*words, "--start", str(tmp_path if spoilt == "no start" else start))
    assert sorted(output.glob("*")) == before
