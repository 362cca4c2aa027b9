"""A run in which nothing can be learned says so, once."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from trl_populora.run.callbacks import STEPS, Alarms
from trl_populora.step.rows import Played


MODE = "vllm_importance_sampling_mode"
ARGS = SimpleNamespace(student_baseline="group", report_to=["a tracker"], **{MODE: "sequence_mask"})
WELL = {"propose/valid_rate": 0.5, "frac_reward_zero_std": 0.5, "solve/rate": 0.5}


def reject(reason, detail=""):
    return {"role": "teacher", "valid": False, "reject_reason": reason, "reject_detail": detail}


REJECTS = [*[reject("format", "there is no ```input block")] * 3, reject("timeout")]


def play(logs, args=ARGS, begin=0) -> list[tuple]:
    """Logs these steps one after the other; each was played with `REJECTS`. Returns the alerts."""
    alerts: list[tuple] = []
    alarms = Alarms(lambda: Played([], REJECTS), lambda *told: alerts.append(told))
    alarms.on_train_begin(args, SimpleNamespace(is_world_process_zero=True, global_step=begin), None)
    for step, entry in enumerate(logs, begin + 1):
        state = SimpleNamespace(is_world_process_zero=True, global_step=step)
        alarms.on_log(args, state, None, logs=WELL | entry)
    return alerts


def test_the_first_step_without_a_valid_task_is_told_once_with_the_reason(caplog):
    play([{}] * STEPS)
    assert not caplog.messages
    alerts = play([{}, *[{"propose/valid_rate": 0.0}] * 5], begin=7)
    (line,) = caplog.messages
    assert alerts == [(["a tracker"], "No valid proposal", line)]
    assert "No proposal of step 9 was valid" in line
    assert "3 of 4 were rejected for `format`: there is no ```input block." in line


@pytest.mark.parametrize("rate", [0.0, float("nan")])
def test_flat_groups_for_long_are_told_once(caplog, rate):
    play([{"frac_reward_zero_std": 1.0, "solve/rate": rate}] * 3 * STEPS)
    (line,) = caplog.messages
    assert "worth the same" in line
    assert ("0 % of attempts at fresh tasks" if rate == 0 else "no fresh task had been attempted") in line


def test_flat_groups_do_not_matter_where_a_member_is_compared_with_itself(caplog):
    args = SimpleNamespace(student_baseline="member", report_to=[], **{MODE: "sequence_mask"})
    play([{"frac_reward_zero_std": 1.0}] * 3 * STEPS, args)
    assert not caplog.messages


def test_a_low_mean_weight_of_whole_completions_for_long_is_told_once_with_the_option(caplog):
    weight = "sampling/importance_sampling_ratio/mean"
    for well in (0.91, float("nan"), None):
        play([{weight: 0.5}] * (STEPS - 1) + [{weight: well}] + [{weight: 0.5}] * (STEPS - 1))
    play([{weight: 0.5}] * STEPS, SimpleNamespace(**vars(ARGS) | {MODE: "token_truncate"}))
    assert not caplog.messages
    play([{weight: 0.5}] * 3 * STEPS)
    (line,) = caplog.messages
    assert f"below 0.9 in the last {STEPS} steps (now 0.50)" in line
    assert f"`{MODE}=token_truncate`" in line


def test_a_run_in_which_nothing_is_valid_says_so(random_base, make_args, lora, seed_dataset, monkeypatch, caplog):
    """By what a real run logs: a random base writes no task and no answer."""
    from trl_populora.trainer import PopuLoRATrainer

    monkeypatch.setattr("trl_populora.run.callbacks.STEPS", 2)
    trainer = PopuLoRATrainer(random_base, None, make_args(max_steps=3), train_dataset=seed_dataset, peft_config=lora)
    trainer.train()
    (rejects,) = (line for line in caplog.messages if "No proposal of step 1 was valid" in line)
    assert re.search(r"\d of 8 were rejected for `format`: block 'python' is missing", rejects)
    (flat,) = (line for line in caplog.messages if "in the last 2 steps" in line)
    assert re.search(
        r"All attempts at each task were worth the same .*\(at the last log no fresh task had been attempted\)", flat
    )
