"""Files that mean harm or are broken: a report in which they are nothing but text, or one clear error."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.support import commands
from tests.support.browser import Report, opened

EVIL = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'><!-- "
ODD = "a\x00b\u200fc\u202ed\u2028e\x1bf\ud800g\U000e0041h&lt;i%SCRIPT%"
LONG = "x" * 100_000
TOKENS = ["plain", EVIL, "\u202eab\u200f", "\x00", LONG, "<tool_call>", "\\n</tool_call>", "", "\n", "  "]


def tokenizer_with_evil_tokens(folder: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"[unk]": 0}, unk_token="[unk]"))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in TOKENS if text])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[unk]").save_pretrained(folder)
    return folder


def hostile_group() -> dict[str, Any]:
    """One rollout: three tokens of context, then one turn that samples every token there is, each scored."""
    sampled = list(range(len(TOKENS))) * 3
    tokens = [1, 2, 3, *sampled]
    hint = EVIL + ODD
    vote = {"decision": 1, "hint": hint, "text": hint + LONG}
    record = {"span": [3, len(tokens)], "outcome": "scored", "next_state_role": "tool", "votes": [vote] * 64}
    record |= {"hint": hint, "hint_token_ids": [1], "insert_at": 2, "error": EVIL}
    calls = [{"function": {"name": EVIL, "arguments": EVIL}}, EVIL, {"function": None}]
    messages = [
        {"role": "user", "content": EVIL + ODD, "name": EVIL},
        {"role": "assistant", "content": [{"x": EVIL}], "tool_calls": calls},
        {"role": EVIL, "content": ODD + LONG, "name": ODD},
        {"role": "tool", "content": None},
    ]
    rows = [[token, *(other for other in range(4) if other != token)][:3] for token in sampled]
    return {
        "tokens": [tokens],
        "masks": [[-100] * 3 + sampled],
        "scores": [0.5],
        "inference_logprobs": [[1.0] * 3 + [-1.0] * len(sampled)],
        "distill_token_ids": [[[], [], [], *rows]],
        "distill_logprobs": [[[], [], [], *[[-2.0, -1.0, -3.0]] * len(sampled)]],
        "messages": [messages],
        "overrides": [{"stop_reason": EVIL, "opd": {"turns": [record]}, "reward": {EVIL: 1}}],
        "group_overrides": {"task_id": EVIL + ODD, "item_id": EVIL},
    }


def make(file: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return commands.run("agentic_opd.report", str(file), *flags, timeout_s=120)


def only_text(report: Report) -> None:
    """Nothing ran, and nothing but the template's and the script's own elements is there."""
    assert report.page.evaluate("window.pwned") is None
    assert report.page.locator("img, iframe, object, link, form[action], [onerror], [style*=url]").count() == 0


@pytest.mark.parametrize("with_texts", [True, False], ids=["tokenizer", "ids"])
def test_hostile_text_is_text(browser: Browser, tmp_path: Path, with_texts: bool) -> None:
    file = tmp_path / "groups.jsonl"
    bad = {"scores": [float("nan")]}, {"tokens": [[10**30]]}, {"masks": None}, {"overrides": [EVIL]}
    lines = [json.dumps({**hostile_group(), **change}) for change in ({}, *bad)]
    file.write_text("\n".join([*lines, EVIL, "{}", lines[0][:500]]), errors="surrogatepass")
    file.with_suffix(".run.json").write_text(json.dumps({"policy_model": EVIL, EVIL: ODD, "seed": float("inf")}))
    flags = ("--tokenizer", str(tokenizer_with_evil_tokens(tmp_path / "tokenizer"))) if with_texts else ()
    done = make(file, *flags)
    assert done.returncode == 0, done
    assert "Traceback" not in done.stderr
    for number in (2, 3, 4, 6, 7, 8):
        assert f"warning: line {number}" in done.stderr
    with opened(browser, file.with_suffix(".html")) as report:
        only_text(report)
        shown = report.page.locator("#overview").evaluate("element => element.textContent")
        assert EVIL in shown
        assert "a⟨NUL⟩b⟨RLM⟩c⟨RLO⟩d⟨LS⟩e⟨ESC⟩f\ufffdg" in shown
        assert "6 lines of the file are left out" in shown
        report.go("#r=1.0")
        report.page.locator("#turn-0 .t").first.wait_for()
        assert report.page.locator("#turn-0 .t").count() == 3 * len(TOKENS)
        only_text(report)
        stream = report.page.locator("#turn-0 .stream").evaluate("element => element.textContent")
        assert (EVIL in stream) == with_texts
        assert ("⟨RLO⟩ab⟨RLM⟩" in stream) == with_texts
        assert ("98,000 more characters" in stream) == with_texts
        assert ("⟨9⟩" in stream) == (not with_texts)
        for at in range(len(TOKENS)):
            report.page.evaluate(f"document.querySelector('.t[data-at=\"{at}\"]').focus()")
            assert report.texts("#detail .numbers dd")[1:] == ["13.5% -2.0000", "-1.0000 nats"]
        only_text(report)
        report.page.fill("#search", EVIL)
        report.wait_until("document.querySelectorAll('#list li').length >= 1")
        assert report.page.evaluate("document.documentElement.scrollWidth") <= 1280


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n",
        b"not JSON\n",
        b'{"tokens": [[1, 2',
        b"{}\n[]\n",
        b"\xff\xfe\x00",
        b"[" * 200_000,
        b'{"tokens":[[1]]}',
    ],
    ids=["empty", "blank", "text", "torn", "keys", "bytes", "deep", "one key"],
)
def test_a_file_without_groups_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "groups.jsonl"
    file.write_bytes(content)
    done = make(file)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "holds no scored group" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [file]
