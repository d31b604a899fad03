"""Renderers that keep what was sampled are found by name; others are refused at start-up."""

import logging
from typing import Any

import pytest
from renderers import DefaultRendererConfig, Qwen3RendererConfig, create_renderer

from agentic_opd.core.errors import ConfigError, RendererError
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.renderer import check_round_trip, explained_tokenizer_errors, load_renderer
from agentic_opd.worlds.coding.tools import TOOL_SPECS


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen33", {}, "No renderer config"),
        ("qwen3", {"enable_thinkin": False}, "enable_thinkin: Extra inputs are not permitted$"),
        ("default", {}, "tool_parser"),
        ("auto", {}, "Name the model family"),
    ],
)
def test_a_wrong_renderer_is_a_config_error(tokenizer: Any, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_renderer(tokenizer, name, options)


def test_thinking_is_kept_so_that_prompts_can_be_extended(tokenizer: Any) -> None:
    renderer: Any = load_renderer(tokenizer, "qwen3", {})
    assert (renderer.config, renderer.effective_thinking_retention) == (Qwen3RendererConfig(), "all")


def test_the_round_trip_check_passes_and_fails(tokenizer: Any) -> None:
    for name, options in (("qwen3", {"enable_thinking": False}), ("default", {"tool_parser": "qwen3"})):
        check_round_trip(ChatFormat(load_renderer(tokenizer, name, options), tokenizer, TOOL_SPECS))
    blind = ChatFormat(create_renderer(tokenizer, DefaultRendererConfig()), tokenizer, TOOL_SPECS)
    with pytest.raises(RendererError, match="does not read back"):
        check_round_trip(blind)


def test_a_tokenizer_of_a_hub_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    """A hub that can't be reached is asked for a minute, in which nothing else is logged."""
    caplog.set_level(logging.INFO)
    with (
        pytest.raises(ConfigError, match="the tokenizer 'a/name' can't be loaded"),
        explained_tokenizer_errors("a/name"),
    ):
        raise OSError("no network")
    assert caplog.messages == ["the tokenizer 'a/name' is no folder here: it is loaded from the hub or its cache"]
    caplog.clear()
    with explained_tokenizer_errors("scripts/demo_policy/policy"):
        pass
    assert caplog.messages == []
