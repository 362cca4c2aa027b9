"""Prompts: every word that models are shown, and solved tasks that students may see first.

The same blocks are written in three styles:

* `turns` is for instruction-tuned models of any size. The instruction is a sentence or two. References are earlier
  turns, in which the assistant has answered in exactly the format that is wanted: small models do what they have seen.
* `chat` is for large models. One user turn holds the references, all rules, and the answer format in full. An
  instruction of the user's own replaces rules and format.
* `compact` is what the embedded tiny base was trained on, byte for byte. One user turn begins with a line such as
  `solve code_o`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trl_populora.sandbox import values
from trl_populora.tasks.kind import STYLES, Shot, Task


# Models read the texts that follow. All published figures were measured with exactly these words: whoever changes a
# word has to measure again.

_FORMAT = """\
Answer format. You may reason first inside <think>...</think>; only what follows is read. Write the following exactly \
once{order} and no other fenced block."""
_FORMAT_ONE = _FORMAT.format(order="")
_FORMAT_TWO = _FORMAT.format(order=", in this order,")

_ARGUMENTS = "the arguments only, as Python literals separated by commas, for example: 3, [1, 2], 'ab'"

_PROGRAM_RULES = """\
Rules for the program:
- It defines one top-level function `def f(...)`. Helper functions, classes and imports of the standard library's \
computing modules are allowed.
- It is deterministic: no randomness, hashing, time, files, network, environment or user input.
- It uses only its arguments, prints nothing, and finishes within a second.
- Arguments and return value are plain data: None, bool, int, float, complex, str, bytes, list, tuple, set, \
frozenset, dict."""

PROPOSE_PROGRAM = f"""\
You write test problems for a skilled programmer. Write one new Python program and one input for it. {{goal}} Make it \
require real reasoning: state that changes over several steps, nested control flow, data structures, an algorithm. \
It must still be solvable by careful thinking, and differ from the examples in what it computes.

{_PROGRAM_RULES}
- It has at most {{program_chars}} characters; its input and its output, written out, at most {{value_chars}} each.

{_FORMAT_TWO}

```python
def f(...):
    ...
```
```input
{_ARGUMENTS}
```"""

# The short instructions, by kind and by `propose` or `solve`. The option `prompt_texts` may replace them.
TURNS = {
    "code_o/propose": "Write one new short Python function `f` and one input for it. A reader will be shown both and "
    "must work out what `f` returns.",
    "code_i/propose": "Write one new short Python function `f` and one input for it. A reader will be shown the "
    "function and what it returns, and must find the input.",
    "code_f/propose": "Write {count} different inputs for this Python function, one per line in an ```inputs block, "
    "then a ```message block that hints at what it does. A reader will be shown some inputs with what the function "
    "returns, and the message, and must write the function.",
    "code_o/solve": "What does `f` return for this input? Work it out, then write the value in an ```output block.",
    "code_i/solve": "For which input does `f` return this output? Work it out, then write the arguments in an "
    "```input block.",
    "code_f/solve": "Write a Python function `f` that does what the message and the examples say, in a ```python "
    "block.",
}
# The names in braces that an instruction may use: those for all, and further ones for some.
_PLACEHOLDERS = ("program_chars", "value_chars")
_FURTHER_PLACEHOLDERS = {"code_f/propose": ("count", "message_chars")}

PROPOSE_GOAL = {
    "code_o": "The programmer will see program and input, and must work out the output without running anything.",
    "code_i": "The programmer will see program and output, and must find an input that gives this output.",
}

PROPOSE_INPUTS = f"""\
You write test problems for a skilled programmer. Below is a Python program that the programmer will not see. Write \
{{count}} different inputs for it, and a message that helps to work out what it does from the inputs and outputs.

Rules:
- Exactly {{count}} inputs, one per line, no two equal, that together show all the program can do; their outputs \
must not all be equal. An input and its output have at most {{value_chars}} characters each.
- A line holds {_ARGUMENTS}
- The message describes the purpose in words, in one or two lines and at most {{message_chars}} characters. It \
contains no code: neither the program nor its body.

{_FORMAT_TWO}

```inputs
first input
second input
(and so on, {{count}} lines)
```
```message
the message
```

The program:

{{task}}"""

SOLVE_OUTPUT = f"""\
Work out what the call `f(...)` of this Python program returns for the given input.

{{task}}

{_FORMAT_ONE}

```output
the returned value as one Python literal, for example: [1, 'a', None]
```"""

SOLVE_INPUT = f"""\
Find an input for which the call `f(...)` of this Python program returns the given output. Any such input is right.

{{task}}

{_FORMAT_ONE}

```input
{_ARGUMENTS}
```"""

SOLVE_PROGRAM = f"""\
Write the Python program behind these examples. It is tested on further inputs, so find the rule; do not list the \
examples.

{{task}}

{_PROGRAM_RULES}
- It has at most {{program_chars}} characters.

{_FORMAT_ONE}

```python
def f(...):
    ...
```"""

REFERENCES = "Examples of earlier programs, with input and output:"


def fence(*blocks: tuple[str, str]) -> str:
    """Writes fenced blocks from pairs of name and content, joined by newlines. No newline follows the last block."""
    return "\n".join(f"```{name}\n{content}\n```" for name, content in blocks)


def write_arguments(text: str) -> str:
    """Writes an argument tuple, given as a canonical text, as it stands in a call: `3, [4, 5]`."""
    given = values.decode(text)
    assert isinstance(given, tuple)
    return ", ".join(map(values.to_literal, given))


def write_literal(text: str) -> str:
    """Writes a value, given as a canonical text, as a Python literal."""
    return values.to_literal(values.decode(text))


# Blocks: pairs of a name and a content, for `fence`.


def show_program(program: str) -> tuple[str, str]:
    return "python", program.rstrip("\n")


def show_input(text: str) -> tuple[str, str]:
    return "input", write_arguments(text)


def show_output(text: str) -> tuple[str, str]:
    return "output", write_literal(text)


def show_examples(pairs: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """Makes a block of calls, one per line, from pairs of canonical texts: arguments and output."""
    return "examples", "\n".join(
        f"f({write_arguments(given)}) -> {write_literal(returned)}" for given, returned in pairs
    )


def ask(content: str) -> list[dict[str, str]]:
    """Makes a conversation of one user turn. Small models follow a user turn better than a system turn."""
    return [{"role": "user", "content": content}]


def ask_compactly(first_line: str, blocks: Iterable[str]) -> list[dict[str, str]]:
    """Makes a conversation in the style `compact`: a first line, then blocks, each with a newline after it."""
    return ask("".join(f"{line}\n" for line in (first_line, *blocks)))


def check_texts(texts: Any) -> None:
    """
    Checks the value of the option `prompt_texts`: texts that replace instructions.

    Raises:
        `TypeError`: If the value is no dict, or an instruction in it is no text.
        `ValueError`: If a key names no instruction, or if a text has an unknown name in braces.
    """
    if not isinstance(texts, Mapping):
        raise TypeError(f"`prompt_texts` must be a dict of texts by name, got {texts!r:.80}.")
    for name, text in texts.items():
        if name not in TURNS:
            raise ValueError(f"`prompt_texts` has the key {name!r}; the keys are {', '.join(TURNS)}.")
        if not isinstance(text, str):
            raise TypeError(f"`prompt_texts[{name!r}]` must be a text, got {text!r:.80}.")
        # A wrong brace would otherwise stop the run at the first prompt of its kind.
        known = (*_PLACEHOLDERS, *_FURTHER_PLACEHOLDERS.get(name, ()))
        try:
            text.format(**dict.fromkeys(known, 1))
        except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
            raise ValueError(
                f"`prompt_texts[{name!r}]` has braces that name nothing ({error}). Known are "
                f"{', '.join('{' + each + '}' for each in known)}; a brace itself is written twice."
            ) from error


def _answer(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def show_before(asked: Sequence[list[dict[str, str]]], answers: Sequence[str]) -> list[dict[str, str]]:
    """
    Joins questions and answers to one conversation. The last question stays open.

    Args:
        asked: A conversation per question.
        answers: The answers to all questions but the last one.
    """
    turns = []
    for messages, answer in zip(asked, [*answers, None], strict=True):
        turns += messages if answer is None else [*messages, _answer(answer)]
    return turns


def check_style(style: str) -> None:
    """
    Checks a style of prompts.

    Raises:
        `ValueError`: If `style` is none of `STYLES`.
    """
    if style not in STYLES:
        raise ValueError(f"The prompt style must be one of {', '.join(STYLES)}, got {style!r}.")


# Solved tasks that students may be shown first, by the option `shots`.
#
# The answers have no reasoning. A 135M model that was shown a line of reasoning rambled and forgot to answer: 1 of 16
# answers could be read. Models that reason by themselves are large enough to need no examples.


_REVERSE = """\
def f(s, k):
    out = ''
    for ch in s:
        out = ch + out
    return out[:k]"""
_TALLY = """\
def f(numbers):
    total = 0
    for n in numbers:
        if n % 2 == 0:
            total += n
        else:
            total -= 1
    return total"""
_LENGTHS = """\
def f(words):
    counts = {}
    for word in words:
        counts[len(word)] = counts.get(len(word), 0) + 1
    return counts"""
_INSERT = """\
def f(items, n):
    items.append(n * 2)
    return sorted(items)"""
_JOIN = """\
def f(first, last):
    return last.upper() + ', ' + first[0] + '.'"""
_SQUARE = """\
def f(x):
    return x * x - 1"""

_FIRSTS = """\
def f(words):
    return [word[0] for word in words]"""


def _make_task(kind: str, program: str, *calls: tuple[tuple, Any], message: str = "", visible: int = 0) -> Task:
    """
    Makes a task from a program and its calls. A call is a pair: the arguments, and the value returned. The program is
    not run, so that the import stays quick.
    """
    inputs = tuple(values.encode(given, ordered=True) for given, _ in calls)
    return Task(kind, program, inputs, tuple(values.encode(returned) for _, returned in calls), message, visible)


def _make_shot(task: Task, language: str, answer: str) -> Shot:
    return Shot(task, fence((language, answer)))


CODE_O = (
    _make_shot(_make_task("code_o", _REVERSE, (("planet", 3), "ten")), "output", "'ten'"),
    _make_shot(_make_task("code_o", _TALLY, (([4, 7, 10, 3],), 12)), "output", "12"),
    _make_shot(
        _make_task("code_o", _LENGTHS, ((["a", "to", "be", "sea"],), {1: 1, 2: 2, 3: 1})),
        "output",
        "{1: 1, 2: 2, 3: 1}",
    ),
)

CODE_I = (
    _make_shot(_make_task("code_i", _SQUARE, ((5,), 24)), "input", "5"),
    _make_shot(_make_task("code_i", _JOIN, (("ada", "hill"), "HILL, a.")), "input", "'a', 'hill'"),
    _make_shot(_make_task("code_i", _INSERT, (([9, 1], 3), [1, 6, 9])), "input", "[1, 9], 3"),
)

CODE_F = (
    _make_shot(
        _make_task(
            "code_f",
            _SQUARE,
            *(((2,), 3), ((5,), 24), ((0,), -1), ((3,), 8)),
            message="one less than the square",
            visible=2,
        ),
        "python",
        _SQUARE,
    ),
    _make_shot(
        _make_task(
            "code_f",
            _FIRSTS,
            *(((["cat", "dog"],), ["c", "d"]), ((["up"],), ["u"]), ((["a", "be"],), ["a", "b"]), (([],), [])),
            message="the beginnings of the words",
            visible=2,
        ),
        "python",
        _FIRSTS,
    ),
)
