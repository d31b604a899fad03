"""The text of an endpoint's response -> the texts of its choices and their tokens, or its error and what to do. Pure.

In: a chat completion, whole or as a stream of server-sent events; its content is a text or a list of parts.
"""

import re
from collections.abc import Mapping
from typing import Any, cast

from agentic_opd.core.text import read_json, well_formed
from agentic_opd.core.types import MOST_ID, JudgeTokens

_IS_STREAM = re.compile(r"\s*(?:data|event|id|retry)?:")
_REASONING_FIELDS = ("reasoning_content", "reasoning")
_LIMITED = ("rate_limit", "too_many", "exhausted")
"""Substrings of error codes of rate limits."""
_MAY_PASS = ("overload", "unavailable", "timeout", "server_error", "internal")
"""Substrings of error codes of other transient failures."""
_NO_ACCOUNT = re.compile(
    r"insufficient[ _](?:user[ _])?(?:quota|balance|credits?|funds)|billing|(?:credit|account) balance|arrear|overdue|"
    r"deactivated|suspended|payment[ _]required|out of credits|no credits|exceeded_current_quota|recharge|top up",
    re.IGNORECASE,
)
_NO_KEY = re.compile(
    r"(?:invalid|incorrect|wrong|expired|missing|no|bad)[ _](?:x-)?api[-_ ]?key|"
    r"api[-_ ]?key[ _](?:is[ _])?(?:not[ _]valid|invalid)|"
    r"invalid[_ ]authentication|authentication[_ ]error|unauthori[sz]ed",
    re.IGNORECASE,
)
_NO_MODEL = re.compile(
    r"model[_ ]not[_ ]found|no such model|(?:unknown|invalid)[_ ]model|deploymentnotfound|"
    r"\bmodel\b.{0,100}(?:does not exist|doesn't exist|not[ _]found|is not a valid)",
    re.IGNORECASE | re.DOTALL,
)
_ABOUT_CONTENT = re.compile(r"moderat|flagged|content[_ ](?:filter|policy)|safety", re.IGNORECASE)
"""Matches a refusal because of what one question holds."""


def read_completion(text: str) -> Mapping[str, Any]:
    """Return a response as JSON; the pieces of a stream are joined.

    Raises:
        ValueError, RecursionError: it is not JSON, or the stream broke off.
    """
    answer = _joined(text) if _IS_STREAM.match(text) else read_json(text)
    return cast(dict[str, Any], answer) if isinstance(answer, dict) else {}


def _joined(text: str) -> Any:
    """Return a stream as one chat completion, or its piece with an error.

    Raises:
        ValueError: a piece has another form, or the stream broke off before its end.
    """
    choices: dict[int, dict[str, Any]] = {}
    usage: Any = None
    is_done = False
    for line in text.split("\n"):
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        is_done = is_done or data == "[DONE]"
        piece: Any = read_json(data) if data.startswith("{") else {}
        if piece.get("error"):
            return piece
        usage = piece.get("usage") or usage  # Some endpoints count in each piece, the last one all.
        try:
            for part in piece.get("choices") or ():
                choice = choices.setdefault(int(part.get("index") or 0), {"message": {}, "finish_reason": None})
                choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
                delta = part.get("delta") or part.get("message") or {}
                for name in ("content", *_REASONING_FIELDS):
                    if delta.get(name):
                        choice["message"][name] = choice["message"].get(name, "") + _plain(delta[name])
        except (AttributeError, TypeError) as error:
            raise ValueError(f"a piece of the stream is not part of a chat completion: {data[:200]!r}") from error
    if not is_done and not (choices and all(choice["finish_reason"] for choice in choices.values())):
        raise ValueError("the stream broke off")
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


# ------------------------------------------------------------------------------------------------------------ the texts


def tokens_of(answer: Mapping[str, Any]) -> JudgeTokens | None:
    """Return the tokens of a chat completion by its `usage`; None if it has none, or counts none."""
    usage = answer.get("usage")
    fields = cast(Mapping[str, Any], usage) if isinstance(usage, dict) else {}
    counts = [fields.get(name) for name in ("prompt_tokens", "completion_tokens")]
    numbers = [count for count in counts if type(count) is int and 0 < count <= MOST_ID]
    return JudgeTokens(*numbers) if len(numbers) == len(counts) else None


def choice_texts(answer: Mapping[str, Any]) -> list[str] | None:
    """Return the text of each choice, "" for one without a text; None if the answer is not a chat completion."""
    choices = answer.get("choices")
    if not isinstance(choices, list):
        return None
    return [_choice_text(choice) if isinstance(choice, dict) else "" for choice in cast(list[Any], choices)]


def _choice_text(choice: Mapping[str, Any]) -> str:
    """Return a choice's content, or its finished reasoning if it has no content."""
    message: Any = choice.get("message")
    fields = cast(Mapping[str, Any], message) if isinstance(message, dict) else {}
    content = fields.get("content")
    text = _plain(content)
    if not text.strip() and choice.get("finish_reason") != "length":
        # Some endpoints return a whole answer as reasoning.
        reasoning = next((fields[name] for name in _REASONING_FIELDS if fields.get(name)), content)
        text = _plain(reasoning, with_reasoning=True)
    return well_formed(text)


def _plain(content: Any, *, with_reasoning: bool = False) -> str:
    """Return the text of a message's content: a text, or a list of parts, of which reasoning is left out."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_plain(part, with_reasoning=with_reasoning) for part in cast(list[Any], content))
    if not isinstance(content, dict):
        return ""
    part = cast(dict[str, Any], content)
    if "text" not in str(part.get("type", "text")) and not with_reasoning:
        return ""
    names = ("text", "thinking", "reasoning", "content", "value")
    return _plain(next((part[name] for name in names if part.get(name)), ""), with_reasoning=with_reasoning)


# ----------------------------------------------------------------------------------------------------------- the errors


def error_in(answer: Mapping[str, Any]) -> Any:
    """Return the error in an answer's body, or None: `error` at the top or in each choice, or vLLM's older form."""
    choices = answer.get("choices")
    if isinstance(choices, list) and choices:
        errors = [choice.get("error") for choice in cast(list[Any], choices) if isinstance(choice, dict)]
        return errors[0] if errors and all(errors) else None
    if answer.get("object") == "error":
        return {name: answer.get(name) for name in ("message", "code")}
    return answer.get("error") or None


def error_of(text: str) -> Any:
    """Return the error in the body of a refusal; None if it holds none."""
    try:
        answer = read_json(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(answer, list) and answer:  # Google's endpoints.
        answer = cast(list[Any], answer)[0]
    fields = cast(Mapping[str, Any], answer) if isinstance(answer, dict) else {}
    return fields.get("error") or fields


def status_of(error: object) -> int:
    """Return the HTTP status for an error in a body, from its code, status or type; 400 if none of them is known."""
    fields = cast(Mapping[str, Any], error) if isinstance(error, Mapping) else {}
    for code in (fields.get("code"), fields.get("status"), fields.get("type")):
        text = str(code).lower()
        if re.fullmatch("[45][0-9][0-9]", text):
            return int(text)
        if any(part in text for part in _LIMITED):
            return 429
        if any(part in text for part in _MAY_PASS):
            return 503
    return 400


def advice_on(error: object, text: str, status: int, *, is_passing: bool) -> str | None:
    """Return what to do about an endpoint that would refuse every request; None for any other refusal.

    Args:
        error: As `error_of` and `error_in` return it.
        text: The response.
        status: HTTP status, or that of `status_of`.
        is_passing: The endpoint asks for a pause. Some name the billing in the message of a limit per minute.
    """
    fields = cast(Mapping[str, Any], error) if isinstance(error, Mapping) else {}
    codes = " ".join(str(fields[name]) for name in ("code", "type", "status") if fields.get(name))
    message = text[:2000]
    if _ABOUT_CONTENT.search(message) or status >= 500:
        return None
    if status == 402 or _NO_ACCOUNT.search(codes) or (not is_passing and _NO_ACCOUNT.search(message)):
        return "Add credit at its provider, or name another judge in env.judge.base_url"
    if status == 429:
        return None
    if status in (401, 403) or _NO_KEY.search(codes) or _NO_KEY.search(message):
        return "Set its key in env.judge.api_key, or ask its provider what the key may use"
    if _NO_MODEL.search(codes) or _NO_MODEL.search(message):
        return "Set a model that it serves in env.judge.model_name"
    return "Set its address in env.judge.base_url: requests go to /chat/completions below it" if status == 404 else None
