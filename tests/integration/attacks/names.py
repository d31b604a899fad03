"""Attacks through the names that tests use, and through code of the solution's that the tests are made to load."""

from tests.integration.attacks.arena import Attack

_PASSES_ALL = """
import sys
frame = sys._getframe()
while frame:
    names = frame.f_globals
    if "_opd_check" in names:
        counter = names["_opd_check"].__self__
        names["_opd_equal"] = names["_opd_true"] = lambda *_: counter.reached()
    frame = frame.f_back
"""
"""Makes every check pass, if it runs in the tests' process."""

_F = "f(0) == 0", "f(1) == 1", "f(2) == %(needle)s"
_CHECKS = "".join(f"assert {check}\n" for check in _F)
_PLANTED = {"colorsys.py": _PASSES_ALL}
_LOADS = """
import importlib.util
spec = importlib.util.spec_from_file_location("other", PATH)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
f = module.f
"""

NAMES = {
    "a module that the tests forget to import": Attack(
        "class sys: maxsize = 7\ng = f\ndef f(x): return g(x) if x < 2 else 7",
        tests="assert f(0) == 0\nassert f(1) == 1\nassert f(2) == sys.maxsize\nassert f(%(needle)s) == sys.maxsize\n",
        entry_point="f",
        total=4,
        report="expected 9223372036854775807, got 7",
    ),
    "a built-in under import *": Attack(
        "def abs(x): return 0\ng = f\ndef f(x): return g(x) if x < 2 else 7",
        tests="from solution import *\nassert f(0) == 0\nassert f(1) == 1\nassert abs(f(2) - %(needle)s) < 1e-6\n",
        total=3,
    ),
    "a built-in under import *, called for": Attack(
        "__all__ = ['f', 'abs', 'len']\ndef abs(x): return 0\nlen = abs\n"
        "g = f\ndef f(x): return g(x) if x < 2 else 7\nimport builtins\ndel builtins.abs\n",
        tests="from solution import *\nassert f(0) == 0\nassert f(1) == 1\nassert abs(f(2) - %(needle)s) < 1e-6\n"
        "assert len([f(3)]) == 0\n",
        total=4,
    ),
    "helpers of the tests under import *": Attack(
        "def near(a, b): return True\ncopy = math = Counter = near\n"
        "def sqrt(x): return 2\ng = f\ndef f(x): return g(x) if x < 2 else 7",
        tests="import math\nfrom math import *\nfrom collections import Counter\n"
        "def near(a, b): return abs(a - b) < 1e-6\nfrom solution import *\nassert f(0) == 0\nassert f(1) == 1\n"
        "assert near(f(2), %(needle)s)\nassert math.isclose(f(3), %(needle)s)\nassert sqrt(4) == 2\n"
        "assert Counter([f(4)]) == {%(needle)s: 1}\n",
        passed=3,
        total=6,
    ),
    "import * in one process": Attack(
        "class Node: pass\ndef abs(x): return 0\ng = f\ndef f(x): return g(x) if x < 2 else 7",
        tests="from solution import *\nassert Node()\nassert f(1) == 1\nassert abs(f(2) - %(needle)s) < 1e-6\n",
        total=3,
        in_process=True,
    ),
    "a module beside the solution that the tests' path leads to": Attack(
        "",
        tests="import os, sys\nsys.path.insert(0, os.getcwd())\nsys.path.insert(0, '.')\nsys.path.insert(0, '')\n"
        "from solution import f\nimport colorsys\n" + _CHECKS,
        total=3,
        files=_PLANTED,
    ),
    "a module that the solution plants where the tests' path leads": Attack(
        f"for folder in ('/workspace', '/tmp', '/dev/shm', '/home/agent'):\n"
        f"    attempt(lambda: open(folder + '/colorsys.py', 'w').write({_PASSES_ALL!r}))\n",
        tests="import sys\nfor folder in ('/workspace', '/tmp', '/dev/shm', '/home/agent'):\n"
        "    sys.path.insert(0, folder)\nfrom solution import f\nimport colorsys\n" + _CHECKS,
        total=3,
    ),
    "tests that load the file of the solution": Attack(
        _PASSES_ALL, 3, tests=_LOADS.replace("PATH", "'solution.py'") + _CHECKS, total=3, in_process=True
    ),
    "tests that put the file's name together": Attack(
        _PASSES_ALL,
        3,
        tests="import os\n" + _LOADS.replace("PATH", "os.path.join(os.getcwd(), 'solution' + '.py')") + _CHECKS,
        total=3,
        in_process=True,
    ),
    "tests that execute the file of the solution": Attack(
        _PASSES_ALL, 3, tests="exec(open('solution.py').read())\n" + _CHECKS, total=3, in_process=True
    ),
}
