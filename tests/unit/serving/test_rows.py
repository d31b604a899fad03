"""Rows out of the engine's two forms of prompt logprobs."""

import numpy as np
import pytest

from . import fakes  # noqa: F401  # skips where vLLM is not installed


def test_both_forms_give_the_same_rows() -> None:
    """Prompt [5 6 7], two logprobs a row; no row about 5."""
    import torch
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.outputs import LogprobsTensors

    from agentic_opd.serving.rows import last_rows

    ids, logprobs = [[6, 1, 2], [7, 7, 3]], [[-2.0, -0.5, -1.0], [-0.25, -0.25, -3.0]]
    flat = FlatLogprobs()
    flat.append(None)
    for row, values in zip(ids, logprobs, strict=True):
        flat.append_fast(row, values, [1, 1, 2], [None] * 3)  # type: ignore[arg-type]
    tensors = LogprobsTensors(torch.tensor(ids, dtype=torch.int32), torch.tensor(logprobs), torch.tensor([3, 1]))
    for form in (flat, tensors):
        for rows in (1, 2):
            got_ids, got_logprobs = last_rows(form, rows)
            assert (got_ids.dtype, got_logprobs.dtype) == (np.int32, np.float32)
            assert got_ids.tolist() == ids[-rows:]
            assert got_logprobs.tolist() == logprobs[-rows:]


@pytest.mark.parametrize(
    ("ids", "logprobs", "fit"),
    [
        ([[4, 1], [5, 2]], [[-1.0, -0.5], [-2.0, -0.1]], True),
        ([[4, 1], [5, 2]], [[-1.0, -0.5], [-2.0, float("-inf")]], True),
        ([[4, 1], [6, 2]], [[-1.0, -0.5], [-2.0, -0.1]], False),
        ([[5, 2]], [[-2.0, -0.1]], False),
        ([[4, 1], [5, 2]], [[-1.0, -0.5], [float("-inf"), -0.1]], False),
        ([[4, 1], [5, 2]], [[-1.0, -0.5], [-2.0, float("nan")]], False),
        ([[4, 1], [5, 2]], [[-1.0, 0.5], [-2.0, -0.1]], False),
    ],
)
def test_rows_that_cannot_be_the_tokens_own_are_known(
    ids: list[list[int]], logprobs: list[list[float]], fit: bool
) -> None:
    from agentic_opd.serving.rows import rows_fit

    assert rows_fit(np.array(ids, np.int32), np.array(logprobs, np.float32), [4, 5]) is fit
