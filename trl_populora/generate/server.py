"""vLLM servers over HTTP: adapters are loaded by path, and the adapter is the `model` of a request."""

from __future__ import annotations

import copy
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any
from urllib.parse import urlparse

import requests
from trl.generation.vllm_client import VLLMClient

from .publish import Ask, Published, StaleAdapterError, merge_asks


REQUESTS_AT_A_TIME = 64  # seeded questions are requests of their own
PROBE = range(1, 9)  # token ids that every vocabulary has


class VLLMServerError(RuntimeError):
    """A vLLM server does not answer, or refuses; the message names it and the checkpoint to resume from."""


class LoRAServer(VLLMClient):
    """
    One vLLM server that holds the members as adapters.

    What differs from [`~trl.generation.vllm_client.VLLMClient`]: every request has a time limit, every failure names
    the server and the way out, and no weight-transfer group exists.

    Args:
        base_url: `http://host:port`.
        connection_timeout: Seconds to wait for the server to be up.
        request_timeout: Seconds after which an unanswered request counts as failed.
        advice: Returns a sentence on how to go on after a failure.

    Raises:
        `VLLMServerError`: If the server is not up in time.
    """

    def __init__(self, base_url: str, connection_timeout: float, request_timeout: float, advice: Callable[[], str]):
        self.request_timeout, self.advice = request_timeout, advice
        self.failed = threading.Event()  # `answer` works on copies, which share it
        self._probed: dict[str, tuple] = {}
        super().__init__(base_url=base_url, connection_timeout=connection_timeout)
        for adapter in self.session.adapters.values():
            # A server that is away is asked again, as TRL does. A broken or overdue answer is not: a restarted server
            # has lost the adapters, and asking a stuck one six times only multiplies the time limit.
            adapter.max_retries = adapter.max_retries.new(read=False, raise_on_status=False)

    def check_server(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().check_server(*args, **kwargs)
        except requests.RequestException as error:
            raise VLLMServerError(f"{error} `recipes/serve.sh` starts one for a population.") from error

    def _post(self, url: str, **kwargs: Any) -> dict:
        return self._guarded(super()._post, url, timeout=self.request_timeout, **kwargs)

    def _get(self, url: str, **kwargs: Any) -> dict:
        return self._guarded(super()._get, url, timeout=self.request_timeout, **kwargs)

    def _guarded(self, send: Callable, url: str, **kwargs: Any) -> Any:
        try:
            return send(url, **kwargs)
        except requests.Timeout as error:
            seconds = kwargs["timeout"]
            raise VLLMServerError(self._failure(url, f"did not answer within {seconds:g} seconds")) from error
        except requests.RequestException as error:
            raise VLLMServerError(self._failure(url, f"cannot be reached ({error})")) from error
        except Exception as error:  # TRL raises a bare `Exception` for every status but 200
            raise VLLMServerError(self._failure(url, f"refused: {error}")) from error

    def _failure(self, url: str, what: str) -> str:
        self.failed.set()
        return f"The vLLM server at {self.base_url} {what}, asked for {urlparse(url).path}. {self.advice()}"

    def check_serves(self, members: int, rank: int) -> None:
        """
        Checks the flags that the server was started with.

        Raises:
            `ValueError`: If it cannot hold the population's adapters, or returns log-probabilities that do not include
                the sampling temperature.
        """
        config = self.get_server_info()
        lora, mode = config["lora_config"], config["model_config"]["logprobs_mode"]
        wanted = f"--enable-lora --max-loras {members} --max-cpu-loras {2 * members} --max-lora-rank {rank}"
        if lora is None or int(lora["max_loras"]) < members or int(lora["max_lora_rank"]) < rank:
            raise ValueError(
                f"The vLLM server at {self.base_url} cannot hold {members} adapters of rank {rank}. Restart it with "
                f"`{wanted}` (see `recipes/serve.sh`)."
            )
        if mode != "processed_logprobs":
            raise ValueError(
                f"The vLLM server at {self.base_url} runs with `--logprobs-mode {mode}`, which biases the importance "
                "sampling correction. Restart it with `--logprobs-mode processed_logprobs` (see `recipes/serve.sh`)."
            )

    def load(self, adapter: Published) -> None:
        """
        Raises:
            `VLLMServerError`: If the server refuses, for example because it does not see the path.
        """
        self._adapter_command("load_lora_adapter", {"lora_name": adapter.name, "lora_path": adapter.path})

    def unload(self, adapter: Published) -> None:
        """Takes an adapter's name from the server; one that failed is left alone, restarted it knows no adapter."""
        if not self.failed.is_set():
            self._adapter_command("unload_lora_adapter", {"lora_name": adapter.name})

    def _adapter_command(self, command: str, payload: dict[str, str]) -> None:
        # These two endpoints answer with plain text, so TRL's `_post`, which reads JSON, does not fit.
        url = f"{self.base_url}/v1/{command}"
        response = self._guarded(self.session.post, url, json=payload, timeout=self.request_timeout)
        if response.status_code == 200:
            return
        reasons = f"answered {response.status_code}: {response.text}"
        if response.status_code == 404 and "lora" not in response.text:  # there is no such endpoint
            reasons += " It must run with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` (see `recipes/serve.sh`)"
        elif "lora_path" in payload:
            reasons += (
                f" The trainer wrote the adapter to {payload['lora_path']}. If the server does not see that path, set "
                "`vllm_adapter_dir` to a directory that both see"
            )
        raise VLLMServerError(self._failure(url, reasons))

    def probe(self, adapter: Published, moved: bool) -> None:
        """
        Asks an adapter for one token, the likeliest, which draws no random numbers; its log-probability and the next
        ones' must not be to the last bit those of the member's former version.

        A server's arithmetic differs from the trainer's by more than one optimizer step moves log-probabilities, so
        comparing the two would tell less.

        Args:
            adapter: A version that was just loaded.
            moved: Whether the member moved so far that it must answer differently.

        Raises:
            `StaleAdapterError`: If it does not; names server, member and version.
        """
        server = copy.copy(self)
        server.model = adapter.name
        greedy = {"temperature": 0.0, "max_tokens": 1, "logprobs": 5}
        output = VLLMClient.generate(
            server, [list(PROBE)], **greedy, generation_kwargs={"cache_salt": adapter.cache_salt}
        )
        answer = (output["logprob_token_ids"], output["logprobs"])
        former, self._probed[adapter.member] = self._probed.get(adapter.member), answer
        if moved and answer == former:
            raise StaleAdapterError(
                f"The vLLM server at {self.base_url} does not sample from {adapter.name!r}, the last published "
                f"version of {adapter.member!r}: it answers with the log-probabilities of the version before. "
                f"{self.advice()}"
            )

    def answer(self, asks: Sequence[Ask], **params: Any) -> list[list[tuple]]:
        """
        Completions of asks that have the same route, the same number of rows and the same seed.

        Returns:
            `list[list[tuple]]`: Per ask and row `(prompt_ids, completion_ids, logprobs, logprob_token_ids)`.
        """
        member, (route, seed) = copy.copy(self), (asks[0].route, asks[0].seed)
        member.model = route.name
        kwargs = (params.pop("generation_kwargs", None) or {}) | {"cache_salt": route.cache_salt}
        kwargs |= {} if seed is None else {"seed": seed}
        samples = len(asks[0].rows)
        prompts = [list(ask.prompt) for ask in asks]
        output = VLLMClient.generate(member, prompts=prompts, generation_kwargs=kwargs, n=samples, **params)
        count = len(output["completion_ids"])
        columns = [[None] * count if output[key] is None else output[key] for key in ("logprobs", "logprob_token_ids")]
        rows = list(zip(output["completion_ids"], *columns, strict=True))
        answers = [rows[start : start + samples] for start in range(0, count, samples)]
        return [[(prompt, *row) for row in answer] for prompt, answer in zip(prompts, answers, strict=True)]


class LoRAServers:
    """
    The servers of a run, in the place of TRL's `vllm_client`: all hold all adapters, and share the questions.

    Args:
        urls: One URL per server.
        **settings: As in [`LoRAServer`].

    Attributes:
        routes (`Sequence[Published]`): Who answers each prompt of the next `generate`.
        seeds (`Sequence[int | None]`, *optional*): Of each row's samples; the servers' own generators when `None`.
    """

    seeds: Sequence[int | None] | None = None

    def __init__(self, urls: Sequence[str], **settings: Any):
        self.servers = [LoRAServer(url, **settings) for url in urls]
        self.routes: Sequence[Published] = ()

    @property
    def remote(self) -> bool:
        """Whether a server sits on another host."""
        here = {"localhost", "0.0.0.0", "::1", socket.gethostname(), socket.getfqdn()}
        hosts = [urlparse(server.base_url).hostname or "" for server in self.servers]
        return any(host not in here and not host.startswith("127.") for host in hosts)

    def init_communicator(self, device: Any = None) -> None:
        """Opens nothing: the base is frozen and adapters travel as files."""

    def load(self, adapter: Published) -> None:
        """Loads an adapter on every server."""
        for server in self.servers:
            server.load(adapter)

    def unload(self, adapter: Published) -> None:
        """Unloads an adapter from every server."""
        for server in self.servers:
            server.unload(adapter)

    def probe(self, adapter: Published, moved: bool) -> None:
        """Probes an adapter on every server."""
        for server in self.servers:
            server.probe(adapter, moved)

    def generate(self, prompts: Sequence[Sequence[int]], features: None = None, n: int = 1, **params: Any) -> dict:
        """
        One completion per prompt, in order; requests of different members and servers run at the same time.

        Returns:
            `dict`: `prompt_ids`, `completion_ids`, `logprobs` and `logprob_token_ids`, each of length R.
        """
        if features is not None or n != 1:
            raise ValueError("Rows hold text, one completion each; tasks with images are not supported.")
        batches: dict[tuple, list[Ask]] = {}
        for position, ask in enumerate(merge_asks(prompts, self.routes, self.seeds)):
            server = self.servers[position % len(self.servers)]
            batches.setdefault((server, ask.route, len(ask.rows), ask.seed), []).append(ask)

        rows: list[Any] = [None] * len(prompts)
        with ThreadPoolExecutor(max_workers=min(len(batches), REQUESTS_AT_A_TIME)) as pool:
            sent = {pool.submit(server.answer, asks, **params): asks for (server, *_), asks in batches.items()}
            for done in as_completed(sent):
                for ask, answer in zip(sent[done], done.result(), strict=True):
                    for row, completion in zip(ask.rows, answer, strict=True):
                        rows[row] = completion
        keys = ("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids")
        columns = [list(column) for column in zip(*rows, strict=True)]
        # Without log-probabilities a column holds `None` for every row; TRL's client returns one `None` for all.
        return {key: None if column[0] is None else column for key, column in zip(keys, columns, strict=True)}
