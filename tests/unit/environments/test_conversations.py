"""Conversations over stateful APIs: files, verdicts, and episodes in the sandbox, with two small APIs."""

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import ConfigError, DatasetError
from agentic_opd.core.types import Message, StopReason, Task, ToolCall, ToolResult, Verification
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.evidence import hindsight_pairs
from agentic_opd.distill.leaks import leaks
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.config import RolloutConfig
from agentic_opd.rollout.conversation import Completion
from agentic_opd.rollout.loop import run_episode
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.worlds.config import WorldConfig
from agentic_opd.worlds.custom import HookedSession, HookedWorld
from agentic_opd_environments import api_process
from agentic_opd_environments.conversations import PythonCall
from agentic_opd_environments.functions import FunctionsWorld

KETTLE = """
import os, sys, time

print("A class file may print.")


class Cup:
    def __init__(self, owner):
        self.owner = owner
        self.tea = ""

    def __eq__(self, other):
        return isinstance(other, Cup) and (self.owner, self.tea) == (other.owner, other.tea)


class Kettle:
    def __init__(self):
        self._secret = 0

    def _load_scenario(self, scenario, long_context=False):
        self.litres = scenario.get("litres", 0.0)
        self.is_hot = False
        self.cups = {name: Cup(name) for name in scenario.get("cups", [])}
        self.shelf = [*scenario.get("shelf", ["green"])] + ["black"] * (50 if long_context else 0)

    def fill(self, litres):
        if self.litres + litres > 2:
            return {"error": "It overflows."}
        self.litres += litres
        return {"litres": self.litres}

    def heat(self):
        self.is_hot = True
        return {"is_hot": True}

    def pour(self, owner, tea="black"):
        if not self.is_hot:
            return {"error": "The water is cold."}
        self.cups[owner].tea = tea
        self.litres -= 0.25

    def look(self):
        print("It looks.")
        self._secret += 1
        return {"litres": self.litres, "teas": len(self.shelf)}

    def explode(self):
        os._exit(3)

    def whistle(self):
        time.sleep(600)

    def leave(self):
        sys.exit(4)
"""
NOTES = """
class Notes:
    def add(self, text: str, tags: list = None):
        self.notes = [*getattr(self, "notes", []), text.upper()]
        return len(self.notes)

    def read(self):
        return getattr(self, "notes", [])
"""


def document(name: str, **types: str) -> dict[str, Any]:
    properties = {parameter: {"type": kind, "description": ""} for parameter, kind in types.items()}
    parameters = {"type": "dict", "properties": properties, "required": [*types][:1]}
    return {"name": name, "description": f"Function {name}.", "parameters": parameters, "response": {"type": "dict"}}


DOCUMENTS = {
    "kettle": [
        document("fill", litres="float"),
        document("pour", owner="string", tea="string"),
        *map(document, ("heat", "look", "explode", "whistle", "leave")),
    ],
    "notes": [document("add", text="string", tags="array"), document("read")],
}
CUPS = {"Kettle": {"litres": 0.5, "cups": ["Ann", "Bo"]}}
RIGHT = [["fill(litres=1.0)", "look()"], ["heat()", "pour('Ann', tea='mint')"], ["add(text='done')"]]
ASKED = ["Fill in a litre and look.", "Give Ann a cup of mint tea.", "Note that it is done."]


def question(asked: Sequence[str] = ASKED, **fields: Any) -> dict[str, Any]:
    turns = [[{"role": "user", "content": text}] if text else [] for text in asked]
    row = {"id": "tea_0", "question": turns, "initial_config": CUPS, "involved_classes": ["Kettle", "Notes"]}
    return {**row, **fields}


def world_of(folder: Path, row: Mapping[str, Any], right: Any = RIGHT, **options: Any) -> FunctionsWorld:
    """The world of one conversation, whose files are written to a folder."""
    apis = folder / "tea/apis"
    apis.mkdir(parents=True, exist_ok=True)
    for package in (apis, apis.parent):
        (package / "__init__.py").touch()
    folder.chmod(0o755)  # The sandbox's user reads it.
    (apis / "kettle.py").write_text(KETTLE)
    (apis / "notes.py").write_text(NOTES)
    for name, documents in DOCUMENTS.items():
        (apis / f"{name}.json").write_text("".join(f"{json.dumps(one)}\n" for one in documents))
    (folder / "questions.json").write_text(json.dumps(row))
    (folder / "answers.json").write_text("" if right is None else json.dumps({"id": "tea_0", "ground_truth": right}))
    files = {"questions": str(folder / "questions.json"), "answers": str(folder / "answers.json")}
    return FunctionsWorld(**{**files, "held_out": 0.0, "apis": str(apis), **options})


# ------------------------------------------------------------------------------------------------------------ verdicts


@pytest.fixture
def apis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The two APIs as api_process.py reads them; their modules can be imported here."""
    (tmp_path / "kettle_for_test.py").write_text(KETTLE)
    (tmp_path / "notes_for_test.py").write_text(NOTES)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    for name in ("kettle_for_test", "notes_for_test"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    names = {"Kettle": "kettle_for_test", "Notes": "notes_for_test"}
    return [
        {"name": name, "module": module, "state": CUPS.get(name, {}), "long_context": False}
        for name, module in names.items()
    ]


def judged(apis: list[dict[str, Any]], *made: Sequence[str], right: Sequence[Sequence[str]] = RIGHT) -> dict[str, Any]:
    turns = [
        {
            "made": [PythonCall.parse(text).job for text in made_calls if text != "killed"],
            "without_effect": [*made_calls].count("killed"),
            "right": [PythonCall.parse(text).job for text in right_calls],
        }
        for made_calls, right_calls in zip(made, right, strict=False)
    ]
    return api_process.judge(apis, turns)


@pytest.mark.parametrize(
    ("made", "num_right"),
    [
        (RIGHT, 3),
        (RIGHT[:2], 2),
        ([["look()", "fill(litres=1.0)", "look()"], ["heat()", "pour(owner='Ann', tea='mint')"], ["add('done')"]], 3),
        # Results seen earlier count, and calls that change nothing do no harm.
        ([RIGHT[0], RIGHT[1], ["read()", "add(text='done')", "fill()", "no_such()", "killed"]], 3),
        ([["fill(litres=0.5)", "fill(litres=0.5)"]], 0),
    ],
)
def test_right_turns_are_counted(apis: list[dict[str, Any]], made: Sequence[Sequence[str]], num_right: int) -> None:
    verdict = judged(apis, *made)
    assert verdict["right"] == num_right
    assert (verdict["wrong"] is None) == (num_right == len(made))


@pytest.mark.parametrize(
    ("made", "turn", "text"),
    [
        ([[]], 0, "No function was called."),
        (
            [["fill(litres=0.5)", "look()"]],
            0,
            "The state of Kettle is wrong: litres is 1.0, which is not as requested. The call fill(litres=0.5) in user "
            "turn 1 was the last one that changed it.",
        ),
        (
            [RIGHT[0], ["pour('Ann', tea='mint')"]],
            1,
            "The state of Kettle is wrong: litres is 1.5, which is not as requested. The call fill(litres=1.0) in user "
            "turn 1 was the last one that changed it. is_hot is false, which is not as requested. No call changed it. "
            'cups.Ann.tea is "", which is not as requested. No call changed it.',
        ),
        (
            [["fill(litres=1.0)"]],
            0,
            "1 of the 2 results that the request needs were not among those seen so far (from Kettle). Calls of this "
            "user turn: fill(litres=1.0).",
        ),
        (
            [*RIGHT[:2], ["add(text='Done')", "add(text='twice')"]],
            2,
            'The state of Notes is wrong: notes has the entry "TWICE", which does not belong there. The call '
            'add(text="twice") in user turn 3 was the last one that changed it.',
        ),
        ([*RIGHT[:2], ["killed"]], 2, "The state of Notes is wrong: notes is missing. No call changed it."),
    ],
)
def test_the_first_wrong_turn_is_told_without_what_is_right(
    apis: list[dict[str, Any]], made: Sequence[Sequence[str]], turn: int, text: str
) -> None:
    verdict = judged(apis, *made)
    assert verdict == {"right": turn, "wrong": {"turn": turn, "text": text}}


def test_each_result_counts_once(apis: list[dict[str, Any]]) -> None:
    right: list[list[str]] = [["look()", "look()"]]
    assert judged(apis, ["look()", "look()"], right=right)["wrong"] is None
    assert judged(apis, ["look()"], right=right)["wrong"]["text"].startswith("1 of the 2 results")


def test_a_change_of_an_earlier_turn_is_named_in_the_turn_that_it_spoils(apis: list[dict[str, Any]]) -> None:
    right: list[list[str]] = [["look()"], [], ["heat()"]]
    verdict = judged(apis, ["look()"], ["fill(litres=1.0)"], ["heat()"], right=right)
    assert verdict["right"] == 1, "the turn without right calls is not judged"
    assert verdict["wrong"]["turn"] == 2
    assert "The call fill(litres=1.0) in user turn 2 was the last one that changed it." in verdict["wrong"]["text"]


@pytest.mark.parametrize(
    ("made", "right", "sentences"),
    [
        ({"a": 1, "x y": [1]}, {"a": 1, "x y": [2]}, ['v["x y"][0] is 1, which is not as requested.']),
        ({"a": 1}, {"b": 1}, ['v has "a", which does not belong there.', "v lacks something."]),
        ([1, 2], [1, 2, 3], ["v lacks an entry."]),
        ([3, 1], [1], ["v has the entry 3, which does not belong there."]),
        (1, True, ["v is 1, which is not as requested."]),
        ({"a": [1]}, {"a": [1]}, []),
    ],
)
def test_differences_are_told_by_what_was_made(made: Any, right: Any, sentences: list[str]) -> None:
    assert api_process._differences("v", made, right) == sentences


@pytest.mark.parametrize(
    "text", ["fill(litres=x)", "fill", "a.fill()", "fill(**{})", "fill(", "fill(1) + 1", "fill({1, 2})", "fill(1e999)"]
)
def test_a_right_call_must_be_a_call_with_literal_arguments(text: str) -> None:
    with pytest.raises(ValueError, match="is no call with literal arguments"):
        PythonCall.parse(text)


# --------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("row", "right", "said"),
    [
        (question(), None, "question 'tea_0' has no line in the files of answers"),
        (question(), RIGHT[:2], "3 turns of the user, and right calls of 2 turns"),
        (question(ASKED[:2]), RIGHT, "2 turns of the user, and right calls of 3 turns"),
        (question(), "heat()", "3 turns of the user, and right calls of no list of turns"),
        (question(), [[], [], []], "nothing can be judged"),
        (question(), [["boil()"], [], []], r"right call 'boil\(\)': boil is not a function of its APIs"),
        (question(), [["heat(x)"], [], []], "is no call with literal arguments"),
        (question(), [[1], [], []], "right call 1, expected a text"),
        (question(involved_classes=["Teapot"]), RIGHT, "class 'Teapot' is defined nowhere"),
        (question([ASKED[0], "", ASKED[2]]), RIGHT, "turn 1 of the user has no message"),
        (question(missed_function={"0": ["heat"]}), RIGHT, "there is no later turn 0"),
        (question(missed_function={"1": ["boil"]}), RIGHT, "'boil' is not a function of its APIs"),
        (question(question=[[{"role": "system", "content": ""}]] * 3), RIGHT, "expected one message of role user"),
        ({"id": "tea_0", "involved_classes": ["Kettle"]}, RIGHT, "no field or type 'initial_config'"),
    ],
)
def test_wrong_conversations_are_named(tmp_path: Path, row: dict[str, Any], right: Any, said: str) -> None:
    with pytest.raises(DatasetError, match=said):
        world_of(tmp_path, row, right).tasks()


def test_wrong_folders_and_class_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.world\.apis must name their folder"):
        world_of(tmp_path, question(), apis=None).tasks()
    with pytest.raises(ConfigError, match="apis is '/nowhere', which is not a folder"):
        world_of(tmp_path, question(), apis="/nowhere")
    with pytest.raises(ConfigError, match="documents and held_out_classes belong to apis"):
        world_of(tmp_path, question(), apis=None, documents=str(tmp_path))
    with pytest.raises(DatasetError, match="no Python file with a class"):
        world_of(tmp_path, question(), apis=str(tmp_path)).tasks()
    with pytest.raises(DatasetError, match=r"documents '.*kettle.json' can't be read"):
        world_of(tmp_path, question(), documents=str(tmp_path)).tasks()
    world = world_of(tmp_path, question())
    (tmp_path / "tea/apis/second.py").write_text("class Kettle: pass")
    with pytest.raises(DatasetError, match=r"'Kettle' is defined in tea\.apis\.kettle and tea\.apis\.second"):
        world.tasks()
    (tmp_path / "tea/apis/second.py").write_text("class Kettle")
    with pytest.raises(DatasetError, match=r"class file '.*second.py' can't be read"):
        world.tasks()


def test_held_back_functions_are_not_in_the_prompt_and_right_calls_leak(tmp_path: Path) -> None:
    world = world_of(tmp_path, question(missed_function={"1": ["heat", "read"]}), max_steps=4)
    (task,) = world.tasks()
    names = [tool["function"]["name"] for tool in task.tools or ()]
    assert names == ["fill", "pour", "look", "explode", "whistle", "leave", "add"]
    assert task.limits == {"max_turns": 15}
    assert {*task.data.functions} == {*names, "heat", "read"}
    assert leaks('Pour a cup with the tea "mint" for "Ann".', task.hidden_tests or "", json.dumps(task.tools))


def test_conversations_with_a_held_out_class_are_held_out(tmp_path: Path) -> None:
    world = world_of(tmp_path, question(), held_out_classes=["Notes"])
    rows = [question(), question(ASKED[:1], id="tea_1", involved_classes=["Kettle"])]
    (tmp_path / "questions.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    answers = [{"id": "tea_0", "ground_truth": RIGHT}, {"id": "tea_1", "ground_truth": RIGHT[:1]}]
    (tmp_path / "answers.json").write_text("".join(f"{json.dumps(row)}\n" for row in answers))
    assert [task.task_id for task in world.tasks()] == ["functions/tea_1"]
    assert [task.task_id for task in world.eval_tasks()] == ["functions/tea_0"]
    with pytest.raises(DatasetError, match="no conversation has the class 'Teapot'"):
        world_of(tmp_path, question(), held_out_classes=["Teapot"]).tasks()
    with pytest.raises(DatasetError, match="leave no conversation to train on"):
        world_of(tmp_path, question(), held_out_classes=["Kettle"]).tasks()


# ------------------------------------------------------------------------------------------------------------ episodes


class Player:
    """An agent that plays given calls in a session, and keeps the messages."""

    def __init__(self, session: HookedSession, task: Task) -> None:
        self.session = session
        self.messages: list[Message] = [{"role": "user", "content": task.prompt}]

    async def call(self, name: str, **arguments: Any) -> ToolResult:
        self.messages.append({"role": "assistant", "content": "", "tool_calls": [{"name": name}]})
        return await self.session.run_tool(ToolCall("c", name, arguments, ""))

    async def answer(self) -> str | None:
        self.messages.append({"role": "assistant", "content": "Done."})
        reply = await self.session.user_reply(self.messages)
        self.messages += [] if reply is None else [{"role": "user", "content": reply}]
        return reply


def played(hooks: FunctionsWorld, play: Any) -> Verification:
    """Play the only task of a world in a real sandbox; return the verdict."""

    async def run() -> Verification:
        world = HookedWorld(hooks, WorldConfig())
        (task,), _ = await world.train_and_eval_tasks()
        async with world.session(task) as session:
            player = Player(session, task)
            await play(player)
            left = await session.collect(player.messages)
        assert world.close_failures == 0
        return await world.verify(task, left)

    return asyncio.run(run())


async def play_right(player: Player) -> None:
    assert (await player.call("fill", litres=1.0)).content == '{"litres": 1.5}'
    assert (await player.call("look")).content == '{"litres": 1.5, "teas": 1}'
    assert await player.answer() == ASKED[1]
    await player.call("heat")
    assert (await player.call("pour", owner="Ann", tea="mint")).content == "None"
    assert await player.answer() == ASKED[2]
    assert (await player.call("add", text="done")).content == "1"
    assert await player.answer() is None


@pytest.mark.sandbox
def test_a_conversation_keeps_its_state_over_the_users_turns(tmp_path: Path) -> None:
    verification = played(world_of(tmp_path, question()), play_right)
    assert (verification.passed, verification.total) == (3, 3)
    assert verification.judge_report == "All 3 user turns with calls are right."
    assert verification.made_by == frozenset(range(5)), "each call is judged"


@pytest.mark.sandbox
def test_a_spoiled_state_is_told_turns_later(tmp_path: Path) -> None:
    async def play(player: Player) -> None:
        await player.call("fill", litres=1.0)
        await player.answer()
        await player.call("fill", litres=0.25)
        await player.answer()
        await player.call("heat")
        await player.answer()

    right = [["fill(1.0)"], [], ["heat()"]]
    verification = played(world_of(tmp_path, question(), right), play)
    assert (verification.passed, verification.total) == (1, 2)
    assert verification.judge_report == (
        "1 of 2 user turns with calls are right, up to the first wrong one. "
        "User turn 3: The state of Kettle is wrong: litres is 1.75, which is not as requested. The call "
        "fill(litres=0.25) in user turn 2 was the last one that changed it."
    )
    assert "heat" in verification.report


@pytest.mark.sandbox
def test_calls_that_fail_have_no_effect_and_the_conversation_goes_on(tmp_path: Path) -> None:
    said: list[str] = []

    async def play(player: Player) -> None:
        for name, arguments in (
            ("fill", {"litres": "a lot"}),
            ("fill", {"liters": 1.0}),
            ("explode", {}),
            ("leave", {}),
            ("whistle", {}),
            ("boil", {}),
        ):
            player.session.state.timeout_s = 1 if name == "whistle" else 60
            result = await player.call(name, **arguments)
            assert result.is_error
            said.append(result.content)
        await play_right(player)

    verification = played(world_of(tmp_path, question()), play)
    mistyped = "Error: unsupported operand type(s) for +: 'float' and 'str'."
    assert said[0] == f"{mistyped} It must be fill(litres: number)."
    assert "unexpected keyword argument 'liters'" in said[1]
    assert said[2:5] == [
        "Error: explode ended its process with exit code 3. Nothing was changed.",
        "Error: leave ended its process with exit code 4. Nothing was changed.",
        "Error: whistle took longer than 1 s. Nothing was changed.",
    ]
    assert said[5].startswith('Error: the name must be one of "fill", "pour"')
    assert verification.all_passed


@pytest.mark.sandbox
def test_functions_come_with_a_later_turn_of_the_user(tmp_path: Path) -> None:
    async def play(player: Player) -> None:
        refused = await player.call("heat")
        assert refused.is_error
        assert "heat" not in refused.content
        await player.call("fill", litres=1.0)
        reply = await player.answer()
        assert reply is not None
        first, schema, last = reply.splitlines()
        assert (first, last) == ("From now on there are also these functions:", "Try it with them.")
        assert json.loads(schema)["function"]["name"] == "heat"
        assert (await player.call("heat")).content == '{"is_hot": true}'
        assert await player.answer() is None

    row = question([ASKED[0], ""], missed_function={"1": ["heat"]})
    verification = played(world_of(tmp_path, row, [["fill(1.0)"], ["heat()"]]), play)
    assert (verification.passed, verification.total) == (2, 2)


class Script:
    """A policy that writes its lines in order."""

    def __init__(self, tokenizer: Any, *lines: str) -> None:
        self.tokenizer, self.lines = tokenizer, [*lines]

    async def sample(self, prompt_ids: Sequence[int], max_tokens: int) -> Completion:
        ids = tuple(self.tokenizer.encode(f"{self.lines.pop(0)}<|im_end|>", add_special_tokens=False))
        return Completion(ids, (-0.5,) * len(ids))


def written_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.sandbox
def test_a_call_made_two_turns_earlier_is_judged_with_what_it_spoiled(tmp_path: Path, tokenizer: Any) -> None:
    """In a whole episode: several calls a turn, a function that comes late, and a last turn that is wrong."""
    row = question([*ASKED[:1], "Wait.", "", ASKED[2]], missed_function={"2": ["heat"]})
    world = HookedWorld(
        world_of(tmp_path, row, [["fill(1.0)", "look()"], [], ["heat()"], ["add('done')"]]), WorldConfig()
    )
    (task,), _ = asyncio.run(world.train_and_eval_tasks())
    lines = [
        written_call("fill", litres=1.0) + "\n" + written_call("look"),
        "Filled.",
        written_call("fill", litres=0.25),
        "I filled in more.",
        written_call("heat"),
        "It is hot.",
        written_call("add", text="done"),
        "Noted.",
    ]
    chat = ChatFormat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, world.tools)
    rollout = RolloutConfig(max_token_length=16384)
    episode = asyncio.run(run_episode(task, Script(tokenizer, *lines), world, chat, rollout))
    assert episode.stop_reason is StopReason.FINISHED
    asked = [message["content"] for message in episode.messages if message["role"] == "user"]
    assert [text.splitlines()[0] for text in asked] == [
        ASKED[0],
        "Wait.",
        "From now on there are also these functions:",
        ASKED[2],
    ]
    assert episode.verification is not None
    assert episode.verification.correctness == pytest.approx(1 / 3)
    assert not episode.verification.all_passed
    pairs = hindsight_pairs(episode.recording, DistillConfig())
    (told,) = [evidence.text for evidence in pairs[2].evidence if evidence.kind == "verdict"]
    assert "User turn 3: The state of Kettle is wrong: litres is 1.75" in told
    assert "The call fill(litres=0.25) in user turn 2 was the last one that changed it." in told
    (last,) = [evidence.text for evidence in pairs[-1].evidence if evidence.kind == "verdict"]
    assert last == told, "the turn without a call that ended the conversation reads why it is wrong"


@pytest.mark.sandbox
def test_a_user_turn_that_is_not_ended_is_wrong(tmp_path: Path) -> None:
    async def stop_early(player: Player) -> None:
        await player.call("fill", litres=1.0)
        await player.call("look")
        await player.answer()
        await player.call("heat")

    verification = played(world_of(tmp_path, question()), stop_early)
    assert (verification.passed, verification.total) == (1, 3)
    assert verification.judge_report.endswith(" User turn 2 did not end with an answer.")

    async def do_nothing(player: Player) -> None:
        del player

    verification = played(world_of(tmp_path, question()), do_nothing)
    assert (verification.passed, verification.total) == (0, 3)

    async def go_on(player: Player) -> None:
        ends = list[bool]()
        for _ in range(3):
            await player.call("look")
            ends.append(await player.session.is_over(player.messages))
        assert ends == [False, False, True]

    verification = played(world_of(tmp_path, question(), max_steps=2), go_on)
    assert verification.judge_report.endswith(" User turn 1 took more than 2 steps.")

    async def do_all_but_answer(player: Player) -> None:
        await player.call("heat")
        await player.answer()

    verification = played(world_of(tmp_path, question(ASKED[:2]), [["heat()"], []]), do_all_but_answer)
    assert (verification.passed, verification.total) == (0, 1), "the last user turn, which is not judged, did not end"


@pytest.mark.sandbox
def test_long_contexts_are_those_of_the_class(tmp_path: Path) -> None:
    async def play(player: Player) -> None:
        assert (await player.call("look")).content == '{"litres": 0.5, "teas": 51}'

    row = question(id="tea_long_context_0")
    hooks = world_of(tmp_path, row)
    answers = tmp_path / "answers.json"
    answers.write_text(answers.read_text().replace('"tea_0"', '"tea_long_context_0"'))
    assert played(hooks, play).passed == 0


@pytest.mark.sandbox
@pytest.mark.parametrize("text", ["raise OSError('no tea')", "import sys; sys.exit('no tea')", "import no_such_module"])
def test_a_class_file_that_cannot_be_loaded_is_named(tmp_path: Path, text: str) -> None:
    hooks = world_of(tmp_path, question())
    path = tmp_path / "tea/apis/kettle.py"
    path.write_text(f"{text}\n{path.read_text()}")

    async def play(player: Player) -> None:
        await player.call("look")

    with pytest.raises(DatasetError, match=r"Kettle, Notes of '.*tea/apis' can't be loaded: (OSError|SystemExit|Mod)"):
        played(hooks, play)
    path.write_text(f"import os\nos._exit(5)\n{path.read_text()}")
    with pytest.raises(DatasetError, match="ended its process with exit code 5"):
        played(hooks, play)
    if os.geteuid() == 0:  # Root's sandboxes run as another user.
        tmp_path.chmod(0o700)
        with pytest.raises(DatasetError, match=r"chmod -R o\+rX"):
            played(hooks, play)


def test_signatures_alone_can_be_in_the_prompt(tmp_path: Path) -> None:
    world = world_of(tmp_path, question(missed_function={"1": ["heat"]}), in_prompt="signatures", example=True)
    (task,) = world.tasks()
    assert task.prompt.startswith("fill(litres: number)\npour(owner: string, tea?: string)\nlook(")
    assert "Function" not in task.prompt
    assert task.prompt.endswith(f"\n\n{ASKED[0]}")
    assert task.examples[0]["content"] == "add(a: integer, b: integer)\n\nWhat is 2 plus 3?"


@pytest.mark.sandbox
def test_a_conversation_can_end_with_its_first_wrong_turn_and_has_the_same_score(tmp_path: Path) -> None:
    async def play(player: Player) -> None:
        await player.call("fill", litres=1.0)
        await player.call("look")
        assert await player.answer() == ASKED[1]
        await player.call("pour", owner="Ann", tea="mint")
        assert await player.answer() is None

    verification = played(world_of(tmp_path, question(), stop_when_wrong=True), play)
    assert (verification.passed, verification.total) == (1, 3)
    assert "User turn 2: The state of Kettle is wrong" in verification.judge_report


@pytest.mark.sandbox
def test_an_error_about_arguments_ends_with_the_signature(tmp_path: Path) -> None:
    async def play(player: Player) -> None:
        refused = await player.call("fill", volume=1.0)
        assert refused.is_error
        assert refused.content.startswith(
            "Error: Kettle.fill() got an unexpected keyword argument 'volume'. It must be"
        )
        assert refused.content.endswith("It must be fill(litres: number).")
        assert "must be" not in (await player.call("pour", owner="Nobody")).content

    assert played(world_of(tmp_path, question()), play).passed == 0
