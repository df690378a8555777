// When a stage's weights change, and with which version a microbatch runs (schedules/policies.py).
"use strict";

const newest = (updates) => updates;

// `flushes`: batches follow each other as repeats of one order. `perMicrobatch`: an update after each
// backward pass, else one a batch. `stashed`: a backward pass uses its forward pass's weights.
const POLICIES = {
  flush: { flushes: true, perMicrobatch: false, forwardVersion: newest, stashed: true },
  stash: { perMicrobatch: true, forwardVersion: newest, stashed: true },
  vertical: {
    perMicrobatch: true, stashed: true,
    forwardVersion: (updates, i, m, p) => Math.max(0, i - (p - 1)),
  },
  "in-place": { perMicrobatch: true, forwardVersion: newest, stashed: false },
  "2bw": {
    perMicrobatch: false, stashed: true,
    forwardVersion: (updates, i, m) => Math.max(0, Math.floor(i / m) - 1),
  },
};

// stage -> {forward, backward, staleness: microbatch -> number; live: versions kept after each op}.
// From the orders alone: timing cannot change what an order fixes.
function weightUse(schedule, policy, batchSize) {
  const own = new Map();
  for (const op of schedule.ops()) {
    if (!own.has(op.stage)) own.set(op.stage, []);
    own.get(op.stage).push(op);
  }
  const numStages = schedule.chains[0].length;
  const used = ([stage, ops]) => [stage, stageUse(ops, policy, batchSize, numStages)];
  return new Map([...own].map(used));
}

function add(counter, key, by) {
  const count = (counter.get(key) ?? 0) + by;
  if (count) counter.set(key, count);
  else counter.delete(key);
}

function stageUse(ops, policy, m, p) {
  const lastBackward = ops.some((op) => op.kind === "W") ? "W" : "B";
  const [forward, backward, staleness] = [new Map(), new Map(), new Map()];
  const [inUse, toDo, live] = [new Map(), new Map(), []];
  const upcoming = ops.filter((op) => op.kind === "F").map((op) => op.microbatch);
  for (const i of upcoming) add(toDo, Math.floor(i / m), 1);
  let updates = 0;
  let begun = 0;
  for (const op of ops) {
    const i = op.microbatch;
    const batch = Math.floor(i / m);
    if (op.kind === "F") {
      const version = policy.forwardVersion(updates, i, m, p);
      if (version > updates) {
        const what = `microbatch ${i} would run with version ${version} before there is one`;
        throw new RuleError(`${what}; take ${p - 1} microbatches a batch or more`);
      }
      forward.set(i, version);
      add(inUse, version, 1);
      begun += 1;
    } else if (op.kind !== "W" && op.kind !== "R") {
      backward.set(i, policy.stashed ? forward.get(i) : updates);
    }
    if ((op.kind === lastBackward || op.kind === "B") && !staleness.has(i)) {
      add(inUse, forward.get(i), -1);
      staleness.set(i, (policy.perMicrobatch ? i : batch) - forward.get(i));
      add(toDo, batch, -1);
      if (policy.perMicrobatch || !toDo.has(batch)) updates += 1;
    }
    live.push({ op, count: kept(policy, inUse, updates, upcoming[begun], m, p) });
  }
  return { forward, backward, staleness, live };
}

// The newest version, those in use, and all between them and the oldest still to be read.
function kept(policy, inUse, updates, next, m, p) {
  if (!policy.stashed) return 1;
  let oldest = updates;
  if (next !== undefined) oldest = Math.min(updates, policy.forwardVersion(updates, next, m, p));
  if (oldest === updates) return inUse.size + (inUse.has(updates) ? 0 : 1);
  const outside = [...inUse.keys()].filter((version) => version < oldest || version > updates);
  return updates - oldest + 1 + outside.length;
}
