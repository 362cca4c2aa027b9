"""
From a setting to what it changes, for those that no other test sets; those of evolution are in `test_evolution.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean

import pyarrow.parquet as pq
import pytest

from tests.populora_run import Letters, letters
from trl_populora import start
from trl_populora.run.saved_population import check_settings
from trl_populora.step.pay import Answer, Outcome
from trl_populora.tasks import TaskKind
from trl_populora.tasks.dataset import build_archive
from trl_populora.trainer import PopuLoRATrainer


def test_archive_size(make_args, seed_dataset):
    for size, kept in ((2, 2), (16384, 4)):
        args = make_args(archive_size=size)
        archive = build_archive(seed_dataset, start.make_kinds(args), args.prompt_style, args.archive_size, 6)
        assert set(Counter(task.kind for task in archive).values()) == {kept}


OUTCOMES = [Outcome("code_o", False), *(Outcome("code_o", True, solve_rate=rate, attempts=4) for rate in (0.0, 0.25))]
ANSWERS = [Answer("code_o", *flags) for flags in ((True, True), (False, True), (False, False))]


@pytest.mark.parametrize(
    ("settings", "rewards"),
    [
        ({}, [-1.0, 0.0, 0.75, 1.0, -0.5, -1.0]),
        ({"teacher_reward": "learnability"}, [-1.0, 0.0, 0.1875, 1.0, -0.5, -1.0]),
        ({"teacher_reward_invalid": -3.0}, [-3.0, 0.0, 0.75, 1.0, -0.5, -1.0]),
        ({"teacher_reward_unsolved": 0.125}, [-1.0, 0.125, 0.75, 1.0, -0.5, -1.0]),
        ({"teacher_reward": "tests.test_settings:pay_attempts"}, [0.0, 4.0, 4.0, 1.0, -0.5, -1.0]),
        ({"student_reward": "tests.test_settings:pay_form"}, [-1.0, 0.0, 0.75, 1.0, 1.0, 0.0]),
        ({"student_reward_correct": 2.0}, [-1.0, 0.0, 0.75, 2.0, -0.5, -1.0]),
        ({"student_reward_wrong": 0.0}, [-1.0, 0.0, 0.75, 1.0, 0.0, -1.0]),
        ({"student_reward_malformed": -2.0}, [-1.0, 0.0, 0.75, 1.0, -0.5, -2.0]),
    ],
)
def test_rewards(make_args, settings, rewards):
    rules = start.make_rules(make_args(**settings), {})
    assert [*map(rules.teacher_reward, OUTCOMES), *map(rules.student_reward, ANSWERS)] == rewards


def pay_attempts(outcome):
    return outcome.attempts


def pay_form(answer):
    return float(answer.well_formed)


def test_what_a_run_pays_is_what_it_logs(random_base, make_args, seed_dataset, lora):
    """Every teacher's reward is its rule's, in the rollouts and in the metrics."""
    own = {"teacher_reward": "tests.test_settings:pay_attempts", "student_reward": "tests.test_settings:pay_form"}
    args = make_args(max_steps=1, **own)
    trainer = PopuLoRATrainer(random_base, None, args, train_dataset=seed_dataset, peft_config=lora)
    trainer.train()
    (path,) = Path(args.output_dir, "rollouts").glob("*.parquet")
    rows = pq.read_table(path).to_pylist()
    paid = {role: [row["reward"] for row in rows if row["role"] == role] for role in ("teacher", "student")}
    assert paid["teacher"] == [2.0 * row["valid"] for row in rows if row["role"] == "teacher"]
    assert paid["student"] == [float(row["well_formed"]) for row in rows if row["role"] == "student"]
    assert [row["reward"] for row in rows] == [row["pay"] for row in rows]
    logged = next(entry for entry in trainer.state.log_history if "rewards/teacher_reward/mean" in entry)
    for role, rewards in paid.items():
        assert logged[f"rewards/{role}_reward/mean"] == pytest.approx(fmean(rewards))


class Silent(Letters):
    """Does not say what tasks use."""

    features = TaskKind.features


@pytest.mark.parametrize("needs", [{"teacher_reward": "rarity"}, {"replay": 0.25}])
def test_a_kind_that_does_not_say_what_tasks_use_is_refused_where_that_is_asked(random_base, make_args, lora, needs):
    args = make_args(task_kinds=["tests.test_settings:Silent"], per_device_train_batch_size=4, **needs)
    (option,) = needs
    with pytest.raises(ValueError, match=f"`{option}={needs[option]}` asks what tasks use, and letters does not say"):
        PopuLoRATrainer(random_base, None, args, peft_config=lora)


def test_replay_gives_students_archived_tasks_beside_the_proposals(random_base, make_args, seed_dataset, lora):
    args = make_args(max_steps=1, replay=0.25, per_device_train_batch_size=7)  # one beside each match's four proposals
    trainer = PopuLoRATrainer(random_base, None, args, train_dataset=seed_dataset, peft_config=lora)
    trainer.train()
    (path,) = Path(args.output_dir, "rollouts").glob("*.parquet")
    rows = pq.read_table(path).to_pylist()
    assert len(rows) == args.rows_per_step == 2 * (4 + (4 + 1) * 2) == 28
    for match in (0, 1):
        own = [row for row in rows if row["match"] == match]
        filled = sum(not row["valid"] for row in own if row["role"] == "teacher")
        assert sum(row["archived"] for row in own) == (filled + 1) * args.attempts_per_task


@pytest.mark.parametrize("baseline", ["member", "group"])
def test_teacher_baseline(random_base, make_args, seed_dataset, lora, baseline):
    """A proposal is compared with its teacher's others of its kind, or with all of the match."""
    args = make_args(teacher_baseline=baseline, scale_rewards="none", task_kinds=["code_o", "code_i"], max_steps=1)
    PopuLoRATrainer(random_base, letters, args, train_dataset=seed_dataset, peft_config=lora).train()
    (path,) = Path(args.output_dir, "rollouts").glob("*.parquet")
    proposals = [row for row in pq.read_table(path).to_pylist() if row["role"] == "teacher"]

    def group_of(row):
        return row["match"], row["kind"] if baseline == "member" else None

    rewards = defaultdict(list)
    for row in proposals:
        rewards[group_of(row)].append(row["reward"])
    assert len(rewards) == (4 if baseline == "member" else 2)
    expected = [row["reward"] - fmean(rewards[group_of(row)]) for row in proposals]
    assert [row["advantage"] for row in proposals] == pytest.approx(expected, abs=1e-6)
    assert any(expected)


def test_a_run_of_given_tasks_goes_on_with_the_next_one(make_args, tmp_path):
    saved = {"settings": {"teachers": 0, "proposals_per_teacher": 4, "attempts_per_task": 2}}
    with pytest.raises(ValueError, match="change these settings: `proposals_per_teacher` was 4, is 8. Resume"):
        check_settings(make_args(teachers=0, proposals_per_teacher=8), tmp_path, saved, processes=1)
    saved["settings"]["teachers"] = 2
    check_settings(make_args(proposals_per_teacher=8), tmp_path, saved, processes=1)


def test_saved_settings_that_are_gone_load_and_are_told_in_one_line(make_args, tmp_path, caplog):
    saved = {"settings": {"students_per_task": 2, "teacher_scale": "running"}}
    check_settings(make_args(), tmp_path, saved, processes=1)
    (told,) = caplog.messages
    assert "students_per_task, teacher_scale" in told
