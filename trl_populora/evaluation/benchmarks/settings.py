"""The options of `populora evaluate`."""

from __future__ import annotations

import json
import shlex
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from trl_populora.evaluation.benchmarks.suite import BENCHMARKS, PAPER, check_benchmarks
from trl_populora.tasks.bounds import check_bounds, check_numbers


@dataclass
class EvaluateArguments:
    """What `populora evaluate` needs; the help of each option says what it is."""

    run: str = field(metadata={"help": "Directory of a run, or the Hub name of a population."})
    benchmarks: list[str] = field(
        default_factory=lambda: list(PAPER),
        metadata={"help": f"Some of {', '.join(BENCHMARKS)}; the first ten by default."},
    )
    members: list[str] | None = field(default=None, metadata={"help": "Members to evaluate; all by default."})
    compare: list[str] | None = field(
        default=None, metadata={"help": "Other runs, populations or PEFT adapters: a column each (the single agent)."}
    )
    server: str | None = field(
        default=None, metadata={"help": "URL of a running vLLM server that holds all adapters under their names."}
    )
    server_args: str = field(
        default="", metadata={"help": 'Flags for the vLLM server, as "--tensor-parallel-size 2".'}
    )
    base: str | None = field(default=None, metadata={"help": "The base model; the population's by default."})
    dataset_args: str | None = field(
        default=None, metadata={"help": "YAML or JSON file: EvalScope's dataset_args by benchmark, over ours."}
    )
    hub: str = field(default="huggingface", metadata={"help": "Where data comes from: huggingface or modelscope."})
    limit: int | None = field(default=None, metadata={"help": "Questions per subset of a benchmark; all by default."})
    samples: int = field(default=1, metadata={"help": "Answers per question; the score is their mean."})
    temperature: float = field(
        default=0.0, metadata={"help": "Sampling temperature; greedy, as Absolute Zero evaluates, by default."}
    )
    max_tokens: int = field(default=8192, metadata={"help": "Longest answer, in tokens."})
    concurrency: int = field(default=32, metadata={"help": "Questions of one contender under way at once."})
    out: str | None = field(default=None, metadata={"help": "Where tables and answers go; the run by default."})

    def __post_init__(self):
        check_benchmarks(self.benchmarks)
        if self.hub not in ("huggingface", "modelscope"):
            raise ValueError(f"`hub` must be huggingface or modelscope, got {self.hub!r}.")
        check_numbers(self)
        check_bounds(self, {">= 1": "limit samples max_tokens concurrency", ">= 0": "temperature"})
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(f"`samples={self.samples}` greedy answers are all the same; set `temperature` too.")

    def sampling(self, benchmark: str) -> dict[str, Any]:
        """How many answers a question gets and at which temperature."""
        return {"samples": self.samples, "temperature": self.temperature} | BENCHMARKS[benchmark].sampling

    def options(self) -> str:
        """The options that were given, as on a command line, but run, server and `out`, which are this machine's."""
        words: list[str] = []
        for each in fields(self):
            default = each.default if each.default_factory is MISSING else each.default_factory()
            value = getattr(self, each.name)
            if each.name in ("run", "server", "out") or value == default:
                continue
            words += [f"--{each.name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
        return shlex.join(words)

    def dataset_arguments(self) -> dict[str, dict[str, Any]]:
        """
        EvalScope's `dataset_args` of every chosen benchmark.

        Raises:
            `ValueError`: If the file cannot be read or names an unknown benchmark or a path that does not exist.
        """
        given = _read(self.dataset_args) if self.dataset_args else {}
        if given:
            check_benchmarks(list(given))
        return {name: BENCHMARKS[name].arguments | given.get(name, {}) for name in self.benchmarks}


def _read(path: str) -> dict[str, dict[str, Any]]:
    import yaml

    try:
        given = yaml.safe_load(Path(path).read_text())  # JSON is YAML
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"`dataset_args={path!r}` cannot be read ({error}).") from error
    if not isinstance(given, dict) or not all(isinstance(each, dict) for each in given.values()):
        raise ValueError(f"`dataset_args={path!r}` must map benchmarks to settings, got {json.dumps(given)[:200]}.")
    for name, settings in given.items():
        if "local_path" in settings:
            local = Path(path).parent / settings["local_path"]
            if not local.exists():
                raise ValueError(f"{path}: `{name}.local_path` names {str(local)!r}, which does not exist.")
            settings["local_path"] = str(local.resolve())
    return given
