"""Members, ratings and replacement."""

from __future__ import annotations

import json

import pytest

from trl_populora.population.members import PRIOR_MU, PRIOR_SIGMA, Population


def test_teachers_come_first_and_index_is_the_position():
    population = Population(2, 3)
    assert population.names == ["teacher_0", "teacher_1", "student_0", "student_1", "student_2"]
    assert [member.index for member in population] == [0, 1, 2, 3, 4]
    assert [member.name for member in population.students] == ["student_0", "student_1", "student_2"]
    assert len(population) == 5


def test_fitness_is_mu_whatever_the_doubt():
    population = Population(1, 1)
    member = population["student_0"]
    member.mu = 30.0
    for member.sigma in (8.0, 2.0):
        assert population.fitness(member) == 30.0


def test_replacement_resets_all_of_a_member_but_its_seat():
    population = Population(1, 2)
    member = population["student_1"]
    member.mu, member.sigma, member.age = 11.0, 3.0, 40
    population.replace("student_1", step=30, parents=("student_0@0",), operator="clone")
    assert (member.name, member.role, member.index) == ("student_1", "student", 2)
    assert (member.mu, member.sigma, member.age) == (PRIOR_MU, PRIOR_SIGMA, 0)
    assert (member.born, member.parents, member.operator, member.version) == (30, ("student_0@0",), "clone", 1)
    assert member.identity == "student_1@1"


def test_state_survives_json():
    population = Population(2, 1)
    population.replace("teacher_1", step=5, parents=("teacher_0@0",), operator="dare", mu=26.5, sigma=4.0)
    population["student_0"].age = 7
    restored = Population(2, 1)
    held = restored["teacher_1"]
    restored.load_state_dict(json.loads(json.dumps(population.state_dict())))
    assert restored.members == population.members
    assert held is restored["teacher_1"]


def test_state_of_another_population_is_refused():
    wanted = "teacher_0, student_0, student_1 but .* teacher_0, student_0. Resume with the `teachers` and `students`"
    with pytest.raises(ValueError, match=wanted):
        Population(1, 1).load_state_dict(Population(1, 2).state_dict())


def test_metrics_are_per_role_and_per_member():
    population = Population(2, 1)
    population["teacher_0"].mu, population["teacher_1"].mu = 20.0, 30.0
    metrics = population.metrics()
    assert metrics["population/teacher/mu_mean"] == 25.0
    assert metrics["population/teacher/mu_std"] == 5.0
    assert metrics["population/student/mu_std"] == 0.0
    assert metrics["member/teacher_1/mu"] == 30.0
    assert metrics["member/student_0/sigma"] == PRIOR_SIGMA


@pytest.mark.parametrize(("teachers", "students", "role"), [(1, 0, "student"), (-2, 3, "teacher")])
def test_a_population_without_students_is_refused(teachers, students, role):
    with pytest.raises(ValueError, match=f"at least [01] {role}s, .* Set `{role}s` to"):
        Population(teachers, students)


def test_a_single_agent_plays_both_roles_with_one_adapter():
    population = Population(1, 1, single_agent=True)
    assert population.names == ["teacher_0", "student_0"]
    assert population.adapters == ["agent"]
    assert {population.adapter(name) for name in population.names} == {"agent"}
    assert Population(2, 1).adapter("student_0") == "student_0"
    with pytest.raises(ValueError, match="1 teacher and 1 student, got 2 and 1"):
        Population(2, 1, single_agent=True)


def test_an_unknown_member_is_named():
    with pytest.raises(KeyError, match="student_9"):
        Population(1, 1)["student_9"]


def test_a_newborn_without_uncertainty_is_refused():
    with pytest.raises(ValueError, match="sigma"):
        Population(1, 1).replace("student_0", step=1, operator="clone", sigma=0.0)
