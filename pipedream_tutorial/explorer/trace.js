// Measured runs from a Chrome trace that the tutorial wrote (simulate/trace.py).
"use strict";

const FIRST_PID = { predicted: 1000, measured: 2000 };
const NUM_RANKS = 1000;

// {schedule, starts, ends (ms, by rank in the rank's order), durations: mean ms}.
function readTrace(text) {
  let document;
  try {
    document = JSON.parse(text);
  } catch {
    throw new RuleError("this is no JSON; give a file that --trace wrote");
  }
  const slices = (document.traceEvents ?? []).filter((e) => e.ph === "X" && e.cat === "compute");
  const group = ["measured", "predicted"].find((name) => slices.some((e) => isOf(e, name)));
  if (!group) {
    throw new RuleError("it holds no run of a pipeline; give a file that --trace wrote");
  }
  const own = slices.filter((e) => isOf(e, group)).sort((a, b) => a.ts - b.ts || a.dur - b.dur);
  const first = own[0].ts;
  const numRanks = 1 + Math.max(...own.map((e) => e.pid - FIRST_PID[group]));
  const lines = Array.from({ length: numRanks }, () => []);
  for (const event of own) lines[event.pid - FIRST_PID[group]].push(event);
  const orders = lines.map((line) => line.map(itemOf));
  const stages = new Set(orders.flat(1).flatMap((item) => item.parts.map((op) => op.stage)));
  const perRank = Math.max(1, Math.floor(stages.size / numRanks));
  const schedule = new Schedule(group, orders, oneChain(stages.size), perRank);
  const starts = lines.map((line) => line.map((e) => (e.ts - first) / 1000));
  const ends = lines.map((line) => line.map((e) => (e.ts + e.dur - first) / 1000));
  const c = sendingTime(schedule, starts, ends);
  return { group, schedule, starts, ends, durations: { ...meanDurations(own, lines, perRank), c } };
}

function isOf(event, group) {
  const rank = event.pid - FIRST_PID[group];
  return rank >= 0 && rank < NUM_RANKS;
}

function itemOf(event) {
  const parts = event.args.parts ?? [event.args];
  const ops = parts.map((op) => new Op(op.kind, op.stage, op.microbatch));
  return ops.length === 2 ? new Pair(...ops) : ops[0];
}

// Means of a rank's whole share, in ms, and each rank's factor on them. A backward pass that is not
// cut is halved between I and W.
function meanDurations(events, lines, perRank) {
  const mean = (kind) => {
    const own = events.filter((e) => e.args.kind === kind);
    if (!own.length) return null;
    return (own.reduce((sum, e) => sum + e.dur / 1000, 0) / own.length) * perRank;
  };
  const half = mean("B") === null ? 0 : mean("B") / 2;
  const rounded = (value) => Math.max(0.01, Math.round(value * 100) / 100);
  const busy = lines.map((line) => line.reduce((sum, e) => sum + e.dur, 0));
  const average = busy.reduce((a, b) => a + b, 0) / busy.length;
  return {
    F: rounded(mean("F") ?? 1),
    I: rounded(mean("I") ?? half),
    W: rounded(mean("W") ?? half),
    scale: busy.map((b) => rounded(b / average)),
  };
}

// Median time, in ms, from the end of an operation to the start of the one on another rank that
// takes its result in, over those that had nothing else to do (runtime/prediction.py).
function sendingTime(schedule, starts, ends) {
  const [places, wanted] = [schedule.places(), new Needs(schedule)];
  const gaps = [];
  schedule.orders.forEach((order, rank) =>
    order.forEach((item, index) => {
      for (const need of wanted.ofItem(item)) {
        const from = places.get(need);
        const sent = ends[from.rank][from.index];
        const idle = index === 0 || ends[rank][index - 1] <= sent;
        if (from.rank !== rank && idle) gaps.push(starts[rank][index] - sent);
      }
    }),
  );
  gaps.sort((a, b) => a - b);
  const middle = gaps.length / 2;
  const median = (gaps[Math.ceil(middle) - 1] + gaps[Math.floor(middle)]) / 2;
  return gaps.length ? Math.max(0, Math.round(100 * median) / 100) : 0;
}
