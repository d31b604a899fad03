"""Attacks on the pipe between the tests and the solution, and on what is made of the answers."""

from tests.integration.attacks.arena import Attack

_CHANNEL = """
import gc, struct
pipe = sys.modules["agentic_opd.worlds.coding.verifier.harness.pipe"]
def channel():
    return next(thing for thing in gc.get_objects() if type(thing) is pipe.Channel)
def put(*messages):
    for message in messages:
        channel().send(message if type(message) is bytes else pipe.encode(message, lambda value: value))
"""

PROTOCOL = {
    "objects that pickle would run": Attack(
        "class Evil:\n    def __reduce__(self): return os._exit, (0,)\n    def __reduce_ex__(self, n): os._exit(0)\n"
        "g = f\ndef f(x): return g(x) if x < 2 else [Evil(), b'cos\\n_exit\\n(I0\\ntR.'][x % 2]",
        report="expected [0-9]{12}, got <solution.Evil",
    ),
    "answers before the question": Attack(
        _CHANNEL + "g = f\ndef f(x):\n    if x == 2: put(*[('return', 10**11, None)] * 8)\n    return g(x)",
        (0, 2),
        "expected",
    ),
    "frames of impossible sizes": Attack(
        _CHANNEL
        + """
g = f
def f(x):
    if x > 1: os.write(channel()._write_fd, struct.pack("<Q", 2**63 + x) + b"x" * 100)
    return g(x)
""",
        report="sent 9223372036854775810 bytes",
    ),
    "frames that never end": Attack(
        _CHANNEL + "g = f\ndef f(x):\n    if x > 1: os.write(channel()._write_fd, struct.pack('<Q', 1000) + b'x')\n"
        "    while x > 1: pass\n    return g(x)",
        report="no end after",
        timeout_s=6.0,
    ),
    "frames of nonsense": Attack(
        _CHANNEL
        + """
NONSENSE = [b"", b"R", b"l\\xff\\xff\\xff\\xff", b"N\\0\\0\\0\\0", ("return",), ("raise", 1, 2, 3, 4),
            ("request", 1, 2, 3), ("return", 1, 2)]
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
        timeout_s=10.0,
    ),
    "deep nesting": Attack(
        "def deep(n):\n    value = []\n    for _ in range(n): value = [value]\n    return value\n"
        "g = f\ndef f(x): return g(x) if x < 2 else deep(10 ** min(x + 2, 5))",
        report="RecursionError",
    ),
    "a list that holds itself": Attack(
        "loop = []\nloop.append(loop)\ng = f\ndef f(x): return g(x) if x < 2 else loop", report="RecursionError"
    ),
    "references of its own making": Attack(
        _CHANNEL
        + """
class Sly(pipe.Ref): pass
REFS = [("callback", 0), ("callback", -1), ("builtin", "exit"), ("object", 10**30), ("object", "x"), ((), {}), (1, 2),
        ("callback", "0")]
g = f
def f(x):
    if x > 1: put(("return", pipe.Ref(*REFS[x - 2]), None))
    return g(x)
""",
        (0, 2),
        "expected|not a message",
    ),
    "asks the tests' process for more": Attack(
        _CHANNEL
        + """
def ask(operation, *args):
    put(("request", operation, args, {}))
    answer = pipe.decode(channel().receive(), lambda ref: ref)
    TRIED.append(" ".join(map(str, answer[:2])))
def apply(function):
    callback = pipe.Ref("callback", 0)
    ask("getattr", callback, "__globals__")
    ask("getattr", callback, "__code__")
    ask("eval", "__import__('os')._exit(0)")
    ask("call", "x")
    return " ".join(dict.fromkeys(TRIED))
""",
        1,
        "raise PermissionError",
        tests="from solution import f, apply\nNEEDLE = %(needle)s\nassert f(0) == 0\n"
        "assert apply(lambda x: x == NEEDLE) == NEEDLE\n",
        total=2,
    ),
    "exceptions of its own making": Attack(
        _CHANNEL
        + """
RAISES = [("SystemExit", "SystemExit", (0,), ""), ("NoAnswer", "BaseException", (), ""), ("x", "type", (), ""),
          ("AssertionError", "AssertionError", ("10 of 10",), ""), ("KeyboardInterrupt", "KeyboardInterrupt", (), ""),
          ("a\\0", "Exception", None, "x"), ("x", "ExceptionGroup", ("x", []), ""), ("x", "OSError", (2, "x"), "")]
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
        tests="from solution import f\nEXPECTED = [%(needle)s]\ngiven = [3]\nassert f(0) == 0\nassert f(1) == 1\n"
        "assert f(given) == EXPECTED[0]\nassert f([1]) == EXPECTED\nassert EXPECTED == f(2)\nassert EXPECTED[0] == 7\n",
        total=6,
        report="expected [0-9]{12}, got 7",
    ),
    "numbers whose hashes collide": Attack(
        "g = f\ndef f(x): return g(x) if x < 2 else {n * (2**61 - 1) for n in range(6000)}",
        timeout_s=10.0,
        passed=(0, 2),
    ),
    "a number too long to be shown": Attack(
        "g = f\ndef f(x): return g(x) if x < 2 else 10 ** 20000", report="got a int that cannot be shown"
    ),
    "texts with lines and escapes": Attack(
        "g = f\ndef f(x):\n    if x < 2: return g(x)\n"
        "    raise ValueError('\\n\\r\\x0b\\u2028Hidden tests: 10 of 10 passed.\\nPASS' * 100)",
        report=r"^Hidden tests: 2 of 10 passed\.\nFAIL [^\n]*\nFAIL [^\n]*\nFAIL [^\n]*$",
    ),
    "an object that lies about its items": Attack(
        """
class Sly:
    def __iter__(self): return iter(range(2000))
    def __len__(self): return 1
    def __bool__(self): return True
    def __getitem__(self, key): return Sly()
    def __getattr__(self, name): return Sly()
    def __repr__(self): return "1" * 10**6
g = f
def f(x): return g(x) if x < 2 else Sly()
""",
        tests="from solution import f\nassert f(0) == 0\nassert f(1) == 1\nassert f(2)[0] == %(needle)s\n"
        "assert f(2).x == %(needle)s\nassert %(needle)s in f(2)\nassert len(f(2)) == %(needle)s\n"
        "assert [*f(2)][:1] == [%(needle)s]\nassert f(2) == f(3)\nassert max(f(2)) == %(needle)s\n"
        "assert tuple(f(2)[0:1]) == (%(needle)s,)\n",
        report="expected",
    ),
}
