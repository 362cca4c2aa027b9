"""Which parts of a program change nothing, as far as its text proves (verify).

An expression is silent if evaluating it changes nothing that anything else can see. It may still raise: where nothing
in the program could catch that, it ends the run without a result, and so no two results differ; where something could,
only what cannot raise is silent. A loop or builtin that iterates is silent over what nobody else holds, because it
uses up an iterator.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from .decided import FAR, truth
from .programs import FUNCTION
from .visible import names_bound


_PASSES = 8  # what one dead assignment alone had read is dead in the next pass
_JUMPS = (ast.Return, ast.Raise, ast.Break, ast.Continue)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_INNER = (*_SCOPES, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_ANSWERING = frozenset(
    [
        *("abs", "bool", "chr", "complex", "divmod", "float", "int", "isinstance", "len", "ord", "print", "range"),
        *("repr", "round", "str"),
    ]
)
_ITERATING = frozenset(
    [
        *("all", "any", "bytes", "enumerate", "frozenset", "list", "max", "min", "reversed", "set", "sorted", "sum"),
        *("tuple", "zip"),
    ]
)
_MAKING = _ITERATING - {"all", "any", "max", "min", "sum"} | {"range", "repr", "str"}
_KEYWORDS = ("end", "flush", "reverse", "sep")  # of builtins; `key` calls a function, `file` writes elsewhere
# Modules without objects that act when they are compared, added or tested.
_QUIET_MODULES = frozenset(
    [
        *("bisect", "calendar", "cmath", "collections", "copy", "datetime", "fractions", "functools", "heapq"),
        *("itertools", "json", "math", "numbers", "operator", "re", "statistics", "string", "textwrap"),
        *("time", "typing"),
    ]
)
_ACTING = ("ChainMap", "UserDict", "UserList", "UserString")  # but for these
# What may catch an error, or give operators a meaning of the program's own.
_CATCHING = (ast.Try, ast.With, ast.AsyncWith, ast.ClassDef, getattr(ast, "TryStar", ast.Try))
_DISPLAYS = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Set, ast.Dict)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SILENT = (
    *_DISPLAYS,
    *_COMPREHENSIONS,
    *(ast.Name, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.Call, ast.Subscript, ast.Slice, ast.Attribute),
    *(ast.IfExp, ast.FormattedValue, ast.Lambda, ast.arguments, ast.arg, ast.keyword, ast.comprehension),
    *(ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
_SURE = (ast.Constant, ast.Name, ast.List, ast.Tuple, ast.BoolOp, ast.boolop, ast.IfExp, ast.expr_context)


class DeadCode:
    """
    What may be left out of a program when it is compared.

    Args:
        tree (`ast.Module`): A program.
        nodes (`Sequence[ast.AST]`): All of its nodes.
    """

    def __init__(self, tree: ast.Module, nodes: Sequence[ast.AST]):
        self.tree = tree
        self.statements: set[int] = set()  # identities of the dead ones
        self.branches: dict[int, list[ast.stmt]] = {}  # by the identity of an `if` that is decided: what is run
        self.bindings = Counter(name for node in nodes for name in names_bound(node))
        self.builtins = (_ANSWERING | _ITERATING) - self.bindings.keys()
        asked = {id(node.func) for node in nodes if isinstance(node, ast.Call) and len(node.args) == 1}
        # `type("A", (), {...})` is a class as well.
        types = (node for node in nodes if isinstance(node, ast.Name) and node.id == "type")
        self.careful = any(map(_may_catch, nodes)) or any(id(node) not in asked for node in types)
        # Looking something up in a `defaultdict` puts it there.
        self.lookups_act = any("defaultdict" in _mentions(node) for node in nodes)
        self.read = _names_read(nodes)
        self.given = self._given(nodes)
        self._find([node for node in nodes if isinstance(node, (ast.Module, *_SCOPES))])

    def alive(self, block: Iterable[ast.AST]) -> Iterator[ast.AST]:
        """The statements of a block that count; in the place of a decided `if` what it runs."""
        for statement in self._run(block):
            if id(statement) not in self.statements:
                yield statement

    def _run(self, block: Iterable[ast.AST]) -> Iterator[ast.AST]:
        for statement in block:
            if id(statement) in self.branches:
                yield from self._run(self.branches[id(statement)])
            else:
                yield statement

    def _given(self, nodes: Sequence[ast.AST]) -> set[str]:
        """Parameters of an `f` that only the sandbox calls: always there in its body, plain data, no iterators."""
        functions = [node for node in self.tree.body if isinstance(node, ast.FunctionDef) and node.name == FUNCTION]
        called = any(isinstance(node, ast.Name) and node.id == FUNCTION for node in nodes)
        if called or self.bindings[FUNCTION] != 1 or len(functions) != 1 or functions[0].decorator_list:
            return set()
        declared = {name for node in nodes if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}
        body = {id(node) for statement in functions[0].body for node in ast.walk(statement)}
        named = (node for node in nodes if isinstance(node, ast.Name))
        declared |= {node.id for node in named if isinstance(node.ctx, ast.Del) or id(node) not in body}
        arguments = functions[0].args
        names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        names = names[: len(names) - len(arguments.defaults)]
        return {name for name in names if self.bindings[name] == 1} - declared

    def _find(self, scopes: Sequence[ast.AST]) -> None:
        """Innermost first, until nothing more is found."""
        owned = [_own_nodes(scope) for scope in reversed(scopes)]
        held = [Counter(name for node in own[1:] for name in _binds(node)) for own in owned]
        for _ in range(_PASSES):
            known = len(self.statements)
            for own, names in zip(owned, held, strict=True):
                local = None if isinstance(own[0], ast.Module) else names
                self._decide(own, local)
                for node in reversed(own):
                    for block in [] if node is not own[0] and isinstance(node, _INNER) else _blocks(node):
                        self._bury(block, local)
            if len(self.statements) == known:
                return
            self.read = _names_read(self._living())

    def _decide(self, own: Sequence[ast.AST], local: Counter | None) -> None:
        """Buries the branches that are never taken."""
        for node in own:
            if not isinstance(node, (ast.If, ast.While)) or id(node) in self.branches:
                continue
            holds = truth(node.test)
            if holds is None or (holds and isinstance(node, ast.While)):
                continue
            never, run = (node.orelse, node.body) if holds else (node.body, node.orelse)
            if self._may_go(never, local):
                self.branches[id(node)] = run
                for statement in never:
                    self._drop(statement, local)

    def _bury(self, block: list[ast.stmt], local: Counter | None) -> None:
        ended = False
        for statement in self._run(block):
            if id(statement) in self.statements:
                continue
            if (ended and self._may_go([statement], local)) or self._is_dead(statement):
                self._drop(statement, local)
            ended = ended or isinstance(statement, _JUMPS)

    def _drop(self, statement: ast.AST, local: Counter | None) -> None:
        if id(statement) not in self.statements:
            self.statements.add(id(statement))
            if local is not None:
                local.subtract(_bound_in([statement]))

    def _may_go(self, statements: Sequence[ast.AST], local: Counter | None) -> bool:
        """Whether statements that are never run can be left out: a name that they bind is local all the same."""
        if any(isinstance(node, FAR) for statement in statements for node in ast.walk(statement)):
            return False
        if local is None:
            return True
        bound = _bound_in(statements)
        return all(name not in self.read or local[name] > count for name, count in bound.items())

    def _living(self) -> Iterator[ast.AST]:
        stack: list[ast.AST] = [self.tree]
        while stack:
            node = stack.pop()
            if id(node) not in self.statements:
                yield node
                stack.extend(ast.iter_child_nodes(node))

    def _is_dead(self, statement: ast.AST) -> bool:
        if isinstance(statement, ast.Pass):
            return True
        if isinstance(statement, ast.Expr):
            return self._is_silent(statement.value)
        if isinstance(statement, ast.Assert):
            return statement.msg is None and truth(statement.test) is True
        if isinstance(statement, ast.Assign):
            return all(map(self._is_unread, statement.targets)) and self._is_silent(statement.value)
        if isinstance(statement, ast.AnnAssign):
            parts = [statement.annotation, *([statement.value] if statement.value else [])]
            return self._is_unread(statement.target) and all(map(self._is_silent, parts))
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            return self._is_dead_import(statement)
        if isinstance(statement, ast.FunctionDef):
            return self._is_dead_function(statement)
        if isinstance(statement, ast.If):
            return self._all_dead(statement) and self._is_silent(statement.test)
        if isinstance(statement, ast.For):
            unseen = self._is_unread(statement.target) and self._is_silent(statement.iter)
            sure = not self.careful or isinstance(statement.iter, (ast.List, ast.Tuple))
            return unseen and sure and self._all_dead(statement) and self._is_fresh(statement.iter)
        return False

    def _all_dead(self, statement: ast.If | ast.For) -> bool:
        return not any(self.alive([*statement.body, *statement.orelse]))

    def _is_unread(self, target: ast.expr) -> bool:
        return isinstance(target, ast.Name) and target.id not in self.read

    def _is_dead_import(self, statement: ast.Import | ast.ImportFrom) -> bool:
        bound = {name for alias in statement.names for name in names_bound(alias)}
        if "*" in bound or not self.read.isdisjoint(bound):
            return False
        if isinstance(statement, ast.ImportFrom):
            return not self.careful and statement.module != "__future__"
        return not self.careful or all(alias.name in _QUIET_MODULES for alias in statement.names)

    def _is_dead_function(self, function: ast.FunctionDef) -> bool:
        """Nobody calls it; its defaults and annotations are evaluated all the same."""
        if function.name in self.read or function.decorator_list:
            return False
        arguments = function.args
        annotations = [node.annotation for node in ast.walk(arguments) if isinstance(node, ast.arg)]
        evaluated = [*arguments.defaults, *arguments.kw_defaults, *annotations, function.returns]
        return all(self._is_silent(each) for each in evaluated if each)

    def _is_silent(self, value: ast.AST) -> bool:
        return all(map(self._is_silent_itself, ast.walk(value)))

    def _is_silent_itself(self, node: ast.AST) -> bool:
        """Whether a node acts, given that what stands below it does not."""
        if self.careful:
            return isinstance(node, _SURE) and (not isinstance(node, ast.Name) or node.id in self.given)
        if isinstance(node, ast.Call):
            return self._is_silent_call(node)
        if isinstance(node, ast.Compare):
            pairs = zip(node.ops, node.comparators, strict=True)
            return all(self._is_fresh(right) for op, right in pairs if isinstance(op, (ast.In, ast.NotIn)))
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Sub, ast.BitAnd, ast.BitOr, ast.BitXor)):
            # A view of a dictionary uses an iterator up: `a.keys() & b`.
            return any(isinstance(side, ast.Constant) or self._is_given(side) for side in (node.left, node.right))
        if isinstance(node, ast.Subscript):
            return not self.lookups_act or self._is_given(node.value)
        if isinstance(node, ast.comprehension):
            return self._is_fresh(node.iter)
        if isinstance(node, ast.keyword):
            return node.arg in _KEYWORDS
        return isinstance(node, _SILENT)

    def _is_silent_call(self, call: ast.Call) -> bool:
        if not isinstance(call.func, ast.Name) or call.func.id not in self.builtins:
            return False
        return call.func.id in _ANSWERING or all(map(self._is_fresh, call.args))

    def _is_fresh(self, value: ast.AST) -> bool:
        """Whether nobody misses what iterating over it takes."""
        if isinstance(value, ast.Call):
            return isinstance(value.func, ast.Name) and value.func.id in _MAKING & self.builtins
        return isinstance(value, (*_DISPLAYS, *_COMPREHENSIONS)) or self._is_given(value)

    def _is_given(self, value: ast.AST) -> bool:
        return isinstance(value, ast.Name) and value.id in self.given


def _may_catch(node: ast.AST) -> bool:
    if not _mentions(node).isdisjoint(_ACTING):
        return True
    if isinstance(node, ast.Import):
        return not all(map(_is_quiet, node.names))
    if isinstance(node, ast.ImportFrom):
        star = any(alias.name == "*" for alias in node.names)
        return star or (node.module or "").partition(".")[0] not in (*_QUIET_MODULES, "__future__")
    return isinstance(node, _CATCHING)


def _is_quiet(module: ast.alias) -> bool:
    return module.name.partition(".")[0] in _QUIET_MODULES


def _mentions(node: ast.AST) -> set[str]:
    """Names under which a node may reach what a module offers."""
    if isinstance(node, ast.Attribute):
        return {node.attr}
    return {node.name} if isinstance(node, ast.alias) else set()


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block


def _own_nodes(scope: ast.AST) -> list[ast.AST]:
    """A scope and its nodes without those of inner scopes, outer ones first; what a class binds is an attribute."""
    own, stack = [], [scope]
    while stack:
        node = stack.pop()
        own.append(node)
        if node is scope or not isinstance(node, _INNER):
            stack.extend(ast.iter_child_nodes(node))
    return own


def _binds(node: ast.AST) -> tuple[str, ...]:
    """As [`names_bound`], and names that are deleted: those are local as well."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del):
        return (node.id,)
    return names_bound(node)


def _bound_in(statements: Iterable[ast.AST]) -> Counter:
    return Counter(name for each in statements for node in _statement_nodes(each) for name in _binds(node))


def _statement_nodes(statement: ast.AST) -> list[ast.AST]:
    return [statement] if isinstance(statement, _INNER) else _own_nodes(statement)


def _names_read(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that these nodes ask for; `x += 1` does, because it may change a list that others hold."""
    read = {FUNCTION}  # the sandbox does
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            read.add(node.id)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            read.add(node.target.id)
    return read
