"""Routes that load new weights into the running engine.

`POST /v1/opd/reload_weights` loads another checkpoint of the served model. `POST /v1/opd/load_adapter` loads a LoRA
adapter on top of the base weights.
"""

import asyncio
import json
import os
import stat
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, cast

from msgspec import Meta
from prometheus_client import Gauge
from safetensors import SafetensorError, safe_open
from vllm.exceptions import VLLMServerError
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from agentic_opd.serving.adapters import Learner
from agentic_opd.serving.engine import WEIGHTS_ROOT_VARIABLE, LoadedFiles, PluginState, as_version
from agentic_opd.serving.errors import RouteError, is_out_of_memory
from agentic_opd.serving.web import Body, read_body, shortened

logger = init_logger("vllm.agentic_opd.reload")

_MAX_CONFIG_BYTES = 2**20
_VERSION = Gauge(
    "agentic_opd_weight_version", "version of the weights that serve new requests", multiprocess_mode="mostrecent"
)
"""What the plugin adds to vLLM's `/metrics`."""

Version = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class ReloadBody(Body, frozen=True):
    """The body of `POST /v1/opd/reload_weights`."""

    path: Annotated[str, Meta(min_length=1)]
    version: Version | None = None


async def reload_weights(state: PluginState, raw: bytes) -> dict[str, int]:
    """Wait for running requests, swap the weights, reset the prefix cache, and resume; one reload at a time.

    A reload that has begun completes even if the client disconnects. An interrupted one would leave new weights under
    the old version.

    Raises:
        RouteError: the path is not allowed, or the checkpoint does not match the model.
    """
    body = await read_body(state, raw, ReloadBody)
    checkpoint = allowed_checkpoint(body.path, state.weights_root)
    swap = asyncio.create_task(reload_checkpoint(state, checkpoint, body.version))
    return {"weight_version": await asyncio.shield(swap)}


class AdapterBody(Body, frozen=True):
    """The body of `POST /v1/opd/load_adapter`."""

    path: Annotated[str, Meta(min_length=1)]
    version: Version
    as_teacher: bool = False
    learner: Learner | None = None
    """The learner of whom this is a version; null: the policy of all."""


class ForgottenBody(Body, frozen=True):
    """The body of `POST /v1/opd/forget_learner`."""

    learner: Learner


async def load_adapter(state: PluginState, raw: bytes) -> dict[str, int]:
    """Load an adapter as a new version of the policy, or of the teacher; running requests keep their adapter.

    Raises:
        RouteError: the path is not allowed, or the engine can't hold the adapter.
    """
    body = await read_body(state, raw, AdapterBody)
    folder = allowed_checkpoint(body.path, state.weights_root)
    await asyncio.to_thread(check_adapter, folder, state)
    if body.as_teacher and body.learner is not None:
        raise RouteError("as_teacher", "a learner has no teacher of its own: the base weights are the teacher")
    if body.as_teacher and state.adapters.max_loaded < 2:
        message = "this server keeps one adapter, the policy's: restart it with scripts/serve_vllm --max-adapters 3"
        raise RouteError("as_teacher", message, 409)
    load = asyncio.create_task(_load_adapter(state, folder, body))
    return {"weight_version": await asyncio.shield(load)}


async def forget_learner(state: PluginState, raw: bytes) -> dict[str, list[int]]:
    """Unload the adapters of a learner, who then has the base weights; return their versions."""
    body = await read_body(state, raw, ForgottenBody)
    return {"versions": await state.adapters.forget_learner(cast(AsyncLLM, state.engine), body.learner)}


async def _load_adapter(state: PluginState, folder: Path, body: AdapterBody) -> int:
    engine = cast(AsyncLLM, state.engine)  # `EngineClient` lacks `remove_lora`.
    async with state.reload_lock:
        check_files(folder, state.weights_root)  # Again, because the wait for the lock may have taken minutes.
        try:
            if body.learner is None:
                await state.adapters.load(engine, folder, body.version, as_teacher=body.as_teacher)
            else:
                await state.adapters.load_of_learner(engine, folder, body.version, body.learner)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise RouteError(
                None,
                f"this server has no memory to load an adapter ({shortened(str(error))}). The loaded ones are "
                "unchanged. A retry won't help: restart it with a lower --max-adapters or "
                "--gpu-memory-utilization",
                409,
                "out_of_memory",
            ) from error
    if not body.as_teacher and body.learner is None:
        _VERSION.set(body.version)
    logger.info("Loaded adapter %s as %s version %d", folder, "teacher" if body.as_teacher else "weight", body.version)
    return body.version


def check_adapter(folder: Path, state: PluginState) -> None:
    """Refuse an adapter that the engine can't hold.

    Raises:
        RouteError: vLLM was started without LoRA, the adapter's rank is too high, or its configuration can't be read.
    """
    if not state.adapters.max_loaded:
        message = "this server takes no adapters: restart it with scripts/serve_vllm --max-lora-rank N"
        raise RouteError("path", message, 409)
    try:
        with opened(folder / "adapter_config.json") as descriptor:
            config = json.loads(os.read(descriptor, _MAX_CONFIG_BYTES))
        rank = int(config["r"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RouteError("path", f"adapter_config.json of the adapter can't be read: {error}") from error
    if rank > state.adapters.max_rank:
        raise RouteError(
            "path",
            f"the adapter has rank {rank}, and this server holds at most {state.adapters.max_rank}; restart it with "
            f"scripts/serve_vllm --max-lora-rank {rank}",
        )


async def reload_checkpoint(state: PluginState, checkpoint: Path, version: int | None) -> int:
    """Load `checkpoint` as `version` (None: the next one) and return the version.

    Raises:
        RouteError: the checkpoint does not match the model.
            There was no memory for it, or the weights are broken now: see `restore`.
        Exception: the engine could not load the checkpoint; the previous weights are whole.
    """
    # The engine would load a checkpoint of other shapes without an error, and compute wrong results.
    await asyncio.to_thread(lambda: check_shapes(tensor_shapes(checkpoint), state, "path"))
    async with swapped_weights(state, version) as new_version:
        check_files(checkpoint, state.weights_root)  # Again, because running requests may have taken minutes.
        try:
            await state.engine.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})
        except Exception as error:
            await restore(state, error)
            raise
    state.loaded = LoadedFiles(str(checkpoint), new_version)
    logger.info("Loaded %s as weight version %d", checkpoint, new_version)
    return new_version


async def restore(state: PluginState, error: Exception) -> None:
    """Make the weights whole again after a load that failed with `error`, or mark them as broken.

    If layers were replaced, the checkpoint that was loaded from files last is loaded again, with its version.

    Raises:
        RouteError: 409: there was no memory (`out_of_memory`), or the weights are unusable now (`broken_weights`).
    """
    replaced = await _settled(state)
    is_out_of_memory_now = is_out_of_memory(error)
    outcome = "No layer had been replaced: the old weights are whole."
    if replaced != []:
        layers = "Layers may have been replaced"
        if replaced is not None:
            layers = f"{len(replaced)} layers had been replaced ({', '.join(replaced[:3])}, ...)"
        try:
            await state.engine.collective_rpc("reload_weights", kwargs={"weights_path": state.loaded.path})
            await _reset_cache(state)
            await state.engine.update_weight_version(str(state.loaded.version))
            outcome = f"{layers}; the weights of version {state.loaded.version} are whole again."
        except Exception as second:
            logger.exception("The previous weights can't be loaded again")
            await _settled(state)
            is_out_of_memory_now = is_out_of_memory_now or is_out_of_memory(second)
            outcome = (
                f"{layers}, and the previous weights can't be loaded again: this server computes nothing until whole "
                "weights are loaded. Push again, or restart it."
            )
            state.broken = f"the weights of this server are partly those of a push that failed. {outcome}"
    if is_out_of_memory_now:
        raise RouteError(
            None,
            f"this server has no memory to load weights ({shortened(str(error))}). {outcome} A retry won't help. "
            "Free memory: lower its --gpu-memory-utilization or --max-model-len, or give the trainer another GPU or "
            "less of this one (train.micro_tokens)",
            409,
            "out_of_memory",
        ) from error
    if state.broken is not None:
        raise RouteError(None, f"{state.broken} The load failed with: {shortened(str(error))}", 409, "broken_weights")


async def _settled(state: PluginState) -> list[str] | None:
    """End the failed load in all workers; return the layers that any of them replaced, None if that is unknown."""
    try:
        replaced: list[list[str] | None] = await state.engine.collective_rpc("settle_weights")
    except Exception:
        logger.exception("The workers can't tell which layers were replaced")
        return None
    return None if None in replaced else sorted({layer for layers in replaced for layer in layers or ()})


@asynccontextmanager
async def swapped_weights(state: PluginState, version: int | None) -> AsyncGenerator[int]:
    """Wait for running requests and pause the engine, so that the block can load new weights; hold the reload lock.

    Yields the new weights' version, by default the next one. A block that fails must call `restore`. If the weights are
    broken after that, the requests that waited for the end of the pause are aborted.
    """
    async with state.reload_lock:
        if version is None:
            version = as_version(await state.engine.get_weight_version()) + 1
        await state.engine.pause_generation(mode="wait")
        try:
            yield version
            await _reset_cache(state)
            await state.adapters.unload(cast(AsyncLLM, state.engine))
            await state.engine.update_weight_version(str(version))
            state.broken = None
            _VERSION.set(version)
        finally:
            if state.broken is not None:
                await state.engine.pause_generation(mode="abort")
            await state.engine.resume_generation()


async def _reset_cache(state: PluginState) -> None:
    if not await state.engine.reset_prefix_cache():
        raise VLLMServerError("the prefix cache still holds the old weights' states; restart the server")


def allowed_checkpoint(path: str, root: Path | None) -> Path:
    """Resolve `path` (absolute, or relative to `root`) to a checkpoint's directory, following symbolic links.

    Raises:
        RouteError: there is no root; the path leads out of it, or is not a readable directory with safetensors; or
            the directory contains anything but regular files and directories.
    """
    if root is None:
        raise RouteError(
            "path",
            "this server loads no weights: restart it with scripts/serve_vllm --weights-root DIR, or with "
            f"{WEIGHTS_ROOT_VARIABLE}=DIR",
            403,
        )
    try:
        return _checkpoint_in(root, path)
    except OSError as error:
        raise RouteError("path", f"{path!r} cannot be looked at: {error.strerror}") from error
    except (ValueError, RuntimeError) as error:  # a null character; links that lead in a circle
        raise RouteError("path", f"{path!r} is not a path: {error}") from error


def _checkpoint_in(root: Path, path: str) -> Path:
    checkpoint = (root / path).resolve()
    if not checkpoint.is_relative_to(root):
        raise RouteError("path", f"{path!r} is outside of the weights root", 403)
    if not checkpoint.is_dir():
        raise RouteError("path", f"{path!r} is not a directory")
    if next(checkpoint.glob("*.safetensors"), None) is None:
        raise RouteError("path", f"{path!r} holds no *.safetensors")
    check_files(checkpoint, root)
    return checkpoint


def check_files(checkpoint: Path, root: Path | None) -> None:
    """Refuse a directory that contains anything but regular files of `root` and subdirectories.

    Opening a FIFO or a device may block forever. vLLM's loaders open other files than weights too, and hold the
    interpreter lock meanwhile.

    Raises:
        RouteError: a file is not allowed; the message names it.
    """
    for file in sorted(checkpoint.iterdir()):
        try:
            target = file.resolve(strict=True)
            mode = target.stat().st_mode
        except (OSError, RuntimeError) as error:  # a link to nothing, or in a circle
            raise RouteError("path", f"{file.name!r} of the directory cannot be looked at: {error}") from error
        if root is None or not target.is_relative_to(root):
            raise RouteError("path", f"{file.name!r} of the directory leads out of the weights root", 403)
        if not (stat.S_ISREG(mode) or (stat.S_ISDIR(mode) and file.suffix != ".safetensors")):
            raise RouteError("path", f"{file.name!r} of the directory is not a regular file")


@contextmanager
def opened(file: Path) -> Generator[int]:
    """Open a regular file for reading, and yield its descriptor; never block on a FIFO or a device.

    Raises:
        RouteError: `file` is not a regular file.
        OSError: `file` can't be opened.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RouteError("path", f"{file.name!r} is not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def check_shapes(shapes: Mapping[str, list[int]], state: PluginState, field: str) -> None:
    """Refuse weights whose names or shapes differ from the served checkpoint's, or a model that can't be reloaded.

    If the model's embeddings are tied, the output head may be missing.

    Raises:
        RouteError: the weights or the model are refused. The message names the first tensor that differs; the error's
            field is then `field`.
    """
    if current_platform.is_cpu() and state.may_be_tied:
        raise RouteError(
            None,
            "on the CPU vLLM keeps the old output head of a model whose embeddings are tied. Push adapters instead "
            "(serve-vllm --max-lora-rank N, and the trainer's lora_rank), or serve an untied copy of the model, which "
            "serve-vllm makes by itself where it is given --weights-root or --weight-transfer",
            409,
        )
    served = Path(state.engine.model_config.model)
    if not served.is_dir():
        return
    expected = tensor_shapes(served)
    if state.tied_embeddings:
        expected, shapes = _without_head(expected), _without_head(shapes)
    if expected != shapes:
        differing = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
        name = differing[0]
        raise RouteError(
            field,
            f"{len(differing)} of {len(expected)} tensors are not those of the served model, the first of them {name}: "
            f"shape {shapes.get(name, 'missing')}, expected {expected.get(name, 'none')}",
        )


def _without_head(shapes: Mapping[str, list[int]]) -> dict[str, list[int]]:
    return {name: shape for name, shape in shapes.items() if not name.endswith("lm_head.weight")}


def tensor_shapes(directory: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor of a checkpoint by name; only the files' headers are read.

    Raises:
        RouteError: a file is corrupt, truncated, or not a regular file.
    """
    shapes: dict[str, list[int]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with opened(file) as descriptor, safe_open(f"/dev/fd/{descriptor}", framework="np") as tensors:
                shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise RouteError("path", f"{file.name} cannot be read: {error}") from error
    return shapes
