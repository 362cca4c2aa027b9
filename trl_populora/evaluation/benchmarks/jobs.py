"""Every contender in a process of its own, all at once, against one server; what is finished stays finished.

The directory of a (contender, benchmark) pair carries a digest of the adapter, the base, the server, the data and the
settings, so a pair is done again exactly when one of them changed. EvalScope keeps answers there as they come, so that
a pair which was interrupted goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_populora.evaluation.benchmarks.contenders import BASE, Contender
from trl_populora.evaluation.benchmarks.processes import end, start
from trl_populora.evaluation.benchmarks.server import Server, further_flags
from trl_populora.evaluation.benchmarks.settings import EvaluateArguments
from trl_populora.evaluation.benchmarks.suite import BENCHMARKS
from trl_populora.files import write_json


@dataclass(frozen=True)
class Pair:
    """One contender on one benchmark, and where its answers are."""

    contender: Contender
    benchmark: str
    arguments: dict[str, Any]
    directory: Path

    @property
    def result(self) -> dict[str, Any] | None:
        """`score` (0 to 1) and `questions`, once it is finished."""
        path = self.directory / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def error(self) -> str | None:
        path = self.directory / "error.json"
        return json.loads(path.read_text())["error"] if path.exists() else None

    def answered(self) -> int:
        """Answers so far; they are graded when all are there."""
        return sum(path.read_bytes().count(b"\n") for path in self.directory.glob("predictions/*/*.jsonl"))


def make_pairs(
    settings: EvaluateArguments, base: str, contenders: Sequence[Contender], root: Path, along: dict[str, Any]
) -> list[Pair]:
    """All pairs, finished or not; `along` goes with every question."""
    pairs = []
    arguments = settings.dataset_arguments()
    how: list[Any] = [settings.limit, settings.samples, settings.temperature, settings.max_tokens, settings.hub]
    how += [along] if along else []
    how += [each for each in (settings.server or further_flags(settings), _state(Path(base))) if each]
    for contender in contenders:
        who = contender.digest(base)
        for name in settings.benchmarks:
            what = json.dumps([who, name, arguments[name], _data(arguments[name]), how], sort_keys=True)
            folder = f"{contender.name}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"
            pairs.append(Pair(contender, name, arguments[name], root / name / folder))
    return pairs


def _data(arguments: dict[str, Any]) -> list:
    """State of a benchmark's local data, if it has any."""
    return _state(Path(arguments["local_path"])) if "local_path" in arguments else []


def _state(directory: Path) -> list:
    """Names, sizes and times of local files; a name of the Hub has none."""
    files = sorted(path for path in directory.rglob("*") if path.is_file()) if directory.is_dir() else []
    return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _own_cache(pairs: Sequence[Pair], root: Path) -> dict[str, str]:
    """`datasets` knows local data by its path alone and would go on reading a version that has been changed since."""
    local = [state for pair in pairs if (state := _data(pair.arguments))]
    if not local:
        return {}
    return {"HF_DATASETS_CACHE": str(root / "data" / hashlib.sha256(json.dumps(local).encode()).hexdigest()[:12])}


def run(
    settings: EvaluateArguments,
    pairs: Sequence[Pair],
    server: Server,
    base: str,
    root: Path,
    along: dict[str, Any],
    say: Callable[[str], None],
) -> list[str]:
    """
    Runs unfinished pairs, contenders side by side, each through its benchmarks in order.

    Args:
        settings ([`EvaluateArguments`]): The command's options.
        pairs (`Sequence[Pair]`): What is to be done.
        server ([`Server`]): Who answers.
        base (`str`): The server's name for the base.
        root (`Path`): Takes the jobs and logs.
        along (`dict`): Goes with every question, see [`~contenders.find_question_options`].
        say (`Callable`): Takes a line for every finished pair, and one a minute between.

    Returns:
        `list[str]`: What went wrong, one line per pair.

    Raises:
        `RuntimeError`: If the server ends.
    """
    columns = list(dict.fromkeys(pair.contender for pair in pairs))
    for pair in pairs:
        (pair.directory / "error.json").unlink(missing_ok=True)
    processes = {}
    try:
        for contender in columns:
            own = [pair for pair in pairs if pair.contender == contender]
            path, log = root / f"{contender.name}.json", root / f"{contender.name}.log"
            model = base if contender.name == BASE else contender.name
            write_json(path, _job(settings, own, server.url, model, along))
            # The workers share the cores for programs.
            environment = {"LOCAL_WORLD_SIZE": str(len(columns)), "OPENAI_API_KEY": "none"} | _own_cache(pairs, root)
            processes[contender] = start(
                ["-m", "trl_populora.evaluation.benchmarks.worker", str(path)], log, **environment
            )
        _watch(pairs, processes, server, say)
    finally:
        for process in processes.values():
            end(process)
    failed = []
    for pair in pairs:
        if pair.result is None:
            log = root / f"{pair.contender.name}.log"
            reason = pair.error or f"its process ended with code {processes[pair.contender].returncode}"
            failed.append(f"{pair.contender.name} on {pair.benchmark}: {reason[:500]} (see {log})")
    return failed


def _job(
    settings: EvaluateArguments, pairs: Sequence[Pair], url: str, model: str, along: dict[str, Any]
) -> dict[str, Any]:
    """What `worker.py` reads."""
    shared = ("hub", "limit", "max_tokens", "concurrency")
    return {
        "model": model,
        "url": url,
        "along": along,
        "pairs": {
            pair.benchmark: {
                "evalscope": BENCHMARKS[pair.benchmark].evalscope,
                "arguments": pair.arguments,
                "directory": str(pair.directory.resolve()),
                **settings.sampling(pair.benchmark),
            }
            for pair in pairs
        },
        **{name: getattr(settings, name) for name in shared},
    }


def _watch(pairs: Sequence[Pair], processes: dict, server: Server, say: Callable[[str], None]) -> None:
    """Returns when every process has ended."""
    open_pairs, started = list(pairs), time.perf_counter()
    next_word = started + 60
    running = True
    while running:
        running = any(process.poll() is None for process in processes.values())
        server.check()
        for pair in [pair for pair in open_pairs if pair.result or pair.error]:
            open_pairs.remove(pair)
            outcome = f"{100 * pair.result['score']:.1f} %" if pair.result else "failed"
            done = f"[{len(pairs) - len(open_pairs)}/{len(pairs)}]"
            say(f"{done} {pair.contender.name} on {BENCHMARKS[pair.benchmark].title}: {outcome}")
        if time.perf_counter() > next_word:
            next_word += 60
            answers = sum(pair.answered() for pair in pairs)
            say(f"{answers} answers after {(time.perf_counter() - started) / 60:.0f} minutes")
        if running:
            time.sleep(0.2)
