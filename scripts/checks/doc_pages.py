"""The pages of docs/ that are made: metrics.md, configuration.md and judge.md, and the measured part of hardware.md.

`scripts/checks/doc_pages` writes them; a test fails where a page differs from what it would write.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from agentic_opd.core.metric import Metric
from agentic_opd.core.precision import TOLERANCES
from agentic_opd.core.types import Evidence, HindsightPair
from agentic_opd.distill.evidence import ConversationTurn, WholeRollout
from agentic_opd.distill.hints import Questions
from agentic_opd.distill.metrics import OPD_METRICS
from agentic_opd.distill.prompts import (
    JUDGE_QUESTION,
    JUDGE_STEP_PROMPT,
    JUDGE_SYSTEM_PROMPT,
    TRAJECTORY_QUESTION,
    TRAJECTORY_SYSTEM_PROMPT,
)
from agentic_opd.distill.trajectory import UNKNOWN_CONTEXT_CHARS, windows_of
from agentic_opd.env.config import default_settings
from agentic_opd.gateway.config import GatewayConfig
from agentic_opd.learn.config import LearnConfig
from agentic_opd.rollout.metrics import TRAIN_METRICS
from agentic_opd.runs.evaluate import EVAL_METRICS
from agentic_opd.runs.metric_log import RUN_METRICS
from agentic_opd.settings.fields import NO_EFFECT
from agentic_opd.settings.listing import Setting, settings_in
from agentic_opd.settings.old_names import RENAMED
from agentic_opd.training.config import DEFAULTS
from agentic_opd.training.metrics import TRAINER_METRICS
from checks import hardware_page

_GENERATED = "<!-- Made by scripts/checks/doc_pages; edit the descriptions in the code instead. -->"

METRIC_TABLES: dict[str, tuple[Metric, ...]] = {
    "Rollouts": (*TRAIN_METRICS, *RUN_METRICS),
    "Distillation": OPD_METRICS,
    "Evaluation": EVAL_METRICS,
    "The reference trainer": TRAINER_METRICS,
}

_METRICS_INTRO = """\
With `--env.use_wandb` metrics are logged to Weights & Biases, otherwise to a file: `metrics.jsonl` beside
`groups.jsonl`, `mine.metrics.jsonl` beside `mine.jsonl`; a `serve` without a file of groups writes
`runs/serve/metrics.jsonl`. A line has `step`, `time` (seconds since 1970) and the metrics. `process` logs a line for
each group, in the order in which the groups finish. `serve` logs a line for each step of the trainer, over the groups
since the last line, and one more at its end with the last step's number. A resumed run appends to the same file;
`evaluate` writes `metrics.json`.

A metric without data is left out: a step without a scored token has no `opd/gap_mean`, not a 0.

The reference trainer writes its own metrics (the last table) to `metrics.jsonl` in its `output_dir`, and to Weights &
Biases with the prefix `train/`."""

_NOISE = """\
Without a hint the teacher reads the same tokens as the student, and two readings of the same tokens by the same weights
differ by the noise of the precision in which the server computes. Compare only values of the same kind: a root mean
square with a root mean square, `opd/gap_rms` with `opd/noise_rms`. The largest difference grows with the number of
tokens, and occurs at an unlikely token. SmolLM2-135M in bfloat16 had 0.37 nats at most over the 32 tokens of `doctor`,
0.16 over the turns of a run, and a mean gap of 0.107; these numbers do not show whether the gaps exceed the noise.

`doctor`, `validate --server`, the trainer's probe and the report accept the following differences, in nats, for the
precision that the server names (for two precisions the coarser one):"""

_GAUGES = """\
Four metrics show changes that a pass rate does not. pass@k is the unbiased estimate of Chen et al. (2021, arXiv
2107.03374); if pass@8 falls while pass@1 rises, the policy samples less varied solutions (Yue et al., 2025, arXiv
2504.13837). Repetition is seq-rep-n of Welleck et al. (2020, arXiv 1908.04319) with n = 10 tokens; repetition and
length grow when distillation becomes unstable (Luo et al., 2026, arXiv 2604.08527). Over-calling is the opposite of
BFCL's irrelevance. Agreement on failure is the part of the hinted teacher's signal that confirms a failed rollout.

Only repetition has a published threshold: Gopher's filter (Rae et al., 2021, arXiv 2112.11446, table A1) drops a
document of which more than 10% of the characters are in repeated 10-grams. A run warns once when the mean of its last
64 turns is above 10%. The filter is for documents, not for turns: two parallel calls with the same long argument repeat
10-grams correctly, so a world with such calls may be above the threshold from the start."""

_CONFIGURATION_INTRO = """\
Each setting can be given in a YAML file (`--config FILE`, sections `env` and `openai`) or on the command line
(`--env.group_size 8`, `--openai.base_url http://127.0.0.1:8000/v1`). Flags override the file, and the file overrides
the defaults, setting by setting. This file

```yaml
env:
  group_size: 8
  judge: {base_url: "http://127.0.0.1:8002/v1", temperature: 0.5}
  sandbox: {type: docker, image: "python:3.12-slim"}
```

has the same effect as
`--env.judge.base_url http://127.0.0.1:8002/v1 --env.judge.temperature 0.5 --env.sandbox docker ...`.
A whole section is a flag too (`--env.judge '{temperature: 0.5}'`). `--env.sandbox docker` is short for
`--env.sandbox.type docker`. If a flag changes the type, only those settings of the file's section are used that all
types have.

`--help` shows the most used settings, `--help GROUP` (`judge`, `sandbox`, ...) one of the groups below, `--help all`
all settings. All wrong settings are reported together, each with the nearest valid name; `agentic-opd doctor` with the
same settings checks the whole set-up. Several policy servers are a list below `openai`, in the file only."""


_TRAINER_INTRO = """\
The trainer has a separate file: `agentic-opd train --config configs/train_demo.yaml`. It has these names, without a
section; flags override it, as in `--lr 1e-4 --loss.forward_kl 1`. [losses.md](losses.md) explains the parts of the
loss."""


_LEARN_INTRO = """\
[`agentic-opd learn`](your_logs.md) takes the settings of the policy server, distillation, judge, teacher and
renderer, those of the trainer in the section `train`, and its own in the section `learn`: `--train.lr 1e-4
--learn.min_hints 20`."""


_OLD_NAMES = """\
A flag, a file or a constructor with an earlier name is refused, with the name of today (all below `env`). A `.run.json`
beside groups of an earlier version is read with these names."""


_GATEWAY_INTRO = """\
[The gateway](gateway.md) takes the settings above of the policy server, distillation, judge and teacher, `renderer` and
`renderer.options`, and its own, in the same sections: `agentic-opd gateway --env.port 8080`."""


_JUDGE_INTRO = """\
For every turn the judge reads the task, the turn and what came after it, and votes `prm_votes` times. A vote is
`\\boxed{1}` with a hint of more than 10 characters between `[HINT_START]` and `[HINT_END]`, or `\\boxed{-1}`; anything
else abstains. A hint is accepted if more than half of the votes that were asked for are positive (`hint.vote_rule`).
Hints that give hidden tests away are left out before one is chosen.

These words are read in the ways that judges write them: `\\boxed { 1 }`, `\\boxed{\\text{1}}`, `\\boxed{1.0}`, any
minus sign, `[ hint_start ]`, `[HINT\\_START]`. What has two readings abstains: boxes that differ, a second hint, a
hint without its end, reasoning without its end. Boxes in the reasoning and in the hint do not count. Spaces in a row
count as one of the hint's characters, and characters that can't be seen as none.

If several votes bring a hint, `hint.selection` takes the `longest` (the default) or the `shortest`. With `overlap` the
teacher reads the turn with each of several distinct hints, and without a hint, in one request. The hint is chosen whose
teacher shares most probability with the reading without a hint: the largest mean over the turn's tokens.
[wire_format.md](wire_format.md#compared-hints) has the formula and the recorded fields.

A turn with a single hint costs nothing more: there is nothing to compare. Each further hint costs one reading of the
turn, and a comparison one more, without a hint. All of them take the turn's context from the prefix cache. With
`scripts/bench/scoring --ways end hints-2 hints-3` on two busy CPU cores, contexts of 1,500 to 5,100 tokens, a turn took
64 ms with one hint alone, 156 ms to compare two hints and 227 ms to compare three. Recording the student's 50 most
likely tokens while it samples would save the reading without a hint, but costs 15 ms and 187 kB in every turn of 150
tokens, also in those without a hint.

## Sources of your own

`hint.source` also takes a function of a Python file, as `FILE.py:NAME` or `package.module:NAME`. It has one parameter,
a `SourceTurn` (`agentic_opd.distill.sources`), and returns `Hints`, or a text with the reason why it has no hint:

```python
async def wrong_hint(turn: SourceTurn) -> Hints | str:
    accepted = await turn.judged()
    if not accepted:
        return "the judge accepted no hint"
    hint = turn.pool.of_other_task(*accepted)
    return Hints("", [hint.text], hint.task_id) if hint else "no other task has an accepted hint yet"
```

`turn.context` is the turn with its evidence, `turn.pool` holds the accepted hints of other turns, and `turn.judged()`
asks the judge. A source that needs no judge may be a plain function. The first text that reveals no hidden test is
used; for an empty text without an introduction the teacher reads no hint. An exception, or another result, stops
the run. `scripts/learning/hint_sources.py` has two examples.

## Evidence

With `hindsight.evidence: delayed` the judge reads this evidence about a turn:

| evidence | what it is |
|---|---|
| `tool` | the results of the turn's own calls |
| `user` | the user's next message |
| `repeated` | that the turns directly before made the same calls and got the same results; only if the \
user said nothing in between |
| `later` | results of later turns, and the user's messages there, up to the next change of a judged file; only if the \
turn itself changed one |
| `verdict` | the result of the hidden tests, for each turn whose changes remain in the judged files: \
which checks failed and how, and the line of the solution that raised; never an expected value, nor an input that the \
task does not show. For a closing turn only the count, if tests failed: enough to see whether its claim is refuted |

Judged files are all files that are collected for the hidden tests, whatever their names, because a solution may run or
read any of them. Changes are determined from the files themselves, before and after each call, so a heredoc or `sed`
counts like `patch`. A turn's changes remain as long as one of its lines does, compared without spaces and comments;
those of a turn that only deleted or moved lines always remain. So a note, comment or formatting in a later turn does
not move the verdict away from the turn at fault.

In the conversations of a [gateway](gateway.md) it is not known which calls changed a file. A complaint about the work
is therefore evidence about the last turn before it that called tools, and about the turn that it answers.

With `hindsight.evidence: next_state`, the published method, a turn's only evidence is its next state, and for the last
turn the verdict.

The system prompt of the judge is (`judge.system_prompt`):"""

_JUDGE_QUESTION = """\
The question is (`judge.question`), with these placeholders filled in:"""

_JUDGE_EXAMPLE = """\
Text from the task, the policy or the tools can't imitate the judge's protocol: each heading ends in a mark that is
made from a secret of the run and the task. A heading, `\\boxed` or `[HINT_START]` in a task, a turn or a result is
broken by a space, and so are the control tokens of the common model families and of the policy's tokenizer. The turn's
record has the question as it was sent (`question`). For example:"""

_JUDGE_STEP = """\
With `judge.step_votes` above 0 the judge is asked a second question about the same text (`judge.step_prompt`). The
majority of its votes becomes the turn's `step_score` (1, 0 or -1; a tie is 0), which the trainer can use as a reward.
If the judge scores turns with a hint better than the others, it has probably answered the first question again; a
warning says so.

The system prompt of the second question is:"""

_JUDGE_TRAJECTORY = """\
## Whole rollouts

With `judge.scope: trajectory` the judge reads a whole rollout when it has ended: the task, the numbered turns, each
with the results of its calls and the user's reply, and the verdict. It is asked for `prm_votes` answers. Each answer
names at most `judge.max_turns` turns, each with a hint, or says that no turn is at fault. Only these turns can get a
hint. A rollout costs one question instead of one for each turn. A turn's number may be written as `3`, `Turn 3`, `#3`,
`No. 3` or `three`; a range or a list of turns before one hint abstains.

A hint is accepted for a turn by the same rule, counted by turn: more than half of the answers that were asked for
name it (`hint.vote_rule`, `hint.selection` and the filter of hidden tests as above). Turns without enough of them end
as `vote_failed`, and those that nothing followed as `no_next_state`. `hint.source` takes `judge` and sources of your
own as above: `turn.judged()` returns the hints that the answers accept for the turn. `judge.step_votes` asks about
single turns and is refused.

The system prompt is (`judge.trajectory_prompt`, where `{max_turns}` is replaced by that setting):"""

_TRAJECTORY_QUESTION = """\
The question is (`judge.trajectory_question`); an assistant message that is context only, for example because the
client wrote it, has a label in place of a number (`Turn C1`):"""

_TRAJECTORY_EXAMPLE = """\
Headings, protocol words and control tokens in the sections are broken as above. For example:"""

_TRAJECTORY_REST = """\
An answer is read without its reasoning, and may have Markdown or prose around the words of the protocol. An answer that
violates the protocol abstains as a whole and is counted by its kind: no part of it is used, and no turn is guessed.

| `opd/trajectory_vote/` | the answer |
|---|---|
| `named` | names turns, each with a hint of more than 10 characters after its `\\boxed{N}` |
| `none` | says `\\boxed{-1}`, and has no hint |
| `context_turn` | also names a message that is context only. That name is left out, the others count |
| `unreadable` | has no box and hint that can be read: prose or JSON alone, a hint that does not end, two numbers in a \
box, `\\boxed{-1}` beside a turn. Abstains, as all below |
| `unknown_turn` | names a turn that does not exist, or that its window does not show in full |
| `repeated_turn` | has two hints for a turn |
| `hint_without_turn` | has a hint without a box before it |
| `turn_without_hint` | names a turn without a hint, or with one that is too short |
| `too_many_turns` | names more than `judge.max_turns` |
| `every_turn` | names all, and these are more than `judge.max_turns` |

If a rollout is longer than the judge's context (`judge.max_question_chars`), it is asked about in several windows.
Each has the task, the verdict, some turns in full, and an outline of the others with one line for each; `prm_votes`
answers are asked for each. Longer texts are cut in the middle, and the cut says how many characters are missing. The
record of the rollout has the question of each window with its answers
([wire_format.md](wire_format.md#a-judged-trajectory)).

## Failed rollouts only

With `judge.when: failed` the judge reads only rollouts that failed, for either `judge.scope`; the turns of the others
end as `not_judged`. `opd/judged_share` is the share of turns that are judged. Turns are then judged at the end of
their rollout. A rollout has failed by these rules:

| where | failed if |
|---|---|
| worlds with hidden tests or another verdict | not all checks passed |
| a [gateway](gateway.md)'s session | the client gave a reward of 0 or less to it or to one of its turns, or commented \
on a turn without a reward. Without any reward and comment: if the user said something after a turn, or the session \
ended with feedback in words, since only the judge can recognise a complaint |
| groups of a file, and `Hindsight` | not all checks passed (`verification`); without counts, if the score is 0 or \
less. Without a score: if there is a `feedback` in words, or the user said something after a turn |
| conversations in text | the user said something after a turn |
| a part of an open session | as a session, with what the client had sent when the part was made |

## Open sessions

A [gateway](gateway.md) judges a whole session at its end, so nothing is learned from a session that does not end. With
`judge_every_turns: N` it makes a *part* as soon as N turns of an open session have a next state: the judge is asked
about these turns, and they form a separate group, which is written and sent at once. The last group has the turns that
remain at the session's end.

- A turn is in one part, so it is judged and scored once. The judge reads the turns before a part as context (`C1`,
  `C2`, ...) and can't name them, so later messages are evidence about later turns only. With a larger N the judge sees
  more of a turn's consequences. Each part reads the earlier turns again, up to `judge.max_question_chars`.
- The record of each group has the questions about its own turns with their `judge_tokens`.
- A turn that nothing followed waits for the next part, or for the end. The session's reward and its final feedback
  reach the last group. Feedback for a single turn counts until the turn is in a part; later it is refused (409,
  `group_made`).
- A part is in the journal before the judge is asked, and its group before it is written. After a restart, a part
  whose group was not finished is asked about again, and no other; the record lacks the tokens of the first question.
- With `judge.scope: turn` (each turn is judged when its next state arrives), and with a `group_size` above 1 (which
  compares whole sessions), the setting is refused."""

_JUDGE_COST = """\
## Cost

The table has the tokens that the judge read and sampled per rollout, for the same rollouts with each setting
(`scripts/learning/judge_tokens`; for the conversations and the scripted rollouts only the tokens read), and the
percentage of `turn`:

| rollouts | `turn` | `trajectory` | and `when: failed` |
|---|---|---|---|
| coding: 32, half passed | 1,124 | 892 (79%) | 43% |
| SQL: 64, 80% passed | 985 | 884 (90%) | 19% |
| coding, scripted, two or three functions: 64 of 4.5 turns, 70% passed | 2,505 | 1,118 (45%) | 13% |
| BFCL conversations: 50, 52% passed | 6,617 | 2,700 (41%) | 19% |
| the same, 50 right ones of 13 turns | 6,844 | 2,287 (33%) | |

With a prefix cache it computes 293, 263 and 2,537 of these tokens with `turn`, and 273, 129 and 2,236 with
`trajectory` (coding, SQL, and the first 50 conversations). Use `trajectory` for rollouts of many turns: a third of the
tokens is reached at 13. With one or two turns it saves little, and a question about a single turn shows exactly its
consequences: use `turn`. No shorter prompt changes that: the coding rollouts have 1.8 judged turns, and even with an
empty system prompt a question about a whole one would take 39% of the tokens of `turn`."""

_JUDGE_ENDPOINT = """\
## The endpoint

`judge.base_url` is any endpoint with `/chat/completions`. Its limitations are detected from its first refusals:

| the endpoint | what the package does |
|---|---|
| ignores or refuses `n` | the missing votes are asked for one by one |
| refuses `max_tokens` or `temperature` | `max_completion_tokens` is sent, or the parameter is left out |
| only streams | all later requests ask for a stream |
| answers with a list of parts | the text parts are read, and those with reasoning are not |
| has an empty content | a finished `reasoning_content` is read in its place |
| does not separate the model's reasoning | the text after the reasoning is read, by the end marks of any family: \
`</think>`, `</thinking>`, `[/THINK]`, `<\\|channel\\|>final<\\|message\\|>`, `Here is my response:`, ... \
An answer whose reasoning does not end is not a vote |
| has a query in its address (`https://HOST/openai/deployments/NAME?api-version=...`) | the query is part of each \
request. With `api-version` in it the key is sent as `api-key`, as Azure wants it, else as `Authorization: Bearer`. \
The address may end in `/chat/completions` |

**Rate limits.** After a 429, or a 503 with `Retry-After`, all questions wait for the pause that the endpoint asks
for: `retry-after-ms`, `Retry-After` in seconds or as a date, the reset of a used-up limit (`x-ratelimit-reset-
requests`, ...), or the words of the error (`try again in 20s`). Without any, the pause is 1 s, and doubles up to 60
s. Then one question is sent, and after its answer the others: half as many at a time as before, and one more with
each round of answers, up to `judge.max_concurrent`. A rate limit of a few minutes loses no vote. Pauses above 600 s are
cut to 600 s, with a warning. If no question is answered for 20 minutes, turns end as `judge_error`, and one question is
sent after each further pause.

**Refusals of every request**, because of the key, the account (`insufficient_quota`, billing), the model or the
address, are not retried: the log says once what to set, and questions fail at once as `judge_error`. One question is
sent each minute, so that the run continues by itself when the endpoint answers again."""

_EXAMPLE = HindsightPair(
    turn_index=0,
    task_text="Write `flatten(items)` in solution.py: return one flat list of all values in items.",
    turn_text="[write_file]\npath: solution.py\ncontent:\ndef flatten(items):\n    return sum(items, [])\n",
    evidence=(
        Evidence("tool", "wrote 2 lines to solution.py"),
        Evidence("later", "ok   flatten([[1], [2]])\nFAIL flatten([1, [2, 3]]): TypeError: ...\n[exit code 1]", 1),
        Evidence(
            "verdict",
            "Hidden tests: 3 of 10 passed.\nFAIL check 1: it raises TypeError in line 2 of solution.py: "
            "return sum(items, [])",
        ),
    ),
)


_WHOLE_EXAMPLE = WholeRollout(
    _EXAMPLE.task_text,
    (
        ConversationTurn(0, _EXAMPLE.turn_text, _EXAMPLE.evidence[0].text),
        ConversationTurn(1, "[terminal]\ncommand: python test_solution.py", _EXAMPLE.evidence[1].text),
        ConversationTurn(2, "flatten works.", ""),
    ),
    _EXAMPLE.evidence[2].text,
)


def pages() -> dict[Path, str]:
    """Each page's text by its path from the project's root."""
    return {path: make() for path, make in makers().items()}


def makers() -> dict[Path, Callable[[], str]]:
    """What makes each page's text."""
    return {
        Path("docs/metrics.md"): metrics_page,
        Path("docs/configuration.md"): configuration_page,
        Path("docs/judge.md"): judge_page,
        hardware_page.PAGE: hardware_page.current_page,
    }


def metrics_page() -> str:
    """Every metric, its unit and its meaning."""
    parts = ["# Metrics", _GENERATED, _METRICS_INTRO]
    for title, metrics in METRIC_TABLES.items():
        rows = [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in metrics]
        parts += [f"## {title}", "\n".join(["| metric | unit | what |", "|---|---|---|", *rows])]
    tolerances = [f"| {name} | {tolerance.rms:g} | {tolerance.largest:g} |" for name, tolerance in TOLERANCES.items()]
    parts += [
        "## Gauges",
        _GAUGES,
        "## Noise",
        _NOISE,
        "\n".join(["| precision | root mean square | at most |", "|---|---|---|", *tolerances]),
    ]
    return "\n\n".join(parts) + "\n"


def configuration_page() -> str:
    """Every setting, its default and what it does, in the order of --help."""
    env, servers = default_settings()
    rows = settings_in({"env": env, "openai": servers[0]})
    above = {_table_row(row) for row in rows}
    gateway = [row for row in settings_in({"env": GatewayConfig()}) if _table_row(row) not in above]
    parts = [
        "# Configuration",
        _GENERATED,
        _CONFIGURATION_INTRO,
        *_tables([row for row in rows if row.group is not NO_EFFECT]),
    ]
    parts += ["## The gateway", _GATEWAY_INTRO, _settings_table(gateway)]
    parts += ["## The reference trainer", _TRAINER_INTRO, _settings_table(settings_in(DEFAULTS))]
    parts += ["## From your own logs", _LEARN_INTRO, _settings_table(settings_in({"learn": LearnConfig()}))]
    idle = sorted(row.flag for row in rows if row.group is NO_EFFECT)
    parts += [
        f"## {NO_EFFECT.title}",
        "These are settings of Atropos that have no effect here. They are accepted, with a warning, so that files for "
        f"other environments load: {', '.join(f'`{name}`' for name in idle)}.",
        "## Names of earlier versions",
        _OLD_NAMES,
        "\n".join(["| earlier | now |", "|---|---|", *(f"| `{old}` | `{new}` |" for old, new in RENAMED.items())]),
    ]
    return "\n\n".join(parts) + "\n"


def judge_page() -> str:
    """The judge's prompts, and the evidence in them."""
    example = Questions(b"an example").question(_EXAMPLE)
    parts = [
        "# The judge",
        _GENERATED,
        _JUDGE_INTRO,
        _fenced(JUDGE_SYSTEM_PROMPT),
        _JUDGE_QUESTION,
        _fenced(JUDGE_QUESTION),
    ]
    parts += [_JUDGE_EXAMPLE, _fenced(example), _JUDGE_STEP, _fenced(JUDGE_STEP_PROMPT)]
    parts += [_JUDGE_TRAJECTORY, _fenced(TRAJECTORY_SYSTEM_PROMPT), _TRAJECTORY_QUESTION, _fenced(TRAJECTORY_QUESTION)]
    (window,) = windows_of(_WHOLE_EXAMPLE, Questions(b"an example"), UNKNOWN_CONTEXT_CHARS)
    parts += [_TRAJECTORY_EXAMPLE, _fenced(window.question), _TRAJECTORY_REST, _JUDGE_COST, _JUDGE_ENDPOINT]
    return "\n\n".join(parts) + "\n"


def _fenced(text: str) -> str:
    return f"```text\n{text}\n```"


def _tables(rows: Sequence[Setting]) -> Iterator[str]:
    """Yield a heading and a table for each group."""
    for group in dict.fromkeys(row.group for row in rows):
        yield f"## {group.title}"
        yield _settings_table([row for row in rows if row.group is group])


def _settings_table(rows: Iterable[Setting]) -> str:
    return "\n".join(["| setting | value | default | what |", "|---|---|---|---|", *map(_table_row, rows)])


def _table_row(row: Setting) -> str:
    default = row.shown_default()
    default_cell = default if default in ("unset", "needed") else f"`{default}`"
    text = row.info.description or ""
    of_type = f"`{row.type_name}`: {text}" if row.type_name else text
    cells = (f"`{row.flag}`", f"`{row.placeholder()}`", default_cell, of_type)
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages below the current folder."""
    argparse.ArgumentParser(
        prog="scripts/checks/doc_pages",
        description=f"Write {', '.join(map(str, makers()))} from the code; run it in the project's root.",
    ).parse_args(argv)
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
