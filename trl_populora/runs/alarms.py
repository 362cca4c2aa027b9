"""Says once when a run goes on but nothing can be learned in it."""

from __future__ import annotations

import logging
import math
from typing import Any

from transformers import TrainerCallback

from trl_populora.runs.lines import PLAYED


logger = logging.getLogger(__name__)

STEPS = 10  # one step without a valid task is bad luck
REJECT, FLAT = "verify/reject/", "frac_reward_zero_std"


class Alarms(TrainerCallback):
    """
    Warns of a run in which nobody can learn, each reason once per run.

    - No proposal was valid for ten steps; the most frequent reason is named.
    - All attempts at each task were worth the same for ten steps, while students are compared within groups.
    """

    def __init__(self) -> None:
        self._well: dict[str, int] = {}  # last step at which all was well; absent once warned

    def on_train_begin(self, args, state, control, **kwargs):
        self._well = {"valid": state.global_step, "flat": state.global_step}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or PLAYED not in (logs or {}):
            return
        step = state.global_step
        if self._lasts("valid", step, logs[PLAYED] == 0):
            logger.warning(
                "No proposal was valid in the last %d steps, so teachers learn little. %s", STEPS, _top(logs)
            )
        compared, rate = args.student_baseline == "group", logs.get("solve/rate", math.nan)
        if self._lasts("flat", step, compared and logs.get(FLAT) == 1):
            logger.warning(
                "All attempts at each task were worth the same in the last %d steps, so students do not learn: the "
                "tasks are too easy or too hard for them (%s are solved), or `attempts_per_task` is too small.",
                STEPS,
                "none" if math.isnan(rate) else f"{100 * rate:.0f} %",
            )

    def _lasts(self, what: str, step: int, bad: bool) -> bool:
        """Whether it has been bad for long enough, and nobody was told."""
        if what not in self._well:
            return False
        if not bad:
            self._well[what] = step
        if step - self._well[what] < STEPS:
            return False
        del self._well[what]
        return True


def _top(logs: dict[str, Any]) -> str:
    """The most frequent reason of the logged step, as a sentence."""
    counts = {key.removeprefix(REJECT): value for key, value in logs.items() if key.startswith(REJECT)}
    reason = max(counts, key=lambda name: counts[name])
    return (
        f"Most were rejected for `{reason}` ({counts[reason]:.0f} of {sum(counts.values()):.0f} per step); "
        "`rollouts/` shows what they wrote."
    )
