"""All that a GPU has to settle, in one command: at most 40 minutes on one card of 80 GB, without network.

    python benchmarks/gpu.py                                # writes runs/gpu/results.json and runs/gpu/table.md
    python benchmarks/gpu.py --only environment "7B"        # some parts; those of earlier calls stay in the results
    python benchmarks/gpu.py --model models/Qwen2.5-0.5B-Instruct    # three parts more, on a base of yours
    python benchmarks/gpu.py --dry-run                      # everything small, on a CPU: its figures mean nothing

Each part is a process of its own with a time limit, and writes `runs/gpu/<part>.log`; one that fails or overruns is
named in the table and stops none of the others. Every figure has its row from the start; one without a value says "not
measured", and after a dry run all of them do. The exit status is 1 if a part failed.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
HERE = "benchmarks/"
SEVEN = "recipes/Qwen2.5-Coder-7B/config_4t4s.yaml"
NARROW = (
    "layers=1 hidden=64 heads=2 key_value_heads=1 intermediate=128 vocabulary=512 tokens=16 rows=8 rounds=1 steps=1 "
    "prompt=32 median=16 longest=64"
)
MISSING = "not measured"


@dataclass(frozen=True)
class Part:
    """
    Args:
        name (`str`): What it is called by `--only`.
        minutes (`float`): Time limit.
        command (`str`): Script of this folder with its options.
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

    def limit(self, dry: bool) -> float:
        """Minutes; a CPU, perhaps beside other work, gets more."""
        return self.minutes * (3 if dry else 1)


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
PARTS = (
    Part(
        "environment",
        1,
        "gpu.py --environment",
        "gpu.py --environment",
        {"GPU": "gpu", "memory, GiB": "memory_gib", "versions": "versions", "sandbox level": "sandbox"},
        {},
    ),
    Part(
        "tests",
        8,
        "gpu.py --tests",
        "gpu.py --tests",
        {"passed": "passed", "failed": "failed", "skipped": "skipped"},
        {"failed": "0", "skipped": "0"},
    ),
    Part(
        "0.5B",
        3,
        "gpu_population.py recipes/Qwen2.5-0.5B-Instruct/config_2t2s.yaml",
        "gpu_population.py recipes/Qwen2.5-0.5B-Instruct/config_2t2s.yaml --steps 2 --dry-run",
        POPULATION,
        PREDICTED,
    ),
    Part(
        "7B",
        7,
        f"gpu_population.py {SEVEN} --steps 2",
        f"gpu_population.py {SEVEN} --steps 2 --dry-run",
        POPULATION,
        PREDICTED,
    ),
    Part(
        "7B in 4 bits",
        5,
        "gpu_population.py recipes/Qwen2.5-Coder-7B/config_4t4s_24gb.yaml --completion 256 --steps 2",
        "gpu_population.py recipes/Qwen2.5-Coder-7B/config_4t4s_24gb.yaml --steps 2 --dry-run",
        POPULATION,
        PREDICTED,
    ),
    Part(
        "joint_training",
        6,
        "joint_training.py --preset 7b --members 8 --set rounds=1 steps=2",
        f"joint_training.py --preset 7b --members 2 --set {NARROW}",
        {
            "8 adapters against 1, time of a step": "train_ratio_8_vs_1",
            "against a loop of set_adapter": "vs_set_adapter_loop",
            "memory of an adapter against the least": "memory_ratio",
            "both levers of the update": "levers_ratio",
        },
        {"8 adapters against 1, time of a step": "1.05"},
    ),
    Part(
        "vs_trl",
        4,
        "vs_trl.py --gpu --width 1024",
        "vs_trl.py --small --rounds 1 --steps 1 --width 128",
        VS_TRL | {"update at 7B-like lengths": "update_ratio_long"},
        {"step against TRL's": "0.8", "update against TRL's": "0.5", "update at 7B-like lengths": "0.35"},
    ),
    Part(
        "vllm_routing",
        3,
        "vllm_routing.py",
        "vllm_routing.py --quick --repeats 1 --tokens 8",
        ROUTING,
        ROUTING_EXPECTED,
    ),
    Part(
        "operators",
        3,
        f"operators.py --rounds 1 --threads {min(16, os.cpu_count() or 1)}",
        "operators.py --layers 1 --rounds 1 --threads 1 --steps 2",
        {"seconds of the slowest operator at 7B": "slowest_seconds_7b"},
        {},
    ),
)


def parts_on(model: str) -> tuple[Part, ...]:
    """The parts on a base of the user's, in bf16."""
    recipe = f"gpu_population.py recipes/Qwen2.5-0.5B-Instruct/config_2t2s.yaml --model {model} --steps 2"
    against = f"vs_trl.py --only step --model {model} --rounds 1 --steps 1"
    sweep = f"sweep.py --model {model} --repeats 1 --steps 2 --stock-runs 2"
    on_vllm = SWEEP | {"share of publishing in a run's time": "publish_share"}
    routing = f"vllm_routing.py --quick --model {model}"
    expected = {"step against TRL's": "0.6", "update against TRL's": "0.4"}
    small = f"{routing} --repeats 1 --tokens 8"
    return (
        Part("your model", 5, recipe, f"{recipe} --dry-run", POPULATION, PREDICTED),
        Part("your model, vs_trl", 6, f"{against} --gpu", f"{against} --small", VS_TRL, expected),
        Part(
            "your model, vs_trl on vLLM", 5, f"{against} --gpu --vllm", f"{against} --small --vllm", VS_TRL, expected
        ),
        Part("your model, sweep", 5, f"{sweep} --gpu", f"{sweep} --small", SWEEP, {}),
        Part("your model, sweep on vLLM", 5, f"{sweep} --gpu --vllm", f"{sweep} --small --vllm", on_vllm, {}),
        Part("your model, vllm_routing", 3, routing, small, ROUTING, ROUTING_EXPECTED),
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


def tests() -> dict:
    """The tests that are marked `gpu`, a process per file: an engine gives its memory back when its process ends."""
    counts: dict = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    dry = bool(os.environ.get("POPULORA_GPU_TESTS_ON"))
    # With a CPU engine, whole runs take minutes: tests/test_vllm_runs.py has them.
    files = ["tests/test_gpu.py"] if dry else sorted(map(str, ROOT.glob("tests/test_gpu*.py")))
    with tempfile.TemporaryDirectory() as directory:
        for file in files:
            report = Path(directory, "report.xml")
            options = ["-q", "-rP", "-p", "no:cacheprovider", f"--junitxml={report}"]
            subprocess.run([sys.executable, "-m", "pytest", file, *options], cwd=ROOT, check=False)
            for case in ET.parse(report).iter("testcase"):
                kinds = {child.tag for child in case}
                failed = kinds & {"failure", "error"}
                counts["failed" if failed else "skipped" if "skipped" in kinds else "passed"] += 1
                counts["failures"] += [case.get("name")] if failed else []
    return counts


def run(part: Part, directory: Path, dry: bool) -> dict:
    """Runs a part; `status`, `seconds`, the figures of its last line, and why there are none."""
    command = [sys.executable, "-u", *(HERE + (part.small if dry else part.command)).split()]
    path = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "HF_HUB_OFFLINE": "1"}
    if dry:
        variables |= {"POPULORA_GPU_TESTS_ON": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        variables |= {"TORCH_COMPILE_DISABLE": "1"}  # one small function of the sampler takes a process 20 s
    minutes = part.limit(dry)
    log = directory / f"{part.name.replace(' ', '_')}.log"
    start = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
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
        status = f"stopped after {minutes:g} minutes"
    elif code:
        status = f"failed: {said[-1][:200] if said else f'exit status {code}'}"
    else:
        status = "done" if found else "failed: no figures"
    figures = {} if code else found
    return {"status": status, "seconds": round(time.perf_counter() - start, 1), "dry": dry, "figures": figures}


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


def table(results: dict[str, dict], parts: Sequence[Part] = PARTS) -> str:
    """Every figure of every part, measured or not."""
    lines = ["| part | figure | measured | expected |", "|---|---|---|---|"]
    for part in parts:
        result = results.get(part.name, {"status": MISSING, "figures": {}})
        found = {} if result.get("dry") else result["figures"]
        status = result["status"] + (", a dry run" if result.get("dry") else "")
        spent = f"{result['seconds']} s" if "seconds" in result else ""
        lines.append(f"| **{part.name}** | {status.replace('|', '/')} | {spent} | |")
        for label, place in part.figures.items():
            expected = part.expected.get(label, "")
            known = expected.replace(".", "", 1).isdigit()
            shown = expected if known or not expected else cell(value_at(found, expected))
            lines.append(f"| | {label} | {cell(value_at(found, place))} | {shown} |")
    return "\n".join(lines) + "\n"


def chosen(names: Sequence[str] | None, parts: Sequence[Part]) -> list[Part]:
    """
    Raises:
        `ValueError`: If there is no part of such a name.
    """
    known = {part.name: part for part in parts}
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(f"There is no part {unknown[0]!r}; there are {', '.join(known)}.")
    return [part for part in parts if names is None or part.name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="PART", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--model", help="directory of a base: further parts run on it")
    parser.add_argument("--output", default="runs/gpu", help="directory")
    parser.add_argument("--environment", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tests", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.environment or options.tests:
        print(json.dumps(environment() if options.environment else tests()))
        return
    directory = Path(options.output).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    path, known = directory / "results.json", [*PARTS, *(parts_on(options.model) if options.model else ())]
    parts = chosen(options.only, known)
    results = json.loads(path.read_text()) if path.exists() else {}
    for number, part in enumerate(parts, 1):
        limit = part.limit(options.dry_run)
        print(f"[{number}/{len(parts)}] {part.name}, at most {limit:g} minutes ... ", end="", flush=True)
        results[part.name] = run(part, directory, options.dry_run)
        print(f"{results[part.name]['status']} ({results[part.name]['seconds']:.0f} s)", flush=True)
        path.write_text(json.dumps(results, indent=1))
        (directory / "table.md").write_text(table(results, known))
    print(f"\n{table(results, known)}\n{path}")
    sys.exit(any(results[part.name]["status"] != "done" for part in parts))


if __name__ == "__main__":
    main()
