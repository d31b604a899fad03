"""warm.py SOCKET KIND: a process that has imported what commands need, and forks for each: a real process in no time.

A request is a line of JSON with the three standard streams beside it. The answers are the child's id, and in the end
its exit status. A client that goes takes its child with it.
"""

import atexit
import gc
import json
import logging
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import warnings
import weakref
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from .places import MODEL

_ENV = (
    *("agentic_opd.env", "agentic_opd.env.opd", "agentic_opd.env.command", "agentic_opd.cli.main"),
    *("agentic_opd.up.command", "agentic_opd.cli.doctor.command", "agentic_opd.cli.validate"),
    *("agentic_opd.cli.distill", "agentic_opd.report.command", "checks.tasks", "agentic_opd.worlds.choose"),
    *("agentic_opd.gateway.command", "agentic_opd.gateway.serve", "agentic_opd.gateway.ui.routes"),
    *("atroposlib.api.server", "atroposlib.cli.run_api", "uvicorn", "uvloop", "wandb", "openai", "pyarrow"),
)
_TRAIN = ("torch", "transformers", "peft", "safetensors.torch", "agentic_opd.training.trainer")
_API_SERVER = "vllm.entrypoints.openai.api_server"
_VLLM = (_API_SERVER, "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "agentic_opd.serving.plugin")


class Request:
    """A command to become: its arguments, variables, folder and streams."""

    def __init__(self, connection: socket.socket) -> None:
        first, fds, _, _ = socket.recv_fds(connection, 65536, 3)
        while not first.endswith(b"\n"):
            first += connection.recv(1 << 20)
        self.fds = fds
        given = json.loads(first)
        self.argv: list[str] = given["argv"]
        self.env: dict[str, str] = given["env"]
        self.cwd: str = given["cwd"]
        self.new_session: bool = given["new_session"]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)

    def become(self) -> None:
        """Be the process that was asked for, up to its first line."""
        if self.new_session:
            os.setsid()
        for number, fd in enumerate(self.fds):
            os.dup2(fd, number)
        self.close()
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        sys.stderr.reconfigure(line_buffering=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        forget_exits()
        os.environ.clear()
        os.environ.update(self.env)
        os.chdir(self.cwd)
        import numpy as np

        np.random.seed()

    def run(self) -> None:
        """`python -m MODULE ARGUMENTS`."""
        module, *arguments = self.argv
        sys.argv = [module, *arguments]
        more = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
        sys.path[:0] = [self.cwd, *more]
        sys.modules.pop(module, None)  # As where nothing has imported it, runpy says nothing.
        sys.modules.pop(f"{module}.__main__", None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def forget_exits() -> None:
    """What the process that forked tidies up when it ends, such as temporary folders, is not this one's to remove."""
    atexit._clear()
    weakref.finalize._registry.clear()
    weakref.finalize._registered_with_atexit = False
    atexit.register(logging.shutdown)


def exec_in_place() -> None:
    """Have `os.execve` of vLLM's API server run it in this process, which has imported it.

    `scripts/serve_vllm` ends with that call. The engine, which vLLM starts anew on CPUs, is forked.
    """
    execve, get_context = os.execve, multiprocessing.get_context

    def run_server(path: str, argv: list[str], env: dict[str, str]) -> None:
        if argv[1:3] != ["-m", _API_SERVER]:
            execve(path, argv, env)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = argv[2:]
        sys.modules.pop(_API_SERVER, None)
        runpy.run_module(_API_SERVER, run_name="__main__", alter_sys=True)

    os.execve = run_server
    multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)


def serve(path: str) -> Request:
    """Fork for each request; returns in the child."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + ".new")
    listener.listen(64)
    Path(path + ".new").rename(path)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, None)

    def stop(*_: object) -> None:
        """End with all children and theirs, such as a server's engine, which would outlive the server."""
        for key in [*selector.get_map().values()]:
            if key.data is not None and key.data["pid"] is not None:
                _kill(key.data)
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    while True:
        for key, _ in selector.select():
            if key.data is None:
                connection, _ = listener.accept()
                selector.register(connection, selectors.EVENT_READ, {"pid": None, "pidfd": None})
                continue
            found = _forked(selector, key) if key.data["pid"] is None else _ended(selector, key)
            if found is not None:
                selector.close()
                listener.close()
                return found


def _forked(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> Request | None:
    connection: Any = key.fileobj
    if not connection.recv(1, socket.MSG_PEEK):
        selector.unregister(connection)
        connection.close()
        return None
    request = Request(connection)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A thread of numpy's library, which knows of forks.
        parent, pid = os.getpid(), os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _end_with(parent)
        request.become()
        return request
    request.close()
    key.data.update(pid=pid, pidfd=os.pidfd_open(pid), new_session=request.new_session, connection=connection)
    selector.register(key.data["pidfd"], selectors.EVENT_READ, key.data)
    with suppress(OSError):  # A client that has gone is heard of as the end of its connection.
        connection.sendall(b"%d\n" % pid)
    return None


def _end_with(parent: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _ended(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    """The child has ended, or its client has gone."""
    if key.data.get("over"):
        return  # Both at once.
    key.data["over"] = True
    pid, pidfd, connection = key.data["pid"], key.data["pidfd"], key.data["connection"]
    if key.fileobj is connection:
        _kill(key.data)
    _, status = os.waitpid(pid, 0)
    for one in (pidfd, connection):
        selector.unregister(one)
    os.close(pidfd)
    with suppress(OSError):
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    connection.close()


def _kill(child: dict[str, Any]) -> None:
    """Kill a child, and all of its session if it leads one."""
    with suppress(ProcessLookupError):
        (os.killpg if child["new_session"] else os.kill)(child["pid"], signal.SIGKILL)


def end(asked: Request) -> None:
    """Run the command, and end as an interpreter does, but for taking a thousand modules apart."""
    code = 0
    try:
        asked.run()
    except SystemExit as ended:
        if ended.code is not None and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:  # noqa: BLE001 - as an interpreter that ends by it
        traceback.print_exc()
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def import_all(kind: str) -> None:
    """Import what commands of this kind need."""
    if kind == "vllm":
        from agentic_opd.serving.launch import environment, parse_args

        import_module("setproctitle").getproctitle()  # It looks for the variables of this process's start.
        os.environ.update(environment(parse_args([MODEL]), os.environ, cpu=True))  # Some are read by imports.
        exec_in_place()
    for name in {"env": _ENV, "train": _TRAIN, "vllm": _VLLM}[kind]:
        module = import_module(name)
        if name == "agentic_opd.env":
            module.AgenticOPDEnv  # noqa: B018 - keeps torch out, as in a process of its own


if __name__ == "__main__":
    import_all(sys.argv[2])
    gc.collect()
    gc.freeze()
    end(serve(sys.argv[1]))
