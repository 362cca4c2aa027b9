"""What tasks use: one notion for what is rare and what is replayed.

A *feature* is a word for something that a task uses: `.swapcase`, `BitAnd`, `[:x]`. A program's are read from its
text; a kind of a user's own names its own in `TaskKind.features`. [`Features`] counts them over the last accepted
tasks.

A program cannot make words up: names that it binds say nothing, methods are those of Python's own types, modules those
of its library. Dead code says nothing either, as far as the text tells; a branch that is never taken does.
"""

from __future__ import annotations

import ast
import builtins
import random
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from trl_populora.tasks.python.normal_form import walk_living
from trl_populora.tasks.python.programs import list_bound_names, parse_function

from .kind import Task, TaskKind, check_type


STEPS = 12  # how many steps' proposals are remembered: about 200 tasks of 2 teachers with 8 proposals each
CANDIDATES = 256  # archived tasks among which a replayed one is looked for

_TYPES = (str, bytes, list, tuple, dict, set, frozenset, int, float, complex)
_METHODS = frozenset(name for each in _TYPES for name in dir(each) if not name.startswith("_"))
_FUNCTIONS = frozenset(name for name in dir(builtins) if name.islower() and not name.startswith("_"))
_KEYWORDS = frozenset(
    ("base", "default", "key", "keepends", "maxsplit", "ndigits", "reverse", "sep", "start", "strict")
)
_CONSTRUCTS = (
    *(ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.With, ast.Match, ast.Raise, ast.Lambda, ast.ClassDef),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Yield, ast.JoinedStr, ast.Starred, ast.NamedExpr),
    *(ast.List, ast.Tuple, ast.Set, ast.Dict),
)


@lru_cache(maxsize=4096)  # archived tasks are met again and again
def read_features(program: str) -> tuple[str, ...]:
    """
    What a program uses, in alphabetical order: operators and comparisons (`Add`, `NotIn`), methods (`.find`), builtin
    functions with the keywords they are given (`sorted(reverse)`), modules (`math`), kinds of index and slice (`[x]`,
    `[:-]`, `[::x]`; `-` is a negative constant), and constructs (`If`, `ListComp`, `Lambda`, `List`). Nothing for a
    text that is no program with an `f`.
    """
    tree = parse_function(program)
    if tree is None:
        return ()
    bound = {name for node in ast.walk(tree) for name in list_bound_names(node)}
    return tuple(sorted({word for node in walk_living(tree) for word in _read_words(node, bound)}))


def _read_words(node: ast.AST, bound: set[str]) -> Iterator[str]:
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) or (
        isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant)  # `-3` is a number
    ):
        yield type(node.op).__name__
    elif isinstance(node, ast.Compare):
        yield from (type(operator).__name__ for operator in node.ops)
    elif isinstance(node, ast.Call):
        yield from _name_call(node, bound)
    elif isinstance(node, ast.Subscript):
        yield f"[{_name_index(node.slice)}]"
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
        yield from {name.partition(".")[0] for name in modules} & sys.stdlib_module_names
    elif isinstance(node, _CONSTRUCTS) and not isinstance(getattr(node, "ctx", None), ast.Store):
        yield type(node).__name__


def _name_call(call: ast.Call, bound: set[str]) -> Iterator[str]:
    """A builtin function or a method of a builtin type, with the keywords that it is given."""
    function = call.func
    name = ""
    if isinstance(function, ast.Name) and function.id in _FUNCTIONS - bound:
        name = function.id
    elif isinstance(function, ast.Attribute) and function.attr in _METHODS:
        name = f".{function.attr}"
    given = sorted({keyword.arg for keyword in call.keywords if keyword.arg in _KEYWORDS})
    if name:
        yield f"{name}({','.join(given)})" if given else name


def _name_index(index: ast.expr | None) -> str:
    """An index, a slice or a part of one: `x`, or `-` for a negative constant."""
    if isinstance(index, ast.Slice):
        return ":".join(map(_name_index, (index.lower, index.upper, index.step))).removesuffix(":")
    return "" if index is None else "-" if isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.USub) else "x"


def name_features(kind: TaskKind, task: Task) -> tuple[str, ...]:
    """
    A kind's `features` of a task, each once, in alphabetical order.

    Raises:
        `TypeError`: If it is no tuple of words; names kind and method.
    """
    words = check_type(kind.name, "features", kind.features(task), (tuple,))
    if not all(isinstance(word, str) for word in words):
        raise TypeError(f"task kind {kind.name!r}: `features` must return a tuple of words, got {words!r:.80}")
    return tuple(sorted(set(words)))


def check_features(kinds: Mapping[str, TaskKind], needs: str) -> None:
    """
    Raises:
        `ValueError`: If a kind names no features, which the setting `needs` asks for.
    """
    silent = [name for name, kind in kinds.items() if type(kind).features is TaskKind.features]
    if silent:
        raise ValueError(
            f"`{needs}` asks what tasks use, and {', '.join(silent)} does not say: give the kind a method "
            "`features(task)` that returns a tuple of words."
        )


class Features:
    """
    The features of the last accepted tasks. The same on every rank.

    Args:
        window: Accepted tasks that are remembered.

    Raises:
        `ValueError`: If `window` is not positive.
    """

    def __init__(self, window: int = 200):
        if window < 1:
            raise ValueError(f"`window` must be at least 1 task, got {window}.")
        self.window = window
        self._tasks: deque[tuple[str, ...]] = deque(maxlen=window)
        self._counts: Counter[str] = Counter()

    def add(self, words: tuple[str, ...]) -> None:
        """Counts one accepted task."""
        if len(self._tasks) == self.window:
            self._counts -= Counter(self._tasks[0])
        self._tasks.append(words)
        self._counts.update(words)

    def rarity(self, words: tuple[str, ...]) -> float:
        """
        1 - frequency of the task's rarest feature among the last `window` accepted tasks; 0 without features. Until so
        many were accepted the others count as tasks without it, so everything is rarer.
        """
        return 1 - min((self._counts[word] for word in words), default=self.window) / self.window

    def state_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"tasks": [list(words) for words in self._tasks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned. A smaller window keeps the newest tasks."""
        self._tasks.clear()
        # Checkpoints of before 0.1.0 have pairs of features and solve rate.
        self._tasks.extend(tuple(each[0] if each and isinstance(each[0], list) else each) for each in state["tasks"])
        self._counts = Counter(word for words in self._tasks for word in words)

    def metrics(self) -> dict[str, float]:
        """`curriculum/features`: different features among the remembered tasks."""
        return {"curriculum/features": float(len(self._counts))}


def draw_evenly(tasks: Sequence[tuple[Task, tuple[str, ...]]], k: int, rng: random.Random) -> list[Task]:
    """
    Draws tasks so that every feature is as likely as any other, however few tasks have it; a task may come twice.

    Args:
        tasks: Tasks with their features; uniformly among them if none has any.
        k: How many.
        rng: The caller's generator.
    """
    having: dict[str, list[Task]] = defaultdict(list)
    for task, words in tasks:
        for word in words:
            having[word].append(task)
    groups = [having[word] for word in sorted(having)] or [[task for task, _ in tasks]]
    return [rng.choice(rng.choice(groups)) for _ in range(k)]
