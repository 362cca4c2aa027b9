"""Where EvalScope's code benchmarks run the programs that models write: the sandbox of this package.

EvalScope itself runs them in Docker containers (`ms-enclave`), or, LiveCodeBench alone, in a child process without
any walls; HumanEval+ without its container is silently scored 0. Ours needs neither daemon nor root.

What a program may not do here and may in a container: start threads or processes, open files, import what is neither
in the standard library nor numpy. Such an answer counts as wrong.
"""

from __future__ import annotations

import os
from typing import Any

from evalscope.api.mixin.code_execution_sandbox_mixin import CodeExecutionBackend, CodeExecutionSandboxMixin
from evalscope.benchmarks.live_code_bench.testing_util import import_string

from trl_populora.sandbox import Job, Limits, Sandbox
from trl_populora.sandbox.values import decode, encode


MEMORY_BYTES = 4 << 30  # evalplus gives its programs as much
OUTPUT_BYTES = 1 << 20
PROGRAM_BYTES = 1 << 30  # LiveCodeBench writes a test's input into the program, and some have megabytes

# The program is an input of this one, as text, and what it prints is the output.
_PRINTS = """\
import builtins, io, sys

class Left(Exception):
    pass

def f(program, may_leave):
    out = sys.stdout = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    builtins.exit = builtins.quit = sys.exit
    try:
        exec(compile(program, "<answer>", "exec"), {"__name__": "__main__", "__builtins__": builtins})
    except SystemExit as left:
        if left.code not in (None, 0) or not may_leave:
            raise Left(f"left with {left.code!r}") from None
    return out.buffer.getvalue().decode("utf-8", "replace")
"""


class SandboxBackend(CodeExecutionBackend):
    """
    Runs one text of Python at a time in a process of its own; safe to use from several threads.

    Args:
        benchmark_meta (`evalscope.api.benchmark.BenchmarkMeta`): Whose programs these are.
        task_config (`evalscope.TaskConfig`): Of the run.
        sandbox ([`Sandbox`]): Made by [`make_sandbox`].
    """

    def __init__(self, benchmark_meta: Any, task_config: Any, sandbox: Sandbox):
        super().__init__(benchmark_meta, task_config)
        self.sandbox = sandbox
        # Elsewhere the tests stand after the answer in one program, and an answer that leaves early would pass them.
        self.may_leave = benchmark_meta.name == "live_code_bench"
        # LiveCodeBench's own runner imports these for every answer; EvalScope, in a sandbox, does not.
        self.before = import_string if benchmark_meta.name == "live_code_bench" else ""

    def start(self) -> None:
        """Nothing to do: the sandbox is warm."""

    def is_ready(self) -> bool:
        return True

    def stop(self) -> None:
        """Nothing to do: the sandbox is closed by who made it."""

    def execute(self, code: str | list[str], timeout: int, language: str) -> dict[str, Any]:
        """Status, and what was printed or what went wrong, under the keys that EvalScope's adapters read."""
        if language != "python" or not isinstance(code, str):
            raise ValueError(f"Only Python programs can be run, got {language}.")
        limits = Limits(
            cpu_seconds=timeout, memory_bytes=MEMORY_BYTES, output_bytes=OUTPUT_BYTES, program_bytes=PROGRAM_BYTES
        )
        given = encode((self.before + code, self.may_leave), max_bytes=PROGRAM_BYTES)
        verdict = self.sandbox.submit(Job(_PRINTS, (given,), limits=limits)).result()
        if not verdict.ok:
            return {"status": "timeout" if verdict.status == "timeout" else "error", "error": verdict.reason}
        return {"status": "success", "output": decode(verdict.outputs[0], max_bytes=OUTPUT_BYTES)}


def make_sandbox() -> Sandbox:
    """A sandbox whose programs may import numpy, as the tests of HumanEval+ and MBPP+ do."""
    # The soft layer refuses clocks, randomness and `input`, which are a task's vices and a program's habits.
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Sandbox(soft=False, processes=processes, packages=("numpy", "numpy.linalg", "numpy.random"))


def install_backend(sandbox: Sandbox) -> None:
    """Gives the sandbox to every code benchmark of this process."""

    def backend(adapter: Any) -> CodeExecutionBackend:
        if adapter._backend is None:
            adapter._backend = SandboxBackend(adapter._benchmark_meta, adapter._task_config, sandbox)
        return adapter._backend

    # EvalScope keeps `CodeExecutionBackend` for others to implement, and has no other place yet to name one.
    CodeExecutionSandboxMixin._get_backend = backend
