"""Pack pytest and its dependencies for the tests' process, which may lack them (I/O)."""

import io
import marshal
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, find_spec
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from agentic_opd.core.errors import SandboxError

_PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
_PARTS_OF_MANY = {"__init__", "_mapping", "python", "diff", "default"}
"""The modules that pytest needs of the hundreds of languages and styles of pygments."""
_UNCHECKED = b"\1\0\0\0" + bytes(8)
"""Flags and hash of compiled code that is used without checking its source (PEP 552)."""


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
                if path.parent.name in ("lexers", "styles") and path.stem not in _PARTS_OF_MANY:
                    continue
                name = str(path.relative_to(file.parents[is_package]))
                archive.write(path, name)
                code = SourceFileLoader(path.stem, str(path)).get_code(path.stem)
                archive.writestr(f"{name}c", MAGIC_NUMBER + _UNCHECKED + marshal.dumps(code))
    return packed.getvalue()
