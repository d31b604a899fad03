// What a packed block holds: the turns of a rollout with their numbers, or one turn by itself.

const ARRAYS = { f4: Float32Array, i4: Int32Array, u4: Uint32Array, u1: Uint8Array };

// One rollout's turns and numbers, or those of one turn, whose block has all that a report's head has. `at` is a sampled token's place among the sampled ones of the sequence.
class RolloutData {
  constructor(buffer, { vocab = null, movedFrom = null, unit = null, link = null }) {
    const size = new DataView(buffer).getUint32(0, true);
    const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
    this.vocab = vocab ?? head.vocab;
    this.movedFrom = movedFrom ?? head.movedFrom;
    this.unit = unit ?? head.unit;
    this.link = link; // position -> the address of a token; null where tokens have none
    this.contexts = head.contexts;
    this.turns = head.turns;
    this.judged = head.judged;
    for (const [name, [type, offset, length]] of Object.entries(head.arrays)) {
      this[name] = new ARRAYS[type](buffer, 4 + size + offset, length);
    }
    this.offsets = new Uint32Array(this.counts.length + 1);
    this.counts.forEach((entries, at) => { this.offsets[at + 1] = this.offsets[at] + entries; });
  }

  // The number of a turn in the questions about the whole rollout.
  judgedNumber(index) { return this.judged.before + index + 1; }

  // The answers about the whole rollout that may name this turn; null where it was asked about by itself or not at all.
  answersOn(index) {
    if (this.judged === null) return null;
    const number = this.judgedNumber(index);
    return this.judged.windows.find((window) => window.first <= number && number <= window.last)?.votes ?? null;
  }

  text(at) { return this.vocab.texts[this.tokens[at]]; }
  id(at) { return this.vocab.ids[this.tokens[at]]; }
  isScored(at) { return this.counts[at] > 0; }
  teacherLogprob(at) { return this.teacher[this.offsets[at]] * this.unit; }
  // What the gap is measured from: the student when it sampled, unless the file holds a second reading.
  baselineLogprob(at) { return (this.baseline ?? this.student)[at]; }
  gap(at) { return this.isScored(at) ? this.teacherLogprob(at) - this.baselineLogprob(at) : null; }

  isMoved(at) { return this.isScored(at) && Math.abs(this.gap(at)) >= this.movedFrom; }

  // What the teacher would rather have had here: its most likely token, where that is not the one that was sampled.
  wanted(at) {
    const place = this.offsets[at];
    if (this.counts[at] < 2 || this.teacher[place + 1] <= this.teacher[place]) return null;
    return { text: this.vocab.texts[this.others[place + 1]], logprob: this.teacher[place + 1] * this.unit };
  }

  // The teacher's shown entries, most likely first; `sampled` marks the one that was sampled.
  entries(at) {
    const rows = [];
    for (let i = this.offsets[at]; i < this.offsets[at + 1]; i++) {
      rows.push({ text: this.vocab.texts[this.others[i]], logprob: this.teacher[i] * this.unit, sampled: i === this.offsets[at] });
    }
    return rows.sort((a, b) => b.logprob - a.logprob);
  }

  turnOf(at) { return this.turns.findIndex((turn) => at >= turn.from && at < turn.to); }
  position(at) { const turn = this.turns[this.turnOf(at)]; return turn.start + at - turn.from; }

  // The sampled token at a position of the sequence; -1 where none was sampled.
  at(position) {
    const turn = this.turns.find((one) => position >= one.start && position < one.start + one.to - one.from);
    return turn ? turn.from + position - turn.start : -1;
  }
}

async function unpackBlock(packed, known) {
  const bytes = Uint8Array.from(atob(packed), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new RolloutData(await new Response(stream).arrayBuffer(), known);
}
