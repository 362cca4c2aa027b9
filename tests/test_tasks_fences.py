"""The answer format is strict: one text has one reading, and lookalikes have none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_populora.tasks.python.prompts import fence
from trl_populora.tasks.python.reading import FormatError, read_blocks, strip_thinking


NAMES = ("python", "input")
GOOD = "```python\nx\n```\n```input\n3\n```"

FRAGMENTS = st.sampled_from(
    [
        "```python\n",
        "```input\n",
        "```\n",
        "```",
        "\n",
        "x",
        " ",
        "<think>",
        "</think>",
        "\n</think>",
        "\r",
        "````",
        "f(1)",
    ]
)


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        GOOD + "\n",
        "  \n" + GOOD,
        GOOD.replace("\n", "\r\n"),
        "Here it is:\n" + GOOD.replace("```\n```", "```\nand its input\n```") + "\nDone.",
        "<think>a ```python``` draft\n```python\nwrong\n```\n</think>\n" + GOOD,
        "\n<think></think>" + GOOD,
        "<think>the string is '</think>',\n```python\nwrong\n```\n</think>\n" + GOOD,
        "the string is '</think>'\n</think>\n" + GOOD,
        "<think>a line may begin with\n</think>\n" + GOOD + "\n</think>\n" + GOOD,
        "a thought whose opening tag stood in the prompt\n```python\nwrong\n```\n</think>\n" + GOOD,
        "```python  \nx\n```\t\n```input\n3\n```  ",
    ],
)
def test_a_well_formed_text_is_read(text):
    assert read_blocks(text, NAMES) == ["x", "3"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "```python\nx\n```",  # a block is missing
        "```python\nx\n```\n```input\n3",  # unclosed
        "```python\nx\n```input\n3\n```",  # opened inside the other
        "```input\n3\n```\n```python\nx\n```",  # wrong order
        GOOD + "\n" + GOOD,  # everything twice
        GOOD + "\n```input\n4\n```",  # a second answer
        "```python\nx\n```\n" + GOOD,
        GOOD + "\n```output\n4\n```",  # a block of another kind
        GOOD + "\n```\n4\n```",  # a block without a name
        GOOD + "\n```",
        GOOD.replace("```python", "```Python"),
        GOOD.replace("```python", "``` python"),
        GOOD.replace("```python", "````python"),
        GOOD.replace("```python", "```python x"),
        GOOD.replace("```python", "~~~python"),
        GOOD.replace("```python", "\uff40\uff40\uff40python"),  # full-width backticks
        GOOD.replace("```python", " ```python"),  # indented
        "```python\nx\n```\n  ```input\n4\n  ```\n```input\n3\n```",
        "<think>" + GOOD,  # thinking that never ends
        "<think></think>```python\nx\n</think>\n```\n```input\n3\n```",
    ],
)
def test_a_malformed_text_is_refused(text):
    with pytest.raises(FormatError):
        read_blocks(text, NAMES)


def test_a_tag_in_the_middle_of_an_answer_is_not_thinking():
    text = "```output\n'</think>'\n```"
    assert strip_thinking(text) == text
    assert read_blocks(text, ("output",)) == ["'</think>'"]


def test_indented_fences_inside_a_block_are_content():
    assert read_blocks("```python\ns = '''\n  ```\n'''\n```", ("python",)) == ["s = '''\n  ```\n'''"]


@settings(deadline=None)
@given(st.lists(st.text(alphabet="ab` \n</think>", max_size=12), min_size=2, max_size=2))
def test_what_is_fenced_reads_back(contents):
    clean = [
        text
        for text in contents
        if not any(line.lstrip().startswith(("```", "</think>")) for line in text.split("\n"))
    ]
    if len(clean) == 2:
        assert read_blocks(fence(("python", clean[0]), ("input", clean[1])), NAMES) == clean


@settings(deadline=None)
@given(st.lists(FRAGMENTS, max_size=14).map("".join))
def test_any_text_is_either_read_or_refused_and_never_both(text):
    try:
        contents = read_blocks(text, NAMES)
    except FormatError:
        return
    assert read_blocks(fence(*zip(NAMES, contents, strict=True)), NAMES) == contents
