"""What the task archive costs a step when it holds 10,000 and when it holds 1,000,000 tasks.

    python benchmarks/archive.py [--tasks 1000000] [--per_step 48] [--steps 20]

A step adds `per_step` new tasks and as many duplicates, notes how they fared, and samples 6 references for each. Both
sizes are measured in one run, in interleaved blocks. Programs come from templates: about 12 lines, all different. Left
out: proposing, verifying and writing checkpoints (timed at the end, once).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import resource
import statistics
import tempfile
import time
from pathlib import Path

from trl_populora.tasks.archive import NOTED, TaskArchive, load_archive, save_archive
from trl_populora.tasks.kind import Task


PROGRAM = """def f(items, limit={a}):
    total = {b}
    seen = []
    for index, item in enumerate(items):
        if item % {c} == {d}:
            total += item * {e}
        elif item > limit:
            seen.append(item - {a})
        else:
            total -= index
    return total + sum(seen)
"""


def make_task(number: int) -> Task:
    """A program of its own, its number spread over the constants."""
    digits = [number // 97**place % 97 for place in range(4)]
    names = dict(zip("abcde", [*digits, number % 7], strict=True))
    kind = ("code_o", "code_i", "code_f")[number % 3]
    value = f'["t",[["l",[{number % 50},3,4]]]]'
    return Task(kind, PROGRAM.format(**names), (value,), (str(number % 1000),), author="teacher_0", step=number // 48)


def fill(archive: TaskArchive, number: int) -> None:
    """
    As resuming does: keys and coverage are given. Every program has a structure and a form of its own, the worst case.
    """
    note = dict(zip(NOTED, (0.0, 0.5, 7.0, 4.0, 11.0, 6.0), strict=True))
    entries = ((make_task(n), hashlib.blake2b(str(n).encode(), digest_size=16).digest(), note) for n in range(number))
    forms = [n * 0x9E3779B97F4A7C15 % 2**64 for n in range(number)]
    archive.restore(entries, {"counts": {f"{n:016x}": 1 for n in range(number)}, "forms": forms})


def step_seconds(archive: TaskArchive, first: int, per_step: int, rng: random.Random) -> float:
    """CPU seconds of one step's work on the archive (others may use the machine); making the tasks is not counted."""
    tasks = [make_task(first + offset) for offset in range(per_step)]
    start = time.process_time()
    for task in tasks:
        archive.sample(["code_o", "code_i"], 6, rng)
        assert archive.add(task)
        assert not archive.add(task)
    for task in tasks:
        archive.note(task, match=0, solve_rate=0.5, ast_depth=7.0, cyclomatic=4.0, lines=11.0, variables=6.0)
    return time.process_time() - start


def main(tasks: int, per_step: int, steps: int) -> dict[str, float]:
    """Fills both archives, measures both, and returns the figures."""
    rng = random.Random(0)
    small, large = TaskArchive(cap=10_000 // 3 + 1), TaskArchive(cap=tasks // 3 + 1)
    before = resident_mb()
    start = time.process_time()
    fill(large, tasks)
    filled, memory = time.process_time() - start, resident_mb() - before
    print(f"{len(large):,} tasks restored in {filled:.0f} s, {memory:.0f} MB")
    fill(small, 10_000)

    times: dict[str, list[float]] = {"small": [], "large": []}
    for step in range(steps):
        first = tasks + step * per_step
        times["small"].append(step_seconds(small, first, per_step, rng))
        times["large"].append(step_seconds(large, first, per_step, rng))
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    print(f"{'archive':>12} {'ms per step':>12}\n{len(small):>12,} {medians['small']:>12.1f}")
    print(f"{len(large):>12,} {medians['large']:>12.1f}")

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "archive.parquet")
        start = time.process_time()
        save_archive(large, path)
        saved, size = time.process_time() - start, path.stat().st_size / 2**20
        coverage = large.coverage.state_dict()
        del large
        start = time.process_time()
        load_archive(TaskArchive(cap=tasks // 3 + 1), path, coverage)
        print(f"saved in {saved:.1f} s ({size:.0f} MB), loaded in {time.process_time() - start:.1f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {
        "step_ms_at_1e6": round(medians["large"], 2),
        "growth_1e6_vs_1e4": round(medians["large"] / medians["small"], 3),
        "memory_mb": round(memory),
        "peak_mb": round(peak),
        "save_s": round(saved, 1),
    }


def resident_mb() -> float:
    """Resident memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1_000_000, help="size of the large archive")
    parser.add_argument("--per_step", type=int, default=48, help="new tasks per step")
    parser.add_argument("--steps", type=int, default=20, help="steps measured at each size")
    print(json.dumps(main(**vars(parser.parse_args()))))
