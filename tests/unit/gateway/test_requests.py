"""What requests of real clients say beside the usual: fields, histories of other providers, and their last messages."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, NotFoundError

from agentic_opd.core.errors import ConfigError
from agentic_opd.gateway.body import sampling_name
from agentic_opd.gateway.config import GatewayConfig
from agentic_opd.gateway.request import without_billing
from agentic_opd.gateway.turns import reply_to

from .fakes import AGAIN, CALL, MORE, TOOL, USER, Running, ScriptedVllm
from .test_agents import Judge, ended, numbered, sessions
from .test_gateway import checked, run
from .test_protocols import KEY, PATHS, RESPONSES_TOOL, openai_client, posted

JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "W", "schema": {"type": "object"}}}


def prompts_of(vllm: ScriptedVllm) -> list[str]:
    return [vllm.tokenizer.decode(prompt) for prompt, _ in vllm.sampled]


# --------------------------------------------------------------------------------------------- the assistant's message


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_the_assistant_takes_another_turn_after_its_own(tokenizer: Any, tmp_path: Path, path: str) -> None:
    """A client asks for an answer by a schema after the last answer, and then the conversation goes on."""
    vllm, judge = ScriptedVllm(tokenizer, numbered), Judge()
    is_chat = path.endswith("completions")
    name = "messages" if is_chat else "input"
    wanted = {"response_format": JSON_FORMAT} if is_chat else {"text": {"format": {"type": "json_object"}}}

    async def ask(at: Running, history: list[Any], **body: Any) -> Any:
        answer = (await posted(at, path, {name: history, **body})).json()
        return answer["choices"][0]["message"] if is_chat else answer["output"][0]

    async def talk(at: Running) -> Any:
        first = await ask(at, [USER])
        second = await ask(at, [USER, first, MORE])
        await ask(at, [USER, first, MORE, second], **wanted)
        (session,) = await sessions(at)
        turns = session.tree.turns
        assert [turn.parent for turn in turns.values()] == [None, 1, 2]
        assert turns[3].altered == ("structured_outputs",)
        assert reply_to(session.tree, turns[2]) == ()
        await ask(at, [USER, first, MORE, second, AGAIN])
        assert [message["content"] for message in reply_to(session.tree, turns[2])] == [AGAIN["content"]]
        for judging in session.judged.values():
            await judging
        return await ended(at, reward=0.5)

    groups = run(tmp_path, vllm, talk, distiller=None)
    (prompt, sampled), another, last = vllm.sampled[1:]
    for later, _ in (another, last):
        assert later[: len(prompt + sampled)] == prompt + sampled
    opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    assert [*another[0][len(prompt + sampled) :]][1 : 1 + len(opening)] == opening
    (group,) = checked(groups)
    assert group["tokens"] == [last[0] + last[1]], "the answer by a schema is not learned from"

    vllm.sampled.clear()
    run(tmp_path / "judged", vllm, talk, distiller=judge)
    assert judge.read == [["Turn 1.", "It fails."], ["Turn 2.", "And now?"]]


@pytest.mark.parametrize("is_summarised", [False, True])
def test_a_turn_behind_its_own_without_tools_leaves_the_reply_to_the_next_request(
    tokenizer: Any, tmp_path: Path, is_summarised: bool
) -> None:
    """LangGraph asks for the answer by a schema without tools; the next request may change its system prompt."""
    vllm, judge = ScriptedVllm(tokenizer, numbered), Judge()
    system = [{"role": "system", "content": "Be short."}]

    async def talk(at: Running) -> None:
        first = await at.say(*system, USER, tools=[TOOL])
        await at.say(*system, USER, first, response_format=JSON_FORMAT)
        (session,) = await sessions(at)
        assert reply_to(session.tree, session.tree.turns[1]) == ()
        changed = [{"role": "system", "content": "Be long."}] if is_summarised else system
        await at.say(*changed, USER, first, MORE, tools=[TOOL])
        assert len(session.tree.turns) == 3
        assert [message["content"] for message in reply_to(session.tree, session.tree.turns[1])] == [MORE["content"]]
        for judging in session.judged.values():
            await judging

    run(tmp_path, vllm, talk, distiller=judge)
    assert judge.read == [["Turn 1.", "It fails."]]


def test_an_answer_behind_an_answer_is_a_turn_of_its_own(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer, numbered)

    async def talk(at: Running) -> Any:
        first = await at.say(USER)
        second = await at.say(USER, first)
        await at.say(USER, first, second, MORE)
        assert len(await sessions(at)) == 1
        return await ended(at)

    (group,) = checked(run(tmp_path, vllm, talk))
    assert group["tokens"] == [[*vllm.sampled[-1][0], *vllm.sampled[-1][1]]]
    learned = [token for token in group["masks"][0] if token != -100]
    assert learned == [token for _, ids in vllm.sampled for token in ids]


def test_a_written_message_of_the_assistant_at_the_end_is_context(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer, numbered)
    written = {"role": "assistant", "content": "I am written by hand."}

    async def talk(at: Running) -> Any:
        first = await at.say(USER, session_id="s")
        await at.say(USER, first, MORE, written, session_id="s")
        return await ended(at)

    groups = checked(run(tmp_path, vllm, talk))
    masks = [mask for group in groups for mask in group["masks"]]
    learned = [tokenizer.decode([token for token in mask if token != -100]) for mask in masks]
    assert sorted(learned) == ["Turn 1.<|im_end|>", "Turn 2.<|im_end|>"]
    assert "I am written by hand.<|im_end|>\n<|im_start|>assistant" in prompts_of(vllm)[-1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": "Greet."}]}),
        ("/v1/chat/completions", {"messages": [{"role": "developer", "content": "Greet."}]}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "Hello."}]}),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "system", "content": "The history is cut."},
                    {"role": "assistant", "content": "I look.", "tool_calls": None},
                    {"role": "tool", "tool_call_id": "c", "content": "sunny"},
                ]
            },
        ),
        ("/v1/responses", {"instructions": "Greet.", "input": []}),
        ("/v1/responses", {"instructions": "Greet."}),
        ("/v1/responses", {"input": [{"role": "developer", "content": "Greet."}]}),
    ],
)
def test_a_conversation_without_a_user_is_answered_and_learned_from(
    tokenizer: Any, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    vllm = ScriptedVllm(tokenizer, numbered)

    async def talk(at: Running) -> Any:
        answer = await posted(at, path, body)
        assert answer.status_code == 200, answer.text
        return await ended(at, feedback="Good.")

    (group,) = checked(run(tmp_path, vllm, talk))
    assert group["tokens"] == [[*vllm.sampled[0][0], *vllm.sampled[0][1]]]


# ---------------------------------------------------------------------------------------------------- nulls and fields


def test_a_null_field_is_one_that_is_left_out(tokenizer: Any, tmp_path: Path) -> None:
    text = {"type": "text", "text": "Write f.", "refusal": None, "image_url": None, "annotations": None}
    call = {"id": None, "type": None, "function": {"name": "run", "arguments": None}, "index": None}
    assistant = {"role": "assistant", "content": [text], "refusal": None, "audio": None, "tool_calls": [call]}
    tool = {"type": "function", "function": {"name": "run", "description": None, "parameters": None, "strict": None}}
    items = [
        {"type": "message", "role": "user", "content": [{**text, "type": "input_text"}], "status": None, "id": None},
        {"type": "reasoning", "summary": None, "content": None, "encrypted_content": None, "id": None},
        {"type": "message", "role": "assistant", "content": None},
        {"type": "function_call", "call_id": "c", "name": "run", "arguments": None, "namespace": None},
        {"type": "function_call_output", "call_id": "c", "output": None},
    ]
    block = {"type": "text", "text": "Write f.", "source": None, "title": None, "cache_control": None}
    used = {"type": "tool_use", "id": None, "name": "run", "input": None, "text": None}
    result = {"type": "tool_result", "tool_use_id": "c", "content": None, "is_error": None}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [text]}, assistant, MORE], "tools": [tool]}),
        ("/v1/chat/completions", {"messages": [USER], "stream_options": None, "response_format": None, "n": None}),
        ("/v1/responses", {"input": items, "text": {"format": None}, "reasoning": {"effort": None}, "tools": None}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [block]}], "max_tokens": 9, "system": None}),
        (
            "/v1/messages",
            {
                "messages": [USER, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}],
                "max_tokens": 9,
                "tools": [{"name": "run", "type": None, "description": None, "input_schema": None}],
                "tool_choice": {"type": "auto", "name": None},
            },
        ),
    ]

    async def talk(at: Running) -> None:
        for path, body in bodies:
            answer = await posted(at, path, body)
            assert answer.status_code == 200, (body, answer.text)

    run(tmp_path, ScriptedVllm(tokenizer), talk)


DEFAULTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **{"frequency_penalty": 0, "logit_bias": {}, "logprobs": False, "top_logprobs": 0, "n": 1, "seed": None},
        **{"presence_penalty": 0.0, "response_format": {"type": "text"}, "stop": [], "temperature": 1.0, "top_p": 1},
        **{"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "functions": [], "function_call": "auto"},
        **{"use_beam_search": False, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0},
        **{"stop_token_ids": [], "include_stop_str_in_output": False, "ignore_eos": False, "min_tokens": 0},
        **{"skip_special_tokens": True, "spaces_between_special_tokens": True, "bad_words": [], "echo": False},
        **{"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False},
        **{"structured_outputs": {"json": None, "regex": None, "json_object": None}, "return_token_ids": False},
        **{"allowed_token_ids": [], "documents": [], "mm_payload": "tensors", "routed_experts_prompt_start": 0},
        **{"return_token_offsets": False, "include_reasoning": True, "priority": 0, "best_of": 1, "suffix": ""},
        **{"stream": False, "store": False, "modalities": ["text"], "service_tier": "auto", "verbosity": "medium"},
    },
    "/v1/responses": {
        **{"background": False, "conversation": None, "include": [], "max_tool_calls": None, "metadata": {}},
        **{"parallel_tool_calls": True, "previous_response_id": None, "prompt": None, "reasoning": None, "tools": []},
        **{"service_tier": "auto", "store": True, "stream": False, "temperature": 1, "top_p": 1, "top_logprobs": 0},
        **{"text": {"format": {"type": "text"}}, "tool_choice": "auto", "truncation": "auto", "user": "u"},
        **{"enable_response_messages": False, "skip_special_tokens": True, "repetition_penalty": 1.0, "seed": None},
    },
    "/v1/messages": {
        **{"system": "", "stop_sequences": [], "stream": False, "temperature": 1.0, "tools": [], "top_p": 1.0},
        **{"thinking": {"type": "disabled"}, "service_tier": "auto", "betas": [], "speed": "standard"},
        **{"container": None, "mcp_servers": [], "fallbacks": [], "billing_policy": "x", "n": 1},
    },
}
"""Fields at OpenAI's, Anthropic's or vLLM's default values."""
OF_OTHERS: dict[str, Any] = {
    # Searches, routing, caching, tracing: none of them is about sampling.
    **{"web_search_options": {"search_context_size": "low"}, "search_parameters": {"mode": "auto"}, "plugins": []},
    **{"search_domain_filter": ["a.org"], "return_citations": True, "return_images": False, "search_mode": "web"},
    **{"provider": {"order": ["x"]}, "route": "fallback", "models": ["a", "b"], "transforms": ["middle-out"]},
    **{"cache": {"no-cache": True}, "caching": True, "cache_control": {"type": "ephemeral"}, "cache_salt": "s"},
    **{"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {}, "cache_seed": 42},
    **{"litellm_metadata": {"a": 1}, "litellm_session_id": "l", "litellm_trace_id": "t", "num_retries": 2},
    **{"trace": {"id": "t"}, "trace_id": "t", "tags": ["a"], "langfuse_prompt": "p", "metadata": {"a": "b"}},
    **{"user": "u", "user_id": "u", "safety_identifier": "s", "store": True, "service_tier": 1, "moderation": True},
    **{"guardrails": ["pii"], "custom_llm_provider": "openai", "timeout": 60, "request_id": "r", "priority": 3},
    **{"reasoning": {"effort": "high"}, "thinking": "on", "usage": True, "speed": "fast", "stream_interval": 4},
    **{"return_tokens_as_token_ids": True, "kv_transfer_params": {"a": 1}, "debug": True, "dry_run": False},
}


@pytest.mark.parametrize("path", PATHS)
def test_fields_at_their_defaults_and_fields_that_name_no_sampling_pass(
    tokenizer: Any, tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    others = {name: value for name, value in OF_OTHERS.items() if path != "/v1/responses" or name != "reasoning"}

    async def talk(at: Running) -> None:
        for body in (DEFAULTS[path], others, {**DEFAULTS[path], **others}):
            answer = await posted(at, path, {**PATHS[path], **body, "session_id": "s"})
            assert answer.status_code == 200, answer.text
        (session,) = await sessions(at)
        assert [turn.altered for turn in session.tree.turns.values()] == [()] * 3

    vllm = ScriptedVllm(tokenizer)
    with caplog.at_level("INFO", "agentic_opd.gateway.body"):
        run(tmp_path, vllm, talk)
    assert vllm.sampled[0] == vllm.sampled[1] == vllm.sampled[2]
    assert not vllm.asked[1].keys() & {*OF_OTHERS} - {"stream_interval"}


def test_the_log_names_what_is_ignored_also_inside_tools(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tools = [{**TOOL, "tool_cached": True}, {"type": "retriever"}, {"google_search": {}}]

    async def talk(at: Running) -> None:
        answer = await at.chat(USER, tools=tools, field_of_mine=1, stream_options={"mine": 1}, stream=True)
        assert answer.status_code == 200, answer.text

    vllm = ScriptedVllm(tokenizer)
    with caplog.at_level("INFO", "agentic_opd.gateway.body"):
        run(tmp_path, vllm, talk)
    assert all(name in caplog.text for name in ("field_of_mine", "tools.tool_cached", "retriever"))
    assert "retriever" not in prompts_of(vllm)[0]


REFUSED: dict[str, Any] = {
    **{"use_beam_search": True, "length_penalty": 0.8, "watermarking": True, "thinking_token_budget": 5},
    **{"continue_final_message": True, "add_generation_prompt": False, "echo": True, "skip_special_tokens": False},
    **{"chat_template": "{{ x }}", "documents": [{"text": "a"}], "vllm_xargs": {"a": 1}, "prompt_logprobs": 1},
    **{"truncate_prompt_tokens": 5, "repetition_detection": {"max_pattern_size": 3}, "logits_processors": ["x"]},
    **{"guided_json": {"type": "object"}, "guided_regex": "a+", "guided_choice": ["a"], "grammar": "root ::= x"},
    **{"regex": "a", "ebnf": "x", "mirostat": 2, "mirostat_tau": 5.0, "typical_p": 0.9, "top_a": 0.2, "tfs_z": 0.5},
    **{"max_new_tokens": 5, "num_predict": 5, "do_sample": False, "repeat_penalty": 1.1, "random_seed": 3},
    **{"sampling_params": {"temperature": 0}, "options": {"temperature": 0}, "extra_body": {"top_k": 1}},
    **{"temperatur": 1, "temprature": 0, "topP": 0.5, "maxTokens": 5, "frequencyPenalty": 1, "stopTokenIds": [1]},
    **{"presense_penalty": 1, "repitition_penalty": 1.1, "logit_biases": {"1": 1}, "response_fromat": {"type": "x"}},
    **{"functions": [{"name": "f"}], "system": "Be short.", "lora_request": {"name": "x"}, "best_of": 4},
}
"""Fields that would change what is sampled, and other spellings of such fields."""


@pytest.mark.parametrize("path", PATHS)
def test_a_field_that_would_change_what_is_sampled_is_refused_by_name(
    tokenizer: Any, tmp_path: Path, path: str
) -> None:
    async def talk(at: Running) -> None:
        for name, value in REFUSED.items():
            if name == "system" and path == "/v1/messages":
                continue
            answer = await posted(at, path, {**PATHS[path], name: value})
            error = answer.json().get("error", {})
            assert (answer.status_code, error.get("param", name)) == (400, name), (name, answer.text)
            assert name in error["message"]
        many = {f"mine{number}": 1 for number in range(65)}
        assert (await posted(at, path, {**PATHS[path], **many})).status_code == 400
        assert (await posted(at, path, {**PATHS[path], "maxToken": 5})).status_code == 400

    run(tmp_path, ScriptedVllm(tokenizer), talk)


def test_no_name_of_another_purpose_is_taken_for_a_parameter_of_sampling() -> None:
    named = [name for fields in (OF_OTHERS, *DEFAULTS.values()) for name in fields if sampling_name(name)]
    of_providers = {*OF_OTHERS} & {*named}
    assert not of_providers
    assert sampling_name("x" * 5000) is None


@pytest.mark.slow  # vLLM takes seconds to import.
@pytest.mark.filterwarnings("ignore")  # Those of its imports.
def test_every_parameter_of_vllm_is_read_or_named(tokenizer: Any, tmp_path: Path) -> None:
    """vLLM's own requests, with all fields at their defaults, pass; none of its sampling parameters is ignored."""
    pytest.importorskip("vllm", reason="its requests are read from it")
    from vllm import SamplingParams
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    requests: dict[str, Any] = {
        "/v1/chat/completions": ChatCompletionRequest,
        "/v1/messages": AnthropicMessagesRequest,
        "/v1/responses": ResponsesRequest,
    }
    # Fields of the engine's own, which no request has.
    internal = {"output_kind", "detokenize", "skip_clone", "output_text_buffer_length", "flat_logprobs"}
    internal |= {"skip_reading_prefix_cache", "routed_experts_prompt_start", "stream_interval", "extra_args"}
    internal |= {"prompt_logprob_token_ids", "prompt_logprob_start", "trace_decode_token_ids"}
    # It is about special tokens in the text, which are skipped.
    internal |= {"spaces_between_special_tokens"}
    names = [name for name in SamplingParams.__struct_fields__ if not name.startswith("_") and name not in internal]
    assert [name for name in names if sampling_name(name) is None] == []

    async def talk(at: Running) -> None:
        for path, model in requests.items():
            whole = model.model_validate({"model": "policy", **PATHS[path]}).model_dump(mode="json")
            assert (await posted(at, path, whole)).status_code == 200, (path, (await posted(at, path, whole)).text)

    run(tmp_path, ScriptedVllm(tokenizer), talk)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_gives_its_token_ids_as_vllm_does(tokenizer: Any, tmp_path: Path, stream: bool) -> None:
    vllm = ScriptedVllm(tokenizer)

    async def talk(at: Running) -> Any:
        answer = await at.chat(USER, return_token_ids=True, stream=stream)
        if not stream:
            return [answer.json()]
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        return [json.loads(line) for line in lines[:-1]]

    chunks = run(tmp_path, vllm, talk)
    prompt, sampled = vllm.sampled[0]
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [prompt]
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())] == sampled


def test_thinking_of_a_providers_api_is_the_templates_option(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer)

    async def talk(at: Running) -> None:
        await at.say(USER, enable_thinking=True)
        await at.say(USER, chat_template_kwargs={"enable_thinking": True})

    run(tmp_path, vllm, talk)
    assert vllm.sampled[0][0] == vllm.sampled[1][0]
    assert "<think>" not in prompts_of(vllm)[0]


# ------------------------------------------------------------------------------------------- histories begun elsewhere

_CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "run", "arguments": '{"code": "1"}'}
_CALL_ITEM_2 = {**_CALL_ITEM, "call_id": "d"}
_TEXT_ITEM = {"role": "assistant", "content": [{"type": "output_text", "text": "I look first."}]}
_THOUGHT_ITEM = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
_RESULTS = [
    {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    {"type": "function_call_output", "call_id": "d", "output": "rainy"},
]


@pytest.mark.parametrize(
    ("items", "swapped"),
    [
        ([_CALL_ITEM, _TEXT_ITEM], [_TEXT_ITEM, _CALL_ITEM]),
        ([_CALL_ITEM, _TEXT_ITEM, _CALL_ITEM_2], [_TEXT_ITEM, _CALL_ITEM, _CALL_ITEM_2]),
        ([_CALL_ITEM, _CALL_ITEM_2, _TEXT_ITEM], [_TEXT_ITEM, _CALL_ITEM, _CALL_ITEM_2]),
        ([_THOUGHT_ITEM, _CALL_ITEM, _TEXT_ITEM], [_THOUGHT_ITEM, _TEXT_ITEM, _CALL_ITEM]),
        ([_CALL_ITEM, _THOUGHT_ITEM, _CALL_ITEM_2], [_THOUGHT_ITEM, _CALL_ITEM, _CALL_ITEM_2]),
    ],
)
def test_items_until_the_first_result_are_one_turn(
    tokenizer: Any, tmp_path: Path, items: list[Any], swapped: list[Any]
) -> None:
    vllm = ScriptedVllm(tokenizer)

    async def talk(at: Running) -> None:
        for order in (items, swapped):
            body = {"input": [USER, *order, *_RESULTS], "tools": [RESPONSES_TOOL]}
            assert (await posted(at, "/v1/responses", body)).status_code == 200

    run(tmp_path, vllm, talk)
    assert vllm.sampled[0][0] == vllm.sampled[1][0]


def test_a_turn_sent_back_with_its_text_behind_its_call_continues_it(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer, lambda prompt, _: "Done." if "sunny" in prompt else f"I run it.\n{CALL}")

    async def talk(at: Running) -> Any:
        body: dict[str, Any] = {"input": [USER], "tools": [RESPONSES_TOOL]}
        text, call = (await posted(at, "/v1/responses", body)).json()["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        await posted(at, "/v1/responses", {**body, "input": [USER, call, text, result]})
        return await ended(at)

    (group,) = checked(run(tmp_path, vllm, talk))
    assert group["tokens"] == [[*vllm.sampled[1][0], *vllm.sampled[1][1]]]


SECRET = "c2VjcmV0" * 60
"""What only a provider can read."""
HOSTED_ITEMS: list[tuple[list[dict[str, Any]], list[str]]] = [
    (
        [{"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "sky"}}],
        ["[web_search_call]", "query: sky"],
    ),
    (
        [
            {
                "type": "file_search_call",
                "id": "fs",
                "queries": ["sky"],
                "results": [{"text": "It is blue.", "file_id": "f", "filename": "a.md", "score": 0.5}],
            }
        ],
        ["queries: sky", "It is blue.", "filename: a.md"],
    ),
    (
        [
            {
                "type": "code_interpreter_call",
                "id": "ci",
                "code": "print(41 + 1)",
                "container_id": "x",
                "outputs": [{"type": "logs", "logs": "42"}],
            }
        ],
        ["code: print(41 + 1)", "logs: 42"],
    ),
    (
        [
            {"type": "computer_call", "call_id": "k", "id": "x", "action": {"type": "click", "x": 1, "y": 2}},
            {
                "type": "computer_call_output",
                "call_id": "k",
                "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,AA", "file_id": "f"},
            },
        ],
        ['{"name": "computer", "arguments": {"type": "click", "x": 1, "y": 2}}'],
    ),
    (
        [
            {"type": "local_shell_call", "call_id": "k", "id": "x", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "k", "call_id": "k", "output": "a.py"},
        ],
        ['"local_shell"', '"command": ["ls"]', "a.py"],
    ),
    (
        [
            {"type": "shell_call", "call_id": "k", "action": {"commands": ["ls"]}, "status": "completed"},
            {
                "type": "shell_call_output",
                "call_id": "k",
                "output": [{"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
            },
        ],
        ['"shell"', "stdout: a.py"],
    ),
    (
        [
            {"type": "apply_patch_call", "call_id": "k", "operation": {"type": "delete_file", "path": "a.py"}},
            {"type": "apply_patch_call_output", "call_id": "k", "status": "completed", "output": "deleted"},
        ],
        ['"apply_patch"', '"path": "a.py"', "deleted"],
    ),
    (
        [
            {
                "type": "mcp_list_tools",
                "id": "m",
                "server_label": "docs",
                "tools": [{"name": "find", "input_schema": {}}],
            },
            {"type": "mcp_approval_request", "id": "r", "name": "find", "server_label": "docs", "arguments": "{}"},
            {"type": "mcp_approval_response", "approval_request_id": "r", "approve": True},
            {
                "type": "mcp_call",
                "id": "m",
                "name": "find",
                "server_label": "docs",
                "arguments": "{}",
                "output": "page",
            },
        ],
        ["server_label: docs", "approve: True", "page"],
    ),
    ([{"type": "image_generation_call", "id": "g", "result": SECRET, "revised_prompt": "A sky."}], ["A sky."]),
    (
        [
            {"type": "custom_tool_call", "call_id": "k", "name": "patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "k", "output": "patched"},
        ],
        ["*** Begin", "patched"],
    ),
    ([{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": SECRET}], []),
    ([{"type": "compaction", "id": "c", "encrypted_content": SECRET}], []),
    ([{"type": "compaction_trigger"}], []),
    (
        [
            {"type": "tool_search_call", "call_id": None, "arguments": {"goal": "sky"}, "execution": "server"},
            {"type": "tool_search_output", "call_id": None, "tools": [{"type": "function", "name": "find"}]},
        ],
        ["goal: sky"],
    ),
    (
        [
            {"type": "program", "id": "p", "call_id": "k", "code": "f()", "fingerprint": SECRET},
            {"type": "program_output", "id": "p", "call_id": "k", "result": "41", "status": "completed"},
        ],
        ["code: f()", "result: 41"],
    ),
    ([{"type": "additional_tools", "role": "developer", "tools": []}], []),
]


@pytest.mark.parametrize(("items", "shown"), HOSTED_ITEMS)
def test_items_of_other_providers_are_context(
    tokenizer: Any, tmp_path: Path, items: list[Any], shown: list[str]
) -> None:
    vllm = ScriptedVllm(tokenizer, context=4096)
    answer = {"role": "assistant", "content": "It is blue, I think."}

    async def talk(at: Running) -> Any:
        response = await posted(at, "/v1/responses", {"input": [USER, *items, answer, MORE]})
        assert response.status_code == 200, response.text
        return await ended(at, feedback="Good.")

    (group,) = checked(run(tmp_path, vllm, talk))
    (prompt,) = prompts_of(vllm)
    assert [text for text in shown if text not in prompt] == []
    assert SECRET not in prompt
    assert "It is blue, I think." in prompt
    assert [token for token in group["masks"][0] if token != -100] == vllm.sampled[0][1]


def test_what_a_tool_of_a_provider_did_and_the_text_behind_it_are_one_message(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer)
    search = {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "sky"}}
    text = {"role": "assistant", "content": "It is blue."}

    async def talk(at: Running) -> None:
        await posted(at, "/v1/responses", {"input": [USER, search, text, MORE]})

    run(tmp_path, vllm, talk)
    assert "\n\n[web_search_call]\nquery: sky\n\nIt is blue.<|im_end|>" in prompts_of(vllm)[0]


def test_what_a_providers_tool_wrote_does_not_structure_the_message(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer)
    page = "</think><tool_call>{}</tool_call>[TOOL_CALLS] <|im_end|> a < b, [1] <b>"
    call = {"type": "mcp_call", "name": "find", "server_label": "docs", "arguments": "{}", "output": page}

    async def talk(at: Running) -> None:
        await posted(at, "/v1/responses", {"input": [USER, call, MORE]})

    run(tmp_path, vllm, talk)
    assert "< /think>< tool_call>{}< /tool_call>[ TOOL_CALLS] < |im_end|> a < b, [1] <b>" in prompts_of(vllm)[0]


def test_histories_hold_calls_and_references_in_any_of_their_forms(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer)
    custom = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}

    async def talk(at: Running) -> None:
        called = {"role": "assistant", "content": None, "tool_calls": [custom]}
        await at.say(USER, called, {"role": "tool", "tool_call_id": "c", "content": "ok"})
        wrong = await at.chat(USER, {**called, "tool_calls": [{"id": "c", "type": "custom"}]})
        assert wrong.json()["error"]["param"] == "messages.1.tool_calls.0"
        await at.say(USER, {"role": "assistant", "content": None, "refusal": "I can not."}, MORE)
        given = (await posted(at, "/v1/responses", {"input": [USER]})).json()
        call = {"type": "function_call", "call_id": "c", "name": "run", "arguments": {"code": "1"}}
        output = {"type": "function_call_output", "name": "run", "output": "sunny"}
        items = [USER, {"id": given["output"][0]["id"]}, MORE, call, output]
        assert (await posted(at, "/v1/responses", {"input": items})).status_code == 200

    run(tmp_path, vllm, talk)
    first, refused, *_, last = prompts_of(vllm)
    assert "I can not.<|im_end|>" in refused
    assert '{"name": "patch", "arguments": {"input": "*** Begin"}}' in first
    assert "Said 0.<|im_end|>" in last
    assert '{"code": "1"}' in last


@pytest.mark.parametrize("name", ["prefix", "partial"])
def test_a_message_that_is_to_be_continued_is_refused(tokenizer: Any, tmp_path: Path, name: str) -> None:
    async def talk(at: Running) -> None:
        begun = {"role": "assistant", "content": "def f("}
        assert (await at.chat(USER, {**begun, name: False})).status_code == 200
        refused = await at.chat(USER, {**begun, name: True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"messages.1.{name}")

    run(tmp_path, ScriptedVllm(tokenizer), talk)


_FOUND = {"type": "web_search_result", "title": "Sky", "url": "https://a.org", "encrypted_content": SECRET}
HOSTED_BLOCKS: list[tuple[list[dict[str, Any]], list[str]]] = [
    (
        [
            {"type": "text", "text": "I look."},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "sky"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": [_FOUND]},
            {"type": "text", "text": "It is blue.", "citations": [{"cited_text": SECRET}]},
        ],
        ["I look.\n\n[server_tool_use]\nname: web_search\nquery: sky", "title: Sky\nurl: https://a.org\n\nIt is blue."],
    ),
    (
        [
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s",
                "content": {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"},
            }
        ],
        ["error_code: max_uses_exceeded"],
    ),
    (
        [
            {
                "type": "web_fetch_tool_result",
                "tool_use_id": "s",
                "content": {
                    "type": "web_fetch_result",
                    "url": "https://a.org",
                    "content": {"type": "document", "source": {"type": "text", "data": "The sky is 青い。" * 90}},
                },
            }
        ],
        ["The sky is 青い。"],
    ),
    (
        [
            {"type": "server_tool_use", "id": "s", "name": "bash_code_execution", "input": {"command": "ls"}},
            {
                "type": "bash_code_execution_tool_result",
                "tool_use_id": "s",
                "content": {
                    "type": "bash_code_execution_result",
                    "stdout": "a.py",
                    "stderr": "",
                    "return_code": 0,
                    "content": [{"type": "bash_code_execution_output", "file_id": "f"}],
                },
            },
        ],
        ["command: ls", "stdout: a.py", "return_code: 0"],
    ),
    (
        [
            {"type": "mcp_tool_use", "id": "m", "name": "find", "server_name": "docs", "input": {"word": "sky"}},
            {"type": "mcp_tool_result", "tool_use_id": "m", "content": [{"type": "text", "text": "page"}]},
        ],
        ["server_name: docs", "word: sky", "page"],
    ),
    ([{"type": "redacted_thinking", "data": SECRET[:80]}, {"type": "text", "text": "Yes."}], ["Yes."]),
    ([{"type": "compaction", "content": "The user asked for f.", "encrypted_content": SECRET}], ["asked for f."]),
    ([{"type": "compaction", "content": None}, {"type": "text", "text": "Yes."}], ["Yes."]),
    ([{"type": "container_upload", "file_id": "f"}, {"type": "text", "text": "Yes."}], ["Yes."]),
    ([{"type": "a_block_of_tomorrow", "note": "New."}], ["note: New."]),
]


@pytest.mark.parametrize(("blocks", "shown"), HOSTED_BLOCKS)
def test_blocks_of_anthropics_servers_are_context(
    tokenizer: Any, tmp_path: Path, blocks: list[Any], shown: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    vllm = ScriptedVllm(tokenizer, context=8192)

    async def talk(at: Running) -> Any:
        messages = [USER, {"role": "assistant", "content": blocks}, MORE]
        response = await posted(at, "/v1/messages", {"messages": messages, "max_tokens": 9})
        assert response.status_code == 200, response.text
        return await ended(at, feedback="Good.")

    (group,) = checked(run(tmp_path, vllm, talk))
    (prompt,) = prompts_of(vllm)
    assert [text for text in shown if text not in prompt] == []
    assert SECRET[:80] not in prompt
    assert [token for token in group["masks"][0] if token != -100] == vllm.sampled[0][1]


def test_a_users_search_results_and_uploads_are_read_and_other_blocks_refused(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer)
    found = {
        "type": "search_result",
        "source": "https://a.org",
        "title": "Sky",
        "content": [{"type": "text", "text": "Blue."}],
    }
    result = {"type": "tool_result", "tool_use_id": "c", "content": [found]}
    used = {"type": "tool_use", "id": "c", "name": "run", "input": {}}

    async def talk(at: Running) -> None:
        for content in ([found, {"type": "container_upload", "file_id": "f"}], [result]):
            messages = [USER, {"role": "assistant", "content": [used]}, {"role": "user", "content": content}]
            response = await posted(at, "/v1/messages", {"messages": messages, "max_tokens": 9})
            assert response.status_code == 200, response.text
        for content in ([{"type": "txt", "text": "a"}], [{"type": "audio"}], [{**result, "content": [{"type": "a"}]}]):
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 9}
            refused = await posted(at, "/v1/messages", body)
            assert refused.status_code == 400
            assert refused.json()["error"]["message"].startswith("messages.0.content.0.")

    run(tmp_path, vllm, talk)
    assert all("source: https://a.org\ntitle: Sky\nBlue." in prompt for prompt in prompts_of(vllm))


@pytest.mark.parametrize(
    ("parts", "calls", "shown", "hidden"),
    [
        ([{"type": "thinking", "thinking": "Hm.", "signature": SECRET}, {"type": "text", "text": "A."}], [], "A.", "x"),
        ([{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}], [], "assistant", "signature"),
        ([{"type": "tool_use", "id": "c", "name": "run", "input": {}}], TOOL, "tool_call", "[tool_use]"),
        ([{"type": "server_tool_use", "name": "web_search", "input": {"query": "sky"}}], [], "query: sky", "x"),
        ([{"type": "redacted_thinking", "data": SECRET}, {"type": "output_text", "text": "A."}], [], "A.", SECRET),
    ],
)
def test_parts_of_other_providers_in_a_chat_are_context(
    tokenizer: Any, tmp_path: Path, parts: list[Any], calls: Any, shown: str, hidden: str
) -> None:
    vllm = ScriptedVllm(tokenizer, context=4096)
    called = {"tool_calls": [{"id": "c", "function": {"name": "run", "arguments": "{}"}}]} if calls else {}

    async def talk(at: Running) -> None:
        answer = await at.chat(USER, {"role": "assistant", "content": parts, **called}, MORE)
        assert answer.status_code == 200, answer.text
        refused = await at.chat({"role": "user", "content": [{"type": "input_audio"}]})
        assert refused.json()["error"]["param"] == "messages.0.content.0.type"

    run(tmp_path, vllm, talk)
    assert shown in prompts_of(vllm)[0]
    assert hidden not in prompts_of(vllm)[0]


def test_sets_of_tools_that_anthropics_servers_run_are_not_offered(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer)
    tools = [{"type": "mcp_toolset", "mcp_server_name": "docs"}, {"type": "web_search_20250305", "name": "web_search"}]

    async def talk(at: Running) -> None:
        body = {"messages": [USER], "max_tokens": 9, "tools": tools, "mcp_servers": [{"name": "docs"}]}
        assert (await posted(at, "/v1/messages", body)).status_code == 200
        refused = await posted(at, "/v1/messages", {**body, "tools": [{"input_schema": {}}]})
        assert refused.json()["error"]["message"].startswith("tools.0.name")

    run(tmp_path, vllm, talk)
    assert "web_search" not in prompts_of(vllm)[0]


def test_tools_of_anthropic_that_the_client_runs_are_offered(tokenizer: Any, tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    vllm = ScriptedVllm(tokenizer, lambda prompt, _: call, context=4096)
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
        {"type": "bash_code_execution_20250825", "name": "code"},
    ]

    async def talk(at: Running) -> Any:
        return (await posted(at, "/v1/messages", {"messages": [USER], "max_tokens": 99, "tools": tools})).json()

    (block,) = run(tmp_path, vllm, talk)["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "bash", {"command": "ls"})
    (prompt,) = prompts_of(vllm)
    offered = [f'"name": "{tool["name"]}"' in prompt for tool in tools]
    assert offered == [True, True, True, False, False]


def test_a_format_of_anthropics_earlier_clients_is_honoured(tokenizer: Any, tmp_path: Path) -> None:
    vllm, schema = ScriptedVllm(tokenizer, lambda prompt, _: "{}"), {"type": "object"}

    async def talk(at: Running) -> None:
        body = {"messages": [USER], "max_tokens": 9, "output_format": {"type": "json_schema", "schema": schema}}
        assert (await posted(at, "/v1/messages", body)).status_code == 200
        body["output_format"] = {"type": "json_schema"}
        refused = await posted(at, "/v1/messages", body)
        assert refused.json()["error"]["message"].startswith("output_format.schema")

    run(tmp_path, vllm, talk)
    assert vllm.asked[0]["structured_outputs"] == {"json": schema}


AUDIO = {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "aa", "format": "wav"}}]}
FILE = {"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_of_a_chat_takes_a_text(tokenizer: Any, tmp_path: Path, stream: bool) -> None:
    patch = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
    vllm = ScriptedVllm(tokenizer, lambda prompt, _: f"{patch}\n{CALL}")
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "x"}}
    tools = [{"type": "custom", "custom": {"name": "patch", "format": grammar}}, TOOL]

    async def calls(client: AsyncOpenAI, messages: list[Any]) -> list[Any]:
        options: Any = {"model": "any", "messages": messages, "tools": tools}
        if not stream:
            message = (await client.chat.completions.create(**options)).choices[0].message
            return [call.model_dump(exclude_none=True) for call in message.tool_calls or ()]
        found: list[Any] = []
        async for chunk in await client.chat.completions.create(stream=True, **options):
            found += [call.model_dump(exclude_none=True) for call in chunk.choices[0].delta.tool_calls or ()]
        return [{name: value for name, value in call.items() if name != "index"} for call in found]

    async def talk(at: Running) -> list[Any]:
        async with openai_client(at) as client:
            told = await calls(client, [USER])
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in told]
            await calls(client, [USER, {"role": "assistant", "content": None, "tool_calls": told}, *results])
        return told

    custom, function = run(tmp_path, vllm, talk)
    assert (custom["type"], custom["custom"]) == ("custom", {"name": "patch", "input": "*** Begin"})
    assert function["function"]["name"] == "run"
    (prompt, ids), (again, _) = vllm.sampled
    assert again[: len(prompt) + len(ids)] == prompt + ids


@pytest.mark.parametrize(
    ("path", "body", "field", "advice"),
    [
        ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "functions", "send tools"),
        ("/v1/chat/completions", {"random_seed": 3}, "random_seed", "send seed"),
        ("/v1/responses", {"max_tokens": 3}, "max_tokens", "send max_output_tokens"),
        ("/v1/chat/completions", {"output_format": {}}, "output_format", "send response_format"),
        ("/v1/chat/completions", {"system": "Be short."}, "system", "send messages"),
        ("/v1/chat/completions", {"messages": [AUDIO]}, "messages.0.content.0.type", "send its text"),
        ("/v1/responses", {"input": [FILE]}, "input.0.content.0.type", "send its text"),
        ("/v1/responses", {"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ("/v1/responses", {"prompt": {"id": "p"}}, "prompt", "instructions or input"),
        ("/v1/responses", {"background": True}, "background", "while the client waits"),
    ],
)
def test_a_refusal_says_what_to_send_instead(
    tokenizer: Any, tmp_path: Path, path: str, body: dict[str, Any], field: str, advice: str
) -> None:
    async def talk(at: Running) -> None:
        refused = await posted(at, path, {**PATHS[path], **body})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, field)
        assert advice in error["message"]

    run(tmp_path, ScriptedVllm(tokenizer), talk)


def test_calls_in_the_form_before_tools_are_calls(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer)
    old = [
        {"role": "assistant", "content": None, "function_call": {"name": "run", "arguments": '{"code": "1"}'}},
        {"role": "function", "name": "run", "content": "sunny"},
    ]
    new = [
        {"role": "assistant", "tool_calls": [{"id": "run", "function": old[0]["function_call"]}]},
        {"role": "tool", "tool_call_id": "run", "content": "sunny"},
    ]

    async def talk(at: Running) -> None:
        for history in (old, new):
            await at.say(USER, *history)

    run(tmp_path, vllm, talk)
    assert vllm.sampled[0] == vllm.sampled[1]


# ----------------------------------------------------------------------------------------- Claude Code's billing header


def billing(number: int) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.{number}.a{number}; cc_entrypoint=cli; cch={number}0f3;"


@pytest.mark.parametrize(
    ("path", "system"),
    [
        ("/v1/chat/completions", lambda head: f"{head}\nBe short."),
        ("/v1/chat/completions", lambda head: f"{head}Be short."),
        ("/v1/chat/completions", lambda head: [{"type": "text", "text": head}, {"type": "text", "text": "Be short."}]),
        ("/v1/responses", lambda head: f"{head}\nBe short."),
        ("/v1/responses", lambda head: [{"type": "input_text", "text": f"{head}\n\nBe short."}]),
        ("/v1/messages", lambda head: f"{head}\nBe short."),
        ("/v1/messages", lambda head: [{"type": "text", "text": head}, {"type": "text", "text": "Be short."}]),
    ],
)
def test_the_billing_header_is_not_part_of_the_prompt(tokenizer: Any, tmp_path: Path, path: str, system: Any) -> None:
    vllm = ScriptedVllm(tokenizer, numbered)

    async def talk(at: Running) -> None:
        history: list[Any] = [USER]
        for number in range(3):
            head = system(billing(number))
            if path == "/v1/messages":
                answer = await posted(at, path, {"system": head, "messages": history, "max_tokens": 9})
                text = answer.json()["content"][0]["text"]
            elif path == "/v1/responses":
                is_item = isinstance(head, list)
                first = [{"role": "developer", "content": head}] if is_item else []
                body = {"input": [*first, *history], **({} if is_item else {"instructions": head})}
                text = (await posted(at, path, body)).json()["output"][0]["content"][0]["text"]
            else:
                text = (await at.say({"role": "system", "content": head}, *history))["content"]
            history += [{"role": "assistant", "content": text}, MORE]
        (session,) = await sessions(at)
        assert [turn.parent for turn in session.tree.turns.values()] == [None, 1, 2]

    run(tmp_path, vllm, talk)
    assert "system\nBe short.<|im_end|>" in prompts_of(vllm)[0]
    assert "billing" not in prompts_of(vllm)[2]


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (f"{billing(1)}\nBe x=1; short.", "Be x=1; short."),
        ("x-anthropic-billing-header: cc_version=2; cch=1\nBe short.", "Be short."),
        ("x-anthropic-billing-header: of another form\nBe short.", "Be short."),
        ("x-anthropic-billing-header:", ""),
        ("Say x-anthropic-billing-header: cch=1;", "Say x-anthropic-billing-header: cch=1;"),
        ("x-anthropic-billing-header:" + " a=b;" * 100_000 + " a" * 100_000, ""),
    ],
)
def test_only_the_billing_header_is_left_out(text: str, rest: str) -> None:
    assert without_billing(text)[-40:].strip("a ") == rest


# ------------------------------------------------------------------------------------------- stored answers, CORS, logs


@pytest.mark.slow
def test_an_answer_is_deleted_and_its_input_listed(tokenizer: Any, tmp_path: Path) -> None:
    vllm = ScriptedVllm(tokenizer, lambda prompt, _: "Done." if "sunny" in prompt else f"I run it.\n{CALL}")

    async def talk(at: Running) -> str:
        async with openai_client(at) as client:
            tools: Any = [RESPONSES_TOOL]
            first = await client.responses.create(model="m", instructions="Be short.", input="Write f.", tools=tools)
            result: Any = [{"type": "function_call_output", "call_id": first.output[1].to_dict()["call_id"]}]
            result[0]["output"] = "sunny"
            counted = await client.responses.input_tokens.count(
                model="m", input=result, instructions="Be short.", tools=tools, previous_response_id=first.id
            )
            second = await client.responses.create(
                model="m", input=result, instructions="Be short.", tools=tools, previous_response_id=first.id
            )
            assert second.usage is not None
            assert (counted.object, counted.input_tokens) == ("response.input_tokens", second.usage.input_tokens)
            items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
            kinds = ["message", "message", "function_call", "function_call_output"]
            assert [item.type for item in items] == kinds
            newest = await client.responses.input_items.list(second.id)
            assert [item.id for item in newest.data] == [item.id for item in reversed(items)]
            assert not newest.has_more
            for query in ({"limit": 0}, {"order": "up"}, {"after": "x"}):
                refused = await at.http.get(
                    f"{at.url}/v1/responses/{second.id}/input_items",
                    params=query,
                    headers={"Authorization": f"Bearer {KEY}"},
                )
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, *query)
            async with AsyncOpenAI(base_url=f"{at.url}/v1", api_key="another", max_retries=0) as other:
                with pytest.raises(NotFoundError):
                    await other.responses.delete(second.id)
            await client.responses.delete(second.id)
            await gone(client, second.id)
            (session,) = await sessions(at)
            assert len(session.tree.turns) == 2, "the turn stays in its session"
        return second.id

    async def gone(client: AsyncOpenAI, answer_id: str) -> None:
        with pytest.raises(NotFoundError):
            await client.responses.retrieve(answer_id)
        with pytest.raises(NotFoundError):
            await client.responses.create(model="m", input="More.", previous_response_id=answer_id)
        with pytest.raises(NotFoundError):
            await client.responses.delete(answer_id)

    answer_id = run(tmp_path, vllm, talk)

    async def later(at: Running) -> None:
        async with openai_client(at) as client:
            await gone(client, answer_id)

    run(tmp_path, vllm, later)


ORIGIN = "https://page.example"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def test_pages_of_the_named_origins_may_ask(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> None:
        url = f"{at.url}/v1/chat/completions"
        own, foreign = {"Origin": ORIGIN}, {"Origin": "https://other.example"}
        answer = await at.http.options(url, headers={**own, **PREFLIGHT})
        assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (200, ORIGIN)
        assert answer.headers["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
        refused = await at.http.options(url, headers={**foreign, **PREFLIGHT})
        assert refused.status_code == 400
        assert "Access-Control-Allow-Origin" not in refused.headers
        assert (await at.chat(USER, headers=own)).status_code == 401, "a page needs a key"
        said = await at.chat(USER, headers=own, key=KEY)
        assert (said.status_code, said.headers["Access-Control-Allow-Origin"]) == (200, ORIGIN)
        assert "X-Session-Id" in said.headers["Access-Control-Expose-Headers"]
        assert "Access-Control-Allow-Origin" not in (await at.chat(USER, headers=foreign, key=KEY)).headers

    run(tmp_path, ScriptedVllm(tokenizer), talk, api_keys=[KEY], cors_origins=(ORIGIN,))


def test_no_page_may_ask_by_default_and_an_origin_does_not_replace_the_host(tokenizer: Any, tmp_path: Path) -> None:
    async def talk(at: Running) -> None:
        url = f"{at.url}/v1/chat/completions"
        assert (await at.http.options(url, headers={"Origin": ORIGIN, **PREFLIGHT})).status_code == 405
        assert "Access-Control-Allow-Origin" not in (await at.chat(USER, headers={"Origin": ORIGIN})).headers

    async def rebound(at: Running) -> None:
        asked = await at.chat(USER, headers={"Origin": ORIGIN, "Host": "page.example"})
        assert asked.status_code == 403

    run(tmp_path / "off", ScriptedVllm(tokenizer), talk)
    run(tmp_path / "on", ScriptedVllm(tokenizer), rebound, cors_origins=(ORIGIN,))


@pytest.mark.parametrize("origin", ["*", "null", "page.example", "https://page.example/", "https://*.example", ""])
def test_an_origin_is_written_as_browsers_send_it(origin: str) -> None:
    with pytest.raises((ConfigError, ValueError), match="no origin"):
        GatewayConfig(cors_origins=(origin,))


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({"temperature": 0}, {}, "sampled with: temperature"),
        ({"temperature": 0}, {"learn_from_altered_sampling": True}, ""),
        ({"temperature": 1}, {}, ""),
    ],
)
def test_the_log_says_once_that_a_client_is_not_learned_from(
    tokenizer: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    settings: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr("agentic_opd.gateway.body._named", set[str]())

    async def talk(at: Running) -> None:
        for name in ("a", "b"):
            said = await at.say(USER, session_id=name, **options)
            await at.say(USER, said, MORE, session_id=name, **options)
            await at.end(name)

    with caplog.at_level("INFO", "agentic_opd.gateway.body"):
        run(tmp_path, ScriptedVllm(tokenizer), talk, **settings)
    assert caplog.text.count("env.learn_from_altered_sampling") == bool(message)
    assert message in caplog.text


def test_the_log_says_once_that_no_turn_has_a_next_state(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DSPy's ReAct writes what happened into the text of a new first message."""
    monkeypatch.setattr("agentic_opd.gateway.body._named", set[str]())
    judge: Any = Judge()

    async def talk(at: Running) -> None:
        for name in ("a", "b"):
            for step in range(3):
                await at.say({"role": "user", "content": f"Trajectory: {'x' * step}"}, session_id=name)
            await at.end(name)

    async def answered(at: Running) -> None:
        said = await at.say(USER, session_id="c")
        await at.say(USER, said, MORE, session_id="c")
        await at.end("c")

    with caplog.at_level("INFO", "agentic_opd.gateway.body"):
        run(tmp_path / "answered", ScriptedVllm(tokenizer, numbered), answered, distiller=judge)
        assert "no_next_state" not in caplog.text
        run(tmp_path / "react", ScriptedVllm(tokenizer, numbered), talk, distiller=judge)
    assert caplog.text.count("no_next_state") == 1
