"""Ids by name on vLLM's V2 model runner, which runs on a CPU in Triton's interpreter, slowly but with its own code."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
from bench.local_server import local_server

from agentic_opd.core.http import JsonClient
from agentic_opd.core.types import TeacherRequest
from agentic_opd.plugin.client import PluginClient
from agentic_opd.plugin.scoring import Reading, TeacherReply
from tests.support.places import MODEL, ROOT
from tests.support.plugin_client import TOLERANCE, ask, random_ids
from tests.support.vllm import Forward

pytestmark = [pytest.mark.vllm, pytest.mark.all]


def test_a_turn_is_scored_at_the_ids_of_other_readings(forward: Forward, tmp_path: Path) -> None:
    context, hint, other, turn = (random_ids(seed, n, 1000) for seed, n in ((1, 640), (2, 30), (3, 20), (4, 40)))
    hinted, plain, control = (
        TeacherRequest((*context, *between, *turn), 40, 640, tuple(between)) for between in (hint, [], other)
    )

    async def scored(url: str) -> TeacherReply:
        client = await PluginClient.connected(JsonClient(url))
        try:
            assert client.info.named_ids
            return await client.score(hinted, 5, (Reading(plain, 50), Reading(control, 1, ids_of=(0, 1))), (1,))
        finally:
            await client.close()

    interpreted = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    path = {"PYTHONPATH": f"{ROOT / 'tests/support/triton_cpu'}:{os.environ.get('PYTHONPATH', '')}"}
    log = tmp_path / "vllm.log"
    with local_server(MODEL, "--max-model-len", "2048", log=log, cwd=ROOT, variables=interpreted | path) as server:
        assert ask(server, "/generate", {"prompt": context + turn, "max_tokens": 1}).status == 200
        reply = asyncio.run(scored(server.base_url))
    assert reply.cached_tokens is not None
    assert reply.cached_tokens >= 3 * 512, "each reading takes the context from the cache"
    of_plain, of_control = reply.also
    assert of_plain is not None
    assert of_control is not None
    ids = of_plain.top_ids_RK
    named = {hinted: (reply.rows, ids), control: (of_control, np.hstack([reply.rows.top_ids_RK, ids]))}
    for request, (rows, ids_RN) in named.items():
        assert rows.named_logprobs_RN is not None
        expected = np.take_along_axis(forward(list(request.token_ids))[-41:-1], ids_RN.astype(int), axis=1)
        np.testing.assert_allclose(rows.named_logprobs_RN, expected, atol=TOLERANCE, rtol=0)
