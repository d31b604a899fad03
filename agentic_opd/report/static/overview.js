// The overview: what the run was, what became of its turns, and where to look first.

const MAIN_SETTINGS = [
  'policy_model', 'tokenizer_name', 'dataset_name', 'group_size', 'temperature', 'max_turns', 'max_token_length', 'distill_topk',
  'hint_placement', 'hint_vote_rule', 'hint_selection', 'prm_votes', 'judge_model_name', 'judge_base_url', 'judge_temperature',
  'teacher_base_url', 'sandbox_backend', 'seed',
];

function settingsList(names) {
  const rows = names.map((name) => {
    const value = HEAD.settings[name];
    const text = value === null || value === '' ? 'unset' : typeof value === 'string' ? value : JSON.stringify(value);
    return [el('dt', null, name), el('dd', null, shownText(text))];
  });
  return el('dl', { class: 'settings' }, rows);
}

function settings() {
  const names = Object.keys(HEAD.settings);
  if (!names.length) return el('p', { class: 'note' }, 'No settings (.run.json) lie beside the file.');
  const main = MAIN_SETTINGS.filter((name) => name in HEAD.settings);
  const others = names.filter((name) => !main.includes(name));
  return [settingsList(main), others.length ? el('details', null, el('summary', null, `${others.length} more settings`), settingsList(others)) : null];
}

function facts(run) {
  const figure = (value, name, note) => el('div', { class: 'fact' }, el('dt', null, name), el('dd', null, el('b', null, value), note ? el('span', null, note) : null));
  return el('dl', { class: 'facts' },
    figure(number(run.rollouts), 'rollouts', `in ${count(run.groups, 'group')}`),
    figure(run.passed === null ? '–' : percent(run.passed / run.rollouts), 'passed', `mean score ${fixed(run.mean_score, 2)}`),
    figure(number(run.hints), 'hints', `on ${percent(run.turns ? run.hints / run.turns : null)} of ${count(run.turns, 'turn')}`),
    figure(percent(run.sampled_tokens ? run.scored_tokens / run.sampled_tokens : null), 'tokens scored', `${number(run.scored_tokens)} of ${number(run.sampled_tokens)} sampled`),
    figure(run.mean_gap === null ? '–' : signed(run.mean_gap, 3), 'mean gap', `nats; ${percent(run.positive_gaps)} above 0`),
    figure(run.noise_floor === null ? '–' : run.noise_floor.toExponential(1), 'noise floor', 'nats, without a hint'));
}

function taskTable(run) {
  const rows = run.by_task.map((row) => [
    el('button', { type: 'button', class: 'plain', onclick: () => showFiltered({ task: row.task }) }, shownText(row.task)),
    number(row.rollouts), row.passed === null ? '–' : percent(row.passed / row.rollouts), fixed(row.mean_score, 2),
    percent(row.turns ? row.hints / row.turns : null), number(row.scored_tokens), row.mean_gap === null ? '–' : signed(row.mean_gap, 3),
  ]);
  const headers = [['task', ''], ['rollouts', 'n'], ['pass rate', 'n'], ['score', 'n'], ['hint rate', 'n'], ['scored tokens', 'n'], ['mean gap', 'n']];
  return table(headers, rows, 'By task');
}

function hintTable(run) {
  const rows = run.hint_rows.map((row) => [
    el('a', { href: rolloutLink(row.rollout, row.position) }, shownText(row.text.length > 400 ? `${row.text.slice(0, 400)}…` : row.text)),
    number(row.times), number(row.tasks), row.mean_gap === null ? '–' : signed(row.mean_gap, 3),
  ]);
  return table([['hint', 'wide'], ['turns', 'n'], ['tasks', 'n'], ['mean gap', 'n']], rows, 'Hints');
}

function gapList(run) {
  return el('ul', { class: 'gaps' }, run.gap_rows.map((row) => el('li', null,
    el('a', { href: rolloutLink(row.rollout, row.position) },
      el('span', { class: `value ${row.gap > 0 ? 'pos' : 'neg'}` }, signed(row.gap, 2)),
      el('code', null, el('span', { class: 'before' }, spelled(row.before)), el('mark', { class: row.gap > 0 ? 'p6' : 'n6' }, spelled(row.text).slice(0, 80))),
      el('span', { class: 'where' }, ROLLOUTS[row.rollout].task)))));
}

function block(title, ...content) {
  return el('section', { class: 'block' }, el('h2', null, title), content);
}

function drawOverview() {
  const run = HEAD.overview;
  const found = HEAD.findings.concat(HEAD.leftOut.length ? [`${count(HEAD.leftOut.length, 'line')} of the file ${HEAD.leftOut.length === 1 ? 'is' : 'are'} left out.`] : []);
  byId('overview').append(...[
    el('h1', { id: 'overview-title' }, 'Overview'),
    found.length ? el('ul', { class: 'findings', 'aria-label': 'Warnings' }, found.map((text) => el('li', null, shownText(text)))) : null,
    HEAD.leftOut.length ? el('details', { class: 'left-out' }, el('summary', null, 'What is wrong with the lines that are left out'), el('ul', null, HEAD.leftOut.map((text) => el('li', null, shownText(text))))) : null,
    facts(run),
    run.funnel.length ? block('What became of the turns', funnel(run.funnel)) : null,
    run.gap_rows.length ? block('Tokens that the hints move most', gapList(run)) : null,
    block('By task', taskTable(run)),
    run.hint_rows.length ? block('Hints', hintTable(run)) : null,
    block('Distributions', el('div', { class: 'histograms' }, run.distributions.map(histogram))),
    block('Settings', settings()),
  ].filter(Boolean));
}
