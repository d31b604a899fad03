"""HindsightPair -> Verdict, without the asking: the judge's prompt, the reading of votes, voting, and leaks. Pure."""

import re
from collections.abc import Sequence
from typing import Literal

from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.types import HindsightPair, Message, TurnOutcome, Verdict, Vote
from agentic_opd.distill.leaks import leaks

MIN_HINT_CHARS = 10
"""A hint must be longer than this to be one (OpenClaw-RL's bound)."""

JUDGE_SYSTEM_PROMPT = (
    "You judge one turn of a coding agent in hindsight, from what came back after it. If the next state shows what "
    "the turn should have done differently, answer \\boxed{1} and a hint that would have helped, between [HINT_START] "
    "and [HINT_END]: concrete, one to three sentences, no test code. Otherwise answer \\boxed{-1}."
)

_ROLE_NAMES = {"tool": "tool result", "user": "user reply", "verdict": "hidden test verdict"}
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")
_Decision = Literal[1, -1]
_DECISIONS: dict[str, _Decision] = {"1": 1, "+1": 1, "-1": -1}


def judge_messages(pair: HindsightPair) -> list[Message]:
    """Return the chat that asks for one vote on `pair`, which must have a next state.

    The judge's server turns what is spelled like a control token into one, and a program may print `<|im_end|>` to end
    the judge's question and answer it: `<|`, with which the control tokens of most models begin, is broken by a space.
    """
    if pair.next_state is None or pair.next_state_role is None:
        raise AlignmentError(f"turn {pair.turn_index} has no next state, so there is nothing to judge it by")
    user = (
        f"## Task\n{pair.task_text}\n\n## Turn\n{pair.turn_text}\n\n"
        f"## Next state ({_ROLE_NAMES[pair.next_state_role]})\n{pair.next_state}"
    )
    return [
        {"role": "system", "content": JUDGE_SYSTEM_PROMPT},
        {"role": "user", "content": user.replace("<|", "< |")},
    ]


def parse_vote(text: str) -> Vote:
    r"""Read one answer of the judge; what is not exactly in the protocol abstains (decision None).

    Reasoning up to the last `</think>` is dropped. Every `\boxed{...}` in the rest must hold the same 1 or -1.
    Decision 1 needs exactly one `[HINT_START]...[HINT_END]`, holding more than `MIN_HINT_CHARS` characters.
    """
    answer = text.rpartition("</think>")[2]
    boxes = _BOX.findall(answer)
    decisions: set[_Decision | None] = {_DECISIONS.get(box.strip()) for box in boxes}
    # An unclosed <think> means that the answer never began; an unclosed or nested box can't be told from a wrong one.
    if len(decisions) != 1 or answer.count("\\boxed") != len(boxes) or answer.lstrip().startswith("<think>"):
        return Vote(None, None, text)
    decision = decisions.pop()
    if decision != 1:
        return Vote(decision, None, text)
    hint = _only_hint(answer)
    return Vote(None, None, text) if hint is None else Vote(1, hint, text)


def decide(
    votes: Sequence[Vote],
    prm_votes: int,
    rule: Literal["majority", "any"],
    selection: Literal["longest", "shortest"],
) -> str | None:
    """Return the accepted hint, or None if the quorum was not reached.

    Args:
        votes: The votes that came back, at most `prm_votes`.
        prm_votes: The votes that were asked for; missing ones and abstentions count against a majority.
        rule: `majority`: more than half of `prm_votes` are positive; `any`: at least one is.
        selection: Which positive vote's hint is returned; of equally long ones the first.
    """
    if len(votes) > prm_votes:
        raise AlignmentError(f"got {len(votes)} votes, expected at most {prm_votes}")
    hints = [vote.hint for vote in votes if vote.hint is not None]
    needed = prm_votes // 2 + 1 if rule == "majority" else 1
    if len(hints) < needed:
        return None
    return max(hints, key=len) if selection == "longest" else min(hints, key=len)


def verdict_of(
    votes: Sequence[Vote],
    prm_votes: int,
    rule: Literal["majority", "any"],
    selection: Literal["longest", "shortest"],
    *,
    hidden_tests: str,
    public_text: str,
) -> Verdict:
    """Join the votes on one turn into an accepted hint, or the outcome that ends the turn here; see `decide`.

    Args:
        votes: The votes that came back.
        prm_votes: The votes that were asked for.
        rule: The quorum.
        selection: Which hint is used.
        hidden_tests: Source of the hidden tests; a hint that quotes them is dropped.
        public_text: All that the agent was shown; quoting that is not a leak.
    """
    if all(vote.decision is None for vote in votes):
        return Verdict(tuple(votes), None, TurnOutcome.JUDGE_ERROR)
    hint = decide(votes, prm_votes, rule, selection)
    if hint is None:
        return Verdict(tuple(votes), None, TurnOutcome.VOTE_FAILED)
    if leaks(hint, hidden_tests, public_text):
        return Verdict(tuple(votes), None, TurnOutcome.LEAKED)
    return Verdict(tuple(votes), hint, None)


def _only_hint(answer: str) -> str | None:
    if answer.count("[HINT_START]") != 1 or answer.count("[HINT_END]") != 1:
        return None
    hint, end, _ = answer.partition("[HINT_START]")[2].partition("[HINT_END]")
    hint = hint.strip()
    return hint if end and len(hint) > MIN_HINT_CHARS else None
