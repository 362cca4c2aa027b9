"""What servers and the shelf hold after a publication, also where one server refuses. The servers are stubs."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch


pytest.importorskip("vllm", reason="vLLM is not installed")

from accelerate import Accelerator

from trl_populora.generate.publish import VERSIONS_KEPT, Published, StaleAdapterError
from trl_populora.generate.server import LoRAServers, VLLMServerError
from trl_populora.generate.vllm import PopulationGeneration

from .adapter_models import make_population


pytestmark = pytest.mark.vllm

CONFIG = {
    "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 64},
    "lora_config": {"max_loras": 8, "max_cpu_loras": 24, "max_lora_rank": 64},
}


class Handler(BaseHTTPRequestHandler):
    """Answers what a client asks before it generates, and every prompt with the token 7."""

    def do_GET(self):  # noqa: N802
        self.reply(200, {"data": [{"id": "base"}], "vllm_config": CONFIG})

    def do_POST(self):  # noqa: N802
        command = self.path.rpartition("/")[2]
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if command == "completions":
            self.server.asked.append(asked)
            answer = {"token_ids": [7], "logprobs": None}
            self.reply(200, {"choices": [answer | {"prompt_token_ids": prompt} for prompt in asked["prompt"]]})
            return
        name = asked["lora_name"]
        if command in self.server.refused:
            self.reply(400, f"no lora {name} here")
        elif command == "load_lora_adapter":
            self.server.loaded.append(name)
            self.reply(200, "loaded")
        else:
            self.server.loaded.remove(name)
            self.reply(200, "unloaded")

    def reply(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def stubs():
    """
    Two servers. `loaded` are the names of a server's adapters, `refused` the commands that it refuses, and `asked` its
    requests for completions.
    """
    with ExitStack() as running:
        found = [running.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) for _ in range(2)]
        for stub in found:
            stub.loaded, stub.refused, stub.asked = [], set(), []
            stub.url = f"http://127.0.0.1:{stub.server_port}"
            threading.Thread(target=stub.serve_forever, daemon=True).start()
            running.callback(stub.shutdown)
        yield found


@pytest.fixture
def servers(stubs):
    settings = {"connection_timeout": 1.0, "request_timeout": 5.0, "advice": lambda: "Restart it."}
    return LoRAServers([stub.url for stub in stubs], **settings)


@pytest.fixture
def generation(stubs, tmp_path):
    model, router, names = make_population(2)
    return PopulationGeneration(
        model,
        members=names,
        router=router,
        output_dir=str(tmp_path),
        adapter_dir=str(tmp_path / "adapters"),
        accelerator=Accelerator(cpu=True),
        processing_class=None,
        mode="server",
        server_base_url=",".join(stub.url for stub in stubs),
    )


def test_an_adapter_that_one_server_refuses_stays_on_none(stubs, servers):
    stubs[1].refused = {"load_lora_adapter"}
    with pytest.raises(VLLMServerError, match=f"{stubs[1].url} answered 400: .*no lora a-1 here"):
        servers.load(Published("a", "a-1", 1, "/s/a-1"))
    assert [stub.loaded for stub in stubs] == [[], []]


def test_the_first_error_is_told_if_unloading_fails_too(stubs, servers):
    stubs[0].refused, stubs[1].refused = {"unload_lora_adapter"}, {"load_lora_adapter"}
    with pytest.raises(VLLMServerError, match=f"{stubs[1].url} .* asked for /v1/load_lora_adapter"):
        servers.load(Published("a", "a-1", 1, "/s/a-1"))


def test_a_server_that_fails_to_unload_keeps_no_other_from_it(stubs, servers):
    adapter = Published("a", "a-1", 1, "/s/a-1")
    servers.load(adapter)
    stubs[0].refused = {"unload_lora_adapter"}
    with pytest.raises(VLLMServerError, match=stubs[0].url):
        servers.unload(adapter)
    assert [stub.loaded for stub in stubs] == [["a-1"], []]


def test_a_server_that_works_again_unloads_again(stubs, servers):
    adapter = Published("a", "a-1", 1, "/s/a-1")
    stubs[1].refused = {"load_lora_adapter"}
    with pytest.raises(VLLMServerError):
        servers.load(adapter)
    stubs[1].refused = set()
    servers.load(adapter)
    servers.unload(adapter)
    assert [stub.loaded for stub in stubs] == [[], []]


def test_all_adapters_leave_the_servers_that_are_there_at_the_end(stubs, generation, caplog):
    for count, name in enumerate(generation.members):
        generation.published[name] = Published(name, f"{name}-1", count, f"/s/{name}-1")
        generation.backend.load(generation.published[name])
    stubs[0].refused = {"unload_lora_adapter"}
    generation.close()
    assert [len(stub.loaded) for stub in stubs] == [2, 0]
    assert caplog.text.count("Adapters were left on the server") == 1


def test_the_error_of_a_probe_is_told_if_unloading_fails_too(stubs, generation, monkeypatch):
    generation._modules_checked = True
    stubs[0].refused = {"unload_lora_adapter"}

    def probe(self, adapter: Published, b: torch.Tensor) -> None:
        raise StaleAdapterError(f"{adapter.member} is stale")

    monkeypatch.setattr(LoRAServers, "probe", probe)
    with pytest.raises(StaleAdapterError, match="member_0 is stale"):
        generation.sync_weights()
    assert [len(stub.loaded) for stub in stubs] == [1, 0]


def test_the_error_of_the_check_of_modules_is_told_if_unloading_fails_too(stubs, generation, monkeypatch):
    stubs[0].refused = {"unload_lora_adapter"}

    def check_modules(self, nothing: Published, probes: dict[str, Published]) -> None:
        raise ValueError(f"q_proj of {len(probes)} is ignored")

    monkeypatch.setattr(LoRAServers, "check_modules", check_modules)
    with pytest.raises(ValueError, match="q_proj of .* is ignored"):
        generation.sync_weights()
    assert stubs[0].loaded
    assert not stubs[1].loaded
    shelf = generation._shelf
    shelf.sweep_retired()
    assert [path for path in shelf.root.iterdir() if path.name != ".lock"] == []


def test_a_shelf_holds_no_more_versions_than_room_is_asked_for(generation, monkeypatch):
    generation._modules_checked = True
    monkeypatch.setattr(LoRAServers, "probe", lambda self, adapter, b: None)
    load, held = generation.backend.load, []

    def count_and_load(adapter: Published) -> None:
        held.append(len([*generation._shelf.root.glob("[!.]*")]))
        load(adapter)

    monkeypatch.setattr(generation.backend, "load", count_and_load)
    for _ in range(4):
        generation._detector.forget()
        generation.sync_weights()
    assert max(held) == VERSIONS_KEPT * len(generation.members)


def test_a_members_own_temperature_counts_before_that_of_generation_kwargs(stubs, servers):
    """As in an engine: the update scores a member's tokens at its own temperature."""
    servers.versions = [Published(name, f"{name}-1", count, f"/s/{name}-1") for count, name in enumerate("ab")]
    servers.temperatures, options = {"a": 0.5}, {"temperature": 0.9, "min_tokens": 1}
    answer = servers.generate([[1], [2]], temperature=1.0, generation_kwargs=options)
    assert answer["completion_ids"] == [[7], [7]]
    asked = {each["model"]: (each["temperature"], each["min_tokens"]) for stub in stubs for each in stub.asked}
    assert asked == {"a-1": (0.5, 1), "b-1": (0.9, 1)}
