"""All that a proposal and an attempt are worth, on one page.

[`Outcome`] and [`Answer`] are the records that a price may depend on, [`Rules`] three plain functions of one record:
what a teacher is paid for a proposal, what a student is paid for an attempt, and the student's share of a proposal,
from which ratings are made. `play_step` asks them once, after grading, and what they say stands in the rows; rewards,
ratings, metrics and files read it there.

A task that students meet no more often than by guessing counts as unsolved for all of them ([`Outcome.solved`]). What
guessing gives is estimated three times, and the highest counts:

* A kind says what guessing gives where the answer's form alone tells (`TaskKind.chance`). For code_o and code_i that
  is 1/2 for an output `True` or `False` and 1/2 for each of a list or tuple of them.
* Where inputs are what is guessed (code_i), some are drawn without a look at the task and tried (`TaskKind.guesses`):
  a program that takes one input in four is a lottery, whatever the others lead to.
* One answer does not show among how many values it was guessed, but many answers do. If two mistakes were each made
  more often than the task was solved, the right answer is one of several that were guessed among ([`count_guessed`]).
  One mistake that most attempts make is no guess: a task that misleads stays worth what the few that see through it
  leave. A coin with two sides that are not `True` and `False` therefore earns what an honest task earns that half of
  the attempts solve, 0.5.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from trl_populora.tasks.own import find_function, is_own, list_choices


@dataclass(frozen=True)
class Outcome:
    """
    What became of a proposal.

    Args:
        kind (`str`): Kind of task.
        valid (`bool`): Whether it is a task; if not, only `kind` and `reason` mean anything.
        reason (`str`, *optional*, defaults to `""`): Why it is none, the value of a [`~trl_populora.tasks.Reject`].
        solve_rate (`float`, *optional*): Share rho of the attempts that were right, from 0 to 1.
        attempts (`int`, *optional*): How many there were.
        chance (`float`, *optional*, defaults to `0.0`): The solve rate that guessing gives.
        rarity (`float`, *optional*): 1 - the share, among the last accepted tasks, of its rarest feature.
        progress (`float`, *optional*): How much more often students solve tasks with its features than some steps ago,
            from -1 to 1.
        rival (`float`, *optional*): Where two students attempt each task, half of the attempts each, the share of the
            second one's that were right; `None` where one does.
        program (`str`, *optional*, defaults to `""`): The task's program.

    Raises:
        `ValueError`: If a valid proposal's `solve_rate` is outside [0, 1] or NaN.
    """

    kind: str
    valid: bool
    reason: str = ""
    solve_rate: float = math.nan
    attempts: int = 0
    chance: float = 0.0
    rarity: float = 0.0
    progress: float = 0.0
    rival: float | None = None
    program: str = ""

    def __post_init__(self):
        if self.valid and not 0.0 <= self.solve_rate <= 1.0:
            raise ValueError(f"`solve_rate` of a valid proposal must be in [0, 1], got {self.solve_rate}.")

    @property
    def solved(self) -> bool:
        """Whether attempts were right more often than by guessing."""
        return self.valid and self.solve_rate > self.chance

    @property
    def own(self) -> float:
        """The share of the matched student's attempts that were right."""
        return self.solve_rate if self.rival is None else min(max(2 * self.solve_rate - self.rival, 0.0), 1.0)


@dataclass(frozen=True)
class Answer:
    """
    What became of an attempt.

    Args:
        kind (`str`): Kind of task.
        correct (`bool`): Whether it is right.
        well_formed (`bool`): Whether it could be read.
    """

    kind: str
    correct: bool
    well_formed: bool


TeacherReward = Callable[[Outcome], float]
StudentReward = Callable[[Answer], float]


def pay_failures(task: Outcome) -> float:
    """The paper's (arXiv 2605.16727): the share of the attempts that fail."""
    return 1.0 - task.solve_rate


def pay_spread(task: Outcome) -> float:
    """The variance of one attempt, most for what is solved half of the time (arXiv 2408.15099)."""
    return task.solve_rate * (1.0 - task.solve_rate)


def pay_confirmed(task: Outcome) -> float:
    """The failures' share, by how far one right attempt is confirmed by others: a single hit may be luck."""
    hits = task.solve_rate * task.attempts
    return (1.0 - task.solve_rate) * (1.0 - 1.0 / hits)


def pay_rare(task: Outcome) -> float:
    """The failures' share, less for what the last tasks had as well."""
    return (1.0 - task.solve_rate) * task.rarity


def pay_progress(task: Outcome) -> float:
    """What students are learning, hard or not (learning progress, arXiv 1707.00183)."""
    return max(0.0, task.progress)


def pay_regret(task: Outcome) -> float:
    """What the better of two students solves more often than the other (PAIRED, arXiv 2012.02096)."""
    return abs(task.own - task.rival) if task.rival is not None else 0.0


# What teachers may be paid for a task that is solved, by its name in `teacher_reward`.
PAY: Mapping[str, TeacherReward] = {
    "paper": pay_failures,
    "learnability": pay_spread,
    "confirmed": pay_confirmed,
    "rarity": pay_rare,
    "progress": pay_progress,
    "regret": pay_regret,
}
STUDENT_PAY = ("azr",)  # what `student_reward` may name
NEED_FEATURES = ("rarity", "progress")  # of these, those that say nothing without `TaskKind.features`


def price_proposals(pay: str = "paper", invalid: float = -1.0, unsolved: float = 0.0) -> TeacherReward:
    """
    Makes a teacher's reward of one of `PAY`.

    Args:
        pay (`str`, *optional*, defaults to `"paper"`): Its name.
        invalid (`float`, *optional*, defaults to `-1.0`): Of a rejected proposal.
        unsolved (`float`, *optional*, defaults to `0.0`): Of a task that is solved no more often than by guessing.
    """
    of_solved = PAY[pay]

    def price(outcome: Outcome) -> float:
        if not outcome.valid:
            return invalid
        return of_solved(outcome) if outcome.solved else unsolved

    return price


def price_attempts(right: float = 1.0, wrong: float = -0.5, malformed: float = -1.0) -> StudentReward:
    """
    Makes a student's reward, Absolute Zero Reasoner's (arXiv 2505.03335).

    Args:
        right (`float`, *optional*, defaults to `1.0`): Of a right answer.
        wrong (`float`, *optional*, defaults to `-0.5`): Of a well-formed answer that is not right.
        malformed (`float`, *optional*, defaults to `-1.0`): Of an answer that cannot be read.
    """

    def price(answer: Answer) -> float:
        if answer.correct:
            return right
        return wrong if answer.well_formed else malformed

    return price


def student_share(outcome: Outcome) -> float:
    """
    Student's share of one proposal, in [0, 1]; the teacher's is the rest. A match's score is the mean over proposals.

    1 for an invalid proposal. 0.5 for a task that nobody solved, or no more often than by guessing: both sides failed.
    Else the share of the student's attempts that were right. PopuLoRA is not explicit about this rule. A teacher
    without valid tasks loses every match, so the ratings of its students rise although they solved nothing: compare
    ratings only beside `propose/valid_rate`. What teachers are paid does not change their score.
    """
    if not outcome.valid:
        return 1.0
    return float(outcome.own) if outcome.solved else 0.5


@dataclass(frozen=True)
class Rules:
    """
    What a proposal and an attempt are worth. Each rule is asked once for each record.

    Args:
        teacher_reward (`Callable`, *optional*): Of an [`Outcome`]; the paper's by default.
        student_reward (`Callable`, *optional*): Of an [`Answer`]; Absolute Zero's by default.
        student_share (`Callable`, *optional*): Of an [`Outcome`]: the match's score, in [0, 1].
    """

    teacher_reward: TeacherReward = price_proposals()
    student_reward: StudentReward = price_attempts()
    student_share: Callable[[Outcome], float] = student_share


def choose_teacher_reward(name: str, invalid: float, unsolved: float) -> TeacherReward:
    """
    What `teacher_reward` names: one of `PAY` with these prices, or a user's own function, which decides every price.

    Raises:
        `ValueError`: If there is no such function.
    """
    return price_proposals(name, invalid, unsolved) if name in PAY else find_price(name, "teacher_reward", PAY)


def choose_student_reward(name: str, right: float, wrong: float, malformed: float) -> StudentReward:
    """What `student_reward` names, likewise."""
    if name in STUDENT_PAY:
        return price_attempts(right, wrong, malformed)
    return find_price(name, "student_reward", STUDENT_PAY)


def check_choice(option: str, name: object, named: Collection[str], prices: Mapping[str, float]) -> None:
    """
    Refuses what a setting that names a rule cannot be, and numbers that a function of a user's own would not hear of.

    Args:
        option (`str`): The setting.
        name (`object`): What it was given.
        named (`Collection[str]`): What it may be, beside `module:function`.
        prices (`Mapping[str, float]`): Numbers that were given beside.

    Raises:
        `ValueError`: Says which setting is wrong, and the way out.
    """
    if name not in named and not is_own(name):
        raise ValueError(f"`{option}` must be {list_choices(named)}, got {name!r}.")
    if name not in named and prices:
        given = " and ".join(f"`{price}={value}`" for price, value in prices.items())
        raise ValueError(f"{given} says nothing to `{option}={name}`, which decides alone. Leave it unset.")


def find_price(path: str, option: str, choices: Iterable[str]) -> Callable[[Any], float]:
    """
    A user's own rule, `module:function`, which is watched: a price is a finite number.

    Args:
        path (`str`): Its name.
        option (`str`): The setting, for errors.
        choices (`Iterable[str]`): What it may be beside, likewise.

    Raises:
        `ValueError`: If there is no such function.
    """
    ask = find_function(path, option, choices)

    def price(record: Outcome | Answer) -> float:
        value = ask(record)
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"`{option}={path}` must give a finite number, got {value!r:.80} for {record}.")
        return float(value)

    return price


def count_guessed(mistakes: Iterable[str]) -> int:
    """How many attempts guessing alone gets right: one less than made the second most frequent of these mistakes."""
    _, second = ([count for _, count in Counter(mistakes).most_common(2)] + [0, 0])[:2]
    return max(0, second - 1)
