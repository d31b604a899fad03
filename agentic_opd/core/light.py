"""Keep torch out of processes that need only tokenizers: the environments and the gateway."""

import logging
import os
import sys
from importlib import import_module


def keep_torch_out() -> None:
    """Import transformers without torch, unless one of them is imported already or USE_TORCH=1 is set."""
    if {"torch", "transformers"} & sys.modules.keys() or os.environ.get("USE_TORCH") == "1":
        return
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # transformers warns that it has no models.
    sys.modules["torch"] = None  # type: ignore[assignment]  # None makes Python refuse the import.
    try:
        import_module("transformers")
    finally:
        del sys.modules["torch"]
        logging.disable(disabled)
