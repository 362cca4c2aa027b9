"""Whole runs with colocated engines; `test_vllm_server.py` has those with a server, `test_recipes.py` a recipe's."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest


pytest.importorskip("vllm", reason="vLLM is not installed")

from .vllm_models import ENGINE_ENVIRONMENT, make_served_base
from .vllm_processes import finish, result_of, start_run
from .vllm_run import run


pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.multiprocess]


def left_shelves() -> set[str]:
    """Shelves in shared memory whose owner is gone; those of tests beside this one are locked."""
    left = set()
    for path in Path("/dev/shm").glob("populora-*/.lock"):
        with path.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.add(path.parent.name)
            except OSError:
                pass
    return left


def test_two_processes_with_an_engine_each_agree_and_sample_from_newborn_members(tmp_path):
    before = left_shelves()
    settings = {
        "base": make_served_base(tmp_path / "base"),
        "output_dir": str(tmp_path / "run"),
        "max_steps": 3,
        "save_strategy": "no",
        "evolve_every": 2,
        "evolve_burn_in": 0,
    }
    code, output = finish(start_run(settings, 2, tmp_path / "log"), tmp_path / "log")
    assert code == 0, output[-3000:]
    result = result_of(output)
    assert (result["steps"], result["world"]) == (3, 2)
    assert result["sums"][0] == result["sums"][1]
    assert max(result["logp_differences"]) < 1e-3
    print(f"newborns' log-probability differences to the child and to the member before it: {result['newborns']}")
    assert len(result["newborns"]) == 2 * 2, "a teacher and a student, on two ranks"
    for from_child, from_old in result["newborns"]:
        assert from_child < 1e-3
        assert from_old > 1e-2
    assert left_shelves() <= before


@pytest.fixture(scope="module")
def cramped(tmp_path_factory):
    """Runs with an engine in which six references never have room: a function of a run's steps."""
    root = tmp_path_factory.mktemp("cramped")
    base = make_served_base(root / "base")

    def in_this_process(name: str, steps: int, **settings) -> dict:
        settings |= {"base": base, "output_dir": str(root / name), "max_steps": steps}
        settings |= {"references_per_proposal": 6, "vllm_max_model_length": 320, "lr_scheduler_type": "constant"}
        return run(settings)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENGINE_ENVIRONMENT.items():
            patch.setenv(name, value)
        yield in_this_process


@pytest.fixture(scope="module")
def straight(cramped):
    return cramped("straight", 4, save_strategy="no")


def test_references_that_the_engine_has_no_room_for_are_dropped(straight):
    assert straight["steps"] == 4
    assert len(straight["dropped"]) == 4
    assert min(straight["dropped"]) > 0


def test_a_resumed_run_with_a_colocated_engine_equals_a_straight_one(cramped, straight):
    """The engine draws from torch's generator, which a checkpoint holds."""
    cramped("cut", 2, save_strategy="steps", save_steps=2)
    resumed = cramped("cut", 4, save_strategy="no", resume=True)
    assert resumed["sums"] == straight["sums"]
    assert resumed["logp_differences"] == straight["logp_differences"]
