"""What `populora evaluate` does, in order."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from trl_populora.evaluation.benchmarks.contenders import BASE, asked_as_trained, find_contenders
from trl_populora.evaluation.benchmarks.jobs import make_pairs, run
from trl_populora.evaluation.benchmarks.server import connect, further_flags, served
from trl_populora.evaluation.benchmarks.settings import EvaluateArguments
from trl_populora.evaluation.benchmarks.table import make_table, save, show


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
    along = asked_as_trained(settings.run)
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
                server = stack.enter_context(served(base, contenders, further_flags(settings), root / "server.log"))
                name = BASE
            server.check_room(settings.max_tokens)
            say(f"{len(contenders)} contenders answer {len(settings.benchmarks)} benchmarks at {server.url}.")
            failed = run(settings, waiting, server, name, root, along, say)
    table = make_table(pairs)
    chosen = ("samples", "temperature", "max_tokens", "limit", "hub", "server", "server_args")
    save(table, out, {"run": settings.run, "base_model": base} | {each: getattr(settings, each) for each in chosen})
    show(table, f"{settings.run} on {base}")
    if failed:
        raise RuntimeError(
            f"{len(failed)} of {len(pairs)} could not be done; the same command tries these again.\n"
            + "\n".join(failed)
        )
