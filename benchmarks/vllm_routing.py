"""Serving eight members in one batch, and publishing them, against the ways there are without routing.

    python benchmarks/vllm_routing.py [--quick] [--tokens 48] [--rank 32] [--clock cpu] [--model DIR]

Generation, on the tiny base or, in bf16, on that of `--model`: (a) eight members mixed in one batch, (b) the same rows
as eight batches of one member each, (c) the same rows all through one member. Interleaved repeats after a warm-up,
medians, tokens per second; every row is made to give the same number of tokens.

Publishing: eight members that all moved, from memory, against TRL's own `sync_weights`, which merges one adapter into
the base, hands every base weight to the engine and takes the adapter out again: once, times eight. At the size of that
base, and with the shapes of Qwen2.5-0.5B filled at random. `publishing.py` has memory against files.

Needs vLLM (on a machine without GPU: `VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1`); no network. On a GPU all of it is
there, in bf16, with CUDA graphs. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace


sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))

import torch
from accelerate import Accelerator
from budget import SHAPES
from gpu_population import make_base
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl.generation.vllm_generation import VLLMGeneration
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
from vs_trl import graphs_up_to

from trl_populora.assets import tiny_base_path
from trl_populora.generate.vllm import PopulationGeneration
from trl_populora.lora.layers import Router, add_members
from trl_populora.lora.members import read_member, write_member


MEMBERS, ROWS_PER_MEMBER = 8, 8
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL_DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # vLLM's GPU kernels know no fp32 adapters
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def make_generation(
    base: str,
    rank: int,
    dtype: torch.dtype,
    directory: str,
    tokens: int = 1,
    rows: int = MEMBERS * ROWS_PER_MEMBER,
    share: float = 0.2,  # of the card: here come three engines, one after the other, and not each gives all of it back
) -> tuple:
    """`(generation, model, names, router)` of eight members, which say so many tokens in so many rows at a time."""
    names, router = [f"member_{i}" for i in range(MEMBERS)], Router()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).to(DEVICE)
    model = add_members(
        model, names, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"), router, seed=0
    )
    generation = PopulationGeneration(
        model,
        members=names,
        router=router,
        output_dir=directory,
        accelerator=Accelerator(cpu=DEVICE.type == "cpu"),
        processing_class=None,
        max_model_length=512,
        max_num_seqs=rows,
        gpu_memory_utilization=share,
        max_completion_length=tokens,
        generation_kwargs={"ignore_eos": True},
        engine_kwargs={"enforce_eager": True} if DEVICE.type == "cpu" else graphs_up_to(rows),
    )
    return generation, model, names, router


def move(model, names: list[str], seed: int) -> None:
    """Changes every tensor of every member, as an optimizer step does."""
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        factors = read_member(model, name)
        noise = {key: torch.randn(value.shape, generator=generator) for key, value in factors.items()}
        write_member(model, name, {key: 0.02 * noise[key] for key in factors})


class Clock:
    """Measures actions on the wall, or in seconds of this process's CPU time, which other work does not disturb."""

    def __init__(self, name: str):
        self.now = CLOCKS[name]

    def seconds(self, action: Callable[[], object]) -> float:
        start = self.now()
        action()
        return self.now() - start


def measure_generation(
    clock: Clock, base: str, dtype: torch.dtype, repeats: int, rank: int, tokens: int, directory: str
) -> dict[str, float]:
    """Tokens per second of each way."""
    generation, model, names, router = make_generation(base, rank, dtype, directory, tokens)
    move(model, names, seed=1)
    generation.sync_weights()
    rng = random.Random(0)

    def generate(rows: list[int]) -> None:
        # Fresh prompts each time: the prefix cache must not help one way more than another.
        prompts = [[rng.randrange(3, 400) for _ in range(32)] for _ in rows]
        with router.route_to(rows):
            _, completions, _, _ = generation.generate(prompts, None, 1)
        if {len(completion) for completion in completions} != {tokens}:
            raise RuntimeError("Rows of different length: the comparison would not be of equal work.")

    mixed = [*range(MEMBERS)] * ROWS_PER_MEMBER
    ways = {
        "mixed": lambda: generate(mixed),
        "sequential": lambda: [generate([member] * ROWS_PER_MEMBER) for member in range(MEMBERS)],
        "one": lambda: generate([0] * len(mixed)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for action in ways.values():
        action()
    for _ in range(repeats):
        for name, action in ways.items():
            times[name].append(clock.seconds(action))
    generation.close()
    return {name: len(mixed) * tokens / statistics.median(values) for name, values in times.items()}


def measure_publishing(
    clock: Clock, base: str, rank: int, dtype: torch.dtype, repeats: int, directory: str
) -> dict[str, float]:
    """Seconds: `ours` for eight members that moved, `nothing` when none did, `trl` for one adapter TRL's way."""
    generation, model, names, _ = make_generation(base, rank, dtype, directory)
    ours, nothing = [], []
    for repeat in range(repeats + 1):
        move(model, names, seed=repeat)
        ours.append(clock.seconds(generation.sync_weights))
        nothing.append(clock.seconds(generation.sync_weights))
    trl = measure_trl(clock, generation.llm, base, rank, dtype, repeats)
    generation.close()
    del generation, model
    gc.collect()
    return {"ours": statistics.median(ours[1:]), "nothing": statistics.median(nothing[1:]), "trl": trl}


class MergeAndLoad(VLLMGeneration):
    """
    TRL's own weight sync into vLLM's own model, the same class with the same loaders as in the engine.

    vLLM's CPU engine cannot load weights a second time (it repacks them and drops the loaders), so a second model of
    that class, built from the engine's configuration and never repacked, takes its place.

    Args:
        engine (`vllm.LLM`): An engine for the same base.
        **kwargs: Arguments of `VLLMGeneration`.
    """

    def __init__(self, engine, **kwargs):
        self.engine = engine
        super().__init__(**kwargs)

    def _init_vllm(self) -> None:
        config = self.engine.llm_engine.vllm_config
        with set_default_torch_dtype(config.model_config.dtype), DEVICE:
            model = initialize_model(config, prefix="second.")
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        executor = SimpleNamespace(driver_worker=worker)
        self.llm = SimpleNamespace(
            llm_engine=SimpleNamespace(model_executor=executor), reset_prefix_cache=self.engine.reset_prefix_cache
        )


def measure_trl(clock: Clock, engine, base: str, rank: int, dtype: torch.dtype, repeats: int) -> float:
    """Seconds of TRL's way for one adapter: merge, hand over all base weights, take the adapter out again."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).to(DEVICE)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", init_lora_weights=False)
    generation = MergeAndLoad(
        engine,
        model=get_peft_model(model, config),
        accelerator=Accelerator(cpu=DEVICE.type == "cpu"),
        processing_class=None,
    )
    return statistics.median([clock.seconds(generation.sync_weights) for _ in range(repeats + 1)][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, help="timed repeats of each way to generate, 7 or, quick, 3")
    parser.add_argument("--tokens", type=int, default=48, help="tokens that each row gives")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for a machine that has other work")
    parser.add_argument("--quick", action="store_true", help="nothing of the size of 0.5B")
    parser.add_argument("--model", help="directory of another base than the tiny one, taken in bf16")
    options = parser.parse_args()
    clock = Clock(options.clock)
    repeats = options.repeats or (3 if options.quick else 7)
    publishings = min(3, repeats)

    with tempfile.TemporaryDirectory() as directory:
        small, dtype = (options.model, torch.bfloat16) if options.model else (tiny_base_path(), SMALL_DTYPE)
        rates = measure_generation(clock, small, dtype, repeats, options.rank, options.tokens, directory)
        bases = {"small": (small, dtype)}
        if not options.quick:
            shape = SHAPES["Qwen/Qwen2.5-0.5B-Instruct"]
            bases["0.5B"] = (make_base(shape, Path(directory, "half"), "cpu", torch.bfloat16), torch.bfloat16)
        publishing = {}
        for size, (base, dtype) in bases.items():
            publishing[size] = measure_publishing(clock, base, options.rank, dtype, publishings, directory)

    rows = f"{ROWS_PER_MEMBER} rows each, {options.tokens} tokens a row"
    print(f"\n{MEMBERS} members, rank {options.rank}, {rows}, {options.model or 'tiny base'}")
    for name, text in {"mixed": "(a) mixed", "sequential": "(b) one after the other", "one": "(c) one member"}.items():
        print(f"  {text:<26}{rates[name]:>9.0f} tokens/s")
    for size, values in publishing.items():
        print(f"publishing at {size} size")
        print(f"  8 members, changed        {values['ours']:>9.4f} s")
        print(f"  8 members, unchanged      {values['nothing']:>9.4f} s")
        print(f"  TRL, 1 adapter, times 8   {8 * values['trl']:>9.4f} s")
    largest = list(publishing)[-1]
    result = {
        "mixed_vs_one": rates["mixed"] / rates["one"],
        "mixed_vs_sequential": rates["mixed"] / rates["sequential"],
        "publish_vs_trl": 8 * publishing[largest]["trl"] / publishing[largest]["ours"],
        "publish_seconds_8": publishing[largest]["ours"],
        "publish_vs_trl_small": 8 * publishing["small"]["trl"] / publishing["small"]["ours"],
        "publish_seconds_8_small": publishing["small"]["ours"],
        "publish_nothing_seconds": publishing[largest]["nothing"],
        "tokens_per_s": {name: round(rate) for name, rate in rates.items()},
    }
    print(json.dumps({key: round(v, 4) if isinstance(v, float) else v for key, v in result.items()}))


if __name__ == "__main__":
    main()
