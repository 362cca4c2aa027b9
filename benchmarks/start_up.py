"""Seconds from the command to the end of its first step, over those that importing TRL's trainer takes alone.

    python benchmarks/start_up.py [--clock cpu] [--repeats 3]
    python benchmarks/start_up.py --against ../before      # and what another checkout of this package takes

*Quick start* is `populora quickstart`. *Self-play* is `recipes/tiny/config_2t2s.yaml` without evaluation. `--vllm`
adds the same with an engine in the process. *Import* is `from trl import GRPOTrainer`. Each has a process of its own.
They start in turns, and are ended as soon as they tell their first step. Medians over the repeats. `--clock cpu` is
CPU seconds of a process and of those below it, for a machine that has other work. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil


ROOT = Path(__file__).resolve().parent.parent
POPULORA = "import sys; from trl_populora.cli import main; sys.exit(main())"
SELF_PLAY = "train --config recipes/tiny/config_2t2s.yaml --eval_strategy no --eval_on_start false"
VLLM = "--use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.1 --vllm_max_model_length 1024"
IMPORT, QUICK_START, PLAIN, ENGINE = "import TRL", "quick start", "self-play", "self-play, vLLM"
COMMANDS = {
    IMPORT: [sys.executable, "-c", "from trl import GRPOTrainer; print('step 1/1 ')"],
    QUICK_START: [sys.executable, "-c", POPULORA, "quickstart"],
    PLAIN: [sys.executable, "-c", POPULORA, *SELF_PLAY.split()],
    ENGINE: [sys.executable, "-c", POPULORA, *SELF_PLAY.split(), *VLLM.split()],
}


def time_start(command: list[str], tree: Path, cpu: bool) -> float:
    """
    Seconds from starting a command of a checkout until it tells its first step.

    Raises:
        `RuntimeError`: If the command ends before.
    """
    with tempfile.TemporaryDirectory() as output:
        where = [] if "GRPOTrainer" in command[2] else ["--output_dir", f"{output}/run"]
        environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONUNBUFFERED": "1"}
        begun, said = time.perf_counter(), []
        started = subprocess.Popen(
            [*command, *where],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for line in started.stdout:  # type: ignore[union-attr]  # the progress bar ends its lines with \r: one line each
            said.append(line)
            if " 1/" in line and "step" in line:
                seconds = count_cpu(started.pid) if cpu else time.perf_counter() - begun
                break
        else:
            raise RuntimeError(f"{' '.join(command)} ended before its first step:\n{''.join(said[-20:])}")
        for process in [*psutil.Process(started.pid).children(recursive=True), started]:
            process.kill()
        started.communicate()
        return seconds


def count_cpu(pid: int) -> float:
    """CPU seconds of a process and of those below it, with those that they have waited for."""
    whole = psutil.Process(pid)
    return sum(sum(process.cpu_times()[:4]) for process in [whole, *whole.children(recursive=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--vllm", action="store_true", help="with an engine in the process, too")
    parser.add_argument("--against", type=Path, help="another checkout of this package")
    options = parser.parse_args()
    trees = {"here": ROOT} | ({"against": options.against.resolve()} if options.against else {})
    names = [IMPORT, QUICK_START, PLAIN, *([ENGINE] if options.vllm else ())]
    sides = [(name, tree) for name in names for tree in trees if name != IMPORT or tree == "here"]
    seconds: dict[tuple[str, str], list[float]] = {side: [] for side in sides}
    for repeat in range(-1, options.repeats):
        for name, tree in sides:
            taken = time_start(COMMANDS[name], trees[tree], options.clock == "cpu")
            if repeat >= 0:  # the first round warms the files that all read
                seconds[name, tree].append(taken)
    medians = {side: statistics.median(taken) for side, taken in seconds.items()}
    imported = medians[IMPORT, "here"]
    print(f"| to the end of the first step | checkout | {options.clock} seconds | over importing TRL |")
    print("|---|---|---|---|")
    for (name, tree), taken in medians.items():
        print(f"| {name} | {tree} | {taken:.1f} | {taken / imported:.2f} |")
    told = {f"{name}, {tree}": round(taken, 2) for (name, tree), taken in medians.items()}
    ratios = {
        f"{name}, here over against": round(medians[name, "here"] / medians[name, "against"], 3)
        for name in names
        if (name, "against") in medians
    }
    print(json.dumps({"clock": options.clock, "seconds": told, **ratios}))


if __name__ == "__main__":
    main()
