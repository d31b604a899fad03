"""Tasks whose first prompt does not fit are found before a rollout, without tokenising megabytes."""

from typing import Any

import pytest

from agentic_opd.core.types import Task
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.first_prompts import described, too_long
from agentic_opd.rollout.loop import first_messages
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.worlds.coding.world import CodingWorld
from agentic_opd.worlds.config import WorldConfig

WORLD = CodingWorld(WorldConfig(), "You are an agent.")


def chat_of(tokenizer: Any) -> ChatFormat:
    return ChatFormat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, WORLD.tools)


def task(name: str, prompt: str) -> Task:
    return Task(name, prompt, "assert f()")


def test_the_limit_is_exact(tokenizer: Any) -> None:
    """A prompt of n tokens fits a limit of n + 1: one token is left to answer with."""
    chat, one = chat_of(tokenizer), task("a", "Write f. " * 50)
    length = len(chat.first_prompt(first_messages(WORLD, one)).token_ids)
    assert too_long([one], WORLD, chat, length + 1) == {}
    assert too_long([one], WORLD, chat, length) == {"a": length}


def test_megabytes_are_not_tokenised(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of(tokenizer)
    rendered: list[int] = []
    first_prompt = chat.first_prompt

    def counted(messages: Any) -> Any:
        rendered.append(len(messages[-1]["content"]))
        return first_prompt(messages)

    monkeypatch.setattr(chat, "first_prompt", counted)
    long = too_long([task("small", "Write f."), task("large", "x" * 8_000_000)], WORLD, chat, 8192)
    assert long.keys() == {"large"}
    assert long["large"] >= 8192
    assert max(rendered) < 100


def test_the_numbers_are_said() -> None:
    text = described({"a": 9000, "b": 9001, "c": 9002, "d": 9003}, 10, 8192)
    assert text.startswith("4 of 10 tasks have a first prompt that does not fit env.max_token_length (8192)")
    assert "'a' has 9000 tokens or more" in text
    assert text.endswith("and 1 more")
