"""vLLM's weight transfer between CPUs: the worker's side of `process_group.GlooGroup`.

`engine_process.register` registers it with vLLM as the backend `gloo` of `--weight-transfer-config`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from agentic_opd.serving.process_group import GlooGroup


class GlooWeightTransferEngine(NCCLWeightTransferEngine):
    """Receives all weights over gloo, and then loads them like vLLM's NCCL engine.

    A failed transfer leaves the model unchanged.
    """

    _gloo: GlooGroup | None = None
    _received: Sequence[tuple[str, torch.Tensor]] = ()

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the trainer's group."""
        assert init_info.master_address is not None
        assert init_info.master_port is not None
        worker = self.parallel_config.data_parallel_index * self.parallel_config.world_size + self.parallel_config.rank
        self._gloo = GlooGroup(
            init_info.master_address, init_info.master_port, init_info.rank_offset + worker, init_info.world_size
        )

    def start_weight_update(self) -> None:
        """Discard weights received by an earlier update that failed."""
        self._received = ()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one update; the weights have arrived when this returns."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive the weights in the order of their names.

        Raises:
            RuntimeError: the worker has not joined a group, or the transfer failed.
        """
        if self._gloo is None:
            raise RuntimeError("there is no group to receive weights from")
        received = list[tuple[str, torch.Tensor]]()
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            received.append((name, torch.empty(shape, dtype=getattr(torch, dtype))))
            self._gloo.broadcast(received[-1][1])
        self._received = received

    def finish_weight_update(self) -> None:
        """Load the received weights into the model."""
        super().start_weight_update()
        model: Any = self.model
        model.load_weights(self._received)
        self._received = ()
        super().finish_weight_update()

    def shutdown(self) -> None:
        if self._gloo is not None:
            self._gloo.close()
            self._gloo = None
