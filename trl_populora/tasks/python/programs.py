"""Reads untrusted program text in the trainer's process, without running it.

    text --_scan--> within bounds? --ast.parse--> tree --> does it define `f`? which names does it bind?

`ast.parse` runs nothing. But there are texts on which it recurses until the interpreter dies, or backtracks for
minutes. So a text is bounded first: its length and then, in one linear scan, the depth of its brackets and the
tokens that may nest the tree without brackets. (Python's tokenizer itself bounds indentation.) A text that
passes is parsed in some tens of milliseconds at most on Python 3.11 to 3.13. (Python 3.12.1 needs up to 0.3 s to find
the tokens of one long line of other letters than ASCII's.)
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import warnings
from collections.abc import Iterator

from trl_populora.tasks.kind import Reject


# The parser is never shown a longer text. The limit of a task's program is lower: `CodeKind.max_program_chars`.
MAX_PROGRAM_CHARS = 8000
# If brackets do not close as they should, the parser may take time exponential in the depth of the brackets.
MAX_BRACKET_DEPTH = 20
# Most tokens since the last comma: those outside of brackets and those in each open bracket, taken together. Outside
# of brackets the end of a line counts as a comma. Each of these tokens may be a level of the tree: `----1`, `a.b.c`.
MAX_CHAIN = 200
FUNCTION = "f"
# A filter of `warnings` for parsed texts, whose file `ast.parse` calls `<unknown>`.
_OF_PARSED_TEXT = ("ignore", None, Warning, re.compile("<unknown>"), 0)


class ProgramError(ValueError):
    """A text that is no program or value of a task. `reason` says why, as a [`Reject`]."""

    def __init__(self, reason: Reject, message: str):
        super().__init__(message)
        self.reason = reason


# A string or a comment is one match. No bracket inside one counts, but in an f-string all do: see `_measure_string`.
# An f-string with its own quotes inside, as Python 3.12 allows, is cut at these: see `_list_tokens`.
_TOKEN = re.compile(
    r"""
    (?P<string>(?P<prefix>[A-Za-z]{0,2})(?:
        \"\"\"(?:[^"\\]|\\.|"(?!""))*\"\"\" | '''(?:[^'\\]|\\.|'(?!''))*'''
      | "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*'))
  | (?P<blank>\#[^\n]* | [ \t\f]+ | \\\n)
  | (?P<token>\w+ | .)
    """,
    re.VERBOSE | re.DOTALL,
)

_BLANKS = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def parse_bounded(program: str) -> ast.Module:
    """
    Parses source text within bounds that keep the parser quick and the interpreter alive.

    Raises:
        `ProgramError`: If the text is over a bound (`OVERSIZED`), or is no Python (`SYNTAX`).
    """
    if len(program) > MAX_PROGRAM_CHARS:
        raise ProgramError(Reject.OVERSIZED, f"program of {len(program)} characters, at most {MAX_PROGRAM_CHARS}")
    _scan(program)
    try:
        _ignore_warnings_of_parsed_text()
        return ast.parse(program)
    # `ValueError` comes from null bytes, lone surrogates, and integers of too many digits. `RecursionError` and
    # `MemoryError` come from trees that are too deep.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ProgramError(Reject.SYNTAX, f"{type(error).__name__}: {error}") from error


def _ignore_warnings_of_parsed_text() -> None:
    """Keeps warnings about untrusted text, as of invalid escapes or `1is 2`, out of the log."""
    # The filter stays in place. `catch_warnings` would put it in and out, and each time Python forgets which other
    # warnings it has shown, and shows them again in every step.
    if warnings.filters[:1] != [_OF_PARSED_TEXT]:
        warnings.filterwarnings("ignore", module=_OF_PARSED_TEXT[3].pattern)


def check_program(program: str) -> None:
    """
    Checks that a program parses and defines a top-level `def f`.

    Raises:
        `ProgramError`: If it does not. The reason is `OVERSIZED`, `SYNTAX` or `NO_FUNCTION`.
    """
    if not defines_function(parse_bounded(program)):
        raise ProgramError(Reject.NO_FUNCTION, f"no top-level `def {FUNCTION}`")


def defines_function(tree: ast.Module) -> bool:
    """Says whether a program has a top-level `def f`. Anything else may stand beside it."""
    return any(isinstance(node, ast.FunctionDef) and node.name == FUNCTION for node in tree.body)


def parse_function(text: str) -> ast.Module | None:
    """Parses a program with an `f`. Returns `None` for any other text, which a user's own kind may keep."""
    try:
        tree = parse_bounded(text)
    except ProgramError:
        return None
    return tree if defines_function(tree) else None


def _scan(program: str) -> None:
    """
    Refuses a text whose tree could be too deep. Takes time linear in the text, and knows only tokens, no grammar.

    Raises:
        `ProgramError`: If the text is over a bound.
    """
    chains = [0]  # tokens since the last comma: outside of brackets, then in each open bracket
    chained = 0  # the sum of `chains`
    nested = 0  # number of `elif` and `lambda`, which nest the tree across commas and lines
    for token, tokens, depth in _list_tokens(program):
        if token == "," or (token == "\n" and len(chains) == 1):
            chained -= chains[-1]
            chains[-1] = 0
        elif token != "\n":
            nested += token in ("elif", "lambda")
            chains[-1] += tokens
            chained += tokens
            _check_depth(len(chains) + depth, chained)
            if token in "([{":
                chains.append(0)
            elif token in ")]}" and len(chains) > 1:
                chained -= chains.pop()
        _check_depth(len(chains), max(chained, nested))


def _list_tokens(program: str) -> Iterator[tuple[str, int, int]]:
    """
    Yields each token, or `"` for a string, with the number of tokens and the depth of brackets that it adds.

    Raises:
        `ProgramError`: If Python's tokenizer refuses the text (`SYNTAX`).
    """
    if sys.version_info < (3, 12):
        for match in _TOKEN.finditer(program):
            if match["string"] is not None:
                yield '"', *_measure_string(match)
            elif match["token"] is not None:
                yield match["token"], 1, 0
        return
    # Since Python 3.12 an f-string may contain the quotes that enclose it. Only a tokenizer finds where it ends.
    if "\0" in program:  # the tokenizer raises a `SystemError` for some null bytes
        raise ProgramError(Reject.SYNTAX, "SyntaxError: source code cannot contain null bytes")
    try:
        for token in tokenize.generate_tokens(io.StringIO(program, newline=None).readline):
            if token.type == tokenize.NEWLINE:
                yield "\n", 1, 0
            elif token.type not in _BLANKS:
                yield token.string if token.type in (tokenize.OP, tokenize.NAME) else '"', 1, 0
    except (tokenize.TokenError, SyntaxError, ValueError, MemoryError) as error:
        raise ProgramError(Reject.SYNTAX, f"{type(error).__name__}: {error}") from error


def _measure_string(string: re.Match) -> tuple[int, int]:
    """Counts the tokens and the depth of brackets that a string adds. An f-string holds expressions, others none."""
    if "f" not in string["prefix"].lower():
        return 1, 0
    depth = deepest = 0
    for character in string["string"]:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return len(re.findall(r"\w+|[^\w\s]", string["string"])), deepest


def _check_depth(depth: int, chained: int) -> None:
    """
    Refuses a program that could have too deep a tree.

    Args:
        depth: Number of brackets that are open at once, plus 1.
        chained: The tokens that `MAX_CHAIN` bounds, or the number of `elif` and `lambda` so far if that is larger.

    Raises:
        `ProgramError`: If `depth` or `chained` is over its bound.
    """
    if depth > MAX_BRACKET_DEPTH + 1 or chained > MAX_CHAIN:
        raise ProgramError(
            Reject.OVERSIZED,
            f"brackets {depth - 1} deep, at most {MAX_BRACKET_DEPTH}; {chained} tokens chained, at most {MAX_CHAIN}",
        )


BOUND_BY_DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.alias)


def list_bound_names(node: ast.AST) -> tuple[str, ...]:
    """Lists the names to which one node of a tree gives a value. Names of imports without `as` are left out."""
    if isinstance(node, ast.Name):
        return (node.id,) if isinstance(node.ctx, ast.Store) else ()
    if isinstance(node, ast.arg):
        return (node.arg,)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return (node.name,)
    if isinstance(node, ast.alias):
        return (node.asname,) if node.asname else ()
    if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        return (node.name,) if node.name else ()
    if isinstance(node, ast.MatchMapping):
        return (node.rest,) if node.rest else ()
    return ()


def list_bound_or_imported(node: ast.AST) -> tuple[str, ...]:
    """Lists the same names as [`list_bound_names`], and also the names that imports without `as` bind."""
    if isinstance(node, ast.alias) and not node.asname:
        return (node.name.partition(".")[0],)
    return list_bound_names(node)


def drop_docstrings(body: list) -> list:
    """Returns a body without the statements that are bare constants: docstrings, `...`, stray literals."""
    return [node for node in body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]


_NOT_TEXT = re.compile(r"[\s`'\"]+")


def contains_program(message: str, program: str) -> bool:
    """
    Says whether a hint gives the program away: it holds any `def name(`, the program's text, or the body of its `f`.

    Blanks, letter case, the marks ', " and `, comments, and a docstring of `f` make no difference.
    """
    if re.search(r"\bdef\s+\w+\s*\(", message):
        return True
    # The hint is read twice. Without its comments it shows a body that has comments in between. With them it shows a
    # body that is written as a comment.
    said = (_squeeze(message), _NOT_TEXT.sub("", message.replace("#", "")).lower())
    return any(text and text in each for text in map(_squeeze, (program, _cut_body(program))) for each in said)


def _cut_body(program: str) -> str:
    """
    Returns the source of `f`'s body, without its docstring. Of several top-level `f` the last one counts. The source
    is empty if there is no `f`, or the program cannot be parsed.
    """
    try:
        tree = parse_bounded(program)
    except ProgramError:  # a program from a user's table may be any text
        return ""
    body: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == FUNCTION:
            body = drop_docstrings(node.body)
    if not body:
        return ""
    # Positions in a tree count bytes. `ast.unparse` would be simpler, but it recurses, and fails on huge integers.
    lines = re.split(rb"\r\n|\r|\n", program.encode())[body[0].lineno - 1 : body[-1].end_lineno]
    lines[-1] = lines[-1][: body[-1].end_col_offset]
    lines[0] = lines[0][body[0].col_offset :]
    return b"\n".join(lines).decode()


def _squeeze(text: str) -> str:
    """Drops comments, blanks and the marks ', " and `, but not what these enclose; writes the rest in lower case."""
    kept = (match[0] for match in _TOKEN.finditer(text) if match["blank"] is None)
    return _NOT_TEXT.sub("", "".join(kept)).lower()
