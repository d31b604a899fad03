"""`/generate` on an engine whose logprobs are known."""

import json
from typing import Any

import pytest

from .fakes import TABLE_VV, TableEngine, client_of


def ask(engine: TableEngine, **body: Any) -> Any:
    return client_of(engine).post("/generate", json=body)


@pytest.mark.parametrize(
    "prompt", [{"prompt_token_ids": [2, 3]}, {"prompt": "cd"}, "cd", [2, 3]], ids=["ids", "text", "bare text", "list"]
)
def test_every_form_of_a_prompt_is_read(prompt: Any) -> None:
    reply = ask(TableEngine(), prompt=prompt, max_tokens=2).json()
    assert reply["prompt_token_ids"] == [2, 3]
    assert reply["token_ids"] == [[4, 5]]
    assert reply["text"] == ["ef"]
    assert reply["finish_reasons"] == ["length"]
    assert "logprobs" not in reply


def test_logprobs_are_as_atropos_reads_them() -> None:
    reply = ask(TableEngine(), prompt="cd", max_tokens=2, n=2, logprobs=0, temperature=1.0).json()
    row = [[{"4": pytest.approx(float(TABLE_VV[3, 4]))}], [{"5": pytest.approx(float(TABLE_VV[4, 5]))}]]
    assert reply["logprobs"] == [row, row]


def test_prompt_logprobs_hold_the_prompts_token_and_the_most_likely_ones() -> None:
    """Of `cda` the rows about `d` and `a` exist; there is none about `c`."""
    reply = ask(TableEngine(), prompt="cda", max_tokens=1, prompt_logprobs=1).json()
    first, *rows = reply["prompt_logprobs"]
    assert first is None
    for row, before, token in zip(rows, [2, 3], [3, 0], strict=True):
        assert next(iter(row)) == str(token)
        assert set(row) == {str(token), str(TABLE_VV[before].argmax())}
        assert row[str(token)] == pytest.approx(float(TABLE_VV[before, token]))


def test_parameters_are_passed_on_and_null_means_the_default() -> None:
    engine = TableEngine()
    given: dict[str, Any] = {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1, "stop": ["x"], "min_tokens": 1},
        **{"logit_bias": {"3": 1.0}, "ignore_eos": True, "presence_penalty": 1},
    }
    choice = {"choice": ["a", "b"]}
    assert ask(engine, prompt="a", model="policy", min_p=None, max_tokens=2, **given).status_code == 200
    assert ask(engine, prompt="a", stream=False, structured_outputs=choice).status_code == 200
    (first, second) = engine.requests
    assert {name: getattr(first, name) for name in given} == {**given, "logit_bias": {3: 1.0}}
    assert (first.max_tokens, first.min_p) == (2, 0.0)
    assert second.max_tokens is None
    assert second.structured_outputs.choice == ["a", "b"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt.text"),
        ({"prompt": {"prompt": "a", "prompt_token_ids": [1]}}, "prompt"),
        ({"prompt": {"prompt_token_ids": [1, "2"]}}, "prompt.prompt_token_ids[1]"),
        ({"prompt": {"prompt_token_ids": [1, True]}}, "prompt.prompt_token_ids[1]"),
        ({"prompt": {"prompt_token_ids": [1, 8]}}, "prompt.prompt_token_ids[1]"),
        ({"prompt": {"prompt_token_ids": [1] * 16}}, "prompt.prompt_token_ids"),
        ({"prompt": "a", "temperatur": 1.0}, "temperatur"),
        ({"prompt": "a", "flat_logprobs": True}, "flat_logprobs"),
        ({"prompt": "a", "skip_reading_prefix_cache": False}, "skip_reading_prefix_cache"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "temperature": 5}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "min_p": 3}, "min_p"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 2, "temperature": 0}, "n"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": [1]}, "stop[0]"),
        ({"prompt": "a", "seed": 2**63}, "seed"),
        ({"prompt": "a", "seed": 1, "structured_outputs": {}}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"prompt": "a", "structured_outputs": {"regex": "a", "_backend": "x"}}, "structured_outputs._backend"),
        (
            {"prompt": "a", "repetition_detection": {"max_pattern_size": 1, "min_pattern_size": 2}},
            "repetition_detection",
        ),
        ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_bad_requests_are_refused_by_field(body: dict[str, Any], field: str) -> None:
    engine = TableEngine()
    reply = ask(engine, **body)
    assert reply.status_code == 400
    assert reply.json()["error"]["field"] == field
    assert engine.requests == []


def test_another_model_is_not_found() -> None:
    reply = ask(TableEngine(), prompt="a", model="gpt")
    assert reply.status_code == 404
    assert reply.json()["error"] == {"field": "model", "message": "'gpt' is not served here; 'policy' is"}


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"prompt"'])
def test_a_body_that_is_no_json_object_is_refused(content: bytes) -> None:
    reply = client_of(TableEngine()).post("/generate", content=content)
    assert reply.status_code == 400
    assert "JSON" in reply.json()["error"]["message"]


def events_of(reply: Any) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stream_says_each_choices_ids_and_logprobs() -> None:
    reply = ask(TableEngine(version="3"), prompt="cd", max_tokens=2, n=2, logprobs=0, temperature=1.0, stream=True)
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    row = [[{"4": pytest.approx(float(TABLE_VV[3, 4]))}], [{"5": pytest.approx(float(TABLE_VV[4, 5]))}]]
    expected = {"token_ids": [4, 5], "logprobs": row, "finish_reason": "length", "stop_reason": None}
    assert events_of(reply) == [{"index": index, "weight_version": 3, **expected} for index in (0, 1)]


def test_rows_that_were_put_together_keep_their_own_entries() -> None:
    """vLLM makes one output of two that nobody took in time: its rows then name the sampled token once, not twice."""
    from vllm.logprobs import FlatLogprobs

    from agentic_opd.serving.generate import as_dicts

    flat = FlatLogprobs(
        start_indices=[0, 3, 5],
        end_indices=[3, 5, 8],
        token_ids=[7, 7, 2, 4, 9, 1, 3, 1],
        logprobs=[-0.1, -0.1, -2.0, -0.5, float("-inf"), float("nan"), -1.0, -3.0],
    )
    assert as_dicts(flat, 3) == [{7: -0.1, 2: -2.0}, {4: -0.5, 9: -9999.0}, {1: -3.0, 3: -1.0}]
    assert as_dicts(flat, 1) == [{1: -3.0, 3: -1.0}]
