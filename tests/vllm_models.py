"""A base that vLLM's CPU engine serves, members on it, and what transformers says about their completions."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from accelerate import Accelerator
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_populora.lora.layers import Router, add_members
from trl_populora.lora.members import read_member, write_member

from .models import save_byte_base


# One GiB of cache instead of a share of this machine's memory, and one unbound thread: OpenMP threads that spin while
# they wait for a core make the tiny engine twenty times slower when the machine has other work. Compiled, one small
# function of the sampler costs every process 20 s. As on one GPU, a server's engine computes in its own process; on a
# CPU it would start another for that, and spin while it waits for it.
ENGINE_ENVIRONMENT = {
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
}


def make_served_base(path) -> str:
    """Saves a random Qwen3 with heads of 32, the smallest that vLLM's CPU attention knows."""
    return save_byte_base(path, width=64)


def make_population(base: str, members: int, rank: int = 4, **options):
    """`(model, names, router)` with B = 0 in every member."""
    names, router = [f"member_{i}" for i in range(members)], Router()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", **options)
    return add_members(model, names, config, router, seed=0), names, router


def colocate(model, names: list[str], router: Router, base: str, directory: Path, **engine):
    """A `PopulationGeneration` with an engine in this process."""
    from trl_populora.generate.vllm import PopulationGeneration

    return PopulationGeneration(
        model,
        members=names,
        router=router,
        output_dir=str(directory),
        # Compiling the two layers takes half a minute; what is tested does not depend on it.
        engine_kwargs={"enforce_eager": True} | engine,
        accelerator=Accelerator(cpu=True),
        processing_class=AutoTokenizer.from_pretrained(base),
        max_model_length=256,
        max_num_seqs=64,
        max_completion_length=16,
    )


def randomise(model, name: str, seed: int) -> None:
    """Gives a member factors large enough to change most of what it says."""
    generator = torch.Generator().manual_seed(seed)
    factors = read_member(model, name)
    write_member(model, name, {key: 0.3 * torch.randn(v.shape, generator=generator) for key, v in factors.items()})


@torch.no_grad()
def logprobs_of(
    model, router: Router, rows, prompts, completions, temperature: float | torch.Tensor = 1.0
) -> list[list[float]]:
    """
    Log-probabilities of the completions' tokens, by transformers, every row with its own member. `temperature` may be
    `[R, 1, 1]`.
    """
    longest = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids[i, : len(prompt) + len(completion)] = torch.tensor([*prompt, *completion])
    with router.route_to(rows):
        logps = (model(ids).logits / temperature).log_softmax(-1)
    taken = logps[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    return [
        taken[i, len(prompt) - 1 : len(prompt) - 1 + len(completion)].tolist()
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]


def largest_difference(some: list[list[float]], others: list[list[float]]) -> float:
    """Largest difference between two sets of per-token values of the same shape."""
    pairs = [pair for row in zip(some, others, strict=True) for pair in zip(*row, strict=True)]
    return max(abs(a - b) for a, b in pairs)


def generate_on(client, rows: list[int], prompts: list[list[int]], members: int, wait: float = 0.0) -> tuple:
    """
    Lets each row that has ended ask for two more, of the next member; `wait` are seconds that this takes.

    Returns:
        Rows, prompts, completions and log-probabilities, the further ones last, and how many rows ended at a time.
    """
    rows, prompts, told = list(rows), list(prompts), []

    def follow(ended: dict[int, list[int]]) -> tuple[list[list[int]], list[int]]:
        time.sleep(wait)
        told.append(len(ended))
        further = [[5, row % 256, len(ended[row])] for row in sorted(ended) for _ in range(2)]
        writers = [(rows[row] + 1) % members for row in sorted(ended) for _ in range(2)]
        prompts.extend(further)
        rows.extend(writers)
        return further, writers

    client.generation.follow = follow
    try:
        completions, logprobs = client.generate(list(rows), prompts)
    finally:
        client.generation.follow = None
    return rows, prompts, completions, logprobs, told
