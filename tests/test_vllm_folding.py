"""vLLM samples from the policy that is trained, also with patterns of ranks and alphas, and in a cramped engine."""

from __future__ import annotations

import random

import pytest


pytest.importorskip("vllm", reason="vLLM is not installed")

from .vllm_models import (
    ENGINE_ENVIRONMENT,
    colocate,
    largest_difference,
    logprobs_of,
    make_population,
    make_served_base,
    randomise,
)


pytestmark = pytest.mark.vllm
PATTERNS = {"rank_pattern": {"q_proj": 2, "down_proj": 8}, "alpha_pattern": {"o_proj": 2, "layers.1.mlp.up_proj": 24}}


CRAMPED = {"max_loras": 2, "max_cpu_loras": 5}  # the least that three members may have


def test_the_engine_has_the_logprobs_of_its_members(tmp_path, monkeypatch):
    for name, value in ENGINE_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    base = make_served_base(tmp_path / "base")
    model, names, router = make_population(base, 3, **PATTERNS)
    generation = colocate(model, names, router, base, tmp_path / "run", **CRAMPED)
    for publishing in range(2):
        for index, name in enumerate(names):
            randomise(model, name, seed=10 * publishing + index)
        generation.sync_weights()
        rng = random.Random(publishing)
        rows = [*range(3), -1] * 4
        prompts = [[rng.randrange(256) for _ in range(rng.randint(2, 9))] for _ in rows]
        with router.route_to(rows):
            _, completions, logprobs, _ = generation.generate(prompts, None, 1)
        sampled = [[token[0] for token in row] for row in logprobs]
        difference = largest_difference(sampled, logprobs_of(model, router, rows, prompts, completions))
        print(f"largest difference {difference:.1e}")
        assert difference < 1e-5
    generation.close()
