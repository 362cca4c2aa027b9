"""A dataset run is evaluated as TRL evaluates, member by member, and the best member lies at the root."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from statistics import fmean

import pyarrow.parquet as pq
import pytest
from transformers import TrainerCallback

from tests.populora_run import ON_PROMPTS
from tests.prompt_runs import QUESTIONS, brief
from tests.small_run import small_lora
from trl_populora import PopuLoRAConfig, PopuLoRATrainer
from trl_populora.evaluate.intervals import measure_mean
from trl_populora.lora.members import read_member, write_member
from trl_populora.population.members import Member
from trl_populora.report.load import load_run
from trl_populora.run.callbacks import format_evaluation
from trl_populora.run.read import list_rewards, read_lines, read_population
from trl_populora.step.prompts import Judged, measure_evaluation


OPTIONS = {name: value for name, value in ON_PROMPTS.items() if name != "on_prompts"}
HELD_OUT = QUESTIONS.select(range(3))


def build(base, output_dir, reward, held_out=HELD_OUT, **options):
    args = PopuLoRAConfig(str(output_dir), **(OPTIONS | {"save_strategy": "no"} | options))
    return PopuLoRATrainer(base, reward, args, QUESTIONS, held_out, peft_config=small_lora())


def pay_by_step(completion_ids, member, trainer_state, **columns) -> list[float]:
    """Pays most after step 2, and there most to student_2."""
    step = trainer_state.global_step
    bonus = {"student_2": 0.1} if step == 2 else {"student_1": 0.1}
    return [float(step == 2) + bonus.get(name, 0.0) for name in member]


def test_the_members_that_were_best_are_loaded_and_lie_at_the_root_also_one_that_left(random_base, tmp_path):
    every_step = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "max_steps": 4}
    trainer = build(random_base, tmp_path, pay_by_step, **every_step, **best)

    class Leave(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 3:
                trainer.remove_member("student_2")

    trainer.add_callback(Leave())
    trainer.train()
    checkpoint = tmp_path / "checkpoint-2"
    assert trainer.state.best_model_checkpoint == str(checkpoint)
    trainer.save_model()
    saved, then = read_population(tmp_path), read_population(checkpoint)
    assert (saved["step"], saved["best_student"], saved["best_student_by"]) == (
        2,
        "student_2",
        "reward on eval_dataset",
    )
    assert saved["members"] == then["members"]
    assert {event["step"] for event in read_lines(tmp_path / "lineage.jsonl")} <= {0, 1, 2}
    for name in trainer.population.names:
        weights = f"members/{name}/adapter_model.safetensors"
        assert (tmp_path / weights).read_bytes() == (checkpoint / weights).read_bytes()
    root = Path(tmp_path, "adapter_model.safetensors").read_bytes()
    assert root == Path(tmp_path, "members/student_2/adapter_model.safetensors").read_bytes()


def assert_described_as_evaluated(trainer: PopuLoRATrainer, found: dict[str, float]) -> None:
    """The rewards in `population.json` are those of this evaluation alone."""
    for member in trainer.describe()["members"]:
        assert member["eval_reward"] == found[f"eval_member/{member['seat']}/reward"]


def test_an_evaluation_of_the_best_weights_is_not_mixed_with_that_of_the_last(random_base, tmp_path):
    every_step = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    first = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "greater_is_better": False}
    trainer = build(random_base, tmp_path, Rising(), max_steps=2, evolve_every=0, **every_step, **first)
    trainer.train()
    assert trainer.state.best_global_step == 1
    assert_described_as_evaluated(trainer, trainer.evaluate())


def test_an_evaluation_of_an_earlier_training_does_not_count_at_the_same_step(random_base, tmp_path):
    trainer = build(random_base, tmp_path, Rising(), max_steps=2, evolve_every=0, eval_strategy="steps", eval_steps=2)
    trainer.train()
    trainer.train()
    (last,) = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert_described_as_evaluated(trainer, last)


class Rising:
    """A reward function that pays more at each call."""

    __name__ = "rising"

    def __init__(self):
        self.calls = 0

    def __call__(self, completion_ids, **columns):
        self.calls += 1
        return [self.calls + len(ids) / 10 for ids in completion_ids]


def test_tables_of_completions_have_the_rows_of_training_alone(random_base, tmp_path):
    """As `docs/options.md` says. An evaluation's rows have no member there, so the columns had different lengths."""
    options = {"students": 1, "max_members": 2, "evolve_every": 0, "max_steps": 3, "num_generations": 2}
    logged = {"log_completions": True, "eval_strategy": "steps", "eval_steps": 1, "steps_per_generation": 2}
    trainer = build(random_base, tmp_path, brief, **options, **logged)
    trainer.train()
    tables = [pq.read_table(path).to_pydict() for path in sorted(tmp_path.glob("completions/*.parquet"))]
    assert len(tables) == 3
    rows = trainer.args.per_device_train_batch_size * 2
    assert [len(table["prompt"]) for table in tables] == [rows] * 3
    assert {member for table in tables for member in table["member"]} == {"student_0"}


def test_a_metric_of_ones_own_has_its_name_in_an_evaluation(random_base, tmp_path):
    def paid(completion_ids, log_metric, **columns):
        log_metric("acc", 0.5)
        return [len(ids) / 10 for ids in completion_ids]

    trainer = build(random_base, tmp_path, paid, max_steps=1, evolve_every=0)
    assert trainer.evaluate()["eval_acc"] == 0.5
    assert not any("log_metric" in key for entry in trainer.state.log_history for key in entry)


def test_a_loader_that_is_kept_asks_the_members_that_there_are(random_base, tmp_path):
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    options = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 3, "evolve_every": 0, "max_members": 5}
    trainer = build(random_base, tmp_path, brief, per_device_eval_batch_size=6, **options, **workers)

    class Change(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                trainer.remove_member("student_0")
            if state.global_step == 2:
                trainer.add_member("student_4")

    trainer.add_callback(Change())
    trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    asked = [list_rewards(entry, "eval_").keys() for entry in evaluations]
    everybody = {f"student_{n}" for n in range(4)}
    assert asked == [everybody, everybody - {"student_0"}, everybody - {"student_0"} | {"student_4"}]


@pytest.mark.parametrize(
    ("prompts", "why"), [("shared", "rating"), ("own", "reward")], ids=["else by rating", "else by reward"]
)
def test_without_an_evaluation_of_these_weights_the_best_is_told_otherwise(random_base, tmp_path, prompts, why):
    def pay(completion_ids, member, **columns):
        return [float(name == "student_3") for name in member]

    options = {"eval_on_start": True, "max_steps": 1, "evolve_every": 0, "member_prompts": prompts}
    trainer = build(random_base, tmp_path, pay, **options)
    trainer.train()
    trainer.save_model()
    saved = read_population(tmp_path)
    assert (saved["best_student"], saved["best_student_by"]) == ("student_3", why)
    trainer.evaluate()
    assert trainer.describe()["best_student_by"] == "reward on eval_dataset"


def test_the_card_names_the_member_whose_adapter_lies_at_the_root(random_base, tmp_path):
    def pay(completion_ids, member, trainer_state, **columns):
        return [float(name == best) for name in member]

    trainer = build(random_base, tmp_path, pay, max_steps=1, evolve_every=0, save_strategy="steps", save_steps=1)
    best = "student_3"
    trainer.train()
    told = "root of this repository is **{}**, the member with the highest {}."
    assert told.format(best, "rating") in (tmp_path / "README.md").read_text()
    best = "student_1"
    trainer.evaluate()
    trainer.save_model()
    assert read_population(tmp_path)["best_student"] == best
    assert told.format(best, "reward on eval_dataset") in (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").unlink()
    trainer.save_model(tmp_path / "elsewhere")
    assert not (tmp_path / "README.md").exists(), "the card is of what lies in the run's directory"


def test_a_member_that_no_function_judges_is_not_the_best(random_base, tmp_path):
    def pay(completion_ids, member, **columns):
        return [{"student_0": None, "student_2": 1.0}.get(name, 0.0) for name in member]

    trainer = build(random_base, tmp_path, pay, max_steps=1, evolve_every=0, member_prompts="own")
    trainer.train()
    for evaluates in (False, True):
        if evaluates:
            trainer.evaluate()
        trainer.save_model()
        saved = read_population(tmp_path)
        assert saved["best_student"] == "student_2"
        assert saved["members"][0]["eval_reward" if evaluates else "reward"] is None


def test_a_figure_of_an_empty_seat_is_no_best_until_it_has_a_value(random_base, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "max_members": 5, "max_steps": 3, "evolve_every": 0}
    best = {"metric_for_best_model": "eval_member/student_4/reward", "greater_is_better": True}
    trainer = build(random_base, tmp_path, brief, **options, **best)

    class Join(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                assert state.best_metric is None
                trainer.add_member("student_4")

    trainer.add_callback(Join())
    trainer.train()
    assert isinstance(trainer.state.best_metric, float)


class Count:
    """A reward function that counts who answered what, and pays by the length."""

    __name__ = "count"

    def __init__(self):
        self.rows = Counter()
        self.paid: dict[str, list[float]] = {}

    def __call__(self, prompts, completion_ids, member, **columns):
        for name, prompt, ids in zip(member, prompts, completion_ids, strict=True):
            self.rows[name, prompt] += 1
            self.paid.setdefault(name, []).append(len(ids) / 10)
        return [len(ids) / 10 for ids in completion_ids]


@pytest.mark.parametrize("attempts", [1, 3])
def test_every_member_answers_every_prompt_as_often_as_asked_before_any_training(random_base, tmp_path, attempts):
    count = Count()
    # 3 prompts of 4 members in batches of 15, or with one attempt 5: the last batch is smaller.
    options = {"num_generations_eval": attempts, "per_device_eval_batch_size": 5 * attempts, "eval_strategy": "steps"}
    trainer = build(random_base, tmp_path, count, **options)
    for place, name in enumerate(trainer.population.names):
        factors = read_member(trainer.model, name)
        write_member(trainer.model, name, {key: value + 0.1 * place for key, value in factors.items()})
    found = trainer.evaluate()
    assert count.rows == {
        (name, prompt): attempts for name in trainer.population.names for prompt in HELD_OUT["prompt"]
    }
    for name, paid in count.paid.items():
        assert found[f"eval_member/{name}/reward"] == pytest.approx(fmean(paid))
        assert found[f"eval_member/{name}/rewards/count"] == pytest.approx(fmean(paid))
    best, second = sorted((fmean(paid) for paid in count.paid.values()), reverse=True)[:2]
    assert found["eval_reward_lead"] == pytest.approx(best - second)
    assert trainer.describe()["best_student_by"].endswith("reward on eval_dataset")


def test_a_batch_that_cuts_attempts_at_a_prompt_apart_is_refused(random_base, tmp_path):
    trainer = build(random_base, tmp_path, brief, num_generations_eval=3, per_device_eval_batch_size=8)
    with pytest.raises(ValueError, match="`num_generations_eval=3` does not divide .* `per_device_eval_batch_size=8`"):
        trainer.evaluate()


def test_of_several_tables_each_has_its_own_figures_and_decides_alike(random_base, tmp_path):
    tables = {"short": HELD_OUT, "long": QUESTIONS}
    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_long_reward_best"}
    trainer = build(random_base, tmp_path, brief, tables, **steps, **best)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "eval_long_reward_best" in entry]
    assert trainer.state.best_metric == max(entry["eval_long_reward_best"] for entry in logs)
    names = ["reward_best", "reward_worst", "reward_lead", *(f"member/student_{n}/reward" for n in range(4))]
    for table in tables:
        (first, *_) = [entry for entry in trainer.state.log_history if f"eval_{table}_runtime" in entry]
        assert {f"eval_{table}_{name}" for name in names} <= first.keys()
        assert not {f"eval_{name}" for name in names} & first.keys()


def answers(*rewards: tuple[float, ...]) -> list[Judged]:
    """Answers to prompts 0, 1, ...: one to each prompt, judged by one function."""
    return [Judged(prompt, (each, each)) for prompt, own in enumerate(rewards) for each in own]


def test_the_lead_of_the_best_is_over_prompts_that_both_answered():
    seats = {name: Member(name, "student", place) for place, name in enumerate("abc")} | {"empty": None}
    nan = math.nan
    judged = {
        "a": answers((0.0, 0.0), (0.0, 0.0), (0.0, 0.0)),
        "b": answers((0.4, 0.6), (1.0, 1.0), (0.9, nan)),
        "c": answers((0.3, 0.3), (0.5, 0.7), (nan, nan)),
    }
    found = measure_evaluation(seats, judged, ["right"])
    assert (found["reward_best"], found["reward_worst"]) == (pytest.approx(0.78), 0.0)
    lead, margin = measure_mean([0.5 - 0.3, 1.0 - 0.6])
    assert (found["reward_lead"], found["reward_lead_margin"]) == (pytest.approx(lead), pytest.approx(margin))
    assert found["member/b/rewards/right"] == found["member/b/reward"] == pytest.approx(0.78)
    assert math.isnan(found["member/empty/reward"])

    one_prompt = {name: own[:1] for name, own in judged.items()}
    found = measure_evaluation(seats, one_prompt, ["right"])
    assert (found["reward_lead"], math.isnan(found["reward_lead_margin"])) == (pytest.approx(0.1), True)
    assert math.isnan(measure_evaluation(seats, {"b": judged["b"]}, ["right"])["reward_lead"]), "nobody to lead"
    assert math.isnan(measure_evaluation(seats, {}, ["right"])["reward_best"])


def test_each_function_has_its_own_mean_by_member_in_an_evaluation(random_base, tmp_path):
    def first(completion_ids, member, **columns):
        return [1.0 if name == "student_1" else 0.0 for name in member]

    trainer = build(random_base, tmp_path, [brief, first], reward_weights=[1.0, 0.5])
    found = trainer.evaluate()
    for name in trainer.population.names:
        of = {key: found[f"eval_member/{name}/{key}"] for key in ("reward", "rewards/brief", "rewards/first")}
        assert of["rewards/first"] == (name == "student_1")
        assert of["reward"] == pytest.approx(of["rewards/brief"] + 0.5 * of["rewards/first"])


@pytest.mark.parametrize(("bad", "lead"), [((-math.inf,), -0.75), ((math.inf, -math.inf), math.nan)])
def test_a_prompt_with_an_infinite_reward_does_not_count_in_the_lead(bad, lead):
    seats = {name: Member(name, "student", place) for place, name in enumerate("ab")}
    judged = {"a": answers((0.0,), (0.5,), (0.0,)), "b": answers(bad, (1.0,), (1.0,))}
    found = measure_evaluation(seats, judged, ["right"])
    assert found["reward_lead"] == pytest.approx(lead, nan_ok=True)


def test_a_reward_function_may_have_a_name_like_the_end_of_a_metric(random_base, tmp_path):
    names = ["reward", "code_runtime", "reward_best", "solve_rate_mean", "mu"]
    pays = [lambda completion_ids, **columns: [len(ids) / 10 for ids in completion_ids] for _ in names]
    for pay, name in zip(pays, names, strict=True):
        pay.__name__ = name
    steps = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1, "evolve_every": 0, "member_prompts": "own"}
    trainer = build(random_base, tmp_path, [*pays, brief], **steps)
    trainer.train()
    (entry,) = [each for each in trainer.state.log_history if "eval_runtime" in each]
    (line,) = format_evaluation(1, 1, entry)
    assert "rewards/" not in line
    assert sorted(list_rewards(entry, "eval_")) == trainer.population.names
    run = load_run(tmp_path)
    assert run.tables == ["eval/"]
    assert not run.rated, "members with prompts of their own have no ratings"
    for name in names:
        assert f"eval/member/student_0/rewards/{name}" in run.evaluations[-1]
    assert not [key for times in read_lines(tmp_path / "times.jsonl") for key in times if "rewards/" in key]


def test_a_figure_of_a_function_of_an_empty_seat_does_not_end_the_run(random_base, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "max_members": 5, "max_steps": 2, "evolve_every": 0}
    best = {"metric_for_best_model": "eval_member/student_4/rewards/brief", "greater_is_better": True}
    trainer = build(random_base, tmp_path, brief, **options, **best)
    trainer.train()
    assert trainer.state.best_metric is None
