"""A sweep of eight learning rates: one dataset run of eight members against eight runs of stock TRL, one by one.

    python benchmarks/sweep.py                          # the embedded base
    python benchmarks/sweep.py --model models/SmolLM2-135M-Instruct --steps 1 --repeats 1    # a pretrained base, bf16;
                                                        # `--dtype float32` where the CPU has no instructions for it
    python benchmarks/sweep.py --vllm --stock-runs 2    # an engine of vLLM for each run
    python benchmarks/sweep.py --gpu --model Qwen/Qwen2.5-0.5B-Instruct
    python benchmarks/sweep.py --small                  # walks through; its figures mean nothing

Both sides train adapters of rank 16 on one base, one adapter for each rate, with the same prompts (output tasks of
the package), attempts at a prompt, rows of a micro-batch and optimizer steps, and with the same reward function. Stock
TRL's is the ordinary script: `GRPOTrainer` with `peft_config`. It gets the end tokens that ours finds. The rates are
so low that all adapters go on sampling like the base; the tokens of both sides stand in the table. Ours computes no
row without advantage, so the ratio depends on the reward: `live_rows` is the share of rows with one. `--reward
similar` gives it to nearly all; it serves a base that solves no task, where the other would leave nothing to compute.

All runs are made in this process, in turn: ours, then some of TRL's, and so on (`--repeats` times), so that both sides
meet the same state of the machine. A short run of each side goes before as a warm-up. The seconds of a run are those
of `train()`, its first step included; loading, told apart, is from nothing to a trainer. Of TRL's eight runs
`--stock-runs` are made, and each of the others is taken to last as long as their mean. `experiments per hour` counts
loading, too. Memory is what the process holds at most beyond what it held before a run: the most of one run of ours,
and of one of TRL's. `update` is all that is neither generating nor publishing, reward functions included.

`--model` takes a name or directory of a base that answers without further training. `--clock cpu` counts CPU seconds
(with OMP_NUM_THREADS=1), for a machine that has other work. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from step_overhead import CLOCKS
from trl import GRPOConfig, GRPOTrainer
from vs_trl import COMMON, Memory, choose_engines, lora

from trl_populora.assets import real_seed_tasks, resolve_model_path
from trl_populora.config import PopuLoRAConfig
from trl_populora.tasks import load_seed_tasks
from trl_populora.tasks.kind import Task
from trl_populora.tasks.python.kinds import CodeO
from trl_populora.trainer import PopuLoRATrainer


RATES = (1e-6, 2e-6, 3e-6, 4e-6, 5e-6, 6e-6, 8e-6, 1e-5)
PHASES = ("generate", "publish", "update")
KIND = CodeO()  # reads answers strictly, as the embedded base was taught them


def pose(tasks: Sequence[Task], style: str) -> Dataset:
    """A table of prompts for the tasks of kind `code_o`: what a program returns; `answer` is the canonical text."""
    own = [task for task in tasks if task.kind == KIND.name]
    prompts = [KIND.solving_prompt(task, style) for task in own]
    return Dataset.from_dict({"prompt": prompts, "answer": [task.outputs[0] for task in own]})


def right(completions: list, answer: list[str], **columns: Any) -> list[float]:
    """1 for the right answer, else 0."""
    return [float(grade(said[0]["content"], each)) for said, each in zip(completions, answer, strict=True)]


def similar(completions: list, answer: list[str], **columns: Any) -> list[float]:
    """How similar a completion is to the answer, from 0 to 1: nearly all attempts at a prompt differ in it."""
    pairs = zip(completions, answer, strict=True)
    return [SequenceMatcher(None, said[0]["content"], each).ratio() for said, each in pairs]


def grade(text: str, answer: str) -> bool:
    task = Task(KIND.name, program="", inputs=(), outputs=(answer,))
    return KIND.correct(task, KIND.parse_attempt(text, task), None)


REWARDS = {"right": right, "similar": similar}


class Meter:
    """Makes runs and measures them. `memory.peak` is the most of all."""

    def __init__(self, clock: Any):
        self.clock, self.memory = clock, Memory()
        self.runs: list[dict[str, float]] = []  # seconds by name, and `tokens`

    def measure(self, build: Callable[[], GRPOTrainer], generates: str) -> None:
        """
        Args:
            build: Makes a trainer of one run.
            generates: Name of the trainer's method that samples.
        """
        self.spent = dict.fromkeys((*PHASES, "tokens"), 0.0)
        self.clock.look_again()
        with self.memory:
            start = self.clock()
            trainer = build()
            self.watch(trainer, generates, "generate")
            if trainer.use_vllm:
                self.watch(trainer.vllm_generation, "sync_weights", "publish")
            loaded = self.clock()
            trainer.train()
            end = self.clock()
        self.spent["generate"] -= self.spent["publish"]  # which happens inside of it
        self.spent |= {"load": loaded - start, "train": end - loaded}
        self.spent["update"] = self.spent["train"] - self.spent["generate"] - self.spent["publish"]
        live = [entry["batch/live_rows"] for entry in trainer.state.log_history if "batch/live_rows" in entry]
        self.runs.append(self.spent | {"live_rows": fmean(live or [1.0])})

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Counts a method's seconds as those of a phase, and the tokens that it returns."""
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.clock()
            found = method(*args, **kwargs)
            self.spent[phase] += self.clock() - start
            if phase == "generate":
                rows = found[0] if isinstance(found, tuple) else [row.completion_ids for row in found]
                self.spent["tokens"] += sum(map(len, rows))
            return found

        setattr(owner, name, timed)

    def mean(self, name: str) -> float:
        return fmean(run[name] for run in self.runs)


class Sweep:
    """The two sides with equal settings."""

    def __init__(self, path: str, reward: Callable, table: Dataset, settings: dict[str, Any], directory: str):
        self.path, self.reward, self.table, self.settings = path, reward, table, settings
        self.directory, self.count = directory, 0
        self.ends: list[int] = []

    def output(self) -> str:
        self.count += 1
        return f"{self.directory}/run_{self.count}"

    def ours(self, rates: Sequence[float] = RATES, **options: Any) -> PopuLoRATrainer:
        settings = self.settings | {"learning_rate": list(rates)} | options
        args = PopuLoRAConfig(self.output(), students=len(rates), save_rollouts=False, **settings)
        trainer = PopuLoRATrainer(self.path, self.reward, args, self.table, peft_config=lora())
        self.ends = trainer.eos_token_ids
        return trainer

    def theirs(self, rate: float, **options: Any) -> GRPOTrainer:
        settings = self.settings | {"learning_rate": rate} | options
        settings.pop("vllm_engine_kwargs", None)
        trainer = GRPOTrainer(
            self.path, self.reward, GRPOConfig(self.output(), **settings), self.table, peft_config=lora()
        )
        trainer.eos_token_ids = self.ends
        if trainer.use_vllm:
            trainer.vllm_generation.generation_kwargs = {"stop_token_ids": self.ends}
        else:
            trainer.generation_config.update(eos_token_id=self.ends)
        return trainer


def choose_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that both sides have."""
    rows = options.prompts * options.attempts
    settings = COMMON | {
        "max_steps": options.steps,
        "num_generations": options.attempts,
        "per_device_train_batch_size": options.micro_batch,
        "gradient_accumulation_steps": rows // options.micro_batch,
        "max_completion_length": options.tokens,
        "ddp_find_unused_parameters": False,  # vLLM's engine makes a group of one process
        "model_init_kwargs": {"dtype": options.dtype if options.model else "float32"},
    }
    if options.gpu:
        settings |= {"use_cpu": False, "bf16": True}
    elif options.model and not options.vllm:
        settings["bf16"] = options.dtype == "bfloat16"
    if options.vllm:
        settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 1024}
        settings["vllm_gpu_memory_utilization"] = 0.2
        settings |= choose_engines(options.gpu, rows * len(RATES))
    return settings


def run(options: argparse.Namespace, clock: Any, directory: str) -> tuple[Meter, Meter]:
    """All runs of both sides, in turn."""
    path = resolve_model_path(options.model or "tiny")
    table = pose(
        load_seed_tasks(real_seed_tasks() if options.model else None), "turns" if options.model else "compact"
    )
    sweep = Sweep(path, REWARDS[options.reward], table, choose_settings(options), directory)
    brief = {"max_steps": 1, "max_completion_length": 8, "use_vllm": False}
    Meter(clock).measure(functools.partial(sweep.ours, RATES[:2], **brief), "_generate_rows")
    Meter(clock).measure(functools.partial(sweep.theirs, RATES[0], **brief), "_generate_single_turn")
    ours, theirs = Meter(clock), Meter(clock)
    for repeat in range(options.repeats):
        ours.measure(sweep.ours, "_generate_rows")
        for rate in RATES[: options.stock_runs][repeat :: options.repeats]:
            theirs.measure(functools.partial(sweep.theirs, rate), "_generate_single_turn")
    return ours, theirs


def compare(ours: Meter, theirs: Meter) -> dict[str, float]:
    """Prints the table, and returns the figures."""
    count = len(RATES)
    sides = {
        name: (ours.mean(name), count * theirs.mean(name))
        for name in ("load", *PHASES, "train", "tokens", "live_rows")
    }
    print(f"{'seconds':12}{f'1 run of {count}':>12}{f'TRL, {count} runs':>14}{'ratio':>8}")
    for name in ("load", *PHASES, "train", "tokens"):
        one, all_runs = sides[name]
        print(f"{name:12}{one:12.2f}{all_runs:14.2f}" + (f"{all_runs / one:8.2f}" if one > 0.001 else f"{'-':>8}"))
    hours = [(sides["load"][side] + sides["train"][side]) / 3600 for side in (0, 1)]
    print(f"peak beyond what was held before: {ours.memory.peak:.2f} and {theirs.memory.peak:.2f} GiB; ", end="")
    print(f"experiments per hour: {count / hours[0]:.1f} and {count / hours[1]:.1f}; ", end="")
    print(f"live rows of ours: {sides['live_rows'][0]:.2f}")
    times = {"sweep_speedup": "train", "generate_speedup": "generate", "update_speedup": "update"}
    figures = {name: sides[phase][1] / sides[phase][0] for name, phase in times.items()}
    figures |= {
        "sweep_speedup_with_loading": hours[1] / hours[0],
        "experiments_per_hour": count / hours[0],
        "experiments_per_hour_trl": count / hours[1],
        "peak_memory_ratio": ours.memory.peak / theirs.memory.peak,
        "tokens_ratio": sides["tokens"][0] / sides["tokens"][1],
        "live_rows": sides["live_rows"][0],
    }
    if sides["publish"][0]:
        figures |= {
            "publish_share": sides["publish"][0] / sides["train"][0],
            "publish_share_trl": sides["publish"][1] / sides["train"][1],
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--repeats", type=int, default=2, help="runs of ours")
    parser.add_argument("--stock-runs", type=int, default=len(RATES), help="of stock TRL, at least one a repeat")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of a run")
    parser.add_argument("--prompts", type=int, default=4, help="prompts in a step, of each adapter")
    parser.add_argument("--attempts", type=int, default=8, help="attempts at a prompt")
    parser.add_argument("--micro-batch", type=int, default=8, help="rows of a forward of the update")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens of a completion")
    parser.add_argument("--small", action="store_true", help="few and short rows")
    parser.add_argument("--model", help="name or directory of a base, in place of the embedded one")
    text = "`right` for the embedded base, which knows the tasks, else `similar`"
    parser.add_argument("--reward", choices=REWARDS, help=text)
    types = ("bfloat16", "float32")
    parser.add_argument("--dtype", choices=types, default=types[0], help="of the model; some CPUs are slow in bf16")
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM")
    parser.add_argument("--gpu", action="store_true", help="both sides on a GPU, in bf16")
    options = parser.parse_args()
    if options.small:
        vars(options).update(steps=1, repeats=1, stock_runs=1, prompts=2, attempts=2, micro_batch=4, tokens=16)
    options.reward = options.reward or ("similar" if options.model else "right")
    if not options.repeats <= options.stock_runs <= len(RATES):
        parser.error(f"--stock-runs {options.stock_runs} must be from --repeats {options.repeats} to {len(RATES)}.")
    where = torch.cuda.get_device_name() if options.gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}, {options.clock} seconds; torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = run(options, CLOCKS[options.clock](), directory)
    print(f"\n{options.model or 'tiny'}, {'vLLM' if options.vllm else 'transformers'}, ", end="")
    print(f"{options.prompts} prompts x {options.attempts} attempts of each adapter in a step, ", end="")
    print(f"{options.steps} steps, reward `{options.reward}`; ", end="")
    print(f"{len(ours.runs)} runs of ours, {len(theirs.runs)} of TRL's were made")
    print(json.dumps({name: round(value, 4) for name, value in compare(ours, theirs).items()}))


if __name__ == "__main__":
    main()
