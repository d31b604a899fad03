// Two runs side by side: A, mostly before, and B, mostly after.

const share = (estimate) => (estimate === null ? '–' : percent(estimate[0]));
const rangeOf = (estimate) => (estimate === null ? '' : `${percent(estimate[1])} to ${percent(estimate[2])}`);
// Sure of its sign: the interval leaves out 0.
const isSure = (estimate) => estimate !== null && estimate[1] * estimate[2] > 0;
const changeClass = (estimate) => (isSure(estimate) ? `value ${estimate[0] > 0 ? 'pos' : 'neg'}` : 'value');

// Intervals over one line from 0 to 1, one below the other.
function whiskers(estimates, described) {
  const known = estimates.map((one, row) => [one, row]).filter(([one]) => one !== null);
  return svg('svg', { class: 'whiskers', viewBox: `0 0 104 ${9 * estimates.length}`, preserveAspectRatio: 'none', role: 'img', 'aria-label': described },
    known.map(([[value, low, high], row]) => {
      const y = 9 * row + 4.5;
      return svg('g', { class: `run-${LETTERS[row].toLowerCase()}` },
        svg('line', { x1: 2 + 100 * low, x2: 2 + 100 * high, y1: y, y2: y }), svg('rect', { x: 0.5 + 100 * value, width: 3, y: y - 3, height: 6 }));
    }));
}

function rateFigure(rates) {
  if (rates.first === null || rates.second === null) return null;
  return el('div', { class: 'fact' }, el('dt', null, rates.name),
    el('dd', null, el('b', null, share(rates.first), ' → ', share(rates.second)),
      el('span', { class: changeClass(rates.change) }, points(rates.change[0])),
      el('span', null, ` (${changeRange(rates.change)})`),
      whiskers([rates.first, rates.second], `A ${rangeOf(rates.first)}, B ${rangeOf(rates.second)}`),
      el('span', null, `A ${rangeOf(rates.first)}, B ${rangeOf(rates.second)}`)));
}

// Figures without an interval, as A → B.
function pairFigure(name, values, shown, note) {
  return el('div', { class: 'fact' }, el('dt', null, name),
    el('dd', null, el('b', null, values.map((value) => (value === null ? '–' : shown(value))).join(' → ')), note ? el('span', null, note) : null));
}

function taskPairs(tasks) {
  const of = (side) => (side === null ? '–' : `${side.passed} of ${side.rollouts}`);
  const hintRate = (side) => (side === null ? null : shareOf(side.hints, side.turns));
  const rows = tasks.map(({ task, passed, first, second }) => [
    [el('button', { type: 'button', class: 'plain', onclick: () => showFiltered({ task }) }, shownText(task)), task],
    [of(first), passed.first?.[0]], [of(second), passed.second?.[0]],
    [whiskers([passed.first, passed.second], `A ${rangeOf(passed.first)}, B ${rangeOf(passed.second)}`), passed.second?.[0]],
    [passed.change === null ? '–' : el('span', { class: changeClass(passed.change) }, signed(100 * passed.change[0], 0), ` (${signed(100 * passed.change[1], 0)} to ${signed(100 * passed.change[2], 0)})`), passed.change?.[0]],
    [percent(hintRate(first)), hintRate(first)], [percent(hintRate(second)), hintRate(second)],
  ]);
  return table([['task', ''], ['A passed', 'n'], ['B passed', 'n'], ['intervals, 0 to 1', ''], ['change, points', 'n'], ['A hint rate', 'n'], ['B hint rate', 'n']], rows, 'Tasks side by side', isNarrow() ? 4 : 40);
}

// Bars of two runs for each name; `pairs`: [name, A, B] as shares of each run.
function pairBars(pairs, shown) {
  const most = Math.max(...pairs.flatMap(([, a, b]) => [a, b]), 1e-9);
  const bar = (value, side) => {
    const node = el('span', { class: `bar run-${side}` });
    node.style.inlineSize = `${(100 * value) / most}%`;
    return el('span', { class: 'pair-line' }, el('span', { class: 'track' }, node), el('span', { class: 'value' }, shown(value)));
  };
  return el('dl', { class: 'pairs' }, pairs.map(([name, a, b]) => [el('dt', null, name), el('dd', null, bar(a, 'a'), bar(b, 'b'))]));
}

const PLACES = { call: 'in tool calls', think: 'in reasoning', say: 'in other words' };

// Where the gaps that moved a token lie, as shares of each run's sum.
function gapPlaces() {
  const sums = (entries) => { const all = entries.reduce((sum, [, value]) => sum + value, 0); return Object.fromEntries(entries.map(([name, value]) => [name, all ? value / all : 0])); };
  const together = (sides) => [...new Set(sides.flatMap(Object.keys))].map((name) => [name, sides[0][name] ?? 0, sides[1][name] ?? 0]);
  const byKind = RUNS.map((run) => sums(run.overview.evidence_rows.map((row) => [`after ${evidenceText(row.evidence)}`, (row.mean_moved ?? 0) * row.moved])));
  const byPart = RUNS.every((run) => run.movedIn) ? RUNS.map((run) => sums(Object.entries(run.movedIn).map(([name, value]) => [PLACES[name], value]))) : null;
  return [
    byPart ? [el('h3', null, 'By part of the turn'), pairBars(together(byPart), percent)] : null,
    el('h3', null, 'By what the judge was shown'), pairBars(together(byKind), percent),
    el('div', { class: 'histograms' }, RUNS.flatMap((run) => run.overview.distributions.filter((one) => one.unit === 'nats')
      .map((one) => histogram({ ...one, name: `${LETTERS[run.place]}: ${one.name}` })))),
  ];
}

function hintPairs(hints) {
  const rows = hints.map(({ text, turns, moved }) => [
    [shownText(text.length > 300 ? `${text.slice(0, 300)}…` : text), text],
    [number(turns[0]), turns[0]], [number(turns[1]), turns[1]], [number(moved[0]), moved[0]], [number(moved[1]), moved[1]],
  ]);
  return table([['hint', 'wide'], ['A turns', 'n'], ['B turns', 'n'], ['A tokens moved', 'n'], ['B tokens moved', 'n']], rows, 'Hints of both runs', isNarrow() ? 4 : 10);
}

function settingPairs(settings) {
  const text = (value) => shownText(value === null ? 'unset' : typeof value === 'string' ? value : JSON.stringify(value));
  return table([['setting', ''], ['A', 'wide'], ['B', 'wide']], settings.map(([name, a, b]) => [[name, name], [text(a), JSON.stringify(a)], [text(b), JSON.stringify(b)]]), 'Settings that differ', 20);
}

function drawComparison() {
  const compared = HEAD.comparison;
  const of = (read) => RUNS.map((run) => read(run.overview));
  const [a, b] = compared.only;
  const about = [`Rates are over the ${count(compared.common_tasks, 'task')} of both runs`, a ? `${number(a)} only in A` : '', b ? `${number(b)} only in B` : ''].filter(Boolean).join(', ');
  const all = of((numbers) => numbers.turns);
  byId('overview').replaceChildren(...[
    el('h1', { id: 'overview-title' }, 'A against B'),
    el('dl', { class: 'runs' }, RUNS.map((run) => [el('dt', { class: `run-${LETTERS[run.place].toLowerCase()}` }, LETTERS[run.place]),
      el('dd', null, el('a', { href: overviewLink(run) }, shownText(run.name)), ` ${count(run.overview.rollouts, 'rollout')}`)])),
    el('p', { class: 'note' }, compared.common_tasks ? `${about}. Tasks are what is drawn; intervals are of 95%.` : 'The runs have no task in common: rates are over each run’s own tasks.'),
    RUNS.flatMap((run) => run.findings.length ? [el('p', { class: 'note' }, el('a', { href: overviewLink(run) }, count(run.findings.length, 'warning')), ` about ${LETTERS[run.place]}`)] : []),
    el('dl', { class: 'facts compared' }, compared.rates.map(rateFigure),
      pairFigure('mean score', of((numbers) => numbers.mean_score), (value) => fixed(value, 2)),
      pairFigure('tokens moved', of((numbers) => shareOf(numbers.moved_tokens, numbers.sampled_tokens)), percent, 'of the sampled'),
      pairFigure('|gap| of moved', of((numbers) => numbers.mean_moved), short, 'nats, mean'),
      pairFigure('judge tokens a rollout', of(({ judge }) => (judge?.rollouts ? judgeTokens(judge) / judge.rollouts : null)), (value) => number(Math.round(value)), 'read and sampled'),
      pairFigure('judge tokens a hint', of(({ judge }) => (judge?.hints ? judgeTokens(judge) / judge.hints : null)), (value) => number(Math.round(value)), 'read and sampled'),
      pairFigure('turns a rollout', of((numbers) => numbers.turns / numbers.rollouts), (value) => fixed(value, 1))),
    block('Tasks side by side', true, taskPairs(compared.tasks)),
    compared.outcomes.length ? block('Outcomes of the turns', false, pairBars(compared.outcomes.map(([name, x, y]) => [words(name), x / (all[0] || 1), y / (all[1] || 1)]), percent)) : null,
    RUNS.some((run) => run.overview.moved_tokens) ? block('Where the gaps went', false, gapPlaces()) : null,
    compared.hints.length ? block('Hints', false, hintPairs(compared.hints)) : null,
    compared.settings.length ? block('Settings that differ', false, settingPairs(compared.settings)) : null,
  ].flat().filter(Boolean));
}
