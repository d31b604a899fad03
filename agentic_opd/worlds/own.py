"""Custom worlds as one class: tasks, tools, the state they act on, and the verification.

The user subclasses `OwnWorld`, whose methods are hooks. `HookedWorld` adapts the subclass to `core.types.World`.
docs/worlds.md has a complete example.

A hook that raises anything other than `ToolError` or an `OPDError` causes a `WorldError` that names the hook. The group
is counted as failed, and the run continues.
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
    """Raise in a tool to report an error of the policy, which reads this text after `Error: `."""


@dataclass(frozen=True, slots=True)
class Checks:
    """Result of a verification: the number of checks that passed, and reports about them."""

    passed: int
    total: int
    report: str = ""
    """Report for readers who may know the task's secret. Empty: the counts."""
    judge_report: str = ""
    """Report for the judge, whose hints the policy learns from; must not reveal the secret. Empty: the counts."""


@dataclass(frozen=True, slots=True)
class Left:
    """The state and the sandbox's files at the end of an episode."""

    state: Any
    files: Mapping[str, bytes]
    made_by: frozenset[int] | None = None
    """See `core.types.Verification.made_by`."""


def tool(hook: HookT) -> HookT:
    """Mark a method as a tool: `(self, state, ...) -> str`, optionally async.

    The policy provides the parameters after the first two. Each needs a type that pydantic can parse from JSON. A
    parameter named `sandbox` receives the episode's sandbox instead. The docstring's text before its sections becomes
    the tool's description, and its `Args:` section describes the parameters.
    """
    hook.is_tool = True  # type: ignore[attr-defined]
    return hook


class OwnWorld:
    """Base class of custom worlds; `env.world` names a subclass by `FILE.py:CLASS` or `package.module:CLASS`.

    A subclass needs `tasks`, `verify` and at least one tool. All hooks except `tasks` and `eval_tasks` may be async. A
    synchronous hook runs in a worker thread, concurrently with those of other episodes: the subclass must make shared
    state thread-safe.
    """

    system_prompt: str = "Work on the task with your tools until it is done. Then answer without a tool call."

    def tasks(self) -> Iterable[Task]:
        """Return the tasks, each with an id, a prompt, `hidden_tests`, and optionally files for the sandbox.

        `hidden_tests` is any text that only `verify` may know, such as the right answer. Hints that reveal it are
        dropped.
        """
        raise NotImplementedError

    def eval_tasks(self) -> Iterable[Task] | None:
        """Return the tasks to evaluate on. None holds out `env.eval_fraction` of `tasks`."""
        return None

    def start(self, task: Task) -> Any:
        """Return the state of one episode that the tools act on: any object, new for each call."""
        return None

    def verify(self, task: Task, state: Any) -> Any:
        """Judge the final state and return `Checks`.

        If the method has a parameter `files`, it receives the sandbox's files (relative path -> bytes).
        """
        raise NotImplementedError

    def judged(self, state: Any) -> Any:
        """Return the part of the state that `verify` judges; it must support pickle.

        The verification result is attributed to the turns whose changes survive in this part or in the sandbox's files.
        """
        return state

    def user_reply(self, task: Task, state: Any, messages: Sequence[Message]) -> Any:
        """Return the user's reply to the last of `messages`, a turn without a tool call. None ends the episode."""
        return None


class HookedWorld:
    """Adapts the hooks of an `OwnWorld` to `core.types.World`."""

    def __init__(self, hooks: OwnWorld, config: CodingConfig, system_prompt: str | None = None) -> None:
        """Read the tools without starting anything.

        Args:
            hooks: The custom world.
            config: Limits of a tool call, the sandbox, and the evaluation split.
            system_prompt: Replaces the world's system prompt; None keeps it.

        Raises:
            ConfigError: The world has no tool, or a tool lacks types or descriptions.
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
            WorldError: A hook failed, returned no task, or returned something other than tasks with distinct ids.
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
        """See `core.types.World`; a sandbox is started only if a tool has a parameter for it."""
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
            WorldError: The hook failed, or returned something other than valid `Checks`.
        """
        if left is None:
            left = Left(await self._call("start", task), {})
        takes_files = "files" in inspect.signature(self._hooks.verify).parameters
        checks = await self._call("verify", task, left.state, **({"files": left.files} if takes_files else {}))
        if not isinstance(checks, Checks):
            raise WorldError(f"world {self._name}: verify gave {type(checks).__name__}, expected Checks")
        if not {type(checks.passed), type(checks.total)} <= {int, bool}:
            raise WorldError(f"world {self._name}: verify gave {checks.passed!r} of {checks.total!r}, expected counts")
        passed, total = int(checks.passed), int(checks.total)  # A bool is an int in Python but not in JSON.
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
        """Call a hook and return its result.

        Raises:
            ToolError, OPDError: Raised by the hook.
            WorldError: The hook raised any other exception.
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
    """One episode in a custom world; see `core.types.WorldSession`."""

    task: Task
    state: Any
    sandbox: Sandbox | None
    tools: Mapping[str, "_Tool"]
    call_hook: Callable[..., Awaitable[Any]]
    config: CodingConfig

    def __post_init__(self) -> None:
        self._authors = Authors(self.task.prompt)

    async def run_tool(self, call: ToolCall) -> ToolResult:
        """Run one call and record whether it changed the judged state or files."""
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
        """Return the judged parts (the sandbox's files and the state's values as text), and the pickled state.

        Raises:
            WorldError: The judged state cannot be pickled.
        """
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
        """Return the user's reply to the last message; None ends the episode."""
        reply = await self.call_hook("user_reply", self.task, self.state, messages)
        if not isinstance(reply, str | None):
            raise WorldError(f"user_reply gave {type(reply).__name__}, expected text or None")
        return reply

    async def collect(self) -> Left:
        """Return the final state and the sandbox's files."""
        files = {} if self.sandbox is None else await get_files(self.sandbox)
        return Left(self.state, files, self._authors.left() if self._authors.changes else None)


_STATE = "\0"
"""Name of the state among the judged parts; no file can have it."""


def _values(value: Any, path: str, depth: int = 20) -> Iterator[str]:
    """Yield a line for each value nested in `value`, under a path that omits indices of lists."""
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
    """A tool method: its spec for the policy, and the pydantic model of its arguments."""

    spec: dict[str, Any]
    arguments: type[BaseModel]
    takes_sandbox: bool

    @staticmethod
    def read(place: str, name: str, hook: Callable[..., Any]) -> "_Tool":
        """Read a bound method's signature and docstring.

        Raises:
            ConfigError: The docstring, a type or a parameter's description is missing, or a type has no JSON schema.
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
        """Return the call's arguments, converted to the method's types.

        Raises:
            ToolError: The arguments do not match the parameters.
        """
        try:
            values = self.arguments.model_validate(arguments)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg'].lower()}" for one in error.errors()]
            raise ToolError(f"{self.spec['function']['name']} can't be called like this. {'; '.join(wrong)}.") from None
        return {name: getattr(values, name) for name in type(values).model_fields}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's text before its sections, and the description of each parameter in `Args:`."""
    about, _, rest = text.partition("\nArgs:\n")
    arguments = re.split(r"^\S", rest, maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^ {4}(\w+)(?: \([^)]*\))?: (.*(?:\n {5,}.*)*)", arguments, re.MULTILINE)
    about = re.split(r"^(?:Returns|Raises):", about, maxsplit=1, flags=re.MULTILINE)[0]
    return " ".join(about.split()), {name: " ".join(said.split()) for name, said in found}


# --------------------------------------------------------------------------------------------------- found by its name


def load_own_world(name: str) -> OwnWorld:
    """Import and construct the world that `env.world` names: `FILE.py:CLASS` or `package.module:CLASS`.

    Raises:
        ConfigError: The file, module or class does not exist, importing or constructing it fails, or it is not an
            `OwnWorld`.
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
    sys.modules[spec.name] = module  # Dataclasses and pickle look up their module.
    spec.loader.exec_module(module)
    return module
