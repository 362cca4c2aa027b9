"""A run in which nothing can be learned says so, once."""

from __future__ import annotations

import re

import pytest
from transformers import TrainerState

from trl_populora.run.callbacks import STEPS, Alarms, PromptAlarms
from trl_populora.step.rows import Played


MODE = "vllm_importance_sampling_mode"
WELL = {"propose/valid_rate": 0.5, "frac_reward_zero_std": 0.5, "solve/rate": 0.5}


def reject(reason, detail=""):
    return {"role": "teacher", "valid": False, "reject_reason": reason, "reject_detail": detail}


REJECTS = [*[reject("format", "there is no ```input block")] * 3, reject("timeout")]


@pytest.fixture
def play(make_args):
    def play(logs, begin=0, **settings) -> list[tuple]:
        """Logs these steps one after the other; each was played with `REJECTS`. Returns the alerts."""
        alerts: list[tuple] = []
        args = make_args(**{"report_to": ["tensorboard"], MODE: "sequence_mask"} | settings)
        alarms = Alarms(lambda: Played([], REJECTS), lambda *told: alerts.append(told))
        alarms.on_train_begin(args, TrainerState(global_step=begin, max_steps=args.max_steps), None)
        for step, entry in enumerate(logs, begin + 1):
            alarms.on_log(args, TrainerState(global_step=step, max_steps=args.max_steps), None, logs=WELL | entry)
        return alerts

    return play


def test_the_first_step_without_a_valid_task_is_told_once_with_the_reason(play, caplog):
    play([{}] * STEPS)
    assert not caplog.messages
    alerts = play([{}, *[{"propose/valid_rate": 0.0}] * 5], begin=7)
    (line,) = caplog.messages
    assert alerts == [(["tensorboard"], "No valid proposal", line)]
    assert "No proposal of step 9 was valid" in line
    assert "3 of 4 were rejected for `format`: there is no ```input block." in line


@pytest.mark.parametrize("rate", [0.0, float("nan")])
def test_flat_groups_for_long_are_told_once(play, caplog, rate):
    play([{"frac_reward_zero_std": 1.0, "solve/rate": rate}] * 3 * STEPS)
    (line,) = caplog.messages
    assert "worth the same" in line
    assert ("0 % of attempts at fresh tasks" if rate == 0 else "no fresh task had been attempted") in line


def test_flat_groups_do_not_matter_where_a_member_is_compared_with_itself(play, caplog):
    play([{"frac_reward_zero_std": 1.0}] * 3 * STEPS, student_baseline="member")
    assert not caplog.messages


def test_a_low_mean_weight_of_whole_completions_for_long_is_told_once_with_the_option(play, caplog):
    weight = "sampling/importance_sampling_ratio/mean"
    for well in (0.91, float("nan"), None):
        play([{weight: 0.5}] * (STEPS - 1) + [{weight: well}] + [{weight: 0.5}] * (STEPS - 1))
    play([{weight: 0.5}] * STEPS, **{MODE: "token_truncate"})
    assert not caplog.messages
    play([{weight: 0.5}] * 3 * STEPS)
    (line,) = caplog.messages
    assert f"below 0.9 in the last {STEPS} steps (now 0.50)" in line
    assert f"`{MODE}=token_truncate`" in line


@pytest.mark.parametrize("name", ["pool_every", "evolve_every"])
def test_a_number_of_steps_that_the_run_does_not_have_is_told(play, caplog, name):
    play([], max_steps=4, **{name: 3})
    play([], max_steps=4, evolve_every=None)  # the default, 10
    assert not caplog.messages
    play([], max_steps=4, **{name: 4})
    (line,) = caplog.messages
    assert line.startswith(f"`{name}=4` does nothing in a run of 4 optimizer steps: ")


def test_options_of_evolution_in_a_run_that_does_not_evolve_are_told(caplog):
    from trl_populora import PopuLoRAConfig

    def begin(**options):
        given = {"students": 4, "max_steps": 30} | options
        args = PopuLoRAConfig("unused", use_cpu=True, bf16=False, report_to="none", **given).for_prompts()
        alarms = PromptAlarms([], lambda *told: None, list)
        alarms.on_train_begin(args, TrainerState(max_steps=30), None)

    begin(evolve_every=5, cull_fraction=0.5)
    begin(evolve_every=0, cull_fraction=0.5)  # somebody has switched it off
    assert not caplog.messages
    begin(cull_fraction=0.5, mutations="svd_perturb")
    (line,) = caplog.messages
    assert line.startswith("Without effect: `cull_fraction`, `mutations`. Nothing evolves in this run")
    assert line.endswith("or leave these options out.")


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
