"""A teacher's advantages over its own running deviation: steady, its own, and saved."""

from __future__ import annotations

import json

import pytest
import torch

from trl_populora.population.members import Population
from trl_populora.step.advantages import score_step
from trl_populora.step.deviations import RunningDeviations
from trl_populora.step.played import Played, Row


BASELINES = {"teacher": "group", "student": "group"}


def score(population: Population, rewards: dict[str, list[float]], scale=None) -> dict[str, list[float]]:
    """Advantages by member of a step with these rewards: a teacher's proposals, a student's attempts at one task."""
    rewards = {"student_0": [0.0, 0.0]} | rewards
    rows = [
        Row(member.role, member.name, "code_o", 0, pay=value, group=member.name)
        for member in population
        for value in rewards.get(member.name, [])
    ]
    played = Played(rows, [row.record() for row in rows])
    played.rewards = torch.tensor([[row.pay] for row in rows])
    tokens = torch.ones(len(rows))
    scored = score_step(played, population, torch.ones(1), tokens, BASELINES, "group", "grpo", scale)
    found: dict[str, list[float]] = {}
    for row, advantage in zip(rows, scored.advantages.tolist(), strict=True):
        found.setdefault(row.member, []).append(advantage)
    return found


UNLIKE, ALIKE = [0.0, 0.0, 1.0, 1.0], [0.5, 0.5, 0.51, 0.51]


def test_nearly_equal_rewards_count_little_after_others_and_as_much_as_those_by_themselves():
    population = Population(1, 1)
    running = RunningDeviations(population)
    rewards = [{"teacher_0": UNLIKE}] * 5 + [{"teacher_0": ALIKE}]
    *_, last = [score(population, step, running.scale)["teacher_0"] for step in rewards]
    alone = score(population, {"teacher_0": ALIKE})["teacher_0"]
    assert max(alone) == pytest.approx(0.85, abs=0.05), "as far apart as rewards of 0 and 1 are"
    assert max(last) == pytest.approx(0.01, abs=0.002)


def test_over_steps_alike_advantages_have_a_mean_square_of_one():
    population = Population(1, 1)
    running = RunningDeviations(population)
    for _ in range(3):
        advantages = score(population, {"teacher_0": UNLIKE}, running.scale)["teacher_0"]
        assert advantages == pytest.approx([-1, -1, 1, 1], abs=1e-3)


def test_a_teachers_advantages_depend_on_no_other_members_rewards_by_a_bit():
    population = Population(2, 1)
    found = []
    for others in (0.1, 1e6):
        running = RunningDeviations(population)
        steps = [
            {"teacher_0": own, "teacher_1": [0.0, others, 1.0], "student_0": [others, 0.0]} for own in (UNLIKE, ALIKE)
        ]
        found.append([score(population, step, running.scale)["teacher_0"] for step in steps])
    assert found[0] == found[1]


@pytest.mark.parametrize("single_agent", [False, True])
def test_students_are_scaled_by_their_step_as_before(single_agent):
    population = Population(1, 1, single_agent)
    rewards = {each.name: [1.0, -0.5, -0.5] if each.role == "student" else UNLIKE for each in population}
    one, other = score(population, rewards), score(population, rewards, RunningDeviations(population).scale)
    student = next(member.name for member in population if member.role == "student")
    assert one[student][-3:] == other[student][-3:]


def test_a_newborn_starts_with_its_own_rewards_and_a_member_without_rows_keeps_its_past():
    population = Population(2, 1)
    running = RunningDeviations(population)
    score(population, {"teacher_0": UNLIKE, "teacher_1": UNLIKE}, running.scale)
    population.replace("teacher_0", step=1, parents=(), operator="written", mu=25.0, sigma=8.0)
    assert max(score(population, {"teacher_0": ALIKE}, running.scale)["teacher_0"]) == pytest.approx(1, abs=0.05)
    assert max(score(population, {"teacher_1": ALIKE}, running.scale)["teacher_1"]) == pytest.approx(0.014, abs=0.001)


def test_saved_and_restored_it_goes_on_as_before():
    population = Population(2, 1)
    one, other = RunningDeviations(population), RunningDeviations(population)
    for rewards in (UNLIKE, ALIKE, [0.1, 0.7, 0.3]):
        score(population, {"teacher_0": rewards, "teacher_1": rewards[:2]}, one.scale)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    step = {"teacher_0": [0.2, 0.9], "teacher_1": [0.4, 0.5]}
    assert score(population, step, one.scale) == score(population, step, other.scale)
