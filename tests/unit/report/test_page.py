import base64
import gzip
import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentic_opd.core.errors import OutputError
from agentic_opd.core.types import TurnOutcome
from agentic_opd.report.page import Packer, ShownRun, choose_tokenizer, write_report
from agentic_opd.report.read import Run, ShownRollout, ShownTurn, shown_turn
from agentic_opd.report.tokens import TokenTexts
from agentic_opd.wire.group import TurnRecord

from .sample import HINT, group, in_two_sequences, rollouts

SCRIPT = "<script>alert(1)</script><!--"


def run_of(*groups: Any, **settings: Any) -> Run:
    return Run("groups.jsonl", settings, tuple(rollouts(*groups)))


def written(tmp_path: Path, run: Run, tokenizer: Any = None) -> str:
    path = tmp_path / "report.html"
    assert write_report([ShownRun(run, tokenizer)], path) == path.stat().st_size
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    return path.read_text(encoding="utf-8")


def element(page: str, identifier: str) -> str:
    match = re.search(rf'<script type="[^"]+" id="{identifier}">([^<]*)</script>', page)
    assert match is not None
    return match[1]


def unpack(block: str) -> dict[str, Any]:
    """What the page's script does with a block."""
    data = gzip.decompress(base64.b64decode(block))
    size = struct.unpack_from("<I", data)[0]
    head = json.loads(data[4 : 4 + size])
    arrays = {
        name: np.frombuffer(data, np.dtype(f"<{kind}"), length, 4 + size + offset).tolist()
        for name, (kind, offset, length) in head["arrays"].items()
    }
    return {**head, **arrays}


def packed(rollout: ShownRollout, tokenizer: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
    packer = Packer(TokenTexts(tokenizer))
    return unpack(packer.block(rollout)), packer.vocab()


def test_a_block_holds_the_numbers_of_the_line() -> None:
    block, vocab = packed(rollouts()[0])
    assert block["student"] == [-0.5, -1.5, -0.25, -2.0]
    assert [vocab["ids"][place] for place in block["tokens"]] == [10, 11, 12, 13]
    assert block["counts"] == [3, 3, 0, 0]
    assert [vocab["ids"][place] for place in block["others"]] == [10, 7, 8, 11, 8, 9]
    assert block["teacher"] == [-1000, -30000, -40000, -25000, -2000, -50000]
    assert [(turn["start"], turn["from"], turn["to"]) for turn in block["turns"]] == [(3, 0, 2), (6, 2, 4)]
    assert (block["turns"][0]["hint"], block["turns"][0]["scored"]) == (HINT, 2)
    assert (block["turns"][0]["moved"], block["turns"][1]["moved"]) == (2, None)
    assert block["turns"][0]["calls"] == ["terminal"]


def test_a_turn_by_itself_has_the_numbers_that_its_rollout_has(tokenizer: Any) -> None:
    (rollout,) = rollouts(group(passed=(4,)))
    whole, vocab = packed(rollout, tokenizer)
    for index, turn in enumerate(whole["turns"]):
        alone = unpack(Packer(TokenTexts(tokenizer)).turn_block(ShownTurn(rollout, index, {"role": "assistant"})))
        (fields,) = alone["turns"]
        assert fields == {**turn, "from": 0, "to": turn["to"] - turn["from"], "calls": []}
        sampled = slice(turn["from"], turn["to"])
        assert alone["student"] == whole["student"][sampled]
        assert alone["counts"] == whole["counts"][sampled]
        rows = slice(sum(whole["counts"][: turn["from"]]), sum(whole["counts"][: turn["to"]]))
        assert alone["teacher"] == whole["teacher"][rows]
        for name, entries in (("tokens", sampled), ("others", rows)):
            assert [alone["vocab"]["ids"][place] for place in alone[name]] == [
                vocab["ids"][place] for place in whole[name][entries]
            ]
        assert alone["movedFrom"] == rollout.moved_from


def test_a_turn_by_itself_keeps_the_answers_that_name_it() -> None:
    first, second = rollouts(in_two_sequences())
    blocks = [unpack(Packer(TokenTexts(None)).turn_block(ShownTurn(one, 0, {}))) for one in (first, second)]
    judged = [block["judged"] for block in blocks]
    assert [one["before"] for one in judged] == [0, 1]
    assert [[vote["turns"] for vote in one["windows"][0]["votes"]] for one in judged] == [[[1], [1, 2], []]] * 2


def test_a_turn_of_no_group_shows_what_is_known_of_it() -> None:
    record = TurnRecord((3, 6), TurnOutcome.SCORED, "user", hint="h", scored_from=4, baseline_logprobs=(-1.0, -2.0))
    rows = [(4, [7, 8], [-0.5, -1.0]), (5, [9, 8], [-2.5, -0.5])]
    judged = shown_turn((3, 6), (6, 7, 9), (-0.1, -0.2, -0.3), {}, record, rows)
    assert judged.rollout.gaps.tolist() == [0.5, -0.5]
    block = unpack(Packer(TokenTexts(None)).turn_block(judged))
    assert (block["counts"], block["turns"][0]["start"], block["turns"][0]["scored"]) == ([0, 2, 2], 3, 2)
    plain = unpack(Packer(TokenTexts(None)).turn_block(shown_turn((3, 6), (6, 7, 9), (-0.1, -0.2, -0.3), {})))
    assert (plain["counts"], plain["turns"][0]["outcome"]) == ([0, 0, 0], None)
    assert plain["vocab"]["texts"] == ["⟨6⟩", "⟨7⟩", "⟨9⟩"]


def test_a_block_holds_the_question_about_the_whole_rollout_once() -> None:
    block, _ = packed(rollouts()[0])
    assert block["judged"] is None
    first, second = (packed(rollout)[0]["judged"] for rollout in rollouts(in_two_sequences()))
    assert [(judged["before"], judged["windows"][0]["question"]) for judged in (first, second)] == [
        (0, "## Turn 1"),
        (1, None),
    ]
    votes = [(vote["kind"], vote["turns"], vote["isReadable"]) for vote in second["windows"][0]["votes"]]
    assert votes == [("named", [1], True), ("named", [1, 2], True), ("unknown_turn", [], False)]


def test_a_gap_is_measured_from_the_baseline_of_its_turn() -> None:
    one = group()
    one["overrides"][0]["opd"]["turns"][0]["baseline_logprobs"] = [-0.25, -2.0]
    first = rollouts(one)[0]
    assert first.gaps.tolist() == pytest.approx([0.15, -0.5])
    block, _ = packed(first)
    assert block["student"] == [-0.5, -1.5, -0.25, -2.0]
    assert block["baseline"] == [-0.25, -2.0, -0.25, -2.0]
    assert "baseline" not in packed(rollouts()[0])[0]


def test_the_smallest_logprobs_are_packed() -> None:
    far = group()
    far["inference_logprobs"][0][3] = far["distill_logprobs"][0][3][0] = -1000.0
    block, _ = packed(rollouts(far)[0])
    assert block["student"][0] == -1000.0
    assert block["teacher"][0] == -10_000_000


def test_the_context_is_what_the_model_read(tokenizer: Any) -> None:
    one = group()
    text = "<|im_start|>system\nx<|im_end|>\n<|im_start|>user\nname<|im_end|>\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    for tokens, masks, logprobs, overrides in zip(
        one["tokens"], one["masks"], one["inference_logprobs"], one["overrides"], strict=True
    ):
        del overrides["opd"]
        tokens[:3], masks[:3], logprobs[:3] = ids, [-100] * len(ids), [1.0] * len(ids)
    one["distill_token_ids"] = one["distill_logprobs"] = None
    for messages in one["messages"]:
        messages[0]["content"], messages[1]["content"] = "x", "name"
    block, _ = packed(rollouts(one)[0], tokenizer)
    assert "".join(part[1] for part in block["contexts"][0]) == text
    assert [part[:2] for part in block["contexts"][0] if part[0] != "template"] == [["system", "x"], ["user", "name"]]
    without, vocab = packed(rollouts(one)[0])
    assert without["contexts"][0] == [["system", "x", None, False], ["user", "name", None, False]]
    assert vocab["texts"][0] == "⟨10⟩"


def test_data_can_not_become_markup(tmp_path: Path) -> None:
    evil = group(task=SCRIPT + "\u2028\ud800")
    for overrides in evil["overrides"]:
        overrides["opd"]["turns"][0]["hint"] = SCRIPT
    page = written(tmp_path, run_of(evil, policy_model=SCRIPT))
    assert "alert(1)</script>" not in page
    assert page.count("<script") == page.count("</script>") == 4
    assert page.count("<!--") == 0
    (head,) = json.loads(element(page, "head"))["runs"]
    assert head["rollouts"][0]["task"] == SCRIPT + "\u2028\ufffd"
    assert head["settings"]["policy_model"] == SCRIPT
    assert "\u2028" not in page


def test_only_the_pages_own_script_and_style_are_allowed(tmp_path: Path) -> None:
    page = written(tmp_path, run_of(group()))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; ")
    for tag in ("script", "style"):
        (source,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy[1]
    assert re.findall(r"https?://\S+", page) == ["http://www.w3.org/2000/svg',"]
    assert "innerHTML" not in page
    assert not re.search(r"\sstyle=|\son\w+=", page)


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("an earlier one")

    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_report([ShownRun(run_of(group()), None)], path, packed=stop)
    assert path.read_text() == "an earlier one"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OutputError, match="cannot write"):
        write_report([ShownRun(run_of(group()), None)], path / "x.html")
    with pytest.raises(OutputError, match="cannot write"):
        write_report([ShownRun(run_of(group()), None)], tmp_path)


def test_without_a_tokenizer_the_page_says_so() -> None:
    nothing, (note,) = choose_tokenizer(run_of(group()), None)
    assert nothing is None
    assert "ids: there is no settings file (.run.json) beside it. Name a tokenizer with --tokenizer." in note
    _, (note,) = choose_tokenizer(run_of(group(), tokenizer_name="", policy_model="/nowhere"), None)
    assert "'/nowhere' can't be loaded" in note
