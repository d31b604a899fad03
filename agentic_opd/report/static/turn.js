// One turn: its tokens, coloured by their gap, and beside them what the judge said. A page defines `goTo(data, at)`.

let limit = 1; // the |gap| of full colour, in nats

const STEP = { 1: 'did what was wanted', 0: 'can’t be told', '-1': 'did not do what was wanted' };

const MOVED_SHOWN = 6;

// The tokens of a turn that its hint moved, the most first: each with its gap, and what the teacher wanted instead.
function movedTokens(data, turn) {
  const moved = Array.from({ length: turn.to - turn.from }, (_, i) => turn.from + i).filter((at) => data.isMoved(at))
    .sort((a, b) => Math.abs(data.gap(b)) - Math.abs(data.gap(a)));
  if (!moved.length) return null;
  const entry = (at) => {
    const [gap, wanted] = [data.gap(at), data.wanted(at)];
    return el('li', null, el('button', { type: 'button', onclick: () => goTo(data, at) },
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

function verdictPane(data, turn, index, number) {
  return el('aside', { class: 'verdict', 'aria-label': `What the judge said of turn ${number}` },
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

function turnCard(data, index, number = index + 1) {
  const turn = data.turns[index];
  const length = turn.to - turn.from;
  const gap = turn.moved === null ? 'not scored' : `${count(turn.moved, 'token')} moved`;
  const card = el('section', { class: 'turn', id: `turn-${index}`, 'aria-labelledby': `turn-title-${index}` },
    el('header', null,
      el('h2', { id: `turn-title-${index}` }, `Turn ${number}`),
      turn.calls.length ? el('span', { class: 'calls' }, 'calls ', turn.calls.flatMap((name, i) => [i ? ', ' : '', el('code', null, shownText(name))])) : null,
      el('span', { class: 'size' }, `${count(length, 'token')}, ${gap}`)),
    el('div', { class: 'said' }), verdictPane(data, turn, index, number));
  const said = card.querySelector('.said');
  said.style.minBlockSize = `${Math.min(40000, 1.6 * Math.ceil((length * 4) / 70))}em`;
  card.build = () => {
    card.build = () => {};
    said.style.minBlockSize = '';
    said.append(...[turn.scored ? strip(data, turn, limit, (at) => goTo(data, at)) : null, tokenStream(data, turn, number, limit)].filter(Boolean));
  };
  return card;
}

function scaleBar(redraw) {
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

// The strips of a turn that is shown, for another colour limit.
function redrawStrips(root, data, index) {
  for (const old of root.querySelectorAll('.strip')) old.replaceWith(strip(data, data.turns[index], limit, (at) => goTo(data, at)));
}
