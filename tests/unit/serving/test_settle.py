"""A load that fails in the middle of vLLM's own reload of layers: which are new, and that the others are as before."""

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm", reason="the plugin runs inside vLLM, which is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Model(nn.Module):
    """Three layers, which load as vLLM's models do: each parameter by its loader."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = (nn.Linear(4, 4, dtype=torch.float32) for _ in range(3))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters = dict(self.named_parameters())
        for name, value in weights:
            getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], value)
        return set(parameters)


def load(model: Model, number: float, fails_at: str | None = None) -> None:
    """Load this number everywhere; there is no memory for the tensor `fails_at`."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    def weights() -> Iterable[tuple[str, Tensor]]:
        for name, value in before.items():
            if name == fails_at:
                raise torch.OutOfMemoryError("CUDA out of memory")
            yield name, torch.full_like(value, number)

    before = dict(model.state_dict())
    initialize_layerwise_reload(model)
    model.load_weights(weights())
    finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))  # type: ignore[arg-type]


def numbers(model: Model) -> dict[str, float]:
    return {name: float(value.unique()) for name, value in model.state_dict().items()}


@pytest.fixture
def model() -> Model:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = Model()
    model.requires_grad_(requires_grad=False)
    record_metadata_for_reloading(model)
    load(model, 1.0)
    return model


@pytest.mark.parametrize(
    ("fails_at", "replaced"),
    [("embed.weight", []), ("embed.bias", []), ("body.bias", ["embed"]), ("head.bias", ["body", "embed"])],
)
def test_the_layers_that_are_new_are_known_and_the_others_are_the_old_ones(
    model: Model, fails_at: str, replaced: list[str]
) -> None:
    from agentic_opd.serving.settle import settle_weights

    worker, memory = SimpleNamespace(get_model=lambda: model), model.head.weight.data_ptr()
    with pytest.raises(torch.OutOfMemoryError):
        load(model, 2.0, fails_at)
    assert settle_weights(worker) == replaced
    assert numbers(model) == {name: 2.0 if name.split(".")[0] in replaced else 1.0 for name in model.state_dict()}
    load(model, 3.0)  # The next load begins from nothing that the failed one left.
    assert set(numbers(model).values()) == {3.0}
    assert model.head.weight.data_ptr() == memory
    assert settle_weights(worker) is None


@pytest.mark.slow
def test_vllms_workers_have_it() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    from agentic_opd.serving.settle import add_to_workers, settle_weights

    add_to_workers()
    assert CPUWorker.settle_weights is settle_weights
