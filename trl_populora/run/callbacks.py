"""What a run says while it goes on: a line per step, alarms; and how it ends at Ctrl-C or SIGTERM."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate.utils import gather_object
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import CallbackHandler, PrinterCallback, ProgressCallback

from trl_populora.run.checkpoint import find_newest
from trl_populora.run.read import EVALUATION, PLAYED, STEP, sort_of
from trl_populora.step.rows import Played


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


# Says once when a run goes on but nothing can be learned in it: in the log, and as alerts of W&B and trackio.


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


# Ctrl-C and SIGTERM: a run ends with its step, saves, and says how it goes on.


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
