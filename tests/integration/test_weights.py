"""The plugin on a real vLLM server with an API key and a weights root: who may ask, new weights, a dead engine."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from local_server import LocalServer
from safetensors.numpy import load_file, save_file

from tests.support.places import MODEL, ROOT
from tests.support.plugin_client import Scored, ask, check, random_ids, running_requests, score
from tests.support.vllm import Forward, StartVllm

pytestmark = pytest.mark.vllm

KEY = "a key of the tests"


class Guarded(NamedTuple):
    """A server that wants `KEY`, and the directory that it loads weights from: `served` (in use at first), `other`."""

    server: LocalServer
    root: Path


@pytest.fixture(scope="module")
def guarded(start_vllm: StartVllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    root = tmp_path_factory.mktemp("weights")
    shutil.copytree(ROOT / MODEL, root / "served")
    shutil.copytree(ROOT / MODEL, root / "other")
    rng = np.random.default_rng(0)
    weights = load_file(root / "other" / "model.safetensors")
    moved = {name: (w * (1 + 0.2 * rng.standard_normal(w.shape))).astype(w.dtype) for name, w in weights.items()}
    save_file(moved, root / "other" / "model.safetensors", metadata={"format": "pt"})
    with start_vllm("--weights-root", str(root), VLLM_API_KEY=KEY) as server:
        yield Guarded(server, root)


def test_no_route_answers_without_the_key(guarded: Guarded) -> None:
    score_body = {"sequences": [{"token_ids": [1, 2], "num_scored": 1}], "top_k": 1}
    for path, body in (
        ("/generate", {"prompt": [1], "max_tokens": 1}),
        ("/v1/opd/score", score_body),
        ("/v1/opd/reload_weights", {"path": "other"}),
        ("/v1/opd/info", None),
    ):
        assert ask(guarded.server, path, body).status == 401, path
        assert ask(guarded.server, path, body, "wrong").status == 401, path
    assert ask(guarded.server, "/generate", {"prompt": [1], "max_tokens": 1}, KEY).status == 200
    assert ask(guarded.server, "/v1/opd/score", score_body, KEY).status == 200
    assert ask(guarded.server, "/v1/opd/info", None, KEY).body["weight_version"] == 0
    command_lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(KEY.encode() in line for line in command_lines)


def test_new_weights_come_and_go(guarded: Guarded, forward: Forward) -> None:
    """Requests under way end with the weights that they began with; what is cached of them is never read again."""
    server, ids = guarded.server, random_ids(15, 300, 1000)
    expected = {name: forward(ids, guarded.root / name) for name in ("served", "other")}
    assert np.abs(expected["served"] - expected["other"]).max() > 0.1

    def scored() -> Scored:
        return score(server, [(ids, 100)], key=KEY)[0]

    check(scored(), ids, 100, 50, expected["served"])
    with ThreadPoolExecutor(8) as pool:
        body = {"prompt": ids, "max_tokens": 60, "ignore_eos": True}
        sampled = [pool.submit(ask, server, "/generate", body, KEY) for _ in range(4)]
        reply = ask(server, "/v1/opd/reload_weights", {"path": str(guarded.root / "other")}, KEY)
        assert reply == (200, {"weight_version": 1})
        assert all(future.result().body["finish_reasons"] == ["length"] for future in sampled)
    for _ in range(2):
        check(scored(), ids, 100, 50, expected["other"])
    assert ask(server, "/v1/opd/info", None, KEY).body["weight_version"] == 1
    reply = ask(server, "/v1/opd/reload_weights", {"path": "served", "version": 7}, KEY)
    assert reply == (200, {"weight_version": 7})
    check(scored(), ids, 100, 50, expected["served"])


def test_what_is_no_checkpoint_of_the_root_leaves_the_weights_alone(guarded: Guarded, forward: Forward) -> None:
    (guarded.root / "link").symlink_to(ROOT / MODEL)
    (guarded.root / "half").mkdir()
    weights = load_file(guarded.root / "served" / "model.safetensors")
    save_file(dict(list(weights.items())[1:]), guarded.root / "half" / "model.safetensors")
    for path, status in ((str(ROOT / MODEL), 403), ("link", 403), ("../..", 403), ("nowhere", 400), ("half", 400)):
        reply = ask(guarded.server, "/v1/opd/reload_weights", {"path": path}, KEY)
        assert (reply.status, reply.body["error"]["field"]) == (status, "path"), path
    ids = random_ids(16, 80, 1000)
    check(score(guarded.server, [(ids, 40)], key=KEY)[0], ids, 40, 50, forward(ids))


def test_a_dead_engine_is_an_error_of_the_server(guarded: Guarded) -> None:
    """The last test on this server."""
    children = Path(f"/proc/{guarded.server.process.pid}/task/{guarded.server.process.pid}/children")
    engines = [int(pid) for pid in children.read_text().split() if b"EngineCore" in comm(int(pid))]
    assert len(engines) == 1
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": [1, 2, 3], "max_tokens": 8000, "ignore_eos": True}
        sampled = pool.submit(ask, guarded.server, "/generate", body, KEY)
        deadline = time.monotonic() + 60
        while not running_requests(guarded.server) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(engines[0], signal.SIGKILL)
        with suppress(OSError):  # The server may end before it has said so.
            assert sampled.result().status >= 500
    guarded.server.process.wait(60)


def comm(pid: int) -> bytes:
    """A process's name as `ps` shows it."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()
