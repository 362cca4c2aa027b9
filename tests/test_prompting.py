"""How tasks are put to a base: styles, solved tasks before a student's own, and what a base cannot take."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tests.code_tasks import DOUBLE
from tests.models import CHATML, make_tokenizer, save_base
from trl_populora import start
from trl_populora.assets import real_seed_tasks, tiny_base_path
from trl_populora.generate.player import make_completions
from trl_populora.sandbox import Sandbox
from trl_populora.sandbox.values import encode
from trl_populora.start import choose_shots, choose_style, count_parameters
from trl_populora.step.referee import Referee, Written
from trl_populora.tasks import TASK_KINDS, CodeF, CodeI, CodeO, Refusal, Task, TaskArchive, TaskKind, load_seed_tasks
from trl_populora.tasks.kind import KindSettings
from trl_populora.trainer import PopuLoRATrainer


TURNS = {"prompt_style": "turns", "max_completion_length": 200}
OPENS_THINKING = CHATML.replace("assistant\n{%", "assistant\n<think>\n{%")
NO_ASSISTANT = (
    "{% for message in messages if message['role'] == 'assistant' %}{{ raise_exception('no assistant') }}{% endfor %}"
    + CHATML
)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=1, allow_weak=True) as box:
        yield box


def make_referee(sandbox, style="turns", shots=0, **settings):
    return Referee({name: kind() for name, kind in TASK_KINDS.items()}, sandbox, style, shots=shots, **settings)


def roles(prompt):
    return "".join(turn["role"][0] for turn in prompt)


def test_references_are_turns_in_the_format_that_is_read(sandbox, seed_tasks):
    referee = make_referee(sandbox)
    for kind in (referee.kinds["code_o"], referee.kinds["code_i"]):
        drawn = [task for task in seed_tasks if task.kind == kind.name][:2]
        prompt, kept = referee.proposal_prompt(kind, drawn)
        assert (roles(prompt), kept) == ("uauau", drawn)
        assert len({turn["content"] for turn in prompt if turn["role"] == "user"}) == 1
        for turn, task in zip(prompt[1::2], drawn, strict=True):
            proposal = kind.parse_proposal(turn["content"], [])
            assert (proposal.program, proposal.inputs) == (task.program, task.inputs)


def test_code_f_is_shown_proposals_of_its_own_kind_about_other_programs(sandbox, seed_tasks):
    referee, archive, rng = make_referee(sandbox), TaskArchive(), random.Random(0)
    kind = referee.kinds["code_f"] = CodeF(inputs_per_task=4)
    for task in seed_tasks:
        archive.add(task)
    about, *examples = referee.draw_references(kind, archive, 2, rng)
    assert about.kind != "code_f"
    assert [task.kind for task in examples] == ["code_f"] * 2
    prompt, kept = referee.proposal_prompt(kind, [about, *examples])
    assert roles(prompt) == "uauau"
    for task, turn in zip((*examples, about), prompt[::2], strict=True):
        assert task.program in turn["content"]
    text = prompt[1]["content"]
    assert kind.parse_proposal(text, kept).program == about.program, "it is about the first"
    kind.inputs_per_task = 5  # examples with fewer inputs would speak against the prompt
    assert roles(referee.proposal_prompt(kind, kept)[0]) == "u"


def test_code_f_is_shown_as_many_inputs_as_it_is_asked_for_of_examples_that_have_more(sandbox, seed_tasks):
    kind, example = CodeF(inputs_per_task=3), next(task for task in seed_tasks if task.kind == "code_f")
    written = kind.parse_proposal(kind.write_proposal(example), [example])
    assert written.inputs == example.inputs[:3]
    assert len(example.inputs) > 3
    constant = replace(example, outputs=(example.outputs[0],) * 3 + example.outputs[3:])
    assert kind.write_proposal(constant) == "", "these three alone would be refused"
    for message in ("", " \n"):
        assert kind.write_proposal(replace(example, message=message)) == "", "a proposal needs a message"


@pytest.mark.parametrize("count", [4, 10], ids=["as `populora try` asks", "as a run asks"])
def test_no_teacher_of_a_chat_model_proposes_without_having_seen_how(sandbox, count):
    settings = KindSettings(prompt_style="turns", inputs_per_function=count)
    kinds = {name: kind() for name, kind in TASK_KINDS.items()}
    archive, rng = TaskArchive(), random.Random(0)
    for task in load_seed_tasks(real_seed_tasks()):
        archive.add(task)
    referee = Referee(kinds, sandbox, "turns")
    for kind in kinds.values():
        kind.configure(settings)
        for _ in range(20):
            prompt, _ = referee.proposal_prompt(kind, referee.draw_references(kind, archive, 2, rng))
            assert len(prompt) >= 3, kind.name


def test_the_reference_that_a_proposal_is_about_stays_where_there_is_little_room(sandbox, seed_tasks):
    referee = make_referee(sandbox)
    referee.free_tokens = lambda prompt: 1000 - sum(len(turn["content"]) for turn in prompt)
    kind = referee.kinds["code_f"] = CodeF(inputs_per_task=4)
    codes, functions = ([t for t in seed_tasks if (t.kind == "code_f") == wanted] for wanted in (False, True))
    prompt, kept = referee.proposal_prompt(kind, [codes[0], *functions])
    assert kept[0] == codes[0]
    assert len(kept) < 1 + len(functions)
    assert codes[0].program in prompt[-1]["content"]


class Inline(CodeO):
    """A kind whose references stand within its prompt, whatever the style, as those written before `turns`."""

    write_proposal = TaskKind.write_proposal


def test_a_kind_without_written_proposals_is_given_its_references(sandbox, seed_tasks):
    prompt, _ = make_referee(sandbox).proposal_prompt(Inline(), seed_tasks[:1])
    assert roles(prompt) == "u"
    assert seed_tasks[0].program in prompt[0]["content"]


def test_students_are_shown_solved_tasks_of_their_kind_first(sandbox, seed_tasks):
    referee = make_referee(sandbox, shots=2)
    for task in seed_tasks[:3]:
        prompt = referee.solving_prompt(task)
        assert roles(prompt) == "uauau"
        assert task.program in prompt[-1]["content"] or task.kind == "code_f"
    shot = CodeO.shots[0]
    assert shot.answer not in [turn["content"] for turn in referee.solving_prompt(shot.task)], "not its own solution"


def test_solved_tasks_give_way_where_there_is_little_room(sandbox, seed_tasks):
    referee, task = make_referee(sandbox, shots=3), seed_tasks[0]
    sizes = []
    for room in (10_000, 1500, 1000, 500, 10):
        referee.free_tokens = lambda prompt, room=room: room - sum(len(turn["content"]) for turn in prompt)
        prompt = referee._pose(task)
        sizes.append(len(prompt))
        shown = [turn["content"] for turn in prompt if turn["role"] == "assistant"]
        assert shown == [shot.answer for shot in CodeO.shots[: len(shown)]], "the most instructive ones stay"
        assert task.program in prompt[-1]["content"]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (7, 1)
    assert referee.is_too_long(task), "alone it does not fit either"


@pytest.mark.parametrize("name", TASK_KINDS)
def test_what_students_are_shown_is_right(sandbox, name):
    """In both readings; and a task of its own for each, which a proposal could have been."""
    for reading in ("strict", "tolerant"):
        kind = TASK_KINDS[name]()
        kind.reading = reading
        referee = Referee({name: kind}, sandbox, "turns")
        shots = kind.shots
        assert len(shots) >= 2
        assert all(grade.right for grade in referee.grade([s.task for s in shots], [s.answer for s in shots]))
        verdicts = sandbox.run([kind.check(s.task) for s in shots])
        assert [verdict.outputs for verdict in verdicts] == [s.task.outputs for s in shots]


@pytest.fixture(scope="module")
def roomy_base(tmp_path_factory):
    """A byte is a token of it, so that prompts with solved tasks are long."""
    tokenizer = make_tokenizer()
    sizes = {"head_dim": 16, "max_position_embeddings": 8192, "tie_word_embeddings": True}
    return save_base(tmp_path_factory.mktemp("roomy_base"), Qwen3ForCausalLM, tokenizer, 32, **sizes)


def test_the_base_decides_about_style_and_solved_tasks(make_args, roomy_base, caplog):
    chosen = {name: choose_style(None, name) for name in (roomy_base, "tiny", tiny_base_path())}
    assert list(chosen.values()) == ["turns", "compact", "compact"]
    trainer = PopuLoRATrainer(roomy_base, args=make_args(**TURNS))
    assert (trainer.args.shots, trainer.game.referee.shots) == (3, 3)
    trainer.close()
    assert choose_shots(1, "turns", trainer.model) == 1
    assert "has no effect" not in caplog.text
    assert choose_shots(2, "compact", trainer.model) == 0, "compact prompts have one turn"
    assert "`shots=2` has no effect" in caplog.text


def test_own_instructions_without_effect_are_named(make_args, caplog):
    trainer = PopuLoRATrainer(tiny_base_path(), args=make_args(prompt_texts={"code_o/solve": "Say what it returns."}))
    trainer.close()
    assert "`prompt_texts` has no effect" in caplog.text


def test_adapters_do_not_make_a_base_large(make_args, roomy_base, monkeypatch):
    size = count_parameters(Qwen3ForCausalLM.from_pretrained(roomy_base))
    monkeypatch.setattr(start, "FEW_PARAMETERS", size + 1)
    trainer = PopuLoRATrainer(roomy_base, args=make_args(**TURNS))
    trainer.close()
    assert trainer.model.num_parameters() > size + 1
    assert trainer.game.referee.shots == 3


def test_a_large_base_is_shown_none():
    with torch.device("meta"):
        base = Qwen3ForCausalLM(Qwen3Config(hidden_size=2048, num_hidden_layers=28, intermediate_size=8192))
    assert choose_shots(None, "turns", base) == 0


def test_texts_of_a_users_own_stand_in_the_place_of_ours(make_args, roomy_base, seed_tasks):
    texts = {"code_o/propose": "One on dates, {value_chars} characters.", "code_o/solve": "And the output?"}
    for style in ("turns", "chat"):
        args = make_args(**TURNS | {"prompt_style": style, "prompt_texts": texts, "shots": 0})
        trainer = PopuLoRATrainer(roomy_base, args=args)
        referee, task = trainer.game.referee, seed_tasks[0]
        assert (
            referee.proposal_prompt(referee.kinds["code_o"], [])[0][-1]["content"] == "One on dates, 400 characters."
        )
        asked = referee.solving_prompt(task)[-1]["content"]
        assert asked.startswith("And the output?\n\n```python\n")
        assert "And the output?" not in referee.solving_prompt(seed_tasks[1])[-1]["content"]
        trainer.close()


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        ({"code_x/solve": "?"}, ValueError, "has the key 'code_x/solve'; the keys are code_o/propose"),
        ({"code_o/solve": 3}, TypeError, r"`prompt_texts\['code_o/solve'\]` must be a text, got 3"),
        ({"code_o/solve": "a {dict}"}, ValueError, "has braces that name nothing .'dict'.. Known are {program_chars}"),
        (
            {"code_o/solve": "{count} of {value_chars}"},
            ValueError,
            "nothing .'count'.. Known are {program_chars}, {val",
        ),
        ({"code_f/solve": "{message_chars}"}, ValueError, "has braces that name nothing .'message_chars'"),
        ({"code_o/solve": "{value_chars[0]}"}, ValueError, "has braces that name nothing .'int' object is not"),
        ({"code_o/solve": "a {"}, ValueError, "a brace itself is written twice"),
        (["code_o/solve"], TypeError, "`prompt_texts` must be a dict of texts by name"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(make_args, texts, error, message):
    with pytest.raises(error, match=message):
        make_args(prompt_texts=texts)


def test_a_thought_that_the_template_opens_is_none_until_it_is_closed():
    tokenizer = make_tokenizer()
    task = Task("code_o", DOUBLE, (encode((1,)),), (encode(2),))
    for template, formed in ((CHATML, [True, True]), (OPENS_THINKING, [False, True])):
        tokenizer.chat_template = template
        turn = [{"role": "user", "content": "?"}]
        prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=True)
        said = ["is it\n```output\n2\n```", "let me see\n</think>\n```output\n2\n```"]
        ids = [tokenizer.encode(text) for text in said]
        texts = [each.text for each in make_completions(tokenizer, [prompt["input_ids"]] * 2, ids)]
        for reading in ("strict", "tolerant"):
            kind = CodeO()
            kind.reading = reading
            assert [kind.parse_attempt(text, task).well_formed for text in texts] == formed


@pytest.mark.parametrize("tags", [("<think>", "</think>"), ("[THINK]", "[/THINK]")], ids=["angles", "brackets"])
def test_a_thought_between_special_tokens_is_no_answer(tags):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(tags)})
    task, draft, answer = (
        Task("code_o", DOUBLE, (encode((1,)),), (encode(2),)),
        "```output\n3\n```",
        "```output\n2\n```",
    )
    opened, closed = tags
    for prompt, said in (
        ("ask", f"{opened}\nis it\n{draft}\nor\n{closed}\n{answer}"),
        (f"ask{opened}\n", f"is it\n{draft}\nor{closed}{answer}"),
    ):
        ids = tokenizer.encode(f"{said}{tokenizer.eos_token}")
        assert tokenizer.decode(ids, skip_special_tokens=True) != said, "the tags are special tokens"
        (completion,) = make_completions(tokenizer, [tokenizer.encode(prompt)], [ids])
        assert CodeO().parse_attempt(completion.text, task) == CodeO().parse_attempt(answer, task), prompt
        assert completion.text.startswith("<think>\n")
        assert tokenizer.eos_token not in completion.text


@pytest.fixture
def saved(roomy_base, tmp_path):
    """Saves the random base with another chat template."""
    import shutil

    def save(template):
        path = tmp_path / "base"
        shutil.copytree(roomy_base, path)
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(path)
        if template is None:
            (path / "chat_template.jinja").unlink()
        return str(path)

    return save


@pytest.mark.parametrize(
    ("template", "settings", "message"),
    [
        (None, {}, "has no chat template, and prompts are conversations here"),
        (
            NO_ASSISTANT,
            {},
            "refuses a conversation of user, assistant.*no assistant.*`prompt_style='chat'`",
        ),
        (
            CHATML,
            {"max_completion_length": 24},
            "`max_completion_length=24` is too short for answers of code_[oif]",
        ),
    ],
)
def test_a_base_that_cannot_be_asked_so_is_refused_in_a_line(make_args, saved, lora, template, settings, message):
    args = make_args(**TURNS | settings)
    with pytest.raises(ValueError, match=message):
        PopuLoRATrainer(saved(template), args=args, peft_config=lora)


def test_a_template_without_assistant_turns_is_asked_in_a_single_one(make_args, saved, lora):
    args = make_args(prompt_style="chat", shots=0, max_completion_length=8)
    trainer = PopuLoRATrainer(saved(NO_ASSISTANT), args=args, peft_config=lora)
    task = next(iter(trainer.archive))
    assert [message["role"] for message in trainer.game.referee.solving_prompt(task)] == ["user"]
    trainer.train()
    assert trainer.state.global_step == args.max_steps


def test_a_solved_task_that_is_held_out_is_refused(make_args, roomy_base, lora, seed_dataset):
    held_out = Dataset.from_list([CodeI.shots[0].task.to_record()])
    with pytest.raises(ValueError, match="`eval_dataset` holds a task that students of code_i are shown solved"):
        PopuLoRATrainer(
            roomy_base, args=make_args(**TURNS), train_dataset=seed_dataset, eval_dataset=held_out, peft_config=lora
        )


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("model.gguf", ["model.gguf"], "is a GGUF file. .*cannot be trained.*gguf_file='model.gguf'"),
        ("", ["model.gguf"], "has GGUF files and no `config.json`"),
        ("nowhere/at-all", [], "is no directory here, and no such model was found on the Hub"),
        ("", ["notes.txt"], "is a directory, but no model .it has no config.json"),
    ],
)
def test_what_is_no_model_is_named(make_args, tmp_path, name, files, message):
    root = tmp_path / "given"
    root.mkdir()
    for file in files:
        Path(root, file).write_text("")
    model = name if "/" in name else str(root / name)
    with pytest.raises(ValueError, match=message):
        PopuLoRATrainer(model, args=make_args(prompt_style=None))
    with pytest.raises(ValueError, match=message):
        PopuLoRATrainer(model, args=make_args(prompt_style="turns"))


def test_a_reject_of_a_kind_in_a_word_is_taken_for_one_in_a_sentence(sandbox):
    from tests.countdown import Countdown

    referee = Referee({"countdown": Countdown()}, sandbox, "turns")
    (outcome,) = referee.judge([Written("countdown", "three")], random.Random(0))
    assert isinstance(outcome, Refusal)
    assert outcome.reason.value == "format"
