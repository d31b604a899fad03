"""What loading a tokenizer can raise, as an error that says what to do."""

from collections.abc import Generator
from contextlib import contextmanager

from agentic_opd.errors import ConfigError


@contextmanager
def explained_tokenizer_errors(name: str) -> Generator[None]:
    """Turn what loading the tokenizer `name` can raise into a ConfigError that says what to do."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the tokenizer {name!r} can't be loaded ({type(error).__name__}: {error}). Set "
            "env.tokenizer_name to the policy's model, as a hub name or a folder."
        ) from error
