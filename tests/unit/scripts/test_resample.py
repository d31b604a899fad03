"""Hinted turns sampled again: a scripted policy, the real tools and a real sandbox.

The file's rollout wrote `return 0` in its first turn; the second, with the hint "Return one.", is sampled again. A
sample that patches the 0 passes only if the first turn's call was run before it.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from learning.hint_lifts.resample import (
    HintedTurn,
    Resampled,
    Resampler,
    check_tokens,
    drawn,
    hinted_turns,
    of_version,
    resample,
)

from agentic_opd.core.errors import (
    DatasetError,
    OutputError,
    PlaceError,
    RendererError,
    ServerMismatchError,
    ServerRequestError,
    ServerUnreachableError,
)
from agentic_opd.core.types import ProgramRun, Task, TurnOutcome
from agentic_opd.report.lifts import ResampledTurn
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.rollout.conversation import Completion
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.wire.group import ScoredGroup, ScoredRollout, TurnRecord
from agentic_opd.worlds.coding.tools import TOOL_SPECS
from agentic_opd.worlds.coding.world import CodingWorld
from agentic_opd.worlds.config import WorldConfig

TASK = Task("t", "Write f.", "from solution import f\nassert f() == 1")


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


WRONG = call("write_file", path="solution.py", content="def f():\n    return 0\n")
PATCHED = call("patch", path="solution.py", old="return 0", new="return 1")


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def file_of(tokenizer: Any, version: int | None = 3, task: str = "t") -> ScoredGroup:
    """A rollout of two turns, the second with a hint at the end of its prompt."""
    prompt = encode(tokenizer, "<|im_start|>user\nWrite f.<|im_end|>\n<|im_start|>assistant\n")
    first = encode(tokenizer, f"{WRONG}<|im_end|>")
    between = encode(tokenizer, "\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n")
    second = encode(tokenizer, "done<|im_end|>")
    a, b = len(prompt), len(prompt) + len(first)
    c = b + len(between)
    tokens = (*prompt, *first, *between, *second)
    sampled = [a <= place < b or c <= place for place in range(len(tokens))]
    records = (
        TurnRecord((a, b), TurnOutcome.VOTE_FAILED, "tool"),
        TurnRecord(
            (c, len(tokens)),
            TurnOutcome.SCORED,
            "verdict",
            hint="Return one.",
            hint_token_ids=tuple(encode(tokenizer, "HINT")),
            insert_at=b,
            evidence=("verdict",),
        ),
    )
    rollout = ScoredRollout(
        tokens_T=tokens,
        masks_T=[token if own else -100 for token, own in zip(tokens, sampled, strict=True)],
        logprobs_T=[-0.5 if own else 1.0 for own in sampled],
        score=0.0,
        messages=[{"role": "user", "content": "Write f."}],
        turns=records,
    )
    return ScoredGroup((rollout,), item_id=f"{task}#0", task_id=task, weight_version=version)


def the_turn(tokenizer: Any, **changes: Any) -> HintedTurn:
    (turn,) = hinted_turns([(1, file_of(tokenizer, **changes))])
    return turn


def chat_of(tokenizer: Any) -> ChatFormat:
    return ChatFormat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, TOOL_SPECS)


def measure(tokenizer: Any, answers: Callable[[bool], Sequence[str]], **config: int) -> ResampledTurn:
    """Measure the turn; `answers` says what is sampled with and without the hint."""
    turn, limits = the_turn(tokenizer), RolloutConfig(**config)
    asked: list[tuple[int, int]] = []

    async def sample(prompt: Sequence[int], count: int, max_tokens: int) -> list[Completion]:
        texts = answers("HINT" in tokenizer.decode(list(prompt)))
        assert count == len(texts)
        asked.append((len(prompt), max_tokens))
        ids = [tuple(encode(tokenizer, text + "<|im_end|>")) for text in texts]
        return [Completion(one, (-0.5,) * len(one)) for one in ids]

    async def run() -> ResampledTurn:
        world, slots = CodingWorld(WorldConfig()), asyncio.Semaphore(4)
        return await Resampler(world, {"t": TASK}, chat_of(tokenizer), sample, 4, limits, slots).measure(turn)

    measured = asyncio.run(run())
    assert all(room <= min(limits.max_tokens_per_turn, limits.max_token_length - size) for size, room in asked)
    return measured


def test_the_prompts_are_those_of_the_teacher_and_the_student(tokenizer: Any) -> None:
    turn = the_turn(tokenizer)
    start = turn.record.span[0]
    assert turn.without_hint == tuple(turn.rollout.tokens_T[:start])
    text = tokenizer.decode(list(turn.with_hint))
    assert text == tokenizer.decode(list(turn.without_hint)).replace(
        "<|im_end|>\n<|im_start|>user\nok", "<|im_end|>HINT\n<|im_start|>user\nok"
    )


def test_samples_act_behind_the_earlier_turns_and_the_world_judges_them(tokenizer: Any) -> None:
    """3 of 4 patch with the hint, 1 of 4 without; what can't be parsed or does nothing leaves `return 0`."""
    broken = '<tool_call>\n{"name": "patch", "argu'
    measured = measure(
        tokenizer, lambda hinted: [PATCHED] * 3 + ["done"] if hinted else ["done", PATCHED, broken, "done"]
    )
    assert (measured.key, measured.task_id, measured.hint) == ((1, 0, 1), "t", "Return one.")
    assert (measured.samples, measured.passed_with, measured.passed_without) == (4, 3, 1)
    assert measured.evidence == ("verdict",)


def test_a_prompt_that_leaves_no_room_is_not_sampled(tokenizer: Any) -> None:
    with pytest.raises(RendererError, match=r"leaves no room in env\.max_token_length"):
        measure(tokenizer, lambda hinted: ["done"] * 4, max_token_length=16)


def test_a_task_that_the_settings_lack_is_named(tokenizer: Any) -> None:
    turn = the_turn(tokenizer, task="elsewhere")
    resampler: Any = Resampler(CodingWorld(WorldConfig()), {"t": TASK}, chat_of(tokenizer), None, 4, None, None)  # type: ignore[arg-type]
    with pytest.raises(DatasetError, match="'elsewhere' of line 1 is not among the 1 of the settings"):
        asyncio.run(resampler.measure(turn))


def test_weights_that_did_not_sample_the_file_are_refused_with_both_versions(tokenizer: Any) -> None:
    turns = [the_turn(tokenizer, version=3), the_turn(tokenizer, version=4)]
    assert of_version(turns, 4, "http://x") == turns[1:]
    assert of_version(turns, None, "http://x") == turns
    with pytest.raises(ServerMismatchError, match=r"has the weights of version 7, but .* sampled by version 3, 4"):
        of_version(turns, 7, "http://x")
    with pytest.raises(OutputError, match="holds no turn with a hint"):
        of_version([], 7, "http://x")


def test_a_tokenizer_that_does_not_spell_the_file_is_refused(tokenizer: Any) -> None:
    class Other:
        """Has the same ids for other texts."""

        def __len__(self) -> int:
            return len(tokenizer)

        def decode(self, ids: list[int]) -> str:
            return tokenizer.decode([(token + 7) % len(tokenizer) for token in ids])

    class Small(Other):
        def __len__(self) -> int:
            return 20

    turn, chat = the_turn(tokenizer), chat_of(tokenizer)
    check_tokens([turn], chat, "own")
    for other, why in ((Other(), "its prompt does not hold the user's 'Write f.'"), (Small(), "and that one has 20")):
        chat.tokenizer = other
        with pytest.raises(ServerMismatchError, match=f"not made with the tokenizer 'x': .*{why}"):
            check_tokens([turn], chat, "x")


def test_turns_are_drawn_in_the_order_of_the_file(tokenizer: Any) -> None:
    turns = [the_turn(tokenizer, version=number) for number in range(20)]
    some = drawn(turns, 5, seed=1)
    versions = [turn.version for turn in some]
    assert len(versions) == 5
    assert versions == sorted(versions)  # type: ignore[type-var]
    assert drawn(turns, 5, seed=1) == some
    assert drawn(turns, None, seed=1) == drawn(turns, 20, seed=1) == turns


def measured_by(tokenizer: Any, failure: BaseException) -> tuple[Resampled, list[int]]:
    """Six turns, of which the third fails."""
    turns = [the_turn(tokenizer, version=number) for number in range(6)]
    told: list[int] = []

    async def one(turn: HintedTurn) -> ResampledTurn:
        await asyncio.sleep(0)
        if turn.version == 2:
            raise failure
        return ResampledTurn(turn.version or 0, 0, 0, "t", "h", (), 4, 1, 0)

    result = asyncio.run(resample(turns, one, lambda result: told.append(len(result.turns)), 1))
    return result, told


def test_a_turn_that_fails_by_itself_does_not_stop_the_others(tokenizer: Any) -> None:
    result, told = measured_by(tokenizer, ServerRequestError("too long", 400))
    assert [turn.line for turn in result.turns] == [0, 1, 3, 4, 5]
    assert result.failed == ["line 1, sequence 0, turn 2: too long"]
    assert (told, result.stopped) == ([1, 2, 2, 3, 4, 5], None)


@pytest.mark.parametrize("failure", [ServerUnreachableError("gone"), asyncio.CancelledError()])
def test_a_dead_server_or_an_interruption_keeps_what_is_measured(tokenizer: Any, failure: BaseException) -> None:
    result, told = measured_by(tokenizer, failure)
    assert [turn.line for turn in result.turns] == [0, 1]
    assert told == [1, 2]
    if isinstance(failure, ServerUnreachableError):
        assert result.stopped is failure


def test_what_a_program_did_is_not_acted_out(tokenizer: Any) -> None:
    group = file_of(tokenizer)
    rollouts = tuple(replace(one, program=ProgramRun(0, None, "")) for one in group.rollouts)
    with pytest.raises(PlaceError, match=r"line 3 is of a program \(env.agent.command\)"):
        list(hinted_turns([(3, replace(group, rollouts=rollouts))]))
