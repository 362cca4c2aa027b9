"""Ctrl-C and SIGTERM: a run ends with its step, saves, and says how it goes on."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

from accelerate.utils import gather_object
from transformers import Trainer, TrainerCallback

from trl_populora.runs.checkpoint import find_newest


logger = logging.getLogger(__name__)

DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class StopAtSignals(TrainerCallback):
    """
    Context of `train()`: the first Ctrl-C or SIGTERM ends the run on all ranks, after the step in which it came.

    The run then leaves a checkpoint; with `save_strategy="no"`, the members. A second Ctrl-C ends it at once.

    Args:
        trainer: Whose training it is; this is one of its callbacks while it lasts.

    Raises:
        `KeyboardInterrupt`: At the exit, after Ctrl-C.
        `SystemExit`: At the exit, after SIGTERM, with the status that the signal would have given.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopAtSignals:
        if threading.current_thread() is threading.main_thread():
            for number, default in DEFAULTS.items():
                if signal.getsignal(number) == default:  # a handler that a user or a scheduler's library has set stays
                    self._before[number] = signal.signal(number, self._receive)
        self.trainer.add_callback(self)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.trainer.remove_callback(self)
        args, state = self.trainer.args, self.trainer.state
        stopped = self.received is not None and error is None and state.global_step < state.max_steps
        if only_members := stopped and args.save_strategy == "no":
            self.trainer._save()
        if (stopped or kind is KeyboardInterrupt) and args.process_index == 0:
            saved = find_newest(args.output_dir)
            way_on = f"{saved} is whole: `--resume`, or `train(resume_from_checkpoint=True)`, goes on from there."
            if saved is None:
                way_on = "There is no checkpoint (`save_steps`), so the run can only start again."
            if only_members:
                way_on += f" The members of this step are in {args.output_dir}; `warm_start` begins with them."
            logger.warning("Stopped after step %d of %d. %s", state.global_step, state.max_steps, way_on)
        if stopped and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if stopped:
            raise SystemExit(128 + signal.SIGTERM)

    def _receive(self, number: int, frame: Any) -> None:
        # A second SIGTERM does not count: schedulers and launchers repeat it.
        if self.received == number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None and self.trainer.args.process_index == 0:
            logger.warning("This step is the last, then the run saves; Ctrl-C (once more) ends it at once.")
        self.received = number

    def on_step_end(self, args, state, control, **kwargs):
        received = gather_object([self.received])  # a signal may reach one rank, or two of them in different steps
        self.received = next((number for number in received if number is not None), None)
        if self.received is not None:
            control.should_training_stop = True
            control.should_save = control.should_save or args.save_strategy != "no"
            if args.save_strategy == "best":  # `Trainer` would save this step only if its evaluation is the best
                control.should_evaluate = False
