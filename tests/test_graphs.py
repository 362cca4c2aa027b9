"""Tokens with a cache that never moves, as a GPU records them; `test_gpu.py` records them."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from trl_populora.generate import transformers as decoding
from trl_populora.generate.transformers import complete

from .completions import BASES, PROMPTS, SMALL, base, check_distribution, check_members, generated, no_route, settings


ROWS = [0] * len(PROMPTS)
SLIDES = "some layers drop old tokens from their cache, or have another kind of cache"


@pytest.fixture
def on_a_gpu(monkeypatch):
    """All but the recording: every token is computed here as on a GPU the first two are."""
    monkeypatch.setattr(decoding, "why_no_graph", lambda base, sampling: "")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "GPT-2, learned positions"])
def test_greedy_completions_are_those_of_generate(on_a_gpu, name, attention):
    model = base(copy.deepcopy(BASES[name]))
    model.set_attn_implementation(attention)
    cut = generated(model, PROMPTS, settings(eos_token_id=[0]))
    assert complete(model, PROMPTS, ROWS, no_route, settings(eos_token_id=[0])) == cut
    config = settings(eos_token_id=[0, cut[0][4]])
    found = complete(model, PROMPTS, ROWS, no_route, config)
    assert found == generated(model, PROMPTS, config)
    assert len(set(map(len, found))) > 1, "rows end at different times"


def test_prompts_of_one_token_are_completed_as_by_generate(on_a_gpu):
    model, prompts = base(BASES["Llama"]), [[5], [9], [5]]
    assert complete(model, prompts, [0, 0, 0], no_route, settings()) == generated(model, prompts, settings())


def test_every_row_is_its_members_and_comes_back_in_its_place(on_a_gpu):
    check_members()


def test_samples_have_the_distribution_of_the_model(on_a_gpu):
    check_distribution()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 2.0, "top_k": 3},
        {"top_p": 0.4},
        {"min_p": 0.3, "temperature": 1.5},
        {"repetition_penalty": 3.0, "top_k": 5, "top_p": 0.8},
    ],
)
def test_options_of_sampling_are_those_of_generate(options):
    config = settings(do_sample=True, **({"top_k": 0} | options))
    model = base(BASES["Llama"])
    theirs = model._get_logits_processor(config, input_ids_seq_length=3, device="cpu")
    texts, scores = (
        torch.tensor([[5, 6, 7], [7, 7, 8]]),
        torch.randn(2, 24, generator=torch.Generator().manual_seed(0)),
    )
    ours = decoding._make_processors(config)(texts, scores)
    assert torch.equal(ours, theirs(texts, scores.clone()))
    assert not torch.equal(ours, scores)


def test_an_option_of_the_base_counts_as_in_generate(on_a_gpu, monkeypatch):
    model = base(BASES["Llama"])
    greedy = complete(model, PROMPTS, ROWS, no_route, settings())
    monkeypatch.setattr(model.generation_config, "min_p", 1.0)  # leaves the likeliest token
    assert complete(model, PROMPTS, ROWS, no_route, settings(do_sample=True, top_k=0)) == greedy


def test_nothing_that_is_recorded_moves(on_a_gpu, monkeypatch):
    model, places = base(BASES["Llama"]), []
    compute = decoding._TokenPass.compute

    def observed(step):
        compute(step)
        held = [step.token, step.bias, step.place, step.position]
        held += itertools.chain.from_iterable((layer.keys, layer.values) for layer in step.cache.layers)
        places.append([each.data_ptr() for each in held])

    monkeypatch.setattr(decoding._TokenPass, "compute", observed)
    complete(model, PROMPTS, ROWS, no_route, settings(eos_token_id=[0]))
    assert len(places) == 19
    assert all(each == places[0] for each in places)


def test_rows_that_all_ended_are_not_computed_further(on_a_gpu, monkeypatch):
    model, computed = base(BASES["Llama"]), []
    compute = decoding._TokenPass.compute
    monkeypatch.setattr(decoding._TokenPass, "compute", lambda step: computed.append(1) or compute(step))
    complete(model, PROMPTS, ROWS, no_route, settings(eos_token_id=list(range(24))))
    assert len(computed) == decoding.LOOK


@pytest.mark.parametrize(("free", "fits"), [(2410, True), (2390, False)])
def test_what_rows_need_is_compared_with_the_free_memory(monkeypatch, free, fits):
    layer = SimpleNamespace(
        keys=SimpleNamespace(shape=(3, 2, 7, 8), element_size=lambda: 2, device=torch.device("cuda", 0)),
        values=SimpleNamespace(shape=(3, 2, 7, 4), element_size=lambda: 2),
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free - 100, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    reason = decoding.why_no_memory(SimpleNamespace(layers=[layer, layer]), rows=2, length=10)  # 1920 bytes
    assert fits == (not reason)
    assert fits or "need over 80% of the free memory; set a lower `generation_tokens`" in reason


def test_rows_that_would_not_fit_are_generated_in_rounds(on_a_gpu, monkeypatch):
    model, recorded = base(BASES["Llama"]), []
    monkeypatch.setattr(decoding, "generate_with_graph", lambda *given: recorded.append(1))
    monkeypatch.setattr(decoding, "why_no_memory", lambda cache, rows, length: f"{rows} rows of {length}")
    assert complete(model, PROMPTS, ROWS, no_route, settings()) == generated(model, PROMPTS, settings())
    assert not recorded


def test_a_reason_is_told_once(caplog):
    for reason in ("the cache of one layer", "the cache of one layer", "the base is quantised"):
        decoding._warn_once(reason)
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "the cache of one layer.",
        "the base is quantised.",
    ]


@pytest.fixture
def as_on_cuda(monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "device", torch.device("cuda", 0))


def test_graphs_are_for_cuda():
    assert decoding.why_no_graph(base(BASES["Llama"]), settings()) == "graphs are for CUDA, the model is on cpu"


@pytest.mark.parametrize(
    ("name", "sampling", "reason"),
    [
        ("Llama", {}, ""),
        ("Llama", {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}, ""),
        ("Llama", {"no_repeat_ngram_size": 2}, "no_repeat_ngram_size is left to transformers"),
        ("Llama", {"stop_token_ids": [5], "stop": ["A"], "seed": 3}, ""),
        ("Mistral, a window shorter than the prompts", {}, SLIDES),
        ("Gemma 3, both kinds of layers", {}, SLIDES),
        ("GPT-2, learned positions", {}, ""),
    ],
)
def test_what_cannot_be_recorded_is_named(as_on_cuda, name, sampling, reason):
    assert decoding.why_no_graph(base(BASES[name]), settings(**sampling)) == reason


def test_a_base_that_looks_at_its_rows_cannot_be_recorded(as_on_cuda, monkeypatch):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert (
        decoding.why_no_graph(base(LlamaConfig(**SMALL, rope_parameters=rope)), settings()) == "positions are dynamic"
    )
    model = base(copy.deepcopy(BASES["Llama"]))
    model.generation_config.no_repeat_ngram_size = 3
    assert "no_repeat_ngram_size" in decoding.why_no_graph(model, settings())
    model.config._attn_implementation = "flash_attention_2"
    assert "makes its own mask" in decoding.why_no_graph(model, settings())
    monkeypatch.setattr(type(model), "_can_compile_fullgraph", False)
    assert decoding.why_no_graph(model, settings()) == "transformers does not compile LlamaForCausalLM as a whole"
