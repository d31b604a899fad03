"""The commands of README.md and docs/ that need no GPU, no hub and no registry run as they are printed.

All run in one network namespace, where each port is free and nothing outside can be reached, in a copy of the tree, in
the order of the pages. The policy is the demo's, in a folder that is named as a model whose renderer is known. A page's
shell blocks are one shell, so that its exports hold; a server of a page runs until the page ends. What a page says that
the reader has (a file, a finished run) is put there before.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import MODEL, ROOT
from tests.unit.scripts.test_doc_pages import OTHERS, PAGES, program_of

pytestmark = [pytest.mark.vllm, pytest.mark.sandbox, pytest.mark.all]

SKIPPED = {
    r"scripts/(demo|setup|test|check|agents/demo_\w+|install/real_model)\b": "installs, and has a test of its own",
    r"scripts/learn\b": "an experiment; test_learn runs it",
    r"scripts/demo_policy/train\b": "trains for minutes; tests/unit/scripts/demo_policy",
    r"scripts/demo_policy/mini_swe_policy\b": "needs the adapter of an experiment; test_mini_swe_agent",
    r"pip|python3 -m venv|source|git": "a package registry",
    r"claude|codex|openclaw|opencode|pi\b": "another project's program; test_real_agents",
    r".*\bQwen/|.*qwen3_gpu|.*\bMODEL\b": "needs a hub, and a GPU",
    r"agentic-opd (serve|train)\b|torchrun|agentic-opd up --config \S+ +#": "a whole loop; test_up and test_trainer",
    r"agentic-opd validate .*--receipt": "needs a run of the trainer; tests/unit/training/test_receipts.py",
    r"scripts/serve_vllm scripts/demo_policy/policy .*--port 8002": "a second server of a loop",
    r".*--rollout_server_url|.*env\.rollout_server_url": "a whole loop; test_gateway_delivery",
    r".*(bfcl|dev\.json|HumanEval|verl\.parquet|reasoning\.py|harbor)": "a dataset, a package or an engine of others",
}
"""How commands begin that are not run here, and why."""
SERVICES = {
    r"agentic-opd gateway\b": "http://127.0.0.1:8080/health",
    r"run-api\b": "http://127.0.0.1:8001/",
    r"scripts/serve_vllm scripts/demo_policy/policy\b": None,  # It runs already.
    r"scripts/serve_vllm scripts/demo_policy/sql_policy\b": "http://127.0.0.1:8000/health",
}
"""Programs that do not end, and the address at which each answers."""
FAILS = {
    r"agentic-opd doctor --up configs/up_one_gpu.yaml": (0, 1),  # One check needs the hub.
}
"""Commands that report what this machine lacks, with the exit codes that they may have."""
FILES: dict[str, list[dict[str, Any]]] = {
    "theirs.jsonl": [
        {
            "messages": [
                {"role": "user", "content": "Add 2 and 3."},
                {"role": "assistant", "content": "6"},
                {"role": "user", "content": "No, it is 5."},
            ]
        }
    ],
    "tasks.jsonl": [
        {
            "task_id": 1,
            "text": "Write add(a, b).",
            "code": "def add(a, b): return a + b",
            "test_list": ["assert add(1, 2) == 3"],
        }
    ],
    "mine.jsonl": [{"id": "1", "files": {"solution.py": "def add(a, b):\n    return a + b\n"}}],
    "tools.json": [],
}
PREPARE = r"""
answers() { python - "$1" "$2" <<'WAIT'
import os, sys, time, urllib.request
end = time.monotonic() + 240
while True:
    try:
        urllib.request.urlopen(sys.argv[1], timeout=5)
        break
    except OSError:
        assert "State:\tZ" not in open(f"/proc/{sys.argv[2]}/status").read(), "it has ended"
        assert time.monotonic() < end, f"{sys.argv[1]} does not answer"
        time.sleep(0.2)
WAIT
}
policy() {
    scripts/serve_vllm Qwen/Qwen3-0.6B --port 8000 --weights-root runs/train/weights \
        -- --served-model-name scripts/demo_policy/policy Qwen/Qwen3-0.6B >out/policy.log 2>&1 &
    server=$!
    answers http://127.0.0.1:8000/health $server
}
mkdir -p out runs/train/weights runs/before runs/after
policy
agentic-opd process --config configs/demo.yaml --env.total_steps 2 >out/demo.log 2>&1 || exit 1
cp runs/demo/groups.jsonl groups.jsonl
cp -r runs/demo out/demo
for run in before after; do cp runs/demo/groups.jsonl runs/$run/; done
"""


def lines_of(path: Path) -> list[str]:
    """The lines of a page's shell blocks; a command that goes on in the next line is one."""
    blocks = re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def first(table: dict[str, Any], command: str) -> Any:
    return next((value for start, value in table.items() if re.match(start, command)), False)


def script_of(page: Path, commands: dict[int, str]) -> str:
    """A shell that runs a page's commands and writes the exit code of each to `results`."""
    lines = ["rm -r runs/demo; cp -r out/demo runs/demo", "(", "services=()"]
    stops_policy = any("sql_policy" in command for command in commands.values())
    if stops_policy:
        lines.append("kill $server; wait $server")
    for number, command in commands.items():
        service = first(SERVICES, command)
        if service is None:
            continue
        log = f"out/{number}.log"
        if service:
            program = command.partition(" #")[0]
            lines += [f"{program} >{log} 2>&1 </dev/null &", "services+=($!)", f"answers {service} $!"]
        else:
            lines += ["{", command, f"}} >{log} 2>&1 </dev/null"]
        lines.append(f"echo {number} $? >>results")
    lines += ['for service in "${services[@]}"; do kill $service; wait $service; done', f") || echo {page} failed", ""]
    return "\n".join(lines + (["policy"] if stops_policy else []))


def copied(folder: Path) -> Path:
    """A copy of the tree as it is, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    shutil.copytree(folder / MODEL, folder / "Qwen" / "Qwen3-0.6B")
    (folder / ".venv").symlink_to((ROOT / ".venv").resolve())
    return folder


def test_each_command_that_can_run_here_runs_as_printed(tmp_path: Path) -> None:
    numbered = list(enumerate((page, command) for page in PAGES for command in lines_of(page)))
    runs = {number: command for number, (_, command) in numbered if not first(SKIPPED, command)}
    assert len(runs) > 30
    folder = copied(tmp_path / "tree")
    for name, rows in FILES.items():
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / name).write_text("[]" if name == "tools.json" else text)
    shells = [
        script_of(
            page, {number: runs[number] for number, (of_page, _) in numbered if of_page == page and number in runs}
        )
        for page in PAGES
    ]
    (folder / "all.sh").write_text("\n".join([PREPARE, *shells, "kill $server; wait $server"]))
    variables = {"PATH": f"{folder}/.venv/bin:{os.environ['PATH']}", "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
    namespace = ["bwrap", "--dev-bind", "/", "/", "--proc", "/proc", "--unshare-net", "--unshare-pid"]
    done = subprocess.run(
        [*namespace, "--die-with-parent", "--cap-add", "ALL", "bash", "all.sh"],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=900,
    )
    results = folder / "results"
    codes = dict(tuple(map(int, line.split())) for line in results.read_text().splitlines()) if results.exists() else {}
    wrong: list[str] = []
    for number, command in runs.items():
        if first(SERVICES, command) is None or codes.get(number) in (first(FAILS, command) or (0,)):
            continue
        log = folder / "out" / f"{number}.log"
        printed = log.read_text()[-1500:] if log.exists() else done.stderr[-1500:]
        wrong.append(f"{numbered[number][1][0]}: {command}\nexit code {codes.get(number)}\n{printed}")
    assert not wrong, "\n\n".join(wrong)


def test_programs_of_others_are_known() -> None:
    """A command of a page that is neither this project's nor a known program of others."""
    commands = [command for page in PAGES for command in lines_of(page)]
    unknown = [c for c in commands if program_of(c) is None and c.split()[0] not in {*OTHERS, "torchrun"}]
    assert unknown == []
