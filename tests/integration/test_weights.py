"""The plugin on a real vLLM server with a weights root: new weights come and go, and what is none is refused."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.places import MODEL, ROOT
from tests.support.plugin_client import Scored, ask, check, random_ids, score
from tests.support.vllm import Forward, RootedServer

pytestmark = pytest.mark.vllm


@pytest.fixture
def moved(rooted: RootedServer) -> RootedServer:
    """A server with weights that it does not serve yet in `other`."""
    write_moved(rooted.root / "other")
    return rooted


def write_moved(folder: Path) -> None:
    """A checkpoint that is not the demo policy's."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / MODEL, folder)
    rng = np.random.default_rng(0)
    weights = load_file(folder / "model.safetensors")
    noisy = {name: (w * (1 + 0.2 * rng.standard_normal(w.shape))).astype(w.dtype) for name, w in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})


def test_new_weights_come_and_go(moved: RootedServer, forward: Forward) -> None:
    """Requests under way end with the weights that they began with; what is cached of them is never read again."""
    server, ids = moved.server, random_ids(15, 300, 1000)
    expected = {name: forward(ids, moved.root / name) for name in ("first", "other")}
    assert np.abs(expected["first"] - expected["other"]).max() > 0.1

    def scored() -> Scored:
        return score(server, [(ids, 100)])[0]

    check(scored(), ids, 100, 50, expected["first"])
    with ThreadPoolExecutor(8) as pool:
        body = {"prompt": ids, "max_tokens": 60, "ignore_eos": True}
        sampled = [pool.submit(ask, server, "/generate", body) for _ in range(4)]
        reply = ask(server, "/v1/opd/reload_weights", {"path": str(moved.root / "other")})
        assert reply == (200, {"weight_version": 1})
        assert all(future.result().body["finish_reasons"] == ["length"] for future in sampled)
    for _ in range(2):
        check(scored(), ids, 100, 50, expected["other"])
    assert ask(server, "/v1/opd/info", None).body["weight_version"] == 1
    reply = ask(server, "/v1/opd/reload_weights", {"path": "first", "version": 7})
    assert reply == (200, {"weight_version": 7})
    check(scored(), ids, 100, 50, expected["first"])


def test_what_is_no_checkpoint_of_the_root_leaves_the_weights_alone(moved: RootedServer, forward: Forward) -> None:
    (moved.root / "link").symlink_to(ROOT / MODEL)
    (moved.root / "half").mkdir()
    weights = load_file(moved.root / "first" / "model.safetensors")
    save_file(dict(list(weights.items())[1:]), moved.root / "half" / "model.safetensors")
    for path, status in ((str(ROOT / MODEL), 403), ("link", 403), ("../..", 403), ("nowhere", 400), ("half", 400)):
        reply = ask(moved.server, "/v1/opd/reload_weights", {"path": path})
        assert (reply.status, reply.body["error"]["field"]) == (status, "path"), path
    ids = random_ids(16, 80, 1000)
    check(score(moved.server, [(ids, 40)])[0], ids, 40, 50, forward(ids))
