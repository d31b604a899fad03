"""Pictures before a real vLLM: a model that sees (Idefics3's shape, random weights), whose processor runs on PIL."""

import json
import shutil
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from bench.local_server import LocalServer, local_server

from tests.support import commands
from tests.support.environment import read_lines
from tests.support.gateway import Served, request, served
from tests.support.pictures import base64_of, png, uri
from tests.support.places import ROOT
from tests.support.plugin_client import TOLERANCE, ask
from tests.support.vision_model import reading, save_vision_model

pytestmark = [pytest.mark.vllm, pytest.mark.all]

WIDE, SQUARE = png(64, 32), png(40, 40, shade=90)
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


class Seeing(NamedTuple):
    folder: Path
    server: LocalServer
    gateway: Served


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    root = tmp_path_factory.mktemp("seeing")
    model = save_vision_model(root / "model")
    launcher = (str(ROOT / "scripts" / "serve_vllm"),)
    flags = ("--openai.model_name", str(model), "--env.hint.source", "feedback", "--env.distill_topk", "20")
    with (
        local_server(model, log=root / "vllm.log", launcher=launcher, cwd=ROOT) as server,
        served(server.base_url, root, *flags) as gateway,
    ):
        yield Seeing(model, server, gateway)


def picture(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(data)}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.fixture(scope="module")
def group(seeing: Seeing) -> dict[str, Any]:
    """A conversation of three turns, with a picture in each of its first two user messages."""
    gateway = seeing.gateway
    messages: list[Any] = []
    for content in (
        [picture(WIDE), said("\nWhat is it?")],
        [said("Before "), picture(SQUARE), said(" and behind.")],
        "Look: <image>",
    ):
        messages.append({"role": "user", "content": content})
        options = {"max_tokens": 12, "temperature": 1, "extra_body": {"seed": 5}}
        answer = gateway.chat(*messages, session="pictures", **options).choices[0].message
        messages.append({"role": "assistant", "content": answer.content})
    return gateway.end("pictures", reward=0.5, feedback="Say its colour.")


def tokens_of(seeing: Seeing, data: bytes) -> list[int]:
    reply = ask(seeing.server, "/v1/opd/images", data)
    assert reply.status == 200, reply.body
    return reply.body["token_ids"]


def test_a_prompt_is_the_tokens_of_vllms_own_route(seeing: Seeing, group: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [said("What is it?"), picture(WIDE)]}]
    body = {"model": str(seeing.folder), "messages": messages, "max_tokens": 1, "return_token_ids": True}
    own = request(f"{seeing.server.base_url}/v1/chat/completions", body)["prompt_token_ids"]
    first, *_ = group["overrides"][0]["opd"]["turns"]
    assert group["tokens"][0][: first["span"][0]] == own


def test_the_group_places_its_pictures(seeing: Seeing, group: dict[str, Any]) -> None:
    images, tokens = group["overrides"][0]["opd"]["images"], group["tokens"][0]
    assert [one["digest"] for one in images] == [sha256(one).hexdigest() for one in (WIDE, SQUARE)]
    for one, data in zip(images, (WIDE, SQUARE), strict=True):
        own = tokens_of(seeing, data)
        assert tokens[one["offset"] : one["offset"] + one["length"]] == own
    assert len({one["length"] for one in images}) == 2
    names = [message.get("images") for message in group["messages"][0]]
    assert names == [[images[0]["digest"]], None, [images[1]["digest"]], None, None, None, None]
    files = sorted((seeing.gateway.folder / "groups.images").iterdir())
    assert [file.name for file in files] == sorted(f"{one['digest']}.png" for one in images)
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_rows_with_pictures_are_transformers_own(seeing: Seeing, group: dict[str, Any]) -> None:
    tokens, opd = group["tokens"][0], group["overrides"][0]["opd"]
    ids_TK, logprobs_TK = group["distill_token_ids"][0], group["distill_logprobs"][0]
    scored = [turn for turn in opd["turns"] if turn["outcome"] == "scored"]
    assert len(scored) == 3
    worst = 0.0
    for turn in scored:
        (start, end), at, hint = turn["span"], turn["insert_at"], turn["hint_token_ids"]
        placed = [(image["offset"], data) for image, data in zip(opd["images"], (WIDE, SQUARE), strict=True)]
        pictures = [(offset, data) for offset, data in placed if offset < end]
        moved = [(offset + (len(hint) if at <= offset else 0), data) for offset, data in pictures]
        read = reading(seeing.folder, [*tokens[:at], *hint, *tokens[at:end]], moved)
        for position in range(start, end):
            row = read[position + len(hint) - 1, ids_TK[position]]
            worst = max(worst, float(np.abs(row - logprobs_TK[position]).max()))
        plain = read if not hint else reading(seeing.folder, tokens[:end], pictures)
        sampled = [plain[p - 1, tokens[p]] for p in range(start, end)]
        np.testing.assert_allclose(group["inference_logprobs"][0][start:end], sampled, atol=TOLERANCE)
    assert worst < TOLERANCE
    # The same ids are read otherwise with another picture.
    start, end = scored[0]["span"]
    offset = opd["images"][0]["offset"]
    own, other = (reading(seeing.folder, tokens[:end], [(offset, data)]) for data in (WIDE, png(64, 32, shade=120)))
    assert np.abs(own - other)[start - 1 : end - 1].max() > 0.05


@pytest.fixture
def file(seeing: Seeing, group: dict[str, Any], tmp_path: Path) -> Path:
    """The group in a file by itself, with its settings and its folder of pictures."""
    file = tmp_path / "groups.jsonl"
    file.write_text(json.dumps(group) + "\n")
    shutil.copy(seeing.gateway.folder / "groups.run.json", tmp_path)
    shutil.copytree(seeing.gateway.folder / "groups.images", tmp_path / "groups.images")
    return file


def test_validate_reads_the_pictures_and_scores_with_them(seeing: Seeing, file: Path) -> None:
    done = commands.run("agentic_opd", "validate", str(file), "--server", seeing.server.base_url)
    assert done.returncode == 0, done
    assert "computed again" in done.stdout
    changed = file.with_name("groups.images") / f"{sha256(WIDE).hexdigest()}.png"
    changed.write_bytes(png(64, 32, shade=1))
    done = commands.run("agentic_opd", "validate", str(file))
    assert done.returncode == 1
    assert f"the picture {changed.stem}" in done.stdout
    assert "has changed" in done.stdout


@pytest.mark.parametrize("more", [(), ("--keep-hints",)], ids=["new hints", "kept hints"])
def test_a_file_with_pictures_is_distilled_again(
    seeing: Seeing, group: dict[str, Any], file: Path, more: tuple[str, ...]
) -> None:
    out, tools = file.with_name("again.jsonl"), file.with_name("tools.json")
    tools.write_text("[]")
    done = commands.run(
        *("agentic_opd", "distill", str(file), "--out", str(out), "--tools", str(tools), *more),
        *("--openai.base_url", f"{seeing.server.base_url}/v1"),
    )
    assert done.returncode == 0, done
    (again,) = read_lines(out)
    assert again["overrides"][0]["opd"]["images"] == group["overrides"][0]["opd"]["images"]
    assert commands.run("agentic_opd", "validate", str(out)).returncode == 0
    rows = zip(again["distill_logprobs"][0], group["distill_logprobs"][0], strict=True)
    differences = [abs(ours[0] - theirs[0]) for ours, theirs in rows if theirs and ours]
    assert len(differences) >= 24
    assert max(differences) < TOLERANCE


@pytest.mark.parametrize("role", ["user", "tool"])
def test_each_protocol_makes_the_same_prompt(seeing: Seeing, role: str) -> None:
    gateway, prompts = seeing.gateway, list[list[int]]()
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    chat: list[Any] = [{"role": "user", "content": [said("Look "), picture(SQUARE)]}]
    items: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Look "}, {"type": "input_image", "image_url": uri(SQUARE)}],
        }
    ]
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(SQUARE)}
    blocks: list[Any] = [{"role": "user", "content": [said("Look "), {"type": "image", "source": source}]}]
    if role == "tool":
        chat += [
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": [picture(WIDE)]},
        ]
        items += [
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [{"type": "input_image", "image_url": uri(WIDE)}],
            },
        ]
        wide = {**source, "data": base64_of(WIDE)}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "image", "source": wide}]}
        blocks += [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
            {"role": "user", "content": [result]},
        ]
    tools = {
        "chat/completions": [{"type": "function", "function": function}],
        "responses": [{"type": "function", **function}],
        "messages": [{"name": "look", "input_schema": function["parameters"]}],
    }
    for path, body in (
        ("chat/completions", {"messages": chat, "max_tokens": 4}),
        ("responses", {"input": items, "max_output_tokens": 4}),
        ("messages", {"messages": blocks, "max_tokens": 4}),
    ):
        session = f"{role}-{path.partition('/')[0]}"
        gateway.ask(f"/sessions/{session}/v1/{path}", {**body, "tools": tools[path]})
        found = gateway.end(session)
        (turn,) = found["overrides"][0]["opd"]["turns"]
        prompts.append(found["tokens"][0][: turn["span"][0]])
        assert len(found["overrides"][0]["opd"]["images"]) == (2 if role == "tool" else 1)
    assert prompts[0] == prompts[1] == prompts[2]
