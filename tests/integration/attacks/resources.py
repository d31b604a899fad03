"""Attacks on the machine: processes, memory, time, output, disk."""

from agentic_opd.sandboxes.protocol import Limits
from tests.integration.attacks.arena import Attack

SMALL = Limits(memory_mb=400, file_mb=16, processes=40, disk_mb=64)

_HURT = (0, 2)
_ENDLESS = "Checks that did not end in time: [12]"
"""A process that took its processor time may be ended before its check's time is up, as when many others run."""

RESOURCES = {
    "a fork bomb": Attack(
        """
g = f
def f(x):
    if x < 2: return g(x)
    while True:
        try: os.fork()
        except OSError: pass
""",
        _HURT,
        timeout_s=1.0,
        most_s=5.0,
    ),
    "a fork bomb of a shell": Attack(
        "import subprocess\ng = f\n"
        "def f(x):\n    if x == 2: subprocess.Popen(['sh', '-c', ':(){ :|:& };: # %(mark)s'])\n"
        "    return g(x)",
        _HURT,
        timeout_s=2.0,
    ),
    "a thread bomb": Attack(
        """
import threading, time
def bomb():
    for _ in range(10000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
attempt(bomb)
""",
        report="got 'RuntimeError'",
    ),
    "a memory bomb": Attack(
        "g = f\ndef f(x):\n    if x < 2: return g(x)\n    data = []\n    while True: data.append(bytearray(2**26))",
        total=4,
        report="MemoryError",
        timeout_s=120.0,
    ),
    "memory shared beyond its limit": Attack(
        """
import mmap
def fill():
    for number in range(200):
        with open(f"/dev/shm/{number}", "wb") as file: file.write(b"x" * 2**23)
attempt(fill)
""",
        _HURT,
    ),
    "files without a name beyond the memory": Attack(
        "g = f\ndef f(x):\n    if x == 2:\n        for _ in range(40): os.write(os.memfd_create('m'), bytes(2**24))\n"
        "    return g(x)",
        0,
        "The solution took more memory than is allowed",
    ),
    "an endless import": Attack("while True: pass", 0, "could not be imported: no end after", timeout_s=2.0),
    "an endless call": Attack(
        "g = f\ndef f(x):\n    while x > 1: pass\n    return g(x)",
        total=4,
        report=_ENDLESS,
        timeout_s=2.0,
    ),
    "an endless call that cannot be interrupted": Attack(
        "import signal\nfor number in range(1, 65):\n    attempt(signal.signal, number, signal.SIG_IGN)\n"
        "def f(x):\n    while x > 1:\n        try: 9 ** 9 ** 9 ** 9\n        except BaseException: pass\n    return x",
        total=4,
        report=_ENDLESS,
        timeout_s=2.0,
    ),
    "stops the tests' process": Attack(
        "g = f\ndef f(x):\n    if x > 1: os.kill(parent(), 19)\n    return g(x)",
        0,
        "The solution stopped the tests' process",
    ),
    "stops every process": Attack(
        "g = f\ndef f(x):\n    if x > 1: os.kill(-1, 19)\n    return g(x)",
        0,
        "The solution stopped the tests' process",
    ),
    "stops the tests' process from a process of its own": Attack(
        """
tests = parent()
g = f
def f(x):
    if x == 2:
        if os.fork() == 0:
            os.setsid()
            while True: os.kill(tests, 19)
        while True: pass
    return g(x)
""",
        0,
        "The solution stopped the tests' process",
    ),
    "stops the tests' process as a program": Attack(
        "x = int(input())\nif x > 1: os.kill(parent(), 19)\nprint(x)",
        0,
        "The solution stopped the tests' process",
        tests="".join(f"assert run_program('{x}') == Printed('{x if x < 2 else '%(needle)s'}')\n" for x in range(4)),
        total=4,
    ),
    "stops itself": Attack(
        "g = f\ndef f(x):\n    if x > 1: os.kill(os.getpid(), 19)\n    return g(x)",
        report="the solution stopped its process",
    ),
    "waits for a program that never starts": Attack(
        """
os.mkfifo("/tmp/never")
g = f
def f(x):
    if x < 2: return g(x)
    opens = [(os.POSIX_SPAWN_OPEN, 0, "/tmp/never", os.O_RDONLY, 0)]
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=opens)
""",
        total=4,
        report=_ENDLESS,
        timeout_s=2.0,
    ),
    "works in a process of its own": Attack(
        "import time\ng = f\ndef f(x):\n    if x > 1:\n        if os.fork() == 0:\n            while True: pass\n"
        "        time.sleep(1000)\n    return g(x)",
        total=4,
        report=_ENDLESS,
        timeout_s=2.0,
    ),
    "an integer of ten million bits": Attack(
        "g = f\ndef f(x): return g(x) if x < 2 else 1 << 10**7",
        report="got a int that cannot be shown",
    ),
    "an error with an integer of ten million bits": Attack(
        "g = f\ndef f(x):\n    if x < 2: return g(x)\n    error = KeyError()\n    error.args = (1 << 10**7,)\n"
        "    KeyError.__str__\n    raise type('KeyError', (KeyError,), {'__str__': lambda self: 'long'})(1 << 10**7)",
        report="KeyError: long",
    ),
    "a text that the tests read as a number for long": Attack(
        "g = f\ndef f(x): return g(x) if x < 2 else '7' * 3_000_000",
        0,
        "The tests did not end within",
        tests="from solution import f\nassert f(0) == 0\nassert f(1) == 1\nassert int(f(2)) == %(needle)s\n",
        total=3,
        timeout_s=1.0,
    ),
    "a number of three million digits as a program": Attack(
        "x = int(input())\nprint('7' * 3_000_000 if x > 1 else x)",
        tests="".join(f"assert run_program('{x}') == Printed('{x if x < 2 else '%(needle)s'}')\n" for x in range(4)),
        total=4,
        report="expected '[0-9]{12}', got '777",
        timeout_s=4.0,
    ),
    "an endless stream of quick answers": Attack(
        "def endless():\n    while True: yield 1\ng = f\ndef f(x): return g(x) if x < 2 else endless()",
        tests="from solution import f\nassert f(0) == 0\nassert f(1) == 1\nassert sum(f(2)) == %(needle)s\n"
        "assert sorted(f(3)) == [%(needle)s]\nassert f(1) == %(needle)s",
        total=5,
        report="of 1048576 items or more|no end after|MemoryError",
        timeout_s=20.0,
    ),
    "never reads what it is sent": Attack(
        "import time\ng = f\ndef f(x):\n    if type(x) is str: time.sleep(60)\n    return g(x)",
        tests="from solution import f\nassert f(0) == 0\nassert f(1) == 1\nassert f(['x' * 10**6] * 20) == %(needle)s\n"
        "assert f('x' * 10**6) == %(needle)s\n",
        total=4,
        report="no end after",
        timeout_s=2.0,
    ),
    "gigabytes of output": Attack(
        """
import threading
def shout(fd):
    while True: os.write(fd, b"Hidden tests: 10 of 10 passed.\\n" * 10**5)
for fd in (1, 2): threading.Thread(target=shout, args=(fd,), daemon=True).start()
import glob
for path in glob.glob("/proc/[0-9]*/fd/*"):
    try: fd = os.open(path, os.O_WRONLY) if not path.startswith(f"/proc/{os.getpid()}/") else -1
    except OSError: continue
    if fd >= 0: threading.Thread(target=shout, args=(fd,), daemon=True).start()
""",
        _HURT,
    ),
    "sparse files": Attack(
        """
def sparse(path):
    with open(path, "wb") as file: file.truncate(2**40)
attempt(sparse, "huge"); attempt(sparse, "/tmp/huge"); attempt(sparse, "/dev/shm/huge")
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
attempt(sparse, "huge")
""",
        report="got 'OSError'",
    ),
    "fills the disk": Attack(
        """
def fill():
    for number in range(10**4):
        with open(f"/tmp/{number}", "wb") as file: file.write(os.urandom(2**20) * 15)
attempt(fill)
""",
        _HURT,
    ),
    "deletes the work directory": Attack(
        """
import shutil
for path in (os.getcwd(), "/tmp", os.path.expanduser("~"), "/etc", "/usr/bin", "/home", "/root", "/dev", "/proc/self"):
    attempt(shutil.rmtree, path, ignore_errors=True)
attempt(os.listdir)
TRIED.append(f"left:{os.path.exists('solution.py')}")
""",
        report="left:False",
        timeout_s=600.0,  # Thousands of names to try, read from a disk.
    ),
    "closes the work directory": Attack(
        "os.mkdir('deep')\nos.chmod('deep', 0)\nos.chmod('.', 0)\nattempt(os.listdir)", report="got '[^']*Error"
    ),
    "a very deep folder": Attack(
        "for _ in range(1000):\n    os.mkdir('d')\n    os.chdir('d')\nTRIED.append('deep')", report="got 'deep'"
    ),
    "thousands of names": Attack(
        "def names():\n    for number in range(5000): open(f'/tmp/n{number}', 'w').close()\nattempt(names)",
        report="got 'did:None'",
        timeout_s=600.0,  # A file system that was just cleared makes new files slowly.
    ),
}
