"""`agentic-opd new-world NAME`: a small world that runs, to be rewritten."""

import argparse
import re
from collections.abc import Sequence
from keyword import iskeyword
from pathlib import Path

from agentic_opd.core.errors import ConfigError, PlaceError
from agentic_opd.core.exit_codes import EXIT_CODES, EXIT_OK, exit_code

SKELETON = '''\
"""A world for agentic_opd: process --env.world {file}:{name}. What may be overridden: docs/worlds.md."""

from agentic_opd.worlds.own import Checks, OwnWorld, Task, ToolError, tool


class {name}(OwnWorld):
    """Say a number's square."""

    system_prompt = "Solve the task with the tool, then answer in one sentence."

    def tasks(self):
        for n in range(2, 22):
            yield Task(task_id=f"square {{n}}", prompt=f"Submit {{n}} squared.", hidden_tests=str(n * n))

    def start(self, task):
        return {{"answer": None}}

    @tool
    def submit(self, state, answer: int) -> str:
        """Submit the answer.

        Args:
            answer: The number that was asked for.
        """
        if answer < 0:
            raise ToolError("a square is not negative.")
        state["answer"] = answer
        return "submitted"

    def verify(self, task, state):
        is_right = str(state["answer"]) == task.hidden_tests
        said = f"The answer {{state['answer']}} is {{'right' if is_right else 'wrong'}}."
        return Checks(passed=int(is_right), total=1, report=said, judge_report=said)
'''


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="agentic-opd new-world",
        description="Write a small world of your own that runs as it is, to be rewritten.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="of the world: new-world my_shop writes my_shop.py with MyShop")
    arguments = parser.parse_args(argv)

    def run() -> int:
        path, name = write_skeleton(arguments.name)
        print(f"wrote {path}\ntry it: agentic-opd process --env.world {path}:{name} --openai.base_url URL")
        return EXIT_OK

    return exit_code(run)


def write_skeleton(name: str) -> tuple[Path, str]:
    """Write a world into the current directory.

    Args:
        name: In any spelling: my_shop, my-shop, MyShop.

    Returns:
        The file, and the name of the class in it.

    Raises:
        ConfigError: the name can't become that of a class.
        PlaceError: the file is there already, or can't be written.
    """
    words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name) if re.fullmatch(r"[A-Za-z][\w-]*", name, re.A) else []
    path, class_name = Path("_".join(words).lower() + ".py"), "".join(word[0].upper() + word[1:] for word in words)
    if not class_name or iskeyword(class_name) or iskeyword(path.stem):
        raise ConfigError(f"{name!r} can't be a class's name: use letters, digits and _, such as my_shop")
    try:
        with path.open("x") as file:
            file.write(SKELETON.format(file=path, name=class_name))
    except FileExistsError:
        raise PlaceError(f"{path} is there already: choose another name, or move it away") from None
    except OSError as error:
        raise PlaceError(f"{path} can't be written: {error.strerror or error}") from error
    return path, class_name
