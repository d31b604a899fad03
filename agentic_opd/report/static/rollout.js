// One rollout: the conversation as the model saw it, turn by turn, with what the judge said beside each.

const LONG = 1200; // characters from which a piece of context is folded

let current = null; // the place of the open rollout
let open = null; // its data
let limit = Math.max(...RUNS.map((run) => run.overview.colour_limit), 0);

const WHY = {
  scored: 'The teacher read the hint and scored every token of this turn.',
  no_next_state: 'Nothing answered this turn, so there is nothing to judge it by.',
  vote_failed: 'Too few votes said that the answer shows what the turn should have done.',
  judge_error: 'The judge gave no answer, or no vote that could be read.',
  leaked: 'The hint repeated hidden test code and was dropped.',
  too_long: 'Hint and turn together do not fit the teacher’s context.',
  scoring_error: 'The teacher gave no rows, or rows that do not fit the turn.',
  refuted: 'Replayed from here, the policy passes less often with the hint.',
  unproven: 'Replays from here did not show that the hint helps.',
  not_judged: 'The rollout did not fail, and the judge reads failed ones only.',
};
const EVIDENCE = { tool: 'tool results', user: 'the user’s reply', later: 'what showed later', verdict: 'the hidden tests’ verdict' };
const STEP = { 1: 'did what was wanted', 0: 'can’t be told', '-1': 'did not do what was wanted' };

// What an answer about the whole rollout says, by its kind.
const ANSWER = {
  none: 'names no turn',
  context_turn: 'names a message that is context only, which is left out',
  unreadable: 'abstains: it can’t be read',
  unknown_turn: 'abstains: it names a turn that does not exist, or is not shown in full',
  repeated_turn: 'abstains: it has two hints for a turn',
  hint_without_turn: 'abstains: it has a hint without a turn',
  turn_without_hint: 'abstains: it names a turn without a hint',
  too_many_turns: 'abstains: it names too many turns',
  every_turn: 'abstains: it names every turn',
};

function contextPart([role, text, name, unseen]) {
  if (role === 'template') {
    if (text.length < LONG / 4) return el('p', { class: 'template' }, spelled(text).replaceAll('·', ' '));
    return el('details', { class: 'template' }, el('summary', null, `template and tools, ${count(text.length, 'character')}`), el('pre', null, shownText(text)));
  }
  const label = [role, name ? ` · ${name}` : '', unseen ? ' · came after the last token' : ''];
  const body = el('pre', null, shownText(text));
  const isLong = role === 'system' || text.length > LONG;
  const inner = isLong
    ? el('details', null, el('summary', null, el('span', { class: 'who' }, label), el('span', { class: 'first' }, spelled(text.slice(0, 90)).replaceAll('·', ' '), '…')), body)
    : [el('p', { class: 'who' }, label), body];
  return el('div', { class: `context r-${role}` }, inner);
}

const MOVED_SHOWN = 6;

// The tokens of a turn that its hint moved, the most first: each with its gap, and what the teacher wanted instead.
function movedTokens(data, turn) {
  const moved = Array.from({ length: turn.to - turn.from }, (_, i) => turn.from + i).filter((at) => data.isMoved(at))
    .sort((a, b) => Math.abs(data.gap(b)) - Math.abs(data.gap(a)));
  if (!moved.length) return null;
  const entry = (at) => {
    const [gap, wanted] = [data.gap(at), data.wanted(at)];
    return el('li', null, el('button', { type: 'button', onclick: () => goTo(at) },
      el('span', { class: `value ${gap > 0 ? 'pos' : 'neg'}` }, signed(gap, 2)),
      el('code', null, spelled(data.text(at)).slice(0, 40)),
      wanted === null ? null : ['→ ', el('code', null, spelled(wanted.text).slice(0, 40))]));
  };
  const rest = moved.slice(MOVED_SHOWN);
  return el('div', { class: 'moved' },
    el('p', { class: 'who' }, `${count(moved.length, 'token')} moved; → what the teacher wanted instead`),
    el('ul', null, moved.slice(0, MOVED_SHOWN).map(entry)),
    rest.length ? el('details', null, el('summary', null, `${number(rest.length)} more`), el('ul', null, rest.slice(0, 200).map(entry))) : null);
}

function proofText(proof) {
  if (proof.not_replayed) return `not replayed: ${proof.not_replayed}`;
  const arm = ([passed, played]) => `${passed} of ${played}`;
  if (!proof.with_hint) return `played on from here, ${arm(proof.without_hint)} passed`;
  const range = proof.interval ? `: ${points(proof.effect)} (${changeRange([proof.effect, ...proof.interval])})` : '';
  return `hint ${proof.verdict}${range}; played on from here, ${arm(proof.with_hint)} passed with it, ${arm(proof.without_hint)} without`;
}

const dots = (classes) => el('span', { class: 'dots', 'aria-hidden': 'true' }, classes.map((name) => el('i', { class: name })));
const isFor = (vote) => vote.decision === 1;

// The votes on a turn that was asked about by itself.
function turnVotes({ votes }) {
  if (!votes.length) return null;
  const kind = (vote) => ({ 1: 'for a hint', '-1': 'against' }[vote.decision] ?? 'unreadable');
  return el('details', { class: 'votes' },
    el('summary', null, `${votes.filter(isFor).length} of ${count(votes.length, 'vote')} for a hint `,
      dots(votes.map((vote) => (isFor(vote) ? 'yes' : vote.decision === -1 ? 'no' : 'odd')))),
    votes.map((vote) => el('div', null, el('p', { class: 'who' }, kind(vote)), el('pre', null, shownText(vote.text)))));
}

// How many answers about the whole rollout name a turn, and what these say of it.
function namingVotes(data, turn, index) {
  const answers = data.answersOn(index);
  const names = (answer) => answer.turns.includes(data.judgedNumber(index));
  const summary = [`named by ${answers.filter(names).length} of ${count(answers.length, 'answer')} `,
    dots(answers.map((answer) => (names(answer) ? 'yes' : answer.isReadable ? 'no' : 'odd')))];
  if (!turn.votes.length) return answers.length ? el('p', { class: 'votes' }, summary) : null;
  return el('details', { class: 'votes' }, el('summary', null, summary), turn.votes.map((vote) => el('pre', null, shownText(vote.text))));
}

// The turns that answers about the whole rollout name, the most votes first, each with its hint; then the answers.
function judgedPane(data) {
  if (data.judged === null) return null;
  const named = data.turns.map((turn, index) => ({ turn, index, votes: turn.votes.filter(isFor) }))
    .filter(({ index, votes }) => votes.length && data.answersOn(index) !== null)
    .toSorted((a, b) => b.votes.length - a.votes.length);
  const hintOf = ({ turn, votes }) => (turn.hint === null
    ? el('span', { class: 'note' }, 'not used: ', shownText(votes[0].hint ?? ''))
    : el('span', { class: 'hint' }, shownText(turn.hint)));
  const rows = named.map((entry) => el('li', null,
    el('button', { type: 'button', onclick: () => goTo(entry.turn.from) }, `turn ${entry.index + 1}`),
    el('span', null, `named by ${entry.votes.length} of ${count(data.answersOn(entry.index).length, 'answer')} `), chip(entry.turn.outcome), hintOf(entry)));
  return el('section', { class: 'judged', 'aria-labelledby': 'judged-title' },
    el('h2', { id: 'judged-title' }, 'What the judge said of the whole rollout'),
    rows.length ? el('ul', { class: 'named' }, rows) : el('p', { class: 'note' }, 'It named no turn of this sequence.'),
    data.judged.before ? el('p', { class: 'note' }, `The judge counts turns over all sequences of the rollout: turn 1 here is its turn ${data.judgedNumber(0)}. What it read stands with the first sequence.`) : null,
    data.judged.windows.map(windowAnswers));
}

function windowAnswers({ first, last, question, votes, tokens }) {
  const said = ({ kind, turns }) => [turns.length ? `names ${turns.length > 1 ? 'turns' : 'turn'} ${turns.join(', ')}` : null, ANSWER[kind]].filter(Boolean).join('; ');
  const unreadable = votes.filter((vote) => !vote.isReadable).length;
  const spent = tokens === null ? '' : `; ${count(tokens[0], 'token')} read, ${number(tokens[1])} sampled `;
  const about = first === last ? `turn ${first}` : `turns ${first} to ${last}`;
  return [
    votes.length ? el('details', { class: 'votes' },
      el('summary', null, `${count(votes.length, 'answer')} about ${about}${unreadable ? `, ${number(unreadable)} unreadable` : ''}${spent} `,
        dots(votes.map((vote) => (!vote.isReadable ? 'odd' : vote.turns.length ? 'yes' : 'no')))),
      votes.map((vote) => el('div', null, el('p', { class: 'who' }, said(vote)), el('pre', null, shownText(vote.text)))))
      : el('p', { class: 'note' }, `The judge gave no answer about ${about}.`),
    question === null ? null : el('details', { class: 'votes' }, el('summary', null, `what the judge read about ${about}`), el('pre', null, shownText(question))),
  ];
}

function verdictPane(data, turn, index) {
  return el('aside', { class: 'verdict', 'aria-label': `What the judge said of turn ${index + 1}` },
    el('p', null, chip(turn.outcome), turn.evidence.length ? ` judged by ${turn.evidence.map((kind) => EVIDENCE[kind]).join(', ')}` : ''),
    WHY[turn.outcome] ? el('p', { class: 'note' }, WHY[turn.outcome]) : null,
    turn.error ? el('p', { class: 'error' }, shownText(turn.error)) : null,
    turn.hint === null ? null : el('blockquote', { class: 'hint' }, el('p', { class: 'who' }, `hint · ${count(turn.hintTokens, 'token')}`), shownText(turn.hint)),
    turn.proof ? el('p', { class: 'note' }, proofText(turn.proof)) : null,
    movedTokens(data, turn),
    turn.stepScore === null ? null : el('p', { class: 'note' }, `second question: ${STEP[turn.stepScore]} (${turn.stepScore})`),
    turn.question === null ? null : el('details', { class: 'votes' }, el('summary', null, 'what the judge read'), el('pre', null, shownText(turn.question))),
    data.answersOn(index) === null ? turnVotes(turn) : namingVotes(data, turn, index));
}

function turnCard(data, index) {
  const turn = data.turns[index];
  const length = turn.to - turn.from;
  const gap = turn.moved === null ? 'not scored' : `${count(turn.moved, 'token')} moved`;
  const card = el('section', { class: 'turn', id: `turn-${index}`, 'aria-labelledby': `turn-title-${index}` },
    el('header', null,
      el('h2', { id: `turn-title-${index}` }, `Turn ${index + 1}`),
      turn.calls.length ? el('span', { class: 'calls' }, 'calls ', turn.calls.flatMap((name, i) => [i ? ', ' : '', el('code', null, shownText(name))])) : null,
      el('span', { class: 'size' }, `${count(length, 'token')}, ${gap}`)),
    el('div', { class: 'said' }), verdictPane(data, turn, index));
  const said = card.querySelector('.said');
  said.style.minBlockSize = `${Math.min(40000, 1.6 * Math.ceil((length * 4) / 70))}em`;
  card.build = () => {
    card.build = () => {};
    said.style.minBlockSize = '';
    said.append(...[turn.scored ? strip(data, turn, limit, (at) => goTo(at)) : null, tokenStream(data, turn, index, limit)].filter(Boolean));
  };
  return card;
}

function rolloutHeader(index) {
  const row = ROLLOUTS[index];
  const parts = Object.entries(row.reward ?? {}).map(([name, value]) => `${words(name)} ${fixed(value, 2)}`).join(', ');
  const step = (by, text) => {
    const to = neighbour(by);
    return el('a', { class: 'button', href: to === null ? null : rolloutLink(to), 'aria-disabled': to === null ? 'true' : null, role: to === null ? 'link' : null }, text);
  };
  const facts = [
    `score ${fixed(row.score, 4)}${parts ? ` (${parts})` : ''}`,
    row.passed === null ? null : `${row.passed} of ${row.total} hidden tests passed`,
    row.stop ? `ended: ${words(row.stop)}` : null,
    row.toolErrors === null ? null : count(row.toolErrors, 'tool error'),
    `${number(row.scored)} of ${number(row.sampled)} sampled tokens scored, ${number(row.moved)} moved`,
  ].filter(Boolean);
  return el('header', { class: 'rollout-head' },
    el('div', { class: 'steps' }, el('a', { class: 'button back', href: '#rollouts' }, '‹ List'), step(-1, '‹ Previous'), step(1, 'Next ›')),
    el('h1', { tabindex: '-1' }, shownText(row.task), el('span', { class: 'name' }, ` line ${row.line}, sequence ${row.index}`)),
    el('ul', { class: 'facts-line' }, facts.map((text) => el('li', null, text))));
}

function scaleBar() {
  const value = el('output', { for: 'limit' }, `±${short(limit)} nats`);
  const input = el('input', { type: 'range', id: 'limit', min: '-1', max: '1.3', step: '0.05', value: String(Math.log10(limit)), 'aria-valuetext': `${short(limit)} nats` });
  input.addEventListener('input', () => {
    limit = Number((10 ** Number(input.value)).toPrecision(2));
    value.textContent = `±${short(limit)} nats`;
    input.setAttribute('aria-valuetext', `${short(limit)} nats`);
    ends[0].textContent = `-${short(limit)}`;
    ends[1].textContent = `+${short(limit)}`;
    redraw();
  });
  const ends = [el('span', null, `-${short(limit)}`), el('span', null, `+${short(limit)}`)];
  const steps = Array.from({ length: 2 * LEVELS + 1 }, (_, i) => el('i', { class: i < LEVELS ? `n${LEVELS - i}` : i > LEVELS ? `p${i - LEVELS}` : null }));
  return el('div', { class: 'scale' },
    el('span', { class: 'ramp', role: 'img', 'aria-label': 'Colours from orange, the hint makes the token less likely, to blue, more likely' }, ends[0], el('span', { class: 'steps' }, steps), ends[1]),
    el('label', { for: 'limit' }, 'Colour limit ', input), value,
    el('label', null, el('input', { type: 'checkbox', id: 'signs', checked: !document.body.classList.contains('no-signs'), onchange: (event) => document.body.classList.toggle('no-signs', !event.target.checked) }), ' show spaces'),
    el('label', null, el('input', { type: 'checkbox', id: 'wants', checked: !document.body.classList.contains('no-wants'), onchange: (event) => document.body.classList.toggle('no-wants', !event.target.checked) }), ' and what the teacher wanted'));
}

function redraw() {
  const pane = byId('rollout-pane');
  recolour(pane, open, limit);
  for (const old of pane.querySelectorAll('.strip')) {
    const index = Number(old.closest('.turn').id.slice('turn-'.length));
    old.replaceWith(strip(open, open.turns[index], limit, (at) => goTo(at)));
  }
}

// Turns are built when they come near, and the others one by one while nothing else is to do.
function buildTurns(cards) {
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { entry.target.build(); watch.unobserve(entry.target); }
  }, { rootMargin: '1200px' });
  cards.forEach((card) => watch.observe(card));
  const idle = window.requestIdleCallback ?? ((work) => setTimeout(work, 50));
  const next = (place) => {
    if (place >= cards.length || !cards[place].isConnected) return;
    cards[place].build();
    idle(() => next(place + 1));
  };
  idle(() => next(0));
}

async function openRollout(index) {
  closeDetail();
  current = index;
  markCurrent();
  const data = await rolloutData(index);
  if (current !== index) return;
  open = data;
  const cards = data.turns.map((_, turn) => turnCard(data, turn));
  const body = el('div', { class: 'conversation' },
    data.contexts.map((parts, place) => [parts.map(contextPart), cards[place] ?? null]));
  byId('rollout-pane').replaceChildren(...[rolloutHeader(index), judgedPane(data), scaleBar(), body].filter(Boolean));
  followTokens(body, data);
  buildTurns(cards);
  document.title = `${ROLLOUTS[index].task} ${rolloutName(index)}, distillation report`;
}

// To a sampled token: build its turn, bring it into sight, give it the focus.
function goTo(at) {
  const card = byId(`turn-${open.turnOf(at)}`);
  if (!card) return;
  card.build();
  const token = card.querySelector(`.t[data-at="${at}"]`);
  token.scrollIntoView({ block: 'center' });
  token.focus({ preventScroll: true });
}

function goToTurn(step) {
  if (!open) return;
  const scored = open.turns.map((turn, index) => (turn.scored ? index : -1)).filter((index) => index >= 0);
  const edge = 140;
  const tops = scored.map((index) => byId(`turn-${index}`).getBoundingClientRect().top);
  const next = step > 0 ? scored.find((_, i) => tops[i] > edge + 4) : scored.filter((_, i) => tops[i] < edge - 4).at(-1);
  if (next === undefined) return;
  byId(`turn-${next}`).build();
  byId(`turn-${next}`).scrollIntoView({ block: 'start' });
}
