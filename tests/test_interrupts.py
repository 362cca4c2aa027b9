"""Ctrl-C and SIGTERM end a run with its step, leave a checkpoint, and say how it goes on."""

from __future__ import annotations

import errno
import inspect
import os
import signal
from contextlib import nullcontext

import pytest
from accelerate.commands.launch import deepspeed_launcher, multi_gpu_launcher
from torch.distributed.launcher.api import LaunchConfig
from transformers import TrainerCallback

from tests.populora_run import EVALUATED, ON_PROMPTS, make_trainer
from trl_populora.lora.members import read_saved_step
from trl_populora.run.callbacks import StopAtSignals
from trl_populora.run.checkpoint import find_newest, is_disk_full
from trl_populora.run.read import read_population
from trl_populora.run.saved_population import check_one_moment


class Send(TrainerCallback):
    """Sends signals to this process in the middle of a step."""

    def __init__(self, *numbers, step=2):
        self.numbers, self.step = numbers, step

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        for number in self.numbers if state.global_step == self.step - 1 else ():
            os.kill(os.getpid(), number)


def train(base, run, numbers, error, **settings):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    trainer = make_trainer(base, str(run), settings | {"max_steps": 4, "save_steps": 3})
    trainer.add_callback(Send(*numbers))
    with pytest.raises(error) as stop:
        trainer.train()
    assert {number: signal.getsignal(number) for number in before} == before
    return stop.value


@pytest.mark.parametrize(
    ("number", "error", "sort"),
    [
        (signal.SIGINT, KeyboardInterrupt, {}),
        (signal.SIGTERM, SystemExit, {}),
        pytest.param(signal.SIGINT, KeyboardInterrupt, ON_PROMPTS, id="prompts"),
    ],
)
def test_a_signal_leaves_a_checkpoint_and_says_how_to_continue(base, tmp_path, caplog, number, error, sort):
    stop = train(base, tmp_path, [number], error, **sort)
    assert find_newest(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    assert f"Stopped after step 2 of 4. {tmp_path}/checkpoint-2 is whole: `--resume`" in caplog.text
    assert number == signal.SIGINT or stop.code == 143


def test_a_stop_promises_no_resume_where_only_members_are_saved(base, tmp_path, caplog):
    train(base, tmp_path, [signal.SIGINT], KeyboardInterrupt, save_only_model=True)
    saved = str(tmp_path / "checkpoint-2")
    assert f"Stopped after step 2 of 4. `warm_start={saved!r}` begins with its members; it does not" in caplog.text
    assert "--resume" not in caplog.text


NO_BEST = {"save_strategy": "best", "eval_steps": 1, "metric_for_best_model": "solve_rate_mean", "learning_rate": 0.0}


def test_a_stop_leaves_a_checkpoint_where_only_the_best_are_saved(base, tmp_path):
    train(base, tmp_path, [signal.SIGINT], KeyboardInterrupt, **EVALUATED | NO_BEST)
    assert find_newest(str(tmp_path)) == str(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("step", [2, 4])
def test_a_stop_leaves_its_checkpoint_also_where_only_the_best_stays(base, tmp_path, step):
    """transformers deletes all checkpoints but the best when training ends; a stopped training has not ended."""
    best = NO_BEST | {"save_strategy": "steps", "load_best_model_at_end": True, "save_total_limit": 1}
    settings = EVALUATED | best | {"save_steps": 1, "max_steps": 4}
    trainer = make_trainer(base, str(tmp_path), settings)
    trainer.add_callback(Send(signal.SIGINT, step=step))
    with pytest.raises(KeyboardInterrupt) if step == 2 else nullcontext():
        trainer.train()
    left = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert left == ({"checkpoint-1", "checkpoint-2"} if step == 2 else {"checkpoint-1"})
    assert trainer.args.save_total_limit == 1


def test_a_stop_saves_the_members_where_no_checkpoints_are_wanted(base, tmp_path, caplog):
    train(base, tmp_path, [signal.SIGINT], KeyboardInterrupt, save_strategy="no")
    assert find_newest(str(tmp_path)) is None
    assert f"The members of this step are in {tmp_path}; `warm_start` begins with them" in caplog.text
    saved = read_population(tmp_path)
    check_one_moment(tmp_path, saved)
    assert saved["step"] == read_saved_step(tmp_path / "members" / "student_0") == 2


@pytest.mark.parametrize(
    ("numbers", "error", "saved"),
    [
        ((signal.SIGINT, signal.SIGINT), KeyboardInterrupt, False),
        ((signal.SIGTERM, signal.SIGINT), KeyboardInterrupt, False),
        ((signal.SIGTERM, signal.SIGTERM), SystemExit, True),
        ((signal.SIGINT, signal.SIGTERM), KeyboardInterrupt, True),
    ],
)
def test_a_ctrl_c_after_a_signal_ends_the_run_at_once_and_a_sigterm_changes_nothing(
    base, tmp_path, numbers, error, saved
):
    train(base, tmp_path, numbers, error)
    assert find_newest(str(tmp_path)) == (str(tmp_path / "checkpoint-2") if saved else None)


def test_where_nothing_was_saved_it_is_said(base, tmp_path, caplog):
    train(base, tmp_path, [signal.SIGINT, signal.SIGINT], KeyboardInterrupt)
    assert find_newest(str(tmp_path)) is None
    assert "There is no checkpoint (`save_steps`)" in caplog.text


def test_the_first_signal_of_several_processes_says_when_their_launcher_kills_them(
    base, tmp_path, monkeypatch, caplog
):
    trainer = make_trainer(base, str(tmp_path), {})
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    for world, patience, told in (("1", None, False), ("2", None, True), ("2", "600", False)):
        monkeypatch.setenv("WORLD_SIZE", world)
        if patience:
            monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", patience)
        caplog.clear()
        with StopAtSignals(trainer):
            signal.raise_signal(signal.SIGTERM)
        assert "The run ends after this step and saves." in caplog.text
        assert ("Its launcher waits 30 seconds" in caplog.text) == told
    monkeypatch.undo()
    trainer.close()


def test_launchers_wait_as_long_as_the_variable_says(monkeypatch):
    """`accelerate launch` hands its command to `torchrun`, which reads it."""
    seen = []
    for patience in ("600", None):
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", patience) if patience else monkeypatch.undo()
        seen.append(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2).shutdown_timeout)
    assert seen == [600, 30]
    assert "distrib_run.run(args)" in inspect.getsource(multi_gpu_launcher)
    assert "distrib_run.run(args)" in inspect.getsource(deepspeed_launcher)


def test_a_full_disk_is_told_from_other_errors(tmp_path, monkeypatch):
    assert is_disk_full(OSError(errno.ENOSPC, "No space left on device"), tmp_path)
    assert is_disk_full(RuntimeError("I/O error: No space left on device (os error 28)"), tmp_path)
    assert not is_disk_full(OSError(errno.EACCES, "Permission denied"), tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 0}))
    assert is_disk_full(RuntimeError("PytorchStreamWriter failed writing file"), tmp_path)
