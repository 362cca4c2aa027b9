"""The colocated engine, for real: eight members on a random two-layer base, one engine for the whole module."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from pathlib import Path

import psutil
import pytest
import torch


pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from trl_populora.generate.engine import _list_stacks
from trl_populora.generate.publish import Published, StaleAdapterError, count_slots
from trl_populora.generate.vllm import list_graph_sizes
from trl_populora.hub.download import fetch
from trl_populora.hub.push import push_run
from trl_populora.lora.layers import BASE_NAME
from trl_populora.lora.members import read_member, set_rank

from .populora_run import make_trainer
from .vllm_models import (
    ENGINE_ENVIRONMENT,
    colocate,
    generate_on,
    largest_difference,
    logprobs_of,
    make_population,
    make_served_base,
    randomise,
)


pytestmark = pytest.mark.vllm
MEMBERS = 8


class Served:
    """A population and its engine."""

    def __init__(self, directory: Path):
        self.base = make_served_base(directory / "base")
        self.model, self.names, self.router = make_population(self.base, MEMBERS)
        self.generation = colocate(self.model, self.names, self.router, self.base, directory / "run")

    def generate(self, rows, prompts):
        """`(completion_ids, logprobs of the sampled tokens)`."""
        with self.router.route_to(rows):
            _, completions, logprobs, _ = self.generation.generate(prompts, None, 1)
        return completions, [[token[0] for token in row] for row in logprobs]

    def publish_all(self, seed: int) -> None:
        for index, name in enumerate(self.names):
            randomise(self.model, name, seed=100 * seed + index)
        self.generation.sync_weights()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    torch.set_num_threads(1)  # for the case that torch was imported before OMP_NUM_THREADS is set here
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENGINE_ENVIRONMENT.items():
            patch.setenv(name, value)
        served = Served(tmp_path_factory.mktemp("served"))
        yield served
        served.generation.close()


class Begun(Exception):
    """An engine was about to start, with these arguments of ours."""


def arguments_of_an_engine(population, base, directory, monkeypatch, **engine) -> dict:
    """What an engine would get that this process does not start."""

    def begin(self, **arguments):
        raise Begun(arguments["routed_arguments"])

    monkeypatch.setattr("trl_populora.generate.engine.RoutedLLM.__init__", begin)
    with pytest.raises(Begun) as begun:
        colocate(*population, base, directory, **engine)
    return begun.value.args[0]


def port_of_an_engine(base, directory, monkeypatch) -> str:
    """Where an engine would listen, which this process does not start."""
    arguments_of_an_engine(make_population(base, 1), base, directory, monkeypatch)
    return os.environ["MASTER_PORT"]


class TestArguments:
    """What an engine is started with."""

    @pytest.fixture
    def arguments_with(self, tmp_path, monkeypatch):
        base = make_served_base(tmp_path / "base")
        population = make_population(base, 2)
        return lambda **engine: arguments_of_an_engine(population, base, tmp_path / "run", monkeypatch, **engine)

    def test_graphs_are_recorded_for_no_more_rows_than_a_step_has_and_with_adapters_only(self, arguments_with):
        graphs = arguments_with()["compilation_config"]
        assert graphs == {"cudagraph_specialize_lora": False, "cudagraph_capture_sizes": [8, 16, 32, 64]}
        graphs = arguments_with(max_num_seqs=20)["compilation_config"]
        assert graphs["cudagraph_capture_sizes"] == [8, 16, 20]

    @pytest.mark.parametrize("rows", [1, 8, 144, 864, 4000])
    def test_a_size_of_a_graph_is_never_far_away(self, rows):
        sizes = list_graph_sizes(rows)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == rows
        assert len(sizes) <= 35
        assert all(above - below <= max(32, rows / 32 + 8) for below, above in itertools.pairwise([0, *sizes]))

    def test_what_a_user_says_of_graphs_counts(self, arguments_with):
        both = {"cudagraph_specialize_lora": True, "cudagraph_capture_sizes": [4]}
        assert arguments_with(compilation_config=both)["compilation_config"] == both
        told = arguments_with(cudagraph_capture_sizes=[4])
        assert told["cudagraph_capture_sizes"] == [4]
        assert "cudagraph_capture_sizes" not in told["compilation_config"], "vLLM refuses both"
        told = arguments_with(compilation_config={"mode": 0, "max_cudagraph_capture_size": 4})
        assert told["compilation_config"] == {
            "mode": 0,
            "max_cudagraph_capture_size": 4,
            "cudagraph_specialize_lora": False,
        }
        assert arguments_with(compilation_config=0)["compilation_config"] == 0

    def test_the_modules_of_members_get_slots_unless_a_user_names_others(self, arguments_with):
        kinds = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
        assert arguments_with()["lora_target_modules"] == kinds
        assert arguments_with(lora_target_modules=None)["lora_target_modules"] is None

    def test_a_module_that_vllm_renames_gets_its_slot(self, arguments_with, monkeypatch):
        renamed = WeightsMapper(orig_to_new_substr={".mlp.down_proj": ".mlp.second"})
        monkeypatch.setattr(Qwen3ForCausalLM, "hf_to_vllm_mapper", renamed)
        assert "second" in (names := arguments_with()["lora_target_modules"])
        assert "down_proj" not in names


def test_an_engine_has_slots_for_the_modules_of_members_alone(served):
    """As many as `recipes/budget.py` counts."""

    def look(model) -> tuple[set[str], int]:
        modules = model.lora_manager.modules
        stacks = [stack for module in modules.values() for stack in _list_stacks(module)]
        return {name.rpartition(".")[2] for name in modules}, sum(stack.numel() for stack in stacks)

    ((names, numbers),) = served.generation.llm.apply_model(look)
    assert names == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    member = sum(value.numel() for value in read_member(served.model, served.names[0]).values())
    wider = 2  # the members have rank 4, and the next one that vLLM serves is 8
    assert numbers == count_slots(MEMBERS) * wider * member == (MEMBERS + 1) * wider * member


def test_engines_that_start_together_meet_on_no_port(tmp_path, monkeypatch):
    """TRL gives all of them the same one, as long as none listens there yet."""
    base, ports = make_served_base(tmp_path / "base"), []
    for run in ("first", "second"):
        monkeypatch.delenv("MASTER_PORT", raising=False)
        ports.append(port_of_an_engine(base, tmp_path / run, monkeypatch))
    assert ports[0] != ports[1]


def test_the_port_of_a_launcher_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "23457")
    assert port_of_an_engine(make_served_base(tmp_path / "base"), tmp_path / "run", monkeypatch) == "23457"


@pytest.fixture
def greedy(served):
    served.generation.temperature = 0.0
    yield
    served.generation.temperature = 1.0


def some_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts that share a long beginning, so that the prefix cache has something to keep."""
    rng = random.Random(seed)
    beginning = [rng.randrange(256) for _ in range(40)]
    return [beginning + [rng.randrange(256) for _ in range(rng.randint(1, 12))] for _ in range(count)]


def test_mixed_rows_have_the_logprobs_of_their_members_after_each_of_five_publishings(served):
    differences = []
    for publishing in range(5):
        served.publish_all(publishing)
        rows = [*range(MEMBERS)] * 3
        random.Random(publishing).shuffle(rows)
        prompts = some_prompts(len(rows), publishing)
        completions, logprobs = served.generate(rows, prompts)
        expected = logprobs_of(served.model, served.router, rows, prompts, completions)
        for member in range(MEMBERS):
            of_member = [i for i, row in enumerate(rows) if row == member]
            differences.append(largest_difference([logprobs[i] for i in of_member], [expected[i] for i in of_member]))
    print(f"largest log-probability difference per member and publishing: {max(differences):.1e}")
    assert len(differences) == 5 * MEMBERS
    assert max(differences) < 1e-3


def test_each_member_is_sampled_at_its_own_temperature(served, monkeypatch):
    temperatures = [0.5, 2.0, 1.0, 0.5, 0.7, 1.0, 1.5, 1.0]
    monkeypatch.setattr(served.generation, "temperatures", temperatures)
    served.publish_all(6)
    rows = [*range(MEMBERS)] * 2
    prompts = some_prompts(len(rows))
    completions, logprobs = served.generate(rows, prompts)
    expected = logprobs_of(
        served.model,
        served.router,
        rows,
        prompts,
        completions,
        torch.tensor([temperatures[row] for row in rows])[:, None, None],
    )
    assert largest_difference(logprobs, expected) < 1e-3


def test_members_of_unequal_rank_and_alpha_are_served_with_their_own(served):
    own = [{"lora_r": 1 + place % 4, "lora_alpha": 3 + place} for place in range(MEMBERS)]
    try:
        for name, settings in zip(served.names, own, strict=True):
            set_rank(served.model, name, settings)
        served.publish_all(8)
        rows = [*range(MEMBERS)] * 2
        prompts = some_prompts(len(rows))
        completions, logprobs = served.generate(rows, prompts)
        expected = logprobs_of(served.model, served.router, rows, prompts, completions)
        assert largest_difference(logprobs, expected) < 1e-3
    finally:
        for name in served.names:
            set_rank(served.model, name, {"lora_r": 4, "lora_alpha": 8})


def test_members_differ(served, greedy):
    served.publish_all(7)
    prompts = some_prompts(3)
    completions, _ = served.generate([*range(MEMBERS)] * 3, [p for p in prompts for _ in range(MEMBERS)])
    said = {tuple(map(tuple, completions[member::MEMBERS])) for member in range(MEMBERS)}
    assert len(said) == MEMBERS


def test_publishing_one_member_changes_its_outputs_and_no_others(served, greedy):
    assert served.generation.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    served.publish_all(20)
    rows, prompts = [*range(MEMBERS)] * 3, [p for p in some_prompts(3) for _ in range(MEMBERS)]
    served.generate(rows, prompts)  # fills the prefix cache
    before, before_logprobs = served.generate(rows, prompts)
    randomise(served.model, "member_3", seed=99)
    served.generation.sync_weights()
    after, after_logprobs = served.generate(rows, prompts)
    for row, *texts in zip(rows, before, after, strict=True):
        assert (texts[0] == texts[1]) == (row != 3)
    for row, *values in zip(rows, before_logprobs, after_logprobs, strict=True):
        assert row == 3 or values[0] == values[1]


def test_seeded_rows_with_more_prompt_tokens_than_the_engine_reads_at_once(served, monkeypatch):
    """vLLM's CPU engine ended here: it takes back a half-read prompt's sample, which torch's generator refuses."""
    served.publish_all(30)
    monkeypatch.setattr(served.generation, "seeds", [3] * 40)
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(230)] for _ in range(40)]
    rows = [i % MEMBERS for i in range(40)]
    first, _ = served.generate(rows, prompts)
    assert len(set(map(tuple, first))) == 40
    assert served.generate(rows, prompts)[0] == first


def test_publishing_nothing_loads_nothing(served):
    served.publish_all(30)
    published = dict(served.generation.published)
    start = time.perf_counter()
    served.generation.sync_weights()
    print(f"publishing nothing: {1e3 * (time.perf_counter() - start):.1f} ms")
    assert served.generation.published == published


def test_publishing_writes_no_files_and_draws_no_random_numbers(served):
    for index, name in enumerate(served.names):
        randomise(served.model, name, seed=3200 + index)
    before = torch.get_rng_state(), random.getstate()
    served.generation.sync_weights()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert served.generation._shelf is None
    assert not Path(served.generation.output_dir).exists()


def test_a_version_under_an_id_that_the_engine_knows_is_found_stale(served):
    """What vLLM did silently: it keeps the adapter that has the id, and every row is sampled from that."""
    served.publish_all(32)
    generation, counted = served.generation, served.generation._count
    randomise(served.model, "member_3", seed=3300)
    generation._count = generation.published["member_4"].id - 1
    with pytest.raises(StaleAdapterError, match=rf"'member_3-{generation._run}-\d+', the last .* of 'member_3'"):
        generation.sync_weights()
    generation._count = counted
    generation.close()
    served.publish_all(33)


@pytest.fixture
def sleeper(served, monkeypatch):
    """An engine that sleeps between steps, as far as publishing knows: vLLM's CPU engine cannot."""
    monkeypatch.setattr(served.generation, "enable_sleep_mode", True)
    monkeypatch.setattr(served.generation, "_llm_weights_sleeping", False, raising=False)
    for method in ("sleep", "wake_up"):
        monkeypatch.setattr(type(served.generation.llm), method, lambda self, **arguments: None, raising=False)
    yield served
    served.generation.close()


def damage(served, member: str) -> None:
    """Changes one bit of a member in the engine."""
    adapter = served.generation.published[member]

    def lose(model) -> None:
        manager = model.lora_manager
        slot = manager.lora_index_to_id.index(adapter.id)
        manager.modules["model.layers.1.mlp.down_proj"].lora_b_stacked[0][slot, 0, 7, 2] *= -1

    served.generation.llm.apply_model(lose)


def test_an_adapter_that_the_engine_lost_in_its_sleep_is_found_and_written_again_alone(sleeper):
    sleeper.generation.close()
    sleeper.publish_all(34)
    generation, rows, prompts = sleeper.generation, [*range(MEMBERS), -1], some_prompts(MEMBERS + 1)
    sleeper.generate(rows, prompts)  # publishes the base
    before = dict(generation.published)
    assert generation.llm.find_damaged(before.values()) == []
    damage(sleeper, "member_5")
    assert generation.llm.find_damaged(before.values()) == [before["member_5"]]
    generation._llm_weights_sleeping = True
    generation.sync_weights()
    assert {name for name in before if before[name] != generation.published[name]} == {"member_5"}
    assert generation.llm.find_damaged(generation.published.values()) == []
    completions, logprobs = sleeper.generate(rows, prompts)
    expected = logprobs_of(sleeper.model, sleeper.router, rows, prompts, completions)
    assert largest_difference(logprobs, expected) < 1e-3


def test_a_base_that_another_rank_of_the_engine_lost_in_its_sleep_is_written_again_here_too(sleeper, monkeypatch):
    """Under tensor parallelism each rank has a part of each adapter, and all ranks know it by one name and salt."""
    sleeper.publish_all(35)
    generation, rows, prompts = sleeper.generation, [0, -1], some_prompts(2)
    sleeper.generate(rows, prompts)  # publishes the base
    before = dict(generation.published)
    other = [[*[False] * MEMBERS, True]]
    with monkeypatch.context() as patch:
        patch.setattr("trl_populora.generate.vllm.gather_object", lambda flags: flags + other)
        generation._llm_weights_sleeping = True
        generation.sync_weights()
    assert before.keys() - generation.published.keys() == {BASE_NAME}
    sleeper.generate(rows, prompts)
    assert {name for name in before if before[name] != generation.published[name]} == {BASE_NAME}


def test_an_engine_that_sleeps_is_woken_before_the_base_is_written_and_versions_are_named(sleeper, monkeypatch):
    sleeper.generation.close()
    sleeper.publish_all(36)
    generation, events, write = sleeper.generation, [], sleeper.generation._write

    def observed(adapter, *given):
        events.append(adapter.member)
        write(adapter, *given)

    damage(sleeper, "member_5")
    generation._llm_weights_sleeping = True
    monkeypatch.setattr(type(generation.llm), "wake_up", lambda self, tags: events.extend(tags), raising=False)
    monkeypatch.setattr(generation, "_write", observed)
    rows, prompts = [5, -1], some_prompts(2)
    completions, logprobs = sleeper.generate(rows, prompts)
    assert events == ["weights", "member_5", "base", "kv_cache"]
    expected = logprobs_of(sleeper.model, sleeper.router, rows, prompts, completions)
    assert largest_difference(logprobs, expected) < 1e-3


def test_publishing_writes_into_the_slot_of_the_old_version_and_keeps_no_copy(served):
    served.generation.close()
    served.publish_all(35)
    served.generate([-1], some_prompts(1))  # the base has the last slot

    def look(model) -> tuple[list[int | None], dict[int, int]]:
        manager = model.lora_manager
        weights = {id: len(manager.get_adapter(id).loras) for id in manager.list_adapters()}
        return list(manager.lora_index_to_id), weights

    before, published = served.generation.llm.apply_model(look)[0][0], dict(served.generation.published)
    assert None not in before
    randomise(served.model, "member_2", seed=3500)
    served.generation.sync_weights()
    ((after, copies),) = served.generation.llm.apply_model(look)
    new = {published["member_2"].id: served.generation.published["member_2"].id}
    assert after == [new.get(adapter, adapter) for adapter in before]
    assert {adapter for adapter, modules in copies.items() if modules} == {published["base"].id}
    assert copies[published["base"].id] == 1


def test_nothing_is_published_while_requests_run(served):
    served.publish_all(36)
    llm = served.generation.llm
    llm.llm_engine.add_request("running", {"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=4))
    randomise(served.model, "member_1", seed=3600)
    before = dict(served.generation.published)
    with pytest.raises(RuntimeError, match=r"while 1 request\(s\) run"):
        served.generation.sync_weights()
    assert served.generation.published == before
    assert {adapter.id for adapter in before.values()} <= llm.llm_engine.list_loras()
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    served.generation.sync_weights()
    assert len(llm.llm_engine.list_loras()) >= MEMBERS


def test_equal_rows_are_sampled_apart_and_land_in_their_places(served):
    served.publish_all(50)
    first, second = some_prompts(2)
    rows, prompts = [2, 5, 2, 2, 5, 2], [first, first, first, second, first, first]
    completions, logprobs = served.generate(rows, prompts)
    assert len({tuple(completions[i]) for i in (0, 2, 5)}) == 3
    expected = logprobs_of(served.model, served.router, rows, prompts, completions)
    assert (
        max(abs(a - b) for own, other in zip(logprobs, expected, strict=True) for a, b in zip(own, other, strict=True))
        < 1e-3
    )


def test_rows_that_join_while_others_run_have_the_logprobs_of_their_members(served, monkeypatch):
    served.publish_all(55)
    stops = {"stop_token_ids": [*range(0, 256, 12)]}  # so that completions end at different times
    monkeypatch.setattr(served.generation, "generation_kwargs", stops)
    prompts, taken = some_prompts(3 * MEMBERS), []
    for wait in (0.0, 0.02):
        torch.manual_seed(5)
        taken.append(generate_on(served, [*range(MEMBERS)] * 3, prompts, MEMBERS, wait))
    rows, prompts, completions, logprobs, told = taken[0]
    assert taken[1] == taken[0], "how long it takes to decide what is asked next changes nothing"
    assert sum(told) == 3 * MEMBERS
    assert len(told) > 3
    assert len(completions) == len(prompts) == len(rows) == 3 * 3 * MEMBERS
    assert largest_difference(logprobs, logprobs_of(served.model, served.router, rows, prompts, completions)) < 1e-3


@pytest.mark.parametrize(
    ("last", "error"), [([3], ZeroDivisionError), ([1] * 300, Exception)], ids=["of what follows", "of a long prompt"]
)
def test_an_error_amid_rows_that_others_follow_leaves_no_request_behind(served, last, error):
    def fail(ended):
        raise ZeroDivisionError

    served.publish_all(56)
    served.generation.follow = fail
    try:
        with pytest.raises(error, match="" if len(last) == 1 else "length"):
            served.generate([0, 0, 1], [[1, 2], [1, 2], last])
    finally:
        served.generation.follow = None
    served.generation.llm.check_idle()


def test_an_interrupt_amid_rows_leaves_no_request_behind(served, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    served.publish_all(57)
    prompts = [[1, 2], [1, 2], [3]]
    with monkeypatch.context() as patch:
        patch.setattr(served.generation.llm.llm_engine, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            served.generate([0, 0, 1], prompts)
    served.publish_all(58)
    completions, logprobs = served.generate([0, 0, 1], prompts)
    expected = logprobs_of(served.model, served.router, [0, 0, 1], prompts, completions)
    assert largest_difference(logprobs, expected) < 1e-3


def test_logprobs_include_the_temperature(served):
    served.publish_all(60)
    served.generation.temperature = 1.7
    try:
        completions, logprobs = served.generate([0, 1], prompts := some_prompts(2))
    finally:
        served.generation.temperature = 1.0
    expected = logprobs_of(served.model, served.router, [0, 1], prompts, completions, temperature=1.7)
    assert (
        max(abs(a - b) for own, other in zip(logprobs, expected, strict=True) for a, b in zip(own, other, strict=True))
        < 1e-3
    )


def test_the_engine_holds_one_version_of_each_member_and_none_after_close(served):
    for seed in (80, 81):
        served.publish_all(seed)
        assert served.generation.llm.llm_engine.list_loras() == {a.id for a in served.generation.published.values()}
    served.generation.close()
    assert served.generation.llm.llm_engine.list_loras() == set()
    served.generation.sync_weights()
    assert len(served.generation.published) == MEMBERS


def test_unrouted_rows_are_refused(served):
    served.publish_all(90)
    with pytest.raises(RuntimeError, match="names no rows"):
        served.generation.generate([[1, 2]], None, 1)
    with served.router.route_to([0, 1]), pytest.raises(RuntimeError, match="2 rows"):
        served.generation.generate([[1, 2]], None, 1)
    with served.router.route_to([0]), pytest.raises(ValueError, match="num_generations"):
        served.generation.generate([[1, 2]], None, 2)


@pytest.mark.slow
def test_the_engine_does_not_grow_over_200_publishings(served):
    process, sizes = psutil.Process(), []
    for publishing in range(200):
        randomise(served.model, served.names[publishing % MEMBERS], seed=1000 + publishing)
        served.generation.sync_weights()
        if publishing % 10 == 0:
            served.generate([*range(MEMBERS)], some_prompts(MEMBERS))
        sizes.append(process.memory_info().rss / 2**20)
    print(f"resident MiB after 1, 50, 100, 150, 200 publishings: {[round(sizes[i]) for i in (0, 49, 99, 149, 199)]}")
    assert sizes[199] - sizes[49] < 32
    assert len(served.generation.llm.llm_engine.list_loras()) == MEMBERS


def test_rows_of_the_base_have_its_logprobs_and_seeded_samples_repeat(served):
    served.publish_all(91)
    rows, prompts = [-1, 0] * 3, some_prompts(6)
    said = []
    for seed in (7, 7, 8):
        served.generation.seeds = [seed] * len(rows)
        completions, logprobs = served.generate(rows, prompts)
        expected = logprobs_of(served.model, served.router, rows, prompts, completions)
        assert largest_difference(logprobs, expected) < 1e-3
        said.append(completions)
    served.generation.seeds = None
    assert said[0] == said[1] != said[2]


def test_members_of_a_pushed_population_answer_as_in_their_run(served, hub, seed_tasks, tmp_path):
    """Trained and pushed without vLLM, downloaded, and put to an engine that never saw the run."""
    Path(served.base, "tasks.json").write_text(json.dumps([task.to_record() for task in seed_tasks]))
    trainer = make_trainer(served.base, str(tmp_path / "run"), {"max_steps": 3, "save_strategy": "no"})
    trainer.train()
    trainer.save_model()
    push_run(trainer.args.output_dir, "me/served")
    root, llm, names = fetch("me/served"), served.generation.llm, trainer.population.names
    assert root != Path(trainer.args.output_dir)

    served.generation.close()
    pushed = [Published(n, f"pushed-{n}", 10_000 + i, str(root / "members" / n)) for i, n in enumerate(names)]
    for adapter in pushed:
        llm.llm_engine.add_lora(LoRARequest(adapter.name, adapter.id, adapter.path))
    rows = [*range(len(names))] * 4
    prompts, llm.versions, llm.seeds = some_prompts(len(rows)), [pushed[row] for row in rows], None
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(asked, SamplingParams(max_tokens=16, logprobs=0), use_tqdm=False)
    for adapter in pushed:
        llm.unload(adapter)

    said = [output.outputs[0] for output in outputs]
    completions = [list(completion.token_ids) for completion in said]
    logprobs = [[step[token].logprob for step, token in zip(c.logprobs, c.token_ids, strict=True)] for c in said]
    expected = logprobs_of(trainer.model, trainer.router, rows, prompts, completions)
    others = logprobs_of(trainer.model, trainer.router, [(row + 1) % len(names) for row in rows], prompts, completions)
    print(f"largest difference to the run: {largest_difference(logprobs, expected):.1e}")
    assert largest_difference(logprobs, expected) < 1e-3
    assert largest_difference(logprobs, others) > 0.01, "members have to differ for this to show anything"
