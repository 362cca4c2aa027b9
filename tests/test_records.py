"""What a run writes down while it goes on; taking it back at a resume is tested in `test_checkpoint.py`."""

import json
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from trl_populora.population.members import Population
from trl_populora.runs.checkpoint import find_newest
from trl_populora.runs.records import Records, read_lines, set_aside, sort_of, take_back, write_rollouts
from trl_populora.step.rows import Row


OLD = ["metrics.jsonl", "times.jsonl", "lineage.jsonl", "rollouts/step_00007-rank1.parquet", "archive.parquet"]
OLD += ["checkpoint-7/whole.json", "members/student_0/adapter_model.safetensors", "population.json", "run.png"]
OLD += ["tokenizer.json", "chat_template.jinja", "README.md"]
OLD += ["completions/completions_00007.parquet", "_evaluation/gsm8k/base-0/result.json"]
FOREIGN = ["notes.md", "runs/today/events", "checkpoints/mine", "completions/notes.md"]


@pytest.fixture
def used(tmp_path):
    """A directory with an earlier run of seven steps, and files of somebody else."""
    for name in (*OLD, *FOREIGN):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"step": 7, "files": {}}\n')
    return tmp_path


def files(root):
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def begin(root, step, main=True):
    records = Records(dict)
    state = SimpleNamespace(is_world_process_zero=main, global_step=step)
    records.on_train_begin(SimpleNamespace(output_dir=str(root), should_save=main), state, None)
    return records


def test_a_run_from_the_start_moves_an_earlier_one_aside_whole(used, caplog):
    begin(used, step=0)
    assert files(used) == {*FOREIGN, *(f"_previous-1/{name}" for name in OLD)}
    assert find_newest(str(used)) is None, "a later --resume would continue the earlier run"
    (line,) = caplog.messages
    assert f"{used} held an earlier run, which is in {used}/_previous-1 now" in line


@pytest.mark.parametrize(("step", "main"), [(3, True), (0, False)], ids=["resumed", "another rank"])
def test_nothing_moves_otherwise(used, step, main):
    begin(used, step, main)
    assert files(used) == {*OLD, *FOREIGN}


def test_every_earlier_run_is_kept(used):
    set_aside(used)
    (used / "metrics.jsonl").write_text('{"step": 2}\n')
    set_aside(used)
    assert (used / "_previous-1" / "metrics.jsonl").exists()
    assert (used / "_previous-2" / "metrics.jsonl").read_text() == '{"step": 2}\n'
    assert set_aside(used) is None


def test_what_came_after_a_checkpoint_is_taken_back(tmp_path):
    names = [
        "rollouts/step_{:05d}.parquet",
        "rollouts/step_{:05d}-rank1.parquet",
        "completions/completions_{:05d}.parquet",
    ]
    for path in [tmp_path / name.format(step) for name in names for step in (1, 7, 8, 12)]:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    take_back(tmp_path, 7, tmp_path / "none")
    assert files(tmp_path) >= {name.format(step) for name in names for step in (1, 7)}
    assert not files(tmp_path) & {name.format(step) for name in names for step in (8, 12)}
    assert not list(tmp_path.glob("_previous-*")), "they were never saved, and happen again"


def test_an_evaluation_before_training_belongs_to_the_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/solve_rate_mean": 0.5}\n')
    begin(tmp_path, step=0)
    assert files(tmp_path) == {"metrics.jsonl"}


def test_an_evaluation_does_not_write_into_another_runs_records(used):
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, log_history=[{"eval_runtime": 1.0, "step": 0}])
    Records(dict).on_log(SimpleNamespace(output_dir=str(used)), state, None, logs={"eval_runtime": 1.0})
    assert [entry["step"] for entry in read_lines(used / "metrics.jsonl")] == [7]
    assert json.loads((used / "population.json").read_text())["step"] == 7


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
    game = SimpleNamespace(population=population, player=SimpleNamespace(rank=0, world=1))
    table = pq.read_table(write_rollouts(str(tmp_path), 4, game, rows, [0.0] * 4, [0.0] * 4)).to_pydict()
    assert table["version"] == [1, 1, 0, 0]
    assert table["opponent"] == ["teacher_0", "teacher_1", "student_0", "student_0"]


@pytest.mark.parametrize(
    ("logs", "sort"),
    [
        ({"loss": 0.1, "propose/valid_rate": 0.5}, "step"),
        ({"loss": 0.1}, "step"),  # the second step of `num_iterations=2`
        ({"propose/valid_rate": 0.5}, "step"),
        ({"eval_solve_rate_mean": 0.5, "eval_runtime": 1.0}, "evaluation"),
        ({"eval/solve_rate_mean": 0.5}, "evaluation"),
        ({"eval_mine_runtime": 1.0}, "evaluation"),
        ({"train_runtime": 1.0, "train_loss": 0.1, "propose/valid_rate": 0.5}, None),
        ({"of_my_own": 1.0}, None),
        (None, None),
    ],
)
def test_a_log_says_what_it_is_about(logs, sort):
    assert sort_of(logs) == sort
