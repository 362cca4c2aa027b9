"""Programs that never end, and programs that want all the memory."""

from . import Group


time = Group("time", "timeout", seconds=0.4)
time("while_true", "def f(x):\n    while True: pass")
time("at_import", "while True: pass")
time("for_itertools_count", "import itertools\ndef f(x):\n    for i in itertools.count(): pass")
time("in_c_count", "import itertools\ndef f(x):\n    return -1 in itertools.count()")
time("in_c_sum", "import itertools\ndef f(x):\n    return sum(itertools.repeat(1))")
time("in_c_deque", "import itertools, collections\ndef f(x):\n    collections.deque(itertools.repeat(0), maxlen=0)")
time("huge_range", "def f(x):\n    return sum(range(10**12))")
time("power_tower", "def f(x):\n    return 10**10**9", "timeout", "memory")
time("power_folded", "def f(x):\n    return len(str(7**7**7**2))", "timeout", "memory", "error")
time("modular_power", "def f(x):\n    return pow(3**400000, 5**400000, 7**400000 + 1)")
time("factorial", "import math\ndef f(x):\n    return math.factorial(10**9)", "timeout", "memory")
time("comb", "import math\ndef f(x):\n    return math.comb(10**8, 5*10**7) % 7", "timeout", "memory")
time("regex", "import re\ndef f(x):\n    return bool(re.match(r'(a+)+$', 'a' * 60 + 'b'))")
time("regex_alternation", "import re\ndef f(x):\n    return bool(re.fullmatch(r'(a|a|aa)*b', 'a' * 90))")
time("sleep", "import time\ndef f(x):\n    time.sleep(1000)", "ok", outputs=(None,))
time("sleep_loop", "import time\ndef f(x):\n    while True: time.sleep(0.01)")
time(
    "swallow_everything",
    "def f(x):\n    while True:\n        try:\n            while True: pass\n        except BaseException: pass",
)
time("swallow_in_finally", "def f(x):\n    try:\n        while True: pass\n    finally:\n        while True: pass")
time(
    "ignore_signals",
    "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except Exception: pass\n"
    "while True: pass",
    "policy",
)
time("generator", "def g():\n    while True: yield 0\ndef f(x):\n    return list(g())[0]", "timeout", "memory")
time(
    "str_find",
    "def f(x):\n    s = 'a' * 3000000\n    return s.count('a' * 1500000 + 'b' + 'a' * 1499990)",
    "timeout",
    "ok",
)
time(
    "sorted_slow",
    "class A:\n    def __lt__(self, o):\n        while True: pass\ndef f(x):\n    return sorted([A(), A()])",
)
time("property", "class A:\n    @property\n    def v(self):\n        while True: pass\ndef f(x):\n    return A().v")
time("fibonacci", "def f(x):\n    return f(x - 1) + f(x - 2) if x > 1 else x", calls=((90,),))
time(
    "ackermann",
    "def a(m, n):\n    return n + 1 if m == 0 else a(m - 1, 1) if n == 0 else a(m - 1, a(m, n - 1))\n"
    "def f(x):\n    return a(4, 2)",
    "timeout",
    "error",
    "memory",
)
time("second_input", "def f(x):\n    while x > 1: pass\n    return x", calls=((1,), (2,), (3,)))
time("exception_text", "class E(Exception):\n    def __str__(self):\n        while True: pass\ndef f(x):\n    raise E")
time("decorator", "def d(g):\n    while True: pass\n@d\ndef f(x):\n    return x")
time(
    "metaclass",
    "class M(type):\n    def __new__(m, *a):\n        while True: pass\nclass A(metaclass=M): pass\ndef f(x): pass",
)
time("default", "def forever():\n    while True: pass\ndef f(x, y=forever()):\n    return x")
time("compile_time", "def f(x):\n    return " + "(" * 150 + "1" + ")" * 150, "ok", "error", outputs=None)
time("eval_loop", "def f(x):\n    return eval('[0 for _ in iter(int, 1)]')", "timeout", "memory")
time("iter_sentinel", "def f(x):\n    return max(iter(int, 1))")
time("string_doubling", "def f(x):\n    s = 'ab'\n    while True: s = s[::-1] if len(s) > 10**6 else s + s")
time("format_width", "def f(x):\n    return len(f'{1:>{10**11}}')", "timeout", "memory", "error")
time("json_nest", "import json\ndef f(x):\n    return json.loads('[' * 10**7)", "error", "timeout", "memory")
time("many_prints", "def f(x):\n    while True: print('x' * 1000)")

memory = Group("memory", "memory", seconds=60.0, memory=128 << 20)
memory("list_at_once", "def f(x):\n    return [0] * 10**11")
memory("list_grows", "def f(x):\n    a = []\n    while True: a.append(a[:])", "memory", "timeout")
memory("bytes_grow", "def f(x):\n    a = []\n    while True: a.append(bytes(10**6))")
memory("string_at_once", "def f(x):\n    return 'x' * 10**12")
memory("string_doubles", "def f(x):\n    s = 'x'\n    while True: s += s")
memory("dict_grows", "def f(x):\n    d = {}\n    while True: d[len(d)] = 'x' * 10000 + str(len(d))")
memory("set_of_tuples", "def f(x):\n    s = set()\n    while True: s.add((len(s), 'y' * 9999 + str(len(s))))")
memory("nested_lists", "def f(x):\n    a = []\n    while True: a = [a, bytes(50000)]", "memory", "error")
memory("big_int", "def f(x):\n    n = 3\n    while True: n = n << 50000000", "memory", "timeout")
memory("at_import", "junk = [bytes(10**6) for _ in range(10**6)]\ndef f(x): return x")
memory(
    "swallowed",
    "def f(x):\n    a = []\n    while True:\n        try:\n            while True: a.append(bytes(10**6))\n"
    "        except MemoryError: return len(a) > 10**6 and 'PWNED'",
    "ok",
    "memory",
)
memory("bytearray", "def f(x):\n    return len(bytearray(10**10))")
memory("join", "def f(x):\n    return len(','.join(['x' * 10**6] * 10**6))")
memory("product", "import itertools\ndef f(x):\n    return len(list(itertools.product(range(1000), repeat=4)))")
memory("permutations", "import itertools\ndef f(x):\n    return sorted(itertools.permutations(range(12)))")
memory("range_list", "def f(x):\n    return list(range(10**10))")
memory("recursion", "def f(x):\n    return f(x + 1)", "error")
memory("recursion_mutual", "def g(x):\n    return f(x)\ndef f(x):\n    return g(x)", "error")
memory(
    "recursion_limit_raised",
    "import sys\nsys.setrecursionlimit(10**9)\ndef f(x):\n    return f(x + 1)",
    "error",
    "memory",
)
memory(
    "recursion_in_c",
    "import sys\nsys.setrecursionlimit(10**8)\ndef f(x):\n    a = []\n    for _ in range(10**6): a = [a]\n"
    "    return repr(a) == ''",
    "error",
    "memory",
)
memory(
    "deep_deallocation",
    "def f(x):\n    a = None\n    for _ in range(500000): a = (a,)\n    del a\n    return 1",
    "ok",
    "memory",
)
memory(
    "generator_chain",
    "def f(x):\n    g = iter([1])\n    for _ in range(100000): g = (y for y in g)\n    return next(g)",
    "error",
    "memory",
)
memory("deep_source", "def f(x):\n    return " + "-" * 20000 + "1", "error", "memory", "ok")
memory("deep_expression", "x = " + "[" * 5000 + "]" * 5000 + "\ndef f(x): return x", "error", "memory")
memory("long_source", "x = [" + "1," * 100000 + "]\ndef f(x): return x", "ok")
memory(
    "exec_bomb",
    "def f(x):\n    exec('x=' + '[' * 90 + '0' + ']' * 90)\n    exec('y=' + 'lambda:' * 5000 + '0')",
    "error",
    "memory",
)
memory(
    "class_grows",
    "def f(x):\n    a = []\n    while True: a.append(type('A', (), {'b': bytes(10**5)}))",
    "memory",
    "timeout",
)
memory("memory_error_raised", "def f(x):\n    raise MemoryError")
memory(
    "decimal_precision",
    "import decimal\ndef f(x):\n    decimal.getcontext().prec = 10**9\n    return str(decimal.Decimal(1) / 3)",
    "memory",
    "timeout",
    "error",
)
memory("struct", "import struct\ndef f(x):\n    return len(struct.pack('1000000000s', b''))")
memory(
    "zlib",
    "import zlib\ndef f(x):\n    d = zlib.compress(bytes(10**7))\n    for _ in range(3): d = zlib.compress(d)\n"
    "    o = zlib.decompressobj()\n    return len(zlib.decompress(zlib.compress(bytes(10**8)))) and 1",
    "policy",
)
