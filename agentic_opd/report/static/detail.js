// What is known of one token: shown while it is pointed at or has the focus, and until closed when it was chosen.

let pinned = null;

function probabilityRow(name, logprob) {
  return [el('dt', null, name), el('dd', null, el('b', null, percent(Math.exp(logprob))), el('span', { class: 'logprob' }, fixed(logprob)))];
}

function teacherRows(data, at) {
  const entries = data.entries(at);
  const rest = 1 - entries.reduce((sum, entry) => sum + Math.exp(entry.logprob), 0);
  const rows = entries.map((entry) => {
    const bar = el('span', { class: 'bar' });
    bar.style.inlineSize = `${100 * Math.exp(entry.logprob)}%`;
    return el('li', { class: entry.sampled ? 'sampled' : null },
      el('code', null, spelled(entry.text).slice(0, 60)), el('span', { class: 'track' }, bar),
      el('span', { class: 'share' }, percent(Math.exp(entry.logprob))), el('span', { class: 'logprob' }, fixed(entry.logprob)));
  });
  return [el('p', { class: 'note' }, 'The teacher’s most likely tokens; ', el('b', null, 'bold'), ': what was sampled'),
    el('ol', { class: 'teacher' }, rows),
    el('p', { class: 'note' }, `all others: ${percent(Math.max(0, rest))}`)];
}

const HINT_CHARS = 240;

// The hint that the teacher read, and what it would rather have had than this token.
function hintBeside(data, turn, at) {
  const wanted = data.wanted(at);
  return el('div', { class: 'hint' },
    el('p', { class: 'who' }, data.isMoved(at) ? 'moved by the hint' : `the hint moved it by less than ${short(data.movedFrom)} nats`),
    shownText(turn.hint.length > HINT_CHARS ? `${turn.hint.slice(0, HINT_CHARS)}…` : turn.hint),
    wanted === null ? null : el('p', { class: 'wanted' }, 'The teacher wanted ', el('code', null, spelled(wanted.text).slice(0, 60)), ` instead (${percent(Math.exp(wanted.logprob))}).`));
}

function detailContent(data, at) {
  const turn = data.turns[data.turnOf(at)];
  const gap = data.gap(at);
  const position = data.position(at);
  return [
    el('div', { class: 'detail-head' }, el('code', null, spelled(data.text(at)).slice(0, 300)),
      el('button', { type: 'button', 'aria-label': 'Close', onclick: () => closeDetail() }, '×')),
    el('p', { class: 'note' }, `id ${data.id(at)}, position ${position}${data.link === null ? '' : ', '}`, data.link === null ? null : el('a', { href: data.link(position) }, 'link to this token')),
    el('dl', { class: 'numbers', id: 'detail-numbers' },
      probabilityRow('student', data.student[at]),
      gap === null || !data.baseline ? null : probabilityRow('no hint', data.baselineLogprob(at)),
      gap === null ? null : probabilityRow('teacher', data.teacherLogprob(at)),
      gap === null ? null : [el('dt', null, 'gap'), el('dd', null, el('b', { class: gap > 0 ? 'pos' : 'neg' }, signed(gap)), el('span', { class: 'logprob' }, 'nats'))]),
    gap === null || turn.hint === null ? null : hintBeside(data, turn, at),
    gap === null ? el('p', { class: 'note' }, `not scored${turn.outcome ? `: ${words(turn.outcome)}` : ''}`) : teacherRows(data, at),
  ];
}

function showDetail(data, token) {
  const box = byId('detail');
  box.replaceChildren(...detailContent(data, Number(token.dataset.at)).flat(Infinity).filter(Boolean));
  box.hidden = false;
  for (const other of document.querySelectorAll('.t.on')) unmark(other);
  token.classList.add('on');
  token.setAttribute('aria-describedby', 'detail-numbers');
  place(box, token.getClientRects()[0] ?? token.getBoundingClientRect());
}

// Below the token, or above it where there is no room; narrow screens have it at the bottom (CSS).
function place(box, token) {
  const { innerWidth: width, innerHeight: height } = window;
  if (width < 700) { box.style.insetInlineStart = box.style.insetBlockStart = ''; return; }
  const size = box.getBoundingClientRect();
  const below = token.bottom + 8;
  const top = below + size.height <= height ? below : Math.max(8, token.top - size.height - 8);
  box.style.insetInlineStart = `${Math.max(8, Math.min(token.left, width - size.width - 16))}px`;
  box.style.insetBlockStart = `${top}px`;
}

function unmark(token) {
  token.classList.remove('on');
  token.removeAttribute('aria-describedby');
}

function closeDetail() {
  const box = byId('detail');
  if (box.hidden) return false;
  const had = box.contains(document.activeElement);
  box.hidden = true;
  pinned = null;
  const token = document.querySelector('.t.on');
  if (token) unmark(token);
  if (had) token?.focus({ preventScroll: true });
  return true;
}

// The detail stays with its token when the page is scrolled, as long as that is in sight.
function followScroll() {
  const token = document.querySelector('.t.on');
  if (byId('detail').hidden || !token) return;
  const box = token.getBoundingClientRect();
  if (box.bottom < 0 || box.top > window.innerHeight) closeDetail();
  else place(byId('detail'), box);
}

// One set of listeners for all tokens of `root`.
function followTokens(root, data) {
  const tokenOf = (event) => (event.target instanceof Element ? event.target.closest('.t') : null);
  root.addEventListener('pointerover', (event) => {
    const token = tokenOf(event);
    if (token && event.pointerType !== 'touch' && pinned === null) showDetail(data, token);
  });
  root.addEventListener('pointerleave', () => { if (pinned === null) closeDetail(); });
  root.addEventListener('focusin', (event) => { const token = tokenOf(event); if (token) pin(data, token); });
  root.addEventListener('click', (event) => { const token = tokenOf(event); if (token) token.focus({ preventScroll: true }); });
  root.addEventListener('keydown', (event) => {
    const token = tokenOf(event);
    if (!token || event.altKey || event.ctrlKey || event.metaKey) return;
    const tokens = [...token.closest('.stream').querySelectorAll('.t')];
    const to = { ArrowRight: tokens.indexOf(token) + 1, ArrowLeft: tokens.indexOf(token) - 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    if (tokens[to]) tokens[to].focus();
  });
}

function pin(data, token) {
  const at = Number(token.dataset.at);
  for (const other of token.closest('.stream').querySelectorAll('.t[tabindex="0"]')) other.tabIndex = -1;
  token.tabIndex = 0;
  pinned = at;
  showDetail(data, token);
  if (data.link !== null) history.replaceState(null, '', data.link(data.position(at)));
}
