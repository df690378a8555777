// What a schedule is made of: operations, and their order on every rank (schedules/ops.py).
//
// An operation is written as torch writes it: 2F0 is stage 2, F, microbatch 0. An item of an order
// is one operation or a pair that runs at the same time; `parts` holds one or two operations.
"use strict";

class RuleError extends Error {}

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

// chains: the stages in the direction of the forward pass; two chains are two copies of the model.
// kept: of a microbatch's activations on a stage, the share that is kept from its F to its R.
class Schedule {
  constructor(name, orders, chains, stagesPerRank = 1, kept = ONE) {
    Object.assign(this, { name, orders, chains, stagesPerRank, kept });
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

  // operation -> {rank, index of its item}
  places() {
    const found = new Map();
    this.orders.forEach((order, rank) =>
      order.forEach((item, index) => item.parts.forEach((op) => found.set(op.text, { rank, index }))),
    );
    return found;
  }

  withOrders(orders) {
    return new Schedule(this.name, orders, this.chains, this.stagesPerRank, this.kept);
  }

  // Each item as the items that `change` makes of it.
  withItems(change) {
    return this.withOrders(this.orders.map((order) => order.flatMap(change)));
  }
}

function oneChain(numStages) {
  return [Array.from({ length: numStages }, (_, stage) => stage)];
}

// The same batch again and again; microbatches of batch k are numbered from k m on.
function repeat(schedule, numBatches) {
  const m = schedule.numMicrobatches;
  const later = (by) => ({ kind, stage, microbatch }) => new Op(kind, stage, microbatch + by);
  const batches = Array.from({ length: numBatches }, (_, k) => later(k * m));
  return schedule.withOrders(
    schedule.orders.map((order) => batches.flatMap((by) => order.map((i) => changedItem(i, by)))),
  );
}

// Every whole backward pass as its two halves, one after the other: nothing moves yet.
function cutBackwards(schedule) {
  const half = ({ stage, microbatch }) => (kind) => new Op(kind, stage, microbatch);
  return schedule.withItems((item) => (item.kind === "B" ? [..."IW"].map(half(item)) : [item]));
}

// The same orders, with R, the forward pass once more, before every backward pass.
function recomputed(schedule, kept) {
  const found = schedule.withItems((item) => {
    const { kind, stage, microbatch } = item.parts.at(-1);
    return kind === "B" || kind === "I" ? [new Op("R", stage, microbatch), item] : [item];
  });
  found.kept = Fraction.parse(kept);
  return found;
}
