"""Games played one step ahead, with scripted players: what is played, dropped, raised, saved and refused."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections import Counter

import pytest

from tests.games import PROPOSALS, make_game, solve_by_plan
from trl_populora.sandbox import Limits, Sandbox
from trl_populora.step.ahead import PlayAhead
from trl_populora.step.player import Completion
from trl_populora.step.rollout import play_step


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, limits=Limits(wall_seconds=1.0)) as sandbox:
        yield sandbox


@pytest.fixture
def make_ahead(sandbox, seed_tasks):
    """A function of the adapters' published versions, the settings and the player."""
    made = []

    def make(versions=None, play_ahead=True, evolve_every=0, generate=None):
        game = make_game(sandbox, seed_tasks, lambda i: PROPOSALS[i], solve_by_plan, generate=generate)
        made.append(PlayAhead(game, lambda: versions or {}, play_ahead, evolve_every))
        return made[-1]

    yield make
    for ahead in made:
        ahead.close()


def test_a_game_ahead_is_the_game_that_would_have_been_played(make_ahead):
    ahead, plain = make_ahead(), make_ahead().game
    ahead.start(3, 10)
    ahead.wait()
    played, expected = ahead.play(3), play_step(plain, 3)
    assert played.rows == expected.rows
    assert played.metrics.pop("ahead/staleness") == 0
    assert played.metrics == pytest.approx(expected.metrics, nan_ok=True)
    assert ahead.game.population.state_dict() == plain.population.state_dict()
    assert list(ahead.game.archive.entries()) == list(plain.archive.entries())
    assert played.seconds.pop("hidden") == -sum(played.seconds.values()) < 0
    assert "hidden" not in expected.seconds


@pytest.mark.parametrize(
    ("settings", "done", "played"),
    [
        ({}, 4, True),
        ({}, 10, False),
        ({"evolve_every": 4}, 4, False),
        ({"evolve_every": 4}, 5, True),
        ({"play_ahead": False}, 4, False),
    ],
    ids=["played", "the run is over", "newborns play it", "after them", "off"],
)
def test_when_a_game_is_played_ahead(make_ahead, settings, done, played):
    ahead = make_ahead(**settings)
    ahead.start(done, max_steps=10)
    assert (ahead.state_dict() is not None) == played


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_a_game_whose_members_are_two_versions_behind_is_dropped(make_ahead, caplog, behind):
    versions = Counter(teacher_0=5, student_0=5)
    ahead = make_ahead(versions)
    ahead.start(1, 10)
    ahead.wait()
    rated = ahead.game.population.state_dict()
    versions["student_0"] += behind
    played = ahead.play(1)
    assert played.metrics["ahead/staleness"] == (behind if behind < 2 else 0)
    assert ("hidden" in played.seconds) == (behind < 2)
    assert ("rows of step 2, which were played ahead, are dropped" in caplog.text) == (behind == 2)
    assert (ahead.game.population.state_dict() == rated) == (behind < 2), "another game was played"


def test_a_dropped_game_is_played_anew(make_ahead, caplog):
    ahead = make_ahead()
    ahead.start(1, 10)
    ahead.drop("student_0@0 is replaced")
    assert ahead.state_dict() is None
    assert "student_0@0 is replaced" in caplog.text
    assert "hidden" not in ahead.play(1).seconds


def test_what_went_wrong_is_raised_by_the_one_who_waits_and_tells_where(make_ahead):
    def generate(prompts, members, seeds=None):
        raise ValueError("the server is away")

    ahead = make_ahead(generate=generate)
    ahead.start(1, 10)
    with pytest.raises(ValueError, match="the server is away") as error:
        ahead.wait()
    assert "in _propose" in "".join(traceback.format_tb(error.value.__traceback__))


class Slow:
    """A player that answers when it is told to."""

    def __init__(self):
        self.asked, self.go_on, self.calls = threading.Event(), threading.Event(), 0

    def generate(self, prompts, members, seeds=None):
        self.calls += 1
        self.asked.set()
        self.go_on.wait(60)
        return [Completion([1], [2], "nothing") for _ in prompts]


def test_a_closed_game_ends_with_the_answer_that_it_waits_for(make_ahead):
    slow = Slow()
    ahead = make_ahead(generate=slow.generate)
    ahead.start(1, 10)
    assert slow.asked.wait(60)
    threading.Timer(0.2, slow.go_on.set).start()
    ahead.close()
    assert slow.calls == 1, "students were never asked"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("play ahead")]
    assert ahead.state_dict() is None


def test_ctrl_c_breaks_the_waiting(make_ahead):
    slow = Slow()
    ahead = make_ahead(generate=slow.generate)
    try:
        ahead.start(1, 10)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            ahead.wait()
        assert time.monotonic() - start < 30
    finally:
        slow.go_on.set()
    ahead.close()
    assert slow.calls == 1


def test_a_saved_game_is_played_by_whom_it_is_loaded_into(make_ahead, caplog):
    versions = Counter(teacher_0=5, student_0=5)
    ahead, other, off = make_ahead(), make_ahead(versions), make_ahead(play_ahead=False)
    ahead.start(1, 10)
    state = ahead.state_dict()
    other.load_state_dict(state)
    versions.update(["teacher_0", "student_0"])  # published anew
    played, expected = other.play(1), ahead.play(1)
    assert (played.metrics.pop("ahead/staleness"), expected.metrics.pop("ahead/staleness")) == (1, 0)
    assert (played.rows, played.records, played.seconds) == (expected.rows, expected.records, expected.seconds)
    assert played.metrics == pytest.approx(expected.metrics, nan_ok=True)
    off.load_state_dict(state)
    assert "`play_ahead` is off now" in caplog.text
    assert off.state_dict() is None


SERVED = {"play_ahead": True, "use_vllm": True, "vllm_mode": "server"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"use_vllm": False}, "use_vllm=False"),
        ({"vllm_mode": "colocate"}, "vllm_mode='colocate'"),
        ({"num_iterations": 2}, "num_iterations=2"),
        ({"vllm_importance_sampling_correction": False}, "vllm_importance_sampling_correction=False"),
        ({"evolve_every": 1}, "evolve_every=1"),
    ],
)
def test_what_playing_ahead_does_not_go_with_is_refused_by_name(make_args, settings, named):
    assert make_args(**SERVED).play_ahead
    with pytest.raises(ValueError, match=f"`play_ahead=True` does not go with `.*{named}"):
        make_args(**(SERVED | settings))


def test_several_processes_do_not_play_ahead(make_args, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="`play_ahead=True` does not go with `2 processes`"):
        make_args(**SERVED, per_device_train_batch_size=4)
