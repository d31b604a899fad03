// Learning curves: each mode's mean over its seeds, with its interval.

const CURVE_COLOURS = 6;
const [WIDE, HIGH, LEFT, BELOW] = [640, 320, 44, 40];

function curveChart(modes) {
  const last = Math.max(...modes.flatMap((one) => one.points.map((point) => point.rollouts)), 1);
  const x = (rollouts) => LEFT + ((WIDE - LEFT - 12) * rollouts) / last;
  const y = (value) => 10 + (HIGH - BELOW - 10) * (1 - value);
  const ticks = [...new Set(modes.flatMap((one) => one.points.map((point) => point.rollouts)))];
  const grid = [0, 0.25, 0.5, 0.75, 1].map((value) => [
    svg('line', { class: 'grid', x1: LEFT, x2: WIDE - 12, y1: y(value), y2: y(value) }),
    svg('text', { x: LEFT - 6, y: y(value) + 4, 'text-anchor': 'end' }, `${100 * value}%`)]);
  const curves = modes.map((one, place) => {
    const along = (read) => one.points.map((point) => `${x(point.rollouts)},${y(read(point))}`);
    return svg('g', { class: `curve c${place % CURVE_COLOURS}` },
      svg('polygon', { points: [...along((point) => point.mean[1]), ...along((point) => point.mean[2]).reverse()].join(' ') }),
      svg('polyline', { points: along((point) => point.mean[0]).join(' ') }),
      one.points.map((point) => [svg('circle', { cx: x(point.rollouts), cy: y(point.mean[0]), r: 3.5 }), point.seeds.map((seed) => svg('circle', { class: 'seed', cx: x(point.rollouts), cy: y(seed), r: 2 }))]));
  });
  const described = modes.map((one) => `${one.mode}: ${one.points.map((point) => `${percent(point.mean[0])} after ${point.rollouts}`).join(', ')}`).join('; ');
  return svg('svg', { class: 'curves', viewBox: `0 0 ${WIDE} ${HIGH}`, role: 'img', 'aria-label': `Pass rate without hints by rollouts trained on. ${described}` },
    grid, ticks.map((rollouts) => svg('text', { x: x(rollouts), y: HIGH - BELOW + 18, 'text-anchor': 'middle' }, number(rollouts))),
    svg('text', { x: (LEFT + WIDE) / 2, y: HIGH - 4, 'text-anchor': 'middle' }, 'rollouts trained on'), curves);
}

const TARGET = 0.9;

function curveTable(modes) {
  const rows = modes.map((one, place) => {
    const [start, end] = [one.points[0], one.points.at(-1)];
    const reached = one.points.find((point) => point.mean[0] >= TARGET)?.rollouts;
    return [
      [[el('i', { class: `key c${place % CURVE_COLOURS}` }), shownText(one.mode)], one.mode], [number(end.seeds.length), end.seeds.length],
      [percent(start.mean[0]), start.mean[0]], [`${percent(end.mean[0])} (${percent(end.mean[1])} to ${percent(end.mean[2])})`, end.mean[0]],
      [el('span', { class: changeClass(one.change) }, `${signed(100 * one.change[0], 1)} (${changeRange(one.change)})`), one.change[0]],
      [reached === undefined ? `not in ${number(end.rollouts)}` : number(reached), reached],
    ];
  });
  return table([['mode', ''], ['seeds', 'n'], ['start', 'n'], ['end', 'n'], ['change, points', 'n'], [`rollouts to ${percent(TARGET)}`, 'n']], rows, 'Modes', 40);
}

function drawCurves() {
  const { name, modes } = HEAD.curves;
  byId('overview').replaceChildren(
    el('h1', { id: 'overview-title' }, 'Learning curves'),
    el('p', { class: 'note' }, `${name}: pass rate without hints, the mean over seeds. Bands are 95% intervals of that mean; small dots are the seeds.`),
    curveChart(modes),
    el('section', { class: 'block' }, curveTable(modes)));
}
