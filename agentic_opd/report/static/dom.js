// Making elements. Text only ever becomes a text node.

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'data') Object.assign(node.dataset, value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const el = (tag, props, ...children) => fill(document.createElement(tag), props, children);
const svg = (tag, props, ...children) => fill(document.createElementNS('http://www.w3.org/2000/svg', tag), props, children);
const byId = (id) => document.getElementById(id);

// A text with its invisible characters as marks; line breaks and spaces stay as they are.
function shownText(text) {
  const nodes = [];
  let plain = '';
  for (const char of text) {
    const mark = picture(char);
    if (mark === null) { plain += char; continue; }
    if (plain) nodes.push(plain);
    nodes.push(el('b', { class: 'mark' }, mark));
    plain = '';
  }
  if (plain) nodes.push(plain);
  return nodes;
}

// A table whose columns sort, and whose rows become cards on a narrow screen. `columns`: [name, kind], where kind 'n' is a
// number; `rows`: a cell is [what is shown, what it sorts by]. The first row given comes first until a column is chosen.
function table(columns, rows, caption, limit = 12) {
  const body = el('tbody', { role: 'rowgroup' });
  const heads = columns.map(([name, kind], column) => el('th', { scope: 'col', role: 'columnheader', class: kind },
    el('button', { type: 'button', class: 'sort', onclick: () => sortBy(column) }, name)));
  const choice = el('select', { 'aria-label': `Sort ${caption}`, onchange: () => sortBy(Number(choice.value)) },
    el('option', { value: '-1', disabled: true, selected: true }, 'sort by'),
    columns.map(([name], column) => el('option', { value: column }, name)));
  const header = columns.findIndex(([, kind]) => kind !== 'n');
  const more = el('button', { type: 'button', class: 'more', onclick: () => draw(rows.length) });
  let sorted = [-1, 1];

  function sortBy(column) {
    const first = columns[column][1] === 'n' ? -1 : 1;
    sorted = [column, sorted[0] === column ? -sorted[1] : first];
    const isMissing = (value) => value === null || value === undefined;
    rows.sort((a, b) => {
      const [x, y] = [a[column][1], b[column][1]];
      if (isMissing(x) || isMissing(y)) return isMissing(x) - isMissing(y);
      return sorted[1] * (x < y ? -1 : x > y ? 1 : 0);
    });
    heads.forEach((head, i) => { if (i === column) head.setAttribute('aria-sort', sorted[1] > 0 ? 'ascending' : 'descending'); else head.removeAttribute('aria-sort'); });
    choice.value = String(column);
    draw(Math.max(limit, body.children.length));
  }

  function draw(upTo) {
    body.replaceChildren(...rows.slice(0, upTo).map((cells) => el('tr', { role: 'row' }, cells.map(([shown], i) => (i === header
      ? el('th', { scope: 'row', role: 'rowheader', class: columns[i][1] }, shown)
      : el('td', { role: 'cell', class: columns[i][1], data: { label: columns[i][0] } }, shown))))));
    more.hidden = upTo >= rows.length;
    more.textContent = `show all ${number(rows.length)}`;
  }

  draw(limit);
  return [el('p', { class: 'sort-by' }, choice), el('div', { class: 'table', tabindex: '0', role: 'region', 'aria-label': caption },
    el('table', { role: 'table' },
      el('caption', { class: 'unseen' }, caption),
      el('thead', { role: 'rowgroup' }, el('tr', { role: 'row' }, heads)), body)), more];
}

const isStacked = () => matchMedia('(max-width: 820px)').matches;
const isNarrow = () => matchMedia('(max-width: 700px)').matches;

// A part of a page; on a narrow screen all but the first parts start folded.
function block(title, isFirst, ...content) {
  return el('details', { class: 'block', open: isFirst || !isNarrow() }, el('summary', null, el('h2', null, title)), content);
}

const chip = (outcome) => el('span', { class: `chip o-${outcome ?? 'none'}` }, words(outcome ?? 'no record'));
