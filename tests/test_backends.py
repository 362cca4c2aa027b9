"""Two real processes on a CPU, started by the real launchers: DDP, ZeRO-2 and ZeRO-3 against one process.

Each backend is launched once and goes through its scenarios (`backend_worker.py`); all tests look at what both
processes saw there. FSDP2 is PyTorch's own, because accelerate silently turns it into DDP on a CPU.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests import backend_worker, fsdp_worker, held_out_worker, mends
from tests.backend_worker import BROKEN, CLIPPED, EVENT, LOSS_SCALE, REPLACED, new_factors
from tests.fixed_rows import SETTINGS, solo_run
from tests.launching import BACKENDS, launch, run_script
from trl_populora.lora.members import save_member
from trl_populora.population.factors import compare
from trl_populora.population.operators import average
from trl_populora.population.pooling import compute_mean


MORE = {
    "zero1": ("cpu_zero2.yaml --zero_stage 1", "DeepSpeedEngine", 1),
    "offload": ("cpu_zero2.yaml --offload_optimizer_device cpu", "DeepSpeedEngine", 2),
}

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.early]

COMMON = ["replace", "evolve", "pool", "plain", "broken", "savings", "resume bf16"]
SCENARIOS = {
    "ddp": [*COMMON, "groups", "mends", "resume", "evaluate", "answers", "own", "shard"],
    "zero1": ["replace", "broken"],
    "offload": ["broken"],
    "zero2": [*COMMON, "groups", "mends", "resume", "half", "unwritable"],
    "zero3": [*COMMON, "answers", "half"],
}


def load(output: Path) -> list[dict]:
    return [torch.load(path) for path in sorted(output.glob("rank_*.pt"))]


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory) -> dict:
    """What one process did."""
    run = backend_worker.replace(base, str(tmp_path_factory.mktemp("alone")))
    assert (run["world"], run["stage"]) == (1, None)
    return run


def worker(config: str, base: str, output: Path, *scenarios: str) -> list[str]:
    """`timeout` ends the workers, too, if one of them waits for a rank that failed."""
    return ["timeout", "550", *launch(config), backend_worker.__file__, base, str(output), *scenarios]


@pytest.fixture(scope="module")
def launched(base, tmp_path_factory):
    """Goes through a backend's scenarios, when it is first asked for; what both processes saw, by scenario."""
    begun = set()

    @functools.cache
    def go(backend: str) -> dict:
        assert backend not in begun, "its launch has failed, as the first test of it says"
        begun.add(backend)
        config, wrapper, stage = (BACKENDS | MORE)[backend]
        output, scenarios = tmp_path_factory.mktemp(backend) / "run", SCENARIOS[backend]
        log = run_script(worker(config, base, output, *scenarios), output, fails="unwritable" in scenarios)
        seen = {scenario: load(output / scenario) for scenario in scenarios if scenario != "unwritable"}
        for scenario, ranks in seen.items():
            assert len(ranks) == 2, f"{scenario}:\n{log[-20000:]}"
            found = [(rank["world"], rank["wrapper"], rank["stage"]) for rank in ranks if "wrapper" in rank]
            assert found in ([], [(2, wrapper, stage)] * 2), scenario
        assert all(rank["base is split"] == (stage == 3) for rank in seen.get("replace", []))
        lineage = [json.loads(line) for path in output.glob("evolve/lineage.jsonl") for line in path.open()]
        return seen | {"lineage": lineage, "output": output, "log": log}

    return go


@pytest.fixture(params=BACKENDS)
def runs(request, launched) -> dict:
    """What both processes of a backend saw. One that silently is another fails here."""
    if request.param != "ddp":
        pytest.importorskip("deepspeed", reason="needs the `deepspeed` extra")
    return launched(request.param)


def only(*backends: str):
    """A test of some backends' runs."""
    return pytest.mark.parametrize("runs", backends, indirect=True)


@pytest.fixture
def ranks(runs) -> list[dict]:
    """What the two processes saw in the run that overwrites members."""
    return runs["replace"]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def test_final_members_are_those_of_one_process(alone, ranks):
    for name, factors in alone["members"].items():
        for key, expected in factors.items():
            difference = (ranks[0]["members"][name][key] - expected).norm() / expected.norm()
            assert difference < 1e-5, f"{name} {key}: {difference:.1e}"


def test_ranks_with_different_numbers_of_live_rows_meet_and_learn_what_one_process_learns(runs, base, tmp_path):
    expected = backend_worker.plain(base, str(tmp_path))
    # The second step has the rows of the first; 18 and 18, then 11 and 18 of 24 rows a rank have an advantage.
    assert expected["live rows"] == pytest.approx([36 / 48, 29 / 48])
    for rank in runs["plain"]:
        assert rank["live rows"] == pytest.approx(expected["live rows"])
        for step, reference in zip(rank["steps"], expected["steps"], strict=True):
            for name, (factors, _) in reference.items():
                for key, value in factors.items():
                    assert (step[name][0][key] - value).norm() <= 1e-3 * value.norm()


def test_blank_rows_and_shared_prompts_change_no_member(runs):
    for rank in runs["savings"]:
        seen = rank["savings"]
        assert {key[:2] for key in seen} >= backend_worker.SAVINGS
        for loss, checkpointing in {key[:2] for key in seen}:
            members, live, shared = seen[loss, checkpointing, False]
            reference, all_rows, _ = seen[loss, checkpointing, True]
            assert live < all_rows == 1
            assert shared > 0
            for name, factors in reference.items():
                for key, value in factors.items():
                    difference = (members[name][key] - value).norm() / value.norm()
                    assert difference < 1e-5, f"{loss}, checkpointing {checkpointing}, {name} {key}: {difference:.1e}"


@only("zero3")
def test_adapters_stay_whole_where_the_user_has_everything_partitioned(runs):
    """Routed layers read them without the call that would gather them; DeepSpeed may find out, at every single use."""
    for rank in runs["plain"]:
        sizes = [value.numel() for factors, _ in rank["steps"][0].values() for value in factors.values()]
        assert rank["zero"]["stage3_param_persistence_threshold"] == max(sizes)


def test_every_rank_ends_with_the_same_members(ranks):
    for name, factors in ranks[0]["members"].items():
        assert equal(factors, ranks[1]["members"][name])
        for rank in ranks:
            assert equal(rank["live"][name], factors), "the live tensors and what is read must be the same"


def test_the_ranks_of_a_node_share_its_cores(alone, ranks):
    cores = len(os.sched_getaffinity(0))
    assert alone["pool"] == (cores, "ok")
    assert [rank["pool"] for rank in ranks] == [(max(1, cores // 2), "ok")] * 2


def test_every_member_is_clipped_by_its_own_norm(alone, ranks):
    assert len(alone["norms"]) == 4
    assert min(max(step) for step in alone["norms"]) > 0.02, "clipping must bite"
    for rank in ranks:
        torch.testing.assert_close(torch.tensor(rank["norms"]), torch.tensor(alone["norms"]), rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def solo(base, tmp_path_factory) -> dict:
    """What stock TRL makes of each member alone, but of the one that is to break."""
    directory = tmp_path_factory.mktemp("solo")
    trainer, members = backend_worker.make_trainer(base, str(directory / "run"), evolve_every=0), {}
    trainer.close()
    for name in trainer.population.names:
        if name != BROKEN[1]:
            save_member(trainer.model, name, directory / "start")
            members[name], *_ = solo_run(base, directory / "start", name, directory / name, **CLIPPED)
    return members


def test_a_member_whose_loss_is_nan_leaves_the_others_to_train_as_if_alone(solo, runs):
    for rank in runs["broken"]:
        for name, factors in solo.items():
            for key, expected in factors.items():
                difference = (rank["members"][name][key] - expected).norm() / expected.norm()
                assert difference < 1e-5, f"{name} {key}: {difference:.1e}"
        assert [norm is None for norm in rank["norms"]] == [False, True, False]
        assert all(value.isfinite().all() for value in rank["members"][BROKEN[1]].values())
    assert runs["log"].count(f"The gradient norm of {BROKEN[1]} is nan.") == 1, "the main process alone says it"


@only("zero2", "zero3")
def test_members_are_clipped_by_norms_without_the_loss_scale(alone, runs):
    wanted = alone["seen"]["before the write"]["read"]  # after one step, in fp32
    for rank in runs["half"]:
        assert rank["scale"] == LOSS_SCALE
        assert rank["norms"] == pytest.approx(alone["norms"][0], rel=0.05)
        for key, value in wanted.items():
            if ".lora_B." in key:  # which began at zero
                assert (rank["replaced"][key] - value).norm() / value.norm() < 0.1, key


def test_a_deepspeed_file_with_an_optimizer_or_a_schedule_is_refused(runs):
    for rank in runs["broken"]:
        for section, told in zip(["optimizer", "scheduler"], rank["sections"], strict=rank["stage"] is not None):
            assert f"The DeepSpeed config has `{section}`: {{'type': 'Any'}}" in told
            assert "one learning rate. Remove the section" in told


def test_a_second_training_is_refused_where_deepspeeds_engine_is_gone(runs):
    for rank in runs["broken"]:
        assert (rank["again"] == "") if rank["stage"] is None else ("a trainer trains once" in rank["again"])


@only("zero1")
def test_zero_1_gives_the_members_of_one_process(alone, solo, runs):
    test_final_members_are_those_of_one_process(alone, runs["replace"])
    test_every_rank_ends_with_the_same_members(runs["replace"])
    test_a_member_whose_loss_is_nan_leaves_the_others_to_train_as_if_alone(solo, runs)


@only("offload")
def test_members_are_clipped_once_their_gradients_have_arrived_on_the_cpu(runs):
    """ZeRO-2 copies them there without waiting. A CPU has nothing to wait for, but is asked as a GPU would be."""
    for rank in runs["broken"]:
        clips = [place for place, call in enumerate(rank["order"]) if call == "clip_member_grad_norms"]
        assert len(clips) == 3
        assert [rank["order"][place - 2 : place] for place in clips] == [["backward", "synchronize"]] * 3


@only("offload")
def test_zero_measures_what_it_offloads_and_steps_the_others_all_the_same(solo, runs):
    assert all(rank["offloads"] for rank in runs["broken"])
    test_a_member_whose_loss_is_nan_leaves_the_others_to_train_as_if_alone(solo, runs)


@only("ddp", "zero2")
def test_members_train_in_groups_of_every_form(runs):
    """A group is an adapter, so none is empty, and each has its own rate."""
    students = ["student_0", "student_1"]
    for rank in runs["groups"]:
        assert rank["moved"]["without teachers"] == rank["moved"]["teachers that stay"] == students
        assert rank["moved"]["a single agent"] == ["agent"]


@only("ddp", "zero2")
def test_mends_hold_on_several_processes(runs):
    """
    Of an own optimizer with one group, of held-out rates of earlier weights, of rows that a training has left, and of
    a resume whose held-out tasks were trained on.
    """
    for rank in runs["mends"]:
        mends.check_all(rank, trains_once=rank["stage"] is not None)


def test_a_cut_run_in_bf16_with_a_kl_term_and_two_iterations_equals_a_straight_one(runs):
    """Its rows are generated, under ZeRO-3 by a base that is split."""
    for rank in runs["resume bf16"]:
        assert rank["differing"] == []
        assert rank["moved"] == ["student_0", "student_1", "teacher_0", "teacher_1"]
        assert rank["backend"] == ("DDP" if rank["stage"] is None else f"ZeRO-{rank['stage']}")


@only("ddp", "zero2")
def test_a_cut_run_equals_a_straight_one(runs):
    for rank in runs["resume"]:
        assert rank["differing"] == []
        assert min(rank["births"]) < 5 < max(rank["births"]), "evolution on both sides of the cut"


def test_a_cut_run_on_a_quantised_base_equals_a_straight_one(base, tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs the `quantization` extra")
    output = tmp_path / "run"
    run_script(worker("cpu_ddp.yaml", base, output, "resume quantised"), output, ["bitsandbytes"])
    ranks = load(output / "resume quantised")
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["differing"] == []
        assert min(rank["births"]) < 5 < max(rank["births"]), "evolution on both sides of the cut"


@only("zero2")
def test_a_rank_that_cannot_write_ends_the_others_that_wait_for_it(runs):
    """Under ZeRO the others sit in a collective that the failed rank never joins; the launcher has to end them."""
    blocked = runs["output"] / "unwritable" / "_unfinished"
    assert f"Not a directory: '{blocked}/checkpoint-1/members/teacher_0'" in runs["log"]
    assert "checkpoint-1 could not be saved" in runs["log"]


@only("ddp")
def test_an_evaluation_gives_the_figures_of_one_process(runs, base, tmp_path):
    alone, together = held_out_worker.ranks(base, str(tmp_path)), runs["evaluate"][0]
    assert (alone.pop("world"), together.pop("world")) == (1, 2)
    seconds = {"eval_runtime": 0}
    assert together | seconds == alone | seconds
    assert 0 < alone["eval_solve_rate_mean"] < 1
    assert "eval_student_1/solve_rate" in alone


@only("ddp", "zero3")
def test_processes_share_the_answers_of_an_evaluation_and_draw_different_ones(runs):
    drawn = Counter()
    for rank in runs["answers"]:
        drawn.update({(prompt, member, tuple(ids)) for prompt, member, ids in rank["answers"]})
    questions = {(prompt, member) for prompt, member, _ in drawn}
    assert len(questions) == 6
    assert max(drawn.values()) == 1, "two processes have drawn the same answer"


@only("ddp")
def test_ranks_stay_together_whatever_a_users_own_functions_say_on_each(runs):
    one, other = runs["own"]
    assert one["state"] == other["state"]
    assert torch.equal(one["advantages"], other["advantages"])
    assert all(equal(factors, other["members"][name]) for name, factors in one["members"].items())


@only("ddp")
def test_an_event_of_ranks_that_have_come_apart_ends_the_run_by_name(runs):
    told = [rank["apart"] for rank in runs["own"]]
    assert told[0] == told[1]
    where = r"before the evolution after step 3: student_0: mu is \d.* on rank 0 and 7.0 on rank 1"
    assert re.match(f"The ranks have come apart {where}", told[0])


def test_a_quantised_base_is_refused_under_zero_by_name(ranks):
    for rank in ranks:
        if rank["stage"] is None:
            assert rank["quantised"] == ""
        else:
            assert f"not supported with ZeRO-{rank['stage']}" in rank["quantised"]
            assert "Use DDP" in rank["quantised"]


def test_an_idle_member_is_refused_only_where_zero_would_move_it(ranks):
    for rank in ranks:
        at_construction, within_a_step = rank["idle"]
        if rank["stage"] is None:
            assert at_construction == within_a_step == ""
        else:
            assert "`teachers=4` and `students=5`" in at_construction
            assert "`students=4` or `teachers=5` works" in at_construction
            assert "ZeRO cannot leave them out" in within_a_step
            assert "choose a number of students that equals or divides" in within_a_step


@pytest.mark.parametrize("moment", ["after the write", "after a step with learning rate 0"])
def test_an_overwritten_member_stays_what_was_written_on_all_ranks(ranks, moment):
    for rank in ranks:
        before, after = rank["seen"]["before the write"], rank["seen"][moment]
        written = new_factors(before["read"])
        assert not equal(before["read"], written)
        assert equal(after["read"], written)
        assert equal(after["live"], written), "generation reads the live tensors"


def test_an_overwritten_member_has_no_moments_and_no_steps_and_the_others_keep_theirs(ranks):
    for rank in ranks:
        before, after = rank["seen"]["before the write"], rank["seen"]["after the write"]
        assert any(value.any() for value in before["state"])
        assert not any(value.any() for value in after["state"])
        kept = zip(before["other state"], after["other state"], strict=True)
        assert all(torch.equal(old, new) for old, new in kept)
        assert any(value.any() for value in rank["seen"]["after a step with learning rate 0"]["state"])


def test_replacing_is_the_same_in_one_process(alone):
    assert alone["seen"].keys() == {"before the write", "after the write", "after a step with learning rate 0"}
    for moment in ("after the write", "after a step with learning rate 0"):
        assert equal(alone["seen"][moment]["read"], new_factors(alone["seen"]["before the write"]["read"]))
    assert REPLACED in alone["members"]


def children(runs) -> dict[str, dict]:
    return {event["child"].split("@")[0]: event for event in runs["lineage"]}


def test_two_members_of_each_role_are_replaced_and_the_main_process_alone_records_it(runs):
    assert sorted(name.split("_")[0] for name in children(runs)) == ["student", "student", "teacher", "teacher"]
    assert len(runs["lineage"]) == 4
    for rank in runs["evolve"]:
        assert rank["replaced"] == [0.0, 0.0, 4.0]
        assert rank["ratings"] == runs["evolve"][0]["ratings"]


def test_all_ranks_hold_the_child_of_its_parents_live_and_in_the_master_copy(runs):
    for name, event in children(runs).items():
        read, _ = runs["evolve"][0]["steps"][EVENT - 1][name]
        for rank in runs["evolve"]:
            again, live = rank["steps"][EVENT - 1][name]
            assert equal(again, read)
            assert equal(live, read)
        parents = [
            runs["evolve"][0]["steps"][EVENT - 1][parent["member"].split("@")[0]][0] for parent in event["parents"]
        ]
        expected = average(*parents, torch.Generator())
        assert compare(read, expected)["cosine"] == pytest.approx(1, abs=1e-5)
        assert compare(read, expected)["norm_ratio"] == pytest.approx(1, abs=1e-4)


def test_the_next_optimizer_step_starts_from_the_child(runs):
    # Adam's first step moves an element by the learning rate wherever the gradient is not tiny; SETTINGS lets it fall
    # to a third by then. The third step's rows happen to reward all proposals of one child alike: without advantage it
    # has to stand still.
    moved = []
    for name in children(runs):
        before, after = (runs["evolve"][0]["steps"][step][name][0] for step in (EVENT - 1, EVENT))
        rate = SETTINGS["learning_rate"] / 3
        move = max(float((after[key] - before[key]).abs().max()) for key in before)
        moved.append(move > 0)
        assert move == pytest.approx(rate if move else 0, rel=0.01)
    assert sum(moved) >= 3


def test_all_members_keep_the_rate_of_the_schedule_through_an_event(runs):
    for rank in runs["evolve"]:
        for step, share in enumerate([2 / 3, 1 / 3]):  # the schedule falls to 0 over three steps
            for rate in rank["rates"][step].values():
                assert rate == pytest.approx(SETTINGS["learning_rate"] * share)


def test_the_other_members_are_bit_identical_to_a_run_without_the_event(runs):
    others = [name for name in runs["plain"][0]["steps"][0] if name not in children(runs)]
    assert len(others) == 4
    for with_event, without in zip(runs["evolve"], runs["plain"], strict=True):
        for step, plain in zip(with_event["steps"], without["steps"], strict=True):
            for name in others:
                assert all(equal(mine, theirs) for mine, theirs in zip(step[name], plain[name], strict=True))


def test_pooled_members_are_their_mean_on_all_ranks_live_and_in_the_master_copy(runs):
    for rank in runs["pool"]:
        before = rank["seen"]["before"]
        students = [name for name in before if name.startswith("student")]
        mean = compute_mean([before[name]["read"] for name in students])
        assert not any(equal(before[name]["read"], mean) for name in students)
        for name in before:
            wanted = mean if name in students else before[name]["read"]
            assert equal(wanted, runs["pool"][0]["seen"]["after"][name]["read"])
            for moment in ("after", "a step later"):
                for copy in ("read", "live"):
                    assert equal(rank["seen"][moment][name][copy], wanted), f"{name} {copy} {moment}"


def test_pooled_members_keep_their_optimizer_state(runs):
    for rank in runs["pool"]:
        before, after = rank["seen"]["before"], rank["seen"]["after"]
        for name, member in before.items():
            assert any(value.any() for value in member["state"]), name
            kept = zip(member["state"], after[name]["state"], strict=True)
            assert all(torch.equal(old, new) for old, new in kept), name


@only("ddp")
def test_pytorchs_fsdp2_gives_the_members_of_one_process(runs):
    """Sharded members are stacked, clipped, written, reset and left idle as whole ones; the base is sharded too."""
    alone, ranks = fsdp_worker.run(), runs["shard"]
    assert [(rank["world"], rank["sharded"]) for rank in [alone, *ranks]] == [(1, False), (2, True), (2, True)]
    for rank in ranks:
        torch.testing.assert_close(torch.tensor(rank["norms"]), torch.tensor(alone["norms"]), rtol=1e-5, atol=0)
        for name, factors in alone["members"].items():
            assert equal(rank["members"][name], ranks[0]["members"][name])
            for key, expected in factors.items():
                assert (rank["members"][name][key] - expected).norm() / expected.norm() < 1e-5
    for rank in ranks:
        for form in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            assert rank["seen"][form]["members"] == rank["seen"][form]["states"] == list(alone["members"])
            assert rank["seen"][form]["saved"]
            assert all(".lora_" in key for key in rank["seen"][form]["saved"]), "the frozen base is in no checkpoint"
    for run in [alone, *ranks]:
        assert run["seen"]["reset"]
        assert [run["seen"][f"idle member moved in step {step}"] for step in range(3)] == [True, False, True]
        assert equal(run["seen"]["written"], run["seen"]["source"])
