// The schedules (schedules/orders.py, building_blocks.py and catalogue.py, which name the papers): how
// ranks p and microbatches m make an order per rank, what each does, and how long a rank idles.
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
    return buildOp(kind, stage, microbatch);
  };
  return steps.map((step) => (Array.isArray(step[0]) ? step.map(next) : [next(step)]));
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
    return numbered(steps).filter(([op]) => op.microbatch < m);
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

// A line is a rank's kinds by slot: F, I and W of the stage on the way down the V (Fd, Id, Wd) and of
// the one on the way up. One microbatch's are again every 6 slots; two passes then pull operations
// forward at both ends, as schedules/building_blocks.py explains; W has no slots of its own in the
// second.
function repeatedBlock(p, m, block) {
  const repeated = range(p).map((r) => {
    const line = [];
    const [Fd, Fu, Iu, Id] = block(r);
    for (const [kind, slot] of Object.entries({ Fd, Fu, Iu, Id })) {
      for (let i = 0; i < m; i++) line[slot + 6 * i] = kind;
    }
    return line;
  });
  const withW = repeated.map((line) => withWeights(line).map((kind) => (kind?.[0] === "W" ? "W" : kind)));
  pullForward(withW, true);
  const lines = squeezed(withW).map((line) => Array.from(line, (kind) => (kind === "W" ? null : kind)));
  pullForward(lines, false);
  const orders = lines.map((line, r) => {
    const stage = { d: r, u: 2 * p - 1 - r };
    return numbered(withWeights(line).filter(Boolean).map(([kind, way]) => [kind, stage[way]]));
  });
  return new Schedule(orders, 2 * p);
}

// The line with a W for each I in a later free slot, those on the way up first.
function withWeights(line) {
  const full = [];
  const waiting = { u: 0, d: 0 };
  while (full.length < line.length || waiting.u || waiting.d) {
    let kind = line[full.length];
    if (!kind && (waiting.u || waiting.d)) {
      const way = waiting.u ? "u" : "d";
      waiting[way] -= 1;
      kind = `W${way}`;
    } else if (kind?.[0] === "I") {
      waiting[kind[1]] += 1;
    }
    full.push(kind);
  }
  return full;
}

// Move operations to earlier free slots, where data and memory allow, in the order of time; those of
// the full pipeline stay, and where W has no slots those before, too.
function pullForward(lines, hasWeights) {
  const limit = Math.max(...lines.map((line) => mostHeld(line, hasWeights)));
  const m = lines[0].filter((kind) => kind === "Fd").length;
  let [filling, draining] = [true, false];
  placeByTime(lines, ({ slot, rank, kind, i, earliest }) => {
    if (filling && rank === 0 && kind === "Id") filling = false;
    if (!filling && !draining) {
      draining = kind === "Fd" && i === m - 1;
      return slot;
    }
    const line = lines[rank];
    const last = draining || hasWeights ? slot : earliest;
    for (let free = earliest; free < last; free++) {
      if (line[free]) continue;
      [line[free], line[slot]] = [kind, null];
      if (mostHeld(line, hasWeights) <= limit) return free;
      [line[free], line[slot]] = [null, kind];
    }
    return slot;
  });
}

// Most stages' activations that a rank holds. Where W has no slots of its own, it runs in free ones.
function mostHeld(line, hasWeights) {
  let [held, waiting, most] = [0, 0, 0];
  for (const kind of line) {
    if (kind?.[0] === "F") held += 1;
    else if (kind === "W") held -= 1;
    else if (kind) waiting += 1;
    else if (waiting && !hasWeights) [held, waiting] = [held - 1, waiting - 1];
    most = Math.max(most, held);
  }
  return most;
}

// The same orders, every operation as soon as its rank and its data are ready.
function squeezed(lines) {
  const found = lines.map(() => []);
  placeByTime(lines, ({ rank, kind, earliest }) => {
    const slot = Math.max(earliest, found[rank].length);
    found[rank][slot] = kind;
    return slot;
  });
  return found;
}

// By kind: the rank before it on the way of the data, and what its own rank has done before.
const SOURCES = { Fd: [-1], Fu: [1, "Fd"], Iu: [-1, "Fu"], Id: [1, "Iu"] };

// Calls `place` for each operation in the order of time, and takes the slot that it returns for the
// operation's. `earliest`: after its data and the microbatch before it.
function placeByTime(lines, place) {
  const before = lines.map((line) => [...line]);
  const done = lines.map(() => ({ Fd: [], Fu: [], Iu: [], Id: [], W: [] }));
  for (const slot of range(Math.max(...before.map((line) => line.length)))) {
    for (const [rank, line] of before.entries()) {
      const kind = line[slot];
      if (!kind) continue;
      const own = done[rank];
      const i = own[kind].length;
      const needed = [own[kind].at(-1)];
      if (kind === "W") {
        needed.push([...own.Iu, ...own.Id].sort((a, b) => a - b)[i]);
      } else {
        const [way, source] = SOURCES[kind];
        needed.push(done[rank + way]?.[kind][i], own[source]?.[i]);
      }
      const earliest = 1 + Math.max(-1, ...needed.filter((one) => one !== undefined));
      own[kind].push(place({ slot, rank, kind, i, earliest }));
    }
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
  const orders = range(p).map((r) => {
    const unfolded = ({ kind, stage, microbatch }) =>
      stage === r ? buildOp(kind, r, microbatch) : buildOp(kind, p + stage, m / 2 + microbatch);
    return dualpipeLine(Math.min(r, p - 1 - r), p / 2, m / 2).map((item) => item.map(unfolded));
  });
  return new Schedule(orders, p, 2);
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
      slots[rank][begin + s] = [buildOp("F", stage, microbatch)];
      slots[rank][begin + 2 * p - 1 - s] = [buildOp("B", stage, microbatch)];
    }
  }
  return new Schedule(slots.map((line) => line.filter(Boolean)), p, 2);
}

const oneFOneB = (p, m) => alternating(p, m, (s) => p - s);

// `policy`: flush, if not given. `idle`: of a rank up to the end, for even stages and c = 0 without
// overlap, where `when` holds; in p, m, v, F, I, W and B = I + W.
const SCHEDULES = {
  naive: {
    build: (p, m) => alternating(p, m, () => 1),
    title: "Naive", idle: "(p - 1) * m * (F + B)",
    says: "One microbatch goes through all ranks and back before the next one starts.",
  },
  gpipe: {
    build: (p, m) => alternating(p, m, () => m),
    title: "GPipe", idle: "(p - 1) * (F + B)",
    says: "All forward passes, then all backward passes: a rank holds all m microbatches.",
  },
  "1f1b": {
    build: oneFOneB, title: "1F1B with flush", idle: "(p - 1) * (F + B)",
    says: "Each backward pass as early as it can run: rank r holds only p-r microbatches.",
  },
  "eager-1f1b": {
    build: (p, m) => alternating(p, m, (s) => 2 * (p - s) - 1),
    title: "Eager 1F1B", idle: "(p - 1) * (F + B)",
    says: "1F1B with more forward passes ahead, so that messages arrive before they are needed.",
  },
  pipedream: {
    build: oneFOneB, policy: "stash", title: "PipeDream", idle: "(p - 1) * (F + B)",
    says: "1F1B without a flush: an update after each backward pass, and old weights are kept for it.",
  },
  "pipedream-vertical": {
    build: oneFOneB, policy: "vertical", title: "PipeDream, vertical sync",
    idle: "(p - 1) * (F + B)",
    says: "PipeDream, and a microbatch uses the same version of the weights on every stage.",
  },
  "pipedream-no-stash": {
    build: oneFOneB, policy: "in-place", title: "PipeDream, no stashing",
    idle: "(p - 1) * (F + B)",
    says: "PipeDream that keeps no old weights: backward passes see newer ones, and gradients are wrong.",
  },
  "pipedream-2bw": {
    build: oneFOneB, policy: "2bw", title: "PipeDream-2BW", idle: "(p - 1) * (F + B)",
    says: "Without a flush, one update a batch, one batch behind: two versions of the weights do.",
  },
  interleaved: {
    build: interleaved, title: "Interleaved 1F1B",
    idle: "(p - 1) * (F + B) / v", when: "m >= p",
    says: "Each rank has v shorter stages, so that the pipeline fills v times as fast; more messages.",
  },
  "zb-h1": {
    build: (p, m) => alternating(p, m, (s) => p - s, (s) => s),
    title: "ZB-H1",
    idle: "(p - 1) * (F + I - min(F, I, W))", when: "m >= p",
    says: "The backward pass cut in two: W waits until its rank would idle, in 1F1B's memory.",
  },
  "zb-h2": {
    build: (p, m) => alternating(p, m, (s) => 2 * (p - s) - 1, (s) => 2 * s),
    title: "ZB-H2",
    idle: "(p - 1) * max(F, F + I - 2 * min(F, W))", when: "m >= 2 * p - 1",
    says: "More forward passes ahead: no rank pauses between its first and last operation, in twice the memory.",
  },
  "zb-v": {
    build: zbV, title: "ZB-V",
    idle: "(p - 1) * max(I - W, I / 2)", when: "m >= 2 * p - 1 && I >= F && I >= W",
    says: "Two stages a rank, down the ranks and up again: ZB-H2's density in 1F1B's memory.",
  },
  "v-half": {
    build: vHalf, title: "V-Half",
    idle: "(3 * ceil(p / 2) - 3.5) * F", when: "F === I && I === W && m >= p + 2 && p >= 3",
    says: "ZB-V's two stages a rank, spaced so that a microbatch is gone sooner: half of 1F1B's memory.",
  },
  "v-min": {
    build: vMin, title: "V-Min",
    idle: "(4 * p - 5) * F / 2",
    when: "F === I && I === W && m >= p + 1 && p >= 2 && p % 3 > 0",
    says: "As tight as two stages a rank allow: a third of 1F1B's memory, and pauses in between.",
  },
  "dualpipe-v": {
    build: dualpipeV, title: "DualPipeV",
    idle: "(p - 1) * (2 * F + I - min(I, W)) / 2", when: "F >= I",
    says: "Two stages a rank; a forward and a backward pass run as one pair, to hide messages.",
  },
  dualpipe: {
    build: dualpipe, title: "DualPipe",
    idle: "(p / 2 - 1) * (2 * F + I - min(I, W))", when: "F >= I",
    says: "Two copies of the model, filled from both ends of the pipeline; passes run in pairs.",
  },
  chimera: {
    build: chimera, title: "Chimera",
    idle: "(p - 2) * (max(F, B) + (m / p - 1) * abs(F - B))",
    says: "Two copies of the model in opposite directions: each fills the other one's pauses.",
  },
};
const OWN = {
  search: {
    title: "Search within the memory limit",
    says: "Moves single operations and keeps what is not longer, within the memory limit.",
  },
  csv: { title: "From a file", says: "The orders of the file, timed by the same rules." },
};

function entryOf(name) {
  return SCHEDULES[name] ?? OWN[name];
}

function policyOf(name) {
  return POLICIES[entryOf(name).policy ?? "flush"];
}

// What an expression of `idle` or `when` comes to for these choices.
function evaluate(expression, { p, m, v, F, I, W }) {
  const [f, i, w] = [F, I, W].map((value) => Fraction.parse(value).toNumber());
  const formula = new Function(
    "p", "m", "v", "F", "I", "W", "B", "min", "max", "abs", "ceil", `return ${expression};`,
  );
  return formula(p, m, v, f, i, w, i + w, Math.min, Math.max, Math.abs, Math.ceil);
}

// A sentence on a schedule, and its idle time as a formula, with its value where it holds.
function aboutOf(name, chosen) {
  const { says, idle, when = "" } = entryOf(name);
  if (name === "search") return `${says} ${searchText(searchedFor(chosen))}`;
  if (!idle) return says;
  const { flushes } = policyOf(name);
  const even = !chosen.scale.length && [chosen.c, chosen.saving].every((value) => Number(value) === 0);
  const own = !chosen.cut && !chosen.recompute && !chosen.moves.length && chosen.n === 1 && flushes;
  const value = even && own && evaluate(when || "true", chosen) ? shortNumber(evaluate(idle, chosen)) : "";
  const ranges = when.split(" && ").map((range) => range.replace("===", "=").replace(" * ", " "));
  const where = ["even stages", "c = 0", ...ranges.filter(Boolean)].join(", ");
  const text = `${says} A rank idles ${idle.replaceAll(" * ", " ")}`;
  return value ? `${text} = ${value}.` : `${text} ${flushes ? "a batch" : "once"} (${where}).`;
}

function searchText({ length, bound, tried, unit }) {
  const [found, least] = [length, bound].map((ticks) => shortNumber(ticks * unit));
  return `${found} after ${tried} tries; ${length === bound ? "shortest possible" : `no order takes less than ${least}`}.`;
}
