// What a schedule is made of: operations, and their order on every rank (schedules/ops.py).
//
// An operation is written as torch writes it: 2F0 is stage 2, F, microbatch 0. An item of an order
// is one operation or a pair that runs at the same time; `parts` holds one or two operations.
"use strict";

class RuleError extends Error {}

class Op {
  constructor(kind, stage, microbatch) {
    this.kind = kind;
    this.stage = stage;
    this.microbatch = microbatch;
    this.text = `${stage}${kind}${microbatch}`;
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

// chains: the stages in the direction of the forward pass; two chains are two copies of the model.
// kept: of a microbatch's activations on a stage, the share that is kept from its F to its R.
class Schedule {
  constructor(name, orders, chains, stagesPerRank = 1, kept = ONE) {
    this.kept = kept;
    this.name = name;
    this.orders = orders;
    this.chains = chains;
    this.stagesPerRank = stagesPerRank;
  }

  get numRanks() {
    return this.orders.length;
  }

  ops() {
    return this.orders.flatMap((order) => order.flatMap((item) => item.parts));
  }

  get numMicrobatches() {
    return new Set(this.ops().map((op) => op.microbatch)).size;
  }

  // stage -> its place in the model
  position() {
    return new Map(this.chains.flatMap((chain) => chain.map((stage, place) => [stage, place])));
  }

  // operation -> the rank that runs it
  ranks() {
    const found = new Map();
    this.orders.forEach((order, rank) => {
      for (const item of order) for (const op of item.parts) found.set(op.text, rank);
    });
    return found;
  }

  withOrders(orders) {
    return new Schedule(this.name, orders, this.chains, this.stagesPerRank, this.kept);
  }
}

function oneChain(numStages) {
  return [Array.from({ length: numStages }, (_, stage) => stage)];
}

// The same batch again and again; microbatches of batch k are numbered from k m on.
function repeat(schedule, numBatches) {
  const m = schedule.numMicrobatches;
  const shifted = (item, by) => {
    const parts = item.parts.map((op) => new Op(op.kind, op.stage, op.microbatch + by));
    return parts.length === 2 ? new Pair(...parts) : parts[0];
  };
  const batches = Array.from({ length: numBatches }, (_, k) => k * m);
  return schedule.withOrders(
    schedule.orders.map((order) => batches.flatMap((by) => order.map((i) => shifted(i, by)))),
  );
}

// Every whole backward pass as its two halves, one after the other: nothing moves yet.
function cutBackwards(schedule) {
  const halves = (op) =>
    op.kind === "B"
      ? [new Op("I", op.stage, op.microbatch), new Op("W", op.stage, op.microbatch)]
      : [op];
  const cut = (item) => (item.parts.length === 2 ? [item] : halves(item));
  return schedule.withOrders(schedule.orders.map((order) => order.flatMap(cut)));
}

// The same orders, with R, the forward pass once more, before every backward pass.
function recomputed(schedule, kept) {
  const orders = schedule.orders.map((order) =>
    order.flatMap((item) => {
      const { kind, stage, microbatch } = item.parts.at(-1);
      return kind === "B" || kind === "I" ? [new Op("R", stage, microbatch), item] : [item];
    }),
  );
  const { name, chains, stagesPerRank } = schedule;
  return new Schedule(name, orders, chains, stagesPerRank, Fraction.parse(kept));
}
