"""Pack the programs that run in the verifying sandbox: the modules of harness/, and pytest, which it may lack."""

import binascii
import io
import marshal
from functools import cache
from importlib import resources
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, find_spec
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from agentic_opd.core.errors import SandboxError

SOLUTION_FILE = "solution.py"
_SOLUTION_SIDE = ("pipe", "solution_side")
_TESTS_SIDE = ("grading", "pipe", "clock", "programs", "counter", "test_side", "test_cases", "runner")

_PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
_OF_PYGMENTS = {"__init__", "_mapping", "python", "diff", "default"}  # What pytest needs of its lexers and styles.
_UNCHECKED = b"\1\0\0\0" + bytes(8)  # Flags and hash of code that is used without checking its source (PEP 552).

# Starting without `site`, which runs every .pth file, saves at least 40 ms. The packages stay importable.
_PATHS = """
import os, sys
version = "python%d.%d" % sys.version_info[:2]
for path in (f"{sys.prefix}/lib/{version}/site-packages", "/usr/lib/python3/dist-packages"):
    if os.path.isdir(path):
        sys.path.append(path)
"""
# Compiling the sources takes 13 ms of processor time, more than all other work before the first check.
_BOOT = """
import binascii, marshal, _frozen_importlib_external
is_alike = _frozen_importlib_external.MAGIC_NUMBER == {magic!r}
for name, source, compiled in {modules!r}:
    sys.modules[name] = module = type(sys)(name)
    code = marshal.loads(binascii.a2b_base64(compiled)) if is_alike else compile(source, name, "exec")
    exec(code, module.__dict__)
module.main()
"""
RUN_PROGRAM = (
    _PATHS
    + f"""
import builtins
builtins.exit = builtins.quit = sys.exit
sys.path.insert(0, os.getcwd())
sys.argv = ["{SOLUTION_FILE}"]
del os, sys, builtins, version, path
with open("{SOLUTION_FILE}", "rb") as file:
    file = compile(file.read(), "{SOLUTION_FILE}", "exec")
exec(file)
"""
)


@cache
def packed_side(*, of_tests: bool) -> str:
    """Return the program of the tests' process, or of the solution's: one source text that contains its modules.

    It also contains them as compiled code, for a Python of the same version in the sandbox.
    """
    brought = list[tuple[str, str, str]]()
    for name in _TESTS_SIDE if of_tests else _SOLUTION_SIDE:
        package = f"agentic_opd.worlds.coding{'' if name == 'grading' else '.verifier.harness'}"
        source = (resources.files(package) / f"{name}.py").read_text(encoding="utf-8")
        code = marshal.dumps(compile(source, f"{package}.{name}", "exec", dont_inherit=True))
        brought.append((f"{package}.{name}", source, binascii.b2a_base64(code, newline=False).decode()))
    return _PATHS + _BOOT.format(modules=brought, magic=MAGIC_NUMBER)


@cache
def tests_program() -> bytes:
    """Return `packed_side` of the tests as one line, the first of the input of the tests' process."""
    return f"exec({packed_side(of_tests=True)!r})\n".encode()


@cache
def packed_pytest() -> bytes:
    """Return a zip file of the modules, compiled, and as source for other versions of Python.

    Raises:
        SandboxError: pytest or one of its dependencies is not installed here.
    """
    packed = io.BytesIO()
    with ZipFile(packed, "w", ZIP_DEFLATED) as archive:
        for package in _PACKAGES:
            spec = find_spec(package)
            if spec is None or spec.origin is None:
                raise SandboxError(f"the hidden tests need pytest, and there is no {package} here: pip install pytest")
            file, is_package = Path(spec.origin), bool(spec.submodule_search_locations)
            for path in sorted(file.parent.rglob("*.py")) if is_package else [file]:
                if path.parent.name in ("lexers", "styles") and path.stem not in _OF_PYGMENTS:
                    continue
                name = str(path.relative_to(file.parents[is_package]))
                archive.write(path, name)
                code = SourceFileLoader(path.stem, str(path)).get_code(path.stem)
                archive.writestr(f"{name}c", MAGIC_NUMBER + _UNCHECKED + marshal.dumps(code))
    return packed.getvalue()
