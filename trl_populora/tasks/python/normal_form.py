"""Normal forms: when two programs count as the same, and which nodes of a program live.

Programs count as the same if they differ only in the names that they bind, in layout, in comments, in annotations, or
in code that cannot change the result. Four methods of `_Program` make the normal forms:

    tree -> gather   visits every node that control can reach, and learns the names of every scope
         -> note     looks up every name's key; notes which keys each statement reads, binds, and changes in place
         -> spread   starts at `f` and its `return`: a statement lives if it binds or changes what a living one reads
         -> write    writes the living statements with numbered names -> (exact form, form without constants)

In doubt code counts as dead, and programs as equal. A pair that is wrongly taken for equal costs one refused proposal.
A pair that is wrongly taken for different is farmed: the teacher writes it again and again, and is paid each time.

These methods do not follow operators that a class defines, functions that variables hold, names that stand in texts,
and errors that nothing catches.
"""

from __future__ import annotations

import ast
import operator
from collections import ChainMap, Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from .programs import FUNCTION, drop_docstrings, list_bound_or_imported


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Lambda, *_COMPREHENSIONS)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_TRIES = (ast.Try, ast.TryStar)
_ENDS = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await)
_MAY_RAISE = (ast.Call, ast.Subscript, ast.Import, ast.ImportFrom, *_LOOPS)
_EMPTY = (ast.Pass, ast.Global, ast.Nonlocal)
_DECIDED = (ast.Constant, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, ast.cmpop)
# Fields of a node that are not written. Those of the first line make no difference. Those of the second hold names,
# which are written as keys.
_UNWRITTEN = {"annotation", "ctx", "kind", "returns", "simple", "type_comment", "type_ignores", "type_params"}
_UNWRITTEN |= {"arg", "asname", "attr", "id", "kwd_attrs", "name", "rest"}
# Attributes that Python itself looks up, as `__init__`. A class cannot rename them.
_SPECIAL = {"__delete__", "__getattr__", "__match_args__", "__post_init__", "__set__", "__set_name__", "__slots__"}
for _each in (operator, type, int, Counter, memoryview, reversed, list_bound_or_imported):
    _SPECIAL.update(name for name in dir(_each) if name.startswith("__"))
# The key that stands for the object of any method.
_OBJECT = ".<self>"
# Methods that change their object: those of mutable types that no immutable type has, and five others.
_CHANGING = {name for kind in (list, dict, set, bytearray, deque) for name in dir(kind)}.difference(
    *map(dir, (tuple, bytes, frozenset, MappingProxyType))
) | {"move_to_end", "seek", "send", "subtract", "write"}
# Functions that change their first argument.
_CHANGING_FIRST = {"heapify", "heappop", "heappush", "heappushpop", "heapreplace", "insort", "next", "setattr"}
# Functions and methods that may return a part of an object. Who changes the part changes the object.
_GIVING_PARTS = {"enumerate", "get", "items", "iter", "max", "min", "next", "pop", "reversed", "setdefault", "values"}


def normal_forms(tree: ast.Module) -> tuple[str, str]:
    """
    Writes a program in two forms.

    Returns:
        The exact form, which two programs share if they count as duplicates; and the form without constants, which
        names the type of every constant in place of its value. Programs that differ only in the values of constants
        share the second form, unless such a constant decides a condition.
    """
    return _Program(tree).write()


def walk_living(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields a program's nodes without annotations, contexts and dead code; dead means what [`normal_forms`] means."""
    program, stack = _Program(tree), list[ast.AST]([tree])
    while stack:
        yield (node := stack.pop())
        stack.extend(each for values in program.list_fields(node) for each in values if isinstance(each, ast.AST))


class _Names(dict[Any, Any]):
    """
    The keys of the names that one scope binds.

    Attributes:
        node: Whose scope it is: the module, a function, a class, a lambda or a comprehension.
        of_class: Whether it is a class.
        parameters: The keys of the parameters.
    """

    def __init__(self, node: Any):
        super().__init__()
        self.node, self.of_class = node, isinstance(node, ast.ClassDef)
        self.parameters: list[Any] = []


class _Statement:
    """
    A statement, or the module, without the statements inside it.

    Attributes:
        within: The statement around it; `None` for the module.
        holder: The function, class or module whose body it belongs to. Running that body runs the statement.
        key: If it defines a function, the key of the function's name.
        reads: Keys of the names that it reads.
        waiting: Statements that live as soon as this one does.
    """

    def __init__(self, node: Any, within: Any):
        self.node, self.within = node, within
        in_block = within is not None and not isinstance(within.node, (*_FUNCTIONS, ast.ClassDef))
        self.holder: Any = (within.holder if in_block else within) or self
        self.key: Any = None
        self.reads: list[Any] = []
        self.waiting: list[_Statement] = []
        self.lives = False

    def find_around(self, kinds: tuple[type, ...]) -> Any:
        """Finds the innermost statement of these types around this one; the module if there is none."""
        outer = self.within
        while not isinstance(outer.node, (*kinds, ast.Module)):
            outer = outer.within
        return outer


class _Program:
    """
    A program, and what is known about its names.

    A name is known by its key, so that two variables of one name in two functions are not mixed up:

    - an attribute, or a name that a class binds: `.name`, whatever object or class it belongs to
    - a name that the program does not bind, as a builtin, and the top-level `f`: the name itself
    - any other name: (holder, scope, name)

    Attributes:
        keys: The key that each node of the tree names, by the identity of the node.
        live: Keys that living statements read, and the identities of these statements' nodes. Empty until `_spread`.
        functions: By the key that is called: the names inside the functions, lambdas or classes that this may be.
        readers, binders, changers: The statements that read a key, give it a value, or change its object in place.
        sharers: For the key of a name, the keys of other names that may hold a part of its object. Between an argument
            and the parameters stands `("call", key)`, with the key that is called.
        catches: Whether the program has any `try`.
    """

    def __init__(self, tree: ast.Module):
        self.root = _Statement(tree, None)
        self.keys: dict[int, Any] = {}
        self.live: set[Any] = set()
        self.functions: dict[Any, list[_Names]] = defaultdict(list)
        self.readers: dict[Any, list[_Statement]] = defaultdict(list)
        self.binders: dict[Any, list[_Statement]] = defaultdict(list)
        self.changers: dict[Any, list[_Statement]] = defaultdict(list)
        self.sharers: dict[Any, list[Any]] = defaultdict(list)
        self._gather()
        self._spread()

    def _gather(self) -> None:
        """Visits every node that control can reach. Gives names their keys, scope by scope, and then notes uses."""
        visited, elsewhere, module = [], dict[int, Any](), ChainMap[str, Any](_Names(self.root.node))
        # An explicit stack: a tree may be deeper than Python's recursion limit allows.
        stack: list[tuple[Any, Any, _Statement]] = [(self.root.node, module, self.root)]
        while stack:
            node, scope, statement = stack.pop()
            scope = elsewhere.get(id(node), scope)
            if isinstance(node, ast.stmt):
                statement = _Statement(node, statement)
            visited.append((node, scope, statement))
            names = scope.maps[0]
            for name in list_bound_or_imported(node):
                # The sandbox calls `f` by its name, so this one name is not replaced by a number.
                fixed = name == FUNCTION and names is module.maps[0]
                key = name if fixed else f".{name}" if names.of_class else (statement.holder, id(names), name)
                names.setdefault(name, key)
            if isinstance(node, ast.arg):
                self._note_parameter(names[node.arg], names, statement.holder)
            elif isinstance(node, (ast.Global, ast.Nonlocal)):
                outer = module if isinstance(node, ast.Global) else scope.parents
                scope.update({n: outer.setdefault(n, (self.root, id(outer.maps[0]), n)) for n in node.names})
            elif isinstance(node, ast.NamedExpr):
                # `:=` in a comprehension binds a name of the function around it.
                outer = scope
                while isinstance(outer.maps[0].node, _COMPREHENSIONS):
                    outer = outer.parents
                elsewhere[id(node.target)] = outer
            elif isinstance(node, _SCOPES):
                elsewhere |= {id(_take_decided(each)): scope for each in _list_outside(node)}
                # Functions, lambdas, comprehensions and inner classes do not see the names that the class around them
                # binds.
                outer, scope = scope, (scope.parents if names.of_class else scope).new_child(_Names(node))
                self._note_callable(node, outer, scope.maps[0], statement)
            children = [each for values in self.list_fields(node) for each in values if isinstance(each, ast.AST)]
            stack.extend((each, scope, statement) for each in reversed(children))
        self.catches = any(isinstance(node, _TRIES) for node, *_ in visited)
        # Noted after all scopes are complete: a function may use a name that is bound further down.
        for each in visited:
            self._note(*each)

    def _note_callable(self, node: Any, scope: Any, inside: _Names, statement: _Statement) -> None:
        """Notes by which keys a function, lambda or class may be called. `scope` is the one around it."""
        # `g = lambda ...` is called by `g`.
        bound = getattr(statement.node, "targets", []) if getattr(statement.node, "value", 0) is node else [node]
        for key in [scope[name] for each in bound for name in list_bound_or_imported(each)]:
            self.functions[key].append(inside)
            if isinstance(node, _FUNCTIONS):
                statement.key = key
            if isinstance(node, ast.ClassDef):
                # Any class may inherit from this one, and its class methods call it by their first parameter.
                self.functions[".__init__"].append(inside)
                self.functions[id(node)] = self.functions[key]
            elif key == ".__init__":
                self.functions[id(scope.maps[0].node)].append(inside)

    def _note_parameter(self, key: Any, inside: _Names, holder: _Statement) -> None:
        """Notes a parameter. The first one of a method holds the object, or in a class method the class."""
        if isinstance(holder.node, ast.ClassDef) and not inside.parameters:
            # Methods change their object for each other. Which methods belong to one object is not worked out.
            self.sharers[key].append(_OBJECT)
            self.sharers[_OBJECT].append(key)
            self.functions[key] = self.functions[id(holder.node)]
        inside.parameters.append(key)

    def _note(self, node: Any, scope: Any, statement: _Statement) -> None:
        """Notes what one node reads, binds and changes, and with which other statement the node's statement lives."""
        loads, holder = isinstance(getattr(node, "ctx", None), ast.Load), statement.holder
        said = (node.id,) if isinstance(node, ast.Name) else list_bound_or_imported(node)
        if said or isinstance(node, ast.Attribute):
            key = self.keys[id(node)] = scope.get(said[0], said[0]) if said else f".{node.attr}"
            if loads:
                statement.reads.append(key)
                self.readers[key].append(statement)
            # A parameter gets its values from calls, which `_note_call` notes. The statement `x: int` gives none. In a
            # class it declares a field.
            elif not isinstance(node, ast.arg) and (getattr(statement.node, "value", True) or scope.maps[0].of_class):
                self.binders[key].append(statement)
                value = getattr(statement.node, "value", getattr(statement.node, "iter", None))
                self.sharers[scope.get(_find_root(value))].append(key)
        statement.reads += [f".{name}" for name in getattr(node, "kwd_attrs", ())]
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not loads:
            self.changers[scope.get(_find_root(node.value))].append(statement)
        elif isinstance(node, ast.Call):
            self._note_call(node, scope, statement)
        of_class = isinstance(holder.node, ast.ClassDef) and isinstance(node, ast.stmt) and drop_docstrings([node])
        ends = isinstance(node, _ENDS) or "*" in said or (self.catches and isinstance(node, (ast.Raise, ast.Assert)))
        # When a class lives, its body lives with it, except methods and inner classes: each lives when it is named.
        # Methods such as `__init__` live with the class, because Python itself calls them.
        if ends or (of_class and not isinstance(node, _EMPTY) and getattr(node, "name", "__init__") in _SPECIAL):
            holder.waiting.append(statement)
        elif isinstance(node, (ast.Break, ast.Continue)):
            statement.find_around(_LOOPS).waiting.append(statement)
        # A call, a subscript, an import or a loop inside a `try` may raise, and so decide which handler runs.
        elif self.catches and isinstance(node, _MAY_RAISE) and statement.find_around(_TRIES) is not self.root:
            statement.find_around(_TRIES).waiting.append(statement)

    def _note_call(self, call: ast.Call, scope: Any, statement: _Statement) -> None:
        """Notes what a call changes, and that a called function's parameters may hold the arguments of the call."""
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        receiver = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        for changed in receiver if name in _CHANGING else call.args[:1] if name in _CHANGING_FIRST else []:
            self.changers[scope.get(_find_root(changed))].append(statement)
        found = self.functions.get(called := f".{name}" if receiver else scope.get(name), [])
        # Any parameter may hold any argument: which one holds which is not worked out.
        self.sharers["call", called] = [key for inside in found for key in inside.parameters]
        for given in [*receiver, *call.args, *(keyword.value for keyword in call.keywords)]:
            self.sharers[scope.get(_find_root(given))].append(("call", called))
        if any(inside.of_class for inside in found):
            found = [*self.functions[".__init__"], *found]  # the class may inherit its `__init__` or its fields
        self.keys |= {id(each): inside[each.arg] for inside in found for each in call.keywords if each.arg in inside}

    def _spread(self) -> None:
        """Finds the living statements: starts at `f`, and adds whatever binds or changes what a living one reads."""
        self.root.reads.append(FUNCTION)
        todo = [self.root]
        while todo:
            statement = todo.pop()
            # A statement runs only if the function around it does. So it waits until that function lives.
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
        """Yields the statements that bind a key or change its object, be it through another name or in a call."""
        names, called, known = [key], list[Any](), {key}
        # Both lists grow while they are walked through.
        for name in names:
            found = self.changers[name] + (self.binders.get(key, []) if name is key else [])
            yield from found
            new = {*self.sharers[name]} - known
            known |= new
            names += new
            # A function may change an object of its caller. Then every caller of the function changes it, too.
            called += {each.holder.key for each in found if name[0] is not each.holder}.difference(called)
        for function in called:
            yield from self.readers[function]
            called += {each.holder.key for each in self.readers[function]}.difference(called)

    def list_fields(self, node: Any) -> Iterator[list[Any]]:
        """
        Yields the fields of a node that count, each as a list. Statements that control cannot reach are left out.
        After `_spread`, dead statements, dead targets and unused imports are left out, too.
        """
        for field in [each for each in node._fields if each not in _UNWRITTEN]:
            values = value if isinstance(value := getattr(node, field, None), list) else [value]
            values = [_take_decided(each) for each in values]
            if values and isinstance(values[0], ast.stmt):
                values = [each for each in _list_reachable(values) if not self.live or id(each) in self.live]
            elif self.live and (field == "targets" or isinstance(node, (ast.Import, ast.ImportFrom))):
                values = [each for each in values if self.keys.get(id(each), FUNCTION) in self.live]
            yield values

    def write(self) -> tuple[str, str]:
        """Writes the exact form and the form without constants."""
        texts: list[tuple[str, str]] = []
        numbers: dict[Any, int] = {}
        stack: list[Any] = [self.root.node]
        while stack:
            node = stack.pop()
            if isinstance(node, ast.Constant):
                # Python refuses to write a huge integer in decimal digits. It never does so in hexadecimal ones.
                value: Any = node.value
                texts.append((hex(value) if type(value) is int else repr(value), type(value).__name__))
                continue
            if isinstance(node, ast.AST):
                key = self.keys.get(id(node), getattr(node, "arg", None) or "")
                keys = [key, *(f".{name}" for name in getattr(node, "kwd_attrs", ()))]
                # Names of the program are numbered in the order in which they are met. Names of Python stay.
                for place, key in enumerate(keys):
                    if isinstance(key, tuple) or (key in self.binders and key != FUNCTION and key[1:] not in _SPECIAL):
                        keys[place] = f"${numbers.setdefault(key, len(numbers))}"
                stack += [")", *reversed([part for values in self.list_fields(node) for part in [*values, ";"]])]
                kind = "Assign" if isinstance(node, ast.AnnAssign) else type(node).__name__
                node = f"{kind} {node.name if isinstance(node, ast.alias) else ''} {' '.join(keys)}("
            texts.append((str(node),) * 2)
        return " ".join(text for text, _ in texts), " ".join(text for _, text in texts)


def _list_outside(node: Any) -> list[Any]:
    """Lists the parts of a function, class, lambda or comprehension that Python computes in the scope around it."""
    if isinstance(node, _COMPREHENSIONS):
        return [node.generators[0].iter]
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords]
    return [*getattr(node, "decorator_list", []), *node.args.defaults, *node.args.kw_defaults]


def _list_reachable(block: list[Any]) -> Iterator[ast.stmt]:
    """
    Yields the statements of a block up to and including its first `return`, `raise`, `break` or `continue`. If
    constants decide an `if`, or keep a `while` from running, the statements that run instead stand in its place. An
    `assert` that holds by constants is left out, and one that fails by them ends the block. An `if` whose branches all
    return does not end it.
    """
    stack = block[::-1]
    while stack:
        statement = stack.pop()
        holds = _decide(statement.test) if isinstance(statement, (ast.If, ast.While, ast.Assert)) else None
        fails = holds is False and isinstance(statement, ast.Assert)
        if holds is None or fails or (holds and isinstance(statement, ast.While)):
            yield statement
        elif not isinstance(statement, ast.Assert):
            stack += (statement.body if holds else statement.orelse)[::-1]
        if fails or isinstance(statement, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
            return


def _take_decided(node: Any) -> Any:
    """Takes the operand that constants choose, as `a` in `a if True else b` and `True and a`; else takes the node."""
    while isinstance(node, (ast.IfExp, ast.BoolOp)):
        first = node.test if isinstance(node, ast.IfExp) else node.values[0]
        if (holds := _decide(first)) is None:
            break
        if isinstance(node, ast.IfExp):
            node = node.body if holds else node.orelse
        elif holds is isinstance(node.op, ast.Or):
            node = first  # the first operand settles it
        elif len(node.values) == 2:
            node = node.values[1]
        else:
            node = ast.BoolOp(node.op, node.values[1:])
    return node


def _decide(test: ast.expr) -> bool | None:
    """
    Says whether a condition holds. `None` if it has other parts than constants, comparisons, minus signs, `not`, `and`
    and `or`, or if it cannot be computed.
    """
    # Safe to evaluate: `_DECIDED` has no names, calls or powers, so this is quick and has no effects.
    if all(isinstance(node, _DECIDED) for node in ast.walk(test)):
        with suppress(TypeError, ValueError):  # as `1 < "a"` raises, and `300 in b"a"`
            return bool(eval(compile(ast.Expression(test), "<unknown>", "eval")))
    return None


def _find_root(value: Any) -> str | None:
    """Finds the name whose object a value may be a part of: `a` for `a.b[0]`, `a.get(1)` and `enumerate(a)`."""
    while isinstance(value, (ast.Attribute, ast.Subscript, ast.Starred, ast.IfExp, ast.Call)):
        if isinstance(value, ast.Call):
            name = getattr(value.func, "attr", getattr(value.func, "id", ""))
            first = value.args[:1] if isinstance(value.func, ast.Name) else [getattr(value.func, "value", None)]
            value = first[0] if first and name in _GIVING_PARTS else None
        else:
            value = value.body if isinstance(value, ast.IfExp) else value.value
    return getattr(value, "id", None)
