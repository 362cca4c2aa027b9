"""The race at equal rows: its plan, its tasks, and a small run that is judged and not made twice."""

from __future__ import annotations

import json
import re
import sys
import tarfile
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parents[1]))

import race  # noqa: E402
from likelihood import count_taught, write_targets  # noqa: E402
from merging import WAYS  # noqa: E402
from score_held_out import markdown  # noqa: E402
from screen import draw_held_out, held_out_tasks, options_of  # noqa: E402
from tiny_headroom import parse  # noqa: E402

from trl_populora.report.load import load_run  # noqa: E402


@pytest.mark.parametrize("arm", race.PLAN["arms"])
def test_every_arm_of_the_plan_has_as_many_rows(arm, tmp_path):
    plan = race.PLAN["arms"][arm]
    assert race.PLAN["rows"] % plan["rows_a_step"] == 0
    assert plan["merged"] in WAYS
    _, config, *_ = parse(tmp_path, 5, options_of(plan["settings"], tmp_path, 1, race.HALF_KNOWN))
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    assert rows == plan["rows_a_step"]


def test_the_judged_tasks_stand_in_no_screen():
    tasks = race.judged_tasks(60)
    assert len({task.task_id for task in tasks}) == 60
    used = {task.task_id for task in [*held_out_tasks(), *draw_held_out("likelihood", 300)]}
    used |= {target.task.task_id for target in write_targets(300)}
    assert not used & {task.task_id for task in tasks}


def test_the_page_tells_the_runs_so_far():
    folder = Path(race.__file__).parent
    kept = json.loads((folder / "tiny" / race.RESULTS).read_text())
    page = (folder / "README.md").read_text()
    assert markdown(race.list_runs(kept)) in page
    small, large = (kept[arm]["0"]["judged"][race.ONE_MODEL]["judged"] for arm in ("agent_104_slow", "agent_416"))
    assert f"solves {100 * (small - large):.1f} points more" in page
    compared, raced = (folder.parent / "docs" / "results.md").read_text(), race.find_raced(kept)
    assert markdown(race.describe(raced)) in compared
    assert all(markdown(race.compare(raced, arm)) in compared for arm in (race.AGENT, race.CANDIDATE))
    assert f"{100 * (small - large):.1f} points more of the race's tasks" in re.sub(r"\s+", " ", compared)


def test_runs_that_are_kept_join_figures_metrics_and_tables(tmp_path):
    project, output = tmp_path / "project" / "studies", tmp_path / "runs"
    (project / "tiny").mkdir(parents=True)
    (project.parent / "docs").mkdir()
    for name in ("tiny/race.json", "tiny/race_runs.tar.xz", "README.md", "../docs/results.md"):
        (project / name).write_bytes((race.STUDIES / name).read_bytes())
    before = json.loads((project / "tiny" / race.RESULTS).read_text())
    run = output / race.AGENT / "seed_99"
    run.mkdir(parents=True)
    (run / "trainer_state.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 600}\n')
    added = {race.AGENT: {"99": {**before[race.AGENT]["5"], "steps": 1}}}
    race.keep(output, added, project)
    kept = json.loads((project / "tiny" / race.RESULTS).read_text())
    assert kept == {**before, race.AGENT: before[race.AGENT] | added[race.AGENT]}
    assert [*kept[race.AGENT]][-1] == "99"
    with (
        tarfile.open(race.STUDIES / "tiny" / race.METRICS) as old,
        tarfile.open(project / "tiny" / race.METRICS) as new,
    ):
        assert {*new.getnames()} - {*old.getnames()} == {f"{race.AGENT}/seed_99/metrics.jsonl"}
        assert all(new.extractfile(name).read() == old.extractfile(name).read() for name in old.getnames())
        assert new.extractfile(f"{race.AGENT}/seed_99/metrics.jsonl").read() == b'{"step": 600}\n'
    raced, page = race.find_raced(kept), (project.parent / "docs" / "results.md").read_text()
    assert "99" in race.describe(raced)[1][1 + [*raced].index(race.AGENT)]
    assert markdown(race.describe(raced)) in page
    assert all(markdown(race.compare(raced, arm)) in page for arm in (race.AGENT, race.CANDIDATE))
    assert markdown(race.list_runs(kept)) in (project / "README.md").read_text()
    races = (race.STUDIES.parent / "docs" / "results.md").read_text().split("\n| ")
    assert len(page.split("\n| ")) == len(races), "rows of other tables stay"


def test_without_a_run_of_the_agent_nothing_is_compared():
    raced = race.find_raced(json.loads((race.STUDIES / "tiny" / race.RESULTS).read_text()))
    assert len(race.compare(raced, race.AGENT)) > 1
    del raced[race.AGENT]
    assert len(race.compare(raced, race.AGENT)) == 1


def test_the_run_that_fell_apart_is_told_as_it_was():
    folder = Path(race.__file__).parent
    with tarfile.open(folder / "tiny" / "race_runs.tar.xz") as kept:
        lines = kept.extractfile("agent_104_fast/seed_0/metrics.jsonl").read().splitlines()
    rates = {
        entry["step"]: entry["eval/solve_rate_mean"]
        for entry in map(json.loads, lines)
        if "eval/solve_rate_mean" in entry
    }
    told = f"from {100 * rates[125]:.0f} to {100 * rates[150]:.0f} % of the tasks between steps 125 and 150"
    assert told in (folder / "README.md").read_text()
    assert max(rate for step, rate in rates.items() if step >= 150) < 0.1


@pytest.mark.slow
def test_a_run_is_judged_by_student_and_as_one_model_goes_on_and_is_not_made_twice(tmp_path, monkeypatch, capsys):
    plan = {"rows": 48, "tasks": 2, "attempts": 2, "arms": {}}
    small = {"attempts_per_task": "2", "replay": "0", "max_completion_length": "48", "eval_steps": "100"}
    for name, more in {
        "pooled": {"pool_every": "1", "teacher_learning_rate": "5.0e-4", "proposals_per_teacher": "4"},
        race.AGENT: {"single_agent": "true", "proposals_per_teacher": "8"},
    }.items():
        settings = {**small, "per_device_train_batch_size": "12", "evolve_every": "0", **more}
        plan["arms"][name] = {"settings": settings, "rows_a_step": 24, "merged": "mean of factors", "seeds": [0]}
    monkeypatch.setattr(race, "PLAN", plan)
    monkeypatch.setattr(race, "FIRST", 0)
    monkeypatch.setattr(race, "probe_tasks", lambda: race.judged_tasks(1))
    given = ["race.py", "--arms", *plan["arms"], "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*given, "--rows", "24"])
    race.main()
    halves = json.loads((tmp_path / race.RESULTS).read_text())
    assert {run["0"]["rows"] for run in halves.values()} == {24}
    assert not race.find_raced(halves), "a first look"
    monkeypatch.setattr(sys, "argv", given)
    race.main()
    kept = json.loads((tmp_path / race.RESULTS).read_text())
    assert {path.name for path in (tmp_path / "pooled" / "seed_0").glob("judged_*")} == {
        "judged_1.json",
        "judged_2.json",
    }
    (pooled,), (agent,) = (kept[name].values() for name in plan["arms"])
    assert [*pooled["judged"]] == [race.ONE_MODEL, "student_0", "student_1"]
    assert [*agent["judged"]] == [race.ONE_MODEL]
    assert pooled["rows"] == agent["rows"] == plan["rows"]
    assert [*race.find_raced(kept)] == [*plan["arms"]]
    assert pooled["looks"] == {"1": halves["pooled"]["0"]["judged"][race.ONE_MODEL]["judged"]}
    assert "" not in race.list_runs(kept)[1], "half way and at the end"
    assert [row[-1] for row in race.list_runs(halves)[1:]] == ["", ""]
    assert all(0 <= rate <= 1 for each in pooled["judged"].values() for rate in each.values())
    taught = count_taught(tmp_path / "pooled" / "seed_0")
    rows = [row for row in load_run(tmp_path / "pooled" / "seed_0").rows if row["role"] == "student"]
    counted = sum(count for own in taught.values() for of in own.values() for count in of.values())
    assert counted == sum(not row["archived"] for row in rows) > 0
    made = (tmp_path / "pooled" / "seed_0" / "metrics.jsonl").stat().st_mtime_ns
    monkeypatch.setattr(sys, "argv", [*given, "--table_only"])
    race.main()
    assert (tmp_path / "pooled" / "seed_0" / "metrics.jsonl").stat().st_mtime_ns == made
    assert json.loads((tmp_path / race.RESULTS).read_text()) == kept
    shown = capsys.readouterr().out
    assert "| as one model, % |" in shown
    assert "\n| `pooled` | 1 | " in shown, "what it has more than the agent"
    monkeypatch.setattr(race, "FIRST", 1)
    assert not race.find_raced(kept), "a seed that chose settings"
