// Define exact numbers, operations, and their order on every rank (schedules/ops.py). Simulate
// orders with an exact clock (simulate/simulator.py), and compute the cost of a move within a rank.
//
// Operations are written as in torch: 2F0 is F of microbatch 0 on stage 2. An item of an order is a
// list of one operation, or of two operations that run at the same time.
"use strict";

// Error for a request that is rejected. The message is the reason.
class RuleError extends Error {}

// Return why the request is rejected, or "".
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

  // Parse 2, "2", "0.5", "1e-3" and "1/3" exactly. Return null for text that is not a number.
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

// Return {tick, counts of ticks}. A tick is the longest time that divides each of `times`.
function inTicks(times) {
  const scale = times.reduce((all, { d }) => (all * d) / gcd(all, d), 1n);
  const wholes = times.map(({ n, d }) => (n * scale) / d);
  const common = wholes.reduce(gcd, 0n) || 1n;
  const counts = wholes.map((whole) => Number(whole / common));
  if (counts.some((count) => count > 2 ** 40)) {
    throw new RuleError("the durations need a common unit that is too small to simulate");
  }
  return { tick: new Fraction(common, scale), counts };
}

// Format with at most two decimals, without trailing zeros: 33, 5.5, 2.33. 1e+6 and 1e-3 stay as
// they are.
function shortNumber(value) {
  if (value && (Math.abs(value) < 0.01 || Math.abs(value) >= 1e5)) return value.toPrecision(3);
  return String(Math.round(value * 100) / 100);
}

// Format a share as "27%". Below 10%, it has one decimal unless that is zero.
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

// Return the orders with a function applied to each operation.
function changedOps(orders, change) {
  return orders.map((order) => order.map((item) => item.map(change)));
}

class Schedule {
  constructor(orders) {
    this.orders = orders;
    this.ops = orders.flat(2);
    this.numRanks = orders.length;
    this.numStages = 1 + Math.max(...this.ops.map((op) => op.stage));
    this.stagesPerRank = Math.max(1, Math.floor(this.numStages / orders.length));
    this.numMicrobatches = new Set(this.ops.map((op) => op.microbatch)).size;
    this.rankOf = new Map(orders.flatMap((order, rank) => order.flat().map((op) => [op.text, rank])));
  }

  // Return the operations whose results an item uses. F needs the previous stage's F. B and I need
  // the next stage and their own stage's F. W needs its own I.
  needs(item) {
    return item.flatMap(({ kind, stage, microbatch }) => {
      const key = (wanted, at) => keyOf(wanted, at, microbatch);
      if (kind === "F") return stage ? [key("F", stage - 1)] : [];
      if (kind === "W") return [key("I", stage)];
      if (stage === this.numStages - 1) return [key("F", stage)];
      const next = this.rankOf.has(key("I", stage + 1)) ? "I" : "B";
      return [key("F", stage), key(next, stage + 1)];
    });
  }
}

// Repeat the same batch. Microbatches of batch k are numbered from k m.
function repeat(schedule, numBatches) {
  const batches = range(numBatches).map((batch) => changedOps(schedule.orders, ({ kind, stage, microbatch }) =>
    buildOp(kind, stage, microbatch + batch * schedule.numMicrobatches),
  ));
  return new Schedule(schedule.orders.map((_, rank) => batches.flatMap((orders) => orders[rank])));
}

// Replace every whole backward pass with its two consecutive halves. The times do not change.
function cutBackwards(schedule) {
  return new Schedule(schedule.orders.map((order) => order.flatMap((item) => {
    const [{ kind, stage, microbatch }] = item;
    if (kind !== "B") return [item]; // pairs are not split: their first operation is an F
    return [..."IW"].map((half) => [buildOp(half, stage, microbatch)]);
  })));
}

// Durations as fractions, by a stage's position in the model. `scale` has a factor for each equal
// share of the layers, and a stage has the mean of the factors of its shares. With v stages per
// rank, a stage has 1/v of the work.
function buildCosts({ numStages, stagesPerRank }, { F, I, W, c, saving = 0, scale = [] }) {
  const given = scale.length ? scale.map(Fraction.parse) : [new Fraction(1n)];
  const parts = given.length; // of a stage; a share contains numStages of them
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
    F: each(f), I: each(i), W: each(w), B: each(i.plus(w)),
    c: Fraction.parse(c), saving: Fraction.parse(saving),
  };
}

function durationOf(item, costs) {
  const lasts = item.map(({ kind, stage }) => costs[kind][stage]);
  if (lasts.length === 1) return lasts[0];
  const [shorter, longer] = lasts.sort((a, b) => Number(a.n * b.d - b.n * a.d));
  const { n, d } = costs.saving;
  return longer.plus(shorter.times(new Fraction(d - n, d)));
}

function withoutMicrobatch(item) {
  return item.map((op) => op.kind + op.stage).join("|");
}

// Return {schedule, costs, lines, cells, tick, c, last}. `lines` has each rank's cells {item, rank,
// index, start, end, bound} in its order. `cells` has the same cells by operation, each after its
// inputs. Times are in ticks. `bound` is the operation whose end, or whose message, determined the
// start. It is null for a start at 0.
function simulate(schedule, costs) {
  const { orders } = schedule;
  const items = new Map(orders.flat(1).map((item) => [withoutMicrobatch(item), item]));
  const exact = [...items.values()].map((item) => durationOf(item, costs));
  const { tick, counts: [c, ...counts] } = inTicks([costs.c, ...exact]);
  const durations = new Map([...items.keys()].map((key, k) => [key, counts[k]]));
  const lines = orders.map(() => []);
  const cells = new Map();

  // Run the rank's next item, unless it must wait.
  function advance(rank) {
    const index = lines[rank].length;
    if (index === orders[rank].length) return false;
    const item = orders[rank][index];
    const needs = schedule.needs(item);
    if (!needs.every((need) => cells.has(need))) return false;
    const before = lines[rank].at(-1);
    let [start, bound] = before ? [before.end, before.item.at(-1).text] : [0, null];
    for (const need of needs) {
      const arrival = arrivalOf(cells.get(need), rank, c);
      if (arrival > start) [start, bound] = [arrival, need];
    }
    const cell = { item, rank, index, start, end: start + durations.get(withoutMicrobatch(item)), bound };
    lines[rank].push(cell);
    for (const op of item) cells.set(op.text, cell);
    return true;
  }

  for (let before = -1; cells.size > before; ) {
    before = cells.size;
    for (const rank of orders.keys()) while (advance(rank));
  }
  if (cells.size < schedule.ops.length) throw deadlock(schedule, lines, cells);
  const last = lastEnd(lines);
  return { schedule, costs, lines, cells, tick: tick.toNumber(), c, last };
}

// Return the time at which a cell's results arrive on a rank.
function arrivalOf(cell, rank, c) {
  return cell.rank === rank ? cell.end : cell.end + c;
}

function lastEnd(lines) {
  return Math.max(...lines.map((line) => line.at(-1)?.end ?? 0));
}

// Follow the waiting ranks until a rank repeats. The error's cause is the circle: [{rank, text of
// its next operation, need}].
function deadlock(schedule, lines, cells) {
  const path = [];
  let rank = schedule.orders.findIndex((order, r) => lines[r].length < order.length);
  while (!path.some((step) => step.rank === rank)) {
    const item = schedule.orders[rank][lines[rank].length];
    const waiting = item.map((op) => [op.text, schedule.needs([op]).find((need) => !cells.has(need))]);
    const [text, need] = waiting.find(([, missing]) => missing);
    path.push({ rank, text, need });
    rank = schedule.rankOf.get(need);
  }
  const circle = path.slice(path.findIndex((step) => step.rank === rank));
  const steps = circle.map((at) => `rank ${at.rank} is at ${at.text}, which needs ${at.need}`);
  return new RuleError(`deadlock: ${steps.join("; ")}`, { cause: circle });
}

function moved(schedule, { rank, from, to }) {
  const length = schedule.orders[rank]?.length ?? 0;
  if (from >= length || to >= length) throw new RuleError("a move names a position that does not exist");
  const orders = [...schedule.orders];
  orders[rank] = orders[rank].toSpliced(from, 1).toSpliced(to, 0, orders[rank][from]);
  return new Schedule(orders);
}

// Return the effect of a move: {verdict: "illegal" | "same" | "longer" | "shorter", text}.
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
    return illegal(`rank ${move.rank} would hold ${shown} microbatches, but the limit is ${memory}.`);
  }
  const [was, is] = [timeline, after].map(({ last }) => shortNumber(last * timeline.tick));
  const by = shortNumber(Math.abs(after.last - timeline.last) * timeline.tick);
  const name = schedule.orders[move.rank][move.from].map((op) => op.text).join(" | ");
  if (after.last === timeline.last) return { verdict: "same", text: `Free: ${name} can move, and the time stays ${is}.` };
  if (after.last < timeline.last) return { verdict: "shorter", text: `Saves ${by}: the time falls from ${was} to ${is}.` };
  return { verdict: "longer", text: `Costs ${by}: the time rises from ${was} to ${is}.` };
}
