// What a timeline costs: idle time, activations, the critical path (simulate/measures.py); and the
// versions of the weights that a policy keeps and a microbatch runs with (schedules/policies.py).
"use strict";

// The numbers of the tutorial's tables for one timeline. Idle time by rank: until the last rank
// ends, and within the rank's own span.
function summary(timeline, use) {
  const { starts, ends, last, tick, schedule } = timeline;
  const busy = ends.map((line, r) => sum(line.map((end, k) => end - starts[r][k])));
  const spans = ends.map((line, r) => (line.length ? line.at(-1) - starts[r][0] : last));
  const idle = (whole) => ({
    ranks: whole.map((ticks, r) => (ticks - busy[r]) * tick),
    share: 1 - sum(busy) / (sum(whole) || 1),
  });
  const uses = [...use.values()];
  return {
    makespan: last * tick,
    idle: idle(busy.map(() => last)),
    span: idle(spans),
    peakActivations: peakActivations(timeline),
    peakVersions: uses.map(({ live }) => Math.max(...live.values())),
    staleness: uses.map(({ staleness }) => Math.max(...staleness.values())),
    mixed: uses.some((own) => [...own.backward].some(([i, version]) => own.forward.get(i) !== version)),
  };
}

// By rank: [time in ticks, value from then on], where the value changes: what `firstOf` says of
// the rank, and what `pointsOf` says of its items, [time, value]. Of several points at one time the last counts.
function stepsByRank({ schedule, starts, ends }, firstOf, pointsOf) {
  return schedule.orders.map((order, rank) => {
    const points = order.flatMap((item, k) => pointsOf(item, starts[rank][k], ends[rank][k], rank));
    const steps = [...new Map([[0, firstOf(rank)], ...points])];
    return steps.filter(([, value], k) => value !== steps[k - 1]?.[1]);
  });
}

// Microbatches of its whole share whose activations a rank holds. A forward pass adds them when it
// starts; they go when the backward pass ends, or W where that is cut in two. Where there is an R,
// only `kept` stays when the forward pass ends; R adds the rest.
function heldActivations(timeline) {
  const { kept, stagesPerRank, places, orders } = timeline.schedule;
  const gone = 1 - kept;
  const held = orders.map(() => 0);
  return stepsByRank(timeline, () => 0, (item, start, end, rank) => {
    const again = ({ stage, microbatch }) => places.has(keyOf("R", stage, microbatch));
    const begin = item.map((op) => ({ F: 1, R: gone })[op.kind] ?? 0);
    const after = item.map((op) => ({ F: again(op) ? -gone : 0, B: -1, W: -1 })[op.kind] ?? 0);
    const during = held[rank] + sum(begin) / stagesPerRank;
    held[rank] = during + sum(after) / stagesPerRank;
    return [[start, during], [end, held[rank]]];
  });
}

// Most microbatches that each rank holds.
function peakActivations(timeline) {
  const rounded = (value) => Math.round(value * 1e9) / 1e9;
  return heldActivations(timeline).map((line) => rounded(Math.max(...line.map(([, held]) => held))));
}

// Weight versions of its whole share that a rank keeps.
function liveVersions(timeline, use) {
  const { orders, stagesPerRank } = timeline.schedule;
  const kept = orders.map((order) => new Map(order.flat().map((op) => [op.stage, 1])));
  const onRank = (rank) => sum([...kept[rank].values()]) / stagesPerRank;
  return stepsByRank(timeline, onRank, (item, start, end, rank) => {
    for (const op of item) kept[rank].set(op.stage, use.get(op.stage).live.get(op.text));
    return [[end, onRank(rank)]];
  });
}

// How many updates behind the newest microbatch's weights were.
function stalenessSteps(timeline, use) {
  return stepsByRank(timeline, () => 0, (item, start, end) => {
    const updates = item.filter(({ kind }) => kind === "B" || kind === "W");
    return updates.map((op) => [end, use.get(op.stage).staleness.get(op.microbatch)]);
  });
}

// The items that fix the makespan, first to last, as {rank, index}.
function criticalPath({ schedule, ends, bounds, last }) {
  const rank = ends.findIndex((line) => line.at(-1) === last);
  const path = [{ rank, index: ends[rank].indexOf(last) }];
  while (true) {
    const bound = bounds[path[0].rank][path[0].index];
    if (bound === null) return path;
    path.unshift(schedule.places.get(bound));
  }
}

// By rank and item: how much later, in ticks, it could end without the whole ending later.
function slackOf({ schedule, starts, ends, sequence, c, last }) {
  const latest = ends.map((line) => line.map(() => last));
  const lower = (rank, index, time) => {
    latest[rank][index] = Math.min(latest[rank][index], time);
  };
  for (const [rank, index] of sequence.toReversed()) {
    const start = latest[rank][index] - (ends[rank][index] - starts[rank][index]);
    if (index) lower(rank, index - 1, start);
    for (const need of schedule.needs(schedule.orders[rank][index])) {
      const from = schedule.places.get(need);
      lower(from.rank, from.index, start - (from.rank === rank ? 0 : c));
    }
  }
  return latest.map((line, rank) => line.map((time, index) => time - ends[rank][index]));
}

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
