// Trains a small network in the order of a schedule, and compares each microbatch's gradient with
// the exact one: is it the gradient of the model that its forward passes ran?
//
// A stage is a residual layer, y = x + tanh(x U) V, in doubles; the last one has a classifier C
// behind it. Plain SGD; the loss of a microbatch is divided by the microbatches of a batch.
"use strict";

const WIDTH = 16;
const HIDDEN = 32;
const CLASSES = 8;
const ROWS = 8; // samples a microbatch
const MICROBATCHES = 64; // then the samples come round again

// [rows, inner] times [inner, columns]; `ta`, `tb` for an operand that is stored transposed.
function multiply(a, b, rows, inner, columns, { ta = false, tb = false } = {}) {
  const out = new Float64Array(rows * columns);
  for (let r = 0; r < rows; r++) {
    for (let k = 0; k < inner; k++) {
      const left = ta ? a[k * rows + r] : a[r * inner + k];
      for (let c = 0; c < columns; c++) {
        out[r * columns + c] += left * (tb ? b[c * inner + k] : b[k * columns + c]);
      }
    }
  }
  return out;
}

function buildModel(numStages, seed = 0) {
  const chance = generator(seed);
  return Array.from({ length: numStages }, (_, stage) => {
    const U = normals(chance, WIDTH * HIDDEN, WIDTH ** -0.5);
    const V = normals(chance, HIDDEN * WIDTH, HIDDEN ** -0.5);
    if (stage < numStages - 1) return { U, V };
    return { U, V, C: normals(chance, WIDTH * CLASSES, WIDTH ** -0.5) };
  });
}

// Normal inputs, classified by a random two-layer network: microbatch -> {x, classes}.
function buildTask(seed = 0) {
  const chance = generator(seed + 1000);
  const first = normals(chance, WIDTH * WIDTH, WIDTH ** -0.5);
  const second = normals(chance, WIDTH * CLASSES, 1);
  const batches = Array.from({ length: MICROBATCHES }, () => {
    const x = normals(chance, ROWS * WIDTH, 1);
    const hidden = multiply(x, first, ROWS, WIDTH, WIDTH).map(Math.tanh);
    const scores = rowsOf(multiply(hidden, second, ROWS, WIDTH, CLASSES));
    return { x, classes: scores.map((own) => own.indexOf(Math.max(...own))) };
  });
  return (microbatch) => batches[microbatch % MICROBATCHES];
}

function rowsOf(scores) {
  return Array.from({ length: ROWS }, (_, r) => scores.subarray(r * CLASSES, (r + 1) * CLASSES));
}

function stageForward(weights, x) {
  const h = multiply(x, weights.U, ROWS, WIDTH, HIDDEN).map(Math.tanh);
  const y = multiply(h, weights.V, ROWS, HIDDEN, WIDTH).map((value, k) => value + x[k]);
  return { x, h, y, weights };
}

// Mean cross-entropy in nats, and its gradient by the logits divided by `batchSize`.
function lossOf(weights, y, classes, batchSize) {
  const dLogits = new Float64Array(ROWS * CLASSES);
  let loss = 0;
  rowsOf(multiply(y, weights.C, ROWS, WIDTH, CLASSES)).forEach((own, row) => {
    const most = Math.max(...own);
    const total = own.reduce((sum, value) => sum + Math.exp(value - most), 0);
    loss += (most + Math.log(total) - own[classes[row]]) / ROWS;
    for (let c = 0; c < CLASSES; c++) {
      const share = Math.exp(own[c] - most) / total - (c === classes[row] ? 1 : 0);
      dLogits[row * CLASSES + c] = share / ROWS / batchSize;
    }
  });
  return { loss, dLogits };
}

// The gradients of a stage's weights, and dx for the stage before. `weights` are those that the
// backward pass sees; saved holds what the forward pass left. `dy` is null on the last stage.
function stageBackward(weights, saved, dy, classes, batchSize) {
  const gradients = {};
  let loss = null;
  if (weights.C) {
    const ends = lossOf(saved.weights, saved.y, classes, batchSize);
    loss = ends.loss;
    gradients.C = multiply(saved.y, ends.dLogits, WIDTH, ROWS, CLASSES, { ta: true });
    dy = multiply(ends.dLogits, weights.C, ROWS, CLASSES, WIDTH, { tb: true });
  }
  const dh = multiply(dy, weights.V, ROWS, WIDTH, HIDDEN, { tb: true });
  const dz = dh.map((value, k) => value * (1 - saved.h[k] ** 2));
  gradients.V = multiply(saved.h, dy, HIDDEN, ROWS, WIDTH, { ta: true });
  gradients.U = multiply(saved.x, dz, WIDTH, ROWS, HIDDEN, { ta: true });
  const dx = multiply(dz, weights.U, ROWS, HIDDEN, WIDTH, { tb: true });
  return { gradients, dx: dx.map((value, k) => value + dy[k]), loss };
}

// All stages at once, each with the weights given: {gradients by stage, loss}.
function exactGradients(weights, { x, classes }, batchSize) {
  const saved = [];
  for (const own of weights) saved.push(stageForward(own, saved.at(-1)?.y ?? x));
  const gradients = [];
  let [dy, loss] = [null, null];
  for (let stage = weights.length - 1; stage >= 0; stage--) {
    const back = stageBackward(weights[stage], saved[stage], dy, classes, batchSize);
    gradients[stage] = back.gradients;
    dy = back.dx;
    loss = back.loss ?? loss;
  }
  return { gradients, loss };
}

// One stage that trains: versions of its weights by number, as the policy asks for them.
class Stage {
  constructor(weights, policy, use, batchSize, learningRate) {
    Object.assign(this, { policy, use, batchSize, learningRate });
    this.versions = [weights];
    this.flights = new Map();
    this.sum = null;
    this.added = 0;
  }

  get newest() {
    return this.versions.at(-1);
  }

  forward(microbatch, x) {
    const version = this.use.forward.get(microbatch);
    const weights = this.policy.stashed ? this.versions[version] : this.newest;
    this.flights.set(microbatch, stageForward(weights, x));
  }

  // What reads the weights happens here; the update waits for `finish`.
  backward(microbatch, dy, classes) {
    const flight = this.flights.get(microbatch);
    const weights = this.policy.stashed ? flight.weights : this.newest;
    Object.assign(flight, stageBackward(weights, flight, dy, classes, this.batchSize));
  }

  finish(microbatch) {
    const flight = this.flights.get(microbatch);
    flight.before = this.newest;
    this.sum ??= mapWeights(flight.gradients, (g) => new Float64Array(g.length));
    for (const name in this.sum) {
      flight.gradients[name].forEach((value, k) => (this.sum[name][k] += value));
    }
    this.added += 1;
    if (!this.policy.perMicrobatch && this.added < this.batchSize) return;
    const step = (w, name) => w.map((x, k) => x - this.learningRate * this.sum[name][k]);
    this.versions.push(mapWeights(this.newest, step));
    this.sum = null;
    this.added = 0;
  }
}

function mapWeights(weights, change) {
  return Object.fromEntries(Object.entries(weights).map(([name, w]) => [name, change(w, name)]));
}

// {perStage, whole, newest: median relative errors over the microbatches; losses by microbatch}.
// `newest` compares with the gradient at the weights that the update is applied to.
function trainAlong(timeline, policy, use, batchSize, learningRate) {
  const chain = timeline.schedule.chains[0];
  const model = buildModel(chain.length);
  const task = buildTask();
  const stages = chain.map(
    (stage, place) => new Stage(model[place], policy, use.get(stage), batchSize, learningRate),
  );
  const losses = [];
  const results = [];
  for (const { kind, stage: place, microbatch: i } of inTimeOrder(timeline)) {
    const [stage, before, after] = [stages[place], stages[place - 1], stages[place + 1]];
    if (kind === "F") stage.forward(i, before ? before.flights.get(i).y : task(i).x);
    if (kind === "B" || kind === "I") {
      stage.backward(i, after ? after.flights.get(i).dx : null, task(i).classes);
      if (!after) losses[i] = stage.flights.get(i).loss;
    }
    if (kind === "B" || kind === "W") stage.finish(i);
    const flights = stages.map((own) => own.flights.get(i));
    if (!flights.every((flight) => flight?.before)) continue;
    results.push(compareGradients(flights, task(i), batchSize));
    for (const own of stages) own.flights.delete(i);
  }
  const median = (pick) => {
    const sorted = results.map(pick).sort((a, b) => a - b);
    return sorted[Math.floor(sorted.length / 2)] ?? 0;
  };
  const perStage = chain.map((_, place) => median((r) => r.perStage[place]));
  return { perStage, whole: median((r) => r.whole), newest: median((r) => r.newest), losses };
}

function inTimeOrder({ schedule, starts, ends }) {
  const events = schedule.orders.flatMap((order, rank) =>
    order.map(({ parts }, k) => ({ parts, rank, k, start: starts[rank][k], end: ends[rank][k] })),
  );
  events.sort((a, b) => a.start - b.start || a.end - b.end || a.rank - b.rank || a.k - b.k);
  return events.flatMap(({ parts }) => parts);
}

function compareGradients(flights, batch, batchSize) {
  const at = (key) => exactGradients(flights.map((own) => own[key]), batch, batchSize).gradients;
  const [computed, exact] = [flights.map((flight) => flight.gradients), at("weights")];
  return {
    perStage: computed.map((own, place) => relativeError([own], [exact[place]])),
    whole: relativeError(computed, exact),
    newest: relativeError(computed, at("before")),
  };
}

// Norm of the difference by the norm of the exact ones; Infinity where that is no number.
function relativeError(found, exact) {
  let [off, norm] = [0, 0];
  exact.forEach((own, place) => {
    for (const name in own) {
      own[name].forEach((value, k) => {
        off += (found[place][name][k] - value) ** 2;
        norm += value ** 2;
      });
    }
  });
  const error = Math.sqrt(off / norm);
  return Number.isFinite(error) ? error : Infinity;
}
