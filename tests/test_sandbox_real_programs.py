"""Programs that language models wrote, against the outputs recorded for them; skipped where the files are absent.

They are the seed tasks published with Absolute Zero Reasoner (github.com/LeapLabTHU/Absolute-Zero-Reasoner, MIT
licence, commit a82124e), written by Qwen2.5-Coder-3B, and not copied into this repository.

Of the 256 rows of `azr_seed_3b_coder.jsonl`, 240 agree with their recorded output. The other 16, all explained:

| rows | verdict | why |
|---|---|---|
| 46, 191, 213 | bad_output | a `defaultdict` or `Counter`; recorded is its repr, ours takes plain data |
| 98, 186, 217, 218 | bad_output | a generator or `reversed` object; their check recorded an empty output for it |
| 128 | bad_output | the output holds `dict_items`; recorded is its repr |
| 224 | bad_output | the output needs more than 65536 bytes; recorded is cut at 403 characters |
| 85, 116 | policy | imports numpy, sympy, which are not in the standard library |
| 107, 194, 251 | policy | imports timeit or os, which are not on the allow-list; none of the three needs it |
| 16, 198 | ok | the program runs and has a value; their check rejected it and recorded an empty output |

Of the first two inputs of the 256 rows of `azr_seed_3b_coder_code_f.jsonl`, all but those of 16 rows agree:

| rows | verdict | why |
|---|---|---|
| 2, 55, 70, 72, 84, 250 | bad_output | a generator or `reversed` object, recorded as empty |
| 186 | bad_output | a `defaultdict` |
| 16, 71, 164, 242 | policy | imports os (needs it not) or sympy |
| 12, 83 | ok | the recorded output was cut in its middle (`...`, 403 characters), row 12 inside a string |
| 189, 227, 245 | ok | recorded as empty |
"""

import contextlib
import json
import re
from pathlib import Path

import pytest

from trl_populora.sandbox import Job, Limits, Sandbox
from trl_populora.sandbox.literals import LiteralError, read_arguments, read_literal
from trl_populora.sandbox.values import decode, encode, equal


ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
EXPLAINED = {
    "azr_seed_3b_coder": {
        "bad_output": {46, 191, 213, 98, 186, 217, 218, 128, 224},
        "policy": {85, 116, 107, 194, 251},
        "no recorded output": {16, 198},
    },
    "azr_seed_3b_coder_code_f": {
        "bad_output": {2, 55, 70, 72, 84, 250, 186},
        "policy": {16, 71, 164, 242},
        "no recorded output": {12, 83, 189, 227, 245},
    },
}

CALL = re.compile(r"\s*f\(.*\)\s*$", re.DOTALL)
REORDERED = {"azr_seed_3b_coder": 7, "azr_seed_3b_coder_code_f": 127}  # inputs with a dict whose keys are not sorted


def calls(row):
    """The recorded inputs and outputs; inputs are expressions, so they are evaluated inside the sandbox."""
    return zip(row.get("inputs") or [row["input"]], row.get("outputs") or [row["output"]], strict=False)


def outcome(verdict, recorded):
    if verdict.status != "ok":
        return str(verdict.status)
    if len(recorded) == 403 and "..." in recorded:
        return "no recorded output"
    try:
        known = read_literal(recorded)
    except LiteralError:
        return "no recorded output"
    return "agree" if equal(decode(verdict.outputs[0]), known) else "differ"


def read_rows(name):
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(
            f"{path.name}, 256 seed tasks of Absolute Zero Reasoner (github.com/LeapLabTHU/Absolute-Zero-Reasoner, "
            f"MIT, commit a82124e), is not in {DATA.relative_to(ROOT.parent)} beside the clone"
        )
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_python(snippet, given, runs=1):
    """The call as Python itself makes it, its arguments an expression in the program's own text."""
    return Job(f"{snippet}\ndef call_it():\n    return f({given})\n", (encode(()),), runs=runs, function="call_it")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPLAINED)
def test_every_program_is_judged_and_agrees_or_is_explained(name):
    rows = read_rows(name)
    pairs = [(index, row["snippet"], *pair) for index, row in enumerate(rows) for pair in list(calls(row))[:2]]
    jobs = [by_python(snippet, given, runs=2) for _, snippet, given, _ in pairs]
    with Sandbox(workers=2, limits=Limits(cpu_seconds=30)) as sandbox:
        verdicts = sandbox.run(jobs)
    found = {}
    for (index, _, _, recorded), verdict in zip(pairs, verdicts, strict=True):
        found.setdefault(outcome(verdict, recorded), set()).add(index)
    agreed = found.pop("agree")
    assert found == EXPLAINED[name]
    assert len(agreed | set().union(*found.values())) == len(rows) == 256


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPLAINED)
def test_inputs_as_tasks_keep_them_give_what_python_gives(name):
    """
    All that are literals, dictionaries in the order written; those written as a call, which is read as its arguments.
    """
    pairs = []
    for row in read_rows(name):
        for number, (given, _) in enumerate(calls(row)):
            with contextlib.suppress(LiteralError):
                arguments = read_arguments(given)
                written = encode(arguments, ordered=True)
                if number < 2 or written != encode(arguments):
                    plain = given.strip().removeprefix("f(").removesuffix(")") if CALL.match(given) else given
                    pairs.append((row["snippet"], plain, written))
    with Sandbox(workers=2, limits=Limits(cpu_seconds=30)) as sandbox:
        pythons = sandbox.run([by_python(snippet, given) for snippet, given, _ in pairs])
        ours = sandbox.run([Job(snippet, (written,)) for snippet, _, written in pairs])
    disagreeing = [
        pair
        for pair, one, other in zip(pairs, pythons, ours, strict=True)
        if (one.status, one.outputs) != (other.status, other.outputs)
    ]
    assert disagreeing == []
    assert sum(encode(decode(written)) != written for _, _, written in pairs) == REORDERED[name]
