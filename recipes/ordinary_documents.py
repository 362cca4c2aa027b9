"""
Ordinary instructions with the base's own answers, for a cold start to show beside its tasks. `instructions.txt` has
the instructions, one a line. Used by `cold_start.py`.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list
from cold_documents import Document
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import is_deepspeed_zero3_enabled

from trl_populora.config import PopuLoRAConfig
from trl_populora.generate.player import make_sampling_config


SOURCE = Path(__file__).with_name("instructions.txt")
LONGEST = 320  # tokens of an answer; one that goes on is dropped
BATCH = 16  # answers that are generated together


def read_instructions() -> list[str]:
    return [line.replace("\\n", "\n") for line in SOURCE.read_text(encoding="utf-8").splitlines()]


def gather_weights(base: PreTrainedModel) -> AbstractContextManager:
    """Gathers the weights that ZeRO-3 has split among the ranks, for one block. Without ZeRO-3 it does nothing."""
    if not is_deepspeed_zero3_enabled():
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([*base.parameters()])


def answer_instructions(
    base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: PopuLoRAConfig, count: int
) -> list[Document]:
    """
    Up to `count` ordinary instructions, in random order, each with the base's greedy answer. There are fewer if the
    file has fewer that the base answers to an end.
    """
    instructions, found = read_instructions(), list[Document]()
    random.Random(args.seed).shuffle(instructions)
    run = make_sampling_config(base.generation_config, tokenizer, args)
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=LONGEST,
        repetition_penalty=1.0,
        eos_token_id=run.eos_token_id,
        pad_token_id=run.pad_token_id,
    )
    if base.device.type == "cpu":
        base.to(args.device)  # with several processes the base is not on their devices yet
    progress = tqdm(total=count, desc="ordinary answers", leave=False, disable=args.disable_tqdm)
    for first in range(0, len(instructions), BATCH):
        prompts = [[{"role": "user", "content": text}] for text in instructions[first : first + BATCH]]
        inputs = tokenizer.apply_chat_template(
            prompts,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            padding=True,
            tokenizer_kwargs={"padding_side": "left"},
            **(args.chat_template_kwargs or {}),
        ).to(base.device)
        with torch.no_grad(), gather_weights(base):
            rows = base.generate(**inputs, generation_config=greedy)[:, inputs["input_ids"].shape[1] :].tolist()
        for prompt, row in zip(prompts, rows, strict=True):
            end = next((place for place, token in enumerate(row) if token in run.eos_token_id), 0)
            answer = tokenizer.decode(row[:end])
            if answer.strip() and len(found) < count:
                found.append(Document("ordinary", prompt, answer))
        progress.update(len(found) - progress.n)
        if len(found) == count:
            break
    progress.close()
    (found,) = broadcast_object_list([found])  # ranks may round differently
    return found
