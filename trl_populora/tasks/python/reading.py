"""Reads the fenced blocks of a completion: strictly ([`read_blocks`]) or tolerantly ([`find_blocks`]).

Both readers first drop the thinking. The strict reader wants this format, and guesses nothing:

* A block begins with a line of three backticks and its name. It ends with a line of three backticks. Blanks may
  follow.
* The expected blocks stand once each, in order. Text around them is ignored.
* No other line outside of a block starts with three backticks, not even behind blanks. No line inside of a block
  starts with three backticks and a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
# Only the closing tag is needed: with some chat templates the opening tag stands in the prompt.
_LINE_CLOSE = re.compile(r"^[ \t]*</think>", re.MULTILINE)
_FENCE = "```"


class FormatError(ValueError):
    """An error: a text does not hold the expected blocks, or never closes its thinking."""


def strip_thinking(text: str) -> str:
    """
    Drops the thinking, and returns the answer that follows it.

    The thinking ends with the last closing tag that begins a line. If no closing tag begins a line, it ends with the
    first one after a leading `<think>`. A text that does not think (see [`has_thinking`]) is an answer as a whole.

    Raises:
        `FormatError`: If the thinking is never closed.
    """
    # The last one, because thinking about the format may quote the tag.
    if closings := list(_LINE_CLOSE.finditer(text)):
        return text[closings[-1].end() :]
    body = text.lstrip()
    if not body.startswith(THINK_OPEN):
        return text
    _, found, answer = body.partition(THINK_CLOSE)
    if not found:
        raise FormatError(f"the text opens {THINK_OPEN} and never closes it")
    return answer


def has_thinking(text: str) -> bool:
    """Says whether a text thinks: it begins with `<think>`, or one of its lines begins with `</think>`."""
    return text.lstrip().startswith(THINK_OPEN) or _LINE_CLOSE.search(text) is not None


def opens_thinking(prompt: str) -> bool:
    """Says whether a prompt ends with `<think>`, as with some chat templates. The completion then thinks at once."""
    return prompt.rstrip().endswith(THINK_OPEN)


def read_blocks(text: str, names: Sequence[str]) -> list[str]:
    """
    Reads blocks strictly. Returns the contents of the blocks called `names`, without their fences.

    Args:
        text: A completion.
        names: Names of the expected blocks, in the order in which they must stand.

    Raises:
        `FormatError`: If the thinking is never closed, or if a block is missing, repeated, out of order, unclosed,
            indented or not one of `names`.
    """
    # Python's tokenizer takes `\r\n` and `\r` for ends of lines, too. So programs have the same lines here and
    # there.
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


# The tolerant reader, for chat models. It forgives how a block is fenced, never what is in it:
#
# * A fence may be indented, and may have more than three backticks, or tildes. Its name may be in upper case. A fence
#   with one of the names below inside of a block ends that block and begins the next. A block that is not closed ends
#   with the text.
# * Names have the aliases below. If no block has the name, a block without a name may stand for it. A message may also
#   stand in a block of plain text, and a value in one of plain text, JSON or Python.
# * If several blocks fit, the last one counts: the others are drafts. A Python block that defines no `f` counts only
#   if no other one defines it. Blocks that nobody asked for are ignored.


ALIASES = {
    "python": ("python", "py", "python3"),
    "input": ("input", "inputs", "arguments", "args"),
    "output": ("output", "outputs", "result", "return", "answer"),
    "inputs": ("inputs", "input"),
    "message": ("message", "hint"),
}
_PLAIN = ("", "text", "txt", "plaintext")
# Names of blocks that are taken for the wanted one if no block has one of its aliases.
STAND_INS = {"python": ("",), "message": _PLAIN} | dict.fromkeys(
    ("input", "output", "inputs"), (*_PLAIN, "json", *ALIASES["python"])
)

_FENCE_LINE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*")
_DEFINES_F = re.compile(r"^def f\b", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its name in lower case, and its lines without the indentation of the fence."""

    name: str
    content: str


def find_blocks(text: str, names: Sequence[str]) -> list[str]:
    """
    Reads blocks tolerantly. Returns the contents of the blocks called `names`, without their fences.

    Args:
        text: A completion.
        names: One or two keys of `ALIASES`. The second block must stand after the first.

    Raises:
        `FormatError`: If the thinking is never closed, or if a block is missing.
    """
    blocks = list(_split_blocks(strip_thinking(text.replace("\r\n", "\n").replace("\r", "\n"))))
    first, *second = names
    firsts = _find_fitting(blocks, first)
    if not firsts:
        raise FormatError(f"there is no ```{first} block")
    if not second:
        return [blocks[firsts[-1]].content]
    # The second block must stand before the next block that may be the first one. Otherwise the first block of an
    # unfinished draft would be taken together with the second block of another draft.
    for start, end in reversed(list(zip(firsts, [*firsts[1:], len(blocks)], strict=True))):
        between = blocks[start + 1 : end]
        if found := _find_fitting(between, second[0]):
            return [blocks[start].content, between[found[-1]].content]
    raise FormatError(f"there is no ```{second[0]} block behind the ```{first} block")


def _split_blocks(text: str) -> Iterator[Block]:
    """Yields all fenced blocks of a text, in order."""
    name, indent, fence = "", 0, ""
    lines: list[str] | None = None
    for line in text.split("\n"):
        match = _FENCE_LINE.fullmatch(line)
        if match is None or (lines is not None and not _ends_block(match, fence)):
            if lines is not None:
                lines.append(line[:indent].lstrip(" \t") + line[indent:])
            continue
        if lines is not None:
            yield Block(name, "\n".join(lines))
            lines = None
            # A fence with a name has ended one block, and begins the next.
            if not match[3]:
                continue
        name, indent, fence, lines = match[3].lower(), len(match[1]), match[2], []
    if lines is not None:
        yield Block(name, "\n".join(lines))


def _ends_block(match: re.Match, fence: str) -> bool:
    """
    Says whether a fence ends a block: it has a name of `ALIASES`, or it has no name, the same marks and at least the
    same length.
    """
    if match[3]:
        return any(match[3].lower() in names for names in ALIASES.values())
    return match[2].startswith(fence)


def _find_fitting(blocks: Sequence[Block], name: str) -> list[int]:
    """Finds the blocks that `name` may mean. Returns their places in `blocks`; empty if there is none."""
    for names in (ALIASES[name], STAND_INS[name]):
        found = [number for number, block in enumerate(blocks) if block.name in names]
        if name == "python":
            found = [number for number in found if _DEFINES_F.search(blocks[number].content)] or found
        if found:
            return found
    return []
