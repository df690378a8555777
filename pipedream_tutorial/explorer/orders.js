// The schedules: functions from (ranks p, microbatches m) to an order per rank.
// The same rules as schedules/orders.py and building_blocks.py, which name the papers.
//
// A rank's order is written as steps: [kind, stage], or two of them for a pair.
"use strict";

// Microbatches are numbered by stage and kind; a whole backward pass counts as its halves.
function numbered(steps) {
  const counts = {};
  const next = ([kind, stage]) => {
    const counted = [...(kind === "B" ? "IW" : kind)].map((one) => one + stage);
    const microbatch = counts[counted[0]] ?? 0;
    for (const key of counted) counts[key] = microbatch + 1;
    return new Op(kind, stage, microbatch);
  };
  return steps.map((step) => (Array.isArray(step[0]) ? new Pair(...step.map(next)) : next(step)));
}

function times(count, ...steps) {
  return range(Math.max(0, count)).flatMap(() => steps);
}

// From words by rank, a letter an operation.
function asSchedule(words) {
  return new Schedule(words.map((word, rank) => numbered([...word].map((kind) => [kind, rank]))));
}

// `ahead` forwards, then a backward for each forward. With a `delay` backward passes are cut, and a
// W follows each I once `delay` of them are behind.
function alternatingWord(m, ahead, delay) {
  const [warmup, late] = [Math.min(m, ahead), Math.min(m, delay ?? 0)];
  const halves = (i) => (i < late ? "I" : "IW");
  const steady = range(m).map((i) => (delay === undefined ? "B" : halves(i)) + (warmup + i < m ? "F" : ""));
  return "F".repeat(warmup) + steady.join("") + "W".repeat(late);
}

function alternating(p, m, ahead, delay) {
  return asSchedule(range(p).map((s) => alternatingWord(m, ahead(s), delay?.(s))));
}

// Forwards, 2 more for each rank behind; then pairs of forward and backward; the rest.
function interleaved(p, m, v) {
  const rounds = Math.max(1, Math.floor(m / p));
  if (m % rounds) {
    throw new RuleError(
      `${m} microbatches cannot be cut into ${rounds} equal rounds over ${p} ranks; ` +
        `take a multiple of ${p}, such as ${rounds * p} or ${(rounds + 1) * p}`,
    );
  }
  const perRound = m / rounds;
  const total = m * v;
  const chunk = (step) => Math.floor(step / perRound) % v;
  const write = (r) => {
    const steps = [];
    const warmup = Math.min(total, (v - 1) * perRound + 2 * (p - 1 - r));
    for (let step = 0; step < total + warmup; step++) {
      if (step < total) steps.push(["F", chunk(step) * p + r]);
      if (step >= warmup) steps.push(["B", (v - 1 - chunk(step - warmup)) * p + r]);
    }
    return numbered(steps);
  };
  return new Schedule(range(p).map(write), p * v);
}

// Written for 2p - 1 microbatches or more; with fewer, those that are not there are left out.
function zbV(p, m) {
  const write = (r) => {
    const [down, up, count] = [r, 2 * p - 1 - r, Math.max(m, 2 * p - 1)];
    const upwards = [["F", up], ["I", up], ["W", up]];
    const steady = range(count - p).flatMap((n) => [
      ...times(n < count - (2 * p - 1 - r) ? 1 : 0, ["F", down]), ["I", down], ["W", down], ...upwards,
    ]);
    const steps = [
      ...times(2 * (p - r) - 1, ["F", down]), ...times(r, ["F", up], ["F", down]),
      ...times(p - r, ...upwards), ...steady, ...times(r, ["I", down], ["I", up]),
      ...times(p - r, ["I", down], ["W", down]), ...times(r, ["W", up]), ...times(r, ["W", down]),
    ];
    return numbered(steps).filter((op) => op.microbatch < m);
  };
  return new Schedule(range(p).map(write), 2 * p);
}

// One slot between neighbours; the pause keeps two operations of a rank out of the same slot.
function vMin(p, m) {
  const pause = p % 3 ? 0 : 2;
  const block = (r) => [r, 2 * p - 1 - r, 2 * p + pause + r, 4 * p + pause - 1 - r];
  return repeatedBlock(p, m, block);
}

// Two slots between neighbours wherever the way leads down the V.
function vHalf(p, m) {
  const pause = p % 2 ? 0 : 3;
  const block = (r) => [2 * r, 3 * p - 2 - r, 3 * p + pause - 1 + 2 * r, 6 * p + pause - 2 - r];
  return repeatedBlock(p, m, block);
}

const [F_DOWN, F_UP, I_UP, I_DOWN, LATE_W] = [0, 1, 2, 3, 4];

// One microbatch's slots (F down, F up, I up, I down), again every 6 slots; two passes then pull
// operations forward at both ends, as schedules/building_blocks.py explains.
function repeatedBlock(p, m, block) {
  const slots = range(p).map((r) => block(r).map((slot) => range(m).map((i) => slot + 6 * i)));
  for (const own of slots) own.push(weightSlots(own).map(([slot]) => slot));
  pullForward(slots);
  squeezeSlots(slots);
  for (const own of slots) own.pop();
  pullForward(slots);
  const write = (r) => {
    const [down, up] = [r, 2 * p - 1 - r];
    const steps = [["F", down], ["F", up], ["I", up], ["I", down]];
    const placed = slots[r].flatMap((own, kind) => own.map((slot) => [slot, steps[kind]]));
    for (const [slot, kind] of weightSlots(slots[r])) placed.push([slot, ["W", steps[kind][1]]]);
    return numbered(placed.sort((a, b) => a[0] - b[0]).map(([, step]) => step));
  };
  return new Schedule(range(p).map(write), 2 * p);
}

// [slot, the I that it belongs to] of each W: in the free slots, those of I_UP first.
function weightSlots(own) {
  const taken = new Map(own.flatMap((line, kind) => line.map((slot) => [slot, kind])));
  const [found, waiting] = [[], { [I_UP]: 0, [I_DOWN]: 0 }];
  for (let slot = 0, left = taken.size; left || waiting[I_UP] || waiting[I_DOWN]; slot++) {
    const kind = taken.get(slot);
    if (kind !== undefined) {
      left--;
      if (kind in waiting) waiting[kind]++;
    } else if (waiting[I_UP] || waiting[I_DOWN]) {
      const first = waiting[I_UP] ? I_UP : I_DOWN;
      waiting[first]--;
      found.push([slot, first]);
    }
  }
  return found;
}

// Move operations to earlier free slots, where data and memory allow, in the order of time; those of
// the full pipeline stay, and where W has no slots those before, too.
function pullForward(slots) {
  const withWeights = slots[0].length > LATE_W;
  const lines = slots.map((own) => {
    const kinds = Array(1 + Math.max(...own.map((line) => line.at(-1)))).fill(null);
    own.forEach((line, kind) => line.forEach((slot) => (kinds[slot] = kind)));
    return kinds;
  });
  const limit = Math.max(...lines.map((kinds) => mostHeld(kinds, withWeights)));
  const last = slots[0][F_DOWN].length - 1;
  let [filling, draining] = [true, false];
  for (const [slot, rank, kind, i] of slotsByTime(slots)) {
    if (filling && rank === 0 && kind === I_DOWN) filling = false;
    if (!filling && !draining) draining = kind === F_DOWN && i === last;
    else if (draining || withWeights) {
      const kinds = lines[rank];
      const first = 1 + Math.max(-1, ...slotsBefore(slots, rank, kind, i));
      const sooner = range(slot).slice(first).find((free) => {
        if (kinds[free] !== null) return false;
        [kinds[free], kinds[slot]] = [kind, null];
        if (mostHeld(kinds, withWeights) <= limit) return true;
        [kinds[free], kinds[slot]] = [null, kind];
        return false;
      });
      slots[rank][kind][i] = sooner ?? slot;
    }
  }
}

// Most stages' activations that a rank holds. Where W has no slots of its own, it runs in free ones.
function mostHeld(kinds, withWeights) {
  let [held, waiting, most] = [0, 0, 0];
  for (const kind of kinds) {
    if (kind === F_DOWN || kind === F_UP) held += 1;
    else if (kind === LATE_W) held -= 1;
    else if (kind !== null) waiting += 1;
    else if (waiting && !withWeights) [held, waiting] = [held - 1, waiting - 1];
    most = Math.max(most, held);
  }
  return most;
}

// [slot, rank, kind, microbatch] of all operations, sorted.
function slotsByTime(slots) {
  const found = slots.flatMap((own, rank) =>
    own.flatMap((line, kind) => line.map((slot, i) => [slot, rank, kind, i])),
  );
  return found.sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2] || a[3] - b[3]);
}

// The slots of what has to be done before: the data's source, and the microbatch before.
function slotsBefore(slots, rank, kind, i) {
  const own = slots[rank];
  const found = i ? [own[kind][i - 1]] : [];
  if (kind === LATE_W) return [...found, [...own[I_UP], ...own[I_DOWN]].sort((a, b) => a - b)[i]];
  const neighbour = slots[kind === F_DOWN || kind === I_UP ? rank - 1 : rank + 1];
  if (neighbour) found.push(neighbour[kind][i]);
  if (kind > F_DOWN) found.push(own[kind - 1][i]);
  return found;
}

// The same orders, every operation as soon as its rank and its data are ready.
function squeezeSlots(slots) {
  const free = slots.map(() => 0);
  for (const [, rank, kind, i] of slotsByTime(slots)) {
    // The I of a W is earlier on its rank.
    const needs = kind === LATE_W ? [] : slotsBefore(slots, rank, kind, i);
    const begin = Math.max(free[rank], 1 + Math.max(-1, ...needs));
    slots[rank][kind][i] = begin;
    free[rank] = begin + 1;
  }
}

function dualpipeV(p, m) {
  if (m < 2 * p) {
    throw new RuleError(
      `dualpipe-v needs at least 2 microbatches a rank, not ${m} for ${p} ranks; ` +
        `set num_microbatches to ${2 * p} or more`,
    );
  }
  return new Schedule(range(p).map((r) => dualpipeLine(r, p, m)), 2 * p);
}

// DualPipe's eight phases on the two stages of rank r.
function dualpipeLine(r, p, m) {
  const [down, up, behind, pending] = [r, 2 * p - 1 - r, p - 1 - r, []];
  const steps = [...times(2 * behind, ["F", down]), ...times(r + 1, ["F", down], ["F", up])];
  const cutBackward = (stage) => {
    steps.push(["I", stage]);
    pending.push(["W", stage]);
  };
  const lateWeight = () => steps.push(...pending.splice(0, 1));
  for (let n = 0; n < behind; n++) {
    cutBackward(up);
    lateWeight();
    steps.push(["F", up]);
  }
  for (let step = 0; step < m - 2 * p + r + 1; step++) {
    // The last rank's first backward has to wait anyway: overlap would only delay.
    if (step === 0 && !behind) steps.push(["F", down], ["B", up]);
    else steps.push([["F", down], ["B", up]]);
    steps.push([["F", up], ["B", down]]);
  }
  steps.push(...times(behind, ["B", up], [["F", up], ["B", down]]));
  // 2 (r + 1) backwards, alternating; from the middle on their W is put off.
  const middle = r % 2 ? r + 1 : Math.floor((r + 1) / 2) * 2 + 1;
  for (let step = 0; step < 2 * (r + 1); step++) {
    const stage = step % 2 ? down : up;
    if (step >= middle) cutBackward(stage);
    else steps.push(["B", stage]);
  }
  for (let n = 0; n < behind; n++) {
    lateWeight();
    if (2 * (r + 1) > middle) cutBackward(down);
    else steps.push(["B", down]);
  }
  return numbered([...steps, ...pending.slice(0, r + 1)]);
}

// DualPipeV on half as many ranks, unfolded: place r of the model is the first copy's on rank r, the
// other place the second copy's.
function dualpipe(p, m) {
  if (p % 2 || m % 2 || m < 2 * p) {
    throw new RuleError(
      `dualpipe needs an even number of ranks, and an even number of microbatches, 2 a rank or ` +
        `more, not p=${p}, m=${m}; ` +
        `take p=${p + (p % 2)} and m=${Math.max(2 * (p + (p % 2)), m + (m % 2))}`,
    );
  }
  const write = (r) => {
    const moved = ({ kind, stage, microbatch }) =>
      stage === r ? new Op(kind, r, microbatch) : new Op(kind, p + stage, m / 2 + microbatch);
    return dualpipeLine(Math.min(r, p - 1 - r), p / 2, m / 2).map((item) => changedItem(item, moved));
  };
  return new Schedule(range(p).map(write), p, 2);
}

// Units of p microbatches; in a unit each direction is a 1F1B of p / 2 microbatches. When every
// operation takes one slot, no rank gets a slot twice (schedules/orders.py says why).
function chimera(p, m) {
  if (p % 2 || m % p) {
    throw new RuleError(
      `chimera needs an even number of ranks and whole units of p microbatches, not p=${p}, ` +
        `m=${m}; take p=${p + (p % 2)} and a multiple of it`,
    );
  }
  const slots = range(p).map(() => []);
  for (let microbatch = 0; microbatch < m; microbatch++) {
    const place = microbatch % p;
    const upwards = place >= p / 2;
    const begin = Math.floor(microbatch / p) * 2 * p + 2 * (place % (p / 2));
    for (let s = 0; s < p; s++) {
      const [rank, stage] = upwards ? [p - 1 - s, p + s] : [s, s];
      slots[rank].push([begin + s, new Op("F", stage, microbatch)]);
      slots[rank].push([begin + 2 * p - 1 - s, new Op("B", stage, microbatch)]);
    }
  }
  const orders = slots.map((line) => line.sort((a, b) => a[0] - b[0]).map(([, op]) => op));
  return new Schedule(orders, p, 2);
}
