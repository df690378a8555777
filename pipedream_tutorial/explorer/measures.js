// Compute a timeline's costs: idle time, activations and the critical path (simulate/measures.py).
// Also compute the weight versions that a policy keeps and that microbatches use
// (schedules/policies.py).
"use strict";

// Return the numbers in the tutorial's tables for one timeline. Idle time is by rank: until the
// last rank ends, and within the rank's own span. Versions and staleness are the highest of any
// stage.
function summary(timeline, use) {
  const { lines, last, tick, schedule } = timeline;
  const busy = lines.map((line) => sum(line.map(({ start, end }) => end - start)));
  const idle = (whole) => ({
    ranks: whole.map((ticks, r) => (ticks - busy[r]) * tick),
    share: 1 - sum(busy) / (sum(whole) || 1),
  });
  const uses = [...use.values()];
  const versionOf = (kind, { stage, microbatch }) => use.get(keyOf(kind, stage, microbatch)).version;
  const backwards = schedule.ops.filter(({ kind }) => kind === "B" || kind === "I");
  return {
    makespan: last * tick,
    idle: idle(lines.map(() => last)),
    span: idle(lines.map((line) => (line.length ? line.at(-1).end - line[0].start : last))),
    peakActivations: peakActivations(timeline),
    peakVersions: Math.max(...uses.map((own) => own.kept)),
    staleness: Math.max(...uses.map((own) => own.behind ?? 0)),
    mixed: backwards.some((op) => versionOf(op.kind, op) !== versionOf("F", op)),
  };
}

// Return [time in ticks, value from then on] by rank, at each change of the value. `firstOf` gives
// a rank's first value, and `pointsOf` gives the changes [time, value] that its cells cause. If
// several changes have the same time, the last one counts.
function stepsByRank({ lines }, firstOf, pointsOf) {
  return lines.map((line, rank) => {
    const steps = [...new Map([[0, firstOf(rank)], ...line.flatMap(pointsOf)])];
    return steps.filter(([, value], k) => value !== steps[k - 1]?.[1]);
  });
}

// Return the activations that each rank holds over time, in microbatches on all of its layers. A
// forward pass adds activations when it starts. They are freed when the backward pass ends or, if
// it is split, when W ends.
function heldActivations(timeline) {
  const { stagesPerRank, orders } = timeline.schedule;
  const held = orders.map(() => 0);
  const share = (item, wanted) => item.filter(wanted).length / stagesPerRank;
  return stepsByRank(timeline, () => 0, ({ item, start, end, rank }) => {
    const during = held[rank] + share(item, ({ kind }) => kind === "F");
    held[rank] = during - share(item, isUpdate);
    return [[start, during], [end, held[rank]]];
  });
}

// Return the largest number of microbatches that each rank holds.
function peakActivations(timeline) {
  const rounded = (value) => Math.round(value * 1e9) / 1e9;
  return heldActivations(timeline).map((line) => rounded(Math.max(...line.map(([, held]) => held))));
}

// Return the number of weight versions that each rank keeps, in copies of all of its layers.
function liveVersions(timeline, use) {
  const { orders, stagesPerRank } = timeline.schedule;
  const kept = orders.map((order) => new Map(order.flat().map((op) => [op.stage, 1])));
  const onRank = (rank) => sum([...kept[rank].values()]) / stagesPerRank;
  return stepsByRank(timeline, onRank, ({ item, end, rank }) => {
    for (const op of item) kept[rank].set(op.stage, use.get(op.text).kept);
    return [[end, onRank(rank)]];
  });
}

// Return the number of updates by which the newest microbatch's weights were behind.
function stalenessSteps(timeline, use) {
  const behind = ({ item, end }) => item.filter(isUpdate).map((op) => [end, use.get(op.text).behind]);
  return stepsByRank(timeline, () => 0, behind);
}

// Return the cells that determine the makespan, from first to last.
function criticalPath({ lines, cells, last }) {
  const path = [lines.flat().find(({ end }) => end === last)];
  while (path[0].bound) path.unshift(cells.get(path[0].bound));
  return path;
}

// Map each cell to the number of ticks by which it could end later without delaying the end.
function slackOf({ schedule, lines, cells, c, last }) {
  const latest = new Map([...cells.values()].map((cell) => [cell, last]));
  const lower = (cell, time) => latest.set(cell, Math.min(latest.get(cell), time));
  for (const cell of [...latest.keys()].reverse()) {
    const start = latest.get(cell) - (cell.end - cell.start);
    if (cell.index) lower(lines[cell.rank][cell.index - 1], start);
    for (const need of schedule.needs(cell.item)) {
      const from = cells.get(need);
      lower(from, from.rank === cell.rank ? start : start - c);
    }
  }
  return new Map([...latest].map(([cell, time]) => [cell, time - cell.end]));
}

// Return whether an operation ends a microbatch's work on its stage.
function isUpdate({ kind }) {
  return kind === "B" || kind === "W";
}

// `flushes`: consecutive batches repeat one order. `perMicrobatch`: update after each
// backward pass, otherwise once per batch. `stashed`: a backward pass uses its forward pass's
// weights. `versionOf`: the version that microbatch i uses, by default the newest.
const POLICIES = {
  flush: { flushes: true, stashed: true },
  stash: { perMicrobatch: true, stashed: true },
  vertical: { perMicrobatch: true, stashed: true, versionOf: (i, m, p) => Math.max(0, i - (p - 1)) },
  "in-place": { perMicrobatch: true },
  "2bw": { stashed: true, versionOf: (i, m) => Math.max(0, Math.floor(i / m) - 1) },
};

// Map each operation to {its version, kept: versions that its stage keeps after it, behind: updates
// at its own update that its weights do not include}. The result depends only on the orders, not on
// times.
function weightUse({ ops, numStages }, policy, batchSize) {
  const own = range(numStages).map(() => []);
  for (const op of ops) own[op.stage].push(op);
  return new Map(own.flatMap((line) => stageUse(line, policy, batchSize, numStages)));
}

function stageUse(ops, policy, m, p) {
  const batchOf = (i) => Math.floor(i / m);
  const upcoming = ops.filter((op) => op.kind === "F").map((op) => op.microbatch);
  const left = new Set(upcoming); // microbatches that have not started
  const inUse = new Map(); // microbatch in flight -> its version
  let updates = 0;
  const versionOf = (i) => policy.versionOf?.(i, m, p) ?? updates;
  return ops.map((op) => {
    const { kind, microbatch: i, text } = op;
    const own = {};
    if (kind === "F") {
      own.version = versionOf(i);
      if (own.version > updates) {
        const what = `microbatch ${i} would run with version ${own.version}, which does not exist yet`;
        throw new RuleError(`${what}; use ${p - 1} microbatches per batch or more`);
      }
      inUse.set(i, own.version);
      upcoming.shift();
    } else if (kind !== "W") {
      own.version = policy.stashed ? inUse.get(i) : updates;
    }
    if (isUpdate(op)) {
      own.behind = (policy.perMicrobatch ? i : batchOf(i)) - inUse.get(i);
      inUse.delete(i);
      left.delete(i);
      if (policy.perMicrobatch || ![...left].some((other) => batchOf(other) === batchOf(i))) updates += 1;
    }
    const kept = new Set([updates]);
    if (policy.stashed) { // versions in use, and all since the oldest that will be read
      for (const version of inUse.values()) kept.add(version);
      const oldest = upcoming.length ? versionOf(upcoming[0]) : updates;
      for (let version = oldest; version < updates; version++) kept.add(version);
    }
    return [text, { ...own, kept: kept.size }];
  });
}
