"""A player without a trainer: members of a live model answer with transformers, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig

from trl_populora.adapters.routing import BASE, BASE_NAME, Router
from trl_populora.step.player import Completion, Messages, Player
from trl_populora.step.referee import count_free_tokens, trained_context

from . import decoding
from .sampling import seed_samples
from .stops import STOPS, end_tokens, warn_of_unknown
from .texts import as_completions


def sampling_config(base: GenerationConfig, tokenizer: PreTrainedTokenizerBase, args: GRPOConfig) -> GenerationConfig:
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
            "eos_token_id": end_tokens(tokenizer, known, args.generation_kwargs, args.chat_template_kwargs),
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


def plain_player(
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
    config = base.generation_config = sampling_config(base.generation_config, tokenizer, args)
    complete = decoding.complete_whole if decoding.why_whole(base.config, config, sharded=False) else decoding.complete

    def generate(
        prompts: list[Messages], names: Sequence[str], seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        ids = tokenize(tokenizer, prompts, args)
        with seed_samples(seeds):
            completions = complete(model, ids, [index[name] for name in names], router.rows_of, config)
        return as_completions(tokenizer, ids, completions)

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


def plain_room(
    base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: GRPOConfig
) -> Callable[[Messages], int]:
    """How much room such a player has for a prompt, as [`count_free_tokens`] has it."""
    longest = args.max_completion_length
    return count_free_tokens(
        trained_context(base), longest, lambda prompt: tokenize(tokenizer, [prompt], args)[0], tokenizer
    )
