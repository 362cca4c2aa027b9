"""The table of prices: rewards and ratings of one record must tell one story, under every named pay."""

from __future__ import annotations

import math

import pytest

from trl_populora.step.pay import (
    PAY,
    Answer,
    Outcome,
    Rules,
    choose_student_reward,
    choose_teacher_reward,
    count_guessed,
    price_attempts,
    price_proposals,
    student_share,
)
from trl_populora.step.rows import student_reward, teacher_reward
from trl_populora.tasks import Reject


NAN = float("nan")


def task(solve_rate: float, **facts) -> Outcome:
    return Outcome("code_o", True, solve_rate=solve_rate, **({"attempts": 8} | facts))


INVALID = Outcome("code_o", False, "error")
UNSOLVED = [task(0.0), task(0.25, chance=0.25, rarity=1.0), task(0.5, chance=0.5)]

# A record -> the student's share of the match (ours), and what each named pay gives.
SOLVED = [
    (task(0.125), 0.125, {"guarded": 0.875, "paper": 0.875, "learnability": 0.109375, "rarity": 0.0}),
    (task(0.25, rarity=0.5), 0.25, {"guarded": 0.75, "paper": 0.75, "learnability": 0.1875, "rarity": 0.375}),
    (
        task(0.5, chance=0.25, rarity=1.0),
        0.5,
        {"guarded": 0.5, "paper": 0.5, "learnability": 0.25, "rarity": 0.5},
    ),
    (task(1.0, rarity=1.0), 1.0, {"guarded": 0.0, "paper": 0.0, "learnability": 0.0, "rarity": 0.0}),
]
GUARDED = [pay for pay in PAY if pay != "paper"]

# What the printed formula knows, and all else for which the other pays refuse a proposal.
PRINTED = {
    *("format", "syntax", "no_function", "arguments", "error", "timeout", "memory", "bad_output"),
    *("nondeterministic", "policy", "tampered"),
}
OURS = {
    *("oversized", "duplicate", "held_out", "duplicate_inputs", "constant_output", "leaked_program"),
    *("control_token", "too_long", "copied"),
}


class TestProposals:
    @pytest.mark.parametrize("pay", PAY)
    @pytest.mark.parametrize(("record", "share", "rewards"), SOLVED)
    def test_each_pay_of_a_solved_task(self, record, share, rewards, pay):
        assert price_proposals(pay)(record) == pytest.approx(rewards[pay])
        assert student_share(record) == share, "whatever teachers are paid"

    def test_every_pay_stands_in_the_table(self):
        assert all(rewards.keys() == PAY.keys() for _, _, rewards in SOLVED)

    @pytest.mark.parametrize("pay", GUARDED)
    @pytest.mark.parametrize("record", UNSOLVED)
    def test_what_is_met_by_guessing_counts_as_unsolved_under_every_pay_but_the_printed_one(self, record, pay):
        assert not record.solved
        assert price_proposals(pay, unsolved=-0.25)(record) == -0.25
        assert student_share(record) == 0.5

    @pytest.mark.parametrize("pay", PAY)
    @pytest.mark.parametrize("invalid", [-1.0, -0.1, 0.0])
    def test_an_invalid_proposal_has_one_price_under_every_pay(self, pay, invalid):
        assert price_proposals(pay, invalid=invalid)(INVALID) == invalid
        assert student_share(INVALID) == 1.0

    @pytest.mark.parametrize("pay", PAY)
    def test_no_task_pays_less_than_an_unsolved_one_or_more_than_one(self, pay):
        price = price_proposals(pay)
        rewards = [price(task(n / 8, rarity=r)) for n in range(9) for r in (0, 0.9)]
        assert min(rewards) == 0.0
        assert max(rewards) <= 1.0

    @pytest.mark.parametrize("chance", [0.0, 0.25, 0.5])
    @pytest.mark.parametrize("solved", range(9))
    def test_the_printed_formula_asks_for_the_solve_rate_alone(self, solved, chance):
        rho = solved / 8
        assert price_proposals("paper")(task(rho, chance=chance, rarity=0.3)) == (0.0 if rho == 0 else 1.0 - rho)

    @pytest.mark.parametrize("reason", [*Reject])
    def test_the_printed_formula_punishes_what_does_not_parse_run_or_is_not_deterministic(self, reason):
        """What is refused for another reason parses and runs; no attempt at it can be right."""
        refused = Outcome("code_o", False, reason.value)
        assert reason.value in PRINTED | OURS
        assert price_proposals("paper")(refused) == (-1.0 if reason.value in PRINTED else 0.0)
        assert {price_proposals(pay)(refused) for pay in GUARDED} == {-1.0}

    @pytest.mark.parametrize("solve_rate", [-0.5, 1.5, NAN])
    def test_a_valid_proposal_needs_a_solve_rate(self, solve_rate):
        with pytest.raises(ValueError, match="solve_rate"):
            task(solve_rate)


# correct, well formed -> student's reward (AZR)
@pytest.mark.parametrize(
    ("correct", "well_formed", "reward"), [(True, True, 1.0), (False, True, -0.5), (False, False, -1.0)]
)
def test_attempt(correct, well_formed, reward):
    assert Rules().student_reward(Answer("code_o", correct, well_formed)) == reward


def test_settings_replace_the_defaults():
    price = price_attempts(right=2.0, wrong=0.0, malformed=-0.5)
    answers = [Answer("code_o", *flags) for flags in ((True, True), (False, True), (False, False))]
    assert list(map(price, answers)) == [2.0, 0.0, -0.5]


def test_the_papers_rule_with_guards_is_the_default():
    records = [INVALID, *UNSOLVED, *(record for record, _, _ in SOLVED)]
    assert [*map(Rules().teacher_reward, records)] == [*map(price_proposals("guarded"), records)]


@pytest.mark.parametrize(
    ("mistakes", "right"),
    [("", 0), ("aaaaaa", 0), ("abcdefg", 0), ("aab", 0), ("aabb", 1), ("aaabb", 1), ("aaabbb", 2), ("aabbcc", 1)],
)
def test_fewer_right_answers_than_two_mistakes_each_are_guesses(mistakes, right):
    """One mistake that all make is no guess, however frequent."""
    assert count_guessed(mistakes) == right


def test_each_reward_function_tells_what_was_paid_and_is_silent_about_the_other_role():
    columns = {"role": ["teacher", "student"], "pay": [0.5, 1.0], "solve_rate": [0.25, 0.25]}
    assert teacher_reward(**columns) == [0.5, None]
    assert student_reward(**columns) == [None, 1.0]
    assert (teacher_reward.__name__, student_reward.__name__) == ("teacher_reward", "student_reward")


class TestOwn:
    """Functions that a setting names; these are found in this very file."""

    HERE = "tests.test_rules"

    def test_it_prices_every_proposal(self):
        price = choose_teacher_reward(f"{self.HERE}:pay_by_reason", -1.0, 0.0)
        assert [price(INVALID), price(task(0.0)), price(task(0.25, rarity=0.5))] == [-0.25, 0.0, 0.125]

    def test_it_prices_every_attempt(self):
        price = choose_student_reward(f"{self.HERE}:pay_code_only", 1.0, -0.5, -1.0)
        assert [price(Answer(kind, True, True)) for kind in ("code_o", "maths")] == [2.0, 0.0]

    @pytest.mark.parametrize(
        ("name", "error"),
        [
            ("nowhere_at_all:pay", "Unknown `teacher_reward` 'nowhere_at_all:pay'.*PYTHONPATH"),
            ("tests.test_rules:nothing", "Unknown `teacher_reward` 'tests.test_rules:nothing'.*one of guarded, "),
            ("tests.test_rules:NAN", "`teacher_reward=tests.test_rules:NAN` is no function but nan"),
        ],
    )
    def test_a_function_that_is_not_there_is_named(self, name, error):
        with pytest.raises(ValueError, match=error):
            choose_teacher_reward(name, -1.0, 0.0)

    @pytest.mark.parametrize("value", [NAN, math.inf, "1", True, None, 1j])
    def test_a_price_that_is_none_is_told_with_the_record(self, value, monkeypatch):
        monkeypatch.setitem(globals(), "given", value)
        price = choose_teacher_reward(f"{self.HERE}:pay_given", -1.0, 0.0)
        with pytest.raises(ValueError, match=r"`teacher_reward=.*pay_given` must give a finite number, got") as error:
            price(task(0.25))
        assert "solve_rate=0.25" in str(error.value)

    def test_a_function_that_raises_is_told_with_the_record(self):
        price = choose_teacher_reward(f"{self.HERE}:pay_by_division", -1.0, 0.0)
        with pytest.raises(RuntimeError, match=r"raised ZeroDivisionError.* with Outcome\(kind='code_o', valid=False"):
            price(INVALID)


given: object = None


def pay_given(outcome):
    return given


def pay_by_reason(outcome):
    return -0.25 if outcome.reason == "error" else outcome.solve_rate * outcome.rarity


def pay_by_division(outcome):
    return 1 / outcome.attempts


def pay_code_only(answer):
    return 2.0 * (answer.kind == "code_o")
