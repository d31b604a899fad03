"""New weights into running vLLM servers, each push proved by a probe (I/O)."""

import asyncio
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentic_opd.core.errors import ServerMismatchError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.server_info import fetch_server_info
from agentic_opd.core.types import TeacherRequest
from agentic_opd.distill.teacher import PluginTeacher
from agentic_opd.training.batch import TrainBatch
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.logprobs import selected_logprobs
from agentic_opd.training.model import logits_of, save_weights

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 512


class PushMismatchError(ServerMismatchError):
    """A server took the weights and computes something else than the trainer."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Token ids whose logprobs server and trainer compare."""

    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, batch: TrainBatch) -> "Probe":
        """The beginning of the batch's longest sequence."""
        longest = int(batch.attended_BT.sum(-1).argmax())
        tokens: list[int] = batch.tokens_BT[longest][batch.attended_BT[longest]].tolist()
        return cls(tuple(tokens[:_PROBE_TOKENS]))

    def own_logprobs(self, model: Any, device: str, precision: str) -> list[float]:
        """What the trainer's model gives to every token but the first."""
        tokens = torch.tensor([self.token_ids], device=device)
        was_training = model.training
        model.eval()
        with torch.no_grad():
            logits = logits_of(model, tokens, torch.ones_like(tokens), precision)
            row: list[float] = selected_logprobs(logits, tokens[..., None])[0, 1:, 0].tolist()
        model.train(was_training)
        return row


class WeightPusher:
    """Writes checkpoints where the servers may read them, lets them load these, and compares."""

    def __init__(self, config: TrainerConfig, device: str) -> None:
        """Make a client for each server; nothing is asked yet."""
        self._config, self._device = config, device
        given = config.vllm_api_key
        key = given.get_secret_value() if given else os.environ.get("VLLM_API_KEY")
        self._clients = [JsonClient(url, key, retry_s=config.server_retry_s) for url in config.vllm_urls]

    async def push(self, model: Any, version: int, probe: Probe | None) -> float | None:
        """Write the weights as `version`, load them on all servers, and probe them.

        Returns:
            The largest difference in nats; None if there is no server or no probe.

        Raises:
            PushMismatchError: a server's logprobs are not the trainer's.
            ServerError: a server can't load them.
        """
        if not self._clients:
            return None
        folder = self._config.weights_dir.resolve() / f"step-{version:06d}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(save_weights, model, self._config.model, folder)
        body = {"path": str(folder), "version": version}
        await asyncio.gather(*(client.post("/v1/opd/reload_weights", body) for client in self._clients))
        worst = None if probe is None else await self.compare(model, probe)
        self._forget_old(folder)
        return worst

    async def compare(self, model: Any, probe: Probe) -> float:
        """The largest difference (nats) between the servers' logprobs of the probe and the model's own.

        Raises:
            PushMismatchError: it is above `probe_tolerance`.
        """
        own = probe.own_logprobs(model, self._device, self._config.precision)
        rows = await asyncio.gather(*(_served_logprobs(client, probe) for client in self._clients))
        worst = 0.0
        for client, served in zip(self._clients, rows, strict=True):
            gaps = [abs(a - b) for a, b in zip(own, served, strict=True)]
            at = max(range(len(gaps)), key=gaps.__getitem__)
            worst = max(worst, gaps[at])
            if gaps[at] > self._config.probe_tolerance:
                raise PushMismatchError(
                    f"{client.base_url} does not compute what the trainer does: token {at + 1} of the probe has the "
                    f"logprob {served[at]:.6f} there and {own[at]:.6f} here (tolerance "
                    f"{self._config.probe_tolerance:g}). Same checkpoint and dtype on both sides? In bf16 raise "
                    "probe_tolerance; a tied output head on the CPU can't be reloaded."
                )
        return worst

    async def close(self) -> None:
        """Close pooled connections."""
        for client in self._clients:
            await client.close()

    def _forget_old(self, newest: Path) -> None:
        """Remove what was pushed long ago; later steps, which another run left here, do not count."""
        pushed: Sequence[Path] = sorted(newest.parent.glob("step-??????"))
        for folder in pushed[: pushed.index(newest) + 1][: -self._config.pushes_kept]:
            shutil.rmtree(folder, ignore_errors=True)


async def _served_logprobs(client: JsonClient, probe: Probe) -> list[float]:
    teacher = PluginTeacher(client, await fetch_server_info(client))
    ids = probe.token_ids
    reply = await teacher.score(TeacherRequest(ids, len(ids) - 1, 0, ()), top_k=1)
    return reply.rows.actual_R.tolist()
