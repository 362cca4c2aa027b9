"""What a user of a dataset run sees, from TRL's script or a YAML file to table, report and card."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from datasets import Dataset
from transformers import TrainerState
from trl import GRPOConfig, TrlParser

from tests import glossary
from tests.glossary import table
from tests.launching import launch, run_script
from tests.populora_run import ON_PROMPTS, assert_files_equal
from tests.prompt_runs import QUESTIONS, SETTINGS, Judge
from tests.recipe_runs import PROMPTS, ROOT
from tests.small_run import QUIET, small_lora
from trl_populora import PopuLoRATrainer, cli
from trl_populora.config import MemberConfig, PopuLoRAConfig
from trl_populora.hub.card import write_card
from trl_populora.report.load import load_run
from trl_populora.report.page import build_page, load_shown
from trl_populora.report.plots import PLOTS
from trl_populora.report.table import list_members, print_population, tell_best
from trl_populora.run.callbacks import STEPS, PromptAlarms, format_evaluation, format_step
from trl_populora.run.checkpoint import find_newest
from trl_populora.run.read import METRICS, TIMES, classify_log, list_idle, list_rewards, read_lines, read_population
from trl_populora.tasks.script import PromptArguments, find_reward_functions, read_prompts


QUICK_START = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

dataset = Dataset.from_dict({{"prompt": ["The sky is", "The sun is"], "color": ["blue", "yellow"]}})


def has_letters(completions, color, **kwargs):
    return [float(sum(letter in word for letter in text)) for text, word in zip(completions, color)]


training_args = GRPOConfig({directory!r}, use_cpu=True, bf16=False{small})
trainer = GRPOTrainer(model={base!r}, reward_funcs=has_letters, args=training_args, train_dataset=dataset)
trainer.train()
"""
# What only makes it short; every option is TRL's.
SMALL = ", max_steps=2, num_generations=2, per_device_train_batch_size=2, max_completion_length=8, report_to='none'"

REWARDS = """
import os
import signal


def brief(completions, **columns):
    return [-len(text) / 100 for text in completions]


def vowels(completions, answer, **columns):
    return [sum(letter in "aeiou" for letter in text) / 10 for text in completions]


def end(completions, trainer_state, **columns):
    how, _, step = os.environ.get("END_BY", "").partition(" ")
    if step == str(trainer_state.global_step) and os.environ["RANK"] == {"SIGTERM": "0", "SIGKILL": "1"}[how]:
        os.kill(os.getppid() if how == "SIGTERM" else os.getpid(), getattr(signal, how))
    return [0.0] * len(completions)
"""
GAME_WORDS = ("teacher", "sandbox", "archive", "held out", "held-out", "task kinds", "proposal")


def test_trls_quick_start_runs_with_the_class_swapped_and_nothing_else(random_base, tmp_path):
    text = QUICK_START.format(directory=str(tmp_path / "run"), base=random_base, small=SMALL)
    ours = text.replace("GRPOConfig, GRPOTrainer", "GRPOConfig\nfrom trl_populora import PopuLoRATrainer")
    names: dict = {}
    exec(ours.replace("GRPOTrainer(", "PopuLoRATrainer("), names)
    trainer = names["trainer"]
    assert trainer.state.global_step == 2
    assert trainer.population.names == [f"student_{place}" for place in range(4)]
    assert all(len(entry) for entry in read_lines(tmp_path / "run" / METRICS))


def write_yaml(directory: Path, base: str, **settings) -> str:
    """A TRL config with a dataset in two files and rewards of both forms, in a directory."""
    (directory / "data").mkdir()
    for split, numbers in (("train", range(8)), ("test", range(3))):
        rows = [json.dumps({"prompt": f"What is {n} + {n}?", "answer": str(2 * n)}) + "\n" for n in numbers]
        (directory / "data" / f"{split}.jsonl").write_text("".join(rows))
    (directory / "rewards_of_mine.py").write_text(REWARDS)
    config = {
        "model_name_or_path": base,
        "dtype": "float32",
        "lora_r": 4,
        "dataset_name": "data",
        "reward_funcs": ["rewards_of_mine.brief", "rewards_of_mine:vowels"],
        "output_dir": "run",
        "num_generations": 2,
        "num_iterations": 2,
        "beta": 0.04,
        "per_device_train_batch_size": 2,
        "max_completion_length": 8,
        "logging_steps": 1,
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "num_generations_eval": 1,
        "students": 3,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
    }
    (directory / "grpo.yaml").write_text(yaml.safe_dump(config | settings))
    return str(directory / "grpo.yaml")


@pytest.fixture(scope="module")
def run(random_base, tmp_path_factory):
    """A run by `populora train` from a YAML file."""
    directory = tmp_path_factory.mktemp("cli")
    before = Path.cwd()
    os.chdir(directory)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(directory))
            cli.train(["--config", write_yaml(directory, random_base)])
    finally:
        os.chdir(before)
    return directory / "run"


def test_a_run_that_logs_no_step_ends_well_and_says_so(random_base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    one = {"max_steps": 1, "num_iterations": 1, "logging_strategy": "no", "eval_steps": 1, "students": 2}
    cli.train(["--config", write_yaml(tmp_path, random_base, reward_funcs="rewards_of_mine:brief", **one)])
    assert "There is no picture: no step was logged (`logging_strategy=no`)." in capsys.readouterr().out
    assert [classify_log(entry) for entry in read_lines(tmp_path / "run" / METRICS)] == ["evaluation"]
    assert (tmp_path / "run" / "members" / "student_1" / "adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_that_end_early_go_on_as_if_they_had_not(random_base, tmp_path, monkeypatch):
    """The launcher gets SIGTERM in the third step, and in the fifth a process is killed."""
    settings = {
        "dataset_name": str(tmp_path / "data"),
        "reward_funcs": ["rewards_of_mine.brief", "rewards_of_mine.end"],
    }
    settings |= {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "evolve_every": 2, "evolve_burn_in": 1}
    config = write_yaml(tmp_path, random_base, eval_strategy="no", **settings)
    monkeypatch.syspath_prepend(str(tmp_path))
    script = [str(ROOT / "recipes/train_populora.py"), "--config", config, "--resume", "true", "--output_dir"]

    def run(run: str, end: str = "") -> str:
        monkeypatch.setenv("END_BY", end)
        command = [*launch("cpu_ddp.yaml"), *script, str(tmp_path / run)]
        return run_script(command, tmp_path / f"{run} {end}", fails=bool(end))

    run("unbroken")
    assert "checkpoint-3 is whole: `--resume`" in run("ended", "SIGTERM 2")
    run("ended", "SIGKILL 4")
    assert find_newest(str(tmp_path / "ended")) == str(tmp_path / "ended" / "checkpoint-4")
    run("ended")
    assert_files_equal(tmp_path / "unbroken", tmp_path / "ended")


def visible(page: str) -> str:
    shown = re.sub(r"<style>.*?</style>|src=\"[^\"]*\"|<details id=\"settings\".*?</details>", "", page, flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", shown))


class TestRun:
    def test_every_key_is_explained_and_every_row_of_the_page_is_there(self, run):
        entries = [*read_lines(run / METRICS), *read_lines(run / TIMES)]
        keys = {key for entry in entries for key in entry}
        # An evaluation has TRL's metrics of training under their names.
        inherited = {f"eval/{key}" for key in keys if not key.startswith("member/")} - {"eval/reward"}
        found = glossary.explained(keys - inherited)
        assert set(glossary.PROMPTS) <= found
        assert not any(re.search("teacher|propose|solve|verify", key) for entry in entries for key in entry)

    def test_rollouts_have_the_columns_of_the_page(self, run):
        page = [
            (cells[0].strip("`"), cells[1])
            for cells in table((ROOT / "docs" / "files.md").read_text(), "Rollouts of a dataset run")
        ]
        for path in run.glob("rollouts/*.parquet"):
            columns = [(field.name, str(field.type)) for field in pq.read_schema(path)]
            functions = [("rewards/{function}", "double")]
            assert [each for each in columns if not each[0].startswith("rewards/")] == [
                each for each in page if each not in functions
            ]
            assert [name for name, _ in columns if name.startswith("rewards/")] == ["rewards/brief", "rewards/vowels"]

    def test_rollouts_of_a_step_have_the_rows_of_all_its_generations(self, random_base, tmp_path):
        judge = Judge()
        options = {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "max_steps": 3, "students": 2}
        args = PopuLoRAConfig(str(tmp_path), **(SETTINGS | options))
        trainer = PopuLoRATrainer(random_base, [judge], args, QUESTIONS, peft_config=small_lora())
        trainer.train()
        assert len(judge.calls) == 6
        rows = [row for path in sorted(tmp_path.glob("rollouts/*.parquet")) for row in pq.read_table(path).to_pylist()]
        told = [(row["prompt"], row["completion"]) for row in rows]
        assert told == [
            pair for call in judge.calls for pair in zip(call["prompts"], call["completions"], strict=True)
        ]
        assert [row["step"] for row in rows] == [step for step in (1, 2, 3) for _ in range(16)]

    def test_the_table_compares_rewards_and_ratings(self, run, capsys):
        print_population(run)
        shown = capsys.readouterr().out
        assert all(word in shown for word in ("reward", "eval reward", "rating", "student_2"))
        assert not any(word in shown for word in GAME_WORDS)
        saved = read_population(run)
        assert saved["reward_functions"] == ["brief", "vowels"]
        assert saved["datasets"] == ["data"]
        (first, *_) = list_members(saved).roles["student"]
        assert first[0] == saved["best_student"]

    def test_the_table_shows_the_settings_that_differ(self, run):
        saved = read_population(run)
        for place, member in enumerate(saved["members"]):
            member["settings"] = {"learning_rate": 10.0**-place, "beta": 0.1}
        found = list_members(saved)
        assert found.header[:2] == ("member", "learning_rate")
        assert {cells[0]: cells[1] for cells in found.roles["student"]}["student_2"] == "0.01"

    def test_the_report_tells_of_members_and_of_nothing_else(self, run):
        page = (run / "report.html").read_text()
        text = visible(page).lower()
        assert [word for word in GAME_WORDS if word in text] == []
        for word in (
            "members: 3",
            "reward functions: brief, vowels",
            "rewards by member",
            "sample prompts",
            "what is",
        ):
            assert word in text
        drawn = {path.stem for path in run.glob("plots/*.png")}
        assert drawn == {plot.name for plot in PLOTS if "prompts" in plot.sorts} - {"lineage"}
        assert (run / "run.png").exists()

    def test_what_a_model_wrote_is_escaped(self, run):
        records = load_run(run)
        samples = load_shown(run, records)
        assert samples
        samples[0][0]["completion"] = "<script>alert(1)</script>"
        assert "<script" not in build_page(records, [], samples)

    def test_the_card_is_true(self, run, tmp_path):
        for name in ("population.json", METRICS):
            (tmp_path / name).write_bytes((run / name).read_bytes())
        write_card(tmp_path, "me/answers")
        card = (tmp_path / "README.md").read_text().partition("## Training")[0]
        assert [word for word in GAME_WORDS if word in card] == []
        for word in ("3 LoRA adapters", "`brief`, `vowels`", "dataset `data`", "same prompts", "train_dataset=..."):
            assert word in card

    def test_the_last_step_is_a_line(self, run):
        line = format_step(3, 4, load_run(run).history[2])
        reward = r"[+-]\d\.\d\d"
        members = r"student_\d(?:, student_\d)?"
        told = rf"reward {reward} \({members} {reward} \.\.\. {members} {reward}\) \| length \d+"
        seconds = r"s: generate \d+\.\d reward \d+\.\d update \d+\.\d"
        assert re.fullmatch(rf"step 3/4 \| {told} \| {seconds}", line)


def test_a_line_names_best_and_worst_of_each_table():
    logs = {
        "eval_reward": 0.44,
        "eval_easy_member/a/reward": 0.36,
        "eval_easy_member/b/reward": 0.52,
        "eval_easy_reward_best": 0.52,
        "eval_easy_reward_lead": 0.16,
        "eval_easy_reward_lead_margin": 0.041,
        "eval_easy_runtime": 4.0,
    }
    assert classify_log(logs) == "evaluation"
    (line,) = format_evaluation(20, 200, logs)
    assert line == "step  20/200 | eval easy: reward +0.44 (best b +0.52, worst a +0.36) | lead 0.16 ± 0.04 | s: 4.0"
    assert list_rewards(logs, "eval_easy_") == {"b": 0.52, "a": 0.36}


def test_lines_say_which_members_are_equal():
    logs = {"time/generate": 1.0, "reward": 0.4, "member/a/reward": 0.5, "member/b/reward": 0.1, "loss": 0.0}
    assert "reward +0.40 (a, c +0.50 ... b +0.10)" in format_step(1, 9, logs | {"member/c/reward": 0.5})
    more = {"member/c/reward": 0.1, "member/d/reward": 0.1}
    assert "reward +0.40 (a +0.50 ... 3 members +0.10)" in format_step(1, 9, logs | more)
    assert "reward +0.40 (all 2 members equal)" in format_step(1, 9, logs | {"member/b/reward": 0.5})
    evaluated = {"eval_reward": 0.3, "eval_member/a/reward": 0.5, "eval_member/b/reward": 0.1, "eval_runtime": 1.0}
    (line,) = format_evaluation(1, 9, evaluated | {"eval_member/c/reward": 0.1})
    assert "eval: reward +0.30 (best a +0.50, worst b, c +0.10)" in line
    (line,) = format_evaluation(1, 9, evaluated | {"eval_member/b/reward": 0.5})
    assert "eval: reward +0.30 (all 2 members equal)" in line


@pytest.mark.parametrize(
    ("figures", "by", "told"),
    [
        ([(0.1, 20.0), (0.5, 25.0)], "reward on eval_dataset", "Best by reward on eval_dataset: b."),
        (
            [(0.5, 20.0), (0.5, 25.0)],
            "rating among those with the highest reward on eval_dataset",
            "No single best by reward on eval_dataset: a, b are equal. b counts as the best, by rating.",
        ),
        (
            [(0.5, 25.0), (0.5, 25.0)],
            "rating among those with the highest reward on eval_dataset",
            "No single best by reward on eval_dataset: a, b are equal. "
            "a counts as the best, as the first of those with equal ratings.",
        ),
        (
            [(None, 25.0), (None, 25.0)],
            "rating",
            "No single best by rating: a, b are equal. "
            "a counts as the best, as the first of those with equal ratings.",
        ),
    ],
)
def test_the_table_says_who_is_best_by_what_and_who_is_equal(figures, by, told):
    members = [
        {"name": name, "role": "student", "reward": 0.0, "eval_reward": reward, "mu": mu, "sigma": 1.0}
        for name, (reward, mu) in zip("ab", figures, strict=True)
    ]
    best = "b" if figures[1] > figures[0] or figures[0][1] < figures[1][1] else "a"
    population = {"members": members, "best_student": best, "best_student_by": by}
    assert tell_best(population, saved=False) == told
    assert f"{best}, whose adapter lies at the root" in tell_best(population, True) or (
        f"The adapter at the root is that of {best}" in tell_best(population, True)
    )
    assert list_members(population).roles["student"][0][0] == best


def test_members_without_any_advantage_are_named_at_the_end(random_base, tmp_path, caplog):
    def pay(completion_ids, member, **columns):
        return [1.0 if name == "student_1" else sum(ids) % 7 for name, ids in zip(member, completion_ids, strict=True)]

    options = {name: value for name, value in ON_PROMPTS.items() if name != "on_prompts"}
    args = PopuLoRAConfig(str(tmp_path), **(options | {"evolve_every": 0, "max_steps": 2, "save_strategy": "no"}))
    trainer = PopuLoRATrainer(random_base, pay, args, QUESTIONS, peft_config=small_lora())
    trainer.train()
    (told,) = [each for each in caplog.messages if "did not learn" in each]
    assert told.startswith("student_1 did not learn: at each of their prompts all answers had the same reward")
    saved = trainer.describe()["members"]
    assert [each["learned"] for each in saved] == [name != "student_1" for name in trainer.population.names]


@pytest.mark.parametrize(
    "options",
    [
        # A random base ends no answer, so no token counts.
        {"beta": 0.04, "mask_truncated_completions": True, "per_device_train_batch_size": 1, "num_generations": 2}
        | {"gradient_accumulation_steps": 2},
        {"remove_unused_columns": True},
    ],
    ids=["all answers are cut off, and there is a KL term", "unused columns are removed"],
)
def test_what_trl_trains_is_trained(random_base, tmp_path, options):
    given = {name: value for name, value in ON_PROMPTS.items() if name != "on_prompts"}
    args = PopuLoRAConfig(
        str(tmp_path), **(given | {"evolve_every": 0, "max_steps": 2, "save_strategy": "no"} | options)
    )

    def pay(completion_ids, **columns):
        return [float(sum(ids) % 7) for ids in completion_ids]

    trainer = PopuLoRATrainer(random_base, pay, args, QUESTIONS, peft_config=small_lora())
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_newborn_without_any_advantage_is_named_after_ten_steps(random_base, tmp_path, caplog):
    def pay(completion_ids, trainer_state, **columns):
        return [1.0 if trainer_state.global_step > 1 else sum(ids) % 7 for ids in completion_ids]

    options = {name: value for name, value in ON_PROMPTS.items() if name != "on_prompts"}
    options |= {"evolve_every": 2, "evolve_burn_in": 0, "max_steps": 3, "save_strategy": "no"}
    trainer = PopuLoRATrainer(
        random_base, pay, PopuLoRAConfig(str(tmp_path), **options), QUESTIONS, peft_config=small_lora()
    )
    trainer.train()
    told = trainer.describe()
    (child,) = [member for member in told["members"] if member["learned"] is False]
    assert (child["version"], child["born"]) == (1, 2)
    assert "did not learn" not in caplog.text, "one generation may be bad luck"
    assert list_idle(told | {"step": 12}) == [f"{child['name']}@1"]


def parse(*options: str) -> tuple:
    parser = TrlParser((cli.TrainArguments, PopuLoRAConfig, MemberConfig, PromptArguments))
    return parser.parse_args_and_config([*options])


class TestOptions:
    def test_trls_rewards_go_by_trls_names(self):
        (*_, asked) = parse("--reward_funcs", "think_format_reward", "get_soft_overlong_punishment", "math.sqrt")
        found = find_reward_functions(asked)
        assert [each.__name__ for each in found] == [
            "think_format_reward",
            "soft_overlong_punishment_reward",
            "sqrt",
        ]

    def test_a_reward_model_comes_first(self):
        (*_, asked) = parse("--reward_model_name_or_path", "some/model", "--reward_funcs", "think_format_reward")
        assert find_reward_functions(asked)[0] == "some/model"

    @pytest.mark.parametrize("name", ["no_such_reward", "math.no_such", "no_such_module:f"])
    def test_an_unknown_reward_is_refused_with_all_names(self, name):
        (*_, asked) = parse("--reward_funcs", name)
        with pytest.raises(ValueError, match="accuracy_reward.*module:function"):
            find_reward_functions(asked)

    def test_a_mixture_is_trls(self, tmp_path):
        config = write_yaml(tmp_path, "tiny")
        part = {"path": "json", "data_files": str(tmp_path / "data" / "train.jsonl"), "columns": ["prompt"]}
        Path(config).write_text(yaml.safe_dump({"datasets": [part, part], "test_split_size": 0.25}))
        (*_, asked) = parse("--config", config)
        train, test = read_prompts(asked, evaluates=True)
        assert (len(train), len(test), train.column_names) == (12, 4, ["prompt"])

    @pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
    def test_a_file_makes_the_split_train(self, tmp_path, suffix):
        rows = Dataset.from_dict({"prompt": ["a", "b"]})
        path = str(tmp_path / f"prompts.{suffix}")
        rows.to_json(path) if suffix == "jsonl" else rows.to_parquet(path)
        train, test = read_prompts(PromptArguments(dataset_name=path), evaluates=False)
        assert (train["prompt"][:], test) == (["a", "b"], None)
        with pytest.raises(ValueError, match="`dataset_test_split=test`: the dataset has the splits train"):
            read_prompts(PromptArguments(dataset_name=path), evaluates=True)

    def test_a_dataset_without_prompts_is_refused_with_both_formats(self, tmp_path):
        Dataset.from_dict({"question": ["a"]}).to_json(path := str(tmp_path / "questions.jsonl"))
        with pytest.raises(ValueError, match="columns question. Prompts .* column `prompt`.*`program`"):
            read_prompts(PromptArguments(dataset_name=path), evaluates=False)

    @pytest.mark.parametrize("option", ["dataset_streaming", "streaming"])
    def test_streaming_is_refused(self, option):
        with pytest.raises(ValueError, match=f"`{option}=True` is not supported"):
            PromptArguments(**{option: True})

    def test_an_entry_with_an_unknown_key_is_refused_in_one_line(self):
        with pytest.raises(ValueError, match="`datasets` has an entry that cannot be read.*'file'"):
            PromptArguments(datasets=[{"path": "a", "file": "b"}])

    def test_tasks_and_prompts_at_once_are_refused(self, tmp_path):
        recipe, args, model, asked = parse("--dataset_name", "x", "--seed_tasks", "tasks.jsonl", "--use_cpu", "true")
        with pytest.raises(ValueError, match="`seed_tasks=tasks.jsonl`: these tasks are for the game"):
            cli.build_trainer(recipe, args, model, asked)

    def test_what_is_set_after_the_config_is_made_counts_in_a_dataset_run(self, tmp_path):
        args = PopuLoRAConfig(str(tmp_path), use_cpu=True, bf16=False)
        args.learning_rate, args.model_init_kwargs = 3e-4, {"dtype": "float32"}
        settled = args.for_prompts()
        assert (settled.learning_rate, settled.model_init_kwargs) == (3e-4, {"dtype": "float32"})
        assert settled.max_completion_length == GRPOConfig.max_completion_length

    def test_what_is_set_later_to_a_default_of_the_game_counts_in_a_dataset_run(self, tmp_path):
        args = PopuLoRAConfig(str(tmp_path), use_cpu=True, bf16=False)
        wanted = {name: getattr(args, name) for name in ("learning_rate", "max_steps", "logging_steps")}
        untouched = args.for_prompts()
        assert all(getattr(untouched, name) != value for name, value in wanted.items())
        for name, value in wanted.items():
            setattr(args, name, value)
        settled = args.for_prompts()
        assert {name: getattr(settled, name) for name in wanted} == wanted
        assert settled.max_completion_length == GRPOConfig.max_completion_length

    @pytest.mark.parametrize("name", PROMPTS)
    def test_a_recipe_is_whole(self, name, monkeypatch, tmp_path):
        monkeypatch.chdir(ROOT)
        monkeypatch.syspath_prepend(str(ROOT))
        _, args, _, asked = parse("--config", str(PROMPTS[name]), "--output_dir", str(tmp_path))
        train, test = read_prompts(asked, evaluates=True)
        (right,) = find_reward_functions(asked)
        good, bad = ([[{"content": text}]] * len(train) for text in ("```output\nnobody\n```", "nothing"))
        answers = [[{"content": f"```output\n{answer}\n```"}] for answer in train["answer"]]
        assert set(right(answers, answer=train["answer"])) == {1.0}
        assert set(right(good, answer=train["answer"])) == set(right(bad, answer=train["answer"])) == {-0.5}
        assert not {str(row) for row in train["prompt"]} & {str(row) for row in test["prompt"]}
        assert args.for_prompts().max_steps == 12

    @pytest.mark.slow
    @pytest.mark.parametrize("name", PROMPTS)
    def test_a_recipe_runs(self, name, monkeypatch, tmp_path, capsys):
        monkeypatch.chdir(ROOT)
        small = ("--max_steps", "2", "--logging_steps", "1", "--eval_steps", "2", "--max_completion_length", "32")
        cli.main(["train", "--config", str(PROMPTS[name]), "--output_dir", str(tmp_path), *small])
        assert "step 2/2 | reward" in capsys.readouterr().out
        assert [entry["step"] for entry in read_lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 2]


class TestAlarms:
    def play(self, logs: list[dict]) -> list[str]:
        alerts: list[str] = []
        alarms = PromptAlarms(["judge"], lambda *told: alerts.append(told[1]))
        state, args = TrainerState(max_steps=len(logs)), PopuLoRAConfig("unused", **QUIET).for_prompts()
        alarms.on_train_begin(args, state, None)
        for step, entry in enumerate(logs, 1):
            state.global_step = step
            alarms.on_log(args, state, None, logs=entry)
        return alerts

    WELL = {"time/generate": 1.0, "reward": 0.5, "rewards/judge/mean": 0.5, "frac_reward_zero_std": 0.5}

    def test_a_real_run_gives_both_alarms(self, random_base, tmp_path, caplog, monkeypatch):
        """One function pays everybody alike, and one judges nothing."""
        monkeypatch.setattr("trl_populora.run.callbacks.STEPS", 2)

        def alike(completions, **columns):
            return [1.0] * len(completions)

        def silent(completions, **columns):
            return [None] * len(completions)

        options = {name: value for name, value in ON_PROMPTS.items() if name != "on_prompts"}
        args = PopuLoRAConfig(str(tmp_path), **(options | {"evolve_every": 0, "max_steps": 2, "save_strategy": "no"}))
        PopuLoRATrainer(random_base, [alike, silent], args, QUESTIONS, peft_config=small_lora()).train()
        assert "so members do not learn" in caplog.text
        assert "'silent' gave no number" in caplog.text

    def test_equal_rewards_for_long_are_told_once(self, caplog):
        assert self.play([self.WELL] * 3 * STEPS) == []
        assert self.play([self.WELL | {"frac_reward_zero_std": 1.0}] * 3 * STEPS) == ["Members do not learn"]
        assert "the mean reward is 0.50" in caplog.text

    def test_a_function_that_judges_nothing_is_told_once(self, caplog):
        blank = {name: value for name, value in self.WELL.items() if name != "rewards/judge/mean"}
        assert self.play([blank] * 3 * STEPS) == ["A reward function judges nothing"]
        assert "'judge' gave no number" in caplog.text
