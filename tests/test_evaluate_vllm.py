"""`recipes/evaluate.py` end to end: a real vLLM server on the tiny base, EvalScope, and programs in the sandbox."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("evalscope", reason="EvalScope is not installed")

from tests.evaluation_tasks import save_population, write_gsm8k, write_mbpp_plus
from tests.recipe_runs import RECIPES
from tests.vllm_models import ENGINE_ENVIRONMENT
from trl_populora.assets import tiny_base_path
from trl_populora.hub.eval_results import read_figures
from trl_populora.run.read import read_population


sys.path.insert(0, str(RECIPES))

import evaluate  # noqa: E402


pytestmark = [pytest.mark.vllm, pytest.mark.slow]
MEMBERS = ["teacher_0", "student_0"]
QUESTIONS = {"gsm8k": 12, "mbpp_plus": 4}
FLAGS = "--dtype float32 --enforce-eager"


def marked_processes(mark: str) -> list[int]:
    """Processes that have the mark in their environment, this one left out."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


@pytest.fixture(scope="module")
def mark():
    """What every process that starts from here has in its environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ENGINE_ENVIRONMENT | {"POPULORA_TEST_EVALUATION": str(uuid.uuid4())}).items():
            patch.setenv(name, value)
        yield f"POPULORA_TEST_EVALUATION={os.environ['POPULORA_TEST_EVALUATION']}"


@pytest.fixture(scope="module")
def root(mark, tmp_path_factory):
    """Two members and another run's student on two benchmarks; a third has no data."""
    root = tmp_path_factory.mktemp("evaluation")
    save_population(root / "run", {"teacher_0": 0, "student_0": 1}, generation_kwargs={"eos_token_id": 2})
    save_population(root / "single", {"student_0": 2})
    local = {
        "gsm8k": write_gsm8k(root / "gsm8k", QUESTIONS["gsm8k"]),
        "mbpp_plus": write_mbpp_plus(root / "mbpp_plus", QUESTIONS["mbpp_plus"]),
        "aime24": {"local_path": str(root / "nowhere")},
    }
    with pytest.MonkeyPatch.context() as patch:
        # `datasets` knows local data by its path alone, and pytest gives a path again.
        patch.setattr("datasets.config.HF_DATASETS_CACHE", root / "cache")
        for name, arguments in local.items():
            patch.setitem(evaluate.BENCHMARKS, name, evaluate.BENCHMARKS[name]._replace(arguments=arguments))
        options = ["--benchmarks", "aime24", *QUESTIONS, "--max_tokens", "200", "--server_args", FLAGS]
        with pytest.raises(SystemExit, match=r"could not be done:\naime24: [^\n]+\Z"):
            evaluate.main([str(root / "run"), "--compare", str(root / "single"), *options])
    return root


@pytest.fixture(scope="module")
def found(root) -> dict:
    return json.loads((root / "run" / "evaluation.json").read_text())


def test_every_contender_has_scores_with_intervals_and_differences_paired_by_question(root, found):
    assert found["questions"] == QUESTIONS
    for benchmark in QUESTIONS:
        scores = found["scores"][benchmark]
        assert list(scores) == [*MEMBERS, "mean", "teachers", "students", "base", "single"]
        assert all(found["margins"][benchmark][name] > 0 for name in scores)
        for other, gains in found["over"][benchmark].items():
            assert {name: gain for name, (gain, _) in gains.items()} == pytest.approx(
                {name: score - scores[other] for name, score in scores.items() if name != other}
            )
    assert any(0 < score < 100 for score in found["scores"]["mbpp_plus"].values()), "right and wrong programs"
    rows = (root / "run" / "evaluation.md").read_text().splitlines()
    titles = ("GSM8K", "MBPP+", "all, 2 of 10")
    assert [row.split(" | ")[0] for row in rows[2:]] == [
        f"| {name}" for title in titles for name in (title, "above base", "above single")
    ]


def test_contenders_answer_as_transformers_does_with_their_adapters(root):
    """One of them has ranks and alphas of its own for some modules."""
    adapters = {name: root / "run" / "members" / name for name in MEMBERS}
    adapters |= {"base": None, "single": root / "single" / "members" / "student_0"}
    tokenizer = AutoTokenizer.from_pretrained(tiny_base_path())
    said = set()
    for name, adapter in adapters.items():
        model = AutoModelForCausalLM.from_pretrained(tiny_base_path(), dtype=torch.float32)
        model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
        (path,) = (root / "run" / "_evaluation" / "gsm8k" / name).glob("reviews/*/*.jsonl")
        answers = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(answers) == QUESTIONS["gsm8k"]
        for answer in answers:
            asked, said_so = ({"role": each["role"], "content": each["content"]} for each in answer["messages"])
            ids = tokenizer.apply_chat_template(
                [asked], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            told = model.generate(**ids, max_new_tokens=200, do_sample=False, eos_token_id=2, pad_token_id=0)
            told = tokenizer.decode(told[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
            assert said_so["content"] == told, name
        said.add(tuple(answer["messages"][1]["content"] for answer in answers))
    assert len(said) == len(adapters), "contenders that say the same could be mistaken for each other"


def test_members_are_asked_with_the_stops_they_were_trained_with(root):
    path = root / "run" / "_evaluation" / "gsm8k" / "student_0" / "configs" / "task_config.yaml"
    sent = yaml.safe_load(path.read_text())["generation_config"]["extra_body"]
    assert sent == {"chat_template_kwargs": {}, "stop_token_ids": [2]}


def test_members_stop_where_the_chat_template_of_their_run_ends_a_turn(tmp_path):
    assert evaluate.list_stops(tmp_path, "tiny", {}) == [2]
    template = "{% for each in messages %}{{ each['content'] + '<|endoftext|>' }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    assert evaluate.list_stops(tmp_path, "tiny", {"generation_kwargs": {"stop": "\n"}}) == [2, 0, 201]


def test_what_is_pushed_has_the_best_students_figures_and_the_command(root, found):
    figures = read_figures(root / "run", read_population(root / "run"), "me/scored")
    gsm8k, mbpp = (next(each for each in figures if each.name == name) for name in QUESTIONS)
    assert (gsm8k.value, gsm8k.base) == (found["scores"]["gsm8k"]["student_0"], found["scores"]["gsm8k"]["base"])
    assert (gsm8k.questions, gsm8k.dataset, mbpp.dataset) == (12, "openai/gsm8k", None)
    assert gsm8k.revision.startswith("sha256:")
    options = ["--benchmarks", "aime24", *QUESTIONS, "--max_tokens", "200", f"--server_args={FLAGS}"]
    assert shlex.split(gsm8k.how.strip("`")) == ["python", "recipes/evaluate.py", "me/scored", *options]


def test_a_server_that_does_not_start_says_why(root, mark):
    flags = f'--server_args="{FLAGS} --max-model-len 99999999"'
    with pytest.raises(RuntimeError, match=r"(?s)vLLM did not start.*max_model_len"):
        evaluate.main([str(root / "run"), "--out", str(root / "starts-not"), *shlex.split(flags)])


def test_nothing_is_left_running(root, mark):
    assert marked_processes(mark) == []


def test_the_server_ends_when_the_evaluation_is_killed(root, mark):
    command = [sys.executable, str(RECIPES / "evaluate.py"), str(root / "run"), "--out", str(root / "killed")]
    with open(root / "killed.log", "w") as log:
        evaluation = subprocess.Popen([*command, "--server_args", FLAGS], stdout=log, stderr=log)
    wait_until((root / "killed" / "_evaluation" / "server.log").exists, 200)
    wait_until(lambda: len(marked_processes(mark)) > 1)
    time.sleep(1)
    evaluation.send_signal(signal.SIGKILL)
    evaluation.wait()
    wait_until(lambda: marked_processes(mark) == [])


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
