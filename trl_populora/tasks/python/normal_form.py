"""Normal forms: when two programs are duplicates, and which nodes of a program live (verify).

Names, layout, comments, annotations and code that cannot reach the result make no other program. One pass finds them:

    tree -> gather   every node that control can reach, and the names of every scope
         -> note     a name becomes a key; which keys each statement reads, binds, and changes in place
         -> spread   from `f` and its `return`: a statement lives if it changes what a living statement reads
         -> write    living statements, names numbered in order -> (exact form, form with constants apart)

In doubt code is dead and programs are equal: a false duplicate costs one refused proposal, a missed one is farmed.
The pass ignores operators of a class, functions behind variables, names as texts, and errors that nothing catches.
"""

from __future__ import annotations

import ast
from collections import ChainMap, defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from .programs import FUNCTION, list_bound_or_imported


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))
_ENDS = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await)
_MAY_RAISE = (ast.Call, ast.Subscript, ast.Import, ast.ImportFrom, *_LOOPS)
_DECIDED = (ast.Constant, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, ast.cmpop)
_UNWRITTEN = {"annotation", "ctx", "kind", "returns", "simple", "type_comment", "type_ignores"}  # fields
_UNWRITTEN |= {"arg", "asname", "attr", "id", "name", "rest"}  # names stand in front of the fields
# Methods that change an object: those of mutable types that no immutable type has.
_CHANGING = {name for kind in (list, dict, set, bytearray, deque) for name in dir(kind)}.difference(
    *map(dir, (tuple, bytes, frozenset, MappingProxyType))
) | {"move_to_end", "seek", "send", "subtract", "write"}
_CHANGING_FIRST = {"heapify", "heappop", "heappush", "heappushpop", "heapreplace", "insort", "next", "setattr"}
_GIVING_PARTS = {"enumerate", "get", "items", "iter", "max", "min", "next", "pop", "reversed", "setdefault", "values"}


def normal_forms(tree: ast.Module) -> tuple[str, str]:
    """The exact form, equal for duplicates, and one that is equal also where constants differ, each in its type."""
    return _Program(tree).write()


def walk_living(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes of a program but those of dead code, as [`normal_forms`] takes it."""
    program, stack = _Program(tree), list[ast.AST]([tree])
    while stack:
        yield (node := stack.pop())
        stack.extend(each for values in program.fields(node) for each in values if isinstance(each, ast.AST))


class _Statement:
    """A statement, or the module, without the statements inside it."""

    def __init__(self, node: Any, within: Any):
        self.node, self.within = node, within
        in_block = within is not None and not isinstance(within.node, (*_FUNCTIONS, ast.ClassDef))
        self.holder: Any = (within.holder if in_block else within) or self  # the definition whose call runs it
        self.key: Any = None  # of a function
        self.reads: list[Any] = []  # keys
        self.waiting: list[_Statement] = []  # they live as soon as this one does
        self.lives = False

    def around(self, kinds: tuple[type, ...]) -> Any:
        """The innermost statement of some kinds around this one; the module if there is none."""
        outer = self.within
        while not isinstance(outer.node, (*kinds, ast.Module)):
            outer = outer.within
        return outer


class _Program:
    """A name's key: `.name` of an attribute, the name itself if nothing binds it, or else (holder, scope, name)."""

    def __init__(self, tree: ast.Module):
        self.root = _Statement(tree, None)
        self.keys: dict[int, Any] = {}  # by the identity of the node that says the name
        self.live: set[Any] = set()  # keys, and identities of statements; empty while it is not known
        self.functions: dict[Any, tuple[_Statement, Any]] = {}  # with the scope inside
        self.readers: dict[Any, list[_Statement]] = defaultdict(list)
        self.binders: dict[Any, list[_Statement]] = defaultdict(list)
        self.changers: dict[Any, list[_Statement]] = defaultdict(list)  # in place
        self.sharers: dict[Any, list[Any]] = defaultdict(list)  # names that may hold a part of what a key names
        self._gather()
        self._spread()

    def _gather(self) -> None:
        visited, module = [], ChainMap[str, Any]()
        # An explicit stack: a tree may be deeper than Python's recursion limit leaves room for.
        stack: list[tuple[Any, Any, _Statement]] = [(self.root.node, module, self.root)]
        while stack:
            node, scope, statement = stack.pop()
            if isinstance(node, ast.stmt):
                statement = _Statement(node, statement)
            visited.append((node, scope, statement))
            of_class = isinstance(statement.holder.node, ast.ClassDef)
            for name in list_bound_or_imported(node):
                fixed = name == FUNCTION and scope is module  # the sandbox calls `f` by its name
                key = name if fixed else f".{name}" if of_class else (statement.holder, id(scope), name)
                scope.maps[0].setdefault(name, key)
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                outer = module if isinstance(node, ast.Global) else scope.parents
                scope.update({name: outer.setdefault(name, (self.root, 0, name)) for name in node.names})
            elif isinstance(node, _SCOPES):
                # Methods do not see the names of their class.
                outer, scope = scope, (scope.parents if of_class else scope).new_child()
                if isinstance(node, _FUNCTIONS):
                    statement.key = outer[node.name]
                    self.functions[statement.key] = statement, scope.maps[0]
            children = [each for values in self.fields(node) for each in values if isinstance(each, ast.AST)]
            stack.extend((each, scope, statement) for each in reversed(children))
        self.catches = any(isinstance(node, _TRIES) for node, *_ in visited)
        for each in visited:
            self._note(*each)

    def _note(self, node: Any, scope: Any, statement: _Statement) -> None:
        loads, holder = isinstance(getattr(node, "ctx", None), ast.Load), statement.holder
        said = (node.id,) if isinstance(node, ast.Name) else list_bound_or_imported(node)
        if said or isinstance(node, ast.Attribute):
            key = self.keys[id(node)] = scope.get(said[0], said[0]) if said else f".{node.attr}"
            if loads:
                statement.reads.append(key)
                self.readers[key].append(statement)
            # A call binds parameters, and `x: int` binds nothing.
            elif not isinstance(node, ast.arg) and getattr(statement.node, "value", True):
                self.binders[key].append(statement)
                value = getattr(statement.node, "value", getattr(statement.node, "iter", None))
                self.sharers[scope.get(_find_root(value))].append(key)
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not loads:
            self.changers[scope.get(_find_root(node.value))].append(statement)
        elif isinstance(node, ast.Call):
            self._note_call(node, scope, statement)
        of_class = isinstance(holder.node, ast.ClassDef) and isinstance(node, ast.stmt)
        ends = isinstance(node, _ENDS) or "*" in said or (self.catches and isinstance(node, (ast.Raise, ast.Assert)))
        # All of a class counts but methods that nobody names.
        if ends or (of_class and getattr(node, "name", "__").startswith("__")):
            holder.waiting.append(statement)
        elif isinstance(node, (ast.Break, ast.Continue)):
            statement.around(_LOOPS).waiting.append(statement)
        elif self.catches and isinstance(node, _MAY_RAISE) and statement.around(_TRIES) is not self.root:
            statement.around(_TRIES).waiting.append(statement)

    def _note_call(self, call: ast.Call, scope: Any, statement: _Statement) -> None:
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        receiver = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        for changed in receiver if name in _CHANGING else call.args[:1] if name in _CHANGING_FIRST else []:
            self.changers[scope.get(_find_root(changed))].append(statement)
        if (key := f".{name}" if receiver else scope.get(name)) in self.functions:
            function, inside = self.functions[key]
            said = [each.arg for each in ast.walk(function.node.args) if isinstance(each, ast.arg)]
            for given in [*receiver, *call.args, *(keyword.value for keyword in call.keywords)]:
                self.sharers[scope.get(_find_root(given))] += [inside[name] for name in said if name in inside]
            self.keys |= {id(each): inside[each.arg] for each in call.keywords if each.arg in inside}

    def _spread(self) -> None:
        self.root.reads.append(FUNCTION)
        todo = [self.root]
        while todo:
            statement = todo.pop()
            if not statement.holder.lives and statement is not self.root:
                statement.holder.waiting.append(statement)
            elif not statement.lives:
                statement.lives = True
                self.live.add(id(statement.node))
                todo += [*statement.waiting, statement.within or self.root]
                for key in {*statement.reads} - self.live:
                    self.live.add(key)
                    todo += self._find_changers(key)

    def _find_changers(self, key: Any) -> Iterator[_Statement]:
        """Statements that bind a name or change its object, also through another name or by a call."""
        names, holders = [key], []
        for name in names:  # which grows, as `holders` does
            found = self.changers[name] + (self.binders.get(key, []) if name is key else [])
            yield from found
            names += [other for other in self.sharers[name] if other not in names]
            # Whoever calls a function changes what the function changes and does not own.
            holders += [each.holder for each in found if name[0] is not each.holder and each.holder not in holders]
        for holder in holders:
            yield from self.readers[holder.key]
            holders += [each.holder for each in self.readers[holder.key] if each.holder not in holders]

    def fields(self, node: Any) -> Iterator[list[Any]]:
        """The fields that count, each as a list: what control can reach and, once that is known, what lives."""
        for field in [each for each in node._fields if each not in _UNWRITTEN]:
            values = value if isinstance(value := getattr(node, field, None), list) else [value]
            if values and isinstance(values[0], ast.stmt):
                values = [each for each in _list_reachable(values) if not self.live or id(each) in self.live]
            elif self.live and (field == "targets" or isinstance(node, (ast.Import, ast.ImportFrom))):
                values = [each for each in values if self.keys.get(id(each), FUNCTION) in self.live]
            yield values

    def write(self) -> tuple[str, str]:
        texts: list[tuple[str, str]] = []
        numbers: dict[Any, int] = {}
        stack: list[Any] = [self.root.node]
        while stack:
            node = stack.pop()
            if isinstance(node, ast.Constant):
                # Python refuses to write a huge integer in decimals, never in hexadecimals.
                of_type, value = type(node.value), node.value
                texts.append(
                    (hex(value) if isinstance(value, int) and of_type is int else repr(value), of_type.__name__)
                )
                continue
            if isinstance(node, ast.AST):
                key: Any = self.keys.get(id(node), getattr(node, "arg", None))
                if isinstance(key, tuple) or (key in self.binders and key != FUNCTION and not key.startswith(".__")):
                    key = f"${numbers.setdefault(key, len(numbers))}"
                stack += [")", *reversed([part for values in self.fields(node) for part in [*values, ";"]])]
                kind = "Assign" if isinstance(node, ast.AnnAssign) else type(node).__name__
                node = f"{kind} {node.name if isinstance(node, ast.alias) else ''} {key} ("
            texts.append((str(node),) * 2)
        return " ".join(text for text, _ in texts), " ".join(text for _, text in texts)


def _list_reachable(block: list[Any]) -> Iterator[ast.stmt]:
    """The statements of a block that control can reach; in the place of a decided `if` those that it runs."""
    stack = block[::-1]
    while stack:
        statement = stack.pop()
        holds = _decide(statement.test) if isinstance(statement, (ast.If, ast.While, ast.Assert)) else None
        if holds is None or (holds and isinstance(statement, ast.While)):
            yield statement
        elif not isinstance(statement, ast.Assert):
            stack += (statement.body if holds else statement.orelse)[::-1]
        if isinstance(statement, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
            return


def _decide(test: ast.expr) -> bool | None:
    """Whether a condition made of constants holds; `None` if they do not decide it."""
    if all(isinstance(node, _DECIDED) for node in ast.walk(test)):
        with suppress(TypeError):  # of `1 < "a"`
            return bool(eval(compile(ast.Expression(test), "<unknown>", "eval")))
    return None


def _find_root(value: Any) -> str | None:
    """The name of an object of which a value may be a part: `a` for `a.b[0]`, `a.get(1)` and `enumerate(a)`."""
    while isinstance(value, (ast.Attribute, ast.Subscript, ast.Starred, ast.IfExp, ast.Call)):
        if isinstance(value, ast.Call):
            name = getattr(value.func, "attr", getattr(value.func, "id", ""))
            first = value.args[:1] if isinstance(value.func, ast.Name) else [getattr(value.func, "value", None)]
            value = first[0] if first and name in _GIVING_PARTS else None
        else:
            value = value.body if isinstance(value, ast.IfExp) else value.value
    return getattr(value, "id", None)
