"""Ordinary programs, which must pass twice with the outputs of plain Python."""

from . import Group


benign = Group("benign", "ok", runs=2, seconds=30.0)
benign(
    "arithmetic",
    "def f(a, b):\n    return (a + b, a // b, a % b, a ** b, divmod(a, b))",
    calls=((7, 3),),
    outputs=((10, 2, 1, 343, (2, 1)),),
)
benign(
    "strings",
    "def f(s):\n    return [s.upper(), s[::-1], s.split(), s.replace('l', 'L'), f'{s:>8}']",
    calls=(("hello w",),),
    outputs=(["HELLO W", "w olleh", ["hello", "w"], "heLLo w", " hello w"],),
)
benign("fstring", "def f(x):\n    return f'{x!r:>5} {x:.2f}'", calls=((1.5,),), outputs=("  1.5 1.50",))
benign(
    "comprehensions",
    "def f(n):\n    return [x * y for x in range(n) for y in range(x) if (x + y) % 2]",
    calls=((4,),),
    outputs=([0, 2, 0, 6],),
)
benign(
    "sorting",
    "def f(a):\n    return sorted(a, key=lambda p: (-p[1], p[0]))",
    calls=(([("b", 1), ("a", 1), ("c", 2)],),),
    outputs=([("c", 2), ("a", 1), ("b", 1)],),
)
benign(
    "recursion", "def f(n):\n    return 1 if n < 2 else n * f(n - 1)", calls=((20,),), outputs=(2432902008176640000,)
)
benign(
    "deep_recursion",
    "import sys\nsys.setrecursionlimit(5000)\ndef f(n):\n    return 0 if n == 0 else 1 + f(n - 1)",
    calls=((3000,),),
    outputs=(3000,),
)
benign(
    "memo",
    "import functools\n@functools.lru_cache(maxsize=None)\ndef g(n):\n    return n if n < 2 else g(n - 1) + g(n - 2)\ndef f(n):\n    return g(n)",
    calls=((80,),),
    outputs=(23416728348467685,),
)
benign(
    "cache",
    "from functools import cache, reduce\n@cache\ndef g(n): return n * n\ndef f(n): return reduce(lambda a, b: a + g(b), range(n), 0)",
    calls=((5,),),
    outputs=(30,),
)
benign(
    "counter",
    "from collections import Counter\ndef f(s):\n    return Counter(s).most_common(2)",
    calls=(("banana",),),
    outputs=([("a", 3), ("n", 2)],),
)
benign(
    "defaultdict",
    "from collections import defaultdict\ndef f(words):\n    d = defaultdict(list)\n    for w in words: d[len(w)].append(w)\n    return dict(d)",
    calls=((["a", "bb", "c"],),),
    outputs=({1: ["a", "c"], 2: ["bb"]},),
)
benign(
    "deque",
    "import collections\ndef f(n):\n    q = collections.deque(range(n), maxlen=3)\n    q.rotate(1)\n    return list(q)",
    calls=((5,),),
    outputs=([4, 2, 3],),
)
benign(
    "namedtuple",
    "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(a):\n    p = P(*a)\n    return [p.x, p._asdict(), repr(p)]",
    calls=(((1, 2),),),
    outputs=([1, {"x": 1, "y": 2}, "P(x=1, y=2)"],),
)
benign(
    "heap",
    "import heapq\ndef f(a):\n    heapq.heapify(a)\n    return [heapq.heappop(a) for _ in range(3)]",
    calls=(([5, 1, 4, 2],),),
    outputs=([1, 2, 4],),
)
benign(
    "bisect", "import bisect\ndef f(a, x):\n    return bisect.bisect_left(a, x)", calls=(([1, 3, 5], 4),), outputs=(2,)
)
benign(
    "itertools",
    "from itertools import permutations, groupby, accumulate, chain\ndef f(s):\n    return [''.join(p) for p in permutations(s)][:3] + [k for k, _ in groupby('aab')] + list(accumulate([1, 2, 3])) + list(chain([1], [2]))",
    calls=(("abc",),),
    outputs=(["abc", "acb", "bac", "a", "b", 1, 3, 6, 1, 2],),
)
benign(
    "regex",
    "import re\ndef f(s):\n    return re.findall(r'(\\w)(\\d+)', s), re.sub(r'\\d', '#', s)",
    calls=(("a12 b3",),),
    outputs=(([("a", "12"), ("b", "3")], "a## b#"),),
)
benign(
    "math",
    "import math\ndef f(x):\n    return [math.gcd(12, x), math.isqrt(x), math.floor(math.log2(x)), math.comb(5, 2)]",
    calls=((18,),),
    outputs=([6, 4, 4, 10],),
)
benign("cmath", "import cmath\ndef f(x):\n    return cmath.sqrt(x)", calls=((-4,),), outputs=(2j,))
benign(
    "fractions",
    "from fractions import Fraction\ndef f(a, b):\n    return str(Fraction(a, b) + Fraction(1, 3))",
    calls=((1, 2),),
    outputs=("5/6",),
)
benign(
    "decimal",
    "from decimal import Decimal, getcontext\ndef f(x):\n    getcontext().prec = 6\n    return str(Decimal(x) / 7)",
    calls=((1,),),
    outputs=("0.142857",),
)
benign(
    "statistics",
    "import statistics\ndef f(a):\n    return statistics.median(a), statistics.mean(a)",
    calls=(([1, 2, 3, 10],),),
    outputs=((2.5, 4),),
)
benign(
    "dates",
    "from datetime import date, datetime, timedelta\ndef f(y):\n    d = date(y, 2, 28) + timedelta(days=1)\n    return [d.isoformat(), isinstance(d, date), datetime(y, 1, 2, 3).strftime('%d/%m'), repr(datetime(y, 1, 1)), str(datetime.strptime('2020-05-06', '%Y-%m-%d').date()), isinstance(datetime(y, 1, 1), date)]",
    calls=((2024,),),
    outputs=(["2024-02-29", True, "02/01", "datetime.datetime(2024, 1, 1, 0, 0)", "2020-05-06", True],),
)
benign(
    "calendar",
    "import calendar\ndef f(y):\n    return calendar.isleap(y), calendar.monthrange(y, 2)[1]",
    calls=((2023,),),
    outputs=((False, 28),),
)
benign(
    "json",
    "import json\ndef f(d):\n    return json.loads(json.dumps(d, sort_keys=True)), json.dumps(d)",
    calls=(({"a": [1, None]},),),
    outputs=(({"a": [1, None]}, '{"a": [1, null]}'),),
)
benign(
    "string_module",
    "import string\ndef f(x):\n    return string.ascii_lowercase[:x], string.Template('$a!').substitute(a=x)",
    calls=((3,),),
    outputs=(("abc", "3!"),),
)
benign(
    "textwrap",
    "import textwrap\ndef f(s):\n    return textwrap.fill(s, 5)",
    calls=(("aa bb cc",),),
    outputs=("aa bb\ncc",),
)
benign(
    "base64",
    "import base64\ndef f(s):\n    return base64.b64encode(s.encode()).decode(), b'a'.hex()",
    calls=(("hi",),),
    outputs=(("aGk=", "61"),),
)
benign(
    "struct_array",
    "import struct, array\ndef f(x):\n    return struct.pack('<I', x), sum(array.array('i', [x, 2]))",
    calls=((5,),),
    outputs=((b"\x05\0\0\0", 7),),
)
benign(
    "copy",
    "import copy\ndef f(a):\n    b = copy.deepcopy(a)\n    b[0].append(1)\n    return a, b",
    calls=(([[]],),),
    outputs=(([[]], [[1]]),),
)
benign(
    "operator",
    "import operator\ndef f(a):\n    return sorted(a, key=operator.itemgetter(1)), operator.mul(3, 4)",
    calls=(([(1, 2), (0, 1)],),),
    outputs=(([(0, 1), (1, 2)], 12),),
)
benign(
    "dataclass",
    "from dataclasses import dataclass, field, asdict\n@dataclass(order=True, frozen=True)\nclass P:\n    x: int\n    tags: tuple = field(default=())\ndef f(n):\n    return asdict(max(P(i) for i in range(n))), len({P(1), P(1)}), repr(P(1))",
    calls=((3,),),
    outputs=(({"x": 2, "tags": ()}, 1, "P(x=1, tags=())"),),
)
benign(
    "enum",
    "from enum import Enum, auto\nclass C(Enum):\n    RED = auto()\n    BLUE = auto()\ndef f(n):\n    return C(n).name, [c.value for c in C]",
    calls=((2,),),
    outputs=(("BLUE", [1, 2]),),
)
benign(
    "typing",
    "from __future__ import annotations\nfrom typing import List, Optional, Dict\ndef f(a: List[int], b: Optional[Dict[str, int]] = None) -> int:\n    return sum(a)",
    calls=(([1, 2],),),
    outputs=(3,),
)
benign(
    "classes",
    "class Shape:\n    def area(self): raise NotImplementedError\nclass Square(Shape):\n    def __init__(self, s): self.s = s\n    def area(self): return self.s ** 2\n    def __eq__(self, o): return self.s == o.s\n    def __hash__(self): return hash(('Square', self.s))\ndef f(n):\n    return sum(x.area() for x in {Square(i % 2) for i in range(n)})",
    calls=((4,),),
    outputs=(1,),
)
benign(
    "abstract",
    "from abc import ABC, abstractmethod\nclass A(ABC):\n    @abstractmethod\n    def g(self): ...\nclass B(A):\n    def g(self): return 3\ndef f(x):\n    try: A()\n    except TypeError: return B().g()",
    outputs=(3,),
)
benign(
    "generators",
    "def g(n):\n    for i in range(n):\n        got = yield i\n        if got: yield got\ndef f(n):\n    it = g(n)\n    next(it)\n    return [it.send('x'), *it]",
    calls=((3,),),
    outputs=(["x", 1, 2],),
)
benign(
    "closures",
    "def make():\n    n = 0\n    def step():\n        nonlocal n\n        n += 1\n        return n\n    return step\ndef f(k):\n    s = make()\n    return [s() for _ in range(k)]",
    calls=((3,),),
    outputs=([1, 2, 3],),
)
benign(
    "exceptions",
    "def f(x):\n    try:\n        return 1 / x\n    except ZeroDivisionError as e:\n        return str(e)\n    finally:\n        pass",
    calls=((0,), (2,)),
    outputs=("division by zero", 0.5),
)
benign(
    "match",
    "def f(x):\n    match x:\n        case [a, *rest]: return rest\n        case {'k': v}: return v\n        case int(): return 'int'\n    return None",
    calls=(([1, 2],), ({"k": 3},), (4,)),
    outputs=([2], 3, "int"),
)
benign("walrus", "def f(a):\n    return [y for x in a if (y := x * 2) > 2]", calls=(([1, 2, 3],),), outputs=([4, 6],))
benign("eval_text", "def f(s):\n    return eval(s, {'x': 3})", calls=(("x * 2 + 1",),), outputs=(7,))
benign(
    "exec_text",
    "def f(n):\n    scope = {}\n    exec('def g(v): return v + 1', scope)\n    return scope['g'](n)",
    calls=((1,),),
    outputs=(2,),
)
benign(
    "int_sets",
    "def f(a, b):\n    return sorted(set(a) & set(b)), set(a) - set(b)",
    calls=(([1, 2, 3], [2, 3, 4]),),
    outputs=(([2, 3], {1}),),
)
benign(
    "sorted_str_set",
    "def f(s):\n    return sorted(set(s)), len(set(s)), set(s) == set(reversed(s))",
    calls=(("hello",),),
    outputs=((["e", "h", "l", "o"], 4, True),),
)
benign(
    "id_as_key",
    "def f(x):\n    seen = set()\n    a = [1]\n    for o in (a, a, [1]): seen.add(id(o))\n    return len(seen), id(a) == id(a)",
    outputs=((2, True),),
)
benign(
    "hash_of_numbers",
    "def f(x):\n    return hash(x), hash((1, 2)) == hash((1, 2)), {hash((1, 2)): 3}[hash((1, 2))], hash(2**61 - 1)",
    calls=((7,),),
    outputs=((7, True, 3, 0),),
)
benign(
    "own_generator",
    "def f(seed):\n    return [seed := (seed * 1103515245 + 12345) % 2**31 for _ in range(2)]",
    calls=((1,),),
    outputs=([1103527590, 377401575],),
)
benign(
    "hash_in_a_class",
    "class P:\n    def __init__(s, a): s.a = a\n    def __hash__(s): return hash((s.a, 0.5)) % 8\n    def __eq__(s, o): return s.a == o.a\ndef f(x):\n    return len({P(x), P(x), P(x + 1)})",
    outputs=(2,),
)
benign(
    "linked_list",
    "class Node:\n    def __init__(self, v, n=None): self.v, self.n = v, n\ndef f(a):\n    head = None\n    for v in a: head = Node(v, head)\n    out = []\n    while head: out.append(head.v); head = head.n\n    return out",
    calls=(([1, 2, 3],),),
    outputs=([3, 2, 1],),
)
benign(
    "bfs",
    "from collections import deque\ndef f(g, s):\n    d, q = {s: 0}, deque([s])\n    while q:\n        u = q.popleft()\n        for v in g[u]:\n            if v not in d: d[v] = d[u] + 1; q.append(v)\n    return d",
    calls=(({"a": ["b", "c"], "b": ["c"], "c": []}, "a"),),
    outputs=({"a": 0, "b": 1, "c": 1},),
)
benign(
    "dynamic_programming",
    "def f(a, b):\n    t = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]\n    for i, x in enumerate(a):\n        for j, y in enumerate(b):\n            t[i + 1][j + 1] = t[i][j] + 1 if x == y else max(t[i][j + 1], t[i + 1][j])\n    return t[-1][-1]",
    calls=(("abcbdab", "bdcaba"),),
    outputs=(4,),
)
benign(
    "primes",
    "def f(n):\n    s = bytearray([1]) * n\n    s[:2] = b'\\0\\0'\n    for i in range(2, int(n ** 0.5) + 1):\n        if s[i]: s[i * i::i] = bytes(len(range(i * i, n, i)))\n    return sum(s)",
    calls=((100000,),),
    outputs=(9592,),
)
benign(
    "matrix",
    "def f(a, b):\n    return [[sum(x * y for x, y in zip(r, c)) for c in zip(*b)] for r in a]",
    calls=(([[1, 2], [3, 4]], [[0, 1], [1, 0]]),),
    outputs=([[2, 1], [4, 3]],),
)
benign(
    "big_numbers",
    "def f(n):\n    return pow(3, n, 10**9 + 7), len(str(2 ** n))",
    calls=((1000,),),
    outputs=((56888193, 302),),
)
benign(
    "half_second",
    "def f(n):\n    t = 0\n    for i in range(n): t += i * i % 7\n    return t",
    calls=((2_000_000,),),
    outputs=(3999997,),
)
benign(
    "unicode",
    "import unicodedata\ndef f(s):\n    return unicodedata.normalize('NFD', s).encode('ascii', 'ignore').decode(), s.casefold(), [ord(c) for c in s]",
    calls=(("Éa",),),
    outputs=(("Ea", "éa", [201, 97]),),
)
benign(
    "encodings",
    "def f(s):\n    return s.encode('utf-16-le'), s.encode('latin-1'), 'abc'.encode('ascii')",
    calls=(("é",),),
    outputs=((b"\xe9\x00", b"\xe9", b"abc"),),
)
benign(
    "string_io",
    "import io, contextlib\ndef f(x):\n    b = io.StringIO()\n    with contextlib.redirect_stdout(b): print('hi', x)\n    return b.getvalue()",
    outputs=("hi 1\n",),
)
benign(
    "own_stdout",
    "import sys, io\ndef f(x):\n    sys.stdout = b = io.StringIO()\n    print('hi')\n    return b.getvalue()",
    outputs=("hi\n",),
)
benign(
    "printing",
    "import sys\ndef f(x):\n    print('a', 'b', sep='-', file=sys.stderr, flush=True)\n    sys.stdout.write('x')\n    return x",
    outputs=(1,),
)
benign("main_guard", "def f(x): return x\nif __name__ == '__main__':\n    f(input())", outputs=(1,))
benign(
    "csv",
    "import csv, io\ndef f(s):\n    return list(csv.reader(io.StringIO(s)))",
    calls=(("a,b\n1,2",),),
    outputs=([["a", "b"], ["1", "2"]],),
)
benign(
    "difflib",
    "import difflib\ndef f(a, b):\n    return difflib.SequenceMatcher(None, a, b).ratio(), difflib.get_close_matches('appel', ['apple', 'x'])",
    calls=(("abcd", "bcde"),),
    outputs=((0.75, ["apple"]),),
)
benign(
    "ast_literal",
    "import ast\ndef f(s):\n    return ast.literal_eval(s)",
    calls=(("[1, {'a': 2}]",),),
    outputs=([1, {"a": 2}],),
)
benign(
    "time_given",
    "import time\ndef f(t):\n    return time.gmtime(t).tm_year, time.strftime('%Y-%m-%d', time.gmtime(t))",
    calls=((86400,),),
    outputs=((1970, "1970-01-02"),),
)
benign(
    "time_zone_of_no_host",
    "import time, datetime\ndef f(t):\n    return time.localtime(t).tm_hour, time.tzname, str(datetime.datetime.fromtimestamp(t))",
    calls=((0,),),
    outputs=((0, ("UTC", "UTC"), "1970-01-01 00:00:00"),),
)
benign("short_sleep", "import time\ndef f(x):\n    time.sleep(0.01)\n    return x", outputs=(1,))
benign(
    "sys_facts",
    "import sys\ndef f(x):\n    return sys.maxsize > 2**32, sys.version_info >= (3, 10)",
    outputs=((True, True),),
)
benign(
    "version_old_enough",
    "import sys\ndef f(x):\n    return sys.version_info[0], sys.version_info.major, sys.version_info[:2] > (3, 6), "
    "sys.version_info < (4,), (3, 7) <= sys.version_info",
    outputs=((3, 3, True, True, True),),
)
benign(
    "arguments_of_a_function",
    "def curry(g, *a):\n    return g(*a) if len(a) >= g.__code__.co_argcount else lambda *b: curry(g, *a, *b)\n"
    "def f(x):\n    return curry(lambda a, b, c: a + b + c)(x)(2)(3), f.__code__.co_name, getattr([3], 'pop')()",
    outputs=((6, "f", 3),),
)
benign(
    "deep_recursion_twice",
    "import sys\ndef f(n):\n    sys.setrecursionlimit(max(sys.getrecursionlimit(), 4000))\n    return 0 if n == 0 else f(n - 1)",
    calls=((2500,), (10,)),
    outputs=(0, 0),
)
benign(
    "large_integers",
    "import sys\nsys.set_int_max_str_digits(0)\ndef f(n):\n    return len(str(7 ** n)), int('9' * n) % 1000",
    calls=((20000,),),
    outputs=((16902, 999),),
)
benign("no_arguments", "def f():\n    return 'none'", calls=((),), outputs=("none",))
benign("star_arguments", "def f(*args):\n    return sum(args)", calls=((1, 2, 3),), outputs=(6,))
benign(
    "mutates_argument", "def f(a):\n    a.append(1)\n    return a", calls=(([0],), ([0],)), outputs=([0, 1], [0, 1])
)
benign(
    "ten_calls",
    "def f(x):\n    return x * x",
    calls=tuple((i,) for i in range(10)),
    outputs=tuple(i * i for i in range(10)),
)
benign("sets_out", "def f(x):\n    return {'b', 'a', 'c'}", outputs=({"a", "b", "c"},))
benign(
    "graphlib",
    "import graphlib\ndef f(g):\n    return list(graphlib.TopologicalSorter(g).static_order())",
    calls=(({"c": ["b"], "b": ["a"]},),),
    outputs=(["a", "b", "c"],),
)
benign(
    "weakref",
    "import weakref\nclass A: pass\ndef f(x):\n    a = A()\n    r = weakref.ref(a)\n    return r() is a",
    outputs=(True,),
)
benign(
    "traceback_text",
    "import traceback\ndef f(x):\n    try: 1 / 0\n    except ZeroDivisionError: return traceback.format_exc().splitlines()[-1]",
    outputs=("ZeroDivisionError: division by zero",),
)
benign(
    "slots_and_properties",
    "class A:\n    __slots__ = ('v',)\n    def __init__(self, v): self.v = v\n    @property\n    def twice(self): return self.v * 2\n    @staticmethod\n    def s(): return 's'\n    @classmethod\n    def c(cls): return cls.__name__\ndef f(x):\n    return A(x).twice, A.s(), A.c()",
    outputs=((2, "s", "A"),),
)
benign(
    "overloads",
    "class V:\n    def __init__(self, *c): self.c = c\n    def __add__(self, o): return V(*(a + b for a, b in zip(self.c, o.c)))\n    def __getitem__(self, i): return self.c[i]\n    def __len__(self): return len(self.c)\ndef f(a, b):\n    return list(V(*a) + V(*b))",
    calls=(((1, 2), (3, 4)),),
    outputs=([4, 6],),
)
