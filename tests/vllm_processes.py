"""Servers and runs as processes of their own, each in a group of its own that a test ends by its id."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import requests

from .vllm_models import ENGINE_ENVIRONMENT
from .without_extras import without_extras


ROOT = Path(__file__).parent.parent
PATIENCE = 420  # seconds; a quiet machine needs a tenth of it


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment() -> dict[str, str]:
    quiet = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    here = {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "ACCELERATE_USE_CPU": "true"}
    # An engine in the test's own process leaves these behind, and they would tell a launcher that it is a worker.
    left = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    inherited = {k: v for k, v in os.environ.items() if k not in left}
    return without_extras(inherited | ENGINE_ENVIRONMENT | quiet | here, but=["vllm"])


def end(process: subprocess.Popen) -> None:
    """Kills a process and what it started; it was started as the leader of a group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)


class Server:
    """A vLLM server started by `recipes/serve.sh`."""

    def __init__(self, base: str, members: int, log: Path, rank: int, length: int, *further: str):
        port, self.log = free_port(), log
        self.url = f"http://127.0.0.1:{port}"
        flags = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", str(length)]
        flags += ["--no-enable-chunked-prefill", "--enforce-eager", *further]
        self.command = [str(ROOT / "recipes" / "serve.sh"), base, str(members), str(rank), *flags]
        self.start()

    def start(self) -> None:
        """Starts it, or starts it again under the same address."""
        with open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                self.command, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> Server:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            time.sleep(0.5)
        raise RuntimeError(f"The server did not start:\n{self.log.read_text()[-3000:]}")

    def models(self) -> list[str]:
        return [model["id"] for model in requests.get(f"{self.url}/v1/models", timeout=30).json()["data"]]


@contextlib.contextmanager
def served(base: str, members: int, log: Path, rank: int, length: int, *further: str) -> Iterator[Server]:
    server = Server(base, members, log, rank, length, *further)
    try:
        yield server.wait()
    finally:
        end(server.process)


def start_run(settings: dict, processes: int, log: Path) -> subprocess.Popen:
    """Starts `tests/vllm_run.py` under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    launcher += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    with open(log, "wb") as output:
        return subprocess.Popen(
            [*launcher, str(ROOT / "tests" / "vllm_run.py"), json.dumps(settings)],
            env=environment(),
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(process: subprocess.Popen, log: Path) -> tuple[int, str]:
    """Waits for a process; `(exit code, what it printed)`."""
    try:
        process.wait(timeout=PATIENCE)
    finally:
        end(process)
    # The launcher's own account of a worker's end comes last, is long and says nothing.
    return process.returncode, log.read_text(errors="replace").split(
        "elastic.multiprocessing.errors.ChildFailedError"
    )[0]


def result_of(output: str) -> dict:
    line = next(line for line in output.splitlines() if "RESULT {" in line)
    return json.loads(line[line.index("{") :])
