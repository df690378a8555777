// What an operation waits for, and which orders are whole (simulate/needs.py).
//
// F of a stage     needs F of the stage before it
// B, I of a stage  need B or I of the stage after it, and this stage's own R, or F
// R of a stage     needs this stage's own F
// W of a stage     needs this stage's own I
"use strict";

class DeadlockError extends RuleError {
  constructor(circle) {
    const text = circle.map((c) => `rank ${c.rank} is at ${c.op.text}, which needs ${c.need}`);
    super(`deadlock: ${text.join("; ")}`);
    this.circle = circle;
  }
}

class Needs {
  constructor(schedule) {
    this.halves = new Set();
    this.again = new Set();
    for (const op of schedule.ops()) {
      if (op.kind === "I") this.halves.add(`${op.stage},${op.microbatch}`);
      if (op.kind === "R") this.again.add(`${op.stage},${op.microbatch}`);
    }
    this.after = new Map();
    this.before = new Map();
    for (const chain of schedule.chains) {
      for (let place = 1; place < chain.length; place++) {
        this.after.set(chain[place - 1], chain[place]);
        this.before.set(chain[place], chain[place - 1]);
      }
    }
  }

  // The written operations whose results this one takes in.
  of(op) {
    const { kind, stage, microbatch } = op;
    if (kind === "F") {
      const previous = this.before.get(stage);
      return previous === undefined ? [] : [keyOf("F", previous, microbatch)];
    }
    if (kind === "W") return [keyOf("I", stage, microbatch)];
    const first = keyOf("F", stage, microbatch);
    if (kind === "R") return [first];
    const own = this.again.has(`${stage},${microbatch}`) ? keyOf("R", stage, microbatch) : first;
    const following = this.after.get(stage);
    if (following === undefined) return [own];
    const cut = this.halves.has(`${following},${microbatch}`);
    return [own, keyOf(cut ? "I" : "B", following, microbatch)];
  }

  ofItem(item) {
    return item.parts.flatMap((op) => this.of(op));
  }
}

// Each operation once, and with a backward pass B, or I and W, for each microbatch on a stage.
function checkOnceAndWhole(schedule) {
  const [ops, there] = [schedule.ops(), new Set()];
  for (const op of ops) {
    if (there.has(op.text)) throw new RuleError(`${op.text} is in the orders twice`);
    there.add(op.text);
  }
  const backward = ops.some((op) => op.kind !== "F");
  for (const { kind: own, stage, microbatch } of backward ? ops : []) {
    if (own === "F" && there.has(keyOf("B", stage, microbatch))) continue; // looked at with B
    const [whole, first, second] = [..."BIW"].map((kind) => keyOf(kind, stage, microbatch));
    const halves = Number(there.has(first)) + Number(there.has(second));
    if (halves !== (there.has(whole) ? 0 : 2)) {
      throw new RuleError(
        `stage ${stage} needs either ${whole} or both ${first} and ${second} ` +
          `for microbatch ${microbatch}`,
      );
    }
  }
}

function checkNeeds(schedule, wanted) {
  const known = schedule.ranks();
  for (const op of schedule.ops()) {
    for (const need of wanted.of(op)) {
      if (!known.has(need)) throw new RuleError(`${op.text} needs ${need}, which no rank runs`);
    }
  }
}

// Follow what each stuck rank waits for until a rank comes up again.
function deadlock(schedule, numEnded, wanted, done) {
  const ranks = schedule.ranks();
  const path = [];
  let rank = schedule.orders.findIndex((order, r) => numEnded[r] < order.length);
  while (!path.some((step) => step.rank === rank)) {
    const item = schedule.orders[rank][numEnded[rank]];
    const stuck = item.parts
      .flatMap((op) => wanted.of(op).map((need) => ({ rank, op, need })))
      .find(({ need }) => !done.has(need));
    path.push(stuck);
    rank = ranks.get(stuck.need);
  }
  return new DeadlockError(path.slice(path.findIndex((step) => step.rank === rank)));
}
