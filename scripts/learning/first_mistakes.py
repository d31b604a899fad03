"""The first mistakes of a policy, before and after a training, as text."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

COUNT = 5
PARAGRAPH = "\n\n"


def first_mistakes(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], count: int = COUNT) -> str:
    """Markdown: the first tasks that failed before, what was answered, and what is answered now.

    Args:
        before: Lines of a samples.jsonl.
        after: Those of the same tasks and samples later.
        count: Number of tasks; a task counts once.
    """
    later = {(row["task_id"], row["sample"]): row for row in after}
    failed = {row["task_id"]: row for row in reversed(before) if not row["passed"]}
    failures = [failed[task_id] for task_id in dict.fromkeys(row["task_id"] for row in before) if task_id in failed]
    return "\n".join(line for row in failures[:count] for line in _lines(row, later[row["task_id"], row["sample"]]))


def _lines(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    question = before["messages"][_last_question(before["messages"])]["content"]
    yield f"**{question.rpartition(PARAGRAPH)[2]}**\n"
    for when, row in (("before", before), ("after", after)):
        yield f"- {when}, {'right' if row['passed'] else 'wrong'}: `{last_answer(row['messages'])}`"
    yield ""


def _last_question(messages: Sequence[dict[str, Any]]) -> int:
    """Return the place of the last message of a user; example turns are before it."""
    return max((position for position, message in enumerate(messages) if message["role"] == "user"), default=0)


def last_answer(messages: Sequence[dict[str, Any]]) -> str:
    """Return the query of the last call of `answer`; without one the last call, or the text instead."""
    answers = messages[_last_question(messages) :]
    calls = [call["function"] for message in answers for call in message.get("tool_calls") or ()]
    written = next((call["arguments"] for call in reversed(calls) if call["name"] == "answer"), None)
    if written is None and calls:
        return f"{calls[-1].get('name', '')} {calls[-1]['arguments']}".strip()
    if written is None:
        return (
            next((answer["content"] for answer in reversed(answers) if answer["role"] == "assistant"), "")
            or "no answer"
        )
    try:
        return str(json.loads(written)["sql"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return written
