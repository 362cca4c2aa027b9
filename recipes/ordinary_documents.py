"""
Ordinary instructions with the base's own answers: what a cold start shows beside its tasks, so that the base keeps
what it could do. `instructions.txt` has the instructions, one a line. Used by `cold_start.py`.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from cold_documents import Document
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl_populora.config import PopuLoRAConfig
from trl_populora.generate.player import find_end_tokens


SOURCE = Path(__file__).with_name("instructions.txt")
LONGEST = 320  # tokens of an answer; one that goes on is dropped
BATCH = 16  # answers that are generated together


def read_instructions() -> list[str]:
    return [line.replace("\\n", "\n") for line in SOURCE.read_text(encoding="utf-8").splitlines()]


def answer_instructions(
    base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: PopuLoRAConfig, count: int
) -> list[Document]:
    """
    Up to `count` ordinary instructions, in random order, each with the base's greedy answer. There are fewer where the
    base does not come to an end.
    """
    instructions, found = read_instructions(), list[Document]()
    random.Random(args.seed).shuffle(instructions)
    known = torch.atleast_1d(torch.as_tensor(base.generation_config.eos_token_id or [])).tolist()
    ends = find_end_tokens(tokenizer, known, template_kwargs=args.chat_template_kwargs)
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
        with torch.inference_mode():
            rows = base.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=LONGEST,
                eos_token_id=ends,
                pad_token_id=tokenizer.pad_token_id,
            )
        for prompt, row in zip(prompts, rows[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            stop = next((place for place, token in enumerate(row) if token in ends), None)
            if stop is not None and len(found) < count:
                found.append(Document("ordinary", prompt, tokenizer.decode(row[:stop])))
        progress.update(len(found) - progress.n)
        if len(found) == count:
            break
    progress.close()
    return found
