"""What `populora try` prints: a table of shares, a text of each failure, and the settings that follow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from trl_populora.errors import printable

from .tryout import Form, TryArguments, Tryout


EXCERPT = 12  # lines of a failed text
LINE = 200  # characters of one
COOLER = 0.7  # at which small bases are read more often, see benchmarks/RESULTS.md
CERTAINTY = 1.96  # standard errors on both sides of a share


def show(found: Tryout, options: TryArguments) -> Iterator[str]:
    """The lines, in order."""
    form = found.choose()
    forms = list(dict.fromkeys(question.form for question in found.questions))
    width = max(len(str(each)) for each in [*forms, *found.left_out])
    yield f"{'form':<{width}}  kind      {'proposals':^33}  {'answers':^33}"
    yield f"{'':<{width}}            {'readable':<16} {'valid':<16}  {'readable':<16} right"
    for each in forms:
        for kind in dict.fromkeys(question.kind for question in found.questions):
            sides = [] if each.shots else [found.of("teacher", each, kind)]
            cells = [f"{_share(o.readable for o in side):<16} {_share(o.good for o in side):<16}" for side in sides]
            answers = found.of("student", each, kind)
            if answers:
                cells = cells or [" " * 33]
                cells.append(f"{_share(o.readable for o in answers):<16} {_share(o.good for o in answers)}")
            if cells:
                yield f"{str(each):<{width}}  {kind:<8}  {'  '.join(cells)}"
    for each, why in found.left_out.items():
        yield f"{str(each):<{width}}  not tried: {printable(why[:LINE])}"
    if any(each.shots for each in forms):
        yield "Teachers are asked without shots (solved tasks), which are for students alone."
    yield ""
    yield from _failures(found, form)
    yield f"{found.tokens_per_second:.0f} tokens a second; {_share(found.cut)} of the completions were cut."
    yield f"Groups of attempts that differ, which teach students: {100 * found.measure_mixed(form):.0f} %."
    yield ""
    if obstacles := found.obstacles():
        yield f"Nothing can be learned yet with {form}: {', and '.join(obstacles)}."
        yield from _ways_out(obstacles, options)
        return
    yield "Settings that fit:"
    yield f"  task_kinds: [{', '.join(options.task_kinds)}]"
    yield f"  prompt_style: {form.style}"
    yield f"  shots: {form.shots}"
    yield f"  max_completion_length: {found.advise_length()}"
    yield f"  inputs_per_function: {options.inputs}"
    yield f"  temperature: {options.temperature}"
    yield f"Completions end at the tokens {', '.join(map(str, sorted(found.ends)))}, which the trainer finds itself."


def _ways_out(obstacles: Sequence[str], options: TryArguments) -> Iterator[str]:
    if obstacles == ["every answer is right"]:
        yield "The tasks are too easy for this base: give harder ones with `--seed_tasks`, or train without a try."
        return
    cooler = f"`--temperature {COOLER}` makes fewer mistakes; " if options.temperature > COOLER else ""
    yield (
        "Ways out: a cold start (`recipes/cold_start.py`) teaches the format; a larger or instruction-tuned base "
        f"knows it; {cooler}`--max_completion_length` may cut answers; `--samples 64` tells small shares from none."
    )


def _failures(found: Tryout, form: Form) -> Iterator[str]:
    """For each role and reason the first text that failed so in a form."""
    seen = set()
    for question, completion, outcome in zip(found.questions, found.completions, found.outcomes, strict=True):
        mine = question.form == (form if question.role == "student" else Form(form.style))
        if not mine or outcome.good or (question.role, outcome.reason) in seen:
            continue
        seen.add((question.role, outcome.reason))
        count = sum(o.reason == outcome.reason for o in found.of(question.role, form))
        why = f": {printable(outcome.detail[:LINE])}" if outcome.detail else ""
        yield f"--- {question.role}, {question.kind}, {outcome.reason} ({count} times){why}"
        lines = completion.text.splitlines()
        yield from (printable(line[:LINE], keep="\t", instead="?") for line in lines[:EXCERPT])
        if len(lines) > EXCERPT:
            yield f"(and {len(lines) - EXCERPT} more lines)"
        yield ""


def _share(flags: Iterator[bool] | Sequence[bool]) -> str:
    """A share in percent with its 95 % interval (Wilson's, which holds near 0 and 1)."""
    flags = list(flags)
    n, p, z = len(flags), fmean(flags), CERTAINTY
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return f"{100 * p:3.0f} % [{100 * max(0, middle - half):.0f}, {100 * min(1, middle + half):.0f}]"
