"""Custom worlds as one class: tasks, tools, the state they act on, and the verification.

The user subclasses `CustomWorld`, whose methods are hooks. `HookedWorld` adapts the subclass to `core.types.World`.
docs/worlds.md has a table of all hooks and complete examples.

A hook that raises anything other than `ToolError` or an `OPDError` causes a `WorldError` that names the hook, the file
and the line. The group is counted as failed, and the run continues. Failures of the hook `close` are only counted.
"""

import asyncio
import inspect
import logging
import pickle
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from operator import itemgetter
from threading import Thread
from typing import Any, TypeVar, cast, overload

from agentic_opd.core.concurrency import to_its_end
from agentic_opd.core.errors import AlignmentError, ConfigError, OPDError, SandboxError, ServerError, WorldError
from agentic_opd.core.text import cut_middle, well_formed
from agentic_opd.core.types import Message, ProgramRun, Task, ToolCall, ToolResult, Verification, VerifyOutcome
from agentic_opd.sandboxes.factory import check_sandbox, sandbox_factory
from agentic_opd.sandboxes.program import Program, run_program
from agentic_opd.sandboxes.protocol import Mount, Sandbox
from agentic_opd.sandboxes.workdir import get_files, put_files
from agentic_opd.settings.user_code import definition_line, error_line, files_of
from agentic_opd.worlds.authors import MOST_BYTES, Authors
from agentic_opd.worlds.config import WorldConfig
from agentic_opd.worlds.schema import MethodTool, ToolError, complete_schema
from agentic_opd.worlds.split import split_tasks

__all__ = [
    "Checks",
    "CustomWorld",
    "HookedSession",
    "HookedWorld",
    "Left",
    "Message",
    "Task",
    "ToolError",
    "tool",
    "world_problems",
]

logger = logging.getLogger(__name__)

HookT = TypeVar("HookT", bound=Callable[..., Any])
_Result = TypeVar("_Result")

_HOOKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tasks": ((), ()),
    "eval_tasks": ((), ()),
    "start": (("task",), ("sandbox",)),
    "tools": (("task",), ()),
    "call": (("state", "name", "arguments"), ("sandbox",)),
    "added_tools": (("state",), ()),
    "verify": (("task", "state"), ("files", "messages", "sandbox")),
    "judged": (("state",), ()),
    "is_over": (("state",), ("messages",)),
    "user_reply": (("task", "state", "messages"), ()),
    "comparable": (("text",), ()),
    "close": (("state",), ("files", "sandbox")),
}
"""Hook -> the parameters that it gets by position, and those that it gets by name if it has them."""
_PLAIN_HOOKS = ("tasks", "eval_tasks", "tools", "comparable")
"""Hooks that must not be async."""


@dataclass(frozen=True, slots=True)
class Checks:
    """Result of a verification: the number of checks that passed, and reports about them."""

    passed: int
    total: int
    report: str = ""
    """Report for readers who may know the task's secret. Empty: the counts."""
    judge_report: str = ""
    """Report for the judge, whose hints the policy learns from; must not reveal the secret. Empty: the counts."""
    score: float | None = None
    """Score in [0, 1] that is rewarded, in place of `passed / total`."""


@dataclass(frozen=True, slots=True)
class Left:
    """The state, the sandbox's files and the conversation at the end of an episode."""

    state: Any
    files: Mapping[str, bytes]
    made_by: frozenset[int] | None = None
    """See `core.types.Verification.made_by`."""
    messages: Sequence[Message] = ()
    verdict: Verification | None = None
    """Result of `verify`, which runs before the session closes the state and its sandbox ends."""


@overload
def tool(hook: HookT) -> HookT: ...
@overload
def tool(hook: None = None) -> Callable[[HookT], HookT]: ...
def tool(hook: HookT | None = None) -> HookT | Callable[[HookT], HookT]:
    """Mark a method as a tool: `(self, state, ...) -> str`, optionally async; written `@tool` or `@tool()`.

    The policy provides the parameters after the first two. Each needs a type that pydantic can parse from JSON. A
    parameter named `sandbox` receives the episode's sandbox instead. The docstring's text before its sections becomes
    the tool's description, and its `Args:` section describes the parameters.
    """
    if hook is None:
        return tool
    hook.is_tool = True  # type: ignore[attr-defined]
    return hook


class CustomWorld:
    """Base class of custom worlds; `env.world` names a subclass by `FILE.py:CLASS` or `package.module:CLASS`.

    A subclass needs `tasks` and `verify`. `tasks`, `eval_tasks`, `tools` and `comparable` are plain methods; the other
    hooks may be async. A plain hook runs in a worker thread, concurrently with those of other episodes: the subclass
    must make shared state thread-safe.
    The parameters of its constructor are settings, `env.world.NAME`; see `worlds.choose`.
    """

    system_prompt: str = "Work on the task with your tools until it is done. Then answer without a tool call."
    replayable: bool = True
    """Whether the calls of a recorded episode give the same results on a new state of `start`. False for a state that
    other episodes change too, or that is not started again."""
    counts_calls: bool = True
    """Whether the reward's part `tool_usage` counts calls. False for a world that runs none."""

    def tasks(self) -> Iterable[Task]:
        """Return the tasks: each has an id, a prompt or messages, and the data that the hooks need.

        `hidden_tests` is any text that only `verify` may know, such as the right answer. Hints that reveal it are
        dropped.
        """
        raise NotImplementedError

    def eval_tasks(self) -> Iterable[Task] | None:
        """Return the tasks to evaluate on. None holds out `env.eval.fraction` of `tasks`."""
        return None

    def start(self, task: Task, *args: Any, **by_name: Any) -> Any:
        """Return the state of one episode that the tools act on: any object, new for each call."""
        return None

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        """Return the JSON schemas of the task's functions, which `call` runs, besides the methods marked as tools."""
        return ()

    def call(self, state: Any, name: str, arguments: dict[str, Any], *args: Any, **by_name: Any) -> Any:
        """Run a function of `tools` with the arguments as the policy wrote them, and return its result as text.

        Raises:
            ToolError: The call is wrong; the policy reads the message.
        """
        raise NotImplementedError

    def added_tools(self, state: Any) -> Any:
        """Return the names of functions that became available during the episode, which `call` runs too.

        Their schemas are not part of the prompt: a message of the user, or a result, has told the policy of them.
        """
        return ()

    def verify(self, task: Task, state: Any, *args: Any, **by_name: Any) -> Any:
        """Judge the final state.

        Returns:
            A number in [0, 1] or `Checks`; or either with a text, as a tuple: the report, which the judge reads too and
            which therefore must not reveal the secret.

        If the method has a parameter `files`, it receives the sandbox's files (relative path -> bytes); `messages`: the
        conversation; `sandbox`: the episode's sandbox, before it ends.
        """
        raise NotImplementedError

    def judged(self, state: Any) -> Any:
        """Return the part of the state that `verify` judges; it must support pickle.

        The verification result is attributed to the turns whose changes survive in this part or in the sandbox's files.
        """
        return state

    def is_over(self, state: Any, *args: Any, **by_name: Any) -> Any:
        """Return whether the episode is over after a turn's calls, such as gymnasium's `terminated` or `truncated`.

        If the method has a parameter `messages`, it receives the conversation, which ends with the calls' results.
        """
        return False

    def user_reply(self, task: Task, state: Any, messages: Sequence[Message]) -> Any:
        """Return the user's reply to the last of `messages`, a turn without a tool call. None ends the episode."""
        return None

    def comparable(self, text: str) -> str:
        """Return a tool result without what differs between two runs of the same call, such as a duration."""
        return text

    def close(self, state: Any, *args: Any, **by_name: Any) -> Any:
        """Release what the state holds, such as a simulator or a connection.

        Called once for each state that `start` returned, after `verify` or after whatever ended the episode before it:
        an error, a cancellation, a time limit. The time limit is that of a tool call. A failure is logged and counted,
        and changes no result.
        """


def world_problems(hooks: CustomWorld) -> list[str]:
    """Return the problems of a world's hooks and tools, without calling any of them."""
    problems = [problem for name in _HOOKS if (problem := _hook_problem(hooks, name))]
    for name in _tool_names(type(hooks)):
        try:
            MethodTool.read(f"tool {name}", name, getattr(hooks, name))
        except ConfigError as error:
            problems.append(f"{error}{definition_line(getattr(hooks, name), files_of(type(hooks)))}")
    return problems


def _hook_problem(hooks: CustomWorld, name: str) -> str | None:
    hook, (positional, by_name) = getattr(hooks, name), _HOOKS[name]
    where = definition_line(hook, files_of(type(hooks)))
    if not _is_defined(hooks, name):
        if name == "call" and _is_defined(hooks, "tools"):
            return "call is not defined, which runs the functions of tools"
        return f"{name} is not defined" if name in ("tasks", "verify") else None
    if name in _PLAIN_HOOKS and inspect.iscoroutinefunction(hook):
        return f"{name} is async, expected a plain method{where}"
    parameters = inspect.signature(hook).parameters
    names = {optional for optional in by_name if optional in parameters}
    try:
        inspect.signature(hook).bind(*positional, **dict.fromkeys(names))
    except TypeError as error:
        may = f", and by name any of {', '.join(by_name)}" if by_name else ""
        required = ", ".join(("self", *positional))
        return f"{name}{inspect.signature(hook)}: {error}; expected {name}({required}){may}{where}"
    return None


def _is_defined(hooks: CustomWorld, name: str) -> bool:
    """Return whether a class defines a hook; a method marked as a tool is not a hook, even with a hook's name."""
    hook = getattr(type(hooks), name)
    return hook is not getattr(CustomWorld, name) and not getattr(hook, "is_tool", False)


def _tool_names(kind: type) -> list[str]:
    names = dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base))
    return [name for name in names if getattr(getattr(kind, name), "is_tool", False)]


class HookedWorld:
    """Adapts the hooks of a `CustomWorld` to `core.types.World`."""

    def __init__(self, hooks: CustomWorld, config: WorldConfig, system_prompt: str | None = None) -> None:
        """Read the tools without starting anything.

        Args:
            hooks: The custom world.
            config: Limits of a tool call, the sandbox, and the evaluation split.
            system_prompt: Replaces the world's system prompt; None keeps it.

        Raises:
            ConfigError: A hook has wrong parameters or is missing, or a tool lacks types or descriptions.
        """
        self.hooks, self.config, self._name = hooks, config, type(hooks).__name__
        if problems := world_problems(hooks):
            raise ConfigError(f"world {self._name}: {'; '.join(problems)}")
        self._files = files_of(type(hooks))
        self._parameters: dict[str, frozenset[str]] = {}
        self.close_failures = 0
        """Number of states that the hook `close` did not close: it raised, or exceeded its time limit."""
        self.close_failure = ""
        """The latest of these failures."""
        names = _tool_names(type(hooks))
        self.methods = {name: MethodTool.read(f"tool {name}", name, getattr(hooks, name)) for name in names}
        self.tools: Sequence[dict[str, Any]] = [method.spec for method in self.methods.values()]
        self.system_prompt = system_prompt or hooks.system_prompt
        self.has_sandbox = any(method.takes_sandbox for method in self.methods.values()) or any(
            self.takes(name, "sandbox") for name in ("start", "call", "verify", "close")
        )
        self.runs_programs = self.has_sandbox or self.takes("verify", "files")
        if self.has_sandbox:
            sandbox_factory(config.sandbox)

    @property
    def replayable(self) -> bool:
        """See `core.types.ReplayableWorld`."""
        return self.hooks.replayable

    @property
    def counts_calls(self) -> bool:
        """See `CustomWorld`."""
        return self.hooks.counts_calls

    def comparable(self, text: str) -> str:
        """See `core.types.ReplayableWorld`.

        Raises:
            WorldError: The hook failed, or returned something other than a text.
        """
        try:
            compared: Any = self.hooks.comparable(text)
        except Exception as error:
            raise self.raised("comparable", error) from error
        if not isinstance(compared, str):
            raise self.failure("comparable", f"comparable returned {type(compared).__name__}, expected text")
        return compared

    @property
    def has_close(self) -> bool:
        """Whether the world defines the hook `close`."""
        return _is_defined(self.hooks, "close")

    def takes(self, hook: str, parameter: str) -> bool:
        """Return whether a hook has a parameter of this name."""
        if hook not in self._parameters:
            self._parameters[hook] = frozenset(inspect.signature(getattr(self.hooks, hook)).parameters)
        return parameter in self._parameters[hook]

    async def train_and_eval_tasks(self) -> tuple[list[Task], list[Task]]:
        """See `core.types.World`.

        Raises:
            WorldError: A hook failed, returned no task, or returned something other than tasks with distinct ids.
            ConfigError: A task names an image, and the sandbox has none.
        """
        tasks, held_out = await self._tasks_of("tasks"), await self._tasks_of("eval_tasks")
        tasks, all_tasks = tasks or [], [*(tasks or ()), *(held_out or ())]
        if not all_tasks:
            raise self.failure("tasks", "tasks returned no task")
        if not self.tools and all_tasks[0].tools:
            self.tools = all_tasks[0].tools  # What the checks at start-up render.
        if held_out is not None:
            return tasks, held_out
        return split_tasks(tasks, self.config.eval.fraction, self.config.eval.seed)

    async def _tasks_of(self, name: str) -> list[Task] | None:
        def listed() -> list[Any] | None:
            tasks = getattr(self.hooks, name)()
            return None if tasks is None else [*tasks]

        tasks = await self.call_hook(name, listed, set())
        if tasks is None:
            return None
        for task in tasks:
            if not isinstance(task, Task):
                raise self.failure(name, f"{name} returned {type(task).__name__}, expected Task")
            backend = self.config.sandbox.type if self.has_sandbox else "none"
            if task.image is not None and backend != "docker":
                raise ConfigError(
                    f"task {task.task_id!r} has an image, which needs env.sandbox.type docker, not {backend}"
                )
        task_id, count = max(Counter(task.task_id for task in tasks).items(), key=itemgetter(1), default=("", 0))
        if count > 1:
            raise self.failure(name, f"{name} returned {count} tasks of the id {task_id!r}")
        return await asyncio.to_thread(lambda: [self._complete(task) for task in tasks])

    def _complete(self, task: Task) -> Task:
        """Return the task with its tools, and with texts that can be tokenised."""
        values = {field.name: getattr(task, field.name) for field in fields(Task)}
        texts = {name: well_formed(value) for name, value in values.items() if isinstance(value, str)}
        files = {well_formed(path): well_formed(text) for path, text in task.files.items()}
        tools: Any = task.tools
        try:
            functions = self.hooks.tools(task) if _is_defined(self.hooks, "tools") else ()
            schemas = [complete_schema(schema) for schema in (*(task.tools or ()), *functions)]
        except OPDError as error:
            self.locate(error)
            raise
        except Exception as error:
            raise self.raised("tools", error) from error
        if schemas:
            tools = [*(method.spec for method in self.methods.values()), *schemas]
            names = [tool["function"]["name"] for tool in tools]
            if len({*names}) < len(names):
                raise self.failure("tools", f"task {task.task_id!r} has two tools of one name: {names}")
            if not _is_defined(self.hooks, "call"):
                raise self.failure("tasks", f"task {task.task_id!r} has tools, but the world has no hook call")
        changed = {
            name: value for name, value in {**texts, "files": files, "tools": tools}.items() if value != values[name]
        }
        return replace(task, **changed) if changed else task

    @asynccontextmanager
    async def session(self, task: Task) -> AsyncGenerator["HookedSession"]:
        """See `core.types.World`; a sandbox is started only if a hook has a parameter for it."""
        async with self.program_session(task, ()) if self.has_sandbox else self._opened(task, None) as session:
            yield session

    @asynccontextmanager
    async def program_session(self, task: Task, mounts: Sequence[Mount]) -> AsyncGenerator["HookedSession"]:
        """Open a session as `session` does, in a sandbox that also sees `mounts` of this machine."""
        memory = {"memory_mb": task.limits["sandbox_memory_mb"]} if "sandbox_memory_mb" in task.limits else {}
        image = {} if task.image is None else {"image": task.image}
        async with sandbox_factory(self.config.sandbox.model_copy(update={**memory, **image}), mounts)() as sandbox:
            await put_files(sandbox, task.files)
            async with self._opened(task, sandbox) as session:
                yield session

    @asynccontextmanager
    async def _opened(self, task: Task, sandbox: Sandbox | None) -> AsyncGenerator["HookedSession"]:
        session = HookedSession(self, task, sandbox)
        try:
            await session.start()
            yield session
        finally:
            await session.close()

    async def verify(self, task: Task, left: Left | None) -> Verification:
        """See `core.types.World`.

        Raises:
            WorldError: The hook failed, or returned something other than a valid result.
        """
        if left is None:
            async with self.session(task) as session:
                left = await session.collect()
        return left.verdict or await self.judge(task, left, None, set())

    async def judge(
        self, task: Task, left: Left, sandbox: Sandbox | None, running: set[asyncio.Future[Any]]
    ) -> Verification:
        """Call the hook `verify`, and return its result as a `Verification`; see `call` for `running`."""
        arguments = {"files": left.files, "messages": left.messages, "sandbox": sandbox}
        result, text = await self.call("verify", running, task, left.state, **arguments), ""
        if isinstance(result, tuple) and len(cast(tuple[Any, ...], result)) == 2:
            result, text = cast(tuple[Any, Any], result)
        result = _as_python(result)
        if not isinstance(text, str):
            raise self.failure("verify", f"verify returned a text of type {type(text).__name__}")
        if isinstance(result, int | float) and 0 <= result <= 1:
            text = well_formed(text or f"The result is {result:.15g} of 1.")
            return Verification.of_score(float(result), text, text, made_by=left.made_by)
        if not isinstance(result, Checks):
            shown_result = repr(result) if isinstance(result, int | float) else type(result).__name__
            raise self.failure(
                "verify", f"verify returned {shown_result}, expected a number in [0, 1], Checks, or either with a text"
            )
        counted = (_as_python(result.passed), _as_python(result.total))
        if not {*map(type, counted)} <= {int, bool}:
            raise self.failure("verify", f"verify returned {result.passed!r} of {result.total!r}, expected counts")
        passed, total = map(int, counted)  # A bool is an int in Python but not in JSON.
        counts = f"{passed} of {total} checks passed."
        try:
            return Verification(
                VerifyOutcome.RAN,
                passed,
                total,
                well_formed(text or result.report or counts),
                well_formed(text or result.judge_report or counts),
                made_by=left.made_by,
                score=None if result.score is None else float(result.score),
            )
        except (AlignmentError, TypeError, ValueError) as error:
            raise self.failure("verify", f"verify returned wrong Checks: {error}") from error

    async def check(self) -> None:
        """See `core.types.World`."""
        if self.has_sandbox:
            await check_sandbox(sandbox_factory(self.config.sandbox))

    async def call(self, name: str, running: set[asyncio.Future[Any]], /, *args: Any, **by_name: Any) -> Any:
        """Call a hook with `args`, and with those of `by_name` for which it has a parameter.

        `running` holds the hook while it runs in a thread, also after the caller has stopped waiting for it.

        Raises:
            ToolError, OPDError: Raised by the hook.
            WorldError: The hook raised any other exception.
        """
        kwargs = {key: value for key, value in by_name.items() if name in self.methods or self.takes(name, key)}
        return await self.call_hook(name, partial(getattr(self.hooks, name), *args, **kwargs), running)

    async def call_hook(self, name: str, hook: Callable[[], Any], running: set[asyncio.Future[Any]]) -> Any:
        """Call a function in the name of a hook; see `call`."""
        may_refuse = (ToolError,) if name in self.methods or name == "call" else ()
        try:
            if inspect.iscoroutinefunction(hook):
                return await hook()
            if name not in self.methods and getattr(type(self.hooks), name, None) is getattr(CustomWorld, name, hook):
                return hook()  # The default, which returns at once.
            thread = asyncio.ensure_future(asyncio.to_thread(_result_or_error, hook))
            running.add(thread)
            thread.add_done_callback(running.discard)
            result, error = await asyncio.shield(thread)
            if error is not None:
                raise error
            return await result if inspect.iscoroutine(result) else result
        except may_refuse:
            raise
        except OPDError as error:
            self.locate(error)
            raise
        except (Exception, SystemExit) as error:
            raise self.raised(name, error) from error

    async def close(self, task: Task, hook: Callable[[], Any], limit_s: float) -> None:
        """Call the hook `close`, and count a failure: an exception, or more than `limit_s` seconds."""
        closing = asyncio.ensure_future(_close_result(hook))
        await asyncio.wait({closing}, timeout=limit_s)
        if not closing.done():
            closing.cancel()
            cause = (
                f"took longer than {limit_s:g} s (env.tool_timeout_s){definition_line(self.hooks.close, self._files)}"
            )
        elif closing.cancelled():
            cause = f"was cancelled{definition_line(self.hooks.close, self._files)}"
        elif (error := closing.result()) is not None:
            cause = f"raised {type(error).__name__}: {error}{self._where('close', error)}"
        else:
            return
        self.close_failures += 1
        self.close_failure = f"world {self._name}: close {cause}"
        logger.warning("%s; the result of the episode of %s is unchanged", self.close_failure, task.task_id)

    def raised(self, name: str, error: BaseException) -> WorldError:
        """Return the error for an exception of a hook, with the file and line of the world that raised it."""
        text = f"world {self._name}: {name} raised {type(error).__name__}: {error}"
        return WorldError(f"{text}{self._where(name, error)}")

    def locate(self, error: OPDError) -> None:
        """Add the file and line of the world to an error's message, unless a sandbox or a server is at fault."""
        where = error_line(error, self._files)
        if where not in str(error) and not isinstance(error, SandboxError | ServerError):
            error.args = (f"{error}{where}", *error.args[1:])

    def failure(self, name: str, text: str) -> WorldError:
        """Return the error for a wrong result of a hook, with the file and line of the hook."""
        return WorldError(f"world {self._name}: {text}{definition_line(getattr(self.hooks, name), self._files)}")

    def _where(self, name: str, error: BaseException) -> str:
        return error_line(error, self._files) or definition_line(getattr(self.hooks, name), self._files)


def _result_or_error(hook: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return a hook's result and exception: a future can't hold a StopIteration, and its task would never wake up."""
    try:
        return hook(), None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - `call_hook` raises it
        return None, error


async def _close_result(hook: Callable[[], Any]) -> BaseException | None:
    """Call the hook `close`, a synchronous one in a thread of its own; return its exception.

    A hook that never returns neither takes a thread from the pool of the other hooks nor stops the program from ending.
    """
    try:
        result = hook() if inspect.iscoroutinefunction(hook) else await _in_daemon_thread(hook)
        if inspect.iscoroutine(result):
            await result
    except (Exception, SystemExit) as error:  # noqa: BLE001 - counted by `HookedWorld.close`
        return error
    return None


async def _in_daemon_thread(hook: Callable[[], Any]) -> Any:
    outcome, context = Future[tuple[Any, BaseException | None]](), copy_context()

    def run() -> None:
        try:
            outcome.set_result((context.run(hook), None))
        except BaseException as error:  # noqa: BLE001 - raised below
            outcome.set_result((None, error))

    outcome.set_running_or_notify_cancel()  # A future that is given up can still receive the result.
    Thread(target=run, daemon=True, name="close").start()
    result, error = await asyncio.wrap_future(outcome)
    if error is not None:
        raise error
    return result


@dataclass
class HookedSession:
    """One episode in a custom world; see `core.types.WorldSession`."""

    world: HookedWorld
    task: Task
    sandbox: Sandbox | None
    state: Any = None
    is_started: bool = False
    _running: set[asyncio.Future[Any]] = field(default_factory=set[asyncio.Future[Any]])
    """Hooks in threads, also those that are no longer awaited after a time limit or a cancellation."""

    def __post_init__(self) -> None:
        self._authors = Authors(self.task.prompt)

    async def start(self) -> None:
        """Call the hook `start`; a synchronous one runs to its end despite a cancellation, so that it can be closed."""

        async def started() -> None:
            self.state = await self._call("start", self.task, sandbox=self.sandbox)
            self.is_started = True

        await (started() if inspect.iscoroutinefunction(self.world.hooks.start) else to_its_end(started()))

    async def close(self) -> None:
        """Call the hook `close` if `start` returned a state, despite cancellations; a failure is logged and counted."""
        if self.is_started and self.world.has_close:
            await to_its_end(self._close())

    async def _close(self) -> None:
        limit_s, by_name = self._limit_s, dict[str, Any]()
        if self._running:  # A simulator must not be closed while another thread uses it.
            await asyncio.wait({*self._running}, timeout=limit_s)
        if self.world.takes("close", "sandbox"):
            by_name["sandbox"] = self.sandbox
        if self.world.takes("close", "files"):
            try:
                by_name["files"] = await self.judged_files()
            except (OPDError, OSError) as error:
                logger.warning("close of an episode of %s gets no files: %s", self.task.task_id, error)
                by_name["files"] = {}
        await self.world.close(self.task, partial(self.world.hooks.close, self.state, **by_name), limit_s)

    async def _call(self, name: str, /, *args: Any, **by_name: Any) -> Any:
        return await self.world.call(name, self._running, *args, **by_name)

    @property
    def _limit_s(self) -> float:
        return self.task.limits.get("tool_timeout_s", self.world.config.tool_timeout_s)

    async def run_tool(self, call: ToolCall) -> ToolResult:
        """Run one call and record whether it changed the judged state or files."""
        await self._compared(self._authors.set_baseline)
        is_error = False
        try:
            text = await self._answer(call)
        except ToolError as error:
            text, is_error = f"Error: {error}", True
        text = cut_middle(well_formed(text), self.world.config.tool_output_max_chars)
        return ToolResult(text, is_error, await self._compared(self._authors.changed))

    async def _answer(self, call: ToolCall) -> str:
        if call.arguments is None:
            raise ToolError(f"{call.error}.")  # Not repeated: a small model that reads it in a hint copies it.
        method = self.world.methods.get(call.name)
        if method is not None:
            sandbox = {"sandbox": self.sandbox} if method.takes_sandbox else {}
            answering = self._call(call.name, self.state, **method.checked(call.arguments), **sandbox)
        elif call.name in (names := await self._function_names()):
            answering = self._call("call", self.state, call.name, call.arguments, sandbox=self.sandbox)
        else:
            # The wrong name is not repeated, for the same reason.
            quoted_names = [f'"{name}"' for name in names or self.world.methods]
            if not quoted_names:
                raise ToolError("there are no tools here.")
            raise ToolError(f"the name must be {'one of ' if len(quoted_names) > 1 else ''}{', '.join(quoted_names)}.")
        limit_s = self._limit_s
        try:
            answer = await asyncio.wait_for(answering, limit_s)
        except TimeoutError:
            raise ToolError(f"{call.name} took longer than {limit_s:g} s.") from None
        if not isinstance(answer, str):
            hook = call.name if call.name in self.world.methods else "call"
            raise self.world.failure(hook, f"tool {call.name} returned {type(answer).__name__}, expected text")
        return answer

    async def _function_names(self) -> list[str]:
        """Return the names of the task's functions, and of those that became available."""
        names = [tool["function"]["name"] for tool in self.task.tools or ()]
        if _is_defined(self.world.hooks, "added_tools"):
            added = await self._call("added_tools", self.state)
            if not isinstance(added, list | tuple | set | frozenset):
                raise self.world.failure("added_tools", f"added_tools returned {type(added).__name__}, expected names")
            names += cast(Collection[str], added)
        return [*dict.fromkeys(names)]

    async def _compared(self, compare: Callable[[dict[str, bytes], bytes], _Result]) -> _Result:
        """Call a method of `Authors` with the judged parts (the sandbox's files and the state's values as text), and
        the pickled state: in a thread, unless there is neither a state nor a sandbox.

        Raises:
            WorldError: The judged state cannot be pickled.
        """
        judged, files = await self._call("judged", self.state), await self.judged_files()

        def compared() -> _Result:
            try:
                pickled, values = pickle.dumps(judged), _first_lines(_values(judged, "state"))
            except Exception as error:
                problem = f"judged returned {type(judged).__name__}, which can't be pickled ({error})"
                text = f"{problem}: return the part of the state that the verdict is about"
                hook = "judged" if _is_defined(self.world.hooks, "judged") else "start"
                raise self.world.failure(hook, text) from error
            return compare({**files, _STATE: values}, pickled)

        return compared() if judged is None and not files else await asyncio.to_thread(compared)

    async def judged_files(self) -> dict[str, bytes]:
        """Return the sandbox's files."""
        return {} if self.sandbox is None else await get_files(self.sandbox)

    async def run_program(self, program: Program) -> ProgramRun:
        """Run an agent program to its end."""
        assert self.sandbox is not None
        return await run_program(self.sandbox, program)

    async def is_over(self, messages: Sequence[Message]) -> bool:
        """Return whether the world ends the episode after the results at the end of `messages`."""
        if not _is_defined(self.world.hooks, "is_over"):
            return False
        by_name = {"messages": messages} if self.world.takes("is_over", "messages") else {}
        answer = _as_python(await self._call("is_over", self.state, **by_name))
        if not isinstance(answer, bool):
            raise self.world.failure("is_over", f"is_over returned {type(answer).__name__}, expected True or False")
        return answer

    async def user_reply(self, messages: Sequence[Message]) -> str | None:
        """Return the user's reply to the last message; None ends the episode."""
        reply = await self._call("user_reply", self.task, self.state, messages)
        if not isinstance(reply, str | None):
            raise self.world.failure("user_reply", f"user_reply returned {type(reply).__name__}, expected text or None")
        return reply

    async def collect(self, messages: Sequence[Message] = ()) -> Left:
        """Return the final state, the sandbox's files, and the verdict."""
        made_by = self._authors.left() if self._authors.changes else None
        left = Left(self.state, await self.judged_files(), made_by, tuple(messages))
        return replace(left, verdict=await self.world.judge(self.task, left, self.sandbox, self._running))


_STATE = "\0"
"""Name of the state among the judged parts; no file can have it."""


def _as_python(value: Any) -> Any:
    """Return a single number of numpy or torch as one of Python."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _values(value: Any, path: str, depth: int = 20) -> Iterator[str]:
    """Yield a line for each value nested in `value`, under a path that omits indices of lists."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, str):
        yield from (f"{path}: {line}" for line in value.split("\n"))
    elif isinstance(value, Mapping):
        inner = ((f"{path}.{key}", part) for key, part in cast(Mapping[Any, Any], value).items())
    elif isinstance(value, list | tuple | set | frozenset):
        inner = ((f"{path}[]", part) for part in cast(Collection[Any], value))
    elif hasattr(value, "__dict__") and not isinstance(value, Enum | type):
        inner = ((path, vars(value)),)
    else:
        yield f"{path}: {value!r}"
    for inner_path, part in inner if depth else ():
        yield from _values(part, inner_path, depth - 1)


def _first_lines(lines: Iterable[str]) -> bytes:
    """Return a text of the lines, cut where `Authors` no longer compares them: objects may refer to each other."""
    text = bytearray()
    for line in lines:
        text += f"{line}\n".encode(errors="replace")
        if len(text) > MOST_BYTES:
            break
    return bytes(text)
