"""`recipes/score_held_out.py`: students of a run, its base and what it started from on held-out tasks."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.populora_run import SETTINGS
from tests.recipe_runs import RECIPES
from trl_populora.evaluate.cross_play import assemble
from trl_populora.lora.members import read_member
from trl_populora.run.read import read_population
from trl_populora.tasks import load_seed_tasks


sys.path.insert(0, str(RECIPES))

import score_held_out  # noqa: E402


WEIGHTS = "adapter_model.safetensors"
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


def test_checkpoints_of_one_step_are_told_apart_by_their_runs():
    places = [Path("runs/s0/checkpoint-2"), Path("runs/s1/checkpoint-2"), Path("runs/s1")]
    names = [score_held_out.student_name(place, "student_0") for place in places]
    assert names == ["s0-checkpoint-2 student_0", "s1-checkpoint-2 student_0", "s1 student_0"]


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
    tasks, output = tmp_path / "tasks.parquet", tmp_path / "scores"
    given = [task.to_record() for kind in ("code_o", "code_i") for task in seed_tasks if task.kind == kind]
    Dataset.from_list(given[:2]).to_parquet(tasks)
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
    assert len(json.loads((output / "start.json").read_text())["tries"]) == 2
    kept = output / "base.json"
    kept.write_text(kept.read_text().replace("false", "true"))
    assert run()["base"]["right"][0] == 1.0, "what is known is read, not asked again"


def test_the_gain_of_several_runs_has_an_interval_over_runs(seed_tasks):
    """Two runs of two students and one: .75 and .5 right, .25 before."""
    start, half, whole = [[RIGHT, WRONG], [WRONG, WRONG]], [[RIGHT, WRONG]] * 2, [[RIGHT, RIGHT]] * 2
    mean, margin = score_held_out.gain_over_runs([[half, whole], [half]], start)
    assert mean == pytest.approx(0.375)
    assert margin == pytest.approx(12.7062 * 0.125, rel=1e-4), "two runs: 12.7 standard errors"
    found = {
        "start": score_held_out.figures(start, None, seed_tasks[:2]),
        "run": score_held_out.figures(half, start, seed_tasks[:2]),
        "mean": score_held_out.mean_figures([half, whole, half], start, seed_tasks[:2]) | {"over runs": [mean, 0.1]},
    }
    head, *rows = score_held_out.table(found)
    assert [row[head.index("over runs")] for row in rows] == ["", "", "+0.375 [+0.275, +0.475]"]


@pytest.fixture
def one_task(seed_tasks, tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(next(task.to_record() for task in seed_tasks if task.kind == "code_o")) + "\n")
    return path


def score(monkeypatch, *words: object) -> None:
    further = ["--attempts", "1", "--task_kinds", *SETTINGS["task_kinds"]]
    monkeypatch.setattr(sys, "argv", ["score_held_out.py", *map(str, words), *further])
    score_held_out.main()


def change_settings(run: Path, **settings: object) -> None:
    saved = json.loads((run / "population.json").read_text())
    saved["settings"] |= settings
    (run / "population.json").write_text(json.dumps(saved))


def test_attempts_of_other_weights_of_another_base_or_asked_otherwise_are_refused(
    finished, one_task, tmp_path, monkeypatch
):
    run, output = tmp_path / "run", tmp_path / "scores"
    shutil.copytree(finished, run)
    words = run, "--tasks", one_task, "--output", output
    score(monkeypatch, *words)
    written = {path.name: path.read_bytes() for path in output.iterdir()}
    members = run / "members"
    shutil.copyfile(members / "student_1" / WEIGHTS, members / "student_0" / WEIGHTS)
    with pytest.raises(ValueError, match=r"run-student_0.json answers another question \(weights \w+, here \w+\)"):
        score(monkeypatch, *words)
    change_settings(run, base_revision="v1", max_completion_length=7)
    with pytest.raises(ValueError, match=r"base.json .* \(base .* at main, here .* at v1, asked_as \w+, here \w+\)"):
        score(monkeypatch, *words)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == written


def test_runs_on_two_bases_are_not_compared(finished, one_task, tmp_path, monkeypatch):
    other = tmp_path / "other"
    shutil.copytree(finished, other)
    change_settings(other, base_revision="v1")
    with pytest.raises(ValueError, match=r"other is on another base \(.* at v1\) than"):
        score(monkeypatch, finished, other, "--tasks", one_task, "--output", tmp_path / "scores")


def test_what_members_started_from_is_scored_as_a_run_starts_from_it(finished, one_task, tmp_path, monkeypatch):
    """An adapter of half the rank and four times the scaling."""
    start, products = tmp_path / "start", {}
    config = LoraConfig(r=2, lora_alpha=16, target_modules=["q_proj"], init_lora_weights=False)
    base = AutoModelForCausalLM.from_pretrained(read_population(finished)["base_model"])
    get_peft_model(base, config).save_pretrained(start)
    try_tasks = score_held_out.try_tasks

    def look(contest, member, name, *others):
        products[name] = add_up(read_member(contest.model, member), 8 / 4) if member != "base" else None
        return try_tasks(contest, member, name, *others)

    def add_up(factors: dict[str, torch.Tensor], scaling: float) -> torch.Tensor:
        key = min(key for key in factors if "q_proj.lora_B" in key)
        return scaling * factors[key] @ factors[key.replace("lora_B", "lora_A")]

    monkeypatch.setattr(score_held_out, "try_tasks", look)
    score(monkeypatch, finished, "--tasks", one_task, "--start", start, "--output", tmp_path / "scores")
    close = {"atol": 0.02, "rtol": 0.02}  # members are asked in bfloat16
    torch.testing.assert_close(products["start"], add_up(load_file(start / WEIGHTS), 16 / 2), **close)
    own = load_file(finished / "members" / "student_0" / WEIGHTS)
    torch.testing.assert_close(products["run student_0"], add_up(own, 8 / 4), **close)
    assert products["start"].abs().max() > 0.1


def test_the_base_is_loaded_as_the_run_loaded_it(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    change_settings(run, base_revision="v1")
    with assemble([str(run)], task_kinds=SETTINGS["task_kinds"], **score_held_out.AS_TRAINED) as contest:
        kwargs = contest.args.model_init_kwargs
    assert (kwargs["revision"], kwargs["dtype"]) == ("v1", "bfloat16")
    assert "quantization_config" in kwargs


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ("attempts", r"base.json answers another question \(.*attempts 2, here 1\)"),
        ("start", r"start.json answers another question \(of .*student_1, here .*student_0"),
        ("no start", "holds no adapter_config.json; `--start`"),
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
