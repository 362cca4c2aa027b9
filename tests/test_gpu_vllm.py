"""What only a GPU can show of vLLM: adapters under CUDA graphs, publishing into them, sleep, memory beside it.

Deselected where torch sees no CUDA device. `POPULORA_GPU_TESTS_ON=cpu` walks through what a CPU engine can do.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch


pytest.importorskip("vllm", reason="vLLM is not installed")

from accelerate import Accelerator
from transformers import AutoTokenizer

from tests.models import save_byte_base
from tests.vllm_models import ENGINE_ENVIRONMENT, logprobs_of, make_population, randomise
from trl_populora.generate.vllm import PopulationGeneration


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

ROOT = Path(__file__).parent.parent
GPU = os.environ.get("POPULORA_GPU_TESTS_ON", "cuda") == "cuda"
needs_card = pytest.mark.skipif(not GPU, reason="a CPU has no graphs, no sleeping engine and no memory of its own")
MEMBERS, SHARE = 8, 0.1
GIB = 2**30


class Served:
    """Members in fp32 on the CPU, which say what is true, and an engine that samples from them, in bf16 on a GPU."""

    def __init__(self, directory: Path):
        base = save_byte_base(directory / "base", width=128)  # heads of 64, which every attention kernel knows
        self.model, self.names, self.router = make_population(base, MEMBERS)
        self.generation = PopulationGeneration(
            self.model,
            members=self.names,
            router=self.router,
            output_dir=str(directory / "run"),
            engine_kwargs={} if GPU else {"enforce_eager": True},
            accelerator=Accelerator(mixed_precision="bf16") if GPU else Accelerator(cpu=True),
            processing_class=AutoTokenizer.from_pretrained(base),
            gpu_memory_utilization=SHARE,
            max_model_length=256,
            max_num_seqs=64,
            max_completion_length=16,
        )

    def publish(self, names, seed: int) -> None:
        for index, name in enumerate(names):
            randomise(self.model, name, seed=100 * seed + index)
        self.generation.sync_weights()

    def differences(self, seed: int) -> tuple[float, float]:
        """
        Means over all tokens of mixed rows: between the log-probabilities with which the engine sampled and those of
        the row's member, and between the former and those of the next member.
        """
        rng = random.Random(seed)
        rows = [*range(MEMBERS)] * 3
        rng.shuffle(rows)
        prompts = [[rng.randrange(256) for _ in range(rng.randint(20, 40))] for _ in rows]
        with self.router.route_to(rows):
            _, completions, logprobs, _ = self.generation.generate(prompts, None, 1)
        sampled = [token[0] for row in logprobs for token in row]
        means = []
        for shift in (0, 1):
            others = [(row + shift) % MEMBERS for row in rows]
            told = logprobs_of(self.model, self.router, others, prompts, completions)
            means.append(statistics.mean(abs(a - b) for a, b in zip(sampled, sum(told, []), strict=True)))
        print(f"mean log-probability difference to the member {means[0]:.4f}, to another {means[1]:.4f}")
        return means[0], means[1]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENGINE_ENVIRONMENT.items():
            patch.setenv(name, value)
        served = Served(tmp_path_factory.mktemp("served"))
        yield served
        served.generation.close()


@needs_card
def test_the_engine_runs_on_cuda_graphs(served):
    mode = served.generation.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    print(f"CUDA graphs: {mode}")
    assert mode.name != "NONE"


def test_mixed_rows_are_sampled_by_their_members_after_each_of_three_publishings(served):
    for seed in range(3):
        served.publish(served.names, seed)
        own, other = served.differences(seed)
        assert own < 0.1 * other


def test_a_member_that_is_published_alone_is_taken_up_and_the_others_stay(served):
    served.publish(served.names, 10)
    before = dict(served.generation.published)
    served.publish(["member_3"], 11)
    assert [name for name, adapter in before.items() if served.generation.published[name] != adapter] == ["member_3"]
    own, other = served.differences(11)
    assert own < 0.1 * other


def test_an_adapter_that_was_damaged_in_the_engine_is_found(served, monkeypatch):
    monkeypatch.setattr(served.generation, "enable_sleep_mode", True)  # only then checksums are taken
    served.publish(served.names, 20)
    llm, published = served.generation.llm, served.generation.published
    assert llm.find_damaged(published.values()) == []

    def damage(model) -> None:
        manager = model.lora_manager
        slot = manager.lora_index_to_id.index(published["member_5"].id)
        manager.modules["model.layers.1.mlp.down_proj"].lora_b_stacked[0][slot, 0, 7, 2] *= -1

    llm.apply_model(damage)
    assert llm.find_damaged(published.values()) == [published["member_5"]]


@needs_card
def test_the_card_does_not_fill_over_50_publishings(served):
    held = []
    for seed in range(50):
        served.publish([served.names[seed % MEMBERS]], 30 + seed)
        held.append(torch.cuda.memory_allocated())
    assert held[-1] - held[9] < 2**20


def run(**settings) -> dict:
    """A whole run with a colocated engine, in a process of its own."""
    # The engine of this process leaves these behind, and they would make the run a worker of it.
    left = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {key: value for key, value in os.environ.items() if key not in left}
    environment |= ENGINE_ENVIRONMENT | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    settings = {"vllm_gpu_memory_utilization": SHARE} | settings
    command = [sys.executable, "-m", "tests.gpu_run", json.dumps(settings)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(lines[-1].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def colocated() -> dict:
    return run()


def test_a_run_samples_as_it_trains(colocated):
    print(f"mean sampling/trainer log-probability difference per step: {colocated['logp_differences']}")
    assert len(colocated["logp_differences"]) == 4
    assert max(colocated["logp_differences"]) < 0.05


@needs_card
def test_a_colocated_engine_keeps_to_its_share_and_a_run_does_not_grow(colocated):
    print(f"GiB in the updates: {[round(size / GIB, 2) for size in colocated['updating']]}")
    assert max(colocated["updating"]) < SHARE * colocated["total"] + 4 * GIB
    assert colocated["after"][-1] - colocated["after"][1] < 2**20


@needs_card
def test_an_engine_sleeps_through_the_update_and_wakes_with_its_adapters(colocated):
    sleeping = run(vllm_enable_sleep_mode=True)
    print(
        f"GiB in the updates: {[round(size / GIB, 2) for size in sleeping['updating']]}, differences as above: ",
        end="",
    )
    print(sleeping["logp_differences"])
    assert max(sleeping["logp_differences"]) < 0.05
    assert max(sleeping["updating"]) < max(colocated["updating"]) - SHARE * colocated["total"] / 2
