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
from agentic_opd.core.precision import Noise, tolerance_for
from agentic_opd.core.server_info import ServerInfo, fetch_server_info
from agentic_opd.core.types import TeacherRequest
from agentic_opd.distill.teacher import PluginTeacher
from agentic_opd.serving.process_group import Backend
from agentic_opd.training.batch import TrainBatch
from agentic_opd.training.config import TrainerConfig
from agentic_opd.training.model import MovingAverage, merged, save_adapter, tied_names, without_aliases, write_weights
from agentic_opd.training.policy import Policy
from agentic_opd.training.rounding import MUCH, Rounding, as_sent, common_dtype
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
    """Of the weights that every server read."""
    difference: float | None
    """The largest one of the probe, in nats; None without a probe."""
    difference_rms: float | None
    """Their root mean square."""
    rounded_share: float
    """Of the update, what rounding keeps back: `Rounded.share`."""


class _Receivers(NamedTuple):
    """What a push has to be like for the servers to take it."""

    dtype: torch.dtype
    has_head: bool
    """A server has an output head of its own, also where the trained model has none."""
    takes_adapters: bool


class WeightPusher:
    """Writes weights where the servers may read them, lets them load these, and compares.

    They are adapters where the model has some and every server takes them, and else whole weights: checkpoints, or sent
    from memory where the settings say so.
    """

    def __init__(self, config: TrainerConfig, world: World) -> None:
        """Make a client for each server; nothing is asked yet."""
        self._config, self._world = config, world
        self._kept = config.pushes_kept
        self._rounding, self._averages_rounding = Rounding(), Rounding()
        self._has_warned = self._has_said_merged = False
        self._sender: WeightSender | None = None
        given = config.vllm_api_key
        key = given.get_secret_value() if given else os.environ.get("VLLM_API_KEY")
        self._clients = [JsonClient(url, key, retry_s=config.server_retry_s) for url in config.vllm_urls]

    async def push(
        self, policy: Policy, version: int, probe: Probe | None, average: MovingAverage | None = None
    ) -> Pushed | None:
        """Write the weights as `version`, in the precision of the servers, load them on all of them, and probe them.

        All processes call it, and the first one writes and asks.

        Args:
            policy: Whose weights.
            version: What they are called from then on.
            probe: What servers and model are compared on; None: they are not.
            average: Becomes the teacher's adapter.

        Returns:
            What was pushed; None if there is no server, and in other processes than the first.

        Raises:
            ConfigError: there is an average, and a server takes no adapters; or the model has an output head of its
                own, and a server's is its embedding matrix.
            PushMismatchError: a server's logprobs are not the trainer's.
            ServerError: a server can't load them.
        """
        if not self._clients:
            return None
        model, world = policy.model, self._world
        folder = self._config.weights_dir.resolve() / f"step-{version:06d}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        to = world.share(await self._receivers(model) if world.is_first else None)
        assert to is not None
        state = await asyncio.to_thread(world.whole, _pushed(model, adapters_only=to.takes_adapters))
        averages = {} if average is None else await asyncio.to_thread(world.whole, average.state_dict())
        if to.takes_adapters:
            rounded = await asyncio.to_thread(self._rounding.adapters, state, to.dtype)
        else:
            rounded = await asyncio.to_thread(self._rounding.weights, merged(model, state), to.dtype)
        sent = rounded.weights
        own = None
        if probe is not None:
            with as_sent(policy, None if to.takes_adapters else sent, to.dtype, world):
                own = probe.own_logprobs(policy, world.device)
        if not world.is_first:
            return None
        if to.takes_adapters:
            size = await self._load_adapter(folder, version, model, sent)
            if averages:
                teacher = folder.with_name(f"{folder.name}-teacher")
                averages = self._averages_rounding.adapters(averages, to.dtype).weights
                size += await self._load_adapter(teacher, version, model, averages, as_teacher=True)
        else:
            if not to.has_head:
                sent = without_aliases(model, sent)
            size = await self._load_weights(folder, version, model, sent)
        noise = None if probe is None or own is None else await self.compare(own, probe, version)
        if folder.exists():
            self._forget_old(folder)
        self._warn_of_rounding(rounded.share, to.dtype)
        return Pushed(size, noise and noise.largest, noise and noise.rms, rounded.share)

    async def _load_weights(self, folder: Path, version: int, model: Any, sent: dict[str, torch.Tensor]) -> int:
        if self._config.weight_transfer != "files":
            return await (await self._joined(self._config.weight_transfer)).send(sent, version)
        await asyncio.to_thread(write_weights, model, self._config.model, folder, sent)
        await self._ask_all("/v1/opd/reload_weights", {"path": str(folder), "version": version})
        return _size_bytes(folder)

    def _warn_of_rounding(self, share: float, dtype: torch.dtype) -> None:
        """Say once that the servers hardly get what is learned, and what to do."""
        if share <= MUCH or self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "rounding to %s, in which the servers compute, keeps back %.0f%% of what was learned since the last push: "
            "they follow the trainer late. Take a higher lr, train adapters (lora_rank, and servers with "
            "--max-lora-rank), or serve in float32 (serve-vllm ... -- --dtype float32)",
            str(dtype).removeprefix("torch."),
            100 * share,
        )

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

    async def _receivers(self, model: Any) -> _Receivers:
        """Ask the servers what they take."""
        infos = await asyncio.gather(*(fetch_server_info(client) for client in self._clients))
        takes_adapters = self._takes_adapters(infos)
        if not takes_adapters and model.get_output_embeddings() is not None and not tied_names(model):
            for client, info in zip(self._clients, infos, strict=True):
                if info.tied_embeddings:
                    raise ConfigError(
                        f"{self._config.model} has an output head of its own, and that of {info.model} at "
                        f"{client.base_url} is its embedding matrix: serve a model with untied embeddings, or train "
                        "adapters (lora_rank) and start the server with --max-lora-rank"
                    )
        has_head = not all(info.tied_embeddings for info in infos)
        return _Receivers(common_dtype(info.dtype for info in infos), has_head, takes_adapters)

    def _takes_adapters(self, infos: Sequence[ServerInfo]) -> bool:
        """Whether the model has adapters, and every server takes them."""
        rank = self._config.lora_rank
        if rank is None:
            return False
        without = [
            client.base_url
            for client, info in zip(self._clients, infos, strict=True)
            if not info.max_adapters or info.max_lora_rank < rank
        ]
        if not without:
            # A server that has an adapter under way may read its files again.
            most = max(info.max_adapters for info in infos)
            self._kept = max(self._config.pushes_kept, 1 + most)
            return True
        how = f"start {' and '.join(without)} with scripts/serve_vllm --max-lora-rank {rank}"
        if self._config.ema_decay is not None:
            raise ConfigError(f"ema_decay needs servers that take adapters: {how}")
        if not self._has_said_merged:
            self._has_said_merged = True
            logger.warning("whole weights are pushed, with the adapters merged in; to push adapters alone, %s", how)
        return False

    async def compare(self, own: Sequence[float], probe: Probe, version: int | None = None) -> Noise:
        """Compare the servers' logprobs of the probe with the model's `own`; returns the largest difference of any.

        Raises:
            PushMismatchError: it is more than `probe_tolerance`, or than the server's precision explains.
        """
        infos = await asyncio.gather(*(fetch_server_info(client) for client in self._clients))
        both = zip(self._clients, infos, strict=True)
        rows = await asyncio.gather(*(_served_logprobs(client, info, probe, version) for client, info in both))
        found: list[Noise] = []
        for client, info, served in zip(self._clients, infos, rows, strict=True):
            gaps = [abs(a - b) for a, b in zip(own, served, strict=True)]
            at = max(range(len(gaps)), key=gaps.__getitem__)
            found.append(Noise.of(gaps))
            trained_in = {"bf16": "bfloat16", "fp32": "float32"}[self._config.precision]
            tolerance = tolerance_for(info.dtype, trained_in, largest=self._config.probe_tolerance)
            if found[-1].exceeds(tolerance):
                raise PushMismatchError(
                    f"{client.base_url} does not compute what the trainer does, with the weights that it was sent: its "
                    f"logprobs of the probe are {found[-1]} away, where {tolerance} are expected of {info.dtype} there "
                    f"and {trained_in} here. Token {at + 1} has {served[at]:.6f} there and {own[at]:.6f} here. Is it "
                    "the same model on both sides? If more noise than this is usual there, set probe_tolerance"
                )
        return max(found, key=lambda one: one.largest)

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


async def _served_logprobs(client: JsonClient, info: ServerInfo, probe: Probe, version: int | None) -> list[float]:
    ids = probe.token_ids
    reply = await PluginTeacher(client, info).score(TeacherRequest(ids, len(ids) - 1, 0, (), version), top_k=1)
    return reply.rows.actual_R.tolist()
