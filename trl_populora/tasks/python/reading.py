"""Reads the fenced blocks of a completion: strictly ([`read_blocks`]) or tolerantly ([`find_blocks`]).

Both readers first drop the thinking. The strict reader wants this format, and guesses nothing:

* A block begins with a line of three backticks and its name. It ends with a line of three backticks. Either line
  may end in blanks.
* The expected blocks stand once each, in order. Text around them is ignored.
* No other line outside of a block starts with three backticks, not even behind blanks. No line inside of a block
  starts with three backticks and a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trl_populora.tasks.kind import Reject


THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
# Only the closing tag is needed: with some chat templates the opening tag stands in the prompt.
_LINE_CLOSE = re.compile(r"^[ \t]*</think>", re.MULTILINE)
_FENCE = "```"


class FormatError(ValueError):
    """Raised for a text that does not hold the expected blocks, or never closes its thinking."""

    reason = Reject.FORMAT


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
    """Says whether a text thinks: it begins with `<think>`, or a line begins with `</think>`, blanks apart."""
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
    # Python's tokenizer takes `\r\n` and `\r` for ends of lines, too. So a program has the same lines here as it has
    # for Python.
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
# * A fence may be indented, and may have more than three backticks, or tildes. Its name may be in upper case, and
#   attributes may follow.
# * A line that begins with the fence of the open block ends this block. The rest of the line is prose: a base that
#   does not stop often writes on right behind the fence. In a block of values, the closing fence may also follow a
#   value on its line.
# * A fence with one of the names below ends the open block, too, and begins the next one. A block that is not closed
#   ends with the text.
# * After a line with both prose and a fence, the next fence may open a block or close one. If this next fence has no
#   name, the block that it begins is never taken for a wanted one.
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
# If no block has one of the aliases of a wanted name, blocks with these names are taken for it.
STAND_INS = {"python": ("",), "message": _PLAIN} | dict.fromkeys(
    ("input", "output", "inputs"), (*_PLAIN, "json", *ALIASES["python"])
)

_VALUES = {*ALIASES["input"], *ALIASES["output"]}
# The name given to a nameless block that is never taken for a wanted one, see above.
_UNSURE = "(unsure)"

_MARKS = "(`{3,}+|~{3,}+)"
# Possessive: with plain quantifiers a line of many tildes and one backtick takes cubic time.
_OPENING = re.compile(rf"([ \t]*+){_MARKS}[ \t]*+([^\s`]*+)([^`]*)")
_ATTRIBUTES = re.compile(r"\s*(\{.*|[\w-]+=.*)?")
# Backticks within a string belong to the value.
_BEHIND_VALUE = re.compile(rf"""((?:[^'"`~]|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")+){_MARKS}.*""")
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
    # The second block must stand before the next block that `first` may mean. Otherwise the first block of an
    # unfinished draft would be taken together with the second block of another draft.
    for start, end in reversed(list(zip(firsts, [*firsts[1:], len(blocks)], strict=True))):
        between = blocks[start + 1 : end]
        if found := _find_fitting(between, second[0]):
            return [blocks[start].content, between[found[-1]].content]
    raise FormatError(f"there is no ```{second[0]} block behind the ```{first} block")


def _split_blocks(text: str) -> Iterator[Block]:
    """Yields all fenced blocks of a text, in order."""
    name, indent, fence, unsure = "", 0, "", False
    lines: list[str] | None = None
    for line in text.split("\n"):
        opening = _OPENING.fullmatch(line)
        if lines is None and opening is None:
            unsure = unsure or len(re.findall(_MARKS, line)) % 2 == 1
            continue
        if lines is not None:
            dedented = line[:indent].lstrip(" \t") + line[indent:]
            begins = opening is not None and _names_block(opening)
            if not begins and not line.lstrip(" \t").startswith(fence):
                behind = _BEHIND_VALUE.fullmatch(dedented) if name in _VALUES else None
                if behind is None or not behind[2].startswith(fence):
                    lines.append(dedented)
                    continue
                lines.append(behind[1])
            yield Block(name, "\n".join(lines))
            lines = None
            if not begins:
                unsure = line.strip(" \t" + fence[0]) != ""
                continue
        assert opening is not None
        name, indent, fence, lines = opening[3].lower(), len(opening[1]), opening[2], []
        unsure = unsure and not name
        if unsure:
            name = _UNSURE
    if lines is not None:
        yield Block(name, "\n".join(lines))


def _names_block(opening: re.Match) -> bool:
    """Says whether a fence has one of the names of `ALIASES`, and nothing but attributes behind it."""
    known = any(opening[3].lower() in names for names in ALIASES.values())
    return known and _ATTRIBUTES.fullmatch(opening[4]) is not None


def _find_fitting(blocks: Sequence[Block], name: str) -> list[int]:
    """Finds the blocks that `name` may mean. Returns their places in `blocks`; empty if there is none."""
    for names in (ALIASES[name], STAND_INS[name]):
        found = [number for number, block in enumerate(blocks) if block.name in names]
        if name == "python":
            found = [number for number in found if _DEFINES_F.search(blocks[number].content)] or found
        if found:
            return found
    return []
