# What pyright reads in transformers' place, whose own package makes it read 2,500 modules more than all else does.
from typing import Any

def __getattr__(name: str) -> Any: ...
