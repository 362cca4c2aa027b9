"""The process of one contender: EvalScope on one benchmark after the other, against the server.

Run as a module with the path of a job (JSON, see `jobs.py`). Leaves `result.json` or `error.json` in each benchmark's
directory. A process of its own, because EvalScope's logs, seeds and threads belong to the whole process, and because
the grading of eight members shares no interpreter lock this way.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from pathlib import Path
from statistics import fmean
from typing import Any

from evalscope import TaskConfig, run_task

from trl_populora.evaluation.benchmarks.code import install_backend, make_sandbox
from trl_populora.files import write_json


def task_config(job: dict[str, Any], name: str, directory: Path) -> TaskConfig:
    """What EvalScope is told about one benchmark; answers of an interrupted run in `directory` are kept."""
    begun = (directory / "configs" / "task_config.yaml").exists()
    benchmark = job["pairs"][name]
    config = TaskConfig(
        model=job["model"],
        api_url=f"{job['url']}/v1",
        eval_type="openai_api",
        datasets=[benchmark["evalscope"]],
        dataset_args={benchmark["evalscope"]: benchmark["arguments"]},
        dataset_hub=job["hub"],
        generation_config={
            "temperature": benchmark["temperature"],
            "max_tokens": job["max_tokens"],
            "top_p": 1.0,
            # A server's defaults may come from the base's `generation_config.json`, a penalty on repetition among
            # them.
            "extra_body": {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0} | job["along"],
            "timeout": 3600,
        },
        repeats=benchmark["samples"],
        limit=job["limit"],
        eval_batch_size=job["concurrency"],
        judge={"strategy": "rule"},
        work_dir=str(directory),
        no_timestamp=True,
        use_cache=str(directory) if begun else None,
        # Otherwise answers that another server gave, if only at another port, would be refused. They are graded anew.
        rerun_review=begun,
    )
    # Given to the constructor, it would ask for EvalScope's own containers.
    config.sandbox.enabled = True
    return config


def run(job: dict[str, Any], name: str, directory: Path) -> dict[str, Any]:
    """
    One benchmark; its score between 0 and 1, the number of questions, and the mean score of each question's answers.

    Raises:
        `RuntimeError`: If answers are missing, because a score over the others would pass for the whole.
    """
    evalscope = job["pairs"][name]["evalscope"]
    report = run_task(task_config(job, name, directory))[evalscope]
    if not report:
        raise RuntimeError(f"there are no questions in {job['pairs'][name]['arguments']}")
    summary = report.execution_summary
    if report.score is None or summary.incomplete:
        raise RuntimeError(f"only {summary.succeeded} of {summary.requested} answers were graded")
    questions = summary.requested // job["pairs"][name]["samples"]
    return {"score": report.score, "questions": questions, "by_question": by_question(directory, report.score)}


def by_question(directory: Path, score: float) -> list[float]:
    """
    The mean score of each question's answers, questions in order; empty where the benchmark's own score is not the
    mean of these.
    """
    found: dict[tuple[str, int], list[float]] = {}
    for path in sorted(directory.glob("reviews/*/*.jsonl")):
        for line in path.read_text().splitlines():
            sample = json.loads(line)["sample_score"]
            value = sample["score"]["value"]
            main = value.get(sample["score"].get("main_score_name") or next(iter(value)))
            found.setdefault((path.name, int(sample["group_id"])), []).append(float(main))
    means = [fmean(found[question]) for question in sorted(found)]
    return means if means and math.isclose(fmean(means), score, abs_tol=1e-3) else []


def advice(error: Exception) -> str:
    """The way out of what goes wrong most: data that cannot be had."""
    if not isinstance(error, OSError):
        return ""
    return ". If it is the data, try the other `hub`, or name a local copy in `dataset_args` (`local_path`)"


def main(path: str) -> None:
    """All benchmarks of a job; one that fails does not keep the others from being done."""
    job = json.loads(Path(path).read_text())
    with make_sandbox() as sandbox:
        install_backend(sandbox)
        for name, pair in job["pairs"].items():
            directory = Path(pair["directory"])
            directory.mkdir(parents=True, exist_ok=True)
            try:
                result = run(job, name, directory)
            except Exception as error:
                traceback.print_exc()
                write_json(directory / "error.json", {"error": f"{type(error).__name__}: {error}{advice(error)}"})
            else:
                write_json(directory / "result.json", result)


if __name__ == "__main__":
    main(sys.argv[1])
