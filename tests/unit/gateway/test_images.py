"""Pictures in requests, before a scripted vLLM: recorded, continued, and refused by name."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.attachments.messages import IMAGE_MARK
from agentic_opd.gateway.images import MOST_IMAGES
from tests.support.pictures import base64_of, png, uri

from .fakes import Running, ScriptedVllm
from .test_gateway import checked, run
from .test_protocols import posted

PLACEHOLDER = "<|endoftext|>"
A, B = png(shade=1), png(shade=2)
DIGESTS = [sha256(one).hexdigest() for one in (A, B)]


def seeing(tokenizer: Any) -> ScriptedVllm:
    return ScriptedVllm(tokenizer, placeholder=PLACEHOLDER)


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(data), "detail": "low"}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_a_session_with_pictures(tokenizer: Any, tmp_path: Path) -> None:
    vllm = seeing(tokenizer)
    first = {"role": "user", "content": [said(f"What is {IMAGE_MARK}{PLACEHOLDER} this? "), part(A)]}
    then = {"role": "user", "content": [part(B), said(" and "), part(A)]}

    async def talk(at: Running) -> Any:
        answer = await at.say(first)
        vllm.pictures.clear()  # As a server that was started again.
        response = await at.chat(first, answer, then)
        assert response.status_code == 200, response.text
        await at.end(response.headers["X-Session-Id"])
        return await at.groups()

    (group,) = checked(run(tmp_path, vllm, talk))
    (tokens,), images = group["tokens"], group["overrides"][0]["opd"]["images"]
    (_, _), (prompt, sampled) = vllm.sampled
    assert tokens == prompt + sampled
    assert [one["digest"] for one in images] == [DIGESTS[0], DIGESTS[1], DIGESTS[0]]
    for one in images:
        assert tokens[one["offset"] : one["offset"] + one["length"]] == vllm.pictures[one["digest"]]
    assert vllm.asked[-1]["prompt"]["images"] == [[one["digest"], one["offset"]] for one in images]
    (placeholder,) = tokenizer.encode(PLACEHOLDER, add_special_tokens=False)
    assert tokens.count(placeholder) == sum(one["length"] for one in images)
    messages = group["messages"][0]
    assert messages[0]["content"] == f"What is \ufffd{PLACEHOLDER} this? {IMAGE_MARK}"
    assert [message.get("images") for message in messages] == [[DIGESTS[0]], None, [DIGESTS[1], DIGESTS[0]], None]
    assert {(file.name, file.read_bytes()) for file in (tmp_path / "groups.images").iterdir()} == {
        (f"{digest}.png", data) for digest, data in zip(DIGESTS, (A, B), strict=True)
    }


def test_another_picture_is_another_conversation(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> list[str]:
        answer = await at.say({"role": "user", "content": [part(A)]})
        more = {"role": "user", "content": "And now?"}
        responses = [await at.chat({"role": "user", "content": [part(one)]}, answer, more) for one in (A, B)]
        return [response.headers["X-Session-Id"] for response in responses]

    same, other = run(tmp_path, seeing(tokenizer), talk)
    assert same != other


def test_a_restarted_gateway_continues_a_conversation_with_pictures(tokenizer: Any, tmp_path: Path) -> None:
    vllm, first = seeing(tokenizer), {"role": "user", "content": [part(A), said("?")]}

    async def talk(at: Running) -> Any:
        return await at.say(first, headers={"X-Session-Id": "s"})

    async def go_on(at: Running) -> Any:
        await at.say(first, answer, {"role": "user", "content": "Go on."}, headers={"X-Session-Id": "s"})
        assert (await at.end("s")).json()["turns"] == 2
        return await at.groups()

    answer = run(tmp_path, vllm, talk)
    (group,) = checked(run(tmp_path, vllm, go_on))
    assert [one["digest"] for one in group["overrides"][0]["opd"]["images"]] == DIGESTS[:1]
    assert len(group["tokens"]) == 1


def test_an_answer_is_continued_by_its_id_with_its_pictures(tokenizer: Any, tmp_path: Path) -> None:
    vllm = seeing(tokenizer)
    picture = {"type": "input_image", "image_url": uri(A)}

    async def talk(at: Running) -> Any:
        first = await posted(at, "/v1/responses", {"input": [{"role": "user", "content": [picture]}]})
        more = {"input": "And now?", "previous_response_id": first.json()["id"]}
        second = await posted(at, "/v1/responses", more)
        assert second.status_code == 200, second.text
        await at.end(second.headers["X-Session-Id"])
        return await at.groups()

    (group,) = checked(run(tmp_path, vllm, talk))
    assert len(vllm.asked[-1]["prompt"]["images"]) == 1
    assert group["tokens"] == [[*vllm.sampled[-1][0], *vllm.sampled[-1][1]]]


def test_tokens_of_pictures_are_counted(tokenizer: Any, tmp_path: Path) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(A)}
    body = {"messages": [{"role": "user", "content": [said("What?"), {"type": "image", "source": source}]}]}

    async def talk(at: Running) -> tuple[int, int]:
        counted = await posted(at, "/v1/messages/count_tokens", body)
        answered = await posted(at, "/v1/messages", {**body, "max_tokens": 9})
        return counted.json()["input_tokens"], answered.json()["usage"]["input_tokens"]

    counted, used = run(tmp_path, seeing(tokenizer), talk)
    assert counted == used


def image(url: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


AT = "messages.0.content.0.image_url.url"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:1/a.png", "not fetched from elsewhere"),
        ("file:///etc/passwd", "not fetched from elsewhere"),
        ("data:text/plain;base64,QQ==", "not fetched from elsewhere"),
        ("data:image/png;base64,Q", "base64 can't be read"),
        ("data:image/png;base64,", "not a picture of a known kind"),
        (uri(b"<svg/>"), "not a picture of a known kind"),
        (uri(A, "jpeg"), "declared as image/jpeg, but the data is image/png"),
        (uri(A + b"broken"), "the picture can't be decoded"),
    ],
)
def test_a_picture_that_is_refused_is_named(tokenizer: Any, tmp_path: Path, url: str, says: str) -> None:
    async def talk(at: Running) -> Any:
        return (await posted(at, "/v1/chat/completions", image(url))).json()["error"]

    vllm = seeing(tokenizer)
    error = run(tmp_path, vllm, talk)
    assert error["param"] == AT
    assert error["message"].startswith(f"{AT}: ")
    assert says in error["message"]
    assert not vllm.asked
    assert not (tmp_path / "groups.images").exists()


def test_pictures_are_refused_by_a_policy_that_reads_text_only(tokenizer: Any, tmp_path: Path) -> None:
    blocks = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(A)}}]
    cases = {
        "/v1/chat/completions": (image(uri(A)), AT),
        "/v1/responses": (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": uri(A)}]}]},
            "input.0.content.0.image_url",
        ),
        "/v1/messages": (
            {"messages": [{"role": "user", "content": blocks}], "max_tokens": 9},
            "messages.0.content.0.source.data",
        ),
    }

    async def talk(at: Running) -> None:
        for path, (body, field) in cases.items():
            response = await posted(at, path, body)
            assert response.status_code == 400
            assert f"{field}: the policy policy reads text only" in json.dumps(response.json())

    run(tmp_path, ScriptedVllm(tokenizer), talk)


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_only_users_and_tools_send_pictures(tokenizer: Any, tmp_path: Path, role: str) -> None:
    messages = [{"role": role, "content": [part(A)]}, {"role": "user", "content": "a"}]

    async def talk(at: Running) -> Any:
        return (await posted(at, "/v1/chat/completions", {"messages": messages})).json()["error"]["message"]

    assert f"a message of the {role} has no pictures" in run(tmp_path, seeing(tokenizer), talk)


def test_a_request_has_a_bounded_number_of_pictures(tokenizer: Any, tmp_path: Path) -> None:
    content = [part(A)] * (MOST_IMAGES + 1)

    async def talk(at: Running) -> Any:
        body = {"messages": [{"role": "user", "content": content}]}
        return (await posted(at, "/v1/chat/completions", body)).json()["error"]["message"]

    assert f"at most {MOST_IMAGES} pictures" in run(tmp_path, seeing(tokenizer), talk)
