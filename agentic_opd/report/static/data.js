// The packed data of the page: HEAD, with a run or two, and the blocks of rollouts, which are unpacked when they are needed.

const HEAD = JSON.parse(document.getElementById('head').textContent);
const RUNS = HEAD.runs;
const LETTERS = 'AB'; // by which two runs are told apart
RUNS.forEach((run, place) => { run.place = place; run.first = place ? RUNS[place - 1].first + RUNS[place - 1].rollouts.length : 0; });
const ROLLOUTS = RUNS.flatMap((run) => run.rollouts.map((row) => ({ ...row, run: run.place })));
const KEPT = 6;
const unpacked = new Map();

function unpack(index) {
  const { run, movedFrom } = ROLLOUTS[index];
  const known = { vocab: RUNS[run].vocab, movedFrom, unit: HEAD.unit, link: (position) => rolloutLink(index, position) };
  return unpackBlock(document.getElementById(`rollout-${index}`).textContent, known);
}

async function rolloutData(index) {
  const data = unpacked.get(index) ?? await unpack(index);
  unpacked.delete(index);
  unpacked.set(index, data);
  if (unpacked.size > KEPT) unpacked.delete(unpacked.keys().next().value);
  return data;
}

// All text of a rollout in lower case, for the search.
const searchable = new Map();
async function searchText(index) {
  if (!searchable.has(index)) {
    const data = await unpack(index);
    const parts = [ROLLOUTS[index].task, ...data.contexts.flat().map((part) => part[1])];
    for (const window of data.judged?.windows ?? []) parts.push(...window.votes.map((vote) => vote.text));
    for (const turn of data.turns) {
      parts.push(Array.from(data.tokens.subarray(turn.from, turn.to), (place) => data.vocab.texts[place]).join(''));
      parts.push(turn.hint ?? '', ...turn.votes.map((vote) => vote.text));
    }
    searchable.set(index, parts.join('\n').toLowerCase());
  }
  return searchable.get(index);
}

const rolloutName = (index) => `${RUNS.length > 1 ? LETTERS[ROLLOUTS[index].run] : ''}${ROLLOUTS[index].line}.${ROLLOUTS[index].index}`;
const rolloutLink = (index, position = null) => `#r=${rolloutName(index)}${position === null ? '' : `&p=${position}`}`;
