"""The command's own server and trainer: what they are started with, and that nothing is left of them."""

import asyncio
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import ConfigError
from agentic_opd.learn import processes
from agentic_opd.learn.processes import ChildFailedError, copy_folder, policy_server, train

SERVER = """
import http.server, json, subprocess, sys
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--weights-root") + 1])
left = subprocess.Popen(["sleep", "600"], start_new_session=True)
(folder / "started.json").write_text(json.dumps({"argv": sys.argv[1:], "orphan": left.pid}))
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()
"""
USER = """
import asyncio, sys
from pathlib import Path
from agentic_opd.learn import processes
processes.PROGRAM = (sys.executable, "-c", sys.argv[2])
async def main():
    async with processes.policy_server("m", Path(sys.argv[1]), 9, ["--max-model-len", "64"]) as url:
        print(url)
asyncio.run(main())
"""


@pytest.mark.processes
def test_a_server_of_its_own_ends_with_all_that_it_started(tmp_path: Path) -> None:
    """In a process of its own: it kills all children of its process."""
    done = subprocess.run(
        [sys.executable, "-c", USER, str(tmp_path), SERVER], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.startswith("http://127.0.0.1:")
    started = json.loads((tmp_path / "started.json").read_text())
    before, after = (started["argv"][part] for part in (slice(0, -3), slice(-3, None)))
    assert before[:2] == ["serve-vllm", "m"]
    assert before[before.index("--max-lora-rank") + 1] == "16"
    assert after == ["--", "--max-model-len", "64"]
    assert not Path(f"/proc/{started['orphan']}").exists()


def test_without_vllm_a_server_has_to_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> bool:
        raise PackageNotFoundError("vllm")

    async def serve() -> None:
        async with policy_server("m", tmp_path, 8, ()):
            raise AssertionError("it serves")

    monkeypatch.setattr(processes, "is_cpu_build", missing)
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        asyncio.run(serve())


TRAINER = """
import json, os, sys
from pathlib import Path
settings = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
folder = Path(settings["output_dir"])
folder.mkdir(exist_ok=True)
(folder / "metrics.jsonl").write_text("{}\\n" * 3)
(folder / "started.json").write_text(json.dumps({"argv": sys.argv[1:], "key": os.environ.get("VLLM_API_KEY")}))
print("the last words")
sys.exit(settings["code"])
"""


def trained(folder: Path, code: int, monkeypatch: pytest.MonkeyPatch, *, is_resumed: bool = False) -> dict[str, Any]:
    monkeypatch.setattr(processes, "PROGRAM", (sys.executable, "-c", TRAINER))
    out = folder / "train"
    asyncio.run(train({"output_dir": str(out), "code": code}, out, "secret", 3, is_resumed=is_resumed))
    return json.loads((out / "started.json").read_text())


@pytest.mark.processes
def test_the_trainer_is_resumed_and_its_key_is_on_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = trained(tmp_path, 0, monkeypatch)
    assert started["argv"][-2:] == ["--overwrite", "true"]
    assert started["key"] == "secret"
    assert trained(tmp_path, 0, monkeypatch, is_resumed=True)["argv"][-2:] == ["--resume", "true"]
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file() and path.name != "started.json"]
    assert not any("secret" in text for text in texts)


@pytest.mark.processes
@pytest.mark.parametrize(("code", "kind"), [(1, ChildFailedError), (2, ConfigError)])
def test_a_trainer_that_fails_is_quoted(
    code: int, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(kind, match=f"ended with code {code}.*\n.*the last words"):
        trained(tmp_path, code, monkeypatch)


def test_a_folder_is_copied_as_a_whole(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "a").write_text("new")
    for _ in range(2):
        copy_folder(source, target)
        assert [path.name for path in target.iterdir()] == ["a"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
