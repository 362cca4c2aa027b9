"""A run in which nothing can be learned says so, once."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from trl_populora.runs.alarms import STEPS, Alarms


ARGS = SimpleNamespace(student_baseline="group")
WELL = {"propose/valid_rate": 0.5, "frac_reward_zero_std": 0.5, "solve/rate": 0.5}
WELL |= {"verify/reject/format": 3.0, "verify/reject/timeout": 1.0}


def play(logs, args=ARGS, begin=0):
    """Logs these steps one after the other."""
    alarms = Alarms()
    alarms.on_train_begin(args, SimpleNamespace(is_world_process_zero=True, global_step=begin), None)
    for step, entry in enumerate(logs, begin + 1):
        state = SimpleNamespace(is_world_process_zero=True, global_step=step)
        alarms.on_log(args, state, None, logs=WELL | entry)


def test_no_valid_task_for_long_is_told_once_with_the_reason(caplog):
    play([{"propose/valid_rate": 0.0}] * (STEPS - 1) + [{}] + [{"propose/valid_rate": 0.0}] * (STEPS - 1))
    assert not caplog.messages
    play([{"propose/valid_rate": 0.0}] * 5 * STEPS, begin=7)
    (line,) = caplog.messages
    assert f"No proposal was valid in the last {STEPS} steps" in line
    assert "Most were rejected for `format` (3 of 4 per step)" in line


@pytest.mark.parametrize("rate", [0.0, float("nan")])
def test_flat_groups_for_long_are_told_once(caplog, rate):
    play([{"frac_reward_zero_std": 1.0, "solve/rate": rate}] * 3 * STEPS)
    (line,) = caplog.messages
    assert "worth the same" in line
    assert ("0 % are solved" if rate == 0 else "none are solved") in line


def test_flat_groups_do_not_matter_where_a_member_is_compared_with_itself(caplog):
    args = SimpleNamespace(student_baseline="member")
    play([{"frac_reward_zero_std": 1.0}] * 3 * STEPS, args)
    assert not caplog.messages


def test_a_run_in_which_nothing_is_valid_says_so(random_base, make_args, lora, seed_dataset, monkeypatch, caplog):
    """By what a real run logs: a random base writes no task and no answer."""
    from trl_populora.populora_trainer import PopuLoRATrainer

    monkeypatch.setattr("trl_populora.runs.alarms.STEPS", 2)
    trainer = PopuLoRATrainer(random_base, None, make_args(max_steps=3), train_dataset=seed_dataset, peft_config=lora)
    trainer.train()
    told = [line for line in caplog.messages if "in the last 2 steps" in line]
    assert len(told) == 2
    assert re.search(r"No proposal was valid .*Most were rejected for `format` \(\d of 8 per step\)", told[0])
    assert re.search(r"All attempts at each task were worth the same .*\(none are solved\)", told[1])
