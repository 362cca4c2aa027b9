"""`populora evaluate` end to end: a real vLLM server on the tiny base, EvalScope, and programs in the sandbox."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest


pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("evalscope", reason="EvalScope is not installed")

from trl_populora import __main__ as cli
from trl_populora.evaluation.benchmarks.processes import start

from .evaluation_tasks import QUESTIONS, merge, save_population, write_tasks
from .vllm_models import ENGINE_ENVIRONMENT
from .vllm_processes import environment


pytestmark = [pytest.mark.vllm, pytest.mark.slow]
MEMBERS = ["teacher_0", "student_0"]
CONTENDERS = [*MEMBERS, "base", "single"]
MARK = "POPULORA_TEST_EVALUATION"


def evaluate(root: Path, *options: str) -> str:
    """The command as a user types it; returns what it prints. Options that come later win."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        cli.main(
            [
                *("evaluate", str(root / "run"), "--compare", str(root / "single"), "--benchmarks", *QUESTIONS),
                *("--dataset_args", str(root / "tasks" / "dataset_args.json"), "--max_tokens", "200"),
                *("--server_args", "--dtype float32 --enforce-eager"),
                *options,
            ]
        )
    return printed.getvalue()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two members, and another run's student to compare them with, evaluated on three benchmarks."""
    root = tmp_path_factory.mktemp("evaluation")
    write_tasks(root / "tasks")
    save_population(root / "run", {"teacher_0": 0, "student_0": 1})
    save_population(root / "single", {"student_0": 2})
    os.environ.update(ENGINE_ENVIRONMENT)
    os.environ[MARK] = str(uuid.uuid4())
    (root / "printed").write_text(evaluate(root))
    return root


def answers(folder: Path) -> dict[tuple, tuple]:
    """Completion and score of every question in what EvalScope leaves, by benchmark file and number."""
    found = {}
    for path in sorted(folder.glob("reviews/*/*.jsonl")):
        for line in path.read_text().splitlines():
            review = json.loads(line)
            score = review["sample_score"]["score"]
            found[path.name, review["index"]] = (score["prediction"], score["value"])
    return found


def of_contender(root: Path, name: str, benchmark: str) -> dict[tuple, tuple]:
    (folder,) = (root / "run" / "_evaluation" / benchmark).glob(f"{name}-*")
    return answers(folder)


def test_the_table_holds_every_contender_and_what_members_come_to(root):
    saved = json.loads((root / "run" / "evaluation.json").read_text())
    assert saved["questions"] == QUESTIONS
    for row in saved["scores"].values():
        assert list(row) == [*MEMBERS, "mean", "best", "worst", "base", "single"]
        members = [row[name] for name in MEMBERS]
        assert (row["mean"], row["best"], row["worst"]) == (
            pytest.approx(sum(members) / 2),
            max(members),
            min(members),
        )
    printed = (root / "printed").read_text()
    assert printed.count("[") >= len(CONTENDERS) * len(QUESTIONS)
    assert "GSM8K" in (root / "run" / "evaluation.md").read_text()
    assert (root / "run" / "evaluation.png").exists()


ALONE = {"gsm8k": CONTENDERS, "live_code_bench": ["base"]}


@pytest.fixture(scope="module")
def alone(root):
    """Merged into the base, run by transformers, one at a time; LiveCodeBench's programs by EvalScope's own runner."""
    merged = {name: merge(root, name) for name in CONTENDERS}
    asked = [part for name, names in ALONE.items() for part in (name, ",".join(merged[each] for each in names))]
    command = [sys.executable, str(Path(__file__).with_name("evaluation_alone.py"))]
    done = subprocess.run(
        [*command, root / "tasks" / "dataset_args.json", root / "alone", *asked],
        env=environment() | {"HF_DATASETS_CACHE": str(root / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return root / "alone"


@pytest.mark.parametrize(("benchmark", "names"), ALONE.items())
def test_contenders_answer_as_the_same_library_finds_them_alone(root, alone, benchmark, names):
    own = {name: answers(alone / benchmark / name) for name in names}
    for name in names:
        assert len(own[name]) == QUESTIONS[benchmark]
        assert of_contender(root, name, benchmark) == own[name], name
    said = {tuple(text for text, _ in found.values()) for found in own.values()}
    assert len(said) == len(names), "contenders that say the same could be mistaken for each other"
    scores = {tuple(value.values()) for found in own.values() for _, value in found.values()}
    assert len(scores) == 2, "right and wrong answers both"


def test_programs_fare_the_same_under_both_code_benchmarks(root):
    """The same questions and hidden examples, once as MBPP+ tests and once as LiveCodeBench tests."""
    scores = json.loads((root / "run" / "evaluation.json").read_text())["scores"]
    assert scores["mbpp_plus"] == scores["live_code_bench"]


def test_scores_have_intervals(root):
    saved = json.loads((root / "run" / "evaluation.json").read_text())
    for benchmark in QUESTIONS:
        margins, gains = saved["margins"][benchmark], saved["over_base"][benchmark]
        assert {name for name, margin in margins.items() if margin} == {*CONTENDERS, "mean"}
        assert {name for name, gain in gains.items() if gain} == {*MEMBERS, "single", "mean"}
        for name in MEMBERS:
            gained = saved["scores"][benchmark][name] - saved["scores"][benchmark]["base"]
            assert gains[name][0] == pytest.approx(gained, abs=0.1)


def test_an_answer_as_long_as_the_context_is_refused_before_anything_is_asked(root):
    with pytest.raises(SystemExit, match="`max_tokens=1024` leaves no room for a question in the server's context of"):
        evaluate(root, "--max_tokens", "1024", "--out", str(root / "long"))


def test_a_server_that_does_not_start_says_why(root):
    out = root / "starts-not"
    (out / "_evaluation").mkdir(parents=True)
    (out / "_evaluation" / "server.log").write_text("ValueError: of another server\n")
    flags = "--dtype float32 --enforce-eager --max-model-len 99999999"
    reason = r"`server_args` takes its flags\): Value error, User-specified max_model_len \(99999999\) is greater"
    with pytest.raises(SystemExit, match=reason):
        evaluate(root, "--server_args", flags, "--out", str(out))


def test_what_is_finished_is_not_done_again(root):
    log = root / "run" / "_evaluation" / "server.log"
    before = log.stat().st_mtime_ns, (root / "run" / "evaluation.json").read_text()
    assert "12 of 12 are finished already." in evaluate(root)
    assert (log.stat().st_mtime_ns, (root / "run" / "evaluation.json").read_text()) == before


def test_answers_of_an_interrupted_run_are_not_asked_for_again(root):
    """No server answers, so every answer has to come from what is there: the next one has another port."""
    job = root / "run" / "_evaluation" / "student_0.json"
    job.write_text(json.dumps(json.loads(job.read_text()) | {"url": "http://127.0.0.1:9", "concurrency": 3}))
    results = list((root / "run" / "_evaluation").glob("*/student_0-*/result.json"))
    before = [json.loads(path.read_text()) for path in results]
    for path in results:
        path.unlink()
    own = {"HF_DATASETS_CACHE": str(root / "cache")}
    assert (
        start(["-m", "trl_populora.evaluation.benchmarks.worker", str(job)], root / "again.log", **own).wait(200) == 0
    )
    assert [json.loads(path.read_text()) for path in results] == before


def test_nothing_is_left_running(root):
    mark = f"{MARK}={os.environ[MARK]}".encode()
    left = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes() and int(path.parent.name) != os.getpid():
                left.append(path.parent.name)
    assert left == []
