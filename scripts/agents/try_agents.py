"""Run clients from their registries before a gateway, and print what the gateway made of each conversation.

Each client is installed in a separate folder and runs in bubblewrap: no network but the gateway's address, an empty
home, no proxies and keys of this process. The policy is a random model of one layer with the demo policy's tokenizer,
in a real vLLM server that samples what `forced_sampling` leaves it: three calls of the client's tool, then the end. Its
logprobs are its weights', so that `agentic-opd validate --server` computes each scored turn again. Exit code 1: a
client failed, is not one session, or its groups are not valid.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from bench.local_server import ServerFailedError, local_server
from demo_policy import POLICY_DIR
from install.active_environment import command_parser
from rich.console import Console
from rich.table import Table

from agentic_opd.cli import validate
from agentic_opd.core.processes import end_of
from agentic_opd.gateway.journal import Journal, SessionState
from agentic_opd.gateway.turns import TurnTree
from agents.clients import CLIENTS, SCRIPT_VARIABLE, TOOL_TURNS, AgentClient
from agents.demo_gateway import ROOT, Served, gateway

FOLDER = ROOT / "runs" / "agents"
CONTEXT = 2**18
LIMIT_S = 300
GROUP_LIMIT_S = 120


class ClientFailedError(Exception):
    """A client can't be installed, or did not end by itself with code 0; the message ends with the end of its log."""


@dataclass
class AgentRow:
    """Result of one client's conversation."""

    client: str
    version: str = ""
    requests: int = 0
    """POST requests that the client sent."""
    refused: int = 0
    """Requests whose answer has a status of 400 or above."""
    sessions: int = 0
    branches: int = 0
    """Last turns of the main conversation: 1 if no history was rewritten."""
    main: int = 0
    """Sampled turns of the conversation."""
    side: int = 0
    """Sampled turns beside it, such as titles."""
    judged: int = 0
    """Turns with a vote of the judge."""
    scored: int = 0
    valid: bool = False
    """The groups pass `validate --server`, and each sampled token of the main turns is trained on."""
    error: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the client did all turns in one session, with valid groups."""
        return not self.error and self.valid and self.sessions == 1 and self.main > TOOL_TURNS


@dataclass(frozen=True, slots=True)
class Engine:
    """A vLLM server that samples the script of one client at a time."""

    base_url: str
    model: str
    script: Path

    def follow(self, name: str) -> None:
        """Sample the script of this client from now on."""
        self.script.write_text(name)


def save_model(folder: Path) -> Path:
    """Save a model that reads the prompts of all clients in seconds on one core: their attention is what costs."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "initializer_range": 0.2}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": CONTEXT}
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(POLICY_DIR, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config: Any = AutoConfig.from_pretrained(POLICY_DIR, **sizes, **heads, layer_types=["full_attention"])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@contextmanager
def engine(folder: Path = FOLDER) -> Generator[Engine]:
    """Serve the model while the body runs; its log is in the folder.

    Raises:
        ServerFailedError: the server did not start.
    """
    script, paths = folder / "script", f"{ROOT / 'scripts'}:{ROOT}"
    with local_server(
        save_model(folder / "model"),
        *("--", "--logits-processors", "agents.forced_sampling:ForcedSampling"),
        log=folder / "vllm.log",
        variables={"PYTHONPATH": paths, SCRIPT_VARIABLE: str(script)},
        cwd=ROOT,
    ) as server:
        yield Engine(server.base_url, server.model, script)


@dataclass
class Relay:
    """Hands connections to a Unix socket on to the gateway, and counts the requests: one to a connection."""

    path: Path
    port: int
    requests: int = 0
    refused: list[str] = field(default_factory=list[str])
    """Request line and the beginning of the answer, of each refused request."""

    def serve(self) -> socket.socket:
        """Listen until the returned socket is closed."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen(128)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self.port)) as server, suppress(OSError):
            first = client.recv(65536)
            is_post = first.startswith(b"POST ")
            self.requests += is_post
            server.sendall(first)
            threading.Thread(target=_pump, args=(client, server), daemon=True).start()
            answer = server.recv(65536)
            if is_post and answer[9:10] in (b"4", b"5"):
                self.refused.append(f"{first.splitlines()[0].decode()}: {answer[-300:].decode(errors='replace')}")
            client.sendall(answer)
            _pump(server, client)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(65536):
            target.sendall(chunk)


def install(client: AgentClient, folder: Path) -> Path:
    """Install a client's packages below `folder`, if they are missing; return the folder of its programs."""
    target = folder / client.packages[-1].replace("/", "+").split("[")[0]
    programs, stamp = target / ("node_modules/.bin" if client.is_npm else "bin"), target / ".installed"
    if stamp.exists():
        return programs
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    log = target / "install.log"
    if client.is_npm:
        for package in client.packages:  # The last one may run the programs of those before it.
            _run(["npm", "install", "--prefix", str(target), "--no-audit", "--no-fund", package], log, programs)
    else:
        _run([sys.executable, "-m", "venv", str(target)], log)
        _run([str(programs / "pip"), "install", "-q", "--disable-pip-version-check", *client.packages], log)
    stamp.touch()
    return programs


def version(client: AgentClient, programs: Path) -> str:
    """Return the installed version of a client's last package."""
    name = client.packages[-1].split("[")[0]
    if client.is_npm:
        return json.loads((programs.parent / name / "package.json").read_text())["version"]
    (folder,) = programs.parent.glob(f"lib/python3*/site-packages/{name.replace('-', '_')}-*.dist-info")
    return folder.name.removesuffix(".dist-info").rpartition("-")[2]


def _run(command: Sequence[str], log: Path, programs: Path = Path("/usr/bin")) -> None:
    variables = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    with log.open("ab") as output:
        code = subprocess.run(command, stdout=output, stderr=output, env=variables, check=False).returncode
    if code != 0:
        raise ClientFailedError(f"{' '.join(command[:3])} ended with {code}:\n{end_of(log)}")


def converse(client: AgentClient, programs: Path, scratch: Path, key: str) -> None:
    """Run a client to its end in bubblewrap; the socket of the gateway is in `scratch`.

    Raises:
        ClientFailedError: it ended with another code than 0, or not in time.
    """
    home, work, temporary = (scratch / name for name in ("home", "work", "tmp"))
    for folder in (home, work, temporary):
        folder.mkdir()
    for path, text in {
        **{f"home/{path}": text for path, text in client.files.items()},
        "work/agent.py": client.program,
    }.items():
        file = scratch / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    # The address is known in there only.
    fill = 'find "$HOME" -type f -exec sed -i "s|ADDRESS|$ANTHROPIC_BASE_URL|" {} + && '
    variables = {
        **{"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "TMPDIR": str(temporary), "TERM": "dumb"},
        **{"LANG": "C.UTF-8", "DO_NOT_TRACK": "1", "PYTHONDONTWRITEBYTECODE": "1", **client.variables},
        **{"OPENAI_API_KEY": key, "ANTHROPIC_API_KEY": key},
    }
    job = {
        **{"command": fill + client.command, "task": "", "task_file": "task.md"},
        **{"variables": {}, "socket": str(scratch / "socket")},
    }
    inside = resources.files("agentic_opd.sandboxes").joinpath("program_inside.py").read_text()
    node = Path(shutil.which("node") or "/usr/bin/node").resolve()
    mounts = [Path(sys.base_prefix), node.parents[1], programs.parents[1 if client.is_npm else 0]]
    command = [
        *("bwrap", "--unshare-net", "--unshare-pid", "--unshare-ipc", "--die-with-parent", "--new-session"),
        *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"),
        *("--tmpfs", str(Path.home())),
        *(word for path in mounts for word in ("--ro-bind", str(path), str(path))),
        *("--bind", str(scratch), str(scratch), "--chdir", str(work)),
        *(str(Path(sys.executable).resolve()), "-I", "-S", "-c", "import sys; exec(sys.stdin.buffer.readline())"),
    ]
    log = scratch / "client.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=variables
        )
        try:
            process.communicate(f"exec({inside!r})\n{json.dumps(job)}\n".encode(), timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise ClientFailedError(f"it did not end within {LIMIT_S} s:\n{end_of(log)}") from None
        finally:
            process.kill()
    if process.returncode != 0:
        raise ClientFailedError(f"it ended with {process.returncode}:\n{end_of(log)}")


def read_result(row: AgentRow, folder: Path, engine: Engine) -> None:
    """Fill a row from the journal and the groups of a gateway that has ended."""
    journal = Journal(folder / "journal.sqlite", only_read=True)
    sampled = 0
    try:
        for session in journal.sessions(*SessionState):
            tree = TurnTree()
            for turn in journal.turns(session.session_id):
                tree.add(turn)
            side = tree.side_turns()
            main = [turn for turn_id, turn in tree.turns.items() if turn_id not in side]
            row.sessions += session.parent is None
            row.branches += sum(leaf.turn_id not in side for leaf in tree.leaves())
            row.main += len(main)
            row.side += len(side)
            sampled += sum(len(turn.completion.token_ids) for turn in main)
    finally:
        journal.close()
    path, problems, trained = folder / "groups.jsonl", list[str](), 0
    groups = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for group in groups:
        trained += sum(token != -100 for mask in group["masks"] for token in mask)
        records = [turn for overrides in group["overrides"] for turn in overrides["opd"]["turns"]]
        row.judged += sum(bool(record["votes"]) for record in records)
        row.scored += sum(record["outcome"] == "scored" for record in records)
    if trained != sampled:
        problems.append(f"{trained} of {sampled} sampled tokens are trained on")
    if groups:
        with (folder / "validate.log").open("w") as log, redirect_stdout(log):
            code = validate.main([str(path), "--server", engine.base_url, "--turns", str(row.scored)])
        if code != 0:
            problems.append(f"validate --server ended with {code}: {end_of(folder / 'validate.log')}")
    row.valid = bool(groups) and not problems
    row.error = row.error or "; ".join(problems)


def end_sessions(served: Served, folder: Path) -> None:
    """End all sessions with a reward, and wait for their groups."""
    journal = Journal(folder / "journal.sqlite", only_read=True)
    names = [row.session_id for row in journal.sessions(SessionState.OPEN) if row.parent is None]
    journal.close()
    for name in names:
        served.ask(f"/sessions/{name}/end", {"reward": 1.0})
    deadline = time.monotonic() + GROUP_LIMIT_S
    while any(served.ask(f"/sessions/{name}")["state"] == "closed" for name in names):
        if time.monotonic() > deadline:
            raise ClientFailedError(f"its group was not written within {GROUP_LIMIT_S} s")
        time.sleep(0.1)


@contextmanager
def scratch_folder(keep: Path | None) -> Generator[Path]:
    """A folder for one client's run, removed afterwards unless it is to be kept. Its path is short, for the socket."""
    folder = Path(tempfile.mkdtemp(prefix="agent-"))
    try:
        yield folder
    finally:
        if keep is not None:
            shutil.rmtree(keep, ignore_errors=True)
            shutil.copytree(folder, keep, symlinks=True, ignore=shutil.ignore_patterns("socket", "home", "tmp", "work"))
        shutil.rmtree(folder, ignore_errors=True)


def try_client(name: str, engine: Engine, folder: Path = FOLDER) -> AgentRow:
    """Install and run one client; what it left is copied to `folder/runs/NAME`."""
    client, row = CLIENTS[name], AgentRow(name)
    engine.follow(name)
    try:
        programs = install(client, folder)
        row.version = version(client, programs)
        with scratch_folder(folder / "runs" / name) as scratch:
            flags = ("--env.data_path_to_save_groups", str(scratch / "groups.jsonl"))
            flags += ("--openai.model_name", engine.model)
            with gateway(engine.base_url, *flags, *client.settings, folder=scratch) as served:
                relay = Relay(scratch / "socket", int(served.url.rpartition(":")[2]))
                listener = relay.serve()
                try:
                    converse(client, programs, scratch, served.key)
                except ClientFailedError as error:
                    row.error = str(error)
                finally:
                    listener.close()
                    row.requests, row.refused = relay.requests, len(relay.refused)
                    (scratch / "refused.log").write_text("\n".join(relay.refused))
                end_sessions(served, scratch)
            read_result(row, scratch, engine)
    except ClientFailedError as error:
        row.error = row.error or str(error)
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__, "scripts/agents/try_agents")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"clients (default: all): {', '.join(CLIENTS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as an object, by client name")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where clients are installed (%(default)s)")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.names if name not in CLIENTS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(CLIENTS)}")
    rows: list[AgentRow] = []
    folder = arguments.folder.absolute()
    try:
        with engine(folder) as served:
            for name in arguments.names or CLIENTS:
                rows.append(try_client(name, served, folder))
                print(f"{name}: {rows[-1].error or 'done'}", file=sys.stderr, flush=True)
                if arguments.json is not None:
                    arguments.json.write_text(json.dumps({row.client: asdict(row) for row in rows}, indent=1) + "\n")
    except ServerFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    columns = [column for column in asdict(rows[0]) if column not in ("refused", "error")]
    table = Table(*columns)
    for row in rows:
        table.add_row(*(str(asdict(row)[column]) for column in columns))
    Console(width=120).print(table)
    return int(not all(row.is_good for row in rows))


if __name__ == "__main__":
    sys.exit(main())
