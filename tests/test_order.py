"""A file of tests leaves nothing behind that another one stumbles over."""

import pytest
from accelerate import Accelerator
from accelerate.state import PartialState

from tests.conftest import forget_processes
from tests.vllm_models import ENGINE_ENVIRONMENT, colocate, make_population, make_served_base


def test_no_file_inherits_the_processes_of_another():
    Accelerator(cpu=True)
    PartialState._shared_state["num_processes"] = 2  # as a file with a colocated engine may leave it
    assert Accelerator(cpu=True).num_processes == 2
    forget_processes()
    assert Accelerator(cpu=True).num_processes == 1


@pytest.mark.vllm
@pytest.mark.slow
def test_no_file_inherits_the_engine_of_another(tmp_path, monkeypatch):
    """`populora train` ends the process group, and with it the groups of an engine that an earlier file colocated."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    for name, value in ENGINE_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    base = make_served_base(tmp_path / "base")
    alive = []  # as where a failed test, or vLLM itself, keeps an engine
    for run in ("first", "second"):
        alive.append(colocate(*make_population(base, 1), base, tmp_path / run))
        alive[-1].close()
        forget_processes()
        Accelerator(cpu=True).end_training()
