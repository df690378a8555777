// What an operation waits for, and which orders are whole (simulate/simulator.py).
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
    this.there = new Set(schedule.ops().map((op) => op.text));
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
  of({ kind, stage, microbatch }) {
    const key = (wanted, at) => keyOf(wanted, at, microbatch);
    if (kind === "F") {
      const previous = this.before.get(stage);
      return previous === undefined ? [] : [key("F", previous)];
    }
    if (kind === "W") return [key("I", stage)];
    if (kind === "R") return [key("F", stage)];
    const own = this.there.has(key("R", stage)) ? key("R", stage) : key("F", stage);
    const following = this.after.get(stage);
    if (following === undefined) return [own];
    return [own, this.there.has(key("I", following)) ? key("I", following) : key("B", following)];
  }

  ofItem(item) {
    return item.parts.flatMap((op) => this.of(op));
  }
}

// Each operation once, and with a backward pass B, or I and W, for each microbatch on a stage.
function checkOnceAndWhole(schedule) {
  const [ops, there] = [schedule.ops(), new Set()];
  for (const { text } of ops) {
    if (there.has(text)) throw new RuleError(`${text} is in the orders twice`);
    there.add(text);
  }
  if (!ops.some((op) => op.kind !== "F")) return;
  for (const { kind: own, stage, microbatch } of ops) {
    const [whole, first, second] = [..."BIW"].map((kind) => keyOf(kind, stage, microbatch));
    if (own === "F" && there.has(whole)) continue; // looked at with B
    const halves = Number(there.has(first)) + Number(there.has(second));
    if (halves === (there.has(whole) ? 0 : 2)) continue;
    const either = `either ${whole} or both ${first} and ${second}`;
    throw new RuleError(`stage ${stage} needs ${either} for microbatch ${microbatch}`);
  }
}

function checkNeeds(schedule, wanted) {
  for (const op of schedule.ops()) {
    const missing = wanted.of(op).find((need) => !wanted.there.has(need));
    if (missing) throw new RuleError(`${op.text} needs ${missing}, which no rank runs`);
  }
}

// Follow what each stuck rank waits for until a rank comes up again.
function deadlock(schedule, numEnded, wanted, done) {
  const places = schedule.places();
  const path = [];
  let rank = schedule.orders.findIndex((order, r) => numEnded[r] < order.length);
  while (!path.some((step) => step.rank === rank)) {
    const { parts } = schedule.orders[rank][numEnded[rank]];
    const all = parts.flatMap((op) => wanted.of(op).map((need) => ({ rank, op, need })));
    path.push(all.find(({ need }) => !done.has(need)));
    ({ rank } = places.get(path.at(-1).need));
  }
  return new DeadlockError(path.slice(path.findIndex((step) => step.rank === rank)));
}
