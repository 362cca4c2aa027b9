"""`teachers=0`: students train on the tasks that were given and on no others."""

from __future__ import annotations

import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from tests.countdown import GivenCountdown
from tests.games import G, make_game, play, solve_by_plan
from tests.small_run import small_args, small_trainer
from trl_populora.assets import real_seed_tasks
from trl_populora.hub.card import write_card
from trl_populora.population.members import Population
from trl_populora.population.ratings import Matchmaker
from trl_populora.report.load import load_run, load_samples
from trl_populora.report.page import write_report
from trl_populora.run.read import read_lines
from trl_populora.sandbox import Sandbox
from trl_populora.tasks import CodeF, Task, make_task
from trl_populora.tasks.dataset import read_given_tasks, read_held_out, read_tasks
from trl_populora.tasks.python.normal_form import normal_forms
from trl_populora.tasks.python.programs import parse_function


def tasks(count: int) -> list:
    return [make_task("code_o", f"def f(a):\n    return a * 10 + {n}", inputs=[(n,)]) for n in range(1, count + 1)]


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=1) as running:
        yield running


def play_steps(sandbox, steps: int = 1, count: int = 6, **settings):
    solve = lambda content, index: solve_by_plan(content, index % G)  # noqa: E731
    game = make_game(sandbox, tasks(count), None, solve, teachers=0, students=2, proposals=3, **settings)
    return game, [play(game, done) for done in range(steps)]


def test_every_student_attempts_the_same_tasks_and_nothing_is_proposed(sandbox):
    _, (played,) = play_steps(sandbox)
    assert {row.role for row in played.rows} == {"student"}
    met = {member: Counter(r.task_id for r in played.rows if r.member == member) for member in played.members}
    assert met["student_0"] == met["student_1"]
    assert set(met["student_0"].values()) == {G}
    assert len(met["student_0"]) == 3


def test_attempts_of_a_kind_that_says_nothing_more_have_a_reason_and_a_detail(sandbox):
    given = [Task("countdown", "3 4 5 -> 17", (), ())]
    answers = ["so", "3 + 4", "(3 + 4) * 5", "5 + 3 * 4"]
    solve = lambda _, index: answers[index % G]  # noqa: E731
    game = make_game(sandbox, given, None, solve, teachers=0, proposals=1, kinds=(GivenCountdown(),))
    rows = play(game, 0).rows
    assert [(row.reject_reason, row.reject_detail) for row in rows] == [
        ("format", "`parse_attempt` of countdown could not read it"),
        *[("", "")] * 3,
    ]
    assert [row.correct for row in rows] == [False, False, False, True]


def test_an_attempt_whose_program_fails_says_how(sandbox):
    given = [make_task("code_f", "def f(a):\n    return a + 1", inputs=[(1,), (2,), (3,), (4,)])]
    solve = lambda *_: "```python\ndef f(a):\n    return 1 / 0\n```"  # noqa: E731
    rows = play(make_game(sandbox, given, None, solve, teachers=0, proposals=1, kinds=(CodeF(4),)), 0).rows
    assert {row.reject_reason for row in rows} == {"error"}
    assert "ZeroDivisionError" in rows[0].reject_detail
    assert all(row.well_formed for row in rows)


def test_a_pass_has_each_task_once_and_the_next_one_another_order(sandbox):
    _, steps = play_steps(sandbox, steps=4)
    shown = [[r.task_id for r in played.rows if r.member == "student_0"][::G] for played in steps]
    first, second = shown[0] + shown[1], shown[2] + shown[3]
    assert len(set(first)) == 6
    assert sorted(first) == sorted(second)
    assert first != second


def test_without_shuffling_tasks_come_in_the_order_of_the_table(sandbox):
    game, steps = play_steps(sandbox, steps=2, shuffle=False)
    shown = [r.task_id for played in steps for r in played.rows if r.member == "student_0"][::G]
    assert shown == [task.task_id for task in game.archive]


def test_ranks_share_the_tasks_of_a_step(sandbox):
    told, both = [None, None], Barrier(2, timeout=60)

    def play_rank(rank: int):
        def gather(value):
            told[rank] = value
            both.wait()  # each has told its value
            found = [*told]
            both.wait()  # each has read both
            return found

        ranks = {"rank": rank, "world": 2, "gather": gather}
        game = make_game(sandbox, tasks(6), None, solve_by_plan, teachers=0, students=2, proposals=4, ranks=ranks)
        return play(game, 0)

    with ThreadPoolExecutor(2) as pool:
        played = list(pool.map(play_rank, range(2)))
    shares = [{row.task_id for row in each.rows} for each in played]
    assert [len(share) for share in shares] == [2, 2]
    assert not shares[0] & shares[1]
    assert played[0].metrics["solve/rate"] == played[1].metrics["solve/rate"], "of all tasks"


def test_solve_rates_are_told_and_what_teachers_do_is_not_known(sandbox):
    _, (played,) = play_steps(sandbox, count=3)
    assert played.metrics["solve/rate"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert played.metrics["solve/frac_none"] == played.metrics["solve/frac_all"] == pytest.approx(1 / 3)
    for key in ("propose/valid_rate", "solve/archive_rate", "population/teacher/mu_mean", "match/win_prob_mean"):
        assert played.metrics[key] != played.metrics[key], key


def test_students_are_rated_by_what_they_solve():
    population, matchmaker = Population(0, 2), Matchmaker()
    for _ in range(8):
        first, second = matchmaker.pair(population)
        matchmaker.update(population, {first: [1.0, 0.5, 1.0, 0.5], second: [0.5, 0.0, 0.5, 0.0]})
    better, worse = population.students
    assert better.mu > 25 > worse.mu
    assert better.age == worse.age == 8


@pytest.mark.parametrize(
    ("name", "value"),
    [("replay", 0.5), ("teacher_reward", "rarity"), ("teacher_baseline", "group"), ("teacher_learning_rate", 0.0)],
)
def test_what_needs_teachers_is_refused(name, value, tmp_path):
    with pytest.raises(ValueError, match=rf"`{name}={value}`.*`teachers=0`"):
        small_args(output_dir=str(tmp_path), teachers=0, **{name: value})


def test_a_step_has_the_attempts_alone(tmp_path):
    args = small_args(output_dir=str(tmp_path), teachers=0, students=3, proposals_per_teacher=4, attempts_per_task=2)
    assert args.rows_per_step == 3 * 4 * 2


@pytest.fixture(scope="module")
def run(random_base, tmp_path_factory):
    """Four steps with evolution, cut after three and resumed, on tasks of a kind that no teacher could propose."""
    path = str(tmp_path_factory.mktemp("curriculum") / "run")
    given = [make_task("code_f", f"def f(a):\n    return a + {n}", inputs=[(1,), (2,), (3,)]) for n in range(1, 6)]
    settings = {"output_dir": path, "teachers": 0, "students": 2, "task_kinds": ["code_f"], "evolve_every": 2}
    settings |= {"evolve_burn_in": 1, "save_strategy": "steps", "save_steps": 3, "per_device_train_batch_size": 4}
    settings |= {"reward_funcs": lambda completions, **_: [len(c[0]["content"]) / 100 for c in completions]}
    records = [task.to_record() for task in given]
    small_trainer(random_base, records, **settings | {"max_steps": 3}).train()
    trainer = small_trainer(random_base, records, **settings | {"max_steps": 4})
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
    return trainer


def test_a_run_trains_evolves_and_resumes(run):
    steps = [line for line in read_lines(f"{run.args.output_dir}/metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert run.population.names == ["student_0", "student_1"]
    assert [event["role"] for event in read_lines(f"{run.args.output_dir}/lineage.jsonl")] == ["student"]
    assert all(line["member/student_0/grad_norm"] > 0 for line in steps[-2:])


def test_students_that_do_not_learn_are_told(random_base, tmp_path, monkeypatch, caplog):
    """A random base writes no answer, so all attempts are worth the same."""
    monkeypatch.setattr("trl_populora.run.callbacks.STEPS", 2)
    given = [make_task("code_o", f"def f(a):\n    return a + {n}", inputs=[(1,)]).to_record() for n in range(4)]
    options = {"teachers": 0, "task_kinds": ["code_o"], "max_steps": 3, "per_device_train_batch_size": 4}
    small_trainer(random_base, given, output_dir=str(tmp_path), **options).train()
    assert any("so students do not learn" in line for line in caplog.messages)


def test_its_card_tells_of_no_teachers(run, tmp_path):
    shutil.copytree(run.args.output_dir, tmp_path / "run")
    write_card(tmp_path / "run", "me/curriculum")
    card = (tmp_path / "run" / "README.md").read_text()
    assert "2 students, LoRA adapters of rank 4" in card
    assert "eacher" not in card.partition("## Members")[0]
    assert "teachers=0, students=4, " in card
    assert "train_dataset=..." in card


def test_its_report_shows_what_there_is(run):
    path = run.args.output_dir
    assert load_run(path).members("teacher") == []
    (task, attempts), *_ = load_samples(path)
    assert len(attempts) == 2
    assert task["member"] == "given"
    page = write_report(path).read_text()
    assert "Proposal, reward" not in page
    assert page.count("was asked:") == len(load_samples(path))
    assert "student_1" in page
    assert "teacher_0" not in page


def test_the_packages_real_tasks_are_split_by_program(tmp_path):
    everything = read_tasks(real_seed_tasks())
    begun, held_out = read_given_tasks(None, "real", ["code_o", "code_i", "code_f"], "turns")
    assert len(begun) + len(held_out) == len(everything)
    forms = [{normal_forms(parse_function(each))[0] for each in table["program"]} for table in (begun, held_out)]
    assert not forms[0] & forms[1], "nobody trains on a held-out program, on no other input and in no other kind"
    assert (len(forms[1]), {*held_out["level"]}) == (70, {1, 2, 3})
    page = (Path(__file__).parents[1] / "docs" / "guides" / "evaluate.md").read_text()
    assert f"70 of the {len(forms[0] | forms[1])} [built-in programs]" in page
    assert f"of all three levels, with their {len(held_out)} tasks." in page
    _, two = read_given_tasks(None, "real", ["code_o", "code_i"], "turns")
    assert {*two["kind"]} == {"code_o", "code_i"}
    path = str(tmp_path / "mine.jsonl")
    begun.select([0]).to_json(path)
    assert [len(each) for each in read_given_tasks(path, "real", ["code_o", "code_i"], "turns")] == [1, len(two)]
    assert read_given_tasks(None, "tiny", ["code_o"], "compact")[0] is None


def test_the_embedded_bases_held_out_tasks_are_those_of_the_kinds_that_are_played():
    assert set(read_held_out("tiny", ["code_o", "own:Kind"])["kind"]) == {"code_o"}
    assert read_held_out("none", ["code_o"]) is None
    assert len(read_held_out("tiny", ["own:Kind"])) == len(read_held_out("tiny", ["code_o", "code_i", "code_f"]))
