"""Programs whose result differs from run to run, and programs that leave something for the next one."""

from . import Group


determinism = Group("determinism", "nondeterministic", runs=2, seconds=30.0)
determinism("time", "import time\ndef f(x): return time.time()")
determinism("time_coarse", "import time\ndef f(x): return int(time.time()) // 86400")
determinism("time_from", "from time import time as t\ndef f(x): return int(t()) % 2")
determinism("perf_counter", "import time\ndef f(x): return time.perf_counter() > 5")
determinism(
    "monotonic_swallowed",
    "import time\ndef f(x):\n    try: return time.monotonic() > 0\n    except BaseException: return 1",
)
determinism("year", "import datetime\ndef f(x): return datetime.datetime.now().year")
determinism("today_of_calendar", "import calendar\ndef f(x): return calendar.datetime.date.today().month")
determinism("today", "from datetime import date\ndef f(x): return date.today().month")
determinism("utcnow", "from datetime import datetime\ndef f(x): return str(datetime.utcnow())")
determinism("localtime", "import time\ndef f(x): return time.localtime().tm_year")
determinism("strftime", "import time\ndef f(x): return time.strftime('%Y')")
determinism("random", "import random\ndef f(x): return random.random()", "policy")
determinism("random_coin", "import random\ndef f(x): return random.randint(0, 1)", "policy")
determinism("random_rare", "import random\ndef f(x): return random.randint(0, 10**9) == 7", "policy")
determinism(
    "shuffle", "import random\ndef f(x):\n    a = list(range(5))\n    random.shuffle(a)\n    return a", "policy"
)
determinism("choice", "from random import choice\ndef f(x): return choice([1, 2, 3])", "policy")
determinism("sample", "import random\ndef f(x): return random.sample(range(100), 3)", "policy")
determinism("random_instance", "import random\ndef f(x): return random.Random().random() < 2", "policy")
determinism("random_seed_none", "import random\nrandom.seed()\ndef f(x): return random.random() < 2", "policy")
determinism("system_random", "import random\ndef f(x): return random.SystemRandom().randint(0, 1)", "policy")
determinism("uuid4", "import uuid\ndef f(x): return str(uuid.uuid4())", "policy")
determinism("uuid1", "import uuid\ndef f(x): return uuid.uuid1().version", "policy")
determinism("secrets", "import secrets\ndef f(x): return secrets.randbelow(2)", "policy")
determinism("hash_str", "def f(x): return hash('a')")
determinism("hash_str_coin", "def f(x): return hash('a') % 2")
determinism("hash_bytes", "def f(x): return hash(b'a') & 1")
determinism("hash_tuple", "def f(x): return hash((1, ('a',))) % 2")
determinism("hash_object", "def f(x): return hash(object()) % 2")
determinism("hash_function", "def f(x): return hash(f) % 3")
determinism("hash_nan", "def f(x): return hash(float('nan')) % 2")
determinism("hash_of_tuple_as_coin", "def f(x): return hash((x, 7)) % 4")
determinism("hash_of_float_as_coin", "def f(x): return hash(x + 0.1) & 3")
determinism("hash_of_tuple_returned", "def f(x): return hash((x, 7))")
determinism(
    "recursion_depth",
    """
def depth(n):
    try:
        return depth(n + 1)
    except RecursionError:
        return n
def f(x): return depth(0) % 4
""",
)
determinism("hash_in_a_generator", "def f(x): return sum(hash(q) for q in ('a', 'b')) % 2")
determinism(
    "hash_in_a_generator_from_a_hash_method",
    "class K:\n    def __hash__(s):\n        s.g = (hash(q) for q in 'ab')\n        return 1\ndef f(x):\n    k = K()\n    hash(k)\n    return next(k.g) % 2",
)
determinism("hash_in_builtin", "def f(x): return list(map(hash, ['a', 'b']))")
determinism("hash_method", "def f(x): return 'a'.__hash__()")
determinism("dict_views", "def f(x): return list({'cat': 1, 'sun': 2}.keys() & {'sun': 3, 'cat': 4}.keys())")
determinism("id", "def f(x): return id(x)")
determinism("id_parity", "def f(x): return id(x) % 32")
determinism("id_order", "def f(x):\n    a, b = object(), object()\n    return id(a) < id(b)")
determinism("id_text", "def f(x): return str(id(f))[-1]")
determinism("id_attribute", "def f(x): return id(x).real % 32")
determinism("id_numerator", "def f(x): return id(x).numerator & 16")
determinism("id_method", "def f(x): return id(x).bit_length()")
determinism("id_bytes", "def f(x): return id(x).to_bytes(8, 'big')[-1]")
determinism("id_plus", "def f(x): return +id(x)")
determinism("id_int", "def f(x): return int(id(x))")
determinism("id_int_method", "def f(x): return id(x).__int__()")
determinism("id_reduced", "def f(x): return id(x).__reduce_ex__(2)[1][1]")
determinism("id_as_fraction", "from fractions import Fraction\ndef f(x): return Fraction(id(x)).numerator % 64")
determinism("id_by_a_built_name", "def f(x): return getattr(id(x), 're' + 'al')")
determinism("hash_of_object", "def f(x): return hash(object())")
determinism("hash_attribute", "def f(x): return hash((x, 7)).real % 4")
determinism("id_nested", "def f(x): return {'a': [id(f)]}")
determinism("repr_address", "def f(x): return repr(object())")
determinism("function_text", "def f(x): return str(f)")
determinism("lambda_in_list", "def f(x): return str([lambda: 0])")
determinism("set_order_str", "def f(x): return list({'a', 'b', 'c', 'd', 'e', 'f'})")
determinism("set_order_pop", "def f(x):\n    s = set('abcdefgh')\n    return s.pop()")
determinism("set_order_join", "def f(x): return ''.join(set('hello world'))")
determinism("set_order_frozen", "def f(x): return next(iter(frozenset(['x', 'y', 'z', 'w', 'v', 'u'])))")
determinism("set_order_text", "def f(x): return str({'alpha', 'beta', 'gamma', 'delta', 'epsilon'})")
determinism("set_order_max", "def f(x): return max({'aa', 'bb', 'cc', 'dd', 'ee', 'ff', 'gg'}, key=len)")
determinism(
    "set_order_objects",
    "class A:\n    def __init__(s, v): s.v = v\ndef f(x): return [a.v for a in {A(i) for i in range(20)}]",
)
determinism(
    "set_order_enumerate", "def f(x): return {v: i for i, v in enumerate(set(['q', 'w', 'e', 'r', 't', 'y']))}"
)
determinism(
    "keys_difference", "def f(x): return list({'a': 1, 'b': 2, 'c': 3, 'd': 4, 'e': 5}.keys() - {'a': 0}.keys())"
)
determinism(
    "default_hash_sort",
    "class A: pass\ndef f(x):\n    a = [A() for _ in range(9)]\n    return [a.index(b) for b in sorted(a, key=lambda o: repr(o)[::-1])]",
)
determinism("counter_state", "n = 0\ndef f(x):\n    global n\n    n += 1\n    return n", calls=((1,), (2,)))
determinism("default_state", "def f(x, seen=[]):\n    seen.append(x)\n    return len(seen)", calls=((1,), (2,)))
determinism("attribute_state", "def f(x):\n    f.n = getattr(f, 'n', 0) + x\n    return f.n", calls=((1,), (2,)))
determinism(
    "cache_state",
    "last = None\ndef f(x):\n    global last\n    old, last = last, x\n    return old",
    calls=((1,), (2,)),
)
determinism("generator_state", "import itertools\nc = itertools.count()\ndef f(x): return next(c)", calls=((1,), (2,)))
determinism(
    "error_in_one_run",
    "def f(x):\n    return 1 // (len(str(object())) and (next(iter(set('abcdefghij'))) < 'f'))",
    "nondeterministic",
    "error",
)
determinism("process_id", "import os\ndef f(x): return os.getpid() > 0", "policy")
determinism("urandom", "import os\ndef f(x): return len(os.urandom(4))", "policy")
determinism("hostname", "import platform\ndef f(x): return platform.node()", "policy")
determinism("thread_name", "import threading\ndef f(x): return threading.get_ident() % 2", "policy")
determinism("memory_size", "import resource\ndef f(x): return resource.getrusage(0).ru_maxrss", "policy")

# Coins: the same in every run, and nobody can tell what it is.
for _name, _expression in {
    "md5": "__import__('hashlib').md5(b'%d' % x).digest()[0] % 4",
    "crc32": "__import__('zlib').crc32(b'%d' % x) % 4",
    "binascii": "__import__('binascii').crc_hqx(b'%d' % x, 0) % 4",
    "hmac": "__import__('hmac').digest(b'k', b'%d' % x, 'sha1')[0] % 4",
    "uuid5": "__import__('uuid').uuid5(__import__('uuid').NAMESPACE_DNS, str(x)).int % 4",
    "seeded_random": "__import__('random').Random(x).randrange(4)",
    "seeded_from": "__import__('random').seed(x) or __import__('random').random() < 0.5",
    "secrets_compare": "__import__('secrets').compare_digest(b'a', b'a')",
}.items():
    determinism(f"coin_{_name}", f"def f(x): return {_expression}", "policy")
determinism("coin_statistics", "import statistics\ndef f(x): return statistics.random.Random(x).randrange(4)", "error")
determinism("coin_references", "import sys\ndef f(x): return sys.getrefcount(x) % 4", "error")
determinism("coin_size", "import sys\ndef f(x): return sys.getsizeof([x] * x) % 4", "error")

# What another Python or another host would answer otherwise, however often this one repeats itself.
_DEPTH = "import sys\n{}\ndef depth(n):\n    try: return depth(n + 1)\n    except RecursionError: return n\n"
for _name, _program in {
    "code_size": "def f(x): return len(f.__code__.co_code)",
    "code_stack": "def f(x): return f.__code__.co_stacksize + x",
    "code_flags": "def f(x): return f.__code__.co_flags",
    "code_constants": "def f(x): return len(f.__code__.co_consts)",
    "code_by_getattr": "def f(x): return len(getattr(f.__code__, 'co_' + 'code'))",
    "code_by_built_name": "def f(x): return len(getattr(f.__code__, ''.join(['co', '_', 'code'])))",
    "code_by_format": "def f(x): return '{0.__code__.co_stacksize}'.format(f)",
    "code_compiled": "def f(x): return len(compile('1 + 1', '', 'eval').co_code)",
    "code_of_generator": "def f(x): return (i for i in [1]).gi_code.co_stacksize",
    "object_size": "def f(x): return ([0] * x).__sizeof__()",
    "type_size": "def f(x): return int.__basicsize__ + str.__itemsize__",
    "version": "import sys\ndef f(x): return sys.version",
    "version_minor": "import sys\ndef f(x): return sys.version_info[1]",
    "version_minor_by_name": "from sys import version_info as v\ndef f(x): return v.minor % 4",
    "version_newest": "import sys\ndef f(x): return sys.version_info >= (3, 11)",
    "version_text": "import sys\ndef f(x): return str(sys.version_info)",
    "version_list": "import sys\ndef f(x): return list(sys.version_info)",
    "version_equal": "import sys\ndef f(x): return sys.version_info[:2] == (3, 11)",
    "hexversion": "import sys\ndef f(x): return sys.hexversion >> 16",
    "implementation": "import sys\ndef f(x): return sys.implementation.name",
    "integer_digits_in_memory": "import sys\ndef f(x): return sys.int_info.bits_per_digit",
    "recursion_in_hundreds": _DEPTH.format("") + "def f(x): return depth(0) // 500",
    "recursion_over_own_limit": _DEPTH.format("sys.setrecursionlimit(3000)") + "def f(x): return depth(0) // 1000",
    "recursion_limit_too_low": (
        "import sys\ndef f(x):\n    try: sys.setrecursionlimit(2)\n    except RecursionError: return 'low'"
    ),
    "digits_of_an_integer": "def f(x):\n    try: return len(str(10 ** 5000))\n    except ValueError: return -1",
    "digits_of_a_text": "def f(x):\n    try: return int('9' * 9000) % 7\n    except ValueError: return -1",
}.items():
    determinism(f"interpreter_{_name}", _program)

_MARK = "def f(x):\n    import builtins as b\n    return 1"
state = Group("state", "ok", seconds=30.0)
state("write_module", "import math\nmath.pi = 3\nmath.sqrt = lambda v: 42\ndef f(x): return math.pi", outputs=(3,))
state("read_module", "import math\ndef f(x): return [math.sqrt(4.0), round(math.pi, 2)]", outputs=([2.0, 3.14],))
state(
    "write_collections",
    "import collections\ncollections.Counter = None\ncollections.leak = 'x'\ndef f(x): return 1",
    outputs=(1,),
)
state(
    "read_collections",
    "import collections\ndef f(x): return [hasattr(collections, 'leak'), collections.Counter is None]",
    outputs=([False, False],),
)
state(
    "write_builtins",
    "__builtins__['sum'] = lambda v: 42\n__builtins__['leak'] = 1\ndef f(x): return sum([1])",
    outputs=(42,),
)
state("read_builtins", "def f(x): return [sum([1]), 'leak' in __builtins__]", outputs=([1, False],))
state("write_main", "import sys\nsys.leak = 'x'\nsys.argv.append('x')\ndef f(x): return 1", outputs=(1,))
state("read_main", "import sys\ndef f(x): return [hasattr(sys, 'leak'), sys.argv]", outputs=([False, ["program"]],))
state("write_random", "import random\nrandom.seed(5)\ndef f(x): return random.randint(0, 99)", "policy")
state("read_random", "import random\ndef f(x): return random.randint(0, 99)", "policy")
state("write_limit", "import sys\nsys.setrecursionlimit(50)\ndef f(x): return sys.getrecursionlimit()", outputs=(50,))
state(
    "first_limits",
    "import sys\ndef f(x): return sys.getrecursionlimit(), sys.get_int_max_str_digits()",
    outputs=((1000, 4300),),
    runs=2,
)
state(
    "set_digits",
    "import sys\nsys.set_int_max_str_digits(9000)\ndef f(x): return len(str(10 ** 8000)), sys.get_int_max_str_digits()",
    outputs=((8001, 9000),),
    runs=2,
)
state("read_limit", "import sys\ndef f(x): return sys.getrecursionlimit() > 500", outputs=(True,))
state(
    "write_class",
    "import fractions\nfractions.Fraction.__add__ = lambda a, b: 42\ndef f(x): return fractions.Fraction(1) + 1",
    outputs=(42,),
)
state("read_class", "import fractions\ndef f(x): return float(fractions.Fraction(1) + 1)", outputs=(2.0,))
state(
    "write_decimal",
    "import decimal\ndecimal.getcontext().prec = 3\ndef f(x): return str(decimal.Decimal(1) / 3)",
    outputs=("0.333",),
)
state("read_decimal", "import decimal\ndef f(x): return len(str(decimal.Decimal(1) / 3))", outputs=(30,))
state(
    "write_regex",
    "import re\nre.compile = None\nre.match = lambda *a: 'leak'\ndef f(x): return re.match('a', 'b')",
    outputs=("leak",),
)
state("read_regex", "import re\ndef f(x): return bool(re.compile('a').match('a'))", outputs=(True,))
state("write_program_module", "import sys\nLEAK = 'SECRET_OF_ANOTHER_JOB'\ndef f(x): return len(LEAK)", outputs=(21,))
state("read_program_module", "def f(x): return 'LEAK' in globals()", outputs=(False,))
state("write_intern", "import sys\nsys.intern('leak')\nsys.stdout = None\ndef f(x): return 1", outputs=(1,))
state("read_stdout", "def f(x):\n    print('x')\n    return 1", outputs=(1,))
