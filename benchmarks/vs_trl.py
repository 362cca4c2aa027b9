"""What a population step of 4T+4S costs against a step of stock TRL with one adapter, on the same rows.

    python benchmarks/vs_trl.py                # the embedded base, then 7B-like proportions on a small width
    python benchmarks/vs_trl.py --only step    # or `--only long`
    python benchmarks/vs_trl.py --gpu --width 1024
    python benchmarks/vs_trl.py --only step --model runs/merged --rounds 1 --steps 1    # a pretrained base, in bf16
    python benchmarks/vs_trl.py --only step --vllm      # an engine of vLLM for each side
    python benchmarks/vs_trl.py --small --rounds 1 --steps 1 --width 128    # walks through; its figures mean nothing

*Whole steps.* Our trainer plays and trains as in the quick start, with twice the members and half the proposals, so
that a step has the same 144 rows; `--pairs 2` gives it the quick start's 2T+2S. After each of its steps TRL's own
`GRPOTrainer`, with stock PEFT and one adapter of the same rank, generates for the very prompts of that step in one
batch, throws away what it sampled, and trains on our step's rows with our rewards: both train on the same tokens. What
the sandbox and the rest of the game cost is ours alone. The learning rate is 1e-7 on both sides, so that all adapters
go on sampling like the base and as long completions on either side; `live_rows` is the base's share, at the start of a
run. `peak_memory_ratio` is of what the process holds beyond what it held before a side's steps.

`--model` takes a directory of a base that plays without further training, as `populora export` merges one; both sides
compute in bf16. With `--vllm` each side generates with an engine of its own in this process: ours serves one LoRA per
request and is sent adapters, TRL's is sent the merged weights at every step (`publish`). On a CPU both compute in fp32
then and without oneDNN's packed weights, which TRL could not replace; on a GPU neither engine compiles anything.

*The update alone at 7B-like proportions.* A random Qwen3 of `--width`, prompts of 700 tokens, completions of 50 to
2048 with a long tail (lognormal, median 250), groups of 8 attempts; a share `--live` of the groups and proposals, as
nearly as it goes, has rewards that differ. Attention weighs more at a small width than at 7B's, and our packed rows
are the longer ones.

The two sides train in turn; each round's first step is a warm-up and not counted. Medians over the steps.
`--clock cpu` counts CPU seconds of this process and of the sandbox's (with OMP_NUM_THREADS=1), for a machine that has
other work. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import os
import random
import statistics
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from step_overhead import CLOCKS
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

from trl_populora import trainer as populora_trainer
from trl_populora.assets import resolve_model_path
from trl_populora.config import PopuLoRAConfig
from trl_populora.generate.vllm import list_graph_sizes
from trl_populora.step import play as step_play
from trl_populora.step.pay import Answer, Outcome, Rules
from trl_populora.step.player import Completion
from trl_populora.step.rows import Played, Row
from trl_populora.trainer import PopuLoRATrainer


PAIRS = 4  # teachers, and students, unless an option says otherwise
PROPOSALS = 16  # of all teachers in a whole step
RANK = 16
ENGINE_ON_CPU = {"enforce_eager": True, "dtype": "float32"}  # it would compile for minutes
PHASES = ("generate", "publish", "rest", "update")
LONG = SimpleNamespace(prompt=700, median=250, shortest=50, longest=2048, proposals=2, attempts=8, batch=4)


@dataclass
class Step:
    """One step of ours as TRL gets it: the rows of the generation batch and their rewards."""

    rows: list[Row]
    rewards: list[float]


class Recorder(TrainerCallback):
    """Seconds by phase of every step but each round's first, which is `warm_up`."""

    def __init__(self, clock: Callable[[], float], phases: Callable[[], dict[str, float]]):
        self.clock, self.phases, self.steps = clock, phases, []
        self.warm_up: dict[str, float] = {}

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(state.global_step)
        self.clock.look_again()
        self.start = self.clock()

    def on_step_end(self, args, state, control, **kwargs):
        total = self.clock() - self.start
        phases = self.phases()
        step = phases | {"update": total - sum(phases.values()), "total": total}
        if state.global_step > 1:
            self.steps.append(step)
        else:
            self.warm_up = step


class Memory:
    """
    GiB that the process holds at most inside the block, beyond what it held before; the most of all blocks. On a CPU
    it looks every 50 ms, and what the blocks before have freed is given back first.
    """

    def __init__(self):
        self.peak = 0.0
        self.process = psutil.Process()

    def held(self) -> int:
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        return self.process.memory_info().rss

    def look(self) -> None:
        while not self.ended.wait(0.05):
            self.peak = max(self.peak, (self.held() - self.before) / 2**30)

    def __enter__(self):
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.before, self.ended = self.held(), threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)
        self.thread.start()

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()


def watch_publishing(trainer: GRPOTrainer, clock: Callable[[], float]) -> Callable[[], float]:
    """Times what vLLM is sent. Each call of what it returns gives the seconds since the call before."""
    spent = [0.0]
    if trainer.use_vllm:
        publish = trainer.vllm_generation.sync_weights

        def timed() -> None:
            start = clock()
            publish()
            spent.append(clock() - start)

        trainer.vllm_generation.sync_weights = timed

    def take() -> float:
        seconds = sum(spent)
        spent.clear()
        return seconds

    return take


class Ours:
    """A population, whose steps are kept for TRL."""

    def __init__(self, base, clock, steps: int, directory: str, reward: Callable | None = None, **options: Any):
        pairs, rank = options.pop("pairs", PAIRS), options.pop("rank", RANK)
        args = PopuLoRAConfig(
            f"{directory}/ours",
            teachers=pairs,
            students=pairs,
            evolve_every=0,
            save_rollouts=False,
            **({"sandbox_workers": 1} | COMMON | options),
            max_steps=steps + 1,
        )
        self.trainer = PopuLoRATrainer(base, reward, args, peft_config=lora(rank))
        self.published = watch_publishing(self.trainer, clock)
        self.played: list[Step] = []
        self.memory = Memory()
        self.live: list[float] = []
        play = self.trainer.rollout_func
        self.trainer.rollout_func = lambda prompts, trainer: self.kept(play(prompts, trainer))
        self.recorder = Recorder(clock, self.phases)
        self.trainer.add_callback(self.recorder)

    def kept(self, columns: dict[str, list]) -> dict[str, list]:
        played = self.trainer.played
        self.played.append(Step(played.rows, played.local_worth.rewards.tolist()))
        return columns

    def phases(self) -> dict[str, float]:
        metrics = {name: values[-1] for name, values in self.trainer._metrics["train"].items() if values}
        self.live.append(metrics["batch/live_rows"])
        seconds = {phase: metrics.get(f"time/{phase}", 0.0) for phase in ("match", "propose", "verify", "solve")}
        publish = self.published()
        return {
            "generate": seconds["propose"] + seconds["solve"] - publish,
            "publish": publish,
            "rest": seconds["match"] + seconds["verify"],
        }

    def train(self) -> None:
        self.played = []
        self.trainer.train()


class Theirs:
    """Stock TRL, which replays the steps of ours."""

    def __init__(self, base, tokenizer, clock, rows: int, steps: int, directory: str, **options: Any):
        group, rank = options.pop("attempts_per_task"), options.pop("rank", RANK)
        args = GRPOConfig(
            f"{directory}/theirs",
            **(COMMON | options),
            max_steps=steps + 1,
            num_generations=group,
            generation_batch_size=rows,
            gradient_accumulation_steps=rows // options["per_device_train_batch_size"],
        )
        prompt = [{"role": "user", "content": ""}]  # `rollout_func` says what is asked
        self.trainer = GRPOTrainer(
            get_peft_model(base, lora(rank)),
            fixed,
            args,
            Dataset.from_dict({"prompt": [prompt] * (rows // group)}),
            processing_class=tokenizer,
        )
        self.trainer.rollout_func = self.replay
        self.published = watch_publishing(self.trainer, clock)
        self.clock, self.generating, self.steps, self.generates = clock, 0.0, [], True
        self.sampled: list[int] = []
        self.memory = Memory()
        self.recorder = Recorder(clock, self.phases)
        self.trainer.add_callback(self.recorder)

    def phases(self) -> dict[str, float]:
        publish = self.published()
        return {"generate": self.generating - publish, "publish": publish, "rest": 0.0}

    def replay(self, prompts: list, trainer: GRPOTrainer) -> dict[str, list]:
        step = self.steps[trainer.state.global_step]
        start = self.clock()
        if self.generates:
            ids, _ = trainer._generate_single_turn([row.completion.prompt_ids for row in step.rows], None, {}, 1)
            self.sampled.append(sum(map(len, ids)))
        self.generating = self.clock() - start
        return {
            "prompt_ids": [row.completion.prompt_ids for row in step.rows],
            "completion_ids": [row.completion.completion_ids for row in step.rows],
            "logprobs": [row.completion.logprobs for row in step.rows] if trainer.use_vllm else None,
            "fixed_reward": step.rewards,
        }

    def train(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.trainer.train()


def fixed(fixed_reward: list[float], **kwargs) -> list[float]:
    """TRL's only reward: ours."""
    return fixed_reward


COMMON: dict[str, Any] = {
    "learning_rate": 1e-7,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": [],
    "logging_steps": 1,
    "disable_tqdm": True,
}


def lora(rank: int = RANK) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def graphs_up_to(rows: int) -> dict[str, Any]:
    """
    Arguments with which vLLM starts soon on a GPU: it compiles nothing, and records CUDA graphs for so many rows at
    most.
    """
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list_graph_sizes(rows)}
    return {"compilation_config": {"mode": 0, **graphs}}


def choose_engines(gpu: bool, rows: int) -> dict[str, Any]:
    """
    Gives both sides' engines the same arguments, which let them start soon: TRL has no option for them. Returns ours.
    """
    arguments = graphs_up_to(rows)
    if not gpu:
        arguments = ENGINE_ON_CPU
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, of each engine
        import_module("vllm._custom_ops")._supports_onednn = False  # whose packed weights TRL could not replace
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, **arguments)
    return {"vllm_engine_kwargs": arguments}


def whole_steps(options: argparse.Namespace, clock, directory: str) -> tuple[dict, dict, float, float]:
    """Median seconds by phase of ours and of TRL's, the share of live rows, and the ratio of peak memory."""
    settings = {"attempts_per_task": 8, "per_device_train_batch_size": 16, "max_completion_length": 200}
    dtype = options.dtype if options.model else "float32"
    path = resolve_model_path(options.model or "tiny")
    if options.model:
        settings["per_device_train_batch_size"] = 8
    if options.small:
        settings = {"attempts_per_task": 2, "per_device_train_batch_size": 8, "max_completion_length": 16}
    if options.vllm:
        settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 1024}
        settings["vllm_gpu_memory_utilization"] = 0.2
    together = PROPOSALS // 2 if options.small else PROPOSALS
    proposals, rest = divmod(together, options.pairs)
    if rest or not proposals:
        raise ValueError(f"--pairs {options.pairs}: {together} proposals are to be shared out evenly.")
    rows = together * (1 + settings["attempts_per_task"])
    game = {"pairs": options.pairs, "proposals_per_teacher": proposals}
    game |= {"references_per_proposal": 2, "inputs_per_function": 6}
    game["model_init_kwargs"] = {"dtype": dtype}
    if options.vllm:
        game |= choose_engines(options.gpu, rows)
    if options.model:
        game |= {"task_kinds": ["code_o", "code_i"], "shots": 0, "prompt_style": "turns"}
    ours = Ours(path, clock, options.steps, directory, **settings, **game)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    theirs = Theirs(base, AutoTokenizer.from_pretrained(path), clock, rows, options.steps, directory, **settings)
    ends = theirs.trainer.eos_token_ids = ours.trainer.eos_token_ids
    if options.vllm:
        theirs.trainer.vllm_generation.generation_kwargs = {"stop_token_ids": ends}
    else:
        theirs.trainer.generation_config.update(eos_token_id=ends)
    written = []
    for _ in range(options.rounds):
        with ours.memory:
            ours.train()
        written += [sum(len(row.completion.completion_ids) for row in step.rows) for step in ours.played]
        with theirs.memory:
            theirs.train(ours.played)
    ours.trainer.close()
    engine = "vLLM" if options.vllm else "transformers"
    print(f"{options.model or 'tiny'}, {engine}, rank {RANK}, {rows} rows a step, ", end="")
    print(f"{len(ours.recorder.steps)} steps; ", end="")
    print("sampled tokens: ", end="")
    print(f"{statistics.mean(written):.0f} in a step of ours, {statistics.mean(theirs.sampled):.0f} in one of TRL's")
    print(f"peak beyond what was held before: {ours.memory.peak:.2f} and {theirs.memory.peak:.2f} GiB")
    memory = ours.memory.peak / theirs.memory.peak
    return medians(ours.recorder), medians(theirs.recorder), statistics.mean(ours.live), memory


def draw_length(rng: random.Random) -> int:
    """The tokens of a completion of a 7B run."""
    return min(LONG.longest, max(LONG.shortest, round(rng.lognormvariate(0, 1.0) * LONG.median)))


def long_rows(live: float, seed: int) -> list[Row]:
    """A step of synthetic rows with the prompts and lengths of a 7B run; a share of the groups has unequal rewards."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1000) for _ in range(count)]

    def completion() -> list[int]:
        return tokens(draw_length(rng))

    rows, rules = [], Rules()
    tasks = PAIRS * LONG.proposals
    for task in range(tasks):
        teaches = task < round(live * tasks)
        prompt = tokens(LONG.prompt)
        for attempt in range(LONG.attempts):
            right = teaches and attempt % 2 == 0
            facts: dict[str, Any] = {"correct": right, "well_formed": True, "group": f"task {task}"}
            facts |= {"completion": Completion(prompt, completion(), "")}
            facts |= {"pay": rules.student_reward(Answer("code_o", right, well_formed=True))}
            rows.append(Row("student", f"student_{task % PAIRS}", "code_o", task % PAIRS, **facts))
    for task in range(tasks):
        # The first half of them are each teacher's first proposals: those who teach have two unequal rewards.
        rate = 0.5 if task < PAIRS and task < round(live * PAIRS) else 0.25
        facts = {"valid": True, "solve_rate": rate, "group": f"match {task % PAIRS}"}
        facts |= {"completion": Completion(tokens(LONG.prompt), completion(), "")}
        facts |= {"pay": rules.teacher_reward(Outcome("code_o", True, solve_rate=rate))}
        rows.append(Row("teacher", f"teacher_{task % PAIRS}", "code_o", task % PAIRS, **facts))
    return rows


def long_update(options: argparse.Namespace, clock, directory: str, share: float) -> tuple[dict, dict, float]:
    """Median seconds of the update of ours and of TRL's at 7B-like proportions, and the share of live rows."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("tiny"))
    width = options.width
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=2,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    saved = f"{directory}/base"
    Qwen3ForCausalLM(config).save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    settings = {
        "attempts_per_task": LONG.attempts,
        "per_device_train_batch_size": LONG.batch,
        "max_completion_length": LONG.longest,
    }
    game = {"proposals_per_teacher": LONG.proposals, "task_kinds": ["code_o"]}
    game["model_init_kwargs"] = {"dtype": "float32"}
    ours = Ours(saved, clock, options.long_steps, directory, **settings, **game)

    def play(prompts: list, trainer) -> dict[str, list]:
        rows = long_rows(share, trainer.state.global_step)
        trainer.played = Played(rows, [row.record() for row in rows])
        trainer.played.rewards = trainer._reward(trainer.played)
        trainer.scorer.score(trainer.played)
        return ours.kept(trainer.played.tokens)

    ours.trainer.rollout_func = play
    rows = PAIRS * LONG.proposals * (1 + LONG.attempts)
    theirs = Theirs(
        AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32),
        tokenizer,
        clock,
        rows,
        options.long_steps,
        directory,
        **settings,
    )
    theirs.generates = False
    for _ in range(options.long_rounds):
        ours.train()
        theirs.train(ours.played)
    ours.trainer.close()
    lengths = [len(row.completion.completion_ids) for step in ours.played for row in step.rows]
    print(
        f"\nrandom Qwen3 of width {width}, {rows} rows a step, prompts of {LONG.prompt} tokens, completions of ",
        end="",
    )
    print(f"{statistics.mean(lengths):.0f} in the mean and {max(lengths)} at most, micro-batches of {LONG.batch} rows")
    return medians(ours.recorder), medians(theirs.recorder), statistics.mean(ours.live)


def medians(recorder: Recorder) -> dict[str, float]:
    return {name: statistics.median(step[name] for step in recorder.steps) for name in (*PHASES, "total")}


def print_table(ours: dict[str, float], theirs: dict[str, float], live: float, pairs: int = PAIRS) -> None:
    adapters = f"{2 * pairs} adapters"
    print(f"{'seconds':10}{adapters:>12}{'TRL, 1':>12}{'ratio':>8}    live rows {live:.2f}")
    for name in (*PHASES, "total"):
        ratio = f"{ours[name] / theirs[name]:8.3f}" if theirs[name] > 0.001 else f"{'-':>8}"
        print(f"{name:10}{ours[name]:12.3f}{theirs[name]:12.3f}{ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--only", choices=("step", "long"), help="one of the two parts")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--long-rounds", type=int, default=1)
    parser.add_argument("--long-steps", type=int, default=1, help="likewise, of the second part")
    parser.add_argument("--steps", type=int, default=2, help="counted steps per round and side")
    parser.add_argument("--width", type=int, default=256, help="of the random base, a multiple of 128")
    parser.add_argument("--live", type=float, default=0.54, help="share of live rows in the second part")
    parser.add_argument("--small", action="store_true", help="few and short rows")
    parser.add_argument("--model", help="directory of a base for the first part, in place of the embedded one")
    types = ("bfloat16", "float32")
    parser.add_argument("--dtype", choices=types, default=types[0], help="of the model; some CPUs are slow in bf16")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="teachers, and students, in the first part")
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM in the first part")
    parser.add_argument("--gpu", action="store_true", help="both sides in bf16 on a GPU")
    options = parser.parse_args()
    if options.small:
        vars(LONG).update(prompt=20, median=8, shortest=4, longest=16, attempts=2)
    if options.gpu:
        COMMON.update(use_cpu=False, bf16=True)
    if options.model and not options.vllm:
        COMMON.update(bf16=options.dtype == "bfloat16")
    clock = CLOCKS[options.clock]()
    for module in (step_play, populora_trainer):  # whose own timers name the phases
        module.time = SimpleNamespace(perf_counter=clock)
    where = torch.cuda.get_device_name() if options.gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}, {options.clock} seconds; torch {torch.__version__}")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        if options.only != "long":
            ours, theirs, live, memory = whole_steps(options, clock, f"{directory}/step")
            print_table(ours, theirs, live, options.pairs)
            figures["peak_memory_ratio"] = memory
            figures["step_ratio_vs_trl"] = ours["total"] / theirs["total"]
            figures["update_ratio_vs_trl"] = ours["update"] / theirs["update"]
            figures["live_rows"] = live
        if options.only != "step":
            ours, theirs, live = long_update(options, clock, f"{directory}/long", options.live)
            print_table(ours, theirs, live)
            figures["update_ratio_long"], figures["live_rows_long"] = ours["update"] / theirs["update"], live
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
