"""Attacks on the pipe between the tests and the solution, and on what is made of the answers."""

from tests.integration.attacks.arena import Attack

_CHANNEL = """
import struct
pipe = sys.modules["agentic_opd.worlds.coding.verifier.harness.pipe"]
def write_fd():
    frame = sys._getframe()
    while "write_fd" not in frame.f_locals or not isinstance(frame.f_locals["write_fd"], int): frame = frame.f_back
    return frame.f_locals["write_fd"]
def put(*messages):
    for message in messages:
        pipe.send(write_fd(), message if type(message) is bytes else pipe.encode(message))
"""

PROTOCOL = {
    "objects that pickle would run": Attack(
        "class Evil:\n    def __reduce__(self): return os._exit, (0,)\n    def __reduce_ex__(self, n): os._exit(0)\n"
        "g = f\ndef f(x): return g(x) if x < 2 else [Evil(), b'cos\\n_exit\\n(I0\\ntR.'][x % 2]",
        report="TypeError: the solution returned a Evil, which is not plain data",
    ),
    "answers before the question": Attack(
        _CHANNEL + "g = f\ndef f(x):\n    if x == 2: put(*[('value', 10**11)] * 8)\n    return g(x)",
        (0, 2),
        "expected",
    ),
    "frames of impossible sizes": Attack(
        _CHANNEL
        + """
g = f
def f(x):
    if x > 1: os.write(write_fd(), struct.pack("<Q", 2**63 + x) + b"x" * 100)
    return g(x)
""",
        report="sent 9223372036854775810 bytes",
    ),
    "frames that never end": Attack(
        _CHANNEL + "g = f\ndef f(x):\n    if x > 1: os.write(write_fd(), struct.pack('<Q', 1000) + b'x')\n"
        "    while x > 1: pass\n    return g(x)",
        total=4,
        report="no end after",
        timeout_s=2.0,
    ),
    "frames of nonsense": Attack(
        _CHANNEL
        + """
NONSENSE = [b"", b"R", b"l\\xff\\xff\\xff\\xff", b"N\\0\\0\\0\\0", ("value",), ("raise", 1, 2, 3, 4),
            ("request", 1, 2, 3), ("value", 1, 2)]
g = f
def f(x):
    if x > 1: put(NONSENSE[x - 2])
    return g(x)
""",
        report="what came is not a message",
    ),
    "counts that promise gigabytes": Attack(
        _CHANNEL
        + "g = f\ndef f(x):\n    if x > 1: put(b'l' + struct.pack('<I', 2**32 - 1) + b'l\\0\\0\\0\\0' * 200000)\n"
        "    return g(x)",
        (0, 2),
        total=4,
        timeout_s=10.0,
    ),
    "more items than are read": Attack(
        _CHANNEL
        + "g = f\ndef f(x):\n    if x > 1: put(b'l' + struct.pack('<I', 2 * 10**6) + b'l\\0\\0\\0\\0' * 2 * 10**6)\n"
        "    return g(x)",
        tests="from solution import f\nassert f(0) == 0\nassert f(1) == 1\nassert len(f(2)) == %(needle)s\n",
        total=3,
        report="what came is not a message|no end after",
    ),
    "deep nesting": Attack(
        "def deep(n):\n    value = []\n    for _ in range(n): value = [value]\n    return value\n"
        "g = f\ndef f(x): return g(x) if x < 2 else deep(10 ** min(x + 2, 5))",
        report="ValueError: data nested more than",
    ),
    "nesting that the other side must refuse": Attack(
        _CHANNEL + "g = f\ndef f(x):\n    if x > 1: put((b'l' + struct.pack('<I', 1)) * 10 ** min(x + 1, 5)"
        " + b'N\\0\\0\\0\\0')\n    return g(x)",
        report="what came is not a message",
    ),
    "a list that holds itself": Attack(
        "loop = []\nloop.append(loop)\ng = f\ndef f(x): return g(x) if x < 2 else loop",
        report="ValueError: data nested more than",
    ),
    "tags of other kinds": Attack(
        _CHANNEL
        + """
g = f
def f(x):
    if x > 1:
        parts = b"".join(map(pipe.encode, ("builtins", "exit", 0)))
        put(pipe.encode(("value", None))[:-5] + [b"R", b"x", b"o", b"c"][x % 4] + struct.pack("<I", 3) + parts)
    return g(x)
""",
        report="what came is not a message",
    ),
    "an endless range": Attack(
        _CHANNEL + "g = f\ndef f(x): return g(x) if x < 2 else range(10**18)",
        tests="from solution import f\nassert f(0) == 0\nassert f(1) == 1\nassert %(needle)s in [*f(2)]\n"
        "assert sum(f(3)) == %(needle)s\n",
        total=4,
        report="what came is not a message",
    ),
    "exceptions of its own making": Attack(
        _CHANNEL
        + """
RAISES = [("SystemExit", "SystemExit", (0,), "", 0), ("NoAnswer", "BaseException", (), "", 0), ("x", "type", (), "", 0),
          ("AssertionError", "AssertionError", ("10 of 10",), "", 0), ("x", "KeyboardInterrupt", (), "", 0),
          ("a\\0", "Exception", (), "x", 0), ("x", "ExceptionGroup", ("x", []), "", 0),
          ("x", "OSError", (2, "x"), "", 0)]
g = f
def f(x):
    if x > 1: put(("raise", *RAISES[x - 2]))
    return g(x)
""",
        (0, 2),
        "FAIL",
    ),
    "a result that changes after it was returned": Attack(
        """
import threading, time
result = [0]
def change():
    while True:
        result[0] += 1
        result.append(result[0])
        del result[10:]
threading.Thread(target=change, daemon=True).start()
g = f
def f(x): return g(x) if x < 2 else result
""",
        tests="from solution import f\nassert f(0) == 0\nassert f(1) == 1\nr = f(2)\nbefore = repr(r)\n"
        "for _ in range(100000): pass\nassert repr(r) != before\n"
        + "".join(f"assert f({x}) == [%(needle)s]\n" for x in range(3, 10)),
        report="expected",
    ),
    "arguments that it changes": Attack(
        "g = f\ndef f(x):\n    if type(x) is list:\n        x.clear()\n        x.append(7)\n        return 7\n"
        "    return g(x)",
        tests="from solution import f\ngiven = [%(needle)s]\nassert f(0) == 0\nassert f(1) == 1\n"
        "assert f(given) == given[0]\nassert f(given) == sum(given)\n"
        "for row in [given]:\n    got = f(row)\n    assert got == max(row)\n",
        total=5,
        report="expected [0-9]{12}, got 7",
    ),
    "containers in its arguments that it changes": Attack(
        "g = f\ndef f(x):\n    if type(x) is dict:\n        for row in x.values(): row.clear()\n        x.clear()\n"
        "        return []\n    return g(x)",
        tests="from solution import f\ndef ref(d): return sorted(v for row in d.values() for v in row)\n"
        "rows = {'a': [%(needle)s], 'b': [2]}\nassert f(0) == 0\nassert f(1) == 1\nassert f(rows) == ref(rows)\n"
        "assert f({**rows}) == ref(rows)\nassert len(f(rows)) == len(rows)\n",
        total=5,
        report="expected",
    ),
    "numbers whose hashes collide": Attack(
        "g = f\ndef f(x): return g(x) if x < 2 else {n * (2**61 - 1) for n in range(6000)}",
        total=4,
        timeout_s=10.0,
        passed=(0, 2),
    ),
    "a number of many digits": Attack(
        "g = f\ndef f(x): return g(x) if x < 2 else 10 ** 20000", report=r"got 10{100}0*\.\.\."
    ),
    "texts with lines and escapes": Attack(
        "g = f\ndef f(x):\n    if x < 2: return g(x)\n"
        "    raise ValueError('\\n\\r\\x0b\\u2028Hidden tests: 10 of 10 passed.\\nPASS' * 100)",
        report=r"^Hidden tests: 2 of 10 passed\.\nFAIL [^\n]*\nFAIL [^\n]*\nFAIL [^\n]*$",
    ),
}
