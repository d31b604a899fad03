"""Every tool on a real sandbox; what the model reads, word for word."""

from typing import Any

import pytest

from agentic_opd.core.types import ToolCall, ToolResult
from agentic_opd.sandboxes.bubblewrap import Limits
from agentic_opd.sandboxes.protocol import Sandbox
from agentic_opd.worlds.coding.tools import TOOL_SPECS, run_tool
from agentic_opd.worlds.coding.world import SYSTEM_PROMPT
from agentic_opd.worlds.config import WorldConfig
from tests.support.sandboxes import in_sandbox

Call = tuple[str, dict[str, Any] | None]


def use_tools(*calls: Call, timeout_s: float = 60.0, max_chars: int = 400, limits: Limits | None = None) -> list[str]:
    """The results of the calls in one sandbox; every error is marked as one, and nothing else is."""

    async def use(sandbox: Sandbox) -> list[ToolResult]:
        config = WorldConfig(tool_timeout_s=timeout_s, tool_output_max_chars=max_chars)
        return [await run_tool(make_call(*call), sandbox, config) for call in calls]

    results = in_sandbox(use, limits)
    for result in results:
        assert result.is_error == result.content.startswith("Error: ")
    return [result.content for result in results]


def make_call(name: str, arguments: dict[str, Any] | None) -> ToolCall:
    error = "the arguments are not valid JSON" if arguments is None else None
    return ToolCall("call_0", name, arguments, raw="{oops", error=error)


def test_schemas() -> None:
    assert "python test_solution.py" in SYSTEM_PROMPT
    names = {spec["function"]["name"]: spec["function"]["parameters"] for spec in TOOL_SPECS}
    assert {name: [*parameters["properties"]] for name, parameters in names.items()} == {
        "terminal": ["command"],
        "read_file": ["path"],
        "write_file": ["path", "content"],
        "patch": ["path", "old", "new"],
    }
    for parameters in names.values():
        assert parameters["required"] == [*parameters["properties"]]
        assert parameters["additionalProperties"] is False


@pytest.mark.sandbox
def test_writing_reading_and_patching() -> None:
    assert use_tools(
        ("write_file", {"path": "a/b.py", "content": "x = 1\ny = 1\n"}),
        ("read_file", {"path": "a/b.py"}),
        ("patch", {"path": "a/b.py", "old": "y = 1", "new": "y = 'é'"}),
        ("terminal", {"command": "cat a/b.py; cat a/c.py"}),
        ("write_file", {"path": "a/b.py", "content": "one line"}),
        ("write_file", {"path": "empty", "content": ""}),
        ("read_file", {"path": "empty"}),
        ("terminal", {"command": "printf 'a\\r\\n\\377z\\n' > odd"}),
        ("patch", {"path": "odd", "old": "z", "new": "y"}),
        ("terminal", {"command": "od -An -c odd"}),
        ("read_file", {"path": "odd"}),
    ) == [
        "wrote 2 lines to a/b.py",
        "x = 1\ny = 1\n",
        "patched a/b.py",
        "x = 1\ny = 'é'\ncat: a/c.py: No such file or directory\n[exit code 1]",
        "wrote 1 lines to a/b.py",
        "wrote 0 lines to empty",
        "[empty file]",
        "[no output]",
        "patched odd",
        "   a  \\r  \\n 377   y  \\n",
        "a\r\n\ufffdy\n",
    ]


@pytest.mark.sandbox
def test_file_mistakes() -> None:
    see = "Use terminal with `ls -la` to see what is there."
    assert use_tools(
        ("write_file", {"path": "a/b", "content": "1 1"}),
        ("read_file", {"path": "nope"}),
        ("read_file", {"path": "a"}),
        ("read_file", {"path": "/dev/zero"}),
        ("read_file", {"path": ""}),
        ("write_file", {"path": "a", "content": ""}),
        ("write_file", {"path": "a/b/c", "content": ""}),
        ("write_file", {"path": "/usr/x", "content": ""}),
        ("patch", {"path": "a/b", "old": "2", "new": "3"}),
        ("patch", {"path": "a/b", "old": "1", "new": "3"}),
        ("patch", {"path": "a/b", "old": "", "new": "3"}),
        ("read_file", {"path": "a/b"}),
    )[1:] == [
        f"Error: there is no file 'nope'. {see}",
        f"Error: 'a' is a directory. {see}",
        f"Error: '/dev/zero' is not a regular file. {see}",
        "Error: 'path' is empty. Give a file's path, for example 'solution.py'.",
        "Error: 'a' cannot be written: Is a directory. Write below the current directory.",
        "Error: 'a/b/c' cannot be written: File exists. Write below the current directory.",
        "Error: '/usr/x' cannot be written: Read-only file system. Write below the current directory.",
        "Error: the text was not found in a/b; nothing was changed. Use read_file to see what it holds.",
        "Error: the text occurs 2 times in a/b; nothing was changed. Add lines around it so that it is unique.",
        "Error: 'old' is empty. Give the text to replace, or use write_file for a whole file.",
        "1 1",
    ]


@pytest.mark.sandbox
def test_a_patch_says_that_line_ends_differ() -> None:
    r"""Lines that end in \r\n, in \n and in both; a text that is not there with any line ends is not found."""
    two = {"path": "a", "old": "b\nc", "new": "x"}
    results = use_tools(
        ("terminal", {"command": r"printf 'a\r\nb\r\nc\r\n' > a; printf 'a\nb\nc\n' > u; printf 'b\rc\r\nd' > m"}),
        ("patch", two),
        ("patch", {"path": "u", "old": "b\r\nc", "new": "x"}),
        ("patch", {"path": "m", "old": "b\nc\nd", "new": "x"}),
        ("patch", {**two, "old": "b\nd"}),
        ("terminal", {"command": "sed -i 's/\\r$//' a"}),
        ("patch", two),
        ("terminal", {"command": "cat a"}),
    )
    differ = "Error: the text was not found in {} because line ends differ: the file's are {}, those of 'old' {};"
    assert results[1].startswith(differ.format("a", r"\r\n", r"\n"))
    assert results[2].startswith(differ.format("u", r"\n", r"\r\n"))
    assert results[3].startswith(differ.format("m", r"\r and \r\n", r"\n"))
    assert results[4].startswith("Error: the text was not found in a; nothing was changed.")
    assert results[6:] == ["patched a", "a\nx"]


@pytest.mark.sandbox
def test_paths_reach_what_a_command_reaches() -> None:
    """A link or `..` leads to the sandbox's own file of that name, never to the host's."""
    passwd, hosts, quoted, listed = use_tools(
        ("terminal", {"command": "ln -s /etc/hostname link; ln -s /var out; ls /etc"}),
        ("read_file", {"path": "link"}),
        ("write_file", {"path": "$(touch bad)'; touch bad;'", "content": "x"}),
        ("terminal", {"command": "ls; cat ../../../etc/shadow out/.profile"}),
    )
    missing = [f"cat: {path}: No such file or directory" for path in ("../../../etc/shadow", "out/.profile")]
    assert "passwd" not in passwd.split()
    assert hosts.startswith("Error: there is no file 'link'")
    assert quoted == "wrote 1 lines to $(touch bad)'; touch bad;'"
    assert listed.splitlines() == ["$(touch bad)'; touch bad;'", "link", "out", *missing, "[exit code 1]"]


@pytest.mark.sandbox
def test_long_output_is_cut_once_and_timeouts_are_told() -> None:
    long, failed, endless = use_tools(
        ("terminal", {"command": "printf 'a%.0s' $(seq 600); printf 'z%.0s' $(seq 600)"}),
        ("terminal", {"command": "printf 'a%.0s' $(seq 600); exit 3"}),
        ("terminal", {"command": "yes"}),
        limits=Limits(output_bytes=2**20),
    )
    assert long == "a" * 200 + "\n[... 800 characters cut ...]\n" + "z" * 200
    assert failed.endswith("aaa\n[exit code 3]")
    assert endless.startswith("Error: more than 1 MiB of output; the command was stopped. Its output:\ny\ny\n")
    assert endless.count("characters cut") == 1
    for timeout_s in (1.5, 6.0, 24.0):  # On a busy machine it begins late.
        (slow,) = use_tools(("terminal", {"command": "echo begun; sleep 60"}), timeout_s=timeout_s)
        assert slow.startswith(f"Error: timed out after {timeout_s:g} s; the command was stopped.")
        if "begun" in slow:
            break
    assert slow.endswith(" Its output:\nbegun")


@pytest.mark.sandbox
def test_a_file_too_large_to_read() -> None:
    _, large = use_tools(
        ("terminal", {"command": "head -c 20000 /dev/zero > big"}),
        ("read_file", {"path": "big"}),
        limits=Limits(output_bytes=10_000),
    )
    assert large == "Error: 'big' is too large to read. Use terminal, for example with head, tail or grep."


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (("grep", {}), 'Error: the name must be one of "terminal", "read_file", "write_file", "patch".'),
        (("terminal", None), "Error: the arguments are not valid JSON."),
        (("write_file", {"path": "a"}), "Error: write_file needs 'content' (string)."),
        (("write_file", {"path": "a", "content": 3}), "Error: write_file needs 'content' (string), got integer."),
        (("write_file", {"path": None, "content": ""}), "Error: write_file needs 'path' (string), got null."),
        (("read_file", {"path": "a", "line": 1}), "Error: read_file does not take 'line'. It takes path."),
        (("terminal", {"command": "a\0b"}), "Error: 'command' holds a character that it may not hold"),
        (("read_file", {"path": "\ud800"}), "Error: 'path' holds a character that it may not hold"),
        (("terminal", {"command": "x" * 30_001}), "Error: the command has 30001 characters, at most 30000"),
    ],
)
def test_broken_calls(call: Call, expected: str) -> None:
    (content,) = use_tools(call)
    assert content.startswith(expected)


@pytest.mark.sandbox
def test_half_a_surrogate_in_a_file_is_replaced() -> None:
    assert use_tools(("write_file", {"path": "a", "content": "x\ud800"}), ("read_file", {"path": "a"})) == [
        "wrote 1 lines to a",
        "x?",
    ]


@pytest.mark.sandbox
def test_paths_of_any_length_and_any_character_are_answered() -> None:
    """A shell line holds 128 KiB at most, and a quote in it becomes five characters."""
    long = ["a" * 5000, "'" * 200_000, "é" * 10**6, "d/" * 2000, "'" * 4000, "\x7f\n\t" * 1300]
    calls: list[Call] = []
    for path in long:
        calls += [("read_file", {"path": path}), ("write_file", {"path": path, "content": "x"})]
        calls += [("patch", {"path": path, "old": "x", "new": "y"})]
    said = use_tools(*calls, ("terminal", {"command": "'" * 30_000}), ("terminal", {"command": "echo works"}))
    assert said[0] == "Error: 'path' has 5000 bytes, at most 4095 are possible."
    assert said[-1] == "works"
