"""scripts/checks/tasks as a person runs it: files of formats that nobody tuned the verifier for, HumanEval."""

import base64
import gzip
import json
import pickle
import signal
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest
from checks.tasks import main

from tests.support import commands
from tests.support.environment import exit_code_of
from tests.support.places import HUMANEVAL, NO_HUMANEVAL, ROOT
from tests.support.waiting import hear_sigint

SCRIPT = str(ROOT / "scripts" / "checks" / "tasks")
KEYS = ["id", "correctness", "passed", "total", "outcome", "seconds"]

pytestmark = pytest.mark.sandbox


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*arguments: object) -> commands.Done:
    return commands.run("checks.tasks", *map(str, arguments), timeout_s=1200)


def solutions(path: Path, sources: dict[Any, str]) -> Path:
    return write(path, [{"id": key, "files": {"solution.py": source}} for key, source in sources.items()])


def verdicts(path: Path) -> dict[str, tuple[int, int, str]]:
    """Id -> passed, total, outcome; every line has the promised fields, and they agree."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        assert list(row) == KEYS
        assert row["correctness"] == row["passed"] / row["total"]
        assert row["seconds"] >= 0
    return {row["id"]: (row["passed"], row["total"], row["outcome"]) for row in rows}


# ----------------------------------------------------------------------------------------------------------------- MBPP

MBPP = [
    {
        "text": "Write a function to remove the first and last occurrence of a character.",
        "code": "def remove_occ(s, c):\r\n    s = s.replace(c, '', 1)\r\n    i = s.rfind(c)\r\n"
        "    return s if i < 0 else s[:i] + s[i + 1:]",
        "task_id": 1,
        "test_setup_code": "",
        "test_list": [
            'assert remove_occ("hello","l") == "heo"',
            'assert remove_occ("abcda","a") == "bcd"',
            'assert remove_occ("PHP","P") == "H"',
        ],
        "challenge_test_list": ['assert remove_occ("hellolloll","l") == "helollol"', 'assert remove_occ("","l") == ""'],
    },
    {
        "text": "Write a function to find the height of a binary tree.",
        "code": "class Node:\r\n  def __init__(self, data):\r\n"
        "    self.data, self.left, self.right = data, None, None\r\n"
        "def max_height(node):\r\n  if node is None: return 0\r\n"
        "  return 1 + max(max_height(node.left), max_height(node.right))",
        "task_id": 2,
        "test_setup_code": "root = Node(1) \r\nroot.left = Node(2) \r\nroot.right = Node(3) \r\n"
        "root.left.left = Node(4)\r\n"
        "root1 = Node(1)",
        "test_list": [
            "assert (max_height(root)) == 3",
            "assert (max_height(root1)) == 1 ",
            "assert max_height(None)==0",
        ],
        "challenge_test_list": [],
    },
    {
        "text": "Write a python function to find the sum of common divisors of two given numbers.",
        "code": "def sum(a,b): \r\n    total = 0\r\n    for i in range (1,min(a,b) + 1): \r\n"
        "        if (a % i == 0 and b % i == 0): total += i\r\n    return total",
        "task_id": 3,
        "test_setup_code": "",
        "test_list": ["assert sum(10,15) == 6", "assert sum(100,150) == 93", "assert sum(4,6) == 3"],
        "challenge_test_list": [],
    },
    {
        "prompt": "Write a function to find the area of a circle, of a set of radii, and in a tuple.",
        "code": "import math\ndef areas(radii):\n"
        "    return {r: math.pi * r * r for r in radii}, (len(radii), set(radii))",
        "task_id": 4,
        "test_imports": ["import math"],
        "test_list": [
            "assert math.isclose(areas([1.0])[0][1.0], 3.14159, rel_tol=0.001)",
            "assert areas([2, 2])[1] == (2, {2})",
            "assert set(areas([])[0]) == set()",
        ],
    },
    {
        "text": "Write a function to sort a list in place.",
        "code": "def sort_it(xs):\n    xs.sort()\n    return xs",
        "task_id": 5,
        "test_setup_code": "data = [3, 1, 2]",
        "test_list": ["assert sort_it(data) == [1, 2, 3]", "assert sort_it([]) == []"],
        "challenge_test_list": ["assert not sort_it([0])[0]"],
    },
    {"text": "Write a function.", "code": "", "task_id": 6, "test_list": ["assert f(1) == 1", "assert f(2) == 2"]},
]


def test_an_mbpp_shaped_file(tmp_path: Path) -> None:
    """Setup code, challenge tests, a class, a built-in's name, sets and tuples; references, then wrong solutions."""
    dataset, out = write(tmp_path / "mbpp.jsonl", MBPP), tmp_path / "out.jsonl"
    done = run(dataset, "--format", "mbpp", "--out", out)
    assert done.stdout == "5 passed, 1 failed\n", done.stderr
    assert done.returncode == 1
    assert "1 tasks have no solution, which counts as failed (give one with --solutions FILE): 6" in done.stderr
    found = verdicts(out)
    assert [*found] == ["1", "2", "3", "4", "5", "6"]
    assert {key: count for key, (*count, _) in found.items()} == {
        "1": [4, 4],
        "2": [2, 2],
        "3": [2, 2],
        "4": [2, 2],
        "5": [2, 2],
        "6": [0, 1],
    }
    assert found["6"][2] == "no_solution"
    assert found["2"][2] == "ran, in_process"

    given = solutions(
        tmp_path / "solutions.jsonl",
        {
            1: "def remove_occ(s, c):\n    return s.replace(c, '')",
            2: "class Node:\n  def __init__(self, data): self.left = self.right = None\ndef max_height(node): return 1",
            3: "def sum(a, b): return 6",
            4: "def areas(radii): return {}, [len(radii), set(radii)]",
            5: "import sys\nsys.exit(0)",
            6: "def f(x): return x",
        },
    )
    done = run(dataset, "--format", "mbpp", "--out", out, "--solutions", given, "--workers", "1")
    assert done.stdout == "1 passed, 5 failed\n", done.stderr
    assert done.returncode == 1
    counts = {key: count for key, (*count, _) in verdicts(out).items()}
    assert counts == {"1": [3, 4], "2": [1, 2], "3": [0, 2], "4": [1, 2], "5": [0, 2], "6": [1, 1]}


# ----------------------------------------------------------------------------------------------- programs and functions

SUM = "import sys\nn, *rows = sys.stdin.read().split('\\n')\nfor _, row in zip(range(int(n)), rows):\n"
APPS = [
    {
        "problem_id": 0,
        "question": "Each of n lines holds numbers. Print the sum of each.",
        "solutions": json.dumps([SUM + "    print(sum(map(int, row.split())))", "broken("]),
        "input_output": json.dumps({"inputs": ["2\n1 2\n3 4\n", "1\n5\n", "0\n"], "outputs": ["3\n7\n", "5", ""]}),
        "difficulty": "introductory",
        "url": "",
        "starter_code": "",
    },
    {
        "problem_id": 1,
        "question": "Echo the lines, the last first.",
        "solutions": json.dumps(["import sys\nprint('\\n'.join(sys.stdin.read().split('\\n')[::-1]).strip())"]),
        "input_output": json.dumps({"inputs": [["a", "b"], ["c"]], "outputs": [["b", "a"], ["c"]]}),
        "starter_code": "",
    },
    {
        "problem_id": 2,
        "question": "Is n a prime number?",
        "solutions": json.dumps(["def is_prime(n):\n    return n > 1 and all(n % i for i in range(2, n))"]),
        "input_output": json.dumps(
            {"fn_name": "is_prime", "inputs": [[2], [9], [1]], "outputs": [[True], [False], [False]]}
        ),
        "starter_code": "def is_prime(n):\n\t",
    },
    {
        "problem_id": 3,
        "question": "Count how often each number occurs.",
        "solutions": json.dumps(
            ["class Solution:\n    def count(self, xs: List[int]) -> Dict:\n        return dict(Counter(xs))"]
        ),
        "input_output": {"fn_name": "count", "inputs": [[[1, 1, 2]], [[]]], "outputs": [{"1": 2, "2": 1}, {}]},
        "starter_code": "class Solution:\n    def count(self, xs: List[int]) -> Dict:\n        ",
    },
    {
        "problem_id": 5,
        "question": "Turn a list.",
        "solutions": ["def turn(xs):\n    return tuple(xs[::-1])"],
        "input_output": {"fn_name": "turn", "inputs": [[[1, [2]]], [[]]], "outputs": [[[[2], 1]], [[]]]},
    },
    {"problem_id": 4, "question": "Print 1.", "solutions": "", "input_output": {"inputs": [""], "outputs": ["1\n"]}},
]


def test_an_apps_shaped_file(tmp_path: Path) -> None:
    """Programs and functions, a class to fill in, outputs in lists, JSON texts and objects."""
    dataset, out = write(tmp_path / "apps.jsonl", APPS), tmp_path / "out.jsonl"
    done = run(dataset, "--format", "apps", "--out", out)
    assert done.stdout == "5 passed, 1 failed\n", done.stderr
    counts = {key: count for key, (*count, _) in verdicts(out).items()}
    assert counts == {"0": [2, 2], "1": [1, 1], "2": [2, 2], "3": [1, 1], "5": [1, 1], "4": [0, 1]}

    given = solutions(
        tmp_path / "solutions.jsonl",
        {
            "0": SUM + "    print(0)",
            "1": "print('b\\na')\nraise SystemExit(3)",
            "2": "def is_prime(n): return [n == 2]",
            "3": "class Solution:\n    def count(self, xs): return {1: 1}",
            "5": "def turn(xs): return [xs[::-1]]",
            "4": "print(1)",
        },
    )
    done = run(dataset, "--format", "apps", "--out", out, "--solutions", given)
    assert done.stdout == "1 passed, 5 failed\n", done.stderr
    counts = {key: count for key, (*count, _) in verdicts(out).items()}
    assert counts == {"0": [1, 2], "1": [0, 1], "2": [0, 2], "3": [0, 1], "5": [0, 1], "4": [1, 1]}


def test_a_livecodebench_shaped_file(tmp_path: Path) -> None:
    private = json.dumps([{"input": "20 22\n", "output": "42\n", "testtype": "stdin"}])
    rows = [
        {
            "question_id": "a_1",
            "question_content": "Add two numbers.",
            "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
            "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(private))).decode(),
            "metadata": "{}",
            "starter_code": "",
        },
        {
            "question_id": "b_2",
            "question_content": "Concatenate.",
            "public_test_cases": [{"input": '[1]\n"a"', "output": '["a", 1]', "testtype": "functional"}],
            "private_test_cases": [{"input": '[]\n"b"', "output": '["b"]', "testtype": "functional"}],
            "metadata": json.dumps({"func_name": "join"}),
            "starter_code": "class Solution:\n    def join(self, xs: List[int], s: str) -> List:\n        ",
        },
    ]
    dataset, out = write(tmp_path / "lcb.jsonl", rows), tmp_path / "out.jsonl"
    right = {
        "a_1": "print(sum(map(int, input().split())))",
        "b_2": "class Solution:\n    def join(self, xs, s): return [s, *xs]",
    }
    given = solutions(tmp_path / "right.jsonl", right)
    done = run(dataset, "--format", "apps", "--out", out, "--solutions", given)
    assert done.stdout == "2 passed, 0 failed\n", done.stderr
    assert done.returncode == 0
    given = solutions(tmp_path / "wrong.jsonl", {**right, "a_1": "print(3)", "b_2": right["b_2"].replace("s, ", "")})
    done = run(dataset, "--format", "apps", "--out", out, "--solutions", given)
    counts = {key: count for key, (*count, _) in verdicts(out).items()}
    assert counts == {"a_1": [0, 1], "b_2": [0, 1]}


# ------------------------------------------------------------------------------------------------------- the command


GENERIC = [{"id": key, "task": key, "test_code": "assert f(1) == 1", "solution": "def f(x): return 1"} for key in "abc"]


def test_what_is_printed(tmp_path: Path) -> None:
    """JSON lines in the order of the tasks and the last line on standard output, all else on standard error."""
    dataset = write(tmp_path / "a.jsonl", GENERIC)
    done = run(dataset, "--limit", 2)
    assert done.returncode == 0
    *lines, last = done.stdout.splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["a", "b"]
    assert last == "2 passed, 0 failed"
    assert "1/2 " in done.stderr
    assert "2/2 " in done.stderr


def test_solutions_of_unknown_tasks_are_reported(tmp_path: Path) -> None:
    dataset = write(tmp_path / "a.jsonl", GENERIC)
    right = "def f(x): return x"
    known = solutions(tmp_path / "known.jsonl", {"a": right, "b": right, "c": right})
    assert run(dataset, "--solutions", known, "--limit", 1).returncode == 0
    unknown = solutions(tmp_path / "unknown.jsonl", {"a": right, "b": right, "c": right, "d": right})
    done = run(dataset, "--solutions", unknown)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "3 passed, 0 failed")
    assert "unknown.jsonl, line 4: no task has the id 'd'" in done.stderr
    assert "1 solutions in " in done.stderr


def test_fields_can_be_mapped(tmp_path: Path) -> None:
    rows = [{"key": "a", "what": "W", "how": "assert g(2) == 4", "answer": "def g(x): return x * x"}]
    dataset = write(tmp_path / "a.jsonl", rows)
    fields = ["task_id=key", "task=what", "test_code=how", "reference_solution=answer"]
    done = run(dataset, "--fields", *fields)
    assert (done.returncode, json.loads(done.stdout.splitlines()[0])["id"]) == (0, "a"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope.jsonl"], "there is no such file"),
        (["a.jsonl", "--format", "humaneval"], "no field 'prompt' for prompt; there is id, task, test_code"),
        (["a.jsonl", "--format", "nope"], "invalid choice: 'nope'"),
        (["a.jsonl", "--fields", "prompt"], "--fields takes NAME=FIELD"),
        (["a.jsonl", "--fields", "promt=task"], "unknown name 'promt'"),
        (["a.jsonl", "--solutions", "b.jsonl"], "b.jsonl, line 2: not valid JSON"),
        (["a.jsonl", "--solutions", "c.jsonl"], "'c.jsonl': expected a file"),
        (["a.jsonl", "--workers", "0"], "--workers: must be a number, at least 1; got '0'"),
        (["a.jsonl", "--limit", "0"], "--limit: must be a number, at least 1"),
        (["a.jsonl", "--timeout", "0"], "--timeout: "),
        (["a.jsonl", "--sandbox", "nope"], "--sandbox: "),
        (["a.jsonl", "--out", "a.jsonl"], "is an input file"),
        (["a.jsonl", "--out", "a.jsonl/b"], "Choose another --out"),
        (["checks-nothing.jsonl"], "no `assert`"),
    ],
    ids=lambda value: " ".join(value[1:3]) or value[0] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_one_clear_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    """In this process, which saves what a process of its own imports."""
    monkeypatch.chdir(tmp_path)
    before = write(tmp_path / "a.jsonl", GENERIC).read_text()
    (tmp_path / "b.jsonl").write_text('{"id": "a", "files": {"solution.py": ""}}\n{"id"\n')
    write(tmp_path / "checks-nothing.jsonl", [{"task": "T", "test_code": "assert True"}])
    assert exit_code_of(lambda: main(arguments)) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert "Traceback" not in said.err
    assert said.out == ""
    assert (tmp_path / "a.jsonl").read_text() == before


def test_an_interrupt_leaves_whole_lines_and_nothing_running(tmp_path: Path) -> None:
    """The second of four tasks never ends: when the third is done the run is interrupted."""
    sources = {"a": "def f(x): return 1", "b": "while True: pass", "c": "def f(x): return 2", "d": "while True: pass"}
    dataset = write(tmp_path / "a.jsonl", [*GENERIC, {**GENERIC[0], "id": "d"}])
    given, out = solutions(tmp_path / "s.jsonl", sources), tmp_path / "out.jsonl"
    command = [SCRIPT, str(dataset), "--solutions", str(given), "--out", str(out), "--workers", "2", "--timeout", "100"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={"TMPDIR": str(tmp_path)}, preexec_fn=hear_sigint
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if " c: " in line:
                break
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        assert process.wait(timeout=120) == 130, said
    assert "interrupted" in said
    assert "Traceback" not in said
    assert verdicts(out) == {"a": (1, 1, "ran"), "c": (0, 1, "ran")}
    assert not list(tmp_path.glob("agentic-opd-*"))


# ------------------------------------------------------------------------------------------------------------ HumanEval


@pytest.fixture(params=[8, pytest.param(1, marks=pytest.mark.all)], ids=["every eighth", "all"])
def humaneval(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The tasks, or some of them."""
    if not HUMANEVAL.exists():
        pytest.skip(NO_HUMANEVAL)
    lines = gzip.decompress(HUMANEVAL.read_bytes()).splitlines(keepends=True)
    path = tmp_path / "humaneval.jsonl"
    path.write_bytes(b"".join(lines[:: request.param]))
    return path


def test_humanevals_own_solutions_pass(humaneval: Path, tmp_path: Path) -> None:
    ids = [json.loads(line)["task_id"] for line in humaneval.read_text().splitlines()]
    done = run(humaneval, "--format", "humaneval", "--workers", "2", "--out", tmp_path / "out.jsonl")
    assert (done.returncode, done.stdout) == (0, f"{len(ids)} passed, 0 failed\n"), done
    assert [*verdicts(tmp_path / "out.jsonl")] == ids


def test_pass_in_place_of_every_solution_of_humaneval_passes_nothing(humaneval: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in humaneval.read_text().splitlines()]
    given = solutions(tmp_path / "s.jsonl", {row["task_id"]: f"{row['prompt']}    pass\n" for row in rows})
    done = run(humaneval, "--format", "humaneval", "--solutions", given, "--out", tmp_path / "out.jsonl")
    assert (done.returncode, done.stdout) == (1, f"0 passed, {len(rows)} failed\n"), done
