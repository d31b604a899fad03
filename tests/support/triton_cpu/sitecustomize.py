"""On PYTHONPATH of a CPU vLLM, gives Triton a backend `cpu`, which vLLM asks for; TRITON_INTERPRET=1 computes.

Python imports this module at its start.
"""

from types import SimpleNamespace
from typing import Any

import triton.backends


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> None:
        return None


_backends: Any = triton.backends.backends
_backends["cpu"] = SimpleNamespace(driver=_Driver, compiler=None)
