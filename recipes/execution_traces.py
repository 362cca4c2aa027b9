"""
Works programs out line by line: what a small model can imitate between `<think>` and `</think>`.

A line is one operation with the values put in and then the result; what else a statement changed follows. The parts of
a statement come before it and what they give stands for them in it; conditions, the items of loops and comprehensions,
and the additions of a sum have lines of their own:

    len([1, 5]) = 2
    if 2 > 1: True
    for x in [1, 5]
    x = 1
    total = 0 + 1 = 1
    seen.append(1); seen = [3, 1]
    1 * 2 = 2
    return 2 + 3 = 5

Helper functions, recursive calls and what a `lambda` does are one step. The program runs in the sandbox: behind it
stands a copy of its `f` that calls the recorder of `trace_recorder.py`, which writes the lines. A program whose `f`
holds `try`, `with`, `match`, `yield`, `global` or a class, or a value that is no plain data, has no trace, nor has a
call that takes too long. The embedded base learned from `tiny_traces.py`, which knows its grammar.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trl_populora.sandbox import Job, Sandbox, values
from trl_populora.tasks.python.programs import FUNCTION, list_bound_names, parse_function


MAX_LINES, MAX_CHARACTERS, MAX_VALUE = 60, 2000, 120
RECORDER = Path(__file__).with_name("trace_recorder.py")
ENTRY = f"""
_recorder = Recorder({MAX_LINES}, {MAX_CHARACTERS}, {MAX_VALUE})
_variables = locals


def call_traced(*arguments):
    returned = _traced(*arguments)
    _recorder.end(returned)
    return [_recorder.lines, returned]
"""
_MARK = "_slot_"  # no program has it
_SLOT = re.compile(rf"{_MARK}(\w+?){_MARK}")


@dataclass(frozen=True)
class Trace:
    """The lines of a call, and the canonical text of what it returned."""

    lines: tuple[str, ...]
    output: str


def trace(calls: Sequence[tuple[str, str]], sandbox: Sandbox) -> list[Trace | None]:
    """
    Traces calls of programs.

    Args:
        calls (`Sequence[tuple[str, str]]`): A program and the canonical text of its arguments, each.
        sandbox (`Sandbox`): Runs them.

    Returns:
        `list[Trace | None]`: In order; `None` where there is no trace.
    """
    texts = [instrument(program) for program, _ in calls]
    jobs = {place: Job(text, (calls[place][1],), function="call_traced") for place, text in enumerate(texts) if text}
    traces: list[Trace | None] = [None] * len(calls)
    for place, verdict in zip(jobs, sandbox.run(jobs.values()), strict=True):
        if verdict.ok:
            lines, returned = values.decode(verdict.outputs[0])
            traces[place] = Trace(tuple(lines), values.encode(returned))
    return traces


def instrument(program: str) -> str | None:
    """The program with the recorder and a traced copy of `f` behind it; `None` if it cannot be followed."""
    tree = parse_function(program)
    if tree is None or _MARK in program:
        return None
    function = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == FUNCTION][-1]
    try:
        traced = ast.unparse(_Instrument(function).copy())
    except (_CannotFollow, RecursionError):
        return None
    return "\n".join([program, RECORDER.read_text(), ENTRY, traced])


class _CannotFollow(Exception):  # noqa: N818 - it says what, and never leaves this file
    """A statement without a line."""


class _Instrument:
    """Writes the traced copy of a function; its statements are changed in place."""

    def __init__(self, function: ast.FunctionDef):
        self.function = function
        self.variables = {name for node in ast.walk(function) for name in list_bound_names(node)}
        self.found: dict[str, str] = {}  # parts by name, as they stand in the program

    def copy(self) -> ast.FunctionDef:
        self.function.name, self.function.decorator_list = "_traced", []
        self.function.body = self.block(self.function.body)
        return ast.fix_missing_locations(self.function)

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return [new for statement in body for new in self.statement(statement)]

    def statement(self, node: ast.stmt) -> list[ast.stmt]:
        """What stands in its place."""
        match node:
            case ast.Assign() | ast.AnnAssign(value=ast.expr()):
                return self.assignment(node)
            case ast.AugAssign(target=ast.Name(id=name)):
                added = self.part(node.value)
                begun = self.step(f"{name} = ", ast.BinOp(_load(name), node.op, node.value))
                node.value = added
                return [ast.Expr(begun), node, ast.Expr(_call("value", _load(name))), self.changed(name)]
            case ast.Expr(value=ast.Call(args=[_, *_])):
                given = [self.part(each) for each in node.value.args]
                begun = self.step("", node, "")
                node.value.args = given
                return [ast.Expr(begun), node, ast.Expr(_call("value", ast.Constant(None))), self.changed()]
            case ast.Return():
                node.value = self.noted("return ", node.value or ast.Constant(None))
            case ast.If() | ast.While():
                node.test = self.noted(f"{type(node).__name__.lower()} ", node.test, ": ")
                node.body, node.orelse = self.block(node.body), self.block(node.orelse)
            case ast.For():
                self.loop(node)
            case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.AnnAssign():
                pass
            case ast.FunctionDef() | ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Raise():
                pass  # no line: what a helper does is seen where it is called
            case ast.Expr() | ast.AugAssign() | ast.Delete() | ast.Break() | ast.Continue():
                return [self.shown(node), node, self.changed()]
            case _:
                raise _CannotFollow(type(node).__name__)
        return [node]

    def assignment(self, node: ast.Assign | ast.AnnAssign) -> list[ast.stmt]:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        whole = ast.Assign(targets, _load(_MARK))
        node.value = self.noted(whole, node.value or ast.Constant(None))
        return [node, self.changed(*(each.id for each in _elements(targets) if isinstance(each, ast.Name)))]

    def loop(self, node: ast.For) -> None:
        target = _text(ast.Assign([node.target], _load(_MARK))).removesuffix(f" = {_MARK}")
        node.iter = self.noted(f"for {target} in ", node.iter, "")
        taken = ast.parse(target, mode="eval").body
        item = ast.Expr(_call("item", ast.Constant(target), taken))
        node.body, node.orelse = [item, *self.block(node.body)], self.block(node.orelse)

    def shown(self, node: ast.stmt) -> ast.stmt:
        """Notes a statement as it stands, without a value of its own."""
        return ast.Expr(ast.Call(self.step("", node, ""), [ast.Constant(None)], []))

    def changed(self, *told: str) -> ast.stmt:
        """Notes what a statement has changed beside the variables `told`."""
        return ast.Expr(_call("changed", _texts(told), _call_of("_variables")))

    def noted(self, target: str | ast.stmt, value: ast.expr, mark: str = " = ") -> ast.expr:
        """The value, noted on its way, and its parts before it."""
        within = self.within(value)
        return ast.Call(self.step(target, value, mark), [within], [])

    def part(self, node: ast.expr) -> ast.expr:
        """A part of a statement; an operation has a line of its own, and what it gives stands for it."""
        if not isinstance(node, (ast.BinOp, ast.Call, ast.Subscript, ast.ListComp, ast.SetComp)):
            return self.within(node)
        noted = self.repeated(node, name := f"_part{len(self.found)}")
        node.part, self.found[name] = name, ast.unparse(node)
        return noted

    def repeated(self, node: ast.expr, name: str = "", target: str = "", mark: str = " = ") -> ast.expr:
        """An expression that is noted every time that it has a value."""
        within = self.within(node)
        return ast.Call(self.step(target, node, mark, name), [within], [])

    def within(self, node: ast.expr) -> ast.expr:
        """An expression whose parts are noted."""
        new = copy.copy(node)
        match node:
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                new.generators = [self.generator(each) for each in node.generators]
                new.elt = node.elt if isinstance(node.elt, (ast.Name, ast.Constant)) else self.repeated(node.elt)
            case ast.Call():
                if isinstance(node.func, ast.Name) and node.func.id == "sum" and "sum" not in self.variables:
                    new.func = ast.Attribute(_load("_recorder"), "sum", ast.Load())
                elif isinstance(node.func, ast.Attribute):
                    new.func = ast.Attribute(self.part(node.func.value), node.func.attr, ast.Load())
                new.args = [self.part(each) for each in node.args]
            case ast.Lambda() | ast.DictComp() | ast.JoinedStr() | ast.NamedExpr():
                pass
            case _:
                for name, value in ast.iter_fields(node):
                    if isinstance(value, ast.expr):
                        setattr(new, name, self.part(value))
                    elif isinstance(value, list):
                        setattr(new, name, [self.part(each) if isinstance(each, ast.expr) else each for each in value])
        return new

    def generator(self, node: ast.comprehension) -> ast.comprehension:
        conditions = [self.repeated(each, "", "if ", ": ") for each in node.ifs]
        return ast.comprehension(node.target, self.part(node.iter), conditions, node.is_async)

    def step(self, target: str | ast.stmt, value: ast.AST, mark: str = " = ", part: str | None = None) -> ast.Call:
        if any(isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)) for node in ast.walk(value)):
            raise _CannotFollow("yield")
        before = [target] if isinstance(target, str) else self.parts(target)
        before[-1] = before[-1].removesuffix(_MARK)
        texts = self.parts(value)
        found = {name: self.found[name] for name in texts[1::2] if name in self.found}
        asked = [_texts(before), _texts(texts), _call_of("_variables"), ast.Constant(mark), _told(found)]
        return _call("step", *asked) if part is None else _call("part", ast.Constant(part), *asked)

    def parts(self, node: ast.AST) -> list[str]:
        """Text and names of variables and parts in turn; what the node binds or changes keeps its name."""
        kept = {name for each in ast.walk(node) for name in list_bound_names(each)} | _roots(node)
        return _SLOT.split(_text(_Slots(self.variables - kept).visit(copy.deepcopy(node))))


class _Slots(ast.NodeTransformer):
    """Marks the variables and parts whose values are put in."""

    def __init__(self, names: set[str]):
        self.names = names
        self.whole = False  # what is repeated is shown as it stands

    def visit(self, node: ast.AST) -> ast.AST:
        if hasattr(node, "part") and not self.whole:
            return _load(f"{_MARK}{node.part}{_MARK}")
        return super().visit(node)

    def visit_Name(self, node: ast.Name) -> ast.Name:  # noqa: N802 - ast's own name for it
        return _load(f"{_MARK}{node.id}{_MARK}") if node.id in self.names else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:  # noqa: N802
        return node  # quotes within quotes would be hard to read

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> ast.AST:  # noqa: N802
        for each in node.generators:
            each.iter = self.visit(each.iter)
        whole, self.whole = self.whole, True
        node.elt = self.visit(node.elt)
        for each in node.generators:
            each.ifs = [self.visit(condition) for condition in each.ifs]
        self.whole = whole
        return node

    visit_SetComp = visit_GeneratorExp = visit_ListComp  # noqa: N815


def _roots(node: ast.AST) -> set[str]:
    """The variables that a statement changes in place: `xs` in `xs[0].append(1)`."""
    changed: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        changed = _elements(node.targets)
    elif isinstance(node, ast.AugAssign):
        changed = [node.target]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        changed = [node.value.func]
    roots = set()
    for part in changed:
        while isinstance(part, (ast.Subscript, ast.Attribute)):
            part = part.value
        roots |= {part.id} if isinstance(part, ast.Name) else set()
    return roots


def _elements(targets: Iterable[ast.expr]) -> list[ast.expr]:
    return [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]


def _text(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node))


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _texts(texts: Sequence[str]) -> ast.Tuple:
    return ast.Tuple([ast.Constant(text) for text in texts], ast.Load())


def _told(texts: dict[str, str]) -> ast.Dict:
    return ast.Dict([ast.Constant(name) for name in texts], [ast.Constant(text) for text in texts.values()])


def _call_of(function: str) -> ast.Call:
    return ast.Call(_load(function), [], [])


def _call(method: str, *arguments: ast.expr) -> ast.Call:
    """A call of the recorder."""
    return ast.Call(ast.Attribute(_load("_recorder"), method, ast.Load()), list(arguments), [])
