"""Transcripts are what the loop, the judge and the teacher will read: the same functions made them."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from demo_policy.episodes import RememberingWorld
from demo_policy.script import Rates, State, Step, plan_episode, plan_hinted
from demo_policy.tokenizer import train_tokenizer
from demo_policy.transcripts import Author, Mix, Transcript
from demo_policy.variants import Fault, load_variants

from agentic_opd.distill.hints import parse_step_vote, parse_vote
from agentic_opd.distill.insertion import HINT_HEADER
from agentic_opd.rollout.chat_format import ChatFormat
from agentic_opd.rollout.renderer import load_renderer
from agentic_opd.worlds.coding.tasks.builtin import builtin_tasks
from agentic_opd.worlds.coding.tools import TOOL_SPECS

pytestmark = pytest.mark.slow

TASK, PLAIN = builtin_tasks()[0], builtin_tasks(with_examples=False)[0]
VARIANTS = load_variants()["fizzbuzz"]
WORLD = RememberingWorld()
NO_HINTS = Mix(
    without_examples=0.0,
    judged_turns=0.0,
    judged_steps=0.0,
    by_next_state=0.0,
    undone=0.0,
    hinted_first=0.0,
    hinted_faulty=0.0,
    hinted_other=0.0,
    neutral_hints=0.0,
)
SURE_FAULT = Rates(
    visible_fault=1.0,
    hidden_fault=0.0,
    repair=0.0,
    read_first=0.0,
    stumble_first=0.0,
    write_alone=0.0,
    user_complains=0.0,
    user_thanks=0.0,
)


def make_author(mix: Mix | None = None, rates: Rates | None = None) -> Author:
    tokenizer = train_tokenizer([TASK.prompt, *VARIANTS.correct], vocab_size=600)
    chat = ChatFormat(load_renderer(tokenizer, "qwen3", {"enable_thinking": False}), tokenizer, TOOL_SPECS)
    author = Author(chat, WORLD, rates, mix)
    author.tasks = {True: [TASK], False: [PLAIN]}
    return author


def targets(row: Transcript) -> Iterator[tuple[int, int]]:
    """The spans that the policy writes."""
    start = None
    for position, own in enumerate((*row.is_target, False)):
        if own and start is None:
            start = position
        elif not own and start is not None:
            yield start, position
            start = None


def test_every_turn_of_an_episode_parses_back_to_its_script():
    author = make_author()
    steps = plan_episode(VARIANTS, Random(1), replace(SURE_FAULT, repair=1.0, patch=1.0, repair_works=0.7))
    assert len(steps) >= 3
    episode = author.play(TASK, steps, Random(1))
    (trace,) = episode.traces
    for step, turn in zip(steps, trace.turns, strict=True):
        prompt, ids = [*trace.tokens_T[: turn.start]], trace.tokens_T[turn.start : turn.end]
        parsed = author.chat.parse(prompt, ids, 0)
        assert parsed.message["content"] == step.text
        assert [(call.name, call.arguments) for call in parsed.tool_calls if not call.error] == [*step.calls]


def test_the_real_tools_show_what_the_script_says():
    steps = plan_episode(VARIANTS, Random(3), SURE_FAULT)
    episode = make_author().play(TASK, steps, Random(1))
    results = [message["content"] for message in episode.messages if message["role"] == "tool"]
    assert results[0].startswith("wrote ")
    assert "FAIL fizzbuzz(" in results[1]
    assert results[1].endswith("[exit code 1]")
    assert episode.verification is not None
    assert episode.verification.correctness < 1.0


def test_act_rows_mark_exactly_the_sampled_tokens():
    author = make_author(NO_HINTS)
    (row,) = author.write(Random(5))
    close = author.chat.stop_token_ids[0]
    spans = [*targets(row)]
    assert spans
    assert all(row.token_ids[end - 1] == close for _, end in spans)
    assert spans[-1][1] == len(row.token_ids)


@pytest.mark.parametrize("fault", VARIANTS.faults, ids=lambda fault: fault.name)
def test_a_fitting_hint_leads_to_the_solution_without_its_fault(fault: Fault):
    for before in (State(), State(fault.solution, fault), State(fault.solution, fault, tested=True)):
        step = plan_hinted(Step(before, before, "", (), kind="final"), fault)
        assert step.after == State(fault.mended, None, tested=True)


def test_a_hinted_first_turn_keeps_its_words_and_calls():
    alone = replace(SURE_FAULT, write_alone=1.0, opening_text=1.0)
    for rates in (SURE_FAULT, alone):
        step = plan_episode(VARIANTS, Random(2), rates)[0]
        assert step.after.fault is not None
        hinted = plan_hinted(step, step.after.fault)
        assert hinted.text == step.text
        assert [name for name, _ in hinted.calls] == [name for name, _ in step.calls]
        assert hinted.after.solution == step.after.fault.mended


def test_a_hint_changes_nothing_once_all_is_well():
    state = State(VARIANTS.correct[0], None, tested=True)
    assert plan_hinted(Step(state, state, "", ()), VARIANTS.faults[0]).after == state


def test_a_foreign_hint_leaves_the_turn_as_it_was():
    """Each turn is taught twice: with two hints, or with both placements."""
    author = make_author(replace(NO_HINTS, hinted_first=1.0, hinted_faulty=1.0, foreign_hints=1.0), SURE_FAULT)
    act, *hinted = author.write(Random(7))
    first, last = (act.token_ids[start:end] for start, end in targets(act))
    assert [row.token_ids[start:end] for row in hinted for start, end in targets(row)] == [first, first, last, last]
    for row in hinted:
        assert row.kind == "ignore"
        assert HINT_HEADER in author.chat.tokenizer.decode(row.token_ids)
        assert "fizzbuzz" in author.chat.tokenizer.decode(row.token_ids)


def answers(author: Author, rows: list[Transcript], kind: str) -> list[str]:
    spans = [(row, *span) for row in rows if row.kind == kind for span in targets(row)]
    return [author.chat.tokenizer.decode(row.token_ids[start : end - 1]) for row, start, end in spans]


def test_the_judge_says_a_hint_where_the_fault_is_and_nothing_where_the_work_ends():
    author = make_author(replace(NO_HINTS, judged_turns=1.0, judged_steps=1.0), SURE_FAULT)
    rows = [*author.write(Random(9))]
    first, last = (parse_vote(text) for text in answers(author, rows, "judge"))
    assert first.hint in {hint for fault in VARIANTS.faults for hint in fault.hints}
    assert last.decision == -1
    assert [parse_step_vote(text) for text in answers(author, rows, "judge_step")] == [-1, -1]
    assert "## Verdict [" in author.chat.tokenizer.decode(rows[-1].token_ids)


def test_without_examples_a_fault_shows_in_the_verdict_alone():
    """By its next state alone, `wrote 8 lines`, a write is not wrong."""
    mix = replace(NO_HINTS, without_examples=1.0, judged_turns=1.0)
    for by_next_state, decision in ((0.0, 1), (1.0, -1)):
        author = make_author(replace(mix, by_next_state=by_next_state), SURE_FAULT)
        first, *_ = answers(author, [*author.write(Random(9))], "judge")
        assert parse_vote(first).decision == decision


def test_a_user_complains_in_words_about_what_is_wrong():
    author = make_author(replace(NO_HINTS, judged_turns=1.0), replace(SURE_FAULT, user_complains=1.0))
    rows = [*author.write(Random(9))]
    text = author.chat.tokenizer.decode(rows[0].token_ids)
    assert "fizzbuzz(" in text.rpartition("<|im_start|>user")[2]
    write, closing, *_ = (parse_vote(answer) for answer in answers(author, rows, "judge"))
    assert write.decision == closing.decision == 1


def test_the_same_seed_writes_the_same():
    author = make_author()
    assert [*author.write(Random(11))] == [*author.write(Random(11))]


def test_rates_decide_how_often_a_solution_is_wrong():
    never = Rates(visible_fault=0.0, hidden_fault=0.0)
    assert all(plan_episode(VARIANTS, Random(seed), never)[-1].after.fault is None for seed in range(50))
    wrong = [plan_episode(VARIANTS, Random(seed), SURE_FAULT)[-1].after.fault for seed in range(50)]
    assert {fault.name for fault in wrong if fault} == {fault.name for fault in VARIANTS.visible}
