"""Reads program text in the trainer's process without running it: bounded parsing, `f`, and what gives a program away.

`ast.parse` never executes anything, but it can be made to recurse until the interpreter dies or to backtrack for
minutes. So the text is bounded first, by a linear scan: characters, bracket depth, and the operators and clauses that
nest the tree without brackets (the tokenizer itself bounds indentation). What passes parses in at most 20 ms on Python
3.10 to 3.13.
"""

from __future__ import annotations

import ast
import re
import warnings

from trl_populora.tasks.kind import Reject


MAX_PROGRAM_CHARS = 8000  # what the parser is ever shown; `CodeKind.max_program_chars` is the limit for tasks
MAX_BRACKET_DEPTH = 20  # the parser may backtrack exponentially in brackets that do not close as they should
MAX_CHAIN = (
    200  # tokens in a row between commas, brackets summed up: each may be a level of the tree (`----1`, `a.b.c`)
)
FUNCTION = "f"
_OF_PARSED_TEXT = ("ignore", None, Warning, re.compile("<unknown>"), 0)  # the file that `ast.parse` names


class ProgramError(ValueError):
    """Text that is not a task's program or value; `reason` says which [`Reject`] it is."""

    def __init__(self, reason: Reject, message: str):
        super().__init__(message)
        self.reason = reason


# Strings and comments are skipped whole, so that brackets inside them do not count.
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


def parse_bounded(program: str) -> ast.Module:
    """
    Parses source text within bounds that keep the parser quick and the interpreter alive.

    Raises:
        `ProgramError`: `OVERSIZED` over a bound, `SYNTAX` if it does not parse.
    """
    if len(program) > MAX_PROGRAM_CHARS:
        raise ProgramError(Reject.OVERSIZED, f"program of {len(program)} characters, at most {MAX_PROGRAM_CHARS}")
    _scan(program)
    try:
        _ignore_warnings_of_parsed_text()
        return ast.parse(program)
    # ValueError: null bytes, lone surrogates, integers over the digit limit. The other two: trees that are too deep.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ProgramError(Reject.SYNTAX, f"{type(error).__name__}: {error}") from error


def _ignore_warnings_of_parsed_text() -> None:
    """
    An invalid escape or `1is 2` in untrusted text is no concern of the log. The filter stays: with one that comes and
    goes, as in `catch_warnings`, Python forgets what else was told and tells it again in every step.
    """
    if warnings.filters[:1] != [_OF_PARSED_TEXT]:
        warnings.filterwarnings("ignore", module=_OF_PARSED_TEXT[3].pattern)


def check_program(program: str) -> None:
    """
    Checks that a program parses and defines a top-level `def f`.

    Raises:
        `ProgramError`: `OVERSIZED`, `SYNTAX` or `NO_FUNCTION`.
    """
    if not defines_function(parse_bounded(program)):
        raise ProgramError(Reject.NO_FUNCTION, f"no top-level `def {FUNCTION}`")


def defines_function(tree: ast.Module) -> bool:
    """Whether a top-level `def f` is there; helpers, classes and anything else may stand beside it."""
    return any(isinstance(node, ast.FunctionDef) and node.name == FUNCTION for node in tree.body)


def parse_function(text: str) -> ast.Module | None:
    """The tree of a program with an `f`; `None` for any other text, which a user's own kind may keep."""
    try:
        tree = parse_bounded(text)
    except ProgramError:
        return None
    return tree if defines_function(tree) else None


def _scan(program: str) -> None:
    """Bounds the depth that the tree can reach; linear in the text and blind to its grammar."""
    chains = [0]  # for every open bracket, the tokens since its last comma
    chained = nested = 0  # their sum, and the clauses that nest across commas and lines
    for match in _TOKEN.finditer(program):
        if match["blank"] is not None:
            continue
        token = match["token"]
        if token == "," or (token == "\n" and len(chains) == 1):
            chained -= chains[-1]
            chains[-1] = 0
        elif token is None:
            tokens, depth = _measure_string(match)
            chains[-1] += tokens
            chained += tokens
            _check_depth(len(chains) + depth, chained)
        elif token != "\n":
            nested += token in ("elif", "lambda")
            chains[-1] += 1
            chained += 1
            if token in "([{":
                chains.append(0)
            elif token in ")]}" and len(chains) > 1:
                chained -= chains.pop()
        _check_depth(len(chains), max(chained, nested))


def _measure_string(string: re.Match) -> tuple[int, int]:
    """What a string adds to the chain and to the brackets: expressions inside an f-string are parsed like others."""
    if "f" not in string["prefix"].lower():
        return 1, 0
    depth = deepest = 0
    for character in string["string"]:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return len(re.findall(r"\w+|[^\w\s]", string["string"])), deepest


def _check_depth(depth: int, chained: int) -> None:
    if depth > MAX_BRACKET_DEPTH + 1 or chained > MAX_CHAIN:
        raise ProgramError(
            Reject.OVERSIZED,
            f"brackets {depth - 1} deep, at most {MAX_BRACKET_DEPTH}; {chained} tokens chained, at most {MAX_CHAIN}",
        )


BOUND_BY_DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.alias)


def list_bound_names(node: ast.AST) -> tuple[str, ...]:
    """Names that one node of a program's tree gives a value to."""
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
    """As [`list_bound_names`], with the names of imported modules."""
    if isinstance(node, ast.alias) and not node.asname:
        return (node.name.partition(".")[0],)
    return list_bound_names(node)


def drop_docstrings(body: list) -> list:
    """A body without statements that are bare constants: docstrings, `...`, stray literals."""
    return [node for node in body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]


_NOT_TEXT = re.compile(r"[\s`'\"]+")


def contains_program(message: str, program: str) -> bool:
    """
    Whether a hint gives the program away: any `def`, the program's text, or the body of its `f`.

    Blanks, letter case, quotes and comments do not count, nor the program's docstrings.
    """
    if re.search(r"\bdef\s+\w+\s*\(", message):
        return True
    # A body behind `#` is given away all the same, and so is one with comments in between.
    said = (_squeeze(message), _NOT_TEXT.sub("", message.replace("#", "")).lower())
    return any(text and text in each for text in map(_squeeze, (program, _cut_body(program))) for each in said)


def _cut_body(program: str) -> str:
    """Source of the body of the last top-level `f`, after its docstring; empty if there is none."""
    try:
        tree = parse_bounded(program)
    except ProgramError:  # a known program that came from a user's table
        return ""
    body: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == FUNCTION:
            body = drop_docstrings(node.body)
    if not body:
        return ""
    # Positions in the tree count bytes. `ast.unparse` would be simpler, but it recurses and prints big integers.
    lines = program.encode().split(b"\n")[body[0].lineno - 1 : body[-1].end_lineno]
    lines[-1] = lines[-1][: body[-1].end_col_offset]
    lines[0] = lines[0][body[0].col_offset :]
    return b"\n".join(lines).decode()


def _squeeze(text: str) -> str:
    """Text without comments, blanks and quotes, in lower case."""
    kept = (match[0] for match in _TOKEN.finditer(text) if match["blank"] is None)
    return _NOT_TEXT.sub("", "".join(kept)).lower()
