"""What a copy of every LoRA layer's input in fp32 costs under bf16 autocast.

PEFT casts a layer's input to the type of the adapter's weights, which are fp32 beside a bf16 base. Under autocast the
product is computed in bf16 all the same, but the copy is kept for the backward. Compared, each in a fresh process:
stock PEFT, stock PEFT told not to cast, and this package's layer with one member. Peak of resident memory of a forward
and a backward beyond what the loaded model holds, seconds, and whether all gradients are bitwise those of stock PEFT.

    python benchmarks/input_cast.py --model models/SmolLM2-135M-Instruct

The last line is one JSON object; `peak_ratio` is this package's peak over stock PEFT's.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time

import torch
from joint_training import peak_resident_bytes
from peft import LoraConfig, get_peft_model
from peft.helpers import disable_input_dtype_casting
from transformers import AutoModelForCausalLM

from trl_populora.lora.layers import Router, add_members


SIDES = ("stock", "stock without the cast", "this package")


def measure(side: str, path: str, rows: int, tokens: int, rank: int) -> None:
    """Prints one side's figures as JSON: peak bytes beyond the model's, seconds, digest of the gradients."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    if side == SIDES[2]:
        router = Router()
        model = add_members(model, ["only"], config, router, seed=0)
        router.set(torch.zeros(rows, dtype=torch.long))
    else:
        model = get_peft_model(model, config, "only")
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            # Of all sides the same. With B = 0, A would get no gradient.
            weight.data = torch.randn(weight.shape, generator=generator) * (0.02 if "lora_B" in name else 0.1)
    ids = torch.randint(100, 1000, (rows, tokens), generator=generator)
    model.train()
    uncast = disable_input_dtype_casting(model) if side == SIDES[1] else contextlib.nullcontext()
    held, start = peak_resident_bytes(), time.perf_counter()
    with uncast, torch.autocast("cpu", torch.bfloat16):
        hidden = model.get_base_model().model(ids).last_hidden_state
    hidden.float().square().mean().backward()  # without the head, whose logits would hide the layers
    seconds, peak = time.perf_counter() - start, peak_resident_bytes()
    digest = hashlib.sha256()
    for _, weight in sorted(model.named_parameters()):
        if weight.requires_grad:
            if not weight.grad.isfinite().all():
                raise RuntimeError("A gradient is not finite, and equal ones would say nothing.")
            digest.update(weight.grad.float().numpy().tobytes())
    print(json.dumps([peak - held, seconds, digest.hexdigest()]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of a bf16 base")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        measure(options.side, options.model, options.rows, options.tokens, options.rank)
        return
    variables = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed tensors go back to the system
    found = {}
    for side in SIDES:
        command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
        done = subprocess.run(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True)
        found[side] = peak, seconds, digest = json.loads(done.stdout.splitlines()[-1])
        equal = "the same" if digest == found["stock"][2] else "others"
        print(f"{side:24} peak {peak / 2**30:.2f} GiB, {seconds:.1f} s, gradients: {equal}", flush=True)
    stock, uncast, ours = (found[side] for side in SIDES)
    figures = {
        "peak_ratio": round(ours[0] / stock[0], 4),
        "peak_ratio_of_the_cast": round(uncast[0] / stock[0], 4),
        "equal_gradients": ours[2] == uncast[2] == stock[2],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
