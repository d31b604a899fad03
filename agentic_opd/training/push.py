"""New weights into running vLLM servers, each push proved by a probe (I/O)."""

import asyncio
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from agentic_opd.core.errors import ConfigError, ServerMismatchError
from agentic_opd.core.http import JsonClient
from agentic_opd.core.server_info import ServerInfo, fetch_server_info
from agentic_opd.core.types import TeacherRequest
from agentic_opd.distill.teacher import PluginTeacher
from agentic_opd.serving.process_group import Backend
from agentic_opd.training.batch import TrainBatch
from agentic_opd.training.config import ROUNDED_TOLERANCE, TrainerConfig
from agentic_opd.training.model import MovingAverage, save_adapter, save_weights, served_weights, source_dtype
from agentic_opd.training.policy import Policy
from agentic_opd.training.transfer import WeightSender
from agentic_opd.training.world import World

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

    def own_logprobs(self, policy: Policy, device: str) -> list[float]:
        """What the trainer's policy gives to every token but the first; if it is sharded, all processes must ask."""
        tokens = torch.tensor([self.token_ids], device=device)
        there = torch.ones_like(tokens, dtype=torch.bool)
        was_training = policy.training
        policy.eval()
        with torch.no_grad():
            row: list[float] = policy(tokens, there, tokens[..., None], there).chosen_BTK[0, 1:, 0].tolist()
        policy.train(was_training)
        return row


class Pushed(NamedTuple):
    """What a push was."""

    size_bytes: int
    """Of the files that every server read."""
    difference: float | None
    """The largest one of the probe, in nats; None without a probe."""


class WeightPusher:
    """Writes weights where the servers may read them, lets them load these, and compares.

    They are adapters where the model has some and every server takes them, and else whole weights: checkpoints, or sent
    from memory where the settings say so.
    """

    def __init__(self, config: TrainerConfig, world: World) -> None:
        """Make a client for each server; nothing is asked yet."""
        self._config, self._world = config, world
        self._dtype = source_dtype(config.model)
        self._tolerance = config.probe_tolerance
        if self._dtype != torch.float32 and "probe_tolerance" not in config.model_fields_set:
            self._tolerance = max(self._tolerance, ROUNDED_TOLERANCE)
        self._kept = config.pushes_kept
        self._as_adapter: bool | None = None
        self._sender: WeightSender | None = None
        given = config.vllm_api_key
        key = given.get_secret_value() if given else os.environ.get("VLLM_API_KEY")
        self._clients = [JsonClient(url, key, retry_s=config.server_retry_s) for url in config.vllm_urls]

    async def push(
        self, policy: Policy, version: int, probe: Probe | None, average: MovingAverage | None = None
    ) -> Pushed | None:
        """Write the weights as `version`, load them on all servers, and probe them.

        All processes call it, and the first one writes and asks.

        Args:
            policy: Whose weights.
            version: What they are called from then on.
            probe: What servers and model are compared on; None: they are not.
            average: Becomes the teacher's adapter.

        Returns:
            What was pushed; None if there is no server, and in other processes than the first.

        Raises:
            ConfigError: there is an average, and a server takes no adapters.
            PushMismatchError: a server's logprobs are not the trainer's.
            ServerError: a server can't load them.
        """
        if not self._clients:
            return None
        model = policy.model
        folder = self._config.weights_dir.resolve() / f"step-{version:06d}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        world = self._world
        if self._as_adapter is None:
            self._as_adapter = world.share(await self._takes_adapters() if world.is_first else False)
        state = await asyncio.to_thread(world.whole, _pushed(model, adapters_only=self._as_adapter))
        averages = {} if average is None else await asyncio.to_thread(world.whole, average.state_dict())
        own = None if probe is None else probe.own_logprobs(policy, world.device)
        if not world.is_first:
            return None
        if self._as_adapter:
            size = await self._load_adapter(folder, version, model, state)
            if averages:
                teacher = folder.with_name(f"{folder.name}-teacher")
                size += await self._load_adapter(teacher, version, model, averages, as_teacher=True)
        elif self._config.weight_transfer == "files":
            await asyncio.to_thread(save_weights, model, self._config.model, folder, self._dtype, state)
            await self._ask_all("/v1/opd/reload_weights", {"path": str(folder), "version": version})
            size = _size_bytes(folder)
        else:
            weights = await asyncio.to_thread(served_weights, model, state, self._dtype)
            size = await (await self._joined(self._config.weight_transfer)).send(weights, version)
        difference = None if probe is None or own is None else await self.compare(own, probe, version)
        if folder.exists():
            self._forget_old(folder)
        return Pushed(size, difference)

    async def _load_adapter(
        self,
        folder: Path,
        version: int,
        model: Any,
        state: dict[str, torch.Tensor],
        *,
        as_teacher: bool = False,
    ) -> int:
        await asyncio.to_thread(save_adapter, model, folder, state)
        await self._ask_all("/v1/opd/load_adapter", {"path": str(folder), "version": version, "as_teacher": as_teacher})
        return _size_bytes(folder)

    async def _joined(self, backend: Backend) -> WeightSender:
        if self._sender is None:
            infos = await asyncio.gather(*(fetch_server_info(client) for client in self._clients))
            self._sender = await WeightSender.joined(backend, self._clients, infos, self._world.device)
        return self._sender

    async def _ask_all(self, route: str, body: dict[str, Any]) -> None:
        await asyncio.gather(*(client.post(route, body) for client in self._clients))

    async def _takes_adapters(self) -> bool:
        """Whether the model has adapters, and every server takes them."""
        rank = self._config.lora_rank
        if rank is None:
            return False
        infos = await asyncio.gather(*(fetch_server_info(client) for client in self._clients))
        if all(info.max_adapters and info.max_lora_rank >= rank for info in infos):
            # A server that has an adapter under way may read its files again.
            self._kept = max(self._kept, 1 + max(info.max_adapters for info in infos))
            return True
        without = [
            client.base_url
            for client, info in zip(self._clients, infos, strict=True)
            if not info.max_adapters or info.max_lora_rank < rank
        ]
        how = f"start {' and '.join(without)} with scripts/serve_vllm --max-lora-rank {rank}"
        if self._config.ema_decay is not None:
            raise ConfigError(f"ema_decay needs servers that take adapters: {how}")
        logger.warning("whole weights are pushed, with the adapters merged in; to push adapters alone, %s", how)
        return False

    async def compare(self, own: Sequence[float], probe: Probe, version: int | None = None) -> float:
        """The largest difference (nats) between the servers' logprobs of the probe and the model's `own`.

        Raises:
            PushMismatchError: it is above `probe_tolerance`.
        """
        rows = await asyncio.gather(*(_served_logprobs(client, probe, version) for client in self._clients))
        worst = 0.0
        for client, served in zip(self._clients, rows, strict=True):
            gaps = [abs(a - b) for a, b in zip(own, served, strict=True)]
            at = max(range(len(gaps)), key=gaps.__getitem__)
            worst = max(worst, gaps[at])
            if gaps[at] > self._tolerance:
                raise PushMismatchError(
                    f"{client.base_url} does not compute what the trainer does: token {at + 1} of the probe has the "
                    f"logprob {served[at]:.6f} there and {own[at]:.6f} here (tolerance "
                    f"{self._tolerance:g}). Same checkpoint and dtype on both sides? In bf16 raise "
                    "probe_tolerance; a tied output head on the CPU can't be reloaded."
                )
        return worst

    async def close(self) -> None:
        """Leave the servers' group, and close pooled connections."""
        if self._sender is not None:
            self._sender.group.close()
        for client in self._clients:
            await client.close()

    def _forget_old(self, newest: Path) -> None:
        """Remove what was pushed long ago; later steps, which another run left here, do not count."""
        pushed: Sequence[Path] = sorted(newest.parent.glob("step-??????"))
        for folder in pushed[: pushed.index(newest) + 1][: -self._kept]:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(folder.with_name(f"{folder.name}-teacher"), ignore_errors=True)


def _pushed(model: Any, *, adapters_only: bool) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = model.state_dict()
    return {name: value for name, value in state.items() if not adapters_only or ".lora_" in name}


def _size_bytes(folder: Path) -> int:
    """Of the weights in it."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


async def _served_logprobs(client: JsonClient, probe: Probe, version: int | None) -> list[float]:
    info: ServerInfo = await fetch_server_info(client)
    ids = probe.token_ids
    reply = await PluginTeacher(client, info).score(TeacherRequest(ids, len(ids) - 1, 0, (), version), top_k=1)
    return reply.rows.actual_R.tolist()
