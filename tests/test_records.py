"""What a run writes down while it goes on; what becomes of it later is tested in `test_directory.py`."""

import json
import math
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from trl_populora.population.members import Population
from trl_populora.run.read import METRICS, TIMES, classify_log, read_lines
from trl_populora.run.records import Records, append_metrics, write_rollouts
from trl_populora.step.rows import Row


def test_an_evaluation_does_not_write_into_another_runs_records(tmp_path):
    for name in ("metrics.jsonl", "population.json"):
        (tmp_path / name).write_text('{"step": 7}\n')
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, log_history=[{"eval_runtime": 1.0, "step": 0}])
    Records(dict).on_log(SimpleNamespace(output_dir=str(tmp_path)), state, None, logs={"eval_runtime": 1.0})
    assert [entry["step"] for entry in read_lines(tmp_path / "metrics.jsonl")] == [7]
    assert json.loads((tmp_path / "population.json").read_text())["step"] == 7


def test_rollouts_tell_a_member_from_its_successor_and_its_opponent(tmp_path):
    population = Population(2, 1)
    population.replace("student_0", step=3, parents=(), operator="written", mu=25.0, sigma=8.0)
    rows = [
        Row(role, member, "code_o", match, prompt=[{"content": "?"}])
        for role, member, match in (
            ("student", "student_0", 0),
            ("student", "student_0", 1),
            ("teacher", "teacher_0", 0),
            ("teacher", "teacher_1", 1),
        )
    ]
    table = pq.read_table(write_rollouts(str(tmp_path), 4, (0, 1), population, rows, [0.0] * 4, [0.0] * 4)).to_pydict()
    assert table["version"] == [1, 1, 0, 0]
    assert table["opponent"] == ["teacher_0", "teacher_1", "student_0", "student_0"]


@pytest.mark.parametrize(
    ("logs", "sort"),
    [
        ({"loss": 0.1, "propose/valid_rate": 0.5}, "step"),
        ({"loss": 0.1}, "step"),  # the second step of `num_iterations=2`
        ({"propose/valid_rate": 0.5}, "step"),
        ({"loss": 0.1, "num_input_tokens_seen": 90, "train_runtime": 1.0}, "step"),
        ({"eval_solve_rate_mean": 0.5, "eval_runtime": 1.0}, "evaluation"),
        ({"eval/solve_rate_mean": 0.5}, "evaluation"),
        ({"eval_mine_runtime": 1.0}, "evaluation"),
        ({"train_runtime": 1.0, "train_loss": 0.1, "propose/valid_rate": 0.5}, None),
        ({"of_my_own": 1.0}, None),
        ({"eval_of_my_own": 1.0}, None),
        (None, None),
    ],
)
def test_a_log_says_what_it_is_about(logs, sort):
    assert classify_log(logs) == sort


def test_a_number_that_json_does_not_know_is_null(tmp_path):
    entry = {"step": 1, "grad_norm": math.nan, "loss": math.inf, "reward": 0.5, "step_time": math.nan}
    append_metrics(tmp_path, entry)
    assert json.loads((tmp_path / METRICS).read_text(), parse_constant=pytest.fail) == {
        "step": 1,
        "grad_norm": None,
        "loss": None,
        "reward": 0.5,
    }
    assert json.loads((tmp_path / TIMES).read_text(), parse_constant=pytest.fail) == {"step": 1, "step_time": None}


def test_a_run_begins_with_its_own_trainers_evaluations_alone(tmp_path):
    """Two trainers evaluate in one directory, and the second one trains there."""
    args = SimpleNamespace(output_dir=str(tmp_path))

    def evaluate(records, rate):
        entry = {"eval_solve_rate_mean": rate, "eval_runtime": 1.0, "step": 0}
        state = SimpleNamespace(is_world_process_zero=True, global_step=0, log_history=[entry])
        records.on_log(args, state, None, logs=entry)
        return state

    evaluate(Records(dict), 0.9)
    own = Records(dict)
    own.on_train_begin(args, evaluate(own, 0.2), None)
    evaluate(own, 0.3)  # `eval_on_start`
    assert [entry["eval/solve_rate_mean"] for entry in read_lines(tmp_path / METRICS)] == [0.2, 0.3]
    assert len(read_lines(tmp_path / TIMES)) == 2
    aside = read_lines(tmp_path / "_previous-1" / METRICS)
    assert [entry["eval/solve_rate_mean"] for entry in aside] == [0.9, 0.2]


def test_a_run_keeps_the_evaluation_that_its_trainer_made_before(tmp_path):
    args, records = SimpleNamespace(output_dir=str(tmp_path)), Records(dict)
    entry = {"eval_solve_rate_mean": 0.2, "step": 0}
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, log_history=[entry])
    records.on_log(args, state, None, logs=entry)
    records.on_train_begin(args, state, None)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    assert [entry["eval/solve_rate_mean"] for entry in read_lines(tmp_path / METRICS)] == [0.2]
