"""What is refused before any model is loaded: every base below is a configuration without weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import get_args

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BloomConfig, CTRLConfig, GPTNeoXConfig, Qwen3Config, Qwen3ForCausalLM

from trl_populora.generate.checks import WINDOW, check_vllm, find_changed_layer, warn_of_truncation
from trl_populora.generate.publish import Published
from trl_populora.generate.server import REQUESTS_AT_A_TIME, LoRAServer, LoRAServers, VLLMServerError
from trl_populora.hub.card import VLLM_RANKS
from trl_populora.start import check_setup
from trl_populora.trainer import PopuLoRATrainer

from .models import random_model
from .vllm_models import make_population, make_served_base
from .vllm_processes import free_port
from .without_extras import without_extras


ROOT = Path(__file__).parent.parent
SIZES = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
sys.path.insert(0, str(ROOT / "benchmarks"))

import trl_versions  # noqa: E402


BLOCKED = "import sys; sys.modules['vllm'] = None\n"
CHECK = "from trl_populora.generate.checks import check_installed; check_installed()"


def run_python(program: str, *first_on_path: str) -> str:
    """The last line that a fresh interpreter prints."""
    path = os.pathsep.join([*first_on_path, str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=without_extras(os.environ | {"PYTHONPATH": path}, but=["vllm"]),
        capture_output=True,
        timeout=300,
        text=True,
    )
    return (done.stdout + done.stderr).strip().splitlines()[-1]


@pytest.mark.slow
def test_a_missing_vllm_is_an_error_before_the_base_is_looked_at(tmp_path):
    program = BLOCKED + (
        "from trl_populora.config import PopuLoRAConfig\n"
        "from trl_populora.trainer import PopuLoRATrainer\n"
        f"args = PopuLoRAConfig({str(tmp_path)!r}, use_vllm=True, use_cpu=True, bf16=False)\n"
        "PopuLoRATrainer('no/such-base', args=args)\n"
    )
    said = run_python(program)
    assert said.startswith("ImportError: `use_vllm=True`, but vLLM is not installed.")
    assert "use_vllm=False" in said


def test_the_window_is_that_of_the_extra():
    assert trl_versions.window("vllm").specifier == WINDOW


@pytest.mark.slow
def test_a_version_outside_the_window_is_an_error(tmp_path):
    """A package named vllm of a version that does not exist yet, first on the path."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    info = tmp_path / "vllm-99.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 99.0.0\n")
    (info / "top_level.txt").write_text("vllm\n")
    (info / "RECORD").write_text("vllm/__init__.py,,\n")
    said = run_python(CHECK, str(tmp_path))
    assert said.startswith("ImportError: ")
    assert "99.0.0" in said
    assert str(WINDOW) in said


CUT = "truncates sampling"


@pytest.mark.parametrize(("option", "value"), [("top_p", 0.95), ("top_k", 20), ("min_p", 0.05)])
def test_truncated_sampling_under_the_correction_is_told(make_args, caplog, option, value):
    warn_of_truncation(make_args(use_vllm=True, **{option: value}))
    assert f"`{option}={value}` {CUT}" in caplog.text
    caplog.clear()
    warn_of_truncation(make_args(use_vllm=True, vllm_importance_sampling_correction=False, **{option: value}))
    warn_of_truncation(make_args(use_vllm=True))
    assert CUT not in caplog.text


@pytest.mark.vllm
class TestWithVLLM:
    @pytest.fixture(autouse=True)
    def _needs_vllm(self):
        pytest.importorskip("vllm", reason="vLLM is not installed")

    @pytest.fixture
    def args(self, make_args):
        return make_args(use_vllm=True)

    def test_an_installed_version_in_the_window_passes(self):
        from trl_populora.generate.checks import check_installed

        check_installed()

    @pytest.mark.parametrize(
        ("options", "size"),
        [
            ({"r": 1}, 1),
            ({"r": 4}, 8),
            ({"r": 16}, 16),
            ({"r": 33}, 64),
            ({"r": 300}, 320),
            ({"r": 4, "rank_pattern": {"q_proj": 2}}, 8),
            ({"r": 4, "rank_pattern": {"q_proj": 2, "o_proj": 20}}, 32),
        ],
    )
    def test_the_next_permitted_rank_is_taken(self, options, size):
        from trl_populora.generate.checks import find_permitted_rank

        assert find_permitted_rank(LoraConfig(**options)) == size

    def test_cards_and_recipes_know_the_permitted_ranks(self):
        from vllm.config.lora import MaxLoRARanks

        assert get_args(MaxLoRARanks) == VLLM_RANKS

    def test_a_rank_above_all_permitted_ones_is_refused(self, args):
        with pytest.raises(ValueError, match=r"rank 513, and vLLM serves at most 512"):
            PopuLoRATrainer("no/such-base", args=args, peft_config=LoraConfig(r=513, target_modules="all-linear"))

    @pytest.mark.parametrize(
        ("config", "reason"),
        [
            (BloomConfig(architectures=["BloomForCausalLM"]), "without LoRA"),
            (CTRLConfig(architectures=["CTRLLMHeadModel"]), "CTRLLMHeadModel"),
            (Qwen3Config(architectures=["Qwen3ForCausalLM"], head_dim=16), "heads of size 16"),
        ],
    )
    def test_a_base_that_cannot_be_served_is_refused(self, config, reason, args, tmp_path, lora):
        config.save_pretrained(tmp_path / "base")
        with pytest.raises(ValueError, match=reason) as error:
            PopuLoRATrainer(str(tmp_path / "base"), args=args, peft_config=lora)
        assert str(tmp_path / "base") in str(error.value)
        assert "use_vllm=False" in str(error.value)

    def test_the_arguments_of_a_colocated_engine_decide_which_class_serves_the_base(self, make_args, lora, tmp_path):
        """vLLM's own class of this architecture has no LoRA; that which wraps transformers' class has."""
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
        base = str(tmp_path / "base")
        GPTNeoXConfig(architectures=["GPTNeoXForCausalLM"], **sizes).save_pretrained(base)
        own, wrapped = ({"model_impl": name} for name in ("vllm", "transformers"))
        for settings in ({}, {"vllm_engine_kwargs": own}, {"vllm_engine_kwargs": wrapped, "vllm_mode": "server"}):
            args = make_args(use_vllm=True, **settings)
            with pytest.raises(ValueError, match="without LoRA"):
                check_setup(args, {}, base, lora)
        check_setup(make_args(use_vllm=True, vllm_engine_kwargs=wrapped), {}, base, lora)
        args = make_args(use_vllm=True, vllm_model_impl="transformers", vllm_engine_kwargs=own)
        with pytest.raises(ValueError, match="without LoRA"):
            check_setup(args, {}, base, lora)

    @pytest.mark.parametrize(
        ("engine", "reason"),
        [
            ({"max_loras": 2, "max_cpu_loras": 4}, r"max_cpu_loras=4, and 4 member\(s\) need 6"),
            ({"max_loras": 2, "max_cpu_loras": 5}, r"max_cpu_loras=5, and 4 member\(s\) need 6"),
            ({"max_lora_rank": 8}, "max_lora_rank=8, and the adapters have rank 16"),
            ({"enable_lora": False}, "enable_lora=False"),
        ],
    )
    def test_an_engine_without_room_for_all_members_is_refused_before_anything_is_loaded(
        self, engine, reason, make_args
    ):
        args = make_args(use_vllm=True, teachers=2, students=2, vllm_engine_kwargs=engine)
        with pytest.raises(ValueError, match=reason):
            PopuLoRATrainer("no/such-base", args=args, peft_config=LoraConfig(r=16, target_modules="all-linear"))

    def test_a_server_that_is_not_up_leaves_the_arguments_as_they_were(self, make_args, lora, tmp_path):
        """In a notebook, the cell that failed is run again when the server is up."""
        server = {"vllm_server_base_url": f"http://127.0.0.1:{free_port()}", "vllm_server_timeout": 0.1}
        args = make_args(use_vllm=True, vllm_mode="server", beta=0.5, **server)
        base = make_served_base(tmp_path / "base")
        for _ in range(2):
            with pytest.raises(VLLMServerError):
                PopuLoRATrainer(base, args=args, peft_config=lora)
        assert (args.use_vllm, args.beta) == (True, 0.5)

    @pytest.mark.parametrize("stuck", ["/health", "/v1/models", "/server_info"])
    def test_a_server_that_hangs_is_given_up_whatever_it_is_asked(self, stuck, monkeypatch):
        released = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):  # noqa: N802
                if self.path.startswith(stuck):
                    released.wait(60)
                body = json.dumps({"data": [{"id": "base"}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments):
                pass

        monkeypatch.setattr("trl_populora.generate.server.HEALTH_TIMEOUT", 0.5)
        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as stub:
            threading.Thread(target=stub.serve_forever, daemon=True).start()
            url, start = f"http://127.0.0.1:{stub.server_port}", time.monotonic()
            with pytest.raises(VLLMServerError, match=url):
                LoRAServer(url, 0.1, 0.5, lambda: "Restart it.").check_serves(4, 16, [])
            assert time.monotonic() - start < 20
            released.set()
            stub.shutdown()

    def test_after_a_server_has_failed_no_further_request_is_sent(self):
        asked, released = [], threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):  # noqa: N802
                body = json.dumps({"data": [{"id": "base"}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self):  # noqa: N802
                asked.append(self.path)
                released.wait(60)

            def log_message(self, *arguments):
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size, daemon_threads = 512, True

        with Server(("127.0.0.1", 0), Handler) as stub:
            threading.Thread(target=stub.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{stub.server_port}"
            servers = LoRAServers([url], connection_timeout=5.0, request_timeout=2.0, advice=lambda: "Restart it.")
            rows = 6 * REQUESTS_AT_A_TIME
            servers.versions, servers.seeds = [Published("student_0", "student_0-1", 1)] * rows, range(rows)
            with pytest.raises(VLLMServerError, match=f"{url} did not answer within 2 seconds"):
                servers.generate([[1]] * rows, max_tokens=1)
            time.sleep(5.0)
            # All requests that were under way end together, and a thread may have begun another one meanwhile.
            assert 0 < len(asked) <= 2 * REQUESTS_AT_A_TIME
            released.set()
            stub.shutdown()

    def test_a_base_that_vllm_could_not_load_again_is_refused(self, args, lora):
        config = Qwen3Config(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=16, head_dim=32)
        with pytest.raises(ValueError, match="save_pretrained"):
            check_vllm(Qwen3ForCausalLM(config), args, lora)

    def test_a_base_whose_weights_are_not_those_at_its_path_is_refused(self, args, lora, tmp_path):
        base = AutoModelForCausalLM.from_pretrained(make_served_base(tmp_path / "base"))
        check_vllm(base, args, lora)
        changed = LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[1], init_lora_weights=False)
        merged = get_peft_model(base, changed).merge_and_unload()
        with pytest.raises(ValueError, match=r"layers.1.self_attn.q_proj.*`save_pretrained`") as error:
            check_vllm(merged, args, lora)
        assert str(tmp_path / "base") in str(error.value)
        merged.save_pretrained(tmp_path / "merged")
        check_vllm(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), args, lora)

    def test_an_engine_loads_the_commit_that_an_object_was_loaded_from(self, make_args, tmp_path, monkeypatch):
        from trl_populora.generate.vllm import PopulationGeneration, make_vllm_generation

        seen: dict = {}
        monkeypatch.setattr(PopulationGeneration, "__init__", lambda self, model, **given: seen.update(given))
        model, names, router = make_population(make_served_base(tmp_path / "base"), 1)
        for commit, given, revision in ((None, "v1", "v1"), ("c0ffee", "v1", "c0ffee"), (None, None, None)):
            args = make_args(use_vllm=True, model_init_kwargs={"revision": given})
            model.config._commit_hash = commit
            make_vllm_generation(args, model, names, router, accelerator=None, tokenizer=None, ends=[])
            assert seen["engine_kwargs"]["revision"] == revision


def change(model, name: str = "model.layers.1.mlp.up_proj"):
    """Changes one layer a little, as merging an adapter does."""
    with torch.no_grad():
        model.get_submodule(name).weight += 1e-4 * torch.randn(model.get_submodule(name).weight.shape)
    return model


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("held", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("saved", ["float32", "bfloat16", "float16"])
def test_a_changed_layer_is_found_in_every_precision_and_a_cast_is_none(tmp_path, saved, held, shard):
    model = random_model(Qwen3ForCausalLM, **SIZES).to(getattr(torch, saved))
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len([*tmp_path.glob("*.safetensors")]) > 1) == (shard == "20KB")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=held)
    assert not find_changed_layer(model, str(tmp_path), None)
    assert not find_changed_layer(model.float(), str(tmp_path), None)
    assert find_changed_layer(change(model), str(tmp_path), None) == "model.layers.1.mlp.up_proj"


def test_layers_that_the_files_do_not_have_alike_are_passed_over(tmp_path):
    """Files of other names, shapes or numbers, a tied head, a layer without weights here, and no files at all."""
    change(model := random_model(Qwen3ForCausalLM, tie_word_embeddings=True, **SIZES), "lm_head")
    layers = {name: weight.clone() + 1 for name, weight in model.state_dict().items()}
    odd = {
        "model.layers.0.mlp.up_proj.weight": torch.zeros(3, 32),
        "model.layers.0.mlp.down_proj.weight": torch.zeros(32, 64, dtype=torch.int8),
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(32, 32),
        "lm_head.weight": torch.zeros(model.lm_head.weight.shape),
    }
    model.model.layers[0].self_attn.q_proj.to("meta")
    save_file(
        {f"language_model.{name}": weight for name, weight in layers.items()} | odd, tmp_path / "model.safetensors"
    )
    assert not find_changed_layer(model, str(tmp_path), None)
    (tmp_path / "model.safetensors").unlink()
    assert not find_changed_layer(model, str(tmp_path), None)
    assert not find_changed_layer(model, "no-such/base", None)
