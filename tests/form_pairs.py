"""
Random programs full of what looks dead or renamed and is not, and changes to them; pairs of one normal form are run.

python -m tests.form_pairs 10000        that many pairs, in the real sandbox; prints how many and what differed
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator

from trl_populora.sandbox import Job, Limits, Sandbox
from trl_populora.sandbox.values import encode
from trl_populora.tasks.python.normal_form import normal_forms
from trl_populora.tasks.python.programs import list_bound_names


IMPORTS = [
    "from collections import defaultdict",
    "from math import floor, ceil",
    "from math import *",
    "from cmath import *",
    "import io, sys",
    "import bisect, heapq",
    "from operator import attrgetter",
]
HELPERS = [
    "def g(a, b=2):\n    return a - b",
    "def h(*, a=1, b):\n    return a - b",
    "def k(a, **rest):\n    '''Sums.'''\n    return a, sorted(rest.items())",
    "def gen(n):\n    return [n]\n    yield n",
    "def gen(n):\n    for i in range(n):\n        yield i",
    "def counted(v):\n    seen.append(v)\n    return v",
    "def shadow(len):\n    return len + 1",
    "class P:\n    size = 3\n    def __init__(self, v):\n        self.v = v\n    def __lt__(self, other):\n"
    "        return self.v < other.v\n    def area(self):\n        return self.v * self.size",
    "class Q:\n    n = 0\n    def __add__(self, other):\n        Q.n += 1\n        return self\n"
    "    def __bool__(self):\n        Q.n += 1\n        return True",
    "class S:\n    ws = [1, 2]\n    ys = [w for w in ws]\n    def __init__(self, first=ws, *, last=0):\n"
    "        self.rows, self._last = [*first], last\n    def push(self, v, by=2):\n        self.rows.append(v * by)\n"
    "        return self\n    def total(self):\n        t = self._last\n        [t := t + w for w in self.rows]\n"
    "        return t\n"
    "class T(S):\n    def push(self, v, by=3):\n        super().push(v + by)\n        return self.rows",
    "def reader():\n    x\n    return 1",
    "seen = []",
    "sq = lambda v: v * v",
    "n = 5",
]
STATEMENTS = [
    "it = iter(xs)",
    "it = (v + 1 for v in xs)",
    "list(it)",
    "unused = list(it)",
    "unused = 3 in it",
    "unused = sum(xs)",
    "unused = [v for v in it]",
    "unused = sorted(xs, key=out.append)",
    "unused = [v for v in xs if v > x]",
    "unused = x - 1",
    "unused = d.keys() & it",
    "for _ in it:\n    pass",
    "for _ in range(x):\n    pass",
    "for _ in x:\n    pass",
    "for _ in [x]:\n    pass",
    "out.append(reader())",
    "import json.nothing",
    "import math as unused",
    "out.append(next(it, 'end'))",
    "dd = defaultdict(list)",
    "dd[x]",
    "unused = dd[s]",
    "out.append(len(dd))",
    "int(s)",
    "float(s)",
    "unused = int(s)",
    "xs[x]",
    "xs[x + 1]",
    "unused = d['a']",
    "print(x)",
    "buf = io.StringIO()",
    "print(x, file=buf)",
    "sys.stdout = buf",
    "out.append(buf.getvalue())",
    "out.append(g(a=x, b=3))",
    "out.append(g(b=x, a=3))",
    "out.append(h(a=x, b=3))",
    "out.append(k(x, a1=1))",
    "out.append(k(**{'a': x, 'b': 2}))",
    "counted(x)",
    "unused = counted(x)",
    "out.append(len(seen))",
    "out.append(shadow(x))",
    "out.append(len(xs))",
    "out.append(list(gen(x)))",
    "out.append(P(x) < P(3))",
    "out.append(P(x).area())",
    "unused = Q() + 1",
    "if Q():\n    pass",
    "q = Q()",
    "q + q",
    "out.append(Q.n)",
    "out.append(sq(x))",
    "stack = S(xs, last=x)",
    "stack = S()",
    "stack.push(x)",
    "stack.push(v=x, by=5)",
    "out.append(stack.total())",
    "out.append(S.ys)",
    "out.append(S.ys + T(last=x).push(by=x, v=1))",
    "out.append(str(g).split()[1])",
    "out.append(g.__name__)",
    "out.append(k.__doc__)",
    "out.append(attrgetter('__na' + 'me__')(g))",
    "out.append('{0.__name__}'.format(g))",
    "out.append(str(type(P(1))))",
    "out.append(f'{x=}')",
    "out.append({**d, 'a': x})",
    "out.append({'a': x, **d})",
    "out.append(floor(x + 0.5))",
    "out.append(ceil(x + 0.5))",
    "out.append(sqrt(x))",
    "match d:\n    case {'a': v, **rest}:\n        out.append(rest)",
    "match P(x):\n    case P(v=m):\n        out.append(m)",
    "out.append(x if True else xs)",
    "out.append(False and x or s)",
    "out.append(x and s)",
    "x += 1",
    "y = x",
    "x = 3",
    "len = sum",
    "del s",
    "d.pop('a', 0)",
    "n = x",
    "global n\nn = x",
    "out.append(n)",
    "out.append(y)",
    "assert True",
    "assert x < 3",
    "if x > 3:\n    unused = x\nelse:\n    pass",
    "if False:\n    out.append(1)",
    "if 1 > 2:\n    x = 7",
    "if not 0:\n    out.append(2)\nelse:\n    out.append(3)",
    "while False:\n    out.append(4)",
    "try:\n    out.append(g(x, 1, 2))\nexcept TypeError as e:\n    out.append(str(e))",
    "try:\n    unused = int(s)\nexcept ValueError:\n    out.append('no number')",
    "try:\n    out.append(reader())\nexcept NameError:\n    out.append('no x')",
    "try:\n    for _ in x:\n        pass\nexcept TypeError:\n    out.append('one')",
    "try:\n    y\nexcept NameError:\n    out.append('no y')",
    "def inner(a, b=out.append(x)):\n    return a",
    "def inner(v):\n    nonlocal x\n    x = v",
    "out.append(inner(x))",
    "return out\nx = 3",
    "return out\nyield x",
    "u = v = x",
    "'text'",
    "pass",
]
DEAD = [
    "pass",
    "unused = 3",
    "unused: int = 4",
    "unused = [GIVEN, 2]",
    "unused = str(GIVEN)",
    "print('hello', GIVEN)",
    "'a note'",
    "if GIVEN:\n    pass",
    "for _ in range(3):\n    pass",
    "if False:\n    unused = GIVEN()",
    "import math as unused",
    "def unused(a):\n    return a + 1",
]
INPUTS = [(0, [1, 2, 3], "7", {"a": 1, "b": 2}), (5, [4, 2], "x", {"b": 3}), (2, [], "2.5", {"a": 0})]
NAMES = [
    "x",
    "xs",
    "s",
    "d",
    "out",
    "it",
    "unused",
    "y",
    "a",
    "b",
    "g",
    "h",
    "k",
    "v",
    "P",
    "Q",
    "area",
    "size",
    "len",
    "push",
    "rows",
    "by",
    "w",
    "t",
    "self",
]
NAMES += ["__lt__", "__gt__", "floor", "ceil", "sqrt", "sq", "n", "e", "rest", "fresh", "sum", "counted", "dd", "u"]


def program(rng: random.Random) -> str:
    """A program with an `f` of the arguments in `INPUTS`; most run."""
    chosen = rng.sample(STATEMENTS, rng.randint(1, 7))
    said = "\n".join(chosen)
    # What a statement needs is mostly there.
    helpers = [each for each in HELPERS if rng.random() < (0.9 if _defined(each) in said else 0.1)]
    imports = [each for each in IMPORTS if rng.random() < (0.9 if _wanted(each, said) else 0.1)]
    for name, first in (
        ("it", "it = iter(xs)"),
        ("dd", "dd = defaultdict(list)"),
        ("buf", "buf = io.StringIO()"),
        ("stack", "stack = S([x])"),
    ):
        if name in said and rng.random() < 0.9:
            chosen.insert(0, first)
    body = "\n".join(["out = []", *chosen, rng.choice(["return out", "return out, x", "return out, xs, d"])])
    lines = "\n".join("    " + line for line in body.split("\n"))
    return "\n".join([*imports, *helpers, f"def f(x, xs, s, d):\n{lines}"])


def _defined(helper: str) -> str:
    return helper.replace("def ", "").replace("class ", "").split("(")[0].split(":")[0].split(" ")[0]


def _wanted(line: str, said: str) -> bool:
    return any(word.strip(",") in said for word in line.split("import ")[1].split() if word != "*")


class _Renamed(ast.NodeTransformer):
    """One name for another wherever it is bound or looked up, also where it is an attribute by then."""

    def __init__(self, names: dict[str, str], keywords: bool):
        self.names, self.keywords = names, keywords

    def visit(self, node: ast.AST) -> ast.AST:
        for field in ("id", "arg", "name", "asname", "rest"):
            written = getattr(node, field, None)
            if isinstance(written, str) and (self.keywords or not isinstance(node, (ast.keyword, ast.alias))):
                setattr(node, field, self.names.get(written, written))
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            node.names = [self.names.get(name, name) for name in node.names]
        return super().generic_visit(node)


def changed(text: str, rng: random.Random) -> str:
    """The program after one to three changes, of which some change nothing."""
    tree = ast.parse(text)
    for _ in range(rng.randint(1, 3)):
        blocks = [
            b for n in ast.walk(tree) for f in ("body", "orelse") if isinstance(b := getattr(n, f, 0), list) and b
        ]
        block = rng.choice(blocks)
        place = rng.randrange(len(block))
        statements = ast.parse(rng.choice(STATEMENTS)).body
        match rng.randrange(10):
            case 0 | 1:
                one, other = rng.sample(NAMES, 2)
                tree = _Renamed({one: other, other: one}, keywords=rng.random() < 0.2).visit(tree)
            case 2 | 3 | 4:
                block[place:place] = statements
            case 5 if len(block) > 1:
                del block[place]
            case 6:
                block[place : place + 1] = statements
            case 7:
                block[place:place] = [ast.If(ast.Constant(False), statements, [])]
            case 8:
                block[place] = ast.If(ast.Constant(True), [block[place]], [])
            case 9:
                block[place] = ast.Try([block[place]], [ast.ExceptHandler(None, None, [ast.Pass()])], [], [])
    return ast.unparse(ast.fix_missing_locations(tree))


def duplicates(text: str, rng: random.Random) -> Iterator[str]:
    """The program in other words, of which each is the same program."""
    tree = ast.parse(text)
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "f")
    first = function.args.args[0].arg
    said = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)} | {"f"}
    own = sorted({name for node in ast.walk(tree) for name in list_bound_names(node)} - said)
    yield "# a remark\n" + ast.unparse(_Renamed({name: f"name_{n}" for n, name in enumerate(own)}, False).visit(tree))
    for dead in rng.sample(DEAD, 5):
        tree = ast.parse(text)
        function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "f")
        function.body[:0] = ast.parse(dead.replace("GIVEN", first)).body
        yield ast.unparse(ast.fix_missing_locations(tree))


def pairs(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Different texts of one normal form that compile, up to `count`."""
    rng, found = random.Random(seed), 0
    while found < count:
        one = program(rng)
        try:
            form = normal_forms(ast.parse(one))[0]
            compile(one, "", "exec")
        except SyntaxError:
            continue
        plain = ast.unparse(ast.parse(one))
        for other in {changed(one, rng) for _ in range(40)} - {plain}:
            try:
                same = normal_forms(ast.parse(other))[0] == form
                compile(other, "", "exec")
            except SyntaxError:
                continue
            if same and found < count:
                found += 1
                yield one, other


def differing(given: list[tuple[str, str]], workers: int = 2) -> tuple[int, list[tuple[str, str, str, str]]]:
    """In how many pairs both had a result, and those whose results differ, with the results."""
    texts = list(dict.fromkeys(text for pair in given for text in pair))
    with Sandbox(workers=workers, limits=Limits(cpu_seconds=5)) as sandbox:
        verdicts = sandbox.run(Job(text, (encode(values, ordered=True),)) for text in texts for values in INPUTS)
    outputs = [verdict.outputs[0] if verdict.ok else None for verdict in verdicts]
    results = {text: outputs[i * len(INPUTS) : (i + 1) * len(INPUTS)] for i, text in enumerate(texts)}
    both, found = 0, []
    for one, other in given:
        known = [(a, b) for a, b in zip(results[one], results[other], strict=True) if a is not None and b is not None]
        both += bool(known)
        found += [(one, other, a, b) for a, b in known if a != b][:1]
    return both, found


if __name__ == "__main__":
    together = list(pairs(int(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
    compared, wrong = differing(together)
    for pair in wrong[:5]:
        print("\n----\n".join(pair), end="\n====\n")
    print(f"{len(together)} pairs of one form, {compared} with results of both, {len(wrong)} that differ")
