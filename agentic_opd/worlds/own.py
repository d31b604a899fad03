"""A world of one's own in one class: tasks, tools, what they act on, and the verdict.

A person subclasses `OwnWorld`, whose methods are hooks; `HookedWorld` makes of it what the package needs of a world
(`core.types.World`). docs/worlds.md has a whole one.

Whatever else than `ToolError` a hook raises is the world's fault: a `WorldError` that names the hook. Its group is
counted as failed, and the run goes on.
"""

import asyncio
import inspect
import pickle
import re
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from agentic_opd.core.authors import Authors
from agentic_opd.core.errors import AlignmentError, ConfigError, OPDError, WorldError
from agentic_opd.core.text import cut_middle, well_formed
from agentic_opd.core.types import Message, Task, ToolCall, ToolResult, Verification, VerifyOutcome
from agentic_opd.sandboxes.factory import check_sandbox, sandbox_factory
from agentic_opd.sandboxes.protocol import Sandbox
from agentic_opd.sandboxes.workdir import get_files, put_files
from agentic_opd.worlds.coding.config import CodingConfig
from agentic_opd.worlds.split import split_tasks

__all__ = [
    "Checks",
    "HookedSession",
    "HookedWorld",
    "Left",
    "Message",
    "OwnWorld",
    "Task",
    "ToolError",
    "load_own_world",
    "tool",
]

HookT = TypeVar("HookT", bound=Callable[..., Any])


class ToolError(Exception):
    """Raised by a tool: the policy did something wrong, and reads this text after `Error: `."""


@dataclass(frozen=True, slots=True)
class Checks:
    """A verdict: how many of a task's checks passed, and what that looks like."""

    passed: int
    total: int
    report: str = ""
    """For whoever may know the task's secret. Empty: the counts."""
    judge_report: str = ""
    """For the judge, whose hints the policy learns from: nothing of the secret. Empty: the counts."""


@dataclass(frozen=True, slots=True)
class Left:
    """What an agent leaves behind."""

    state: Any
    files: Mapping[str, bytes]
    made_by: frozenset[int] | None = None
    """See `core.types.Verification.made_by`."""


def tool(hook: HookT) -> HookT:
    """Mark a method as a tool: `(self, state, ...) -> str`, perhaps async.

    Its parameters after the first two are what the policy gives; each has a type that pydantic can read from JSON. One
    that is called `sandbox` is given the episode's sandbox instead. The docstring's first part is what the policy is
    told of the tool, and its `Args:` what it is told of the parameters.
    """
    hook.is_tool = True  # type: ignore[attr-defined]
    return hook


class OwnWorld:
    """A world's hooks, to be subclassed; name it by `env.world: FILE.py:CLASS` or `package.module:CLASS`.

    A subclass needs `tasks`, `verify` and a tool. Any hook but the first two may be async. One that is not runs on a
    thread of its own, beside those of other episodes: what it shares with them is its own affair.
    """

    system_prompt: str = "Work on the task with your tools until it is done. Then answer without a tool call."

    def tasks(self) -> Iterable[Task]:
        """The tasks: an id, a prompt, perhaps files for the sandbox, and `hidden_tests`.

        These are any text that only `verify` may know, such as the right answer. Hints that give it away are dropped.
        """
        raise NotImplementedError

    def eval_tasks(self) -> Iterable[Task] | None:
        """The tasks to evaluate on. None: `env.eval_fraction` of `tasks`."""
        return None

    def start(self, task: Task) -> Any:
        """What the tools act on in one episode: any object, new for each."""
        return None

    def verify(self, task: Task, state: Any) -> Any:
        """Judge what `start`'s object has become, as `Checks`.

        With a parameter called `files` it is given those of the sandbox too (relative path -> bytes).
        """
        raise NotImplementedError

    def judged(self, state: Any) -> Any:
        """The part of the state that the verdict is about; it must be possible to pickle it.

        Each turn of which something is left in it, or in the sandbox's files, is judged with the verdict.
        """
        return state

    def user_reply(self, task: Task, state: Any, messages: Sequence[Message]) -> Any:
        """What the user says to a turn without a tool call, the last of `messages`. None: the episode is over."""
        return None


class HookedWorld:
    """A person's hooks as a `core.types.World`."""

    def __init__(self, hooks: OwnWorld, config: CodingConfig, system_prompt: str | None = None) -> None:
        """Read the tools; nothing is started yet.

        Args:
            hooks: The world.
            config: Of a tool's limits, of the sandbox, and of what is held out.
            system_prompt: Replaces that of the world.

        Raises:
            ConfigError: there is no tool, or one lacks types or descriptions.
        """
        self._hooks, self._config, self._name = hooks, config, type(hooks).__name__
        kind = type(hooks)
        names = dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base))
        marked = [name for name in names if getattr(getattr(kind, name), "is_tool", False)]
        self._tools = {
            name: _Tool.read(f"world {self._name}: tool {name}", name, getattr(hooks, name)) for name in marked
        }
        if not marked:
            raise ConfigError(f"world {self._name} has no tool: mark a method of it with @tool")
        self.tools: Sequence[dict[str, Any]] = [one.spec for one in self._tools.values()]
        self.system_prompt = system_prompt or hooks.system_prompt
        takes_sandbox = any(one.takes_sandbox for one in self._tools.values())
        self._new_sandbox = sandbox_factory(config) if takes_sandbox else None

    async def train_and_eval_tasks(self) -> tuple[list[Task], list[Task]]:
        """See `core.types.World`.

        Raises:
            WorldError: a hook failed, or gave something else than tasks with different ids.
        """
        tasks, held_out = await self._tasks_of("tasks"), await self._tasks_of("eval_tasks")
        if not tasks:
            raise WorldError(f"world {self._name}: tasks gave none")
        if held_out is not None:
            return tasks, held_out
        return split_tasks(tasks, self._config.eval_fraction, self._config.eval_seed)

    async def _tasks_of(self, name: str) -> list[Task] | None:
        def listed() -> list[Any] | None:
            given = getattr(self._hooks, name)()
            return None if given is None else [*given]

        tasks = await self._guarded(name, listed)
        if tasks is None:
            return None
        for task in tasks:
            if not isinstance(task, Task):
                raise WorldError(f"world {self._name}: {name} gave {type(task).__name__}, expected Task")
        task_id, count = max(Counter(task.task_id for task in tasks).items(), key=itemgetter(1), default=("", 0))
        if count > 1:
            raise WorldError(f"world {self._name}: {name} gave {count} tasks of the id {task_id!r}")
        return [_well_formed_task(task) for task in tasks]

    @asynccontextmanager
    async def session(self, task: Task) -> AsyncGenerator["HookedSession"]:
        """See `core.types.World`; there is a sandbox only where a tool asks for it."""
        state = await self._call("start", task)
        if self._new_sandbox is None:
            yield HookedSession(task, state, None, self._tools, self._call, self._config)
            return
        async with self._new_sandbox() as sandbox:
            await put_files(sandbox, task.files)
            yield HookedSession(task, state, sandbox, self._tools, self._call, self._config)

    async def verify(self, task: Task, left: Left | None) -> Verification:
        """See `core.types.World`.

        Raises:
            WorldError: the hook failed, or gave something else than `Checks`.
        """
        if left is None:
            left = Left(await self._call("start", task), {})
        takes_files = "files" in inspect.signature(self._hooks.verify).parameters
        checks = await self._call("verify", task, left.state, **({"files": left.files} if takes_files else {}))
        if not isinstance(checks, Checks):
            raise WorldError(f"world {self._name}: verify gave {type(checks).__name__}, expected Checks")
        if not {type(checks.passed), type(checks.total)} <= {int, bool}:
            raise WorldError(f"world {self._name}: verify gave {checks.passed!r} of {checks.total!r}, expected counts")
        passed, total = int(checks.passed), int(checks.total)  # True is a count of Python's, and none of JSON's.
        counts = f"{passed} of {total} checks passed."
        try:
            return Verification(
                VerifyOutcome.RAN,
                passed,
                total,
                well_formed(checks.report or counts),
                well_formed(checks.judge_report or counts),
                made_by=left.made_by,
            )
        except AlignmentError as error:
            raise WorldError(f"world {self._name}: verify gave wrong Checks: {error}") from error

    async def check(self) -> None:
        """See `core.types.World`."""
        if self._new_sandbox is not None:
            await check_sandbox(self._new_sandbox)

    async def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """What a hook gives.

        Raises:
            ToolError, OPDError: as the hook does.
            WorldError: it raised anything else.
        """
        return await self._guarded(name, getattr(self._hooks, name), *args, **kwargs)

    async def _guarded(self, name: str, hook: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            if inspect.iscoroutinefunction(hook):
                return await hook(*args, **kwargs)
            return await asyncio.to_thread(hook, *args, **kwargs)
        except (OPDError, ToolError):
            raise
        except Exception as error:
            raise WorldError(f"world {self._name}: {name} raised {type(error).__name__}: {error}") from error


def _well_formed_task(task: Task) -> Task:
    values = {one.name: getattr(task, one.name) for one in fields(Task)}
    texts = {name: well_formed(value) for name, value in values.items() if isinstance(value, str)}
    files = {well_formed(path): well_formed(text) for path, text in task.files.items()}
    changed = {name: value for name, value in {**texts, "files": files}.items() if value != values[name]}
    return replace(task, **changed) if changed else task


@dataclass
class HookedSession:
    """One episode in a person's world; see `core.types.Session`."""

    task: Task
    state: Any
    sandbox: Sandbox | None
    tools: Mapping[str, "_Tool"]
    call_hook: Callable[..., Awaitable[Any]]
    config: CodingConfig

    def __post_init__(self) -> None:
        self._authors = Authors(self.task.prompt)

    async def run_tool(self, call: ToolCall) -> ToolResult:
        """Run one call, and see whether what is judged is another after it."""
        await asyncio.to_thread(self._authors.given, *await self._judged())
        is_error = False
        try:
            text = await self._answer(call)
        except ToolError as error:
            text, is_error = f"Error: {error}", True
        text = cut_middle(well_formed(text), self.config.tool_output_max_chars)
        is_change = await asyncio.to_thread(self._authors.changed, *await self._judged())
        return ToolResult(text, is_error, is_change)

    async def _answer(self, call: ToolCall) -> str:
        if call.arguments is None:
            raise ToolError(f"{call.error}. The call was: {call.raw}")
        one = self.tools.get(call.name)
        if one is None:
            raise ToolError(f"unknown tool {call.name!r}. Tools: {', '.join(self.tools)}.")
        given = one.checked(call.arguments) | ({"sandbox": self.sandbox} if one.takes_sandbox else {})
        limit_s = self.config.tool_timeout_s
        try:
            answer = await asyncio.wait_for(self.call_hook(call.name, self.state, **given), limit_s)
        except TimeoutError:
            raise ToolError(f"{call.name} took longer than {limit_s:g} s.") from None
        if not isinstance(answer, str):
            raise WorldError(f"tool {call.name} gave {type(answer).__name__}, expected text")
        return answer

    async def _judged(self) -> tuple[dict[str, bytes], bytes]:
        """What the verdict is about: the sandbox's files and the state's values, and the state as a whole."""
        judged = await self.call_hook("judged", self.state)

        def read() -> tuple[bytes, bytes]:
            return pickle.dumps(judged), "\n".join(_values(judged, "state")).encode(errors="replace")

        try:
            whole, values = await asyncio.to_thread(read)
        except Exception as error:
            what = f"judged gave {type(judged).__name__}, which can't be pickled ({error})"
            raise WorldError(f"{what}: return the part of the state that the verdict is about") from error
        return {**({} if self.sandbox is None else await get_files(self.sandbox)), _STATE: values}, whole

    async def user_reply(self, messages: Sequence[Message]) -> str | None:
        """What the user says to the last of the messages."""
        reply = await self.call_hook("user_reply", self.task, self.state, messages)
        if not isinstance(reply, str | None):
            raise WorldError(f"user_reply gave {type(reply).__name__}, expected text or None")
        return reply

    async def collect(self) -> Left:
        """The state, and the sandbox's files."""
        files = {} if self.sandbox is None else await get_files(self.sandbox)
        return Left(self.state, files, self._authors.left() if self._authors.changes else None)


_STATE = "\0"
"""A name that no file has."""


def _values(value: Any, path: str, depth: int = 20) -> Iterator[str]:
    """The values that something is made of, a line each, under names that do not depend on their order in a list."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, str):
        yield from (f"{path}: {line}" for line in value.split("\n"))
    elif depth and isinstance(value, Mapping):
        for key, one in cast(Mapping[Any, Any], value).items():
            yield from _values(one, f"{path}.{key}", depth - 1)
    elif depth and isinstance(value, list | tuple | set | frozenset):
        for one in cast(Collection[Any], value):
            yield from _values(one, f"{path}[]", depth - 1)
    elif depth and hasattr(value, "__dict__"):
        yield from _values(vars(value), path, depth - 1)
    else:
        yield f"{path}: {value!r}"


# ---------------------------------------------------------------------------------------------------- a tool's schema


@dataclass(frozen=True, slots=True)
class _Tool:
    """A tool method: what the policy is told of it, and what its arguments must be."""

    spec: dict[str, Any]
    arguments: type[BaseModel]
    takes_sandbox: bool

    @staticmethod
    def read(place: str, name: str, hook: Callable[..., Any]) -> "_Tool":
        """Read a bound method's signature and docstring.

        Raises:
            ConfigError: `place` lacks a docstring, a type, or a parameter's description, or a type is none of JSON's.
        """
        try:
            types = get_type_hints(hook)
        except Exception as error:
            raise ConfigError(f"{place}: its types can't be read: {error}") from error
        parameters = [*inspect.signature(hook).parameters.values()][1:]
        given = [one for one in parameters if one.name != "sandbox"]
        about, described = _docstring(inspect.getdoc(hook) or "")
        if not about:
            raise ConfigError(f"{place} has no docstring, which is what the policy is told of it")
        fields: dict[str, Any] = {}
        for one in given:
            if one.name not in types or one.name not in described:
                lacks = "no type" if one.name not in types else "no line in the docstring's Args"
                raise ConfigError(f"{place}: parameter {one.name!r} has {lacks}")
            default = ... if one.default is inspect.Parameter.empty else one.default
            fields[one.name] = (types[one.name], Field(default, description=described[one.name]))
        try:
            arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
            schema = {key: value for key, value in arguments.model_json_schema().items() if key != "title"}
        except Exception as error:
            raise ConfigError(f"{place}: its parameters have no JSON schema: {error}") from error
        for one in schema.get("properties", {}).values():
            one.pop("title", None)
        function = {"name": name, "description": about, "parameters": {"properties": {}, "required": [], **schema}}
        return _Tool({"type": "function", "function": function}, arguments, len(given) < len(parameters))

    def checked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The call's arguments in the types of the method.

        Raises:
            ToolError: they do not fit.
        """
        try:
            values = self.arguments.model_validate(arguments)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg'].lower()}" for one in error.errors()]
            raise ToolError(f"{self.spec['function']['name']} can't be called like this. {'; '.join(wrong)}.") from None
        return {name: getattr(values, name) for name in type(values).model_fields}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says before its sections, and of each parameter below `Args:`."""
    about, _, rest = text.partition("\nArgs:\n")
    arguments = re.split(r"^\S", rest, maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^ {4}(\w+)(?: \([^)]*\))?: (.*(?:\n {5,}.*)*)", arguments, re.MULTILINE)
    about = re.split(r"^(?:Returns|Raises):", about, maxsplit=1, flags=re.MULTILINE)[0]
    return " ".join(about.split()), {name: " ".join(said.split()) for name, said in found}


# --------------------------------------------------------------------------------------------------- found by its name


def load_own_world(name: str) -> OwnWorld:
    """The world that `env.world` names: `FILE.py:CLASS` or `package.module:CLASS`. Its code is run.

    Raises:
        ConfigError: there is no such file, module or class, it can't be imported, or it is no `OwnWorld`.
    """
    place, _, class_name = name.rpartition(":")
    if not place or not class_name.isidentifier():
        raise ConfigError(f"env.world is {name!r}: expected coding, FILE.py:CLASS or package.module:CLASS")
    try:
        kind = getattr(_module(place), class_name, None)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"env.world: {place} can't be imported: {type(error).__name__}: {error}") from error
    if not (inspect.isclass(kind) and issubclass(kind, OwnWorld)):
        raise ConfigError(f"env.world: {place} has no class {class_name} that is an OwnWorld")
    try:
        return kind()
    except Exception as error:
        raise ConfigError(f"env.world: {class_name}() raised {type(error).__name__}: {error}") from error


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return import_module(place)
    path = Path(place)
    if not path.is_file():
        raise ConfigError(f"env.world: there is no file {place!r}")
    spec = spec_from_file_location(f"own_world_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses and pickle look their module up.
    spec.loader.exec_module(module)
    return module
