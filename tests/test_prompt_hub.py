"""A dataset run by way of the Hub, `export`, `warm_start` and the commands that read a run."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tests.populora_run import ON_PROMPTS, make_trainer
from tests.prompt_runs import QUESTIONS, brief
from tests.recipe_runs import RECIPES
from tests.small_run import QUIET, small_trainer
from trl_populora import PopuLoRAConfig, PopuLoRATrainer, cli
from trl_populora.hub.export import export_member
from trl_populora.hub.push import push_run, push_space
from trl_populora.lora.members import read_member, write_member
from trl_populora.run.read import read_population


SETTINGS = ON_PROMPTS | {"students": 2, "evolve_every": 0, "max_steps": 2, "save_strategy": "no"}
IDS = torch.arange(20)[None]


@pytest.fixture(scope="module")
def trained(random_base, tmp_path_factory):
    """
    A dataset run of two steps, saved; nobody writes into it. After the first step a member left, and another one took
    its seat.
    """
    trainer = make_trainer(random_base, str(tmp_path_factory.mktemp("prompts") / "run"), SETTINGS | {"students": 3})

    class Change(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                trainer.remove_member("student_2")
                trainer.add_member("late", like="student_1")

    trainer.add_callback(Change())
    trainer.train()
    trainer.save_model()
    return trainer


@pytest.fixture
def run(trained, tmp_path) -> str:
    """A copy of its directory."""
    return str(shutil.copytree(trained.args.output_dir, tmp_path / "run"))


def say(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits.log_softmax(-1)


def say_live(trainer, *names: str) -> list[torch.Tensor]:
    found = []
    for name in names:
        with trainer.member(name):
            found.append(say(trainer.model))
    return found


def read_adapter(trainer, name: str) -> dict[str, torch.Tensor]:
    return read_member(trainer.model, trainer.population.adapter(name))


def load_base(base: str):
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def test_a_pushed_run_loads_by_its_card_and_tells_about_itself(hub, trained, run, random_base, capsys):
    push_run(run, "me/prompts")
    files = hub.repos["me/prompts"]
    assert "archive.parquet" not in files
    card, scope, saved = files["README.md"].decode(), {}, read_population(run)
    assert all(f"{each['adapter']}/adapter_model.safetensors" in files for each in saved["left"])
    assert set(re.findall(r"members/\w+", card)) == {f"members/student_{n}" for n in range(3)}
    exec(re.search(r"```python\n(.*?)```", card, re.S)[1], scope)
    names = [saved["best_student"], "student_0", "student_1", "late"]
    loaded = [scope["model"]]
    for seat in range(3):
        loaded.append(
            PeftModel.from_pretrained(load_base(random_base), "me/prompts", subfolder=f"members/student_{seat}")
        )
    for model, wanted in zip(loaded, say_live(trained, *names), strict=True):
        assert torch.allclose(say(model), wanted, atol=1e-5)
    capsys.readouterr()
    cli.main(["info", "me/prompts"])
    told = capsys.readouterr().out
    assert re.search(r"late.*\n(.*\n)*.*student_2.*left", told), "below those that are there"


def test_checkpoints_are_pushed_while_it_trains_and_its_report_later(hub, random_base, tmp_path):
    live = {"save_strategy": "steps", "save_steps": 1, "push_to_hub": True, "hub_model_id": "me/live"}
    trainer = make_trainer(random_base, str(tmp_path / "run"), SETTINGS | live | {"hub_always_push": True})
    trainer.train()
    assert [told for told in hub.messages if "progress" in told] == [f"Training in progress, step {n}" for n in (1, 2)]
    files = hub.repos["me/live"]
    assert json.loads(files["population.json"])["step"] == 2
    assert files["adapter_model.safetensors"] in [
        files[f"members/student_{n}/adapter_model.safetensors"] for n in (0, 1)
    ]
    assert re.findall(r'src="(plots/[^"]+)"', files["README.md"].decode())
    push_space(tmp_path / "run", "me/page")
    assert b"student_1" in hub.repos["spaces/me/page"]["index.html"]


@pytest.mark.parametrize("merge", [False, True], ids=["adapter", "merged"])
def test_an_exported_member_says_what_it_says_in_the_run(trained, random_base, tmp_path, merge):
    out = tmp_path / "out"
    assert export_member(trained.args.output_dir, out, "late", merge) == "late"
    model = load_base(out if merge else random_base)
    found = say(model if merge else PeftModel.from_pretrained(model, out))
    (wanted,) = say_live(trained, "late")
    assert torch.allclose(found, wanted, atol=1e-5)
    assert AutoTokenizer.from_pretrained(out)


def test_the_mean_of_all_members_is_exported(trained, tmp_path, random_base):
    export_member(trained.args.output_dir, tmp_path / "mean", merge=True, merge_students=True)
    states = {}
    for name in trained.population.names:
        export_member(trained.args.output_dir, tmp_path / name, name, merge=True)
        states[name] = load_base(tmp_path / name).state_dict()
    mean = load_base(tmp_path / "mean").state_dict()
    for key, value in mean.items():
        own = torch.stack([state[key] for state in states.values()])
        assert torch.allclose(value, own.mean(0), atol=1e-6), key


class TestWarmStart:
    def test_from_a_dataset_run_with_another_number_of_members(self, trained, random_base, tmp_path):
        options = SETTINGS | {"students": 4, "warm_start": trained.args.output_dir, "max_steps": 1}
        trainer = make_trainer(random_base, str(tmp_path), options)
        ranked = sorted(trained.population, key=lambda member: -member.mu)
        for member, source in zip(trainer.population, [*ranked, ranked[0]], strict=True):
            own, theirs = read_member(trainer.model, member.name), read_adapter(trained, source.name)
            assert all(torch.equal(own[key], theirs[key]) for key in theirs)
            assert (member.mu, member.parents) == (source.mu, (source.identity,))
        trainer.train()

    @pytest.mark.parametrize("by", ["reward on eval_dataset", "reward"])
    def test_the_best_are_those_by_the_figure_that_made_the_best_student(self, run, random_base, tmp_path, by):
        path = Path(run, "population.json")
        saved = json.loads(path.read_text())
        names = [member["name"] for member in saved["members"]]
        figures = dict(zip(names, (None, 0.25, 0.5), strict=True))
        for place, member in enumerate(saved["members"]):
            value, evaluates = figures[member["name"]], by != "reward"
            # With own prompts all ratings are equal. With an evaluation they may rank the members the other way round.
            member |= {"mu": 25.0 - place * evaluates, "reward": None if evaluates else value}
            member |= {"eval_reward": value, "eval_step": saved["step"]} if evaluates else {"eval_reward": None}
        saved["settings"]["member_prompts"] = "own" if by == "reward" else "shared"
        path.write_text(json.dumps(saved | {"best_student": names[2], "best_student_by": by}))
        trainer = make_trainer(random_base, str(tmp_path / "on"), SETTINGS | {"students": 4, "warm_start": run})
        parents = [member.parents[0].partition("@")[0] for member in trainer.population]
        assert parents == [names[2], names[1], names[0], names[2]]

    @pytest.mark.parametrize("ranks", [(2, 4), (4, 2)])
    def test_members_of_unequal_rank_start_from_those_that_fit(self, random_base, tmp_path, ranks):
        def build(output_dir, **options):
            args = PopuLoRAConfig(str(output_dir), students=2, **QUIET, **options)
            loras = [LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear") for rank in ranks]
            return PopuLoRATrainer(random_base, brief, args, QUESTIONS, peft_config=loras)

        first = build(tmp_path / "first")
        first.population["student_1"].mu += 1
        first.save_model()
        second = build(tmp_path / "second", warm_start=str(tmp_path / "first"))
        parents = {member.name: member.parents for member in second.population}
        assert parents == {"student_0": ("student_0@0",), "student_1": ("student_1@0",)}

    def test_from_the_students_of_a_game(self, random_base, seed_tasks, tmp_path):
        tasks = [task.to_record() for task in seed_tasks]
        game = small_trainer(random_base, tasks, output_dir=str(tmp_path / "game"), sandbox_allow_weak=True)
        for name in game.population.names:
            write_member(game.model, name, {key: v + 0.1 for key, v in read_member(game.model, name).items()})
        game.population["student_1"].mu += 1
        game.save_model()
        game.close()
        trainer = make_trainer(random_base, str(tmp_path / "run"), SETTINGS | {"warm_start": str(tmp_path / "game")})
        assert [member.parents for member in trainer.population] == [("student_1@0",), ("student_0@0",)]
        own, theirs = read_member(trainer.model, "student_0"), read_member(game.model, "student_1")
        assert all(torch.equal(own[key], theirs[key]) for key in theirs)

    @pytest.mark.parametrize("many", [False, True], ids=["one for all", "one for each"])
    def test_from_plain_adapters(self, trained, random_base, tmp_path, many):
        sources = [f"{trained.args.output_dir}/members/student_{n}" for n in (1, 0)]
        options = SETTINGS | {"warm_start": sources if many else sources[0]}
        trainer = make_trainer(random_base, str(tmp_path), options)
        for name, source in zip(("student_0", "student_1"), sources if many else sources[:1] * 2, strict=True):
            own, theirs = read_member(trainer.model, name), read_member(trained.model, source[-9:])
            assert all(torch.allclose(own[key], theirs[key]) for key in theirs)

    def test_a_game_needs_teachers_that_a_dataset_run_has_not(self, trained, random_base, seed_tasks, tmp_path):
        options = {"output_dir": str(tmp_path), "sandbox_allow_weak": True}
        tasks = [task.to_record() for task in seed_tasks]
        with pytest.raises(ValueError, match="holds no teacher"):
            small_trainer(random_base, tasks, warm_start=trained.args.output_dir, **options)
        game = small_trainer(random_base, tasks, warm_start={"student": f"{trained.args.output_dir}"}, **options)
        best = read_population(trained.args.output_dir)["best_student"]
        own, theirs = read_member(game.model, "student_1"), read_adapter(trained, best)
        assert all(torch.allclose(own[key], theirs[key]) for key in theirs)
        game.close()


class TestCommands:
    def test_a_report_is_written(self, run, two_plots, capsys):
        cli.main(["report", run])
        assert "Report written to" in capsys.readouterr().out
        assert Path(run, "run.png").exists()

    @pytest.mark.parametrize(
        ("command", "told"),
        [
            (["crossplay"], "was trained on a dataset of prompts"),
            (["push", "--archive_repo", "me/tasks"], "was trained on a dataset of prompts"),
            (["export", "--out", "out", "--member", "student_2"], "has no member 'student_2'"),
        ],
    )
    def test_what_there_is_not_is_refused_in_one_line(self, trained, command, told):
        run = trained.args.output_dir
        with pytest.raises(SystemExit) as stop:
            cli.main([command[0], run, *command[1:]])
        assert f"{run} {told}" in str(stop.value)
        assert "\n" not in str(stop.value)

    def test_nothing_is_pushed_if_a_part_is_refused(self, hub, run):
        with pytest.raises(SystemExit, match="was trained on a dataset of prompts"):
            cli.main(["push", run, "--repo", "me/half", "--archive_repo", "me/tasks"])
        assert not hub.repos

    def test_held_out_tasks_are_refused_in_one_line(self, trained, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(RECIPES)
        import score_held_out

        tasks = str(RECIPES / "arithmetic_seeds.jsonl")
        command = ["score_held_out.py", trained.args.output_dir, "--tasks", tasks, "--output", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(ValueError, match="was trained on a dataset of prompts"):
            score_held_out.main()
