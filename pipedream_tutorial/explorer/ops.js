// Exact numbers, operations, and their order on every rank (schedules/ops.py); those orders run against
// an exact clock of whole ticks (simulate/simulator.py), and what a move within a rank would cost.
//
// An operation is written as torch writes it: 2F0 is stage 2, F, microbatch 0. An item of an order
// is a list: of one operation, or of two that run at the same time.
"use strict";

// What the reader asked for and cannot have; the message says why.
class RuleError extends Error {}

// Why it is refused, or "".
function refusal(act) {
  try {
    act();
    return "";
  } catch (error) {
    if (!(error instanceof RuleError)) throw error;
    return error.message;
  }
}

function gcd(a, b) {
  if (b) return gcd(b, a % b);
  return a < 0n ? -a : a;
}

class Fraction {
  constructor(numerator, denominator = 1n) {
    const common = gcd(numerator, denominator) || 1n;
    this.n = numerator / common;
    this.d = denominator / common;
  }

  // 2, "2", "0.5", "1e-3" and "1/3" are kept exactly; null for what is no number.
  static parse(value) {
    const text = String(value).trim();
    const quotient = /^([+-]?\d{1,15})\/(\d{1,15})$/.exec(text);
    if (quotient) {
      const below = BigInt(quotient[2]);
      return below ? new Fraction(BigInt(quotient[1]), below) : null;
    }
    const decimal = /^([+-]?)(\d{0,20})\.?(\d{0,20})(?:e([+-]?\d{1,2}))?$/i.exec(text);
    if (!decimal || !(decimal[2] + decimal[3])) return null;
    const power = BigInt(decimal[4] ?? 0) - BigInt(decimal[3].length);
    const digits = BigInt(decimal[1] + decimal[2] + decimal[3]);
    return power < 0n ? new Fraction(digits, 10n ** -power) : new Fraction(digits * 10n ** power);
  }

  plus(other) {
    return new Fraction(this.n * other.d + other.n * this.d, this.d * other.d);
  }

  times(other) {
    return new Fraction(this.n * other.n, this.d * other.d);
  }

  toNumber() {
    return Number(this.n) / Number(this.d);
  }
}

// {tick, counts of ticks}: a tick is the longest time of which each of `times` is a multiple.
function inTicks(times) {
  const scale = times.reduce((all, { d }) => (all * d) / gcd(all, d), 1n);
  const wholes = times.map(({ n, d }) => (n * scale) / d);
  const common = wholes.reduce(gcd, 0n) || 1n;
  const counts = wholes.map((whole) => Number(whole / common));
  if (counts.some((count) => count > 2 ** 40)) {
    throw new RuleError("the durations have no common tick that is in reach");
  }
  return { tick: new Fraction(common, scale), counts };
}

// At most two decimals and none that are zeros: 33, 5.5, 2.33; 1e+6 and 1e-3 as such.
function shortNumber(value) {
  if (value && (Math.abs(value) < 0.01 || Math.abs(value) >= 1e5)) return value.toPrecision(3);
  return String(Math.round(value * 100) / 100);
}

// A share as "27%"; below 10% with one decimal unless that is a zero.
function percent(share) {
  const value = 100 * share;
  return (Math.abs(value) < 9.95 ? String(Math.round(value * 10) / 10) : value.toFixed(0)) + "%";
}

function sum(numbers) {
  return numbers.reduce((a, b) => a + b, 0);
}

function range(count) {
  return Array.from({ length: count }, (_, k) => k);
}

function keyOf(kind, stage, microbatch) {
  return `${stage}${kind}${microbatch}`;
}

function buildOp(kind, stage, microbatch) {
  return { kind, stage, microbatch, text: keyOf(kind, stage, microbatch) };
}

function itemText(item) {
  return item.length === 1 ? item[0].text : `(${item[0].text};${item[1].text})OVERLAP_F_B`;
}

// numStages: of one copy of the model; a second copy's stages are numbered on from there.
// kept: of a microbatch's activations on a stage, the share that is kept from its F to its R.
class Schedule {
  constructor(orders, numStages = orders.length, copies = 1, kept = 1) {
    Object.assign(this, { orders, numStages, copies, kept });
    this.numRanks = orders.length;
    this.stagesPerRank = Math.max(1, Math.floor(numStages / orders.length));
    this.ops = orders.flat(2);
    this.numMicrobatches = new Set(this.ops.map((op) => op.microbatch)).size;
    this.places = new Map(); // operation -> {rank, index of its item}
    orders.forEach((order, rank) =>
      order.forEach((item, index) => item.forEach((op) => this.places.set(op.text, { rank, index }))),
    );
  }

  // The operations whose results an item takes in: F those of the stage before it, B and I of the
  // stage after it and its own stage's R or F, R its own F, W its own I.
  needs(item) {
    return item.flatMap(({ kind, stage, microbatch }) => {
      const key = (wanted, at) => keyOf(wanted, at, microbatch);
      const place = stage % this.numStages;
      if (kind === "F") return place ? [key("F", stage - 1)] : [];
      if (kind === "W") return [key("I", stage)];
      if (kind === "R") return [key("F", stage)];
      const own = this.places.has(key("R", stage)) ? key("R", stage) : key("F", stage);
      if (place === this.numStages - 1) return [own];
      return [own, key(this.places.has(key("I", stage + 1)) ? "I" : "B", stage + 1)];
    });
  }

  // The same stages with other orders.
  withOrders(orders, kept = this.kept) {
    return new Schedule(orders, this.numStages, this.copies, kept);
  }
}

// The same batch again and again; microbatches of batch k are numbered from k m on.
function repeat(schedule, numBatches) {
  const later = (batch) => ({ kind, stage, microbatch }) =>
    buildOp(kind, stage, microbatch + batch * schedule.numMicrobatches);
  const batches = range(numBatches);
  return schedule.withOrders(schedule.orders.map((order) =>
    batches.flatMap((batch) => order.map((item) => item.map(later(batch)))),
  ));
}

// Every whole backward pass as its two halves, one after the other: nothing moves yet.
function cutBackwards(schedule) {
  const halves = (item) => {
    const [{ kind, stage, microbatch }, second] = item;
    return kind === "B" && !second ? [..."IW"].map((half) => [buildOp(half, stage, microbatch)]) : [item];
  };
  return schedule.withOrders(schedule.orders.map((order) => order.flatMap(halves)));
}

// The same orders, with R, the forward pass once more, before every backward pass.
function recomputed(schedule, kept) {
  const again = (item) => {
    const { kind, stage, microbatch } = item.at(-1);
    return kind === "B" || kind === "I" ? [[buildOp("R", stage, microbatch)], item] : [item];
  };
  const orders = schedule.orders.map((order) => order.flatMap(again));
  return schedule.withOrders(orders, Fraction.parse(kept).toNumber());
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
  const each = (value) => factors.map((factor) => value.times(factor));
  const [f, i, w] = [F, I, W].map(Fraction.parse);
  return {
    F: each(f), R: each(f), I: each(i), W: each(w), B: each(i.plus(w)),
    c: Fraction.parse(c), saving: Fraction.parse(saving),
  };
}

function durationOf(item, costs, numStages) {
  const lasts = item.map(({ kind, stage }) => costs[kind][stage % numStages]);
  if (lasts.length === 1) return lasts[0];
  const [shorter, longer] = lasts.sort((a, b) => Number(a.n * b.d - b.n * a.d));
  const { n, d } = costs.saving;
  return longer.plus(shorter.times(new Fraction(d - n, d)));
}

function withoutMicrobatch(item) {
  return item.map((op) => op.kind + op.stage).join("|");
}

// {schedule, costs, tick, c, starts, ends, bounds, sequence, last}: starts, ends and bounds have a
// list a rank, in its order; times are in ticks. A bound is the operation whose end (and sending)
// fixed the start, null at time 0. sequence: [rank, index] of items, each after all that it needs.
function simulate(schedule, costs) {
  const { orders } = schedule;
  const items = new Map(orders.flat(1).map((item) => [withoutMicrobatch(item), item]));
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
    let bound = index ? order[index - 1].at(-1).text : null;
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
    for (const op of order[index]) done.set(op.text, [end, rank]);
    return true;
  }

  for (let before = -1; sequence.length > before; ) {
    before = sequence.length;
    for (const rank of orders.keys()) while (advance(rank));
  }
  if (sequence.length < orders.flat().length) throw deadlock(schedule, ends, done);
  const last = Math.max(...ends.map((line) => line.at(-1) ?? 0));
  return { schedule, costs, tick: tick.toNumber(), c, starts, ends, bounds, sequence, last };
}

// Follow what each stuck rank waits for until a rank comes up again. The error's cause is the circle:
// [{rank, text of its next operation, need}].
function deadlock(schedule, ends, done) {
  const path = [];
  let rank = schedule.orders.findIndex((order, r) => ends[r].length < order.length);
  while (!path.some((step) => step.rank === rank)) {
    const item = schedule.orders[rank][ends[rank].length];
    const waiting = item.map((op) => [op.text, schedule.needs([op]).find((need) => !done.has(need))]);
    const [text, need] = waiting.find(([, missing]) => missing);
    path.push({ rank, text, need });
    ({ rank } = schedule.places.get(need));
  }
  const circle = path.slice(path.findIndex((step) => step.rank === rank));
  const steps = circle.map((at) => `rank ${at.rank} is at ${at.text}, which needs ${at.need}`);
  return new RuleError(`deadlock: ${steps.join("; ")}`, { cause: circle });
}

function moved(schedule, { rank, from, to }) {
  const length = schedule.orders[rank]?.length ?? 0;
  if (from >= length || to >= length) throw new RuleError("a move names a place that is not there");
  const orders = [...schedule.orders];
  orders[rank] = orders[rank].toSpliced(from, 1).toSpliced(to, 0, orders[rank][from]);
  return schedule.withOrders(orders);
}

// What a move would do: {verdict: "illegal" | "same" | "longer" | "shorter", text}.
function judge(timeline, move, memory = Infinity) {
  const { schedule, costs } = timeline;
  const illegal = (text) => ({ verdict: "illegal", text: `Not possible: ${text}` });
  let after;
  try {
    after = simulate(moved(schedule, move), costs);
  } catch (error) {
    const circle = error.cause;
    if (!circle) throw error;
    const [{ text, need }] = circle;
    if (circle.length === 1) return illegal(`${text} needs ${need}, which this rank would run later.`);
    const steps = circle.map((at) => `Rank ${at.rank} is at ${at.text} and needs ${at.need}.`);
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
  const name = schedule.orders[move.rank][move.from].map((op) => op.text).join(" | ");
  if (after.last === timeline.last) return { verdict: "same", text: `Free: ${name} may move, time stays ${is}.` };
  if (after.last < timeline.last) return { verdict: "shorter", text: `Gains ${by}: time falls from ${was} to ${is}.` };
  return { verdict: "longer", text: `Costs ${by}: time rises from ${was} to ${is}.` };
}
