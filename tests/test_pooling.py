"""Members that become the mean of their role: the mean itself, a real tiny run, and what cannot be pooled."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from tests.populora_run import find_optimizer, letters
from tests.prompt_runs import QUESTIONS, brief
from tests.small_run import QUIET, small_trainer
from trl_populora import PopuLoRAConfig, PopuLoRATrainer
from trl_populora.lora.members import member_parameters, read_member
from trl_populora.population.pooling import compute_mean, measure_distance
from trl_populora.run.read import read_lines


def test_the_mean_of_equal_factors_is_these_factors():
    torch.manual_seed(0)
    one = {"m.lora_A.weight": torch.randn(4, 30), "m.lora_B.weight": torch.randn(20, 4)}
    for count in (1, 2, 3, 7):
        mean = compute_mean([one] * count)
        assert all(torch.equal(mean[key], value) for key, value in one.items())


def test_the_distance_is_that_of_the_products_from_the_means():
    torch.manual_seed(0)
    members = [
        {f"{module}.lora_{side}.weight": torch.randn(*shape) for module in "mn" for side, shape in SHAPES.items()}
        for _ in range(3)
    ]
    mean = compute_mean(members)

    def update(factors) -> torch.Tensor:
        products = [factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"] for module in "mn"]
        return torch.stack(products).double()

    norms = [float((update(member) - update(mean)).norm()) for member in members]
    expected = math.sqrt(fmean(norm**2 for norm in norms)) / float(update(mean).norm())
    assert measure_distance(members, mean) == pytest.approx(expected, rel=1e-5)
    assert measure_distance([mean], mean) == 0

    near = [{key: value + 1e-4 * torch.randn_like(value) for key, value in mean.items()} for _ in range(3)]
    mean = compute_mean(near)
    exact = [{key: value.double() for key, value in each.items()} for each in (*near, mean)]
    assert measure_distance(near, mean) == pytest.approx(measure_distance(exact[:-1], exact[-1]), rel=1e-3)


SHAPES = {"A": (4, 30), "B": (20, 4)}


def test_members_that_add_nothing_have_no_distance():
    untrained = {"m.lora_A.weight": torch.ones(4, 30), "m.lora_B.weight": torch.zeros(20, 4)}
    assert math.isnan(measure_distance([untrained, untrained], untrained))


class Watch(TrainerCallback):
    """All that a pooling may change or must leave, at the end of each step and when the next one begins."""

    def __init__(self, trainer: PopuLoRATrainer):
        self.trainer, self.seen = trainer, {}

    def on_step_end(self, args, state, control, **kwargs):
        self.note("end", state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        self.note("begin", state.global_step)

    def note(self, moment: str, step: int) -> None:
        trainer = self.trainer
        optimizer = find_optimizer(trainer)
        self.seen[moment, step] = {
            member.name: {
                "factors": read_member(trainer.model, member.name),
                "logits": self.logits(member.name),
                "optimizer": [
                    value.clone()
                    for parameter in member_parameters(trainer.model, member.name).values()
                    for value in optimizer.state[parameter].values()
                ],
                "individual": (member.identity, member.age, member.born, member.operator),
                "rating": (member.mu, member.sigma),
            }
            for member in trainer.population
        }

    @torch.no_grad()
    def logits(self, name: str) -> torch.Tensor:
        with self.trainer.member(name):
            return self.trainer.model(torch.arange(3, 12)[None]).logits


EVERY, EVOLVE, STEPS = 2, 3, 5
POOLED = ("student_0", "student_1", "student_2")


@pytest.fixture(scope="module")
def run(random_base, seed_tasks, tmp_path_factory):
    """2T+3S for five steps: students are pooled after the second and the fourth, teachers evolve after the third."""
    trainer = small_trainer(
        random_base,
        [task.to_record() for task in seed_tasks],
        letters,
        output_dir=str(tmp_path_factory.mktemp("run")),
        teachers=2,
        students=3,
        proposals_per_teacher=2,
        per_device_train_batch_size=6,
        task_kinds=["code_o"],
        max_completion_length=8,
        max_steps=STEPS,
        evolve_every=EVOLVE,
        evolve_burn_in=0,
        pool_every=EVERY,
        seed=1,
    )
    watch = Watch(trainer)
    trainer.add_callback(watch)
    trainer.train()
    return trainer, watch.seen


@pytest.mark.parametrize("step", [2, 4])
class TestPooling:
    def test_each_is_the_mean_bit_for_bit(self, run, step):
        before, after = run[1]["end", step], run[1]["begin", step]
        for key in before["student_0"]["factors"]:
            total = sum(before[name]["factors"][key].double() for name in POOLED)
            mean = (total / len(POOLED)).float()
            assert all(torch.equal(after[name]["factors"][key], mean) for name in POOLED)
        apart = [before[name]["factors"] for name in POOLED]
        assert any(not torch.equal(apart[0][key], apart[1][key]) for key in apart[0]), "they had learned apart"

    def test_forwards_of_each_are_those_of_the_mean(self, run, step):
        before, after = run[1]["end", step], run[1]["begin", step]
        for name in POOLED:
            assert torch.equal(after[name]["logits"], after["student_0"]["logits"])
        assert any(not torch.equal(before[name]["logits"], after[name]["logits"]) for name in POOLED)

    def test_optimizer_state_age_and_version_go_on(self, run, step):
        before, after = run[1]["end", step], run[1]["begin", step]
        assert any(value.any() for name in POOLED for value in before[name]["optimizer"])
        for name in POOLED:
            kept = zip(before[name]["optimizer"], after[name]["optimizer"], strict=True)
            assert all(torch.equal(old, new) for old, new in kept)
            assert before[name]["individual"] == after[name]["individual"]

    def test_ratings_become_their_mean(self, run, step):
        before, after = run[1]["end", step], run[1]["begin", step]
        ratings = [before[name]["rating"] for name in POOLED]
        assert len({*ratings}) > 1
        assert {after[name]["rating"] for name in POOLED} == {tuple(map(fmean, zip(*ratings, strict=True)))}

    def test_the_other_role_stays(self, run, step):
        before, after = run[1]["end", step], run[1]["begin", step]
        for name in ("teacher_0", "teacher_1"):
            assert before[name]["rating"] == after[name]["rating"]
            assert all(map(torch.equal, before[name]["factors"].values(), after[name]["factors"].values()))

    def test_the_distance_is_logged_with_the_step_that_follows(self, run, step):
        before = [run[1]["end", step][name]["factors"] for name in POOLED]
        logged = [entry["pool/student/distance"] for entry in run[0].state.log_history if "loss" in entry]
        assert logged[step] == measure_distance(before, compute_mean(before)) > 0


def test_the_role_that_is_not_pooled_evolves(run):
    trainer, seen = run
    births = read_lines(f"{trainer.args.output_dir}/lineage.jsonl")
    assert [(event["step"], event["role"]) for event in births] == [(EVOLVE, "teacher")]
    for step in (1, 3):
        for name in POOLED:
            before, after = (seen[moment, step][name]["factors"] for moment in ("end", "begin"))
            assert all(torch.equal(before[key], value) for key, value in after.items())


def test_a_step_without_pooling_logs_no_distance(run):
    logged = [entry["pool/student/distance"] for entry in run[0].state.log_history if "loss" in entry]
    assert [value is None for value in logged] == [True, True, False, True, False]


def test_the_report_says_who_is_pooled(run):
    from trl_populora.report.load import load_run
    from trl_populora.report.page import _write_facts

    run[0].save_model()
    assert "pooled: <b>students, every 2 steps</b>" in _write_facts(load_run(run[0].args.output_dir))


def test_members_of_a_dataset_run_are_pooled(random_base, tmp_path):
    """Each learns from prompts of its own, and a step of a generation that trains twice is none between two."""
    settings = {"students": 3, "max_steps": 5, "num_iterations": 2, "pool_every": 4, "member_prompts": "own"}
    settings |= {
        "num_generations": 2,
        "per_device_train_batch_size": 2,
        "max_completion_length": 8,
        "logging_steps": 1,
    }
    args = PopuLoRAConfig(str(tmp_path), **(QUIET | settings))
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    trainer = PopuLoRATrainer(random_base, [letters, brief], args, QUESTIONS, peft_config=lora)
    watch = Watch(trainer)
    trainer.add_callback(watch)
    trainer.train()
    mean = compute_mean([watch.seen["end", 4][name]["factors"] for name in POOLED])
    for name in POOLED:
        assert all(torch.equal(watch.seen["begin", 4][name]["factors"][key], value) for key, value in mean.items())
    logged = [entry["pool/student/distance"] for entry in trainer.state.log_history if "loss" in entry]
    assert [value is None for value in logged] == [True, True, True, True, False]


class TestRefused:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"pool": "all"}, "`pool` must be one of students, teachers, both, got 'all'"),
            ({"single_agent": True}, "two or more students at the start that learn, each with an adapter of its own"),
            ({"students": 1}, "`pool_every=4` with `pool='students'` needs two or more students"),
            ({"pool": "both", "teachers": 1}, "`pool_every=4` with `pool='both'` needs two or more teachers"),
            ({"pool": "teachers", "teachers": 0}, "needs two or more teachers"),
            ({"pool": "both", "teacher_learning_rate": 0.0}, "needs two or more teachers at the start that learn"),
            ({"num_iterations": 3, "evolve_every": 0}, "`pool_every=4` must be a multiple of `num_iterations=3`"),
            (
                {"pool": "both", "evolve_every": 10},
                r"`pool='both'` and `evolve_every=10`: members of a pooled role do not evolve, so nobody is left to",
            ),
            ({"evolve_every": 5, "teacher_learning_rate": 0.0}, "and `evolve_every=5`: members of a pooled role"),
            ({"pool_every": 0, "pool": "both"}, "`pool='both'` pools nobody without `pool_every`"),
            ({"learning_rate": 0.0}, "needs two or more students at the start that"),
        ],
    )
    def test_a_game_in_which_it_means_nothing(self, make_args, settings, message):
        with pytest.raises(ValueError, match=message):
            make_args(**({"pool_every": 4} | settings))

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"students": 1}, "needs two or more students"),
            (
                {"students": 3, "learning_rate": [1e-5, 1e-5, 0.0]},
                "needs two or more students at the start that",
            ),
            ({"pool": "both"}, "needs two or more teachers"),
            ({"evolve_every": 8}, "and `evolve_every=8`: members of a pooled role do not evolve"),
            ({"halve_every": 4, "max_steps": 9}, "`pool_every=4` clashes with `halve_every=4`"),
            (
                {"num_iterations": 3, "member_prompts": "own"},
                "`pool_every=4` must be a multiple of the 3 optimizer steps of a generation",
            ),
            (
                # After an epoch of an odd number of generations no optimizer step would end with a generation.
                {
                    "steps_per_generation": 2,
                    "gradient_accumulation_steps": 4,
                    "num_iterations": 3,
                    "pool_every": 3,
                    "member_prompts": "own",
                },
                "`pool_every=3`: a generation has 6 micro-batches of each member .* and an optimizer step 4 ",
            ),
        ],
    )
    def test_a_dataset_run_in_which_it_means_nothing(self, settings, message):
        with pytest.raises(ValueError, match=message):
            PopuLoRAConfig("run", **({"pool_every": 4} | settings)).for_prompts()

    @pytest.mark.parametrize(("accumulated", "iterations", "every"), [(2, 2, 2), (4, 2, 1), (8, 2, 1)])
    def test_members_are_pooled_where_a_step_and_a_generation_end_together(self, accumulated, iterations, every):
        """A generation has two micro-batches and is used twice. A step takes 2, 4 or 8."""
        sizes = {"steps_per_generation": 2, "gradient_accumulation_steps": accumulated, "num_iterations": iterations}
        args = PopuLoRAConfig("run", students=2, pool_every=every, **sizes).for_prompts()
        assert args.optimizer_steps_per_generation == every

    def test_members_of_unequal_rank(self, random_base, tmp_path):
        configs = [LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear") for rank in (4, 2)]
        args = PopuLoRAConfig(str(tmp_path), students=2, pool_every=4, **QUIET)
        with pytest.raises(ValueError, match="`pool_every=4`: members of unequal rank or alpha have no mean"):
            PopuLoRATrainer(random_base, brief, args, QUESTIONS, peft_config=configs)


@pytest.mark.parametrize(
    ("settings", "events"),
    [({}, 10), ({"pool_every": 5}, 10), ({"pool_every": 5, "pool": "both"}, 0), ({"pool_every": 5, "teachers": 1}, 0)],
)
def test_evolution_is_off_by_itself_where_pooling_leaves_nobody(make_args, settings, events):
    args = make_args(evolve_every=None, per_device_train_batch_size=4, **settings)
    assert args.evolve_every == events
    assert set(args.breeding.roles) == {"teacher", "student"} - set(args.pooled_roles)
