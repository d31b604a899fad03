"""The pages of docs/ that are made from the code: docs/metrics.md and docs/configuration.md.

`python -m agentic_opd.cli.doc_pages` writes them; a test fails where they are not what it would write.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from agentic_opd.core.metric import Metric
from agentic_opd.distill.metrics import OPD_METRICS
from agentic_opd.env.config import default_settings
from agentic_opd.rollout.metrics import TRAIN_METRICS
from agentic_opd.runs.evaluate import EVAL_METRICS
from agentic_opd.settings.fields import NO_EFFECT
from agentic_opd.settings.flags import GroupedSettings, grouped_settings, shown_default, value_kind
from agentic_opd.training.config import DEFAULTS
from agentic_opd.training.metrics import TRAINER_METRICS

_MADE = "<!-- Made by python -m agentic_opd.cli.doc_pages; edit the descriptions in the code instead. -->"

METRIC_TABLES: dict[str, tuple[Metric, ...]] = {
    "Rollouts": TRAIN_METRICS,
    "Distillation": OPD_METRICS,
    "Evaluation": EVAL_METRICS,
    "The reference trainer": TRAINER_METRICS,
}

_METRICS_INTRO = """\
Where they go: to Weights & Biases with `--env.use_wandb`, else to a file. Beside `groups.jsonl` it is `metrics.jsonl`,
beside `mine.jsonl` `mine.metrics.jsonl`; a `serve` without a file of groups writes `runs/serve/metrics.jsonl`. A line
has `step`, `time` (seconds since 1970) and the metrics. `process` logs one a group, in the order in which they are
finished; `serve` one a step of the trainer, over what came in since the last one, and one more at its end with the
last step's number. A run that is continued goes on in the same file; `evaluate` writes `metrics.json`.

What has nothing to be computed from is left out: a step without a scored token has no `opd/gap_mean`, and it is not 0.

The reference trainer writes its own, the last table, to `metrics.jsonl` in its `output_dir`, and to Weights & Biases
with `train/` in front."""

_CONFIGURATION_INTRO = """\
Each setting can stand in the YAML file (`--config FILE`, sections `env` and `openai`) or on the command line
(`--env.group_size 8`, `--openai.base_url http://127.0.0.1:8000/v1`). Flags go over the file, the file over the
defaults. Every wrong setting is named at once, with the nearest real name; `agentic-opd doctor` with the same settings
checks the whole set-up. Several policy servers are a list below `openai`, in the file only."""


_TRAINER_INTRO = """\
The trainer has a file of its own: `agentic-opd train --config configs/train_demo.yaml`. It holds these names, without
a section; flags go over it, as in `--lr 1e-4 --loss.forward_kl 1`.
[losses.md](losses.md) says what the parts of the loss are."""


def pages() -> dict[Path, str]:
    """Each page's text by its path from the project's root."""
    return {Path("docs/metrics.md"): metrics_page(), Path("docs/configuration.md"): configuration_page()}


def metrics_page() -> str:
    """Every metric, its unit and its meaning."""
    parts = ["# Metrics", _MADE, _METRICS_INTRO]
    for title, metrics in METRIC_TABLES.items():
        rows = [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in metrics]
        parts += [f"## {title}", "\n".join(["| metric | unit | what |", "|---|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def configuration_page() -> str:
    """Every setting, its default and what it does, in the order of --help."""
    env, servers = default_settings()
    groups = grouped_settings({"env": env, "openai": servers[0]})
    idle = [row for row in groups if row.group is NO_EFFECT]
    parts = ["# Configuration", _MADE, _CONFIGURATION_INTRO]
    for row in groups:
        if row not in idle:
            parts += [f"## {row.group.title}", _settings_table([row])]
    parts += ["## The reference trainer", _TRAINER_INTRO, _settings_table(grouped_settings(DEFAULTS))]
    parts += [
        f"## {NO_EFFECT.title}",
        "These are settings of Atropos that do nothing here. They are taken, with a warning, so that files made for "
        f"other environments load: {', '.join(f'`{name}`' for row in idle for name in sorted(row.written))}.",
    ]
    return "\n\n".join(parts) + "\n"


def _settings_table(groups: Iterable[GroupedSettings]) -> str:
    """A row for each setting."""
    rows: list[str] = []
    for group in groups:
        for written, name in group.written.items():
            info, default = type(group.defaults).model_fields[name], shown_default(group.defaults, name)
            shown = default if default in ("unset", "needed") else f"`{default}`"
            cells = (f"`{written}`", f"`{value_kind(info.annotation)}`", shown, info.description or "")
            escaped = [cell.replace("|", "\\|") for cell in cells]
            rows.append(f"| {' | '.join(escaped)} |")
    return "\n".join(["| setting | value | default | what |", "|---|---|---|---|", *rows])


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages below the current folder."""
    argparse.ArgumentParser(
        prog="python -m agentic_opd.cli.doc_pages",
        description=f"Write {' and '.join(map(str, pages()))} from the code; run it in the project's root.",
    ).parse_args(argv)
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
