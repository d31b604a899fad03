// Which view is open (the part of the address behind #), keys, and the theme.

function parseHash() {
  const values = new URLSearchParams(location.hash.slice(1));
  const [line, index] = (values.get('r') ?? '').split('.').map(Number);
  const place = ROLLOUTS.findIndex((row) => row.line === line && row.index === index);
  return { rollout: place, position: values.has('p') ? Number(values.get('p')) : null };
}

function show(view) {
  byId('overview').hidden = view !== 'overview';
  byId('rollouts').hidden = view === 'overview';
  document.body.classList.toggle('reading', view === 'rollout');
  for (const name of ['overview', 'rollouts']) {
    const isHere = name === 'overview' ? view === 'overview' : view !== 'overview';
    if (isHere) byId(`nav-${name}`).setAttribute('aria-current', 'page');
    else byId(`nav-${name}`).removeAttribute('aria-current');
  }
}

async function route() {
  const { rollout, position } = parseHash();
  if (rollout < 0) {
    closeDetail();
    show(location.hash === '#rollouts' ? 'rollouts' : 'overview');
    document.title = `${HEAD.name}, distillation report`;
    return;
  }
  show('rollout');
  const isNew = rollout !== current;
  if (isNew) await openRollout(rollout);
  if (rollout !== current) return;
  const at = position === null ? -1 : open.at(position);
  if (at >= 0) goTo(at);
  else if (isNew) { window.scrollTo(0, 0); byId('rollout-pane').querySelector('h1').focus({ preventScroll: true }); }
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
  byId('file-name').textContent = HEAD.name;
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
  drawOverview();
  setUpList();
  route();
}

start();
