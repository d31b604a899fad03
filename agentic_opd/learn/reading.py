"""Paths -> the conversations in them, of any format that `distill` reads (I/O)."""

import zlib

from agentic_opd.core.errors import AlignmentError, PlaceError
from agentic_opd.gateway.recorded import is_journal, read_recorded
from agentic_opd.learn.plan import LearnPlan, say
from agentic_opd.learn.split import LoggedConversation
from agentic_opd.runs.distill_file import Counts, read_inputs


def read_conversations(plan: LearnPlan) -> list[LoggedConversation]:
    """Read the logs, and print the counts of read and left-out records.

    Raises:
        PlaceError: a path can't be read, or holds groups of rollouts.
    """
    conversations = dict[str, LoggedConversation]()
    try:
        journals = [path for path in plan.paths if is_journal(path)]
        inputs = read_inputs([path for path in plan.paths if path not in journals])
        rows = [(line.item_id, line.fields) for line in inputs.lines]
        recorded = {path: read_recorded(path) for path in journals}
        for log in recorded.values():
            rows += [(row.name, row.fields) for row in log.conversations]
    except (OSError, EOFError, zlib.error) as error:
        path = getattr(error, "filename", None) or str(plan.paths[0])
        raise PlaceError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error
    for sentence in (*inputs.summary, *(f"{path}: {log.text()}" for path, log in recorded.items())):
        say(sentence)
    counts = Counts()
    for name, fields in rows:
        if "tokens" in fields:
            raise PlaceError(
                f"{name} is a group of rollouts, and this command learns from conversations: `agentic-opd distill` "
                "and `agentic-opd train --groups` take such files"
            )
        if name in conversations:  # Ids of recorded sessions are random.
            say(f"{name} is left out: another journal has it too")
            continue
        try:
            conversations[name] = LoggedConversation.of(name, fields, mask_secrets=plan.mask_secrets)
        except AlignmentError as error:
            say(f"{name} is left out: {error}")
            continue
        counts.notes += conversations[name].notes
    for sentence in counts.notes_as_text():
        say(sentence)
    if not conversations:
        raise PlaceError("; ".join(("no conversation in these paths", *inputs.summary)))
    return [*conversations.values()]
