"""Programs per second through the sandbox and through what others do, on the same programs in the same minutes.

    python benchmarks/sandbox.py [--rounds 5] [--seconds 1.5] [--workers 2] [--soak 3000]

Contenders take turns, round after round; a figure is the median over the rounds and a ratio is the median of the
ratios within each round, so that a busy machine disturbs both sides alike; a loss is against the clean rates just
before and just after. Peers:

* `python -I`: a fresh interpreter per program, as careful users do it by hand;
* evalplus style: a `multiprocessing` fork per program with resource limits, disabled functions and a shared-memory
  verdict, written here after the idea;
* pebble: a pool of long-lived processes without isolation, as Absolute Zero uses it (only when installed).

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from trl_populora.sandbox import Job, Limits, Sandbox
from trl_populora.sandbox.values import decode, encode


BODIES = [
    "def f(x):\n    return x * {n} + 1",
    "def f(x):\n    return sorted([x % 7, {n}, 3, x])[::-1]",
    "def f(x):\n    total = 0\n    for i in range(x + {n} % 50):\n        total += i * i\n    return total",
    "def f(x):\n    return ''.join(chr(97 + (i * x + {n}) % 26) for i in range(12))",
    "def g(n):\n    return n if n < 2 else g(n - 1) + g(n - 2)\ndef f(x):\n    return g(x % 5 + {n} % 7)",
    "import math\ndef f(x):\n    return math.gcd(x, {n}) + math.isqrt(x + {n})",
    "from collections import Counter\ndef f(x):\n    return dict(Counter(str(x * {n})))",
    "import itertools\ndef f(x):\n    return [list(p) for p in itertools.combinations(range(x % 4 + 2), 2)] + [{n}]",
    "import re\ndef f(x):\n    return re.sub(r'[aeiou]', str({n}), 'education' * (x % 3 + 1))",
    "class Stack:\n    def __init__(self):\n        self.items = []\n    def push(self, v):\n        "
    "self.items.append(v)\n"
    "def f(x):\n    s = Stack()\n    for i in range(x % 9 + {n} % 5):\n        s.push(i ^ {n})\n    return s.items",
]
LOOP = "def f(x):\n    while True:\n        x += 1\n# {n}"
BOMB = "def f(x):\n    a = []\n    while True:\n        a.append(bytes(10**6))\n# {n}"
ROOMY = Limits(cpu_seconds=60.0)


def program(number: int) -> str:
    return BODIES[number % len(BODIES)].format(n=number) + "\n"


# The peers.

_FRESH = """
import sys, json
job = json.load(sys.stdin)
scope = {}
exec(job["program"], scope)
print(repr([scope["f"](*inputs) for inputs in job["inputs"]]))
"""


def python_i(source: str, inputs: list[tuple]) -> bool:
    """A fresh isolated interpreter."""
    data = json.dumps({"program": source, "inputs": inputs})
    done = subprocess.run(
        [sys.executable, "-I", "-c", _FRESH], input=data, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode == 0


def _guarded(source: str, inputs: list[tuple], verdict, limit: float) -> None:
    """What runs in the fork: guards as evalplus has them, then the program, then a number in shared memory."""
    for name, value in (("RLIMIT_AS", 4 << 30), ("RLIMIT_DATA", 4 << 30), ("RLIMIT_CPU", int(limit) + 1)):
        resource.setrlimit(getattr(resource, name), (value, value))
    import builtins
    import shutil

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        names = "kill system putenv remove removedirs rmdir fchdir setuid fork forkpty killpg rename renames truncate"
        for name in f"{names} replace unlink fchmod fchown chmod chown".split():
            setattr(os, name, None)
        shutil.rmtree = shutil.move = shutil.chown = subprocess.Popen = builtins.quit = None
        try:
            scope: dict = {}
            exec(source, scope)
            for each in inputs:
                scope["f"](*each)
            verdict.value = 1
        except BaseException:  # noqa: B036 - the peer swallows everything
            verdict.value = 2


def evalplus_style(source: str, inputs: list[tuple], limit: float = 60.0) -> bool:
    """One `multiprocessing` fork per program."""
    context = multiprocessing.get_context("fork")
    verdict = context.Value("i", 0)
    process = context.Process(target=_guarded, args=(source, inputs, verdict, limit))
    process.start()
    process.join(limit)
    if process.is_alive():
        process.terminate()
        process.join(0.1)
    if process.is_alive():
        process.kill()
        process.join()
    return verdict.value == 1


def _unguarded(source: str, inputs: list[tuple]) -> bool:
    scope: dict = {}
    exec(source, scope)
    return all(scope["f"](*each) is not scope for each in inputs)


# Contenders: each takes a first number and how long, and returns programs per second.


def timed(seconds: float, first: int, batch: int, run: Callable[[list[int]], int]) -> float:
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        done += run(list(range(first + done, first + done + batch)))
    return done / (time.perf_counter() - start)


def ours(sandbox: Sandbox, *, inputs: int = 1, runs: int = 1) -> Callable[[int, float], float]:
    texts = tuple(encode((value,)) for value in range(5, 5 + inputs))

    def run(numbers: list[int]) -> int:
        verdicts = sandbox.run([Job(program(n), texts, runs=runs, limits=ROOMY) for n in numbers])
        wrong = [verdict for verdict in verdicts if not verdict.ok]
        assert not wrong, wrong[0]
        return len(verdicts)

    return lambda first, seconds: timed(seconds, first, 100, run)


def peer(check: Callable, workers: int, batch: int) -> Callable[[int, float], float]:
    def run(numbers: list[int]) -> int:
        with ThreadPoolExecutor(workers) as pool:
            results = list(pool.map(lambda n: check(program(n), [(5,)]), numbers))
        assert all(results)
        return len(results)

    return lambda first, seconds: timed(seconds, first, batch, run)


def pebble_pool(workers: int) -> Callable[[int, float], float] | None:
    try:
        import pebble
    except ImportError:
        return None
    pool = pebble.ProcessPool(max_workers=workers)

    def run(numbers: list[int]) -> int:
        futures = [pool.schedule(_unguarded, args=(program(n), [(5,)]), timeout=60) for n in numbers]
        return sum(future.result() for future in futures)

    return lambda first, seconds: timed(seconds, first, 100, run)


def check_truth(sandbox: Sandbox) -> None:
    """The figures count only if the answers are right."""
    for number in range(len(BODIES)):
        scope: dict = {}
        exec(program(number), scope)
        (verdict,) = sandbox.run([Job(program(number), (encode((5,)),), runs=2, limits=ROOMY)])
        assert decode(verdict.outputs[0]) == scope["f"](5), verdict


def rolling(sandbox: Sandbox, seconds: float, bad: str | None, limit: float) -> float:
    """Good programs per second while the pool is kept full, with every hundredth program bad."""
    text = (encode((5,)),)
    flying, good, number = {}, 0, 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        # Bad programs come on top of a full window, as they would in a long queue.
        while sum(not each for each in flying.values()) < 200:
            number += 1
            is_bad = bad is not None and number % 100 == 50
            source = bad.format(n=number) if is_bad else program(number)
            flying[sandbox.submit(Job(source, text, limits=Limits(cpu_seconds=limit)))] = is_bad
        done, _ = wait(flying, timeout=1.0, return_when=FIRST_COMPLETED)
        for future in done:
            good += not flying.pop(future) and future.result().ok
    elapsed = time.perf_counter() - start
    for future in flying:
        future.result()
    return good / elapsed


def batch_seconds(sandbox: Sandbox, count: int, bad: str | None, limit: float) -> float:
    """Seconds for a whole batch, its last bad program included."""
    text = (encode((5,)),)
    sources = [bad.format(n=n) if bad and n % 100 == 50 else program(n) for n in range(count)]
    start = time.perf_counter()
    sandbox.run([Job(source, text, limits=Limits(cpu_seconds=limit)) for source in sources])
    return time.perf_counter() - start


def kill_latency(sandbox: Sandbox, repeats: int = 15, limit: float = 0.3) -> float:
    """Milliseconds from the limit of an endless loop to the verdict in the caller's hands."""
    late = []
    for number in range(repeats):
        start = time.perf_counter()
        (verdict,) = sandbox.run([Job(LOOP.format(n=number), (encode((5,)),), limits=Limits(cpu_seconds=limit))])
        assert verdict.status == "timeout"
        late.append(time.perf_counter() - start - limit)
    return 1000 * statistics.median(late)


def held(sandbox: Sandbox) -> dict[str, int]:
    """What this process and the zygotes hold: descriptors, resident kilobytes, processes of the zygotes' sessions."""
    sessions = {each.process.pid for each in sandbox._supervisor._workers()}
    found = {"descriptors": len(os.listdir("/proc/self/fd")), "kilobytes": 0, "zygote_kilobytes": 0, "processes": 0}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            session = int((path / "stat").read_text().rpartition(")")[2].split()[3])
            pages = int((path / "statm").read_text().split()[1])
            if int(path.name) == os.getpid():
                found["kilobytes"] = pages * resource.getpagesize() // 1024
            elif session in sessions:
                found["processes"] += 1
                found["zygote_kilobytes"] += pages * resource.getpagesize() // 1024
    return found


def soak(sandbox: Sandbox, count: int) -> dict:
    """Growth of descriptors, processes and memory over many programs, after a warm-up of the same kind."""
    jobs = [Job(program(n), (encode((5,)),), limits=ROOMY) for n in range(500)]
    for _ in range(3):
        sandbox.run(jobs)
    before, start = held(sandbox), time.perf_counter()
    for _ in range(count // len(jobs)):
        assert all(verdict.ok for verdict in sandbox.run(jobs))
    rate = count / (time.perf_counter() - start)
    growth = {name: value - before[name] for name, value in held(sandbox).items()}
    return {"programs": count} | growth | {"respawns": sandbox.report()["respawns"], "per_s": round(rate, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="0: only the growth check")
    parser.add_argument("--seconds", type=float, default=1.5, help="per contender and round")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--soak", type=int, default=3000, help="programs for the growth check")
    options = parser.parse_args()
    workers = options.workers
    if not options.rounds:
        with Sandbox(workers=workers) as sandbox:
            print(json.dumps({"level": sandbox.level, "growth": soak(sandbox, options.soak)}))
        return

    with Sandbox(workers=1) as one, Sandbox(workers=workers) as many:
        check_truth(many)
        w = f"{workers} workers"
        contenders = {
            f"ours, {w}": ours(many),
            "ours, 1 worker": ours(one),
            f"ours, {w}, two runs": ours(many, runs=2),
            f"ours, {w}, 10 inputs": ours(many, inputs=10),
            f"python -I, {w}": peer(python_i, workers, 10),
            f"evalplus style, {w}": peer(evalplus_style, workers, 20),
            f"pebble, {w}, NO isolation": pebble_pool(workers),
        }
        contenders = {name: run for name, run in contenders.items() if run}
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for run in contenders.values():
            run(0, 0.3)
        for number in range(options.rounds):
            for name, run in contenders.items():
                rates[name].append(run(number * 100_000, options.seconds))

        head = rates[f"ours, {w}"]
        fresh, forked = rates[f"python -I, {w}"], rates[f"evalplus style, {w}"]
        print(
            f"level {many.level}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python "
            f"{sys.version.split()[0]}"
        )
        print(f"\n{'programs per second':<32}{'median':>9}{'least':>9}{'most':>9}{'ours / it':>11}")
        for name, values in rates.items():
            ratio = statistics.median(a / b for a, b in zip(head, values, strict=True))
            print(f"{name:<32}{statistics.median(values):>9.0f}{min(values):>9.0f}{max(values):>9.0f}{ratio:>11.2f}")

        window = max(4.0, 4 * options.seconds)
        clean, bad = [rolling(many, window, None, 1.0)], {"loops": [], "bombs": []}
        for _ in range(options.rounds):
            bad["loops"].append(rolling(many, window, LOOP, 1.0))
            bad["bombs"].append(rolling(many, window, BOMB, 10.0))
            clean.append(rolling(many, window, None, 1.0))
        loss = {
            name: statistics.median(1 - 2 * b / (a + c) for a, b, c in zip(clean, values, clean[1:], strict=False))
            for name, values in bad.items()
        }
        print(f"\n{'a full pool for ' + format(window, 'g') + ' s':<46}{'good/s':>9}{'loss':>9}")
        print(f"{'all programs good':<46}{statistics.median(clean):>9.0f}")
        for name, title in (("loops", "1 % endless loops, limit 1 s"), ("bombs", "1 % memory bombs of 512 MB")):
            print(f"{title:<46}{statistics.median(bad[name]):>9.0f}{loss[name]:>9.1%}")
        count = max(500, int(statistics.median(clean) * 5 / 100) * 100)
        whole = [batch_seconds(many, count, bad, 1.0) for bad in (None, LOOP)]
        print(f"a batch of {count} takes {whole[0]:.2f} s, with 1 % loops {whole[1]:.2f} s")
        start = time.perf_counter()
        evalplus_style(LOOP.format(n=0), [(5,)], 1.0)
        print(f"evalplus style spends {time.perf_counter() - start:.2f} s of a worker on each loop")

        late = kill_latency(one)
        growth = soak(many, options.soak)
        print(f"\nan endless loop is answered {late:.1f} ms after its limit")
        print(f"growth over {growth['programs']} programs: {growth}")
        result = {
            "isolated_per_s": round(statistics.median(head), 1),
            "vs_python_I": round(statistics.median(a / b for a, b in zip(head, fresh, strict=True)), 2),
            "vs_evalplus_style": round(statistics.median(a / b for a, b in zip(head, forked, strict=True)), 2),
            "calls_per_s_10_inputs": round(10 * statistics.median(rates[f"ours, {w}, 10 inputs"]), 1),
            "kill_latency_ms": round(late, 2),
            "loss_with_1pct_loops": round(loss["loops"], 4),
            "batch_s_clean": round(whole[0], 2),
            "batch_s_with_1pct_loops": round(whole[1], 2),
            "loss_with_1pct_bombs": round(loss["bombs"], 4),
            "level": many.level,
            "growth": growth,
            "rates": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        }
    print(json.dumps(result))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
