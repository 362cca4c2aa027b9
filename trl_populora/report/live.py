"""Keeps picture and page of a run up to date while it goes on."""

from __future__ import annotations

import logging
import time

from transformers import TrainerCallback

from trl_populora.report.page import write_report
from trl_populora.report.plots import plot_run
from trl_populora.runs.lines import STEP, sort_of


logger = logging.getLogger(__name__)

# Seconds before the first writing and between two, and the share of the run's time that writing may take: a page takes
# three to five seconds, so it is drawn anew every four minutes.
EVERY, SHARE = 120.0, 0.02


class LiveReport(TrainerCallback):
    """
    Writes `run.png` and `report.html` into the run while it goes on, and once more when a run that has them ends.

    `trainer.remove_callback(LiveReport)` leaves it out. What goes wrong is told once: a picture is worth no run.
    """

    def __init__(self) -> None:
        self._due, self._written = float("inf"), False

    def on_train_begin(self, args, state, control, **kwargs):
        self._due, self._written = time.monotonic() + EVERY, False

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and sort_of(logs) == STEP and time.monotonic() >= self._due:
            self._write(args.output_dir)

    def on_train_end(self, args, state, control, **kwargs):
        if self._written:
            self._write(args.output_dir)

    def _write(self, run: str) -> None:
        start = time.monotonic()
        try:
            plot_run(run)
            write_report(run)
        except ModuleNotFoundError:  # without the `report` extra
            self._due = float("inf")
            return
        except Exception as error:
            logger.warning("Picture and page of %s are not kept up to date any more: %r.", run, error)
            self._due, self._written = float("inf"), False
            return
        end = time.monotonic()
        self._due, self._written = end + max(EVERY, (end - start) / SHARE), True
