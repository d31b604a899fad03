// Which view is open (the part of the address behind #), keys, and the theme.

function parseHash() {
  const values = new URLSearchParams(location.hash.slice(1));
  const name = values.get('r');
  return { rollout: name === null ? -1 : ROLLOUTS.findIndex((_, index) => rolloutName(index) === name), position: values.has('p') ? Number(values.get('p')) : null };
}

const FILES = RUNS.map((run) => run.name).join(' and ');

function show(view) {
  byId('overview').hidden = view !== 'overview';
  byId('rollouts').hidden = view === 'overview';
  document.body.classList.toggle('reading', view === 'rollout');
  for (const link of document.querySelectorAll('nav a')) {
    const isHere = view === 'overview' ? link.hash === (location.hash || '#overview') : link.id === 'nav-rollouts';
    if (isHere) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
}

async function route() {
  const { rollout, position } = parseHash();
  if (rollout < 0) {
    closeDetail();
    if (location.hash === '#rollouts' && ROLLOUTS.length) await openList();
    else openOverview();
    return;
  }
  show('rollout');
  const isNew = rollout !== current;
  if (isNew) await openRollout(rollout);
  if (rollout !== current) return;
  const at = position === null ? -1 : open.at(position);
  if (at >= 0) goTo(open, at);
  else if (isNew) { window.scrollTo(0, 0); byId('rollout-pane').querySelector('h1').focus({ preventScroll: true }); }
}

function openOverview() {
  show('overview');
  const run = RUNS.length === 1 ? RUNS[0] : RUNS.find((one) => location.hash === overviewLink(one));
  if (run) drawOverview(run);
  else drawComparison();
  document.title = `${FILES}${run && RUNS.length > 1 ? `, ${LETTERS[run.place]}` : ''}, distillation report`;
}

// The list; beside it, where there is room, the open rollout, or the one of the list that has most to show.
async function openList() {
  show('rollouts');
  const isOpen = shown.includes(current);
  if (!isOpen && !isStacked() && shown.length) await openRollout(mostToShow());
  document.title = `Rollouts of ${FILES}, distillation report`;
}

const KEYS = {
  j: () => step(1), ArrowRight: () => step(1), k: () => step(-1), ArrowLeft: () => step(-1),
  n: () => goToTurn(1), p: () => goToTurn(-1),
  o: () => { location.hash = '#overview'; }, l: () => { location.hash = '#rollouts'; },
  '/': () => { if (byId('overview').hidden === false) location.hash = '#rollouts'; setTimeout(() => byId('search').focus()); },
  '?': () => byId('help').showModal(),
  Escape: () => closeDetail(),
};

function step(by) {
  if (byId('rollouts').hidden) return;
  const to = neighbour(by);
  if (to !== null) location.hash = rolloutLink(to);
}

function isTyping(target) {
  return target instanceof Element && (target.matches('input:not([type=checkbox]), select, textarea') || byId('help').open);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId('theme').textContent = theme === 'dark' ? 'Light' : 'Dark';
  byId('theme').setAttribute('aria-label', theme === 'dark' ? 'Light colours' : 'Dark colours');
}

function start() {
  byId('file-name').textContent = FILES;
  byId('nav-overview').after(...(RUNS.length > 1 ? RUNS.map((run) => el('a', { href: overviewLink(run) }, `Run ${LETTERS[run.place]}`)) : []));
  if (RUNS.length > 1) byId('nav-overview').textContent = 'Comparison';
  setTheme(matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
  byId('theme').addEventListener('click', () => setTheme(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark'));
  byId('help-open').addEventListener('click', () => byId('help').showModal());
  document.addEventListener('keydown', (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || isTyping(event.target) || !(event.key in KEYS)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  document.addEventListener('pointerdown', (event) => { if (!event.target.closest('.t, #detail')) closeDetail(); });
  addEventListener('scroll', () => requestAnimationFrame(followScroll), { passive: true });
  addEventListener('hashchange', route);
  setUpList();
  route();
}

start();
