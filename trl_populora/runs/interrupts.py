"""Ctrl-C and SIGTERM: a run ends with its step, saves a checkpoint or its members, and says how to continue."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler


logger = logging.getLogger(__name__)

MAY_SKIP_THE_STEP = ("no", "best")  # save strategies: the latter, where the step was evaluated and is no best one
DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class StopAtSignals(TrainerCallback):
    """
    Context of `train()` in which the first Ctrl-C or SIGTERM ends the run after the step that it came in, on all
    ranks.

    It leaves a checkpoint; where `save_strategy` makes none of this step, the members. A second Ctrl-C ends it at
    once. Handlers that others have set stay, those of `enable_jit_checkpoint` among them,
    which would end each rank where it happens to be.

    Args:
        callbacks (`CallbackHandler`): The trainer's; this is one of them while it lasts.
        args (`TrainingArguments`): Where and whether the run saves.
        newest (`Callable`): Finds the newest whole checkpoint in a directory, or `None`.
        save (`Callable`): Saves the members in the run's directory. Collective.

    Raises:
        `KeyboardInterrupt`: At the exit, after Ctrl-C.
        `SystemExit`: Likewise, after SIGTERM, with the status that it would have had.
    """

    def __init__(
        self,
        callbacks: CallbackHandler,
        args: TrainingArguments,
        newest: Callable[[str], str | None],
        save: Callable[[], None],
    ):
        self.callbacks, self.args, self.newest, self.save = callbacks, args, newest, save
        self.state = TrainerState()
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopAtSignals:
        if threading.current_thread() is threading.main_thread():
            for number, default in DEFAULTS.items():
                if signal.getsignal(number) == default:
                    self._before[number] = signal.signal(number, self._receive)
        self.callbacks.add_callback(self)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.callbacks.remove_callback(self)
        state = self.state
        stopped = self.received is not None and error is None and state.global_step < state.max_steps
        members = stopped and self.args.save_strategy in MAY_SKIP_THE_STEP
        if members:
            self.save()
        if (stopped or kind is KeyboardInterrupt) and self.args.process_index == 0:
            way_on = self._way_on(members)
            logger.warning("Stopped after step %d of %d. %s", state.global_step, state.max_steps, way_on)
        if stopped and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if stopped:
            raise SystemExit(128 + signal.SIGTERM)

    def _receive(self, number: int, frame: Any) -> None:
        if self.received == number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None and self.args.process_index == 0:
            saving = ", and a checkpoint" if self._saves() else ""
            logger.warning("Stopping after this step%s; Ctrl-C (once more) stops at once.", saving)
        self.received = number

    def _saves(self) -> bool:
        return self.args.save_strategy != "no"

    def _way_on(self, members: bool) -> str:
        saved = self.newest(self.args.output_dir)
        if saved is not None:
            told = f"{saved} is whole: `--resume`, or `train(resume_from_checkpoint=True)`, goes on from there."
        else:
            told = "There is no checkpoint (`save_steps`), so the run can only start again."
        if members:
            told += f" The members of this step are in {self.args.output_dir}; `warm_start` begins with them."
        return told

    def on_train_begin(self, args, state, control, **kwargs):
        self.state = state

    def on_step_end(self, args, state, control, **kwargs):
        received = gather_object([self.received])  # a signal may reach one rank, or two of them in different steps
        self.received = next((number for number in received if number is not None), None)
        if self.received is not None:
            control.should_training_stop = True
            control.should_save = control.should_save or self._saves()
