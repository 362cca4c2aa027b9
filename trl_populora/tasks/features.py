"""Features: words for what a task uses. They decide which tasks are rare and which are replayed.

    program --read_features--> (".swapcase", "BitAnd", "[:x]") --add--> Features --rarity--> pay
                                                               `--draw_evenly--> tasks to replay

The features of a program are read from its text. A user's own kind names features in `TaskKind.features`.
[`Features`] counts the features of the last accepted tasks.

A teacher cannot make features up. A function counts only if it is builtin and the program does not bind its name. A
method counts only if a builtin type has a method of this name. A module counts only if it is in Python's library. Dead
code gives no features, as far as [`walk_living`] finds it. It finds branches that constants rule out. It does not find
branches that no input takes: only running the program would show them. So these give features.
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


# [`Features`] remembers as many tasks as all teachers propose in `STEPS` steps. With 2 teachers and 8 proposals each
# these are 12 * 2 * 8 = 192 tasks.
STEPS = 12
CANDIDATES = 256  # archived tasks that are drawn at random, and from which replays are then chosen

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


@lru_cache(maxsize=4096)  # replays draw the same archived tasks again and again
def read_features(program: str) -> tuple[str, ...]:
    """
    Reads the features of a program from its text, in alphabetical order. They are words for:

    - operators and comparisons: `Add`, `NotIn`
    - methods and builtin functions, with the better-known keywords that they are given: `.find`, `sorted(reverse)`
    - modules: `math`
    - kinds of index and slice: `[x]`, `[:-]`, `[::x]`, where `-` is a negated part such as `-n`, and `x` any other
    - constructs: `If`, `ListComp`, `Lambda`, `List`

    Args:
        program: Source text. A text that defines no `f` has no features.
    """
    tree = parse_function(program)
    if tree is None:
        return ()
    bound = {name for node in ast.walk(tree) for name in list_bound_names(node)}
    return tuple(sorted({word for node in walk_living(tree) for word in _read_words(node, bound)}))


def _read_words(node: ast.AST, bound: set[str]) -> Iterator[str]:
    """Yields the features that one node of a tree gives. The call of a function named in `bound` gives none."""
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) or (
        # `-3` is a number, not an operation.
        isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant)
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
    # The left side of `a, b = pair` is a tuple in the tree. It builds nothing.
    elif isinstance(node, _CONSTRUCTS) and not isinstance(getattr(node, "ctx", None), ast.Store):
        yield type(node).__name__


def _name_call(call: ast.Call, bound: set[str]) -> Iterator[str]:
    """
    Yields one word for a call of a builtin function, or of a method that has the name of a builtin type's method:
    `len`, `.find`. Keywords of the call that are in `_KEYWORDS` stand in the word: `sorted(reverse)`. Yields nothing
    for other calls.
    """
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
    """Names an index or a slice: each part is `-` if it is negated, empty if it is absent, and `x` otherwise."""
    if isinstance(index, ast.Slice):
        return ":".join(map(_name_index, (index.lower, index.upper, index.step))).removesuffix(":")
    return "" if index is None else "-" if isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.USub) else "x"


def name_features(kind: TaskKind, task: Task) -> tuple[str, ...]:
    """
    Asks a kind for the features of a task. Returns each once, in alphabetical order.

    Raises:
        `TypeError`: If the kind answers with anything but a tuple of words. The message names the kind.
    """
    words = check_type(kind.name, "features", kind.features(task), (tuple,))
    if not all(isinstance(word, str) for word in words):
        raise TypeError(f"task kind {kind.name!r}: `features` must return a tuple of words, got {words!r:.80}")
    return tuple(sorted(set(words)))


def check_features(kinds: Mapping[str, TaskKind], needs: str) -> None:
    """
    Checks that every kind names features.

    Args:
        kinds: The run's kinds by name.
        needs: The setting that needs features, for the error.

    Raises:
        `ValueError`: If a kind does not define the method `features`.
    """
    silent = [name for name, kind in kinds.items() if type(kind).features is TaskKind.features]
    if silent:
        raise ValueError(
            f"`{needs}` asks what tasks use, and {', '.join(silent)} does not say: give the kind a method "
            "`features(task)` that returns a tuple of words."
        )


class Features:
    """
    Counts of features over the last accepted tasks. Every rank holds the same counts.

    Args:
        window: How many accepted tasks are remembered.

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
        """
        Counts one accepted task, and forgets the oldest one beyond the window.

        Args:
            words: The task's features, each once.
        """
        if len(self._tasks) == self.window:
            self._counts -= Counter(self._tasks[0])
        self._tasks.append(words)
        self._counts.update(words)

    def rarity(self, words: tuple[str, ...]) -> float:
        """
        Computes how rare a task is. Takes the rarest feature of the task, and returns 1 minus the share of the last
        `window` accepted tasks that have this feature. Returns 0 if the task has no feature.

        Args:
            words: The task's features.
        """
        # Early in a run fewer tasks were accepted than the window holds. The counts are divided by the whole window
        # all the same, so every feature seems rarer then.
        return 1 - min((self._counts[word] for word in words), default=self.window) / self.window

    def state_dict(self) -> dict[str, Any]:
        """Returns plain data, ready for JSON."""
        return {"tasks": [list(words) for words in self._tasks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned. A smaller window keeps the newest tasks."""
        self._tasks.clear()
        self._tasks.extend(tuple(words) for words in state["tasks"])
        self._counts = Counter(word for words in self._tasks for word in words)

    def metrics(self) -> dict[str, float]:
        """Returns `curriculum/features`: how many different features the remembered tasks have."""
        return {"curriculum/features": float(len(self._counts))}


def draw_evenly(tasks: Sequence[tuple[Task, tuple[str, ...]]], k: int, rng: random.Random) -> list[Task]:
    """
    Draws tasks. For each, it first draws a feature, all equally likely, and then one of the tasks that have this
    feature. So tasks with rare features come more often. A task may be drawn twice.

    Args:
        tasks: Tasks with their features. If no task has any, all tasks are equally likely.
        k: How many tasks to draw.
        rng: The caller's generator.
    """
    having: dict[str, list[Task]] = defaultdict(list)
    for task, words in tasks:
        for word in words:
            having[word].append(task)
    # Sorted, so that the draw does not depend on the order in which features were met.
    groups = [having[word] for word in sorted(having)] or [[task for task, _ in tasks]]
    return [rng.choice(rng.choice(groups)) for _ in range(k)]
