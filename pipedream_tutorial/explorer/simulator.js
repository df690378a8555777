// Runs the orders of a schedule against an exact clock of whole ticks (simulate/simulator.py), and
// says what moving an operation within its rank would cost.
"use strict";

class DeadlockError extends RuleError {
  // circle: [{rank, text of its next operation, need}], each rank waiting for the next one.
  constructor(circle) {
    const steps = circle.map(({ rank, text, need }) => `rank ${rank} is at ${text}, which needs ${need}`);
    super(`deadlock: ${steps.join("; ")}`);
    this.circle = circle;
  }
}

// Durations as fractions, by a stage's place in the model. `scale` has a factor for each equal share
// of the layers, a stage the mean of what it has of each; with v stages a rank a stage is 1/v of the
// work.
function buildCosts({ numStages, stagesPerRank }, { F, I, W, c, saving = 0, scale = [] }) {
  const given = scale.length ? scale.map(Fraction.parse) : [new Fraction(1n)];
  const parts = given.length; // of a stage; a share has numStages of them
  const share = new Fraction(1n, BigInt(stagesPerRank * parts));
  const factors = range(numStages).map((place) =>
    range(parts)
      .map((k) => given[Math.floor((place * parts + k) / numStages)])
      .reduce((a, b) => a.plus(b))
      .times(share),
  );
  const each = (value) => factors.map((factor) => Fraction.parse(value).times(factor));
  return { F: each(F), I: each(I), W: each(W), c: Fraction.parse(c), saving: Fraction.parse(saving) };
}

function durationOf(item, costs, numStages) {
  if (item.parts.length === 2) {
    const [a, b] = item.parts.map((op) => durationOf(op, costs, numStages));
    const [shorter, longer] = a.n * b.d < b.n * a.d ? [a, b] : [b, a];
    const { n, d } = costs.saving;
    return longer.plus(shorter.times(new Fraction(d - n, d)));
  }
  const at = (kind) => costs[kind][item.stage % numStages];
  return item.kind === "B" ? at("I").plus(at("W")) : at(item.kind === "R" ? "F" : item.kind);
}

function withoutMicrobatch(item) {
  return item.parts.map((op) => op.kind + op.stage).join("|");
}

// {schedule, costs, tick, c, starts, ends, bounds, sequence, last}: starts, ends and bounds have a
// list a rank, in its order; times are in ticks. A bound is the operation whose end (and sending)
// fixed the start, null at time 0. sequence: [rank, index] of items, each after all that it needs.
function simulate(schedule, costs) {
  const { orders } = schedule;
  const items = new Map(orders.flat().map((item) => [withoutMicrobatch(item), item]));
  const exact = [...items.values()].map((item) => durationOf(item, costs, schedule.numStages));
  const { tick, counts: [c, ...counts] } = inTicks([costs.c, ...exact]);
  const durations = new Map([...items.keys()].map((key, k) => [key, counts[k]]));
  const [starts, ends, bounds] = range(3).map(() => orders.map(() => []));
  const [sequence, done] = [[], new Map()]; // done: operation -> [when it ended, on which rank]

  // Runs the rank's next item, unless it has to wait.
  function advance(rank) {
    const [order, index] = [orders[rank], ends[rank].length];
    if (index === order.length) return false;
    const needs = schedule.needs(order[index]);
    if (!needs.every((need) => done.has(need))) return false;
    let start = ends[rank].at(-1) ?? 0;
    let bound = index ? order[index - 1].parts.at(-1).text : null;
    for (const need of needs) {
      const [end, from] = done.get(need);
      const arrival = from === rank ? end : end + c;
      if (arrival > start) [start, bound] = [arrival, need];
    }
    const end = start + durations.get(withoutMicrobatch(order[index]));
    sequence.push([rank, index]);
    starts[rank].push(start);
    ends[rank].push(end);
    bounds[rank].push(bound);
    for (const op of order[index].parts) done.set(op.text, [end, rank]);
    return true;
  }

  for (let before = -1; sequence.length > before; ) {
    before = sequence.length;
    for (const rank of orders.keys()) while (advance(rank));
  }
  if (sequence.length < orders.flat().length) throw deadlock(schedule, ends, done);
  const last = Math.max(...ends.map((line) => line.at(-1) ?? 0));
  return { schedule, costs, tick: tick.toNumber(), exactTick: tick, c, starts, ends, bounds, sequence, last };
}

// Follow what each stuck rank waits for until a rank comes up again.
function deadlock(schedule, ends, done) {
  const path = [];
  let rank = schedule.orders.findIndex((order, r) => ends[r].length < order.length);
  while (!path.some((step) => step.rank === rank)) {
    const item = schedule.orders[rank][ends[rank].length];
    const waiting = item.parts.map((op) => [op.text, schedule.needs(op).find((need) => !done.has(need))]);
    const [text, need] = waiting.find(([, missing]) => missing);
    path.push({ rank, text, need });
    ({ rank } = schedule.places.get(need));
  }
  return new DeadlockError(path.slice(path.findIndex((step) => step.rank === rank)));
}

function moved(schedule, { rank, from, to }) {
  const length = schedule.orders[rank]?.length ?? 0;
  if (from >= length || to >= length) throw new RuleError("a move names a place that is not there");
  const orders = [...schedule.orders];
  orders[rank] = orders[rank].toSpliced(from, 1).toSpliced(to, 0, orders[rank][from]);
  return new Schedule(orders, schedule.numStages, schedule.copies, schedule.kept);
}

// What a move would do: {verdict: "illegal" | "same" | "longer" | "shorter", text}.
function judge(timeline, move, memory = Infinity) {
  const { schedule, costs } = timeline;
  const illegal = (text) => ({ verdict: "illegal", text: `Not possible: ${text}` });
  let after;
  try {
    after = simulate(moved(schedule, move), costs);
  } catch (error) {
    if (!(error instanceof DeadlockError)) throw error;
    const [{ text, need }] = error.circle;
    if (error.circle.length === 1) return illegal(`${text} needs ${need}, which this rank would run later.`);
    const steps = error.circle.map((at) => `Rank ${at.rank} is at ${at.text} and needs ${at.need}.`);
    return illegal(`the ranks would wait for each other. ${steps.join(" ")}`);
  }
  const held = peakActivations(after)[move.rank];
  if (held > memory && held > peakActivations(timeline)[move.rank]) {
    const shown = shortNumber(held);
    return illegal(`rank ${move.rank} would hold ${shown} microbatches, and the limit is ${memory}.`);
  }
  const [was, is, by] = [timeline.last, after.last, Math.abs(after.last - timeline.last)].map((ticks) =>
    shortNumber(ticks * timeline.tick),
  );
  const name = schedule.orders[move.rank][move.from].parts.map((op) => op.text).join(" | ");
  if (after.last === timeline.last) return { verdict: "same", text: `Free: ${name} may move, time stays ${is}.` };
  if (after.last < timeline.last) return { verdict: "shorter", text: `Gains ${by}: time falls from ${was} to ${is}.` };
  return { verdict: "longer", text: `Costs ${by}: time rises from ${was} to ${is}.` };
}
