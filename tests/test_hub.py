"""Pushing and loading, by the real `huggingface_hub` client, against a Hub on the loopback interface."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from datasets import Features, List, Value, load_dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from tests.hub_server import HubServer
from tests.populora_run import make_trainer
from tests.recipe_runs import RECIPES
from tests.without_extras import without_extras
from trl_populora import PopuLoRAConfig
from trl_populora.assets import tiny_base_path
from trl_populora.hub.card import PICTURES, _name_size, write_card
from trl_populora.hub.download import fetch
from trl_populora.hub.push import Uploads, make_stage, push_archive, push_run, push_space
from trl_populora.lora.checks import check_is_base
from trl_populora.lora.members import read_member
from trl_populora.population.members import Population
from trl_populora.report.plots import PLOTS
from trl_populora.run.read import digest_weights, read_population


sys.path.insert(0, str(RECIPES))


@pytest.fixture(scope="module")
def base(random_base, seed_tasks):
    Path(random_base, "tasks.json").write_text(json.dumps([task.to_record() for task in seed_tasks]))
    return random_base


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    """A run of three steps, one evolution event in it, saved."""
    trainer = make_trainer(
        base,
        str(tmp_path_factory.mktemp("finished") / "run"),
        {"max_steps": 3, "evolve_every": 2, "save_strategy": "no"},
    )
    trainer.train()
    trainer.save_model()
    return trainer


def log_probs(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(ids).logits.log_softmax(-1)


def live_log_probs(trainer, name: str, ids) -> torch.Tensor:
    with trainer.router.route_to([trainer.population[name].index]):
        return log_probs(trainer.model, ids)


def contents(root: str) -> dict[str, str]:
    paths = [p for p in sorted(Path(root).rglob("*")) if p.is_file() and p.name != "README.md"]
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


ABOUT = ("title", "revision", "dataset", "task")


def measured(finished, tmp_path) -> Path:
    """A copy of the run whose best student has scores on held-out tasks and on two benchmarks."""
    run = tmp_path / "measured"
    shutil.copytree(finished.args.output_dir, run)
    state = json.loads((run / "population.json").read_text())
    best = state["best_student"]
    for member in state["members"]:
        member["held_out"] = 0.5 if member["name"] == best else None
    state |= {"held_out_base": 0.25, "held_out_step": state["step"]}
    state["held_out_tasks"] = {"digest": "0123", "tasks": 12, "attempts": 3}
    (run / "population.json").write_text(json.dumps(state))
    about = {"humaneval": ("HumanEval", "sha256:abc", "openai/openai_humaneval", "openai_humaneval")}
    about["aime24"] = ("AIME 24", None, None, None)
    evaluation = {
        "step": state["step"],
        "date": "2026-11-24",
        "options": "--benchmarks humaneval aime24",
        "questions": {"humaneval": 164, "aime24": 30},
        "scores": {"humaneval": {best: 20.12, "base": 18.9}, "aime24": {best: 3.33, "base": 0.0}},
        "margins": {"humaneval": {best: 6.1}},
        "benchmarks": {name: dict(zip(ABOUT, told, strict=True)) for name, told in about.items()},
    }
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    return run


def test_the_card_shows_pictures_that_were_pushed(hub, finished):
    push_run(finished.args.output_dir, "me/pictures")
    files = hub.repos["me/pictures"]
    shown = re.findall(r'src="(plots/[^"]+)"', files["README.md"].decode())
    empty = ("held_out", "curriculum")  # the run has not evaluated, and a random base writes no task
    of_prompts = {plot.name for plot in PLOTS if "game" not in plot.sorts}
    assert shown == [f"plots/{name}.png" for name in PICTURES if name not in of_prompts.union(empty)]
    assert all(files[name].startswith(b"\x89PNG") for name in shown)


@pytest.mark.usefixtures("two_plots")
class TestPushed:
    def test_root_members_and_population_load_as_they_were_in_the_run(self, hub, finished, base):
        finished.args.hub_model_id = "me/pushed"
        finished.hub_model_id = None
        finished.push_to_hub()
        files = hub.repos["me/pushed"]
        assert {"README.md", "population.json", "lineage.jsonl", "archive.parquet", "adapter_config.json"} <= set(
            files
        )
        assert not [name for name in files if name.startswith(("checkpoint-", "_"))]

        ids = torch.arange(20)[None]
        best = max(finished.population.students, key=Population.fitness).name
        adapters = {"": best} | {f"members/{name}": name for name in finished.population.names}
        for folder, name in adapters.items():
            stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            stock = PeftModel.from_pretrained(stock, "me/pushed", **({"subfolder": folder} if folder else {}))
            assert torch.allclose(log_probs(stock, ids), live_log_probs(finished, name, ids), atol=1e-5), folder

        told = {member["name"]: member for member in read_population(fetch("me/pushed"))["members"]}
        for member in finished.population:
            ours = [told[member.name][field] for field in ("mu", "sigma", "age", "version", "parents")]
            assert ours == [member.mu, member.sigma, member.age, member.version, list(member.parents)]

    def test_a_pushed_population_goes_on_with_other_numbers(self, hub, finished, base, tmp_path):
        push_run(finished.args.output_dir, "me/seeds")
        trainer = make_trainer(
            base, str(tmp_path / "more"), {"warm_start": "me/seeds", "teachers": 1, "students": 3, "max_steps": 1}
        )
        ranked = sorted(finished.population.students, key=Population.fitness, reverse=True)
        for member, source in zip(trainer.population.students, [*ranked, ranked[0]], strict=True):
            wanted, found = read_member(finished.model, source.name), read_member(trainer.model, member.name)
            assert all(torch.equal(wanted[key], found[key]) for key in wanted)
            assert (member.mu, member.parents) == (source.mu, (source.identity,))
        assert trainer.population["student_0"].sigma == ranked[0].sigma
        assert trainer.population["student_2"].sigma == pytest.approx(25 / 3), "the clone has to be found out"
        trainer.train()

    def test_the_best_are_those_with_the_highest_mu_also_of_a_former_file(self, finished, base, tmp_path):
        """Files of the former rating rule have mu - 3 sigma as `fitness`, and sigmas that make it another order."""
        run = tmp_path / "former"
        shutil.copytree(finished.args.output_dir, run)
        saved = json.loads((run / "population.json").read_text())
        for index, member in enumerate(saved["members"]):
            member["mu"], member["sigma"] = 25.0 + index, 3.0 + index
            member["fitness"] = member["mu"] - 3 * member["sigma"]
        (run / "population.json").write_text(json.dumps(saved))
        trainer = make_trainer(base, str(tmp_path / "on"), {"warm_start": str(run), "max_steps": 1})
        ranked = sorted((m for m in saved["members"] if m["role"] == "student"), key=lambda m: -m["mu"])
        assert [(m.mu, m.sigma) for m in trainer.population.students] == [(m["mu"], m["sigma"]) for m in ranked]

    def test_a_pushed_population_is_found_for_evaluation(self, hub, finished):
        pytest.importorskip("evalscope", reason="EvalScope is not installed")
        import evaluate

        push_run(finished.args.output_dir, "me/scored")
        assert list(evaluate.find_members(fetch("me/scored"), ["student_1"])) == ["student_1"]
        best = max(finished.population.students, key=Population.fitness).name
        weights = Path(finished.args.output_dir, "members", best, "adapter_model.safetensors")
        assert (evaluate.find_adapter("me/scored") / weights.name).read_bytes() == weights.read_bytes()

    def test_a_pushed_population_is_refused_as_a_base(self, hub, finished):
        push_run(finished.args.output_dir, "me/no-base")
        with pytest.raises(ValueError, match=r"'me/no-base'` is a saved population.*`warm_start='me/no-base'`"):
            check_is_base("me/no-base")

    def test_the_card_tells_how_to_load(self, hub, finished):
        push_run(finished.args.output_dir, "me/card")
        card = hub.repos["me/card"]["README.md"].decode()
        metadata = huggingface_hub.ModelCard(card).data
        assert {"trl", "trl-populora", "lora"} <= set(metadata.tags)
        assert metadata.library_name == "peft"
        for text in (
            "| teacher_1 |",
            "max-lora-rank 8",
            "members/teacher_0",
            '"evolve_every": 2',
            "2605.16727",
            "| step 2 | ",
        ):
            assert text in card, text

    def test_the_code_on_the_card_loads_the_best_student(self, hub, finished):
        push_run(finished.args.output_dir, "me/code")
        card, scope = hub.repos["me/code"]["README.md"].decode(), {}
        exec(re.search(r"```python\n(.*?)```", card, re.S)[1], scope)
        best, ids = max(finished.population.students, key=Population.fitness).name, torch.arange(20)[None]
        assert torch.allclose(log_probs(scope["model"], ids), live_log_probs(finished, best, ids), atol=1e-5)

    def test_the_card_names_the_embedded_base_by_its_path(self, finished, tmp_path):
        state = json.loads(Path(finished.args.output_dir, "population.json").read_text())
        (tmp_path / "population.json").write_text(json.dumps(state | {"base_model": "tiny"}))
        write_card(tmp_path, "me/tiny")
        scope: dict = {}
        code = re.search(r"```python\n(.*?)\nmodel =", (tmp_path / "README.md").read_text(), re.S)[1]
        exec(code, scope)
        assert scope["base"].config.name_or_path == tiny_base_path()

    def test_the_card_names_the_revision_of_the_base(self, finished, tmp_path):
        state = json.loads(Path(finished.args.output_dir, "population.json").read_text())
        settings = state["settings"] | {"base_revision": "v1"}
        (tmp_path / "population.json").write_text(json.dumps(state | {"base_model": "me/base", "settings": settings}))
        write_card(tmp_path, "me/population")
        card = (tmp_path / "README.md").read_text()
        assert 'from_pretrained("me/base", revision="v1")' in card
        assert "vllm serve me/base --revision v1 " in card
        metadata = huggingface_hub.ModelCard(card).data
        assert (metadata.base_model, metadata.base_model_relation) == ("me/base", "adapter")

    @pytest.mark.parametrize("path", ["models/base", "/scratch/my models/base"])
    def test_no_card_links_to_a_path_of_the_machine_that_trained(self, finished, tmp_path, path):
        """The Hub refuses a path, or takes it for somebody's model. A link that an earlier push wrote goes, too."""
        state = json.loads(Path(finished.args.output_dir, "population.json").read_text())
        tables = ["data/mine.jsonl", "me/table"]
        state |= {"base_model": path, "datasets": tables, "local": [path, tables[0]]}
        (tmp_path / "population.json").write_text(json.dumps(state))
        earlier = f"---\nbase_model: {path}\nbase_model_relation: adapter\ndatasets: [{tables[0]}, me/other]\n---\n"
        for before, linked in ((None, ["me/table"]), (earlier, ["me/other"])):
            if before:
                (tmp_path / "README.md").write_text(before)
            write_card(tmp_path, "me/population")
            metadata = huggingface_hub.RepoCard.load(tmp_path / "README.md").data.to_dict()
            assert not {"base_model", "base_model_relation"} & {*metadata}
            assert metadata["datasets"] == linked

    def test_the_card_names_only_adapters_and_settings_that_the_population_has(self, finished, tmp_path):
        state = json.loads(Path(finished.args.output_dir, "population.json").read_text())
        agent = [member | {"adapter": "members/agent"} for member in state["members"][1:3]]
        lora = state["lora"] | {"use_rslora": True}
        (tmp_path / "population.json").write_text(json.dumps(state | {"members": agent, "lora": lora}))
        write_card(tmp_path, "me/agent")
        card = (tmp_path / "README.md").read_text()
        assert set(re.findall(r"members/\w+", card)) == {"members/agent"}
        config = eval(re.search(r"peft_config=(LoraConfig\(.*\))\)\.train", card)[1], {"LoraConfig": LoraConfig})
        assert {name: getattr(config, name) for name in lora} == lora | {"target_modules": set(lora["target_modules"])}

    @pytest.mark.parametrize(
        ("rank", "told"), [(512, "--max-lora-rank 512 "), (513, "up to rank 512, and these have 513")]
    )
    def test_the_card_of_a_rank_that_vllm_does_not_serve_names_no_server(self, finished, tmp_path, rank, told):
        state = json.loads(Path(finished.args.output_dir, "population.json").read_text())
        lora = state["lora"] | {"r": rank}
        (tmp_path / "population.json").write_text(json.dumps(state | {"lora": lora}))
        write_card(tmp_path, "me/wide")
        card = (tmp_path / "README.md").read_text()
        assert told in card
        assert ("vllm serve" in card) == (rank == 512)

    def test_a_card_is_written_anew_and_keeps_tags_and_metadata(self, finished, tmp_path):
        state = json.loads(Path(finished.args.output_dir, "population.json").read_text())
        for step in (2, 3):
            (tmp_path / "population.json").write_text(json.dumps(state | {"step": step}))
            given = ("mine", {"license": "mit"}) if step == 2 else ("ours", None)
            write_card(tmp_path, "me/mine", *given)
            card = (tmp_path / "README.md").read_text()
            assert f"after {step} steps" in card
            metadata = huggingface_hub.ModelCard(card).data
            assert metadata.license == "mit"
        assert {"mine", "ours", "lora"} <= set(metadata.tags)
        write_card(tmp_path, "me/mine", details={"license": "apache-2.0"})
        assert huggingface_hub.ModelCard.load(tmp_path / "README.md").data.license == "apache-2.0"

    @pytest.mark.parametrize(
        ("key", "given", "kept"),
        [
            ("tags", "3", ["3"]),
            ("tags", "[3, mine]", ["3", "mine"]),
            ("tags", "0", ["0"]),
            ("tags", "[null, mine]", ["mine"]),
            ("model-index", "[{name: x}]", [{"name": "x"}]),
            ("model-index", "[{name: x, results: []}]", [{"name": "x", "results": []}]),
            ("model-index", "x", ["x"]),
            ("2024", "x", ["x"]),
            ("model-index", "[{results: [{}, 3]}]", [{"results": [{}, 3]}]),
        ],
    )
    def test_odd_metadata_of_a_readme_stay_and_stop_nothing(self, finished, tmp_path, key, given, kept):
        shutil.copyfile(Path(finished.args.output_dir, "population.json"), tmp_path / "population.json")
        (tmp_path / "README.md").write_text(f"---\n{key}: {given}\n---\nRead this first.\n")
        for _ in range(2):
            write_card(tmp_path, "me/mine")
            _, metadata, text = (tmp_path / "README.md").read_text().split("---\n")
            assert text == "Read this first.\n"
            read = {str(key): value for key, value in yaml.safe_load(metadata).items()}
            assert all(each in read[key] for each in kept)

    @pytest.mark.parametrize(
        "where", ["an edited card", "notes below a card", "a text of one's own", "a card of one's own"]
    )
    def test_a_card_keeps_the_text_of_the_user(self, finished, tmp_path, where, caplog):
        shutil.copyfile(Path(finished.args.output_dir, "population.json"), tmp_path / "population.json")
        path = tmp_path / "README.md"
        if where == "an edited card":
            write_card(tmp_path, "me/mine")
            path.write_text(path.read_text().replace("## Members", "Read this first.\n\n## Members"))
        elif where == "notes below a card":
            write_card(tmp_path, "me/mine")
            path.write_text(path.read_text() + "\nRead this first.\n")
        elif where == "a text of one's own":
            path.write_text("Read this first.\n\n---\n")
        else:
            path.write_text("---\ntags: mine\nthumbnail: me.png\n---\nRead this first.\n", encoding="utf-8-sig")
        text = huggingface_hub.RepoCard(path.read_text(encoding="utf-8-sig")).text
        for _ in range(2):
            write_card(tmp_path, "me/mine")
            card = huggingface_hub.RepoCard.load(path)
            assert card.text == text
            assert {"trl", "populora"} <= set(card.data.tags)
            assert card.data.library_name == "peft"
        assert "keeps the text that you gave it" in caplog.text
        if where == "a card of one's own":
            assert "mine" in card.data.tags
            assert card.data.thumbnail == "me.png"

    @pytest.mark.parametrize("where", ["our card", "an edited card", "a card of one's own"])
    def test_scores_follow_the_weights_in_any_card_and_others_stay(self, finished, tmp_path, where):
        run = measured(finished, tmp_path)
        (run / "evaluation.json").unlink()
        path, state = run / "README.md", json.loads((run / "population.json").read_text())
        others = "{name: x, results: [{task: {type: y}, dataset: {type: z, name: z}, metrics: [{type: w, value: 1}]}]}"
        text = "" if where == "our card" else "Read this first.\n"
        if where == "a card of one's own":
            path.write_text(f"---\nmodel-index: [{others}]\n---\n{text}")
        else:
            write_card(run, "me/mine")
            path.write_text(path.read_text().replace("model-index:", f"model-index:\n- {others}") + text)

        def read_scores() -> list:
            write_card(run, "me/mine")
            index = huggingface_hub.RepoCard.load(path).data.to_dict()["model-index"]
            return [result["metrics"][0]["value"] for model in index for result in model["results"]]

        assert read_scores() == [1, 50.0]
        next(each for each in state["members"] if each["name"] == state["best_student"])["held_out"] = 0.123
        (run / "population.json").write_text(json.dumps(state))
        assert read_scores() == [1, 12.3]
        (run / "population.json").write_text(json.dumps(state | {"step": state["step"] + 1}))
        assert read_scores() == [1], "no score is known of these weights"

    def test_a_card_that_cannot_be_read_stays_as_it_is(self, finished, tmp_path, caplog):
        shutil.copyfile(Path(finished.args.output_dir, "population.json"), tmp_path / "population.json")
        broken = "---\ntags: [mine\n---\nRead this first.\n"
        (tmp_path / "README.md").write_text(broken)
        write_card(tmp_path, "me/mine")
        assert (tmp_path / "README.md").read_text() == broken
        assert "stays as it is" in caplog.text

    def test_a_card_of_the_first_version_is_written_anew(self, finished, tmp_path):
        """It has no mark, and may hold a secret that early versions saved."""
        shutil.copyfile(Path(finished.args.output_dir, "population.json"), tmp_path / "population.json")
        write_card(tmp_path, "me/mine")
        path = tmp_path / "README.md"
        path.write_text(path.read_text().replace("## Training", "hf_secret\n\n## Training").partition("<!--")[0])
        write_card(tmp_path, "me/mine")
        assert "hf_secret" not in path.read_text()

    def test_what_belongs_to_a_population_is_not_doubted(self, hub, finished, recwarn):
        push_run(finished.args.output_dir, "me/quiet")
        assert "archive.parquet" in hub.repos["me/quiet"]
        assert [str(told.message) for told in recwarn if "data file" in str(told.message)] == []

    def test_figures_carry_revision_and_command_and_reach_leaderboards(self, hub, finished, tmp_path):
        run = measured(finished, tmp_path)
        push_run(run, "me/scored")
        files = hub.repos["me/scored"]
        entries = huggingface_hub.parse_eval_result_entries(
            yaml.safe_load(files[".eval_results/populora_humaneval.yaml"].decode())
        )
        command = "python recipes/evaluate.py me/scored --benchmarks humaneval aime24"
        (entry,) = entries
        assert (entry.dataset_id, entry.task_id, entry.value) == ("openai/openai_humaneval", "openai_humaneval", 20.1)
        assert (entry.date, entry.source_url) == ("2026-11-24", f"{hub.url}/me/scored")
        assert entry.notes.endswith(f"{command}; questions sha256:abc")
        assert sum(name.startswith(".eval_results/") for name in files) == 1, "no leaderboard is known for AIME 24"

        card = files["README.md"].decode()
        assert "(the base without an adapter: 25 %)" in card
        scores = {each.dataset_name: each for each in huggingface_hub.ModelCard(card).data.eval_results}
        assert {name: each.metric_value for name, each in scores.items()} == {
            "Held-out tasks of the run": 50.0,
            "HumanEval": 20.1,
            "AIME 24": 3.3,
        }
        assert (scores["HumanEval"].dataset_revision, scores["HumanEval"].metric_type) == ("sha256:abc", "pass@1")
        assert scores["HumanEval"].dataset_args == {"questions": 164, "how": command}
        assert "| HumanEval | 20.1 ± 6.1 | 18.9 | 164 | sha256:abc | `python recipes/evaluate.py me/scored" in card
        assert "| AIME 24 | 3.3 | 0.0 | 30 | as of 2026-11-24 | `python recipes/evaluate.py me/scored" in card
        assert "| Held-out tasks of the run | 50.0 | 25.0 | 12 | 0123 | `trainer.evaluate()` with `eval_att" in card

    @pytest.mark.parametrize("by", ["step", "weights"])
    def test_figures_of_other_weights_are_neither_pushed_nor_left(self, hub, finished, tmp_path, by):
        """A second `train()` may end at the step of the first."""
        run = measured(finished, tmp_path)
        best = next(each for each in read_population(run)["members"] if each["held_out"])
        weights = {best["name"]: digest_weights(run / best["adapter"])}
        state = json.loads((run / "evaluation.json").read_text()) | {"weights": weights}
        (run / "evaluation.json").write_text(json.dumps(state))
        push_run(run, "me/stale")
        assert b"HumanEval" in hub.repos["me/stale"]["README.md"]
        hub.repos["me/stale"][".eval_results/somebody.yaml"] = b"[]"
        other = {"step": 1} if by == "step" else {"weights": dict.fromkeys(weights, "0")}
        (run / "evaluation.json").write_text(json.dumps(state | other))
        push_run(run, "me/stale")
        found = [name for name in hub.repos["me/stale"] if name.startswith(".eval_results/")]
        assert found == [".eval_results/somebody.yaml"]
        assert b"HumanEval" not in hub.repos["me/stale"]["README.md"]

    @pytest.mark.usefixtures("two_plots")
    def test_figures_of_earlier_weights_are_taken_off_by_the_trainers_own_push(self, hub, finished):
        finished.args.hub_model_id, finished.hub_model_id = "me/ended", None
        names = [".eval_results/populora_humaneval.yaml", ".eval_results/somebody.yaml"]
        hub.repos["me/ended"] = dict.fromkeys(names, b"[]")
        finished.push_to_hub()
        found = [name for name in hub.repos["me/ended"] if name.startswith(".eval_results/")]
        assert found == [".eval_results/somebody.yaml"]

    def test_what_a_checkpoint_keeps_for_resuming_stays_at_home(self, hub, finished, tmp_path):
        checkpoint = tmp_path / "checkpoint-3"
        shutil.copytree(finished.args.output_dir, checkpoint)
        for name in ("optimizer.pt", "rng_state_0.pth", "game.json", "global_step3/rank_0.pt"):
            (checkpoint / name).parent.mkdir(exist_ok=True)
            (checkpoint / name).write_bytes(b"state")
        push_run(checkpoint, "me/checkpoint")
        files = set(hub.repos["me/checkpoint"])
        assert "members/teacher_0/adapter_model.safetensors" in files
        assert not [name for name in files if name.startswith(("optimizer", "rng_state", "game", "global_"))]


class TestWhileTraining:
    @pytest.mark.parametrize(("strategy", "folder"), [("every_save", None), ("checkpoint", "last-checkpoint")])
    def test_every_save_is_pushed(self, hub, base, tmp_path, strategy, folder):
        settings = {
            "max_steps": 2,
            "save_steps": 1,
            "save_total_limit": 1,
            "push_to_hub": True,
            "hub_strategy": strategy,
        }
        settings |= {"hub_model_id": "me/live", "hub_always_push": True}
        trainer = make_trainer(base, str(tmp_path / "run"), settings)
        trainer.train()
        assert [message for message in hub.messages if "progress" in message] == [
            "Training in progress, step 1",
            "Training in progress, step 2",
        ]
        files = hub.repos["me/live"]
        assert b'src="plots/coverage.png"' in files["README.md"]
        assert files["plots/coverage.png"].startswith(b"\x89PNG")
        assert json.loads(files["population.json"])["step"] == 2
        assert {"adapter_model.safetensors", "members/teacher_0/adapter_model.safetensors", "metrics.jsonl"} <= set(
            files
        )
        assert ("last-checkpoint/optimizer.pt" in files) == (folder is not None)
        assert "optimizer.pt" not in files
        assert not Path(trainer.args.output_dir, "_push").exists(), "staged copies are gone"

    def test_a_stage_leaves_its_checkpoint_alone(self, finished, tmp_path):
        """They share files: what is written over one of them is written into the checkpoint."""
        checkpoint = tmp_path / "checkpoint-3"
        shutil.copytree(finished.args.output_dir, checkpoint)
        shutil.copy(checkpoint / "metrics.jsonl", tmp_path)
        (tmp_path / "lineage.jsonl").write_text("the run goes on\n")
        before = contents(checkpoint)
        (tmp_path / "README.md").write_text("a card that the user has edited\n")
        stage = make_stage(tmp_path, checkpoint, "every_save")
        assert contents(checkpoint) == before
        assert (stage / "README.md").read_text() == "a card that the user has edited\n"
        assert (stage / "lineage.jsonl").samefile(checkpoint / "lineage.jsonl")

    @pytest.mark.usefixtures("two_plots")
    def test_the_newest_checkpoint_is_uploaded_last(self, hub, finished, tmp_path):
        run = tmp_path / "run"
        huggingface_hub.HfApi().create_repo("me/ordered")
        uploads = Uploads(PopuLoRAConfig(str(run), hub_strategy="every_save", hub_always_push=True))
        hub.delays = [1.0]
        for step in (1, 2):
            checkpoint = run / f"checkpoint-{step}"
            shutil.copytree(finished.args.output_dir, checkpoint)
            (checkpoint / "step.txt").write_text(str(step))
            assert uploads.are_due
            uploads.start(checkpoint, "me/ordered", step)
        uploads.finish("me/ordered")
        assert hub.messages == [f"Training in progress, step {step}" for step in (1, 2)]
        assert hub.repos["me/ordered"]["step.txt"] == b"2"

    @pytest.mark.usefixtures("two_plots")
    def test_a_failed_push_does_not_stop_training_but_is_told(self, hub, base, tmp_path, caplog):
        settings = {"max_steps": 2, "save_steps": 1, "push_to_hub": True, "hub_model_id": "me/broken"}
        trainer = make_trainer(base, str(tmp_path / "run"), settings)
        hub.dies_at = "commit"
        trainer.train()
        assert "to me/broken at http://127.0.0.1" in caplog.text
        assert "completes the upload" in caplog.text
        assert trainer.state.global_step == 2


@pytest.mark.usefixtures("two_plots")
class TestFailures:
    @pytest.mark.parametrize(
        ("token", "dies_at", "complaint"),
        [
            ("", None, "the token is missing or not valid; run `hf auth login`"),
            ("hf_unknown", None, "the token is missing or not valid"),
            ("hf_reader", None, "the token may not write to me/failing"),
            ("hf_writer", "commit", "the connection failed"),
        ],
    )
    def test_says_why_and_a_second_push_completes(self, hub, finished, monkeypatch, token, dies_at, complaint):
        before = contents(finished.args.output_dir)
        monkeypatch.setenv("HF_TOKEN", token)
        hub.dies_at = dies_at
        finished.args.hub_model_id, finished.hub_model_id = "me/failing", None
        with pytest.raises(RuntimeError, match=complaint) as caught:
            finished.push_to_hub()
        assert f"`populora push {finished.args.output_dir} --repo me/failing` completes the upload" in str(
            caught.value
        )
        after = contents(finished.args.output_dir)
        assert all(after[path] == digest for path, digest in before.items()), "local files are intact"

        monkeypatch.setenv("HF_TOKEN", "hf_writer")
        hub.dies_at = None
        push_run(finished.args.output_dir, "me/failing")
        pushed = {str(Path(finished.args.output_dir, name)) for name in hub.repos["me/failing"]}
        assert {path for path in before if not Path(path).name.startswith("_")} <= pushed

    def test_a_run_that_was_killed(self, finished, tmp_path):
        shutil.copy(Path(finished.args.output_dir, "population.json"), tmp_path)
        with pytest.raises(ValueError, match="was not saved to its end; use a checkpoint of it, or resume it"):
            push_run(tmp_path, "me/killed")

    def test_a_population_that_is_not_there(self, hub, base, tmp_path):
        with pytest.raises(ValueError, match="'me/nothing' is no directory, and nothing could be downloaded"):
            make_trainer(base, str(tmp_path), {"warm_start": "me/nothing"})

    def test_a_population_on_another_base(self, hub, finished, base, tmp_path):
        path = tmp_path / "saved"
        path.mkdir()
        state = json.loads(Path(finished.args.output_dir, "population.json").read_text())
        state["base_config"]["num_hidden_layers"] = 28
        (path / "population.json").write_text(json.dumps(state))
        with pytest.raises(ValueError, match=r"population.json: field `base_config.num_hidden_layers` is 28"):
            make_trainer(base, str(tmp_path / "run"), {"warm_start": str(path)})


OPEN_DATASET = """
from datasets import load_dataset
from trl_populora.tasks.dataset import read_tasks
from trl_populora.tasks.archive import TaskArchive

table = load_dataset("me/tasks", split="train")
archive = TaskArchive.from_dataset(read_tasks("me/tasks"))
print("rows", len(table), "tasks", len(archive), "rated", sum(rate is not None for rate in table["solve_rate"]))
"""


@pytest.mark.slow
def test_the_command_pushes_population_and_archive_to_hf_endpoint(finished, tmp_path):
    server = HubServer()
    environment = {
        "HF_ENDPOINT": server.url,
        "HF_TOKEN": "hf_writer",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=without_extras() | environment | {"HF_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    path, repos = finished.args.output_dir, ["--repo", "me/command", "--archive_repo", "me/tasks"]
    said = run("-m", "trl_populora", "push", path, *repos)
    assert "me/command/commit/" in said
    assert "datasets/me/tasks/commit/" in said
    assert "population.json" in server.repos["me/command"]
    assert server.repos["datasets/me/tasks"].keys() == {"archive.parquet", "README.md"}

    archive = list(finished.archive.entries())
    rated = sum(note is not None and note.get("solve_rate") is not None for _, _, note in archive)
    assert rated
    assert f"rows {len(archive)} tasks {len(archive)} rated {rated}" in run("-c", OPEN_DATASET)
    server.shutdown()


@pytest.mark.parametrize(
    ("tasks", "category"),
    [(0, "n<1K"), (999, "n<1K"), (1_000, "1K<n<10K"), (9_999_999, "1M<n<10M"), (10_000_000, "10M<n<100M")],
)
def test_the_size_of_an_archive_has_the_hubs_name(tasks, category):
    assert _name_size(tasks) == category


class TestArchive:
    def test_the_card_tells_what_it_holds(self, hub, finished):
        push_archive(finished.args.output_dir, "me/archive")
        card = hub.repos["datasets/me/archive"]["README.md"].decode()
        metadata = huggingface_hub.DatasetCard(card).data
        files = [{"split": "train", "path": "archive.parquet"}]
        assert metadata.configs == [{"config_name": "default", "data_files": files, "default": True}]
        assert metadata.size_categories == ["n<1K"]
        assert 'load_dataset("me/archive", split="train")' in card
        assert f"{len(finished.archive)} verified tasks" in card
        assert "| code_f | 4 |" in card

    def test_the_viewer_is_told_every_column_and_none_is_nested_in_another(self, hub, finished, tmp_path):
        push_archive(finished.args.output_dir, "me/archive")
        info = huggingface_hub.DatasetCard(hub.repos["datasets/me/archive"]["README.md"].decode()).data.dataset_info
        file = tmp_path / "archive.parquet"
        file.write_bytes(hub.repos["datasets/me/archive"]["archive.parquet"])
        found = load_dataset("parquet", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
        assert Features._from_yaml_list(info["features"]) == found.features
        kinds = {type(feature) for feature in found.features.values()}
        assert kinds == {Value, List}
        assert {each.feature.dtype for each in found.features.values() if isinstance(each, List)} == {"string"}
        assert info["splits"][0]["num_examples"] == len(found) == len(finished.archive)
        assert info["download_size"] == file.stat().st_size

    def test_a_failed_push_says_how_to_complete_it(self, hub, finished, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", "hf_reader")
        with pytest.raises(RuntimeError, match="may not write to me/archive.*--archive_repo me/archive` completes"):
            push_archive(finished.args.output_dir, "me/archive")

    def test_a_run_without_an_archive(self, hub, finished, tmp_path):
        shutil.copy(Path(finished.args.output_dir, "population.json"), tmp_path)
        with pytest.raises(ValueError, match=r"archive.parquet cannot be read"):
            push_archive(tmp_path, "me/archive")


class TestSpace:
    def test_is_the_report_as_a_static_page_that_links_to_the_population(self, hub, finished):
        run = finished.args.output_dir
        assert "spaces/me/report/commit/" in push_space(run, "me/report", model="me/population")
        files = hub.repos["spaces/me/report"]
        assert hub.asked["spaces/me/report"]["sdk"] == "static"
        assert files.keys() == {"README.md", "index.html"}
        card = huggingface_hub.SpaceCard(files["README.md"].decode()).data
        assert (card.sdk, card.app_file, card.models) == ("static", "index.html", ["me/population"])
        page = files["index.html"].decode()
        assert "<title>report: PopuLoRA report</title>" in page
        assert "data:image/png" in page
        assert "href=" not in page, "rollouts are not beside it"

    def test_a_failed_push_says_how_to_complete_it(self, hub, finished, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", "hf_reader")
        with pytest.raises(RuntimeError, match="may not write to me/report.*--space me/report` completes"):
            push_space(finished.args.output_dir, "me/report")
