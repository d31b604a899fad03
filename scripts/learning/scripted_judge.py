"""A judge without a model, for function calls, games, a person's talks and coding: it reads what any judge is shown.

    python -m learning.scripted_judge PORT

Of right calls, and where the person is content, it has no hint. Of other turns, its model names what the hint is:
`verbatim` is what the environment says that the call must be, and nothing where it only says that a value is wrong;
`words` is a sentence that says what to do; `conversation` is the error that answered a call, for one that repeats the
turn before and its error that it should not, or what the environment says of the first wrong user turn, for the turns
with the call that it names and for the turn that ended it, without the wrong names and values, which a small teacher
that reads them finds more likely; `game` is the error or the lack of an effect that answered a step, and for an end
before the mission is done that it is not; `person` is what the person replied; `reader` names the function of a failed
example, for the turn that wrote it. Asked how good a turn was, it says 1 or -1 likewise. Asked about a whole
trajectory, it names the first turns that it has a hint for, in a game before them the step after which an object of the
mission was seen no more.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from aiohttp import web

from learning.person import CONTENT

_SECTION = re.compile(r"^## (?P<title>.+) \[(?P<mark>[0-9a-f]{8})\]$", re.MULTILINE)
_TURN = re.compile(r"Turn(?: (?P<number>[0-9]+))?(?:: .+)?")
_CALL = re.compile(r"^The name must be .*$", re.MULTILINE)
_WRONG_TURN = re.compile(r"\bUser turn [0-9]+: (?P<text>.+)$", re.MULTILINE)
_NAMED_CALL = re.compile(r"The call (?P<function>\w+)\(")
_TURN_CALL = re.compile(r"^\[(?P<function>[^\]\n]*)\]$", re.MULTILINE)
_ERROR = re.compile(r"^Error: .+$", re.MULTILINE)
_ANY_ERROR = re.compile(r"^(?:Error: |\{\"error\": )", re.MULTILINE)
REPEATED = "The call before was the same, and it was answered with an error. Do not make it again."
_MUST_BE = re.compile(r"(?<=\. )It must be .+$")
_ARGUMENTS = re.compile(r"(?<=The call )(\w+)\(.*?\)(?= in user turn [0-9]+ was the last one)")
_WRONG_VALUE = re.compile(r" is (?:\"(?:[^\"\\]|\\.)*\"|\S+), which is not as requested\.")
_CALLS_MADE = re.compile(r" Calls of this user turn: .+\.$")
_WRONG_ENTRY = re.compile(r" has (?:the entry )?.+?, which does not belong there\.")
_NO_EFFECT = re.compile(r"^(?:Error: .+|Nothing changes: [^.\n]+\.)", re.MULTILINE)
_NOT_DONE = re.compile(r"^The mission is not done [^.\n]+\.", re.MULTILINE)
_LAST_SEEN = re.compile(r"^[^,\n]+, last seen after step (?P<step>[0-9]+), .+$", re.MULTILINE)
_FAILURE = re.compile(r"^FAIL (?P<function>\w+)\(.*$", re.MULTILINE)
RIGHT = "The calls are right."
HINT_START, OF_TRAJECTORY = "[HINT_START]", "\\boxed{N}"
MOST_TURNS = 3


class Section(NamedTuple):
    """A part of a question: its heading, and its text."""

    title: str
    text: str


def sections(question: str) -> list[Section]:
    """Return the sections of a question of `distill.prompts`, the last, empty one excepted."""
    parts = _SECTION.split(question)[1:]
    texts = (text.strip() for text in parts[2::3])
    return [Section(title, text) for title, text in zip(parts[::3], texts, strict=True) if title != "End"]


def evidence(question: str) -> list[str]:
    """Return the texts of the sections behind the turn of a question about one turn."""
    parts = sections(question)
    turn = next(position for position, section in enumerate(parts) if section.title == "Turn")
    return [section.text for section in parts[turn + 1 :]]


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


def hint_of(turn: str, evidence_text: str, model: str) -> str | None:
    """Return what a model says of a turn, from what came after it; None if it has nothing to say."""
    if any(text in evidence_text for text in (RIGHT, CONTENT)):
        return None
    if model == "reader":
        failures = (match for match in _FAILURE.finditer(evidence_text) if f"def {match['function']}(" in turn)
        failure = next(failures, None)
        return failure and f"Write {failure['function']} so that its examples pass; now there is {failure[0]}"
    if model == "conversation":
        return hint_of_conversation(turn, evidence_text, evidence_text)
    if model == "game":
        answered = (_NO_EFFECT if _TURN_CALL.search(turn) else _NOT_DONE).search(evidence_text)
        return answered and answered[0]
    call = _CALL.search(evidence_text)
    return {"words": in_words(evidence_text), "person": evidence_text}.get(model, call and call[0])


def hint_of_conversation(turn: str, result: str, verdict: str, *, is_repeated: bool = False) -> str | None:
    """Return what the environment says of a turn of a conversation (agentic_opd_environments.conversations).

    A call that repeats the turn before it, and its error, gets REPEATED. Another call gets the error that answered it,
    else the verdict if that names its function. A turn without a call gets the verdict, which says what the user turn
    lacks.
    """
    wrong = _WRONG_TURN.search(verdict)
    functions = {match["function"] for match in _TURN_CALL.finditer(turn)}
    if not functions:
        return wrong and without_wrong_values(wrong["text"])
    if is_repeated and _ANY_ERROR.search(result):
        return REPEATED
    if error := _ERROR.search(result):
        must_be = _MUST_BE.search(error[0])
        return must_be[0] if must_be else error[0]
    named = {match["function"] for match in _NAMED_CALL.finditer(wrong["text"])} if wrong else set[str]()
    return without_wrong_values(wrong["text"]) if wrong and named & functions else None


def without_wrong_values(verdict: str) -> str:
    """Return what is said of a wrong state, without the values and arguments that are wrong."""
    text = _ARGUMENTS.sub(r"\1", _CALLS_MADE.sub("", verdict))
    text = _WRONG_VALUE.sub(" is not as requested.", text)
    return _WRONG_ENTRY.sub(" has something that does not belong there.", text)


def answer(system: str, question: str, model: str) -> str:
    """Return the judge's answer, by its system prompt: hints, how good a turn was, or the turns at fault."""
    if OF_TRAJECTORY in system:
        return about_trajectory(question, model)
    parts, evidence_text = sections(question), "\n\n".join(evidence(question))
    if HINT_START not in system:
        is_content = any(text in evidence_text for text in (RIGHT, CONTENT))
        return "\\boxed{1}" if is_content else "\\boxed{-1}"
    turn = next(section.text for section in parts if section.title == "Turn")
    if model == "conversation":
        result = "\n".join(section.text for section in parts if section.title.startswith("Next state"))
        is_repeated = any(section.title == "Earlier" for section in parts)
        hint = hint_of_conversation(turn, result, evidence_text, is_repeated=is_repeated)
    else:
        hint = hint_of(turn, evidence_text, model)
    return f"\\boxed{{1}}\n{HINT_START}{hint}[HINT_END]" if hint else "\\boxed{-1}"


def about_trajectory(question: str, model: str) -> str:
    """Return the answer about a whole trajectory.

    A turn's evidence is what answered it, for the last one also the verdict; a reader looks for the failure of a turn's
    function in all that came after, and a game's verdict may speak of any step.
    """
    turns = dict[int, str]()
    answered = dict[int, str]()
    for section in sections(question):
        match = _TURN.fullmatch(section.title)
        if match is not None and match["number"] is not None:
            number = int(match["number"])
            part = turns if number not in turns else answered
            part[number] = "\n\n".join(filter(None, (part.get(number), section.text)))
    verdict = next((section.text for section in sections(question) if section.title == "Verdict"), "")
    if turns:
        answered[max(turns)] = "\n\n".join(filter(None, (answered.get(max(turns)), verdict)))
    hints = out_of_view(turns, answered, verdict) if model == "game" else {}
    for number, turn in turns.items():
        later = [text for position, text in answered.items() if position >= number]
        evidence_text = "\n\n".join(later) if model == "reader" else answered.get(number, "")
        hint = hint_of(turn, evidence_text, model) if evidence_text else None
        if hint and number not in hints:
            hints[number] = hint
    named = [f"\\boxed{{{number}}}\n{HINT_START}{hint}[HINT_END]" for number, hint in hints.items()]
    return "\n".join(named[:MOST_TURNS]) or "\\boxed{-1}"


def out_of_view(turns: Mapping[int, str], answered: Mapping[int, str], verdict: str) -> dict[int, str]:
    """Return the turns of a game that took an object of the mission out of view for good, with the verdict's words.

    A turn is a step, unless it has no call or its call was an error.
    """
    numbers = [
        number
        for number, turn in turns.items()
        if _TURN_CALL.search(turn) and not answered.get(number, "").startswith("Error: ")
    ]
    steps = dict(enumerate(numbers, start=1))
    last_seen = ((int(match["step"]), match[0]) for match in _LAST_SEEN.finditer(verdict))
    return {steps[step + 1]: words for step, words in last_seen if step + 1 in steps}


Answer = Callable[[str, str, str], str]
"""System prompt, question and model's name -> the judge's answer."""


def serve(port: int, answering: Answer, names: Sequence[str]) -> None:
    """Serve models of these names by chat completions, until the process is ended."""

    async def complete(request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        text = answering(body["messages"][0]["content"], body["messages"][-1]["content"], body["model"])
        choices = [
            {"index": index, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            for index in range(body.get("n") or 1)
        ]
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": choices}
        )

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=2**24)
    app.add_routes(
        [web.post("/v1/chat/completions", complete), web.get("/v1/models", models), web.get("/health", health)]
    )
    web.run_app(app, host="127.0.0.1", port=port, print=None)


NAMES = ("verbatim", "words", "conversation", "game", "person", "reader")


def main() -> None:
    """Serve until the process is ended."""
    serve(int(sys.argv[1]), answer, NAMES)


if __name__ == "__main__":
    main()
