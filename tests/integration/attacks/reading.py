"""Attacks that look for the expected values: in frames and objects, on disk, in other processes."""

from tests.integration.attacks.arena import Attack

# The needles have twelve digits and stand in the tests' source and constants.
_FIND = """
import glob, re
NEEDLE = re.compile(rb"(?<!\\d)1\\d{11}(?!\\d)")
def found_in(data):
    for hit in NEEDLE.findall(data if type(data) is bytes else repr(data).encode(errors="replace")):
        TRIED.append("found " + hit.decode())
def read(path):
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try: return os.read(fd, 2**20)
    finally: os.close(fd)
"""
_ANSWER = """
def f(x):
    if x < 2: return x
    LOOK()
    hits = [int(one.split()[1]) for one in TRIED if one.startswith("found ")]
    return hits[x % len(hits)] if hits else " ".join(dict.fromkeys(TRIED)) or "nothing"
"""


def _looks(look: str, report: str, **more: object) -> Attack:
    return Attack(_FIND + look + _ANSWER, report=report, **more)  # type: ignore[arg-type]


_MEMORY = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def error(result): return "ok" if result >= 0 else os.strerror(ctypes.get_errno())
"""

READING = {
    "frames": _looks(
        """
def LOOK():
    for frame in [sys._getframe(), *sys._current_frames().values()]:
        while frame:
            TRIED.append(frame.f_code.co_name)
            found_in([value for value in frame.f_locals.values() if value is not TRIED])
            found_in([value for value in frame.f_globals.values() if value is not TRIED])
            frame = frame.f_back
""",
        "got 'LOOK f _perform",
    ),
    "frames of a traceback": _looks(
        """
import traceback
def LOOK():
    try: raise ValueError
    except ValueError: found_in("".join(traceback.format_stack()))
    TRIED.append("looked")
""",
        "got 'looked'",
    ),
    "linecache and inspect": _looks(
        """
import inspect, linecache
def LOOK():
    for name in ("hidden_tests.py", "<string>", "solution.py", "-c", "<stdin>"):
        found_in("".join(linecache.getlines(name)))
    for record in inspect.stack(context=50): found_in(record.code_context or [])
    for module in list(sys.modules.values()):
        try: found_in(inspect.getsource(module)) if "opd" in module.__name__ else None
        except (OSError, TypeError): TRIED.append("no-source")
""",
        "got 'no-source'",
    ),
    "co_consts": _looks(
        """
import gc, types
def LOOK():
    codes = [thing.__code__ for thing in gc.get_objects() if isinstance(thing, types.FunctionType)]
    for frame in sys._current_frames().values():
        while frame: codes.append(frame.f_code); frame = frame.f_back
    for code in codes: found_in([const for const in code.co_consts if isinstance(const, (int, tuple, str))])
    TRIED.append(f"codes:{len(codes) > 100}")
""",
        "got 'codes:True'",
    ),
    "gc": _looks(
        """
import gc
def LOOK():
    for thing in gc.get_objects():
        if type(thing) in (list, tuple, dict, set) and thing is not TRIED: found_in(thing)
        for inner in gc.get_referents(thing):
            if type(inner) is int: found_in(inner)
    TRIED.append("looked")
""",
        "got 'looked'",
        timeout_s=60.0,
    ),
    "files": _looks(
        """
def LOOK():
    if TRIED: return
    for root in ("/workspace", "/tmp", "/home", "/dev/shm", "/run", "/etc", "/var", "/mnt", "/work",
                 "%(outside)s"):
        for folder, _, names in os.walk(root):
            for name in names:
                try: found_in(read(os.path.join(folder, name)))
                except OSError as error: TRIED.append(type(error).__name__)
    TRIED.append("seen:" + str(os.path.exists("%(outside)s/secret.txt")))
""",
        "seen:False",
        timeout_s=60.0,
    ),
    "/proc of every process": _looks(
        """
def LOOK():
    if TRIED: return
    for path in glob.glob("/proc/[0-9]*/*") + glob.glob("/proc/[0-9]*/fd/*") + glob.glob("/proc/[0-9]*/task/*/*"):
        if path.startswith(f"/proc/{os.getpid()}/"): continue
        try: found_in(read(path))
        except OSError as error: TRIED.append(type(error).__name__)
    for name in ("environ", "mem", "fd", "maps", "cwd", "root", "exe", "syscall", "stack", "auxv"):
        try: os.listdir(f"/proc/{parent()}/{name}") if name == "fd" else read(f"/proc/{parent()}/{name}")
        except OSError as error: TRIED.append(type(error).__name__ + ":" + name)
        else: TRIED.append("OPEN:" + name)
""",
        r"PermissionError:environ PermissionError:mem PermissionError:fd PermissionError:maps(?!.*OPEN)",
    ),
    "the environment of the host": _looks(
        """
def LOOK():
    text = repr(os.environ)
    for path in glob.glob("/proc/*/environ"):
        try: text += repr(read(path))
        except OSError: pass
    TRIED.append(f"leak:{'secret-of-the-environment' in text}")
""",
        "got 'leak:False'",
    ),
    "ptrace": _looks(
        _MEMORY + "def LOOK():\n    TRIED.append(error(libc.ptrace(16, parent(), 0, 0)))\n"
        "    TRIED.append(error(libc.ptrace(0x4206, parent(), 0, 0)))\n",
        "got 'Function not implemented'",
    ),
    "process_vm_readv": _looks(
        _MEMORY
        + """
import struct
def LOOK():
    buffer = ctypes.create_string_buffer(4096)
    local, remote = struct.pack("QQ", ctypes.addressof(buffer), 4096), struct.pack("QQ", id(LOOK) & ~4095, 4096)
    TRIED.append(error(libc.process_vm_readv(parent(), local, 1, remote, 1, 0)))
    found_in(buffer.raw)
""",
        "got 'Function not implemented'",
    ),
    "pidfd_getfd": _looks(
        _MEMORY
        + """
def LOOK():
    pidfd = os.pidfd_open(parent())
    for number in range(12):
        fd = libc.syscall(438, pidfd, number, 0)
        TRIED.append(error(fd))
        if fd >= 0: found_in(os.pread(fd, 4096, 0))
""",
        "got 'Function not implemented'",
    ),
    "capabilities of a user namespace": _looks(
        _MEMORY
        + """
target = parent()
def LOOK():
    pid = os.fork()
    if pid == 0:
        libc.unshare(0x10000000)
        os._exit(1 if libc.ptrace(16, target, 0, 0) < 0 else 0)
    TRIED.append(f"attached:{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0}")
""",
        "got 'attached:False'",
    ),
    "reports from the pipe": Attack(
        """
import glob, threading
lines = []
def drain():
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            if not os.readlink(path).startswith("pipe:"): continue
            if path.startswith(f"/proc/{os.getpid()}/"): continue
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            for _ in range(100): lines.append(os.read(fd, 65536))
        except OSError as error: TRIED.append(type(error).__name__)
def replay():
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        if path.startswith(f"/proc/{os.getpid()}/"): continue
        try: os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), b"".join(lines) + b"\\n")
        except OSError: pass
TRIED.append("looked")
threading.Thread(target=lambda: [drain() for _ in range(20)], daemon=True).start()
g = f
def f(x):
    drain()
    replay()
    return g(x)
""",
        (0, 2),
    ),
    "programs look for the expected output": Attack(
        _FIND
        + """
for path in glob.glob("/proc/[0-9]*/*") + glob.glob("/proc/[0-9]*/fd/*") + glob.glob("/tmp/*") + glob.glob("*"):
    if path.startswith(f"/proc/{os.getpid()}/"): continue
    try: found_in(read(path))
    except OSError as error: TRIED.append(type(error).__name__)
x = int(input())
hits = [one.split()[1] for one in TRIED if one.startswith("found ")]
print(x if x < 2 else hits[0] if hits else " ".join(dict.fromkeys(TRIED)))
""",
        tests="assert run_program('0') == Printed('0')\nassert run_program('1') == Printed('1')\n"
        "assert run_program('2') == Printed('%(needle)s')",
        total=3,
        report="got '[^']*PermissionError",
    ),
}
