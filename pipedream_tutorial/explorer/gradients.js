// Train a small network in a schedule's order, and compare each microbatch's gradient with the
// exact gradient of the model that its forward passes ran.
//
// A stage is a residual layer, y = x + tanh(x U) V, in double precision. Plain SGD trains it to
// imitate a random layer of the same kind. The loss of a microbatch is divided by the number of
// microbatches in a batch.
"use strict";

const WIDTH = 16;
const HIDDEN = 32;
const ROWS = 8; // samples per microbatch
const SAMPLES = 64; // number of different microbatches; training repeats them
const MOST_OPERATIONS = 4000;

// Multiply [rows, inner] by [inner, columns]. `ta` and `tb` mark transposed operands.
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

// Mulberry32: a small random generator for [0, 1). Equal seeds give equal numbers in every browser.
function generator(seed) {
  let state = seed + 1;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

// Return random weights for a stage.
function randomStage(chance) {
  const U = normals(chance, WIDTH * HIDDEN, WIDTH ** -0.5);
  return { U, V: normals(chance, HIDDEN * WIDTH, HIDDEN ** -0.5) };
}

function normals(chance, count, scale) {
  return Float64Array.from({ length: count }, () => {
    const radius = Math.sqrt(-2 * Math.log(1 - chance()));
    return scale * radius * Math.cos(2 * Math.PI * chance());
  });
}

// Return {x, wanted} by microbatch.
function buildTask() {
  const chance = generator(1000);
  const teacher = randomStage(chance);
  return range(SAMPLES).map(() => {
    const x = normals(chance, ROWS * WIDTH, 1);
    return { x, wanted: stageForward(teacher, x).y };
  });
}

function stageForward(weights, x) {
  const h = multiply(x, weights.U, ROWS, WIDTH, HIDDEN).map(Math.tanh);
  const y = multiply(h, weights.V, ROWS, HIDDEN, WIDTH).map((value, k) => value + x[k]);
  return { x, h, y, weights };
}

// Return the mean squared error, and its gradient divided by `batchSize`.
function lossOf(y, wanted, batchSize) {
  const off = y.map((value, k) => value - wanted[k]);
  const loss = sum([...off].map((value) => value ** 2)) / off.length;
  return { loss, dy: off.map((value) => (2 * value) / off.length / batchSize) };
}

// Return the gradients of a stage's weights, and dx for the previous stage. `weights` are the
// weights of the backward pass; x and h come from the forward pass.
function stageBackward(weights, { x, h }, dy) {
  const dh = multiply(dy, weights.V, ROWS, WIDTH, HIDDEN, { tb: true });
  const dz = dh.map((value, k) => value * (1 - h[k] ** 2));
  const gradients = {
    U: multiply(x, dz, WIDTH, ROWS, HIDDEN, { ta: true }),
    V: multiply(h, dy, HIDDEN, ROWS, WIDTH, { ta: true }),
  };
  const dx = multiply(dz, weights.U, ROWS, HIDDEN, WIDTH, { tb: true });
  return { gradients, dx: dx.map((value, k) => value + dy[k]) };
}

// Run all stages at once, each with the given weights. Return {gradients by stage, loss}.
function exactGradients(weights, { x, wanted }, batchSize) {
  const saved = [];
  for (const own of weights) saved.push(stageForward(own, saved.at(-1)?.y ?? x));
  const { loss, dy } = lossOf(saved.at(-1).y, wanted, batchSize);
  let back = { dx: dy };
  const backs = weights.toReversed().map((own, k) => {
    back = stageBackward(own, saved.at(-1 - k), back.dx);
    return back;
  });
  return { gradients: backs.map(({ gradients }) => gradients).reverse(), loss };
}

// Return {perStage, whole, newest, losses}: median relative errors over the microbatches, and
// losses by microbatch. `newest` compares with the gradient at the weights that the update changes.
function trainAlong({ timeline, policy, use, batchSize }, learningRate) {
  const { numStages, numMicrobatches } = timeline.schedule;
  const task = buildTask();
  const chance = generator(0);
  const versions = range(numStages).map(() => [randomStage(chance)]); // by stage, oldest first
  const flights = versions.map(() => []); // by stage and microbatch: values from its passes
  const added = versions.map(() => []); // gradients that wait for the update
  const ops = [...new Set(timeline.cells.values())].flatMap(({ item }) => item);
  for (const { kind, stage, microbatch: i, text } of ops) {
    const { x, wanted } = task[i % SAMPLES];
    const weights = versions[stage][use.get(text).version];
    if (kind === "F") flights[stage][i] = stageForward(weights, stage ? flights[stage - 1][i].y : x);
    const flight = flights[stage][i];
    if (kind === "B" || kind === "I") {
      const behind = flights[stage + 1]?.[i];
      if (!behind) Object.assign(flight, lossOf(flight.y, wanted, batchSize));
      Object.assign(flight, stageBackward(weights, flight, behind ? behind.dx : flight.dy));
    }
    if (kind !== "B" && kind !== "W") continue;
    const latest = versions[stage].at(-1);
    flight.latest = latest;
    added[stage].push(flight.gradients);
    if (policy.perMicrobatch || added[stage].length === batchSize) {
      const step = (name) => latest[name].map((w, k) => w - learningRate * sum(added[stage].map((g) => g[name][k])));
      versions[stage].push({ U: step("U"), V: step("V") });
      added[stage] = [];
    }
  }
  const results = range(numMicrobatches).map((i) => {
    const own = flights.map((flight) => flight[i]);
    const computed = own.map(({ gradients }) => gradients);
    const exact = (key) => exactGradients(own.map((flight) => flight[key]), task[i % SAMPLES], batchSize).gradients;
    const seen = exact("weights");
    return {
      perStage: computed.map((one, stage) => relativeError([one], [seen[stage]])),
      whole: relativeError(computed, seen),
      newest: relativeError(computed, exact("latest")),
    };
  });
  const median = (read) => results.map(read).sort((a, b) => a - b)[Math.floor(results.length / 2)];
  return {
    perStage: versions.map((_, stage) => median((result) => result.perStage[stage])),
    whole: median((result) => result.whole),
    newest: median((result) => result.newest),
    losses: flights.at(-1).map(({ loss }) => loss),
  };
}

// Return the norm of the difference divided by the norm of the exact gradients, or Infinity if this
// is NaN.
function relativeError(found, exact) {
  const [one, other] = [found, exact].map((stages) => stages.flatMap(({ U, V }) => [...U, ...V]));
  const error = Math.hypot(...one.map((value, k) => value - other[k])) / Math.hypot(...other);
  return Number.isFinite(error) ? error : Infinity;
}

// Return the result of trainAlong, or {reason}. Return null if training is switched off.
function train(run, chosen) {
  if (!chosen.gradients) return null;
  const { schedule } = run.timeline;
  if (schedule.ops.length > MOST_OPERATIONS) {
    return { reason: "there are too many operations. Use fewer ranks, microbatches or batches." };
  }
  return trainAlong(run, Number(chosen.rate));
}

const LARGEST_ERROR = 10; // the digits of larger relative errors, after training diverged, say nothing

function errorText(error) {
  return error <= LARGEST_ERROR ? percent(error) : `> ${percent(LARGEST_ERROR)}`;
}

function showTrained(trained, chosen) {
  byId("trained").hidden = !chosen.gradients;
  byId("trained-table").replaceChildren();
  byId("trained-text").textContent = trained?.reason ? `Not trained: ${trained.reason}` : "";
  if (!trained || trained.reason) return;
  const { whole, newest, perStage, losses } = trained;
  let verdict = "Exact: the gradient at the newest weights.";
  if (newest) verdict = "Valid: the exact gradient at the weights that the forward passes used, but not at the newest weights.";
  if (whole) verdict = `Wrong by ${errorText(whole)}: backward passes use different weights from the forward passes.`;
  const few = Math.max(1, Math.floor(losses.length / 4));
  const [first, last] = [losses.slice(0, few), losses.slice(-few)].map((part) => sum(part) / few);
  const end = last < 100 ? `${last.toFixed(2)} at the end` : "diverges";
  byId("trained-text").textContent = `${verdict} The loss is ${first.toFixed(2)} at the start and ${end}.`;
  const errors = perStage.map((error, stage) => [`stage ${stage}`, error]);
  const rows = [["all stages", whole], ...errors, ["all stages, newest weights", newest]];
  const most = Math.max(...rows.map(([, error]) => Math.min(error, LARGEST_ERROR)), 1e-9);
  for (const [name, error] of rows) {
    const meter = el("meter", { max: most, low: 0, high: 0, optimum: 0, value: Math.min(error, most) });
    byId("trained-table").append(el("div", { className: "bar" }, name, meter, errorText(error)));
  }
}
