"""The game itself, with scripted players in the place of models: real parsing, sandbox, rewards, ratings, metrics."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from tests.games import PROPOSALS, G, make_game, play, proposal, solve_by_plan
from trl_populora.population import ratings
from trl_populora.sandbox import Job, Limits, Sandbox
from trl_populora.sandbox.values import decode
from trl_populora.step.pay import Rules, choose_teacher_reward
from trl_populora.step.player import Completion
from trl_populora.step.referee import Written
from trl_populora.step.rows import Played, Row, in_a_line, student_reward, teacher_reward
from trl_populora.tasks import CodeF, CodeI, CodeO, Reject, Task
from trl_populora.tasks.kind import KindSettings, Refusal, measure_complexity


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, limits=Limits(cpu_seconds=1.0)) as sandbox:
        yield sandbox


@pytest.fixture
def played(sandbox, seed_tasks):
    game = make_game(sandbox, seed_tasks, lambda i: PROPOSALS[i], solve_by_plan)
    return game, play(game, 0)


def columns(rows: list[Row]) -> dict[str, list]:
    return {name: [getattr(row, name) for row in rows] for name in Row.COLUMNS}


def test_a_price_may_depend_on_the_program(sandbox, seed_tasks):
    game = make_game(sandbox, seed_tasks, lambda i: PROPOSALS[i], solve_by_plan)
    game.rules = Rules(teacher_reward=lambda outcome: float(len(outcome.program)))
    rows = play(game, 0).rows
    programs = {task.task_id: task.program for task in game.archive}
    assert all(row.program == programs.get(row.task_id, "") for row in rows), "of attempts, too"
    paid = [row.pay for row in rows if row.role == "teacher"]
    assert paid[:3] == [len(row.program) for row in rows if row.role == "teacher"][:3]
    assert min(paid[:3]) > paid[3] == 0.0, "the last one is no task"


class TestTruthTable:
    def test_proposals(self, played):
        rows = [row for row in played[1].rows if row.role == "teacher"]
        assert [row.valid for row in rows] == [True, True, True, False]
        assert [row.solve_rate for row in rows[:3]] == [1.0, 0.5, 0.0]
        assert rows[3].reject_reason == "error"
        assert "ZeroDivisionError" in rows[3].reject_detail
        assert teacher_reward(**columns(rows)) == [0.0, 0.5, 0.0, -1.0]

    def test_attempts(self, played):
        rows = [row for row in played[1].rows if row.role == "student"]
        rewards = student_reward(**columns(rows))
        assert rewards[0:4] == [1.0] * 4
        assert sorted(rewards[4:8]) == [-1.0, -0.5, 1.0, 1.0]
        assert rewards[8:12] == [-0.5] * 4
        assert [row.archived for row in rows] == [False] * 12 + [True] * 4, "the free slot went to an archived task"

    def test_rating_follows_the_same_outcomes(self, played):
        game, step = played
        share = (1.0 + 0.5 + 0.5 + 1.0) / 4  # solved by all, by half, by none (the floor), invalid
        assert game.matchmaker.metrics()["match/student_share_mean"] == pytest.approx(share)
        assert game.population["student_0"].mu > 25 > game.population["teacher_0"].mu

    def test_metrics_follow_the_same_outcomes(self, played):
        metrics = played[1].metrics
        assert metrics["propose/valid_rate"] == metrics["propose/code_o/valid_rate"] == 0.75
        assert metrics["verify/reject/error"] == 1
        assert sum(value for key, value in metrics.items() if key.startswith("verify/reject/")) == 1
        assert metrics["solve/rate"] == metrics["solve/code_o/rate"] == pytest.approx(6 / 12)
        assert metrics["solve/frac_all"] == metrics["solve/frac_none"] == pytest.approx(1 / 3)
        assert metrics["solve/well_formed"] == pytest.approx(1 - 1 / 16)
        assert metrics["solve/archive_rate"] == 0.0
        assert metrics["curriculum/lines"] == 2.0

    def test_valid_tasks_enter_the_archive_with_their_author(self, played, seed_tasks):
        game, _ = played
        fresh = [task for task in game.archive if task.author == "teacher_0"]
        assert len(fresh) == 3
        assert [decode(task.outputs[0]) for task in fresh] == [11, 22, 33]
        assert len(game.archive) == len(seed_tasks) + 3


def test_a_duplicate_is_invalid_and_never_reaches_a_student(sandbox, seed_tasks):
    same = "def f(a):\n    return a + 100"
    renamed = "def f(b):\n    # the same\n    return b + 100"
    game = make_game(sandbox, seed_tasks, lambda i: proposal(same if i % 2 else renamed, "5"), lambda c, i: "")
    rows = [row for row in play(game, 0).rows if row.role == "teacher"]
    assert [row.reject_reason for row in rows] == ["", "duplicate", "duplicate", "duplicate"]
    again = [row for row in play(game, 1).rows if row.role == "teacher"]
    assert {row.reject_reason for row in again} == {"duplicate"}, "also in a later step"


class TestPrinted:
    """With `teacher_reward: paper` all that parses, runs and is deterministic reaches students, and is paid by rho."""

    RULES = Rules(choose_teacher_reward("paper", -1.0, 0.0))
    ADD = "def f(a):\n    return a + 100"
    INPUTS = "```inputs\n{}\n```\n```message\n{}\n```"

    def make(self, sandbox, tasks, kind, texts, solve, **rules):
        kind.configure(KindSettings(prompt_style="turns", inputs_per_function=4, teacher_reward="paper"))
        return make_game(
            sandbox,
            tasks,
            lambda i: texts[i],
            solve,
            kinds=(kind,),
            proposals=len(texts),
            rules={"guarded": False} | rules,
        )

    def proposals(self, game):
        game.rules = self.RULES
        played = play(game, 0)
        return played, [row for row in played.rows if row.role == "teacher"]

    def test_duplicates_copies_and_lengths_are_tasks(self, sandbox, seed_tasks):
        long = f"def f(a):\n    return len({'x' * 3100!r}) + a"
        texts = [
            proposal(self.ADD, "5"),
            proposal("def f(b):\n    # the same\n    return b + 100", "5"),  # a duplicate
            proposal("def f(a):\n    return a", "105"),  # its input is its output
            proposal(long, "5"),  # a program of over 3000 characters
            proposal("def f(a):\n    return 'x' * 500", "5"),  # an output of over 400
            proposal("def f(a):\n    return len(a)", repr("y" * 500)),  # an input of over 400
        ]
        solve = lambda content, i: "```output\n105\n```"  # noqa: E731
        game = self.make(sandbox, seed_tasks, CodeO(), texts, solve)
        played, rows = self.proposals(game)
        assert [row.reject_reason for row in rows] == [""] * 6
        assert [row.solve_rate for row in rows] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
        assert teacher_reward(**columns(rows)) == [0.0] * 6
        assert played.metrics["propose/valid_rate"] == 1.0
        assert len(played.tasks) == 6
        held = [task.program for task in game.archive if task.author == "teacher_0"]
        assert len(held) == 5
        assert held[0] == self.ADD, "of two duplicates the archive keeps the first"

    def test_constant_outputs_equal_inputs_and_given_programs_are_tasks(self, sandbox, seed_tasks):
        tasks = [task for task in seed_tasks if "a + 1" in task.program]
        known = tasks[0]
        texts = [
            self.INPUTS.format("1\n1\n1\n1", "constant, and four times the same input"),
            self.INPUTS.format("1\n2\n3\n4", known.program),
            self.INPUTS.format("1\n2\n3\n4", "a\nhint\nof\nfour lines" + "." * 500),
        ]
        game = self.make(sandbox, tasks, CodeF(), texts, lambda c, i: f"```python\n{known.program}\n```")
        _, rows = self.proposals(game)
        assert [(row.reject_reason, row.solve_rate, row.pay) for row in rows] == [("", 1.0, 0.0)] * 3

    def test_luck_is_paid_and_only_what_nobody_solves_pays_nothing(self, sandbox, seed_tasks):
        texts = [proposal(f"def f(a):\n    return (a * 7 + {i}) % 2 == 0", "3") for i in range(2)]
        game = self.make(sandbox, seed_tasks, CodeO(), texts, lambda c, i: f"```output\n{i == 0}\n```")
        _, rows = self.proposals(game)
        assert [(row.chance, row.solve_rate, row.pay) for row in rows] == [(0.5, 0.75, 0.25), (0.5, 0.25, 0.75)]

    def test_what_can_be_put_to_nobody_pays_as_what_nobody_solves(self, sandbox, seed_tasks):
        held_out = CodeO().accept(*checked(sandbox, CodeO(), proposal(self.ADD, "5")))
        texts = [
            proposal(self.ADD, "5"),  # held out
            proposal("def f(a):\n    return '</think>'[a % 4]", "5"),  # a control text
            proposal("def f(a):\n    return '</think>'[a / 0]", "5"),  # likewise, and it does not run
            "I would rather not.",
        ]
        game = self.make(sandbox, seed_tasks, CodeO(), texts, lambda c, i: "", held_out=[held_out])
        _, rows = self.proposals(game)
        assert [row.reject_reason for row in rows] == ["held_out", "control_token", "error", "format"]
        assert [row.pay for row in rows] == [0.0, 0.0, -1.0, -1.0]


def checked(sandbox, kind, text):
    read = kind.parse_proposal(text, [])
    return read, sandbox.run([kind.check(read)])[0], random.Random(0)


def test_only_programs_that_nobody_has_written_count_as_novel(sandbox, seed_tasks):
    """Another input, other names and constants make a valid task, and dead code not even that."""
    written = [
        ("def f(a):\n    return [a, 5]", "1"),
        ("def f(a):\n    return [a, 5]", "2"),
        ("def f(b):\n    unused = 3\n    return [b, 7]", "1"),
        ("def f(a):\n    pass\n    return [a, 5]", "1"),
    ]
    game = make_game(sandbox, seed_tasks, lambda i: proposal(*written[i]), lambda c, i: "")
    played = play(game, 0)
    assert [row.reject_reason for row in played.rows if row.role == "teacher"] == ["", "", "", "duplicate"]
    assert played.metrics["propose/novel_rate"] == pytest.approx(1 / 3)
    game.player = make_game(sandbox, [], lambda i: proposal(written[1][0], str(i + 8)), lambda c, i: "").player
    assert play(game, 1).metrics["propose/novel_rate"] == 0.0
    game.player = make_game(sandbox, [], lambda i: "", lambda c, i: "").player
    assert math.isnan(play(game, 2).metrics["propose/novel_rate"])


def test_a_program_that_gives_two_answers_is_invalid(sandbox, seed_tasks):
    program = "def f(a):\n    return [x for x in {'hk', 'qx', 'zz', 'kq', 'xz'}]"
    game = make_game(sandbox, seed_tasks, lambda i: proposal(program, str(i)), lambda c, i: "")
    rows = [row for row in play(game, 0).rows if row.role == "teacher"]
    assert {row.reject_reason for row in rows} == {"nondeterministic"}


def test_code_i_is_graded_by_running_the_answer(sandbox, seed_tasks):
    def teach(i):
        return proposal(f"def f(a):\n    return abs(a) + {10 + i}", "-3")

    def solve(content, index):
        return ["```input\n3\n```", "```input\n-3\n```", "```input\n4\n```", "```input\n0) or (True\n```"][index]

    game = make_game(sandbox, seed_tasks, teach, solve, kinds=(CodeI(),))
    rows = [row for row in play(game, 0).rows if row.role == "student" and not row.archived]
    assert [row.correct for row in rows[:4]] == [True, True, False, False]
    assert [row.well_formed for row in rows[:4]] == [True, True, True, False]


def test_a_coin_earns_its_teacher_nothing(sandbox, seed_tasks):
    """A student that guesses meets a predicate in half of its attempts; that is no more than a task nobody solves."""
    coin = "def f(a):\n    return (a * 1103515245 + 12345 >> 16) % 2 == 0"
    game = make_game(
        sandbox,
        seed_tasks,
        lambda i: proposal(coin, str(i)),
        lambda content, i: f"```output\n{i % 2 == 0}\n```",
    )
    played = play(game, 0)
    rows = [row for row in played.rows if row.role == "teacher"]
    assert [(row.solve_rate, row.chance) for row in rows] == [(0.5, 0.5)] * 4
    assert teacher_reward(**columns(rows)) == [0.0] * 4
    assert game.matchmaker.metrics()["match/student_share_mean"] == 0.5
    assert played.metrics["solve/frac_chance"] == 1.0
    assert played.metrics["solve/frac_none"] == 0.0


EVENS, HALVES = "def f(a):\n    return [x for x in a if x % 2 == 0]", "def f(a):\n    return [x // 2 for x in a]"
FIRST = "def f(a, b):\n    return a"


@pytest.mark.parametrize(
    ("kind", "program", "given", "copied"),
    [
        (CodeI, EVENS, "[3, 4]", True),
        (CodeI, HALVES, "[3, 4]", False),
        (CodeI, FIRST, "1, 2", False),
        (CodeO, EVENS, "[4]", True),
        (CodeO, EVENS, "[3, 4]", False),
        (CodeO, FIRST, "1, 2", False),
    ],
)
@pytest.mark.parametrize("style", ["turns", "chat", "compact"])
def test_a_task_that_copying_solves_is_none(sandbox, seed_tasks, kind, program, given, copied, style):
    kind = kind()
    kind.configure(KindSettings(prompt_style=style))
    referee = make_game(sandbox, seed_tasks, None, None, kinds=(kind,)).referee
    (found,) = referee.judge([Written(kind.name, proposal(program, given))], random.Random(0))
    if copied and style != "compact":
        assert found == Refusal(Reject.COPIED, "the student can copy a right answer from the task")
    else:
        assert isinstance(found, Task)


def test_code_f_is_graded_by_what_the_program_does(sandbox, seed_tasks):
    inputs = "\n".join(str(n) for n in (1, 2, 3, 4))
    teach_text = f"```inputs\n{inputs}\n```\n```message\nwhat it does\n```"

    def solve(content, index):
        """The known programs of the seeds are told apart by their visible pairs; only one of them is written here."""
        return ["```python\ndef f(a):\n    return a + 1\n```", "```python\ndef f(a):\n    return 0\n```"][index % 2]

    tasks = [task for task in seed_tasks if "a + 1" in task.program]
    game = make_game(sandbox, tasks, lambda i: teach_text, solve, kinds=(CodeF(4),), proposals=1)
    rows = play(game, 0).rows
    attempts = [row for row in rows if row.role == "student"]
    assert [row.correct for row in attempts] == [True, False, True, False]
    assert "f(" in attempts[0].prompt[0]["content"]


class TestRanks:
    """Two ranks played one after the other; what one gathers, the other has said."""

    def play_together(self, sandbox, seed_tasks, teach, steps=1):
        import threading

        world, box, barrier = 2, [None, None], threading.Barrier(2, timeout=60)

        def gather_as(rank):
            def gather(value):
                box[rank] = value
                barrier.wait()
                both = list(box)
                barrier.wait()
                return both

            return gather

        games = [
            make_game(
                sandbox,
                seed_tasks,
                lambda i, rank=rank: teach(rank, i),
                solve_by_plan,
                teachers=2,
                students=2,
                ranks={"gather": gather_as(rank), "rank": rank, "world": world},
            )
            for rank in range(world)
        ]
        results: list = [None, None]

        def run(rank):
            results[rank] = [play(games[rank], step) for step in range(steps)]

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        return games, results

    def test_ranks_agree_on_everything_that_lasts(self, sandbox, seed_tasks):
        def teach(rank, i):
            return proposal(f"def f(a):\n    return a * {rank + 3} + {i % 3 + 1}", str(rank * 10 + i))

        games, results = self.play_together(sandbox, seed_tasks, teach, steps=2)
        assert games[0].population.state_dict() == games[1].population.state_dict()
        assert list(games[0].archive.entries()) == list(games[1].archive.entries())
        assert games[0].matchmaker.state_dict() == games[1].matchmaker.state_dict()
        for mine, theirs in zip(*results, strict=True):
            assert str(mine.metrics) == str(theirs.metrics)
            assert len(mine.rows) == len(theirs.rows) == 2 * 2 * (1 + G)

    def test_ranks_agree_whatever_a_users_own_functions_say_on_each(self, sandbox, seed_tasks, monkeypatch):
        """A weight of pairs and the features of a kind that differ from call to call."""
        draws = random.Random(0)
        monkeypatch.setattr(CodeO, "features", lambda self, task: (str(draws.random()),))
        monkeypatch.setattr(ratings, "choose_weight", lambda name, kappa: lambda student, teacher: draws.random())
        games, results = self.play_together(
            sandbox,
            seed_tasks,
            lambda rank, i: proposal(f"def f(a):\n    return a * {rank + 3} + {i + 3}", "6"),
            steps=8,
        )
        pairs = [[{(row.match, row.member) for row in played.rows} for played in of_rank] for of_rank in results]
        assert pairs[0] == pairs[1]
        assert games[0].population.state_dict() == games[1].population.state_dict()
        assert games[0].matchmaker.state_dict() == games[1].matchmaker.state_dict()
        assert games[0].features.state_dict() == games[1].features.state_dict()

    def test_a_task_proposed_on_both_ranks_counts_once(self, sandbox, seed_tasks):
        games, results = self.play_together(
            sandbox, seed_tasks, lambda rank, i: proposal("def f(a):\n    return a * 7", "6")
        )
        rejects = [[row.reject_reason for row in played[0].rows if row.role == "teacher"] for played in results]
        assert rejects == [["", "duplicate", "duplicate", "duplicate"], ["duplicate"] * 4]
        assert len(games[0].archive) == len(seed_tasks) + 1


class Own(CodeO):
    """A kind of somebody's own, with one run of its own making and measures of its own."""

    name = "own"
    measures = ("letters",)

    def check(self, proposal):
        return Job(proposal.program, proposal.inputs, runs=1)

    def complexity(self, task):
        return {"letters": float(len(task.program))}


def test_the_job_of_a_kind_is_run_as_it_is_and_its_measures_are_always_logged(sandbox, seed_tasks):
    own = Own()
    game = make_game(sandbox, seed_tasks, lambda i: PROPOSALS[0], solve_by_plan, kinds=(own,), proposals=1)
    game.archive.add(replace(seed_tasks[0], kind="own"))
    played = play(game, 0)
    assert [row.valid for row in played.rows if row.role == "teacher"] == [True]
    assert played.metrics["curriculum/letters"] > 0
    assert played.metrics["curriculum/letters"] in [
        note["letters"] for _, _, note in game.archive.entries() if "letters" in (note or {})
    ]
    assert math.isnan(play(game, 1).metrics["curriculum/letters"]), "a duplicate"


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("proposal_prompt", "text"),
        ("parse_proposal", "text"),
        ("check", "job"),
        ("accept", None),
        ("solving_prompt", None),
        ("parse_attempt", None),
        ("trial", "job"),
        ("identify_mistake", 3),
        ("correct", 0.5),
        ("correct", None),
        ("chance", None),
        ("guesses", None),
        ("complexity", None),
    ],
)
def test_a_wrong_answer_of_a_kind_names_kind_and_method(sandbox, seed_tasks, method, answer):
    class Odd(CodeO):
        name = "odd"

    setattr(Odd, method, lambda *_: answer)
    tasks = [replace(seed_tasks[0], kind="odd")]
    game = make_game(sandbox, tasks, lambda i: PROPOSALS[0], solve_by_plan, kinds=(Odd(),), proposals=1)
    with pytest.raises(TypeError, match=f"task kind 'odd': `{method}` must return .*, got {answer!r}"):
        play(game, 0)


@pytest.mark.parametrize("method", ["chance", "guesses", "copies", "complexity"])
def test_an_estimate_that_fails_is_told_once_and_ends_no_run(sandbox, seed_tasks, method, caplog):
    class Odd(CodeO):
        name = f"failing_{method}"

    def fail(*_):
        raise ZeroDivisionError("of the kind")

    setattr(Odd, method, fail)
    tasks = [replace(seed_tasks[0], kind=Odd.name)]
    game = make_game(sandbox, tasks, lambda i: PROPOSALS[i], solve_by_plan, kinds=(Odd(),))
    played = play(game, 0)
    teachers = [row for row in played.rows if row.role == "teacher"]
    assert [(row.valid, row.chance) for row in teachers] == [(True, 0.0)] * 3 + [(False, 0.0)]
    told = [record for record in caplog.records if f"`{method}` raised ZeroDivisionError" in record.getMessage()]
    assert len(told) == 1
    assert "of the kind" in str(told[0].exc_info[1])
    assert math.isnan(played.metrics["curriculum/lines"]) == (method == "complexity")


def test_a_task_of_another_kind_than_its_maker_is_refused(sandbox, seed_tasks):
    class Odd(CodeO):
        name = "odd"

        def accept(self, proposal, verdict, rng):
            return seed_tasks[0]

    game = make_game(sandbox, seed_tasks, lambda i: PROPOSALS[0], solve_by_plan, kinds=(CodeO(), Odd()), proposals=2)
    with pytest.raises(ValueError, match="task kind 'odd': `accept` must return tasks of its own kind, got 'code_o'"):
        play(game, 0)


@pytest.mark.parametrize(
    ("measures", "error"),
    [
        ({"depth": "deep"}, "task kind 'own': `complexity` must give numbers by name, got 'depth': 'deep'"),
        ({"step": 3.0}, "task kind 'own': `complexity` calls a measure 'step', which has a meaning already"),
        ({"entropy": 3.0}, "task kind 'own': `complexity` calls a measure 'entropy'"),
        ({"match": 3.0}, "task kind 'own': `complexity` calls a measure 'match', which has a meaning already"),
        ({"solve_rate": 3.0}, "task kind 'own': `complexity` calls a measure 'solve_rate', which has a meaning"),
        ({"loops/depth": 3.0}, "task kind 'own': `complexity` calls a measure 'loops/depth'; a name has letters"),
        ({"": 3.0}, "task kind 'own': `complexity` calls a measure ''; a name has letters"),
    ],
)
def test_a_measure_that_cannot_be_written_down_is_named(seed_tasks, measures, error):
    class Odd(Own):
        def complexity(self, task):
            return measures

    with pytest.raises((TypeError, ValueError), match=error):
        measure_complexity(Odd(), seed_tasks[0])


@pytest.mark.parametrize("iterations", [1, 3])
def test_kinds_take_turns_over_the_steps(sandbox, seed_tasks, iterations):
    kinds = (CodeO(), CodeI(), CodeF(4))
    game = make_game(sandbox, seed_tasks, lambda i: "", lambda c, i: "", kinds=kinds, iterations=iterations)
    steps = range(0, 3 * iterations, iterations)
    seen = [row.kind for step in steps for row in play(game, step).rows if row.role == "teacher"]
    assert {kind: seen.count(kind) for kind in set(seen)} == {"code_o": 4, "code_i": 4, "code_f": 4}


def test_an_empty_completion_counts_no_token_with_and_without_ends():
    rows = [Row("student", "student_0", "code_o", 0, "", completion=Completion([1], ids, "")) for ids in ([], [5, 2])]
    played = Played(rows, [])
    assert played.count_tokens() == [0, 2]
    assert played.count_tokens({2}) == [0, 2]
    assert played.count_tokens([7]) == [0, 0]


def test_the_step_decides_every_random_choice(sandbox, seed_tasks):
    plays = [play(make_game(sandbox, seed_tasks, lambda i: PROPOSALS[i], solve_by_plan), 5).rows for _ in range(2)]
    assert [row.prompt for row in plays[0]] == [row.prompt for row in plays[1]]


def test_the_rng_of_a_step_is_not_the_global_one(sandbox, seed_tasks):
    random.seed(1)
    expected = random.Random(1).random()
    play(make_game(sandbox, seed_tasks, lambda i: PROPOSALS[i], solve_by_plan), 0)
    assert random.random() == expected


def test_replays_count_for_neither_pay_nor_ratings(sandbox, seed_tasks):
    games = [
        make_game(sandbox, seed_tasks, lambda i: PROPOSALS[i], solve_by_plan, replays=replays) for replays in (0, 3)
    ]
    one, other = (play(game, 0) for game in games)
    paid = [[(row.pay, row.share) for row in step.rows if row.role == "teacher"] for step in (one, other)]
    assert paid[0] == paid[1]
    assert games[0].population.state_dict() == games[1].population.state_dict()
    assert len(other.rows) - len(one.rows) == 3 * G
    assert sum(row.archived for row in other.rows) == (1 + 3) * G, "one fills in for the invalid proposal"
    assert other.metrics["solve/rate"] == one.metrics["solve/rate"]


def test_a_sentence_that_quotes_a_model_stays_in_a_line():
    assert in_a_line("expected \x1b[2J\n'x'") == "expected  [2J 'x'"
    assert len(in_a_line("a" * 10_000)) == 300
