"""Which tokens end a completion, and that generation, metrics and masks agree on them."""

from __future__ import annotations

import pytest

from tests.models import CHATML, make_tokenizer
from tests.populora_run import letters
from trl_populora.generate.player import find_end_tokens, make_vllm_kwargs
from trl_populora.lora.members import read_member
from trl_populora.trainer import PopuLoRATrainer


END_OF_TURN, START, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def id_of(tokenizer, text: str) -> int:
    (token,) = tokenizer.encode(text, add_special_tokens=False)
    return token


@pytest.mark.parametrize(
    ("kwargs", "texts"),
    [
        ({"stop_token_ids": [65, 66]}, [65, 66]),
        ({"eos_token_id": 65}, [65]),
        ({"stop": "A"}, ["A"]),
        ({"stop": ["A", START]}, ["A", START]),
        ({"stop_strings": ["B"]}, ["B"]),
        ({"stop": None, "stop_token_ids": None}, []),
    ],
)
def test_stops_of_the_user_end_a_completion(tokenizer, kwargs, texts):
    stops = [id_of(tokenizer, text) if isinstance(text, str) else text for text in texts]
    assert find_end_tokens(tokenizer, [7], kwargs) == [7, id_of(tokenizer, END_OF_TURN), *stops]


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, [END_OF_TURN]),
        (CHATML.replace(END_OF_TURN, "\n" + PAD), [PAD]),
        (CHATML.replace(END_OF_TURN, "###"), []),
        ("{{ raise_exception('users only') }}", []),
    ],
)
def test_the_templates_own_end_of_turn_ends_a_completion(template, ends):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    assert find_end_tokens(tokenizer, []) == [id_of(tokenizer, text) for text in ends]


@pytest.mark.parametrize("name", ["stop", "stop_strings"])
def test_a_stop_of_several_tokens_is_refused(tokenizer, name):
    with pytest.raises(
        ValueError, match=rf"`generation_kwargs` gives {name}='###', which is 3 tokens.*stop_token_ids"
    ):
        find_end_tokens(tokenizer, [], {name: ["###"]})


@pytest.fixture
def stopped(random_base, make_args, seed_dataset, lora):
    """A run whose completions end with any of 60 bytes, so nearly every row ends by itself, or with an A."""
    stops = {"stop_token_ids": [*range(60)], "stop_strings": ["A"]}
    options = {"generation_kwargs": stops, "mask_truncated_completions": True}
    args = make_args(max_steps=1, **options)
    trainer = PopuLoRATrainer(random_base, letters, args, train_dataset=seed_dataset, peft_config=lora)
    yield trainer
    trainer.close()


def test_a_row_that_ends_with_a_stop_is_no_row_cut_off(stopped):
    before = {name: read_member(stopped.model, name) for name in stopped.population.names}
    stopped.train()
    assert {*range(60)} <= {*stopped.generation_config.eos_token_id}, "TRL cuts rows, which may have gone on"
    rows = [row.completion.completion_ids for row in stopped.played.rows]
    assert all(not set(ids[:-1]) & set(range(60)) for ids in rows), "generation goes on after a stop"
    assert stopped.state.log_history[0]["completions/clipped_ratio"] < 0.2
    for name, factors in before.items():
        moved = read_member(stopped.model, name)
        assert any(not factors[key].equal(moved[key]) for key in factors), f"{name} is masked"


def test_vllm_is_given_every_token_that_ends_a_completion(stopped):
    stopped.args.generation_kwargs |= {"min_tokens": 1}
    given = make_vllm_kwargs(stopped.args.generation_kwargs, stopped.eos_token_ids)
    assert given == {"min_tokens": 1, "stop_token_ids": stopped.eos_token_ids}
    assert {*range(60), stopped.processing_class.eos_token_id} <= set(stopped.eos_token_ids)


def test_a_seed_for_every_request_is_given_to_no_engine_and_told(caplog):
    """With it two processes would sample the same answers to a prompt."""
    assert make_vllm_kwargs({"seed": 3, "min_tokens": 1}, [2]) == {"min_tokens": 1, "stop_token_ids": [2]}
    assert "`generation_kwargs` gives seed=3" in caplog.text
    caplog.clear()
    make_vllm_kwargs({"seed": None}, [2])
    assert not caplog.text
