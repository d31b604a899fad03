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

function table(headers, rows, caption) {
  return el('div', { class: 'table', tabindex: '0', role: 'region', 'aria-label': caption },
    el('table', null,
      el('caption', { class: 'unseen' }, caption),
      el('thead', null, el('tr', null, headers.map(([text, kind]) => el('th', { scope: 'col', class: kind }, text)))),
      el('tbody', null, rows.map((cells) => el('tr', null,
        cells.map((cell, i) => (i === 0 ? el('th', { scope: 'row', class: headers[i][1] }, cell) : el('td', { class: headers[i][1] }, cell))))))));
}

const chip = (outcome) => el('span', { class: `chip o-${outcome ?? 'none'}` }, words(outcome ?? 'no record'));
