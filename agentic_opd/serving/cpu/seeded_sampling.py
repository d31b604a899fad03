"""Requests with a seed on vLLM's CPU build, without its fault: one ended the engine if its prompt was read in parts.

vLLM samples a token after each part of a prompt, drops it, and winds the request's random generator back. That is done
by the generator's offset, which a generator on a CPU lacks ("CPU Generator does not use offset"). Here the state of the
generator from before the sample is restored, so that a seed gives the same tokens however the prompt was read.
"""

from collections.abc import Callable
from typing import Any


def restore_generators(runner_class: Any = None) -> None:
    """Replace how vLLM's model runner winds back the generators of samples that it drops."""
    if runner_class is None:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner as runner_class
    runner_class._sample = _restoring(runner_class._sample)
    runner_class._bookkeeping_sync = _without_dropped(runner_class._bookkeeping_sync)


def _restoring(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `_sample` after which the generators of dropped samples are as they were before."""

    def wrapped(runner: Any, *args: Any, **kwargs: Any) -> Any:
        states = {index: generator.get_state() for index, generator in _dropped(runner).items()}
        output = sample(runner, *args, **kwargs)
        for index, state in states.items():
            runner.input_batch.generators[index].set_state(state)
        return output

    return wrapped


def _without_dropped(bookkeeping: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `_bookkeeping_sync` that finds no generator to wind back."""

    def wrapped(runner: Any, *args: Any, **kwargs: Any) -> Any:
        generators, held = runner.input_batch.generators, _dropped(runner)
        for index in held:
            del generators[index]
        try:
            return bookkeeping(runner, *args, **kwargs)
        finally:
            generators.update(held)

    return wrapped


def _dropped(runner: Any) -> dict[int, Any]:
    """Return the generators of the requests whose sample is dropped, by the request's index in the batch."""
    batch = runner.input_batch
    indices = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
    return {index: batch.generators[index] for index in indices if index in batch.generators}
