"""What the routes need of the running server, and the checks of ids against its model."""

import asyncio
import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import Request
from vllm import envs
from vllm.engine.protocol import EngineClient

WEIGHTS_ROOT_VARIABLE = "AGENTIC_OPD_WEIGHTS_ROOT"
"""Names the directory that checkpoints may be loaded from; unset, none may."""


class RefusedError(Exception):
    """The request is refused (4xx): `field` names what is wrong with it, `message` says how.

    It is not of the package's error tree, because this side runs without the rest of the package.
    """

    def __init__(self, field: str | None, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.message, self.status = field, message, status


@dataclass(slots=True)
class PluginState:
    """The server's engine and settings, at `app.state.agentic_opd`."""

    engine: EngineClient
    model: str
    """The name that clients call the model by."""
    api_keys: tuple[str, ...] = ()
    weights_root: Path | None = None
    loaded_path: str = ""
    """Where the weights in use come from."""
    reload_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def of_server(cls, engine: EngineClient, args: Namespace) -> "PluginState":
        """Take the settings from where vLLM takes them: its arguments first, then the environment."""
        root = os.environ.get(WEIGHTS_ROOT_VARIABLE)
        return cls(
            engine=engine,
            model=args.served_model_name[0] if args.served_model_name else args.model,
            api_keys=tuple(key for key in (args.api_key or [envs.VLLM_API_KEY]) if key),
            weights_root=Path(root).resolve() if root else None,
            loaded_path=engine.model_config.model,
        )

    @property
    def max_model_len(self) -> int:
        """Tokens a sequence may hold, the one that the engine samples included."""
        return self.engine.model_config.max_model_len

    @property
    def vocab_size(self) -> int:
        """Tokens of the model's vocabulary."""
        return self.engine.model_config.get_vocab_size()

    @property
    def max_logprobs(self) -> int:
        """Logprobs a request may ask for at each position."""
        most = self.engine.model_config.max_logprobs
        return self.vocab_size if most == -1 else most

    def check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        """Refuse ids that the model does not have, and sequences that leave no room for one more token.

        Raises:
            RefusedError: naming the id, or both lengths.
        """
        if len(token_ids) >= self.max_model_len:
            raise RefusedError(
                name, f"{len(token_ids)} tokens are too many: at most {self.max_model_len - 1} fit max_model_len"
            )
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            index = next(i for i, token in enumerate(token_ids) if not 0 <= token < self.vocab_size)
            raise RefusedError(
                f"{name}[{index}]", f"token id {token_ids[index]} is not in the vocabulary of {self.vocab_size}"
            )


def state_of(request: Request) -> PluginState:
    """The state that the plugin put on the app at start-up."""
    return request.app.state.agentic_opd
