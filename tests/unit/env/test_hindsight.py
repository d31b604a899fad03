"""`Hindsight` over Atropos environments of several shapes, as their own command line runs them."""

import asyncio
import json
import logging
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

from agentic_opd.cli.validate import main as validate
from agentic_opd.core.errors import ConfigError, NoGroupsError, ServerMismatchError, ServerUnreachableError
from agentic_opd.env import Hindsight
from agentic_opd.env.hindsight import _with_sections, hindsight_settings
from tests.support.fake_plugin import FakePlugin, fake_plugin
from tests.support.places import MODEL, ROOT
from tests.support.plain_environment import FIRST, SECOND, PlainEnv

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
"""Atropos warns of a local server, and of the sockets that it leaves open."""


class ShapeEnv(BaseEnv):
    """What the shapes below share: a group of one question, answered by a ManagedServer."""

    name = "shape"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        return BaseEnvConfig(group_size=2, total_steps=2), [APIServerConfig(server_type="vllm")]

    async def setup(self) -> None: ...

    async def evaluate(self, *args: Any, **kwargs: Any) -> None: ...

    async def get_next_item(self) -> str:
        return "What is 12 + 30?"

    async def said(self, managed: Any, messages: list[dict[str, Any]]) -> str:
        done = await managed.chat_completion(messages=messages, n=1, max_tokens=64, temperature=1.0)
        return done.choices[0].message.content


class MathsEnv(ShapeEnv):
    """Single-turn maths: one item per rollout, collected by Atropos' default `collect_trajectories`."""

    async def collect_trajectory(self, item: str) -> tuple[Any, list[str]]:
        messages = [{"role": "user", "content": item}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await self.said(managed, messages)
            node = managed.get_state()["nodes"][0]
        messages = [*messages, {"role": "assistant", "content": answer}]
        return {"tokens": node.tokens, "masks": node.masked_tokens, "scores": -1.0, "messages": messages}, []


def of_the_page() -> type[BaseEnv]:
    """The class in docs/environments.md, over `MathsEnv`."""
    code = (ROOT / "docs/environments.md").read_text().partition("```python\n")[2].partition("```")[0]
    module, space = ModuleType("my_environment"), dict[str, Any](__name__="my_opd")
    vars(module)["MyEnv"] = MathsEnv
    sys.modules["my_environment"] = module
    try:
        exec(code, space)
    finally:
        del sys.modules["my_environment"]
    return space["MyOpd"]


MathsWithHindsight = of_the_page()


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]


class ToolsEnv(ShapeEnv):
    """Tool calling: tools in the template, results as a tool's messages, logprobs of the sampling weights.

    `ManagedServer.completion` masks the first turn, so it is context.
    """

    async def said(self, managed: Any, messages: list[dict[str, Any]]) -> str:
        template: Any = self.tokenizer.apply_chat_template
        prompt = template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
        done = await managed.completion(prompt=prompt, n=1, max_tokens=64, temperature=1.0)
        return done.choices[0].text

    async def collect_trajectories(self, item: str) -> tuple[ScoredDataGroup, list[str]]:
        names = ("tokens", "masks", "scores", "inference_logprobs", "messages")
        group: dict[str, list[Any]] = {name: [] for name in names}
        for index in range(self.config.group_size):
            messages: list[dict[str, Any]] = [{"role": "user", "content": item}]
            async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
                for result in ("", "error: add wants two numbers"):
                    messages.append({"role": "assistant", "content": await self.said(managed, messages)})
                    messages.append({"role": "tool", "content": result})
                node = managed.get_state()["nodes"][-1]
            row = (node.tokens, node.masked_tokens, float(index), node.logprobs, messages)
            for name, value in zip(names, row, strict=True):
                group[name].append(value)
        return ScoredDataGroup(**group), []  # type: ignore[typeddict-item]


class ToolsWithHindsight(Hindsight, ToolsEnv):
    opd_tools = TOOLS


class GameWithHindsight(Hindsight, PlainEnv):
    """A game of two turns, which makes its groups by `collect_trajectories`."""


class BareEnv(PlainEnv):
    """The game without messages, as most of Atropos' environments return their groups; masks cover tokens as tuples."""

    name = "bare"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, APIServerConfig]:  # type: ignore[override]
        """One server outside a list, for which Atropos reads no flags, and not one of vLLM."""
        return BaseEnvConfig(group_size=2, total_steps=2), APIServerConfig()

    async def collect_trajectories(self, item: str) -> tuple[ScoredDataGroup, list[str]]:
        assert isinstance(self.tokenizer.apply_chat_template([{"role": "user", "content": item}]), list)
        group, backlog = await super().collect_trajectories(item)
        group["masks"] = [tuple(mask) for mask in group["masks"]]  # type: ignore[misc]
        group["scores"] = [True, False]
        group["messages"] = [None, None]  # type: ignore[list-item]
        return group, backlog


class BareWithHindsight(Hindsight, BareEnv):
    def verdicts(self, group: Mapping[str, Any]) -> list[str | None]:
        return [f"{group['item']} Not done.", None]


class UnreadableEnv(ShapeEnv):
    """Returns no messages, and tokens of no chat template."""

    async def collect_trajectories(self, item: str) -> tuple[ScoredDataGroup, list[str]]:
        row = [5, 6, 7, 8]
        group = {"tokens": [row] * 2, "masks": [[-100, -100, 7, 8]] * 2, "scores": [0.0, 1.0]}
        return ScoredDataGroup(**group), []  # type: ignore[typeddict-item]


class UnreadableWithHindsight(Hindsight, UnreadableEnv):
    pass


class EqualEnv(MathsEnv):
    """Builds its group in `score`, as most archived environments do, which returns None if all scores are equal."""

    items = 3

    async def get_next_item(self) -> str | None:  # type: ignore[override]
        self.items -= 1
        return await super().get_next_item() if self.items >= 0 else None

    async def rollouts(self, item: str) -> list[dict[str, Any]]:
        return [(await self.collect_trajectory(item))[0] for _ in range(self.config.group_size)]

    async def collect_trajectories(self, item: str) -> tuple[ScoredDataGroup | None, list[str]]:
        return await self.score(await self.rollouts(item)), []

    async def score(self, rollouts: list[dict[str, Any]]) -> ScoredDataGroup | None:
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])  # type: ignore[typeddict-item]
        for rollout in rollouts:
            for name in ("tokens", "masks", "scores"):
                group[name].append(rollout[name])
        if all(group["scores"][0] == score for score in group["scores"]):
            return None
        return group


class EqualInCollectEnv(EqualEnv):
    """Drops the group in `collect_trajectories`, from a dictionary of its own."""

    async def collect_trajectories(self, item: str) -> tuple[Any, list[str]]:
        rollouts = await self.rollouts(item)
        scored = {name: [rollout[name] for rollout in rollouts] for name in ("tokens", "masks", "scores")}
        if len(set(scored["scores"])) == 1:
            return None, []
        return scored, []


class EqualInHelperEnv(EqualEnv):
    """Calls a method of another name from `score`."""

    _score_by_rules = EqualEnv.score

    async def score(self, rollouts: list[dict[str, Any]]) -> ScoredDataGroup | None:
        return await self._score_by_rules(rollouts)


class EqualAfterwardsEnv(EqualEnv):
    """Drops the group after it was collected."""

    async def collect_trajectories(self, item: str) -> Any:
        rollouts = await self.rollouts(item)
        return {name: [rollout[name] for rollout in rollouts] for name in ("tokens", "masks", "scores")}, []

    async def postprocess_histories(self, trajectories: Any) -> Any:
        return None if len(set(trajectories["scores"])) == 1 else trajectories


class NoGroupEnv(EqualEnv):
    """Gives no group, for a reason of its own."""

    items = 1000

    async def rollouts(self, item: str) -> list[dict[str, Any]]:
        return []

    async def score(self, rollouts: list[dict[str, Any]]) -> ScoredDataGroup | None:
        return None


class AlwaysEqualEnv(EqualEnv):
    items = 1000

    async def rollouts(self, item: str) -> list[dict[str, Any]]:
        return [{"tokens": [5, 6], "masks": [-100, 6], "scores": 0.0}] * 2


@pytest.fixture(scope="module")
def policy() -> Generator[FakePlugin]:
    with fake_plugin() as server:
        yield server


def flags(url: str) -> list[str]:
    own = ["--env.tokenizer_name", MODEL, "--env.use_wandb", "False", "--env.distill_topk", "4"]
    return [*own, "--openai.base_url", f"{url}/v1", "--openai.model_name", MODEL, "--openai.api_key", "x"]


def process(
    env: type[BaseEnv], url: str, out: Path, monkeypatch: pytest.MonkeyPatch, more: Sequence[str] = ()
) -> list[dict[str, Any]]:
    argv = ["env", "process", "--env.data_path_to_save_groups", str(out), *flags(url), *more]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        env.cli()
    assert ended.value.code == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def outcomes(group: dict[str, Any]) -> list[list[str]]:
    return [[turn["outcome"] for turn in one["opd"]["turns"]] for one in group["overrides"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (MathsWithHindsight, [["scored"], ["scored"]]),
        (GameWithHindsight, [["scored", "no_next_state"], ["scored", "no_next_state"]]),
        (ToolsWithHindsight, [["scored"], ["scored"]]),
    ],
)
def test_groups_are_valid_and_their_turns_scored(
    env: type[BaseEnv], expected: list[list[str]], policy: FakePlugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "groups.jsonl"
    groups = process(env, policy.base_url, out, monkeypatch)
    assert [outcomes(group) for group in groups] == [expected] * 2
    assert validate([str(out)]) == 0
    has_own_logprobs = env is ToolsWithHindsight
    assert ["off_policy" in group["group_overrides"] for group in groups] == [not has_own_logprobs] * 2
    if env is MathsWithHindsight:
        assert {one["feedback"] for group in groups for one in group["overrides"]} == {"Wrong: the answer is 42."}
        assert {one["opd"]["turns"][0]["evidence"][0] for group in groups for one in group["overrides"]} == {"verdict"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "expected"),
    [(MathsWithHindsight, ["scored"]), (GameWithHindsight, ["not_judged", "no_next_state"])],
)
def test_failed_rollouts_are_judged_as_a_whole(
    env: type[BaseEnv], expected: list[str], policy: FakePlugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scores of one are -1, those of the other above 0."""
    out, more = tmp_path / "groups.jsonl", ("--env.judge.scope", "trajectory", "--env.judge.when", "failed")
    groups = process(env, policy.base_url, out, monkeypatch, more)
    assert [outcomes(group) for group in groups] == [[expected] * 2] * 2
    judged = ["trajectory" in one["opd"] for group in groups for one in group["overrides"]]
    assert judged == [expected == ["scored"]] * 4
    assert validate([str(out)]) == 0


def test_off_the_environment_is_as_it_was(policy: FakePlugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ("--env.opd_enabled", "False")
    groups = process(GameWithHindsight, policy.base_url, tmp_path / "groups.jsonl", monkeypatch, more)
    assert {group["distill_logprobs"] for group in groups} == {None}
    assert "inference_logprobs" not in groups[0]


@pytest.mark.slow
def test_what_does_not_match_is_counted_named_and_kept(
    policy: FakePlugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out, more = tmp_path / "groups.jsonl", ("--env.renderer.name", "qwen3", "--env.total_steps", "4")
    groups = process(GameWithHindsight, policy.base_url, out, monkeypatch, more)
    assert len(groups) == 4
    assert not any("opd" in one for group in groups for one in group["overrides"])
    assert validate([str(out)]) == 0
    said = [record.getMessage() for record in caplog.records if "unmatched: " in record.getMessage()]
    assert len(said) == 5
    assert r"'<think>\n\n</think>\n\n' is recorded. Set env.renderer.options to {enable_thinking: false}" in said[0]
    assert "hindsight: groups 4, unmatched_sequences 8" in caplog.text
    mended = (*more, "--env.renderer.options", "{enable_thinking: false}")
    groups = process(GameWithHindsight, policy.base_url, tmp_path / "mended.jsonl", monkeypatch, mended)
    assert outcomes(groups[0])[0] == ["scored", "no_next_state"]


def test_without_messages_they_are_read_from_the_tokens(
    policy: FakePlugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "groups.jsonl"
    groups = process(BareWithHindsight, policy.base_url, out, monkeypatch)
    assert [outcomes(group) for group in groups] == [[["scored", "scored"], ["scored", "no_next_state"]]] * 2
    for group, request in zip(groups, reversed(FIRST), strict=True):
        assert [one["role"] for one in group["messages"][0]] == ["user", "assistant"] * 2
        assert [one["content"] for one in group["messages"][0]][::2] == [request, SECOND]
        assert {one["feedback"] for one in group["overrides"] if "feedback" in one} == {f"{request} Not done."}
    assert validate([str(out)]) == 0


def test_without_messages_or_a_template_it_says_how_to_get_them(
    policy: FakePlugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    groups = process(UnreadableWithHindsight, policy.base_url, tmp_path / "groups.jsonl", monkeypatch)
    assert [group["tokens"] for group in groups] == [[[5, 6, 7, 8]] * 2] * 2
    assert "the 2 tokens before it, \"&'\", open no assistant's message" in caplog.text
    assert "let the environment return each rollout's conversation as 'messages'" in caplog.text
    assert "hindsight: groups 2, unmatched_sequences 4" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("env", [EqualEnv, EqualInCollectEnv, EqualInHelperEnv, EqualAfterwardsEnv])
def test_a_group_that_the_environment_drops_for_its_equal_scores_is_distilled(
    env: type[BaseEnv], policy: FakePlugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opd(Hindsight, env):  # type: ignore[misc, valid-type]
        def verdicts(self, group: Mapping[str, Any]) -> list[str | None]:
            return ["Wrong: the answer is 42."] * len(group["scores"])

    more = ("--env.ensure_scores_are_not_same", "False")
    groups = process(Opd, policy.base_url, tmp_path / "groups.jsonl", monkeypatch, more)
    assert [group["scores"] for group in groups] == [[-1.0, -1.0]] * 2
    assert [outcomes(group) for group in groups] == [[["scored"], ["scored"]]] * 2


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (
            AlwaysEqualEnv,
            "100 groups were dropped because all their scores are equal.*set env.ensure_scores_are_not_same",
        ),
        (NoGroupEnv, "the environment's own log may say why collect_trajectories returns none"),
    ],
)
def test_a_process_without_groups_ends_with_the_reason(
    env: type[EqualEnv], reason: str, policy: FakePlugin, caplog: pytest.LogCaptureFixture
) -> None:
    made = environment(env, policy.base_url)
    with pytest.raises(NoGroupsError, match=f"process ends: the last 100 items have no group.*{reason}"):
        asyncio.run(made.process_manager())
    assert 1000 - made.items == 101
    assert caplog.text.count("the last 20 items have no group that Atropos keeps") == 1


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (EqualEnv, "the last 3 items have no group that Atropos keeps; 3 groups were dropped"),
        (MathsEnv, "the last 2 items"),
    ],
)
def test_a_process_that_wrote_nothing_has_not_succeeded(
    env: type[BaseEnv], reason: str, policy: FakePlugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`MathsEnv` returns its groups of equal scores, which Atropos drops."""
    out = tmp_path / "groups.jsonl"
    more = ("--env.ensure_scores_are_not_same", "True")
    monkeypatch.setattr(
        sys, "argv", ["env", "process", "--env.data_path_to_save_groups", str(out), *flags(policy.base_url), *more]
    )
    with pytest.raises(SystemExit) as ended:
        type("Opd", (Hindsight, env), {}).cli()
    assert f"error: process wrote no group: {reason}" in str(ended.value.code)


def environment(env: type[BaseEnv], url: str, **server: Any) -> Any:
    """The environment behind the mixin, as a program creates it."""
    config = BaseEnvConfig(group_size=2, tokenizer_name=MODEL, use_wandb=False)
    server = {"server_type": "vllm", "base_url": f"{url}/v1", "model_name": MODEL, "api_key": "x", **server}
    made: Any = type("Opd", (Hindsight, env), {})(config, [APIServerConfig(**server)])
    made.n_groups_to_process, made.group_size_to_process = 2, 2
    return made


def test_a_served_environment_warns_that_its_scores_are_equal(
    policy: FakePlugin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def manage(env: Any) -> None:
        for index in range(25):
            env.running_items[index] = {"item": "one"}
            await env.handle_env(index)

    monkeypatch.setattr(BaseEnv, "env_manager", manage)
    made = environment(AlwaysEqualEnv, policy.base_url)
    asyncio.run(made.env_manager())
    assert caplog.text.count("the last 20 items have no group that Atropos keeps; 20 groups were dropped") == 1
    assert made.opd_counts == {"equal_scores": 25}


@pytest.mark.parametrize("name", ["runs/no/policy", "../policy", "/no/policy", "BROKEN"])
def test_a_name_that_is_no_tokenizer_is_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "No"}}')
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    name = name.replace("BROKEN", str(tmp_path))
    for setting in ("--env.tokenizer_name", "--openai.tokenizer_name"):
        monkeypatch.setattr(sys, "argv", ["env", "process", *flags("http://127.0.0.1:9"), setting, name])
        with pytest.raises(SystemExit) as ended:
            GameWithHindsight.cli()
        assert str(ended.value.code).startswith(f"error: the tokenizer {name!r} can't be loaded (")
        assert "\n" not in str(ended.value.code)


def test_a_served_models_name_need_be_no_tokenizers(policy: FakePlugin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer is the environment's, and a name that is not served is refused with those that are."""
    made = environment(AlwaysEqualEnv, policy.base_url, model_name="runs/no/policy")
    with pytest.raises(ServerMismatchError, match=r"openai\.model_name is 'runs/no/policy': name what is served"):
        asyncio.run(made.process_manager())
    made = environment(EqualEnv, policy.base_url, model_name="default")

    async def manage(env: Any) -> None: ...

    monkeypatch.setattr(BaseEnv, "env_manager", manage)
    asyncio.run(made.env_manager())
    assert made.server.servers[0].config.model_name == MODEL


def game(url: str) -> GameWithHindsight:
    config = BaseEnvConfig(group_size=2, tokenizer_name=MODEL, ensure_scores_are_not_same=False)
    server = APIServerConfig(server_type="vllm", base_url=f"{url}/v1", model_name=MODEL, api_key="x")
    env = GameWithHindsight(config, [server])
    env.config.server_retry_s = 0.1  # type: ignore[attr-defined]
    return env


def test_a_served_group_is_distilled_before_it_is_sent(policy: FakePlugin, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []

    async def manage(env: GameWithHindsight) -> None:
        env.running_items["1"] = {"item": await env.get_next_item()}  # type: ignore[index]
        await env.handle_env("1")

    async def send(env: BaseEnv, group: dict[str, Any]) -> None:
        sent.append(group)

    monkeypatch.setattr(BaseEnv, "env_manager", manage)
    monkeypatch.setattr(BaseEnv, "_send_scored_data_to_api", send)
    env = game(policy.base_url)
    asyncio.run(env.env_manager())
    assert env.opd_counts == {"groups": 1, "turns_scored": 2, "turns_no_next_state": 2}
    assert [outcomes(group) for group in sent] == [[["scored", "no_next_state"]] * 2]


def test_a_dead_policy_ends_a_run_before_its_first_group() -> None:
    env = game("http://127.0.0.1:9")
    with pytest.raises(ServerUnreachableError, match=r"127\.0\.0\.1:9"):
        asyncio.run(env.process_manager())
    assert env.asked == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--env.server_retry_s", "0.1"), "error: http://127.0.0.1:9/v1/opd/info gave no usable answer"),
        (
            ("--env.renderer.options", "{enable_thinking:false}"),
            "  - env.renderer.options: Value error, 'enable_thinki",
        ),
    ],
)
def test_errors_of_settings_and_servers_are_text(
    more: Sequence[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ("--env.data_path_to_save_groups", str(tmp_path / "groups.jsonl"))
    monkeypatch.setattr(sys, "argv", ["env", "process", *out, *flags("http://127.0.0.1:9"), *more])
    with pytest.raises(SystemExit) as ended:
        GameWithHindsight.cli()
    assert said in str(ended.value.code)


def test_an_evaluation_needs_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["env", "evaluate", *flags("http://127.0.0.1:9")])
    with pytest.raises(SystemExit) as ended:
        GameWithHindsight.cli()
    assert ended.value.code == 0


def test_images_are_refused_by_name(
    policy: FakePlugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class SeeingEnv(UnreadableEnv):
        async def collect_trajectories(self, item: str) -> tuple[ScoredDataGroup, list[str]]:
            group, backlog = await super().collect_trajectories(item)
            group["images"] = ["a picture"] * 2  # type: ignore[typeddict-item]
            return group, backlog

    process(type("SeeingOpd", (Hindsight, SeeingEnv), {}), policy.base_url, tmp_path / "groups.jsonl", monkeypatch)
    assert "images: the policy saw images, which the teacher would not see" in caplog.text
    assert "hindsight: failed_groups 2, groups 2" in caplog.text


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        ([0.5, "Wrong."], "verdicts returned float, expected a text or None"),
        (None, "verdicts returned 0 entries for a group of 2"),
        (["A lone surrogate: \ud800", None], "hindsight: groups 1, turns_no_next_state 1, turns_scored 1"),
    ],
)
def test_verdicts_are_texts(
    verdicts: Any,
    said: str,
    policy: FakePlugin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class VerdictEnv(Hindsight, MathsEnv):
        def verdicts(self, group: Mapping[str, Any]) -> Any:
            return verdicts

    process(VerdictEnv, policy.base_url, tmp_path / "groups.jsonl", monkeypatch, ("--env.total_steps", "1"))
    assert said in caplog.text


def test_a_section_that_the_environment_has_is_renamed() -> None:
    class Own(BaseEnvConfig):
        renderer: int = 3
        judge: str = "mine"

    class OwnEnv(MathsEnv):
        env_config_cls = Own  # type: ignore[assignment]

    class OwnOpd(Hindsight, OwnEnv):
        pass

    given: dict[str, Any] = {"judge": "theirs", "opd_judge": {"model_name": "ours"}, "distill_topk": 4}
    config: Any = OwnOpd.env_config_cls(**given, opd_renderer="{name: qwen3}")
    assert (config.judge, config.renderer) == ("theirs", 3)
    own = hindsight_settings(config)
    assert (own.judge.model_name, own.renderer.name, own.distill_topk) == ("ours", "qwen3", 4)


def test_flags_of_a_section_go_over_its_file(tmp_path: Path) -> None:
    file = tmp_path / "env.yaml"
    file.write_text("env: {judge: {temperature: 0.2, max_tokens: 64}, group_size: 2}\n")
    model = MathsWithHindsight.env_config_cls
    argv = ["process", "--config", str(file), "--env.judge.temperature", "0.5", "--env.group_size=4"]
    words = _with_sections([*argv, "--env.judge.api_key=123"], model)  # type: ignore[arg-type]
    assert words[:4] == ["process", "--config", str(file), "--env.group_size=4"]
    assert (words[4], json.loads(words[5])) == (
        "--env.judge",
        {"temperature": 0.5, "max_tokens": 64, "api_key": "123"},
    )
    with pytest.raises(ConfigError, match=r"env\.judge\.temprature is unknown; did you mean 'env\.judge\.temperature'"):
        _with_sections(["--env.judge.temprature", "0.5"], model)  # type: ignore[arg-type]


def test_old_names_are_answered() -> None:
    with pytest.raises(ValueError, match=r"judge_base_url is now env\.judge\.base_url"):
        MathsWithHindsight.env_config_cls(judge_base_url="http://127.0.0.1:1/v1")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"--env\.judge_base_url is now --env\.judge\.base_url"):
        _with_sections(["--env.judge_base_url", "x"], MathsWithHindsight.env_config_cls)  # type: ignore[arg-type]


def test_a_plain_configuration_gets_the_settings_of_the_mixin() -> None:
    config, _ = MathsWithHindsight.config_init()
    assert (config.group_size, config.distill_topk) == (2, 50)  # type: ignore[attr-defined]
    assert type(config).model_fields.keys() > BaseEnvConfig.model_fields.keys()
    with pytest.raises(ValueError, match="only the package's own worlds"):
        type(config).model_validate({"hint": {"source": "sibling"}})


@pytest.fixture(autouse=True)
def _logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
