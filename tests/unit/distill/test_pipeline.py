import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from renderers import Qwen3RendererConfig, create_renderer

from agentic_opd.core.errors import AlignmentError, ServerMismatchError, ServerRequestError, ServerUnreachableError
from agentic_opd.core.types import Episode, Message
from agentic_opd.distill.config import DistillConfig
from agentic_opd.distill.connect import DistillServers
from agentic_opd.distill.distiller import Distiller
from agentic_opd.distill.judge import JudgeReply
from agentic_opd.distill.pipeline import DistilledEpisode, distill_episode, noise_floor
from agentic_opd.wire.checks import GroupChecker
from agentic_opd.wire.group import ScoredGroup, ScoredRollout

from .conftest import make_qwen_tokenizer
from .fakes import HINT, NEGATIVE, POSITIVE, TOKENS, ScriptedJudge, TableTeacher, make_episode, table_rows

FIRST, LAST = "tool result", "hidden test verdict"
"""What stands in the judge's chat for each of the episode's two turns."""
YES, NO, NONSENSE = [POSITIVE] * 3, [NEGATIVE] * 3, ["hm"] * 3
LEAK = [POSITIVE.replace(HINT, "See that fizzbuzz(30) == 'FizzBuzz' holds.")] * 3
REFUSED = ServerRequestError("HTTP 400: no", 400)
GONE = ServerUnreachableError("http://nowhere gave no usable answer for 60 s")
CONFIG = DistillConfig(distill_topk=5)


def make_deps(
    script: Mapping[str, Sequence[str] | Exception], teacher: TableTeacher | None = None, **flags: bool
) -> DistillServers:
    tokenizer = make_qwen_tokenizer()
    return DistillServers(
        judge=ScriptedJudge(script),
        teacher=teacher or TableTeacher(),
        renderer=create_renderer(tokenizer, Qwen3RendererConfig(enable_thinking=False)),
        tokenizer=tokenizer,
        judge_is_policy=flags.get("judge_is_policy", False),
        teacher_is_policy=flags.get("teacher_is_policy", True),
    )


def run(deps: DistillServers, episode: Episode | None = None, config: DistillConfig = CONFIG) -> DistilledEpisode:
    return asyncio.run(distill_episode(episode or make_episode(), deps, config))


def outcomes(distilled: DistilledEpisode) -> list[str]:
    return [record.outcome.value for record in distilled.records]


def test_an_accepted_hint_is_scored_and_recorded() -> None:
    deps = make_deps({FIRST: YES, LAST: NO})
    distilled = run(deps)
    assert outcomes(distilled) == ["scored", "vote_failed"]
    first, last = distilled.records
    assert (first.span, first.hint, first.insert_at, first.next_state_role) == ((5, 8), HINT, 3, "tool")
    assert (last.span, last.hint, last.insert_at, last.next_state_role) == ((11, 13), None, None, "verdict")
    assert [len(row) for row in distilled.arrays.token_ids_TK] == [0] * 5 + [5] * 3 + [0] * 5
    assert isinstance(deps.teacher, TableTeacher)
    (request,) = deps.teacher.requests
    assert deps.teacher.top_ks == [5]
    assert request.token_ids == TOKENS[:3] + first.hint_token_ids + TOKENS[3:8], "the record rebuilds what was read"
    teacher, student = table_rows(request, 1).actual_R, make_episode().logprobs_T[5:8]
    assert distilled.stats.sampled_tokens == 5
    scored, failed = distilled.stats.turns
    assert (scored.record, failed.record) == distilled.records
    assert (scored.judge_s, failed.judge_s, failed.scored) == (0.25, 0.25, None)
    assert scored.scored is not None
    assert scored.scored.gaps == pytest.approx([t - s for t, s in zip(teacher, student, strict=True)], abs=1e-6)
    assert (scored.scored.prompt_tokens, scored.scored.cached_tokens) == (len(request.token_ids), 4)
    assert scored.scored.seconds == 0.5
    assert scored.scored.masses == pytest.approx(
        [sum(math.exp(logprob) for logprob in row) for row in distilled.arrays.logprobs_TK[5:8]]
    )


@pytest.mark.parametrize("placement", ["end", "last_user"])
def test_placement_decides_where_the_hint_of_a_later_turn_goes(placement: str) -> None:
    config = CONFIG.model_copy(update={"hint_placement": placement})
    record = run(make_deps({FIRST: NO, LAST: YES}), config=config).records[1]
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
    assert any(distilled.arrays.token_ids_TK) is (outcome == "scored")
    assert (error or "") in (distilled.records[0].error or "")
    assert (error is None) == (distilled.records[0].error is None)


def test_a_turn_that_nothing_answered_is_counted_and_never_judged() -> None:
    deps = make_deps({FIRST: NO})
    assert outcomes(run(deps, make_episode(verification=None))) == ["vote_failed", "no_next_state"]
    assert isinstance(deps.judge, ScriptedJudge)
    assert len(deps.judge.asked) == 1


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
    deps = make_deps({})
    deps = replace(deps, judge=BarrierJudge())
    assert outcomes(run(deps)) == ["scored", "scored"]
    assert isinstance(deps.judge, BarrierJudge)
    assert isinstance(deps.teacher, TableTeacher)
    assert len(deps.judge.asked) == len(set(deps.judge.asked)) == 2
    assert len(deps.teacher.requests) == len({r.token_ids for r in deps.teacher.requests}) == 2


def test_without_a_hint_teacher_and_student_agree() -> None:
    deps = make_deps({})
    assert asyncio.run(noise_floor([make_episode()], deps)) == pytest.approx(0.0, abs=1e-6)
    shifted = replace(make_episode(), logprobs_T=tuple(x - 0.25 for x in make_episode().logprobs_T))
    assert asyncio.run(noise_floor([shifted], deps)) == pytest.approx(0.25, abs=1e-6)


def test_noise_floor_is_unknown_where_it_can_not_be_measured() -> None:
    no_turns = replace(make_episode(), turns=())
    other = make_deps({}, teacher_is_policy=False)
    refusing = make_deps({}, TableTeacher(error=REFUSED))
    short = make_deps({}, TableTeacher(max_model_len=8))
    newer = make_deps({}, TableTeacher(weight_version=8))
    for episode, deps in [
        (no_turns, make_deps({})),
        (make_episode(), other),
        (make_episode(), refusing),
        (make_episode(), short),
        (replace(make_episode(), weight_version=7), newer),  # A push came between: the gap is no noise.
    ]:
        assert asyncio.run(noise_floor([episode], deps)) is None
    assert asyncio.run(noise_floor([replace(make_episode(), weight_version=8)], newer)) is not None
    with pytest.raises(ServerUnreachableError):
        asyncio.run(noise_floor([make_episode()], make_deps({}, TableTeacher(error=GONE))))


@pytest.mark.parametrize("top_k", [1, 5])
@pytest.mark.parametrize("answers", [(YES, YES), (YES, NONSENSE), (LEAK, REFUSED), (NO, YES)])
def test_a_written_group_passes_the_checks_of_a_file(answers: tuple[Any, Any], top_k: int) -> None:
    config = CONFIG.model_copy(update={"distill_topk": top_k})
    episode = make_episode()
    distilled = run(make_deps({FIRST: answers[0], LAST: answers[1]}), config=config)
    distiller = Distiller(config, max_token_length=64, retry_s=0.0)
    about = asyncio.run(distiller.close_group([distilled])).about
    rollout = ScoredRollout(
        tokens_T=episode.tokens_T,
        masks_T=episode.masks_T,
        logprobs_T=episode.logprobs_T,
        score=0.5,
        messages=episode.messages,
        rows=distilled.arrays,
        turns=distilled.records,
    )
    group = ScoredGroup((rollout,), item_id="t#0", task_id="t", distillation=about)
    checker = GroupChecker()
    wire = json.loads(json.dumps(group.to_wire(), allow_nan=False))
    assert not checker.read(wire).problems
    assert ScoredGroup.from_wire(wire).to_wire() == wire
    assert checker.counts["scored rows"] == sum(len(turn.scored.gaps) for turn in distilled.stats.turns if turn.scored)
    assert sum(about.outcomes.values()) == len(episode.turns)
    assert about.noise_floor == pytest.approx(0.0, abs=1e-6)


def test_closing_closes_both() -> None:
    deps = make_deps({})
    asyncio.run(deps.close())
    assert isinstance(deps.judge, ScriptedJudge)
    assert isinstance(deps.teacher, TableTeacher)
    assert deps.judge.closed
    assert deps.teacher.closed
