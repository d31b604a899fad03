"""Packed rows, the output head in chunks, and which models read what."""

import warnings
from typing import Any

import pytest
import torch

from agentic_opd.training import logprobs
from agentic_opd.training.logprobs import head_logprobs, selected_logprobs
from agentic_opd.training.packing import WORTH_SHARING, Span, pack, packed_parts
from agentic_opd.training.policy import TrainedPolicy, Ways

LONG = [*range(1, WORTH_SHARING + 1)]


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens_BT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    attended_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens_BT[i, : len(row)], attended_BT[i, : len(row)] = torch.tensor(row), True
    return tokens_BT, attended_BT


def test_what_begins_alike_stands_in_the_row_once() -> None:
    """Two of a group go on alike after what all four begin with; nothing is left of a fifth."""
    rows = [[*LONG, 50, *LONG, 60], [*LONG, 51], [*LONG, 50, *LONG, 61, 62], [], [*LONG]]
    row, size = pack(*padded(rows)), WORTH_SHARING
    beginning, middle = (0, size), (size, 2 * size + 1)
    assert row.tokens_N.tolist() == [*LONG, 50, *LONG, 60, 61, 62, 51]
    assert row.spans == (
        Span(beginning, ()),
        Span(middle, (beginning,)),
        Span((2 * size + 1, 2 * size + 2), (beginning, middle)),
        Span((2 * size + 2, 2 * size + 4), (beginning, middle)),
        Span((2 * size + 4, 2 * size + 5), (beginning,)),
    )
    for tokens, places in zip(rows, row.indices_BT, strict=True):
        assert row.tokens_N[places[: len(tokens)]].tolist() == tokens
        assert row.positions_N[places[: len(tokens)]].tolist() == [*range(len(tokens))]
        assert (places[len(tokens) :] == -1).all()


def test_a_short_beginning_is_not_shared() -> None:
    row = pack(*padded([[1, 2, 3], [1, 2, 4], [1, 2, 3]]))
    assert row.tokens_N.tolist() == [1, 2, 3, 1, 2, 3, 1, 2, 4]
    assert {span.before for span in row.spans} == {()}


def test_a_span_sees_what_it_follows_and_itself_up_to_each_token() -> None:
    row = pack(*padded([[*LONG, 50, 51], [*LONG, 60]]))
    first, second, _ = row.spans
    assert row.mask(first, None) is None
    seen = row.mask(second, None)
    assert seen is not None
    assert seen.sum(1).tolist() == [WORTH_SHARING + 1, WORTH_SHARING + 2]
    near, last = row.mask(second, 3), WORTH_SHARING + 1
    assert near is not None
    assert [line.nonzero()[:, 0].tolist() for line in near] == [
        [last - 3, last - 2, last - 1],
        [last - 2, last - 1, last],
    ]


def test_parts_hold_what_begins_alike_and_no_more_than_they_may() -> None:
    rows = [[9, *LONG], [*LONG, 50], [9, 8], [*LONG, 51], [], [*LONG, 52]]
    assert [*packed_parts(*padded(rows), WORTH_SHARING + 3)] == [[1, 3, 5], [0, 2]]
    assert [*packed_parts(*padded(rows), 1)] == [[1], [3], [5], [0], [2]]


@pytest.mark.parametrize("chunk", [1, 2**24])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_heads_logprobs_and_gradients_are_those_of_all_logits(
    chunk: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_VALUES", chunk)
    torch.manual_seed(0)
    leaves = [torch.randn(7, 5, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)]
    leaves += [torch.randn(11, dtype=torch.float64)] if has_bias else []
    ids, upstream = torch.randint(11, (7, 3)), torch.randn(7, 3, dtype=torch.float64)

    def run(of: Any) -> list[torch.Tensor]:
        given = [leaf.clone().requires_grad_() for leaf in leaves]
        chosen = of(*given)
        (chosen * upstream).sum().backward()
        return [chosen.detach(), *(leaf.grad for leaf in given if leaf.grad is not None)]

    def plain(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, weight, bias)
        return logits.log_softmax(-1).gather(-1, ids)

    ours = run(lambda hidden, weight, bias=None: head_logprobs(hidden, weight, ids, bias))
    for mine, theirs in zip(ours, run(plain), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_in_half_precision_sums_are_float32_and_frozen_weights_get_no_gradient() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 8).bfloat16().requires_grad_(), torch.randn(4096, 8)
    ids = torch.randint(4096, (4, 2))
    with torch.autocast("cpu", torch.bfloat16):
        chosen = head_logprobs(hidden, weight, ids)
    assert chosen.dtype == torch.float32
    logits = torch.nn.functional.linear(hidden.detach(), weight.bfloat16())
    torch.testing.assert_close(chosen.detach(), logits.float().log_softmax(-1).gather(-1, ids))
    chosen.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def kept_bytes(positions: int, vocab: int) -> int:
    """Bytes that autograd keeps of the head's forward pass, without its weights."""
    hidden, weight = torch.randn(positions, 16, requires_grad=True), torch.randn(vocab, 16, requires_grad=True)
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chosen = head_logprobs(hidden, weight, torch.zeros(positions, 51, dtype=torch.int64))
    saved.pop(weight.untyped_storage().data_ptr(), None)
    del chosen
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.slow
def test_a_position_of_a_large_vocabulary_keeps_no_more_than_one_of_a_small_vocabulary() -> None:
    small, large = ((kept_bytes(96, vocab) - kept_bytes(64, vocab)) / 32 for vocab in (1_024, 262_144))
    assert large == small < 1_200


def make_model(kind: str, **changes: Any) -> Any:
    with warnings.catch_warnings():  # torch's and transformers' own deprecations
        warnings.simplefilter("ignore")
        import transformers

        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 64}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
        config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **changes)
        return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


WINDOW = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any], Ways]] = {
    "qwen3": ("Qwen3", {}, Ways()),
    "tied": ("Qwen3", {"tie_word_embeddings": True}, Ways()),
    "llama": ("Llama", {}, Ways()),
    "window": ("Qwen2", WINDOW, Ways()),
    "softcap": ("Gemma2", {"final_logit_softcapping": 0.5}, Ways(by_head=False, is_packed=False)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_read_in_a_way_that_gives_its_own_logprobs(name: str, caplog: pytest.LogCaptureFixture) -> None:
    kind, changes, expected = MODELS[name]
    model = make_model(kind, **changes)
    rows = [[*LONG, 50, 51, 52], [*LONG, 60, 61], [40, 41, 42], [*LONG, 50, 51, 53, 54]]
    tokens_BT, attended_BT = padded(rows)
    ids_BTK = torch.stack((tokens_BT, (tokens_BT + 7) % 64), -1)
    wanted_BT = attended_BT & (tokens_BT > 39)
    with torch.no_grad():
        own = selected_logprobs(model(tokens_BT, attention_mask=attended_BT.long()).logits, ids_BTK)
        policy = TrainedPolicy(model)
        policy.find_ways()
        read = policy(tokens_BT, attended_BT, ids_BTK, wanted_BT)
        again = selected_logprobs(model(tokens_BT, attention_mask=attended_BT.long()).logits, ids_BTK)
    assert policy.ways == expected
    said = [record.message for record in caplog.records if "padded, with all logits at once" in record.message]
    assert len(said) == (name == "softcap")
    assert all("nats apart in the shorter way" in message for message in said)
    assert read.computed_tokens == sum(map(len, rows)) - (2 * WORTH_SHARING if policy.ways.is_packed else 0)
    wanted_BT[:, 0] = False
    torch.testing.assert_close(read.chosen_BTK[wanted_BT], own[wanted_BT], atol=1e-5, rtol=1e-5)
    assert not read.chosen_BTK[~wanted_BT].any()
    torch.testing.assert_close(again, own)  # Its ordinary calls are what they were.
