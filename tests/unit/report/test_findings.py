from typing import Any

from agentic_opd.report.findings import findings
from agentic_opd.report.numbers import overview

from .sample import SCORED, UNSCORED, group, in_two_sequences, judged_as_a_whole, rollouts, with_records


def found(*groups: Any) -> str:
    read = rollouts(*groups)
    return "\n".join(findings(overview(read), read))


def record(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**base, **changes}


def test_nothing_is_said_where_all_is_well() -> None:
    votes = [{"decision": 1, "hint": SCORED["hint"], "text": "yes"}]
    assert found(with_records(record(SCORED, votes=votes), UNSCORED)) == ""


def test_rollouts_without_a_verdict_are_named_once_a_group() -> None:
    votes = [{"decision": 1, "hint": SCORED["hint"], "text": "yes"}]
    groups = [with_records(record(SCORED, votes=votes), UNSCORED) for _ in range(2)]
    groups[0]["group_overrides"]["no_verdicts"] = {"timeout": 2, "not_run": 1}
    groups[1]["group_overrides"]["no_verdicts"] = {"timeout": 1}
    assert "4 rollouts are left out because their tests gave no verdict (timeout 3, not_run 1)" in found(*groups)


def test_no_hints_at_all_and_why() -> None:
    failed = record(UNSCORED, span=[3, 5])
    text = found(with_records(failed, UNSCORED))
    assert "No turn has a hint" in text
    assert "4 of 4 turns ended in vote_failed: too few votes were for a hint" in text
    errors = [record(one, outcome="judge_error", votes=[]) for one in (failed, UNSCORED)]
    assert "look at its words" in found(with_records(*errors))


def test_failures_are_counted() -> None:
    late = record(SCORED, outcome="scoring_error")
    assert "2 of 4 turns ended in scoring_error" in found(with_records(late, UNSCORED))
    unread = [{"decision": None, "hint": None, "text": "hm"}] * 3
    assert "8 of 10 votes could not be read" in found(with_records(SCORED, record(UNSCORED, votes=unread)))


def test_abstentions_about_whole_rollouts_are_counted_by_kind() -> None:
    judged = judged_as_a_whole()
    text = found(judged)
    assert "2 of 6 answers about whole rollouts can't be read and count as abstentions (unknown turn 2)" in text
    assert "votes could not be read" not in text
    for overrides in judged["overrides"]:
        (window,) = overrides["opd"]["trajectory"]["windows"]
        window["votes"] = window["votes"][:2]
    assert "whole rollouts" not in found(judged)
    text = found(in_two_sequences())
    assert "1 of 3 answers about whole rollouts" in text, "a rollout's later sequences do not count its answers again"


def test_one_hint_everywhere() -> None:
    assert "One hint is 4 of all 4, over 2 tasks" in found(group("a"), group("b"))
    assert "One hint" not in found(group("a"), group("a"))


def test_hints_that_quote_the_tests() -> None:
    assert "2 hints quoted the hidden tests" in found(with_records(SCORED, record(UNSCORED, outcome="leaked")))
    for hint in ("It must hold that f(3) == 4 here.", "Think of assert solve([]) is None."):
        quoted = record(SCORED, hint=hint, votes=[{"decision": 1, "hint": hint, "text": hint}])
        assert "2 accepted hints look like test code" in found(with_records(quoted, UNSCORED))
    calm = record(SCORED, hint="Assert nothing; use == to compare (as above).")
    assert "look like test code" not in found(with_records(calm, UNSCORED))


def measured(precision: str, largest: float, rms: float) -> dict[str, Any]:
    """A group that says its noise and in what its teacher computed."""
    loud = group()
    loud["group_overrides"]["opd"] |= {"noise_floor": largest, "noise_rms": rms, "precision": precision}
    return loud


def test_noise_is_judged_by_the_precision_that_the_teachers_server_names() -> None:
    """The noise of a model in bfloat16 is no finding there, and one in float32."""
    assert "Without a hint" not in found(measured("bfloat16", 0.37, 0.08))
    text = found(measured("float32", 0.37, 0.08))
    assert "0.08 nats (root mean square), 0.37 at most away from the student, more than float32 explains" in text
    assert "explains" in found(measured("float32", 1e-5, 1e-6), measured("bfloat16", 3.0, 0.08))


def test_gaps_are_compared_with_noise_of_the_same_kind() -> None:
    """A largest gap without a hint that is above all gaps says nothing of them; their root mean squares do."""
    assert "noise" not in found(measured("bfloat16", 1.9, 0.08))
    assert "The gaps are noise" in found(measured("bfloat16", 1.9, 1.9))


def test_a_file_without_distillation() -> None:
    bare = {name: group()[name] for name in ("tokens", "masks", "scores", "inference_logprobs")}
    assert found({**bare, "group_overrides": {}}).startswith("Nothing was distilled")
