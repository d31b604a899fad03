"""A worker's part of loading weights that failed: which layers are new, and the old weights of all others.

vLLM loads weights layer by layer. A layer's tensors are collected and processed in memory of their own, and then copied
over the old ones, which allocates nothing. So each layer is whole, but a failed load leaves new layers among old ones,
and layers without any weights.
"""

from typing import Any


def settle_weights(worker: Any) -> list[str] | None:
    """End a load that failed in this worker, so that another one can begin.

    Layers that were not replaced get their old weights back; the names of the replaced ones are returned. The result is
    None if no load is under way: it failed before the first layer, or after the last one.
    """
    from vllm.model_executor.model_loader import reload

    layerwise: Any = reload.layerwise
    model = worker.get_model()
    layers = {name: layer for name, layer in model.named_modules() if layerwise.get_layer_tensors(layer)}
    pending = {name for name, layer in layers.items() if layerwise.get_layerwise_info(layer).can_load()}
    was_loading = any(layerwise.get_layerwise_info(layer).can_load() for layer in model.modules())
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
    layerwise.LOADING_LAYERS.clear()
    return sorted(layers.keys() - pending) if was_loading else None


def add_to_workers() -> None:
    """Make `settle_weights` a method of vLLM's workers, which `collective_rpc` calls by its name."""
    from vllm.v1.worker.gpu_worker import Worker

    if not hasattr(Worker, "settle_weights"):
        Worker.settle_weights = settle_weights  # type: ignore[attr-defined]
