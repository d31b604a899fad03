"""`agentic-opd doctor`, in this process, which saves what a process of its own imports."""

import json
from contextlib import chdir, redirect_stdout
from io import StringIO

from bench.local_server import free_port

from agentic_opd.cli.main import main

from .places import ROOT

Findings = dict[str, tuple[str, str]]
"""Check -> its status and text."""


def doctor(url: str, *flags: str) -> tuple[int, Findings]:
    """Its exit code, and what it found."""
    argv = [
        *("doctor", "--json", "--config", "configs/demo.yaml", "--openai.base_url", f"{url}/v1"),
        *("--env.rollout_server_url", f"http://127.0.0.1:{free_port()}"),
        # The policy judges: hot, it says what can't be read once in eleven votes.
        *("--env.judge.temperature", "0.01", *flags),
    ]
    with chdir(ROOT), redirect_stdout(StringIO()) as said:
        code = main(argv)
    findings = json.loads(said.getvalue())
    return code, {finding["name"]: (finding["status"], finding["text"]) for finding in findings}


def statuses(findings: Findings, *wanted: str) -> set[str]:
    """The checks that ended in one of these."""
    return {name for name, (status, _) in findings.items() if status in wanted}
