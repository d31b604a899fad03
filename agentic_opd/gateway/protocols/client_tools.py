"""Tools that Anthropic defines and the client runs: their names and types are sent, and no schema. Pure.

In: the type of a tool, such as `bash_20250124`. Out: the description and the schema by which a policy can call it, with
the arguments that Anthropic documents.
"""

from typing import Any

_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
_FILE = {
    "path": {**_STRING, "description": "Absolute path of the file or folder."},
    "file_text": {**_STRING, "description": "Text of the new file, for create."},
    "old_str": {**_STRING, "description": "Text to replace; it must occur exactly once in the file. For str_replace."},
    "new_str": {**_STRING, "description": "Text in its place."},
    "insert_line": {
        **_INTEGER,
        "description": "Line behind which a text is inserted, or 0; for insert.",
    },
    "insert_text": {**_STRING, "description": "The text to insert."},
    "view_range": {"type": "array", "items": _INTEGER, "description": "First and last line, -1 for the end; for view."},
}


def _schema(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


def _commands(*names: str) -> dict[str, Any]:
    return {"command": {**_STRING, "enum": [*names]}}


_TOOLS: dict[str, dict[str, Any]] = {
    "bash": {
        "description": "Run a command in a bash shell that stays open between calls.",
        "parameters": _schema(
            {"command": _STRING, "restart": {"type": "boolean", "description": "Start the shell anew instead."}}
        ),
    },
    "text_editor": {
        "description": "View, create and edit files.",
        "parameters": _schema({**_commands("view", "create", "str_replace", "insert"), **_FILE}, "command", "path"),
    },
    "memory": {
        "description": "Read and write the files of a memory that lasts, below /memories.",
        "parameters": _schema(
            {
                **_commands("view", "create", "str_replace", "insert", "delete", "rename"),
                **_FILE,
                "old_path": {**_STRING, "description": "Path to rename, for rename."},
                "new_path": {**_STRING, "description": "Its new path."},
            },
            "command",
        ),
    },
}


def client_tool_of(tool_type: str | None) -> dict[str, Any] | None:
    """Return the description and the parameters of a tool of this type; None if the client does not run it."""
    name, _, date = (tool_type or "").rpartition("_")
    return _TOOLS.get(name) if date.isdigit() else None
