import asyncio
import json
import math
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
from renderers import Qwen3RendererConfig, create_renderer

from agentic_opd.core.errors import (
    AlignmentError,
    ConfigError,
    ServerMismatchError,
    ServerRequestError,
    ServerUnreachableError,
)
from agentic_opd.core.precision import Noise
from agentic_opd.core.types import (
    ContextTurn,
    DistillArrays,
    Episode,
    JudgeTokens,
    Message,
    ProofVerdict,
    Recording,
    StopReason,
    TeacherRequest,
    Trace,
)
from agentic_opd.distill.config import DistillConfig, TeacherServer
from agentic_opd.distill.distiller import Distiller, PendingTurns, TurnDistiller
from agentic_opd.distill.evidence import TurnContext, turn_contexts
from agentic_opd.distill.hints import JudgedBy, Questions
from agentic_opd.distill.insertion import HintEncoder, insert_hint
from agentic_opd.distill.judge import JudgeReply
from agentic_opd.distill.pool import AcceptedHint, HintPool
from agentic_opd.distill.proving import Budget, HintProof
from agentic_opd.distill.records import DistilledRecording, DistilledTrace, DistilledTurn
from agentic_opd.distill.rows import overlap, rounded, with_support
from agentic_opd.distill.scoring import noise_floor
from agentic_opd.distill.servers import DistillServers
from agentic_opd.distill.sources import SIBLING
from agentic_opd.runs.rescore import rescored
from agentic_opd.wire.checks import GroupChecker
from agentic_opd.wire.group import GroupDistillation, ProofRecord, ScoredGroup, ScoredRollout
from tests.support.proofs import continuation
from tests.support.settings import with_settings

from .conftest import make_qwen_tokenizer
from .fakes import (
    HINT,
    NEGATIVE,
    OTHER,
    POSITIVE,
    TASK,
    THIRD,
    TOKENS,
    TURNS,
    VERDICT,
    VERSION,
    ScriptedJudge,
    TableTeacher,
    end_of_turn,
    make_recording,
    make_trace,
    messages,
    named_rows,
    next_token_logprobs,
    pool_of,
    table_rows,
)

FIRST, LAST = "## Next state: tool result", "## Verdict"
"""What stands in the judge's chat of the first turn, and in both."""
YES, NO, NONSENSE = [POSITIVE] * 3, [NEGATIVE] * 3, ["hm"] * 3
LEAK = [POSITIVE.replace(HINT, "See that fizzbuzz(30) == 'FizzBuzz' holds.")] * 3
REFUSED = ServerRequestError("HTTP 400: no", 400)
GONE = ServerUnreachableError("http://nowhere gave no usable answer for 60 s")
CONFIG = DistillConfig(distill_topk=5)
WRONG_HINT, NO_HINT = (f"scripts/learning/hint_sources.py:{name}" for name in ("wrong_hint", "no_hint"))


def make_deps(
    script: Mapping[str, Sequence[str] | Exception], teacher: TableTeacher | None = None, **flags: bool
) -> DistillServers:
    tokenizer = make_qwen_tokenizer()
    return DistillServers(
        policy_url="http://policy/v1",
        judge=JudgedBy(ScriptedJudge(script), Questions(b"secret"), flags.get("judge_is_policy", False)),
        teacher=teacher or TableTeacher(),
        hint_encoder=HintEncoder(create_renderer(tokenizer, Qwen3RendererConfig(enable_thinking=False)), tokenizer),
        teacher_is_policy=flags.get("teacher_is_policy", True),
    )


def by_judge(judge: ScriptedJudge) -> DistillServers:
    deps = make_deps({})
    return replace(deps, judge=replace(deps.judge, client=judge))


def distill(
    recording: Recording,
    deps: DistillServers,
    config: DistillConfig = CONFIG,
    pool: HintPool | None = None,
    siblings: Sequence[Recording] = (),
) -> DistilledRecording:
    return asyncio.run(TurnDistiller(deps, config, pool or HintPool()).distill_all(recording, {}, siblings))


def run(deps: DistillServers, recording: Recording | None = None, **settings: Any) -> DistilledRecording:
    return distill(recording or make_recording(), deps, with_settings(CONFIG, settings))


def arrays_of(distilled: DistilledRecording) -> DistillArrays:
    (trace,) = distilled.traces
    return trace.arrays


def rollout_of(one: DistilledTrace, **about: Any) -> ScoredRollout:
    return ScoredRollout.of_conversation(
        one.trace, StopReason.CLOSED, given_reward=0.5, rows=one.arrays, turns=one.records, **about
    )


def outcomes(distilled: DistilledRecording) -> list[str]:
    return [record.outcome.value for record in distilled.records]


def test_an_accepted_hint_is_scored_and_recorded() -> None:
    deps = make_deps({FIRST: YES, LAST: NO})
    distilled = run(deps)
    assert outcomes(distilled) == ["scored", "vote_failed"]
    first, last = distilled.records
    assert (first.span, first.hint, first.insert_at, first.evidence) == ((5, 8), HINT, 3, ("tool", "verdict"))
    assert (last.span, last.hint, last.insert_at, last.evidence) == ((11, 13), None, None, ("verdict",))
    assert isinstance(deps.judge.client, ScriptedJudge)
    assert {first.question, last.question} == {*deps.judge.client.asked}, "the record holds what the judge read"
    assert [len(row) for row in arrays_of(distilled).token_ids_TK] == [0] * 5 + [5] * 3 + [0] * 5
    assert isinstance(deps.teacher, TableTeacher)
    (request,) = deps.teacher.requests
    assert deps.teacher.top_ks == [5]
    assert request.token_ids == TOKENS[:3] + first.hint_token_ids + TOKENS[3:8], "the record rebuilds what was read"
    teacher, student = table_rows(request, 1).actual_R, make_trace().logprobs_T[5:8]
    assert distilled.stats.sampled_tokens == 5
    scored, failed = distilled.stats.turns
    assert (scored.record, failed.record) == distilled.records
    assert (scored.judge_s, failed.judge_s, failed.scored) == (0.25, 0.25, None)
    assert scored.scored is not None
    assert scored.scored.gaps == pytest.approx([t - s for t, s in zip(teacher, student, strict=True)], abs=1e-6)
    assert (scored.scored.prompt_tokens, scored.scored.cached_tokens) == (len(request.token_ids), 4)
    assert scored.scored.seconds == 0.5
    assert (scored.scored.agreed_tokens, distilled.stats.failed) == (0, True)
    assert scored.scored.masses == pytest.approx(
        [sum(math.exp(logprob) for logprob in row) for row in arrays_of(distilled).logprobs_TK[5:8]]
    )


@pytest.mark.parametrize("placement", ["end", "last_user"])
def test_placement_decides_where_the_hint_of_a_later_turn_goes(placement: str) -> None:
    record = run(make_deps({FIRST: NO, LAST: YES}), hint={"placement": placement}).records[1]
    text = make_qwen_tokenizer().decode(record.hint_token_ids)
    if placement == "end":
        assert record.insert_at == 10
        assert text == f"<|im_start|>user\n[user's hint / instruction]\n{HINT}<|im_end|>\n"
    else:
        assert record.insert_at == 3
        assert text == f"\n\n[user's hint / instruction]\n{HINT}"


@pytest.mark.parametrize(
    ("answer", "teacher", "outcome", "error"),
    [
        (YES, TableTeacher(), "scored", None),
        (NO, TableTeacher(), "vote_failed", None),
        (NONSENSE, TableTeacher(), "judge_error", "no vote could be read"),
        (REFUSED, TableTeacher(), "judge_error", "HTTP 400: no"),
        (GONE, TableTeacher(), "judge_error", "no usable answer"),
        (ServerMismatchError("no chat completion"), TableTeacher(), "judge_error", "no chat completion"),
        (LEAK, TableTeacher(), "leaked", None),
        (YES, TableTeacher(max_model_len=20), "too_long", "tokens, the teacher reads at most 19"),
        (YES, TableTeacher(error=AlignmentError("got 2 rows, expected 3")), "scoring_error", "got 2 rows, expected 3"),
        (YES, TableTeacher(error=REFUSED), "scoring_error", "HTTP 400: no"),
    ],
)
def test_every_turn_ends_in_one_outcome_with_its_reason(
    answer: Any, teacher: TableTeacher, outcome: str, error: str | None
) -> None:
    distilled = run(make_deps({FIRST: answer, LAST: NO}, teacher))
    assert outcomes(distilled) == [outcome, "vote_failed"]
    assert [turn.record for turn in distilled.stats.turns] == list(distilled.records)
    assert any(arrays_of(distilled).token_ids_TK) is (outcome == "scored")
    assert (error or "") in (distilled.records[0].error or "")
    assert (error is None) == (distilled.records[0].error is None)


STEP = {"\\boxed{0} if it shows neither": ["\\boxed{1}", "\\boxed{-1}", "\\boxed{-1}"]}
"""Answers to the second question."""


class TwoQuestions(ScriptedJudge):
    """Answers by the system prompt first."""

    async def ask(self, messages: Sequence[Message], num_votes: int) -> JudgeReply:
        whole = "\n".join(message["content"] for message in messages)
        return await super().ask([{"role": "user", "content": whole}], num_votes)


class CountingJudge(TwoQuestions):
    """Counts the tokens of its answers as its endpoint would, but those of one question."""

    async def ask(self, messages: Sequence[Message], num_votes: int) -> JudgeReply:
        reply = await super().ask(messages, num_votes)
        is_counted = FIRST in messages[-1]["content"] or "if it shows neither" in messages[0]["content"]
        return reply._replace(tokens=JudgeTokens(100, 7 * num_votes) if is_counted else None)


def test_the_record_of_a_turn_has_the_tokens_of_its_answers() -> None:
    deps = by_judge(CountingJudge({**STEP, FIRST: YES, LAST: NO}))
    assert [record.judge_tokens for record in run(deps).records] == [JudgeTokens(100, 21), None]
    both = run(deps, judge={"step_votes": 3}).records
    assert [record.judge_tokens for record in both] == [JudgeTokens(200, 42), None], "half a sum is no sum"
    refused = run(by_judge(CountingJudge({**STEP, FIRST: REFUSED, LAST: NO}))).records
    assert [record.judge_tokens for record in refused] == [None, None]


def test_the_second_question_gives_a_turn_its_score() -> None:
    deps = by_judge(TwoQuestions({**STEP, FIRST: YES, LAST: NO}))
    records = run(deps, judge={"step_votes": 3}).records
    assert [(record.step_votes, record.step_score) for record in records] == [((1, -1, -1), -1)] * 2
    unasked = run(make_deps({FIRST: YES, LAST: NO})).records
    assert [(record.step_votes, record.step_score) for record in unasked] == [((), None)] * 2


class Prover:
    """Gives the hints of the first and the last turn a verdict each, after eight continuations if the budget allows."""

    def __init__(self, first: ProofVerdict, last: ProofVerdict) -> None:
        self.verdicts = {False: first, True: last}
        self.requests: list[TeacherRequest] = []

    async def __call__(self, context: TurnContext, request: TeacherRequest, spend: Callable[[int], bool]) -> HintProof:
        insort(self.requests, request, key=end_of_turn)
        if not spend(8):
            return HintProof(ProofRecord((0, 0), (0, 0), ProofVerdict.OPEN), 0, 0.0)
        verdict = self.verdicts[end_of_turn(request) == len(TOKENS)]
        record = ProofRecord((1, 4), (2, 4), verdict, 0.25, (-0.5, 0.8))
        episodes = [continuation(passed).episode for passed in (False, True)]
        return HintProof(record, 8, 1.5, tuple(episode for episode in episodes if episode is not None))


def prove_all(prover: Prover, left: int = 64, config: Any = CONFIG) -> DistilledRecording:
    distiller = TurnDistiller(make_deps({FIRST: YES, LAST: YES}), config, HintPool(), prover, Budget(left))
    return asyncio.run(distiller.distill_all(make_recording(), {}))


def test_only_proven_hints_are_scored_and_the_others_say_why() -> None:
    prover = Prover(ProofVerdict.PROVEN, ProofVerdict.REFUTED)
    distilled = prove_all(prover)
    assert outcomes(distilled) == ["scored", "refuted"]
    proven, refuted = distilled.records
    assert proven.proof is not None
    assert (proven.proof.verdict, proven.error) == (ProofVerdict.PROVEN, None)
    assert (refuted.hint, refuted.error) == (HINT, "the policy passes less often with the hint")
    for record, request in zip(distilled.records, prover.requests, strict=True):
        assert (record.hint_token_ids, record.insert_at) == (request.hint_token_ids, request.insert_at)
        assert request.token_ids == (
            TOKENS[: request.insert_at] + request.hint_token_ids + TOKENS[request.insert_at : record.span[1]]
        ), "the policy reads what the teacher reads"
    assert [len(row) for row in arrays_of(distilled).token_ids_TK] == [0] * 5 + [5] * 3 + [0] * 5
    assert [turn.proof and turn.proof.rollouts for turn in distilled.stats.turns] == [8, 8]
    group = ScoredGroup((rollout_of(distilled.traces[0]),), distillation=GroupDistillation(5))
    assert GroupChecker().read(json.loads(json.dumps(group.to_wire()))).problems == []


def test_a_refuted_hint_can_be_the_contrast_of_its_turn() -> None:
    hint = {"control": "neutral", "proof": {"type": "replay", "refuted": "contrast"}}
    prover = Prover(ProofVerdict.REFUTED, ProofVerdict.PROVEN)
    distilled = prove_all(prover, config=with_settings(CONFIG, {"hint": hint}))
    refuted, proven = distilled.records
    assert outcomes(distilled) == ["scored", "scored"]
    assert (refuted.hint, refuted.hint_token_ids, refuted.insert_at) == (HINT, (), None), "the rows are without a hint"
    assert refuted.control is not None
    assert (refuted.control.kind, refuted.control.hint) == ("refuted", HINT)
    assert refuted.control.hint_token_ids == prover.requests[0].hint_token_ids
    assert proven.control is not None
    assert proven.control.kind == "neutral"
    group = ScoredGroup((rollout_of(distilled.traces[0]),), distillation=GroupDistillation(5))
    assert GroupChecker().read(json.loads(json.dumps(group.to_wire()))).problems == []
    lied = replace(refuted, proof=replace(refuted.proof, verdict=ProofVerdict.OPEN))
    rollout = replace(group.rollouts[0], turns=(lied, proven))
    problems = (
        GroupChecker()
        .read(json.loads(json.dumps(ScoredGroup((rollout,), distillation=GroupDistillation(5)).to_wire())))
        .problems
    )
    assert ["does not go with outcome" in str(problem) for problem in problems] == [True]


def test_continuations_without_a_hint_join_their_group_up_to_a_limit() -> None:
    distilled = prove_all(Prover(ProofVerdict.PROVEN, ProofVerdict.OPEN))

    def joining(**proof: Any) -> list[Episode]:
        config = with_settings(CONFIG, {"hint": {"proof": proof}})
        return Distiller(config, max_token_length=100, retry_s=0).joining([distilled])

    assert joining(type="none") == joining(type="replay") == []
    episodes = joining(type="replay", join=3)
    assert [episode.verification and episode.verification.all_passed for episode in episodes] == [False, True, False]


def test_a_hint_that_is_not_proven_is_dropped_with_its_counts_or_for_want_of_a_budget() -> None:
    distilled = prove_all(Prover(ProofVerdict.OPEN, ProofVerdict.OPEN), left=8)
    assert outcomes(distilled) == ["unproven", "unproven"]
    assert {record.error for record in distilled.records} == {
        "passed 2 of 4 with the hint, 1 of 4 without",
        "the episode's budget of continuations (hint.proof.rollouts) is spent",
    }, "whichever hint is ready first has the budget"
    assert not any(arrays_of(distilled).token_ids_TK)


def test_without_a_world_that_starts_again_proofs_are_refused() -> None:
    config = with_settings(CONFIG, {"hint": {"proof": {"type": "replay"}}})
    distiller = Distiller(config, max_token_length=100, retry_s=0)
    assert not distiller.judges_early
    with pytest.raises(ConfigError, match="replay replays episodes"):
        asyncio.run(distiller.connect(Any, Any, None))  # type: ignore[arg-type]


def test_a_turn_that_nothing_answered_is_counted_and_never_judged() -> None:
    deps = make_deps({FIRST: NO})
    assert outcomes(run(deps, make_recording(verification=None))) == ["vote_failed", "no_next_state"]
    assert isinstance(deps.judge.client, ScriptedJudge)
    assert len(deps.judge.client.asked) == 1


def test_a_hint_that_just_fits_the_teachers_context_is_scored() -> None:
    long = len(run(make_deps({FIRST: YES, LAST: NO})).records[0].hint_token_ids) + 8
    assert outcomes(run(make_deps({FIRST: YES, LAST: NO}, TableTeacher(max_model_len=long + 1))))[0] == "scored"
    assert outcomes(run(make_deps({FIRST: YES, LAST: NO}, TableTeacher(max_model_len=long))))[0] == "too_long"


def test_a_dead_teacher_stops_the_run() -> None:
    with pytest.raises(ServerUnreachableError, match="nowhere"):
        run(make_deps({FIRST: YES, LAST: NO}, TableTeacher(error=GONE)))


def test_a_dead_judge_stops_the_run_only_where_it_is_the_policy_server() -> None:
    with pytest.raises(ServerUnreachableError, match="nowhere"):
        run(make_deps({FIRST: GONE, LAST: NO}, judge_is_policy=True))
    assert outcomes(run(make_deps({FIRST: GONE, LAST: NO}))) == ["judge_error", "vote_failed"]


class BarrierJudge(ScriptedJudge):
    """Answers nobody before both turns have been asked about."""

    def __init__(self) -> None:
        super().__init__({"": YES})
        self.barrier = asyncio.Barrier(2)

    async def ask(self, messages: Sequence[Message], num_votes: int) -> JudgeReply:
        await asyncio.wait_for(self.barrier.wait(), timeout=60)
        return await super().ask(messages, num_votes)


def test_turns_are_judged_at_the_same_time_and_nothing_is_sent_twice() -> None:
    deps = by_judge(BarrierJudge())
    assert outcomes(run(deps)) == ["scored", "scored"]
    assert isinstance(deps.judge.client, BarrierJudge)
    assert isinstance(deps.teacher, TableTeacher)
    assert len(deps.judge.client.asked) == len(set(deps.judge.client.asked)) == 2
    assert len(deps.teacher.requests) == len({r.token_ids for r in deps.teacher.requests}) == 2


def floor_of(trace: Trace, deps: DistillServers, **settings: Any) -> Noise | None:
    return asyncio.run(noise_floor([trace], deps, with_settings(CONFIG, settings)))


def test_without_a_hint_teacher_and_student_agree() -> None:
    deps = make_deps({})
    quiet = floor_of(make_trace(), deps)
    assert quiet is not None
    assert astuple(quiet) == pytest.approx((0.0, 0.0), abs=1e-6)
    turn = make_trace().turns[0]
    for shift, shifted_tokens in ((0.25, turn.end - turn.start), (0.5, 1)):
        logprobs = list(make_trace().logprobs_T)
        for p in range(turn.start, turn.start + shifted_tokens):
            logprobs[p] -= shift
        expected = shift * math.sqrt(shifted_tokens / (turn.end - turn.start)), shift
        for teacher in (TableTeacher(), TableTeacher(has_plugin=False)):
            noise = floor_of(replace(make_trace(), logprobs_T=tuple(logprobs)), make_deps({}, teacher))
            assert noise is not None
            assert astuple(noise) == pytest.approx(expected, abs=1e-6)


def test_noise_floor_is_unknown_where_it_can_not_be_measured() -> None:
    no_turns = replace(make_trace(), turns=())
    other = make_deps({}, teacher_is_policy=False)
    refusing = make_deps({}, TableTeacher(error=REFUSED))
    short = make_deps({}, TableTeacher(max_model_len=8))
    for trace, deps in [(no_turns, make_deps({})), (make_trace(), other), (make_trace(), refusing)]:
        assert floor_of(trace, deps) is None
    assert floor_of(make_trace(), short) is None
    with pytest.raises(ServerUnreachableError):
        floor_of(make_trace(), make_deps({}, TableTeacher(error=GONE)))


def test_the_noise_of_new_weights_and_of_another_teacher_is_that_of_two_readings() -> None:
    newer = TableTeacher(weight_version=8)
    assert floor_of(make_trace(), make_deps({}, newer)) == Noise(0.0, 0.0)
    assert [reading.request for reading in newer.read] == newer.requests
    other = TableTeacher(weight_version=3)
    deps = make_deps({}, other, teacher_is_policy=False)
    assert floor_of(make_trace(), deps, teacher={"gap_baseline": "teacher"}) == Noise(0.0, 0.0)
    assert len(other.read) == 1


NEWER = VERSION + 1
PLAIN = insert_hint(make_trace(), TURNS[0], 3, ())
"""The first turn without a hint."""


def reading(request: TeacherRequest, version: int) -> tuple[float, ...]:
    """The sampled tokens' logprobs by these weights, as a record holds them."""
    return tuple(rounded(table_rows(request, 1, version).actual_R).tolist())


def test_the_weights_that_sampled_need_no_second_reading() -> None:
    deps = make_deps({FIRST: YES, LAST: NO})
    first, last = run(deps).records
    assert (first.weight_version, first.scored_version, last.weight_version) == (VERSION, VERSION, VERSION)
    assert (first.baseline_logprobs, first.unhinted_logprobs, first.control) == (None, None, None)
    assert last.scored_version is None
    assert isinstance(deps.teacher, TableTeacher)
    assert deps.teacher.read == []


@pytest.mark.parametrize("sampled", [VERSION, None])
def test_gaps_are_between_two_readings_by_the_same_weights(sampled: int | None) -> None:
    """New weights came since the turn was sampled, or nobody said which sampled it."""
    trace = make_trace()
    trace = replace(trace, turns=tuple(replace(turn, weight_version=sampled) for turn in trace.turns))
    teacher = TableTeacher(weight_version=NEWER)
    distilled = run(make_deps({FIRST: YES, LAST: NO}, teacher), make_recording(trace=trace))
    record = distilled.records[0]
    assert (record.weight_version, record.scored_version) == (sampled, NEWER)
    assert record.baseline_logprobs == reading(PLAIN, NEWER) != trace.logprobs_T[5:8]
    assert record.unhinted_logprobs is None
    scored = distilled.stats.turns[0].scored
    assert scored is not None
    hinted = table_rows(teacher.requests[0], 1, NEWER).actual_R
    expected = [float(h) - b for h, b in zip(hinted, record.baseline_logprobs, strict=True)]
    assert scored.gaps == pytest.approx(expected, abs=1e-6)
    assert scored.prompt_tokens == len(teacher.requests[0].token_ids) + len(PLAIN.token_ids)


@pytest.mark.parametrize("has_plugin", [True, False])
def test_the_gap_of_a_turn_under_a_grammar_is_between_two_readings(has_plugin: bool) -> None:
    """Its sampled logprobs are of the tokens that the grammar allowed."""
    trace = make_trace()
    trace = replace(trace, turns=tuple(replace(turn, under_grammar=True) for turn in trace.turns))
    deps = make_deps({FIRST: YES, LAST: NO}, TableTeacher(has_plugin=has_plugin))
    (record, _) = run(deps, make_recording(trace=trace)).records
    assert record.baseline_logprobs == reading(PLAIN, VERSION)


def test_a_server_without_versions_has_no_baseline() -> None:
    record = run(make_deps({FIRST: YES, LAST: NO}, TableTeacher(weight_version=NEWER, has_plugin=False))).records[0]
    assert (record.scored_version, record.baseline_logprobs) == (None, None)


@pytest.mark.parametrize("gap_baseline", ["student", "teacher"])
def test_a_separate_teacher_reads_without_the_hint_too(gap_baseline: str) -> None:
    teacher = TableTeacher(weight_version=VERSION)  # The number says nothing: it counts another server's weights.
    deps = make_deps({FIRST: YES, LAST: NO}, teacher, teacher_is_policy=False)
    record = run(deps, teacher={"gap_baseline": gap_baseline}).records[0]
    own = reading(PLAIN, VERSION)
    expected = (own, None) if gap_baseline == "teacher" else (None, own)
    assert (record.baseline_logprobs, record.unhinted_logprobs) == expected


def test_whose_reading_is_the_baseline_makes_no_difference_for_the_policy_itself() -> None:
    def records(gap_baseline: str) -> Any:
        teacher = TableTeacher(weight_version=NEWER)
        return run(make_deps({FIRST: YES, LAST: YES}, teacher), teacher={"gap_baseline": gap_baseline}).records

    assert records("student") == records("teacher")


def controlled(
    *hints: AcceptedHint, teacher: TableTeacher | None = None, **settings: Any
) -> tuple[DistilledRecording, TableTeacher]:
    """The conversation with a hint for its first turn, while `hints` are in the pool."""
    teacher = teacher or TableTeacher()
    deps, config = make_deps({FIRST: YES, LAST: NO}, teacher), with_settings(CONFIG, settings)
    return distill(make_recording(), deps, config, pool_of(*hints)), teacher


@pytest.mark.parametrize("top_k", [1, 5])
def test_a_control_is_read_where_the_hint_was_read_and_says_what_it_knows_of_the_rows_ids(top_k: int) -> None:
    distilled, teacher = controlled(OTHER, hint={"control": "other"}, distill_topk=top_k)
    record = distilled.records[0]
    assert record.control is not None
    assert (record.control.kind, record.control.hint) == ("other", OTHER.text)
    (read,) = teacher.read
    assert read.top_k == (1 if top_k == 1 else 10)
    assert read.request.token_ids == TOKENS[:3] + record.control.hint_token_ids + TOKENS[3:8]
    text = make_qwen_tokenizer().decode(record.control.hint_token_ids)
    assert text == f"\n\n[user's hint / instruction]\n{OTHER.text}"
    rows = table_rows(read.request, read.top_k)
    for position, row in enumerate(record.control.logprobs_RK):
        ids = arrays_of(distilled).token_ids_TK[5 + position]
        top = rows.top_ids_RK[position].tolist()
        exact = next_token_logprobs(read.request.token_ids[: position - 3])
        assert row[0] is not None
        assert [logprob is not None for logprob in row[1:]] == [token in top for token in ids[1:]]
        assert all(logprob is None or abs(logprob - exact[i]) < 1e-4 for logprob, i in zip(row, ids, strict=True))
    scored = distilled.stats.turns[0].scored
    assert scored is not None
    assert scored.control is not None
    assert scored.control.entries == 3 * top_k
    assert not scored.control.fell_back


def test_while_no_hint_fits_the_neutral_one_is_the_control_and_that_is_counted() -> None:
    distilled, _ = controlled(hint={"control": "same_task"})
    control, scored = distilled.records[0].control, distilled.stats.turns[0].scored
    assert control is not None
    assert (control.kind, control.hint) == ("neutral", CONFIG.hint.neutral)
    assert scored is not None
    assert scored.control is not None
    assert scored.control.fell_back


def test_a_control_that_does_not_fit_the_teachers_context_makes_room_for_a_shorter_one() -> None:
    hinted = len(controlled()[1].requests[0].token_ids)
    long = AcceptedHint("two_sum", "Remember what was seen. " * 40)
    distilled, _ = controlled(long, teacher=TableTeacher(max_model_len=hinted + 40), hint={"control": "other"})
    control = distilled.records[0].control
    assert control is not None
    assert control.kind == "neutral"
    settings = {"hint": {"control": "other", "neutral": "Take your time. " * 40}}
    distilled, teacher = controlled(long, teacher=TableTeacher(max_model_len=hinted + 40), **settings)
    assert outcomes(distilled) == ["too_long", "vote_failed"], "a contrast has nothing to say of it"
    assert teacher.read == []


def test_a_control_and_a_baseline_go_in_one_request() -> None:
    distilled, teacher = controlled(OTHER, teacher=TableTeacher(weight_version=NEWER), hint={"control": "other"})
    assert len(teacher.requests) == 1
    assert len(teacher.read) == 2
    record = distilled.records[0]
    assert record.baseline_logprobs == reading(PLAIN, NEWER)
    assert record.control is not None
    assert [row[0] for row in record.control.logprobs_RK] == list(reading(teacher.read[1].request, NEWER))


SHORT = "Check divisibility by 15."
TWO_HINTS = [POSITIVE.replace(HINT, SHORT), POSITIVE, NEGATIVE]


def compared(answer: Sequence[str] = TWO_HINTS, teacher: TableTeacher | None = None, **settings: Any) -> Any:
    """The first turn's record and rows, its statistics and the teacher, with `hint.selection: overlap`."""
    teacher = teacher or TableTeacher()
    distilled = run(
        make_deps({FIRST: answer, LAST: NO}, teacher),
        **(settings | {"hint": {"selection": "overlap", **settings.get("hint", {})}}),
    )
    one = rollout_of(distilled.traces[0])
    whole = ScoredGroup((one,), distillation=GroupDistillation(5, hint_sources=("judge",))).to_wire()
    assert GroupChecker().read(json.loads(json.dumps(whole))).problems == []
    return distilled.records[0], distilled.traces[0].arrays, distilled.stats.turns[0].scored, teacher


@pytest.mark.parametrize("version", [VERSION, NEWER])
def test_all_hints_of_a_turn_are_scored_in_one_request_and_the_file_rebuilds_every_row(version: int) -> None:
    record, arrays, stats, teacher = compared(teacher=TableTeacher(weight_version=version))
    assert [one.hint for one in record.hints] == [HINT, SHORT], "the longest first"
    assert len(teacher.requests) == 1
    assert [one.top_k for one in teacher.read] == [5, 5], "the turn without a hint, and with the other one"
    requests = [
        TeacherRequest(TOKENS[: one.insert_at] + one.hint_token_ids + TOKENS[one.insert_at : 8], 3, 0, ())
        for one in record.hints
    ]
    assert {request.token_ids for request in requests} == {
        teacher.requests[0].token_ids,
        teacher.read[1].request.token_ids,
    }
    rows = [table_rows(request, 5, version) for request in requests]
    best = [one.overlap for one in record.hints].index(max(one.overlap for one in record.hints))
    assert (record.hint, record.hint_token_ids) == (record.hints[best].hint, record.hints[best].hint_token_ids)
    for row in range(3):
        assert arrays.logprobs_TK[5 + row][0] == rounded(rows[best].actual_R)[row]
        assert {*arrays.token_ids_TK[5 + row][1:]} <= {*rows[best].top_ids_RK[row].tolist()}
    plain = table_rows(PLAIN, 5, version)
    overlaps = [overlap(one, plain, TOKENS[5:8]) for one in rows]
    assert [one.overlap for one in record.hints] == pytest.approx([one.mean() for one in overlaps], abs=1e-6)
    assert stats.overlaps == pytest.approx(overlaps[best])
    baseline = plain.actual_R if version == NEWER else make_trace().logprobs_T[5:8]
    assert (record.baseline_logprobs is None) == (version == VERSION)
    for one, read in zip(record.hints, rows, strict=True):
        assert one.gap == pytest.approx(sum(a - b for a, b in zip(read.actual_R, baseline, strict=True)) / 3, abs=1e-4)
        assert one.entropy > 0
    assert stats.prompt_tokens == sum(len(request.token_ids) for request in (PLAIN, *requests))


def test_a_hint_that_does_not_fit_is_left_out_of_the_comparison() -> None:
    whole = len(compared()[3].requests[0].token_ids)
    record = compared(teacher=TableTeacher(max_model_len=whole))[0]
    assert (record.hint, record.hints) == (SHORT, ())


def test_a_single_hint_is_scored_as_without_a_comparison() -> None:
    record, _, stats, teacher = compared(YES)
    assert (record.hint, record.hints, stats.overlaps) == (HINT, (), ())
    assert teacher.read == []


def test_a_server_without_the_plugin_may_compare() -> None:
    record = compared(teacher=TableTeacher(has_plugin=False))[0]
    assert len(record.hints) == 2
    assert record.baseline_logprobs is None


@pytest.mark.parametrize("named_ids", [False, True])
@pytest.mark.parametrize("support", ["student", "union"])
@pytest.mark.parametrize("separate", [False, True])
def test_rows_of_another_support_hold_the_students_tokens(named_ids: bool, support: str, separate: bool) -> None:
    teacher = TableTeacher(named_ids=named_ids)
    student = TableTeacher(weight_version=NEWER) if separate else None
    deps = replace(make_deps({FIRST: YES, LAST: NO}, teacher, teacher_is_policy=not separate), student=student)
    config = with_settings(CONFIG, {"teacher": {"support": support}, "hint": {"control": "neutral"}})
    distilled = distill(make_recording(), deps, config)
    record, arrays = distilled.records[0], distilled.traces[0].arrays
    assert record.support == support
    one = ScoredGroup((rollout_of(distilled.traces[0]),), distillation=GroupDistillation(5))
    assert GroupChecker().read(json.loads(json.dumps(one.to_wire()))).problems == []
    exact = named_ids and not separate
    assert (student.requests if student else [teacher.read[0].request]) == [PLAIN]
    assert teacher.top_ks == [5 if exact else 10]
    of_student = table_rows(PLAIN, 5, NEWER if separate else VERSION)
    hinted = table_rows(teacher.requests[0], 5 if exact else 10)
    if exact:
        hinted = named_rows(hinted, teacher.requests[0], of_student.top_ids_RK)
    rebuilt = with_support(hinted, TOKENS[5:8], student=of_student, support=record.support, top_k=5)
    assert [list(row) for row in arrays.token_ids_TK[5:8]] == rebuilt.top_ids_RK.tolist()
    assert [list(row) for row in arrays.logprobs_TK[5:8]] == rounded(rebuilt.top_logprobs_RK).tolist()
    if support == "student" and exact:
        likely = [
            [one for one in row if one != token]
            for token, row in zip(TOKENS[5:8], of_student.top_ids_RK.tolist(), strict=True)
        ]
        assert [{*row[1:]} for row in arrays.token_ids_TK[5:8]] == [{*row[:4]} for row in likely]
    assert record.control is not None
    assert (None in [one for row in record.control.logprobs_RK for one in row]) is not exact


def test_a_comparison_by_named_ids_knows_the_students_whole_top() -> None:
    record = compared(teacher=TableTeacher(named_ids=True))[0]
    plain = table_rows(PLAIN, 5)
    for one in record.hints:
        ids = TOKENS[: one.insert_at] + one.hint_token_ids + TOKENS[one.insert_at : 8]
        shared = []
        for row, token in enumerate(TOKENS[5:8]):
            with_hint, without = next_token_logprobs(ids[: -3 + row]), next_token_logprobs(TOKENS[: 5 + row])
            each = {*plain.top_ids_RK[row].tolist(), token}
            shared.append(sum(float(np.exp(min(with_hint[id_], without[id_]))) for id_ in each))
        assert one.overlap == pytest.approx(sum(shared) / 3, abs=1e-6)


def test_kept_hints_are_compared_again_or_the_chosen_one_is_scored() -> None:
    config = with_settings(CONFIG, {"hint": {"selection": "overlap"}})
    deps = make_deps({FIRST: TWO_HINTS, LAST: NO})
    one = rollout_of(distill(make_recording(), deps, config).traces[0])

    def again(config: DistillConfig) -> ScoredRollout:
        return asyncio.run(rescored(one, deps, config))

    assert again(config) == one
    (plain, _), chosen = again(CONFIG).turns or (), (one.turns or ())[0]
    assert (plain.hint, plain.hint_token_ids, plain.hints) == (chosen.hint, chosen.hint_token_ids, ())


def test_a_control_is_none_of_the_compared_hints() -> None:
    for _ in range(5):
        record = compared(hint={"control": "same_task"})[0]
        assert record.control.kind == "neutral"


def test_each_hint_may_be_one_of_another_task() -> None:
    distilled, teacher = controlled(OTHER, hint={"source": (WRONG_HINT,)})
    record = distilled.records[0]
    assert record.hint == OTHER.text
    assert [vote.hint for vote in record.votes] == [HINT] * 3
    assert teacher.requests[0].token_ids == TOKENS[:3] + record.hint_token_ids + TOKENS[3:8]
    assert OTHER.text in make_qwen_tokenizer().decode(record.hint_token_ids)


def test_while_no_other_task_has_a_hint_the_turn_keeps_none() -> None:
    distilled, teacher = controlled(hint={"source": (WRONG_HINT,)})
    record = distilled.records[0]
    assert (record.outcome.value, record.hint, record.hint_token_ids) == ("vote_failed", None, ())
    assert record.error == "hint.source wrong_hint: no other task has an accepted hint yet"
    assert teacher.requests == []


def test_a_wrong_hints_control_is_of_a_third_task() -> None:
    for _ in range(5):
        record = controlled(OTHER, THIRD, hint={"source": (WRONG_HINT,), "control": "other"})[0].records[0]
        assert record.control is not None
        assert {record.hint, record.control.hint} == {OTHER.text, THIRD.text}


def test_the_teacher_may_read_no_hint_at_all() -> None:
    distilled, teacher = controlled(hint={"source": (NO_HINT,)})
    record, scored = distilled.records[0], distilled.stats.turns[0].scored
    assert teacher.requests[0].token_ids == TOKENS[:8]
    assert (record.hint, record.hint_token_ids, record.insert_at) == (HINT, (), None)
    assert scored is not None
    assert scored.gaps == pytest.approx([0.0] * 3, abs=1e-6)


def test_what_came_after_a_turn_may_be_its_hint_and_no_judge_is_asked() -> None:
    distilled, teacher = controlled(hint={"source": ("feedback",)})
    assert outcomes(distilled) == ["scored", "scored"]
    first, last = distilled.records
    said = "If you answer as you are about to, this is what comes of it:\n"
    assert first.evidence == ("tool", "verdict")
    assert first.hint == f"{said}wrote 2 lines to solution.py\n\n{VERDICT.judge_report}"
    assert last.hint is not None
    assert last.hint.startswith(said)
    assert [(record.votes, record.question) for record in distilled.records] == [((), None), ((), None)]
    assert teacher.requests[0].token_ids == TOKENS[:3] + first.hint_token_ids + TOKENS[3:8]


@pytest.mark.parametrize(
    ("solution", "outcome", "error"),
    [
        ("def fizzbuzz(n):\n    return n", "scored", None),
        (None, "vote_failed", "hint.source reference: the task has no reference solution"),
        ("def fizzbuzz(n):\n    return {30: 'FizzBuzz'}[n]\nassert fizzbuzz(30) == 'FizzBuzz'", "leaked", None),
    ],
)
def test_the_tasks_own_solution_may_be_the_hint_unless_it_tells_the_tests(
    solution: str | None, outcome: str, error: str | None
) -> None:
    recording = replace(make_recording(), task=replace(TASK, reference_solution=solution))
    distilled = run(make_deps({}), recording, hint={"source": ("reference",)})
    assert outcomes(distilled) == [outcome, outcome]
    record = distilled.records[0]
    expected = f"This is a right solution of the task:\n{solution}" if outcome == "scored" else None
    assert (record.hint, record.error, record.votes) == (expected, error, ())


PASSED = replace(VERDICT, passed=2, total=2)


def by(sources: tuple[str, ...], *siblings: Recording, **changed: Any) -> tuple[DistilledRecording, int]:
    """A failed rollout of which the first of two turns writes the solution, and how often its judge was asked."""
    deps, config = make_deps({FIRST: YES, LAST: YES}), with_settings(CONFIG, {"hint": {"source": sources}})
    distilled = distill(replace(make_recording(), **changed), deps, config, siblings=siblings)
    return distilled, sum(record.question is not None for record in distilled.records)


def passing(text: str) -> Recording:
    """A sibling that passed, whose first turn wrote this."""
    call = {"function": {"name": "write_file", "arguments": json.dumps({"path": "solution.py", "content": text})}}
    chat = messages()
    chat[2] = {**chat[2], "tool_calls": [call]}
    return make_recording(chat, PASSED)


def test_what_a_sibling_that_passed_wrote_is_the_hint_of_the_turn_that_wrote_it_wrong() -> None:
    long, short = passing("def f(n):\n    return n + 1"), passing("f = abs")
    distilled, asked = by(("sibling",), make_recording(), long, short)
    first, last = distilled.records
    said = f"{SIBLING}\n[write_file]\npath: solution.py\ncontent: f = abs"
    assert (first.hint, first.hint_source, first.outcome.value) == (said, "sibling", "scored")
    assert (last.hint, last.hint_source, last.outcome.value) == (None, None, "vote_failed")
    assert last.error == "hint.source sibling: the turn did not make what failed"
    assert asked == 0


@pytest.mark.parametrize(
    ("siblings", "changed", "why"),
    [
        ((), {}, "no other rollout of the group passed"),
        ((make_recording(),), {}, "no other rollout of the group passed"),
        ((passing("f = abs"),), {"verification": PASSED}, "this rollout passed itself"),
    ],
)
def test_a_sibling_has_no_hint(siblings: tuple[Recording, ...], changed: dict[str, Any], why: str) -> None:
    record = by(("sibling",), *siblings, **changed)[0].records[0]
    assert (record.outcome.value, record.error) == ("vote_failed", f"hint.source sibling: {why}")


def test_the_first_source_that_has_a_hint_is_taken_and_the_judge_is_only_asked_where_it_must_be() -> None:
    distilled, asked = by(("sibling", "judge"), passing("f = abs"))
    assert [record.hint_source for record in distilled.records] == ["sibling", "judge"]
    assert [bool(record.votes) for record in distilled.records] == [False, True]
    assert asked == 1
    distilled, asked = by(("reference", "feedback", "judge"), passing("f = abs"))
    assert [record.hint_source for record in distilled.records] == ["feedback", "feedback"]
    assert (distilled.records[0].error, asked) == (None, 0)
    distilled, _ = by(("judge", "feedback"))
    assert [record.hint_source for record in distilled.records] == ["judge", "judge"]


def test_a_judge_without_a_hint_leaves_its_votes_and_the_next_source_is_asked() -> None:
    distilled = run(make_deps({FIRST: NO, LAST: NONSENSE}), hint={"source": ("judge", "feedback")})
    assert [record.hint_source for record in distilled.records] == ["feedback", "feedback"]
    assert all(len(record.votes) == 3 and record.question for record in distilled.records)


SECRET = "def fizzbuzz(n):\n    assert fizzbuzz(30) == 'FizzBuzz'"


def test_a_sibling_that_tells_the_tests_is_dropped_for_one_that_does_not() -> None:
    record = by(("sibling",), passing(SECRET))[0].records[0]
    assert (record.outcome.value, record.hint, record.hint_source) == ("leaked", None, None)
    longer = passing("def fizzbuzz(n):\n" + "    # It takes its time.\n" * 20 + "    return n")
    record = by(("sibling",), passing(SECRET), longer)[0].records[0]
    assert record.hint is not None
    assert "It takes its time" in record.hint


def test_with_the_next_state_alone_a_sibling_still_belongs_to_the_turn_that_wrote() -> None:
    config = with_settings(CONFIG, {"hint": {"source": ("sibling",)}, "hindsight": {"evidence": "next_state"}})
    done = distill(make_recording(), make_deps({}), config, siblings=[passing("f = abs")])
    assert [record.hint_source for record in done.records] == ["sibling", None]


def test_a_judge_that_is_gone_and_a_leak_are_told_before_what_a_later_source_lacks() -> None:
    done = run(make_deps({FIRST: REFUSED, LAST: NO}), hint={"source": ("judge", "sibling")})
    assert outcomes(done) == ["judge_error", "vote_failed"]
    assert done.records[0].error == "HTTP 400: no"
    assert outcomes(by(("sibling", "reference"), passing(SECRET))[0])[0] == "leaked"


FILES = [
    {},
    {"hint": {"source": ("feedback",)}},
    {"hint": {"source": ("reference",)}},
    {"hint": {"source": ("sibling", "reference", "judge")}},
    {"hint": {"control": "other"}},
    {"hint": {"control": "other", "source": (WRONG_HINT,)}},
    {"hint": {"control": "neutral", "source": (NO_HINT,)}},
    {"teacher": {"gap_baseline": "teacher"}},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", FILES)
@pytest.mark.parametrize("version", [VERSION, NEWER])
@pytest.mark.parametrize("top_k", [1, 5])
@pytest.mark.parametrize("answers", [(YES, YES), (YES, NONSENSE), (LEAK, REFUSED), (NO, YES)])
def test_a_written_group_passes_the_checks_of_a_file(
    answers: tuple[Any, Any], top_k: int, version: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_settings(CONFIG, {"distill_topk": top_k, **settings})
    deps = make_deps({FIRST: answers[0], LAST: answers[1]}, TableTeacher(weight_version=version))
    distilled = distill(make_recording(), deps, config, pool_of(OTHER, THIRD))
    distiller = Distiller(config, max_token_length=64, retry_s=0.0)
    monkeypatch.setattr(distiller, "servers_of", lambda _: deps)
    about = asyncio.run(distiller.close_group([distilled])).metadata
    group = ScoredGroup((rollout_of(distilled.traces[0]),), item_id="t#0", task_id="t", distillation=about)
    checker = GroupChecker()
    wire = json.loads(json.dumps(group.to_wire(), allow_nan=False))
    assert not checker.read(wire).problems
    assert ScoredGroup.from_wire(wire).to_wire() == wire
    assert checker.counts["scored rows"] == sum(len(turn.scored.gaps) for turn in distilled.stats.turns if turn.scored)
    assert sum(about.outcomes.values()) == len(TURNS)
    assert (about.noise_floor, about.noise_rms) == pytest.approx((0.0, 0.0), abs=1e-6)


def test_a_kinds_own_teacher_scores_it_and_the_group_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_settings(CONFIG, {"teacher": {"by_kind": {"math": TeacherServer(base_url="http://127.0.0.1:1/v1")}}})
    usual, own = TableTeacher(), TableTeacher(weight_version=NEWER)
    deps = replace(make_deps({FIRST: YES, LAST: YES}, usual), teachers={"math": own})
    distiller = Distiller(config, max_token_length=64, retry_s=0.0)
    monkeypatch.setattr(distiller, "servers_of", lambda _: deps)

    def distilled(kind: str | None) -> tuple[DistilledRecording, GroupDistillation]:
        async def run() -> tuple[DistilledRecording, GroupDistillation]:
            one = await distiller.distill(replace(make_recording(), task=replace(TASK, kind=kind)), "http://policy")
            return one, (await distiller.close_group([one])).metadata

        return asyncio.run(run())

    of_math, about = distilled("math")
    assert (len(own.requests), len(usual.requests)) == (2, 0)
    assert (about.teacher, about.noise_floor) == ("math", None)
    assert of_math.records[0].unhinted_logprobs is not None
    group = ScoredGroup((rollout_of(of_math.traces[0]),), distillation=about)
    wire = json.loads(json.dumps(group.to_wire()))
    assert wire["group_overrides"]["opd"]["teacher"] == "math"
    assert ScoredGroup.from_wire(wire).distillation == about
    assert not GroupChecker().read(wire).problems
    _, about = distilled("poetry")
    assert (len(own.requests), about.teacher) == (2, None)
    assert len(usual.requests) == 3  # Both turns, and the noise floor.


def test_closing_closes_all() -> None:
    other = TableTeacher()
    deps = replace(make_deps({}), teachers={"math": other})
    asyncio.run(deps.close())
    assert isinstance(deps.judge.client, ScriptedJudge)
    assert isinstance(deps.teacher, TableTeacher)
    assert deps.judge.client.closed
    assert deps.teacher.closed
    assert other.closed


def test_a_turn_that_was_distilled_before_is_not_asked_about_again_unless_more_is_known_of_it() -> None:
    """Turn 0 was judged when its tool's result came, before the next turn; the result is still all there is."""
    whole = make_trace()
    so_far = Trace(whole.messages[:4], TOKENS[:8], whole.masks_T[:8], whole.logprobs_T[:8], whole.turns[:1])
    another = replace(so_far, messages=(*so_far.messages[:3], {**so_far.messages[3], "content": "disk full"}))
    recording = make_recording(verification=None)

    async def run() -> tuple[DistilledRecording, list[DistilledRecording], list[int]]:
        teacher = TableTeacher()
        distiller = TurnDistiller(make_deps({FIRST: YES, LAST: YES}, teacher), CONFIG, HintPool())
        fresh = await distiller.distill_all(recording, {})
        asked: list[int] = []
        again: list[DistilledRecording] = []
        for trace in (so_far, another):
            (context,) = turn_contexts(make_recording(verification=None, trace=trace), CONFIG)
            known = {0: await distiller.distill(context)}
            before = len(teacher.requests)
            again.append(await distiller.distill_all(recording, known))
            asked.append(len(teacher.requests) - before)
        return fresh, again, asked

    fresh, (reused, asked_again), asked = asyncio.run(run())
    assert fresh.records == reused.records == asked_again.records
    assert arrays_of(fresh) == arrays_of(reused)
    assert asked == [0, 1]


def test_the_tokens_of_a_question_that_lacked_evidence_are_counted_too() -> None:
    whole = make_trace()
    other_result = (*whole.messages[:3], {**whole.messages[3], "content": "disk full"})
    so_far = Trace(other_result, TOKENS[:8], whole.masks_T[:8], whole.logprobs_T[:8], whole.turns[:1])

    async def run() -> list[JudgeTokens | None]:
        distiller = TurnDistiller(by_judge(CountingJudge({FIRST: YES, LAST: YES})), CONFIG, HintPool())
        (context,) = turn_contexts(make_recording(verification=None, trace=so_far), CONFIG)
        by_turn = {0: await distiller.distill(context)}
        recording = make_recording(verification=None)
        (same, _) = turn_contexts(recording, CONFIG)
        reused = await distiller.distill_all(recording, {0: await distiller.distill(same)})
        return [done.records[0].judge_tokens for done in (await distiller.distill_all(recording, by_turn), reused)]

    assert asyncio.run(run()) == [JudgeTokens(200, 42), JudgeTokens(100, 21)]


def test_pending_turns_are_known_when_all_are_done_without_those_that_failed() -> None:
    async def known(deps: DistillServers) -> dict[int, DistilledTurn]:
        distiller = Distiller(CONFIG, max_token_length=100, retry_s=0.0)
        distiller._servers["policy"] = deps
        async with PendingTurns(distiller, "policy") as turns:
            turns.begin(make_recording(verification=None), 0)
            return await turns.results()

    found = asyncio.run(known(make_deps({FIRST: YES})))
    assert [(index, one.stats.record.outcome.value) for index, one in found.items()] == [(0, "scored")]
    assert asyncio.run(known(make_deps({FIRST: GONE}, judge_is_policy=True))) == {}


def thinking(reasoning_tokens: int) -> Recording:
    """The conversation of two turns, of which the first begins with reasoning."""
    chat = messages()
    chat[2]["reasoning_content"] = "They ask for 15."
    trace = make_trace(chat)
    turns = (replace(trace.turns[0], reasoning_tokens=reasoning_tokens), trace.turns[1])
    return make_recording(trace=replace(trace, turns=turns))


@pytest.mark.parametrize("settings", [{}, {"hint": {"control": "neutral"}}, {"teacher": {"gap_baseline": "teacher"}}])
def test_reasoning_can_be_left_out_of_what_is_scored(settings: dict[str, Any]) -> None:
    deps = make_deps({FIRST: YES, LAST: YES}, TableTeacher(weight_version=NEWER))
    every = run(deps, thinking(2), **settings)
    answers = run(
        deps, thinking(2), **{**settings, "teacher": {**settings.get("teacher", {}), "score_reasoning": "answer"}}
    )
    assert [len(row) for row in arrays_of(every).token_ids_TK] == [0] * 5 + [5] * 3 + [0] * 3 + [5] * 2
    assert [len(row) for row in arrays_of(answers).token_ids_TK] == [0] * 7 + [5] + [0] * 3 + [5] * 2
    assert arrays_of(answers).logprobs_TK[7:] == arrays_of(every).logprobs_TK[7:]
    first = answers.records[0]
    assert (first.span, first.scored_span, first.reasoning_tokens) == ((5, 8), (7, 8), 2)
    assert len(first.baseline_logprobs or ()) == 1
    wire = json.loads(json.dumps(ScoredGroup((rollout_of(answers.traces[0]),)).to_wire()))
    assert GroupChecker().read(wire).problems == []
    assert ScoredGroup.from_wire(wire).to_wire() == wire
    stats = every.stats.turns[0].scored
    assert stats is not None
    assert stats.reasoning_tokens == 2


def test_a_turn_of_reasoning_only_has_no_answer_to_score() -> None:
    (first, _) = run(make_deps({FIRST: YES, LAST: NO}), thinking(3), teacher={"score_reasoning": "answer"}).records
    assert (first.outcome.value, first.error) == (
        "scoring_error",
        "teacher.score_reasoning answer: the turn is reasoning only",
    )


@pytest.mark.parametrize("reads", [True, False])
def test_the_judge_reads_reasoning_if_it_may(reads: bool) -> None:
    deps = make_deps({FIRST: NO, LAST: NO})
    first, _ = run(deps, thinking(2), judge={"reads_reasoning": reads}).records
    assert ("They ask for 15." in (first.question or "")) is reads


def branched_recording() -> Recording:
    """Return a rollout whose template rewrote the first turn when the second prompt was written."""
    whole = make_trace()
    earlier = Trace(whole.messages[:4], TOKENS[:8], whole.masks_T[:8], whole.logprobs_T[:8], whole.turns[:1])
    prompt = (1, 2, 3, 4, 50, 5, 6, 9)
    ending = (*prompt, 40, 41)
    logprobs = [float(next_token_logprobs(ending[:i])[ending[i]]) for i in (8, 9)]
    later = Trace(
        messages=whole.messages,
        tokens_T=ending,
        masks_T=(*(-100,) * 8, 40, 41),
        logprobs_T=(*(1.0,) * 8, *logprobs),
        turns=(replace(whole.turns[1], start=8, end=10, assistant_open=7),),
        context_turns=(ContextTurn(2, "shared"),),
    )
    return replace(make_recording(), traces=(earlier, later))


def test_turns_of_an_earlier_sequence_are_judged_by_what_came_in_a_later_one() -> None:
    """Each is scored where it was sampled."""
    recording = branched_recording()
    prompt, ending = recording.traces[1].tokens_T[:8], recording.traces[1].tokens_T
    deps = make_deps({FIRST: YES, LAST: YES})
    distilled, linear = run(deps, recording), run(make_deps({FIRST: YES, LAST: YES}))
    assert [record.evidence for record in distilled.records] == [record.evidence for record in linear.records]
    first, second = distilled.traces
    assert [len(row) for row in first.arrays.token_ids_TK] == [0] * 5 + [5] * 3
    assert [len(row) for row in second.arrays.token_ids_TK] == [0] * 8 + [5] * 2
    assert first.arrays.logprobs_TK == arrays_of(linear).logprobs_TK[:8]
    (record,) = second.records
    assert (record.span, record.insert_at) == ((8, 10), 7)
    assert isinstance(deps.teacher, TableTeacher)
    read = deps.teacher.requests[1]
    assert read.token_ids == (*prompt[:7], *record.hint_token_ids, *ending[7:])
    group = ScoredGroup(tuple(rollout_of(one, session_id="0") for one in distilled.traces))
    assert GroupChecker().read(json.loads(json.dumps(group.to_wire()))).problems == []
