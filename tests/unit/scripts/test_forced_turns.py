"""Forced turns of scripts/bench: the texts of seeds, and the logits processor of vLLM's V2 runner on a CPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from demo_policy import POLICY_DIR

pytest.importorskip("vllm", reason="the processor runs inside vLLM, which is not installed")
from bench.forced_seeds import JUDGE_SEED, TURN_SEED
from bench.forced_turns import LONGEST, ForcedTurns, Texts
from tokenizers import Tokenizer

VOCAB = 1536
TOKENIZER = Tokenizer.from_file(str(POLICY_DIR / "tokenizer.json"))


def test_a_seed_decides_the_text() -> None:
    texts = Texts(POLICY_DIR)
    turns = [
        TOKENIZER.decode(texts.of_seed(TURN_SEED + number) or [], skip_special_tokens=False) for number in range(50)
    ]
    assert len(set(turns)) == 50
    assert all(turn.endswith("<|im_end|>") for turn in turns)
    assert 38 <= sum("<tool_call>" in turn for turn in turns) < 50
    assert texts.of_seed(TURN_SEED) == Texts(POLICY_DIR).of_seed(TURN_SEED)
    assert texts.of_seed(JUDGE_SEED) == texts.of_seed(JUDGE_SEED + 2)
    assert "[HINT_START]" in TOKENIZER.decode(texts.of_seed(JUDGE_SEED) or [])
    assert [texts.of_seed(seed) for seed in (None, 0, JUDGE_SEED - 1, TURN_SEED - 1)] == [None] * 4


def processor(slots: int, prompt_lengths: list[int]) -> ForcedTurns:
    config = SimpleNamespace(model_config=SimpleNamespace(tokenizer=str(POLICY_DIR)))
    lengths = SimpleNamespace(gpu=torch.tensor(prompt_lengths))
    states = SimpleNamespace(prompt_len=lengths, device=torch.device("cpu"), max_num_reqs=slots)
    return ForcedTurns(config, states)


def context(slots: list[int], positions: list[int]) -> Any:
    rows = torch.tensor(slots)
    return SimpleNamespace(expanded_idx_mapping=rows, idx_mapping_np=np.array(slots), pos=torch.tensor(positions))


def test_the_rows_of_forced_requests_have_one_id_left_and_the_others_are_whole() -> None:
    forced = processor(3, [10, 20, 30])
    script = Texts(POLICY_DIR).of_seed(TURN_SEED + 7)
    assert script is not None
    assert len(script) <= LONGEST
    assert forced.add_request(0, SimpleNamespace(seed=TURN_SEED + 7))
    assert not forced.add_request(2, SimpleNamespace(seed=None))
    forced.apply_staged_writes()
    for sampled in (0, 5, len(script) - 1, len(script) + 3):  # The last ids follow each other where the end is ignored.
        logits = torch.randn(2, VOCAB)
        unchanged = logits.clone()
        result = forced.apply(logits, context([2, 0], [29, 10 - 1 + sampled]))
        assert torch.equal(result[0], unchanged[0])
        assert result[1].argmax() == script[min(sampled, len(script) - 1)]
        assert torch.isinf(result[1]).sum() == VOCAB - 1


def test_a_slot_that_is_used_again_is_no_longer_forced() -> None:
    forced = processor(1, [4])
    forced.add_request(0, SimpleNamespace(seed=JUDGE_SEED))
    forced.apply_staged_writes()
    forced.add_request(0, SimpleNamespace(seed=3))
    forced.apply_staged_writes()
    logits = torch.randn(1, VOCAB)
    assert torch.equal(forced.apply(logits.clone(), context([0], [3])), logits)
