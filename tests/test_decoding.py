"""Generation in rounds: the same completions as transformers' own, with less work."""

from __future__ import annotations

import contextlib

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3NextConfig
from transformers.cache_utils import DynamicLayer

from trl_populora.generate import transformers as decoding
from trl_populora.generate.transformers import SpareLayer, complete, complete_whole, is_spread, why_no_rounds
from trl_populora.trainer import PopuLoRATrainer

from .completions import BASES, ENDS, PROMPTS, base, check_distribution, check_members, generated, no_route, settings
from .populora_run import letters


@pytest.mark.parametrize("name", BASES)
def test_greedy_completions_are_those_of_generate(name):
    model = base(BASES[name])
    rows = [0] * len(PROMPTS)
    cut = generated(model, PROMPTS, settings(eos_token_id=[0]))
    assert complete(model, PROMPTS, rows, no_route, settings(eos_token_id=[0])) == cut
    config = settings(eos_token_id=[0, cut[0][4]])
    found = complete(model, PROMPTS, rows, no_route, config)
    assert found == generated(model, PROMPTS, config)
    assert found == complete_whole(model, PROMPTS, rows, no_route, config)
    assert len(set(map(len, found))) > 1, "rows end at different times"


@pytest.mark.parametrize("name", BASES)
def test_prompts_of_one_token_are_completed_as_by_generate(name):
    model, prompts = base(BASES[name]), [[5], [9], [5]]
    assert complete(model, prompts, [0, 0, 0], no_route, settings()) == generated(model, prompts, settings())


def test_every_row_is_its_members_and_comes_back_in_its_place():
    check_members()


def test_a_prompt_is_read_once_and_ended_rows_leave():
    model, seen = base(BASES["Llama"]), []

    @contextlib.contextmanager
    def route(members):
        seen.append(len(members))
        yield

    found = complete(model, PROMPTS, [0] * len(PROMPTS), route, settings())
    assert seen[0] == len(set(map(tuple, PROMPTS)))
    begun = range(0, 19, decoding.ROUND)
    ended = [len(row) if row[-1] in ENDS else 20 for row in found]
    assert seen[1:] == [sum(length > start for length in ended) for start in begun]


@pytest.mark.parametrize("name", BASES)
def test_prompts_that_are_read_in_parts_are_read_the_same(name, monkeypatch):
    model, read = base(BASES[name]), []
    whole = complete(model, PROMPTS, [0] * len(PROMPTS), no_route, settings())
    reading = decoding._read_prompts
    monkeypatch.setattr(decoding, "_read_prompts", lambda *given: read.append(len(given[1])) or reading(*given))
    tokens = 2 * decoding.READ_SHARE * max(map(len, PROMPTS))
    assert complete(model, PROMPTS, [0] * len(PROMPTS), no_route, settings(), tokens) == whole
    assert read == [2, 2], "of the four prompts"


def test_a_token_is_written_where_a_selection_left_room_and_joined_where_not():
    def new(tokens):
        return torch.randn(3, 2, tokens, 4), torch.randn(3, 2, tokens, 4)

    torch.manual_seed(0)
    plain, first = DynamicLayer(), new(5)
    plain.update(*first)
    roomy = SpareLayer(plain, spare=2)
    rows = torch.tensor([2, 0, 0])
    for layer in (plain, roomy):
        layer.batch_select_indices(rows)
    places = []
    for _ in range(3):
        token = new(1)
        for told, expected in zip(roomy.update(*token), plain.update(*token), strict=True):
            assert torch.equal(told, expected)
        places.append((roomy.keys.data_ptr(), roomy.values.data_ptr()))
    assert places[0] == places[1] != places[2]
    assert roomy.get_seq_length() == 8


@pytest.mark.parametrize("name", BASES)
def test_a_round_joins_nothing(name, monkeypatch):
    model, joined = base(BASES[name]), []
    update = DynamicLayer.update

    def observed(self, keys, *given):
        joined.append(keys.shape[2])
        return update(self, keys, *given)

    monkeypatch.setattr(DynamicLayer, "update", observed)
    complete(model, PROMPTS, [0] * len(PROMPTS), no_route, settings())
    assert 1 not in joined, "tokens that are read at a time: prompts alone are joined"


def test_parts_are_refused_where_ranks_have_to_meet():
    decoding.check_parts(None, sharded=True)
    decoding.check_parts(100, sharded=False)
    with pytest.raises(ValueError, match="generation_tokens=100.*Leave it unset, or use ZeRO-2 or DDP"):
        decoding.check_parts(100, sharded=True)


def test_samples_have_the_distribution_of_the_model(monkeypatch):
    monkeypatch.setattr(decoding, "ROUND", 1)
    check_distribution()


def test_a_row_keeps_its_temperature_when_the_others_have_ended_or_never_were():
    """The cold row goes on for rounds after the hot one has ended."""
    model, prompt = base(BASES["Llama"]), PROMPTS[0]
    (greedy,) = generated(model, [prompt], settings(eos_token_id=[0]))
    ends = sorted(set(range(24)) - {*greedy[:-1]})
    sampling = settings(do_sample=True, top_k=0, eos_token_id=ends)
    torch.manual_seed(0)
    hot, cold = complete(model, [prompt] * 2, [0, 1], no_route, sampling, temperatures=[50.0, 1e-5])
    assert len(hot) <= decoding.ROUND < len(cold)
    assert cold == greedy
    assert complete(model, [prompt], [1], no_route, sampling, temperatures=[1e-5]) == [greedy], "a part of the rows"


def test_settings_that_look_at_all_tokens_look_at_those_of_earlier_rounds():
    model = base(BASES["Llama"])
    config = settings(no_repeat_ngram_size=2, repetition_penalty=1.3)
    assert complete(model, PROMPTS, [0] * len(PROMPTS), no_route, config) == generated(model, PROMPTS, config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("begin_suppress_tokens", lambda tokens: [tokens[decoding.ROUND]]),
        ("encoder_repetition_penalty", lambda tokens: 1.5),
        ("encoder_no_repeat_ngram_size", lambda tokens: 1),
        ("guidance_scale", lambda tokens: 3.0),
    ],
)
def test_settings_that_begin_anew_with_every_round_keep_generation_whole(name, value):
    model, prompts = base(BASES["Llama"]), PROMPTS[:1]
    (tokens,) = generated(model, prompts, settings(eos_token_id=[0]))
    config = settings(eos_token_id=[0], **{name: value(tokens)})
    whole = generated(model, prompts, config)
    assert complete_whole(model, prompts, [0], no_route, config) == whole
    assert complete(model, prompts, [0], no_route, config) != whole
    assert name in why_no_rounds(BASES["Llama"], config, sharded=False)


def test_options_of_what_generate_returns_do_not_change_completions():
    model, rows = base(BASES["Llama"]), [0] * len(PROMPTS)
    wanted = generated(model, PROMPTS, settings())
    config = settings(return_dict_in_generate=True, output_scores=True)
    assert complete_whole(model, PROMPTS, rows, no_route, config) == wanted
    assert complete(model, PROMPTS, rows, no_route, config) == wanted


def test_a_base_on_several_devices_makes_all_tokens_in_one_call(random_base):
    """Its cache lies on several devices, too, where `complete` would look for all of it on one."""
    base = AutoModelForCausalLM.from_pretrained(random_base)
    assert not is_spread(base)
    base.hf_device_map = {"model": "cpu", "lm_head": "cpu"}
    assert not is_spread(base)
    base.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    assert is_spread(base)
    assert "several devices" in why_no_rounds(base.config, settings(), sharded=False, spread=True)


@pytest.mark.parametrize(
    ("config", "sampling", "sharded", "reason"),
    [
        (BASES["Llama"], {}, False, ""),
        (BASES["Gemma 3, both kinds of layers"], {}, False, ""),
        (BASES["Llama"], {}, True, "a part of the base"),
        (BASES["Llama"], {"cache_implementation": "static"}, False, "static"),
        (BASES["Llama"], {"use_cache": False}, False, "use_cache"),
        (BASES["Llama"], {"prefill_chunk_size": 2}, False, "prefill_chunk_size"),
        (BASES["Llama"], {"num_beams": 3}, False, "num_beams=3"),
        (BASES["Llama"], {"min_new_tokens": 4}, False, "min_new_tokens depend"),
        (Qwen3NextConfig(num_hidden_layers=4), {}, False, "linear_attention"),
    ],
)
def test_what_cannot_be_done_in_rounds_is_named(config, sampling, sharded, reason):
    said = why_no_rounds(config, settings(**sampling), sharded)
    assert reason in said
    assert bool(reason) == bool(said)


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("cache_implementation", "static", "static"),
        ("cache_implementation", "hybrid", ""),  # many a Gemma names it, and transformers drops it
        ("forced_eos_token_id", 5, "forced_eos_token_id"),
        ("prefill_chunk_size", 2, "prefill_chunk_size"),
        ("use_cache", False, ""),
        ("temperature", 0.5, ""),
    ],
)
def test_what_generate_takes_from_the_bases_own_config_is_judged_too(
    random_base, make_args, seed_dataset, lora, option, value, reason
):
    base = AutoModelForCausalLM.from_pretrained(random_base)
    setattr(base.generation_config, option, value)
    trainer = PopuLoRATrainer(base, letters, make_args(), train_dataset=seed_dataset, peft_config=lora)
    trainer.close()
    assert reason in trainer._generates_whole
    assert bool(reason) == bool(trainer._generates_whole)


def test_a_base_that_was_saved_without_a_cache_is_read_with_one():
    """As checkpoints are that were trained with gradient checkpointing."""
    model = base(BASES["Llama"])
    expected = generated(model, PROMPTS, settings())
    model.generation_config.use_cache = False
    assert complete(model, PROMPTS, [0] * len(PROMPTS), no_route, settings()) == expected
