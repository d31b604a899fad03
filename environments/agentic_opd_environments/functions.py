"""The world of function calls: a task brings its functions, the agent calls them, and the calls are judged.

    question, functions -> call+ -> answered as by a real environment -> verdict by BFCL's rules

Tasks come in the format of BFCL, the Berkeley Function-Calling Leaderboard: files of questions and of answers, as JSON
lines. A question of one turn brings its functions: calls with an unknown function or with missing, unknown or mistyped
parameters are answered with what is wrong, and do not count; all others count. A conversation of several user turns
names the classes of stateful APIs, which run in the sandbox (conversations.py).
"""

import json
import random
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from agentic_opd.core.errors import ConfigError, DatasetError
from agentic_opd.core.files import check_regular
from agentic_opd.core.text import read_json, text_lines
from agentic_opd.core.types import Message, Task
from agentic_opd.worlds.config import WorldConfig
from agentic_opd.worlds.custom import Checks, CustomWorld, ToolError
from agentic_opd.worlds.schema import complete_schema, signature
from agentic_opd_environments.calls import (
    Answer,
    Function,
    call_problems,
    is_mistyped,
    json_schema,
    type_in_words,
    verdict,
)
from agentic_opd_environments.conversations import (
    ApiFiles,
    ConversationCase,
    ConversationReader,
    PlayedConversation,
    check_folder,
)

_ADD: Function = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first number."},
            "b": {"type": "integer", "description": "The second number."},
        },
        "required": ["a", "b"],
    },
}


@dataclass(frozen=True, slots=True)
class FunctionCase:
    functions: Mapping[str, Function]
    """Name -> BFCL's schema."""
    answers: Sequence[Answer]
    schemas: Sequence[dict[str, Any]]
    """JSON schemas of the functions."""
    untyped: frozenset[tuple[str, str]]
    """Functions and parameters of which a right value contradicts the schema: their types are not checked."""


@dataclass(slots=True)
class Calls:
    """State of one episode: the calls of the agent."""

    case: FunctionCase
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list[tuple[str, dict[str, Any]]])


class FunctionsWorld(CustomWorld):
    """Function calls, judged by BFCL's rules; see docs/functions.md."""

    system_prompt = (
        "Answer the request by calling the functions that it needs, with the values that it gives. One turn may hold "
        "several calls. After their results, answer with one short sentence and no call."
    )

    def __init__(
        self,
        questions: str | Sequence[str],
        answers: str | Sequence[str] | None = None,
        held_out: Annotated[float, Field(ge=0, le=1)] = 0.2,
        seed: int = 0,
        split_file: str | None = None,
        example: bool = False,
        max_turns: Annotated[int, Field(ge=1)] = 3,
        in_prompt: bool | Literal["signatures"] = False,
        apis: str | None = None,
        documents: str | None = None,
        held_out_classes: Sequence[str] = (),
        max_steps: Annotated[int, Field(ge=1)] = 20,
        stop_when_wrong: bool = False,
        config: WorldConfig | None = None,
    ) -> None:
        """Store the settings; nothing is read yet.

        Args:
            questions: Files of questions: JSON lines with `id`, `question` and `function`, or with `involved_classes`
                and `initial_config` for a conversation.
            answers: Files of answers: JSON lines with `id` and `ground_truth`. Unset: no call is the right answer.
            held_out: Share of the tasks that is held out for evaluation, in [0, 1]; with `held_out_classes`, of the
                questions of one turn.
            seed: Seed of the split.
            split_file: JSON file of the split, read if it exists and written otherwise. Unset: no file.
            example: Put an example turn of another function before each question, for a small model.
            in_prompt: Put the functions' signatures and descriptions before each question, for
                `renderer.tool_format: prompt`: short prompts that share their beginning. `signatures`: the signatures
                alone.
            max_turns: Turns of an episode for a question of one turn; with 1, the first turn's calls are judged.
            apis: Folder of the conversations' APIs: Python files with the classes. Unset: there are no conversations.
            documents: Folder of the functions' documents: NAME.json for the classes in NAME.py. Unset: that of `apis`.
            held_out_classes: Classes of APIs; the conversations with one of them are held out.
            max_steps: Turns with calls for each turn of the user; with more, the conversation ends.
            stop_when_wrong: End a conversation after its first wrong user turn; later ones count for no score.
            config: Settings of the environment: sandbox and time limit of a call; None: the defaults.
        """
        self._questions = [questions] if isinstance(questions, str) else [*questions]
        self._answers = [answers] if isinstance(answers, str) else [*(answers or ())]
        self._held_out, self._seed, self._split_file = held_out, seed, split_file
        self._in_prompt = in_prompt
        header = f"{self._as_text(_schema(_ADD))}\n\n" if in_prompt else ""
        self._examples = _example(max_turns, header) if example else []
        self._max_turns, self._max_steps, self._stop_when_wrong = max_turns, max_steps, stop_when_wrong
        self._held_out_classes = frozenset(held_out_classes)
        self._config = config or WorldConfig()
        if apis is None and (documents is not None or held_out_classes):
            raise ConfigError("env.world: documents and held_out_classes belong to apis, which is unset")
        self._api_files = None
        if apis is not None:
            folder = check_folder("apis", apis)
            self._api_files = ApiFiles(folder, folder if documents is None else check_folder("documents", documents))
        self._split: tuple[list[Task], list[Task]] | None = None

    def tasks(self) -> list[Task]:
        """Return the tasks to train on."""
        return self._read()[0]

    def eval_tasks(self) -> list[Task]:
        """Return the tasks to evaluate on: they share no function's name and no question with the others."""
        return self._read()[1]

    def start(self, task: Task) -> Any:
        """Return no calls; for a conversation, start its sandbox."""
        if isinstance(task.data, ConversationCase):
            num_example_steps = sum(bool(message.get("tool_calls")) for message in task.examples)
            return PlayedConversation.begin(task.data, self._max_steps, self._config, num_example_steps)
        return Calls(task.data)

    def call(
        self, state: Calls | PlayedConversation, name: str, arguments: dict[str, Any]
    ) -> str | Coroutine[Any, Any, str]:
        """Record a call that fits its function's schema; run that of a conversation."""
        if isinstance(state, PlayedConversation):
            return _called(state, name, arguments)
        untyped = {parameter for function, parameter in state.case.untyped if function == name}
        if problems := call_problems(state.case.functions[name], arguments, untyped):
            raise ToolError(f"{name} can't be called like this: {'; '.join(problems)}.")
        state.calls.append((name, arguments))
        return '{"status": "ok"}'

    def added_tools(self, state: Calls | PlayedConversation) -> list[str]:
        """Return the functions that the user has brought during the conversation."""
        return state.added_functions if isinstance(state, PlayedConversation) else []

    def judged(self, state: Calls | PlayedConversation) -> Any:
        """Return the calls."""
        return state.judged if isinstance(state, PlayedConversation) else state.calls

    def is_over(self, state: Calls | PlayedConversation, messages: Sequence[Message]) -> bool:
        """Return whether a user turn of a conversation has taken more than `max_steps` steps."""
        return isinstance(state, PlayedConversation) and state.exceeds_steps(messages)

    async def user_reply(
        self, task: Task, state: Calls | PlayedConversation, messages: Sequence[Message]
    ) -> str | None:
        """Return the user's next message of a conversation, with the functions that it brings."""
        if not isinstance(state, PlayedConversation):
            return None
        reply = state.next_message(messages)
        if reply is None or (self._stop_when_wrong and await state.is_wrong()):
            return None
        message, functions = reply
        if not functions:
            return message
        schemas = [_schema(function) for function in functions]
        texts = [
            self._as_text(schema) if self._in_prompt else json.dumps(schema, ensure_ascii=False) for schema in schemas
        ]
        return "\n".join(["From now on there are also these functions:", *texts, message or "Try it with them."])

    def verify(self, task: Task, state: Calls | PlayedConversation) -> Any:
        """Judge the calls; the one check passes if they are right. Those of a conversation: one check a user turn."""
        if isinstance(state, PlayedConversation):
            return state.verdict()
        wrong = verdict(state.case.functions, state.calls, state.case.answers)
        if not state.calls and state.case.answers:
            wrong = " Or: ".join(map(_as_it_must_be, state.case.schemas))
        text = wrong or "The calls are right."
        return Checks(wrong is None, 1, f"{text} Right: {json.dumps(state.case.answers, ensure_ascii=False)}", text)

    async def close(self, state: Calls | PlayedConversation) -> None:
        """End a conversation's sandbox."""
        if isinstance(state, PlayedConversation):
            await state.close()

    def _read(self) -> tuple[list[Task], list[Task]]:
        if self._split is None:
            answers = {row["id"]: row.get("ground_truth") for path in self._answers for row in _rows(path)}
            reader = None if self._api_files is None else ConversationReader(self._api_files)
            tasks = [
                _conversation(path, row, answers.get(row["id"]), reader)
                if "involved_classes" in row
                else _task(path, row, answers.get(row["id"]) if self._answers else [])
                for path in self._questions
                for row in _rows(path)
            ]
            train, held_out = self._divided(tasks)
            self._split = [*map(self._as_asked, train)], [*map(self._as_asked, held_out)]
        return self._split

    def _as_asked(self, task: Task) -> Task:
        """Return the task with the options' prompt, examples and limit."""
        limits = {"max_turns": self._max_turns}
        if isinstance(task.data, ConversationCase):
            limits = {"max_turns": (self._max_steps + 1) * len(task.data.messages)}
        if task.messages:
            return replace(task, limits=limits)
        lines = [*map(self._as_text, task.tools or ()), ""] if self._in_prompt else []
        return replace(task, prompt="\n".join([*lines, task.prompt]), examples=self._examples, limits=limits)

    def _as_text(self, schema: Mapping[str, Any]) -> str:
        return signature(schema) if self._in_prompt == "signatures" else described(schema)

    def _divided(self, tasks: Sequence[Task]) -> tuple[list[Task], list[Task]]:
        """Return the training and held-out tasks; read or write the split file."""
        path = None if self._split_file is None else Path(self._split_file)
        if path is not None and path.exists():
            try:
                check_regular(path)
                split = read_json(path.read_bytes())
                training, held_out = {*split["train"]}, {*split["eval"]}
            except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
                raise DatasetError(f"split_file {str(path)!r} can't be read: {error!r}") from error
            if unknown := {task.task_id for task in tasks} ^ (training | held_out):
                raise DatasetError(f"split_file {str(path)!r} is of other questions: {min(unknown)!r} is not in both")
        else:
            held_out = self._held_out_ids(tasks)
            ids = [task.task_id for task in tasks]
            parts = {"train": [i for i in ids if i not in held_out], "eval": [i for i in ids if i in held_out]}
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({"seed": self._seed, "held_out": self._held_out, **parts}, indent=1) + "\n")
        train = [task for task in tasks if task.task_id not in held_out]
        return train, [task for task in tasks if task.task_id in held_out]

    def _held_out_ids(self, tasks: Sequence[Task]) -> set[str]:
        if not self._held_out_classes:
            return held_out_ids(tasks, self._held_out, self._seed)
        classes = {task.task_id: {api.name for api in task.data.apis} for task in tasks if _is_conversation(task)}
        if unknown := self._held_out_classes - {name for names in classes.values() for name in names}:
            raise DatasetError(f"held_out_classes: no conversation has the class {min(unknown)!r}")
        chosen = {task_id for task_id, names in classes.items() if names & self._held_out_classes}
        if len(chosen) == len(classes):
            raise DatasetError(f"held_out_classes: {sorted(self._held_out_classes)} leave no conversation to train on")
        return chosen | held_out_ids([task for task in tasks if not _is_conversation(task)], self._held_out, self._seed)


async def _called(conversation: PlayedConversation, name: str, arguments: dict[str, Any]) -> str:
    """Run a call of a conversation; an error about its arguments ends with the function's signature.

    Raises:
        ToolError, DatasetError, SandboxError: as `Conversation.call`.
    """
    try:
        return await conversation.call(name, arguments)
    except ToolError as error:
        function = conversation.case.functions[name]
        if not call_problems(function, arguments):
            raise
        raise ToolError(f"{str(error).rstrip('.')}. It must be {signature(_schema(function))}.") from error


def _is_conversation(task: Task) -> bool:
    return isinstance(task.data, ConversationCase)


def _as_it_must_be(schema: Mapping[str, Any]) -> str:
    """Return what a call of the function must hold.

    Written like the call, and without a negative sentence: a small model that reads one in a hint begins to explain.
    """
    function = schema["function"]
    typed = [
        f'"{name}" ({words})' if (words := type_in_words(parameter)) else f'"{name}"'
        for name, parameter in function["parameters"].get("properties", {}).items()
    ]
    parameters = f", the parameters {', '.join(typed)}." if typed else ", without parameters."
    return f'The name must be "{function["name"]}"{parameters}'


def described(schema: Mapping[str, Any]) -> str:
    """Return a function as text: its signature and description, then a line for each parameter's description."""
    function = schema["function"]
    lines = [f"{signature(schema)}: {function['description']}"]
    for name, parameter in function["parameters"]["properties"].items():
        lines += [f"  {name}: {parameter['description']}"] if parameter.get("description") else []
    return "\n".join(lines)


def _example(max_turns: int, header: str) -> list[dict[str, Any]]:
    """Return an example conversation of another function; with one turn, it ends with the call."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"{header}What is 2 plus 3?"},
        {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}]},
    ]
    closing: list[dict[str, Any]] = [
        {"role": "tool", "content": '{"status": "ok"}'},
        {"role": "assistant", "content": "Done."},
    ]
    return messages if max_turns == 1 else [*messages, *closing]


def held_out_ids(tasks: Sequence[Task], share: float, seed: int) -> set[str]:
    """Return ids of at most `share` of the tasks, such that they share no function's name and no question with others.

    Tasks that share one belong together; such groups are taken in a seeded order while they fit.
    """
    group = {task.task_id: task.task_id for task in tasks}

    def root(task_id: str) -> str:
        while group[task_id] != task_id:
            task_id = group[task_id] = group[group[task_id]]
        return task_id

    first: dict[tuple[str, str], str] = {}
    for task in tasks:
        case = cast(FunctionCase | ConversationCase, task.data)
        for key in (*(("function", name) for name in case.functions), ("question", " ".join(task.prompt.split()))):
            group[root(task.task_id)] = root(first.setdefault(key, task.task_id))
    members: dict[str, list[str]] = defaultdict(list)
    for task in tasks:
        members[root(task.task_id)].append(task.task_id)
    order = sorted(members.values())
    random.Random(f"functions/{seed}").shuffle(order)
    chosen: set[str] = set()
    for ids in order:
        if len(chosen) + len(ids) <= share * len(tasks):
            chosen.update(ids)
    return chosen


def _rows(path: str) -> Iterator[dict[str, Any]]:
    try:
        check_regular(Path(path), is_read=True)
        lines = text_lines(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path!r} can't be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = read_json(line)
            except (ValueError, RecursionError) as error:
                raise DatasetError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(row, dict) or not isinstance(cast(dict[str, Any], row).get("id"), str):
                raise DatasetError(f"{path}, line {number}: expected an object with `id`")
            yield cast(dict[str, Any], row)


def _schema(function: Function) -> dict[str, Any]:
    """Return BFCL's schema of a function in OpenAI's format."""
    return complete_schema({**function, "parameters": json_schema(function["parameters"])})


def _conversation(path: str, row: dict[str, Any], right_calls: Any, reader: ConversationReader | None) -> Task:
    where = f"{path}: question {row['id']!r}"
    if reader is None:
        raise ConfigError(f"{where} is a conversation over APIs: env.world.apis must name their folder")
    if right_calls is None:
        raise DatasetError(f"{where} has no line in the files of answers")
    try:
        case = reader.read(row, right_calls)
        schemas = [_schema(function) for function in case.first_functions]
    except KeyError as error:
        raise DatasetError(f"{where}: no field or type {error}; types are those of Python and JSON") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise DatasetError(f"{where}: {error}") from error
    right = "\n".join(call for calls in right_calls for call in calls)
    return Task(f"functions/{row['id']}", case.messages[0], hidden_tests=right, tools=schemas, data=case)


def _task(path: str, row: dict[str, Any], answers: Any) -> Task:
    where = f"{path}: question {row['id']!r}"
    if row["id"].startswith("live_relevance"):
        raise DatasetError(
            f"{where}: any call is right there, which this world can't judge; leave BFCL's relevance out"
        )
    if answers is None:
        raise DatasetError(f"{where} has no line in the files of answers")
    try:
        turns = row["question"]
        if len(turns) != 1 or not all(isinstance(message, dict) for message in turns[0]):
            raise DatasetError(
                f"{where} has {len(turns)} turns of the user, expected one, or a conversation with `involved_classes`"
            )
        functions = {
            function["name"]: {**function, "parameters": {"properties": {}, **function["parameters"]}}
            for function in row["function"]
        }
        schemas = [_schema(function) for function in functions.values()]
        for answer in answers:
            ((name, allowed),) = answer.items()
            assert name in functions, f"the answer calls {name}, which is not one of its functions"
            assert all(isinstance(values, list) for values in allowed.values()), f"{name}: allowed values are no list"
        untyped = frozenset(
            (name, parameter)
            for answer in answers
            for name, allowed in answer.items()
            for parameter, values in allowed.items()
            for schema in [functions[name]["parameters"]["properties"].get(parameter)]
            if schema and any(value != "" and is_mistyped(schema, value) for value in values)
        )
    except KeyError as error:
        raise DatasetError(f"{where}: no field or type {error}; types are those of Python and JSON") from error
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        raise DatasetError(f"{where}: {error}") from error
    messages = turns[0]
    is_plain = [message["role"] for message in messages] == ["user"]
    return Task(
        f"functions/{row['id']}",
        messages[0]["content"] if is_plain else "",
        hidden_tests=repr(answers) if answers else None,
        messages=() if is_plain else messages,
        tools=schemas,
        data=FunctionCase(functions, answers, schemas, untyped),
        needs_no_call=not answers,
    )
