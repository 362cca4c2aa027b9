"""Says once when a run goes on but nothing can be learned in it: in the log, and as alerts of W&B and trackio."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from transformers import TrainerCallback

from trl_populora.runs.lines import PLAYED
from trl_populora.step.rows import Played


logger = logging.getLogger(__name__)

STEPS = 10  # one step in which all attempts are worth the same is bad luck; one without a valid task is a wrong prompt
FLAT = "frac_reward_zero_std"


class Alarms(TrainerCallback):
    """
    Warns of a run in which nobody can learn, each reason once per run.

    - No proposal of a step was valid; the most frequent reason is named.
    - All attempts at each task were worth the same for ten steps, while students are compared within groups.

    Args:
        played: Returns the step as it was played.
        alert: Takes the names in `report_to`, a title of less than 64 characters and a text.
    """

    def __init__(self, played: Callable[[], Played], alert: Callable[[Sequence[str], str, str], None]) -> None:
        self.played, self.alert = played, alert
        self._well: dict[str, int] = {}  # last step at which all was well; absent once warned

    def on_train_begin(self, args, state, control, **kwargs):
        self._well = {"valid": state.global_step, "flat": state.global_step}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or PLAYED not in (logs or {}):
            return
        step = state.global_step
        if self._lasts("valid", step, logs[PLAYED] == 0, 1):
            self._warn(
                args,
                "No valid proposal",
                "No proposal of step %d was valid, so teachers learn little. %s `rollouts/` shows what they wrote; "
                "`populora try` shows which prompts a base can follow.",
                step,
                _name_reason(self.played()),
            )
        compared, rate = args.student_baseline == "group", logs.get("solve/rate", math.nan)
        if self._lasts("flat", step, compared and logs.get(FLAT) == 1, STEPS):
            self._warn(
                args,
                "Students do not learn",
                "All attempts at each task were worth the same in the last %d steps, so students do not learn: the "
                "tasks are too easy or too hard for them (%s are solved), or `attempts_per_task` is too small.",
                STEPS,
                "none" if math.isnan(rate) else f"{100 * rate:.0f} %",
            )

    def _warn(self, args: Any, title: str, text: str, *values: Any) -> None:
        logger.warning(text, *values)
        self.alert(args.report_to, title, text % values)

    def _lasts(self, what: str, step: int, bad: bool, steps: int) -> bool:
        """Whether it has been bad for long enough, and nobody was told."""
        if what not in self._well:
            return False
        if not bad:
            self._well[what] = step
        if step - self._well[what] < steps:
            return False
        del self._well[what]
        return True


def _name_reason(played: Played) -> str:
    """The most frequent reason for rejects in a sentence, with the first of its details."""
    rejects = [record for record in played.records if record["role"] == "teacher" and not record["valid"]]
    ((reason, count),) = Counter(record["reject_reason"] for record in rejects).most_common(1)
    detail = next((r["reject_detail"] for r in rejects if r["reject_reason"] == reason), "")
    return f"{count} of {len(rejects)} were rejected for `{reason}`{f': {detail:.200}' if detail else ''}."
