"""Conversations of several user turns over stateful APIs: files in BFCL's format, and one episode of such a task.

    row, right calls, class files, documents --read--> ConversationCase
    ConversationCase --begin--> PlayedConversation: call, next message of the user, verdict

The APIs are Python classes that others wrote. They run only in the sandbox (api_process.py), in a new process for each
call: it rebuilds the state from the calls before, so that a call that kills its process or never ends has no effect.
"""

import ast
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

from agentic_opd.core.errors import ConfigError, DatasetError, SandboxError
from agentic_opd.core.files import check_regular
from agentic_opd.core.syntax import parse_expression, parse_module
from agentic_opd.core.text import read_json, text_lines
from agentic_opd.core.types import Message
from agentic_opd.sandboxes.factory import sandbox_factory
from agentic_opd.sandboxes.protocol import CommandResult, Mount, Sandbox
from agentic_opd.worlds.config import WorldConfig
from agentic_opd.worlds.custom import Checks, ToolError
from agentic_opd_environments.calls import Function

_MOUNTED = "/run/agentic-opd-apis"
_BOOT = "python -I -S -c 'import sys; exec(sys.stdin.buffer.readline())'"
_UNCHANGED = "Nothing was changed."


@dataclass(frozen=True, slots=True)
class PythonCall:
    name: str
    positional: Sequence[Any] = ()
    named: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @staticmethod
    def parse(text: str) -> "PythonCall":
        """Read a right call, written as Python with literal arguments.

        Raises:
            ValueError: It is something else.
        """
        try:
            node = parse_expression(text.strip())
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                raise ValueError("expected a call of a function by its name")
            named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
            if len(named) < len(node.keywords):
                raise ValueError("expected arguments without **")
            call = PythonCall(node.func.id, [ast.literal_eval(argument) for argument in node.args], named)
            json.dumps(call.job, allow_nan=False)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            raise ValueError(f"{text!r} is no call with literal arguments: {error}") from error
        return call

    @property
    def job(self) -> list[Any]:
        """The call as api_process.py reads it."""
        return [self.name, [*self.positional], dict(self.named)]


@dataclass(frozen=True, slots=True)
class Api:
    name: str
    """Name of the class."""
    module: str
    state: Mapping[str, Any]
    """Initial state, in the class's own format."""


@dataclass(frozen=True, slots=True)
class ApiFiles:
    """The class files and documents of APIs.

    `NAME.json` documents the functions of the classes in `NAME.py`, one function a line.
    """

    apis: Path
    documents: Path

    @property
    def packages(self) -> Path:
        """The folder from which the class files are imported: the first one around them that is not a package."""
        return next(folder for folder in (self.apis, *self.apis.parents) if not (folder / "__init__.py").exists())

    def modules(self) -> dict[str, list[str]]:
        """Return the names of the modules that define each class; none of them is imported.

        Raises:
            DatasetError: The folder has no class file, or one of them is not Python.
        """
        modules: dict[str, list[str]] = {}
        for path in sorted(self.apis.glob("*.py")):
            try:
                check_regular(path)
                tree = parse_module(path.read_bytes())
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise DatasetError(f"class file {str(path)!r} can't be read: {error}") from error
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    module = ".".join(path.relative_to(self.packages).with_suffix("").parts)
                    modules.setdefault(node.name, []).append(module)
        if not modules:
            raise DatasetError(f"apis: {str(self.apis)!r} has no Python file with a class")
        return modules

    def functions(self, module: str) -> list[Function]:
        """Return the documents of a module's functions.

        Raises:
            DatasetError: There are none, or they are not in BFCL's format.
        """
        path = self.documents / f"{module.rpartition('.')[2]}.json"
        try:
            check_regular(path)
            rows = [read_json(line) for line in text_lines(path.read_text(encoding="utf-8-sig")) if line.strip()]
            return [
                {**row, "parameters": {**row["parameters"], "properties": {**row["parameters"]["properties"]}}}
                for row in rows
                if row["name"]
            ]
        except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
            raise DatasetError(f"documents {str(path)!r} can't be read: {error!r}") from error


@dataclass(frozen=True, slots=True)
class ConversationCase:
    functions: Mapping[str, Function]
    """Name -> BFCL's schema, of all functions, those that are held back too."""
    apis: Sequence[Api]
    files: ApiFiles
    long_context: bool
    messages: Sequence[str]
    """The user's messages; empty where the user only brings functions."""
    held_back: Mapping[int, Sequence[str]]
    """User turn -> names of the functions that it brings."""
    right_calls: Sequence[Sequence[PythonCall]]
    """Of each user turn; a turn without any is not judged."""

    @property
    def first_functions(self) -> list[Function]:
        """The functions that are there from the start."""
        late = {name for names in self.held_back.values() for name in names}
        return [function for name, function in self.functions.items() if name not in late]

    @property
    def num_judged(self) -> int:
        return sum(map(bool, self.right_calls))


class ConversationReader:
    """Reads conversations, and each class file and document once."""

    def __init__(self, files: ApiFiles) -> None:
        self._files = files
        self._modules = files.modules()
        self._functions = cache(files.functions)

    def read(self, row: Mapping[str, Any], right_calls: Any) -> ConversationCase:
        """Return the case of a row.

        Raises:
            ValueError, TypeError, KeyError: A field is missing or wrong; or an API, a function or a turn is unknown.
            DatasetError: A class file or a document can't be read.
        """
        apis = [self._api(name, row["initial_config"]) for name in row["involved_classes"]]
        functions = {str(function["name"]): function for api in apis for function in self._functions(api.module)}
        messages = [_user_text(turn, messages) for turn, messages in enumerate(row["question"])]
        if not isinstance(right_calls, list) or len(cast(list[Any], right_calls)) != len(messages):
            number = len(cast(list[Any], right_calls)) if isinstance(right_calls, list) else "no list of"
            raise ValueError(f"{len(messages)} turns of the user, and right calls of {number} turns")
        calls = [[_right_call(text, functions) for text in texts] for texts in cast(list[Any], right_calls)]
        if not any(calls):
            raise ValueError("there is no right call in any turn, so nothing can be judged")
        if not messages[0]:
            raise ValueError("turn 0 of the user has no message")
        held_back = {int(turn): [*names] for turn, names in row.get("missed_function", {}).items()}
        for turn, names in held_back.items():
            if not 0 < turn < len(messages):
                raise ValueError(f"missed_function: there is no later turn {turn} of the user")
            if unknown := [name for name in names if name not in functions]:
                raise ValueError(f"missed_function: {unknown[0]!r} is not a function of its APIs")
        for turn, text in enumerate(messages):
            if not text and turn not in held_back:
                raise ValueError(f"turn {turn} of the user has no message")
        category = str(row["id"]).rpartition("_")[0]
        is_long = "long_context" in category or "composite" in category
        return ConversationCase(functions, apis, self._files, is_long, messages, held_back, calls)

    def _api(self, name: str, states: Mapping[str, Any]) -> Api:
        modules = self._modules.get(name, [])
        if len(modules) != 1:
            where = f"is defined in {' and '.join(modules)}" if modules else "is defined nowhere"
            raise ValueError(f"class {name!r} {where} in {str(self._files.apis)!r}, expected one file")
        return Api(name, modules[0], {**states.get(name, {})})


def _right_call(text: Any, functions: Mapping[str, Function]) -> PythonCall:
    if not isinstance(text, str):
        raise TypeError(f"right call {text!r}, expected a text")
    call = PythonCall.parse(text)
    if call.name not in functions:
        raise ValueError(f"right call {text!r}: {call.name} is not a function of its APIs")
    return call


def _user_text(turn: int, messages: Sequence[Mapping[str, Any]]) -> str:
    if not messages:
        return ""
    if len(messages) != 1 or messages[0]["role"] != "user" or not isinstance(messages[0]["content"], str):
        raise ValueError(f"turn {turn} of the user has {messages!r:.200}, expected one message of role user")
    return messages[0]["content"]


@dataclass(slots=True)
class CallRecord:
    call: PythonCall
    has_effect: bool = True
    """Whether it is part of the state; False if its process was killed, or the call was not waited for."""


@dataclass(slots=True)
class PlayedConversation:
    """State of one episode: a sandbox, and the calls of each turn of the user."""

    case: ConversationCase
    max_steps: int
    timeout_s: float
    """Time limit of a process."""
    sandbox: Sandbox
    _scope: AbstractAsyncContextManager[Sandbox]
    turns: list[list[CallRecord]] = field(default_factory=lambda: [list[CallRecord]()])
    num_finished: int = 0
    """Number of user turns that the agent ended with a turn without a call."""
    num_steps: int = 0
    """Number of turns with calls before this user turn: in the finished ones, and in the examples."""
    is_stopped: bool = False
    """Whether a user turn took more than `max_steps` steps."""

    @staticmethod
    async def begin(
        case: ConversationCase, max_steps: int, config: WorldConfig, num_example_steps: int
    ) -> "PlayedConversation":
        """Start a sandbox that sees the class files.

        Raises:
            SandboxError: No sandbox could be started.
        """
        scope = sandbox_factory(config.sandbox, [Mount(case.files.packages.resolve(), _MOUNTED)])()
        sandbox = await scope.__aenter__()
        return PlayedConversation(case, max_steps, config.tool_timeout_s, sandbox, scope, num_steps=num_example_steps)

    async def close(self) -> None:
        await self._scope.__aexit__(None, None, None)

    @property
    def added_functions(self) -> list[str]:
        """Names of the functions that the user has brought so far."""
        turn = len(self.turns) - 1
        return [name for first_turn, names in self.case.held_back.items() if first_turn <= turn for name in names]

    @property
    def judged(self) -> list[tuple[int, str, dict[str, Any]]]:
        """The calls that had an effect, each with its user turn."""
        records = [(turn, record) for turn, calls in enumerate(self.turns, 1) for record in calls if record.has_effect]
        return [(turn, record.call.name, dict(record.call.named)) for turn, record in records]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Run a call on the APIs.

        Raises:
            ToolError: The API raised, or the process was killed.
            DatasetError: The APIs can't be loaded.
            SandboxError: The sandbox itself failed.
        """
        record = CallRecord(PythonCall(name, (), arguments), has_effect=False)
        self.turns[-1].append(record)
        before = [record.call.job for turn in self.turns for record in turn if record.has_effect]
        result, stages = await self._run({"calls": before, "call": record.call.job})
        match stages[-1]["stage"]:
            case "called":
                record.has_effect = True
            case "replayed":
                raise ToolError(f"{name} {_ended(result, self.timeout_s)}. {_UNCHANGED}")
            case _:
                raise SandboxError(f"calls that ran before could not be repeated: {_ended(result, self.timeout_s)}")
        text, is_error = str(stages[-1]["result"]), stages[-1]["is_error"]
        if is_error:
            raise ToolError(text)
        return text

    def exceeds_steps(self, messages: Sequence[Message]) -> bool:
        """Return whether this user turn took more than `max_steps` turns with calls, which ends the conversation."""
        self.is_stopped = _num_steps(messages) - self.num_steps > self.max_steps
        return self.is_stopped

    def next_message(self, messages: Sequence[Message]) -> tuple[str, list[Function]] | None:
        """End a user turn; return the user's next message and the functions it brings, or None at the end."""
        self.num_steps = _num_steps(messages)
        self.num_finished += 1
        if self.num_finished == len(self.case.messages):
            return None
        self.turns.append([])
        brought = [self.case.functions[name] for name in self.case.held_back.get(self.num_finished, ())]
        return self.case.messages[self.num_finished], brought

    async def verdict(self) -> Checks:
        """Judge the finished user turns; the checks are the user turns with right calls, up to the first wrong one.

        The report for the judge is one line: of a turn without a call it reads the first line only.

        Raises:
            DatasetError: The APIs can't be loaded.
            SandboxError: The sandbox itself failed, or the verdict took too long.
        """
        total = self.case.num_judged
        passed, wrong = await self._judged_turns()
        if not wrong and self.num_finished < len(self.case.messages):
            passed = min(passed, total - 1)  # The turn that did not end may be one without right calls.
            cause = f"took more than {self.max_steps} steps" if self.is_stopped else "did not end with an answer"
            wrong = f"User turn {self.num_finished + 1} {cause}."
        text = f"{passed} of {total} user turns with calls are right, up to the first wrong one."
        text = f"{text} {wrong}" if wrong else f"All {total} user turns with calls are right."
        right = [[call.job for call in calls] for calls in self.case.right_calls]
        return Checks(passed, total, f"{text}\nRight: {right}", text)

    async def is_wrong(self) -> bool:
        """Return whether one of the finished user turns is wrong; raises as `verdict`."""
        return bool((await self._judged_turns())[1])

    async def _judged_turns(self) -> tuple[int, str]:
        """Return the number of finished user turns that are right, up to the first wrong one, and the problem in it.

        Raises:
            DatasetError, SandboxError: as `verdict`.
        """
        turns = [
            {
                "made": [record.call.job for record in turn if record.has_effect],
                "without_effect": sum(not record.has_effect for record in turn),
                "right": [call.job for call in right],
            }
            for turn, right in zip(self.turns[: self.num_finished], self.case.right_calls, strict=False)
        ]
        if not turns:
            return 0, ""
        result, stages = await self._run({"turns": turns})
        if stages[-1]["stage"] != "judged":
            raise SandboxError(f"the verdict on a conversation {_ended(result, self.timeout_s)}")
        passed, wrong_turn = int(stages[-1]["right"]), stages[-1]["wrong"]
        return passed, f"User turn {wrong_turn['turn'] + 1}: {wrong_turn['text']}" if wrong_turn else ""

    async def _run(self, job: dict[str, Any]) -> tuple[CommandResult, list[dict[str, Any]]]:
        """Run api_process.py; return the stages that it reached, of which `loaded` is the first.

        Raises:
            DatasetError: The APIs can't be loaded.
        """
        files, case = self.case.files, self.case
        apis = [
            {"name": api.name, "module": api.module, "state": api.state, "long_context": case.long_context}
            for api in case.apis
        ]
        line = json.dumps({"packages": _MOUNTED, "apis": apis, **job})
        result = await self.sandbox.run(_BOOT, self.timeout_s, stdin=f"exec({_source()!r})\n{line}\n".encode())
        stages = [cast(dict[str, Any], read_json(text)) for text in text_lines(result.text) if text.startswith("{")]
        names = ", ".join(api.name for api in case.apis)
        if not stages:
            why = f"{_ended(result, self.timeout_s)}: {result.text.strip()[-300:]!r}"
            raise DatasetError(f"loading {names} of {str(files.apis)!r} {why}")
        if stages[0]["stage"] == "failed":
            raise DatasetError(f"{names} of {str(files.apis)!r} can't be loaded: {stages[0]['error']}")
        return result, stages


def _num_steps(messages: Sequence[Message]) -> int:
    return sum(message["role"] == "assistant" and bool(message.get("tool_calls")) for message in messages)


def _ended(result: CommandResult, timeout_s: float) -> str:
    """Return how a process ended before its result, as a predicate."""
    if result.timed_out:
        return f"took longer than {timeout_s:g} s"
    if result.memory_exceeded:
        return "used too much memory"
    if result.is_over_limit:
        return "exceeded a limit of the sandbox"
    return f"ended its process with exit code {result.exit_code}"


@cache
def _source() -> str:
    return resources.files("agentic_opd_environments").joinpath("api_process.py").read_text()


def check_folder(name: str, folder: str) -> Path:
    """Return the path of a setting that is a folder.

    Raises:
        ConfigError: It is not a folder.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"env.world.{name} is {folder!r}, which is not a folder")
    return path.resolve()
