"""The client of vLLM servers. A server reads an adapter from a path, and a request names the adapter as its `model`.

    directory of a version --load--> every server --probe--> StaleAdapterError if it answers with old weights

    prompts_R, versions_R, seeds_R --merge_asks--> asks --spread over the servers--> completions_R, logprobs_R

Shapes: R rows.
"""

from __future__ import annotations

import copy
import itertools
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any
from urllib.parse import urlparse

import requests
import torch
from trl.generation.vllm_client import VLLMClient

from .publish import Ask, Follow, Published, StaleAdapterError, count_adapters, merge_asks


REQUESTS_AT_A_TIME = 64  # further requests wait; with seeds there are many, one for each ask
CONNECTIONS = 1024  # at most so many stay open for the next request; further ones are opened each time
PROBE = range(1, 9)  # the prompt of a probe: token ids that every vocabulary has
HEALTH_TIMEOUT = 10.0  # seconds that one request to `/health` may take; a server that is up answers at once

# A bound for the change of a member's B, as the root mean square over B's elements. A larger change shows in the
# member's log-probabilities, in any precision. If a server then still answers with the former log-probabilities, bit
# by bit, it still has the former version. One step of Adam changes B by about the learning rate, so ten steps at the
# default rate change it by about 1e-4. A birth changes it by more.
SEEN_IN_ANY_PRECISION = 1e-4


class VLLMServerError(RuntimeError):
    """A vLLM server does not answer or refuses. The message names the server and the way out."""


class LoRAServer(VLLMClient):
    """
    The client of one vLLM server that holds the members as adapters.

    TRL's [`~trl.generation.vllm_client.VLLMClient`] may wait for ever. Here every request has a time limit, and the
    error of a failed request names the server and the way out.

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
        # For each member: the answer and the B of the last version that the server is known to have.
        self._arrived: dict[str, tuple[tuple, torch.Tensor]] = {}
        super().__init__(base_url=base_url, connection_timeout=connection_timeout)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """
        Waits until the server is up.

        Args:
            total_timeout: Seconds to wait.
            retry_interval: Seconds between two requests.

        Raises:
            `VLLMServerError`: If the server is not up in time.
        """
        # TRL's constructor makes the session, calls this method, and sends its first request afterwards. So the
        # session's retries are set here.
        for adapter in self.session.adapters.values():
            # TRL's retries remain where no connection comes about, or where the server answers 500, 502 or 503. After
            # an answer that breaks off or is late there is no retry: a server that has restarted has lost the
            # adapters, and six tries of a stuck one take six time limits.
            adapter.max_retries = adapter.max_retries.new(read=False, raise_on_status=False)
            # TRL keeps 64, and urllib3 warns of each further one. With `follow` each ask has its own.
            adapter.init_poolmanager(10, CONNECTIONS)
        # TRL's method sends a request without a time limit, so it would wait for ever for a server that hangs.
        deadline = time.monotonic() + total_timeout
        while True:
            try:
                requests.get(f"{self.base_url}/health", timeout=HEALTH_TIMEOUT).raise_for_status()
                return
            except requests.RequestException as error:
                if time.monotonic() >= deadline:
                    raise VLLMServerError(
                        f"The vLLM server at {self.base_url} is not up after {total_timeout:g} seconds ({error}). "
                        "`recipes/serve.sh` starts one for a population."
                    ) from error
            time.sleep(retry_interval)

    def _post(self, url: str, **kwargs: Any) -> dict:
        return self._send(super()._post, url, timeout=self.request_timeout, **kwargs)

    def _get(self, url: str, **kwargs: Any) -> dict:
        return self._send(super()._get, url, timeout=self.request_timeout, **kwargs)

    def get_server_info(self) -> dict:
        """Asks for the configuration with which the server runs, as TRL's client does."""

        def ask(url: str, timeout: float) -> dict:
            response = self.session.get(url, params={"config_format": "json"}, timeout=timeout)
            if response.status_code != 200:
                needs = " It must run with `VLLM_SERVER_DEV_MODE=1`." if response.status_code == 404 else ""
                raise RuntimeError(f"status {response.status_code}, {response.text}.{needs}")
            return response.json()["vllm_config"]

        return self._send(ask, f"{self.base_url}/server_info", timeout=self.request_timeout)

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
            raise VLLMServerError(self._tell(url, f"refused: {error}")) from error

    def forget_requests(self) -> None:
        """Lets requests that are under way note no failure any more."""
        failed, self.failed = self.failed.is_set(), threading.Event()
        if failed:
            self.failed.set()

    def _note_failure(self, url: str, what: str) -> str:
        """Remembers that the server has failed, and writes the message about it."""
        self.failed.set()
        return self._tell(url, what)

    def _tell(self, url: str, what: str) -> str:
        return f"The vLLM server at {self.base_url} {what}. It was asked for {urlparse(url).path}. {self.advice()}"

    def check_serves(self, members: int, rank: int, modules: Collection[str]) -> None:
        """
        Checks the flags with which the server was started.

        Args:
            members: Number of members.
            rank: Value that `max_lora_rank` must have at least.
            modules: Names of the base's modules that members adapt.

        Raises:
            `ValueError`: If the server cannot hold an adapter of every member, if it serves adapters for some of the
                modules only, or if its `--logprobs-mode` is not `processed_logprobs`.
        """
        config = self.get_server_info()
        lora, mode = config["lora_config"], config["model_config"]["logprobs_mode"]
        needed = {"max_loras": members, "max_cpu_loras": count_adapters(members)[0], "max_lora_rank": rank}
        better = count_adapters(members)[1]
        wanted = f"--enable-lora --max-loras {members} --max-cpu-loras {better} --max-lora-rank {rank}"
        if lora is None or any(int(lora[name]) < least for name, least in needed.items()):
            raise ValueError(
                f"The vLLM server at {self.base_url} cannot hold {members} adapters of rank {rank}. Restart it with "
                f"`{wanted}` (see `recipes/serve.sh`)."
            )
        served = lora.get("target_modules")
        if served is not None and (ignored := _find_ignored(modules, served)):
            raise ValueError(
                f"The vLLM server at {self.base_url} serves adapters for {', '.join(served)} alone, and would ignore "
                f"what members learn in {', '.join(ignored)}. Restart it without `--lora-target-modules`."
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
        self.failed.clear()  # a server that loads adapters also has some to unload

    def unload(self, adapter: Published) -> None:
        """Removes an adapter from the server. Asks nothing of a failed server: a restart drops all its adapters."""
        if not self.failed.is_set():
            self._adapter_command("unload_lora_adapter", {"lora_name": adapter.name})

    def _adapter_command(self, command: str, payload: dict[str, str]) -> None:
        # TRL's `_post` reads JSON, and the endpoints for adapters answer with plain text.
        url = f"{self.base_url}/v1/{command}"
        response = self._send(self.session.post, url, json=payload, timeout=self.request_timeout)
        if response.status_code == 200:
            return
        reasons = f"answered {response.status_code}: {response.text}"
        # A 404 that does not mention LoRA means that the server has no such endpoint.
        if response.status_code == 404 and "lora" not in response.text:
            reasons += ". It must run with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` (see `recipes/serve.sh`)"
        elif "lora_path" in payload:
            reasons += (
                f". The trainer wrote the adapter to {payload['lora_path']}. If the server does not see it, set "
                "`vllm_adapter_dir` to a directory that both see"
            )
        raise VLLMServerError(self._tell(url, reasons))

    def probe(self, adapter: Published, b: torch.Tensor) -> None:
        """
        Checks that a server answers with a new version of a member, and not with a former one.

        The server is asked for one greedy token after a fixed prompt. If the log-probabilities of the five likeliest
        tokens differ from the former ones, the new version has arrived, and its answer and B are kept. One step at a
        low rate may change none of these log-probabilities. So equal ones are an error only if B has changed by more
        than `SEEN_IN_ANY_PRECISION` since the B that was kept last. A comparison with the trainer's log-probabilities
        would not help: they always differ a little from the server's, and an optimizer step may change them by less
        than that.

        Args:
            adapter: The version that was just loaded.
            b: One B of this version, always of the same module.

        Raises:
            `StaleAdapterError`: If B has changed by more than `SEEN_IN_ANY_PRECISION`, but the answer is the former
                one, bit by bit. The message names server, member and version.
        """
        answer = self._ask(adapter)
        former, former_b = self._arrived.get(adapter.member, (None, b))
        if answer != former:
            self._arrived[adapter.member] = answer, b
        elif float((b - former_b).square().mean().sqrt()) > SEEN_IN_ANY_PRECISION:
            raise StaleAdapterError(
                f"The vLLM server at {self.base_url} does not sample from {adapter.name!r}, the last published "
                f"version of {adapter.member!r}: it answers with the log-probabilities of an earlier version. "
                f"{self.advice()}"
            )

    def check_modules(self, nothing: Published, probes: Mapping[str, Published]) -> None:
        """
        Checks that the server uses what adapters add to the modules that members adapt.

        If vLLM knows a module by another name, it silently ignores an adapter's weights for that module.

        Args:
            nothing: An adapter that adds nothing.
            probes: Adapters by the last part of a module's name, such as `q_proj`. Each adds something to all modules
                with this last part, and to no others.

        Raises:
            `ValueError`: If the server's answer with a probe is its answer with `nothing`, bit by bit.
        """
        base = self._ask(nothing)
        if ignored := [name for name, probe in probes.items() if self._ask(probe) == base]:
            raise ValueError(
                f"The vLLM server at {self.base_url} ignores what adapters add to {', '.join(ignored)}, so what "
                "members learn there would not change its answers. Perhaps it serves another base than the trainer "
                "has, or one of the two has a whole model and the other its text part, saved alone. Serve the base "
                "from the path that the trainer has, or choose other `target_modules`."
            )

    def _ask(self, adapter: Published) -> tuple:
        """Asks for a greedy token after a fixed prompt. Returns the 5 likeliest tokens and their log-probabilities."""
        # A greedy token draws no random numbers, so later samples do not depend on whether a probe was made.
        server = copy.copy(self)
        server.model = adapter.name
        greedy = {"temperature": 0.0, "max_tokens": 1, "logprobs": 5}
        output = VLLMClient.generate(server, [list(PROBE)], **greedy, generation_kwargs={"cache_salt": adapter.name})
        return output["logprob_token_ids"], output["logprobs"]

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
        kwargs = (params.pop("generation_kwargs", None) or {}) | {"cache_salt": version.name}
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


def _find_ignored(modules: Collection[str], served: Sequence[str]) -> list[str]:
    """Finds the last parts of the names of modules for which a server with `--lora-target-modules` has no adapters."""
    # `--lora-target-modules` takes whole names and last parts.
    lasts = {module: module.rpartition(".")[2] for module in modules}
    return sorted({last for module, last in lasts.items() if not {module, last} & {*served}})


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
        temperatures (`Mapping[str, float]`): Temperature by member, for members that have their own.
        follow (`Follow`, *optional*): Asks for further rows when some of the first R have ended. `generate` then
            returns their completions, too.
    """

    seeds: Sequence[int | None] | None = None
    follow: Follow | None = None
    temperatures: Mapping[str, float] = MappingProxyType({})

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
        """Loads an adapter on every server. If one fails, the adapter is unloaded from those that have loaded it."""
        for place, server in enumerate(self.servers):
            try:
                server.load(adapter)
            except Exception:
                with suppress(VLLMServerError):  # the first error tells why
                    self._unload(adapter, self.servers[:place])
                raise

    def unload(self, adapter: Published) -> None:
        """Unloads an adapter from every server. If some fail, raises the first error after all have been asked."""
        self._unload(adapter, self.servers)

    def _unload(self, adapter: Published, servers: Sequence[LoRAServer]) -> None:
        errors = []
        for server in servers:
            try:
                server.unload(adapter)
            except VLLMServerError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def probe(self, adapter: Published, b: torch.Tensor) -> None:
        """Probes an adapter on every server; arguments are as in [`LoRAServer.probe`]."""
        for server in self.servers:
            server.probe(adapter, b)

    def check_modules(self, nothing: Published, probes: Mapping[str, Published]) -> None:
        """Checks the modules of every server; arguments are as in [`LoRAServer.check_modules`]."""
        for server in self.servers:
            server.check_modules(nothing, probes)

    def generate(self, prompts: Sequence[Sequence[int]], features: None = None, n: int = 1, **params: Any) -> dict:
        """
        Generates one completion per prompt. Requests to different members and servers run at the same time.

        Returns:
            A dict with `prompt_ids`, `completion_ids`, `logprobs` and `logprob_token_ids`. Each is a list of length R
            in the order of the prompts; the last two are `None` if log-probabilities were not asked for.
        """
        if features is not None or n != 1:
            raise ValueError("Rows hold text, one completion each; tasks with images are not supported.")
        first, turns = len(prompts), itertools.cycle(self.servers)
        rows: list[Any] = [None] * first
        sent: dict[Future, list[Ask]] = {}
        # A server computes all rows at once, but of a request it tells only when all its rows have ended. So with
        # `follow` each ask is a request of its own, and none waits.
        at_a_time = REQUESTS_AT_A_TIME if self.follow is None else max(REQUESTS_AT_A_TIME, first)

        def send(asks: Sequence[Ask]) -> None:
            # A request has one `model`, one `n` and one `seed`, so only asks that agree in all three go together.
            batches: dict[tuple, list[Ask]] = {}
            for ask in asks:
                alone = None if self.follow is None else ask.rows
                batches.setdefault((next(turns), ask.version, len(ask.rows), ask.seed, alone), []).append(ask)
            for (server, version, *_), together in batches.items():
                request = pool.submit(server.answer, together, **self._choose_temperature(version, params))
                sent[request] = together

        with self._open_pool(at_a_time) as pool:
            send(merge_asks(prompts, self.versions, self.seeds))
            while sent:
                ended: dict[int, tuple] = {}
                for done in wait(sent, return_when=FIRST_COMPLETED).done:
                    for ask, answer in zip(sent.pop(done), done.result(), strict=True):
                        ended |= dict(zip(ask.rows, answer, strict=True))
                for row, completion in ended.items():
                    rows[row] = completion
                ids = {row: completion[1] for row, completion in ended.items() if row < first}
                if self.follow is not None and ids:
                    further, versions = self.follow(ids)
                    send(merge_asks(further, versions, first=len(rows)))
                    rows += [None] * len(further)
        keys = ("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids")
        columns = {key: [row[place] for row in rows] for place, key in enumerate(keys)}
        # Without log-probabilities every entry of a column is `None`. TRL expects a single `None` instead.
        return {key: None if column[:1] == [None] else column for key, column in columns.items()}

    @contextmanager
    def _open_pool(self, threads: int) -> Iterator[ThreadPoolExecutor]:
        """A pool of threads that send requests. After an error, and at Ctrl-C, it sends no further request."""
        pool = ThreadPoolExecutor(max_workers=threads)
        try:
            yield pool
        except BaseException:
            # Requests under way may end later, when their server has loaded new adapters. What they find is not noted.
            for server in self.servers:
                server.forget_requests()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _choose_temperature(self, version: Published, params: dict[str, Any]) -> dict[str, Any]:
        """Puts a member's own temperature, if it has one, in the place of all others among a request's parameters."""
        if version.member not in self.temperatures:
            return params
        own = {"temperature": self.temperatures[version.member]}
        return params | own | {"generation_kwargs": (params.get("generation_kwargs") or {}) | own}
