"""Children beside their parents in one short run, and the updates that are counted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trl_populora.lora.members import read_member
from trl_populora.population.factors import compare
from trl_populora.run.read import read_lines, read_population


sys.path.insert(0, str(Path(__file__).parents[1]))

import as_printed  # noqa: E402
import recovery  # noqa: E402
from recovery import ENTRANTS, FRESH, NEWBORN, PARENT, UPDATES  # noqa: E402


SMALL = ["--proposals_per_teacher", "3", "--attempts_per_task", "3", "--per_device_train_batch_size", "12"]
SMALL += ["--max_completion_length", "48"]


def test_a_child_is_back_after_the_first_update_from_which_it_is_paid_what_its_parent_is():
    plays = UPDATES + NEWBORN
    late = [0.0] * 7 + [1.0] * (plays - 7)
    rewards = {PARENT: [1.0] * plays, "clone": [0.96] * plays, FRESH: [0.5] * plays, "dare": late}
    assert recovery.count_updates(rewards, "clone") == 0, "within the tolerance"
    assert recovery.count_updates(rewards, FRESH) is None
    assert recovery.count_updates(rewards, "dare") == 7
    assert recovery.behind(rewards, "dare")[4:8] == pytest.approx([-1, -2 / 3, -1 / 3, 0])


def test_plays_without_a_fresh_task_are_left_out():
    rewards = {PARENT: [1.0, None, 1.0, 1.0, 1.0], "dare": [0.0, 0.0, None, 1.0, 1.0]}
    assert recovery.behind(rewards, "dare") == [-1, 0, 0]


@pytest.fixture(scope="module")
def parents(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("parents")
    options = [
        "--max_steps",
        "2",
        "--teachers",
        "2",
        "--students",
        "2",
        "--evolve_every",
        "0",
        "--eval_strategy",
        "no",
    ]
    options += ["--eval_on_start", "false", *SMALL]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(as_printed.CONFIG.parents[1]))
        as_printed.train(root / "seed_0", "default", 0, options)
    return root


def test_members_are_the_best_parent_a_fresh_adapter_and_a_child_of_each_operator(parents, tmp_path):
    given = [word for name, value in recovery.GAME.items() for word in (f"--{name}", str(value))]
    trainer = recovery.build_trainer(*as_printed.parse(tmp_path / "run", "default", 0, [*given, *SMALL]))
    recovery.fill(trainer, parents / "seed_0", 0)
    for role in recovery.ROLES:
        members = {e: read_member(trainer.model, f"{role}_{place}") for place, e in enumerate(ENTRANTS)}
        away = {entrant: compare(factors, members[PARENT])["cosine"] for entrant, factors in members.items()}
        assert away["clone"] == pytest.approx(1)
        assert all(not value.any() for key, value in members[FRESH].items() if "lora_B" in key)
        assert all(away[name] < 0.9999 for name in ENTRANTS[2:] if name != "clone")
        saved = [each for each in read_population(parents / "seed_0")["members"] if each["role"] == role]
        second, best = sorted(saved, key=lambda each: each["mu"])
        files = [parents / "seed_0" / each["adapter"] / "adapter_model.safetensors" for each in (best, second)]
        better, worse = map(load_file, files)
        assert all(torch.equal(members[PARENT][key], value) for key, value in better.items())
        assert compare(members["average"], worse)["cosine"] > compare(better, worse)["cosine"]
    trainer.close()


def test_a_study_plays_reads_and_tells_and_plays_nothing_twice(parents, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(recovery.GAME, "max_steps", NEWBORN)
    monkeypatch.setattr(recovery, "UPDATES", 0)
    options = ["--parents", str(parents), "--seeds", "0", "--output", str(tmp_path), *SMALL]
    monkeypatch.setattr(sys, "argv", ["recovery.py", *options])
    recovery.main()
    first = capsys.readouterr().out
    figures = json.loads(first.splitlines()[-1])
    assert figures["seeds"] == [0]
    assert list(figures["updates"]["student"]) == list(ENTRANTS[1:])
    assert len([line for line in read_lines(tmp_path / "seed_0" / "metrics.jsonl") if "loss" in line]) == NEWBORN
    assert "step 1/" in first
    recovery.main()
    second = capsys.readouterr().out
    assert second.splitlines()[-1] == first.splitlines()[-1]
    assert "step 1/" not in second
