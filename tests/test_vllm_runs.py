"""Whole runs with vLLM, started as a user starts them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


pytest.importorskip("vllm", reason="vLLM is not installed")

from trl_populora.loading import tiny_base_path

from .vllm_models import make_served_base
from .vllm_processes import finish, result_of, served, start_recipe, start_run


pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.multiprocess]

SMALL = {
    "config": "recipes/tiny/quickstart.yaml",
    "max_steps": 2,
    "proposals_per_teacher": 4,
    "attempts_per_task": 2,
    "per_device_train_batch_size": 12,
    "max_completion_length": 48,
    "evolve_every": 1,
    "evolve_burn_in": 1,
    "sandbox_workers": 1,
    "use_vllm": "true",
    "vllm_max_model_length": 1024,
}


def recipe_arguments(output_dir: Path, **settings) -> list[str]:
    settings = SMALL | {"output_dir": output_dir} | settings
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def check_run(code: int, output: str, directory: Path) -> None:
    assert code == 0, output[-3000:]
    history = json.loads((directory / "trainer_state.json").read_text())["log_history"]
    differences = [entry["sampling/sampling_logp_difference/mean"] for entry in history if "loss" in entry]
    print(f"mean sampling/trainer log-probability difference per step: {differences}")
    assert len(differences) == 2
    assert max(differences) < 1e-3
    assert len(list((directory / "members").iterdir())) == 4
    assert (directory / "lineage.jsonl").read_text().count("\n") >= 1


def shelves() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("populora-")}


def test_the_recipe_runs_colocated(tmp_path):
    before = shelves()
    engine = json.dumps({"enforce_eager": True})
    run = start_recipe(recipe_arguments(tmp_path / "run", vllm_engine_kwargs=engine), tmp_path / "log")
    check_run(*finish(run, tmp_path / "log"), tmp_path / "run")
    assert shelves() <= before


def test_the_recipe_runs_with_a_server(tmp_path):
    with served(tiny_base_path(), 4, tmp_path / "server.log", rank=16) as server:
        arguments = recipe_arguments(tmp_path / "run", vllm_mode="server", vllm_server_base_url=server.url)
        run = start_recipe(arguments, tmp_path / "log")
        check_run(*finish(run, tmp_path / "log"), tmp_path / "run")
        assert len(server.models()) == 1


def test_two_processes_with_an_engine_each_agree_and_sample_from_newborn_members(tmp_path):
    before = shelves()
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
    assert shelves() <= before
