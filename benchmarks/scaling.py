"""How a step grows with rows, members and processes, on the embedded base.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py
    OMP_NUM_THREADS=1 python benchmarks/scaling.py --generation_tokens 45000    # no more attempts at once
    python benchmarks/scaling.py --rows 24 48 --members 2 4 --at 24 --ranks 1 2 --batch 8 --rounds 1 --tokens 24

Three sweeps: rows of a step with 2 teachers and 2 students; members at `--at` rows; and processes (DDP over gloo) with
as many rows each as the smallest step has. Every row is sampled to `--tokens` tokens, by the trainer of
`step_overhead.py`. Trainers of the first two sweeps live at once and train in turn. Processes are started for each
size of the third, and share the cores: all is counted in CPU seconds, of a process and of its sandbox. The second
command walks through it.

A slope is the exponent of time per row: 0 is flat, and at .05 a step of eight times the rows takes 11 % more for each.
It is fitted to the medians of all sizes, phase by phase; a phase that takes less than a hundredth of the step has
none. `ranks_ratio_N` is the time per row with N processes over that with one, where work shows that each of them does
for all rows. How many rows have an advantage is chance, and moves the update's time. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from step_overhead import PHASES, CpuClock, FixedLengthTrainer, Recorder, make_trainer

from trl_populora import trainer as populora_trainer
from trl_populora.population import evolution
from trl_populora.step import play as step_play


ROOT = Path(__file__).resolve().parent.parent
PAIRS = 2  # teachers, and students, where members do not grow
ATTEMPTS = 3
LEFT_OUT = ("tokens", "valid")


def count_proposals(rows: int, pairs: int) -> int:
    """
    Proposals of each of so many teachers in a step of so many rows.

    Raises:
        `ValueError`: If there is no whole number of them.
    """
    proposals, rest = divmod(rows, pairs * (1 + ATTEMPTS))
    if rest or not proposals:
        raise ValueError(
            f"{rows} rows are no whole number of proposals for {pairs} teachers; each has {1 + ATTEMPTS}."
        )
    return proposals


def slope(sizes: Sequence[float], times: Sequence[float]) -> float:
    """Exponent of the power that fits best, by least squares of the logarithms."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(time) for time in times]).slope


def find_medians(recorder: Recorder) -> dict[str, float]:
    return {
        phase: statistics.median(step[phase] for step in recorder.steps)
        for phase in recorder.steps[0]
        if phase not in LEFT_OUT
    }


def sweep(
    options: argparse.Namespace, sizes: dict[str, tuple[int, int]], directory: str
) -> dict[str, dict[str, float]]:
    """Seconds by phase of a step of each size, given as pairs of members and rows; trainers train in turn."""
    clock = CpuClock()
    for module in (step_play, populora_trainer, evolution):  # whose own timers name the phases
        module.time = SimpleNamespace(perf_counter=clock)
    trainers: dict[str, tuple[FixedLengthTrainer, Recorder]] = {
        name: make_trainer(
            options, clock, f"{directory}/{name}", pairs, count_proposals(rows, pairs), attempts=ATTEMPTS
        )
        for name, (pairs, rows) in sizes.items()
    }
    for _ in range(options.rounds):
        for trainer, _ in trainers.values():
            trainer.train()
    for trainer, _ in trainers.values():
        trainer.close()
    return {name: find_medians(recorder) for name, (_, recorder) in trainers.items()}


def launch(options: argparse.Namespace, ranks: int, directory: str) -> dict[str, float]:
    """Seconds by phase of a step of so many processes, the mean over them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", str(port)]
    config = ROOT / "accelerate_configs" / ("cpu_ddp.yaml" if ranks > 1 else "single.yaml")
    command += ["--config_file", str(config), "--num_processes", str(ranks), *(["--cpu"] if ranks == 1 else [])]
    shared = ("model", "rank", "tokens", "batch", "rounds", "steps", "generation_tokens")
    settings = {name: value for name in shared if (value := getattr(options, name)) is not None}
    command += [__file__, "--worker", directory, "--rows", str(min(options.rows) * ranks)]
    command += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{ranks} processes ended with code {done.returncode}:\n{done.stderr[-3000:]}")
    found = [json.loads(path.read_text()) for path in sorted(Path(directory).glob("rank_*.json"))]
    return {phase: statistics.fmean(each[phase] for each in found) for phase in found[0]}


def work(options: argparse.Namespace) -> None:
    """One of the processes that `launch` starts."""
    rows = options.rows[0]
    found = sweep(options, {"run": (PAIRS, rows)}, options.worker)["run"]
    rank = int(os.environ.get("RANK", "0"))
    Path(options.worker, f"rank_{rank}.json").write_text(json.dumps(found))


def print_table(title: str, found: dict[int, dict[str, float]], rows: dict[int, float]) -> dict[str, float]:
    """Milliseconds of CPU per row by phase and size; returns the slopes."""
    sizes = list(found)
    print(f"\n{title:14}" + "".join(f"{size:>10}" for size in sizes) + f"{'slope':>9}")
    slopes = {}
    for phase in (*PHASES, "total"):
        per_row = [found[size][phase] / rows[size] for size in sizes]
        if len(sizes) > 1 and min(per_row) > 0 and found[sizes[0]][phase] >= found[sizes[0]]["total"] / 100:
            slopes[phase] = round(slope(sizes, per_row), 4)
        told = f"{slopes[phase]:9.3f}" if phase in slopes else f"{'-':>9}"
        print(f"{phase:14}" + "".join(f"{1000 * each:10.3f}" for each in per_row) + told)
    return slopes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[72, 144, 288, 576], help="of a step, one sweep")
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4, 8, 16], help="teachers and students together")
    parser.add_argument("--at", type=int, default=288, help="rows of a step while members grow")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4], help="processes, the last sweep; 1 comes first"
    )
    parser.add_argument("--model", default="tiny", help="base model")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of every completion")
    parser.add_argument("--generation_tokens", type=int, help="tokens in the cache at once, as in a recipe")
    parser.add_argument("--batch", type=int, default=24, help="rows of a micro-batch")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="counted steps per round and size")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.vllm = False
    if options.worker:
        work(options)
        return
    with tempfile.TemporaryDirectory() as directory:
        sizes = {f"rows {rows}": (PAIRS, rows) for rows in options.rows}
        sizes |= {f"members {members}": (members // 2, options.at) for members in options.members}
        found = sweep(options, sizes, directory)
        ranks = {}
        for count in options.ranks:
            place = Path(directory, f"ranks {count}")
            place.mkdir()
            ranks[count] = launch(options, count, str(place))
    by_rows = {rows: found[f"rows {rows}"] for rows in options.rows}
    by_members = {members: found[f"members {members}"] for members in options.members}
    print(
        f"{options.model}, rank {options.rank}, {options.tokens} sampled tokens a row, {options.rounds} rounds; ",
        end="",
    )
    print("milliseconds of CPU per row")
    slopes = {
        "rows": print_table("rows", by_rows, {rows: rows for rows in by_rows}),
        "members": print_table("members", by_members, dict.fromkeys(by_members, options.at)),
        "ranks": print_table("ranks", ranks, dict.fromkeys(ranks, min(options.rows))),
    }
    first = ranks[options.ranks[0]]
    result = {f"{name}_slope": slopes[name].get("total") for name in ("rows", "members")}
    result |= {f"ranks_ratio_{n}": round(ranks[n]["total"] / first["total"], 4) for n in options.ranks[1:]}
    print(json.dumps(result | {"slopes": slopes}))


if __name__ == "__main__":
    main()
