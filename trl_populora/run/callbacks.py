"""What a run says while it trains, and how it ends early.

metrics of a step --StepLine, BareStepLine--> one line on the terminal
                  --Alarms, PromptAlarms--> warnings in the log, W&B and trackio, each at most once in a `train()`
Ctrl-C, SIGTERM   --StopAtSignals--> the step ends, the run saves, `KeyboardInterrupt` or `SystemExit` is raised
"""

from __future__ import annotations

import logging
import math
import os
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
from trl_populora.run.read import ANSWERED, EVALUATION, PLAYED, STEP, classify_log, is_of_function, list_rewards
from trl_populora.step.rows import Played


PHASES = ("match", "propose", "verify", "solve", "update")  # of a step of the game
PROMPT_PHASES = ("generate", "reward", "update")  # of a step of a dataset run
REJECT = "verify/reject/"


class PhaseClock:
    """A clock that adds up the seconds of each phase of a step. One of its phases must be `"update"`."""

    def __init__(self, phases: Sequence[str] = PHASES) -> None:
        self._seconds = dict.fromkeys(phases, 0.0)

    def add(self, seconds: Mapping[str, float]) -> None:
        """Adds to each phase the seconds given under its name."""
        for phase, spent in seconds.items():
            self._seconds[phase] += spent

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Adds the time of the block to a phase."""
        start = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - start

    @contextmanager
    def time_update(self) -> Iterator[None]:
        """Counts the time of the block as update, without the seconds that the block adds to other phases."""
        # The block of a step's first micro-batch also plays the step, or generates answers. Those seconds go to other
        # phases.
        start, before = time.perf_counter(), sum(self._seconds.values())
        yield
        self._seconds["update"] += time.perf_counter() - start - (sum(self._seconds.values()) - before)

    def take(self) -> dict[str, float]:
        """Returns the seconds as metrics of the step, and starts again at 0."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return {f"time/{phase}": seconds for phase, seconds in taken.items()}


class StepLine(ProgressCallback):
    """
    The `Trainer`'s progress bar. For a step, and for each table of an evaluation, it prints a readable line instead of
    the dict of metrics.

    The trackers in `report_to` and `trainer_state.json` still get the dict.
    """

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        if classify_log(logs) == STEP:
            tqdm.write(format_step(state.global_step, state.max_steps, logs))
        elif classify_log(logs) == EVALUATION:
            tqdm.write("\n".join(format_evaluation(state.global_step, state.max_steps, logs)))


def tell(step: int, max_steps: int, event: str) -> None:
    """Prints a line about an event of a run, such as a member that left. The line begins like that of a step."""
    tqdm.write(f"{_format_place(step, max_steps)} | {event}")


class BareStepLine(PrinterCallback):
    """The printer that replaces [`StepLine`] under `disable_tqdm`: the same line, without the progress bar."""

    on_log = StepLine.on_log


def format_step(step: int, max_steps: int, logs: dict[str, Any]) -> str:
    """
    Formats the metrics of one step.

    Args:
        step, max_steps: Steps so far, and steps of the whole run.
        logs: Metrics of the step. A rate or reward that is missing or NaN prints as `-`.
    """
    answers = ANSWERED in logs
    parts = [
        _format_place(step, max_steps),
        *(_tell_answers(logs) if answers else _tell_game(logs)),
    ]
    if logs.get("evolve/replaced"):
        parts.append(f"replaced {logs['evolve/replaced']:.0f}")
    phases = PROMPT_PHASES if answers else PHASES
    parts.append("s: " + " ".join(f"{phase} {logs.get(f'time/{phase}') or 0.0:.1f}" for phase in phases))
    return " | ".join(parts)


def _format_place(step: int, max_steps: int) -> str:
    return f"step {step:>{len(str(max_steps))}}/{max_steps}"


def _tell_game(logs: dict[str, Any]) -> list[str]:
    return [
        f"valid {_format_percent(logs.get('propose/valid_rate'))}{_format_rejects(logs)}",
        f"solved {_format_percent(logs.get('solve/rate'))}",
        f"reward teacher {_format_number(logs.get('reward/teacher'))}"
        f" student {_format_number(logs.get('reward/student'))}",
    ]


def _tell_answers(logs: dict[str, Any]) -> list[str]:
    """Writes two texts for a step of a dataset run: mean reward with best and worst member, and mean length."""
    told, rewards = f"reward {_format_number(logs.get('reward'))}", list_rewards(logs)
    if len(rewards) > 1:
        best, worst = _name_extremes(rewards)
        told += f" ({best} ... {worst})" if worst else f" ({best})"
    length = logs.get("completions/mean_length")
    return [told, f"length {length:.0f}" if length is not None and _is_known(length) else "length -"]


def _format_rejects(logs: dict[str, Any]) -> str:
    """Names the two most frequent reasons for rejects with their counts; empty if no proposal was rejected."""
    counts = {key.removeprefix(REJECT): logs[key] for key in logs if key.startswith(REJECT) and logs[key]}
    most = sorted(counts, key=lambda reason: -counts[reason])[:2]
    return f" ({', '.join(f'{reason} {counts[reason]:.0f}' for reason in most)})" if most else ""


def format_evaluation(step: int, max_steps: int, logs: dict[str, Any]) -> list[str]:
    """Formats the metrics of one evaluation, one line per table of held-out tasks, or of prompts."""
    lines = []
    # A run may evaluate on several named tables. Each table has one key that ends in `solve_rate_mean`: there is no
    # such key for a member, a kind or the base.
    seconds = next((value for key, value in logs.items() if key.endswith("_runtime")), math.nan)
    if not any(key.endswith("solve_rate_mean") and not is_of_function(key) for key in logs):
        # In a dataset run each table has a log of its own. TRL's keys, such as `eval_reward`, do not name the table.
        prefixes = [
            key.removesuffix("runtime") for key in logs if key.endswith("_runtime") and not is_of_function(key)
        ]
        return [
            f"{_format_place(step, max_steps)} | {_tell_prompts(each, logs)} | s: {seconds:.1f}" for each in prefixes
        ]
    for key in logs:
        prefix, found, rest = key.partition("solve_rate_mean")
        if not found or rest:
            continue
        mean, best, worst, base = (
            _format_percent(logs.get(f"{prefix}{name}"))
            for name in ("solve_rate_mean", "solve_rate_best", "solve_rate_worst", "base/solve_rate")
        )
        table = prefix.removeprefix("eval_").rstrip("_")
        lines.append(
            f"{_format_place(step, max_steps)} | held-out{f' {table}' if table else ''}: solved "
            f"{mean} (best {best}, worst {worst}, base {base}) | "
            f"thinking {_format_percent(logs.get(f'{prefix}thinking_rate'))} | s: {seconds:.1f}"
        )
    return lines


def _tell_prompts(prefix: str, logs: dict[str, Any]) -> str:
    """Writes the mean reward, and the best and worst member, of an evaluation whose keys begin with `prefix`."""
    table, rewards = prefix.removeprefix("eval_").rstrip("_"), list_rewards(logs, prefix)
    told = f"eval{f' {table}' if table else ''}: reward {_format_number(logs.get('eval_reward'))}"
    if len(rewards) > 1:
        best, worst = _name_extremes(rewards)
        told += f" (best {best}, worst {worst})" if worst else f" ({best})"
    lead, margin = (logs.get(f"{prefix}reward_lead{end}") for end in ("", "_margin"))
    if lead is not None and _is_known(lead) and margin is not None and _is_known(margin):
        told += f" | lead {lead:.2f} ± {margin:.2f}"
    return told


def _name_extremes(rewards: Mapping[str, float]) -> tuple[str, str]:
    """
    Writes two texts: who has the highest reward, and who has the lowest. Each text ends with that reward. If two
    members share the reward, the text names both. If three or more share it, the text says how many they are. If all
    members have the same reward, the first text says so, and the second is empty.
    """
    highest, lowest = max(rewards.values()), min(rewards.values())
    if highest == lowest:
        return f"all {len(rewards)} members equal", ""
    names = [[name for name in rewards if rewards[name] == value] for value in (highest, lowest)]
    told = [", ".join(each) if len(each) < 3 else f"{len(each)} members" for each in names]
    return f"{told[0]} {_format_number(highest)}", f"{told[1]} {_format_number(lowest)}"


def use_step_line(callbacks: CallbackHandler) -> None:
    """Replaces the trainer's printer of metrics by ours. A trainer without a printer stays without one."""
    for printer, line in ((ProgressCallback, StepLine), (PrinterCallback, BareStepLine)):
        if callbacks.pop_callback(printer) is not None:
            callbacks.add_callback(line)


def _is_known(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _format_percent(value: float | None) -> str:
    return f"{100 * value:3.0f} %" if value is not None and _is_known(value) else "  - %"


def _format_number(value: float | None) -> str:
    return f"{value:+.2f}" if value is not None and _is_known(value) else "-"


# Alarms: warnings that a run goes on although its members do not learn.


logger = logging.getLogger(__name__)

STEPS = 10  # so many bad steps in a row are a reason to warn: one alone may be bad luck
FLAT = "frac_reward_zero_std"
WEIGHT, LEAST_WEIGHT = "sampling/importance_sampling_ratio/mean", 0.9


class _Alarms(TrainerCallback):
    """
    Warnings about a run in which members learn little. Each warning comes at most once in a `train()`.

    Args:
        alert: Sends a warning to trackers. Called with the names in `report_to`, a title of less than 64 characters
            and a text.
    """

    def __init__(self, alert: Callable[[Sequence[str], str, str], None]) -> None:
        self.alert = alert
        # For each warning, the last step at which all was well, at first the step before training. `None` once the
        # warning is given.
        self._well: dict[str, int | None] = {}
        self._begin = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self._well, self._begin = {}, state.global_step
        if state.is_world_process_zero and (idle := args.list_idle_breeding()):
            logger.warning(
                "Without effect: %s. Nothing evolves in this run, because `evolve_every` is unset. Set it to a number "
                "of optimizer steps, or leave these options out.",
                ", ".join(f"`{name}`" for name in idle),
            )
        for told in args.list_idle_options(state.max_steps) if state.is_world_process_zero else ():
            logger.warning(
                "`%s` does nothing in a run of %d optimizer steps: it acts when the step after begins. Lower it, or "
                "set it to 0.",
                told,
                state.max_steps,
            )

    def _warn_of_weights(self, args: Any, step: int, logs: Mapping[str, Any]) -> None:
        # In the `sequence_...` modes a completion has one weight: the product of its tokens' ratios. TRL cuts or masks
        # a weight that is too large. The longer a completion is, the further its weight is from 1.
        by_row, weight = args.vllm_importance_sampling_mode.startswith("sequence"), logs.get(WEIGHT)
        if self._lasts("weight", step, by_row and weight is not None and weight < LEAST_WEIGHT, STEPS):
            self._warn(
                args,
                "Long completions count less",
                f"vLLM's samples had mean weights below {LEAST_WEIGHT} in the last {STEPS} steps (now {weight:.2f}), "
                "so long completions hardly count in the loss. Set `vllm_importance_sampling_mode=token_truncate`, "
                "which weighs each token by itself, or let vLLM and the trainer compute in one precision.",
            )

    def _warn(self, args: Any, title: str, text: str) -> None:
        logger.warning("%s", text)
        self.alert(args.report_to, title, text)

    def _lasts(self, what: str, step: int, bad: bool, steps: int) -> bool:
        """Says whether the warning `what` is due: the last `steps` steps were all bad, and it was not given before."""
        well = self._well.setdefault(what, self._begin)
        if well is None:
            return False
        if not bad:
            self._well[what] = step
        elif step - well >= steps:
            self._well[what] = None
            return True
        return False


class PromptAlarms(_Alarms):
    """
    Warnings about a dataset run, beside "Long completions count less" (see [`Alarms`]).

    - "Members do not learn": in ten optimizer steps in a row, each member's answers to a prompt all had the same
      reward, at every prompt. Members may differ from each other.
    - "A reward function judges nothing": in ten steps in a row, this function gave no number for any completion.
    - "Some members did not learn": at the end of training, at least one member has never had an answer with an
      advantage.

    Args:
        functions: Names of the reward functions.
        alert: Sends a warning to trackers, see [`Alarms`].
        list_idle: Lists the members that have never had an answer with an advantage.
    """

    def __init__(
        self,
        functions: Sequence[str],
        alert: Callable[[Sequence[str], str, str], None],
        list_idle: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        super().__init__(alert)
        self.functions, self.list_idle = functions, list_idle

    def on_log(self, args, state, control, logs=None, **kwargs):
        logs = logs or {}
        # Only the summary of a run has `train_loss`. `on_train_end` would be too late: trackers may be closed by then.
        if state.is_world_process_zero and "train_loss" in logs and (idle := self.list_idle()):
            self._warn(
                args,
                "Some members did not learn",
                f"{', '.join(idle)} did not learn: at each of their prompts all answers had the same reward, so no "
                "answer ever had an advantage. Give prompts that are neither too easy nor too hard for them, or more "
                "answers to each (`num_generations`).",
            )
        # Some optimizer steps generate nothing: they train on rows of the last generation.
        if not state.is_world_process_zero or ANSWERED not in logs or "reward" not in logs:
            return
        step = state.global_step
        if self._lasts("flat", step, logs.get(FLAT) == 1, STEPS):
            self._warn(
                args,
                "Members do not learn",
                f"At each prompt all answers of a member had the same reward in the last {STEPS} steps, so members do "
                "not learn: the prompts are too easy or too hard for them (the mean reward is "
                f"{logs['reward']:.2f}), or `num_generations` is too small.",
            )
        for name in self.functions:
            if self._lasts(name, step, logs.get(f"rewards/{name}/mean") is None, STEPS):
                self._warn(
                    args,
                    "A reward function judges nothing",
                    f"The reward function {name!r} gave no number for any completion in the last {STEPS} steps. Look "
                    "at what it returns, or leave it out.",
                )
        self._warn_of_weights(args, step, logs)


class Alarms(_Alarms):
    """
    Warnings about a game in which teachers or students learn little. Each of the three comes at most once in a
    `train()`.

    - "No valid proposal": no proposal of a step was valid. The text names the most frequent reason.
    - "Students do not learn": in ten optimizer steps in a row, all attempts at each task had the same reward. It comes
      only if students are compared within their group (`student_baseline="group"`).
    - "Long completions count less": in ten steps in a row, vLLM's samples had a mean weight below `LEAST_WEIGHT`. It
      comes only if each completion has one weight (`vllm_importance_sampling_mode="sequence_..."`).

    Args:
        played: Returns the last step as it was played.
        alert: Sends a warning to trackers. Called with the names in `report_to`, a title of less than 64 characters
            and a text.
    """

    def __init__(self, played: Callable[[], Played], alert: Callable[[Sequence[str], str, str], None]) -> None:
        super().__init__(alert)
        self.played = played

    def on_log(self, args, state, control, logs=None, **kwargs):
        # With `num_iterations` above 1 some optimizer steps play no game, and their logs say nothing of it. Without
        # teachers no log says anything of proposals.
        if not state.is_world_process_zero or not {PLAYED, FLAT} & (logs or {}).keys():
            return
        step = state.global_step
        if self._lasts("valid", step, logs.get(PLAYED) == 0, 1):
            self._warn(
                args,
                "No valid proposal",
                f"No proposal of step {step} was valid, so teachers learn little. {_name_reason(self.played())} With "
                "`save_rollouts`, `rollouts/` shows what they wrote; `populora try` shows which prompts a base can "
                "follow.",
            )
        # Other baselines compare an attempt with attempts at other tasks, too. So a group of equal rewards may teach.
        compared, rate = args.student_baseline == "group", logs.get("solve/rate", math.nan)
        if self._lasts("flat", step, compared and logs.get(FLAT) == 1, STEPS):
            solved = f"{100 * rate:.0f} % of attempts at fresh tasks were right"
            solved = "no fresh task had been attempted" if math.isnan(rate) else solved
            self._warn(
                args,
                "Students do not learn",
                f"All attempts at each task were worth the same in the last {STEPS} steps, so students do not learn: "
                f"the tasks are too easy or too hard for them (at the last log {solved}), or `attempts_per_task` is "
                "too small.",
            )
        self._warn_of_weights(args, step, logs)


def _name_reason(played: Played) -> str:
    """Writes a sentence with the most frequent reason for rejects, its count and the detail of its first reject."""
    rejects = [record for record in played.records if record["role"] == "teacher" and not record["valid"]]
    ((reason, count),) = Counter(record["reject_reason"] for record in rejects).most_common(1)
    detail = next((r["reject_detail"] for r in rejects if r["reject_reason"] == reason), "")
    return f"{count} of {len(rejects)} were rejected for `{reason}`{f': {detail:.200}' if detail else ''}."


# Ctrl-C and SIGTERM: a run finishes its step, saves, and says how to go on.


# A handler is replaced only if it is Python's default.
DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


# The launchers of PyTorch and Accelerate pass a signal on to the processes that they have started. They wait for as
# many seconds as this variable says, and then kill the processes that are left.
PATIENCE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def _tell_seconds_left() -> str:
    """Writes how long the launcher waits before it kills the run; empty if there is none or the user set the time."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or PATIENCE in os.environ:
        return ""
    return (
        " Its launcher waits 30 seconds, then it kills the run without a checkpoint. If a step takes longer, start "
        f"the launcher with {PATIENCE}=600 in its environment (seconds)."
    )


class StopAtSignals(TrainerCallback):
    """
    The context in which `train()` runs. A signal ends the run on all ranks after the step in which the signal came.

    The first Ctrl-C or SIGTERM lets the step finish. The run then saves a checkpoint, or with `save_strategy="no"`
    only the members. A Ctrl-C after the first signal ends the run at once.

    Args:
        trainer: The trainer that trains. Inside the context, this object is one of the trainer's callbacks.

    Raises:
        `KeyboardInterrupt`: At the exit of the context, after Ctrl-C.
        `SystemExit`: At the exit of the context, after SIGTERM, with status 143 as the signal itself would give.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        self._limit: int | None = None  # the user's `save_total_limit`, while it is lifted

    def __enter__(self) -> StopAtSignals:
        # Python lets only the main thread set handlers. If `train()` runs in another thread, signals act as usual.
        if threading.current_thread() is threading.main_thread():
            for number, default in DEFAULTS.items():
                # A handler that a user or a scheduler's library has set stays.
                if signal.getsignal(number) == default:
                    self._before[number] = signal.signal(number, self._receive)
        self.trainer.add_callback(self)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.trainer.remove_callback(self)
        args, state = self.trainer.args, self.trainer.state
        if self._limit is not None:
            args.save_total_limit = self._limit
        # A signal during the very last step changes nothing: that run has finished.
        stopped = self.received is not None and error is None and state.global_step < state.max_steps
        if only_members := stopped and args.save_strategy == "no":
            self.trainer._save()
        if (stopped or kind is KeyboardInterrupt) and args.process_index == 0:
            saved = find_newest(args.output_dir)
            way_on = f"{saved} is whole: `--resume`, or `train(resume_from_checkpoint=True)`, goes on from there."
            if args.save_only_model:
                way_on = f"`warm_start={saved!r}` begins with its members; it does not resume (`save_only_model`)."
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
        if self.received is None:
            self.received = number
            if self.trainer.args.process_index == 0:
                logger.warning(
                    "The run ends after this step and saves. Another Ctrl-C ends it at once.%s", _tell_seconds_left()
                )
        elif number == signal.SIGINT:  # a second SIGTERM does not count: schedulers and launchers repeat it
            raise KeyboardInterrupt

    def on_step_end(self, args, state, control, **kwargs):
        # A signal may reach only one rank, or two ranks in different steps. All ranks have to stop after the same
        # step.
        received = gather_object([self.received])
        self.received = next((number for number in received if number is not None), None)
        if self.received is not None:
            control.should_training_stop = True
            control.should_save = control.should_save or args.save_strategy != "no"
            # With `save_strategy="best"` an evaluation overwrites `should_save`: only the best score is saved. So this
            # step is not evaluated.
            if args.save_strategy == "best":
                control.should_evaluate = False

    def on_save(self, args, state, control, **kwargs):
        # At the end of training transformers keeps only the best checkpoint if `save_total_limit` is 1. A stopped run
        # must also keep the one to resume from. Older ones have been deleted when this method is called.
        if self.received is not None and self._limit is None and state.global_step < state.max_steps:
            self._limit, args.save_total_limit = args.save_total_limit, None
