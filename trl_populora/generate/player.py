"""Lets members answer without a trainer, finds the tokens that end a completion, and makes `Completion`s of token ids.

    messages_R, members_R --tokenize--> prompt ids_R --complete (transformers.py)--> completion ids_R
                                                     --make_completions--> Completions_R, with text

The trainer has its own way to generate (`PopuLoRATrainer._generate_rows`), which shares the end tokens, the seeds and
`make_completions` with this file.

Shapes: R rows.
"""

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
from trl_populora.tasks.python.reading import THINK_CLOSE, THINK_OPEN, opens_thinking

from . import transformers as decoding


def make_sampling_config(
    base: GenerationConfig, tokenizer: PreTrainedTokenizerBase, args: GRPOConfig
) -> GenerationConfig:
    """Makes the generation config with which the trainer of a run with these settings would sample."""
    warn_of_unknown(args.generation_kwargs)
    known = list_known_ends(base, tokenizer)
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
    Makes a player that generates as the trainer of a run with these settings would, without vLLM.

    Args:
        model: The model with its members, or a base without members. Its generation config is replaced, and it is put
            into evaluation mode.
        tokenizer: A tokenizer with a chat template.
        router: The router that the model's layers read.
        members: Names of the members. The position of a name is the member's index in routes.
        args: Settings of the run; those of sampling and of the chat template are read.
    """
    index = {name: number for number, name in enumerate(members)} | {BASE_NAME: BASE}
    model.eval()
    # The base's generation config is replaced, because `generate` takes from it what our config leaves at the default.
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    config = base.generation_config = make_sampling_config(base.generation_config, tokenizer, args)
    whole = decoding.why_no_rounds(base.config, config, sharded=False, spread=decoding.is_spread(base))
    complete = decoding.complete_whole if whole else decoding.complete

    def generate(
        prompts: list[Messages], names: Sequence[str], seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        ids = tokenize(tokenizer, prompts, args)
        with seed_samples(seeds):
            completions = complete(model, ids, [index[name] for name in names], router.route_to, config)
        return make_completions(tokenizer, ids, completions)

    return Player(generate)


def tokenize(tokenizer: PreTrainedTokenizerBase, prompts: list[Messages], args: GRPOConfig) -> list[list[int]]:
    """Turns conversations into token ids, up to where the assistant begins to write."""
    # Too long prompts are tokenized on purpose, to find out that they are too long. The tokenizer need not warn.
    quiet = {"tokenizer_kwargs": {"verbose": False}}
    return tokenizer.apply_chat_template(
        prompts,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **(quiet | (args.chat_template_kwargs or {})),
    )["input_ids"]


def make_free_token_counter(
    base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: GRPOConfig
) -> Callable[[Messages], int]:
    """
    Makes the function that says how many tokens of a base's context a prompt leaves free beside the longest completion
    (see [`~trl_populora.step.referee.count_free_tokens`]).
    """
    longest = args.max_completion_length
    return count_free_tokens(
        trained_context(base), longest, lambda prompt: tokenize(tokenizer, [prompt], args)[0], tokenizer
    )


# Which tokens end a completion: those that TRL knows, the chat template's end of turn, and the user's stops.


logger = logging.getLogger(__name__)

TEXT_STOPS = ("stop", "stop_strings")  # what vLLM and what transformers call the option for stops that are text
STOPS = ("stop_token_ids", "eos_token_id", *TEXT_STOPS)


def list_known_ends(base: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Lists the end tokens that a tokenizer and a base's generation config name."""
    named = base.eos_token_id if isinstance(base.eos_token_id, list) else [base.eos_token_id]
    return [token for token in (tokenizer.eos_token_id, *named) if token is not None]


def find_end_tokens(
    tokenizer: PreTrainedTokenizerBase,
    known: Sequence[int],
    generation_kwargs: Mapping[str, Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    converses: bool = True,
) -> list[int]:
    """
    Finds the token ids that end a completion. A completion whose last token is another one was cut off.

    Args:
        tokenizer: The tokenizer, whose chat template says how an assistant's turn ends.
        known: End tokens of the tokenizer and of the model.
        generation_kwargs: The option of this name. It may hold stops, under vLLM's names or transformers' names.
        template_kwargs: Arguments of the chat template.
        converses: Whether prompts are conversations. No template ends a completion of plain text.

    Returns:
        The ids, each once: known ones first, then the chat template's, then the user's.

    Raises:
        `ValueError`: If a stop is text that is not exactly one token. A completion that ends there would count as cut
            off.
    """
    ids = [*known, *(_find_end_of_turn(tokenizer, template_kwargs or {}) if converses else ())]
    for name in STOPS:
        value = (generation_kwargs or {}).get(name)
        stops = [] if value is None else value if isinstance(value, (list, tuple)) else [value]
        for stop in stops:
            # Under the names in `TEXT_STOPS` a stop is text, under the others a token id.
            tokens = tokenizer.encode(stop, add_special_tokens=False) if name in TEXT_STOPS else [int(stop)]
            if len(tokens) != 1:
                raise ValueError(
                    f"`generation_kwargs` gives {name}={stop!r}, which is {len(tokens)} tokens. A completion that "
                    "ends there would count as cut off. Give single tokens as `stop_token_ids`."
                )
            ids += tokens
    return list(dict.fromkeys(ids))  # a dict keeps the order, so every process gets the same list


def _find_end_of_turn(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> list[int]:
    """Finds the special token that the chat template puts right after an assistant's words; empty if there is none."""
    # Some models end a turn with a token that neither the tokenizer nor the model's config names. If that token did
    # not count as an end, completions would run on to `max_completion_length`.
    said = "said"
    turn = [{"role": "user", "content": "asked"}, {"role": "assistant", "content": said}]
    try:
        text = tokenizer.apply_chat_template(turn, tokenize=False, **template_kwargs)
    except TemplateError:  # some templates refuse a turn of the assistant
        return []
    after = tokenizer.encode(text.rpartition(said)[2].lstrip(), add_special_tokens=False)
    special = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}
    return [token for token in after[:1] if token in special]


def warn_of_unknown(generation_kwargs: Mapping[str, Any] | None) -> None:
    """Warns of options in `generation_kwargs` that transformers would ignore without a word."""
    unknown = sorted((generation_kwargs or {}).keys() - vars(GenerationConfig()).keys() - set(STOPS))
    if unknown:
        logger.warning(
            "`generation_kwargs` gives %s, which transformers does not know and ignores.", ", ".join(unknown)
        )


def make_vllm_kwargs(generation_kwargs: Mapping[str, Any] | None, ends: Sequence[int]) -> dict[str, Any]:
    """Makes vLLM's sampling options: the user's, but with `ends` in place of the user's stops, and without a seed."""
    # By itself the engine stops only at the end tokens that the base's own files name.
    given = {name: value for name, value in (generation_kwargs or {}).items() if name not in STOPS}
    if (seed := given.pop("seed", None)) is not None:
        logger.warning(
            "`generation_kwargs` gives seed=%s, which is ignored: with one seed for all requests, every process would "
            "sample the same answers to a prompt. Set `seed`, the run's own.",
            seed,
        )
    return given | {"stop_token_ids": list(ends)}


# How bases spell the tags of a thought, and the spelling that this package reads. In some tokenizers the tags are
# special tokens.
THINK_TOKENS = {THINK_OPEN: THINK_OPEN, "[THINK]": THINK_OPEN, THINK_CLOSE: THINK_CLOSE, "[/THINK]": THINK_CLOSE}

_TAIL = 8  # tokens at the end of a prompt: enough for an opening tag and the white space behind it


def make_completions(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[list[int]],
    completion_ids: Sequence[list[int]],
    logprobs: Sequence[list[float]] | None = None,
) -> list[Completion]:
    """
    Makes a `Completion` of each row. Of the special tokens only the tags of a thought stay in its text. They are spelt
    `THINK_OPEN` and `THINK_CLOSE` there, however the base spells them.

    Some chat templates open a thought at the end of the prompt. The text then gets the opening tag in front, because
    without the tag a thought that is never closed would be read as an answer.
    """
    said = _decode(tokenizer, completion_ids)
    tails = map(_spell_tags, tokenizer.batch_decode([ids[-_TAIL:] for ids in prompt_ids]))
    texts = [f"{THINK_OPEN}\n{text}" if opens_thinking(tail) else text for tail, text in zip(tails, said, strict=True)]
    found = [None] * len(texts) if logprobs is None else logprobs
    return [Completion(*row) for row in zip(prompt_ids, completion_ids, texts, found, strict=True)]


def _decode(tokenizer: PreTrainedTokenizerBase, rows: Sequence[list[int]]) -> list[str]:
    """Turns token ids into text. Drops all special tokens except the tags of a thought."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
    tags = {number for number in special if number in added and added[number].content in THINK_TOKENS}
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
    for row, ids in enumerate(rows):
        # `batch_decode` drops the tags if they are special tokens. So rows with tags are decoded once more.
        if tags.intersection(ids):
            texts[row] = _spell_tags(tokenizer.decode([number for number in ids if number not in special - tags]))
    return texts


def _spell_tags(text: str) -> str:
    """Replaces each base's spelling of the tags of a thought by the one that this package reads."""
    for spelt, read in THINK_TOKENS.items():
        text = text.replace(spelt, read)
    return text


# An evaluation in the middle of training must not change the training: it runs without dropout, and draws from seeds
# of its own.


@contextmanager
def pause_training(model: nn.Module) -> Iterator[None]:
    """Switches off dropout inside the block. Afterwards the model is in training mode again if it was before."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def seed_samples(seeds: Sequence[int] | None) -> Iterator[None]:
    """
    Seeds torch's generators inside the block. Afterwards the generators of the CPU and of the current accelerator get
    their earlier state back.

    transformers samples all rows with one generator, so the first row's seed stands for all. vLLM has one seed per
    row. Without seeds nothing happens.
    """
    if not seeds:
        yield
        return
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = [] if accelerator is None else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(devices=devices, device_type="cuda" if accelerator is None else accelerator.type):
        torch.manual_seed(seeds[0])
        yield
