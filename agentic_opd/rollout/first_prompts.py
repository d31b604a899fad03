"""Find the tasks whose first prompt is too long. Pure."""

from collections.abc import Iterable

from agentic_opd.core.types import Task, World
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.loop import first_messages


def too_long(
    tasks: Iterable[Task], world: World, chat: ChatFormat, max_token_length: int, *, by_program: bool = False
) -> dict[str, int]:
    """Find the tasks whose first prompt leaves no room for a sampled token.

    A text is tokenised only if its size in bytes does not decide: a token has at least one byte, and at most as many as
    the longest token of the vocabulary. Texts of megabytes are therefore decided immediately. `by_program`: a program
    prompts the policy with messages unknown here, so only the task's prompt is counted.

    Returns:
        Task id -> tokens of its first prompt; for a text too large to tokenise, a lower bound.
    """
    if by_program:
        chat = ChatFormat(chat.renderer, chat.tokenizer, ())
    longest = max(len(token.encode()) for token in chat.tokenizer.get_vocab())
    lengths: dict[str, int] = {}
    frame: int | None = None
    for task in tasks:
        messages = [{"role": "user", "content": task.prompt}] if by_program else first_messages(world, task)
        is_plain = by_program or not (task.examples or task.messages or task.tools is not None)
        if frame is None and is_plain:
            frame = len(chat.first_prompt([*messages[:-1], {"role": "user", "content": "."}]).token_ids)
        size = len(task.prompt.encode())
        if frame is not None and is_plain and frame + size < max_token_length:
            continue
        tokens = size // longest
        if tokens < max_token_length:
            task_chat = chat if by_program else chat.with_tools(task.tools)
            tokens = len(task_chat.first_prompt(messages).token_ids)
        if tokens >= max_token_length:
            lengths[task.task_id] = tokens
    return lengths


def described(long: dict[str, int], total: int, max_token_length: int) -> str:
    """Return a sentence about the tasks that are too long, with the numbers of the first three."""
    examples = ", ".join(f"{task_id!r} has {tokens} tokens or more" for task_id, tokens in list(long.items())[:3])
    more = f", and {len(long) - 3} more" if len(long) > 3 else ""
    return (
        f"{len(long)} of {total} tasks have a first prompt that does not fit env.max_token_length "
        f"({max_token_length}): {examples}{more}"
    )
