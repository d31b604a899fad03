"""Routes that receive whole weights from a trainer's memory, by vLLM's weight transfer.

`POST /v1/opd/join_transfer` joins the trainer's process group. `POST /v1/opd/receive_weights` receives one push.
"""

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Annotated, Any, cast

from msgspec import Meta
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.logger import init_logger
from vllm.v1.engine.async_llm import AsyncLLM

from agentic_opd.serving.engine import PluginState
from agentic_opd.serving.errors import RouteError
from agentic_opd.serving.process_group import is_stuck
from agentic_opd.serving.reload import Version, check_shapes, restore, swapped_weights
from agentic_opd.serving.web import Body, read_body

logger = init_logger("vllm.agentic_opd.transfer")


_LIMIT_S = 570.0
"""Time limit of joining a group and of one push; the trainer's requests have 600 s."""


class JoinBody(Body, frozen=True):
    """The body of `POST /v1/opd/join_transfer`."""

    address: Annotated[str, Meta(min_length=1)]
    """Address at which rank 0, the trainer, listens."""
    port: Annotated[int, Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    """Rank of this server's first worker."""
    world_size: Annotated[int, Meta(ge=2, le=2**31 - 1)]


class ReceiveBody(Body, frozen=True):
    """The body of `POST /v1/opd/receive_weights`: the weights that rank 0 sends, in order of sending."""

    names: list[str]
    dtypes: list[str]
    """torch's names of the dtypes: `bfloat16`."""
    shapes: list[list[int]]
    version: Version


def transfer_of(state: PluginState) -> WeightTransferConfig | None:
    """Return vLLM's weight-transfer configuration; None if the server was started without one."""
    return state.engine.vllm_config.weight_transfer_config


def workers_of(state: PluginState) -> int:
    """Return the number of this server's workers, each of which has a rank in the trainer's group."""
    parallel = state.engine.vllm_config.parallel_config
    return parallel.world_size * parallel.data_parallel_size


async def join_transfer(state: PluginState, raw: bytes) -> dict[str, int]:
    """Join a trainer's process group, after leaving any earlier one.

    Raises:
        RouteError: the body is malformed, or the server was started without a weight transfer.
    """
    body, engine = await read_body(state, raw, JoinBody), _engine(state)
    init = {"master_address": body.address, "master_port": body.port}
    async with state.reload_lock:
        await engine.shutdown_weight_transfer_engine()
        request = WeightTransferInitRequest({**init, "rank_offset": body.rank_offset, "world_size": body.world_size})
        await _within_limit(engine.init_weight_transfer_engine(request), "joining the trainer's group")
    return {"workers": workers_of(state)}


async def receive_weights(state: PluginState, raw: bytes) -> dict[str, int]:
    """Wait for running requests, receive the weights from rank 0, reset the prefix cache, and resume.

    If the trainer or another server fails during the transfer, a server on CPUs continues with the previous weights. A
    server on GPUs replaces each layer when it has arrived; its waits in NCCL have the same limit as gloo's, after which
    it ends, because a GPU can't leave such a wait. So does any server whose workers do not return within `_LIMIT_S`.

    Raises:
        RouteError: the weights do not match the model, or the server was started without a weight transfer; or as
            `reload.restore`.
    """
    body, engine = await read_body(state, raw, ReceiveBody), _engine(state)
    if not len(body.names) == len(body.dtypes) == len(body.shapes):
        raise RouteError("names", "names, dtypes and shapes must have one entry for each of the weights")
    await asyncio.to_thread(check_shapes, dict(zip(body.names, body.shapes, strict=True)), state, "shapes")
    receiving = asyncio.create_task(_receive(state, engine, body))
    return {"weight_version": await asyncio.shield(receiving)}


async def _receive(state: PluginState, engine: AsyncLLM, body: ReceiveBody) -> int:
    sent = {"names": body.names, "dtype_names": body.dtypes, "shapes": body.shapes}
    async with swapped_weights(state, body.version):
        try:
            await _within_limit(engine.start_weight_update(), "preparing to receive weights")
            await _within_limit(engine.update_weights(WeightTransferUpdateRequest(sent)), "receiving weights")
            await _within_limit(engine.finish_weight_update(), "loading received weights")
        except Exception as error:
            if is_stuck(error) and _is_nccl(state):
                _end_server("receiving weights", str(error))
                raise
            await _within_limit(restore(state, error), "loading the previous weights")
            raise
    logger.info("Received %d weights as weight version %d", len(body.names), body.version)
    return body.version


async def _within_limit(work: Coroutine[Any, Any, None], action: str) -> None:
    """Await the workers, or end this server: workers that hang in a transfer neither answer nor can be interrupted."""
    try:
        await asyncio.wait_for(work, _LIMIT_S)
    except TimeoutError:
        _end_server(action, f"it did not end within {_LIMIT_S:g} s")
        raise


def _end_server(action: str, problem: str) -> None:
    logger.critical(
        "%s failed: %s. The trainer or another server hangs or was stopped. This server ends, because its workers "
        "can't be interrupted; start it again, then the trainer with resume",
        *(action, problem),
    )
    os.kill(os.getpid(), signal.SIGTERM)


def _is_nccl(state: PluginState) -> bool:
    """Return whether the weights arrive by NCCL, whose kernels block a GPU's stream until all members take part."""
    transfer = transfer_of(state)
    return transfer is not None and transfer.backend == "nccl"


def _engine(state: PluginState) -> AsyncLLM:
    if transfer_of(state) is None:
        message = "this server takes weights from files alone: restart it with scripts/serve_vllm --weight-transfer"
        raise RouteError(None, message, 409)
    return cast(AsyncLLM, state.engine)  # `EngineClient` lacks `start_weight_update`.
