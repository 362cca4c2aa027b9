"""
Docstrings in the form of Hugging Face, for mkdocstrings, which reads Google's: a Griffe extension (`mkdocs.yml`).

The forms differ in several names before one description, in references (``[`~trl.GRPOConfig`]``), and in the types of
names that have no annotation (``name (`int`, *optional*, defaults to `4`)``).
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Any

from griffe import Extension, Object


ENTRY = re.compile(r"^(?P<indent> +)(?P<names>\*{0,2}\w+(?:, \w+)*)(?: \((?P<type>.+?)\))?:(?P<rest>(?: .*)?)$")
REFERENCE = re.compile(r"\[`~?(?:[\w.]+\.)?(\w+)`\](?:\[[\w.]+\])?(?!\()")


def google_type(text: str | None) -> str:
    """
    A type without Markdown, in brackets: the default stands in the signature, and whether it is optional, too. Empty
    for one that the signature has.
    """
    if text is None:
        return ""
    text = re.sub(r", (?:\*optional\*|defaults? to ).*", "", text).replace("`", "")
    alternatives = re.sub(r",? or |, (?![^\[]*\])", " | ", text)
    return f" ({alternatives})"


def google_style(docstring: str) -> str:
    """The docstring as Google would write it."""
    lines: list[str] = []
    source = REFERENCE.sub(r"`\1`", docstring).split("\n")
    for number, line in enumerate(source):
        if not (entry := ENTRY.match(line)):
            lines.append(line)
            continue
        indent, names, type_ = entry["indent"], entry["names"].split(", "), google_type(entry["type"])
        body = list(takewhile(re.compile(indent + " ").match, source[number + 1 :]))
        for name in names[:-1]:  # the last one's description follows by itself
            lines += [f"{indent}{name}{type_}:{entry['rest']}", *body]
        lines.append(f"{indent}{names[-1]}{type_}:{entry['rest']}")
    return "\n".join(lines)


class HuggingFaceDocstrings(Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = google_style(obj.docstring.value)
