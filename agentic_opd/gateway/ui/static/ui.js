// The gateway's page: it is whole without this script, which colours the tokens of the turns and brings in what is new.

const BETWEEN_MS = 700; // at least, between two looks at what is new

const TURNS = new Map(); // section of a turn -> its data

// The tokens of a turn in place of its text, and what the judge said of them.
async function colour(section) {
  if (!section.dataset.packed) return;
  const data = await unpackBlock(section.dataset.packed, {});
  const card = turnCard(data, 0, Number(section.dataset.number));
  card.build();
  section.querySelector('.said').replaceWith(card.querySelector('.said'));
  section.querySelector('.size').replaceWith(card.querySelector('.size'));
  if (data.turns[0].outcome !== null) section.querySelector('.verdict').replaceWith(card.querySelector('.verdict'));
  followTokens(section, data);
  TURNS.set(section, data);
}

function goTo(data, at) {
  for (const [section, of] of TURNS) if (of === data) section.querySelector(`.t[data-at="${at}"]`).focus();
}

function redraw() {
  for (const [section, data] of TURNS) {
    if (!section.isConnected) { TURNS.delete(section); continue; }
    recolour(section, data, limit);
    redrawStrips(section, data, 0);
  }
}

async function colourAll(root) {
  for (const section of root.querySelectorAll('.turn')) await colour(section);
  if (TURNS.size && !byId('scale').firstChild) byId('scale').append(scaleBar(redraw));
}

let isBehind = false; // whether a part in use has changed meanwhile

// Whether a reader is about to say something in this part, which must stay as it is.
function isInUse(part) {
  const form = part.querySelector('.rate form');
  return part.contains(document.activeElement) && document.activeElement.closest('form') !== null
    || form !== null && [...form.elements].some((field) => field.checked || (field.type === 'textarea' && field.value));
}

// Bring the parts of a container into the state of the same container of a newer page; returns the parts that are new.
function merge(container, newer) {
  const arrived = [];
  let before = null;
  for (const part of [...newer.children]) {
    const old = part.id ? document.getElementById(part.id) : null;
    let placed = old;
    const isChanged = old !== null && old.dataset.mark !== part.dataset.mark;
    if (isChanged && isInUse(old)) isBehind = true;
    else if (old === null || isChanged) {
      placed = document.adoptNode(part);
      const open = new Set(old ? [...old.querySelectorAll('details[open]')].map((one) => one.className) : []);
      for (const one of placed.querySelectorAll('details')) if (one.className && open.has(one.className)) one.open = true;
      const focused = old?.contains(document.activeElement) ? document.activeElement.getAttribute('href') : null;
      if (old) old.replaceWith(placed);
      if (focused) [...placed.querySelectorAll('a')].find((link) => link.getAttribute('href') === focused)?.focus({ preventScroll: true });
      if (old === null) placed.classList.add('new');
      arrived.push(placed);
    }
    const next = before === null ? container.firstElementChild : before.nextElementSibling;
    if (placed !== next) container.insertBefore(placed, next);
    before = placed;
  }
  while (before !== null && before.nextElementSibling !== null) before.nextElementSibling.remove();
  return arrived;
}

let isLooking = false;
let isDue = false;

// Fetch this page again. The browser parses it without running anything in it.
function look() {
  if (isLooking) { isDue = true; return; }
  isLooking = true;
  isDue = false;
  const request = new XMLHttpRequest();
  request.open('GET', location.pathname + location.search);
  request.responseType = 'document';
  request.onloadend = async () => {
    if (request.status === 401) { location.reload(); return; }
    if (request.status === 200 && request.response) await take(request.response);
    setTimeout(() => { isLooking = false; if (isDue) look(); }, BETWEEN_MS);
  };
  request.send();
}

async function take(page) {
  const arrived = [];
  for (const newer of page.querySelectorAll('[data-live]')) {
    const container = document.getElementById(newer.id);
    if (container !== null) arrived.push(...merge(container, newer));
  }
  for (const part of arrived) if (part.matches('.step')) await colourAll(part);
  const turns = arrived.filter((part) => part.matches('.step.new:not(.running)')).length;
  const sessions = arrived.filter((part) => part.matches('tr.new')).length;
  const news = [turns ? count(turns, 'new turn') : null, sessions ? count(sessions, 'new session') : null].filter(Boolean);
  if (news.length) byId('live').textContent = news.join(', ');
}

let stream = null;

// Changes arrive while the page is looked at; a hidden one keeps no connection, of which browsers have few.
function follow() {
  if (document.hidden) { stream?.close(); stream = null; return; }
  if (stream !== null) return;
  const session = location.pathname.startsWith('/ui/sessions/') ? location.pathname.split('/')[3] : null;
  stream = new EventSource('/ui/events');
  stream.addEventListener('ready', () => { document.documentElement.dataset.live = 'true'; look(); });
  stream.addEventListener('changed', (event) => {
    const { sessions } = JSON.parse(event.data);
    if (session === null || sessions.includes(session)) look();
  });
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId('theme').textContent = theme === 'dark' ? 'Light' : 'Dark';
  byId('theme').setAttribute('aria-label', theme === 'dark' ? 'Light colours' : 'Dark colours');
}

// To the next or the previous turn.
function step(by) {
  const steps = [...document.querySelectorAll('.turn > header a')];
  const here = steps.findIndex((link) => link.closest('.step').contains(document.activeElement));
  steps[Math.max(0, Math.min(steps.length - 1, here + by))]?.focus();
}

async function start() {
  if (byId('theme') === null) return; // the form that asks for a key
  const dark = matchMedia('(prefers-color-scheme: dark)').matches;
  byId('theme').hidden = false;
  setTheme(localStorage.getItem('theme') ?? (dark ? 'dark' : 'light'));
  byId('theme').addEventListener('click', () => {
    setTheme(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark');
    localStorage.setItem('theme', document.documentElement.dataset.theme);
  });
  document.addEventListener('keydown', (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest('input, textarea, select')) return;
    if (event.key === 'Escape') closeDetail();
    else if (event.key === 'n' || event.key === 'p') step(event.key === 'n' ? 1 : -1);
  });
  document.addEventListener('pointerdown', (event) => { if (!event.target.closest('.t, #detail')) closeDetail(); });
  addEventListener('scroll', () => requestAnimationFrame(followScroll), { passive: true });
  const turns = byId('turns');
  if (turns !== null) {
    limit = Number(turns.dataset.limit);
    await colourAll(turns);
    if (location.hash) document.querySelector(location.hash)?.scrollIntoView();
  }
  document.addEventListener('focusout', () => setTimeout(() => { if (isBehind) { isBehind = false; look(); } }));
  document.addEventListener('visibilitychange', follow);
  follow();
}

start();
