"""The server mode, for real: servers started by `recipes/serve.sh` on this machine, asked over HTTP."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch


pytest.importorskip("vllm", reason="vLLM is not installed")

from accelerate import Accelerator
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_populora import PopuLoRAConfig, PopuLoRATrainer
from trl_populora.generate.publish import StaleAdapterError
from trl_populora.generate.server import VLLMServerError
from trl_populora.generate.vllm import PopulationGeneration
from trl_populora.lora.members import read_member, write_member

from .prompt_runs import QUESTIONS, brief
from .recipe_runs import check_zero2, save_qwen
from .small_run import QUIET, small_lora
from .vllm_models import generate_on, largest_difference, logprobs_of, make_population, randomise
from .vllm_processes import end, finish, free_port, result_of, served, start_run


pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.early]
MEMBERS, SERVED = 4, 8


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return save_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def server(base, tmp_path_factory):
    """One server for all tests here, among them one that kills and restarts it; a recipe needs most of it."""
    with served(base, SERVED, tmp_path_factory.mktemp("server") / "log", rank=32, length=2048) as server:
        yield server


class Client:
    """A population and its client."""

    def __init__(self, base: str, directory: Path, url: str, members: int = MEMBERS, rank: int = 4, **settings):
        self.model, self.names, self.router = make_population(base, members, rank)
        self.generation = PopulationGeneration(
            self.model,
            members=self.names,
            router=self.router,
            output_dir=str(directory),
            accelerator=Accelerator(cpu=True),
            processing_class=AutoTokenizer.from_pretrained(base),
            mode="server",
            server_base_url=url,
            max_completion_length=12,
            **settings,
        )

    def publish_all(self, seed: int) -> None:
        for index, name in enumerate(self.names):
            randomise(self.model, name, seed=100 * seed + index)
        self.generation.sync_weights()

    def generate(self, rows, prompts):
        with self.router.route_to(rows):
            _, completions, logprobs, _ = self.generation.generate(prompts, None, 1)
        return completions, [[token[0] for token in row] for row in logprobs]


@pytest.fixture
def client(base, server, tmp_path):
    client = Client(base, tmp_path, server.url)
    yield client
    client.generation.close()


def test_mixed_rows_have_the_logprobs_of_their_members(client, server):
    rng = random.Random(0)
    temperatures = [0.5 + 0.25 * member for member in range(MEMBERS)]
    for publishing in range(2):
        client.publish_all(publishing)
        client.generation.temperatures = temperatures if publishing else ()  # at first TRL's, which is 1
        rows = [*range(MEMBERS)] * 4
        rng.shuffle(rows)
        prompts = [[rng.randrange(256) for _ in range(rng.randint(2, 9))] for _ in rows]
        prompts[1], rows[1] = prompts[0], rows[0]  # merged into one request
        completions, logprobs = client.generate(rows, prompts)
        scale = torch.tensor([temperatures[row] if publishing else 1.0 for row in rows])[:, None, None]
        expected = logprobs_of(client.model, client.router, rows, prompts, completions, scale)
        assert largest_difference(logprobs, expected) < 1e-3
        assert sorted(server.models()[1:]) == sorted(a.name for a in client.generation.published.values())
    root = client.generation._shelf.root
    client.generation.close()
    assert len(server.models()) == 1
    assert not root.exists()


def test_rows_that_join_while_others_run_have_the_logprobs_of_their_members(client, monkeypatch):
    client.publish_all(3)
    stops = {"stop_token_ids": [*range(0, 256, 4)]}  # so that completions end at different times
    monkeypatch.setattr(client.generation, "generation_kwargs", stops)
    begin = [[7, 8, number] for number in range(3 * MEMBERS)]
    for _ in range(10):  # on a busy machine all may have ended before the first is told
        rows, prompts, completions, logprobs, told = generate_on(client, [*range(MEMBERS)] * 3, begin, MEMBERS)
        assert sum(told) == 3 * MEMBERS
        if len(told) > 1:
            break
    assert len(told) > 1
    assert len(completions) == len(prompts) == len(rows) == 3 * 3 * MEMBERS
    assert largest_difference(logprobs, logprobs_of(client.model, client.router, rows, prompts, completions)) < 1e-3


def test_more_requests_than_the_session_keeps_connections_by_default_are_all_kept(client, caplog):
    client.publish_all(3)
    rows, prompts = [*range(MEMBERS)] * 25, [[7, 8, number] for number in range(25 * MEMBERS)]
    client.generation.follow = lambda ended: ([], [])
    completions, _ = client.generate(rows, prompts)
    assert len(completions) == len(prompts) > 64
    assert "Connection pool is full" not in caplog.text


def test_publishing_one_member_changes_its_outputs_and_no_others(client):
    client.generation.temperature = 0.0
    client.publish_all(5)
    rows, prompts = [*range(MEMBERS)] * 2, [p for p in ([1, 2, 3], [7, 8]) for _ in range(MEMBERS)]
    before, _ = client.generate(rows, prompts)
    randomise(client.model, "member_1", seed=77)
    client.generation.sync_weights()
    after, _ = client.generate(rows, prompts)
    for row, *texts in zip(rows, before, after, strict=True):
        assert (texts[0] == texts[1]) == (row != 1)


def test_a_published_directory_is_what_stock_peft_loads(client, base):
    """Fp32 masters travel unrounded."""
    client.publish_all(6)
    published, ids = client.generation.published["member_2"], torch.tensor([[1, 2, 3, 4]])
    saved, live = load_file(Path(published.path, "adapter_model.safetensors")), read_member(client.model, "member_2")
    assert saved.keys() == live.keys()
    assert all(torch.equal(saved[key], live[key]) for key in live)
    with torch.no_grad(), client.router.route_to([2]):
        expected = client.model(ids).logits
    stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), published.path)
    with torch.no_grad():
        assert torch.allclose(stock(ids).logits, expected, atol=1e-5)


def test_replaced_directories_go_one_version_late(client):
    paths = []
    for seed in (10, 11, 12):
        client.publish_all(seed)
        paths.append(Path(client.generation.published["member_1"].path))
        assert str(paths[-1]).startswith("/dev/shm/")
        assert [path.is_dir() for path in paths] == [len(paths) - i <= 2 for i in range(len(paths))]


def test_a_server_that_answers_as_before_is_found_stale(client, server):
    client.publish_all(13)
    (lora_server,) = client.generation.vllm_client.servers
    former, load = client.generation.published["member_2"], lora_server.load
    # The server reads the former version under the name of the next.
    lora_server.load = lambda adapter: load(replace(adapter, path=former.path))
    randomise(client.model, "member_2", seed=1400)
    for _ in range(2):  # what failed is neither remembered nor left on the server
        with pytest.raises(StaleAdapterError, match=rf"{server.url} .* from 'member_2-.*', .* 'member_2'"):
            client.generation.sync_weights()
        assert len(server.models()) == 1 + MEMBERS

    for error in (OSError("The server is away."), KeyboardInterrupt("The server is away.")):

        def fail(adapter, error=error):
            raise error

        lora_server.load = fail
        with pytest.raises(type(error), match="away"):
            client.generation.sync_weights()
    lora_server.load = load
    client.generation.sync_weights()
    shelf, published = client.generation._shelf.root, client.generation.published.values()
    assert {Path(adapter.path) for adapter in published} < (kept := set(shelf.glob("[!.]*")))
    assert len(kept) == 2 * MEMBERS, "each version and the one before it, and none that failed"


def creep(client) -> int:
    """Moves a member by a step at an ordinary rate and publishes it, twenty times; the step that was found stale."""
    for step in range(1, 21):
        moved = {key: value + 1e-5 for key, value in read_member(client.model, "member_2").items()}
        write_member(client.model, "member_2", moved)
        try:
            client.generation.sync_weights()
        except StaleAdapterError:
            return step
    return 0


def test_a_member_that_never_arrives_is_found_when_small_steps_add_up(client, tmp_path):
    client.publish_all(14)
    assert creep(client) == 0
    (lora_server,) = client.generation.vllm_client.servers
    kept = shutil.copytree(client.generation.published["member_2"].path, tmp_path / "kept")
    load = lora_server.load
    lora_server.load = lambda adapter: load(replace(adapter, path=str(kept)))
    assert 9 < creep(client) < 12, "above 1e-4 in all"


def test_a_server_that_knows_the_modules_by_other_names_is_refused(client, server, monkeypatch):
    """vLLM loads such an adapter and ignores its weights, as for the text part of a larger model."""
    read = client.generation._read_factors

    def read_nested(name):
        return {key.replace(".layers.", ".language_model.layers."): value for key, value in read(name).items()}

    monkeypatch.setattr(client.generation, "_read_factors", read_nested)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{server.url} ignores .* q_proj, .*down_proj.*target_modules"):
            client.generation.sync_weights()
    assert len(server.models()) == 1


def test_a_server_that_serves_other_modules_than_the_members_have_is_refused_by_their_names(
    base, tmp_path, monkeypatch
):
    flags = ["--lora-target-modules", "down_proj", "q_proj"]
    with served(base, MEMBERS, tmp_path / "log", 8, 256, *flags) as server:
        others = "gate_proj, k_proj, o_proj, up_proj, v_proj"
        with pytest.raises(ValueError, match=f"for down_proj, q_proj alone, .* in {others}. .*--lora-target-modules"):
            Client(base, tmp_path, server.url)
        # Whatever a server says of itself, its answers are looked at.
        monkeypatch.setattr("trl_populora.generate.server.LoRAServer.check_serves", lambda *arguments: None)
        client = Client(base, tmp_path, server.url)
        with pytest.raises(ValueError, match=f"{server.url} ignores .* gate_proj"):
            client.generation.sync_weights()
        client.generation.close()


def test_a_member_that_did_not_move_may_answer_as_before(client):
    client.publish_all(15)
    former = dict(client.generation.published)
    client.generation._detector.forget()
    client.generation.sync_weights()
    assert not set(former.values()) & set(client.generation.published.values())


@pytest.mark.parametrize(("members", "rank"), [(SERVED + 1, 4), (MEMBERS, 64)])
def test_a_server_that_cannot_hold_the_population_is_refused(base, server, tmp_path, members, rank):
    with pytest.raises(ValueError, match=f"--max-loras {members} .*--max-lora-rank {max(rank, 8)}"):
        Client(base, tmp_path, server.url, members, rank)


def test_a_path_that_the_server_does_not_see_is_named(client, tmp_path):
    client.publish_all(8)
    adapter = client.generation.published["member_0"]
    lost = type(adapter)("member_0", "lost", 999, str(tmp_path / "lost"))
    with pytest.raises(VLLMServerError, match=rf"127.0.0.1.*{tmp_path}.*vllm_adapter_dir"):
        client.generation.vllm_client.load(lost)


def test_after_a_refused_request_the_adapters_are_still_taken_off_the_server(client, server):
    before = server.models()
    client.publish_all(8)
    with pytest.raises(VLLMServerError, match="refused"):
        client.generate([0], [[1] * 5000])
    client.generation.close()
    assert server.models() == before


def test_an_evaluation_after_training_leaves_no_adapters_on_the_server(base, server, tmp_path):
    sizes = {"students": 2, "max_steps": 1, "max_completion_length": 4, "num_generations": 2}
    sizes |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    given = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url}
    args = PopuLoRAConfig(str(tmp_path), **(QUIET | sizes | given))
    trainer = PopuLoRATrainer(base, brief, args, QUESTIONS, QUESTIONS.select(range(2)), peft_config=small_lora())
    before = server.models()
    trainer.train()
    assert "eval_reward" in trainer.evaluate()
    assert server.models() == before


def test_a_stuck_server_is_given_up_after_the_time_limit_and_not_asked_again(base, server, tmp_path, caplog):
    client = Client(base, tmp_path, server.url, request_timeout=4.0)
    client.publish_all(9)
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        start = time.monotonic()
        with pytest.raises(VLLMServerError, match=rf"{server.url} did not answer within 4 seconds"):
            client.generate([0], [[1, 2]])
        assert time.monotonic() - start < 30
        client.generation.close()
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    assert "were left on the server" not in caplog.text  # what `close` says after it waited in vain


def test_an_absent_server_is_named(base, tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(VLLMServerError, match=rf"{url} .*serve.sh"):
        Client(base, tmp_path, url, server_timeout=1.0)


@pytest.mark.multiprocess
def test_an_evaluation_has_the_same_figures_on_any_number_of_ranks_with_a_server_and_with_engines(
    base, server, tmp_path
):
    modes = [{"vllm_mode": "server", "vllm_server_base_url": server.url}, {"vllm_mode": "colocate"}]
    sizes = {"max_completion_length": 8, "per_device_train_batch_size": 2}
    settings = {"base": base, "output_dir": str(tmp_path / "run"), "evaluate": modes} | sizes
    told = []
    for world in (1, 4):
        log = tmp_path / f"log-{world}"
        code, output = finish(start_run(settings, world, log), log)
        assert code == 0, output[-3000:]
        served, colocated = result_of(output)["evaluated"]
        assert served["world"] == colocated["world"] == world
        told += served["figures"] + colocated["figures"]
        assert colocated["refused"] == [""] * world, "an engine of one's own may be asked for any number"
        if world > 1:
            counts = ", ".join(map(str, range(1, world + 1)))
            assert all(f"equally many rows, got {counts} rows (in rank order)" in said for said in served["refused"])
            rows = [rank for rank in range(world) for _ in range(2)]
            seeds = [10 * rank + row for rank in range(world) for row in range(2)]
            assert colocated["together"] == [[rows, seeds]] * world, "an engine over several ranks is asked alike"
    print(told[0])
    assert all(figures == told[0] for figures in told)
    assert 0 < told[0]["eval_student_0/solve_rate"] != told[0]["eval_student_1/solve_rate"]


@pytest.mark.multiprocess
def test_the_recipe_of_two_nodes_runs_as_two_zero2_processes(base, server, tmp_path):
    before, shelf = server.models(), tmp_path / "shelf"  # a client that gave up on it has left adapters
    server_mode = {"use_vllm": "true", "vllm_server_base_url": server.url, "vllm_adapter_dir": shelf}
    check_zero2("Qwen2.5-Coder-7B/config_4t4s_two_nodes.yaml", tmp_path, model_name_or_path=base, **server_mode)
    assert server.models() == before, "adapters are unloaded at the end"
    assert list(shelf.iterdir()) == []


@pytest.mark.multiprocess
def test_a_killed_server_ends_the_run_of_two_processes_and_after_a_restart_it_resumes(base, server, tmp_path):
    settings = {
        "base": base,
        "output_dir": str(tmp_path / "run"),
        "vllm_mode": "server",
        "vllm_server_base_url": server.url,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 200,
    }
    run = start_run(settings, 2, tmp_path / "run.log")
    try:
        while run.poll() is None and not (tmp_path / "run" / "checkpoint-2").exists():
            time.sleep(0.05)
        end(server.process)
        code, output = finish(run, tmp_path / "run.log")
    finally:
        end(run)
        server.start()
    last = max(int(path.name.split("-")[1]) for path in (tmp_path / "run").glob("checkpoint-*"))
    assert code != 0, output[-3000:]
    assert f"The vLLM server at {server.url}" in output, output[-3000:]
    assert f"resume from the last checkpoint, {tmp_path / 'run' / f'checkpoint-{last}'}" in output

    server.wait()
    run = start_run(settings | {"resume": True, "max_steps": last + 2}, 2, tmp_path / "resumed.log")
    code, output = finish(run, tmp_path / "resumed.log")
    assert code == 0, output[-3000:]
    resumed = result_of(output)
    assert (resumed["steps"], resumed["world"]) == (last + 2, 2)
    assert resumed["sums"][0] == resumed["sums"][1]
    assert len(resumed["logp_differences"]) == last + 2, "the history of before goes on"
    assert max(resumed["logp_differences"]) < 1e-3
    assert len(server.models()) == 1
