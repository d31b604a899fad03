"""Packing: sequences concatenated in one row without padding, with shared prefixes computed once.

    sequences   a b c d e      a b c x      q r        row   a b c | d e | x | q r

A row consists of spans. A token attends to the earlier tokens of its span and to the spans that precede its span in its
sequences: `d` attends to `a b c`, `x` does not attend to `d`. The attention implementation (`ATTENTION`) is registered
with transformers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from agentic_opd.core.types import shared_length

WORTH_SHARING = 32
"""Shortest shared prefix, in tokens, that is computed once. Each span costs a separate attention call."""
ATTENTION = "agentic_opd_packed"
"""Name of the attention implementation in transformers' registry."""
ROW_ARGUMENT = "packed_row"
"""Name of the forward argument that carries the `PackedRow` to each layer's attention."""

Interval = tuple[int, int]
"""Start and end (exclusive) of tokens in the row."""


@dataclass(frozen=True, slots=True)
class Span:
    """Contiguous tokens of the row that belong to the same sequences."""

    interval: Interval
    before: tuple[Interval, ...]
    """The spans that precede this one in its sequences, in order."""

    @property
    def context(self) -> int:
        """Number of tokens before the span in its sequences."""
        return sum(end - start for start, end in self.before)


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A row of N tokens that holds B sequences of at most T tokens."""

    tokens_N: Tensor
    positions_N: Tensor
    """Position of each token in its sequence, from 0."""
    spans: tuple[Span, ...]
    """All spans, in the order of the row."""
    indices_BT: Tensor
    """int64: index in the row of each token of each sequence; -1 if padded."""
    _masks: dict[tuple[Span, int | None], Tensor] = field(default_factory=dict, repr=False)

    def mask(self, span: Span, window: int | None) -> Tensor | None:
        """Return the attention mask of a span over its context and itself, bool [S, context + S].

        None if the span has no context and no effective window, so that a causal mask suffices.
        """
        before, size = span.context, span.interval[1] - span.interval[0]
        if window is not None and window >= before + size:
            window = None
        if not before and window is None:
            return None
        if (span, window) not in self._masks:
            mask = torch.ones(size, before + size, dtype=torch.bool, device=self.tokens_N.device).tril(before)
            self._masks[span, window] = mask if window is None else mask.triu(before - window + 1)
        return self._masks[span, window]


def pack(tokens_BT: Tensor, attended_BT: Tensor) -> PackedRow:
    """Pack right-padded sequences into one row."""
    device = tokens_BT.device
    rows: list[list[int]] = [
        row[:length] for row, length in zip(tokens_BT.tolist(), attended_BT.sum(1).tolist(), strict=True)
    ]
    tokens, positions, spans = list[int](), list[int](), list[Span]()
    indices_BT = torch.full(tokens_BT.shape, -1)

    def lay(members: list[int], depth: int, before: tuple[Interval, ...]) -> None:
        for run in _runs(members, rows, depth + WORTH_SHARING):
            first = rows[run[0]]
            end = len(first) if len(run) == 1 else shared_length(first, rows[run[-1]])
            interval = (len(tokens), len(tokens) + end - depth)
            tokens.extend(first[depth:end])
            positions.extend(range(depth, end))
            spans.append(Span(interval, before))
            indices_BT[run, depth:end] = torch.arange(*interval)
            lay([member for member in run if len(rows[member]) > end], end, (*before, interval))

    lay([i for i in sorted(range(len(rows)), key=rows.__getitem__) if rows[i]], 0, ())
    tokens_N, positions_N = torch.tensor(tokens, device=device), torch.tensor(positions, device=device)
    return PackedRow(tokens_N, positions_N, tuple(spans), indices_BT.to(device))


def packed_parts(tokens_BT: Tensor, attended_BT: Tensor, max_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of the sequences of each row, of about `max_tokens` tokens; a shared prefix counts once.

    Sequences with a shared prefix are adjacent. Each part holds at least one sequence. Empty sequences are left out.
    """
    lengths: list[int] = attended_BT.sum(1).tolist()
    rows = {i: row[: lengths[i]] for i, row in enumerate(tokens_BT.tolist()) if lengths[i]}
    part, size = list[int](), 0
    for i in sorted(rows, key=rows.__getitem__):
        shared = shared_length(rows[part[-1]], rows[i]) if part else 0
        added = len(rows[i]) - (shared if shared >= WORTH_SHARING else 0)
        if part and size + added > max_tokens:
            yield part
            part, size, added = [], 0, len(rows[i])
        part.append(i)
        size += added
    if part:
        yield part


def _runs(members: Sequence[int], rows: Sequence[Sequence[int]], depth: int) -> Iterator[list[int]]:
    """Group adjacent members whose first `depth` tokens are equal."""
    run = list[int]()
    for member in members:
        if run and shared_length(rows[run[0]], rows[member]) < depth:
            yield run
            run = []
        run.append(member)
    if run:
        yield run


def use_packed_attention(model: Any) -> None:
    """Enable packed rows in a transformers model; calls without `ROW_ARGUMENT` use SDPA."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)


def packed_arguments(row: PackedRow) -> dict[str, Any]:
    """Return the forward arguments for a packed row; the model must use `ATTENTION`."""
    no_mask = torch.zeros(1, 1, 1, 1, device=row.tokens_N.device)  # transformers passes a 4-D mask through unchanged.
    tokens = {"input_ids": row.tokens_N[None], "position_ids": row.positions_N[None]}
    return {**tokens, "attention_mask": no_mask, "use_cache": False, ROW_ARGUMENT: row}


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend span by span. Shapes as in transformers: query [1, H, N, D], key and value [1, H / G, N, D].

    Returns:
        The attention output [1, N, H, D], and None for the attention weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    row: PackedRow | None = options.pop(ROW_ARGUMENT, None)
    if row is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    groups = query.shape[1] // key.shape[1]
    outputs = list[Tensor]()
    for span in row.spans:
        intervals = (*span.before, span.interval)
        keys, values = (torch.cat([states[:, :, start:end] for start, end in intervals], 2) for states in (key, value))
        mask = row.mask(span, options.get("sliding_window"))
        if mask is not None:  # torch has no fast kernel for a mask with grouped queries.
            keys, values = (states.repeat_interleave(groups, 1) for states in (keys, values))
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, slice(*span.interval)],
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                dropout_p=options.get("dropout", 0.0),
                scale=options.get("scaling"),
                enable_gqa=mask is None and groups > 1,
            )
        )
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None
