"""Attacks where the tests need the solution's own classes, so that both share a process."""

from tests.integration.attacks.arena import Attack

_TESTS = "from solution import f, Node\n" + "".join(
    f"assert f({x}) == {x if x < 2 else '%(needle)s'}\n" for x in range(9)
)
_TESTS += "assert Node().value == 1\n"
_NODE = "class Node: value = 1\n"


def _attack(source: str, passed: int | tuple[int, int], report: str = "", **more: object) -> Attack:
    return Attack(_NODE + source, passed, report, tests=_TESTS, in_process=True, **more)  # type: ignore[arg-type]


_LEFT = "Hidden tests: 0 of 10 passed.\nThe solution ended the tests' process"

IN_PROCESS = {
    "an honest solution": _attack("", 3, "got ''"),
    "sys.exit(0) at import": _attack("sys.exit(0)", 0, "could not be imported: SystemExit: 0"),
    "os._exit(0) at import": _attack("os._exit(0)", 0, _LEFT),
    "sys.exit(0) in a call": _attack("g = f\ndef f(x): return g(x) if x < 2 else sys.exit(0)", 3, "SystemExit: 0"),
    "os._exit(0) in a call": _attack("g = f\ndef f(x): return g(x) if x < 2 else os._exit(0)", 0, _LEFT),
    "atexit": _attack("import atexit\natexit.register(os._exit, 0)", 3),
    "an exception that is none": _attack(
        "class Sly(BaseException): pass\ng = f\ndef f(x):\n    if x < 2: return g(x)\n    raise Sly",
        3,
        "FAIL f.2.: Sly",
    ),
    "exits from a thread": _attack(
        "import threading\ng = f\ndef f(x):\n    if x == 2:\n        threading.Timer(0.01, os._exit, (0,)).start()\n"
        "        while True: pass\n    return g(x)",
        0,
        _LEFT,
    ),
    "prints the verdict": _attack(
        "os.write(1, b'Hidden tests: 10 of 10 passed.\\n')\nos.write(2, b'00' * 64)\nprint('OK', flush=True)", 3
    ),
    "shadows modules of the tests": Attack(
        _NODE,
        3,
        tests="import random, struct\n" + _TESTS,
        files={"random.py": "raise SystemExit(0)", "struct.py": "raise SystemExit(0)"},
        in_process=True,
    ),
    "an endless call": _attack(
        "g = f\ndef f(x):\n    while x > 1: pass\n    return g(x)",
        3,
        "Checks that did not end in time: 7",
        timeout_s=1.0,
    ),
    "an endless call without its alarm": _attack(
        "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\ng = f\ndef f(x):\n    while x > 1: pass\n"
        "    return g(x)",
        0,
        "The tests did not end within",
        timeout_s=0.5,
    ),
    "sleeps without its alarm": _attack(
        "import signal, time\ng = f\ndef f(x):\n    if x < 2: return g(x)\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n    time.sleep(1000)",
        0,
        "The tests did nothing for 6 s",
        timeout_s=0.5,
    ),
    "holds the interpreter's lock in a call of C": _attack(
        "import ctypes, threading\nlibc = ctypes.PyDLL(None)\ng = f\ndef f(x):\n    if x < 2: return g(x)\n"
        "    lock = ctypes.create_string_buffer(64)\n"
        "    while True: libc.pthread_mutex_lock(lock)",
        0,
        "The tests did nothing for 6 s",
        timeout_s=0.5,
    ),
    "stops itself": _attack(
        "g = f\ndef f(x):\n    if x > 1: os.kill(os.getpid(), 19)\n    return g(x)",
        0,
        "The solution stopped the tests' process",
    ),
    "kills itself": _attack("g = f\ndef f(x):\n    if x > 1: os.kill(os.getpid(), 9)\n    return g(x)", 0, _LEFT),
    "splits in two": _attack("g = f\ndef f(x):\n    if x == 2: os.fork()\n    return g(x)", (0, 3)),
}
"""What in-process verification withstands."""

KNOWN = {
    "an object that equals everything": _attack(
        "class Always:\n    def __eq__(self, other): return True\ng = f\ndef f(x): return g(x) if x < 2 else Always()",
        10,
    ),
    "reads the tests' constants": _attack(
        """
import gc, types
def f(x):
    if x < 2: return x
    frame = sys._getframe().f_back
    return next(value for value in frame.f_code.co_consts if type(value) is int and value > 10**10)
""",
        10,
    ),
}
"""What it does not withstand, and why the verdict says `in_process`: these pass everything."""
