"""The cold start: documents in a run's own prompts, an adapter trained on them, a population that starts from it."""

from __future__ import annotations

import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import load_peft_weights
from transformers import AutoTokenizer, TrainerCallback

from tests.launching import launch, run_script
from tests.recipe_runs import save_qwen
from tests.small_run import small_trainer
from trl_populora.assets import tiny_base_path
from trl_populora.config import PopuLoRAConfig
from trl_populora.evaluate.held_out import HeldOut
from trl_populora.lora.members import adds_nothing, read_member
from trl_populora.sandbox import Sandbox
from trl_populora.start import make_kinds
from trl_populora.step.microbatch import score_labels_alone
from trl_populora.step.referee import Referee
from trl_populora.tasks import TaskArchive
from trl_populora.tasks.dataset import load_built_in_tasks
from trl_populora.tasks.python.reading import has_thinking


sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import cold_start  # noqa: E402
import ordinary_documents  # noqa: E402
from cold_documents import DocumentWriter  # noqa: E402


SEEDS = Path(cold_start.__file__).with_name("arithmetic_seeds.jsonl")
KINDS = ["code_o", "code_i", "code_f"]


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=1) as one:
        yield one


def make_writer(sandbox, style: str, held_out=(), kinds=KINDS, longest: int = 2000) -> DocumentWriter:
    count = 6 if style == "compact" else 10  # as the built-in code_f tasks have
    args = PopuLoRAConfig("unused", task_kinds=kinds, prompt_style=style, inputs_per_function=count)
    archive = TaskArchive()
    for task in load_built_in_tasks(style):
        archive.add(task)
    referee = Referee(make_kinds(args), sandbox, style, held_out=held_out, shots=0 if style == "compact" else 2)
    return DocumentWriter(referee, archive, 2, lambda answer: len(answer) <= longest, random.Random(0))


@pytest.mark.parametrize("style", ["compact", "turns", "chat"])
def test_all_roles_and_kinds_are_shown_in_the_runs_prompts_and_half_of_the_answers_worked(style, sandbox):
    writer = make_writer(sandbox, style)
    documents = writer.write(60, worked=0.5, further=12)
    counts = {name: sum(each.name == name for each in documents) for name in {each.name for each in documents}}
    assert counts == {f"propose {kind}": 8 for kind in KINDS} | {f"solve {kind}": 12 for kind in KINDS}
    worked = [each.name for each in documents if has_thinking(each.answer)]
    assert sorted(worked) == ["solve code_i"] * 6 + ["solve code_o"] * 6
    assert all(each.prompt[-1]["role"] == "user" for each in documents)
    if style == "turns":
        assert {len(each.prompt) for each in documents} == {5}, "two references, or two solved tasks, as turns before"
    posed = {json.dumps(writer.referee.solving_prompt(task)): task for task in writer.archive}
    known = [(posed[text], each.answer) for each in documents if (text := json.dumps(each.prompt)) in posed]
    assert len(known) > 12
    assert all(grade.right for grade in writer.referee.grade(*zip(*known, strict=True)))


def test_a_proposal_is_no_repetition_of_its_references(sandbox):
    documents = make_writer(sandbox, "turns", kinds=["code_o", "code_i"]).write(100, worked=0, further=0)
    proposals = [each for each in documents if each.name.startswith("propose")]
    assert len(proposals) == 40
    assert all(each.answer not in [turn["content"] for turn in each.prompt] for each in proposals)


def test_simple_tasks_are_proposed_beside_those_of_the_run(sandbox):
    def new(further: int) -> float:
        writer = make_writer(sandbox, "turns", kinds=["code_o", "code_i"])
        known = {kind.write_proposal(task) for kind in writer.referee.kinds.values() for task in writer.archive}
        documents = writer.write(100, worked=0, further=further)
        proposals = [each.answer for each in documents if each.name.startswith("propose")]
        return sum(text not in known for text in proposals) / len(proposals)

    assert new(0) == 0
    assert 0.2 < new(400) < 0.8


def test_an_input_that_misses_is_often_tried_before_the_one_that_is_right(sandbox):
    documents = make_writer(sandbox, "turns", kinds=["code_o", "code_i"]).write(300, worked=1, further=200)
    tries = {
        kind: [each.answer.count("\ntry ") for each in documents if each.name == f"solve {kind}"] for kind in KINDS
    }
    assert set(tries["code_o"]) == {0}
    assert set(tries["code_i"]) == {1, 2}
    assert 0.3 < tries["code_i"].count(2) / len(tries["code_i"]) < 0.6
    missed = [re.findall(r"^try (.*)\n(?:(?!try).*\n)*?return .*, not ", each.answer, re.M) for each in documents]
    assert sum(map(len, missed)) > 10
    given = [re.search(r"```input\n(.*)\n```$", each.answer) for each in documents]
    assert all(text != found[1] for texts, found in zip(missed, given, strict=True) for text in texts)


def test_what_a_completion_has_no_room_for_is_not_shown(sandbox):
    documents = make_writer(sandbox, "turns", longest=150).write(60, worked=0.5, further=12)
    assert documents
    assert max(len(each.answer) for each in documents) <= 150


def test_held_out_tasks_are_not_shown(sandbox):
    """As the trainer tells them, by program and inputs, whatever the kind."""
    simple = make_writer(sandbox, "compact").simple_tasks(60)
    held_out = HeldOut({"": [replace(task, kind="code_o") for task in simple[::2]]}, 1, None, 0)
    questions = {make_writer(sandbox, "compact").referee.solving_prompt(t)[-1]["content"] for t in simple[::2]}

    def asked(*settings) -> set[str]:
        documents = make_writer(sandbox, "compact", *settings).write(300, worked=0.5, further=60)
        return {each.prompt[-1]["content"] for each in documents} & questions

    assert len(asked()) > 10
    assert asked(held_out) == set()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> str:
    return save_qwen(tmp_path_factory.mktemp("qwen"))


def arguments_of(directory: Path, **options) -> list[str]:
    """A cold start of two steps of the embedded base."""
    settings = {
        "output_dir": directory / "run",
        "warm_start": directory / "cold",
        "documents": 16,
        "further_tasks": 8,
        "task_kinds": KINDS,
        "inputs_per_function": 6,
        "references_per_proposal": 1,
        "lora_r": 4,
        "lora_alpha": 8,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_completion_length": 250,
        "sandbox_workers": 1,
        "disable_tqdm": True,
    }
    pairs = [(f"--{key}", value) for key, value in (settings | options).items() if value is not None]
    return [str(text) for key, value in pairs for text in (key, *(value if isinstance(value, list) else [value]))]


@pytest.mark.parametrize("base", ["tiny", "qwen"])
def test_a_population_starts_from_the_adapter_in_both_roles(base, qwen, tmp_path):
    """Of the embedded base in its prompts, and of another in turns, whose tokens spell Python letter by letter."""
    name = qwen if base == "qwen" else "tiny"
    played = {"task_kinds": ["code_o", "code_i"], "max_completion_length": 600, "instructions": 0}
    played = played if base == "qwen" else {}
    cold_start.main(arguments_of(tmp_path, model_name_or_path=name, **played))
    adapter = load_peft_weights(str(tmp_path / "cold"), device="cpu")
    assert any(value.abs().max() > 0 for key, value in adapter.items() if ".lora_B." in key), "two steps were taken"
    trainer = small_trainer(
        name,
        output_dir=str(tmp_path / "run"),
        warm_start=str(tmp_path / "cold"),
        prompt_style=None,
        task_kinds=["code_o", "code_i"],
        shots=0,
        max_steps=1,
    )
    for member in trainer.population.names:
        assert not adds_nothing(trainer.model, member)
        held = read_member(trainer.model, member)
        assert (
            held.keys() == {key.removeprefix("base_model.model.") for key in adapter} or held.keys() == adapter.keys()
        )
        for key, value in held.items():
            torch.testing.assert_close(value, adapter[key])
    trainer.train()
    assert trainer.state.global_step == 1


def test_ordinary_instructions_are_shown_with_the_bases_own_greedy_answers(qwen, tmp_path, capsys, monkeypatch):
    """A random base goes on after most instructions, and then the instruction is left out."""
    monkeypatch.setattr(ordinary_documents, "LONGEST", 48)
    played = {"task_kinds": ["code_o"], "max_completion_length": 600, "documents": 40, "instructions": 0.9}
    trainer = cold_start.prepare(*cold_start.parse(arguments_of(tmp_path, model_name_or_path=qwen, **played)))
    known = set(ordinary_documents.read_instructions())
    shown = [row for row in trainer.train_dataset if row["prompt"][-1]["content"] in known]
    assert 0 < len(shown) < 36
    assert f"{len(shown)} ordinary" in capsys.readouterr().out
    assert len(trainer.train_dataset) > len(shown), "tasks take the places of what was left out"
    tokenizer, ends = trainer.processing_class, trainer.model.generation_config.eos_token_id
    for row in shown[:2]:
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_tensors="pt")[
            "input_ids"
        ]
        with trainer.model.disable_adapter():
            answer = trainer.model.generate(ids, do_sample=False, max_new_tokens=ordinary_documents.LONGEST)
        *answer, last = answer[0, ids.shape[1] :].tolist()
        assert last == ends
        assert row["completion"][0]["content"] == tokenizer.decode(answer) != ""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_that_share_out_the_weights_answer_and_learn(qwen, tmp_path):
    """ZeRO-3 has split the weights before the base answers, when no engine is there to gather them."""
    pytest.importorskip("deepspeed", reason="needs the `deepspeed` extra")
    played = {"task_kinds": ["code_o"], "max_completion_length": 600, "documents": 40, "instructions": 0.5}
    words = arguments_of(tmp_path, model_name_or_path=qwen, **played)
    told = run_script([*launch("cpu_zero3.yaml"), cold_start.__file__, *words], tmp_path / "log")
    (count,) = {int(count) for count in re.findall(r"(\d+) ordinary", told)}
    assert 0 < count <= 20
    adapter = load_peft_weights(str(tmp_path / "cold"), device="cpu")
    assert any(value.abs().max() > 0 for key, value in adapter.items() if ".lora_B." in key)


def test_the_assistants_last_turn_alone_is_learned(qwen, tmp_path):
    options = {"model_name_or_path": qwen, "task_kinds": ["code_o"], "max_completion_length": 600, "instructions": 0}
    trainer = cold_start.prepare(*cold_start.parse(arguments_of(tmp_path, **options)))
    tokenizer = AutoTokenizer.from_pretrained(tiny_base_path())
    batch = trainer.data_collator([trainer.train_dataset[0]])
    learned = tokenizer.decode(batch["input_ids"][batch["labels"] != -100])
    document = tokenizer.decode(batch["input_ids"][0])
    assert document.count("assistant\n") > 1, "references or solved tasks are turns of the assistant, too"
    answer = document.rpartition("assistant\n")[2]
    assert learned.strip() == answer.strip()
    assert learned.rstrip().endswith(tokenizer.eos_token), "where to stop is learned"


@pytest.mark.parametrize(
    ("device", "rows", "together"), [("cpu", 32, 1), ("cuda", 32, 8), ("cuda", 6, 4), ("cuda", 1, 1)]
)
def test_on_a_gpu_as_many_documents_go_together_as_rows_of_the_run_fit(device, rows, together):
    args = SimpleNamespace(device=torch.device(device), per_device_train_batch_size=rows)
    assert cold_start.choose_together(8, args) == together


class Watch(TrainerCallback):
    """Keeps the gradient of each step, what was logged, and how many documents went through the model together."""

    def __init__(self):
        self.gradients, self.logs, self.rows = [], [], []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, model, positional, given):
        self.rows.append(len(given["input_ids"]))

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad})

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append({key: logs[key] for key in ("loss", "grad_norm") if key in logs})


def test_documents_that_go_together_give_the_same_loss_gradient_and_adapter(tmp_path, monkeypatch):
    watched = []
    for together in (1, 4):
        monkeypatch.setattr(cold_start, "choose_together", lambda documents, args, together=together: together)
        words = arguments_of(tmp_path / str(together), documents_per_step=8)
        trainer = cold_start.prepare(*cold_start.parse(words))
        assert trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps == 8
        trainer.args.logging_steps = 1
        trainer.add_callback(watch := Watch())
        with score_labels_alone():
            trainer.train()
        assert watch.rows[: 8 // together] == [together] * (8 // together), "the documents of the first step"
        trained = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
        watched.append((watch, trained))
    (alone, weights), *others = watched
    assert len(alone.gradients) == 2
    for together, theirs in others:
        torch.testing.assert_close(together.gradients[0], alone.gradients[0], rtol=1e-3, atol=1e-6)
        for mine, yours in zip(alone.logs, together.logs, strict=True):
            assert yours == pytest.approx(mine, rel=1e-3)
        torch.testing.assert_close(theirs, weights, rtol=1e-2, atol=1e-4)


class Interrupt(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        control.should_training_stop = True


@pytest.mark.slow
def test_an_interrupted_cold_start_goes_on_to_the_same_adapter(tmp_path):
    settings = {"documents": 24, "documents_per_step": 1}
    cold_start.main(arguments_of(tmp_path / "whole", **settings))
    begun = cold_start.prepare(*cold_start.parse(arguments_of(tmp_path / "parts", **settings)))
    begun.add_callback(Interrupt())
    begun.train()
    assert begun.state.global_step == 20 < begun.state.max_steps
    again = arguments_of(tmp_path / "parts", **settings)
    with pytest.raises(SystemExit, match="`resume=.*checkpoint-7`: there is no such checkpoint"):
        cold_start.main([*again, "--resume", str(tmp_path / "checkpoint-7")])  # a named one is not the newest
    cold_start.main([*again, "--resume", "true"])
    whole, parts = (load_peft_weights(str(tmp_path / each / "cold"), device="cpu") for each in ("whole", "parts"))
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warm_start": None}, "`warm_start` names the directory that gets the adapter of all members, got None"),
        ({"warm_start": '{"student": "sft"}'}, "`warm_start` names the directory"),
        ({"instructions": 1.0}, "`instructions` is a share, from 0 to below 1, got 1.0"),
        ({"worked": 1.5}, "`worked` is a share, between 0 and 1, got 1.5"),
        ({"max_completion_length": 8}, "No document can be written for .*propose code_o"),
        (
            {"task_kinds": ["arithmetic_kind:Arithmetic"], "seed_tasks": SEEDS},
            "`task_kinds` names arithmetic, and documents",
        ),
        ({"model_name_or_path": "no/such/model"}, "no/such/model"),
        ({"per_device_train_batch_size": 999}, "One population step has .* rows"),
        # A dataset run could have this one: no option says that it is a game.
        (
            {"per_device_train_batch_size": 64, "task_kinds": None, "inputs_per_function": None}
            | {"references_per_proposal": None, "sandbox_workers": None},
            "One population step has .* rows",
        ),
    ],
)
def test_what_cannot_be_used_is_said_in_a_line(options, message, tmp_path):
    with pytest.raises(SystemExit, match=f"(?s)^cold_start.py: .*{message}"):
        cold_start.main(arguments_of(tmp_path, **options))


def test_an_adapter_that_is_there_is_not_replaced(tmp_path):
    (tmp_path / "cold").mkdir()
    (tmp_path / "cold" / "adapter_config.json").write_text("{}")
    with pytest.raises(SystemExit, match="holds an adapter already"):
        cold_start.main(arguments_of(tmp_path))
