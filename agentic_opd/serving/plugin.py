"""The vLLM endpoint plugin: the routes that environments need in addition to vLLM's own.

vLLM loads the plugin if `VLLM_PLUGINS` contains `agentic_opd`, which `scripts/serve_vllm` sets.
"""

from argparse import Namespace

import vllm
from fastapi import FastAPI
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient

from agentic_opd import __version__
from agentic_opd.serving.engine import PluginState, as_version
from agentic_opd.serving.generate import generate
from agentic_opd.serving.images import ImageAnswer
from agentic_opd.serving.reload import forget_learner, load_adapter, reload_weights
from agentic_opd.serving.score import score
from agentic_opd.serving.transfer import join_transfer, receive_weights, transfer_of, workers_of
from agentic_opd.serving.web import guarded


class OPDEndpointPlugin:
    """Adds routes to vLLM's server: `/generate`, and below `/v1/opd` scores, pictures, server info, weights."""

    name = "agentic_opd"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Register the routes."""
        app.add_api_route("/generate", guarded(generate, computes=True), methods=["POST"])
        app.add_api_route("/v1/opd/score", guarded(score, computes=True), methods=["POST"])
        app.add_api_route("/v1/opd/images", guarded(hold_image, "application/octet-stream"), methods=["POST"])
        app.add_api_route("/v1/opd/reload_weights", guarded(reload_weights), methods=["POST"])
        app.add_api_route("/v1/opd/load_adapter", guarded(load_adapter, computes=True), methods=["POST"])
        app.add_api_route("/v1/opd/forget_learner", guarded(forget_learner), methods=["POST"])
        app.add_api_route("/v1/opd/join_transfer", guarded(join_transfer), methods=["POST"])
        app.add_api_route("/v1/opd/receive_weights", guarded(receive_weights), methods=["POST"])
        app.add_api_route("/v1/opd/info", guarded(info), methods=["GET"])

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Create the `PluginState` at `app.state.agentic_opd`."""
        assert engine_client is not None  # A server without an engine lacks the task "generate".
        state.agentic_opd = PluginState.of_server(engine_client, args)


async def hold_image(state: PluginState, raw: bytes) -> ImageAnswer:
    """Keep the picture whose file is the body, for prompts that name it by its digest; see `images`."""
    return await state.images.hold(state.engine, raw)


async def info(state: PluginState, _raw: bytes) -> dict[str, str | int | list[str] | dict[str, int] | None]:
    """Return the served model's properties, the server's limits, and the versions of the packages."""
    newest = state.adapters.newest
    return {
        "model": state.model,
        "plugin_version": __version__,
        "vllm_version": vllm.__version__,
        "max_model_len": state.max_model_len,
        "max_logprobs": state.max_logprobs,
        "vocab_size": state.vocab_size,
        "max_body_bytes": state.max_body_bytes,
        "weight_version": as_version(await state.engine.get_weight_version()) if newest is None else newest,
        "max_adapters": state.adapters.max_loaded,
        "max_lora_rank": state.adapters.max_rank,
        "learners": state.adapters.newest_of_learners,
        "weight_transfer": None if (transfer := transfer_of(state)) is None else transfer.backend,
        "workers": workers_of(state),
        "dtype": state.dtype,
        "logprobs_mode": state.logprobs_mode,
        "named_ids": state.named_ids,
        "tied_embeddings": state.tied_embeddings,
        "image_placeholder": state.images.placeholder,
        "gpus": state.gpus,
        "broken_weights": state.broken,
    }
