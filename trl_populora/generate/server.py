"""vLLM servers over HTTP. A server reads an adapter from a path, and a request names the adapter as its `model`.

    directory of a version --load--> every server --probe--> StaleAdapterError if the answer is as before a move

    prompts_R, versions_R, seeds_R --merge_asks--> asks --spread over the servers--> completions_R, logprobs_R

Shapes: R rows.
"""

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


REQUESTS_AT_A_TIME = 64  # with seeds every ask is a request of its own
PROBE = range(1, 9)  # the prompt of a probe: token ids that every vocabulary has


class VLLMServerError(RuntimeError):
    """A vLLM server does not answer or refuses. The message names the server and the way out."""


class LoRAServer(VLLMClient):
    """
    The client of one vLLM server that holds the members as adapters.

    It adds requests for adapters to [`~trl.generation.vllm_client.VLLMClient`]. Requests for answers and adapters have
    a time limit. If such a request fails, the error names the server and the way out.

    Args:
        base_url: `http://host:port`.
        connection_timeout: Seconds to wait until the server is up.
        request_timeout: Seconds to wait for an answer. After that the request has failed.
        advice: Returns a sentence that says how to go on after a failure.

    Raises:
        `VLLMServerError`: If the server is not up in time.
    """

    def __init__(self, base_url: str, connection_timeout: float, request_timeout: float, advice: Callable[[], str]):
        self.request_timeout, self.advice = request_timeout, advice
        self.failed = threading.Event()  # an event, because `answer` works on copies of the client, which share it
        self._probed: dict[str, tuple] = {}
        super().__init__(base_url=base_url, connection_timeout=connection_timeout)
        for adapter in self.session.adapters.values():
            # TRL's retries remain where no connection comes about, or where the server answers 500, 502 or 503. After
            # an answer that breaks off or is late there is no retry: a server that has restarted has lost the
            # adapters, and six tries of a stuck one take six time limits.
            adapter.max_retries = adapter.max_retries.new(read=False, raise_on_status=False)

    def check_server(self, *args: Any, **kwargs: Any) -> None:
        """Waits until the server is up, as TRL's client does."""
        try:
            super().check_server(*args, **kwargs)
        except requests.RequestException as error:
            raise VLLMServerError(f"{error} `recipes/serve.sh` starts one for a population.") from error

    def _post(self, url: str, **kwargs: Any) -> dict:
        return self._send(super()._post, url, timeout=self.request_timeout, **kwargs)

    def _get(self, url: str, **kwargs: Any) -> dict:
        return self._send(super()._get, url, timeout=self.request_timeout, **kwargs)

    def _send(self, send: Callable, url: str, **kwargs: Any) -> Any:
        """Sends a request, and turns every failure into a `VLLMServerError` that names the server."""
        try:
            return send(url, **kwargs)
        except requests.Timeout as error:
            seconds = kwargs["timeout"]
            raise VLLMServerError(self._note_failure(url, f"did not answer within {seconds:g} seconds")) from error
        except requests.RequestException as error:
            raise VLLMServerError(
                self._note_failure(url, f"cannot be reached, or its answer broke off ({error})")
            ) from error
        except Exception as error:  # TRL raises a plain `Exception` for every status but 200
            raise VLLMServerError(self._note_failure(url, f"refused: {error}")) from error

    def _note_failure(self, url: str, what: str) -> str:
        """Remembers that the server has failed, and writes the message about it."""
        self.failed.set()
        return f"The vLLM server at {self.base_url} {what}. It was asked for {urlparse(url).path}. {self.advice()}"

    def check_serves(self, members: int, rank: int) -> None:
        """
        Checks the flags with which the server was started.

        Args:
            members: Number of members.
            rank: Value that `max_lora_rank` must have at least.

        Raises:
            `ValueError`: If the server cannot hold an adapter of every member, or if its `--logprobs-mode` is not
                `processed_logprobs`.
        """
        config = self.get_server_info()
        lora, mode = config["lora_config"], config["model_config"]["logprobs_mode"]
        # While a new version is loaded and probed, the old one is still there: hence two adapters per member.
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
        Lets the server read an adapter from its directory.

        Raises:
            `VLLMServerError`: If the server refuses, for example because it does not see the path.
        """
        self._adapter_command("load_lora_adapter", {"lora_name": adapter.name, "lora_path": adapter.path})

    def unload(self, adapter: Published) -> None:
        """Removes an adapter from the server, unless the server has failed: after its restart it has no adapters."""
        if not self.failed.is_set():
            self._adapter_command("unload_lora_adapter", {"lora_name": adapter.name})

    def _adapter_command(self, command: str, payload: dict[str, str]) -> None:
        # TRL's `_post` reads JSON, and the endpoints for adapters answer with plain text.
        url = f"{self.base_url}/v1/{command}"
        response = self._send(self.session.post, url, json=payload, timeout=self.request_timeout)
        if response.status_code == 200:
            return
        reasons = f"answered {response.status_code}: {response.text}"
        # A server without the endpoint answers 404, too, and does not speak of LoRA.
        if response.status_code == 404 and "lora" not in response.text:
            reasons += ". It must run with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` (see `recipes/serve.sh`)"
        elif "lora_path" in payload:
            reasons += (
                f". The trainer wrote the adapter to {payload['lora_path']}. If the server does not see it, set "
                "`vllm_adapter_dir` to a directory that both see"
            )
        raise VLLMServerError(self._note_failure(url, reasons))

    def probe(self, adapter: Published, moved: bool) -> None:
        """
        Checks that a server answers with a new version of a member, and not with the former one.

        The server is asked for one greedy token after a fixed prompt. The log-probabilities of the five likeliest
        tokens must differ from the former version's if the member has moved. They are not compared with the trainer's:
        the two differ by more than one optimizer step changes them.

        Args:
            adapter: The version that was just loaded.
            moved: Whether the member has changed so much that its answer must differ.

        Raises:
            `StaleAdapterError`: If the member has moved and the answer is the former one, bit by bit. The message
                names server, member and version.
        """
        # A greedy token draws no random numbers, so later samples do not depend on whether a probe was made.
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
        Lets one member answer asks in one request. The asks have the same version, number of rows and seed.

        Returns:
            For each ask, and for each of its rows, a tuple `(prompt_ids, completion_ids, logprobs,
            logprob_token_ids)`.
        """
        # Several threads answer at once, and each member has its own `model`: so each call takes a copy of the client.
        member, version, seed = copy.copy(self), asks[0].version, asks[0].seed
        member.model = version.name
        kwargs = (params.pop("generation_kwargs", None) or {}) | {"cache_salt": version.cache_salt}
        kwargs |= {} if seed is None else {"seed": seed}
        samples = len(asks[0].rows)
        prompts = [list(ask.prompt) for ask in asks]
        output = VLLMClient.generate(member, prompts=prompts, generation_kwargs=kwargs, n=samples, **params)
        # The answer is flat: all samples of the first prompt, then all samples of the next.
        count = len(output["completion_ids"])
        columns = [[None] * count if output[key] is None else output[key] for key in ("logprobs", "logprob_token_ids")]
        rows = list(zip(output["completion_ids"], *columns, strict=True))
        answers = [rows[start : start + samples] for start in range(0, count, samples)]
        return [[(prompt, *row) for row in answer] for prompt, answer in zip(prompts, answers, strict=True)]


class LoRAServers:
    """
    The servers of a run as one client, in the place of TRL's `vllm_client`.

    Every server holds every adapter, and each server answers a part of the asks.

    Args:
        urls: One URL per server.
        **settings: Further arguments of each [`LoRAServer`].

    Attributes:
        versions (`Sequence[Published]`): The adapter that answers each prompt of the next `generate`, length R.
        seeds (`Sequence[int | None]`, *optional*): Sampling seed of each row, length R. Without seeds, the servers'
            own generators draw the samples.
    """

    seeds: Sequence[int | None] | None = None

    def __init__(self, urls: Sequence[str], **settings: Any):
        self.servers = [LoRAServer(url, **settings) for url in urls]
        self.versions: Sequence[Published] = ()

    @property
    def remote(self) -> bool:
        """Says whether a server runs on another host."""
        here = {"localhost", "0.0.0.0", "::1", socket.gethostname(), socket.getfqdn()}
        hosts = [urlparse(server.base_url).hostname or "" for server in self.servers]
        return any(host not in here and not host.startswith("127.") for host in hosts)

    def init_communicator(self, device: Any = None) -> None:
        """Does nothing. TRL calls it to open a connection for weights, and here adapters travel as files."""

    def load(self, adapter: Published) -> None:
        """Loads an adapter on every server."""
        for server in self.servers:
            server.load(adapter)

    def unload(self, adapter: Published) -> None:
        """Unloads an adapter from every server."""
        for server in self.servers:
            server.unload(adapter)

    def probe(self, adapter: Published, moved: bool) -> None:
        """Probes an adapter on every server; arguments are as in [`LoRAServer.probe`]."""
        for server in self.servers:
            server.probe(adapter, moved)

    def generate(self, prompts: Sequence[Sequence[int]], features: None = None, n: int = 1, **params: Any) -> dict:
        """
        Generates one completion per prompt. Requests to different members and servers run at the same time.

        Returns:
            A dict with `prompt_ids`, `completion_ids`, `logprobs` and `logprob_token_ids`. Each is a list of length R
            in the order of the prompts; the last two are `None` if log-probabilities were not asked for.
        """
        if features is not None or n != 1:
            raise ValueError("Rows hold text, one completion each; tasks with images are not supported.")
        # A request has one `model`, one `n` and one `seed`, so only asks that agree in all three go together.
        batches: dict[tuple, list[Ask]] = {}
        for position, ask in enumerate(merge_asks(prompts, self.versions, self.seeds)):
            server = self.servers[position % len(self.servers)]
            batches.setdefault((server, ask.version, len(ask.rows), ask.seed), []).append(ask)

        rows: list[Any] = [None] * len(prompts)
        with ThreadPoolExecutor(max_workers=min(len(batches), REQUESTS_AT_A_TIME)) as pool:
            sent = {pool.submit(server.answer, asks, **params): asks for (server, *_), asks in batches.items()}
            for done in as_completed(sent):
                for ask, answer in zip(sent[done], done.result(), strict=True):
                    for row, completion in zip(ask.rows, answer, strict=True):
                        rows[row] = completion
        keys = ("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids")
        columns = [list(column) for column in zip(*rows, strict=True)]
        # Without log-probabilities every entry of a column is `None`. TRL expects a single `None` instead.
        return {key: None if column[0] is None else column for key, column in zip(keys, columns, strict=True)}
