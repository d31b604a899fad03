"""The adapter that makes one policy of another is exact, and refuses what no adapter changes."""

from pathlib import Path

import pytest
import torch
from demo_policy.change import change_as_adapter, factors
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.support.tiny_model import save_tiny_model


def test_the_factors_of_any_shape_multiply_to_the_change() -> None:
    for shape in ((3, 5), (5, 3), (4, 4)):
        change = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
        a, b = factors(change, 4)
        assert (a.shape, b.shape) == ((4, shape[1]), (shape[0], 4))
        assert torch.equal(b @ a, change)


@pytest.mark.slow
def test_the_adapter_makes_the_second_policy_of_the_first(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "before", "float32")
    before = AutoModelForCausalLM.from_pretrained(folder)
    after = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in after.named_parameters():
            if value.ndim == 2 and ".layers." in name:
                value += torch.randint(-8, 9, value.shape) / 64
    weights, config = change_as_adapter(before.state_dict(), after.state_dict())
    assert config["r"] == before.config.hidden_size
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(weights, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    (adapter / "adapter_config.json").write_text(str(config).replace("'", '"'))
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected = after(input_ids=tokens).logits
        assert not torch.allclose(before(input_ids=tokens).logits, expected)
        found = PeftModel.from_pretrained(before, adapter)(input_ids=tokens).logits
    torch.testing.assert_close(found, expected)


def test_a_change_elsewhere_is_refused(tmp_path: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path / "before", "float32")).state_dict()
    after = {name: value.clone() for name, value in before.items()}
    after["model.embed_tokens.weight"][0] += 1
    with pytest.raises(ValueError, match=r"no adapter changes model\.embed_tokens\.weight"):
        change_as_adapter(before, after)
