"""Environments of the archived Atropos repository with Hindsight, as they are: not a line of them is changed.

python -m tests.support.archived_environment NAME serve ...

ATROPOS_COPY names a copy of the repository; what its environments import must be installed. Their data comes from files
that `write_data` puts into the working directory, where `load_dataset` finds them.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atroposlib.envs.base import BaseEnv

from agentic_opd.env import Hindsight

VARIABLE = "ATROPOS_COPY"

ENVIRONMENTS = {
    "gsm8k": ("gsm8k_server", "GSM8kEnv"),
    "letters": ("letter_counting_environment/letter_counting_environment", "LetterCountingEnv"),
    "tools": ("tool_calling_server", "SingleToolCallingEnv"),
    "blackjack": ("game_environments/gymnasium/blackjack/blackjack_env_no_thinking", "BlackjackEnvNoThinking"),
    "pairs": ("rlaif_server", "RLAIFEnv"),
    "taxi": ("game_environments/gymnasium/gym_taxi", "GymTaxiEnv"),
    "goofy": ("community/goofy_math/goofy_math_server", "GoofyMathEnv"),
}
"""Name -> file and class."""

SUMS = [(a, b) for a in range(2, 12) for b in range(2, 12)]
TOOL = json.dumps([{"name": "add", "parameters": {"a": "int", "b": "int"}}])


def load(name: str) -> type[BaseEnv]:
    """The environment's class. Raises ImportError where something that it imports is not installed."""
    copy, (file, cls) = Path(os.environ[VARIABLE]), ENVIRONMENTS[name]
    sys.path.append(str(copy))
    spec = importlib.util.spec_from_file_location(f"archived_{name}", copy / "environments" / f"{file}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, cls)


def write_data(folder: Path) -> None:
    """Write what the environments load."""
    sums = [{"question": f"What is {a} + {b}?", "answer": f"So it is #### {a + b}"} for a, b in SUMS]
    _write(folder / "gsm8k", "main", sums)
    calls = [
        {
            "conversations": [
                {"from": "system", "value": f"<tools>{TOOL}</tools>"},
                {"from": "human", "value": f"Add {a} and {b}."},
                {"from": "gpt", "value": call(a, b)},
            ]
        }
        for a, b in [*SUMS, *SUMS]
    ]
    _write(folder / "NousResearch" / "XLAM-Atropos", "default", calls)
    _write(folder / "NousResearch" / "Letter-Counting-Eval", "default", [{"Prompt": "How many?", "Answer": "1"}])
    talks = [
        {"conversation": [{"role": "user", "content": f"Tell me of {a}."}, {"role": "assistant", "content": "No."}]}
        for a, _ in SUMS
    ]
    _write(folder / "allenai" / "WildChat", "default", talks)
    words = folder / "corpora" / "words"
    words.mkdir(parents=True)
    (words / "en").write_text("banana\napple\ncherry\nletter\nmoon\nstreet\nbubble\n")
    (words / "README").write_text("Seven words.\n")


def call(a: int, b: int) -> str:
    """The call that adds them, in words of the environment."""
    return "<tool_call>\n" + json.dumps({"name": "add", "arguments": {"a": a, "b": b}}) + "\n</tool_call>"


def _write(folder: Path, config: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    head = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n"
    for split, part in (("train", text), ("test", text[: text.index("\n") + 1])):
        (folder / f"{split}.jsonl").write_text(part)
        head += f"  - split: {split}\n    path: {split}.jsonl\n"
    (folder / "README.md").write_text(head + "---\n")


def with_hindsight(env: type[BaseEnv]) -> type[BaseEnv]:
    """The environment's class behind the mixin; the verdict names the task and the score."""

    class Archived(Hindsight, env):  # type: ignore[misc, valid-type]
        def verdicts(self, group: Mapping[str, Any]) -> list[str]:
            return [f"The score is {score}. The task was {group['item']!s:.200}" for score in group["scores"]]

    return Archived


if __name__ == "__main__":
    wanted = sys.argv.pop(1)
    with_hindsight(load(wanted)).cli()
