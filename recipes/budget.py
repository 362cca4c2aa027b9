"""Memory and time of a GPU recipe, worked out on paper: nothing of a base is read but its config.json.

    python recipes/budget.py recipes/Qwen2.5-0.5B-Instruct/config_2t2s.yaml --gpu RTX-4090
    python recipes/budget.py recipes/Qwen2.5-Coder-7B/config_4t4s_8gpu.yaml --gpu A100-80GB --processes 8
    python recipes/budget.py recipes/Qwen2.5-Coder-7B/config_4t4s_24gb.yaml --gpu RTX-4090
    python recipes/budget.py recipes/Qwen2.5-Coder-7B/config_4t4s_8gpu.yaml --processes 8 --nodes 4 --members 32
    python recipes/budget.py my_grpo.yaml --gpu A100-80GB --members 8 --prompt_tokens 300  # names a dataset of prompts

Prints what one GPU of the training node holds at its fullest moment, for prompts as they are at the start of a run and
for the longest that the limits of the task kinds allow, then the room left for vLLM's cache, and the seconds of a
step. Without vLLM the fullest moment is the update's or the generation's: what both hold stands first. Parameters are
exact but for the norms of some, and so are the bytes of a base in 4 bits (tests compare them with transformers, PEFT
and bitsandbytes). Bytes that activations need were counted with saved-tensor hooks on one routed decoder layer under
bf16 autocast. What is merely assumed is a constant with a name. `benchmarks/gpu.py` compares all of it with a GPU.

`--nodes` adds what nodes send each other and what their other cores do (`budget_nodes.py`), `--members` changes the
size of the recipe's population: in the game half teachers and half students, in a dataset run all of them students.
Prompts of a dataset are not read: `--prompt_tokens` says how long the longest is.

What it leaves out: fragmentation beyond `RESERVE`, other engines than vLLM, pipeline and tensor parallelism.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import yaml
from budget_nodes import CHARS_PER_TOKEN, Nodes, print_nodes
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config
from trl import ModelConfig, TrlParser

from trl_populora.assets import resolve_model_path
from trl_populora.cli import TrainArguments
from trl_populora.config import MemberConfig, PopuLoRAConfig, base_options, list_member_loras
from trl_populora.generate.publish import count_slots
from trl_populora.generate.transformers import READ_SHARE
from trl_populora.hub.card import VLLM_RANKS
from trl_populora.start import list_lora_configs
from trl_populora.step.microbatch import estimate_pair_cost
from trl_populora.tasks import CodeO
from trl_populora.tasks.script import PromptArguments


GIB = 2**30

# Assumed.
RESERVE = 2.0 * GIB  # CUDA context, NCCL, allocator
GRAPHS = 1.0 * GIB  # vLLM's CUDA graphs
TRAINING_UTILIZATION = 0.35  # of peak FLOP/s; 0.47 was measured on an H200 with 16,384 tokens in a forward of 7B
DECODING_UTILIZATION = 0.6  # of peak bandwidth or FLOP/s
LORA_SLOWDOWN = 1.5  # serving adapters costs a third of the decoding rate, however many there are (vLLM PR 11267)
MEAN_COMPLETION = 0.3  # of `max_completion_length`

# Measured on an H200 with bases of 28 and 30 layers (benchmarks/RESULTS.md): seconds a layer takes to start its
# kernels, members' included, however little they have to do. Other hosts are faster or slower at it than that one.
DECODING_START = 0.005  # for a token of all rows of a batch, by transformers
REPLAYING_START = 0.0004  # likewise, replayed from a CUDA graph
TRAINING_START = 0.024  # for a micro-batch: forward, recomputation, backward

# Measured on the embedded base; nobody knows it of a larger one. Mean of `batch/live_rows` over the 24 steps of
# recipes/tiny/quickstart.yaml, seed 0, on 22 November 2026; over 60 steps of studies/tiny_headroom.py it was 0.48.
LIVE_ROWS = 0.54

# Characters of the instructions of a proposal prompt in the chat style, and of one seed task shown with it.
PROMPT_CHARS, SEED_REFERENCE_CHARS = 1300, 125


@dataclass(frozen=True)
class Shape:
    """
    What a model's config.json says. `biases`: those of q, k and v; `head_size`: where it is not `hidden_size /
    num_attention_heads`.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    biases: bool = True
    head_size: int | None = None

    @classmethod
    def of(cls, base: str) -> Shape:
        """
        Reads the config.json of a directory, or of a base on the Hub.

        Raises:
            `OSError`: If there is none.
            `ValueError`: If it is of no dense decoder with a gated MLP in each layer, to which the sums below apply.
        """
        if base in SHAPES:
            return SHAPES[base]
        config = AutoConfig.from_pretrained(resolve_model_path(base)).get_text_config()
        said = {each.name: getattr(config, each.name, None) for each in fields(cls)}
        said["num_key_value_heads"] = said["num_key_value_heads"] or said["num_attention_heads"]
        said["biases"] = getattr(config, "attention_bias", config.model_type == "qwen2")
        said["head_size"] = getattr(config, "head_dim", None)
        with torch.device("meta"):
            counted = AutoModelForCausalLM.from_config(config).num_parameters()
        if not all(said[name] for name in DIMENSIONS) or abs(cls(**said).parameters / counted - 1) > 1e-3:
            raise ValueError(f"{base} is a {config.model_type}; this page knows dense decoders with gated MLPs only.")
        return cls(**said)

    @property
    def head(self) -> int:
        return self.head_size or self.hidden_size // self.num_attention_heads

    @property
    def query_size(self) -> int:
        return self.head * self.num_attention_heads

    @property
    def key_value_size(self) -> int:
        return self.head * self.num_key_value_heads

    @property
    def parameters(self) -> int:
        """All weights, with biases and the norms before attention, MLP and head."""
        h, biases = self.hidden_size, (self.query_size + 2 * self.key_value_size) * self.biases
        others = self.num_hidden_layers * (biases + 2 * h) + h
        return (1 if self.tie_word_embeddings else 2) * self.vocab_size * h + self.linear_parameters + others

    def adapter_parameters(self, rank: int) -> int:
        """One LoRA adapter on all linear layers but the head."""
        h, q, kv, i = self.hidden_size, self.query_size, self.key_value_size, self.intermediate_size
        return self.num_hidden_layers * rank * (2 * (h + q) + 2 * (h + kv) + 3 * (h + i))

    def slot_parameters(self, rank: int, everywhere: bool = False) -> int:
        """
        What vLLM's kernels keep for one adapter of that rank: of the next rank that vLLM serves, on all linear layers
        but the head, or everywhere, on embeddings and head, too.
        """
        served = min((size for size in VLLM_RANKS if size >= rank), default=rank)  # a run refuses larger ones
        both = 2 * served * (self.vocab_size + self.hidden_size) if everywhere else 0
        return self.adapter_parameters(served) + both

    @property
    def linear_parameters(self) -> int:
        """Weights of the linear layers but the head: those that bitsandbytes quantises."""
        h, q, kv = self.hidden_size, self.query_size, self.key_value_size
        return self.num_hidden_layers * (2 * h * q + 2 * h * kv + 3 * h * self.intermediate_size)

    def bytes(self, four_bits: bool = False, nested: bool = False, weight: int = 2) -> float:
        """
        With so many bytes for a `weight`, or with linear layers in 4 bits: a scale for 64 weights, in fp32 or, nested,
        in a byte, for 256 of which there is another in fp32. Embeddings, head, norms and biases stay as they are.
        """
        if not four_bits:
            return weight * self.parameters
        scale = (1 + 4 / 256) / 64 if nested else 4 / 64
        return weight * self.parameters + (0.5 + scale - weight) * self.linear_parameters

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values in bf16."""
        return 2 * 2 * self.num_hidden_layers * self.key_value_size

    @property
    def layer_bytes_per_token(self) -> int:
        """
        One decoder layer while it is recomputed and differentiated: saved tensors are 8 bytes per intermediate and 20
        per hidden unit, or 25 where rows have to be put in order; as much again is allowed for gradients in flight.
        """
        return 2 * (8 * self.intermediate_size + 25 * self.hidden_size)

    @property
    def read_bytes_per_token(self) -> int:
        """
        One decoder layer without gradients, at its widest: the gate's output in bf16, and of the next routed layer the
        base's output in bf16, the members' and their sum in fp32; five copies of the hidden state.
        """
        return 12 * self.intermediate_size + 10 * self.hidden_size


DIMENSIONS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
SHAPES = {  # known without a network
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
    "H200": Gpu(139.8 * GIB, 989e12, 4.8e12),
}


@dataclass(frozen=True)
class Rows:
    """
    What the rows of a step are like.

    Args:
        prompt (`int`): Tokens of the longest prompt.
        completion (`float`): Tokens of a completion, in the mean.
        live (`float`): Share with an advantage.
    """

    prompt: int
    completion: float
    live: float

    @classmethod
    def of(cls, args: PopuLoRAConfig, longest: bool = False) -> Rows:
        """At the start of a run, or with prompts as long as the kinds allow."""
        prompt = prompt_tokens(args.references_per_proposal, longest)
        has_kl_term = args.teacher_beta or any(args.member_values.get("beta", [args.beta]))
        return cls(prompt, MEAN_COMPLETION * args.max_completion_length, 1.0 if has_kl_term else LIVE_ROWS)


@dataclass(frozen=True)
class Budget:
    """
    Args:
        held (`dict[str, float]`): Bytes that the training process holds all the time, by what holds them.
        update (`dict[str, float]`): Bytes that the update adds at its fullest moment.
        playing (`dict[str, float]`): Bytes that generation by transformers adds at its fullest; with vLLM none.
        engine (`dict[str, float]`): Bytes of one vLLM engine without its cache; without vLLM none.
        engine_memory (`float`): Bytes that the engine may take on its GPU.
        cache_tokens (`int`): Tokens that fit into what is left of them, or that transformers may hold at once.
        gpu_memory (`float`): Bytes of the training GPU.
        on_one_gpu (`float`): Bytes of trainer and colocated engine together, at the fullest moment.
    """

    held: dict[str, float]
    update: dict[str, float]
    playing: dict[str, float]
    engine: dict[str, float]
    engine_memory: float
    cache_tokens: int
    gpu_memory: float
    on_one_gpu: float

    @property
    def moment_fits(self) -> bool:
        return self.on_one_gpu <= self.gpu_memory

    @property
    def engine_fits(self) -> bool:
        """Whether the engine has room for a cache; without vLLM it needs none."""
        return self.cache_tokens > 0 or not self.engine


def is_dataset_run(args: PopuLoRAConfig) -> bool:
    return args.max_members is not None  # the game refuses this option, a dataset run settles it


def count_micro_batches(args: PopuLoRAConfig, processes: int) -> int:
    """Micro-batches of each process in which the rows of a step, or of a dataset run's generation, are trained on."""
    return args.steps_per_generation if is_dataset_run(args) else args.micro_batches(processes)


def prompt_tokens(references: int, longest: bool) -> int:
    """Tokens of a proposal's prompt with the package's seed tasks shown, or with tasks as long as the kinds allow."""
    reference = CodeO.max_program_chars + 2 * CodeO.max_value_chars if longest else SEED_REFERENCE_CHARS
    return round((PROMPT_CHARS + references * reference) / CHARS_PER_TOKEN)


def memory(args: PopuLoRAConfig, model: ModelConfig, shape: Shape, gpu: Gpu, processes: int, prompt: int) -> Budget:
    """What a GPU holds; rows of like length share a micro-batch, so its completions are as long as they may be."""
    members, rank = args.seats, widest_rank(model)
    adapters, weight = members * shape.adapter_parameters(rank), weight_bytes(args, model)
    tokens = args.per_device_train_batch_size * (prompt + args.max_completion_length)
    # Alone: fp32 weight, gradient, two moments. ZeRO-2: bf16 weight and gradient, and a share of the fp32 rest.
    per_parameter = 16 if processes == 1 else 4 + 12 / processes
    held = {
        "base": shape.bytes(model.load_in_4bit, model.use_bnb_nested_quant, weight),
        "members, gradients, Adam": per_parameter * adapters,
        "reserve": RESERVE,
    }
    saved, layers = tokens * shape.layer_bytes_per_token / 2, shape.num_hidden_layers
    if args.gradient_checkpointing:
        checkpoints = weight * tokens * shape.hidden_size * layers
        update = {"checkpoints between layers": checkpoints, "one layer, recomputed": 2 * saved}
    else:
        update = {"what all layers save": saved * layers, "gradients of one layer": saved}
    kept = 1 if args.gradient_checkpointing else layers  # layers whose own copies of weights wait for the backward
    update |= {
        "members of that layer, stacked" if kept == 1 else "members, stacked": 8 * adapters * kept / layers,
        "head, in TRL's tiles": 2 * 4096 * 32768 + 4 * tokens * shape.hidden_size,
    }
    if model.load_in_4bit:  # the largest weight, once more as its transpose
        update["a weight in bf16"] = 2 * 2 * shape.hidden_size * shape.intermediate_size
    elif weight == 4:  # autocast rounds all weights of a layer, and the backward needs them
        update["rounded weights"] = 2 * shape.linear_parameters * kept / layers
    if not args.use_vllm:
        playing = generation(args, shape, adapters / members, prompt, args.generation_batch_size // processes, weight)
        fullest = sum(held.values()) + max(sum(update.values()), sum(playing.values()))
        return Budget(held, update, playing, {}, 0.0, args.generation_tokens or 0, gpu.memory, fullest)
    colocated = args.vllm_mode == "colocate"
    rows = args.generation_batch_size // engines_of(args, processes)
    # A server (recipes/serve.sh) has a slot for each member, and serves adapters of embeddings and head, too.
    slots = count_slots(members) if colocated else members
    engine = {
        "base, bf16": 2 * shape.parameters,
        f"{slots} adapters, bf16": 2 * slots * shape.slot_parameters(rank, everywhere=not colocated),
        "sampler, fp32": 2 * 4 * rows * shape.vocab_size,
        "a batch of 4096 tokens": 4096 * shape.layer_bytes_per_token / 2,
        "CUDA graphs": GRAPHS,
    }
    engine_memory = gpu.memory * (args.vllm_gpu_memory_utilization if colocated else 0.9)  # 0.9 is a server's default
    left = engine_memory - sum(engine.values())
    both = sum(update.values()) + (engine_memory if colocated else 0)
    if colocated and args.vllm_enable_sleep_mode:  # the engine has given its memory back when the update begins
        both = max(sum(update.values()), engine_memory)
    both += sum(held.values())
    return Budget(held, update, {}, engine, engine_memory, int(left / shape.cache_bytes_per_token), gpu.memory, both)


def widest_rank(model: MemberConfig) -> int:
    """The rank at which members are computed: of unequal ones the largest."""
    return max(model.member_values.get("lora_r", [model.lora_r]))


def weight_bytes(args: PopuLoRAConfig, model: MemberConfig) -> int:
    """Bytes of a weight of the base that is not quantised."""
    return 4 if base_options(model, args.model_init_kwargs)["dtype"] == "float32" else 2


def generation(
    args: PopuLoRAConfig, shape: Shape, adapter: float, prompt: int, rows: int, weight: int = 2
) -> dict[str, float]:
    """
    Bytes that transformers adds while a process generates so many rows, at once as many as `generation_tokens` leaves
    room for. A member has so many parameters in its `adapter`. Keys and values have as many bytes as a `weight`.

    One layer's cache is held twice while it grows, and once more for all heads where keys and values have fewer.
    """
    tokens = rows * (prompt + args.max_completion_length)
    tokens = min(args.generation_tokens or tokens, tokens)
    rows = max(1, tokens // (prompt + args.max_completion_length))
    cache = tokens * shape.cache_bytes_per_token * weight / 2
    one_layer = cache / shape.num_hidden_layers
    heads = shape.num_attention_heads / shape.num_key_value_heads
    return {
        "keys and values": cache,
        "one layer of them, for all heads": (1 + heads) * one_layer,
        "prompts, as they are read": max(prompt, tokens // READ_SHARE) * shape.read_bytes_per_token,
        "members that play, stacked": 4 * adapter * max(args.teachers, args.max_members or args.students),
        "sampler, fp32": 2 * 4 * rows * shape.vocab_size,
    }


def levers(args: PopuLoRAConfig, shape: Shape, like: Rows) -> dict[str, float]:
    """
    By what the work of log-probabilities and update is multiplied for such rows.

    "live rows": rows without advantage are not computed. "shared prompts": a prompt stands once for as many attempts
    as a micro-batch has room for; it is bounded by the tokens of `per_device_train_batch_size` rows at the completion
    limit. Attention over the longer rows is counted, at the price per pair that was measured (`PAIR_SLOWDOWN` of
    `step/microbatch.py`, benchmarks/RESULTS.md).
    """
    prompt, completion = like.prompt, like.completion
    pair = estimate_pair_cost(Qwen2Config(**vars(shape), head_dim=shape.head))
    room = args.per_device_train_batch_size * (prompt + args.max_completion_length)
    parts = math.ceil(args.attempts_per_task * completion / (room - prompt))  # of a group, each in a micro-batch

    def cost(rows: float) -> float:
        """Per row, of so many with one prompt."""
        tokens = prompt + rows * completion
        return tokens * (1 + pair * tokens) / rows

    attempts, proposals = args.attempts_per_task, min(1, args.teachers)  # a proposal has a prompt of its own
    shared = (proposals * cost(1) + attempts * cost(attempts / parts)) / (proposals + attempts) / cost(1)
    return {"live rows": like.live, "shared prompts": shared}


def seconds(
    args: PopuLoRAConfig,
    shape: Shape,
    gpu: Gpu,
    engines: int,
    processes: int,
    cache_tokens: int,
    like: Rows,
    four_bits: bool = False,
    weight: int = 2,
) -> dict[str, float]:
    """
    Seconds of a step by phase, for such rows.

    vLLM decodes as fast as weights and cache are read or multiplied, whichever is slower. So does transformers, but no
    faster than its kernels start (replayed ones, unless the base is in 4 bits), and it has a batch until its last row
    has ended, which may be at the limit. It reads a base as it was loaded, with so many bytes for a `weight`; vLLM
    reads bf16. Training takes 8 FLOP per parameter and token: forward, its recomputation, the way back through frozen
    weights, and the old log-probabilities, which only vLLM needs; of that the share of [`levers`]. A micro-batch takes
    at least as long as its kernels take to start; under DeepSpeed, so with several processes, those of blank rows are
    computed, too.
    """
    row, of_all = like.prompt + like.completion, args.generation_batch_size
    rows = of_all / engines
    if args.use_vllm:
        running = min(rows, cache_tokens / row)
        token = token_seconds(shape, gpu, running, row) * LORA_SLOWDOWN
        playing = rows * like.completion / running * token
    else:
        proposals = args.teachers * args.proposals_per_teacher / engines
        at_once = max(1, cache_tokens // (like.prompt + args.max_completion_length)) if cache_tokens else rows
        batches = math.ceil(proposals / at_once) + math.ceil((rows - proposals) / at_once)
        start = shape.num_hidden_layers * (DECODING_START if four_bits else REPLAYING_START)
        token = max(start, token_seconds(shape, gpu, min(at_once, rows), row, weight))
        playing = batches * args.max_completion_length * token
    work = of_all / processes * row * (8 if args.use_vllm else 6) * shape.parameters
    parts = count_micro_batches(args, processes)
    live = parts * math.prod(levers(args, shape, like).values())
    start = shape.num_hidden_layers * TRAINING_START
    updating = live * max(work / parts / (gpu.flops * TRAINING_UTILIZATION), start)
    updating += (parts - live if processes > 1 else 1) * start  # for blank rows
    updating *= args.num_iterations
    return {"propose and solve" if args.teachers else "generate": playing, "log-probs and update": updating}


def token_seconds(shape: Shape, gpu: Gpu, rows: float, tokens: float, weight: int = 2) -> float:
    """
    What a GPU needs for the next token of so many rows, each with so many in the cache; with so many bytes for a
    `weight`, key or value.
    """
    read = weight * (shape.parameters + rows * tokens * shape.cache_bytes_per_token / 2)
    return max(read / gpu.bandwidth, rows * 2 * shape.parameters / gpu.flops) / DECODING_UTILIZATION


def read_recipe(
    path: str, output_dir: str = "runs/budget", processes: int = 1, **changes: int
) -> tuple[PopuLoRAConfig, MemberConfig]:
    """
    Settings of a recipe, with these in the place of its own; no GPU is asked for. They are those of a dataset run if
    the recipe names a dataset of prompts, and only then they depend on the number of processes.
    """
    own = yaml.safe_load(Path(path).read_text()) or {}
    size = own.get("per_device_train_batch_size", PopuLoRAConfig.per_device_train_batch_size)
    if processes > 1 and (own.get("dataset_name") or own.get("datasets")):
        # One process settles the settings here. It gets micro-batches with the rows of all processes.
        changes["per_device_train_batch_size"] = size * processes
    parser = TrlParser((TrainArguments, PopuLoRAConfig, MemberConfig, PromptArguments))
    no_gpu = ["--use_cpu", "true", "--bf16", "false", "--output_dir", output_dir]
    changed = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    _, args, model, prompts = parser.parse_args_and_config(["--config", path, *no_gpu, *changed])
    if not prompts.dataset_names:
        return args.for_game(), model
    loras = list_member_loras(model)
    args = args.for_prompts(len(loras) if isinstance(loras, list) else None)
    list_lora_configs(loras, args, prompts=True)  # refuses a list of another length
    args.per_device_train_batch_size = size
    return args, model


def enlarge(path: str, members: int | None, world: int) -> tuple[PopuLoRAConfig, MemberConfig]:
    """
    Settings of a recipe with so many members, in the game half of each role, and with at least one proposal of every
    teacher on each of so many processes.
    """
    args, model = read_recipe(path, processes=world)
    changes = {}
    if members is not None:
        halves = {"teachers": members // 2, "students": members // 2}
        changes = {"students": members} if is_dataset_run(args) else halves
        args, model = read_recipe(path, processes=world, **changes)
    if is_dataset_run(args) or args.proposals_per_teacher % world == 0:
        return args, model
    proposals = -(-args.proposals_per_teacher // world) * world
    print(f"`proposals_per_teacher` is raised to {proposals}: every process has a share of every teacher's.")
    return read_recipe(path, **changes, proposals_per_teacher=proposals)


def engines_of(args: PopuLoRAConfig, processes: int) -> int:
    """Engines that share a step's rows: one per process, with or without vLLM, or the servers of the list."""
    if args.vllm_mode == "colocate" or not args.use_vllm:
        return processes
    return len((args.vllm_server_base_url or "").split(","))  # without a list one server, by host and port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="YAML file")
    parser.add_argument("--gpu", choices=GPUS, default="A100-80GB")
    parser.add_argument("--processes", type=int, default=1, help="GPUs of a node that train, ZeRO-2 if more than one")
    parser.add_argument("--nodes", type=int, default=1, help="nodes that train, each with so many GPUs")
    parser.add_argument(
        "--members", type=int, help="adapters, in the game half teachers and half students; the recipe's by default"
    )
    parser.add_argument("--prompt_tokens", type=int, help="tokens of the longest prompt of a recipe's dataset")
    options = parser.parse_args()
    world = options.processes * options.nodes
    try:
        args, model = enlarge(options.recipe, options.members, world)
        shape, gpu = Shape.of(model.model_name_or_path), GPUS[options.gpu]
        parts = count_micro_batches(args, world)
        rows = list_rows(args, options.prompt_tokens, options.nodes)
    except (OSError, ValueError) as error:
        raise SystemExit(f"budget.py: {error}") from error
    columns = {when: memory(args, model, shape, gpu, world, like.prompt) for when, like in rows.items()}
    first, like = next(iter(columns.values())), next(iter(rows.values()))
    rank, step = widest_rank(model), "generation" if is_dataset_run(args) else "step"
    print(f"{model.model_name_or_path}: {shape.parameters / 1e6:.0f} M parameters, ", end="")
    print(f"{shape.adapter_parameters(rank) / 1e6:.1f} M per member of rank {rank}")
    print(f"{args.seats} adapters, {args.generation_batch_size} rows a {step}, ", end="")
    print(f"{parts} micro-batches per process\n")
    print_memory(args, columns)
    engines, total = engines_of(args, world), None
    if first.engine_fits:
        at = (engines, world, first.cache_tokens, like, model.load_in_4bit, weight_bytes(args, model))
        total = print_seconds(args, shape, like, seconds(args, shape, gpu, *at), step)
    if options.nodes > 1:
        served = engines if args.use_vllm and args.vllm_mode == "server" else 0
        adapters = args.seats * shape.adapter_parameters(rank)
        print_nodes(args, adapters, Nodes(options.nodes, options.processes, parts, served), like, total)
    print(tell_fit(columns))


def list_rows(args: PopuLoRAConfig, longest_prompt: int | None, nodes: int) -> dict[str, Rows]:
    """
    What rows are like, by the moment of the run.

    Raises:
        `ValueError`: If the longest prompt of a dataset is not told, or that of a game is; or if a dataset run shall
            have several nodes, whose sums are about sandboxes and archives.
    """
    if not is_dataset_run(args):
        if longest_prompt is not None:
            raise ValueError("`--prompt_tokens` is for a recipe with a dataset of prompts. A game makes its prompts.")
        return {"at the start": Rows.of(args), "at the limits": Rows.of(args, longest=True)}
    if longest_prompt is None:
        raise ValueError("the recipe has a dataset of prompts: give the tokens of its longest, `--prompt_tokens 300`.")
    if nodes > 1:
        raise ValueError(f"`--nodes {nodes}` is for games: a dataset run has no sandbox and no archive.")
    return {"with the longest prompts": replace(Rows.of(args), prompt=longest_prompt)}


def tell_fit(columns: dict[str, Budget]) -> str:
    """Says that all fits, or what does not fit, when, and by how much."""
    lacks = [
        f"the fullest moment {when} needs {each.on_one_gpu / GIB:.1f} of {each.gpu_memory / GIB:.1f} GiB"
        for when, each in columns.items()
        if not each.moment_fits
    ]
    first = next(iter(columns.values()))  # longer prompts change nothing in an engine without its cache
    if not first.engine_fits:
        needed = sum(first.engine.values())
        share = first.engine_memory / GIB
        lacks.append(f"an engine without its cache needs {needed / GIB:.1f} of {share:.1f} GiB")
    return f"Does not fit: {'; '.join(lacks)}." if lacks else "Fits."


def print_seconds(args: PopuLoRAConfig, shape: Shape, like: Rows, phases: dict[str, float], step: str) -> float:
    """What a `step` takes, phase by phase; returns all of it."""
    total = sum(phases.values())
    print(f"Seconds a {step}: {', '.join(f'{name} {value:.0f}' for name, value in phases.items())}", end="")
    micro_batches = args.max_steps * args.gradient_accumulation_steps
    generations = micro_batches / (args.steps_per_generation * args.num_iterations)
    print(f"; {args.max_steps} steps take {generations * total / 3600:.1f} hours" if args.max_steps > 0 else "")
    print("Log-probs and update are multiplied by ", end="")
    print(" and ".join(f"{value:.2f} ({name})" for name, value in levers(args, shape, like).items()))
    return total


def print_memory(args: PopuLoRAConfig, columns: dict[str, Budget]) -> None:
    """The table of what is held, part by part, in a column for each moment of the run."""

    def print_row(name: str, sizes: Sequence[float]) -> None:
        print(f"| {name} | " + " | ".join(f"{size / GIB:.1f}" for size in sizes) + " |")

    each = [*columns.values()]
    print(f"| GiB on a training GPU | {' | '.join(columns)} |\n|---" + "|---" * len(columns) + "|")
    for part in ("held", "update", "playing"):
        for name in getattr(each[0], part):
            told = name if part == "held" else f"{part}: {name}"
            print_row(told, [getattr(column, part)[name] for column in each])
    if args.use_vllm and args.vllm_mode == "colocate":
        print_row("vLLM, all", [column.engine_memory for column in each])
    print_row("fullest moment", [column.on_one_gpu for column in each])
    print_row("of", [column.gpu_memory for column in each])
    print()
    if args.use_vllm:
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in each[0].engine.items())
        print(f"An engine has {each[0].engine_memory / GIB:.1f} GiB: {parts}; left for {each[0].cache_tokens} tokens")


if __name__ == "__main__":
    main()
