"""Programs that lie about their result, and results that are not plain data or not small."""

from . import Group


_FRAME = """
import os, struct
def send(body):
    for fd in range(3, 256):
        try: os.write(fd, struct.pack('<I', len(body)) + body)
        except OSError: pass
"""
forge = Group("forge", "bad_output", seconds=20.0)
forge("always_equal", "class A:\n    def __eq__(self, o): return True\n    __hash__ = None\ndef f(x): return A()")
forge(
    "equal_int",
    "class A(int):\n    def __eq__(self, o): return True\n    def __hash__(self): return 0\ndef f(x): return A(5)",
)
forge(
    "equal_str",
    "class A(str):\n    def __eq__(self, o): return True\n    def __hash__(self): return 0\ndef f(x): return A('x')",
)
forge(
    "equal_list", "class A(list):\n    def __eq__(self, o): return True\n    __hash__ = None\ndef f(x): return A([1])"
)
forge(
    "equal_inside",
    "class A(int):\n    def __eq__(self, o): return True\n    def __hash__(self): return 0\ndef f(x): return {'a': [A(5)]}",
)
forge("repr_override", "class A:\n    def __repr__(self): return '42'\ndef f(x): return A()")
forge("class_name", "class A:\n    pass\nA.__name__ = 'int'\ndef f(x): return A()")
forge("class_attribute", "class A:\n    __class__ = int\ndef f(x): return A()")
forge("bool_like", "class A:\n    def __bool__(self): return True\ndef f(x): return A()")
forge(
    "metaclass_eq",
    "class M(type):\n    def __eq__(c, o): return True\n    def __hash__(c): return hash(int)\nclass A(metaclass=M): pass\ndef f(x): return A()",
)
forge(
    "metaclass_name",
    "class M(type):\n    @property\n    def __name__(c): raise ValueError\nclass A(metaclass=M): pass\ndef f(x): return A()",
    "bad_output",
    "error",
)
forge("dict_key_class", "class A(str): pass\ndef f(x): return {A('k'): 1}")
forge("namedtuple", "import collections\nP = collections.namedtuple('P', 'a')\ndef f(x): return P(1)")
forge("int_enum", "import enum\nclass E(enum.IntEnum):\n    A = 1\ndef f(x): return E.A")
forge("ordered_dict", "import collections\ndef f(x): return collections.OrderedDict(a=1)")
forge("default_dict", "import collections\ndef f(x): return collections.defaultdict(int, a=1)")
forge("counter", "import collections\ndef f(x): return collections.Counter('aab')")
forge("print_verdict", "def f(x):\n    print('ok\\n42')\n    return 1", "ok", outputs=(1,))
forge("print_at_import", 'print(\'{"status": "ok", "output": 42}\')\ndef f(x): return 1', "ok", outputs=(1,))
forge("frame_then_exit", _FRAME + "def f(x):\n    send(b'ok\\n42')\n    os._exit(0)", "policy")
forge("frame_twice", _FRAME + "def f(x):\n    send(b'ok\\n42')\n    return 1", "policy")
forge("frame_garbage", _FRAME + "def f(x):\n    send(b'\\x80\\x04]q\\x00')\n    os._exit(0)", "policy")
forge(
    "frame_pickle",
    "import pickle\n"
    + _FRAME
    + "class E:\n    def __reduce__(self): return (os.system, ('touch /tmp/sandbox_pwned',))\n"
    "def f(x):\n    send(pickle.dumps(E()))\n    os._exit(0)",
    "policy",
)
forge(
    "frame_json", _FRAME + 'def f(x):\n    send(b\'{"status": "ok", "outputs": ["42"]}\')\n    os._exit(0)', "policy"
)
forge("frame_not_canonical", _FRAME + "def f(x):\n    send(b'ok\\n__import__(\"os\")')\n    os._exit(0)", "policy")
forge("frame_too_long", _FRAME + "def f(x):\n    send(b'ok\\n\"' + b'a' * 10**6 + b'\"')\n    os._exit(0)", "policy")
forge(
    "frame_claims_length",
    "import os\ndef f(x):\n    for fd in range(3, 256):\n        try: os.write(fd, b'\\xff\\xff\\xff\\x7f')\n        except OSError: pass\n    os._exit(0)",
    "policy",
)
forge(
    "flood",
    "import os\ndef f(x):\n    while True:\n        for fd in range(3, 256):\n            try: os.write(fd, bytes(60000))\n            except OSError: pass",
    "policy",
)
forge(
    "half_frame",
    "import os\ndef f(x):\n    for fd in range(3, 256):\n        try: os.write(fd, b'\\x05')\n        except OSError: pass\n    os._exit(0)",
    "policy",
)
forge("exit_without_word", "import os\nos._exit(0)", "policy")
forge("fake_tier", _FRAME + "def f(x):\n    send(b'tier\\nos')\n    os._exit(0)", "policy")
forge("fake_status_word", _FRAME + "def f(x):\n    send(b'accepted\\n42')\n    os._exit(0)", "policy")
forge(
    "patch_json",
    "import json\njson.dumps = lambda *a, **k: '42'\njson.encoder.encode_basestring_ascii = lambda s: '42'\ndef f(x): return 'real'",
    "ok",
    outputs=("real",),
)
forge(
    "patch_builtins",
    "import builtins\nbuiltins.len = lambda x: 0\nbuiltins.sorted = lambda x: []\ndef f(x): return [1]",
    "policy",
)
forge(
    "patch_own_builtins",
    "__builtins__['len'] = lambda x: 0\n__builtins__['repr'] = lambda x: '42'\ndef f(x): return [1.5]",
    "ok",
    outputs=([1.5],),
)
forge(
    "frame_walk",
    "def f(x):\n    try: raise ValueError\n    except ValueError as e:\n        frame = e.__traceback__.tb_frame\n        while frame.f_back:\n"
    "            frame = frame.f_back\n            if 'outputs' in frame.f_locals: frame.f_locals['outputs'][0] = '42'\n    return 7",
    "ok",
    outputs=(7,),
)
forge(
    "gc_walk",
    "import gc\ndef f(x):\n    return 'PWNED' if any(isinstance(o, dict) and 'expected' in o for o in gc.get_objects()) else 0",
    "policy",
)
forge(
    "redefine_f_inside",
    "def f(x):\n    global f\n    f = lambda y: 'second'\n    return 'first'",
    "ok",
    calls=((1,), (2,)),
    outputs=("first", "first"),
)
forge("f_is_class", "class f:\n    def __init__(self, x): pass")
forge("f_is_builtin", "f = abs", "ok", calls=((-3,),), outputs=(3,))
forge("f_via_getattr", "def __getattr__(name): return lambda x: 1", "error")
forge("f_deleted", "def f(x): return 1\ndel f", "error")
forge("f_not_callable", "f = 42", "error")
forge("wrong_arguments", "def f(x, y): return 1", "error")
forge("exit_in_repr", "class E(Exception):\n    def __str__(self): raise SystemExit\ndef f(x): raise E", "error")
forge("reason_with_lines", "def f(x):\n    raise ValueError('a\\nok\\n42\\x00\\x1b[31m\\ud800')", "error")
forge("exception_is_ok", "class ok(Exception): pass\ndef f(x): raise ok('\\nok\\n42')", "error")
forge("exception_group", "def f(x):\n    raise ExceptionGroup('g', [ValueError(1)])", "error")
forge("module_is_swapped", "import sys\nsys.modules = {}\ndef f(x): return 1", "ok", outputs=(1,))
forge(
    "stdout_is_swapped", "import sys\nsys.stdout = None\ndef f(x):\n    print('x')\n    return 1", "ok", outputs=(1,)
)
forge("recursion_limit_low", "import sys\nsys.setrecursionlimit(30)\ndef f(x): return [[1]]", "ok", "error")

output = Group("output", "bad_output", seconds=30.0)
output("huge_string", "def f(x): return 'a' * 10**7")
output("huge_list", "def f(x): return list(range(10**6))")
output("huge_int", "def f(x): return 7 ** 10**6")
output("many_small", "def f(x): return 'a' * 30000", calls=((1,), (2,), (3,)))
output("deep_list", "def f(x):\n    a = []\n    for _ in range(900): a = [a]\n    return a")
output(
    "very_deep_list",
    "def f(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
    "bad_output",
    "memory",
    "error",
)
output("deep_tuple", "def f(x):\n    a = ()\n    for _ in range(70): a = (a,)\n    return a")
output("deep_dict", "def f(x):\n    a = {}\n    for _ in range(70): a = {'a': a}\n    return a")
output("shared_explosion", "def f(x):\n    a = [1]\n    for _ in range(60): a = [a, a]\n    return a")
output("cyclic_list", "def f(x):\n    a = []\n    a.append(a)\n    return a")
output("cyclic_dict", "def f(x):\n    a = {}\n    a['a'] = a\n    return a")
output("generator", "def f(x):\n    yield 1")
output("iterator", "def f(x): return iter([1])")
output("map", "def f(x): return map(str, [1])")
output("range", "def f(x): return range(3)")
output("dict_keys", "def f(x): return {1: 2}.keys()")
output("function", "def f(x): return f")
output("lambda", "def f(x): return lambda: 1")
output("class", "class A: pass\ndef f(x): return A")
output("module", "import math\ndef f(x): return math")
output("coroutine", "async def f(x): return 1")
output("object", "def f(x): return object()")
output("exception", "def f(x): return ValueError('x')")
output("bytearray", "def f(x): return bytearray(b'x')")
output("memoryview", "def f(x): return memoryview(b'x')")
output("decimal", "import decimal\ndef f(x): return decimal.Decimal('1.5')")
output("fraction", "import fractions\ndef f(x): return fractions.Fraction(1, 3)")
output("datetime", "import datetime\ndef f(x): return datetime.date(2020, 1, 1)")
output("regex_match", "import re\ndef f(x): return re.match('a', 'a')")
output("ellipsis", "def f(x): return ...")
output("not_implemented", "def f(x): return NotImplemented")
output("slice", "def f(x): return slice(1)")
output(
    "complex_key", "def f(x): return {(1, (2, frozenset({3}))): 1j}", "ok", outputs=({(1, (2, frozenset({3}))): 1j},)
)
output("nan", "def f(x): return float('nan')", "ok", outputs=(float("nan"),), runs=2)
output("nan_in_set", "def f(x): return {float('nan'), float('nan')}", "ok", runs=2)
output("negative_zero", "def f(x): return -0.0", "ok", outputs=(-0.0,), runs=2)
output("infinity", "def f(x): return [float('inf'), -float('inf')]", "ok", outputs=([float("inf"), -float("inf")],))
output("surrogate", "def f(x): return '\\ud800'", "ok", outputs=("\ud800",))
output("surrogate_pair", "def f(x): return '\\ud800\\udc00'", "ok", outputs=("\ud800\udc00",))
output("astral", "def f(x): return '\\U0001f600'", "ok", outputs=("\U0001f600",))
output("null_character", "def f(x): return 'a\\x00b\\n'", "ok", outputs=("a\x00b\n",))
output("bytes", "def f(x): return bytes(range(256))", "ok", outputs=(bytes(range(256)),))
output("big_int_fits", "def f(x): return 7 ** 5000", "ok", outputs=(7**5000,))
output("negative_big_int", "def f(x): return -2 ** 64", "ok", outputs=(-(2**64),))
output("tuple_is_not_list", "def f(x): return (1, [2])", "ok", outputs=((1, [2]),))
output("true_is_not_one", "def f(x): return [True, 1, 1.0]", "ok", outputs=([True, 1, 1.0],))
output(
    "empty_containers",
    "def f(x): return [[], (), {}, set(), frozenset(), '', b'']",
    "ok",
    outputs=([[], (), {}, set(), frozenset(), "", b""],),
)
output("none", "def f(x): pass", "ok", outputs=(None,))
output("mixed_set", "def f(x): return {1, 'a', None, (2,)}", "ok", outputs=({1, "a", None, (2,)},), runs=2)
