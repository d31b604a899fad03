// A turn's tokens, coloured by their gap.

const LEVELS = 8;
const WANTED_CHARS = 24; // of what the teacher wanted instead, beside the token
const BLOCK = 400; // tokens after which a new block may start, so that what is out of sight costs nothing

function gapClass(gap, limit) {
  if (gap === null) return 'u';
  const level = Math.min(LEVELS, Math.round((LEVELS * Math.abs(gap)) / limit));
  return level === 0 ? 'z' : (gap > 0 ? 'p' : 'n') + level;
}

// The nodes of one token. Spaces and line breaks stay real, so that copied text is the model's, and get a dim sign.
// `state` goes from token to token: in a tool call an escaped line break (\n in JSON) also breaks the shown line.
function tokenNodes(text, state) {
  const nodes = [];
  let plain = '';
  const flush = () => { if (plain) nodes.push(plain); plain = ''; };
  const signs = (kept, drawn) => { flush(); nodes.push(el('i', { data: { sign: drawn } }, kept)); };
  for (let i = 0; i < text.length; i++) {
    const char = String.fromCodePoint(text.codePointAt(i));
    i += char.length - 1;
    if (char === ' ') {
      let end = i + 1;
      while (text[end] === ' ') end++;
      signs(' '.repeat(end - i), '·'.repeat(end - i));
      i = end - 1;
    } else if (char === '\n') signs('\n', '↵');
    else if (char === '\t') signs('\t', '⇥');
    else {
      const mark = picture(char);
      if (mark === null) plain += char;
      else { flush(); nodes.push(el('b', { class: 'mark' }, mark)); }
    }
    if (state.inCall && char === 'n' && state.slashes % 2 === 1) { flush(); nodes.push(el('i', { class: 'soft' })); }
    state.slashes = char === '\\' ? state.slashes + 1 : 0;
  }
  flush();
  return nodes.length ? nodes : [el('b', { class: 'mark' }, '⟨empty⟩')];
}

// The element that holds the turn's tokens, in blocks; runs of a tool call or of reasoning stand in boxes of their own.
function tokenStream(data, turn, number, limit) {
  const stream = el('div', { class: 'stream', role: 'group', 'aria-label': `Tokens of turn ${number}`, dir: 'ltr' });
  const cuts = turn.regions.flatMap(([kind, start, end]) => [{ kind: 'say', until: start }, { kind, until: end }]);
  cuts.push({ kind: 'say', until: turn.to - turn.from });
  let at = turn.from;
  for (const { kind, until } of cuts) {
    const state = { inCall: kind === 'call', slashes: 0 };
    const box = el('div', { class: kind });
    while (at < turn.from + until) {
      const block = el('div', { class: 'tokens' });
      for (let n = 0; at < turn.from + until && (n < BLOCK || !data.text(at - 1).endsWith('\n')) && n < 4 * BLOCK; n++, at++) {
        const wanted = data.isMoved(at) ? data.wanted(at) : null;
        const marks = wanted === null ? { at } : { at, wants: spelled(wanted.text).slice(0, WANTED_CHARS) };
        block.append(el('span', { class: `t ${gapClass(data.gap(at), limit)}`, data: marks, tabindex: at === turn.from ? '0' : '-1' }, tokenNodes(data.text(at), state)));
      }
      box.append(block);
    }
    if (box.firstChild) stream.append(box);
  }
  return stream;
}

function recolour(root, data, limit) {
  for (const token of root.querySelectorAll('.t')) token.className = `t ${gapClass(data.gap(Number(token.dataset.at)), limit)}`;
}
