"""The colocated engine: vLLM's `LLM`, answering each row with the row's own adapter. Imports vLLM."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from .routes import Ask, Published, distinct_asks, nobody


class RoutedLLM(LLM):
    """
    [`vllm.LLM`] whose `generate` sends every prompt to the adapter set in `routes`.

    Args:
        routed_arguments (`dict`): Engine arguments added to those that TRL passes; they win where both name one.
        **kwargs: What TRL passes.

    Attributes:
        routes (`Sequence[Published]`): Who answers each prompt of the next `generate`.
        on_answer (`Callable`): Told the row and the completion's token ids as the next `generate` goes on.
        seed (`int`, *optional*): Of the samples of the next `generate`; the engine's own generator when `None`.
    """

    seed: int | None = None

    def __init__(self, *, routed_arguments: dict[str, Any], **kwargs: Any):
        super().__init__(**(kwargs | routed_arguments))
        self.routes: Sequence[Published] = ()
        self.on_answer: Callable[[int, Sequence[int]], None] = nobody

    def load(self, adapter: Published) -> None:
        """Loads a published adapter."""
        self.llm_engine.add_lora(_request(adapter))

    def unload(self, adapter: Published) -> None:
        """Forgets an adapter, on the device and in host memory."""
        self.llm_engine.remove_lora(adapter.id)

    def generate(self, prompts, sampling_params: SamplingParams, **kwargs):
        """
        One output per prompt, in order. Equal prompts to one member become one request for several samples.

        Greedy requests stay apart, because vLLM refuses several samples of one greedy request.
        """
        asks = distinct_asks([prompt["prompt_token_ids"] for prompt in prompts], self.routes)
        if sampling_params.temperature == 0:
            asks = [type(ask)(ask.prompt, ask.route, (row,)) for ask in asks for row in ask.rows]
        requests, params = [], []
        for ask in asks:
            requests.append({"prompt_token_ids": list(ask.prompt), "cache_salt": ask.route.cache_salt})
            own = sampling_params.clone()
            own.n = len(ask.rows)
            own.seed = None if self.seed is None else ask.seed(self.seed)
            own.detokenize = bool(own.stop)  # TRL reads token ids; the text is only needed to find stop strings
            params.append(own)
        adapters = [_request(ask.route) for ask in asks]
        with self._watched(asks):
            answers = super().generate(requests, params, lora_request=adapters, **kwargs)
        outputs: list[Any] = [None] * len(prompts)
        for ask, answer in zip(asks, answers, strict=True):
            for row, completion in zip(ask.rows, answer.outputs, strict=True):
                outputs[row] = copy.copy(answer)
                outputs[row].outputs = [completion]
        return outputs

    @contextmanager
    def _watched(self, asks: Sequence[Ask]) -> Iterator[None]:
        """Tells `on_answer` of requests as the engine finishes them; vLLM's loop itself returns at the end only."""
        rows: dict[tuple[tuple[int, ...], int], list[tuple[int, ...]]] = {}
        for ask in asks:  # greedy ones may ask the same; their answers are the same as well
            rows.setdefault((ask.prompt, ask.route.id), []).append(ask.rows)
        step = self.llm_engine.step

        def watched_step():
            outputs = step()
            for output in outputs:
                if output.finished:
                    asked = rows[tuple(output.prompt_token_ids), output.lora_request.lora_int_id].pop()
                    for row, completion in zip(asked, output.outputs, strict=False):
                        self.on_answer(row, completion.token_ids)
            return outputs

        self.llm_engine.step = watched_step
        try:
            yield
        finally:
            del self.llm_engine.step

    def sleep(self, level: int = 1, **kwargs: Any) -> None:
        """
        Sleeps at level 1 at most. Level 2, which TRL asks for, drops the weights because TRL sends all of them again
        before the next generation; here the base is never sent, and adapters do not survive level 2 (vLLM issue
        39934). Level 1 keeps both in host memory.
        """
        super().sleep(level=min(level, 1), **kwargs)


def _request(adapter: Published) -> LoRARequest:
    # No `load_inplace`: left on a request it makes vLLM read the directory again at every engine step.
    return LoRARequest(adapter.name, adapter.id, adapter.path)
