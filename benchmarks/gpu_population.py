"""A few steps of a recipe's population on a random base of the recipe's shape: phase times and peak memory.

    python benchmarks/gpu_population.py recipes/Qwen2.5-Coder-7B/config_4t4s.yaml                # one 80 GB GPU
    python benchmarks/gpu_population.py recipes/Qwen2.5-Coder-7B/config_4t4s_24gb.yaml --completion 256
    python benchmarks/gpu_population.py recipes/Qwen2.5-0.5B-Instruct/config_2t2s.yaml --model DIR
    python benchmarks/gpu_population.py recipes/Qwen2.5-Coder-7B/config_4t4s.yaml --dry-run      # small, on a CPU

Nothing is downloaded: weights are random, the tokenizer is the embedded base's. A random base writes noise up to the
token limit, so no task is valid, students attempt archived ones, and every row is as long as it may be; a reward on
token ids gives every row an advantage. That is the update at its fullest, of fewer rows than the recipe's: 4T+4S with
two proposals a teacher and two attempts. Settings that decide about memory (rank, micro-batch, lengths, share of vLLM)
are the recipe's. Generation is vLLM's where the recipe says so, with CUDA graphs and nothing compiled, so that it
starts soon; where vLLM is not installed it is transformers', and completions have 256 tokens.

Memory and seconds stand beside what recipes/budget.py predicts for these rows on this card; the first step, a warm-up,
is left out of the seconds. `share_of_peak` is how much of the card's arithmetic or bandwidth, whichever bounds a phase
by those sums, was made use of. With `--model` the base is that of a directory. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "recipes"))

import torch
from budget import (
    DECODING_UTILIZATION,
    GIB,
    GPUS,
    LORA_SLOWDOWN,
    TRAINING_UTILIZATION,
    Gpu,
    Rows,
    Shape,
    engines_of,
    memory,
    seconds,
)
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import TrlParser, get_quantization_config
from vs_trl import graphs_up_to

from trl_populora.assets import tiny_base_path
from trl_populora.cli import TrainArguments
from trl_populora.config import MemberConfig, PopuLoRAConfig, member_lora
from trl_populora.trainer import PopuLoRATrainer


CARDS = {"4090": "RTX-4090", "A100": "A100-80GB", "H100": "H100-80GB", "H200": "H200"}
SMALL = Shape(64, 2, 2, 1, 128, 1024, True)
# What differs from the recipe.
FEWER_ROWS = {"teachers": 4, "students": 4, "proposals_per_teacher": 2, "attempts_per_task": 2}
RUN = {
    "evolve_every": 2,
    "evolve_burn_in": 1,
    "save_strategy": "no",
    "generation_kwargs": "{}",
    "disable_tqdm": "true",
}
ON_A_CPU = {"use_cpu": "true", "bf16": "false", "dtype": "float32", "use_vllm": "false", "sandbox_workers": 1}


def make_base(shape: Shape, directory: Path, device: str, dtype: torch.dtype) -> str:
    """Saves a random base of that shape with the embedded base's tokenizer; returns the directory."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_base_path())
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = Qwen2ForCausalLM(Qwen2Config(**vars(shape), **ids, max_position_embeddings=16384))
    torch.set_default_dtype(before)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def by_tokens(completion_ids, **kwargs) -> list[float]:
    """A reward that differs from row to row, whatever is written."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


class Watch(TrainerCallback):
    """Bytes of the card that are in use after every step, where the allocator still holds what it held at its peak."""

    def __init__(self) -> None:
        self.used = [0]

    def on_train_begin(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self.used.append(total - free)


def card() -> tuple[Gpu, bool]:
    """This card, and whether its speed is known."""
    if not torch.cuda.is_available():
        return GPUS["A100-80GB"], False
    name = torch.cuda.get_device_name()
    known = next((GPUS[key] for part, key in CARDS.items() if part in name), None)
    return replace(known or GPUS["A100-80GB"], memory=float(torch.cuda.mem_get_info()[1])), known is not None


def read(recipe: str, options: argparse.Namespace, output_dir: str) -> tuple[PopuLoRAConfig, MemberConfig]:
    """The recipe's settings with those that differ."""
    settings = FEWER_ROWS | RUN | {"max_steps": options.steps, "output_dir": output_dir}
    if importlib.util.find_spec("vllm") is None:
        settings |= {"use_vllm": "false", "max_completion_length": 256}
    if options.completion:
        settings["max_completion_length"] = options.completion
    if options.dry_run:
        settings |= ON_A_CPU | {"max_completion_length": 8, "shots": 0}
    overrides = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    parser = TrlParser((TrainArguments, PopuLoRAConfig, MemberConfig))
    _, args, model = parser.parse_args_and_config(["--config", recipe, *overrides])
    return args, model


def mean(history: list[dict], key: str) -> float | None:
    """Of a metric over all steps but the first, where there are others."""
    values = [entry[key] for entry in history[1:] or history if entry.get(key) is not None]
    return statistics.mean(values) if values else None


def share_of_peak(predicted: dict[str, float], phases: dict[str, float], vllm: bool) -> dict[str, float]:
    """What the seconds of the budget, and the shares that it assumes, say of those that were measured."""
    shares = {"update": TRAINING_UTILIZATION * predicted["log-probs and update"] / phases["update"]}
    if vllm:  # of transformers the budget assumes the time of a token, no share
        playing = predicted["propose and solve"] / (phases["propose"] + phases["solve"])
        shares["solve"] = DECODING_UTILIZATION / LORA_SLOWDOWN * playing
    return shares


def figures(trainer: PopuLoRATrainer, model: MemberConfig, shape: Shape, watch: Watch) -> dict:
    """What was measured, beside what the budget says of rows like the last step's."""
    args, history = trainer.args, [entry for entry in trainer.state.log_history if "loss" in entry]
    completions = [row.completion for row in trainer.played.rows]
    prompts = [len(completion.prompt_ids) for completion in completions]
    answers = statistics.mean(len(completion.completion_ids) for completion in completions)
    like = Rows(round(statistics.mean(prompts)), answers, mean(history, "batch/live_rows"))
    gpu, known = card()
    budget = memory(args, model, shape, gpu, 1, max(prompts))
    phases = {name: mean(history, f"time/{name}") for name in ("match", "propose", "verify", "solve", "update")}
    at = (engines_of(args, 1), 1, budget.cache_tokens, like, model.load_in_4bit)
    predicted = seconds(args, shape, gpu, *at) if known else {}
    allocated = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {
        "rows": args.rows_per_step,
        "vllm": args.use_vllm,
        "prompt_tokens": max(prompts),
        "completion_tokens": answers,
        "live_rows": like.live,
        "seconds": phases | {"total": sum(phases.values())},
        "predicted_seconds": predicted,
        "share_of_peak": share_of_peak(predicted, phases, args.use_vllm) if predicted else {},
        "used_gib": max(watch.used) / GIB or None,
        "allocated_gib": allocated / GIB or None,
        "predicted_gib": budget.on_one_gpu / GIB,
        "logp_difference": mean(history, "sampling/sampling_logp_difference/mean"),
        "loss": history[-1]["loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="YAML file")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--completion", type=int, help="tokens of a completion, instead of the recipe's")
    parser.add_argument("--model", help="directory of a base, in the place of a random one of the recipe's shape")
    parser.add_argument("--dry-run", action="store_true", help="two narrow layers on a CPU; its figures mean nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        args, model = read(options.recipe, options, f"{directory}/run")
        name = options.model or model.model_name_or_path
        print(f"{name}{'' if options.model else ', random'}, {args.rows_per_step} rows a step", flush=True)
        shape = SMALL if options.dry_run and not options.model else Shape.of(name)
        device, dtype = ("cpu", torch.float32) if options.dry_run else ("cuda", torch.bfloat16)
        base = options.model or make_base(shape, Path(directory, "base"), device, dtype)
        if not options.dry_run:
            torch.cuda.empty_cache()
        args.model_init_kwargs = {"dtype": model.dtype}
        if args.use_vllm:
            args.vllm_engine_kwargs = graphs_up_to(args.rows_per_step)
        quantised = get_quantization_config(model)
        watch = Watch()
        trainer = PopuLoRATrainer(
            base, by_tokens, args, callbacks=[watch], quantization_config=quantised, peft_config=member_lora(model)
        )
        trainer.train()
        found = figures(trainer, model, shape, watch)
    for name, spent in found["seconds"].items():
        print(f"{name:10}{spent:9.2f} s")
    print(f"{found['used_gib'] or 0:.1f} GiB in use, {found['predicted_gib']:.1f} GiB predicted")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
