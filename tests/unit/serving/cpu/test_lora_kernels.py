"""The LoRA kernels for CPUs: the products of vLLM's own, and nothing for tokens without an adapter."""

import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="the plugin runs inside vLLM, which is not installed")

with warnings.catch_warnings():  # torch's and vLLM's own deprecations
    warnings.simplefilter("ignore")
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

from agentic_opd.serving.cpu.lora_kernels import expand, expand_slice, shrink, skip_tokens_without_adapter

KERNELS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
VLLMS: dict[str, Any] = {name: getattr(lora_ops, name) for name in KERNELS}
SLOTS = torch.tensor([2, 0, 2, 1])


def filled(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(3, 4, 6), (3, 1, 4, 6)])
@pytest.mark.parametrize("columns", [4, 7])
def test_tokens_with_an_adapter_get_what_vllm_computes(shape: tuple[int, ...], columns: int) -> None:
    x, weights = filled(4, 6), filled(*shape)
    for own, name, options in (
        (shrink, "bgmv_shrink", (0.5,)),
        (expand, "bgmv_expand", (True,)),
        (expand, "bgmv_expand", (False,)),
        (expand_slice, "bgmv_expand_slice", (columns - 4, 4, True)),
        (expand_slice, "bgmv_expand_slice", (columns - 4, 4, False)),
    ):
        ours, theirs = filled(4, columns), filled(4, columns)
        own(x, weights, ours, SLOTS, *options)
        VLLMS[name](x, weights, theirs, SLOTS, *options)
        torch.testing.assert_close(ours, theirs)


def test_tokens_without_an_adapter_stay_as_they_are() -> None:
    x, weights, slots = filled(4, 6), filled(3, 4, 6), torch.tensor([-1, 0, -1, 2])
    for own, options in ((shrink, (1.0,)), (expand, (True,)), (expand_slice, (0, 4))):
        before, output = filled(4, 4), filled(4, 4)
        own(x, weights, output, slots, *options)
        assert torch.equal(output[[0, 2]], before[[0, 2]])
        assert not torch.isclose(output[[1, 3]], before[[1, 3]]).any()


def test_all_of_vllms_kernels_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lora_ops, punica_cpu):
        for name in KERNELS:
            monkeypatch.setattr(module, name, VLLMS[name])
    skip_tokens_without_adapter()
    output = torch.zeros(4, 4)
    one = torch.ones(4, dtype=torch.int64)
    lora_ops.sgmv_expand(
        filled(4, 6), filled(3, 4, 6), output, one, one, torch.full((4,), -1), 4, 1, 4, add_inputs=True
    )
    assert not output.any()
    assert (lora_ops.bgmv_expand, punica_cpu.bgmv_shrink) == (expand, shrink)
