// The list of rollouts: filter, search, sort. `shown` holds the places of the rollouts that are listed, in order.

const rowsAtOnce = () => (isStacked() ? 25 : 400); // a phone's page stays short
let shown = [];
let matching = null; // places of the rollouts that hold the searched text; null: no search
let searches = 0;

const SCORES = {
  any: ['any', () => true],
  passed: ['passed all tests', (row) => row.passed !== null && row.passed === row.total],
  failed: ['failed a test', (row) => row.passed !== null && row.passed !== row.total],
  low: ['below 0.5', (row) => row.score < 0.5],
  high: ['0.5 and more', (row) => row.score >= 0.5],
};
const HINTS = { any: ['any', () => true], yes: ['has one', (row) => row.hints > 0], no: ['has none', (row) => row.hints === 0] };
const descending = (key) => (a, b) => (ROLLOUTS[b][key] ?? -Infinity) - (ROLLOUTS[a][key] ?? -Infinity) || a - b;
const ascending = (key) => (a, b) => (ROLLOUTS[a][key] ?? Infinity) - (ROLLOUTS[b][key] ?? Infinity) || a - b;
const SORTS = {
  file: ['order of the file', (a, b) => a - b],
  show: ['most to show first', descending('toShow')],
  largest: ['largest gap first', descending('largestGap')],
  mean: ['mean gap, lowest first', ascending('meanGap')],
  meanHigh: ['mean gap, highest first', descending('meanGap')],
  score: ['score, lowest first', ascending('score')],
  scoreHigh: ['score, highest first', descending('score')],
};

function setUpList() {
  const options = (id, entries) => byId(id).append(...entries.map(([value, text]) => el('option', { value }, text)));
  const tasks = [...new Set(ROLLOUTS.map((row) => row.task))].sort();
  const outcomes = [...new Set(ROLLOUTS.flatMap((row) => row.outcomes).filter(Boolean))].sort();
  byId('filter-run').closest('label').hidden = RUNS.length < 2;
  options('filter-run', [['', 'both'], ...RUNS.map((run) => [run.place, `${LETTERS[run.place]}: ${spelled(run.name)}`])]);
  options('filter-task', [['', 'all'], ...tasks.map((task) => [task, spelled(task).slice(0, 80)])]);
  options('filter-outcome', [['', 'any'], ...outcomes.map((name) => [name, words(name)])]);
  for (const [id, choices] of [['filter-score', SCORES], ['filter-hint', HINTS], ['sort', SORTS]]) {
    options(id, Object.entries(choices).map(([value, [text]]) => [value, text]));
  }
  for (const select of byId('filters').querySelectorAll('select')) select.addEventListener('change', drawList);
  byId('filters').addEventListener('submit', (event) => event.preventDefault());
  let waiting = 0;
  byId('search').addEventListener('input', () => { clearTimeout(waiting); waiting = setTimeout(search, 150); });
  drawList();
}

// From the overview: the list with one filter set and the others cleared.
function showFiltered({ run = '', task = '', outcome = '' }) {
  byId('filters').reset();
  matching = null;
  byId('filter-run').value = RUNS.length > 1 ? run : '';
  byId('filter-task').value = task;
  byId('filter-outcome').value = outcome;
  drawList();
  location.hash = '#rollouts';
}

async function search() {
  const words = byId('search').value.trim().toLowerCase();
  const mine = ++searches;
  if (!words) { matching = null; drawList(); return; }
  const found = new Set();
  for (let index = 0; index < ROLLOUTS.length; index++) {
    if ((await searchText(index)).includes(words)) found.add(index);
    if (mine !== searches) return;
    if (index % 20 === 19) byId('list-count').textContent = `searching: ${index + 1} of ${ROLLOUTS.length}`;
  }
  matching = found;
  drawList();
}

function drawList() {
  const [run, task, outcome, score, hint, sort] = ['filter-run', 'filter-task', 'filter-outcome', 'filter-score', 'filter-hint', 'sort'].map((id) => byId(id).value);
  shown = ROLLOUTS.map((_, index) => index).filter((index) => {
    const row = ROLLOUTS[index];
    return (!run || row.run === Number(run)) && (!task || row.task === task) && (!outcome || row.outcomes.includes(outcome)) && SCORES[score][1](row) && HINTS[hint][1](row)
      && (matching === null || matching.has(index));
  }).sort(SORTS[sort][1]);
  byId('list-count').textContent = shown.length === ROLLOUTS.length ? `all ${count(shown.length, 'rollout')}` : `${number(shown.length)} of ${count(ROLLOUTS.length, 'rollout')}`;
  byId('list').replaceChildren();
  drawRows(rowsAtOnce());
  markCurrent();
}

function drawRows(upTo) {
  const list = byId('list');
  list.querySelector('.more')?.remove();
  list.append(...shown.slice(list.children.length, upTo).map(listRow));
  if (upTo < shown.length) {
    const more = el('button', { type: 'button', onclick: () => drawRows(upTo + rowsAtOnce()) }, `show ${number(Math.min(rowsAtOnce(), shown.length - upTo))} more`);
    list.append(el('li', { class: 'more' }, more));
  }
}

function listRow(index) {
  const row = ROLLOUTS[index];
  const verdict = row.passed === null ? null : el('span', { class: row.passed === row.total ? 'good' : 'bad' }, `${row.passed}/${row.total} tests`);
  const gap = row.largestGap === null ? 'not scored' : `${number(row.moved)} moved, up to ${fixed(row.largestGap, 2)} nats`;
  return el('li', null, el('a', { href: rolloutLink(index), data: { index } },
    el('span', { class: 'task' }, shownText(row.task)),
    el('span', { class: 'score' }, fixed(row.score, 2)),
    el('span', { class: 'sub' }, el('span', { title: `line ${row.line}, sequence ${row.index}` }, rolloutName(index)), verdict, el('span', null, gap)),
    el('span', { class: 'dots', role: 'img', 'aria-label': `turns: ${row.outcomes.map((name) => words(name ?? 'no record')).join(', ')}` },
      row.outcomes.slice(0, 24).map((name) => el('i', { class: `o-${name ?? 'none'}`, title: words(name ?? 'no record') })))));
}

function markCurrent() {
  for (const link of byId('list').querySelectorAll('a')) {
    if (Number(link.dataset.index) === current) {
      link.setAttribute('aria-current', 'true');
      link.scrollIntoView({ block: 'nearest' });
    }
    else link.removeAttribute('aria-current');
  }
}

// The listed rollout with most to show: the largest sum of gaps that moved a token.
const mostToShow = () => shown.toSorted(SORTS.show[1])[0] ?? null;

// The rollout `step` places further in the list.
function neighbour(step) {
  const place = shown.indexOf(current);
  if (place < 0) return shown[0] ?? null;
  return shown[place + step] ?? null;
}
