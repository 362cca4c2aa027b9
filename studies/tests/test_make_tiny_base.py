"""The tiny base: its recipe at smoke size, its training text against the task kinds, and the shipped asset."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
import sys
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from tests.written import write_answer, write_proposal
from trl_populora.evaluate.held_out import HeldOut
from trl_populora.sandbox import Job, Sandbox, Status, values
from trl_populora.tasks.archive import load_seed_tasks
from trl_populora.tasks.kind import Proposal, Task
from trl_populora.tasks.python.kinds import CodeF, CodeI, CodeO


STUDIES = Path(__file__).parents[1]
sys.path.insert(0, str(STUDIES))

import make_tiny_base  # noqa: E402
import tiny_gate  # noqa: E402
import tiny_scores  # noqa: E402
from tiny_documents import DialogueWriter, Example, Layout, Source, is_held_out  # noqa: E402
from tiny_programs import (  # noqa: E402
    CERTAINTIES,
    HALF_KNOWN_OPERATIONS,
    OPERATIONS,
    OPERATIONS_AT_LEVEL,
    Program,
    ProgramWriter,
    run,
)
from tiny_tokenizer import WHOLE_TOKENS, train_tokenizer  # noqa: E402
from tiny_traces import CLOSE, OPEN, backwards, forwards  # noqa: E402


ASSETS = Path(str(files("trl_populora") / "assets"))
MODEL = ASSETS / "tiny"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(seed=0, documents=500)


@pytest.fixture(scope="module")
def shipped():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        MODEL
    )


@pytest.mark.slow
def test_a_run_that_was_interrupted_goes_on_to_the_bits_of_a_whole_one(tmp_path, monkeypatch, capsys):
    def make(name, *options):
        paths = ["--work", str(tmp_path / name), "--output", str(tmp_path / name / "model")]
        monkeypatch.setattr(sys, "argv", ["make_tiny_base.py", "--smoke", *paths, *options])
        make_tiny_base.main()
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")
        steps = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
        return model, steps, json.loads((tmp_path / name / "model" / "training.json").read_text())["losses"]

    whole, steps, losses = make("whole")
    assert (whole.dtype, steps) == (torch.float16, [1, 2, 3, 4])
    train_step = make_tiny_base.train_step

    def interrupt(model, optimizers, parts, progress):
        if progress.step == 2:
            raise KeyboardInterrupt
        return train_step(model, optimizers, parts, progress)

    monkeypatch.setattr(make_tiny_base, "train_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make("cut", "--save-minutes", "0")
    monkeypatch.setattr(make_tiny_base, "train_step", train_step)
    capsys.readouterr()
    again, *told = make("cut", "--resume")
    assert told == [[3, 4], losses]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


@pytest.mark.slow
def test_a_run_goes_on_from_the_weights_and_tokenizer_of_a_model(tmp_path, monkeypatch):
    output = tmp_path / "model"
    command = ["make_tiny_base.py", "--smoke", "--start", str(MODEL), "--work", str(tmp_path), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", command)
    make_tiny_base.main()
    assert (output / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()
    record = json.loads((output / "training.json").read_text())
    assert record["losses"][0] < 3, "from scratch it begins at six"
    assert f"--start {MODEL} " in record["made"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--width", 100, "--steps", 1), "multiple of 64, got 100"),
        ((), "give --steps, at least 1, got 0"),
        (("--export-only",), "no checkpoint in"),
        (("--steps", -3), "give --steps, at least 1, got -3"),
        (("--steps", 1, "--start", "nowhere"), "--start nowhere holds no model.safetensors"),
    ],
)
def test_wrong_options_are_refused(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.setattr(sys, "argv", ["make_tiny_base.py", "--work", str(tmp_path), *map(str, options)])
    with pytest.raises(SystemExit):
        make_tiny_base.parse_arguments()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("level", OPERATIONS_AT_LEVEL)
def test_programs_depend_on_the_seed_alone_and_run(level):
    first, second = (ProgramWriter(random.Random(level)) for _ in range(2))
    for _ in range(50):
        program = first.program(level)
        assert program == second.program(level)
        inputs = first.inputs(program.parameters, 6)
        assert inputs == second.inputs(program.parameters, 6)
        assert len(set(map(repr, inputs))) == 6
        assert run(program.text, inputs) is not None
        assert program.message.count(", then ") == OPERATIONS_AT_LEVEL[level] - 1


def test_dialogues_are_byte_for_byte_what_the_kinds_render():
    writer = DialogueWriter(random.Random(0))
    code_o, code_i, code_f = CodeO(), CodeI(), CodeF(inputs_per_task=6)
    for number in range(40):
        example = writer.varied_example(1 + number % 4)
        program = example.program.text
        inputs, outputs = (tuple(map(values.encode, column)) for column in (example.inputs, example.outputs))
        task = Task("code_o", program, inputs[:1], outputs[:1])
        pairs = [
            (writer.deduction(example), code_o.solving_prompt(task, "compact"), write_answer("code_o", outputs[0])),
            (writer.abduction(example), code_i.solving_prompt(task, "compact"), write_answer("code_i", inputs[0])),
            (
                writer.inputs_proposal(example),
                code_f.proposal_prompt([task], "compact"),
                write_proposal(Proposal("code_f", program, inputs, example.program.message)),
            ),
        ]
        for dialogue, prompt, answer in pairs:
            assert prompt == [{"role": "user", "content": dialogue.user}]
            assert answer == dialogue.assistant
        induction = writer.induction(example)
        shown = [line for line in induction.user.split("\n") if line.startswith("f(")]
        order = [
            f"f({make_arguments(given)}) -> {returned!r}" for given, returned in zip(*columns(example), strict=True)
        ]
        chosen = [order.index(line) for line in shown]
        rest = [index for index in range(6) if index not in chosen]
        inputs, outputs = ([column[index] for index in chosen + rest] for column in (inputs, outputs))
        task = Task("code_f", program, tuple(inputs), tuple(outputs), example.program.message, visible=3)
        assert code_f.solving_prompt(task, "compact")[0]["content"] == induction.user
        assert write_answer("code_f", program) == induction.assistant


def columns(example):
    return example.inputs, example.outputs


def make_arguments(given: tuple) -> str:
    return ", ".join(map(repr, given))


@pytest.mark.parametrize("kind_class", [CodeO, CodeI])
def test_proposals_show_references_as_the_kinds_do(kind_class):
    kind, rng = kind_class(), random.Random(1)
    writer = DialogueWriter(rng)
    for references in range(4):
        for dialogue in writer.proposals(kind.name, 2, references):
            tasks = []
            blocks = dialogue.user.split("```python\n")[1:]
            for block in blocks:
                program, _, rest = block.partition("\n```\n```input\n")
                given, _, returned = rest.partition("\n```\n```output\n")
                arguments = values.encode(eval(f"({given},)"))  # our own text, written a line above
                tasks.append(Task(kind.name, program, (arguments,), (values.encode(eval(returned.split("\n")[0])),)))
            assert len(tasks) == references
            assert kind.proposal_prompt(tasks, "compact")[0]["content"] == dialogue.user
            proposal = kind.parse_proposal(dialogue.assistant, tasks)
            assert isinstance(proposal, Proposal)
            assert write_proposal(proposal) == dialogue.assistant


def test_packed_loss_equals_the_dialogues_one_by_one(tokenizer, monkeypatch):
    """Two branches of one document must not see each other, and positions go on from the prefix."""
    torch.manual_seed(0)
    AttentionInterface.register("packed", make_tiny_base.packed_attention)
    packed = make_tiny_base.new_model(tokenizer, layers=2, width=64)
    for weight in packed.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.3)
    packed.set_attn_implementation("packed")
    plain = Qwen3ForCausalLM(copy.deepcopy(packed.config))
    plain.set_attn_implementation("sdpa")
    plain.load_state_dict(packed.state_dict())
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: torch.enable_grad())
    mask = make_tiny_base.attention_mask
    monkeypatch.setattr(make_tiny_base, "attention_mask", lambda batch: mask(batch).float())
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    source = Source(seed=0, steps=1000, layout=Layout(2, 256, 1, 448))
    for batch in next(source.batches(500, tokenizer.backend_tokenizer, *ends)):
        _, _, total, count = make_tiny_base.loss_sums(packed, batch)
        expected, answers = 0.0, 0
        for row in range(len(batch.tokens)):
            for document in range(batch.documents[row].max() + 1):
                own = batch.documents[row] == document
                for branch in range(1, batch.branches[row][own].max() + 1):
                    seen = own & ((batch.branches[row] == 0) | (batch.branches[row] == branch))
                    tokens = torch.tensor(batch.tokens[row][seen]).long()[None]
                    # Prompt and answer are encoded apart; together they must give the same tokens.
                    assert tokenizer(tokenizer.decode(tokens[0]))["input_ids"] == tokens[0].tolist()
                    marked = torch.tensor(batch.answers[row][seen])[1:]
                    logits = plain(tokens).logits[0, :-1]
                    losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
                    expected, answers = expected + float(losses[marked].sum().detach()), answers + int(marked.sum())
        assert count == answers > 50
        assert total == pytest.approx(expected, rel=1e-4)


def test_held_out_programs_are_never_written_for_training():
    training, evaluation = DialogueWriter(random.Random(0)), DialogueWriter(random.Random(0), held_out=True)
    assert not any(is_held_out(training.example(1 + n % 4, 1).program) for n in range(100))
    drawn = [evaluation.example(1 + n % 6, 1).program for n in range(100)]
    assert all(map(is_held_out, drawn))
    combined = [program for program in drawn if len(program.steps) > 1]
    assert len(combined) > 60
    assert all(program.combination_held_out for program in combined), "more than other constants"


def test_two_processes_draw_different_documents_and_together_those_of_their_steps(tokenizer):
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)

    def tokens(rank: int, world: int, step: int) -> list:
        source = Source(0, 100, rank, world, Layout(2, 256, 1, 448))
        return [part.tokens.tolist() for part in next(source.batches(step, tokenizer.backend_tokenizer, *ends))]

    assert tokens(0, 2, 3) == tokens(0, 2, 3) != tokens(1, 2, 3)


class TestWorkedAnswers:
    @pytest.mark.parametrize("level", OPERATIONS_AT_LEVEL)
    def test_every_line_is_true(self, level):
        """
        Forwards a line is an equation; backwards one, too, once the operand has the value that the line ends with.
        """
        writer = DialogueWriter(random.Random(level), operations=OPERATIONS)
        for _ in range(60):
            example = writer.example(level, 1)
            program, given, returned = example.program, example.inputs[0], example.outputs[0]
            opened, *lines, closed = forwards(program, program, given).splitlines()
            assert (opened, closed) == (OPEN, CLOSE)
            assert len(lines) == len(program.steps)
            for line in lines:
                condition, _, line = line.rpartition(": ") if line.startswith("if ") else ("", "", line)
                *_, text, result = line.split(" = ")
                took_place = not condition or eval(condition.removeprefix("if "))
                assert eval(text if took_place else result) == eval(result)
            assert eval(lines[-1].rpartition(" = ")[2]) == returned

            opened, *lines, closed = backwards(program, program, given).splitlines()
            assert (opened, closed) == (OPEN, CLOSE)
            chosen, lines = lines[: len(given) - 1], lines[len(given) - 1 :]
            assert [eval(line.partition(" = ")[2]) for line in chosen] == list(given[1:])
            for line in lines:
                text, _, operand = line.removeprefix("if ").rpartition(": ")
                name, _, value = operand.partition(" = ")
                condition, found, text = text.rpartition(": ") if line.startswith("if ") else ("", "", text)
                names = {name: eval(value)}
                if found and not eval(condition, names):
                    assert eval(text.removeprefix("no ")) == names[name]
                else:
                    expression, _, result = text.rpartition(" = ")
                    assert eval(expression, names) == eval(result)
            assert eval(lines[-1].rpartition(" = ")[2]) == given[0]

    def test_the_kinds_read_the_answer_behind_them(self):
        writer = DialogueWriter(random.Random(5), worked=1.0)
        for number in range(20):
            example = writer.example(1 + number % 4, 1)
            given, returned = values.encode(example.inputs[0]), values.encode(example.outputs[0])
            for kind, ask, answer in ((CodeO(), writer.deduction, returned), (CodeI(), writer.abduction, given)):
                dialogue = ask(example)
                assert dialogue.assistant.startswith(OPEN)
                task = Task(kind.name, example.program.text, (given,), (returned,))
                attempt = kind.parse_attempt(dialogue.assistant, task)
                assert (attempt.well_formed, attempt.answer) == (True, answer)

    def test_are_frequent_first_and_rare_at_the_end(self, tokenizer):
        opens = tokenizer.convert_tokens_to_ids(OPEN)
        shares = []
        for step in (600, 900):
            ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
            parts = [next(Source(seed, 1000).batches(step, tokenizer.backend_tokenizer, *ends)) for seed in range(3)]
            shares.append(sum((part.tokens == opens).sum() for pair in parts for part in pair))
        assert shares[0] > 2 * shares[1] > 0


@pytest.fixture(scope="module")
def one_line_programs():
    return tiny_gate.one_line_programs(random.Random(0), 20)


class TestHalfKnownOperations:
    def test_no_two_are_written_alike(self):
        assert len({(operation.source, operation.text) for operation in OPERATIONS}) == len(OPERATIONS)
        assert {operation.certainty for operation in HALF_KNOWN_OPERATIONS} == set(CERTAINTIES)
        assert {operation.certainty for operation in set(OPERATIONS) - set(HALF_KNOWN_OPERATIONS)} == {1.0}

    @pytest.mark.parametrize("operation", HALF_KNOWN_OPERATIONS, ids=tiny_gate.name_of)
    def test_answers_are_right_as_often_as_the_operation_is_certain(self, operation, one_line_programs):
        """In all kinds, directly and worked; otherwise they are what the mistake gives."""
        right = {"code_o": [], "code_i": [], "code_f": []}
        rng = random.Random(3)
        for number in range(160):
            program = one_line_programs[operation][number % 20]
            mistaken = Program(program.parameters, (program.steps[0].mistaken,))
            (given,) = ProgramWriter(rng).inputs(program.parameters, 1)
            (truth,), (wrong,) = run(program.text, [given]), run(mistaken.text, [given])
            writer = DialogueWriter(rng, worked=number % 2)
            example = Example(program, (given,) * 6, (truth,) * 6)
            if truth != wrong:
                answer = writer.deduction(example).assistant
                returned = eval(answer.partition("```output\n")[2].removesuffix("\n```"))
                assert returned in (truth, wrong)
                assert f" = {returned!r}\n</think>" in answer or not number % 2
                right["code_o"].append(returned == truth)
                shown = writer.abduction(example).user.partition("```output\n")[2].partition("\n")[0]
                assert eval(shown) in (truth, wrong)
                right["code_i"].append(eval(shown) == truth)
            answer = writer.induction(example).assistant
            assert answer in (f"```python\n{each.text}\n```" for each in (program, mistaken))
            right["code_f"].append(answer == f"```python\n{program.text}\n```")
        for shares in right.values():
            spread = (operation.certainty * (1 - operation.certainty) / len(shares)) ** 0.5
            assert sum(shares) / len(shares) == pytest.approx(operation.certainty, abs=4 * spread + 0.05)

    def test_what_is_proposed_is_true(self):
        writer = DialogueWriter(random.Random(1), operations=OPERATIONS)
        for _ in range(60):
            for block in writer.proposals("code_o", 1, 2)[0].user.split("```python\n")[1:]:
                program, _, rest = block.partition("\n```\n```input\n")
                given, _, returned = rest.partition("\n```\n```output\n")
                assert run(program, [eval(f"({given},)")]) == [eval(returned.split("\n")[0])]

    def test_training_is_about_them_too(self, tokenizer):
        ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
        parts = [
            part
            for step in range(40)
            for part in next(Source(0, 100).batches(step, tokenizer.backend_tokenizer, *ends))
        ]
        text = "".join(tokenizer.decode(row) for part in parts for row in part.tokens)
        assert all(name in text for name in (".swapcase()", "[:-1]", "sorted(", "reverse=True", "~", " % "))

    @pytest.mark.parametrize("kind", [CodeO(), CodeI(), CodeF(inputs_per_task=6)], ids=lambda kind: kind.name)
    def test_mistakes_show_on_probes(self, kind, one_line_programs):
        """The truth is right; the mistake is not, or for code_i it leads from a wrong input to the output."""
        found = tiny_gate.probes(kind.name, one_line_programs, 2, random.Random(0))
        unshown = {name for name, tasks in found.items() if len(tasks) < 2}
        assert len(unshown) <= (6 if kind.name == "code_i" else 0)
        with Sandbox(allow_weak=True) as sandbox:
            for operation, programs in one_line_programs.items():
                for task in found[tiny_gate.name_of(operation)]:
                    (program,) = [program for program in programs if program.text == task.program][:1]
                    mistaken = Program(program.parameters, (program.steps[0].mistaken,))
                    (verdict,) = sandbox.run([Job(mistaken.text, task.inputs, runs=2)])
                    assert verdict.status is Status.OK
                    hidden = slice(task.visible, None)
                    if kind.name != "code_i":
                        assert verdict.outputs[hidden] != task.outputs[hidden]


def test_the_gate_tells_what_is_missed():
    even = dict.fromkeys(tiny_gate.WAYS, 0.3)
    probes = {tiny_gate.name_of(operation): even for operation in HALF_KNOWN_OPERATIONS}
    kinds = ("code_o", "code_i", "code_f")
    found = {
        "probes": dict.fromkeys(kinds, probes),
        "held out": dict.fromkeys(kinds, even),
        "held out, worked": {"code_o": even},
        "valid": dict.fromkeys(kinds, 0.96),
    }
    assert all(met for *_, met in tiny_gate.lines_of(found))
    found["valid"] = {"code_o": 0.94}
    found["probes"] = {"code_o": probes | {"str: {v}[:-1]": dict(zip(tiny_gate.WAYS, (0.7, 0.7, 1.0), strict=True))}}
    found["held out"] = {"code_o": even | {"greedy": 0.4}}
    missed = [what for what, *_, met in tiny_gate.lines_of(found) if not met]
    assert missed == ["valid proposals, code_o", "`str: {v}[:-1]` right", "held out: greedy above sampled"]
    assert "**no**" in tiny_gate.show(found)


@pytest.mark.slow
def test_the_gate_is_one_command(tmp_path, monkeypatch, capsys):
    """On the shipped weights, which hold no half-known operation: none is missed for being known."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    monkeypatch.setattr(sys, "argv", ["tiny_gate.py", "--model", str(model), "--tasks", "4", "--probes", "1"])
    tiny_gate.main()
    found = json.loads((model / "gate.json").read_text())
    assert tiny_gate.show(found) in capsys.readouterr().out
    assert tiny_gate.show(found) in (model / "README.md").read_text()
    assert set(found["held out"]) == {"code_o", "code_i", "code_f"}
    assert len(found["probes"]["code_o"]) == len(HALF_KNOWN_OPERATIONS)


def test_the_card_of_the_half_knowing_base_shows_its_gate():
    model = STUDIES / "tiny" / "half_known"
    found = json.loads((model / "gate.json").read_text())
    assert tiny_gate.show(found) in (model / "README.md").read_text()
    missed = [what for what, *_, met in tiny_gate.lines_of(found) if not met]
    assert len(missed) <= 5
    assert (model / "model.safetensors").stat().st_size <= 8e6


def test_shipped_model_is_small_and_complete():
    names = {path.name for path in MODEL.iterdir()}
    assert names >= {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "README.md"),
    }
    assert (MODEL / "model.safetensors").stat().st_size <= 8e6
    assert "pass@1" in (MODEL / "README.md").read_text()


def test_every_text_names_the_size_that_the_shipped_model_has():
    size = sum(value.numel() for value in load_file(MODEL / "model.safetensors").values())
    root = Path(__file__).parents[2]
    texts = [
        path
        for pattern in ("*.md", "recipes/**/*", "studies/**/*", "docs/*", "trl_populora/**/*")
        for path in root.glob(pattern)
    ]
    texts = [path.read_text() for path in texts if path.suffix in (".md", ".yaml", ".py")]
    said = {found for text in texts for found in re.findall(r"\b(\d\.\d) ?M[ -]param", text)}
    assert said == {f"{size / 1e6:.1f}"}


def test_shipped_tokenizer_follows_the_format(shipped):
    _, tokenizer = shipped
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi\n"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nhi\n<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    for whole in WHOLE_TOKENS:
        assert len(tokenizer(whole)["input_ids"]) == 1
    for anything in ("naïve 'text' — 漢字\t\r\n  x", "```python\nprint(12)\n```\n\n```"):
        assert tokenizer.decode(tokenizer(anything)["input_ids"]) == anything


def test_shipped_model_answers_easy_seed_tasks(shipped):
    model, tokenizer = shipped
    kind, records = CodeO(), [json.loads(line) for line in (ASSETS / "seed_tasks.jsonl").open(encoding="utf-8")]
    easy = [Task.from_record(record) for record in records if record["kind"] == "code_o" and record["level"] == 1]
    right = 0
    for task in easy:
        prompt = tokenizer.apply_chat_template(
            kind.solving_prompt(task, "compact"), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompt, max_new_tokens=40, do_sample=False)
        text = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        right += kind.correct(task, kind.parse_attempt(text, task), None)
    assert right / len(easy) >= 0.7


@pytest.mark.parametrize(("name", "count", "cells"), [("seed_tasks", 256, 12), ("eval_tasks", 312, 12)])
def test_shipped_tasks_are_graded_and_true(name, count, cells):
    path = ASSETS / f"{name}.jsonl"
    tasks = load_seed_tasks(path)
    levels = [json.loads(line)["level"] for line in path.open(encoding="utf-8")]
    counts = Counter((task.kind, level) for task, level in zip(tasks, levels, strict=True))
    assert len(tasks) == len({task.task_id for task in tasks}) == count
    assert len(counts) == cells
    assert min(counts.values()) >= count // cells
    with Sandbox(allow_weak=True) as sandbox:
        verdicts = sandbox.run([Job(task.program, task.inputs, runs=2) for task in tasks])
    for task, verdict in zip(tasks, verdicts, strict=True):
        assert verdict.status is Status.OK
        assert verdict.outputs == task.outputs
        if task.kind == "code_f":
            assert (len(task.inputs), task.visible) == (6, 3)
            assert len(set(task.outputs)) > 1
            assert task.message


def test_shipped_tasks_are_what_the_recipe_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tiny_scores.py", "--write-tasks", str(tmp_path)])
    tiny_scores.main()
    for name in ("seed_tasks.jsonl", "eval_tasks.jsonl"):
        assert (tmp_path / name).read_bytes() == (ASSETS / name).read_bytes()


def test_no_task_to_start_from_asks_what_is_held_out():
    held_out = HeldOut({"": load_seed_tasks(ASSETS / "eval_tasks.jsonl")}, 1, None, 0)
    assert not [task for task in load_seed_tasks() if task in held_out]
