"""What `populora evaluate` does, in order."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trl_populora.evaluation.benchmarks.contenders import BASE, find_contenders, find_question_options
from trl_populora.evaluation.benchmarks.jobs import Pair, make_pairs, run
from trl_populora.evaluation.benchmarks.server import connect, further_flags, run_server
from trl_populora.evaluation.benchmarks.settings import EvaluateArguments
from trl_populora.evaluation.benchmarks.suite import BENCHMARKS
from trl_populora.evaluation.benchmarks.table import make_table, save, show
from trl_populora.hub.downloads import fetch
from trl_populora.population.members import read_population


ANSWERS = "_evaluation"  # the underscore keeps the benchmarks' questions out of what `populora push` uploads


def evaluate(settings: EvaluateArguments, out: Path, say: Callable[[str], None]) -> None:
    """
    Evaluates a population and writes the tables.

    Args:
        settings ([`EvaluateArguments`]): The command's options.
        out (`Path`): Takes `evaluation.json`, `.md` and `.png`, and the answers in `_evaluation/`.
        say (`Callable`): Takes lines of progress.

    Raises:
        `ValueError`: If an option does not fit the population.
        `RuntimeError`: If EvalScope or vLLM is missing, the server fails, or a benchmark could not be done. What is
            finished is kept, and the tables show it.
    """
    if importlib.util.find_spec("evalscope") is None:
        raise RuntimeError("EvalScope is not installed. Install it with `pip install -e '.[eval]'`.")
    base, contenders = find_contenders(settings.run, settings.members, settings.compare, settings.base)
    root = out / ANSWERS
    root.mkdir(parents=True, exist_ok=True)
    along = find_question_options(settings.run)
    pairs = make_pairs(settings, base, contenders, root, along)
    waiting = [pair for pair in pairs if pair.result is None]
    failed = []
    if len(waiting) < len(pairs):
        say(f"{len(pairs) - len(waiting)} of {len(pairs)} are finished already.")
    if waiting:
        with contextlib.ExitStack() as stack:
            if settings.server:
                server, name = connect(settings.server, contenders)
            else:
                say(f"Starting a vLLM server with {base} and {len(contenders) - 1} adapters ...")
                server = stack.enter_context(
                    run_server(base, contenders, further_flags(settings), root / "server.log")
                )
                name = BASE
            server.check_room(settings.max_tokens)
            say(f"{len(contenders)} contenders answer {len(settings.benchmarks)} benchmarks at {server.url}.")
            failed = run(settings, waiting, server, name, root, along, say)
    table = make_table(pairs)
    chosen = ("samples", "temperature", "max_tokens", "limit", "hub", "server", "server_args")
    details = {"run": settings.run, "base_model": base} | {each: getattr(settings, each) for each in chosen}
    save(table, out, details | describe(settings, pairs))
    show(table, f"{settings.run} on {base}")
    if failed:
        raise RuntimeError(
            f"{len(failed)} of {len(pairs)} could not be done; the same command tries these again.\n"
            + "\n".join(failed)
        )


def describe(settings: EvaluateArguments, pairs: Sequence[Pair]) -> dict[str, Any]:
    """
    What it takes to measure the scores again, and where the Hub keeps them.

    Returns:
        `dict`: `step` of the population, `date` of the last score, `options`, `versions`; in `benchmarks` by name
        `title`, `revision` of local questions (a digest), and `dataset` and `task` on the Hub, where the whole
        benchmark was asked.
    """
    done = [pair.directory / "result.json" for pair in pairs if pair.result is not None]
    last = max((path.stat().st_mtime for path in done), default=None)
    whole = settings.limit is None and settings.dataset_args is None
    benchmarks = {}
    for pair in pairs:
        benchmark = BENCHMARKS[pair.benchmark]
        dataset, task = benchmark.hub if benchmark.hub and whole else (None, None)
        revision = _digest(Path(pair.arguments["local_path"])) if "local_path" in pair.arguments else None
        about = {"title": benchmark.title, "revision": revision, "dataset": dataset, "task": task}
        benchmarks[pair.benchmark] = about
    return {
        "step": read_population(fetch(settings.run))["step"],
        "date": None if last is None else datetime.fromtimestamp(last, UTC).date().isoformat(),
        "options": settings.options(),
        "versions": {"evalscope": version("evalscope")},
        "benchmarks": benchmarks,
    }


def _digest(directory: Path) -> str:
    """Of all files' contents."""
    seen = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        seen.update(path.read_bytes())
    return f"sha256:{seen.hexdigest()[:16]}"
