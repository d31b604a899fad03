"""The world of function calls: a task brings its functions, the agent calls them, and the calls are judged.

    question, functions -> call+ -> answered as by a real environment -> verdict by BFCL's rules

Tasks come in the format of BFCL, the Berkeley Function-Calling Leaderboard: files of questions and of answers, as JSON
lines. Calls with an unknown function or with missing, unknown or mistyped parameters are answered with what is wrong,
and do not count; all others count.
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field

from agentic_opd.core.errors import DatasetError
from agentic_opd.core.files import check_regular
from agentic_opd.core.text import read_json, text_lines
from agentic_opd.core.types import Task
from agentic_opd.worlds.custom import Checks, CustomWorld, ToolError
from agentic_opd.worlds.schema import complete_schema, signature
from agentic_opd_environments.calls import Answer, call_problems, is_mistyped, json_schema, type_in_words, verdict

Function = dict[str, Any]
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
        in_prompt: bool = False,
    ) -> None:
        """Store the settings; nothing is read yet.

        Args:
            questions: Files of questions: JSON lines with `id`, `question` and `function`.
            answers: Files of answers: JSON lines with `id` and `ground_truth`. Unset: no call is the right answer.
            held_out: Share of the tasks that is held out for evaluation, in [0, 1].
            seed: Seed of the split.
            split_file: JSON file of the split, read if it exists and written otherwise. Unset: no file.
            example: Put an example turn of another function before each question, for a small model.
            in_prompt: Put the functions' signatures and descriptions before each question, for `tool_format: prompt`:
                short prompts that share their beginning.
            max_turns: Turns of an episode; with 1, the first turn's calls are judged.
        """
        self._questions = [questions] if isinstance(questions, str) else [*questions]
        self._answers = [answers] if isinstance(answers, str) else [*(answers or ())]
        self._held_out, self._seed, self._split_file = held_out, seed, split_file
        self._in_prompt = in_prompt
        self._examples = _example(max_turns, in_prompt=in_prompt) if example else []
        self._max_turns = max_turns
        self._split: tuple[list[Task], list[Task]] | None = None

    def tasks(self) -> list[Task]:
        """Return the tasks to train on."""
        return self._read()[0]

    def eval_tasks(self) -> list[Task]:
        """Return the tasks to evaluate on: they share no function's name and no question with the others."""
        return self._read()[1]

    def start(self, task: Task) -> Calls:
        """Return no calls."""
        return Calls(task.data)

    def call(self, state: Calls, name: str, arguments: dict[str, Any]) -> str:
        """Record a call that fits its function's schema."""
        untyped = {parameter for function, parameter in state.case.untyped if function == name}
        if problems := call_problems(state.case.functions[name], arguments, untyped):
            raise ToolError(f"{name} can't be called like this: {'; '.join(problems)}.")
        state.calls.append((name, arguments))
        return '{"status": "ok"}'

    def judged(self, state: Calls) -> list[tuple[str, dict[str, Any]]]:
        """Return the calls."""
        return state.calls

    def verify(self, task: Task, state: Calls) -> Checks:
        """Judge the calls; the one check passes if they are right."""
        wrong = verdict(state.case.functions, state.calls, state.case.answers)
        if not state.calls and state.case.answers:
            wrong = " Or: ".join(map(_as_it_must_be, state.case.schemas))
        text = wrong or "The calls are right."
        return Checks(wrong is None, 1, f"{text} Right: {json.dumps(state.case.answers, ensure_ascii=False)}", text)

    def _read(self) -> tuple[list[Task], list[Task]]:
        if self._split is None:
            answers = {row["id"]: row.get("ground_truth") for path in self._answers for row in _rows(path)}
            tasks = [
                _task(path, row, answers.get(row["id"]) if self._answers else [])
                for path in self._questions
                for row in _rows(path)
            ]
            train, held_out = self._divided(tasks)
            self._split = [*map(self._as_asked, train)], [*map(self._as_asked, held_out)]
        return self._split

    def _as_asked(self, task: Task) -> Task:
        """Return the task with the options' prompt, examples and limit."""
        limits = {"max_turns": self._max_turns}
        if task.messages:
            return replace(task, limits=limits)
        lines = [*map(described, task.tools or ()), ""] if self._in_prompt else []
        return replace(task, prompt="\n".join([*lines, task.prompt]), examples=self._examples, limits=limits)

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
            held_out = held_out_ids(tasks, self._held_out, self._seed)
            ids = [task.task_id for task in tasks]
            parts = {"train": [i for i in ids if i not in held_out], "eval": [i for i in ids if i in held_out]}
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({"seed": self._seed, "held_out": self._held_out, **parts}, indent=1) + "\n")
        train = [task for task in tasks if task.task_id not in held_out]
        return train, [task for task in tasks if task.task_id in held_out]


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


def _example(max_turns: int, *, in_prompt: bool) -> list[dict[str, Any]]:
    """Return an example conversation of another function; with one turn, it ends with the call."""
    header = f"{described({'type': 'function', 'function': _ADD})}\n\n" if in_prompt else ""
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
        case = cast(FunctionCase, task.data)
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
            raise DatasetError(f"{where} has {len(turns)} turns of the user; this world has one")
        functions = {
            function["name"]: {**function, "parameters": {"properties": {}, **function["parameters"]}}
            for function in row["function"]
        }
        schemas = [
            complete_schema({**function, "parameters": json_schema(function["parameters"])})
            for function in functions.values()
        ]
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
    )
