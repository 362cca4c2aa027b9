"""Reads what models write: strictly as the fenced format has it, tolerantly as chat models fence it.

A block opens with a line of three backticks and its name and closes with a line of three backticks; blanks may
follow. The expected blocks stand exactly once and in order. Prose around them is ignored; any other line that starts
with three backticks outside a block, or that would open one inside, makes the whole text malformed. Nothing is
guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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


# Reads what chat models write (propose, solve): tolerant of how blocks are fenced, never of what is in them.
#
# One text has one reading here, too, as in the strict reader ([`read_blocks`]), of which this is the other choice:
#
# * A fence may be indented, of more than three backticks or of tildes, and its name in any case. A fence with a name
#   inside a block ends that block and begins the next. What is not closed ends with the text.
# * Names have the aliases below. Where no block has the name, one without any name stands for it; a value may also
#   stand in a block of Python, JSON or plain text.
# * Of several that fit, the last counts: what comes before is a draft. A block of Python that defines no `f` is no
#   program where another does. Blocks that nobody asked for are ignored.


ALIASES = {
    "python": ("python", "py", "python3"),
    "input": ("input", "inputs", "arguments", "args"),
    "output": ("output", "outputs", "result", "return", "answer"),
    "inputs": ("inputs", "input"),
    "message": ("message", "hint"),
}
_PLAIN = ("", "text", "txt", "plaintext")
# What a block may be called that has none of these names.
STAND_INS = {"python": ("",), "message": _PLAIN} | dict.fromkeys(
    ("input", "output", "inputs"), (*_PLAIN, "json", *ALIASES["python"])
)

_FENCE_LINE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*")
_DEFINES_F = re.compile(r"^def f\b", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its name in lower case, and its lines without the fence's own indentation."""

    name: str
    content: str


def find_blocks(text: str, names: Sequence[str]) -> list[str]:
    """
    Contents of the blocks called `names`, in that order, without their fences.

    Args:
        text: A completion.
        names: One or two keys of `ALIASES`; the second block follows the first.

    Raises:
        `FormatError`: If the text is still thinking, or a block is missing.
    """
    blocks = list(_split_blocks(strip_thinking(text.replace("\r\n", "\n").replace("\r", "\n"))))
    first, *second = names
    firsts = _find_fitting(blocks, first)
    if not firsts:
        raise FormatError(f"there is no ```{first} block")
    if not second:
        return [blocks[firsts[-1]].content]
    # A draft without its second block must not lend its first to another's second.
    for start, end in reversed(list(zip(firsts, [*firsts[1:], len(blocks)], strict=True))):
        between = blocks[start + 1 : end]
        if found := _find_fitting(between, second[0]):
            return [blocks[start].content, between[found[-1]].content]
    raise FormatError(f"there is no ```{second[0]} block behind the ```{first} block")


def _split_blocks(text: str) -> Iterator[Block]:
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
            if not match[3]:
                continue
        name, indent, fence, lines = match[3].lower(), len(match[1]), match[2], []
    if lines is not None:
        yield Block(name, "\n".join(lines))


def _ends_block(match: re.Match, fence: str) -> bool:
    """Whether a line ends the block that `fence` has begun: a bare fence as long, or one with a name that is known."""
    if match[3]:
        return any(match[3].lower() in names for names in ALIASES.values())
    return match[2].startswith(fence)


def _find_fitting(blocks: Sequence[Block], name: str) -> list[int]:
    """Numbers of the blocks that can be meant."""
    for names in (ALIASES[name], STAND_INS[name]):
        found = [number for number, block in enumerate(blocks) if block.name in names]
        if name == "python":
            found = [number for number in found if _DEFINES_F.search(blocks[number].content)] or found
        if found:
            return found
    return []
