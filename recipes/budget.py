"""Memory and time of a GPU recipe, worked out on paper; nothing is loaded, downloaded or measured.

    python recipes/budget.py recipes/Qwen2.5-0.5B-Instruct/config_2t2s.yaml --gpu RTX-4090
    python recipes/budget.py recipes/Qwen2.5-Coder-7B/config_4t4s_8gpu.yaml --gpu A100-80GB --processes 8

Prints what one GPU of the training node holds at its fullest moment, for prompts as they are at the start of a run and
for the longest that the limits of the task kinds allow, then the room left for vLLM's cache, and the seconds of a
step. Parameters are exact (a test compares them with transformers and PEFT). Bytes that activations need were counted
with saved-tensor hooks on one routed decoder layer under bf16 autocast. What is merely assumed is a constant with a
name.

What it leaves out: fragmentation beyond `RESERVE`, other engines than vLLM, pipeline and tensor parallelism.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from transformers import Qwen2Config
from trl import TrlParser

from trl_populora.__main__ import TrainArguments
from trl_populora.model_options import MemberConfig
from trl_populora.populora_config import PopuLoRAConfig
from trl_populora.step.forwards import pair_cost
from trl_populora.tasks import CodeO


GIB = 2**30

# Assumed.
CHARS_PER_TOKEN = 3.0  # Python source under Qwen's tokenizer; every digit is a token of its own
RESERVE = 2.0 * GIB  # CUDA context, NCCL, allocator
GRAPHS = 1.0 * GIB  # vLLM's CUDA graphs
TRAINING_UTILIZATION = 0.35  # of peak FLOP/s
DECODING_UTILIZATION = 0.6  # of peak bandwidth or FLOP/s
LORA_SLOWDOWN = 1.5  # serving adapters costs a third of the decoding rate, however many there are (vLLM PR 11267)
MEAN_COMPLETION = 0.3  # of `max_completion_length`

# Measured on the embedded base; nobody knows it of a larger one. Mean of `batch/live_rows` over the 24 steps of
# recipes/tiny/quickstart.yaml, seed 0, on 22 November 2026; over 60 steps of recipes/tiny_headroom.py it was 0.48.
LIVE_ROWS = 0.54

# Characters of the instructions of a proposal prompt in the chat style, and of one seed task shown with it.
PROMPT_CHARS, SEED_REFERENCE_CHARS = 1300, 125


@dataclass(frozen=True)
class Shape:
    """What a model's config.json on the Hub says."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool

    @property
    def key_value_size(self) -> int:
        return self.hidden_size // self.num_attention_heads * self.num_key_value_heads

    @property
    def parameters(self) -> int:
        """All weights, with the biases of q, k and v and the norms."""
        h, kv = self.hidden_size, self.key_value_size
        layer = 2 * h * h + 2 * h * kv + 3 * h * self.intermediate_size + (h + 2 * kv) + 2 * h
        return (1 if self.tie_word_embeddings else 2) * self.vocab_size * h + self.num_hidden_layers * layer + h

    def adapter_parameters(self, rank: int) -> int:
        """One LoRA adapter on all linear layers but the head."""
        h, kv, i = self.hidden_size, self.key_value_size, self.intermediate_size
        return self.num_hidden_layers * rank * (2 * (h + h) + 2 * (h + kv) + 3 * (h + i))

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values in bf16."""
        return 2 * 2 * self.num_hidden_layers * self.key_value_size

    @property
    def layer_bytes_per_token(self) -> int:
        """
        One decoder layer while it is recomputed and differentiated: saved tensors are 8 bytes per intermediate and 25
        per hidden unit, and as much again is allowed for gradients in flight.
        """
        return 2 * (8 * self.intermediate_size + 25 * self.hidden_size)


SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": Shape(896, 24, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-Coder-7B": Shape(3584, 28, 28, 4, 18944, 152064, False),
}


@dataclass(frozen=True)
class Gpu:
    """Usable bytes, peak dense bf16 FLOP/s and bytes/s of NVIDIA's data sheets."""

    memory: float
    flops: float
    bandwidth: float


GPUS = {
    "RTX-4090": Gpu(23.5 * GIB, 165e12, 1.008e12),
    "A100-80GB": Gpu(79.1 * GIB, 312e12, 2.04e12),
    "H100-80GB": Gpu(79.1 * GIB, 989e12, 3.35e12),
}


@dataclass(frozen=True)
class Budget:
    """
    Args:
        trainer (`dict[str, float]`): Bytes of the training process by what holds them, at its fullest moment.
        engine (`dict[str, float]`): Bytes of one vLLM engine without its cache.
        engine_memory (`float`): Bytes that the engine may take on its GPU.
        cache_tokens (`int`): Tokens that fit into what is left of them.
        gpu_memory (`float`): Bytes of the training GPU.
        on_one_gpu (`float`): Bytes of trainer and colocated engine together.
    """

    trainer: dict[str, float]
    engine: dict[str, float]
    engine_memory: float
    cache_tokens: int
    gpu_memory: float
    on_one_gpu: float

    @property
    def fits(self) -> bool:
        return self.on_one_gpu <= self.gpu_memory and self.cache_tokens > 0


def prompt_tokens(references: int, longest: bool) -> int:
    """Tokens of a proposal's prompt with the package's seed tasks shown, or with tasks as long as the kinds allow."""
    reference = CodeO.max_program_chars + 2 * CodeO.max_value_chars if longest else SEED_REFERENCE_CHARS
    return round((PROMPT_CHARS + references * reference) / CHARS_PER_TOKEN)


def memory(args: PopuLoRAConfig, rank: int, shape: Shape, gpu: Gpu, processes: int, longest: bool) -> Budget:
    """What a GPU holds; rows of like length share a micro-batch, so its completions are as long as they may be."""
    members = args.teachers + args.students
    prompt = prompt_tokens(args.references_per_proposal, longest)
    tokens = args.per_device_train_batch_size * (prompt + args.max_completion_length)
    adapters = members * shape.adapter_parameters(rank)
    # Alone: fp32 weight, gradient, two moments. ZeRO-2: bf16 weight and gradient, and a share of the fp32 rest.
    per_parameter = 16 if processes == 1 else 4 + 12 / processes
    trainer = {
        "base, bf16": 2 * shape.parameters,
        "members, gradients, Adam": per_parameter * adapters,
        "checkpoints between layers": 2 * tokens * shape.hidden_size * shape.num_hidden_layers,
        "one layer, recomputed": tokens * shape.layer_bytes_per_token,
        "members of that layer, stacked": 8 * adapters / shape.num_hidden_layers,
        "head, in TRL's tiles": 2 * 4096 * 32768 + 4 * tokens * shape.hidden_size,
        "reserve": RESERVE,
    }
    colocated = args.vllm_mode == "colocate"
    rows = args.rows_per_step // engines_of(args, processes)
    engine = {
        "base, bf16": 2 * shape.parameters,
        "members, bf16": 2 * adapters,
        "sampler, fp32": 2 * 4 * rows * shape.vocab_size,
        "a batch of 4096 tokens": 4096 * shape.layer_bytes_per_token / 2,
        "CUDA graphs": GRAPHS,
    }
    engine_memory = gpu.memory * (args.vllm_gpu_memory_utilization if colocated else 0.9)  # 0.9 is a server's default
    left = engine_memory - sum(engine.values())
    both = sum(trainer.values()) + (engine_memory if colocated else 0)
    return Budget(trainer, engine, engine_memory, int(left / shape.cache_bytes_per_token), gpu.memory, both)


def levers(args: PopuLoRAConfig, shape: Shape) -> dict[str, float]:
    """
    By what the work of log-probabilities and update is multiplied, for the prompts of the start of a run.

    "live rows": rows without advantage are not computed. "shared prompts": a prompt stands once for as many attempts
    as a micro-batch has room for; it is bounded by the tokens of `per_device_train_batch_size` rows at the completion
    limit. Attention over the longer rows is counted, at the price per pair that was measured (`PAIR_SLOWDOWN` of
    `step/forwards.py`, benchmarks/RESULTS.md).
    """
    prompt = prompt_tokens(args.references_per_proposal, longest=False)
    completion = MEAN_COMPLETION * args.max_completion_length
    pair = pair_cost(Qwen2Config(**vars(shape)))
    room = args.per_device_train_batch_size * (prompt + args.max_completion_length)
    parts = math.ceil(args.attempts_per_task * completion / (room - prompt))  # of a group, each in a micro-batch

    def cost(rows: float) -> float:
        """Per row, of so many with one prompt."""
        tokens = prompt + rows * completion
        return tokens * (1 + pair * tokens) / rows

    attempts = args.attempts_per_task
    shared = (cost(1) + attempts * cost(attempts / parts)) / (1 + attempts) / cost(1)
    return {"live rows": LIVE_ROWS if args.beta == 0 else 1.0, "shared prompts": shared}


def seconds(args: PopuLoRAConfig, shape: Shape, gpu: Gpu, engines: int, processes: int, cache_tokens: int) -> dict:
    """
    Seconds of a step by phase, for the prompts of the start of a run.

    Decoding is bound by reading weights and cache or by arithmetic, whichever is slower. Training takes 8 FLOP per
    parameter and token: forward, its recomputation, the way back through frozen weights, and the old
    log-probabilities; of that the share of [`levers`]. A micro-batch of blank rows still reads the weights three
    times.
    """
    completion = MEAN_COMPLETION * args.max_completion_length
    row = prompt_tokens(args.references_per_proposal, longest=False) + completion
    rows = args.rows_per_step / engines
    running = min(rows, cache_tokens / row)
    read = 2 * shape.parameters + running * row * shape.cache_bytes_per_token
    round_seconds = max(read / gpu.bandwidth, running * 2 * shape.parameters / gpu.flops)
    tokens_per_second = running / (round_seconds * LORA_SLOWDOWN / DECODING_UTILIZATION)
    work = args.rows_per_step / processes * row * 8 * shape.parameters
    share = math.prod(levers(args, shape).values())
    blank = (1 - share) * args.micro_batches(processes) * 3 * 2 * shape.parameters
    return {
        "propose and solve": rows * completion / tokens_per_second,
        "log-probs and update": share * work / (gpu.flops * TRAINING_UTILIZATION) + blank / gpu.bandwidth,
    }


def read_recipe(path: str, output_dir: str = "runs/budget") -> tuple[PopuLoRAConfig, MemberConfig]:
    """Settings of a recipe; no GPU is asked for."""
    parser = TrlParser((TrainArguments, PopuLoRAConfig, MemberConfig))
    no_gpu = ["--use_cpu", "true", "--bf16", "false", "--output_dir", output_dir]
    _, args, model = parser.parse_args_and_config(["--config", path, *no_gpu])
    return args, model


def engines_of(args: PopuLoRAConfig, processes: int) -> int:
    """Engines that share a step's rows: one per process, or the servers of the list."""
    return processes if args.vllm_mode == "colocate" else len(args.vllm_server_base_url.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="YAML file")
    parser.add_argument("--gpu", choices=GPUS, default="A100-80GB")
    parser.add_argument("--processes", type=int, default=1, help="GPUs that train, under ZeRO-2 if more than one")
    options = parser.parse_args()
    args, model = read_recipe(options.recipe)
    shape, gpu = SHAPES[model.model_name_or_path], GPUS[options.gpu]
    columns = [memory(args, model.lora_r, shape, gpu, options.processes, longest) for longest in (False, True)]
    print(f"{model.model_name_or_path}: {shape.parameters / 1e6:.0f} M parameters, ", end="")
    print(f"{shape.adapter_parameters(model.lora_r) / 1e6:.1f} M per member of rank {model.lora_r}")
    print(f"{args.rows_per_step} rows a step, {args.micro_batches(options.processes)} micro-batches per process\n")
    print("| GiB on a training GPU | at the start | at the limits |\n|---|---|---|")
    for name in columns[0].trainer:
        print(f"| {name} | " + " | ".join(f"{column.trainer[name] / GIB:.1f}" for column in columns) + " |")
    if args.vllm_mode == "colocate":
        print(f"| vLLM, all | {columns[0].engine_memory / GIB:.1f} | {columns[0].engine_memory / GIB:.1f} |")
    print("| sum | " + " | ".join(f"{column.on_one_gpu / GIB:.1f}" for column in columns) + " |")
    print(f"| of | {gpu.memory / GIB:.1f} | {gpu.memory / GIB:.1f} |")
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in columns[0].engine.items())
    print(
        f"\nAn engine has {columns[0].engine_memory / GIB:.1f} GiB: {parts}; left for {columns[0].cache_tokens} tokens"
    )
    engines = engines_of(args, options.processes)
    phases = seconds(args, shape, gpu, engines, options.processes, columns[0].cache_tokens)
    total = sum(phases.values())
    print(f"Seconds a step: {', '.join(f'{name} {value:.0f}' for name, value in phases.items())}; ", end="")
    print(f"{args.max_steps} steps take {args.max_steps * total / 3600:.1f} hours")
    factors = levers(args, shape)
    print("Log-probs and update are multiplied by ", end="")
    print(" and ".join(f"{value:.2f} ({name})" for name, value in factors.items()))
    print("Fits." if all(column.fits for column in columns) else "Does not fit.")


if __name__ == "__main__":
    main()
