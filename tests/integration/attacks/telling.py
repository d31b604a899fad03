"""Attacks that tell the judge, which advises the policy, an input that only the tests know."""

from tests.integration.attacks.arena import Attack

_HONEST = "from solution import f\nassert f(0) == 0\nassert f(1) == 1\n"
_NEEDLES = _HONEST + "".join(f"assert f(%(needle)s) == {number}\n" for number in range(2))
_IN_PROCESS = "import inspect\n" + _NEEDLES


def _tells(source: str, report: str = "[0-9]{12}", tests: str = _NEEDLES, passed: int = 2, total: int = 4) -> Attack:
    return Attack(f"g = f\ndef f(x):\n    if x < 2: return g(x)\n{source}", passed, report, tests=tests, total=total)


def _tells_inside(source: str, report: str = "[0-9]{12}", passed: int = 2) -> Attack:
    return Attack(
        f"g = f\ndef f(x):\n    if x < 2: return g(x)\n{source}",
        passed,
        report,
        tests=_IN_PROCESS,
        total=4,
        in_process=True,
    )


_NAMED = "    raise type('E' + str(x), (ValueError,), {})()"
_ODD = """
    class Odd(Exception):
        def __str__(self): return str(x)
    Odd.__name__ = Odd.__qualname__ = Odd.__module__ = f"E{x}"
    error = Odd(x)
    error.add_note(str(x))
    error.__cause__ = KeyError(x)
    error.manner = f"it is {x}"
    error.opd_line = x
    raise error
"""
_ASSERTS = """
    class Fails(AssertionError): manner = f"it is {x}"
    raise Fails(x)
"""
_VALUE = "    return type('V' + str(x), (), {})()"
_FRAMES = """
frame = sys._getframe()
while frame.f_back:
    frame = frame.f_back
    for name, value in frame.f_locals.items():
        if "job" in name: raise SystemExit(str(value.get("tests"))[-150:])
"""

TELLING = {
    "an exception's name": _tells(_NAMED),
    "an exception's other parts": _tells(_ODD),
    "an assertion's words": _tells(_ASSERTS),
    "a name that is missing": _tells("    raise ImportError(f\"cannot import name 'n{x}' from 'solution'\")"),
    "a name that is missing outside of checks": _tells(
        "    raise ImportError(f\"cannot import name 'n{x}' from 'solution'\")",
        tests=_NEEDLES + "f(%(needle)s)\n",
        passed=0,
    ),
    "an error outside of checks": _tells(_NAMED, tests=_NEEDLES + "f(%(needle)s)\n", passed=0),
    "a value's type": _tells(_VALUE, "which is not plain data"),
    "a message of its own making": _tells(
        """
    import gc, struct
    harness = "agentic_opd.worlds.coding.verifier.harness."
    pipe = sys.modules[harness + "pipe"]
    for fd in range(3, 20):
        try: pipe.send(fd, pipe.encode(("raise", f"E{x}", "ValueError", (), f"it is {x}", x)))
        except BaseException: pass
    return x
""",
        "E[0-9]{12}",
    ),
    "the name of what a program raises": Attack(
        "x = int(input())\nif x > 1: raise type('E' + str(x), (ValueError,), {})()\nprint(x)",
        report="E[0-9]{12}",
        tests="assert run_program('0') == Printed('0')\nassert run_program('1') == Printed('1')\n"
        "assert run_program('%(needle)s') == Printed('2')\n",
        total=3,
    ),
    "an exception's name in one process": _tells_inside(_NAMED),
    "an exception's other parts in one process": _tells_inside(_ODD),
    "an assertion's words in one process": _tells_inside(_ASSERTS),
    "a value's type in one process": _tells_inside(_VALUE, "got <"),
    "the tests' source as an import's error": Attack(
        _FRAMES, 0, "SystemExit: .*[0-9]{12}", tests=_IN_PROCESS, total=4, in_process=True
    ),
}
