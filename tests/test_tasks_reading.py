"""What the tolerant reader takes for an answer: each line of the guide's table, and any text at all."""

from __future__ import annotations

import ast
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.code_tasks import DOUBLE, block
from trl_populora.sandbox.values import encode
from trl_populora.tasks import TASK_KINDS, CodeF, Proposal, Task
from trl_populora.tasks.python.prompts import fence
from trl_populora.tasks.python.reading import ALIASES, FormatError, find_blocks, read_blocks


PAGE = Path(__file__).parent.parent / "docs" / "guides" / "model.md"
ROW = re.compile(r"^\| `(\".*\")` \| (.*?) \| (.*) \|$", re.MULTILINE)
LITERALS = re.compile(r"`(\".*?\")`")
READINGS = [
    (ast.literal_eval(text), re.findall(r"`(\w+)`", names), list(map(ast.literal_eval, LITERALS.findall(read))))
    for text, names, read in ROW.findall(PAGE.read_text())
]

FRAGMENTS = st.sampled_from(
    [
        "```python\n",
        "```py\n",
        "```input\n",
        "```output\n",
        "```json\n",
        "```\n",
        "```",
        "~~~\n",
        "  ```\n",
        "````\n",
        "``` foo\n",
        "3```",
    ]
    + ["\n", "x", " ", "def f(x):\n", "<think>", "</think>", "\n</think>", "\r", "f(1)", "3"]
)


def test_the_table_is_there():
    assert len(READINGS) > 20


@pytest.mark.parametrize(("text", "names", "read"), READINGS, ids=[text for text, _, _ in READINGS])
def test_a_text_is_read_as_the_guide_says(text, names, read):
    if read:
        assert find_blocks(text, names) == read
    else:
        with pytest.raises(FormatError):
            find_blocks(text, names)


@pytest.mark.parametrize("names", [("python", "input"), ("output",), ("input",), ("python",), ("inputs", "message")])
@settings(deadline=None)
@given(st.lists(FRAGMENTS, max_size=14).map("".join))
def test_any_text_is_read_or_refused_and_what_is_read_reads_back(names, text):
    try:
        contents = find_blocks(text, names)
    except FormatError:
        return
    assert len(contents) == len(names)
    if any(re.search(r"```|~~~|^\s*</think>", content, re.MULTILINE) for content in contents):
        return  # within another fence these are content, within this one they end the block
    assert find_blocks(fence(*zip(names, contents, strict=True)), names) == contents


@settings(deadline=None)
@given(st.lists(FRAGMENTS, max_size=10).map("".join))
def test_what_the_strict_reader_takes_is_read_the_same(text):
    try:
        strict = read_blocks(text, ("python", "input"))
    except FormatError:
        return
    if not any("```" in content or "~~~" in content for content in strict):
        assert find_blocks(text, ("python", "input")) == strict


def test_every_name_of_a_block_is_its_own_alias():
    assert all(name in names and names == tuple(map(str.lower, names)) for name, names in ALIASES.items())


def test_more_inputs_than_wanted_are_left_out_where_reading_is_tolerant():
    known = Task("code_o", DOUBLE, (encode((1,)),), (encode(2),))
    text = block("inputs", "1\n\n2\n3") + "\n" + block("message", "twice")
    kind = CodeF(inputs_per_task=2)
    assert "has 4 lines, not 2" in kind.parse_proposal(text, [known]).detail
    kind.reading = "tolerant"
    assert kind.parse_proposal(text, [known]) == Proposal("code_f", DOUBLE, (encode((1,)), encode((2,))), "twice")
    assert "has 1 lines, not 2" in kind.parse_proposal(text.replace("2\n3", ""), [known]).detail


@pytest.mark.parametrize("name", TASK_KINDS)
def test_a_refusal_says_what_is_missing(name):
    kind = TASK_KINDS[name]()
    kind.reading = "tolerant"
    detail = kind.parse_proposal("I would rather not.", [Task("code_o", DOUBLE, (encode((1,)),), (encode(2),))]).detail
    assert re.fullmatch(r"there is no ```(python|inputs) block", detail)


@pytest.mark.parametrize("line", ["~" * 20_000 + "`", " " * 20_000 + "~~", "```" + "a" * 20_000 + "`", "'`" * 10_000])
def test_a_line_of_one_sign_does_not_hang_the_reader(line):
    def ring(*_):
        pytest.fail("reading takes more than 10 seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(10)
    try:
        for text in (line, f"```output\n{line}\n```"):
            with suppress(FormatError):
                find_blocks(text, ("output",))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
