// Numbers and text as a person reads them. Characters that can't be seen get a name; control pictures (␀) would be shorter,
// but many fonts lack them.

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00a0\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufffe\uffff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/;

// What stands in for a character that can't be seen; null where it can.
function picture(char) {
  if (!HIDDEN.test(char)) return null;
  const code = char.charCodeAt(0);
  if (char in NAMED) return `⟨${NAMED[char]}⟩`;
  return `⟨U+${code.toString(16).toUpperCase().padStart(4, '0')}⟩`;
}

// A whole text on one line, with nothing invisible left in it.
function spelled(text) {
  return Array.from(text, (char) => (char === '\n' ? '↵' : char === '\t' ? '⇥' : char === ' ' ? '·' : picture(char) ?? char)).join('');
}

const number = (value) => value.toLocaleString('en-US');
const fixed = (value, digits = 4) => value.toFixed(digits).replace(/^-(0\.?0*)$/, '$1');
const signed = (value, digits = 4) => (value > 0 ? '+' : '') + fixed(value, digits);
const count = (value, one, many = `${one}s`) => `${number(value)} ${value === 1 ? one : many}`;

function percent(share) {
  if (share === null) return '–';
  const value = 100 * share;
  if (value > 0 && value < 0.01) return '<0.01%';
  return `${value.toFixed(value < 10 && value > 0 ? 2 : 1)}%`;
}

function short(value, digits = 3) {
  if (value === null) return '–';
  return value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(1) : Number(value.toPrecision(digits)).toString();
}
const words = (name) => name.replaceAll('_', ' ');
const points = (value) => `${signed(100 * value, 1)} points`;
const changeRange = (estimate) => (estimate === null ? '' : `${signed(100 * estimate[1], 1)} to ${signed(100 * estimate[2], 1)}`);
