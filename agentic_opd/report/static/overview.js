// The overview: what the run was, the outcomes of its turns, and where to look first.

const MAIN_SETTINGS = [
  'policy_model', 'tokenizer_name', 'world.type', 'world.dataset_name', 'group_size', 'temperature', 'max_turns', 'max_token_length', 'distill_topk',
  'hint.placement', 'hint.vote_rule', 'hint.selection', 'prm_votes', 'judge.scope', 'judge.when', 'judge.model_name', 'judge.base_url', 'judge.temperature',
  'teacher.base_url', 'sandbox.type', 'seed',
];

function settingsList(run, names) {
  const rows = names.map((name) => {
    const value = run.settings[name];
    const text = value === null || value === '' ? 'unset' : typeof value === 'string' ? value : JSON.stringify(value);
    return [el('dt', null, name), el('dd', null, shownText(text))];
  });
  return el('dl', { class: 'settings' }, rows);
}

function settings(run) {
  const names = Object.keys(run.settings);
  if (!names.length) return el('p', { class: 'note' }, 'There is no settings file (.run.json) beside this file.');
  const main = MAIN_SETTINGS.filter((name) => name in run.settings);
  const others = names.filter((name) => !main.includes(name));
  return [settingsList(run, main), others.length ? el('details', null, el('summary', null, `${others.length} more settings`), settingsList(run, others)) : null];
}

const overviewLink = (run) => (RUNS.length > 1 ? `#overview-${LETTERS[run.place].toLowerCase()}` : '#overview');
const figure = (value, name, note) => el('div', { class: 'fact' }, el('dt', null, name), el('dd', null, el('b', null, value), note ? el('span', null, note) : null));
const shareOf = (part, whole) => (whole ? part / whole : null);
const nats = (value, digits = 3) => (value === null ? '–' : signed(value, digits));

// Root mean squares are compared with each other; an earlier file has the largest gap without a hint only.
function noiseFigure(numbers) {
  const shown = (value) => (value === null ? '–' : value.toExponential(1));
  if (numbers.noise_rms === null) return figure(shown(numbers.noise_floor), 'noise floor', 'nats, without a hint');
  return figure(shown(numbers.noise_rms), 'noise floor', `nats without a hint, root mean square (of the gaps: ${short(numbers.gap_rms)}); ${shown(numbers.noise_floor)} at most`);
}

const judgeTokens = (judge) => judge.read_tokens + judge.sampled_tokens;

// What the judge read and sampled, for a rollout and for a hint.
function judgeFigure(judge) {
  const mean = (tokens, of) => number(Math.round(tokens / of));
  const unknown = judge.uncounted ? `; those of ${count(judge.uncounted, 'more question')} are not known` : '';
  return figure(mean(judgeTokens(judge), judge.rollouts), 'judge tokens a rollout', `${mean(judge.read_tokens, judge.rollouts)} read, ${mean(judge.sampled_tokens, judge.rollouts)} sampled; `
    + `${judge.hints ? `${mean(judgeTokens(judge), judge.hints)} a hint` : 'no hint'}; ${count(judge.questions, 'question')}${unknown}`);
}

function facts(numbers) {
  return el('dl', { class: 'facts' },
    figure(number(numbers.rollouts), 'rollouts', `in ${count(numbers.groups, 'group')}`),
    figure(numbers.passed === null ? '–' : percent(numbers.passed / numbers.rollouts), 'passed', `mean score ${fixed(numbers.mean_score, 2)}`),
    figure(number(numbers.hints), 'hints', `on ${percent(shareOf(numbers.hints, numbers.turns))} of ${count(numbers.turns, 'turn')}`),
    figure(percent(shareOf(numbers.scored_tokens, numbers.sampled_tokens)), 'tokens scored', `${number(numbers.scored_tokens)} of ${number(numbers.sampled_tokens)} sampled`),
    figure(percent(shareOf(numbers.moved_tokens, numbers.sampled_tokens)), 'tokens moved', `${number(numbers.moved_tokens)} of the sampled, by ${short(numbers.mean_moved)} nats`),
    figure(nats(numbers.mean_gap), 'mean gap', `nats, over all scored; ${percent(numbers.positive_gaps)} above 0`),
    ...(numbers.mean_gap_reasoning === null ? [] : [figure(nats(numbers.mean_gap_reasoning), 'mean gap of reasoning', `nats; ${nats(numbers.mean_gap_answer)} over what follows it`)]),
    ...(numbers.judge?.rollouts ? [judgeFigure(numbers.judge)] : []),
    noiseFigure(numbers));
}

function taskTable(run) {
  const rows = run.overview.by_task.map((row) => [
    [el('button', { type: 'button', class: 'plain', onclick: () => showFiltered({ run: run.place, task: row.task }) }, shownText(row.task)), row.task],
    [number(row.rollouts), row.rollouts],
    [row.passed === null ? '–' : percent(row.passed / row.rollouts), row.passed === null ? null : row.passed / row.rollouts],
    [fixed(row.mean_score, 2), row.mean_score],
    [percent(shareOf(row.hints, row.turns)), shareOf(row.hints, row.turns)],
    [percent(shareOf(row.scored_tokens, row.sampled_tokens)), shareOf(row.scored_tokens, row.sampled_tokens)],
    [nats(row.mean_gap), row.mean_gap],
  ]);
  const columns = [['task', ''], ['rollouts', 'n'], ['pass rate', 'n'], ['score', 'n'], ['hint rate', 'n'], ['tokens scored', 'n'], ['mean gap', 'n']];
  return table(columns, rows, 'By task', 40);
}

const NEXT_TURNS = [['no_fault', 'no fault'], ['fault', 'fault again'], ['repeated', 'same tokens again'], ['unclear', 'unclear'], ['none', 'none followed']];

// What the hint does to the pass rate at the end, in points, with the interval and the two rates.
function effectCell(effect) {
  if (effect === null) return '–';
  return [el('b', { class: changeClass(effect.difference) }, points(effect.difference[0])),
    el('span', { class: 'note from' }, changeRange(effect.difference)),
    el('span', { class: 'note from' }, `${percent(effect.without_hint)} → ${percent(effect.with_hint)}`)];
}

// Hints, or kinds of evidence: what they moved, and what came after them.
function hintTable(run, rows, first, caption, name, onPhone = 3) {
  const isMeasured = rows.some((row) => row.effect !== null);
  const columns = [...(isMeasured ? [['effect', 'n']] : []), first, ['turns', 'n'], ['tasks', 'n'], ['tokens moved', 'n'], ['largest |gap|', 'n'], ['mean |gap| of moved', 'n'], ['next turn', 'some'], ['passed in the end', 'n']];
  const best = isMeasured ? rows.toSorted((a, b) => (b.effect?.difference[0] ?? -2) - (a.effect?.difference[0] ?? -2)) : rows;
  const cells = best.map((row) => [
    ...(isMeasured ? [[effectCell(row.effect), row.effect?.difference[0]]] : []),
    [name(row), row.text],
    [number(row.turns), row.turns], [number(row.tasks), row.tasks], [number(row.moved), row.moved],
    [row.largest === null ? '–' : el('a', { href: rolloutLink(run.first + row.rollout, row.position) }, fixed(row.largest, 2)), row.largest],
    [row.mean_moved === null ? '–' : fixed(row.mean_moved, 2), row.mean_moved],
    [NEXT_TURNS.filter(([key]) => row.next_turns[key]).map(([key, text]) => `${text} ${row.next_turns[key]}`).join(', '), (row.next_turns.no_fault ?? 0) / row.turns],
    [row.verified ? `${row.passed} of ${row.verified}` : '–', shareOf(row.passed, row.verified)],
  ]);
  return table(columns, cells, caption, isNarrow() ? onPhone : 10);
}

const evidenceText = (kinds) => kinds.map((kind) => EVIDENCE[kind]).join(' + ') || 'not said';

function hintName(run, row) {
  return [
    el('a', { href: rolloutLink(run.first + row.rollout, row.position) }, shownText(row.text.length > 400 ? `${row.text.slice(0, 400)}…` : row.text)),
    row.wordings > 1 ? el('span', { class: 'note' }, ` in ${row.wordings} spellings`) : null,
    el('span', { class: 'note from' }, ` from ${evidenceText(row.evidence)}`),
  ];
}

function hints(run) {
  const { evidence_rows: byEvidence, hint_rows: byHint } = run.overview;
  return [
    byHint.some((row) => row.effect) ? el('p', { class: 'note' }, 'Effect: the policy played on from the turn to the end, with the hint in its prompt and without it; the difference of the pass rates, with its interval.') : null,
    hintTable(run, byHint, ['hint', 'wide'], 'Hints', (row) => hintName(run, row)),
    el('h3', null, 'By what the judge was shown'),
    hintTable(run, byEvidence, ['evidence', ''], 'Evidence', (row) => evidenceText(row.evidence), 1),
  ];
}

function gapList(run) {
  const up = run.overview.gap_rows.filter((row) => row.gap > 0);
  const down = run.overview.gap_rows.filter((row) => row.gap <= 0);
  const rows = isNarrow() ? [...up.slice(0, 3), ...down.slice(0, 3)] : run.overview.gap_rows;
  return el('ul', { class: 'gaps' }, rows.map((row) => el('li', null,
    el('a', { href: rolloutLink(run.first + row.rollout, row.position) },
      el('span', { class: `value ${row.gap > 0 ? 'pos' : 'neg'}` }, signed(row.gap, 2)),
      el('code', null, el('span', { class: 'before' }, spelled(row.before)), el('mark', { class: row.gap > 0 ? 'p6' : 'n6' }, spelled(row.text).slice(0, 80))),
      el('span', { class: 'where' }, run.rollouts[row.rollout].task)))));
}

function warnings(run) {
  const found = run.findings.concat(run.leftOut.length ? [`${count(run.leftOut.length, 'line')} of the file ${run.leftOut.length === 1 ? 'is' : 'are'} left out.`] : []);
  return [
    found.length ? el('ul', { class: 'findings', 'aria-label': 'Warnings' }, found.map((text) => el('li', null, shownText(text)))) : null,
    run.leftOut.length ? el('details', { class: 'left-out' }, el('summary', null, 'What is wrong with the lines that are left out'), el('ul', null, run.leftOut.map((text) => el('li', null, shownText(text))))) : null,
  ];
}

function drawOverview(run) {
  const numbers = run.overview;
  const title = RUNS.length > 1 ? `Run ${LETTERS[run.place]}: ${run.name}` : 'Overview';
  byId('overview').replaceChildren(...[
    el('h1', { id: 'overview-title' }, shownText(title)),
    warnings(run),
    facts(numbers),
    numbers.funnel.length ? block('Outcomes of the turns', true, funnel(numbers.funnel, run.place)) : null,
    numbers.gap_rows.length ? block('Tokens that the hints move most', true, gapList(run)) : null,
    numbers.hint_rows.length ? block('Hints', true, hints(run)) : null,
    block('By task', false, taskTable(run)),
    block('Distributions', false, el('div', { class: 'histograms' }, numbers.distributions.map(histogram))),
    block('Settings', false, settings(run)),
  ].flat().filter(Boolean));
}
