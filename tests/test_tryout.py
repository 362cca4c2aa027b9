"""`populora try`: what a base makes of each form, what follows from it, and what is said."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from trl_populora import cli as program
from trl_populora import start
from trl_populora.assets import tiny_base_path
from trl_populora.evaluate.tryout import Finding, Form, Question, TryArguments, Tryout, _make_settings, show, try_model
from trl_populora.generate.player import tokenize
from trl_populora.step.player import Completion
from trl_populora.tasks import Task, make_task


TURNS, SHOTS, CHAT = Form("turns"), Form("turns", 3), Form("chat")
GOOD, READ, NOTHING = Finding(True, True), Finding(True, False, "wrong"), Finding(False, False, "format", "no block")
END = 7


def tryout(outcomes: dict[tuple[str, Form], list[Finding]], tokens: int = 40, end: int = END) -> Tryout:
    """With these outcomes of code_o; every completion has as many tokens and ends so."""
    rows = [(Question(form, role, "code_o", [], []), o) for (role, form), each in outcomes.items() for o in each]
    completion = Completion([1], [1] * (tokens - 1) + [end], "```\nx\x1b[2J\n```")
    return Tryout([q for q, _ in rows], [completion] * len(rows), [o for _, o in rows], {END}, 10.0, {})


def test_the_form_with_most_that_counts_is_chosen():
    found = tryout(
        {
            ("teacher", TURNS): [GOOD, READ, NOTHING, NOTHING],
            ("student", TURNS): [READ, NOTHING, NOTHING, NOTHING],
            ("student", SHOTS): [GOOD, READ, READ, NOTHING],
            ("teacher", CHAT): [NOTHING] * 4,
            ("student", CHAT): [GOOD] * 4,
        }
    )
    assert found.choose() == SHOTS
    assert found.measure_mixed(SHOTS) == 1
    assert found.find_obstacles() == []
    assert found.advise_length() == 64, "half as many again as 40, up to the next 32"
    assert found.tokens_per_second == 20 * 40 / 10


def test_shorter_prompts_are_chosen_where_nothing_tells_forms_apart():
    same = {("teacher", TURNS): [GOOD] * 4, ("student", SHOTS): [READ] * 4, ("student", TURNS): [READ] * 4}
    assert tryout(same).choose() == TURNS


@pytest.mark.parametrize(
    ("proposals", "answers", "obstacles"),
    [
        ([READ] * 4, [GOOD, READ, READ, READ], ["no proposal is a valid task"]),
        ([GOOD] * 4, [NOTHING] * 4, ["no answer can be read", "no answer is right"]),
        ([GOOD] * 4, [READ] * 4, ["no answer is right"]),
        ([GOOD] * 4, [GOOD] * 4, ["every answer is right"]),
        ([GOOD] * 4, [GOOD, READ] * 2, []),
    ],
)
def test_what_stands_in_the_way_is_named(proposals, answers, obstacles):
    found = tryout({("teacher", TURNS): proposals, ("student", TURNS): answers})
    assert found.find_obstacles() == obstacles
    said = "\n".join(show(found, TryArguments("a/base")))
    assert ("Nothing can be learned yet" in said) == bool(obstacles)
    assert ("prompt_style: turns" in said) != bool(obstacles)
    assert f"Completions end at the tokens {END}," in said, "a wrong end may be the obstacle"


def test_the_settings_that_fit_are_a_recipe_of_what_was_tried(make_args):
    found = tryout(
        {
            ("teacher", TURNS): [GOOD] * 4,
            ("student", TURNS): [NOTHING] * 4,
            ("student", SHOTS): [GOOD, READ] * 2,
        }
    )
    options = TryArguments("a/base", task_kinds=["code_o", "code_i"], temperature=0.7)
    lines = list(show(found, options))
    settings = yaml.safe_load("\n".join(lines[lines.index("Settings that fit:") + 1 :]))
    args = make_args(**settings)
    assert (args.prompt_style, args.shots, args.max_completion_length) == ("turns", 3, 64)
    assert (args.task_kinds, args.temperature, args.inputs_per_function) == (["code_o", "code_i"], 0.7, 4)


def test_a_kind_that_is_solved_only_is_tried_by_its_attempts():
    found = tryout({("student", TURNS): [GOOD, READ] * 2, ("student", SHOTS): [READ, NOTHING] * 2})
    assert found.choose() == TURNS
    assert found.find_obstacles() == []
    assert "  teachers: 0" in list(show(found, TryArguments("a/base")))


@pytest.mark.parametrize(("temperature", "advised"), [(1.0, True), (0.7, False)])
def test_a_cooler_sample_is_a_way_out_where_it_was_not_tried(temperature, advised):
    found = tryout({("teacher", TURNS): [NOTHING] * 4, ("student", TURNS): [NOTHING] * 4})
    said = "\n".join(show(found, TryArguments("a/base", temperature=temperature)))
    assert ("`--temperature 0.7`" in said) == advised


def test_failures_are_shown_with_their_reason_and_command_no_terminal():
    found = tryout({("teacher", TURNS): [NOTHING, NOTHING, GOOD], ("student", TURNS): [GOOD, READ, READ, READ]})
    lines = list(show(found, TryArguments("a/base")))
    assert "--- teacher, code_o, format (2 times): no block" in lines
    assert "--- student, code_o, wrong (3 times)" in lines
    assert "\x1b" not in "".join(lines)


def test_attempts_at_one_task_count_as_one():
    found = tryout({("teacher", TURNS): [GOOD, GOOD, NOTHING], ("student", TURNS): [GOOD] * 4 + [READ] * 4})
    (row,) = (line for line in show(found, TryArguments("a/base")) if line.startswith("turns"))
    assert row.count("67 % [21, 94]") == 2, "three proposals"
    assert "100 % [34, 100]" in row, "two tasks"
    assert row.endswith("50 % [9, 91]")


def test_a_cut_completion_is_none_that_a_length_follows_from():
    found = tryout({("teacher", TURNS): [GOOD], ("student", TURNS): [GOOD, READ, READ, READ]}, end=1)
    assert all(found.cut)
    assert found.advise_length() == 64
    assert any("100 %" in line and "were cut" in line for line in show(found, TryArguments("a/base")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 6}, "`samples` must be a multiple of 4 above 0, got 6"),
        ({"vllm": True, "adapter": "x"}, "leave `vllm` out"),
        ({"prompt_style": "verse"}, "must be one of turns, chat, compact, got 'verse'"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TryArguments("tiny", **options)


@pytest.mark.parametrize("given", ["model.gguf", ""])
def test_a_gguf_file_is_told_from_a_missing_model(tmp_path, given):
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match="GGUF files are for serving and cannot be trained"):
        try_model(TryArguments(str(tmp_path / given)))


@pytest.mark.parametrize(
    ("model", "given", "inputs"), [("tiny", {}, 6), ("a/base", {}, 4), ("tiny", {"inputs_per_function": 5}, 5)]
)
def test_a_base_is_asked_for_as_many_inputs_as_it_knows(model, given, inputs):
    assert TryArguments(model, **given).inputs == inputs


def test_beside_vllm_the_base_takes_no_memory():
    args = _make_settings(TryArguments("tiny", vllm=True))
    assert {weight.device.type for weight in start.load_base("tiny", args).parameters()} == {"meta"}


def test_a_base_that_is_quantised_loads_beside_vllm(tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs the `quantization` extra")
    four_bits = BitsAndBytesConfig(load_in_4bit=True)
    whole = AutoModelForCausalLM.from_pretrained(tiny_base_path(), dtype=torch.float32, quantization_config=four_bits)
    whole.save_pretrained(tmp_path)
    base = start.load_base(str(tmp_path), _make_settings(TryArguments(str(tmp_path), vllm=True)))
    assert {weight.device.type for weight in base.parameters()} == {"cpu"}
    assert start.count_parameters(base) == start.count_parameters(whole)


def test_a_prompt_that_is_too_long_is_measured_without_a_warning(make_args):
    tokenizer = AutoTokenizer.from_pretrained(tiny_base_path())
    prompt = [{"role": "user", "content": "solve code_o " * tokenizer.model_max_length}]
    assert len(tokenize(tokenizer, [prompt], make_args())[0]) > tokenizer.model_max_length
    assert not tokenizer.deprecation_warnings


@pytest.mark.slow
def test_the_tiny_base_is_asked_in_its_own_words(capsys):
    options = TryArguments("tiny", task_kinds=["code_o", "code_i"], max_completion_length=100)
    found = try_model(options)
    form = found.choose()
    assert form == Form("compact")
    assert sum(outcome.good for outcome in found.select("teacher", form)) >= 12
    assert sum(outcome.readable for outcome in found.select("student", form)) >= 12
    assert found.find_obstacles() == []


def test_a_base_that_says_nothing_ends_with_one(random_base, capsys):
    with pytest.raises(SystemExit) as stop:
        program.main(["try", random_base, "--samples", "16", "--task_kinds", "code_o", "--max_completion_length", "8"])
    assert stop.value.code == 1
    said = capsys.readouterr().out
    assert "Nothing can be learned yet with" in said
    assert "recipes/cold_start.py" in said
    assert "turns + 3 shots  not tried: The solved tasks do not fit into the context." in said
    assert "chat             not tried: The shortest proposal prompt of code_o is" in said


def test_a_kind_of_your_own_is_tried_with_tasks_of_it(random_base, tmp_path):
    path, own = tmp_path / "given.jsonl", {"task_kinds": ["code_o", "tests.countdown:GivenCountdown"]}
    tasks = [make_task("code_o", "def f(a):\n    return a + 1", [(1,)]), Task("countdown", "3 4 5 -> 17", (), ())]
    path.write_text("".join(json.dumps(task.to_record()) + "\n" for task in tasks))
    with pytest.raises(ValueError, match="There is no task of the kind countdown to try"):
        try_model(TryArguments(random_base, **own))
    options = TryArguments(
        random_base, samples=4, tasks=str(path), max_completion_length=8, prompt_style="compact", **own
    )
    asked = [(question.role, question.kind) for question in try_model(options).questions]
    assert [asked.count(("student", kind)) for kind in ("code_o", "countdown")] == [4, 4]


def test_one_style_alone_is_tried_on_request(random_base):
    options = TryArguments(
        random_base, samples=4, task_kinds=["code_o"], max_completion_length=8, prompt_style="compact"
    )
    found = try_model(options)
    assert {question.form for question in found.questions} == {Form("compact")}
    assert not found.left_out
