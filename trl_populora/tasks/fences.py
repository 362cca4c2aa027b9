"""Reads the fenced answer format of the code kinds: strictly, so that one text has one reading.

A block opens with a line of three backticks and its name and closes with a line of three backticks; blanks may
follow. The expected blocks stand exactly once and in order. Prose around them is ignored; any other line that starts
with three backticks outside a block, or that would open one inside, makes the whole text malformed. Nothing is
guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
# Texts that were read elsewhere may lack an opening tag that stood in the prompt.
_LINE_CLOSE = re.compile(r"^[ \t]*</think>", re.MULTILINE)
_FENCE = "```"


class FormatError(ValueError):
    """The text does not hold the expected blocks."""


def strip_thinking(text: str) -> str:
    """
    Drops the thinking: what follows the last closing tag that begins a line is the answer.

    Thinking about a text may quote the tag, so any before that is part of the thinking. Where none begins a line, the
    first closing tag after a leading `<think>` ends it.

    Raises:
        `FormatError`: If the thinking is never closed.
    """
    if closings := list(_LINE_CLOSE.finditer(text)):
        return text[closings[-1].end() :]
    body = text.lstrip()
    if not body.startswith(THINK_OPEN):
        return text
    _, found, answer = body.partition(_THINK_CLOSE)
    if not found:
        raise FormatError(f"the text opens {THINK_OPEN} and never closes it")
    return answer


def has_thinking(text: str) -> bool:
    """Whether the text works something out inside `<think>...</think>` before it answers."""
    return text.lstrip().startswith(THINK_OPEN) or _LINE_CLOSE.search(text) is not None


def opens_thinking(prompt: str) -> bool:
    """Whether a prompt ends with the opening tag, as some chat templates have it: the completion begins inside."""
    return prompt.rstrip().endswith(THINK_OPEN)


def read_blocks(text: str, names: Sequence[str]) -> list[str]:
    """
    Contents of the blocks called `names`, in that order, without their fences.

    Raises:
        `FormatError`: If a block is missing, repeated, out of order, unclosed or not one of `names`.
    """
    # The Python tokenizer reads all three line ends as one; after this, lines here are lines there.
    lines = strip_thinking(text.replace("\r\n", "\n").replace("\r", "\n")).split("\n")
    found: list[str] = []
    block: list[str] | None = None
    for line in lines:
        if not line.startswith(_FENCE):
            if block is not None:
                block.append(line)
            elif line.lstrip().startswith(_FENCE):
                raise FormatError(f"indented fence {line.strip()!r:.40}")
            continue
        name = line[len(_FENCE) :].rstrip()
        if block is not None:
            if name:
                raise FormatError(f"fence {name!r:.40} inside block {names[len(found)]!r}")
            found.append("\n".join(block))
            block = None
        elif len(found) == len(names) or name != names[len(found)]:
            wanted = names[len(found)] if len(found) < len(names) else "no further block"
            raise FormatError(f"fence {name!r:.40} where {wanted!r} was expected")
        else:
            block = []
    if block is not None:
        raise FormatError(f"block {names[len(found)]!r} is never closed")
    if len(found) < len(names):
        raise FormatError(f"block {names[len(found)]!r} is missing")
    return found
