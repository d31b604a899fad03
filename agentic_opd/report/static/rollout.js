// One rollout: the conversation as the model saw it, turn by turn, with what the judge said beside each.

const LONG = 1200; // characters from which a piece of context is folded

let current = null; // the place of the open rollout
let open = null; // its data
limit = Math.max(...RUNS.map((run) => run.overview.colour_limit), 0);

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
    el('button', { type: 'button', onclick: () => goTo(data, entry.turn.from) }, `turn ${entry.index + 1}`),
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

function redraw() {
  const pane = byId('rollout-pane');
  recolour(pane, open, limit);
  open.turns.forEach((_, index) => redrawStrips(byId(`turn-${index}`), open, index));
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
  byId('rollout-pane').replaceChildren(...[rolloutHeader(index), judgedPane(data), scaleBar(redraw), body].filter(Boolean));
  followTokens(body, data);
  buildTurns(cards);
  document.title = `${ROLLOUTS[index].task} ${rolloutName(index)}, distillation report`;
}

// To a sampled token: build its turn, bring it into sight, give it the focus.
function goTo(data, at) {
  const card = byId(`turn-${data.turnOf(at)}`);
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
