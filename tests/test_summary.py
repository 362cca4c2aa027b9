"""What a report says has changed: fifths, chance, held-out tasks, and how values read."""

from __future__ import annotations

import pytest

from trl_populora.report.load import Run
from trl_populora.report.table import compare_evaluations, compare_fifths, format_duration, format_value, take_fifths


def run_of(**series: list) -> Run:
    """A run that logged these; `__` stands for `/`."""
    length = max(map(len, series.values()))
    rows = [{key.replace("__", "/"): values[n] for key, values in series.items()} for n in range(length)]
    return Run("r", [{"step": n + 1} | row for n, row in enumerate(rows)])


@pytest.mark.parametrize(("steps", "fifth"), [(2, 1), (9, 1), (10, 2), (24, 4)])
def test_a_fifth_is_at_least_a_step(steps, fifth):
    first, last = take_fifths(run_of(solve__rate=[0.5] * steps))
    assert [entry["step"] for entry in first] == [*range(1, fifth + 1)]
    assert [entry["step"] for entry in last] == [*range(steps - fifth + 1, steps + 1)]


def test_one_step_has_nothing_to_be_compared_with():
    assert compare_fifths(run_of(solve__rate=[0.5])) == []


class TestClear:
    def changed(self, values: list) -> bool | None:
        (change,) = compare_fifths(run_of(solve__rate=values))
        return change.clear

    def test_more_than_steps_differ_by(self):
        assert self.changed([0.30, 0.31, 0.29, 0.30] + [0.5] * 12 + [0.60, 0.61, 0.59, 0.60])

    def test_as_much_as_steps_differ_by(self):
        assert self.changed([0.2, 0.6, 0.3, 0.5] + [0.5] * 12 + [0.4, 0.7, 0.3, 0.6]) is False

    def test_values_that_never_change(self):
        assert self.changed([1.0] * 25) is False
        assert self.changed([1.0] * 15 + [0.9] * 10) is True

    def test_a_few_equal_values_are_chance(self):
        assert self.changed([1.0] * 12 + [0.9] * 12) is False

    @pytest.mark.parametrize("values", [[0.1, 0.9], [0.1] * 9, [None, *[0.5] * 8, 0.7]])
    def test_a_single_step_a_fifth_cannot_say(self, values):
        assert self.changed(values) is None


def test_what_nobody_saw_is_left_out_of_means_and_table():
    run = run_of(solve__rate=[None, 0.2, *[0.5] * 6, 0.4, None], propose__novel_rate=[None] * 10)
    (change,) = compare_fifths(run)
    assert (change.first, change.last) == (0.2, 0.4)


def test_every_reward_and_every_measure_has_a_line():
    run = run_of(rewards__mine__mean=[0.1, 0.2], curriculum__open_ends=[3.0, 4.0], curriculum__coverage=[1.0, 2.0])
    assert [change.name for change in compare_fifths(run)] == ["reward: mine", "tasks: open ends"]


def test_held_out_tasks_are_compared_from_the_first_to_the_last_evaluation():
    base = {"eval/base/solve_rate": 0.4}
    rates = [{"step": step, "eval/solve_rate_mean": rate} | base for step, rate in ((0, 0.4), (5, 0.1), (10, 0.5))]
    steps, (mean, *_) = compare_evaluations(Run("r", [], evaluations=rates))
    assert steps == (0, 10)
    assert (mean.first, mean.last, mean.base) == (0.4, 0.5, 0.4)
    assert mean.told == "held-out tasks: attempts right went from 40 % to 50 % (the base: 40 %)"


@pytest.mark.parametrize(
    ("value", "form", "sign", "text"),
    [
        (0.524, "share", False, "52 %"),
        (-0.034, "share", True, "-3"),
        (2.5, "number", True, "+2.50"),
        (21.4, "count", False, "21"),
        (8.26, "seconds", False, "8.3 s"),
        (None, "share", True, "-"),
    ],
)
def test_values_read(value, form, sign, text):
    assert format_value(value, form, sign) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (212, "3 min 32 s"), (18720, "5 h 12 min"), (183600, "2 d 3 h")],
)
def test_durations_read(seconds, text):
    assert format_duration(seconds) == text


def test_members_that_leave_change_no_figure_of_those_that_stay():
    """`a` is as good and as long at all times, and so is `b`, which leaves after half of the steps."""
    history = []
    for step in range(1, 21):
        entry = {"step": step, "time/generate": 1.0, "frac_reward_zero_std": 0.0 if step <= 10 else 1.0}
        for name, reward, length in (("a", 0.8, 100.0), ("b", 0.2, 50.0)):
            here = name == "a" or step <= 10
            figures = {"reward": reward, "rewards/f": reward, "rewards/g": reward, "length": length}
            entry |= {f"member/{name}/{key}": value if here else None for key, value in figures.items()}
        rest = {"reward": 0.5, "rewards/f/mean": 0.5, "rewards/g/mean": 0.5, "completions/mean_length": 75.0}
        alone = {"reward": 0.8, "rewards/f/mean": 0.8, "rewards/g/mean": 0.8, "completions/mean_length": 100.0}
        history.append(entry | (rest if step <= 10 else alone))
    rates = {"eval/reward_best": 0.8, "eval/member/a/reward": 0.8}
    evaluations = [{"step": step, "eval/member/b/reward": b} | rates for step, b in ((0, 0.2), (20, None))]
    run = Run("r", history, lineage=[{"operator": "leave", "seat": "b"}], evaluations=evaluations)
    changes = [*compare_fifths(run), *compare_evaluations(run)[1]]
    assert [change.name for change in changes if change.difference] == []
    assert {"reward", "reward: f", "reward: g", "tokens of a completion"} <= {change.name for change in changes}
