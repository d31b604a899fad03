"""A person who wants short answers, by four rules: sessions at the gateway, and what first answers are worth.

In: a gateway, and a name for each session. Out: ended sessions without a reward. The person asks a question, replies to
each answer with the rules that it breaks, in words, and complains at most twice. Other questions are measured. The
policy is a pretrained model, and its prompts do not hold the rules.
"""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from agents.demo_gateway import Served
from openai import AsyncOpenAI

from agentic_opd.core.concurrency import gather_all
from agentic_opd.core.types import Task
from learning.talk import AT_ONCE, client_of, end_session

MOST_WORDS = 40
MOST_TOKENS = 160
"""Of an answer."""
TEMPERATURE = 0.3
"""Of all answers, also of those that are measured."""
MOST_COMPLAINTS = 2
CONTENT = "Thanks, that is how I like it."
TOO_LONG = (
    "That is too long for me. Please answer in one or two short sentences.",
    "I don't want to read so much. One or two short sentences are enough.",
    "Shorter, please: two short sentences at most.",
)
NOT_PLAIN = (
    "Please write it as one plain paragraph, without a list.",
    "No list and no second paragraph, please: just plain text.",
)
NOT_ENDED = (
    "You stopped in the middle. Please end with a whole sentence.",
    "Your answer has no end. Please finish your last sentence.",
)
OFF_TOPIC = ("That does not answer my question.", "I asked something else. Please answer my question.")
_SMALL = {
    *("what", "how", "why", "does", "the", "are", "can", "our", "for", "its", "all", "day"),
    *("made", "make", "makes", "work", "good", "find", "their"),
}
"""Words of a question that say nothing of its topic, beside those of one or two letters."""

TRAINED = """
What is photosynthesis? How does a rainbow form? Why is the sea salty? What does a bee do all day? Why do leaves fall?
How can I sleep better? What is gravity? Why do cats purr? How is glass made? What is a volcano? Why is the sky blue?
How do birds find their way? What is inflation? How does a fridge work? Why do we yawn? What is an atom?
How is paper made? What makes bread rise? Why do we dream? What is a black hole? How does a battery work?
Why do onions make us cry? What is a glacier? How do fish breathe? What does the heart do? Why is exercise good for us?
How is cheese made? What is a fossil? Why do stars shine? How do vaccines work? What is a desert? Why do dogs bark?
How does soap clean? What is a virus? Why does ice float? How can I save water at home?
"""
MEASURED = """
How do bats see in the dark? What is a comet? Why do we have seasons? How is chocolate made? What does the brain do?
Why do metals rust? How do submarines dive? What is a tornado? Why do we need sleep? How does a camera work?
What is a whale? Why is honey sweet? How do plants drink water? What is electricity? Why do we laugh?
How does the internet work? What is a mountain? Why do birds sing? How is salt made? What is a shadow?
How can I learn to cook? Why are trees important? What does a judge do? How does a clock work? What is an earthquake?
Why do apples turn brown? How do spiders make webs? What is money? Why does the moon change? How can I be happier?
What is a vitamin? Why do we blink? How does an engine work? What is a river? Why do flowers smell? How is silk made?
What is a cell? Why do we shiver? How does a kite fly? What is music?
"""


def questions(text: str) -> list[str]:
    """The questions of a text, in order."""
    return [f"{question.strip()}?" for question in " ".join(text.split()).split("?") if question.strip()]


def broken(answer: str, question: str) -> list[tuple[str, ...]]:
    """The complaints of each rule that an answer breaks: it is long, no plain paragraph, has no end, or no topic."""
    text = answer.strip()
    topics = [word[:4] for word in re.findall(r"[a-z]{3,}", question.lower()) if word not in _SMALL]
    rules = (
        (len(text.split()) <= MOST_WORDS, TOO_LONG),
        ("\n" not in text and "**" not in text, NOT_PLAIN),
        (text.rstrip("\"')*").endswith((".", "!", "?")), NOT_ENDED),
        (any(topic in text.lower() for topic in topics), OFF_TOPIC),
    )
    return [complaint for is_kept, complaint in rules if not is_kept]


def score(answer: str, question: str) -> float:
    """The share of the four rules that an answer keeps."""
    return 1 - len(broken(answer, question)) / 4


def reply(answer: str, question: str, rng: Random) -> str:
    """What the person says to an answer."""
    return " ".join(rng.choice(complaints) for complaints in broken(answer, question)) or CONTENT


@dataclass(frozen=True, slots=True)
class Person:
    """Holds sessions at a gateway."""

    served: Served
    client: AsyncOpenAI
    model: str
    slots: asyncio.Semaphore

    @classmethod
    def connected(cls, served: Served, model: str) -> "Person":
        """A person who talks with the model behind a gateway."""
        return cls(served, client_of(served), model, asyncio.Semaphore(AT_ONCE))

    async def session(self, task: Task, name: str) -> None:
        """Hold a session, end it with the person's last words, and wait until the gateway has written its group.

        Raises:
            TalkFailedError: no group was made of it.
            OpenAIError: a request failed.
            OSError: the gateway is gone.
        """
        async with self.slots:
            messages, rng = [{"role": "user", "content": task.prompt}], Random(name)
            while True:
                answer = await answer_to(self.client, self.model, messages, {"X-Session-Id": name})
                words = reply(answer, task.prompt, rng)
                if words == CONTENT or len(messages) > 2 * MOST_COMPLAINTS:
                    break
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": words}]
            await end_session(self.served, name, {"feedback": words})


def person_tasks() -> list[Task]:
    """What the sessions are about."""
    return [Task(f"person/{number}", question) for number, question in enumerate(questions(TRAINED))]


async def answer_to(
    client: AsyncOpenAI, model: str, messages: Sequence[Any], headers: dict[str, str] | None = None
) -> str:
    """The policy's answer to a conversation."""
    completion = await client.chat.completions.create(
        model=model, messages=list(messages), temperature=TEMPERATURE, max_tokens=MOST_TOKENS, extra_headers=headers
    )
    return completion.choices[0].message.content or ""


@dataclass(slots=True)
class PersonExaminer:
    """Measures first answers to questions that no session was about."""

    client: AsyncOpenAI
    model: str
    samples: int
    """Of each question."""

    async def pass_rate(self, folder: Path) -> tuple[float, int]:
        """The mean score of the answers, and how many there were; each of them goes to samples.jsonl in `folder`."""
        exam = [question for question in questions(MEASURED) for _ in range(self.samples)]
        slots = asyncio.Semaphore(AT_ONCE)

        async def answered(question: str) -> str:
            async with slots:
                return await answer_to(self.client, self.model, [{"role": "user", "content": question}])

        answers = await gather_all(map(answered, exam))
        rows: list[dict[str, Any]] = [
            {"task_id": question, "score": score(answer, question), "answer": answer}
            for question, answer in zip(exam, answers, strict=True)
        ]
        await asyncio.to_thread(_write, folder, rows)
        return sum(row["score"] for row in rows) / len(rows), len(rows)

    async def close(self) -> None:
        """Close connections."""
        await self.client.close()


def _write(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "samples.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
