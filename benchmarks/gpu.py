"""All that a GPU has to settle, in parts of 5 minutes at most on one card of 80 GB, start-up included; no network.

    python benchmarks/gpu.py                        # all parts that have no figures yet, about an hour
    python benchmarks/gpu.py --minutes 14           # as many of them as fit, by their estimates
    python benchmarks/gpu.py --parts environment "7B short, ours" "7B short, TRL"       # these, whatever there is
    python benchmarks/gpu.py --model models/Qwen2.5-0.5B-Instruct    # further parts, on a base of yours
    python benchmarks/gpu.py --dry-run              # everything small, on a CPU: its figures mean nothing

Each part is a process of its own. How long it takes, by an estimate, is printed first; after 5 minutes it is stopped.
It writes `runs/gpu/<part>.log`. A part that fails or is stopped is named in the table and stops none of the others.
Its line of JSON joins those of earlier calls in `runs/gpu/parts.jsonl`: part, date, card, status, seconds, and the
figures, with the share of the card's peak where the card bounds a part. `runs/gpu/table.md` has the newest figures of
each part; a row without a value says "not measured". The exit status is 1 if a part failed.

The parts that end on `TRL` train on the rows that those on `ours` leave in `runs/gpu/kept`. A card with less than 100
GiB gets smaller micro-batches and a smaller cache there, on both sides (`step_at_7b.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parent.parent
HERE = "benchmarks/"
SEVEN = "recipes/Qwen2.5-Coder-7B/config_4t4s.yaml"
NARROW = (
    "layers=1 hidden=64 heads=2 key_value_heads=1 intermediate=128 vocabulary=512 tokens=16 rows=8 rounds=1 steps=1 "
    "prompt=32 median=16 longest=64"
)
MISSING = "not measured"
LIMIT = 5  # minutes of a part


@dataclass(frozen=True)
class Part:
    """
    Args:
        name (`str`): What it is called by `--parts`.
        minutes (`float`): Estimate for one card, start-up included.
        command (`str`): Script of this folder with its options. `{output}` stands for the directory of the results.
        small (`str`): The same for a dry run.
        figures (`dict[str, str]`): Row of the table -> where the value stands in the script's last line, with dots.
        expected (`dict[str, str]`): Row of the table -> what it is compared with: a number, or where one stands.
    """

    name: str
    minutes: float
    command: str
    small: str
    figures: dict[str, str]
    expected: dict[str, str]


SHARES = {
    "share of the card's peak, generate": "share_of_peak.generate",
    "share of the card's peak, update": "share_of_peak.update",
}
STEP = {
    "seconds a step": "seconds.total",
    "generate": "seconds.generate",
    "publish": "seconds.publish",
    "update": "seconds.update",
    "GiB in use at the peak": "used_gib",
    "log-probability difference to vLLM": "logp_difference",
    "seconds until the first step": "start_up",
    "without a warm-up": "warm_up",
} | SHARES
AGAINST_TRL = {
    "step against TRL's": "step_ratio_vs_trl",
    "update against TRL's": "update_ratio_vs_trl",
    "publishing against TRL's sync": "publish_ratio_vs_trl",
}
POPULATION = {
    "GiB in use at the peak": "used_gib",
    "seconds a step": "seconds.total",
    "propose": "seconds.propose",
    "verify": "seconds.verify",
    "solve": "seconds.solve",
    "update": "seconds.update",
    "log-probability difference to vLLM": "logp_difference",
    "share of the card's peak, propose and solve": "share_of_peak.solve",
    "share of the card's peak, update": "share_of_peak.update",
}
PREDICTED = {
    "GiB in use at the peak": "predicted_gib",
    "solve": "predicted_seconds.propose and solve",
    "update": "predicted_seconds.log-probs and update",
    "share of the card's peak, propose and solve": "0.4",
    "share of the card's peak, update": "0.35",
}
VS_TRL = {"step against TRL's": "step_ratio_vs_trl", "update against TRL's": "update_ratio_vs_trl"}
SWEEP = {
    "eight runs of TRL against a sweep of eight": "sweep_speedup",
    "experiments per hour": "experiments_per_hour",
}
SWEEP_ON_VLLM = SWEEP | {"share of publishing in a run's time": "publish_share"}
ROUTING = {
    "8 members mixed against one, tokens/s": "mixed_vs_one",
    "mixed against one after the other": "mixed_vs_sequential",
    "publishing 8 against TRL's sync": "publish_vs_trl",
    "seconds to publish 8": "publish_seconds_8",
}
ROUTING_EXPECTED = {
    "8 members mixed against one, tokens/s": "0.95",
    "mixed against one after the other": "2",
    "publishing 8 against TRL's sync": "10",
}
TESTS = {"passed": "passed", "failed": "failed", "skipped": "skipped"}
ALL_PASS = {"failed": "0", "skipped": "0"}


def step_parts(mix: str, minutes: tuple[float, float], target: str | None = None) -> tuple[Part, Part]:
    """A whole step at 7B shape, ours and stock TRL's."""
    command = f"step_at_7b.py --mix {mix} --keep {{output}}/kept"
    small = f"step_at_7b.py --mix {mix} --keep {{output}}/kept_dry --dry-run --steps 1"  # rows of a card stay
    # Of `long` stock TRL has time for a warm-up and one step.
    steps = " --steps 1" if mix == "long" else ""
    expected = {"step against TRL's": target} if target else {}
    return (
        Part(f"7B {mix}, ours", minutes[0], f"{command} --side ours", f"{small} --side ours", STEP, {}),
        Part(
            f"7B {mix}, TRL",
            minutes[1],
            f"{command} --side trl{steps}",
            f"{small} --side trl",
            STEP | AGAINST_TRL,
            expected,
        ),
    )


PARTS = (
    Part(
        "environment",
        0.5,
        "gpu.py --environment",
        "gpu.py --environment",
        {"GPU": "gpu", "memory, GiB": "memory_gib", "versions": "versions", "sandbox level": "sandbox"},
        {},
    ),
    Part("tests", 4, "gpu.py --tests tests/test_gpu.py", "gpu.py --tests tests/test_gpu.py", TESTS, ALL_PASS),
    Part(
        "tests on vLLM",
        4,
        "gpu.py --tests tests/test_gpu_vllm.py",
        # With a CPU engine, whole runs take minutes: tests/test_vllm_runs.py has them.
        "gpu.py --tests tests/test_gpu_vllm.py::test_a_member_that_is_published_alone_is_taken_up_and_the_others_stay",
        TESTS,
        ALL_PASS,
    ),
    Part(
        "publishing",
        2,
        "publishing.py --rank 32",
        "publishing.py --layers 1 --repeats 1",
        {"device": "seconds_device", "host": "seconds_host", "files": "seconds_files", "nothing": "seconds_nothing"},
        {},
    ),
    *step_parts("short", (3.5, 4), "0.4"),
    *step_parts("long", (3.5, 5)),
    *step_parts("all", (3.5, 4)),
    Part(
        "0.5B",
        3,
        "gpu_population.py recipes/Qwen2.5-0.5B-Instruct/config_2t2s.yaml",
        "gpu_population.py recipes/Qwen2.5-0.5B-Instruct/config_2t2s.yaml --steps 2 --dry-run",
        POPULATION,
        PREDICTED,
    ),
    Part(
        "mixed rows",
        3,
        "vllm_routing.py --quick",
        "vllm_routing.py --quick --repeats 1 --tokens 8",
        ROUTING,
        ROUTING_EXPECTED,
    ),
    Part(
        "overlap",
        4,
        "overlap.py --seven --rank 32 --sizes 16 48 --repeats 4",
        "overlap.py --dry-run",
        {"overlapping against two waves": "largest.ratio", "its iterations": "largest.iterations_ratio"},
        {},
    ),
    Part(
        "update, 8 against 1",
        3,
        "joint_training.py --preset 7b --only members --members 8 --set rounds=1 steps=2",
        f"joint_training.py --preset 7b --only members --members 8 --set {NARROW}",
        {
            "8 adapters against 1, time of a step": "train_ratio_8_vs_1",
            "against a loop of set_adapter": "vs_set_adapter_loop",
            "memory of an adapter against the least": "memory_ratio",
            "share of the card's peak": "share_of_peak",
        },
        {"8 adapters against 1, time of a step": "1.05"},
    ),
    Part(
        "update, live rows and shared prompts",
        3,
        "joint_training.py --preset 7b --only levers --set rounds=1",
        f"joint_training.py --preset 7b --only levers --set {NARROW}",
        {
            "live rows alone": "live_rows_ratio",
            "shared prompts": "shared_prompts_ratio",
            "both": "levers_ratio",
        },
        {},
    ),
    Part(
        "memory at 7B",
        4.5,
        f"gpu_population.py {SEVEN} --steps 2 --completion 1024",
        f"gpu_population.py {SEVEN} --steps 2 --dry-run",
        POPULATION,
        PREDICTED,
    ),
    Part(
        "7B in 4 bits",
        4,
        "gpu_population.py recipes/Qwen2.5-Coder-7B/config_4t4s_24gb.yaml --completion 128 --steps 2",
        "gpu_population.py recipes/Qwen2.5-Coder-7B/config_4t4s_24gb.yaml --steps 2 --dry-run",
        POPULATION,
        PREDICTED,
    ),
    Part(
        "vs_trl",
        2,
        "vs_trl.py --gpu --only step --rounds 1",
        "vs_trl.py --small --only step --rounds 1 --steps 1",
        VS_TRL,
        {"step against TRL's": "0.8", "update against TRL's": "0.5"},
    ),
    Part(
        "vs_trl, long",
        2,
        "vs_trl.py --gpu --only long --width 1024",
        "vs_trl.py --small --only long --width 128",
        {"update at 7B-like lengths": "update_ratio_long"},
        {"update at 7B-like lengths": "0.35"},
    ),
    Part("sweep", 4, "sweep.py --gpu --repeats 1 --steps 4 --stock-runs 2", "sweep.py --small", SWEEP, {}),
    Part(
        "sweep on vLLM",
        4,
        "sweep.py --gpu --vllm --repeats 1 --steps 4 --stock-runs 2",
        "sweep.py --small --vllm",
        SWEEP_ON_VLLM,
        {},
    ),
)


def parts_on(model: str) -> tuple[Part, ...]:
    """The parts on a base of the user's, in bf16."""
    recipe = f"gpu_population.py recipes/Qwen2.5-0.5B-Instruct/config_2t2s.yaml --model {model} --steps 2"
    against = f"vs_trl.py --only step --model {model} --rounds 1 --steps 1"
    sweep = f"sweep.py --model {model} --repeats 1 --steps 2 --stock-runs 2"
    routing = f"vllm_routing.py --quick --model {model}"
    expected = {"step against TRL's": "0.6", "update against TRL's": "0.4"}
    return (
        Part("your model", 5, recipe, f"{recipe} --dry-run", POPULATION, PREDICTED),
        Part("your model, vs_trl", 5, f"{against} --gpu", f"{against} --small", VS_TRL, expected),
        Part(
            "your model, vs_trl on vLLM", 5, f"{against} --gpu --vllm", f"{against} --small --vllm", VS_TRL, expected
        ),
        Part("your model, sweep", 5, f"{sweep} --gpu", f"{sweep} --small", SWEEP, {}),
        Part("your model, sweep on vLLM", 5, f"{sweep} --gpu --vllm", f"{sweep} --small --vllm", SWEEP_ON_VLLM, {}),
        Part("your model, mixed rows", 3, routing, f"{routing} --repeats 1 --tokens 8", ROUTING, ROUTING_EXPECTED),
    )


def environment() -> dict:
    """What there is to measure on."""
    import torch

    from trl_populora.sandbox import Sandbox

    names = ("torch", "trl", "transformers", "peft", "accelerate", "vllm", "bitsandbytes", "deepspeed")
    versions = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    found = {"gpu": None, "memory_gib": None, "versions": ", ".join(f"{k} {v}" for k, v in versions.items())}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "memory_gib": torch.cuda.mem_get_info()[1] / 2**30}
        found |= {"cuda": torch.version.cuda, "bf16": torch.cuda.is_bf16_supported()}
        found |= {"free_gib": torch.cuda.mem_get_info()[0] / 2**30}
    with Sandbox(1, allow_weak=True) as sandbox:
        found["sandbox"] = sandbox.level
    return found | {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}


def tests(what: str) -> dict:
    """The tests of a file, or one of them, that are marked `gpu`."""
    counts: dict = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        options = ["-m", "gpu", "-q", "-rP", "-p", "no:cacheprovider", f"--junitxml={report}"]
        subprocess.run([sys.executable, "-m", "pytest", what, *options], cwd=ROOT, check=False)
        for case in ET.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            failed = kinds & {"failure", "error"}
            counts["failed" if failed else "skipped" if "skipped" in kinds else "passed"] += 1
            counts["failures"] += [case.get("name")] if failed else []
    return counts


def find_card() -> str:
    """The name of the first GPU, asked without a context on it."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "CPU"


def run(part: Part, directory: Path, dry: bool, minutes: float) -> dict[str, Any]:
    """Runs a part for so many minutes at most. Returns its line: status, seconds, and the figures that it printed."""
    words = (HERE + (part.small if dry else part.command)).replace("{output}", str(directory)).split()
    path = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "HF_HUB_OFFLINE": "1"}
    if dry:
        variables |= {"POPULORA_GPU_TESTS_ON": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        variables |= {"TORCH_COMPILE_DISABLE": "1"}  # one small function of the sampler takes a process 20 s
    log = directory / f"{part.name.replace(' ', '_')}.log"
    start = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", *words],
            cwd=ROOT,
            env=os.environ | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=60 * minutes)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started, too: a group of its own
            process.wait()
    text = log.read_text(errors="replace")
    said, found = [line for line in text.splitlines() if line.strip()], figures_in(text)  # also of a part that hangs
    if code is None:
        status = f"stopped after {minutes:.2g} minutes"
    elif code:
        status = f"failed: {said[-1][:200] if said else f'exit status {code}'}"
    else:
        status = "done" if found else "failed: no figures"
    return {
        "part": part.name,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        "card": "CPU" if dry else find_card(),
        "dry": dry,
        "status": status,
        "seconds": round(time.perf_counter() - start, 1),
        "figures": {} if code else found,
    }


def figures_in(log: str) -> dict:
    """What a script said last in JSON. A library's last words may stand before it on that line, or after it."""
    lines = (re.search(r'\{".*\}$', line) for line in reversed(log.splitlines()))
    return next((json.loads(found[0]) for found in lines if found), {})


def value_at(figures: dict, place: str) -> object:
    """What stands in nested figures under a name with dots."""
    for name in place.split("."):
        figures = figures.get(name) if isinstance(figures, dict) else None
    return figures


def cell(value: object) -> str:
    return MISSING if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def newest(lines: Sequence[dict[str, Any]], part: Part) -> dict[str, Any]:
    """Of the part's lines: the last that measured something, or the last."""
    own = [line for line in lines if line["part"] == part.name]
    measured = [line for line in own if line["figures"] and not line["dry"]]
    return (measured or own or [{"status": MISSING, "dry": False, "figures": {}}])[-1]


def table(lines: Sequence[dict[str, Any]], parts: Sequence[Part] = PARTS) -> str:
    """Every figure of every part, measured or not."""
    rows = ["| part | figure | measured | expected |", "|---|---|---|---|"]
    for part in parts:
        line = newest(lines, part)
        found = {} if line["dry"] else line["figures"]
        status = line["status"].replace("|", "/") + (", a dry run" if line["dry"] else "")
        spent = f"{line['seconds']} s, {line['card']}, {line['date']}" if "seconds" in line else ""
        rows.append(f"| **{part.name}** | {status} | {spent} | |")
        for label, place in part.figures.items():
            expected = part.expected.get(label, "")
            known = expected.replace(".", "", 1).isdigit()
            shown = expected if known or not expected else cell(value_at(found, expected))
            rows.append(f"| | {label} | {cell(value_at(found, place))} | {shown} |")
    return "\n".join(rows) + "\n"


def choose(
    names: Sequence[str] | None, parts: Sequence[Part], lines: Sequence[dict[str, Any]], card: str, dry: bool
) -> list[Part]:
    """
    The parts of these names, or those that were not done yet on this card, or not yet dry.

    Raises:
        `ValueError`: If there is no part of such a name.
    """
    known = {part.name: part for part in parts}
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(f"There is no part {unknown[0]!r}; there are {', '.join(map(repr, known))}.")
    if names is not None:
        return [known[name] for name in names]
    done = {
        line["part"]
        for line in lines
        if line["status"] == "done" and line["dry"] == dry and (dry or line["card"] == card)
    }
    return [part for part in parts if part.name not in done]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true")
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument("--parts", nargs="+", metavar="PART", help=f"by default those without figures; of {names}")
    parser.add_argument("--minutes", type=float, help="take as many parts as fit into so many")
    parser.add_argument("--model", help="directory of a base: further parts run on it")
    parser.add_argument("--output", default="runs/gpu", help="directory")
    parser.add_argument("--environment", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tests", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.environment or options.tests:
        print(json.dumps(environment() if options.environment else tests(options.tests)))
        return
    start = time.perf_counter()
    directory = Path(options.output).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    path, known = directory / "parts.jsonl", [*PARTS, *(parts_on(options.model) if options.model else ())]
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    try:
        parts = choose(options.parts, known, lines, find_card(), options.dry_run)
    except ValueError as error:
        parser.error(str(error))
    failed = False
    for number, part in enumerate(parts, 1):
        print(f"[{number}/{len(parts)}] {part.name}, about {part.minutes:g} minutes ... ", end="", flush=True)
        limit: float = LIMIT * (3 if options.dry_run else 1)  # a CPU, perhaps beside other work
        if options.minutes is not None:
            left = options.minutes - (time.perf_counter() - start) / 60
            if left < part.minutes:
                print(f"does not fit into the {max(0, left):.1f} that are left", flush=True)
                continue
            limit = min(limit, left)
        line = run(part, directory, options.dry_run, limit)
        failed |= line["status"] != "done"
        print(f"{line['status']} ({line['seconds']:.0f} s)", flush=True)
        lines.append(line)
        with path.open("a") as kept:
            kept.write(json.dumps(line) + "\n")
        (directory / "table.md").write_text(table(lines, known))
    print(f"\n{table(lines, known)}\n{path}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
