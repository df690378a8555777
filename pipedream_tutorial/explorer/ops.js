// Exact numbers, operations, and their order on every rank (schedules/ops.py).
//
// An operation is written as torch writes it: 2F0 is stage 2, F, microbatch 0. An item of an order
// is one operation or a pair that runs at the same time; `parts` holds one or two operations.
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
    const power = Number(decimal[4] ?? 0) - decimal[3].length;
    const digits = BigInt(decimal[1] + decimal[2] + decimal[3]);
    return power < 0
      ? new Fraction(digits, 10n ** BigInt(-power))
      : new Fraction(digits * 10n ** BigInt(power));
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

  // As Python writes a Fraction: 33, 67/2.
  toString() {
    return this.d === 1n ? String(this.n) : `${this.n}/${this.d}`;
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

class Op {
  constructor(kind, stage, microbatch) {
    Object.assign(this, { kind, stage, microbatch });
    this.text = keyOf(kind, stage, microbatch);
    this.parts = [this];
  }
}

class Pair {
  constructor(forward, backward) {
    this.parts = [forward, backward];
    this.text = `(${forward.text};${backward.text})OVERLAP_F_B`;
  }
}

function keyOf(kind, stage, microbatch) {
  return `${stage}${kind}${microbatch}`;
}

// The item with `change` made to its operations.
function changedItem(item, change) {
  const parts = item.parts.map(change);
  return parts.length === 2 ? new Pair(...parts) : parts[0];
}

// numStages: of one copy of the model; a second copy's stages are numbered on from there.
// kept: of a microbatch's activations on a stage, the share that is kept from its F to its R.
class Schedule {
  constructor(orders, numStages = orders.length, copies = 1, kept = 1) {
    Object.assign(this, { orders, numStages, copies, kept });
    this.numRanks = orders.length;
    this.stagesPerRank = Math.max(1, Math.floor(numStages / orders.length));
    this.ops = orders.flatMap((order) => order.flatMap((item) => item.parts));
    this.numMicrobatches = new Set(this.ops.map((op) => op.microbatch)).size;
    this.places = new Map(); // operation -> {rank, index of its item}
    orders.forEach((order, rank) =>
      order.forEach(({ parts }, index) => {
        for (const op of parts) this.places.set(op.text, { rank, index });
      }),
    );
  }

  // The operations whose results an item takes in: F those of the stage before it, B and I of the
  // stage after it and its own stage's R or F, R its own F, W its own I.
  needs(item) {
    return item.parts.flatMap(({ kind, stage, microbatch }) => {
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

  // Each item as the items that `change` makes of it.
  withItems(change, kept = this.kept) {
    const orders = this.orders.map((order) => order.flatMap(change));
    return new Schedule(orders, this.numStages, this.copies, kept);
  }
}

// The same batch again and again; microbatches of batch k are numbered from k m on.
function repeat({ orders, numStages, copies, numMicrobatches }, numBatches) {
  const later = (batch) => ({ kind, stage, microbatch }) =>
    new Op(kind, stage, microbatch + batch * numMicrobatches);
  const again = (order) =>
    range(numBatches).flatMap((batch) => order.map((item) => changedItem(item, later(batch))));
  return new Schedule(orders.map(again), numStages, copies);
}

// Every whole backward pass as its two halves, one after the other: nothing moves yet.
function cutBackwards(schedule) {
  const half = ({ stage, microbatch }) => (kind) => new Op(kind, stage, microbatch);
  return schedule.withItems((item) => (item.kind === "B" ? [..."IW"].map(half(item)) : [item]));
}

// The same orders, with R, the forward pass once more, before every backward pass.
function recomputed(schedule, kept) {
  return schedule.withItems((item) => {
    const { kind, stage, microbatch } = item.parts.at(-1);
    return kind === "B" || kind === "I" ? [new Op("R", stage, microbatch), item] : [item];
  }, Fraction.parse(kept).toNumber());
}
