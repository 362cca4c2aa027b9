"""Programs that want out: other processes, files, network, memory of others."""

from . import Group


process = Group("process", "policy", seconds=10.0)
process("fork", "import os\ndef f(x):\n    return 'PWNED' if os.fork() >= 0 else 0")
process("fork_bomb", "import os\nwhile True:\n    try: os.fork()\n    except OSError: break\ndef f(x): return 1")
process("vfork_spawn", "import os\ndef f(x):\n    return 'PWNED' if os.posix_spawn('/bin/true', ['true'], {}) else 0")
process("subprocess", "import subprocess\ndef f(x):\n    subprocess.run(['/bin/true'])\n    return 'PWNED'")
process("system", "import os\ndef f(x):\n    return 'PWNED' if os.system('true') == 0 else 0")
process("popen", "import os\ndef f(x):\n    return 'PWNED' if os.popen('echo hi').read() else 0")
process("exec", "import os\ndef f(x):\n    os.execv('/bin/sh', ['sh', '-c', 'echo'])")
process("exec_self", "import os\ndef f(x):\n    os.execv('/proc/self/exe', ['python'])")
process(
    "thread", "import threading\ndef f(x):\n    t = threading.Thread(target=print)\n    t.start()\n    return 'PWNED'"
)
process("thread_low", "import _thread\ndef f(x):\n    _thread.start_new_thread(print, ())\n    return 'PWNED'")
process(
    "multiprocessing",
    "import multiprocessing\ndef f(x):\n    p = multiprocessing.Process(target=print)\n    p.start()\n    return 'PWNED'",
)
process("kill_parent", "import os\ndef f(x):\n    os.kill(os.getppid(), 9)\n    return 'PWNED'")
process("kill_one", "import os\ndef f(x):\n    os.kill(1, 9)\n    return 'PWNED'")
process("kill_all", "import os\ndef f(x):\n    os.kill(-1, 9)\n    return 'PWNED'")
process("kill_group", "import os\ndef f(x):\n    os.killpg(0, 9)\n    return 'PWNED'")
process("stop_parent", "import os, signal\ndef f(x):\n    os.kill(os.getppid(), signal.SIGSTOP)\n    return 'PWNED'")
process("kill_self", "import os\ndef f(x):\n    os.kill(os.getpid(), 9)")
process("abort", "import os\ndef f(x):\n    os.abort()")
process("exit_zero", "import os\ndef f(x):\n    os._exit(0)")
process("exit_three", "import os\ndef f(x):\n    os._exit(3)")
process("sys_exit", "import sys\ndef f(x):\n    sys.exit()", "error")
process("sys_exit_at_import", "import sys\nsys.exit(0)\ndef f(x): return 1", "error")
process("raise_system_exit", "def f(x):\n    raise SystemExit(0)", "error")
process("keyboard_interrupt", "def f(x):\n    raise KeyboardInterrupt", "error")
process("quit", "def f(x):\n    quit()", "error")
process("exit", "def f(x):\n    exit(0)", "error")
process(
    "daemon",
    "import os\ndef f(x):\n    if os.fork() == 0:\n        os.setsid()\n        while True: pass\n    return 'PWNED'",
)
process("setsid", "import os\ndef f(x):\n    os.setsid()\n    return 'PWNED'")
process("setuid", "import os\ndef f(x):\n    os.setuid(0)\n    return 'PWNED'")
process("nice", "import os\ndef f(x):\n    os.setpriority(os.PRIO_PROCESS, 0, -5)\n    return 'PWNED'")
process(
    "prlimit_parent",
    "import os, resource\ndef f(x):\n    resource.prlimit(os.getppid(), resource.RLIMIT_NPROC, (0, 0))\n    return 'PWNED'",
)
process(
    "prlimit_one",
    "import resource\ndef f(x):\n    resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))\n    return 'PWNED'",
)
process(
    "rlimit_raise",
    "import resource\ndef f(x):\n    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n    return 'PWNED'",
)
process(
    "rlimit_cpu",
    "import resource\ndef f(x):\n    resource.setrlimit(resource.RLIMIT_CPU, (9999, 9999))\n    return 'PWNED'",
)
process("close_all", "import os\ndef f(x):\n    os.closerange(0, 1024)\n    return 1")
process(
    "close_reply",
    "import os\ndef f(x):\n    for fd in range(3, 256):\n        try: os.close(fd)\n        except OSError: pass\n    return 1",
)
process("dup", "import os\ndef f(x):\n    return 'PWNED' if os.dup(0) else 0")
process(
    "dup_reply",
    "import os\ndef f(x):\n    for fd in range(3, 256):\n        try:\n            os.dup2(fd, 1)\n            return 'PWNED'\n"
    "        except OSError: pass",
)
process("pipe", "import os\ndef f(x):\n    os.pipe()\n    return 'PWNED'")
process(
    "read_all_fds",
    "import os\ndef f(x):\n    for fd in range(64):\n        try:\n            os.set_blocking(fd, False)\n"
    "            if os.read(fd, 10): return 'PWNED'\n        except OSError: pass",
)
process(
    "read_reply_blocks",
    "import os\ndef f(x):\n    for fd in range(3, 256):\n        try: os.read(fd, 10)\n        except OSError: pass",
)
process(
    "send_rights",
    "import socket, array\ndef f(x):\n    for fd in range(3, 256):\n        try:\n            s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fd)\n"
    "            s.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0]))])\n            return 'PWNED'\n        except OSError: pass",
)
process("alarm", "import signal\ndef f(x):\n    signal.alarm(1)\n    while True: pass")
process("setitimer", "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\ndef f(x):\n    while True: pass")
process("atexit", "import atexit\natexit.register(lambda: open('/tmp/sandbox_pwned', 'w'))\ndef f(x):\n    return 1")
process(
    "ptrace",
    "import ctypes, os\ndef f(x):\n    libc = ctypes.CDLL(None)\n    return 'PWNED' if libc.ptrace(16, os.getppid(), 0, 0) == 0 else 0",
)
process(
    "process_vm_readv",
    "import ctypes, os\ndef f(x):\n    libc = ctypes.CDLL(None)\n    b = ctypes.create_string_buffer(8)\n"
    "    v = (ctypes.c_void_p * 2)(ctypes.addressof(b), 8)\n    return 'PWNED' if libc.process_vm_readv(os.getppid(), v, 1, v, 1, 0) >= 0 else 0",
)
process(
    "clone_raw",
    "import ctypes\ndef f(x):\n    libc = ctypes.CDLL(None)\n    pid = libc.syscall(56, 17, 0, 0, 0, 0)\n    return 'PWNED' if pid >= 0 else 0",
)
process(
    "clone3_raw",
    "import ctypes\ndef f(x):\n    libc = ctypes.CDLL(None)\n    a = (ctypes.c_uint64 * 11)()\n    a[4] = 17\n"
    "    return 'PWNED' if libc.syscall(435, a, 88) >= 0 else 0",
)
process(
    "x32_call",
    "import ctypes\ndef f(x):\n    libc = ctypes.CDLL(None)\n    return 'PWNED' if libc.syscall(0x40000000 | 57) >= 0 else 0",
)
process(
    "seccomp_more",
    "import ctypes\ndef f(x):\n    libc = ctypes.CDLL(None)\n    return 'PWNED' if libc.prctl(22, 1, 0, 0, 0) == 0 else 0",
)
process(
    "undo_pdeathsig",
    "import ctypes\ndef f(x):\n    libc = ctypes.CDLL(None)\n    return 'PWNED' if libc.prctl(1, 0, 0, 0, 0) == 0 else 0",
)
process(
    "io_uring",
    "import ctypes\ndef f(x):\n    libc = ctypes.CDLL(None)\n    b = ctypes.create_string_buffer(120)\n    return 'PWNED' if libc.syscall(425, 4, b) >= 0 else 0",
)
process(
    "userns",
    "import ctypes\ndef f(x):\n    libc = ctypes.CDLL(None)\n    return 'PWNED' if libc.unshare(0x10000000) == 0 else 0",
)
process("segfault", "import ctypes\ndef f(x):\n    return ctypes.string_at(0)")
process("memory_stomp", "import ctypes, sys\ndef f(x):\n    ctypes.memset(id(None), 255, 64)\n    return None")
process(
    "gc_refs",
    "import gc\ndef f(x):\n    return 'PWNED' if any(isinstance(o, str) and 'SECRET_OF_ANOTHER_JOB' in o and len(o) < 200 for o in gc.get_objects()) else 0",
)

escape = Group("escape", "policy", seconds=10.0)
escape("open", "def f(x):\n    return 'PWNED' if open('/etc/passwd').read() else 0")
escape("open_write", "def f(x):\n    open('/tmp/sandbox_pwned', 'w').write('x')\n    return 'PWNED'")
escape(
    "open_swallowed",
    "def f(x):\n    try:\n        return 'PWNED' if open('/etc/passwd').read() else 0\n    except BaseException:\n        return 0",
)
escape("io_open", "import io\ndef f(x):\n    return 'PWNED' if io.open('/etc/passwd').read() else 0")
escape(
    "io_fileio",
    "import io\ndef f(x):\n    return 'PWNED' if io.FileIO('/etc/passwd').read() else 0",
    "error",
    "policy",
)
escape("os_open", "import os\ndef f(x):\n    return 'PWNED' if os.open('/', os.O_RDONLY) >= 0 else 0")
escape("os_listdir", "import os\ndef f(x):\n    return 'PWNED' if os.listdir('/') is not None else 0")
escape("relative", "import os\ndef f(x):\n    return 'PWNED' if os.open('x', os.O_CREAT | os.O_WRONLY) >= 0 else 0")
escape("dotdot", "import os\ndef f(x):\n    os.chdir('../../../../..')\n    return 'PWNED' if os.listdir('.') else 0")
escape("chroot_again", "import os\ndef f(x):\n    os.chroot('.')\n    return 'PWNED'")
escape("symlink", "import os\ndef f(x):\n    os.symlink('/etc/passwd', 'x')\n    return 'PWNED'")
escape("mkfifo", "import os\ndef f(x):\n    os.mkfifo('x')\n    return 'PWNED'")
escape("proc_environ", "def f(x):\n    return 'PWNED' if open('/proc/1/environ').read() else 0")
escape("proc_mem", "import os\ndef f(x):\n    return 'PWNED' if open(f'/proc/{os.getppid()}/mem', 'rb') else 0")
escape("environment", "import os\ndef f(x):\n    return 'PWNED' if any('SECRET' in k for k in os.environ) else 0")
escape(
    "environment_c",
    "import ctypes\ndef f(x):\n    g = ctypes.CDLL(None).getenv\n    g.restype = ctypes.c_char_p\n    return 'PWNED' if g(b'SANDBOX_SECRET') else 0",
)
escape("arguments", "import sys\ndef f(x):\n    return 'PWNED' if any('secret' in a for a in sys.argv) else 0", "ok")
escape(
    "socket_tcp", "import socket\ndef f(x):\n    socket.create_connection(('127.0.0.1', 40999), 1)\n    return 'PWNED'"
)
escape(
    "socket_udp",
    "import socket\ndef f(x):\n    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 40999))\n    return 'PWNED'",
)
escape(
    "socket_unix",
    "import socket\ndef f(x):\n    socket.socket(socket.AF_UNIX).connect('\\0sandbox-test')\n    return 'PWNED'",
)
escape("socket_netlink", "import socket\ndef f(x):\n    socket.socket(16, 3, 0)\n    return 'PWNED'")
escape("socket_vsock", "import socket\ndef f(x):\n    socket.socket(40, 1, 0)\n    return 'PWNED'")
escape("dns", "import socket\ndef f(x):\n    return 'PWNED' if socket.getaddrinfo('localhost', 80) else 0")
escape(
    "urllib",
    "import urllib.request\ndef f(x):\n    return 'PWNED' if urllib.request.urlopen('http://127.0.0.1:40999') else 0",
)
escape(
    "ctypes_open",
    "import ctypes\ndef f(x):\n    return 'PWNED' if ctypes.CDLL(None).open(b'/etc/passwd', 0) >= 0 else 0",
)
escape(
    "ctypes_socket", "import ctypes\ndef f(x):\n    return 'PWNED' if ctypes.CDLL(None).socket(2, 1, 0) >= 0 else 0"
)
escape(
    "ctypes_system", "import ctypes\ndef f(x):\n    return 'PWNED' if ctypes.CDLL(None).system(b'true') == 0 else 0"
)
escape(
    "openat2",
    "import ctypes\ndef f(x):\n    h = (ctypes.c_uint64 * 3)()\n    return 'PWNED' if ctypes.CDLL(None).syscall(437, -100, b'/', h, 24) >= 0 else 0",
)
escape("memfd", "import os\ndef f(x):\n    return 'PWNED' if os.memfd_create('x') >= 0 else 0")
escape(
    "shm", "import ctypes\ndef f(x):\n    return 'PWNED' if ctypes.CDLL(None).shmget(1234, 4096, 0o1666) >= 0 else 0"
)
escape(
    "shared_memory",
    "import multiprocessing.shared_memory as s\ndef f(x):\n    s.SharedMemory('pwned', True, 100)\n    return 'PWNED'",
)
escape(
    "keyctl", "import ctypes\ndef f(x):\n    return 'PWNED' if ctypes.CDLL(None).syscall(250, 0, -3, 1) >= 0 else 0"
)
escape("bpf", "import ctypes\ndef f(x):\n    return 'PWNED' if ctypes.CDLL(None).syscall(321, 0, 0, 0) >= 0 else 0")
escape(
    "mount",
    "import ctypes\ndef f(x):\n    return 'PWNED' if ctypes.CDLL(None).mount(b'proc', b'/', b'proc', 0, None) == 0 else 0",
)
escape("tempfile", "import tempfile\ndef f(x):\n    tempfile.NamedTemporaryFile()\n    return 'PWNED'")
escape("pathlib", "import pathlib\ndef f(x):\n    return 'PWNED' if pathlib.Path('/etc/passwd').read_text() else 0")
escape("shutil", "import shutil\ndef f(x):\n    shutil.rmtree('/tmp/sandbox_canary')\n    return 'PWNED'")
escape("logging_file", "import logging\ndef f(x):\n    logging.FileHandler('/tmp/sandbox_pwned')\n    return 'PWNED'")
escape("code_interact", "import code\ndef f(x):\n    return code.interact()")
escape("breakpoint", "def f(x):\n    breakpoint()")
escape("input", "def f(x):\n    return input()")
escape("import_function", "def f(x):\n    return 'PWNED' if __import__('os').getcwd() == '/root' else 0")
escape(
    "importlib", "import importlib\ndef f(x):\n    return 'PWNED' if importlib.import_module('os').open('/', 0) else 0"
)
escape("builtins_import", "import builtins\ndef f(x):\n    return 'PWNED' if builtins.open('/etc/passwd') else 0")
escape("via_random", "import random\ndef f(x):\n    return 'PWNED' if random._os.open('/', 0) >= 0 else 0")
escape(
    "via_modules", "import sys\ndef f(x):\n    return 'PWNED' if sys.modules['os'].open('/', 0) >= 0 else 0", "error"
)
escape(
    "via_subclasses",
    "def f(x):\n    for c in object.__subclasses__():\n        if c.__name__ == '_wrap_close':\n"
    "            return 'PWNED' if c.__init__.__globals__['open']('/', 0) >= 0 else 0\n    return 0",
    "error",
    "ok",
    "policy",
)
escape(
    "via_frames",
    "def f(x):\n    try: 1 / 0\n    except Exception as e: frame = e.__traceback__.tb_frame.f_back\n    while frame:\n"
    "        b = frame.f_globals.get('os')\n        if b and b.open('/etc/passwd', 0) >= 0: return 'PWNED'\n        frame = frame.f_back",
    "ok",
)
escape(
    "via_loader",
    "def f(x):\n    l = [c for c in object.__subclasses__() if c.__name__ == 'BuiltinImporter'][0]\n"
    "    return 'PWNED' if l.load_module('posix').open('/etc/passwd', 0) >= 0 else 0",
    "error",
)
escape(
    "exec_text",
    "def f(x):\n    exec('import os; r = os.system(\"true\")', scope := {})\n    return 'PWNED' if scope['r'] == 0 else 0",
)
escape("eval_import", "def f(x):\n    return eval('__import__(\"os\").getuid()')")
escape("compile_run", "def f(x):\n    exec(compile('import socket', 'x', 'exec'))")
escape("relative_import", "from . import os\ndef f(x): return 'PWNED'")
escape("star_import", "from os import *\ndef f(x): return 'PWNED' if listdir('/') is not None else 0")
escape("import_hidden_in_class", "class A:\n    import os as o\ndef f(x): return A.o.getpid()")
escape(
    "mmap_anonymous_exec",
    "import mmap\ndef f(x):\n    m = mmap.mmap(-1, 4096, prot=7)\n    m.write(b'\\xc3')\n    return 1",
)
escape(
    "pickle_reduce",
    "import pickle\nclass E:\n    def __reduce__(self): return (print, ('x',))\ndef f(x):\n    return pickle.dumps(E())",
)
escape("numpy", "import numpy\ndef f(x): return 1")
escape("unknown_module", "import no_such_module\ndef f(x): return 1")
escape("sys_stdin", "import sys\ndef f(x):\n    return sys.stdin.read()", "ok", outputs=("",))
escape("uname", "import os\ndef f(x):\n    return os.uname().nodename")
escape("hostname", "import socket\ndef f(x):\n    return socket.gethostname()")
