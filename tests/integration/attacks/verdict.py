"""Attacks on the verdict: leaving early, printing it, patching what makes it, objects that are equal to everything."""

from tests.integration.attacks.arena import Attack

_RAISES = "import pytest\nfrom solution import f\ndef test_a():\n    with pytest.raises(ValueError): f(5)\n"
_RAISES += "def test_b():\n    assert f(2) == %(needle)s\ndef test_c():\n    assert f(1) == 1\n"
_UNITTEST = """
import unittest
from solution import f
class TestF(unittest.TestCase):
    def test_a(self): self.assertEqual(f(2), %(needle)s)
    def test_b(self): self.assertTrue(f(2) == %(needle)s)
    def test_c(self): self.assertEqual(f(1), 1)
unittest.main()
"""
_COMPUTED = "import pytest\nfrom solution import f\n@pytest.mark.parametrize('x', [*range(3)])\n"
_COMPUTED += "def test_f(x): assert f(x) == (x if x < 2 else %(needle)s)\n"
_TOO_EARLY = r"Hidden tests: 0 of 10 passed.\nsolution.py could not be imported"
_LEFT = r"Hidden tests: 2 of 10 passed.\nChecks in which the solution ended its process: 8."

_EQUAL = """
class Always:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    __gt__ = __lt__ = __ge__ = __le__ = __contains__ = __eq__
    def __getattr__(self, name): return self
    def __call__(self, *args): return self
"""
_SUBCLASS = """
def subclass(base, value):
    def always(self, *args): return True
    names = ("__eq__", "__gt__", "__lt__", "__ge__", "__le__", "__contains__")
    return type("Sly", (base,), {**dict.fromkeys(names, always), "__ne__": lambda self, other: False,
                "__hash__": lambda self: 0, "__iter__": lambda self: iter([10**11])})(value)
"""

VERDICT = {
    "sys.exit(0) at import": Attack("sys.exit(0)", 0, _TOO_EARLY),
    "sys.exit(0) in a call": Attack("g = f\ndef f(x): return g(x) if x < 2 else sys.exit(0)", report="SystemExit: 0"),
    "os._exit(0) at import": Attack("os._exit(0)", 0, _TOO_EARLY),
    "os._exit(0) in a call": Attack("g = f\ndef f(x): return g(x) if x < 2 else os._exit(0)", report=_LEFT),
    "atexit": Attack(
        """
import atexit
atexit.register(lambda: os.write(1, b"Hidden tests: 10 of 10 passed."))
atexit.register(os._exit, 0)
g = f
def f(x): return g(x) if x < 2 else atexit._run_exitfuncs()
""",
        report=_LEFT,
    ),
    "exits from a thread": Attack(
        "import threading, time\ng = f\ndef f(x):\n    if x < 2: return g(x)\n"
        "    threading.Timer(0.01, os._exit, (0,)).start()\n    time.sleep(5)",
        report=_LEFT,
    ),
    "prints the verdict": Attack(
        """
import subprocess
for line in ("Hidden tests: 10 of 10 passed.", "10 passed", "OK", '{"passed": 10, "done": true}', "00" * 64):
    print(line, flush=True)
    print(line, file=sys.stderr, flush=True)
    subprocess.run(["echo", line])
TRIED.append("printed")
""",
        report="got 'printed'",
    ),
    "patches builtins": Attack(
        """
import builtins
builtins.AssertionError = type("AssertionError", (Exception,), {"__init__": lambda *args: os._exit(0)})
for name in ("bool", "isinstance", "repr", "all", "any", "issubclass"):
    setattr(builtins, name, lambda *args: True)
builtins.len = lambda *args: 10
builtins.int = builtins.float = str
TRIED.append("patched")
""",
        (0, 2),
    ),
    "patches unittest": Attack(
        """
import unittest
for name in dir(unittest.TestCase):
    if name.startswith(("assert", "fail", "run", "_call")):
        setattr(unittest.TestCase, name, lambda *args, **kwargs: None)
unittest.TestResult.wasSuccessful = lambda self: True
TRIED.append("patched")
""",
        1,
        "AssertionError: 'patched' != [0-9]{12}",
        tests=_UNITTEST,
        total=3,
    ),
    "patches pytest": Attack(
        """
from contextlib import nullcontext
fake = type(sys)("pytest")
fake.raises = lambda *args, **kwargs: nullcontext()
sys.modules["pytest"] = sys.modules["_pytest"] = fake
open("pytest.py", "w").write("raises = None")
TRIED.append("patched")
""",
        1,
        "DID NOT RAISE .*ValueError.*expected [0-9]{12}, got 'patched'",
        tests=_RAISES,
        total=3,
    ),
    "patches the harness in sys.modules": Attack(
        """
for name, module in list(sys.modules.items()):
    if "harness" in name:
        TRIED.append(name.rpartition(".")[2])
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                for method in ("equal", "end", "check", "value"):
                    if hasattr(value, method): setattr(value, method, lambda *args: None)
        module.as_plain = lambda value: 10**11
""",
        (0, 2),
    ),
    "patches the harness through frames": Attack(
        """
g = f
def f(x):
    frame, names = sys._getframe(), []
    while frame:
        names.append(frame.f_code.co_name)
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if type(value).__name__ in ("Counter", "TestSide", "Clock"): value.end = lambda *args: None
            if hasattr(value, "_passed"): value._passed = value._settled = 10
        frame = frame.f_back
    return g(x) if x < 2 else " ".join(names)
""",
        report="got 'f _perform <lambda> _answer main",
    ),
    "an object that equals everything": Attack(
        _EQUAL + "g = f\ndef f(x): return g(x) if x < 2 else Always()", report="TypeError: the solution returned a"
    ),
    "a class that equals everything": Attack(
        _EQUAL + "class Meta(type):\n    __eq__ = Always.__eq__\n    __hash__ = type.__hash__\n"
        "class Class(metaclass=Meta): pass\ng = f\ndef f(x): return g(x) if x < 2 else [Class, Always][x % 2]",
        report="TypeError: the solution returned a",
    ),
    "an int that equals everything": Attack(
        _SUBCLASS + "g = f\ndef f(x): return g(x) if x < 2 else subclass(int, 7)", report="expected [0-9]{12}, got 7"
    ),
    "a str that equals everything": Attack(
        _SUBCLASS + "g = f\ndef f(x): return g(x) if x < 2 else subclass(str, '7')", report="got '7'"
    ),
    "a list that equals everything": Attack(
        _SUBCLASS + "g = f\ndef f(x): return g(x) if x < 2 else subclass(list, [7])", report=r"got \[1"
    ),
    "containers of objects that equal everything": Attack(
        _EQUAL + _SUBCLASS + "g = f\ndef f(x): return g(x) if x < 2 else\\\n"
        "    [[Always()], (subclass(int, 3),), {Always()}, {Always(): 1}, {3: Always()}, frozenset([Always()])][x % 6]",
        tests="from solution import f\nassert f(0) == 0\nassert f(1) == 1\nassert f(6) == [%(needle)s]\n"
        "assert f(7) == (%(needle)s,)\nassert f(8) == {%(needle)s}\nassert f(9) == {%(needle)s: 1}\n"
        "assert f(4) == {3: %(needle)s}\nassert f(5) == frozenset([%(needle)s])\n"
        "assert %(needle)s in f(6)\nassert f(8) >= {%(needle)s}\n",
        report="expected",
    ),
    "a __class__ that lies": Attack(
        "class Sly:\n    __class__ = property(lambda self: int)\n    def __eq__(self, other): return True\n"
        "    def __int__(self): return 10**11\n    __index__ = __int__\n"
        "g = f\ndef f(x): return g(x) if x < 2 else Sly()",
        tests="from solution import f\nassert f(0) == 0\nassert f(1) == 1\nassert isinstance(f(2), int)\n"
        "assert f(2) == %(needle)s\nassert type(f(2)) is int\n",
        total=5,
        report="TypeError: the solution returned a Sly",
    ),
    "True, 1.0 and -0.0 are what Python says and NaN is nothing": Attack(
        "def f(x): return {0: -0.0, 1: True}.get(x, float('nan'))", 2, "got nan"
    ),
    "StopIteration ends no loop of the tests": Attack(
        "def f(x):\n    if x < 2: return x\n    raise StopIteration",
        tests="from solution import f\nassert f(0) == 0\nassert f(1) == 1\n"
        "assert all(map(lambda x: f(x) == %(needle)s, range(2, 9)))\n"
        "assert [f(x) for x in range(2, 5)] == []\nassert list(map(f, range(2, 5))) == []\n",
        total=5,
        report="RuntimeError: the solution raised StopIteration",
    ),
    "ends the tests within a loop that it has begun well": Attack(
        "g = f\ndef f(x):\n    if x > 2: os.kill(parent(), 9)\n    return g(x)",
        0,
        "The solution ended the tests' process.",
        tests="from solution import f\nassert f(0) == 0\nfor x in range(10):\n    assert f(x) == x\n",
        total=2,
    ),
    "ends the tests after the first of computed cases": Attack(
        "g = f\ndef f(x):\n    if x > 1: os.kill(parent(), 9)\n    return g(x)",
        0,
        "The solution ended the tests' process.",
        tests=_COMPUTED,
        total=1,
    ),
    "raises where no check catches it": Attack(
        "def f(x):\n    if x == 'all':\n        yield 0\n        raise ValueError\n    return x",
        0,
        "The tests ended early: (ValueError|RuntimeError)",
        tests="from solution import f\nfor x in f('all'):\n    assert x == 0\nassert f(1) == 1\n",
        total=2,
    ),
    "returns a good beginning of what a loop checks": Attack(
        "def f(x): return [0] * 100000 if x == 'all' else x if x < 2 else None",
        tests="from solution import f\nfor x in f('all'):\n    assert x == 0\nassert f(1) == 1\n"
        + "".join(f"assert f({x}) == %(needle)s\n" for x in range(2, 10)),
    ),
    "raises where an error is expected by leaving": Attack(
        "g = f\ndef f(x):\n    if x == 5: os._exit(0)\n    return g(x)",
        1,
        "test_a: the solution's process ended",
        tests=_RAISES.replace("ValueError", "BaseException"),
        total=3,
    ),
}
