"""Real but tiny things that tests share: a random two-layer base with its tokenizer, and trainer arguments for it."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
from pathlib import Path


gc.disable()  # a quarter of the time that the imports of all tests take; enabled when these are done
# Before torch is imported: models here are too small for two threads, and OpenMP pools that share cores fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# vLLM compiles a small function of its sampler in every process, for 20 s; what is tested does not depend on it.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import pytest  # noqa: E402


def pytest_collection_finish():
    look_at_vllms_models_here()
    leave_out_of_collections()
    gc.enable()


def look_at_vllms_models_here() -> None:
    """vLLM looks at a class of models in a process of its own, lest CUDA begin; that process imports vLLM for 10 s."""
    registry, torch = (sys.modules.get(name) for name in ("vllm.model_executor.models.registry", "torch"))
    if registry and torch and not torch.cuda.is_available():
        registry._run_in_subprocess = lambda look: look()


def leave_out_of_collections() -> None:
    """All that is there by now: every training collects once, through a million objects if it may."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _interruptible():
    """A shell that starts tests in the background has them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="module")
def _environment_is_given_back():
    """
    TRL sets RANK, MASTER_PORT and others for a colocated engine; later tests' child processes would inherit them.
    """
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True, scope="module")
def _processes_are_forgotten():
    """
    Accelerate remembers for good how many processes the first trainer saw, and a later file's would wait for them;
    vLLM remembers the groups of its first engine, which end with the process group.
    """
    yield
    forget_processes()
    leave_out_of_collections()  # what was imported since, too; vLLM lets everything in again


def forget_processes() -> None:
    """Makes Accelerate and vLLM look anew; nothing to do where no test of the file has used them."""
    groups = sys.modules.get("vllm.distributed.parallel_state")
    if groups and groups.model_parallel_is_initialized():
        groups.cleanup_dist_env_and_memory()
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def pytest_report_header():
    return "marked `gpu`: deselected where torch sees no CUDA device; POPULORA_GPU_TESTS_ON=cpu walks through them"


def leave_out_gpu(config, items) -> None:
    """Deselects what is marked `gpu` on a machine that has none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or os.environ.get("POPULORA_GPU_TESTS_ON"):
        return
    import torch

    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]


def pytest_collection_modifyitems(config, items):
    """
    The files with the longest tests first, so that workers end together (`make test` deals out whole files).

    `POPULORA_ORDER=7` shuffles the files with that seed instead: none may need another before or after it.
    """
    leave_out_gpu(config, items)
    if seed := os.environ.get("POPULORA_ORDER"):
        paths = sorted({item.path for item in items})
        random.Random(seed).shuffle(paths)
        items.sort(key=lambda item: paths.index(item.path))
        return
    first, long = (
        {item.path for item in items if any(map(item.get_closest_marker, markers))}
        for markers in (["early"], ["vllm", "multiprocess", "slow"])
    )
    items.sort(key=lambda item: (item.path not in first, item.path not in long))


@pytest.fixture(scope="session")
def random_base(tmp_path_factory) -> str:
    """Directory of a random two-layer Qwen3 (hidden 32) with a byte tokenizer; it speaks the compact style badly."""
    from tests.models import save_byte_base

    return save_byte_base(tmp_path_factory.mktemp("random_base"))


@pytest.fixture
def make_args(tmp_path):
    """Arguments of a small run: 2T+2S, 4 proposals, 2 attempts, 24 rows in 3 micro-batches, CPU, fp32, no logging."""
    from tests.small_run import small_args

    return lambda **overrides: small_args(**({"output_dir": str(tmp_path / "run")} | overrides))


@pytest.fixture
def lora():
    """Rank 4 on attention and MLP."""
    from tests.small_run import small_lora

    return small_lora()


@pytest.fixture
def two_plots(monkeypatch):
    """A report of two pictures, where the others are of no interest: all of them take seconds."""
    from trl_populora.report import plots

    monkeypatch.setattr(plots, "PLOTS", plots.PLOTS[:2])
    of_prompts = [plot for plot in plots.OVERVIEW if plot.sorts == ("prompts",)][:2]
    monkeypatch.setattr(plots, "OVERVIEW", [*plots.OVERVIEW[2:4], *of_prompts])


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """
    What `HF_ENDPOINT`, `HF_TOKEN` and `HF_HOME` in the environment would do, had the client not been imported yet.
    """
    import huggingface_hub
    import transformers

    from tests.hub_server import HubServer

    server = HubServer()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.setenv("HF_TOKEN", "hf_writer")
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", server.url)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
    yield server
    server.shutdown()


PROGRAMS = [  # program, argument tuples
    ("def f(a):\n    return a + 1", [(1,), (2,), (5,), (9,)]),
    ("def f(a, b):\n    return a * b", [(2, 3), (4, 5), (0, 7), (1, 1)]),
    ("def f(s):\n    return s[::-1]", [("hk",), ("qxz",), ("",), ("zz",)]),
    ("def f(x):\n    y = [v * 2 for v in x]\n    return sum(y)", [([1, 2],), ([],), ([5],), ([1, 1, 1],)]),
]


@pytest.fixture(scope="session")
def seed_tasks():
    """Twelve hand-written tasks, four of each kind; the truth is what Python says here."""
    from trl_populora.sandbox.values import encode
    from trl_populora.tasks.kind import Task

    tasks = []
    for program, arguments in PROGRAMS:
        scope: dict = {}
        exec(program, scope)
        inputs, outputs = [encode(a) for a in arguments], [encode(scope["f"](*a)) for a in arguments]
        for kind in ("code_o", "code_i"):
            tasks.append(Task(kind, program, tuple(inputs[:1]), tuple(outputs[:1])))
        tasks.append(Task("code_f", program, tuple(inputs), tuple(outputs), message="a small function", visible=2))
    return tasks


@pytest.fixture(scope="session")
def base(random_base, seed_tasks):
    """The random base with the tasks that `populora_run.make_trainer` reads."""
    Path(random_base, "tasks.json").write_text(json.dumps([task.to_record() for task in seed_tasks]))
    return random_base


@pytest.fixture(scope="session")
def finished(base, tmp_path_factory):
    """The directory of a run of four steps with births after the second; nobody writes into it."""
    from tests.populora_run import EVALUATED, make_trainer

    path = str(tmp_path_factory.mktemp("finished") / "run")
    trainer = make_trainer(base, path, EVALUATED | {"max_steps": 4, "evolve_every": 2, "save_strategy": "no"})
    trainer.train()
    trainer.save_model()
    return Path(path)


@pytest.fixture
def seed_dataset(seed_tasks):
    """The same as the table that a user would pass as `train_dataset`."""
    from datasets import Dataset

    return Dataset.from_list([task.to_record() for task in seed_tasks])
