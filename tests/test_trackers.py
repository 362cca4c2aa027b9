"""Tables and alerts in the real W&B, offline, and the real trackio, on this disk."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import trackio
import wandb
from trackio import sqlite_storage

from tests.populora_run import EVALUATED, ON_PROMPTS, make_trainer
from tests.prompt_runs import QUESTIONS
from trl_populora import PopuLoRAConfig
from trl_populora.report.callbacks import BIRTH, MEMBER, PROMPT_MEMBER, alert
from trl_populora.run.read import LINEAGE, read_lines
from trl_populora.trainer import PopuLoRATrainer


PLAYED = ("prompt", "completion", "kind", "member", "role", "advantage")


@pytest.fixture(scope="module")
def tracked(base, tmp_path_factory):
    """A run of three steps with births and an evaluation after the second, in both trackers."""
    path = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_DIR", str(path))
        patch.setenv("WANDB_SILENT", "true")
        for module in (trackio.utils, sqlite_storage):  # `TRACKIO_DIR` of the environment, which is read at import
            patch.setattr(module, "TRACKIO_DIR", path / "trackio")
        settings = {"max_steps": 3, "evolve_every": 2, "save_strategy": "no", "log_completions": True}
        trackers = {"report_to": ["wandb", "trackio"], "project": "letters", "num_completions_to_print": 1}
        make_trainer(base, str(path / "run"), EVALUATED | settings | trackers).train()
        wandb.finish()
        yield path
        wandb.teardown()


def in_wandb(path: Path) -> dict[str, list[list[dict]]]:
    """Every table by name, in the order in which they were logged."""
    found: dict[str, list[list[dict]]] = {}
    files = [*path.glob("wandb/offline-run-*/files/media/table/*.table.json")]
    for file in sorted(files, key=lambda file: int(file.name.split("_")[1])):
        table = json.loads(file.read_text())
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        found.setdefault(file.name.split("_")[0], []).append(rows)
    return found


def logs_in_trackio(path: Path, project: str = "letters") -> list[dict]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (trackio.utils, sqlite_storage):
            patch.setattr(module, "TRACKIO_DIR", path / "trackio")
        store = sqlite_storage.SQLiteStorage
        (run,) = store.get_runs(project)
        return store.get_logs(project, run)


def in_trackio(path: Path) -> dict[str, list[list[dict]]]:
    """Likewise."""
    found: dict[str, list[list[dict]]] = {}
    for name, value in ((name, value) for log in logs_in_trackio(path) for name, value in log.items()):
        if isinstance(value, dict) and value.get("_type") == "trackio.table":
            found.setdefault(name, []).append(value["_value"])
    return found


@pytest.mark.parametrize("read", [in_wandb, in_trackio])
class TestTables:
    def test_population_with_evaluations_and_births(self, tracked, read):
        tables = read(tracked)["population"]
        assert [rows[0]["step"] for rows in tables] == [0, 2, 3, 3], "scores; births, and scores at the end"
        assert all(tuple(row) == MEMBER for rows in tables for row in rows)
        saved = json.loads((tracked / "run" / "population.json").read_text())["members"]
        for row, member in zip(tables[-1], saved, strict=True):
            assert (row["name"], row["mu"], row["held_out"]) == (member["name"], member["mu"], member["held_out"])
            assert row["parents"] == ", ".join(member["parents"])

    def test_births_are_those_of_the_lineage(self, tracked, read):
        events, last = read_lines(tracked / "run" / LINEAGE), read(tracked)["births"][-1]
        assert len(events) == len(last) > 1
        for event, row in zip(events, last, strict=True):
            assert tuple(row) == BIRTH
            assert (row["step"], row["child"]) == (event["step"], event["child"])
            assert row["replaced"] == event["replaced"]["member"]
            assert row["parents"] == ", ".join(parent["member"] for parent in event["parents"])

    def test_lineage_has_everybody_who_ever_lived(self, tracked, read):
        events, rows = read_lines(tracked / "run" / LINEAGE), read(tracked)["lineage"][-1]
        saved = json.loads((tracked / "run" / "population.json").read_text())["members"]
        alive = {f"{member['name']}@{member['version']}": member["mu"] for member in saved}
        replaced = {event["replaced"]["member"]: event["replaced"]["mu"] for event in events}
        assert {row["member"]: row["mu"] for row in rows} == alive | replaced
        assert {row["member"] for row in rows if row["replaced"] is not None} == replaced.keys()
        generation = {row["member"]: row["generation"] for row in rows}
        assert sorted(generation.values()) == [0] * 4 + [1] * len(events)
        assert all(row["born"] == 2 and row["parents"] for row in rows if row["generation"])

    def test_completions_tell_member_role_and_kind_as_text(self, tracked, read):
        tables = read(tracked)["completions"]
        for row in (row for rows in tables for row in rows):
            assert {type(row[name]) for name in PLAYED} == {str, float}
            assert row["member"].startswith(row["role"])


def alerts_in_wandb(path: Path) -> list[tuple[str, str, str]]:
    """What an offline run would send: its log has blocks of 32 KiB, each record its checksum, length and type."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = path.glob("wandb/offline-run-*/run-*.wandb")
    content, place, found, data = file.read_bytes(), 7, [], b""
    while place < len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
        length, kind = struct.unpack_from("<HB", content, place + 4)
        data += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record, data = Record.FromString(data), b""
            if record.WhichOneof("record_type") == "alert":
                found.append((record.alert.title, record.alert.text, record.alert.level))
    return found


def test_alarms_are_alerts(random_base, make_args, lora, seed_dataset, tmp_path, monkeypatch, caplog):
    """By a run whose base writes no task."""
    wandb.teardown()  # it keeps the directory of an earlier run
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    for module in (trackio.utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    args = make_args(max_steps=1, report_to=["wandb", "trackio"], project="barren", save_strategy="no")
    PopuLoRATrainer(random_base, None, args, train_dataset=seed_dataset, peft_config=lora).train()
    wandb.finish()
    wandb.teardown()
    (line,) = (message for message in caplog.messages if "No proposal of step 1 was valid" in message)
    assert alerts_in_wandb(tmp_path) == [("No valid proposal", line, "WARN")]
    (run,) = sqlite_storage.SQLiteStorage.get_runs("barren")
    (told,) = sqlite_storage.SQLiteStorage.get_alerts("barren", run)
    assert (told["title"], told["text"], told["level"]) == ("No valid proposal", line, "warn")


def test_tables_stand_at_their_step_among_the_curves(tracked):
    steps = [
        (log["population"]["_value"][0]["step"], log["train/global_step"])
        for log in logs_in_trackio(tracked)
        if "population" in log
    ]
    assert steps == [(0, 0), (2, 2), (3, 3), (3, 3)]


def test_a_run_without_births_and_evaluations_has_its_last_population(base, tmp_path, monkeypatch):
    for module in (trackio.utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    settings = {"max_steps": 1, "save_strategy": "no", "report_to": ["trackio"], "project": "quiet"}
    make_trainer(base, str(tmp_path / "run"), settings).train()
    logs = logs_in_trackio(tmp_path, "quiet")
    assert [log["train/global_step"] for log in logs if "population" in log] == [1]


def test_a_dataset_runs_table_has_rewards(base, tmp_path, monkeypatch):
    for module in (trackio.utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    settings = {"students": 2, "max_steps": 1, "save_strategy": "no", "report_to": ["trackio"], "project": "rewards"}
    evaluated = {"evaluated": True, "eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 1}
    trainer = make_trainer(base, str(tmp_path / "run"), ON_PROMPTS | settings | evaluated)
    trainer.train()
    (rows,) = [log["population"]["_value"] for log in logs_in_trackio(tmp_path, "rewards") if "population" in log]
    for row, member in zip(rows, trainer.describe()["members"], strict=True):
        assert tuple(row) == PROMPT_MEMBER
        assert (row["reward"], row["eval_reward"]) == (member["reward"], member["eval_reward"])
        assert None not in (row["reward"], row["eval_reward"])


def test_members_that_did_not_learn_are_an_alert_at_the_end(random_base, lora, tmp_path, monkeypatch, caplog):
    for module in (trackio.utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    options = {name: value for name, value in ON_PROMPTS.items() if name != "on_prompts"}
    options |= {"students": 2, "max_steps": 1, "save_strategy": "no", "report_to": ["trackio"], "project": "flat"}
    args = PopuLoRAConfig(str(tmp_path / "run"), **options)

    def pay(prompts, **columns):
        return [1.0] * len(prompts)

    PopuLoRATrainer(random_base, pay, args, QUESTIONS, peft_config=lora).train()
    (line,) = (message for message in caplog.messages if "did not learn" in message)
    (run,) = sqlite_storage.SQLiteStorage.get_runs("flat")
    (told,) = sqlite_storage.SQLiteStorage.get_alerts("flat", run)
    assert (told["title"], told["text"]) == ("Some members did not learn", line)


def test_an_alert_that_no_tracker_takes_is_only_a_warning(caplog):
    wandb.teardown()
    alert(["wandb", "trackio"], "No valid proposal", "No proposal of step 1 was valid.")
    assert [line.split(" (")[0] for line in caplog.messages] == [
        f"The alert 'No valid proposal' did not reach {name}" for name in ("wandb", "trackio")
    ]
