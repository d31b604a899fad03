r"""No reader of foreign text takes more than linear time.

    source code --regexes--> every regex of the package, with the operations that use it
    a regex --openings--> the texts that its parts match, alone and behind the parts before them
    an opening, repeated up to 4,096 characters, closed and unclosed --> processor time, for lengths that grow

A new regex is covered by itself. A new parser is named in `READERS`.
"""

import ast
import gc
import importlib
import json
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import product
from pathlib import Path
from re import _constants as code  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser as parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any, NamedTuple

import pytest

import agentic_opd
import agentic_opd_environments
from agentic_opd.core import text as core_text
from agentic_opd.core.types import Evidence, HindsightPair
from agentic_opd.distill import evidence
from agentic_opd.distill import leaks as leak_filter
from agentic_opd.distill.hints import Questions, parse_step_vote, parse_vote
from agentic_opd.distill.leaks import in_digits, leaks
from agentic_opd.distill.protocol import without_marks
from agentic_opd.distill.trajectory import Window, parse_answer
from agentic_opd.gateway.answers import UnrecordableError, read_answers
from agentic_opd.gateway.choice import held_back
from agentic_opd.logs.secrets import mask_secrets
from agentic_opd.report import transcript
from agentic_opd.rollout import tool_formats
from agentic_opd.training.train_when import read_counts
from agentic_opd.worlds.authors import Authors
from agentic_opd.worlds.coding import grading
from agentic_opd.worlds.coding.hidden_tests.checks import instrument, shown_checks
from agentic_opd.worlds.coding.hidden_tests.complete import complete_tests
from agentic_opd_environments import calls
from agentic_opd_environments.harbor import compose, verdict
from agentic_opd_environments.harbor import tasks as harbor_tasks
from agentic_opd_environments.harbor.dockerfile import base_images
from agentic_opd_environments.harbor.images import build_failure
from agentic_opd_environments.sql.order import is_ordered

pytestmark = pytest.mark.slow
ROOT = Path(agentic_opd.__file__).parent
PACKAGES = {Path(package.__file__).parent: package.__name__ for package in (agentic_opd, agentic_opd_environments)}
"""Folder -> name; the names of regexes begin below it."""
Read = Callable[[str], object]

# ------------------------------------------------------------------------------------------------------------ the time


def seconds(read: Read, text: str) -> float:
    """Return the processor time of a call."""
    start = time.process_time()
    read(text)
    return time.process_time() - start


def slowness(read: Read, make: Callable[[int], str], lengths: Sequence[int], floor: float) -> str | None:
    """Return the times of a reader if they grow more than twice as fast as the length; None if they do not.

    `make` makes a text of a length. A time of `floor` seconds or less is not compared. The shortest texts come first,
    because a regex may take exponential time.
    """
    taken = [0.0]
    for length, shorter in zip(lengths, (lengths[0], *lengths), strict=False):
        text = make(length)
        limit = floor + 2 * length / shorter * taken[-1]
        least = seconds(read, text)
        for _ in range(5):  # Another process may have slowed the measurement down.
            if least > limit:
                least = min(least, seconds(read, text))
        taken.append(least)
        if least > limit:
            return f"{make(30)[:30]!r}: " + ", ".join(f"{1000 * one:.2f} ms" for one in taken[1:])
    return None


@pytest.fixture(autouse=True)
def _no_garbage_collector() -> Iterator[None]:
    """What else this process holds makes the collector slow."""
    gc.disable()
    yield
    gc.enable()


# ------------------------------------------------------------------------------------------------------- hostile lines

SIGNS = (
    *"[](){}<>|/\\'\"`*_#-+=.,;:!?%&^~$@ \n\t\r\x0b0a1A\0\u2028\ufeff\u200b\ud83d\udc4d\U0001f600é",
    *("ab ", "1, ", "1 2", "[]", "()", "[[]", "[ ", "[(", "a.", "a-", "\\'", '\\"', "\r\n", "1_", "1e", "0.", "a="),
    *("'a'", '"a" ', "''", "\\ud83d", "<!--", "```", "%s", "${", "{{", "a[", "a(", "-1", ", ,", "9" * 40 + " "),
    *(
        "<|",
        "<think>",
        "</think>",
        "<tool_call>",
        "[TOOL_CALLS]",
        "[INST]",
        "<s>",
        "<|im_end|>",
        "]~b]",
        "[HINT_START]",
    ),
)
"""Signs, half pairs, beginnings of values, and control tokens of models."""

BEGINNINGS = (
    *("one ", "twenty ", "no ", "empty ", "a is ", "minus ", "e.g. ", "Error", "and ", "x is 5. ", "345 ", "'a', "),
    *(
        "assert f(1) == 2\n",
        "x = [1, 2]\n",
        "a.b = 1\n",
        "def f(): pass\n",
        "if a: pass\nelse: pass\n",
        "x = y\ny = x\n",
    ),
    *("try: f(1)\nexcept E: pass\n", "with a: f(1)\n", "elif a: pass\n", "class A:\n ", "@a\n", "\\\n", "'''", "f'{"),
    *(
        "not ",
        "a and ",
        "lambda: ",
        "a if b else ",
        "a := ",
        "a < ",
        "(x, ",
        "[x, ",
        "{1: ",
        "f(",
        "x[",
        "[" * 50 + "]" * 50,
    ),
    *('{"name": ', '{"a": {"b": ', '{"type": "function", "name": ', "[TOOL_CALLS][{", "<tool_call>{", "<tool_call>["),
    *("<parameter=", "<parameter=a>", "<parameter name=", "<invoke name=", "<arg_key>", "</arg_key>", "</"),
    *(
        "<arg_key>a</arg_key><arg_value>",
        "<arg_value>",
        "(SELECT ",
        "order by ",
        "\\boxed{",
        "\\boxed{1}",
        "[HINT_END]",
    ),
    *(
        "\n# Task",
        "## ",
        "a = [[",
        "[[a]]\n",
        "FAILED a - b\n",
        "def g(",
        "g(1)",
        "${a",
        "<!-- canary",
        "((a))",
        "a.b.",
    ),
)
"""Beginnings of numbers in words, statements, expressions, calls, queries and marks."""

COUNTED = (
    *("a{i} = a{j}\n", "a{j} = a{i}\n", "assert f({i}) == {j}\n", "assert f('w{i}', [{i}, {j}]) == 'x{j}'\n"),
    *(
        "def f{i}(x): return f{j}(x)\n",
        "class A{i}(A{j}): pass\n",
        "try: f({i})\nexcept E{i}Error: pass\n",
        "({i}, {j}), ",
    ),
    *(
        "def test_{i}():\n    assert f({i}) == {j}\n",
        "if f({i}) == {j}:\n    assert f({j}) == 1\n",
        "x{i}(",
        "f(a{i}={j}), ",
    ),
    *('"k{i}": {j}, ', '{{"name": "n{i}", "a": ', "<parameter=a{i}>{j}\n", "<arg_key>{i}</arg_key>", "a{i} = 1\n"),
    *("w{i} ", "{i} {j}. ", "<a{i}>", "data-{i}: {j}\n", "Say w{i}. ", "f({i}) is {j}. ", "[a{i}](b{j})"),
)
"""Texts with numbers: different names, values, statements and sentences."""


NESTED = (
    *(("(", ")"), ("[", "]"), ("{", "}"), ("(SELECT a FROM ", ")"), ('{"name": ', "}"), ('{"a": ', "}"), ("f(", ")")),
    *(("[f(a=", ")]"), ("((a)", ")"), ("<a>", "</a>"), ("(x, ", ")"), ("[[], ", "]"), ("<tool_call>", "</tool_call>")),
    *(('"', "'"), ("'", "\\'"), ("[HINT_START]", "[HINT_END]"), ("<parameter=a>", "</parameter>"), ("\\", '"')),
)
"""Openings that are all closed in the end."""


def repeated(opening: str, length: int) -> str:
    """Return an opening, repeated; `{i}` and `{j}` in it are a number and the next one."""
    if "{i}" not in opening:
        return opening * max(length // len(opening), 1)
    return "".join(opening.format(i=i, j=i + 1) for i in range(max(length // len(opening), 1)))


def sample(parts: Any, texts: set[str]) -> str:
    """Return a text that a parsed regex matches, and add its parts to `texts`: each alone, and behind those before."""
    text = ""
    for kind, value in parts:
        pieces = [""]
        if kind in (code.LITERAL, code.NOT_LITERAL):
            texts.add(chr(value))
            pieces = [chr(value) if kind is code.LITERAL else "\0"]
        elif kind is code.ANY:
            pieces = ["a"]
        elif kind is code.IN:
            pieces = members(value)
            texts.update(pieces)
        elif kind is code.BRANCH:
            pieces = [sample(branch, texts if index < 6 else set()) for index, branch in enumerate(value[1])][:6]
        elif kind in (code.SUBPATTERN, code.ATOMIC_GROUP):
            pieces = [sample(value[-1] if kind is code.SUBPATTERN else value, texts)]
        elif kind in (code.MAX_REPEAT, code.MIN_REPEAT, code.POSSESSIVE_REPEAT):
            pieces = [sample(value[2], texts)]
            texts.update((*pieces, text + pieces[0]))
            pieces = [pieces[0] * value[0]]
        elif kind in (code.ASSERT, code.ASSERT_NOT):
            texts.add(sample(value[1], texts))
        texts.update(text + piece for piece in pieces[:2])
        text += pieces[0]
    return text


def members(parts: Any) -> list[str]:
    """Return some letters of a parsed set of letters."""
    of_category = {
        **{code.CATEGORY_DIGIT: "1", code.CATEGORY_SPACE: " \n", code.CATEGORY_WORD: "a_"},
        **{code.CATEGORY_NOT_DIGIT: "a", code.CATEGORY_NOT_SPACE: "a-", code.CATEGORY_NOT_WORD: "- "},
    }
    letters = list[str]()
    for kind, value in parts:
        if kind is not code.NEGATE:
            letters += (
                of_category[value] if kind is code.CATEGORY else map(chr, value if kind is code.RANGE else [value])
            )
    if parts[0][0] is code.NEGATE:
        return [letter for letter in "a1 -\n<[(\0" if letter not in letters][:2]
    return letters


# --------------------------------------------------------------------------------------------------- regexes in source


class Regex(NamedTuple):
    pattern: re.Pattern[Any]
    operations: frozenset[str]


OPERATIONS = {"search": 2, "match": 2, "fullmatch": 2, "findall": 2, "finditer": 2, "split": 3, "sub": 4, "subn": 4}
"""Functions of `re`, with the position of their flags."""
OF_VALUES: dict[str, Any] = {
    "core.metric": r"turns/\d+/\d+",
    "distill.judge": r"\bmax_tokens\b",
    "gateway.grammar": r"(<tool_call>|</tool_call>|<think>)",
    "rollout.tool_formats": r"(?:<tool_call>|\[TOOL_CALLS\]|```(?:json)?)\s*(?=\[\s*\{)|functools(?=\[)",
    "worlds.coding.verifier.verify": rb"(?<!\w)name(?!\w)",
    "runs.transcript": r"<\|im_end\|>\n<\|im_start\|>assistant\n|<\|im_end\|>\n<\|im_start\|>user\n",
}
"""Module -> an example of the regex that it makes of values."""


def _shortened(text: str) -> object:
    """Match as `serving.web.parse` does, which shortens the text; that module takes seconds to import."""
    return regexes()["serving.web._PATH"].pattern.fullmatch(text[:300])


GUARDED: dict[str, Read] = {"serving.web._PATH": _shortened}
"""Regexes that are linear in what a reader passes to them, but not in every text: the reader is measured instead."""


@cache
def regexes() -> dict[str, Regex]:
    """Return every regex of the packages by its name, or by its line if it has none."""
    sources = {path: path.read_text() for folder in PACKAGES for path in sorted(folder.rglob("*.py"))}
    uses: dict[str, set[str]] = {}
    for name, operation in re.findall(rf"\b(_?[A-Z][A-Z_]+)\.({'|'.join(OPERATIONS)})\b", "".join(sources.values())):
        uses.setdefault(name, set()).add(operation)
    return {name: regex for path, source in sources.items() for name, regex in of_source(path, source, uses)}


def of_source(path: Path, source: str, uses: dict[str, set[str]]) -> Iterator[tuple[str, Regex]]:
    """Yield the regexes of a file. Operations that are unknown may be any."""
    if re.search(r"\bre\b", source) is None:
        return  # Most files: reading their trees would take seconds.
    folder = next(folder for folder in PACKAGES if path.is_relative_to(folder))
    module, nodes = ".".join(path.relative_to(folder).with_suffix("").parts), [*ast.walk(ast.parse(source))]
    names: dict[ast.expr, str] = {}
    for node in nodes:
        assert not (isinstance(node, ast.ImportFrom) and node.module == "re"), (
            f"{path}: write `import re`, and `re.` here"
        )
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = (
                zip(target.elts, value.elts, strict=True) if is_tuple(target) and is_tuple(value) else [(target, value)]
            )
            names |= {regex: ast.unparse(name) for name, regex in pairs}
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("re"), attr=function), args=[first, *_]):
                pass
            case _:
                continue
        if function not in ("compile", *OPERATIONS):
            continue
        flags = [word.value for word in node.keywords if word.arg == "flags"]
        flags += node.args[1 if function == "compile" else OPERATIONS[function] :]
        space: dict[str, Any] = {"re": re}
        if not isinstance(first, ast.Constant):
            space = vars(importlib.import_module(f"{PACKAGES[folder]}.{module}"))
        try:
            pattern = re.compile(evaluated(first, space), evaluated(flags[0], space) if flags else 0)
        except NameError:
            assert module in OF_VALUES, f"{path}:{node.lineno}: give an example of this regex in OF_VALUES"
            pattern = re.compile(OF_VALUES[module])
        name = names.get(node, "")
        operations = uses.get(name, {*OPERATIONS}) if function == "compile" else {function}
        yield f"{module}.{name or f'line {node.lineno}'}", Regex(pattern, frozenset(operations))


def is_tuple(node: ast.expr) -> Any:
    return isinstance(node, ast.Tuple)


def evaluated(node: ast.expr, space: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(node), "a regex", "eval"), space)


@pytest.mark.parametrize("name", regexes())
def test_a_regex_takes_linear_time(name: str) -> None:
    pattern, operations = regexes()[name]

    def read(text: str) -> None:
        subject: Any = text if isinstance(pattern.pattern, str) else text.encode(errors="replace")
        for operation in {*operations} & {"match", "fullmatch"}:
            getattr(pattern, operation)(subject)
        for _ in pattern.finditer(subject) if operations - {"match", "fullmatch"} else ():
            pass

    source = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    own = set[str]()
    sample(parser.parse(source, pattern.flags if isinstance(pattern.pattern, str) else 0), own)
    own.discard("")

    def make(before: str, opening: str, length: int) -> str:
        return f"{before}{repeated(opening, length)}\0"

    lines = product(("", *sorted(own, key=len)[-2:]), sorted({*own, *SIGNS}))
    reader = GUARDED.get(name, read)
    slow = (slowness(reader, partial(make, *line), (8, 24, 256, 4096), floor=0.002) for line in lines)
    assert not [times for times in slow if times]


# ------------------------------------------------------------------------------------------------------------- readers

TESTS = """from solution import f
assert f([1, 2], 'abc', '') == [[], [345]]
assert f('aaaa') == 'zz9zz top-level'
assert f([]) == 'hello world'
assert f('((', '[[') == {'a b': None}
assert f(12, 13, 14) == 345
"""
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
SCHEMAS = {"f": {"parameters": {"properties": {"a": {"type": "string"}}, "required": ["a"]}}}
CONTROL = (*core_text.FOREIGN_CONTROL_TOKENS, *(f"<a{number}>" for number in range(300)), "[[[[", "]]]]]")


def _leaks(hint: str, tests: str, public: str) -> bool:
    for cached in (leak_filter._public_facts, leak_filter._facts_of):
        cached.cache_clear()
    return leaks(hint, tests, public)


def _call(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def _question(text: str) -> object:
    return Questions(b"secret").question(HindsightPair(0, text, text, (Evidence("tool", text),)))


def _answer(text: str) -> object:
    return parse_answer(text, Window("", range(1, 9)), 3)


def _arguments(family: str, text: str) -> object:
    return tool_formats.with_types([tool_formats.ParsedToolCall(raw=text, name="f")], family, TOOLS)


def _changes(text: str) -> object:
    authors = Authors(text)
    authors.changed({"a.py": text.encode(errors="replace")})
    authors.changed({"a.py": text[::-1].encode(errors="replace")})
    return authors.left()


def _shown_checks(text: str) -> object:
    shown_checks.cache_clear()
    return shown_checks((f"f({text[:50]!r})", "f(1)", "g()"), text)


_INVALID_JSON = (ValueError, RecursionError)
_INVALID_TESTS = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors that `checks_of` reports as a DatasetError."""

DELTAS: dict[str, Any] = {
    "/v1/chat/completions": lambda text: {"choices": [{"delta": {"content": text, "tool_calls": [{"id": text}]}}]},
    "/v1/responses": lambda text: {"type": "response.output_text.delta", "output_index": 0, "delta": text},
    "/v1/messages": lambda text: {
        **{"type": "content_block_delta", "index": 0},
        "delta": {"type": "text_delta", "text": text},
    },
}
"""Protocol -> an event of its streams that holds a text."""


def _streamed(path: str, text: str) -> None:
    """Read a foreign model's stream whose events hold a text, and one that is the text."""
    events = "".join(f"data: {json.dumps(DELTAS[path](piece))}\n\n" for piece in (text, *text))
    for stream in (events, text, f"data: {text}\n\n"):
        with suppress(UnrecordableError):
            read_answers(path, stream.encode(errors="surrogatepass"))


READERS: dict[str, tuple[Read, tuple[type[BaseException], ...]]] = {
    "leaks: a hint": (lambda text: _leaks(text, TESTS, "public"), ()),
    "leaks: tests": (lambda text: _leaks("use [7, 8] or 345", text, "public"), ()),
    "leaks: text of a test": (lambda text: _leaks("use [7, 8] or 345", f"assert f({text!r}) == 3", "public"), ()),
    "leaks: public text": (lambda text: _leaks("use [7, 8] or 345", TESTS, text), ()),
    "leaks: an answer": (lambda text: _leaks(f"x{text}x", text[::2], text[1:]), ()),
    "leaks: between values": (lambda text: _leaks(f"345 {text} 12 {text} 13", TESTS, ""), ()),
    "in_digits": (in_digits, ()),
    "authors": (_changes, ()),
    "well_formed": (core_text.well_formed, ()),
    "read_json": (core_text.read_json, _INVALID_JSON),
    "read_json: a text": (lambda text: core_text.read_json(json.dumps(text)), ()),
    "json_line": (lambda text: core_text.json_line({"a": text, text[:9]: text}), ()),
    "printable": (core_text.printable_line, ()),
    "cut_middle": (lambda text: core_text.cut_middle(text, 99), ()),
    "text_lines": (core_text.text_lines, ()),
    "control tokens": (lambda text: core_text.without_control_tokens(CONTROL, text), ()),
    "secrets": (mask_secrets, ()),
    "secrets: a value": (lambda text: mask_secrets(f"API_KEY={text} https://a:{text}@b sk-{text}"), ()),
    "vote": (parse_vote, ()),
    "vote: boxes": (lambda text: parse_vote(f"\\boxed{{{text}"), ()),
    "marks of hints": (lambda text: without_marks(f"[hint_{text}"), ()),
    "answer about a trajectory": (_answer, ()),
    "answer about a trajectory: a hint": (lambda text: _answer(f"\\boxed{{1}}[HINT_START]{text}[HINT_END]"), ()),
    "answer about a trajectory: hints": (lambda text: _answer("\\boxed{1}[HINT_START]" + text), ()),
    "vote: a hint": (lambda text: parse_vote(f"\\boxed{{1}}[HINT_START]{text}[HINT_END]"), ()),
    "step vote": (parse_step_vote, ()),
    "question": (_question, ()),
    "evidence": (lambda text: evidence.turn_text(_call(text)), ()),
    "evidence: an argument": (lambda text: evidence.turn_text(_call(json.dumps({"a": text}))), ()),
    **{f"calls of {name}": (read, ()) for name, read in tool_formats.FORMATS.items()},
    **{f"arguments of {name}": (partial(_arguments, name), ()) for name in ("qwen3.5", "glm", "hy3", "minimax-m2")},
    "held_back": (lambda text: held_back(text, ("\n\n", "]]"), has_tools=True), ()),
    **{f"stream of {path}": (partial(_streamed, path), ()) for path in DELTAS},
    "counts of requests": (lambda text: read_counts(f"{text}\nvllm:num_requests_running{text}"), (ValueError,)),
    "function call": (lambda text: calls.verdict(SCHEMAS, [("f", {"a": text})], [{"f": {"a": [text[::-1]]}}]), ()),
    "query": (is_ordered, ()),
    "harbor: output": (lambda text: [*verdict._without_hidden(text, [TESTS], "public")], ()),
    "harbor: reward": (verdict._of_json, (*_INVALID_JSON, OverflowError)),
    "harbor: task.toml": (tomllib.loads, _INVALID_JSON),
    "harbor: instruction": (harbor_tasks._is_no_instruction, ()),
    "harbor: variable": (lambda text: harbor_tasks._resolved("", ("environment", "A"), text, {}), (ValueError,)),
    "harbor: line": (lambda text: harbor_tasks._line_of(text, ("environment", "A")), ()),
    "harbor: Dockerfile": (lambda text: base_images(f"ARG A={text}\nFROM {text}\nRUN {text}", {}), ()),
    "harbor: compose file": (lambda text: compose._interpolated(text, {}, ""), (ValueError,)),
    "harbor: compose command": (compose._last_argument, ()),
    "harbor: build": (build_failure, ()),
    "tests": (lambda text: complete_tests(text, "f"), (ValueError,)),
    "tests: checks": (lambda text: instrument.__wrapped__(f"from solution import f\n{text}"), _INVALID_TESTS),
    "tests: an argument": (lambda text: instrument.__wrapped__(f"assert f({text!r}, {text}) == 1\n"), _INVALID_TESTS),
    "tests: public text": (_shown_checks, ()),
    "output": (lambda text: grading.Printed(text) == text[::-1], ()),
    "report: regions": (lambda text: transcript.regions([*text]), ()),
    "report: context": (
        lambda text: transcript.context_parts(text, [{"role": "user", "content": text[9:]}], CONTROL),
        (),
    ),
}
"""Readers of foreign text, as functions of it, and the errors that their callers handle."""


def _handled(read: Read, errors: tuple[type[BaseException], ...], text: str) -> None:
    with suppress(*errors):
        read(text)


@pytest.mark.parametrize("name", READERS)
def test_a_reader_takes_linear_time(name: str) -> None:
    def make(opening: str, closing: str, length: int) -> str:
        return f"{repeated(opening, length)}{closing}"

    def make_nested(opening: str, closing: str, length: int) -> str:
        depth = max(length // len(opening + closing), 1)
        return f"{opening * depth}1{closing * depth}"

    read = partial(_handled, *READERS[name])
    lines = [partial(make, *line) for line in product((*SIGNS, *BEGINNINGS), ("", "x"))]
    lines += [partial(make, opening, "") for opening in COUNTED]
    lines += [partial(make_nested, *pair) for pair in NESTED]
    slow = (slowness(read, line, (16, 128, 1024), floor=0.01) for line in lines)
    assert not [times for times in slow if times]


def test_the_measure_tells_linear_from_quadratic_and_exponential_time() -> None:
    def search(pattern: str, *lengths: int) -> str | None:
        return slowness(lambda text: re.search(pattern, text), lambda n: "a" * n + "\0", lengths, floor=0.002)

    assert search("b|ab", 8, 24, 256, 4096) is None
    # 16 times the length takes 256 times as long: that a short measurement takes 8 times too long hides nothing.
    assert search("a*b", 8, 24, 256, 4096) is not None
    assert search("(?:a|a)*b", 8, 12, 16) is not None


def test_a_new_regex_is_measured_by_itself() -> None:
    source = """import re

_SPACE, _END = re.compile(r"[ ]+$"), re.compile("b", re.I)


def read(text, name):
    return re.split(r"(a+)+$", text), _SPACE.search(text), re.match(f"{name}x", text)
"""
    path = ROOT / "core" / "metric.py"  # This module's example stands for the regex of a value.
    found = dict(of_source(path, source, {"_SPACE": {"search"}}))
    assert found["core.metric._SPACE"] == Regex(re.compile("[ ]+$"), frozenset({"search"}))
    assert found["core.metric._END"] == Regex(re.compile("b", re.I), frozenset(OPERATIONS))
    assert found["core.metric.line 7"].pattern.pattern in ("(a+)+$", OF_VALUES["core.metric"])
    texts = set[str]()
    sample(parser.parse("x(?:ab|c)*[0-9]y"), texts)
    assert {"x", "ab", "xab", "0", "9"} <= texts


ON_THE_EVENT_LOOP = [name for name in READERS if not name.startswith(("leaks", "tests", "harbor", "stream"))]
"""The others run in threads, and are bounded by `_MOST_SOURCE`, `_FILTERED_CHARS` and `_LONGEST_TASK_FILE`. Streams of
foreign models are read in the journal's thread."""


@pytest.mark.parametrize("name", ON_THE_EVENT_LOOP)
def test_a_reader_on_the_event_loop_takes_less_than_half_a_second_for_40_000_characters(name: str) -> None:
    """It takes 50 ms at most alone: ten times as much is the bound, because the machine may be busy."""
    read, errors = READERS[name]
    for opening in (
        "[",
        "(",
        '"',
        "\\",
        "\r",
        '{"name": ',
        "<parameter=a>",
        "[f(a=1), ",
        "f(a=1)\n",
        "[1, ",
        "<|",
        "1",
    ):
        text = repeated(opening, 40_000)
        taken = (seconds(partial(_handled, read, errors), text) for _ in range(10))
        assert any(duration < 0.5 for duration in taken)
