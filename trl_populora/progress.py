"""One line per population step: what happened, who leads, and where the time went."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm
from transformers.trainer_callback import PrinterCallback, ProgressCallback


if TYPE_CHECKING:
    from trl_populora.populora_trainer import PopuLoRATrainer

PHASES = ("match", "propose", "verify", "solve", "update")


class StepLine(ProgressCallback):
    """
    TRL's progress bar with one readable line per log instead of the whole dict of metrics.

    The dict goes to the loggers of `report_to` and to `trainer_state.json` as ever.
    """

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "propose/valid_rate" in (logs or {}):
            tqdm.write(step_line(state.global_step, state.max_steps, logs))


class BareStepLine(PrinterCallback):
    """The line without the bar, for `disable_tqdm`."""

    on_log = StepLine.on_log


def step_line(step: int, max_steps: int, logs: dict[str, Any]) -> str:
    """
    Formats the metrics of one step.

    Args:
        step, max_steps (`int`): Position in the run.
        logs (`dict`): Metrics as logged; a missing or NaN value prints as `-`.
    """
    parts = [
        f"step {step:>{len(str(max_steps))}}/{max_steps}",
        f"valid {_percent(logs.get('propose/valid_rate'))}",
        f"solved {_percent(logs.get('solve/rate'))}",
        f"reward teacher {_number(logs.get('rewards/teacher_reward/mean'))}"
        f" student {_number(logs.get('rewards/student_reward/mean'))}",
    ]
    if logs.get("evolve/replaced"):
        parts.append(f"replaced {logs['evolve/replaced']:.0f}")
    parts.append("s: " + " ".join(f"{phase} {logs.get(f'time/{phase}') or 0.0:.1f}" for phase in PHASES))
    return " | ".join(parts)


def use_step_line(trainer: PopuLoRATrainer) -> None:
    """Puts the line in the place of the trainer's own printer of metrics, unless there is none."""
    for printer, line in ((ProgressCallback, StepLine), (PrinterCallback, BareStepLine)):
        if trainer.pop_callback(printer) is not None:
            trainer.add_callback(line)


def _known(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _percent(value: float | None) -> str:
    return f"{100 * value:3.0f} %" if value is not None and _known(value) else "  - %"


def _number(value: float | None) -> str:
    return f"{value:+.2f}" if value is not None and _known(value) else "-"
