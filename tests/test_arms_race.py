"""The comparison recipe: a run of it on the embedded base, and the page of two small runs that have ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.populora_run import make_trainer
from tests.without_vllm import without_vllm


sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))

import arms_race  # noqa: E402


@pytest.fixture(scope="module")
def output(random_base, seed_tasks, tmp_path_factory):
    """Two configs with one finished run each, and one run that has only begun."""
    root = tmp_path_factory.mktemp("race")
    Path(random_base, "tasks.json").write_text(json.dumps([task.to_record() for task in seed_tasks]))
    agent = {"single_agent": True, "per_device_train_batch_size": 6}
    for name, settings in {"pair/seed_0": {}, "agent/seed_0": agent, "agent/seed_1": agent}.items():
        trainer = make_trainer(random_base, str(root / name), settings | {"max_steps": 2, "save_strategy": "no"})
        trainer.train()
        if name != "agent/seed_1":
            trainer.save_state()
            trainer.save_model()
    return root


def test_a_run_is_trained_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", without_vllm()["PYTHONPATH"])
    options = ["--configs", "single_agent", "--seeds", "0", "--steps", "1", "--output", str(tmp_path)]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["arms_race.py", *options])
        arms_race.main()
    run = tmp_path / "single_agent" / "seed_0"
    assert arms_race.steps_done(run) == 1
    assert (run / "log.txt").read_text().count("step 1/1 |") == 1
    assert "1 x 1" in (tmp_path / "table.md").read_text()


def test_the_page_compares_what_has_been_run(output, monkeypatch):
    held_out = arms_race.held_out_tasks(6)
    assert {task.kind for task in held_out} == {"code_o", "code_i", "code_f"}
    monkeypatch.setattr(arms_race, "held_out_tasks", lambda: held_out)
    page = arms_race.compare(output, ["pair", "agent", "missing"], [0, 1], 2).read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "http" not in page
    text = (output / "table.md").read_text()
    assert "| steps x seeds | 2 x 1 |  | 2 x 2 |  |" in text
    assert "missing" not in text
    members = json.loads((output / "members.json").read_text())
    assert len(members["teachers"]) == len(members["students"]) == 3, "an unfinished run does not play"
    assert 0 <= members["base"] <= 1
    rows = [line for line in text.splitlines() if line.startswith("| teachers of")]
    assert [row.split(" |")[0] for row in rows] == ["| teachers of pair", "| teachers of agent"]


def test_the_first_steps_of_longer_runs_are_compared(output):
    page = arms_race.compare(output, ["pair", "agent"], [0, 1], 1).read_text()
    assert "| steps x seeds | 1 x 1 |  | 1 x 2 |  |" in (output / "table.md").read_text()
    assert page.count("data:image/png;base64,") == 1, "members of another step do not play"


def test_a_measure_is_a_mean_over_the_seeds(output):
    pages = arms_race.pages
    begun = {"agent": {seed: pages.load(output / "agent" / f"seed_{seed}") for seed in (0, 1)}}
    rates = [begun["agent"][seed][0]["propose/valid_rate"] for seed in (0, 1)]
    (row,) = [row for row in pages.table(begun) if row[0].startswith("valid proposals (")]
    assert row[1] == pages.spread(rates) == f"{sum(rates) / 2:.2f} ± {abs(rates[0] - rates[1]) / 2:.2f}"
