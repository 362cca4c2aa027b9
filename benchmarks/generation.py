"""Attempts at tasks on the tiny base: in rounds (`trl_populora.generate.transformers`) against one call of `generate`.

    python benchmarks/generation.py [--repeats 5] [--tasks 16] [--worked]
    python benchmarks/generation.py --model models/SmolLM2-135M-Instruct --repeats 2     # real seed tasks, bf16

Four students, 8 attempts at each task, at most 200 tokens, as in the quick start. Both sides sample from the same
members; they alternate, and the ratio is the median over the repeats, of CPU seconds. `--worked` asks for answers that
think first, as at the end of a quick start: longer ones, of which fewer end early. `generate` has transformers' own
attention (`trl_populora.generate.transformers` is switched off for it). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from trl_populora.assets import real_seed_tasks, tiny_base_path
from trl_populora.generate import transformers as decoding
from trl_populora.generate.transformers import complete, complete_whole, group_queries
from trl_populora.lora.layers import Router, add_members
from trl_populora.tasks.archive import load_seed_tasks
from trl_populora.tasks.python.kinds import CodeO


STUDENTS, ATTEMPTS = 4, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--worked", action="store_true")
    parser.add_argument("--model", help="directory of another base, which is asked in turns")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    path, style = (arguments.model, "turns") if arguments.model else (tiny_base_path(), "compact")
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    router = Router()
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    base = AutoModelForCausalLM.from_pretrained(path, dtype="auto" if arguments.model else torch.float32)
    model = add_members(base, [f"student_{i}" for i in range(STUDENTS)], config, router, seed=0).eval()
    sampling = GenerationConfig(
        max_new_tokens=200, do_sample=True, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id
    )
    kind = CodeO()
    known = load_seed_tasks(real_seed_tasks()) if arguments.model else load_seed_tasks()
    tasks = [task for task in known if task.kind == kind.name][: arguments.tasks]
    prompts = [
        tokenizer.apply_chat_template(kind.solving_prompt(task, style), add_generation_prompt=True, tokenize=False)
        + ("<think>\n" if arguments.worked else "")
        for task in tasks
    ]
    rows = [ids for ids in tokenizer(prompts)["input_ids"] for _ in range(ATTEMPTS)]
    members = [i // ATTEMPTS % STUDENTS for i in range(len(rows))]

    seconds: dict[str, list[float]] = {"whole": [], "in rounds": []}
    tokens = {}
    for repeat in range(arguments.repeats + 1):
        for name, generate in (("whole", complete_whole), ("in rounds", complete)):
            torch.manual_seed(repeat)
            decoding.group_queries = nullcontext if name == "whole" else group_queries
            start = time.process_time()
            found = generate(model, rows, members, router.route_to, sampling)
            if repeat:  # the first is a warm-up
                seconds[name].append(time.process_time() - start)
            tokens[name] = max(map(len, found))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"{name:>10}: {median:6.2f} s for {len(rows)} rows, the longest of {tokens[name]} tokens")
    ratios = [new / old for old, new in zip(seconds["whole"], seconds["in rounds"], strict=True)]
    print(
        json.dumps(
            {
                "generate_ratio": round(statistics.median(ratios), 3),
                "rows": len(rows),
                "worked": arguments.worked,
                "seconds_whole": round(medians["whole"], 2),
                "seconds_in_rounds": round(medians["in rounds"], 2),
            }
        )
    )


if __name__ == "__main__":
    main()
