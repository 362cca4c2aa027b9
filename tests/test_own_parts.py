"""Each part of a run that may be a user's own, as a file of its own that a YAML file names; nothing in the package."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import TrainerCallback

from tests.populora_run import HELD_OUT, SETTINGS, letters
from tests.small_run import small_trainer
from trl_populora import cli
from trl_populora.config import PopuLoRAConfig
from trl_populora.population.evolution import read_mixture
from trl_populora.population.members import Population
from trl_populora.population.operators import find_operator
from trl_populora.population.ratings import Matchmaker
from trl_populora.step.advantages import estimate_advantages
from trl_populora.step.rows import LOG_METRIC, OWN_METRICS, add_own_metrics, find_metric, name_own_metrics


HERE = "tests.test_own_parts"
FILES = {
    "own_reward": """
def pay(outcome):
    return 3.0 if outcome.valid else 2.0

def pay_attempt(answer):
    return float(answer.correct)
""",
    "own_matching": """
def avoid_first(student, teacher):
    return 0.0 if student.name == "student_0" else 1.0
""",
    "own_estimator": """
def by_rank(rewards, members, kinds, groups):
    assert rewards.shape == members.shape == kinds.shape == groups.shape
    return rewards.argsort().argsort().to(rewards) + 1
""",
    "own_operator": """
def shrink(factors, generator, strength=1.0):
    return {key: value * 0.5**strength if "lora_B" in key else value.clone() for key, value in factors.items()}
""",
    "own_metric": """
def count_kinds(records):
    return {"own/kinds": len({record["kind"] for record in records})}
""",
}
NAMED = {
    "teacher_reward": "own_reward:pay",
    "student_reward": "own_reward:pay_attempt",
    "matchmaking": "own_matching:avoid_first",
    "teacher_baseline": "own_estimator:by_rank",
    "student_baseline": "own_estimator:by_rank",
    "mutations": {"own_operator:shrink": 1},
    "crossover_rate": 0.0,
    "own_metrics": ["own_metric:count_kinds"],
}


@pytest.fixture(scope="module")
def run(random_base, tmp_path_factory):
    """Two steps with a birth between them; the kind of task is one of the tests' own."""
    root = tmp_path_factory.mktemp("own")
    for name, text in FILES.items():
        (root / f"{name}.py").write_text(text)
    seeds = root / "seeds.jsonl"
    seeds.write_text("".join(json.dumps(task) + "\n" for task in HELD_OUT[1:]))
    settings = SETTINGS | {"max_steps": 2, "evolve_every": 1, "students": 3, "save_strategy": "no"} | NAMED
    settings |= {"output_dir": str(root / "run"), "model_name_or_path": random_base, "seed_tasks": str(seeds)}
    settings |= {"lora_r": 4, "lora_alpha": 8, "dtype": "float32", "task_kinds": ["tests.populora_run:Letters"]}
    (root / "run.yaml").write_text(yaml.safe_dump(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        cli.main(["train", "--config", str(root / "run.yaml")])
    return root / "run"


@pytest.fixture(scope="module")
def logged_step(random_base, tmp_path_factory):
    """What a first step hands over to name the metrics of users: its metrics, and the keys of its log."""
    seen = []
    settings = SETTINGS | {"output_dir": str(tmp_path_factory.mktemp("step")), "max_steps": 1, "save_strategy": "no"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "trl_populora.trainer.name_own_metrics", lambda metrics, logs: seen.append((dict(metrics), set(logs)))
        )
        small_trainer(random_base, HELD_OUT[1:], letters, **settings).train()
    return seen[0]


@pytest.fixture(scope="module")
def rows(run):
    return [row for path in sorted(run.glob("rollouts/*.parquet")) for row in pq.read_table(path).to_pylist()]


class TestOneRun:
    def test_the_kind_is_played(self, rows):
        assert {row["kind"] for row in rows} == {"letters"}

    def test_the_rewards_are_paid(self, rows):
        for row in rows:
            expected = 2.0 + row["valid"] if row["role"] == "teacher" else float(row["correct"])
            assert row["pay"] == expected

    def test_the_weight_decides_who_meets(self, rows):
        met = {row["member"] for row in rows if row["role"] == "student" and row["step"] == 1}
        assert met == {"student_1", "student_2"}, "of the first step: in the second, loads are evened out"

    def test_the_estimator_gives_the_advantages(self, rows):
        for role, step in (("teacher", 1), ("student", 1), ("teacher", 2), ("student", 2)):
            given = sorted(row["advantage"] for row in rows if (row["role"], row["step"]) == (role, step))
            assert given == [float(n) for n in range(1, len(given) + 1)]

    def test_the_operator_makes_the_children(self, run):
        births = [json.loads(line) for line in (run / "lineage.jsonl").read_text().splitlines()]
        assert {birth["operator"] for birth in births} == {"own_operator:shrink"}
        assert all(birth["norm_ratio"] == [pytest.approx(0.5, rel=1e-3)] for birth in births)

    def test_the_metric_is_logged(self, run):
        logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [entry["own/kinds"] for entry in logged] == [1.0, 1.0]


given: object = None


def give(*arguments, **settings):
    """What a test wants given; errors are raised."""
    if isinstance(given, Exception):
        raise given
    return given(*arguments) if callable(given) else given


def weigh():
    population = Population(1, 1)
    return Matchmaker(f"{HERE}:give").weight(population["student_0"], population["teacher_0"])


def estimate():
    numbers, rewards = torch.tensor([0, 1]), torch.tensor([1.0, 2.0])
    return estimate_advantages(f"{HERE}:give", "student_baseline", rewards, numbers, numbers, numbers)


PARENT = {"q.lora_A.weight": torch.ones(2, 3), "q.lora_B.weight": torch.ones(4, 2)}


def mutate():
    return find_operator(f"{HERE}:give", "mutations")(PARENT, torch.Generator(), strength=0.5)


def tell():
    return find_metric(f"{HERE}:give")([])


class TestErrors:
    @pytest.mark.parametrize(
        ("ask", "option"),
        [(weigh, "matchmaking"), (estimate, "student_baseline"), (mutate, "mutations"), (tell, "own_metrics")],
    )
    def test_a_function_that_raises_is_told_in_one_line(self, ask, option, monkeypatch):
        monkeypatch.setitem(globals(), "given", KeyError("x"))
        with pytest.raises(
            RuntimeError, match=rf"^`{option}={HERE}:give` raised KeyError\('x'\) when .* with .*\.$"
        ) as error:
            ask()
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("ask", "answer", "told"),
        [
            (weigh, -1.0, r"must give a finite number that is not negative, got -1.0 for student_0@0 and teacher_0@0"),
            (weigh, float("nan"), "not negative, got nan"),
            (weigh, "1", "not negative, got '1'"),
            (estimate, lambda rewards, *_: rewards[:1], r"must give a tensor of shape \(2,\), got \(1,\)"),
            (estimate, 1.0, "got float"),
            (estimate, lambda rewards, *_: rewards / 0, "must give finite advantages, got inf"),
            (mutate, {"q.lora_A.weight": torch.ones(2, 3)}, "'q.lora_B.weight' is absent instead of"),
            (mutate, PARENT | {"q.lora_B.weight": torch.ones(2, 2)}, r"is \(2, 2\) instead of \(4, 2\)"),
            (mutate, PARENT | {"q.lora_B.weight": torch.full((4, 2), float("nan"))}, "not finite, in 'q.lora_B"),
            (mutate, None, "must give factors, tensors by key, got None"),
            (tell, [1.0], r"must give numbers by name, NaN where there is none, got \[1.0\]"),
            (tell, {"own/words": "many"}, "must give numbers by name"),
        ],
    )
    def test_an_answer_of_another_form_is_told(self, ask, answer, told, monkeypatch):
        monkeypatch.setitem(globals(), "given", answer)
        with pytest.raises(ValueError, match=f"`.*={HERE}:give` .*{told}"):
            ask()

    @pytest.mark.parametrize("option", ["matchmaking", "teacher_baseline", "student_baseline"])
    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("nowhere_at_all:f", "Unknown `{option}` 'nowhere_at_all:f'.*PYTHONPATH"),
            (f"{HERE}:FILES", "`{option}=tests.test_own_parts:FILES` is no function but"),
            ("median", "`{option}` must be one of .*, or `module:function` for a function of your own, got 'median'"),
        ],
    )
    def test_what_is_no_function_is_refused(self, make_args, option, name, told):
        with pytest.raises(ValueError, match=told.format(option=option)):
            make_args(**{option: name})

    def test_an_operator_that_is_not_there_is_refused(self):
        with pytest.raises(ValueError, match="Unknown `mutations` 'nowhere_at_all:f'"):
            read_mixture({"nowhere_at_all:f": 1}, (), "mutations")

    def test_a_number_that_a_weight_of_ones_own_does_not_hear_of_is_refused(self, make_args):
        with pytest.raises(ValueError, match="your own function, and it does not read `pfsp_kappa=1.0`"):
            make_args(matchmaking=f"{HERE}:weigh", pfsp_kappa=1.0)

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("solve/rate", "is another metric's name"),
            ("reward", "is another metric's name"),
            ("loss", "is another metric's name"),
            ("member/student_0/grad_norm", "is another metric's name"),
            ("step_time", "is another metric's name"),
            ("epoch", "is another metric's name"),
            ("eval_mine", "begins like the metrics of an evaluation"),
        ],
    )
    def test_a_metric_with_the_name_of_another_is_refused(self, logged_step, name, told):
        metrics, logs = logged_step
        for prefix in (OWN_METRICS, LOG_METRIC):
            with pytest.raises(ValueError, match=f"`.*` gives '{name}', which {told}. Choose another one."):
                name_own_metrics(metrics | {prefix + name: [1.0]}, logs)

    @pytest.mark.parametrize("source", ["own_metrics", "log_metric"])
    def test_a_run_ends_at_its_first_step_if_a_metric_has_the_name_of_another(
        self, base, tmp_path, monkeypatch, source
    ):
        def reward(completions, log_metric, **columns):
            log_metric("solve/rate" if source == "log_metric" else "mine", 1.0)
            return letters(completions)

        monkeypatch.setitem(globals(), "given", {"solve/rate" if source == "own_metrics" else "own": 1.0})
        trainer = small_trainer(
            base, HELD_OUT[1:], reward, **SETTINGS | {"output_dir": str(tmp_path), "own_metrics": [f"{HERE}:give"]}
        )
        with pytest.raises(ValueError, match=f"`{source}` gives 'solve/rate', which is another metric's name"):
            trainer.train()
        assert trainer.state.global_step == 1

    def test_two_functions_with_one_metric_are_refused(self):
        metrics: dict = {}
        add_own_metrics(metrics, {"mine": 1.0})
        with pytest.raises(ValueError, match="Two functions of `own_metrics` give 'mine'"):
            add_own_metrics(metrics, {"mine": 2.0})

    def test_a_reward_function_with_the_name_of_another_is_refused(self, base, tmp_path):
        def student_reward(completions, **columns):
            return letters(completions)

        with pytest.raises(ValueError, match="Two reward functions are called 'student_reward'"):
            small_trainer(base, HELD_OUT[1:], student_reward, **SETTINGS | {"output_dir": str(tmp_path)})


def test_metrics_of_a_users_own_are_logged_by_their_names_beside_an_evaluation(base, tmp_path, monkeypatch):
    def reward(completions, log_metric, **columns):
        log_metric("mine", 2.0)
        return letters(completions)

    monkeypatch.setitem(globals(), "given", {"own": 1.0})
    settings = SETTINGS | {"output_dir": str(tmp_path), "own_metrics": [f"{HERE}:give"], "eval_attempts": 1}
    held_out = [{"kind": "letters", "program": "", "inputs": [], "outputs": [], "message": "xyz"}]
    # The evaluation after the first step is logged while the metrics of this step still wait.
    settings |= {"logging_steps": 2, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    trainer = small_trainer(base, HELD_OUT[1:], reward, held_out, **settings)
    trainer.train()
    (logged,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert (logged["own"], logged["mine"]) == (1.0, 2.0)
    assert not [key for key in logged if "`" in key]


def test_a_log_of_a_users_own_that_begins_as_an_evaluation_does_ends_no_run(base, tmp_path):
    class Log(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer.log({"eval_mine": 1.0})

    settings = SETTINGS | {"output_dir": str(tmp_path), "max_steps": 1, "disable_tqdm": False}
    trainer = small_trainer(base, HELD_OUT[1:], letters, **settings)
    trainer.add_callback(Log)
    trainer.train()
    assert any("eval_mine" in entry for entry in trainer.state.log_history)


def test_defaults_name_no_function_of_a_users_own():
    settings = {field.name: field.default for field in PopuLoRAConfig.__dataclass_fields__.values()}
    assert settings["own_metrics"] is None
    assert not any(":" in str(settings[name]) for name in NAMED)
