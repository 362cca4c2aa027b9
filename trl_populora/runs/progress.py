"""One line per population step: what happened, who leads, and where the time went."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm
from transformers.trainer_callback import CallbackHandler, PrinterCallback, ProgressCallback

from trl_populora.runs.lines import EVALUATION, STEP, sort_of


PHASES = ("match", "propose", "verify", "solve", "update")
REJECT = "verify/reject/"


class PhaseClock:
    """Seconds that a population step has spent so far in each phase."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def add(self, seconds: Mapping[str, float]) -> None:
        for phase, spent in seconds.items():
            self._seconds[phase] += spent

    @contextmanager
    def time_update(self) -> Iterator[None]:
        """The time of the block is the update's, but for what is added to other phases inside it."""
        start, before = time.perf_counter(), sum(self._seconds.values())
        yield
        self._seconds["update"] += time.perf_counter() - start - (sum(self._seconds.values()) - before)

    def take(self) -> dict[str, float]:
        """The step's metrics; the next step begins."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return {f"time/{phase}": seconds for phase, seconds in taken.items()}


class StepLine(ProgressCallback):
    """
    TRL's progress bar with one readable line per log instead of the whole dict of metrics.

    The dict goes to the loggers of `report_to` and to `trainer_state.json` as ever.
    """

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        if sort_of(logs) == STEP:
            tqdm.write(step_line(state.global_step, state.max_steps, logs))
        elif sort_of(logs) == EVALUATION:
            tqdm.write("\n".join(evaluation_lines(state.global_step, state.max_steps, logs)))


class BareStepLine(PrinterCallback):
    """The line without the bar, for `disable_tqdm`."""

    on_log = StepLine.on_log


def step_line(step: int, max_steps: int, logs: dict[str, Any]) -> str:
    """
    Formats the metrics of one step.

    Args:
        step, max_steps: Position in the run.
        logs: Metrics as logged; a missing or NaN value prints as `-`.
    """
    parts = [
        f"step {step:>{len(str(max_steps))}}/{max_steps}",
        f"valid {_percent(logs.get('propose/valid_rate'))}{_rejects(logs)}",
        f"solved {_percent(logs.get('solve/rate'))}",
        f"reward teacher {_number(logs.get('rewards/teacher_reward/mean'))}"
        f" student {_number(logs.get('rewards/student_reward/mean'))}",
    ]
    if logs.get("evolve/replaced"):
        parts.append(f"replaced {logs['evolve/replaced']:.0f}")
    parts.append("s: " + " ".join(f"{phase} {logs.get(f'time/{phase}') or 0.0:.1f}" for phase in PHASES))
    return " | ".join(parts)


def _rejects(logs: dict[str, Any]) -> str:
    """The two most frequent reasons for rejects with their counts, if there was any."""
    counts = {key.removeprefix(REJECT): logs[key] for key in logs if key.startswith(REJECT) and logs[key]}
    most = sorted(counts, key=lambda reason: -counts[reason])[:2]
    return f" ({', '.join(f'{reason} {counts[reason]:.0f}' for reason in most)})" if most else ""


def evaluation_lines(step: int, max_steps: int, logs: dict[str, Any]) -> list[str]:
    """Formats the metrics of one evaluation, a line per table of held-out tasks."""
    lines = []
    seconds = next(value for key, value in logs.items() if key.endswith("_runtime"))
    for key in logs:
        prefix, found, rest = key.partition("solve_rate_mean")
        if not found or rest:
            continue
        values = {
            name: logs.get(f"{prefix}{name}") for name in ("solve_rate_mean", "solve_rate_best", "solve_rate_worst")
        }
        table = prefix.removeprefix("eval_").rstrip("_")
        lines.append(
            f"step {step:>{len(str(max_steps))}}/{max_steps} | held-out{f' {table}' if table else ''}: solved "
            f"{_percent(values['solve_rate_mean'])} (best {_percent(values['solve_rate_best'])}, worst "
            f"{_percent(values['solve_rate_worst'])}, base {_percent(logs.get(f'{prefix}base/solve_rate'))}) | "
            f"thinking {_percent(logs.get(f'{prefix}thinking_rate'))} | s: {seconds:.1f}"
        )
    return lines


def use_step_line(callbacks: CallbackHandler) -> None:
    """Puts the line in the place of the trainer's own printer of metrics, unless there is none."""
    for printer, line in ((ProgressCallback, StepLine), (PrinterCallback, BareStepLine)):
        if callbacks.pop_callback(printer) is not None:
            callbacks.add_callback(line)


def _known(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _percent(value: float | None) -> str:
    return f"{100 * value:3.0f} %" if value is not None and _known(value) else "  - %"


def _number(value: float | None) -> str:
    return f"{value:+.2f}" if value is not None and _known(value) else "-"
