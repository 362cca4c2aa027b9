"""Members answer without a trainer, with transformers; what ends a completion, and how its text is read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jinja2 import TemplateError
from peft import PeftModel
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig

from trl_populora.lora.layers import BASE, BASE_NAME, Router
from trl_populora.step.player import Completion, Messages, Player
from trl_populora.step.referee import count_free_tokens, trained_context
from trl_populora.tasks.python.reading import THINK_OPEN, opens_thinking

from . import transformers as decoding


def make_sampling_config(
    base: GenerationConfig, tokenizer: PreTrainedTokenizerBase, args: GRPOConfig
) -> GenerationConfig:
    """How members of a run with these settings are sampled, as TRL has it."""
    warn_of_unknown(args.generation_kwargs)
    known = base.eos_token_id if isinstance(base.eos_token_id, list) else [base.eos_token_id]
    known = [tokenizer.eos_token_id, *(token for token in known if token is not None)]
    given = {name: value for name, value in (args.generation_kwargs or {}).items() if name not in STOPS}
    return GenerationConfig(
        **{
            "max_new_tokens": args.max_completion_length,
            "do_sample": True,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": find_end_tokens(tokenizer, known, args.generation_kwargs, args.chat_template_kwargs),
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k,
            "min_p": args.min_p,
            "repetition_penalty": args.repetition_penalty,
            "cache_implementation": args.cache_implementation,
        }
        | given,
        disable_compile=True,
    )


def make_player(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    router: Router,
    members: Sequence[str],
    args: GRPOConfig,
) -> Player:
    """
    Generates as the trainer of such a run would without vLLM.

    Args:
        model: The members' model, or the base without any; its generation config is replaced.
        tokenizer: With a chat template.
        router: The model's.
        members: Names in the order of routes.
        args: How to sample.
    """
    index = {name: number for number, name in enumerate(members)} | {BASE_NAME: BASE}
    model.eval()
    # Otherwise what the base's own config says would hold wherever ours is at its default.
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    config = base.generation_config = make_sampling_config(base.generation_config, tokenizer, args)
    complete = (
        decoding.complete_whole if decoding.why_no_rounds(base.config, config, sharded=False) else decoding.complete
    )

    def generate(
        prompts: list[Messages], names: Sequence[str], seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        ids = tokenize(tokenizer, prompts, args)
        with seed_samples(seeds):
            completions = complete(model, ids, [index[name] for name in names], router.rows_of, config)
        return make_completions(tokenizer, ids, completions)

    return Player(generate)


def tokenize(tokenizer: PreTrainedTokenizerBase, prompts: list[Messages], args: GRPOConfig) -> list[list[int]]:
    """Token ids of prompts up to where the assistant begins."""
    # Prompts are measured here to turn away what is too long, of which the tokenizer would warn as of a mistake.
    quiet = {"tokenizer_kwargs": {"verbose": False}}
    return tokenizer.apply_chat_template(
        prompts,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **(quiet | (args.chat_template_kwargs or {})),
    )["input_ids"]


def make_token_counter(
    base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: GRPOConfig
) -> Callable[[Messages], int]:
    """How much room such a player has for a prompt, as [`count_free_tokens`] has it."""
    longest = args.max_completion_length
    return count_free_tokens(
        trained_context(base), longest, lambda prompt: tokenize(tokenizer, [prompt], args)[0], tokenizer
    )


# Which tokens end a completion: what TRL knows, the chat template's own end of turn, and the user's stops.


logger = logging.getLogger(__name__)

TEXT_STOPS = ("stop", "stop_strings")  # vLLM's name and transformers'
STOPS = ("stop_token_ids", "eos_token_id", *TEXT_STOPS)


def find_end_tokens(
    tokenizer: PreTrainedTokenizerBase,
    known: Sequence[int],
    generation_kwargs: Mapping[str, Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """
    The ids that end a completion. One that ends otherwise was cut off.

    Args:
        tokenizer: Its chat template says how an assistant's turn ends.
        known: Those of tokenizer and model.
        generation_kwargs: May hold stops, under the names of vLLM or transformers.
        template_kwargs: Arguments of the chat template.

    Raises:
        `ValueError`: If a stop is text of several tokens: a row that it ends could not be told from one cut off.
    """
    ids = [*known, *_find_end_of_turn(tokenizer, template_kwargs or {})]
    for name in STOPS:
        value = (generation_kwargs or {}).get(name)
        stops = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
        for stop in stops:
            tokens = tokenizer.encode(stop, add_special_tokens=False) if name in TEXT_STOPS else [int(stop)]
            if len(tokens) != 1:
                raise ValueError(
                    f"`generation_kwargs` gives {name}={stop!r}, which is {len(tokens)} tokens. A completion that "
                    "ends there would count as cut off. Give single tokens as `stop_token_ids`."
                )
            ids += tokens
    return list(dict.fromkeys(ids))


def _find_end_of_turn(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> list[int]:
    """The special token that the chat template puts after what an assistant says; some templates put none."""
    said = "said"
    turn = [{"role": "user", "content": "asked"}, {"role": "assistant", "content": said}]
    try:
        text = tokenizer.apply_chat_template(turn, tokenize=False, **template_kwargs)
    except TemplateError:  # it takes no assistant's turn
        return []
    after = tokenizer.encode(text.rpartition(said)[2].lstrip(), add_special_tokens=False)
    special = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}
    return [token for token in after[:1] if token in special]


def warn_of_unknown(generation_kwargs: Mapping[str, Any] | None) -> None:
    """Names what transformers would leave aside without a word."""
    unknown = sorted((generation_kwargs or {}).keys() - vars(GenerationConfig()).keys() - set(STOPS))
    if unknown:
        logger.warning("`generation_kwargs` gives %s, which transformers does not know.", ", ".join(unknown))


def make_vllm_kwargs(generation_kwargs: Mapping[str, Any] | None, ends: Sequence[int]) -> dict[str, Any]:
    """What vLLM samples with. Its engine reads the base's own end tokens only, so it is given all of them."""
    given = {name: value for name, value in (generation_kwargs or {}).items() if name not in STOPS}
    return given | {"stop_token_ids": list(ends)}


# Completions with their texts, as kinds of task read them.


_TAIL = 8  # tokens; an opening tag and the blanks behind it


def make_completions(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[list[int]],
    completion_ids: Sequence[list[int]],
    logprobs: Sequence[list[float]] | None = None,
) -> list[Completion]:
    """
    What was generated, row by row, with its text, which has no special tokens. Where the chat template has opened a
    thought at the end of the prompt, the text begins with the tag: without it a thought that is never closed would
    read as an answer.
    """
    said = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    tails = tokenizer.batch_decode([ids[-_TAIL:] for ids in prompt_ids])
    texts = [f"{THINK_OPEN}\n{text}" if opens_thinking(tail) else text for tail, text in zip(tails, said, strict=True)]
    found = [None] * len(texts) if logprobs is None else logprobs
    return [Completion(*row) for row in zip(prompt_ids, completion_ids, texts, found, strict=True)]


# Looking at a model that trains, so that its training never notices: samples of their own seed, and no dropout.


@contextmanager
def pause_training(model: nn.Module) -> Iterator[None]:
    """Inside the block there is no dropout; afterwards the model trains again if it did before."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def seed_samples(seeds: Sequence[int] | None) -> Iterator[None]:
    """
    Inside the block torch's generators, which all rows share, start from the first of the rows' seeds; afterwards they
    are where they were. `None` does nothing.
    """
    if not seeds:
        yield
        return
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = [] if accelerator is None else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(devices=devices, device_type="cuda" if accelerator is None else accelerator.type):
        torch.manual_seed(seeds[0])
        yield
