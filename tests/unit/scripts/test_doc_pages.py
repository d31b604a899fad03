"""What README, docs/ and configs/ tell a person to type, and quote, is what the code understands and says."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from checks.doc_pages import pages

from agentic_opd.cli.doctor.command import build_parser as doctor_parser
from agentic_opd.cli.main import COMMANDS
from agentic_opd.env.command import MODES, build_parser
from agentic_opd.env.config import default_settings
from agentic_opd.gateway.config import GatewayConfig
from agentic_opd.serving.launch import parse_args as parse_serve_vllm
from agentic_opd.settings.flags import parse
from agentic_opd.settings.listing import settings_in
from agentic_opd.settings.read import read_settings
from agentic_opd.training.command import build_parser as trainer_parser
from agentic_opd.training.config import read_config
from agentic_opd.up.command import build_parser as up_parser
from agentic_opd.up.command import read as read_up
from agentic_opd.up.parts import parts_of
from agentic_opd.worlds.custom import CustomWorld
from tests.unit.wire.sample import group

POLICY = str(Path(__file__).parents[3] / "scripts" / "demo_policy" / "policy")
PAGES = [Path("README.md"), Path("CONTRIBUTING.md"), *sorted(Path("docs").rglob("*.md"))]
TEXTS = [*PAGES, *sorted(Path("configs").glob("*.yaml"))]
OTHERS = {
    *("cd", "export", "git", "mkdir", "pip", "python3", "source", "wandb", "docker", "podman"),
    *("claude", "codex", "openclaw", "opencode", "pi"),
}
"""Programs that are not this project's; what is typed for them is not looked at."""
WITHOUT_FLAGS = {"scripts/check", "scripts/checks/doc_pages", "scripts/setup", "scripts/test"}
"""They hand what follows to pytest, or take nothing."""
NEEDS_A_GPU = {"scripts/serve_vllm Qwen/Qwen3-4B-Instruct-2507", "scripts/serve_vllm Qwen/Qwen3-0.6B"}
"""How commands begin that no test can run to their end here; their options are looked at all the same."""


def commands_in(path: Path) -> Iterator[str]:
    """What stands in shell blocks, in backticks, and in the comments that a config begins with."""
    text = path.read_text()
    if path.suffix == ".yaml":
        header = re.match(r"(#.*\n)*", text)
        lines = [line.lstrip("# ") for line in (header[0] if header else "").splitlines()]
        yield from (line for line in lines if program_of(line))
        return
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield from (part.strip() for part in line.split("&&") if part.strip() and not part.strip().startswith("#"))
    # In running text a bare name is a name; with arguments it is something to type.
    for quoted in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if " " in quoted and program_of(quoted) and "..." not in quoted:
            yield quoted


def program_of(line: str) -> str | None:
    """The program that a line starts, where it is one of the project's."""
    found = re.match(
        r"(python -m agentic_opd[\w.]*|python environments/\w+\.py|scripts/[\w/]+|agentic-opd|run-api)\b", line
    )
    return found[1] if found else None


class Reasoning(CustomWorld):
    """Stand-in for the world that docs/worlds.md shows how to write in reasoning.py."""

    def __init__(self, dataset: str = "chain_sum") -> None:
        self.dataset = dataset


def words_of(command: str) -> list[str]:
    return shlex.split(command.replace("reasoning.py:Reasoning", f"{__name__}:Reasoning"), comments=True)


def without_torchrun(command: str) -> str:
    """`torchrun OPTIONS -m agentic_opd.training FLAGS` starts what `agentic-opd train FLAGS` does."""
    return re.sub(r"^torchrun (--[\w-]+ \d+ )*-m agentic_opd\.training\b", "agentic-opd train", command)


WITH_GROUPS = {"gateway", "distill", "learn"}
"""Commands whose short help does not show every setting."""


@cache
def help_of(*argv: str) -> str:
    """As it is shown, without another Python where one can do without: the imports of some take seconds."""
    if argv[0] == "-m":
        return help_of_module(*argv[1:])
    if module := re.search(r"/run\.py\S*(?: --needs \S+)? (\S+) \"\$@\"$", Path(argv[0]).read_text().strip()):
        return help_of_module(module[1])
    done = subprocess.run([*argv, "--help"], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def help_of_module(name: str, *arguments: str) -> str:
    groups = ([], ["all"]) if {*arguments} & WITH_GROUPS else ([],)
    return "".join(_help_of_module(name, *arguments, more=more) for more in groups)


def _help_of_module(name: str, *arguments: str, more: Sequence[str]) -> str:
    said = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
        patch.setattr(sys, "argv", [name, *arguments, "--help", *more])
        for module in (name, f"{name}.__main__"):
            patch.delitem(sys.modules, module, raising=False)
        with pytest.raises(SystemExit) as end:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    assert not end.value.code
    return said.getvalue()


def check_mode(words: list[str]) -> None:
    """Parse a mode's settings, up to the point at which a server would be asked."""
    env, servers = default_settings()
    parser = build_parser("prog", "text", {"env": env, "openai": servers[0]})
    read_settings(parse(parser, words), env, servers)


def check_doctor(words: list[str]) -> None:
    read_settings(parse(doctor_parser(), words), *default_settings())


def check_flags(*argv: str) -> Callable[[list[str]], None]:
    """Every option is one that the program's own help knows."""

    def check(words: list[str]) -> None:
        text = help_of(*argv)
        for word in words:
            if word.startswith("--") and word != "--help":
                assert re.search(rf"{re.escape(word.partition('=')[0])}\b", text), f"{' '.join(argv)} has no {word}"

    return check


def check_trainer(words: list[str]) -> None:
    arguments = parse(trainer_parser(), words)
    if words:
        read_config(arguments)


def check_serve_vllm(words: list[str]) -> None:
    if words != ["--help"]:
        # The folders are made by the commands before, or are an example's.
        given = [POLICY if word.startswith("runs/models/") else word for word in words]
        parse_serve_vllm(
            ["." if before == "--weights-root" else word for before, word in zip(["", *given[:-1]], given, strict=True)]
        )


def check_console_script(words: list[str]) -> None:
    command, *rest = words
    assert command in {*COMMANDS, "--help", "--version", "COMMAND"}
    if command in MODES:
        check_mode(words)
    elif command == "doctor":
        check_doctor(rest)
    elif command == "train":
        check_trainer(rest)
    elif command == "up" and "--config" in rest:
        up = up_parser().parse_args(rest)
        assert parts_of(read_up(up.config))
    elif command == "serve-vllm":
        check_serve_vllm(rest)
    elif command in COMMANDS:
        check_flags("-m", "agentic_opd", command)(rest)


def checker_of(program: str) -> Callable[[list[str]], None]:
    """How to look at what follows a program's name."""
    if program in ("scripts/demo", "scripts/agents/demo_mini_swe", "scripts/demo_real"):
        return lambda words: check_mode(["process", *words])
    if program == "scripts/agents/demo_gateway":
        return check_source(Path("scripts/agents/demo_gateway.py").read_text())
    if program in ("python -m agentic_opd.env",) or program.startswith("python environments/"):
        return check_mode
    if program == "agentic-opd":
        return check_console_script
    if program == "scripts/serve_vllm":
        return check_serve_vllm
    if program == "run-api":
        return check_flags("-m", "atroposlib.cli.run_api")
    if program.startswith("python -m "):
        return check_flags("-m", program.split()[-1])
    if program == "scripts/demo_policy/mini_swe_policy":
        return check_source(Path("scripts/demo_policy/merge.py").read_text())
    if program == "scripts/learn":
        return check_source(Path("scripts/learning/__main__.py").read_text())
    source = Path(program).read_text()
    return check_source(source) if "python" in source.splitlines()[0] else check_flags(program)


def check_source(source: str) -> Callable[[list[str]], None]:
    """Every option stands in the script itself: some import torch before they can say what they know."""

    def check(words: list[str]) -> None:
        assert [word for word in words if word.startswith("--") and f'"{word.partition("=")[0]}"' not in source] == []

    return check


COMMAND_LINES = sorted({(command, path) for path in TEXTS for command in commands_in(path)})


@pytest.mark.slow
@pytest.mark.parametrize(("command", "path"), COMMAND_LINES, ids=lambda value: str(value)[:70])
def test_every_command_is_understood(command: str, path: Path) -> None:
    command = without_torchrun(command)
    words = words_of(command.rstrip("&"))
    program = program_of(command)
    if program is None:
        assert words[0] in OTHERS, f"{path}: {command!r} starts a program that this test does not know"
        return
    if program not in WITHOUT_FLAGS:
        checker_of(program)(words[len(program.split()) :])


def test_commands_are_written_in_one_way() -> None:
    """`agentic-opd COMMAND`; what has no command of its own is a module, and one line says how Atropos starts it."""
    modules = {program for c, _ in COMMAND_LINES if (program := program_of(c)) and program.startswith("python -m")}
    assert modules == {"python -m agentic_opd.env"}
    assert sum(c.startswith("python -m agentic_opd.env") for c, _ in COMMAND_LINES) == 1


def test_commands_that_need_a_gpu_are_those_listed() -> None:
    """No test downloads and serves a model of the hub; the models in runs/ are made by this project's scripts."""
    served = {
        words_of(c)[:2] and " ".join(words_of(c)[:2]) for c, _ in COMMAND_LINES if c.startswith("scripts/serve_vllm")
    }
    models = {start: start.split()[1] for start in served}
    of_a_hub = {start for start, one in models.items() if "/" in one and not one.startswith("runs/")}
    assert {start for start in of_a_hub if not Path(models[start]).exists()} == NEEDS_A_GPU


def test_every_config_is_named_on_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    configs = [str(path) for path in sorted(Path("configs").rglob("*")) if path.is_file()]
    assert [path for path in configs if path not in text] == []


@cache
def flags_of_settings() -> frozenset[str]:
    env, servers = default_settings()
    models = ({"env": env, "openai": servers[0]}, {"env": GatewayConfig()})
    return frozenset(row.flag for model in models for row in settings_in(model))


@pytest.mark.parametrize("path", TEXTS, ids=str)
def test_every_setting_that_is_named_exists(path: Path) -> None:
    settings = flags_of_settings()
    sections = {flag.rpartition(".")[0] for flag in settings}
    named = set(re.findall(r"(?:--|`)((?:env|openai)(?:\.[a-z_]+)+)\b", path.read_text()))
    named = {
        re.sub(r"^env\.opd_(?!enabled)", "env.", name) for name in named
    }  # Where an environment has the name itself.
    of_verifiers = {name for name in named if name.startswith(("env.agent.harness", "env.agent.runtime"))}
    of_a_reader = {"env.world.dataset"} if path.name == "worlds.md" else set[str]()
    """Setting of the world that the page shows how to write."""
    assert named - settings - sections - of_verifiers - of_a_reader - {"env.py"} == set()


@pytest.mark.parametrize("path", list(pages()), ids=str)
def test_pages_made_from_the_code_are_up_to_date(path: Path) -> None:
    assert path.read_text() == pages()[path], "run: scripts/checks/doc_pages"


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


def said_by_the_code() -> str:
    """All source text, with string literals that are broken over lines put together."""
    source = "\n".join(file.read_text() for file in sorted(Path("agentic_opd").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", source)


def test_messages_in_troubleshooting_are_messages_of_the_code() -> None:
    text = Path("docs/troubleshooting.md").read_text()
    messages = [
        row
        for part in text.split("| message |")[1:]
        for row in re.findall(r"(?m)^\| `([^`]+)`", part.partition("##")[0])
    ]
    assert len(messages) > 15
    source = said_by_the_code()
    missing = [m for m in messages if not all(piece.strip() in source for piece in m.split("..."))]
    assert missing == []


@pytest.mark.parametrize("said", ["Done.", "a\u2028b\x85c\u2029\x0c\r"])
def test_the_readmes_library_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    one = group()
    one["messages"][0][-1]["content"] = said
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "groups.jsonl").write_text(f"{json.dumps(one, ensure_ascii=False)}\n")
    monkeypatch.chdir(tmp_path)
    printed = StringIO()
    with redirect_stdout(printed):
        exec(example, {})
    assert printed.getvalue().count("\n") == 4, "two sequences with a scored turn of two tokens each"
