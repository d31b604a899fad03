"""`agentic-opd COMMAND`: every command of the package under one name.

Heavy imports happen only after a command is chosen, so that `agentic-opd serve-vllm` works in vLLM's environment too.
"""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from agentic_opd import __version__
from agentic_opd.core.exit_codes import EXIT_CODES, EXIT_REFUSED, EXIT_USAGE

COMMANDS = {
    "up": "run a whole loop from one file: vLLM servers, run-api, environments, the trainer",
    "serve": "roll out for a trainer: scored groups to the trajectory API (run-api)",
    "process": "make a number of scored groups and write them to a JSONL file",
    "evaluate": "measure the policy on the held-out tasks",
    "gateway": "serve the policy to any agent in OpenAI's and Anthropic's protocols, and record conversations as "
    "groups (extra [gateway])",
    "learners": "list or delete the learners of a gateway, each with a separate adapter",
    "train": "train on scored groups with the reference trainer (extra [train])",
    "doctor": "check a set-up in seconds, and report what to fix",
    "validate": "check a file of scored groups against the wire format",
    "report": "write an HTML report of a file of scored groups, or a comparison of two files",
    "prove": "replay the hinted turns of a file with and without their hints, and record the hints' effects",
    "distill": "add hints and teacher rows to a file of groups or conversations, without new rollouts",
    "learn": "train an adapter on your own sessions, and measure it on held-out ones (extra [train])",
    "serve-vllm": "start a vLLM server with everything that the other commands need",
}

_MODULES = {
    "up": "agentic_opd.up.command",
    "gateway": "agentic_opd.gateway.command",
    "learners": "agentic_opd.cli.learners",
    "train": "agentic_opd.training.command",
    "doctor": "agentic_opd.cli.doctor.command",
    "validate": "agentic_opd.cli.validate",
    "report": "agentic_opd.report.command",
    "prove": "agentic_opd.cli.prove",
    "distill": "agentic_opd.cli.distill",
    "learn": "agentic_opd.learn.command",
    "serve-vllm": "agentic_opd.serving.launch",
}
"""Modules with the `main` of each command; the other commands are modes of the environment."""

_REMOVED = {
    "hints": "`agentic-opd report FILE` writes a page that lists the hints, with their lifts if those were measured",
    "sessions": "the gateway's page, http://127.0.0.1:8080/ui, shows the sessions of a key and has a download of each; "
    "DELETE /sessions/NAME of the gateway deletes one",
}
"""Command that an earlier version had -> what to use now."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help"):
        print(help_text())
        return 0 if arguments else EXIT_USAGE
    if command == "--version":
        print(f"agentic_opd {__version__}")
        return 0
    if command in _REMOVED:
        print(f"error: the command {command!r} is gone: {_REMOVED[command]}", file=sys.stderr)
        return EXIT_USAGE
    if command not in COMMANDS:
        close = get_close_matches(command, COMMANDS, n=1, cutoff=0.5)
        remedy = f"; did you mean {close[0]!r}?" if close else f". There are: {', '.join(COMMANDS)}."
        print(f"error: the command {command!r} is unknown{remedy}", file=sys.stderr)
        return EXIT_USAGE
    if command not in _MODULES:
        return import_module("agentic_opd.env.command").main(None, arguments, "agentic-opd")
    return import_module(_MODULES[command]).main(arguments[1:]) or 0


def help_text() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            *("usage: agentic-opd COMMAND ...", ""),
            *("On-policy distillation from hindsight for agents that use tools.", ""),
            *("commands:", *lines, ""),
            "agentic-opd COMMAND --help describes a command; agentic-opd --version prints the version.",
            EXIT_CODES.replace("130:", f"{EXIT_REFUSED}: weights rolled back or refused (up, train, learn); 130:"),
        ]
    )
