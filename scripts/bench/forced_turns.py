"""Turns that are forced upon a model of random weights, by a logits processor in vLLM.

The engine computes and samples as usual, but one token is left to sample at each position. A request's seed decides: a
turn of an agent (`TURN_SEED` and above: words, then in nine of ten a call of `look_up`), or a judge's hint
(`JUDGE_SEED`). All others are left alone. Equal seeds give equal texts, so a run and its replay do the same work, and
log-probabilities are those of the weights.

    vLLM's V2 model runner: --logits-processors bench.forced_turns:ForcedTurns
    vLLM's V1 model runner, as on a CPU: --logits-processors bench.forced_turns:ForcedTurnsV1
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor
except ImportError:  # vLLM is older than that runner's processors.
    LogitsProcessor = object  # type: ignore[assignment, misc]
from vllm.v1.sample.logits_processor import LogitsProcessor as V1LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from bench.forced_seeds import JUDGE_SEEDS, TURN_SEED

LONGEST = 480
"""Tokens of a text at most, its end included."""
_WORDS = (60, 200)
"""Tokens of words before a turn's call: at least, at most."""
_HINT = "Look at what the last answer lacks, and ask for that part by its name before you write."
_VERDICT = f"\\boxed{{1}}\n[HINT_START]{_HINT}[HINT_END]"
_VOCABULARY = ("look", "list", "names", "find", "name", "text", "asks", "then", "return", "number", "sum", "value")


class Texts:
    """Texts by seed, as ids of a checkpoint's tokenizer."""

    def __init__(self, model: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._end = self._tokenizer.token_to_id("<|im_end|>")
        self._verdict = [*self._ids(_VERDICT), self._end]
        self._words = [self._ids(f" {word}") for word in _VOCABULARY]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def of_seed(self, seed: int | None) -> list[int] | None:
        """Return the ids that a request samples, or None if it is left alone."""
        if seed in JUDGE_SEEDS:
            return self._verdict
        if seed is None or seed < TURN_SEED:
            return None
        drawn = random.Random(seed)
        ids, length = self._ids(f"Note {drawn.randrange(10**6)}:"), drawn.randint(*_WORDS)
        while len(ids) < length:
            ids += drawn.choice(self._words)
        if drawn.random() < 0.9:
            subject = f"list {drawn.randrange(1000)}, " + " ".join(drawn.choices(_VOCABULARY, k=8))
            call = f'{{"name": "look_up", "arguments": {{"subject": "{subject}"}}}}'
            ids += self._ids(f"\n<tool_call>\n{call}\n</tool_call>")
        return [*ids[: LONGEST - 1], self._end]


class ForcedTurns(LogitsProcessor):
    """For the V2 model runner. The texts are on the device, and a step costs a few small kernels."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._texts = Texts(Path(vllm_config.model_config.tokenizer))
        self._prompt_lengths, self._device = req_states.prompt_len, req_states.device
        slots = req_states.max_num_reqs
        self._ids = torch.zeros(slots, LONGEST, dtype=torch.int64, device=self._device)
        self._lengths = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._is_forced = np.zeros(slots, dtype=bool)
        self._staged: dict[int, list[int]] = {}

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Note the text of a request, or that its slot has none."""
        ids = self._texts.of_seed(sampling_params.seed)
        if ids is not None or self._is_forced[req_idx]:
            self._staged[req_idx] = ids or []
        self._is_forced[req_idx] = ids is not None
        return ids is not None

    def apply_staged_writes(self) -> None:
        """Copy new texts to the device."""
        if not self._staged:
            return
        texts = list(self._staged.values())
        rows = torch.zeros(len(texts), LONGEST, dtype=torch.int64)
        for row, ids in zip(rows, texts, strict=True):
            row[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
        slots = torch.tensor(list(self._staged)).to(self._device, non_blocking=True)
        self._ids[slots] = rows.to(self._device, non_blocking=True)
        self._lengths[slots] = torch.tensor([len(ids) for ids in texts]).to(self._device, non_blocking=True)
        self._staged = {}

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Leave one id in each row of a forced request."""
        if not self._is_forced[ctx.idx_mapping_np].any():
            return logits
        slots = ctx.expanded_idx_mapping.long()
        lengths = self._lengths[slots]
        sampled = ctx.pos.long() + 1 - self._prompt_lengths.gpu[slots].long()
        positions = sampled.clamp(min=0).minimum((lengths - 1).clamp(min=0))
        ids = self._ids[slots, positions][:, None]
        is_forced = (lengths > 0)[:, None]
        unchanged = logits.gather(1, ids)
        logits.masked_fill_(is_forced, -torch.inf)
        return logits.scatter_(1, ids, torch.where(is_forced, 0.0, unchanged))


class ForcedTurnsV1(V1LogitsProcessor):
    """For the V1 model runner."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._texts = Texts(Path(vllm_config.model_config.tokenizer))
        self._requests: dict[int, tuple[list[int], Sequence[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """Return that the most likely token changes."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the requests that come, go and change their rows."""

        def state(params: Any, _: Any, sampled: Sequence[int]) -> tuple[list[int], Sequence[int]] | None:
            ids = self._texts.of_seed(params.seed)
            return None if ids is None else (ids, sampled)

        process_dict_updates(self._requests, batch_update, state)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave one id in each row of a forced request."""
        for row, (ids, sampled) in self._requests.items():
            logits[row] = -torch.inf
            logits[row, ids[min(len(sampled), len(ids) - 1)]] = 0.0
        return logits
