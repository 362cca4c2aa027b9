"""Selection and breeding as pure functions, the loop with scripted members, and the callback in a real tiny run."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import norm
from transformers import TrainerCallback

from tests.populora_run import letters
from tests.small_run import small_trainer
from trl_populora.lora.members import adds_nothing, member_parameters, read_member
from trl_populora.population.evolution import (
    DEFAULT_CROSSOVERS,
    DEFAULT_MUTATIONS,
    Birth,
    Breeding,
    breed,
    cull,
    hold_tournament,
    plan_births,
    rate_newborn,
    read_mixture,
)
from trl_populora.population.factors import compare
from trl_populora.population.members import PRIOR_MU, PRIOR_SIGMA, Population
from trl_populora.population.operators import CROSSOVERS, MUTATIONS
from trl_populora.population.ratings import BETA, Matchmaker
from trl_populora.run.read import read_lines
from trl_populora.trainer import PopuLoRATrainer


def rated(*mus: float, age: int = 20, teachers: int = 1) -> Population:
    """Students with these means and little doubt."""
    population = Population(teachers, len(mus))
    for member in population:
        member.sigma, member.age = 1.0, age
    for member, mu in zip(population.students, mus, strict=True):
        member.mu = mu
    return population


def names(members) -> list[str]:
    return [member.name for member in members]


class TestSelection:
    @pytest.mark.parametrize(
        ("size", "fraction", "count"),
        [(1, 0.25, 0), (2, 0.25, 1), (4, 0.25, 1), (8, 0.25, 2), (8, 0.9, 7), (4, 0.0, 0)],
    )
    def test_the_least_fit_share_goes_at_least_one_and_never_the_best(self, size, fraction, count):
        population = rated(*range(20, 20 + size))
        culled = cull(population.students, fraction, burn_in=5)
        assert names(culled) == [f"student_{i}" for i in range(count)]

    def test_newborns_are_protected_however_unfit(self):
        population = rated(10, 20, 30, 40)
        population["student_0"].age = 4
        assert names(cull(population.students, 0.25, burn_in=5)) == ["student_1"]
        population["student_0"].age = 5
        assert names(cull(population.students, 0.25, burn_in=5)) == ["student_0"]

    def test_a_young_best_member_does_not_expose_the_second_best_alone(self):
        population = rated(10, 40)
        population["student_1"].age = 0
        assert names(cull(population.students, 0.5, burn_in=5)) == ["student_0"]

    def test_doubt_is_no_weakness(self):
        population = rated(25, 24)
        population["student_0"].sigma = 8.0
        assert names(cull(population.students, 0.5, burn_in=0)) == ["student_1"]
        assert hold_tournament(population.students, 2, random.Random(0)).name == "student_0"

    def test_tournament_picks_the_fittest_drawn(self):
        population = rated(10, 20, 30, 40)
        wins = Counter(hold_tournament(population.students, 2, random.Random(i)).name for i in range(2000))
        # Of the six pairs the best is in three, the second wins two, the third one, the last none.
        assert [wins[f"student_{i}"] / 2000 for i in range(4)] == pytest.approx([0, 1 / 6, 2 / 6, 3 / 6], abs=0.04)
        assert hold_tournament(population.students, 99, random.Random(0)).name == "student_3"


class TestPlan:
    def test_parents_are_survivors_of_the_role_and_the_fitter_comes_first(self):
        population = rated(10, 20, 30, 40, 50, 60, 70, 80, teachers=8)
        for index, member in enumerate(population.teachers):
            member.mu = 30.0 + index
        for seed in range(50):
            births = plan_births(population, Breeding(evolve_burn_in=0), random.Random(seed))
            gone = {birth.name for birth in births}
            assert gone == {"teacher_0", "teacher_1", "student_0", "student_1"}
            for birth in births:
                assert not gone & set(birth.parents)
                assert all(population[parent].role == birth.role for parent in birth.parents)
                if len(birth.parents) == 2:
                    first, second = (population.fitness(population[parent]) for parent in birth.parents)
                    assert first > second
                    assert birth.operator in DEFAULT_CROSSOVERS
                else:
                    assert birth.operator in DEFAULT_MUTATIONS

    @pytest.mark.parametrize(("rate", "parents"), [(0.0, {1}), (1.0, {2})])
    def test_crossover_rate(self, rate, parents):
        population = rated(10, 20, 30, 40)
        plans = [plan_births(population, Breeding(crossover_rate=rate), random.Random(i)) for i in range(20)]
        assert {len(birth.parents) for births in plans for birth in births} == parents

    def test_a_lone_survivor_is_mutated(self):
        births = plan_births(rated(10, 20), Breeding(crossover_rate=1.0), random.Random(0))
        assert [birth.parents for birth in births] == [("student_1",)]
        assert births[0].operator in MUTATIONS

    def test_operators_follow_the_mixture(self):
        mixture = {"full_gaussian": 3.0, "svd_perturb": 1.0}
        breeding = Breeding(crossover_rate=0.0, mutations=mixture, mutation_strength=0.5)
        births = [plan_births(rated(10, 20, 30), breeding, random.Random(i))[0] for i in range(2000)]
        counts = Counter(birth.operator for birth in births)
        assert counts["full_gaussian"] / 2000 == pytest.approx(0.75, abs=0.03)
        assert set(counts) == {"full_gaussian", "svd_perturb"}
        assert {birth.strength for birth in births} == {0.5}

    def test_the_same_generator_gives_the_same_plan(self):
        plans = [plan_births(rated(10, 20, 30, 40), Breeding(), random.Random("evolution 0 10")) for _ in range(2)]
        assert plans[0] == plans[1]


class TestMixture:
    def test_every_way_to_write_one(self):
        even = {"dare": 1.0, "clone": 1.0}
        for value in (["dare", "clone"], "dare, clone", '["dare", "clone"]', {"dare": 1, "clone": 1.0}):
            assert read_mixture(value, (), "crossovers") == even
        assert read_mixture('{"ties": 2}', (), "crossovers") == {"ties": 2.0}
        assert list(read_mixture(None, DEFAULT_MUTATIONS, "mutations")) == list(DEFAULT_MUTATIONS)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("blend", "no operator 'blend'"),
            ({"dare": -1}, "finite weights that are not negative"),
            ({"dare": 0}, "weight"),
        ],
    )
    def test_what_cannot_be_meant_is_refused(self, value, message):
        with pytest.raises(ValueError, match=f"`crossovers`.*{message}"):
            read_mixture(value, (), "crossovers")

    def test_the_default_is_the_papers_family(self):
        assert set(DEFAULT_MUTATIONS) <= set(MUTATIONS)
        assert set(DEFAULT_CROSSOVERS) <= set(CROSSOVERS)


def test_breeding_again_at_half_the_strength_is_the_same_child_nearer_to_its_parent():
    torch.manual_seed(0)
    parents = [{"m.lora_A.weight": torch.randn(12, 30), "m.lora_B.weight": torch.randn(20, 12)} for _ in range(2)]
    for operator in DEFAULT_MUTATIONS + ("dare", "svd_subspace", "extrapolate"):
        given = parents[:1] if operator in MUTATIONS else parents
        birth = Birth("student_0", "student", ("a", "b")[: len(given)], operator, 1.0, seed=6)
        one, again, half = (breed(replace(birth, strength=strength), given) for strength in (1.0, 1.0, 0.5))
        assert all(torch.equal(one[key], again[key]) for key in one)
        assert compare(one, parents[0])["cosine"] < compare(half, parents[0])["cosine"] < 1


def test_newborn_rating():
    population = rated(30, 20)
    population["student_0"].sigma, population["student_1"].sigma = 3.0, 1.0
    mu, sigma = rate_newborn(population.students)
    assert mu == 25.0
    assert sigma == pytest.approx(math.sqrt(5 + (25 / 6) ** 2))
    population["student_0"].sigma = 25 / 3
    assert rate_newborn(population.students[:1])[1] == PRIOR_SIGMA


class TestSimulation:
    """The whole loop but the model: members with a known strength, inherited with noise, play and are replaced."""

    @staticmethod
    def simulate(teachers: int, students: int, *, every: int = 10, steps: int = 120, seed: int = 0):
        rng = np.random.default_rng(seed)
        population, matchmaker = Population(teachers, students), Matchmaker(seed=seed)
        strength = dict(zip(population.names, rng.normal(25, 6, len(population)), strict=True))
        breeding, log = Breeding(evolve_burn_in=8), []
        for step in range(1, steps + 1):
            outcomes = {}
            for match in matchmaker.pair(population):
                odds = norm.cdf((strength[match.student] - strength[match.teacher]) / (math.sqrt(2) * BETA))
                outcomes[match] = list(rng.binomial(8, odds, size=6) / 8)
            matchmaker.update(population, outcomes)
            if not every or step % every:
                continue
            births = plan_births(population, breeding, random.Random(f"{seed} {step}"))
            for birth in births:
                seat = population[birth.name]
                rivals = [member for member in population.role(birth.role) if member is not seat]
                log.append((birth, seat.age, population.fitness(seat), max(map(population.fitness, rivals))))
                parents = [strength[parent] for parent in birth.parents]
                mu, sigma = rate_newborn([population[parent] for parent in birth.parents])
                population.replace(birth.name, step=step, operator=birth.operator, mu=mu, sigma=sigma)
                strength[birth.name] = max(parents) + rng.normal(0, 1)
        return population, strength, log

    @pytest.mark.parametrize(("teachers", "students"), [(1, 1), (2, 3), (4, 4), (8, 8)])
    def test_newborns_are_protected_and_the_best_survives(self, teachers, students):
        population, _, log = self.simulate(teachers, students)
        assert all(age >= 8 for _, age, _, _ in log)
        assert all(fitness < best for _, _, fitness, best in log)
        events = Counter(birth.role for birth, *_ in log)
        for role, size in (("teacher", teachers), ("student", students)):
            assert (events[role] > 0) == (size > 1)
            assert events[role] <= 12 * max(1, size // 4)
        assert all(member.version == sum(birth.name == member.name for birth, *_ in log) for member in population)

    @pytest.mark.parametrize(("teachers", "students"), [(2, 3), (4, 4), (8, 8)])
    def test_the_weak_are_culled(self, teachers, students):
        # What the first event replaces is truly below its role's mean, in most of ten worlds.
        below = []
        for seed in range(10):
            _, strength, _ = self.simulate(teachers, students, steps=0, seed=seed)
            _, _, log = self.simulate(teachers, students, every=40, steps=40, seed=seed)
            for birth, *_ in log:
                role = [value for name, value in strength.items() if name.startswith(birth.role)]
                below.append(strength[birth.name] < np.mean(role))
        assert np.mean(below) > 0.8

    @pytest.mark.parametrize(("teachers", "students"), [(2, 3), (4, 4), (8, 8)])
    def test_selection_raises_the_strength_of_the_population(self, teachers, students):
        # Of the population, not of each role: where one role runs ahead, all its matches end alike and tell nothing.
        gains = []
        for seed in range(3):
            before = self.simulate(teachers, students, steps=0, seed=seed)[1]
            after = self.simulate(teachers, students, seed=seed)[1]
            gains.append(np.mean([after[name] - before[name] for name in before]))
        assert np.mean(gains) > 2

    def test_a_population_of_one_and_one_never_replaces_anybody(self):
        assert self.simulate(1, 1)[2] == []


@pytest.fixture(scope="module")
def make_trainer(random_base, seed_tasks, tmp_path_factory):
    """2T+2S on the random base: 12 rows of at most 8 tokens a step, because only what follows a step matters here."""
    made = []

    def make(**overrides) -> PopuLoRATrainer:
        settings = {
            "output_dir": str(tmp_path_factory.mktemp("run")),
            "proposals_per_teacher": 2,
            "task_kinds": ["code_o"],
            "per_device_train_batch_size": 6,
            "max_completion_length": 8,
            "max_steps": 4,
            "lr_scheduler_type": "linear",
            "evolve_every": 2,
            "evolve_burn_in": 1,
            "save_rollouts": False,
            "seed": 1,  # every member has an advantage in the first two steps
        }
        tasks = [task.to_record() for task in seed_tasks]
        trainer = small_trainer(random_base, tasks, letters, **(settings | overrides))
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        trainer.close()


class TestSettings:
    """From a field of the config to what it changes; nobody has to train for that."""

    @staticmethod
    def seasoned(make_trainer, **settings):
        """2T+4S that have played, `student_3` the best."""
        trainer = make_trainer(teachers=2, students=4, evolve_burn_in=5, **settings)
        for index, member in enumerate(trainer.population):
            member.mu, member.sigma, member.age = 30.0 + index, 1.5, 20
        return trainer

    def test_a_newborn_starts_at_its_parents_mu(self, make_trainer):
        """The whole event, as a run has it."""
        trainer = self.seasoned(make_trainer)
        before = {member.name: member.mu for member in trainer.population}
        events = trainer.evolution.evolve(20)
        assert [event["role"] for event in events] == ["teacher", "student"]
        for event in events:
            child = trainer.population[event["child"].split("@")[0]]
            expected = np.mean([before[parent.split("@")[0]] for parent in child.parents])
            assert (child.mu, child.age) == (expected, 0)
            assert child.sigma < PRIOR_SIGMA

    @pytest.mark.parametrize(("size", "fathers"), [(1, {"student_1", "student_2", "student_3"}), (3, {"student_3"})])
    def test_tournament_size(self, make_trainer, size, fathers):
        trainer = self.seasoned(make_trainer, tournament_size=size, crossover_rate=0.0)
        plans = [plan_births(trainer.population, trainer.evolution.breeding, random.Random(i)) for i in range(30)]
        assert {birth.parents[0] for births in plans for birth in births if birth.role == "student"} == fathers

    def test_a_child_starts_without_moments(self, make_trainer):
        trainer = make_trainer(max_steps=2, evolve_every=100, crossover_rate=0.0)
        trainer.train()
        for member in trainer.population:
            member.age = 20

        def moments(name):
            parameters = member_parameters(trainer.model, name).values()
            return [trainer.optimizer.optimizer.state[parameter]["exp_avg"].clone() for parameter in parameters]

        for event in trainer.evolution.evolve(20):
            child, parent = (moments(each.split("@")[0]) for each in (event["child"], event["parents"][0]["member"]))
            assert any(value.any() for value in parent)
            assert not any(value.any() for value in child)

    def test_pfsp_kappa(self, make_trainer):
        for settings, weight in (({}, 0.0), ({"pfsp_kappa": 0.0}, 1.0)):
            trainer = self.seasoned(make_trainer, **settings)
            student, teacher = trainer.population["student_0"], trainer.population["teacher_0"]
            student.mu = 1000.0  # hopeless odds have no weight of their own
            assert trainer.game.matchmaker.weight(student, teacher) == pytest.approx(weight, abs=1e-9)
            student.mu = teacher.mu
            even = 0.25 ** settings.get("pfsp_kappa", 2.0)
            assert trainer.game.matchmaker.weight(student, teacher) == pytest.approx(even)


class Births:
    """Takes note of every replacement on its way into the trainer: factors of parent, child, and seat after it."""

    def __init__(self, trainer: PopuLoRATrainer):
        self.trainer, self.replace_member, self.seen = trainer, trainer.replace_member, {}
        trainer.evolution.replace = self

    def __call__(self, name, factors, **options):
        parent = read_member(self.trainer.model, options["parents"][0].split("@")[0])
        factors = {key: value.clone() for key, value in factors.items()}
        self.replace_member(name, factors, **options)
        self.seen[name] = (parent, factors, read_member(self.trainer.model, name))


@pytest.fixture(scope="module")
def run(make_trainer):
    """One run of four steps with an event after the second, and what happened in it."""
    trainer = make_trainer()
    births = Births(trainer)
    trainer.train()
    return trainer, births.seen


def lineage(trainer) -> list[dict]:
    return read_lines(f"{trainer.args.output_dir}/lineage.jsonl")


class TestCallback:
    def test_one_member_per_role_is_replaced_at_the_event_and_none_at_the_last_step(self, run):
        events = lineage(run[0])
        assert [(event["step"], event["role"]) for event in events] == [(2, "teacher"), (2, "student")]
        assert sorted(member.version for member in run[0].population) == [0, 0, 1, 1]

    def test_the_lineage_tells_what_the_population_holds(self, run):
        for event in lineage(run[0]):
            seat = event["child"].split("@")[0]
            member = run[0].population[seat]
            assert event["child"] == f"{seat}@1" == member.identity
            assert event["replaced"]["member"] == f"{seat}@0"
            assert event["replaced"]["age"] == 2
            assert (member.born, member.operator, member.age) == (2, event["operator"], 2)
            assert member.parents == tuple(parent["member"] for parent in event["parents"])
            assert event["mu"] == np.mean([parent["mu"] for parent in event["parents"]])
            assert event["mu"] != PRIOR_MU
            assert max(parent["sigma"] for parent in event["parents"]) < event["sigma"] < PRIOR_SIGMA

    def test_the_child_is_live_and_its_likeness_recorded(self, run):
        for event in lineage(run[0]):
            parent, child, live = run[1][event["child"].split("@")[0]]
            assert all(torch.equal(child[key], live[key]) for key in child)
            likeness = compare(child, parent)
            assert event["cosine"] == [pytest.approx(likeness["cosine"])]
            assert event["norm_ratio"] == [pytest.approx(likeness["norm_ratio"])]
            assert 0.5 < event["cosine"][0] < 1

    def test_every_metric_is_logged_at_every_step(self, run):
        logged = [entry for entry in run[0].state.log_history if "evolve/replaced" in entry]
        assert [entry["evolve/replaced"] for entry in logged] == [0.0, 0.0, 2.0, 0.0]
        assert all({"evolve/replaced", "evolve/cosine", "time/evolve"} <= set(entry) for entry in logged)

    def test_the_same_seed_gives_the_same_lineage(self, run, make_trainer):
        again = make_trainer()
        again.train()
        assert lineage(again) == lineage(run[0])

    @pytest.mark.parametrize("moment", ["on_step_end", "on_log"])
    def test_a_run_that_stops_at_an_event_ends_with_trained_members(self, make_trainer, moment):
        def stop(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

        trainer = make_trainer()
        trainer.add_callback(type("Stop", (TrainerCallback,), {moment: stop})())
        trainer.train()
        assert (trainer.state.global_step, [member.version for member in trainer.population]) == (2, [0] * 4)
        assert not any(adds_nothing(trainer.model, name) for name in trainer.population.adapters)

    @pytest.mark.parametrize(("frozen", "other"), [("teacher", "student"), ("student", "teacher")])
    def test_members_of_a_frozen_role_stay_as_they_are(self, make_trainer, frozen, other):
        rates = {"student": 1e-2, "teacher": 1e-2} | {frozen: 0.0}
        trainer = make_trainer(learning_rate=rates["student"], teacher_learning_rate=rates["teacher"])
        before = {name: read_member(trainer.model, name) for name in trainer.population.names}
        trainer.train()
        assert [event["role"] for event in lineage(trainer)] == [other]
        for name, factors in before.items():
            same = [torch.equal(factors[key], value) for key, value in read_member(trainer.model, name).items()]
            assert all(same) if name.startswith(frozen) else not all(same)

    def test_an_unknown_operator_is_refused_at_construction(self, make_trainer):
        with pytest.raises(ValueError, match="`mutations` names no operator 'shuffle'"):
            make_trainer(mutations={"shuffle": 1.0})
