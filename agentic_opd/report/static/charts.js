// Bars: a funnel, histograms, and the strip that shows where in a turn the gap lies.

function funnel(stages) {
  const all = stages[0].turns || 1;
  return el('ol', { class: 'funnel' }, stages.map((stage) => {
    const lost = Object.entries(stage.lost).map(([outcome, turns]) =>
      (turns
        ? el('button', { type: 'button', class: 'plain', onclick: () => showFiltered({ outcome }) }, `${words(outcome)} ${number(turns)}`)
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

function histogram(one) {
  const isGap = one.name === 'token gap';
  const middle = isGap ? (one.labels.length - 1) / 2 : -1;
  const most = Math.max(1, ...one.counts.filter((_, i) => i !== middle));
  const bars = one.counts.map((value, i) => {
    const bar = el('i', { class: i === middle ? 'cut' : isGap ? (i < middle ? 'neg' : 'pos') : null });
    bar.style.blockSize = `${Math.max(value ? 2 : 0, (100 * Math.min(value, most)) / most)}%`;
    return el('span', { title: `${one.labels[i]}: ${number(value)}` }, bar);
  });
  const described = one.labels.map((label, i) => `${label}: ${one.counts[i]}`).join('; ');
  const ends = one.name === 'token gap' ? ['-10', '0', '+10'] : [one.labels[0].split(' ')[0], one.labels.at(-1).split(' ').at(-1)];
  return el('figure', { class: 'histogram' },
    el('figcaption', null, el('b', null, one.name), one.unit ? ` ${one.unit}` : ''),
    el('div', { class: 'bars', role: 'img', 'aria-label': `${one.name}. ${described}` }, bars),
    el('div', { class: 'ends', 'aria-hidden': 'true' }, ends.map((text) => el('span', null, text))),
    el('p', { class: 'note' }, `mean ${short(one.mean)}, 5–50–95%: ${short(one.p5)}, ${short(one.p50)}, ${short(one.p95)}`,
      isGap ? `. ${percent(one.counts[middle] / one.n)} lie within ±0.01; their bar is cut.` : ''));
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
