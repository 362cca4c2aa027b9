"""Whole steps at the shape of Qwen2.5-7B with vLLM in the training process: eight adapters, and stock TRL with one.

    python benchmarks/step_at_7b.py                     # completions of 256 tokens, half of the rows with an advantage
    python benchmarks/step_at_7b.py --mix all           # the same, every row with an advantage
    python benchmarks/step_at_7b.py --mix long          # 50 to 2048 tokens, in the median 250, after prompts of 700
    python benchmarks/step_at_7b.py --side ours --keep runs/7b      # a side at a time: `ours` keeps its rows there,
    python benchmarks/step_at_7b.py --side trl --keep runs/7b       # and `trl` trains on them
    python benchmarks/step_at_7b.py --dry-run           # two narrow layers on a CPU; its figures mean nothing

4 teachers and 4 students of rank 32 play the game (`code_o`, 16 proposals and 128 attempts a step; of `long` half as
many) on a random base in bf16, which is made once for each `--keep`. TRL's `GRPOTrainer`, with stock PEFT and one
adapter of rank 32, then gets the very rows of each step: its engine samples as many tokens after each prompt, which
are thrown away, and it trains on our rows with our rewards (`vs_trl.py` says more). Each side has a process of its
own. Both have the same engine arguments, micro-batches, share of the card for vLLM, and gradient checkpointing; on a
card of less than 100 GiB micro-batches of 4 rows instead of 8, and less cache.

A random base writes noise, so no proposal is valid, students attempt archived tasks, and nearly every completion ends
at the limit. Rewards are made of token ids; so that half of the rows have no advantage, every other group gets 0.
For `long` every prompt is cut or repeated to 700 tokens, and each row has a limit of its own.

Seconds are medians over the steps but the first, a warm-up; where only that one was made, it counts and `warm_up` says
so. `start_up` is from the start of the process to the first step. `share_of_peak` is what the work would take at the
card's peak (bf16 arithmetic or bandwidth, whichever bounds it), over what it took. Each step prints a line of JSON, so
a run that is stopped leaves figures; the last is the whole. Without vLLM the dry run generates with transformers.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "recipes"))

import psutil
import torch
from budget import DECODING_UTILIZATION, GIB, SHAPES, Gpu, Rows, Shape, levers, token_seconds
from gpu_population import SMALL, Watch, by_tokens, card, make_base, mean
from step_overhead import CLOCKS
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from vs_trl import LONG, PAIRS, PHASES, Ours, Step, Theirs, choose_engines, draw_length

from trl_populora.step.player import Completion


@dataclass(frozen=True)
class Mix:
    """
    Args:
        proposals (`int`): Of a teacher.
        completion (`int`): Most tokens of a completion.
        context (`int`): Most tokens of a prompt and its completion.
        prompt (`int`, *optional*): Tokens of every prompt; those of the game by default.
        all_live (`bool`): Whether every row has an advantage, or half of them.
    """

    proposals: int
    completion: int
    context: int
    prompt: int | None = None
    all_live: bool = False


MIXES = {
    "short": Mix(4, 256, 2048),
    "long": Mix(LONG.proposals, LONG.longest, 4096, prompt=LONG.prompt),
    "all": Mix(4, 256, 2048, all_live=True),
}
ATTEMPTS = 8
RANK = 32
SIDES = ("ours", "trl")
SEVEN = SHAPES["Qwen/Qwen2.5-Coder-7B"]  # Qwen2.5-7B has the same
SMALL_CARD = 100 * GIB


def half(completion_ids: Sequence[Sequence[int]], attempts: int = ATTEMPTS, **kwargs: Any) -> list[float]:
    """Rewards that differ in every other group of `attempts` rows; in the others all are 0."""
    return [worth * (row // attempts % 2) for row, worth in enumerate(by_tokens(completion_ids))]


class Setup:
    """What both sides have in common."""

    def __init__(self, options: argparse.Namespace, keep: Path):
        self.dry, self.mix, self.steps, self.keep = options.dry_run, MIXES[options.mix], options.steps, keep
        self.attempts, self.shape = ATTEMPTS, SEVEN
        self.pairs = PAIRS
        if self.dry:
            vars(LONG).update(median=8, shortest=4, longest=16)
            self.mix = replace(self.mix, proposals=2, completion=16, prompt=self.mix.prompt and 40)
            self.pairs, self.attempts, self.shape = 2, 2, SMALL
        self.rows = self.pairs * self.mix.proposals * (1 + self.attempts)
        self.vllm = importlib.util.find_spec("vllm") is not None
        self.gpu, self.known = card()
        small_card = self.gpu.memory < SMALL_CARD
        self.settings: dict[str, Any] = {
            "rank": RANK,
            "attempts_per_task": self.attempts,
            "per_device_train_batch_size": 4 if small_card or self.dry else 8,
            "max_completion_length": self.mix.completion,
            "use_cpu": self.dry,
            "bf16": not self.dry,
            "gradient_checkpointing": True,
        }
        if self.vllm:
            self.settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": self.mix.context}
            self.settings["vllm_gpu_memory_utilization"] = 0.3 if small_card else 0.35
        self.dtype = torch.float32 if self.dry else torch.bfloat16

    def find_base(self) -> str:
        """The directory of the base, which is made where it is missing."""
        base = self.keep / f"base_{self.shape.hidden_size}"
        if not base.exists():
            made = make_base(self.shape, base.with_suffix(".part"), "cpu" if self.dry else "cuda", self.dtype)
            if not self.dry:
                torch.cuda.empty_cache()
            os.rename(made, base)
        return str(base)


def fit(ids: list[int], length: int) -> list[int]:
    """A prompt of that length: its last tokens, or as often the whole as it takes."""
    return (ids * -(-length // len(ids)))[-length:]


def limit_rows(lengths: Callable[[int], list[int]]) -> None:
    """Has vLLM sample for each row as many tokens as `lengths`, asked for so many rows, says in the rows' order."""
    from vllm import LLM

    from trl_populora.generate import engine

    merge, generate = engine.merge_asks, LLM.generate

    def keep_apart(*given: Any) -> list:
        """A request for each row: several samples of one request have one limit."""
        return sorted(
            (replace(ask, rows=(row,)) for ask in merge(*given) for row in ask.rows), key=lambda ask: ask.rows
        )

    def limited(self: Any, prompts: Sequence, sampling_params: Any, **kwargs: Any) -> list:
        each = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        each = [params.clone() for params in each]
        for params, length in zip(each, lengths(len(prompts)), strict=True):
            params.max_tokens = length
        return generate(self, prompts, each, **kwargs)

    engine.merge_asks, LLM.generate = keep_apart, limited


def build_ours(setup: Setup, clock: Any, directory: str) -> Ours:
    """The population."""
    mix = setup.mix
    game = {
        "pairs": setup.pairs,
        "proposals_per_teacher": mix.proposals,
        "task_kinds": ["code_o"],
        "prompt_style": "chat",
        "references_per_proposal": 2,
        "shots": 0,
        "sandbox_workers": 1 if setup.dry else None,
        "model_init_kwargs": {"dtype": str(setup.dtype).removeprefix("torch.")},
    }
    engines = choose_engines(not setup.dry, setup.rows) if setup.vllm else {}
    ours = Ours(
        setup.find_base(),
        clock,
        setup.steps,
        directory,
        by_tokens if mix.all_live else functools.partial(half, attempts=setup.attempts),
        **(setup.settings | game | engines),
    )
    if mix.prompt:
        tokenize, rng = ours.trainer._tokenize_prompts, random.Random(0)

        def tokenize_to_length(prompts: list) -> tuple:
            ids, *further = tokenize(prompts)
            return ([fit(row, mix.prompt) for row in ids], *further)

        ours.trainer._tokenize_prompts = tokenize_to_length
        if setup.vllm:
            ours.trainer.game.player.overlaps = False  # lengths are set by call
            limit_rows(lambda rows: [draw_length(rng) for _ in range(rows)])
    return ours


def build_theirs(setup: Setup, clock: Any, directory: str, steps: Sequence[Step]) -> Theirs:
    """Stock TRL with these steps to train on."""
    if setup.vllm:
        choose_engines(not setup.dry, setup.rows)
    path = setup.find_base()
    theirs = Theirs(
        AutoModelForCausalLM.from_pretrained(path, dtype=setup.dtype),
        AutoTokenizer.from_pretrained(path),
        clock,
        setup.rows,
        setup.steps,
        directory,
        **setup.settings,
    )
    if setup.vllm:
        limit_rows(lambda rows: lengths_of(steps[theirs.trainer.state.global_step].rows))
    return theirs


def lengths_of(rows: Sequence[Any]) -> list[int]:
    return [len(row.completion.completion_ids) for row in rows]


def save_steps(steps: Sequence[Step], path: Path) -> None:
    kept = [
        {
            "rewards": step.rewards,
            "rows": [
                (row.completion.prompt_ids, row.completion.completion_ids, row.completion.logprobs)
                for row in step.rows
            ],
        }
        for step in steps
    ]
    path.write_text(json.dumps(kept))


def make_row(prompt: list[int], completion: list[int], logprobs: list[float] | None) -> Any:
    """What TRL needs of a row."""
    return SimpleNamespace(completion=Completion(prompt, completion, "", logprobs))


def read_steps(path: Path) -> list[Step]:
    """The steps that [`save_steps`] wrote."""
    return [Step([make_row(*row) for row in step["rows"]], step["rewards"]) for step in json.loads(path.read_text())]


def least_seconds(shape: Shape, gpu: Gpu, rows: Sequence[Any]) -> float:
    """Of a batch of rows at the card's peak: every prompt is read once, and rows that have ended leave."""
    prompts = {tuple(row.completion.prompt_ids) for row in rows}
    reading = 2 * shape.parameters * sum(map(len, prompts)) / gpu.flops
    prompt, lengths = statistics.fmean(len(row.completion.prompt_ids) for row in rows), sorted(lengths_of(rows))
    writing = sum(
        token_seconds(shape, gpu, sum(length > token for length in lengths), prompt + token)
        for token in range(lengths[-1])
    )
    return reading + DECODING_UTILIZATION * writing


def share_of_peak(setup: Setup, side: str, args: Any, rows: Sequence[Any], live: float, seconds: dict) -> dict:
    """What generating and updating would take at the card's peak, over what they take."""
    proposals = setup.pairs * setup.mix.proposals
    waves = (rows[-proposals:], rows[:-proposals]) if side == "ours" else (rows,)
    prompt = statistics.fmean(len(row.completion.prompt_ids) for row in rows)
    like = Rows(round(prompt), statistics.fmean(lengths_of(rows)), live)
    tokens = len(rows) * (prompt + like.completion)
    # Forward, its recomputation, the way back through frozen weights, and the old log-probabilities.
    work = 8 * setup.shape.parameters * tokens
    if side == "ours":
        work *= math.prod(levers(args, setup.shape, like).values())
    return {
        "generate": sum(least_seconds(setup.shape, setup.gpu, wave) for wave in waves) / seconds["generate"],
        "update": work / setup.gpu.flops / seconds["update"],
    }


class Teller(TrainerCallback):
    """Prints what is known of a side after every step."""

    def __init__(self, setup: Setup, side: str, runner: Ours | Theirs, watch: Watch, mix: str):
        self.setup, self.side, self.runner, self.watch, self.mix = setup, side, runner, watch, mix
        self.start_up = 0.0
        self.figures: dict[str, Any] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        self.start_up = time.time() - psutil.Process().create_time()

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.figures = self.describe(state.log_history)
            print(json.dumps(self.figures), flush=True)

    def describe(self, history: list[dict[str, float]]) -> dict[str, Any]:
        setup, runner = self.setup, self.runner
        recorder = runner.recorder
        steps, warm_up = recorder.steps or [recorder.warm_up], not recorder.steps
        seconds = {phase: statistics.median(step[phase] for step in steps) for phase in (*PHASES, "total")}
        if self.side == "ours":
            seconds |= {phase: mean(history, f"time/{phase}") for phase in ("propose", "solve")}
            seconds["propose"] -= seconds["publish"]  # members are published before the first proposal is written
            rows, live = runner.played[-1].rows, statistics.fmean(runner.live)
        else:
            rows, live = runner.steps[len(recorder.steps)].rows, 1.0
        found = {
            "mix": self.mix,
            "side": self.side,
            "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "vllm": setup.vllm,
            "rows": setup.rows,
            "prompt_tokens": max(len(row.completion.prompt_ids) for row in rows),
            "completion_tokens": statistics.fmean(lengths_of(rows)),
            "steps": len(steps),
            "warm_up": warm_up,
            "start_up": self.start_up,
            "seconds": seconds,
            "used_gib": max(self.watch.used) / GIB or None,
            "logp_difference": mean(history, "sampling/sampling_logp_difference/mean"),
        }
        if self.side == "ours":
            found["live_rows"] = live
        else:
            found["sampled_tokens"] = runner.sampled[-1] / setup.rows
        if setup.known:
            args = runner.trainer.args
            found["share_of_peak"] = share_of_peak(setup, self.side, args, rows, live, seconds)
        return rounded(found)


def rounded(found: Any) -> Any:
    """Figures with four digits behind the point."""
    if isinstance(found, dict):
        return {name: rounded(value) for name, value in found.items()}
    return round(found, 4) if isinstance(found, float) else found


def run(side: str, options: argparse.Namespace, keep: Path, directory: str) -> dict[str, Any]:
    """Takes the steps of one side, and returns its figures."""
    setup = Setup(options, keep)
    if not setup.vllm:
        if not setup.dry:
            raise SystemExit("step_at_7b.py: vLLM is not installed. `--dry-run` walks through without it.")
        print("vLLM is not installed: both sides generate with transformers, and no row has a length of its own.")
    clock = CLOCKS["wall"]()
    kept = keep / f"{options.mix}_rows.json"
    runner: Ours | Theirs
    if side == "ours":
        runner = build_ours(setup, clock, directory)
    else:
        if not kept.exists():
            raise SystemExit(f"step_at_7b.py: there is no {kept}. Run `--side ours` with this `--mix` and `--keep`.")
        steps = read_steps(kept)
        if len(steps) <= setup.steps:
            raise SystemExit(f"step_at_7b.py: {kept} holds {len(steps)} steps, --steps {setup.steps} needs one more.")
        runner = build_theirs(setup, clock, directory, steps)
    watch = Watch()
    teller = Teller(setup, side, runner, watch, options.mix)
    for callback in (watch, teller):
        runner.trainer.add_callback(callback)
    if isinstance(runner, Ours):
        runner.train()
        save_steps(runner.played, kept)
        runner.trainer.close()
    else:
        runner.train(steps)
    return teller.figures


def compare(ours: dict[str, Any], trl: dict[str, Any]) -> dict[str, Any]:
    """Prints both sides, and returns TRL's figures with the ratios and ours."""
    print(f"\n{ours['card']}, mix `{ours['mix']}`, {ours['rows']} rows a step, {ours['live_rows']:.2f} of them live")
    print(f"{'seconds':10}{'8 adapters':>12}{'TRL, 1':>12}{'ratio':>8}")
    ratios = {}
    for phase in (*PHASES, "total"):
        a, b = ours["seconds"][phase], trl["seconds"][phase]
        ratios[phase] = a / b if b > 0.001 else None
        print(f"{phase:10}{a:12.3f}{b:12.3f}" + (f"{a / b:8.3f}" if b > 0.001 else f"{'-':>8}"))
    named = {"total": "step", "update": "update", "generate": "generate", "publish": "publish"}
    against = {f"{name}_ratio_vs_trl": ratios[phase] for phase, name in named.items()}
    return trl | rounded(against) | {"live_rows": ours["live_rows"], "ours": ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", choices=MIXES, default="short")
    parser.add_argument("--side", choices=SIDES, help="one of the two; else both, each in a process of its own")
    parser.add_argument("--keep", help="directory of the base, of our rows and figures; else a temporary one")
    parser.add_argument("--steps", type=int, default=2, help="counted steps of a side, after a warm-up; 0: it counts")
    parser.add_argument("--dry-run", action="store_true", help="two narrow layers on a CPU")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        keep = Path(options.keep or directory)
        keep.mkdir(parents=True, exist_ok=True)
        if options.side is None:
            for side in SIDES:
                command = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--keep", str(keep)]
                if code := subprocess.run(command, check=False).returncode:
                    raise SystemExit(code)
            return
        found, path = run(options.side, options, keep, directory), keep / f"{options.mix}_ours.json"
        if options.side == "ours":
            path.write_text(json.dumps(found))
            print(json.dumps(found))
            return
        ours = json.loads(path.read_text())
        # The sides may come from two calls: those of two cards are not compared.
        print(json.dumps(compare(ours, found) if ours["card"] == found["card"] else found))


if __name__ == "__main__":
    main()
