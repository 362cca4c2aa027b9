"""Prices: what a proposal and an attempt are worth, and what guessing would give.

    Slot --> Outcome --> teacher_reward   what the teacher is paid for a proposal
                     `-> student_share    the student's part of a proposal; ratings follow its mean over a match
    Sample -> Answer --> student_reward   what the student is paid for an attempt

[`Outcome`] and [`Answer`] are all that a price may depend on. [`Rules`] holds the two rewards. `play.py` calls them
and `student_share` once per outcome or answer, after grading, and writes what they return into the slot. Rewards,
ratings, metrics and files take it from there.

A task that students solve no more often than by guessing counts as unsolved ([`Outcome.solved`]), except in the pay
`"paper"`. Three estimates say what guessing gives, and the highest of them is the outcome's `chance`:

* The form of the answer, by `TaskKind.chance`: 1/2 for a code_o or code_i task with the output `True` or `False`, and
  1/2 to the power of n for a list or tuple of n truth values.
* Blind answers, such as random inputs for code_i. The kind names some in `TaskKind.guesses`, and the sandbox tries
  them. The estimate is the share of right ones.
* Repeated mistakes. Students who guess among several values make the wrong guesses several times, too. So the second
  most common mistake shows how often the right answer was a lucky hit ([`count_guessed`]). A single mistake that most
  attempts make is no guess: the task misleads, and seeing through it is worth its full price.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from trl_populora.options import find_function, is_own, list_choices
from trl_populora.tasks.kind import GUARDS


@dataclass(frozen=True)
class Outcome:
    """
    What became of a proposal.

    Args:
        kind: Name of the kind of task.
        valid: Whether the proposal is a task. If not, only `kind` and `reason` mean anything.
        reason: Why the proposal is no task, the value of a [`~trl_populora.tasks.Reject`].
        solve_rate: Share rho of the attempts that were right, from 0 to 1.
        attempts: How many attempts there were.
        chance: The solve rate that guessing gives.
        rarity: How rare the task's rarest feature is, as [`~trl_populora.tasks.features.Features.rarity`] computes it.
        program: The task's program.

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
    program: str = ""

    def __post_init__(self):
        if self.valid and not 0.0 <= self.solve_rate <= 1.0:
            raise ValueError(f"`solve_rate` of a valid proposal must be in [0, 1], got {self.solve_rate}.")

    @property
    def solved(self) -> bool:
        """Whether the proposal is a task, and attempts were right more often than guesses would be."""
        return self.valid and self.solve_rate > self.chance


@dataclass(frozen=True)
class Answer:
    """
    What became of an attempt.

    Args:
        kind: Name of the kind of task.
        correct: Whether the attempt's answer is right.
        well_formed: Whether the attempt's answer could be read.
    """

    kind: str
    correct: bool
    well_formed: bool


TeacherReward = Callable[[Outcome], float]
StudentReward = Callable[[Answer], float]


def pay_failures(task: Outcome) -> float:
    """The share of the attempts that fail (PopuLoRA, arXiv 2605.16727)."""
    return 1.0 - task.solve_rate


def pay_spread(task: Outcome) -> float:
    """The variance of one attempt: a task that half of the attempts solve pays most (arXiv 2408.15099)."""
    return task.solve_rate * (1.0 - task.solve_rate)


def pay_rare(task: Outcome) -> float:
    """The share of the attempts that fail, times the rarity of the task's rarest feature."""
    return (1.0 - task.solve_rate) * task.rarity


# What a solved task may earn its teacher, by the name in `teacher_reward`.
PAY: Mapping[str, TeacherReward] = {
    "guarded": pay_failures,
    "paper": pay_failures,  # unlike "guarded" it goes without our guards, see `price_proposals`
    "learnability": pay_spread,
    "rarity": pay_rare,
}
STUDENT_PAY = ("azr",)  # what `student_reward` may name, beside a user's own function
NEED_FEATURES = ("rarity",)  # pays that need `TaskKind.features`


def price_proposals(pay: str = "guarded", invalid: float = -1.0, unsolved: float = 0.0) -> TeacherReward:
    """
    Makes the rule that pays teachers, from one of `PAY`.

    With `"paper"` the rule is the printed formula. It differs from the others in two ways: a proposal that was
    rejected for a reason in `GUARDS`, such as a held-out task, earns `unsolved` and not `invalid`; and a task counts
    as solved if any attempt is right, guessed or not.

    Args:
        pay: A name in `PAY`, the rule for solved tasks.
        invalid: What a rejected proposal earns.
        unsolved: What a task earns that students solve no more often than by guessing.
    """
    of_solved, printed = PAY[pay], pay == "paper"

    def price(outcome: Outcome) -> float:
        if not outcome.valid:
            return unsolved if printed and outcome.reason in GUARDS else invalid
        solved = outcome.solve_rate > 0 if printed else outcome.solved
        return of_solved(outcome) if solved else unsolved

    return price


def price_attempts(right: float = 1.0, wrong: float = -0.5, malformed: float = -1.0) -> StudentReward:
    """
    Makes the rule that pays students. The defaults are Absolute Zero Reasoner's (arXiv 2505.03335).

    Args:
        right: What a right answer earns.
        wrong: What a readable answer earns that is not right.
        malformed: What an answer earns that cannot be read.
    """

    def price(answer: Answer) -> float:
        if answer.correct:
            return right
        return wrong if answer.well_formed else malformed

    return price


def student_share(outcome: Outcome) -> float:
    """
    Computes the student's part of one proposal, in [0, 1]; the teacher gets the rest. A match's score is the mean over
    its proposals.

    - An invalid proposal gives the student 1.
    - A task that is never solved, or no more often than by guessing, gives 0.5: both sides failed.
    - Any other task gives the solve rate.

    The paper does not state this rule. The rule is the same for every `teacher_reward`. A teacher whose proposals are
    all invalid loses every match. Then its students' ratings rise, although they have solved none of its tasks. So
    read ratings beside `propose/valid_rate`.
    """
    if not outcome.valid:
        return 1.0
    return outcome.solve_rate if outcome.solved else 0.5


@dataclass(frozen=True)
class Rules:
    """
    What a proposal and an attempt are worth. `play.py` calls `teacher_reward` once per outcome, and `student_reward`
    once per answer.

    Args:
        teacher_reward: Takes an [`Outcome`], returns what its teacher is paid; by default `"guarded"`.
        student_reward: Takes an [`Answer`], returns what its student is paid; Absolute Zero's rule by default.
    """

    teacher_reward: TeacherReward = price_proposals()
    student_reward: StudentReward = price_attempts()


def choose_teacher_reward(name: str, invalid: float, unsolved: float) -> TeacherReward:
    """
    Finds what the option `teacher_reward` names: one of `PAY` with these prices, or a user's own function, which
    decides every price alone.

    Raises:
        `ValueError`: If there is no such function.
    """
    return price_proposals(name, invalid, unsolved) if name in PAY else find_price(name, "teacher_reward", PAY)


def choose_student_reward(name: str, right: float, wrong: float, malformed: float) -> StudentReward:
    """Finds what the option `student_reward` names: Absolute Zero's rule, or a user's own function."""
    if name in STUDENT_PAY:
        return price_attempts(right, wrong, malformed)
    return find_price(name, "student_reward", STUDENT_PAY)


def check_choice(option: str, name: object, named: Collection[str], prices: Mapping[str, float]) -> None:
    """
    Refuses an option whose value names no rule. Also refuses options that only the named rules read, if they are set
    beside a function of the user's own.

    Args:
        option: The option's name.
        name: The option's value.
        named: The rules that the option may name, beside `module:function`.
        prices: Options that the user has set and that only a rule of `named` reads, with their values.

    Raises:
        `ValueError`: If the value names no rule, or `prices` are set beside a function of the user's own.
    """
    if name not in named and not is_own(name):
        raise ValueError(f"`{option}` must be {list_choices(named)}, got {name!r}.")
    if name not in named and prices:
        given = " and ".join(f"`{price}={value}`" for price, value in prices.items())
        raise ValueError(
            f"`{option}={name}` is your own function, and it does not read {given}. Leave unset what only the "
            "built-in rules read."
        )


def find_price(path: str, option: str, choices: Iterable[str]) -> Callable[[Any], float]:
    """
    Finds a user's own rule and watches it: the function that is returned refuses a price that is no finite number.

    Args:
        path: `module:function`.
        option: The option that names the rule, for errors.
        choices: What else the option may name, for errors.

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
    """Estimates the lucky hits: how often the second most common mistake was made, minus one, but at least 0."""
    _, second = ([count for _, count in Counter(mistakes).most_common(2)] + [0, 0])[:2]
    return max(0, second - 1)
