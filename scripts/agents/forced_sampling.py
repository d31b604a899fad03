"""Logits processors of vLLM for the servers of `scripts/agents/try_agents` and `scripts/bench/gateway` alone.

`--logits-processors agents.forced_sampling:ForcedSampling` forces the sampled ids to a client's script: the server
samples as usual, from logits in which one id is left. Logprobs are computed before, so they are those of the weights,
and a turn can be computed again. The file that `SCRIPT_VARIABLE` names holds the name of the client whose script
counts; it is read for each request. With `EndlessSampling` an answer of the demo policy has as many tokens as its
client allows.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from agents.clients import CLIENTS, SCRIPT_VARIABLE, scripted

JUDGE_MARK, VERDICT = "[HINT_START]", "\\boxed{1}\n[HINT_START]Print the number of the command.[HINT_END]"
"""What a judge's prompt contains, and what it says."""


class Forced(NamedTuple):
    """One request: the ids of its script, and those that were sampled, a list that vLLM extends."""

    ids: list[int]
    sampled: list[int]


class ForcedSampling(LogitsProcessor):
    """Leaves each request the next id of its script."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer)
        self._requests: dict[int, Forced] = {}

    def is_argmax_invariant(self) -> bool:
        """See `LogitsProcessor`: also greedy samples are forced."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests through the rows of the batch."""
        process_dict_updates(self._requests, batch_update, self._forced)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave one id in each row [B, V] of a request."""
        for row, (ids, sampled) in self._requests.items():
            logits[row] = -torch.inf
            logits[row, ids[min(len(sampled), len(ids) - 1)]] = 0
        return logits

    def _forced(self, params: SamplingParams, prompt: list[int] | None, sampled: list[int]) -> Forced | None:
        if params.prompt_logprobs is not None:
            return None  # It is scored.
        text = self._tokenizer.decode(prompt)
        if JUDGE_MARK in text:
            answer = VERDICT
        else:
            client = CLIENTS[Path(os.environ[SCRIPT_VARIABLE]).read_text()]
            answer = scripted(client, text, only_calls=params.structured_outputs is not None)
        ids = self._tokenizer.encode(answer, add_special_tokens=False)
        return Forced([*ids, self._tokenizer.eos_token_id], sampled)


class EndlessSampling(LogitsProcessor):
    """Leaves out the control tokens of the demo policy, with which an answer ends or calls a tool."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        tokenizer: Any = AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer)
        names = ("<|im_end|>", "<|endoftext|>", "<|im_start|>", "<tool_call>")
        self._left_out = torch.tensor(tokenizer.convert_tokens_to_ids(names), device=device)

    def is_argmax_invariant(self) -> bool:
        """See `LogitsProcessor`."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Treat all requests alike."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Make the control tokens impossible in all rows [B, V]."""
        logits[:, self._left_out] = -torch.inf
        return logits
