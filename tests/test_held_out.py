"""Evaluation while training: what it says, that it changes nothing, and which tasks it refuses."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from statistics import stdev

import pytest
import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback

from tests import held_out_worker
from tests.games import Ranks
from tests.populora_run import EVALUATED, HELD_OUT, Letters, assert_equal, cut_run, make_trainer, state_of
from tests.vllm_models import ENGINE_ENVIRONMENT
from trl_populora.evaluate.held_out import HeldOut, Tried, attempt, compare_efforts, rate_efforts, scores
from trl_populora.lora.members import read_member
from trl_populora.population.members import Population
from trl_populora.report.load import load_evaluations, load_history
from trl_populora.run.read import read_lines
from trl_populora.sandbox import Sandbox
from trl_populora.sandbox.values import encode
from trl_populora.step.referee import Referee
from trl_populora.tasks.kind import Task


def evaluations(trainer) -> list[dict]:
    return [entry for entry in trainer.state.log_history if "eval_runtime" in entry]


class TestScores:
    def test_truth_table(self):
        """Two students, two tasks of two kinds, two attempts each."""
        tasks = [Task("code_o", "p", ("(1,)",), ("1",)), Task("code_i", "q", ("(1,)",), ("1",))]
        yes, no, worked = Tried(True, False, 3), Tried(False, False, 3), Tried(True, True, 9)
        found = scores({"a": [[yes, worked], [no, no]], "b": [[no, worked], [worked, worked]]}, tasks)
        assert found == {
            "a/solve_rate": 0.5,
            "a/thinking_rate": 0.25,
            "b/solve_rate": 0.75,
            "b/thinking_rate": 0.75,
            "solve_rate_mean": 0.625,
            "solve_rate_best": 0.75,
            "solve_rate_worst": 0.5,
            # By task .75 and .5, with two more of 0 and two of 1: Student's t of six values.
            "solve_rate_margin": pytest.approx(2.570582 * stdev([0.75, 0.5, 0, 0, 1, 1]) / 6**0.5, rel=1e-6),
            "mean_length": 6.0,
            "thinking_rate": 0.5,
            "code_o/solve_rate": 0.75,
            "code_i/solve_rate": 0.5,
            "pass_at_2": 0.75,
        }

    def test_the_order_of_a_dict_does_not_make_another_task(self):
        one, other = (
            Task("code_o", "def f(d):\n    return len(d)", (encode((pairs,), ordered=True),), ("2",))
            for pairs in ({"a": 1, "b": 2}, {"b": 2, "a": 1})
        )
        assert one.inputs != other.inputs
        assert other in HeldOut({"": [one]}, 1, None, 0)

    def test_code_i_with_the_same_output_asks_the_same(self):
        program = "def f(a, b):\n    return a * 10 + b * 10"
        one, other = (Task("code_i", program, (encode(pair),), ("50",)) for pair in ((2, 3), (4, 1)))
        held_out = HeldOut({"": [one]}, 1, None, 0)
        assert other in held_out
        assert Task("code_o", program, other.inputs, other.outputs) not in held_out, "its answer is not known from it"
        assert Task("code_i", program, (encode((4, 2)),), ("60",)) not in held_out

    @pytest.mark.parametrize("table", ["", "hard_"])
    def test_a_best_metric_that_has_no_value_yet_does_not_end_the_run(self, base, tmp_path, table):
        """Fewer than ten attempts of the base tell no gain at equal effort."""
        best = {"metric_for_best_model": f"{table}gain_equal_effort", "save_strategy": "best", "max_steps": 2}
        tasks = {"easy": HELD_OUT[3:5], "hard": HELD_OUT[1:3]} if table else HELD_OUT[1:3]
        held_out = {"evaluated": tasks, "eval_strategy": "steps", "eval_steps": 1, "eval_attempts": 2}
        trainer = make_trainer(base, str(tmp_path), held_out | best)
        trainer.train()
        assert f"eval_{table}gain_equal_effort" not in evaluations(trainer)[-1]
        assert trainer.state.best_metric is None

    def test_an_evaluation_of_other_tasks_is_none_of_the_runs_own(self, base, tmp_path):
        """The run's own is the one at its start."""
        held_out = {"evaluated": True, "eval_strategy": "no", "eval_on_start": True}
        trainer = make_trainer(base, str(tmp_path), held_out | {"eval_attempts": 1, "max_steps": 1})
        trainer.train()
        trainer.evaluate(Dataset.from_list(HELD_OUT[1:3]))
        assert [entry["step"] for entry in load_evaluations(tmp_path)] == [0]
        trainer.evaluate(Dataset.from_list(HELD_OUT))
        assert [entry["step"] for entry in load_evaluations(tmp_path)] == [0, 1]

    def test_best_student_is_by_held_out_rate_if_there_is_one(self):
        population = Population(1, 2)
        population["student_0"].mu = 40.0
        assert population.best_student({}) == ("student_0", "rating")
        rates = {"student_0@0": 0.2, "student_1@0": 0.5}
        assert population.best_student(rates) == ("student_1", "held-out solve rate")
        population["student_1"].version = 1  # whoever had that rate is gone
        assert population.best_student(rates) == ("student_0", "held-out solve rate")

    def test_equal_held_out_rates_are_no_choice_by_them(self):
        population = Population(1, 3)
        population["student_1"].mu, population["student_2"].mu = 30.0, 40.0
        rates = {"student_0@0": 0.5, "student_1@0": 0.5, "student_2@0": 0.2}
        assert population.best_student(rates) == (
            "student_1",
            "rating among those with the highest held-out solve rate",
        )


def answers(number: int, right: int, thinking: bool, length: int) -> list[Tried]:
    return [Tried(place < right, thinking, length) for place in range(number)]


class TestEffort:
    """Answers of like effort think likewise and have like lengths: 4 to 7 tokens, 8 to 15, 16 to 31, ..."""

    BASE = rate_efforts([*answers(90, 27, False, 5), *answers(10, 8, True, 100)])

    def compare(self, *parts: list[Tried]) -> tuple[float, float] | None:
        return compare_efforts(rate_efforts([each for part in parts for each in part]), self.BASE)

    def test_rates(self):
        assert self.BASE == {"plain 3": (90, 0.3), "thinks 7": (10, 0.8)}

    def test_equal_rates_at_each_effort_are_no_gain_however_often_they_think(self):
        assert self.compare(answers(20, 6, False, 7), answers(80, 64, True, 127)) == (pytest.approx(0), 1)

    def test_longer_answers_count_only_if_there_are_none_as_long(self):
        longer = answers(50, 50, True, 200)
        plain, alike = answers(20, 6, False, 7), answers(10, 5, True, 64)
        assert self.compare(plain, longer, alike) == (pytest.approx(0.1 * (0.5 - 0.8)), 1)
        assert self.compare(plain, longer, alike[1:]) == (pytest.approx(0.1 * (1 - 0.8)), 1)

    def test_answers_without_their_like_do_not_count(self):
        assert self.compare(answers(9, 9, False, 5), answers(90, 81, True, 100)) == (pytest.approx(0.1), 0.1)
        assert self.compare(answers(100, 50, False, 5)) == (pytest.approx(0.2), 0.9)
        assert self.compare(answers(9, 9, False, 5)) is None
        assert self.compare(answers(90, 90, False, 200), answers(90, 90, True, 5)) is None, "much longer, much shorter"

    def test_the_next_shorter_and_longer_answers_stand_in_together(self):
        assert self.compare(answers(10, 2, False, 3), answers(10, 8, False, 9)) == (pytest.approx(0.5 - 0.3), 0.9)


def by_hash(task: str, *sample) -> bool:
    """Of a question's first, second, ... sample, which depends on nothing else."""
    return zlib.crc32(repr((task, *sample)).encode()) % 2 == 0


def attempts_of(world: int, right, referee: Referee, *given) -> tuple[list[dict], set]:
    """What `attempt` returns on every rank, and how many rows they asked for in each call."""

    def say(prompt: str, *sample) -> str:
        task = prompt.removeprefix("solve ")
        return task if right(task, *sample) else "wrong: Z"

    ranks = Ranks(world, say)
    return ranks.run(lambda player: attempt(referee, player, *given)), ranks.parts


@pytest.fixture(scope="module")
def referee():
    with Sandbox(workers=1, allow_weak=True) as sandbox:
        yield Referee({"letters": Letters()}, sandbox, "compact", ())


class TestRanks:
    """13 tasks, the first posed twice, 3 attempts: 42 rows a member, which neither 4 ranks nor batches of 8 divide."""

    TASKS = [Task("letters", "", (), (), letter) for letter in "abcdefghijklm"]

    @pytest.mark.parametrize("batch", [None, 8, 64])
    @pytest.mark.parametrize("world", [1, 2, 3, 4, 50])
    def test_every_answer_is_graded_for_its_own_task(self, referee, world, batch):
        tasks = [*self.TASKS, self.TASKS[0]]
        told, parts = attempts_of(world, lambda *sample: True, referee, ["student_0"], tasks, 3, batch, 0)
        assert told == [{"student_0": [[Tried(True, False, 1)] * 3] * 14}] * world
        assert all(len(set(sizes)) == 1 for sizes in parts), "equal parts on all ranks"
        assert max(max(sizes) for sizes in parts) <= (batch or 42)

    @pytest.mark.parametrize("batch", [None, 8, 64])
    def test_the_outcome_does_not_depend_on_the_number_of_ranks(self, referee, batch):
        given = referee, ["student_0", "base"], [*self.TASKS, self.TASKS[0]], 3, batch, 7
        (alone,), _ = attempts_of(1, by_hash, *given)
        assert len({outcome.correct for group in alone["base"] for outcome in group}) == 2
        assert [alone[who][0] for who in alone] != [alone[who][13] for who in alone], "two tasks with one prompt"
        for world in (2, 3, 4):
            told, _ = attempts_of(world, by_hash, *given)
            assert told == [alone] * world


class TestWhileTraining:
    def test_a_measurement_of_earlier_weights_does_not_choose_the_best_student(self, base, tmp_path):
        trainer = make_trainer(base, str(tmp_path), EVALUATED | {"eval_strategy": "no", "max_steps": 1})
        trainer.train()
        trainer.save_model()
        saved = json.loads((tmp_path / "population.json").read_text())
        assert (saved["step"], saved["held_out_step"], saved["best_student_by"]) == (1, 0, "rating")
        rated = {member["name"]: member["mu"] for member in saved["members"] if member["role"] == "student"}
        assert saved["best_student"] == max(rated, key=rated.get)
        trainer.evaluate()
        saved = json.loads((tmp_path / "population.json").read_text())
        assert (saved["held_out_step"], saved["best_student_by"] != "rating") == (1, True)

    def test_rates_of_an_earlier_training_are_not_told_as_those_of_the_next(self, base, tmp_path):
        """Both end after one step, and the second is not measured."""
        settings = EVALUATED | {"eval_strategy": "no", "eval_on_start": False, "max_steps": 1, "learning_rate": 1e-2}
        trainer = make_trainer(base, str(tmp_path), settings)
        trainer.train()
        trainer.evaluate()
        told = trainer.describe()
        assert (told["held_out_step"], told["best_student_by"]) == (1, "held-out solve rate")
        trainer.train()
        trainer.save_model()
        saved = json.loads((tmp_path / "population.json").read_text())
        assert (saved["step"], saved["held_out_step"], saved["best_student_by"]) == (1, None, "rating")
        assert {member["held_out"] for member in saved["members"]} == {None}
        assert saved["held_out_base"] == told["held_out_base"], "the base is as it was"

    def test_reaches_log_files_bar_and_card_and_names_the_best_student(self, base, tmp_path, capsys):
        trainer = make_trainer(base, str(tmp_path), EVALUATED | {"max_steps": 4})
        trainer.train()
        trainer.save_model()
        told = evaluations(trainer)
        assert [entry["step"] for entry in told] == [0, 2, 4]
        assert told[0]["eval_solve_rate_worst"] == told[0]["eval_solve_rate_best"] == told[0]["eval_base/solve_rate"]
        for entry in told:
            rates = [entry[f"eval_student_{n}/solve_rate"] for n in (0, 1)]
            assert entry["eval_solve_rate_mean"] == pytest.approx(sum(rates) / 2)
            assert (entry["eval_solve_rate_best"], entry["eval_solve_rate_worst"]) == (max(rates), min(rates))
            assert entry["eval_code_o/solve_rate"] == 0
            assert 0 < entry["eval_letters/solve_rate"] < 1 or entry["step"] == 0
            assert entry["eval_pass_at_3"] >= entry["eval_solve_rate_mean"]
            assert entry["eval_base/solve_rate"] == told[0]["eval_base/solve_rate"]
            assert "eval_teacher_0/solve_rate" not in entry
        written = load_evaluations(tmp_path)
        assert [entry["step"] for entry in written] == [0, 2, 4]
        assert written[-1]["eval/solve_rate_mean"] == told[-1]["eval_solve_rate_mean"]
        assert len(load_history(tmp_path)) == 4
        assert "0/4 | held-out: solved" in capsys.readouterr().out
        saved = json.loads((tmp_path / "population.json").read_text())
        rates = {m["name"]: m["held_out"] for m in saved["members"] if m["role"] == "student"}
        assert saved["best_student"] == max(rates, key=rates.get)
        assert saved["best_student_by"] == "held-out solve rate"
        assert saved["held_out_base"] == told[0]["eval_base/solve_rate"]
        asked = saved["held_out_tasks"]
        assert (asked["tasks"], asked["attempts"], len(asked["digest"])) == (len(trainer.held_out.tables[""]), 3, 16)
        trainer.create_model_card()
        card = (tmp_path / "README.md").read_text()
        assert f"| {100 * max(rates.values()):.1f} | {100 * saved['held_out_base']:.1f} | {asked['tasks']} |" in card

    def test_looking_changes_nothing(self, base, tmp_path):
        """Weights, ratings, archive, matches and rollouts of a run with and without evaluation, bit for bit."""
        settings = {"max_steps": 6, "evolve_every": 3, "save_strategy": "no"}
        states = []
        for name, evaluated in (("with", EVALUATED), ("without", {})):
            trainer = make_trainer(base, str(tmp_path / name), settings | evaluated)
            trainer.train()
            state = state_of(trainer)
            game = json.loads(state["game"])
            game.pop("held_out", None)
            states.append({key: state[key] for key in ("members", "archive", "lineage", "rollouts")} | {"game": game})
        assert_equal(*states)

    def test_a_cut_run_with_evaluation_equals_a_straight_one(self, base, tmp_path):
        settings = EVALUATED | {"max_steps": 5}
        straight = make_trainer(base, str(tmp_path / "straight"), settings | {"save_strategy": "no"})
        straight.train()
        assert_equal(state_of(straight), state_of(cut_run(base, str(tmp_path / "cut"), settings, cut=3)))

    def test_tasks_that_a_run_has_trained_on_are_not_held_out_by_its_resume(self, base, tmp_path):
        settings = {"max_steps": 2, "save_steps": 1, "evolve_every": 0}
        trainer = make_trainer(base, str(tmp_path), settings | {"max_steps": 1})
        trainer.train()
        written = [task.to_record() for task in trainer.archive if task.author.startswith("teacher")][:2]
        resumed = make_trainer(base, str(tmp_path), settings | {"evaluated": written})
        before = read_lines(tmp_path / "metrics.jsonl")
        with pytest.raises(
            ValueError, match=r"checkpoint-1 has 2 of its \d+ archived tasks in common with `eval_data"
        ):
            resumed.train(resume_from_checkpoint=True)
        assert read_lines(tmp_path / "metrics.jsonl") == before

    def test_a_task_that_is_held_out_never_enters_the_archive(self, base, tmp_path):
        trainer = make_trainer(base, str(tmp_path), EVALUATED | {"max_steps": 1})
        held_out = Task("code_i", "def f(x):\n    return x - 1", (encode((7,)),), ("6",))
        assert held_out in trainer.game.referee.held_out, "another kind, other names: the same question"
        assert (
            Task("code_o", "def f(a):\n    return a - 1", (encode((8,)),), ("7",)) not in trainer.game.referee.held_out
        )
        trainer.close()


class TestBestModel:
    def test_the_best_checkpoint_is_kept_and_loaded_whole(self, base, tmp_path):
        settings = {
            "max_steps": 8,
            "save_strategy": "steps",
            "save_steps": 2,
            "save_total_limit": 1,
            "load_best_model_at_end": True,
            "metric_for_best_model": "solve_rate_mean",
        }
        trainer = make_trainer(base, str(tmp_path), EVALUATED | settings)
        trainer.train()
        told = {entry["step"]: entry["eval_solve_rate_mean"] for entry in evaluations(trainer) if entry["step"]}
        best = max(told, key=lambda step: (told[step], -step))
        assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
        assert Path(trainer.state.best_model_checkpoint).is_dir()
        rates = trainer.evaluate()
        assert rates["eval_solve_rate_mean"] == pytest.approx(told[best])

        checkpoint = Path(trainer.state.best_model_checkpoint)
        trainer.save_model()
        trainer.create_model_card()
        saved = json.loads((checkpoint / "population.json").read_text())
        assert [m.mu for m in trainer.population] == [member["mu"] for member in saved["members"]]
        assert (saved["step"], json.loads((tmp_path / "population.json").read_text())) == (best, saved)
        assert read_lines(checkpoint / "lineage.jsonl") == read_lines(tmp_path / "lineage.jsonl")
        for file in [checkpoint / "archive.parquet", *checkpoint.glob("members/*/*")]:
            assert file.read_bytes() == (tmp_path / file.relative_to(checkpoint)).read_bytes()
        card = (tmp_path / "README.md").read_text()
        assert f"after {best} steps of" in card

    def test_early_stopping_works(self, base, tmp_path):
        settings = {"max_steps": 40, "save_strategy": "no", "metric_for_best_model": "solve_rate_mean"}
        trainer = make_trainer(base, str(tmp_path), EVALUATED | settings | {"learning_rate": 0.0, "evolve_every": 0})
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
        trainer.train()
        assert trainer.state.global_step == 6, "members that do not move score the same each time"


class TestEvaluate:
    def test_by_hand_before_and_after_training_on_other_tasks_too(self, base, tmp_path):
        settings = {"max_steps": 1, "save_strategy": "no", "learning_rate": 0.0, "eval_attempts": 10}
        trainer = make_trainer(base, str(tmp_path), {"evaluated": True} | settings)
        before = trainer.evaluate()
        assert trainer.evaluate() | {"eval_runtime": 0} == before | {"eval_runtime": 0}
        asked = []
        generate = trainer.game.player.generate
        trainer.game.player.generate = lambda prompts, members, **k: (
            asked.extend(members) or generate(prompts, members, **k)
        )
        trainer.evaluate()
        assert set(asked) == {"base"}, "before their first update members are the base, and share its attempts"
        moved = {key: torch.full_like(value, 0.01) for key, value in read_member(trainer.model, "student_1").items()}
        trainer.replace_member("student_1", moved, step=0)
        trainer.evaluate()
        assert set(asked) == {"base", "student_1"}
        trainer.game.player.generate = generate
        trainer.train()
        letters, code = Dataset.from_list(HELD_OUT[1:]), Dataset.from_list(HELD_OUT[:1])
        found = trainer.evaluate({"letters": letters, "code": code}, metric_key_prefix="test")
        assert found["test_code_solve_rate_mean"] == 0
        assert found["test_letters_solve_rate_mean"] > 0
        assert trainer._closed

    def test_without_tasks(self, base, tmp_path):
        trainer = make_trainer(base, str(tmp_path), {"max_steps": 1})
        with pytest.raises(ValueError, match="`evaluate` needs tasks: give `eval_dataset`"):
            trainer.evaluate()
        trainer.close()


class TestBadInput:
    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            ([{"prompt": "Hello"}], "`eval_dataset` holds prompts"),
            ([HELD_OUT[0] | {"kind": "code_x"}], "`eval_dataset`, row 0: column `kind` is 'code_x', this run plays"),
            (
                [HELD_OUT[1], HELD_OUT[0] | {"outputs": ["8"]}],
                "row 1: column `outputs` holds '8', the program returns",
            ),
            ([HELD_OUT[0] | {"visible": 1}], "`eval_dataset` holds .* 1 of them `visible`: nothing is left to grade"),
            ([HELD_OUT[0] | {"program": "def f(a):\n    return a.b"}], "row 0: the program ends with `error`"),
            ([HELD_OUT[0] | {"outputs": ["six"]}], "column `outputs` holds 'six', which is no canonical text"),
        ],
    )
    def test_wrong_rows_are_named_before_training(self, make_args, random_base, lora, rows, message):
        from trl_populora.trainer import PopuLoRATrainer

        args = make_args(task_kinds=["tests.populora_run:Letters", "code_o"], sandbox_allow_weak=True)
        seeds = Dataset.from_list([HELD_OUT[1] | {"message": "zz"}])
        with pytest.raises(ValueError, match=message):
            PopuLoRATrainer(
                random_base, args=args, train_dataset=seeds, eval_dataset=Dataset.from_list(rows), peft_config=lora
            )

    def test_empty_and_no_table(self, make_args, random_base, lora):
        from trl_populora.trainer import PopuLoRATrainer

        empty = Dataset.from_dict({name: [] for name in HELD_OUT[0]})
        for wrong, error, message in (
            (empty, ValueError, "`eval_dataset` is empty"),
            ({}, ValueError, "`eval_dataset` is an empty dict"),
            ({"deep": [1]}, TypeError, r"`eval_dataset\['deep'\]` must be a `datasets.Dataset`"),
        ):
            with pytest.raises(error, match=message):
                PopuLoRATrainer(random_base, args=make_args(), eval_dataset=wrong, peft_config=lora)

    def test_seed_tasks_that_are_held_out(self, make_args, random_base, lora, seed_dataset):
        from trl_populora.trainer import PopuLoRATrainer

        with pytest.raises(ValueError, match="12 of the 12 tasks to start from ask what `eval_dataset` holds out"):
            PopuLoRATrainer(
                random_base, args=make_args(), train_dataset=seed_dataset, eval_dataset=seed_dataset, peft_config=lora
            )

    @pytest.mark.parametrize(
        "settings", [{"eval_strategy": "steps", "eval_steps": 2}, {"eval_steps": 2}, {"eval_on_start": True}]
    )
    def test_settings_without_tasks(self, make_args, random_base, lora, settings):
        from trl_populora.trainer import PopuLoRATrainer

        with pytest.raises(ValueError, match="needs held-out tasks: pass `eval_dataset="):
            PopuLoRATrainer(random_base, args=make_args(**settings), peft_config=lora)

    def test_two_names_for_the_number_of_attempts(self, make_args):
        with pytest.raises(ValueError, match="Set only `eval_attempts`"):
            make_args(num_generations_eval=2, eval_attempts=4)
        assert make_args(eval_attempts=3).num_generations_eval == 3


def test_state_survives_and_is_plain():
    tasks = [Task(**{key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}) for row in HELD_OUT]
    efforts = {"": rate_efforts(answers(10, 3, False, 5))}
    held_out = HeldOut({"": tasks}, 2, 8, 0, {"": {"base/solve_rate": 0.5}}, efforts, {"student_0@0": 0.25})
    other = HeldOut({"": tasks}, 2, 8, 0)
    other.load_state_dict(json.loads(json.dumps(held_out.state_dict())))
    assert (other.base, other.rates) == (held_out.base, held_out.rates)
    later = rate_efforts(answers(10, 8, False, 5))
    assert compare_efforts(later, other.efforts[""]) == compare_efforts(later, efforts[""]) == (pytest.approx(0.5), 1)
    assert other.base_rate == 0.5


def test_scores_on_other_tasks_are_not_taken_for_those_of_the_base(caplog):
    """A run may be resumed with another `eval_dataset`."""
    tasks = [Task(**{key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}) for row in HELD_OUT]
    known = {"": {"base/solve_rate": 0.5}, "hard": {"base/solve_rate": 0.1}}
    efforts = {"": {"plain 3": [90, 0.3]}, "hard": {"plain 4": [10, 1.0]}}
    state = HeldOut({"": tasks, "hard": tasks[:1]}, 2, 8, 0, known, efforts, {"student_0@0": 0.25}).state_dict()
    changed = HeldOut({"": tasks[1:], "hard": tasks[:1]}, 2, 8, 0)
    changed.load_state_dict(state)
    assert (changed.base, changed.rates, changed.base_rate) == ({"hard": known["hard"]}, {}, None)
    assert changed.efforts == {"hard": {"plain 4": [10, 1.0]}}
    (line,) = caplog.messages
    assert "held-out tasks are not those of the checkpoint" in line
    before = HeldOut({"": tasks, "hard": tasks[:1]}, 2, 8, 0)
    before.load_state_dict(state | {"efforts": {"": {"plain 3": 1.0}, "hard": {"plain 4": [10, 1.0]}}})
    assert before.base.keys() == before.efforts.keys() == {"hard"}, "0.2.0 saved no solve rates by effort"


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_and_transformers_agree_within_noise_and_vllm_repeats_itself(tmp_path, monkeypatch):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    for name, value in ENGINE_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    transformers, first, second = held_out_worker.vllm(str(tmp_path))
    assert first | {"eval_runtime": 0} == second | {"eval_runtime": 0}
    assert transformers["unmoved"]
    assert first["unmoved"]
    for key in ("base", "student_0", "student_1"):
        one, other = (told[f"eval_{key}/solve_rate"] for told in (transformers, first))
        # Two samples of 200 attempts each: four standard errors of their difference, widened by equal tasks.
        assert abs(one - other) < 4 * (2 * 0.25 / 200) ** 0.5, (key, one, other)
    assert first["eval_student_1/solve_rate"] < first["eval_student_0/solve_rate"]
