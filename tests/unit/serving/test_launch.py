"""The command line and variables that `scripts/serve_vllm` hands to vLLM."""

import socket
from pathlib import Path

import pytest

from agentic_opd.serving.launch import GUARD, command, environment, parse_args, why_no_adapters, why_no_port


def options(line: list[str]) -> dict[str, str]:
    """The last value of each flag, as vLLM reads them; the empty string for a flag without one."""
    pairs = zip(line, [*line[1:], "--"], strict=True)
    return {flag: "" if value.startswith("--") else value for flag, value in pairs if flag.startswith("--")}


def test_defaults_on_the_cpu() -> None:
    args = parse_args(["org/model"])
    line, variables = command(args, cpu=True), environment(args, {}, cpu=True)
    assert line[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    flags = options(line)
    assert flags["--model"] == "org/model"
    assert (flags["--host"], flags["--port"], flags["--dtype"]) == ("127.0.0.1", "8000", "float32")
    assert int(flags["--max-logprobs"]) >= 51
    assert {"--enforce-eager", "--enable-prefix-caching", "--distributed-executor-backend"} <= flags.keys()
    assert variables["VLLM_PLUGINS"] == "agentic_opd"
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert variables["VLLM_NO_USAGE_STATS"] == "1"
    assert "HF_HUB_OFFLINE" not in variables
    assert "VLLM_API_KEY" not in variables


def test_a_gpu_gets_none_of_the_cpus_settings() -> None:
    args = parse_args(["org/model"])
    assert not {"--dtype", "--enforce-eager", "--block-size"} & options(command(args, cpu=False)).keys()
    assert not {"VLLM_CPU_KVCACHE_SPACE", "OMP_NUM_THREADS"} & environment(args, {}, cpu=False).keys()


def test_options_arrive() -> None:
    args = parse_args(
        [
            *("m", "--host", "0.0.0.0", "--port", "81", "--max-model-len", "9", "--max-logprobs", "5"),
            *("--served-model-name", "policy", "--kv-cache-gib", "3"),
        ]
    )
    flags = options(command(args, cpu=True))
    assert (flags["--host"], flags["--port"], flags["--max-model-len"]) == ("0.0.0.0", "81", "9")
    assert (flags["--max-logprobs"], flags["--served-model-name"]) == ("5", "policy")
    assert environment(args, {}, cpu=True)["VLLM_CPU_KVCACHE_SPACE"] == "3"


def test_weights_over_a_process_group_are_vllms_own_setting() -> None:
    line = command(parse_args(["OWNER/NAME", "--weight-transfer", "nccl"]), cpu=False)
    assert line[line.index("--weight-transfer-config") + 1] == '{"backend": "nccl"}'
    assert "--weight-transfer-config" not in command(parse_args(["OWNER/NAME"]), cpu=False)


def test_what_follows_the_dashes_wins() -> None:
    args = parse_args(["m", "--", "--dtype", "bfloat16", "--seed", "1"])
    flags = options(command(args, cpu=True))
    assert (flags["--dtype"], flags["--seed"]) == ("bfloat16", "1")


def test_several_workers_are_left_to_vllm() -> None:
    args = parse_args(["m", "--", "--tensor-parallel-size", "2"])
    assert "--distributed-executor-backend" not in command(args, cpu=True)
    assert "OMP_NUM_THREADS" not in environment(args, {}, cpu=True)


def test_the_key_is_in_no_command_line() -> None:
    args = parse_args(["m", "--api-key", "secret"])
    assert "secret" not in " ".join(command(args, cpu=True))
    assert environment(args, {}, cpu=True)["VLLM_API_KEY"] == "secret"
    assert environment(parse_args(["m"]), {"VLLM_API_KEY": "other"}, cpu=True)["VLLM_API_KEY"] == "other"


@pytest.mark.parametrize("flags", [[], ["--no-plugin"], ["--", "--middleware", "theirs.Class"]])
def test_every_server_is_guarded(flags: list[str]) -> None:
    line = command(parse_args(["m", "--api-key", "secret", *flags]), cpu=True)
    assert line[line.index("--middleware") + 1] == GUARD
    assert line[-2:] == flags[-2:] or "theirs.Class" not in flags


def test_the_users_variables_stay() -> None:
    inherited = {"VLLM_PLUGINS": "theirs", "VLLM_CPU_KVCACHE_SPACE": "8", "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/h"}
    variables = environment(parse_args(["m"]), inherited, cpu=True)
    assert variables["VLLM_PLUGINS"] == "theirs,agentic_opd"
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "8"
    assert variables["HOME"] == "/h"
    assert "PYTHONDONTWRITEBYTECODE" not in variables
    again = environment(parse_args(["m"]), variables, cpu=True)
    assert again["VLLM_PLUGINS"] == "theirs,agentic_opd"


def test_plain_vllm_loads_no_plugin() -> None:
    args = parse_args(["m", "--no-plugin"])
    assert environment(args, {"VLLM_PLUGINS": "agentic_opd"}, cpu=True)["VLLM_PLUGINS"] == ""


def test_local_models_and_roots(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    args = parse_args([str(tmp_path), "--weights-root", str(tmp_path)])
    variables = environment(args, {}, cpu=False)
    assert variables["HF_HUB_OFFLINE"] == "1"
    assert variables["AGENTIC_OPD_WEIGHTS_ROOT"] == str(tmp_path.resolve())


def test_the_longest_body_is_an_option_a_variable_or_the_default() -> None:
    assert environment(parse_args(["m", "--max-body-mib", "64"]), {}, cpu=True)["AGENTIC_OPD_MAX_BODY_MIB"] == "64"
    assert (
        environment(parse_args(["m"]), {"AGENTIC_OPD_MAX_BODY_MIB": "2"}, cpu=True)["AGENTIC_OPD_MAX_BODY_MIB"] == "2"
    )
    assert "AGENTIC_OPD_MAX_BODY_MIB" not in environment(parse_args(["m"]), {}, cpu=True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "MODEL"),
        (["m", "--port", "x"], "--port"),
        (["m", "--max-body-mib", "0"], "--max-body-mib"),
        (["m", "--max-body-mib", "many"], "--max-body-mib"),
        (["m", "--weights-root", "/nowhere"], "--weights-root"),
        (["m", "--seed", "1"], "go after --"),
        (["./no/such/model"], "there is no such directory"),
        (["runs/train/final"], "there is no such directory"),
        (["tests"], "holds no config.json"),
        (["README.md"], "got a file"),
    ],
)
def test_wrong_command_lines_are_explained(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_args(argv)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--dtype", "float32"], ["--dtype=float"], ["--seed", "1", "--dtype", "float32"]])
def test_a_gpu_takes_no_adapters_in_float32(flags: list[str]) -> None:
    asked = parse_args(["org/model", "--max-lora-rank", "8", "--", *flags])
    assert "bfloat16 or float16" in (why_no_adapters(asked, cpu=False) or "")
    assert why_no_adapters(asked, cpu=True) is None
    assert why_no_adapters(parse_args(["org/model", "--", *flags]), cpu=False) is None
    assert (
        why_no_adapters(parse_args(["org/model", "--max-lora-rank", "8", "--", "--dtype", "float16"]), cpu=False)
        is None
    )


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        assert (
            why_no_port(parse_args(["org/model", "--port", port]))
            == f"port {port} of 127.0.0.1 is in use: stop what listens there, or choose another --port"
        )
    assert why_no_port(parse_args(["org/model", "--port", port])) is None
    assert "choose another --host" in (why_no_port(parse_args(["org/model", "--host", "203.0.113.9"])) or "")
