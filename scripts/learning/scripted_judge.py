"""A judge without a model, for function calls and a person's talks: it reads the evidence of the question, as any does.

    python -m learning.scripted_judge PORT

Of right calls, and where the person is content, it has no hint. Of other turns, its model names what the hint is:
`verbatim` is what the environment says that the call must be, and nothing where it only says that a value is wrong;
`words` is a sentence that says what to do; `person` is what the person replied. Asked how good a turn was, it says 1 or
-1 likewise.
"""

import re
import sys
from typing import Any

from aiohttp import web

from learning.person import CONTENT

_SECTION = re.compile(r"^## (?P<title>.+) \[(?P<mark>[0-9a-f]{8})\]$", re.MULTILINE)
_CALL = re.compile(r"^The name must be .*$", re.MULTILINE)
RIGHT = "The calls are right."
HINT_START = "[HINT_START]"


def evidence(question: str) -> list[str]:
    """Return the texts of the sections behind the turn of a question of `distill.prompts`."""
    parts = _SECTION.split(question)[1:]
    sections = list(zip(parts[::3], parts[2::3], strict=True))
    turn = next(position for position, (title, _) in enumerate(sections) if title == "Turn")
    return [text.strip() for title, text in sections[turn + 1 :] if title != "End"]


def in_words(evidence_text: str) -> str:
    """Return what the agent should have done, from the environment's answer to wrong calls."""
    if call := _CALL.search(evidence_text):
        return f"Write only the call: {call[0]}"
    if value := re.search(r"the parameter (\S+) has a wrong value", evidence_text):
        return f"Read the request again for the parameter {value[1]}: its value is not what the request asks for."
    if extra := re.search(r"the parameter (\S+) (?:does not belong to the call|is missing)", evidence_text):
        return f"Think again about the parameter {extra[1]}: {extra[0]}."
    if " calls were made" in evidence_text:
        return "Make exactly one call, and write nothing after it."
    return f"Make the call differently: {evidence_text}"


def answer(system: str, question: str, model: str) -> str:
    """Return the judge's answer to a question of hints, or to one whose system prompt asks how good the turn was."""
    evidence_text = "\n\n".join(evidence(question))
    is_content = any(text in evidence_text for text in (RIGHT, CONTENT))
    if HINT_START not in system:
        return "\\boxed{1}" if is_content else "\\boxed{-1}"
    call = _CALL.search(evidence_text)
    hint = {"words": in_words(evidence_text), "person": evidence_text}.get(model, call and call[0])
    return f"\\boxed{{1}}\n{HINT_START}{hint}[HINT_END]" if hint and not is_content else "\\boxed{-1}"


async def _complete(request: web.Request) -> web.Response:
    body: dict[str, Any] = await request.json()
    text = answer(body["messages"][0]["content"], body["messages"][-1]["content"], body["model"])
    choices = [
        {"index": index, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        for index in range(body.get("n") or 1)
    ]
    return web.json_response(
        {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": choices}
    )


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in NAMES]})


async def _health(request: web.Request) -> web.Response:
    return web.Response()


NAMES = ("verbatim", "words", "person")


def main() -> None:
    """Serve until the process is ended."""
    app = web.Application(client_max_size=2**24)
    app.add_routes(
        [web.post("/v1/chat/completions", _complete), web.get("/v1/models", _models), web.get("/health", _health)]
    )
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
