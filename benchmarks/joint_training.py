"""What one optimizer step over N adapters costs, against one adapter at the same number of tokens.

Compared in one run, at equal total rows and tokens:

    stock       stock PEFT, one adapter (N = 1)
    routed      this package's layer: base matmul once, members' A and B stacked, two batched matmuls
    mixed       PEFT's own mixed-batch forward (`adapter_names=`), with its guard against training stepped around; left
                out under gradient checkpointing (`--preset 7b`), where its recomputation no longer knows the adapters
    set_adapter one micro-batch per member with `set_adapter` in between

Each is built, warmed up and timed in turn, in rounds, so that slow minutes of the machine hit all of them; the table
shows medians over the rounds, split into forward, backward and optimizer. The baseline is the faster of `stock` and
`routed` with one member. On a machine that others use too, `--clock cpu` counts the process's CPU seconds instead of
the wall clock's (with OMP_NUM_THREADS=1, or threads that wait for each other count as work).

Memory is the peak of a fresh process per N over three steps (on a GPU: of the allocator), and what one more adapter
adds to it, against the arithmetic minimum: weight, gradient and two moments.

Then the two levers of the update, with 8 members at lengths in 7B's proportions: rows without advantage are left out
(`--live`, the share that stays), and the attempts at a task share their prompt. Forward and backward of one step's
micro-batches, dealt as the trainer deals them, with TRL's fused head; four contenders, in rounds as above.

    python benchmarks/joint_training.py                   # CPU size, two cores, a few minutes
    python benchmarks/joint_training.py --only levers     # or `--only members`
    python benchmarks/joint_training.py --preset 7b       # random weights in Qwen2.5-7B's shape, bf16, one 80 GB GPU
    python benchmarks/joint_training.py --preset 7b --set layers=1 hidden=448 intermediate=512 vocabulary=512 tokens=16

`--set` changes fields of the preset, or of the levers' step; the last line walks the 7b path (bf16, checkpointing) on
a CPU in seconds, and its figures mean nothing.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from trl_populora.lora.layers import Router, add_members
from trl_populora.step import microbatch
from trl_populora.step.microbatch import Sharing


BYTES_PER_PARAMETER = 16  # fp32 weight, gradient, exp_avg, exp_avg_sq


@dataclass(frozen=True)
class Preset:
    """Shape of the model and of the batch."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    intermediate: int
    vocabulary: int
    rank: int
    rows: int
    tokens: int
    rounds: int
    steps: int
    checkpointing: bool
    dtype: str


PRESETS = {
    "cpu": Preset(512, 4, 8, 4, 1408, 1024, 16, 32, 64, 3, 1, False, "float32"),
    "7b": Preset(3584, 28, 28, 4, 18944, 152064, 32, 32, 512, 2, 5, True, "bfloat16"),
}


@dataclass
class Contender:
    """One way of training `members` adapters; `losses` yields one loss per backward of a step."""

    method: str
    members: int

    def build(self, base, preset: Preset, ids: torch.Tensor) -> tuple[object, Callable]:
        """The PEFT model and a function that yields the losses of one step."""
        config = LoraConfig(
            r=preset.rank, lora_alpha=2 * preset.rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        names = [f"member_{i}" for i in range(self.members)]
        if self.method == "routed":
            router = Router()
            model = add_members(base, names, config, router, seed=0)
            router.set([row * self.members // len(ids) for row in range(len(ids))])
            return model, self._whole(model, ids)
        model = get_peft_model(base, config, names[0])
        for name in names[1:]:
            model.add_adapter(name, config)
        for path, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in path)
        return model, {"stock": self._stock, "mixed": self._mixed, "set_adapter": self._loop}[self.method](
            model, names, ids
        )

    @staticmethod
    def _whole(model, ids: torch.Tensor, **options) -> Callable:
        def losses():
            yield model(input_ids=ids, labels=ids, **options).loss

        return losses

    @staticmethod
    def _stock(model, names: Sequence[str], ids: torch.Tensor) -> Callable:
        return Contender._whole(model, ids)

    @staticmethod
    def _mixed(model, names: Sequence[str], ids: torch.Tensor) -> Callable:
        model.base_model.training = False  # what the guard looks at; there is no dropout that it could change
        rows = [names[row * len(names) // len(ids)] for row in range(len(ids))]
        return Contender._whole(model, ids, adapter_names=rows)

    @staticmethod
    def _loop(model, names: Sequence[str], ids: torch.Tensor) -> Callable:
        def losses():
            for name, part in zip(names, ids.chunk(len(names)), strict=True):
                model.set_adapter(name)
                yield model(input_ids=part, labels=part).loss / len(names)

        return losses


def make_base(preset: Preset, device: torch.device) -> Qwen2ForCausalLM:
    """A random model of the preset's shape."""
    config = Qwen2Config(
        vocab_size=preset.vocabulary,
        hidden_size=preset.hidden,
        intermediate_size=preset.intermediate,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.key_value_heads,
        use_cache=False,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, preset.dtype))
    with device:
        base = Qwen2ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if preset.checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.enable_input_require_grads()
    return base.train()


def make_ids(preset: Preset, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(preset.vocabulary, (preset.rows, preset.tokens), generator=generator).to(device)


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
CLOCK = "wall"


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return CLOCKS[CLOCK]()


def timed_step(losses: Callable, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, float]:
    """Seconds of one optimizer step by phase."""
    seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    optimizer.zero_grad()
    pending = losses()
    while True:
        start = now(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = next(pending, None)
        middle = now(device)
        seconds["forward"] += middle - start
        if loss is None:
            break
        loss.backward()
        seconds["backward"] += now(device) - middle
    start = now(device)
    optimizer.step()
    seconds["optimizer"] = now(device) - start
    return seconds


def run(contender: Contender, base, preset: Preset, ids: torch.Tensor, steps: int) -> list[dict[str, float]]:
    """Builds a contender on the base, warms it up, times its steps, and takes it off the base again."""
    model, losses = contender.build(base, preset, ids)
    if contender.method != "mixed":
        model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
    timed_step(losses, optimizer, ids.device)
    seconds = [timed_step(losses, optimizer, ids.device) for _ in range(steps)]
    model.unload()
    return seconds


def measure_time(
    preset: Preset, sizes: Sequence[int], device: torch.device
) -> dict[tuple[str, int], dict[str, float]]:
    """Median seconds per phase of every contender."""
    contenders = [Contender("stock", 1), Contender("routed", 1)]
    methods = ("routed", "set_adapter") if preset.checkpointing else ("routed", "mixed", "set_adapter")
    contenders += [Contender(method, size) for size in sizes for method in methods]
    base, ids = make_base(preset, device), make_ids(preset, device)
    seen: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(preset.rounds):
        for contender in contenders:
            seconds = run(contender, base, preset, ids, preset.steps)
            seen.setdefault((contender.method, contender.members), []).extend(seconds)
    phases = ("forward", "backward", "optimizer")
    return {
        key: {phase: statistics.median(s[phase] for s in steps) for phase in phases}
        | {"total": statistics.median(sum(s.values()) for s in steps)}
        for key, steps in seen.items()
    }


@dataclass(frozen=True)
class Levers:
    """A step of attempts for the two levers: `tasks` groups of `attempts` rows, half of them in a micro-batch."""

    members: int = 8
    tasks: int = 8
    attempts: int = 8
    prompt: int = 350  # half of 7B's, as the completions
    median: int = 125
    longest: int = 1024

    def micro_batches(self, vocabulary: int, live: float, sharing: Sharing | None) -> list[microbatch.Batch]:
        """The rows as TRL has them, dealt; all attempts at `1 - live` of the tasks have advantage 0."""
        rng, generator = random.Random(0), torch.Generator().manual_seed(0)
        rows = self.tasks * self.attempts
        lengths = [min(self.longest, max(25, round(rng.lognormvariate(0, 1) * self.median))) for _ in range(rows)]
        prompts = torch.randint(vocabulary, (self.tasks, self.prompt), generator=generator)
        task = torch.arange(rows) // self.attempts
        batch = {
            "prompt_ids": prompts[task],
            "prompt_mask": torch.ones(rows, self.prompt, dtype=torch.long),
            "completion_ids": torch.randint(vocabulary, (rows, max(lengths)), generator=generator),
            "completion_mask": (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long(),
            "member": task % self.members,
        }
        alive = [number < round(live * self.tasks) for number in task.tolist()]
        asked = [self.prompt * each for each in alive]
        answered = [length * each for length, each in zip(lengths, alive, strict=True)]
        members = batch["member"].tolist()
        half = self.attempts // 2
        plan = microbatch.plan_micro_batches(members, task.tolist(), asked, answered, 0, half, sharing)
        return microbatch.cut(batch, plan)


def score(model, ids: torch.Tensor, mask: torch.Tensor, keep: int) -> tuple:
    """Log-probabilities of a forward, by TRL's fused head."""
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-keep] = -100
    return (
        model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs[:, -keep:],
        None,
        None,
    )


def measure_levers(preset: Preset, levers: Levers, live: float, device: torch.device) -> dict[str, tuple[float, int]]:
    """Median seconds of forward and backward of a step, and tokens computed, by the levers in use."""
    base, router = make_base(preset, device), Router()
    add_fused_lm_head(base)
    config = LoraConfig(r=preset.rank, lora_alpha=2 * preset.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = add_members(base, [f"member_{i}" for i in range(levers.members)], config, router, seed=0).train()
    sharing = Sharing.of(base)
    cases = {
        "all rows": (1.0, None),
        "live rows": (live, None),
        "shared prompts": (1.0, sharing),
        "both": (live, sharing),
    }
    seen: dict[str, list[float]] = {name: [] for name in cases}
    tokens = {}
    for _ in range(preset.rounds):
        for name, (share, how) in cases.items():
            batches = levers.micro_batches(preset.vocabulary, share, how)
            layouts = [microbatch.read_layout(batch) for batch in batches]
            tokens[name] = sum(layout.grid for layout in layouts)
            start = now(device)
            for batch, layout in zip(batches, layouts, strict=True):
                ids, mask, length = microbatch.join({key: value.to(device) for key, value in batch.items()})
                router.set(batch["member"][layout.heads])
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    logps, _, _ = layout.log_probs(score, model, ids, mask, length, how)
                logps.sum().backward()
                router.clear()
            seen[name].append(now(device) - start)
            model.zero_grad()
    return {name: (statistics.median(times), tokens[name]) for name, times in seen.items()}


def print_levers(found: dict[str, tuple[float, int]], live: float) -> dict[str, float]:
    """The table, and the ratios as figures."""
    print(f"\n{'update of 8':16} {'s':>8} {'tokens':>9} {'time':>7} {'tokens':>7}   {live:.2f} of the rows are live")
    seconds, tokens = found["all rows"]
    for name, (own, computed) in found.items():
        print(f"{name:16} {own:8.3f} {computed:9} {own / seconds:7.3f} {computed / tokens:7.3f}")
    names = {"live rows": "live_rows_ratio", "shared prompts": "shared_prompts_ratio", "both": "levers_ratio"}
    times = {key: found[name][0] / seconds for name, key in names.items()}
    shared_tokens = found["shared prompts"][1] / tokens
    return times | {"live": live, "shared_prompts_tokens": shared_tokens}


def measure_memory(options: argparse.Namespace, members: int) -> tuple[int, int]:
    """Peak bytes of training `members` routed adapters, and their parameters, from a process of its own."""
    variables = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed tensors go back to the system
    command = [sys.executable, __file__, "--preset", options.preset, "--set", *options.set, "--peak-of", str(members)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def peak_resident_bytes() -> int:
    """Peak of this process. Not `ru_maxrss`, which starts from the size of the process that started this one."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def print_peak(preset: Preset, members: int, device: torch.device) -> None:
    """The other end of [`measure_memory`]."""
    if device.type == "cpu":
        # Large enough that the allocator's pages and Python's objects, about 10 % at rank 16, do not hide the tensors.
        preset = replace(preset, rank=64)
    model, losses = Contender("routed", members).build(make_base(preset, device), preset, make_ids(preset, device))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    for _ in range(3):
        timed_step(losses, optimizer, device)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_resident_bytes()
    print(json.dumps([peak, sum(p.numel() for p in parameters)]))


def print_table(times: dict[tuple[str, int], dict[str, float]], single: float) -> None:
    print(f"{'method':12} {'N':>3} {'forward':>9} {'backward':>9} {'optimizer':>9} {'total s':>9} {'vs one':>7}")
    for (method, members), seconds in times.items():
        phases = " ".join(f"{seconds[phase]:9.3f}" for phase in ("forward", "backward", "optimizer", "total"))
        print(f"{method:12} {members:3} {phases} {seconds['total'] / single:7.3f}")


def members_figures(options: argparse.Namespace, preset: Preset, device: torch.device) -> dict[str, float]:
    """Times and memory by the number of members; prints the table."""
    times = measure_time(preset, options.members, device)
    single = min(times["stock", 1]["total"], times["routed", 1]["total"])
    print_table(times, single)

    many = 8 if 8 in options.members else max(options.members)
    peaks = {members: measure_memory(options, members) for members in (1, many)}
    extra = (peaks[many][0] - peaks[1][0]) / (many - 1)
    least = peaks[1][1] * BYTES_PER_PARAMETER  # at the rank that was measured, see `print_peak`
    print(f"peak {peaks[1][0] / 2**20:.0f} MiB with 1 member, {peaks[many][0] / 2**20:.0f} MiB with {many}: ", end="")
    print(f"{extra / 2**20:.1f} MiB per further adapter, arithmetic minimum {least / 2**20:.1f} MiB")
    figures = {
        f"train_ratio_{many}_vs_1": times["routed", many]["total"] / single,
        "memory_ratio": extra / least,
        "vs_set_adapter_loop": times["routed", many]["total"] / times["set_adapter", many]["total"],
        "extra_bytes_per_adapter": round(extra),
        "minimum_bytes_per_adapter": least,
    }
    if ("mixed", many) in times:
        figures["vs_peft_mixed"] = times["routed", many]["total"] / times["mixed", many]["total"]
    if device.type == "cuda":
        figures["share_of_peak"] = share_of_peak(preset, times["routed", many]["total"])
    return figures


def share_of_peak(preset: Preset, seconds: float) -> float:
    """How much of the card's bf16 arithmetic a step makes use of; 0 on a card whose peak is not known here."""
    from gpu_population import Shape, card  # a second more for every run on a CPU

    gpu, known = card()
    sizes = (preset.hidden, preset.layers, preset.heads, preset.key_value_heads, preset.intermediate)
    # Forward, its recomputation, and the way back through frozen weights.
    work = 6 * Shape(*sizes, preset.vocabulary, False).parameters * preset.rows * preset.tokens
    return known * work / seconds / gpu.flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=NUMBER", help="changes to preset or levers")
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--only", choices=("members", "levers"), help="one of the two parts")
    parser.add_argument("--live", type=float, default=0.375, help="share of live rows; in the quick start it is 0.36")
    parser.add_argument("--peak-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    global CLOCK
    CLOCK = options.clock
    changes = {field: int(number) for field, number in (change.split("=") for change in options.set)}
    lengths = {field: changes.pop(field) for field in list(changes) if field in Levers.__dataclass_fields__}
    preset, levers = replace(PRESETS[options.preset], **changes), Levers(**lengths)
    device = torch.device("cuda" if options.preset == "7b" and torch.cuda.is_available() else "cpu")
    if options.preset == "7b" and device.type == "cpu" and not changes:
        parser.error("the 7b preset needs a GPU of 80 GB; `--set layers=1 ...` makes it small enough for a CPU.")
    if options.peak_of:
        return print_peak(preset, options.peak_of, device)

    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}; {CLOCK} clock; torch {torch.__version__}; {json.dumps(asdict(preset))}")
    figures: dict[str, float] = {}
    if options.only != "levers":
        figures |= members_figures(options, preset, device)
    if options.only != "members":
        figures |= print_levers(measure_levers(preset, levers, options.live, device), options.live)
    print(json.dumps({key: round(value, 3) for key, value in figures.items()}))


if __name__ == "__main__":
    main()
