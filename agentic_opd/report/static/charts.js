// Bars: a funnel, histograms, and the strip that shows where in a turn the gap lies.

function funnel(stages, run) {
  const all = stages[0].turns || 1;
  return el('ol', { class: 'funnel' }, stages.map((stage) => {
    const lost = Object.entries(stage.lost).map(([outcome, turns]) =>
      (turns
        ? el('button', { type: 'button', class: 'plain', onclick: () => showFiltered({ run, outcome }) }, `${words(outcome)} ${number(turns)}`)
        : el('span', { class: 'zero' }, `${words(outcome)} 0`)));
    const bar = el('span', { class: 'bar' });
    bar.style.inlineSize = `${(100 * stage.turns) / all}%`;
    return el('li', null,
      el('span', { class: 'name' }, stage.name),
      el('span', { class: 'track' }, bar),
      el('span', { class: 'value' }, number(stage.turns)),
      el('span', { class: 'lost' }, lost.length ? ['lost: ', lost.flatMap((one, i) => (i ? [', ', one] : [one]))] : null));
  }));
}

// Bars with their counts on top and the values they stand for below; the gaps' middle, where nothing moved, is left out.
function histogram(one) {
  const hasSides = one.unit === 'nats';
  const bins = one.counts.length;
  const most = Math.max(1, ...one.counts);
  const bars = one.counts.map((value, i) => {
    const bar = el('i', { class: hasSides && i < bins / 2 ? 'neg' : null });
    bar.style.blockSize = `${value ? Math.max(2, (100 * value) / most) : 0}%`;
    return el('span', null, value ? el('b', null, value < 10000 ? value : `${Math.round(value / 1000)}k`) : null, bar);
  });
  const isEdges = one.ticks.length > bins;
  const range = (i) => (isEdges ? `${one.ticks[i] || 'less'} to ${one.ticks[i + 1] || 'more'}` : one.ticks[i]);
  const ticks = one.ticks.map((text, i) => {
    const tick = el('span', null, text);
    tick.style.insetInlineStart = `${(100 * (isEdges ? i : i + 0.5)) / bins}%`;
    return tick;
  });
  const described = one.counts.map((value, i) => `${range(i)}: ${value}`).join('; ');
  return el('figure', { class: hasSides ? 'histogram broad' : 'histogram' },
    el('figcaption', null, el('b', null, one.name), ` ${one.unit ? `in ${one.unit}, ` : ''}${number(one.n)} ${one.of}, median ${short(one.median)}`),
    el('div', { class: 'bars', role: 'img', 'aria-label': `${one.name}. ${described}` }, bars),
    el('div', { class: 'ticks', 'aria-hidden': 'true' }, ticks),
    hasSides ? el('p', { class: 'sides' }, el('span', { class: 'value neg' }, '← the hint makes them less likely'), el('span', { class: 'value pos' }, 'more likely →')) : null);
}

const STRIP_BINS = 120;

// The largest gap of each piece of a turn, up in blue and down in orange; a click goes to that token.
function strip(data, turn, limit, go) {
  const length = turn.to - turn.from;
  const bins = Math.min(STRIP_BINS, length);
  const peaks = Array.from({ length: bins }, (_, bin) => {
    let peak = -1;
    for (let at = turn.from + Math.floor((bin * length) / bins); at < turn.from + Math.floor(((bin + 1) * length) / bins); at++) {
      if (data.isScored(at) && (peak < 0 || Math.abs(data.gap(at)) > Math.abs(data.gap(peak)))) peak = at;
    }
    return peak;
  });
  const best = peaks.reduce((a, b) => (b >= 0 && (a < 0 || Math.abs(data.gap(b)) > Math.abs(data.gap(a))) ? b : a), -1);
  const label = best < 0 ? 'no gaps' : `Gap over the turn; the largest, ${signed(data.gap(best))} nats, at token ${best - turn.from + 1} of ${length}`;
  const rects = peaks.map((peak, bin) => {
    if (peak < 0) return null;
    const gap = data.gap(peak);
    const height = 16 * Math.min(1, Math.abs(gap) / limit);
    return svg('rect', { class: gap > 0 ? 'pos' : 'neg', x: bin, width: 0.9, y: gap > 0 ? 17 - height : 17, height: Math.max(height, 0.3) });
  });
  const onclick = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const peak = peaks[Math.min(bins - 1, Math.floor((bins * (event.clientX - box.left)) / box.width))];
    if (peak >= 0) go(peak);
  };
  const drawn = svg('svg', { class: 'strip', viewBox: `0 0 ${bins} 34`, preserveAspectRatio: 'none', role: 'img', 'aria-label': label, onclick },
    svg('line', { x1: 0, x2: bins, y1: 17, y2: 17 }), rects);
  drawn.style.maxInlineSize = `${10 * bins}px`;
  return drawn;
}
