"""The agent's tools: a parsed call in, the text for the model out.

An error by the model returns a result that starts with `Error: ` and says what to do. The file tools act inside the
sandbox, so they resolve paths as terminal commands do. Plain files in a work directory on this machine are written
directly, without a command.
"""

import re
import shlex
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agentic_opd.core.text import cut_middle, text_lines, well_formed
from agentic_opd.core.types import ToolCall, ToolResult
from agentic_opd.sandboxes.protocol import CommandResult, Sandbox
from agentic_opd.sandboxes.workdir import write_file
from agentic_opd.worlds.config import WorldConfig

READING_TOOLS = frozenset({"read_file"})
"""Tools that can't change a file."""

_MAX_COMMAND_CHARS = 30_000
"""Keeps a command below the kernel's 128 KiB for one argument, at up to four bytes per character."""

_MAX_PATH_BYTES = 4095
"""Longest path that the kernel accepts."""

_LINE_END = re.compile(rb"\r\n|\n|\r")

_BROKEN_READ = {
    11: "there is no file {path!r}",
    12: "{path!r} is a directory",
    13: "{path!r} is not a regular file",
    14: "{path!r} may not be read",
}


class _ToolError(Exception):
    """A failed tool call; the text is for the model."""


async def run_tool(call: ToolCall, sandbox: Sandbox, config: WorldConfig) -> ToolResult:
    """Run one tool call.

    Raises:
        SandboxError: The sandbox itself does not work. Errors by the model never raise.
    """
    try:
        if call.arguments is None:
            raise _ToolError(f"{call.error}.")  # What the model wrote is not repeated: read in a hint, it is copied.
        tool = _TOOLS.get(call.name)
        if tool is None:
            names = ", ".join(f'"{name}"' for name in _TOOLS)
            raise _ToolError(f"the name must be one of {names}.")
        arguments = _check_arguments(call.name, call.arguments, tool)
        return ToolResult(await tool.run(sandbox, config, **arguments))
    except _ToolError as error:
        # The model's text may hold lone surrogates, which tokenizers reject.
        text = str(error).encode(errors="replace").decode()
        return ToolResult(f"Error: {cut_middle(text, config.tool_output_max_chars)}", is_error=True)


# ------------------------------------------------------------------------------------------------------ the four tools


async def _terminal(sandbox: Sandbox, config: WorldConfig, command: str) -> str:
    if len(command) > _MAX_COMMAND_CHARS:
        raise _ToolError(
            f"the command has {len(command)} characters, at most {_MAX_COMMAND_CHARS} are possible. "
            "Write long texts with write_file."
        )
    result = await sandbox.run(command, config.tool_timeout_s)
    text = result.text.rstrip()
    if result.timed_out or result.output_exceeded or result.memory_exceeded:
        raise _ToolError(_stopped(result, config) + (f" Its output:\n{text}" if text else ""))
    text = cut_middle(text, config.tool_output_max_chars)
    if result.exit_code != 0:
        return f"{text}\n[exit code {result.exit_code}]".lstrip("\n")
    return text or "[no output]"


async def _read_file(sandbox: Sandbox, config: WorldConfig, path: str) -> str:
    text = (await _read(sandbox, config, path)).decode("utf-8", errors="replace")
    return cut_middle(text, config.tool_output_max_chars) or "[empty file]"


async def _write_file(sandbox: Sandbox, config: WorldConfig, path: str, content: str) -> str:
    await _write(sandbox, config, path, content.encode("utf-8", errors="replace"))
    num_lines = content.count("\n") + (not content.endswith("\n") and content != "")
    return f"wrote {num_lines} lines to {path}"


async def _patch(sandbox: Sandbox, config: WorldConfig, path: str, old: str, new: str) -> str:
    if not old:
        raise _ToolError("'old' is empty. Give the text to replace, or use write_file for a whole file.")
    # Bytes keep the rest of the file unchanged even if it is not UTF-8.
    content, old_bytes = await _read(sandbox, config, path), old.encode("utf-8", errors="replace")
    count = content.count(old_bytes)
    if count == 0:
        if _LINE_END.sub(b"\n", old_bytes) in _LINE_END.sub(b"\n", content):
            raise _ToolError(
                f"the text was not found in {path} because line ends differ: the file's are "
                f"{_line_ends(content)}, those of 'old' {_line_ends(old_bytes)}; nothing was changed. Write 'old' and "
                "'new' with the file's line ends, or change these first, for example with sed -i 's/\\r$//'."
            )
        raise _ToolError(f"the text was not found in {path}; nothing was changed. Use read_file to see what it holds.")
    if count > 1:
        raise _ToolError(
            f"the text occurs {count} times in {path}; nothing was changed. Add lines around it so that it is unique."
        )
    await _write(sandbox, config, path, content.replace(old_bytes, new.encode("utf-8", errors="replace")))
    return f"patched {path}"


def _line_ends(text: bytes) -> str:
    r"""Return the line endings that occur in a text, as `\r\n and \n`."""
    line_ends = dict.fromkeys(_LINE_END.findall(text))
    return " and ".join(repr(end.decode())[1:-1] for end in line_ends)


# ------------------------------------------------------------------------------------------- files, inside the sandbox


async def _read(sandbox: Sandbox, config: WorldConfig, path: str) -> bytes:
    command = (
        f'p={_quote(path)}; [ -e "$p" ] || exit 11; [ -d "$p" ] && exit 12; [ -f "$p" ] || exit 13; '
        '[ -r "$p" ] || exit 14; exec cat -- "$p"'
    )
    result = await sandbox.run(command, config.tool_timeout_s)
    if result.output_exceeded:
        raise _ToolError(f"{path!r} is too large to read. Use terminal, for example with head, tail or grep.")
    if result.timed_out or result.memory_exceeded:
        raise _ToolError(_stopped(result, config))
    if result.exit_code != 0:
        problem = _BROKEN_READ.get(result.exit_code, "{path!r} cannot be read").format(path=path)
        raise _ToolError(f"{problem}. Use terminal with `ls -la` to see what is there.")
    return result.output


async def _write(sandbox: Sandbox, config: WorldConfig, path: str, content: bytes) -> None:
    quoted = _quote(path)
    if await write_file(sandbox, path, content):
        return
    command = f'p={quoted}; mkdir -p -- "$(dirname -- "$p")" && cat > "$p"'
    result = await sandbox.run(command, config.tool_timeout_s, stdin=content)
    if result.timed_out or result.output_exceeded or result.memory_exceeded:
        raise _ToolError(_stopped(result, config))
    if result.exit_code != 0:
        # The shell's message has the form `bash: line 1: PATH: reason`.
        lines = text_lines(result.text.strip())
        reason = lines[-1].rpartition(": ")[2] if lines else f"exit code {result.exit_code}"
        raise _ToolError(f"{path!r} cannot be written: {reason}. Write below the current directory.")


def _quote(path: str) -> str:
    """Quote a path for a shell; `./` prevents the shell from reading a relative path as an option."""
    if not path:
        raise _ToolError("'path' is empty. Give a file's path, for example 'solution.py'.")
    length = len(path.encode())
    if length > _MAX_PATH_BYTES:
        raise _ToolError(f"'path' has {length} bytes, at most {_MAX_PATH_BYTES} are possible.")
    return shlex.quote(path if path.startswith("/") else f"./{path}")


def _stopped(result: CommandResult, config: WorldConfig) -> str:
    if result.timed_out:
        return f"timed out after {config.tool_timeout_s:g} s; the command was stopped."
    if result.memory_exceeded:
        return "more memory than is allowed, all processes and files in memory together; the command was stopped."
    return f"more than {len(result.output) // 2**20} MiB of output; the command was stopped."


# ------------------------------------------------------------------------------------------------------------- schemas


@dataclass(frozen=True, slots=True)
class _AgentTool:
    """A tool: its description, its parameters (name -> description), and the function that runs it."""

    description: str
    parameters: dict[str, str]
    run: Callable[..., Awaitable[str]]

    def spec(self, name: str) -> dict[str, Any]:
        properties = {key: {"type": "string", "description": text} for key, text in self.parameters.items()}
        parameters = {
            "type": "object",
            "properties": properties,
            "required": [*properties],
            "additionalProperties": False,
        }
        return {
            "type": "function",
            "function": {"name": name, "description": self.description, "parameters": parameters},
        }


def _check_arguments(tool_name: str, arguments: dict[str, Any], tool: _AgentTool) -> dict[str, str]:
    """Return the call's arguments, which must be exactly the tool's parameters, as strings.

    `command` and `path` must not contain NUL or lone surrogates.
    """
    for name in tool.parameters:
        value = arguments.get(name)
        if not isinstance(value, str):
            actual_type = "" if name not in arguments else f", got {_JSON_TYPES.get(type(value), type(value).__name__)}"
            raise _ToolError(f"{tool_name} needs '{name}' (string){actual_type}.")
        if name in ("command", "path") and ("\0" in value or well_formed(value) != value):
            raise _ToolError(f"'{name}' holds a character that it may not hold (NUL, or half of a surrogate pair).")
    extra = [repr(name) for name in arguments if name not in tool.parameters]
    if extra:
        raise _ToolError(f"{tool_name} does not take {', '.join(extra)}. It takes {', '.join(tool.parameters)}.")
    return arguments


_JSON_TYPES = {
    dict: "object",
    list: "array",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}

_PATH = "Path of the file, relative to the current directory, for example: solution.py"

_TOOLS = {
    "terminal": _AgentTool(
        "Run a shell command with bash in the current directory and return what it prints, stdout and stderr together. "
        "A command that fails returns its exit code in the last line. Each call starts a new shell: files are kept, "
        "changed directories and variables are not. There is no network and no input. A command that takes too long is "
        "stopped, and a long output is cut in the middle.",
        {"command": "The command line, for example: python test_solution.py"},
        _terminal,
    ),
    "read_file": _AgentTool(
        "Return the text of a file. A long file is cut in the middle; use terminal with head, tail or sed -n to read a "
        "part of it.",
        {"path": _PATH},
        _read_file,
    ),
    "write_file": _AgentTool(
        "Write a text file. It is made where it is missing, with its directories, and everything that it held before "
        "is replaced: give the whole text, not only what changes.",
        {"path": _PATH, "content": "The whole new text of the file, with its line breaks and indentation."},
        _write_file,
    ),
    "patch": _AgentTool(
        "Replace one piece of text in a file by another. The piece must occur exactly once, character by character, "
        "indentation and line breaks included: take in lines around it until it does. Where it is missing or occurs "
        "more than once, nothing is changed.",
        {
            "path": _PATH,
            "old": "The text to replace, exactly as it stands in the file.",
            "new": "The text to put in its place; an empty text deletes it.",
        },
        _patch,
    ),
}

TOOL_SPECS: list[dict[str, Any]] = [tool.spec(name) for name, tool in _TOOLS.items()]
"""The tools in OpenAI's format, for the chat template."""
