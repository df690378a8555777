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

// stage -> {forward, backward, staleness: microbatch -> number; live: operation -> versions kept
// after it}. From the orders alone: timing cannot change what an order fixes.
function weightUse({ ops, numStages, copies }, policy, batchSize) {
  const own = new Map(range(numStages * copies).map((stage) => [stage, []]));
  for (const op of ops) own.get(op.stage).push(op);
  return new Map([...own].map(([stage, line]) => [stage, stageUse(line, policy, batchSize, numStages)]));
}

function stageUse(ops, policy, m, p) {
  const [forward, backward, staleness, live] = range(4).map(() => new Map());
  const upcoming = ops.filter((op) => op.kind === "F").map((op) => op.microbatch);
  const batchOf = (i) => Math.floor(i / m);
  const inUse = []; // the version of each microbatch that is under way
  let updates = 0;
  for (const { kind, microbatch: i, text } of ops) {
    if (kind === "F") {
      const version = policy.forwardVersion(updates, i, m, p);
      if (version > updates) {
        const what = `microbatch ${i} would run with version ${version} before there is one`;
        throw new RuleError(`${what}; take ${p - 1} microbatches a batch or more`);
      }
      forward.set(i, version);
      inUse.push(version);
    } else if (kind === "B" || kind === "I") {
      backward.set(i, policy.stashed ? forward.get(i) : updates);
    }
    if (kind === "B" || kind === "W") {
      inUse.splice(inUse.indexOf(forward.get(i)), 1);
      staleness.set(i, (policy.perMicrobatch ? i : batchOf(i)) - forward.get(i));
      const left = upcoming.some((other) => batchOf(other) === batchOf(i) && !staleness.has(other));
      if (policy.perMicrobatch || !left) updates += 1;
    }
    live.set(text, keptVersions(policy, inUse, updates, upcoming[forward.size], m, p));
  }
  return { forward, backward, staleness, live };
}

// The newest version, those in use, and all between them and the oldest still to be read.
function keptVersions(policy, inUse, updates, next, m, p) {
  if (!policy.stashed) return 1;
  const oldest = next === undefined ? updates : policy.forwardVersion(updates, next, m, p);
  const kept = new Set([...inUse, updates]);
  for (let version = oldest; version < updates; version++) kept.add(version);
  return kept.size;
}
