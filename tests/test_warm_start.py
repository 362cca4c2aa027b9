"""Members that start from ordinary PEFT adapters."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from tests.adapter_models import make_base, make_config, make_rows, token_logps
from tests.small_run import small_trainer
from trl_populora import PopuLoRAConfig
from trl_populora.hub.warm_start import warm_start
from trl_populora.lora.layers import Router, add_members, routed_layers
from trl_populora.lora.members import adds_nothing, read_member
from trl_populora.population.members import Population
from trl_populora.run.read import read_population
from trl_populora.run.saved_population import Shape, check_pooled, check_settings, read_lora


def members():
    """2T+2S of rank 4, alpha 8 on all linear layers."""
    population, router = Population(2, 2), Router()
    model = add_members(make_base(), population.adapters, make_config(), router, seed=3).eval()
    return model, router, population, Shape.of(model, "base")


def adapter(path, seed=0, **options) -> str:
    """An adapter that stock PEFT has trained, as far as its shape goes."""
    torch.manual_seed(seed)
    config = LoraConfig(**({"r": 2, "lora_alpha": 7, "init_lora_weights": False, "lora_dropout": 0.1} | options))
    get_peft_model(make_base(), config).save_pretrained(path)
    return str(path)


def said_alone(path) -> torch.Tensor:
    with torch.no_grad():
        return token_logps(PeftModel.from_pretrained(make_base(), path).eval(), make_rows(2))


def said(model, router, member: int) -> torch.Tensor:
    with router.route_to([member] * 2), torch.no_grad():
        return token_logps(model, make_rows(2))


SHAPES = {
    "fewer modules": {"target_modules": ["q_proj", "v_proj"]},
    "own alphas and ranks": {
        "target_modules": "all-linear",
        "rank_pattern": {"up_proj": 4},
        "alpha_pattern": {"q_proj": 3, "down_proj": 20},
    },
    "rank-stabilised": {"target_modules": ["o_proj", "gate_proj"], "use_rslora": True, "r": 3},
}


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES.keys())
def test_all_members_start_as_an_adapter_and_can_learn_in_all_their_rank(tmp_path, options):
    model, router, population, shape = members()
    own = read_member(model, "student_1")
    source = adapter(tmp_path / "sft", **options)
    warm_start(source, model, population, shape)
    for member in population:
        torch.testing.assert_close(said(model, router, member.index), said_alone(source), rtol=1e-5, atol=1e-5)
        assert (member.operator, member.parents, member.mu) == ("warm_start", (source,), 25.0)
    for key, value in read_member(model, "student_1").items():
        if ".lora_A." in key:
            assert (value[-1] != 0).all(), "with A and B zero a direction would never be learned"
        assert value.shape == own[key].shape


def test_an_adapter_for_one_role_leaves_the_other_as_it_is(tmp_path):
    model, router, population, shape = members()
    source = adapter(tmp_path / "sft", target_modules=["q_proj"])
    warm_start(json.dumps({"student": source}), model, population, shape)
    assert [adds_nothing(model, name) for name in population.adapters] == [True, True, False, False]
    torch.testing.assert_close(said(model, router, 3), said_alone(source), rtol=1e-5, atol=1e-5)
    assert [member.operator for member in population] == ["init", "init", "warm_start", "warm_start"]


def test_a_list_names_one_adapter_for_each_member(tmp_path):
    model, router, population, shape = members()
    sources = [adapter(tmp_path / str(seed), seed, target_modules=["q_proj", "o_proj"]) for seed in range(4)]
    warm_start(sources, model, population, shape)
    for member, source in zip(population, sources, strict=True):
        torch.testing.assert_close(said(model, router, member.index), said_alone(source), rtol=1e-5, atol=1e-5)


def test_members_that_are_pooled_begin_with_one_adapter(tmp_path):
    model, _, population, shape = members()
    one, other = (adapter(tmp_path / str(seed), seed, target_modules=["q_proj"]) for seed in range(2))
    with pytest.raises(ValueError, match="gives the students different adapters .*Name one adapter for all of them"):
        warm_start([one, one, one, other], model, population, shape, pooled_roles=["student"])
    assert all(adds_nothing(model, name) for name in population.adapters)
    warm_start([one, other, one, one], model, population, shape, pooled_roles=["student"])


def test_members_that_evolution_has_made_are_not_pooled(finished, make_args, tmp_path):
    path, saved = tmp_path / "run", read_population(finished)
    shutil.copytree(finished, path)
    population = Population(2, 2)
    base = AutoModelForCausalLM.from_pretrained(saved["base_model"])
    model = add_members(base, population.adapters, read_lora(saved), Router(), seed=3)
    shape = Shape.of(model, saved["base_model"])
    refused = r"mean of the students of .*/run\. .* does not say that these did \(.*student_\d init.*\)"
    with pytest.raises(ValueError, match=refused):
        warm_start(str(path), model, population, shape, ["student"])
    with pytest.raises(ValueError, match=refused):
        check_settings(make_args(pool_every=4), path, {**saved, "settings": {}}, processes=2)
    assert all(adds_nothing(model, name) for name in population.adapters), "nothing was loaded"

    for members, settings in (
        ([each | {"operator": "init", "parents": []} for each in saved["members"]], {}),
        ([each | {"operator": "warm_start", "parents": ["me/sft"]} for each in saved["members"]], {}),
        (saved["members"], {"pool_every": 5, "pool": "students"}),
    ):
        told = saved | {"members": members, "settings": saved["settings"] | settings}
        (path / "population.json").write_text(json.dumps(told))
        warm_start(str(path), model, population, shape, ["student"])
    own = [each | {"operator": "warm_start", "parents": [each["name"]]} for each in saved["members"]]
    (path / "population.json").write_text(json.dumps(saved | {"members": own}))
    with pytest.raises(ValueError, match=r"\(student_0 warm_start student_0; student_1 warm_start student_1\)"):
        warm_start(str(path), model, population, shape, ["student"])


@pytest.mark.parametrize(
    ("joined", "alike"),
    [
        (["join"], True),
        (["join", "first@0"], True),
        (["join", "second@0"], True),
        (["join", "third@1"], False),
        (["join", "gone@0"], False),
    ],
    ids=["as all began", "copies the first", "copies one that joined", "copies a child", "copies one that left"],
)
def test_members_that_joined_began_as_the_ones_that_they_copied(joined, alike):
    begun = [("first", 0, "init"), ("second", 0, "join", "first@0"), ("last", 0, *joined)]
    child = ("third", 1, "average", "first@0", "second@0")
    saved = {
        "members": [
            {"name": name, "version": version, "operator": operator, "parents": parents, "adapter": name} | role
            for role, members in (({"role": "student"}, begun), ({"role": "teacher"}, [child]))
            for name, version, operator, *parents in members
        ]
    }
    with nullcontext() if alike else pytest.raises(ValueError, match=r"these did \(first init; second init; last "):
        check_pooled(Path("run"), saved, ["student"])


def test_an_adapter_may_lie_on_the_hub(hub, tmp_path):
    model, router, population, shape = members()
    source = adapter(tmp_path / "sft", target_modules=["q_proj"])
    HfApi().create_repo("me/sft")
    HfApi().upload_folder(repo_id="me/sft", folder_path=source)
    warm_start({"teacher": "me/sft"}, model, population, shape)
    torch.testing.assert_close(said(model, router, 0), said_alone(source), rtol=1e-5, atol=1e-5)
    assert [member.parents for member in population] == [("me/sft",), ("me/sft",), (), ()]


def test_a_run_starts_from_an_adapter_that_its_settings_name(random_base, seed_tasks, tmp_path):
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(random_base), config).save_pretrained(tmp_path / "sft")
    trainer = small_trainer(
        random_base,
        [task.to_record() for task in seed_tasks],
        output_dir=str(tmp_path / "run"),
        warm_start={"teacher": str(tmp_path / "sft")},
        sandbox_allow_weak=True,
    )
    trainer.close()
    assert [adds_nothing(trainer.model, name) for name in trainer.population.adapters] == [False, False, True, True]


def test_a_source_may_be_a_path_and_is_saved_as_text():
    model, _, population, shape = members()
    first, second = Path("runs", "one"), Path("runs", "two")
    for source, text in (
        (first, "runs/one"),
        ({"student": first}, {"student": "runs/one"}),
        ([first, str(second)], ["runs/one", "runs/two"]),
        (None, None),
    ):
        assert PopuLoRAConfig("unused", warm_start=source).warm_start == text
    for source in ({"student": ["a", "b"]}, {"student": None}, ["a", 1], 3):
        with pytest.raises(ValueError, match="`warm_start` must name directories or Hub names, got"):
            PopuLoRAConfig("unused", warm_start=source)
    with pytest.raises(ValueError, match="`warm_start` must name directories or Hub names, got"):
        warm_start('{"student": null}', model, population, shape)


@pytest.mark.parametrize(("revision", "told"), [("v1", 0), ("v2", 1), (None, 1)])
@pytest.mark.parametrize("source", ["adapter", "population"])
def test_another_revision_of_the_base_is_told(finished, tmp_path, caplog, source, revision, told):
    saved = read_population(finished)
    if source == "adapter":
        model, _, population, shape = members()
        path = Path(adapter(tmp_path / "sft", target_modules=["q_proj"]))
        config = json.loads((path / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps(config | {"revision": "v1"}))
        shape = replace(shape, revision=revision or "main")
    else:
        path = tmp_path / "run"
        shutil.copytree(finished, path)
        saved["settings"]["base_revision"] = "v1"
        (path / "population.json").write_text(json.dumps(saved | {"base_model": "me/base"}))
        population, router = Population(2, 2), Router()
        base = AutoModelForCausalLM.from_pretrained(saved["base_model"])
        model = add_members(base, population.adapters, read_lora(saved), router, seed=3)
        shape = Shape.of(model, "me/base", revision)
    warm_start(str(path), model, population, shape)
    lines = [line for line in caplog.messages if "was trained on revision 'v1'" in line]
    assert len(set(lines)) == told
    assert all(f"here the base has revision {revision or 'main'!r}" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 5, "target_modules": ["q_proj"]}, "it has rank 5 at '.*q_proj', above the members' 4. Choose `r` 5"),
        ({"target_modules": ["q_proj", "lm_head"]}, "no place: .*lm_head"),
        ({"target_modules": ["q_proj"], "use_dora": True}, "`use_dora=True` is not supported"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "no place: .*lm_head"),
        (
            {"target_modules": ["q_proj"], "init_lora_weights": "pissa"},
            "`init_lora_weights='pissa'`, which",
        ),
    ],
)
def test_an_adapter_that_members_cannot_be_is_refused_by_name(tmp_path, options, message):
    model, _, population, shape = members()
    source = adapter(tmp_path / "sft", **options)
    with pytest.raises(ValueError, match=f"(?s)The adapter .*sft' cannot start member 'teacher_0': .*{message}"):
        warm_start(source, model, population, shape)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (["a", "b"], r"lists 2 adapters for 4 members \(teacher_0, teacher_1, student_0, student_1\)"),
        ({"pupil": "a"}, "names the roles pupil; there are teacher, student"),
        ('{"student": ', "`warm_start` is no JSON"),
    ],
)
def test_a_source_that_does_not_fit_the_population_is_refused(source, message):
    model, _, population, shape = members()
    with pytest.raises(ValueError, match=message):
        warm_start(source, model, population, shape)
    assert len(routed_layers(model)) == 14
