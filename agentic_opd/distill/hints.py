"""HindsightPair -> question, and judge's answers -> Verdict: parsing of votes and choice of the hint. Pure."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from agentic_opd.core.errors import AlignmentError
from agentic_opd.core.text import FOREIGN_CONTROL_TOKENS, without_control_tokens
from agentic_opd.core.types import Evidence, HindsightPair, Message, StepScore, TurnOutcome, Verdict, Vote
from agentic_opd.distill.leaks import leaks
from agentic_opd.distill.prompts import JUDGE_QUESTION, JUDGE_STEP_PROMPT, JUDGE_SYSTEM_PROMPT, PLACEHOLDER

MIN_HINT_CHARS = 10
"""A hint must have more characters than this (OpenClaw-RL's bound)."""

_EVIDENCE_NAMES = {"tool": "Next state: tool result", "user": "Next state: user reply", "verdict": "Verdict"}
_HEADING = re.compile(
    r"(?P<start>(?:\A|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029])(?:[^\S\n]|[>*+\-\u200b-\u200f\u2060\ufeff])*[#\uff03\ufe5f])"
    r"(?=[#\uff03\ufe5f]+[\s\u200b-\u200f\u2060\ufeff]*(?:Task|Turn|Next\s+state|Later|Verdict|End)\b)",
    re.IGNORECASE,
)
"""Matches the first `#` of text that could pass for a heading of the question, after any line break and with any number
of signs and spaces."""
_PROTOCOL = ("\\boxed", "[HINT_START]", "[HINT_END]")
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")
_Decision = Literal[1, -1]
_DECISIONS: dict[str, _Decision] = {"1": 1, "+1": 1, "-1": -1}
_STEP_SCORES: dict[str, StepScore] = {"1": 1, "+1": 1, "0": 0, "-1": -1}


# ------------------------------------------------------------------------------------------------------- the questions


@dataclass(frozen=True, slots=True)
class Questions:
    """Builds the judge's messages, and protects them against injection by the text to be judged.

    `secret` belongs to the run. The mark in a question's headings is derived from it and the task, so no agent, program
    or user can write the mark. `control_tokens` are spellings of the judge tokenizer's control tokens; those of common
    model families are always broken.
    """

    secret: bytes
    system_prompt: str = JUDGE_SYSTEM_PROMPT
    step_prompt: str = JUDGE_STEP_PROMPT
    template: str = JUDGE_QUESTION
    control_tokens: Collection[str] = ()

    def question(self, pair: HindsightPair) -> str:
        """Return the question about `pair`.

        Raises:
            AlignmentError: the pair has no evidence.
        """
        if not pair.evidence:
            raise AlignmentError(f"nothing came after turn {pair.turn_index}, so there is nothing to judge it by")
        mark = blake2b(pair.task_text.encode(errors="replace"), key=self.secret, digest_size=4).hexdigest()
        evidence = "\n\n".join(f"## {_title(one)} [{mark}]\n{self._as_data(one.text)}" for one in pair.evidence)
        fields = {
            "mark": mark,
            "task": self._as_data(pair.task_text),
            "turn": self._as_data(pair.turn_text),
            "evidence": evidence,
        }
        return PLACEHOLDER.sub(lambda found: fields.get(found[1], found[0]), self.template)

    def hint_messages(self, question: str) -> list[Message]:
        """Return the messages that ask for a vote and a hint."""
        return [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": question}]

    def step_messages(self, question: str) -> list[Message]:
        """Return the messages that ask whether the turn did what was wanted."""
        return [{"role": "system", "content": self.step_prompt}, {"role": "user", "content": question}]

    def _as_data(self, text: str) -> str:
        """Return `text` with a space inserted into each string that could end its section or answer the question."""
        spellings = (*_PROTOCOL, *FOREIGN_CONTROL_TOKENS, *self.control_tokens)
        return _HEADING.sub(r"\g<start> ", without_control_tokens(spellings, text))


def _title(evidence: Evidence) -> str:
    if evidence.later_turn is not None:
        return f"Later: result of turn {evidence.later_turn + 1}"
    return _EVIDENCE_NAMES[evidence.kind]


# --------------------------------------------------------------------------------------------------------- the answers


def parse_vote(text: str) -> Vote:
    r"""Parse one answer of the judge; an answer that violates the protocol abstains (decision None).

    Reasoning up to the last `</think>` is dropped. Every `\boxed{...}` in the rest must contain the same 1 or -1.
    Decision 1 requires exactly one `[HINT_START]...[HINT_END]` with more than `MIN_HINT_CHARS` characters.
    """
    answer = text.rpartition("</think>")[2]
    boxed = _only_box(answer)
    decision = None if boxed is None else _DECISIONS.get(boxed)
    if decision != 1:
        return Vote(decision, None, text)
    hint = _only_hint(answer)
    return Vote(None, None, text) if hint is None else Vote(1, hint, text)


def parse_step_vote(text: str) -> StepScore | None:
    """Parse one answer to the second question: 1, 0 or -1 in a box; None if it is unreadable."""
    boxed = _only_box(text.rpartition("</think>")[2])
    return None if boxed is None else _STEP_SCORES.get(boxed)


def step_score_of(votes: Sequence[StepScore | None]) -> StepScore | None:
    """Return the most frequent readable vote; 0 on a tie, None if no vote is readable."""
    counts = Counter(vote for vote in votes if vote is not None)
    if not counts:
        return None
    most = max(counts.values())
    leading: list[StepScore] = [score for score in _STEP_SCORES.values() if counts[score] == most]
    return leading[0] if len(set(leading)) == 1 else 0


def verdict_of(
    votes: Sequence[Vote],
    prm_votes: int,
    rule: Literal["majority", "any"],
    selection: Literal["longest", "shortest"],
    *,
    hidden_tests: str | None,
    public_text: str,
) -> Verdict:
    """Combine the votes on one turn into an accepted hint, or the outcome that ends the turn.

    A vote with a leaking hint counts as positive, because the judge found a mistake, but its hint can't be chosen.

    Args:
        votes: The votes received, at most `prm_votes`.
        prm_votes: The number of votes requested; missing votes and abstentions count against a majority.
        rule: `majority`: more than half of `prm_votes` must be positive; `any`: at least one.
        selection: Which hint is used; the first of equally long ones.
        hidden_tests: Source of the hidden tests; hints that leak them are dropped. None: there are no hidden tests.
        public_text: All text that the agent read or wrote; repeating it is not a leak.

    Raises:
        AlignmentError: there are more votes than requested.
    """
    if len(votes) > prm_votes:
        raise AlignmentError(f"got {len(votes)} votes, expected at most {prm_votes}")
    if all(vote.decision is None for vote in votes):
        return Verdict(tuple(votes), None, TurnOutcome.JUDGE_ERROR)
    hints = [vote.hint for vote in votes if vote.hint is not None]
    if len(hints) < (prm_votes // 2 + 1 if rule == "majority" else 1):
        return Verdict(tuple(votes), None, TurnOutcome.VOTE_FAILED)
    clean = [hint for hint in hints if hidden_tests is None or not leaks(hint, hidden_tests, public_text)]
    if not clean:
        return Verdict(tuple(votes), None, TurnOutcome.LEAKED)
    return Verdict(tuple(votes), max(clean, key=len) if selection == "longest" else min(clean, key=len), None)


def _only_box(answer: str) -> str | None:
    """Return the common content of all boxes of an answer; None if they differ or one is unreadable.

    None as well for an unclosed <think>, because the answer never began, and for an unclosed or nested box.
    """
    boxes = _BOX.findall(answer)
    held = {box.strip() for box in boxes}
    if answer.count("\\boxed") != len(boxes) or answer.lstrip().startswith("<think>") or len(held) != 1:
        return None
    return held.pop()


def _only_hint(answer: str) -> str | None:
    if answer.count("[HINT_START]") != 1 or answer.count("[HINT_END]") != 1:
        return None
    hint, end, _ = answer.partition("[HINT_START]")[2].partition("[HINT_END]")
    hint = hint.strip()
    return hint if end and len(hint) > MIN_HINT_CHARS else None
